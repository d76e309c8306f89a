//! `tare gpu replay`: how exactly a recording comes out, and its story.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use serde::Serialize;

use super::check;
use super::frames;
use super::model::{Action, BlockState, FrameId, Generation, PoolId, SizeClass, Snapshot, StackId};
use super::replay::{self, Fidelity, Outcome, Peaks, Replayer, Totals, tag_stack};
use super::start::{Cutting, StartState, reconstruct};
use crate::error::{Error, Result};
use crate::gpu::alloc::sizes::{ROUNDUP_INTERVALS, round_size};
use crate::gpu::alloc::{self, AllocConfig, Evidence, Policy, TieBreak, TorchVersion};
use crate::gpu::summary::clean;
use crate::gpu::{human, plural};

/// What to replay, and how much to tell.
#[derive(Debug, Clone, Default)]
pub struct ReplayOptions {
    /// The device; `None`: the one with most events.
    pub device: Option<u32>,
    /// The rules; `None`: those that reproduce the recording best.
    pub version: Option<TorchVersion>,
    /// Settings instead of the recorded ones.
    pub config: Option<AllocConfig>,
    /// At most this many holders and pinned segments; 0: 10.
    pub limit: usize,
}

/// One candidate of the search for the rules.
#[derive(Debug, Clone, Serialize)]
pub struct Tried {
    /// torch version whose rules were tried.
    pub version: String,
    /// Order of free blocks of equal size.
    pub tie_break: TieBreak,
    /// Exact addresses under it.
    pub addresses_exact: u64,
    /// Exact driver decisions (taken, given back, mapped, unmapped) under it.
    pub driver_exact: u64,
    /// Driver calls that the recording does not have.
    pub extra_driver_calls: u64,
    /// Whether everything came out.
    pub exact: bool,
}

/// Which rules the replay used, and why.
#[derive(Debug, Clone, Serialize)]
pub struct PolicyReport {
    /// torch version whose rules they are. Several versions may share them.
    pub version: String,
    /// Order of free blocks of equal size.
    pub tie_break: TieBreak,
    /// What the core rules of that version rest on.
    pub evidence: Evidence,
    /// What that means for this recording, in words.
    pub standing: String,
    /// Settings of the recording that no recorded trace reaches.
    pub unproven_settings: Vec<&'static str>,
    /// Why these.
    pub because: String,
    /// Whether the recording tells the candidates apart.
    pub decided_by_recording: bool,
    /// All candidates.
    pub tried: Vec<Tried>,
}

/// The beginning of the recording.
#[derive(Debug, Clone, Serialize)]
pub struct StartReport {
    /// Number of segments.
    pub segments: usize,
    /// Bytes of segments.
    pub reserved: u64,
    /// Bytes of live blocks.
    pub allocated: u64,
    /// Bytes of segments in which nothing lives.
    pub idle: u64,
    /// Number of streams with segments.
    pub streams: usize,
    /// What did not fit together, or had to be assumed.
    pub notes: Vec<String>,
}

/// Live bytes of one place in the program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HolderReport {
    /// The innermost own frame; or why there is none.
    pub frame: String,
    /// Bytes of blocks.
    pub bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// A segment that cannot go back because something lives in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PinnedReport {
    /// First address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes free inside it.
    pub free: u64,
    /// Its largest free block in bytes.
    pub largest_free: u64,
    /// Bytes that live in it.
    pub live: u64,
    /// Number of live blocks.
    pub live_blocks: u64,
    /// Stream.
    pub stream: u64,
    /// Size class.
    pub class: SizeClass,
    /// Pool.
    pub pool: PoolId,
    /// Part of an expandable segment.
    pub expandable: bool,
    /// Who lives in it, most bytes first, at most 4.
    pub holders: Vec<HolderReport>,
}

