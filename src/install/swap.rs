//! Putting a finished stage where the environment belongs, and tidying up after runs that were killed.
//!
//! Everything here happens under the prefix lock, so whatever carries the name of a stage of this prefix has no owner any more.
//!
//! States a kill can leave, and what the next run does:
//!
//! | on disk | meaning | done |
//! |---|---|---|
//! | `.NAME.tare-stage-PID-XXXXXX`, no journal | an unfinished new environment, or an old one already swapped out | deleted |
//! | journal, both the prefix and the stage, no old | swap announced, not begun | rolled forward |
//! | journal, no prefix, stage and old | between the two renames | rolled forward |
//! | journal, prefix and old, no stage | swap done | old deleted, journal removed |
//!
//! In a container an environment of a lower layer cannot be renamed at all (overlayfs answers EXDEV). There the old one is deleted in place once the
//! journal is written, and the new one renamed to its name: a kill in between leaves the prefix absent until the next run, which finishes.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::target::{folder_name, sibling};
use crate::error::{Error, Result};

/// A staging folder; it is removed when dropped, unless it has become the environment.
#[derive(Debug)]
pub(crate) struct Stage {
    path: PathBuf,
    keep: bool,
}

impl Stage {
    /// Creates `.NAME.tare-stage-PID-XXXXXX` beside `prefix`, mode 0755 whatever the umask.
    pub(crate) fn create(prefix: &Path) -> Result<Self> {
        let parent = prefix.parent().unwrap_or(Path::new("/"));
        let mut head = std::ffi::OsString::from(".");
        head.push(folder_name(prefix));
        head.push(format!(".tare-stage-{}-", std::process::id()));
        let folder = tempfile::Builder::new()
            .prefix(&head)
            .rand_bytes(6)
            .tempdir_in(parent)
            .map_err(|error| Error::io("create a folder in", parent, &error))?;
        let path = folder.keep();
        super::metadata::set_mode(&path, 0o755)?;
        Ok(Stage { path, keep: false })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn became_the_environment(mut self) {
        self.keep = true;
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if !self.keep {
            let _ = remove_tree(&self.path);
        }
    }
}

/// Removes a tree that may hold folders without write permission; a missing one is fine. Symbolic links are not followed, and a tree with something
/// mounted in it is left alone: what is mounted is not the tree's.
pub(crate) fn remove_tree(path: &Path) -> std::io::Result<()> {
    if std::fs::symlink_metadata(path).is_ok_and(|about| about.is_dir())
        && let Some(point) = super::target::mount_point(path)
    {
        return Err(std::io::Error::new(ErrorKind::ResourceBusy, format!("something is mounted at `{}`", point.display())));
    }
    // What a killed run had started may still be writing for a moment.
    for _ in 0..20 {
        match remove_once(path) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => std::thread::sleep(std::time::Duration::from_millis(50)),
            done => return done,
        }
    }
    remove_once(path)
}

fn remove_once(path: &Path) -> std::io::Result<()> {
    remove_apart(path);
    match std::fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotADirectory => std::fs::remove_file(path),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            open_up(path);
            std::fs::remove_dir_all(path)
        }
        Err(error) => Err(error),
    }
}

/// Removes the folders below `path` on all cores; whatever cannot be removed is left to who removes `path`.
fn remove_apart(path: &Path) {
    use rayon::iter::{IntoParallelIterator, ParallelIterator};
    /// `lib/python3.11/site-packages/PACKAGE`.
    const DEEPEST: usize = 4;
    let mut folders = vec![path.to_owned()];
    for _ in 0..DEEPEST {
        let below = |folder: PathBuf| -> Vec<PathBuf> {
            let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
            let below: Vec<PathBuf> =
                entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()).collect();
            if below.is_empty() { vec![folder] } else { below }
        };
        folders = folders.into_par_iter().flat_map_iter(below).collect();
    }
    if folders.len() > 1 {
        folders.into_par_iter().for_each(|folder| drop(std::fs::remove_dir_all(folder)));
    }
}

fn open_up(path: &Path) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        if !std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir()) {
            return;
        }
        let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700));
        for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
            open_up(&entry.path());
        }
    }
    #[cfg(not(unix))]
    let _ = path;
}

/// Whether `name` is a stage (or a swapped-out environment) of the environment folder called `env`.
fn is_stage_of(name: &str, env: &str) -> bool {
    let Some(rest) = name.strip_prefix('.').and_then(|name| name.strip_prefix(env)).and_then(|name| name.strip_prefix(".tare-stage-"))
    else {
        return false;
    };
    let Some((pid, random)) = rest.split_once('-') else { return false };
    !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit()) && random.len() == 6 && random.bytes().all(|b| b.is_ascii_alphanumeric())
}

