//! The allocator behind a lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::config::AllocConfig;
use super::core::{Allocation, DeviceAllocator, PoolId, PoolOptions, Released, StreamFilter};
use super::oom::AllocError;
use super::policy::Policy;
use super::snapshot::Snapshot;
use super::stats::Stats;
use crate::gpu::driver::{Driver, StreamId};

/// One device's allocator, shared between threads by reference: one lock a device. Every method is
/// [`DeviceAllocator`]'s of the same name.
pub struct CachingAllocator<D: Driver> {
    device: Mutex<DeviceAllocator<D>>,
}

impl<D: Driver> CachingAllocator<D> {
    /// An empty allocator.
    pub fn new(driver: D, policy: Policy, config: AllocConfig) -> Self {
        DeviceAllocator::new(driver, policy, config).into()
    }

    /// The allocator itself, locked for as long as the guard lives.
    pub fn lock(&self) -> MutexGuard<'_, DeviceAllocator<D>> {
        // Every method leaves the books right before it can panic in foreign code (driver, callback).
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`DeviceAllocator::malloc`].
    ///
    /// # Errors
    /// As there.
    pub fn malloc(&self, requested: u64, stream: StreamId) -> Result<Allocation, AllocError> {
        self.lock().malloc(requested, stream)
    }

    /// See [`DeviceAllocator::malloc_tagged`].
    ///
    /// # Errors
    /// As there.
    pub fn malloc_tagged(&self, requested: u64, stream: StreamId, tag: u64) -> Result<Allocation, AllocError> {
        self.lock().malloc_tagged(requested, stream, tag)
    }

    /// See [`DeviceAllocator::free`].
    ///
    /// # Errors
    /// As there.
    pub fn free(&self, address: u64) -> Result<(), AllocError> {
        self.lock().free(address)
    }

    /// See [`DeviceAllocator::record_stream`].
    ///
    /// # Errors
    /// As there.
    pub fn record_stream(&self, address: u64, stream: StreamId) -> Result<(), AllocError> {
        self.lock().record_stream(address, stream)
    }

    /// See [`DeviceAllocator::process_events`].
    ///
    /// # Errors
    /// As there.
    pub fn process_events(&self) -> Result<(), AllocError> {
        self.lock().process_events()
    }

    /// See [`DeviceAllocator::empty_cache`].
    ///
    /// # Errors
    /// As there.
    pub fn empty_cache(&self) -> Result<Vec<Released>, AllocError> {
        self.lock().empty_cache()
    }

    /// See [`DeviceAllocator::set_memory_fraction`].
    ///
    /// # Errors
    /// As there.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<(), AllocError> {
        self.lock().set_memory_fraction(fraction)
    }

    /// See [`DeviceAllocator::create_pool`].
    pub fn create_pool(&self, options: PoolOptions) -> PoolId {
        self.lock().create_pool(options)
    }

    /// See [`DeviceAllocator::begin_allocate`].
    ///
    /// # Errors
    /// As there.
    pub fn begin_allocate(&self, pool: PoolId, filter: StreamFilter, graph: bool) -> Result<(), AllocError> {
        self.lock().begin_allocate(pool, filter, graph)
    }

    /// See [`DeviceAllocator::end_allocate`].
    ///
    /// # Errors
    /// As there.
    pub fn end_allocate(&self, pool: PoolId) -> Result<(), AllocError> {
        self.lock().end_allocate(pool)
    }

    /// See [`DeviceAllocator::release_pool`].
    ///
    /// # Errors
    /// As there.
    pub fn release_pool(&self, pool: PoolId) -> Result<(), AllocError> {
        self.lock().release_pool(pool)
    }

    /// See [`DeviceAllocator::stats`].
    pub fn stats(&self) -> Stats {
        self.lock().stats()
    }

    /// See [`DeviceAllocator::reset_peak`].
    pub fn reset_peak(&self) {
        self.lock().reset_peak();
    }

    /// See [`DeviceAllocator::reset_accumulated`].
    pub fn reset_accumulated(&self) {
        self.lock().reset_accumulated();
    }

    /// See [`DeviceAllocator::memory_summary`].
    pub fn memory_summary(&self, abbreviated: bool) -> String {
        self.lock().memory_summary(abbreviated)
    }

    /// See [`DeviceAllocator::snapshot`].
    pub fn snapshot(&self) -> Snapshot {
        self.lock().snapshot()
    }
}

impl<D: Driver> From<DeviceAllocator<D>> for CachingAllocator<D> {
    fn from(device: DeviceAllocator<D>) -> Self {
        CachingAllocator { device: Mutex::new(device) }
    }
}
