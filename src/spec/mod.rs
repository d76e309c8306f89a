//! What the user asked for: environment.yml, lists of match specs, `@EXPLICIT` lists and the command line, merged into
//! one [`EnvSpec`].
//!
//! ```text
//! bytes ─ source ─> Text ─ kind ─┬─ yaml ─ environment_yml (selector, requirements, match_spec) ─┐
//!                                ├─ explicit::read_list ───────────────────────────────────────├─ merge ─> EnvSpec
//!                                └─ explicit::read_explicit ───────────────────────────────────┘
//! ```
//! Every error names file, line and column; credentials in URLs never reach a message or a place.

use std::collections::HashSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use indexmap::IndexMap;
use rattler_conda_types::{MatchSpec, Subdir};
use sha2::{Digest as _, Sha256};
use url::Url;

use crate::error::{Error, Place, Result};

mod environment_yml;
mod explicit;
mod match_spec;
pub mod requirements;
pub mod selector;
pub mod source;
pub mod yaml;

#[cfg(test)]
mod tests;

pub use match_spec::{parse_match_spec, parse_with_warning};
pub use requirements::{ArtifactHash, EditableTarget, Location, PipItem, PipKind, Requirement, Vcs};
pub use source::{Text, mask_secrets};

use source::nearest;
pub(crate) use source::{clean_path, quote};

/// The merged request of all inputs.
#[derive(Debug, Clone, Default)]
pub struct EnvSpec {
    /// `name:` of the last file that has one; valid by [`check_name`].
    pub name: Option<String>,
    /// `prefix:` of the last file that has one, absolute, `~` and variables expanded.
    pub prefix: Option<PathBuf>,
    /// Channels in priority order, variables expanded; `nodefaults` is not among them. May hold credentials.
    pub channels: Vec<ChannelEntry>,
    /// Some input had a `channels` key with a list.
    pub channels_declared: bool,
    /// Some input had the channel `nodefaults`.
    pub nodefaults: bool,
    /// The conda half, in order, those whose selector holds.
    pub dependencies: Vec<Dependency>,
    /// The `pip:` and `uv:` sections, in order.
    pub pip: Vec<PipItem>,
    /// Environment variables of the environment.
    pub variables: IndexMap<String, String>,
    /// `platforms:`; empty if not given.
    pub platforms: Vec<Subdir>,
    /// `category:` (conda-lock).
    pub category: Option<String>,
    /// Content of `@EXPLICIT` files.
    pub explicit: Option<ExplicitSpec>,
    /// Name and digest of every text that was read.
    pub sources: Vec<Source>,
    /// Things ignored or doubtful, each with its place.
    pub warnings: Vec<Error>,
}

/// A channel as written, variables expanded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelEntry {
    /// A name, `name/label/x`, a URL or a path. May hold credentials.
    pub text: String,
    /// Where it stands.
    pub place: Option<Place>,
}

/// One conda dependency.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant)]
pub enum Dependency {
    /// A match spec.
    Match {
        /// Parsed leniently.
        spec: MatchSpec,
        /// As written.
        text: String,
        /// Where it stands.
        place: Option<Place>,
    },
    /// A package archive by URL or path.
    Package {
        /// http(s), file, oci, s3, gcs or ftp. May hold credentials.
        url: Url,
        /// The hash behind `#`, if any.
        hash: Option<ExplicitHash>,
        /// As written. May hold credentials.
        text: String,
        /// Where it stands.
        place: Option<Place>,
    },
}

impl Dependency {
    /// As written.
    pub fn text(&self) -> &str {
        match self {
            Dependency::Match { text, .. } | Dependency::Package { text, .. } => text,
        }
    }

    /// Where it stands.
    pub fn place(&self) -> Option<&Place> {
        match self {
            Dependency::Match { place, .. } | Dependency::Package { place, .. } => place.as_ref(),
        }
    }
}

/// What `@EXPLICIT` files list.
#[derive(Debug, Clone, Default)]
pub struct ExplicitSpec {
    /// From `# platform: X`.
    pub platform: Option<Subdir>,
    /// In file order.
    pub packages: Vec<ExplicitPackage>,
}

/// One package of an explicit list.
#[derive(Debug, Clone)]
pub struct ExplicitPackage {
    /// Without the hash. May hold credentials.
    pub url: Url,
    /// From behind `#`.
    pub hash: Option<ExplicitHash>,
    /// Where it stands.
    pub place: Option<Place>,
}