/// How memory is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Fragmentation {
    /// Peak of allocated bytes in parts of 10,000 of the peak of reserved bytes.
    pub utilisation_per_10000: u64,
    /// Reserved but unallocated bytes at the end.
    pub unallocated: u64,
    /// Of those: free in segments where something lives.
    pub pinned: u64,
    /// Of those: in segments where nothing lives; `empty_cache` gives these back.
    pub idle: u64,
    /// Of those: freed, but another stream may still use it.
    pub pending: u64,
    /// Largest free block in bytes.
    pub largest_free: u64,
    /// Number of segments with something live and something free.
    pub pinned_segments: u64,
    /// Rounding of live blocks, and rests too small to split off.
    pub rounding: u64,
}

/// The whole report of a replay. All sizes are bytes.
#[derive(Debug, Clone, Serialize)]
pub struct ReplayReport {
    /// How exactly the recording comes out.
    pub fidelity: Fidelity,
    /// Whether everything came out.
    pub exact: bool,
    /// Highest values.
    pub peak: Peaks,
    /// Which rules, and why.
    pub policy: PolicyReport,
    /// Device.
    pub device: u32,
    /// Devices of the file that have events or segments.
    pub devices: Vec<u32>,
    /// Layout of the file.
    pub generation: Generation,
    /// Events of the device.
    pub events: u64,
    /// The recorded configuration string; empty: defaults, or not recorded.
    pub conf: String,
    /// Whether the file tells the configuration.
    pub conf_recorded: bool,
    /// Values at the end.
    #[serde(rename = "final")]
    pub end: Totals,
    /// The beginning.
    pub start: StartReport,
    /// How memory is cut at the end.
    pub fragmentation: Fragmentation,
    /// Recorded out-of-memory events.
    pub ooms: u64,
    /// Times the program emptied the cache.
    pub releases: u64,
    /// Requests that gave memory back on their own.
    pub retries: u64,
    /// Largest holders at the peak of allocated bytes.
    pub holders_at_peak: Vec<HolderReport>,
    /// Segments pinned at the end, most free bytes first.
    pub pinned: Vec<PinnedReport>,
    /// Remarks on the file and the replay.
    pub warnings: Vec<String>,
}

/// The settings that a snapshot records, as the allocator takes them, and remarks.
pub fn recorded_config(snapshot: &Snapshot) -> (AllocConfig, Vec<String>) {
    let mut config = AllocConfig::default();
    let mut notes = Vec::new();
    let Some(settings) = &snapshot.settings else {
        notes.push("the file does not tell the allocator's settings: defaults are assumed".to_owned());
        return (config, notes);
    };
    // The text tells what has no key of its own; the newest rules accept all that any version does.
    match AllocConfig::parse(&settings.conf, &Policy::pytorch(TorchVersion::NEWEST_READ)) {
        Ok((parsed, _)) => config = parsed,
        Err(error) => notes.push(format!("the recorded configuration `{}` is not understood: {error}", settings.conf)),
    }
    config.max_split_size = settings.max_split_size;
    config.expandable_segments = settings.expandable_segments;
    config.garbage_collection_threshold = settings.garbage_collection_threshold;
    for (start, divisions) in &settings.roundup_power2_divisions {
        let index = start.checked_ilog2().unwrap_or(0) as usize;
        if start.is_power_of_two() && index < ROUNDUP_INTERVALS {
            config.roundup_power2_divisions[index] = u32::try_from(*divisions).unwrap_or(0);
        } else {
            notes.push(format!("`roundup_power2_divisions` has an interval that does not exist: {start}"));
        }
    }
    if settings.garbage_collection_threshold > 0.0 {
        notes.push("the file tells a garbage collection threshold but no memory fraction, without which it does nothing".to_owned());
    }
    (config, notes)
}

/// The device with most events, else the first one with segments.
pub fn main_device(snapshot: &Snapshot) -> u32 {
    let busiest = snapshot.traces.iter().enumerate().max_by_key(|(device, trace)| (trace.len(), std::cmp::Reverse(*device)));
    match busiest {
        Some((device, trace)) if !trace.is_empty() => device as u32,
        _ => snapshot.devices().first().copied().unwrap_or(0),
    }
}

/// The state at the beginning of a device's trace, under the settings that were recorded.
pub fn start_of(snapshot: &Snapshot, device: u32, config: &AllocConfig) -> StartState {
    start_with(snapshot, device, config, &BTreeMap::new())
}

