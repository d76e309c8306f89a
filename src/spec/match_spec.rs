//! Match specs: rattler's lenient parser behind our own refusals and hints (CEP 29 is the grammar).

use rattler_conda_types::{MatchSpec, ParseMatchSpecOptions};

use super::source::quote;
use crate::error::{Error, Place, Result};

/// Longest match spec that is read, in bytes.
pub const MAX_LEN: usize = 2000;

/// Parses a match spec leniently.
///
/// # Errors
/// Empty text, names that begin with `-` (a misplaced option), unknown shapes such as `chan:label::x`, globs as names, text
/// beyond [`MAX_LEN`], and whatever the grammar forbids; each with the offending part and a hint. The place, if any, is the error's.
pub fn parse_match_spec(text: &str, place: Option<Place>) -> Result<MatchSpec> {
    check(text).map_err(|error| match place {
        Some(place) => error.at(place),
        None => error,
    })
}

fn invalid(text: &str) -> Error {
    Error::usage(format!("invalid match spec `{}`", quote(text)))
}

fn check(written: &str) -> Result<MatchSpec> {
    let text = written.trim();
    if text.is_empty() {
        return Err(Error::usage("empty match spec").hint("write the name of a package, such as `python` or `python=3.11`"));
    }
    if text.len() > MAX_LEN {
        return Err(invalid(text).because(format!("{} bytes long, the limit is {MAX_LEN}", text.len())));
    }
    if super::yaml::looks_like_template(text) {
        return Err(super::yaml::template_hint(invalid(text).because("`{{` and `{%` belong to templates")));
    }
    if text.chars().any(|c| matches!(c, '\n' | '\r')) {
        return Err(invalid(text).because("it spans several lines").hint("write one package an item"));
    }
    if text.starts_with('-') {
        return Err(option(text));
    }
    if let Some(bad) = text.chars().find(|c| !c.is_ascii()) {
        let error = invalid(text).because(format!("it holds `{bad}` (U+{:04X})", u32::from(bad)));
        return Err(match bad {
            '≥' | '⩾' => error.hint("write `>=`"),
            '≤' | '⩽' => error.hint("write `<=`"),
            '≠' => error.hint("write `!=`"),
            '\u{2010}'..='\u{2015}' | '−' => error.hint("write a plain `-`; a word processor has replaced it"),
            '\u{2018}'..='\u{201f}' => error.hint("write plain quotes; a word processor has replaced them"),
            '\u{a0}' | '\u{2000}'..='\u{200f}' | '\u{feff}' => error.hint("remove the invisible character, or retype the line"),
            _ => error.hint("names and versions are made of ASCII letters, digits, `.`, `_` and `-`"),
        });
    }
    if let Some(hint) = pip_syntax(text) {
        return Err(invalid(text).because("this is pip's syntax, not conda's").hint(hint));
    }
    // Everything before the version part: the channel and the name.
    let bracket = text.find('[').unwrap_or(text.len());
    if let Some(at) = text[..bracket].rfind("::") {
        let channel = &text[..at];
        if !channel.contains("://") && channel.contains(':') && !is_windows_path(channel) {
            let package = &text[at + 2..];
            let (name, label) = channel.split_once(':').unwrap_or((channel, ""));
            return Err(invalid(text).because(format!("invalid channel `{}`", quote(channel))).hint(format!(
                "a label is written `{}/label/{}::{}`",
                quote(name),
                quote(label.trim_start_matches(':')),
                quote(package)
            )));
        }
        if text[at + 2..].trim().is_empty() {
            return Err(invalid(text).because("no package name behind `::`"));
        }
    }
    let name_part = text[..bracket].rsplit("::").next().unwrap_or("").trim();
    if name_part.starts_with('-') {
        return Err(option(name_part));
    }
    if name_part.starts_with(['=', '<', '>', '!', '~', '|', ',', '@']) {
        return Err(invalid(text).because("the package name is missing").hint("a name comes first: `python=3.11`"));
    }
    let words: Vec<&str> = name_part.split_whitespace().collect();
    let operator =
        |word: &str| word.ends_with(['=', '<', '>', '~', '!', ',', '|']) || word.starts_with(['=', '<', '>', '~', '!', ',', '|']);
    if words.len() > 3 && !words[1..].iter().any(|word| operator(word)) {
        return Err(invalid(text)
            .because(format!("`{}` is too much: a match spec is NAME, VERSION and BUILD", quote(&words[3..].join(" "))))
            .hint("write one package an item (on the command line: one an argument)"));
    }
    let options = ParseMatchSpecOptions::lenient().with_exact_names_only(true);
    MatchSpec::from_str(text, options).map_err(|error| {
        let mut made = invalid(text).because_of(&error);
        let reason = error.to_string();
        if name_part.ends_with('=') || name_part.ends_with('<') || name_part.ends_with('>') || name_part.ends_with('~') {
            made = made.hint("a version is missing behind the operator");
        } else if reason.contains("glob") || reason.contains("regex") {
            made = made.hint("write the whole name; versions and builds may hold `*`, names not");
        } else if words.len() > 2 && words[1..].iter().all(|word| !operator(word)) {
            made = made.hint("the second word is the version, the third the build; several packages are several items");
        } else if reason.contains("bracket") {
            made = made.hint("keys in brackets are version, build, build_number, channel, subdir, url, md5, sha256: `pytorch[version='>=2.1',build='*cuda*']`");
        } else if text.contains('@') {
            made = made.hint("`name @ URL` is for the `pip:` section");
        } else if text.contains(": ") || text.ends_with(':') {
            made = made.hint("write `name=version`, without a colon");
        } else {
            made = made.hint("write `name`, `name=1.2`, `name>=1.2,<2`, `name=1.2=build` or `channel::name`");
        }
        made
    })
}

