//! The `pip:` half: the grammar of pip's requirements files (PEP 508 plus pip's own lines and options).
//!
//! Nothing is resolved here; every item is typed, checked, and kept with the folder its relative paths start from.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use url::Url;

use super::source::{Text, expand_braced, mask_secrets, nearest, quote};
use crate::error::{Error, Place, Result};

/// A PEP 508 requirement.
pub type Requirement = pep508_rs::Requirement<Url>;

/// One item of a `pip:` (or `uv:`) section.
#[derive(Debug, Clone)]
pub struct PipItem {
    /// What it is, `${VAR}` expanded. May hold credentials: never print it, print [`PipItem::shown`].
    pub kind: PipKind,
    /// As written, comments and continuations removed, `${VAR}` not expanded. May hold credentials.
    pub text: String,
    /// Folder that relative paths start from; `None` for text from a URL.
    pub base_dir: Option<PathBuf>,
    /// Where it stands.
    pub place: Option<Place>,
}

impl PipItem {
    /// The text with credentials hidden.
    pub fn shown(&self) -> String {
        super::source::mask_secrets(&self.text)
    }

    /// Is it something to install (not an option, nor a reference to another file)?
    pub fn is_requirement(&self) -> bool {
        matches!(
            self.kind,
            PipKind::Requirement { .. } | PipKind::Url { .. } | PipKind::Vcs { .. } | PipKind::Path { .. } | PipKind::Editable { .. }
        )
    }
}

/// A hash that an artifact must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArtifactHash {
    /// `sha256`, `sha384` or `sha512`.
    pub algorithm: String,
    /// Lower-case hex digits, as many as the algorithm gives.
    pub hex: String,
}

/// What a `pip:` item is.
#[derive(Debug, Clone)]
pub enum PipKind {
    /// `name[extras]>=1; marker` or `name @ URL`.
    Requirement {
        /// Parsed by PEP 508.
        requirement: Box<Requirement>,
        /// `--hash` options.
        hashes: Vec<ArtifactHash>,
    },
    /// An archive by URL, without a name.
    Url {
        /// The URL with its fragment.
        url: Url,
        /// The marker's text, if any.
        marker: Option<String>,
        /// `--hash` options.
        hashes: Vec<ArtifactHash>,
    },
    /// A source in version control.
    Vcs(Vcs),
    /// A local folder or archive.
    Path {
        /// Joined with the base folder, not normalised.
        path: PathBuf,
        /// `[a,b]` behind the path.
        extras: Vec<String>,
        /// The marker's text, if any.
        marker: Option<String>,
        /// `--hash` options.
        hashes: Vec<ArtifactHash>,
    },
    /// `-e TARGET`.
    Editable(Box<EditableTarget>),
    /// `-r FILE`.
    RequirementsFile(Location),
    /// `-c FILE`.
    ConstraintsFile(Location),
    /// `-i URL`.
    IndexUrl(String),
    /// `--extra-index-url URL`.
    ExtraIndexUrl(String),
    /// `-f URL-OR-PATH`.
    FindLinks(Location),
    /// `--no-index`.
    NoIndex,
    /// `--pre`.
    Pre,
    /// `--only-binary WHAT`: `:all:`, `:none:` or names with commas.
    OnlyBinary(String),
    /// `--no-binary WHAT`.
    NoBinary(String),
    /// `--trusted-host HOST`.
    TrustedHost(String),
    /// `--require-hashes`.
    RequireHashes,
    /// `--prefer-binary`.
    PreferBinary,
    /// `--use-feature NAME`.
    UseFeature(String),
    /// `--all-releases WHAT`.
    AllReleases(String),
    /// `--only-final WHAT`.
    OnlyFinal(String),
}

/// What `-e` points at.
#[derive(Debug, Clone)]
pub enum EditableTarget {
    /// A folder with a Python project, with extras.
    Path {
        /// Joined with the base folder.
        path: PathBuf,
        /// `[a,b]` behind the path.
        extras: Vec<String>,
    },
    /// A source in version control.
    Vcs(Vcs),
}

/// `git+https://host/repo@rev#egg=name&subdirectory=dir`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vcs {
    /// `git`, `hg`, `svn` or `bzr`.
    pub system: String,
    /// Without system prefix, revision and fragment. May hold credentials.
    pub url: String,
    /// Branch, tag or commit.
    pub revision: Option<String>,
    /// `egg=`: the name, maybe with extras.
    pub egg: Option<String>,
    /// `subdirectory=`.
    pub subdirectory: Option<String>,
    /// The marker's text, if any.
    pub marker: Option<String>,
}

