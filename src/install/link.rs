//! From unpacked packages in the cache to a tree in the stage.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Component, Path, PathBuf};

use rattler::install::{ExternalSymlinkPolicy, InstallOptions, PythonInfo, link_package_sync};
use rattler_conda_types::package::{NoArchLinks, PathType, PathsEntry, PathsJson};
use rattler_conda_types::prefix::Prefix;
use rattler_conda_types::{PackageName, PackageRecord, Subdir, prefix_record};
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, IntoParallelRefIterator, ParallelIterator};

use super::cancel::Cancel;
use super::fetch::Cached;
use super::metadata::set_mode;
use super::{Clobber, ExternalLinks, LinkMode};
use crate::error::{Error, Kind, Result};
use crate::report::{Progress, TaskId};

/// Why a path of a package must not be used; `Ok` for a relative path that stays inside.
pub(crate) fn safe_path(path: &Path) -> std::result::Result<(), &'static str> {
    let mut normal = 0;
    for component in path.components() {
        match component {
            Component::Normal(_) => normal += 1,
            // `./conda-meta` is `conda-meta`, but does not compare equal to it.
            Component::CurDir => return Err("starts with `.`"),
            Component::ParentDir => return Err("leads out of the environment"),
            Component::RootDir | Component::Prefix(_) => return Err("is an absolute path"),
        }
    }
    if normal == 0 {
        return Err("is no path");
    }
    Ok(())
}

/// A file of a package and where it goes.
struct Placed {
    entry: PathsEntry,
    path: PathBuf,
}

/// Everything that is known before the first file is linked.
pub(crate) struct Layout {
    /// For each package in order: the files to link.
    packages: Vec<Vec<Placed>>,
    /// For each package in order: its entry points.
    points: Vec<Vec<PathBuf>>,
    python: Option<PythonInfo>,
    /// Files of several packages; empty unless allowed or identical.
    pub clobbered: Vec<Clobber>,
    /// Bytes of files that are written anew whatever the link mode (they hold the prefix).
    pub patched_bytes: u64,
    /// Bytes of the other files.
    pub linked_bytes: u64,
    /// Number of files and links.
    pub files: u64,
    /// Symbolic links that point out of the environment: package, path, target.
    pub external: Vec<(PackageName, PathBuf, PathBuf)>,
}

/// Python of the set of packages, needed to place noarch packages.
pub(crate) fn python_of<'a>(packages: impl IntoIterator<Item = &'a PackageRecord>, subdir: Subdir) -> Result<Option<PythonInfo>> {
    packages
        .into_iter()
        .find(|package| package.name.as_normalized() == "python")
        .map(|package| {
            PythonInfo::from_python_record(package, subdir)
                .map_err(|error| Error::new(Kind::Verification, "the version of the `python` package cannot be understood").because(error))
        })
        .transpose()
}

fn final_path(package: &Cached, entry: &Path, python: Option<&PythonInfo>) -> PathBuf {
    match python {
        Some(python) if package.index.noarch.is_python() => python.get_python_noarch_target_path(entry).into_owned(),
        _ => entry.to_owned(),
    }
}

fn entry_points<'a>(package: &'a Cached, python: Option<&'a PythonInfo>) -> impl Iterator<Item = PathBuf> + 'a {
    let links = match (&package.link, package.index.noarch.is_python()) {
        (Some(link), true) => match &link.noarch {
            NoArchLinks::Python(points) => points.entry_points.as_slice(),
            NoArchLinks::Generic => &[],
        },
        _ => &[],
    };
    links.iter().filter_map(move |point| Some(python?.bin_dir.join(&point.command)))
}

