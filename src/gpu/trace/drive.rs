//! Two drivers without memory behind their addresses: one answers as a recording says, one as a device of a given size might.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use crate::gpu::driver::{Call, DeviceProperties, Driver, DriverError, DriverResult, EventId, MemHandle, MemInfo, StreamId, code};

const MIB: u64 = 1 << 20;

/// The calls that addresses alone cannot serve, and those that need no answer.
macro_rules! no_memory_behind {
    () => {
        fn copy_to_device(&self, _: u64, _: &[u8]) -> DriverResult<()> {
            Err(DriverError::new(Call::MemcpyHtoD, code::NOT_SUPPORTED))
        }
        fn copy_to_host(&self, _: &mut [u8], _: u64) -> DriverResult<()> {
            Err(DriverError::new(Call::MemcpyDtoH, code::NOT_SUPPORTED))
        }
        fn copy_on_device(&self, _: u64, _: u64, _: u64, _: StreamId) -> DriverResult<()> {
            Err(DriverError::new(Call::MemcpyDtoD, code::NOT_SUPPORTED))
        }
        fn memset_d8(&self, _: u64, _: u8, _: u64, _: StreamId) -> DriverResult<()> {
            Err(DriverError::new(Call::MemsetD8, code::NOT_SUPPORTED))
        }
        fn memset_d32(&self, _: u64, _: u32, _: u64, _: StreamId) -> DriverResult<()> {
            Err(DriverError::new(Call::MemsetD32, code::NOT_SUPPORTED))
        }
        fn granularity(&self) -> DriverResult<u64> {
            Ok(2 * MIB)
        }
        fn stream_create(&self) -> DriverResult<StreamId> {
            Err(DriverError::new(Call::StreamCreate, code::NOT_SUPPORTED))
        }
        fn stream_destroy(&self, _: StreamId) -> DriverResult<()> {
            Err(DriverError::new(Call::StreamDestroy, code::NOT_SUPPORTED))
        }
        fn stream_synchronize(&self, _: StreamId) -> DriverResult<()> {
            Ok(())
        }
        fn stream_query(&self, _: StreamId) -> DriverResult<bool> {
            Ok(true)
        }
        fn device_synchronize(&self) -> DriverResult<()> {
            Ok(())
        }
        fn event_create(&self) -> DriverResult<EventId> {
            Ok(EventId(1))
        }
        fn event_record(&self, _: EventId, _: StreamId) -> DriverResult<()> {
            Ok(())
        }
        fn event_query(&self, _: EventId) -> DriverResult<bool> {
            Ok(true)
        }
        fn event_synchronize(&self, _: EventId) -> DriverResult<()> {
            Ok(())
        }
        fn event_destroy(&self, _: EventId) -> DriverResult<()> {
            Ok(())
        }
    };
}

fn properties(total: u64) -> DeviceProperties {
    DeviceProperties {
        name: "recorded device".to_owned(),
        ordinal: 0,
        total_memory: total,
        compute_capability: (9, 0),
        virtual_memory: true,
        gpu_direct_rdma_vmm: false,
    }
}

/// What the recording says about the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    Alloc,
    Free,
    Map,
    Unmap,
}

/// One driver event of the recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    pub told: Told,
    pub addr: u64,
    pub size: u64,
}

/// How the allocator's driver calls compare with the recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Calls {
    /// `segment_alloc` at the recorded moment and of the recorded size.
    pub allocs: u64,
    /// `segment_free` of a recorded segment at the recorded release point.
    pub frees: u64,
    /// Those of `frees` in the recorded order.
    pub frees_in_order: u64,
    /// `segment_map` of the recorded address and size.
    pub maps: u64,
    /// `segment_unmap` of the recorded range.
    pub unmaps: u64,
    /// Calls that the recording does not have at that point.
    pub extra: u64,
}

#[derive(Debug, Default)]
struct Script {
    queue: VecDeque<Event>,
    calls: Calls,
    /// Next made-up address, for calls that the recording does not have.
    made_up: u64,
    /// Bytes of the front `Unmap` that were unmapped page by page so far.
    unmapped: u64,
    /// The recorded request failed: whatever is not in the queue runs out of memory.
    failing: bool,
    /// What the model holds: address to bytes. After a difference a recorded address may still be taken in the model.
    live: BTreeMap<u64, u64>,
    /// Where reserved address ranges begin.
    ranges: HashSet<u64>,
    difference: Option<String>,
}

impl Script {
    fn differ(&mut self, text: impl FnOnce() -> String) {
        self.calls.extra += 1;
        if self.difference.is_none() {
            self.difference = Some(text());
        }
    }

