//! The change itself: a clone beside the environment, the packages exchanged in it, and the two folders exchanged.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use indexmap::IndexMap;
use rattler_cache::package_cache::PackageCache;
use rattler_conda_types::package::{PathType, PathsEntry};
use rattler_conda_types::prefix::Prefix as StagePrefix;
use rattler_conda_types::{MatchSpec, PackageName, PackageRecord, PrefixRecord, RepoDataRecord};
use rattler_networking::LazyClient;
use serde::Serialize;

use super::survey::{self, Entry, Kind, Taking};
use crate::error::{Error, Result};
use crate::install::metadata::{self, Notes};
use crate::install::{self, Clobber, FileKind, LinkMode, Plan, PrefixLock, Seconds, Stamp, cancel, fetch, link, scripts, swap};
use crate::pypi::TareRecord;
use crate::pypi::fetch::CachedWheel;
use crate::pypi::install::{StagedWheel, WheelLayout};
use crate::pypi::installed::Installed;
use crate::pypi::revisions;
use crate::report::{Phase, Progress};

/// Where the files of a package lie that another package has overwritten (`--clobber`); rattler and pixi look there too.
const CLOBBERS: &str = "__clobbers__";

/// A package record of an environment with the name of its file in `conda-meta`.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub file: String,
    pub record: PrefixRecord,
}

impl Known {
    pub fn name(&self) -> &PackageName {
        &self.record.repodata_record.package_record.name
    }

    /// The Python distributions it brings, normalized.
    pub fn brings(&self) -> BTreeSet<String> {
        crate::pypi::installed::brought(self.record.files.iter().map(PathBuf::as_path))
    }

    /// The paths it owns, most of them twice.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let listed = self.record.files.iter().map(PathBuf::as_path);
        listed.chain(self.record.paths_data.paths.iter().map(|entry| entry.relative_path.as_path()))
    }
}

/// What is to be done.
pub(super) struct Job {
    /// The environment whose files are taken over: that of `plan`, or the source of a copy.
    pub base: PathBuf,
    /// Where to, which packages are linked, and how. `requested` is everything asked for, after the change.
    pub plan: Plan,
    /// Packages that stay as they are.
    pub keep: Vec<Known>,
    /// Packages that go, or are replaced; for a copy all of them: their files are linked anew.
    pub unlink: Vec<Known>,
    /// Python packages that stay as they are.
    pub keep_python: Vec<Installed>,
    /// Python packages that go, or are replaced; those that come are in `plan`.
    pub unlink_python: Vec<Installed>,
    /// For the history: what was asked for by this change.
    pub update_specs: Vec<MatchSpec>,
    /// For the history: names that are no longer asked for.
    pub remove_specs: Vec<String>,
    /// The variables after the change; `None`: as they are.
    pub variables: Option<IndexMap<String, String>>,
    /// A file for `conda-meta/tare`: name and contents.
    pub marker: Option<(&'static str, String)>,
    /// The path that the files of the base were made for, if it was moved: replaced in files of nobody.
    pub moved_from: Option<PathBuf>,
    /// The packages stay the same ones, and so does what is written about them.
    pub repair: Option<Repair>,
}

/// What a repair knows besides the packages that it links anew.
#[derive(Debug, Default)]
pub(super) struct Repair {
    /// tare's notes on the environment as they were.
    pub stamp: Option<Stamp>,
    /// The kinds of files as noted when they were installed.
    pub modes: Option<HashMap<PathBuf, FileKind>>,
    /// Records in `conda-meta` that are written anew: missing, damaged or changed.
    pub lost_records: HashSet<String>,
    /// Paths of the packages whose records were lost.
    pub lost_paths: Vec<PathBuf>,
    /// The packages that have byte code, which is made again: names, of Python packages `pypi::NAME`.
    pub compiled: HashSet<String>,
}

impl Job {
    fn is_copy(&self) -> bool {
        self.base != self.plan.prefix
    }
}

/// What a change did.
#[derive(Debug, Clone, Serialize)]
pub struct Changed {
    /// The environment.
    pub prefix: PathBuf,
    /// Number of packages that came.
    pub linked: usize,
    /// Number of packages that went and did not come back in another version.
    pub unlinked: usize,
    /// Number of packages that stayed as they were.
    pub kept: usize,
    /// Number of Python packages of the pip section that came.
    pub python_linked: usize,
    /// The same of Python packages that no conda package brought.
    pub python_unlinked: usize,
    /// Number of such packages that stayed.
    pub python_kept: usize,
    /// How files came from each cache folder in use.
    pub link_modes: Vec<(PathBuf, LinkMode)>,
    /// Number of Python files compiled.
    pub compiled: usize,
    /// Why nothing was compiled though asked for.
    pub not_compiled: Option<String>,
    /// Packages whose link scripts were not run.
    pub skipped_link_scripts: Vec<String>,
    /// Files of the user that were in the way, under their new names.
    pub saved: Vec<PathBuf>,
    /// Files of several packages.
    pub clobbered: Vec<Clobber>,
    /// Seconds per phase.
    pub seconds: Seconds,
}

/// Fetches, builds and swaps. `locks` are held to the end and given back.
pub(super) async fn apply(
    job: Job,
    locks: Vec<PrefixLock>,
    cache: &PackageCache,
    client: LazyClient,
    progress: Arc<dyn Progress>,
) -> Result<(Changed, Vec<PrefixLock>)> {
    let mut seconds = Seconds::default();
    let clock = Instant::now();
    let install::Fetched { packages, layers, wheels, locks: cache_locks } =
        install::fetch_both(&job.plan, cache, client, progress.clone()).await?;
    seconds.fetch = clock.elapsed().as_secs_f64();
    let guard = cancel::CancelOnDrop::new(job.plan.cancel.clone());
    let (register, home) = (job.plan.register, job.plan.home.clone());
    let (result, locks) = fetch::blocking(move || {
        // Owned by this thread: it goes on until it sees the switch, even when nobody waits for it any more.
        let _held = cache_locks;
        (build(&job, &packages, &layers, &wheels, &*progress, seconds), locks)
    })
    .await?;
    guard.disarm();
    let changed = result?;
    if register
        && let Some(home) = home.or_else(crate::config::home_dir)
        && let Err(error) = install::register(&home, &changed.prefix, true)
    {
        tracing::debug!("{error}");
    }
    Ok((changed, locks))
}

/// What becomes of every file of the base.
#[derive(Default)]
struct Decision<'a> {
    /// Taken over as they are, folders first.
    take: Vec<&'a Entry>,
    /// Files of kept packages that a new one overwrites: number of the package and path.
    divert: Vec<(usize, &'a Entry)>,
    /// Files of kept packages that were overwritten by a package that now goes: number of the package, entry below `__clobbers__`, its own path.
    restore: Vec<(usize, &'a Entry, PathBuf)>,
    /// Files of nobody that are in the way of a new one.
    aside: Vec<&'a Entry>,
    /// Files of wheels that a kept package has as they are: number of the wheel and path.
    shared: Vec<(usize, PathBuf)>,
    /// Paths that the stage has of its own.
    mine: HashSet<PathBuf>,
    clobbered: Vec<Clobber>,
    /// Files of kept Python packages that new ones overwrite, for people.
    overlaps: Vec<String>,
    /// Kept Python packages, some files of which come from others now.
    touched: BTreeSet<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    Kept(usize),
    /// A Python package that stays.
    Python(usize),
    Gone,
}

/// What comes to a path.
struct New<'a> {
    package: PackageName,
    entry: Option<&'a PathsEntry>,
    /// Of a wheel: its number and the hash of the file.
    wheel: Option<(usize, Option<[u8; 32]>)>,
}

impl New<'_> {
    /// SHA-256 of the file as it will be, where it is known before.
    fn sha256(&self) -> Option<[u8; 32]> {
        if let Some((_, sha256)) = self.wheel {
            return sha256;
        }
        let entry = self.entry.filter(|entry| entry.path_type == PathType::HardLink && entry.prefix_placeholder.is_none())?;
        entry.sha256?[..].try_into().ok()
    }
}

