//! `list`: the packages of an environment in the formats of conda.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rattler_conda_types::{MatchSpec, Matches, ParseStrictness, PrefixRecord, RepoDataRecord, Subdir, Version};
use rattler_redaction::strip_url_for_serialization;
use regex::RegexBuilder;
use serde::Serialize;
use url::Url;

use super::Prefix;
use super::history::Revision;
use crate::error::{Error, Result};

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
    /// tare's own tooling, which belongs to no request and no lock.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub tooling: bool,
    /// More columns for `--fields`.
    #[serde(skip)]
    pub fields: BTreeMap<&'static str, String>,
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
/// The pattern is no regular expression (usage) or matches nothing; a package record cannot be read.
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
            tooling: crate::pypi::installed::of(prefix, &distribution).is_tooling(),
            base_url: "https://conda.anaconda.org/pypi".to_owned(),
            build_number: 0,
            build_string: "pypi_0".to_owned(),
            channel: "pypi".to_owned(),
            dist_name: format!("{}-{}-pypi_0", distribution.name, distribution.version),
            name: distribution.name,
            platform: "pypi".to_owned(),
            version: distribution.version,
            fields: [("channel", "https://conda.anaconda.org/pypi".to_owned()), ("subdir", "pypi".to_owned())].into(),
        }));
    }
    rows.retain(|row| pattern.as_ref().is_none_or(|pattern| pattern.is_match(&row.name)));
    if rows.is_empty()
        && let Some(pattern) = &options.pattern
    {
        return Err(Error::failure(format!("no package matches `{pattern}`")));
    }
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    if options.reverse {
        rows.reverse();
    }
    Ok(rows)
}

/// The URL of a package without credentials; `None` if it is not known (records of other tools may lack it).
pub(crate) fn known_url(record: &RepoDataRecord) -> Option<Url> {
    (record.url.scheme() != super::UNKNOWN_SCHEME).then(|| strip_url_for_serialization(&record.url))
}

/// The URL of the channel, without subdir and credentials; the bare name where the record has no more.
pub(crate) fn channel_url(record: &RepoDataRecord) -> String {
    let subdir = &record.package_record.subdir;
    let from_url = || {
        let url = known_url(record)?.to_string();
        Some(url.rsplit_once('/')?.0.to_owned())
    };
    let text = match record.channel.as_deref().filter(|channel| !channel.is_empty() && !channel.starts_with('<')) {
        Some(channel) if channel.contains("://") => {
            Url::parse(channel).map_or_else(|_| channel.to_owned(), |url| strip_url_for_serialization(&url).to_string())
        }
        Some(channel) => channel.to_owned(),
        None => from_url().unwrap_or_default(),
    };
    let text = text.trim_end_matches('/');
    // conda writes the folder of the subdir, other tools the channel.
    let text = match text.rsplit_once('/') {
        Some((parent, last)) if last == subdir || last.parse::<Subdir>().is_ok() => parent,
        _ => text,
    };
    if text.is_empty() || text.contains("://") { text.to_owned() } else { format!("https://conda.anaconda.org/{text}") }
}

/// The name of the channel as conda's lists have it: `conda-forge`, `pkgs/main`, else the URL.
pub(crate) fn channel_display(record: &RepoDataRecord) -> String {
    if crate::lock::is_machine_bound(record) {
        return "host".to_owned();
    }
    let url = channel_url(record);
    let short = url
        .strip_prefix("https://conda.anaconda.org/")
        .or_else(|| url.strip_prefix("https://repo.anaconda.com/").filter(|rest| rest.starts_with("pkgs/")));
    match short {
        Some(short) => short.to_owned(),
        None if url.is_empty() => "<unknown>".to_owned(),
        None => url,
    }
}

/// As [`channel_display`], with the parts of `defaults` under that name.
pub(crate) fn channel_canonical(record: &RepoDataRecord) -> String {
    let shown = channel_display(record);
    if matches!(shown.as_str(), "pkgs/main" | "pkgs/r" | "pkgs/msys2") { "defaults".to_owned() } else { shown }
}

