//! The PyPI half of a lock as records that are resolved and installed, and back.

use std::path::Path;
use std::str::FromStr;

use url::Url;

use super::{LockedPlatform, LockedPypi, LockedVcs, PypiHashes, without_credentials};
use crate::error::{Error, Result};
use crate::pypi::{Name, PypiRecord, PypiSource, Version};

/// A record as a lock keeps it.
pub fn locked(record: &PypiRecord) -> LockedPypi {
    let mut made = LockedPypi {
        name: record.name.to_string(),
        version: Some(record.version.to_string()),
        requires_dist: record.requires_dist.clone(),
        requires_python: record.requires_python.clone(),
        requested: record.requested,
        extras: record.extras.clone(),
        ..LockedPypi::default()
    };
    match &record.source {
        PypiSource::Archive { url, sha256, size, index, direct, subdirectory } => {
            let mut url = url.clone();
            url.set_fragment(subdirectory.as_ref().map(|folder| format!("subdirectory={folder}")).as_deref());
            made.location = without_credentials(url.as_str());
            made.hashes = PypiHashes { md5: None, sha256: sha256.as_ref().map(|hash| hash.to_ascii_lowercase()) };
            made.size = *size;
            made.direct = *direct;
            made.index = index.as_ref().filter(|_| !direct).map(|index| without_credentials(index.as_str()));
        }
        PypiSource::Vcs { system, url, requested_revision, commit, subdirectory } => {
            let vcs = LockedVcs {
                kind: system.clone(),
                url: without_credentials(url.as_str()),
                revision: requested_revision.clone(),
                commit: Some(commit.clone()),
                subdirectory: subdirectory.clone(),
            };
            made.location = location_of(&vcs);
            made.vcs = Some(vcs);
        }
        PypiSource::Directory { path, editable } => {
            made.location = path_text(path);
            made.editable = *editable;
        }
    }
    made
}

/// `KIND+URL?rev=REVISION&subdirectory=FOLDER#COMMIT`: how pixi.lock names a repository.
pub(super) fn location_of(vcs: &LockedVcs) -> String {
    let mut location = format!("{}+{}", vcs.kind, vcs.url);
    let mut query = Vec::new();
    if let Some(revision) = &vcs.revision {
        query.push(format!("rev={revision}"));
    }
    if let Some(folder) = &vcs.subdirectory {
        query.push(format!("subdirectory={folder}"));
    }
    if !query.is_empty() {
        location.push('?');
        location.push_str(&query.join("&"));
    }
    if let Some(commit) = &vcs.commit {
        location.push('#');
        location.push_str(commit);
    }
    location
}

/// A path that no reader takes for the name of a package.
fn path_text(path: &Path) -> String {
    let text = path.display().to_string();
    match text.as_str() {
        "" => ".".to_owned(),
        _ if path.is_absolute() || text.starts_with('.') => text,
        _ => format!("./{text}"),
    }
}

/// The PyPI half of a platform as records. `base`: the folder of the lock, which relative paths start from.
///
/// # Errors
/// A package that cannot be installed as it stands there, with its name: a malformed name or version, a repository without its commit.
pub fn records(platform: &LockedPlatform, base: &Path) -> Result<Vec<PypiRecord>> {
    platform.pypi.iter().map(|package| record(package, base)).collect()
}

fn record(package: &LockedPypi, base: &Path) -> Result<PypiRecord> {
    let refuse = |what: String| Error::usage(format!("the PyPI package `{}` of the lock cannot be installed", package.name)).because(what);
    let name = Name::from_str(&package.name).map_err(|error| refuse(error.to_string()))?;
    let source = source(package, base).map_err(&refuse)?;
    let version = match (&package.version, &source) {
        (Some(text), _) => Version::from_str(text).map_err(|error| refuse(format!("its version `{text}` is malformed: {error}")))?,
        (None, PypiSource::Archive { url, .. }) => version_of(url).ok_or_else(|| refuse("its version is not known".to_owned()))?,
        // What a folder or a repository is at the time is known when it is built.
        (None, _) => Version::new([0]),
    };
    Ok(PypiRecord {
        name,
        version,
        source,
        requires_dist: package.requires_dist.clone(),
        requires_python: package.requires_python.clone(),
        requested: package.requested,
        extras: package.extras.clone(),
    })
}

