//! pixi.lock: versions 1 to 7 are read, version 7 is written; with a `tare:` map behind it, it is a tare.lock.
//!
//! The text is handled by `rattler_lock`, pixi's own reader and writer. It stops at the first mistake without saying where;
//! [`super::diagnose`] then finds the place.

use std::collections::BTreeSet;

use rattler_conda_types::{ChannelUrl, RepoDataRecord};
use rattler_digest::{Md5, Sha256, parse_digest_from_hex};
use rattler_lock::{
    Channel, CondaBinaryData, CondaPackageData, FindLinksUrlOrPath, LockFile, LockedPackage, PackageHashes, PlatformData,
    PypiDistributionData, PypiIndexes, PypiPackageData, PypiSourceData, SourceData, UrlOrPath, Verbatim,
};
use serde::Serialize;
use url::Url;

use super::{
    Format, HOST_SCHEME, Lock, LockedPlatform, LockedPypi, LockedVcs, LockedVirtualPackage, PlatformProvenance, Provenance, PypiHashes,
    PypiProvenance, ReadOptions, TARE_SCHEMA, VirtualPackageProvenance, diagnose, for_lock, hex, without_credentials,
};
use crate::error::{Error, Result};
use crate::spec::Text;

/// First line of the files that are written.
const HEADER: &str = "# Made by `tare lock`: pixi.lock, version 7, and what it has no place for under `tare:`. Not to be edited by hand.\n";

/// Reads versions 1 to 7.
pub(super) fn read(text: &Text, options: &ReadOptions) -> Result<Lock> {
    let (body, tail) = split_tare(&text.text);
    guard_requirements(text)?;
    // The parsers behind it have panicked on odd input before.
    let parsed = std::panic::catch_unwind(|| LockFile::from_str_with_base_directory(&body, None))
        .map_err(|_| Error::usage(format!("the lock `{}` cannot be understood", text.name)).at(text.place(0..0, "in this file")))?
        .map_err(|error| diagnose::pixi(text, &error))?;
    let version = parsed.version() as u16;
    let mut provenance = match tail {
        Some(start) => read_tare(text, start)?,
        None => Provenance::default(),
    };
    let editable = if version <= 6 && body.contains("editable: true") { editables(&body) } else { BTreeSet::new() };
    let name = choose_environment(&parsed, options, text)?;
    let Some(environment) = parsed.environment(&name) else { return Err(diagnose::no_environment(text, &name, &[])) };
    let mut lock =
        Lock { environment: name, source: if tail.is_some() { Format::Tare } else { Format::Pixi(u64::from(version)) }, ..Lock::default() };
    for channel in environment.channels() {
        let url = without_credentials(&channel.url);
        if !channel.used_env_vars.is_empty() {
            lock.channel_env_vars.insert(url.clone(), channel.used_env_vars.clone());
        }
        lock.channels.push(url);
    }
    if let Some(indexes) = environment.pypi_indexes() {
        lock.indexes = indexes.indexes.iter().map(|url| without_credentials(url.as_str())).collect();
        lock.find_links = indexes
            .find_links
            .iter()
            .map(|link| match link {
                FindLinksUrlOrPath::Url(url) => without_credentials(url.as_str()),
                FindLinksUrlOrPath::Path(path) => path.display().to_string(),
            })
            .collect();
    }
    for platform in environment.platforms() {
        let facts = provenance.platforms.remove(platform.name().as_str());
        let mut locked = LockedPlatform::new(platform.name().as_str(), platform.subdir());
        locked.complete = version >= 4 && !facts.as_ref().is_some_and(|facts| facts.incomplete);
        for written in platform.virtual_packages() {
            let mut package = LockedVirtualPackage::parse(written)
                .map_err(|why| diagnose::at_text(text, Error::usage("a malformed virtual package").because(why), written))?;
            if let Some(known) = facts.as_ref().and_then(|facts| facts.virtual_packages.get(&package.to_string())) {
                package.provenance = Some(known.provenance.clone());
                package.source = Some(known.source.clone()).filter(|source| !source.is_empty());
            }
            locked.virtual_packages.push(package);
        }
        for package in environment.packages(platform).into_iter().flatten() {
            match package {
                LockedPackage::Conda(CondaPackageData::Binary(binary)) => {
                    let mut record = RepoDataRecord::try_from(binary.as_ref()).map_err(|error| {
                        let location = binary.location.to_string();
                        let error = Error::usage(format!("the package `{location}` cannot be found from here")).because(error);
                        diagnose::at_text(text, error.hint("write an absolute path or a URL"), &location)
                    })?;
                    if record.url.scheme() == HOST_SCHEME {
                        record.channel = Some(format!("{HOST_SCHEME}:///"));
                    }
                    locked.conda.push(record);
                }
                LockedPackage::Conda(CondaPackageData::Source(source)) => {
                    locked.conda_sources.push(format!("{} ({})", source.name().as_normalized(), source.location));
                }
                LockedPackage::Pypi(package) => locked.pypi.push(from_pypi(package, &provenance, &editable)),
            }
        }
        if let Some(facts) = facts {
            locked.categories.clone_from(&facts.categories);
            provenance.platforms.insert(locked.name.clone(), facts);
        }
        lock.platforms.push(locked);
    }
    lock.provenance = provenance;
    Ok(lock)
}

