//! `tare gpu summary`: who holds the memory of a recorded snapshot, and why the rest of what is reserved is not free.
//!
//! ```text
//! Snapshot ─ attribution ─> one cause for every reserved byte, what pins each segment, holders
//!          └ history ─────> lifetimes ─> timeline, peaks
//!                                     └> html: one self-contained page
//! ```
//! [`summarise`] makes the report (exact bytes, serialisable), [`text`] prints it for people, [`html::page`] draws it.

/// Every reserved byte gets one cause.
pub mod attribution;
/// Lifetimes of blocks and segments.
pub mod history;
/// The page.
pub mod html;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use self::attribution::{Fate, Holder, Rounding, SegmentReport, Split};
use self::history::{History, NEVER};
use crate::gpu::trace::frames::{self, Holders};
use crate::gpu::trace::model::{Action, BlockState, Generation, PoolId, Snapshot, Stage};
use crate::gpu::{human, plural};

/// What the caller wants and knows.
#[derive(Debug, Clone)]
pub struct Options {
    /// How many holders and segments the text shows, and how many holders the report lists at the peak. At least 1.
    pub top: usize,
    /// Only this device.
    pub device: Option<u32>,
    /// Points of the timeline; each keeps the highest values of its stretch of events.
    pub timeline_points: usize,
    /// What the driver says about the devices now (NVML), where the snapshot was taken on this machine.
    pub driver: Vec<DriverView>,
}

impl Default for Options {
    fn default() -> Self {
        Options { top: 10, device: None, timeline_points: 240, driver: Vec::new() }
    }
}

/// What the driver reports for a device; all in bytes, `None` where unknown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DriverView {
    /// Device ordinal as in the snapshot.
    pub device: u32,
    /// Physical memory.
    pub total: Option<u64>,
    /// In use by everything.
    pub used: Option<u64>,
    /// In use by the recorded process, context included.
    pub this_process: Option<u64>,
    /// In use by other processes.
    pub other_processes: Option<u64>,
}

/// The whole report.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Layout of the file: `v0` (torch 2.0) to `v4` (torch 2.15).
    pub generation: Generation,
    /// The recorded `PYTORCH_CUDA_ALLOC_CONF`; `None` where the file does not tell.
    pub conf: Option<String>,
    /// What the reader had to assume and what the file does not tell.
    pub notes: Vec<String>,
    /// One for each device with segments or events.
    pub devices: Vec<DeviceSummary>,
}

/// One device.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceSummary {
    /// Ordinal.
    pub device: u32,
    /// Bytes that PyTorch holds from the driver.
    pub reserved: u64,
    /// Bytes of blocks that are handed out.
    pub allocated: u64,
    /// As `allocated`, plus blocks that wait for another stream.
    pub active: u64,
    /// Bytes that tensors asked for.
    pub requested: u64,
    /// `reserved - allocated`.
    pub reserved_unallocated: u64,
    /// Every reserved byte by cause; sums to `reserved`.
    pub split: Split,
    /// What `torch.cuda.empty_cache()` would return to the driver at the moment of the snapshot.
    pub empty_cache: EmptyCache,
    /// Bytes after the last block in use of expandable segments: the growable tails.
    pub expandable_tails: u64,
    /// Per stream and pool.
    pub streams: Vec<StreamSummary>,
    /// By frame of the user's code, the largest first.
    pub holders: Vec<Holder>,
    /// Every segment with its fate and what pins it, in address order.
    pub segments: Vec<SegmentReport>,
    /// Over the recording; `None` where no events were recorded.
    pub timeline: Option<Timeline>,
    /// Memory outside of PyTorch's reserve, where it can be told.
    pub outside: Outside,
    /// What is unknown or odd about this device.
    pub notes: Vec<String>,
}

