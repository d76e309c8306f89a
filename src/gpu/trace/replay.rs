//! Feeding a recording through the caching allocator, and telling how exactly it comes out.
//!
//! Only what the program asked for is an input: sizes, streams, pools, frees, the points at which memory was given back, and the
//! addresses that the driver returned. Which block serves a request, when a segment is taken and how large it is, which segments
//! go back and in which order are the allocator's own decisions, and each is compared with the recording. An address counts as
//! exact only if the allocator chose it. After a difference the replay goes on: the recorded address is from then on a name for
//! the block that the allocator chose instead.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use serde::Serialize;

use super::drive::{Calls, Event, Recorded, Told};
use super::model::{Action, BlockState, Names, Origin, PoolId, SizeClass, Snapshot, StackId, TraceEntry};
use super::start::StartState;
use crate::gpu::alloc::{self, AllocConfig, AllocError, BlockSeed, DeviceAllocator, Policy, SegmentSeed, StreamFilter};
use crate::gpu::driver::StreamId;

/// Marks a tag that holds a stack id instead of an event index.
const START_TAG: u64 = 1 << 63;

/// Hash of an address: one multiplication.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }
    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value ^ (value >> 9)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

/// A map by address.
pub(crate) type AddressMap<T> = HashMap<u64, T, BuildHasherDefault<AddressHasher>>;

/// The start of a recording as the allocator takes it. Tags of live blocks are made by [`start_tag`].
pub(crate) fn seeds(start: &StartState) -> Vec<SegmentSeed> {
    start
        .segments
        .iter()
        .map(|segment| SegmentSeed {
            address: segment.address,
            size: segment.size,
            stream: StreamId(segment.stream),
            small: segment.class == SizeClass::Small,
            expandable: segment.expandable,
            pool: alloc::PoolId(segment.pool.0, segment.pool.1),
            blocks: segment
                .blocks
                .iter()
                .map(|block| BlockSeed {
                    address: block.address,
                    size: block.size,
                    requested: block.requested,
                    state: match block.state {
                        BlockState::ActiveAllocated => alloc::BlockState::Allocated,
                        BlockState::ActivePendingFree => alloc::BlockState::PendingFree,
                        BlockState::Inactive => alloc::BlockState::Free,
                    },
                    tag: start_tag(block.stack),
                })
                .collect(),
        })
        .collect()
}

pub(crate) fn start_tag(stack: StackId) -> u64 {
    START_TAG | u64::from(stack.0)
}

/// The stack that a tag stands for: of an event of `trace`, or of a block from the beginning.
pub(crate) fn tag_stack(tag: u64, trace: &[TraceEntry]) -> StackId {
    if tag & START_TAG != 0 {
        StackId((tag & !START_TAG) as u32)
    } else {
        trace.get(tag as usize).map_or(StackId::EMPTY, |entry| entry.stack)
    }
}

/// How exactly the allocator reproduces a recording. Counts.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Fidelity {
    /// Recorded allocations.
    pub addresses: u64,
    /// Those for which the allocator chose the recorded address.
    pub addresses_exact: u64,
    /// Recorded `segment_alloc`.
    pub segment_allocs: u64,
    /// Those that the allocator asked for, of the recorded size, while serving the recorded request.
    pub segment_allocs_exact: u64,
    /// Recorded `segment_free`.
    pub segment_frees: u64,
    /// Those that the allocator gave back at the recorded release point, in the recorded order.
    pub segment_frees_exact: u64,
    /// Those that it gave back at the recorded release point, in any order.
    pub segment_frees_in_set: u64,
    /// Recorded `segment_map` (expandable segments).
    pub segment_maps: u64,
    /// Those of the recorded address and size.
    pub segment_maps_exact: u64,
    /// Recorded `segment_unmap`.
    pub segment_unmaps: u64,
    /// Those of the recorded address and size.
    pub segment_unmaps_exact: u64,
    /// Recorded requests that ran out of memory.
    pub ooms: u64,
    /// Those that run out in the model too, after giving back what the recording gave back.
    pub ooms_exact: u64,
    /// Driver calls of the allocator that the recording does not have at that point.
    pub extra_driver_calls: u64,
    /// Frees of addresses that were not live: a sign of a damaged recording.
    pub unknown_frees: u64,
    /// Blocks of the segments at the end of the recording.
    pub final_blocks: u64,
    /// Those that the allocator ends with: same address, size, state and stream.
    pub final_blocks_exact: u64,
    /// Kinds of contradictions within the file's segments (`check::contradictions`).
    pub contradictions: u64,
    /// The first difference, in words.
    pub first_difference: Option<Difference>,
}

