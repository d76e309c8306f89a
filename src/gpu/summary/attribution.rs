//! Every reserved byte of a device gets exactly one cause.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Serialize;

use crate::gpu::alloc::sizes::{self, Divisions, LARGE_SEGMENT, REQUEST_LIMIT, ROUNDUP_INTERVALS, SMALL_BUFFER};
use crate::gpu::trace::frames::Holders;
use crate::gpu::trace::model::{BlockState, PoolId, Segment, Settings, SizeClass, StackId};

/// The rounding rules of the recorded process.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rounding {
    divisions: Divisions,
    /// Blocks of at least this size are never split; `None`: no limit.
    max_split_size: Option<u64>,
    /// Page of large expandable segments, bytes.
    large_page: u64,
}

impl Rounding {
    /// Takes the rules from a snapshot's settings; without settings the defaults apply.
    pub fn of(settings: Option<&Settings>) -> Self {
        let mut made = Rounding { large_page: LARGE_SEGMENT, ..Rounding::default() };
        if let Some(settings) = settings {
            for &(start, parts) in &settings.roundup_power2_divisions {
                let place = start.checked_ilog2().map_or(ROUNDUP_INTERVALS, |log| log as usize);
                let parts = u32::try_from(parts).ok().filter(|parts| *parts > 1 && parts.is_power_of_two());
                if let (Some(place), Some(parts)) = (made.divisions.get_mut(place), parts) {
                    *place = parts;
                }
            }
            made.max_split_size = settings.max_split_size;
            let page = settings
                .conf
                .split(',')
                .filter_map(|item| item.split_once(':'))
                .find(|(key, _)| key.trim() == "large_segment_size_mb")
                .and_then(|(_, value)| value.trim().parse::<u64>().ok());
            if let Some(page) = page.filter(|page| (1..1 << 20).contains(page)) {
                made.large_page = page << 20;
            }
        }
        made
    }

    /// The size of the block that a request of `n` bytes gets, before unsplit remainders (PyTorch's `round_size`).
    pub fn round(&self, n: u64) -> u64 {
        // No allocator grants as much as that; only a damaged file asks.
        if n >= REQUEST_LIMIT { n } else { sizes::round_size(n, &self.divisions) }
    }

    /// Whether a free block with `rest` bytes beyond a request of `size` in the large pool of an ordinary segment stays whole.
    pub fn stays_whole(&self, size: u64, rest: u64) -> bool {
        !sizes::large_splits(size, rest, self.max_split_size)
    }

    fn page(&self, class: SizeClass) -> u64 {
        match class {
            SizeClass::Small => SMALL_BUFFER,
            SizeClass::Large => self.large_page,
        }
    }
}

/// Bytes by cause. The fields sum to the reserved bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Split {
    /// Asked for by the program and handed out.
    pub allocated: u64,
    /// Handed-out blocks are multiples of 512 bytes (or of the configured divisions): what that added.
    pub rounding: u64,
    /// Handed-out blocks of the large pool that kept a remainder of at most 1 MiB (or that `max_split_size_mb` forbids to split).
    pub unsplit: u64,
    /// Freed by the program; an event of another stream has not been seen to complete (`active_pending_free`).
    pub pending: u64,
    /// Free, in a segment of which some other part is in use: the driver cannot have it back.
    pub pinned: u64,
    /// Free, in segments of private pools (CUDA graphs, `MemPool`): only that pool can use it.
    pub private_pools: u64,
    /// Whole segments that are free: `empty_cache` returns them.
    pub cached: u64,
    /// Whole free pages of expandable segments: `empty_cache` unmaps them.
    pub expandable_pages: u64,
    /// Free parts of pages of expandable segments that a block in the same page holds back.
    pub expandable_rest: u64,
    /// Bytes of segments that no block covers, or blocks beyond their segment: a damaged file.
    pub unexplained: u64,
}

impl Split {
    /// Key, explanation and bytes of every cause, in the order of the fields.
    pub fn parts(&self) -> [(&'static str, &'static str, u64); 10] {
        [
            ("allocated", "in use by tensors", self.allocated),
            ("rounding", "rounding of sizes", self.rounding),
            ("unsplit", "remainders too small to split off", self.unsplit),
            ("pending", "freed, waiting for another stream", self.pending),
            ("pinned", "free, but pinned by a block in the same segment", self.pinned),
            ("private_pools", "free, in private pools (CUDA graphs)", self.private_pools),
            ("cached", "cached: whole free segments", self.cached),
            ("expandable_pages", "cached: whole free pages of expandable segments", self.expandable_pages),
            ("expandable_rest", "free parts of expandable pages in use", self.expandable_rest),
            ("unexplained", "not explained by the file", self.unexplained),
        ]
    }

