//! The modules under fuzzing, compiled from their sources.
#[path = "../../src/error.rs"]
pub mod error;
#[path = "../../src/gpu/mod.rs"]
pub mod gpu;
#[path = "../../src/report.rs"]
pub mod report;