    fn make_up(&mut self, bytes: u64) -> u64 {
        let addr = self.made_up;
        self.made_up += bytes.div_ceil(2 * MIB) * 2 * MIB + 2 * MIB;
        addr
    }

    /// Puts `bytes` at the recorded address, or elsewhere if the model still holds something there.
    fn place(&mut self, told: Option<u64>, bytes: u64) -> u64 {
        let addr = match told {
            Some(addr) if !overlaps(&self.live, addr, bytes) => addr,
            _ => self.make_up(bytes),
        };
        self.live.insert(addr, bytes);
        addr
    }
}

/// Answers as the recording says: addresses come from it, and a call that it does not have at this point is counted.
///
/// A request while the recording shows memory going back first is answered with "out of memory", since that is why the recorded
/// allocator gave it back.
#[derive(Debug)]
pub(crate) struct Recorded {
    script: RefCell<Script>,
    total: u64,
    next_handle: Cell<u64>,
}

/// Made-up addresses begin here, above all real ones.
pub(crate) const MADE_UP: u64 = 1 << 60;

impl Recorded {
    pub fn new(total: u64) -> Self {
        Recorded { script: RefCell::new(Script { made_up: MADE_UP, ..Script::default() }), total, next_handle: Cell::new(1) }
    }

    /// Counts segments that a restored state has.
    pub fn adopt(&self, segments: impl IntoIterator<Item = (u64, u64)>) {
        self.script.borrow_mut().live.extend(segments);
    }

    /// The driver events that the recording has for what the allocator does next, and whether that failed.
    pub fn load(&self, events: impl IntoIterator<Item = Event>, failing: bool) {
        let mut script = self.script.borrow_mut();
        script.queue.clear();
        script.unmapped = 0;
        script.failing = failing;
        script.queue.extend(events);
    }

    /// Ends what [`load`](Self::load) began: events that the allocator did not make.
    pub fn unload(&self) -> Vec<Event> {
        let mut script = self.script.borrow_mut();
        script.unmapped = 0;
        script.failing = false;
        script.queue.drain(..).collect()
    }

    pub fn calls(&self) -> Calls {
        self.script.borrow().calls
    }

    /// The first call that the recording does not have since the last time.
    pub fn take_difference(&self) -> Option<String> {
        self.script.borrow_mut().difference.take()
    }
}

impl Driver for Recorded {
    no_memory_behind!();

    fn properties(&self) -> DeviceProperties {
        properties(self.total)
    }

