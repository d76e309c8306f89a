//! Environments with stand-ins for torch and its libraries.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::check::archs::made_section;
use crate::check::{Device, Driver, Level, Machine, MemoryTest, Options, Report, Subject};
use crate::install::{Cancel, hex_text};
use crate::report::Silent;

const TORCH: &str = include_str!("torch_stand_in.py");

/// Name, type, flags, link, info, bytes, entry size.
type Section = (String, u32, u64, u32, u32, Vec<u8>, u64);

/// A shared object that is nothing but what the loader looks at.
#[derive(Debug, Clone, Default)]
pub struct Library {
    needed: Vec<String>,
    soname: Option<String>,
    /// Tag (15: DT_RPATH, 29: DT_RUNPATH) and text.
    search: Option<(u64, String)>,
    needs: Vec<(String, Vec<String>)>,
    defs: Vec<String>,
    sections: Vec<(String, Vec<u8>)>,
}

impl Library {
    pub fn new(soname: &str) -> Self {
        Library { soname: Some(soname.to_owned()), ..Library::default() }
    }
    pub fn needs(mut self, names: &[&str]) -> Self {
        self.needed.extend(names.iter().map(ToString::to_string));
        self
    }
    pub fn rpath(mut self, path: &str) -> Self {
        self.search = Some((15, path.to_owned()));
        self
    }
    pub fn runpath(mut self, path: &str) -> Self {
        self.search = Some((29, path.to_owned()));
        self
    }
    /// Needs symbol versions of a library.
    pub fn versions_of(mut self, library: &str, versions: &[&str]) -> Self {
        self.needs.push((library.to_owned(), versions.iter().map(ToString::to_string).collect()));
        self
    }
    /// Has symbol versions.
    pub fn has(mut self, versions: &[&str]) -> Self {
        self.defs.extend(versions.iter().map(ToString::to_string));
        self
    }
    pub fn section(mut self, name: &str, bytes: Vec<u8>) -> Self {
        self.sections.push((name.to_owned(), bytes));
        self
    }

