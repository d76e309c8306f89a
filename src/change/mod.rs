//! Changing an environment: install, update, remove, copy, rename, variables.
//!
//! An environment is the old one or the new one, never a mixture. Every change but that of variables works on a clone beside the environment (hard
//! links to what stays, packages linked from the cache for what comes) and exchanges the two folders; see `docs/changing.md`. The prefix lock is held
//! from before the installed packages are read until the folders are exchanged, so that two changes at once both count.

mod apply;
mod find;
mod lost;
mod plan;
mod repair;
mod requests;
mod revert;
mod survey;
mod variables;
mod whole;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use indexmap::IndexMap;
use rattler_conda_types::{MatchSpec, PackageName, PrefixRecord, RepoDataRecord};

pub use apply::Changed;
pub use lost::Lost;
pub use plan::{ChangePlan, PlanRow};
pub use repair::{Repaired, Sibling, Unrepaired, repair};
pub use revert::revert;
pub use variables::{check_variable, set_variables, unset_variables};
pub use whole::{Renamed, clone_environment, named, relocate_environment, remove_environment, rename_environment};

use crate::channel::Session;
use crate::config::Settings;
use crate::create::{self, Planned};
use crate::error::{Error, Kind, Result};
use crate::install::{self, Cancel, ExistingEnvironment, LinkMode, PrefixLock, Stamp};
use crate::platform::GpuIntent;
use crate::prefix::{Prefix, Which};
use crate::pypi::installed::{self, Installed};
use crate::pypi::{PypiPlan, ReadyWheel};
use crate::report::Progress;
use crate::resolve::{self, Inputs, Resolved};
use crate::solve::{self, Favor};
use crate::spec::{self, Dependency};
use apply::{Job, Known};

/// What every command that changes an environment is told besides its request.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `-n` or `-p`; neither: the active environment, or the one that the file names.
    pub which: Which,
    /// Only plan.
    pub dry_run: bool,
    /// How files are linked; else the setting.
    pub link_mode: Option<LinkMode>,
    /// Leave out byte code.
    pub no_compile: bool,
    /// Let new packages overwrite files of others, and rename files of the user that are in the way.
    pub clobber: bool,
    /// Packages whose link scripts may run.
    pub allow_link_scripts: Vec<String>,
    /// Let packages have symbolic links that point out of the environment.
    pub allow_external_links: bool,
    /// How long to wait for the prefix lock.
    pub lock_timeout: Option<Duration>,
    /// Change a frozen environment (CEP 22) too.
    pub override_frozen: bool,
    /// Remove a whole environment although files in it belong to no package.
    pub give_up_files: bool,
    /// The command line, for the history.
    pub command: Vec<String>,
    /// Stops the work.
    pub cancel: Cancel,
}

impl Options {
    fn for_create(&self) -> create::Options {
        create::Options {
            link_mode: self.link_mode,
            no_compile: self.no_compile,
            clobber: self.clobber,
            allow_link_scripts: self.allow_link_scripts.clone(),
            allow_external_links: self.allow_external_links,
            override_frozen: self.override_frozen,
            lock_timeout: self.lock_timeout,
            command: self.command.clone(),
            cancel: self.cancel.clone(),
            ..create::Options::default()
        }
    }
}

/// What kind of change is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Add packages, or move those that are there to what is asked for.
    Install {
        /// Link the named packages anew even if nothing about them changes.
        force_reinstall: bool,
    },
    /// Move packages that are there to their newest: those named, or all if none is named.
    Update {
        /// Make the environment equal to the inputs: whatever they do not need goes.
        prune: bool,
    },
}

/// What came out of a change.
pub struct Outcome {
    /// What was planned.
    pub plan: ChangePlan,
    /// What was done; `None` with `--dry-run`, and if there was nothing to do.
    pub changed: Option<Changed>,
}

/// An environment that is about to be changed.
struct Open {
    lock: Option<PrefixLock>,
    prefix: Prefix,
    known: Vec<Known>,
    /// The Python packages that no conda package brought.
    python: Vec<Installed>,
    stamp: Option<Stamp>,
    /// What was asked for, by name.
    requested: IndexMap<String, String>,
}

/// Whether two paths name the same thing.
fn same_place(a: &Path, b: &Path) -> bool {
    a == b || matches!((std::fs::canonicalize(a), std::fs::canonicalize(b)), (Ok(a), Ok(b)) if a == b)
}

/// Takes the lock of `prefix` and completes what a killed run left.
async fn lock(prefix: &Path, options: &Options, progress: &dyn Progress) -> Result<PrefixLock> {
    let lock = PrefixLock::acquire(prefix, &options.command, options.lock_timeout, progress, &options.cancel).await?;
    let recovered = install::recover(prefix)?;
    if recovered.removed > 0 || recovered.rolled_forward {
        progress.note("tidied up after an interrupted run");
    }
    Ok(lock)
}

