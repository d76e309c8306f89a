//! Lock formats: conda-lock, pixi.lock and tare.lock through [`crate::lock`], and pylock.toml (PEP 751), which is written here.

use rattler_conda_types::Subdir;
use toml_edit::{Array, ArrayOfTables, DocumentMut, InlineTable, Item, Table, Value, value};

use super::conda::names;
use super::{Exported, Format, Options, Origin, Subject};
use crate::error::{Error, Result};
use crate::lock::{self, Lock, LockedPlatform, LockedPypi, LockedVcs, LockedVirtualPackage, PypiHashes};
use crate::prefix;

/// The platform of a lock that is meant: the named one, the only one, this machine's.
///
/// # Errors
/// There is none of that name, or it has to be named.
pub fn choose<'a>(lock: &'a Lock, name: Option<&str>, here: Option<Subdir>) -> Result<&'a LockedPlatform> {
    let known = || format!("it has {}", names(lock.platform_names().into_iter()));
    if let Some(name) = name {
        return lock.platform(name).ok_or_else(|| Error::usage(format!("the lock has no platform `{name}`")).because(known()));
    }
    if let [only] = lock.platforms.as_slice() {
        return Ok(only);
    }
    here.and_then(|here| lock.platform(here.as_str()))
        .ok_or_else(|| Error::usage("the lock is for several platforms").because(known()).hint("say which: --platform NAME"))
}

/// Writes a lock format that [`crate::lock`] has.
///
/// # Errors
/// As for the writers there.
pub fn write(lock: &Lock, format: Format) -> Result<Exported> {
    let mut notes = Vec::new();
    if format == Format::Pixi {
        let records = lock.platforms.iter().flat_map(|platform| &platform.conda).filter(|record| lock::is_machine_bound(record));
        let bound: std::collections::BTreeSet<&str> = records.map(|record| record.package_record.name.as_normalized()).collect();
        if !bound.is_empty() {
            let bound = names(bound.into_iter());
            notes.push(format!("tare can install this lock, pixi cannot: {bound} is of the channel `host`, this machine's Python"));
        }
    }
    let text = match format {
        Format::CondaLock => lock::write_conda_lock(lock)?,
        Format::Tare => lock::write_tare(lock)?,
        _ => lock::write_pixi(lock)?,
    };
    Ok(Exported { text, notes })
}

/// The lock of what is in an environment.
///
/// # Errors
/// A package whose URL is not known: such as pip installed from an index, which it does not note.
pub fn of_subject(subject: &Subject) -> Result<Lock> {
    let unknown: Vec<&str> = subject
        .conda
        .iter()
        .filter(|record| prefix::known_url(record).is_none())
        .map(|record| record.package_record.name.as_normalized())
        .collect();
    if !unknown.is_empty() {
        return Err(Error::failure("a lock is made of URLs").because(format!("no URL is known for {}", names(unknown.into_iter()))));
    }
    let pypi = locked_pypi(subject)?;
    let subdir = subject.platform.or_else(Subdir::current).unwrap_or(Subdir::NoArch);
    let mut platform = LockedPlatform::new(subdir.to_string(), subdir);
    platform.virtual_packages = subject.virtual_packages.iter().filter_map(|text| LockedVirtualPackage::parse(text).ok()).collect();
    platform.conda = subject.conda.iter().map(lock::for_lock).collect();
    platform.pypi = pypi;
    let mut channels: Vec<String> = Vec::new();
    for record in &platform.conda {
        let url = if lock::is_machine_bound(record) { "host:///".to_owned() } else { format!("{}/", prefix::channel_url(record)) };
        if !channels.contains(&url) {
            channels.push(url);
        }
    }
    let mut indexes: Vec<String> = platform.pypi.iter().filter_map(|package| package.index.clone()).collect();
    indexes.sort();
    indexes.dedup();
    let mut lock = Lock { platforms: vec![platform], channels, indexes, environment: "default".to_owned(), ..Lock::default() };
    lock.provenance.variables = subject.variables.clone();
    lock.sort();
    Ok(lock)
}

