//! From unpacked wheels in the cache to a tree in the stage, in the same transaction as the conda half.
//!
//! Wheels are linked here and not through rattler's conversion of wheels to conda packages: that one shares conda's names (PyPI's `foo` and another
//! conda's `foo` would replace each other), describes the cache in `RECORD`, puts headers elsewhere than pip does, looks at no hash of `RECORD`, and writes
//! conda records, by which conda would believe that it installed them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pep508_rs::pep440_rs::VersionSpecifiers;
use rattler::install::{PythonInfo, python_entry_point_template};
use rattler_conda_types::package::{EntryPoint, PathType, PathsEntry};
use rattler_conda_types::prefix_record;
use rattler_conda_types::{PackageName, Subdir};
use rattler_redaction::strip_url_for_serialization;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, IntoParallelRefIterator, ParallelIterator};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use url::Url;

use super::fetch::CachedWheel;
use super::record_file;
use super::tags::{TagInput, Tags, WheelName};
use super::wheel::{Entry, Scheme, hex32};
use super::{PypiPlan, PypiRecord, PypiSource, ReadyWheel, Version, WheelFile};
use crate::error::{Error, Kind, Result};
use crate::install::fetch::Cached;
use crate::install::metadata::{TARE_FOLDER, write_file};
use crate::install::{Cancel, Clobber, LinkMode, hex_text, link, set_mode};
use crate::report::{Progress, TaskId};

/// Version of the layout of `conda-meta/tare/pypi/NAME.json`.
const SCHEMA: u32 = 1;

/// What `INSTALLER` says (PEP 376).
pub(crate) const INSTALLER: &str = "tare";

/// A file of a distribution as it was installed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstalledFile {
    /// Relative to the prefix, `/` between parts.
    pub path: String,
    /// SHA-256.
    #[serde(with = "hex32")]
    pub sha256: [u8; 32],
    /// Bytes.
    pub size: u64,
}

/// The wheel that a distribution was installed from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WheelFacts {
    /// `NAME-VERSION-PYTHON-ABI-PLATFORM.whl`.
    pub file_name: String,
    /// SHA-256 in hex.
    pub sha256: String,
    /// Bytes.
    pub size: u64,
    /// Made on this machine from a source archive, a repository or a folder.
    pub built: bool,
}

/// `conda-meta/tare/pypi/NAME.json`: what tare knows of a distribution that it installed. It holds no clock time.
///
/// What is in site-packages is the truth: a record without its distribution, or of another version than is there, says nothing any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TareRecord {
    /// Version of the layout.
    pub schema_version: u32,
    /// What it is and where it comes from.
    pub record: PypiRecord,
    /// What was unpacked.
    pub wheel: WheelFacts,
    /// `.dist-info`, relative to the prefix.
    pub dist_info: String,
    /// Every file, sorted; `RECORD` among them.
    pub files: Vec<InstalledFile>,
}

/// The name of a distribution where packages of both halves may be meant, as in conda's `CHANNEL::NAME`.
pub(crate) fn qualified(name: &str) -> String {
    format!("pypi::{name}")
}

fn owner(name: &str) -> PackageName {
    PackageName::new_unchecked(qualified(name))
}

/// Whether a wheel of that name is for this kind of interpreter and platform. The exact C library is the planner's business, which knows the target; here
/// the newest is assumed.
fn suits(file_name: &str, subdir: Subdir, python: &Version) -> bool {
    let Ok(name) = WheelName::parse(file_name) else { return false };
    let mut release = python.release().iter().copied();
    let python = (release.next().unwrap_or(3), release.next().unwrap_or(0));
    [false, true].into_iter().any(|free_threaded| {
        let glibc = subdir.is_linux().then_some((2, 99));
        let macos = subdir.is_osx().then_some((99, 0));
        Tags::new(TagInput { subdir, python, free_threaded, glibc, macos }).rank(&name).is_some()
    })
}