/// Reads an environment, under its lock unless nothing is to be done. One that was moved is refused.
async fn open(path: &Path, options: &Options, progress: &dyn Progress) -> Result<Open> {
    let open = open_anywhere(path, options, progress).await?;
    match open.moved_from() {
        None => Ok(open),
        Some(from) => Err(Error::failure(format!("the environment `{}` was moved", open.prefix.path().display()))
            .because(format!("its files were made for `{}`", from.display()))
            .hint("move it back, or repair it where it is: tare relocate")),
    }
}

impl Open {
    /// The full version of the interpreter; an old one where there is none.
    fn python_version(&self) -> String {
        let records = self.known.iter().map(|known| &known.record.repodata_record.package_record);
        crate::pypi::install::python_version(records).map_or_else(|| "3.8.0".to_owned(), |version| version.to_string())
    }

    /// The path that the files were made for, if that is another.
    fn moved_from(&self) -> Option<&Path> {
        let made_for = self.stamp.as_ref()?.prefix.as_path();
        (!same_place(made_for, self.prefix.path())).then_some(made_for)
    }
}

/// As [`open`], of an environment that may have been moved.
async fn open_anywhere(path: &Path, options: &Options, progress: &dyn Progress) -> Result<Open> {
    let mut path = install::resolve_prefix(path)?;
    let mut held = None;
    if !options.dry_run {
        if path.exists() {
            install::refuse_mount_point(&path)?;
        } else if !install::needs_recovery(&path) {
            // Says what is wrong, without a lock file in a folder that may not even exist.
            Prefix::open(&path)?;
        }
        held = Some(lock(&path, options, progress).await?);
    }
    let stamp = Prefix::open(&path)?.stamp()?;
    if let Some(stamp) = &stamp {
        // The same folder by another road: files go on to name the one they were made with.
        if same_place(&stamp.prefix, &path) {
            path.clone_from(&stamp.prefix);
        }
    }
    let prefix = Prefix::open(&path)?;
    let existing = ExistingEnvironment { prefix: path, stamp: None, frozen: prefix.is_frozen() };
    install::refuse_frozen(&existing, options.override_frozen)?;
    let known = read_known(&prefix)?;
    let requested = requested_of(&prefix, &known)?;
    let python = installed::read(&prefix);
    Ok(Open { lock: held, prefix, known, python, stamp, requested })
}

/// The packages of an environment, sorted by name.
fn read_known(prefix: &Prefix) -> Result<Vec<Known>> {
    let records = prefix.records()?;
    let folder = prefix.path().join("conda-meta");
    let mut known: Vec<Known> = Vec::with_capacity(records.len());
    for record in records {
        let file = record.file_name();
        if !folder.join(&file).is_file() {
            return Err(Error::failure(format!("the record of `{}` is not called `{file}`", record.name().as_normalized()))
                .because(format!("in `{}`", folder.display()))
                .hint("make the environment again: tare create --force"));
        }
        if known.last().is_some_and(|last| last.name() == record.name()) {
            return Err(Error::failure(format!("`{}` has two records of `{}`", folder.display(), record.name().as_normalized()))
                .because("another tool was stopped in the middle of a change")
                .hint(format!("remove the one that is wrong ({file}?), or make the environment again: tare create --force")));
        }
        known.push(Known { file, record });
    }
    Ok(known)
}

/// What was asked for, by name: from the history, and where it says nothing from the records (pixi keeps no history).
#[allow(deprecated)] // conda still reads `requested_spec`
fn requested_of(prefix: &Prefix, known: &[Known]) -> Result<IndexMap<String, String>> {
    let mut requested = prefix.requested_specs()?;
    for known in known {
        let record = &known.record;
        let spec = record.requested_specs.first().cloned().or_else(|| record.requested_spec.clone());
        if let Some(spec) = spec.filter(|spec| !spec.is_empty() && spec != "None") {
            requested.entry(known.name().as_normalized().to_owned()).or_insert(spec);
        }
    }
    let names: BTreeSet<&str> = known.iter().map(|known| known.name().as_normalized()).collect();
    requested.retain(|name, _| names.contains(name.as_str()));
    Ok(requested)
}