/// The stages beside `prefix`.
pub(crate) fn stages_of(prefix: &Path) -> Vec<PathBuf> {
    let name = folder_name(prefix).to_string_lossy().into_owned();
    let Some(entries) = prefix.parent().and_then(|parent| std::fs::read_dir(parent).ok()) else { return Vec::new() };
    let mut found: Vec<PathBuf> =
        entries.flatten().filter(|entry| is_stage_of(&entry.file_name().to_string_lossy(), &name)).map(|entry| entry.path()).collect();
    found.sort();
    found
}

/// A swap that is under way: written before the first of two renames.
#[derive(Debug, Serialize, Deserialize)]
struct Journal {
    /// Folder name of the finished new environment.
    stage: String,
    /// Folder name that the old environment gets.
    old: String,
}

fn journal_path(prefix: &Path) -> PathBuf {
    sibling(prefix, ".tare-swap")
}

/// What [`recover`] did.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Recovered {
    /// An interrupted swap was completed.
    pub rolled_forward: bool,
    /// Leftover folders that were removed.
    pub removed: usize,
}

/// Completes an interrupted swap of `prefix` and removes what killed runs left beside it. The caller holds the prefix lock. A rename of `prefix` that was
/// stopped is forgotten: whoever works on the old name wants to keep it.
///
/// # Errors
/// A leftover cannot be removed or renamed.
pub fn recover(prefix: &Path) -> Result<Recovered> {
    let recovered = recover_swap(prefix)?;
    let journal = rename_journal_path(prefix);
    match std::fs::remove_file(&journal) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io("remove", &journal, &error)),
        _ => Ok(recovered),
    }
}

/// Where a rename of `prefix` that is under way is noted.
pub(crate) fn rename_journal_path(prefix: &Path) -> PathBuf {
    sibling(prefix, ".tare-rename")
}

/// As [`recover`], but a rename that was stopped is left alone.
pub(crate) fn recover_swap(prefix: &Path) -> Result<Recovered> {
    let mut recovered = Recovered::default();
    let journal_file = journal_path(prefix);
    match std::fs::read(&journal_file) {
        Ok(bytes) => {
            let env = folder_name(prefix).to_string_lossy().into_owned();
            // The journal appears whole or not at all (written aside and renamed), so one that cannot be read is not ours to follow.
            let journal: Journal = serde_json::from_slice(&bytes)
                .ok()
                .filter(|journal: &Journal| is_stage_of(&journal.stage, &env) && is_stage_of(&journal.old, &env))
                .ok_or_else(|| Error::failure(format!("`{}` is damaged", journal_file.display())).hint("remove it and run again"))?;
            let (stage, old) = (prefix.with_file_name(&journal.stage), prefix.with_file_name(&journal.old));
            if exists(&stage) {
                if exists(prefix) {
                    move_aside(prefix, &old)?;
                }
                rename(&stage, prefix)?;
                recovered.rolled_forward = true;
            }
            sync_folder(prefix.parent());
            std::fs::remove_file(&journal_file).map_err(|error| Error::io("remove", &journal_file, &error))?;
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(Error::io("read", &journal_file, &error)),
    }
    for leftover in stages_of(prefix) {
        remove_tree(&leftover).map_err(|error| Error::io("remove what an interrupted run left,", &leftover, &error))?;
        recovered.removed += 1;
    }
    Ok(recovered)
}

/// Whether a swap of `prefix` was interrupted, so that the prefix may be absent until [`recover`] ran.
pub fn needs_recovery(prefix: &Path) -> bool {
    exists(&journal_path(prefix))
}

fn exists(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}

/// Frees the name of the old environment, under a journal.
fn move_aside(prefix: &Path, old: &Path) -> Result<()> {
    match std::fs::rename(prefix, old) {
        // Of a lower layer of an overlay, or under another quota: it can be deleted, but not renamed.
        Err(error) if error.kind() == ErrorKind::CrossesDevices => {
            remove_tree(prefix).map_err(|error| Error::io("remove the old environment", prefix, &error))
        }
        done => renamed(prefix, old, done),
    }
}

/// Takes an environment away in one step and then deletes it: whoever looks sees all of it or nothing. Where its folder cannot be renamed it is deleted in
/// place, `conda-meta` last, so that what a kill leaves is still known as an environment and can be removed again.
///
/// # Errors
/// It cannot be renamed or deleted; something is mounted in it.
pub(crate) fn retire(prefix: &Path) -> Result<()> {
    let stage = Stage::create(prefix)?;
    // rename(2) replaces an empty folder and nothing else; what carries the name of a stage is deleted by the next run if this one is killed.
    match std::fs::rename(prefix, stage.path()) {
        Ok(()) => {
            sync_folder(prefix.parent());
            remove_tree(stage.path()).map_err(|error| Error::io("remove", stage.path(), &error))
        }
        Err(error) if error.kind() == ErrorKind::CrossesDevices => {
            delete_in_place(prefix).map_err(|error| explain(Error::io("remove", prefix, &error), prefix, &error))?;
            sync_folder(prefix.parent());
            Ok(())
        }
        Err(error) => Err(explain(Error::io("remove", prefix, &error), prefix, &error)),
    }
}

fn delete_in_place(prefix: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(prefix)? {
        let entry = entry?;
        if entry.file_name() != "conda-meta" {
            remove_tree(&entry.path())?;
        }
    }
    remove_tree(prefix)
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    renamed(from, to, std::fs::rename(from, to))
}

fn renamed(from: &Path, to: &Path, done: std::io::Result<()>) -> Result<()> {
    done.map_err(|error| explain(Error::io("rename", from, &error).because(format!("the new name is `{}`", to.display())), to, &error))
}

/// Adds what the error means for an environment.
pub(crate) fn explain(made: Error, prefix: &Path, error: &std::io::Error) -> Error {
    match error.raw_os_error() {
        Some(16 /* EBUSY */ | 18 /* EXDEV */) => made.hint(format!(
            "`{}` is a mount point or lies on another file system than its parent: use a folder inside it, -p '{}/env'",
            prefix.display(),
            prefix.display()
        )),
        Some(1 | 13 | 30) => made.hint("tare needs to write in the folder that holds the environment"),
        _ => made,
    }
}

/// How a finished stage takes its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placing {
    /// Nothing or an empty folder is there.
    New,
    /// An environment is there and is replaced.
    Replace,
}

