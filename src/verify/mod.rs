//! Every file of an environment against what its packages say of it.
//!
//! Checked are the contents of each file against the hash in its package record (the one after the replacement of the prefix), the distributions of pip against
//! their `RECORD`, links, modes, byte code, files of no package, the records themselves, and whether the dependencies hold. Nothing is executed or changed.

mod digest;
mod extra;
mod pyc;
mod record;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rattler_conda_types::package::FileMode;
use rattler_conda_types::prefix_record::{PathType, PathsEntry};
use rattler_conda_types::{MatchSpec, Matches, ParseStrictness, PrefixRecord};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde::Serialize;
use sha2::{Digest, Sha256};

pub use digest::{TreeDigest, tree_digest};

use crate::error::Result;
use crate::install::{FileKind, Stamp, hex_text, read_modes};
use crate::prefix::{self, Prefix};
use crate::report::{Phase, Progress};

/// What is wrong with something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// A file is not there.
    Missing,
    /// The content differs.
    Changed,
    /// A link points elsewhere, or a file is a link or a link a file.
    WrongLink,
    /// A link points at nothing.
    DanglingLink,
    /// The permissions differ.
    WrongMode,
    /// A file of no package where packages have theirs.
    Extra,
    /// A package that was not installed by what made the environment.
    Foreign,
    /// Byte code that Python uses without looking at its source, and that is of another source.
    StalePyc,
    /// The environment was made for another path.
    Moved,
    /// A package record or a `RECORD` cannot be understood.
    DamagedRecord,
    /// A dependency that is not there or has the wrong version.
    UnmetDependency,
    /// The packages are not those of the lock.
    Drift,
    /// A file cannot be read.
    Unreadable,
}

impl Fault {
    /// One or two words, as in the report.
    pub fn name(self) -> &'static str {
        match self {
            Fault::Missing => "missing",
            Fault::Changed => "changed",
            Fault::WrongLink => "wrong link",
            Fault::DanglingLink => "dangling link",
            Fault::WrongMode => "wrong mode",
            Fault::Extra => "extra",
            Fault::Foreign => "foreign",
            Fault::StalePyc => "stale byte code",
            Fault::Moved => "moved",
            Fault::DamagedRecord => "damaged record",
            Fault::UnmetDependency => "unmet dependency",
            Fault::Drift => "not as locked",
            Fault::Unreadable => "unreadable",
        }
    }

    /// What a file with the fault was, as half a sentence: `it was missing`.
    pub fn sentence(self) -> &'static str {
        match self {
            Fault::Missing => "it was missing",
            Fault::Changed => "its content was changed",
            Fault::WrongLink => "it was a wrong link",
            Fault::DanglingLink => "it was a dangling link",
            Fault::WrongMode => "it had the wrong mode",
            Fault::Extra => "it belonged to no package",
            Fault::Foreign => "another tool had installed it",
            Fault::StalePyc => "it was byte code of another source",
            Fault::Moved => "it was made for another path",
            Fault::DamagedRecord => "it was a damaged record",
            Fault::UnmetDependency => "a dependency was unmet",
            Fault::Drift => "it was not as locked",
            Fault::Unreadable => "it could not be read",
        }
    }
}

/// One thing that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Finding {
    /// What.
    pub fault: Fault,
    /// Path relative to the prefix; empty for faults of no file.
    pub path: String,
    /// The package it belongs to.
    pub package: Option<String>,
    /// More, if there is more to say.
    pub detail: Option<String>,
}

/// What was found and how much was looked at.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// Faults, sorted.
    pub findings: Vec<Finding>,
    /// Conda packages.
    pub packages: usize,
    /// Python packages of no conda package.
    pub python_packages: usize,
    /// Files whose content was compared.
    pub files: u64,
    /// Bytes read for that.
    pub bytes: u64,
    /// Files that are there but have nothing to compare with (no hash in the record).
    pub not_comparable: u64,
}

impl Report {
    /// Whether all is as it should be.
    pub fn is_ok(&self) -> bool {
        self.findings.is_empty()
    }