/// The text without the `tare:` map, and the offset of the map. The map is the last thing in the files that tare writes; one that somebody moved
/// is found as well.
fn split_tare(text: &str) -> (std::borrow::Cow<'_, str>, Option<usize>) {
    let start = if text.starts_with("tare:") { 0 } else { text.find("\ntare:").map_or(usize::MAX, |at| at + 1) };
    if start == usize::MAX {
        return (text.into(), None);
    }
    let end = tare_end(text, start);
    if end == text.len() {
        (text[..start].into(), Some(start))
    } else {
        (format!("{}{}", &text[..start], &text[end..]).into(), Some(start))
    }
}

/// Where the map ends: at the next line that begins with a key.
fn tare_end(text: &str, start: usize) -> usize {
    let mut at = start + text[start..].find('\n').map_or(text.len() - start, |line| line + 1);
    while at < text.len() {
        let line = &text[at..];
        let len = line.find('\n').map_or(line.len(), |end| end + 1);
        if !line.starts_with([' ', '\t', '\n', '#', '-']) {
            return at;
        }
        at += len;
    }
    text.len()
}

fn read_tare(text: &Text, start: usize) -> Result<Provenance> {
    #[derive(serde::Deserialize)]
    struct Tail {
        tare: Option<Provenance>,
    }
    let end = tare_end(&text.text, start);
    let tail: Tail = serde_yaml::from_str(&text.text[start..end])
        .map_err(|error| diagnose::yaml_at(text, "the `tare:` map is malformed", &error, start))?;
    let provenance = tail.tare.unwrap_or_default();
    if provenance.schema > TARE_SCHEMA {
        return Err(Error::usage(format!(
            "the lock was written by a newer tare: its `tare:` map has schema {}, this tare knows {TARE_SCHEMA}",
            provenance.schema
        ))
        .at(text.place(start..start + 5, "here"))
        .hint("update tare, or make the lock again: tare lock -f environment.yml"));
    }
    Ok(provenance)
}

/// Looks at the items of every `requires_dist:` before the parser does: see [`super::guard_requirement`].
fn guard_requirements(text: &Text) -> Result<()> {
    let mut inside = false;
    for (start, line) in text.lines() {
        let trimmed = line.trim();
        if let Some(item) = trimmed.strip_prefix("- ").filter(|_| inside) {
            let item = item.trim();
            let bare = item.trim_matches(['"', '\'']);
            // Folded over several lines: the parser sees more than is looked at here, and what is looked at is its beginning.
            if let Err(why) = super::guard_requirement(bare) {
                let at = start + line.len() - line.trim_start().len() + 2;
                return Err(Error::usage(format!("malformed requirement `{}`", crate::spec::mask_secrets(bare)))
                    .because(why)
                    .at(text.place(at..at + item.len(), "here")));
            }
        } else if !trimmed.is_empty() && !line.starts_with("    ") {
            inside = trimmed == "requires_dist:";
        }
    }
    Ok(())
}

/// Locations of packages with `editable: true`, a key that `rattler_lock` reads over.
fn editables(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let Ok(document) = serde_yaml::from_str::<serde_yaml::Value>(text) else { return found };
    for package in document.get("packages").and_then(|packages| packages.as_sequence()).into_iter().flatten() {
        if package.get("editable").and_then(serde_yaml::Value::as_bool) == Some(true) {
            for key in ["pypi", "path", "url"] {
                if let Some(location) = package.get(key).and_then(serde_yaml::Value::as_str) {
                    found.insert(location.to_owned());
                }
            }
        }
    }
    found
}