impl Layout {
    /// Decides where every file goes, and refuses what must not be linked: paths out of the environment, files of several packages (unless
    /// `clobber` or identical), a file where another package needs a folder. `python`: that of the finished environment.
    pub(crate) fn plan(packages: &[Cached], python: Option<PythonInfo>, clobber: bool) -> Result<Self> {
        if python.is_none()
            && let Some(package) = packages.iter().find(|package| package.index.noarch.is_python())
        {
            return Err(Error::failure(format!(
                "`{}` needs Python, which is not among the packages",
                package.record.package_record.name.as_normalized()
            ))
            .hint("add `python` to the packages"));
        }
        let mut owners: HashMap<PathBuf, Vec<usize>> = HashMap::new();
        let mut folders: HashSet<PathBuf> = HashSet::new();
        let mut layout = Layout {
            packages: Vec::with_capacity(packages.len()),
            points: Vec::with_capacity(packages.len()),
            python: None,
            clobbered: Vec::new(),
            patched_bytes: 0,
            linked_bytes: 0,
            files: 0,
            external: Vec::new(),
        };
        for (number, package) in packages.iter().enumerate() {
            let name = package.record.package_record.name.as_normalized();
            let mut placed = Vec::with_capacity(package.paths.paths.len());
            let mut own: HashSet<PathBuf> = HashSet::new();
            for entry in &package.paths.paths {
                let path = final_path(package, &entry.relative_path, python.as_ref());
                check_path(name, &path)?;
                if entry.path_type != PathType::Directory {
                    if !own.insert(path.clone()) {
                        return Err(Error::new(Kind::Verification, format!("`{name}` lists `{}` twice", path.display())));
                    }
                    owners.entry(path.clone()).or_default().push(number);
                    layout.files += 1;
                } else {
                    folders.insert(path.clone());
                }
                match entry.path_type {
                    PathType::HardLink if entry.prefix_placeholder.is_some() => layout.patched_bytes += entry.size_in_bytes.unwrap_or(0),
                    PathType::HardLink => layout.linked_bytes += entry.size_in_bytes.unwrap_or(0),
                    PathType::SoftLink => layout.note_external(package, entry, &path),
                    PathType::Directory => {}
                }
                add_folders(&mut folders, &path);
                placed.push(Placed { entry: entry.clone(), path });
            }
            let mut points = Vec::new();
            for path in entry_points(package, python.as_ref()) {
                points.push(path.clone());
                check_path(name, &path)?;
                add_folders(&mut folders, &path);
                // A package that ships the script as a file as well as an entry point means the entry point.
                if own.insert(path.clone()) {
                    owners.entry(path).or_default().push(number);
                } else {
                    placed.retain(|placed| placed.path != path);
                }
                layout.files += 1;
            }
            layout.packages.push(placed);
            layout.points.push(points);
        }
        layout.python = python;
        layout.find_clobbers(packages, &owners, &folders, clobber)?;
        Ok(layout)
    }

    /// Every file and link that will be made: number of the package, path, and what the package says about it (nothing for entry points).
    pub(crate) fn files(&self) -> impl Iterator<Item = (usize, &Path, Option<&PathsEntry>)> {
        let placed = self.packages.iter().enumerate().flat_map(|(number, placed)| {
            placed
                .iter()
                .filter(|placed| placed.entry.path_type != PathType::Directory)
                .map(move |placed| (number, placed.path.as_path(), Some(&placed.entry)))
        });
        let points =
            self.points.iter().enumerate().flat_map(|(number, points)| points.iter().map(move |path| (number, path.as_path(), None)));
        placed.chain(points)
    }

    fn note_external(&mut self, package: &Cached, entry: &PathsEntry, path: &Path) {
        let Ok(target) = std::fs::read_link(package.folder.join(&entry.relative_path)) else { return };
        let mut depth = path.components().count() as i64 - 1;
        let mut inside = !target.is_absolute();
        for component in target.components() {
            match component {
                Component::ParentDir => depth -= 1,
                Component::Normal(_) => depth += 1,
                _ => {}
            }
            inside &= depth >= 0;
        }
        if !inside {
            self.external.push((package.record.package_record.name.clone(), path.to_owned(), target));
        }
    }

