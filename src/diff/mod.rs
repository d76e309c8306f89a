//! Two of environment, lock and environment.yml compared: which packages differ, and in what.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use indexmap::IndexMap;
use rattler_conda_types::{MatchSpec, Matches, PackageRecord, RepoDataRecord, Subdir};
use serde::Serialize;

use crate::error::{Error, Kind, Result};
use crate::export::{Origin, PythonPackage, Subject};
use crate::install::hex_text;
use crate::lock::{self, Lock};
use crate::prefix::{self, Prefix};
use crate::spec::{self, Dependency, EnvSpec, PipKind};
use crate::verify::{Fault, Finding};

/// `conda` or `pypi` half, or a variable of the environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Half {
    /// A conda package.
    Conda,
    /// A Python package of no conda package.
    Pypi,
    /// An environment variable.
    Variable,
    /// A channel of a request.
    Channel,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    /// Only in B.
    Added,
    /// Only in A.
    Removed,
    /// In both, but not the same.
    Changed,
    /// Asked for on one side, and not there on the other.
    Missing,
    /// Asked for on one side, and there on the other in a version or build that does not do.
    Unmet,
}

/// A package on one side. Unknown fields are absent and are not compared.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Item {
    /// Version as written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Build string of conda.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub build: Option<String>,
    /// Name or URL of the channel; of a Python package where it came from, if that was no index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<String>,
    /// Lower-case hex.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Lower-case hex.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub md5: Option<String>,
    /// The requirement, where the side is a request; the value of a variable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// One difference.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Difference {
    /// Platform of the locks or environments; empty between requests.
    pub platform: String,
    /// Which half.
    pub half: Half,
    /// Name of the package or variable.
    pub name: String,
    /// What happened.
    pub change: Change,
    /// In A.
    pub before: Option<Item>,
    /// In B.
    pub after: Option<Item>,
    /// What is not the same: `version`, `build`, `channel`, `hash`, `value`.
    pub fields: Vec<&'static str>,
}

/// The whole comparison.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// Nothing differs.
    pub equal: bool,
    /// A as it was named.
    pub a: String,
    /// B as it was named.
    pub b: String,
    /// Sorted by platform, half and name.
    pub differences: Vec<Difference>,
    /// What could not be compared.
    pub notes: Vec<String>,
}

/// The packages of one platform.
#[derive(Debug, Clone, Default)]
struct Inventory {
    conda: BTreeMap<String, Item>,
    records: BTreeMap<String, PackageRecord>,
    pypi: BTreeMap<String, Item>,
}

/// One side.
#[derive(Debug, Clone)]
pub struct Side {
    label: String,
    content: Content,
    /// What is not compared.
    notes: Vec<String>,
}

#[derive(Debug, Clone)]
enum Content {
    /// Packages by platform; variables where known. `one`: an environment, which is for one platform by nature.
    Resolved {
        platforms: BTreeMap<String, Inventory>,
        variables: Option<IndexMap<String, String>>,
        one: bool,
        only_pypi: bool,
    },
    Request(Box<EnvSpec>),
}

/// The conda packages of an environment that bring Python distributions whose metadata is not there any more: `pip uninstall` takes it away and leaves
/// the record. With the first such metadata, relative to the environment.
fn hollow(prefix: &Prefix) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for record in prefix.records()? {
        let infos: BTreeSet<&Path> = record.files.iter().filter_map(|file| distribution_info(file)).collect();
        if let Some(info) = infos.into_iter().find(|info| std::fs::symlink_metadata(prefix.path().join(info)).is_err()) {
            found.push((record.name().as_normalized().to_owned(), info.to_owned()));
        }
    }
    Ok(found)
}

/// The `.dist-info` in site-packages that a file lies in.
fn distribution_info(file: &Path) -> Option<&Path> {
    let info = file.parent()?;
    let in_site = info.parent().and_then(Path::file_name).is_some_and(|name| name == "site-packages");
    (in_site && info.extension().is_some_and(|extension| extension == "dist-info") && file.file_name()? == "METADATA").then_some(info)
}

