//! A real GPU through the CUDA driver API.
//!
//! * The loader and the library handle are cudarc's ([`cudarc::driver::sys::culib`]); its functions are not used. Their
//!   result is a Rust enum, so that a status code which a newer driver invents would be undefined behaviour, and a symbol
//!   that an older driver lacks is a panic. Here every symbol is looked up once, is called as a function that returns an
//!   integer, and one that is missing is an error value with its name.
//! * The primary context of a device is used, as torch does. It is made current before every call: threads come and go.
//! * Streams synchronise with the default stream (`CU_STREAM_DEFAULT`), so that a synchronous copy sees what was queued before.
//! * Memory comes from `cuMemAlloc` and the virtual memory calls only: never managed memory, never the stream-ordered pool,
//!   whose bytes a test could not account for.
//! * Addresses and handles are checked against what is alive before the driver sees them. With unified addressing a copy
//!   from a stray "device" address could otherwise reach memory of this process.
//!
//! A driver library may crash or hang where nothing can be done about it from inside. Whoever asks a machine that is not
//! known to be well runs this in a child process with a time limit: see [`crate::child`].
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::{Call, DeviceProperties, Driver, DriverError, DriverResult, EventId, MemHandle, MemInfo, StreamId, code, mark};
use crate::gpu::kernels::{Kernel, Kernels, Launch, Shape};

/// The kernels, compiled from `tare.cu`: the driver's own compiler turns them into code for the device.
const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("../kernels/tare.ptx"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("the PTX holds a NUL"),
};

/// Oldest CUDA version of a driver that can compile the kernels (PTX ISA 7.7).
pub const OLDEST_DRIVER: CudaVersion = CudaVersion { major: 11, minor: 7 };
/// Oldest compute capability the kernels run on (`.target sm_52`).
pub const OLDEST_DEVICE: (u32, u32) = (5, 2);

/// A CUDA version of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct CudaVersion {
    pub major: u32,
    pub minor: u32,
}

