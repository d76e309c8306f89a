//! What is exported: the packages of an environment or a lock, free of where they came from.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use indexmap::IndexMap;
use rattler_conda_types::{MatchSpec, ParseStrictness, RepoDataRecord, Subdir};
use serde::Deserialize;
use url::Url;

use crate::error::{Error, Result};
use crate::lock::{Lock, LockedPlatform, LockedPypi};
use crate::prefix::{self, Distribution, Prefix};
use crate::pypi::{PypiRecord, PypiSource};

/// Where a Python package came from (PEP 610).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A package index. URL and SHA-256 (lower-case hex) of the file are known from a lock, and where tare installed it.
    Index {
        /// The file.
        url: Option<String>,
        /// Its hash.
        sha256: Option<String>,
    },
    /// A commit of a repository.
    Vcs {
        /// `git`, `hg`, `svn`, `bzr`.
        vcs: String,
        /// Without credentials.
        url: String,
        /// The exact commit.
        commit: String,
        /// Folder of the project in the repository.
        subdirectory: Option<String>,
        /// Installed editable, from a checkout.
        editable: bool,
    },
    /// A file by its URL.
    Archive {
        /// Without credentials.
        url: String,
        /// Lower-case hex.
        sha256: Option<String>,
        /// Folder of the project in the archive.
        subdirectory: Option<String>,
    },
    /// A folder of this machine.
    Directory {
        /// `file:` URL or path.
        url: String,
        /// Whether the folder itself is used.
        editable: bool,
    },
}

/// A Python package that no conda package brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PythonPackage {
    /// Normalized (PEP 503).
    pub name: String,
    /// Version as written.
    pub version: String,
    /// Where from.
    pub origin: Origin,
    /// `Requires-Dist` lines.
    pub requires: Vec<String>,
    /// License expression or text of the metadata.
    pub license: Option<String>,
    /// Asked for by name (PEP 376 `REQUESTED`).
    pub requested: bool,
    /// Where tare took it from, if tare installed it.
    pub record: Option<PypiRecord>,
}

impl PythonPackage {
    /// `name==version`: what conda writes, whatever the origin.
    pub fn pin(&self) -> String {
        if self.version.is_empty() {
            return self.name.clone();
        }
        format!("{}=={}", self.name, self.version)
    }

    /// A requirement that installs the same again: `name==version`, `name @ URL`, or an `-e` line of pip's requirements files.
    pub fn requirement(&self) -> String {
        let fragment =
            |subdirectory: &Option<String>| subdirectory.as_ref().map(|folder| format!("#subdirectory={folder}")).unwrap_or_default();
        match &self.origin {
            Origin::Index { .. } => self.pin(),
            Origin::Vcs { vcs, url, commit, subdirectory, editable } => {
                let at = format!("{vcs}+{url}@{commit}");
                if *editable {
                    let folder = subdirectory.as_ref().map(|folder| format!("&subdirectory={folder}")).unwrap_or_default();
                    format!("-e {at}#egg={}{folder}", self.name)
                } else {
                    format!("{} @ {at}{}", self.name, fragment(subdirectory))
                }
            }
            Origin::Archive { url, sha256, subdirectory } => {
                let mut parts: Vec<String> = Vec::new();
                parts.extend(sha256.as_ref().map(|hash| format!("sha256={hash}")));
                parts.extend(subdirectory.as_ref().map(|folder| format!("subdirectory={folder}")));
                let fragment = if parts.is_empty() { String::new() } else { format!("#{}", parts.join("&")) };
                format!("{} @ {url}{fragment}", self.name)
            }
            Origin::Directory { url, editable: true } => format!("-e {}", local_path(url)),
            Origin::Directory { url, editable: false } if url.contains("://") => format!("{} @ {url}", self.name),
            Origin::Directory { url, editable: false } => url.clone(),
        }
    }

    /// Whether `name==version` says all there is.
    pub fn is_from_index(&self) -> bool {
        matches!(self.origin, Origin::Index { .. })
    }
}