/// Fills what the command line leaves open from what the environment was made with: platform, assumed virtual packages, GPU intent, channels.
fn remember(inputs: &mut Inputs, open: &Open, progress: &dyn Progress) {
    inputs.target_given = true;
    let Some(stamp) = &open.stamp else { return };
    if inputs.platform.is_none() && std::env::var_os("CONDA_SUBDIR").is_none_or(|value| value.is_empty()) {
        inputs.platform = Some(stamp.subdir.clone());
    }
    let facts = &stamp.metadata;
    if inputs.gpu == GpuIntent::Auto {
        inputs.gpu = match facts["gpu_intent"].as_str() {
            Some("none") if inputs.cuda.is_none() => GpuIntent::None,
            Some("require") => GpuIntent::Require,
            _ => GpuIntent::Auto,
        };
    }
    let given: BTreeSet<String> =
        inputs.virtual_packages.iter().map(|text| text.split('=').next().unwrap_or_default().trim().to_owned()).collect();
    for package in facts["virtual_packages"].as_array().into_iter().flatten() {
        let text = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
        let (name, version, build) = (text("name"), text("version"), text("build"));
        let taken = given.contains(&name)
            || (name == "__cuda" && inputs.cuda.is_some())
            || (name.starts_with("__cuda") && inputs.gpu == GpuIntent::None);
        if text("provenance") != "assumed" || name.is_empty() || taken {
            continue;
        }
        progress.note(&format!("assuming `{name} {version}`, as when the environment was made"));
        let build = if build.is_empty() || build == "0" { String::new() } else { format!("={build}") };
        inputs.virtual_packages.push(format!("{name}={version}{build}"));
    }
    inputs.fallback_channels =
        facts["channels"].as_array().into_iter().flatten().filter_map(|name| Some(name.as_str()?.to_owned())).collect();
}

fn name_text(name: &PackageName) -> String {
    name.as_normalized().to_owned()
}

fn bare(name: &str) -> Result<MatchSpec> {
    spec::parse_match_spec(name, None)
}

/// The packages that nothing asked for needs: reached from no name in `requested`.
fn unreached(known: &[Known], requested: &BTreeSet<String>) -> BTreeSet<String> {
    let by_name: BTreeMap<&str, &PrefixRecord> = known.iter().map(|known| (known.name().as_normalized(), &known.record)).collect();
    let mut reached: BTreeSet<&str> = BTreeSet::new();
    let mut next: Vec<&str> = by_name.keys().copied().filter(|name| requested.contains(*name)).collect();
    while let Some(name) = next.pop() {
        if !reached.insert(name) {
            continue;
        }
        let depends = by_name.get(name).map(|record| &record.repodata_record.package_record.depends);
        for depend in depends.into_iter().flatten() {
            if let Some((known, _)) = depend_name(depend).and_then(|depend| by_name.get_key_value(depend.as_str())) {
                next.push(known);
            }
        }
    }
    by_name.keys().filter(|name| !reached.contains(*name)).map(|name| (*name).to_owned()).collect()
}

/// The package that a dependency is about.
fn depend_name(depend: &str) -> Option<String> {
    let word = depend.split([' ', '=', '<', '>', '!', '~', '[']).next()?;
    let word = word.rsplit("::").next()?;
    (!word.is_empty()).then(|| word.to_lowercase())
}