/// A file or folder named by path or URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// Joined with the base folder, not normalised.
    Path(PathBuf),
    /// A URL with scheme http, https, ftp or file.
    Url(Url),
}

/// What parsing needs to know.
pub struct Context<'a> {
    /// Folder that relative paths start from.
    pub base_dir: Option<&'a Path>,
    /// Environment variables, for `${VAR}`.
    pub env: &'a dyn Fn(&str) -> Option<String>,
}

const OPTIONS: &[&str] = &[
    "-r",
    "--requirement",
    "-c",
    "--constraint",
    "-e",
    "--editable",
    "-i",
    "--index-url",
    "--extra-index-url",
    "-f",
    "--find-links",
    "--no-index",
    "--pre",
    "--only-binary",
    "--no-binary",
    "--trusted-host",
    "--require-hashes",
    "--prefer-binary",
    "--use-feature",
    "--all-releases",
    "--only-final",
    "--hash",
];

/// Parses requirements text: one line or a whole file. `place` is put on every item and error.
///
/// # Errors
/// Unknown options (with the nearest known one), options without a value, malformed requirements, hashes and URLs.
pub fn parse(text: &str, context: &Context<'_>, place: &dyn Fn(Range<usize>) -> Option<Place>) -> Result<Vec<PipItem>> {
    let mut items = Vec::new();
    for (line, span) in logical_lines(text) {
        let at = place(span);
        let parsed = parse_line(&line, context).map_err(|error| {
            let error = without_secrets(error, &line, context);
            match &at {
                Some(place) => error.at(place.clone()),
                None => error,
            }
        })?;
        items.extend(parsed.into_iter().map(|(kind, text)| PipItem {
            kind,
            text,
            base_dir: context.base_dir.map(Path::to_path_buf),
            place: at.clone(),
        }));
    }
    Ok(items)
}

/// Parses a whole requirements file.
///
/// # Errors
/// As [`parse`], each with its line.
pub fn parse_file(text: &Text, env: &dyn Fn(&str) -> Option<String>) -> Result<Vec<PipItem>> {
    let context = Context { base_dir: text.base_dir.as_deref(), env };
    parse(&text.text, &context, &|span| Some(text.place(span, "")))
}

/// Parts of a line with credentials, written or from variables, would show pieces of them: such a line is judged again with
/// the credentials overwritten and the variables not expanded.
fn without_secrets(error: Error, line: &str, context: &Context<'_>) -> Error {
    let masked = mask_secrets(line);
    if masked == line && expand_braced(line, context.env) == line {
        return error;
    }
    match parse_line(&masked, &Context { base_dir: context.base_dir, env: &|_| None }) {
        Err(error) => error,
        Ok(_) => invalid(&masked).because("it cannot be parsed (details would show credentials)"),
    }
}

/// Lines with continuations joined and comments removed, with their byte range in the text.
fn logical_lines(text: &str) -> Vec<(String, Range<usize>)> {
    let mut out = Vec::new();
    let mut offset = 0;
    let mut current = String::new();
    let mut start = None;
    for raw in text.split('\n') {
        let line_start = offset;
        offset += raw.len() + 1;
        let line = raw.trim_end_matches('\r');
        let comment_only = line.trim_start().starts_with('#');
        if comment_only && start.is_some() {
            // A comment ends a continuation, as for pip.
            flush(&mut out, &mut current, &mut start, line_start.saturating_sub(1));
        }
        if comment_only {
            continue;
        }
        if start.is_none() {
            start = Some(line_start + (line.len() - line.trim_start().len()));
        } else {
            current.push(' ');
        }
        match line.strip_suffix('\\') {
            Some(head) => current.push_str(head.trim()),
            None => {
                current.push_str(line.trim());
                flush(&mut out, &mut current, &mut start, line_start + line.trim_end().len());
            }
        }
    }
    flush(&mut out, &mut current, &mut start, text.len());
    out
}

fn flush(out: &mut Vec<(String, Range<usize>)>, current: &mut String, start: &mut Option<usize>, end: usize) {
    if let Some(from) = start.take() {
        let line = strip_comment(current).trim().to_owned();
        if !line.is_empty() {
            out.push((line, from..end.max(from)));
        }
    }
    current.clear();
}

