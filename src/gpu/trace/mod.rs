//! Recorded allocator snapshots: reading them, replaying them through the caching allocator, and asking what another
//! configuration would have done.
//!
//! ```text
//! file ─ read ─> Snapshot ─ start ─> StartState ─ replay ─> ReplayReport
//!                                              └─ whatif ─> WhatIfReport
//! ```

/// What a snapshot holds: segments, blocks, trace entries, interned names.
pub mod model;
/// Files to [`model::Snapshot`]: pickle (a closed set of opcodes) and JSON.
pub mod read;

/// Whether a file agrees with itself.
pub mod check;
mod drive;
/// Which frame of an allocation names its holder.
pub mod frames;
/// Feeding a recording through the allocator.
pub mod replay;
/// How exactly a recording comes out, and its story.
pub mod report;
/// The state at the beginning of a recording, rebuilt from its end.
pub mod start;
/// What another configuration or card would have done.
pub mod whatif;

pub use model::{
    Action, Annotation, Block, BlockState, Frame, FrameId, Generation, Names, Segment, Settings, Snapshot, StackId, StrId, TraceEntry,
};
pub use read::{Limits, open, read, read_bytes};
