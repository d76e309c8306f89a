//! The memory self-test: device memory taken through the caching allocator, written and read back by kernels.
//!
//! One run answers for three things at once: the card's memory (patterns), the driver's path to it (calls, events,
//! virtual memory management) and the allocator (guards around each block, its books against a ledger of every driver call). What
//! was not done is NOT TESTED with a reason, never PASS.
//!
//! The order on one card: is it left alone; warm-up, in which every kernel must see a planted error; free memory as the
//! baseline; patterns over all memory that is free, less a reserve; the same in short through the other kind of segments; everything
//! given back and counted; the driver's own counters before and after.

/// The self-test in a process of its own.
pub mod apart;
mod blocks;
mod diagnose;
/// The driver's own view of a card.
pub mod health;
mod ledger;
mod plan;
/// Cards of this machine.
pub mod real;
/// What was found.
pub mod report;
mod rig;
mod selftest;
mod session;
/// Simulated cards with faults, by description.
pub mod simulated;
#[cfg(test)]
mod tests;
mod text;

use std::time::Duration;

use blocks::{Source, TakeError};
use health::HealthSource;
use ledger::Ledger;
pub use ledger::Outstanding;
use plan::Test;
use report::{Bandwidth, BlockFigure, Books, Cause, Coverage, DeviceReport, Finding, Report, Status};
use rig::{CONTROL_BYTES, Rig, Stop};
pub use selftest::selftest;
use session::{Session, median, not_tested, step_mut};

use super::alloc::{AllocConfig, CachingAllocator, Policy, sizes};
use super::driver::{Call, Driver, DriverError, code};
use super::human;
use super::kernels::Kernels;
use crate::report::{Phase, Progress};

/// Wrong words that are kept one by one.
pub const MOST_MISMATCHES: usize = 64;
/// Passes that are kept one by one.
pub const MOST_PASSES: usize = 1024;
/// How often a cause is looked for; after that, wrong words are only counted.
const MOST_DIAGNOSES: u32 = 6;
/// Part of the memory that could be taken which must have been.
const ENOUGH: f64 = 0.9;

/// How much is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Every pattern once with few parameters: seconds.
    Quick,
    /// Every pattern with several parameters: a minute or so.
    Standard,
    /// Every pattern with all parameters, again and again until the time budget is spent.
    Thorough,
}

/// Through which kind of segments the memory is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Segments {
    /// All patterns through native segments, then a short test through expandable ones.
    Both,
    /// Native ones only (`cuMemAlloc`).
    Native,
    /// Expandable ones only (virtual memory management).
    Expandable,
}

/// What to do.
#[derive(Debug, Clone)]
pub struct Options {
    pub level: Level,
    /// Time after which no further pass begins. On the thorough level the patterns are repeated until then; by default ten minutes.
    pub budget: Option<Duration>,
    /// Bytes to leave free; by default a small part of the card.
    pub reserve: Option<u64>,
    /// Test a card although other processes compute on it.
    pub even_if_busy: bool,
    pub segments: Segments,
    /// For the random patterns; the same seed gives the same test.
    pub seed: u64,
    /// At most so many rounds on the thorough level.
    pub rounds: Option<u32>,
    /// How long zeros and ones are left alone in the bit-fade test; zero leaves it out.
    pub fade: Duration,
    /// How long one pass may take.
    pub timeout: Duration,
}

impl Options {
    /// The defaults of a level.
    pub fn new(level: Level) -> Self {
        Options {
            level,
            budget: None,
            reserve: None,
            even_if_busy: false,
            segments: Segments::Both,
            seed: 0x7461_7265,
            rounds: None,
            fade: Duration::ZERO,
            timeout: Duration::from_secs(60),
        }
    }

    fn budget(&self) -> Option<Duration> {
        self.budget.or((self.level == Level::Thorough).then_some(Duration::from_secs(600)))
    }
}

/// A card that can be opened. Opening happens in the thread that tests it.
pub trait Card: Send + Sync {
    /// As it was asked for: `cuda:0`.
    fn name(&self) -> String;
    /// Makes the health source, then the context; in this order, so that the former can tell whose the latter is.
    ///
    /// # Errors
    /// The driver's.
    fn open(&self) -> Result<Opened, DriverError>;
}

/// An open card.
pub struct Opened {
    pub driver: Box<dyn Kernels>,
    pub health: Box<dyn HealthSource>,
}

/// Tests cards side by side, one thread each.
pub fn run(cards: &[Box<dyn Card>], options: &Options, progress: &dyn Progress) -> Report {
    let run_one = |card: &dyn Card| match card.open() {
        Ok(opened) => test(&*opened.driver, &*opened.health, &card.name(), options, progress),
        Err(error) => unopened(&card.name(), options, error),
    };
    let devices = match cards {
        [card] => vec![run_one(&**card)],
        cards => std::thread::scope(|scope| {
            let threads: Vec<_> = cards.iter().map(|card| scope.spawn(|| run_one(&**card))).collect();
            let joined = threads.into_iter().zip(cards).map(|(thread, card)| {
                thread.join().unwrap_or_else(|_| {
                    let mut out = empty(&card.name(), options);
                    fail(
                        &mut out,
                        "warm-up",
                        WARM_UP,
                        Cause::Kernels,
                        "the test itself broke off in a way that was not foreseen".into(),
                        None,
                    );
                    conclude(&mut out);
                    out
                })
            });
            joined.collect()
        }),
    };
    Report::new(options.level, devices)
}

