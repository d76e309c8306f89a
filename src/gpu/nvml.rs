//! The driver's own view of the machine, through NVML (`libnvidia-ml.so.1`): memory, processes, error counters, versions.
//!
//! Every answer is a value, "not supported" (which is no fault: a card without ECC has no counters), or the text of an error.
//! nvml-wrapper does the calls; what it has no function for, or where it would panic for want of a symbol, is called here.
//! As with libcuda, a library that hangs or crashes can only be survived from outside: see [`crate::child`].
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, RetirementCause, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, EventSet, Nvml};

use super::driver::cuda::CudaVersion;
use super::memtest::health::{EccCounters, GpuProcess, HealthSource, Reading, Replaced};

/// What came of a question.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Asked<T> {
    /// The answer.
    Value(T),
    /// This card, driver or system has no such thing.
    NotSupported,
    /// It could not be had, and why.
    Problem(String),
}

impl<T> Asked<T> {
    /// The answer, if there is one.
    pub fn value(&self) -> Option<&T> {
        match self {
            Asked::Value(value) => Some(value),
            _ => None,
        }
    }

    /// As a [`Reading`], where "not supported" is a text too.
    ///
    /// # Errors
    /// There is no answer.
    pub fn reading(self) -> Reading<T> {
        match self {
            Asked::Value(value) => Ok(value),
            Asked::NotSupported => Err("NVML says: not supported".to_owned()),
            Asked::Problem(why) => Err(why),
        }
    }

    fn map<U>(self, change: impl FnOnce(T) -> U) -> Asked<U> {
        match self {
            Asked::Value(value) => Asked::Value(change(value)),
            Asked::NotSupported => Asked::NotSupported,
            Asked::Problem(why) => Asked::Problem(why),
        }
    }
}

impl<T> From<Result<T, NvmlError>> for Asked<T> {
    fn from(result: Result<T, NvmlError>) -> Self {
        match result {
            Ok(value) => Asked::Value(value),
            Err(NvmlError::NotSupported | NvmlError::VgpuEccNotSupported) => Asked::NotSupported,
            Err(error) => Asked::Problem(describe(&error)),
        }
    }
}

fn describe(error: &NvmlError) -> String {
    match error {
        NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => "this driver's NVML has no such function".to_owned(),
        NvmlError::UnexpectedVariant(code) => format!("NVML failed with code {code}, which this version does not know"),
        NvmlError::LibRmVersionMismatch => "NVML says: driver/library version mismatch".to_owned(),
        other => format!("NVML says: {}", other.to_string().trim_end_matches('.')),
    }
}

/// Why NVML cannot be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NvmlProblem {
    /// The library cannot be loaded.
    NoLibrary,
    /// The kernel module and the libraries are of two drivers.
    VersionMismatch,
    /// Any other refusal.
    Failed(String),
}

impl fmt::Display for NvmlProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NvmlProblem::NoLibrary => f.write_str("NVIDIA's management library (libnvidia-ml.so.1) cannot be loaded"),
            NvmlProblem::VersionMismatch => f.write_str("driver/library version mismatch, says NVML"),
            NvmlProblem::Failed(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for NvmlProblem {}

/// NVML of this process, initialised.
#[derive(Debug, Clone, Copy)]
pub struct Management {
    nvml: &'static Nvml,
}

/// Memory of a device as the driver counts it, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NvmlMemory {
    pub total: u64,
    pub free: u64,
    /// Without what is reserved, where the driver tells the two apart.
    pub used: u64,
    /// Held by the driver for itself; unknown to drivers before 510.
    pub reserved: Option<u64>,
}

/// Whether ECC is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct EccMode {
    pub on: bool,
    /// After the next reset.
    pub on_after_reset: bool,
}

/// How much of a device is in use, in per cent of the last sample period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Utilisation {
    pub gpu: u32,
    pub memory: u32,
}