fn conda_item(record: &RepoDataRecord) -> Item {
    let package = &record.package_record;
    Item {
        version: Some(package.version.to_string()),
        build: Some(package.build.to_string()),
        channel: Some(prefix::channel_canonical(record)).filter(|name| name != "<unknown>"),
        sha256: package.sha256.as_ref().map(|hash| hex_text(hash)),
        md5: package.md5.as_ref().map(|hash| hex_text(hash)),
        text: None,
    }
}

fn python_item(package: &PythonPackage) -> Item {
    let (channel, sha256) = match &package.origin {
        Origin::Index { sha256, .. } => (None, sha256.clone()),
        Origin::Vcs { vcs, url, commit, .. } => (Some(format!("{vcs}+{url}@{commit}")), None),
        Origin::Archive { url, sha256, .. } => (Some(url.split('#').next().unwrap_or(url).to_owned()), sha256.clone()),
        Origin::Directory { url, .. } => (Some(url.trim_start_matches("file://").to_owned()), None),
    };
    Item {
        version: Some(package.version.clone()).filter(|version| !version.is_empty()),
        channel,
        sha256: sha256.filter(|hash| hash.len() == 64),
        ..Item::default()
    }
}

fn inventory(subject: &Subject) -> Inventory {
    let mut made = Inventory::default();
    for record in &subject.conda {
        let name = record.package_record.name.as_normalized().to_owned();
        made.conda.insert(name.clone(), conda_item(record));
        made.records.insert(name, record.package_record.clone());
    }
    made.pypi = subject.python.iter().map(|package| (package.name.clone(), python_item(package))).collect();
    made
}

impl Side {
    /// An environment.
    ///
    /// # Errors
    /// Its records or variables cannot be read.
    pub fn of_prefix(label: &str, prefix: &Prefix) -> Result<Self> {
        let mut subject = Subject::of_prefix(prefix, Vec::new())?;
        let platform = subject.platform.map_or_else(|| "unknown".to_owned(), |platform| platform.to_string());
        let only_pypi = prefix.is_venv();
        let mut notes: Vec<String> = subject
            .tooling
            .iter()
            .map(|package| format!("`{}` of `{label}` is tare's own tooling and is not compared", package.pin()))
            .collect();
        // A record says that a package is there; another tool may have taken away what Python knows it by.
        for (name, info) in hollow(prefix)? {
            notes.push(format!("`{name}` of `{label}` is recorded, but `{}` is gone: it counts as not there", info.display()));
            subject.conda.retain(|record| record.package_record.name.as_normalized() != name);
        }
        if let Ok(Some(stamp)) = prefix.stamp()
            && let aliens = crate::install::look(prefix.path(), &stamp).aliens
            && let Some(first) = aliens.first()
        {
            let more = if aliens.len() > 1 { format!(" and {} more", aliens.len() - 1) } else { String::new() };
            notes.push(format!("files of `{label}` that belong to no package are not compared: `{}`{more}", first.display()));
        }
        Ok(Side {
            label: label.to_owned(),
            notes,
            content: Content::Resolved {
                platforms: [(platform, inventory(&subject))].into(),
                variables: Some(subject.variables),
                one: true,
                only_pypi,
            },
        })
    }

    /// What somebody asks for.
    pub fn of_request(label: &str, spec: EnvSpec) -> Self {
        Side { label: label.to_owned(), content: Content::Request(Box::new(spec)), notes: Vec::new() }
    }

    /// A lock.
    ///
    /// # Errors
    /// Packages that only pixi can build.
    pub fn of_lock(label: &str, lock: &Lock) -> Result<Self> {
        let mut platforms = BTreeMap::new();
        for platform in &lock.platforms {
            platforms.insert(platform.name.clone(), inventory(&Subject::of_lock(lock, platform)?));
        }
        let variables = (lock.source == lock::Format::Tare).then(|| lock.provenance.variables.clone());
        let only_pypi = lock.source == lock::Format::Pylock;
        let content = Content::Resolved { platforms, variables, one: false, only_pypi };
        Ok(Side { label: label.to_owned(), content, notes: Vec::new() })
    }