const WARM_UP: &str = "the driver answers and runs every kernel";
const MEMORY: &str = "memory taken through the allocator";
const ALLOCATOR: &str = "blocks lie where the driver gave memory, apart from each other; the books agree";
const IDLE: &str = "nobody else computes on the card";
const EXPANDABLE: &str = "the same memory through expandable segments";
const BOOKS: &str = "everything is given back";
const TEARDOWN: &str = "stream, events, code and context go back without an error";
const EVENTS: &str = "events are done when their work is";
const ECC: &str = "the card counted no memory errors";
const ROWS: &str = "no rows of memory were replaced, none wait for it";
const XID: &str = "the driver reported no errors of the card";

fn empty(name: &str, options: &Options) -> DeviceReport {
    DeviceReport {
        device: name.to_owned(),
        properties: None,
        status: Status::NotTested,
        cause: None,
        summary: String::new(),
        hints: Vec::new(),
        segments: if options.segments == Segments::Expandable { "expandable" } else { "native" },
        seed: options.seed,
        seconds: 0.0,
        coverage: Coverage::default(),
        steps: Vec::new(),
        findings: Vec::new(),
        mismatch_count: 0,
        mismatches: Vec::new(),
        bits: Vec::new(),
        copy_gb_per_s: None,
        bandwidth: Vec::new(),
        passes: Vec::new(),
        blocks: Vec::new(),
        books: None,
        health: report::HealthFigures::default(),
    }
}

/// A card that could not be opened: no device is a reason not to test, everything else is a failure of the driver.
fn unopened(name: &str, options: &Options, error: DriverError) -> DeviceReport {
    let mut out = empty(name, options);
    match error.code {
        code::NO_DEVICE => not_tested(&mut out, "warm-up", WARM_UP, Cause::NoDevice, error.to_string()),
        code::OUT_OF_MEMORY => not_tested(&mut out, "warm-up", WARM_UP, Cause::OutOfMemory, error.to_string()),
        _ => fail(&mut out, "warm-up", WARM_UP, Cause::DriverError, error.to_string(), Some(error)),
    }
    conclude(&mut out);
    out
}

const DRIVER: &str = "every call of the driver succeeds";

/// The report on cards whose test broke off with its process. `call`: the driver's call that it was in.
fn broken(names: &[String], options: &Options, cause: Cause, text: &str, call: Option<&str>, elapsed: Duration) -> Report {
    let one = |name: &String| {
        let mut out = empty(name, options);
        out.seconds = elapsed.as_secs_f64();
        if cause == Cause::Stopped {
            not_tested(&mut out, "driver", DRIVER, cause, text);
        } else {
            fail(&mut out, "driver", DRIVER, cause, text.to_owned(), None);
            if let Some(finding) = out.findings.last_mut() {
                finding.call = call.map(str::to_owned);
            }
        }
        for test in plan::tests(options.level, options.seed, options.fade) {
            not_tested(&mut out, test.name, test.title, Cause::Stopped, "not reached: the process of the test ended");
        }
        conclude(&mut out);
        out
    };
    Report::new(options.level, names.iter().map(one).collect())
}

/// Marks a step as failed, with a finding.
fn fail(out: &mut DeviceReport, name: &'static str, title: &'static str, cause: Cause, text: String, error: Option<DriverError>) {
    let step = step_mut(out, name, title);
    (step.status, step.cause, step.detail) = (Status::Fail, Some(cause), Some(text.clone()));
    out.findings.push(Finding {
        cause,
        step: name,
        text,
        addresses: Vec::new(),
        period: None,
        call: error.map(|error| error.call.to_string()),
        code: error.map(|error| error.code),
    });
}

/// Tests one card. Never fails itself: everything is in the report.
pub fn test<K: Kernels>(driver: K, health: &dyn HealthSource, name: &str, options: &Options, progress: &dyn Progress) -> DeviceReport {
    test_with(driver, health, name, options, progress, &|ledger, config| Box::new(CachingAllocator::new(ledger, Policy::proven(), config)))
}

/// Makes an allocator over a ledger.
type MakeSource<'m, K> = &'m dyn for<'l> Fn(&'l Ledger<K>, AllocConfig) -> Box<dyn Source + 'l>;