/// What `empty_cache` would do now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct EmptyCache {
    /// Bytes it returns; waiting blocks are waited for.
    pub returns: u64,
    /// Of those, bytes in segments or pages that are free only once another stream is done.
    pub after_waiting: u64,
    /// Bytes of wholly free segments in private pools: returned only if the pool is no longer used, which the file does not tell.
    pub private_pools: u64,
    /// Free bytes that stay because something in the same segment or page is in use.
    pub stays: u64,
}

/// A stream within a pool.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StreamSummary {
    /// Stream (pointer value, 0 is the default stream).
    pub stream: u64,
    /// Pool; (0, 0) is the default one.
    pub pool: PoolId,
    /// Segments.
    pub segments: usize,
    /// By cause; sums to what the stream reserves.
    pub split: Split,
}

/// The recording.
#[derive(Debug, Clone, Serialize)]
pub struct Timeline {
    /// Number of events.
    pub events: u32,
    /// Microseconds from the first to the last event; `None` without times.
    pub duration_us: Option<u64>,
    /// Highest bytes handed out.
    pub peak_allocated: Peak,
    /// Highest bytes in use or waiting.
    pub peak_active: Peak,
    /// Highest bytes reserved.
    pub peak_reserved: Peak,
    /// Who held the memory at `peak_active`, the largest first.
    pub holders_at_peak: Vec<PeakHolder>,
    /// Highest values of successive stretches of events.
    pub points: Vec<Point>,
    /// Failed allocations.
    pub ooms: Vec<OomEvent>,
    /// Spans and marks that the program set.
    pub annotations: Vec<Mark>,
    /// Blocks whose size is known from the final state, and blocks whose size follows from the allocator's rules.
    pub sizes_recorded: usize,
    /// See `sizes_recorded`.
    pub sizes_derived: usize,
}

/// A highest value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Peak {
    /// Bytes.
    pub bytes: u64,
    /// Index of the event after which it was first reached; `None`: before the first event.
    pub event: Option<u32>,
    /// Microseconds since the first event, where known.
    pub time_us: Option<u64>,
}

/// A holder at a moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PeakHolder {
    /// `function (file:line)`; `None` gathers blocks without frames.
    pub frame: Option<String>,
    /// Bytes.
    pub bytes: u64,
    /// Blocks.
    pub blocks: usize,
}

/// A stretch of the timeline: its last event, and the highest values within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Point {
    /// Index of its last event.
    pub event: u32,
    /// Microseconds since the first event, where known.
    pub time_us: Option<u64>,
    /// Bytes.
    pub allocated: u64,
    /// Bytes.
    pub active: u64,
    /// Bytes.
    pub reserved: u64,
}

/// A recorded failure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OomEvent {
    /// Index of the event.
    pub event: u32,
    /// Bytes asked from the driver.
    pub wanted: u64,
    /// Bytes the driver had left.
    pub device_free: u64,
    /// Bytes reserved at that moment.
    pub reserved: u64,
    /// Where, in the user's code.
    pub at: Option<String>,
}

/// An annotation placed among the events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Mark {
    /// Index of the last event before it; `None`: before the first event.
    pub event: Option<u32>,
    /// START, END, or neither.
    pub stage: Stage,
    /// Its name.
    pub name: String,
}

/// Memory of the card that PyTorch's allocator did not reserve. `None`: not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Outside {
    /// Physical memory of the card.
    pub total: Option<u64>,
    /// Driver context and libraries of the recorded process: its use minus what it reserves.
    pub context: Option<u64>,
    /// Other processes.
    pub other_processes: Option<u64>,
    /// Context and other processes together, where only the sum is known (from a recorded out of memory or the card's use).
    pub together: Option<u64>,
    /// Free on the card.
    pub free: Option<u64>,
}

