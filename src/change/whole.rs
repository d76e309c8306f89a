//! Whole environments: copies, new names, removal.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rattler_conda_types::{MatchSpec, RepoDataRecord, Subdir};
use serde::{Deserialize, Serialize};

use super::apply::{self, Changed, Job, Known};
use super::{Lost, Options, lock, read_known, refuse_active, requested_of};
use crate::channel::Session;
use crate::config::Settings;
use crate::create;
use crate::error::{Error, Result};
use crate::install::swap;
use crate::install::{self, ExistingEnvironment, Plan, PrefixLock};
use crate::prefix::{Prefix, Which};
use crate::pypi::PypiPlan;
use crate::pypi::fetch::WheelFetcher;
use crate::pypi::installed::{self, Installed};
use crate::report::Progress;

/// The file in the new environment of a rename that tells it from any other.
const MARKER: &str = "renamed-from";

/// A rename that is under way: `.OLD.tare-rename` beside the old environment, written before the new one appears.
#[derive(Debug, Serialize, Deserialize)]
struct RenameJournal {
    /// The new path.
    to: PathBuf,
    /// What the marker in the new environment holds.
    id: String,
}

/// What a rename did.
#[derive(Debug, Clone, Serialize)]
pub struct Renamed {
    /// Where the environment was.
    pub from: PathBuf,
    /// Where it is.
    pub to: PathBuf,
    /// How it was made there; `None` if an interrupted run had done that.
    pub made: Option<Changed>,
}

/// The environment that `text` names: a path if it looks like one, else a name.
pub fn named(text: &str) -> Which {
    if text.contains(['/', '\\']) || text == "." || text == ".." {
        Which { name: None, prefix: Some(PathBuf::from(text)) }
    } else {
        Which { name: Some(text.to_owned()), prefix: None }
    }
}

/// Everything needed to make `source` again at another place.
struct Source {
    prefix: Prefix,
    known: Vec<Known>,
    requested: Vec<MatchSpec>,
    subdir: Subdir,
    metadata: serde_json::Value,
}

fn read_source(path: &Path) -> Result<Source> {
    let prefix = Prefix::open(path)?;
    let known = read_known(&prefix)?;
    let requested = requested_of(&prefix, &known)?;
    let requested = requested.values().filter_map(|text| crate::spec::parse_match_spec(text, None).ok()).collect();
    let metadata = prefix.metadata()?;
    let subdir = prefix.subdir().ok_or_else(|| Error::failure("the platform of the environment cannot be told"))?;
    Ok(Source { prefix, known, requested, subdir, metadata })
}

fn link_plan(source: &Source, to: &Path, options: &Options, settings: &Settings) -> Result<Plan> {
    let records: Vec<RepoDataRecord> = source.known.iter().map(|known| known.record.repodata_record.clone()).collect();
    let mut plan = Plan::new(to, source.subdir, records);
    plan.link_mode = crate::create::link_mode(options.link_mode, settings)?;
    plan.requested.clone_from(&source.requested);
    plan.command.clone_from(&options.command);
    plan.compile = settings.compile.value && !options.no_compile;
    // They lie side by side in the source, so they may in the copy.
    plan.clobber = true;
    plan.external_links = install::ExternalLinks::Allow;
    plan.concurrency = settings.concurrency.value;
    plan.cancel = options.cancel.clone();
    plan.metadata = source.metadata.clone();
    Ok(plan)
}

/// The Python packages of a copy: those whose wheels are in the cache are linked anew (put into `plan`), the files of the others are copied. Returns
/// what is copied and what is linked anew.
async fn python_again(
    source: &Source,
    plan: &mut Plan,
    session: &Session,
    progress: &Arc<dyn Progress>,
) -> Result<(Vec<Installed>, Vec<Installed>)> {
    let all = installed::read(&source.prefix);
    let version = crate::pypi::install::python_version(plan.records.iter().map(|record| &record.package_record));
    let Some(version) = version.filter(|_| all.iter().any(Installed::is_ours)) else { return Ok((all, Vec::new())) };
    let fetcher = WheelFetcher {
        cache: &session.package_cache,
        client: session.client.clone(),
        check: plan.cache_check,
        concurrency: plan.concurrency,
        progress: progress.clone(),
        cancel: plan.cancel.clone(),
    };
    let (mut keep, mut again, mut wheels) = (Vec::new(), Vec::new(), Vec::new());
    for installed in all {
        let ready = installed.tare.as_ref().map(crate::pypi::TareRecord::ready);
        match ready {
            Some(ready) if fetcher.present(&ready).await? => {
                wheels.push(ready);
                again.push(installed);
            }
            _ => keep.push(installed),
        }
    }
    if !wheels.is_empty() {
        plan.pypi = Some(PypiPlan { wheels, python: version, engine: None, clobber: true });
    }
    Ok((keep, again))
}