fn test_with<K: Kernels>(
    driver: K,
    health: &dyn HealthSource,
    name: &str,
    options: &Options,
    progress: &dyn Progress,
    make: MakeSource<'_, K>,
) -> DeviceReport {
    let ledger = Ledger::new(driver);
    let mut out = empty(name, options);
    out.properties = Some(ledger.properties());
    let began = ledger.now();
    let watch = watch(&mut out, health);
    let idle = idle(&ledger, &mut out, options);
    let tested = matches!(idle, Ok(None));
    let mut released = Vec::new();
    match idle {
        Ok(None) => {
            let total: usize = plan::tests(options.level, options.seed, options.fade).iter().map(|test| test.ops.len()).sum();
            let task = progress.start(Phase::Other, &format!("{name}: passes over the memory"), Some(total as u64 + 1));
            let mut bench = Bench { ledger: &ledger, out: &mut out, options, make, health, progress, task, began, released: Vec::new() };
            if let Err(stop) = bench.stages() {
                bench.stopped(&stop);
            }
            released = bench.released;
            progress.finish(task);
        }
        Ok(Some(reason)) => not_tested(&mut out, "idle", IDLE, Cause::Busy, reason),
        Err(error) => fail(&mut out, "driver", DRIVER, Cause::DriverError, error.to_string(), Some(error)),
    }
    released.extend(ledger.close());
    teardown(&mut out, &released);
    untold(&mut out, &ledger.errors());
    if tested {
        look_again(&mut out, health, watch);
        out.seconds = ledger.now().saturating_sub(began).as_secs_f64();
        summarise_bandwidth(&mut out);
    }
    conclude(&mut out);
    out
}

/// Errors of the calls that give everything back.
fn teardown(out: &mut DeviceReport, errors: &[DriverError]) {
    let Some(first) = errors.first() else {
        step_mut(out, "teardown", TEARDOWN).passes += 1;
        return;
    };
    let mut told: Vec<String> = Vec::new();
    for error in errors.iter().map(ToString::to_string) {
        if !told.contains(&error) {
            told.push(error);
        }
    }
    fail(out, "teardown", TEARDOWN, Cause::DriverError, format!("giving everything back: {}", told.join("; ")), Some(*first));
}

/// Errors of calls that nobody has told: the test went on in spite of them.
fn untold(out: &mut DeviceReport, errors: &[DriverError]) {
    for error in errors {
        let text = error.to_string();
        // Those of giving back stand in one text.
        if !out.findings.iter().any(|finding| finding.text.contains(&text)) {
            fail(out, "driver", DRIVER, Cause::DriverError, text, Some(*error));
        }
    }
}

/// What belongs together while one card is tested.
struct Bench<'a, K: Kernels> {
    ledger: &'a Ledger<K>,
    out: &'a mut DeviceReport,
    options: &'a Options,
    make: MakeSource<'a, K>,
    health: &'a dyn HealthSource,
    progress: &'a dyn Progress,
    task: crate::report::TaskId,
    began: Duration,
    /// Errors of giving stream and events back.
    released: Vec<DriverError>,
}

