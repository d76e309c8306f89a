//! Reading `conda-meta/history` as conda, mamba and tare write it.

use std::collections::BTreeSet;

use indexmap::IndexMap;
use rattler_conda_types::{MatchSpec, ParseStrictness};
use serde::Serialize;

/// One change of an environment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Revision {
    /// Local time, `YYYY-MM-DD HH:MM:SS`, as written.
    pub date: String,
    /// The command line.
    pub command: Option<String>,
    /// `TOOL VERSION`.
    pub tool: Option<String>,
    /// Packages that came, `CHANNEL/SUBDIR::NAME-VERSION-BUILD`.
    pub added: BTreeSet<String>,
    /// Packages that went.
    pub removed: BTreeSet<String>,
    /// Match specs asked for.
    pub update_specs: Vec<String>,
    /// Match specs taken back.
    pub remove_specs: Vec<String>,
}

/// Reads a history. What makes no sense is left out.
pub(crate) fn parse(text: &str) -> Vec<Revision> {
    let mut revisions: Vec<Revision> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(date) = line.strip_prefix("==>").and_then(|rest| rest.strip_suffix("<==")) {
            revisions.push(Revision { date: date.trim().to_owned(), ..Revision::default() });
            continue;
        }
        let Some(revision) = revisions.last_mut() else { continue };
        if let Some(comment) = line.strip_prefix('#') {
            let Some((key, value)) = comment.split_once(':') else { continue };
            let (key, value) = (key.trim(), value.trim());
            match key {
                "cmd" => revision.command = Some(value.to_owned()),
                "update specs" | "install specs" | "create specs" => revision.update_specs.extend(spec_list(value)),
                "remove specs" | "neutered specs" if key == "remove specs" => revision.remove_specs.extend(spec_list(value)),
                _ => {
                    if let Some(tool) = key.strip_suffix(" version") {
                        revision.tool = Some(format!("{tool} {value}"));
                    }
                }
            }
        } else if let Some(name) = line.strip_prefix('+') {
            revision.added.insert(name.to_owned());
        } else if let Some(name) = line.strip_prefix('-') {
            revision.removed.insert(name.to_owned());
        } else if !line.is_empty() {
            // Old conda wrote the whole state of the first revision without signs.
            revision.added.insert(line.to_owned());
        }
    }
    revisions
}

/// A Python list of strings, or the older form separated by commas.
fn spec_list(text: &str) -> Vec<String> {
    let Some(inner) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) else {
        // A comma also separates version constraints, which do not start with a letter.
        let mut specs: Vec<String> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            match specs.last_mut() {
                Some(last) if !part.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') => {
                    last.push(',');
                    last.push_str(part);
                }
                _ => specs.push(part.to_owned()),
            }
        }
        return specs;
    };
    let mut specs = Vec::new();
    let mut characters = inner.chars();
    while let Some(open) = characters.find(|c| matches!(c, '\'' | '"')) {
        let mut word = String::new();
        while let Some(c) = characters.next() {
            match c {
                '\\' => word.extend(characters.next()),
                c if c == open => break,
                c => word.push(c),
            }
        }
        specs.push(word);
    }
    specs
}

/// What is asked for after all revisions: a later spec of a package replaces an earlier one, and removing takes it away.
pub(crate) fn requested(revisions: &[Revision]) -> IndexMap<String, String> {
    let name_of = |text: &str| {
        MatchSpec::from_str(text, ParseStrictness::Lenient)
            .ok()
            .and_then(|spec| spec.name.as_exact().map(|name| name.as_normalized().to_owned()))
            .unwrap_or_else(|| text.to_owned())
    };
    let mut requested = IndexMap::new();
    for revision in revisions {
        for spec in &revision.remove_specs {
            requested.shift_remove(&name_of(spec));
        }
        for spec in &revision.update_specs {
            requested.insert(name_of(spec), spec.clone());
        }
    }
    requested
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_of_conda_is_understood() {
        let revisions = parse(
            "==> 2024-01-02 03:04:05 <==\n# cmd: conda create -n x python=3.11 numpy\n# conda version: 24.1.0\n\
             +conda-forge/linux-64::python-3.11.7-h_0\n+conda-forge/noarch::tzdata-2024a-0\n# update specs: ['python=3.11', \"numpy[version='>=1,<2']\"]\n\
             ==> 2024-02-03 04:05:06 <==\n# cmd: conda remove numpy\n-conda-forge/linux-64::numpy-1.26-0\n# remove specs: ['numpy']\n\
             ==> 2024-03-03 04:05:06 <==\n# update specs: scipy, pandas >=1,<2\nnonsense: not a problem\n",
        );
        assert_eq!(revisions.len(), 3);
        assert_eq!(revisions[0].tool.as_deref(), Some("conda 24.1.0"));
        assert_eq!(revisions[0].added.len(), 2);
        assert_eq!(revisions[0].update_specs, ["python=3.11", "numpy[version='>=1,<2']"]);
        assert_eq!(revisions[2].update_specs, ["scipy", "pandas >=1,<2"]);
        let requested = requested(&revisions);
        assert_eq!(requested.keys().collect::<Vec<_>>(), ["python", "scipy", "pandas"]);
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(?s).{0,200}") {
            requested(&parse(&format!("==> x <==\n# update specs: {text}\n")));
            parse(&text);
        }
    }
}