    fn mem_get_info(&self) -> DriverResult<MemInfo> {
        Ok(MemInfo { free: self.total, total: self.total })
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<u64> {
        let script = &mut *self.script.borrow_mut();
        match script.queue.front().copied() {
            Some(Event { told: Told::Alloc, addr, size }) if size == bytes => {
                script.queue.pop_front();
                script.calls.allocs += 1;
                Ok(script.place(Some(addr), bytes))
            }
            Some(Event { told: Told::Free | Told::Unmap, .. }) => Err(DriverError::new(Call::MemAlloc, code::OUT_OF_MEMORY)),
            Some(Event { told: Told::Alloc, size, .. }) => {
                script.queue.pop_front();
                script.differ(|| format!("the model took a segment of {bytes} bytes, the recording one of {size}"));
                Ok(script.place(None, bytes))
            }
            None if script.failing => Err(DriverError::new(Call::MemAlloc, code::OUT_OF_MEMORY)),
            _ => {
                script.differ(|| format!("the model took a segment of {bytes} bytes, the recording none"));
                Ok(script.place(None, bytes))
            }
        }
    }

    fn mem_free(&self, address: u64) -> DriverResult<()> {
        let script = &mut *self.script.borrow_mut();
        script.live.remove(&address);
        let is = |event: &Event| event.told == Told::Free && event.addr == address;
        match script.queue.iter().position(is) {
            Some(at) => {
                script.calls.frees += 1;
                if at == 0 {
                    script.calls.frees_in_order += 1;
                } else if script.difference.is_none() {
                    script.difference = Some(format!("the model gave the segment at {address:#x} back earlier than the recording"));
                }
                script.queue.remove(at);
            }
            None => script.differ(|| format!("the model gave the segment at {address:#x} back, the recording kept it")),
        }
        Ok(())
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<u64> {
        let script = &mut *self.script.borrow_mut();
        // How long the recorded range was is not told, so only its beginning counts.
        let addr = match script.queue.front() {
            Some(Event { told: Told::Map, addr, .. }) if !script.ranges.contains(addr) => *addr,
            _ => script.make_up(bytes),
        };
        script.ranges.insert(addr);
        Ok(addr)
    }

    fn address_free(&self, address: u64, _: u64) -> DriverResult<()> {
        self.script.borrow_mut().ranges.remove(&address);
        Ok(())
    }

    fn mem_create(&self, _: u64) -> DriverResult<MemHandle> {
        let script = self.script.borrow();
        let over = match script.queue.front() {
            Some(event) => matches!(event.told, Told::Free | Told::Unmap),
            None => script.failing,
        };
        drop(script);
        if over {
            return Err(DriverError::new(Call::MemCreate, code::OUT_OF_MEMORY));
        }
        let handle = self.next_handle.get();
        self.next_handle.set(handle + 1);
        Ok(MemHandle(handle))
    }

    fn mem_release(&self, _: MemHandle) -> DriverResult<()> {
        Ok(())
    }

    fn mem_map(&self, _: u64, _: u64, _: MemHandle) -> DriverResult<()> {
        Ok(())
    }

    fn mem_unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let script = &mut *self.script.borrow_mut();
        match script.queue.front().copied() {
            Some(Event { told: Told::Unmap, addr, size }) if addr + script.unmapped == address && script.unmapped + bytes <= size => {
                script.unmapped += bytes;
                if script.unmapped == size {
                    script.unmapped = 0;
                    script.calls.unmaps += 1;
                    script.queue.pop_front();
                }
            }
            _ => script.differ(|| format!("the model unmapped {bytes} bytes at {address:#x}, the recording did not at this point")),
        }
        Ok(())
    }

    fn mem_set_access(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let script = &mut *self.script.borrow_mut();
        match script.queue.front().copied() {
            Some(Event { told: Told::Map, addr, size }) if addr == address && size == bytes => {
                script.queue.pop_front();
                script.calls.maps += 1;
            }
            other => {
                if let Some(Event { told: Told::Map, .. }) = other {
                    script.queue.pop_front();
                }
                script.differ(|| format!("the model mapped {bytes} bytes at {address:#x}, the recording did not at this point"));
            }
        }
        Ok(())
    }
}

/// In which order a device hands out addresses. Ties between free blocks of one size depend on it, and no recording of one run
/// says what the next one gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AddressOrder {
    /// As recorded for segments of the same size, then ascending.
    Recorded,
    /// Every new range above the ones before.
    Ascending,
    /// Every new range below the ones before.
    Descending,
    /// Scattered, by a seed.
    Scattered(u64),
}

impl std::fmt::Display for AddressOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            AddressOrder::Recorded => f.write_str("recorded"),
            AddressOrder::Ascending => f.write_str("ascending"),
            AddressOrder::Descending => f.write_str("descending"),
            AddressOrder::Scattered(seed) => write!(f, "scattered {seed}"),
        }
    }
}

#[derive(Debug)]
struct ModelState {
    used: u64,
    next: u64,
    below: u64,
    count: u64,
    reserve: u64,
    handle: u64,
    /// Live driver allocations: address to bytes.
    live: BTreeMap<u64, u64>,
    /// Recorded addresses not handed out yet, by size.
    recorded: HashMap<u64, VecDeque<u64>>,
    /// Mapped pages that a handle stands behind; others are taken over from a recorded state.
    mapped: HashSet<u64>,
    handles: HashMap<u64, u64>,
}

/// A device of a given capacity.
#[derive(Debug)]
pub(crate) struct Model {
    capacity: Option<u64>,
    order: AddressOrder,
    state: RefCell<ModelState>,
}

/// Where [`AddressOrder::Ascending`] begins: above real device addresses of recordings, so that restored segments lie below.
const ABOVE: u64 = 1 << 48;

impl Model {
    /// `capacity` in bytes, `None` for as much as is asked for. `recorded`: sizes and addresses of recorded segments, in order.
    pub fn new(capacity: Option<u64>, order: AddressOrder, recorded: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let mut by_size: HashMap<u64, VecDeque<u64>> = HashMap::new();
        if order == AddressOrder::Recorded {
            for (size, addr) in recorded {
                by_size.entry(size).or_default().push_back(addr);
            }
        }
        Model {
            capacity,
            order,
            state: RefCell::new(ModelState {
                used: 0,
                next: ABOVE,
                below: ABOVE,
                count: 0,
                reserve: 1 << 58,
                handle: 0,
                live: BTreeMap::new(),
                recorded: by_size,
                mapped: HashSet::new(),
                handles: HashMap::new(),
            }),
        }
    }