/// Refuses what this environment cannot use, before anything is linked.
pub(crate) fn check_usable(plan: &PypiPlan, subdir: Subdir, wheels: &[CachedWheel]) -> Result<()> {
    let mut seen: HashSet<&str> = HashSet::new();
    for wheel in wheels {
        let name = wheel.ready.record.name.as_ref();
        if !seen.insert(name) {
            return Err(Error::usage(format!("`{name}` is among the Python packages more than once")));
        }
        if !suits(&wheel.about.file_name, subdir, &plan.python) {
            return Err(Error::new(Kind::Verification, format!("`{name} {}` is not for this environment", wheel.ready.record.version))
                .because(format!("the wheel `{}` is not one for Python {} on {subdir}", wheel.about.file_name, plan.python)));
        }
        // What cannot be read excludes nothing, as with pip.
        let needed = wheel.about.requires_python.as_deref().and_then(|text| VersionSpecifiers::from_str(text).ok());
        if let Some(needed) = needed
            && !needed.contains(&plan.python)
        {
            return Err(Error::new(
                Kind::Verification,
                format!("`{name} {}` does not work with Python {}", wheel.ready.record.version, plan.python),
            )
            .because(format!("the wheel `{}` needs Python {needed}", wheel.about.file_name)));
        }
    }
    Ok(())
}

/// A file of a wheel and where it goes.
struct Placed {
    entry: usize,
    path: PathBuf,
    /// The very same file is linked by another package: listed, not linked.
    shared: bool,
}

struct PlacedWheel {
    files: Vec<Placed>,
    points: Vec<(PathBuf, EntryPoint)>,
    /// `.dist-info`, relative to the prefix.
    info: PathBuf,
}

/// Where every file of every wheel goes, known before the first is linked.
#[derive(Default)]
pub(crate) struct WheelLayout {
    wheels: Vec<PlacedWheel>,
    /// Files of conda packages that give way (`--clobber`): number of the package and path.
    pub diverted: Vec<(usize, PathBuf)>,
    /// Files of several packages, of which the one named first wins.
    pub clobbered: Vec<Clobber>,
    /// Bytes of all files.
    pub bytes: u64,
}

/// Whether what a conda package has at a path is the file of a wheel.
fn same_file(entry: Option<&PathsEntry>, sha256: [u8; 32]) -> bool {
    entry.is_some_and(|entry| {
        entry.path_type == PathType::HardLink
            && entry.prefix_placeholder.is_none()
            && entry.sha256.is_some_and(|hash| hash[..] == sha256[..])
    })
}

/// The commands of a wheel. pip names its own after the Python that runs it.
fn commands(wheel: &CachedWheel, python: &PythonInfo) -> Result<Vec<EntryPoint>> {
    let mut points = Vec::new();
    for text in &wheel.about.entry_points {
        let point = EntryPoint::from_str(text).map_err(|error| {
            Error::new(Kind::Verification, format!("the wheel `{}` cannot be installed", wheel.about.file_name)).because(error)
        })?;
        points.push(point);
    }
    if wheel.ready.record.name.as_ref() == "pip"
        && let Some(main) = points.iter().find(|point| point.command == "pip").cloned()
    {
        points.retain(|point| !point.command.strip_prefix("pip").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())));
        let (major, minor) = python.short_version;
        for command in [format!("pip{major}"), format!("pip{major}.{minor}")] {
            points.push(EntryPoint { command, ..main.clone() });
        }
    }
    Ok(points)
}

/// Files of the metadata folder that the installation writes.
fn own_files(record: &PypiRecord) -> Vec<&'static str> {
    let mut files = vec!["INSTALLER", "RECORD"];
    if record.requested {
        files.push("REQUESTED");
    }
    if direct_url(record, "").is_some() {
        files.push("direct_url.json");
    }
    files
}

