//! What lies in an environment, and taking it over into another folder.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, IntoParallelRefIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use crate::error::{Error, Result};
use crate::install::metadata::About;
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

/// What a folder says about an entry without a look at the entry itself.
struct Listed {
    path: PathBuf,
    kind: Kind,
    inode: u64,
}

/// The entries of `root` but `conda-meta`, in no order.
fn walk(root: &Path) -> Result<Vec<Listed>> {
    let mut found: Vec<Listed> = Vec::new();
    let mut folders = vec![(PathBuf::new(), None)];
    while let Some((folder, number)) = folders.pop() {
        let full = root.join(&folder);
        let fail = |error: std::io::Error| Error::io("read the folder", &full, &error);
        let entries = match std::fs::read_dir(&full) {
            Ok(entries) => entries,
            // Running programs come and go.
            Err(error) if error.kind() == ErrorKind::NotFound && number.is_some() => continue,
            Err(error) => return Err(fail(error)),
        };
        let mut empty = true;
        for entry in entries {
            let entry = entry.map_err(fail)?;
            empty = false;
            let path = folder.join(entry.file_name());
            if path == Path::new("conda-meta") {
                continue;
            }
            let kind = match entry.file_type() {
                Ok(kind) if kind.is_symlink() => Kind::Link,
                Ok(kind) if kind.is_dir() => Kind::Folder { empty: false },
                Ok(kind) if kind.is_file() => Kind::File,
                Ok(_) => Kind::Special,
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(Error::io("look at", &entry.path(), &error)),
            };
            if matches!(kind, Kind::Folder { .. }) {
                folders.push((path.clone(), Some(found.len())));
            }
            #[cfg(unix)]
            let inode = std::os::unix::fs::DirEntryExt::ino(&entry);
            #[cfg(not(unix))]
            let inode = 0;
            found.push(Listed { path, kind, inode });
        }
        if let Some(number) = number {
            found[number].kind = Kind::Folder { empty };
        }
    }
    Ok(found)
}

/// Looks at the entry itself. `None`: it is gone.
fn looked_at(root: &Path, listed: Listed) -> Result<Option<Entry>> {
    let path = root.join(&listed.path);
    let about = match std::fs::symlink_metadata(&path) {
        Ok(about) => about,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("look at", &path, &error)),
    };
    let kind = match listed.kind {
        _ if about.is_symlink() => Kind::Link,
        kind @ Kind::Folder { .. } if about.is_dir() => kind,
        _ if about.is_dir() => Kind::Folder { empty: false },
        _ if about.is_file() => Kind::File,
        _ => Kind::Special,
    };
    Ok(Some(described(listed.path, kind, &about)))
}

impl Entry {
    /// As the lists of installed files want it.
    pub(super) fn about(&self) -> About {
        let mode = if cfg!(unix) { self.mode } else { 0o644 };
        About { is_link: self.kind == Kind::Link, is_file: self.kind == Kind::File, mode }
    }
}

