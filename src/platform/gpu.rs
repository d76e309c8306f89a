//! What the NVIDIA driver of this machine can do, asked by four routes.
//!
//! NVML and libcuda are loaded in child processes of our own (a driver library may hang, crash or print), `nvidia-smi`
//! is a child anyway, and the kernel's own files are only read. All run at the same time and are killed at
//! [`Probe::limit`]. The children get no CUDA_VISIBLE_DEVICES: an empty one makes `cuInit` fail, and the virtual
//! package is about the machine. The answer is cached on disk, keyed by boot, driver and devices.
//!
//! A static (musl) build cannot load libraries: there only `nvidia-smi` and the kernel's files answer.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::child::{self, Ended, Keep, Limits, Ran};
use crate::config::Environment;
use crate::gpu::info::kernel_module;

/// How the driver is looked for.
#[derive(Debug, Clone)]
pub struct Probe {
    /// Root of the file system whose `proc`, `sys` and `dev` are read.
    pub root: PathBuf,
    /// Program and first arguments that run [`detect_child_main`]; the route's name is added. `None`: this program
    /// with `__detect-gpu`.
    pub child: Option<Vec<OsString>>,
    /// All routes together take no longer.
    pub limit: Duration,
    /// Read and write the cache.
    pub cache: bool,
}

impl Default for Probe {
    fn default() -> Self {
        Probe { root: PathBuf::from("/"), child: None, limit: Duration::from_millis(1800), cache: true }
    }
}

/// One way of asking, and what came of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// `nvml`, `libcuda`, `nvidia-smi` or `kernel`.
    pub name: String,
    /// Highest CUDA version that this route says the driver supports, `MAJOR.MINOR`.
    pub cuda: Option<String>,
    /// Version of the driver as this route sees it (`550.54.14`).
    pub driver: Option<String>,
    /// Lowest compute capability over all devices, `MAJOR.MINOR`.
    pub compute_capability: Option<String>,
    /// Why there is no answer.
    pub problem: Option<String>,
}

/// A device, as `nvidia-smi` lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDevice {
    /// Index in the driver's order.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// Total memory in bytes.
    pub memory_bytes: Option<u64>,
    /// `MAJOR.MINOR`.
    pub compute_capability: Option<String>,
}

/// What all routes said, and what follows from it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDetection {
    /// In the order in which they are believed; empty when nothing was looked for.
    pub routes: Vec<Route>,
    /// Value of `__cuda` and the route it comes from.
    pub cuda: Option<(String, String)>,
    /// Value of `__cuda_arch` and the route it comes from.
    pub compute_capability: Option<(String, String)>,
    /// Devices, where `nvidia-smi` lists them.
    pub devices: Vec<GpuDevice>,
    /// Contradictions between the routes and what they mean.
    pub remarks: Vec<String>,
    /// Read from the cache.
    #[serde(default)]
    pub from_cache: bool,
}

impl GpuDetection {
    /// Version of the kernel driver, by the first route that tells.
    pub fn driver_version(&self) -> Option<String> {
        self.routes.iter().find_map(|route| route.driver.clone())
    }

    /// What every route said, a line each, and the devices.
    pub fn text(&self) -> String {
        if self.routes.is_empty() {
            return "  not looked for\n".to_owned();
        }
        let mut text = String::new();
        for route in &self.routes {
            let mut facts = Vec::new();
            facts.extend(route.cuda.iter().map(|cuda| format!("CUDA up to {cuda}")));
            facts.extend(route.driver.iter().map(|driver| format!("driver {driver}")));
            facts.extend(route.compute_capability.iter().map(|capability| format!("compute capability {capability}")));
            if facts.is_empty() {
                facts.push(route.problem.clone().unwrap_or_else(|| "no answer".to_owned()));
            }
            text.push_str(&format!("  {:<11} {}\n", route.name, facts.join(", ")));
        }
        for device in &self.devices {
            text.push_str(&format!("  GPU {}       {}\n", device.index, device.name));
        }
        text
    }
}