impl CudaVersion {
    /// From the driver's number: 12040 is 12.4. Anything that is no version is `None`.
    pub fn from_number(number: i32) -> Option<CudaVersion> {
        let number = u32::try_from(number).ok().filter(|number| (1000..100_000).contains(number))?;
        Some(CudaVersion { major: number / 1000, minor: number % 1000 / 10 })
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why there is no GPU to work with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CudaProblem {
    /// `libcuda.so` cannot be loaded.
    NoLibrary,
    /// The library lacks a function that is needed.
    MissingSymbol(&'static str),
    /// There is a driver, but no device that this process may use.
    NoDevice {
        /// `CUDA_VISIBLE_DEVICES`, where it is set: it may be what hides them.
        visible: Option<String>,
    },
    /// There are devices, but not this one.
    NoSuchDevice { ordinal: u32, count: u32 },
    /// The driver cannot compile the kernels.
    DriverTooOld { found: CudaVersion },
    /// The device cannot run the kernels.
    DeviceTooOld { ordinal: u32, found: (u32, u32) },
    /// The library is a stub of the CUDA toolkit, for linking only.
    Stub {
        /// Where it was found.
        path: Option<String>,
    },
    /// A call failed.
    Failed(DriverError),
}

impl fmt::Display for CudaProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CudaProblem::NoLibrary => f.write_str("the CUDA driver library (libcuda.so) cannot be loaded"),
            CudaProblem::MissingSymbol(name) => write!(f, "the CUDA driver library has no function `{name}`"),
            CudaProblem::NoDevice { visible: None } => f.write_str("the driver sees no GPU"),
            CudaProblem::NoDevice { visible: Some(value) } => {
                write!(f, "the driver sees no GPU, with CUDA_VISIBLE_DEVICES=`{value}`")
            }
            CudaProblem::NoSuchDevice { ordinal, count } => {
                write!(f, "there is no device {ordinal}: the driver shows {count}")
            }
            CudaProblem::DriverTooOld { found } => {
                write!(f, "the driver supports CUDA {found}, and the memory test needs {OLDEST_DRIVER} (driver 515) or newer")
            }
            CudaProblem::DeviceTooOld { ordinal, found: (major, minor) } => {
                let (needed, part) = OLDEST_DEVICE;
                write!(f, "device {ordinal} has compute capability {major}.{minor}, and the memory test needs {needed}.{part} or newer")
            }
            CudaProblem::Stub { path } => {
                f.write_str("a stub library, not a driver")?;
                path.as_ref().map_or(Ok(()), |path| write!(f, ": `{path}`"))
            }
            CudaProblem::Failed(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CudaProblem {}

impl From<DriverError> for CudaProblem {
    fn from(error: DriverError) -> Self {
        CudaProblem::Failed(error)
    }
}

impl CudaProblem {
    /// What to try next.
    pub fn hint(&self) -> String {
        match self {
            CudaProblem::NoLibrary => {
                "on a machine with an NVIDIA GPU, install the driver; in a container, start it with GPU access".into()
            }
            CudaProblem::MissingSymbol(_) => {
                "the library is of an unusual driver: reinstall the NVIDIA driver, and look for a stub `libcuda.so` on LD_LIBRARY_PATH"
                    .into()
            }
            CudaProblem::NoDevice { visible: Some(_) } => "unset CUDA_VISIBLE_DEVICES, or name a device that exists".into(),
            CudaProblem::NoDevice { visible: None } => "see `nvidia-smi`; in a container, start it with GPU access".into(),
            CudaProblem::NoSuchDevice { .. } => "see `tare gpu info` for the devices".into(),
            CudaProblem::DriverTooOld { .. } => "update the NVIDIA driver".into(),
            CudaProblem::DeviceTooOld { .. } => "choose another device with `--device`".into(),
            CudaProblem::Stub { path } => {
                let folder = path.as_deref().and_then(|path| Some(path.rsplit_once('/')?.0)).unwrap_or("its folder");
                format!("the CUDA toolkit brings such a `libcuda.so` for linking only: take `{folder}` out of LD_LIBRARY_PATH")
            }
            CudaProblem::Failed(error) => match error.code {
                802 => {
                    "the machine's fabric or driver is still starting: see `systemctl status nvidia-fabricmanager`, then try again".into()
                }
                36 => "the driver's kernel module is older than its library: update the driver, and look at LD_LIBRARY_PATH for another `libcuda.so`".into(),
                803 => "the kernel module and the driver's libraries are of two versions: reboot, or reload the module".into(),
                804 => "a forward-compatibility package (`cuda-compat`) comes first, and this card does not support it: look at LD_LIBRARY_PATH".into(),
                46 => "another process has the device for itself (compute mode): see `nvidia-smi -q -d COMPUTE`".into(),
                _ => "see `tare gpu info`, and the kernel's log for lines with `NVRM: Xid`".into(),
            },
        }
    }
}

impl From<CudaProblem> for crate::error::Error {
    fn from(problem: CudaProblem) -> Self {
        let kind = match &problem {
            CudaProblem::Failed(_) => crate::error::Kind::GpuCheck,
            CudaProblem::NoSuchDevice { .. } => crate::error::Kind::Usage,
            _ => crate::error::Kind::NotTested,
        };
        crate::error::Error::new(kind, problem.to_string()).hint(problem.hint())
    }
}

// ---- the library ------------------------------------------------------------------------------------------------------

type Device = c_int;
type Pointer = u64;
type Opaque = *mut c_void;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: u32,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
struct AllocationProperties {
    kind: u32,
    handle_types: u32,
    location: Location,
    win32: Opaque,
    compression: u8,
    gpu_direct_rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct AccessDescription {
    location: Location,
    flags: u32,
}

const PINNED: u32 = 1;
const ON_DEVICE: u32 = 1;
const READ_WRITE: u32 = 3;
const EVENT_WITHOUT_TIMING: c_uint = 2;

mod attribute {
    pub const MULTIPROCESSORS: i32 = 16;
    pub const INTEGRATED: i32 = 18;
    pub const ECC: i32 = 32;
    pub const L2_BYTES: i32 = 38;
    pub const CAPABILITY_MAJOR: i32 = 75;
    pub const CAPABILITY_MINOR: i32 = 76;
    pub const VIRTUAL_MEMORY: i32 = 102;
    pub const GPU_DIRECT_RDMA_WITH_VIRTUAL_MEMORY: i32 = 110;
}

/// The functions, each with its name in the library and its parameters, from `cuda.h`. All return `CUresult`.
macro_rules! symbols {
    (needed { $($need:ident $need_name:literal ($($need_type:ty),*);)* } optional { $($may:ident $may_name:literal ($($may_type:ty),*);)* }) => {
        #[allow(clippy::type_complexity)]
        struct Symbols {
            $($need: unsafe extern "C" fn($($need_type),*) -> u32,)*
            $($may: Option<unsafe extern "C" fn($($may_type),*) -> u32>,)*
        }

        impl Symbols {
            /// # Safety
            /// The library must be the CUDA driver, whose functions have these parameters.
            unsafe fn find(find: impl Fn(&'static str) -> Option<*const c_void>) -> Result<Symbols, CudaProblem> {
                Ok(Symbols {
                    $($need: {
                        let found = find(concat!($need_name, "\0")).ok_or(CudaProblem::MissingSymbol($need_name))?;
                        // SAFETY: the caller says that this is the driver's function of that name; its parameters are those of cuda.h.
                        unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn($($need_type),*) -> u32>(found) }
                    },)*
                    $($may: find(concat!($may_name, "\0")).map(|found| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn($($may_type),*) -> u32>(found) }
                    }),)*
                })
            }

            /// The first optional function that is not there.
            fn first_missing(&self) -> Option<&'static str> {
                $(if self.$may.is_none() { return Some($may_name); })*
                None
            }
        }
    };
}

symbols! {
    needed {
        init "cuInit" (c_uint);
        driver_version "cuDriverGetVersion" (*mut c_int);
        device_count "cuDeviceGetCount" (*mut c_int);
        device_get "cuDeviceGet" (*mut Device, c_int);
        device_name "cuDeviceGetName" (*mut c_char, c_int, Device);
        device_total "cuDeviceTotalMem_v2" (*mut usize, Device);
        device_attribute "cuDeviceGetAttribute" (*mut c_int, c_int, Device);
        device_uuid "cuDeviceGetUuid" (*mut [u8; 16], Device);
        device_pci "cuDeviceGetPCIBusId" (*mut c_char, c_int, Device);
        context_retain "cuDevicePrimaryCtxRetain" (*mut Opaque, Device);
        context_release "cuDevicePrimaryCtxRelease_v2" (Device);
        context_set "cuCtxSetCurrent" (Opaque);
        context_synchronize "cuCtxSynchronize" ();
        mem_info "cuMemGetInfo_v2" (*mut usize, *mut usize);
        mem_alloc "cuMemAlloc_v2" (*mut Pointer, usize);
        mem_free "cuMemFree_v2" (Pointer);
        copy_to_device "cuMemcpyHtoD_v2" (Pointer, *const c_void, usize);
        copy_to_host "cuMemcpyDtoH_v2" (*mut c_void, Pointer, usize);
        copy_on_device "cuMemcpyDtoDAsync_v2" (Pointer, Pointer, usize, Opaque);
        set_d8 "cuMemsetD8Async" (Pointer, u8, usize, Opaque);
        set_d32 "cuMemsetD32Async" (Pointer, c_uint, usize, Opaque);
        stream_create "cuStreamCreate" (*mut Opaque, c_uint);
        stream_destroy "cuStreamDestroy_v2" (Opaque);
        stream_synchronize "cuStreamSynchronize" (Opaque);
        stream_query "cuStreamQuery" (Opaque);
        event_create "cuEventCreate" (*mut Opaque, c_uint);
        event_record "cuEventRecord" (Opaque, Opaque);
        event_query "cuEventQuery" (Opaque);
        event_synchronize "cuEventSynchronize" (Opaque);
        event_elapsed "cuEventElapsedTime" (*mut f32, Opaque, Opaque);
        event_destroy "cuEventDestroy_v2" (Opaque);
        module_load "cuModuleLoadData" (*mut Opaque, *const c_void);
        module_function "cuModuleGetFunction" (*mut Opaque, Opaque, *const c_char);
        module_unload "cuModuleUnload" (Opaque);
        launch "cuLaunchKernel" (Opaque, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Opaque, *mut *mut c_void, *mut *mut c_void);
    }
    // Virtual memory: a driver or a machine without it can still be tested.
    optional {
        granularity "cuMemGetAllocationGranularity" (*mut usize, *const AllocationProperties, c_uint);
        address_reserve "cuMemAddressReserve" (*mut Pointer, usize, usize, Pointer, u64);
        address_free "cuMemAddressFree" (Pointer, usize);
        mem_create "cuMemCreate" (*mut u64, usize, *const AllocationProperties, u64);
        mem_release "cuMemRelease" (u64);
        mem_map "cuMemMap" (Pointer, usize, usize, u64, u64);
        mem_unmap "cuMemUnmap" (Pointer, usize);
        set_access "cuMemSetAccess" (Pointer, usize, *const AccessDescription, usize);
    }
}

/// After every call: it came back, and with which status.
fn check(call: Call, status: u32) -> DriverResult<()> {
    mark::end();
    if status == 0 { Ok(()) } else { Err(DriverError::new(call, status)) }
}

/// The symbols of the driver library of this process, looked up once.
fn symbols() -> Result<&'static Symbols, CudaProblem> {
    static SYMBOLS: OnceLock<Result<Symbols, CudaProblem>> = OnceLock::new();
    SYMBOLS
        .get_or_init(|| {
            mark::begin("loading libcuda.so");
            // SAFETY: loading a library runs its initialisers; this is the driver's.
            if !unsafe { cudarc::driver::sys::is_culib_present() } {
                mark::end();
                return Err(CudaProblem::NoLibrary);
            }
            // SAFETY: as above; the library is there, without which this panics.
            let library = unsafe { cudarc::driver::sys::culib() };
            mark::end();
            let one = |name: &str| {
                // SAFETY: the symbol is only used as what cuda.h says it is, and the library stays loaded for good.
                unsafe { library.get::<*const c_void>(name.as_bytes()) }.ok().map(|symbol| *symbol).filter(|found| !found.is_null())
            };
            // Names that headers of CUDA 13 no longer give; the second form takes the same arguments.
            let find = |name: &'static str| match name {
                "cuDeviceGetUuid\0" => one(name).or_else(|| one("cuDeviceGetUuid_v2\0")),
                "cuEventElapsedTime\0" => one(name).or_else(|| one("cuEventElapsedTime_v2\0")),
                _ => one(name),
            };
            // SAFETY: the library is the driver.
            unsafe { Symbols::find(find) }
        })
        .as_ref()
        .map_err(Clone::clone)
}

// ---- devices ----------------------------------------------------------------------------------------------------------

/// What the driver says of a device, without taking anything on it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CudaDevice {
    /// Index in this process, after CUDA_VISIBLE_DEVICES.
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// `GPU-` and 32 hexadecimal digits, as NVML writes it.
    pub uuid: String,
    /// Domain, bus, device and function: `0000:3b:00.0`, in lower case.
    pub pci: String,
    /// Total memory in bytes.
    pub total_memory: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of the L2 cache; 0 where unknown.
    pub l2_bytes: u64,
    /// A part of the processor: its memory is the machine's.
    pub integrated: bool,
    /// ECC is on.
    pub ecc: bool,
    /// Virtual memory management works, as far as the driver says.
    pub virtual_memory: bool,
    /// Memory can be made for GPUDirect RDMA through virtual memory management.
    pub gpu_direct_rdma_vmm: bool,
}

/// The CUDA driver of this process, initialised.
#[derive(Clone, Copy)]
pub struct Cuda {
    symbols: &'static Symbols,
    version: Option<CudaVersion>,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("version", &self.version).finish_non_exhaustive()
    }
}

