//! Runs a scenario through the caching allocator on the simulated GPU.

use std::collections::BTreeMap;

use indexmap::IndexMap;
use serde::Serialize;

use super::networks::{self, Op};
use super::scenario::{Action, Dim, Expect, Keep, Lifetime, OnOom, Order, Phase, Scenario, Size, Step, Value, Variation, glob};
use crate::error::{Error, Result};
use crate::gpu::alloc::{self, AllocConfig, AllocError, DeviceAllocator, Evidence, Policy, TorchVersion};
use crate::gpu::driver::sim::{SimConfig, SimGpu};
use crate::gpu::driver::{Driver, StreamId};
use crate::gpu::summary::attribution::{Fate, Split};
use crate::gpu::summary::html::Comparison;
use crate::gpu::summary::{self, Summary};
use crate::gpu::trace::model::{self, FrameId, Generation, Segment, Settings, SizeClass, Snapshot, StackId, StrId};

/// The outcome of a scenario under all its variations.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Name of the scenario.
    pub scenario: String,
    /// What it shows, in its author's words.
    pub summary: String,
    /// Seed of the random choices.
    pub seed: u64,
    /// Physical memory of the simulated card, bytes.
    pub capacity: u64,
    /// Driver context of the process, bytes.
    pub context: u64,
    /// Other processes, bytes.
    pub other_processes: u64,
    /// Whose rules: `torch 2.10`.
    pub policy: String,
    /// What the core rules rest on (rounding, best fit, splitting, when to ask the driver), without special settings.
    pub evidence: Evidence,
    /// The scenario as written first, then its variations.
    pub runs: Vec<Run>,
    /// Where the first run went otherwise than the scenario expects; empty if as expected.
    pub surprises: Vec<String>,
}

/// One run.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    /// `as written`, or the variation's name.
    pub name: String,
    /// The configuration line.
    pub conf: String,
    /// Whether `empty_cache` was called after each phase.
    pub empty_cache: bool,
    /// What the rules of this configuration rest on; weaker than the report's where recordings do not reach the settings.
    pub evidence: Evidence,
    /// Settings that do nothing, and the like.
    pub warnings: Vec<String>,
    /// The phases that ran, in order, and those that did not.
    pub phases: Vec<PhaseReport>,
    /// Whether every phase completed.
    pub completes: bool,
    /// Highest bytes reserved.
    pub peak_reserved: u64,
    /// Highest bytes handed out.
    pub peak_allocated: u64,
    /// Driver allocations that were tried again after the cache was emptied.
    pub retries: u64,
    /// Allocations from the driver (segments and mapped pages).
    pub driver_allocations: u64,
}

/// How a phase ended.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum Outcome {
    /// All steps ran.
    Completed,
    /// An allocation failed.
    OutOfMemory(Box<Oom>),
    /// An earlier phase ran out of memory.
    Skipped,
}

/// An allocation that failed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Oom {
    /// Line of the step in the scenario.
    pub line: usize,
    /// The tensor.
    pub tensor: String,
    /// Bytes it asked for.
    pub requested: u64,
    /// Bytes the driver was asked for.
    pub from_driver: u64,
    /// Bytes free on the card.
    pub device_free: u64,
    /// Free bytes in the allocator's segments, after everything that could go back went back.
    pub free_but_reserved: u64,
    /// The largest free block.
    pub largest_free: u64,
    /// The message as PyTorch words it.
    pub message: String,
    /// What held the memory at that moment: bytes by cause.
    pub split: Split,
    /// What pinned the segments, the largest hole first.
    pub pins: Vec<Pin>,
    /// Tensors that pin, gathered by name, the most stranded memory first.
    pub pinned_by: Vec<PinGroup>,
}

/// A segment that cannot go back.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pin {
    /// Bytes of the segment.
    pub size: u64,
    /// Bytes free in it.
    pub free: u64,
    /// Live blocks in it.
    pub live_blocks: usize,
    /// Their bytes.
    pub live_bytes: u64,
    /// The largest of them, by name.
    pub by: Vec<String>,
}

/// The tensors of one step and what they strand.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PinGroup {
    /// Name and line.
    pub name: String,
    /// Bytes they hold in pinned segments.
    pub bytes: u64,
    /// Segments they are in.
    pub segments: usize,
    /// Bytes free right behind their blocks (or before the first of a segment): the share of the pinned memory that is theirs alone.
    pub strands: u64,
}

