//! Which torch an environment has, read from its files: nothing is imported.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pep508_rs::{MarkerEnvironment, MarkerEnvironmentBuilder, Requirement, VersionOrUrl};
use rattler_conda_types::PrefixRecord;
use serde::Serialize;
use url::Url;

use super::compat::major_minor;
use crate::prefix::normalize;

/// What torch was built for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind", content = "version")]
pub enum Build {
    /// The processor only.
    Cpu,
    /// CUDA of this version (`13.2`).
    Cuda(String),
    /// ROCm of this version.
    Rocm(String),
}

impl Build {
    /// In words: "CUDA 13.2 build".
    pub fn text(&self) -> String {
        match self {
            Build::Cpu => "CPU build".to_owned(),
            Build::Cuda(version) => format!("CUDA {version} build"),
            Build::Rocm(version) => format!("ROCm {version} build"),
        }
    }
}

/// The torch of an environment.
#[derive(Debug, Clone, Serialize)]
pub struct Torch {
    /// The folder of the package.
    pub folder: PathBuf,
    /// Version, with the local part (`2.15.0+cu132`).
    pub version: String,
    /// Something says which version it is.
    #[serde(skip)]
    pub version_known: bool,
    /// The version by which an index knows it, from its metadata.
    pub distribution: Option<String>,
    /// What it was built for.
    pub build: Build,
    /// What says so, a line each.
    pub evidence: Vec<String>,
    /// Where the sources contradict each other.
    pub contradictions: Vec<String>,
    /// Python packages that it needs here, from its metadata: name and version specifiers.
    pub requires: Vec<(String, String)>,
    /// The conda package it belongs to: name, version, build.
    pub conda: Option<(String, String, String)>,
    /// Match specs of the conda package's dependencies.
    pub conda_depends: Vec<String>,
    /// Whether `version.py`, which every torch has and imports, can be read and names a version; else what is wrong with it.
    #[serde(skip)]
    pub version_file: Result<(), String>,
    /// Shared objects of torch, in the order in which they are loaded.
    #[serde(skip)]
    pub objects: Vec<PathBuf>,
}

impl Torch {
    /// The CUDA version it was built for.
    pub fn cuda(&self) -> Option<(u64, u64)> {
        match &self.build {
            Build::Cuda(version) => major_minor(version),
            _ => None,
        }
    }

    /// As pip would be asked for it again: `torch==2.8.0`, or `torch` where the version is not known.
    pub fn requirement(&self) -> String {
        match self.distribution.as_ref().or(self.version_known.then_some(&self.version)) {
            Some(version) => format!("torch=={version}"),
            None => "torch".to_owned(),
        }
    }

    /// The library with torch's own CUDA code.
    pub fn cuda_library(&self) -> Option<&Path> {
        self.object("libtorch_cuda.so")
    }

    /// One of its shared objects by name.
    pub fn object(&self, name: &str) -> Option<&Path> {
        self.objects.iter().find(|path| path.file_name().is_some_and(|file| file == name)).map(PathBuf::as_path)
    }
}

/// Finds the `torch` folder in the first of `sites` that has one.
pub fn find(sites: &[PathBuf]) -> Option<PathBuf> {
    sites.iter().map(|site| site.join("torch")).find(|folder| folder.join("__init__.py").is_file() || folder.join("version.py").is_file())
}