    /// Counts segments that a restored state has.
    pub fn adopt(&self, segments: impl IntoIterator<Item = (u64, u64, bool)>) {
        let state = &mut *self.state.borrow_mut();
        for (addr, size, expandable) in segments {
            state.used += size;
            if !expandable {
                state.live.insert(addr, size);
            }
        }
    }

    fn take(&self, state: &mut ModelState, bytes: u64, call: Call) -> DriverResult<()> {
        match state.used.checked_add(bytes) {
            Some(used) if self.capacity.is_none_or(|capacity| used <= capacity) => {
                state.used = used;
                Ok(())
            }
            _ => Err(DriverError::new(call, code::OUT_OF_MEMORY)),
        }
    }
}

fn overlaps(live: &BTreeMap<u64, u64>, addr: u64, bytes: u64) -> bool {
    live.range(..addr.saturating_add(bytes)).next_back().is_some_and(|(start, size)| start + size > addr)
}

impl Driver for Model {
    no_memory_behind!();

    fn properties(&self) -> DeviceProperties {
        properties(self.capacity.unwrap_or(1 << 44))
    }

    fn mem_get_info(&self) -> DriverResult<MemInfo> {
        let total = self.capacity.unwrap_or(1 << 44);
        Ok(MemInfo { free: total.saturating_sub(self.state.borrow().used), total })
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<u64> {
        let state = &mut *self.state.borrow_mut();
        self.take(state, bytes, Call::MemAlloc)?;
        let room = bytes.div_ceil(2 * MIB) * 2 * MIB;
        let told = state.recorded.get_mut(&bytes).and_then(VecDeque::pop_front);
        let addr = match (told.filter(|addr| !overlaps(&state.live, *addr, bytes)), self.order) {
            (Some(addr), _) => addr,
            (None, AddressOrder::Descending) => {
                // Below everything that is there, and below what was handed out before.
                state.below = match state.below.checked_sub(room).filter(|addr| *addr > 0 && !overlaps(&state.live, *addr, room)) {
                    Some(addr) => addr,
                    None => {
                        let lowest = state.live.keys().next().copied().unwrap_or(ABOVE).min(state.below);
                        lowest.checked_sub(room).unwrap_or(ABOVE)
                    }
                };
                state.below
            }
            (None, AddressOrder::Scattered(seed)) if state.count < (1 << 20) - 1 => {
                // An odd factor permutes 20-bit numbers; each gets 2^38 bytes of its own.
                state.count += 1;
                let scattered = (state.count ^ (seed & 0xFFFF)).wrapping_mul(0x9E37_79B9 ^ (seed << 1 | 1) | 1) & 0xF_FFFF;
                (1 << 59) + (scattered << 38)
            }
            (None, _) => {
                let addr = state.next;
                state.next += room;
                addr
            }
        };
        state.live.insert(addr, bytes);
        Ok(addr)
    }

    fn mem_free(&self, address: u64) -> DriverResult<()> {
        let state = &mut *self.state.borrow_mut();
        match state.live.remove(&address) {
            Some(bytes) => {
                state.used = state.used.saturating_sub(bytes);
                Ok(())
            }
            None => Err(DriverError::new(Call::MemFree, code::INVALID_VALUE)),
        }
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<u64> {
        let state = &mut *self.state.borrow_mut();
        let addr = state.reserve;
        state.reserve = state.reserve.checked_add(bytes).ok_or(DriverError::new(Call::MemAddressReserve, code::OUT_OF_MEMORY))?;
        Ok(addr)
    }

    fn address_free(&self, _: u64, _: u64) -> DriverResult<()> {
        Ok(())
    }

    fn mem_create(&self, bytes: u64) -> DriverResult<MemHandle> {
        let state = &mut *self.state.borrow_mut();
        self.take(state, bytes, Call::MemCreate)?;
        state.handle += 1;
        state.handles.insert(state.handle, bytes);
        Ok(MemHandle(state.handle))
    }

    fn mem_release(&self, handle: MemHandle) -> DriverResult<()> {
        let state = &mut *self.state.borrow_mut();
        let bytes = state.handles.remove(&handle.0).ok_or(DriverError::new(Call::MemRelease, code::INVALID_HANDLE))?;
        state.used = state.used.saturating_sub(bytes);
        Ok(())
    }

    fn mem_map(&self, address: u64, _: u64, _: MemHandle) -> DriverResult<()> {
        self.state.borrow_mut().mapped.insert(address);
        Ok(())
    }

    fn mem_unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let state = &mut *self.state.borrow_mut();
        if !state.mapped.remove(&address) {
            state.used = state.used.saturating_sub(bytes);
        }
        Ok(())
    }

    fn mem_set_access(&self, _: u64, _: u64) -> DriverResult<()> {
        Ok(())
    }
}
