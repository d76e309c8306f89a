//! The GPU side: drivers, the caching allocator and what can be told from recorded traces. Knows nothing of conda.

/// PyTorch's caching allocator over any [`driver::Driver`].
pub mod alloc;
/// Device memory, virtual memory management, streams and events, real or simulated.
pub mod driver;
/// Scripted scenarios on the simulated GPU.
pub mod simulate;
/// Who holds the memory of a snapshot, and why the rest is not free: figures, timeline, page.
pub mod summary;
/// Recorded snapshots: reader, replay, what-if.
pub mod trace;