    /// A lock or an environment.yml, by its content.
    ///
    /// # Errors
    /// It is neither, or malformed.
    pub fn of_file(label: &str, path: &Path, subdir: Subdir) -> Result<Self> {
        let bytes = lock::read_bytes(path)?;
        let name = path.display().to_string();
        let base_dir = path.parent().map(Path::to_owned);
        if lock::is_lock(&name, &bytes) {
            let options = lock::ReadOptions { base_dir, ..lock::ReadOptions::default() };
            return Self::of_lock(label, &lock::read(&name, &bytes, &options)?);
        }
        let options = spec::ReadOptions {
            subdir,
            root_dir: std::env::current_dir().unwrap_or_default(),
            env: |name| std::env::var(name).ok(),
            target_given: true,
        };
        let spec = spec::read(&[spec::Fetched { name, bytes, base_dir }], &[], &options)?;
        Ok(Self::of_request(label, spec))
    }
}

/// Compares two sides. `platform`: only this one of locks.
///
/// # Errors
/// There is no common platform (kind drift), or not the one asked for (usage).
pub fn compare(a: &Side, b: &Side, platform: Option<&str>) -> Result<Report> {
    let notes = a.notes.iter().chain(&b.notes).cloned().collect();
    let mut report = Report { a: a.label.clone(), b: b.label.clone(), notes, ..Report::default() };
    match (&a.content, &b.content) {
        (Content::Request(before), Content::Request(after)) => requests(before, after, &mut report.differences),
        (Content::Request(spec), Content::Resolved { platforms, variables, .. }) => {
            for (name, inventory) in chosen(platforms, platform, &b.label)? {
                request(spec, inventory, name, true, &mut report.differences);
            }
            if let Some(variables) = variables {
                changed_variables(&spec.variables, variables, &mut report.differences);
            }
        }
        (Content::Resolved { platforms, variables, .. }, Content::Request(spec)) => {
            for (name, inventory) in chosen(platforms, platform, &a.label)? {
                request(spec, inventory, name, false, &mut report.differences);
            }
            if let Some(variables) = variables {
                changed_variables(variables, &spec.variables, &mut report.differences);
            }
        }
        (
            Content::Resolved { platforms: before, variables: old, one: one_a, only_pypi: pypi_a },
            Content::Resolved { platforms: after, variables: new, one: one_b, only_pypi: pypi_b },
        ) => {
            let only_pypi = *pypi_a || *pypi_b;
            if only_pypi && !(*pypi_a && *pypi_b) {
                report.notes.push("one side knows Python packages only: the conda packages are not compared".to_owned());
            }
            let loose = *one_a || *one_b || only_pypi;
            for (name, a_side, b_side) in pairs(a, before, b, after, loose, platform, &mut report)? {
                packages(a_side, b_side, &name, only_pypi, &mut report.differences);
            }
            if let (Some(old), Some(new)) = (old, new) {
                changed_variables(old, new, &mut report.differences);
            }
        }
    }
    report.differences.sort();
    report.equal = report.differences.is_empty();
    Ok(report)
}

fn chosen<'a>(platforms: &'a BTreeMap<String, Inventory>, wanted: Option<&str>, label: &str) -> Result<Vec<(&'a str, &'a Inventory)>> {
    let all = platforms.iter().map(|(name, inventory)| (name.as_str(), inventory));
    match wanted {
        None => Ok(all.collect()),
        Some(wanted) => {
            let found: Vec<_> = all.filter(|(name, _)| *name == wanted).collect();
            if found.is_empty() { Err(Error::usage(format!("`{label}` has nothing for {wanted}"))) } else { Ok(found) }
        }
    }
}

/// A platform and what each side has for it.
type Pair<'a> = (String, Option<&'a Inventory>, Option<&'a Inventory>);

