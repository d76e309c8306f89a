//! The allocator's state at the beginning of a recording, rebuilt from its end.
//!
//! A snapshot holds the segments at its end and the events before it, and the trace is a ring: it may begin in the middle of a life,
//! with blocks that were allocated, and memory that was cached, before its first event. The state there follows by walking back:
//!
//! 1. Segments: those at the end, minus every `segment_alloc`, plus every `segment_free` (and the same for mapped ranges of
//!    expandable segments). A freed segment's size class is not recorded: 2 MiB is small, everything else large, since a large
//!    segment has at least 10 MiB.
//! 2. Live blocks: every address whose first event is a free, and every block at the end that no event mentions.
//! 3. Everything else of a segment is free: one block per gap, as the allocator merges neighbours.
//!
//! The block behind a freed address may be larger than its rounded request, because the allocator leaves a rest of up to 1 MiB on a
//! large block. A gap of at most 1 MiB after such a block is that rest (no free block of the large pool is that small); where the gap
//! is larger, the first allocation in it tells where the free block began.

use std::collections::{BTreeMap, HashMap};

use super::model::{Action, BlockState, PoolId, SizeClass, Snapshot, StackId, TraceEntry};

const MIB: u64 = 1 << 20;

/// A block at the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartBlock {
    /// First address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes that were asked for; 0 where free.
    pub requested: u64,
    /// State.
    pub state: BlockState,
    /// Where it was allocated, if the snapshot at the end still tells.
    pub stack: StackId,
}

/// A segment at the beginning; its blocks cover it without gaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartSegment {
    /// First address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Stream.
    pub stream: u64,
    /// Small or large pool.
    pub class: SizeClass,
    /// Pool; (0, 0) where unknown.
    pub pool: PoolId,
    /// A mapped range of an expandable segment.
    pub expandable: bool,
    /// Blocks in address order.
    pub blocks: Vec<StartBlock>,
}

/// The state of one device at the beginning of its trace.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StartState {
    /// Segments by address.
    pub segments: Vec<StartSegment>,
    /// For events (by index) that make a segment which lives to the end: its pool, where not the default one.
    pub event_pools: HashMap<usize, PoolId>,
    /// Whether any pool but the default one occurs.
    pub private_pools: bool,
    /// Bytes of the card that the process could have, where the recording ran out of memory and so tells it (what it held and
    /// what was free then). It decides how much address space an expandable segment reserves.
    pub total: Option<u64>,
    /// Blocks whose size the recording leaves open within 1 MiB.
    pub open: Vec<OpenEnd>,
    /// What did not fit together, or had to be assumed.
    pub notes: Vec<String>,
}

/// A block whose end is not known: it may carry a rest of up to 1 MiB, at the cost of the free block behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenEnd {
    /// The block.
    pub block: u64,
    /// Where the free block behind it is taken to begin.
    pub free: u64,
    /// Where the free block ends.
    pub end: u64,
    /// The rest that the block is taken to carry, in bytes.
    pub rest: u64,
    /// Index of the event that frees the block: from then on it does not matter.
    pub freed: usize,
}

impl OpenEnd {
    /// The rest with which the free block is too small for `size` bytes, if that is possible: a rest has at most 1 MiB, and a
    /// free block of the large pool more than that.
    pub fn rest_against(&self, size: u64) -> Option<u64> {
        let room = self.end - (self.free - self.rest);
        let free = size.checked_sub(512)?;
        let rest = room.checked_sub(free)?;
        (rest <= MIB && free > MIB && rest > self.rest).then_some(rest)
    }
}

impl StartState {
    /// Bytes of all segments.
    pub fn reserved(&self) -> u64 {
        self.segments.iter().map(|segment| segment.size).sum()
    }

    /// Bytes of live blocks.
    pub fn allocated(&self) -> u64 {
        self.blocks().filter(|block| block.state == BlockState::ActiveAllocated).map(|block| block.size).sum()
    }

    /// Bytes of segments in which nothing lives: an idle cache.
    pub fn idle(&self) -> u64 {
        let idle = |segment: &&StartSegment| segment.blocks.iter().all(|block| block.state == BlockState::Inactive);
        self.segments.iter().filter(idle).map(|segment| segment.size).sum()
    }

    /// All blocks by segment and address.
    pub fn blocks(&self) -> impl Iterator<Item = &StartBlock> {
        self.segments.iter().flat_map(|segment| &segment.blocks)
    }
}

/// How the recorded allocator cut blocks.
#[derive(Debug, Clone, Copy)]
pub struct Cutting<F> {
    /// Requested bytes to block bytes.
    pub round: F,
    /// Expandable segments were on: every rest is split off, so no block carries slack.
    pub expandable: bool,
}

/// What the first event of an address says about the beginning.
struct First {
    requested: u64,
    /// Index of the event that completes its free; until then it keeps its place. `usize::MAX`: none does.
    freed: usize,
    pending: bool,
}

#[derive(Clone, Copy)]
struct Range {
    end: u64,
    stream: u64,
    class: SizeClass,
    pool: PoolId,
    expandable: bool,
}

