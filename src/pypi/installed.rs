//! The Python packages of an environment that no conda package brought: what they own, who needs them, and what a change does to them.
//!
//! The metadata folders in site-packages are the truth, whoever made them. tare's own records only add where a package came from, and count only
//! as long as the very package they tell of is there.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pep508_rs::{MarkerEnvironment, Requirement};
use rattler_conda_types::Subdir;
use sha2::{Digest, Sha256};
use url::Url;

use super::install::{INSTALLER, TareRecord, records_folder, replace, write_record};
use super::record_file::{self, Line};
use super::{PypiPlan, PypiSource, ReadyWheel, Version, WheelFile, wheel};
use crate::error::{Error, Result};
use crate::prefix::{Distribution, Prefix, normalize};

/// A Python package as it is in an environment.
#[derive(Debug, Clone)]
pub struct Installed {
    /// Normalized name.
    pub name: String,
    /// Version as written.
    pub version: String,
    /// `.dist-info` or `.egg-info`, relative to the prefix.
    pub info: PathBuf,
    /// What `INSTALLER` says; empty if there is none.
    pub installer: String,
    /// It was asked for, rather than only needed (`REQUESTED`).
    pub requested: bool,
    /// Everything it owns, relative to the prefix; `None` without a `RECORD` that can be read.
    pub files: Option<Vec<PathBuf>>,
    /// What tare knows of it, if tare installed this very package.
    pub tare: Option<TareRecord>,
    /// `Requires-Dist`.
    pub requires: Vec<String>,
}

impl Installed {
    /// Whether tare installed it.
    pub fn is_ours(&self) -> bool {
        self.tare.is_some()
    }

    /// Whether it is tare's own tooling, which no request and no lock names.
    pub fn is_tooling(&self) -> bool {
        self.tare.as_ref().is_some_and(|tare| tare.record.is_tooling())
    }

    /// As it is named where packages of both halves may be meant: `pypi::NAME`.
    pub fn qualified(&self) -> String {
        super::install::qualified(&self.name)
    }

    /// Whether it is what `ready` would install.
    pub(crate) fn is(&self, ready: &ReadyWheel) -> bool {
        self.name == ready.record.name.as_ref() && is_same(self, ready)
    }

    pub(crate) fn owns(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().flatten().map(PathBuf::as_path)
    }
}

/// tare's record of `name`, if it can be read.
pub(crate) fn tare_record(prefix: &Path, name: &str) -> Option<TareRecord> {
    let bytes = crate::files::read(&records_folder(prefix).join(format!("{name}.json")), crate::files::MOST).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// All of tare's records of Python packages, sorted by name, whatever became of the packages; and the paths (relative to the prefix) of those that
/// cannot be read.
pub(crate) fn noted(prefix: &Path) -> (Vec<TareRecord>, Vec<String>) {
    let folder = records_folder(prefix);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let (mut records, mut damaged) = (Vec::new(), Vec::new());
    for file in files {
        match crate::files::read(&file, crate::files::MOST).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
            Some(record) => records.push(record),
            None => damaged.push(file.strip_prefix(prefix).unwrap_or(&file).to_string_lossy().into_owned()),
        }
    }
    (records, damaged)
}

/// The Python packages of `prefix` that no conda package brought, sorted by name.
pub fn read(prefix: &Prefix) -> Vec<Installed> {
    prefix
        .pip_distributions()
        .into_iter()
        .map(|distribution| read_one(prefix.path(), distribution.name, distribution.version, distribution.path))
        .collect()
}

/// One of them.
pub(crate) fn of(prefix: &Prefix, distribution: &Distribution) -> Installed {
    let distribution = distribution.clone();
    read_one(prefix.path(), distribution.name, distribution.version, distribution.path)
}