impl Fidelity {
    /// Whether every decision came out as recorded.
    pub fn is_exact(&self) -> bool {
        self.decisions_exact() == self.decisions() && self.extra_driver_calls == 0 && self.unknown_frees == 0 && self.contradictions == 0
    }

    /// Number of decisions that can be compared (blocks at the end are a consequence, not a decision).
    pub fn decisions(&self) -> u64 {
        self.addresses + self.segment_allocs + self.segment_frees + self.segment_maps + self.segment_unmaps + self.ooms
    }

    fn decisions_exact(&self) -> u64 {
        self.addresses_exact
            + self.segment_allocs_exact
            + self.segment_frees_exact
            + self.segment_maps_exact
            + self.segment_unmaps_exact
            + self.ooms_exact
    }
}

/// A point at which the allocator and the recording part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Index of the event in the device's trace.
    pub event: u64,
    /// What the event is.
    pub action: Action,
    /// The address that the model chose, where the difference is an address.
    pub model_address: Option<u64>,
    /// In words.
    pub what: String,
}

/// A highest value and when it was first reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Peak {
    /// Bytes.
    pub bytes: u64,
    /// Index of the event that reached it; `None`: it was so at the beginning.
    pub event: Option<u64>,
    /// Time of that event in microseconds since the epoch, where recorded.
    pub time_us: Option<i64>,
}

impl Peak {
    #[inline]
    fn reach(&mut self, bytes: u64, event: u64, entry: &TraceEntry) {
        if bytes > self.bytes {
            *self = Peak { bytes, event: Some(event), time_us: entry.time() };
        }
    }
}

/// Highest values of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Peaks {
    /// Taken from the driver.
    pub reserved: Peak,
    /// Handed out.
    pub allocated: Peak,
    /// Handed out, or freed but still in use by another stream.
    pub active: Peak,
    /// What was asked for, before rounding.
    pub requested: Peak,
}

/// Why the replayer is fed with a release point.
enum Release {
    /// The program emptied the cache.
    Explicit,
    /// A request ran out of memory, or collected garbage, and gave memory back on its own.
    Inside,
}

/// Replays one device's events as they come. Memory is proportional to the live blocks, whatever the length of the recording.
pub struct Replayer<'a> {
    allocator: DeviceAllocator<Recorded>,
    names: Option<&'a Names>,
    ranges: PoolRanges,
    fidelity: Fidelity,
    peaks: Peaks,
    index: u64,
    /// Driver events since the last other event, with their stack.
    queue: Vec<(Event, StackId)>,
    /// An address whose free was requested by the event just before.
    requested: Option<u64>,
    /// Recorded addresses that stand for another block of the allocator.
    moved: AddressMap<u64>,
    ooms: u64,
    releases: u64,
    retries: u64,
    recorded_reserved: u64,
    recorded_peak: Peak,
}

