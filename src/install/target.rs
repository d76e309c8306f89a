//! What lies at the place where an environment is wanted.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

use super::fetch::Cached;
use super::metadata::Stamp;
use crate::error::{Error, Result};
use crate::pypi::fetch::CachedWheel;

/// What a path is before an environment is made there.
#[derive(Debug)]
pub enum TargetState {
    /// Nothing.
    Absent,
    /// A folder without entries.
    EmptyFolder,
    /// A folder with `conda-meta`.
    Environment(Box<ExistingEnvironment>),
    /// A folder with other things in it.
    Foreign,
    /// A file or another thing that is no folder.
    File,
}

/// An environment that is already there.
#[derive(Debug, Clone)]
pub struct ExistingEnvironment {
    /// Where it lies, symbolic links at the end of the path resolved.
    pub prefix: PathBuf,
    /// What tare recorded when it made it; `None` for an environment of another tool.
    pub stamp: Option<Stamp>,
    /// It must not be changed (CEP 22: `conda-meta/frozen`).
    pub frozen: bool,
}

/// `path` made absolute (against the current directory), with `.` and `..` removed by name. If it ends in a symbolic link to
/// a folder the link is resolved: the environment is the folder, and replacing the link would leave the old folder behind.
///
/// # Errors
/// An empty path; the root folder; a path that is not UTF-8 or has a line break or NUL (it is written into scripts); a
/// symbolic link that points nowhere.
pub fn resolve_prefix(path: &Path) -> Result<PathBuf> {
    if path.as_os_str().is_empty() {
        return Err(Error::usage("the path of the environment is empty").hint("name a folder: -p PATH"));
    }
    let absolute = std::path::absolute(path).map_err(|error| Error::io("make sense of the path", path, &error))?;
    let mut clean = PathBuf::new();
    for component in absolute.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                clean.pop();
            }
            other => clean.push(other),
        }
    }
    if clean.parent().is_none() || clean.file_name().is_none() {
        return Err(Error::usage(format!("`{}` cannot be an environment", path.display())).hint("name a folder of its own: -p PATH"));
    }
    match clean.to_str() {
        None => {
            return Err(Error::usage(format!("the path `{}` is not valid UTF-8", clean.display()))
                .because("it is written into scripts and metadata"));
        }
        Some(text) if text.contains(['\n', '\r', '\0']) => {
            return Err(Error::usage(format!("the path {text:?} contains a line break")).because("it is written into scripts"));
        }
        Some(_) => {}
    }
    if std::fs::symlink_metadata(&clean).is_ok_and(|metadata| metadata.is_symlink()) {
        return std::fs::canonicalize(&clean).map_err(|error| {
            Error::failure(format!("`{}` is a symbolic link that points nowhere", clean.display()))
                .because(error)
                .hint(format!("remove the link (rm '{}') or create the folder it points to", clean.display()))
        });
    }
    Ok(clean)
}

/// What lies at `prefix` (as made by [`resolve_prefix`]).
///
/// # Errors
/// It cannot be looked at.
pub fn state_of_target(prefix: &Path) -> Result<TargetState> {
    let metadata = match std::fs::symlink_metadata(prefix) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(TargetState::Absent),
        // A parent is a file.
        Err(error) if error.kind() == ErrorKind::NotADirectory => return Err(Error::io("look at", prefix, &error)),
        Err(error) => return Err(Error::io("look at", prefix, &error)),
    };
    if metadata.is_symlink() {
        let resolved = resolve_prefix(prefix)?;
        return state_of_target(&resolved);
    }
    if !metadata.is_dir() {
        return Ok(TargetState::File);
    }
    if prefix.join("conda-meta").is_dir() {
        return Ok(TargetState::Environment(Box::new(ExistingEnvironment {
            prefix: prefix.to_owned(),
            stamp: Stamp::read(prefix).unwrap_or(None),
            frozen: prefix.join("conda-meta/frozen").exists(),
        })));
    }
    let mut entries = std::fs::read_dir(prefix).map_err(|error| Error::io("read the folder", prefix, &error))?;
    Ok(if entries.next().is_none() { TargetState::EmptyFolder } else { TargetState::Foreign })
}