impl WheelLayout {
    /// Decides where every file goes, and refuses what must not be: paths out of the environment, files of conda packages (unless identical or
    /// `clobber`), files of other distributions' metadata, a file where another package needs a folder. Of wheels that have the same path the last one
    /// by name wins, with a warning, as with pip.
    pub(crate) fn plan(
        wheels: &[CachedWheel],
        python: Option<&PythonInfo>,
        conda: &link::Layout,
        packages: &[Cached],
        clobber: bool,
        progress: &dyn Progress,
    ) -> Result<Self> {
        if wheels.is_empty() {
            return Ok(WheelLayout::default());
        }
        let Some(python) = python else {
            return Err(Error::failure(format!("`{}` needs Python, which is not among the packages", wheels[0].ready.record.name))
                .hint("add `python` to the conda packages"));
        };
        let conda_files: HashMap<&Path, (usize, Option<&PathsEntry>)> =
            conda.files().map(|(number, path, entry)| (path, (number, entry))).collect();
        let mut folders: HashMap<PathBuf, String> = HashMap::new();
        for (path, (number, _)) in &conda_files {
            add_folders(&mut folders, path, packages[*number].record.package_record.name.as_normalized());
        }
        let conda_name = |number: usize| packages[number].record.package_record.name.clone();
        let mut layout = WheelLayout::default();
        let mut refused: Vec<String> = Vec::new();
        let mut overlaps: Vec<String> = Vec::new();
        // Who has a path so far: the wheel and, for files (not commands), the number of the file.
        let mut taken: HashMap<PathBuf, (usize, Option<usize>)> = HashMap::new();
        for (number, wheel) in wheels.iter().enumerate() {
            let name = wheel.ready.record.name.as_ref();
            let info = python.site_packages_path.join(&wheel.about.dist_info);
            let mut placed = PlacedWheel { files: Vec::with_capacity(wheel.about.files.len()), points: Vec::new(), info };
            let mut own: HashSet<PathBuf> = own_files(&wheel.ready.record).into_iter().map(|file| placed.info.join(file)).collect();
            let mut claims: Vec<(PathBuf, Option<usize>)> = Vec::new();
            for (index, entry) in wheel.about.files.iter().enumerate() {
                let path = place(entry, &wheel.about.name, python);
                link::check_path(&qualified(name), &path)?;
                if let Ok(rest) = path.strip_prefix(&python.site_packages_path)
                    && let Some(top) = rest.components().next().and_then(|top| top.as_os_str().to_str())
                    && (top.ends_with(".dist-info") || top.ends_with(".egg-info"))
                    && top != wheel.about.dist_info
                {
                    return Err(bad(wheel, format!("`{}` belongs to another distribution", path.display())));
                }
                if !own.insert(path.clone()) {
                    return Err(bad(wheel, format!("two files of it have the place `{}`", path.display())));
                }
                claims.push((path, Some(index)));
            }
            let points = commands(wheel, python)?;
            for point in &points {
                let path = python.bin_dir.join(&point.command);
                link::check_path(&qualified(name), &path)?;
                // A script of the data scheme of the same name means the same command.
                if own.insert(path.clone()) {
                    claims.push((path, None));
                }
            }
            let mut points: BTreeMap<PathBuf, EntryPoint> =
                points.into_iter().map(|point| (python.bin_dir.join(&point.command), point)).collect();
            points.retain(|path, _| claims.iter().any(|(claimed, index)| claimed == path && index.is_none()));
            for (path, index) in claims {
                let sha256 = index.map(|index| wheel.about.files[index].sha256);
                let mut shared = false;
                if let Some((package, entry)) = conda_files.get(path.as_path()) {
                    let identical = sha256.is_some_and(|sha256| same_file(*entry, sha256));
                    if identical {
                        shared = true;
                    } else {
                        layout.clobbered.push(Clobber {
                            path: path.clone(),
                            winner: owner(name),
                            losers: vec![conda_name(*package)],
                            identical: false,
                        });
                        if clobber {
                            layout.diverted.push((*package, path.clone()));
                        } else {
                            refused.push(format!(
                                "`{}`: `{}` and `{}`",
                                path.display(),
                                conda_name(*package).as_normalized(),
                                qualified(name)
                            ));
                        }
                    }
                } else if let Some((other, file)) = taken.get(&path).copied() {
                    let loser = &wheels[other];
                    let identical = file.zip(sha256).is_some_and(|(file, sha256)| loser.about.files[file].sha256 == sha256);
                    if identical {
                        shared = true;
                    } else {
                        overlaps.push(format!("`{}` of `{}` and `{name}`", path.display(), loser.ready.record.name));
                        let before = &mut layout.wheels[other];
                        before.files.retain(|placed| placed.path != path);
                        before.points.retain(|(point, _)| *point != path);
                        layout.clobbered.push(Clobber {
                            path: path.clone(),
                            winner: owner(name),
                            losers: vec![owner(loser.ready.record.name.as_ref())],
                            identical: false,
                        });
                    }
                }
                if let Some(index) = index {
                    layout.bytes = layout.bytes.saturating_add(wheel.about.files[index].size);
                    placed.files.push(Placed { entry: index, path: path.clone(), shared });
                }
                if !shared {
                    taken.insert(path, (number, index));
                }
            }
            placed.points = points.into_iter().collect();
            layout.wheels.push(placed);
        }
        layout.refuse_mixed(wheels, &conda_files, &mut folders, packages)?;
        if !refused.is_empty() {
            refused.sort();
            let mut error = Error::failure(format!(
                "{} file{} provided by more than one package",
                refused.len(),
                if refused.len() == 1 { " is" } else { "s are" }
            ));
            for line in refused.iter().take(10) {
                error = error.because(line);
            }
            if refused.len() > 10 {
                error = error.because(format!("and {} more", refused.len() - 10));
            }
            return Err(error.hint("leave one of the packages out").hint("to let the Python packages of the pip section win: --clobber"));
        }
        if !overlaps.is_empty() {
            overlaps.sort();
            let more = if overlaps.len() > 5 { format!(", and {} more", overlaps.len() - 5) } else { String::new() };
            overlaps.truncate(5);
            progress.warn(
                &format!("Python packages overwrite files of each other, the one named last wins: {}{more}", overlaps.join(", ")),
                &[],
            );
        }
        Ok(layout)
    }

