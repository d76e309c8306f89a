//! `tare gpu whatif`: what a recorded run would have needed under another configuration, or on another card.
//!
//! The program's requests are taken from the recording: sizes, streams, pools, frees and the points at which it emptied the cache.
//! The allocator then runs on a modelled card. Three things are not in a recording and are treated openly:
//!
//! * Which addresses the driver returns. Ties between free blocks of one size depend on them, so every configuration runs under
//!   several orders of addresses and the answer is a range.
//! * What was there before the recording began. As long as the configuration cuts memory as the recorded one does, the state at the
//!   beginning is taken as it was ("as recorded"); under another layout (expandable segments, another segment size) the live blocks are
//!   allocated anew, idle memory is left out, and the comparison is with the recorded configuration laid out anew as well.
//! * Releases. Those by the program stay where they were. Those by a request that ran short are kept when no capacity is given, and
//!   left to the model when one is.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::drive::{AddressOrder, Model};
use super::frames;
use super::model::{Action, BlockState, PoolId, Snapshot, StackId, TraceEntry};
use super::replay::{self, AddressMap, Fidelity, malloc_in};
use super::report::{ReplayOptions, Replayed, detect, rule_of, share};
use super::start::StartState;
use crate::error::{Error, Result};
use crate::gpu::alloc::config::Surroundings;
use crate::gpu::alloc::{AllocConfig, AllocError, DeviceAllocator, Evidence, Policy, TorchVersion};
use crate::gpu::summary::clean;
use crate::gpu::{human, plural};

/// What to ask.
#[derive(Debug, Clone, Default)]
pub struct WhatIfOptions {
    /// The device; `None`: the one with most events.
    pub device: Option<u32>,
    /// The rules; `None`: those that reproduce the recording best.
    pub version: Option<TorchVersion>,
    /// Configuration texts as for `PYTORCH_CUDA_ALLOC_CONF`; each is one question.
    pub confs: Vec<String>,
    /// Bytes of the card that the process can use; `None`: as much as is asked for.
    pub capacity: Option<u64>,
    /// Search the space of configurations and recommend one.
    pub sweep: bool,
    /// The machine the answer is for.
    pub surroundings: Surroundings,
}

/// Lowest and highest value over the orders of driver addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Span {
    /// Lowest.
    pub min: u64,
    /// Highest.
    pub max: u64,
}

impl Span {
    fn of(values: impl Iterator<Item = u64>) -> Self {
        let mut span: Option<Span> = None;
        for value in values {
            let now = span.get_or_insert(Span { min: value, max: value });
            now.min = now.min.min(value);
            now.max = now.max.max(value);
        }
        span.unwrap_or(Span { min: 0, max: 0 })
    }

    fn show(self, f: impl Fn(u64) -> String) -> String {
        let (min, max) = (f(self.min), f(self.max));
        if min == max { min } else { format!("{min} to {max}") }
    }
}

/// How the state at the beginning of the recording is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Beginning {
    /// Segments, blocks and idle memory as they were.
    AsRecorded,
    /// Live blocks allocated anew under the configuration; no idle memory.
    Anew,
}

/// Where a run first ran out of memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RanOut {
    /// Index of the event in the device's trace; `None`: while the live blocks of the beginning were laid out.
    pub event: Option<u64>,
    /// Its time in microseconds since the epoch, where recorded.
    pub time_us: Option<i64>,
    /// Bytes asked for.
    pub requested: u64,
    /// The innermost own frame of the request.
    pub frame: Option<String>,
    /// Bytes allocated and reserved then.
    pub allocated: u64,
    /// Bytes reserved then.
    pub reserved: u64,
    /// Under which order of addresses.
    pub order: String,
}

/// One run under one order of addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OneRun {
    /// Order of driver addresses.
    pub order: String,
    /// Highest reserved bytes.
    pub peak_reserved: u64,
    /// Highest allocated bytes.
    pub peak_allocated: u64,
    /// Reserved bytes at the end.
    pub end_reserved: u64,
    /// Driver allocations tried again after the cache was emptied.
    pub retries: u64,
    /// Requests that failed; the run goes on without them.
    pub ooms: u64,
    /// Segments taken, or ranges mapped.
    pub driver_allocs: u64,
    /// Where it first ran out.
    pub ran_out: Option<RanOut>,
}

/// The answer for one configuration.
#[derive(Debug, Clone, Serialize)]
pub struct ConfResult {
    /// The configuration in its shortest form; empty: defaults.
    pub conf: String,
    #[serde(skip)]
    config: AllocConfig,
    /// How the beginning was laid out.
    pub beginning: Beginning,
    /// Highest reserved bytes.
    pub peak_reserved: Span,
    /// Highest allocated bytes (block sizes, so rounding shows).
    pub peak_allocated: Span,
    /// Reserved bytes at the end.
    pub end_reserved: Span,
    /// Peak of allocated in parts of 10,000 of the peak of reserved.
    pub utilisation_per_10000: Span,
    /// Driver allocations tried again after the cache was emptied.
    pub retries: Span,
    /// Requests that failed.
    pub ooms: Span,
    /// Segments taken, or ranges mapped: each costs time.
    pub driver_allocs: Span,
    /// Where it runs out first, in the worst order.
    pub ran_out: Option<RanOut>,
    /// In how many orders it runs out.
    pub ran_out_in: usize,
    /// Peak of reserved bytes of the recorded configuration with the same beginning.
    pub reference: Span,
    /// Bytes of peak that this configuration certainly saves in the model: lowest reference minus highest own. Negative: costs.
    pub gain: i64,
    /// What the rules behind it rest on; the weakest counts.
    pub evidence: Evidence,
    /// Rules that no recorded trace reaches and that this configuration uses.
    pub unproven_rules: Vec<String>,
    /// Settings that do nothing or harm.
    pub warnings: Vec<String>,
    /// Every run.
    pub runs: Vec<OneRun>,
}