/// Reads what the files of `folder` (a `torch` package) say.
pub fn read(folder: &Path, prefix: &Path, records: &[PrefixRecord], python: Option<&str>) -> Torch {
    let site = folder.parent().unwrap_or(folder);
    let (version_file, mut whole) = match crate::files::read_text(&folder.join("version.py")) {
        Ok(text) => (text, Ok(())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => (String::new(), Err("`torch/version.py` is not there".to_owned())),
        Err(error) => (String::new(), Err(format!("`torch/version.py` cannot be read: {error}"))),
    };
    if whole.is_ok() && assigned(&version_file, "__version__").flatten().is_none_or(|version| version.is_empty()) {
        whole = Err("`torch/version.py` names no version".to_owned());
    }
    let said = |name: &str| assigned(&version_file, name);
    let info = dist_info(site);
    let mut evidence = Vec::new();
    let mut contradictions = Vec::new();
    let mut says: Vec<(Build, String)> = Vec::new();

    if !version_file.is_empty() {
        let build = match (said("cuda").flatten(), said("hip").flatten()) {
            (Some(cuda), _) => Some(Build::Cuda(cuda)),
            (None, Some(hip)) => Some(Build::Rocm(hip)),
            // A file that does not name CUDA at all says nothing of it.
            (None, None) => said("cuda").is_some().then_some(Build::Cpu),
        };
        if let Some(build) = build {
            evidence.push(format!("`torch/version.py`: {}", build.text()));
            says.push((build, "`torch/version.py`".into()));
        }
    }
    let objects = objects(folder, prefix);
    let has = |name: &str| objects.iter().any(|path| path.file_name().is_some_and(|file| file == name));
    let library = if has("libtorch_cuda.so") {
        "has `libtorch_cuda.so`"
    } else if has("libtorch_hip.so") {
        "has `libtorch_hip.so`"
    } else if has("libtorch_cpu.so") || has("libtorch.so") {
        "has only the processor's libraries"
    } else {
        "has no library of torch"
    };
    evidence.push(format!("`torch/lib` {library}"));
    let record = owner(folder, prefix, records);
    if let Some(record) = record {
        let package = &record.repodata_record.package_record;
        evidence.push(format!("conda package `{} {} {}`", package.name.as_normalized(), package.version, package.build));
        if let Some(build) = build_of_string(package.build.as_ref()) {
            says.push((build, format!("the build string `{}`", package.build)));
        }
    }
    let mut version = said("__version__").flatten();
    if let Some((name, metadata)) = &info {
        evidence.push(format!("`{name}`"));
        if let Some(found) = field(metadata, "Version:") {
            if let Some((_, local)) = found.split_once('+')
                && let Some(build) = build_of_local(local)
            {
                says.push((build, format!("`{name}`")));
            }
            version = version.or(Some(found));
        }
    }
    if let Some((_, local)) = version.as_deref().and_then(|version| version.split_once('+'))
        && let Some(build) = build_of_local(local)
    {
        says.push((build, format!("the version `{}`", version.as_deref().unwrap_or_default())));
    }
    let mut build = says
        .first()
        .map(|(build, _)| build.clone())
        .unwrap_or_else(|| if has("libtorch_cuda.so") { Build::Cuda("of unknown version".into()) } else { Build::Cpu });
    for (other, source) in says.iter().skip(1) {
        let same = match (&build, other) {
            (Build::Cuda(a), Build::Cuda(b)) => major_minor(a) == major_minor(b),
            // The local part of ROCm builds (`rocm6.2`) is shorter than the version of HIP.
            (Build::Rocm(_), Build::Rocm(_)) | (Build::Cpu, Build::Cpu) => true,
            _ => false,
        };
        if !same {
            contradictions.push(format!("{} says {}, {source} says {}", says[0].1, build.text(), other.text()));
        }
    }
    match (&build, has("libtorch_cuda.so")) {
        (Build::Cuda(_), false) => contradictions.push(format!("it says {}, and `libtorch_cuda.so` is not there", build.text())),
        (Build::Cpu, true) => {
            contradictions.push("it says CPU build, and `libtorch_cuda.so` is there".into());
            build = Build::Cuda("of unknown version".into());
        }
        _ => {}
    }
    contradictions.extend(whole.clone().err());
    let distribution = info.as_ref().and_then(|(_, metadata)| field(metadata, "Version:"));
    let (conda, conda_depends) = match record {
        Some(record) => {
            let package = &record.repodata_record.package_record;
            let name = (package.name.as_normalized().to_owned(), package.version.to_string(), package.build.to_string());
            let mut depends = package.depends.clone();
            // In conda-forge the libraries are a package of their own.
            depends.extend(
                records
                    .iter()
                    .filter(|record| record.name().as_normalized() == "libtorch")
                    .flat_map(|record| record.repodata_record.package_record.depends.iter().cloned()),
            );
            (Some(name), depends)
        }
        None => (None, Vec::new()),
    };
    Torch {
        folder: folder.to_owned(),
        version_known: version.is_some(),
        version: version.unwrap_or_else(|| "of unknown version".into()),
        version_file: whole,
        distribution,
        build,
        evidence,
        contradictions,
        requires: info.map(|(_, metadata)| requires(&metadata, python)).unwrap_or_default(),
        conda,
        conda_depends,
        objects,
    }
}

/// The value assigned to a name in `version.py`: `Some(None)` for `None`, `None` if the name is not there.
fn assigned(text: &str, name: &str) -> Option<Option<String>> {
    text.lines().find_map(|line| {
        let rest = line.strip_prefix(name)?;
        // `cuda: Optional[str] = '13.2'` or `cuda = '12.6'`; `cuda_x = …` is another name.
        let rest = rest.trim_start();
        if !rest.starts_with([':', '=']) {
            return None;
        }
        let value = rest.split_once('=')?.1.trim();
        if value == "None" {
            return Some(None);
        }
        let quoted = value.strip_prefix(['\'', '"'])?;
        let end = quoted.find(['\'', '"'])?;
        Some(Some(quoted[..end].to_owned()))
    })
}

/// `cu126` -> CUDA 12.6, `cpu`, `rocm6.2`.
fn build_of_local(local: &str) -> Option<Build> {
    let first = local.split('.').next().unwrap_or_default();
    if first == "cpu" {
        return Some(Build::Cpu);
    }
    if let Some(digits) = first.strip_prefix("cu") {
        return cuda_of_digits(digits).map(Build::Cuda);
    }
    local.strip_prefix("rocm").map(|version| Build::Rocm(version.to_owned()))
}

/// `126` -> `12.6`, `92` -> `9.2`.
fn cuda_of_digits(digits: &str) -> Option<String> {
    if !(2..=3).contains(&digits.len()) || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (major, minor) = digits.split_at(digits.len() - 1);
    Some(format!("{major}.{minor}"))
}

/// Build strings of conda: `cuda126_mkl_py311_h…`, `py3.10_cuda12.1_cudnn8.9.2_0`, `cpu_mkl_py311_…`, `py3.10_cpu_0`.
fn build_of_string(build: &str) -> Option<Build> {
    for part in build.split('_') {
        if part == "cpu" {
            return Some(Build::Cpu);
        }
        if let Some(rest) = part.strip_prefix("cuda") {
            if let Some((_, _)) = rest.split_once('.') {
                return Some(Build::Cuda(rest.to_owned()));
            }
            if let Some(version) = cuda_of_digits(rest) {
                return Some(Build::Cuda(version));
            }
        }
        if let Some(version) = part.strip_prefix("rocm").filter(|version| !version.is_empty()) {
            return Some(Build::Rocm(version.to_owned()));
        }
    }
    None
}

fn field(metadata: &str, key: &str) -> Option<String> {
    metadata.lines().take_while(|line| !line.is_empty()).find_map(|line| line.strip_prefix(key)).map(|value| value.trim().to_owned())
}

/// Name and METADATA of `torch-*.dist-info`.
fn dist_info(site: &Path) -> Option<(String, String)> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(site)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with("torch-") && name.ends_with("-info")
        })
        .collect();
    found.sort();
    let path = found.pop()?;
    let text = crate::files::read(&path.join("METADATA"), crate::files::MOST)
        .or_else(|_| crate::files::read(&path.join("PKG-INFO"), crate::files::MOST))
        .unwrap_or_default();
    Some((path.file_name()?.to_string_lossy().into_owned(), String::from_utf8_lossy(&text).into_owned()))
}