/// Cuts ` # comment`.
fn strip_comment(line: &str) -> &str {
    let bytes = line.as_bytes();
    for (at, _) in line.match_indices('#') {
        if at == 0 || bytes[at - 1].is_ascii_whitespace() {
            return &line[..at];
        }
    }
    line
}

/// Splits like a shell: quotes and backslashes.
fn shell_words(text: &str) -> Result<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            c if c.is_whitespace() => words.extend(word.take()),
            '\'' | '"' => {
                let into = word.get_or_insert_with(String::new);
                loop {
                    match chars.next() {
                        Some(end) if end == c => break,
                        Some('\\') if c == '"' && matches!(chars.peek(), Some('"' | '\\')) => into.extend(chars.next()),
                        Some(inner) => into.push(inner),
                        None => return Err(invalid(text).because("a quote is never closed")),
                    }
                }
            }
            // A backslash escapes only what needs it, so that Windows paths survive.
            '\\' if matches!(chars.peek(), Some('"' | '\'' | '\\' | ' ')) => word.get_or_insert_with(String::new).extend(chars.next()),
            c => word.get_or_insert_with(String::new).push(c),
        }
    }
    words.extend(word);
    Ok(words)
}

fn invalid(text: &str) -> Error {
    Error::usage(format!("invalid item `{}` for pip", quote(text)))
}

fn parse_line(written: &str, context: &Context<'_>) -> Result<Vec<(PipKind, String)>> {
    if written.len() > 20_000 {
        return Err(invalid(written).because(format!("{} bytes long", written.len())));
    }
    if super::yaml::looks_like_template(written) {
        return Err(super::yaml::template_hint(invalid(written).because("`{{` and `{%` belong to templates")));
    }
    for command in ["pip install ", "pip3 install ", "uv pip install ", "python -m pip install ", "conda install "] {
        if let Some(rest) = written.strip_prefix(command) {
            return Err(invalid(written).because("it is a command").hint(format!("write only `- {}`", quote(rest.trim()))));
        }
    }
    let line = expand_braced(written, context.env);
    // pip's rule: everything before the first word that begins with `-` is the requirement.
    let mut split = line.len();
    let mut at = 0;
    for word in line.split_inclusive([' ', '\t']) {
        if word.starts_with('-') && word.trim().len() > 1 {
            split = at;
            break;
        }
        at += word.len();
    }
    let (requirement, options) = (line[..split].trim(), &line[split..]);
    let options = parse_options(options, written)?;
    if requirement.is_empty() {
        let many = options.len() > 1;
        let mut out = Vec::new();
        for option in options {
            let text = if many { option.text() } else { written.to_owned() };
            out.push((option.into_kind(written, context)?, text));
        }
        return Ok(out);
    }
    let mut hashes = Vec::new();
    for option in options {
        match option.name.as_str() {
            "--hash" => hashes.push(parse_hash(option.value.as_deref().unwrap_or(""), written)?),
            "--config-settings" | "-C" | "--global-option" => {
                return Err(invalid(written)
                    .because(format!("`{}` is not supported", option.name))
                    .hint("build such a package into a wheel, and name the wheel"));
            }
            name => {
                return Err(invalid(written)
                    .because(format!("`{name}` cannot stand behind a requirement"))
                    .hint(format!("make it an item of its own: `- {}`", quote(&option.text()))));
            }
        }
    }
    let requirement = unquote(requirement);
    Ok(vec![(parse_requirement(requirement, hashes, written, context)?, written.to_owned())])
}

fn unquote(text: &str) -> &str {
    for quote in ['"', '\''] {
        if let Some(inner) = text.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote))
            && !inner.contains(quote)
        {
            return inner.trim();
        }
    }
    text
}

struct OptionItem {
    name: String,
    value: Option<String>,
}

impl OptionItem {
    fn text(&self) -> String {
        match &self.value {
            Some(value) => format!("{} {value}", self.name),
            None => self.name.clone(),
        }
    }