    /// For people: a line a finding, then a summary.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let _ = write!(text, "{}", finding.fault.name());
            if !finding.path.is_empty() {
                let _ = write!(text, "  {}", finding.path);
            }
            if let Some(package) = &finding.package {
                let _ = write!(text, "  ({package})");
            }
            if let Some(detail) = &finding.detail {
                let _ = write!(text, "  {detail}");
            }
            text.push('\n');
        }
        let plural = |count: usize, one: &str| if count == 1 { format!("1 {one}") } else { format!("{count} {one}s") };
        let _ = write!(
            text,
            "{}: {} of {}{}",
            if self.is_ok() { "ok".to_owned() } else { plural(self.findings.len(), "fault") },
            plural(self.files as usize, "file"),
            plural(self.packages, "conda package"),
            if self.python_packages > 0 { format!(" and {}", plural(self.python_packages, "Python package")) } else { String::new() },
        );
        if self.not_comparable > 0 {
            let _ = write!(text, "; {} without a hash to compare with", plural(self.not_comparable as usize, "file"));
        }
        text.push('\n');
        text
    }
}

/// How to verify.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Look for files of no package.
    pub extra: bool,
    /// Read files whole and compare their hashes. Without, only presence, kind and size are compared; text files in which the prefix was replaced are
    /// read all the same, and byte code is not looked into.
    pub contents: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { extra: true, contents: true }
    }
}

/// What one path is to be: of one package, or of several that have the same path.
struct Expected<'a> {
    package: &'a str,
    entry: &'a PathsEntry,
}

/// Counters of the parallel part.
#[derive(Default)]
struct Counts {
    files: AtomicU64,
    bytes: AtomicU64,
    not_comparable: AtomicU64,
    /// A text file in which the prefix was replaced names this prefix.
    names_prefix: AtomicBool,
    /// There is a text file in which the prefix was replaced.
    has_replaced: AtomicBool,
}

