//! Out of memory, with what is pinned and by whom; and the causes of memory that is reserved but not allocated.

use std::fmt;

use super::PoolId;
use super::sizes::format_size;
use crate::gpu::driver::{DriverError, StreamId};

/// Why a call of the allocator failed. The books are right after any of these.
#[derive(Debug, Clone)]
pub enum AllocError {
    /// No memory, after everything was tried.
    OutOfMemory(Box<OutOfMemory>),
    /// The driver failed for another reason than lack of memory.
    Driver(DriverError),
    /// A request of 2^60 bytes or more.
    TooLarge { requested: u64 },
    /// The address is not one that is handed out now.
    NotAllocated { address: u64, why: &'static str },
    /// A private pool does not exist, or is used against its rules.
    Pool { pool: PoolId, why: &'static str },
    /// A recorded state that cannot be: overlapping or misfitting blocks.
    BadState { address: u64, why: &'static str },
    /// An argument outside its range.
    Argument(String),
}

impl From<DriverError> for AllocError {
    fn from(error: DriverError) -> Self {
        AllocError::Driver(error)
    }
}

impl fmt::Display for AllocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AllocError::OutOfMemory(oom) => oom.fmt(f),
            AllocError::Driver(error) => error.fmt(f),
            AllocError::TooLarge { requested } => {
                write!(f, "a request of {requested} bytes is refused: the limit is 1 EiB (2^60 bytes)")
            }
            AllocError::NotAllocated { address, why } => write!(f, "address {address:#x} {why}"),
            AllocError::Pool { pool, why } => write!(f, "private pool {pool} {why}"),
            AllocError::BadState { address, why } => write!(f, "the recorded state is impossible at {address:#x}: {why}"),
            AllocError::Argument(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for AllocError {}

impl From<AllocError> for crate::error::Error {
    fn from(error: AllocError) -> Self {
        use crate::error::{Error, Kind};
        match &error {
            AllocError::OutOfMemory(oom) => oom
                .hints()
                .into_iter()
                .fold(oom.causes().into_iter().fold(Error::new(Kind::GpuCheck, oom.to_string()), Error::because), Error::hint),
            AllocError::Driver(inner) => (*inner).into(),
            AllocError::Argument(_) => Error::usage(error.to_string()),
            _ => Error::failure(error.to_string()),
        }
    }
}

/// What was tried before giving up, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// A free block of the pool and stream.
    Search,
    /// The owner's callback gave something up.
    Callback,
    GarbageCollect,
    /// The driver (or a page map), within the limit.
    Driver,
    /// A pool with `use_on_oom`.
    FallbackPool,
    /// Cached blocks at or above max_split_size were given back.
    ReleaseOversize,
    /// Everything cached was given back.
    ReleaseCached,
    /// The driver again after that.
    Retry,
}

/// A segment that cannot go back because something lives in it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Pinned {
    pub address: u64,
    /// Bytes of the segment (mapped bytes of an expandable one).
    pub size: u64,
    pub stream: StreamId,
    pub small: bool,
    pub pool: PoolId,
    pub expandable: bool,
    /// Bytes free inside it.
    pub free: u64,
    /// Its largest free block.
    pub largest_free: u64,
    /// Number of blocks that live in it.
    pub live_blocks: usize,
    /// Bytes that live in it.
    pub live: u64,
    /// Its largest live blocks, largest first, at most 4: address, bytes, tag.
    pub holders: Vec<Holder>,
}

/// A live block and whom it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Holder {
    pub address: u64,
    pub size: u64,
    /// As given with the request.
    pub tag: u64,
}

/// Where reserved memory goes. The parts sum up to `reserved` exactly.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Attribution {
    pub reserved: u64,
    /// Bytes that were asked for by live blocks.
    pub requested: u64,
    /// Rounding of live blocks to multiples of 512 B or by divisions.
    pub rounding: u64,
    /// Rest of live blocks that was too small to split off.
    pub unsplit_slack: u64,
    /// Freed, but another stream may still use it.
    pub pending_free: u64,
    /// Free, in a segment of a default pool that something else lives in.
    pub split_pinned: u64,
    /// Free, in a segment of a default pool with nothing in it: what `empty_cache` gives back.
    pub idle: u64,
    /// Free, in private pools.
    pub private_pools: u64,
}

impl Attribution {
    /// Reserved bytes that no live block owns.
    pub fn unallocated(&self) -> u64 {
        self.pending_free + self.split_pinned + self.idle + self.private_pools
    }
}