/// The hash of a package archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExplicitHash {
    /// 16 bytes.
    Md5(rattler_digest::Md5Hash),
    /// 32 bytes.
    Sha256(rattler_digest::Sha256Hash),
}

/// Name and digest of an input, for provenance.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Source {
    /// As the user named it, credentials hidden.
    pub name: String,
    /// sha256 of the bytes as read, lower-case hex.
    pub sha256: String,
}

/// Where an `-f` value points.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A file.
    File(PathBuf),
    /// `-`
    Stdin,
    /// http or https; the caller downloads it.
    Url(Url),
}

impl Input {
    /// Interprets the value of `-f`.
    ///
    /// # Errors
    /// URLs that cannot be parsed or have an unknown scheme; the empty text.
    pub fn parse(text: &str) -> Result<Self> {
        if text.is_empty() {
            return Err(Error::usage("`-f` needs the name of a file").hint("`-f environment.yml`, a URL, or `-` for standard input"));
        }
        if text == "-" {
            return Ok(Input::Stdin);
        }
        let Some((scheme, _)) = text.split_once("://") else { return Ok(Input::File(PathBuf::from(text))) };
        let url = Url::parse(text).map_err(|error| Error::usage(format!("invalid URL `{}`", quote(text))).because(error))?;
        match scheme.to_ascii_lowercase().as_str() {
            "http" | "https" => Ok(Input::Url(url)),
            "file" => {
                url.to_file_path().map(Input::File).map_err(|()| Error::usage(format!("`{}` names no file of this machine", quote(text))))
            }
            other => Err(Error::usage(format!("files cannot be read from `{}://`", quote(other))).hint("use http, https, file, or a path")),
        }
    }

    /// As shown to the user, credentials hidden.
    pub fn name(&self) -> String {
        match self {
            Input::File(path) => path.display().to_string(),
            Input::Stdin => "<stdin>".to_owned(),
            Input::Url(url) => mask_secrets(url.as_str()),
        }
    }

    /// Reads a file or standard input; `None` for a URL, which the caller has to fetch.
    ///
    /// # Errors
    /// The file cannot be read; a folder; more than [`source::MAX_TEXT`] bytes.
    pub fn read_local(&self, root_dir: &Path) -> Result<Option<Fetched>> {
        let limit = source::MAX_TEXT as u64 + 1;
        let mut bytes = Vec::new();
        let base_dir = match self {
            Input::Url(_) => return Ok(None),
            Input::Stdin => {
                std::io::stdin()
                    .lock()
                    .take(limit)
                    .read_to_end(&mut bytes)
                    .map_err(|error| Error::usage("cannot read standard input").because(error))?;
                root_dir.to_path_buf()
            }
            Input::File(path) => {
                let full = root_dir.join(path);
                let failed = |error: std::io::Error| {
                    let made = Error::io("read", path, &error).with_kind(crate::error::Kind::Usage);
                    match error.kind() {
                        std::io::ErrorKind::NotFound => made.hints_from(similar_file(&full)),
                        std::io::ErrorKind::IsADirectory => made.hint("give the file in it, such as `environment.yml`"),
                        _ => made,
                    }
                };
                if full.is_dir() {
                    return Err(failed(std::io::ErrorKind::IsADirectory.into()));
                }
                bytes = crate::files::read_input(&full, source::MAX_TEXT as u64).map_err(failed)?;
                full.parent().map_or_else(|| root_dir.to_path_buf(), Path::to_path_buf)
            }
        };
        Ok(Some(Fetched { name: self.name(), bytes, base_dir: Some(base_dir) }))
    }
}

/// "did you mean" for a file that is not there.
fn similar_file(path: &Path) -> Option<String> {
    let wanted = path.file_name()?.to_str()?;
    let mut names: Vec<String> =
        std::fs::read_dir(path.parent()?).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).take(500).collect();
    names.sort();
    let other_ending = match wanted.rsplit_once('.') {
        Some((stem, "yml")) => format!("{stem}.yaml"),
        Some((stem, "yaml")) => format!("{stem}.yml"),
        _ => String::new(),
    };
    let near = names
        .iter()
        .find(|name| **name == other_ending)
        .map(String::as_str)
        .or_else(|| nearest(wanted, names.iter().map(String::as_str)))?;
    Some(format!("did you mean `{}`?", path.with_file_name(near).display()))
}