/// Installs or updates.
///
/// # Errors
/// No environment; a frozen one; a mount point; the lock is held; what the request needs cannot be solved, fetched or linked. In every case the
/// environment is as it was.
pub async fn change(mode: Mode, inputs: &Inputs, options: &Options, settings: &Settings, progress: Arc<dyn Progress>) -> Result<Outcome> {
    let session = Session::open(settings, progress.clone())?;
    let mut inputs = inputs.clone();
    let fetched = resolve::fetch(&inputs, &session).await?;
    let mut which = options.which.clone();
    if which == Which::default() && !fetched.is_empty() {
        let spec = resolve::read_inputs(&inputs, &fetched, settings)?;
        which = Which { prefix: if spec.name.is_none() { spec.prefix } else { None }, name: spec.name };
    }
    let path = crate::prefix::locate(&which, &create::places(settings))?;
    let mut open = open(&path, options, &*progress).await?;
    if mode == (Mode::Update { prune: false }) {
        requests::qualify(&open, &mut inputs.specs);
        refuse_absent(&open, &inputs.specs)?;
    }
    remember(&mut inputs, &open, &*progress);
    // With `prune` the request alone says what is there.
    inputs.has_pip = mode != (Mode::Update { prune: true }) && open.known.iter().any(|known| known.name().as_normalized() == "pip");
    let mut prepared = resolve::prepare_fetched(&fetched, &inputs, settings, &*progress)?;
    if let Some(stamp) = &open.stamp
        && stamp.subdir != prepared.target.subdir.as_str()
    {
        return Err(Error::usage(format!("the environment is for {}, not for {}", stamp.subdir, prepared.target.subdir))
            .hint("leave out --platform and CONDA_SUBDIR, or make another environment: tare create"));
    }
    prepared.pinned.extend(pins(&open.prefix)?);
    let carried = requests::recall(mode, &open, &mut prepared);
    let request = Request::new(mode, &open, &prepared.spec.dependencies)?;
    if request.is_everything(mode, &prepared) {
        requests::tell_of_python(&open, &*progress);
    }
    let mut resolved = request.solve(mode, &open, &mut prepared, &inputs, settings, &session, progress.clone()).await?;
    if let Some(solution) = &resolved.solution {
        resolve::tell(solution, &*progress);
    }
    let prune = mode == Mode::Update { prune: true };
    if resolved.solution.is_none() && !prune {
        // A list of archives says nothing of the rest.
        let named: BTreeSet<PackageName> = resolved.records.iter().map(|record| record.package_record.name.clone()).collect();
        let rest = open.known.iter().filter(|known| !named.contains(known.name()));
        resolved.records.extend(rest.map(|known| known.record.repodata_record.clone()));
        resolved.records = solve::topological(std::mem::take(&mut resolved.records));
    }
    let asked: Vec<MatchSpec> = resolved
        .requested
        .iter()
        .filter(|spec| spec.name.as_exact().is_some_and(|name| !request.carried.contains(&name_text(name))))
        .cloned()
        .collect();
    let mut requested: IndexMap<String, String> = if prune { IndexMap::new() } else { open.requested.clone() };
    for spec in &asked {
        if let Some(name) = spec.name.as_exact() {
            requested.insert(name_text(name), spec.to_string());
        }
    }
    let variables = if prune {
        prepared.spec.variables.clone()
    } else {
        let mut variables = open.prefix.variables()?;
        variables.extend(prepared.spec.variables.clone());
        variables
    };
    let again: BTreeSet<PackageName> = match mode {
        Mode::Install { force_reinstall: true } => request.named.clone(),
        _ => BTreeSet::new(),
    };
    let mut plan = ChangePlan::new(&open, &resolved.records, &again)?;
    plan.requested = requested;
    plan.update_specs = asked;
    plan.remove_specs = open.requested.keys().filter(|name| !plan.requested.contains_key(*name)).cloned().collect();
    plan.variables = (variables != open.prefix.variables()?).then_some(variables);
    let mut pypi = python_half(mode, &open, &prepared, &resolved.records, options, settings, &session, progress.clone()).await?;
    if let Some(pypi) = &mut pypi {
        requests::leave_out(&carried, &open, &mut serde_json::Value::Null, &mut pypi.wheels);
    }
    if pypi.is_some() || (prune && !inputs.no_pip) {
        let wanted = pypi.as_ref().map(|pypi| pypi.wheels.as_slice()).unwrap_or_default();
        plan.take_python(&open, wanted, prune);
    }
    plan.warn_about_pip(&*progress);
    let planned = Planned { prefix: open.prefix.path().to_owned(), prepared, resolved, pypi };
    let mut facts = create::facts(&planned);
    if !prune {
        requests::leave_out(&carried, &open, &mut facts, &mut []);
        requests::keep(&mut facts, open.stamp.as_ref());
    }
    if prune && open.prefix.pinned()?.is_empty() {
        plan.same_input = open.stamp.as_ref().is_some_and(|stamp| stamp.metadata.get("input_digest") == facts.get("input_digest"));
    } else {
        // Made by several commands: no single input describes it.
        facts["input_digest"] = serde_json::Value::Null;
        plan.same_input = prune || requests::same(&facts, open.stamp.as_ref());
    }
    let mut link = create::plan(&planned, &options.for_create(), settings)?;
    link.metadata = facts;
    link.requested = plan.requested_specs();
    link.records.clone_from(&plan.link);
    plan.planned = Some(planned);
    let changed = if options.dry_run || plan.is_nothing(&open) {
        None
    } else {
        Some(run(&plan, &mut open, link, &session, settings, progress).await?)
    };
    Ok(Outcome { plan, changed })
}

/// The pip half of a change. What is installed stays where it can, but what an update names.
#[allow(clippy::too_many_arguments)]
async fn python_half(
    mode: Mode,
    open: &Open,
    prepared: &resolve::Prepared,
    records: &[RepoDataRecord],
    options: &Options,
    settings: &Settings,
    session: &Session,
    progress: Arc<dyn Progress>,
) -> Result<Option<PypiPlan>> {
    let Some(section) = &prepared.pip else { return Ok(None) };
    let named: BTreeSet<String> = match mode {
        Mode::Update { prune: false } => section.written_names().map(|name| name.to_string()).collect(),
        // As with conda packages: what is named on the command line may move.
        Mode::Install { .. } => requests::arguments(section).map(|name| name.to_string()).collect(),
        Mode::Update { prune: true } => BTreeSet::new(),
    };
    let held = open.python.iter().filter(|installed| !named.contains(&installed.name));
    let held = held.filter_map(|installed| Some((installed.name.parse().ok()?, installed.version.parse().ok()?))).collect();
    let pip = resolve::PipOptions { dry_run: options.dry_run, held, clobber: options.clobber, cancel: options.cancel.clone() };
    resolve::pip_half(prepared, records, &pip, settings, session, progress).await
}