/// The state at the end of a phase (or at its failure).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseReport {
    /// Name of the phase.
    pub name: String,
    /// How it ended.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Bytes handed out.
    pub allocated: u64,
    /// Bytes reserved.
    pub reserved: u64,
    /// What `nvidia-smi` shows for this process: context and reserved bytes.
    pub nvidia_smi: u64,
    /// Free bytes of the card.
    pub device_free: u64,
    /// The largest free block of the allocator.
    pub largest_free: u64,
    /// What `empty_cache` would return now.
    pub empty_cache_returns: u64,
    /// Every reserved byte by cause.
    pub split: Split,
    /// Highest bytes handed out during the phase.
    pub peak_allocated: u64,
    /// Highest bytes reserved during the phase.
    pub peak_reserved: u64,
    /// What pins the segments, the largest hole first.
    pub pins: Vec<Pin>,
    /// Tensors that pin, gathered by name.
    pub pinned_by: Vec<PinGroup>,
}

/// How many pinned segments and groups a report lists.
const PINS: usize = 8;

/// The variations that are tried where a scenario names none.
pub fn default_variations(conf: &str) -> Vec<Variation> {
    let with =
        |more: &str| Some(if conf.trim().is_empty() { more.to_owned() } else { format!("{},{more}", conf.trim().trim_end_matches(',')) });
    let plain = |name: &str, conf: Option<String>, empty_cache| Variation { name: name.into(), conf, empty_cache, order: None };
    vec![
        plain("empty_cache() after each phase", None, true),
        plain("expandable_segments:True", with("expandable_segments:True"), false),
        plain("max_split_size_mb:64", with("max_split_size_mb:64"), false),
    ]
}

/// Runs the scenario as written and under its variations.
///
/// # Errors
/// A configuration that the torch version refuses; a scenario that frees or names what its earlier steps left empty is no error.
pub fn run(scenario: &Scenario) -> Result<Report> {
    let policy = Policy::pytorch(scenario.allocator.torch.parse::<TorchVersion>()?);
    let written = Variation { name: "as written".into(), conf: None, empty_cache: false, order: None };
    let mut runs = vec![run_one(scenario, &written)?];
    let defaults;
    let variations = if scenario.variations.is_empty() {
        defaults = default_variations(&scenario.allocator.conf);
        &defaults
    } else {
        &scenario.variations
    };
    for variation in variations {
        runs.push(run_one(scenario, variation)?);
    }
    let surprises = surprises(scenario, &runs[0]);
    Ok(Report {
        scenario: scenario.name.clone(),
        summary: scenario.summary.clone(),
        seed: scenario.seed,
        capacity: scenario.device.capacity,
        context: scenario.device.context,
        other_processes: scenario.device.other_processes,
        policy: format!("torch {}", policy.version),
        evidence: policy.core_evidence(),
        runs,
        surprises,
    })
}

fn surprises(scenario: &Scenario, run: &Run) -> Vec<String> {
    let mut list = Vec::new();
    for (phase, report) in scenario.phases.iter().zip(&run.phases) {
        match (phase.expect, &report.outcome) {
            (Expect::Completes, Outcome::OutOfMemory(_)) => {
                list.push(format!("phase `{}` ran out of memory; it was expected to complete", phase.name))
            }
            (Expect::Completes, Outcome::Skipped) => {
                list.push(format!("phase `{}` was not reached; it was expected to complete", phase.name))
            }
            (Expect::Oom, Outcome::Completed) => {
                list.push(format!("phase `{}` completed; it was expected to run out of memory", phase.name))
            }
            (Expect::Oom, Outcome::Skipped) => {
                list.push(format!("phase `{}` was not reached; it was expected to run out of memory", phase.name))
            }
            _ => {}
        }
    }
    list
}

impl Report {
    /// The runs as rows of the page's comparison.
    pub fn comparisons(&self) -> Vec<Comparison> {
        self.runs
            .iter()
            .map(|run| {
                let failed = run.phases.iter().find(|phase| matches!(phase.outcome, Outcome::OutOfMemory(_)));
                Comparison {
                    label: run.name.clone(),
                    peak_reserved: Some(run.peak_reserved),
                    peak_allocated: Some(run.peak_allocated),
                    retries: Some(run.retries),
                    completes: Some(run.completes),
                    note: failed.map_or_else(|| "completes".into(), |phase| format!("out of memory in {}", phase.name)),
                }
            })
            .collect()
    }
}

