//! The machine an environment is for: its subdir and its virtual packages, each with where it comes from.
//!
//! Virtual packages follow CEP 30 and, for `__cuda_arch`, CEP 46. What is known of a package is decided in this order:
//! command line, environment variable, `variables` of environment.yml, .condarc, detection (or, for another platform
//! than this machine's, a documented default). Detection never fails and is bounded in time: see [`gpu`].

/// Detection of the NVIDIA driver, route by route.
pub mod gpu;

use std::path::PathBuf;

use indexmap::IndexMap;
use rattler_conda_types::package::BuildString;
use rattler_conda_types::{GenericVirtualPackage, PackageName, Subdir, Version};
use rattler_virtual_packages::{Archspec, LibC, Linux, Osx, Windows, defaults};
use serde::Serialize;

use crate::config::Environment;
use crate::error::{Error, Result};
pub use gpu::{GpuDetection, GpuDevice, Route, detect_child_main};

/// Where the value of a virtual package comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Provenance {
    /// Found on this machine.
    Detected,
    /// Given on the command line for a machine that may be another one.
    Assumed,
    /// Set by an environment variable, by `variables` of environment.yml or by .condarc.
    Overridden,
    /// Neither: the documented default for a platform that cannot be looked at.
    Default,
}

/// A virtual package and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VirtualPackage {
    /// Name, version and build string.
    pub package: GenericVirtualPackage,
    /// How it came about.
    pub provenance: Provenance,
    /// What answered: `nvml`, `uname`, `--cuda`, `CONDA_OVERRIDE_CUDA`, the path of a .condarc.
    pub source: String,
}

/// Whether a GPU build is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuIntent {
    /// Take what is there.
    #[default]
    Auto,
    /// A CPU build is an error.
    Require,
    /// `__cuda` and `__cuda_arch` are left out.
    None,
}

/// What decides about the target. Only [`TargetOptions::new`]'s two values are needed.
#[derive(Debug, Clone)]
pub struct TargetOptions {
    /// `--platform`: a conda subdir.
    pub platform: Option<String>,
    /// `--cuda X.Y`: the highest CUDA version the target's driver supports.
    pub cuda: Option<String>,
    /// `--gpu`.
    pub gpu: GpuIntent,
    /// `--virtual-package NAME=VERSION[=BUILD]`; an empty version removes the package.
    pub virtual_packages: Vec<String>,
    /// `variables` of the environment file (only `CONDA_OVERRIDE_*` is looked at).
    pub variables: IndexMap<String, String>,
    /// Environment variables.
    pub env: Environment,
    /// `override_virtual_packages` of the settings: name to version, with the source of the setting.
    pub overrides: IndexMap<String, (String, String)>,
    /// `subdir` of the settings, with its source.
    pub subdir: Option<(String, String)>,
    /// tare's cache folder; detection is cached below it, where there is one.
    pub cache_dir: Option<PathBuf>,
    /// How the GPU is looked for.
    pub probe: gpu::Probe,
}

impl TargetOptions {
    /// Options that ask for nothing: this machine as it is.
    pub fn new(env: Environment, cache_dir: Option<PathBuf>) -> Self {
        TargetOptions {
            platform: None,
            cuda: None,
            gpu: GpuIntent::Auto,
            virtual_packages: Vec::new(),
            variables: IndexMap::new(),
            env,
            overrides: IndexMap::new(),
            subdir: None,
            cache_dir,
            probe: gpu::Probe::default(),
        }
    }

    /// The same, with `subdir` and `override_virtual_packages` of `settings`.
    pub fn from_settings(env: Environment, settings: &crate::config::Settings) -> Self {
        let mut options = TargetOptions::new(env, settings.cache_dir.value.clone());
        options.subdir = settings.subdir.value.clone().map(|subdir| (subdir, settings.subdir.source.clone()));
        let source = &settings.override_virtual_packages.source;
        options.overrides = settings
            .override_virtual_packages
            .value
            .iter()
            .map(|(name, version)| (name.clone(), (version.clone(), source.clone())))
            .collect();
        options
    }
}