    /// A file cannot be where another package needs a folder.
    fn refuse_mixed(
        &self,
        wheels: &[CachedWheel],
        conda: &HashMap<&Path, (usize, Option<&PathsEntry>)>,
        folders: &mut HashMap<PathBuf, String>,
        packages: &[Cached],
    ) -> Result<()> {
        for (wheel, placed) in wheels.iter().zip(&self.wheels) {
            for path in placed.paths(wheel) {
                add_folders(folders, &path, &qualified(wheel.ready.record.name.as_ref()));
            }
        }
        let fail = |path: &Path, file: &str, other: &str| {
            Err(Error::failure(format!("`{}` is a file or link of `{file}`", path.display()))
                .because(format!("`{other}` puts files below it"))
                .hint("these packages cannot be installed together"))
        };
        for (wheel, placed) in wheels.iter().zip(&self.wheels) {
            for path in placed.paths(wheel) {
                if let Some(other) = folders.get(&path) {
                    return fail(&path, &qualified(wheel.ready.record.name.as_ref()), other);
                }
                let above = path.ancestors().skip(1).find_map(|folder| Some((folder, conda.get(folder)?.0)));
                if let Some((folder, package)) = above {
                    let file = packages[package].record.package_record.name.as_normalized();
                    return fail(folder, file, &qualified(wheel.ready.record.name.as_ref()));
                }
            }
        }
        Ok(())
    }

    /// Every file that will be made, with its hash where that is known before: number of the wheel, path, SHA-256. `RECORD` and its like are among them.
    pub(crate) fn files<'a>(&'a self, wheels: &'a [CachedWheel]) -> impl Iterator<Item = (usize, PathBuf, Option<[u8; 32]>)> + 'a {
        self.wheels.iter().zip(wheels).enumerate().flat_map(|(number, (placed, wheel))| {
            let files = placed.files.iter().filter(|placed| !placed.shared).map(move |placed| {
                let entry = &wheel.about.files[placed.entry];
                (number, placed.path.clone(), (!entry.shebang).then_some(entry.sha256))
            });
            let points = placed.points.iter().map(move |(path, _)| (number, path.clone(), None));
            let own = own_files(&wheel.ready.record).into_iter().map(move |file| (number, placed.info.join(file), None));
            files.chain(points).chain(own)
        })
    }