/// Rebuilds the state of `device` at the beginning of its trace.
///
/// `rests`: what blocks with an open end ([`StartState::open`]) carry, by address; 0 where absent.
pub fn reconstruct<F: Fn(u64) -> u64>(snapshot: &Snapshot, device: u32, cutting: &Cutting<F>, rests: &BTreeMap<u64, u64>) -> StartState {
    let trace = snapshot.trace(device);
    let mut state = StartState::default();
    let mut ranges = BTreeMap::new();
    for segment in snapshot.segments_of(device) {
        let Some(end) = segment.address.checked_add(segment.total_size).filter(|_| segment.total_size > 0) else { continue };
        state.private_pools |= segment.pool_id != (0, 0);
        ranges.insert(
            segment.address,
            Range { end, stream: segment.stream, class: segment.class, pool: segment.pool_id, expandable: segment.expandable },
        );
    }
    state.private_pools |= trace.iter().any(|entry| snapshot.pool_of(entry).is_some_and(|pool| pool != (0, 0)));
    walk_back(snapshot, trace, &mut ranges, &mut state);

    // What the events say about each address, oldest first.
    let mut first: HashMap<u64, Option<First>> = HashMap::new();
    let mut born: BTreeMap<u64, usize> = BTreeMap::new();
    for (index, entry) in trace.iter().enumerate() {
        match entry.action {
            Action::Alloc => {
                first.entry(entry.addr).or_insert(None);
                born.entry(entry.addr).or_insert(index);
            }
            Action::FreeRequested => {
                let made = || Some(First { requested: entry.size, freed: usize::MAX, pending: false });
                first.entry(entry.addr).or_insert_with(made);
            }
            Action::FreeCompleted => {
                let made = || Some(First { requested: entry.size, freed: index, pending: true });
                if let Some(first) = first.entry(entry.addr).or_insert_with(made) {
                    first.freed = first.freed.min(index);
                }
            }
            _ => {}
        }
    }
    let mut live: BTreeMap<u64, (StartBlock, Option<usize>)> = BTreeMap::new();
    for (&address, first) in &first {
        if let Some(First { requested, freed, pending }) = *first {
            let state = if pending { BlockState::ActivePendingFree } else { BlockState::ActiveAllocated };
            let size = (cutting.round)(requested);
            live.insert(address, (StartBlock { address, size, requested, state, stack: StackId::EMPTY }, Some(freed)));
        }
    }
    for block in snapshot.segments_of(device).flat_map(|segment| &segment.blocks) {
        if block.state == BlockState::Inactive {
            continue;
        }
        let known = match first.get(&block.address) {
            None => true,
            // Freed in the trace but not completed: the block at the end is still the one of the beginning.
            Some(Some(_)) => block.state == BlockState::ActivePendingFree && !born.contains_key(&block.address),
            Some(None) => false,
        };
        if known {
            let state = if first.contains_key(&block.address) { BlockState::ActiveAllocated } else { block.state };
            let made = StartBlock { address: block.address, size: block.size, requested: block.requested_size, state, stack: block.stack };
            live.insert(block.address, (made, None));
        }
    }

    let mut outside = live.len();
    for (address, range) in ranges {
        let mut segment = StartSegment {
            address,
            size: range.end - address,
            stream: range.stream,
            class: range.class,
            pool: range.pool,
            expandable: range.expandable,
            blocks: Vec::new(),
        };
        let slack = range.class == SizeClass::Large && !range.expandable && !cutting.expandable;
        let inside: Vec<(StartBlock, Option<usize>)> = live.range(address..range.end).map(|(_, block)| *block).collect();
        // Where segments overlap, a block is inside more than once.
        outside = outside.saturating_sub(inside.len());
        let mut at = address;
        for (position, (block, freed)) in inside.iter().enumerate() {
            if block.address < at {
                state.notes.push(format!("the block at {:#x} begins inside the one before it", block.address));
                continue;
            }
            if block.address > at {
                segment.blocks.push(free(at, block.address - at));
            }
            let next = inside.get(position + 1).map_or(range.end, |(next, _)| next.address);
            let mut block = *block;
            if block.size > next - block.address {
                state.notes.push(format!("the block at {:#x} is larger than the room for it", block.address));
                block.size = next - block.address;
            }
            if let Some(freed) = freed
                && slack
            {
                let end = block.address + block.size;
                let gap = next - end;
                if gap <= MIB {
                    block.size += gap;
                } else if let Some((&address, _)) = born.range(end..=end + MIB).find(|(_, index)| **index < *freed) {
                    block.size += address - end;
                } else if gap > MIB + 512 {
                    let rest = rests.get(&block.address).copied().unwrap_or(0).min(MIB);
                    block.size += rest;
                    state.open.push(OpenEnd { block: block.address, free: end + rest, end: next, rest, freed: *freed });
                }
            }
            at = block.address + block.size;
            segment.blocks.push(block);
        }
        if at < range.end {
            segment.blocks.push(free(at, range.end - at));
        }
        state.segments.push(segment);
    }
    let mut reserved = state.reserved();
    for entry in trace {
        match entry.action {
            Action::SegmentAlloc | Action::SegmentMap => reserved = reserved.saturating_add(entry.size),
            Action::SegmentFree | Action::SegmentUnmap => reserved = reserved.saturating_sub(entry.size),
            Action::Oom => {
                state.total = Some(reserved.saturating_add(entry.addr)).filter(|total| *total > 0);
                break;
            }
            _ => {}
        }
    }
    if outside > 0 {
        state.notes.push(format!("{outside} blocks that were live at the beginning lie in no segment"));
    }
    state
}