fn source(package: &LockedPypi, base: &Path) -> Result<PypiSource, String> {
    if let Some(vcs) = &package.vcs {
        let commit = vcs.commit.clone().ok_or("the lock does not hold its commit")?;
        let url = Url::parse(&vcs.url).map_err(|error| format!("`{}`: {error}", vcs.url))?;
        return Ok(PypiSource::Vcs {
            system: vcs.kind.clone(),
            url,
            requested_revision: vcs.revision.clone(),
            commit,
            subdirectory: vcs.subdirectory.clone(),
        });
    }
    let is_url = package.location.contains("://");
    let plain = package.location.split(['#', '?']).next().unwrap_or_default();
    if package.editable || !(is_url || is_archive(plain)) {
        let path = match Url::parse(&package.location) {
            Ok(url) if url.scheme() == "file" => url.to_file_path().map_err(|()| format!("`{}` is no path here", package.location))?,
            _ => base.join(&package.location),
        };
        return Ok(PypiSource::Directory { path: crate::spec::clean_path(&path), editable: package.editable });
    }
    let mut url = if is_url {
        Url::parse(&package.location).map_err(|error| format!("`{}`: {error}", package.location))?
    } else {
        let path = crate::spec::clean_path(&base.join(&package.location));
        let path = std::path::absolute(&path).unwrap_or(path);
        Url::from_file_path(&path).map_err(|()| format!("`{}` is no path here", path.display()))?
    };
    let mut subdirectory = None;
    let mut sha256 = package.hashes.sha256.clone();
    for (key, value) in url.fragment().unwrap_or_default().split('&').filter_map(|part| part.split_once('=')) {
        match key {
            "subdirectory" => subdirectory = Some(value.to_owned()),
            // pip's form of a hash.
            "sha256" if value.len() == 64 && sha256.is_none() => sha256 = Some(value.to_ascii_lowercase()),
            _ => {}
        }
    }
    url.set_fragment(None);
    let index = package.index.as_deref().and_then(|text| Url::parse(text).ok());
    let direct = index.is_none() && package.direct;
    Ok(PypiSource::Archive { url, sha256, size: package.size, index, direct, subdirectory })
}

fn is_archive(path: &str) -> bool {
    [".whl", ".tar.gz", ".zip", ".tar.bz2", ".tar.xz", ".tgz"].iter().any(|ending| path.ends_with(ending))
}

