//! What lies in an environment, and taking it over into another folder.

use std::collections::{BTreeMap, HashSet};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use rayon::iter::{IndexedParallelIterator, IntoParallelRefIterator, ParallelIterator};

use crate::error::{Error, Result};
use crate::install::{Cancel, link};

/// What an entry of a folder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A folder; `empty`: nothing is in it.
    Folder { empty: bool },
    /// A regular file.
    File,
    /// A symbolic link.
    Link,
    /// A socket, a pipe or a device.
    Special,
}

/// Tells whether a file was replaced or written to since it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

/// One thing in an environment.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// Relative to the environment.
    pub path: PathBuf,
    pub kind: Kind,
    pub identity: Identity,
    /// Permission bits.
    pub mode: u32,
    /// User and group.
    pub owner: (u32, u32),
}

/// Everything in `root` but `conda-meta`, parents before what they hold, sorted by path.
///
/// # Errors
/// A folder cannot be read: what is in it could not be taken over.
pub(super) fn survey(root: &Path) -> Result<Vec<Entry>> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let full = root.join(&folder);
        let fail = |error: std::io::Error| Error::io("read the folder", &full, &error);
        for entry in std::fs::read_dir(&full).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let path = folder.join(entry.file_name());
            if path == Path::new("conda-meta") {
                continue;
            }
            let about = match std::fs::symlink_metadata(entry.path()) {
                Ok(about) => about,
                // Running programs come and go.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(Error::io("look at", &entry.path(), &error)),
            };
            let kind = if about.is_symlink() {
                Kind::Link
            } else if about.is_dir() {
                folders.push(path.clone());
                let empty = std::fs::read_dir(entry.path()).map(|mut entries| entries.next().is_none()).unwrap_or(false);
                Kind::Folder { empty }
            } else if about.is_file() {
                Kind::File
            } else {
                Kind::Special
            };
            found.push(described(path, kind, &about));
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

fn described(path: PathBuf, kind: Kind, about: &std::fs::Metadata) -> Entry {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let identity = Identity { inode: about.ino(), size: about.size(), modified: (about.mtime(), about.mtime_nsec()) };
        Entry { path, kind, identity, mode: about.mode() & 0o7777, owner: (about.uid(), about.gid()) }
    }
    #[cfg(not(unix))]
    {
        Entry { path, kind, identity: Identity { inode: 0, size: about.len(), modified: (0, 0) }, mode: 0, owner: (0, 0) }
    }
}

/// How files are taken over.
#[derive(Debug, Clone, Copy)]
pub(super) enum Taking<'a> {
    /// The very same files: the old environment goes away, and nothing writes into a file of the new one. A program that has a file open keeps
    /// writing to the file that everyone sees.
    Same,
    /// Copies, in which the path `from` becomes `to`: both environments go on to live.
    Copy {
        /// The path of the source environment.
        from: &'a str,
        /// The path of the new one.
        to: &'a str,
    },
}

/// Text files larger than this are copied as they are.
const TEXT_LIMIT: u64 = 16 << 20;

/// Creates `entries` (parents first) of `root` in `stage`. The modes of folders are set by [`finish_folders`].
///
/// # Errors
/// Something cannot be made; cancelled.
pub(super) fn take(root: &Path, stage: &Path, entries: &[&Entry], taking: Taking<'_>, cancel: &Cancel) -> Result<()> {
    for entry in entries.iter().filter(|entry| matches!(entry.kind, Kind::Folder { .. })) {
        let path = stage.join(&entry.path);
        std::fs::create_dir_all(&path).map_err(|error| Error::io("create the folder", &path, &error))?;
    }
    cancel.check()?;
    let files: Vec<&&Entry> = entries.iter().filter(|entry| !matches!(entry.kind, Kind::Folder { .. })).collect();
    files.par_iter().with_min_len(128).try_for_each(|entry| {
        if cancel.is_cancelled() {
            return cancel.check();
        }
        take_one(root, entry, &stage.join(&entry.path), taking)
    })
}