/// Who has a path. Keyed by the bytes of the path, which hash many times as fast as its components.
type Owners<'a> = HashMap<&'a OsStr, Owner>;

fn owners(job: &Job) -> Owners<'_> {
    let mut owners = HashMap::new();
    for path in job.repair.iter().flat_map(|repair| &repair.lost_paths) {
        owners.insert(path.as_os_str(), Owner::Gone);
    }
    for known in &job.unlink {
        owners.extend(known.paths().map(|path| (path.as_os_str(), Owner::Gone)));
    }
    for installed in &job.unlink_python {
        owners.extend(installed.owns().map(|path| (path.as_os_str(), Owner::Gone)));
    }
    // What two distributions list stays as long as one of them does.
    for (number, installed) in job.keep_python.iter().enumerate() {
        owners.extend(installed.owns().map(|path| (path.as_os_str(), Owner::Python(number))));
    }
    for (number, known) in job.keep.iter().enumerate() {
        owners.extend(known.paths().map(|path| (path.as_os_str(), Owner::Kept(number))));
    }
    owners
}

fn decide<'a>(
    job: &Job,
    packages: &[fetch::Cached],
    wheels: &[CachedWheel],
    layout: &link::Layout,
    wheel_layout: &WheelLayout,
    entries: &'a [Entry],
) -> Result<Decision<'a>> {
    let owners = owners(job);
    let name = |number: usize| packages[number].record.package_record.name.clone();
    let conda = layout.files().map(|(number, path, entry)| (path.to_owned(), New { package: name(number), entry, wheel: None }));
    let mut incoming: HashMap<PathBuf, New<'_>> = conda.collect();
    incoming.extend(wheel_layout.files(wheels).map(|(number, path, sha256)| {
        let package = PackageName::new_unchecked(crate::pypi::install::qualified(wheels[number].ready.record.name.as_ref()));
        (path, New { package, entry: None, wheel: Some((number, sha256)) })
    }));
    let mut decision = Decision { mine: incoming.keys().cloned().collect(), ..Decision::default() };
    let mut overlaps: Vec<String> = Vec::new();
    let mut clashes: Vec<String> = Vec::new();
    let mut python_clash: Option<String> = None;
    let mut in_the_way: Vec<String> = Vec::new();
    // A copy is no kernel until it is made one.
    let kernels = if job.is_copy() && job.marker.is_none() { crate::notebook::kernelspecs_inside(&job.base) } else { Vec::new() };
    let mut taken_files: HashSet<&OsStr> = HashSet::new();
    let mut needed: HashSet<&OsStr> = HashSet::new();
    for entry in entries.iter().filter(|entry| !matches!(entry.kind, Kind::Folder { .. })) {
        let path = entry.path.as_path();
        let owner = owners.get(path.as_os_str()).copied();
        if owner.is_none() && kernels.iter().any(|kernel| path.starts_with(kernel)) {
            continue;
        }
        if let Some(new) = incoming.get(path) {
            if let Some(Owner::Python(number)) = owner {
                decision.touched.insert(number);
            }
            match owner {
                Some(Owner::Gone) => {}
                Some(Owner::Kept(kept)) => {
                    let identical = same_contents(&job.keep[kept].record, path, new);
                    if identical && let Some((wheel, _)) = new.wheel {
                        decision.shared.push((wheel, path.to_owned()));
                        decision.mine.remove(path);
                        taken_files.insert(path.as_os_str());
                        needed.extend(own_folders(path).map(Path::as_os_str));
                        decision.take.push(entry);
                        continue;
                    }
                    let found = Clobber {
                        path: path.to_owned(),
                        winner: new.package.clone(),
                        losers: vec![job.keep[kept].name().clone()],
                        identical,
                    };
                    if !identical && !job.plan.clobber {
                        clashes.push(format!(
                            "`{}`: `{}` and `{}`",
                            path.display(),
                            job.keep[kept].name().as_normalized(),
                            new.package.as_normalized()
                        ));
                    }
                    decision.divert.push((kept, entry));
                    decision.clobbered.push(found);
                }
                Some(Owner::Python(_)) | None if is_same_file(&job.base, entry, new) => {}
                // As with pip: the one that comes last has the file.
                Some(Owner::Python(number)) if new.wheel.is_some() => {
                    overlaps.push(format!(
                        "`{}` of `{}` and `{}`",
                        path.display(),
                        job.keep_python[number].name,
                        new.package.as_normalized()
                    ));
                }
                Some(Owner::Python(number)) => {
                    if job.plan.clobber {
                        decision.aside.push(entry);
                    } else {
                        let other = job.keep_python[number].qualified();
                        clashes.push(format!("`{}`: `{other}` and `{}`", path.display(), new.package.as_normalized()));
                        python_clash = Some(other);
                    }
                }
                None => {
                    if !job.plan.clobber {
                        in_the_way.push(format!("`{}` (of `{}`)", path.display(), new.package.as_normalized()));
                    }
                    decision.aside.push(entry);
                }
            }
            continue;
        }
        if owner == Some(Owner::Gone) || (owner.is_none() && is_stale_byte_code(path, &owners)) {
            decision.mine.insert(path.to_owned());
            continue;
        }
        if let Some(own) = clobbered_path(path)
            && let Some(Owner::Kept(number)) = owner
            && !incoming.contains_key(own)
            && !matches!(owners.get(own.as_os_str()), Some(Owner::Kept(_)))
        {
            decision.restore.push((number, entry, own.to_owned()));
            decision.mine.extend([path.to_owned(), own.to_owned()]);
            needed.extend(own_folders(own).map(Path::as_os_str));
            continue;
        }
        taken_files.insert(path.as_os_str());
        // Where a folder is known, those above it are.
        own_folders(path).take_while(|folder| needed.insert(folder.as_os_str())).for_each(drop);
        decision.take.push(entry);
    }
    // An empty folder is somebody's wish, unless it is the wish of a package that goes.
    for entry in entries {
        if entry.kind == (Kind::Folder { empty: true }) && owners.get(entry.path.as_os_str()) != Some(&Owner::Gone) {
            needed.insert(entry.path.as_os_str());
            needed.extend(own_folders(&entry.path).map(Path::as_os_str));
        }
    }
    // A file where the other side needs a folder cannot be: never write through a link, never hide what is below.
    let mut mixed = Vec::new();
    for (path, new) in incoming.iter().filter(|(path, _)| !taken_files.contains(path.as_os_str())) {
        let below = own_folders(path).find(|folder| taken_files.contains(folder.as_os_str()));
        if let Some(file) = below {
            mixed.push(format!(
                "`{}` is no folder, and `{}` puts `{}` below it",
                file.display(),
                new.package.as_normalized(),
                path.display()
            ));
        } else if needed.contains(path.as_os_str()) {
            mixed.push(format!(
                "`{}` is a folder with other files, and `{}` has a file there",
                path.display(),
                new.package.as_normalized()
            ));
        }
    }
    let mut hints = vec!["leave one of the packages out".to_owned(), "to let the new one win: --clobber".to_owned()];
    if let Some(other) = python_clash {
        hints.insert(0, format!("to remove the Python package: tare remove {other}"));
    }
    refuse(clashes, "provided by more than one package", hints)?;
    refuse(
        in_the_way,
        "in the way that no package installed",
        vec![
            "if pip installed them: tare run python -m pip uninstall NAME".to_owned(),
            "move them away, or have them renamed to `NAME.tare-saved`: --clobber".to_owned(),
        ],
    )?;
    mixed.sort();
    if !mixed.is_empty() {
        let mut error = Error::failure("files and folders clash");
        for line in mixed.iter().take(10) {
            error = error.because(line);
        }
        return Err(error.hint("move away what is yours, or leave the package out"));
    }
    let folders: Vec<&Entry> =
        entries.iter().filter(|entry| matches!(entry.kind, Kind::Folder { .. }) && needed.contains(entry.path.as_os_str())).collect();
    decision.take = folders.into_iter().chain(decision.take).collect();
    overlaps.sort();
    decision.overlaps = overlaps;
    Ok(decision)
}