/// Which platforms are compared with which. `loose`: a side has one platform by nature or none, so only what both have counts.
fn pairs<'a>(
    a: &Side,
    before: &'a BTreeMap<String, Inventory>,
    b: &Side,
    after: &'a BTreeMap<String, Inventory>,
    loose: bool,
    wanted: Option<&str>,
    report: &mut Report,
) -> Result<Vec<Pair<'a>>> {
    let vague = |name: &str| matches!(name, "any" | "unknown" | "noarch");
    let vague_one =
        |platforms: &'a BTreeMap<String, Inventory>| platforms.iter().next().filter(|(name, _)| platforms.len() == 1 && vague(name));
    if let (Some((name_a, only_a)), Some((name_b, only_b))) = (before.iter().next(), after.iter().next())
        && before.len() == 1
        && after.len() == 1
        && (name_a == name_b || vague(name_a) || vague(name_b))
    {
        return Ok(vec![(if vague(name_a) { name_b.clone() } else { name_a.clone() }, Some(only_a), Some(only_b))]);
    }
    if let Some(wanted) = wanted {
        // What is for no platform in particular is for this one too.
        match (before.get(wanted), vague_one(before), after.get(wanted), vague_one(after)) {
            (Some(old), _, None, Some((_, new))) | (None, Some((_, old)), Some(new), _) => {
                return Ok(vec![(wanted.to_owned(), Some(old), Some(new))]);
            }
            _ => {}
        }
    }
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let mut pairs = Vec::new();
    for name in names.into_iter().filter(|name| wanted.is_none_or(|wanted| *name == wanted)) {
        let pair = (before.get(name), after.get(name));
        if loose && (pair.0.is_none() || pair.1.is_none()) {
            continue;
        }
        pairs.push((name.clone(), pair.0, pair.1));
    }
    if loose && pairs.len() < before.len().max(after.len()) && !pairs.is_empty() {
        report.notes.push("compared are the platforms that both sides have".to_owned());
    }
    if pairs.is_empty() {
        let list =
            |platforms: &BTreeMap<String, Inventory>| platforms.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let error = Error::new(Kind::Drift, format!("`{}` and `{}` are not for the same platform", a.label, b.label)).because(format!(
            "{} and {}",
            list(before),
            list(after)
        ));
        let one = [before, after].into_iter().filter(|platforms| platforms.len() > 1).find_map(|platforms| platforms.keys().next());
        return Err(match one.filter(|_| wanted.is_none() && (vague_one(before).is_some() || vague_one(after).is_some())) {
            Some(one) => error.hint(format!("to compare one of them: --platform {one}")),
            None => error,
        });
    }
    Ok(pairs)
}

fn packages(before: Option<&Inventory>, after: Option<&Inventory>, platform: &str, only_pypi: bool, differences: &mut Vec<Difference>) {
    let empty = Inventory::default();
    let (before, after) = (before.unwrap_or(&empty), after.unwrap_or(&empty));
    let mut half = |half: Half, before: &BTreeMap<String, Item>, after: &BTreeMap<String, Item>| {
        let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        for name in names {
            let (old, new) = (before.get(name), after.get(name));
            let (change, fields) = match (old, new) {
                (Some(old), Some(new)) => {
                    let fields = differing(old, new);
                    if fields.is_empty() {
                        continue;
                    }
                    (Change::Changed, fields)
                }
                (None, _) => (Change::Added, Vec::new()),
                (_, None) => (Change::Removed, Vec::new()),
            };
            differences.push(Difference {
                platform: platform.to_owned(),
                half,
                name: name.clone(),
                change,
                before: old.cloned(),
                after: new.cloned(),
                fields,
            });
        }
    };
    if !only_pypi {
        half(Half::Conda, &before.conda, &after.conda);
    }
    half(Half::Pypi, &before.pypi, &after.pypi);
}