/// The machine an environment is solved for.
#[derive(Debug, Clone, Serialize)]
pub struct Target {
    /// Where packages come from besides `noarch`.
    pub subdir: Subdir,
    /// What chose the subdir: `this machine`, `--platform`, `CONDA_SUBDIR` or the source of the setting.
    pub subdir_source: String,
    /// The environment can run here.
    pub is_native: bool,
    /// In a fixed order: `__unix`/`__win`, the system, the C library, CUDA, the processor, then what was added.
    pub virtual_packages: Vec<VirtualPackage>,
    /// What every route of detection said; empty for another platform.
    pub gpu: GpuDetection,
    /// Worth telling once: defaults that were used, contradictions, removed packages.
    pub remarks: Vec<String>,
}

impl Target {
    /// The packages for the solver.
    pub fn virtual_package_list(&self) -> Vec<GenericVirtualPackage> {
        self.virtual_packages.iter().map(|package| package.package.clone()).collect()
    }

    /// A virtual package by its name (`__glibc`).
    pub fn get(&self, name: &str) -> Option<&VirtualPackage> {
        self.virtual_packages.iter().find(|package| package.package.name.as_normalized() == name)
    }

    /// `__cuda`, if the target has a driver.
    pub fn cuda(&self) -> Option<&VirtualPackage> {
        self.get("__cuda")
    }
}

type ExistsOn = fn(Subdir) -> bool;

/// The machine that an older lock was made for. It holds on where nobody says anything else.
#[derive(Debug, Clone, Default)]
pub struct Recorded {
    /// Its virtual packages with their provenance at the time.
    pub packages: Vec<VirtualPackage>,
    /// Somebody decided then whether there is a GPU driver: what is detected now does not count.
    pub gpu_decided: bool,
}

impl Target {
    /// Takes the machine of an older lock for what was not decided this time. `without_gpu`: somebody says now that there is no driver.
    pub fn recall(&mut self, recorded: &Recorded, without_gpu: bool) {
        let of_gpu = |package: &VirtualPackage| package.package.name.as_normalized().starts_with("__cuda");
        let decided = |package: &VirtualPackage| matches!(package.provenance, Provenance::Assumed | Provenance::Overridden);
        let gpu_said = without_gpu || self.virtual_packages.iter().any(|package| of_gpu(package) && decided(package));
        if recorded.gpu_decided && !gpu_said {
            self.virtual_packages.retain(|package| !of_gpu(package));
        }
        for package in recorded.packages.iter().filter(|package| !(of_gpu(package) && gpu_said)) {
            match self.virtual_packages.iter_mut().find(|known| known.package.name == package.package.name) {
                Some(known) if decided(known) => {}
                Some(known) => known.clone_from(package),
                None => self.virtual_packages.push(package.clone()),
            }
        }
    }
}

/// Names that `CONDA_OVERRIDE_*` and `override_virtual_packages` may set, with the platforms they exist on.
const OVERRIDABLE: &[(&str, ExistsOn)] = &[
    ("__unix", Subdir::is_unix),
    ("__linux", Subdir::is_linux),
    ("__osx", Subdir::is_osx),
    ("__win", Subdir::is_windows),
    ("__glibc", Subdir::is_linux),
    ("__cuda", |_| true),
    ("__cuda_arch", |_| true),
    ("__archspec", |_| true),
];

/// Works out the target. Bounded to about two seconds by [`gpu::Probe::limit`].
///
/// # Errors
/// Only for options that are wrong in themselves (unknown platform, a version that is none): `Kind::Usage`.
pub fn target(options: &TargetOptions) -> Result<Target> {
    let (subdir, subdir_source) = choose_subdir(options)?;
    let is_native = Subdir::current() == Some(subdir);
    let mut remarks = Vec::new();
    let flags = flag_packages(options)?;
    let overrides = override_packages(options, subdir, &mut remarks)?;

    // A removed or replaced `__cuda` needs no look at the driver, but `info` wants the routes all the same: it is cached.
    let gpu = if is_native && options.gpu != GpuIntent::None {
        gpu::detect(&options.probe, &options.env, options.cache_dir.as_deref())
    } else {
        GpuDetection::default()
    };
    remarks.extend(gpu.remarks.iter().cloned());

    let mut packages = base_packages(subdir, is_native, &gpu, &mut remarks);
    for entry in overrides.into_iter().chain(flags) {
        packages.retain(|package| package.package.name != entry.name);
        match entry.package {
            Some(package) => packages.push(package),
            None => remarks.push(format!("`{}` was removed by {}", entry.name.as_normalized(), entry.source)),
        }
    }
    if options.gpu == GpuIntent::None {
        if options.cuda.is_some() {
            return Err(Error::usage("`--gpu none` and `--cuda` contradict each other").hint("leave one of them out"));
        }
        packages.retain(|package| !matches!(package.package.name.as_normalized(), "__cuda" | "__cuda_arch"));
    }
    // CEP 46: no compute capability without a driver.
    if !packages.iter().any(|package| package.package.name.as_normalized() == "__cuda") {
        packages.retain(|package| {
            let drop = package.package.name.as_normalized() == "__cuda_arch";
            if drop && package.provenance != Provenance::Detected {
                remarks.push(format!("`__cuda_arch` from {} was dropped, because there is no `__cuda`", package.source));
            }
            !drop
        });
    }
    packages.sort_by_key(|package| rank(package.package.name.as_normalized()));
    Ok(Target { subdir, subdir_source, is_native, virtual_packages: packages, gpu, remarks })
}