/// Everything in `root` but `conda-meta`, parents before what they hold, sorted by the bytes of the path.
///
/// # Errors
/// A folder cannot be read: what is in it could not be taken over.
pub(super) fn survey(root: &Path) -> Result<Vec<Entry>> {
    let found: Result<Vec<Option<Entry>>> = walk(root)?.into_par_iter().with_min_len(128).map(|listed| looked_at(root, listed)).collect();
    let mut found: Vec<Entry> = found?.into_iter().flatten().collect();
    found.par_sort_unstable_by(|a, b| a.path.as_os_str().cmp(b.path.as_os_str()));
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

/// Creates `entries` (parents first) of `root` in `stage`, and tells whether every file of it is the very same one. The modes of folders are set by
/// [`finish_folders`].
///
/// # Errors
/// Something cannot be made; cancelled.
pub(super) fn take(root: &Path, stage: &Path, entries: &[&Entry], taking: Taking<'_>, cancel: &Cancel) -> Result<bool> {
    for entry in entries.iter().filter(|entry| matches!(entry.kind, Kind::Folder { .. })) {
        let path = stage.join(&entry.path);
        std::fs::create_dir_all(&path).map_err(|error| Error::io("create the folder", &path, &error))?;
    }
    cancel.check()?;
    let files: Vec<&&Entry> = entries.iter().filter(|entry| !matches!(entry.kind, Kind::Folder { .. })).collect();
    let copied = AtomicBool::new(false);
    files.par_iter().with_min_len(128).try_for_each(|entry| -> Result<()> {
        cancel.check()?;
        if !take_one(root, entry, &stage.join(&entry.path), taking)? {
            copied.store(true, Ordering::Relaxed);
        }
        Ok(())
    })?;
    Ok(!copied.into_inner())
}

/// Creates one file or link of `root` as `to`, whose folder exists, and tells whether it is the very same file.
pub(super) fn take_one(root: &Path, entry: &Entry, to: &Path, taking: Taking<'_>) -> Result<bool> {
    let from = root.join(&entry.path);
    let mut same = matches!(taking, Taking::Same);
    let result = match taking {
        Taking::Same => match std::fs::hard_link(&from, to) {
            // Another user's file may not be linked, some file systems have no links at all.
            Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::StorageFull) && error.raw_os_error() != Some(122) => {
                same = false;
                copy(&from, to, entry, None)
            }
            other => other,
        },
        Taking::Copy { from: old, to: new } => copy(&from, to, entry, Some((old, new))),
    };
    match result {
        // Gone since the survey: a running program removed it.
        Err(error) if error.kind() == ErrorKind::NotFound && std::fs::symlink_metadata(&from).is_err() => Ok(same),
        other => other.map(|()| same).map_err(|error| Error::io("take over", &from, &error)),
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

/// Takes over what changed in `root` while the stage was built. `mine`: paths that the stage has of its own and that stay. `same`: every file of the stage
/// that came from `root` is the very same file, so that only another file at its path is a change.
///
/// # Errors
/// As for [`survey`] and [`take`].
pub(super) fn catch_up(root: &Path, stage: &Path, before: &[Entry], same: bool, mine: &dyn Fn(&Path) -> bool) -> Result<usize> {
    let now = walk(root)?;
    let old: HashMap<&OsStr, &Entry> = before.iter().map(|entry| (entry.path.as_os_str(), entry)).collect();
    let mut seen: HashSet<&OsStr> = HashSet::with_capacity(now.len());
    let mut suspects: Vec<Listed> = Vec::new();
    for listed in now {
        match old.get_key_value(listed.path.as_os_str()) {
            Some((&path, known)) => {
                seen.insert(path);
                // The number of a file is nobody else's while the stage has a link to it.
                let unchanged = match listed.kind {
                    Kind::Folder { .. } => true,
                    kind => same && known.kind == kind && known.identity.inode == listed.inode,
                };
                if !unchanged {
                    suspects.push(listed);
                }
            }
            None => suspects.push(listed),
        }
    }
    let mut changed = 0;
    let mut looked: Vec<Entry> = Vec::new();
    for listed in suspects.into_iter().filter(|listed| !mine(&listed.path)) {
        looked.extend(looked_at(root, listed)?);
    }
    looked.sort_by(|a, b| a.path.as_os_str().cmp(b.path.as_os_str()));
    for entry in &looked {
        let known = old.get(entry.path.as_os_str());
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
    for entry in before.iter().rev().filter(|entry| !seen.contains(entry.path.as_os_str()) && !mine(&entry.path)) {
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
        let same = take(&root, &stage, &all, Taking::Same, &Cancel::new()).unwrap();
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
        catch_up(&root, &stage, &before, same, &|path| path == Path::new("mine")).unwrap();
        let text = |name: &str| std::fs::read_to_string(stage.join(name)).unwrap();
        assert_eq!(text("a/kept"), "a/kept more");
        assert_eq!(text("a/replaced"), "other");
        assert_eq!(text("late/file"), "late");
        assert_eq!(text("mine"), "of the stage");
        assert!(!stage.join("a/removed").exists());
    }
}