impl<K: Kernels> Bench<'_, K> {
    fn stages(&mut self) -> Result<(), Stop> {
        let mut rig = Rig::new(self.ledger, self.options.timeout)?;
        rig.deadline = self.options.budget().map(|budget| self.began + budget);
        let done = self.stages_on(&mut rig);
        let late = rig.late;
        self.released = rig.close();
        if late.count > 0 {
            let text = format!(
                "{} event{} not done although the stream was idle; the longest took {:.1} ms more",
                late.count,
                if late.count == 1 { " was" } else { "s were" },
                late.longest.as_secs_f64() * 1e3
            );
            fail(self.out, "events", EVENTS, Cause::LateEvents, text, None);
        } else if done.is_ok() {
            step_mut(self.out, "events", EVENTS).passes += 1;
        }
        done
    }

    fn stages_on(&mut self, rig: &mut Rig<'_, K>) -> Result<(), Stop> {
        let info = self.ledger.mem_get_info()?;
        self.out.coverage.total = info.total;
        let small = (info.total / 16).min(256 << 20);
        self.out.coverage.reserve = self.options.reserve.unwrap_or((info.total / 128).clamp(small, 1 << 30));
        let vmm = self.warm_up(rig)?;
        // From here on nothing may stay behind.
        let baseline = self.ledger.mem_get_info()?.free;
        self.out.coverage.free = baseline;
        let before = self.health.processes().ok();
        let expandable = self.options.segments == Segments::Expandable;
        match (&vmm, self.options.segments) {
            (Err(reason), Segments::Expandable) => {
                not_tested(self.out, "memory", MEMORY, Cause::Unsupported, format!("expandable segments were asked for, but {reason}"));
                return Ok(());
            }
            (Err(reason), Segments::Both) => {
                not_tested(self.out, "expandable-segments", EXPANDABLE, Cause::Unsupported, reason.clone());
            }
            _ => {}
        }
        let both = self.options.segments == Segments::Both && vmm.is_ok();
        let deadline = rig.deadline;
        if both && self.options.level == Level::Thorough {
            // Its patterns go on until the time is up: some of it is for the short test that follows.
            let share = self.options.budget().map_or(SHORT, |budget| (budget / 8).min(SHORT));
            rig.deadline = deadline.map(|deadline| deadline.saturating_sub(share));
        }
        self.patterns(rig, expandable, true)?;
        rig.deadline = deadline;
        if both {
            self.patterns(rig, false, false)?;
        }
        self.books(baseline, before.as_deref())
    }

    /// Runs every kernel and every kind of call once, so that what the driver keeps for them is not taken for a leak. Whether
    /// virtual memory management works, or why not.
    fn warm_up(&mut self, rig: &mut Rig<'_, K>) -> Result<Result<(), String>, Stop> {
        let native = (self.make)(self.ledger, AllocConfig::default());
        if let Some(control) = self.control(&*native)? {
            rig.set_control(control);
            let mut session = self.session(rig, Vec::new());
            session.try_kernels()?;
            let field = rig.field();
            let half = field.words / 2;
            rig.timed(|rig| rig.copy(field.address + 8 * half, field.address, 8 * half))?;
            give(&*native, control)?;
        }
        native.empty_cache().map_err(|error| stop(&error))?;
        step_mut(self.out, "warm-up", WARM_UP).passes += 1;
        Ok(if self.options.segments == Segments::Native { Ok(()) } else { probe_virtual_memory(self.ledger)? })
    }

    fn session<'s, 'd>(&'s mut self, rig: &'s mut Rig<'d, K>, blocks: Vec<blocks::Block>) -> Session<'s, 'd, K> {
        Session::new(rig, self.out, blocks, self.options.seed, self.progress, self.task)
    }

    /// The test's own memory; `None`, with a step, where it cannot be had.
    fn control(&mut self, source: &dyn Source) -> Result<Option<u64>, Stop> {
        match source.take(CONTROL_BYTES) {
            Ok(address) if self.ledger.grants(address, CONTROL_BYTES) => Ok(Some(address)),
            Ok(address) => {
                let text = format!("the first block, at {address:#x}, does not lie in memory that the driver gave");
                fail(self.out, "allocator", ALLOCATOR, Cause::AllocatorFault, text, None);
                Err(Stop::Broken)
            }
            Err(super::alloc::AllocError::OutOfMemory(oom)) => {
                not_tested(self.out, "memory", MEMORY, Cause::OutOfMemory, oom.to_string());
                Ok(None)
            }
            Err(error) => Err(stop(&error)),
        }
    }

    /// Takes memory, runs the patterns, gives the memory back. `full`: the patterns of the level; else the short test through
    /// expandable segments.
    fn patterns(&mut self, rig: &mut Rig<'_, K>, expandable: bool, full: bool) -> Result<(), Stop> {
        let expandable = expandable || !full;
        let native = (self.make)(self.ledger, AllocConfig::default());
        let source = (self.make)(self.ledger, AllocConfig { expandable_segments: expandable, ..AllocConfig::default() });
        let Some(control) = self.control(&*native)? else { return Ok(()) };
        rig.set_control(control);
        let reserve = self.out.coverage.reserve;
        let free = self.ledger.mem_get_info()?.free;
        let taken = match blocks::take(&*source, self.ledger, expandable, free.saturating_sub(reserve), reserve) {
            Ok(taken) => taken,
            Err(TakeError::Driver(error)) => return Err(Stop::Driver(error)),
            Err(TakeError::Allocator(text)) => {
                fail(self.out, "allocator", ALLOCATOR, Cause::AllocatorFault, text, None);
                return Err(Stop::Broken);
            }
        };
        step_mut(self.out, "allocator", ALLOCATOR).passes += 1;
        let words: u64 = taken.blocks.iter().map(|block| block.payload().words).sum();
        // What is less than the smallest segment cannot be taken.
        let enough = (free.saturating_sub(reserve).saturating_sub(sizes::SMALL_BUFFER) as f64 * ENOUGH) as u64;
        let shortfall = (8 * words < enough || words == 0).then(|| {
            let refused = taken.refused.map_or_else(String::new, |error| format!(": {error} while the driver reported more as free"));
            format!("only {} of {} free memory could be taken{refused}", human(8 * words), human(free.saturating_sub(reserve)))
        });
        if full {
            let coverage = &mut self.out.coverage;
            coverage.bytes = 8 * words;
            coverage.of_total = 8.0 * words as f64 / coverage.total.max(1) as f64;
            coverage.of_free = 8.0 * words as f64 / coverage.free.max(1) as f64;
            coverage.shortfall = shortfall.clone();
            match shortfall {
                Some(why) => not_tested(self.out, "memory", MEMORY, Cause::OutOfMemory, why),
                None => step_mut(self.out, "memory", MEMORY).passes += 1,
            }
        } else if let Some(why) = shortfall {
            not_tested(self.out, "expandable-segments", EXPANDABLE, Cause::OutOfMemory, why);
        }
        let mut outcome = Ok(());
        if !taken.blocks.is_empty() {
            outcome = self.run_tests(rig, taken.blocks.clone(), full);
        }
        if matches!(outcome, Err(Stop::Driver(_) | Stop::Timeout { .. } | Stop::Budget { busy: true })) {
            // The context is lost or busy: what is given back now would only fail again.
            return outcome;
        }
        for block in &taken.blocks {
            give(&*source, block.address)?;
        }
        give(&*native, control)?;
        for allocator in [&native, &source] {
            allocator.empty_cache().map_err(|error| stop(&error))?;
            let wrong = match allocator.validate() {
                Ok(()) if allocator.reserved() > 0 => {
                    Some(format!("{} stay reserved after `empty_cache` although no block is in use", human(allocator.reserved())))
                }
                Ok(()) => None,
                Err(why) => Some(why),
            };
            if let Some(why) = wrong {
                fail(self.out, "allocator", ALLOCATOR, Cause::AllocatorFault, why, None);
            }
        }
        // Steps say what there was no time for; the books can be closed.
        if matches!(outcome, Err(Stop::Budget { .. })) { Ok(()) } else { outcome }
    }

    fn run_tests(&mut self, rig: &mut Rig<'_, K>, blocks: Vec<blocks::Block>, full: bool) -> Result<(), Stop> {
        let options = self.options;
        let mut session = self.session(rig, blocks);
        let begun = session.try_kernels().and_then(|()| session.plant_canaries());
        if !full {
            let outcome = begun.and_then(|()| {
                let tests = [plan::addresses(), plan::random(options.seed ^ 1, 1)];
                tests.iter().try_for_each(|test| session.run(test, "expandable-segments", EXPANDABLE, false))
            });
            if matches!(outcome, Err(Stop::Budget { .. })) {
                session.out_of_time("expandable-segments", EXPANDABLE);
            }
            return outcome;
        }
        let mut outcome = begun.and_then(|()| session.copy_rate()).map(|rate| session.out.copy_gb_per_s = rate);
        let mut round = 0;
        while outcome.is_ok() {
            let tests = plan::tests(options.level, options.seed ^ u64::from(round), options.fade);
            outcome = tests
                .iter()
                .try_for_each(|test: &Test| session.run(test, test.name, test.title, round > 0))
                .and_then(|()| session.caches(options.level, round > 0));
            round += 1;
            // From the second round on the budget is what ends it.
            if round > 1 && matches!(outcome, Err(Stop::Budget { busy: false })) {
                outcome = Ok(());
            }
            let over = session.rig.deadline.is_none() || session.rig.over();
            if options.level != Level::Thorough || over || options.rounds.is_some_and(|rounds| round >= rounds) {
                break;
            }
        }
        let why = match &outcome {
            Ok(()) => None,
            Err(Stop::Budget { .. }) => Some((Cause::Budget, UNBEGUN)),
            Err(_) => Some((Cause::Stopped, UNREACHED)),
        };
        if let Some((cause, why)) = why {
            for test in plan::tests(options.level, options.seed, options.fade) {
                not_tested(session.out, test.name, test.title, cause, why);
            }
        }
        let mut offset = 0;
        let figures: Vec<BlockFigure> = session
            .blocks
            .iter()
            .zip(&session.hits)
            .map(|(block, hits)| {
                let figure = BlockFigure { address: report::Hex(block.address), bytes: block.bytes, offset, mismatches: *hits };
                offset += block.bytes;
                figure
            })
            .collect();
        session.out.blocks = figures;
        outcome
    }

    /// Compares what is free with what was free after the warm-up.
    fn books(&mut self, baseline: u64, before: Option<&[health::GpuProcess]>) -> Result<(), Stop> {
        self.ledger.device_synchronize()?;
        let final_free = self.ledger.mem_get_info()?.free;
        let outstanding = self.ledger.outstanding();
        let missing = baseline.saturating_sub(final_free);
        let after = self.health.processes().ok();
        let bytes =
            |list: &[health::GpuProcess], pid: u32| list.iter().find(|process| process.pid == pid).map_or(Some(0), |process| process.bytes);
        // A list is to be relied upon if it has this process in it, and that once: in a container it is told by when it came.
        let lists_us =
            |list: Option<&[health::GpuProcess]>| list.is_some_and(|list| list.iter().filter(|process| process.own).count() == 1);
        let listed = lists_us(before) && lists_us(after.as_deref());
        let mut known = listed;
        let mut taken_by = Vec::new();
        for process in after.iter().flatten().filter(|process| !process.own) {
            match (process.bytes, bytes(before.unwrap_or(&[]), process.pid)) {
                (Some(now), Some(then)) if now > then => taken_by.push((process.pid, now - then)),
                (Some(_), Some(_)) => {}
                _ => known = false,
            }
        }
        let by_others: u64 = taken_by.iter().map(|(_, bytes)| bytes).sum();
        let takers: Vec<String> = taken_by.iter().map(|(pid, bytes)| format!("process {pid} {}", human(*bytes))).collect();
        self.out.books = Some(Books { baseline_free: baseline, final_free, reserved: 0, outstanding, taken_by });
        if outstanding != Outstanding::default() {
            let text = format!("{} of the driver were not given back by the allocator", human(outstanding.bytes));
            fail(self.out, "books", BOOKS, Cause::AllocatorFault, text, None);
        } else if missing == 0 {
            let step = step_mut(self.out, "books", BOOKS);
            step.passes += 1;
            step.detail = Some(format!("{} free, as after the warm-up", human(final_free)));
        } else if by_others >= missing {
            let step = step_mut(self.out, "books", BOOKS);
            step.passes += 1;
            step.detail = Some(format!("{} less free than after the warm-up; meanwhile {} more", human(missing), takers.join(", ")));
        } else if known {
            let text = format!("{} did not come back to the driver, and no other process took it", human(missing - by_others));
            fail(self.out, "books", BOOKS, Cause::Leak, text, None);
        } else {
            let why = match (before.is_some() && after.is_some(), listed) {
                (false, _) => "nobody can be asked who took it",
                (true, false) => "who took it cannot be told: the driver's list of processes does not name this one",
                (true, true) => "who took it cannot be told: the driver does not say how much each process holds",
            };
            let text = format!("{} less free than after the warm-up, and {why}", human(missing));
            not_tested(self.out, "books", BOOKS, Cause::Unsupported, text);
        }
        Ok(())
    }

    /// Notes why the test could not go on.
    fn stopped(&mut self, stop: &Stop) {
        match stop {
            Stop::Driver(error) => {
                fail(self.out, "driver", DRIVER, Cause::DriverError, error.to_string(), Some(*error));
            }
            Stop::Timeout { waited } => {
                let text = format!("a pass over the memory was not done after {:.0} s", waited.as_secs_f64());
                fail(self.out, "events", EVENTS, Cause::Timeout, text, None);
            }
            Stop::StuckEvent { waited } => {
                let text = format!("the stream was idle, but its event was not done after {:.0} s", waited.as_secs_f64());
                fail(self.out, "events", EVENTS, Cause::LateEvents, text, None);
            }
            // A finding says why.
            Stop::Broken => {}
            Stop::Budget { .. } => not_tested(self.out, "warm-up", WARM_UP, Cause::Budget, session::BUDGET),
        }
        let (cause, why) = if matches!(stop, Stop::Budget { .. }) { (Cause::Budget, UNBEGUN) } else { (Cause::Stopped, UNREACHED) };
        not_tested(self.out, "memory", MEMORY, cause, why);
        for test in plan::tests(self.options.level, self.options.seed, self.options.fade) {
            not_tested(self.out, test.name, test.title, cause, why);
        }
        not_tested(self.out, "books", BOOKS, cause, why);
    }
}

