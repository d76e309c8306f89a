//! The kernels of the memory test, and what a driver must be able to do to run them.
//!
//! What each kernel does is written once in [`host`], as plain Rust: the simulated GPU runs that, and the CUDA C source is
//! held against it.

/// Names, arguments, patterns and the reference implementation.
pub mod host;

/// The CUDA source and its PTX against the reference.
#[cfg(test)]
mod source;

use std::sync::Arc;
use std::time::Duration;

pub use host::{Kernel, Launch, Pattern};

use super::driver::{Driver, DriverResult, EventId, StreamId};

/// Figures of a device that decide how kernels are launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Shape {
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of the L2 cache; 0 where unknown.
    pub l2_bytes: u64,
}

/// A driver that runs the kernels of the memory test and has a clock.
pub trait Kernels: Driver {
    /// Figures of the device. Cheap; never fails.
    fn shape(&self) -> Shape;

    /// Queues a kernel on `stream`. The first launch loads the module.
    ///
    /// # Errors
    /// A status code of `cuModuleLoadData`, `cuModuleGetFunction` or `cuLaunchKernel`. What goes wrong while the kernel runs shows in a later call.
    fn launch(&self, launch: &Launch, stream: StreamId) -> DriverResult<()>;

    /// Makes an event that takes the time. It is recorded, queried and destroyed like any other.
    ///
    /// # Errors
    /// A status code of `cuEventCreate`.
    fn timed_event_create(&self) -> DriverResult<EventId>;

    /// Milliseconds between two timed events that are both done (`cuEventElapsedTime`).
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_READY` before that.
    fn event_elapsed_ms(&self, start: EventId, end: EventId) -> DriverResult<f32>;

    /// Time since some fixed moment, for budgets and time limits. A simulated device has a clock of its own.
    fn now(&self) -> Duration;

    /// Lets `time` pass on that clock: a real driver sleeps.
    fn pause(&self, time: Duration);
}

macro_rules! forward {
    ($($target:ty),*) => {$(
        impl<K: Kernels + ?Sized> Kernels for $target {
            fn shape(&self) -> Shape { (**self).shape() }
            fn launch(&self, launch: &Launch, stream: StreamId) -> DriverResult<()> { (**self).launch(launch, stream) }
            fn timed_event_create(&self) -> DriverResult<EventId> { (**self).timed_event_create() }
            fn event_elapsed_ms(&self, start: EventId, end: EventId) -> DriverResult<f32> { (**self).event_elapsed_ms(start, end) }
            fn now(&self) -> Duration { (**self).now() }
            fn pause(&self, time: Duration) { (**self).pause(time) }
        }
    )*};
}

forward!(&K, Box<K>, Arc<K>);