/// Runs the scenario under one variation.
///
/// # Errors
/// As [`run`].
pub fn run_one(scenario: &Scenario, variation: &Variation) -> Result<Run> {
    let mut machine = Machine::new(scenario, variation)?;
    machine.all()?;
    Ok(machine.finish(variation))
}

/// Runs the scenario under one variation and records every event: a snapshot as `torch.cuda.memory._snapshot()` gives it, for
/// [`summary::summarise`] and its page. The frames are tensor, step (with its line) and phase; the events carry no times.
///
/// # Errors
/// As [`run`].
pub fn record(scenario: &Scenario, variation: &Variation) -> Result<(Run, Snapshot)> {
    let mut machine = Machine::new(scenario, variation)?;
    machine.allocator.record_history(usize::MAX);
    machine.all()?;
    let snapshot = machine.snapshot(true);
    Ok((machine.finish(variation), snapshot))
}

/// A reproducible source of random numbers (SplitMix64, Steele et al. 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Both ends included.
    fn between(&mut self, min: u64, max: u64) -> u64 {
        let width = u128::from(max - min) + 1;
        min + ((u128::from(self.next()) * width) >> 64) as u64
    }

    fn shuffle<T>(&mut self, list: &mut [T]) {
        for at in (1..list.len()).rev() {
            list.swap(at, self.between(0, at as u64) as usize);
        }
    }
}

/// One loop while it runs.
struct Loop {
    iteration: u64,
    /// (iteration at whose end it dies, group, member)
    dying: Vec<(u64, usize, u64)>,
}

/// Where a tensor comes from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Tag {
    phase: String,
    /// The step, as its reader knows it: the group, or network and pass.
    step: String,
    /// The tensor.
    label: String,
    /// Line of the step.
    line: usize,
}

/// A [`Tag`] in the making.
struct Origin<'t> {
    step: &'t str,
    label: &'t str,
    line: usize,
}

/// Why a step did not finish.
enum Stop {
    Oom(Box<Oom>),
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Failed(error)
    }
}

struct Machine<'s> {
    scenario: &'s Scenario,
    order: Vec<&'s Phase>,
    empty_cache: bool,
    conf: String,
    warnings: Vec<String>,
    gpu: SimGpu,
    allocator: DeviceAllocator<SimGpu>,
    random: Random,
    /// By number in the scenario.
    streams: BTreeMap<u32, StreamId>,
    variables: BTreeMap<String, u64>,
    /// Position within each `cycle`, by line.
    cycles: BTreeMap<usize, usize>,
    /// Members by age.
    groups: IndexMap<String, BTreeMap<u64, u64>>,
    next_member: u64,
    loops: Vec<Loop>,
    phase_end: Vec<(usize, u64)>,
    /// What each tag stands for.
    tags: IndexMap<Tag, ()>,
    /// Name of the running phase.
    phase: String,
    reports: Vec<PhaseReport>,
    peak_reserved: u64,
    peak_allocated: u64,
}

impl<'s> Machine<'s> {
    fn new(scenario: &'s Scenario, variation: &Variation) -> Result<Self> {
        let policy = Policy::pytorch(scenario.allocator.torch.parse::<TorchVersion>()?);
        let conf = variation.conf.clone().unwrap_or_else(|| scenario.allocator.conf.clone());
        let (config, mut warnings) = AllocConfig::parse(&conf, &policy).map_err(|error| error.into_error("conf"))?;
        warnings.extend(config.warnings(&policy, &alloc::config::Surroundings::default()));
        let mut warnings: Vec<String> = warnings.into_iter().map(|warning| warning.to_string()).collect();
        warnings.dedup();
        let gpu = SimGpu::with(SimConfig {
            others: scenario.device.context + scenario.device.other_processes,
            ..SimConfig::new(scenario.device.capacity)
        });
        let mut allocator = DeviceAllocator::new(gpu.clone(), policy, config);
        if let Some(fraction) = scenario.allocator.memory_fraction {
            allocator.set_memory_fraction(fraction).map_err(Error::from)?;
        }
        let order = match &variation.order {
            None => scenario.phases.iter().collect(),
            Some(names) => names.iter().filter_map(|name| scenario.phases.iter().find(|phase| phase.name == *name)).collect(),
        };
        Ok(Machine {
            scenario,
            order,
            empty_cache: variation.empty_cache,
            conf,
            warnings,
            gpu,
            allocator,
            random: Random(scenario.seed),
            streams: BTreeMap::from([(0, StreamId::DEFAULT)]),
            variables: BTreeMap::new(),
            cycles: BTreeMap::new(),
            groups: IndexMap::new(),
            next_member: 0,
            loops: Vec::new(),
            phase_end: Vec::new(),
            tags: IndexMap::new(),
            phase: String::new(),
            reports: Vec::new(),
            peak_reserved: 0,
            peak_allocated: 0,
        })
    }