    fn find_clobbers(
        &mut self,
        packages: &[Cached],
        owners: &HashMap<PathBuf, Vec<usize>>,
        folders: &HashSet<PathBuf>,
        clobber: bool,
    ) -> Result<()> {
        let name = |number: &usize| packages[*number].record.package_record.name.clone();
        let mut mixed: Vec<(&PathBuf, &Vec<usize>)> = owners.iter().filter(|(path, _)| folders.contains(*path)).collect();
        mixed.sort();
        if let Some((path, owners)) = mixed.first() {
            let other = packages
                .iter()
                .zip(&self.packages)
                .find(|(_, placed)| placed.iter().any(|placed| placed.path != **path && placed.path.starts_with(path)))
                .map_or_else(String::new, |(package, _)| {
                    format!("`{}` puts files below it", package.record.package_record.name.as_normalized())
                });
            return Err(Error::new(
                Kind::Failure,
                format!("`{}` is a file or link of `{}`", path.display(), name(&owners[0]).as_normalized()),
            )
            .because(other)
            .hint("these packages cannot be installed together"));
        }
        let mut shared: Vec<(&PathBuf, &Vec<usize>)> = owners.iter().filter(|(_, owners)| owners.len() > 1).collect();
        shared.sort();
        let mut refused = Vec::new();
        for (path, owners) in shared {
            // As with conda, what is linked last wins; the order is topological, so that is the package that depends on the others.
            let (winner, losers) = owners.split_last().expect("more than one owner");
            let hash = |number: &usize| {
                self.packages[*number]
                    .iter()
                    .find(|placed| placed.path == *path)
                    .filter(|placed| placed.entry.prefix_placeholder.is_none() && placed.entry.path_type == PathType::HardLink)
                    .and_then(|placed| placed.entry.sha256)
            };
            let identical = hash(winner).is_some_and(|first| losers.iter().all(|loser| hash(loser) == Some(first)));
            let found = Clobber { path: path.clone(), winner: name(winner), losers: losers.iter().map(name).collect(), identical };
            if !identical && !clobber {
                refused.push(found.clone());
            }
            self.clobbered.push(found);
        }
        if refused.is_empty() {
            return Ok(());
        }
        let mut error = Error::new(
            Kind::Failure,
            format!("{} file{} provided by more than one package", refused.len(), if refused.len() == 1 { " is" } else { "s are" }),
        );
        for found in refused.iter().take(10) {
            let names: Vec<String> = found.losers.iter().chain([&found.winner]).map(|name| format!("`{}`", name.as_normalized())).collect();
            error = error.because(format!("`{}`: {}", found.path.display(), names.join(" and ")));
        }
        if refused.len() > 10 {
            error = error.because(format!("and {} more", refused.len() - 10));
        }
        Err(error.hint("leave one of the packages out").hint("to let the last one win: --clobber"))
    }

    /// Refuses or tells of symbolic links that point out of the environment.
    pub(crate) fn check_external(&self, policy: ExternalLinks, progress: &dyn Progress) -> Result<()> {
        if self.external.is_empty() || policy == ExternalLinks::Allow {
            return Ok(());
        }
        let list: Vec<String> = self
            .external
            .iter()
            .take(10)
            .map(|(name, path, target)| format!("`{}`: `{}` points to `{}`", name.as_normalized(), path.display(), target.display()))
            .collect();
        if policy == ExternalLinks::Deny {
            let mut error = Error::new(Kind::Verification, "a package has symbolic links that point out of the environment");
            for line in list {
                error = error.because(line);
            }
            return Err(error);
        }
        progress.warn(&format!("{} symbolic links point out of the environment: {}", self.external.len(), list.join("; ")), &[]);
        Ok(())
    }
}