fn start_with(snapshot: &Snapshot, device: u32, config: &AllocConfig, rests: &BTreeMap<u64, u64>) -> StartState {
    let round = |bytes| round_size(bytes, &config.roundup_power2_divisions);
    reconstruct(snapshot, device, &Cutting { round, expandable: config.expandable_segments }, rests)
}

/// At most this many times a size at the beginning is settled by a later choice.
const SETTLED: usize = 200;

/// Replays under one policy. Where the first difference is the choice of a free block whose size the recording leaves open (see
/// [`super::start::OpenEnd`]), that choice is evidence for the size: the block was too small for the request. The replay is then
/// repeated with it. The number of sizes settled so is told in the notes.
fn run_settling(snapshot: &Snapshot, device: u32, policy: Policy, config: &AllocConfig) -> Result<(StartState, Outcome)> {
    let mut rests = BTreeMap::new();
    let mut rounds = 0;
    loop {
        let mut start = start_with(snapshot, device, config, &rests);
        let outcome = replay::run(snapshot, device, &start, policy, config)
            .map_err(|error| Error::from(error).context("the state at the beginning of the recording is impossible"))?;
        let difference = outcome.fidelity.first_difference.as_ref().filter(|_| rounds < SETTLED);
        let better = difference.and_then(|difference| {
            let chosen = difference.model_address?;
            let entry = snapshot.trace(device).get(difference.event as usize)?;
            let open = start.open.iter().find(|open| open.free == chosen && (difference.event as usize) < open.freed)?;
            Some((open.block, open.rest_against(round_size(entry.size, &config.roundup_power2_divisions))?))
        });
        let Some((block, rest)) = better else {
            if !rests.is_empty() {
                start
                    .notes
                    .push(format!("the sizes of {} blocks at the beginning follow from later choices of the recording", rests.len()));
            }
            return Ok((start, outcome));
        };
        rests.insert(block, rest);
        rounds += 1;
    }
}

/// A replay under the rules that reproduce the recording best.
pub struct Replayed {
    /// Device.
    pub device: u32,
    /// Settings.
    pub config: AllocConfig,
    /// The beginning.
    pub start: StartState,
    /// The rules.
    pub policy: Policy,
    /// Why, and what else was tried.
    pub why: PolicyReport,
    /// What came out.
    pub outcome: Outcome,
    /// Remarks.
    pub notes: Vec<String>,
    /// Where the file contradicts itself.
    pub contradictions: Vec<String>,
}

/// The settings that a configuration changes and that no recorded trace reaches under the rules of `policy`.
fn unproven_settings(policy: &Policy, config: &AllocConfig) -> Vec<&'static str> {
    let table = policy.table();
    let mut keys = config.differing_keys(&AllocConfig::default());
    keys.retain(|key| {
        let row = rule_of(key).and_then(|rule| table.iter().find(|row| row.rule == rule));
        row.is_some_and(|row| !row.evidence.is_verified())
    });
    keys
}

/// What the rules rest on, for one recording: nothing is verified by a recording without decisions or one that does not come out.
fn standing(policy: &Policy, unproven: &[&str], fidelity: &Fidelity) -> String {
    let core = policy.core_evidence();
    if fidelity.decisions() == 0 {
        return "nothing verified here: the recording has no decisions to compare".to_owned();
    }
    if !fidelity.is_exact() {
        return "nothing verified here: the replay is not exact".to_owned();
    }
    if unproven.is_empty() { core.to_string() } else { format!("core rules {core}, settings unverified ({})", unproven.join(", ")) }
}

/// The rule of the policy table that a configuration key brings into play.
pub(super) fn rule_of(key: &str) -> Option<&'static str> {
    Some(match key {
        "max_split_size_mb" | "max_non_split_rounding_mb" => "split-limit",
        "roundup_power2_divisions" => "roundup-divisions",
        "garbage_collection_threshold" => "garbage-collection",
        "expandable_segments" | "expandable_segments_reserve" => "expandable-segments",
        "large_segment_size_mb" => "large-segment-size",
        "per_process_memory_fraction" => "memory-fraction",
        _ => return None,
    })
}