    /// What is left out because the very same file is there already in a package that stays.
    pub(crate) fn share(&mut self, number: usize, path: &Path) {
        if let Some(placed) = self.wheels.get_mut(number).and_then(|wheel| wheel.files.iter_mut().find(|placed| placed.path == path)) {
            placed.shared = true;
        }
    }
}

impl PlacedWheel {
    fn paths<'a>(&'a self, wheel: &'a CachedWheel) -> impl Iterator<Item = PathBuf> + 'a {
        let own = own_files(&wheel.ready.record).into_iter().map(|file| self.info.join(file));
        self.files.iter().map(|placed| placed.path.clone()).chain(self.points.iter().map(|(path, _)| path.clone())).chain(own)
    }
}

fn bad(wheel: &CachedWheel, why: String) -> Error {
    Error::new(Kind::Verification, format!("the wheel `{}` cannot be installed", wheel.about.file_name)).because(why)
}

fn add_folders(folders: &mut HashMap<PathBuf, String>, path: &Path, package: &str) {
    for folder in path.ancestors().skip(1) {
        if folder.as_os_str().is_empty() || folders.contains_key(folder) {
            break;
        }
        folders.insert(folder.to_owned(), package.to_owned());
    }
}

/// Where a file of a wheel goes, relative to the prefix.
fn place(entry: &Entry, name: &str, python: &PythonInfo) -> PathBuf {
    match entry.scheme {
        Scheme::Site => python.site_packages_path.join(&entry.path),
        Scheme::Scripts => python.bin_dir.join(&entry.path),
        Scheme::Headers => {
            // `lib/python3.13t/site-packages` goes with `include/python3.13t`.
            let version = python.site_packages_path.parent().and_then(Path::file_name).filter(|name| *name != "Lib");
            let mut folder = PathBuf::from(if version.is_some() { "include" } else { "Include" });
            folder.extend(version);
            folder.join(name).join(&entry.path)
        }
        Scheme::Data => PathBuf::from(&entry.path),
    }
}

/// What linking needs besides the layout.
pub(crate) struct WheelLinking<'a> {
    pub stage: &'a Path,
    /// Where the environment will be: written into scripts.
    pub prefix: &'a Path,
    pub python: &'a PythonInfo,
    /// For each wheel: how its files are brought over.
    pub modes: &'a [LinkMode],
    pub progress: &'a dyn Progress,
    pub task: TaskId,
    /// Where the task is when this begins.
    pub done: u64,
    pub cancel: &'a Cancel,
}

/// A wheel in the stage.
#[derive(Debug, Clone, Default)]
pub(crate) struct StagedWheel {
    /// What was installed; byte code is added when it is made.
    pub files: Vec<InstalledFile>,
    /// Python sources in site-packages, sorted.
    pub sources: Vec<String>,
    info: PathBuf,
    site: PathBuf,
}

impl StagedWheel {
    /// Adds byte code.
    pub(crate) fn add(&mut self, entries: &[prefix_record::PathsEntry]) {
        self.files.extend(entries.iter().filter_map(|entry| {
            let sha256: [u8; 32] = entry.sha256_in_prefix.or(entry.sha256)?[..].try_into().ok()?;
            Some(InstalledFile { path: slashes(&entry.relative_path), sha256, size: entry.size_in_bytes? })
        }));
    }
}

