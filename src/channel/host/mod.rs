//! The built-in `host` channel: conda packages made on the spot from the CPython installations of this machine.
//!
//! Every installation that can be relocated becomes a package `python`; the `pip` and `setuptools` that its `ensurepip` bundles become
//! noarch packages. The result is an ordinary file channel in the cache. The same installation gives the same bytes.
//!
//! ```text
//! CACHE/host
//!   lock             held while packages are made
//!   packages/KEY/    the packages of one installation and record.json; KEY follows from the installation's files
//!   channels/KEY/    linux-64/ and noarch/ with repodata.json, channel.json; KEY follows from the set of installations and what is asked for
//!   channels/pool/   the packages of all channels: what an environment notes of where a package came from
//!   work/            being made; emptied by the next run after a kill
//! ```
//! Folders under `packages` and `channels` appear by one rename, so a reader needs no lock. One that is whole is never touched
//! again; one in which a file is missing or cut short is made again.

mod archive;
mod discover;
mod probe;
mod python;
mod system;
mod wheel;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rattler_conda_types::package::DistArchiveIdentifier;
use rattler_conda_types::{ChannelInfo, PackageRecord, RepoData, Subdir};
use rattler_digest::{Sha256, compute_bytes_digest};
use rayon::prelude::*;
use url::Url;

pub use system::{HostInfo, SystemLibrary, check_system_libraries, host_info};

use crate::error::{Error, Result};
use crate::report::{Phase, Progress};
use archive::{Package, hex, json};
use discover::Candidate;
use probe::Answer;

/// Raised when the packages of an unchanged installation would come out differently.
const FORMAT: u32 = 1;

/// How long a refusal counts that may be gone the next time (the interpreter did not run).
const RETRY_AFTER: Duration = Duration::from_secs(3600);

/// Where to look for interpreters and where to keep what is made of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostOptions {
    /// tare's cache folder; the channel lies in `host/` below it. Made if missing.
    pub cache_dir: PathBuf,
    /// TARE_HOST_PYTHON: the one interpreter to package, instead of all that are found.
    pub interpreter: Option<PathBuf>,
    /// The value of PATH.
    pub path_env: Option<OsString>,
    /// The home folder, for pyenv, uv and conda installations.
    pub home: Option<PathBuf>,
    /// Versions of Python that are asked for (`3.11.*`): only interpreters that fit one are packaged, unless none does.
    /// Empty: all.
    pub wanted: Vec<String>,
}

impl HostOptions {
    fn wants(&self, version: &str) -> bool {
        use rattler_conda_types::{ParseStrictness, Version, VersionSpec};
        self.wanted.is_empty()
            || version.parse::<Version>().is_ok_and(|version| {
                self.wanted
                    .iter()
                    .any(|spec| VersionSpec::from_str(spec, ParseStrictness::Lenient).is_ok_and(|spec| spec.matches(&version)))
            })
    }
}

/// The channel, ready to be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostChannel {
    /// The folder that holds `linux-64/` (or this machine's subdir) and `noarch/`, each with a repodata.json.
    pub root: PathBuf,
    /// `root` as a `file://` URL with a slash at the end.
    pub url: Url,
    /// All interpreters that were found, in the order of preference; at least one is packaged.
    pub interpreters: Vec<HostInterpreter>,
}

/// One interpreter of this machine.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HostInterpreter {
    /// The executable, with links and shims resolved.
    pub path: PathBuf,
    /// Its version, for instance `3.11.7`; none if it does not run.
    pub version: Option<String>,
    /// SHA-256 of the package file, in hexadecimal; none if refused.
    pub sha256: Option<String>,
    /// What became of it.
    pub status: HostStatus,
}

/// What became of an interpreter.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case", tag = "status")]
pub enum HostStatus {
    /// It is a package of the channel, of this file name.
    Packaged { file_name: String },
    /// It cannot be one.
    Refused {
        /// Why, as half a sentence about "it".
        reason: String,
    },
}

