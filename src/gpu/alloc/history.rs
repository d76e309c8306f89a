//! The allocator's own trace: a ring of the newest entries, as `torch.cuda.memory._record_memory_history` keeps.

use std::collections::VecDeque;

use super::PoolId;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    Alloc,
    FreeRequested,
    FreeCompleted,
    SegmentAlloc,
    SegmentFree,
    SegmentMap,
    SegmentUnmap,
    Snapshot,
    Oom,
}

impl Action {
    /// PyTorch's name.
    pub fn name(self) -> &'static str {
        match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::SegmentAlloc => "segment_alloc",
            Action::SegmentFree => "segment_free",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::Snapshot => "snapshot",
            Action::Oom => "oom",
        }
    }
}

/// One entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct TraceEntry {
    pub action: Action,
    /// Address; for [`Action::Oom`] the free bytes of the device.
    pub addr: u64,
    /// Requested bytes of blocks; bytes of segments; allocated bytes for [`Action::Snapshot`].
    pub size: u64,
    pub stream: u64,
    /// Microseconds since 1970.
    pub time_us: u64,
    pub pool: PoolId,
    pub tag: u64,
}

#[derive(Debug)]
pub(crate) struct History {
    pub entries: VecDeque<TraceEntry>,
    limit: usize,
}

impl History {
    pub fn new(limit: usize) -> Self {
        History { entries: VecDeque::with_capacity(limit.min(1 << 16)), limit: limit.max(1) }
    }

    pub fn record(&mut self, entry: TraceEntry) {
        if self.entries.len() == self.limit {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }
}