    /// All of it: the reserved bytes.
    pub fn total(&self) -> u64 {
        self.parts().iter().map(|(_, _, bytes)| bytes).sum()
    }

    /// Adds another split.
    pub fn add(&mut self, other: &Split) {
        self.allocated += other.allocated;
        self.rounding += other.rounding;
        self.unsplit += other.unsplit;
        self.pending += other.pending;
        self.pinned += other.pinned;
        self.private_pools += other.private_pools;
        self.cached += other.cached;
        self.expandable_pages += other.expandable_pages;
        self.expandable_rest += other.expandable_rest;
        self.unexplained += other.unexplained;
    }
}

/// Why a segment is where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fate {
    /// Nothing in it is in use: `empty_cache` returns it.
    Free,
    /// Nothing in it is in use, but it belongs to a private pool.
    PrivatePool,
    /// In use from end to end.
    Full,
    /// Partly in use: the free part is pinned.
    Pinned,
    /// Only blocks that wait for another stream are in it: `empty_cache` waits for them and returns it.
    Pending,
}

/// A block that keeps its segment from going back to the driver.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PinBlock {
    /// First address, hexadecimal.
    pub address: String,
    /// Bytes.
    pub size: u64,
    /// Bytes asked for.
    pub requested: u64,
    /// Its state.
    pub state: BlockState,
    /// The frame of the user's code that allocated it; `None` where no frames were recorded.
    pub allocated_at: Option<String>,
    /// Stack id within the snapshot, for callers that have it.
    #[serde(skip)]
    pub stack: StackId,
}

/// One segment and what pins it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SegmentReport {
    /// First address, hexadecimal.
    pub address: String,
    /// Bytes.
    pub size: u64,
    /// Size class of its pool.
    pub class: SizeClass,
    /// Stream (pointer value).
    pub stream: u64,
    /// Pool; (0, 0) is the default one.
    pub pool: PoolId,
    /// Part of an expandable segment.
    pub expandable: bool,
    /// Its fate.
    pub fate: Fate,
    /// By cause.
    pub split: Split,
    /// Bytes that `empty_cache` would return of it.
    pub releasable: u64,
    /// Number of blocks in use or waiting.
    pub live_blocks: usize,
    /// Bytes of blocks in use or waiting.
    pub live_bytes: u64,
    /// The blocks in use or waiting, the largest first, at most [`PIN_LIMIT`].
    pub pinned_by: Vec<PinBlock>,
}

/// How many blocks a [`SegmentReport`] lists.
pub const PIN_LIMIT: usize = 8;