/// The highest CUDA version that the driver library says it supports, asked without initialising it: this answers where
/// `cuInit` does not.
///
/// # Errors
/// No library, a function missing, or the call failed.
pub fn driver_version() -> Result<CudaVersion, CudaProblem> {
    version_of(symbols()?)?.ok_or(CudaProblem::Failed(DriverError::new(VERSION, code::INVALID_VALUE)))
}

const VERSION: Call = Call::Other("cuDriverGetVersion");

/// `None` where the number is no version.
fn version_of(symbols: &Symbols) -> DriverResult<Option<CudaVersion>> {
    let mut number = 0;
    mark::begin(VERSION);
    // SAFETY: writes one integer.
    check(VERSION, unsafe { (symbols.driver_version)(&mut number) })?;
    Ok(CudaVersion::from_number(number))
}

impl Cuda {
    /// Loads the driver library and initialises it.
    ///
    /// # Errors
    /// No library, a function missing, no device, or whatever `cuInit` says.
    pub fn open() -> Result<Cuda, CudaProblem> {
        let symbols = symbols()?;
        mark::begin("cuInit");
        // SAFETY: no memory is passed.
        let status = unsafe { (symbols.init)(0) };
        mark::end();
        match status {
            0 => Ok(Cuda { symbols, version: version_of(symbols)? }),
            // The second one where there is nothing to initialise.
            code::NO_DEVICE | code::NOT_INITIALIZED => Err(no_device()),
            code::STUB_LIBRARY => Err(CudaProblem::Stub { path: library_path() }),
            status => Err(DriverError::new(Call::Other("cuInit"), status).into()),
        }
    }

    /// Highest CUDA version that the driver supports; `None` where it gives a number that is no version.
    pub fn version(&self) -> Option<CudaVersion> {
        self.version
    }

    /// How many devices this process may use.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn count(&self) -> Result<u32, CudaProblem> {
        let mut count = 0;
        mark::begin("cuDeviceGetCount");
        // SAFETY: writes one integer.
        check(Call::Other("cuDeviceGetCount"), unsafe { (self.symbols.device_count)(&mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    fn handle(&self, ordinal: u32) -> Result<Device, CudaProblem> {
        let count = self.count()?;
        if count == 0 {
            return Err(no_device());
        }
        if ordinal >= count {
            return Err(CudaProblem::NoSuchDevice { ordinal, count });
        }
        let mut device = 0;
        mark::begin("cuDeviceGet");
        // SAFETY: writes one integer.
        check(Call::Other("cuDeviceGet"), unsafe { (self.symbols.device_get)(&mut device, ordinal as c_int) })?;
        Ok(device)
    }

    fn attribute(&self, device: Device, attribute: i32) -> DriverResult<i32> {
        let mut value = 0;
        mark::begin("cuDeviceGetAttribute");
        // SAFETY: writes one integer.
        check(Call::Other("cuDeviceGetAttribute"), unsafe { (self.symbols.device_attribute)(&mut value, attribute, device) })?;
        Ok(value)
    }

    /// What device `ordinal` is. Takes no context and no memory.
    ///
    /// # Errors
    /// No such device, or whatever the driver says. Attributes that an older driver does not know count as absent.
    pub fn describe(&self, ordinal: u32) -> Result<CudaDevice, CudaProblem> {
        let device = self.handle(ordinal)?;
        let text = |call: &'static str, ask: unsafe extern "C" fn(*mut c_char, c_int, Device) -> u32| -> Result<String, CudaProblem> {
            let mut buffer = [0u8; 256];
            mark::begin(call);
            // SAFETY: the driver writes at most as many bytes as it is told.
            check(Call::Other(call), unsafe { ask(buffer.as_mut_ptr().cast(), buffer.len() as c_int, device) })?;
            let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
            Ok(String::from_utf8_lossy(&buffer[..end]).chars().filter(|c| !c.is_control()).collect())
        };
        let mut total = 0usize;
        mark::begin("cuDeviceTotalMem");
        // SAFETY: writes one size.
        check(Call::Other("cuDeviceTotalMem"), unsafe { (self.symbols.device_total)(&mut total, device) })?;
        let mut uuid = [0u8; 16];
        mark::begin("cuDeviceGetUuid");
        // SAFETY: writes 16 bytes.
        check(Call::Other("cuDeviceGetUuid"), unsafe { (self.symbols.device_uuid)(&mut uuid, device) })?;
        let number = |attribute| match self.attribute(device, attribute) {
            Ok(value) => Ok(u32::try_from(value).unwrap_or(0)),
            // An older driver does not know it.
            Err(error) if matches!(error.code, code::INVALID_VALUE | code::NOT_SUPPORTED) => Ok(0),
            Err(error) => Err(error),
        };
        let needed = |attribute| self.attribute(device, attribute).map(|value| u32::try_from(value).unwrap_or(0));
        let virtual_memory = self.symbols.first_missing().is_none() && number(attribute::VIRTUAL_MEMORY)? != 0;
        Ok(CudaDevice {
            ordinal,
            name: text("cuDeviceGetName", self.symbols.device_name)?,
            uuid: format_uuid(&uuid),
            pci: text("cuDeviceGetPCIBusId", self.symbols.device_pci)?.to_ascii_lowercase(),
            total_memory: total as u64,
            compute_capability: (needed(attribute::CAPABILITY_MAJOR)?, needed(attribute::CAPABILITY_MINOR)?),
            multiprocessors: number(attribute::MULTIPROCESSORS)?,
            l2_bytes: u64::from(number(attribute::L2_BYTES)?),
            integrated: number(attribute::INTEGRATED)? != 0,
            ecc: number(attribute::ECC)? != 0,
            virtual_memory,
            gpu_direct_rdma_vmm: virtual_memory && number(attribute::GPU_DIRECT_RDMA_WITH_VIRTUAL_MEMORY)? != 0,
        })
    }

    /// All devices, each with what can be said of it.
    ///
    /// # Errors
    /// The devices cannot be counted. A single device that does not answer is an error in its place.
    pub fn devices(&self) -> Result<Vec<Result<CudaDevice, CudaProblem>>, CudaProblem> {
        Ok((0..self.count()?).map(|ordinal| self.describe(ordinal)).collect())
    }
}

/// Where the driver library of this process lies, by the list of what is mapped.
fn library_path() -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    // Five columns, then the path, which may hold spaces.
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    paths.filter(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with("libcuda.so"))).map(str::to_owned).next()
}

fn no_device() -> CudaProblem {
    CudaProblem::NoDevice { visible: std::env::var_os("CUDA_VISIBLE_DEVICES").map(|value| value.to_string_lossy().into_owned()) }
}

fn format_uuid(bytes: &[u8; 16]) -> String {
    let mut text = String::from("GPU-");
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

// ---- a device at work -------------------------------------------------------------------------------------------------

/// What is alive on a device, by this process.
#[derive(Default)]
struct Live {
    /// Accessible ranges: start to bytes. From `cuMemAlloc` (`true`) or mapped with access (`false`).
    ranges: BTreeMap<u64, (u64, bool)>,
    /// Mapped: start to bytes.
    mapped: BTreeMap<u64, u64>,
    reservations: BTreeMap<u64, u64>,
    handles: HashMap<u64, u64>,
    streams: BTreeSet<u64>,
    events: BTreeSet<u64>,
    /// Module and its functions, once loaded.
    module: Option<(usize, HashMap<Kernel, usize>)>,
    /// The context was given back.
    closed: bool,
}

impl Live {
    /// Whether every byte of a range is in an accessible range; neighbours count together only where they were mapped.
    fn covers(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let mut at = address;
        while at < end {
            let Some((start, (size, whole))) = self.ranges.range(..=at).next_back() else { return false };
            let stop = start + size;
            if stop <= at || (*whole && (stop < end || *start > address)) {
                return false;
            }
            at = stop;
        }
        true
    }
}

/// A GPU through the CUDA driver. Holds the primary context of the device until it is dropped, and then gives back every
/// stream, event and allocation that is still there.
pub struct CudaGpu {
    cuda: Cuda,
    device: Device,
    context: usize,
    about: CudaDevice,
    live: Mutex<Live>,
    begin: Instant,
}

impl fmt::Debug for CudaGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaGpu").field("about", &self.about).finish_non_exhaustive()
    }
}