/// The body of the hidden command that runs in the child process: asks one route (`nvml` or `libcuda`) and returns the
/// answer as one line of JSON (a [`Route`]). May crash or hang with the driver's library; the parent copes.
pub fn detect_child_main(route: &str) -> String {
    let mut answer = Route { name: route.to_owned(), ..Route::default() };
    match route {
        "nvml" => {
            answer.cuda = rattler_virtual_packages::cuda::detect_cuda_version_via_nvml().map(|version| version.to_string());
            if answer.cuda.is_none() {
                answer.problem = Some("the library is not there or did not answer".to_owned());
            }
        }
        "libcuda" => {
            answer.cuda = rattler_virtual_packages::cuda::detect_cuda_version_via_libcuda().map(|version| version.to_string());
            if answer.cuda.is_none() {
                answer.problem = Some("the library is not there or could not be initialised".to_owned());
            }
        }
        // The lowest compute capability, by whatever library answers first. Slow (it initialises the driver).
        "devices" => {
            answer.compute_capability =
                rattler_virtual_packages::cuda::cuda_arch(None).map(|arch| format!("{}.{}", arch.major, arch.minor));
            if answer.compute_capability.is_none() {
                answer.problem = Some("no device was found".to_owned());
            }
        }
        other => answer.problem = Some(format!("there is no route `{other}`")),
    }
    serde_json::to_string(&answer).unwrap_or_default()
}

/// Asks all routes, or the cache. Never fails; takes no longer than [`Probe::limit`] and a little.
pub fn detect(probe: &Probe, env: &Environment, cache_dir: Option<&Path>) -> GpuDetection {
    let Some(cache_dir) = cache_dir.filter(|_| probe.cache) else { return ask(probe, env) };
    let cache_file = cache_dir.join("detection").join(format!("gpu-{}.json", fingerprint(probe, env)));
    read_cache(&cache_file).unwrap_or_else(|| {
        let found = ask(probe, env);
        write_cache(&cache_file, &found);
        found
    })
}

fn ask(probe: &Probe, env: &Environment) -> GpuDetection {
    let deadline = Instant::now() + probe.limit;
    let in_child = |name: &'static str| ask_child(probe, name, deadline);
    let (nvml, libcuda, devices, smi) = std::thread::scope(|scope| {
        let nvml = scope.spawn(move || in_child("nvml"));
        let libcuda = scope.spawn(move || in_child("libcuda"));
        let devices = scope.spawn(move || in_child("devices"));
        let smi = scope.spawn(move || ask_smi(env, deadline));
        let lost =
            |name: &str| Route { name: name.to_owned(), problem: Some("the question could not be put".to_owned()), ..Route::default() };
        (
            nvml.join().unwrap_or_else(|_| lost("nvml")),
            libcuda.join().unwrap_or_else(|_| lost("libcuda")),
            devices.join().unwrap_or_else(|_| lost("devices")),
            smi.join().unwrap_or_else(|_| (lost("nvidia-smi"), Vec::new())),
        )
    });
    let (smi, listed) = smi;
    judge(nvml, libcuda, devices, smi, listed, ask_kernel(&probe.root))
}

