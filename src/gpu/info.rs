//! What GPUs this machine has and what each layer of the driver says of them: the kernel module, NVML and libcuda.
//!
//! The libraries are asked in children ([`probe_main`]), each with a time limit: a driver that hangs or crashes is something to
//! report, not something to hang or crash with. CUDA_VISIBLE_DEVICES is left as it is, and what it hides is said.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::driver::cuda::{self, Cuda, CudaDevice, CudaProblem, CudaVersion};
use super::memtest::health::{GpuProcess, Replaced};
use super::nvml::{self, Asked, Management, NvmlDevice};
use super::{human, plural};
use crate::child::{self, Limits};

/// How long each library has to answer. The first answer after a boot without persistence mode takes seconds.
pub const LIMIT: Duration = Duration::from_secs(20);

/// What libcuda says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaView {
    /// Highest CUDA version that the library supports.
    pub cuda: Option<CudaVersion>,
    /// Devices that this process may use, or why one does not answer.
    pub devices: Vec<Result<CudaDevice, String>>,
    /// Why there are none.
    pub problem: Option<String>,
    /// What to try next.
    pub hint: Option<String>,
    /// The library is there.
    pub library: bool,
    /// It is the library that fails, by a code or a crash: there may well be a device.
    #[serde(default)]
    pub failed: bool,
}

/// What NVML says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmlView {
    /// Version of the driver.
    pub driver: Option<String>,
    /// Highest CUDA version that the driver supports.
    pub cuda: Option<CudaVersion>,
    /// Every card of the machine.
    pub devices: Vec<Asked<NvmlDevice>>,
    /// Why there are none.
    pub problem: Option<String>,
    /// The library is there.
    pub library: bool,
}

/// One card, by all who know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Card {
    /// The device of libcuda; `None` where this process may not use it.
    pub cuda: Option<CudaDevice>,
    /// The device of NVML; `None` where NVML does not tell.
    pub nvml: Option<NvmlDevice>,
}

/// The GPUs of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuInfo {
    /// Version of the loaded kernel module.
    pub kernel_module: Option<String>,
    pub nvml: LayerAnswer,
    pub libcuda: LayerAnswer,
    /// In the order of CUDA; then those that CUDA does not show.
    pub cards: Vec<Card>,
    /// Process numbers of the driver are not those of this process's view: this is a container, and they are the host's.
    pub host_pids: bool,
    /// `CUDA_VISIBLE_DEVICES`, where it is set.
    pub cuda_visible_devices: Option<String>,
    /// Disagreements, and what is wrong.
    pub remarks: Vec<String>,
    /// What to try next.
    pub hints: Vec<String>,
}

/// What one layer of the driver says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct LayerAnswer {
    /// Version of the driver.
    pub driver: Option<String>,
    /// Highest CUDA version that it supports.
    pub cuda: Option<String>,
    /// Why it says nothing.
    pub problem: Option<String>,
    /// Its library is there. Not part of the document.
    #[serde(skip)]
    pub library: bool,
    /// It is the library that fails, not that there is no device. Not part of the document.
    #[serde(skip)]
    pub failed: bool,
    /// What to try next where there is a problem. Not part of the document.
    #[serde(skip)]
    pub hint: Option<String>,
}