/// Why steps were not done.
const UNREACHED: &str = "not reached: an earlier step failed";
const UNBEGUN: &str = "the time budget was spent before it was begun";
/// What is left of the budget for the short test through expandable segments, at most.
const SHORT: Duration = Duration::from_secs(20);

fn give(source: &dyn Source, address: u64) -> Result<(), Stop> {
    source.give(address).map_err(|error| stop(&error))
}

/// An error of the allocator in the middle of a test. Lack of memory was dealt with before.
fn stop(error: &super::alloc::AllocError) -> Stop {
    match TakeError::from_alloc(error) {
        TakeError::Driver(error) => Stop::Driver(error),
        TakeError::Allocator(_) => Stop::Broken,
    }
}

/// Tries virtual memory management with one unit of memory. The inner error says why it is refused, as on WSL2.
fn probe_virtual_memory<K: Kernels>(ledger: &Ledger<K>) -> Result<Result<(), String>, Stop> {
    if !ledger.properties().virtual_memory {
        return Ok(Err("the device has no virtual memory management".to_owned()));
    }
    let attempt = || -> Result<(), DriverError> {
        let unit = ledger.granularity()?;
        let address = ledger.address_reserve(unit)?;
        let used = ledger.mem_create(unit).and_then(|handle| {
            let used = ledger.mem_map(address, unit, handle).and_then(|()| {
                let used = ledger.mem_set_access(address, unit).and_then(|()| ledger.copy_to_device(address, &[0; 8]));
                used.and(ledger.mem_unmap(address, unit))
            });
            used.and(ledger.mem_release(handle))
        });
        used.and(ledger.address_free(address, unit))
    };
    // Only what is asked for can be refused, not what is given back. 999 is WSL2's answer to `cuMemSetAccess`, and to nothing else a refusal.
    let refusal = |error: &DriverError| {
        let asked = matches!(
            error.call,
            Call::MemGetAllocationGranularity | Call::MemAddressReserve | Call::MemCreate | Call::MemMap | Call::MemSetAccess
        );
        asked && matches!(error.code, code::NOT_SUPPORTED | 800 | code::OUT_OF_MEMORY)
            || (error.code, error.call) == (code::UNKNOWN, Call::MemSetAccess)
    };
    match attempt() {
        Ok(()) => Ok(Ok(())),
        Err(error) if refusal(&error) => {
            ledger.forgive(&error);
            Ok(Err(format!("the driver refuses virtual memory management: {error}")))
        }
        Err(error) => Err(Stop::Driver(error)),
    }
}