/// Makes the report.
///
/// Never fails: what the file does not tell is `None` in the report and named in its notes.
pub fn summarise(snapshot: &Snapshot, options: &Options) -> Summary {
    let rounding = Rounding::of(snapshot.settings.as_ref());
    let mut notes: Vec<String> = snapshot.warnings.clone();
    if snapshot.settings.is_none() {
        notes.push("the file does not record the allocator's configuration; rounding follows the defaults".into());
    }
    if snapshot.host_items > 0 {
        notes.push(format!("{} records of pinned host memory are not shown", snapshot.host_items));
    }
    let devices: Vec<DeviceSummary> = snapshot
        .devices()
        .into_iter()
        .filter(|device| options.device.is_none_or(|only| only == *device))
        .map(|device| summarise_device(snapshot, device, &rounding, options))
        .collect();
    if devices.is_empty() {
        notes.push(match options.device {
            Some(device) => format!("the file holds nothing about device {device}"),
            None => "the file holds no segments and no events".into(),
        });
    }
    Summary { generation: snapshot.generation, conf: snapshot.settings.as_ref().map(|settings| settings.conf.clone()), notes, devices }
}

fn summarise_device(snapshot: &Snapshot, device: u32, rounding: &Rounding, options: &Options) -> DeviceSummary {
    let mut frames = Holders::new(&snapshot.names);
    let mut reports: Vec<(u64, SegmentReport)> = history::segments_of(snapshot, device)
        .map(|segment| (segment.address, attribution::segment(segment, rounding, &mut frames)))
        .collect();
    reports.sort_by_key(|(address, _)| *address);
    let segments: Vec<SegmentReport> = reports.into_iter().map(|(_, report)| report).collect();
    let mut split = Split::default();
    let mut empty_cache = EmptyCache::default();
    let mut streams: BTreeMap<(u64, PoolId), StreamSummary> = BTreeMap::new();
    for segment in &segments {
        split.add(&segment.split);
        let stream = streams.entry((segment.stream, segment.pool)).or_insert_with(|| StreamSummary {
            stream: segment.stream,
            pool: segment.pool,
            segments: 0,
            split: Split::default(),
        });
        stream.segments += 1;
        stream.split.add(&segment.split);
        let at_once = segment.split.cached + segment.split.expandable_pages;
        empty_cache.returns += segment.releasable;
        empty_cache.after_waiting += segment.releasable.saturating_sub(at_once);
        if segment.fate == Fate::PrivatePool {
            empty_cache.private_pools += segment.size;
        }
        if segment.releasable == 0 {
            empty_cache.stays += segment.split.pinned;
        }
        empty_cache.stays += segment.split.expandable_rest;
    }
    let mut expandable_tails = 0;
    let (mut allocated, mut active, mut requested) = (0u64, 0u64, 0u64);
    let mut framed = false;
    let mut live = 0usize;
    for segment in history::segments_of(snapshot, device) {
        for block in segment.blocks.iter().filter(|block| block.state != BlockState::Inactive) {
            live += 1;
            framed |= !block.stack.is_empty();
            active += block.size;
            if block.state == BlockState::ActiveAllocated {
                allocated += block.size;
                requested += block.requested_size;
            }
        }
        if segment.expandable {
            let tail = segment.blocks.iter().rev().take_while(|block| block.state == BlockState::Inactive);
            expandable_tails += tail.map(|block| block.size).sum::<u64>();
        }
    }
    let reserved = history::segments_of(snapshot, device).map(|segment| segment.total_size).sum::<u64>();
    let mut notes = Vec::new();
    let impossible = history::impossible(snapshot, device);
    if impossible > 0 {
        notes.push(match impossible {
            1 => "1 segment or event has an impossible size or address and is left out: the file is damaged".to_owned(),
            _ => format!("{impossible} segments or events have impossible sizes or addresses and are left out: the file is damaged"),
        });
    }
    notes.extend(crate::gpu::trace::check::contradictions(snapshot, device));
    let trace = snapshot.trace(device);
    let timeline = (!trace.is_empty()).then(|| timeline(snapshot, device, rounding, options, &mut frames, &mut notes));
    if trace.is_empty() {
        notes.push("no events were recorded: nothing is known about the time before the snapshot (`torch.cuda.memory._record_memory_history()` records them)".into());
    }
    if live > 0 && !framed {
        notes.push("no frames were recorded: the holders are unknown".into());
    }
    if split.unexplained > 0 {
        notes.push(format!("the file is damaged: blocks and segments disagree about {} bytes", split.unexplained));
    }
    if split.private_pools > 0 {
        notes.push("whether a private pool is still in use is not recorded; its free memory counts as kept".into());
    }
    let outside = outside(device, reserved, timeline.as_ref(), options);
    DeviceSummary {
        device,
        reserved,
        allocated,
        active,
        requested,
        reserved_unallocated: reserved.saturating_sub(allocated),
        split,
        empty_cache,
        expandable_tails,
        streams: streams.into_values().collect(),
        holders: attribution::holders(history::segments_of(snapshot, device), &mut frames),
        segments,
        timeline,
        outside,
        notes,
    }
}