    /// The file: header, two program headers, sections, section headers. Addresses are file offsets.
    pub fn bytes(&self) -> Vec<u8> {
        let mut strings = vec![0u8];
        let mut string = |text: &str| {
            let at = strings.len() as u64;
            strings.extend(text.as_bytes());
            strings.push(0);
            at
        };
        let mut dynamic: Vec<(u64, u64)> = self.needed.iter().map(|name| (1, string(name))).collect();
        dynamic.extend(self.soname.iter().map(|name| (14, string(name))));
        dynamic.extend(self.search.iter().map(|(tag, path)| (*tag, string(path))));
        let mut verneed = Vec::new();
        for (index, (library, versions)) in self.needs.iter().enumerate() {
            let size = 16 + 16 * versions.len() as u32;
            verneed.extend(1u16.to_le_bytes());
            verneed.extend((versions.len() as u16).to_le_bytes());
            verneed.extend((string(library) as u32).to_le_bytes());
            verneed.extend(16u32.to_le_bytes());
            verneed.extend(if index + 1 == self.needs.len() { 0 } else { size }.to_le_bytes());
            for (at, version) in versions.iter().enumerate() {
                verneed.extend([0; 8]);
                verneed.extend((string(version) as u32).to_le_bytes());
                verneed.extend(if at + 1 == versions.len() { 0u32 } else { 16 }.to_le_bytes());
            }
        }
        let mut verdef = Vec::new();
        for (index, version) in self.defs.iter().enumerate() {
            verdef.extend(1u16.to_le_bytes());
            verdef.extend([0; 4]);
            verdef.extend(1u16.to_le_bytes());
            verdef.extend([0; 4]);
            verdef.extend(20u32.to_le_bytes());
            verdef.extend(if index + 1 == self.defs.len() { 0u32 } else { 28 }.to_le_bytes());
            verdef.extend((string(version) as u32).to_le_bytes());
            verdef.extend([0; 4]);
        }
        let mut sections: Vec<Section> = vec![(".dynstr".into(), 3, 2, 0, 0, strings.clone(), 0)];
        sections.push((".dynamic".into(), 6, 3, 1, 0, vec![0; (dynamic.len() + 3) * 16], 16));
        if !verneed.is_empty() {
            sections.push((".gnu.version_r".into(), 0x6fff_fffe, 2, 1, self.needs.len() as u32, verneed, 0));
        }
        if !verdef.is_empty() {
            sections.push((".gnu.version_d".into(), 0x6fff_fffd, 2, 1, self.defs.len() as u32, verdef, 0));
        }
        for (name, bytes) in &self.sections {
            sections.push((name.clone(), 1, 2, 0, 0, bytes.clone(), 0));
        }
        let mut names = vec![0u8];
        let mut name_at = Vec::new();
        for (name, ..) in &sections {
            name_at.push(names.len() as u32);
            names.extend(name.as_bytes());
            names.push(0);
        }
        let shstrtab_name = names.len() as u32;
        names.extend(b".shstrtab\0");
        let mut out = vec![0u8; 64 + 2 * 56];
        let mut placed = Vec::new();
        for section in &sections {
            out.resize(out.len().next_multiple_of(16), 0);
            placed.push(out.len() as u64);
            out.extend(&section.5);
        }
        let dynamic_at = placed[1];
        dynamic.extend([(5, placed[0]), (10, strings.len() as u64), (0, 0)]);
        for (index, (tag, value)) in dynamic.iter().enumerate() {
            let at = dynamic_at as usize + index * 16;
            out[at..at + 8].copy_from_slice(&tag.to_le_bytes());
            out[at + 8..at + 16].copy_from_slice(&value.to_le_bytes());
        }
        let names_at = out.len() as u64;
        out.extend(&names);
        out.resize(out.len().next_multiple_of(16), 0);
        let table = out.len() as u64;
        out.extend([0; 64]);
        let mut header = |name: u32, kind: u32, flags: u64, at: u64, size: u64, link: u32, info: u32, entry: u64| {
            out.extend(name.to_le_bytes());
            out.extend(kind.to_le_bytes());
            for value in [flags, at, at, size] {
                out.extend(value.to_le_bytes());
            }
            out.extend(link.to_le_bytes());
            out.extend(info.to_le_bytes());
            for value in [8, entry] {
                out.extend(value.to_le_bytes());
            }
        };
        for (index, (_, kind, flags, link, info, bytes, entry)) in sections.iter().enumerate() {
            header(name_at[index], *kind, *flags, placed[index], bytes.len() as u64, *link, *info, *entry);
        }
        header(shstrtab_name, 3, 0, names_at, names.len() as u64, 0, 0, 0);
        let length = out.len() as u64;
        let mut start = b"\x7fELF\x02\x01\x01".to_vec();
        start.resize(16, 0);
        start.extend(3u16.to_le_bytes());
        start.extend(if cfg!(target_arch = "aarch64") { 183u16 } else { 62 }.to_le_bytes());
        start.extend(1u32.to_le_bytes());
        for value in [0, 64, table] {
            start.extend(value.to_le_bytes());
        }
        start.extend(0u32.to_le_bytes());
        for value in [64u16, 56, 2, 64, sections.len() as u16 + 2, sections.len() as u16 + 1] {
            start.extend(value.to_le_bytes());
        }
        for (kind, at, size) in [(1u32, 0, length), (2, dynamic_at, dynamic.len() as u64 * 16)] {
            start.extend(kind.to_le_bytes());
            start.extend(6u32.to_le_bytes());
            for value in [at, at, at, size, size, 16] {
                start.extend(value.to_le_bytes());
            }
        }
        out[..start.len()].copy_from_slice(&start);
        out
    }
}

/// Path and version of a real interpreter; `None` after saying so where there is none.
pub fn python() -> Option<&'static (PathBuf, String)> {
    static FOUND: OnceLock<Option<(PathBuf, String)>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let named = std::env::var_os("TARE_HOST_PYTHON").unwrap_or_else(|| "python3".into());
        let program = "import sys; print(getattr(sys, '_base_executable', sys.executable)); print('%d.%d' % sys.version_info[:2])";
        let ran = Command::new(named).args(["-c", program]).output().ok()?;
        let text = String::from_utf8(ran.stdout).ok()?;
        let (path, version) = text.trim().split_once('\n')?;
        Some((PathBuf::from(path), version.to_owned()))
    });
    if found.is_none() {
        eprintln!("skipped: no Python");
    }
    found.as_ref()
}