impl<'a> Replayer<'a> {
    /// A replayer that begins with `start`, under `policy` and `config`.
    ///
    /// # Errors
    /// The state at the beginning is impossible.
    pub fn new(snapshot: Option<&'a Snapshot>, start: &StartState, policy: Policy, config: AllocConfig) -> Result<Self, AllocError> {
        let total = start.total.unwrap_or_else(|| start.reserved().saturating_mul(2).max(256 << 30));
        let mut allocator = DeviceAllocator::new(Recorded::new(total), policy, config);
        if !start.segments.is_empty() {
            allocator.restore(&seeds(start))?;
            allocator.driver().adopt(start.segments.iter().map(|segment| (segment.address, segment.size)));
        }
        let now = allocator.usage();
        let at_start = |bytes| Peak { bytes, event: None, time_us: None };
        let peaks = Peaks {
            reserved: at_start(now.reserved),
            allocated: at_start(now.allocated),
            active: at_start(now.active),
            requested: at_start(now.requested),
        };
        Ok(Replayer {
            allocator,
            names: snapshot.map(|snapshot| &snapshot.names),
            ranges: snapshot.map_or_else(PoolRanges::none, |snapshot| PoolRanges::new(snapshot, start)),
            fidelity: Fidelity::default(),
            peaks,
            index: 0,
            queue: Vec::new(),
            requested: None,
            moved: AddressMap::default(),
            ooms: 0,
            releases: 0,
            retries: 0,
            recorded_reserved: start.reserved(),
            recorded_peak: at_start(start.reserved()),
        })
    }

    /// The next event.
    #[inline]
    pub fn feed(&mut self, entry: &TraceEntry) {
        match entry.action {
            Action::FreeRequested => {
                self.before(entry);
                self.requested = Some(entry.addr);
            }
            Action::FreeCompleted => {
                if !self.queue.is_empty() {
                    self.settle(Some(entry));
                }
                if self.requested == Some(entry.addr) {
                    self.requested = None;
                    let address = self.resolve(entry.addr);
                    if self.allocator.free(address).is_err() {
                        self.unknown_free(entry);
                    }
                } else {
                    self.before(entry);
                    self.complete(entry);
                }
            }
            Action::Alloc => {
                self.flush_request(entry);
                if self.queue.is_empty() && !self.ranges.matter() {
                    self.alloc(entry, (0, 0));
                } else {
                    self.settle(Some(entry));
                    let pool = self.ranges.pool_of(entry);
                    self.alloc(entry, pool);
                }
            }
            Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap => self.segment_event(entry),
            Action::Oom => self.fail(entry),
            Action::Snapshot | Action::Annotate | Action::Other => self.before(entry),
        }
        self.index += 1;
    }

    /// A request that ran out of memory. The entry tells the size of the block (PyTorch: `params.size()`), so the request can be
    /// made again, on a driver that has nothing left.
    #[cold]
    fn fail(&mut self, entry: &TraceEntry) {
        self.flush_request(entry);
        self.ooms += 1;
        self.fidelity.ooms += 1;
        let queue = std::mem::take(&mut self.queue);
        if entry.size == 0 {
            // Without a size only what went back can be followed.
            self.queue = queue;
            self.settle(Some(entry));
            return;
        }
        self.allocator.driver().load(queue.iter().map(|(event, _)| *event), true);
        let pool = self.ranges.pools.get(entry.pool as usize).copied().unwrap_or((0, 0));
        match malloc_in(&mut self.allocator, pool, entry.size, entry.stream, self.index) {
            Ok(made) => {
                let _ = self.allocator.free(made.address);
                self.differ(entry.action, format!("the model serves the request of {} bytes that failed", entry.size));
            }
            Err(AllocError::OutOfMemory(_)) => self.fidelity.ooms_exact += 1,
            Err(error) => self.differ(entry.action, error.to_string()),
        }
        self.after_driver(entry.action);
        let left = self.allocator.driver().unload();
        if let Some(event) = left.first() {
            self.differ(entry.action, format!("the model left out what the recording did with {} bytes at {:#x}", event.size, event.addr));
        }
    }

    #[inline]
    fn before(&mut self, entry: &TraceEntry) {
        self.flush_request(entry);
        if !self.queue.is_empty() {
            self.settle(Some(entry));
        }
    }

    #[inline]
    fn resolve(&mut self, address: u64) -> u64 {
        if self.moved.is_empty() { address } else { self.moved.remove(&address).unwrap_or(address) }
    }

    /// A free that was requested and did not complete at once: the block is pending from here on.
    #[inline]
    fn flush_request(&mut self, entry: &TraceEntry) {
        if let Some(recorded) = self.requested.take() {
            let address = self.moved.get(&recorded).copied().unwrap_or(recorded);
            if self.allocator.begin_free(address).is_err() {
                self.unknown_free(entry);
            }
        }
    }

