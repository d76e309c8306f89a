//! A GPU in host memory: real bytes behind device addresses, and faults on demand.
//!
//! * Physical memory is made of 2 MiB granules with addresses of their own. Address space is separate from it: two
//!   addresses may map the same memory. Host memory is used only for the 16 KiB chunks that were written otherwise than by
//!   a fill or a kernel, so a card of 141 GiB costs next to nothing. Memory never written reads as `0xCD`.
//! * An access must stay inside one allocation, or inside mapped and accessible pages; anything else fails with
//!   `CUDA_ERROR_ILLEGAL_ADDRESS`.
//! * Streams run on a virtual clock: [`SimGpu::work`] queues work, [`SimGpu::advance`] lets time pass, and an event is
//!   done when the work before it is. Data moves at once, in the order of the calls.
//! * Every fault is deterministic: see [`SimGpu::fail`], [`SimGpu::fail_randomly`], [`SimGpu::limit_memory`],
//!   [`SimGpu::stick`], [`SimGpu::alias`], [`SimGpu::break_at_launch`], [`SimGpu::delay_events`].

mod memory;

use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{cmp::Reverse, ops::Bound};

use super::{Call, DeviceProperties, Driver, DriverError, DriverResult, EventId, MemHandle, MemInfo, StreamId, code};
use crate::gpu::kernels::host::{self, Pattern};
use crate::gpu::kernels::{Kernel, Kernels, Launch, Shape};
use memory::{CHUNK, Memory, Rule};

const LOWEST: u64 = 1 << 36;
const HIGHEST: u64 = 1 << 46;

/// In which order the driver hands out addresses. Ties of the allocator depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AddressOrder {
    /// Each address above all earlier ones.
    #[default]
    Ascending,
    /// Each address below all earlier ones.
    Descending,
    /// The lowest gap that fits, so that freed addresses come again.
    FirstFit,
    /// Scattered, by a seed.
    Shuffled(u64),
}

/// What to simulate.
#[derive(Debug, Clone)]
pub struct SimConfig {
    pub name: String,
    pub ordinal: u32,
    /// Bytes of memory; rounded down to the granularity.
    pub capacity: u64,
    /// Bytes of a granule: a power of two, at least 64 KiB.
    pub granularity: u64,
    pub order: AddressOrder,
    /// Bytes held by contexts and other processes.
    pub others: u64,
    /// Whether virtual memory management works.
    pub virtual_memory: bool,
}

impl SimConfig {
    /// A card with `capacity` bytes and nothing on it.
    pub fn new(capacity: u64) -> Self {
        SimConfig {
            name: "simulated GPU".to_owned(),
            ordinal: 0,
            capacity,
            granularity: 2 << 20,
            order: AddressOrder::default(),
            others: 0,
            virtual_memory: true,
        }
    }
}

/// How memory breaks. Addresses are *physical*.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryFault {
    /// The bits of `mask` of a byte always read as in `value`.
    Stick { physical: u64, mask: u8, value: u8 },
    /// The bits of `mask` of a byte are flipped, once.
    Flip { physical: u64, mask: u8 },
    /// The next read of a byte gets the bits of `mask` wrong; what is stored stays right.
    Misread { physical: u64, mask: u8 },
    /// A granule is answered by the memory of another.
    Alias { from: u32, to: u32 },
    /// Memory is gone: nobody has it, and it does not come back.
    Gone { bytes: u64 },
}

/// When planned faults come.
#[derive(Debug, Clone, Copy)]
enum When {
    /// At the launch of this number.
    Launch(u64),
    /// After this many comparisons of the place.
    Check(u64),
}

/// What is alive on a simulated GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SimUsage {
    /// From [`Driver::mem_alloc`].
    pub allocations: usize,
    /// Physical bytes in use, by allocations and handles.
    pub bytes: u64,
    /// Handles not released or still mapped.
    pub handles: usize,
    pub mappings: usize,
    pub reservations: usize,
    /// Without the default stream.
    pub streams: usize,
    pub events: usize,
    /// Host bytes behind it.
    pub host_bytes: u64,
}

#[derive(Debug)]
struct Physical {
    granules: Vec<u32>,
    /// Uses: one for an unreleased handle or allocation, and one a mapping.
    uses: u32,
    released: bool,
}

#[derive(Debug, Clone, Copy)]
struct Mapping {
    size: u64,
    physical: u64,
    accessible: bool,
    /// Made by `mem_alloc`: an access must not leave it.
    whole: bool,
}

#[derive(Debug)]
struct Fault {
    call: Call,
    /// Calls still to let pass.
    skip: u64,
    code: u32,
    forever: bool,
}

#[derive(Debug)]
struct State {
    config: SimConfig,
    memory: Memory,
    next_granule: u32,
    spare_granules: BinaryHeap<Reverse<u32>>,
    used: u64,
    physicals: HashMap<u64, Physical>,
    next_handle: u64,
    mappings: BTreeMap<u64, Mapping>,
    reservations: BTreeMap<u64, u64>,
    /// Address space in use: start to end.
    spans: BTreeMap<u64, u64>,
    low: u64,
    high: u64,
    random: u64,
    clock: u64,
    /// Time at which each stream is idle.
    streams: HashMap<u64, u64>,
    next_stream: u64,
    /// Time at which each event is done.
    events: HashMap<u64, u64>,
    next_event: u64,
    event_delay: u64,
    calls: HashMap<Call, u64>,
    faults: Vec<Fault>,
    /// State and odds (one in) of random failures.
    random_faults: Option<(u64, u64)>,
    injected: u64,
    memory_limit: Option<u64>,
    address_limit: Option<u64>,
    /// Physical byte to (mask, value).
    stuck: BTreeMap<u64, (u8, u8)>,
    /// Granule to the granule whose memory answers for it.
    aliases: HashMap<u32, u32>,
    /// Physical byte to the bits that the next read gets wrong.
    misreads: BTreeMap<u64, u8>,
    /// Memory that breaks later.
    planned: Vec<(When, MemoryFault)>,
    /// Whether the kernels were loaded.
    module: bool,
}

/// A handle to a simulated GPU; clones are the same device.
#[derive(Debug, Clone)]
pub struct SimGpu(Arc<Mutex<State>>);