/// An environment to check, and the machine it is checked on.
pub struct World {
    folder: tempfile::TempDir,
    pub env: BTreeMap<OsString, OsString>,
    pub machine: Machine,
    pub require_gpu: bool,
    pub limit: Duration,
    /// For the whole check.
    pub whole: Option<Duration>,
    pub level: Level,
    site: PathBuf,
    /// Files of each Python package, for its RECORD: name and version to paths below site-packages.
    packages: BTreeMap<(String, String), Vec<String>>,
    metadata: BTreeMap<String, String>,
    pub conda: bool,
}

const NVIDIA: &str = "$ORIGIN/../../nvidia/cudnn/lib:$ORIGIN/../../nvidia/nccl/lib:$ORIGIN/../../nvidia/cu13/lib:$ORIGIN";

impl World {
    /// A virtual environment without packages, on a machine without a GPU.
    pub fn empty() -> Option<Self> {
        let (python, version) = python()?;
        let folder = tempfile::Builder::new().prefix("tare-check-").tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let prefix = root.join("envs/train");
        let site = prefix.join(format!("lib/python{version}/site-packages"));
        std::fs::create_dir_all(prefix.join("bin")).unwrap();
        std::fs::create_dir_all(&site).unwrap();
        std::os::unix::fs::symlink(python, prefix.join("bin/python")).unwrap();
        std::fs::write(
            prefix.join("pyvenv.cfg"),
            format!("home = {}\ninclude-system-site-packages = false\n", python.parent().unwrap().display()),
        )
        .unwrap();
        std::fs::write(prefix.join("bin/activate"), format!("VIRTUAL_ENV={}\n", prefix.display())).unwrap();
        let system = root.join("system/lib64");
        std::fs::create_dir_all(&system).unwrap();
        for (name, versions) in [
            ("libc.so.6", &["GLIBC_2.17", "GLIBC_2.28", "GLIBC_2.34"][..]),
            ("libm.so.6", &["GLIBC_2.17"]),
            ("libstdc++.so.6", &["GLIBCXX_3.4", "GLIBCXX_3.4.29", "CXXABI_1.3"]),
        ] {
            std::fs::write(system.join(name), Library::new(name).has(versions).bytes()).unwrap();
        }
        let mut env: BTreeMap<OsString, OsString> = BTreeMap::new();
        env.insert("PATH".into(), "/usr/bin:/bin".into());
        env.insert("HOME".into(), root.clone().into());
        Some(World {
            folder,
            env,
            machine: Machine::default(),
            require_gpu: false,
            limit: Duration::from_secs(60),
            whole: None,
            level: Level::Quick,
            site,
            packages: BTreeMap::new(),
            metadata: BTreeMap::new(),
            conda: false,
        })
    }