fn locked_pypi(subject: &Subject) -> Result<Vec<LockedPypi>> {
    let without: Vec<&str> = subject
        .python
        .iter()
        .filter(|package| matches!(&package.origin, Origin::Index { url: None, .. }))
        .map(|package| package.name.as_str())
        .collect();
    if !without.is_empty() {
        return Err(Error::failure("a lock is made of URLs and hashes")
            .because(format!("pip does not note from which file of an index it installed {}", names(without.into_iter())))
            .hint("lock the request instead: tare lock -f environment.yml")
            .hint("formats that hold name and version: environment-yaml, pip"));
    }
    Ok(subject
        .python
        .iter()
        .map(|package| {
            if let Some(record) = &package.record {
                return lock::locked_pypi(record);
            }
            let mut made = LockedPypi {
                name: package.name.clone(),
                version: Some(package.version.clone()).filter(|version| !version.is_empty()),
                requires_dist: package.requires.clone(),
                requested: package.requested,
                ..LockedPypi::default()
            };
            match &package.origin {
                Origin::Index { url, sha256 } => {
                    made.location = url.clone().unwrap_or_default();
                    made.hashes = PypiHashes { md5: None, sha256: sha256.clone() };
                }
                Origin::Archive { url, sha256, .. } => {
                    made.location = url.clone();
                    made.direct = true;
                    made.hashes = PypiHashes { md5: None, sha256: sha256.clone().filter(|hash| hash.len() == 64) };
                }
                Origin::Vcs { vcs, url, commit, subdirectory, editable } => {
                    let folder = subdirectory.as_ref().map(|folder| format!("?subdirectory={folder}")).unwrap_or_default();
                    made.location = format!("{vcs}+{url}{folder}#{commit}");
                    made.editable = *editable;
                    made.vcs = Some(LockedVcs {
                        kind: vcs.clone(),
                        url: url.clone(),
                        revision: None,
                        commit: Some(commit.clone()),
                        subdirectory: subdirectory.clone(),
                    });
                }
                Origin::Directory { url, editable } => {
                    let path = url::Url::parse(url).ok().and_then(|url| url.to_file_path().ok());
                    made.location = path.map_or_else(|| url.clone(), |path| path.display().to_string());
                    made.editable = *editable;
                }
            }
            made
        })
        .collect())
}

/// pylock.toml of an environment.
///
/// # Errors
/// As for [`of_subject`] and [`pylock_of`].
pub fn pylock(subject: &Subject, _: &Options) -> Result<Exported> {
    let python = Subject { conda: Vec::new(), ..subject.clone() };
    let lock = of_subject(&python)?;
    let mut exported = pylock_of(&lock, &lock.platforms[0])?;
    exported.notes = left_out(subject.conda.len());
    Ok(exported)
}

fn left_out(conda: usize) -> Vec<String> {
    if conda == 0 { Vec::new() } else { vec![format!("the format holds Python packages only: {conda} conda packages are left out")] }
}

/// pylock.toml of one platform of a lock: the Python packages.
///
/// # Errors
/// A package without the hash or commit that the format demands.
pub fn pylock_of(lock: &Lock, platform: &LockedPlatform) -> Result<Exported> {
    let mut document = DocumentMut::new();
    document["lock-version"] = value("1.0");
    document["created-by"] = value("tare");
    let mut packages = ArrayOfTables::new();
    for package in &platform.pypi {
        packages.push(pylock_package(package)?);
    }
    if platform.pypi.is_empty() {
        document["packages"] = value(Array::new());
    } else {
        document["packages"] = Item::ArrayOfTables(packages);
    }
    let _ = lock;
    Ok(Exported { text: document.to_string(), notes: left_out(platform.conda.len()) })
}

