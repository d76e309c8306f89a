//! A solution to a prefix.
//!
//! [`create_with`] is the whole road: lock the prefix, tidy up after killed runs, fetch and verify everything, check that there is room, link into a
//! stage beside the target, compile, write the metadata, and rename. Until the rename the target is untouched; after it the environment is complete.

pub(crate) mod cache;
pub(crate) mod cancel;
/// What is in the caches, and removing it.
pub mod clean;
pub(crate) mod compile;
pub(crate) mod fetch;
pub(crate) mod link;
mod lock;
pub(crate) mod metadata;
pub(crate) mod scripts;
pub(crate) mod space;
pub(crate) mod swap;
mod target;

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indexmap::IndexMap;
use rattler_cache::package_cache::PackageCache;
use rattler_conda_types::prefix::Prefix as StagePrefix;
use rattler_conda_types::{MatchSpec, PackageName, PackageRecord, RepoDataRecord, Subdir};
use rattler_networking::LazyClient;
use serde::Serialize;

pub use cancel::Cancel;
pub(crate) use cancel::CancelOnDrop;
pub use fetch::{Archive, CacheCheck};
pub use lock::{DEFAULT_LOCK_TIMEOUT, Holder, PrefixLock};
pub(crate) use metadata::{FileKind, TARE_FOLDER, hex as hex_text, is_host, read_modes, set_mode, sha256_hex, without_secrets};
pub use metadata::{
    Look, Stamp, channel_name, damages, digest_of, environments_file, first_damage, history_name, look, register, tell_aliens,
};
pub(crate) use swap::sync_folder;
pub use swap::{Placing, Recovered, needs_recovery, recover};
pub(crate) use target::refuse_mount_point;
pub use target::{ExistingEnvironment, TargetState, resolve_prefix, state_of_target};

use crate::error::{Error, Kind, Result};
use crate::pypi::PypiPlan;
use crate::pypi::fetch::{CachedWheel, WheelFetcher};
use crate::pypi::install::{self as wheels, StagedWheel, WheelLayout, WheelLinking};
use crate::report::{Phase, Progress, TaskId};

/// How files come from the package cache into an environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkMode {
    /// The first of reflink, hardlink and copy that works between the two file systems.
    #[default]
    Auto,
    /// Copies that share their data until one is written to (btrfs, xfs).
    Reflink,
    /// The very same files.
    Hardlink,
    /// Copies.
    Copy,
    /// Links into the cache: the environment breaks when the cache is cleaned.
    Symlink,
}

impl LinkMode {
    fn verb(self) -> &'static str {
        match self {
            LinkMode::Auto => "link",
            LinkMode::Reflink => "reflink",
            LinkMode::Hardlink => "hardlink",
            LinkMode::Copy => "copy",
            LinkMode::Symlink => "symlink",
        }
    }
}

impl std::fmt::Display for LinkMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            LinkMode::Auto => "auto",
            other => other.verb(),
        })
    }
}

impl FromStr for LinkMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [LinkMode::Auto, LinkMode::Reflink, LinkMode::Hardlink, LinkMode::Copy, LinkMode::Symlink]
            .into_iter()
            .find(|mode| mode.to_string() == text)
            .ok_or_else(|| Error::usage(format!("`{text}` is no link mode")).hint("one of auto, reflink, hardlink, copy, symlink"))
    }
}

/// What to do about symbolic links of packages that point out of the environment. Files are never written through them, whatever is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExternalLinks {
    /// Say nothing.
    Allow,
    /// Name them and go on.
    #[default]
    Warn,
    /// Refuse.
    Deny,
}

/// Which packages may run their pre- and post-link scripts. None by default: they are programs of the channel, run with the user's rights.
#[derive(Debug, Clone, Default)]
pub struct LinkScripts {
    /// Their names.
    pub allow: Vec<PackageName>,
}