/// The subdir alone, without looking at the machine, and what chose it.
///
/// # Errors
/// `Kind::Usage` for an unknown platform.
pub fn subdir(options: &TargetOptions) -> Result<(Subdir, String)> {
    choose_subdir(options)
}

fn rank(name: &str) -> usize {
    OVERRIDABLE.iter().position(|(known, _)| *known == name).unwrap_or(OVERRIDABLE.len())
}

fn choose_subdir(options: &TargetOptions) -> Result<(Subdir, String)> {
    let named = if let Some(platform) = &options.platform {
        Some((platform.clone(), "--platform".to_owned()))
    } else if let Some(value) = options.env.get("CONDA_SUBDIR").filter(|value| !value.trim().is_empty()) {
        Some((value, "CONDA_SUBDIR".to_owned()))
    } else {
        options.subdir.clone()
    };
    match named {
        Some((text, source)) => Ok((parse_subdir(&text, &source)?, source)),
        None => match Subdir::current() {
            Some(subdir) => Ok((subdir, "this machine".to_owned())),
            None => Err(Error::usage("this machine has no conda platform name").hint("name one: --platform linux-64")),
        },
    }
}

/// What conda calls a platform that others call `text`, in backticks.
fn other_name(text: &str) -> Option<&'static str> {
    let plain = text.to_ascii_lowercase().replace(['_', '/', '.', ' '], "-");
    let has = |words: &[&str]| words.iter().any(|word| plain.split('-').any(|part| part == *word));
    let arm = has(&["arm64", "arm", "aarch64", "armv8", "arm64v8"]);
    let intel = has(&["x86", "x64", "amd64", "64"]);
    if has(&["macos", "mac", "darwin", "osx", "apple", "macosx"]) {
        return Some(match (arm, intel) {
            (true, _) => "`osx-arm64`",
            (_, true) => "`osx-64`",
            _ => "`osx-arm64` or `osx-64`",
        });
    }
    if has(&["windows", "win", "win64", "win32", "pc"]) {
        return Some(match (arm, plain.as_str()) {
            (true, _) => "`win-arm64`",
            _ => "`win-64`",
        });
    }
    if has(&["linux", "linux64", "gnu", "manylinux"]) {
        return (arm || plain == "linux" || plain == "linux64" || has(&["x86", "x64", "amd64"])).then_some(if arm {
            "`linux-aarch64`"
        } else {
            "`linux-64`"
        });
    }
    match plain.as_str() {
        "aarch64" | "armv8" | "arm64v8" => Some("`linux-aarch64`"),
        "arm64" | "arm" => Some("`linux-aarch64` or `osx-arm64`"),
        "x86-64" | "amd64" | "x64" => Some("`linux-64`"),
        _ => None,
    }
}