fn step(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

impl SimGpu {
    /// A card with `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        Self::with(SimConfig::new(capacity))
    }

    /// A card as configured. A granularity that is no power of two of at least 64 KiB is raised to the next one.
    pub fn with(mut config: SimConfig) -> Self {
        config.granularity = config.granularity.max(64 << 10).next_power_of_two();
        config.capacity -= config.capacity % config.granularity;
        let random = match config.order {
            AddressOrder::Shuffled(seed) => seed,
            _ => 0,
        };
        SimGpu(Arc::new(Mutex::new(State {
            memory: Memory::new(config.granularity),
            config,
            next_granule: 0,
            spare_granules: BinaryHeap::new(),
            used: 0,
            physicals: HashMap::new(),
            next_handle: 1,
            mappings: BTreeMap::new(),
            reservations: BTreeMap::new(),
            spans: BTreeMap::new(),
            low: LOWEST,
            high: HIGHEST,
            random,
            clock: 0,
            streams: HashMap::from([(0, 0)]),
            next_stream: 1,
            events: HashMap::new(),
            next_event: 1,
            event_delay: 0,
            calls: HashMap::new(),
            faults: Vec::new(),
            random_faults: None,
            injected: 0,
            memory_limit: None,
            address_limit: None,
            stuck: BTreeMap::new(),
            aliases: HashMap::new(),
            misreads: BTreeMap::new(),
            planned: Vec::new(),
            module: false,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, for a call that may be made to fail.
    fn enter(&self, call: Call) -> DriverResult<MutexGuard<'_, State>> {
        let mut state = self.state();
        *state.calls.entry(call).or_default() += 1;
        match state.injected_fault(call) {
            Some(code) => Err(DriverError::new(call, code)),
            None => Ok(state),
        }
    }

    // ---- time -----------------------------------------------------------------------------------------------------

    /// Queues work of `duration` on `stream`. A stream that does not exist is ignored.
    pub fn work(&self, stream: StreamId, duration: u64) {
        let mut state = self.state();
        let clock = state.clock;
        if let Some(until) = state.streams.get_mut(&stream.0) {
            *until = (*until).max(clock) + duration;
        }
    }

    /// Lets `duration` pass.
    pub fn advance(&self, duration: u64) {
        let mut state = self.state();
        state.clock = state.clock.saturating_add(duration);
    }

    /// Every event recorded from now on is done `duration` after the work before it.
    pub fn delay_events(&self, duration: u64) {
        self.state().event_delay = duration;
    }

    // ---- faults ---------------------------------------------------------------------------------------------------

    /// The `nth` next call of this kind (1 is the next one) fails with `code`, once.
    pub fn fail(&self, call: Call, nth: u64, code: u32) {
        self.state().faults.push(Fault { call, skip: nth.saturating_sub(1), code, forever: false });
    }

    /// Every call of this kind from the `nth` next one on fails with `code`, until [`heal`](Self::heal).
    pub fn fail_from(&self, call: Call, nth: u64, code: u32) {
        self.state().faults.push(Fault { call, skip: nth.saturating_sub(1), code, forever: true });
    }

    /// One call in `odds`, by a seed, fails: with out of memory where memory is taken, else with code 999. Copies, fills
    /// and questions about memory are spared.
    pub fn fail_randomly(&self, seed: u64, odds: u64) {
        self.state().random_faults = Some((seed, odds.max(1)));
    }

    /// Ends all faults of calls, memory and events. Stuck bits and aliases stay.
    pub fn heal(&self) {
        let mut state = self.state();
        state.faults.clear();
        state.random_faults = None;
        state.memory_limit = None;
        state.address_limit = None;
        state.event_delay = 0;
    }

    /// Calls failed on purpose so far.
    pub fn injected_faults(&self) -> u64 {
        self.state().injected
    }

    /// Out of memory once `bytes` are in use, whatever the capacity.
    pub fn limit_memory(&self, bytes: u64) {
        self.state().memory_limit = Some(bytes);
    }

    /// Address space runs out once `bytes` are reserved.
    pub fn limit_addresses(&self, bytes: u64) {
        self.state().address_limit = Some(bytes);
    }

    /// Sets what contexts and other processes hold.
    pub fn set_others(&self, bytes: u64) {
        self.state().config.others = bytes;
    }

    /// The bits of `mask` of the byte at a *physical* address always read as in `value`.
    pub fn stick(&self, physical: u64, mask: u8, value: u8) {
        self.state().break_memory(MemoryFault::Stick { physical, mask, value });
    }

    /// Flips the bits of `mask` of the byte at a *physical* address, once.
    pub fn flip(&self, physical: u64, mask: u8) {
        self.state().break_memory(MemoryFault::Flip { physical, mask });
    }

    /// Granule `from` is answered by the memory of granule `to`: a broken address line.
    pub fn alias(&self, from: u32, to: u32) {
        self.state().break_memory(MemoryFault::Alias { from, to });
    }

    /// Memory breaks just before the `nth` next launch of a kernel (1 is the next one).
    pub fn break_at_launch(&self, nth: u64, fault: MemoryFault) {
        let mut state = self.state();
        let launch = state.calls.get(&Call::LaunchKernel).copied().unwrap_or(0) + nth.max(1);
        state.planned.push((When::Launch(launch), fault));
    }

    /// Memory breaks just before a kernel compares it for the `nth` next time (1 is the next one), so that the fault is seen. An
    /// alias is planted when its `from` is compared.
    pub fn break_at_check(&self, nth: u64, fault: MemoryFault) {
        self.state().planned.push((When::Check(nth.max(1)), fault));
    }

    // ---- looking --------------------------------------------------------------------------------------------------

    /// The physical address behind a device address.
    pub fn physical_address(&self, address: u64) -> Option<u64> {
        self.state().physical(address)
    }

    /// How often a call was made.
    pub fn calls(&self, call: Call) -> u64 {
        self.state().calls.get(&call).copied().unwrap_or(0)
    }

    /// What is alive.
    pub fn usage(&self) -> SimUsage {
        let state = self.state();
        SimUsage {
            allocations: state.mappings.values().filter(|mapping| mapping.whole).count(),
            bytes: state.used,
            handles: state.physicals.len() - state.mappings.values().filter(|mapping| mapping.whole).count(),
            mappings: state.mappings.values().filter(|mapping| !mapping.whole).count(),
            reservations: state.reservations.len(),
            streams: state.streams.len() - 1,
            events: state.events.len(),
            host_bytes: state.memory.held(),
        }
    }
}

impl State {
    fn injected_fault(&mut self, call: Call) -> Option<u32> {
        let mut hit = None;
        for (at, fault) in self.faults.iter_mut().enumerate().filter(|(_, fault)| fault.call == call) {
            if fault.skip > 0 {
                fault.skip -= 1;
            } else if hit.is_none() {
                hit = Some((at, fault.code, fault.forever));
            }
        }
        if let Some((at, code, forever)) = hit {
            if !forever {
                self.faults.remove(at);
            }
            self.injected += 1;
            return Some(code);
        }
        if matches!(call, Call::MemGetInfo | Call::MemcpyHtoD | Call::MemcpyDtoH | Call::MemcpyDtoD | Call::MemsetD8 | Call::MemsetD32) {
            return None;
        }
        let (state, odds) = self.random_faults.as_mut()?;
        if !step(state).is_multiple_of(*odds) {
            return None;
        }
        self.injected += 1;
        Some(match call {
            Call::MemAlloc | Call::MemCreate | Call::MemAddressReserve => code::OUT_OF_MEMORY,
            _ => code::UNKNOWN,
        })
    }

    fn room(&self, bytes: u64) -> bool {
        let limit = self.memory_limit.unwrap_or(u64::MAX).min(self.config.capacity.saturating_sub(self.config.others));
        bytes <= limit && self.used <= limit - bytes
    }

    fn take_granules(&mut self, bytes: u64) -> Physical {
        let count = bytes / self.config.granularity;
        let granules = (0..count)
            .map(|_| {
                self.spare_granules.pop().map_or_else(
                    || {
                        self.next_granule += 1;
                        self.next_granule - 1
                    },
                    |Reverse(granule)| granule,
                )
            })
            .collect();
        self.used += bytes;
        Physical { granules, uses: 1, released: false }
    }

    /// Drops one use of physical memory; the last one gives it back.
    fn drop_use(&mut self, physical: u64) {
        let Some(memory) = self.physicals.get_mut(&physical) else { return };
        memory.uses -= 1;
        if memory.uses > 0 {
            return;
        }
        if let Some(memory) = self.physicals.remove(&physical) {
            self.used -= memory.granules.len() as u64 * self.config.granularity;
            for granule in memory.granules {
                self.memory.forget(granule);
                self.spare_granules.push(Reverse(granule));
            }
        }
    }

    /// Finds address space.
    fn place(&mut self, bytes: u64) -> Option<u64> {
        let unit = self.config.granularity;
        let at = match self.config.order {
            AddressOrder::Ascending => {
                let at = self.low;
                self.low = at.checked_add(bytes).filter(|end| *end <= HIGHEST)?;
                at
            }
            AddressOrder::Descending => {
                self.high = self.high.checked_sub(bytes).filter(|at| *at >= LOWEST)?;
                self.high
            }
            AddressOrder::FirstFit => {
                let mut at = LOWEST;
                for (start, end) in &self.spans {
                    if start - at >= bytes {
                        break;
                    }
                    at = *end;
                }
                if at + bytes > HIGHEST {
                    return None;
                }
                at
            }
            AddressOrder::Shuffled(_) => {
                let slots = (HIGHEST - LOWEST).checked_sub(bytes)? / unit;
                (0..1000).find_map(|_| {
                    let at = LOWEST + step(&mut self.random) % slots.max(1) * unit;
                    let before = self.spans.range(..at + bytes).next_back();
                    before.is_none_or(|(_, end)| *end <= at).then_some(at)
                })?
            }
        };
        self.spans.insert(at, at + bytes);
        Some(at)
    }

    fn map(&mut self, address: u64, mapping: Mapping) {
        self.mappings.insert(address, mapping);
    }

    fn physical(&self, address: u64) -> Option<u64> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        let offset = address - start;
        if offset >= mapping.size {
            return None;
        }
        let granules = &self.physicals.get(&mapping.physical)?.granules;
        let granule = *granules.get((offset / self.config.granularity) as usize)?;
        let granule = self.aliases.get(&granule).copied().unwrap_or(granule);
        Some(u64::from(granule) * self.config.granularity + offset % self.config.granularity)
    }

    /// Whether an access to the range is allowed.
    fn accessible(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let mut at = address;
        while at < end {
            match self.mappings.range(..=at).next_back() {
                Some((start, mapping)) if at - start < mapping.size && mapping.accessible => {
                    if mapping.whole {
                        return end <= start + mapping.size;
                    }
                    at = start + mapping.size;
                }
                _ => return false,
            }
        }
        true
    }

    /// The physical start, the offset and the length of every piece of a range that lies in one granule.
    fn pieces(&self, address: u64, bytes: u64) -> Vec<(u64, u64, u64)> {
        let (mut at, mut pieces) = (0, Vec::new());
        while at < bytes {
            let Some(physical) = self.physical(address + at) else { break };
            let len = (self.config.granularity - physical % self.config.granularity).min(bytes - at);
            pieces.push((physical, at, len));
            at += len;
        }
        pieces
    }

    fn write(&mut self, address: u64, data: &[u8]) {
        for (physical, from, len) in self.pieces(address, data.len() as u64) {
            self.memory.write(physical, &data[from as usize..(from + len) as usize]);
        }
    }

    fn read(&mut self, address: u64, data: &mut [u8]) {
        for (physical, from, len) in self.pieces(address, data.len() as u64) {
            self.read_physical(physical, &mut data[from as usize..(from + len) as usize]);
        }
    }

    fn read_physical(&mut self, physical: u64, target: &mut [u8]) {
        self.memory.read(physical, target);
        let range = physical..physical + target.len() as u64;
        for (byte, (mask, value)) in self.stuck.range(range.clone()) {
            let byte = &mut target[(byte - physical) as usize];
            *byte = *byte & !mask | value & mask;
        }
        while let Some((byte, mask)) = self.misreads.range(range.clone()).next().map(|(byte, mask)| (*byte, *mask)) {
            self.misreads.remove(&byte);
            target[(byte - physical) as usize] ^= mask;
        }
    }

    fn fill(&mut self, address: u64, bytes: u64, pattern: [u8; 4]) {
        for (physical, from, len) in self.pieces(address, bytes) {
            if physical.is_multiple_of(8) && len.is_multiple_of(8) && from.is_multiple_of(4) {
                let [a, b, c, d] = pattern;
                let word = u64::from_le_bytes([a, b, c, d, a, b, c, d]);
                self.memory.fill(physical, len, Rule::new(Pattern::Constant as u64, 0, 0, word, 0));
            } else {
                let data: Vec<u8> = (0..len).map(|at| pattern[((from + at) % 4) as usize]).collect();
                self.memory.write(physical, &data);
            }
        }
    }

    fn break_memory(&mut self, fault: MemoryFault) {
        match fault {
            MemoryFault::Stick { physical, mask, value } => {
                self.stuck.insert(physical, (mask, value));
            }
            MemoryFault::Flip { physical, mask } => *self.memory.byte(physical) ^= mask,
            MemoryFault::Misread { physical, mask } => {
                self.misreads.insert(physical, mask);
            }
            MemoryFault::Alias { from, to } => {
                self.aliases.insert(from, to);
            }
            MemoryFault::Gone { bytes } => self.config.others += bytes,
        }
    }

    /// Whether a physical range does not read as it is stored.
    fn faulty(&self, range: std::ops::Range<u64>) -> bool {
        self.stuck.range(range.clone()).next().is_some() || self.misreads.range(range).next().is_some()
    }

    /// Plants the faults that were planned for this launch.
    fn break_what_is_due(&mut self, launch: &Launch) {
        if self.planned.is_empty() {
            return;
        }
        let number = self.calls.get(&Call::LaunchKernel).copied().unwrap_or(0);
        // Not by residue: that looks at a few words only.
        let compares = matches!(launch.kernel, Kernel::Verify | Kernel::VerifyWrite);
        let (base, words) = (launch.arguments()[0], launch.arguments()[1]);
        let pieces = if compares { self.pieces(base, 8 * words) } else { Vec::new() };
        let unit = self.config.granularity;
        for (mut when, fault) in std::mem::take(&mut self.planned) {
            let place = match fault {
                MemoryFault::Stick { physical, .. } | MemoryFault::Flip { physical, .. } | MemoryFault::Misread { physical, .. } => {
                    physical
                }
                MemoryFault::Alias { from, .. } => u64::from(from) * unit,
                MemoryFault::Gone { .. } => 0,
            };
            let due = match &mut when {
                When::Launch(launch) => *launch <= number,
                When::Check(left) => {
                    *left -= u64::from(pieces.iter().any(|(start, _, len)| (*start..start + len).contains(&place)));
                    *left == 0
                }
            };
            if due {
                self.break_memory(fault);
            } else {
                self.planned.push((when, fault));
            }
        }
    }

    /// Compares words with `expected` and then, if asked to, makes them follow `next`.
    fn compare(&mut self, base: u64, words: u64, expected: Rule, result: u64, next: Option<Rule>, descending: bool) {
        let mut pieces = self.pieces(base, 8 * words);
        if descending {
            pieces.reverse();
        }
        for (physical, from, len) in pieces {
            let rule = expected.after(from);
            if self.faulty(physical..physical + len) || !self.memory.follows(physical, len, rule) {
                let mut buffer = vec![0; CHUNK as usize];
                let mut noted: Option<Noted> = None;
                let mut starts: Vec<u64> = (0..len).step_by(CHUNK as usize).collect();
                if descending {
                    starts.reverse();
                }
                for at in starts {
                    let (piece, rule) = (CHUNK.min(len - at), rule.after(at));
                    let start = physical + at;
                    if !self.faulty(start..start + piece) && self.memory.follows(start, piece, rule) {
                        continue;
                    }
                    let buffer = &mut buffer[..piece as usize];
                    self.read_physical(start, buffer);
                    let count = piece / 8;
                    for step in 0..count {
                        let number = if descending { count - 1 - step } else { step };
                        let mut bytes = [0; 8];
                        bytes.copy_from_slice(&buffer[8 * number as usize..8 * number as usize + 8]);
                        let (expected, got) = (rule.word(number), u64::from_le_bytes(bytes));
                        if expected != got {
                            let noted = noted.get_or_insert_with(|| Noted::load(self, result));
                            host::note_mismatch(noted, result, base + from + at + 8 * number, expected, got);
                        }
                    }
                }
                if let Some(noted) = noted {
                    self.write(result, &noted.words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>());
                }
            }
            if let Some(next) = next {
                self.memory.fill(physical, len, next.after(from));
            }
        }
    }

    /// What [`host::run`] does, without touching words whose rule is known.
    fn run(&mut self, launch: &Launch) {
        let a = launch.arguments();
        match launch.kernel {
            Kernel::Fill => {
                let rule = Rule::new(a[3], a[0], a[2], a[4], a[5]);
                for (physical, from, len) in self.pieces(a[0], 8 * a[1]) {
                    self.memory.fill(physical, len, rule.after(from));
                }
            }
            Kernel::Verify => self.compare(a[0], a[1], Rule::new(a[3], a[0], a[2], a[4], a[5]), a[6], None, false),
            Kernel::VerifyWrite => {
                let next = Rule::new(a[7], a[0], a[2], a[8], a[9]);
                self.compare(a[0], a[1], Rule::new(a[3], a[0], a[2], a[4], a[5]), a[6], Some(next), a[10] != 0);
            }
            Kernel::Copy => self.copy(a[0], a[1], 8 * a[2]),
            // Nothing can come of a large read: the mark is only put into small ones.
            Kernel::Read if a[1] > MOST_MARKED => {}
            Kernel::Read => host::run(launch, &mut Words(self)),
            Kernel::ModuloFill | Kernel::ModuloVerify => self.modulo(launch),
        }
    }

    fn modulo(&mut self, launch: &Launch) {
        let a = launch.arguments();
        // Numbers that are no rule, and memory that is none, word by word.
        let ruled = (1..1 << 32).contains(&a[3]) && a[4] < a[3];
        for (physical, from, len) in self.pieces(a[0], 8 * a[1]) {
            let whole = ruled && self.memory.rule(physical, len).is_some();
            let step = if whole { len } else { CHUNK - physical % CHUNK };
            let mut at = 0;
            let mut piece = step.min(len);
            while at < len {
                let (start, index) = (physical + at, a[2].wrapping_add((from + at) / 8));
                let rule = self.memory.rule(start, piece).filter(|_| ruled);
                let done = match launch.kernel {
                    Kernel::ModuloFill => match rule.and_then(|rule| rule.with_residue(index, a[3], a[4], a[5], a[6] != 0)) {
                        Some(rule) => {
                            self.memory.fill(start, piece, rule);
                            true
                        }
                        None => false,
                    },
                    _ => !self.faulty(start..start + piece) && rule.is_some_and(|rule| rule.holds_residue(index, a[3], a[4], a[5])),
                };
                if !done {
                    let arguments = [a[0] + from + at, piece / 8, index, a[3], a[4], a[5], a[6]];
                    host::run(&Launch::new(launch.kernel, launch.grid, launch.block, &arguments), &mut Words(self));
                }
                at += piece;
                piece = CHUNK.min(len - at);
            }
        }
    }

    fn copy(&mut self, to: u64, from: u64, bytes: u64) {
        let unit = self.config.granularity;
        let mut buffer = vec![0; CHUNK.min(bytes) as usize];
        let mut at = 0;
        while at < bytes {
            let (Some(target), Some(source)) = (self.physical(to + at), self.physical(from + at)) else { return };
            let len = (unit - target % unit).min(unit - source % unit).min(bytes - at);
            let faulty = self.faulty(source..source + len);
            let mut done = 0;
            while done < len {
                let copied = if faulty { 0 } else { self.memory.copy(target + done, source + done, len - done) };
                if copied > 0 {
                    done += copied;
                    continue;
                }
                // To the end of a chunk of the source: what follows may be a rule again.
                let piece = (CHUNK - (source + done) % CHUNK).min(len - done);
                let buffer = &mut buffer[..piece as usize];
                self.read_physical(source + done, buffer);
                self.memory.write(target + done, buffer);
                done += piece;
            }
            at += len;
        }
    }

    fn idle_at(&self) -> u64 {
        self.streams.values().copied().max().unwrap_or(0)
    }
}

fn ensure(call: Call, holds: bool, code: u32) -> DriverResult<()> {
    if holds { Ok(()) } else { Err(DriverError::new(call, code)) }
}

impl Driver for SimGpu {
    fn properties(&self) -> DeviceProperties {
        let state = self.state();
        DeviceProperties {
            name: state.config.name.clone(),
            ordinal: state.config.ordinal,
            total_memory: state.config.capacity,
            compute_capability: (9, 0),
            virtual_memory: state.config.virtual_memory,
            gpu_direct_rdma_vmm: false,
        }
    }

    fn mem_get_info(&self) -> DriverResult<MemInfo> {
        let state = self.enter(Call::MemGetInfo)?;
        let total = state.config.capacity;
        Ok(MemInfo { free: total.saturating_sub(state.config.others).saturating_sub(state.used), total })
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<u64> {
        let call = Call::MemAlloc;
        let mut state = self.enter(call)?;
        ensure(call, bytes > 0, code::INVALID_VALUE)?;
        let size = bytes.checked_next_multiple_of(state.config.granularity).unwrap_or(u64::MAX);
        ensure(call, state.room(size), code::OUT_OF_MEMORY)?;
        let address = state.place(size).ok_or(DriverError::new(call, code::OUT_OF_MEMORY))?;
        let memory = state.take_granules(size);
        let handle = state.next_handle;
        state.next_handle += 1;
        state.physicals.insert(handle, memory);
        state.map(address, Mapping { size: bytes, physical: handle, accessible: true, whole: true });
        Ok(address)
    }

    fn mem_free(&self, address: u64) -> DriverResult<()> {
        let call = Call::MemFree;
        let mut state = self.enter(call)?;
        let mapping = state.mappings.get(&address).copied().filter(|mapping| mapping.whole);
        let mapping = mapping.ok_or(DriverError::new(call, code::INVALID_VALUE))?;
        // Like the real call, it waits for the device.
        state.clock = state.clock.max(state.idle_at());
        state.mappings.remove(&address);
        state.spans.remove(&address);
        state.drop_use(mapping.physical);
        Ok(())
    }

    fn copy_to_device(&self, to: u64, from: &[u8]) -> DriverResult<()> {
        let mut state = self.enter(Call::MemcpyHtoD)?;
        ensure(Call::MemcpyHtoD, state.accessible(to, from.len() as u64), code::ILLEGAL_ADDRESS)?;
        state.write(to, from);
        Ok(())
    }

    fn copy_to_host(&self, to: &mut [u8], from: u64) -> DriverResult<()> {
        let mut state = self.enter(Call::MemcpyDtoH)?;
        ensure(Call::MemcpyDtoH, state.accessible(from, to.len() as u64), code::ILLEGAL_ADDRESS)?;
        state.read(from, to);
        Ok(())
    }

    fn copy_on_device(&self, to: u64, from: u64, bytes: u64, stream: StreamId) -> DriverResult<()> {
        let call = Call::MemcpyDtoD;
        let mut state = self.enter(call)?;
        ensure(call, state.streams.contains_key(&stream.0), code::INVALID_HANDLE)?;
        ensure(call, state.accessible(to, bytes) && state.accessible(from, bytes), code::ILLEGAL_ADDRESS)?;
        ensure(call, to.abs_diff(from) >= bytes, code::INVALID_VALUE)?;
        state.copy(to, from, bytes);
        Ok(())
    }

    fn memset_d8(&self, to: u64, value: u8, count: u64, stream: StreamId) -> DriverResult<()> {
        let call = Call::MemsetD8;
        let mut state = self.enter(call)?;
        ensure(call, state.streams.contains_key(&stream.0), code::INVALID_HANDLE)?;
        ensure(call, state.accessible(to, count), code::ILLEGAL_ADDRESS)?;
        state.fill(to, count, [value; 4]);
        Ok(())
    }

    fn memset_d32(&self, to: u64, value: u32, count: u64, stream: StreamId) -> DriverResult<()> {
        let call = Call::MemsetD32;
        let mut state = self.enter(call)?;
        ensure(call, state.streams.contains_key(&stream.0), code::INVALID_HANDLE)?;
        let bytes = count.checked_mul(4).filter(|_| to.is_multiple_of(4)).ok_or(DriverError::new(call, code::INVALID_VALUE))?;
        ensure(call, state.accessible(to, bytes), code::ILLEGAL_ADDRESS)?;
        state.fill(to, bytes, value.to_ne_bytes());
        Ok(())
    }

    fn granularity(&self) -> DriverResult<u64> {
        let state = self.enter(Call::MemGetAllocationGranularity)?;
        ensure(Call::MemGetAllocationGranularity, state.config.virtual_memory, code::NOT_SUPPORTED)?;
        Ok(state.config.granularity)
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<u64> {
        let call = Call::MemAddressReserve;
        let mut state = self.enter(call)?;
        ensure(call, state.config.virtual_memory, code::NOT_SUPPORTED)?;
        ensure(call, bytes > 0 && bytes.is_multiple_of(state.config.granularity), code::INVALID_VALUE)?;
        let reserved: u64 = state.reservations.values().sum();
        ensure(call, state.address_limit.is_none_or(|limit| reserved.saturating_add(bytes) <= limit), code::OUT_OF_MEMORY)?;
        let address = state.place(bytes).ok_or(DriverError::new(call, code::OUT_OF_MEMORY))?;
        state.reservations.insert(address, bytes);
        Ok(address)
    }

    fn address_free(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let call = Call::MemAddressFree;
        let mut state = self.enter(call)?;
        ensure(call, state.reservations.get(&address) == Some(&bytes), code::INVALID_VALUE)?;
        ensure(call, state.mappings.range(address..address + bytes).next().is_none(), code::INVALID_VALUE)?;
        state.reservations.remove(&address);
        state.spans.remove(&address);
        Ok(())
    }

    fn mem_create(&self, bytes: u64) -> DriverResult<MemHandle> {
        let call = Call::MemCreate;
        let mut state = self.enter(call)?;
        ensure(call, state.config.virtual_memory, code::NOT_SUPPORTED)?;
        ensure(call, bytes > 0 && bytes.is_multiple_of(state.config.granularity), code::INVALID_VALUE)?;
        ensure(call, state.room(bytes), code::OUT_OF_MEMORY)?;
        let memory = state.take_granules(bytes);
        let handle = state.next_handle;
        state.next_handle += 1;
        state.physicals.insert(handle, memory);
        Ok(MemHandle(handle))
    }

    fn mem_release(&self, handle: MemHandle) -> DriverResult<()> {
        let call = Call::MemRelease;
        let mut state = self.enter(call)?;
        let whole = state.mappings.values().any(|mapping| mapping.whole && mapping.physical == handle.0);
        let memory = state.physicals.get_mut(&handle.0).filter(|memory| !memory.released && !whole);
        let memory = memory.ok_or(DriverError::new(call, code::INVALID_VALUE))?;
        memory.released = true;
        state.drop_use(handle.0);
        Ok(())
    }

    fn mem_map(&self, address: u64, bytes: u64, handle: MemHandle) -> DriverResult<()> {
        let call = Call::MemMap;
        let mut state = self.enter(call)?;
        let unit = state.config.granularity;
        let end = address.checked_add(bytes).ok_or(DriverError::new(call, code::INVALID_VALUE))?;
        let inside = state.reservations.range(..=address).next_back().is_some_and(|(start, size)| end <= start + size);
        ensure(call, inside && address.is_multiple_of(unit), code::INVALID_VALUE)?;
        let size = state.physicals.get(&handle.0).filter(|memory| !memory.released).map(|memory| memory.granules.len() as u64 * unit);
        ensure(call, size == Some(bytes), code::INVALID_VALUE)?;
        let before = state.mappings.range((Bound::Unbounded, Bound::Excluded(end))).next_back();
        ensure(call, before.is_none_or(|(start, mapping)| start + mapping.size <= address), code::ALREADY_MAPPED)?;
        if let Some(memory) = state.physicals.get_mut(&handle.0) {
            memory.uses += 1;
        }
        state.map(address, Mapping { size: bytes, physical: handle.0, accessible: false, whole: false });
        Ok(())
    }

    fn mem_unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let call = Call::MemUnmap;
        let mut state = self.enter(call)?;
        let covered: Vec<(u64, Mapping)> =
            state.mappings.range(address..address.saturating_add(bytes)).map(|(start, mapping)| (*start, *mapping)).collect();
        let sum: u64 = covered.iter().map(|(_, mapping)| mapping.size).sum();
        ensure(call, bytes > 0 && sum == bytes && covered.iter().all(|(_, mapping)| !mapping.whole), code::INVALID_VALUE)?;
        for (start, mapping) in covered {
            state.mappings.remove(&start);
            state.drop_use(mapping.physical);
        }
        Ok(())
    }

    fn mem_set_access(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let call = Call::MemSetAccess;
        let mut state = self.enter(call)?;
        let sum: u64 = state.mappings.range(address..address.saturating_add(bytes)).map(|(_, mapping)| mapping.size).sum();
        ensure(call, bytes > 0 && sum == bytes, code::INVALID_VALUE)?;
        for (_, mapping) in state.mappings.range_mut(address..address + bytes) {
            mapping.accessible = true;
        }
        Ok(())
    }

    fn stream_create(&self) -> DriverResult<StreamId> {
        let mut state = self.enter(Call::StreamCreate)?;
        let id = state.next_stream;
        state.next_stream += 1;
        state.streams.insert(id, 0);
        Ok(StreamId(id))
    }

    fn stream_destroy(&self, stream: StreamId) -> DriverResult<()> {
        let mut state = self.enter(Call::StreamDestroy)?;
        ensure(Call::StreamDestroy, stream.0 != 0 && state.streams.remove(&stream.0).is_some(), code::INVALID_HANDLE)
    }

    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()> {
        let call = Call::StreamSynchronize;
        let mut state = self.enter(call)?;
        let until = *state.streams.get(&stream.0).ok_or(DriverError::new(call, code::INVALID_HANDLE))?;
        state.clock = state.clock.max(until);
        Ok(())
    }

    fn stream_query(&self, stream: StreamId) -> DriverResult<bool> {
        let call = Call::StreamQuery;
        let state = self.enter(call)?;
        let until = *state.streams.get(&stream.0).ok_or(DriverError::new(call, code::INVALID_HANDLE))?;
        Ok(state.clock >= until)
    }

    fn device_synchronize(&self) -> DriverResult<()> {
        let mut state = self.enter(Call::DeviceSynchronize)?;
        state.clock = state.clock.max(state.idle_at());
        Ok(())
    }

    fn event_create(&self) -> DriverResult<EventId> {
        let mut state = self.enter(Call::EventCreate)?;
        let id = state.next_event;
        state.next_event += 1;
        state.events.insert(id, 0);
        Ok(EventId(id))
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let call = Call::EventRecord;
        let mut state = self.enter(call)?;
        let until = *state.streams.get(&stream.0).ok_or(DriverError::new(call, code::INVALID_HANDLE))?;
        let done = until.max(state.clock).saturating_add(state.event_delay);
        let slot = state.events.get_mut(&event.0).ok_or(DriverError::new(call, code::INVALID_HANDLE))?;
        *slot = done;
        Ok(())
    }

    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        let call = Call::EventQuery;
        let state = self.enter(call)?;
        let done = *state.events.get(&event.0).ok_or(DriverError::new(call, code::INVALID_HANDLE))?;
        Ok(state.clock >= done)
    }

    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        let call = Call::EventSynchronize;
        let mut state = self.enter(call)?;
        let done = *state.events.get(&event.0).ok_or(DriverError::new(call, code::INVALID_HANDLE))?;
        state.clock = state.clock.max(done);
        Ok(())
    }

    fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        let mut state = self.enter(Call::EventDestroy)?;
        ensure(Call::EventDestroy, state.events.remove(&event.0).is_some(), code::INVALID_HANDLE)
    }
}

/// Words of a read in which a mark is looked for.
const MOST_MARKED: u64 = 4096;

/// Nanoseconds between a launch and its first access.
const LAUNCH_NS: u64 = 2_000;
/// Bytes that kernels move in a nanosecond.
const BYTES_PER_NS: u64 = 2_000;

/// Memory as kernels see it.
struct Words<'s>(&'s mut State);