/// Applies a plan.
async fn run(
    plan: &ChangePlan,
    open: &mut Open,
    mut link: install::Plan,
    session: &Session,
    settings: &Settings,
    progress: Arc<dyn Progress>,
) -> Result<Changed> {
    let told = link.pypi.take();
    if !plan.pypi.link.is_empty() {
        let version = plan.python_version().ok_or_else(|| {
            Error::failure(format!("`{}` needs Python, which is not among the packages", plan.pypi.link[0].record.name))
                .hint("add `python` to the conda packages")
        })?;
        let mut wheels = plan.pypi.link.clone();
        crate::notebook::refresh(&mut wheels, settings)?;
        link.pypi = Some(PypiPlan {
            wheels,
            python: version,
            engine: told.as_ref().and_then(|told| told.engine.clone()),
            clobber: told.is_some_and(|told| told.clobber),
        });
    }
    let job = Job {
        base: link.prefix.clone(),
        plan: link,
        keep: plan.keep.clone(),
        unlink: plan.unlink.clone(),
        keep_python: plan.pypi.keep.clone(),
        unlink_python: plan.pypi.unlink.clone(),
        update_specs: plan.update_specs.clone(),
        remove_specs: plan.remove_specs.clone(),
        variables: plan.variables.clone(),
        marker: None,
        moved_from: None,
        repair: None,
    };
    let locks = open.lock.take().into_iter().collect();
    let (changed, _locks) = apply::apply(job, locks, &session.package_cache, session.client.clone(), progress).await?;
    Ok(changed)
}