/// A conda subdir that environments can be made for (`noarch` is none).
///
/// # Errors
/// `Kind::Usage` with the nearest known name.
pub fn parse_subdir(text: &str, source: &str) -> Result<Subdir> {
    let text = text.trim();
    match text.parse::<Subdir>() {
        Ok(Subdir::NoArch) => Err(Error::usage(format!("{source}: `noarch` is no platform of a machine"))
            .hint("noarch packages are always looked at; name a machine: --platform linux-64")),
        Ok(subdir) => Ok(subdir),
        Err(_) => {
            let mut error = Error::usage(format!("{source}: there is no platform `{text}`"));
            if let Some(meant) = other_name(text) {
                return Err(error.hint(format!("did you mean {meant}?")));
            }
            let nearest = Subdir::all()
                .map(|subdir| (strsim::jaro_winkler(subdir.as_str(), text), subdir))
                .filter(|(score, _)| *score > 0.8)
                .max_by(|left, right| left.0.total_cmp(&right.0));
            error = match nearest {
                Some((_, subdir)) => error.hint(format!("did you mean `{subdir}`?")),
                None => error.hint("common ones: linux-64, linux-aarch64, osx-64, osx-arm64, win-64"),
            };
            Err(error)
        }
    }
}

struct Entry {
    name: PackageName,
    package: Option<VirtualPackage>,
    source: String,
}

fn generic(name: &str, version: Version, build: &str) -> GenericVirtualPackage {
    GenericVirtualPackage { name: PackageName::new_unchecked(name), version, build_string: BuildString::new_unchecked(build) }
}

fn zero() -> Version {
    Version::major(0)
}

fn parse_version(text: &str) -> Option<Version> {
    // A virtual package has one version, not a range: what a match spec would allow is refused here.
    let plain = !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+' | '!'));
    plain.then(|| text.parse().ok()).flatten()
}

/// `MAJOR[.MINOR]` of a CUDA version, as `__cuda` has it.
fn cuda_version(text: &str, source: &str) -> Result<Version> {
    let text = text.trim();
    let wrong = |why: &str| {
        Error::usage(format!("{source}: `{text}` is no CUDA version"))
            .because(why)
            .hint("give major and minor, as nvidia-smi prints them: --cuda 12.6")
    };
    let parts: Vec<&str> = text.split('.').collect();
    if parts.iter().any(|part| part.is_empty() || part.len() > 3 || !part.bytes().all(|byte| byte.is_ascii_digit())) {
        return Err(wrong("it is not of the form MAJOR.MINOR"));
    }
    let numbers: Vec<u32> = parts.iter().filter_map(|part| part.parse().ok()).collect();
    match numbers.as_slice() {
        [0, ..] => Err(wrong("there was no CUDA 0: use an empty value, or `--gpu none`, for a machine without a driver")),
        [major] => Ok(format!("{major}.0").parse().map_err(|_| wrong("it is not of the form MAJOR.MINOR"))?),
        [major, minor] => Ok(format!("{major}.{minor}").parse().map_err(|_| wrong("it is not of the form MAJOR.MINOR"))?),
        _ => Err(wrong("a driver's CUDA version has two parts")),
    }
}

/// One package out of a name, a version and a build, with the rules that the known names have.
fn make(name: &str, version: &str, build: Option<&str>, source: &str) -> Result<GenericVirtualPackage> {
    let bad_version =
        |version: &str| Error::usage(format!("{source}: `{version}` is no version")).hint(format!("for example `{name}=2.28`"));
    match name {
        "__cuda" => Ok(generic(name, cuda_version(version, source)?, build.unwrap_or("0"))),
        "__cuda_arch" => {
            let parts: Vec<&str> = version.split('.').collect();
            if parts.len() != 2
                || parts.iter().any(|part| part.is_empty() || part.len() > 3 || !part.bytes().all(|byte| byte.is_ascii_digit()))
            {
                return Err(Error::usage(format!("{source}: `{version}` is no compute capability")).hint("give major and minor: `8.6`"));
            }
            Ok(generic(name, version.parse().map_err(|_| bad_version(version))?, build.unwrap_or("0")))
        }
        // CEP 30: the version is always 1 and the build string names the microarchitecture.
        "__archspec" => {
            let architecture = match (version, build) {
                ("1" | "0", Some(build)) => build,
                (name, None) => name,
                (_, Some(_)) => {
                    return Err(Error::usage(format!("{source}: `__archspec` has version 1")).hint("write `__archspec=1=x86_64_v3`"));
                }
            };
            if architecture.is_empty()
                || !architecture.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
            {
                return Err(Error::usage(format!("{source}: `{architecture}` is no microarchitecture"))
                    .hint("for example `x86_64_v3`, `zen4` or `m1`"));
            }
            Ok(generic(name, Version::major(1), architecture))
        }
        _ => Ok(generic(name, parse_version(version).ok_or_else(|| bad_version(version))?, build.unwrap_or("0"))),
    }
}

