//! A driver that keeps books of its own: what was really given out and is still held, beside what the allocator believes.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::gpu::driver::{Call, DeviceProperties, Driver, DriverError, DriverResult, EventId, MemHandle, MemInfo, StreamId};
use crate::gpu::kernels::{Kernels, Launch, Shape};

#[derive(Debug, Default)]
struct Books {
    /// From `mem_alloc`: address to bytes.
    allocations: BTreeMap<u64, u64>,
    /// From `mem_create`, until released: bytes.
    handles: HashMap<MemHandle, u64>,
    /// Address to bytes and handle.
    mappings: BTreeMap<u64, (u64, MemHandle)>,
    /// Address to bytes.
    reservations: BTreeMap<u64, u64>,
    /// Errors that calls returned, each once. Lack of memory is none: allocators try again.
    errors: Vec<DriverError>,
}

/// What is held of the driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Outstanding {
    /// Allocations not freed.
    pub allocations: u64,
    /// Handles not released.
    pub handles: u64,
    /// Mappings not undone.
    pub mappings: u64,
    /// Address ranges not given back.
    pub reservations: u64,
    /// Bytes of allocations and handles.
    pub bytes: u64,
}

/// A driver with books. Every call goes through.
pub(super) struct Ledger<K> {
    driver: K,
    books: Mutex<Books>,
}