/// Why the card is left alone; `None` if it may be tested.
fn idle<K: Kernels>(ledger: &Ledger<K>, out: &mut DeviceReport, options: &Options) -> Result<Option<String>, DriverError> {
    let busy = match &out.health.processes {
        Some(processes) => {
            let others: Vec<String> = processes
                .iter()
                .filter(|process| process.compute && !process.own)
                .map(|process| {
                    let name = process.name.as_ref().map_or_else(String::new, |name| format!(" (`{name}`)"));
                    let bytes = process.bytes.map_or_else(String::new, |bytes| format!(" with {}", human(bytes)));
                    format!("process {}{name}{bytes}", process.pid)
                })
                .collect();
            (!others.is_empty()).then(|| format!("others compute on the card: {}", others.join(", ")))
        }
        // Nobody to ask: a card that is much fuller than one context makes it.
        None => {
            let info = ledger.mem_get_info()?;
            let used = info.total.saturating_sub(info.free);
            (used > (info.total / 8).max(1 << 30)).then(|| format!("{} of {} are in use", human(used), human(info.total)))
        }
    };
    Ok(match busy {
        Some(why) if !options.even_if_busy => Some(why),
        busy => {
            let step = step_mut(out, "idle", IDLE);
            step.passes += 1;
            step.detail = busy.map(|why| format!("tested all the same: {why}"));
            None
        }
    })
}

