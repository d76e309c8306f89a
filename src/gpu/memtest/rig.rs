//! Running kernels and waiting for them: stream, events, time limit, the result words.

use std::time::Duration;

use super::ledger::Ledger;
use super::plan::{self, Stretch};
use crate::gpu::driver::{Driver, DriverError, DriverResult, EventId, StreamId};
use crate::gpu::kernels::host::{self, RECORDS, RESULT_BYTES, RESULT_CLEARED, RESULT_RECORDS, RESULT_SET};
use crate::gpu::kernels::{Kernel, Kernels, Shape};

/// Why a test cannot go on.
#[derive(Debug, Clone)]
pub(super) enum Stop {
    Driver(DriverError),
    /// Work did not end.
    Timeout {
        waited: Duration,
    },
    /// The stream was idle, but its event was never done.
    StuckEvent {
        waited: Duration,
    },
    /// The words that results are written to are not to be trusted; a finding says why.
    Broken,
    /// The time budget is spent. `busy`: work is still under way.
    Budget {
        busy: bool,
    },
}

impl From<DriverError> for Stop {
    fn from(error: DriverError) -> Self {
        Stop::Driver(error)
    }
}

/// What comparing launches counted.
#[derive(Debug, Clone)]
pub(super) struct Tally {
    pub raw: Vec<u64>,
}

impl Tally {
    pub(super) fn clean(&self) -> bool {
        self.raw.iter().all(|word| *word == 0)
    }
    pub(super) fn count(&self) -> u64 {
        self.raw.first().copied().unwrap_or(0)
    }
    pub(super) fn highest(&self) -> u64 {
        self.raw.get(1).copied().unwrap_or(0)
    }
    pub(super) fn lowest(&self) -> u64 {
        !self.raw.get(2).copied().unwrap_or(0)
    }
    fn slice(&self, from: u64, len: u64) -> &[u64] {
        self.raw.get(from as usize..(from + len) as usize).unwrap_or(&[])
    }
    /// By bit: expected 0, read 1.
    pub(super) fn set(&self) -> &[u64] {
        self.slice(RESULT_SET, 64)
    }
    /// By bit: expected 1, read 0.
    pub(super) fn cleared(&self) -> &[u64] {
        self.slice(RESULT_CLEARED, 64)
    }
    /// Address, expected, got.
    pub(super) fn records(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        self.slice(RESULT_RECORDS, 3 * self.count().min(RECORDS)).chunks_exact(3).map(|record| (record[0], record[1], record[2]))
    }
    /// What is left without one mismatch that was planted, or `None` where it is not among the records.
    pub(super) fn without(&self, planted: (u64, u64, u64)) -> Option<Tally> {
        let records: Vec<(u64, u64, u64)> = self.records().collect();
        let at = records.iter().position(|record| *record == planted)?;
        let mut raw = vec![0; self.raw.len()];
        raw[0] = self.count() - 1;
        let rest: Vec<_> = records.iter().enumerate().filter(|(number, _)| *number != at).map(|(_, record)| *record).collect();
        if raw[0] == 0 {
            return Some(Tally { raw });
        }
        // Beyond the records only the sums are known; the planted word lies between the ends then, or is one of them.
        let all = self.count() <= RECORDS;
        raw[1] = if all { rest.iter().map(|record| record.0).max().unwrap_or(0) } else { self.highest() };
        raw[2] = if all { rest.iter().map(|record| !record.0).max().unwrap_or(0) } else { !self.lowest() };
        for (first, counts) in [(RESULT_SET, self.set()), (RESULT_CLEARED, self.cleared())] {
            for (bit, count) in counts.iter().enumerate() {
                let mine = (planted.1 ^ planted.2) >> bit & 1 == 1 && (planted.2 >> bit & 1 == 1) == (first == RESULT_SET);
                raw[first as usize + bit] = count.saturating_sub(u64::from(mine));
            }
        }
        for (number, (address, expected, got)) in rest.into_iter().enumerate() {
            let place = RESULT_RECORDS as usize + 3 * number;
            raw[place..place + 3].copy_from_slice(&[address, expected, got]);
        }
        Some(Tally { raw })
    }

    /// Whether nothing lies behind the last record.
    pub(super) fn rest_is_clean(&self) -> bool {
        let used = RESULT_RECORDS + 3 * self.count().min(RECORDS);
        self.raw.get(used as usize..).is_some_and(|rest| rest.iter().all(|word| *word == 0))
    }
}

/// Events that were not done although their stream was.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Late {
    pub count: u64,
    pub longest: Duration,
}

