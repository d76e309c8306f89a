//! `@EXPLICIT` lists (CEP 23): URLs and hashes, nothing else. What a list does not say is taken from the file names; installing takes it from the
//! archives.

use rattler_conda_types::package::{BuildString, CondaArchiveIdentifier};
use rattler_conda_types::{NoArchType, PackageName, PackageRecord, RepoDataRecord, Subdir, VersionWithSource};
use url::Url;

use super::{Format, Lock, LockedPlatform, ReadOptions};
use crate::error::{Error, Result};
use crate::spec::{self, ExplicitHash, Fetched, Text};

pub(super) fn read(text: &Text, options: &ReadOptions) -> Result<Lock> {
    let root_dir = std::env::current_dir().map_err(|error| Error::failure("the current folder is gone").because(error))?;
    let read_options = spec::ReadOptions { subdir: Subdir::NoArch, root_dir, env: |name| std::env::var(name).ok(), target_given: true };
    let fetched = Fetched { name: text.name.to_string(), bytes: text.text.as_bytes().to_vec(), base_dir: options.base_dir.clone() };
    let spec = spec::read(&[fetched], &[], &read_options)?;
    let explicit = spec.explicit.unwrap_or_default();
    let mut records = Vec::new();
    let mut subdir = explicit.platform;
    for package in &explicit.packages {
        let mut record = record_of(&package.url).map_err(|error| match &package.place {
            Some(place) => error.at(place.clone()),
            None => error,
        })?;
        match package.hash {
            Some(ExplicitHash::Md5(hash)) => record.package_record.md5 = Some(hash),
            Some(ExplicitHash::Sha256(hash)) => record.package_record.sha256 = Some(hash),
            None => {}
        }
        let own = record.package_record.subdir.parse::<Subdir>().ok().filter(|subdir| *subdir != Subdir::NoArch);
        if let (Some(own), None) = (own, subdir) {
            subdir = Some(own);
        }
        if let (Some(own), Some(all)) = (own, subdir)
            && own != all
        {
            let error = Error::usage(format!("the list is for {all}, and this package is for {own}"))
                .hint("one explicit list is for one platform: make a list for each");
            return Err(match &package.place {
                Some(place) => error.at(place.clone()),
                None => error,
            });
        }
        if let Some(twice) = records.iter().find(|known: &&RepoDataRecord| known.package_record.name == record.package_record.name)
            && twice.url != record.url
        {
            let error = Error::usage(format!("`{}` is in the list twice", record.package_record.name.as_normalized()));
            return Err(match &package.place {
                Some(place) => error.at(place.clone()),
                None => error,
            });
        }
        records.push(record);
    }
    records.dedup_by(|a, b| a.url == b.url);
    let mut lock = Lock { environment: "default".to_owned(), source: Format::Explicit, ..Lock::default() };
    for record in &records {
        if let Some(channel) = &record.channel {
            let channel = super::without_credentials(channel);
            if !lock.channels.contains(&channel) {
                lock.channels.push(channel);
            }
        }
    }
    let subdir = match subdir.or_else(Subdir::current) {
        Some(subdir) => subdir,
        None => Subdir::NoArch,
    };
    let mut platform = LockedPlatform::new(subdir.as_str(), subdir);
    platform.complete = false;
    platform.conda = records;
    lock.platforms.push(platform);
    Ok(lock)
}

/// What the URL of an archive tells: name, version, build, subdir, channel, and whether it is noarch.
///
/// # Errors
/// The file is not named like a conda package, or its version is none.
pub(super) fn record_of(url: &Url) -> Result<RepoDataRecord> {
    let shown = super::without_credentials(url.as_str());
    let unnamed = || Error::usage(format!("`{shown}` is not named NAME-VERSION-BUILD like every conda package"));
    let identifier = CondaArchiveIdentifier::try_from_url(url).ok_or_else(unnamed)?;
    let parts = &identifier.identifier;
    let name: PackageName = parts.name.parse().map_err(|error| unnamed().because(error))?;
    let version: VersionWithSource =
        parts.version.parse().map_err(|error| Error::usage(format!("`{}` in `{shown}` is no version", parts.version)).because(error))?;
    let mut record = PackageRecord::new(name, version, BuildString::new_unchecked(parts.build_string.clone()));
    record.build_number = build_number(&parts.build_string);
    let mut channel = None;
    let folder = url.path_segments().and_then(|segments| segments.rev().nth(1).map(str::to_owned)).unwrap_or_default();
    if folder.parse::<Subdir>().is_ok() {
        let mut base = url.clone();
        if let Ok(mut segments) = base.path_segments_mut() {
            segments.pop().pop();
        }
        channel = Some(format!("{}/", base.as_str().trim_end_matches('/')));
        record.subdir = folder;
    }
    record.noarch = noarch(&record.subdir, &parts.build_string);
    Ok(RepoDataRecord { package_record: record, identifier: identifier.into(), url: url.clone(), channel })
}

/// The build number that stands at the end of most build strings.
pub(super) fn build_number(build: &str) -> u64 {
    let digits = build.len() - build.bytes().rev().take_while(u8::is_ascii_digit).count();
    build[digits..].parse().unwrap_or(0)
}

/// What sort of noarch a package is, by the habit of naming builds of Python packages `py…`. Only a guess: the archive knows.
pub(super) fn noarch(subdir: &str, build: &str) -> NoArchType {
    if subdir != "noarch" {
        return NoArchType::none();
    }
    if build.starts_with("py") { NoArchType::python() } else { NoArchType::generic() }
}
