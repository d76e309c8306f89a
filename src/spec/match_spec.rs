//! Match specs: rattler's lenient parser behind our own refusals and hints (CEP 29 is the grammar).

use rattler_conda_types::{MatchSpec, ParseMatchSpecOptions};

use super::source::{mask_secrets, quote};
use crate::error::{Error, Place, Result};

/// Longest match spec that is read, in bytes.
pub const MAX_LEN: usize = 2000;

/// Parses a match spec leniently.
///
/// # Errors
/// Empty text, names that begin with `-` (a misplaced option), unknown shapes such as `chan:label::x`, globs as names, text
/// beyond [`MAX_LEN`], and whatever the grammar forbids; each with the offending part and a hint. The place, if any, is the error's.
pub fn parse_match_spec(text: &str, place: Option<Place>) -> Result<MatchSpec> {
    parse_with_warning(text, place).map(|(spec, _)| spec)
}

/// As [`parse_match_spec`], and what was read past, as conda does: extras (`dask[array]`) and an operator without version (`tqdm=`).
///
/// # Errors
/// As [`parse_match_spec`].
pub fn parse_with_warning(text: &str, place: Option<Place>) -> Result<(MatchSpec, Option<Error>)> {
    let at = |error: Error| match &place {
        Some(place) => error.at(place.clone()),
        None => error,
    };
    let (cleaned, warning) = clean(text.trim());
    let spec = check(text, &cleaned).map_err(|error| at(without_secrets(error, text)))?;
    Ok((spec, warning.map(at)))
}

/// Parts of a text with credentials would show pieces of them: such a text is judged again with the credentials overwritten.
fn without_secrets(error: Error, text: &str) -> Error {
    let masked = mask_secrets(text);
    if masked == text {
        return error;
    }
    let (cleaned, _) = clean(masked.trim());
    match check(&masked, &cleaned) {
        Err(error) => error,
        Ok(_) => invalid(&masked).because("it cannot be parsed (details would show credentials)"),
    }
}

/// Removes what conda reads past: quotes outside of brackets, extras, a single `=` at the end.
fn clean(text: &str) -> (String, Option<Error>) {
    let bracket = text.find('[').unwrap_or(text.len());
    let (head, tail) = text.split_at(bracket);
    let head = head.replace(['\'', '"'], "");
    if let Some(close) = tail.find(']') {
        let inner = &tail[1..close];
        let is_name = |word: &str| !word.trim().is_empty() && word.trim().bytes().all(is_name_byte);
        let name = head.trim_end().rsplit("::").next().unwrap_or("");
        if is_name(name) && head == head.trim_end() && inner.split(',').all(is_name) {
            let rest = &tail[close + 1..];
            let warning = Error::usage(format!(
                "`[{}]` behind `{}` has no meaning and is ignored: conda packages have no extras",
                quote(inner),
                quote(&head)
            ))
            .hint(format!("name what the extra brings as packages of their own, or move `{}` into the `pip:` section", quote(text)));
            return (format!("{head}{rest}"), Some(warning));
        }
    }
    if tail.is_empty()
        && let Some(name) = head.strip_suffix('=')
        && name.rsplit("::").next().is_some_and(|name| !name.is_empty() && name.bytes().all(is_name_byte))
    {
        let warning = Error::usage(format!("no version stands behind `{}`, so any version will do", quote(&head)))
            .hint(format!("write `{0}`, or `{0}=1.2`", quote(name)));
        return (name.to_owned(), Some(warning));
    }
    (format!("{head}{tail}"), None)
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')
}

fn invalid(text: &str) -> Error {
    Error::usage(format!("invalid match spec `{}`", quote(text)))
}