fn refuse(mut found: Vec<String>, what: &str, hints: Vec<String>) -> Result<()> {
    if found.is_empty() {
        return Ok(());
    }
    found.sort();
    let mut error = Error::failure(format!("{} {} {what}", found.len(), if found.len() == 1 { "file is" } else { "files are" }));
    for line in found.iter().take(10) {
        error = error.because(line);
    }
    if found.len() > 10 {
        error = error.because(format!("and {} more", found.len() - 10));
    }
    Err(error.hints_from(hints))
}

/// The folders above a path, innermost first.
fn own_folders(path: &Path) -> impl Iterator<Item = &Path> {
    path.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty())
}

/// `p` of `__clobbers__/PACKAGE/p`.
pub(super) fn clobbered_path(path: &Path) -> Option<&Path> {
    let mut rest = path.strip_prefix(CLOBBERS).ok()?.components();
    rest.next()?;
    Some(rest.as_path()).filter(|path| !path.as_os_str().is_empty())
}

/// Whether the installed file of a record has the contents that a new package brings.
fn same_contents(record: &PrefixRecord, path: &Path, new: &New<'_>) -> bool {
    let (Some(new), Some(old)) = (new.sha256(), record.paths_data.paths.iter().find(|entry| entry.relative_path == path)) else {
        return false;
    };
    old.prefix_placeholder.is_none() && old.sha256.is_some_and(|old| old[..] == new[..])
}