/// A device as NVML sees it. Every card of the machine is listed, whatever CUDA_VISIBLE_DEVICES says.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NvmlDevice {
    /// NVML's number, in the order of the PCI bus: not always CUDA's.
    pub index: u32,
    pub name: Asked<String>,
    /// `GPU-…`, by which the CUDA device of the same card is found.
    pub uuid: Asked<String>,
    /// `0000:3b:00.0`, in lower case.
    pub pci: Asked<String>,
    /// Major and minor.
    pub compute_capability: Asked<(u32, u32)>,
    pub memory: Asked<NvmlMemory>,
    pub processes: Asked<Vec<GpuProcess>>,
    pub ecc_mode: Asked<EccMode>,
    pub ecc: Asked<EccCounters>,
    /// Rows that were remapped (Ampere and later).
    pub remapped_rows: Asked<Replaced>,
    /// Pages that were retired (before Ampere).
    pub retired_pages: Asked<Replaced>,
    /// Whether critical Xid events can be waited for.
    pub xid_events: Asked<bool>,
    /// Celsius.
    pub temperature: Asked<u32>,
    /// Milliwatts.
    pub power: Asked<u32>,
    pub utilisation: Asked<Utilisation>,
    /// MHz.
    pub sm_clock: Asked<u32>,
    /// MHz.
    pub memory_clock: Asked<u32>,
    /// Whether the card is cut into instances (MIG).
    pub mig: Asked<bool>,
}

/// Whether process numbers of the driver are those of this process's view: not so in a container.
pub fn pids_are_ours() -> bool {
    // The number of the first PID namespace is fixed in the kernel (PROC_PID_INIT_INO).
    std::fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() == "pid:[4026531836]")
}

fn library() -> Result<&'static Nvml, NvmlProblem> {
    static NVML: OnceLock<Result<Nvml, NvmlProblem>> = OnceLock::new();
    // Never dropped: shutting NVML down would panic with a library that lacks the function.
    NVML.get_or_init(|| {
        let mut last = NvmlProblem::NoLibrary;
        // Containers have only the first name; the wrapper would ask for the second alone.
        for name in ["libnvidia-ml.so.1", "libnvidia-ml.so"] {
            match Nvml::builder().lib_path(OsStr::new(name)).init() {
                Ok(nvml) => return Ok(nvml),
                Err(NvmlError::LibloadingError(_)) => {}
                Err(NvmlError::LibRmVersionMismatch) => return Err(NvmlProblem::VersionMismatch),
                Err(NvmlError::FailedToLoadSymbol(_)) => last = NvmlProblem::Failed("NVML has no function `nvmlInit_v2`".to_owned()),
                Err(error) => return Err(NvmlProblem::Failed(describe(&error))),
            }
        }
        Err(last)
    })
    .as_ref()
    .map_err(Clone::clone)
}

impl Management {
    /// Loads NVML and initialises it.
    ///
    /// # Errors
    /// There is no library, or it refuses.
    pub fn open() -> Result<Management, NvmlProblem> {
        Ok(Management { nvml: library()? })
    }

    /// Version of the driver, such as `550.54.14`.
    pub fn driver_version(&self) -> Asked<String> {
        self.nvml.sys_driver_version().map(clean).into()
    }

    /// Highest CUDA version that the driver supports, as NVML says.
    pub fn cuda_version(&self) -> Asked<CudaVersion> {
        match self.nvml.sys_cuda_driver_version() {
            Ok(number) => CudaVersion::from_number(number)
                .map_or_else(|| Asked::Problem(format!("NVML says CUDA {number}, which is no version")), Asked::Value),
            Err(error) => Err(error).into(),
        }
    }

    /// All devices, in NVML's order.
    ///
    /// # Errors
    /// They cannot be counted.
    pub fn devices(&self) -> Result<Vec<Asked<NvmlDevice>>, NvmlProblem> {
        let count = self.nvml.device_count().map_err(|error| NvmlProblem::Failed(describe(&error)))?;
        Ok((0..count)
            .map(|index| {
                let device: Asked<Device<'static>> = self.nvml.device_by_index(index).into();
                device.map(|device| look_at(self.nvml, index, &device))
            })
            .collect())
    }