/// Bytes of the test's own memory: [`SLOTS`] places for result words and a small field to try kernels on.
pub(super) const CONTROL_BYTES: u64 = SLOTS * SLOT_BYTES;
const SLOTS: u64 = 16;
const SLOT_BYTES: u64 = 32 << 10;
/// Words among which the mark of the read kernel lies.
const MARKED: u64 = 512;
/// Field words of a slot, after the result and the sink.
const FIELD_AT: u64 = 8 << 10;
/// How long work that was begun in time is waited for when the budget is spent.
const GRACE: Duration = Duration::from_secs(15);

pub(super) struct Rig<'a, K: Kernels> {
    pub driver: &'a Ledger<K>,
    stream: StreamId,
    start: EventId,
    end: EventId,
    pub shape: Shape,
    timeout: Duration,
    /// When the time budget is spent, by the driver's clock: nothing is begun from then on.
    pub deadline: Option<Duration>,
    control: u64,
    slot: u64,
    pub late: Late,
}

impl<'a, K: Kernels> Rig<'a, K> {
    pub(super) fn new(driver: &'a Ledger<K>, timeout: Duration) -> Result<Self, Stop> {
        let stream = driver.stream_create()?;
        let (start, end) = (driver.timed_event_create()?, driver.timed_event_create()?);
        Ok(Rig { driver, stream, start, end, shape: driver.shape(), timeout, deadline: None, control: 0, slot: 0, late: Late::default() })
    }

    /// Gives stream and events back. What of that failed.
    pub(super) fn close(&self) -> Vec<DriverError> {
        let results = [self.driver.event_destroy(self.start), self.driver.event_destroy(self.end), self.driver.stream_destroy(self.stream)];
        results.into_iter().filter_map(Result::err).collect()
    }