    fn into_kind(self, written: &str, context: &Context<'_>) -> Result<PipKind> {
        let value = self.value.unwrap_or_default();
        Ok(match self.name.as_str() {
            "--requirement" => PipKind::RequirementsFile(location(&value, written, context)?),
            "--constraint" => PipKind::ConstraintsFile(location(&value, written, context)?),
            "--find-links" => PipKind::FindLinks(location(&value, written, context)?),
            "--editable" => PipKind::Editable(Box::new(editable(&value, written, context)?)),
            "--index-url" => PipKind::IndexUrl(index(value, written)?),
            "--extra-index-url" => PipKind::ExtraIndexUrl(index(value, written)?),
            "--no-index" => PipKind::NoIndex,
            "--pre" => PipKind::Pre,
            "--only-binary" => PipKind::OnlyBinary(value),
            "--no-binary" => PipKind::NoBinary(value),
            "--trusted-host" => PipKind::TrustedHost(value),
            "--require-hashes" => PipKind::RequireHashes,
            "--prefer-binary" => PipKind::PreferBinary,
            "--use-feature" => PipKind::UseFeature(value),
            "--all-releases" => PipKind::AllReleases(value),
            "--only-final" => PipKind::OnlyFinal(value),
            other => {
                return Err(invalid(written)
                    .because(format!("`{other}` needs a requirement before it"))
                    .hint("write `name==version --hash=sha256:…` on one line"));
            }
        })
    }
}

fn parse_options(text: &str, written: &str) -> Result<Vec<OptionItem>> {
    let mut out = Vec::new();
    let mut words = shell_words(text)?.into_iter();
    while let Some(word) = words.next() {
        if !word.starts_with('-') {
            return Err(invalid(written)
                .because(format!("unexpected `{}`", quote(&word)))
                .hint("one requirement an item, its options behind it"));
        }
        let (mut name, mut value) = match word.split_once('=') {
            Some((name, value)) if word.starts_with("--") => (name.to_owned(), Some(value.to_owned())),
            _ => (word.clone(), None),
        };
        if !word.starts_with("--") {
            // `-rfile` is `-r file`.
            let cut = word.char_indices().nth(2).map_or(word.len(), |(at, _)| at);
            if cut < word.len() {
                value = Some(word[cut..].trim_start_matches('=').to_owned());
            }
            name = match &word[..cut] {
                "-r" => "--requirement",
                "-c" => "--constraint",
                "-e" => "--editable",
                "-i" => "--index-url",
                "-f" => "--find-links",
                "-C" => "--config-settings",
                other => other,
            }
            .to_owned();
        }
        if name == "--pypi-url" {
            name = "--index-url".to_owned();
        }
        let takes_value = match name.as_str() {
            "--no-index" | "--pre" | "--require-hashes" | "--prefer-binary" => false,
            "--config-settings" | "--global-option" => true,
            known if OPTIONS.contains(&known) => true,
            other => return Err(unknown_option(other, written)),
        };
        if takes_value {
            let value = value.or_else(|| words.next()).filter(|value| !value.trim().is_empty());
            let Some(value) = value else {
                return Err(invalid(written).because(format!("`{name}` needs a value")));
            };
            out.push(OptionItem { name, value: Some(value) });
        } else if let Some(value) = value {
            return Err(invalid(written).because(format!("`{name}` takes no value, but got `{}`", quote(&value))));
        } else {
            out.push(OptionItem { name, value: None });
        }
    }
    Ok(out)
}

fn unknown_option(name: &str, written: &str) -> Error {
    let error = invalid(written).because(format!("unknown option `{}`", quote(name)));
    if matches!(
        name,
        "--no-deps" | "-U" | "--upgrade" | "--user" | "--target" | "-t" | "--no-build-isolation" | "--force-reinstall" | "-q" | "-v"
    ) {
        return error.hint("this option belongs on pip's command line; requirements files cannot hold it");
    }
    match nearest(name, OPTIONS.iter().copied()) {
        Some(near) => error.hint(format!("did you mean `{near}`?")),
        None => error.hint(format!("options that may stand in a list of requirements are {}", OPTIONS.join(", "))),
    }
}

fn parse_hash(value: &str, written: &str) -> Result<ArtifactHash> {
    let bad = |reason: String| invalid(written).because(reason).hint("write `--hash=sha256:` and 64 hex digits");
    let (algorithm, hex) = value.split_once(':').ok_or_else(|| bad("a hash without algorithm".to_owned()))?;
    let want = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        other => return Err(bad(format!("unknown hash algorithm `{}`", quote(other)))),
    };
    if hex.len() != want || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(bad(format!("a {algorithm} hash has {want} hex digits, this one has {} characters", hex.chars().count())));
    }
    Ok(ArtifactHash { algorithm: algorithm.to_owned(), hex: hex.to_ascii_lowercase() })
}