impl CudaGpu {
    /// Takes the primary context of device `ordinal`, which costs some hundred MiB of its memory.
    ///
    /// # Errors
    /// No such device, a driver or device too old for the kernels, or whatever the driver says.
    pub fn open(cuda: Cuda, ordinal: u32) -> Result<CudaGpu, CudaProblem> {
        if let Some(found) = cuda.version.filter(|found| *found < OLDEST_DRIVER) {
            return Err(CudaProblem::DriverTooOld { found });
        }
        let about = cuda.describe(ordinal)?;
        if about.compute_capability < OLDEST_DEVICE {
            return Err(CudaProblem::DeviceTooOld { ordinal, found: about.compute_capability });
        }
        let device = cuda.handle(ordinal)?;
        let mut context = std::ptr::null_mut();
        mark::begin("cuDevicePrimaryCtxRetain");
        // SAFETY: writes one pointer.
        check(Call::Other("cuDevicePrimaryCtxRetain"), unsafe { (cuda.symbols.context_retain)(&mut context, device) })?;
        Ok(CudaGpu { cuda, device, context: context as usize, about, live: Mutex::default(), begin: Instant::now() })
    }

    /// What the driver says of the device.
    pub fn about(&self) -> &CudaDevice {
        &self.about
    }

    /// Why virtual memory management cannot be used, or `None` where the driver says it can.
    pub fn virtual_memory_problem(&self) -> Option<String> {
        if self.about.virtual_memory {
            None
        } else if let Some(name) = self.cuda.symbols.first_missing() {
            Some(format!("the CUDA driver library has no function `{name}`"))
        } else {
            Some("the driver says that this device has no virtual memory management".to_owned())
        }
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the context current for the calling thread; then the call may follow.
    fn enter(&self, call: Call) -> DriverResult<&'static Symbols> {
        if self.live().closed {
            return Err(DriverError::new(call, code::INVALID_CONTEXT));
        }
        let set = Call::Other("cuCtxSetCurrent");
        mark::begin(set);
        // SAFETY: the context is held until it is closed.
        check(set, unsafe { (self.cuda.symbols.context_set)(self.context as Opaque) })?;
        // The call itself comes next.
        mark::begin(call);
        Ok(self.cuda.symbols)
    }

    fn stream(&self, call: Call, stream: StreamId) -> DriverResult<Opaque> {
        let known = stream == StreamId::DEFAULT || self.live().streams.contains(&stream.0);
        if known { Ok(stream.0 as usize as Opaque) } else { Err(DriverError::new(call, code::INVALID_HANDLE)) }
    }

    fn event(&self, call: Call, event: EventId) -> DriverResult<Opaque> {
        let known = self.live().events.contains(&event.0);
        if known { Ok(event.0 as usize as Opaque) } else { Err(DriverError::new(call, code::INVALID_HANDLE)) }
    }

    fn accessible(&self, call: Call, address: u64, bytes: u64) -> DriverResult<()> {
        if self.live().covers(address, bytes) { Ok(()) } else { Err(DriverError::new(call, code::ILLEGAL_ADDRESS)) }
    }

    fn new_event(&self, flags: c_uint) -> DriverResult<EventId> {
        let call = Call::EventCreate;
        let symbols = self.enter(call)?;
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        check(call, unsafe { (symbols.event_create)(&mut event, flags) })?;
        let id = event as usize as u64;
        self.live().events.insert(id);
        Ok(EventId(id))
    }

    /// What `cuMemCreate` is asked for: as torch does, memory that GPUDirect RDMA can reach where the device says so.
    /// WSL2 says so and then refuses access with code 999; a check is there to find that.
    fn wanted(&self) -> AllocationProperties {
        AllocationProperties {
            kind: PINNED,
            handle_types: 0,
            location: Location { kind: ON_DEVICE, id: self.device },
            win32: std::ptr::null_mut(),
            compression: 0,
            gpu_direct_rdma: u8::from(self.about.gpu_direct_rdma_vmm),
            usage: 0,
            reserved: [0; 4],
        }
    }

    /// A function of the module, which is loaded the first time.
    fn function(&self, symbols: &'static Symbols, kernel: Kernel) -> DriverResult<Opaque> {
        let mut live = self.live();
        if let Some(function) = live.module.as_ref().and_then(|(_, functions)| functions.get(&kernel)) {
            return Ok(*function as Opaque);
        }
        let module = match &live.module {
            Some((module, _)) => *module,
            None => {
                let mut module = std::ptr::null_mut();
                mark::begin(Call::ModuleLoad);
                // SAFETY: the text is constant, is PTX and ends with a NUL.
                check(Call::ModuleLoad, unsafe { (symbols.module_load)(&mut module, PTX.as_ptr().cast()) })?;
                live.module = Some((module as usize, HashMap::new()));
                module as usize
            }
        };
        let call = Call::Other("cuModuleGetFunction");
        let name = std::ffi::CString::new(kernel.name()).map_err(|_| DriverError::new(call, code::INVALID_VALUE))?;
        let mut function = std::ptr::null_mut();
        mark::begin(call);
        // SAFETY: the module is loaded, and the name ends with a NUL.
        check(call, unsafe { (symbols.module_function)(&mut function, module as Opaque, name.as_ptr()) })?;
        if let Some((_, functions)) = &mut live.module {
            functions.insert(kernel, function as usize);
        }
        Ok(function)
    }
}

/// A function for virtual memory, or the status of a driver that lacks it.
fn there<T: Copy>(call: Call, symbol: &Option<T>) -> DriverResult<T> {
    if symbol.is_none() {
        // It was announced, and is not made.
        mark::end();
    }
    symbol.ok_or(DriverError::new(call, code::NOT_SUPPORTED))
}

fn size(call: Call, bytes: u64) -> DriverResult<usize> {
    usize::try_from(bytes).map_err(|_| DriverError::new(call, code::INVALID_VALUE))
}

impl Driver for CudaGpu {
    fn properties(&self) -> DeviceProperties {
        DeviceProperties {
            name: self.about.name.clone(),
            ordinal: self.about.ordinal,
            total_memory: self.about.total_memory,
            compute_capability: self.about.compute_capability,
            virtual_memory: self.about.virtual_memory,
            gpu_direct_rdma_vmm: self.about.gpu_direct_rdma_vmm,
        }
    }