    /// How much of the time budget is left; `None` without one.
    pub(super) fn left(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_sub(self.driver.now()))
    }

    /// The time budget is spent.
    pub(super) fn over(&self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }

    /// Uses [`CONTROL_BYTES`] at `address` for results.
    pub(super) fn set_control(&mut self, address: u64) {
        self.control = address;
        self.slot = 0;
    }

    /// Bytes of the L2 cache; a guess above all known ones where the driver does not say.
    pub(super) fn l2(&self) -> u64 {
        if self.shape.l2_bytes == 0 { 256 << 20 } else { self.shape.l2_bytes }
    }

    pub(super) fn result(&self) -> u64 {
        self.control + self.slot * SLOT_BYTES
    }

    fn sink(&self) -> u64 {
        self.result() + FIELD_AT - 8
    }

    /// Puts the mark of the read kernel, and nothing else, into the first words of the field; `number` says where.
    pub(super) fn plant_mark(&self, number: u64) -> Result<Stretch, Stop> {
        let stretch = Stretch { words: MARKED, ..self.field() };
        // The sink lies before the field.
        let mut words = vec![0; MARKED as usize + 1];
        words[1 + (number % MARKED) as usize] = host::READ_MARK;
        self.put(self.sink(), &words)?;
        Ok(stretch)
    }

    /// What the sink and the marked words hold.
    pub(super) fn marked(&self) -> Result<Vec<u64>, Stop> {
        self.words(self.sink(), MARKED + 1)
    }

    /// A small field of the test's own.
    pub(super) fn field(&self) -> Stretch {
        Stretch { address: self.result() + FIELD_AT, words: (SLOT_BYTES - FIELD_AT) / 8, origin: 0 }
    }

    /// All of the present slot.
    pub(super) fn slot(&self) -> (u64, u64) {
        (self.result(), SLOT_BYTES)
    }

    /// Goes on to the next slot; false after the last.
    pub(super) fn next_slot(&mut self) -> bool {
        self.slot += 1;
        self.slot < SLOTS
    }

    pub(super) fn launch(&self, kernel: Kernel, words: u64, arguments: &[u64]) -> DriverResult<()> {
        self.driver.launch(&plan::launch(kernel, words, arguments, self.shape.multiprocessors), self.stream)
    }

    pub(super) fn read(&self, stretch: &Stretch) -> DriverResult<()> {
        self.launch(Kernel::Read, stretch.words, &[stretch.address, stretch.words, self.sink()])
    }

    /// Queues work and waits for it. Milliseconds that it took on the device. Nothing is queued once the budget is spent.
    pub(super) fn timed(&mut self, queue: impl FnOnce(&Self) -> DriverResult<()>) -> Result<f64, Stop> {
        if self.over() {
            return Err(Stop::Budget { busy: false });
        }
        self.driver.event_record(self.start, self.stream)?;
        queue(self)?;
        self.driver.event_record(self.end, self.stream)?;
        self.wait(self.end)?;
        self.wait(self.start)?;
        Ok(f64::from(self.driver.event_elapsed_ms(self.start, self.end)?))
    }

    /// Copies on the device in the order of the kernels.
    pub(super) fn copy(&self, to: u64, from: u64, bytes: u64) -> DriverResult<()> {
        self.driver.copy_on_device(to, from, bytes, self.stream)
    }

    fn wait(&mut self, event: EventId) -> Result<(), Stop> {
        let began = self.driver.now();
        let mut idle = None;
        let mut step = Duration::from_micros(20);
        while !self.driver.event_query(event)? {
            let now = self.driver.now();
            // Asked again after the stream was seen idle: the event cannot honestly be open then.
            if idle.is_none() && self.driver.stream_query(self.stream)? && !self.driver.event_query(event)? {
                idle = Some(now);
            }
            let waited = now.saturating_sub(began);
            if waited > self.timeout {
                return Err(if idle.is_some() { Stop::StuckEvent { waited } } else { Stop::Timeout { waited } });
            }
            // Work that was begun in time may end; for an event whose work has ended nothing is gained by waiting.
            if self.deadline.is_some_and(|deadline| now >= deadline && (idle.is_some() || now - deadline >= GRACE)) {
                self.note_late(idle);
                return Err(Stop::Budget { busy: idle.is_none() });
            }
            self.driver.pause(step);
            step = (step * 2).min(Duration::from_millis(5));
        }
        self.note_late(idle);
        Ok(())
    }

    /// `idle`: since when the stream was idle while its event was not done.
    fn note_late(&mut self, idle: Option<Duration>) {
        if let Some(idle) = idle {
            self.late.count += 1;
            self.late.longest = self.late.longest.max(self.driver.now().saturating_sub(idle));
        }
    }

    /// Zeros the result words.
    pub(super) fn reset(&mut self) -> Result<(), Stop> {
        let result = self.result();
        self.timed(|rig| rig.driver.memset_d8(result, 0, RESULT_BYTES, rig.stream))?;
        Ok(())
    }

    /// The result words; they are zero afterwards.
    pub(super) fn tally(&mut self) -> Result<Tally, Stop> {
        let tally = Tally { raw: self.words(self.result(), host::RESULT_WORDS)? };
        if !tally.clean() {
            self.reset()?;
        }
        Ok(tally)
    }

    /// Words as the host reads them.
    pub(super) fn words(&self, address: u64, words: u64) -> Result<Vec<u64>, Stop> {
        let mut bytes = vec![0; 8 * words as usize];
        self.driver.copy_to_host(&mut bytes, address)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    pub(super) fn word(&self, address: u64) -> Result<u64, Stop> {
        Ok(self.words(address, 1)?.first().copied().unwrap_or(0))
    }

    pub(super) fn put(&self, address: u64, words: &[u64]) -> Result<(), Stop> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Ok(self.driver.copy_to_device(address, &bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Plain(Vec<u64>);

    impl host::Memory for Plain {
        fn load(&mut self, address: u64) -> u64 {
            self.0[(address / 8) as usize]
        }
        fn store(&mut self, address: u64, value: u64) {
            self.0[(address / 8) as usize] = value;
        }
    }

    fn tally(wrong: &[(u64, u64, u64)]) -> Tally {
        let mut memory = Plain(vec![0; host::RESULT_WORDS as usize]);
        for (address, expected, got) in wrong {
            host::note_mismatch(&mut memory, 0, *address, *expected, *got);
        }
        Tally { raw: memory.0 }
    }

    #[test]
    fn what_was_planted_is_taken_out_of_what_was_counted() {
        let wrong = [(0x80, 5, 4), (0x100, 0xF0, 0xF1), (0x40, 7, 3)];
        for at in 0..3 {
            let rest: Vec<_> = (0..3).filter(|number| *number != at).map(|number| wrong[number]).collect();
            assert_eq!(tally(&wrong).without(wrong[at]).map(|tally| tally.raw), Some(tally(&rest).raw), "{at}");
        }
        assert!(tally(&wrong[..1]).without(wrong[0]).is_some_and(|tally| tally.clean()));
        assert!(tally(&wrong).without((0x80, 5, 6)).is_none() && tally(&[]).without(wrong[0]).is_none());
        let many: Vec<_> = (0..2 * RECORDS).map(|at| (8 * at, 0, 1)).collect();
        let rest = tally(&many).without(many[3]).expect("it is among the records");
        assert_eq!(
            (rest.count(), rest.set()[0], rest.lowest(), rest.highest()),
            (2 * RECORDS - 1, 2 * RECORDS - 1, 0, 8 * (2 * RECORDS - 1))
        );
    }
}