impl Replayed {
    /// Whether the recording has allocations at all; without, nothing is shown.
    pub fn has_evidence(&self) -> bool {
        self.outcome.fidelity.addresses > 0
    }
}

/// Finds the rules that reproduce a device's trace best, and replays it.
///
/// # Errors
/// The device does not exist; the recorded state is impossible.
pub fn detect(snapshot: &Snapshot, options: &ReplayOptions) -> Result<Replayed> {
    let device = options.device.unwrap_or_else(|| main_device(snapshot));
    let contradictions = check::contradictions(snapshot, device);
    let absent = !snapshot.devices().contains(&device);
    if absent && (options.device.is_some() || !snapshot.devices().is_empty()) {
        let known = snapshot.devices().iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        return Err(Error::usage(format!("the snapshot has nothing of device {device}")).hint(format!("devices in it: {known}")));
    }
    check::possible(snapshot, device)?;
    let (recorded, mut notes) = recorded_config(snapshot);
    let config = match &options.config {
        Some(config) => {
            notes.clear();
            config.clone()
        }
        None => recorded,
    };
    let candidates = match options.version {
        Some(version) => vec![Policy::pytorch(version)],
        None => vec![Policy::proven(), Policy::pytorch(TorchVersion::NEWEST_READ)],
    };
    let mut best: Option<(Policy, StartState, Outcome)> = None;
    let mut tried = Vec::new();
    for policy in candidates {
        let (start, mut outcome) = run_settling(snapshot, device, policy, &config)?;
        outcome.fidelity.contradictions = contradictions.len() as u64;
        let score = score(&outcome.fidelity);
        tried.push(Tried {
            version: policy.version.to_string(),
            tie_break: policy.tie_break,
            addresses_exact: outcome.fidelity.addresses_exact,
            driver_exact: driver_exact(&outcome.fidelity),
            extra_driver_calls: outcome.fidelity.extra_driver_calls,
            exact: outcome.fidelity.is_exact(),
        });
        // The first candidate wins a draw.
        if best.as_ref().is_none_or(|(.., best)| score > self::score(&best.fidelity)) {
            best = Some((policy, start, outcome));
        }
    }
    let Some((policy, start, outcome)) = best else { return Err(Error::failure("no allocator rules to replay with")) };
    let decided = tried.iter().filter(|other| other.exact).count() == 1 && tried.len() > 1;
    let named = match policy.tie_break {
        TieBreak::Address => "lowest address first (torch up to 2.10)",
        TieBreak::AddressDescending => "highest address first (a control)",
        TieBreak::Registration => "oldest block first (torch 2.11 and later)",
    };
    let fidelity = &outcome.fidelity;
    let because = if options.version.is_some() {
        format!("asked for: {named}")
    } else if fidelity.addresses == 0 {
        format!("the recording has no allocations, so nothing shows which rules hold; {named} is assumed")
    } else if decided {
        format!("only {named} reproduces the recording")
    } else if fidelity.is_exact() {
        format!("{named} reproduces the recording; so do the other candidates, the recording does not tell them apart")
    } else if fidelity.contradictions > 0 {
        format!("the file contradicts itself, so nothing shows which rules hold; {named} is assumed")
    } else {
        format!("no candidate reproduces the recording; {named} comes closest")
    };
    let unproven = unproven_settings(&policy, &config);
    let why = PolicyReport {
        standing: standing(&policy, &unproven, fidelity),
        unproven_settings: unproven,
        version: policy.version.to_string(),
        tie_break: policy.tie_break,
        evidence: policy.core_evidence(),
        because,
        decided_by_recording: decided,
        tried,
    };
    Ok(Replayed { device, config, start, policy, why, outcome, notes, contradictions })
}

fn driver_exact(f: &Fidelity) -> u64 {
    f.segment_allocs_exact + f.segment_frees_exact + f.segment_maps_exact + f.segment_unmaps_exact
}

fn score(f: &Fidelity) -> (bool, u64, u64, std::cmp::Reverse<u64>) {
    (f.is_exact(), f.addresses_exact, driver_exact(f), std::cmp::Reverse(f.extra_driver_calls))
}