/// The lines of `Requires-Dist` that hold on this machine for this Python.
fn requires(metadata: &str, python: Option<&str>) -> Vec<(String, String)> {
    let Some(machine) = markers(python.unwrap_or("3.12.0")) else { return Vec::new() };
    metadata
        .lines()
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("Requires-Dist:"))
        .filter_map(|text| Requirement::<Url>::from_str(text.trim()).ok())
        .filter(|requirement| requirement.evaluate_markers(&machine, &[]))
        .map(|requirement| {
            let specifiers = match &requirement.version_or_url {
                Some(VersionOrUrl::VersionSpecifier(specifiers)) => specifiers.to_string(),
                _ => String::new(),
            };
            (normalize(requirement.name.as_ref()), specifiers)
        })
        .collect()
}

fn markers(python: &str) -> Option<MarkerEnvironment> {
    let short = python.splitn(3, '.').take(2).collect::<Vec<_>>().join(".");
    MarkerEnvironment::try_from(MarkerEnvironmentBuilder {
        implementation_name: "cpython",
        implementation_version: python,
        os_name: "posix",
        platform_machine: std::env::consts::ARCH,
        platform_python_implementation: "CPython",
        platform_release: "",
        platform_system: if cfg!(target_os = "macos") { "Darwin" } else { "Linux" },
        platform_version: "",
        python_full_version: python,
        python_version: &short,
        sys_platform: if cfg!(target_os = "macos") { "darwin" } else { "linux" },
    })
    .ok()
}