/// The path of a `file:` URL where it has one, else the text.
fn local_path(url: &str) -> String {
    Url::parse(url).ok().and_then(|url| url.to_file_path().ok()).map_or_else(|| url.to_owned(), |path| path.display().to_string())
}

/// What is exported.
#[derive(Debug, Clone, Default)]
pub struct Subject {
    /// Name of the environment.
    pub name: Option<String>,
    /// Its path.
    pub prefix: Option<PathBuf>,
    /// The platform that its packages are for; `None` if nothing says.
    pub platform: Option<Subdir>,
    /// Channels besides those of the packages: configured, or of the lock.
    pub channels: Vec<String>,
    /// The conda packages, sorted by name.
    pub conda: Vec<RepoDataRecord>,
    /// Indices into `conda` in the order of the folder, for conda's unsorted exports; the order by name for a lock.
    pub listed: Vec<usize>,
    /// The Python packages of no conda package, sorted by name.
    pub python: Vec<PythonPackage>,
    /// Python packages that are tare's own tooling: part of no format, for the program puts them where it needs them.
    pub tooling: Vec<PythonPackage>,
    /// Variables of the environment.
    pub variables: IndexMap<String, String>,
    /// Match specs asked for, by package name.
    pub requested: IndexMap<String, String>,
    /// Virtual packages it was solved for (`__cuda=12.6`), where known.
    pub virtual_packages: Vec<String>,
    /// `channels` are in priority order (of a lock, or of what the environment was made from) and stand before those of the packages.
    pub channels_in_order: bool,
    /// Nothing configured is to be appended to `channels` when the environment is made again.
    pub nodefaults: bool,
}

impl Subject {
    /// The environment at `prefix`. `channels`: the configured ones.
    ///
    /// # Errors
    /// A record or the variables cannot be read.
    pub fn of_prefix(prefix: &Prefix, channels: Vec<String>) -> Result<Self> {
        let records = prefix.records()?;
        let mut requested = prefix.requested_specs()?;
        if requested.is_empty() {
            for record in &records {
                #[allow(deprecated)]
                let spec = record.requested_specs.first().or(record.requested_spec.as_ref());
                if let Some(spec) = spec.filter(|spec| !spec.is_empty() && *spec != "None") {
                    requested.insert(record.name().as_normalized().to_owned(), spec.clone());
                }
            }
        }
        let listed_files = prefix.record_files_as_listed();
        let conda: Vec<RepoDataRecord> = records.into_iter().map(|record| record.repodata_record).collect();
        let position = |record: &RepoDataRecord| {
            let package = &record.package_record;
            let stem = format!("{}-{}-{}", package.name.as_normalized(), package.version, package.build);
            listed_files.iter().position(|file| *file == stem).unwrap_or(usize::MAX)
        };
        let mut listed: Vec<usize> = (0..conda.len()).collect();
        listed.sort_by_key(|index| position(&conda[*index]));
        // What the environment was made from says more than its packages.
        let facts = prefix.metadata().unwrap_or_default();
        let known: Vec<String> =
            facts["channels"].as_array().into_iter().flatten().filter_map(|name| Some(short_channel(name.as_str()?))).collect();
        let channels_in_order = !known.is_empty();
        let nodefaults = channels_in_order && (facts["nodefaults"] == true || adds_defaults(&known, &channels));
        let channels = if channels_in_order { unique(known) } else { channels };
        let (tooling, python) =
            python_packages(prefix).into_iter().partition(|package| package.record.as_ref().is_some_and(PypiRecord::is_tooling));
        let name = prefix.path().file_name().and_then(|name| name.to_str()).filter(|name| prefix::validate_name(name).is_ok());
        Ok(Subject {
            name: name.map(str::to_owned),
            prefix: Some(prefix.path().to_owned()),
            platform: prefix.subdir(),
            channels,
            listed,
            python,
            tooling,
            variables: prefix.variables()?,
            requested,
            virtual_packages: virtual_packages(prefix),
            channels_in_order,
            nodefaults,
            conda,
        })
    }