fn row(record: &PrefixRecord) -> Row {
    let data = &record.repodata_record;
    let package = &data.package_record;
    let dist_name = format!("{}-{}-{}", package.name.as_normalized(), package.version, package.build);
    let mut fields: BTreeMap<&'static str, String> = BTreeMap::new();
    let mut set = |key, value: Option<String>| {
        fields.extend(value.filter(|value| !value.is_empty()).map(|value| (key, value)));
    };
    let list = |items: &[String]| {
        (!items.is_empty()).then(|| format!("({})", items.iter().map(|item| format!("'{item}'")).collect::<Vec<_>>().join(", ")))
    };
    set("arch", package.arch.clone());
    set("channel", Some(format!("{}/{}", channel_url(data), package.subdir)));
    set("constrains", list(&package.constrains));
    set("depends", list(&package.depends));
    set("license", package.license.clone());
    set("md5", package.md5.as_ref().map(|hash| crate::install::hex_text(hash)));
    set("sha256", package.sha256.as_ref().map(|hash| crate::install::hex_text(hash)));
    set("size", package.size.map(|size| size.to_string()));
    set("subdir", Some(package.subdir.clone()));
    set("timestamp", package.timestamp.as_ref().map(|time| time.timestamp_millis().to_string()));
    set("url", known_url(data).map(|url| url.to_string()));
    Row {
        tooling: false,
        base_url: channel_url(data),
        build_number: package.build_number,
        build_string: package.build.to_string(),
        channel: channel_display(data),
        dist_name,
        name: package.name.as_normalized().to_owned(),
        platform: package.subdir.clone(),
        version: package.version.to_string(),
        fields,
    }
}

/// Columns that `list --fields` knows: key and title, as conda has them.
pub const FIELDS: [(&str, &str); 18] = [
    ("arch", "Arch"),
    ("build", "Build"),
    ("build_number", "Build number"),
    ("channel", "Channel URL"),
    ("channel_name", "Channel"),
    ("constrains", "Constraints"),
    ("depends", "Dependencies"),
    ("dist_str", "Dist"),
    ("license", "License"),
    ("md5", "MD5"),
    ("name", "Name"),
    ("platform", "Platform"),
    ("sha256", "SHA256"),
    ("size", "Size"),
    ("subdir", "Subdir"),
    ("timestamp", "Timestamp"),
    ("url", "URL"),
    ("version", "Version"),
];

const DEFAULT_FIELDS: [&str; 4] = ["name", "version", "build", "channel_name"];

fn field(row: &Row, key: &str) -> String {
    match key {
        "name" => row.name.clone(),
        "version" => row.version.clone(),
        "build" => row.build_string.clone(),
        "build_number" => row.build_number.to_string(),
        // conda leaves the column empty for what it calls its defaults.
        "channel_name" if matches!(row.channel.as_str(), "pkgs/main" | "pkgs/r" | "pkgs/msys2") => String::new(),
        "channel_name" => row.channel.clone(),
        "dist_str" => canonical(row),
        "platform" => row.platform.split('-').next().unwrap_or_default().to_owned(),
        _ => row.fields.get(key).cloned().unwrap_or_default(),
    }
}

/// `CHANNEL/SUBDIR::NAME-VERSION-BUILD`.
pub fn canonical(row: &Row) -> String {
    format!("{}/{}::{}", row.channel, row.platform, row.dist_name)
}

/// The table that conda prints: columns at least 23, 15 and 15 wide, wider where a value is.
pub fn list_text(prefix: &Prefix, rows: &[Row]) -> String {
    table(prefix, rows, &DEFAULT_FIELDS, vec![23, 15, 15, 1])
}

/// As [`list_text`] with other columns (keys of [`FIELDS`]).
///
/// # Errors
/// A field is not known (usage).
pub fn list_fields_text(prefix: &Prefix, rows: &[Row], fields: &[String]) -> Result<String> {
    let mut keys = Vec::new();
    for name in fields {
        let known = FIELDS.iter().find(|(key, _)| key == name).ok_or_else(|| {
            let keys: Vec<&str> = FIELDS.iter().map(|(key, _)| *key).collect();
            Error::usage(format!("`{name}` is no field of a package")).hint(format!("one of {}", keys.join(", ")))
        })?;
        keys.push(known.0);
    }
    if keys == DEFAULT_FIELDS {
        return Ok(list_text(prefix, rows));
    }
    let widths = keys.iter().map(|key| title(key).len()).collect();
    Ok(table(prefix, rows, &keys, widths))
}

