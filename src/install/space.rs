//! Is there room? Asked before the work, so that a full disk is a message and not a half-done job.

use std::path::Path;

use crate::error::{Error, Result};

/// Free bytes for this user on the file system of `path` (or of its nearest existing parent); `None` if that cannot be told.
pub(crate) fn free_bytes(path: &Path) -> Option<u64> {
    let existing = path.ancestors().find(|path| path.exists())?;
    #[cfg(unix)]
    {
        let stat = rustix::fs::statvfs(existing).ok()?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _ = existing;
        None
    }
}

/// Free inodes; `None` if the file system does not count them.
pub(crate) fn free_files(path: &Path) -> Option<u64> {
    let existing = path.ancestors().find(|path| path.exists())?;
    #[cfg(unix)]
    {
        let stat = rustix::fs::statvfs(existing).ok()?;
        (stat.f_files > 0).then_some(stat.f_favail)
    }
    #[cfg(not(unix))]
    {
        let _ = existing;
        None
    }
}

/// The sum of sizes that a channel claims, which may be anything.
pub(crate) fn total(sizes: impl IntoIterator<Item = u64>) -> u64 {
    sizes.into_iter().fold(0, u64::saturating_add)
}

/// Bytes for people: `1.5 GiB`.
pub(crate) fn human(bytes: u64) -> String {
    crate::gpu::human_to(bytes, 1)
}

/// Refuses if `path`'s file system has less than `needed` bytes free. `what` needs them; `hint` is what to do.
pub(crate) fn require(path: &Path, needed: u64, what: &str, hint: &str) -> Result<()> {
    match free_bytes(path) {
        Some(free) if free < needed => Err(not_enough(path, needed, free, what, hint)),
        _ => Ok(()),
    }
}

pub(crate) fn not_enough(path: &Path, needed: u64, free: u64, what: &str, hint: &str) -> Error {
    Error::failure(format!("not enough space on the file system of `{}`", path.display()))
        .because(format!("{what} need {}, and {} are free", human(needed), human(free)))
        .hint(hint.to_owned())
        .hint("tare clean --packages removes cached packages that no environment uses")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_cannot_fit_is_refused_with_both_numbers() {
        let folder = tempfile::tempdir().unwrap();
        require(folder.path(), 1, "one byte", "x").unwrap();
        require(&folder.path().join("not/yet/there"), 1, "one byte", "x").unwrap();
        let error = not_enough(Path::new("/x"), 3 << 30, 1536, "the packages", "choose another place");
        assert_eq!(error.to_string(), "not enough space on the file system of `/x`: the packages need 3.0 GiB, and 1.5 KiB are free");
        assert!(require(folder.path(), u64::MAX, "all", "x").is_err());
        assert!(free_files(folder.path()).is_none_or(|files| files > 0));
    }
}