/// Verifies the environment.
///
/// # Errors
/// `conda-meta` or tare's own notes cannot be read at all; everything else is a finding.
pub fn verify(prefix: &Prefix, options: Options, progress: &dyn Progress) -> Result<Report> {
    let root = prefix.path();
    let (records, broken) = prefix.records_and_damage()?;
    let mut findings: Vec<Finding> = broken
        .iter()
        .map(|error| Finding { fault: Fault::DamagedRecord, path: String::new(), package: None, detail: Some(error.to_string()) })
        .collect();
    let stamp = match prefix.stamp() {
        Ok(stamp) => stamp,
        Err(error) => {
            findings.push(Finding {
                fault: Fault::DamagedRecord,
                path: "conda-meta/tare/environment.json".into(),
                package: None,
                detail: Some(error.to_string()),
            });
            None
        }
    };
    let mut expected: BTreeMap<&Path, Vec<Expected<'_>>> = BTreeMap::new();
    for record in &records {
        let package = record.name().as_normalized();
        for entry in &record.paths_data.paths {
            expected.entry(&entry.relative_path).or_default().push(Expected { package, entry });
        }
    }
    // Records without paths_data (old conda) still name their files.
    let mut only_named: Vec<(&Path, &str)> = Vec::new();
    for record in records.iter().filter(|record| record.paths_data.paths.is_empty()) {
        only_named.extend(record.files.iter().map(|file| (file.as_path(), record.name().as_normalized())));
    }
    let modes = read_modes(root);
    let strangers: HashSet<&str> = match &stamp {
        Some(stamp) => records
            .iter()
            .filter(|record| !stamp.records.iter().any(|(name, _)| *name == record.file_name()))
            .map(|record| record.name().as_normalized())
            .collect(),
        None => HashSet::new(),
    };
    let counts = Counts::default();
    let mut work: Vec<(&Path, &Vec<Expected<'_>>)> = expected.iter().map(|(path, expected)| (*path, expected)).collect();
    // Big files first, so that no thread is left with one at the end.
    work.sort_by_key(|(_, expected)| std::cmp::Reverse(expected[0].entry.size_in_bytes.unwrap_or(0)));
    let checked = AtomicU64::new(0);
    let task = progress.start(Phase::Other, "verifying files", Some(work.len() as u64));
    let context =
        Context { root, expected: &expected, modes: modes.as_ref(), strangers: &strangers, counts: &counts, contents: options.contents };
    let found: Vec<Vec<Finding>> = work
        .par_iter()
        .map(|(path, expected)| {
            let found = context.check(path, expected);
            let done = checked.fetch_add(1, Ordering::Relaxed) + 1;
            if done.is_multiple_of(512) || done == work.len() as u64 {
                progress.advance_to(task, done);
            }
            found
        })
        .collect();
    findings.extend(found.into_iter().flatten());
    progress.finish(task);
    for (path, package) in only_named {
        if std::fs::symlink_metadata(root.join(path)).is_err() {
            findings.push(finding(Fault::Missing, path, package));
        } else {
            counts.not_comparable.fetch_add(1, Ordering::Relaxed);
        }
    }

    let distributions = prefix.pip_distributions();
    let mut owned: HashSet<PathBuf> = expected.keys().map(|path| path.to_path_buf()).collect();
    owned.extend(records.iter().flat_map(|record| record.files.iter().cloned()));
    for distribution in &distributions {
        findings.extend(record::check(root, distribution, &mut owned, &counts, options.contents));
    }
    if options.contents {
        findings.extend(pyc::stale(root, &prefix::site_packages(root)));
    }
    findings.extend(record::noted(root, &distributions, &mut owned));
    if options.extra {
        findings.extend(extra::find(root, &owned, &expected, &distributions));
    }
    findings.extend(foreign(prefix, &records, stamp.as_ref(), &distributions));
    findings.extend(stamped(root, stamp.as_ref()));
    findings.extend(dependencies(&records));
    findings.extend(record::unmet(root, &distributions));
    let replaced = counts.has_replaced.load(Ordering::Relaxed) && !counts.names_prefix.load(Ordering::Relaxed);
    match &stamp {
        Some(stamp) if stamp.prefix != root => findings.push(moved(format!("it was made for `{}`", stamp.prefix.display()))),
        None if replaced => findings.push(moved("its files name another path".to_owned())),
        _ => {}
    }
    if prefix.is_venv() {
        findings.extend(venv_moved(root));
    }
    findings.sort();
    findings.dedup();
    Ok(Report {
        findings,
        packages: records.len(),
        python_packages: distributions.len(),
        files: counts.files.into_inner(),
        bytes: counts.bytes.into_inner(),
        not_comparable: counts.not_comparable.into_inner(),
    })
}

fn moved(detail: String) -> Finding {
    Finding { fault: Fault::Moved, path: String::new(), package: None, detail: Some(detail) }
}

fn finding(fault: Fault, path: &Path, package: &str) -> Finding {
    Finding { fault, path: path.to_string_lossy().into_owned(), package: Some(package.to_owned()), detail: None }
}

struct Context<'a> {
    root: &'a Path,
    expected: &'a BTreeMap<&'a Path, Vec<Expected<'a>>>,
    modes: Option<&'a HashMap<PathBuf, FileKind>>,
    /// Packages that tare did not install: their modes and links are in no note.
    strangers: &'a HashSet<&'a str>,
    counts: &'a Counts,
    contents: bool,
}

