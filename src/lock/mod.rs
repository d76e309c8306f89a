//! Locks: which packages, by URL and hash, make up an environment on each of its platforms.
//!
//! ```text
//! tare.lock, pixi.lock v1..v7 ─ pixi ─┐                ┌─ write_tare (pixi.lock v7 and one `tare:` map)
//! conda-lock v1 ─────── conda_lock ───┤                ├─ write_pixi (v7 alone)
//! @EXPLICIT ────────────── explicit ──┼─ Lock ─────────┴─ write_conda_lock
//! pylock.toml (PEP 751) ──── pylock ──┘
//! ```
//! [`read`] finds out which format a text is in. Errors name the place in the text. What a format cannot hold is refused
//! by its writer, with the name of the package.

mod check;
mod conda_lock;
mod diagnose;
mod explicit;
mod make;
mod pixi;
mod pylock;
mod pypi;
mod sync;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use indexmap::IndexMap;
use rattler_conda_types::{RepoDataRecord, Subdir};
use serde::{Deserialize, Serialize};
use url::Url;

use crate::error::{Error, Result};
use crate::spec::Text;
use crate::text::{hex, quoted};

pub(crate) use check::brought;
pub use check::{CheckOptions, Checked, check};
pub use conda_lock::write_conda_lock;
pub use make::{Made, MakeOptions, PlatformChange, make};
pub use pixi::{write_pixi, write_tare};
pub use pypi::{locked as locked_pypi, records as pypi_records};
pub use sync::{SyncOptions, Synced, sync};

/// Version of the `tare:` map that this program writes.
pub const TARE_SCHEMA: u32 = 1;

/// The URL scheme that stands for the `host` channel in a lock: its real place is a folder of one machine.
pub const HOST_SCHEME: &str = "host";

/// What sort of file a lock came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Format {
    /// pixi.lock with a `tare:` map.
    #[default]
    Tare,
    /// pixi.lock of this version, 1 to 7.
    Pixi(u64),
    /// conda-lock.yml version 1 (CEP 37).
    CondaLock,
    /// A list of package URLs (CEP 23).
    Explicit,
    /// pylock.toml (PEP 751): no conda packages.
    Pylock,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::Tare => f.write_str("tare.lock"),
            Format::Pixi(version) => write!(f, "pixi.lock version {version}"),
            Format::CondaLock => f.write_str("conda-lock version 1"),
            Format::Explicit => f.write_str("an @EXPLICIT list"),
            Format::Pylock => f.write_str("pylock.toml"),
        }
    }
}

/// A lock: one environment on one or more platforms.
#[derive(Debug, Clone, Default)]
pub struct Lock {
    /// Sorted by name.
    pub platforms: Vec<LockedPlatform>,
    /// Channels in priority order: URLs without credentials, names as the file has them, or `host:///`.
    pub channels: Vec<String>,
    /// Variables that hold the secrets of a channel, by channel (conda-lock, pixi).
    pub channel_env_vars: BTreeMap<String, Vec<String>>,
    /// Package indexes, the first one first. URLs without credentials.
    pub indexes: Vec<String>,
    /// URLs or paths of flat indexes.
    pub find_links: Vec<String>,
    /// Name of the environment in the file; `default` where the format has none.
    pub environment: String,
    /// How the lock came about.
    pub provenance: Provenance,
    /// The format it was read from.
    pub source: Format,
}

/// The packages of one platform.
#[derive(Debug, Clone)]
pub struct LockedPlatform {
    /// Mostly the subdir; pixi.lock has others. `any` for a pylock.toml.
    pub name: String,
    /// The conda platform. [`Subdir::NoArch`] for a pylock.toml.
    pub subdir: Subdir,
    /// What the machine was taken to have.
    pub virtual_packages: Vec<LockedVirtualPackage>,
    /// Sorted by name. URLs may be `host:///SUBDIR/FILE`.
    pub conda: Vec<RepoDataRecord>,
    /// Sorted by name.
    pub pypi: Vec<LockedPypi>,
    /// Packages of pixi.lock that are built from source, as the file names them: only pixi can install them.
    pub conda_sources: Vec<String>,
    /// Whether the conda records carry everything that repodata has. Else (conda-lock, `@EXPLICIT`, pixi.lock up to version 3) the metadata has
    /// to be taken from the archives.
    pub complete: bool,
    /// Categories of packages (conda-lock) that are not in `main` alone: `conda:NAME` or `pypi:NAME` to category names.
    pub categories: BTreeMap<String, BTreeSet<String>>,
}