/// `NAME=VERSION[=BUILD]` of `--virtual-package`; an empty version means: remove.
fn parse_flag(text: &str) -> Result<Entry> {
    let source = format!("--virtual-package {text}");
    let usage = |why: &str| {
        Error::usage(format!("`{source}` is not understood"))
            .because(why)
            .hint("write NAME=VERSION or NAME=VERSION=BUILD: --virtual-package __glibc=2.28")
    };
    let mut parts = text.trim().splitn(3, '=');
    let name = parts.next().unwrap_or_default().trim();
    let version = parts.next().ok_or_else(|| usage("it has no `=`"))?.trim();
    let build = parts.next().map(str::trim);
    if !name.starts_with("__") {
        return Err(usage("the name of a virtual package begins with two underscores")
            .hint(format!("did you mean `__{}`?", name.trim_start_matches('_'))));
    }
    let parsed = PackageName::try_from(name.to_owned()).map_err(|_| usage("the name is no package name"))?;
    if name.len() < 3 {
        return Err(usage("the name is empty"));
    }
    if version.starts_with(['=', '<', '>', '!', '~', '*']) || build.is_some_and(|build| build.is_empty() || build.contains(['=', ' ', '*']))
    {
        return Err(usage("one version is wanted, no range"));
    }
    if version.is_empty() {
        if build.is_some() {
            return Err(usage("the version is empty"));
        }
        return Ok(Entry { name: parsed, package: None, source });
    }
    let package = make(parsed.as_normalized(), version, build, &source)?;
    Ok(Entry {
        name: parsed,
        package: Some(VirtualPackage { package, provenance: Provenance::Assumed, source: "--virtual-package".to_owned() }),
        source,
    })
}

fn flag_packages(options: &TargetOptions) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = Vec::new();
    for text in &options.virtual_packages {
        let entry = parse_flag(text)?;
        if let Some(earlier) = entries.iter().find(|earlier| earlier.name == entry.name)
            && earlier.package != entry.package
        {
            return Err(Error::usage(format!("`{}` is given twice", entry.name.as_normalized()))
                .because(format!("`{}` and `{}` differ", earlier.source, entry.source)));
        }
        entries.push(entry);
    }
    if let Some(cuda) = &options.cuda {
        let source = "--cuda".to_owned();
        let package = (!cuda.trim().is_empty()).then(|| cuda_version(cuda, &source)).transpose()?;
        let entry = Entry {
            name: PackageName::new_unchecked("__cuda"),
            package: package.map(|version| VirtualPackage {
                package: generic("__cuda", version, "0"),
                provenance: Provenance::Assumed,
                source: source.clone(),
            }),
            source,
        };
        if let Some(other) = entries.iter().find(|other| other.name == entry.name)
            && other.package.as_ref().map(|package| &package.package) != entry.package.as_ref().map(|package| &package.package)
        {
            return Err(Error::usage(format!("`--cuda {cuda}` and `{}` contradict each other", other.source)));
        }
        entries.push(entry);
    }
    Ok(entries)
}

/// .condarc, then `variables`, then the environment: the later one wins.
fn override_packages(options: &TargetOptions, subdir: Subdir, remarks: &mut Vec<String>) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut set = |name: &str, value: &str, source: String| -> Result<()> {
        let value = value.trim();
        if !OVERRIDABLE.iter().any(|(known, exists)| *known == name && exists(subdir))
            && OVERRIDABLE.iter().any(|(known, _)| *known == name)
        {
            // `CONDA_OVERRIDE_OSX` says nothing about a Linux environment (as in conda).
            return Ok(());
        }
        let package = if value.is_empty() {
            None
        } else {
            let (version, build) = match value.split_once('=') {
                Some((version, build)) => (version, Some(build)),
                None => (value, None),
            };
            Some(VirtualPackage {
                package: make(name, version, build, &source)?,
                provenance: Provenance::Overridden,
                source: source.clone(),
            })
        };
        entries.retain(|entry| entry.name.as_normalized() != name);
        entries.push(Entry { name: PackageName::new_unchecked(name), package, source });
        Ok(())
    };
    for (name, (value, source)) in &options.overrides {
        let bare = name.trim_start_matches("__").to_ascii_lowercase();
        if PackageName::try_from(bare.clone()).is_err() {
            return Err(Error::usage(format!("`override_virtual_packages` of {source}: `{name}` is no package name")));
        }
        set(&format!("__{bare}"), value, source.clone())?;
    }
    for (variable, value) in &options.variables {
        if let Some(name) = variable.strip_prefix("CONDA_OVERRIDE_") {
            let name = format!("__{}", name.to_ascii_lowercase());
            if rank(&name) < OVERRIDABLE.len() {
                set(&name, value, format!("`variables` {variable}"))?;
            } else {
                remarks.push(format!("`variables` {variable} names no virtual package that is known and was not used"));
            }
        }
    }
    for (name, _) in OVERRIDABLE {
        let variable = format!("CONDA_OVERRIDE_{}", name.trim_start_matches("__").to_ascii_uppercase());
        if let Some(value) = options.env.get(&variable) {
            set(name, &value, variable)?;
        }
    }
    Ok(entries)
}