    fn mem_get_info(&self) -> DriverResult<MemInfo> {
        let call = Call::MemGetInfo;
        let symbols = self.enter(call)?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: writes two sizes.
        check(call, unsafe { (symbols.mem_info)(&mut free, &mut total) })?;
        Ok(MemInfo { free: free as u64, total: total as u64 })
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<u64> {
        let call = Call::MemAlloc;
        let bytes_here = size(call, bytes)?;
        let symbols = self.enter(call)?;
        let mut address = 0;
        // SAFETY: writes one address.
        check(call, unsafe { (symbols.mem_alloc)(&mut address, bytes_here) })?;
        self.live().ranges.insert(address, (bytes, true));
        Ok(address)
    }

    fn mem_free(&self, address: u64) -> DriverResult<()> {
        let call = Call::MemFree;
        if !self.live().ranges.get(&address).is_some_and(|(_, whole)| *whole) {
            return Err(DriverError::new(call, code::INVALID_VALUE));
        }
        let symbols = self.enter(call)?;
        // SAFETY: the address is of a live allocation.
        check(call, unsafe { (symbols.mem_free)(address) })?;
        self.live().ranges.remove(&address);
        Ok(())
    }

    fn copy_to_device(&self, to: u64, from: &[u8]) -> DriverResult<()> {
        let call = Call::MemcpyHtoD;
        self.accessible(call, to, from.len() as u64)?;
        let symbols = self.enter(call)?;
        // SAFETY: both ranges are as long as that, and the device range is live.
        check(call, unsafe { (symbols.copy_to_device)(to, from.as_ptr().cast(), from.len()) })
    }

    fn copy_to_host(&self, to: &mut [u8], from: u64) -> DriverResult<()> {
        let call = Call::MemcpyDtoH;
        self.accessible(call, from, to.len() as u64)?;
        let symbols = self.enter(call)?;
        // SAFETY: both ranges are as long as that, and the device range is live.
        check(call, unsafe { (symbols.copy_to_host)(to.as_mut_ptr().cast(), from, to.len()) })
    }

    fn copy_on_device(&self, to: u64, from: u64, bytes: u64, stream: StreamId) -> DriverResult<()> {
        let call = Call::MemcpyDtoD;
        self.accessible(call, to, bytes)?;
        self.accessible(call, from, bytes)?;
        let stream = self.stream(call, stream)?;
        let bytes = size(call, bytes)?;
        let symbols = self.enter(call)?;
        // SAFETY: both ranges and the stream are live.
        check(call, unsafe { (symbols.copy_on_device)(to, from, bytes, stream) })
    }

    fn memset_d8(&self, to: u64, value: u8, count: u64, stream: StreamId) -> DriverResult<()> {
        let call = Call::MemsetD8;
        self.accessible(call, to, count)?;
        let stream = self.stream(call, stream)?;
        let count = size(call, count)?;
        let symbols = self.enter(call)?;
        // SAFETY: the range and the stream are live.
        check(call, unsafe { (symbols.set_d8)(to, value, count, stream) })
    }

    fn memset_d32(&self, to: u64, value: u32, count: u64, stream: StreamId) -> DriverResult<()> {
        let call = Call::MemsetD32;
        let bytes = count.checked_mul(4).ok_or(DriverError::new(call, code::INVALID_VALUE))?;
        self.accessible(call, to, bytes)?;
        let stream = self.stream(call, stream)?;
        let count = size(call, count)?;
        let symbols = self.enter(call)?;
        // SAFETY: the range and the stream are live.
        check(call, unsafe { (symbols.set_d32)(to, value, count, stream) })
    }

    fn granularity(&self) -> DriverResult<u64> {
        let call = Call::MemGetAllocationGranularity;
        let symbols = self.enter(call)?;
        let function = there(call, &symbols.granularity)?;
        let wanted = self.wanted();
        let mut bytes = 0usize;
        // SAFETY: reads the properties and writes one size; 0 is the minimum granularity.
        check(call, unsafe { function(&mut bytes, &wanted, 0) })?;
        Ok(bytes as u64)
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<u64> {
        let call = Call::MemAddressReserve;
        let symbols = self.enter(call)?;
        let function = there(call, &symbols.address_reserve)?;
        let mut address = 0;
        // SAFETY: writes one address.
        check(call, unsafe { function(&mut address, size(call, bytes)?, 0, 0, 0) })?;
        self.live().reservations.insert(address, bytes);
        Ok(address)
    }

    fn address_free(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let call = Call::MemAddressFree;
        {
            let live = self.live();
            let whole = live.reservations.get(&address) == Some(&bytes);
            if !whole || live.mapped.range(address..address.saturating_add(bytes)).next().is_some() {
                return Err(DriverError::new(call, code::INVALID_VALUE));
            }
        }
        let symbols = self.enter(call)?;
        let function = there(call, &symbols.address_free)?;
        // SAFETY: the reservation is live and nothing is mapped in it.
        check(call, unsafe { function(address, size(call, bytes)?) })?;
        self.live().reservations.remove(&address);
        Ok(())
    }

    fn mem_create(&self, bytes: u64) -> DriverResult<MemHandle> {
        let call = Call::MemCreate;
        let symbols = self.enter(call)?;
        let function = there(call, &symbols.mem_create)?;
        let wanted = self.wanted();
        let mut handle = 0;
        // SAFETY: reads the properties and writes one handle.
        check(call, unsafe { function(&mut handle, size(call, bytes)?, &wanted, 0) })?;
        self.live().handles.insert(handle, bytes);
        Ok(MemHandle(handle))
    }

    fn mem_release(&self, handle: MemHandle) -> DriverResult<()> {
        let call = Call::MemRelease;
        if !self.live().handles.contains_key(&handle.0) {
            return Err(DriverError::new(call, code::INVALID_VALUE));
        }
        let symbols = self.enter(call)?;
        let function = there(call, &symbols.mem_release)?;
        // SAFETY: the handle is live.
        check(call, unsafe { function(handle.0) })?;
        self.live().handles.remove(&handle.0);
        Ok(())
    }

    fn mem_map(&self, address: u64, bytes: u64, handle: MemHandle) -> DriverResult<()> {
        let call = Call::MemMap;
        {
            let live = self.live();
            let end = address.checked_add(bytes).ok_or(DriverError::new(call, code::INVALID_VALUE))?;
            let inside = live.reservations.range(..=address).next_back().is_some_and(|(start, size)| end <= start + size);
            if !inside || live.handles.get(&handle.0) != Some(&bytes) {
                return Err(DriverError::new(call, code::INVALID_VALUE));
            }
        }
        let symbols = self.enter(call)?;
        let function = there(call, &symbols.mem_map)?;
        // SAFETY: the range lies in a live reservation and the handle is live and as large.
        check(call, unsafe { function(address, size(call, bytes)?, 0, handle.0, 0) })?;
        self.live().mapped.insert(address, bytes);
        Ok(())
    }

    fn mem_unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let call = Call::MemUnmap;
        let inside: Vec<u64> = {
            let live = self.live();
            let covered: Vec<(u64, u64)> =
                live.mapped.range(address..address.saturating_add(bytes)).map(|(start, size)| (*start, *size)).collect();
            if bytes == 0 || covered.iter().map(|(_, size)| size).sum::<u64>() != bytes {
                return Err(DriverError::new(call, code::INVALID_VALUE));
            }
            covered.into_iter().map(|(start, _)| start).collect()
        };
        let symbols = self.enter(call)?;
        let function = there(call, &symbols.mem_unmap)?;
        // SAFETY: the range is whole live mappings.
        check(call, unsafe { function(address, size(call, bytes)?) })?;
        let mut live = self.live();
        for start in inside {
            live.mapped.remove(&start);
            live.ranges.remove(&start);
        }
        Ok(())
    }

    fn mem_set_access(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let call = Call::MemSetAccess;
        let covered: Vec<(u64, u64)> = {
            let live = self.live();
            live.mapped.range(address..address.saturating_add(bytes)).map(|(start, size)| (*start, *size)).collect()
        };
        if bytes == 0 || covered.iter().map(|(_, size)| size).sum::<u64>() != bytes {
            return Err(DriverError::new(call, code::INVALID_VALUE));
        }
        let symbols = self.enter(call)?;
        let function = there(call, &symbols.set_access)?;
        let access = AccessDescription { location: Location { kind: ON_DEVICE, id: self.device }, flags: READ_WRITE };
        // SAFETY: the range is whole live mappings; one description is passed.
        check(call, unsafe { function(address, size(call, bytes)?, &access, 1) })?;
        self.live().ranges.extend(covered.into_iter().map(|(start, size)| (start, (size, false))));
        Ok(())
    }

    fn stream_create(&self) -> DriverResult<StreamId> {
        let call = Call::StreamCreate;
        let symbols = self.enter(call)?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        check(call, unsafe { (symbols.stream_create)(&mut stream, 0) })?;
        let id = stream as usize as u64;
        self.live().streams.insert(id);
        Ok(StreamId(id))
    }

    fn stream_destroy(&self, stream: StreamId) -> DriverResult<()> {
        let call = Call::StreamDestroy;
        if !self.live().streams.contains(&stream.0) {
            return Err(DriverError::new(call, code::INVALID_HANDLE));
        }
        let symbols = self.enter(call)?;
        // The driver gives the handle up at once and ends the stream when its work is done; this waits, as the trait says.
        mark::begin(Call::StreamSynchronize);
        // SAFETY: the stream is live.
        check(Call::StreamSynchronize, unsafe { (symbols.stream_synchronize)(stream.0 as usize as Opaque) })?;
        mark::begin(call);
        // SAFETY: as above.
        check(call, unsafe { (symbols.stream_destroy)(stream.0 as usize as Opaque) })?;
        self.live().streams.remove(&stream.0);
        Ok(())
    }

    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()> {
        let call = Call::StreamSynchronize;
        let stream = self.stream(call, stream)?;
        let symbols = self.enter(call)?;
        // SAFETY: the stream is live.
        check(call, unsafe { (symbols.stream_synchronize)(stream) })
    }

    fn stream_query(&self, stream: StreamId) -> DriverResult<bool> {
        let call = Call::StreamQuery;
        let stream = self.stream(call, stream)?;
        let symbols = self.enter(call)?;
        // SAFETY: the stream is live.
        match unsafe { (symbols.stream_query)(stream) } {
            code::NOT_READY => {
                mark::end();
                Ok(false)
            }
            status => check(call, status).map(|()| true),
        }
    }

    fn device_synchronize(&self) -> DriverResult<()> {
        let call = Call::DeviceSynchronize;
        let symbols = self.enter(call)?;
        // SAFETY: no memory is passed.
        check(call, unsafe { (symbols.context_synchronize)() })
    }

    fn event_create(&self) -> DriverResult<EventId> {
        self.new_event(EVENT_WITHOUT_TIMING)
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let call = Call::EventRecord;
        let (event, stream) = (self.event(call, event)?, self.stream(call, stream)?);
        let symbols = self.enter(call)?;
        // SAFETY: both are live.
        check(call, unsafe { (symbols.event_record)(event, stream) })
    }

    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        let call = Call::EventQuery;
        let event = self.event(call, event)?;
        let symbols = self.enter(call)?;
        // SAFETY: the event is live.
        match unsafe { (symbols.event_query)(event) } {
            code::NOT_READY => {
                mark::end();
                Ok(false)
            }
            status => check(call, status).map(|()| true),
        }
    }

    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        let call = Call::EventSynchronize;
        let event = self.event(call, event)?;
        let symbols = self.enter(call)?;
        // SAFETY: the event is live.
        check(call, unsafe { (symbols.event_synchronize)(event) })
    }

    fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        let call = Call::EventDestroy;
        let handle = self.event(call, event)?;
        let symbols = self.enter(call)?;
        // SAFETY: the event is live.
        check(call, unsafe { (symbols.event_destroy)(handle) })?;
        self.live().events.remove(&event.0);
        Ok(())
    }

    fn close(&self) -> Vec<DriverError> {
        let live = {
            let mut live = self.live();
            if live.closed {
                return Vec::new();
            }
            std::mem::replace(&mut *live, Live { closed: true, ..Live::default() })
        };
        let symbols = self.cuda.symbols;
        let mut errors = Vec::new();
        let mut one = |call: Call, work: &dyn Fn() -> u32| {
            mark::begin(call);
            let result = check(call, work());
            errors.extend(result.err());
            result.is_ok()
        };
        // Everything goes in the order of dependence; what fails stays with the context, which goes with the process.
        // SAFETY, for all of them: handles and addresses are live, and nobody can use them any more.
        let set = Call::Other("cuCtxSetCurrent");
        if one(set, &|| unsafe { (symbols.context_set)(self.context as Opaque) }) {
            one(Call::DeviceSynchronize, &|| unsafe { (symbols.context_synchronize)() });
            for event in live.events {
                one(Call::EventDestroy, &|| unsafe { (symbols.event_destroy)(event as usize as Opaque) });
            }
            for stream in live.streams {
                one(Call::StreamDestroy, &|| unsafe { (symbols.stream_destroy)(stream as usize as Opaque) });
            }
            for (address, _) in live.ranges.into_iter().filter(|(_, (_, whole))| *whole) {
                one(Call::MemFree, &|| unsafe { (symbols.mem_free)(address) });
            }
            if let (Some(unmap), Some(release), Some(free)) = (symbols.mem_unmap, symbols.mem_release, symbols.address_free) {
                for (address, bytes) in live.mapped {
                    one(Call::MemUnmap, &|| unsafe { unmap(address, bytes as usize) });
                }
                for handle in live.handles.into_keys() {
                    one(Call::MemRelease, &|| unsafe { release(handle) });
                }
                for (address, bytes) in live.reservations {
                    one(Call::MemAddressFree, &|| unsafe { free(address, bytes as usize) });
                }
            }
            if let Some((module, _)) = live.module {
                one(Call::Other("cuModuleUnload"), &|| unsafe { (symbols.module_unload)(module as Opaque) });
            }
            one(set, &|| unsafe { (symbols.context_set)(std::ptr::null_mut()) });
        }
        one(Call::Other("cuDevicePrimaryCtxRelease"), &|| unsafe { (symbols.context_release)(self.device) });
        errors
    }
}