/// An out-of-memory error with its circumstances. Sizes in bytes.
#[derive(Debug, Clone, serde::Serialize)]
pub struct OutOfMemory {
    /// What was asked for.
    pub requested: u64,
    /// After rounding.
    pub block_size: u64,
    /// What the driver was asked for; the figure in PyTorch's message.
    pub alloc_size: u64,
    pub stream: StreamId,
    pub small: bool,
    pub device: u32,
    /// Total memory of the device.
    pub capacity: u64,
    /// Free memory of the device, by the driver.
    pub free: u64,
    /// The limit set by a memory fraction.
    pub allowed: Option<u64>,
    pub allocated: u64,
    pub reserved: u64,
    /// Sum of the *free* blocks of private pools, as in PyTorch's message.
    pub free_in_private_pools: u64,
    /// Memory that neither is free nor belongs to this allocator: contexts, libraries, other processes.
    pub others: u64,
    pub expandable_segments: bool,
    /// Refused before the driver was asked (`throw_on_cudamalloc_oom`).
    pub rejected: bool,
    pub attribution: Attribution,
    /// Segments with free memory in them that cannot be used or given back, most free memory first, at most 16.
    pub pinned: Vec<Pinned>,
    /// What was tried.
    pub tried: Vec<Step>,
}

impl OutOfMemory {
    /// The text of PyTorch's `OutOfMemoryError`, without the part about processes that needs NVML.
    pub fn pytorch_message(&self) -> String {
        if self.rejected {
            return format!(
                "Allocation was preemptively rejected because it would exceed per_process_memory_fraction limit. Requested size: {}",
                format_size(self.alloc_size)
            );
        }
        let allowed = self.allowed.map(|limit| format!("{} allowed; ", format_size(limit))).unwrap_or_default();
        let private = match self.free_in_private_pools {
            0 => String::new(),
            bytes => format!("with {} allocated in private pools (e.g., CUDA Graphs), ", format_size(bytes)),
        };
        format!(
            "CUDA out of memory. Tried to allocate {}. GPU {} has a total capacity of {} of which {} is free. {allowed}Of the allocated \
             memory {} is allocated by PyTorch, {private}and {} is reserved by PyTorch but unallocated. If reserved but unallocated \
             memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation \
             for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)",
            format_size(self.alloc_size),
            self.device,
            format_size(self.capacity),
            format_size(self.free),
            format_size(self.allocated + self.free_in_private_pools),
            format_size(self.reserved.saturating_sub(self.allocated + self.free_in_private_pools)),
        )
    }

    /// Why, one cause a line, largest first.
    pub fn causes(&self) -> Vec<String> {
        let a = &self.attribution;
        let mut parts = vec![
            (a.requested + a.rounding + a.unsplit_slack, "in live blocks".to_owned()),
            (a.split_pinned, "free but pinned: something else lives in the same segments".to_owned()),
            (a.pending_free, "freed, but another stream has not been seen done with it".to_owned()),
            (a.private_pools, "free in private pools, which serve nobody else".to_owned()),
            (a.idle, "cached and idle".to_owned()),
            (self.others, "held by contexts, libraries and other processes".to_owned()),
        ];
        parts.retain(|(bytes, _)| *bytes > 0);
        parts.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        let mut causes: Vec<String> = parts.into_iter().map(|(bytes, what)| format!("{} {what}", format_size(bytes))).collect();
        for pinned in self.pinned.iter().take(3) {
            let holder = pinned.holders.first();
            causes.push(format!(
                "segment {:#x} of {} has {} free (largest {}), pinned by {} live block(s){}",
                pinned.address,
                format_size(pinned.size),
                format_size(pinned.free),
                format_size(pinned.largest_free),
                pinned.live_blocks,
                holder.map(|h| format!(", the largest {} at {:#x}", format_size(h.size), h.address)).unwrap_or_default(),
            ));
        }
        causes
    }

    /// What to try, for the state as it is: nothing is suggested that is on already or would not help.
    pub fn hints(&self) -> Vec<String> {
        let mut hints = Vec::new();
        let a = &self.attribution;
        if self.rejected || self.allowed.is_some_and(|limit| self.reserved + self.alloc_size > limit) {
            hints.push("the limit set by the memory fraction is reached, not the device's: raise `per_process_memory_fraction`".to_owned());
        }
        if a.split_pinned >= self.alloc_size {
            if self.expandable_segments {
                hints.push("free the blocks that pin the segments: `expandable_segments` is on already and cannot move them".to_owned());
            } else {
                hints.push("the pinned free memory would be enough: try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True".to_owned());
            }
        }
        if a.pending_free >= self.alloc_size {
            hints.push("wait for the streams named by record_stream before this point (torch.cuda.synchronize)".to_owned());
        }
        if self.others >= self.alloc_size && self.others > self.reserved {
            hints.push("most of the device is held outside this allocator: look at the other processes (nvidia-smi)".to_owned());
        }
        if self.alloc_size > self.capacity {
            hints.push("the request is larger than the device".to_owned());
        }
        hints
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rejected {
            return write!(
                f,
                "out of memory: {} more would exceed `per_process_memory_fraction`, so the driver was not asked",
                format_size(self.alloc_size)
            );
        }
        write!(
            f,
            "out of memory on GPU {}: {} requested, which needs {} from the driver; {} of {} is free",
            self.device,
            format_size(self.requested),
            format_size(self.alloc_size),
            format_size(self.free),
            format_size(self.capacity)
        )
    }
}