/// What both sides know and is not the same.
fn differing(old: &Item, new: &Item) -> Vec<&'static str> {
    let differs = |a: &Option<String>, b: &Option<String>| a.is_some() && b.is_some() && a != b;
    let mut fields = Vec::new();
    if differs(&old.version, &new.version) {
        fields.push("version");
    }
    if differs(&old.build, &new.build) {
        fields.push("build");
    }
    if differs(&old.channel, &new.channel) {
        fields.push("channel");
    }
    let hash = if old.sha256.is_some() && new.sha256.is_some() { differs(&old.sha256, &new.sha256) } else { differs(&old.md5, &new.md5) };
    if hash {
        fields.push("hash");
    }
    fields
}

fn changed_variables(before: &IndexMap<String, String>, after: &IndexMap<String, String>, differences: &mut Vec<Difference>) {
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for name in names {
        let (old, new) = (before.get(name), after.get(name));
        if old == new {
            continue;
        }
        let item = |value: Option<&String>| value.map(|value| Item { text: Some(value.clone()), ..Item::default() });
        differences.push(Difference {
            platform: String::new(),
            half: Half::Variable,
            name: name.clone(),
            change: match (old, new) {
                (None, _) => Change::Added,
                (_, None) => Change::Removed,
                _ => Change::Changed,
            },
            before: item(old),
            after: item(new),
            fields: vec!["value"],
        });
    }
}

/// The conda half of a request: name, spec, text.
fn wanted(spec: &EnvSpec) -> Vec<(String, Option<&MatchSpec>, String)> {
    spec.dependencies
        .iter()
        .map(|dependency| match dependency {
            Dependency::Match { spec, text, .. } => {
                (spec.name.as_exact().map_or_else(|| text.clone(), |name| name.as_normalized().to_owned()), Some(spec), text.clone())
            }
            Dependency::Package { url, text, .. } => {
                let file = url.path().rsplit('/').next().unwrap_or_default();
                let name = file.rsplitn(3, '-').nth(2).unwrap_or(text);
                (name.to_lowercase(), None, text.clone())
            }
        })
        .collect()
}

/// The PyPI half of a request: name, the requirement if it is one, text without secrets.
fn wanted_pypi(spec: &EnvSpec) -> Vec<(String, Option<&spec::Requirement>, String)> {
    spec.pip
        .iter()
        .filter(|item| item.is_requirement())
        .map(|item| match &item.kind {
            PipKind::Requirement { requirement, .. } => (prefix::normalize(requirement.name.as_ref()), Some(&**requirement), item.shown()),
            _ => (item.shown(), None, item.shown()),
        })
        .collect()
}

/// What a request asks for against what there is. More packages than asked for are no difference.
fn request(spec: &EnvSpec, inventory: &Inventory, platform: &str, request_first: bool, differences: &mut Vec<Difference>) {
    let mut push = |half: Half, name: &str, change: Change, text: &str, found: Option<Item>| {
        let asked = Some(Item { text: Some(text.to_owned()), ..Item::default() });
        let (before, after) = if request_first { (asked, found) } else { (found, asked) };
        differences.push(Difference {
            platform: platform.to_owned(),
            half,
            name: name.to_owned(),
            change,
            before,
            after,
            fields: Vec::new(),
        });
    };
    for (name, spec, text) in wanted(spec) {
        match (inventory.records.get(&name), spec) {
            (None, _) => push(Half::Conda, &name, Change::Missing, &text, None),
            (Some(record), Some(spec)) => {
                let channel_differs = spec.channel.as_ref().is_some_and(|channel| {
                    let wanted = channel.name().to_owned();
                    inventory
                        .conda
                        .get(&name)
                        .and_then(|item| item.channel.as_ref())
                        .is_some_and(|found| *found != wanted && !found.ends_with(&format!("/{wanted}")))
                });
                if !spec.matches(record) || channel_differs {
                    push(Half::Conda, &name, Change::Unmet, &text, inventory.conda.get(&name).cloned());
                }
            }
            (Some(_), None) => {}
        }
    }
    for (name, requirement, text) in wanted_pypi(spec) {
        // What pip asks for may come from a conda package of the same name.
        let found = inventory
            .pypi
            .get(&name)
            .or_else(|| inventory.conda.iter().find(|(conda, _)| prefix::normalize(conda) == name).map(|(_, item)| item));
        let Some(requirement) = requirement else { continue };
        let met = match (found.and_then(|item| item.version.as_deref()), &requirement.version_or_url) {
            (Some(version), Some(pep508_rs::VersionOrUrl::VersionSpecifier(specifiers))) => {
                version.parse::<pep508_rs::pep440_rs::Version>().map_or(true, |version| specifiers.contains(&version))
            }
            _ => true,
        };
        match found {
            None if requirement.marker != pep508_rs::MarkerTree::TRUE => {}
            None => push(Half::Pypi, &name, Change::Missing, &text, None),
            Some(found) if !met => push(Half::Pypi, &name, Change::Unmet, &text, Some(found.clone())),
            Some(_) => {}
        }
    }
}

