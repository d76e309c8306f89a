//! A caching allocator that behaves as PyTorch's native CUDA allocator does, address for address.
//!
//! Memory is taken from a [`Driver`](crate::gpu::driver::Driver) in *segments*, cut into *blocks*, and kept when freed. The rules follow
//! `c10/cuda/CUDACachingAllocator.cpp`; which rule holds in which torch version, and what proves it, is a [`Policy`].
//!
//! * [`DeviceAllocator`] is the allocator itself: single-threaded, for replay and simulation.
//! * [`CachingAllocator`] is a handle that can be shared between threads: one lock a device.
//!
//! In the steady state (nothing is taken from or given back to the driver, and no more blocks are alive, free or waiting
//! at once than before) neither of them uses the heap.

mod block;
/// Settings: `PYTORCH_CUDA_ALLOC_CONF` and the like.
pub mod config;
mod core;
mod history;
/// Out-of-memory errors and the attribution of reserved memory.
pub mod oom;
/// Rules by torch version.
pub mod policy;
mod pool;
mod segment;
mod shared;
/// Rounding and segment sizes.
pub mod sizes;
/// The state in PyTorch's snapshot layout, as values, JSON and pickle.
pub mod snapshot;
/// Statistics under PyTorch's names.
pub mod stats;
/// The text of `torch.cuda.memory_summary`.
pub mod summary;
#[cfg(test)]
mod tests;

pub use block::{BlockId, BlockState, SegmentId};
pub use config::AllocConfig;
pub use core::{
    Allocation, BlockInfo, BlockSeed, DeviceAllocator, PoolId, PoolOptions, Released, SegmentInfo, SegmentSeed, StreamFilter, Usage,
};
pub use history::{Action, TraceEntry};
pub use oom::{AllocError, Attribution, Holder, OutOfMemory, Pinned, Step};
pub use policy::{Evidence, Policy, TieBreak, TorchVersion};
pub use shared::CachingAllocator;
pub use stats::{Stat, StatArray, Stats};