/// How well the model reproduces the recording before it is asked anything else.
#[derive(Debug, Clone, Serialize)]
pub struct Baseline {
    /// Whether every decision of the recording comes out, and its peak too.
    pub exact: bool,
    /// The replay.
    pub fidelity: Fidelity,
    /// Peak of reserved bytes as the recorded events tell it.
    pub recorded_peak_reserved: u64,
    /// The same in the model, with the recorded addresses.
    pub model_peak_reserved: u64,
    /// In words.
    pub explanation: String,
    /// torch version of the rules.
    pub version: String,
    /// What the core rules rest on.
    pub evidence: Evidence,
    /// What that means for this recording, in words.
    pub standing: String,
}

/// A line to export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Recommendation {
    /// The configuration.
    pub conf: String,
    /// The shell line.
    pub export: String,
    /// Bytes of peak that it saves, at least, in the model.
    pub gain: i64,
    /// Peak before and after.
    pub from: Span,
    /// Peak with it.
    pub to: Span,
    /// Whether the recorded configuration runs out and this one does not.
    pub avoids_running_out: bool,
    /// What to keep in mind.
    pub caveats: Vec<String>,
}

/// The whole answer. All sizes are bytes.
#[derive(Debug, Clone, Serialize)]
pub struct WhatIfReport {
    /// Device.
    pub device: u32,
    /// Events.
    pub events: u64,
    /// Bytes of the card, if limited.
    pub capacity: Option<u64>,
    /// Orders of driver addresses that were run.
    pub orders: Vec<String>,
    /// How well the model reproduces the recording.
    pub baseline: Baseline,
    /// The recorded configuration in the model.
    pub recorded: ConfResult,
    /// The answers, in the order asked, then those of the sweep from the best on.
    pub results: Vec<ConfResult>,
    /// A line to export, if one is better.
    pub recommendation: Option<Recommendation>,
    /// Why nothing is recommended.
    pub no_recommendation: Option<String>,
    /// Remarks.
    pub warnings: Vec<String>,
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Malloc {
        slot: u32,
        event: u32,
    },
    /// Freed at once.
    Free {
        slot: u32,
    },
    /// Freed, but still in use by another stream.
    Begin {
        slot: u32,
    },
    Finish {
        slot: u32,
    },
    /// The program emptied the cache.
    Empty {
        event: u32,
    },
    /// A request ran short and gave memory back; only without a capacity.
    Short {
        event: u32,
    },
    /// A request that failed in the recording; only with a capacity. If it succeeds, it is freed at once.
    Try {
        event: u32,
    },
}

/// A recording as a list of requests.
struct Program<'a> {
    snapshot: &'a Snapshot,
    trace: &'a [TraceEntry],
    start: &'a StartState,
    ops: Vec<Op>,
    /// Number of blocks that ever live.
    slots: usize,
    /// Blocks that live at the beginning: slot, index of segment and block.
    begin: Vec<(u32, usize, usize)>,
    /// Pools of requests, where not the default one.
    pools: HashMap<u32, PoolId>,
    /// Private pools whose memory goes back at a release, so that they have no users any more.
    let_go: HashMap<u32, Vec<PoolId>>,
    /// Sizes and addresses of recorded segments, in order.
    segments: Vec<(u64, u64)>,
    recorded_ooms: u64,
}