fn choose_environment(lock: &LockFile, options: &ReadOptions, text: &Text) -> Result<String> {
    let mut names: Vec<String> = lock.environments().map(|(name, _)| name.to_owned()).collect();
    names.sort();
    if let Some(wanted) = &options.environment {
        return if names.contains(wanted) { Ok(wanted.clone()) } else { Err(diagnose::no_environment(text, wanted, &names)) };
    }
    let filled = |name: &String| {
        lock.environment(name).is_some_and(|environment| environment.packages_by_platform().any(|(_, packages)| packages.len() > 0))
    };
    let with_packages: Vec<&String> = names.iter().filter(|name| filled(name)).collect();
    let default = rattler_lock::DEFAULT_ENVIRONMENT_NAME.to_owned();
    if with_packages.contains(&&default) || (names.contains(&default) && with_packages.is_empty()) {
        return Ok(default);
    }
    match with_packages.as_slice() {
        [only] => Ok((*only).clone()),
        [] => {
            names.into_iter().next().ok_or_else(|| Error::usage(format!("`{}` holds no environment", text.name)).at(text.place(0..0, "")))
        }
        _ => Err(Error::usage(format!("`{}` holds several environments and none called `default`", text.name))
            .because(format!("they are {}", with_packages.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")))
            .hint(format!("choose one: --environment {}", with_packages[0]))),
    }
}

fn from_pypi(package: &PypiPackageData, provenance: &Provenance, editable: &BTreeSet<String>) -> LockedPypi {
    let verbatim = package.location();
    let location = verbatim.given().map_or_else(|| verbatim.inner().to_string(), str::to_owned);
    let location = without_credentials(&location);
    let known = provenance.pypi.get(&location);
    let (hashes, index) = match package {
        PypiPackageData::Distribution(data) => (
            data.hash
                .as_ref()
                .map(|hash| PypiHashes { md5: hash.md5().map(|hash| hex(hash)), sha256: hash.sha256().map(|hash| hex(hash)) }),
            data.index_url.as_ref().map(|url| without_credentials(url.as_str())),
        ),
        PypiPackageData::Source(_) => (None, None),
    };
    let mut made = LockedPypi {
        name: package.name().to_string(),
        version: package.version().map(ToString::to_string),
        vcs: LockedVcs::parse(&location),
        hashes: hashes.unwrap_or_default(),
        requires_dist: package.requires_dist().iter().map(ToString::to_string).collect(),
        requires_python: package.requires_python().map(ToString::to_string),
        editable: editable.contains(&location),
        index,
        location,
        ..LockedPypi::default()
    };
    if made.vcs.is_some() || provenance.pypi_indexes_unknown || known.is_some_and(|known| known.direct) {
        made.index = None;
    }
    if let Some(known) = known {
        made.editable |= known.editable;
        made.marker.clone_from(&known.marker);
        made.other_files.clone_from(&known.other_files);
        made.direct = known.direct;
        made.size = known.size;
        if made.version.is_none() {
            made.version.clone_from(&known.version);
        }
        if made.hashes.is_empty() {
            made.hashes.clone_from(&known.hashes);
        }
    }
    made
}

/// The lock as pixi.lock v7 with a `tare:` map. The same lock gives the same bytes.
///
/// # Errors
/// Packages that v7 cannot name: conda packages built from source, PyPI names and versions that break the rules.
pub fn write_tare(lock: &Lock) -> Result<String> {
    #[derive(Serialize)]
    struct Tail<'a> {
        tare: &'a Provenance,
    }
    let mut text = HEADER.to_owned();
    text.push_str(&write_pixi(lock)?);
    let provenance = provenance_of(lock);
    let tail = serde_yaml::to_string(&Tail { tare: &provenance })
        .map_err(|error| Error::failure("cannot write the `tare:` map").because(error))?;
    text.push_str(&tail);
    Ok(text)
}

/// The `tare:` map of a lock as it is written: its provenance, and what else v7 has no place for.
pub(super) fn provenance_of(lock: &Lock) -> Provenance {
    let mut provenance = lock.provenance.clone();
    provenance.schema = TARE_SCHEMA;
    provenance.pypi.clear();
    let by_url = |package: &&LockedPypi| package.vcs.is_none() && package.location.contains("://");
    let mut all = lock.platforms.iter().flat_map(|platform| &platform.pypi).filter(by_url).peekable();
    provenance.pypi_indexes_unknown = all.peek().is_some() && all.all(|package| package.index.is_none());
    let unknown = provenance.pypi_indexes_unknown;
    let known: BTreeSet<&str> = lock.platform_names().into_iter().collect();
    provenance.platforms.retain(|name, _| known.contains(name.as_str()));
    for platform in &lock.platforms {
        let facts: &mut PlatformProvenance = provenance.platforms.entry(platform.name.clone()).or_default();
        facts.virtual_packages = platform
            .virtual_packages
            .iter()
            .filter_map(|package| {
                let provenance = package.provenance.clone()?;
                Some((package.to_string(), VirtualPackageProvenance { provenance, source: package.source.clone().unwrap_or_default() }))
            })
            .collect();
        facts.machine_bound = platform
            .conda
            .iter()
            .filter(|record| super::is_machine_bound(record))
            .map(|record| record.package_record.name.as_normalized().to_owned())
            .collect();
        facts.machine_bound.sort();
        facts.pypi_requested = platform
            .pypi
            .iter()
            .filter(|package| package.requested)
            .map(|package| (package.name.clone(), package.extras.clone()))
            .collect();
        facts.incomplete = !platform.complete;
        facts.categories.clone_from(&platform.categories);
        if *facts == PlatformProvenance::default() {
            provenance.platforms.remove(&platform.name);
        }
        for package in &platform.pypi {
            let folder = as_location(&package.location).is_ok_and(|location| is_source(&location, package));
            let extra = PypiProvenance {
                editable: package.editable,
                direct: package.direct || (!unknown && by_url(&package) && package.index.is_none()),
                version: package.version.clone().filter(|_| folder),
                hashes: if folder { package.hashes.clone() } else { PypiHashes::default() },
                marker: package.marker.clone(),
                other_files: package.other_files.clone(),
                size: package.size,
            };
            if !extra.is_empty() {
                provenance.pypi.insert(without_credentials(&package.location), extra);
            }
        }
    }
    provenance
}

/// The lock as pixi.lock v7 and nothing else.
///
/// # Errors
/// As [`write_tare`].
pub fn write_pixi(lock: &Lock) -> Result<String> {
    let mut platforms = Vec::new();
    for platform in &lock.platforms {
        platforms.push(PlatformData {
            name: platform
                .name
                .clone()
                .try_into()
                .map_err(|error| Error::usage(format!("`{}` cannot be a platform's name in a pixi.lock", platform.name)).because(error))?,
            subdir: platform.subdir,
            virtual_packages: platform.virtual_packages.iter().map(ToString::to_string).collect(),
        });
    }
    let environment = if lock.environment.is_empty() { rattler_lock::DEFAULT_ENVIRONMENT_NAME } else { &lock.environment };
    let failed = |error: rattler_lock::ParseCondaLockError| Error::failure("cannot write the lock").because(error);
    let mut builder = LockFile::builder().with_platforms(platforms).map_err(failed)?;
    let channels: Vec<Channel> = lock
        .channels
        .iter()
        .map(|url| Channel { url: without_credentials(url), used_env_vars: lock.channel_env_vars.get(url).cloned().unwrap_or_default() })
        .collect();
    builder.set_channels(environment, channels);
    let pypi = lock.platforms.iter().any(|platform| !platform.pypi.is_empty());
    if pypi || !lock.indexes.is_empty() || !lock.find_links.is_empty() {
        let mut indexes = Vec::new();
        for index in &lock.indexes {
            let index = without_credentials(index);
            indexes
                .push(Url::parse(&index).map_err(|error| Error::usage(format!("the package index `{index}` is no URL")).because(error))?);
        }
        let find_links = lock
            .find_links
            .iter()
            .map(|link| match Url::parse(link) {
                Ok(url) if link.contains("://") => FindLinksUrlOrPath::Url(url),
                _ => FindLinksUrlOrPath::Path(link.into()),
            })
            .collect();
        builder.set_pypi_indexes(environment, PypiIndexes { indexes, find_links });
    }
    for platform in &lock.platforms {
        if let Some(source) = platform.conda_sources.first() {
            return Err(Error::usage(format!("the conda package `{source}` is built from source"))
                .because("only pixi can do that, so it cannot be put into another lock"));
        }
        builder.add_environment_platform(environment, &platform.name).map_err(failed)?;
        for record in &platform.conda {
            let data = CondaPackageData::Binary(Box::new(conda_data(record)));
            builder.add_conda_package(environment, &platform.name, data).map_err(failed)?;
        }
        for package in &platform.pypi {
            builder.add_pypi_package(environment, &platform.name, pypi_data(package)?).map_err(failed)?;
        }
    }
    let text = builder.finish().render_to_string().map_err(|error| Error::failure("cannot write the lock").because(error))?;
    Ok(text)
}

fn conda_data(record: &RepoDataRecord) -> CondaBinaryData {
    let record = for_lock(record);
    let location = UrlOrPath::from(record.url.clone());
    // What the location tells is not repeated.
    let derived = match &location {
        UrlOrPath::Url(url) => {
            let mut url = url.clone();
            let _ = url.path_segments_mut().map(|mut segments| {
                segments.pop().pop();
            });
            Some(url)
        }
        UrlOrPath::Path(_) => None,
    };
    let channel = match record.channel.as_deref().map(Url::parse) {
        Some(Ok(url)) if url.scheme() != HOST_SCHEME => {
            let same = derived.as_ref().is_some_and(|derived| derived.as_str().trim_end_matches('/') == url.as_str().trim_end_matches('/'));
            Some(if same { derived.unwrap_or(url) } else { url })
        }
        _ => derived,
    };
    CondaBinaryData {
        package_record: record.package_record,
        location,
        file_name: record.identifier,
        channel: channel.map(ChannelUrl::from),
    }
}

/// A location as pixi.lock has it.
fn as_location(text: &str) -> Result<UrlOrPath> {
    text.parse().map_err(|error| Error::usage(format!("`{}` is neither a URL nor a path", without_credentials(text))).because(error))
}

/// Whether v7 takes the package for a folder, whose version can change.
fn is_source(location: &UrlOrPath, package: &LockedPypi) -> bool {
    package.version.is_none()
        || match location {
            UrlOrPath::Path(path) => {
                let path = path.as_str();
                ![".whl", ".tar.gz", ".zip", ".tar.bz2", ".tgz", ".tar.xz"].iter().any(|ending| path.ends_with(ending))
            }
            UrlOrPath::Url(_) => false,
        }
}

fn pypi_data(package: &LockedPypi) -> Result<PypiPackageData> {
    let refuse = |what: &str, why: &dyn std::fmt::Display| {
        Error::usage(format!("the PyPI package `{}` cannot be put into a pixi.lock: {what}", package.name)).because(why)
    };
    let given = without_credentials(&package.location);
    let location = as_location(&given)
        .map_err(|error| error.context(format!("the PyPI package `{}` cannot be put into a pixi.lock", package.name)))?;
    let source = is_source(&location, package);
    let is_path = matches!(location, UrlOrPath::Path(_));
    let location = if is_path { Verbatim::new_with_given(location, given) } else { Verbatim::new(location) };
    let name = package.name.parse().map_err(|error| refuse("its name is malformed", &error))?;
    let mut requires_dist = Vec::new();
    for text in &package.requires_dist {
        super::guard_requirement(text).map_err(|why| refuse(&format!("its requirement `{text}` is malformed"), &why))?;
        requires_dist.push(text.parse().map_err(|error| refuse(&format!("its requirement `{text}` is malformed"), &error))?);
    }
    let requires_python = match &package.requires_python {
        Some(text) => Some(text.parse().map_err(|error| refuse(&format!("its `requires-python` `{text}` is malformed"), &error))?),
        None => None,
    };
    if source {
        return Ok(PypiSourceData { name, location, requires_dist, requires_python, source_data: SourceData::default() }.into());
    }
    let version = package.version.as_deref().unwrap_or_default();
    let version = version.parse().map_err(|error| refuse(&format!("its version `{version}` is malformed"), &error))?;
    let md5 = digest(package.hashes.md5.as_deref(), parse_digest_from_hex::<Md5>).map_err(|text| refuse("its md5 is malformed", &text))?;
    let sha256 = digest(package.hashes.sha256.as_deref(), parse_digest_from_hex::<Sha256>)
        .map_err(|text| refuse("its sha256 is malformed", &text))?;
    let index_url = match &package.index {
        Some(text) => Some(Url::parse(&without_credentials(text)).map_err(|error| refuse("its index is no URL", &error))?),
        None => None,
    };
    Ok(PypiDistributionData {
        name,
        version,
        location,
        index_url,
        hash: PackageHashes::from_hashes(md5, sha256),
        requires_dist,
        requires_python,
    }
    .into())
}

fn digest<T>(text: Option<&str>, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>, String> {
    text.map(|text| parse(text).ok_or_else(|| text.to_owned())).transpose()
}