impl HostChannel {
    /// The refused interpreters with the reason.
    pub fn refused(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.interpreters.iter().filter_map(|interpreter| match &interpreter.status {
            HostStatus::Refused { reason } => Some((interpreter.path.as_path(), reason.as_str())),
            HostStatus::Packaged { .. } => None,
        })
    }
}

/// Why an interpreter or a wheel does not become a package.
#[derive(Debug)]
enum Trouble {
    /// The fault is in what was found: it is passed over with this reason.
    Refuse(String),
    /// The fault is on our side (the cache cannot be written): everything stops.
    Fatal(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Trouble::Fatal(error)
    }
}

/// What became of one installation; `packages/KEY/record.json`.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
struct Record {
    interpreter: HostInterpreter,
    /// The prefix that was packaged: two executables of one installation make one package.
    prefix: Option<PathBuf>,
    /// `python` first, then `pip` and `setuptools`. Empty if refused.
    packages: Vec<Package>,
    /// Wheels that could not be packaged, with the reason.
    remarks: Vec<String>,
    /// Whether the refusal may be gone the next time.
    transient: bool,
}

/// `channels/KEY/channel.json`.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
struct Manifest {
    interpreters: Vec<HostInterpreter>,
    /// Path below the channel's folder and size in bytes of every file.
    files: BTreeMap<String, u64>,
    transient: bool,
}

/// The folder of the channel within tare's cache. Everything in it can be made again.
pub fn cache_root(cache_dir: &Path) -> PathBuf {
    cache_dir.join("host")
}

/// Makes the channel, or finds it made: only the files of the installations are looked at then, nothing is run.
///
/// Blocks the thread: about a second of computing for each new installation, in parallel. Holds the files of each installation that is being
/// packaged in memory (some 100 MB).
///
/// Several processes may do this at once, and one that is killed leaves nothing that the next would take for whole.
///
/// # Errors
/// * usage: `options.interpreter` does not exist.
/// * failure: no interpreter can be packaged (each is named with the reason), or the cache cannot be written.
pub fn materialize(options: &HostOptions, progress: &dyn Progress) -> Result<HostChannel> {
    if !cfg!(target_os = "linux") {
        return Err(Error::failure(OF_MACHINE[1])
            .because("it packages the CPython of a Linux machine")
            .hint("use conda-forge instead: tare create -f envs/quickstart-conda.yml"));
    }
    let root = absolute(&cache_root(&options.cache_dir))?;
    let work = root.join("work");
    fs::create_dir_all(&work).map_err(|error| Error::io("create", &work, &error))?;

    let candidates = find(options)?;
    let keys: Vec<String> = candidates.iter().map(|candidate| key(&[&candidate.path.to_string_lossy(), &candidate.stamp])).collect();
    let of_channel: Vec<&str> = keys.iter().map(String::as_str).chain(options.wanted.iter().map(String::as_str)).collect();
    let channel = root.join("channels").join(key(&of_channel));
    if let Some(made) = open(&channel)? {
        fill_pool(&root, &channel)?;
        return Ok(made);
    }

    let guard = lock(&root, progress)?;
    if let Some(made) = open(&channel)? {
        return Ok(made);
    }
    // Nobody else works here while the lock is held: what lies there was left by a kill.
    empty(&work)?;

    let task = progress.start(Phase::Other, "packaging interpreters for the `host` channel", Some(candidates.len() as u64));
    let done = std::sync::atomic::AtomicU64::new(0);
    let records: Result<Vec<Option<Record>>> = candidates
        .par_iter()
        .zip(&keys)
        .map(|(candidate, key)| {
            let record = recorded(&root, &work, key, candidate, options);
            progress.advance_to(task, done.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1);
            record
        })
        .collect();
    progress.finish(task);
    let records: Vec<Record> = records?.into_iter().flatten().collect();
    if !options.wanted.is_empty() && records.iter().all(|record| record.packages.is_empty()) {
        // None fits: with all of them there the solver says which versions there are.
        drop(guard);
        return materialize(&HostOptions { wanted: Vec::new(), ..options.clone() }, progress);
    }
    let records = without_twins(records);
    for remark in records.iter().flat_map(|record| &record.remarks) {
        progress.note(remark);
    }
    if records.iter().all(|record| record.packages.is_empty()) {
        return Err(none_usable(options, &records));
    }
    publish(&root, &work, &channel, &keys, &records)?;
    fill_pool(&root, &channel)?;
    open(&channel)?.ok_or_else(|| Error::failure(format!("the `host` channel at `{}` vanished while it was made", channel.display())))
}