    /// What the driver tells about one card, from now on. `uuid` and `pci` as the CUDA driver gives them; the UUID counts,
    /// and the place on the bus where no card has it (an instance of a card has a UUID of its own).
    ///
    /// # Errors
    /// NVML has no such card.
    pub fn health(&self, uuid: &str, pci: &str) -> Result<NvmlHealth, NvmlProblem> {
        let by_pci = || {
            let count = self.nvml.device_count().unwrap_or(0);
            (0..count)
                .filter_map(|index| self.nvml.device_by_index(index).ok())
                .find(|device| pci_of(device).value().is_some_and(|at| at == pci))
        };
        let device = match self.nvml.device_by_uuid(uuid) {
            Ok(device) => device,
            Err(error) => by_pci().ok_or_else(|| NvmlProblem::Failed(describe(&error)))?,
        };
        let before = processes(self.nvml, &device, None).value().into_iter().flatten().map(|process| process.pid).collect();
        let version = self.driver_version();
        let name = version.value().map_or_else(|| "NVML".to_owned(), |version| format!("NVML {version}"));
        Ok(NvmlHealth { nvml: self.nvml, device, name, before, events: Mutex::new(None) })
    }
}

/// Texts of a driver go to terminals and reports: no control characters.
fn clean(text: String) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

fn pci_of(device: &Device<'_>) -> Asked<String> {
    let place: Asked<_> = device.pci_info().into();
    place.map(|pci| format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device))
}

fn look_at(nvml: &'static Nvml, index: u32, device: &Device<'static>) -> NvmlDevice {
    let asked = |result: Result<u32, NvmlError>| -> Asked<u32> { result.into() };
    NvmlDevice {
        index,
        name: device.name().map(clean).into(),
        uuid: device.uuid().map(clean).into(),
        pci: pci_of(device),
        compute_capability: device
            .cuda_compute_capability()
            .map(|capability| (u32::try_from(capability.major).unwrap_or(0), u32::try_from(capability.minor).unwrap_or(0)))
            .into(),
        memory: memory(nvml, device),
        processes: processes(nvml, device, None),
        ecc_mode: device.is_ecc_enabled().map(|mode| EccMode { on: mode.currently_enabled, on_after_reset: mode.pending_enabled }).into(),
        ecc: ecc(device),
        remapped_rows: remapped(nvml, device),
        retired_pages: retired(device),
        xid_events: device.supported_event_types().map(|types| types.contains(EventTypes::CRITICAL_XID_ERROR)).into(),
        temperature: asked(device.temperature(TemperatureSensor::Gpu)),
        power: asked(device.power_usage()),
        utilisation: device.utilization_rates().map(|rates| Utilisation { gpu: rates.gpu, memory: rates.memory }).into(),
        sm_clock: asked(device.clock_info(Clock::SM)),
        memory_clock: asked(device.clock_info(Clock::Memory)),
        mig: device.mig_mode().map(|mode| mode.current != 0).into(),
    }
}

fn memory(nvml: &Nvml, device: &Device<'_>) -> Asked<NvmlMemory> {
    match device.memory_info() {
        Ok(info) => Asked::Value(NvmlMemory { total: info.total, free: info.free, used: info.used, reserved: Some(info.reserved) }),
        Err(error) => {
            // Drivers before 510 have only the first form, which counts what is reserved as used.
            #[repr(C)]
            #[derive(Default)]
            struct Legacy {
                total: u64,
                free: u64,
                used: u64,
            }
            let Ok(function) = &nvml.lib().nvmlDeviceGetMemoryInfo else { return Err(error).into() };
            let mut info = Legacy::default();
            // SAFETY: the handle is of this library, and the structure is three 64-bit numbers (`nvmlMemory_t`).
            match unsafe { function(device.handle(), (&raw mut info).cast()) } {
                0 => Asked::Value(NvmlMemory { total: info.total, free: info.free, used: info.used, reserved: None }),
                _ => Err(error).into(),
            }
        }
    }
}

/// Who has a context. `before`: numbers seen earlier, to tell which process is this one in a container.
fn processes(nvml: &Nvml, device: &Device<'_>, before: Option<&BTreeSet<u32>>) -> Asked<Vec<GpuProcess>> {
    let ours = pids_are_ours();
    let own = |pid: u32| match before {
        _ if ours => pid == std::process::id(),
        Some(before) => !before.contains(&pid),
        None => false,
    };
    let compute = match device.running_compute_processes() {
        Ok(found) => found,
        Err(error) => return Err(error).into(),
    };
    // A card without a display part has none, and says so in different ways.
    let graphics = device.running_graphics_processes().unwrap_or_default();
    let mut all: Vec<GpuProcess> = Vec::new();
    for (process, compute) in compute.into_iter().map(|process| (process, true)).chain(graphics.into_iter().map(|process| (process, false)))
    {
        if all.iter().any(|other| other.pid == process.pid) {
            continue;
        }
        all.push(GpuProcess {
            pid: process.pid,
            name: if ours { name_of(nvml, process.pid) } else { None },
            bytes: match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            },
            compute,
            own: own(process.pid),
        });
    }
    Asked::Value(all)
}