/// A text that was obtained already.
#[derive(Debug, Clone)]
pub struct Fetched {
    /// Path or URL as the user gave it, or `<stdin>`.
    pub name: String,
    /// As read.
    pub bytes: Vec<u8>,
    /// Folder that relative paths in it start from; `None` for a URL: relative paths of packages are then errors, those of pip items stay as written.
    pub base_dir: Option<PathBuf>,
}

/// What reading depends on.
#[derive(Debug, Clone)]
pub struct ReadOptions {
    /// Selectors are judged for it.
    pub subdir: Subdir,
    /// The current folder.
    pub root_dir: PathBuf,
    /// Environment variables, for `$VAR` and `~`.
    pub env: fn(&str) -> Option<String>,
    /// `-n` or `-p` was given: a `name:` that cannot be used is then only a warning.
    pub target_given: bool,
}

/// What an input is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// environment.yml.
    EnvironmentYml,
    /// One match spec a line.
    List,
    /// `@EXPLICIT`.
    Explicit,
}

/// What an input is, by its content first and its name second.
pub fn detect_kind(name: &str, text: &str) -> FileKind {
    if text.lines().map(str::trim).any(|line| line == "@EXPLICIT") {
        return FileKind::Explicit;
    }
    let lines = || text.lines().filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#'));
    // No match spec holds a colon with a blank or nothing behind it.
    let has_key = lines().any(|line| {
        line.split_once(':').is_some_and(|(key, rest)| {
            let key = key.trim_matches(['"', '\'']);
            let word = !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'));
            word && !key.starts_with('-') && (rest.is_empty() || rest.starts_with([' ', '\t']))
        })
    });
    if has_key || lines().next().is_some_and(|line| line.starts_with("---") || line.starts_with('{') || line.starts_with("%YAML")) {
        return FileKind::EnvironmentYml;
    }
    let path = name.split(['?', '#']).next().unwrap_or("");
    let ending = path.rsplit(['/', '\\']).next().unwrap_or("").rsplit_once('.').map(|(_, ending)| ending.to_ascii_lowercase());
    match ending.as_deref() {
        Some("yml" | "yaml" | "json") => FileKind::EnvironmentYml,
        Some(_) => FileKind::List,
        // Standard input, or a URL without ending: a list in YAML, or nothing at all, is YAML.
        None => {
            let yaml = lines().next().is_none() || lines().any(|line| line.starts_with("- "));
            if yaml { FileKind::EnvironmentYml } else { FileKind::List }
        }
    }
}

/// Reads and merges all inputs and the match specs of the command line.
///
/// Several files merge as conda does: the later `name`, `prefix`, `category` and values of `variables` win, channels of
/// later files come first, dependencies and pip items are joined (an item with the same text stays once).
///
/// # Errors
/// Everything the readers refuse; explicit lists together with anything that has to be solved.
pub fn read(inputs: &[Fetched], command_line: &[String], options: &ReadOptions) -> Result<EnvSpec> {
    let mut merged = EnvSpec::default();
    for input in inputs {
        let part = read_one(input, options)?;
        merge(&mut merged, part)?;
    }
    let mut listed: HashSet<String> = merged.dependencies.iter().map(|dependency| dependency.text().to_owned()).collect();
    for (index, written) in command_line.iter().enumerate() {
        let text = Text::decode(&format!("<argument {}>", index + 1), written.as_bytes(), None)?;
        let shown = text.text.trim().to_owned();
        let place = text.place(0..text.text.len(), "");
        if [".yml", ".yaml", ".txt", ".lock"].iter().any(|ending| shown.ends_with(ending)) {
            return Err(Error::usage(format!("`{}` is a file, not a package", quote(&shown)))
                .at(place)
                .hint(format!("give it with -f: -f {}", quote(&shown))));
        }
        if let Some(written) = shown.strip_prefix("pypi::") {
            let item = python_argument(written, options, &place).map_err(|error| error.at(place.clone()))?;
            if !merged.pip.iter().any(|known| known.text == item.text) {
                merged.pip.push(item);
            }
            continue;
        }
        let tool = ["pip::", "pypi:", "pip:"].into_iter().find_map(|prefix| shown.strip_prefix(prefix));
        if let Some(name) = tool.filter(|name| !name.is_empty() && !name.starts_with(':')) {
            return Err(Error::usage(format!("`{}` is no match spec", quote(&shown)))
                .at(place)
                .hint(format!("a package of the Python package index is named by two colons: 'pypi::{}'", quote(name))));
        }
        let dependency = parse_dependency(&shown, Some(&options.root_dir), options, place, &mut merged.warnings)?;
        if listed.insert(dependency.text().to_owned()) {
            merged.dependencies.push(dependency);
        }
    }
    if let Some(explicit) = &merged.explicit {
        let other = merged.dependencies.first().map(|dependency| (quote(dependency.text()), dependency.place().cloned()));
        let other = other.or_else(|| merged.pip.first().map(|item| (quote(&item.text), item.place.clone())));
        if let Some((text, place)) = other {
            let error = Error::usage("an explicit list cannot be combined with anything else")
                .because(format!("`{text}` would have to be solved, and an explicit list is installed as it is"))
                .hint("use only the explicit list, or only match specs and environment files");
            return Err(match place {
                Some(place) => error.at(place),
                None => error,
            });
        }
        if let Some(platform) = explicit.platform
            && platform != options.subdir
        {
            let warning = Error::usage(format!("the explicit list is for `{platform}`, this environment for `{}`", options.subdir));
            merged.warnings.push(warning.hint(format!("if that is meant: --platform {platform}")));
        }
    }
    Ok(merged)
}