fn read_one(root: &Path, name: String, version: String, info: PathBuf) -> Installed {
    let folder = root.join(&info);
    let text = |file: &str| {
        crate::files::read(&folder.join(file), crate::files::MOST).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    };
    let installer = text("INSTALLER").unwrap_or_default().trim().to_owned();
    let metadata = text("METADATA").or_else(|| text("PKG-INFO")).unwrap_or_default();
    let files = text("RECORD").and_then(|text| owned(root, &info, &text));
    let tare = (installer == INSTALLER).then(|| tare_record(root, &name)).flatten().filter(|record| {
        record.dist_info == info.to_string_lossy() && Version::from_str(&version).is_ok_and(|version| version == record.record.version)
    });
    Installed {
        requested: folder.join("REQUESTED").exists(),
        requires: wheel::headers(&metadata, "Requires-Dist"),
        name,
        version,
        info,
        installer,
        files,
        tare,
    }
}

/// The files that a `RECORD` lists, as far as they are in the environment.
pub(crate) fn owned(root: &Path, info: &Path, record: &str) -> Option<Vec<PathBuf>> {
    let site = info.parent()?;
    let lines: Vec<Line> = record_file::parse(record).ok()?;
    let inside = |line: &Line| match Path::new(&line.path).strip_prefix(root) {
        Ok(relative) => Some(relative.to_owned()),
        Err(_) => record_file::inside(site, &line.path),
    };
    // The notes of the environment are nobody's, whatever a list says.
    let mut files: Vec<PathBuf> =
        lines.iter().filter_map(inside).filter(|path| !path.starts_with("conda-meta") && !path.as_os_str().is_empty()).collect();
    files.sort();
    files.dedup();
    Some(files)
}

/// Makes the lists of a copied package true again: copying replaces the path of the environment in its text files (scripts, for example), and what
/// Python compiled from such a file is left out. `stage`: the copy.
///
/// # Errors
/// The lists cannot be written.
pub(crate) fn relist(stage: &Path, installed: &Installed) -> Result<Option<TareRecord>> {
    let record = stage.join(&installed.info).join("RECORD");
    let Some(lines) = crate::files::read_text(&record).ok().and_then(|text| record_file::parse(&text).ok()) else { return Ok(None) };
    let Some(site) = installed.info.parent() else { return Ok(None) };
    let mut tare = installed.tare.clone();
    let mut text = String::new();
    let mut changed = false;
    for line in &lines {
        let path = record_file::inside(site, &line.path);
        let full = path.as_ref().map(|path| stage.join(path));
        let kept = match (&full, line.sha256()) {
            (Some(full), Some(sha256)) if full.is_file() => {
                let found =
                    rattler_digest::compute_file_digest::<rattler_digest::Sha256>(full).map_err(|error| Error::io("read", full, &error))?;
                if found[..] == sha256[..] { None } else { Some((found, std::fs::metadata(full).map_or(0, |metadata| metadata.len()))) }
            }
            _ => None,
        };
        match kept {
            Some((found, size)) => {
                changed = true;
                text += &record_file::row(&line.path, Some((&found[..], size)));
                let listed =
                    tare.as_mut().zip(path).and_then(|(tare, path)| tare.files.iter_mut().find(|file| Path::new(&file.path) == path));
                if let (Some(listed), Ok(sha256)) = (listed, found[..].try_into()) {
                    (listed.sha256, listed.size) = (sha256, size);
                }
            }
            None => {
                let hash = line.hash.as_ref().filter(|hash| hash.algorithm == "sha256").zip(line.size);
                text += &match (hash, &line.hash) {
                    (Some((hash, size)), _) => record_file::row(&line.path, Some((&hash.digest, size))),
                    (None, None) => record_file::row(&line.path, None),
                    // As it was written.
                    (None, Some(_)) => return Ok(tare),
                };
            }
        }
    }
    if changed {
        replace(&record, text.as_bytes())?;
    }
    if let Some(tare) = &mut tare {
        if changed && let Some(own) = tare.files.iter_mut().find(|file| Path::new(&file.path) == installed.info.join("RECORD")) {
            (own.sha256, own.size) = (Sha256::digest(&text).into(), text.len() as u64);
        }
        write_record(stage, tare)?;
    }
    Ok(tare)
}

