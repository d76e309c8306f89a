//! Searching the channels.

use std::sync::Arc;

use rattler_conda_types::{Matches, RepoDataRecord, Subdir};

use crate::channel::Session;
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::report::Progress;
use crate::resolve::{self, Inputs};
use crate::spec;

/// The records that match `text`: a match spec whose name may hold `*` and `?`. Newest first, channels in priority order
/// within a version.
///
/// # Errors
/// A malformed spec, channels that do not answer, nothing found (with what is there).
pub async fn search(text: &str, inputs: &Inputs, settings: &Settings, progress: Arc<dyn Progress>) -> Result<Vec<RepoDataRecord>> {
    let session = Session::open(settings, progress.clone())?;
    let mut inputs = inputs.clone();
    inputs.target_given = true;
    let prepared = resolve::prepare(&inputs, settings, &session, &*progress).await?;
    let subdirs = [prepared.target.subdir, Subdir::NoArch];
    let (name, rest) = split_name(text);
    let names = session.names(&prepared.channels, &subdirs).await?;
    let wanted: Vec<_> = names.iter().filter(|known| glob(&name, known.as_normalized())).collect();
    if wanted.is_empty() {
        let mut error = Error::failure(format!("no package matches `{name}`")).because(format!(
            "looked in {}",
            prepared.channels.iter().map(|channel| channel.display.as_str()).collect::<Vec<_>>().join(", ")
        ));
        let near = spec::source::nearest(&name, names.iter().map(|known| known.as_normalized()));
        if let Some(near) = near {
            error = error.hint(format!("did you mean `{near}`?"));
        }
        return Err(error);
    }
    let filter = if rest.is_empty() { None } else { Some(rest) };
    let mut found = Vec::new();
    let mut latest = None;
    for name in wanted {
        let matcher = match &filter {
            Some(rest) => Some(spec::parse_match_spec(&format!("{}{rest}", name.as_normalized()), None)?),
            None => None,
        };
        for record in session.records(&prepared.channels, &subdirs, name).await? {
            if latest.as_ref().is_none_or(|(version, _)| record.package_record.version > *version) {
                latest = Some((record.package_record.version.clone(), record.package_record.name.clone()));
            }
            if matcher.as_ref().is_none_or(|matcher| matcher.matches(&record.package_record)) {
                found.push(record);
            }
        }
    }
    if found.is_empty() {
        let mut error = Error::failure(format!("no package matches `{text}`"));
        if let Some((version, name)) = latest {
            error = error.hint(format!("the newest version of `{}` is {version}", name.as_normalized()));
        }
        return Err(error);
    }
    found.sort_by(|a, b| {
        let (a, b) = (&a.package_record, &b.package_record);
        a.name
            .as_normalized()
            .cmp(b.name.as_normalized())
            .then_with(|| b.version.cmp(&a.version))
            .then_with(|| b.build_number.cmp(&a.build_number))
    });
    Ok(found)
}

/// The name (with its globs) and what follows it.
fn split_name(text: &str) -> (String, String) {
    let text = text.trim();
    let text = text.rsplit_once("::").map_or(text, |(_, rest)| rest);
    let end = text.find(|c: char| "=<>!~ [".contains(c)).unwrap_or(text.len());
    (text[..end].trim().to_lowercase(), text[end..].to_owned())
}

/// `*` stands for any text, `?` for one character.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut t, mut star, mut mark) = (0, 0, None, 0);
    while t < text.len() {
        if p < pattern.len() && (pattern[p] == '?' || pattern[p] == text[t]) && pattern[p] != '*' {
            p += 1;
            t += 1;
        } else if p < pattern.len() && pattern[p] == '*' {
            star = Some(p);
            mark = t;
            p += 1;
        } else if let Some(at) = star {
            p = at + 1;
            mark += 1;
            t = mark;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs() {
        for (pattern, text, matches) in [
            ("*", "a", true),
            ("a*", "abc", true),
            ("*b?", "abc", true),
            ("a", "ab", false),
            ("*a*a*", "banana", true),
            ("", "", true),
            ("?", "", false),
        ] {
            assert_eq!(glob(pattern, text), matches, "{pattern} {text}");
        }
    }

    #[test]
    fn names_are_split_from_constraints() {
        assert_eq!(split_name("conda-forge::Lib>=2"), ("lib".into(), ">=2".into()));
        assert_eq!(split_name("lib 1.*"), ("lib".into(), " 1.*".into()));
        assert_eq!(split_name("lib[version=1]"), ("lib".into(), "[version=1]".into()));
    }
}