/// Two requests by their texts.
fn requests(before: &EnvSpec, after: &EnvSpec, differences: &mut Vec<Difference>) {
    let conda = |spec: &EnvSpec| {
        wanted(spec).into_iter().map(|(name, spec, text)| (name, spec.map_or(text, ToString::to_string))).collect::<BTreeMap<_, _>>()
    };
    let pypi = |spec: &EnvSpec| wanted_pypi(spec).into_iter().map(|(name, _, text)| (name, text)).collect::<BTreeMap<_, _>>();
    let channels = |spec: &EnvSpec| {
        let position = |index: usize| (index + 1).to_string();
        spec.channels
            .iter()
            .enumerate()
            .map(|(index, channel)| (spec::mask_secrets(&channel.text), position(index)))
            .collect::<BTreeMap<_, _>>()
    };
    for (half, before, after) in [
        (Half::Conda, conda(before), conda(after)),
        (Half::Pypi, pypi(before), pypi(after)),
        (Half::Channel, channels(before), channels(after)),
    ] {
        let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        for name in names {
            let (old, new) = (before.get(name), after.get(name));
            if old == new {
                continue;
            }
            let item = |text: Option<&String>| text.map(|text| Item { text: Some(text.clone()), ..Item::default() });
            differences.push(Difference {
                platform: String::new(),
                half,
                name: name.clone(),
                change: match (old, new) {
                    (None, _) => Change::Added,
                    (_, None) => Change::Removed,
                    _ => Change::Changed,
                },
                before: item(old),
                after: item(new),
                fields: Vec::new(),
            });
        }
    }
    changed_variables(&before.variables, &after.variables, differences);
}

impl Difference {
    /// One side in a few words; of a change only what changed.
    fn shown(&self, item: Option<&Item>) -> String {
        let Some(item) = item else { return "—".to_owned() };
        if let Some(text) = &item.text {
            return text.clone();
        }
        let all = self.change != Change::Changed;
        let has = |field: &str| all || self.fields.contains(&field);
        let mut words: Vec<String> = Vec::new();
        // The version always: a build or hash alone says little.
        words.extend(item.version.clone());
        if has("build") {
            words.extend(item.build.clone());
        }
        if has("channel") {
            words.extend(item.channel.clone());
        }
        if !all && self.fields.contains(&"hash") {
            let hash = item.sha256.as_ref().or(item.md5.as_ref());
            words.extend(hash.map(|hash| format!("#{}", &hash[..hash.len().min(12)])));
        }
        words.join(" ")
    }