fn index(value: String, written: &str) -> Result<String> {
    // A path is allowed; an undefined `${VAR}` stays.
    if let Some((scheme, rest)) = value.split_once("://") {
        let known = ["http", "https", "file", "ftp"].contains(&scheme.to_ascii_lowercase().as_str());
        if !known || rest.trim_matches('/').is_empty() {
            return Err(invalid(written).because(format!("`{}` is not the URL of a package index", quote(&value))));
        }
    }
    Ok(value)
}

fn url_scheme(text: &str) -> Option<String> {
    let (scheme, rest) = text.split_once(':')?;
    let lower = scheme.to_ascii_lowercase();
    match lower.as_str() {
        "http" | "https" | "ftp" if rest.starts_with("//") => Some(lower),
        "file" => Some(lower),
        _ => None,
    }
}

fn location(value: &str, written: &str, context: &Context<'_>) -> Result<Location> {
    if url_scheme(value).is_some() {
        return parse_url(value, written).map(Location::Url);
    }
    if value.contains("://") {
        return Err(invalid(written).because(format!("`{}` has an unknown URL scheme", quote(value))));
    }
    Ok(Location::Path(join(context, value)))
}

fn parse_url(value: &str, written: &str) -> Result<Url> {
    // The parser's message holds no part of the URL.
    Url::parse(value).map_err(|error| invalid(written).because(format!("invalid URL: {error}")))
}

fn join(context: &Context<'_>, path: &str) -> PathBuf {
    let path = match path.strip_prefix("~/").or(if path == "~" { Some("") } else { None }) {
        Some(rest) => match (context.env)("HOME") {
            Some(home) => Path::new(&home).join(rest),
            None => PathBuf::from(path),
        },
        None => PathBuf::from(path),
    };
    match context.base_dir {
        Some(base) => base.join(path),
        None => path,
    }
}

fn split_extras(text: &str) -> (&str, Vec<String>) {
    if let Some(head) = text.strip_suffix(']')
        && let Some(open) = head.rfind('[')
        && open > 0
    {
        let extras = head[open + 1..].split(',').map(|extra| extra.trim().to_owned()).filter(|extra| !extra.is_empty()).collect();
        return (head[..open].trim_end(), extras);
    }
    (text, Vec::new())
}

fn vcs_system(text: &str) -> Option<&'static str> {
    let (system, _) = text.split_once('+')?;
    ["git", "hg", "svn", "bzr"].into_iter().find(|known| known.eq_ignore_ascii_case(system))
}

fn vcs(text: &str, system: &str, written: &str) -> Result<Vcs> {
    let (rest, marker) = match text[system.len() + 1..].split_once(" ;").or_else(|| text[system.len() + 1..].split_once("; ")) {
        Some((rest, marker)) => (rest.trim(), Some(marker.trim().to_owned())),
        None => (&text[system.len() + 1..], None),
    };
    let (url, fragment) = rest.split_once('#').unwrap_or((rest, ""));
    let Some((scheme, after)) = url.split_once("://") else {
        return Err(invalid(written)
            .because(format!("`{}` is not a URL", quote(url)))
            .hint(format!("write `{system}+https://host/owner/repo@revision` or `{system}+file:///path`")));
    };
    if scheme.is_empty() || after.trim_matches('/').is_empty() || url.contains(char::is_whitespace) {
        return Err(invalid(written)
            .because(format!("`{}` is not the URL of a repository", quote(url)))
            .hint(format!("write `{system}+https://host/owner/repo@revision`")));
    }
    // The revision is behind the last `@` of the path, not that of the user.
    let path_start = scheme.len() + 3 + after.find('/').unwrap_or(after.len());
    let (url, revision) = match url[path_start..].rfind('@') {
        Some(at) => (&url[..path_start + at], Some(url[path_start + at + 1..].to_owned())),
        None => (url, None),
    };
    if revision.as_deref() == Some("") {
        return Err(invalid(written).because("no revision behind `@`"));
    }
    let value = |key: &str| {
        fragment.split('&').find_map(|pair| pair.split_once('=').filter(|(name, _)| *name == key)).map(|(_, value)| value.to_owned())
    };
    Ok(Vcs { system: system.to_owned(), url: url.to_owned(), revision, egg: value("egg"), subdirectory: value("subdirectory"), marker })
}

