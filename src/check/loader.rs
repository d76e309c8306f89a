//! Whether the dynamic loader will find what the libraries of torch need: worked out from the files, nothing is loaded.
//!
//! The search follows `ld.so(8)`: what is loaded already under that name; DT_RPATH of the object and of those that asked for it, and of the
//! program (not where the object has a DT_RUNPATH); LD_LIBRARY_PATH; DT_RUNPATH; the folders of the system. torch adds one more: what it does not find
//! that way it loads itself from `nvidia/*/lib` of its site-packages (`torch/__init__.py`, `_preload_cuda_deps`).

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use serde::Serialize;

use crate::elf::{self, ElfInfo, PathTag};

/// Libraries of the NVIDIA driver: no environment has them.
const DRIVERS: &[&str] = &["libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libcuda.so"];

/// Libraries that belong to every Linux system; wheels may take them from there (PEP 600), with symbols no newer than it has.
const SYSTEM: &[&str] = &[
    "libc.so",
    "libm.so",
    "libdl.so",
    "libpthread.so",
    "librt.so",
    "libutil.so",
    "libresolv.so",
    "libanl.so",
    "libcrypt.so",
    "libnsl.so",
    "ld-linux",
    "ld64",
    "linux-vdso",
    "libgcc_s.so",
    "libstdc++.so",
    "libatomic.so",
    "libz.so",
    "libexpat.so",
];

/// Beginnings of names of the CUDA toolkit's libraries and its kin.
const CUDA: &[&str] = &[
    "libcudart",
    "libcublas",
    "libcudnn",
    "libcufft",
    "libcurand",
    "libcusolver",
    "libcusparse",
    "libnccl",
    "libnvrtc",
    "libnvJitLink",
    "libcupti",
    "libcufile",
    "libnvshmem",
    "libnvToolsExt",
    "libnvtx",
    "libnppi",
    "libnvjpeg",
];

/// Whether a library is one of the CUDA toolkit.
pub fn is_cuda(name: &str) -> bool {
    CUDA.iter().any(|start| name.starts_with(start))
}

fn is_system(name: &str) -> bool {
    SYSTEM.iter().any(|start| name.starts_with(start))
}

/// Where a library was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Through DT_RPATH or DT_RUNPATH.
    SearchPath,
    /// Through LD_LIBRARY_PATH.
    LibraryPath,
    /// In a folder of the system.
    System,
    /// torch loads it itself.
    Torch,
}

/// Where libraries are looked for.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// The environment: what is found outside of these folders is not its own.
    pub inside: Vec<PathBuf>,
    /// Folders of site-packages, for torch's own search.
    pub sites: Vec<PathBuf>,
    /// The interpreter: its DT_RPATH holds for everything it loads.
    pub program: Option<PathBuf>,
    /// Folders of LD_LIBRARY_PATH.
    pub library_path: Vec<PathBuf>,
    /// Folders of the system, in order.
    pub system: Vec<PathBuf>,
}

/// The folders that the loader of this machine searches: those of `/etc/ld.so.conf` and what it includes, and the built-in ones.
pub fn system_folders(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    read_conf(root, Path::new("/etc/ld.so.conf"), 0, &mut found);
    let triple = format!("{}-linux-gnu", std::env::consts::ARCH);
    for folder in ["/lib", "/usr/lib"] {
        found.push(PathBuf::from(format!("{folder}/{triple}")));
    }
    found.extend(["/lib64", "/usr/lib64", "/lib", "/usr/lib"].map(PathBuf::from));
    let mut seen = BTreeSet::new();
    found
        .into_iter()
        .filter_map(|path| root.join(path.strip_prefix("/").unwrap_or(&path)).canonicalize().ok())
        .filter(|path| path.is_dir() && seen.insert(path.clone()))
        .collect()
}