/// The candidates, or the error that there is none.
fn find(options: &HostOptions) -> Result<Vec<Candidate>> {
    let Some(named) = &options.interpreter else {
        let found = discover::candidates(options);
        if found.is_empty() {
            return Err(none_usable(options, &[]));
        }
        return Ok(found);
    };
    let unusable = |why: String| {
        Error::usage(format!("`{}` (TARE_HOST_PYTHON) is no interpreter for the `host` channel", named.display()))
            .because(why)
            .hint("set TARE_HOST_PYTHON to the python3 executable of a CPython installation, or unset it to search for one")
            .hint("or take Python from conda-forge: envs/quickstart-conda.yml")
    };
    let candidate = discover::named(named).map_err(|error| unusable(error.to_string()))?;
    if discover::starts_like_elf(&candidate.path) || candidate.path.is_dir() {
        return Ok(vec![candidate]);
    }
    // A shim or a wrapper: only running it tells which interpreter it means today.
    let behind = probe::executable_behind(named).map_err(&unusable)?;
    discover::named(&behind).map(|candidate| vec![candidate]).map_err(|error| unusable(error.to_string()))
}

/// The messages of errors that are about the machine, not about the cache.
const OF_MACHINE: [&str; 2] = ["no CPython on this machine can be used for the `host` channel", "the `host` channel is not available here"];

/// Whether an error of [`materialize`] says that this machine has no interpreter for the channel.
pub(crate) fn is_of_machine(error: &Error) -> bool {
    error.kind() == crate::error::Kind::Usage || OF_MACHINE.contains(&error.message())
}

fn none_usable(options: &HostOptions, records: &[Record]) -> Error {
    let mut error = Error::failure(OF_MACHINE[0]);
    for record in records {
        if let HostStatus::Refused { reason } = &record.interpreter.status {
            let version = record.interpreter.version.as_ref().map(|version| format!(" ({version})")).unwrap_or_default();
            error = error.because(format!("`{}`{version}: {reason}", record.interpreter.path.display()));
        }
    }
    if records.is_empty() {
        error = error.because("none was found on PATH, in ~/.pyenv, in ~/.local/share/uv/python, in /usr/local, or in a conda prefix");
    }
    error = error.hint(if options.interpreter.is_none() {
        "name a relocatable CPython, one built from source or by pyenv or uv: TARE_HOST_PYTHON=/path/to/python3"
    } else {
        "let TARE_HOST_PYTHON name a relocatable CPython, one built from source or by pyenv or uv, or unset it to search for one"
    });
    error.hint("where conda-forge can be reached, start from it instead: tare create -f envs/quickstart-conda.yml")
}

/// 16 hexadecimal digits that follow from the texts and from this version of the packager.
fn key(parts: &[&str]) -> String {
    let mut text = format!("tare host channel {FORMAT}\0{}\0", this_subdir());
    for part in parts {
        text.push_str(part);
        text.push('\0');
    }
    let mut digest = hex(&compute_bytes_digest::<Sha256>(text.as_bytes()));
    digest.truncate(16);
    digest
}

/// The subdir of the machine that this program was built for.
fn this_subdir() -> String {
    Subdir::current().map_or_else(|| "noarch".to_owned(), |subdir| subdir.to_string())
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| Error::io("find", path, &error))
}