fn is_windows_path(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() > 2 && bytes[0].is_ascii_alphabetic() && bytes[1] == b':' && matches!(bytes[2], b'/' | b'\\')
}

fn option(text: &str) -> Error {
    let error = invalid(text).because("a package name cannot begin with `-`");
    let mut words = text.split_whitespace();
    let flag = words.next().unwrap_or("");
    match (flag, words.next()) {
        ("-c" | "--channel", Some(channel)) => match words.next() {
            Some(package) => error.hint(format!("write `{}::{}`, or list the channel under `channels:`", quote(channel), quote(package))),
            None => error.hint(format!("list `{}` under `channels:`", quote(channel))),
        },
        (
            "-r" | "-e" | "-i" | "-f" | "--index-url" | "--extra-index-url" | "--find-links" | "--requirement" | "--editable" | "--pre",
            _,
        ) => error.hint("options of pip go into the `pip:` section, indented below `- pip:`"),
        _ if flag.starts_with("--") => error.hint("options go on the command line before the packages, not into a list of packages"),
        _ => error.hint("is one `-` too many?"),
    }
}

/// The hint for text that only pip understands.
fn pip_syntax(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    if ["git+", "hg+", "svn+", "bzr+"].iter().any(|start| lower.starts_with(start)) {
        return Some("sources in version control go into the `pip:` section, indented below `- pip:`".to_owned());
    }
    if text.contains(" @ ") {
        return Some("`name @ URL` goes into the `pip:` section, indented below `- pip:`".to_owned());
    }
    if text.contains(';') && !text.contains("; if") {
        return Some("markers behind `;` work in the `pip:` section only; for a platform write `# [linux]` behind the item".to_owned());
    }
    // `name[extra]` and `name[a,b]>=1`: the bracket holds no `key=value`.
    let open = text.find('[')?;
    let close = text[open..].find(']')? + open;
    let inner = &text[open + 1..close];
    let name = text[..open].trim();
    let is_name =
        |word: &str| !word.trim().is_empty() && word.trim().bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    if is_name(name) && !inner.contains('=') && inner.split(',').all(is_name) && !super::selector::is_word(inner.trim()) {
        return Some(format!(
            "conda packages have no extras: write `{}` and name what the extra brings, or move `{}` into the `pip:` section",
            quote(&format!("{}{}", name, &text[close + 1..])),
            quote(text)
        ));
    }
    None
}