/// Adds up bytes by the frame that names the holder.
#[derive(Default)]
struct Holders {
    by_frame: HashMap<Option<FrameId>, (u64, u64)>,
}

impl Holders {
    fn add(&mut self, snapshot: &Snapshot, stack: StackId, bytes: u64) {
        let slot = self.by_frame.entry(frames::holder(&snapshot.names, stack)).or_default();
        slot.0 += bytes;
        slot.1 += 1;
    }

    fn take(self, snapshot: &Snapshot, limit: usize) -> Vec<HolderReport> {
        let describe = |frame: Option<FrameId>| match frame {
            Some(frame) => frames::describe(&snapshot.names, frame),
            None => "unknown (allocated before the recording began, or without stacks)".to_owned(),
        };
        let mut all: Vec<HolderReport> =
            self.by_frame.into_iter().map(|(frame, (bytes, blocks))| HolderReport { frame: describe(frame), bytes, blocks }).collect();
        all.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.frame.cmp(&b.frame)));
        all.truncate(limit);
        all
    }
}

/// The largest holders when event `event` (an index; `None`: the beginning) was over.
fn holders_at(snapshot: &Snapshot, replayed: &Replayed, event: Option<u64>, limit: usize) -> Result<Vec<HolderReport>> {
    let trace = snapshot.trace(replayed.device);
    let mut replayer = Replayer::new(Some(snapshot), &replayed.start, replayed.policy, replayed.config.clone()).map_err(Error::from)?;
    let count = event.map_or(0, |event| event as usize + 1);
    for entry in trace.iter().take(count) {
        replayer.feed(entry);
    }
    let mut holders = Holders::default();
    for block in replayer.allocator().blocks() {
        if block.state == alloc::BlockState::Allocated {
            holders.add(snapshot, tag_stack(block.tag, trace), block.size);
        }
    }
    Ok(holders.take(snapshot, limit))
}

fn look_at_end(snapshot: &Snapshot, device: u32, limit: usize) -> (Fragmentation, Vec<PinnedReport>, Totals) {
    let mut f = Fragmentation::default();
    let mut totals = Totals::default();
    let mut pinned = Vec::new();
    for segment in snapshot.segments_of(device) {
        let mut holders = Holders::default();
        let (mut live, mut live_blocks, mut free, mut largest, mut pending) = (0, 0, 0, 0, 0);
        for block in &segment.blocks {
            match block.state {
                BlockState::Inactive => {
                    free += block.size;
                    largest = largest.max(block.size);
                }
                state => {
                    live += block.size;
                    live_blocks += 1;
                    pending += if state == BlockState::ActivePendingFree { block.size } else { 0 };
                    totals.requested += block.requested_size;
                    f.rounding += block.size.saturating_sub(block.requested_size);
                    holders.add(snapshot, block.stack, block.size);
                }
            }
        }
        totals.reserved += segment.total_size;
        totals.active += live;
        totals.allocated += live - pending;
        f.pending += pending;
        f.largest_free = f.largest_free.max(largest);
        if live == 0 {
            f.idle += free;
        } else {
            f.pinned += free;
            if free > 0 {
                f.pinned_segments += 1;
                pinned.push((
                    PinnedReport {
                        address: segment.address,
                        size: segment.total_size,
                        free,
                        largest_free: largest,
                        live,
                        live_blocks,
                        stream: segment.stream,
                        class: segment.class,
                        pool: segment.pool_id,
                        expandable: segment.expandable,
                        holders: Vec::new(),
                    },
                    holders,
                ));
            }
        }
    }
    totals.inactive_split = f.pinned;
    f.unallocated = totals.reserved - totals.allocated;
    pinned.sort_by(|(a, _), (b, _)| b.free.cmp(&a.free).then(a.address.cmp(&b.address)));
    pinned.truncate(limit);
    let pinned = pinned.into_iter().map(|(report, holders)| PinnedReport { holders: holders.take(snapshot, 4), ..report }).collect();
    (f, pinned, totals)
}