/// First look at the driver's own counters. Whether Xid events are watched for.
fn watch(out: &mut DeviceReport, health: &dyn HealthSource) -> health::Reading<()> {
    let figures = &mut out.health;
    figures.source = health.name();
    figures.ecc_before = health.ecc().ok();
    figures.replaced_before = health.replaced().ok();
    figures.processes = health.processes().ok();
    health.watch_xids()
}

/// Xid codes that speak of the card and not of a program: double-bit errors, remapping, retirement, NVLink, fallen off the bus,
/// contained and uncontained errors, GSP and firmware time-outs, unrecovered ECC.
const CARD_XIDS: [u64; 16] = [48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 110, 119, 120, 140, 143, 154];

/// Second look, and what came of it.
fn look_again(out: &mut DeviceReport, health: &dyn HealthSource, watched: health::Reading<()>) {
    match (out.health.ecc_before, health.ecc()) {
        (Some(before), Ok(after)) => {
            out.health.ecc_after = Some(after);
            let moved = |then: u64, now: u64| now.saturating_sub(then);
            let corrected = moved(before.volatile_corrected, after.volatile_corrected)
                .max(moved(before.aggregate_corrected, after.aggregate_corrected));
            let uncorrected = moved(before.volatile_uncorrected, after.volatile_uncorrected)
                .max(moved(before.aggregate_uncorrected, after.aggregate_uncorrected));
            if corrected + uncorrected > 0 {
                let text = format!("during the test the card counted {corrected} corrected and {uncorrected} uncorrected memory errors");
                fail(out, "ecc", ECC, Cause::EccErrors, text, None);
            } else {
                step_mut(out, "ecc", ECC).passes += 1;
            }
        }
        (_, after) => not_tested(out, "ecc", ECC, Cause::Unsupported, after.err().unwrap_or_else(|| "no counters at the start".into())),
    }
    match (out.health.replaced_before, health.replaced()) {
        (Some(before), Ok(after)) => {
            out.health.replaced_after = Some(after);
            let more = (after.corrected + after.uncorrected).saturating_sub(before.corrected + before.uncorrected);
            let what = if after.failed {
                Some("replacing a row of memory has failed: the card needs service".to_owned())
            } else if more > 0 {
                Some(format!("{more} row{} of memory replaced during the test", if more == 1 { " was" } else { "s were" }))
            } else if after.pending {
                Some("a row of memory waits to be replaced at the next reset of the card".to_owned())
            } else {
                None
            };
            match what {
                Some(text) => fail(out, "rows", ROWS, Cause::RowsRemapped, text, None),
                None => step_mut(out, "rows", ROWS).passes += 1,
            }
        }
        (_, after) => not_tested(out, "rows", ROWS, Cause::Unsupported, after.err().unwrap_or_else(|| "no figures at the start".into())),
    }
    match watched.and_then(|()| health.xids()) {
        Ok(xids) => {
            let alone = out.health.processes.as_ref().is_none_or(|list| list.iter().all(|process| process.own));
            let ours: Vec<String> = xids.iter().filter(|xid| alone || CARD_XIDS.contains(xid)).map(ToString::to_string).collect();
            if ours.is_empty() {
                let step = step_mut(out, "xid", XID);
                step.passes += 1;
                step.detail = (!xids.is_empty()).then(|| format!("Xid {xids:?}: of a program, perhaps another process's"));
            } else {
                fail(out, "xid", XID, Cause::Xid, format!("during the test the driver reported Xid {}", ours.join(", ")), None);
            }
            out.health.xids = Some(xids);
        }
        Err(why) => not_tested(out, "xid", XID, Cause::Unsupported, why),
    }
}