/// Version of the loaded kernel module: of `/sys/module/nvidia/version`, else of `/proc/driver/nvidia/version`, below `root`.
pub fn kernel_module(root: &Path) -> Option<String> {
    let read = |path: &str| {
        let mut text = String::new();
        File::open(root.join(path)).ok()?.take(4096).read_to_string(&mut text).ok()?;
        Some(text)
    };
    let version = |word: &str| {
        let parts: Vec<&str> = word.split('.').collect();
        (2..=4).contains(&parts.len()) && parts.iter().all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let from_sys = read("sys/module/nvidia/version").map(|text| text.trim().to_owned()).filter(|text| version(text));
    from_sys.or_else(|| {
        // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024"
        let text = read("proc/driver/nvidia/version")?;
        let line = text.lines().find(|line| line.starts_with("NVRM"))?;
        line.split_whitespace().find(|word| version(word)).map(str::to_owned)
    })
}

/// The body of the child: asks one library and returns one line of JSON (a [`CudaView`] or an [`NvmlView`]).
pub fn probe_main(route: &str) -> String {
    child::die_with_parent();
    let text = match route {
        "libcuda" => serde_json::to_string(&ask_cuda()),
        "nvml" => serde_json::to_string(&ask_nvml()),
        _ => return String::new(),
    };
    text.unwrap_or_default()
}

fn ask_cuda() -> CudaView {
    let version = cuda::driver_version();
    let mut view =
        CudaView { cuda: version.as_ref().ok().copied(), library: !matches!(version, Err(CudaProblem::NoLibrary)), ..CudaView::default() };
    match Cuda::open().and_then(|cuda| cuda.devices()) {
        Ok(devices) => view.devices = devices.into_iter().map(|device| device.map_err(|problem| problem.to_string())).collect(),
        Err(problem) => {
            view.failed = matches!(problem, CudaProblem::Failed(_));
            view.hint = Some(problem.hint());
            view.problem = Some(problem.to_string());
        }
    }
    view
}

/// What NVML of this process says. In a process that must not hang or crash, ask in a child.
pub fn ask_nvml() -> NvmlView {
    let management = match Management::open() {
        Ok(management) => management,
        Err(problem) => {
            let library = problem != nvml::NvmlProblem::NoLibrary;
            return NvmlView { problem: Some(problem.to_string()), library, ..NvmlView::default() };
        }
    };
    let mut view = NvmlView {
        driver: management.driver_version().value().cloned(),
        cuda: management.cuda_version().value().copied(),
        library: true,
        ..NvmlView::default()
    };
    match management.devices() {
        Ok(devices) => view.devices = devices,
        Err(problem) => view.problem = Some(problem.to_string()),
    }
    view
}

/// Asks a library in a child. `command` makes the child's command from the name of the route.
///
/// # Errors
/// The child crashed, hung, or said nothing that can be read.
pub fn ask_in_child<T: serde::de::DeserializeOwned>(command: &dyn Fn(&str) -> Command, route: &str, limit: Duration) -> Result<T, String> {
    let mut answer = None;
    let ran = child::run_lines(command(route), &Limits::until(Instant::now() + limit), &mut |line| {
        // A library may print too.
        if let Ok(view) = serde_json::from_str(line) {
            answer = Some(view);
        }
    });
    answer.ok_or_else(|| ran.ended.problem(limit).unwrap_or_else(|| "gave no answer that can be read".to_owned()))
}

/// Looks at this machine. `command` makes the command of a child that runs [`probe_main`] with the route that it is given.
pub fn look(command: &(dyn Fn(&str) -> Command + Sync), root: &Path, limit: Duration) -> GpuInfo {
    let (cuda, nvml) = std::thread::scope(|scope| {
        let cuda = scope.spawn(|| ask_in_child::<CudaView>(command, "libcuda", limit));
        let nvml = ask_in_child::<NvmlView>(command, "nvml", limit);
        (cuda.join().unwrap_or_else(|_| Err("could not be asked".to_owned())), nvml)
    });
    let mut remarks = Vec::new();
    let cuda = cuda.unwrap_or_else(|problem| {
        remarks.push(format!("libcuda {problem}"));
        let failed = problem.starts_with("crashed");
        CudaView { problem: Some(problem), library: true, failed, ..CudaView::default() }
    });
    let nvml = nvml.unwrap_or_else(|problem| {
        remarks.push(format!("NVML {problem}"));
        NvmlView { problem: Some(problem), library: true, ..NvmlView::default() }
    });
    let visible = std::env::var_os("CUDA_VISIBLE_DEVICES").map(|value| value.to_string_lossy().into_owned());
    judge(kernel_module(root), cuda, nvml, visible, !nvml::pids_are_ours(), remarks)
}

fn judge(
    kernel_module: Option<String>,
    cuda: CudaView,
    nvml: NvmlView,
    visible: Option<String>,
    host_pids: bool,
    mut remarks: Vec<String>,
) -> GpuInfo {
    let mut hints = Vec::new();
    if let (Some(module), Some(library)) = (&kernel_module, &nvml.driver)
        && module != library
    {
        remarks.push(format!("driver/library version mismatch: the kernel module is {module}, NVML is {library}"));
        hints.push("reboot, or reload the kernel module: no GPU program runs until then".to_owned());
    } else if nvml.problem.as_deref().is_some_and(|problem| problem.contains("version mismatch")) {
        let module = kernel_module.as_deref().map(|module| format!(" (the kernel module is {module})")).unwrap_or_default();
        remarks.push(format!("driver/library version mismatch, says NVML{module}"));
        hints.push("reboot, or reload the kernel module: no GPU program runs until then".to_owned());
    }
    if let (Some(one), Some(other)) = (nvml.cuda, cuda.cuda)
        && one != other
    {
        let what = if other > one { "a forward-compatibility package (`cuda-compat`)" } else { "an older `libcuda.so`" };
        remarks.push(format!("NVML says CUDA {one} and libcuda says CUDA {other}: {what} comes first for this process"));
        if other < one {
            hints.push("look at LD_LIBRARY_PATH for a `libcuda.so` that is not the driver's".to_owned());
        }
    }
    if cuda.library
        && let (Some(problem), false) = (&cuda.problem, nvml.devices.is_empty())
    {
        remarks.push(format!("CUDA does not work here, though there are cards: {problem}"));
        hints.extend(cuda.hint.clone());
    }
    if kernel_module.is_some() && !nvml.library && !cuda.library {
        remarks.push("the kernel module is loaded, and the driver's libraries are not here".to_owned());
        hints.push("in a container, start it with GPU access (`--gpus all`); else install the driver's libraries".to_owned());
    }
    if cuda.library && !nvml.library && cuda.problem.is_none() {
        remarks.push("without NVML there are no processes, error counters and temperatures".to_owned());
    }

    let mut cards: Vec<Card> = Vec::new();
    for device in &cuda.devices {
        match device {
            Ok(device) => cards.push(Card { cuda: Some(device.clone()), nvml: None }),
            Err(problem) => remarks.push(format!("a device of libcuda does not answer: {problem}")),
        }
    }
    for device in &nvml.devices {
        let device = match device {
            Asked::Value(device) => device,
            Asked::NotSupported => continue,
            Asked::Problem(problem) => {
                remarks.push(format!("a card does not answer: {problem}"));
                continue;
            }
        };
        let same = |card: &&mut Card| {
            card.nvml.is_none()
                && card.cuda.as_ref().is_some_and(|cuda| device.uuid.value() == Some(&cuda.uuid) || device.pci.value() == Some(&cuda.pci))
        };
        match cards.iter_mut().find(same) {
            Some(card) => card.nvml = Some(device.clone()),
            None => cards.push(Card { cuda: None, nvml: Some(device.clone()) }),
        }
        remarks.extend(complaints(device));
    }
    let hidden = cards.iter().filter(|card| card.cuda.is_none()).count();
    if hidden > 0 && cuda.problem.is_none() && cuda.library {
        let why = visible.as_ref().map_or_else(String::new, |value| format!(" (CUDA_VISIBLE_DEVICES is `{value}`)"));
        remarks.push(format!("{hidden} card{} cannot be used by this process{why}", plural(hidden as u64)));
    }
    remarks.dedup();
    hints.dedup();
    GpuInfo {
        kernel_module,
        nvml: LayerAnswer {
            driver: nvml.driver,
            cuda: nvml.cuda.map(|cuda| cuda.to_string()),
            problem: nvml.problem,
            library: nvml.library,
            failed: false,
            hint: None,
        },
        libcuda: LayerAnswer {
            driver: None,
            cuda: cuda.cuda.map(|cuda| cuda.to_string()),
            problem: cuda.problem,
            library: cuda.library,
            failed: cuda.failed,
            hint: cuda.hint,
        },
        cards,
        host_pids,
        cuda_visible_devices: visible,
        remarks,
        hints,
    }
}

/// What a card's own counters say is wrong with it.
fn complaints(device: &NvmlDevice) -> Vec<String> {
    let name = device.name.value().map_or("a card", String::as_str);
    let at = device.pci.value().map(|pci| format!(" at {pci}")).unwrap_or_default();
    let mut found = Vec::new();
    if let Asked::Value(counters) = &device.ecc
        && counters.volatile_uncorrected > 0
    {
        found.push(format!(
            "{name}{at}: {} memory error{} could not be corrected since the driver was loaded",
            counters.volatile_uncorrected,
            plural(counters.volatile_uncorrected)
        ));
    }
    for (replaced, what) in [(&device.remapped_rows, "memory row"), (&device.retired_pages, "memory page")] {
        if let Asked::Value(Replaced { pending, failed, .. }) = replaced {
            if *pending {
                found.push(format!("{name}{at}: a {what} waits to be replaced; reset the card or reboot"));
            }
            if *failed {
                found.push(format!("{name}{at}: replacing a {what} failed; the card has to be exchanged"));
            }
        }
    }
    found
}

impl GpuInfo {
    /// Nothing of a GPU here: no card, no library, no kernel module.
    pub fn nothing(&self) -> bool {
        let silent = |layer: &LayerAnswer| layer.cuda.is_none() && layer.driver.is_none();
        self.cards.is_empty() && self.kernel_module.is_none() && silent(&self.nvml) && silent(&self.libcuda)
    }

    /// The page for people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        if self.nothing() && self.remarks.is_empty() {
            text.push_str("no NVIDIA GPU was found on this machine\n\n");
        }
        text.push_str("driver\n");
        let layer = |answer: &LayerAnswer| {
            let mut facts: Vec<String> = answer.driver.iter().cloned().collect();
            facts.extend(answer.cuda.iter().map(|cuda| format!("CUDA up to {cuda}")));
            facts.extend(answer.problem.iter().cloned());
            if facts.is_empty() { "no answer".to_owned() } else { facts.join(", ") }
        };
        let module = self.kernel_module.clone().unwrap_or_else(|| "not loaded".to_owned());
        for (name, value) in [("kernel module", module), ("NVML", layer(&self.nvml)), ("libcuda", layer(&self.libcuda))] {
            text.push_str(&format!("  {name:<14}  {value}\n"));
        }
        for card in &self.cards {
            text.push('\n');
            text.push_str(&self.card(card));
        }
        text
    }

    fn card(&self, card: &Card) -> String {
        let name = card.nvml.as_ref().and_then(|device| device.name.value().cloned());
        let name = card.cuda.as_ref().map(|device| device.name.clone()).or(name).unwrap_or_else(|| "a card without a name".to_owned());
        let mut text = match &card.cuda {
            Some(device) => format!("GPU cuda:{}  {name}\n", device.ordinal),
            None => format!("GPU (not usable by this process)  {name}\n"),
        };
        let mut row = |name: &str, value: String| text.push_str(&format!("  {name:<18}  {value}\n"));
        let nvml = card.nvml.as_ref();
        let pci = card.cuda.as_ref().map(|device| device.pci.clone()).or_else(|| nvml?.pci.value().cloned());
        let uuid = card.cuda.as_ref().map(|device| device.uuid.clone()).or_else(|| nvml?.uuid.value().cloned());
        row("place", [pci, uuid].into_iter().flatten().collect::<Vec<_>>().join(", "));
        let capability = card.cuda.as_ref().map(|device| device.compute_capability).or_else(|| nvml?.compute_capability.value().copied());
        if let Some((major, minor)) = capability {
            let processors = card.cuda.as_ref().map(|device| format!(", {} multiprocessors", device.multiprocessors)).unwrap_or_default();
            row("compute capability", format!("{major}.{minor}{processors}"));
        }
        match nvml.map(|device| &device.memory) {
            Some(Asked::Value(memory)) => {
                let reserved = memory.reserved.filter(|bytes| *bytes > 0).map(|bytes| format!(", {} held by the driver", human(bytes)));
                row(
                    "memory",
                    format!(
                        "{}, {} used, {} free{}",
                        human(memory.total),
                        human(memory.used),
                        human(memory.free),
                        reserved.unwrap_or_default()
                    ),
                );
            }
            _ => {
                if let Some(device) = &card.cuda {
                    row("memory", human(device.total_memory));
                }
            }
        }
        if let Some(device) = &card.cuda {
            row("virtual memory", if device.virtual_memory { "yes" } else { "no: expandable segments do not work" }.to_owned());
        }
        if let Some(device) = nvml {
            row("ECC", ecc(device));
            let replaced = |replaced: &Replaced| {
                let state = if replaced.failed {
                    ", replacing failed"
                } else if replaced.pending {
                    ", another one after the next reset"
                } else {
                    ""
                };
                format!("{} for corrected errors, {} for uncorrected ones{state}", replaced.corrected, replaced.uncorrected)
            };
            if let Asked::Value(rows) = &device.remapped_rows {
                row("remapped rows", replaced(rows));
            } else if let Asked::Value(pages) = &device.retired_pages {
                row("retired pages", replaced(pages));
            }
            let mut now = Vec::new();
            now.extend(device.temperature.value().map(|celsius| format!("{celsius} °C")));
            now.extend(device.power.value().map(|milliwatts| format!("{} W", milliwatts / 1000)));
            now.extend(device.sm_clock.value().map(|clock| format!("processors {clock} MHz")));
            now.extend(device.memory_clock.value().map(|clock| format!("memory {clock} MHz")));
            if !now.is_empty() {
                row("now", now.join(", "));
            }
            if device.mig == Asked::Value(true) {
                row("MIG", "on: programs see instances of the card".to_owned());
            }
            row("processes", self.processes(&device.processes));
        }
        text
    }

    fn processes(&self, processes: &Asked<Vec<GpuProcess>>) -> String {
        match processes {
            Asked::Value(all) if all.is_empty() => "none".to_owned(),
            Asked::Value(all) => {
                let kind = if self.host_pids { "host pid" } else { "pid" };
                let one = |process: &GpuProcess| {
                    let name = process.name.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
                    let memory = process.bytes.map_or_else(|| "memory not told".to_owned(), human);
                    format!("{kind} {}{name} {memory}", process.pid)
                };
                all.iter().map(one).collect::<Vec<_>>().join("; ")
            }
            Asked::NotSupported => "not told".to_owned(),
            Asked::Problem(problem) => format!("not told: {problem}"),
        }
    }
}