/// The version in the name of an archive.
fn version_of(url: &Url) -> Option<Version> {
    let name = url.path_segments()?.next_back()?.to_owned();
    let text = match name.strip_suffix(".whl") {
        Some(stem) => stem.split('-').nth(1)?.to_owned(),
        None => {
            let stem = [".tar.gz", ".zip", ".tar.bz2", ".tar.xz", ".tgz"].iter().find_map(|ending| name.strip_suffix(ending))?;
            stem.rsplit_once('-')?.1.to_owned()
        }
    };
    Version::from_str(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(source: PypiSource) -> PypiRecord {
        PypiRecord {
            name: Name::from_str("some-package").unwrap(),
            version: Version::from_str("1.2.3").unwrap(),
            source,
            requires_dist: vec!["other>=1".to_owned()],
            requires_python: Some(">=3.9".to_owned()),
            requested: true,
            extras: vec!["fast".to_owned()],
        }
    }

    fn sources() -> Vec<PypiSource> {
        let url = |text: &str| Url::parse(text).unwrap();
        let archive = |at: &str, index: Option<&str>, subdirectory: Option<&str>| PypiSource::Archive {
            url: url(at),
            sha256: Some("ab".repeat(32)),
            size: Some(123),
            index: index.map(url),
            direct: index.is_none(),
            subdirectory: subdirectory.map(str::to_owned),
        };
        let vcs = |revision: Option<&str>, folder: Option<&str>| PypiSource::Vcs {
            system: "git".to_owned(),
            url: url("https://host.example/x/tool.git"),
            requested_revision: revision.map(str::to_owned),
            commit: "0123456789012345678901234567890123456789".to_owned(),
            subdirectory: folder.map(str::to_owned),
        };
        vec![
            archive("https://files.example/packages/some_package-1.2.3-py3-none-any.whl", Some("https://pypi.example/simple"), None),
            archive("https://files.example/packages/some_package-1.2.3.tar.gz", Some("https://pypi.example/simple"), None),
            archive("https://host.example/some_package-1.2.3.zip", None, Some("python/pkg")),
            archive("file:///wheels/some_package-1.2.3-py3-none-any.whl", None, None),
            vcs(None, None),
            vcs(Some("v1.2.3"), Some("sub/folder")),
            PypiSource::Directory { path: "/projects/tool".into(), editable: true },
            PypiSource::Directory { path: "/projects/tool".into(), editable: false },
        ]
    }

    #[test]
    fn every_source_goes_through_a_tare_lock_and_comes_back() {
        for source in sources() {
            let record = one(source);
            let mut platform = LockedPlatform::new("linux-64", rattler_conda_types::Subdir::Linux64);
            platform.pypi.push(locked(&record));
            let mut lock = super::super::Lock { environment: "default".to_owned(), platforms: vec![platform], ..Default::default() };
            lock.indexes.push("https://pypi.example/simple".to_owned());
            let text = super::super::write_tare(&lock).unwrap();
            let again = super::super::read("tare.lock", text.as_bytes(), &Default::default()).unwrap();
            assert_eq!(records(&again.platforms[0], Path::new("/base")).unwrap(), [record], "{text}");
            assert_eq!(super::super::write_tare(&again).unwrap(), text);
            // Without the map it is still a lock that others install.
            let pixi = super::super::write_pixi(&lock).unwrap();
            let others = super::super::read("pixi.lock", pixi.as_bytes(), &Default::default()).unwrap();
            records(&others.platforms[0], Path::new("/base")).unwrap();
        }
    }

    #[test]
    fn relative_paths_start_at_the_lock_and_versions_are_in_names() {
        let package = |location: &str| LockedPypi { name: "a".to_owned(), location: location.to_owned(), ..LockedPypi::default() };
        let of = |location: &str| record(&package(location), Path::new("/base/x")).unwrap();
        assert_eq!(of("./tool").source, PypiSource::Directory { path: "/base/x/tool".into(), editable: false });
        assert_eq!(of("../tool").source, PypiSource::Directory { path: "/base/tool".into(), editable: false });
        let wheel = of("./wheels/a-2.0-py3-none-any.whl");
        assert_eq!(wheel.version.to_string(), "2.0");
        assert!(matches!(wheel.source, PypiSource::Archive { url, .. } if url.as_str() == "file:///base/x/wheels/a-2.0-py3-none-any.whl"));
        assert_eq!(of("https://h.example/a-3.1.tar.gz#sha256=00").version.to_string(), "3.1");
        let bad = record(&package("https://h.example/a.tar.gz"), Path::new("/")).unwrap_err();
        assert!(bad.to_string().contains("`a`"), "{bad}");
        let vcs = LockedPypi {
            vcs: Some(LockedVcs { kind: "git".into(), url: "https://h.example/r".into(), ..Default::default() }),
            ..package("git+https://h.example/r")
        };
        assert!(record(&vcs, Path::new("/")).unwrap_err().to_string().contains("commit"));
        assert_eq!(path_text(Path::new("tool")), "./tool");
        assert_eq!(path_text(Path::new("")), ".");
    }
}
