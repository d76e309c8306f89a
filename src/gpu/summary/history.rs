//! From a list of events to lifetimes: which block and which segment existed at which moment.
//!
//! Moments are numbered 0 (before the first event) to n (after the last of n events). What was alive before the recording is
//! found from both ends: blocks freed without having been allocated, and blocks alive at the end that no event allocated.

use std::collections::{BTreeMap, HashMap};

use super::attribution::Rounding;
use crate::gpu::trace::model::{Action, BlockState, PoolId, Segment, SizeClass, Snapshot, StackId, TraceEntry};

/// Largest segment or block that is taken for real, bytes (2 TiB); more is a damaged file.
const LARGEST: u64 = 1 << 41;
/// Highest address that is taken for real.
const HIGHEST: u64 = 1 << 62;

/// The segments of a device whose figures are possible.
pub fn segments_of(snapshot: &Snapshot, device: u32) -> impl Iterator<Item = &Segment> {
    snapshot.segments_of(device).filter(|segment| possible(segment))
}

fn possible(segment: &Segment) -> bool {
    let fits = |address: u64, size: u64| address <= HIGHEST && size <= LARGEST;
    fits(segment.address, segment.total_size)
        && segment.blocks.iter().all(|block| fits(block.address, block.size) && block.requested_size <= LARGEST)
}

/// Whether an event about memory has possible figures.
fn possible_event(entry: &TraceEntry) -> bool {
    entry.addr <= HIGHEST && entry.size <= LARGEST
}

/// How many segments and events of a device are left out because their figures are impossible.
pub fn impossible(snapshot: &Snapshot, device: u32) -> usize {
    let events = snapshot.trace(device).iter().filter(|entry| entry.action != Action::Oom && !possible_event(entry)).count();
    snapshot.segments_of(device).filter(|segment| !possible(segment)).count() + events
}

/// Not within the recording.
pub const NEVER: u32 = u32::MAX;

/// The life of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockLife {
    /// First address.
    pub address: u64,
    /// Bytes of the block.
    pub size: u64,
    /// Bytes asked for.
    pub requested: u64,
    /// Stream (pointer value).
    pub stream: u64,
    /// Where it was allocated; empty where unknown.
    pub stack: StackId,
    /// First moment at which it exists; 0: before the recording.
    pub from: u32,
    /// First moment at which the program no longer holds it.
    pub released: u32,
    /// First moment at which the memory is free.
    pub until: u32,
    /// Whether the size is known from the final state of the snapshot (else it follows from the rules).
    pub exact: bool,
}

/// The life of a segment, or of one mapped range of an expandable segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentLife {
    /// First address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Stream (pointer value).
    pub stream: u64,
    /// Size class; for segments that are gone it follows from the size.
    pub class: SizeClass,
    /// Pool; (0, 0) where unknown.
    pub pool: PoolId,
    /// Mapped range of an expandable segment.
    pub expandable: bool,
    /// First moment at which it exists; 0: before the recording.
    pub from: u32,
    /// First moment at which it is gone.
    pub until: u32,
}

/// All lifetimes of a device.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// Number of events.
    pub events: u32,
    /// By `from`, then in the order of the trace.
    pub blocks: Vec<BlockLife>,
    /// By `from`.
    pub segments: Vec<SegmentLife>,
    /// Events that contradict each other (a block allocated twice, an unknown segment freed), counted.
    pub contradictions: u64,
}

/// Totals at each moment, bytes. Index: moment, 0 to n.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    /// Blocks the program holds.
    pub allocated: Vec<u64>,
    /// As `allocated`, plus blocks that wait for another stream.
    pub active: Vec<u64>,
    /// Segments.
    pub reserved: Vec<u64>,
}

#[derive(Clone, Copy)]
struct Range_ {
    end: u64,
    stream: u64,
    class: SizeClass,
    pool: PoolId,
    expandable: bool,
    from: u32,
}