fn editable(value: &str, written: &str, context: &Context<'_>) -> Result<EditableTarget> {
    if let Some(system) = vcs_system(value) {
        return vcs(value, system, written).map(EditableTarget::Vcs);
    }
    if let Some(scheme) = url_scheme(value) {
        if scheme != "file" {
            return Err(invalid(written)
                .because("only a folder or a repository can be editable")
                .hint(format!("write `-e git+{}` if it is a repository, or drop the `-e`", quote(value))));
        }
        let url = parse_url(value, written)?;
        let path = url.to_file_path().map_err(|()| invalid(written).because("the file URL names no path of this machine"))?;
        return Ok(EditableTarget::Path { path, extras: Vec::new() });
    }
    if value.contains("://") {
        return Err(invalid(written).because(format!("`{}` has an unknown URL scheme", quote(value))));
    }
    let (path, extras) = split_extras(value);
    Ok(EditableTarget::Path { path: join(context, path), extras })
}

const ARCHIVES: &[&str] = &[".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tar.xz", ".txz", ".tar"];

fn parse_requirement(text: &str, hashes: Vec<ArtifactHash>, written: &str, context: &Context<'_>) -> Result<PipKind> {
    if let Some(system) = vcs_system(text) {
        if !hashes.is_empty() {
            return Err(invalid(written).because("a repository has no hash").hint("pin it by its commit: `…@COMMIT`"));
        }
        return vcs(text, system, written).map(PipKind::Vcs);
    }
    let is_url = url_scheme(text).is_some();
    let (target, marker) = match text.split_once(if is_url { "; " } else { ";" }) {
        Some((target, marker)) => (target.trim(), Some(marker.trim().to_owned())),
        None => (text, None),
    };
    if is_url {
        if target.contains(char::is_whitespace) {
            return Err(invalid(written)
                .because("a URL with a blank in it")
                .hint("one requirement an item; write a blank in a URL as `%20`"));
        }
        let url = parse_url(target, written)?;
        check_marker(marker.as_deref(), written)?;
        return Ok(PipKind::Url { url, marker, hashes });
    }
    let (bare, extras) = split_extras(target);
    let lower = bare.to_ascii_lowercase();
    let named = target.contains(" @") || target.split_once('@').is_some_and(|(name, _)| is_name(name.trim()));
    let path_like = bare.starts_with(['.', '/', '~', '\\'])
        || ARCHIVES.iter().any(|ending| lower.ends_with(ending))
        || (bare.contains(['/', '\\']) && !bare.contains(['=', '<', '>', '!']));
    if !named && path_like {
        check_marker(marker.as_deref(), written)?;
        return Ok(PipKind::Path { path: join(context, bare), extras, marker, hashes });
    }
    let requirement = pep508(text).map_err(|message| explain(text, &message, written))?;
    Ok(PipKind::Requirement { requirement: Box::new(requirement), hashes })
}

/// PEP 508, with names checked first: the parser panics on names and extras that end in punctuation.
fn pep508(text: &str) -> Result<Requirement, String> {
    let is_word_byte = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let well_formed = |word: &str| {
        let bytes = word.as_bytes();
        bytes.first().is_some_and(u8::is_ascii_alphanumeric)
            && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
            && bytes.iter().all(is_word_byte)
    };
    let text = text.trim();
    // The grammar of PEP 508 has no other characters, and the parser cuts them in two.
    if let Some(foreign) = text.chars().find(|c| !c.is_ascii()) {
        return Err(format!(
            "the character {:?} (U+{:04X}) is not allowed here; in a URL write it percent-encoded",
            foreign,
            u32::from(foreign)
        ));
    }
    let name = &text[..text.bytes().take_while(|b| is_word_byte(b)).count()];
    if !well_formed(name) {
        return Err(format!("`{name}` is not the name of a package"));
    }
    let rest = text[name.len()..].trim_start();
    if let Some(inner) = rest.strip_prefix('[') {
        let Some((extras, _)) = inner.split_once(']') else { return Err("a `[` is never closed".to_owned()) };
        if let Some(bad) = extras.split(',').map(str::trim).find(|extra| !well_formed(extra) && !extra.is_empty()) {
            return Err(format!("`{bad}` is not the name of an extra"));
        }
    }
    // Markers are parsed recursively and normalised in time that grows with the number of their variables.
    if text.matches('(').count() > 50 || text.matches(" or ").count() + text.matches(" and ").count() > 60 {
        return Err("the marker is too complicated".to_owned());
    }
    Requirement::from_str(text).map_err(|error| error.message.to_string())
}