fn pylock_package(package: &LockedPypi) -> Result<Table> {
    let refuse = |why: &str| Err(Error::failure(format!("a pylock.toml cannot hold `{}`", package.name)).because(why));
    let mut table = Table::new();
    table["name"] = value(&package.name);
    if let Some(version) = package.version.as_ref().filter(|_| package.vcs.is_none() && !package.editable) {
        table["version"] = value(version);
    }
    if let Some(marker) = &package.marker {
        table["marker"] = value(marker);
    }
    if let Some(python) = &package.requires_python {
        table["requires-python"] = value(python);
    }
    if let Some(index) = &package.index {
        table["index"] = value(index);
    }
    if let Some(vcs) = &package.vcs {
        let Some(commit) = &vcs.commit else { return refuse("the exact commit is not known") };
        let mut inline = InlineTable::new();
        inline.insert("type", vcs.kind.as_str().into());
        inline.insert("url", vcs.url.as_str().into());
        if let Some(revision) = &vcs.revision {
            inline.insert("requested-revision", revision.as_str().into());
        }
        inline.insert("commit-id", commit.as_str().into());
        if let Some(folder) = &vcs.subdirectory {
            inline.insert("subdirectory", folder.as_str().into());
        }
        table["vcs"] = value(inline);
        return Ok(table);
    }
    let file = |location: &str, hashes: &PypiHashes, size: Option<u64>| -> Option<InlineTable> {
        let mut inline = InlineTable::new();
        let plain = location.split('#').next().unwrap_or(location);
        let key = if plain.contains("://") { "url" } else { "path" };
        inline.insert(key, plain.into());
        if let Some(size) = size.and_then(|size| i64::try_from(size).ok()) {
            inline.insert("size", size.into());
        }
        let mut table = InlineTable::new();
        for (name, hash) in [("md5", &hashes.md5), ("sha256", &hashes.sha256)] {
            if let Some(hash) = hash {
                table.insert(name, hash.as_str().into());
            }
        }
        if table.is_empty() {
            return None;
        }
        inline.insert("hashes", Value::InlineTable(table));
        Some(inline)
    };
    let ends = |location: &str, ending: &str| location.split(['#', '?']).next().unwrap_or(location).ends_with(ending);
    let is_archive = [".whl", ".tar.gz", ".zip", ".tar.bz2", ".tar.xz", ".tgz"].iter().any(|ending| ends(&package.location, ending));
    if package.editable || !(is_archive || package.location.contains("://")) {
        let mut inline = InlineTable::new();
        inline.insert("path", package.location.as_str().into());
        if package.editable {
            inline.insert("editable", true.into());
        }
        table["directory"] = value(inline);
        return Ok(table);
    }
    let Some(main) = file(&package.location, &package.hashes, package.size) else { return refuse("no hash of its file is known") };
    let from_index = package.index.is_some() || !package.other_files.is_empty() || package.location.contains("/packages/");
    let mut wheels = Array::new();
    let mut sdist = None;
    let mut add = |location: &str, inline: InlineTable| {
        if ends(location, ".whl") {
            wheels.push(Value::InlineTable(inline));
        } else {
            sdist = Some(inline);
        }
    };
    if package.direct || (!from_index && !ends(&package.location, ".whl")) {
        let mut main = main;
        let fragment = package.location.split_once('#').map(|(_, fragment)| fragment).unwrap_or_default();
        if let Some(folder) = fragment.split('&').find_map(|part| part.strip_prefix("subdirectory=")) {
            main.insert("subdirectory", folder.into());
        }
        table["archive"] = value(main);
        return Ok(table);
    }
    add(&package.location, main);
    for other in &package.other_files {
        let Some(inline) = file(&other.location, &other.hashes, other.size) else { return refuse("no hash of one of its files is known") };
        add(&other.location, inline);
    }
    if let Some(sdist) = sdist {
        table["sdist"] = value(sdist);
    }
    if !wheels.is_empty() {
        for wheel in wheels.iter_mut() {
            wheel.decor_mut().set_prefix("\n    ");
        }
        wheels.set_trailing("\n");
        wheels.set_trailing_comma(true);
        table["wheels"] = value(wheels);
    }
    Ok(table)
}