fn title(key: &str) -> &'static str {
    FIELDS.iter().find(|(known, _)| *known == key).map_or("", |(_, title)| title)
}

fn table(prefix: &Prefix, rows: &[Row], keys: &[&str], mut widths: Vec<usize>) -> String {
    let cells: Vec<Vec<String>> = rows.iter().map(|row| keys.iter().map(|key| field(row, key)).collect()).collect();
    for row in &cells {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &[String], widths: &[usize]| {
        let padded: Vec<String> = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        padded.join("  ").trim_end().to_owned()
    };
    let titles: Vec<String> = keys.iter().map(|key| title(key).to_owned()).collect();
    let mut text = format!("# packages in environment at {}:\n#\n# {}\n", prefix.path().display(), line(&titles, &widths));
    // The titles stand behind `# `.
    if let Some(first) = widths.first_mut() {
        *first += 2;
    }
    for row in &cells {
        text.push_str(&line(row, &widths));
        text.push('\n');
    }
    text
}

/// The version of conda whose formats these are; tare's own version is the local part behind it.
const FORMATS_OF: &str = "26.7.1";

/// The comment lines in front of conda's text lists. `platform`: the platform that tare works for, which is what conda writes there.
pub(crate) fn header(platform: Option<Subdir>) -> String {
    let platform = platform.map_or_else(|| "unknown".to_owned(), |platform| platform.to_string());
    format!(
        "# This file may be used to create an environment using:\n# $ conda create --name <env> --file <this file>\n# platform: {platform}\n# created-by: conda {FORMATS_OF}+tare.{}\n",
        env!("CARGO_PKG_VERSION")
    )
}

/// `list --explicit`: one URL a line, in the order in which conda would install the packages; without credentials. What pip installed has no place in it:
/// see [`super::Prefix::pip_distributions`]. A package whose URL is not known becomes a comment, one whose hash is not known has none.
///
/// # Errors
/// A package record cannot be read.
pub fn explicit_text(prefix: &Prefix, hashes: Hashes, platform: Option<Subdir>) -> Result<String> {
    let records: Vec<RepoDataRecord> = prefix.records()?.into_iter().map(|record| record.repodata_record).collect();
    let order = install_order(&records);
    Ok(explicit_lines(order.into_iter().map(|index| &records[index]), hashes, platform))
}

/// The lines of an explicit list for `records` in the order given.
pub(crate) fn explicit_lines<'a>(
    records: impl IntoIterator<Item = &'a RepoDataRecord>,
    hashes: Hashes,
    platform: Option<Subdir>,
) -> String {
    let mut text = header(platform);
    text.push_str("@EXPLICIT\n");
    for record in records {
        let package = &record.package_record;
        let Some(url) = known_url(record) else {
            let _ = writeln!(text, "# no URL for: {}", record.identifier.to_file_name());
            continue;
        };
        let hash = match hashes {
            Hashes::None => None,
            Hashes::Md5 => package.md5.as_ref().map(|hash| crate::install::hex_text(hash)),
            Hashes::Sha256 => package.sha256.as_ref().map(|hash| crate::install::hex_text(hash)),
        };
        let _ = writeln!(text, "{url}{}", hash.map(|hash| format!("#{hash}")).unwrap_or_default());
    }
    text
}