fn slashes(path: &Path) -> String {
    path.components().map(|part| part.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

impl WheelLinking<'_> {
    /// Links all wheels. Returns for each, in order, what it installed.
    pub(crate) fn run(&self, wheels: &[CachedWheel], layout: &WheelLayout) -> Result<Vec<StagedWheel>> {
        let mut folders: HashMap<PathBuf, String> = HashMap::new();
        for (wheel, placed) in wheels.iter().zip(&layout.wheels) {
            for path in placed.paths(wheel) {
                add_folders(&mut folders, &path, "");
            }
        }
        let mut folders: Vec<PathBuf> = folders.into_keys().collect();
        folders.sort();
        for folder in &folders {
            let path = self.stage.join(folder);
            fs_err::create_dir_all(&path).map_err(|error| Error::io("create the folder", &path, &error))?;
            set_mode(&path, 0o755)?;
        }
        let jobs: Vec<(usize, &Placed)> =
            layout.wheels.iter().enumerate().flat_map(|(number, wheel)| wheel.files.iter().map(move |placed| (number, placed))).collect();
        let linked: Vec<InstalledFile> = jobs
            .par_iter()
            .with_min_len(32)
            .map(|(number, placed)| {
                if self.cancel.is_cancelled() {
                    self.cancel.check()?;
                }
                self.link_one(&wheels[*number], self.modes[*number], placed)
            })
            .collect::<Result<_>>()?;
        let mut staged: Vec<StagedWheel> = layout
            .wheels
            .iter()
            .map(|placed| StagedWheel { info: placed.info.clone(), site: self.python.site_packages_path.clone(), ..StagedWheel::default() })
            .collect();
        for ((number, placed), file) in jobs.iter().zip(linked) {
            let entry = &wheels[*number].about.files[placed.entry];
            if entry.scheme == Scheme::Site && entry.path.ends_with(".py") && !placed.shared {
                staged[*number].sources.push(file.path.clone());
            }
            staged[*number].files.push(file);
        }
        for (number, placed) in layout.wheels.iter().enumerate() {
            for (path, point) in &placed.points {
                let text = python_entry_point_template(&self.prefix.to_string_lossy(), false, point, self.python);
                let to = self.stage.join(path);
                fs_err::write(&to, &text).map_err(|error| Error::io("write", &to, &error))?;
                set_mode(&to, 0o755)?;
                staged[number].files.push(described(path, text.as_bytes()));
            }
            staged[number].sources.sort();
            self.progress.advance_to(self.task, self.done + number as u64 + 1);
        }
        Ok(staged)
    }

    fn link_one(&self, wheel: &CachedWheel, mode: LinkMode, placed: &Placed) -> Result<InstalledFile> {
        let entry = &wheel.about.files[placed.entry];
        let installed = InstalledFile { path: slashes(&placed.path), sha256: entry.sha256, size: entry.size };
        if placed.shared {
            return Ok(installed);
        }
        let from = wheel.folder.join(entry.cached());
        let to = self.stage.join(&placed.path);
        let failed = |error: std::io::Error| {
            Error::failure(format!("cannot link `{}`", wheel.ready.record.name)).because(Error::io("write", &to, &error))
        };
        if entry.shebang {
            let bytes = fs_err::read(&from).map_err(failed)?;
            let rest = bytes.iter().position(|byte| *byte == b'\n').map_or(&[][..], |end| &bytes[end + 1..]);
            let mut text = self.python.shebang(&self.prefix.to_string_lossy()).into_bytes();
            text.push(b'\n');
            text.extend(rest);
            fs_err::write(&to, &text).map_err(failed)?;
            set_mode(&to, 0o755)?;
            return Ok(described(&placed.path, &text));
        }
        let permissions = if entry.executable { 0o755 } else { 0o644 };
        let made = match mode {
            LinkMode::Hardlink => std::fs::hard_link(&from, &to).map(|()| true),
            LinkMode::Reflink => link::reflink(&from, &to).map(|()| false),
            #[cfg(unix)]
            LinkMode::Symlink if entry.scheme != Scheme::Scripts => std::os::unix::fs::symlink(&from, &to).map(|()| true),
            _ => Err(std::io::Error::from(std::io::ErrorKind::Unsupported)),
        };
        match made {
            Ok(true) => return Ok(installed),
            Ok(false) => {}
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Err(failed(error)),
            // A file has no room for another link, for example.
            Err(_) => {
                let _ = std::fs::remove_file(&to);
                std::fs::copy(&from, &to).map_err(failed)?;
            }
        }
        set_mode(&to, permissions)?;
        Ok(installed)
    }
}

fn described(path: &Path, bytes: &[u8]) -> InstalledFile {
    InstalledFile { path: slashes(path), sha256: Sha256::digest(bytes).into(), size: bytes.len() as u64 }
}

/// Writes a file of the stage anew: what is there may be the very file of the old environment.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, &error)),
        _ => write_file(path, bytes),
    }
}