    fn all(&mut self) -> Result<()> {
        let mut stopped = false;
        for phase in self.order.clone() {
            if stopped {
                let mut report = self.report(&phase.name, Outcome::Skipped);
                (report.peak_allocated, report.peak_reserved) = (0, 0);
                self.reports.push(report);
                continue;
            }
            self.allocator.reset_peak();
            self.phase.clone_from(&phase.name);
            let ended = self.phase(phase);
            let outcome = match ended {
                Ok(()) => Outcome::Completed,
                Err(Stop::Oom(oom)) => Outcome::OutOfMemory(oom),
                Err(Stop::Failed(error)) => return Err(error),
            };
            stopped = matches!(outcome, Outcome::OutOfMemory(_)) && phase.on_oom == OnOom::Stop;
            if self.empty_cache && outcome == Outcome::Completed {
                self.allocator.empty_cache().map_err(Error::from)?;
            }
            let report = self.report(&phase.name, outcome);
            self.peak_reserved = self.peak_reserved.max(report.peak_reserved);
            self.peak_allocated = self.peak_allocated.max(report.peak_allocated);
            self.reports.push(report);
        }
        Ok(())
    }

    fn finish(self, variation: &Variation) -> Run {
        let stats = self.allocator.stats();
        let core = self.allocator.policy().core_evidence();
        let config = self.allocator.config();
        let plain = AllocConfig { pinned: config.pinned.clone(), ..AllocConfig::default() };
        let evidence =
            if *config == plain && self.scenario.allocator.memory_fraction.is_none() { core } else { core.max(Evidence::Source) };
        Run {
            evidence,
            name: variation.name.clone(),
            conf: self.conf,
            empty_cache: self.empty_cache,
            warnings: self.warnings,
            completes: self.reports.iter().all(|report| report.outcome == Outcome::Completed),
            phases: self.reports,
            peak_reserved: self.peak_reserved,
            peak_allocated: self.peak_allocated,
            retries: stats.num_alloc_retries,
            driver_allocations: stats.num_device_alloc,
        }
    }

    fn phase(&mut self, phase: &Phase) -> std::result::Result<(), Stop> {
        let ended = self.repeat(u64::from(phase.repeat), &phase.steps);
        // What an exception unwinds is gone too.
        self.loops.clear();
        for (group, member) in std::mem::take(&mut self.phase_end) {
            self.free_member(group, member)?;
        }
        ended
    }

    fn repeat(&mut self, times: u64, steps: &[Step]) -> std::result::Result<(), Stop> {
        self.loops.push(Loop { iteration: 0, dying: Vec::new() });
        for iteration in 0..times {
            if let Some(innermost) = self.loops.last_mut() {
                innermost.iteration = iteration;
            }
            for step in steps {
                self.step(step)?;
            }
            let last = iteration + 1 == times;
            let Some(innermost) = self.loops.last_mut() else { continue };
            let mut due = Vec::new();
            innermost.dying.retain(|(until, group, member)| {
                let dies = last || *until <= iteration;
                if dies {
                    due.push((*group, *member));
                }
                !dies
            });
            for (group, member) in due {
                self.free_member(group, member)?;
            }
        }
        self.loops.pop();
        Ok(())
    }