fn ecc(device: &NvmlDevice) -> String {
    match (&device.ecc_mode, &device.ecc) {
        (Asked::NotSupported, _) => "this card has none: only a memory test finds errors".to_owned(),
        (Asked::Problem(problem), _) => format!("not known: {problem}"),
        (Asked::Value(mode), _) if !mode.on => {
            format!("off{}", if mode.on_after_reset { ", on after the next reset" } else { "" })
        }
        (Asked::Value(_), Asked::Value(counters)) => format!(
            "on; since the driver was loaded {} corrected, {} uncorrected; ever {} and {}",
            counters.volatile_corrected, counters.volatile_uncorrected, counters.aggregate_corrected, counters.aggregate_uncorrected
        ),
        (Asked::Value(_), Asked::NotSupported) => "on; its counters are not told".to_owned(),
        (Asked::Value(_), Asked::Problem(problem)) => format!("on; its counters are not told: {problem}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::fakes::in_child;

    const HERE: &str = module_path!();

    fn seen() -> (CudaView, NvmlView) {
        (ask_cuda(), ask_nvml())
    }

    #[test]
    fn a_version_is_read_from_both_files_of_the_kernel() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(kernel_module(root.path()), None);
        std::fs::create_dir_all(root.path().join("proc/driver/nvidia")).unwrap();
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (x@y)\nGCC version: gcc 12.3.0\n";
        std::fs::write(root.path().join("proc/driver/nvidia/version"), text).unwrap();
        assert_eq!(kernel_module(root.path()).as_deref(), Some("570.86.10"));
        std::fs::create_dir_all(root.path().join("sys/module/nvidia")).unwrap();
        std::fs::write(root.path().join("sys/module/nvidia/version"), "550.54.14\n").unwrap();
        assert_eq!(kernel_module(root.path()).as_deref(), Some("550.54.14"));
        std::fs::write(root.path().join("sys/module/nvidia/version"), "rm -rf /\n").unwrap();
        assert_eq!(kernel_module(root.path()).as_deref(), Some("570.86.10"));
    }

    #[test]
    fn cards_of_both_libraries_are_matched_and_disagreements_told() {
        let cards = "64MiB;name=Late;bus=0x41,32MiB;name=Early;bus=0x12;cc=7.0;used=4MiB,32MiB;name=Hidden;bus=0x99;ecc=none";
        let variables = [
            ("TARE_FAKE_DEVICES", cards),
            ("CUDA_VISIBLE_DEVICES", "0,1"),
            ("TARE_FAKE_CUDA", "version=12080"),
            ("TARE_FAKE_NVML", "ecc=volatile.uncorrected:3,remap=1:0:1:0,process=4000000:1MiB,retired=1/corrected:2"),
        ];
        in_child(HERE, "cards_of_both_libraries_are_matched_and_disagreements_told", &variables, || {
            let (cuda, nvml) = seen();
            let info = judge(Some("560.35.03".into()), cuda, nvml, Some("0,1".into()), true, Vec::new());
            let names: Vec<_> = info
                .cards
                .iter()
                .map(|card| (card.cuda.as_ref().map(|device| device.name.as_str()), card.nvml.as_ref().map(|device| device.index)))
                .collect();
            assert_eq!(names, [(Some("Late"), Some(1)), (Some("Early"), Some(0)), (None, Some(2))]);
            insta::assert_snapshot!(info.remarks.join("\n"), @r"
            driver/library version mismatch: the kernel module is 560.35.03, NVML is 550.54.14
            NVML says CUDA 12.4 and libcuda says CUDA 12.8: a forward-compatibility package (`cuda-compat`) comes first for this process
            Late at 0000:41:00.0: 3 memory errors could not be corrected since the driver was loaded
            Late at 0000:41:00.0: a memory row waits to be replaced; reset the card or reboot
            1 card cannot be used by this process (CUDA_VISIBLE_DEVICES is `0,1`)
            ");
            // Whether a process has a name depends on whether the tests run in a container.
            insta::assert_snapshot!(info.text().replace(" fake-4000000", ""), @r"
            driver
              kernel module   560.35.03
              NVML            550.54.14, CUDA up to 12.4
              libcuda         CUDA up to 12.8

            GPU cuda:0  Late
              place               0000:41:00.0, GPU-fa4e0000-0000-0000-0000-000000004100
              compute capability  8.0, 4 multiprocessors
              memory              64.00 MiB, 0 B used, 64.00 MiB free
              virtual memory      yes
              ECC                 on; since the driver was loaded 0 corrected, 3 uncorrected; ever 0 and 0
              remapped rows       1 for corrected errors, 0 for uncorrected ones, another one after the next reset
              now                 41 °C, 70 W, processors 1980 MHz, memory 2619 MHz
              processes           host pid 4000000 1.00 MiB

            GPU cuda:1  Early
              place               0000:12:00.0, GPU-fa4e0000-0000-0000-0000-000000001201
              compute capability  7.0, 4 multiprocessors
              memory              32.00 MiB, 4.00 MiB used, 28.00 MiB free
              virtual memory      yes
              ECC                 on; since the driver was loaded 0 corrected, 0 uncorrected; ever 0 and 0
              retired pages       2 for corrected errors, 0 for uncorrected ones
              now                 40 °C, 70 W, processors 1980 MHz, memory 2619 MHz
              processes           none

            GPU (not usable by this process)  Hidden
              place               0000:99:00.0, GPU-fa4e0000-0000-0000-0000-000000009902
              compute capability  8.0
              memory              32.00 MiB, 0 B used, 32.00 MiB free
              ECC                 this card has none: only a memory test finds errors
              remapped rows       0 for corrected errors, 0 for uncorrected ones
              now                 42 °C, 70 W, processors 1980 MHz, memory 2619 MHz
              processes           none
            ");
        });
    }
}