fn read_conf(root: &Path, path: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    let Ok(text) = crate::files::read_text(&root.join(path.strip_prefix("/").unwrap_or(path))) else { return };
    for line in text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()).filter(|line| !line.is_empty()) {
        let Some(pattern) = line.strip_prefix("include ").map(str::trim) else {
            found.push(PathBuf::from(line));
            continue;
        };
        // `include` takes a pattern; in practice it is `FOLDER/*.conf`.
        let pattern = Path::new("/etc").join(pattern);
        let (Some(folder), Some(name)) = (pattern.parent(), pattern.file_name().and_then(|name| name.to_str())) else { continue };
        if depth > 4 {
            continue;
        }
        let Some((start, end)) = name.split_once('*') else {
            read_conf(root, &pattern, depth + 1, found);
            continue;
        };
        let mut files: Vec<PathBuf> = std::fs::read_dir(root.join(folder.strip_prefix("/").unwrap_or(folder)))
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with(start) && name.ends_with(end)))
            .map(|entry| folder.join(entry.file_name()))
            .collect();
        files.sort();
        for file in files {
            read_conf(root, &file, depth + 1, found);
        }
    }
}

/// A library that is nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// Its name.
    pub name: String,
    /// Files that need it.
    pub needed_by: Vec<PathBuf>,
}

/// A symbol version that a library does not have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OldLibrary {
    /// The library as it is needed (`libstdc++.so.6`).
    pub name: String,
    /// The file that would be loaded.
    pub path: PathBuf,
    /// What it lacks, highest last.
    pub versions: Vec<String>,
    /// The highest it has of the same kind.
    pub has: Option<String>,
    /// A file that needs it.
    pub needed_by: PathBuf,
}

/// A library that comes from outside of the environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Outside {
    /// Its name.
    pub name: String,
    /// The file.
    pub path: PathBuf,
    /// How it was found.
    pub origin: Origin,
}

/// What came out.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Resolution {
    /// Files looked into.
    pub files: usize,
    /// Libraries by the name they are needed under, and the file that would be loaded.
    pub found: BTreeMap<String, PathBuf>,
    /// Nowhere.
    pub missing: Vec<Missing>,
    /// Found, and too old.
    pub old: Vec<OldLibrary>,
    /// Found outside, and not the system's by right.
    pub outside: Vec<Outside>,
    /// Found in LD_LIBRARY_PATH before the environment's own.
    pub shadowed: Vec<Outside>,
    /// Libraries of the driver that are asked for, and where the system has them.
    pub driver: BTreeMap<String, Option<PathBuf>>,
    /// Loaded by torch itself.
    pub preloaded: Vec<String>,
    /// Files that cannot be read: path and why.
    pub unreadable: Vec<(PathBuf, String)>,
}

struct Search<'a> {
    places: &'a Places,
    program: Vec<PathBuf>,
    cache: HashMap<PathBuf, Result<Rc<ElfInfo>, String>>,
    preload: Vec<PathBuf>,
}

/// An object whose needs are to be found.
struct Object {
    path: PathBuf,
    info: Rc<ElfInfo>,
    /// DT_RPATH folders of those that asked for it, nearest first.
    inherited: Vec<PathBuf>,
}