    /// With a torch for CUDA 13.2 that is whole.
    pub fn healthy() -> Option<Self> {
        let mut world = Self::empty()?;
        let torch = ("torch", "2.15.0+cu132");
        world.add(torch, "torch/__init__.py", TORCH.as_bytes());
        world.add(torch, "torch/version.py", b"__version__ = '2.15.0+cu132'\ncuda = '13.2'\nhip = None\n");
        let deps = Library::new("libtorch_global_deps.so").needs(&["libcudart.so.13", "libm.so.6", "libc.so.6"]).rpath(NVIDIA);
        world.add(torch, "torch/lib/libtorch_global_deps.so", &deps.bytes());
        let cpu = Library::new("libtorch_cpu.so").needs(&["libc10.so", "libstdc++.so.6", "libc.so.6"]).rpath("$ORIGIN");
        world.add(
            torch,
            "torch/lib/libtorch_cpu.so",
            &cpu.versions_of("libstdc++.so.6", &["GLIBCXX_3.4.29"]).versions_of("libc.so.6", &["GLIBC_2.28"]).bytes(),
        );
        world.add(torch, "torch/lib/libc10.so", &Library::new("libc10.so").needs(&["libc.so.6"]).bytes());
        world.cuda_library(&[75, 80, 86, 90], &[]);
        let flags = Library::new("libtorch_python.so").needs(&["libtorch_cpu.so", "libtorch_cuda.so"]).rpath("$ORIGIN");
        world.add(
            torch,
            "torch/lib/libtorch_python.so",
            &flags.section(".rodata", b"text\0sm_75 sm_80 sm_86 sm_90\0more\0".to_vec()).bytes(),
        );
        let module = Library::default().needs(&["libtorch_python.so"]).rpath("$ORIGIN/lib");
        world.add(torch, "torch/_C.cpython-311-x86_64-linux-gnu.so", &module.bytes());
        world.metadata.insert(
            "torch".into(),
            "Requires-Dist: nvidia-cudnn-cu13==9.26.0.51; platform_system == \"Linux\"\nRequires-Dist: nvidia-nccl-cu13==2.30.7; platform_system == \"Linux\"\n".into(),
        );
        let runtime = ("nvidia_cuda_runtime", "13.2.86");
        world.add(runtime, "nvidia/cu13/lib/libcudart.so.13", &Library::new("libcudart.so.13").needs(&["libc.so.6"]).bytes());
        let cudnn = ("nvidia_cudnn_cu13", "9.26.0.51");
        world.add(cudnn, "nvidia/cudnn/lib/libcudnn.so.9", &Library::new("libcudnn.so.9").needs(&["libc.so.6"]).bytes());
        let nccl = Library::new("libnccl.so.2").needs(&["libc.so.6"]).section(".rodata", b"NCCL version 2.30.7+cuda13.2\0".to_vec());
        world.add(("nvidia_nccl_cu13", "2.30.7"), "nvidia/nccl/lib/libnccl.so.2", &nccl.bytes());
        Some(world)
    }

    /// The library with torch's GPU code, for these architectures.
    pub fn cuda_library(&mut self, code: &[u32], ptx: &[u32]) {
        let entries: Vec<(bool, u32)> = code.iter().map(|sm| (false, *sm)).chain(ptx.iter().map(|sm| (true, *sm))).collect();
        let library = Library::new("libtorch_cuda.so")
            .needs(&["libcudart.so.13", "libcudnn.so.9", "libnccl.so.2", "libcuda.so.1", "libtorch_cpu.so", "libc.so.6"])
            .rpath(NVIDIA)
            .section(".nv_fatbin", made_section(&[&entries, &entries]));
        self.add(("torch", "2.15.0+cu132"), "torch/lib/libtorch_cuda.so", &library.bytes());
    }

    /// A file of a Python package.
    pub fn add(&mut self, package: (&str, &str), path: &str, bytes: &[u8]) {
        let full = self.site.join(path);
        std::fs::create_dir_all(full.parent().unwrap()).unwrap();
        std::fs::write(full, bytes).unwrap();
        let files = self.packages.entry((package.0.to_owned(), package.1.to_owned())).or_default();
        if !files.iter().any(|file| file == path) {
            files.push(path.to_owned());
        }
    }

    /// Takes the files of a package away, and the package.
    pub fn drop_package(&mut self, name: &str) {
        let keys: Vec<_> = self.packages.keys().filter(|(package, _)| package == name).cloned().collect();
        for key in keys {
            for file in self.packages.remove(&key).unwrap_or_default() {
                std::fs::remove_file(self.site.join(file)).unwrap();
            }
        }
    }

    pub fn root(&self) -> PathBuf {
        self.folder.path().canonicalize().unwrap()
    }
    pub fn prefix(&self) -> PathBuf {
        self.root().join("envs/train")
    }
    pub fn site(&self) -> &Path {
        &self.site
    }
    pub fn set(&mut self, name: &str, value: impl Into<OsString>) {
        self.env.insert(name.into(), value.into());
    }

    /// A GPU of this compute capability, with a driver.
    pub fn gpu(&mut self, capability: &str, driver: &str, cuda: &str) {
        self.machine = Machine {
            driver: Driver {
                version: Some(driver.to_owned()),
                cuda: Some(cuda.to_owned()),
                source: Some("nvml".into()),
                ..Driver::default()
            },
            devices: vec![Device {
                index: 0,
                name: "Stand-in GPU".into(),
                memory_bytes: Some(24 << 30),
                compute_capability: Some(capability.to_owned()),
            }],
            ..Machine::default()
        };
        self.set("STAND_IN_GPU", capability);
    }