    #[cold]
    fn complete(&mut self, entry: &TraceEntry) {
        let address = self.resolve(entry.addr);
        // Without a request in the recording (it may have been overwritten) a completed free is a whole one.
        if self.allocator.finish_free(address).is_err() && self.allocator.free(address).is_err() {
            self.unknown_free(entry);
        }
    }

    #[cold]
    fn unknown_free(&mut self, entry: &TraceEntry) {
        self.fidelity.unknown_frees += 1;
        self.differ(entry.action, format!("{:#x} is not live in the model", entry.addr));
    }

    #[cold]
    fn differ(&mut self, action: Action, what: String) {
        if self.fidelity.first_difference.is_none() {
            self.fidelity.first_difference = Some(Difference { event: self.index, action, model_address: None, what });
        }
    }

    #[inline]
    fn alloc(&mut self, entry: &TraceEntry, pool: PoolId) {
        self.fidelity.addresses += 1;
        let tag = self.index;
        let made = if pool == (0, 0) {
            self.allocator.malloc_tagged(entry.size, StreamId(entry.stream), tag)
        } else {
            malloc_in(&mut self.allocator, pool, entry.size, entry.stream, tag)
        };
        let made = match made {
            Ok(made) => made,
            Err(error) => {
                let Some(made) = self.alloc_anyway(entry, pool, &error) else { return };
                made
            }
        };
        if made.address == entry.addr {
            self.fidelity.addresses_exact += 1;
            if !self.moved.is_empty() {
                self.moved.remove(&entry.addr);
            }
        } else {
            self.moved.insert(entry.addr, made.address);
            if self.fidelity.first_difference.is_none() {
                self.differ(entry.action, format!("the model chose {:#x}, the recording has {:#x}", made.address, entry.addr));
                if let Some(difference) = &mut self.fidelity.first_difference {
                    difference.model_address = Some(made.address);
                }
            }
        }
        let now = self.allocator.usage();
        self.peaks.allocated.reach(now.allocated, self.index, entry);
        self.peaks.active.reach(now.active, self.index, entry);
        self.peaks.requested.reach(now.requested, self.index, entry);
        self.peaks.reserved.reach(now.reserved, self.index, entry);
        if made.taken > 0 || self.allocator.driver().calls().extra > self.fidelity.extra_driver_calls {
            self.after_driver(entry.action);
        }
    }

    /// The recording shows memory going back while this request was served, and the model found nothing to give back.
    #[cold]
    fn alloc_anyway(&mut self, entry: &TraceEntry, pool: PoolId, error: &AllocError) -> Option<alloc::Allocation> {
        self.differ(entry.action, format!("the model cannot serve the request: {error}"));
        self.allocator.driver().unload();
        self.fidelity.extra_driver_calls += 1;
        malloc_in(&mut self.allocator, pool, entry.size, entry.stream, self.index).ok()
    }

    #[cold]
    fn after_driver(&mut self, action: Action) {
        if let Some(what) = self.allocator.driver().take_difference() {
            self.differ(action, what);
        }
    }

    #[cold]
    fn segment_event(&mut self, entry: &TraceEntry) {
        self.flush_request(entry);
        let told = match entry.action {
            Action::SegmentAlloc => {
                self.fidelity.segment_allocs += 1;
                Told::Alloc
            }
            Action::SegmentFree => {
                self.fidelity.segment_frees += 1;
                Told::Free
            }
            Action::SegmentMap => {
                self.fidelity.segment_maps += 1;
                Told::Map
            }
            _ => {
                self.fidelity.segment_unmaps += 1;
                Told::Unmap
            }
        };
        match told {
            Told::Alloc | Told::Map => {
                self.recorded_reserved = self.recorded_reserved.saturating_add(entry.size);
                self.recorded_peak.reach(self.recorded_reserved, self.index, entry);
            }
            Told::Free | Told::Unmap => self.recorded_reserved = self.recorded_reserved.saturating_sub(entry.size),
        }
        self.queue.push((Event { told, addr: entry.addr, size: entry.size }, entry.stack));
        if matches!(told, Told::Alloc | Told::Map) {
            self.ranges.taken(self.index as usize, entry);
        }
    }