fn lock(root: &Path, progress: &dyn Progress) -> Result<File> {
    let path = root.join("lock");
    let failed = |error: std::io::Error| Error::io("lock", &path, &error);
    let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::WouldBlock) => {
            progress.note("waiting for another process that makes the `host` channel");
            file.lock().map_err(failed)?;
        }
        Err(fs::TryLockError::Error(error)) => return Err(failed(error)),
    }
    Ok(file)
}

fn empty(work: &Path) -> Result<()> {
    for entry in fs::read_dir(work).map_err(|error| Error::io("read", work, &error))?.filter_map(std::result::Result::ok) {
        let path = entry.path();
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", &path, &error)),
            _ => {}
        }
    }
    Ok(())
}

/// The channel at `path`, if it is there, whole, and not due for another try.
fn open(path: &Path) -> Result<Option<HostChannel>> {
    let Some(manifest) = read_manifest(path) else { return Ok(None) };
    if manifest.transient && older_than(&path.join("channel.json"), RETRY_AFTER) {
        return Ok(None);
    }
    let url = Url::from_directory_path(path)
        .map_err(|()| Error::failure(format!("the cache path `{}` cannot be written as a URL", path.display())))?;
    Ok(Some(HostChannel { root: path.to_path_buf(), url, interpreters: manifest.interpreters }))
}

/// The manifest of the channel at `path`, if all its files are there in full length.
fn read_manifest(path: &Path) -> Option<Manifest> {
    let manifest: Manifest = serde_json::from_slice(&fs::read(path.join("channel.json")).ok()?).ok()?;
    let whole = manifest.files.iter().all(|(file, size)| fs::metadata(path.join(file)).is_ok_and(|meta| meta.len() == *size));
    whole.then_some(manifest)
}