impl host::Memory for Words<'_> {
    fn load(&mut self, address: u64) -> u64 {
        let mut bytes = [0; 8];
        self.0.read(address, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn store(&mut self, address: u64, value: u64) {
        self.0.write(address, &value.to_le_bytes());
    }
}

/// A result while mismatches are added to it.
struct Noted {
    base: u64,
    words: Vec<u64>,
}

impl Noted {
    fn load(state: &mut State, base: u64) -> Self {
        let mut bytes = vec![0; host::RESULT_BYTES as usize];
        state.read(base, &mut bytes);
        Noted { base, words: bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect() }
    }
}

impl host::Memory for Noted {
    fn load(&mut self, address: u64) -> u64 {
        self.words.get(((address - self.base) / 8) as usize).copied().unwrap_or(0)
    }

    fn store(&mut self, address: u64, value: u64) {
        if let Some(word) = self.words.get_mut(((address - self.base) / 8) as usize) {
            *word = value;
        }
    }
}

/// The virtual clock counts nanoseconds.
impl Kernels for SimGpu {
    fn shape(&self) -> Shape {
        Shape { multiprocessors: 8, l2_bytes: 1 << 20 }
    }

    fn launch(&self, launch: &Launch, stream: StreamId) -> DriverResult<()> {
        let call = Call::LaunchKernel;
        if !self.state().module {
            self.enter(Call::ModuleLoad)?.module = true;
        }
        let mut state = self.enter(call)?;
        ensure(call, state.streams.contains_key(&stream.0), code::INVALID_HANDLE)?;
        ensure(call, launch.grid > 0 && (1..=1024).contains(&launch.block), code::INVALID_VALUE)?;
        ensure(call, launch.ranges().all(|(address, _)| address.is_multiple_of(8)), code::INVALID_VALUE)?;
        ensure(call, launch.ranges().all(|(address, bytes)| state.accessible(address, bytes)), code::ILLEGAL_ADDRESS)?;
        state.break_what_is_due(launch);
        state.run(launch);
        let bytes: u64 = launch.ranges().map(|(_, bytes)| bytes).sum();
        // Compared and written.
        let bytes = if launch.kernel == Kernel::VerifyWrite { 2 * bytes } else { bytes };
        let clock = state.clock;
        if let Some(until) = state.streams.get_mut(&stream.0) {
            *until = (*until).max(clock) + LAUNCH_NS + bytes / BYTES_PER_NS;
        }
        Ok(())
    }

    fn timed_event_create(&self) -> DriverResult<EventId> {
        self.event_create()
    }

    fn event_elapsed_ms(&self, start: EventId, end: EventId) -> DriverResult<f32> {
        let call = Call::EventElapsedTime;
        let state = self.enter(call)?;
        let done = |event: EventId| state.events.get(&event.0).copied().ok_or(DriverError::new(call, code::INVALID_HANDLE));
        let (start, end) = (done(start)?, done(end)?);
        ensure(call, start.max(end) <= state.clock, code::NOT_READY)?;
        Ok((end as f64 - start as f64) as f32 / 1e6)
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.state().clock)
    }

    fn pause(&self, time: Duration) {
        self.advance(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Plain memory that knows nothing of rules.
    struct Plain(u64, Vec<u64>);

    impl host::Memory for Plain {
        fn load(&mut self, address: u64) -> u64 {
            self.1[((address - self.0) / 8) as usize]
        }
        fn store(&mut self, address: u64, value: u64) {
            self.1[((address - self.0) / 8) as usize] = value;
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::test_runner::Config { cases: 10, ..Default::default() })]
        /// Launches on the simulated card do what the reference does, word for word, results included.
        #[test]
        fn launches_do_what_the_reference_does(
            steps in proptest::collection::vec((0usize..7, 0u64..10, 0u64..16_384, 1u64..8_192, 0u64..9, proptest::num::u64::ANY), 1..8),
        ) {
            let gpu = SimGpu::with(SimConfig { granularity: 64 << 10, ..SimConfig::new(1 << 20) });
            let base = gpu.mem_alloc(256 << 10).expect("room");
            let result = base + (192 << 10);
            let mut plain = Plain(base, vec![0xCDCD_CDCD_CDCD_CDCD; 32 << 10]);
            gpu.memset_d8(result, 0, 64 << 10, StreamId::DEFAULT).expect("inside");
            plain.1[24 << 10..].fill(0);
            for (kernel, pattern, start, words, choice, seed) in steps {
                // Whole granules and whole chunks come up as often as odd pieces.
                let (start, words) = match choice % 3 {
                    0 => (start, words),
                    1 => (start / 2048 * 2048, words.next_multiple_of(2048)),
                    _ => (start / 8192 * 8192, 8192),
                };
                let at = base + 8 * start;
                let (p0, p1) = if choice < 4 { (seed % 2, seed % 3) } else { (seed, seed.rotate_left(7)) };
                let origin = start + seed % 2;
                let arguments = match Kernel::ALL[kernel] {
                    Kernel::Fill => vec![at, words, origin, pattern, p0, p1],
                    Kernel::Verify => vec![at, words, origin, pattern, p0, p1, result],
                    Kernel::VerifyWrite => vec![at, words, origin, pattern, p0, p1, result, seed % 8, p1, p0, seed & 1],
                    Kernel::Copy => vec![base + 8 * (start % 4096), base + 8 * (12_288 + start % 4096), words.min(8192)],
                    Kernel::Read => vec![at, words, result],
                    Kernel::ModuloFill => vec![at, words, start, 20, 7, p0, seed >> 3 & 1],
                    Kernel::ModuloVerify => vec![at, words, start, 20, 7, p0, result],
                };
                let launch = Launch::new(Kernel::ALL[kernel], 1, 32, &arguments);
                if Kernel::ALL[kernel] != Kernel::Read {
                    gpu.launch(&launch, StreamId::DEFAULT).expect("inside");
                    host::run(&launch, &mut plain);
                }
            }
            let mut bytes = vec![0; 256 << 10];
            gpu.copy_to_host(&mut bytes, base).expect("inside");
            for (number, word) in bytes.chunks_exact(8).enumerate() {
                proptest::prop_assert_eq!(u64::from_le_bytes(word.try_into().expect("8 bytes")), plain.1[number], "word {}", number);
            }
        }
    }

    #[test]
    fn a_large_card_costs_nothing_until_touched() {
        let gpu = SimGpu::new(141 << 30);
        let address = gpu.mem_alloc(140 << 30).expect("there is room");
        assert_eq!(gpu.usage().host_bytes, 0);
        gpu.copy_to_device(address + (100 << 30), b"hello").expect("inside");
        assert_eq!(gpu.usage().host_bytes, CHUNK);
        let mut text = [0; 7];
        gpu.copy_to_host(&mut text, address + (100 << 30)).expect("inside");
        assert_eq!(&text, b"hello\xCD\xCD");
        assert!(gpu.mem_alloc(2 << 30).is_err_and(|error| error.is_out_of_memory()));
        gpu.mem_free(address).expect("it is allocated");
        assert_eq!(gpu.usage(), SimUsage::default());
    }

    #[test]
    fn accesses_outside_a_live_allocation_are_errors() {
        let gpu = SimGpu::new(64 * MIB);
        let (a, b) = (gpu.mem_alloc(2 * MIB).expect("room"), gpu.mem_alloc(MIB).expect("room"));
        assert_eq!(b, a + 2 * MIB, "ascending");
        let illegal = |result: DriverResult<()>| assert_eq!(result.map_err(|error| error.code), Err(code::ILLEGAL_ADDRESS));
        illegal(gpu.copy_to_device(a + 2 * MIB - 1, &[1, 2]));
        illegal(gpu.memset_d8(b, 0, MIB + 1, StreamId::DEFAULT));
        illegal(gpu.memset_d32(a - 4, 0, 2, StreamId::DEFAULT));
        illegal(gpu.copy_on_device(b, a, 2 * MIB, StreamId::DEFAULT));
        gpu.mem_free(a).expect("allocated");
        illegal(gpu.copy_to_host(&mut [0], a));
        assert_eq!(gpu.mem_free(a).map_err(|error| error.code), Err(code::INVALID_VALUE));
    }

    #[test]
    fn fills_and_copies_move_the_right_bytes() {
        let gpu = SimGpu::new(64 * MIB);
        let a = gpu.mem_alloc(4 * MIB).expect("room");
        gpu.memset_d32(a + 4, 0x0403_0201, 40_000, StreamId::DEFAULT).expect("inside");
        gpu.copy_on_device(a + 2 * MIB + 1, a + 5, 100_000, StreamId::DEFAULT).expect("inside");
        let mut bytes = vec![0; 100_000];
        gpu.copy_to_host(&mut bytes, a + 2 * MIB + 1).expect("inside");
        assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == [2, 3, 4, 1][at % 4]));
    }

    #[test]
    fn two_addresses_of_one_handle_are_the_same_memory() {
        let gpu = SimGpu::new(16 * MIB);
        let va = gpu.address_reserve(32 * MIB).expect("address space is not memory");
        let handle = gpu.mem_create(2 * MIB).expect("room");
        gpu.mem_map(va, 2 * MIB, handle).expect("free");
        assert!(gpu.copy_to_device(va, &[1]).is_err(), "no access yet");
        gpu.mem_map(va + 8 * MIB, 2 * MIB, handle).expect("free");
        assert_eq!(gpu.mem_map(va, 2 * MIB, handle).map_err(|e| e.code), Err(code::ALREADY_MAPPED));
        for at in [0, 8] {
            gpu.mem_set_access(va + at * MIB, 2 * MIB).expect("mapped");
        }
        gpu.copy_to_device(va + 100, b"x").expect("mapped");
        let mut byte = [0];
        gpu.copy_to_host(&mut byte, va + 8 * MIB + 100).expect("mapped");
        assert_eq!(&byte, b"x");
        gpu.mem_release(handle).expect("held");
        assert_eq!(gpu.usage().bytes, 2 * MIB, "still mapped");
        gpu.mem_unmap(va, 2 * MIB).expect("mapped");
        assert!(gpu.address_free(va, 32 * MIB).is_err(), "still mapped at the other address");
        gpu.mem_unmap(va + 8 * MIB, 2 * MIB).expect("mapped");
        assert_eq!(gpu.usage().bytes, 0);
        gpu.address_free(va, 32 * MIB).expect("nothing mapped");
        assert_eq!(gpu.usage(), SimUsage::default());
    }

    #[test]
    fn events_are_done_when_the_work_before_them_is() {
        let gpu = SimGpu::new(MIB * 4);
        let stream = gpu.stream_create().expect("stream");
        let event = gpu.event_create().expect("event");
        gpu.work(stream, 10);
        gpu.event_record(event, stream).expect("recorded");
        gpu.work(stream, 5);
        assert_eq!((gpu.event_query(event), gpu.stream_query(StreamId::DEFAULT)), (Ok(false), Ok(true)));
        gpu.advance(10);
        assert_eq!((gpu.event_query(event), gpu.stream_query(stream)), (Ok(true), Ok(false)));
        gpu.delay_events(7);
        gpu.event_record(event, stream).expect("recorded");
        gpu.stream_synchronize(stream).expect("exists");
        assert_eq!(gpu.event_query(event), Ok(false), "late");
        gpu.event_synchronize(event).expect("exists");
        assert_eq!(gpu.event_query(event), Ok(true));
    }

    #[test]
    fn faults_come_when_ordered() {
        let gpu = SimGpu::new(64 * MIB);
        gpu.fail(Call::MemAlloc, 2, 999);
        gpu.limit_memory(6 * MIB);
        let codes: Vec<u32> = (0..5).map(|_| gpu.mem_alloc(2 * MIB).map_or_else(|error| error.code, |_| 0)).collect();
        assert_eq!(codes, [0, 999, 0, 0, code::OUT_OF_MEMORY]);
        gpu.heal();
        gpu.set_others(58 * MIB);
        assert!(gpu.mem_alloc(2 * MIB).is_err());
        assert_eq!(gpu.mem_get_info(), Ok(MemInfo { free: 0, total: 64 * MIB }));
        assert_eq!(gpu.injected_faults(), 1);
        assert_eq!(gpu.calls(Call::MemAlloc), 6);
    }

    #[test]
    fn broken_memory_shows_at_its_physical_place() {
        let gpu = SimGpu::new(64 * MIB);
        let a = gpu.mem_alloc(4 * MIB).expect("room");
        gpu.stick(2 * MIB + 7, 0b100, 0b000);
        gpu.memset_d8(a, 0xFF, 4 * MIB, StreamId::DEFAULT).expect("inside");
        let mut bytes = vec![0; 4 * MIB as usize];
        gpu.copy_to_host(&mut bytes, a).expect("inside");
        let wrong: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] != 0xFF).collect();
        assert_eq!((wrong, bytes[2 * MIB as usize + 7]), (vec![2 * MIB as usize + 7], 0xFB));
        assert_eq!(gpu.physical_address(a + 2 * MIB + 7), Some(2 * MIB + 7));
        gpu.flip(5, 1);
        gpu.copy_to_host(&mut bytes[..8], a).expect("inside");
        assert_eq!(bytes[..8], [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFE, 0xFF, 0xFF]);
        gpu.alias(1, 0);
        gpu.copy_to_device(a + 2 * MIB, b"over").expect("inside");
        gpu.copy_to_host(&mut bytes[..4], a).expect("inside");
        assert_eq!(&bytes[..4], b"over");
    }

    #[test]
    fn addresses_come_in_the_order_asked_for() {
        let take = |order| {
            let gpu = SimGpu::with(SimConfig { order, ..SimConfig::new(1 << 30) });
            let addresses: Vec<u64> = (0..4).map(|_| gpu.mem_alloc(2 * MIB).expect("room")).collect();
            gpu.mem_free(addresses[1]).expect("allocated");
            (addresses.clone(), gpu.mem_alloc(MIB).expect("room"), addresses[1])
        };
        let (ascending, next, _) = take(AddressOrder::Ascending);
        assert!(ascending.is_sorted() && next > ascending[3]);
        let (descending, next, _) = take(AddressOrder::Descending);
        assert!(descending.iter().rev().is_sorted() && next < descending[3]);
        let (first_fit, next, freed) = take(AddressOrder::FirstFit);
        assert!(first_fit.is_sorted() && next == freed);
        let (shuffled, ..) = take(AddressOrder::Shuffled(3));
        assert!(!shuffled.is_sorted() && take(AddressOrder::Shuffled(3)).0 == shuffled && take(AddressOrder::Shuffled(4)).0 != shuffled);
    }
}