/// Refuses a path that no package may install.
pub(crate) fn check_path(name: &str, path: &Path) -> Result<()> {
    let refuse = |reason: &str| {
        Err(Error::new(Kind::Verification, format!("`{name}` has a file that must not be installed"))
            .because(format!("`{}` {reason}", path.display())))
    };
    if let Err(reason) = safe_path(path) {
        return refuse(reason);
    }
    // conda-meta holds what tools know about the environment; a package that writes there could pose as another one.
    if path.starts_with("conda-meta") {
        return refuse("lies in `conda-meta`");
    }
    if path.starts_with("__clobbers__") {
        return refuse("lies in `__clobbers__`");
    }
    Ok(())
}

fn add_folders(folders: &mut HashSet<PathBuf>, path: &Path) {
    for folder in path.ancestors().skip(1) {
        if folder.as_os_str().is_empty() || !folders.insert(folder.to_owned()) {
            break;
        }
    }
}

/// Finds the best way to bring files from `cache` (a folder with at least one file in `probe`) to `stage`, by trying it.
pub(crate) fn choose_mode(wanted: LinkMode, probe: &Path, stage: &Path) -> Result<LinkMode> {
    let target = stage.join(".tare-link-probe");
    let attempt = |mode: LinkMode| -> std::io::Result<()> {
        let _ = std::fs::remove_file(&target);
        let result = match mode {
            LinkMode::Reflink => reflink(probe, &target),
            LinkMode::Hardlink => std::fs::hard_link(probe, &target),
            _ => Ok(()),
        };
        let _ = std::fs::remove_file(&target);
        result
    };
    match wanted {
        LinkMode::Auto => {
            Ok([LinkMode::Reflink, LinkMode::Hardlink].into_iter().find(|mode| attempt(*mode).is_ok()).unwrap_or(LinkMode::Copy))
        }
        LinkMode::Copy | LinkMode::Symlink => Ok(wanted),
        LinkMode::Reflink | LinkMode::Hardlink => match attempt(wanted) {
            Ok(()) => Ok(wanted),
            Err(error) => Err(Error::failure(format!("cannot {} from the package cache to the environment", wanted.verb()))
                .because(error)
                .because(format!("from `{}` to `{}`", probe.parent().unwrap_or(probe).display(), stage.parent().unwrap_or(stage).display()))
                .hint("leave the choice to tare: --link-mode auto")),
        },
    }
}

pub(crate) fn reflink(from: &Path, to: &Path) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        let source = std::fs::File::open(from)?;
        let target = std::fs::File::create_new(to)?;
        rustix::fs::ioctl_ficlone(&target, &source).map_err(std::io::Error::from)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (from, to);
        Err(std::io::Error::from(std::io::ErrorKind::Unsupported))
    }
}

/// What linking needs besides the layout.
pub(crate) struct Linking<'a> {
    pub stage: &'a Prefix,
    /// Where the environment will be: written into files.
    pub prefix: &'a Path,
    pub subdir: Subdir,
    /// For each package: how its files are brought over.
    pub modes: &'a [LinkMode],
    pub progress: &'a dyn Progress,
    pub task: TaskId,
    pub cancel: &'a Cancel,
}

