//! The allocator itself, single-threaded.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::thread::ThreadId;

use super::block::{AddressTable, Block, BlockId, BlockState, NONE, SegmentId, Slab};
use super::config::{AllocConfig, Backend, Reserve};
use super::history::{Action, History, TraceEntry};
use super::oom::{AllocError, Attribution, Holder, OutOfMemory, Pinned, Step};
use super::policy::{Policy, TieBreak};
use super::pool::{Heap, Key, Pool};
use super::segment::expandable::Expandable;
use super::segment::{Segment, Segments};
use super::sizes::{MIN_BLOCK, REQUEST_LIMIT, SMALL_BUFFER, SMALL_SIZE, large_splits, round_size, round_up, segment_size};
use super::stats::{Counters, Stats};
use crate::gpu::driver::{Driver, DriverError, EventId, StreamId};

/// Names a pool, as PyTorch's `MempoolId_t`: (capture id, handle id). `(0, 0)` is the default pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, serde::Serialize, serde::Deserialize)]
pub struct PoolId(pub u64, pub u64);

impl PoolId {
    /// The default pool.
    pub const DEFAULT: PoolId = PoolId(0, 0);
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.0, self.1)
    }
}

/// How a private pool behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolOptions {
    /// Its free blocks serve as a last resort for requests outside it.
    pub use_on_oom: bool,
    /// Its blocks are never split.
    pub no_split: bool,
}

/// Which requests go to a pool that is being allocated to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamFilter {
    /// All.
    All,
    /// Those on one of these streams.
    Streams(Vec<StreamId>),
    /// Those of one thread, as `torch.cuda.use_mem_pool` does.
    Thread(ThreadId),
}

impl StreamFilter {
    fn matches(&self, stream: u64) -> bool {
        match self {
            StreamFilter::All => true,
            StreamFilter::Streams(streams) => streams.iter().any(|s| s.0 == stream),
            StreamFilter::Thread(thread) => *thread == std::thread::current().id(),
        }
    }
}

/// What a request got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// Device address; 0 for a request of 0 bytes.
    pub address: u64,
    /// Bytes of the block.
    pub size: u64,
    pub block: BlockId,
    pub segment: SegmentId,
    /// Bytes that were taken from the driver during this call; 0 for a hit.
    pub taken: u64,
    /// Address of what was taken (the segment, or the first mapped range).
    pub taken_address: u64,
    /// Whether the cache was emptied and the driver asked again.
    pub retried: bool,
}

impl Allocation {
    const NULL: Allocation =
        Allocation { address: 0, size: 0, block: BlockId(NONE), segment: SegmentId(NONE), taken: 0, taken_address: 0, retried: false };

    /// Whether this is the answer to a request of 0 bytes.
    pub fn is_null(&self) -> bool {
        self.address == 0
    }
}

/// Memory that went back to the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Released {
    pub address: u64,
    pub size: u64,
    pub stream: StreamId,
    pub small: bool,
    pub pool: PoolId,
    /// Unmapped pages of an expandable segment, instead of a whole driver allocation.
    pub expandable: bool,
}

/// Bytes now, over both pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Blocks handed out.
    pub allocated: u64,
    /// Those, and blocks that wait for other streams.
    pub active: u64,
    /// What was asked for, before rounding, of active blocks.
    pub requested: u64,
    /// Memory taken from the driver.
    pub reserved: u64,
}

/// A segment as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentInfo {
    pub id: SegmentId,
    pub address: u64,
    /// Bytes of the driver allocation, or of the address range.
    pub size: u64,
    /// Bytes of memory: `size`, or the mapped part of an expandable segment.
    pub mapped: u64,
    pub stream: StreamId,
    pub small: bool,
    pub pool: PoolId,
    pub expandable: bool,
    /// Tag of the request that made it.
    pub tag: u64,
}

/// A block as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockInfo {
    pub id: BlockId,
    pub segment: SegmentId,
    pub address: u64,
    pub size: u64,
    /// Bytes asked for; stale while free.
    pub requested: u64,
    pub state: BlockState,
    pub stream: StreamId,
    /// As given with the request; stale while free.
    pub tag: u64,
    pub small: bool,
    pub pool: PoolId,
}

/// A segment of a recorded state, for [`DeviceAllocator::restore`]. An expandable one is one contiguous mapped range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentSeed {
    pub address: u64,
    pub size: u64,
    pub stream: StreamId,
    pub small: bool,
    pub expandable: bool,
    pub pool: PoolId,
    /// In address order, without gaps, covering the segment.
    pub blocks: Vec<BlockSeed>,
}

/// A block of a recorded state. [`BlockState::Unmapped`] is not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSeed {
    pub address: u64,
    pub size: u64,
    /// Bytes asked for; ignored for free blocks.
    pub requested: u64,
    pub state: BlockState,
    pub tag: u64,
}

#[derive(Debug)]
struct PrivatePool {
    id: PoolId,
    users: u32,
    options: PoolOptions,
    /// Segments (driver allocations and address ranges) that belong to it.
    segments: u32,
    small: u32,
    large: u32,
    live: bool,
}

#[derive(Debug)]
struct Diversion {
    pool: PoolId,
    private: u32,
    filter: StreamFilter,
    graph: bool,
}

#[derive(Debug)]
struct StreamEvents {
    stream: u64,
    queue: VecDeque<(EventId, u32)>,
}

/// A use of a block on another stream.
#[derive(Debug, Clone, Copy)]
struct Use {
    stream: u64,
    /// Named during a capture: done by the time the capture ends.
    in_capture: bool,
}

type Pressure = Box<dyn FnMut(u64) -> Vec<u64> + Send>;

/// One device's allocator. See the [module](super) for what it follows.
///
/// Every method leaves the books right when it returns an error. Dropping the allocator gives everything back to the
/// driver, live blocks included.
pub struct DeviceAllocator<D: Driver> {
    driver: D,
    policy: Policy,
    config: AllocConfig,
    /// Total memory of the device.
    total: u64,
    device: u32,
    blocks: Slab,
    /// Allocated and pending blocks by address.
    table: AddressTable,
    pools: Vec<Pool>,
    /// Free and unmapped blocks by pool and stream.
    heaps: Vec<Heap>,
    privates: Vec<PrivatePool>,
    diversions: Vec<Diversion>,
    segments: Segments,
    stats: Counters,
    /// Limit set by a memory fraction.
    allowed: Option<u64>,
    /// Whether there is a limit and a garbage collection threshold.
    collecting: bool,
    /// Whether no divisions are set.
    plain_rounding: bool,
    /// Whether there has been a pool whose blocks are never split.
    some_unsplit: bool,
    events: Vec<StreamEvents>,
    /// Events in `events`.
    waiting: usize,
    spare_events: Vec<EventId>,
    scratch_events: Vec<(u64, EventId)>,
    uses: Vec<Vec<Use>>,
    spare_uses: Vec<u32>,
    /// Freed during a capture; their events are recorded after it.
    deferred: Vec<u32>,
    registrations: u64,
    next_pool: u64,
    history: Option<Box<History>>,
    pressure: Option<Pressure>,
    /// Requests served without caching.
    uncached: HashMap<u64, u64>,
    /// Expandable segments.
    ranges: u32,
    // What the present call took.
    taken: u64,
    taken_address: u64,
    retried: bool,
}

struct Request {
    requested: u64,
    size: u64,
    stream: u64,
    pool: u32,
    alloc_size: u64,
    expandable: bool,
    tag: u64,
}

const SMALL: u32 = 0;
const LARGE: u32 = 1;

impl<D: Driver> DeviceAllocator<D> {
    /// An empty allocator. Nothing is taken from the driver yet.
    pub fn new(driver: D, policy: Policy, config: AllocConfig) -> Self {
        let properties = driver.properties();
        let mut allocator = DeviceAllocator {
            driver,
            policy,
            total: properties.total_memory,
            device: properties.ordinal,
            blocks: Slab::default(),
            table: AddressTable::default(),
            pools: vec![Pool::new(true, NONE), Pool::new(false, NONE)],
            heaps: Vec::new(),
            collecting: false,
            plain_rounding: false,
            some_unsplit: false,
            privates: Vec::new(),
            diversions: Vec::new(),
            segments: Segments::default(),
            stats: Counters::default(),
            allowed: None,
            events: Vec::new(),
            waiting: 0,
            spare_events: Vec::new(),
            scratch_events: Vec::new(),
            uses: Vec::new(),
            spare_uses: Vec::new(),
            deferred: Vec::new(),
            registrations: 0,
            next_pool: 1,
            history: None,
            pressure: None,
            uncached: HashMap::new(),
            ranges: 0,
            taken: 0,
            taken_address: 0,
            retried: false,
            config: AllocConfig::default(),
        };
        allocator.set_config(config);
        allocator
    }

    /// The driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// The driver, mutably.
    pub fn driver_mut(&mut self) -> &mut D {
        &mut self.driver
    }

    /// The rules in force.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The settings in force.
    pub fn config(&self) -> &AllocConfig {
        &self.config
    }

