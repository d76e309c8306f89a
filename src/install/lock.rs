//! The lock of a prefix: a file `.NAME.lock` beside it, held with an advisory file lock.
//!
//! The file lies beside the prefix and never inside it, so that swapping the prefix does not leave waiters on a file that
//! no longer has a name. What a killed process leaves behind is an unlocked file, which is no obstacle.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::cancel::Cancel;
use crate::error::{Error, Result};
use crate::report::Progress;

/// How long a command waits for the lock of a prefix unless told otherwise.
pub const DEFAULT_LOCK_TIMEOUT: Duration = Duration::from_secs(300);

/// Who holds a lock, as written in the lock file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Process id on `host`.
    pub pid: u32,
    /// Name of the machine; two machines may share a file system.
    pub host: String,
    /// The command line, secrets removed.
    pub command: String,
}

impl Holder {
    /// This process, running `command`.
    pub fn this(command: &[String]) -> Self {
        Holder { pid: std::process::id(), host: host_name(), command: super::metadata::redacted_command(command) }
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} on `{}` (`{}`)", self.pid, self.host, self.command)
    }
}

fn host_name() -> String {
    #[cfg(unix)]
    {
        rustix::system::uname().nodename().to_string_lossy().into_owned()
    }
    #[cfg(not(unix))]
    {
        std::env::var("COMPUTERNAME").unwrap_or_else(|_| "this machine".into())
    }
}

/// The held lock of one prefix. Dropping it releases the lock and removes the file.
#[derive(Debug)]
pub struct PrefixLock {
    // `None` where the file system cannot lock.
    file: Option<File>,
    path: PathBuf,
}

enum Attempt {
    Held(PrefixLock),
    Busy(Option<Holder>),
}

impl PrefixLock {
    /// The lock file of `prefix`: `.NAME.lock` in the same folder.
    pub fn path_for(prefix: &Path) -> PathBuf {
        super::target::sibling(prefix, ".lock")
    }

    /// Waits for the lock of `prefix`, whose parent folder must exist, and takes it. `timeout`: [`DEFAULT_LOCK_TIMEOUT`] if none.
    ///
    /// # Errors
    /// The lock file cannot be written; the holder (named in the message) did not let go in time; cancelled.
    pub async fn acquire(
        prefix: &Path,
        command: &[String],
        timeout: Option<Duration>,
        progress: &dyn Progress,
        cancel: &Cancel,
    ) -> Result<Self> {
        let started = Instant::now();
        let timeout = timeout.unwrap_or(DEFAULT_LOCK_TIMEOUT);
        let mut told = false;
        loop {
            cancel.check()?;
            match Self::attempt(prefix, command, progress)? {
                Attempt::Held(lock) => return Ok(lock),
                Attempt::Busy(holder) => {
                    let who = holder.map_or_else(|| "another process".to_owned(), |holder| holder.to_string());
                    if started.elapsed() >= timeout {
                        return Err(busy(prefix, &who, timeout));
                    }
                    // A holder that only just began is usually done soon.
                    if !told && started.elapsed() >= Duration::from_millis(500) {
                        progress.note(&format!("waiting for {who} to finish with `{}`", prefix.display()));
                        told = true;
                    }
                    let left = timeout.saturating_sub(started.elapsed());
                    tokio::select! {
                        () = tokio::time::sleep(left.min(Duration::from_millis(50))) => {}
                        () = cancel.cancelled() => {}
                    }
                }
            }
        }
    }