/// Works out what would be loaded for `roots` (in the order in which they are loaded).
pub fn resolve(roots: &[PathBuf], places: &Places) -> Resolution {
    let mut search = Search { places, program: Vec::new(), cache: HashMap::new(), preload: preload_folders(&places.sites) };
    let mut out = Resolution::default();
    if let Some(program) = &places.program {
        let real = program.canonicalize().unwrap_or_else(|_| program.clone());
        if let Ok(info) = search.info(&real) {
            search.program = folders(&info, &real, PathTag::Rpath);
        }
    }
    let mut missing: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    let mut loaded: HashMap<String, PathBuf> = HashMap::new();
    let mut seen: BTreeSet<PathBuf> = BTreeSet::new();
    let mut objects: Vec<Object> = Vec::new();
    for root in roots {
        let mut queue = VecDeque::from([(root.clone(), Vec::new())]);
        while let Some((path, inherited)) = queue.pop_front() {
            let real = path.canonicalize().unwrap_or_else(|_| path.clone());
            if !seen.insert(real.clone()) {
                continue;
            }
            let info = match search.info(&real) {
                Ok(info) => info,
                Err(why) => {
                    out.unreadable.push((path, why));
                    continue;
                }
            };
            if let Some(soname) = &info.soname {
                loaded.entry(soname.clone()).or_insert_with(|| path.clone());
            }
            if let Some(name) = path.file_name().and_then(|name| name.to_str()) {
                loaded.entry(name.to_owned()).or_insert_with(|| path.clone());
            }
            // `$ORIGIN` is where the loader found the file, links followed.
            let object = Object { path: real, info, inherited };
            for name in &object.info.needed {
                if DRIVERS.contains(&name.as_str()) {
                    out.driver.entry(name.clone()).or_insert_with(|| search.in_folders(&places.system, name, &object.info));
                    continue;
                }
                if loaded.contains_key(name) {
                    continue;
                }
                match search.find(&object, name) {
                    Some((found, origin)) => {
                        loaded.insert(name.clone(), found.clone());
                        let own = search.is_inside(&found);
                        match origin {
                            Origin::Torch => out.preloaded.push(name.clone()),
                            Origin::LibraryPath if !own && search.without_library_path(&object, name) => {
                                out.shadowed.push(Outside { name: name.clone(), path: found.clone(), origin });
                            }
                            _ if !own && !is_system(name) => {
                                out.outside.push(Outside { name: name.clone(), path: found.clone(), origin });
                            }
                            _ => {}
                        }
                        // What the system has fits together; the environment's own is followed.
                        if own || origin == Origin::LibraryPath {
                            let mut rpaths = folders(&object.info, &object.path, PathTag::Rpath);
                            rpaths.extend(object.inherited.iter().cloned());
                            queue.push_back((found, rpaths));
                        }
                    }
                    None => {
                        missing.entry(name.clone()).or_default().insert(object.path.clone());
                    }
                }
            }
            objects.push(object);
        }
    }
    // A root that comes later may be what an earlier one needed.
    missing.retain(|name, _| !loaded.contains_key(name));
    out.missing = missing.into_iter().map(|(name, needed_by)| Missing { name, needed_by: needed_by.into_iter().collect() }).collect();
    out.old = old_libraries(&mut search, &objects, &loaded);
    out.files = objects.len();
    let needed: BTreeSet<&String> = objects.iter().flat_map(|object| &object.info.needed).collect();
    out.found = loaded.into_iter().filter(|(name, _)| needed.contains(name)).collect();
    out
}

fn old_libraries(search: &mut Search<'_>, objects: &[Object], loaded: &HashMap<String, PathBuf>) -> Vec<OldLibrary> {
    let mut found: BTreeMap<String, OldLibrary> = BTreeMap::new();
    for object in objects {
        for need in object.info.version_needs.iter().filter(|need| !need.weak) {
            let Some(path) = loaded.get(&need.file) else { continue };
            let Ok(provider) = search.info(&path.canonicalize().unwrap_or_else(|_| path.clone())) else { continue };
            // A library without versions at all satisfies every one (the loader only warns).
            if provider.version_defs.is_empty() || provider.version_defs.contains(&need.version) {
                continue;
            }
            let kind = need.version.split('_').next().unwrap_or_default();
            let entry = found.entry(need.file.clone()).or_insert_with(|| OldLibrary {
                name: need.file.clone(),
                path: path.clone(),
                versions: Vec::new(),
                has: provider
                    .version_defs
                    .iter()
                    .filter(|version| version.split('_').next() == Some(kind) && version.contains('.'))
                    .max_by_key(|version| version_key(version))
                    .cloned(),
                needed_by: object.path.clone(),
            });
            if !entry.versions.contains(&need.version) {
                entry.versions.push(need.version.clone());
                entry.versions.sort_by_key(|version| version_key(version));
            }
        }
    }
    found.into_values().collect()
}

fn version_key(version: &str) -> Vec<u64> {
    super::compat::numbers(version.rsplit('_').next().unwrap_or_default())
}

/// `nvidia/*/lib` of each site-packages, in order of name.
fn preload_folders(sites: &[PathBuf]) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for site in sites {
        let mut folders: Vec<PathBuf> = std::fs::read_dir(site.join("nvidia"))
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path().join("lib"))
            .filter(|path| path.is_dir())
            .collect();
        folders.sort();
        out.extend(folders);
    }
    out
}