/// Whether something was named on the command line rather than in a file.
pub(crate) fn is_argument(place: Option<&Place>) -> bool {
    place.is_some_and(|place| place.name.starts_with("<argument "))
}

/// A requirement that was written `pypi::REQUIREMENT` on the command line: as a line of the `pip:` section.
fn python_argument(written: &str, options: &ReadOptions, place: &Place) -> Result<PipItem> {
    let context = requirements::Context { base_dir: Some(&options.root_dir), env: &options.env };
    let mut items = requirements::parse(written, &context, &|_| Some(place.clone()))?;
    match (items.pop(), items.is_empty()) {
        (Some(item), true) if matches!(item.kind, PipKind::Requirement { .. }) => Ok(item),
        _ => Err(Error::usage(format!("`{}` does not name a Python package", quote(written)))
            .hint("`pypi::NAME`, with extras, versions or `@ URL`; anything else belongs into the `pip:` section of an environment.yml")),
    }
}

fn read_one(input: &Fetched, options: &ReadOptions) -> Result<EnvSpec> {
    let text = Text::decode(&input.name, &input.bytes, input.base_dir.clone())?;
    let mut part = EnvSpec::default();
    part.sources.push(Source { name: text.name.to_string(), sha256: crate::text::hex(&Sha256::digest(&input.bytes)) });
    match detect_kind(&input.name, &text.text) {
        FileKind::EnvironmentYml => environment_yml::read(&text, options, &mut part)?,
        FileKind::List => {
            refuse_other_formats(&text)?;
            explicit::read_list(&text, options, &mut part)?;
        }
        FileKind::Explicit => explicit::read_explicit(&text, options, &mut part)?,
    }
    Ok(part)
}

/// Files of other tools, by their first line.
fn refuse_other_formats(text: &Text) -> Result<()> {
    for (start, line) in text.lines() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if line.starts_with('[') && line.ends_with(']') {
            return Err(Error::usage(format!("`{}` looks like TOML or INI, not like a list of packages", text.name))
                .at(text.place(start..start + line.len(), ""))
                .hint("give an environment.yml, a list of match specs or an `@EXPLICIT` list"));
        }
        return Ok(());
    }
    Ok(())
}