/// A virtual package of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockedVirtualPackage {
    /// With both underscores.
    pub name: String,
    /// The version's text.
    pub version: String,
    /// Build string, `0` by default.
    pub build: String,
    /// `detected`, `assumed`, `overridden` or `default`; `None` where the format does not tell.
    pub provenance: Option<String>,
    /// What answered: `nvml`, `--cuda`, …
    pub source: Option<String>,
}

impl LockedVirtualPackage {
    /// From `__cuda=12.6`, `__archspec=1=zen4`, `__unix`.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.splitn(3, '=').map(str::trim);
        let name = parts.next().unwrap_or_default();
        if !name.starts_with("__") || name.len() < 3 {
            return Err(format!("`{text}` is no virtual package: their names start with `__`"));
        }
        let made = LockedVirtualPackage {
            name: name.to_owned(),
            version: parts.next().filter(|text| !text.is_empty()).unwrap_or("0").to_owned(),
            build: parts.next().filter(|text| !text.is_empty()).unwrap_or("0").to_owned(),
            provenance: None,
            source: None,
        };
        made.generic()?;
        Ok(made)
    }

    /// For the solver.
    ///
    /// # Errors
    /// A name or version that conda does not allow.
    pub fn generic(&self) -> Result<rattler_conda_types::GenericVirtualPackage, String> {
        Ok(rattler_conda_types::GenericVirtualPackage {
            name: self.name.parse().map_err(|error| format!("`{}`: {error}", self.name))?,
            version: self.version.parse().map_err(|error| format!("`{}`: {error}", self.version))?,
            build_string: self.build.parse().map_err(|error| format!("`{}`: {error}", self.build))?,
        })
    }
}

impl fmt::Display for LockedVirtualPackage {
    /// `NAME=VERSION=BUILD`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}={}", self.name, self.version, self.build)
    }
}

/// A package of the PyPI half.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LockedPypi {
    /// Normalised (PEP 503).
    pub name: String,
    /// `None` for folders, whose version can change.
    pub version: Option<String>,
    /// URL or path of the archive or folder, or `git+URL?rev=REVISION#COMMIT`.
    pub location: String,
    /// Hashes of the archive at `location`.
    pub hashes: PypiHashes,
    /// PEP 508 requirements.
    pub requires_dist: Vec<String>,
    /// Version specifiers (PEP 440).
    pub requires_python: Option<String>,
    /// Where it stands under version control, if it comes from there.
    pub vcs: Option<LockedVcs>,
    /// Installed as a link to the folder.
    pub editable: bool,
    /// The index it came from, without credentials.
    pub index: Option<String>,
    /// Marker under which the package is wanted at all (PEP 751).
    pub marker: Option<String>,
    /// Archives of the same version for other machines (PEP 751), `location` not among them.
    pub other_files: Vec<PypiFile>,
    /// Bytes of the archive.
    pub size: Option<u64>,
    /// It was named by URL or path and comes from no index.
    pub direct: bool,
    /// The `pip:` section names it, rather than another package needing it.
    pub requested: bool,
    /// Extras that the section asks for.
    pub extras: Vec<String>,
}

/// Hashes of an archive, lower-case hex.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PypiHashes {
    /// 32 digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub md5: Option<String>,
    /// 64 digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// One more archive of a PyPI package.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PypiFile {
    /// URL or path.
    pub location: String,
    /// Of the archive.
    #[serde(flatten)]
    pub hashes: PypiHashes,
    /// In bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

/// Where a package stands under version control.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LockedVcs {
    /// `git`, `hg`, `bzr` or `svn`.
    pub kind: String,
    /// Of the repository, without revision and fragment, without credentials.
    pub url: String,
    /// The branch, tag or commit that was asked for.
    pub revision: Option<String>,
    /// The exact commit.
    pub commit: Option<String>,
    /// Folder of the project in the repository.
    pub subdirectory: Option<String>,
}