/// Longest prefix, in bytes, with which the head of a script names its interpreter without a shell (Linux takes 127 bytes of it), with room for the name
/// of the interpreter.
const LONGEST_PLAIN: usize = 96;

/// Refuses a prefix that would run as a program: where a path has blanks or is long, scripts begin with `'''exec' "PREFIX/bin/python"`, which both a shell
/// and Python read. Nothing is said where no package has such a script.
///
/// # Errors
/// Usage: the characters, and a package with a script.
pub(crate) fn refuse_unquotable(prefix: &Path, packages: &[Cached], wheels: &[CachedWheel]) -> Result<()> {
    let prefix = resolve_prefix(prefix)?;
    let Some(text) = prefix.to_str() else { return Ok(()) };
    if !text.contains(char::is_whitespace) && text.len() <= LONGEST_PLAIN {
        return Ok(());
    }
    let Some(bad) = ["$", "`", "\"", "\\", "'''"].into_iter().find(|bad| text.contains(bad)) else { return Ok(()) };
    let package =
        packages.iter().filter(|package| has_script(package)).map(|package| package.record.package_record.name.as_normalized().to_owned());
    let wheel = wheels
        .iter()
        .filter(|wheel| !wheel.about.entry_points.is_empty() || wheel.about.files.iter().any(|entry| entry.shebang))
        .map(|wheel| wheel.ready.record.name.to_string());
    let Some(name) = package.chain(wheel).next() else { return Ok(()) };
    let why = if text.contains(char::is_whitespace) { "has blanks" } else { "is long" };
    Err(Error::usage(format!("`{text}` cannot be an environment with `{name}`"))
        .because(format!("the path {why}, so the scripts of `{name}` name it in a line for the shell, to which {bad} means something"))
        .hint("choose a path of letters, digits, `-`, `_` and `.`: -p PATH"))
}

fn has_script(package: &Cached) -> bool {
    let points = package.link.as_ref().is_some_and(
        |link| matches!(&link.noarch, rattler_conda_types::package::NoArchLinks::Python(points) if !points.entry_points.is_empty()),
    );
    let begins = |path: &Path| {
        let mut head = [0; 2];
        std::fs::File::open(path).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut head)).is_ok_and(|()| head == *b"#!")
    };
    // A Python package without an architecture gets the path of its interpreter also where nothing has a placeholder.
    let noarch = package.index.noarch.is_python();
    points
        || package.paths.paths.iter().any(|entry| {
            (entry.prefix_placeholder.is_some() || noarch && entry.relative_path.starts_with("python-scripts"))
                && begins(&package.folder.join(&entry.relative_path))
        })
}

/// The name of the environment folder.
pub(crate) fn folder_name(prefix: &Path) -> OsString {
    prefix.file_name().map_or_else(|| OsString::from("env"), ToOwned::to_owned)
}

/// `.NAME` + `suffix` beside `prefix`.
pub(crate) fn sibling(prefix: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(folder_name(prefix));
    name.push(suffix);
    prefix.with_file_name(name)
}

/// The first mount point at or below `prefix`; an environment with one cannot be exchanged for another, and removing the old one would reach into
/// what is mounted.
pub(crate) fn mount_point(prefix: &Path) -> Option<PathBuf> {
    let prefix = std::fs::canonicalize(prefix).ok()?;
    let text = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    mount_point_in(&text, &prefix)
}

fn mount_point_in(mountinfo: &str, prefix: &Path) -> Option<PathBuf> {
    mountinfo
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(|field| PathBuf::from(unescape(field)))
        .find(|point| point.starts_with(prefix))
}