    fn step(&mut self, step: &Step) -> std::result::Result<(), Stop> {
        self.gpu.advance(1);
        match &step.action {
            Action::Alloc { name, size, count, stream, lifetime } => {
                for _ in 0..*count {
                    let bytes = self.size(size);
                    self.keep(name, &Origin { step: name, label: name, line: step.line }, bytes, *stream, *lifetime)?;
                }
            }
            Action::Free { pattern, order, keep } => {
                let mut members: Vec<(u64, usize)> = Vec::new();
                for (at, (name, group)) in self.groups.iter().enumerate() {
                    if glob(pattern, name) {
                        members.extend(group.keys().map(|member| (*member, at)));
                    }
                }
                members.sort_unstable();
                let total = members.len() as u64;
                let mut at = 0;
                members.retain(|_| {
                    at += 1;
                    !match keep {
                        Keep::None => false,
                        Keep::Every(n) => at % n == 0,
                        Keep::Last(n) => at + n > total,
                        Keep::Fraction(part) => self.random.unit() < *part,
                    }
                });
                match order {
                    Order::Forward => {}
                    Order::Reverse => members.reverse(),
                    Order::Random => self.random.shuffle(&mut members),
                }
                for (member, group) in members {
                    self.free_member(group, member)?;
                }
            }
            Action::Network { spec, batch, name, stream } => {
                let batch = self.dim(batch);
                let run = format!("{name} {}", spec.run);
                self.network(&networks::expand(spec, batch), name, &run, *stream, step.line)?;
            }
            Action::EmptyCache => {
                self.allocator.empty_cache().map_err(Error::from)?;
            }
            Action::Synchronize => {
                self.gpu.device_synchronize().map_err(Error::from)?;
                self.allocator.process_events().map_err(Error::from)?;
            }
            Action::RecordStream { pattern, stream } => {
                let stream = self.stream(*stream)?;
                let addresses: Vec<u64> =
                    self.groups.iter().filter(|(name, _)| glob(pattern, name)).flat_map(|(_, group)| group.values().copied()).collect();
                for address in addresses {
                    self.allocator.record_stream(address, stream).map_err(Error::from)?;
                }
            }
            Action::Busy { stream, steps } => {
                let stream = self.stream(*stream)?;
                self.gpu.work(stream, u64::from(*steps));
            }
            Action::Set { variable, value } => {
                let value = match value {
                    Value::Fixed(value) => *value,
                    Value::Random { min, max, multiple } => (self.random.between(*min, *max) / multiple * multiple).max(*min),
                    Value::Cycle(list) => {
                        let at = self.cycles.entry(step.line).or_default();
                        let value = list[*at % list.len()];
                        *at += 1;
                        value
                    }
                };
                self.variables.insert(variable.clone(), value);
            }
            Action::Repeat { times, steps } => self.repeat(u64::from(*times), steps)?,
        }
        Ok(())
    }

    fn stream(&mut self, number: u32) -> Result<StreamId> {
        if let Some(stream) = self.streams.get(&number) {
            return Ok(*stream);
        }
        let stream = self.gpu.stream_create()?;
        self.streams.insert(number, stream);
        Ok(stream)
    }

    fn dim(&self, dim: &Dim) -> u64 {
        dim.variables.iter().filter_map(|name| self.variables.get(name)).fold(dim.factor, |product, value| product.saturating_mul(*value))
    }

    fn size(&mut self, size: &Size) -> u64 {
        match size {
            Size::Fixed(bytes) => *bytes,
            Size::OneOf(list) => list[self.random.between(0, list.len() as u64 - 1) as usize],
            Size::Shape { dims, element } => dims.iter().fold(*element, |product, dim| product.saturating_mul(self.dim(dim))),
            Size::Random { min, max, multiple, log } => {
                let drawn = if *log {
                    let (low, high) = ((*min as f64).ln(), (*max as f64).ln());
                    ((low + self.random.unit() * (high - low)).exp() as u64).clamp(*min, *max)
                } else {
                    self.random.between(*min, *max)
                };
                (drawn / multiple * multiple).max(*min)
            }
        }
    }

    fn tag(&mut self, origin: &Origin<'_>) -> u64 {
        let tag = Tag { phase: self.phase.clone(), step: origin.step.to_owned(), label: origin.label.to_owned(), line: origin.line };
        self.tags.insert_full(tag, ()).0 as u64
    }

    fn malloc(&mut self, origin: &Origin<'_>, bytes: u64, stream: u32) -> std::result::Result<u64, Stop> {
        let stream = self.stream(stream)?;
        let tag = self.tag(origin);
        match self.allocator.malloc_tagged(bytes, stream, tag) {
            Ok(allocation) => Ok(allocation.address),
            Err(AllocError::OutOfMemory(oom)) => {
                let summary = self.look();
                let (pins, pinned_by) = self.pins(&summary);
                Err(Stop::Oom(Box::new(Oom {
                    line: origin.line,
                    tensor: origin.label.to_owned(),
                    requested: oom.requested,
                    from_driver: oom.alloc_size,
                    device_free: oom.free,
                    free_but_reserved: oom.reserved.saturating_sub(oom.allocated),
                    largest_free: largest_free(&self.allocator),
                    message: oom.pytorch_message(),
                    split: summary.devices.first().map_or_else(Split::default, |device| device.split),
                    pins,
                    pinned_by,
                })))
            }
            Err(error @ AllocError::TooLarge { .. }) => Err(Stop::Failed(
                Error::from(error).because(format!("`{}` in line {} of the scenario asks for it", origin.label, origin.line)),
            )),
            Err(error) => Err(Stop::Failed(error.into())),
        }
    }