fn older_than(path: &Path, age: Duration) -> bool {
    let modified = fs::metadata(path).and_then(|meta| meta.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    SystemTime::now().duration_since(modified).is_ok_and(|passed| passed > age)
}

/// The record of one installation: read from the cache, or made.
fn recorded(root: &Path, work: &Path, key: &str, candidate: &Candidate, options: &HostOptions) -> Result<Option<Record>> {
    let place = root.join("packages").join(key);
    if let Some(record) = read_record(&place) {
        let fits = record.packages.is_empty() || record.interpreter.version.as_deref().is_none_or(|version| options.wants(version));
        return Ok(fits.then_some(record));
    }
    let made = work.join(key);
    fs::create_dir_all(&made).map_err(|error| Error::io("create", &made, &error))?;
    let Some(record) = make(candidate, &made, options)? else { return Ok(None) };
    let record_path = made.join("record.json");
    fs::write(&record_path, json(&record)?).map_err(|error| Error::io("write", &record_path, &error))?;
    replace(&made, &place)?;
    Ok(Some(record))
}

fn read_record(place: &Path) -> Option<Record> {
    let path = place.join("record.json");
    let record: Record = serde_json::from_slice(&fs::read(&path).ok()?).ok()?;
    let whole = record
        .packages
        .iter()
        .all(|package| fs::metadata(place.join(&package.file_name)).is_ok_and(|meta| Some(meta.len()) == package.record.size));
    (whole && !(record.transient && older_than(&path, RETRY_AFTER))).then_some(record)
}

/// Puts the folder `made` at `place`, where a broken one may lie. Only called with the lock held.
fn replace(made: &Path, place: &Path) -> Result<()> {
    if let Some(parent) = place.parent() {
        fs::create_dir_all(parent).map_err(|error| Error::io("create", parent, &error))?;
    }
    if place.exists() {
        // Out of the way by a rename, so that there is never half a folder at `place`.
        let old = made.with_extension("old");
        fs::rename(place, &old).map_err(|error| Error::io("replace", place, &error))?;
        fs::remove_dir_all(&old).map_err(|error| Error::io("remove", &old, &error))?;
    }
    fs::rename(made, place).map_err(|error| Error::io("create", place, &error))
}

/// Asks the interpreter and packages it; `None` for one of a version that is not wanted.
fn make(candidate: &Candidate, made: &Path, options: &HostOptions) -> Result<Option<Record>> {
    let interpreter = |version: Option<String>, status| HostInterpreter { path: candidate.path.clone(), version, sha256: None, status };
    let refused = |version, reason, transient| Record {
        interpreter: interpreter(version, HostStatus::Refused { reason }),
        prefix: None,
        packages: Vec::new(),
        remarks: Vec::new(),
        transient,
    };
    let answer = match probe::ask(&candidate.path) {
        Ok(answer) => answer,
        Err(reason) => return Ok(Some(refused(None, reason, true))),
    };
    if !options.wants(&answer.version) {
        return Ok(None);
    }
    let version = Some(answer.version.clone());
    let subdir = this_subdir();
    let python = match python::package(&answer, &subdir, made.join("stage"), made) {
        Ok(package) => package,
        Err(Trouble::Refuse(reason)) => {
            // What was staged so far is of no use.
            let stage = made.join("stage");
            if stage.exists() {
                fs::remove_dir_all(&stage).map_err(|error| Error::io("remove", &stage, &error))?;
            }
            return Ok(Some(refused(version, reason, false)));
        }
        Err(Trouble::Fatal(error)) => return Err(error),
    };
    let mut record = Record {
        interpreter: HostInterpreter {
            path: candidate.path.clone(),
            version,
            sha256: python.record.sha256.map(|sha256| hex(&sha256)),
            status: HostStatus::Packaged { file_name: python.file_name.clone() },
        },
        prefix: Some(answer.base_prefix.clone()),
        packages: vec![python],
        remarks: Vec::new(),
        transient: false,
    };
    for wheel in wheels(&answer) {
        let stage = made.join("wheel");
        if stage.exists() {
            fs::remove_dir_all(&stage).map_err(|error| Error::io("remove", &stage, &error))?;
        }
        match wheel::package(&wheel, stage, made) {
            Ok(package) => record.packages.push(package),
            Err(Trouble::Refuse(reason)) => record.remarks.push(format!("`{}`: {reason}", candidate.path.display())),
            Err(Trouble::Fatal(error)) => return Err(error),
        }
    }
    Ok(Some(record))
}

fn wheels(answer: &Answer) -> Vec<PathBuf> {
    let bundled = answer.paths.get("stdlib").map(|stdlib| wheel::bundled(&stdlib.join("ensurepip/_bundled"))).unwrap_or_default();
    if bundled.is_empty() && !answer.wheels.is_empty() {
        return wheel::bundled(Path::new(&answer.wheels));
    }
    bundled
}

/// Leaves out the second and later executables of one installation.
fn without_twins(records: Vec<Record>) -> Vec<Record> {
    let mut seen = std::collections::BTreeSet::new();
    let is_first = |record: &Record| match (&record.prefix, &record.interpreter.sha256) {
        (Some(prefix), Some(sha256)) => seen.insert((prefix.clone(), sha256.clone())),
        _ => true,
    };
    let mut is_first = is_first;
    records.into_iter().filter(|record| is_first(record)).collect()
}

/// Name of the folder that has the packages of all channels.
const POOL: &str = "pool";

/// The address of a package or channel of `host` that does not depend on what was asked for when it was made: in the pool.
pub(crate) fn lasting_url(url: &Url) -> Url {
    let mut lasting = url.clone();
    if let Some((before, after)) = url.path().split_once("/host/channels/") {
        let rest = after.split_once('/').map(|(_, rest)| rest).unwrap_or_default();
        lasting.set_path(&format!("{before}/host/channels/{POOL}/{rest}"));
    }
    lasting
}

/// Adds the packages of a channel to the pool. A file appears whole, and one that is whole is not touched.
fn fill_pool(root: &Path, channel: &Path) -> Result<()> {
    let Some(manifest) = read_manifest(channel) else { return Ok(()) };
    for (file, size) in manifest.files.iter().filter(|(file, _)| !file.ends_with(".json")) {
        let (from, to) = (channel.join(file), root.join("channels").join(POOL).join(file));
        if fs::metadata(&to).is_ok_and(|about| about.len() == *size) {
            continue;
        }
        let folder = to.parent().unwrap_or(root);
        fs::create_dir_all(folder).map_err(|error| Error::io("create", folder, &error))?;
        let temporary =
            tempfile::Builder::new().prefix(".new-").tempdir_in(folder).map_err(|error| Error::io("create a folder in", folder, &error))?;
        let new = temporary.path().join("package");
        if fs::hard_link(&from, &new).is_err() {
            fs::copy(&from, &new).map_err(|error| Error::io("copy the package to", &new, &error))?;
        }
        fs::rename(&new, &to).map_err(|error| Error::io("rename", &new, &error))?;
    }
    Ok(())
}

/// Puts the channel folder together from the packages and shows it by one rename.
fn publish(root: &Path, work: &Path, channel: &Path, keys: &[String], records: &[Record]) -> Result<()> {
    let made = work.join("channel");
    let subdir = this_subdir();
    let mut files = BTreeMap::new();
    let mut repodata: BTreeMap<String, RepoData> = BTreeMap::new();
    for subdir in [subdir.as_str(), "noarch"] {
        let folder = made.join(subdir);
        fs::create_dir_all(&folder).map_err(|error| Error::io("create", &folder, &error))?;
        let info = ChannelInfo {
            subdir: Some(subdir.to_owned()),
            base_url: None,
            repodata_revisions: Default::default(),
            channel_relations: None,
            virtual_package_detectors: None,
        };
        let empty = RepoData {
            info: Some(info),
            packages: Default::default(),
            conda_packages: Default::default(),
            v3: Default::default(),
            removed: Default::default(),
            version: Some(1),
        };
        repodata.insert(subdir.to_owned(), empty);
    }
    for record in records {
        for package in &record.packages {
            let path = format!("{}/{}", package.subdir, package.file_name);
            // Two installations may bundle the same wheel.
            if files.contains_key(&path) {
                continue;
            }
            let Some(source) = keys.iter().map(|key| root.join("packages").join(key).join(&package.file_name)).find(|path| path.is_file())
            else {
                return Err(Error::failure(format!("the package `{}` vanished from the cache", package.file_name)));
            };
            let target = made.join(&path);
            if fs::hard_link(&source, &target).is_err() {
                fs::copy(&source, &target).map_err(|error| Error::io("copy the package to", &target, &error))?;
            }
            files.insert(path, package.record.size.unwrap_or_default());
            insert(&mut repodata, package)?;
        }
    }
    for (subdir, repodata) in &repodata {
        let path = format!("{subdir}/repodata.json");
        let bytes = json(repodata)?;
        let target = made.join(&path);
        fs::write(&target, &bytes).map_err(|error| Error::io("write", &target, &error))?;
        files.insert(path, bytes.len() as u64);
    }
    let manifest = Manifest {
        interpreters: records.iter().map(|record| record.interpreter.clone()).collect(),
        files,
        transient: records.iter().any(|record| record.transient),
    };
    let target = made.join("channel.json");
    fs::write(&target, json(&manifest)?).map_err(|error| Error::io("write", &target, &error))?;
    if let Some(there) = read_manifest(channel)
        && there.files == manifest.files
    {
        // Somebody may be reading the packages: only what is said of the interpreters is new.
        let place = channel.join("channel.json");
        fs::rename(&target, &place).map_err(|error| Error::io("replace", &place, &error))?;
        return fs::remove_dir_all(&made).map_err(|error| Error::io("remove", &made, &error));
    }
    replace(&made, channel)
}

fn insert(repodata: &mut BTreeMap<String, RepoData>, package: &Package) -> Result<()> {
    let name = DistArchiveIdentifier::try_from_filename(&package.file_name)
        .ok_or_else(|| Error::failure(format!("`{}` is no package name", package.file_name)))?;
    let record: PackageRecord = package.record.clone();
    if let Some(repodata) = repodata.get_mut(&package.subdir) {
        repodata.conda_packages.insert(name, record);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