impl LockedVcs {
    /// From the `git+https://host/repo?rev=main&subdirectory=x#COMMIT` of pixi.lock, or pip's `git+https://host/repo@REVISION#subdirectory=x`.
    /// `None` if the text is neither.
    pub fn parse(location: &str) -> Option<Self> {
        let (kind, rest) = location.split_once('+')?;
        if !matches!(kind, "git" | "hg" | "bzr" | "svn") {
            return None;
        }
        let mut url = Url::parse(rest).ok()?;
        let mut made = LockedVcs { kind: kind.to_owned(), ..LockedVcs::default() };
        for (key, value) in url.query_pairs() {
            match &*key {
                "rev" | "tag" | "branch" => made.revision = Some(value.into_owned()),
                "subdirectory" => made.subdirectory = Some(value.into_owned()),
                _ => {}
            }
        }
        if let Some(fragment) = url.fragment() {
            if fragment.contains('=') {
                for part in fragment.split('&') {
                    if let Some(folder) = part.strip_prefix("subdirectory=") {
                        made.subdirectory = Some(folder.to_owned());
                    }
                }
            } else if !fragment.is_empty() {
                made.commit = Some(fragment.to_owned());
            }
        }
        url.set_query(None);
        url.set_fragment(None);
        let path = url.path().to_owned();
        if let Some((path, revision)) = path.rsplit_once('@')
            && !revision.contains('/')
        {
            url.set_path(path);
            if revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit()) {
                made.commit = Some(revision.to_owned());
            } else {
                made.revision = Some(revision.to_owned());
            }
        }
        made.url = without_credentials(url.as_str());
        Some(made)
    }
}

/// The `tare:` map: what pixi.lock has no place for. Other readers ignore it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Provenance {
    /// [`TARE_SCHEMA`]; 0 for a lock of another tool.
    #[serde(default)]
    pub schema: u32,
    /// Name of the environment in the file it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The solver, such as `resolvo 0.10`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// What resolved the `pip:` section, such as `uv 0.9.1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pypi_engine: Option<String>,
    /// The channels as asked for (names, or URLs without credentials), in priority order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub channels: Vec<String>,
    /// Nothing newer than this was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclude_newer: Option<String>,
    /// `auto`, `require` or `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_intent: Option<String>,
    /// Environment variables of the environment.
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    pub variables: IndexMap<String, String>,
    /// Variables whose values look like secrets: they are not written down.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub secret_variables: BTreeSet<String>,
    /// Requirements of the `pip:` section, as written, without credentials.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pip: Vec<String>,
    /// The `pip:` section was left out (`--no-pip`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pip_skipped: bool,
    /// Facts of each platform, by its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub platforms: BTreeMap<String, PlatformProvenance>,
    /// No PyPI package tells its index (formats before pixi.lock 7): v7 would take the first index for all.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pypi_indexes_unknown: bool,
    /// What v7 has no place for about PyPI packages, by location.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pypi: BTreeMap<String, PypiProvenance>,
}

/// How the packages of one platform came about.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PlatformProvenance {
    /// sha256 of everything that decided, lower-case hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_digest: Option<String>,
    /// The match specs asked for, canonical.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requested: Vec<String>,
    /// How channels were ranked in the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel_priority: Option<String>,
    /// Strict ranking had no solution.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub channel_priority_fell_back: bool,
    /// Where each virtual package comes from, `NAME=VERSION=BUILD` to facts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub virtual_packages: BTreeMap<String, VirtualPackageProvenance>,
    /// What became of the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuProvenance>,
    /// What the `pip:` section names on this platform, with the extras asked for.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pypi_requested: BTreeMap<String, Vec<String>>,
    /// Packages of the `host` channel: only a machine with the same interpreter can install them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub machine_bound: Vec<String>,
    /// The records lack metadata that the archives have.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub incomplete: bool,
    /// Categories of packages that are not in `main` alone.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub categories: BTreeMap<String, BTreeSet<String>>,
}

