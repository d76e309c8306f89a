//! What the allocator and the self-test need from a GPU, as one trait.
//!
//! The trait follows the CUDA driver API: status codes are plain integers, so a code that a newer driver invents
//! survives unharmed. Two implementations exist: [`sim::SimGpu`], a GPU in host memory, and one over the real
//! driver. All sizes are bytes; all addresses are device addresses.

/// A real GPU, through the driver's library.
pub mod cuda;
/// Which call a process is in.
pub mod mark;
/// A GPU in host memory.
pub mod sim;

use std::fmt;
use std::sync::Arc;

/// Result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// Driver status codes (`CUresult`) that this crate treats in a special way.
pub mod code {
    /// An argument is outside its range.
    pub const INVALID_VALUE: u32 = 1;
    /// Not enough device memory (or address space).
    pub const OUT_OF_MEMORY: u32 = 2;
    /// The driver is not initialised or already shut down.
    pub const NOT_INITIALIZED: u32 = 3;
    /// A stub of the CUDA toolkit in place of the driver's library (`CUDA_ERROR_STUB_LIBRARY`).
    pub const STUB_LIBRARY: u32 = 34;
    /// No device.
    pub const NO_DEVICE: u32 = 100;
    /// No such context, or it is gone.
    pub const INVALID_CONTEXT: u32 = 201;
    /// A handle is not valid.
    pub const INVALID_HANDLE: u32 = 400;
    /// The address is not mapped (`CUDA_ERROR_NOT_MAPPED`).
    pub const NOT_MAPPED: u32 = 211;
    /// The range is mapped already.
    pub const ALREADY_MAPPED: u32 = 208;
    /// A named symbol does not exist.
    pub const NOT_FOUND: u32 = 500;
    /// Work is still under way; not an error in the usual sense.
    pub const NOT_READY: u32 = 600;
    /// A kernel or copy touched memory that is not its own.
    pub const ILLEGAL_ADDRESS: u32 = 700;
    /// The operation is not supported here.
    pub const NOT_SUPPORTED: u32 = 801;
    /// What WSL2 answers to `cuMemSetAccess` on memory made for GPUDirect RDMA.
    pub const UNKNOWN: u32 = 999;

    /// The driver's name of a code, where this crate knows it.
    pub const fn name(code: u32) -> Option<&'static str> {
        Some(match code {
            0 => "CUDA_SUCCESS",
            INVALID_VALUE => "CUDA_ERROR_INVALID_VALUE",
            OUT_OF_MEMORY => "CUDA_ERROR_OUT_OF_MEMORY",
            NOT_INITIALIZED => "CUDA_ERROR_NOT_INITIALIZED",
            4 => "CUDA_ERROR_DEINITIALIZED",
            STUB_LIBRARY => "CUDA_ERROR_STUB_LIBRARY",
            36 => "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER",
            46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
            NO_DEVICE => "CUDA_ERROR_NO_DEVICE",
            101 => "CUDA_ERROR_INVALID_DEVICE",
            102 => "CUDA_ERROR_DEVICE_NOT_LICENSED",
            200 => "CUDA_ERROR_INVALID_IMAGE",
            INVALID_CONTEXT => "CUDA_ERROR_INVALID_CONTEXT",
            205 => "CUDA_ERROR_MAP_FAILED",
            206 => "CUDA_ERROR_UNMAP_FAILED",
            ALREADY_MAPPED => "CUDA_ERROR_ALREADY_MAPPED",
            209 => "CUDA_ERROR_NO_BINARY_FOR_GPU",
            NOT_MAPPED => "CUDA_ERROR_NOT_MAPPED",
            214 => "CUDA_ERROR_ECC_UNCORRECTABLE",
            218 => "CUDA_ERROR_INVALID_PTX",
            220 => "CUDA_ERROR_NVLINK_UNCORRECTABLE",
            221 => "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
            222 => "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            223 => "CUDA_ERROR_JIT_COMPILATION_DISABLED",
            226 => "CUDA_ERROR_CONTAINED",
            304 => "CUDA_ERROR_OPERATING_SYSTEM",
            INVALID_HANDLE => "CUDA_ERROR_INVALID_HANDLE",
            NOT_FOUND => "CUDA_ERROR_NOT_FOUND",
            NOT_READY => "CUDA_ERROR_NOT_READY",
            ILLEGAL_ADDRESS => "CUDA_ERROR_ILLEGAL_ADDRESS",
            701 => "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
            702 => "CUDA_ERROR_LAUNCH_TIMEOUT",
            709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
            714 => "CUDA_ERROR_HARDWARE_STACK_ERROR",
            715 => "CUDA_ERROR_ILLEGAL_INSTRUCTION",
            716 => "CUDA_ERROR_MISALIGNED_ADDRESS",
            717 => "CUDA_ERROR_INVALID_ADDRESS_SPACE",
            718 => "CUDA_ERROR_INVALID_PC",
            719 => "CUDA_ERROR_LAUNCH_FAILED",
            800 => "CUDA_ERROR_NOT_PERMITTED",
            NOT_SUPPORTED => "CUDA_ERROR_NOT_SUPPORTED",
            802 => "CUDA_ERROR_SYSTEM_NOT_READY",
            803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            804 => "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
            UNKNOWN => "CUDA_ERROR_UNKNOWN",
            _ => return None,
        })
    }
}