/// The order in which conda installs `records` (indices): packages that nothing needs and that need nothing, then layer by layer what has all it needs, each
/// layer by name; a circle is broken at the package with the fewest open needs.
pub(crate) fn install_order(records: &[RepoDataRecord]) -> Vec<usize> {
    let mut by_name: HashMap<&str, Vec<usize>> = HashMap::new();
    for (index, record) in records.iter().enumerate() {
        by_name.entry(record.package_record.name.as_normalized()).or_default().push(index);
    }
    let name = |index: usize| records[index].package_record.name.as_normalized();
    let mut needs: Vec<BTreeSet<usize>> = records
        .iter()
        .enumerate()
        .map(|(index, record)| {
            let mut needs = BTreeSet::new();
            for text in &record.package_record.depends {
                let Ok(spec) = MatchSpec::from_str(text, ParseStrictness::Lenient) else { continue };
                let Some(wanted) = spec.name.as_exact() else { continue };
                for candidate in by_name.get(wanted.as_normalized()).into_iter().flatten() {
                    if *candidate != index && spec.matches(&records[*candidate]) {
                        needs.insert(*candidate);
                    }
                }
            }
            needs
        })
        .collect();
    // pip and python may need each other: python goes first.
    for (index, needs) in needs.iter_mut().enumerate() {
        if name(index) == "python" {
            needs.retain(|other| name(*other) != "pip");
        }
    }
    let needed: HashSet<usize> = needs.iter().flatten().copied().collect();
    let by_package_name = |indices: &mut Vec<usize>| indices.sort_by(|a, b| name(*a).cmp(name(*b)));
    let mut alone: Vec<usize> = (0..records.len()).filter(|index| needs[*index].is_empty() && !needed.contains(index)).collect();
    by_package_name(&mut alone);
    let mut open: BTreeSet<usize> = (0..records.len()).filter(|index| !alone.contains(index)).collect();
    let mut order = alone;
    while !open.is_empty() {
        let mut ready: Vec<usize> = open.iter().copied().filter(|index| needs[*index].is_empty()).collect();
        by_package_name(&mut ready);
        if ready.is_empty() {
            ready.extend(open.iter().copied().min_by(|a, b| needs[*a].len().cmp(&needs[*b].len()).then_with(|| name(*a).cmp(name(*b)))));
        }
        for index in &ready {
            open.remove(index);
        }
        for needs in &mut needs {
            needs.retain(|index| !ready.contains(index));
        }
        order.extend(ready);
    }
    order
}

/// `list --export`: `NAME=VERSION=BUILD` lines.
pub fn export_text(rows: &[Row], platform: Option<Subdir>) -> String {
    let mut text = header(platform);
    for row in rows.iter().filter(|row| !row.tooling) {
        let _ = writeln!(text, "{}={}={}", row.name, row.version, row.build_string);
    }
    text
}

/// A package in a history: name, version, build, `CHANNEL/SUBDIR`.
fn dist_parts(dist: &str) -> Option<(&str, &str, &str, &str)> {
    let (channel, rest) = dist.rsplit_once("::").unwrap_or(("", dist));
    let rest = rest.strip_suffix(".tar.bz2").or_else(|| rest.strip_suffix(".conda")).unwrap_or(rest);
    let (rest, build) = rest.rsplit_once('-')?;
    let (name, version) = rest.rsplit_once('-')?;
    Some((name, version, build, channel))
}

type Change<'a> = (Option<(&'a str, &'a str, &'a str, &'a str)>, Option<(&'a str, &'a str, &'a str, &'a str)>);

/// What a revision did to each package name: what went, what came.
///
/// A conda package and a Python package of one name are two.
fn changes(revision: &Revision) -> BTreeMap<(String, bool), Change<'_>> {
    let mut changes: BTreeMap<(String, bool), Change<'_>> = BTreeMap::new();
    let key = |parts: (&str, &str, &str, &str)| (parts.0.to_lowercase(), parts.3 == "pypi");
    for dist in &revision.removed {
        let parts = dist_parts(dist).unwrap_or((dist, "", "", ""));
        changes.entry(key(parts)).or_default().0 = Some(parts);
    }
    for dist in &revision.added {
        let parts = dist_parts(dist).unwrap_or((dist, "", "", ""));
        changes.entry(key(parts)).or_default().1 = Some(parts);
    }
    changes
}