/// What the platform has without anybody saying so.
fn base_packages(subdir: Subdir, is_native: bool, gpu: &GpuDetection, remarks: &mut Vec<String>) -> Vec<VirtualPackage> {
    let mut packages = Vec::new();
    let mut defaults_used = Vec::new();
    let mut add = |package: GenericVirtualPackage, found: Option<&str>| {
        let (provenance, source) = match found {
            Some(source) => (Provenance::Detected, source.to_owned()),
            None => (Provenance::Default, format!("default for {subdir}")),
        };
        if found.is_none() {
            defaults_used.push(package.to_string());
        }
        packages.push(VirtualPackage { package, provenance, source });
    };
    // These two follow from the platform's name alone.
    if subdir.is_unix() {
        add(generic("__unix", zero(), "0"), Some("the platform's name"));
    }
    if subdir.is_windows() {
        let detected = if is_native { Windows::current().and_then(|windows| windows.version) } else { None };
        let found = detected.is_some().then_some("the system");
        add(generic("__win", detected.unwrap_or_else(defaults::default_windows_version), "0"), found);
    }
    if subdir.is_linux() {
        let detected = if is_native { Linux::current().ok().flatten().map(|linux| linux.version) } else { None };
        let found = detected.is_some().then_some("uname");
        add(generic("__linux", detected.unwrap_or_else(defaults::default_linux_version), "0"), found);
        let detected = if is_native { LibC::current().ok().flatten() } else { None };
        match detected {
            Some(libc) => add(generic(&format!("__{}", libc.family.to_lowercase()), libc.version, "0"), Some("the C library")),
            // Native without glibc is a musl system: saying `__glibc` there would be a lie.
            None if is_native => {
                remarks.push("no glibc was found here, so there is no `__glibc`: nearly all Linux packages need one".to_owned())
            }
            None => add(generic("__glibc", defaults::default_glibc_version(subdir), "0"), None),
        }
    }
    if subdir.is_osx() {
        let detected = if is_native { Osx::current().ok().flatten().map(|osx| osx.version) } else { None };
        let found = detected.is_some().then_some("the system");
        if let Some(version) = detected.or_else(|| defaults::default_mac_os_version(subdir)) {
            add(generic("__osx", version, "0"), found);
        }
    }
    if is_native {
        add(Archspec::current().into(), Some("archspec"));
    } else if let Some(archspec) = Archspec::from_platform(subdir) {
        add(archspec.into(), None);
    }
    if !defaults_used.is_empty() {
        remarks.push(format!("{subdir} is not looked at from here: {} assumed by default", list(&defaults_used)));
    }
    if let Some((version, source)) = &gpu.cuda
        && let Ok(version) = version.parse()
    {
        packages.push(VirtualPackage {
            package: generic("__cuda", version, "0"),
            provenance: Provenance::Detected,
            source: source.clone(),
        });
        if let Some((capability, source)) = &gpu.compute_capability
            && let Ok(version) = capability.parse()
        {
            packages.push(VirtualPackage {
                package: generic("__cuda_arch", version, "0"),
                provenance: Provenance::Detected,
                source: source.clone(),
            });
        }
    }
    packages
}

fn list(items: &[String]) -> String {
    items.iter().map(|item| format!("`{item}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