/// The calls of [`Driver`], for error texts and fault injection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
pub enum Call {
    MemGetInfo,
    MemAlloc,
    MemFree,
    MemcpyHtoD,
    MemcpyDtoH,
    MemcpyDtoD,
    MemsetD8,
    MemsetD32,
    MemGetAllocationGranularity,
    MemAddressReserve,
    MemAddressFree,
    MemCreate,
    MemRelease,
    MemMap,
    MemUnmap,
    MemSetAccess,
    StreamCreate,
    StreamDestroy,
    StreamSynchronize,
    StreamQuery,
    EventCreate,
    EventRecord,
    EventQuery,
    EventSynchronize,
    EventDestroy,
    EventElapsedTime,
    DeviceSynchronize,
    ModuleLoad,
    LaunchKernel,
    /// Any other function, for errors only.
    Other(&'static str),
}

impl Call {
    /// All that have a name of their own.
    pub const ALL: [Call; 29] = [
        Call::MemGetInfo,
        Call::MemAlloc,
        Call::MemFree,
        Call::MemcpyHtoD,
        Call::MemcpyDtoH,
        Call::MemcpyDtoD,
        Call::MemsetD8,
        Call::MemsetD32,
        Call::MemGetAllocationGranularity,
        Call::MemAddressReserve,
        Call::MemAddressFree,
        Call::MemCreate,
        Call::MemRelease,
        Call::MemMap,
        Call::MemUnmap,
        Call::MemSetAccess,
        Call::StreamCreate,
        Call::StreamDestroy,
        Call::StreamSynchronize,
        Call::StreamQuery,
        Call::EventCreate,
        Call::EventRecord,
        Call::EventQuery,
        Call::EventSynchronize,
        Call::EventDestroy,
        Call::EventElapsedTime,
        Call::DeviceSynchronize,
        Call::ModuleLoad,
        Call::LaunchKernel,
    ];

    /// The call of a driver function: `cuMemAlloc`, `cuMemAlloc_v2` or `MemAlloc`.
    pub fn from_name(name: &str) -> Option<Call> {
        let name = name.strip_suffix("_v2").unwrap_or(name);
        let same = |call: &Call| {
            let full = call.to_string();
            full == name || full.strip_prefix("cu") == Some(name)
        };
        Call::ALL.into_iter().find(same)
    }
}

impl fmt::Display for Call {
    /// The driver API's name, for example `cuMemAlloc`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Call::Other(name) => f.write_str(name),
            Call::MemcpyHtoD => f.write_str("cuMemcpyHtoD"),
            Call::DeviceSynchronize => f.write_str("cuCtxSynchronize"),
            Call::ModuleLoad => f.write_str("cuModuleLoadData"),
            Call::LaunchKernel => f.write_str("cuLaunchKernel"),
            other => write!(f, "cu{other:?}"),
        }
    }
}

/// A driver call that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DriverError {
    /// The `CUresult` code; unknown codes are kept as they are.
    pub code: u32,
    /// Which call.
    pub call: Call,
}

impl DriverError {
    /// `call` failed with `code`.
    pub const fn new(call: Call, code: u32) -> Self {
        DriverError { code, call }
    }

    /// Whether the device ran out of memory (`CUDA_ERROR_OUT_OF_MEMORY`), which allocators recover from.
    pub const fn is_out_of_memory(&self) -> bool {
        self.code == code::OUT_OF_MEMORY
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match code::name(self.code) {
            Some(name) => write!(f, "`{}` failed with {name} ({})", self.call, self.code),
            None => write!(f, "`{}` failed with code {}, which this version does not know", self.call, self.code),
        }
    }
}