/// Cuts `from..to` out of the ranges; the pieces cut out are returned.
fn cut(ranges: &mut BTreeMap<u64, Range_>, from: u64, to: u64) -> Vec<(u64, Range_)> {
    let mut out = Vec::new();
    let keys: Vec<u64> = ranges.range(..to).rev().take_while(|(_, range)| range.end > from).map(|(start, _)| *start).collect();
    for start in keys.into_iter().rev() {
        let Some(range) = ranges.remove(&start) else { continue };
        if start < from {
            ranges.insert(start, Range_ { end: from, ..range });
        }
        if range.end > to {
            ranges.insert(to, range);
        }
        out.push((start.max(from), Range_ { end: range.end.min(to), ..range }));
    }
    out
}

/// Rebuilds the lifetimes of `device`.
pub fn rebuild(snapshot: &Snapshot, device: u32, rounding: &Rounding) -> History {
    rebuild_with(snapshot, device, rounding, true)
}

/// As [`rebuild`]; with `trust_final` off, blocks that an event allocated keep the size that follows from the rules, so that tests
/// can compare the two.
pub(super) fn rebuild_with(snapshot: &Snapshot, device: u32, rounding: &Rounding, trust_final: bool) -> History {
    let trace = snapshot.trace(device);
    let mut history = History { events: trace.len() as u32, ..History::default() };
    segments(snapshot, device, &mut history);
    blocks(snapshot, device, rounding, trust_final, &mut history);
    history
}

fn segments(snapshot: &Snapshot, device: u32, history: &mut History) {
    let trace = snapshot.trace(device);
    let mut now: BTreeMap<u64, Range_> = segments_of(snapshot, device)
        .filter(|segment| segment.total_size > 0)
        .map(|segment| {
            (
                segment.address,
                Range_ {
                    end: segment.address.saturating_add(segment.total_size),
                    stream: segment.stream,
                    class: segment.class,
                    pool: segment.pool_id,
                    expandable: segment.expandable,
                    from: 0,
                },
            )
        })
        .collect();
    // Final segments tell more than events do.
    let last = now.clone();
    let told = |address: u64| last.range(..=address).next_back().filter(|(_, range)| range.end > address).map(|(_, range)| *range);
    let made = |entry: &TraceEntry, expandable: bool| Range_ {
        end: entry.addr.saturating_add(entry.size),
        stream: entry.stream,
        class: if entry.size == 2 << 20 { SizeClass::Small } else { SizeClass::Large },
        pool: snapshot.pool_of(entry).unwrap_or((0, 0)),
        expandable,
        from: 0,
    };
    // Backwards to the state before the recording.
    for entry in trace.iter().rev().filter(|entry| entry.size > 0 && possible_event(entry)) {
        let end = entry.addr.saturating_add(entry.size);
        match entry.action {
            Action::SegmentAlloc | Action::SegmentMap => {
                cut(&mut now, entry.addr, end);
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                cut(&mut now, entry.addr, end);
                let mut range = made(entry, entry.action == Action::SegmentUnmap);
                if range.expandable
                    && let Some(known) = told(entry.addr)
                {
                    range.class = known.class;
                }
                now.insert(entry.addr, range);
            }
            _ => {}
        }
    }
    let mut lives: Vec<SegmentLife> = Vec::new();
    let close = |lives: &mut Vec<SegmentLife>, start: u64, range: Range_, until: u32| {
        lives.push(SegmentLife {
            address: start,
            size: range.end - start,
            stream: range.stream,
            class: range.class,
            pool: range.pool,
            expandable: range.expandable,
            from: range.from,
            until,
        });
    };
    for (index, entry) in trace.iter().enumerate().filter(|(_, entry)| entry.size > 0 && possible_event(entry)) {
        let moment = index as u32 + 1;
        let end = entry.addr.saturating_add(entry.size);
        match entry.action {
            Action::SegmentAlloc | Action::SegmentMap => {
                for (start, range) in cut(&mut now, entry.addr, end) {
                    history.contradictions += 1;
                    close(&mut lives, start, range, moment);
                }
                let mut range = made(entry, entry.action == Action::SegmentMap);
                if let Some(known) = told(entry.addr) {
                    (range.class, range.pool) = (known.class, known.pool);
                }
                range.from = moment;
                now.insert(entry.addr, range);
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                let pieces = cut(&mut now, entry.addr, end);
                history.contradictions += u64::from(pieces.is_empty());
                for (start, range) in pieces {
                    close(&mut lives, start, range, moment);
                }
            }
            _ => {}
        }
    }
    for (start, range) in now {
        close(&mut lives, start, range, NEVER);
    }
    lives.sort_by_key(|life| (life.from, life.address));
    history.segments = lives;
}

