//! `list`: the packages of an environment in the formats of conda.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use rattler_conda_types::{PackageRecord, PrefixRecord, Subdir};
use rattler_redaction::strip_url_for_serialization;
use regex::RegexBuilder;
use serde::Serialize;

use super::Prefix;
use super::history::Revision;
use crate::error::{Error, Result};
use crate::install::channel_name;

/// One line of `list --json`; the keys are conda's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// Folder of the channel, without credentials.
    pub base_url: String,
    /// Build number.
    pub build_number: u64,
    /// Build string.
    pub build_string: String,
    /// Channel name; `pypi` for what pip installed.
    pub channel: String,
    /// `NAME-VERSION-BUILD`.
    pub dist_name: String,
    /// Package name.
    pub name: String,
    /// Subdir; `pypi` for what pip installed.
    pub platform: String,
    /// Version as written.
    pub version: String,
}

/// A Python distribution found by its metadata in site-packages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Distribution {
    /// Name, normalized (PEP 503).
    pub name: String,
    /// Version as written.
    pub version: String,
    /// The `.dist-info` or `.egg-info`, relative to the prefix.
    pub path: PathBuf,
}

/// What to list.
#[derive(Debug, Clone, Default)]
pub struct ListOptions {
    /// Only names that match this regular expression (letter case is ignored).
    pub pattern: Option<String>,
    /// The whole name must match (`-f`).
    pub full_name: bool,
    /// Leave out what pip installed.
    pub no_pip: bool,
    /// Last name first.
    pub reverse: bool,
}

/// Hash to write after the URLs of an explicit list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Hashes {
    /// None.
    #[default]
    None,
    /// `#` and 32 hex digits.
    Md5,
    /// `#` and 64 hex digits.
    Sha256,
}

/// The packages to list, sorted by name.
///
/// # Errors
/// The pattern is no regular expression (usage); a package record cannot be read.
pub fn rows(prefix: &Prefix, options: &ListOptions) -> Result<Vec<Row>> {
    let pattern = options
        .pattern
        .as_deref()
        .map(|pattern| {
            let text = if options.full_name { format!("^(?:{pattern})$") } else { pattern.to_owned() };
            RegexBuilder::new(&text).case_insensitive(true).build().map_err(|error| {
                Error::usage(format!("`{pattern}` is no regular expression")).because(error.to_string().lines().last().unwrap_or_default())
            })
        })
        .transpose()?;
    let mut rows: Vec<Row> = prefix.records()?.iter().map(row).collect();
    if !options.no_pip {
        rows.extend(prefix.pip_distributions().into_iter().map(|distribution| Row {
            base_url: "https://conda.anaconda.org/pypi".to_owned(),
            build_number: 0,
            build_string: "pypi_0".to_owned(),
            channel: "pypi".to_owned(),
            dist_name: format!("{}-{}-pypi_0", distribution.name, distribution.version),
            name: distribution.name,
            platform: "pypi".to_owned(),
            version: distribution.version,
        }));
    }
    rows.retain(|row| pattern.as_ref().is_none_or(|pattern| pattern.is_match(&row.name)));
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    if options.reverse {
        rows.reverse();
    }
    Ok(rows)
}

fn row(record: &PrefixRecord) -> Row {
    let package = &record.repodata_record.package_record;
    let url = strip_url_for_serialization(&record.repodata_record.url).to_string();
    let folder = url.rsplit_once('/').map_or("", |(folder, _)| folder);
    Row {
        base_url: folder.strip_suffix(&format!("/{}", package.subdir)).unwrap_or(folder).to_owned(),
        build_number: package.build_number,
        build_string: package.build.to_string(),
        channel: channel_name(&record.repodata_record),
        dist_name: format!("{}-{}-{}", package.name.as_normalized(), package.version, package.build),
        name: package.name.as_normalized().to_owned(),
        platform: package.subdir.clone(),
        version: package.version.to_string(),
    }
}