/// `direct_url.json` (PEP 610) of what was not found on an index; `None` for the rest. `sha256`: of the wheel, where the record has none.
fn direct_url(record: &PypiRecord, sha256: &str) -> Option<Value> {
    let mut value = match &record.source {
        PypiSource::Archive { direct: false, .. } => return None,
        PypiSource::Archive { url, sha256: known, .. } => {
            let hash = known.as_deref().unwrap_or(sha256).to_ascii_lowercase();
            json!({ "url": bare(url), "archive_info": { "hash": format!("sha256={hash}"), "hashes": { "sha256": hash } } })
        }
        PypiSource::Vcs { system, url, requested_revision, commit, .. } => {
            let mut info = json!({ "vcs": system, "commit_id": commit });
            if let Some(revision) = requested_revision {
                info["requested_revision"] = json!(revision);
            }
            json!({ "url": bare(url), "vcs_info": info })
        }
        PypiSource::Directory { path, editable } => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            let url = Url::from_file_path(&path).map_or_else(|()| format!("file://{}", path.display()), |url| url.to_string());
            json!({ "url": url, "dir_info": if *editable { json!({ "editable": true }) } else { json!({}) } })
        }
    };
    if let PypiSource::Archive { subdirectory: Some(folder), .. } | PypiSource::Vcs { subdirectory: Some(folder), .. } = &record.source {
        value["subdirectory"] = json!(folder);
    }
    Some(value)
}

/// A URL without credentials and fragment.
fn bare(url: &Url) -> String {
    let mut url = strip_url_for_serialization(url);
    url.set_fragment(None);
    url.to_string()
}

/// A record fit for a file: no credentials in its URLs.
fn without_secrets(record: &PypiRecord) -> PypiRecord {
    let mut record = record.clone();
    match &mut record.source {
        PypiSource::Archive { url, index, .. } => {
            *url = strip_url_for_serialization(url);
            if let Some(index) = index {
                *index = strip_url_for_serialization(index);
            }
        }
        PypiSource::Vcs { url, .. } => *url = strip_url_for_serialization(url),
        PypiSource::Directory { .. } => {}
    }
    record
}

/// Where tare's records of distributions lie in a prefix.
pub(crate) fn records_folder(prefix: &Path) -> PathBuf {
    prefix.join(TARE_FOLDER).join("pypi")
}

/// Writes what belongs into each metadata folder (`INSTALLER`, `REQUESTED`, `direct_url.json`, `RECORD`) and tare's own records. Returns those.
pub(crate) fn finish(stage: &Path, wheels: &[CachedWheel], staged: Vec<StagedWheel>) -> Result<Vec<TareRecord>> {
    if wheels.is_empty() {
        return Ok(Vec::new());
    }
    let folder = records_folder(stage);
    fs_err::create_dir_all(&folder).map_err(|error| Error::io("create the folder", &folder, &error))?;
    set_mode(&stage.join(TARE_FOLDER), 0o755)?;
    set_mode(&folder, 0o755)?;
    let jobs: Vec<(&CachedWheel, StagedWheel)> = wheels.iter().zip(staged).collect();
    jobs.into_par_iter().map(|(wheel, staged)| finish_one(stage, wheel, staged)).collect()
}