/// Whether a file has the contents that a new package brings.
fn is_same_file(base: &Path, entry: &Entry, new: &New<'_>) -> bool {
    entry.kind == Kind::File
        && new.sha256().is_some_and(|wanted| {
            rattler_digest::compute_file_digest::<rattler_digest::Sha256>(base.join(&entry.path)).is_ok_and(|found| found[..] == wanted[..])
        })
}

/// Byte code that Python wrote at run time for a file that goes or is replaced. Sources of packages often share one modification time, so Python
/// could take it for that of the new file.
fn is_stale_byte_code(path: &Path, owners: &Owners<'_>) -> bool {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else { return false };
    if !name.ends_with(".pyc") || folder.file_name().is_none_or(|name| name != "__pycache__") {
        return false;
    }
    let Some((module, _)) = name.split_once('.') else { return false };
    let source = folder.with_file_name(format!("{module}.py"));
    owners.get(source.as_os_str()) == Some(&Owner::Gone)
}

/// Everything between "all packages are in the cache" and "the environment is changed".
fn build(
    job: &Job,
    packages: &[fetch::Cached],
    layers: &[PathBuf],
    wheels: &[CachedWheel],
    progress: &dyn Progress,
    mut seconds: Seconds,
) -> Result<Changed> {
    let plan = &job.plan;
    let prefix = plan.prefix.as_path();
    let mut clock = Instant::now();
    let mut lap = |slot: &mut f64| {
        *slot = clock.elapsed().as_secs_f64();
        clock = Instant::now();
    };
    plan.cancel.check()?;
    if let Some(name) = install::duplicate_name(packages) {
        return Err(Error::usage(format!("`{name}` is among the packages more than once")));
    }
    let all = job.keep.iter().map(|known| &known.record.repodata_record.package_record);
    let python = link::python_of(packages.iter().map(|package| &package.record.package_record).chain(all), plan.subdir)?;
    let layout = link::Layout::plan(packages, python.clone(), plan.clobber)?;
    layout.check_external(plan.external_links, progress)?;
    let clobber = plan.clobber || plan.pypi.as_ref().is_some_and(|pypi| pypi.clobber);
    let mut wheel_layout = WheelLayout::plan(wheels, python.as_ref(), &layout, packages, clobber, progress)?;
    let entries = survey::survey(&job.base)?;
    let decision = decide(job, packages, wheels, &layout, &wheel_layout, &entries)?;
    for (number, path) in &decision.shared {
        wheel_layout.share(*number, path);
    }
    if !decision.overlaps.is_empty() {
        let count = decision.overlaps.len();
        let more = if count > 5 { format!(", and {} more", count - 5) } else { String::new() };
        let shown: Vec<&str> = decision.overlaps.iter().take(5).map(String::as_str).collect();
        progress.warn(&format!("Python packages overwrite files of each other, the one named last wins: {}{more}", shown.join(", ")), &[]);
    }

    let stage = swap::Stage::create(prefix)?;
    let mut modes: BTreeMap<PathBuf, LinkMode> = BTreeMap::new();
    for (layer, package) in layers.iter().zip(packages) {
        if !modes.contains_key(layer) {
            let probe = package.folder.join("info/index.json");
            modes.insert(layer.clone(), link::choose_mode(plan.link_mode, &probe, stage.path())?);
        }
    }
    let package_modes: Vec<LinkMode> = layers.iter().map(|layer| modes[layer]).collect();
    install::check_space(prefix, &layout, packages, &package_modes)?;
    let (wheel_roots, wheel_modes) = install::wheel_modes(plan, wheels, stage.path())?;
    modes.extend(wheel_roots);

    let task = progress.start(Phase::Link, "linking packages", Some((packages.len() + wheels.len()) as u64));
    let mut same_files = false;
    let linked = (|| -> Result<(Vec<_>, Vec<StagedWheel>)> {
        let stage_prefix = StagePrefix::create(stage.path()).map_err(|error| Error::io("prepare", stage.path(), &error))?;
        let _ = std::fs::remove_file(stage.path().join("CACHEDIR.TAG"));
        same_files = clone(job, &decision, stage.path())?;
        let linking = link::Linking {
            stage: &stage_prefix,
            prefix,
            subdir: plan.subdir,
            modes: &package_modes,
            progress,
            task,
            cancel: &plan.cancel,
        };
        let mut linked = linking.run(packages, &layout)?;
        linking.make_modes_uniform(&linked)?;
        if let Some(modes) = job.repair.as_ref().and_then(|repair| repair.modes.as_ref()) {
            restore_modes(stage.path(), &linked, modes)?;
        }
        install::divert(stage.path(), packages, &mut linked, &wheel_layout.diverted)?;
        let (python, done) = (python.as_ref(), packages.len());
        let staged = install::link_wheels(plan, prefix, stage.path(), python, wheels, &wheel_layout, &wheel_modes, progress, task, done)?;
        Ok((linked, staged))
    })();
    progress.finish(task);
    let (mut linked, mut staged) = linked?;
    lap(&mut seconds.link);

    let (compiled, not_compiled) = if plan.compile {
        let only = job.repair.as_ref().map(|repair| &repair.compiled);
        for (wheel, staged) in wheels.iter().zip(&mut staged) {
            let name = crate::pypi::install::qualified(wheel.ready.record.name.as_ref());
            if only.is_some_and(|only| !only.contains(&name)) {
                staged.sources.clear();
            }
        }
        install::compile_noarch(plan, prefix, packages, only, python.as_ref(), stage.path(), &mut linked, &mut staged, progress)?
    } else {
        (0, None)
    };
    lap(&mut seconds.compile);

    plan.cancel.check()?;
    let pypi = crate::pypi::install::finish(stage.path(), wheels, staged)?;
    let compiled_all = plan.compile && not_compiled.is_none();
    write_metadata(job, packages, linked, &decision, stage.path(), compiled_all, &pypi)?;
    survey::finish_folders(stage.path(), &decision.take)?;
    let placing = if job.is_copy() {
        swap::Placing::New
    } else {
        let mut owned: HashSet<&Path> = decision.mine.iter().map(PathBuf::as_path).collect();
        // Byte code that was made for it.
        owned.extend(pypi.iter().flat_map(|record| &record.files).map(|file| Path::new(&file.path)));
        let late = survey::catch_up(prefix, stage.path(), &entries, same_files, &|path| owned.contains(path))?;
        if late > 0 {
            tracing::debug!("{late} files changed while the environment was being changed, and were taken over");
        }
        swap::Placing::Replace
    };
    swap::sync_stage(stage.path());
    plan.cancel.check()?;
    swap::place(stage, prefix, placing)?;
    lap(&mut seconds.finish);

    let found = link::link_scripts(packages, plan.subdir);
    let ran = scripts::run_allowed(plan, prefix, packages, &found, progress);
    let skipped: Vec<String> = found
        .keys()
        .map(|number| &packages[*number].record.package_record.name)
        .filter(|name| !plan.link_scripts.allow.contains(name))
        .map(|name| name.as_normalized().to_owned())
        .collect();
    if !skipped.is_empty() {
        progress.warn(
            &format!("the link scripts of {} were not run", quoted_list(&skipped)),
            &["to run the ones you trust: --allow-link-script NAME".to_owned()],
        );
    }
    ran?;
    let mut clobbered = layout.clobbered;
    clobbered.extend(decision.clobbered);
    clobbered.extend(wheel_layout.clobbered);
    // What comes in another version, or anew, did not go.
    let comes: HashSet<&PackageName> = packages.iter().map(|package| &package.record.package_record.name).collect();
    let python_comes: HashSet<&str> = wheels.iter().map(|wheel| wheel.ready.record.name.as_ref()).collect();
    Ok(Changed {
        prefix: prefix.to_owned(),
        linked: packages.len(),
        unlinked: job.unlink.iter().filter(|known| !comes.contains(known.name())).count(),
        kept: job.keep.len(),
        python_linked: wheels.len(),
        python_unlinked: job.unlink_python.iter().filter(|installed| !python_comes.contains(installed.name.as_str())).count(),
        python_kept: job.keep_python.len(),
        link_modes: modes.into_iter().collect(),
        compiled,
        not_compiled,
        skipped_link_scripts: skipped,
        saved: decision.aside.iter().map(|entry| saved_name(&job.base, &entry.path)).collect(),
        clobbered,
        seconds,
    })
}