impl<'a> Program<'a> {
    fn new(snapshot: &'a Snapshot, replayed: &'a Replayed) -> Result<Self> {
        let trace = snapshot.trace(replayed.device);
        if trace.len() >= u32::MAX as usize {
            return Err(Error::failure("a trace of more than 4 thousand million events cannot be asked about"));
        }
        let start = &replayed.start;
        let mut program = Program {
            snapshot,
            trace,
            start,
            ops: Vec::with_capacity(trace.len()),
            slots: 0,
            begin: Vec::new(),
            pools: HashMap::new(),
            let_go: HashMap::new(),
            segments: Vec::new(),
            recorded_ooms: 0,
        };
        let mut live: AddressMap<u32> = AddressMap::default();
        for (at, segment) in start.segments.iter().enumerate() {
            for (inner, block) in segment.blocks.iter().enumerate().filter(|(_, block)| block.state != BlockState::Inactive) {
                live.insert(block.address, program.slots as u32);
                program.begin.push((program.slots as u32, at, inner));
                program.slots += 1;
            }
        }
        // Without stacks: under these settings requests give back parts of the cache.
        let partial = replayed.config.max_split_size.is_some() || replayed.config.garbage_collection_threshold > 0.0;
        let mut ranges = replay::PoolRanges::new(snapshot, start);
        let mut burst: Option<(u32, StackId, bool)> = None;
        let mut requested: Option<(u64, u32)> = None;
        for (index, entry) in trace.iter().enumerate() {
            let event = index as u32;
            if let Some((addr, slot)) = requested
                && !(entry.action == Action::FreeCompleted && entry.addr == addr)
            {
                program.ops.push(Op::Begin { slot });
                requested = None;
            }
            match entry.action {
                Action::SegmentFree | Action::SegmentUnmap => {
                    if burst.is_none() {
                        burst = Some((event, entry.stack, false));
                    }
                    let pool = ranges.at(entry.addr);
                    if let Some((event, ..)) = burst
                        && pool != (0, 0)
                    {
                        program.let_go.entry(event).or_default().push(pool);
                    }
                    continue;
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    ranges.taken(index, entry);
                    if entry.action == Action::SegmentAlloc {
                        program.segments.push((entry.size, entry.addr));
                    }
                    if let Some((_, _, taken)) = &mut burst {
                        *taken = true;
                    }
                    continue;
                }
                _ => {}
            }
            if let Some((event, stack, taken)) = burst.take() {
                let inside = entry.action == Action::Alloc
                    && taken
                    && replay::released_inside(Some(&snapshot.names), stack, entry.stack).unwrap_or(partial);
                let inside = inside || entry.action == Action::Oom;
                program.ops.push(if inside { Op::Short { event } } else { Op::Empty { event } });
            }
            match entry.action {
                Action::Alloc => {
                    let slot = program.slots as u32;
                    program.slots += 1;
                    live.insert(entry.addr, slot);
                    let pool = ranges.pool_of(entry);
                    if pool != (0, 0) {
                        program.pools.insert(event, pool);
                    }
                    program.ops.push(Op::Malloc { slot, event });
                }
                Action::FreeRequested => requested = live.get(&entry.addr).map(|slot| (entry.addr, *slot)),
                Action::FreeCompleted => {
                    if let Some(slot) = live.remove(&entry.addr) {
                        program.ops.push(if requested.take().is_some() { Op::Free { slot } } else { Op::Finish { slot } });
                    }
                }
                Action::Oom => {
                    program.recorded_ooms += 1;
                    if entry.size > 0 {
                        program.ops.push(Op::Try { event });
                    }
                }
                _ => {}
            }
        }
        if let Some((_, slot)) = requested {
            program.ops.push(Op::Begin { slot });
        }
        if let Some((event, ..)) = burst {
            program.ops.push(Op::Empty { event });
        }
        Ok(program)
    }

    /// What of the state at the beginning fits on a card of `capacity` bytes, and whether it does. A cache that leaves no room would
    /// have been given back before a request failed, so segments in which nothing lives are left out where the whole does not fit.
    fn fitting(&self, capacity: Option<u64>) -> (Cow<'a, StartState>, bool) {
        let Some(capacity) = capacity.filter(|capacity| self.start.reserved() > *capacity) else {
            return (Cow::Borrowed(self.start), true);
        };
        let mut start = self.start.clone();
        start.segments.retain(|segment| segment.blocks.iter().any(|block| block.state != BlockState::Inactive));
        let fits = start.reserved() <= capacity;
        (Cow::Owned(start), fits)
    }