impl<K: Kernels> Ledger<K> {
    pub(super) fn new(driver: K) -> Self {
        Ledger { driver, books: Mutex::default() }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the error of a call: whoever made it may have gone on in spite of it.
    fn noted<T>(&self, result: DriverResult<T>) -> DriverResult<T> {
        if let Err(error) = &result {
            let recovered = error.is_out_of_memory() && matches!(error.call, Call::MemAlloc | Call::MemCreate);
            let mut books = self.books();
            if !recovered && !books.errors.contains(error) {
                books.errors.push(*error);
            }
        }
        result
    }

    /// Every error that a call returned so far, each once.
    pub(super) fn errors(&self) -> Vec<DriverError> {
        self.books().errors.clone()
    }

    /// An error that is an answer and no fault.
    pub(super) fn forgive(&self, error: &DriverError) {
        self.books().errors.retain(|other| other != error);
    }

    pub(super) fn outstanding(&self) -> Outstanding {
        let books = self.books();
        Outstanding {
            allocations: books.allocations.len() as u64,
            handles: books.handles.len() as u64,
            mappings: books.mappings.len() as u64,
            reservations: books.reservations.len() as u64,
            bytes: books.allocations.values().sum::<u64>() + books.handles.values().sum::<u64>(),
        }
    }

    /// Whether the driver gave out the whole range: inside one allocation, or inside mappings side by side.
    pub(super) fn grants(&self, address: u64, bytes: u64) -> bool {
        let books = self.books();
        let end = address.saturating_add(bytes);
        if let Some((start, size)) = books.allocations.range(..=address).next_back()
            && end <= start + size
        {
            return true;
        }
        let mut at = address;
        while at < end {
            match books.mappings.range(..=at).next_back() {
                Some((start, (size, _))) if at < start + size => at = start + size,
                _ => return false,
            }
        }
        true
    }

    /// Whether two addresses were mapped to one piece of memory.
    pub(super) fn same_memory(&self, a: u64, b: u64) -> bool {
        let books = self.books();
        let place = |address: u64| {
            let (start, (size, handle)) = books.mappings.range(..=address).next_back()?;
            (address - start < *size).then_some((*handle, address - start))
        };
        place(a).is_some() && place(a) == place(b)
    }
}

impl<K: Kernels> Driver for Ledger<K> {
    fn properties(&self) -> DeviceProperties {
        self.driver.properties()
    }
    fn mem_get_info(&self) -> DriverResult<MemInfo> {
        self.noted(self.driver.mem_get_info())
    }
    fn mem_alloc(&self, bytes: u64) -> DriverResult<u64> {
        let address = self.noted(self.driver.mem_alloc(bytes))?;
        self.books().allocations.insert(address, bytes);
        Ok(address)
    }
    fn mem_free(&self, address: u64) -> DriverResult<()> {
        self.noted(self.driver.mem_free(address))?;
        self.books().allocations.remove(&address);
        Ok(())
    }
    fn copy_to_device(&self, to: u64, from: &[u8]) -> DriverResult<()> {
        self.noted(self.driver.copy_to_device(to, from))
    }
    fn copy_to_host(&self, to: &mut [u8], from: u64) -> DriverResult<()> {
        self.noted(self.driver.copy_to_host(to, from))
    }
    fn copy_on_device(&self, to: u64, from: u64, bytes: u64, stream: StreamId) -> DriverResult<()> {
        self.noted(self.driver.copy_on_device(to, from, bytes, stream))
    }
    fn memset_d8(&self, to: u64, value: u8, count: u64, stream: StreamId) -> DriverResult<()> {
        self.noted(self.driver.memset_d8(to, value, count, stream))
    }
    fn memset_d32(&self, to: u64, value: u32, count: u64, stream: StreamId) -> DriverResult<()> {
        self.noted(self.driver.memset_d32(to, value, count, stream))
    }
    fn granularity(&self) -> DriverResult<u64> {
        self.noted(self.driver.granularity())
    }
    fn address_reserve(&self, bytes: u64) -> DriverResult<u64> {
        let address = self.noted(self.driver.address_reserve(bytes))?;
        self.books().reservations.insert(address, bytes);
        Ok(address)
    }
    fn address_free(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.noted(self.driver.address_free(address, bytes))?;
        self.books().reservations.remove(&address);
        Ok(())
    }
    fn mem_create(&self, bytes: u64) -> DriverResult<MemHandle> {
        let handle = self.noted(self.driver.mem_create(bytes))?;
        self.books().handles.insert(handle, bytes);
        Ok(handle)
    }
    fn mem_release(&self, handle: MemHandle) -> DriverResult<()> {
        self.noted(self.driver.mem_release(handle))?;
        self.books().handles.remove(&handle);
        Ok(())
    }
    fn mem_map(&self, address: u64, bytes: u64, handle: MemHandle) -> DriverResult<()> {
        self.noted(self.driver.mem_map(address, bytes, handle))?;
        self.books().mappings.insert(address, (bytes, handle));
        Ok(())
    }
    fn mem_unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.noted(self.driver.mem_unmap(address, bytes))?;
        self.books().mappings.retain(|start, _| !(address..address.saturating_add(bytes)).contains(start));
        Ok(())
    }
    fn mem_set_access(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.noted(self.driver.mem_set_access(address, bytes))
    }
    fn stream_create(&self) -> DriverResult<StreamId> {
        self.noted(self.driver.stream_create())
    }
    fn stream_destroy(&self, stream: StreamId) -> DriverResult<()> {
        self.noted(self.driver.stream_destroy(stream))
    }
    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()> {
        self.noted(self.driver.stream_synchronize(stream))
    }
    fn stream_query(&self, stream: StreamId) -> DriverResult<bool> {
        self.noted(self.driver.stream_query(stream))
    }
    fn device_synchronize(&self) -> DriverResult<()> {
        self.noted(self.driver.device_synchronize())
    }
    fn event_create(&self) -> DriverResult<EventId> {
        self.noted(self.driver.event_create())
    }
    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.noted(self.driver.event_record(event, stream))
    }
    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        self.noted(self.driver.event_query(event))
    }
    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        self.noted(self.driver.event_synchronize(event))
    }
    fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        self.noted(self.driver.event_destroy(event))
    }
    fn close(&self) -> Vec<DriverError> {
        self.driver.close()
    }
}

impl<K: Kernels> Kernels for Ledger<K> {
    fn shape(&self) -> Shape {
        self.driver.shape()
    }
    fn launch(&self, launch: &Launch, stream: StreamId) -> DriverResult<()> {
        self.noted(self.driver.launch(launch, stream))
    }
    fn timed_event_create(&self) -> DriverResult<EventId> {
        self.noted(self.driver.timed_event_create())
    }
    fn event_elapsed_ms(&self, start: EventId, end: EventId) -> DriverResult<f32> {
        self.noted(self.driver.event_elapsed_ms(start, end))
    }
    fn now(&self) -> Duration {
        self.driver.now()
    }
    fn pause(&self, time: Duration) {
        self.driver.pause(time);
    }
}
