//! The GPU side: drivers, the caching allocator, traces.

/// Recorded snapshots: reader, replay, what-if.
pub mod trace;
