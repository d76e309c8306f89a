//! Line-based files: `@EXPLICIT` lists of package URLs (CEP 23) and conda-style lists of match specs.

use std::path::{Path, PathBuf};

use rattler_conda_types::Subdir;
use url::Url;

use super::source::{Text, expand_variables, mask_secrets, nearest, quote};
use super::{Dependency, EnvSpec, ExplicitHash, ExplicitPackage, ExplicitSpec, ReadOptions};
use crate::error::{Error, Place, Result};

/// The endings of conda packages.
const ENDINGS: [&str; 2] = [".conda", ".tar.bz2"];

/// Does the text name a package archive (by URL or path) and not a package?
pub(super) fn names_archive(text: &str) -> bool {
    let path = text.split(['#', '?']).next().unwrap_or("").trim_end();
    ENDINGS.iter().any(|ending| path.ends_with(ending)) && !path.contains("::")
}

/// A URL or path of a package archive, with the hash behind `#`, if any.
///
/// # Errors
/// Wrong endings and file names, unknown URL schemes, malformed hashes, variables without value.
pub(super) fn parse_archive(
    written: &str,
    base_dir: Option<&Path>,
    options: &ReadOptions,
    place: Option<&Place>,
) -> Result<(Url, Option<ExplicitHash>)> {
    // Slices of the masked text, which is as long, go into messages.
    let masked = mask_secrets(written);
    let parse = || {
        let (location, fragment) = match written.rsplit_once('#') {
            Some((location, fragment)) => (location, Some(fragment)),
            None => (written, None),
        };
        let hash = fragment.map(|text| parse_hash(text, &masked[written.len() - text.len()..])).transpose()?;
        let as_written = location;
        let (location, missing) = expand_variables(location, &|name| (options.env)(name));
        if let Some(name) = missing.first() {
            return Err(Error::usage(format!("the variable `{name}` is not set")).hint(format!("set it: export {name}=…")));
        }
        let url = if let Some((scheme, _)) = location.split_once("://") {
            if !matches!(scheme.to_ascii_lowercase().as_str(), "http" | "https" | "file" | "oci" | "s3" | "gcs" | "ftp") {
                return Err(Error::usage(format!("unknown URL scheme `{}`", quote(scheme)))
                    .hint("packages come from http, https or file URLs, or from paths"));
            }
            Url::parse(&location).map_err(|error| Error::usage("invalid URL of a package").because(error))?
        } else {
            let path = absolute(&location, base_dir, options)?;
            Url::from_file_path(&path).map_err(|()| Error::usage("not a path of this machine"))?
        };
        let file = url.path_segments().and_then(|mut segments| segments.next_back()).unwrap_or("").to_owned();
        // What came from a variable is not shown.
        let shown = if location == as_written { quote(&file) } else { quote(as_written) };
        let Some(stem) = ENDINGS.iter().find_map(|ending| file.strip_suffix(ending)) else {
            let error = Error::usage(format!("`{}` is no conda package: the name must end in .conda or .tar.bz2", shown));
            return Err(if file.ends_with(".whl") { error.hint("wheels go into the `pip:` section of an environment.yml") } else { error });
        };
        if stem.rsplitn(3, '-').filter(|part| !part.is_empty()).count() < 3 {
            return Err(Error::usage(format!("`{}` is not named NAME-VERSION-BUILD like every conda package", shown)));
        }
        Ok((url, hash))
    };
    parse().map_err(|error| match place {
        Some(place) => error.at(place.clone()),
        None => error,
    })
}

fn absolute(path: &str, base_dir: Option<&Path>, options: &ReadOptions) -> Result<PathBuf> {
    if let Some(rest) = path.strip_prefix("~/") {
        let home = (options.env)("HOME")
            .filter(|home| Path::new(home).is_absolute())
            .ok_or_else(|| Error::usage("`~` has no meaning: HOME is not set, or no absolute path"))?;
        return Ok(super::source::clean_path(&Path::new(&home).join(rest)));
    }
    if path.starts_with('~') {
        return Err(Error::usage("only `~/` is expanded, not another user's home"));
    }
    if base_dir.is_none() && Path::new(path).is_relative() {
        return Err(Error::usage("a relative path has no meaning in a file that comes from a URL")
            .hint("write the whole URL of the package, or download the file"));
    }
    Ok(super::source::clean_path(&options.root_dir.join(base_dir.unwrap_or(Path::new(""))).join(path)))
}

