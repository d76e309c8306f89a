//! The memory self-test: device memory taken through the caching allocator, written and read back by kernels.

/// The driver's own view of a card.
pub mod health;