impl Context<'_> {
    /// The notes on modes and links that hold for a path of `package`.
    fn modes_of(&self, path: &Path, package: &str) -> Option<&HashMap<PathBuf, FileKind>> {
        // A name with a line break cannot be noted.
        self.modes.filter(|_| !self.strangers.contains(package) && !path.to_string_lossy().contains('\n'))
    }

    /// Checks one path. With several packages it is right if it is as one of them wants it.
    fn check(&self, path: &Path, expected: &[Expected<'_>]) -> Vec<Finding> {
        let full = self.root.join(path);
        let package = expected[0].package;
        let metadata = match std::fs::symlink_metadata(&full) {
            Ok(metadata) => metadata,
            Err(error) if matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
                return vec![finding(Fault::Missing, path, package)];
            }
            Err(error) => return vec![Finding { detail: Some(error.to_string()), ..finding(Fault::Unreadable, path, package) }],
        };
        if metadata.is_symlink() {
            return self.check_link(path, &full, expected);
        }
        if expected.iter().all(|expected| expected.entry.path_type == PathType::SoftLink) {
            return vec![Finding { detail: Some("it is no link".to_owned()), ..finding(Fault::WrongLink, path, package) }];
        }
        if metadata.is_dir() {
            if expected.iter().any(|expected| expected.entry.path_type == PathType::Directory) {
                return Vec::new();
            }
            return vec![Finding { detail: Some("a folder is in its place".to_owned()), ..finding(Fault::Changed, path, package) }];
        }
        let mut found = Vec::new();
        if !metadata.is_file() {
            return vec![Finding { detail: Some("it is no regular file".to_owned()), ..finding(Fault::Changed, path, package) }];
        }
        match self.content(&full, metadata.len(), expected) {
            Ok(None) => {}
            Ok(Some(detail)) => found.push(Finding { detail: Some(detail), ..finding(Fault::Changed, path, package) }),
            Err(error) => found.push(Finding { detail: Some(error.to_string()), ..finding(Fault::Unreadable, path, package) }),
        }
        found.extend(self.check_mode(path, &full, &metadata, expected));
        found
    }

    fn check_link(&self, path: &Path, full: &Path, expected: &[Expected<'_>]) -> Vec<Finding> {
        let package = expected[0].package;
        let target = std::fs::read_link(full).unwrap_or_default();
        let shown = target.display().to_string();
        let with = |fault: Fault, detail: String| vec![Finding { detail: Some(detail), ..finding(fault, path, package) }];
        let modes = self.modes_of(path, package);
        if let Some(FileKind::Link(wanted)) = modes.and_then(|modes| modes.get(path)) {
            if Path::new(wanted) != target {
                return with(Fault::WrongLink, format!("it points to `{shown}`, not to `{wanted}`"));
            }
        } else if expected.iter().all(|expected| !matches!(expected.entry.path_type, PathType::SoftLink)) {
            return with(Fault::WrongLink, format!("it is a link to `{shown}`"));
        }
        let Ok(metadata) = std::fs::metadata(full) else {
            // What a package ships dangling (a link into another package's files, or of the system) is no fault if it is recorded as it is.
            let recorded = modes.is_some_and(|modes| modes.contains_key(path));
            let unhashed = expected.iter().any(|expected| expected.entry.sha256.is_none());
            if recorded && self.target_in_prefix(path, &target).is_none_or(|target| !self.expected.contains_key(target.as_path()))
                || (unhashed && !recorded && target.is_absolute())
            {
                return Vec::new();
            }
            return with(Fault::DanglingLink, format!("it points to `{shown}`"));
        };
        if modes.is_some() || !metadata.is_file() {
            return Vec::new();
        }
        // The record has the hash of what the link leads to. That file may have had its prefix replaced, so its own record is asked first.
        let wanted: Vec<_> = expected.iter().filter_map(|expected| expected.entry.sha256).collect();
        if wanted.is_empty() {
            return Vec::new();
        }
        if let Ok(resolved) = full.canonicalize()
            && let Ok(root) = self.root.canonicalize()
            && let Ok(relative) = resolved.strip_prefix(&root)
            && let Some(owners) = self.expected.get(relative)
        {
            let same = owners.iter().any(|owner| owner.entry.sha256.is_none_or(|hash| wanted.contains(&hash)));
            return if same { Vec::new() } else { with(Fault::WrongLink, format!("it points to `{shown}`, which is another file")) };
        }
        let mut hasher = Sha256::new();
        match read_all(full, |bytes| hasher.update(bytes)) {
            Ok(_) if wanted.iter().any(|hash| hash[..] == hasher.clone().finalize()[..]) => Vec::new(),
            Ok(_) => with(Fault::WrongLink, format!("it points to `{shown}`, which is another file")),
            Err(error) => with(Fault::Unreadable, error.to_string()),
        }
    }

    /// The path in the prefix that a link of it names, without looking at the disk.
    fn target_in_prefix(&self, path: &Path, target: &Path) -> Option<PathBuf> {
        if target.is_absolute() {
            return target.strip_prefix(self.root).ok().map(Path::to_owned);
        }
        let mut parts: Vec<Component<'_>> = path.parent()?.components().collect();
        for component in target.components() {
            match component {
                Component::ParentDir => {
                    parts.pop()?;
                }
                Component::CurDir => {}
                other => parts.push(other),
            }
        }
        Some(parts.into_iter().collect())
    }

    /// Compares the content; `Some` says how it differs.
    fn content(&self, full: &Path, len: u64, expected: &[Expected<'_>]) -> std::io::Result<Option<String>> {
        let counts = self.counts;
        let hashes: Vec<_> = expected
            .iter()
            .filter_map(|expected| match (expected.entry.sha256_in_prefix, &expected.entry.prefix_placeholder) {
                (Some(hash), _) => Some(hash),
                (None, None) => expected.entry.sha256,
                (None, Some(_)) => None,
            })
            .collect();
        let placeholder = expected.iter().find(|expected| expected.entry.prefix_placeholder.is_some()).map(|expected| expected.entry);
        let is_replaced_text = placeholder.is_some_and(|entry| entry.file_mode == Some(FileMode::Text));
        let entry_point = expected.iter().any(|expected| expected.entry.path_type == PathType::UnixPythonEntryPoint);
        if hashes.is_empty() && placeholder.is_none() {
            counts.not_comparable.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        }
        if !self.contents && !is_replaced_text && !entry_point {
            // The replacement of the prefix in a binary keeps its length.
            let mut sizes = expected.iter().filter_map(|expected| expected.entry.size_in_bytes).peekable();
            if sizes.peek().is_none() {
                counts.not_comparable.fetch_add(1, Ordering::Relaxed);
                return Ok(None);
            }
            counts.files.fetch_add(1, Ordering::Relaxed);
            return Ok((!sizes.any(|size| size == len)).then(|| describe(len, expected)));
        }
        if (is_replaced_text || entry_point || hashes.is_empty()) && len < 64 << 20 {
            let bytes = crate::files::read(full, crate::files::MOST)?;
            counts.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            counts.files.fetch_add(1, Ordering::Relaxed);
            if is_replaced_text {
                counts.has_replaced.store(true, Ordering::Relaxed);
                if contains(&bytes, self.root.to_string_lossy().as_bytes()) {
                    counts.names_prefix.store(true, Ordering::Relaxed);
                }
            }
            if hashes.is_empty() {
                return Ok(self.undone(&bytes, expected));
            }
            let digest = Sha256::digest(&bytes);
            return Ok((!hashes.iter().any(|hash| hash[..] == digest[..])).then(|| describe(len, expected)));
        }
        let mut hasher = Sha256::new();
        let read = read_all(full, |bytes| hasher.update(bytes))?;
        counts.bytes.fetch_add(read, Ordering::Relaxed);
        counts.files.fetch_add(1, Ordering::Relaxed);
        let digest = hasher.finalize();
        Ok((!hashes.iter().any(|hash| hash[..] == digest[..])).then(|| describe(len, expected)))
    }

    /// A file whose record lacks the hash after the replacement: the replacement is undone.
    fn undone(&self, bytes: &[u8], expected: &[Expected<'_>]) -> Option<String> {
        let mut comparable = false;
        for expected in expected {
            let entry = expected.entry;
            let (Some(hash), Some(placeholder)) = (entry.sha256, &entry.prefix_placeholder) else { continue };
            comparable = true;
            let root = self.root.to_string_lossy();
            let original = match entry.file_mode {
                Some(FileMode::Binary) => undo_binary(bytes, root.as_bytes(), placeholder.as_bytes()),
                _ => replace(bytes, root.as_bytes(), placeholder.as_bytes()),
            };
            if Sha256::digest(&original)[..] == hash[..] {
                return None;
            }
        }
        if !comparable {
            self.counts.not_comparable.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some("its content differs".to_owned())
    }

    #[cfg(unix)]
    fn check_mode(&self, path: &Path, full: &Path, metadata: &std::fs::Metadata, expected: &[Expected<'_>]) -> Option<Finding> {
        use std::os::unix::fs::PermissionsExt;
        let mode = metadata.permissions().mode() & 0o7777;
        let package = expected[0].package;
        let wrong = |detail: String| Some(Finding { detail: Some(detail), ..finding(Fault::WrongMode, path, package) });
        if let Some(modes) = self.modes_of(path, package) {
            let wanted = match modes.get(path) {
                Some(FileKind::Executable) => 0o755,
                Some(FileKind::Mode(mode)) => *mode,
                _ => 0o644,
            };
            return if mode == wanted { None } else { wrong(format!("{mode:04o} instead of {wanted:04o}")) };
        }
        // Other tools leave the modes of the archive and the umask: what no archive and no umask gives is wrong.
        if mode & 0o7000 != 0 || mode & 0o002 != 0 {
            return wrong(format!("{mode:04o}"));
        }
        if mode & 0o400 == 0 {
            return wrong(format!("{mode:04o}: its owner may not read it"));
        }
        let entry_point = expected.iter().any(|expected| expected.entry.path_type == PathType::UnixPythonEntryPoint);
        let in_bin = path.parent().is_some_and(|parent| parent == Path::new("bin"));
        if mode & 0o100 == 0 && in_bin && (entry_point || is_program(full)) {
            return wrong(format!("{mode:04o}: it is a program"));
        }
        None
    }

    #[cfg(not(unix))]
    fn check_mode(&self, _: &Path, _: &Path, _: &std::fs::Metadata, _: &[Expected<'_>]) -> Option<Finding> {
        None
    }
}

/// Whether the file starts as a script or an ELF or Mach-O program does.
#[cfg(unix)]
fn is_program(path: &Path) -> bool {
    let mut head = [0u8; 4];
    let Ok(read) = crate::files::open(path).and_then(|mut file| file.read(&mut head)) else { return false };
    head[..read].starts_with(b"#!") || head[..read] == *b"\x7fELF" || head[..read] == [0xcf, 0xfa, 0xed, 0xfe]
}

fn describe(len: u64, expected: &[Expected<'_>]) -> String {
    match expected[0].entry.size_in_bytes {
        // The recorded size may be that before the replacement.
        Some(size) if size != len && expected[0].entry.prefix_placeholder.is_none() => format!("{len} bytes instead of {size}"),
        _ => "its content differs".to_owned(),
    }
}

/// Reads a file in pieces; returns its length.
fn read_all(path: &Path, mut each: impl FnMut(&[u8])) -> std::io::Result<u64> {
    thread_local! {
        static BUFFER: std::cell::RefCell<Vec<u8>> = std::cell::RefCell::new(vec![0; 256 << 10]);
    }
    BUFFER.with_borrow_mut(|buffer| {
        let mut file = crate::files::open(path)?;
        let mut total = 0;
        loop {
            let read = match file.read(buffer) {
                Ok(0) => return Ok(total),
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            each(&buffer[..read]);
            total += read as u64;
        }
    })
}

/// SHA-256 and length of a file.
pub(crate) fn hash_file(path: &Path) -> std::io::Result<([u8; 32], u64)> {
    let mut hasher = Sha256::new();
    let len = read_all(path, |bytes| hasher.update(bytes))?;
    Ok((hasher.finalize().into(), len))
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    find(bytes, wanted).is_some()
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    let first = *wanted.first()?;
    let mut start = 0;
    while let Some(at) = bytes[start..].iter().position(|byte| *byte == first) {
        if bytes[start + at..].starts_with(wanted) {
            return Some(start + at);
        }
        start += at + 1;
    }
    None
}

fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some(at) = find(rest, from) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(to);
        rest = &rest[at + from.len()..];
    }
    out.extend_from_slice(rest);
    out
}

/// Undoes the replacement in a binary: in each text that ends with a zero byte the placeholder comes back and takes its room from the zeros behind.
fn undo_binary(bytes: &[u8], prefix: &[u8], placeholder: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some(at) = find(rest, prefix) {
        let end = rest[at..].iter().position(|byte| *byte == 0).map_or(rest.len(), |end| at + end);
        let text = &rest[at..end];
        let restored = replace(text, prefix, placeholder);
        let grown = restored.len().saturating_sub(text.len());
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(&restored);
        let zeros = rest[end..].iter().take(grown).take_while(|byte| **byte == 0).count();
        rest = &rest[end + zeros..];
    }
    out.extend_from_slice(rest);
    out
}

/// Packages that came after tare made the environment, in another way.
fn foreign(prefix: &Prefix, records: &[PrefixRecord], stamp: Option<&Stamp>, distributions: &[prefix::Distribution]) -> Vec<Finding> {
    let Some(stamp) = stamp else { return Vec::new() };
    let known: HashSet<&str> = stamp.records.iter().map(|(name, _)| name.as_str()).collect();
    let mut found = Vec::new();
    for name in prefix.record_files_as_listed() {
        let file = format!("{name}.json");
        if !known.contains(file.as_str()) {
            let package = records.iter().find(|record| record.file_name() == file).map(|record| record.name().as_normalized().to_owned());
            found.push(Finding {
                fault: Fault::Foreign,
                path: format!("conda-meta/{file}"),
                package,
                detail: Some("another tool installed it".to_owned()),
            });
        }
    }
    for distribution in distributions {
        let installed = crate::pypi::installed::of(prefix, distribution);
        if !installed.is_ours() {
            let tool = installed.installer.as_str();
            found.push(Finding {
                fault: Fault::Foreign,
                path: distribution.path.to_string_lossy().into_owned(),
                package: Some(distribution.name.clone()),
                detail: Some(match tool {
                    "" => "another tool installed it".to_owned(),
                    crate::pypi::install::INSTALLER => "it names tare as its installer, and tare has no record of it".to_owned(),
                    tool => format!("`{tool}` installed it"),
                }),
            });
        }
    }
    found
}

/// The package records and the variables against tare's notes.
fn stamped(root: &Path, stamp: Option<&Stamp>) -> Vec<Finding> {
    let Some(stamp) = stamp else { return Vec::new() };
    let mut found = Vec::new();
    let plain = |fault: Fault, path: String| Finding { fault, path, package: None, detail: None };
    for (name, size) in &stamp.records {
        let path = format!("conda-meta/{name}");
        match std::fs::metadata(root.join(&path)) {
            Err(_) => found.push(plain(Fault::Missing, path)),
            Ok(metadata) if metadata.len() != *size => found.push(plain(Fault::Changed, path)),
            Ok(_) => {}
        }
    }
    let state = crate::files::read(&root.join("conda-meta/state"), crate::files::MOST).ok().map(|bytes| hex_text(&Sha256::digest(&bytes)));
    if state != stamp.state_sha256 {
        found.push(Finding {
            detail: Some("the variables are not those the environment was made with".to_owned()),
            ..plain(Fault::Changed, "conda-meta/state".to_owned())
        });
    }
    found
}

/// Dependencies and constraints of the conda packages among themselves; what the machine provides (`__cuda`) is not looked at.
fn dependencies(records: &[PrefixRecord]) -> Vec<Finding> {
    let by_name: HashMap<&str, &PrefixRecord> = records.iter().map(|record| (record.name().as_normalized(), record)).collect();
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for record in records {
        let package = &record.repodata_record.package_record;
        let name = package.name.as_normalized();
        if !seen.insert(name) {
            found.push(Finding {
                fault: Fault::DamagedRecord,
                path: String::new(),
                package: Some(name.to_owned()),
                detail: Some("there are several records of this package".to_owned()),
            });
        }
        let lists = [(&package.depends, true), (&package.constrains, false)];
        for (text, required) in lists.into_iter().flat_map(|(list, required)| list.iter().map(move |text| (text, required))) {
            let Ok(spec) = MatchSpec::from_str(text, ParseStrictness::Lenient) else { continue };
            let Some(wanted) = spec.name.as_exact().map(|name| name.as_normalized()) else { continue };
            if wanted.starts_with("__") || spec.condition.is_some() {
                continue;
            }
            let detail = match by_name.get(wanted) {
                None if required => format!("needs `{text}`, which is not installed"),
                Some(installed) if !spec.matches(&installed.repodata_record.package_record) => format!(
                    "{} `{text}`, and {} {} is installed",
                    if required { "needs" } else { "allows only" },
                    installed.repodata_record.package_record.version,
                    installed.repodata_record.package_record.build
                ),
                _ => continue,
            };
            found.push(Finding {
                fault: Fault::UnmetDependency,
                path: String::new(),
                package: Some(name.to_owned()),
                detail: Some(detail),
            });
        }
    }
    found
}

/// A virtual environment names its place in its scripts.
fn venv_moved(root: &Path) -> Option<Finding> {
    let text = crate::files::read_text(&root.join("bin/activate")).ok()?;
    let line = text.lines().map(str::trim).find(|line| line.starts_with("VIRTUAL_ENV=") || line.contains("export VIRTUAL_ENV=/"))?;
    let value = line.rsplit_once("VIRTUAL_ENV=")?.1.trim_matches(['"', '\'']).to_owned();
    let made_for = PathBuf::from(&value);
    let same = made_for == root || made_for.canonicalize().is_ok_and(|path| root.canonicalize().is_ok_and(|root| root == path));
    (made_for.is_absolute() && !same).then(|| moved(format!("it was made for `{value}`")))
}

#[cfg(test)]
mod tests;