/// Moves `stage` to `prefix` in one step; the old environment, if any, is gone afterwards.
pub(crate) fn place(stage: Stage, prefix: &Path, placing: Placing) -> Result<()> {
    match placing {
        Placing::New => {
            // rename(2) replaces an empty folder and nothing else.
            if let Err(error) = std::fs::rename(stage.path(), prefix)
                && !replace_subvolume(stage.path(), prefix, &error)
            {
                return Err(explain(Error::io("put the environment at", prefix, &error), prefix, &error));
            }
            stage.became_the_environment();
            sync_folder(prefix.parent());
            Ok(())
        }
        Placing::Replace => {
            match exchange(stage.path(), prefix) {
                Ok(()) => {}
                Err(error) if cannot_exchange(&error) || error.kind() == ErrorKind::CrossesDevices => {
                    replace_by_journal(stage.path(), prefix)?;
                }
                Err(error) => return Err(explain(Error::io("put the environment at", prefix, &error), prefix, &error)),
            }
            sync_folder(prefix.parent());
            // The old environment now has the name of the stage; dropping the stage removes it, and so does the next run if this one is killed.
            let leftover = stage.path().to_owned();
            drop(stage);
            for old in stages_of(prefix) {
                let _ = remove_tree(&old);
            }
            let _ = leftover;
            Ok(())
        }
    }
}

/// An empty subvolume of btrfs is a folder that rename(2) calls not empty. It can be exchanged for the stage, and then removed. Says whether that was done.
fn replace_subvolume(stage: &Path, prefix: &Path, error: &std::io::Error) -> bool {
    let is_empty = || std::fs::read_dir(prefix).is_ok_and(|mut entries| entries.next().is_none());
    if error.kind() != ErrorKind::DirectoryNotEmpty || !is_empty() || exchange(stage, prefix).is_err() {
        return false;
    }
    // Not empty if somebody was quicker: then it comes back.
    std::fs::remove_dir(stage).is_ok() || exchange(stage, prefix).is_err()
}

fn exchange(a: &Path, b: &Path) -> std::io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    {
        rustix::fs::renameat_with(rustix::fs::CWD, a, rustix::fs::CWD, b, rustix::fs::RenameFlags::EXCHANGE).map_err(std::io::Error::from)
    }
    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    {
        let _ = (a, b);
        Err(std::io::Error::from(ErrorKind::Unsupported))
    }
}