fn parse_hash(text: &str, shown: &str) -> Result<ExplicitHash> {
    let (algorithm, digits) = match text.split_once(':') {
        Some((algorithm, digits)) => (Some(algorithm), digits),
        None => (None, text),
    };
    let bad = |reason: String| {
        Error::usage(format!("invalid hash `{}`", quote(shown))).because(reason).hint("behind `#` stand 32 hex digits (md5) or 64 (sha256)")
    };
    if !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(bad("not hex digits".to_owned()));
    }
    let wrong_length = || bad(format!("{} hex digits", digits.len()));
    let decode = |out: &mut [u8]| {
        for (at, byte) in out.iter_mut().enumerate() {
            *byte = u8::from_str_radix(digits.get(at * 2..at * 2 + 2).unwrap_or("0"), 16).unwrap_or(0);
        }
    };
    match (algorithm, digits.len()) {
        (None | Some("md5"), 32) => {
            let mut hash = [0; 16];
            decode(&mut hash);
            Ok(ExplicitHash::Md5(hash.into()))
        }
        (None | Some("sha256"), 64) => {
            let mut hash = [0; 32];
            decode(&mut hash);
            Ok(ExplicitHash::Sha256(hash.into()))
        }
        (None | Some("md5" | "sha256"), _) => Err(wrong_length()),
        (Some(other), _) => Err(bad(format!("unknown algorithm `{}`", quote(shown.split(':').next().unwrap_or(other))))),
    }
}

/// The span of a line without blanks and without a ` # comment`, and that comment's span.
fn content(start: usize, line: &str) -> (std::ops::Range<usize>, Option<std::ops::Range<usize>>) {
    let indent = line.len() - line.trim_start().len();
    let bytes = line.as_bytes();
    let comment = line.match_indices('#').map(|(at, _)| at).find(|&at| at <= indent || bytes[at - 1].is_ascii_whitespace());
    let end = line[..comment.unwrap_or(line.len())].trim_end().len();
    (start + indent..start + end.max(indent), comment.map(|at| start + at..start + line.trim_end().len()))
}

/// `# platform: linux-64` in a comment.
fn platform_comment(text: &Text, comment: std::ops::Range<usize>) -> Result<Option<Subdir>> {
    let Some(value) = text.slice(comment.clone()).trim_start_matches(['#', ' ', '\t']).strip_prefix("platform:") else { return Ok(None) };
    let value = value.trim();
    match value.parse::<Subdir>() {
        Ok(subdir) => Ok(Some(subdir)),
        Err(_) => Err(unknown_platform(value).at(text.place(comment, "here"))),
    }
}

/// The error for a subdir nobody knows.
pub(super) fn unknown_platform(value: &str) -> Error {
    let error = Error::usage(format!("unknown platform `{}`", quote(value)));
    match nearest(value, super::known_subdirs().iter().copied()) {
        Some(near) => error.hint(format!("did you mean `{near}`?")),
        None => error.hint("platforms are named like `linux-64`, `linux-aarch64`, `osx-arm64`, `win-64`"),
    }
}

/// Reads an `@EXPLICIT` file.
///
/// # Errors
/// A line that is neither comment, blank, nor a package's URL or path; wrong hashes.
pub(super) fn read_explicit(text: &Text, options: &ReadOptions, out: &mut EnvSpec) -> Result<()> {
    let mut spec = ExplicitSpec::default();
    for (start, line) in text.lines() {
        let (span, comment) = content(start, line);
        let written = text.slice(span.clone());
        if written.is_empty() {
            if let Some(comment) = comment
                && let Some(subdir) = platform_comment(text, comment.clone())?
            {
                if spec.platform.is_some_and(|first| first != subdir) {
                    return Err(Error::usage("two different platforms in one explicit list").at(text.place(comment, "the second")));
                }
                spec.platform = Some(subdir);
            }
            continue;
        }
        if written == "@EXPLICIT" {
            continue;
        }
        let place = text.place(span, "");
        if written.starts_with('@') {
            return Err(Error::usage(format!("unknown marker `{}`", quote(written)))
                .at(place)
                .hint("explicit lists begin with `@EXPLICIT`"));
        }
        if !names_archive(written) && !written.contains("://") && !written.contains(['/', '\\']) {
            return Err(Error::usage(format!("`{}` is no package URL", quote(written)))
                .because("a file with `@EXPLICIT` lists packages by URL or path only")
                .at(place)
                .hint("remove `@EXPLICIT` to have the lines read as match specs and solved"));
        }
        let (url, hash) = parse_archive(written, text.base_dir.as_deref(), options, Some(&place))?;
        spec.packages.push(ExplicitPackage { url, hash, place: Some(place) });
    }
    if spec.packages.is_empty() {
        out.warnings.push(no_package(text).hint("below `@EXPLICIT` stand the URLs of packages, one a line"));
    }
    out.explicit = Some(spec);
    Ok(())
}