    /// One platform of a lock.
    ///
    /// # Errors
    /// Packages that only pixi can build.
    pub fn of_lock(lock: &Lock, platform: &LockedPlatform) -> Result<Self> {
        if let Some(source) = platform.conda_sources.first() {
            return Err(Error::failure(format!("the conda package `{source}` is built from source")).because("only pixi can do that"));
        }
        let mut python: Vec<PythonPackage> = platform.pypi.iter().map(locked_package).collect();
        python.sort_by(|a, b| a.name.cmp(&b.name));
        let facts = lock.provenance.platforms.get(&platform.name);
        let requested = facts
            .into_iter()
            .flat_map(|facts| &facts.requested)
            .map(|text| {
                let spec = MatchSpec::from_str(text, ParseStrictness::Lenient).ok();
                let name = spec.and_then(|spec| spec.name.as_exact().map(|name| name.as_normalized().to_owned()));
                (name.unwrap_or_else(|| text.clone()), text.clone())
            })
            .collect();
        let named = Some(lock.environment.clone()).filter(|name| name != "default");
        Ok(Subject {
            name: lock.provenance.name.clone().or(named).filter(|name| prefix::validate_name(name).is_ok()),
            prefix: None,
            platform: Some(platform.subdir).filter(|subdir| *subdir != Subdir::NoArch),
            channels: unique(lock.channels.iter().map(|channel| short_channel(channel)).collect()),
            conda: platform.conda.clone(),
            listed: prefix::install_order(&platform.conda),
            python,
            variables: lock.provenance.variables.clone(),
            requested,
            virtual_packages: platform.virtual_packages.iter().map(|package| format!("{}={}", package.name, package.version)).collect(),
            channels_in_order: true,
            tooling: Vec::new(),
            nodefaults: false,
        })
    }