/// What tare installed and what is still there, for locks and exports: URL, hash and files of each.
pub fn records(prefix: &Prefix) -> Vec<TareRecord> {
    read(prefix).into_iter().filter_map(|installed| installed.tare).collect()
}

/// SHA-256 of the wheel in hex, if it is known.
fn hash_of(ready: &ReadyWheel) -> Option<&str> {
    match (&ready.wheel, &ready.record.source) {
        (WheelFile::Local { sha256, .. }, _) => Some(sha256),
        (WheelFile::Remote, PypiSource::Archive { sha256, .. }) => sha256.as_deref(),
        (WheelFile::Remote, _) => None,
    }
}

/// The digest that an environment made of `plan` has in its stamp; `None` for a plan of nothing. tare's own tooling does not count.
pub(crate) fn digest_of_plan(plan: &PypiPlan) -> Option<String> {
    let mut lines: Vec<String> = plan
        .wheels
        .iter()
        .filter(|ready| !ready.record.is_tooling())
        .map(|ready| {
            let hash = hash_of(ready).unwrap_or("-").to_ascii_lowercase();
            format!("{} {} {hash} {}\n", ready.record.name, ready.record.version, ready.record.requested)
        })
        .collect();
    lines.sort();
    (!lines.is_empty()).then(|| crate::install::hex_text(&Sha256::digest(lines.concat())))
}

/// What a change does to the Python packages of an environment.
#[derive(Debug, Clone, Default)]
pub struct Changes {
    /// They stay as they are.
    pub keep: Vec<Installed>,
    /// They come, or replace others.
    pub link: Vec<ReadyWheel>,
    /// They go, or are replaced.
    pub unlink: Vec<Installed>,
}

impl Changes {
    /// Nothing happens to what is installed.
    pub fn none(installed: Vec<Installed>) -> Self {
        Changes { keep: installed, ..Changes::default() }
    }

    /// From what is installed to `wanted`. What is there already stays; other versions of the same distributions are replaced. `prune`: what tare
    /// installed and `wanted` does not name goes too, but not its own tooling. What pip or another tool installed goes only where `wanted` replaces it.
    pub fn towards(installed: Vec<Installed>, wanted: &[ReadyWheel], prune: bool) -> Self {
        let mut wanted = wanted.to_vec();
        if !prune {
            // What was asked for before is still asked for, though this request only needs it.
            let asked: BTreeSet<&str> = installed.iter().filter(|known| known.requested).map(|known| known.name.as_str()).collect();
            for ready in &mut wanted {
                ready.record.requested |= asked.contains(ready.record.name.as_ref());
            }
        }
        let by_name: BTreeMap<&str, &ReadyWheel> = wanted.iter().map(|ready| (ready.record.name.as_ref(), ready)).collect();
        let mut changes = Changes::default();
        let mut there: BTreeSet<String> = BTreeSet::new();
        for installed in installed {
            match by_name.get(installed.name.as_str()) {
                Some(ready) if is_same(&installed, ready) => {
                    there.insert(installed.name.clone());
                    changes.keep.push(installed);
                }
                Some(_) => changes.unlink.push(installed),
                None if prune && installed.is_ours() && !installed.is_tooling() => changes.unlink.push(installed),
                None => changes.keep.push(installed),
            }
        }
        changes.link = wanted.iter().filter(|ready| !there.contains(ready.record.name.as_ref())).cloned().collect();
        changes
    }

    /// Whether nothing comes or goes.
    pub fn is_empty(&self) -> bool {
        self.link.is_empty() && self.unlink.is_empty()
    }
}