pub(super) fn quoted_list(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// A name that nothing has, for a file of the user that is in the way.
fn saved_name(base: &Path, path: &Path) -> PathBuf {
    let name = |number: usize| {
        let mut name: OsString = path.as_os_str().to_owned();
        name.push(".tare-saved");
        if number > 0 {
            name.push(format!("-{number}"));
        }
        PathBuf::from(name)
    };
    (0..).map(name).find(|name| std::fs::symlink_metadata(base.join(name)).is_err()).unwrap_or_else(|| name(0))
}

/// Brings everything that stays into the stage, and tells whether all of it are the very same files.
fn clone(job: &Job, decision: &Decision<'_>, stage: &Path) -> Result<bool> {
    let (old, new) = (job.moved_from.as_deref().unwrap_or(&job.base).to_string_lossy(), job.plan.prefix.to_string_lossy());
    let taking = if job.is_copy() || job.moved_from.is_some() { Taking::Copy { from: &old, to: &new } } else { Taking::Same };
    let cancel = &job.plan.cancel;
    let same = survey::take(&job.base, stage, &decision.take, taking, cancel)?;
    let moved = |entry: &Entry, to: &Path| -> Result<()> {
        let to = stage.join(to);
        if let Some(folder) = to.parent() {
            std::fs::create_dir_all(folder).map_err(|error| Error::io("create the folder", folder, &error))?;
        }
        survey::take_one(&job.base, entry, &to, taking).map(drop)
    };
    for (number, entry) in &decision.divert {
        let name = job.keep[*number].name().as_normalized();
        moved(entry, &Path::new(CLOBBERS).join(name).join(&entry.path))?;
    }
    for (_, entry, own) in &decision.restore {
        moved(entry, own)?;
    }
    for entry in &decision.aside {
        moved(entry, &saved_name(&job.base, &entry.path))?;
    }
    take_meta(job, stage, taking)?;
    Ok(same)
}

/// Gives linked files the modes noted when they were first installed: a hard link has one mode with the file of the environment that was changed.
fn restore_modes(
    stage: &Path,
    linked: &[Vec<rattler_conda_types::prefix_record::PathsEntry>],
    modes: &HashMap<PathBuf, FileKind>,
) -> Result<()> {
    for entry in linked.iter().flatten() {
        let path = stage.join(&entry.relative_path);
        if std::fs::symlink_metadata(&path).is_ok_and(|about| about.is_file()) {
            let mode = match modes.get(&entry.relative_path) {
                Some(FileKind::Executable) => 0o755,
                Some(FileKind::Mode(mode)) => *mode,
                _ => 0o644,
            };
            own_mode(&path, mode)?;
        }
    }
    Ok(())
}

/// Sets the permissions of a file of the stage, and of none that is the same file: the cache and other environments keep theirs.
fn own_mode(path: &Path, mode: u32) -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let about = std::fs::symlink_metadata(path).map_err(|error| Error::io("look at", path, &error))?;
        if about.permissions().mode() & 0o7777 == mode {
            return Ok(());
        }
        if about.nlink() > 1 {
            let folder = path.parent().unwrap_or(path);
            let fail = |error: std::io::Error| Error::io("write", path, &error);
            let copy = tempfile::Builder::new().prefix(".tare-mode-").tempfile_in(folder).map_err(fail)?;
            std::fs::copy(path, copy.path()).map_err(fail)?;
            copy.persist(path).map_err(|error| fail(error.error))?;
        }
    }
    install::set_mode(path, mode)
}