impl Linking<'_> {
    /// Links all packages. Returns for each package, in order, what it installed.
    pub(crate) fn run(&self, packages: &[Cached], layout: &Layout) -> Result<Vec<Vec<prefix_record::PathsEntry>>> {
        let registry = Default::default();
        let done = std::sync::atomic::AtomicU64::new(0);
        let link = |number: usize| {
            self.cancel.check()?;
            let package = &packages[number];
            let name = package.record.package_record.name.as_normalized();
            let mode = self.modes[number];
            let placed = &layout.packages[number];
            let soft = |entry: &Placed| mode == LinkMode::Symlink && may_be_symlink(entry);
            let options = InstallOptions {
                target_prefix: Some(self.prefix.to_owned()),
                paths_json: Some(PathsJson {
                    paths: placed
                        .iter()
                        .filter(|placed| placed.entry.path_type != PathType::Directory && !soft(placed))
                        .map(|placed| placed.entry.clone())
                        .collect(),
                    ..package.paths.clone()
                }),
                index_json: Some(package.index.clone()),
                link_json: Some(package.link.clone()),
                allow_symbolic_links: Some(true),
                allow_hard_links: Some(mode == LinkMode::Hardlink),
                allow_ref_links: Some(mode == LinkMode::Reflink),
                platform: Some(self.subdir),
                python_info: layout.python.clone(),
                external_symlink_policy: ExternalSymlinkPolicy::Allow,
                ..InstallOptions::default()
            };
            let (mut paths, _) =
                link_package_sync(&package.folder, self.stage, std::sync::Arc::clone(&registry), options).map_err(|error| {
                    let mut made = Error::failure(format!("cannot link `{name}`")).because_of(&error);
                    if made.causes().iter().any(|cause| cause.contains("os error 28") || cause.contains("os error 122")) {
                        made = made.hint("free some disk space there, or choose another place for the environment (`-p`)");
                    }
                    if made.causes().iter().any(|cause| cause.contains("longer than the placeholder")) {
                        made = made.hint("the package was built for shorter paths: choose a shorter one for the environment (`-p`)");
                    }
                    made
                })?;
            for placed in placed.iter().filter(|placed| placed.entry.path_type == PathType::Directory) {
                let path = self.stage.path().join(&placed.path);
                fs_err::create_dir_all(&path).map_err(|error| Error::io("create the folder", &path, &error))?;
                paths.push(installed(placed, prefix_record::PathType::Directory));
            }
            for placed in placed.iter().filter(|placed| soft(placed)) {
                paths.push(self.symlink(package, placed)?);
            }
            let done = done.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
            self.progress.advance_to(self.task, done);
            Ok(paths)
        };
        if layout.clobbered.is_empty() {
            return (0..packages.len()).into_par_iter().map(link).collect();
        }
        // The registry gives a path to whoever comes first and puts the files of the others under `__clobbers__/PACKAGE`: so the last one goes first.
        let mut linked: Vec<Vec<_>> = (0..packages.len()).rev().map(link).collect::<Result<_>>()?;
        linked.reverse();
        Ok(linked)
    }

    fn symlink(&self, package: &Cached, placed: &Placed) -> Result<prefix_record::PathsEntry> {
        let path = self.stage.path().join(&placed.path);
        if let Some(parent) = path.parent() {
            fs_err::create_dir_all(parent).map_err(|error| Error::io("create the folder", parent, &error))?;
        }
        let source = package.folder.join(&placed.entry.relative_path);
        #[cfg(unix)]
        let made = std::os::unix::fs::symlink(&source, &path);
        #[cfg(not(unix))]
        let made = Err::<(), _>(std::io::Error::from(std::io::ErrorKind::Unsupported));
        made.map_err(|error| Error::io("create the symbolic link", &path, &error))?;
        Ok(installed(placed, prefix_record::PathType::SoftLink))
    }

    /// Gives folders and entry points their modes whatever the umask.
    pub(crate) fn make_modes_uniform(&self, installed: &[Vec<prefix_record::PathsEntry>]) -> Result<()> {
        let mut folders = HashSet::new();
        for entry in installed.iter().flatten() {
            add_folders(&mut folders, &entry.relative_path);
            match entry.path_type {
                prefix_record::PathType::Directory => {
                    folders.insert(entry.relative_path.clone());
                }
                prefix_record::PathType::UnixPythonEntryPoint => set_mode(&self.stage.path().join(&entry.relative_path), 0o755)?,
                _ => {}
            }
        }
        set_mode(self.stage.path(), 0o755)?;
        set_mode(&self.stage.path().join("conda-meta"), 0o755)?;
        let folders: Vec<PathBuf> = folders.into_iter().collect();
        folders.par_iter().with_min_len(64).try_for_each(|folder| set_mode(&self.stage.path().join(folder), 0o755))
    }
}