    /// Runs the program once.
    fn run(
        &self,
        policy: Policy,
        config: &AllocConfig,
        capacity: Option<u64>,
        order: AddressOrder,
        beginning: Beginning,
    ) -> Result<OneRun> {
        let driver = Model::new(capacity, order, self.segments.iter().copied());
        let mut config = config.clone();
        if capacity.is_none() {
            // A fraction of an unlimited card limits nothing.
            config.per_process_memory_fraction = 1.0;
        }
        let mut allocator = DeviceAllocator::new(driver, policy, config);
        let mut addresses = vec![0_u64; self.slots];
        let mut ran_out = None;
        let mut impossible = 0;
        let fatal = |error: AllocError| Error::from(error).context("the model of the card failed");
        match beginning {
            Beginning::AsRecorded => {
                let (start, fits) = self.fitting(capacity);
                if !start.segments.is_empty() {
                    allocator.restore(&replay::seeds(&start)).map_err(fatal)?;
                    allocator.driver().adopt(start.segments.iter().map(|segment| (segment.address, segment.size, segment.expandable)));
                }
                if !fits {
                    // What lived at the beginning would not have been there.
                    impossible = 1;
                    ran_out = Some(self.ran_out(&allocator, (None, None, start.reserved(), StackId::EMPTY), order));
                }
                for (slot, segment, block) in &self.begin {
                    addresses[*slot as usize] = self.start.segments[*segment].blocks[*block].address;
                }
            }
            Beginning::Anew => {
                for (slot, segment, block) in &self.begin {
                    let segment = &self.start.segments[*segment];
                    let block = segment.blocks[*block];
                    match malloc_in(&mut allocator, segment.pool, block.requested.max(1), segment.stream, 0) {
                        Ok(made) => {
                            addresses[*slot as usize] = made.address;
                            if block.state == BlockState::ActivePendingFree {
                                allocator.begin_free(made.address).map_err(fatal)?;
                            }
                        }
                        Err(AllocError::OutOfMemory(_)) => {
                            let here = (None, None, block.requested, block.stack);
                            ran_out.get_or_insert_with(|| self.ran_out(&allocator, here, order));
                        }
                        Err(error) => return Err(fatal(error)),
                    }
                }
            }
        }
        for op in &self.ops {
            match *op {
                Op::Malloc { slot, event } => {
                    let entry = &self.trace[event as usize];
                    let pool = if self.pools.is_empty() { (0, 0) } else { self.pools.get(&event).copied().unwrap_or((0, 0)) };
                    match malloc_in(&mut allocator, pool, entry.size, entry.stream, u64::from(event)) {
                        Ok(made) => addresses[slot as usize] = made.address,
                        Err(AllocError::OutOfMemory(_)) => {
                            let here = (Some(u64::from(event)), entry.time(), entry.size, entry.stack);
                            ran_out.get_or_insert_with(|| self.ran_out(&allocator, here, order));
                        }
                        Err(error) => return Err(fatal(error)),
                    }
                }
                Op::Free { slot } if addresses[slot as usize] != 0 => allocator.free(addresses[slot as usize]).map_err(fatal)?,
                Op::Begin { slot } if addresses[slot as usize] != 0 => allocator.begin_free(addresses[slot as usize]).map_err(fatal)?,
                Op::Finish { slot } if addresses[slot as usize] != 0 => {
                    let address = addresses[slot as usize];
                    if allocator.finish_free(address).is_err() {
                        allocator.free(address).map_err(fatal)?;
                    }
                }
                Op::Try { event } if capacity.is_some() => {
                    let entry = &self.trace[event as usize];
                    match malloc_in(&mut allocator, (0, 0), entry.size, entry.stream, u64::from(event)) {
                        Ok(made) => allocator.free(made.address).map_err(fatal)?,
                        Err(AllocError::OutOfMemory(_)) => {
                            let here = (Some(u64::from(event)), entry.time(), entry.size, entry.stack);
                            ran_out.get_or_insert_with(|| self.ran_out(&allocator, here, order));
                        }
                        Err(error) => return Err(fatal(error)),
                    }
                }
                Op::Short { .. } if capacity.is_some() => {}
                Op::Empty { event } | Op::Short { event } => {
                    for pool in self.let_go.get(&event).into_iter().flatten() {
                        replay::let_go(&mut allocator, *pool);
                    }
                    allocator.empty_cache().map_err(fatal)?;
                }
                Op::Free { .. } | Op::Begin { .. } | Op::Finish { .. } | Op::Try { .. } => {}
            }
        }
        let stats = allocator.raw_stats();
        Ok(OneRun {
            order: order.to_string(),
            peak_reserved: stats.reserved_bytes.all.peak,
            peak_allocated: stats.allocated_bytes.all.peak,
            end_reserved: stats.reserved_bytes.all.current,
            retries: stats.num_alloc_retries,
            ooms: stats.num_ooms + stats.num_oom_rejections + impossible,
            driver_allocs: stats.num_device_alloc,
            ran_out,
        })
    }

    fn ran_out(
        &self,
        allocator: &DeviceAllocator<Model>,
        (event, time_us, requested, stack): (Option<u64>, Option<i64>, u64, StackId),
        order: AddressOrder,
    ) -> RanOut {
        let stats = allocator.raw_stats();
        RanOut {
            event,
            time_us,
            requested,
            frame: frames::holder(&self.snapshot.names, stack).map(|frame| frames::describe(&self.snapshot.names, frame)),
            allocated: stats.allocated_bytes.all.current,
            reserved: stats.reserved_bytes.all.current,
            order: order.to_string(),
        }
    }
}

/// The orders that every configuration runs under.
const ORDERS: [AddressOrder; 5] =
    [AddressOrder::Recorded, AddressOrder::Ascending, AddressOrder::Descending, AddressOrder::Scattered(1), AddressOrder::Scattered(2)];

struct Asked {
    conf: String,
    config: AllocConfig,
    warnings: Vec<String>,
}

/// Runs configurations under all orders, on all processors. One answer (all runs) for each.
fn run_all(program: &Program, policy: Policy, capacity: Option<u64>, asked: &[(&AllocConfig, Beginning)]) -> Result<Vec<Vec<OneRun>>> {
    let tasks: Vec<(usize, AddressOrder)> = (0..asked.len()).flat_map(|at| ORDERS.map(|order| (at, order))).collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(tasks.len().max(1));
    let mut done: Vec<Option<Result<OneRun>>> = (0..tasks.len()).map(|_| None).collect();
    std::thread::scope(|scope| {
        let work = || {
            let mut mine = Vec::new();
            loop {
                let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let Some((conf, order)) = tasks.get(at) else { return mine };
                let (config, beginning) = asked[*conf];
                mine.push((at, program.run(policy, config, capacity, *order, beginning)));
            }
        };
        let handles: Vec<_> = (1..workers).map(|_| scope.spawn(work)).collect();
        for (at, run) in work() {
            done[at] = Some(run);
        }
        for handle in handles {
            if let Ok(mine) = handle.join() {
                for (at, run) in mine {
                    done[at] = Some(run);
                }
            }
        }
    });
    let mut answers: Vec<Vec<OneRun>> = (0..asked.len()).map(|_| Vec::new()).collect();
    for ((conf, _), run) in tasks.into_iter().zip(done) {
        answers[conf].push(run.unwrap_or_else(|| Err(Error::failure("a run of the model was lost")))?);
    }
    Ok(answers)
}