    /// Lets the allocator do what the driver events since the last other event tell, up to the ones that belong to `next`.
    #[cold]
    fn settle(&mut self, next: Option<&TraceEntry>) {
        if self.queue.is_empty() {
            return;
        }
        let action = next.map_or(Action::Snapshot, |entry| entry.action);
        let leading = self.queue.iter().take_while(|(event, _)| matches!(event.told, Told::Free | Told::Unmap)).count();
        let mut queue = std::mem::take(&mut self.queue);
        if leading > 0 {
            match self.release_kind(&queue, leading, next) {
                Release::Explicit => {
                    self.releases += 1;
                    let burst: Vec<Event> = queue.drain(..leading).map(|(event, _)| event).collect();
                    self.let_pools_go(&burst);
                    self.allocator.driver().load(burst, false);
                    if let Err(error) = self.allocator.empty_cache() {
                        self.differ(action, format!("the model cannot empty its cache: {error}"));
                    }
                    self.after_driver(action);
                    let left = self.allocator.driver().unload();
                    if let Some(event) = left.first() {
                        self.differ(
                            action,
                            format!("the recording gave {} bytes at {:#x} back, the model kept them", event.size, event.addr),
                        );
                    }
                }
                Release::Inside => self.retries += 1,
            }
        }
        let rest: Vec<Event> = queue.drain(..).map(|(event, _)| event).collect();
        if next.is_some_and(|entry| entry.action == Action::Alloc) {
            self.allocator.driver().load(rest, false);
        } else if let Some(event) = rest.last() {
            self.differ(action, format!("the recording took {} bytes at {:#x} without serving a request", event.size, event.addr));
        }
        // Keeps its room for the next burst.
        self.queue = queue;
    }

    /// Whether the program emptied the cache, or the request that follows did: then both have the same Python stack.
    fn release_kind(&self, queue: &[(Event, StackId)], leading: usize, next: Option<&TraceEntry>) -> Release {
        let Some(next) = next.filter(|next| next.action == Action::Alloc && queue.len() > leading) else { return Release::Explicit };
        match released_inside(self.names, queue[0].1, next.stack) {
            Some(true) => Release::Inside,
            Some(false) => Release::Explicit,
            // Without stacks: whoever empties the cache gives back everything that is wholly free.
            None if self.allocator.config() == &AllocConfig::default() => Release::Explicit,
            None => {
                let burst: AddressMap<usize> = queue[..leading].iter().enumerate().map(|(at, (event, _))| (event.addr, at)).collect();
                let whole = |segment: &alloc::SegmentInfo| {
                    let mut blocks = self.allocator.blocks_of(segment.id);
                    !segment.expandable && blocks.all(|block| block.state == alloc::BlockState::Free)
                };
                // And in the order of the cache: large pool first, then by stream and size.
                let mut all = true;
                let mut order = Vec::new();
                for segment in self.allocator.segments().filter(whole) {
                    match burst.get(&segment.address) {
                        Some(at) => order.push((*at, (segment.small, segment.stream, segment.size))),
                        None => all = false,
                    }
                }
                order.sort_unstable();
                let sorted = order.is_sorted_by_key(|(_, key)| *key);
                if all && sorted { Release::Explicit } else { Release::Inside }
            }
        }
    }

    /// A private pool whose segments go back has no users any more.
    fn let_pools_go(&mut self, burst: &[Event]) {
        if !self.ranges.matter() {
            return;
        }
        for event in burst {
            let pool = self.ranges.at(event.addr);
            if pool != (0, 0) {
                let_go(&mut self.allocator, pool);
            }
        }
    }

    /// Events so far.
    pub fn events(&self) -> u64 {
        self.index
    }

    /// The allocator as it is. Tags of blocks are event indexes, or stand for the beginning.
    pub(crate) fn allocator(&self) -> &DeviceAllocator<Recorded> {
        &self.allocator
    }