/// The conda package that brought the folder.
fn owner<'a>(folder: &Path, prefix: &Path, records: &'a [PrefixRecord]) -> Option<&'a PrefixRecord> {
    let relative = folder.strip_prefix(prefix).ok()?;
    let wanted = [relative.join("version.py"), relative.join("__init__.py")];
    let owns = |record: &&PrefixRecord| {
        record.files.iter().any(|file| wanted.contains(file))
            || record.paths_data.paths.iter().any(|path| wanted.contains(&path.relative_path))
    };
    // Noarch packages list their files without the folder of the interpreter, so the name is good enough where no list fits.
    records.iter().find(owns).or_else(|| records.iter().find(|record| record.name().as_normalized() == "pytorch"))
}

/// torch's shared objects: first what `import torch` loads first, then the extension module, then the rest.
fn objects(folder: &Path, prefix: &Path) -> Vec<PathBuf> {
    let is_object = |name: &str| name.ends_with(".so") || name.contains(".so.");
    let list = |folder: &Path, wanted: &dyn Fn(&str) -> bool| -> BTreeSet<PathBuf> {
        std::fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_name().to_str().is_some_and(|name| is_object(name) && wanted(name)))
            .map(|entry| entry.path())
            .collect()
    };
    let lib = folder.join("lib");
    let mut out: Vec<PathBuf> = Vec::new();
    out.extend(Some(lib.join("libtorch_global_deps.so")).filter(|path| path.exists()));
    out.extend(list(folder, &|name| name.starts_with("_C")));
    out.extend(list(&lib, &|_| true));
    // In conda-forge they lie beside all other libraries.
    out.extend(list(&prefix.join("lib"), &|name| name.starts_with("libtorch") || name.starts_with("libc10") || name.starts_with("libshm")));
    let mut names = BTreeSet::new();
    out.retain(|path| path.file_name().is_some_and(|name| names.insert(name.to_owned())));
    out
}

/// A library of CUDA or its kin, as a package of the environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Component {
    /// `runtime`, `cudnn`, `nccl`, `cublas`, ….
    pub what: &'static str,
    /// Name of the package.
    pub package: String,
    /// Its version.
    pub version: String,
    /// The major version of CUDA it is for, where its name says so (`nvidia-cudnn-cu13`).
    pub for_cuda: Option<u64>,
}