/// Locks two environments, in an order that all agree on. The locks come in the order of the arguments.
async fn lock_both(a: &Path, b: &Path, options: &Options, progress: &dyn Progress) -> Result<(PrefixLock, PrefixLock)> {
    if a < b {
        let first = lock(a, options, progress).await?;
        let second = lock(b, options, progress).await?;
        Ok((first, second))
    } else {
        let second = lock(b, options, progress).await?;
        let first = lock(a, options, progress).await?;
        Ok((first, second))
    }
}

fn create_parent(path: &Path) -> Result<()> {
    match path.parent() {
        Some(parent) => fs_err::create_dir_all(parent).map_err(|error| Error::io("create the folder", parent, &error)),
        None => Ok(()),
    }
}

/// Makes a copy of the environment `source` (a name or a path) at the place of `options.which`: its packages linked anew from the cache, its other
/// files copied, with its path in text files replaced. Nothing is solved.
///
/// # Errors
/// No such environment; the target is something else than absent or an empty folder; a package is neither in the cache nor where it came from.
pub async fn clone_environment(source: &str, options: &Options, settings: &Settings, progress: Arc<dyn Progress>) -> Result<Changed> {
    let places = create::places(settings);
    let from = crate::prefix::locate(&named(source), &places)?;
    let to = crate::prefix::place_for_new(&options.which, &places)?;
    if super::same_place(&from, &to) {
        return Err(Error::usage("an environment cannot be a copy of itself").hint("name another place: -n NAME or -p PATH"));
    }
    install::accept_target(&to, false, false)?;
    let session = Session::open(settings, progress.clone())?;
    Prefix::open(&from).map(drop).or_else(|error| if install::needs_recovery(&from) { Ok(()) } else { Err(error) })?;
    create_parent(&to)?;
    let (old_lock, new_lock) = lock_both(&from, &to, options, &*progress).await?;
    install::accept_target(&to, false, false)?;
    copy_to(&from, &to, vec![old_lock, new_lock], None, options, settings, &session, progress).await.map(|(changed, _)| changed)
}