/// A path below `conda-meta`, relative to it.
fn in_meta(path: &str) -> &str {
    path.strip_prefix("conda-meta/").unwrap_or(path)
}

/// Takes over `conda-meta`, apart from what is written anew.
fn take_meta(job: &Job, stage: &Path, taking: Taking<'_>) -> Result<()> {
    let root = job.base.join("conda-meta");
    let target = stage.join("conda-meta");
    let mut kept: HashSet<String> = job.keep.iter().map(|known| known.file.clone()).collect();
    kept.extend(
        job.keep_python.iter().filter(|installed| installed.is_ours()).map(|installed| format!("tare/pypi/{}.json", installed.name)),
    );
    let entries = survey::survey(&root)?;
    let wanted: Vec<&Entry> = entries
        .iter()
        .filter(|entry| match entry.path.to_str() {
            Some(name) if job.repair.is_some() && !name.ends_with(".json") => true,
            // Damaged notes are not for a repair of packages to throw away.
            Some("tare/environment.json") if job.repair.as_ref().is_some_and(|repair| repair.stamp.is_none()) => true,
            // Not linked: what is written into would be the file of the old environment.
            Some(name) if name == "history" || name == in_meta(revisions::FILE) && job.repair.is_none() => false,
            Some("tare/environment.json" | "tare/files" | "tare/modes") => false,
            // What was found out about another environment.
            Some("tare/check.json") => !job.is_copy() || job.marker.is_some(),
            Some("state") => job.variables.is_none(),
            // A copy may be changed, the same environment under a new name may not.
            Some("frozen") => !job.is_copy() || job.marker.is_some(),
            Some("tare/renamed-from") => false,
            Some(name) if name.ends_with(".json") && (!name.contains('/') || name.starts_with("tare/pypi/")) => match &job.repair {
                None => kept.contains(name),
                // What makes no sense and is not ours stays as it is.
                Some(repair) => !repair.lost_records.contains(name) && !job.unlink.iter().any(|known| known.file == name),
            },
            _ => true,
        })
        .collect();
    survey::take(&root, &target, &wanted, taking, &job.plan.cancel)?;
    survey::finish_folders(&target, &wanted)
}