/// Creates one file or link of `root` as `to`, whose folder exists.
pub(super) fn take_one(root: &Path, entry: &Entry, to: &Path, taking: Taking<'_>) -> Result<()> {
    let from = root.join(&entry.path);
    let result = match taking {
        Taking::Same => match std::fs::hard_link(&from, to) {
            // Another user's file may not be linked, some file systems have no links at all.
            Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::StorageFull) && error.raw_os_error() != Some(122) => {
                copy(&from, to, entry, None)
            }
            other => other,
        },
        Taking::Copy { from: old, to: new } => copy(&from, to, entry, Some((old, new))),
    };
    match result {
        // Gone since the survey: a running program removed it.
        Err(error) if error.kind() == ErrorKind::NotFound && std::fs::symlink_metadata(&from).is_err() => Ok(()),
        other => other.map_err(|error| Error::io("take over", &from, &error)),
    }
}

fn copy(from: &Path, to: &Path, entry: &Entry, paths: Option<(&str, &str)>) -> std::io::Result<()> {
    match entry.kind {
        Kind::Link => {
            let target = std::fs::read_link(from)?;
            let target = match (paths, target.to_str()) {
                (Some((old, new)), Some(text)) => PathBuf::from(replaced(text, old, new).unwrap_or_else(|| text.to_owned())),
                _ => target,
            };
            #[cfg(unix)]
            return std::os::unix::fs::symlink(target, to);
            #[cfg(not(unix))]
            return Err(std::io::Error::from(ErrorKind::Unsupported));
        }
        Kind::Special => return Ok(()),
        Kind::File | Kind::Folder { .. } => {}
    }
    let about = std::fs::metadata(from)?;
    if let Some((old, new)) = paths
        && about.len() <= TEXT_LIMIT
    {
        let mut bytes = Vec::new();
        std::fs::File::open(from)?.read_to_end(&mut bytes)?;
        if let Some(text) = std::str::from_utf8(&bytes).ok().and_then(|text| replaced(text, old, new)) {
            std::fs::write(to, text)?;
            return std::fs::set_permissions(to, about.permissions());
        }
    }
    if link::reflink(from, to).is_err() {
        let _ = std::fs::remove_file(to);
        std::fs::copy(from, to)?;
    }
    std::fs::set_permissions(to, about.permissions())?;
    chown(to, entry.owner);
    if let Ok(modified) = about.modified() {
        let times = std::fs::FileTimes::new().set_modified(modified);
        // Opening for writing fails for read-only files; times are not worth a failure.
        let _ = std::fs::File::options().write(true).open(to).and_then(|file| file.set_times(times));
    }
    Ok(())
}

/// `text` with every path `old` in it replaced by `new`; `None` if there is none. `old` counts only where it ends at a path component.
pub(super) fn replaced(text: &str, old: &str, new: &str) -> Option<String> {
    let mut out = String::new();
    let mut rest = text;
    let mut any = false;
    while let Some(at) = rest.find(old) {
        let after = &rest[at + old.len()..];
        out.push_str(&rest[..at]);
        if after.starts_with(|c: char| c.is_alphanumeric() || "-_.".contains(c)) {
            out.push_str(old);
        } else {
            out.push_str(new);
            any = true;
        }
        rest = after;
    }
    out.push_str(rest);
    any.then_some(out)
}

fn chown(path: &Path, owner: (u32, u32)) {
    // Only root may give files away; whoever may not owns them already or gets his own copy.
    #[cfg(unix)]
    let _ = std::os::unix::fs::lchown(path, Some(owner.0), Some(owner.1));
    #[cfg(not(unix))]
    let _ = (path, owner);
}

/// Gives the folders among `entries` their modes and owners.
pub(super) fn finish_folders(stage: &Path, entries: &[&Entry]) -> Result<()> {
    // From the inside out: a folder without write permission is no obstacle for what is in it.
    for entry in entries.iter().rev().filter(|entry| matches!(entry.kind, Kind::Folder { .. })) {
        let path = stage.join(&entry.path);
        chown(&path, entry.owner);
        crate::install::set_mode(&path, entry.mode)?;
    }
    Ok(())
}