fn merge(into: &mut EnvSpec, part: EnvSpec) -> Result<()> {
    let first = into.sources.is_empty();
    into.name = part.name.or(into.name.take());
    into.prefix = part.prefix.or(into.prefix.take());
    into.category = part.category.or(into.category.take());
    if first {
        into.dependencies = part.dependencies;
        into.pip = part.pip;
    } else {
        let mut listed: HashSet<String> = into.dependencies.iter().map(|dependency| dependency.text().to_owned()).collect();
        into.dependencies.extend(part.dependencies.into_iter().filter(|dependency| listed.insert(dependency.text().to_owned())));
        // The same text in another folder may be another thing.
        let key = |item: &PipItem| (item.text.clone(), item.base_dir.clone());
        let mut listed: HashSet<_> = into.pip.iter().map(key).collect();
        into.pip.extend(part.pip.into_iter().filter(|item| listed.insert(key(item))));
    }
    let mut channels = part.channels;
    let mut listed: HashSet<String> = channels.iter().map(|channel| channel.text.clone()).collect();
    channels.extend(into.channels.drain(..).filter(|channel| listed.insert(channel.text.clone())));
    into.channels = channels;
    into.channels_declared |= part.channels_declared;
    into.nodefaults |= part.nodefaults;
    into.variables.extend(part.variables);
    if !part.platforms.is_empty() {
        into.platforms = part.platforms;
    }
    match (&mut into.explicit, part.explicit) {
        (Some(old), Some(new)) => old.extend(new)?,
        (old @ None, new) => *old = new,
        _ => {}
    }
    into.sources.extend(part.sources);
    into.warnings.extend(part.warnings);
    Ok(())
}

/// A match spec, or the URL or path of a package archive.
fn parse_dependency(
    text: &str,
    base_dir: Option<&Path>,
    options: &ReadOptions,
    place: Place,
    warnings: &mut Vec<Error>,
) -> Result<Dependency> {
    if explicit::names_archive(text) {
        return explicit::archive_dependency(text, base_dir, options, place);
    }
    if text.split('[').next().unwrap_or("").contains("://") && !text.contains("::") {
        return Err(Error::usage(format!("`{}` is no package", quote(text)))
            .because("a URL among the dependencies must end in .conda or .tar.bz2")
            .at(place)
            .hint("Python packages by URL go into the `pip:` section; channels are listed under `channels:`"));
    }
    if let Some(name) = text.strip_prefix("pypi::") {
        return Err(Error::usage(format!("`{}` is a Python package, not one of a channel", quote(text)))
            .at(place)
            .hint(format!("put `{}` under `- pip:`", quote(name))));
    }
    let (spec, warning) = match_spec::parse_with_warning(text, Some(place.clone()))?;
    warnings.extend(warning);
    Ok(Dependency::Match { spec, text: text.to_owned(), place: Some(place) })
}

/// Is `name` usable as the name of an environment (CEP 24)?
///
/// # Errors
/// `base` and `root`, path separators, blanks, `:`, `#`, control characters, `.` and `..`, a leading `-`, nothing, over 200 bytes.
pub fn check_name(name: &str) -> Result<()> {
    let bad = |reason: String| Error::usage(format!("`{}` cannot be the name of an environment", quote(name))).because(reason);
    if yaml::looks_like_template(name) {
        return Err(yaml::template_hint(bad("`{{` and `{%` belong to templates".to_owned())));
    }
    if matches!(name, "base" | "root") {
        return Err(bad(format!("`{name}` is conda's own installation, and there is none here")).hint("choose another name: -n NAME"));
    }
    let hint = |error: Error| error.hint("use letters, digits, `-`, `_` and `.`; a path is given with -p");
    if name.is_empty() {
        return Err(hint(bad("it is empty".to_owned())));
    }
    if let Some(c) = name.chars().find(|c| matches!(c, '/' | '\\' | ':' | '#') || c.is_whitespace() || c.is_control()) {
        let shown = if c.is_whitespace() { "a blank".to_owned() } else { format!("`{c}`") };
        return Err(hint(bad(format!("{shown} is not allowed in it"))));
    }
    if name.starts_with('-') || matches!(name, "." | "..") || name.len() > 200 {
        return Err(hint(bad("it would be no usable folder name".to_owned())));
    }
    Ok(())
}

/// The names of the subdirs that stand for a machine, `noarch` left out.
pub(crate) fn known_subdirs() -> &'static [&'static str] {
    static NAMES: OnceLock<Vec<&'static str>> = OnceLock::new();
    NAMES.get_or_init(|| Subdir::all().map(Subdir::as_str).filter(|name| *name != "noarch" && *name != "unknown").collect())
}

/// The subdir of that name, if it stands for a machine.
pub(crate) fn machine_subdir(name: &str) -> Option<Subdir> {
    name.parse().ok().filter(|_| known_subdirs().contains(&name))
}
