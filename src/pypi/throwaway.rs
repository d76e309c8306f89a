//! A prefix with the conda half of a solution that resolvers and builds run in, and which is gone afterwards.
//!
//! It lies in the cache folder and is patched for its own path, so that nothing that runs in it can leave the path of a stage behind. Each run has a
//! folder of its own with a lock on a file in it; a folder whose lock nobody holds was left by a killed run and is removed by the next one.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rattler_conda_types::{RepoDataRecord, Subdir};

use super::Version;
use crate::channel::Session;
use crate::error::{Error, Result};
use crate::install::swap::remove_tree;
use crate::install::{self, Cancel, LinkMode, Plan};
use crate::prefix::Prefix;
use crate::report::Progress;

/// The folder of such prefixes in the cache.
pub(crate) const FOLDER: &str = "throwaway";

/// A folder of this run. Removed when dropped.
#[derive(Debug)]
pub struct WorkFolder {
    path: PathBuf,
    _lock: File,
}

impl WorkFolder {
    /// Makes one in the cache folder, and removes those of killed runs.
    ///
    /// # Errors
    /// The cache cannot be written.
    pub fn create(cache_dir: &Path) -> Result<Self> {
        let root = cache_dir.join(FOLDER);
        fs_err::create_dir_all(&root).map_err(|error| Error::io("create the folder", &root, &error))?;
        sweep(cache_dir);
        let failed = |error: std::io::Error| Error::io("create a folder in", &root, &error);
        // The lock comes first: between the two, another run would take the folder for an orphan.
        for _ in 0..20 {
            let folder = tempfile::Builder::new().prefix("").rand_bytes(8).tempdir_in(&root).map_err(failed)?;
            let file = OpenOptions::new().create(true).truncate(false).write(true).open(folder.path().join("lock"));
            let Ok(lock) = file else { continue };
            if lock.try_lock().is_err() {
                continue;
            }
            if folder.path().join("lock").exists() {
                let path = folder.keep();
                let path = std::fs::canonicalize(&path).unwrap_or(path);
                for name in ["tmp", "run"] {
                    let inner = path.join(name);
                    fs_err::create_dir_all(&inner).map_err(|error| Error::io("create the folder", &inner, &error))?;
                }
                return Ok(WorkFolder { path, _lock: lock });
            }
        }
        Err(Error::failure(format!("cannot keep a folder in `{}`", root.display())).because("other runs remove it"))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// For temporary files of children.
    pub fn tmp(&self) -> PathBuf {
        self.path.join("tmp")
    }

    /// An empty folder to run in, so that no project file lies in it.
    pub fn run_dir(&self) -> PathBuf {
        self.path.join("run")
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        let _ = remove_tree(&self.path);
    }
}

/// Removes the folders of runs that are no more. Returns how many.
pub(crate) fn sweep(cache_dir: &Path) -> usize {
    let mut removed = 0;
    for path in abandoned(cache_dir) {
        if remove_tree(&path).is_ok() {
            removed += 1;
        }
    }
    removed
}

/// The folders of runs that are no more.
pub(crate) fn abandoned(cache_dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(cache_dir.join(FOLDER)).into_iter().flatten().flatten() {
        let path = entry.path();
        let held = match OpenOptions::new().write(true).open(path.join("lock")) {
            Ok(file) => matches!(file.try_lock(), Err(TryLockError::WouldBlock)),
            // No lock file yet: it may be made this very moment.
            Err(_) => {
                entry.metadata().and_then(|about| about.modified()).is_ok_and(|time| time.elapsed().is_ok_and(|age| age.as_secs() < 60))
            }
        };
        if !held {
            found.push(path);
        }
    }
    found
}

/// A prefix that is thrown away.
#[derive(Debug)]
pub struct Throwaway {
    prefix: PathBuf,
    python: PathBuf,
}

impl Throwaway {
    /// Links `records` into a prefix called `name` in `work`. It is not registered, nothing is compiled, and no link scripts run.
    ///
    /// # Errors
    /// As [`install::create_with`]; no Python among the records.
    #[allow(clippy::too_many_arguments)]
    pub async fn make(
        work: &WorkFolder,
        name: &str,
        records: Vec<RepoDataRecord>,
        subdir: Subdir,
        session: &Session,
        concurrency: usize,
        progress: Arc<dyn Progress>,
        cancel: &Cancel,
    ) -> Result<Self> {
        let prefix = work.path().join(name);
        let python = install::link::python_of(records.iter().map(|record| &record.package_record), subdir)?
            .ok_or_else(|| no_python("the conda half has no Python"))?;
        let mut plan = Plan::new(&prefix, subdir, records);
        plan.compile = false;
        plan.register = false;
        plan.clobber = true;
        plan.external_links = install::ExternalLinks::Allow;
        plan.link_mode = LinkMode::Auto;
        plan.concurrency = concurrency;
        plan.cancel = cancel.clone();
        // What the installation of the environment itself will say is not said twice.
        let quiet = Arc::new(Quiet(progress));
        install::create_with(&plan, &session.package_cache, session.client.clone(), quiet).await?;
        Ok(Throwaway { python: prefix.join(python.path()), prefix })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.prefix
    }

    /// Its interpreter.
    pub fn python(&self) -> &Path {
        &self.python
    }

    /// As an environment.
    ///
    /// # Errors
    /// It is gone.
    pub fn open(&self) -> Result<Prefix> {
        Prefix::open(&self.prefix)
    }
}

/// The error of a section without an interpreter.
pub(super) fn no_python(why: &str) -> Error {
    Error::usage("the `pip:` section needs Python").because(why).hint("add `python` to the dependencies")
}

/// The version of the interpreter among `records`, and whether it is free-threaded.
pub fn python_version<'a>(records: impl Iterator<Item = &'a RepoDataRecord>) -> Option<(Version, bool)> {
    let record = records.map(|record| &record.package_record).find(|record| record.name.as_normalized() == "python")?;
    let version = record.version.to_string().parse().ok()?;
    // `…_0_cp313t`: the ABI stands at the end of the build string.
    let build = record.build.to_string();
    let abi = build.rsplit('_').next().unwrap_or_default();
    Some((version, abi.starts_with("cp3") && abi.ends_with('t')))
}

/// Progress without remarks.
struct Quiet(Arc<dyn Progress>);

impl Progress for Quiet {
    fn note(&self, _: &str) {}
    fn warn(&self, _: &str, _: &[String]) {}
    fn start(&self, phase: crate::report::Phase, label: &str, total: Option<u64>) -> crate::report::TaskId {
        self.0.start(phase, label, total)
    }
    fn set_total(&self, task: crate::report::TaskId, total: u64) {
        self.0.set_total(task, total);
    }
    fn advance_to(&self, task: crate::report::TaskId, position: u64) {
        self.0.advance_to(task, position);
    }
    fn finish(&self, task: crate::report::TaskId) {
        self.0.finish(task);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_the_dead_are_swept_and_those_of_the_living_stay() {
        let cache = tempfile::tempdir().unwrap();
        let living = WorkFolder::create(cache.path()).unwrap();
        let dead = cache.path().join(FOLDER).join("dead");
        std::fs::create_dir_all(dead.join("env/bin")).unwrap();
        std::fs::write(dead.join("lock"), "").unwrap();
        assert_eq!(sweep(cache.path()), 1);
        assert!(living.tmp().is_dir() && !dead.exists());
        let path = living.path().to_owned();
        drop(living);
        assert!(!path.exists());
    }
}