/// Which component a package is, with the major version of CUDA in its name.
pub fn component_of(package: &str) -> Option<(&'static str, Option<u64>)> {
    let (stem, suffix) = match package.rsplit_once("-cu") {
        Some((stem, digits)) if !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) => (stem, digits.parse().ok()),
        _ => (package, None),
    };
    let what = match stem {
        "nvidia-cuda-runtime" | "cuda-cudart" | "cudatoolkit" => "runtime",
        "cuda-toolkit" | "cuda-version" => "toolkit",
        "nvidia-cublas" | "libcublas" => "cublas",
        "nvidia-cudnn" | "cudnn" | "libcudnn" => "cudnn",
        "nvidia-nccl" | "nccl" => "nccl",
        "nvidia-cusparselt" | "cusparselt" => "cusparselt",
        "nvidia-nvshmem" | "libnvshmem3" => "nvshmem",
        "nvidia-cufft" | "libcufft" => "cufft",
        "nvidia-cuda-nvrtc" | "cuda-nvrtc" => "nvrtc",
        "nvidia-nvjitlink" | "libnvjitlink" => "nvjitlink",
        "cuda-compat" => "compat",
        "triton" | "pytorch-triton" => "triton",
        _ => return None,
    };
    Some((what, suffix))
}

/// Components among the Python packages of `sites` and the conda packages, sorted by what they are.
pub fn components(sites: &[PathBuf], records: &[PrefixRecord]) -> Vec<Component> {
    let mut found: BTreeMap<(&'static str, String), Component> = BTreeMap::new();
    let mut add = |package: String, version: String| {
        if let Some((what, for_cuda)) = component_of(&package) {
            found.entry((what, package.clone())).or_insert(Component { what, package, version, for_cuda });
        }
    };
    for record in records {
        let package = &record.repodata_record.package_record;
        add(package.name.as_normalized().to_owned(), package.version.to_string());
    }
    for site in sites {
        for entry in std::fs::read_dir(site).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(stem) = name.strip_suffix(".dist-info") else { continue };
            if let Some((name, version)) = stem.split_once('-') {
                add(normalize(name), version.to_owned());
            }
        }
    }
    found.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_are_told_from_versions_and_build_strings() {
        let cuda = |version: &str| Some(Build::Cuda(version.to_owned()));
        for (local, expected) in [("cu132", cuda("13.2")), ("cu92", cuda("9.2")), ("cpu", Some(Build::Cpu)), ("cu1", None), ("abc", None)] {
            assert_eq!(build_of_local(local), expected, "{local}");
        }
        assert_eq!(build_of_local("rocm6.2"), Some(Build::Rocm("6.2".into())));
        for (build, expected) in [
            ("cuda126_mkl_py311_h1234_300", cuda("12.6")),
            ("py3.10_cuda12.1_cudnn8.9.2_0", cuda("12.1")),
            ("cpu_mkl_py311_h5678_100", Some(Build::Cpu)),
            ("py3.10_cpu_0", Some(Build::Cpu)),
            ("h123_0", None),
        ] {
            assert_eq!(build_of_string(build), expected, "{build}");
        }
    }

    #[test]
    fn the_version_file_is_read_and_not_run() {
        let text = "from typing import Optional\n__version__ = '2.15.0+cu132'\ncuda_x = 'no'\ncuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n";
        assert_eq!(assigned(text, "__version__"), Some(Some("2.15.0+cu132".into())));
        assert_eq!(assigned(text, "cuda"), Some(Some("13.2".into())));
        assert_eq!((assigned(text, "hip"), assigned(text, "xpu")), (Some(None), None));
    }

    #[test]
    fn only_the_requirements_of_this_machine_count() {
        let metadata = "Name: torch\nRequires-Dist: nvidia-cudnn-cu13==9.26.0.51; platform_system == \"Linux\"\nRequires-Dist: pywin32; platform_system == \"Windows\"\nRequires-Dist: optree>=0.1; extra == \"optree\"\nRequires-Dist: old==1; python_version < \"3.9\"\n\nRequires-Dist: text==1\n";
        assert_eq!(requires(metadata, Some("3.11.7")), [("nvidia-cudnn-cu13".to_owned(), "==9.26.0.51".to_owned())]);
        assert_eq!(component_of("nvidia-cudnn-cu13"), Some(("cudnn", Some(13))));
        assert_eq!(component_of("nvidia-cublas"), Some(("cublas", None)));
        assert_eq!(component_of("numpy"), None);
    }
}