    /// Ends the recording.
    pub fn finish(mut self) -> Outcome {
        if let Some(recorded) = self.requested.take() {
            let address = self.moved.get(&recorded).copied().unwrap_or(recorded);
            if self.allocator.begin_free(address).is_err() {
                self.fidelity.unknown_frees += 1;
            }
        }
        self.settle(None);
        self.after_driver(Action::Snapshot);
        let Calls { allocs, frees, frees_in_order, maps, unmaps, extra } = self.allocator.driver().calls();
        let stats = self.allocator.stats();
        let current = Totals {
            reserved: stats.reserved_bytes.all.current,
            allocated: stats.allocated_bytes.all.current,
            active: stats.active_bytes.all.current,
            requested: stats.requested_bytes.all.current,
            inactive_split: stats.inactive_split_bytes.all.current,
        };
        let blocks = self
            .allocator
            .segments()
            .flat_map(|segment| self.allocator.blocks_of(segment.id))
            .filter(|block| block.state != alloc::BlockState::Unmapped)
            .map(|block| (block.address, (block.size, block.state, block.stream.0)))
            .collect();
        let fidelity = Fidelity {
            segment_allocs_exact: allocs,
            segment_frees_exact: frees_in_order,
            segment_frees_in_set: frees,
            segment_maps_exact: maps,
            segment_unmaps_exact: unmaps,
            extra_driver_calls: self.fidelity.extra_driver_calls + extra,
            ..self.fidelity
        };
        Outcome {
            fidelity,
            peaks: self.peaks,
            end: current,
            events: self.index,
            ooms: self.ooms,
            releases: self.releases,
            retries: self.retries,
            recorded_reserved_peak: self.recorded_peak,
            blocks,
        }
    }
}

/// Whether memory that went back with stack `burst`, just before a request with stack `request` took a segment, went back inside
/// that request: then both have the same Python frames. `None`: neither has a stack.
pub(crate) fn released_inside(names: Option<&Names>, burst: StackId, request: StackId) -> Option<bool> {
    if burst.is_empty() && request.is_empty() {
        return None;
    }
    let same = burst == request
        || names.is_some_and(|names| {
            let python = |stack| names.stack(stack).iter().filter(|frame| names.origin(**frame) != Origin::Native);
            python(burst).next().is_some() && python(burst).eq(python(request))
        });
    Some(same)
}

/// Which pool a request goes to, told by the entry or by the segment its address lies in.
pub(crate) struct PoolRanges {
    pools: Vec<PoolId>,
    event_pools: HashMap<usize, PoolId>,
    /// Recorded segments by address (end, pool); only while private pools matter.
    ranges: Option<BTreeMap<u64, (u64, PoolId)>>,
}

impl PoolRanges {
    pub fn new(snapshot: &Snapshot, start: &StartState) -> Self {
        PoolRanges {
            pools: snapshot.pools.iter().copied().collect(),
            event_pools: start.event_pools.clone(),
            ranges: start
                .private_pools
                .then(|| start.segments.iter().map(|segment| (segment.address, (segment.address + segment.size, segment.pool))).collect()),
        }
    }

    fn none() -> Self {
        PoolRanges { pools: Vec::new(), event_pools: HashMap::new(), ranges: None }
    }

    #[inline]
    fn matter(&self) -> bool {
        self.ranges.is_some()
    }

    /// The driver gave memory at event `index`.
    pub fn taken(&mut self, index: usize, entry: &TraceEntry) {
        if let Some(ranges) = &mut self.ranges {
            let pool = self.pools.get(entry.pool as usize).or_else(|| self.event_pools.get(&index)).copied().unwrap_or((0, 0));
            ranges.insert(entry.addr, (entry.addr.saturating_add(entry.size), pool));
        }
    }

    /// The pool of the segment around an address.
    pub fn at(&self, address: u64) -> PoolId {
        match self.ranges.as_ref().and_then(|ranges| ranges.range(..=address).next_back()) {
            Some((_, (end, pool))) if address < *end => *pool,
            _ => (0, 0),
        }
    }