/// The kernel writes blanks and backslashes as `\` and three octal digits.
fn unescape(field: &str) -> String {
    let bytes = field.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let code =
            bytes.get(at + 1..at + 4).and_then(|digits| std::str::from_utf8(digits).ok()).and_then(|d| u8::from_str_radix(d, 8).ok());
        match (bytes[at], code) {
            (b'\\', Some(code)) => {
                out.push(code);
                at += 4;
            }
            (byte, _) => {
                out.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Refuses environments that cannot be exchanged for another folder.
///
/// # Errors
/// The environment is a mount point, or something is mounted inside it.
pub(crate) fn refuse_mount_point(prefix: &Path) -> Result<()> {
    let Some(point) = mount_point(prefix) else { return Ok(()) };
    let shown = point.display();
    Err(if std::fs::canonicalize(prefix).is_ok_and(|prefix| prefix == point) {
        Error::failure(format!("`{shown}` is a mount point"))
            .because("an environment is changed by exchanging its folder for a new one, and a mount point cannot be renamed")
            .hint(format!("keep the environment in a folder inside it: tare create -p '{shown}/env' --clone '{shown}'"))
    } else {
        Error::failure(format!("something is mounted inside the environment, at `{shown}`"))
            .because("an environment is changed by exchanging its folder for a new one, and what is mounted would go with the old one")
            .hint(format!("unmount it first: umount '{shown}'"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_at_and_below_are_found() {
        let text =
            "36 35 98:0 / / rw - ext4 x rw\n37 36 0:5 / /e/env\\040x/data rw shared:1 - tmpfs t rw\n38 36 0:6 / /e/other rw - tmpfs t rw\n";
        assert_eq!(mount_point_in(text, Path::new("/e/env x")), Some(PathBuf::from("/e/env x/data")));
        assert_eq!(mount_point_in(text, Path::new("/e/other")), Some(PathBuf::from("/e/other")));
        assert_eq!(mount_point_in(text, Path::new("/e/oth")), None);
    }

    #[test]
    fn every_kind_of_target_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert!(matches!(state_of_target(&at("absent")).unwrap(), TargetState::Absent));
        std::fs::create_dir(at("empty")).unwrap();
        assert!(matches!(state_of_target(&at("empty")).unwrap(), TargetState::EmptyFolder));
        std::fs::create_dir(at("foreign")).unwrap();
        std::fs::write(at("foreign/x"), "").unwrap();
        assert!(matches!(state_of_target(&at("foreign")).unwrap(), TargetState::Foreign));
        std::fs::create_dir_all(at("env/conda-meta")).unwrap();
        std::fs::write(at("env/conda-meta/frozen"), "").unwrap();
        match state_of_target(&at("env")).unwrap() {
            TargetState::Environment(existing) => assert!(existing.frozen && existing.stamp.is_none()),
            other => panic!("{other:?}"),
        }
        std::fs::write(at("file"), "").unwrap();
        assert!(matches!(state_of_target(&at("file")).unwrap(), TargetState::File));
        assert!(state_of_target(&at("file/env")).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn links_are_resolved_and_dangling_ones_refused() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().canonicalize().unwrap().join("real");
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, folder.path().join("link")).unwrap();
        assert_eq!(resolve_prefix(&folder.path().join("link")).unwrap(), real);
        std::os::unix::fs::symlink(folder.path().join("nowhere"), folder.path().join("dangling")).unwrap();
        let error = resolve_prefix(&folder.path().join("dangling")).unwrap_err();
        assert!(error.message().contains("points nowhere") && !error.hints().is_empty());
    }

    #[test]
    fn paths_are_cleaned_and_impossible_ones_refused() {
        assert_eq!(resolve_prefix(Path::new("/nowhere/x/./y/../z")).unwrap(), Path::new("/nowhere/x/z"));
        assert!(resolve_prefix(Path::new("relative")).unwrap().is_absolute());
        for bad in ["", "/", "/..", "/a\nb"] {
            assert_eq!(resolve_prefix(Path::new(bad)).unwrap_err().exit_code(), 2, "{bad:?}");
        }
        assert_eq!(sibling(Path::new("/e/envs/train"), ".lock"), Path::new("/e/envs/.train.lock"));
    }
}