    fn keep(&mut self, group: &str, origin: &Origin<'_>, bytes: u64, stream: u32, lifetime: Lifetime) -> std::result::Result<(), Stop> {
        let address = self.malloc(origin, bytes, stream)?;
        let at = match self.groups.get_index_of(group) {
            Some(at) => at,
            None => self.groups.insert_full(group.to_owned(), BTreeMap::new()).0,
        };
        let member = self.next_member;
        self.next_member += 1;
        self.groups[at].insert(member, address);
        match lifetime {
            Lifetime::Scenario => {}
            Lifetime::Phase => self.phase_end.push((at, member)),
            Lifetime::Iterations { min, max } => {
                let more = self.random.between(u64::from(min), u64::from(max));
                if let Some(innermost) = self.loops.last_mut() {
                    innermost.dying.push((innermost.iteration + more, at, member));
                }
            }
        }
        Ok(())
    }

    /// Frees a member, unless a step did so before.
    fn free_member(&mut self, group: usize, member: u64) -> Result<()> {
        if let Some(address) = self.groups.get_index_mut(group).and_then(|(_, members)| members.remove(&member)) {
            self.allocator.free(address).map_err(Error::from)?;
        }
        Ok(())
    }

    fn network(&mut self, ops: &[Op], name: &str, run: &str, stream: u32, line: usize) -> std::result::Result<(), Stop> {
        let mut slots: BTreeMap<u32, u64> = BTreeMap::new();
        let ended = self.network_ops(ops, name, run, stream, line, &mut slots);
        // After an exception nothing holds the temporaries.
        for address in slots.into_values() {
            self.allocator.free(address).map_err(Error::from)?;
        }
        ended
    }