    /// The pool that a request went to.
    pub fn pool_of(&self, entry: &TraceEntry) -> PoolId {
        if self.ranges.is_none() { (0, 0) } else { self.pools.get(entry.pool as usize).copied().unwrap_or_else(|| self.at(entry.addr)) }
    }
}

/// Takes all users of a private pool away.
pub(crate) fn let_go<D: crate::gpu::driver::Driver>(allocator: &mut DeviceAllocator<D>, pool: PoolId) {
    let pool = alloc::PoolId(pool.0, pool.1);
    while allocator.pool_users(pool).is_ok_and(|users| users > 0) {
        if allocator.release_pool(pool).is_err() {
            break;
        }
    }
}

/// A request that goes to a private pool.
pub(crate) fn malloc_in<D: crate::gpu::driver::Driver>(
    allocator: &mut DeviceAllocator<D>,
    pool: PoolId,
    size: u64,
    stream: u64,
    tag: u64,
) -> Result<alloc::Allocation, AllocError> {
    if pool == (0, 0) {
        return allocator.malloc_tagged(size, StreamId(stream), tag);
    }
    let pool = alloc::PoolId(pool.0, pool.1);
    let known = allocator.pool_users(pool).is_ok_and(|users| users > 0);
    allocator.begin_allocate(pool, StreamFilter::All, false)?;
    let made = allocator.malloc_tagged(size, StreamId(stream), tag);
    allocator.end_allocate(pool)?;
    if known {
        allocator.release_pool(pool)?;
    }
    made
}

/// Bytes at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Totals {
    /// Taken from the driver.
    pub reserved: u64,
    /// Handed out.
    pub allocated: u64,
    /// Handed out, or freed but still in use by another stream.
    pub active: u64,
    /// What was asked for, before rounding.
    pub requested: u64,
    /// Free, but in a segment where something lives, so that it cannot go back.
    pub inactive_split: u64,
}

/// What a replay came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// How exactly the recording came out; `final_blocks*` are filled by [`Outcome::compare_end`].
    pub fidelity: Fidelity,
    /// Highest values.
    pub peaks: Peaks,
    /// Values at the end.
    pub end: Totals,
    /// Events fed.
    pub events: u64,
    /// Recorded out-of-memory events.
    pub ooms: u64,
    /// Release points that the program made.
    pub releases: u64,
    /// Requests that gave memory back on their own.
    pub retries: u64,
    /// Peak of reserved bytes as the recorded segment events alone tell it.
    pub recorded_reserved_peak: Peak,
    blocks: HashMap<u64, (u64, alloc::BlockState, u64)>,
}

impl Outcome {
    /// Compares the blocks at the end with those of the snapshot.
    pub fn compare_end(&mut self, snapshot: &Snapshot, device: u32) {
        let (mut all, mut exact) = (0, 0);
        for segment in snapshot.segments_of(device) {
            for block in &segment.blocks {
                let state = match block.state {
                    BlockState::ActiveAllocated => alloc::BlockState::Allocated,
                    BlockState::ActivePendingFree => alloc::BlockState::PendingFree,
                    BlockState::Inactive => alloc::BlockState::Free,
                };
                all += 1;
                exact += u64::from(self.blocks.get(&block.address) == Some(&(block.size, state, segment.stream)));
            }
        }
        self.fidelity.final_blocks = all;
        self.fidelity.final_blocks_exact = exact;
    }
}

/// Feeds a whole trace of `snapshot` through the allocator.
///
/// # Errors
/// The state at the beginning is impossible.
pub fn run(snapshot: &Snapshot, device: u32, start: &StartState, policy: Policy, config: &AllocConfig) -> Result<Outcome, AllocError> {
    let mut replayer = Replayer::new(Some(snapshot), start, policy, config.clone())?;
    for entry in snapshot.trace(device) {
        replayer.feed(entry);
    }
    let mut outcome = replayer.finish();
    outcome.compare_end(snapshot, device);
    Ok(outcome)
}

#[cfg(test)]
mod synthetic;
#[cfg(test)]
mod tests;