    fn half_name(&self) -> &'static str {
        match self.half {
            Half::Conda => "",
            Half::Pypi => " (pypi)",
            Half::Variable => " (variable)",
            Half::Channel => " (channel)",
        }
    }

    fn sign(&self) -> &'static str {
        match self.change {
            Change::Added => "+",
            Change::Removed => "-",
            Change::Changed => "~",
            Change::Missing | Change::Unmet => "!",
        }
    }

    /// The difference as one line.
    pub fn line(&self) -> String {
        let name = format!("{}{}", self.name, self.half_name());
        let (before, after) = (self.shown(self.before.as_ref()), self.shown(self.after.as_ref()));
        match self.change {
            Change::Added => format!("+ {name}  {after}"),
            Change::Removed => format!("- {name}  {before}"),
            Change::Changed => format!("~ {name}  {before} -> {after}"),
            Change::Missing => {
                let asked = self.before.as_ref().or(self.after.as_ref());
                format!("! {name}  `{}` is asked for and not there", self.shown(asked))
            }
            Change::Unmet => {
                let is_text = |item: &&Item| item.text.is_some();
                let asked = self.before.as_ref().filter(is_text).or(self.after.as_ref());
                let found =
                    self.before.as_ref().filter(|item| item.text.is_none()).or(self.after.as_ref().filter(|item| item.text.is_none()));
                format!("! {name}  `{}` is asked for, and there is {}", self.shown(asked), self.shown(found))
            }
        }
    }
}

impl Report {
    fn by_platform(&self) -> BTreeMap<&str, Vec<&Difference>> {
        let mut groups: BTreeMap<&str, Vec<&Difference>> = BTreeMap::new();
        for difference in &self.differences {
            groups.entry(&difference.platform).or_default().push(difference);
        }
        groups
    }

    fn summary(&self) -> String {
        let count = |change: Change| self.differences.iter().filter(|difference| difference.change == change).count();
        let parts: Vec<String> = [
            (Change::Added, "added"),
            (Change::Removed, "removed"),
            (Change::Changed, "changed"),
            (Change::Missing, "missing"),
            (Change::Unmet, "not as asked for"),
        ]
        .into_iter()
        .map(|(change, word)| (count(change), word))
        .filter(|(count, _)| *count > 0)
        .map(|(count, word)| format!("{count} {word}"))
        .collect();
        if parts.is_empty() { "no differences".to_owned() } else { parts.join(", ") }
    }

    /// For people.
    pub fn text(&self) -> String {
        if self.equal {
            return "no differences\n".to_owned();
        }
        let mut text = format!("--- {}\n+++ {}\n", self.a, self.b);
        for (platform, differences) in self.by_platform() {
            if !platform.is_empty() {
                let _ = writeln!(text, "{platform}");
            }
            for difference in differences {
                let _ = writeln!(text, "  {}", difference.line());
            }
        }
        let _ = writeln!(text, "{}", self.summary());
        text
    }

    /// A table a platform, for a pull request.
    pub fn markdown(&self) -> String {
        let cell = |text: &str| text.replace('|', "\\|").replace(['\n', '\r'], " ");
        let mut text = format!("**{}** → **{}**: {}\n", cell(&self.a), cell(&self.b), self.summary());
        for (platform, differences) in self.by_platform() {
            let title = if platform.is_empty() { "Request".to_owned() } else { format!("`{platform}`") };
            let _ = write!(text, "\n### {title}\n\n| | package | before | after |\n|---|---|---|---|\n");
            for difference in differences {
                let _ = writeln!(
                    text,
                    "| {} | {}{} | {} | {} |",
                    match difference.sign() {
                        "-" => "−",
                        sign => sign,
                    },
                    cell(&difference.name),
                    difference.half_name(),
                    cell(&difference.shown(difference.before.as_ref())),
                    cell(&difference.shown(difference.after.as_ref())),
                );
            }
        }
        text
    }
}

/// The packages of an environment against a lock, as findings of `verify`.
///
/// # Errors
/// The lock cannot be read or has not the platform of the environment.
pub fn against_lock(prefix: &Prefix, path: &Path) -> Result<Vec<Finding>> {
    let lock = lock::read_file(path, &lock::ReadOptions::default())?;
    let label = path.display().to_string();
    let report = compare(&Side::of_lock(&label, &lock)?, &Side::of_prefix("the environment", prefix)?, None)?;
    Ok(report
        .differences
        .iter()
        .map(|difference| Finding {
            fault: Fault::Drift,
            path: String::new(),
            package: Some(difference.name.clone()),
            detail: Some(difference.line()),
        })
        .collect())
}

#[cfg(test)]
mod tests;