    fn attempt(prefix: &Path, command: &[String], progress: &dyn Progress) -> Result<Attempt> {
        let path = Self::path_for(prefix);
        loop {
            let mut file = match OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path) {
                Ok(file) => file,
                // Another user's lock file: locking works on a read-only handle as well.
                Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied && path.exists() => {
                    File::open(&path).map_err(|error| lock_error(&path, &error))?
                }
                Err(error) => return Err(lock_error(&path, &error)),
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let mut text = String::new();
                    let holder = file.read_to_string(&mut text).ok().and_then(|_| serde_json::from_str(&text).ok());
                    return Ok(Attempt::Busy(holder));
                }
                Err(TryLockError::Error(error)) if cannot_lock(&error) => {
                    progress.warn(
                        &format!("the file system of `{}` does not support locks, so nothing keeps other processes out", path.display()),
                        &[],
                    );
                    return Ok(Attempt::Held(PrefixLock { file: None, path }));
                }
                Err(TryLockError::Error(error)) => return Err(lock_error(&path, &error)),
            }
            // The previous holder may have removed the file between our opening and locking it.
            if !same_file(&file, &path) {
                continue;
            }
            let holder = serde_json::to_string(&Holder::this(command)).unwrap_or_default();
            // Only to name the holder in others' messages: a failure is no reason to stop.
            let _ = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(holder.as_bytes()));
            return Ok(Attempt::Held(PrefixLock { file: Some(file), path }));
        }
    }

    /// The path of the lock file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for PrefixLock {
    fn drop(&mut self) {
        // Removed while still locked: whoever opened it in the meantime notices (`same_file`) and starts over.
        if let Some(file) = &self.file
            && same_file(file, &self.path)
        {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn busy(prefix: &Path, who: &str, timeout: Duration) -> Error {
    Error::failure(format!("`{}` is in use", prefix.display()))
        .because(format!("{who} still held its lock after {} s", timeout.as_secs()))
        .hint("wait for it to finish, or wait longer: --lock-timeout SECONDS")
}

fn lock_error(path: &Path, error: &std::io::Error) -> Error {
    let made = Error::io("create the lock file", path, error);
    match error.kind() {
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
            made.hint("tare needs to write in the folder that holds the environment: choose another one with -p")
        }
        _ => made,
    }
}

/// Errors with which file systems say that they have no locks.
fn cannot_lock(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::Unsupported
        || matches!(error.raw_os_error(), Some(37 /* ENOLCK */ | 38 /* ENOSYS */ | 95 /* EOPNOTSUPP */))
}

fn same_file(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        match (file.metadata(), std::fs::symlink_metadata(path)) {
            (Ok(open), Ok(named)) => open.dev() == named.dev() && open.ino() == named.ino(),
            _ => false,
        }
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        path.exists()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Silent;

    fn command() -> Vec<String> {
        ["tare", "create", "-c", "https://conda.anaconda.org/t/tk-secret/chan"].map(String::from).to_vec()
    }

    #[tokio::test]
    async fn a_second_process_waits_and_is_told_who_holds_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("env");
        let held = PrefixLock::acquire(&prefix, &command(), None, &Silent, &Cancel::new()).await.unwrap();
        assert!(folder.path().join(".env.lock").exists());
        let error = PrefixLock::acquire(&prefix, &command(), Some(Duration::from_millis(120)), &Silent, &Cancel::new()).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("is in use") && text.contains(&format!("process {}", std::process::id())), "{text}");
        assert!(!text.contains("tk-secret"), "{text}");
        drop(held);
        assert!(!folder.path().join(".env.lock").exists());
        PrefixLock::acquire(&prefix, &command(), Some(Duration::ZERO), &Silent, &Cancel::new()).await.unwrap();
    }

    #[tokio::test]
    async fn what_a_killed_process_leaves_is_no_obstacle() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("env");
        std::fs::write(folder.path().join(".env.lock"), r#"{"pid":1,"host":"elsewhere","command":"tare"}"#).unwrap();
        PrefixLock::acquire(&prefix, &command(), Some(Duration::ZERO), &Silent, &Cancel::new()).await.unwrap();
    }

    #[tokio::test]
    async fn many_takers_of_one_lock_take_turns() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("env");
        let inside = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let tasks = (0..16).map(|_| {
            let (prefix, inside) = (prefix.clone(), inside.clone());
            tokio::spawn(async move {
                let lock = PrefixLock::acquire(&prefix, &[], None, &Silent, &Cancel::new()).await.unwrap();
                assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                tokio::time::sleep(Duration::from_millis(2)).await;
                inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                drop(lock);
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
    }

    #[tokio::test]
    async fn cancelling_ends_the_wait() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("env");
        let cancel = Cancel::new();
        let _held = PrefixLock::acquire(&prefix, &[], None, &Silent, &cancel).await.unwrap();
        let waiting = {
            let (prefix, cancel) = (prefix.clone(), cancel.clone());
            tokio::spawn(async move { PrefixLock::acquire(&prefix, &[], None, &Silent, &cancel).await.map(drop) })
        };
        tokio::time::sleep(Duration::from_millis(20)).await;
        cancel.cancel();
        assert_eq!(waiting.await.unwrap().unwrap_err().exit_code(), 130);
    }
}
