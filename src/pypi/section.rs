//! A `pip:` section taken apart: what to install, what holds it, where to look. Files named by `-r` and `-c` are read; the rest is as written.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pep508_rs::{MarkerEnvironment, VersionOrUrl};
use sha2::{Digest as _, Sha256};
use url::Url;

use super::Name;
use crate::channel::Session;
use crate::error::{Error, Place, Result};
use crate::spec::{ArtifactHash, EditableTarget, Location, PipItem, PipKind, Requirement, Text, Vcs, mask_secrets, requirements};

/// How deep files may name files.
const MAX_DEPTH: usize = 20;

/// Everything that a `pip:` section says.
#[derive(Debug, Clone, Default)]
pub struct Section {
    /// What to install, in order.
    pub requirements: Vec<PipItem>,
    /// What holds versions without installing anything.
    pub constraints: Vec<PipItem>,
    /// Where to look and what to accept.
    pub options: Options,
    /// Constraints that are given up where nothing fits otherwise.
    held: Vec<String>,
    /// What was asked for earlier of packages that this section does not name: constraints that are no part of the request.
    earlier: Vec<String>,
    /// Files by URL that were not fetched yet.
    pending: Vec<Pending>,
}

/// The options of a section, merged: of options that hold one value the last counts, as for pip.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `--index-url`. May hold credentials.
    pub index_url: Option<String>,
    /// `--extra-index-url`. May hold credentials.
    pub extra_index_urls: Vec<String>,
    /// `--find-links`. May hold credentials.
    pub find_links: Vec<Location>,
    /// `--no-index`.
    pub no_index: bool,
    /// `--pre`.
    pub pre: bool,
    /// `--prefer-binary`.
    pub prefer_binary: bool,
    /// `--only-binary`.
    pub only_binary: Vec<String>,
    /// `--no-binary`.
    pub no_binary: Vec<String>,
    /// `--trusted-host`.
    pub trusted_hosts: Vec<String>,
    /// `--require-hashes`.
    pub require_hashes: bool,
    /// `--use-feature`, `--all-releases` and `--only-final`: option and value.
    pub pip_only: Vec<(&'static str, String)>,
}

#[derive(Debug, Clone)]
struct Pending {
    url: Url,
    constraints: bool,
    depth: usize,
    place: Option<Place>,
}

impl Section {
    /// Takes `items` apart and reads the local files they name.
    ///
    /// # Errors
    /// Files that cannot be read or are malformed, at the place that names them.
    pub fn load(items: &[PipItem], env: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let mut section = Section::default();
        section.add(items, false, 0, &mut BTreeSet::new(), env)?;
        Ok(section)
    }

    /// Fetches the files that are named by URL.
    ///
    /// # Errors
    /// As [`Section::load`]; kind network where a server does not answer.
    pub async fn complete(&mut self, session: &Session) -> Result<()> {
        let mut seen = BTreeSet::new();
        while let Some(next) = self.pending.pop() {
            if !seen.insert((next.constraints, next.url.to_string())) {
                continue;
            }
            let at = |error: Error| match &next.place {
                Some(place) => error.at(place.clone()),
                None => error,
            };
            let fetched = session.fetch_text(&next.url).await.map_err(at)?;
            let text = Text::decode(&fetched.name, &fetched.bytes, None)?;
            let mut items = requirements::parse_file(&text, &|name| std::env::var(name).ok())?;
            // `-r other.txt` in a file from a URL is beside that file.
            for item in &mut items {
                if let PipKind::RequirementsFile(location) | PipKind::ConstraintsFile(location) = &mut item.kind
                    && let Location::Path(path) = location
                    && let Ok(url) = next.url.join(&path.to_string_lossy())
                {
                    *location = Location::Url(url);
                }
            }
            self.add(&items, next.constraints, next.depth, &mut BTreeSet::new(), &|name| std::env::var(name).ok())?;
        }
        Ok(())
    }

    /// The files by URL that were not fetched ([`Section::complete`] does), credentials hidden.
    pub fn not_fetched(&self) -> Vec<String> {
        self.pending.iter().map(|pending| crate::channel::redact_url(&pending.url)).collect()
    }

    /// Asks for these versions to be kept, where that can be.
    pub fn hold(&mut self, packages: &[(Name, super::Version)]) {
        self.held = packages.iter().map(|(name, version)| format!("{name}=={version}")).collect();
    }

    /// The lines of [`Section::hold`].
    pub(super) fn held(&self) -> &[String] {
        &self.held
    }

