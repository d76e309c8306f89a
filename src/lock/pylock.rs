//! pylock.toml (PEP 751): the PyPI half alone, for any machine. A package may list archives for several machines; the first wheel (else the source
//! archive) is [`LockedPypi::location`], the others are in `other_files`.

use std::ops::Range;

use rattler_conda_types::Subdir;

use super::{Format, Lock, LockedPlatform, LockedPypi, LockedVcs, PypiFile, PypiHashes, without_credentials};
use crate::error::{Error, Result};
use crate::prefix::normalize;
use crate::pypi::pylock::{Archive, Document, Package};
use crate::spec::Text;

pub(super) fn read(text: &Text) -> Result<Lock> {
    let document: Document = toml::from_str(&text.text).map_err(|error| {
        let span = error.span().unwrap_or(0..0);
        let start = span.start.min(text.text.len());
        let line = text.rest_of_line(start);
        Error::usage("the pylock.toml is malformed")
            .because(crate::spec::mask_secrets(error.message()))
            .at(text.place(start..span.end.min(line.end).max(start), "here"))
            .hint("make it again, for instance: uv export --format pylock.toml, or pip lock")
    })?;
    let version = document.lock_version.get_ref();
    if !document.is_known() {
        return Err(Error::usage(format!("the pylock.toml has version `{version}`; versions 1.x are understood"))
            .at(text.place(document.lock_version.span(), "here"))
            .hint("write it with an older tool, or update tare"));
    }
    let mut lock = Lock { environment: "default".to_owned(), source: Format::Pylock, ..Lock::default() };
    let mut platform = LockedPlatform::new("any", Subdir::NoArch);
    for package in document.packages {
        let span = package.span();
        let package = package.into_inner();
        platform.pypi.push(convert(package, document.requires_python.as_deref(), span, text)?);
    }
    for index in platform.pypi.iter().filter_map(|package| package.index.clone()) {
        if !lock.indexes.contains(&index) {
            lock.indexes.push(index);
        }
    }
    lock.platforms.push(platform);
    Ok(lock)
}

fn convert(package: Package, requires_python: Option<&str>, span: Range<usize>, text: &Text) -> Result<LockedPypi> {
    let name = package.name.get_ref().clone();
    let here = package.name.span();
    let mut made = LockedPypi {
        name: normalize(&name),
        version: package.version,
        requires_python: package.requires_python.or_else(|| requires_python.map(str::to_owned)),
        marker: package.marker,
        index: package.index.as_deref().map(without_credentials),
        ..LockedPypi::default()
    };
    for dependency in &package.dependencies {
        if let Some(name) = dependency.get("name").and_then(toml::Value::as_str) {
            let version = dependency.get("version").and_then(toml::Value::as_str);
            made.requires_dist.push(match version {
                Some(version) => format!("{}=={version}", normalize(name)),
                None => normalize(name),
            });
        }
    }
    let sources = [
        package.vcs.is_some(),
        package.directory.is_some(),
        package.archive.is_some(),
        package.sdist.is_some() || !package.wheels.is_empty(),
    ];
    if sources.iter().filter(|present| **present).count() != 1 {
        let found = if sources.contains(&true) { "it names several sources" } else { "it names no source" };
        return Err(Error::usage(format!("the package `{name}` is not installable from the lock"))
            .because(format!("{found}: one of `vcs`, `directory`, `archive`, or `sdist` and `wheels` is needed"))
            .at(text.place(here, "here")));
    }
    if let Some(vcs) = package.vcs {
        let Some(url) = vcs.url.or(vcs.path) else {
            return Err(Error::usage(format!("`vcs` of the package `{name}` has neither `url` nor `path`")).at(text.place(here, "here")));
        };
        let vcs = LockedVcs {
            kind: vcs.kind,
            url: without_credentials(&url),
            revision: vcs.requested_revision,
            commit: Some(vcs.commit_id),
            subdirectory: vcs.subdirectory,
        };
        made.location = super::pypi::location_of(&vcs);
        made.vcs = Some(vcs);
        return Ok(made);
    }
    if let Some(directory) = package.directory {
        made.editable = directory.editable;
        made.location = directory.path;
        return Ok(made);
    }
    let direct = package.archive.is_some();
    let mut files = Vec::new();
    for archive in package.wheels.into_iter().chain(package.archive).chain(package.sdist) {
        files.push(file(archive, &name, &span, text)?);
    }
    let first = files.remove(0);
    made.location = first.location;
    made.hashes = first.hashes;
    made.size = first.size;
    made.direct = direct;
    made.other_files = files;
    Ok(made)
}

fn file(archive: Archive, name: &str, span: &Range<usize>, text: &Text) -> Result<PypiFile> {
    let start = text.rest_of_line(span.start);
    let folder = archive.subdirectory.as_ref().map(|folder| format!("#subdirectory={folder}")).unwrap_or_default();
    let Some(location) = archive.url.or(archive.path).map(|location| location + &folder) else {
        return Err(Error::usage(format!("an archive of the package `{name}` has neither `url` nor `path`")).at(text.place(start, "here")));
    };
    let mut hashes = PypiHashes::default();
    let Some(table) = archive.hashes else {
        return Err(Error::usage(format!("an archive of the package `{name}` has no hashes")).at(text.place(start, "here")));
    };
    let at = table.span();
    for (algorithm, digits) in table.into_inner() {
        let length = match algorithm.as_str() {
            "md5" => 32,
            "sha256" => 64,
            _ => continue,
        };
        if digits.len() != length || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(Error::usage(format!("malformed `{algorithm}` of the package `{name}`"))
                .because(format!("{length} hex digits are needed"))
                .at(text.place(at, "here")));
        }
        let digits = digits.to_ascii_lowercase();
        if length == 32 { hashes.md5 = Some(digits) } else { hashes.sha256 = Some(digits) }
    }
    Ok(PypiFile { location: without_credentials(&location), hashes, size: archive.size })
}