/// An environment to make.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Where; see [`resolve_prefix`].
    pub prefix: PathBuf,
    /// The platform of the packages.
    pub subdir: Subdir,
    /// The packages, any order.
    pub records: Vec<RepoDataRecord>,
    /// What the user asked for: `requested_spec` in `conda-meta` and `update specs` in the history.
    pub requested: Vec<MatchSpec>,
    /// Environment variables set by activation (`conda-meta/state`).
    pub variables: IndexMap<String, String>,
    /// The command line, for the history and for others who wait for the lock. Secrets in URLs are removed before it is written.
    pub command: Vec<String>,
    /// How files are linked.
    pub link_mode: LinkMode,
    /// Compile the Python files of noarch packages.
    pub compile: bool,
    /// Link scripts that may run.
    pub link_scripts: LinkScripts,
    /// Let the last package win where several provide a file. Without it that is an error, unless the files are identical.
    pub clobber: bool,
    /// Symbolic links that point out of the environment.
    pub external_links: ExternalLinks,
    /// How cached packages are checked.
    pub cache_check: CacheCheck,
    /// Simultaneous downloads.
    pub concurrency: usize,
    /// How long to wait for the prefix lock; [`DEFAULT_LOCK_TIMEOUT`] if none.
    pub lock_timeout: Option<Duration>,
    /// Facts of the caller for `conda-meta/tare/environment.json`; `input_digest` in it is compared by [`same_as`].
    pub metadata: serde_json::Value,
    /// Add the environment to `~/.conda/environments.txt`.
    pub register: bool,
    /// The home folder for that; the user's own if none.
    pub home: Option<PathBuf>,
    /// Replace an environment that is there (`--force`). Files that belong to no package of it go with it.
    pub replace: bool,
    /// With `replace`: the history of the environment that is there goes on, and `conda-meta/pinned` stays.
    pub keep_history: bool,
    /// Replace an environment that is frozen (CEP 22) too.
    pub override_frozen: bool,
    /// The Python packages that come with it.
    pub pypi: Option<PypiPlan>,
    /// Stops the work.
    pub cancel: Cancel,
    /// Set once the new environment is in its place: an error after that is one of a link script.
    pub placed: Arc<AtomicBool>,
}

impl Plan {
    /// A plan with the defaults of the command line.
    pub fn new(prefix: impl Into<PathBuf>, subdir: Subdir, records: Vec<RepoDataRecord>) -> Self {
        Plan {
            prefix: prefix.into(),
            subdir,
            records,
            requested: Vec::new(),
            variables: IndexMap::new(),
            command: Vec::new(),
            link_mode: LinkMode::Auto,
            compile: true,
            link_scripts: LinkScripts::default(),
            clobber: false,
            external_links: ExternalLinks::default(),
            cache_check: CacheCheck::default(),
            concurrency: 8,
            lock_timeout: None,
            metadata: serde_json::Value::Null,
            register: true,
            home: None,
            replace: false,
            keep_history: false,
            override_frozen: false,
            pypi: None,
            cancel: Cancel::new(),
            placed: Arc::default(),
        }
    }
}

/// A file that several packages provide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Clobber {
    /// Path in the environment.
    pub path: PathBuf,
    /// The package whose file is there: the last one in topological order.
    #[serde(serialize_with = "name_text")]
    pub winner: PackageName,
    /// The packages whose files lie under `__clobbers__` instead.
    #[serde(serialize_with = "name_texts")]
    pub losers: Vec<PackageName>,
    /// All have the same contents, so nothing is lost.
    pub identical: bool,
}

fn name_text<S: serde::Serializer>(name: &PackageName, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(name.as_normalized())
}

fn name_texts<S: serde::Serializer>(names: &[PackageName], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(names.iter().map(PackageName::as_normalized))
}

/// Seconds that each phase took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Seconds {
    /// Waiting for the lock and tidying up.
    pub lock: f64,
    /// Checking the cache, downloading, unpacking.
    pub fetch: f64,
    /// Linking.
    pub link: f64,
    /// Compiling.
    pub compile: f64,
    /// Writing metadata and renaming.
    pub finish: f64,
}