/// Errors with which file systems and kernels say that they cannot exchange two names.
fn cannot_exchange(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::Unsupported || matches!(error.raw_os_error(), Some(22 /* EINVAL */ | 38 /* ENOSYS */ | 95 /* EOPNOTSUPP */))
}

fn replace_by_journal(stage: &Path, prefix: &Path) -> Result<()> {
    announce(stage, prefix)?;
    recover_after_announcement(prefix)
}

/// Writes the journal: from here on the swap will happen, in this run or the next.
fn announce(stage: &Path, prefix: &Path) -> Result<()> {
    let name = |path: &Path| folder_name(path).to_string_lossy().into_owned();
    // A folder name that no one has and that counts as a leftover of this prefix.
    let old = Stage::create(prefix)?;
    let journal = Journal { stage: name(stage), old: name(old.path()) };
    drop(old);
    let path = journal_path(prefix);
    let parent = prefix.parent().unwrap_or(Path::new("/"));
    let text = serde_json::to_vec(&journal).map_err(|error| Error::failure("cannot write the swap journal").because(error))?;
    let write = || -> std::io::Result<()> {
        use std::io::Write;
        let mut file = tempfile::NamedTempFile::new_in(parent)?;
        file.write_all(&text)?;
        file.as_file().sync_all()?;
        file.persist(&path).map_err(|error| error.error)?;
        Ok(())
    };
    write().map_err(|error| Error::io("write", &path, &error))?;
    sync_folder(Some(parent));
    Ok(())
}

fn recover_after_announcement(prefix: &Path) -> Result<()> {
    recover(prefix).map(drop)
}

/// Makes everything in a stage durable before it gets its name: after a power cut there must be no empty files under it. One call for the file system,
/// because one for each file takes a hundred times as long. TARE_NO_SYNC leaves it out; failure is no reason to stop.
pub(crate) fn sync_stage(stage: &Path) {
    if std::env::var_os("TARE_NO_SYNC").is_some_and(|value| !value.is_empty() && value != "0") {
        return;
    }
    #[cfg(target_os = "linux")]
    if let Ok(folder) = std::fs::File::open(stage)
        && rustix::fs::syncfs(&folder).is_ok()
    {
        return;
    }
    sync_folder(Some(&stage.join("conda-meta")));
    sync_folder(Some(stage));
}