/// Draws the conclusions. `devices` only gives the compute capability to NVML or libcuda, whichever answered.
fn judge(nvml: Route, libcuda: Route, devices: Route, smi: Route, listed: Vec<GpuDevice>, kernel: Route) -> GpuDetection {
    let mut routes = vec![nvml, libcuda, smi, kernel];
    if devices.compute_capability.is_some()
        && let Some(route) = routes.iter_mut().take(2).find(|route| route.cuda.is_some())
    {
        route.compute_capability = devices.compute_capability;
    }
    let mut found = GpuDetection { devices: listed, ..GpuDetection::default() };
    found.cuda = routes.iter().find_map(|route| route.cuda.clone().map(|cuda| (cuda, route.name.clone())));
    found.compute_capability =
        routes.iter().find_map(|route| route.compute_capability.clone().map(|capability| (capability, route.name.clone())));

    let value = |name: &str, get: fn(&Route) -> &Option<String>| {
        routes.iter().find(|route| route.name == name).and_then(|route| get(route).clone())
    };
    let cuda: fn(&Route) -> &Option<String> = |route| &route.cuda;
    let driver: fn(&Route) -> &Option<String> = |route| &route.driver;
    if let (Some(library), Some(module)) = (value("nvidia-smi", driver), value("kernel", driver))
        && library != module
    {
        found.remarks.push(format!(
            "driver/library version mismatch: the kernel module is {module}, the driver's libraries are {library}; no GPU program will run until the machine is rebooted or the module reloaded"
        ));
    } else if routes.iter().any(|route| route.problem.as_deref().is_some_and(|problem| problem.contains("version mismatch"))) {
        let module = value("kernel", driver).map(|module| format!(" (the kernel module is {module})")).unwrap_or_default();
        found.remarks.push(format!(
            "driver/library version mismatch, says nvidia-smi{module}; no GPU program will run until the machine is rebooted or the module reloaded"
        ));
    }
    if let (Some(nvml), Some(libcuda)) = (value("nvml", cuda), value("libcuda", cuda))
        && nvml != libcuda
    {
        found.remarks.push(format!(
            "NVML says CUDA {nvml} and libcuda says {libcuda} (a forward-compatibility package, or libraries of two drivers): {nvml} was taken; `--cuda {libcuda}` takes the other"
        ));
    }
    if let Some((version, source)) = &found.cuda
        && source == "kernel"
    {
        found.remarks.push(format!(
            "only the kernel module answered (driver {}): CUDA {version} follows from NVIDIA's table, and the driver's libraries are not visible here (a container without GPU access?)",
            value("kernel", driver).unwrap_or_default()
        ));
    }
    for route in &routes {
        if let Some(problem) = &route.problem
            && (problem.contains("did not answer within") || problem.contains("crashed"))
        {
            found.remarks.push(format!("{}: {problem}", route.name));
        }
    }
    found.routes = routes;
    found
}

/// A child of our own that loads a library.
fn ask_child(probe: &Probe, name: &str, deadline: Instant) -> Route {
    let route = |problem: String| Route { name: name.to_owned(), problem: Some(problem), ..Route::default() };
    if cfg!(target_env = "musl") {
        return route("a static (musl) build cannot load the driver's libraries".to_owned());
    }
    let command = match &probe.child {
        Some(words) => words.clone(),
        None => match std::env::current_exe() {
            Ok(program) => vec![program.into_os_string(), "__detect-gpu".into()],
            Err(error) => return route(format!("this program's own path is unknown: {error}")),
        },
    };
    let Some((program, arguments)) = command.split_first() else { return route("no program to ask with".to_owned()) };
    let mut command = Command::new(program);
    command.args(arguments).arg(name);
    let ran = run_bounded(command, deadline);
    // The library may have printed too: ours is the last line that is JSON.
    let answer = ran.out().lines().rev().find_map(|line| serde_json::from_str::<Route>(line).ok());
    match (answer, &ran.ended) {
        (_, Ended::NotStarted(error)) => route(format!("the question could not be put: {error}")),
        // What answered and then hung has answered.
        (Some(answer), _) if answer.name == name => Route { cuda: answer.cuda.filter(|cuda| is_version(cuda)), ..answer },
        (_, ended) => route(ended.problem(probe.limit).unwrap_or_else(|| "gave no answer that can be read".to_owned())),
    }
}