/// Replays one device of a snapshot and tells its story.
///
/// # Errors
/// The device does not exist; the recorded state is impossible.
pub fn report(snapshot: &Snapshot, options: &ReplayOptions) -> Result<ReplayReport> {
    let limit = if options.limit == 0 { 10 } else { options.limit };
    let replayed = detect(snapshot, options)?;
    let device = replayed.device;
    let holders_at_peak = holders_at(snapshot, &replayed, replayed.outcome.peaks.allocated.event, limit)?;
    let (mut fragmentation, pinned, end) = look_at_end(snapshot, device, limit);
    let peaks = replayed.outcome.peaks;
    fragmentation.utilisation_per_10000 = share(peaks.allocated.bytes, peaks.reserved.bytes);
    let mut warnings = snapshot.warnings.clone();
    warnings.extend(replayed.contradictions.iter().cloned());
    warnings.extend(replayed.notes.iter().cloned());
    let mut streams: Vec<u64> = replayed.start.segments.iter().map(|segment| segment.stream).collect();
    streams.sort_unstable();
    streams.dedup();
    Ok(ReplayReport {
        exact: replayed.outcome.fidelity.is_exact(),
        peak: peaks,
        device,
        devices: snapshot.devices(),
        generation: snapshot.generation,
        events: replayed.outcome.events,
        conf: snapshot.settings.as_ref().map_or(String::new(), |settings| settings.conf.clone()),
        conf_recorded: snapshot.settings.is_some(),
        end,
        start: StartReport {
            segments: replayed.start.segments.len(),
            reserved: replayed.start.reserved(),
            allocated: replayed.start.allocated(),
            idle: replayed.start.idle(),
            streams: streams.len(),
            notes: replayed.start.notes.clone(),
        },
        fragmentation,
        ooms: replayed.outcome.ooms,
        releases: replayed.outcome.releases,
        retries: replayed.outcome.retries,
        holders_at_peak,
        pinned,
        warnings,
        policy: replayed.why,
        fidelity: replayed.outcome.fidelity,
    })
}

/// `part` in parts of 10,000 of `whole`.
pub(crate) fn share(part: u64, whole: u64) -> u64 {
    if whole == 0 { 0 } else { (u128::from(part) * 10_000 / u128::from(whole)) as u64 }
}

fn percent(per_10000: u64) -> String {
    format!("{}.{:02} %", per_10000 / 100, per_10000 % 100)
}