fn is_name(text: &str) -> bool {
    let name = text.split('[').next().unwrap_or("").trim();
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

fn check_marker(marker: Option<&str>, written: &str) -> Result<()> {
    let Some(marker) = marker else { return Ok(()) };
    // A marker is what stands behind any name.
    pep508(&format!("x ; {marker}")).map(|_| ()).map_err(|message| explain(marker, &message, written))
}

fn explain(text: &str, message: &str, written: &str) -> Error {
    let first = message.lines().next().unwrap_or("").trim_end_matches('.');
    let mut chars = first.chars();
    let message: String = chars.next().map(|c| c.to_lowercase().collect::<String>()).unwrap_or_default() + chars.as_str();
    let error = invalid(written).because(quote(&message));
    let name_len = text.bytes().take_while(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.')).count();
    let rest = text[name_len..].trim_start();
    if name_len > 0 && rest.starts_with('=') && !rest.starts_with("==") {
        return error.hint(format!("pip pins with two `=`: `{}={}`", quote(&text[..name_len]), quote(rest)));
    }
    if text.contains("::") {
        return error.hint("`channel::name` is conda's syntax: move the item out of the `pip:` section");
    }
    if name_len > 0 && rest.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return error.hint("one requirement an item");
    }
    if text.contains('@') {
        return error.hint("write `name @ https://…`, with a whole URL");
    }
    error.hint("write `name`, `name==1.2`, `name[extra]>=1,<2; python_version < '3.12'`, `name @ URL`, a path or a URL")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(text: &str) -> Result<Vec<PipItem>> {
        let env = |name: &str| match name {
            "TOKEN" => Some("s3cret".to_owned()),
            "HOME" => Some("/home/me".to_owned()),
            _ => None,
        };
        parse(text, &Context { base_dir: Some(Path::new("/base")), env: &env }, &|_| None)
    }

    fn one(text: &str) -> PipKind {
        let mut found = items(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(found.len(), 1, "{text}");
        found.remove(0).kind
    }

    #[test]
    fn requirements() {
        let PipKind::Requirement { requirement, hashes } = one("numpy[a,b]>=1.0,<2 ; python_version < '3.9'") else { panic!() };
        assert_eq!((requirement.name.to_string(), requirement.extras.len(), hashes.len()), ("numpy".into(), 2, 0));
        let hash = "a".repeat(64);
        let PipKind::Requirement { hashes, .. } = one(&format!("numpy==1 --hash=sha256:{hash} \\\n   --hash sha256:{hash}")) else {
            panic!()
        };
        assert_eq!(hashes.len(), 2);
        assert!(matches!(one("r3m @ https://github.com/x/r3m/archive/b.tar.gz"), PipKind::Requirement { .. }));
        assert!(matches!(one("\"tensorflow[and-cuda]>=2.20.0\""), PipKind::Requirement { .. }));
        assert!(matches!(one("numpy  # why"), PipKind::Requirement { .. }));
    }

    #[test]
    fn urls_paths_and_repositories() {
        assert!(matches!(one("https://github.com/x/y.zip#egg=y"), PipKind::Url { .. }));
        for (text, want) in [
            (".", "/base/."),
            ("./libs/x[dev]", "/base/./libs/x"),
            ("../y", "/base/../y"),
            ("/abs/z.whl", "/abs/z.whl"),
            ("CC2/Submodules/CybORG", "/base/CC2/Submodules/CybORG"),
            ("~/w", "/home/me/w"),
            ("foo-1.0-py3-none-any.whl ; sys_platform == 'linux'", "/base/foo-1.0-py3-none-any.whl"),
        ] {
            let PipKind::Path { path, .. } = one(text) else { panic!("{text}") };
            assert_eq!(path.to_str(), Some(want), "{text}");
        }
        let PipKind::Vcs(vcs) = one("git+https://u:p@github.com/o/r.git@v1.0/x#egg=r[a]&subdirectory=s") else { panic!() };
        assert_eq!(vcs.url, "https://u:p@github.com/o/r.git");
        assert_eq!((vcs.revision.as_deref(), vcs.egg.as_deref(), vcs.subdirectory.as_deref()), (Some("v1.0/x"), Some("r[a]"), Some("s")));
        let PipKind::Vcs(vcs) = one("git+ssh://git@github.com/o/r") else { panic!() };
        assert_eq!((vcs.url.as_str(), vcs.revision), ("ssh://git@github.com/o/r", None));
        let PipKind::Editable(target) = one("-e \"git+https://github.com/n/a.git@4ee#egg=argh\"") else { panic!() };
        assert!(matches!(*target, EditableTarget::Vcs(Vcs { ref egg, .. }) if egg.as_deref() == Some("argh")));
        let PipKind::Editable(target) = one("-e .[dev,test]") else { panic!() };
        assert!(matches!(*target, EditableTarget::Path { ref extras, .. } if extras.len() == 2));
    }

    #[test]
    fn options_in_every_spelling() {
        for text in ["-i https://x/y", "-ihttps://x/y", "--index-url https://x/y", "--index-url=https://x/y", "--index-url  'https://x/y'"]
        {
            assert!(matches!(one(text), PipKind::IndexUrl(url) if url == "https://x/y"), "{text}");
        }
        assert!(matches!(one("-rother.txt"), PipKind::RequirementsFile(Location::Path(path)) if path == Path::new("/base/other.txt")));
        assert!(matches!(one("-c https://x/c.txt"), PipKind::ConstraintsFile(Location::Url(_))));
        assert!(matches!(one("-f ./wheels"), PipKind::FindLinks(Location::Path(_))));
        assert!(matches!(one("--only-binary=:all:"), PipKind::OnlyBinary(what) if what == ":all:"));
        assert!(matches!(one("--pre"), PipKind::Pre));
        assert!(matches!(one("--no-index"), PipKind::NoIndex));
        assert!(matches!(one("--require-hashes"), PipKind::RequireHashes));
        let many = items("--pre --extra-index-url https://x -r a.txt").unwrap();
        assert_eq!(
            many.iter().map(|item| item.text.as_str()).collect::<Vec<_>>(),
            ["--pre", "--extra-index-url https://x", "--requirement a.txt"]
        );
    }

    #[test]
    fn variables_expand_in_braces_only_and_the_text_keeps_them() {
        let found = items("--extra-index-url https://me:${TOKEN}@host/$TOKEN/${NOPE}").unwrap();
        assert!(matches!(&found[0].kind, PipKind::ExtraIndexUrl(url) if url == "https://me:s3cret@host/$TOKEN/${NOPE}"));
        assert!(!found[0].text.contains("s3cret"));
    }

    #[test]
    fn a_whole_file() {
        let text = Text::new("r.txt", "# head\nnumpy \\\n  ==1.0\n\nscipy # c\n  # c\n-r x.txt\n", Some("/b".into()));
        let found = parse_file(&text, &|_| None).unwrap();
        assert_eq!(found.iter().map(|item| item.text.as_str()).collect::<Vec<_>>(), ["numpy ==1.0", "scipy", "-r x.txt"]);
        assert_eq!(found[1].place.as_ref().unwrap().line_column(), (5, 1));
    }

    #[test]
    fn what_is_wrong_says_so() {
        for (text, message, hint) in [
            ("--indx-url https://x", "unknown option `--indx-url`", "`--index-url`"),
            ("--no-deps", "unknown option `--no-deps`", "command line"),
            ("-i", "`--index-url` needs a value", ""),
            ("--pre=1", "takes no value", ""),
            ("numpy=1.2", "", "two `=`: `numpy==1.2`"),
            ("numpy scipy", "", "one requirement an item"),
            ("pip install numpy", "it is a command", "`- numpy`"),
            ("conda-forge::numpy", "", "conda's syntax"),
            ("numpy==1 --hash=md5:abc", "unknown hash algorithm `md5`", "sha256"),
            ("numpy==1 --hash=sha256:abc", "64 hex digits, this one has 3", "sha256"),
            ("--hash=sha256:abc", "needs a requirement", ""),
            ("numpy --pre", "cannot stand behind", "item of its own"),
            ("-e https://x/y", "editable", "git+https"),
            ("git+{PLACEHOLDER}#egg=x", "is not a URL", "git+https://"),
            ("x @ ./y", "", "whole URL"),
            ("numpy; python_versio < '3'", "", ""),
            ("-e \"x", "quote is never closed", ""),
            ("x=={{ v }}", "templates", "render it first"),
            ("./x; nonsense", "", ""),
        ] {
            let error = items(text).unwrap_err();
            assert!(error.to_string().contains(message), "{text}: {error}");
            assert!(error.hints().join(" ").contains(hint), "{text}: {:?}", error.hints());
        }
        let error = items("-e ftp+x://me:hunter2@host/y").or_else(|_| items("https://me:hunter2@host:bad/y")).unwrap_err();
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }
}