/// Whether what is installed is what `ready` would install.
fn is_same(installed: &Installed, ready: &ReadyWheel) -> bool {
    let Ok(version) = Version::from_str(&installed.version) else { return false };
    if version != ready.record.version {
        return false;
    }
    match &installed.tare {
        Some(tare) => {
            let same = match hash_of(ready) {
                Some(hash) => tare.wheel.sha256.eq_ignore_ascii_case(hash),
                None => same_place(&tare.record.source, &ready.record.source),
            };
            same && tare.record.requested == ready.record.requested
        }
        // Another tool's package satisfies a pin of an index; where it came from otherwise is not known well enough.
        None => matches!(ready.record.source, PypiSource::Archive { direct: false, .. }) && installed.files.is_some(),
    }
}

/// Whether two sources are one, whatever is known of its archive.
fn same_place(a: &PypiSource, b: &PypiSource) -> bool {
    match (a, b) {
        (
            PypiSource::Archive { url, direct, subdirectory, .. },
            PypiSource::Archive { url: other_url, direct: other_direct, subdirectory: other_subdirectory, .. },
        ) => url == other_url && direct == other_direct && subdirectory == other_subdirectory,
        _ => a == b,
    }
}

/// Marker environment of the environment at `version` of CPython on this machine; `None` if the version is odd.
fn markers(version: &str) -> Option<MarkerEnvironment> {
    let version = Version::from_str(version).ok().filter(|version| version.release().len() > 1)?;
    super::markers(&version, Subdir::current()?).ok()
}

/// The distributions that `installed` needs without any extra, normalized. `python`: full version of the interpreter.
fn needs(installed: &Installed, python: &str) -> Vec<String> {
    let markers = markers(python);
    installed
        .requires
        .iter()
        .filter_map(|text| Requirement::<Url>::from_str(text).ok())
        .filter(|requirement| markers.as_ref().is_none_or(|markers| requirement.evaluate_markers(markers, &[])))
        .map(|requirement| normalize(requirement.name.as_ref()))
        .collect()
}

/// A distribution that is installed and one that it needs, which is not there; `None` if all are. Extras count where the section asks for them.
///
/// # Errors
/// The packages cannot be read.
pub(crate) fn lacking(prefix: &Prefix, section: &super::Section) -> Result<Option<(String, String)>> {
    let all = read(prefix);
    if all.is_empty() {
        return Ok(None);
    }
    let records = prefix.records()?;
    let python = super::install::python_version(records.iter().map(|record| &record.repodata_record.package_record));
    let Some(markers) = python.and_then(|python| markers(&python.to_string())) else { return Ok(None) };
    let mut there = brought(records.iter().flat_map(|record| record.files.iter().map(PathBuf::as_path)));
    there.extend(all.iter().map(|installed| installed.name.clone()));
    let asked: BTreeMap<String, Vec<pep508_rs::ExtraName>> = section
        .requirements
        .iter()
        .filter_map(|item| match &item.kind {
            crate::spec::PipKind::Requirement { requirement, .. } => {
                Some((normalize(requirement.name.as_ref()), requirement.extras.clone()))
            }
            _ => None,
        })
        .collect();
    for installed in &all {
        let extras = asked.get(&installed.name).map(Vec::as_slice).unwrap_or_default();
        let needs = installed.requires.iter().filter_map(|text| Requirement::<Url>::from_str(text).ok());
        let lacking = needs
            .filter(|requirement| requirement.evaluate_markers(&markers, &[]) || requirement.evaluate_markers(&markers, extras))
            .find(|requirement| !there.contains(&normalize(requirement.name.as_ref())));
        if let Some(requirement) = lacking {
            return Ok(Some((installed.name.clone(), requirement.name.to_string())));
        }
    }
    Ok(None)
}

/// What `installed` need, normalized. `python`: full version of the interpreter.
pub(crate) fn all_needs<'a>(installed: impl IntoIterator<Item = &'a Installed>, python: &str) -> BTreeSet<String> {
    installed.into_iter().flat_map(|installed| needs(installed, python)).collect()
}