/// Attributes one segment.
pub fn segment(segment: &Segment, rounding: &Rounding, frames: &mut Holders<'_>) -> SegmentReport {
    let mut split = Split::default();
    let private = segment.pool_id != (0, 0);
    let mut live: Vec<&crate::gpu::trace::model::Block> = Vec::new();
    let mut free: Vec<Range<u64>> = Vec::new();
    // What empty_cache could take: free ranges once the pending events are through.
    let mut open: Vec<Range<u64>> = Vec::new();
    let mut covered = 0u64;
    for block in &segment.blocks {
        // A block never counts beyond its segment, whatever the file says.
        let size = block.size.min(segment.total_size.saturating_sub(covered));
        let start = covered;
        covered += size;
        match block.state {
            BlockState::ActiveAllocated => {
                let asked = block.requested_size.min(size);
                let rounded = rounding.round(asked).clamp(asked, size.max(asked));
                // A file without requested sizes says 0: then nothing can be told apart.
                let (asked, rounded) = if block.requested_size == 0 { (size, size) } else { (asked, rounded) };
                split.allocated += asked;
                split.rounding += rounded - asked;
                split.unsplit += size - rounded;
                live.push(block);
            }
            BlockState::ActivePendingFree => {
                split.pending += size;
                live.push(block);
                push_range(&mut open, start..start + size);
            }
            BlockState::Inactive => {
                push_range(&mut free, start..start + size);
                push_range(&mut open, start..start + size);
            }
        }
    }
    split.unexplained += segment.total_size - covered;
    let in_use = live.iter().any(|block| block.state == BlockState::ActiveAllocated);
    let free_bytes: u64 = free.iter().map(|range| range.end - range.start).sum();
    let mut releasable = 0;
    if private {
        split.private_pools += free_bytes;
    } else if segment.expandable {
        let page = rounding.page(segment.class);
        for range in &free {
            let whole = whole_pages(range, page);
            split.expandable_pages += whole;
            split.expandable_rest += range.end - range.start - whole;
        }
        releasable = open.iter().map(|range| whole_pages(range, page)).sum();
    } else if live.is_empty() {
        split.cached += free_bytes;
        releasable = segment.total_size;
    } else {
        split.pinned += free_bytes;
        if !in_use {
            releasable = segment.total_size;
        }
    }
    let fate = match (private, live.is_empty(), in_use) {
        (true, true, _) => Fate::PrivatePool,
        (false, true, _) => Fate::Free,
        (_, false, false) => Fate::Pending,
        _ if free_bytes == 0 => Fate::Full,
        _ => Fate::Pinned,
    };
    live.sort_by_key(|block| (std::cmp::Reverse(block.size), block.address));
    let pinned_by = live
        .iter()
        .take(PIN_LIMIT)
        .map(|block| PinBlock {
            address: format!("{:#x}", block.address),
            size: block.size,
            requested: block.requested_size,
            state: block.state,
            allocated_at: frames.text(block.stack),
            stack: block.stack,
        })
        .collect();
    SegmentReport {
        address: format!("{:#x}", segment.address),
        size: segment.total_size,
        class: segment.class,
        stream: segment.stream,
        pool: segment.pool_id,
        expandable: segment.expandable,
        fate,
        split,
        releasable,
        live_blocks: live.len(),
        live_bytes: live.iter().map(|block| block.size).sum(),
        pinned_by,
    }
}

fn push_range(list: &mut Vec<Range<u64>>, range: Range<u64>) {
    match list.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ if range.is_empty() => {}
        _ => list.push(range),
    }
}

/// Bytes of the whole pages in `range`, whose offsets count from a page border.
fn whole_pages(range: &Range<u64>, page: u64) -> u64 {
    let first = range.start.div_ceil(page) * page;
    let last = range.end / page * page;
    last.saturating_sub(first)
}

/// A holder: all blocks that one frame of the user's code allocated.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Holder {
    /// `function (file:line)`; `None` gathers the blocks without frames.
    pub frame: Option<String>,
    /// Bytes of its blocks.
    pub bytes: u64,
    /// Number of its blocks.
    pub blocks: usize,
    /// Segments of which it holds every live block, with something free in them.
    pub segments_pinned_alone: usize,
    /// Bytes that are free in those: what dropping this holder would set free beside its own blocks.
    pub stranded_alone: u64,
    /// Bytes that are free in segments it pins together with others.
    pub stranded_shared: u64,
}

/// Gathers the live blocks of `segments` by frame, the largest holder first.
pub fn holders<'s>(segments: impl Iterator<Item = &'s Segment>, frames: &mut Holders<'_>) -> Vec<Holder> {
    let mut gathered: BTreeMap<Option<u32>, Holder> = BTreeMap::new();
    for segment in segments {
        let mut here: Vec<Option<u32>> = Vec::new();
        let mut free = 0;
        for block in &segment.blocks {
            if block.state == BlockState::Inactive {
                free += block.size;
                continue;
            }
            let key = frames.of(block.stack).map(|frame| frame.0);
            let holder = gathered.entry(key).or_insert_with(|| Holder {
                frame: frames.text(block.stack),
                bytes: 0,
                blocks: 0,
                segments_pinned_alone: 0,
                stranded_alone: 0,
                stranded_shared: 0,
            });
            holder.bytes += block.size;
            holder.blocks += 1;
            if !here.contains(&key) {
                here.push(key);
            }
        }
        if free == 0 || segment.expandable || segment.pool_id != (0, 0) {
            continue;
        }
        for key in &here {
            if let Some(holder) = gathered.get_mut(key) {
                if here.len() == 1 {
                    holder.segments_pinned_alone += 1;
                    holder.stranded_alone += free;
                } else {
                    holder.stranded_shared += free;
                }
            }
        }
    }
    let mut list: Vec<Holder> = gathered.into_values().collect();
    list.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.frame.cmp(&b.frame)));
    list
}