impl Kernels for CudaGpu {
    fn shape(&self) -> Shape {
        Shape { multiprocessors: self.about.multiprocessors, l2_bytes: self.about.l2_bytes }
    }

    fn launch(&self, launch: &Launch, stream: StreamId) -> DriverResult<()> {
        let call = Call::LaunchKernel;
        for (address, bytes) in launch.ranges() {
            self.accessible(call, address, bytes)?;
        }
        let stream = self.stream(call, stream)?;
        let symbols = self.enter(call)?;
        let function = self.function(symbols, launch.kernel)?;
        let mut arguments = [0u64; crate::gpu::kernels::host::MOST_ARGUMENTS];
        let mut pointers = [std::ptr::null_mut::<c_void>(); crate::gpu::kernels::host::MOST_ARGUMENTS];
        for ((slot, pointer), argument) in arguments.iter_mut().zip(&mut pointers).zip(launch.arguments()) {
            *slot = *argument;
            *pointer = (slot as *mut u64).cast();
        }
        mark::begin(call);
        // SAFETY: the function has as many 64-bit parameters as the launch has arguments; the driver copies them before it
        // returns. The memory they name is live.
        check(call, unsafe {
            (symbols.launch)(function, launch.grid, 1, 1, launch.block, 1, 1, 0, stream, pointers.as_mut_ptr(), std::ptr::null_mut())
        })
    }

    fn timed_event_create(&self) -> DriverResult<EventId> {
        self.new_event(0)
    }

    fn event_elapsed_ms(&self, start: EventId, end: EventId) -> DriverResult<f32> {
        let call = Call::Other("cuEventElapsedTime");
        let (start, end) = (self.event(call, start)?, self.event(call, end)?);
        let symbols = self.enter(call)?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are live; writes one number.
        check(call, unsafe { (symbols.event_elapsed)(&mut milliseconds, start, end) })?;
        Ok(milliseconds)
    }

    fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

impl Drop for CudaGpu {
    fn drop(&mut self) {
        // Whoever wants to know what fails calls it before.
        let _ = self.close();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::gpu::fakes::{in_child, in_child_with, without};
    use crate::gpu::kernels::Pattern;
    use crate::gpu::kernels::host::RESULT_BYTES;

    const MIB: u64 = 1 << 20;
    const HERE: &str = module_path!();

    fn gpu() -> CudaGpu {
        CudaGpu::open(Cuda::open().expect("the fake driver"), 0).expect("its device")
    }

    fn code_of<T: fmt::Debug>(result: DriverResult<T>) -> u32 {
        result.expect_err("a failure").code
    }

    fn words(gpu: &CudaGpu, address: u64, count: usize) -> Vec<u64> {
        let mut bytes = vec![0; count * 8];
        gpu.copy_to_host(&mut bytes, address).expect("a copy");
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect()
    }

    #[test]
    fn memory_is_taken_used_and_given_back() {
        in_child(HERE, "memory_is_taken_used_and_given_back", &[], || {
            let gpu = gpu();
            let before = gpu.mem_get_info().expect("memory");
            assert_eq!(before, MemInfo { free: 62 * MIB, total: 64 * MIB }, "the context has its share");
            let a = gpu.mem_alloc(3 * MIB).expect("room");
            gpu.memset_d32(a, 0x0102_0304, 3 * MIB / 4, StreamId::DEFAULT).expect("inside");
            gpu.memset_d8(a + 8, 9, 4, StreamId::DEFAULT).expect("inside");
            let stream = gpu.stream_create().expect("a stream");
            gpu.copy_on_device(a + MIB, a, 64, stream).expect("inside");
            assert_eq!(words(&gpu, a + MIB, 2), [0x0102_0304_0102_0304, 0x0102_0304_0909_0909]);
            assert_eq!(code_of(gpu.memset_d8(a, 0, 3 * MIB + 1, stream)), code::ILLEGAL_ADDRESS);
            assert_eq!(code_of(gpu.copy_to_device(a - 1, &[0, 0])), code::ILLEGAL_ADDRESS);
            assert_eq!(code_of(gpu.memset_d8(a, 0, 1, StreamId(12345))), code::INVALID_HANDLE);
            assert_eq!(code_of(gpu.mem_free(a + 1)), code::INVALID_VALUE);
            assert_eq!(code_of(gpu.mem_alloc(63 * MIB)), code::OUT_OF_MEMORY);
            let event = gpu.event_create().expect("an event");
            gpu.event_record(event, stream).expect("live");
            assert_eq!((gpu.event_query(event), gpu.stream_query(stream)), (Ok(true), Ok(true)));
            gpu.event_destroy(event).expect("live");
            assert_eq!(code_of(gpu.event_query(event)), code::INVALID_HANDLE);
            gpu.stream_destroy(stream).expect("live");
            gpu.mem_free(a).expect("live");
            assert_eq!(gpu.mem_get_info().expect("memory"), before);
            assert_eq!(code_of(gpu.copy_to_host(&mut [0], a)), code::ILLEGAL_ADDRESS);
        });
    }

    #[test]
    fn virtual_memory_maps_one_place_to_two_addresses() {
        in_child(HERE, "virtual_memory_maps_one_place_to_two_addresses", &[], || {
            let gpu = gpu();
            assert_eq!(gpu.virtual_memory_problem(), None);
            let unit = gpu.granularity().expect("a granularity");
            let before = gpu.mem_get_info().expect("memory").free;
            let space = gpu.address_reserve(16 * unit).expect("address space");
            let handle = gpu.mem_create(unit).expect("room");
            gpu.mem_map(space, unit, handle).expect("free");
            assert_eq!(code_of(gpu.copy_to_device(space, &[1])), code::ILLEGAL_ADDRESS, "no access yet");
            gpu.mem_map(space + 4 * unit, unit, handle).expect("free");
            gpu.mem_set_access(space, unit).expect("mapped");
            gpu.mem_set_access(space + 4 * unit, unit).expect("mapped");
            gpu.copy_to_device(space + 64, &[7; 8]).expect("accessible");
            assert_eq!(words(&gpu, space + 4 * unit + 64, 1), [0x0707_0707_0707_0707]);
            // Neighbouring mappings are one range.
            let next = gpu.mem_create(unit).expect("room");
            gpu.mem_map(space + unit, unit, next).expect("free");
            gpu.mem_set_access(space + unit, unit).expect("mapped");
            gpu.memset_d8(space, 5, 2 * unit, StreamId::DEFAULT).expect("both");
            for handle in [handle, next] {
                gpu.mem_release(handle).expect("live");
            }
            assert_eq!(code_of(gpu.address_free(space, 16 * unit)), code::INVALID_VALUE, "something is mapped");
            gpu.mem_unmap(space, 2 * unit).expect("mapped");
            gpu.mem_unmap(space + 4 * unit, unit).expect("mapped");
            gpu.address_free(space, 16 * unit).expect("empty");
            assert_eq!(gpu.mem_get_info().expect("memory").free, before);
        });
    }

    #[test]
    fn kernels_run_and_are_timed() {
        in_child(HERE, "kernels_run_and_are_timed", &[("TARE_FAKE_CUDA", "stuck=0x400010:4:0,flip=0x400028:1@2")], || {
            let gpu = gpu();
            // The first three granules are taken in turn: the broken byte is in the third.
            let result = gpu.mem_alloc(RESULT_BYTES).expect("room");
            let _second = gpu.mem_alloc(MIB).expect("room");
            let a = gpu.mem_alloc(2 * MIB).expect("room");
            gpu.memset_d8(result, 0, RESULT_BYTES, StreamId::DEFAULT).expect("inside");
            let (start, end) = (gpu.timed_event_create().expect("an event"), gpu.timed_event_create().expect("an event"));
            gpu.event_record(start, StreamId::DEFAULT).expect("live");
            let count = 2 * MIB / 8;
            let pattern = Pattern::Constant as u64;
            gpu.launch(&Launch::new(Kernel::Fill, 4, 128, &[a, count, 0, pattern, !0, 0]), StreamId::DEFAULT).expect("a launch");
            gpu.event_record(end, StreamId::DEFAULT).expect("live");
            gpu.event_synchronize(end).expect("live");
            assert!(gpu.event_elapsed_ms(start, end).expect("both are done") > 0.0);
            let verify = Launch::new(Kernel::Verify, 4, 128, &[a, count, 0, pattern, !0, 0, result]);
            gpu.launch(&verify, StreamId::DEFAULT).expect("a launch");
            gpu.device_synchronize().expect("no error");
            let found = words(&gpu, result, (RESULT_BYTES / 8) as usize);
            assert_eq!((found[0], found[2], found[1]), (2, !(a + 0x10), a + 0x28));
            assert_eq!(&found[132..138], [a + 0x10, !0, !4, a + 0x28, !0, !1]);
            // A launch outside live memory does not reach the driver.
            let wild = Launch::new(Kernel::Fill, 1, 32, &[a, count + 1, 0, pattern, 0, 0]);
            assert_eq!(code_of(gpu.launch(&wild, StreamId::DEFAULT)), code::ILLEGAL_ADDRESS);
        });
    }

    #[test]
    fn every_problem_is_an_error_with_its_cause() {
        type Case<'c> = (&'c [(&'c str, &'c str)], fn(&CudaProblem) -> bool);
        let cases: [Case<'_>; 8] = [
            (&[("TARE_FAKE_DEVICES", "none")], |problem| *problem == CudaProblem::NoDevice { visible: None }),
            (&[("CUDA_VISIBLE_DEVICES", "")], |problem| *problem == CudaProblem::NoDevice { visible: Some(String::new()) }),
            (&[("TARE_FAKE_CUDA", "init=803")], |problem| problem.hint().contains("two versions")),
            // A code that no version of the driver has ever given.
            (&[("TARE_FAKE_CUDA", "init=4711")], |problem| problem.to_string().contains("code 4711")),
            (
                &[("TARE_FAKE_CUDA", "version=11040")],
                |problem| matches!(problem, CudaProblem::DriverTooOld { found } if found.to_string() == "11.4"),
            ),
            (&[("TARE_FAKE_DEVICES", "64MiB;cc=3.5")], |problem| *problem == CudaProblem::DeviceTooOld { ordinal: 0, found: (3, 5) }),
            (&[("TARE_FAKE_CUDA", "fail=cuDevicePrimaryCtxRetain:46")], |problem| problem.hint().contains("compute mode")),
            (&[("TARE_FAKE_CUDA", "fail=cuDeviceGetName:0xFFFFFFFF")], |problem| {
                *problem == CudaProblem::Failed(DriverError::new(Call::Other("cuDeviceGetName"), u32::MAX))
            }),
        ];
        for (variables, expected) in cases {
            in_child(HERE, "every_problem_is_an_error_with_its_cause", variables, || {
                let problem = Cuda::open().and_then(|cuda| CudaGpu::open(cuda, 0)).expect_err("a problem");
                assert!(expected(&problem), "{variables:?}: {problem:?}: {problem}: {}", problem.hint());
            });
        }
    }