impl ReplayReport {
    /// The report as text, without colours.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let f = &self.fidelity;
        let _ =
            writeln!(out, "replay of device {} ({} event{}, layout {:?})", self.device, self.events, plural(self.events), self.generation);
        let _ = writeln!(out);
        if f.contradictions > 0 && f.addresses == 0 {
            let _ = writeln!(out, "fidelity: NOT exact, the file contradicts itself; nothing to compare, the recording has no allocations");
        } else if f.addresses == 0 {
            let _ = writeln!(out, "fidelity: nothing to compare, the recording has no allocations");
        } else {
            let verdict = match (self.exact, f.contradictions) {
                (true, _) => "exact",
                (false, 0) => "NOT exact",
                (false, _) => "NOT exact, the file contradicts itself",
            };
            let _ = writeln!(out, "fidelity: {verdict}");
            let mut row = |name: &str, exact: u64, all: u64| {
                if all > 0 {
                    let _ = writeln!(out, "  {name:<24} {exact} of {all}");
                }
            };
            row("addresses", f.addresses_exact, f.addresses);
            row("segments taken", f.segment_allocs_exact, f.segment_allocs);
            row("segments given back", f.segment_frees_exact, f.segment_frees);
            row("ranges mapped", f.segment_maps_exact, f.segment_maps);
            row("ranges unmapped", f.segment_unmaps_exact, f.segment_unmaps);
            row("requests that failed", f.ooms_exact, f.ooms);
            row("blocks at the end", f.final_blocks_exact, f.final_blocks);
            if f.extra_driver_calls > 0 {
                let _ = writeln!(out, "  driver calls that the recording does not have: {}", f.extra_driver_calls);
            }
            if f.unknown_frees > 0 {
                let _ = writeln!(out, "  frees of unknown addresses: {}", f.unknown_frees);
            }
            if let Some(difference) = &f.first_difference {
                let _ =
                    writeln!(out, "  first difference at event {} ({}): {}", difference.event, difference.action.name(), difference.what);
            }
        }
        let _ = writeln!(out, "rules: torch {}, {}", self.policy.version, self.policy.standing);
        let _ = writeln!(out, "  {}", self.policy.because);
        let conf = match (self.conf_recorded, self.conf.as_str()) {
            (false, _) => "not recorded, defaults assumed".to_owned(),
            (true, "") => "defaults".to_owned(),
            (true, conf) => clean(conf),
        };
        let _ = writeln!(out, "configuration: {conf}");
        let _ = writeln!(out);
        let moment = |event: Option<u64>| event.map_or("at the beginning".to_owned(), |event| format!("at event {event}"));
        let _ = writeln!(out, "{:<12} {:>14} {:>14} {:>14}   peak reached", "", "beginning", "peak", "end");
        let mut row = |name: &str, start: Option<u64>, peak: super::replay::Peak, end: u64| {
            let start = start.map_or("-".to_owned(), human);
            let _ = writeln!(out, "{name:<12} {start:>14} {:>14} {:>14}   {}", human(peak.bytes), human(end), moment(peak.event));
        };
        row("reserved", Some(self.start.reserved), self.peak.reserved, self.end.reserved);
        row("allocated", Some(self.start.allocated), self.peak.allocated, self.end.allocated);
        row("active", None, self.peak.active, self.end.active);
        row("requested", None, self.peak.requested, self.end.requested);
        let g = &self.fragmentation;
        let _ = writeln!(out);
        let _ = writeln!(out, "utilisation: {} (peak allocated of peak reserved)", percent(g.utilisation_per_10000));
        let _ = writeln!(
            out,
            "reserved but unallocated at the end: {} = {} pinned in {} segment{}, {} idle, {} waiting for streams",
            human(g.unallocated),
            human(g.pinned),
            g.pinned_segments,
            plural(g.pinned_segments),
            human(g.idle),
            human(g.pending)
        );
        let _ = writeln!(out, "largest free block: {}; rounding of live blocks: {}", human(g.largest_free), human(g.rounding));
        if self.releases + self.retries + self.ooms > 0 {
            let _ = writeln!(
                out,
                "cache emptied by the program: {}, by requests that ran short: {}; out of memory: {}",
                self.releases, self.retries, self.ooms
            );
        }
        if !self.holders_at_peak.is_empty() {
            let _ = writeln!(out, "\nlargest holders at the peak of allocated bytes:");
            for holder in &self.holders_at_peak {
                let _ = writeln!(
                    out,
                    "  {:>12} {:>6} block{:<1}  {}",
                    human(holder.bytes),
                    holder.blocks,
                    plural(holder.blocks),
                    clean(&holder.frame)
                );
            }
        }
        if !self.pinned.is_empty() {
            let _ = writeln!(out, "\nsegments pinned at the end (free memory that `empty_cache` cannot give back):");
            for segment in &self.pinned {
                let _ = writeln!(
                    out,
                    "  {:#x}  {:>12} free of {:>12}, pinned by {} in {} block{}",
                    segment.address,
                    human(segment.free),
                    human(segment.size),
                    human(segment.live),
                    segment.live_blocks,
                    plural(segment.live_blocks)
                );
                if let Some(holder) = segment.holders.first() {
                    let _ = writeln!(out, "      {:>12}  {}", human(holder.bytes), clean(&holder.frame));
                }
            }
        }
        for note in self.start.notes.iter().chain(&self.warnings) {
            let _ = writeln!(out, "\nnote: {}", clean(note));
        }
        out
    }

    /// Whether any event of the recording is an out-of-memory.
    pub fn ran_out(&self) -> bool {
        self.ooms > 0
    }
}

/// Whether a device's trace has allocations, so that a replay shows something.
pub fn has_allocations(snapshot: &Snapshot, device: u32) -> bool {
    snapshot.trace(device).iter().any(|entry| entry.action == Action::Alloc)
}

#[cfg(test)]
mod tests;