/// `nvidia-smi -q -x` for versions, `--query-gpu` for devices.
fn ask_smi(env: &Environment, deadline: Instant) -> (Route, Vec<GpuDevice>) {
    let mut route = Route { name: "nvidia-smi".to_owned(), ..Route::default() };
    let Some(program) = env.find_program("nvidia-smi") else {
        route.problem = Some("not on PATH".to_owned());
        return (route, Vec::new());
    };
    let started = Instant::now();
    let asked = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.args(arguments);
        run_bounded(command, deadline)
    };
    // Unit data (`-u`) leaves out what is slow to collect per device; the versions are in it.
    let (xml, table) = std::thread::scope(|scope| {
        let table = scope.spawn(|| asked(&["--query-gpu=index,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]));
        (asked(&["-q", "-u", "-x"]), table.join().ok())
    });
    match &xml.ended {
        ended @ (Ended::NotStarted(_) | Ended::TimedOut | Ended::Stopped) => route.problem = ended.problem(started.elapsed()),
        ended => {
            let (stdout, stderr) = (xml.out(), xml.err());
            route.cuda = tag(&stdout, "cuda_version").filter(|version| is_version(version));
            route.driver = tag(&stdout, "driver_version").filter(|version| is_version(version));
            if route.cuda.is_none() {
                let said = stderr.lines().chain(stdout.lines()).map(str::trim).find(|line| !line.is_empty()).unwrap_or("nothing");
                let said: String = said.chars().filter(|c| !c.is_control()).take(160).collect();
                route.problem = Some(match ended.problem(Duration::ZERO) {
                    None => format!("said no CUDA version; its first line: {said}"),
                    Some(problem) => format!("{problem}: {said}"),
                });
            }
        }
    }
    let mut devices = Vec::new();
    if let Some(table) = table.filter(|table| table.ended.well()) {
        for line in table.out().lines().take(1024) {
            let cells: Vec<&str> = line.split(',').map(str::trim).collect();
            if let [index, name, memory, capability] = cells.as_slice()
                && let Ok(index) = index.parse()
            {
                devices.push(GpuDevice {
                    index,
                    name: name.chars().filter(|c| !c.is_control()).take(120).collect(),
                    memory_bytes: memory.parse::<u64>().ok().and_then(|mebibytes| mebibytes.checked_mul(1 << 20)),
                    compute_capability: is_capability(capability).then(|| (*capability).to_owned()),
                });
            }
        }
        let lowest = devices.iter().filter_map(|device| device.compute_capability.clone()).min_by_key(|text| numbers(text));
        route.compute_capability = lowest.filter(|_| route.cuda.is_some());
    }
    (route, devices)
}

/// `/sys/module/nvidia/version`, else `/proc/driver/nvidia/version`.
fn ask_kernel(root: &Path) -> Route {
    let mut route = Route { name: "kernel".to_owned(), ..Route::default() };
    route.driver = kernel_module(root);
    match &route.driver {
        Some(driver) => route.cuda = cuda_of_driver(driver),
        None => route.problem = Some("no NVIDIA kernel module is loaded".to_owned()),
    }
    if route.driver.is_some() && route.cuda.is_none() {
        route.problem = Some("the driver is older than any CUDA that is known here".to_owned());
    }
    route
}

/// The CUDA version that a driver branch came with: the highest one it supports (NVIDIA's release notes of the
/// toolkits; the first number of a driver version is its branch).
const DRIVERS: &[(u32, &str)] = &[
    (410, "10.0"),
    (418, "10.1"),
    (440, "10.2"),
    (450, "11.0"),
    (455, "11.1"),
    (460, "11.2"),
    (465, "11.3"),
    (470, "11.4"),
    (495, "11.5"),
    (510, "11.6"),
    (515, "11.7"),
    (520, "11.8"),
    (525, "12.0"),
    (530, "12.1"),
    (535, "12.2"),
    (545, "12.3"),
    (550, "12.4"),
    (555, "12.5"),
    (560, "12.6"),
    (565, "12.7"),
    (570, "12.8"),
    (575, "12.9"),
    (580, "13.0"),
    (590, "13.1"),
];

/// The highest CUDA version of a driver by its branch; a lower bound for branches newer than the table.
pub fn cuda_of_driver(driver: &str) -> Option<String> {
    let branch: u32 = driver.split('.').next()?.parse().ok()?;
    DRIVERS.iter().rev().find(|(first, _)| *first <= branch).map(|(_, cuda)| (*cuda).to_owned())
}

fn numbers(text: &str) -> Vec<u32> {
    text.split('.').map(|part| part.parse().unwrap_or(0)).collect()
}

fn is_version(text: &str) -> bool {
    !text.is_empty() && text.len() <= 24 && text.split('.').all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

fn is_capability(text: &str) -> bool {
    is_version(text) && text.split('.').count() == 2
}

fn tag(xml: &str, name: &str) -> Option<String> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    let (value, _) = rest.split_once(&format!("</{name}>"))?;
    Some(value.trim().to_owned())
}

/// Runs a command without CUDA_VISIBLE_DEVICES, killing it (and what it started) at the deadline. Reads at most 1 MiB.
fn run_bounded(mut command: Command, deadline: Instant) -> Ran {
    command.env_remove("CUDA_VISIBLE_DEVICES").env_remove("NVIDIA_VISIBLE_DEVICES");
    // More than that is no answer.
    child::run(command, &Limits { stdout: Keep::First(1 << 20), ..Limits::until(deadline) })
}

/// What a cached answer depends on, as 16 hexadecimal digits: this boot, the driver, the device files, where libraries
/// and `nvidia-smi` are found, and this version of the program.
fn fingerprint(probe: &Probe, env: &Environment) -> String {
    let mut hash = Sha256::new();
    let mut add = |text: &str| {
        hash.update(text.len().to_le_bytes());
        hash.update(text.as_bytes());
    };
    add(env!("CARGO_PKG_VERSION"));
    add(&fs_err::read_to_string(probe.root.join("proc/sys/kernel/random/boot_id")).unwrap_or_default());
    add(&kernel_module(&probe.root).unwrap_or_default());
    let mut devices: Vec<String> = fs_err::read_dir(probe.root.join("dev"))
        .map(|entries| {
            entries
                .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
                .filter(|name| name.starts_with("nv") || name == "dxg")
                .collect()
        })
        .unwrap_or_default();
    devices.sort();
    add(&devices.join(","));
    add(&env.get("LD_LIBRARY_PATH").unwrap_or_default());
    let smi = env.find_program("nvidia-smi");
    add(&smi.as_deref().map(|path| path.display().to_string()).unwrap_or_default());
    let changed = |path: &Path| {
        path.metadata().and_then(|data| data.modified()).ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok())
    };
    add(&smi.as_deref().and_then(changed).map(|age| age.as_nanos().to_string()).unwrap_or_default());
    crate::text::hex(&hash.finalize()[..8])
}

/// A good answer is kept for a day, no answer for an hour, and one without a compute capability, or with a route that hung
/// or crashed, for ten minutes.
fn lifetime(found: &GpuDetection) -> Duration {
    let broken = found.routes.iter().any(|route| {
        route.problem.as_deref().is_some_and(|problem| problem.contains("did not answer within") || problem.contains("crashed"))
    });
    match (broken, &found.cuda) {
        (true, _) => Duration::from_secs(600),
        (false, None) => Duration::from_secs(3600),
        (false, Some(_)) if found.compute_capability.is_none() => Duration::from_secs(600),
        (false, Some(_)) => Duration::from_secs(86400),
    }
}

fn read_cache(file: &Path) -> Option<GpuDetection> {
    let age = file.metadata().ok()?.modified().ok()?.elapsed().ok()?;
    let found: GpuDetection = serde_json::from_slice(&fs_err::read(file).ok()?).ok()?;
    (age < lifetime(&found)).then_some(GpuDetection { from_cache: true, ..found })
}

/// Best effort: a cache that cannot be written costs time, nothing else. Old files of other machines are removed.
fn write_cache(file: &Path, found: &GpuDetection) {
    let Some(folder) = file.parent() else { return };
    let write = || -> std::io::Result<()> {
        fs_err::create_dir_all(folder)?;
        let mut temporary = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer(&mut temporary, found)?;
        temporary.persist(file).map_err(|error| error.error)?;
        for entry in fs_err::read_dir(folder)?.flatten() {
            let old = entry.metadata().and_then(|data| data.modified()).ok().and_then(|time| time.elapsed().ok());
            if old.is_some_and(|age| age > Duration::from_secs(7 * 86400)) {
                let _ = fs_err::remove_file(entry.path());
            }
        }
        Ok(())
    };
    if let Err(error) = write() {
        tracing::debug!(%error, "the GPU detection was not cached");
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn run(script: &str, limit: Duration) -> Ran {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).env("CUDA_VISIBLE_DEVICES", "").env("KEPT", "yes");
        run_bounded(command, Instant::now() + limit)
    }

    #[test]
    fn a_child_does_not_see_cuda_visible_devices() {
        let ran = run("echo ${CUDA_VISIBLE_DEVICES-unset} $KEPT", Duration::from_secs(5));
        assert_eq!((ran.ended.well(), ran.out().as_str()), (true, "unset yes\n"));
    }

    #[test]
    fn a_child_and_what_it_started_end_at_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let alive = folder.path().join("alive");
        let script = format!("(sleep 1; echo > {}) & sleep 30", alive.display());
        let begin = Instant::now();
        assert_eq!(run(&script, Duration::from_millis(200)).ended, Ended::TimedOut);
        assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
        std::thread::sleep(Duration::from_millis(1200));
        assert!(!alive.exists(), "the grandchild went on");
    }
}