    /// Has the versions that were asked for earlier hold on. `lines`: constraints, by name and version.
    pub fn hold_requests(&mut self, lines: Vec<String>) {
        self.earlier = lines;
    }

    /// The lines of [`Section::hold_requests`].
    pub(super) fn earlier(&self) -> &[String] {
        &self.earlier
    }

    /// The section without [`Section::hold`].
    pub(super) fn released(&self) -> Self {
        Section { held: Vec::new(), ..self.clone() }
    }

    /// Whether there is nothing to install.
    pub fn is_empty(&self) -> bool {
        self.requirements.is_empty() && self.pending.is_empty()
    }

    fn add(
        &mut self,
        items: &[PipItem],
        constraints: bool,
        depth: usize,
        open: &mut BTreeSet<PathBuf>,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<()> {
        for item in items {
            let options = &mut self.options;
            match &item.kind {
                kind if item.is_requirement() => {
                    if constraints && !matches!(kind, PipKind::Requirement { .. }) {
                        return Err(at(Error::usage(format!("`{}` cannot be a constraint", item.shown())), item)
                            .because("a constraint has a name: `name==1.2` or `name @ URL`"));
                    }
                    if constraints { self.constraints.push(item.clone()) } else { self.requirements.push(item.clone()) }
                }
                PipKind::RequirementsFile(location) => self.file(location, constraints, depth, item, open, env)?,
                PipKind::ConstraintsFile(location) => self.file(location, true, depth, item, open, env)?,
                PipKind::IndexUrl(url) => options.index_url = Some(index(url, item)),
                PipKind::ExtraIndexUrl(url) => options.extra_index_urls.push(index(url, item)),
                PipKind::FindLinks(location) => options.find_links.push(location.clone()),
                PipKind::NoIndex => options.no_index = true,
                PipKind::Pre => options.pre = true,
                PipKind::PreferBinary => options.prefer_binary = true,
                PipKind::OnlyBinary(what) => options.only_binary.push(what.clone()),
                PipKind::NoBinary(what) => options.no_binary.push(what.clone()),
                PipKind::TrustedHost(host) => options.trusted_hosts.push(host.clone()),
                PipKind::RequireHashes => options.require_hashes = true,
                PipKind::UseFeature(name) => options.pip_only.push(("--use-feature", name.clone())),
                PipKind::AllReleases(what) => options.pip_only.push(("--all-releases", what.clone())),
                PipKind::OnlyFinal(what) => options.pip_only.push(("--only-final", what.clone())),
                _ => {}
            }
        }
        Ok(())
    }

    fn file(
        &mut self,
        location: &Location,
        constraints: bool,
        depth: usize,
        item: &PipItem,
        open: &mut BTreeSet<PathBuf>,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<()> {
        if depth >= MAX_DEPTH {
            return Err(at(Error::usage(format!("`{}` is the {MAX_DEPTH}th file that names another", item.shown())), item));
        }
        let path = match location {
            Location::Path(path) => path.clone(),
            Location::Url(url) => match url.to_file_path() {
                Ok(path) if url.scheme() == "file" => path,
                _ => {
                    self.pending.push(Pending { url: url.clone(), constraints, depth: depth + 1, place: item.place.clone() });
                    return Ok(());
                }
            },
        };
        if path.is_relative() {
            return Err(at(Error::usage(format!("`{}` is a relative path in a text that has no folder", item.shown())), item)
                .hint("give an absolute path or a URL"));
        }
        let bytes = crate::files::read_input(&path, crate::spec::source::MAX_TEXT as u64)
            .map_err(|error| at(Error::io("read", &path, &error).with_kind(crate::error::Kind::Usage), item))?;
        let same = std::fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
        if !open.insert(same.clone()) {
            return Err(at(Error::usage(format!("`{}` names itself", path.display())), item));
        }
        let text = Text::decode(&path.display().to_string(), &bytes, path.parent().map(Path::to_path_buf))?;
        let items = requirements::parse_file(&text, env)?;
        self.add(&items, constraints, depth + 1, open, env)?;
        open.remove(&same);
        Ok(())
    }

    /// What decides the outcome, as text for a digest: the same text means the same request. Files of this machine count by their contents (of
    /// folders: by what says how they are built); credentials do not count, because they may change from run to run.
    pub fn facts(&self) -> Vec<String> {
        let mut facts = item_facts("install", &self.requirements);
        facts.extend(self.context());
        facts
    }

    /// The part of [`Section::facts`] that is about no single thing to install: constraints, options, files that were not fetched.
    pub fn context(&self) -> Vec<String> {
        let mut facts = item_facts("hold", &self.constraints);
        let options = &self.options;
        for line in options.lines(true) {
            facts.push(mask_secrets(&line));
        }
        facts.extend(
            self.pending.iter().map(|pending| {
                format!("{} {}", if pending.constraints { "hold-file" } else { "file" }, mask_secrets(pending.url.as_str()))
            }),
        );
        facts
    }

    /// The digest of what each requirement installs from this machine, by the requirement as it is shown. See [`Section::facts`].
    pub fn contents(&self) -> BTreeMap<String, String> {
        self.requirements.iter().filter_map(|item| Some((item.shown(), content_digest(&local_path(&item.kind)?)))).collect()
    }

    /// The names that the section asks for, each with the extras; of requirements whose name is not written, none.
    pub fn names(&self, markers: &MarkerEnvironment) -> Vec<Asked> {
        self.requirements.iter().filter_map(|item| asked(item, markers)).collect()
    }

    /// The names that are written in it, whatever their markers say.
    pub fn written_names(&self) -> impl Iterator<Item = &Name> {
        self.requirements.iter().filter_map(|item| match &item.kind {
            PipKind::Requirement { requirement, .. } => Some(&requirement.name),
            _ => None,
        })
    }

    /// The hashes that the section demands, by name.
    pub fn hashes(&self) -> Vec<(Name, Vec<ArtifactHash>)> {
        let mut found = Vec::new();
        for item in self.requirements.iter().chain(&self.constraints) {
            if let PipKind::Requirement { requirement, hashes } = &item.kind
                && !hashes.is_empty()
            {
                found.push((requirement.name.clone(), hashes.clone()));
            }
        }
        found
    }

    /// Whether any item has a hash, which makes pip demand one of every item.
    pub fn has_hashes(&self) -> bool {
        self.requirements.iter().any(|item| {
            matches!(&item.kind, PipKind::Requirement { hashes, .. } | PipKind::Url { hashes, .. } | PipKind::Path { hashes, .. } if !hashes.is_empty())
        })
    }
}

impl Options {
    /// The options as lines of a requirements file. `all`: also those that only pip understands.
    pub fn lines(&self, all: bool) -> Vec<String> {
        let mut lines = Vec::new();
        lines.extend(self.index_url.iter().map(|url| format!("--index-url {url}")));
        lines.extend(self.extra_index_urls.iter().map(|url| format!("--extra-index-url {url}")));
        for location in &self.find_links {
            lines.push(match location {
                Location::Path(path) => format!("--find-links {}", path_text(path)),
                Location::Url(url) => format!("--find-links {url}"),
            });
        }
        if self.no_index {
            lines.push("--no-index".to_owned());
        }
        if all {
            lines.extend(self.only_binary.iter().map(|what| format!("--only-binary {what}")));
            lines.extend(self.no_binary.iter().map(|what| format!("--no-binary {what}")));
            lines.extend(self.trusted_hosts.iter().map(|host| format!("--trusted-host {host}")));
            for (on, option) in [(self.pre, "--pre"), (self.prefer_binary, "--prefer-binary"), (self.require_hashes, "--require-hashes")] {
                lines.extend(on.then(|| option.to_owned()));
            }
            lines.extend(self.pip_only.iter().map(|(option, value)| format!("{option} {value}")));
        }
        lines
    }
}

fn item_facts(list: &str, items: &[PipItem]) -> Vec<String> {
    let mut facts = Vec::new();
    for item in items {
        facts.push(format!("{list} {}", mask_secrets(&requirement_line(item, true).unwrap_or_else(|_| item.shown()))));
        if let Some(path) = local_path(&item.kind) {
            facts.push(format!("content {}", content_digest(&path)));
        }
    }
    facts
}

/// A distribution that the section names.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Its name.
    pub name: Name,
    /// The extras.
    pub extras: Vec<String>,
    /// The requirement, if it is one by version.
    pub requirement: Option<Requirement>,
    /// As written, credentials hidden.
    pub shown: String,
    /// Where it stands.
    pub place: Option<Place>,
}

fn asked(item: &PipItem, markers: &MarkerEnvironment) -> Option<Asked> {
    let made = |name: Name, extras: Vec<String>, requirement: Option<Requirement>| {
        Some(Asked { name, extras, requirement, shown: item.shown(), place: item.place.clone() })
    };
    match &item.kind {
        PipKind::Requirement { requirement, .. } => {
            if !requirement.marker.evaluate(markers, &[]) {
                return None;
            }
            let by_version = !matches!(requirement.version_or_url, Some(VersionOrUrl::Url(_)));
            let extras = requirement.extras.iter().map(ToString::to_string).collect();
            made(requirement.name.clone(), extras, by_version.then(|| (**requirement).clone()))
        }
        PipKind::Vcs(vcs) => {
            if !marker_holds(vcs.marker.as_deref(), markers) {
                return None;
            }
            let (name, extras) = egg(vcs.egg.as_deref()?)?;
            made(name, extras, None)
        }
        PipKind::Editable(target) => match &**target {
            EditableTarget::Vcs(vcs) => {
                let (name, extras) = egg(vcs.egg.as_deref()?)?;
                made(name, extras, None)
            }
            EditableTarget::Path { .. } => None,
        },
        _ => None,
    }
}

/// Whether a marker holds; one that cannot be read was refused before.
pub fn marker_holds(marker: Option<&str>, markers: &MarkerEnvironment) -> bool {
    let Some(marker) = marker else { return true };
    pep508_rs::MarkerTree::from_str(marker).map_or(true, |tree: pep508_rs::MarkerTree| tree.evaluate(markers, &[]))
}

/// `name[a,b]` of an `egg=` fragment.
fn egg(text: &str) -> Option<(Name, Vec<String>)> {
    let (name, extras) = match text.split_once('[') {
        Some((name, rest)) => (name, rest.trim_end_matches(']').split(',').map(|extra| extra.trim().to_owned()).collect()),
        None => (text, Vec::new()),
    };
    Some((Name::from_str(name).ok()?, extras))
}

fn at(error: Error, item: &PipItem) -> Error {
    match &item.place {
        Some(place) => error.at(place.clone()),
        None => error,
    }
}

/// A local path as index is relative to the file.
fn index(url: &str, item: &PipItem) -> String {
    match &item.base_dir {
        Some(base) if !url.contains("://") => {
            Url::from_directory_path(base.join(url)).map_or_else(|()| url.to_owned(), |url| url.to_string())
        }
        _ => url.to_owned(),
    }
}

/// The file or folder that an item installs.
pub(super) fn local_path(kind: &PipKind) -> Option<PathBuf> {
    let of_url = |url: &Url| if url.scheme() == "file" { url.to_file_path().ok() } else { None };
    match kind {
        PipKind::Path { path, .. } => Some(path.clone()),
        PipKind::Url { url, .. } => of_url(url),
        PipKind::Editable(target) => match &**target {
            EditableTarget::Path { path, .. } => Some(path.clone()),
            EditableTarget::Vcs(_) => None,
        },
        PipKind::Requirement { requirement, .. } => match &requirement.version_or_url {
            Some(VersionOrUrl::Url(url)) => of_url(url),
            _ => None,
        },
        _ => None,
    }
}

/// The digest of a file; of a folder, that of the files which say how it is built.
fn content_digest(path: &Path) -> String {
    let mut digest = Sha256::new();
    let files = if path.is_dir() {
        ["pyproject.toml", "setup.cfg", "setup.py"].iter().map(|name| path.join(name)).collect()
    } else {
        vec![path.to_owned()]
    };
    for file in files {
        if let Ok(bytes) = std::fs::read(&file) {
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(&bytes);
        }
    }
    crate::text::hex(&digest.finalize())
}

/// A path as an item of a requirements file: as a URL where blanks or a `#` would cut it.
fn path_text(path: &Path) -> String {
    let path = crate::spec::clean_path(path);
    let text = path.to_string_lossy();
    match Url::from_file_path(&path) {
        Ok(url) if text.contains([' ', '\t', '#', ';', '[']) => url.to_string(),
        _ => text.into_owned(),
    }
}

fn vcs_text(vcs: &Vcs) -> String {
    let mut text = format!("{}+{}", vcs.system, vcs.url);
    if let Some(revision) = &vcs.revision {
        let _ = write!(text, "@{revision}");
    }
    let folder = vcs.subdirectory.as_ref().map(|folder| format!("subdirectory={folder}"));
    match &vcs.egg {
        // In front of the URL, as PEP 508 has it; older versions of pip refuse that of URLs without a host.
        Some(egg) if !vcs.url.starts_with("file:") => {
            let folder = folder.map(|folder| format!("#{folder}")).unwrap_or_default();
            format!("{egg} @ {text}{folder}")
        }
        egg => {
            let parts: Vec<String> = egg.iter().map(|egg| format!("egg={egg}")).chain(folder).collect();
            if parts.is_empty() { text } else { format!("{text}#{}", parts.join("&")) }
        }
    }
}

/// An item as one line of a requirements file, with absolute paths. `hashes`: with its `--hash` options.
///
/// # Errors
/// A relative path without a folder that it could start from.
pub fn requirement_line(item: &PipItem, with_hashes: bool) -> Result<String> {
    let absolute = |path: &Path| {
        if path.is_absolute() {
            Ok(path_text(path))
        } else {
            Err(at(Error::usage(format!("`{}` is a relative path in a text that has no folder", item.shown())), item)
                .hint("give an absolute path or a URL"))
        }
    };
    let bracketed = |extras: &[String]| if extras.is_empty() { String::new() } else { format!("[{}]", extras.join(",")) };
    let (mut line, marker, hashes) = match &item.kind {
        PipKind::Requirement { requirement, hashes } => (requirement.to_string(), None, hashes.as_slice()),
        PipKind::Url { url, marker, hashes } => (url.to_string(), marker.as_ref(), hashes.as_slice()),
        PipKind::Vcs(vcs) => (vcs_text(vcs), vcs.marker.as_ref(), [].as_slice()),
        PipKind::Path { path, extras, marker, hashes } => {
            (format!("{}{}", absolute(path)?, bracketed(extras)), marker.as_ref(), hashes.as_slice())
        }
        PipKind::Editable(target) => match &**target {
            EditableTarget::Path { path, extras } => (format!("-e {}{}", absolute(path)?, bracketed(extras)), None, [].as_slice()),
            EditableTarget::Vcs(vcs) => (vcs_text(vcs), vcs.marker.as_ref(), [].as_slice()),
        },
        _ => (item.text.clone(), None, [].as_slice()),
    };
    if let Some(marker) = marker {
        let _ = write!(line, " ; {marker}");
    }
    if with_hashes {
        for hash in hashes {
            let _ = write!(line, " --hash={}:{}", hash.algorithm, hash.hex);
        }
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str, base: &Path) -> Result<Section> {
        let text = Text::new("environment.yml", text, Some(base.to_owned()));
        Section::load(&requirements::parse_file(&text, &|_| None)?, &|_| None)
    }

    fn lines(section: &Section) -> Vec<String> {
        section.requirements.iter().map(|item| requirement_line(item, true).unwrap()).collect()
    }

    #[test]
    fn files_are_read_and_paths_start_from_the_file_that_names_them() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path();
        std::fs::create_dir(base.join("sub")).unwrap();
        std::fs::write(base.join("sub/more.txt"), "--pre\nnumpy>=1\n-c ../hold.txt\n./pkg[a]\n").unwrap();
        std::fs::write(base.join("hold.txt"), "scipy<2\n").unwrap();
        let section =
            load("-r sub/more.txt\n-e ./mine\n--find-links wheels\ngit+https://h/o/r@v1#egg=r[x]&subdirectory=d\n", base).unwrap();
        let at = |rest: &str| format!("{}/{rest}", base.display());
        assert_eq!(
            lines(&section),
            [
                "numpy>=1".to_owned(),
                format!("{}[a]", at("sub/pkg")),
                format!("-e {}", at("mine")),
                "r[x] @ git+https://h/o/r@v1#subdirectory=d".to_owned()
            ]
        );
        assert_eq!(section.constraints.len(), 1);
        assert_eq!(section.options.lines(true), [format!("--find-links {}", at("wheels")), "--pre".to_owned()]);
    }