fn outside(device: u32, reserved: u64, timeline: Option<&Timeline>, options: &Options) -> Outside {
    let mut outside = Outside::default();
    if let Some(view) = options.driver.iter().find(|view| view.device == device) {
        outside.total = view.total;
        outside.other_processes = view.other_processes;
        outside.context = view.this_process.and_then(|used| used.checked_sub(reserved));
        outside.together = view.used.and_then(|used| used.checked_sub(reserved));
        outside.free = view.total.zip(view.used).and_then(|(total, used)| total.checked_sub(used));
    }
    // A failed allocation records what the driver had left; the last one is nearest to the snapshot.
    if outside.free.is_none()
        && let Some(oom) = timeline.and_then(|timeline| timeline.ooms.last())
    {
        outside.free = Some(oom.device_free);
        if outside.together.is_none() {
            outside.together = outside.total.and_then(|total| total.checked_sub(oom.device_free)?.checked_sub(oom.reserved));
        }
    }
    outside
}

fn timeline(
    snapshot: &Snapshot,
    device: u32,
    rounding: &Rounding,
    options: &Options,
    frames: &mut Holders<'_>,
    notes: &mut Vec<String>,
) -> Timeline {
    let trace = snapshot.trace(device);
    let history = history::rebuild(snapshot, device, rounding);
    let totals = history.totals();
    let first_time = trace.iter().find_map(|entry| entry.time());
    let time = |moment: usize| -> Option<u64> {
        let entry = trace.get(moment.checked_sub(1)?)?;
        Some(u64::try_from(entry.time()?.checked_sub(first_time?)?).unwrap_or(0))
    };
    let peak = |values: &[u64]| {
        let (moment, bytes) =
            values.iter().copied().enumerate().fold((0, 0), |best, (at, bytes)| if bytes > best.1 { (at, bytes) } else { best });
        Peak { bytes, event: (moment as u32).checked_sub(1), time_us: time(moment) }
    };
    let peak_active = peak(&totals.active);
    let mut points = Vec::new();
    let n = trace.len();
    let count = options.timeline_points.clamp(1, n.max(1));
    for k in 0..count {
        let (from, to) = (k * n / count, (k + 1) * n / count);
        if from == to {
            continue;
        }
        let high = |values: &[u64]| values[from + 1..=to].iter().copied().max().unwrap_or(0);
        points.push(Point {
            event: to as u32 - 1,
            time_us: time(to),
            allocated: high(&totals.allocated),
            active: high(&totals.active),
            reserved: high(&totals.reserved),
        });
    }
    let ooms = trace
        .iter()
        .enumerate()
        .filter(|(_, entry)| entry.action == Action::Oom)
        .map(|(at, entry)| OomEvent {
            event: at as u32,
            wanted: entry.size,
            device_free: entry.addr,
            reserved: totals.reserved.get(at).copied().unwrap_or(0),
            at: frames.text(entry.stack),
        })
        .collect();
    if history.contradictions > 0 {
        notes.push(format!(
            "the file is damaged: {} event{} at odds with others or with the final state; the timeline follows the later one",
            history.contradictions,
            plural(history.contradictions)
        ));
    }
    if first_time.is_none() {
        notes.push("the events carry no times".into());
    }
    if history.blocks.iter().any(|life| life.from == 0 && life.until != NEVER && life.stack.is_empty()) {
        notes.push("some blocks were allocated before the recording began; where is unknown unless they are still alive".into());
    }
    Timeline {
        events: history.events,
        duration_us: time(n),
        peak_allocated: peak(&totals.allocated),
        peak_active,
        peak_reserved: peak(&totals.reserved),
        holders_at_peak: holders_at(snapshot, frames, &history, peak_active.event.map_or(0, |event| event + 1), options.top),
        points,
        ooms,
        annotations: marks(snapshot, device),
        sizes_recorded: history.blocks.iter().filter(|life| life.exact).count(),
        sizes_derived: history.blocks.iter().filter(|life| !life.exact).count(),
    }
}