fn blocks(snapshot: &Snapshot, device: u32, rounding: &Rounding, trust_final: bool, history: &mut History) {
    let trace = snapshot.trace(device);
    let mut lives: Vec<BlockLife> = Vec::new();
    let mut open: HashMap<u64, usize> = HashMap::new();
    for (index, entry) in trace.iter().enumerate().filter(|(_, entry)| possible_event(entry)) {
        let moment = index as u32 + 1;
        match entry.action {
            Action::Alloc => {
                let life = BlockLife {
                    address: entry.addr,
                    size: rounding.round(entry.size),
                    requested: entry.size,
                    stream: entry.stream,
                    stack: entry.stack,
                    from: moment,
                    released: NEVER,
                    until: NEVER,
                    exact: false,
                };
                if let Some(old) = open.insert(entry.addr, lives.len()) {
                    // Its free fell out of the recording.
                    history.contradictions += 1;
                    lives[old].released = lives[old].released.min(moment);
                    lives[old].until = moment;
                }
                lives.push(life);
            }
            Action::FreeRequested | Action::FreeCompleted => {
                let at = *open.entry(entry.addr).or_insert_with(|| {
                    lives.push(BlockLife {
                        address: entry.addr,
                        size: rounding.round(entry.size),
                        requested: entry.size,
                        stream: entry.stream,
                        stack: StackId::EMPTY,
                        from: 0,
                        // A completed free without its request: the request was before the recording.
                        released: if entry.action == Action::FreeCompleted { 0 } else { NEVER },
                        until: NEVER,
                        exact: false,
                    });
                    lives.len() - 1
                });
                let life = &mut lives[at];
                if entry.action == Action::FreeRequested {
                    life.released = life.released.min(moment);
                } else {
                    // Without its request: of a block from before the recording the request was there too.
                    life.released = life.released.min(moment);
                    life.until = moment;
                    open.remove(&entry.addr);
                }
            }
            _ => {}
        }
    }
    // The final state is exact, and shows what lived through the whole recording.
    for segment in segments_of(snapshot, device) {
        for block in segment.blocks.iter().filter(|block| block.state != BlockState::Inactive) {
            let released = if block.state == BlockState::ActivePendingFree { 0 } else { NEVER };
            match open.remove(&block.address) {
                Some(at) => {
                    let life = &mut lives[at];
                    if trust_final || life.from == 0 {
                        life.size = block.size;
                        life.exact = true;
                    }
                    if life.stack.is_empty() {
                        life.stack = block.stack;
                    }
                }
                None => lives.push(BlockLife {
                    address: block.address,
                    size: block.size,
                    requested: block.requested_size,
                    stream: segment.stream,
                    stack: block.stack,
                    from: 0,
                    released,
                    until: NEVER,
                    exact: true,
                }),
            }
        }
    }
    // Still open, but not in the final state: a file whose trace and segments disagree, or one without segments.
    if !history.segments.is_empty() {
        history.contradictions += open.len() as u64;
    }
    lives.sort_by_key(|life| life.from);
    grow(&mut lives, history, rounding);
    history.blocks = lives;
}