fn result(asked: &Asked, runs: Vec<OneRun>, beginning: Beginning, reference: Span, policy: &Policy) -> ConfResult {
    let span = |value: fn(&OneRun) -> u64| Span::of(runs.iter().map(value));
    let peak_reserved = span(|run| run.peak_reserved);
    let table = policy.table();
    let mut evidence = policy.core_evidence();
    let mut unproven_rules = Vec::new();
    for key in asked.config.differing_keys(&AllocConfig::default()) {
        let row = rule_of(key).and_then(|rule| table.iter().find(|row| row.rule == rule));
        if let Some(row) = row
            && !row.evidence.is_verified()
        {
            evidence = evidence.max(row.evidence);
            unproven_rules.push(format!("{}: {}", row.rule, row.evidence));
        }
    }
    ConfResult {
        conf: asked.conf.clone(),
        config: asked.config.clone(),
        beginning,
        peak_reserved,
        peak_allocated: span(|run| run.peak_allocated),
        end_reserved: span(|run| run.end_reserved),
        utilisation_per_10000: Span::of(runs.iter().map(|run| share(run.peak_allocated, run.peak_reserved))),
        retries: span(|run| run.retries),
        ooms: span(|run| run.ooms),
        driver_allocs: span(|run| run.driver_allocs),
        ran_out: runs.iter().filter_map(|run| run.ran_out.clone()).min_by_key(|ran_out| ran_out.event.map_or(0, |event| event + 1)),
        ran_out_in: runs.iter().filter(|run| run.ran_out.is_some()).count(),
        reference,
        gain: i64::try_from(reference.min).unwrap_or(i64::MAX).saturating_sub(i64::try_from(peak_reserved.max).unwrap_or(i64::MAX)),
        evidence,
        unproven_rules,
        warnings: asked.warnings.clone(),
        runs,
    }
}

fn parse(conf: &str, policy: &Policy, options: &WhatIfOptions) -> Result<Asked> {
    let (config, warnings) = AllocConfig::parse(conf, policy).map_err(|error| error.into_error("--conf"))?;
    let mut texts: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    texts.extend(config.warnings(policy, &options.surroundings).iter().map(ToString::to_string));
    if config.per_process_memory_fraction < 1.0 && options.capacity.is_none() {
        texts.push("`per_process_memory_fraction` is a part of the card: give its size with `--capacity`".to_owned());
    }
    Ok(Asked { conf: config.to_string(), config, warnings: texts })
}

/// Whether the recorded layout can stand under this configuration.
fn beginning_for(config: &AllocConfig, recorded: &AllocConfig, start: &StartState) -> Beginning {
    let same = config.expandable_segments == recorded.expandable_segments && config.large_segment_size == recorded.large_segment_size;
    if same || start.segments.is_empty() { Beginning::AsRecorded } else { Beginning::Anew }
}

/// What the sweep tries, for the rules of a version.
fn space(policy: &Policy, capacity: Option<u64>) -> Vec<String> {
    let mut space: Vec<String> = vec![String::new(), "expandable_segments:True".to_owned()];
    for limit in [32, 64, 128, 256, 512, 1024] {
        space.push(format!("max_split_size_mb:{limit}"));
    }
    for divisions in [2, 4, 8, 16] {
        space.push(format!("roundup_power2_divisions:{divisions}"));
        space.push(format!("expandable_segments:True,roundup_power2_divisions:{divisions}"));
    }
    for limit in [64, 128, 256, 512] {
        space.push(format!("max_split_size_mb:{limit},roundup_power2_divisions:8"));
    }
    if policy.large_segment_option {
        for size in [32, 64, 128, 256] {
            space.push(format!("large_segment_size_mb:{size}"));
        }
        space.push("expandable_segments:True,large_segment_size_mb:64".to_owned());
    }
    if capacity.is_some() && policy.fraction_option {
        for threshold in ["0.6", "0.8", "0.9"] {
            space.push(format!("garbage_collection_threshold:{threshold},per_process_memory_fraction:0.99"));
        }
    }
    space
}