#[allow(clippy::too_many_arguments)]
async fn copy_to(
    from: &Path,
    to: &Path,
    locks: Vec<PrefixLock>,
    marker: Option<(&'static str, String)>,
    options: &Options,
    settings: &Settings,
    session: &Session,
    progress: Arc<dyn Progress>,
) -> Result<(Changed, Vec<PrefixLock>)> {
    let source = read_source(from)?;
    let mut plan = link_plan(&source, to, options, settings)?;
    let (keep_python, unlink_python) = python_again(&source, &mut plan, session, &progress).await?;
    let job = Job {
        base: source.prefix.path().to_owned(),
        update_specs: plan.requested.clone(),
        plan,
        keep: Vec::new(),
        unlink: source.known,
        keep_python,
        unlink_python,
        remove_specs: Vec::new(),
        variables: None,
        marker,
        moved_from: None,
        repair: None,
    };
    apply::apply(job, locks, &session.package_cache, session.client.clone(), progress).await
}

/// Repairs an environment that was moved: its packages are linked anew for the place where it is, and its old path in the text files of nobody is
/// replaced. `None` if it was not moved.
///
/// # Errors
/// As for [`super::change`]; an environment of another tool, of which nobody knows where it was made.
pub async fn relocate_environment(options: &Options, settings: &Settings, progress: Arc<dyn Progress>) -> Result<Option<Changed>> {
    let path = crate::prefix::locate(&options.which, &create::places(settings))?;
    let mut open = super::open_anywhere(&path, options, &*progress).await?;
    if open.stamp.is_none() {
        return Err(Error::failure(format!("nobody knows where `{}` was made", open.prefix.path().display()))
            .because("tare did not make it, and other tools do not write that down")
            .hint("a copy is made for the place where it is: tare create -n NEW --clone PATH"));
    }
    let Some(from) = open.moved_from().map(Path::to_owned) else { return Ok(None) };
    if options.dry_run {
        return Ok(None);
    }
    let source = read_source(open.prefix.path())?;
    let mut plan = link_plan(&source, open.prefix.path(), options, settings)?;
    let session = Session::open(settings, progress.clone())?;
    let (keep_python, unlink_python) = python_again(&source, &mut plan, &session, &progress).await?;
    let job = Job {
        base: plan.prefix.clone(),
        update_specs: Vec::new(),
        plan,
        keep: Vec::new(),
        unlink: source.known,
        keep_python,
        unlink_python,
        remove_specs: Vec::new(),
        variables: None,
        marker: None,
        moved_from: Some(from.clone()),
        repair: None,
    };
    let locks = open.lock.take().into_iter().collect();
    let (changed, _locks) = apply::apply(job, locks, &session.package_cache, session.client.clone(), progress).await?;
    if !from.exists() {
        forget(&from);
    }
    Ok(Some(changed))
}

fn forget(prefix: &Path) {
    if let Some(home) = crate::config::home_dir()
        && let Err(error) = install::register(&home, prefix, false)
    {
        tracing::debug!("{error}");
    }
}

/// Removes a whole environment with everything in it. A symbolic link that named it goes too.
///
/// # Errors
/// No environment is there; it is frozen, active, or a mount point; the lock is held; files in it belong to no package, and they are not given up
/// ([`Options::give_up_files`]).
pub async fn remove_environment(options: &Options, settings: &Settings, progress: Arc<dyn Progress>) -> Result<PathBuf> {
    if options.which == Which::default() {
        return Err(Error::usage("no environment is named").hint("to remove all of an environment, name it: -n NAME or -p PATH"));
    }
    let path = crate::prefix::locate(&options.which, &create::places(settings))?;
    refuse_active(&path, "remove")?;
    if path.exists() {
        install::refuse_mount_point(&path)?;
    }
    if !install::needs_recovery(&path) {
        Prefix::open(&path)?;
    }
    if options.dry_run {
        if let Err(error) = refuse_to_lose_files(&path, options) {
            progress.warn(&format!("{}: {}", error.message(), error.causes().join("; ")), error.hints());
        }
        return Ok(path);
    }
    let _lock = lock(&path, options, &*progress).await?;
    let prefix = Prefix::open(&path)?;
    let existing = ExistingEnvironment { prefix: path.clone(), stamp: None, frozen: prefix.is_frozen() };
    install::refuse_frozen(&existing, options.override_frozen)?;
    refuse_to_lose_files(&path, options)?;
    swap::retire(&path)?;
    forget(&path);
    if let Some(given) = &options.which.prefix
        && std::fs::symlink_metadata(given).is_ok_and(|about| about.is_symlink())
    {
        let _ = std::fs::remove_file(given);
        forget(&std::path::absolute(given).unwrap_or_else(|_| given.clone()));
    }
    Ok(path)
}

/// conda asks before it deletes what no package brought; here nothing is asked, so it has to be said beforehand.
fn refuse_to_lose_files(prefix: &Path, options: &Options) -> Result<()> {
    let lost = Lost::with(prefix)?;
    if options.give_up_files || lost.files.is_empty() {
        return Ok(());
    }
    let mut error = Error::failure(format!("with the environment `{}` files would be lost", prefix.display()));
    for line in lost.lines() {
        error = error.because(line);
    }
    Err(error.hint("move away what you want to keep").hint("to remove the environment with all that is in it: --yes"))
}

fn journal_path(prefix: &Path) -> PathBuf {
    swap::rename_journal_path(prefix)
}

fn read_journal(from: &Path, to: &Path) -> Option<RenameJournal> {
    let journal: RenameJournal = serde_json::from_slice(&std::fs::read(journal_path(from)).ok()?).ok()?;
    (journal.to == to).then_some(journal)
}

fn marker_path(prefix: &Path) -> PathBuf {
    prefix.join(install::metadata::TARE_FOLDER).join(MARKER)
}

/// Gives the environment `from` (a name or a path) the name or path `to`: makes it there, then takes the old one away. At every moment one of the two
/// is there, complete. A name is one beside the old environment.
///
/// # Errors
/// As for [`clone_environment`] and [`remove_environment`].
pub async fn rename_environment(
    from: &Which,
    to: &str,
    options: &Options,
    settings: &Settings,
    progress: Arc<dyn Progress>,
) -> Result<Renamed> {
    let places = create::places(settings);
    let old = match (crate::prefix::locate(from, &places), &from.name) {
        (Ok(path), _) => path,
        // A rename that was stopped when all but the tidying was done.
        (Err(error), Some(name)) => {
            places.envs_dirs.iter().map(|folder| folder.join(name)).find(|path| journal_path(path).exists()).ok_or(error)?
        }
        (Err(error), None) => return Err(error),
    };
    if !old.exists() && !journal_path(&old).exists() && !install::needs_recovery(&old) {
        Prefix::open(&old)?;
    }
    let target = named(to);
    let new = match (&target.name, old.parent()) {
        (Some(name), Some(folder)) => {
            crate::prefix::validate_name(name)?;
            install::resolve_prefix(&folder.join(name))?
        }
        _ => crate::prefix::place_for_new(&target, &places)?,
    };
    if super::same_place(&old, &new) || old == new {
        return Err(Error::usage(format!("`{}` has that name already", old.display())));
    }
    refuse_active(&old, "rename")?;
    if old.exists() {
        install::refuse_mount_point(&old)?;
    }
    create_parent(&new)?;
    let session = Session::open(settings, progress.clone())?;
    let (first, second) = if old < new { (&old, &new) } else { (&new, &old) };
    let acquire = |path: &Path| {
        let path = path.to_owned();
        let progress = progress.clone();
        async move { PrefixLock::acquire(&path, &options.command, options.lock_timeout, &*progress, &options.cancel).await }
    };
    let locks = vec![acquire(first).await?, acquire(second).await?];
    install::recover(&new)?;
    swap::recover_swap(&old)?;
    let journal = read_journal(&old, &new);
    let done = journal.is_some_and(|journal| std::fs::read_to_string(marker_path(&new)).is_ok_and(|id| id == journal.id));
    let mut made = None;
    let mut held = locks;
    if !done {
        let prefix = Prefix::open(&old)?;
        let existing = ExistingEnvironment { prefix: old.clone(), stamp: None, frozen: prefix.is_frozen() };
        install::refuse_frozen(&existing, options.override_frozen)?;
        install::accept_target(&new, false, false)?;
        let id = format!("{}-{}", std::process::id(), jiff::Timestamp::now().as_nanosecond());
        let journal = RenameJournal { to: new.clone(), id: id.clone() };
        let text = serde_json::to_vec(&journal).map_err(|error| Error::failure("cannot write the journal of the rename").because(error))?;
        // A full disk would leave a part of it.
        install::metadata::write_file(&journal_path(&old), &text).inspect_err(|_| drop(std::fs::remove_file(journal_path(&old))))?;
        let copied = copy_to(&old, &new, held, Some((MARKER, id)), options, settings, &session, progress.clone()).await;
        let (changed, locks) = match copied {
            Ok(done) => done,
            Err(error) => {
                // Not while the new one may be there: then the next run finishes.
                if !marker_path(&new).exists() {
                    let _ = std::fs::remove_file(journal_path(&old));
                }
                return Err(error);
            }
        };
        made = Some(changed);
        held = locks;
    }
    if old.exists() {
        swap::retire(&old)?;
    }
    forget(&old);
    let _ = std::fs::remove_file(marker_path(&new));
    let _ = std::fs::remove_file(journal_path(&old));
    drop(held);
    Ok(Renamed { from: old, to: new, made })
}