/// Gives blocks whose exact size is not known the remainder that the allocator would not have split off: up to 1 MiB of free
/// space behind them in the large pool of an ordinary segment.
fn grow(lives: &mut [BlockLife], history: &History, rounding: &Rounding) {
    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    enum What {
        SegmentEnd(usize),
        BlockEnd(usize),
        SegmentStart(usize),
        BlockStart(usize),
    }
    let mut queue: Vec<(u32, What)> = Vec::with_capacity(lives.len() * 2 + history.segments.len() * 2);
    for (at, life) in history.segments.iter().enumerate() {
        queue.push((life.from, What::SegmentStart(at)));
        if life.until != NEVER {
            queue.push((life.until, What::SegmentEnd(at)));
        }
    }
    for (at, life) in lives.iter().enumerate() {
        queue.push((life.from, What::BlockStart(at)));
        if life.until != NEVER {
            queue.push((life.until, What::BlockEnd(at)));
        }
    }
    queue.sort_unstable();
    let mut segments: BTreeMap<u64, usize> = BTreeMap::new();
    let mut blocks: BTreeMap<u64, usize> = BTreeMap::new();
    let mut waiting: Vec<usize> = Vec::new();
    let extend = |at: usize, lives: &mut [BlockLife], segments: &BTreeMap<u64, usize>, blocks: &BTreeMap<u64, usize>| {
        let life = lives[at];
        let Some((_, segment)) = segments.range(..=life.address).next_back() else { return };
        let segment = &history.segments[*segment];
        let end = segment.address + segment.size;
        if segment.expandable || segment.class == SizeClass::Small || life.address >= end {
            return;
        }
        let next = blocks.range(life.address + 1..).next().map_or(end, |(address, _)| (*address).min(end));
        let Some(rest) = next.checked_sub(life.address + life.size) else { return };
        if rest > 0 && rounding.stays_whole(life.size, rest) {
            lives[at].size += rest;
        }
    };
    for (moment, what) in queue {
        if moment > 0 && !waiting.is_empty() {
            // All that was alive before the recording is in place now.
            for at in waiting.drain(..) {
                extend(at, lives, &segments, &blocks);
            }
        }
        match what {
            What::SegmentStart(at) => {
                segments.insert(history.segments[at].address, at);
            }
            What::SegmentEnd(at) => {
                segments.remove(&history.segments[at].address);
            }
            What::BlockEnd(at) => {
                blocks.remove(&lives[at].address);
            }
            What::BlockStart(at) => {
                blocks.insert(lives[at].address, at);
                if !lives[at].exact {
                    if moment == 0 {
                        waiting.push(at);
                    } else {
                        extend(at, lives, &segments, &blocks);
                    }
                }
            }
        }
    }
    for at in waiting {
        extend(at, lives, &segments, &blocks);
    }
}

impl History {
    /// Totals at each moment.
    pub fn totals(&self) -> Totals {
        let n = self.events as usize + 1;
        let sum = |edges: &mut dyn Iterator<Item = (u32, i128)>| -> Vec<u64> {
            let mut change = vec![0i128; n];
            for (moment, bytes) in edges {
                if let Some(slot) = change.get_mut(moment as usize) {
                    *slot += bytes;
                }
            }
            let mut run = 0i128;
            change
                .into_iter()
                .map(|bytes| {
                    run += bytes;
                    run.max(0) as u64
                })
                .collect()
        };
        let of = |life: &BlockLife| i128::from(life.size);
        Totals {
            allocated: sum(&mut self.blocks.iter().flat_map(|life| [(life.from, of(life)), (life.released.max(life.from), -of(life))])),
            active: sum(&mut self.blocks.iter().flat_map(|life| [(life.from, of(life)), (life.until, -of(life))])),
            reserved: sum(&mut self
                .segments
                .iter()
                .flat_map(|life| [(life.from, i128::from(life.size)), (life.until, -i128::from(life.size))])),
        }
    }

    /// The blocks that exist at a moment.
    pub fn alive(&self, moment: u32) -> impl Iterator<Item = &BlockLife> {
        self.blocks.iter().take_while(move |life| life.from <= moment).filter(move |life| life.until > moment)
    }
}