/// Answers what a recorded run would have needed.
///
/// # Errors
/// A configuration that PyTorch would refuse; a device that does not exist; an impossible recorded state.
pub fn what_if(snapshot: &Snapshot, options: &WhatIfOptions) -> Result<WhatIfReport> {
    let replayed = detect(snapshot, &ReplayOptions { device: options.device, version: options.version, ..ReplayOptions::default() })?;
    let policy = replayed.policy;
    let program = Program::new(snapshot, &replayed)?;
    let recorded = Asked { conf: replayed.config.to_string(), config: replayed.config.clone(), warnings: Vec::new() };
    let mut asked = Vec::new();
    for conf in &options.confs {
        asked.push(parse(conf, &policy, options)?);
    }
    let explicit = asked.len();
    if options.sweep {
        for conf in space(&policy, options.capacity) {
            // What this version refuses is no candidate.
            if let Ok(candidate) = parse(&conf, &policy, options)
                && candidate.config != recorded.config
                && asked.iter().all(|other| other.config != candidate.config)
            {
                asked.push(candidate);
            }
        }
    }
    let mut work: Vec<(&AllocConfig, Beginning)> = vec![(&recorded.config, Beginning::AsRecorded), (&recorded.config, Beginning::Anew)];
    work.extend(asked.iter().map(|asked| (&asked.config, beginning_for(&asked.config, &recorded.config, &replayed.start))));
    let mut answers = run_all(&program, policy, options.capacity, &work)?.into_iter();
    let (Some(as_recorded), Some(anew)) = (answers.next(), answers.next()) else {
        return Err(Error::failure("no run of the model came back"));
    };
    let reference = Span::of(as_recorded.iter().map(|run| run.peak_reserved));
    let reference_anew = Span::of(anew.iter().map(|run| run.peak_reserved));
    // The baseline is checked without a capacity, against the recorded addresses.
    let checked = program.run(policy, &recorded.config, None, AddressOrder::Recorded, Beginning::AsRecorded)?;
    let mut recorded_result = result(&recorded, as_recorded, Beginning::AsRecorded, reference, &policy);
    let mut results: Vec<ConfResult> = asked
        .iter()
        .zip(answers)
        .zip(&work[2..])
        .map(|((asked, runs), (_, beginning))| {
            let reference = if *beginning == Beginning::Anew { reference_anew } else { reference };
            result(asked, runs, *beginning, reference, &policy)
        })
        .collect();
    results[explicit..].sort_by(|a, b| (rank(a), &a.conf).cmp(&(rank(b), &b.conf)));
    let mut warnings = snapshot.warnings.clone();
    if let Some(capacity) = options.capacity {
        cramped(&program, capacity, &mut recorded_result, &mut results, &mut warnings);
    }
    let baseline = baseline(&replayed, &checked, &recorded_result, options);
    let (recommendation, no_recommendation) = recommend(&replayed, &baseline, &recorded_result, &results, options);
    warnings.extend(replayed.notes.iter().cloned());
    warnings.extend(replayed.contradictions.iter().cloned());
    warnings.extend(replayed.start.notes.iter().cloned());
    if program.recorded_ooms > 0 && options.capacity.is_none() {
        let mut text =
            format!("the recording ran out of memory {} times; without a capacity those requests are left out", program.recorded_ooms);
        if let Some(capacity) = program.start.total {
            let _ = write!(text, "; the process could have about {capacity} bytes ({}): ask with `--capacity {capacity}`", human(capacity));
        }
        warnings.push(text);
    }
    Ok(WhatIfReport {
        device: replayed.device,
        events: replayed.outcome.events,
        capacity: options.capacity,
        orders: ORDERS.iter().map(ToString::to_string).collect(),
        baseline,
        recorded: recorded_result,
        results,
        recommendation,
        no_recommendation,
        warnings,
    })
}

/// Best first: runs out least, saves most; of equals the one that changes least: fewest settings, the highest split limit, the most
/// divisions (which round least).
fn rank(result: &ConfResult) -> (usize, std::cmp::Reverse<i64>, usize, std::cmp::Reverse<u64>, std::cmp::Reverse<u32>) {
    let config = &result.config;
    let settings = config.differing_keys(&AllocConfig::default()).len();
    let limit = config.max_split_size.unwrap_or(u64::MAX);
    let divisions = config.roundup_power2_divisions.iter().copied().max().unwrap_or(0);
    (result.ran_out_in, std::cmp::Reverse(result.gain), settings, std::cmp::Reverse(limit), std::cmp::Reverse(divisions))
}

/// Tells where the recorded beginning, or a peak, is larger than the card.
fn cramped(program: &Program<'_>, capacity: u64, recorded: &mut ConfResult, results: &mut [ConfResult], warnings: &mut Vec<String>) {
    let (start, fits) = program.fitting(Some(capacity));
    let dropped = program.start.reserved() - start.reserved();
    if dropped > 0 {
        warnings.push(format!(
            "the recording began with {} reserved, more than the card of {}: {} of idle cache are left out, because the allocator would have given them back",
            human(program.start.reserved()),
            human(capacity),
            human(dropped)
        ));
    }
    if !fits {
        warnings.push(format!(
            "impossible on this card: segments of {} were in use when the recording began, and the card has {}",
            human(start.reserved()),
            human(capacity)
        ));
    }
    for result in std::iter::once(recorded).chain(results) {
        if result.peak_reserved.max > capacity {
            result.warnings.push(format!("impossible: the peak of {} is more than the card has", human(result.peak_reserved.max)));
        }
    }
}