/// Takes over what changed in `root` while the stage was built. `mine`: paths that the stage has of its own and that stay.
///
/// # Errors
/// As for [`survey`] and [`take`].
pub(super) fn catch_up(root: &Path, stage: &Path, before: &[Entry], mine: &dyn Fn(&Path) -> bool) -> Result<usize> {
    let now = survey(root)?;
    let old: BTreeMap<&Path, &Entry> = before.iter().map(|entry| (entry.path.as_path(), entry)).collect();
    let present: HashSet<&Path> = now.iter().map(|entry| entry.path.as_path()).collect();
    let mut changed = 0;
    for entry in now.iter().filter(|entry| !mine(&entry.path)) {
        let known = old.get(entry.path.as_path());
        match entry.kind {
            Kind::Folder { .. } => {
                if known.is_none() {
                    let path = stage.join(&entry.path);
                    let _ = std::fs::create_dir_all(&path);
                    crate::install::set_mode(&path, entry.mode)?;
                }
            }
            _ if known.is_some_and(|known| known.identity == entry.identity && known.kind == entry.kind) => {}
            _ => {
                let path = stage.join(&entry.path);
                let _ = std::fs::remove_file(&path);
                if let Some(parent) = path.parent() {
                    let _ = std::fs::create_dir_all(parent);
                }
                take_one(root, entry, &path, Taking::Same)?;
                changed += 1;
            }
        }
    }
    for entry in before.iter().rev().filter(|entry| !present.contains(entry.path.as_path()) && !mine(&entry.path)) {
        let path = stage.join(&entry.path);
        let removed = match entry.kind {
            // Not empty: something of ours is in it.
            Kind::Folder { .. } => std::fs::remove_dir(&path),
            _ => std::fs::remove_file(&path),
        };
        changed += usize::from(removed.is_ok());
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_replaced_only_where_it_ends() {
        assert_eq!(replaced("#!/e/a/bin/python\n", "/e/a", "/e/new").as_deref(), Some("#!/e/new/bin/python\n"));
        assert_eq!(replaced("/e/a:/e/ab:/e/a", "/e/a", "/x").as_deref(), Some("/x:/e/ab:/x"));
        assert_eq!(replaced("/e/ab /e/a.b /e/a-b", "/e/a", "/x"), None);
    }

    #[cfg(unix)]
    #[test]
    fn what_is_taken_over_is_the_same_and_late_changes_follow() {
        let folder = tempfile::tempdir().unwrap();
        let (root, stage) = (folder.path().join("root"), folder.path().join("stage"));
        std::fs::create_dir_all(root.join("a/empty")).unwrap();
        std::fs::create_dir_all(root.join("conda-meta")).unwrap();
        std::fs::create_dir(&stage).unwrap();
        for name in ["a/kept", "a/replaced", "a/removed", "mine"] {
            std::fs::write(root.join(name), name).unwrap();
        }
        std::os::unix::fs::symlink("kept", root.join("a/link")).unwrap();
        std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
        let before = survey(&root).unwrap();
        assert!(before.iter().all(|entry| !entry.path.starts_with("conda-meta")));
        let all: Vec<&Entry> = before.iter().collect();
        take(&root, &stage, &all, Taking::Same, &Cancel::new()).unwrap();
        assert!(stage.join("a/empty").is_dir() && std::fs::symlink_metadata(stage.join("socket")).is_ok());
        // A running program: one file written in place, one replaced, one new, one gone.
        use std::io::Write as _;
        std::fs::File::options().append(true).open(root.join("a/kept")).unwrap().write_all(b" more").unwrap();
        std::fs::remove_file(root.join("a/replaced")).unwrap();
        std::fs::write(root.join("a/replaced"), "other").unwrap();
        std::fs::create_dir(root.join("late")).unwrap();
        std::fs::write(root.join("late/file"), "late").unwrap();
        std::fs::remove_file(root.join("a/removed")).unwrap();
        std::fs::write(root.join("mine"), "changed").unwrap();
        std::fs::remove_file(stage.join("mine")).unwrap();
        std::fs::write(stage.join("mine"), "of the stage").unwrap();
        catch_up(&root, &stage, &before, &|path| path == Path::new("mine")).unwrap();
        let text = |name: &str| std::fs::read_to_string(stage.join(name)).unwrap();
        assert_eq!(text("a/kept"), "a/kept more");
        assert_eq!(text("a/replaced"), "other");
        assert_eq!(text("late/file"), "late");
        assert_eq!(text("mine"), "of the stage");
        assert!(!stage.join("a/removed").exists());
    }
}