/// What [`create_with`] did.
#[derive(Debug, Clone, Serialize)]
pub struct Installed {
    /// The environment.
    pub prefix: PathBuf,
    /// It took the place of another one.
    pub replaced: bool,
    /// Number of packages.
    pub linked: usize,
    /// Number of Python packages of the pip section.
    pub python_packages: usize,
    /// How files came from each cache folder in use: usually one.
    pub link_modes: Vec<(PathBuf, LinkMode)>,
    /// Number of Python files compiled.
    pub compiled: usize,
    /// Why nothing was compiled though asked for.
    pub not_compiled: Option<String>,
    /// Packages whose link scripts were not run.
    #[serde(serialize_with = "name_texts")]
    pub skipped_link_scripts: Vec<PackageName>,
    /// Packages whose link scripts ran.
    #[serde(serialize_with = "name_texts")]
    pub ran_link_scripts: Vec<PackageName>,
    /// Files of several packages.
    pub clobbered: Vec<Clobber>,
    /// Digest of the set of packages.
    pub environment_digest: String,
    /// What was tidied up before.
    #[serde(skip)]
    pub recovered: Recovered,
    /// Time per phase.
    pub seconds: Seconds,
}

impl Installed {
    /// The link mode to show; the first where several caches are in use.
    pub fn link_mode_used(&self) -> LinkMode {
        self.link_modes.first().map_or(LinkMode::Copy, |(_, mode)| *mode)
    }
}

/// Makes the environment of `plan`.
///
/// # Errors
/// The target is something else than absent, an empty folder or (with `replace`) an environment; the lock is held; a package cannot be fetched
/// (kind network) or is not what it should be (kind verification); no room; files clash; cancelled (kind interrupted). In every case the target
/// is as it was. One exception: an allowed post-link script that fails; it runs in the finished environment, which stays.
pub async fn create_with(plan: &Plan, cache: &PackageCache, client: LazyClient, progress: Arc<dyn Progress>) -> Result<Installed> {
    let started = Instant::now();
    let held = hold(&plan.prefix, &plan.command, plan.lock_timeout, &plan.cancel, &*progress).await?;
    let waited = started.elapsed();
    let mut installed = create_held(plan, held, cache, client, progress).await?;
    installed.seconds.lock += waited.as_secs_f64();
    Ok(installed)
}

/// A prefix that nobody else changes, with what killed runs left tidied up.
pub(crate) struct Held {
    lock: PrefixLock,
    recovered: Recovered,
}

/// Waits for the lock of a prefix, whose parent folder is made, takes it, and tidies up.
///
/// # Errors
/// As [`PrefixLock::acquire`] and [`recover`].
pub(crate) async fn hold(
    prefix: &Path,
    command: &[String],
    timeout: Option<Duration>,
    cancel: &Cancel,
    progress: &dyn Progress,
) -> Result<Held> {
    let prefix = resolve_prefix(prefix)?;
    let parent = prefix.parent().unwrap_or(Path::new("/"));
    fs_err::create_dir_all(parent).map_err(|error| Error::io("create the folder", parent, &error))?;
    let lock = PrefixLock::acquire(&prefix, command, timeout, progress, cancel).await?;
    let recovered = recover(&prefix)?;
    if recovered.removed > 0 || recovered.rolled_forward {
        progress.note("tidied up after an interrupted run");
    }
    Ok(Held { lock, recovered })
}