fn baseline(replayed: &Replayed, checked: &OneRun, recorded: &ConfResult, options: &WhatIfOptions) -> Baseline {
    let fidelity = replayed.outcome.fidelity.clone();
    let told = replayed.outcome.recorded_reserved_peak.bytes;
    let exact = replayed.has_evidence() && fidelity.is_exact() && checked.peak_reserved == told;
    let mut explanation = if !replayed.has_evidence() {
        "the recording has no allocations, so nothing shows that the model holds".to_owned()
    } else if !fidelity.is_exact() {
        let first = fidelity.first_difference.as_ref().map(|difference| difference.what.clone());
        let first = first.or_else(|| replayed.contradictions.first().cloned()).map_or(String::new(), |what| format!(": {what}"));
        format!("the model does not reproduce the recording, so what it says about other configurations is a guess{first}")
    } else if checked.peak_reserved != told {
        format!(
            "every decision comes out, but the peak is {} instead of {}: the driver's addresses were reused in an order the model cannot follow",
            human(checked.peak_reserved),
            human(told)
        )
    } else {
        "every decision and the peak come out as recorded".to_owned()
    };
    if recorded.peak_reserved.min != recorded.peak_reserved.max && options.capacity.is_none() {
        let _ =
            write!(explanation, "; with other driver addresses the recorded configuration needs {}", recorded.peak_reserved.show(human));
    }
    Baseline {
        exact,
        fidelity,
        recorded_peak_reserved: told,
        model_peak_reserved: checked.peak_reserved,
        explanation,
        version: replayed.policy.version.to_string(),
        evidence: replayed.policy.core_evidence(),
        standing: replayed.why.standing.clone(),
    }
}

/// Gains below this part of the peak are noise: 1 %.
const NOTICEABLE: i64 = 100;

fn recommend(
    replayed: &Replayed,
    baseline: &Baseline,
    recorded: &ConfResult,
    results: &[ConfResult],
    options: &WhatIfOptions,
) -> (Option<Recommendation>, Option<String>) {
    let no = |why: String| (None, Some(why));
    if results.is_empty() {
        return (None, None);
    }
    if !replayed.has_evidence() {
        let what = if replayed.outcome.events == 0 {
            "events, so there is nothing to predict"
        } else {
            "allocations, so there is nothing to check the model against"
        };
        return no(format!("the recording has no {what}"));
    }
    if !baseline.exact {
        return no(format!("the baseline does not hold: {}", baseline.explanation));
    }
    if !baseline.evidence.is_verified() {
        return no(format!("the rules of torch {} are {}", baseline.version, baseline.evidence));
    }
    let best = results.iter().filter(|result| result.warnings.is_empty()).min_by_key(|result| rank(result));
    let Some(best) = best else { return no("every configuration asked about has a warning".to_owned()) };
    let avoids = recorded.ran_out_in > 0 && best.ran_out_in == 0;
    if best.ran_out_in > 0 && best.ran_out_in >= recorded.ran_out_in {
        return no("no configuration tried keeps the run from running out of memory".to_owned());
    }
    let noticeable = i64::try_from(best.reference.min).unwrap_or(i64::MAX) / NOTICEABLE;
    if !avoids && best.gain < noticeable.max(1) {
        return no(format!(
            "no configuration tried lowers the peak by 1 % or more in every order of addresses (best: {} by `{}`)",
            signed(best.gain),
            named(&best.conf)
        ));
    }
    let mut caveats = vec!["a prediction of the model: it was not compared with a run on a card".to_owned()];
    if best.beginning == Beginning::Anew {
        caveats.push(format!(
            "what lived before the recording began ({}) is laid out anew, and idle memory of that time is left out on both sides",
            human(replayed.start.allocated())
        ));
    }
    for rule in &best.unproven_rules {
        caveats.push(format!("rule {rule}"));
    }
    if best.driver_allocs.max > recorded.driver_allocs.max.saturating_mul(2) {
        caveats.push(format!(
            "the driver is asked {} times instead of {}: this costs time",
            best.driver_allocs.show(|n| n.to_string()),
            recorded.driver_allocs.show(|n| n.to_string())
        ));
    }
    if options.surroundings == Surroundings::default() && best.conf.contains("expandable_segments") {
        caveats.push("expandable segments do not work on WSL2, and cannot be shared between processes on old kernels".to_owned());
    }
    let recommendation = Recommendation {
        conf: best.conf.clone(),
        export: if best.conf.is_empty() {
            "unset PYTORCH_CUDA_ALLOC_CONF".to_owned()
        } else {
            format!("export PYTORCH_CUDA_ALLOC_CONF={}", quoted(&best.conf))
        },
        gain: best.gain,
        from: best.reference,
        to: best.peak_reserved,
        avoids_running_out: avoids,
        caveats,
    };
    (Some(recommendation), None)
}

/// A configuration for people.
fn named(conf: &str) -> &str {
    if conf.is_empty() { "defaults" } else { conf }
}

fn quoted(conf: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_:,.-".contains(c);
    if !conf.is_empty() && conf.chars().all(plain) { conf.to_owned() } else { format!("\"{conf}\"") }
}

fn signed(bytes: i64) -> String {
    let text = human(bytes.unsigned_abs());
    match bytes {
        0 => "0 B".to_owned(),
        1.. => format!("-{text}"),
        _ => format!("+{text}"),
    }
}