    /// Changes the settings for what comes (`torch.cuda.memory._set_allocator_settings`). Memory held stays as it is.
    pub fn set_config(&mut self, config: AllocConfig) {
        self.allowed = self.limit(config.per_process_memory_fraction, config.per_process_memory_fraction < 1.0);
        self.stats.rest.max_split_size = config.max_split_size.map_or(-1, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
        self.config = config;
        self.settle_collecting();
        self.plain_rounding = self.config.roundup_power2_divisions.iter().all(|parts| *parts <= 1);
    }

    /// Limits this allocator to a fraction of the device (`torch.cuda.set_per_process_memory_fraction`).
    ///
    /// # Errors
    /// [`AllocError::Argument`] outside 0 to 1.
    pub fn set_memory_fraction(&mut self, fraction: f64) -> Result<(), AllocError> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(AllocError::Argument(format!("memory fraction {fraction} is outside 0 to 1")));
        }
        self.allowed = self.limit(fraction, fraction < 1.0 || self.policy.full_fraction_limits);
        self.settle_collecting();
        Ok(())
    }

    fn settle_collecting(&mut self) {
        self.collecting = self.allowed.is_some() && self.config.garbage_collection_threshold > 0.0;
    }

    fn limit(&self, fraction: f64, on: bool) -> Option<u64> {
        on.then_some((fraction * self.total as f64) as u64)
    }

    /// A function that is asked to give something up before the driver is asked (PyTorch: free-memory callbacks). It
    /// gets the bytes wanted and returns addresses to free.
    pub fn set_pressure_callback(&mut self, callback: impl FnMut(u64) -> Vec<u64> + Send + 'static) {
        self.pressure = Some(Box::new(callback));
    }

    /// Keeps the newest `limit` entries of a trace; 0 stops and forgets.
    pub fn record_history(&mut self, limit: usize) {
        self.history = (limit > 0).then(|| Box::new(History::new(limit)));
    }

    /// The trace so far, oldest first.
    pub fn history(&self) -> impl Iterator<Item = &TraceEntry> {
        self.history.iter().flat_map(|history| history.entries.iter())
    }

    fn record(&mut self, action: Action, addr: u64, size: u64, stream: u64, pool: u32, tag: u64) {
        if self.history.is_some() {
            let pool = self.pool_id(pool);
            let time_us = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX));
            if let Some(history) = &mut self.history {
                history.record(TraceEntry { action, addr, size, stream, time_us, pool, tag });
            }
        }
    }

    // ---- requests -------------------------------------------------------------------------------------------------

    /// Serves a request of `requested` bytes for use on `stream`. A request of 0 bytes gets the null address and
    /// changes nothing.
    ///
    /// # Errors
    /// Out of memory, after everything in the order of PyTorch was tried; a driver failure; a request of 2^60 bytes
    /// or more.
    pub fn malloc(&mut self, requested: u64, stream: StreamId) -> Result<Allocation, AllocError> {
        self.malloc_tagged(requested, stream, 0)
    }

    /// Like [`malloc`](Self::malloc); `tag` stays with the block, so that a tool can say whose it is.
    pub fn malloc_tagged(&mut self, requested: u64, stream: StreamId, tag: u64) -> Result<Allocation, AllocError> {
        if requested == 0 {
            return Ok(Allocation::NULL);
        }
        if requested >= REQUEST_LIMIT {
            return Err(AllocError::TooLarge { requested });
        }
        if self.config.no_caching {
            return self.malloc_uncached(requested);
        }
        if (self.waiting > 0 || !self.deferred.is_empty()) && !self.capturing() {
            self.process_events()?;
        }
        let size = if self.plain_rounding && requested >= MIN_BLOCK {
            (requested + (MIN_BLOCK - 1)) & !(MIN_BLOCK - 1)
        } else {
            round_size(requested, &self.config.roundup_power2_divisions)
        };
        let mut pool = if size <= SMALL_SIZE { SMALL } else { LARGE };
        if !self.diversions.is_empty() {
            pool = self.divert(pool, stream.0);
        }
        self.taken = 0;
        self.taken_address = 0;
        self.retried = false;
        let id = match self.take_free(pool, size, stream.0) {
            Some(id) => id,
            None => {
                let alloc_size = segment_size(size, self.config.large_segment_size);
                let expandable = self.config.expandable_segments;
                let request = Request { requested, size, stream: stream.0, pool, alloc_size, expandable, tag };
                self.malloc_slow(&request)?
            }
        };
        let id = self.hand_out(id, requested, size, tag);
        let block = &self.blocks[id];
        Ok(Allocation {
            address: block.addr,
            size: block.size,
            block: BlockId(id),
            segment: SegmentId(block.segment),
            taken: self.taken,
            taken_address: self.taken_address,
            retried: self.retried,
        })
    }

    #[cold]
    fn malloc_uncached(&mut self, requested: u64) -> Result<Allocation, AllocError> {
        let address = self.driver.mem_alloc(requested).map_err(|error| {
            if error.is_out_of_memory() {
                let stream = StreamId::DEFAULT;
                let pool = if requested <= SMALL_SIZE { SMALL } else { LARGE };
                let request =
                    Request { requested, size: requested, stream: stream.0, pool, alloc_size: requested, expandable: false, tag: 0 };
                self.out_of_memory(&request, vec![Step::Driver], false)
            } else {
                error.into()
            }
        })?;
        self.uncached.insert(address, requested);
        Ok(Allocation { address, size: requested, taken: requested, taken_address: address, ..Allocation::NULL })
    }

    fn capturing(&self) -> bool {
        if self.policy.only_graphs_capture { self.diversions.iter().any(|diversion| diversion.graph) } else { !self.diversions.is_empty() }
    }

    #[cold]
    fn divert(&self, default: u32, stream: u64) -> u32 {
        match self.diversions.iter().rev().find(|diversion| diversion.filter.matches(stream)) {
            Some(diversion) => {
                let private = &self.privates[diversion.private as usize];
                if default == SMALL { private.small } else { private.large }
            }
            None => default,
        }
    }

    /// What decides between free blocks of the same size.
    #[inline]
    fn tie_of(&self, block: &Block) -> u64 {
        match self.policy.tie_break {
            TieBreak::Address => block.addr,
            TieBreak::AddressDescending => !block.addr,
            TieBreak::Registration => block.registration,
        }
    }

    /// The heap of a pool and stream; made if there is none yet.
    fn heap_of(&mut self, pool: u32, stream: u64) -> u32 {
        match self.pools[pool as usize].heap(stream) {
            Ok(heap) => heap,
            Err(at) => {
                let heap = self.heaps.len() as u32;
                self.heaps.push(Heap::default());
                self.pools[pool as usize].streams.insert(at, (stream, heap));
                heap
            }
        }
    }

    /// Puts a block into its pool's cache.
    #[inline(always)]
    fn cache(&mut self, id: u32) {
        let tie = self.tie_of(&self.blocks[id]);
        let block = &mut self.blocks[id];
        block.tie = tie;
        block.state = BlockState::Free;
        block.gc_mark = self.pools[block.pool as usize].searches;
        let heap = block.heap;
        self.heaps[heap as usize].free.insert(&mut self.blocks, id);
    }

    #[inline]
    fn uncache(&mut self, id: u32) {
        let heap = self.blocks[id].heap;
        let found = self.heaps[heap as usize].free.remove(&mut self.blocks, id);
        debug_assert!(found, "a free block was not in its pool");
    }

    /// Free blocks of a pool in search order: by stream, then size, then tie.
    fn free_blocks_of(&self, pool: u32) -> Vec<Key> {
        let streams = &self.pools[pool as usize].streams;
        let mut free = Vec::with_capacity(streams.iter().map(|(_, heap)| self.heaps[*heap as usize].free.len()).sum());
        for (_, heap) in streams {
            self.heaps[*heap as usize].free.for_each(&self.blocks, |key| free.push(key));
        }
        free
    }

    /// Bytes a block could grow to by mapping what lies behind it.
    fn growable(&self, id: u32) -> u64 {
        let block = &self.blocks[id];
        match self.blocks.get(block.next) {
            Some(next) if next.state == BlockState::Unmapped => block.size + next.size,
            _ => block.size,
        }
    }

    /// Takes the best fitting free block out of the cache (PyTorch: `get_free_block`).
    #[inline(always)]
    fn take_free(&mut self, pool: u32, size: u64, stream: u64) -> Option<u32> {
        let owner = &mut self.pools[pool as usize];
        if self.collecting {
            owner.searches += 1;
        }
        let heap = owner.heap(stream).ok()?;
        if self.ranges == 0 && self.config.max_split_size.is_none() {
            return self.heaps[heap as usize].free.take_best_fit(&mut self.blocks, size);
        }
        self.take_free_with_limits(heap, size)
    }

    #[inline(never)]
    fn take_free_with_limits(&mut self, heap: u32, size: u64) -> Option<u32> {
        let mut key = self.heaps[heap as usize].free.best_fit(&self.blocks, size)?;
        if self.blocks[key.id].expandable {
            key = self.settle_expandable(heap, key)?;
        }
        if let Some(limit) = self.config.max_split_size {
            if size < limit && key.size >= limit {
                return None;
            }
            if size >= limit && key.size >= size.saturating_add(self.config.max_non_split_rounding_size) {
                return None;
            }
        }
        self.uncache(key.id);
        Some(key.id)
    }

    /// The best fit is in an expandable segment: prefer a block that would not eat a growable tail; or, with expandable
    /// segments off by now, one outside them.
    #[cold]
    fn settle_expandable(&self, heap: u32, first: Key) -> Option<Key> {
        let free = &self.heaps[heap as usize].free;
        let mut key = first;
        if self.config.expandable_segments {
            while self.blocks[key.id].expandable {
                match free.after(&self.blocks, key) {
                    Some(next) if self.growable(next.id) < self.growable(key.id) => key = next,
                    _ => break,
                }
            }
            return Some(key);
        }
        loop {
            key = free.after(&self.blocks, key)?;
            if !self.blocks[key.id].expandable {
                return Some(key);
            }
        }
    }

    /// Everything that is tried once the cache has no fitting block, in PyTorch's order.
    #[cold]
    fn malloc_slow(&mut self, request: &Request) -> Result<u32, AllocError> {
        let mut tried = vec![Step::Search];
        if let Some(mut callback) = self.pressure.take() {
            tried.push(Step::Callback);
            let given_up = callback(request.size);
            self.pressure = Some(callback);
            let some = !given_up.is_empty();
            for address in given_up {
                self.free(address)?;
            }
            if some && let Some(id) = self.take_free(request.pool, request.size, request.stream) {
                return Ok(id);
            }
        }
        if self.collecting {
            tried.push(Step::GarbageCollect);
            self.collect_garbage()?;
        }
        tried.push(Step::Driver);
        if self.config.throw_on_cudamalloc_oom {
            let limit = self.config.per_process_memory_fraction * self.total as f64;
            if (self.stats.reserved_bytes.current() + request.alloc_size) as f64 > limit {
                self.stats.rest.num_oom_rejections += 1;
                return Err(self.out_of_memory(request, tried, true));
            }
        }
        if let Some(id) = self.take_from_driver(request, false)? {
            return Ok(id);
        }
        if self.policy.pool_fallback && self.pools[request.pool as usize].private == NONE {
            for at in 0..self.privates.len() {
                let private = &self.privates[at];
                if !(private.live && private.options.use_on_oom) {
                    continue;
                }
                if tried.last() != Some(&Step::FallbackPool) {
                    tried.push(Step::FallbackPool);
                }
                let pool = if request.pool == SMALL { private.small } else { private.large };
                if let Some(id) = self.take_free(pool, request.size, request.stream) {
                    return Ok(id);
                }
            }
        }
        if self.config.max_split_size.is_some() {
            tried.push(Step::ReleaseOversize);
            if self.release_oversize(request)?
                && let Some(id) = self.take_from_driver(request, false)?
            {
                return Ok(id);
            }
        }
        if !self.capturing() {
            tried.push(Step::ReleaseCached);
            self.release_cached(None, &mut Vec::new())?;
            tried.push(Step::Retry);
            self.retried = true;
            if let Some(id) = self.take_from_driver(request, true)? {
                return Ok(id);
            }
        }
        self.stats.rest.num_ooms += 1;
        let free = self.driver.mem_get_info().map_or(0, |info| info.free);
        self.record(Action::Oom, free, request.size, request.stream, request.pool, request.tag);
        Err(self.out_of_memory(request, tried, false))
    }

    /// Asks the driver (PyTorch: `alloc_block`). `None`: no memory.
    fn take_from_driver(&mut self, request: &Request, retry: bool) -> Result<Option<u32>, AllocError> {
        if retry {
            self.stats.rest.num_alloc_retries += 1;
        }
        let size = request.alloc_size;
        if self.allowed.is_some_and(|limit| self.stats.reserved_bytes.current().saturating_add(size) > limit) {
            return Ok(None);
        }
        if request.expandable {
            return self.grow_expandable(request);
        }
        let addr = match self.driver.mem_alloc(size) {
            Ok(addr) => addr,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let segment = self.segments.insert(Segment {
            addr,
            size,
            stream: request.stream,
            pool: request.pool,
            head: NONE,
            tag: request.tag,
            expandable: None,
            live: true,
        });
        let id = self.new_block(addr, size, request.stream, request.pool, segment, BlockState::Free, false);
        self.segments[segment].head = id;
        if let Some(private) = self.private_mut(request.pool) {
            private.segments += 1;
        }
        self.segment_taken(addr, size, request.stream, request.pool, request.tag);
        Ok(Some(id))
    }

    fn segment_taken(&mut self, addr: u64, size: u64, stream: u64, pool: u32, tag: u64) {
        let small = self.pools[pool as usize].small;
        self.stats.segment.increase(small, 1);
        self.stats.reserved_bytes.increase(small, size);
        if self.config.max_split_size.is_some_and(|limit| size >= limit) {
            self.stats.rest.oversize_segments.increase(1);
        }
        self.stats.rest.num_device_alloc += 1;
        self.taken += size;
        self.taken_address = addr;
        self.record(Action::SegmentAlloc, addr, size, stream, pool, tag);
    }

    #[allow(clippy::too_many_arguments)]
    fn new_block(&mut self, addr: u64, size: u64, stream: u64, pool: u32, segment: u32, state: BlockState, expandable: bool) -> u32 {
        self.registrations += 1;
        let heap = self.heap_of(pool, stream);
        self.blocks.insert(Block {
            addr,
            size,
            tie: 0,
            requested: 0,
            prev: NONE,
            next: NONE,
            left: NONE,
            right: NONE,
            heap,
            segment,
            uses: NONE,
            state,
            expandable,
            small: self.pools[pool as usize].small,
            live: true,
            stream,
            tag: 0,
            registration: self.registrations,
            gc_mark: 0,
            pool,
            events: 0,
        })
    }

    fn private_mut(&mut self, pool: u32) -> Option<&mut PrivatePool> {
        match self.pools[pool as usize].private {
            NONE => None,
            at => Some(&mut self.privates[at as usize]),
        }
    }

    /// Links `id` in before `next`, which is in a list.
    #[inline]
    fn link_before(&mut self, id: u32, next: u32) {
        let prev = self.blocks[next].prev;
        self.blocks[id].prev = prev;
        self.blocks[id].next = next;
        self.blocks[next].prev = id;
        if prev == NONE {
            let segment = self.blocks[id].segment;
            self.segments[segment].head = id;
        } else {
            self.blocks[prev].next = id;
        }
    }

    /// Links `id` in after `prev`, which is in a list.
    fn link_after(&mut self, id: u32, prev: u32) {
        let next = self.blocks[prev].next;
        self.blocks[id].prev = prev;
        self.blocks[id].next = next;
        self.blocks[prev].next = id;
        if next != NONE {
            self.blocks[next].prev = id;
        }
    }

    #[inline]
    fn should_split(&self, block: &Block, size: u64) -> bool {
        let rest = block.size - size;
        let splits = if block.small || self.config.expandable_segments {
            rest >= MIN_BLOCK
        } else {
            large_splits(size, rest, self.config.max_split_size)
        };
        splits && !(self.some_unsplit && self.never_splits(block.pool))
    }

    #[cold]
    fn never_splits(&self, pool: u32) -> bool {
        let private = self.pools[pool as usize].private;
        private != NONE && self.privates[private as usize].options.no_split
    }

    /// Splits and hands out a block that is in no set (PyTorch: `alloc_found_block`).
    #[inline]
    fn hand_out(&mut self, found: u32, requested: u64, size: u64, tag: u64) -> u32 {
        let block = &self.blocks[found];
        let (was_split, expandable, small) = (block.is_split(), block.expandable, block.small);
        let (mut id, mut bytes) = (found, block.size);
        let addr = block.addr;
        if self.should_split(block, size) {
            let rest = bytes - size;
            bytes = size;
            id = self.split_front(found, requested, size, tag);
            self.cache(found);
            if !expandable {
                if was_split {
                    self.stats.inactive_split_bytes.decrease(small, size);
                } else {
                    self.stats.inactive_split_bytes.increase(small, rest);
                    self.stats.inactive_split.increase(small, 1);
                }
            }
        } else {
            let block = &mut self.blocks[found];
            block.state = BlockState::Allocated;
            block.requested = requested;
            block.tag = tag;
            if was_split && !expandable {
                self.stats.inactive_split_bytes.decrease(small, bytes);
                self.stats.inactive_split.decrease(small, 1);
            }
        }
        self.table.insert(addr, id);
        self.stats.allocation.increase(small, 1);
        self.stats.allocated_bytes.increase(small, bytes);
        self.stats.active.increase(small, 1);
        self.stats.active_bytes.increase(small, bytes);
        self.stats.requested_bytes.increase(small, requested);
        if self.config.max_split_size.is_some_and(|limit| bytes >= limit) {
            self.stats.rest.oversize_allocations.increase(1);
        }
        if self.history.is_some() {
            self.record_block(Action::Alloc, id);
        }
        id
    }

    /// Makes the first `size` bytes of a block an allocated block of their own; the rest stays the old block.
    #[inline]
    fn split_front(&mut self, found: u32, requested: u64, size: u64, tag: u64) -> u32 {
        self.registrations += 1;
        let rest = &mut self.blocks[found];
        let (prev, segment) = (rest.prev, rest.segment);
        let front = Block {
            addr: rest.addr,
            size,
            tie: 0,
            requested,
            prev,
            next: found,
            left: NONE,
            right: NONE,
            heap: rest.heap,
            segment,
            uses: NONE,
            state: BlockState::Allocated,
            expandable: rest.expandable,
            small: rest.small,
            live: true,
            stream: rest.stream,
            tag,
            registration: self.registrations,
            gc_mark: 0,
            pool: rest.pool,
            events: 0,
        };
        rest.addr += size;
        rest.size -= size;
        let id = self.blocks.insert(front);
        self.blocks[found].prev = id;
        if prev == NONE {
            self.segments[segment].head = id;
        } else {
            self.blocks[prev].next = id;
        }
        id
    }

    // ---- frees ----------------------------------------------------------------------------------------------------

    /// The slot of the table and the block of an allocated address.
    #[inline]
    fn owned(&self, address: u64) -> Result<(usize, u32), AllocError> {
        let Some((slot, id)) = self.table.find(address) else {
            return Err(AllocError::NotAllocated { address, why: "is not allocated here" });
        };
        if self.blocks[id].state != BlockState::Allocated {
            return Err(AllocError::NotAllocated { address, why: "was freed already and waits for another stream" });
        }
        Ok((slot, id))
    }

    /// Takes back what [`malloc`](Self::malloc) returned. If other streams used it
    /// ([`record_stream`](Self::record_stream)), it becomes free only when they are seen done. The null address is
    /// accepted.
    ///
    /// # Errors
    /// An address that is not allocated; a driver failure while marking other streams, after which the block is still
    /// allocated.
    pub fn free(&mut self, address: u64) -> Result<(), AllocError> {
        if address == 0 {
            return Ok(());
        }
        if !self.uncached.is_empty() && self.uncached.contains_key(&address) {
            self.driver.mem_free(address)?;
            self.uncached.remove(&address);
            return Ok(());
        }
        let (slot, id) = self.owned(address)?;
        if self.blocks[id].uses == NONE {
            self.give_up(id);
            self.free_at(slot, id);
        } else if self.capturing() {
            self.give_up(id);
            self.deferred.push(id);
        } else {
            // Events first: they may fail, and then nothing has happened.
            self.make_events(id, false)?;
            self.give_up(id);
            self.queue_events(id);
        }
        Ok(())
    }

    /// The owner's part of a free: from allocated to pending.
    #[inline]
    fn give_up(&mut self, id: u32) {
        let block = &mut self.blocks[id];
        block.state = BlockState::PendingFree;
        let (bytes, small) = (block.size, block.small);
        self.stats.allocation.decrease(small, 1);
        self.stats.allocated_bytes.decrease(small, bytes);
        if self.config.max_split_size.is_some_and(|limit| bytes >= limit) && self.stats.rest.oversize_allocations.current > 0 {
            self.stats.rest.oversize_allocations.decrease(1);
        }
        if self.history.is_some() {
            self.record_block(Action::FreeRequested, id);
        }
    }

    #[cold]
    fn record_block(&mut self, action: Action, id: u32) {
        let block = &self.blocks[id];
        let (addr, requested, stream, pool, tag) = (block.addr, block.requested, block.stream, block.pool, block.tag);
        self.record(action, addr, requested, stream, pool, tag);
    }

    /// The owner's part of a free only, for replay: the block stays active until [`finish_free`](Self::finish_free).
    ///
    /// # Errors
    /// An address that is not allocated.
    pub fn begin_free(&mut self, address: u64) -> Result<(), AllocError> {
        let (_, id) = self.owned(address)?;
        self.give_up(id);
        self.blocks[id].events += 1;
        Ok(())
    }

    /// Completes a free that [`begin_free`](Self::begin_free) began, or that was pending in a restored state.
    ///
    /// # Errors
    /// An address that is not pending, or that waits for events of its own.
    pub fn finish_free(&mut self, address: u64) -> Result<(), AllocError> {
        let why = "has no free to finish";
        let id = self.table.get(address).ok_or(AllocError::NotAllocated { address, why })?;
        let block = &mut self.blocks[id];
        if block.state != BlockState::PendingFree || block.events != 1 || block.uses != NONE {
            return Err(AllocError::NotAllocated { address, why });
        }
        block.events = 0;
        self.free_block(id);
        Ok(())
    }

    /// Merges a block that nobody uses any more with its free neighbours and caches it.
    fn free_block(&mut self, id: u32) {
        if let Some((slot, _)) = self.table.find(self.blocks[id].addr) {
            self.free_at(slot, id);
        }
    }

    /// Like [`free_block`](Self::free_block), for a block whose slot in the table is known.
    #[inline(always)]
    fn free_at(&mut self, slot: usize, id: u32) {
        if self.history.is_some() {
            self.record_block(Action::FreeCompleted, id);
        }
        self.table.remove_at(slot);
        let block = &mut self.blocks[id];
        debug_assert!(block.events == 0 && block.uses == NONE);
        block.state = BlockState::Free;
        let (mut addr, mut size, mut prev, mut next) = (block.addr, block.size, block.prev, block.next);
        let (bytes, requested, small, expandable, heap) = (block.size, block.requested, block.small, block.expandable, block.heap);
        let free = &mut self.heaps[heap as usize].free;
        let (mut count, mut change) = (0i64, 0i64);
        if prev != NONE && self.blocks[prev].state == BlockState::Free {
            let gone = prev;
            let found = free.remove(&mut self.blocks, gone);
            debug_assert!(found, "a free block was not in its pool");
            let before = &self.blocks[gone];
            (addr, prev) = (before.addr, before.prev);
            count -= 1;
            change -= before.size as i64;
            size += before.size;
            let segment = before.segment;
            self.blocks.remove(gone);
            if prev == NONE {
                self.segments[segment].head = id;
            } else {
                self.blocks[prev].next = id;
            }
        }
        if next != NONE && self.blocks[next].state == BlockState::Free {
            let gone = next;
            let found = free.remove(&mut self.blocks, gone);
            debug_assert!(found, "a free block was not in its pool");
            let after = &self.blocks[gone];
            next = after.next;
            count -= 1;
            change -= after.size as i64;
            size += after.size;
            self.blocks.remove(gone);
            if next != NONE {
                self.blocks[next].prev = id;
            }
        }
        let block = &mut self.blocks[id];
        (block.addr, block.size, block.prev, block.next) = (addr, size, prev, next);
        self.cache(id);
        if !expandable {
            if prev != NONE || next != NONE {
                count += 1;
                change += size as i64;
            }
            if count != 0 {
                self.stats.inactive_split.change(small, count);
            }
            if change != 0 {
                self.stats.inactive_split_bytes.change(small, change);
            }
        }
        self.stats.active.decrease(small, 1);
        self.stats.active_bytes.decrease(small, bytes);
        self.stats.requested_bytes.decrease(small, requested);
    }

    /// Merges `other` into `into` if both are free, or both unmapped. Returns the bytes subsumed.
    #[inline]
    fn merge(&mut self, into: u32, other: u32) -> u64 {
        if other == NONE || self.blocks[other].state != self.blocks[into].state {
            return 0;
        }
        let state = self.blocks[other].state;
        match state {
            BlockState::Free => self.uncache(other),
            BlockState::Unmapped => self.unlist(other),
            _ => return 0,
        }
        let (addr, size, prev, next, segment) = {
            let block = &self.blocks[other];
            (block.addr, block.size, block.prev, block.next, block.segment)
        };
        if self.blocks[into].prev == other {
            self.blocks[into].addr = addr;
            self.blocks[into].prev = prev;
            if prev == NONE {
                self.segments[segment].head = into;
            } else {
                self.blocks[prev].next = into;
            }
        } else {
            self.blocks[into].next = next;
            if next != NONE {
                self.blocks[next].prev = into;
            }
        }
        self.blocks[into].size += size;
        self.blocks.remove(other);
        size
    }

    // ---- streams and events ---------------------------------------------------------------------------------------

    /// Notes that `stream` uses the block at `address`: after a free it waits for the work queued on `stream` by then.
    /// Uses on the stream of the request itself need no note.
    ///
    /// # Errors
    /// An address that is not allocated.
    pub fn record_stream(&mut self, address: u64, stream: StreamId) -> Result<(), AllocError> {
        if address == 0 || self.uncached.contains_key(&address) {
            return Ok(());
        }
        let (_, id) = self.owned(address)?;
        if self.blocks[id].stream == stream.0 {
            return Ok(());
        }
        let in_capture = self.capturing();
        if self.blocks[id].uses == NONE {
            let entry = self.spare_uses.pop().unwrap_or_else(|| {
                self.uses.push(Vec::new());
                (self.uses.len() - 1) as u32
            });
            self.blocks[id].uses = entry;
        }
        let uses = &mut self.uses[self.blocks[id].uses as usize];
        match uses.iter_mut().find(|known| known.stream == stream.0) {
            Some(known) => known.in_capture &= in_capture,
            None => uses.push(Use { stream: stream.0, in_capture }),
        }
        Ok(())
    }

    /// Makes and records an event on every stream that used the block, into `scratch_events`. All or nothing.
    fn make_events(&mut self, id: u32, skip_captured: bool) -> Result<(), DriverError> {
        self.scratch_events.clear();
        let entry = self.blocks[id].uses as usize;
        for at in 0..self.uses[entry].len() {
            let Use { stream, in_capture } = self.uses[entry][at];
            if skip_captured && in_capture {
                continue;
            }
            let made = match self.spare_events.pop() {
                Some(event) => Ok(event),
                None => self.driver.event_create(),
            };
            let recorded = made.and_then(|event| match self.driver.event_record(event, StreamId(stream)) {
                Ok(()) => Ok(event),
                Err(error) => {
                    self.spare_events.push(event);
                    Err(error)
                }
            });
            match recorded {
                Ok(event) => self.scratch_events.push((stream, event)),
                Err(error) => {
                    while let Some((_, event)) = self.scratch_events.pop() {
                        self.spare_events.push(event);
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Queues what [`make_events`](Self::make_events) made; frees the block at once if that is nothing.
    fn queue_events(&mut self, id: u32) {
        let entry = self.blocks[id].uses;
        self.uses[entry as usize].clear();
        self.spare_uses.push(entry);
        self.blocks[id].uses = NONE;
        self.blocks[id].events += self.scratch_events.len() as u32;
        self.waiting += self.scratch_events.len();
        for at in 0..self.scratch_events.len() {
            let (stream, event) = self.scratch_events[at];
            let at = match self.events.binary_search_by_key(&stream, |queue| queue.stream) {
                Ok(at) => at,
                Err(at) => {
                    self.events.insert(at, StreamEvents { stream, queue: VecDeque::new() });
                    at
                }
            };
            self.events[at].queue.push_back((event, id));
        }
        self.scratch_events.clear();
        if self.blocks[id].events == 0 {
            self.free_block(id);
        }
    }

    /// Records the events of what was freed during a capture.
    fn queue_deferred(&mut self) -> Result<(), DriverError> {
        while let Some(&id) = self.deferred.first() {
            self.make_events(id, true)?;
            self.deferred.remove(0);
            self.queue_events(id);
        }
        Ok(())
    }

    fn event_done(&mut self, id: u32) {
        self.blocks[id].events -= 1;
        self.waiting -= 1;
        if self.blocks[id].events == 0 {
            self.free_block(id);
        }
    }

    /// Frees the blocks whose other streams are done by now. Every [`malloc`](Self::malloc) begins with this, except
    /// during a capture.
    ///
    /// # Errors
    /// A driver failure; the blocks not looked at yet stay pending.
    pub fn process_events(&mut self) -> Result<(), AllocError> {
        if self.capturing() {
            return Ok(());
        }
        self.queue_deferred()?;
        for at in 0..self.events.len() {
            while let Some(&(event, id)) = self.events[at].queue.front() {
                if !self.driver.event_query(event)? {
                    break;
                }
                self.events[at].queue.pop_front();
                self.spare_events.push(event);
                self.event_done(id);
            }
        }
        Ok(())
    }

    /// Waits for all events and frees their blocks.
    fn synchronize_events(&mut self) -> Result<(), AllocError> {
        self.stats.rest.num_sync_all_streams += 1;
        self.queue_deferred()?;
        for at in 0..self.events.len() {
            while let Some(&(event, id)) = self.events[at].queue.front() {
                self.driver.event_synchronize(event)?;
                self.events[at].queue.pop_front();
                self.spare_events.push(event);
                self.event_done(id);
            }
        }
        Ok(())
    }

    /// Number of frees that wait for other streams or for the end of a capture.
    pub fn pending_frees(&self) -> usize {
        self.table.len() - self.stats.allocation.current() as usize
    }

    // ---- giving back ----------------------------------------------------------------------------------------------

    /// Gives a free block that is a whole segment back to the driver.
    fn release_block(&mut self, id: u32, released: &mut Vec<Released>) -> Result<(), DriverError> {
        let block = &self.blocks[id];
        debug_assert!(block.state == BlockState::Free && !block.is_split() && !block.expandable);
        let (addr, size, stream, pool, segment, tag) = (block.addr, block.size, block.stream, block.pool, block.segment, block.tag);
        self.driver.mem_free(addr)?;
        self.uncache(id);
        self.blocks.remove(id);
        self.segments.remove(segment);
        if let Some(private) = self.private_mut(pool) {
            private.segments -= 1;
        }
        let small = self.pools[pool as usize].small;
        self.stats.segment.decrease(small, 1);
        self.stats.reserved_bytes.decrease(small, size);
        if self.config.max_split_size.is_some_and(|limit| size >= limit) && self.stats.rest.oversize_segments.current > 0 {
            self.stats.rest.oversize_segments.decrease(1);
        }
        self.stats.rest.num_device_free += 1;
        self.record(Action::SegmentFree, addr, size, stream, pool, tag);
        released.push(Released { address: addr, size, stream: StreamId(stream), small, pool: self.pool_id(pool), expandable: false });
        Ok(())
    }

    /// Gives back what a pool has wholly free (PyTorch: `release_blocks`).
    fn release_blocks(&mut self, pool: u32, released: &mut Vec<Released>) -> Result<(), AllocError> {
        let free: Vec<u32> = self.free_blocks_of(pool).into_iter().map(|key| key.id).collect();
        for &id in &free {
            if !self.blocks[id].expandable && !self.blocks[id].is_split() {
                self.release_block(id, released)?;
            }
        }
        for id in free {
            // Unmapping one block never changes which other free blocks there are.
            if self.blocks.get(id).is_some_and(|block| block.expandable && block.state == BlockState::Free) {
                self.unmap_block(id, released)?;
            }
        }
        Ok(())
    }

    /// Gives back everything that is cached (PyTorch: `release_cached_blocks`); of one private pool, or of the default
    /// pool and all private pools without users.
    fn release_cached(&mut self, only: Option<PoolId>, released: &mut Vec<Released>) -> Result<(), AllocError> {
        if only.is_none() && !self.capturing() {
            self.synchronize_events()?;
            self.release_blocks(LARGE, released)?;
            self.release_blocks(SMALL, released)?;
        }
        for at in 0..self.privates.len() {
            let private = &self.privates[at];
            if !private.live || private.users > 0 || only.is_some_and(|id| id != private.id) {
                continue;
            }
            let (small, large) = (private.small, private.large);
            self.release_blocks(small, released)?;
            self.release_blocks(large, released)?;
            if self.privates[at].segments == 0 {
                self.privates[at].live = false;
            }
        }
        Ok(())
    }

    /// Gives cached memory back to the driver: every segment with nothing in it, after waiting for pending frees
    /// (`torch.cuda.empty_cache`). Returns what went back, in order.
    ///
    /// # Errors
    /// A driver failure; what went back before it is gone, the rest is still cached.
    pub fn empty_cache(&mut self) -> Result<Vec<Released>, AllocError> {
        let mut released = Vec::new();
        self.release_cached(None, &mut released)?;
        Ok(released)
    }

    /// Like [`empty_cache`](Self::empty_cache), for one private pool without users.
    ///
    /// # Errors
    /// A pool that does not exist; a driver failure.
    pub fn empty_pool(&mut self, pool: PoolId) -> Result<Vec<Released>, AllocError> {
        if pool == PoolId::DEFAULT {
            return self.empty_cache();
        }
        self.find_private(pool)?;
        let mut released = Vec::new();
        self.release_cached(Some(pool), &mut released)?;
        Ok(released)
    }

    /// Gives one segment back, which must be one free block; for replay.
    ///
    /// # Errors
    /// No free block that is a whole segment begins at `address`; a driver failure.
    pub fn release_segment(&mut self, address: u64) -> Result<Released, AllocError> {
        let found = self.segments.iter().find(|(_, segment)| segment.addr == address && segment.expandable.is_none());
        let Some((_, segment)) = found else {
            return Err(AllocError::NotAllocated { address, why: "is not the start of a segment" });
        };
        let id = segment.head;
        let block = &self.blocks[id];
        if block.state != BlockState::Free || block.is_split() {
            return Err(AllocError::NotAllocated { address, why: "is the start of a segment that is not wholly free" });
        }
        let mut released = Vec::with_capacity(1);
        self.release_block(id, &mut released)?;
        released.pop().ok_or(AllocError::NotAllocated { address, why: "was not released" })
    }

    /// With a split limit: gives back one oversize block that would do, or the largest ones until their sum would
    /// (PyTorch: `release_available_cached_blocks`). Whether that was enough.
    fn release_oversize(&mut self, request: &Request) -> Result<bool, AllocError> {
        let Some(limit) = self.config.max_split_size else { return Ok(false) };
        let wanted = request.size.max(limit);
        let Ok(heap) = self.pools[request.pool as usize].heap(request.stream) else { return Ok(false) };
        let fit = self.heaps[heap as usize].free.best_fit(&self.blocks, wanted);
        let mut released = Vec::new();
        if let Some(key) = fit
            && !self.blocks[key.id].expandable
        {
            if self.blocks[key.id].is_split() {
                // Only after the limit was lowered on a living allocator.
                return Ok(false);
            }
            self.release_block(key.id, &mut released)?;
            return Ok(true);
        }
        let mut sum = 0;
        let mut next = self.heaps[heap as usize].free.before(&self.blocks, fit.unwrap_or(Key { size: u64::MAX, tie: u64::MAX, id: NONE }));
        while let Some(key) = next.filter(|key| sum < wanted && key.size >= limit) {
            next = self.heaps[heap as usize].free.before(&self.blocks, key);
            let block = &self.blocks[key.id];
            if !block.expandable && !block.is_split() {
                self.release_block(key.id, &mut released)?;
                sum += key.size;
            }
        }
        Ok(sum >= wanted)
    }

    /// PyTorch: `garbage_collect_cached_blocks`. Looks at the default large pool only.
    fn collect_garbage(&mut self) -> Result<(), AllocError> {
        let Some(limit) = self.allowed else { return Ok(()) };
        let threshold = (self.config.garbage_collection_threshold * limit as f64) as u64;
        let total = self.stats.reserved_bytes.current();
        if total <= threshold {
            return Ok(());
        }
        let target = total - threshold;
        let searches = self.pools[LARGE as usize].searches;
        let mut candidates: Vec<u32> = self.free_blocks_of(LARGE).into_iter().map(|key| key.id).collect();
        candidates.retain(|id| !self.blocks[*id].is_split());
        let mut count = candidates.len() as u64;
        let mut ages: u64 = candidates.iter().map(|id| searches - self.blocks[*id].gc_mark).sum();
        candidates.retain(|id| !self.blocks[*id].expandable);
        let mut reclaimed = 0;
        let mut freed_one = true;
        let mut released = Vec::new();
        while reclaimed < target && freed_one && count > 0 {
            let threshold_age = ages as f64 / count as f64;
            freed_one = false;
            let mut kept = Vec::with_capacity(candidates.len());
            for id in candidates {
                let (age, size) = (searches - self.blocks[id].gc_mark, self.blocks[id].size);
                if (age as f64) < threshold_age {
                    kept.push(id);
                    continue;
                }
                self.release_block(id, &mut released)?;
                freed_one = true;
                reclaimed += size;
                ages -= age;
                count -= 1;
            }
            candidates = kept;
        }
        Ok(())
    }

    // ---- expandable segments --------------------------------------------------------------------------------------

    fn list_unmapped(&mut self, id: u32) {
        let block = &mut self.blocks[id];
        block.state = BlockState::Unmapped;
        let (addr, heap) = (block.addr, block.heap);
        self.heaps[heap as usize].unmapped.insert(addr, id);
    }

    fn unlist(&mut self, id: u32) {
        let block = &self.blocks[id];
        let (addr, heap) = (block.addr, block.heap);
        self.heaps[heap as usize].unmapped.remove(&addr);
    }

    fn allocatable(&self, id: u32) -> bool {
        self.blocks.get(id).is_some_and(|block| matches!(block.state, BlockState::Free | BlockState::Unmapped))
    }

    /// Where enough consecutive free or unmapped address space begins, lowest first (PyTorch:
    /// `find_expandable_block`); makes a new segment if nowhere.
    fn find_expandable(&mut self, request: &Request) -> Result<Option<u32>, AllocError> {
        if let Ok(heap) = self.pools[request.pool as usize].heap(request.stream) {
            for &unmapped in self.heaps[heap as usize].unmapped.values() {
                let before = self.blocks[unmapped].prev;
                let start = if before != NONE && self.allocatable(before) { before } else { unmapped };
                let (mut bytes, mut at) = (0u64, start);
                while bytes < request.size && self.allocatable(at) {
                    bytes += self.blocks[at].size;
                    at = self.blocks[at].next;
                }
                if bytes >= request.size {
                    return Ok(Some(start));
                }
            }
        }
        let page = if self.pools[request.pool as usize].small { SMALL_BUFFER } else { self.config.large_segment_size };
        let full = self.total + self.total / 8;
        let wanted = match self.config.expandable_segments_reserve {
            None => full,
            Some(Reserve::Fraction(part)) => ((part * self.total as f64) as u64).min(full),
            Some(Reserve::GiB(gib)) => ((gib * (1u64 << 30) as f64) as u64).min(full),
        };
        let reserved = round_up(wanted.max(1), page);
        if reserved < request.size {
            return Ok(None);
        }
        let base = match self.driver.address_reserve(reserved) {
            Ok(base) => base,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        Ok(Some(self.add_expandable(base, page, reserved, request.stream, request.pool, request.tag)))
    }

    /// A new expandable segment: one unmapped block.
    fn add_expandable(&mut self, base: u64, page: u64, reserved: u64, stream: u64, pool: u32, tag: u64) -> u32 {
        let segment = self.segments.insert(Segment {
            addr: base,
            size: reserved,
            stream,
            pool,
            head: NONE,
            tag,
            expandable: Some(Box::new(Expandable::new(base, page, reserved))),
            live: true,
        });
        self.ranges += 1;
        let id = self.new_block(base, reserved, stream, pool, segment, BlockState::Unmapped, true);
        self.segments[segment].head = id;
        if let Some(private) = self.private_mut(pool) {
            private.segments += 1;
        }
        self.list_unmapped(id);
        id
    }

    /// Maps what is missing (PyTorch: `try_allocate_expandable_block`). The block returned is in no set.
    fn grow_expandable(&mut self, request: &Request) -> Result<Option<u32>, AllocError> {
        let Some(mut candidate) = self.find_expandable(request)? else { return Ok(None) };
        if self.blocks[candidate].state == BlockState::Unmapped {
            let bytes = self.blocks[candidate].size.min(request.size);
            if !self.map_block(candidate, bytes, request.tag)? {
                return Ok(None);
            }
        }
        while self.blocks[candidate].size < request.size {
            let next = self.blocks[candidate].next;
            let bytes = (request.size - self.blocks[candidate].size).min(self.blocks[next].size);
            if !self.map_block(next, bytes, request.tag)? {
                return Ok(None);
            }
            candidate = next;
        }
        self.uncache(candidate);
        Ok(Some(candidate))
    }

    /// Maps the first `bytes` of an unmapped block, rounded up to pages, and merges it with its free neighbours.
    /// `false`: no memory.
    fn map_block(&mut self, id: u32, bytes: u64, tag: u64) -> Result<bool, AllocError> {
        let block = &self.blocks[id];
        let (addr, size, stream, pool, segment) = (block.addr, block.size, block.stream, block.pool, block.segment);
        let DeviceAllocator { driver, segments, .. } = self;
        let Some(expandable) = segments[segment].expandable.as_mut() else { return Ok(false) };
        let mapped = expandable.map(driver, addr, bytes)?;
        if mapped == 0 {
            if self.segment_is_unused(segment) {
                // A reservation made for this request only. If it cannot be given back it serves the next one.
                let _ = self.drop_expandable(id);
            }
            return Ok(false);
        }
        self.unlist(id);
        if mapped < size {
            let rest = self.new_block(addr + mapped, size - mapped, stream, pool, segment, BlockState::Unmapped, true);
            self.link_after(rest, id);
            self.blocks[id].size = mapped;
            self.list_unmapped(rest);
        }
        self.blocks[id].state = BlockState::Free;
        for neighbour in [self.blocks[id].prev, self.blocks[id].next] {
            self.merge(id, neighbour);
        }
        self.cache(id);
        let small = self.pools[pool as usize].small;
        self.stats.reserved_bytes.increase(small, mapped);
        self.stats.rest.num_device_alloc += 1;
        if self.taken == 0 {
            self.taken_address = addr;
        }
        self.taken += mapped;
        self.record(Action::SegmentMap, addr, mapped, stream, pool, tag);
        Ok(true)
    }

    fn segment_is_unused(&self, segment: u32) -> bool {
        let head = &self.blocks[self.segments[segment].head];
        head.state == BlockState::Unmapped && head.next == NONE
    }

    /// Unmaps the whole pages inside a free block (PyTorch: `unmap_block`), and drops the segment once nothing is
    /// mapped.
    fn unmap_block(&mut self, id: u32, released: &mut Vec<Released>) -> Result<(), AllocError> {
        let block = &self.blocks[id];
        let (addr, size, stream, pool, segment, tag) = (block.addr, block.size, block.stream, block.pool, block.segment, block.tag);
        let DeviceAllocator { driver, segments, .. } = self;
        let Some(expandable) = segments[segment].expandable.as_mut() else { return Ok(()) };
        let done = expandable.unmap(driver, addr, size, StreamId(stream));
        if done.bytes > 0 {
            self.uncache(id);
            let before = done.addr - addr;
            let after = size - before - done.bytes;
            self.blocks[id].addr = done.addr;
            self.blocks[id].size = done.bytes;
            if before > 0 {
                let front = self.new_block(addr, before, stream, pool, segment, BlockState::Free, true);
                self.link_before(front, id);
                self.cache(front);
            }
            if after > 0 {
                let back = self.new_block(done.addr + done.bytes, after, stream, pool, segment, BlockState::Free, true);
                self.link_after(back, id);
                self.cache(back);
            }
            self.blocks[id].state = BlockState::Unmapped;
            for neighbour in [self.blocks[id].prev, self.blocks[id].next] {
                self.merge(id, neighbour);
            }
            self.list_unmapped(id);
            let small = self.pools[pool as usize].small;
            self.stats.reserved_bytes.decrease(small, done.bytes);
            self.stats.rest.num_device_free += 1;
            self.record(Action::SegmentUnmap, done.addr, done.bytes, stream, pool, tag);
            released.push(Released {
                address: done.addr,
                size: done.bytes,
                stream: StreamId(stream),
                small,
                pool: self.pool_id(pool),
                expandable: true,
            });
        }
        if let Some(error) = done.error {
            return Err(error.into());
        }
        if done.bytes > 0 && self.segment_is_unused(segment) {
            self.drop_expandable(id)?;
        }
        Ok(())
    }

    /// Gives back the address range of a segment that is one unmapped block.
    fn drop_expandable(&mut self, id: u32) -> Result<(), AllocError> {
        let (segment, pool) = (self.blocks[id].segment, self.blocks[id].pool);
        let DeviceAllocator { driver, segments, .. } = self;
        if let Some(expandable) = segments[segment].expandable.as_mut() {
            expandable.release(driver)?;
        }
        self.unlist(id);
        self.blocks.remove(id);
        self.segments.remove(segment);
        self.ranges -= 1;
        if let Some(private) = self.private_mut(pool) {
            private.segments -= 1;
        }
        Ok(())
    }

    /// Physical bytes that failed driver calls left behind in expandable segments: not in the books, and used by the
    /// next mapping of the same pages.
    pub fn stranded_bytes(&self) -> u64 {
        self.segments.iter().filter_map(|(_, segment)| segment.expandable.as_ref()).map(|e| e.stranded()).sum()
    }

    // ---- private pools --------------------------------------------------------------------------------------------

    fn pool_id(&self, pool: u32) -> PoolId {
        match self.pools[pool as usize].private {
            NONE => PoolId::DEFAULT,
            at => self.privates[at as usize].id,
        }
    }

    fn find_private(&self, pool: PoolId) -> Result<u32, AllocError> {
        self.privates
            .iter()
            .position(|private| private.live && private.id == pool)
            .map(|at| at as u32)
            .ok_or(AllocError::Pool { pool, why: "does not exist" })
    }

    /// Makes a private pool with one user, the caller (PyTorch: `MemPool`, `createOrIncrefPool`). Ids are `(0, n)`.
    pub fn create_pool(&mut self, options: PoolOptions) -> PoolId {
        let id = PoolId(0, self.next_pool);
        self.next_pool += 1;
        self.add_pool(id, options, 1);
        id
    }

    fn add_pool(&mut self, id: PoolId, options: PoolOptions, users: u32) -> u32 {
        let at = self.privates.len() as u32;
        self.some_unsplit |= options.no_split;
        let small = self.pools.len() as u32;
        self.pools.push(Pool::new(true, at));
        self.pools.push(Pool::new(false, at));
        self.privates.push(PrivatePool { id, users, options, segments: 0, small, large: small + 1, live: true });
        at
    }

    /// Adds a user to a pool; a pool that does not exist under this id is made.
    ///
    /// # Errors
    /// [`PoolId::DEFAULT`].
    pub fn retain_pool(&mut self, pool: PoolId) -> Result<(), AllocError> {
        if pool == PoolId::DEFAULT {
            return Err(AllocError::Pool { pool, why: "is the default pool" });
        }
        match self.find_private(pool) {
            Ok(at) => self.privates[at as usize].users += 1,
            Err(_) => {
                if pool.0 == 0 {
                    self.next_pool = self.next_pool.max(pool.1.saturating_add(1));
                }
                self.add_pool(pool, PoolOptions::default(), 1);
            }
        }
        Ok(())
    }

    /// Sends matching requests to `pool` from now on, and adds a user to it. The newest matching diversion wins.
    /// `graph`: a graph capture, during which blocks used on several streams are not freed.
    ///
    /// # Errors
    /// The pool is being allocated to already, or is the default pool.
    pub fn begin_allocate(&mut self, pool: PoolId, filter: StreamFilter, graph: bool) -> Result<(), AllocError> {
        if self.diversions.iter().any(|diversion| diversion.pool == pool) {
            return Err(AllocError::Pool { pool, why: "is being allocated to already" });
        }
        self.retain_pool(pool)?;
        let private = self.find_private(pool)?;
        self.diversions.push(Diversion { pool, private, filter, graph });
        Ok(())
    }

    /// Ends [`begin_allocate`](Self::begin_allocate). The pool keeps its user until
    /// [`release_pool`](Self::release_pool).
    ///
    /// # Errors
    /// The pool is not being allocated to.
    pub fn end_allocate(&mut self, pool: PoolId) -> Result<(), AllocError> {
        let at = self.diversions.iter().position(|diversion| diversion.pool == pool);
        let at = at.ok_or(AllocError::Pool { pool, why: "is not being allocated to" })?;
        self.diversions.remove(at);
        Ok(())
    }

    /// Takes a user away. Without users, the pool's memory goes back with the next
    /// [`empty_cache`](Self::empty_cache), as far as nothing lives in it.
    ///
    /// # Errors
    /// The pool does not exist or has no user.
    pub fn release_pool(&mut self, pool: PoolId) -> Result<(), AllocError> {
        let at = self.find_private(pool)? as usize;
        let private = &mut self.privates[at];
        if private.users == 0 {
            return Err(AllocError::Pool { pool, why: "has no users left" });
        }
        private.users -= 1;
        if private.users == 0 {
            private.options = PoolOptions::default();
        }
        Ok(())
    }

    /// Users of a pool (PyTorch: `getPoolUseCount`).
    ///
    /// # Errors
    /// The pool does not exist.
    pub fn pool_users(&self, pool: PoolId) -> Result<u32, AllocError> {
        Ok(self.privates[self.find_private(pool)? as usize].users)
    }

    // ---- looking --------------------------------------------------------------------------------------------------

    /// Statistics now.
    pub fn stats(&self) -> Stats {
        let mut stats = self.stats.read();
        for private in self.privates.iter().filter(|private| private.live) {
            stats.reserved_bytes_by_private_pools.insert(format!("{}_{}", private.id.0, private.id.1), 0);
        }
        for segment in self.segments() {
            if segment.pool != PoolId::DEFAULT {
                *stats.reserved_bytes_by_private_pools.entry(format!("{}_{}", segment.pool.0, segment.pool.1)).or_default() +=
                    segment.mapped;
            }
        }
        stats
    }

    /// Statistics without the figures by private pool, which take a look at all segments.
    pub fn raw_stats(&self) -> Stats {
        self.stats.read()
    }

    /// The present sums alone, for callers that look after every request.
    #[inline]
    pub fn usage(&self) -> Usage {
        Usage {
            allocated: self.stats.allocated_bytes.current(),
            active: self.stats.active_bytes.current(),
            requested: self.stats.requested_bytes.current(),
            reserved: self.stats.reserved_bytes.current(),
        }
    }

    /// Sets every peak to the present value.
    pub fn reset_peak(&mut self) {
        self.stats.reset_peak();
    }

    /// Sets sums and counts to zero.
    pub fn reset_accumulated(&mut self) {
        self.stats.reset_accumulated();
    }

    fn segment_info(&self, id: u32) -> SegmentInfo {
        let segment = &self.segments[id];
        SegmentInfo {
            id: SegmentId(id),
            address: segment.addr,
            size: segment.size,
            mapped: segment.expandable.as_ref().map_or(segment.size, |expandable| expandable.mapped),
            stream: StreamId(segment.stream),
            small: self.pools[segment.pool as usize].small,
            pool: self.pool_id(segment.pool),
            expandable: segment.expandable.is_some(),
            tag: segment.tag,
        }
    }

    fn block_info(&self, id: u32) -> BlockInfo {
        let block = &self.blocks[id];
        BlockInfo {
            id: BlockId(id),
            segment: SegmentId(block.segment),
            address: block.addr,
            size: block.size,
            requested: block.requested,
            state: block.state,
            stream: StreamId(block.stream),
            tag: block.tag,
            small: self.pools[block.pool as usize].small,
            pool: self.pool_id(block.pool),
        }
    }

    /// All segments, in no particular order.
    pub fn segments(&self) -> impl Iterator<Item = SegmentInfo> + '_ {
        self.segments.iter().map(|(id, _)| self.segment_info(id))
    }

    /// A segment by id.
    pub fn segment(&self, id: SegmentId) -> Option<SegmentInfo> {
        self.segments.get(id.0).map(|_| self.segment_info(id.0))
    }

    /// The blocks of a segment in address order; none if the segment is gone.
    pub fn blocks_of(&self, segment: SegmentId) -> impl Iterator<Item = BlockInfo> + '_ {
        let mut at = self.segments.get(segment.0).map_or(NONE, |segment| segment.head);
        std::iter::from_fn(move || {
            if at == NONE {
                return None;
            }
            let info = self.block_info(at);
            at = self.blocks[at].next;
            Some(info)
        })
    }

    /// All blocks, in no particular order.
    pub fn blocks(&self) -> impl Iterator<Item = BlockInfo> + '_ {
        self.blocks.iter().map(|(id, _)| self.block_info(id))
    }

    /// A block by id.
    pub fn block(&self, id: BlockId) -> Option<BlockInfo> {
        self.blocks.get(id.0).map(|_| self.block_info(id.0))
    }

    /// The allocated or pending block that begins at `address`.
    pub fn block_at(&self, address: u64) -> Option<BlockInfo> {
        self.table.get(address).map(|id| self.block_info(id))
    }

    /// Where reserved memory goes.
    pub fn attribution(&self) -> Attribution {
        let mut sum = Attribution { reserved: self.stats.reserved_bytes.current(), ..Attribution::default() };
        for (_, block) in self.blocks.iter() {
            let pool = &self.pools[block.pool as usize];
            match block.state {
                BlockState::Unmapped => {}
                BlockState::PendingFree => sum.pending_free += block.size,
                BlockState::Allocated => {
                    let rounded = round_size(block.requested.max(1), &self.config.roundup_power2_divisions).min(block.size);
                    let requested = block.requested.min(rounded);
                    sum.requested += requested;
                    sum.rounding += rounded - requested;
                    sum.unsplit_slack += block.size - rounded;
                }
                BlockState::Free if pool.private != NONE => sum.private_pools += block.size,
                BlockState::Free => {
                    let alone = if block.expandable { self.has_no_mapped_neighbour(block) } else { !block.is_split() };
                    if alone { sum.idle += block.size } else { sum.split_pinned += block.size }
                }
            }
        }
        sum
    }

    fn has_no_mapped_neighbour(&self, block: &Block) -> bool {
        [block.prev, block.next].into_iter().all(|id| self.blocks.get(id).is_none_or(|other| other.state == BlockState::Unmapped))
    }

    /// Segments with both live and free memory in them, most free memory first, at most `limit`.
    pub fn pinned(&self, limit: usize) -> Vec<Pinned> {
        let mut all: Vec<Pinned> = self
            .segments()
            .filter_map(|segment| {
                let mut pinned = Pinned {
                    address: segment.address,
                    size: segment.mapped,
                    stream: segment.stream,
                    small: segment.small,
                    pool: segment.pool,
                    expandable: segment.expandable,
                    free: 0,
                    largest_free: 0,
                    live_blocks: 0,
                    live: 0,
                    holders: Vec::new(),
                };
                for block in self.blocks_of(segment.id) {
                    match block.state {
                        BlockState::Free => {
                            pinned.free += block.size;
                            pinned.largest_free = pinned.largest_free.max(block.size);
                        }
                        BlockState::Allocated | BlockState::PendingFree => {
                            pinned.live_blocks += 1;
                            pinned.live += block.size;
                            pinned.holders.push(Holder { address: block.address, size: block.size, tag: block.tag });
                        }
                        BlockState::Unmapped => {}
                    }
                }
                pinned.holders.sort_by_key(|holder| (std::cmp::Reverse(holder.size), holder.address));
                pinned.holders.truncate(4);
                (pinned.free > 0 && pinned.live_blocks > 0).then_some(pinned)
            })
            .collect();
        all.sort_by_key(|pinned| (std::cmp::Reverse(pinned.free), pinned.address));
        all.truncate(limit);
        all
    }

    #[cold]
    fn out_of_memory(&self, request: &Request, tried: Vec<Step>, rejected: bool) -> AllocError {
        let info = self.driver.mem_get_info().unwrap_or_default();
        let capacity = if info.total > 0 { info.total } else { self.total };
        let reserved = self.stats.reserved_bytes.current();
        let mut free_in_private_pools = 0;
        for pool in (0..self.pools.len() as u32).filter(|pool| self.pools[*pool as usize].private != NONE) {
            free_in_private_pools += self.free_blocks_of(pool).into_iter().map(|key| key.size).sum::<u64>();
        }
        AllocError::OutOfMemory(Box::new(OutOfMemory {
            requested: request.requested,
            block_size: request.size,
            alloc_size: request.alloc_size,
            stream: StreamId(request.stream),
            small: self.pools[request.pool as usize].small,
            device: self.device,
            capacity,
            free: info.free,
            allowed: self.allowed,
            allocated: self.stats.allocated_bytes.current(),
            reserved,
            free_in_private_pools,
            others: capacity.saturating_sub(info.free).saturating_sub(reserved),
            expandable_segments: self.config.expandable_segments,
            rejected,
            attribution: self.attribution(),
            pinned: self.pinned(16),
            tried,
        }))
    }

    /// The device's index.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Whether the settings select this allocator (and not the driver's own pools).
    pub fn is_native(&self) -> bool {
        self.config.backend == Backend::Native
    }

    /// Notes a snapshot in the trace.
    pub(crate) fn note_snapshot(&mut self) {
        let bytes = self.stats.allocated_bytes.current();
        self.record(Action::Snapshot, 0, bytes, 0, SMALL, 0);
    }

    // ---- recorded states ------------------------------------------------------------------------------------------

    /// Fills an empty allocator with a recorded state. The driver is not asked; addresses are taken as they are. Peaks
    /// and sums begin at the restored values. Expandable ranges of the same stream, pool and size class that fit into
    /// one address range become one segment.
    ///
    /// # Errors
    /// The allocator is not empty; blocks that do not cover their segment exactly; overlaps. The allocator is then
    /// empty again.
    pub fn restore(&mut self, seeds: &[SegmentSeed]) -> Result<(), AllocError> {
        if self.blocks.len() > 0 {
            return Err(AllocError::BadState { address: 0, why: "the allocator is not empty" });
        }
        check_seeds(seeds)?;
        let mut ranges: Vec<&SegmentSeed> = Vec::new();
        for seed in seeds {
            if seed.expandable {
                ranges.push(seed);
                continue;
            }
            let pool = self.seed_pool(seed);
            let segment = self.segments.insert(Segment {
                addr: seed.address,
                size: seed.size,
                stream: seed.stream.0,
                pool,
                head: NONE,
                tag: 0,
                expandable: None,
                live: true,
            });
            if let Some(private) = self.private_mut(pool) {
                private.segments += 1;
            }
            let mut last = NONE;
            for block in &seed.blocks {
                last = self.seed_block(block, seed, pool, segment, last);
            }
            self.stats.segment.increase(seed.small, 1);
            self.stats.reserved_bytes.increase(seed.small, seed.size);
            if self.config.max_split_size.is_some_and(|limit| seed.size >= limit) {
                self.stats.rest.oversize_segments.increase(1);
            }
        }
        ranges.sort_by_key(|seed| (seed.pool, seed.stream, seed.small, seed.address));
        self.restore_expandable(&ranges);
        Ok(())
    }

    fn seed_pool(&mut self, seed: &SegmentSeed) -> u32 {
        if seed.pool == PoolId::DEFAULT {
            return if seed.small { SMALL } else { LARGE };
        }
        let at = match self.find_private(seed.pool) {
            Ok(at) => at,
            Err(_) => {
                if seed.pool.0 == 0 {
                    self.next_pool = self.next_pool.max(seed.pool.1.saturating_add(1));
                }
                self.add_pool(seed.pool, PoolOptions::default(), 1)
            }
        };
        let private = &self.privates[at as usize];
        if seed.small { private.small } else { private.large }
    }

    fn seed_block(&mut self, seed: &BlockSeed, segment_seed: &SegmentSeed, pool: u32, segment: u32, last: u32) -> u32 {
        let small = segment_seed.small;
        let expandable = segment_seed.expandable;
        let id = self.new_block(seed.address, seed.size, segment_seed.stream.0, pool, segment, seed.state, expandable);
        // The blocks of an expandable range are linked in by the caller.
        if last != NONE {
            self.link_after(id, last);
        } else if !expandable {
            self.segments[segment].head = id;
        }
        self.blocks[id].requested = seed.requested;
        self.blocks[id].tag = seed.tag;
        if seed.state == BlockState::Free {
            self.cache(id);
            if !expandable && segment_seed.blocks.len() > 1 {
                self.stats.inactive_split.increase(small, 1);
                self.stats.inactive_split_bytes.increase(small, seed.size);
            }
            return id;
        }
        self.table.insert(seed.address, id);
        self.stats.active.increase(small, 1);
        self.stats.active_bytes.increase(small, seed.size);
        self.stats.requested_bytes.increase(small, seed.requested);
        if seed.state == BlockState::PendingFree {
            self.blocks[id].events = 1;
        } else {
            self.stats.allocation.increase(small, 1);
            self.stats.allocated_bytes.increase(small, seed.size);
            if self.config.max_split_size.is_some_and(|limit| seed.size >= limit) {
                self.stats.rest.oversize_allocations.increase(1);
            }
        }
        id
    }

    fn restore_expandable(&mut self, ranges: &[&SegmentSeed]) {
        let mut open: Option<(u32, u32, u64)> = None; // segment, last block, end of the address range
        let mut previous: Option<&SegmentSeed> = None;
        for seed in ranges {
            let pool = self.seed_pool(seed);
            let large = self.config.large_segment_size;
            let page = if seed.small || !seed.size.is_multiple_of(large) { SMALL_BUFFER } else { large };
            let same = previous.is_some_and(|p| (p.pool, p.stream, p.small) == (seed.pool, seed.stream, seed.small));
            let end = seed.address + seed.size;
            let fits = open.filter(|(segment, _, limit)| {
                let segment = &self.segments[*segment];
                let page = segment.expandable.as_ref().map_or(page, |expandable| expandable.page);
                same && end <= *limit && (seed.address - segment.addr).is_multiple_of(page) && seed.size.is_multiple_of(page)
            });
            let (segment, last, limit) = fits.unwrap_or_else(|| {
                let reserved = round_up((self.total + self.total / 8).max(seed.size), page);
                let tail = self.add_expandable(seed.address, page, reserved, seed.stream.0, pool, 0);
                (self.blocks[tail].segment, tail, seed.address + reserved)
            });
            // `last` is the unmapped tail: carve the range out of it.
            let tail = last;
            self.unlist(tail);
            let gap = seed.address - self.blocks[tail].addr;
            if gap > 0 {
                let hole = self.new_block(self.blocks[tail].addr, gap, seed.stream.0, pool, segment, BlockState::Unmapped, true);
                self.link_before(hole, tail);
                self.list_unmapped(hole);
            }
            if let Some(expandable) = self.segments[segment].expandable.as_mut() {
                expandable.adopt(seed.address, seed.size);
            }
            for block in &seed.blocks {
                let id = self.seed_block(block, seed, pool, segment, NONE);
                self.link_before(id, tail);
                let before = self.blocks[id].prev;
                if block.state == BlockState::Free && before != NONE && self.blocks[before].state == BlockState::Free {
                    // Two ranges that touch.
                    self.uncache(id);
                    self.merge(id, before);
                    self.cache(id);
                }
            }
            self.stats.reserved_bytes.increase(seed.small, seed.size);
            if end < limit {
                self.blocks[tail].addr = end;
                self.blocks[tail].size = limit - end;
                self.list_unmapped(tail);
                open = Some((segment, tail, limit));
            } else {
                let before = self.blocks[tail].prev;
                self.blocks[before].next = NONE;
                self.blocks.remove(tail);
                open = None;
            }
            previous = Some(seed);
        }
    }

    /// Checks the books against the blocks: coverage, order, merging, sets, statistics. For tests and after surprises;
    /// takes time proportional to the number of blocks.
    ///
    /// # Errors
    /// What is wrong.
    pub fn validate(&self) -> Result<(), String> {
        self.validate_segments()?;
        let mut counts = Stats { max_split_size: self.stats.rest.max_split_size, ..Stats::default() };
        let (mut live, mut free_blocks, mut unmapped) = (0, 0, 0);
        for (id, block) in self.blocks.iter() {
            let small = self.pools[block.pool as usize].small;
            match block.state {
                BlockState::Allocated | BlockState::PendingFree => {
                    live += 1;
                    if self.table.get(block.addr) != Some(id) {
                        return Err(format!("live block {:#x} is not in the table", block.addr));
                    }
                    counts.active.increase(small, 1);
                    counts.active_bytes.increase(small, block.size);
                    counts.requested_bytes.increase(small, block.requested);
                    if block.state == BlockState::Allocated {
                        counts.allocation.increase(small, 1);
                        counts.allocated_bytes.increase(small, block.size);
                    }
                    counts.reserved_bytes.increase(small, block.size);
                }
                BlockState::Free => {
                    free_blocks += 1;
                    counts.reserved_bytes.increase(small, block.size);
                    let key = Key { size: block.size, tie: self.tie_of(block), id };
                    let heap = self.pools[block.pool as usize].heap(block.stream);
                    if heap != Ok(block.heap) || block.small != small {
                        return Err(format!("free block {:#x} is in the wrong heap", block.addr));
                    }
                    let found = self.heaps[block.heap as usize].free.at_least(&self.blocks, key);
                    if found != Some(key) {
                        return Err(format!("free block {:#x} is not in its pool", block.addr));
                    }
                    if block.is_split() && !block.expandable {
                        counts.inactive_split.increase(small, 1);
                        counts.inactive_split_bytes.increase(small, block.size);
                    }
                }
                BlockState::Unmapped => {
                    unmapped += 1;
                    if self.heaps[block.heap as usize].unmapped.get(&block.addr) != Some(&id) {
                        return Err(format!("unmapped block {:#x} is not listed", block.addr));
                    }
                }
            }
        }
        let pooled: usize = self.heaps.iter().map(|heap| heap.free.len()).sum();
        let listed: usize = self.heaps.iter().map(|heap| heap.unmapped.len()).sum();
        if (live, free_blocks, unmapped) != (self.table.len(), pooled, listed) {
            return Err(format!(
                "{live} live, {free_blocks} free, {unmapped} unmapped blocks, but {} / {pooled} / {listed} listed",
                self.table.len()
            ));
        }
        for (_, segment) in self.segments.iter() {
            if segment.expandable.is_none() {
                counts.segment.increase(self.pools[segment.pool as usize].small, 1);
            }
        }
        let figures = |stats: &Stats| {
            [
                stats.allocation,
                stats.segment,
                stats.active,
                stats.inactive_split,
                stats.allocated_bytes,
                stats.reserved_bytes,
                stats.active_bytes,
                stats.inactive_split_bytes,
                stats.requested_bytes,
            ]
            .map(|array| [array.all.current, array.large_pool.current, array.small_pool.current])
        };
        let kept = self.stats.read();
        if figures(&counts) != figures(&kept) {
            return Err(format!("statistics {:?} differ from the blocks {:?}", figures(&kept), figures(&counts)));
        }
        if self.attribution().unallocated() + self.stats.allocated_bytes.current() != self.stats.reserved_bytes.current() {
            return Err("the attribution does not sum up to the reserved bytes".to_owned());
        }
        let queued: usize = self.events.iter().map(|events| events.queue.len()).sum();
        if queued != self.waiting {
            return Err(format!("{queued} events queued, {} counted", self.waiting));
        }
        Ok(())
    }

    fn validate_segments(&self) -> Result<(), String> {
        let mut spans = Vec::new();
        let mut seen = 0;
        for segment in self.segments() {
            let (mut at, mut mapped, mut last) = (segment.address, 0, None);
            let mut before = NONE;
            for block in self.blocks_of(segment.id) {
                seen += 1;
                if block.address != at || block.size == 0 || self.blocks[block.id.0].prev != before {
                    return Err(format!("block {:#x} does not follow {at:#x}", block.address));
                }
                if block.segment != segment.id
                    || block.stream != segment.stream
                    || block.pool != segment.pool
                    || block.small != segment.small
                {
                    return Err(format!("block {:#x} is not of its segment", block.address));
                }
                if last == Some(block.state) && matches!(block.state, BlockState::Free | BlockState::Unmapped) {
                    return Err(format!("block {:#x} should have been merged", block.address));
                }
                if block.state != BlockState::Unmapped {
                    mapped += block.size;
                }
                at += block.size;
                last = Some(block.state);
                before = block.id.0;
            }
            if at != segment.address + segment.size || mapped != segment.mapped {
                return Err(format!("segment {:#x} is not covered by its blocks", segment.address));
            }
            spans.push((segment.address, at));
        }
        spans.sort_unstable();
        if spans.windows(2).any(|pair| pair[0].1 > pair[1].0) {
            return Err("segments overlap".to_owned());
        }
        if seen != self.blocks.len() {
            return Err(format!("{seen} blocks in segments, {} in the slab", self.blocks.len()));
        }
        Ok(())
    }
}

fn check_seeds(seeds: &[SegmentSeed]) -> Result<(), AllocError> {
    let mut spans: Vec<(u64, u64)> = Vec::with_capacity(seeds.len());
    for seed in seeds {
        let bad = |why| Err(AllocError::BadState { address: seed.address, why });
        let Some(end) = seed.address.checked_add(seed.size).filter(|end| *end < 1 << 62) else { return bad("the segment is too large") };
        if seed.address == 0 || seed.size == 0 {
            return bad("the segment has no address or no bytes");
        }
        if seed.expandable && !seed.size.is_multiple_of(SMALL_BUFFER) {
            return bad("its mapped range is not whole pages of 2 MiB");
        }
        spans.push((seed.address, end));
        let mut at = seed.address;
        let mut free_before = false;
        for block in &seed.blocks {
            if block.address != at || block.size == 0 || block.size > end - at {
                return bad("its blocks do not follow each other");
            }
            if block.state == BlockState::Unmapped {
                return bad("it has an unmapped block");
            }
            let free = block.state == BlockState::Free;
            if free && free_before {
                return bad("two free blocks lie side by side");
            }
            free_before = free;
            at += block.size;
        }
        if at != end {
            return bad("its blocks do not cover it");
        }
    }
    spans.sort_unstable();
    match spans.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(AllocError::BadState { address: pair[1].0, why: "two segments overlap" }),
        None => Ok(()),
    }
}

impl<D: Driver> Drop for DeviceAllocator<D> {
    fn drop(&mut self) {
        let _ = self.driver.device_synchronize();
        let DeviceAllocator { driver, segments, events, spare_events, uncached, .. } = self;
        let ids: Vec<u32> = segments.iter().map(|(id, _)| id).collect();
        for id in ids {
            let segment = &mut segments[id];
            match &mut segment.expandable {
                Some(expandable) => expandable.abandon(driver),
                None => {
                    let _ = driver.mem_free(segment.addr);
                }
            }
        }
        for event in events.iter().flat_map(|queue| queue.queue.iter()).map(|(event, _)| *event).chain(spare_events.drain(..)) {
            let _ = driver.event_destroy(event);
        }
        for address in uncached.keys() {
            let _ = driver.mem_free(*address);
        }
    }
}