/// The pins of `conda-meta/pinned`.
fn pins(prefix: &Prefix) -> Result<Vec<solve::PinnedSpec>> {
    let path = prefix.path().join("conda-meta/pinned");
    match std::fs::read_to_string(&path) {
        Ok(text) => solve::parse_pinned(&text, &path.display().to_string()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(Error::io("read", &path, &error)),
    }
}

/// A request merged with what is installed.
struct Request {
    /// Packages that are asked for by name: they may move.
    named: BTreeSet<PackageName>,
    /// The specs of this request.
    own: Vec<Dependency>,
    /// What was asked for before and holds on.
    held: Vec<Dependency>,
    /// Names that nothing asked for needs, but which are there.
    loose: BTreeSet<String>,
    /// Names that are only there because they were before: nothing new is recorded about them.
    carried: BTreeSet<String>,
    explicit_python: bool,
}

impl Request {
    fn new(mode: Mode, open: &Open, dependencies: &[Dependency]) -> Result<Self> {
        let installed: BTreeSet<String> = open.known.iter().map(|known| name_text(known.name())).collect();
        let update = matches!(mode, Mode::Update { .. });
        let prune = mode == Mode::Update { prune: true };
        let mut request = Request {
            named: BTreeSet::new(),
            own: Vec::new(),
            held: Vec::new(),
            loose: BTreeSet::new(),
            carried: BTreeSet::new(),
            explicit_python: prune,
        };
        let mut own_names = BTreeSet::new();
        for dependency in dependencies {
            let Dependency::Match { spec, place, .. } = dependency else {
                request.own.push(dependency.clone());
                continue;
            };
            let Some(name) = spec.name.as_exact() else {
                let mut error = Error::usage(format!("`{spec}` does not name a package"));
                if let Some(place) = place {
                    error = error.at(place.clone());
                }
                return Err(error);
            };
            request.named.insert(name.clone());
            let name = name_text(name);
            request.explicit_python |= name == "python";
            // What was asked for of a package holds when it is updated by its bare name.
            let argument = place.is_none() || spec::is_argument(place.as_ref());
            if update && !prune && argument && spec.to_string() == name {
                request.carried.insert(name.clone());
                let text = open.requested.get(&name).cloned().unwrap_or_else(|| name.clone());
                let spec = spec::parse_match_spec(&text, None).or_else(|_| bare(&name))?;
                request.own.push(Dependency::Match { spec, text, place: None });
            } else {
                request.own.push(dependency.clone());
            }
            own_names.insert(name);
        }
        if prune {
            return Ok(request);
        }
        for (name, text) in open.requested.iter().filter(|(name, _)| !own_names.contains(*name)) {
            let spec = spec::parse_match_spec(text, None).or_else(|_| bare(name))?;
            request.held.push(Dependency::Match { spec, text: text.clone(), place: None });
            request.carried.insert(name.clone());
        }
        let asked: BTreeSet<String> = open.requested.keys().cloned().chain(own_names.iter().cloned()).collect();
        request.loose = unreached(&open.known, &asked);
        request.carried.extend(installed.difference(&own_names).cloned());
        Ok(request)
    }

    /// Whether all packages are to be updated.
    fn is_everything(&self, mode: Mode, prepared: &resolve::Prepared) -> bool {
        matches!(mode, Mode::Update { prune: false }) && self.named.is_empty() && self.own.is_empty() && prepared.pip.is_none()
    }

    /// Solves with everything installed kept in, then, if that cannot be, with what was asked for and what stands alone.
    #[allow(clippy::too_many_arguments)]
    async fn solve(
        &self,
        mode: Mode,
        open: &Open,
        prepared: &mut resolve::Prepared,
        inputs: &Inputs,
        settings: &Settings,
        session: &Session,
        progress: Arc<dyn Progress>,
    ) -> Result<Resolved> {
        if prepared.spec.explicit.is_some() {
            return resolve::resolve(prepared, Vec::new(), Favor::Newest, inputs, settings, session, progress).await;
        }
        let installed: Vec<RepoDataRecord> = open.known.iter().map(|known| known.record.repodata_record.clone()).collect();
        let everything = self.is_everything(mode, prepared);
        let favor = match mode {
            Mode::Update { prune: true } => Favor::Locked,
            _ if everything => Favor::Newest,
            _ => Favor::AllBut(self.named.clone()),
        };
        // Moving Python takes every other package of it along, and hides what pip installed: only on demand.
        if !self.explicit_python
            && let Some(python) = installed.iter().find(|record| record.package_record.name.as_normalized() == "python")
            && let Some((major, minor)) = python.package_record.version.as_major_minor()
        {
            prepared.pinned.push(solve::PinnedSpec {
                spec: spec::parse_match_spec(&format!("python {major}.{minor}.*"), None)?,
                source: "the Python of the environment (to move it: tare install python=X.Y)".to_owned(),
            });
        }
        let given = std::mem::take(&mut prepared.spec.dependencies);
        let with = |names: &BTreeSet<String>| -> Result<Vec<Dependency>> {
            let mut all: Vec<Dependency> = self.own.iter().chain(&self.held).cloned().collect();
            let mut known: BTreeSet<String> = all.iter().filter_map(dependency_name).collect();
            for name in names {
                if known.insert(name.clone()) {
                    all.push(Dependency::Match { spec: bare(name)?, text: name.clone(), place: None });
                }
            }
            Ok(all)
        };
        let every: BTreeSet<String> = open.known.iter().map(|known| name_text(known.name())).collect();
        let prune = mode == Mode::Update { prune: true };
        let first = if everything || prune { with(&self.loose)? } else { with(&every)? };
        let last = with(&self.loose)?;
        let again = first.len() != last.len();
        prepared.spec.dependencies = first;
        let mut resolved = resolve::resolve(prepared, installed.clone(), favor.clone(), inputs, settings, session, progress.clone()).await;
        if again && resolved.as_ref().is_err_and(|error| error.kind() == Kind::Unsatisfiable) {
            prepared.spec.dependencies = last;
            resolved = resolve::resolve(prepared, installed, favor, inputs, settings, session, progress).await;
        }
        prepared.spec.dependencies = given;
        resolved
    }
}

fn dependency_name(dependency: &Dependency) -> Option<String> {
    match dependency {
        Dependency::Match { spec, .. } => spec.name.as_exact().map(name_text),
        Dependency::Package { .. } => None,
    }
}

/// Removes packages, those that need them, and those that nothing else needs. Nothing is solved, so no channel is asked.
///
/// `names`: match specs of installed conda packages, or names of Python packages that no conda package brought (`pypi::NAME` where a conda package has
/// the same name). `prune`: also remove what only they needed.
///
/// # Errors
/// As for [`change`]; a package that is not installed.
pub async fn remove(names: &[String], prune: bool, options: &Options, settings: &Settings, progress: Arc<dyn Progress>) -> Result<Outcome> {
    let path = crate::prefix::locate(&options.which, &create::places(settings))?;
    let mut open = open(&path, options, &*progress).await?;
    let mut gone: BTreeSet<String> = BTreeSet::new();
    let mut gone_python: BTreeSet<String> = BTreeSet::new();
    for text in names {
        if let Some(name) = text.strip_prefix("pypi::") {
            let name = crate::prefix::normalize(name.trim());
            if !open.python.iter().any(|installed| installed.name == name) {
                return Err(not_installed(&open, &name));
            }
            gone_python.insert(name);
            continue;
        }
        let spec = spec::parse_match_spec(text, None)?;
        let name = spec.name.as_exact().map(name_text).ok_or_else(|| Error::usage(format!("`{text}` does not name a package")))?;
        use rattler_conda_types::Matches;
        let python = crate::prefix::normalize(&name);
        let is_python = open.python.iter().any(|installed| installed.name == python);
        match open.known.iter().find(|known| name_text(known.name()) == name) {
            Some(known) if spec.matches(&known.record.repodata_record) => {
                if is_python {
                    progress.note(&format!("`{name}` means the conda package; the Python package of that name is `pypi::{python}`"));
                }
                gone.insert(name);
            }
            Some(known) => {
                return Err(Error::failure(format!("`{text}` is not in the environment"))
                    .because(format!("it has {} {}", name, known.record.repodata_record.package_record.version)));
            }
            None if is_python => {
                gone_python.insert(python);
            }
            None => return Err(not_installed(&open, &name)),
        }
    }
    let before = unreached(&open.known, &open.requested.keys().cloned().collect());
    let mut needing: Vec<String> = Vec::new();
    loop {
        let more: Vec<String> = open
            .known
            .iter()
            .filter(|known| !gone.contains(known.name().as_normalized()))
            .filter(|known| {
                let depends = &known.record.repodata_record.package_record.depends;
                depends.iter().filter_map(|depend| depend_name(depend)).any(|depend| gone.contains(&depend))
            })
            .map(|known| name_text(known.name()))
            .collect();
        if more.is_empty() {
            break;
        }
        needing.extend(more.iter().cloned());
        gone.extend(more);
    }
    let python = open.python_version();
    let mut requested = open.requested.clone();
    requested.retain(|name, _| !gone.contains(name));
    if prune {
        let left: Vec<Known> = open.known.iter().filter(|known| !gone.contains(known.name().as_normalized())).cloned().collect();
        let mut asked: BTreeSet<String> = requested.keys().cloned().collect();
        // What stood alone before was put there by someone who did not say why: it stays, with what it needs.
        asked.extend(before.into_iter().filter(|name| !gone.contains(name)));
        // So does what Python packages that stay need of conda packages.
        let needs = installed::all_needs(open.python.iter().filter(|installed| !gone_python.contains(&installed.name)), &python);
        asked.extend(left.iter().filter(|known| !known.brings().is_disjoint(&needs)).map(|known| name_text(known.name())));
        if open.python.iter().any(|installed| !gone_python.contains(&installed.name)) {
            asked.insert("python".to_owned());
        }
        gone.extend(unreached(&left, &asked));
    }
    if gone.contains("python") {
        // Without it their folder is nobody's.
        let all: Vec<&Installed> = open.python.iter().filter(|installed| !gone_python.contains(&installed.name)).collect();
        needing.extend(all.iter().map(|installed| installed.qualified()));
        gone_python.extend(all.into_iter().map(|installed| installed.name.clone()));
    }
    // The distributions that go: those named, and those of conda packages that no other package brings.
    let mut lost = gone_python.clone();
    for known in open.known.iter().filter(|known| gone.contains(known.name().as_normalized())) {
        lost.extend(known.brings());
    }
    let python_needing: Vec<String> = installed::dependents(&open.python, &lost, &python).into_iter().collect();
    needing.extend(python_needing.iter().map(|name| format!("pypi::{name}")));
    gone_python.extend(python_needing);
    if prune {
        gone_python.extend(installed::unneeded(&open.python, &gone_python, &python));
    }
    if !needing.is_empty() {
        needing.sort();
        let verb = if options.dry_run { "would be" } else { "are" };
        progress.warn(&format!("{verb} removed too, because they need what is removed: {}", apply::quoted_list(&needing)), &[]);
    }
    let unlisted = open.python.iter().find(|installed| gone_python.contains(&installed.name) && installed.files.is_none());
    if let Some(installed) = unlisted {
        return Err(Error::failure(format!("it is not known which files are those of `{}`", installed.name))
            .because(format!("`{}` has no `RECORD` that can be read", installed.info.display()))
            .hint(format!("leave it to the tool that installed it: tare run python -m pip uninstall {}", installed.name)));
    }
    let final_records: Vec<RepoDataRecord> = open
        .known
        .iter()
        .filter(|known| !gone.contains(known.name().as_normalized()))
        .map(|known| known.record.repodata_record.clone())
        .collect();
    let mut plan = ChangePlan::new(&open, &final_records, &BTreeSet::new())?;
    plan.remove_specs = open.requested.keys().filter(|name| gone.contains(*name)).cloned().collect();
    plan.requested = requested;
    plan.same_input = true;
    let (unlink, keep) = open.python.iter().cloned().partition(|installed| gone_python.contains(&installed.name));
    plan.pypi = installed::Changes { keep, unlink, link: Vec::new() };
    if options.dry_run || plan.is_nothing(&open) {
        return Ok(Outcome { plan, changed: None });
    }
    let session = Session::open(settings, progress.clone())?;
    let link = unsolved(&plan, &open, options)?;
    let changed = run(&plan, &mut open, link, &session, settings, progress).await?;
    Ok(Outcome { plan, changed: Some(changed) })
}

/// Adds Python packages whose wheels are at hand, or replaces other versions of them. Nothing is solved and no conda package changes.
///
/// # Errors
/// As for [`change`]; there is no Python in the environment, or a wheel does not fit it.
pub async fn add_wheels(wheels: &[ReadyWheel], options: &Options, settings: &Settings, progress: Arc<dyn Progress>) -> Result<Outcome> {
    let path = crate::prefix::locate(&options.which, &create::places(settings))?;
    let mut open = open(&path, options, &*progress).await?;
    let records: Vec<RepoDataRecord> = open.known.iter().map(|known| known.record.repodata_record.clone()).collect();
    let mut plan = ChangePlan::new(&open, &records, &BTreeSet::new())?;
    plan.same_input = true;
    plan.pypi = installed::Changes::towards(open.python.clone(), wheels, false);
    if options.dry_run || plan.is_nothing(&open) {
        return Ok(Outcome { plan, changed: None });
    }
    let session = Session::open(settings, progress.clone())?;
    let link = unsolved(&plan, &open, options)?;
    let changed = run(&plan, &mut open, link, &session, settings, progress).await?;
    Ok(Outcome { plan, changed: Some(changed) })
}

/// No single input and no lock describes the environment any more.
fn forget_input(facts: &mut serde_json::Map<String, serde_json::Value>) {
    facts.insert("input_digest".to_owned(), serde_json::Value::Null);
    facts.remove("lock");
}

/// What to link for a plan that nothing was solved for.
fn unsolved(plan: &ChangePlan, open: &Open, options: &Options) -> Result<install::Plan> {
    let subdir = open.prefix.subdir().ok_or_else(|| Error::failure("the platform of the environment cannot be told"))?;
    let mut link = install::Plan::new(open.prefix.path(), subdir, plan.link.clone());
    link.requested = plan.requested_specs();
    link.command.clone_from(&options.command);
    link.cancel = options.cancel.clone();
    // As the rest of the environment.
    link.compile = !options.no_compile && open.stamp.as_ref().is_some_and(|stamp| stamp.compiled);
    link.metadata = open.stamp.as_ref().map_or(serde_json::Value::Null, |stamp| stamp.metadata.clone());
    // tare's own tooling is part of no input and no lock.
    let only_tooling = plan.link.is_empty()
        && plan.unlink.is_empty()
        && plan.pypi.link.iter().all(|ready| ready.record.is_tooling())
        && plan.pypi.unlink.iter().all(Installed::is_tooling);
    if let Some(facts) = link.metadata.as_object_mut().filter(|_| !only_tooling) {
        forget_input(facts);
        requests::forget(facts, &plan.pypi);
    }
    Ok(link)
}

fn not_installed(open: &Open, name: &str) -> Error {
    let mut error = Error::failure(format!("`{name}` is not in the environment `{}`", open.prefix.path().display()));
    let near = open
        .known
        .iter()
        .map(|known| (strsim::jaro_winkler(known.name().as_normalized(), name), known))
        .filter(|(score, _)| *score > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0));
    if let Some((_, known)) = near {
        error = error.hint(format!("did you mean `{}`?", known.name().as_normalized()));
    }
    let python = crate::prefix::normalize(name);
    if open.python.iter().any(|installed| installed.name == python) {
        return error.because("it is a Python package that no conda package brought").hint(format!("to remove it: tare remove {python}"));
    }
    error
}