impl WhatIfReport {
    /// The answer as text, without colours.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let b = &self.baseline;
        let _ = writeln!(out, "what if: device {}, {} event{}", self.device, self.events, plural(self.events));
        if self.events == 0 {
            let _ = writeln!(out, "\nnothing to predict: the snapshot has no events, so it does not tell what the program asked for");
            let _ = writeln!(out, "hint: call torch.cuda.memory._record_memory_history() before the run, and dump the snapshot after it");
            for warning in &self.warnings {
                let _ = writeln!(out, "note: {}", clean(warning));
            }
            return out;
        }
        match self.capacity {
            Some(capacity) => {
                let _ = writeln!(out, "card: {}", human(capacity));
            }
            None => {
                let _ = writeln!(out, "card: as large as needed");
            }
        }
        let verdict = if b.exact {
            "exact"
        } else if b.fidelity.addresses == 0 {
            "not shown"
        } else {
            "NOT exact"
        };
        let _ = writeln!(out, "baseline: {verdict}");
        let _ = writeln!(out, "  {}", b.explanation);
        let _ = writeln!(
            out,
            "  addresses {} of {}, segments taken {} of {}, given back {} of {}; peak reserved {} in the model, {} recorded",
            b.fidelity.addresses_exact,
            b.fidelity.addresses,
            b.fidelity.segment_allocs_exact,
            b.fidelity.segment_allocs,
            b.fidelity.segment_frees_exact,
            b.fidelity.segment_frees,
            human(b.model_peak_reserved),
            human(b.recorded_peak_reserved)
        );
        let bare = b.standing == b.evidence.to_string() && self.results.iter().any(|result| !result.unproven_rules.is_empty());
        let standing = if bare { format!("core rules {}, settings asked about unverified", b.evidence) } else { b.standing.clone() };
        let _ = writeln!(out, "rules: torch {}, {standing}", b.version);
        let _ = writeln!(out, "orders of driver addresses: {}", self.orders.join(", "));
        let _ = writeln!(out);
        let cells = |result: &ConfResult, recorded: bool| {
            [
                result.peak_reserved.show(human),
                if recorded { String::new() } else { signed(result.gain) },
                result.utilisation_per_10000.show(|part| format!("{}.{}%", part / 100, part % 100 / 10)),
                result.retries.show(|n| n.to_string()),
                result.ooms.show(|n| n.to_string()),
            ]
        };
        let headings = ["peak reserved", "change", "utilisation", "retries", "OOM"].map(str::to_owned);
        let mut widths = headings.each_ref().map(|text| text.chars().count());
        for cells in std::iter::once(cells(&self.recorded, true)).chain(self.results.iter().map(|result| cells(result, false))) {
            for (width, cell) in widths.iter_mut().zip(&cells) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let line = |[peak, change, utilisation, retries, ooms]: &[String; 5], name: &str| {
            let [a, b, c, d, e] = widths;
            format!("{peak:>a$}  {change:>b$}  {utilisation:>c$}  {retries:>d$}  {ooms:>e$}  {name}")
        };
        let _ = writeln!(out, "{}", line(&headings, "configuration"));
        let mut row = |result: &ConfResult, recorded: bool| {
            let name = if recorded { format!("(recorded: {})", named(&result.conf)) } else { named(&result.conf).to_owned() };
            let anew = if result.beginning == Beginning::Anew { " *" } else { "" };
            let _ = writeln!(out, "{}", line(&cells(result, recorded), &format!("{name}{anew}")));
            if let Some(ran_out) = &result.ran_out {
                let event = ran_out.event.map_or("at the beginning".to_owned(), |event| format!("at event {event}"));
                let frame = ran_out.frame.as_deref().map_or(String::new(), |frame| format!(", in {}", clean(frame)));
                let _ = writeln!(
                    out,
                    "    runs out {event} in {} of {} orders, asking for {}{frame}; {} allocated of {} reserved then",
                    result.ran_out_in,
                    result.runs.len(),
                    human(ran_out.requested),
                    human(ran_out.allocated),
                    human(ran_out.reserved)
                );
            }
            for warning in &result.warnings {
                let _ = writeln!(out, "    warning: {warning}");
            }
        };
        row(&self.recorded, true);
        for result in &self.results {
            row(result, false);
        }
        if let Some(anew) = self.results.iter().find(|result| result.beginning == Beginning::Anew) {
            let _ = writeln!(
                out,
                "* live blocks of the beginning laid out anew; compared with the recorded configuration laid out the same way ({})",
                anew.reference.show(human)
            );
        }
        if let Some(best) = &self.recommendation {
            let _ = writeln!(out, "\nrecommended:\n  {}", best.export);
            let _ = writeln!(out, "  peak reserved {} instead of {}", best.to.show(human), best.from.show(human));
            if best.avoids_running_out {
                let _ = writeln!(out, "  the recorded configuration runs out of memory on this card, this one does not");
            }
            for caveat in &best.caveats {
                let _ = writeln!(out, "  note: {caveat}");
            }
        }
        if let Some(why) = &self.no_recommendation {
            let _ = writeln!(out, "\nnothing is recommended: {why}");
        }
        for warning in &self.warnings {
            let _ = writeln!(out, "note: {}", clean(warning));
        }
        out
    }
}

#[cfg(test)]
mod tests;