fn summarise_bandwidth(out: &mut DeviceReport) {
    let mut kinds: Vec<&'static str> = Vec::new();
    for pass in &out.passes {
        if pass.gb_per_s > 0.0 && !kinds.contains(&pass.kind) {
            kinds.push(pass.kind);
        }
    }
    for kind in kinds {
        let mut rates: Vec<f64> =
            out.passes.iter().filter(|pass| pass.kind == kind && pass.gb_per_s > 0.0).map(|pass| pass.gb_per_s).collect();
        let passes = rates.len() as u64;
        if let Some(gb_per_s) = median(&mut rates) {
            let of_copy_rate = out.copy_gb_per_s.map(|rate| gb_per_s / rate);
            out.bandwidth.push(Bandwidth { kind, passes, gb_per_s, of_copy_rate });
        }
    }
}

/// The verdict from steps and findings.
fn conclude(out: &mut DeviceReport) {
    let percent = |part: f64| format!("{:.1} %", 100.0 * part);
    if let Some(worst) = out.findings.iter().min_by_key(|finding| finding.cause) {
        (out.status, out.cause, out.summary) = (Status::Fail, Some(worst.cause), worst.text.clone());
        out.hints.extend(hint(worst.cause, out.device.starts_with("sim:")).map(str::to_owned));
        return;
    }
    // What the machine cannot do is left out of the verdict; what should have been done is not.
    let open = out.steps.iter().filter(|step| step.status == Status::NotTested);
    let left: Vec<_> = open.filter(|step| step.cause != Some(Cause::Unsupported) || matches!(step.name, "memory" | "warm-up")).collect();
    if let Some(first) = left.iter().min_by_key(|step| step.cause) {
        out.status = Status::NotTested;
        out.cause = first.cause;
        out.summary = first.detail.clone().unwrap_or_else(|| first.title.to_owned());
        let simulated = out.device.starts_with("sim:");
        out.hints.extend(first.cause.and_then(|cause| hint(cause, simulated)).map(str::to_owned));
        return;
    }
    out.status = Status::Pass;
    out.summary = format!(
        "{} of memory hold what is written to them ({} of the card, {} of what was free)",
        human(out.coverage.bytes),
        percent(out.coverage.of_total),
        percent(out.coverage.of_free)
    );
}

/// What to do next. A simulated card has no warranty, no driver's messages and nothing to reset.
fn hint(cause: Cause, simulated: bool) -> Option<&'static str> {
    Some(match cause {
        Cause::AliasedAddresses
        | Cause::StuckBit
        | Cause::FlippedBit
        | Cause::DriverError
        | Cause::Timeout
        | Cause::LateEvents
        | Cause::Kernels
        | Cause::Leak
        | Cause::EccErrors
        | Cause::RowsRemapped
        | Cause::Xid
            if simulated =>
        {
            "the card is simulated: its faults are those of the description behind `sim:`"
        }
        Cause::AllocatorFault => "this is a fault of tare's allocator or of the driver, not of the card's memory: report it with `--json`",
        Cause::AliasedAddresses | Cause::StuckBit => {
            "the card's memory is defective: do not compute on it; keep the report for the warranty"
        }
        Cause::FlippedBit => {
            "run it again with `--level thorough`: if words are wrong again, the card, its power or its cooling is at fault"
        }
        Cause::DriverError => "look for driver messages (`dmesg | grep -i nvrm`), then restart the machine or update the driver",
        Cause::Timeout | Cause::LateEvents => {
            "look for driver messages (`dmesg | grep -i nvrm`); a reset of the card may help (`nvidia-smi -r`)"
        }
        Cause::Kernels => "the driver does not run the test's kernels correctly: update it",
        Cause::Leak => "the driver keeps memory of this process: compare `tare gpu info` after it has ended",
        Cause::EccErrors | Cause::RowsRemapped => "reset the card (`nvidia-smi -r`) and test again; if it repeats, have it replaced",
        Cause::Xid => "look up the Xid in the driver's documentation",
        Cause::NoDevice => "`tare gpu info` says what was looked for; `--device sim:8GiB` runs the test on a simulated card",
        Cause::Busy => "test when the card is idle, or what is free now with `--even-if-busy`",
        Cause::OutOfMemory => "free the card first, or leave more to others with `--reserve`",
        Cause::Unsupported => "test through native segments: `--native`",
        Cause::Budget => "give it more time with `--budget`, or use `--level quick`",
        Cause::Stopped => return None,
    })
}