    /// Writes the metadata of the Python packages, or of one conda package that has all files.
    pub fn install(&self) {
        if self.conda {
            return self.install_conda();
        }
        for ((name, version), files) in &self.packages {
            let info = self.site.join(format!("{name}-{version}.dist-info"));
            std::fs::create_dir_all(&info).unwrap();
            let more = self.metadata.get(name).cloned().unwrap_or_default();
            std::fs::write(info.join("METADATA"), format!("Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}\n")).unwrap();
            std::fs::write(info.join("INSTALLER"), "pip\n").unwrap();
            let folder = info.file_name().unwrap().to_string_lossy().into_owned();
            let mut record = String::new();
            for file in files.iter().cloned().chain([format!("{folder}/METADATA"), format!("{folder}/INSTALLER")]) {
                let bytes = std::fs::read(self.site.join(&file)).unwrap();
                record.push_str(&format!("{file},sha256={},{}\n", urlsafe(&Sha256::digest(&bytes)), bytes.len()));
            }
            record.push_str(&format!("{folder}/RECORD,,\n"));
            std::fs::write(info.join("RECORD"), record).unwrap();
        }
    }

    fn install_conda(&self) {
        let meta = self.prefix().join("conda-meta");
        std::fs::create_dir_all(&meta).unwrap();
        std::fs::write(meta.join("history"), "==> 2026-01-01 00:00:00 <==\n# update specs: [\"pytorch-gpu\", \"python\"]\n").unwrap();
        let prefix = self.prefix();
        for ((name, version), files) in &self.packages {
            let (name, build) = if name == "torch" { ("pytorch".to_owned(), "cuda132_py311_h1_0") } else { (name.replace('_', "-"), "0") };
            let version = version.split('+').next().unwrap();
            let paths: Vec<Value> = files
                .iter()
                .map(|file| {
                    let full = self.site.join(file);
                    let bytes = std::fs::read(&full).unwrap();
                    json!({
                        "_path": full.strip_prefix(&prefix).unwrap(), "path_type": "hardlink",
                        "sha256": hex_text(&Sha256::digest(&bytes)), "size_in_bytes": bytes.len(),
                    })
                })
                .collect();
            let record = json!({
                "name": name, "version": version, "build": build, "build_number": 0, "subdir": "linux-64", "depends": [], "constrains": [],
                "fn": format!("{name}-{version}-{build}.conda"), "url": format!("https://conda.anaconda.org/conda-forge/linux-64/{name}-{version}-{build}.conda"),
                "channel": "conda-forge",
                "files": paths.iter().map(|path| path["_path"].clone()).collect::<Vec<_>>(),
                "paths_data": { "paths_version": 1, "paths": paths },
            });
            std::fs::write(meta.join(format!("{name}-{version}-{build}.json")), record.to_string()).unwrap();
        }
    }

    pub fn check(&self) -> Report {
        self.check_with(None)
    }

    pub fn check_with(&self, memory: Option<&dyn MemoryTest>) -> Report {
        self.try_check(memory, &Cancel::new()).unwrap()
    }

    pub fn try_check(&self, memory: Option<&dyn MemoryTest>, cancel: &Cancel) -> crate::error::Result<Report> {
        let subject = Subject::at(&self.prefix())?;
        let options = Options {
            level: self.level,
            require_gpu: self.require_gpu,
            limit: self.limit,
            whole: self.whole.map(|time| (std::time::Instant::now() + time, time)),
            cancel: cancel.clone(),
            env: self.env.clone(),
            machine: self.machine.clone(),
            memory,
            root: self.root().join("system"),
        };
        crate::check::check(&subject, &options, &Silent)
    }
}

fn urlsafe(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let word = u32::from(chunk[0]) << 16 | u32::from(*chunk.get(1).unwrap_or(&0)) << 8 | u32::from(*chunk.get(2).unwrap_or(&0));
        for k in 0..=chunk.len() {
            out.push(ALPHABET[(word >> (18 - 6 * k) & 63) as usize] as char);
        }
    }
    out
}