/// `list --revisions`, as conda prints it: first what changed its version (`NAME  {OLD -> NEW}`), then what went, then what came.
pub fn revisions_text(revisions: &[Revision]) -> String {
    let shown = |(_, version, _, channel): (&str, &str, &str, &str)| {
        if channel.is_empty() || channel == "defaults" { version.to_owned() } else { format!("{version} ({channel})") }
    };
    let mut text = String::new();
    for (number, revision) in revisions.iter().enumerate() {
        let _ = writeln!(text, "{}  (rev {number})", revision.date);
        let changes = changes(revision);
        for ((name, _), change) in &changes {
            if let (Some(old), Some(new)) = change {
                let _ = writeln!(text, "     {name}  {{{} -> {}}}", shown(*old), shown(*new));
            }
        }
        for ((name, _), change) in &changes {
            if let (Some(old), None) = change {
                let _ = writeln!(text, "    -{name}-{}", shown(*old));
            }
        }
        for ((name, _), change) in &changes {
            if let (None, Some(new)) = change {
                let _ = writeln!(text, "    +{name}-{}", shown(*new));
            }
        }
        text.push('\n');
    }
    text
}

/// `list --revisions --json` with conda's keys. Versions are compared as versions (conda compares their texts).
pub fn revisions_json(revisions: &[Revision]) -> serde_json::Value {
    let joined = |(name, version, build, channel): (&str, &str, &str, &str)| format!("{name}-{version}-{build}-{channel}");
    let events = revisions.iter().enumerate().map(|(number, revision)| {
        let (mut install, mut remove, mut upgrade, mut downgrade) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for change in changes(revision).into_values() {
            match change {
                (Some(old), Some(new)) => {
                    let parse = |parts: (&str, &str, &str, &str)| Version::from_str(parts.1).ok();
                    let details = serde_json::json!({ "new": joined(new), "old": joined(old) });
                    if (parse(new), new.2) > (parse(old), old.2) { upgrade.push(details) } else { downgrade.push(details) }
                }
                (Some(old), None) => remove.push(joined(old)),
                (None, Some(new)) => install.push(joined(new)),
                (None, None) => {}
            }
        }
        serde_json::json!({
            "date": revision.date, "downgrade": downgrade, "install": install, "remove": remove, "rev": number, "upgrade": upgrade,
        })
    });
    serde_json::Value::Array(events.collect())
}

/// PEP 503.
pub(crate) fn normalize(name: &str) -> String {
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
pub(crate) fn site_packages(prefix: &Path) -> Vec<PathBuf> {
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

/// The metadata of a project that old setuptools linked into the environment: the file holds the folder of the project.
fn egg_link_metadata(link: &Path) -> Option<PathBuf> {
    let text = crate::files::read_text(link).ok()?;
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let folder = PathBuf::from(lines.next()?);
    let info = std::fs::read_dir(&folder)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "egg-info"))?;
    Some(if info.is_dir() { info.join("PKG-INFO") } else { info })
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
            } else if name.ends_with(".egg-link") {
                match egg_link_metadata(&entry.path()) {
                    Some(metadata) => metadata,
                    None => continue,
                }
            } else {
                continue;
            };
            if owned.contains(relative.as_path()) {
                continue;
            }
            let text = crate::files::read(&metadata, crate::files::MOST)
                .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
                .unwrap_or_default();
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
        let revisions = [
            Revision {
                date: "2026-01-01 10:00:00".into(),
                added: set(&["conda-forge/linux-64::a-1.9-0", "conda-forge/noarch::b-x-2-py_0"]),
                ..Revision::default()
            },
            Revision {
                date: "2026-01-02 10:00:00".into(),
                added: set(&["conda-forge/linux-64::a-1.10-0", "c-1-0"]),
                removed: set(&["conda-forge/linux-64::a-1.9-0", "conda-forge/noarch::b-x-2-py_0"]),
                ..Revision::default()
            },
        ];
        insta::assert_snapshot!(revisions_text(&revisions), @r"
        2026-01-01 10:00:00  (rev 0)
            +a-1.9 (conda-forge/linux-64)
            +b-x-2 (conda-forge/noarch)

        2026-01-02 10:00:00  (rev 1)
             a  {1.9 (conda-forge/linux-64) -> 1.10 (conda-forge/linux-64)}
            -b-x-2 (conda-forge/noarch)
            +c-1
        ");
        let json = revisions_json(&revisions);
        assert_eq!(json[1]["upgrade"][0]["old"], "a-1.9-0-conda-forge/linux-64");
        assert_eq!(json[1]["remove"][0], "b-x-2-py_0-conda-forge/noarch");
    }
}