fn name_of(nvml: &Nvml, pid: u32) -> Option<String> {
    let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok();
    let name = comm.or_else(|| {
        let path = nvml.sys_process_name(pid, 256).ok()?;
        Some(path.rsplit('/').next()?.to_owned())
    })?;
    Some(clean(name)).filter(|name| !name.is_empty())
}

fn ecc(device: &Device<'_>) -> Asked<EccCounters> {
    let ask = |kind, life| device.total_ecc_errors(kind, life);
    let all = || -> Result<EccCounters, NvmlError> {
        Ok(EccCounters {
            volatile_corrected: ask(MemoryError::Corrected, EccCounter::Volatile)?,
            volatile_uncorrected: ask(MemoryError::Uncorrected, EccCounter::Volatile)?,
            aggregate_corrected: ask(MemoryError::Corrected, EccCounter::Aggregate)?,
            aggregate_uncorrected: ask(MemoryError::Uncorrected, EccCounter::Aggregate)?,
        })
    };
    all().into()
}

fn remapped(nvml: &Nvml, device: &Device<'_>) -> Asked<Replaced> {
    let Ok(function) = &nvml.lib().nvmlDeviceGetRemappedRows else { return Err(NvmlError::FunctionNotFound).into() };
    let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
    // SAFETY: the handle is of this library; four integers are written.
    let status = unsafe { function(device.handle(), &mut corrected, &mut uncorrected, &mut pending, &mut failed) };
    match status {
        0 => Asked::Value(Replaced {
            corrected: u64::from(corrected),
            uncorrected: u64::from(uncorrected),
            pending: pending != 0,
            failed: failed != 0,
        }),
        code => Err(NvmlError::from(code)).into(),
    }
}

fn retired(device: &Device<'_>) -> Asked<Replaced> {
    let count = |cause| device.retired_pages(cause).map(|pages| pages.len() as u64);
    let all = || -> Result<Replaced, NvmlError> {
        Ok(Replaced {
            corrected: count(RetirementCause::MultipleSingleBitEccErrors)?,
            uncorrected: count(RetirementCause::DoubleBitEccError)?,
            pending: device.are_pages_pending_retired()?,
            failed: false,
        })
    };
    all().into()
}

/// What the driver tells about one card while it is tested.
pub struct NvmlHealth {
    nvml: &'static Nvml,
    device: Device<'static>,
    name: String,
    before: BTreeSet<u32>,
    events: Mutex<Option<EventSet<'static>>>,
}

// SAFETY: a device handle is a number of the library, which may be used from any thread ("NVML is thread-safe").
unsafe impl Send for NvmlHealth {}
// SAFETY: as above; the event set, of which that is not said, is behind a lock.
unsafe impl Sync for NvmlHealth {}

impl fmt::Debug for NvmlHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmlHealth").field("name", &self.name).finish_non_exhaustive()
    }
}

impl NvmlHealth {
    fn start_watching(&self) -> Result<EventSet<'static>, NvmlError> {
        if !self.device.supported_event_types()?.contains(EventTypes::CRITICAL_XID_ERROR) {
            return Err(NvmlError::NotSupported);
        }
        // The wrapper frees a set when it is dropped, and would panic for want of the function.
        if self.nvml.lib().nvmlEventSetFree.is_err() {
            return Err(NvmlError::FunctionNotFound);
        }
        let set = self.nvml.create_event_set()?;
        self.device.register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|error| error.error)
    }
}

impl HealthSource for NvmlHealth {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ecc(&self) -> Reading<EccCounters> {
        if let Asked::Value(EccMode { on: false, .. }) = Asked::from(
            self.device.is_ecc_enabled().map(|mode| EccMode { on: mode.currently_enabled, on_after_reset: mode.pending_enabled }),
        ) {
            return Err("ECC is off".to_owned());
        }
        ecc(&self.device).reading()
    }