/// The folders of a search path with `$ORIGIN` filled in; other words (`$LIB`) are left out. DT_RPATH is void beside a DT_RUNPATH.
fn folders(info: &ElfInfo, path: &Path, tag: PathTag) -> Vec<PathBuf> {
    if tag == PathTag::Rpath && info.search_paths.iter().any(|(tag, _)| *tag == PathTag::Runpath) {
        return Vec::new();
    }
    let origin = path.parent().unwrap_or(Path::new("/"));
    info.search_paths
        .iter()
        .filter(|(found, _)| *found == tag)
        .flat_map(|(_, text)| text.split(':'))
        .filter(|part| !part.is_empty())
        .filter_map(|part| {
            let filled = part.replace("${ORIGIN}", &origin.to_string_lossy()).replace("$ORIGIN", &origin.to_string_lossy());
            (!filled.contains('$')).then(|| tidy(Path::new(&filled)))
        })
        .collect()
}

/// A path without `..`, so that what is inside of a folder can be told by its beginning.
fn tidy(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                out.pop();
            }
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

impl Search<'_> {
    fn info(&mut self, path: &Path) -> Result<Rc<ElfInfo>, String> {
        if let Some(known) = self.cache.get(path) {
            return known.clone();
        }
        let read = elf::read_file(path).map(Rc::new);
        self.cache.insert(path.to_owned(), read.clone());
        read
    }

    fn is_inside(&self, path: &Path) -> bool {
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        self.places.inside.iter().any(|folder| path.starts_with(folder) || real.starts_with(folder))
    }

    /// The first file of that name that is for the same machine: the loader passes over others.
    fn in_folders(&mut self, folders: &[PathBuf], name: &str, asking: &ElfInfo) -> Option<PathBuf> {
        folders.iter().map(|folder| folder.join(name)).find(|path| {
            path.is_file() && {
                let real = path.canonicalize().unwrap_or_else(|_| path.clone());
                // A damaged file is found all the same, and then cannot be loaded.
                self.info(&real).map_or(true, |info| info.machine == asking.machine)
            }
        })
    }

    fn find(&mut self, object: &Object, name: &str) -> Option<(PathBuf, Origin)> {
        if name.contains('/') {
            let path = tidy(&object.path.parent().unwrap_or(Path::new("/")).join(name));
            return path.is_file().then_some((path, Origin::SearchPath));
        }
        let info = object.info.clone();
        let has_runpath = info.search_paths.iter().any(|(tag, _)| *tag == PathTag::Runpath);
        if !has_runpath {
            let mut rpaths = folders(&info, &object.path, PathTag::Rpath);
            rpaths.extend(object.inherited.iter().cloned());
            rpaths.extend(self.program.iter().cloned());
            if let Some(found) = self.in_folders(&rpaths, name, &info) {
                return Some((found, Origin::SearchPath));
            }
        }
        let places = self.places;
        if let Some(found) = self.in_folders(&places.library_path, name, &info) {
            return Some((found, Origin::LibraryPath));
        }
        self.find_rest(object, name)
    }

    /// What comes after LD_LIBRARY_PATH.
    fn find_rest(&mut self, object: &Object, name: &str) -> Option<(PathBuf, Origin)> {
        let info = object.info.clone();
        if let Some(found) = self.in_folders(&folders(&info, &object.path, PathTag::Runpath), name, &info) {
            return Some((found, Origin::SearchPath));
        }
        let places = self.places;
        // torch looks for its own before the system's are asked for by name: its loader runs first where there is one.
        if is_cuda(name) {
            let preload = self.preload.clone();
            if let Some(found) = self.in_folders(&preload, name, &info) {
                return Some((found, Origin::Torch));
            }
        }
        self.in_folders(&places.system, name, &info).map(|found| (found, Origin::System))
    }

    /// Whether the environment has the library itself.
    fn without_library_path(&mut self, object: &Object, name: &str) -> bool {
        match self.find_rest(object, name) {
            Some((path, _)) => self.is_inside(&path),
            None => false,
        }
    }
}