/// As [`create_with`], under a lock that is held already.
///
/// # Errors
/// As [`create_with`].
pub(crate) async fn create_held(
    plan: &Plan,
    held: Held,
    cache: &PackageCache,
    client: LazyClient,
    progress: Arc<dyn Progress>,
) -> Result<Installed> {
    let Held { lock, recovered } = held;
    let prefix = resolve_prefix(&plan.prefix)?;
    let mut seconds = Seconds::default();
    let mut clock = Instant::now();
    let mut lap = |slot: &mut f64| {
        *slot = clock.elapsed().as_secs_f64();
        clock = Instant::now();
    };
    let placing = accept_target(&prefix, plan.replace, plan.override_frozen)?;
    lap(&mut seconds.lock);

    let Fetched { packages, layers, wheels, locks } = fetch_both(plan, cache, client, progress.clone()).await?;
    lap(&mut seconds.fetch);

    let guard = cancel::CancelOnDrop::new(plan.cancel.clone());
    let built = fetch::blocking({
        let (plan, prefix, progress) = (plan.clone(), prefix.clone(), progress.clone());
        move || {
            // Owned by this thread: it goes on until it sees the switch, even when nobody waits for it any more.
            let _held = (lock, locks);
            let mut built = build(&plan, &prefix, &packages, &layers, &wheels, placing, progress.clone(), seconds)?;
            plan.placed.store(true, Ordering::SeqCst);
            let scripts = link::link_scripts(&packages, plan.subdir);
            let ran = scripts::run_allowed(&plan, &prefix, &packages, &scripts, &*progress);
            for number in scripts.keys() {
                let name = &packages[*number].record.package_record.name;
                let list =
                    if plan.link_scripts.allow.contains(name) { &mut built.ran_link_scripts } else { &mut built.skipped_link_scripts };
                list.push(name.clone());
            }
            if !built.skipped_link_scripts.is_empty() {
                let names: Vec<String> = built.skipped_link_scripts.iter().map(|name| format!("`{}`", name.as_normalized())).collect();
                progress.warn(
                    &format!("the link scripts of {} were not run", names.join(", ")),
                    &["to run the ones you trust: --force --allow-link-script NAME".to_owned()],
                );
            }
            ran.map(|()| built)
        }
    })
    .await?;
    guard.disarm();
    if plan.register && plan.placed.load(Ordering::SeqCst) {
        let home = plan.home.clone().or_else(crate::config::home_dir);
        if let Some(home) = home
            && let Err(error) = register(&home, &prefix, true)
        {
            tracing::debug!("{error}");
        }
    }
    let mut installed = built?;
    installed.recovered = recovered;
    Ok(installed)
}

/// What a plan is made of, in the cache.
pub(crate) struct Fetched {
    /// Conda packages in topological order.
    pub packages: Vec<fetch::Cached>,
    /// The cache folder of each.
    pub layers: Vec<PathBuf>,
    /// Wheels by name.
    pub wheels: Vec<CachedWheel>,
    /// Keep all of it in place.
    pub locks: Vec<cache::ShardLock>,
}

/// Brings both halves of a plan into the cache and checks them.
pub(crate) async fn fetch_both(plan: &Plan, cache: &PackageCache, client: LazyClient, progress: Arc<dyn Progress>) -> Result<Fetched> {
    let records = PackageRecord::sort_topologically(sorted(&plan.records));
    let fetcher = fetch::Fetcher {
        cache,
        client: client.clone(),
        check: plan.cache_check,
        concurrency: plan.concurrency,
        progress: progress.clone(),
        cancel: plan.cancel.clone(),
    };
    let wheel_fetcher =
        WheelFetcher { cache, client, check: plan.cache_check, concurrency: plan.concurrency, progress, cancel: plan.cancel.clone() };
    let mut wanted = plan.pypi.as_ref().map(|pypi| pypi.wheels.clone()).unwrap_or_default();
    wanted.sort_by(|a, b| a.record.name.cmp(&b.record.name));
    // Wheels first: their downloads are long, and nobody waits for locks that are held meanwhile.
    for _ in 0..5 {
        let wheels = wheel_fetcher.ensure(&wanted).await?;
        if let Some(pypi) = &plan.pypi {
            wheels::check_usable(pypi, plan.subdir, &wheels)?;
        }
        let (packages, mut locks) = fetcher.fetch_all(&records).await?;
        target::refuse_unquotable(&plan.prefix, &packages, &wheels)?;
        let Some(held) = wheel_fetcher.hold(&wheels).await? else { continue };
        locks.extend(held);
        let layers = packages.iter().map(|package| fetch::layer_of(cache, &package.folder)).collect();
        return Ok(Fetched { packages, layers, wheels, locks });
    }
    Err(Error::failure("the package cache is being emptied by another process").hint("run again when it is done"))
}

/// How the files of each wheel come into `stage`: found out once per cache folder, each may be on a file system of its own.
pub(crate) fn wheel_modes(plan: &Plan, wheels: &[CachedWheel], stage: &Path) -> Result<(BTreeMap<PathBuf, LinkMode>, Vec<LinkMode>)> {
    let mut by_root: BTreeMap<PathBuf, LinkMode> = BTreeMap::new();
    for wheel in wheels {
        if !by_root.contains_key(&wheel.root) {
            by_root.insert(wheel.root.clone(), link::choose_mode(plan.link_mode, &wheel.folder.join("wheel.json"), stage)?);
        }
    }
    let modes = wheels.iter().map(|wheel| by_root[&wheel.root]).collect();
    Ok((by_root, modes))
}