fn finish_one(stage: &Path, wheel: &CachedWheel, mut staged: StagedWheel) -> Result<TareRecord> {
    let record = &wheel.ready.record;
    let info = stage.join(&staged.info);
    let mut write = |name: &str, bytes: &[u8]| -> Result<()> {
        replace(&info.join(name), bytes)?;
        staged.files.push(described(&staged.info.join(name), bytes));
        Ok(())
    };
    write("INSTALLER", format!("{INSTALLER}\n").as_bytes())?;
    if record.requested {
        write("REQUESTED", b"")?;
    }
    if let Some(direct) = direct_url(record, &wheel.about.sha256) {
        write("direct_url.json", direct.to_string().as_bytes())?;
    }
    staged.files.sort_by(|a, b| a.path.cmp(&b.path));
    let mut rows: Vec<String> = staged
        .files
        .iter()
        .map(|file| record_file::row(&record_file::named_from(&staged.site, Path::new(&file.path)), Some((&file.sha256, file.size))))
        .collect();
    let own = staged.info.join("RECORD");
    rows.push(record_file::row(&record_file::named_from(&staged.site, &own), None));
    rows.sort();
    let text = rows.concat();
    replace(&stage.join(&own), text.as_bytes())?;
    staged.files.push(described(&own, text.as_bytes()));
    staged.files.sort_by(|a, b| a.path.cmp(&b.path));
    let built = matches!(wheel.ready.wheel, WheelFile::Local { .. });
    let mut record = without_secrets(record);
    if record.requires_python.is_none() {
        record.requires_python.clone_from(&wheel.about.requires_python);
    }
    let facts = WheelFacts { file_name: wheel.about.file_name.clone(), sha256: wheel.about.sha256.clone(), size: wheel.about.size, built };
    // Not every index and lock tells size and hash; what is noted does not depend on that.
    let record = ready_again(&record, &facts).record;
    let made = TareRecord { schema_version: SCHEMA, record, wheel: facts, dist_info: slashes(&staged.info), files: staged.files };
    write_record(stage, &made)?;
    Ok(made)
}

/// Writes tare's record of a distribution, whose folder is there.
pub(crate) fn write_record(stage: &Path, record: &TareRecord) -> Result<()> {
    let mut text =
        serde_json::to_vec(record).map_err(|error| Error::failure("cannot write the record of a Python package").because(error))?;
    text.push(b'\n');
    replace(&records_folder(stage).join(format!("{}.json", record.record.name)), &text)
}

impl TareRecord {
    /// The wheel once more, to install it again: from the cache if it is there, else from where it came.
    pub fn ready(&self) -> ReadyWheel {
        ready_again(&self.record, &self.wheel)
    }

    /// Whether the wheel can be installed for another interpreter too: one of the full version `version` on `subdir`.
    pub(crate) fn fits(&self, subdir: Subdir, version: &Version) -> bool {
        let needed = self.record.requires_python.as_deref().and_then(|text| VersionSpecifiers::from_str(text).ok());
        needed.is_none_or(|needed| needed.contains(version)) && suits(&self.wheel.file_name, subdir, version)
    }

    /// Digest of what is installed: name, version and hash of the wheel.
    pub(crate) fn line(&self) -> String {
        format!("{} {} {} {}\n", self.record.name, self.record.version, self.wheel.sha256, self.record.requested)
    }
}

/// What was installed from `wheel`, to be installed once more.
pub(crate) fn ready_again(record: &PypiRecord, wheel: &WheelFacts) -> ReadyWheel {
    let file = if wheel.built {
        WheelFile::Local { path: PathBuf::from(&wheel.file_name), sha256: wheel.sha256.clone() }
    } else {
        WheelFile::Remote
    };
    let mut record = record.clone();
    if let (PypiSource::Archive { sha256, size, .. }, WheelFile::Remote) = (&mut record.source, &file) {
        // What came is what is wanted again.
        *sha256 = Some(wheel.sha256.clone());
        *size = Some(wheel.size);
    }
    ReadyWheel { record, wheel: file }
}

/// Digest of a set of distributions, lower-case hex; `None` for the empty set. tare's own tooling does not count.
pub(crate) fn digest_of<'a>(records: impl IntoIterator<Item = &'a TareRecord>) -> Option<String> {
    let mut lines: Vec<String> = records.into_iter().filter(|record| !record.record.is_tooling()).map(TareRecord::line).collect();
    lines.sort();
    (!lines.is_empty()).then(|| hex_text(&Sha256::digest(lines.concat())))
}

/// The version of the interpreter among conda packages; `None` if there is none or it is odd.
pub(crate) fn python_version<'a>(packages: impl IntoIterator<Item = &'a rattler_conda_types::PackageRecord>) -> Option<Version> {
    let python = packages.into_iter().find(|package| package.name.as_normalized() == "python")?;
    Version::from_str(&python.version.to_string()).ok()
}