fn holders_at(snapshot: &Snapshot, frames: &mut Holders<'_>, history: &History, moment: u32, top: usize) -> Vec<PeakHolder> {
    let names = &snapshot.names;
    let mut gathered: BTreeMap<Option<u32>, (u64, usize)> = BTreeMap::new();
    for life in history.alive(moment) {
        let slot = gathered.entry(frames.of(life.stack).map(|frame| frame.0)).or_default();
        slot.0 += life.size;
        slot.1 += 1;
    }
    let mut list: Vec<PeakHolder> = gathered
        .into_iter()
        .map(|(frame, (bytes, blocks))| PeakHolder {
            frame: frame.map(|id| frames::describe(names, crate::gpu::trace::model::FrameId(id))),
            bytes,
            blocks,
        })
        .collect();
    list.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.frame.cmp(&b.frame)));
    list.truncate(top.max(1));
    list
}

/// The annotations of a device, each placed behind the events that happened before it.
fn marks(snapshot: &Snapshot, device: u32) -> Vec<Mark> {
    let trace = snapshot.trace(device);
    let times: Option<Vec<i64>> = trace.iter().map(|entry| entry.time()).collect();
    let mut marks: Vec<Mark> = Vec::new();
    if let Some(times) = times {
        for annotation in snapshot.annotations.iter().filter(|mark| mark.device < 0 || mark.device == i64::from(device)) {
            let event = (times.partition_point(|time| *time <= annotation.time_us) as u32).checked_sub(1);
            marks.push(Mark { event, stage: annotation.stage, name: snapshot.names.text(annotation.name).to_owned() });
        }
    }
    for (at, entry) in trace.iter().enumerate().filter(|(_, entry)| entry.action == Action::Annotate) {
        marks.push(Mark { event: Some(at as u32), stage: Stage::Other, name: snapshot.names.text(entry.user_metadata).to_owned() });
    }
    marks.sort_by_key(|mark| mark.event);
    marks
}

fn share(part: u64, whole: u64) -> String {
    if whole == 0 { String::new() } else { format!("{:5.1} %", 100.0 * part as f64 / whole as f64) }
}

/// Control characters and line breaks in recorded names do not reach the terminal.
pub(crate) fn clean(text: &str) -> String {
    text.chars()
        .map(|c| {
            let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
            if turns || c.is_control() { '\u{fffd}' } else { c }
        })
        .collect()
}

fn shorten(text: &str, limit: usize) -> String {
    let text = clean(text);
    if text.chars().count() <= limit {
        return text;
    }
    let head: String = text.chars().take(limit.saturating_sub(1)).collect();
    format!("{head}…")
}