/// The table that conda prints.
pub fn list_text(prefix: &Prefix, rows: &[Row]) -> String {
    let mut text = format!("# packages in environment at {}:\n#\n", prefix.path().display());
    let _ = writeln!(text, "# {:<23} {:<15} {:>15}  Channel", "Name", "Version", "Build");
    for row in rows {
        let line = format!("{:<25} {:<15} {:>15}  {}", row.name, row.version, row.build_string, row.channel);
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

fn header(subdir: Option<Subdir>) -> String {
    let subdir = subdir.map_or_else(|| "unknown".to_owned(), |subdir| subdir.to_string());
    format!(
        "# This file may be used to create an environment using:\n# $ tare create --name <env> --file <this file>\n# platform: {subdir}\n# created-by: tare {}\n",
        env!("CARGO_PKG_VERSION")
    )
}

/// `list --explicit`: one URL a line in an order in which packages can be installed one by one; without credentials.
///
/// # Errors
/// A package record cannot be read; pip installed something, which this format cannot say; a package lacks the hash asked for.
pub fn explicit_text(prefix: &Prefix, hashes: Hashes) -> Result<String> {
    let records = prefix.records()?;
    let pip = prefix.pip_distributions();
    if let Some(first) = pip.first() {
        return Err(Error::failure("an explicit list cannot name what pip installed")
            .because(format!("`{}` {} and {} more were installed by pip", first.name, first.version, pip.len() - 1))
            .hint("tare export has formats that can"));
    }
    let mut text = header(prefix.subdir());
    text.push_str("@EXPLICIT\n");
    for record in PackageRecord::sort_topologically(records) {
        let package = &record.repodata_record.package_record;
        let url = strip_url_for_serialization(&record.repodata_record.url);
        let missing = |kind: &str| Error::failure(format!("the {kind} of `{}` is not known", package.name.as_normalized()));
        let hash = match hashes {
            Hashes::None => String::new(),
            Hashes::Md5 => {
                format!("#{}", crate::install::hex_text(package.md5.as_ref().ok_or_else(|| missing("MD5").hint("--sha256 may be"))?))
            }
            Hashes::Sha256 => {
                format!("#{}", crate::install::hex_text(package.sha256.as_ref().ok_or_else(|| missing("SHA-256").hint("--md5 may be"))?))
            }
        };
        let _ = writeln!(text, "{url}{hash}");
    }
    Ok(text)
}

/// `list --export`: `NAME=VERSION=BUILD` lines.
pub fn export_text(prefix: &Prefix, rows: &[Row]) -> String {
    let mut text = header(prefix.subdir());
    for row in rows {
        let _ = writeln!(text, "{}={}={}", row.name, row.version, row.build_string);
    }
    text
}

/// `list --revisions`: what each change did. Packages that came and went under one name are shown as `NAME {OLD -> NEW}`.
pub fn revisions_text(revisions: &[Revision]) -> String {
    let mut text = String::new();
    for (number, revision) in revisions.iter().enumerate() {
        let _ = writeln!(text, "{}  (rev {number})", revision.date);
        let split = |dist: &str| -> Option<(String, String, String)> {
            let (channel, rest) = dist.rsplit_once("::").unwrap_or(("", dist));
            let (rest, build) = rest.rsplit_once('-')?;
            let (name, version) = rest.rsplit_once('-')?;
            let channel = channel.rsplit_once('/').map_or(channel, |(channel, _)| channel);
            let shown = if channel.is_empty() {
                String::new()
            } else {
                format!(" ({channel}/{})", dist.rsplit_once("::").and_then(|(c, _)| c.rsplit_once('/')).map_or("", |(_, subdir)| subdir))
            };
            Some((name.to_owned(), format!("{version}-{build}"), shown))
        };
        let mut lines: BTreeMap<String, (Option<(String, String)>, Option<(String, String)>)> = BTreeMap::new();
        for dist in &revision.removed {
            let (name, version, channel) = split(dist).unwrap_or_else(|| (dist.clone(), String::new(), String::new()));
            lines.entry(name).or_default().0 = Some((version, channel));
        }
        for dist in &revision.added {
            let (name, version, channel) = split(dist).unwrap_or_else(|| (dist.clone(), String::new(), String::new()));
            lines.entry(name).or_default().1 = Some((version, channel));
        }
        for (name, change) in lines {
            let _ = match change {
                (Some((old, _)), Some((new, channel))) => writeln!(text, "     {name}  {{{old} -> {new}}}{channel}"),
                (Some((old, channel)), None) => writeln!(text, "    -{name}-{old}{channel}"),
                (None, Some((new, channel))) => writeln!(text, "    +{name}-{new}{channel}"),
                (None, None) => Ok(()),
            };
        }
        text.push('\n');
    }
    text
}

/// PEP 503.
fn normalize(name: &str) -> String {
    let mut normalized = String::with_capacity(name.len());
    let mut gap = false;
    for c in name.chars() {
        if matches!(c, '-' | '_' | '.') {
            gap = !normalized.is_empty();
        } else {
            if gap {
                normalized.push('-');
                gap = false;
            }
            normalized.extend(c.to_lowercase());
        }
    }
    normalized
}

/// The site-packages folders of the environment, relative to it.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(prefix.join("lib"))
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .map(|entry| Path::new("lib").join(entry.file_name()).join("site-packages"))
        .chain([PathBuf::from("Lib/site-packages")])
        .filter(|path| prefix.join(path).is_dir())
        .collect();
    found.sort();
    found
}

pub(super) fn pip_distributions(prefix: &Prefix) -> Vec<Distribution> {
    let mut found = Vec::new();
    let folders = site_packages(prefix.path());
    if folders.is_empty() {
        return found;
    }
    let (records, _) = prefix.records_and_damage().unwrap_or_default();
    let owned: HashSet<&Path> = records
        .iter()
        .flat_map(|record| &record.files)
        .filter_map(|file| {
            let parent = file.parent()?;
            let name = file.to_str()?;
            // `x.egg-info` can be a single file.
            if parent.to_str()?.ends_with("-info") { Some(parent) } else { name.ends_with(".egg-info").then_some(file.as_path()) }
        })
        .collect();
    for folder in folders {
        for entry in std::fs::read_dir(prefix.path().join(&folder)).into_iter().flatten().flatten() {
            let file_name = entry.file_name();
            let Some(name) = file_name.to_str() else { continue };
            let relative = folder.join(name);
            let metadata = if name.ends_with(".dist-info") {
                entry.path().join("METADATA")
            } else if name.ends_with(".egg-info") {
                if entry.path().is_dir() { entry.path().join("PKG-INFO") } else { entry.path() }
            } else {
                continue;
            };
            if owned.contains(relative.as_path()) {
                continue;
            }
            let text = std::fs::read(&metadata).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
            let field = |key: &str| {
                text.lines()
                    .take_while(|line| !line.is_empty())
                    .find_map(|line| line.strip_prefix(key))
                    .map(|value| value.trim().to_owned())
            };
            if let (Some(name), Some(version)) = (field("Name:"), field("Version:")) {
                found.push(Distribution { name: normalize(&name), version, path: relative });
            }
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name).then_with(|| a.path.cmp(&b.path)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_normalized_as_pep_503_says() {
        for (name, expected) in [("Foo.Bar__baz", "foo-bar-baz"), ("a", "a"), ("A-_-b", "a-b"), ("x_", "x")] {
            assert_eq!(normalize(name), expected);
        }
    }

    #[test]
    fn revisions_show_changes_of_one_package_as_one_line() {
        let set = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let text = revisions_text(&[
            Revision {
                date: "2026-01-01 10:00:00".into(),
                added: set(&["conda-forge/linux-64::a-1-0", "conda-forge/noarch::b-x-2-py_0"]),
                ..Revision::default()
            },
            Revision {
                date: "2026-01-02 10:00:00".into(),
                added: set(&["conda-forge/linux-64::a-2-0"]),
                removed: set(&["conda-forge/linux-64::a-1-0", "conda-forge/noarch::b-x-2-py_0"]),
                ..Revision::default()
            },
        ]);
        insta::assert_snapshot!(text, @r"
        2026-01-01 10:00:00  (rev 0)
            +a-1-0 (conda-forge/linux-64)
            +b-x-2-py_0 (conda-forge/noarch)

        2026-01-02 10:00:00  (rev 1)
             a  {1-0 -> 2-0} (conda-forge/linux-64)
            -b-x-2-py_0 (conda-forge/noarch)
        ");
    }
}