fn free(address: u64, size: u64) -> StartBlock {
    StartBlock { address, size, requested: 0, state: BlockState::Inactive, stack: StackId::EMPTY }
}

/// Undoes the segment events, newest first.
fn walk_back(snapshot: &Snapshot, trace: &[TraceEntry], ranges: &mut BTreeMap<u64, Range>, state: &mut StartState) {
    let mut unmatched = 0;
    let mut unknown_pools = 0;
    for (index, entry) in trace.iter().enumerate().rev() {
        let Some(end) = entry.addr.checked_add(entry.size).filter(|_| entry.size > 0) else { continue };
        match entry.action {
            Action::SegmentAlloc => match ranges.get(&entry.addr) {
                Some(range) if range.end == end && !range.expandable => {
                    if range.pool != (0, 0) {
                        state.event_pools.insert(index, range.pool);
                    }
                    ranges.remove(&entry.addr);
                }
                _ => unmatched += 1,
            },
            Action::SegmentFree => {
                let class = if entry.size == 2 * MIB { SizeClass::Small } else { SizeClass::Large };
                let pool = snapshot.pool_of(entry).unwrap_or_else(|| {
                    unknown_pools += usize::from(state.private_pools);
                    (0, 0)
                });
                ranges.insert(entry.addr, Range { end, stream: entry.stream, class, pool, expandable: false });
            }
            Action::SegmentMap => {
                let before = ranges.range(..=entry.addr).next_back().map(|(start, range)| (*start, *range));
                match before {
                    Some((start, range)) if range.expandable && end <= range.end => {
                        if range.pool != (0, 0) {
                            state.event_pools.insert(index, range.pool);
                        }
                        ranges.remove(&start);
                        if start < entry.addr {
                            ranges.insert(start, Range { end: entry.addr, ..range });
                        }
                        if end < range.end {
                            ranges.insert(end, range);
                        }
                    }
                    _ => unmatched += 1,
                }
            }
            Action::SegmentUnmap => {
                let pool = snapshot.pool_of(entry);
                let before = ranges
                    .range(..entry.addr)
                    .next_back()
                    .map(|(start, range)| (*start, *range))
                    .filter(|(_, range)| range.end == entry.addr);
                let after = ranges.get(&end).copied();
                let near = before.map(|(_, range)| range).or(after).filter(|range| range.expandable && range.stream == entry.stream);
                let class = near.map_or_else(|| unmapped_class(trace, index), |range| range.class);
                let pool = pool.or(near.map(|range| range.pool)).unwrap_or((0, 0));
                let mut joined = Range { end, stream: entry.stream, class, pool, expandable: true };
                let same = |range: &Range| range.expandable && range.stream == joined.stream && range.class == class && range.pool == pool;
                let mut start = entry.addr;
                if let Some((at, range)) = before
                    && same(&range)
                {
                    ranges.remove(&at);
                    start = at;
                }
                if let Some(range) = after
                    && same(&range)
                {
                    ranges.remove(&end);
                    joined.end = range.end;
                }
                ranges.insert(start, joined);
            }
            _ => {}
        }
    }
    if unmatched > 0 {
        state.notes.push(format!("{unmatched} segment events do not fit the segments at the end"));
    }
    if unknown_pools > 0 {
        state.notes.push(format!("the pool of {unknown_pools} freed segments is not recorded: taken for the default pool"));
    }
}

/// The size class of an unmapped range that has no mapped neighbour: small pages are mapped 2 MiB at a time, so a range in which
/// the trace maps or unmaps anything that is no multiple of 2 MiB pages alone, or allocates more than 1 MiB, is large.
fn unmapped_class(trace: &[TraceEntry], index: usize) -> SizeClass {
    let (start, end) = (trace[index].addr, trace[index].addr + trace[index].size);
    let inside = |entry: &&TraceEntry| (start..end).contains(&entry.addr);
    for entry in trace[..index].iter().rev().filter(inside) {
        match entry.action {
            Action::Alloc | Action::FreeRequested | Action::FreeCompleted => {
                return if entry.size <= MIB { SizeClass::Small } else { SizeClass::Large };
            }
            Action::SegmentMap if entry.size > 2 * MIB => return SizeClass::Large,
            _ => {}
        }
    }
    if trace[index].size.is_multiple_of(20 * MIB) { SizeClass::Large } else { SizeClass::Small }
}