/// Where a virtual package comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtualPackageProvenance {
    /// `detected`, `assumed`, `overridden` or `default`.
    pub provenance: String,
    /// What answered.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub source: String,
}

/// What became of the GPU on one platform.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct GpuProvenance {
    /// `cuda`, `rocm`, `cpu`, `mixed` or `none`.
    pub variant: String,
    /// Version of the CUDA toolkit among the packages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<String>,
    /// The newest CUDA version that the driver allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_limit: Option<String>,
    /// Who decided about the GPU: `--cuda`, `--gpu none`, `CONDA_OVERRIDE_CUDA`, `nvml`, …; nothing where it does not matter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided_by: Option<String>,
    /// Whether a driver changes what is chosen.
    #[serde(default)]
    pub matters: bool,
}

/// What v7 has no place for about one PyPI package.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PypiProvenance {
    /// Installed as a link to the folder.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub editable: bool,
    /// It was given by URL and comes from no index.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub direct: bool,
    /// Version of a folder at the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Hashes of what v7 takes for a folder.
    #[serde(default, skip_serializing_if = "PypiHashes::is_empty")]
    pub hashes: PypiHashes,
    /// Under which the package is wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub marker: Option<String>,
    /// Archives for other machines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_files: Vec<PypiFile>,
    /// Bytes of the archive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

impl PypiProvenance {
    fn is_empty(&self) -> bool {
        *self == PypiProvenance::default()
    }
}

impl PypiHashes {
    /// No hash at all.
    pub fn is_empty(&self) -> bool {
        self.md5.is_none() && self.sha256.is_none()
    }
}

/// How to read a lock.
#[derive(Debug, Clone, Default)]
pub struct ReadOptions {
    /// Which environment of a pixi.lock; else `default`, or the only one that has packages.
    pub environment: Option<String>,
    /// Categories of a conda-lock file; all if none.
    pub categories: Option<Vec<String>>,
    /// Folder that relative paths start from; the file's own folder for [`read_file`].
    pub base_dir: Option<PathBuf>,
}

/// Reads a lock file.
///
/// # Errors
/// As [`read`]; the file cannot be read.
pub fn read_file(path: &Path, options: &ReadOptions) -> Result<Lock> {
    let bytes = read_bytes(path)?;
    let mut options = options.clone();
    if options.base_dir.is_none() {
        options.base_dir = Some(path.parent().unwrap_or(Path::new("")).to_owned());
    }
    read(&path.display().to_string(), &bytes, &options)
}

/// The bytes of a lock file.
///
/// # Errors
/// The file cannot be read (kind usage), with a hint where there is none.
pub fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    crate::files::read_input(path, crate::spec::source::MAX_TEXT as u64).map_err(|error| {
        let made = Error::io("read the lock", path, &error).with_kind(crate::error::Kind::Usage);
        match error.kind() {
            std::io::ErrorKind::NotFound => made.hint("to make one: tare lock -f environment.yml"),
            _ => made,
        }
    })
}

/// Reads a lock in any of the formats. `name` is shown in errors and helps to tell the format.
///
/// # Errors
/// No lock at all (kind usage), malformed, newer than what is known, or with an environment that has to be named; each
/// with its place.
pub fn read(name: &str, bytes: &[u8], options: &ReadOptions) -> Result<Lock> {
    let text =
        Text::decode(name, bytes, options.base_dir.clone()).map_err(|error| error.context(format!("cannot read the lock `{name}`")))?;
    let detected = detect(name, &text.text);
    // The readers of these take quadratic time for deep nesting.
    if matches!(detected, Some(Detected::CondaLock | Detected::Pixi)) {
        crate::spec::yaml::refuse_deep(&text).map_err(|error| error.context(format!("cannot read the lock `{name}`")))?;
    }
    let read = match detected {
        Some(Detected::Pylock) => pylock::read(&text),
        Some(Detected::Explicit) => explicit::read(&text, options),
        Some(Detected::CondaLock) => conda_lock::read(&text, options),
        Some(Detected::Pixi) => pixi::read(&text, options),
        None => Err(diagnose::not_a_lock(&text)),
    };
    let mut lock = read.map_err(|error| diagnose::complete(&text, error))?;
    for platform in &mut lock.platforms {
        let Some(facts) = lock.provenance.platforms.get(&platform.name) else { continue };
        for package in &mut platform.pypi {
            if let Some(extras) = facts.pypi_requested.get(&package.name) {
                package.requested = true;
                package.extras.clone_from(extras);
            }
        }
    }
    lock.sort();
    Ok(lock)
}

