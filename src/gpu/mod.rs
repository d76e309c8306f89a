//! The GPU side: drivers, the caching allocator, traces.

/// Recorded snapshots: reader, replay, what-if.
pub mod trace;
/// Who holds the memory of a snapshot, and why the rest is not free: figures, timeline, page.
pub mod summary;
/// Scripted scenarios on the simulated GPU.
pub mod simulate;