    fn replaced(&self) -> Reading<Replaced> {
        match remapped(self.nvml, &self.device) {
            Asked::Value(rows) => Ok(rows),
            without => match retired(&self.device) {
                Asked::Value(pages) => Ok(pages),
                _ => without.reading(),
            },
        }
    }

    fn watch_xids(&self) -> Reading<()> {
        let set = Asked::from(self.start_watching()).reading()?;
        *self.events.lock().unwrap_or_else(PoisonError::into_inner) = Some(set);
        Ok(())
    }

    fn xids(&self) -> Reading<Vec<u64>> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(set) = &*events else { return Err("Xid events are not watched".to_owned()) };
        let mut found = Vec::new();
        // Bounded: a library that always has one more must not hold the test.
        while found.len() < 1000 {
            match set.wait(0) {
                Ok(event) => found.extend(event.event_data.map(|xid| match xid {
                    XidError::Value(code) => code,
                    XidError::Unknown => 999,
                })),
                Err(NvmlError::Timeout) => break,
                Err(error) => return Err(describe(&error)),
            }
        }
        Ok(found)
    }

    fn processes(&self) -> Reading<Vec<GpuProcess>> {
        processes(self.nvml, &self.device, Some(&self.before)).reading()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::driver::cuda::{Cuda, CudaGpu};
    use crate::gpu::driver::{Driver, StreamId};
    use crate::gpu::fakes::{in_child, in_child_with, without};
    use crate::gpu::kernels::{Kernel, Kernels, Launch};

    const HERE: &str = module_path!();

    #[test]
    fn a_card_is_found_by_its_uuid_and_its_counters_move() {
        // The order of the bus is not the order of CUDA.
        let cards = "32MiB;name=First;bus=0x40,64MiB;name=Second;bus=0x20";
        let faults = "ecc=0/volatile.corrected:1,ecc=0/volatile.uncorrected:2@1,ecc=0/aggregate.uncorrected:7,remap=0/0:1:1:0@2,xid=0/63@1,xid=0/94@2,\
                      process=0/4000000:1MiB,process=0/4000001:unavailable";
        let variables = [("TARE_FAKE_DEVICES", cards), ("TARE_FAKE_NVML", faults)];
        in_child(HERE, "a_card_is_found_by_its_uuid_and_its_counters_move", &variables, || {
            let management = Management::open().expect("the fake NVML");
            let cuda = Cuda::open().expect("the fake driver");
            let about = cuda.describe(0).expect("a device");
            let health = management.health(&about.uuid, &about.pci).expect("the same card");
            assert_eq!(health.name(), "NVML 550.54.14");
            let start = EccCounters { volatile_corrected: 1, aggregate_uncorrected: 7, ..EccCounters::default() };
            assert_eq!((health.ecc(), health.replaced()), (Ok(start), Ok(Replaced::default())));
            assert!(health.xids().is_err(), "not watched yet");
            health.watch_xids().expect("supported");
            assert_eq!(health.xids(), Ok(vec![]));

            let gpu = CudaGpu::open(cuda, 0).expect("a device");
            let address = gpu.mem_alloc(4096).expect("room");
            let launch = Launch::new(Kernel::Read, 1, 32, &[address, 1, address]);
            gpu.launch(&launch, StreamId::DEFAULT).expect("a launch");
            assert_eq!((health.xids(), health.xids()), (Ok(vec![63]), Ok(vec![])));
            gpu.launch(&launch, StreamId::DEFAULT).expect("a launch");
            assert_eq!(health.xids(), Ok(vec![94]));
            assert_eq!(health.ecc(), Ok(EccCounters { volatile_uncorrected: 2, ..start }));
            assert_eq!(health.replaced(), Ok(Replaced { uncorrected: 1, pending: true, ..Replaced::default() }));
            let processes = health.processes().expect("a list");
            let shown: Vec<_> = processes.iter().map(|process| (process.pid, process.bytes, process.own)).collect();
            assert_eq!(shown, [(4_000_000, Some(1 << 20), false), (4_000_001, None, false), (std::process::id(), Some(4 << 20), true)]);
            // An instance of a card has a UUID of its own: then the place on the bus counts.
            management.health("MIG-0", "0000:20:00.0").expect("by its place");
            assert!(management.health("GPU-0", "0000:99:00.0").is_err());
        });
    }

    #[test]
    fn everything_about_a_card_is_a_value_or_says_why_not() {
        let cards = "64MiB;cc=7.0;ecc=none;used=5MiB,64MiB;mig=on,64MiB;ecc=off";
        let faults = "no-xid fail=nvmlDeviceGetMemoryInfo_v2:13 fail=nvmlDeviceGetPowerUsage:4711 hide-processes";
        let variables = [("TARE_FAKE_DEVICES", cards), ("TARE_FAKE_NVML", faults)];
        in_child(HERE, "everything_about_a_card_is_a_value_or_says_why_not", &variables, || {
            let management = Management::open().expect("the fake NVML");
            assert_eq!(management.driver_version(), Asked::Value("550.54.14".to_owned()));
            assert_eq!(management.cuda_version(), Asked::Value(CudaVersion { major: 12, minor: 4 }));
            let devices = management.devices().expect("a count");
            let devices: Vec<&NvmlDevice> = devices.iter().map(|device| device.value().expect("a device")).collect();
            let first = devices[0];
            let memory = NvmlMemory { total: 64 << 20, free: 59 << 20, used: 5 << 20, reserved: None };
            assert_eq!(first.memory, Asked::Value(memory), "by the older function");
            assert_eq!(
                (&first.ecc_mode, &first.ecc, &first.remapped_rows),
                (&Asked::NotSupported, &Asked::NotSupported, &Asked::NotSupported)
            );
            assert_eq!((&first.mig, &devices[1].mig), (&Asked::NotSupported, &Asked::Value(true)));
            assert_eq!((&first.pci, &first.temperature), (&Asked::Value("0000:10:00.0".to_owned()), &Asked::Value(40)));
            assert_eq!((&first.processes, &first.xid_events), (&Asked::Value(vec![]), &Asked::Value(false)));
            assert!(matches!(&first.power, Asked::Problem(why) if why.contains("4711")), "{:?}", first.power);
            assert_eq!(devices[2].ecc_mode, Asked::Value(EccMode { on: false, on_after_reset: false }));
            let health = management.health("GPU-none", "0000:30:00.0").expect("by its place");
            assert_eq!(health.ecc(), Err("ECC is off".to_owned()));
            assert_eq!(health.watch_xids(), Err("NVML says: not supported".to_owned()));
        });
    }

    #[test]
    fn a_library_that_refuses_or_lacks_functions_is_no_panic() {
        type Case = (&'static str, fn(&NvmlProblem) -> bool);
        let cases: [Case; 3] = [
            ("init=18", |problem| *problem == NvmlProblem::VersionMismatch),
            ("init=9", |problem| matches!(problem, NvmlProblem::Failed(why) if why.starts_with("NVML says: "))),
            ("init=4711", |problem| problem.to_string() == "NVML failed with code 4711, which this version does not know"),
        ];
        for (fault, expected) in cases {
            in_child(HERE, "a_library_that_refuses_or_lacks_functions_is_no_panic", &[("TARE_FAKE_NVML", fault)], || {
                let problem = Management::open().expect_err("a problem");
                assert!(expected(&problem), "{fault}: {problem:?}");
            });
        }
    }

    #[test]
    fn every_function_but_the_first_may_be_missing() {
        let take = |folder: &std::path::Path| {
            for symbol in [
                "nvmlEventSetFree",
                "nvmlDeviceGetRemappedRows",
                "nvmlDeviceGetTotalEccErrors",
                "nvmlShutdown",
                "nvmlSystemGetDriverVersion",
            ] {
                without(&folder.join("libnvidia-ml.so.1"), symbol);
            }
        };
        in_child_with(HERE, "every_function_but_the_first_may_be_missing", &[], take, || {
            let management = Management::open().expect("the fake NVML");
            let none = Asked::Problem("this driver's NVML has no such function".to_owned());
            assert_eq!(management.driver_version(), none);
            let health = management.health("GPU-none", "0000:10:00.0").expect("by its place");
            assert_eq!(health.watch_xids(), Err("this driver's NVML has no such function".to_owned()));
            assert!(health.ecc().is_err() && health.replaced().is_err());
        });
    }
}