/// Whether the text is a lock of some kind, judged by its first keys; an environment.yml is none.
pub fn is_lock(name: &str, bytes: &[u8]) -> bool {
    Text::decode(name, bytes, None).is_ok_and(|text| detect(name, &text.text).is_some())
}

enum Detected {
    Pylock,
    Explicit,
    CondaLock,
    Pixi,
}

fn detect(name: &str, text: &str) -> Option<Detected> {
    let file = name.rsplit(['/', '\\']).next().unwrap_or(name);
    let (mut version, mut metadata, mut package, mut pixi, mut mapping) = (None, false, false, false, false);
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed == "@EXPLICIT" {
            return Some(Detected::Explicit);
        }
        if line.starts_with([' ', '\t', '-', '#']) {
            continue;
        }
        if line.split_once('=').is_some_and(|(key, _)| key.trim() == "lock-version") {
            return Some(Detected::Pylock);
        }
        let Some((key, value)) = line.split_once(':') else { continue };
        mapping = true;
        match key.trim_matches(['"', '\'']) {
            "version" => version = Some(value.trim().to_owned()),
            "metadata" => metadata = true,
            "package" => package = true,
            "packages" | "environments" => pixi = true,
            "dependencies" | "prefix" => return None,
            _ => {}
        }
    }
    let toml = std::path::Path::new(file).extension().is_some_and(|ending| ending.eq_ignore_ascii_case("toml"));
    if toml && file.starts_with("pylock") {
        return Some(Detected::Pylock);
    }
    let number = version.as_deref().and_then(|text| text.split('#').next()).map(|text| text.trim().trim_matches(['"', '\'']).to_owned());
    if (package || metadata) && !pixi && number.as_deref().is_none_or(|number| number == "1" || number.parse::<u64>().is_err()) {
        return Some(Detected::CondaLock);
    }
    if pixi || package || version.is_some() {
        return Some(Detected::Pixi);
    }
    let named = file.ends_with(".lock") || file.contains("conda-lock");
    (mapping && named).then_some(if file.contains("conda-lock") { Detected::CondaLock } else { Detected::Pixi })
}

impl Lock {
    /// The platform of this name, else the only one of this subdir.
    pub fn platform(&self, name: &str) -> Option<&LockedPlatform> {
        self.platforms.iter().find(|platform| platform.name == name).or_else(|| {
            let mut of_subdir = self.platforms.iter().filter(|platform| platform.subdir.as_str() == name);
            of_subdir.next().filter(|_| of_subdir.next().is_none())
        })
    }

    /// Names of the platforms, for messages.
    pub fn platform_names(&self) -> Vec<&str> {
        self.platforms.iter().map(|platform| platform.name.as_str()).collect()
    }

    /// Puts everything in the order that files have.
    pub fn sort(&mut self) {
        self.platforms.sort_by(|a, b| a.name.cmp(&b.name));
        for platform in &mut self.platforms {
            platform.conda.sort_by(|a, b| {
                let (left, right) = (&a.package_record, &b.package_record);
                left.name.as_normalized().cmp(right.name.as_normalized()).then_with(|| a.url.as_str().cmp(b.url.as_str()))
            });
            platform.pypi.sort();
            platform.conda_sources.sort();
        }
    }
}

impl LockedPlatform {
    /// A platform without packages.
    pub fn new(name: impl Into<String>, subdir: Subdir) -> Self {
        LockedPlatform {
            name: name.into(),
            subdir,
            virtual_packages: Vec::new(),
            conda: Vec::new(),
            pypi: Vec::new(),
            conda_sources: Vec::new(),
            complete: true,
            categories: BTreeMap::new(),
        }
    }