    #[test]
    fn the_digest_sees_contents_but_no_credentials() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path();
        std::fs::write(base.join("r.txt"), "a==1\n").unwrap();
        let first = load("-r r.txt\n-i https://me:one@host/simple\n", base).unwrap().facts();
        assert_eq!(first, load("-r r.txt\n-i https://me:two@host/simple\n", base).unwrap().facts());
        std::fs::write(base.join("r.txt"), "a==2\n").unwrap();
        assert_ne!(first, load("-r r.txt\n-i https://me:one@host/simple\n", base).unwrap().facts());
    }

    #[test]
    fn files_that_are_missing_or_name_themselves_are_errors_with_a_place() {
        let folder = tempfile::tempdir().unwrap();
        let error = load("a\n-r nope.txt\n", folder.path()).unwrap_err();
        assert_eq!((error.exit_code(), error.places().first().map(|place| place.line_column().0)), (2, Some(2)));
        std::fs::write(folder.path().join("r.txt"), "-r r.txt\n").unwrap();
        assert!(load("-r r.txt\n", folder.path()).unwrap_err().to_string().contains("names itself"));
        std::fs::write(folder.path().join("c.txt"), "./pkg\n").unwrap();
        assert!(load("-c c.txt\n", folder.path()).unwrap_err().to_string().contains("cannot be a constraint"));
    }
}