/// The packages of `installed` that need, directly or not, a distribution in `gone`; without those in `gone`. Sorted.
pub(crate) fn dependents(installed: &[Installed], gone: &BTreeSet<String>, python: &str) -> BTreeSet<String> {
    let needs: Vec<(&str, Vec<String>)> = installed.iter().map(|installed| (installed.name.as_str(), needs(installed, python))).collect();
    let mut all = gone.clone();
    let mut found = BTreeSet::new();
    loop {
        let before = all.len();
        for (name, needs) in &needs {
            if !all.contains(*name) && needs.iter().any(|need| all.contains(need)) {
                all.insert((*name).to_owned());
                found.insert((*name).to_owned());
            }
        }
        if all.len() == before {
            return found;
        }
    }
}

/// The packages of `installed` that tare installed and that neither were asked for nor are needed by one that was; those that stand alone already
/// without what goes do not count.
pub(crate) fn unneeded(installed: &[Installed], gone: &BTreeSet<String>, python: &str) -> BTreeSet<String> {
    let reached = |skip: &BTreeSet<String>| -> BTreeSet<String> {
        let by_name: BTreeMap<&str, &Installed> = installed.iter().map(|installed| (installed.name.as_str(), installed)).collect();
        let mut next: Vec<&str> = installed
            .iter()
            .filter(|installed| !skip.contains(&installed.name) && (installed.requested || !installed.is_ours()))
            .map(|installed| installed.name.as_str())
            .collect();
        let mut reached = BTreeSet::new();
        while let Some(name) = next.pop() {
            if skip.contains(name) || !reached.insert(name.to_owned()) {
                continue;
            }
            let Some(installed) = by_name.get(name) else { continue };
            next.extend(needs(installed, python).iter().filter_map(|need| by_name.get_key_value(need.as_str())).map(|(name, _)| *name));
        }
        reached
    };
    let (before, after) = (reached(&BTreeSet::new()), reached(gone));
    before.difference(&after).filter(|name| !gone.contains(*name)).cloned().collect()
}

/// The distributions that conda packages brought, by the package: normalized names of the `.dist-info` and `.egg-info` among `files`.
pub(crate) fn brought<'a>(files: impl IntoIterator<Item = &'a Path>) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut seen: HashSet<&str> = HashSet::new();
    for file in files {
        for part in file.iter().filter_map(|part| part.to_str()) {
            let stem = part.strip_suffix(".dist-info").or_else(|| part.strip_suffix(".egg-info"));
            if let Some(stem) = stem
                && seen.insert(part)
            {
                names.insert(normalize(stem.split('-').next().unwrap_or(stem)));
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn installed(name: &str, requires: &[&str]) -> Installed {
        Installed {
            name: name.to_owned(),
            version: "1.0".to_owned(),
            info: PathBuf::new(),
            installer: "pip".to_owned(),
            requested: false,
            files: Some(Vec::new()),
            tare: None,
            requires: requires.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn who_needs_what_goes_is_found_through_others_and_not_through_extras() {
        let all = [
            installed("a", &[]),
            installed("b", &["A>=1"]),
            installed("c", &["b ; python_version >= '3.8'"]),
            installed("d", &["a ; extra == 'x'"]),
            installed("e", &["a ; python_version < '3'"]),
            installed("f", &["not a requirement !"]),
        ];
        let found = dependents(&all, &BTreeSet::from(["a".to_owned()]), "3.11.4");
        assert_eq!(Vec::from_iter(found), ["b", "c"]);
    }

    #[test]
    fn conda_packages_bring_distributions() {
        let files =
            ["lib/python3.11/site-packages/Foo_Bar-1.0.dist-info/METADATA", "lib/python3.11/site-packages/old-2-py3.11.egg-info", "bin/x"];
        assert_eq!(Vec::from_iter(brought(files.iter().map(Path::new))), ["foo-bar", "old"]);
    }
}