    /// The version of `__cuda` that the lock assumes.
    pub fn cuda(&self) -> Option<&LockedVirtualPackage> {
        self.virtual_packages.iter().find(|package| package.name == "__cuda")
    }
}

/// Whether a record comes from the `host` channel, in a lock (`host:///…`) or on its machine.
pub fn is_machine_bound(record: &RepoDataRecord) -> bool {
    record.url.scheme() == HOST_SCHEME || crate::install::is_host(record)
}

/// The name of a lock where nothing else is said.
pub(crate) const DEFAULT_NAME: &str = "tare.lock";

/// The command line of `tare lock` for inputs, for hints. `more`: further options.
pub(crate) fn command(files: &[String], specs: &[String], output: &str, more: &str) -> String {
    let mut words = vec!["tare lock".to_owned()];
    for file in files {
        // What came from stdin is called otherwise in messages.
        words.push(format!("-f {}", if file.starts_with('<') { "-".to_owned() } else { quoted(file) }));
    }
    words.extend(specs.iter().map(|spec| quoted(spec)));
    if output != DEFAULT_NAME && !output.is_empty() {
        words.push(format!("-o {}", quoted(output)));
    }
    words.extend((!more.is_empty()).then(|| more.to_owned()));
    words.join(" ")
}

/// A record as a lock keeps it: without credentials, and `host` without the path of its machine.
pub fn for_lock(record: &RepoDataRecord) -> RepoDataRecord {
    let mut record = crate::install::without_secrets(record);
    if crate::install::is_host(&record)
        && let Ok(url) = Url::parse(&format!("{HOST_SCHEME}:///{}/{}", record.package_record.subdir, record.identifier.to_file_name()))
    {
        record.url = url;
        record.channel = Some(format!("{HOST_SCHEME}:///"));
    }
    record
}

/// A URL without user, password and token; revisions and fragments stay. Text that is no URL stays as it is, and so does the `git` of `ssh://git@host`.
pub(crate) fn without_credentials(text: &str) -> String {
    let Ok(mut url) = Url::parse(text) else { return text.to_owned() };
    if !text.contains("://") {
        return text.to_owned();
    }
    let before = url.clone();
    if (!url.username().is_empty() && url.username() != "git") || url.password().is_some() {
        let user = if url.username() == "git" { "git" } else { "" };
        let _ = url.set_username(user);
        let _ = url.set_password(None);
    }
    if let Some(rest) = url.path().strip_prefix("/t/")
        && let Some((token, rest)) = rest.split_once('/')
        && !token.is_empty()
    {
        let path = format!("/{rest}");
        url.set_path(&path);
    }
    if url.query().is_some() && crate::spec::mask_secrets(url.as_str()) != url.as_str() {
        url.set_query(None);
    }
    if url == before { text.to_owned() } else { url.to_string() }
}

/// What `pep508_rs` must not see, because it panics or takes very long: characters outside ASCII, names and extras that end in punctuation,
/// endless markers.
///
/// # Errors
/// What is wrong with the requirement.
pub(crate) fn guard_requirement(text: &str) -> Result<(), String> {
    let word_byte = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let well_formed = |word: &str| {
        let bytes = word.as_bytes();
        bytes.first().is_some_and(u8::is_ascii_alphanumeric)
            && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
            && bytes.iter().all(word_byte)
    };
    let text = text.trim();
    if !text.is_ascii() {
        return Err("it holds characters outside ASCII".to_owned());
    }
    let name = &text[..text.bytes().take_while(|b| word_byte(b)).count()];
    if !well_formed(name) {
        return Err(format!("`{name}` is not the name of a package"));
    }
    if let Some(inner) = text[name.len()..].trim_start().strip_prefix('[') {
        let Some((extras, _)) = inner.split_once(']') else { return Err("a `[` is never closed".to_owned()) };
        if let Some(bad) = extras.split(',').map(str::trim).find(|extra| !well_formed(extra) && !extra.is_empty()) {
            return Err(format!("`{bad}` is not the name of an extra"));
        }
    }
    if text.matches('(').count() > 50 || text.matches(" or ").count() + text.matches(" and ").count() > 60 {
        return Err("the marker is too complicated".to_owned());
    }
    Ok(())
}