    /// Names of the channels of the packages in order of first appearance, then those configured.
    pub fn all_channels(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        let own: Vec<String> = self.conda.iter().map(prefix::channel_canonical).filter(|name| name != "<unknown>").collect();
        let (first, second) = if self.channels_in_order { (self.channels.clone(), own) } else { (own, self.channels.clone()) };
        for name in first.into_iter().chain(second) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// The Python packages that were asked for: those marked so, else those that no other one needs.
    pub fn requested_python(&self) -> Vec<&PythonPackage> {
        if self.python.iter().any(|package| package.requested) {
            return self.python.iter().filter(|package| package.requested).collect();
        }
        let needed: HashSet<String> =
            self.python.iter().flat_map(|package| &package.requires).filter_map(|line| requirement_name(line)).collect();
        self.python.iter().filter(|package| !needed.contains(&package.name)).collect()
    }

    /// The conda packages that nothing else here needs.
    pub fn leaves(&self) -> Vec<&RepoDataRecord> {
        let needed: BTreeSet<String> = self
            .conda
            .iter()
            .flat_map(|record| record.package_record.depends.iter().map(move |text| (record, text)))
            .filter_map(|(record, text)| {
                let name = text.split([' ', '=', '<', '>', '!', '~', '[']).next()?.rsplit("::").next()?.to_lowercase();
                (name != record.package_record.name.as_normalized()).then_some(name)
            })
            .collect();
        self.conda.iter().filter(|record| !needed.contains(record.package_record.name.as_normalized())).collect()
    }
}

/// A channel as a file names it.
fn short_channel(channel: &str) -> String {
    let trimmed = channel.trim_end_matches('/');
    let name = trimmed
        .strip_prefix("https://conda.anaconda.org/")
        .or_else(|| trimmed.strip_prefix("https://repo.anaconda.com/"))
        .unwrap_or(trimmed);
    match name {
        "host:" => "host".to_owned(),
        "pkgs/main" | "pkgs/r" | "pkgs/msys2" => "defaults".to_owned(),
        _ => name.to_owned(),
    }
}

fn unique(names: Vec<String>) -> Vec<String> {
    let mut seen = HashSet::new();
    names.into_iter().filter(|name| seen.insert(name.clone())).collect()
}

/// Whether making an environment from `channels` would append a configured one that is not among them.
pub(super) fn adds_defaults(channels: &[String], configured: &[String]) -> bool {
    configured.iter().filter(|name| *name != "nodefaults").any(|name| !channels.contains(&short_channel(name)))
}

/// A locked package; the version of a folder is not fixed, so the one noted at the time stands, or none.
fn locked_package(package: &LockedPypi) -> PythonPackage {
    let location = package.location.clone();
    let origin = if let Some(vcs) = &package.vcs {
        Origin::Vcs {
            vcs: vcs.kind.clone(),
            url: vcs.url.clone(),
            commit: vcs.commit.clone().or_else(|| vcs.revision.clone()).unwrap_or_default(),
            subdirectory: vcs.subdirectory.clone(),
            editable: package.editable,
        }
    } else if package.editable || !(location.contains("://") || is_archive(&location)) {
        Origin::Directory { url: location, editable: package.editable }
    } else if !package.direct && (package.index.is_some() || package.version.is_some() && is_index_file(&location)) {
        Origin::Index { url: Some(location), sha256: package.hashes.sha256.clone() }
    } else {
        let (url, fragment) = location.split_once('#').unwrap_or((&location, ""));
        let subdirectory = fragment.split('&').find_map(|part| part.strip_prefix("subdirectory=")).map(str::to_owned);
        // A fragment of another kind (`egg=`, a hash of another algorithm) stays with the address.
        let url = if subdirectory.is_some() || fragment.starts_with("sha256=") { url.to_owned() } else { location.clone() };
        Origin::Archive { url, sha256: package.hashes.sha256.clone(), subdirectory }
    };
    PythonPackage {
        name: package.name.clone(),
        version: package.version.clone().unwrap_or_default(),
        origin,
        requires: package.requires_dist.clone(),
        license: None,
        requested: package.requested,
        record: None,
    }
}

fn is_archive(location: &str) -> bool {
    let path = location.split(['#', '?']).next().unwrap_or(location);
    [".whl", ".tar.gz", ".zip", ".tar.bz2", ".tar.xz", ".tgz"].iter().any(|ending| path.ends_with(ending))
}

/// Whether an address looks like that of a file of an index (`…/packages/…/NAME-VERSION…`) and not one that somebody gave.
fn is_index_file(location: &str) -> bool {
    is_archive(location) && location.contains("/packages/")
}

/// The Python packages of an environment that no conda package brought. Of those that tare installed from an index, file and hash are known.
fn python_packages(prefix: &Prefix) -> Vec<PythonPackage> {
    let noted = crate::pypi::installed::records(prefix);
    let describe = |distribution: &Distribution| {
        let mut made = python_package(prefix.path(), distribution);
        let Some(tare) = noted.iter().find(|tare| tare.record.name.as_ref() == made.name) else { return made };
        let mut record = tare.ready().record;
        record.requested = made.requested;
        if let (Origin::Index { .. }, PypiSource::Archive { url, sha256, direct: false, .. }) = (&made.origin, &record.source) {
            made.origin = Origin::Index { url: Some(url.to_string()), sha256: sha256.clone() };
        }
        made.record = Some(record);
        made
    };
    prefix.pip_distributions().iter().map(describe).collect()
}

/// The virtual packages that the stamp of tare holds.
fn virtual_packages(prefix: &Prefix) -> Vec<String> {
    let Ok(metadata) = prefix.metadata() else { return Vec::new() };
    let Some(list) = metadata.get("virtual_packages").and_then(serde_json::Value::as_array) else { return Vec::new() };
    list.iter()
        .filter_map(|package| {
            let text = |key: &str| package.get(key).and_then(serde_json::Value::as_str);
            Some(format!("{}={}", text("name")?, text("version")?))
        })
        .collect()
}

/// The normalized name in front of a requirement.
pub fn requirement_name(line: &str) -> Option<String> {
    let end = line.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))).unwrap_or(line.len());
    (end > 0).then(|| prefix::normalize(&line[..end]))
}