/// Reads a conda-style list: one match spec a line.
///
/// # Errors
/// What only pip understands (with a hint how to use it), and malformed match specs.
pub(super) fn read_list(text: &Text, options: &ReadOptions, out: &mut EnvSpec) -> Result<()> {
    let mut some = false;
    for (start, line) in text.lines() {
        let (span, comment) = content(start, line);
        let written = text.slice(span.clone());
        if written.is_empty() {
            continue;
        }
        let place = text.place(span.clone(), "");
        // A selector may leave it out for this platform: the list is not empty.
        some = true;
        if looks_like_pip(written) {
            let name = text.name.rsplit(['/', '\\']).next().unwrap_or("requirements.txt");
            return Err(Error::usage(format!("`{}` is a requirements file of pip, not a list of conda packages", text.name))
                .because(format!("only pip understands `{}`", quote(written)))
                .at(place)
                .hint(format!(
                    "make an environment.yml whose `dependencies:` hold `python`, `pip` and `- pip: [\"-r {}\"]`",
                    quote(name)
                )));
        }
        if let Some(comment) = comment {
            match super::environment_yml::comment_selector(text, &comment)? {
                Some(expr) if !expr.matches(options.subdir) => continue,
                _ => {}
            }
        }
        let dependency = super::parse_dependency(written, text.base_dir.as_deref(), options, place, &mut out.warnings)?;
        out.dependencies.push(dependency);
    }
    if !some {
        out.warnings.push(no_package(text).hint("such a file has one match spec a line, such as `python=3.11`"));
    }
    Ok(())
}

/// What is said of a list without a package: it is allowed, and rarely meant.
fn no_package(text: &Text) -> Error {
    Error::usage(format!("`{}` lists no package", text.name))
}

/// A line that pip reads and conda does not.
fn looks_like_pip(line: &str) -> bool {
    let lower = line.to_ascii_lowercase();
    let option = [
        "-r",
        "-e",
        "-i",
        "-f",
        "--index-url",
        "--extra-index-url",
        "--find-links",
        "--requirement",
        "--editable",
        "--constraint",
        "--pre",
        "--no-index",
        "--trusted-host",
        "--only-binary",
        "--no-binary",
        "--require-hashes",
        "--prefer-binary",
    ];
    let first = lower.split([' ', '=']).next().unwrap_or("");
    if option.contains(&first) || (first.starts_with("-r") && first.ends_with(".txt")) || lower.contains(" --hash=") {
        return true;
    }
    if ["git+", "hg+", "svn+", "bzr+"].iter().any(|start| lower.starts_with(start)) || line.contains(" @ ") || lower.ends_with(".whl") {
        return true;
    }
    if line.contains(';') || matches!(line, "." | "..") || line.starts_with("./") && !names_archive(line) || line.contains("===") {
        return true;
    }
    // name[extra]: brackets without `=`.
    line.find('[').zip(line.find(']')).is_some_and(|(open, close)| open < close && !line[open..close].contains('='))
}

impl ExplicitSpec {
    /// Appends another list.
    pub(super) fn extend(&mut self, other: ExplicitSpec) -> Result<()> {
        if let (Some(a), Some(b)) = (self.platform, other.platform)
            && a != b
        {
            return Err(Error::usage(format!("the explicit lists are for different platforms: {a} and {b}"))
                .hint("use lists of one platform at a time"));
        }
        self.platform = self.platform.or(other.platform);
        self.packages.extend(other.packages);
        Ok(())
    }
}

/// What [`Dependency`] a written archive is.
pub(super) fn archive_dependency(written: &str, base_dir: Option<&Path>, options: &ReadOptions, place: Place) -> Result<Dependency> {
    let (url, hash) = parse_archive(written, base_dir, options, Some(&place))?;
    Ok(Dependency::Package { url, hash, text: written.to_owned(), place: Some(place) })
}