/// The specs of `requested` that are about `record`, as they are written into it.
fn specs_of(record: &PackageRecord, requested: &[MatchSpec]) -> Vec<String> {
    requested.iter().filter(|spec| spec.name.as_exact() == Some(&record.name)).map(ToString::to_string).collect()
}

#[allow(deprecated)] // conda still reads `requested_spec`
fn written_specs(record: &PrefixRecord) -> Vec<String> {
    let mut specs = record.requested_specs.clone();
    if specs.is_empty() {
        specs.extend(record.requested_spec.clone().filter(|spec| spec != "None" && !spec.is_empty()));
    }
    specs.iter().map(|text| crate::spec::parse_match_spec(text, None).map_or_else(|_| text.clone(), |spec| spec.to_string())).collect()
}

/// Replaces a file of the stage: what is there may be the very file of the old environment, and is not written into.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, &error)),
        _ => metadata::write_file(path, bytes),
    }
}

fn write_metadata(
    job: &Job,
    packages: &[fetch::Cached],
    linked: Vec<Vec<rattler_conda_types::prefix_record::PathsEntry>>,
    decision: &Decision<'_>,
    stage: &Path,
    compiled: bool,
    pypi: &[TareRecord],
) -> Result<()> {
    let plan = &job.plan;
    let meta = stage.join("conda-meta");
    let new: Vec<PrefixRecord> =
        packages.iter().zip(linked).map(|(package, paths)| metadata::prefix_record(&package.record, paths, &plan.requested)).collect();
    let mut written = metadata::write_records(stage, &new)?;
    // The records of a large environment are worth no second copy.
    let mut prefix_records: Vec<Cow<'_, PrefixRecord>> = new.iter().map(Cow::Borrowed).collect();
    if let Some(repair) = &job.repair {
        prefix_records.extend(job.keep.iter().map(|known| Cow::Borrowed(&known.record)));
        return metadata::update_stamp(stage, repair.stamp.as_ref(), &written, &prefix_records);
    }

    for (number, known) in job.keep.iter().enumerate() {
        let mut record = Cow::Borrowed(&known.record);
        let mut renamed = false;
        for (_, entry) in decision.divert.iter().filter(|(kept, _)| *kept == number) {
            let aside = Path::new(CLOBBERS).join(known.name().as_normalized()).join(&entry.path);
            renamed |= rename_path(record.to_mut(), &entry.path, &aside, Some(&entry.path));
        }
        for (_, entry, own) in decision.restore.iter().filter(|(kept, ..)| *kept == number) {
            renamed |= rename_path(record.to_mut(), &entry.path, own, None);
        }
        let specs = specs_of(&record.repodata_record.package_record, &plan.requested);
        let path = meta.join(&known.file);
        if renamed || specs != written_specs(&record) {
            let text = edited_record(&job.base.join("conda-meta").join(&known.file), record.to_mut(), specs, renamed)?;
            replace(&path, &text)?;
        }
        let size = std::fs::symlink_metadata(&path).map_err(|error| Error::io("look at", &path, &error))?.len();
        written.push((known.file.clone(), size));
        prefix_records.push(record);
    }
    written.sort();

    let names = |list: &[Known]| -> BTreeSet<String> {
        if job.is_copy() || job.moved_from.is_some() {
            return BTreeSet::new();
        }
        list.iter().map(|known| install::history_name(&known.record.repodata_record)).collect()
    };
    let mut added: BTreeSet<String> = packages.iter().map(|package| install::history_name(&package.record)).collect();
    if job.moved_from.is_some() {
        added.clear();
    }
    let mut history = String::new();
    if !job.is_copy() {
        let before: BTreeSet<String> = names(&job.keep).into_iter().chain(names(&job.unlink)).collect();
        history = metadata::history_so_far(&job.base, &before);
    }
    history += &metadata::history_entry(&metadata::now(), &plan.command, &names(&job.unlink), &added, &job.update_specs, &job.remove_specs);
    replace(&meta.join("history"), history.as_bytes())?;

    if let Some(variables) = &job.variables
        && let Some(state) = metadata::state_text(variables)
    {
        replace(&meta.join("state"), state.as_bytes())?;
    }
    let state = std::fs::read(meta.join("state")).ok().map(|bytes| metadata::sha256_hex(&bytes));
    let all: Vec<RepoDataRecord> = prefix_records.iter().map(|record| record.repodata_record.clone()).collect();
    let all = install::sorted(&all);
    let mut all_python: Vec<TareRecord> = pypi.to_vec();
    let copied = job.is_copy() || job.moved_from.is_some();
    for (number, installed) in job.keep_python.iter().enumerate() {
        let relist = copied || decision.touched.contains(&number);
        all_python.extend(if relist { crate::pypi::installed::relist(stage, installed)? } else { installed.tare.clone() });
    }
    let pypi = all_python;
    let mut python: Vec<revisions::Noted> = pypi.iter().filter(|record| !record.record.is_tooling()).map(revisions::Noted::of).collect();
    let foreign = job.keep_python.iter().filter(|installed| !installed.is_ours());
    python.extend(foreign.map(|installed| revisions::Noted {
        name: installed.name.clone(),
        version: installed.version.clone(),
        source: None,
    }));
    let exact_modes = exact_modes(job);
    let notes = Notes {
        prefix: &plan.prefix,
        subdir: plan.subdir,
        records: &all,
        requested: &plan.requested,
        variables: &plan.variables,
        command: &plan.command,
        compiled,
        metadata: &plan.metadata,
        exact_modes: &exact_modes,
        pypi: &pypi,
    };
    let gone = job.unlink.iter().map(|known| &known.record.repodata_record).collect();
    let note = revisions::Note { packages: python, request: notes.request(state.clone()), gone, there: &all };
    revisions::note(stage, (!job.is_copy()).then_some(job.base.as_path()), &history, note)?;
    // What is the very same file in the stage was looked at before.
    let taken: HashMap<&str, &Entry> = match job.is_copy() {
        true => HashMap::new(),
        false => decision.take.iter().filter_map(|entry| Some((entry.path.to_str()?, *entry))).collect(),
    };
    let known = |path: &str| taken.get(path).map(|entry| entry.about());
    metadata::write_stamp(stage, &notes, state, written, &prefix_records, &known)?;
    if let Some((name, text)) = &job.marker {
        replace(&stage.join(metadata::TARE_FOLDER).join(name), text.as_bytes())?;
    }
    Ok(())
}