/// Executables find their home through their own path, so those are never links into the cache.
fn may_be_symlink(placed: &Placed) -> bool {
    placed.entry.path_type == PathType::HardLink
        && placed.entry.prefix_placeholder.is_none()
        && !placed.entry.no_link
        && !placed.path.starts_with("bin")
        && !placed.path.starts_with("Scripts")
        && placed.path.parent().is_some_and(|parent| !parent.as_os_str().is_empty())
}

fn installed(placed: &Placed, path_type: prefix_record::PathType) -> prefix_record::PathsEntry {
    prefix_record::PathsEntry {
        relative_path: placed.path.clone(),
        original_path: None,
        path_type,
        no_link: placed.entry.no_link,
        sha256: placed.entry.sha256,
        sha256_in_prefix: None,
        size_in_bytes: placed.entry.size_in_bytes,
        file_mode: None,
        prefix_placeholder: None,
    }
}

/// The pre- and post-link scripts of packages: package and path of the script, by package order.
pub(crate) fn link_scripts(packages: &[Cached], subdir: Subdir) -> BTreeMap<usize, Vec<PathBuf>> {
    let mut found: BTreeMap<usize, Vec<PathBuf>> = BTreeMap::new();
    for (number, package) in packages.iter().enumerate() {
        let scripts: Vec<PathBuf> = ["pre-link", "post-link"]
            .iter()
            .map(|kind| script_path(&package.record.package_record, kind, subdir))
            .filter(|path| package.paths.paths.iter().any(|entry| entry.relative_path == *path))
            .collect();
        if !scripts.is_empty() {
            found.insert(number, scripts);
        }
    }
    found
}

/// Where conda-build puts the script `kind` of a package.
pub(crate) fn script_path(record: &PackageRecord, kind: &str, subdir: Subdir) -> PathBuf {
    let name = record.name.as_normalized();
    if subdir.is_windows() { PathBuf::from(format!("Scripts/.{name}-{kind}.bat")) } else { PathBuf::from(format!("bin/.{name}-{kind}.sh")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_leave_the_environment_are_refused() {
        for good in ["a", "lib/python3.11/x.py", "a/./b", "a..b/c", "..a"] {
            assert_eq!(safe_path(Path::new(good)), Ok(()), "{good}");
        }
        for bad in ["", ".", "./a", "/etc/passwd", "../x", "a/../../x", "a/.."] {
            assert!(safe_path(Path::new(bad)).is_err(), "{bad}");
        }
        assert!(check_path("x", Path::new("conda-meta/history")).is_err());
        assert!(check_path("x", Path::new("conda-metadata")).is_ok());
    }

    #[test]
    fn the_link_mode_is_found_by_trying() {
        let folder = tempfile::tempdir().unwrap();
        let probe = folder.path().join("probe");
        std::fs::write(&probe, "x").unwrap();
        let stage = folder.path().join("stage");
        std::fs::create_dir(&stage).unwrap();
        let chosen = choose_mode(LinkMode::Auto, &probe, &stage).unwrap();
        assert!(matches!(chosen, LinkMode::Reflink | LinkMode::Hardlink), "{chosen:?}");
        assert_eq!(choose_mode(LinkMode::Copy, &probe, &stage).unwrap(), LinkMode::Copy);
        assert_eq!(choose_mode(LinkMode::Hardlink, &probe, &stage).unwrap(), LinkMode::Hardlink);
        assert_eq!(std::fs::read_dir(&stage).unwrap().count(), 0);
        if Path::new("/dev/shm").is_dir() {
            let other = tempfile::tempdir_in("/dev/shm").unwrap();
            if std::fs::hard_link(&probe, other.path().join("x")).is_err() {
                assert_eq!(choose_mode(LinkMode::Auto, &probe, other.path()).unwrap(), LinkMode::Copy);
                let error = choose_mode(LinkMode::Hardlink, &probe, other.path()).unwrap_err();
                assert!(error.message().starts_with("cannot hardlink"), "{error}");
            }
        }
    }
}