/// Links wheels into the stage, after the conda packages.
#[allow(clippy::too_many_arguments)]
pub(crate) fn link_wheels(
    plan: &Plan,
    prefix: &Path,
    stage: &Path,
    python: Option<&rattler::install::PythonInfo>,
    wheels: &[CachedWheel],
    layout: &WheelLayout,
    modes: &[LinkMode],
    progress: &dyn Progress,
    task: TaskId,
    done: usize,
) -> Result<Vec<StagedWheel>> {
    let Some(python) = python.filter(|_| !wheels.is_empty()) else { return Ok(Vec::new()) };
    if modes.contains(&LinkMode::Copy) {
        space::require(prefix, layout.bytes, "the files of the Python packages", "choose another place for the environment: -p PATH")?;
    }
    WheelLinking { stage, prefix, python, modes, progress, task, done: done as u64, cancel: &plan.cancel }.run(wheels, layout)
}

/// Moves the files of conda packages that give way to a wheel to where rattler and pixi look for them, and corrects what the packages say.
pub(crate) fn divert(
    stage: &Path,
    packages: &[fetch::Cached],
    linked: &mut [Vec<rattler_conda_types::prefix_record::PathsEntry>],
    diverted: &[(usize, PathBuf)],
) -> Result<()> {
    for (number, path) in diverted {
        let aside = Path::new("__clobbers__").join(packages[*number].record.package_record.name.as_normalized()).join(path);
        let (from, to) = (stage.join(path), stage.join(&aside));
        if let Some(folder) = to.parent() {
            fs_err::create_dir_all(folder).map_err(|error| Error::io("create the folder", folder, &error))?;
        }
        std::fs::rename(&from, &to).map_err(|error| Error::io("rename", &from, &error))?;
        for entry in linked[*number].iter_mut().filter(|entry| entry.relative_path == *path) {
            entry.original_path = Some(path.clone());
            entry.relative_path.clone_from(&aside);
        }
    }
    Ok(())
}

/// Bytes to download for all of `records`, as their channels say; at most [`u64::MAX`].
pub fn total_size(records: &[RepoDataRecord]) -> u64 {
    space::total(records.iter().filter_map(|record| record.package_record.size))
}

/// Fetches archives named by URL or path and makes complete records from the metadata inside them.
///
/// # Errors
/// As for fetching; an archive whose name and contents disagree (kind verification).
pub async fn records_for_archives(
    archives: &[Archive],
    cache: &PackageCache,
    client: LazyClient,
    progress: Arc<dyn Progress>,
    cancel: &Cancel,
) -> Result<Vec<RepoDataRecord>> {
    let fetcher = fetch::Fetcher { cache, client, check: CacheCheck::default(), concurrency: 8, progress, cancel: cancel.clone() };
    fetcher.records_of(archives).await
}

/// Whether the environment at `existing` is what `plan` would make: same packages, inputs, variables and place. Says what differs, or what is damaged
/// (files missing or of another size), if it is not.
///
/// # Errors
/// Never for a damaged environment: that is a difference.
pub fn difference(existing: &ExistingEnvironment, plan: &Plan) -> Option<String> {
    let Some(stamp) = &existing.stamp else { return Some("it was not made by tare".to_owned()) };
    if stamp.prefix != existing.prefix {
        return Some(format!("it was made at `{}` and moved", stamp.prefix.display()));
    }
    if stamp.subdir != plan.subdir.to_string() {
        return Some(format!("it is for {}", stamp.subdir));
    }
    if stamp.environment_digest != digest_of(&plan.records) {
        return Some("it holds other packages".to_owned());
    }
    if stamp.pypi_digest != plan.pypi.as_ref().and_then(crate::pypi::installed::digest_of_plan) {
        return Some("it holds other Python packages".to_owned());
    }
    if stamp.metadata.get("input_digest") != plan.metadata.get("input_digest") {
        return Some("it was made from another input".to_owned());
    }
    if stamp.state_sha256 != metadata::state_text(&plan.variables).map(|text| metadata::sha256_hex(text.as_bytes())) {
        return Some("it has other variables".to_owned());
    }
    first_damage(&existing.prefix, stamp)
}