/// The report for people. `top`: how many holders and pinned segments to show.
pub fn text(summary: &Summary, top: usize) -> String {
    let mut out = String::new();
    for device in &summary.devices {
        if summary.devices.len() > 1 || device.device != 0 {
            let _ = writeln!(out, "device {}", device.device);
        }
        device_text(&mut out, device, top.max(1));
        out.push('\n');
    }
    if let Some(conf) = summary.conf.as_deref().filter(|conf| !conf.is_empty()) {
        let _ = writeln!(out, "configuration  {}", clean(conf));
    }
    for note in &summary.notes {
        let _ = writeln!(out, "note: {}", clean(note));
    }
    while out.ends_with("\n\n") {
        out.pop();
    }
    out
}

fn device_text(out: &mut String, device: &DeviceSummary, top: usize) {
    let row = |out: &mut String, name: &str, bytes: u64| {
        let _ = writeln!(out, "{name:<52} {:>12}  {}", human(bytes), share(bytes, device.reserved));
    };
    row(out, "reserved by PyTorch", device.reserved);
    for (key, label, bytes) in device.split.parts() {
        if bytes > 0 || matches!(key, "allocated" | "cached" | "pinned") {
            row(out, &format!("  {label}"), bytes);
        }
    }
    if device.expandable_tails > 0 {
        let _ = writeln!(out, "{:<52} {:>12}", "  (of which growable tails of expandable segments)", human(device.expandable_tails));
    }
    let now = &device.empty_cache;
    let _ = write!(out, "\nempty_cache() would return {} now", human(now.returns));
    if now.after_waiting > 0 {
        let _ = write!(out, " ({} of it after waiting for another stream)", human(now.after_waiting));
    }
    let _ = write!(out, " and leave {} free but pinned", human(now.stays));
    if now.private_pools > 0 {
        let _ = write!(out, "; {} more if the private pools are no longer used", human(now.private_pools));
    }
    out.push('\n');
    let outside = &device.outside;
    let told = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), human);
    if *outside == Outside::default() {
        out.push_str("outside of PyTorch (context, other processes): not recorded in a snapshot; run on the machine itself to see it\n");
    } else {
        let _ = writeln!(
            out,
            "outside of PyTorch: context {}, other processes {}, together {}, free on the card {} of {}",
            told(outside.context),
            told(outside.other_processes),
            told(outside.together),
            told(outside.free),
            told(outside.total)
        );
    }
    if device.streams.len() > 1 {
        out.push_str("\nstreams and pools\n");
        for stream in &device.streams {
            let pool = if stream.pool == (0, 0) { String::new() } else { format!(", pool {}.{}", stream.pool.0, stream.pool.1) };
            let _ = writeln!(
                out,
                "  stream {:#x}{pool}: {} in {} segment{}, {} allocated",
                stream.stream,
                human(stream.split.total()),
                stream.segments,
                plural(stream.segments as u64),
                human(stream.split.allocated)
            );
        }
    }
    if !device.holders.is_empty() {
        out.push_str("\nholders; what each strands: free memory in segments that nobody else uses\n");
        for holder in device.holders.iter().take(top) {
            let frame = holder.frame.as_deref().unwrap_or("unknown (no frames recorded)");
            let stranded = if holder.stranded_alone > 0 { human(holder.stranded_alone) } else { "-".into() };
            let _ = writeln!(
                out,
                "  {:>12} in {:>5} block{:<1}  {stranded:>12}  {}",
                human(holder.bytes),
                holder.blocks,
                plural(holder.blocks as u64),
                shorten(frame, 80)
            );
        }
        if device.holders.len() > top {
            let rest: u64 = device.holders[top..].iter().map(|holder| holder.bytes).sum();
            let _ = writeln!(
                out,
                "  {:>12} in {} more holder{}",
                human(rest),
                device.holders.len() - top,
                plural((device.holders.len() - top) as u64)
            );
        }
    }
    let mut pinned: Vec<&SegmentReport> = device.segments.iter().filter(|segment| segment.split.pinned > 0).collect();
    pinned.sort_by_key(|segment| std::cmp::Reverse(segment.split.pinned));
    if !pinned.is_empty() {
        let _ = writeln!(out, "\npinned segments: {}, the largest hole first", pinned.len());
        for segment in pinned.iter().take(top) {
            let _ = writeln!(
                out,
                "  {} of {} free at {}, held by {} in {} block{}",
                human(segment.split.pinned),
                human(segment.size),
                segment.address,
                human(segment.live_bytes),
                segment.live_blocks,
                if segment.live_blocks == 1 { "" } else { "s" }
            );
            for block in segment.pinned_by.iter().take(3) {
                let at = block.allocated_at.as_deref().unwrap_or("unknown (no frames recorded)");
                let waits = if block.state == BlockState::ActivePendingFree { ", waiting for a stream" } else { "" };
                let _ = writeln!(out, "      {:>12}  {}{waits}", human(block.size), shorten(at, 90));
            }
            if segment.live_blocks > 3 {
                let _ = writeln!(out, "      and {} more", segment.live_blocks - 3);
            }
        }
        if pinned.len() > top {
            let rest: u64 = pinned[top..].iter().map(|segment| segment.split.pinned).sum();
            let _ = writeln!(out, "  {} more segment{} with {} free", pinned.len() - top, plural((pinned.len() - top) as u64), human(rest));
        }
    }
    if let Some(timeline) = &device.timeline {
        timeline_text(out, timeline, top);
    }
    for note in &device.notes {
        let _ = writeln!(out, "note: {}", clean(note));
    }
}

