//! The configuration of the allocator.

use super::sizes::{Divisions, LARGE_SEGMENT, ROUNDUP_INTERVALS};

/// Which allocator the configuration selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub enum Backend {
    /// The caching allocator that this crate models.
    #[default]
    #[serde(rename = "native")]
    Native,
    /// The driver's stream-ordered pools; native settings do nothing.
    #[serde(rename = "cudaMallocAsync")]
    CudaMallocAsync,
}

/// How much address space an expandable segment reserves.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub enum Reserve {
    /// A fraction of the device's memory.
    Fraction(f64),
    /// GiB.
    GiB(f64),
}

/// Settings for pinned host memory, kept so that they can be shown; this crate does not model that allocator.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PinnedConfig {
    pub use_cuda_host_register: bool,
    /// A power of two, at most 128.
    pub num_register_threads: u64,
    pub use_background_threads: bool,
    /// MiB; 0 is off.
    pub reserve_segment_size_mb: u64,
    pub free_catch_all: bool,
}

impl Default for PinnedConfig {
    fn default() -> Self {
        PinnedConfig {
            use_cuda_host_register: false,
            num_register_threads: 1,
            use_background_threads: false,
            reserve_segment_size_mb: 0,
            free_catch_all: false,
        }
    }
}

/// Settings of the allocator, with PyTorch's defaults. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct AllocConfig {
    pub backend: Backend,
    /// `None`: unlimited.
    pub max_split_size: Option<u64>,
    pub max_non_split_rounding_size: u64,
    /// In (0, 1); 0 is off.
    pub garbage_collection_threshold: f64,
    pub roundup_power2_divisions: Divisions,
    pub expandable_segments: bool,
    pub large_segment_size: u64,
    pub release_lock_on_cudamalloc: bool,
    /// In [0, 1].
    pub per_process_memory_fraction: f64,
    pub throw_on_cudamalloc_oom: bool,
    pub graph_capture_record_stream_reuse: bool,
    pub expandable_segments_reserve: Option<Reserve>,
    /// Settings of the allocator of pinned host memory; none of them changes device memory.
    pub pinned: PinnedConfig,
    /// Every request goes straight to the driver (`PYTORCH_NO_CUDA_MEMORY_CACHING`).
    pub no_caching: bool,
}

impl Default for AllocConfig {
    fn default() -> Self {
        AllocConfig {
            backend: Backend::Native,
            max_split_size: None,
            max_non_split_rounding_size: LARGE_SEGMENT,
            garbage_collection_threshold: 0.0,
            roundup_power2_divisions: [0; ROUNDUP_INTERVALS],
            expandable_segments: false,
            large_segment_size: LARGE_SEGMENT,
            release_lock_on_cudamalloc: false,
            per_process_memory_fraction: 1.0,
            throw_on_cudamalloc_oom: false,
            graph_capture_record_stream_reuse: false,
            expandable_segments_reserve: None,
            pinned: PinnedConfig::default(),
            no_caching: false,
        }
    }
}

impl std::fmt::Display for AllocConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "")
    }
}
