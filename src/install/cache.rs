//! Locks of the package cache between processes.
//!
//! Each entry belongs to one of [`SHARDS`] lock files in `PKGS/.tare-locks`. Whoever fills or replaces an entry holds its shard alone; whoever links
//! from entries holds their shards together with others; `clean` holds all of them alone. A writer never waits for a second shard, and readers take
//! theirs in ascending order, so nobody can wait in a circle.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::cancel::Cancel;
use crate::error::{Error, Result};

/// Number of lock files of a cache.
pub(crate) const SHARDS: usize = 64;

/// The folder of the lock files in a package cache.
pub(crate) const LOCK_FOLDER: &str = ".tare-locks";

/// The shard of a cache entry.
pub(crate) fn shard_of(name: &str) -> usize {
    let digest = rattler_digest::compute_bytes_digest::<rattler_digest::Sha256>(name.as_bytes());
    usize::from(digest[0]) % SHARDS
}

/// A held lock; `None` inside where the cache cannot be locked (read-only, or a file system without locks).
#[derive(Debug)]
pub(crate) struct ShardLock(#[allow(dead_code)] Option<File>);

fn open(cache: &Path, shard: usize) -> Result<Option<File>> {
    let folder = cache.join(LOCK_FOLDER);
    let path = folder.join(format!("{shard:02}"));
    let try_open = || OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let opened = match try_open() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            fs_err::create_dir_all(&folder).map_err(|error| Error::io("create the folder", &folder, &error))?;
            try_open()
        }
        // Another user's file in a shared cache.
        Err(error) if error.kind() == ErrorKind::PermissionDenied && path.exists() => File::open(&path),
        other => other,
    };
    match opened {
        Ok(file) => Ok(Some(file)),
        Err(error) if matches!(error.kind(), ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied) => Ok(None),
        Err(error) => Err(Error::io("open", &path, &error)),
    }
}

async fn lock(cache: &Path, shard: usize, shared: bool, cancel: &Cancel) -> Result<ShardLock> {
    let Some(file) = open(cache, shard)? else { return Ok(ShardLock(None)) };
    let mut pause = Duration::from_millis(1);
    loop {
        cancel.check()?;
        match if shared { file.try_lock_shared() } else { file.try_lock() } {
            Ok(()) => return Ok(ShardLock(Some(file))),
            Err(TryLockError::WouldBlock) => {
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = cancel.cancelled() => {}
                }
                pause = (pause * 2).min(Duration::from_millis(50));
            }
            Err(TryLockError::Error(_)) => return Ok(ShardLock(None)),
        }
    }
}

/// Takes the shard of the entry `name` of `cache` alone.
pub(crate) async fn lock_entry(cache: &Path, name: &str, cancel: &Cancel) -> Result<ShardLock> {
    lock(cache, shard_of(name), false, cancel).await
}

/// Takes the shards of many entries together with other readers. `entries`: cache folder and entry name.
pub(crate) async fn share_entries(entries: impl IntoIterator<Item = (PathBuf, String)>, cancel: &Cancel) -> Result<Vec<ShardLock>> {
    let wanted: BTreeSet<(PathBuf, usize)> = entries.into_iter().map(|(cache, name)| (cache, shard_of(&name))).collect();
    let mut locks = Vec::with_capacity(wanted.len());
    for (cache, shard) in wanted {
        locks.push(lock(&cache, shard, true, cancel).await?);
    }
    Ok(locks)
}

/// Takes the whole cache alone: nothing is linked from it or put into it meanwhile.
pub(crate) async fn lock_all(cache: &Path, cancel: &Cancel) -> Result<Vec<ShardLock>> {
    let mut locks = Vec::with_capacity(SHARDS);
    for shard in 0..SHARDS {
        locks.push(lock(cache, shard, false, cancel).await?);
    }
    Ok(locks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn readers_share_an_entry_and_a_writer_waits_for_them() {
        let cache = tempfile::tempdir().unwrap();
        let cancel = Cancel::new();
        let entries = || [(cache.path().to_owned(), "a-1-0".to_owned())];
        let first = share_entries(entries(), &cancel).await.unwrap();
        let second = share_entries(entries(), &cancel).await.unwrap();
        let writer = lock_entry(cache.path(), "a-1-0", &cancel);
        assert!(tokio::time::timeout(Duration::from_millis(50), writer).await.is_err());
        drop((first, second));
        let writer = lock_entry(cache.path(), "a-1-0", &cancel).await.unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(50), share_entries(entries(), &cancel)).await.is_err());
        drop(writer);
        lock_all(cache.path(), &cancel).await.unwrap();
    }
}