#[derive(Deserialize)]
struct DirectUrl {
    url: String,
    #[serde(default)]
    subdirectory: Option<String>,
    #[serde(default)]
    vcs_info: Option<VcsInfo>,
    #[serde(default)]
    archive_info: Option<ArchiveInfo>,
    #[serde(default)]
    dir_info: Option<DirInfo>,
}

#[derive(Deserialize)]
struct VcsInfo {
    vcs: String,
    commit_id: String,
}

#[derive(Deserialize)]
struct ArchiveInfo {
    #[serde(default)]
    hashes: BTreeMap<String, String>,
    #[serde(default)]
    hash: Option<String>,
}

#[derive(Deserialize)]
struct DirInfo {
    #[serde(default)]
    editable: bool,
}

/// A URL as it may be written: no password, no token; the user name of ssh stays, for it is no secret.
pub fn without_credentials(text: &str) -> String {
    let Ok(mut url) = Url::parse(text) else { return text.to_owned() };
    if url.scheme().contains("ssh") {
        let _ = url.set_password(None);
        return url.to_string();
    }
    if url.username().is_empty() && url.password().is_none() && !text.contains("/t/") {
        return text.to_owned();
    }
    rattler_redaction::strip_url_for_serialization(&url).to_string()
}

/// What the metadata of a distribution says of it. What is missing or damaged there is left out.
pub(crate) fn python_package(prefix: &Path, distribution: &Distribution) -> PythonPackage {
    let folder = prefix.join(&distribution.path);
    let read = |name: &str| std::fs::read(folder.join(name)).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let metadata = read("METADATA").or_else(|| read("PKG-INFO")).unwrap_or_default();
    let header: Vec<&str> = metadata.lines().take_while(|line| !line.is_empty()).collect();
    let field = |key: &str| header.iter().find_map(|line| line.strip_prefix(key)).map(|value| value.trim().to_owned());
    let license = field("License-Expression:").or_else(|| {
        let classifiers: Vec<String> = header
            .iter()
            .filter_map(|line| line.strip_prefix("Classifier: License ::"))
            .filter_map(|line| line.rsplit("::").next())
            .map(|last| last.trim().to_owned())
            .collect();
        field("License:")
            .filter(|text| !text.is_empty() && text.len() < 100)
            .or_else(|| (!classifiers.is_empty()).then(|| classifiers.join(" and ")))
    });
    let origin = read("direct_url.json")
        .and_then(|text| serde_json::from_str::<DirectUrl>(&text).ok())
        .map(|direct| {
            let url = without_credentials(&direct.url);
            if let Some(vcs) = direct.vcs_info {
                let editable = direct.dir_info.is_some_and(|info| info.editable);
                return Origin::Vcs { vcs: vcs.vcs, url, commit: vcs.commit_id, subdirectory: direct.subdirectory, editable };
            }
            if let Some(archive) = direct.archive_info {
                let old = archive.hash.as_deref().and_then(|hash| hash.strip_prefix("sha256="));
                let sha256 = archive.hashes.get("sha256").cloned().or_else(|| old.map(str::to_owned));
                return Origin::Archive { url, sha256, subdirectory: direct.subdirectory };
            }
            Origin::Directory { url, editable: direct.dir_info.is_some_and(|info| info.editable) }
        })
        .or_else(|| {
            // Old setuptools links an editable project by a file that names its folder.
            let link = distribution.path.extension().is_some_and(|extension| extension == "egg-link");
            let text = link.then(|| std::fs::read_to_string(&folder).ok()).flatten()?;
            let first = text.lines().next()?.trim().to_owned();
            Some(Origin::Directory { url: Url::from_file_path(&first).map_or(first, |url| url.to_string()), editable: true })
        })
        .unwrap_or(Origin::Index { url: None, sha256: None });
    PythonPackage {
        name: distribution.name.clone(),
        version: distribution.version.clone(),
        origin,
        requires: header.iter().filter_map(|line| line.strip_prefix("Requires-Dist:")).map(|line| line.trim().to_owned()).collect(),
        license,
        requested: folder.join("REQUESTED").exists(),
        record: None,
    }
}