    fn network_ops(
        &mut self,
        ops: &[Op],
        name: &str,
        run: &str,
        stream: u32,
        line: usize,
        slots: &mut BTreeMap<u32, u64>,
    ) -> std::result::Result<(), Stop> {
        for op in ops {
            match op {
                Op::Keep { group, label, bytes } => {
                    let origin = Origin { step: run, label: &format!("{name}.{label}"), line };
                    self.keep(&format!("{name}.{group}"), &origin, *bytes, stream, Lifetime::Scenario)?;
                }
                Op::Temp { slot, label, bytes } => {
                    let address = self.malloc(&Origin { step: run, label: &format!("{name}.{label}"), line }, *bytes, stream)?;
                    slots.insert(*slot, address);
                }
                Op::Drop { slot } => {
                    if let Some(address) = slots.remove(slot) {
                        self.allocator.free(address).map_err(Error::from)?;
                    }
                }
                Op::FreeNewest { group, count } => {
                    if let Some(at) = self.groups.get_index_of(&format!("{name}.{group}")) {
                        let newest: Vec<u64> = self.groups[at].keys().rev().take(*count).copied().collect();
                        for member in newest {
                            self.free_member(at, member)?;
                        }
                    }
                }
                Op::FreeAll { group } => {
                    if let Some(at) = self.groups.get_index_of(&format!("{name}.{group}")) {
                        let all: Vec<u64> = self.groups[at].keys().copied().collect();
                        for member in all {
                            self.free_member(at, member)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn report(&self, name: &str, outcome: Outcome) -> PhaseReport {
        let stats = self.allocator.raw_stats();
        let summary = self.look();
        let (pins, pinned_by) = self.pins(&summary);
        let device = summary.devices.first();
        let info = self.gpu.mem_get_info().unwrap_or_default();
        PhaseReport {
            name: name.to_owned(),
            outcome,
            allocated: stats.allocated_bytes.all.current,
            reserved: stats.reserved_bytes.all.current,
            nvidia_smi: self.scenario.device.context + stats.reserved_bytes.all.current,
            device_free: info.free,
            largest_free: largest_free(&self.allocator),
            empty_cache_returns: device.map_or(0, |device| device.empty_cache.returns),
            split: device.map_or_else(Split::default, |device| device.split),
            peak_allocated: stats.allocated_bytes.all.peak,
            peak_reserved: stats.reserved_bytes.all.peak,
            pins,
            pinned_by,
        }
    }

    fn look(&self) -> Summary {
        summary::summarise(&self.snapshot(false), &summary::Options { top: PINS, ..summary::Options::default() })
    }

    fn pins(&self, summary: &Summary) -> (Vec<Pin>, Vec<PinGroup>) {
        let Some(device) = summary.devices.first() else { return (Vec::new(), Vec::new()) };
        let hole = |split: &Split| split.pinned + split.expandable_rest;
        let mut pinned: Vec<_> = device
            .segments
            .iter()
            .filter(|segment| matches!(segment.fate, Fate::Pinned | Fate::Pending) && hole(&segment.split) > 0)
            .collect();
        pinned.sort_by_key(|segment| std::cmp::Reverse(hole(&segment.split)));
        let pins = pinned
            .iter()
            .take(PINS)
            .map(|segment| Pin {
                size: segment.size,
                free: hole(&segment.split),
                live_blocks: segment.live_blocks,
                live_bytes: segment.live_bytes,
                by: segment.pinned_by.iter().take(3).filter_map(|block| block.allocated_at.clone()).collect(),
            })
            .collect();
        // By the step that allocated. Every hole counts for one holder, the block in front of it (the one behind it where there is none),
        // so that the figures sum to what is pinned; whole pages of expandable segments are no holes.
        let mut groups: BTreeMap<(&str, usize), PinGroup> = BTreeMap::new();
        for segment in self.allocator.segments() {
            let page = match (segment.expandable, segment.small) {
                (false, _) => None,
                (true, true) => Some(alloc::sizes::SMALL_BUFFER),
                (true, false) => Some(self.allocator.config().large_segment_size),
            };
            let mut holes = 0;
            // By holder: bytes held, bytes stranded.
            let mut here: BTreeMap<(&str, usize), (u64, u64)> = BTreeMap::new();
            let mut before: Option<(&str, usize)> = None;
            // A hole that waits for the block behind it.
            let mut waiting = 0;
            for block in self.allocator.blocks_of(segment.id) {
                match block.state {
                    alloc::BlockState::Free => {
                        let start = block.address - segment.address;
                        let (front, back) = rests(start, start + block.size, page);
                        holes += front + back;
                        match before {
                            Some(key) => here.entry(key).or_default().1 += front,
                            None => waiting += front,
                        }
                        waiting += back;
                    }
                    alloc::BlockState::Unmapped => {}
                    alloc::BlockState::Allocated | alloc::BlockState::PendingFree => {
                        if let Some((tag, ())) = self.tags.get_index(block.tag as usize) {
                            let key = (tag.step.as_str(), tag.line);
                            let holder = here.entry(key).or_default();
                            holder.0 += block.size;
                            holder.1 += std::mem::take(&mut waiting);
                            before = Some(key);
                        }
                    }
                }
            }
            if let Some(key) = before {
                here.entry(key).or_default().1 += waiting;
            }
            for (key, (bytes, strands)) in here.into_iter().filter(|_| holes > 0) {
                let group = groups.entry(key).or_insert_with(|| PinGroup {
                    name: format!("{} (line {})", key.0, key.1),
                    bytes: 0,
                    segments: 0,
                    strands: 0,
                });
                group.bytes += bytes;
                group.segments += 1;
                group.strands += strands;
            }
        }
        let mut groups: Vec<PinGroup> = groups.into_values().collect();
        groups.sort_by(|a, b| b.strands.cmp(&a.strands).then_with(|| a.name.cmp(&b.name)));
        groups.truncate(PINS);
        (pins, groups)
    }

    /// The allocator's state as a snapshot whose frames are the tensors' names; with the recorded events if `events`.
    fn snapshot(&self, events: bool) -> Snapshot {
        let mut snapshot = Snapshot::empty(Generation::V3);
        snapshot.settings = Some(self.settings());
        let file = snapshot.names.intern(&format!("<{}.toml>", self.scenario.name));
        let mut stacks: Vec<StackId> = Vec::with_capacity(self.tags.len());
        for tag in self.tags.keys() {
            let mut frame = |name: &str, file, line: usize| -> FrameId {
                let name = snapshot.names.intern(name);
                snapshot.names.intern_frame(model::Frame { name, file, line: line as u32 })
            };
            let mut frames = Vec::new();
            // The step counts as the user's code; a tensor of a network within it does not, or each would be a holder of its own.
            if tag.step != tag.label {
                frames.push(frame(&tag.label, StrId::EMPTY, 0));
            }
            frames.push(frame(&tag.step, file, tag.line));
            frames.push(frame(&tag.phase, file, 0));
            stacks.push(snapshot.names.intern_stack(&frames));
        }
        let stack = |tag: u64| stacks.get(tag as usize).copied().unwrap_or(StackId::EMPTY);
        for segment in self.allocator.segments() {
            // An expandable segment is one segment for each contiguous mapped range, as in PyTorch's snapshots.
            let mut range: Option<Segment> = None;
            for block in self.allocator.blocks_of(segment.id) {
                let state = match block.state {
                    alloc::BlockState::Allocated => model::BlockState::ActiveAllocated,
                    alloc::BlockState::PendingFree => model::BlockState::ActivePendingFree,
                    alloc::BlockState::Free => model::BlockState::Inactive,
                    alloc::BlockState::Unmapped => {
                        snapshot.segments.extend(range.take());
                        continue;
                    }
                };
                let part = range.get_or_insert_with(|| Segment {
                    device: 0,
                    address: block.address,
                    total_size: 0,
                    allocated_size: 0,
                    active_size: 0,
                    requested_size: 0,
                    stream: segment.stream.0,
                    class: if segment.small { SizeClass::Small } else { SizeClass::Large },
                    pool_id: (segment.pool.0, segment.pool.1),
                    expandable: segment.expandable,
                    stack: stack(segment.tag),
                    blocks: Vec::new(),
                });
                part.total_size += block.size;
                if state != model::BlockState::Inactive {
                    part.active_size += block.size;
                    part.requested_size += block.requested;
                }
                if state == model::BlockState::ActiveAllocated {
                    part.allocated_size += block.size;
                }
                let owner = if state == model::BlockState::Inactive { StackId::EMPTY } else { stack(block.tag) };
                part.blocks.push(model::Block {
                    address: block.address,
                    size: block.size,
                    requested_size: block.requested,
                    state,
                    stack: owner,
                });
            }
            snapshot.segments.extend(range.take());
        }
        snapshot.segments.sort_by_key(|segment| segment.address);
        if events {
            let trace = self
                .allocator
                .history()
                .map(|entry| {
                    let action = match entry.action {
                        alloc::Action::Alloc => model::Action::Alloc,
                        alloc::Action::FreeRequested => model::Action::FreeRequested,
                        alloc::Action::FreeCompleted => model::Action::FreeCompleted,
                        alloc::Action::SegmentAlloc => model::Action::SegmentAlloc,
                        alloc::Action::SegmentFree => model::Action::SegmentFree,
                        alloc::Action::SegmentMap => model::Action::SegmentMap,
                        alloc::Action::SegmentUnmap => model::Action::SegmentUnmap,
                        alloc::Action::Snapshot => model::Action::Snapshot,
                        alloc::Action::Oom => model::Action::Oom,
                    };
                    model::TraceEntry { stack: stack(entry.tag), ..model::TraceEntry::new(action, entry.addr, entry.size, entry.stream) }
                })
                .collect();
            snapshot.traces = vec![trace];
        }
        snapshot
    }

    fn settings(&self) -> Settings {
        let config = self.allocator.config();
        Settings {
            conf: self.conf.clone(),
            max_split_size: config.max_split_size,
            garbage_collection_threshold: config.garbage_collection_threshold,
            expandable_segments: config.expandable_segments,
            roundup_power2_divisions: config
                .roundup_power2_divisions
                .iter()
                .enumerate()
                .map(|(at, division)| (1 << at, (*division).into()))
                .collect(),
            raw: serde_json::Map::new(),
        }
    }
}

/// The parts of a free range that cannot go back while its neighbours live: all of it, or, with pages of `page` bytes, what lies in the
/// pages at its two ends.
fn rests(start: u64, end: u64, page: Option<u64>) -> (u64, u64) {
    let Some(page) = page else { return (end - start, 0) };
    let (first, last) = (start.div_ceil(page) * page, end / page * page);
    if first > last { (end - start, 0) } else { (first - start, end - last) }
}

fn largest_free(allocator: &DeviceAllocator<SimGpu>) -> u64 {
    allocator.blocks().filter(|block| block.state == alloc::BlockState::Free).map(|block| block.size).max().unwrap_or(0)
}