/// SHA-256 of the `conda-meta/state` that holds these variables, lower-case hex; `None` without variables.
pub(crate) fn state_sha256(variables: &IndexMap<String, String>) -> Option<String> {
    metadata::state_text(variables).map(|text| metadata::sha256_hex(text.as_bytes()))
}

/// Whether the environment at `existing` is what `plan` would make, and intact: see [`difference`].
pub fn same_as(existing: &ExistingEnvironment, plan: &Plan) -> bool {
    difference(existing, plan).is_none()
}

/// Whether an environment may be made at `prefix`, and how it will take its place. Looked at without the prefix lock: [`create_with`] looks again.
///
/// # Errors
/// Something else than nothing, an empty folder or (with `replace`) an environment that is not frozen is there.
pub(crate) fn accept_target(prefix: &Path, replace: bool, override_frozen: bool) -> Result<swap::Placing> {
    let shown = prefix.display();
    match state_of_target(prefix)? {
        TargetState::Absent | TargetState::EmptyFolder => Ok(swap::Placing::New),
        TargetState::Environment(existing) if replace => {
            refuse_frozen(&existing, override_frozen)?;
            refuse_mount_point(prefix)?;
            Ok(swap::Placing::Replace)
        }
        TargetState::Environment(_) => Err(Error::failure(format!("there already is an environment at `{shown}`"))
            .hint("to change it: tare install, tare update")
            .hint("to replace it: --force")),
        TargetState::Foreign => Err(Error::failure(format!("`{shown}` is a folder with other things in it"))
            .because("it has no `conda-meta`, so it is no environment, and tare does not delete what it did not make")
            .hint("choose another place: -p PATH")),
        TargetState::File => Err(Error::failure(format!("`{shown}` is a file")).hint("choose another place: -p PATH")),
    }
}

/// Refuses to change an environment that is marked as frozen (CEP 22: a file `conda-meta/frozen`, which may hold a JSON object with a `message`).
pub(crate) fn refuse_frozen(existing: &ExistingEnvironment, override_frozen: bool) -> Result<()> {
    if !existing.frozen || override_frozen {
        return Ok(());
    }
    let file = existing.prefix.join("conda-meta/frozen");
    let message = std::fs::read(&file)
        .ok()
        .and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok())
        .and_then(|value| Some(value.get("message")?.as_str()?.trim().to_owned()))
        .filter(|message| !message.is_empty())
        .unwrap_or_else(|| format!("it has a file `{}`", file.display()));
    Err(Error::failure(format!("the environment `{}` is frozen", existing.prefix.display()))
        .because(message)
        .hint("make a copy that can be changed: tare create -n NEW --clone OLD")
        .hint("to change it all the same: --override-frozen"))
}

/// A fixed order to begin with, so that the topological order does not depend on the caller.
pub(crate) fn sorted(records: &[RepoDataRecord]) -> Vec<RepoDataRecord> {
    let mut records = records.to_vec();
    records.sort_by(|a, b| {
        a.package_record.name.as_normalized().cmp(b.package_record.name.as_normalized()).then_with(|| a.url.as_str().cmp(b.url.as_str()))
    });
    records
}