impl std::error::Error for DriverError {}

impl From<DriverError> for crate::error::Error {
    fn from(error: DriverError) -> Self {
        crate::error::Error::new(crate::error::Kind::GpuCheck, error.to_string())
    }
}

/// A stream handle. `StreamId::DEFAULT` (0) is the legacy default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct StreamId(pub u64);

impl StreamId {
    /// The default stream.
    pub const DEFAULT: StreamId = StreamId(0);
}

/// An event handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub u64);

/// Physical memory made by [`Driver::mem_create`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemHandle(pub u64);

/// Free and total memory of the device, in bytes, over all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct MemInfo {
    pub free: u64,
    pub total: u64,
}

/// What the device is.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DeviceProperties {
    /// Marketing name.
    pub name: String,
    /// Index in this process.
    pub ordinal: u32,
    /// Total memory in bytes.
    pub total_memory: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Whether virtual memory management (expandable segments) works.
    pub virtual_memory: bool,
    /// Whether memory can be made ready for GPUDirect RDMA through virtual memory management.
    pub gpu_direct_rdma_vmm: bool,
}

/// A GPU as the allocator sees it. Calls take `&self`; implementations use interior mutability, so that an allocator
/// and a memory test can share one device. A failing call must leave the device as it was.
pub trait Driver {
    /// What the device is. Cheap; never fails.
    fn properties(&self) -> DeviceProperties;

    /// Free and total bytes (`cuMemGetInfo`).
    fn mem_get_info(&self) -> DriverResult<MemInfo>;

    /// Takes `bytes` (> 0) from the device (`cuMemAlloc`). Returns the address.
    fn mem_alloc(&self, bytes: u64) -> DriverResult<u64>;
    /// Gives back what [`mem_alloc`](Self::mem_alloc) returned at `address`.
    fn mem_free(&self, address: u64) -> DriverResult<()>;

    /// Copies host bytes to the device, synchronously.
    fn copy_to_device(&self, to: u64, from: &[u8]) -> DriverResult<()>;
    /// Copies device bytes to the host, synchronously.
    fn copy_to_host(&self, to: &mut [u8], from: u64) -> DriverResult<()>;
    /// Copies `bytes` on the device in the order of `stream`. The ranges must not overlap.
    fn copy_on_device(&self, to: u64, from: u64, bytes: u64, stream: StreamId) -> DriverResult<()>;
    /// Sets `count` bytes at `to` in the order of `stream`.
    fn memset_d8(&self, to: u64, value: u8, count: u64, stream: StreamId) -> DriverResult<()>;
    /// Sets `count` 32-bit words (native order) at `to`, which must be a multiple of 4, in the order of `stream`.
    fn memset_d32(&self, to: u64, value: u32, count: u64, stream: StreamId) -> DriverResult<()>;

    /// Smallest unit of [`mem_create`](Self::mem_create) and [`mem_map`](Self::mem_map) in bytes, usually 2 MiB.
    fn granularity(&self) -> DriverResult<u64>;
    /// Reserves `bytes` of address space (a multiple of the granularity). Takes no memory.
    fn address_reserve(&self, bytes: u64) -> DriverResult<u64>;
    /// Gives back a whole reservation with nothing mapped in it.
    fn address_free(&self, address: u64, bytes: u64) -> DriverResult<()>;
    /// Makes `bytes` (a multiple of the granularity) of physical memory.
    fn mem_create(&self, bytes: u64) -> DriverResult<MemHandle>;
    /// Drops the handle; the memory goes back once it is mapped nowhere.
    fn mem_release(&self, handle: MemHandle) -> DriverResult<()>;
    /// Maps all `bytes` of `handle` at `address`, inside one reservation. Not accessible before
    /// [`mem_set_access`](Self::mem_set_access).
    fn mem_map(&self, address: u64, bytes: u64, handle: MemHandle) -> DriverResult<()>;
    /// Unmaps a range that covers whole mappings.
    fn mem_unmap(&self, address: u64, bytes: u64) -> DriverResult<()>;
    /// Makes a mapped range readable and writable for this device.
    fn mem_set_access(&self, address: u64, bytes: u64) -> DriverResult<()>;