/// Makes names in a folder durable; failure is no reason to stop.
pub(crate) fn sync_folder(folder: Option<&Path>) {
    if let Some(folder) = folder
        && let Ok(file) = std::fs::File::open(folder)
    {
        let _ = file.sync_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(path: &Path, text: &str) {
        std::fs::create_dir_all(path.join("conda-meta")).unwrap();
        std::fs::write(path.join("what"), text).unwrap();
    }

    fn what(prefix: &Path) -> String {
        std::fs::read_to_string(prefix.join("what")).unwrap()
    }

    #[test]
    fn a_tree_that_is_written_to_for_a_moment_more_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().join("tree/deep");
        std::fs::create_dir_all(&tree).unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_millis(300);
        let writer = std::thread::spawn({
            let tree = tree.clone();
            move || {
                let mut number = 0;
                while std::time::Instant::now() < until {
                    let _ = std::fs::write(tree.join(number.to_string()), "x");
                    number += 1;
                }
            }
        });
        while std::time::Instant::now() + std::time::Duration::from_millis(250) < until {
            std::thread::yield_now();
        }
        remove_tree(&folder.path().join("tree")).unwrap();
        writer.join().unwrap();
        assert!(!folder.path().join("tree").exists());
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn only_stages_of_the_very_environment_are_leftovers() {
        for (name, env, expected) in [
            (".env.tare-stage-12-aB3xyz", "env", true),
            (".env.tare-stage-12-aB3xyz", "en", false),
            (".env.tare-stage-12-aB3xyzq", "env", false),
            (".env.tare-stage-x-aB3xyz", "env", false),
            (".env.tare-stage-1.tare-stage-12-aB3xyz", "env", false),
            (".env.tare-stage-1.tare-stage-12-aB3xyz", "env.tare-stage-1", true),
            ("env.tare-stage-12-aB3xyz", "env", false),
            (".env.lock", "env", false),
        ] {
            assert_eq!(is_stage_of(name, env), expected, "{name} of {env}");
        }
        let folder = tempfile::tempdir().unwrap();
        let stage = Stage::create(&folder.path().join("env")).unwrap();
        assert!(is_stage_of(stage.path().file_name().unwrap().to_str().unwrap(), "env"), "{stage:?}");
    }

    #[test]
    fn a_new_environment_replaces_nothing_or_an_empty_folder_only() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("env");
        let stage = Stage::create(&prefix).unwrap();
        environment(stage.path(), "new");
        place(stage, &prefix, Placing::New).unwrap();
        assert_eq!(what(&prefix), "new");

        let empty = folder.path().join("empty");
        std::fs::create_dir(&empty).unwrap();
        let stage = Stage::create(&empty).unwrap();
        environment(stage.path(), "in the empty folder");
        place(stage, &empty, Placing::New).unwrap();
        assert_eq!(what(&empty), "in the empty folder");

        let stage = Stage::create(&prefix).unwrap();
        environment(stage.path(), "other");
        assert!(place(stage, &prefix, Placing::New).is_err());
        assert_eq!(what(&prefix), "new");
        assert_eq!(names(folder.path()), ["empty", "env"]);
    }

    #[test]
    fn replacing_swaps_and_removes_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("env");
        environment(&prefix, "old");
        let stage = Stage::create(&prefix).unwrap();
        environment(stage.path(), "new");
        place(stage, &prefix, Placing::Replace).unwrap();
        assert_eq!(what(&prefix), "new");
        assert_eq!(names(folder.path()), ["env"]);
    }

    #[test]
    fn the_journal_swaps_where_exchange_is_not_possible() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("env");
        environment(&prefix, "old");
        let stage = Stage::create(&prefix).unwrap();
        environment(stage.path(), "new");
        replace_by_journal(stage.path(), &prefix).unwrap();
        drop(stage);
        assert_eq!(what(&prefix), "new");
        assert_eq!(names(folder.path()), ["env"]);
    }

    #[test]
    fn a_kill_between_any_two_steps_of_the_journal_ends_in_the_new_environment() {
        for steps in 0..=3 {
            let folder = tempfile::tempdir().unwrap();
            let prefix = folder.path().join("env");
            environment(&prefix, "old");
            let stage = Stage::create(&prefix).unwrap();
            environment(stage.path(), "new");
            let stage_path = stage.path().to_owned();
            std::mem::forget(stage);
            announce(&stage_path, &prefix).unwrap();
            assert!(needs_recovery(&prefix));
            let journal: Journal = serde_json::from_slice(&std::fs::read(journal_path(&prefix)).unwrap()).unwrap();
            let old = prefix.with_file_name(&journal.old);
            if steps >= 1 {
                std::fs::rename(&prefix, &old).unwrap();
            }
            if steps >= 2 {
                std::fs::rename(&stage_path, &prefix).unwrap();
            }
            if steps >= 3 {
                std::fs::remove_dir_all(&old).unwrap();
            }
            recover(&prefix).unwrap();
            assert_eq!(what(&prefix), "new", "after {steps} steps");
            assert_eq!(names(folder.path()), ["env"], "after {steps} steps");
            assert_eq!(recover(&prefix).unwrap(), Recovered::default());
        }
    }

    #[test]
    fn leftovers_without_a_journal_are_deleted_and_strangers_kept() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("env");
        environment(&folder.path().join(".env.tare-stage-99-abcdef"), "half");
        environment(&folder.path().join(".env2.tare-stage-99-abcdef"), "of another");
        environment(&folder.path().join("env.tare-stage-99-abcdef"), "of the user");
        assert_eq!(recover(&prefix).unwrap(), Recovered { rolled_forward: false, removed: 1 });
        assert_eq!(names(folder.path()), [".env2.tare-stage-99-abcdef", "env.tare-stage-99-abcdef"]);
    }

    #[test]
    fn a_journal_cannot_point_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("env");
        environment(&prefix, "mine");
        std::fs::write(journal_path(&prefix), r#"{"stage":"../../x","old":"y"}"#).unwrap();
        assert!(recover(&prefix).unwrap_err().message().contains("damaged"));
        assert_eq!(what(&prefix), "mine");
    }

    #[cfg(unix)]
    #[test]
    fn folders_without_write_permission_are_removed_too() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().join("t");
        std::fs::create_dir_all(tree.join("a/b")).unwrap();
        std::fs::write(tree.join("a/b/c"), "").unwrap();
        std::fs::set_permissions(tree.join("a"), std::fs::Permissions::from_mode(0o500)).unwrap();
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
        remove_tree(&tree).unwrap();
    }
}