/// Everything between "all packages are in the cache" and "the environment is in place".
#[allow(clippy::too_many_arguments)]
fn build(
    plan: &Plan,
    prefix: &Path,
    packages: &[fetch::Cached],
    layers: &[PathBuf],
    wheels: &[CachedWheel],
    placing: swap::Placing,
    progress: Arc<dyn Progress>,
    mut seconds: Seconds,
) -> Result<Installed> {
    let mut clock = Instant::now();
    let mut lap = |slot: &mut f64| {
        *slot = clock.elapsed().as_secs_f64();
        clock = Instant::now();
    };
    plan.cancel.check()?;
    if let Some(pair) = duplicate_name(packages) {
        return Err(Error::new(Kind::Usage, format!("`{pair}` is among the packages more than once")));
    }
    let python = link::python_of(packages.iter().map(|package| &package.record.package_record), plan.subdir)?;
    let layout = link::Layout::plan(packages, python.clone(), plan.clobber)?;
    layout.check_external(plan.external_links, &*progress)?;
    let clobber = plan.clobber || plan.pypi.as_ref().is_some_and(|pypi| pypi.clobber);
    let wheel_layout = WheelLayout::plan(wheels, python.as_ref(), &layout, packages, clobber, &*progress)?;
    let stage = swap::Stage::create(prefix)?;

    // Once per cache folder: each may be on a file system of its own.
    let mut modes: BTreeMap<PathBuf, LinkMode> = BTreeMap::new();
    for (layer, package) in layers.iter().zip(packages) {
        if !modes.contains_key(layer) {
            let probe = package.folder.join("info/index.json");
            modes.insert(layer.clone(), link::choose_mode(plan.link_mode, &probe, stage.path())?);
        }
    }
    let package_modes: Vec<LinkMode> = layers.iter().map(|layer| modes[layer]).collect();
    check_space(prefix, &layout, packages, &package_modes)?;
    let (wheel_roots, wheel_modes) = wheel_modes(plan, wheels, stage.path())?;
    modes.extend(wheel_roots);

    let task = progress.start(Phase::Link, "linking packages", Some((packages.len() + wheels.len()) as u64));
    let stage_prefix = StagePrefix::create(stage.path()).map_err(|error| Error::io("prepare", stage.path(), &error))?;
    // rattler marks the folder as one that backups leave out; whether an environment is backed up is the user's choice.
    let _ = std::fs::remove_file(stage.path().join("CACHEDIR.TAG"));
    let linking = link::Linking {
        stage: &stage_prefix,
        prefix,
        subdir: plan.subdir,
        modes: &package_modes,
        progress: &*progress,
        task,
        cancel: &plan.cancel,
    };
    let linked = linking.run(packages, &layout).and_then(|mut linked| {
        linking.make_modes_uniform(&linked)?;
        divert(stage.path(), packages, &mut linked, &wheel_layout.diverted)?;
        let (python, done) = (python.as_ref(), packages.len());
        let staged = link_wheels(plan, prefix, stage.path(), python, wheels, &wheel_layout, &wheel_modes, &*progress, task, done)?;
        Ok((linked, staged))
    });
    progress.finish(task);
    let (mut linked, mut staged) = linked?;
    lap(&mut seconds.link);

    let (compiled, not_compiled) = if plan.compile {
        compile_noarch(plan, prefix, packages, None, python.as_ref(), stage.path(), &mut linked, &mut staged, &*progress)?
    } else {
        (0, None)
    };
    lap(&mut seconds.compile);

    plan.cancel.check()?;
    let records: Vec<RepoDataRecord> = packages.iter().map(|package| package.record.clone()).collect();
    let prefix_records: Vec<_> =
        records.iter().zip(linked).map(|(record, paths)| metadata::prefix_record(record, paths, &plan.requested)).collect();
    let written = metadata::write_records(stage.path(), &prefix_records)?;
    let pypi = wheels::finish(stage.path(), wheels, staged)?;
    let notes = metadata::Notes {
        prefix,
        subdir: plan.subdir,
        records: &records,
        requested: &plan.requested,
        variables: &plan.variables,
        command: &plan.command,
        compiled: plan.compile && not_compiled.is_none(),
        metadata: &plan.metadata,
        exact_modes: &std::collections::HashSet::new(),
        pypi: &pypi,
    };
    let replaced = (plan.keep_history && placing == swap::Placing::Replace).then_some(prefix);
    metadata::write_notes(stage.path(), &notes, written, &prefix_records, replaced)?;
    swap::sync_stage(stage.path());
    plan.cancel.check()?;
    swap::place(stage, prefix, placing)?;
    lap(&mut seconds.finish);
    Ok(Installed {
        prefix: prefix.to_owned(),
        replaced: placing == swap::Placing::Replace,
        linked: packages.len(),
        python_packages: wheels.len(),
        link_modes: modes.into_iter().collect(),
        compiled,
        not_compiled,
        skipped_link_scripts: Vec::new(),
        ran_link_scripts: Vec::new(),
        clobbered: layout.clobbered.into_iter().chain(wheel_layout.clobbered).collect(),
        environment_digest: digest_of(&records),
        recovered: Recovered::default(),
        seconds,
    })
}