    /// Makes a stream.
    fn stream_create(&self) -> DriverResult<StreamId>;
    /// Destroys a stream once its work is done.
    fn stream_destroy(&self, stream: StreamId) -> DriverResult<()>;
    /// Waits for the work queued on `stream`.
    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()>;
    /// Whether all work queued on `stream` is done.
    fn stream_query(&self, stream: StreamId) -> DriverResult<bool>;
    /// Waits for all work on the device.
    fn device_synchronize(&self) -> DriverResult<()>;

    /// Makes an event without timing.
    fn event_create(&self) -> DriverResult<EventId>;
    /// Marks the present end of `stream`'s queue.
    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()>;
    /// Whether the work before the event is done.
    fn event_query(&self, event: EventId) -> DriverResult<bool>;
    /// Waits for the work before the event.
    fn event_synchronize(&self, event: EventId) -> DriverResult<()>;
    /// Destroys an event.
    fn event_destroy(&self, event: EventId) -> DriverResult<()>;

    /// Gives back everything that is still held, last the device itself. Every later call fails. Gives every error that a call returned; nothing is
    /// left out because an earlier one failed. A device that holds nothing outside of this process has nothing to do.
    fn close(&self) -> Vec<DriverError> {
        Vec::new()
    }
}

macro_rules! forward {
    ($($target:ty),*) => {$(
        impl<D: Driver + ?Sized> Driver for $target {
            fn properties(&self) -> DeviceProperties { (**self).properties() }
            fn mem_get_info(&self) -> DriverResult<MemInfo> { (**self).mem_get_info() }
            fn mem_alloc(&self, bytes: u64) -> DriverResult<u64> { (**self).mem_alloc(bytes) }
            fn mem_free(&self, address: u64) -> DriverResult<()> { (**self).mem_free(address) }
            fn copy_to_device(&self, to: u64, from: &[u8]) -> DriverResult<()> { (**self).copy_to_device(to, from) }
            fn copy_to_host(&self, to: &mut [u8], from: u64) -> DriverResult<()> { (**self).copy_to_host(to, from) }
            fn copy_on_device(&self, to: u64, from: u64, bytes: u64, stream: StreamId) -> DriverResult<()> {
                (**self).copy_on_device(to, from, bytes, stream)
            }
            fn memset_d8(&self, to: u64, value: u8, count: u64, stream: StreamId) -> DriverResult<()> {
                (**self).memset_d8(to, value, count, stream)
            }
            fn memset_d32(&self, to: u64, value: u32, count: u64, stream: StreamId) -> DriverResult<()> {
                (**self).memset_d32(to, value, count, stream)
            }
            fn granularity(&self) -> DriverResult<u64> { (**self).granularity() }
            fn address_reserve(&self, bytes: u64) -> DriverResult<u64> { (**self).address_reserve(bytes) }
            fn address_free(&self, address: u64, bytes: u64) -> DriverResult<()> { (**self).address_free(address, bytes) }
            fn mem_create(&self, bytes: u64) -> DriverResult<MemHandle> { (**self).mem_create(bytes) }
            fn mem_release(&self, handle: MemHandle) -> DriverResult<()> { (**self).mem_release(handle) }
            fn mem_map(&self, address: u64, bytes: u64, handle: MemHandle) -> DriverResult<()> {
                (**self).mem_map(address, bytes, handle)
            }
            fn mem_unmap(&self, address: u64, bytes: u64) -> DriverResult<()> { (**self).mem_unmap(address, bytes) }
            fn mem_set_access(&self, address: u64, bytes: u64) -> DriverResult<()> { (**self).mem_set_access(address, bytes) }
            fn stream_create(&self) -> DriverResult<StreamId> { (**self).stream_create() }
            fn stream_destroy(&self, stream: StreamId) -> DriverResult<()> { (**self).stream_destroy(stream) }
            fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()> { (**self).stream_synchronize(stream) }
            fn stream_query(&self, stream: StreamId) -> DriverResult<bool> { (**self).stream_query(stream) }
            fn device_synchronize(&self) -> DriverResult<()> { (**self).device_synchronize() }
            fn event_create(&self) -> DriverResult<EventId> { (**self).event_create() }
            fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> { (**self).event_record(event, stream) }
            fn event_query(&self, event: EventId) -> DriverResult<bool> { (**self).event_query(event) }
            fn event_synchronize(&self, event: EventId) -> DriverResult<()> { (**self).event_synchronize(event) }
            fn event_destroy(&self, event: EventId) -> DriverResult<()> { (**self).event_destroy(event) }
            fn close(&self) -> Vec<DriverError> { (**self).close() }
        }
    )*};
}

forward!(&D, Box<D>, Arc<D>);