    #[test]
    fn a_missing_function_is_named() {
        let take = |folder: &Path| without(&folder.join("libcuda.so"), "cuMemGetInfo_v2");
        in_child_with(HERE, "a_missing_function_is_named", &[], take, || {
            assert_eq!(Cuda::open().expect_err("a problem"), CudaProblem::MissingSymbol("cuMemGetInfo_v2"));
        });
    }

    #[test]
    fn a_driver_without_virtual_memory_can_still_be_used() {
        let take = |folder: &Path| without(&folder.join("libcuda.so"), "cuMemMap");
        in_child_with(HERE, "a_driver_without_virtual_memory_can_still_be_used", &[], take, || {
            let gpu = gpu();
            assert!(!gpu.properties().virtual_memory);
            assert!(gpu.virtual_memory_problem().is_some_and(|problem| problem.contains("`cuMemMap`")));
            gpu.mem_alloc(MIB).expect("room");
        });
    }

    #[test]
    fn wsl2_refuses_access() {
        in_child(HERE, "wsl2_refuses_access", &[("TARE_FAKE_CUDA", "wsl2")], || {
            let gpu = gpu();
            let space = gpu.address_reserve(2 * MIB).expect("address space");
            let handle = gpu.mem_create(2 * MIB).expect("room");
            gpu.mem_map(space, 2 * MIB, handle).expect("free");
            assert_eq!(code_of(gpu.mem_set_access(space, 2 * MIB)), code::UNKNOWN);
        });
    }

    #[test]
    fn devices_are_those_that_this_process_may_see() {
        let cards = "32MiB;name=Small;cc=7.5;bus=0x41,128MiB;name=Large;cc=9.0;bus=0x12";
        in_child(
            HERE,
            "devices_are_those_that_this_process_may_see",
            &[("TARE_FAKE_DEVICES", cards), ("CUDA_VISIBLE_DEVICES", "1,0")],
            || {
                let cuda = Cuda::open().expect("the fake driver");
                let devices: Vec<CudaDevice> =
                    cuda.devices().expect("a count").into_iter().map(|device| device.expect("a device")).collect();
                let shown: Vec<_> = devices
                    .iter()
                    .map(|device| {
                        (device.ordinal, device.name.as_str(), device.pci.as_str(), device.total_memory, device.compute_capability)
                    })
                    .collect();
                assert_eq!(shown, [(0, "Large", "0000:12:00.0", 128 * MIB, (9, 0)), (1, "Small", "0000:41:00.0", 32 * MIB, (7, 5))]);
                assert!(devices[0].uuid.starts_with("GPU-fa4e0000-0000-0000-") && devices[0].uuid.len() == 40);
                assert_eq!(CudaGpu::open(cuda, 2).expect_err("no"), CudaProblem::NoSuchDevice { ordinal: 2, count: 2 });
                // Two devices at once, each with its own memory.
                let (large, small) = (CudaGpu::open(cuda, 0).expect("a device"), CudaGpu::open(cuda, 1).expect("a device"));
                let (a, b) = (large.mem_alloc(MIB).expect("room"), small.mem_alloc(MIB).expect("room"));
                large.memset_d8(a, 1, MIB, StreamId::DEFAULT).expect("inside");
                small.memset_d8(b, 2, MIB, StreamId::DEFAULT).expect("inside");
                assert_eq!((words(&large, a, 1)[0] as u8, words(&small, b, 1)[0] as u8), (1, 2));
                assert_eq!(code_of(large.memset_d8(b, 0, 1, StreamId::DEFAULT)), code::ILLEGAL_ADDRESS);
            },
        );
    }

    #[test]
    fn calls_fail_when_ordered_and_memory_is_as_broken_as_ordered() {
        let faults = "once=cuMemAlloc_v2:999@2,oom=24MiB,alias=0x400000:0x200000:4096,take=8MiB@1,leak=2MiB,late=50";
        in_child(HERE, "calls_fail_when_ordered_and_memory_is_as_broken_as_ordered", &[("TARE_FAKE_CUDA", faults)], || {
            let gpu = gpu();
            let first = gpu.mem_alloc(2 * MIB).expect("room");
            assert_eq!(code_of(gpu.mem_alloc(MIB)), code::UNKNOWN);
            let (a, b) = (gpu.mem_alloc(2 * MIB).expect("room"), gpu.mem_alloc(2 * MIB).expect("room"));
            gpu.memset_d8(a, 1, 2 * MIB, StreamId::DEFAULT).expect("inside");
            gpu.memset_d8(b, 2, 2 * MIB, StreamId::DEFAULT).expect("inside");
            let seen = [words(&gpu, a, 1)[0] as u8, words(&gpu, a + 4096, 1)[0] as u8];
            assert_eq!(seen, [2, 1], "one page of the one answers for the other");
            assert_eq!(code_of(gpu.mem_alloc(20 * MIB)), code::OUT_OF_MEMORY);
            let before = gpu.mem_get_info().expect("memory").free;
            gpu.launch(&Launch::new(Kernel::Fill, 1, 32, &[a, 4, 0, 1, 0, 0]), StreamId::DEFAULT).expect("a launch");
            assert_eq!(gpu.mem_get_info().expect("memory").free, before - 8 * MIB, "another process came");
            gpu.mem_free(first).expect("live");
            assert_eq!(gpu.mem_get_info().expect("memory").free, before - 8 * MIB, "it did not come back");
            gpu.mem_free(b).expect("live");
            assert_eq!(gpu.mem_get_info().expect("memory").free, before - 6 * MIB);
            let event = gpu.event_create().expect("an event");
            gpu.event_record(event, StreamId::DEFAULT).expect("live");
            assert_eq!(gpu.event_query(event), Ok(false));
            gpu.event_synchronize(event).expect("live");
            assert_eq!(gpu.event_query(event), Ok(true));
        });
    }

    #[test]
    fn weak_bits_read_wrongly_now_and_then() {
        in_child(HERE, "weak_bits_read_wrongly_now_and_then", &[("TARE_FAKE_CUDA", "weak=0:1:3")], || {
            let gpu = gpu();
            let a = gpu.mem_alloc(MIB).expect("room");
            gpu.memset_d8(a, 0, MIB, StreamId::DEFAULT).expect("inside");
            let seen: Vec<u64> = (0..60).map(|_| words(&gpu, a, 1)[0]).collect();
            assert!(seen.contains(&0) && seen.contains(&1) && seen.iter().all(|word| *word < 2), "{seen:?}");
        });
    }

    #[test]
    fn the_allocator_runs_over_it() {
        in_child(HERE, "the_allocator_runs_over_it", &[("TARE_FAKE_DEVICES", "256MiB")], || {
            use crate::gpu::alloc::{AllocConfig, CachingAllocator, Policy};
            for settings in ["", "expandable_segments:True"] {
                let gpu = gpu();
                let before = gpu.mem_get_info().expect("memory").free;
                let policy = Policy::default();
                let (config, _) = AllocConfig::parse(settings, &policy).expect("settings");
                let allocator = CachingAllocator::new(&gpu, policy, config);
                let stream = StreamId::DEFAULT;
                let blocks: Vec<u64> =
                    [1000, 3 << 20, 25 << 20].into_iter().map(|bytes| allocator.malloc(bytes, stream).expect("room").address).collect();
                for block in &blocks {
                    gpu.memset_d8(*block, 3, 512, stream).expect("it is ours");
                }
                for block in blocks {
                    allocator.free(block).expect("it was given");
                }
                allocator.empty_cache().expect("it is empty");
                assert_eq!(gpu.mem_get_info().expect("memory").free, before, "{settings}");
            }
        });
    }
}