pub(crate) fn duplicate_name(packages: &[fetch::Cached]) -> Option<String> {
    let mut seen = std::collections::HashSet::new();
    packages.iter().map(|package| package.record.package_record.name.as_normalized()).find(|name| !seen.insert(*name)).map(str::to_owned)
}

/// Refuses if the environment certainly does not fit: bytes by link mode, and inodes.
pub(crate) fn check_space(prefix: &Path, layout: &link::Layout, packages: &[fetch::Cached], modes: &[LinkMode]) -> Result<()> {
    let copied = if modes.contains(&LinkMode::Copy) {
        // Exact per package would need the sizes by package; all or nothing is how it is in practice.
        let copied: u64 = packages
            .iter()
            .zip(modes)
            .filter(|(_, mode)| **mode == LinkMode::Copy)
            .flat_map(|(package, _)| &package.paths.paths)
            .filter(|entry| entry.prefix_placeholder.is_none())
            .filter_map(|entry| entry.size_in_bytes)
            .sum();
        copied.min(layout.linked_bytes)
    } else {
        0
    };
    let hint = "choose another place for the environment: -p PATH";
    space::require(prefix, layout.patched_bytes + copied, "the files of the environment", hint)?;
    let new_files = if modes.iter().all(|mode| *mode == LinkMode::Hardlink) { 0 } else { layout.files };
    match space::free_files(prefix) {
        Some(free) if free < new_files => Err(Error::failure(format!("not enough inodes on the file system of `{}`", prefix.display()))
            .because(format!("the environment has {new_files} files, and {free} more can be made"))
            .hint(hint)),
        _ => Ok(()),
    }
}

/// Compiles the Python files of the noarch ones among `packages` (`only`: of those of these names), and of wheels, with the Python in `stage`. Returns how
/// many, or why none.
#[allow(clippy::too_many_arguments)]
pub(crate) fn compile_noarch(
    plan: &Plan,
    prefix: &Path,
    packages: &[fetch::Cached],
    only: Option<&HashSet<String>>,
    python: Option<&rattler::install::PythonInfo>,
    stage: &Path,
    linked: &mut [Vec<rattler_conda_types::prefix_record::PathsEntry>],
    staged: &mut [StagedWheel],
    progress: &dyn Progress,
) -> Result<(usize, Option<String>)> {
    let wanted = |record: &PackageRecord| only.is_none_or(|only| only.contains(record.name.as_normalized()));
    let Some(python) = python else { return Ok((0, None)) };
    let jobs: Vec<compile::Job> = packages
        .iter()
        .enumerate()
        .filter(|(_, package)| package.index.noarch.is_python() && wanted(&package.record.package_record))
        .map(|(number, _)| compile::Job { package: number, files: compile::sources(&linked[number], &python.site_packages_path) })
        // In pieces, which are the same for the same wheel: one process would be busy with a large one for long.
        .chain(staged.iter().enumerate().flat_map(|(number, wheel)| {
            let pieces = wheel.sources.chunks(256);
            pieces.map(move |files| compile::Job { package: packages.len() + number, files: files.to_vec() })
        }))
        .filter(|job| !job.files.is_empty())
        .collect();
    if jobs.is_empty() {
        return Ok((0, None));
    }
    let total = jobs.iter().map(|job| job.files.len() as u64).sum();
    let task = progress.start(Phase::Compile, "compiling Python files", Some(total));
    let outcome = compile::compile(stage, prefix, python.path(), python.short_version, plan.subdir, &jobs, progress, task, &plan.cancel);
    progress.finish(task);
    match outcome? {
        compile::Outcome::Done(entries) => {
            let mut count = 0;
            for (job, entries) in jobs.iter().zip(entries) {
                count += entries.len();
                match job.package.checked_sub(packages.len()) {
                    Some(number) => staged[number].add(&entries),
                    None => linked[job.package].extend(entries),
                }
            }
            Ok((count, None))
        }
        compile::Outcome::CannotRun(why) => {
            progress.note(&format!("Python files are not compiled: {why}"));
            Ok((0, Some(why)))
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