fn timeline_text(out: &mut String, timeline: &Timeline, top: usize) {
    let _ = write!(out, "\nrecording: {} event{}", timeline.events, plural(u64::from(timeline.events)));
    if let Some(us) = timeline.duration_us {
        let _ = write!(out, " in {:.3} s", us as f64 / 1e6);
    }
    out.push('\n');
    for (name, peak) in [("allocated", timeline.peak_allocated), ("active", timeline.peak_active), ("reserved", timeline.peak_reserved)] {
        let at = peak.event.map_or_else(|| "before the first event".to_owned(), |event| format!("after event {event}"));
        let _ = writeln!(out, "  peak {name:<9} {:>12}  {at}", human(peak.bytes));
    }
    let high = timeline.points.iter().map(|point| point.reserved.max(point.active)).max().unwrap_or(0).max(1);
    let bar = |pick: &dyn Fn(&Point) -> u64| -> String {
        const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let columns = timeline.points.len().min(72);
        (0..columns)
            .map(|k| {
                let (from, to) = (k * timeline.points.len() / columns, (k + 1) * timeline.points.len() / columns);
                let value = timeline.points[from..to].iter().map(pick).max().unwrap_or(0);
                LEVELS[(u128::from(value) * 8).div_ceil(u128::from(high)).min(8) as usize]
            })
            .collect()
    };
    let _ = writeln!(out, "  reserved  {}", bar(&|point| point.reserved));
    let _ = writeln!(out, "  active    {}", bar(&|point| point.active));
    if !timeline.holders_at_peak.is_empty() {
        out.push_str("  held at the active peak\n");
        for holder in timeline.holders_at_peak.iter().take(top) {
            let frame = holder.frame.as_deref().unwrap_or("unknown (allocated before the recording, or no frames)");
            let _ = writeln!(
                out,
                "    {:>12} in {:>5} block{:<1}  {}",
                human(holder.bytes),
                holder.blocks,
                plural(holder.blocks as u64),
                shorten(frame, 80)
            );
        }
    }
    for oom in &timeline.ooms {
        let _ = writeln!(
            out,
            "  out of memory at event {}: wanted {}, the card had {} left, PyTorch had {} reserved{}",
            oom.event,
            human(oom.wanted),
            human(oom.device_free),
            human(oom.reserved),
            oom.at.as_ref().map_or_else(String::new, |at| format!(", at {}", shorten(at, 90)))
        );
    }
}

#[cfg(test)]
mod tests;