/// `written` is for messages, `text` is what is parsed.
fn check(written: &str, text: &str) -> Result<MatchSpec> {
    let written = written.trim();
    let invalid = |_: &str| invalid(written);
    let text = text.trim();
    if text.is_empty() {
        return Err(Error::usage("empty match spec").hint("write the name of a package, such as `python` or `python=3.11`"));
    }
    if text.len() > MAX_LEN {
        return Err(invalid(text).because(format!("{} bytes long, the limit is {MAX_LEN}", text.len())));
    }
    // The grammar is parsed recursively.
    if text.matches('(').count() > 50 || text.matches('[').count() > 50 {
        return Err(invalid(text).because("too many brackets"));
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
    let spec = MatchSpec::from_str(text, options).map_err(|error| {
        let reason = error.to_string();
        let mut made = invalid(text);
        let mut next: Option<&dyn std::error::Error> = Some(&error);
        let mut said = String::new();
        while let Some(error) = next {
            let cause = quote(error.to_string().trim_end_matches('.'));
            if !said.contains(&cause) {
                made = made.because(&cause);
                said += &cause;
            }
            next = error.source();
        }
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
    })?;
    // `numpy >=1.20 <2` would silently become the build `<2`.
    let build = spec.build.as_ref().map(ToString::to_string).unwrap_or_default();
    if !build.starts_with('^') && build.contains(['<', '>', '=', '!', '~', ',', '|', ' ']) {
        return Err(invalid(text)
            .because(format!("`{}` stands where the build belongs", quote(&build)))
            .hint("join conditions on the version with `,` and without blanks: `name >=1.2,<2`"));
    }
    Ok(spec)
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
    None
}

#[cfg(test)]
mod tests {
    use rattler_conda_types::{ParseStrictness, VersionSpec};

    use super::*;

    fn parsed(text: &str) -> MatchSpec {
        parse_match_spec(text, None).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    /// Text, version, build, channel, subdir: what CEP 29 says, read leniently.
    #[test]
    fn what_the_grammar_says() {
        for (text, version, build, channel, subdir) in [
            ("numpy", "", "", "", ""),
            ("numpy=1.11", "1.11.*", "", "", ""),
            ("numpy==1.11", "==1.11", "", "", ""),
            ("numpy 1.11", "==1.11", "", "", ""),
            ("numpy 1.11.*", "1.11.*", "", "", ""),
            ("numpy=1.11=py38_0", "==1.11", "py38_0", "", ""),
            ("numpy 1.11 py38_0", "==1.11", "py38_0", "", ""),
            ("numpy==1.11=py38_0", "==1.11", "py38_0", "", ""),
            ("numpy >=1.11,<2", ">=1.11,<2", "", "", ""),
            ("numpy>=1.11,<2", ">=1.11,<2", "", "", ""),
            ("numpy >=1.11, <2", ">=1.11,<2", "", "", ""),
            ("numpy 1.8|1.9.*", "1.8|1.9.*", "", "", ""),
            ("numpy=1.8|1.9", "1.8.*|1.9", "", "", ""),
            ("numpy~=1.4.2", "~=1.4.2", "", "", ""),
            ("numpy!=1.6.1", "!=1.6.1", "", "", ""),
            ("pytorch=*=*cuda*", "", "*cuda*", "", ""),
            ("libblas=*=*openblas", "", "*openblas", "", ""),
            ("pytorch[version='>=2.1',build='*cuda*']", ">=2.1", "*cuda*", "", ""),
            ("numpy >=1.2.3.*", ">=1.2.3", "", "", ""),
            ("conda-forge::numpy=1", "1.*", "", "conda-forge", ""),
            ("conda-forge/linux-64::numpy", "", "", "conda-forge", "linux-64"),
            ("pyviz/label/dev::param", "", "", "pyviz/label/dev", ""),
            ("https://host.example/chan::numpy", "", "", "https://host.example/chan", ""),
            ("numpy[channel=conda-forge,subdir=noarch]", "", "", "conda-forge", "noarch"),
            ("pytorch=1.2.0='cuda92*'", "==1.2.0", "cuda92*", "", ""),
            ("numpy # why", "", "", "", ""),
            ("  numpy  ", "", "", "", ""),
        ] {
            let spec = parsed(text);
            let want = (!version.is_empty()).then(|| VersionSpec::from_str(version, ParseStrictness::Lenient).unwrap());
            assert_eq!(spec.version.filter(|version| *version != VersionSpec::Any), want, "{text}");
            assert_eq!(spec.build.map(|build| build.to_string()).unwrap_or_default(), build, "{text}");
            let found = spec.channel.as_ref().map(|channel| channel.base_url.as_str().trim_end_matches('/').to_owned()).unwrap_or_default();
            let want = if channel.is_empty() || channel.contains("://") {
                channel.to_owned()
            } else {
                format!("https://conda.anaconda.org/{channel}")
            };
            assert_eq!(found, want, "{text}");
            assert_eq!(spec.subdir.unwrap_or_default(), subdir, "{text}");
        }
    }

    #[test]
    fn names_are_lower_case_and_hashes_are_kept() {
        assert_eq!(parsed("NumPy").name.to_string().to_lowercase(), "numpy");
        let spec = parsed(&format!("numpy[md5={}]", "0".repeat(32)));
        assert!(spec.md5.is_some());
    }

    #[test]
    fn what_conda_reads_past_is_a_warning() {
        let (spec, warning) = parse_with_warning("dask[array,distributed]>=2", None).unwrap();
        assert!(spec.version.is_some());
        assert!(warning.unwrap().message().contains("`[array,distributed]` behind `dask`"));
        let (spec, warning) = parse_with_warning("conda-forge::tqdm=", None).unwrap();
        assert!(spec.version.is_none() && spec.channel.is_some());
        assert!(warning.unwrap().message().contains("any version"));
        assert!(parse_with_warning("numpy=1", None).unwrap().1.is_none());
    }
}