/// Refuses names that are not installed; for `update`.
///
/// # Errors
/// A name that is not there.
fn refuse_absent(open: &Open, specs: &[String]) -> Result<()> {
    for text in specs {
        if let Some(requirement) = text.trim().strip_prefix("pypi::") {
            if let Some(name) = crate::export::requirement_name(requirement)
                && !open.python.iter().any(|installed| installed.name == name)
            {
                return Err(not_installed(open, &name).hint(format!("to add it: tare install 'pypi::{name}'")));
            }
            continue;
        }
        let spec = spec::parse_match_spec(text, None)?;
        if let Some(name) = spec.name.as_exact()
            && !open.known.iter().any(|known| known.name() == name)
        {
            return Err(not_installed(open, name.as_normalized()).hint(format!("to add it: tare install {}", name.as_normalized())));
        }
    }
    Ok(())
}

/// The environment of `path` must not be the active one.
fn refuse_active(path: &Path, what: &str) -> Result<()> {
    let active = std::env::var_os("CONDA_PREFIX").map(PathBuf::from);
    if active.is_some_and(|active| same_place(&active, path)) {
        return Err(Error::failure(format!("cannot {what} the active environment `{}`", path.display()))
            .hint("deactivate it first: conda deactivate, or open another shell"));
    }
    Ok(())
}