/// The files of kept packages that another tool installed, or that were noted as such before.
fn exact_modes(job: &Job) -> HashSet<PathBuf> {
    let stamp = Stamp::read(&job.base).ok().flatten();
    let ours = |known: &&Known| stamp.as_ref().is_some_and(|stamp| stamp.records.iter().any(|(name, _)| *name == known.file));
    let mut exact: HashSet<PathBuf> = job.keep.iter().filter(|known| !ours(known)).flat_map(Known::paths).map(Path::to_path_buf).collect();
    let noted = install::read_modes(&job.base).unwrap_or_default();
    exact.extend(noted.into_iter().filter(|(_, kind)| matches!(kind, FileKind::Mode(_))).map(|(path, _)| path));
    exact
}

/// Gives a path of a record another name; `original`: where it belongs, if that is elsewhere.
fn rename_path(record: &mut PrefixRecord, from: &Path, to: &Path, original: Option<&Path>) -> bool {
    let mut found = false;
    for path in record.files.iter_mut().filter(|path| path.as_path() == from) {
        *path = to.to_owned();
        found = true;
    }
    for entry in record.paths_data.paths.iter_mut().filter(|entry| entry.relative_path == from) {
        entry.relative_path = to.to_owned();
        entry.original_path = original.map(Path::to_owned);
        found = true;
    }
    found
}

/// The text of a kept record with other specs (and, if `paths`, other paths). Keys that only other tools know stay.
#[allow(deprecated)] // conda still reads `requested_spec`
fn edited_record(file: &Path, record: &mut PrefixRecord, specs: Vec<String>, paths: bool) -> Result<Vec<u8>> {
    record.requested_spec = specs.first().cloned();
    record.requested_specs = specs;
    let damaged = |error: serde_json::Error| Error::failure(format!("the package record `{}` is damaged", file.display())).because(error);
    let bytes = std::fs::read(file).map_err(|error| Error::io("read", file, &error))?;
    let mut value: serde_json::Value = serde_json::from_slice(&bytes).map_err(damaged)?;
    let new = serde_json::to_value(&*record).map_err(damaged)?;
    if let Some(object) = value.as_object_mut() {
        for key in ["requested_spec", "requested_specs"] {
            match new.get(key) {
                Some(text) => object.insert(key.to_owned(), text.clone()),
                None => object.shift_remove(key),
            };
        }
        if paths {
            for key in ["files", "paths_data"] {
                object.insert(key.to_owned(), new[key].clone());
            }
        }
    }
    let mut text = serde_json::to_vec_pretty(&value).map_err(damaged)?;
    text.push(b'\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_code_of_replaced_sources_is_stale_and_other_byte_code_is_not() {
        let owners = Owners::from([(OsStr::new("lib/a.py"), Owner::Gone), (OsStr::new("lib/b.py"), Owner::Kept(0))]);
        for (path, stale) in [
            ("lib/__pycache__/a.cpython-311.pyc", true),
            ("lib/__pycache__/a.cpython-311.opt-1.pyc", true),
            ("lib/__pycache__/b.cpython-311.pyc", false),
            ("lib/__pycache__/c.cpython-311.pyc", false),
            ("lib/a.pyc", false),
            ("lib/__pycache__/a.txt", false),
        ] {
            assert_eq!(is_stale_byte_code(Path::new(path), &owners), stale, "{path}");
        }
    }

    #[test]
    fn clobbered_files_know_where_they_belong() {
        assert_eq!(clobbered_path(Path::new("__clobbers__/pkg/share/x")), Some(Path::new("share/x")));
        assert_eq!(clobbered_path(Path::new("__clobbers__/pkg")), None);
        assert_eq!(clobbered_path(Path::new("share/x")), None);
    }

    #[test]
    fn a_saved_file_takes_no_name_that_is_there() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(saved_name(folder.path(), Path::new("a/x")), Path::new("a/x.tare-saved"));
        std::fs::create_dir(folder.path().join("a")).unwrap();
        std::fs::write(folder.path().join("a/x.tare-saved"), "").unwrap();
        assert_eq!(saved_name(folder.path(), Path::new("a/x")), Path::new("a/x.tare-saved-1"));
    }
}
