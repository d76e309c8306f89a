//! The Python half of the revisions of an environment: conda's history has no place for it, so tare keeps a record of its own beside it.
//!
//! A revision is a number in `conda-meta/history`. A record counts as long as the history has a revision of that number that did the same to the conda
//! packages: other tools add revisions without one, and what is not recorded is not known. There is no clock time in it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rattler_conda_types::RepoDataRecord;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::install::{TareRecord, WheelFacts, replace};
use super::{PypiRecord, ReadyWheel};
use crate::error::{Error, Result};
use crate::install::metadata::without_secrets;
use crate::install::{hex_text, history_name};
use crate::prefix::{Prefix, Revision};

/// Where the record lies in an environment.
pub(crate) const FILE: &str = "conda-meta/tare/revisions.json";

/// Version of the layout.
const SCHEMA: u32 = 1;

/// A Python package of a revision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Noted {
    /// Normalized name.
    pub name: String,
    /// Version as written.
    pub version: String,
    /// What tare installed; `None` for what another tool did, of which only name and version are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
}

/// From what tare installed a Python package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// What it is and where it comes from.
    pub record: PypiRecord,
    /// The wheel.
    pub wheel: WheelFacts,
}

impl Source {
    /// The wheel once more: see [`TareRecord::ready`].
    pub fn ready(&self) -> ReadyWheel {
        super::install::ready_again(&self.record, &self.wheel)
    }
}

impl Noted {
    pub(crate) fn of(record: &TareRecord) -> Self {
        Noted {
            name: record.record.name.to_string(),
            version: record.record.version.to_string(),
            source: Some(Source { record: record.record.clone(), wheel: record.wheel.clone() }),
        }
    }

    fn history_name(&self) -> String {
        format!("pypi::{}-{}-pypi_0", self.name, self.version)
    }
}

/// What a revision was made from, as tare's notes on the environment had it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The facts of the command: digest of the input, lock, what was asked of the Python half.
    pub metadata: serde_json::Value,
    /// The match specs.
    pub requested: Vec<String>,
    /// Whether Python files were compiled.
    pub compiled: bool,
    /// SHA-256 of `conda-meta/state`.
    pub state_sha256: Option<String>,
}

/// `conda-meta/tare/revisions.json`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Book {
    schema_version: u32,
    /// The packages of all revisions, by a digest of what is noted of them.
    packages: BTreeMap<String, Noted>,
    revisions: Vec<Entry>,
    /// What the revisions were made from, by a digest of it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    requests: BTreeMap<String, Request>,
    /// The records of conda packages of earlier revisions that are not installed any more, by their names in the history: channels describe a package
    /// otherwise from time to time.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    records: BTreeMap<String, RepoDataRecord>,
}

/// What is noted of a revision.
pub(crate) struct Note<'a> {
    /// Its Python packages.
    pub packages: Vec<Noted>,
    /// What it was made from.
    pub request: Request,
    /// The conda packages that went with it.
    pub gone: Vec<&'a RepoDataRecord>,
    /// Those that are there.
    pub there: &'a [RepoDataRecord],
}

/// One revision.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry {
    /// Its number in the history, from 0.
    revision: usize,
    /// Digest of what the history has it do.
    history: String,
    packages: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    request: Option<String>,
}

impl Book {
    /// The record of `prefix`, as far as it goes with `history`; empty if there is none.
    ///
    /// # Errors
    /// It is there, but cannot be read or understood.
    pub fn read(prefix: &Path, history: &[Revision]) -> Result<Self> {
        let path = prefix.join(FILE);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Book::default()),
            Err(error) => return Err(Error::io("read", &path, &error)),
        };
        let damaged = |why: String| {
            Error::failure(format!("`{}` is damaged", path.display()))
                .because(why)
                .hint("without it revisions go back to their conda half only: remove the file")
        };
        let mut book: Book = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        if book.schema_version > SCHEMA {
            return Err(Error::failure(format!("`{}` was written by a newer tare", path.display())));
        }
        book.revisions.retain(|entry| history.get(entry.revision).is_some_and(|revision| digest_of(revision) == entry.history));
        if let Some(lost) = book.revisions.iter().flat_map(|entry| &entry.packages).find(|key| !book.packages.contains_key(*key)) {
            return Err(damaged(format!("it has no package `{lost}`")));
        }
        Ok(book)
    }

    /// The Python packages after revision `number`, sorted by name; `None` if nothing was recorded.
    pub fn at(&self, number: usize) -> Option<Vec<&Noted>> {
        let entry = self.revisions.iter().rev().find(|entry| entry.revision == number)?;
        Some(entry.packages.iter().filter_map(|key| self.packages.get(key)).collect())
    }

    /// What revision `number` was made from; `None` if it was not recorded.
    pub fn request(&self, number: usize) -> Option<&Request> {
        let entry = self.revisions.iter().rev().find(|entry| entry.revision == number)?;
        self.requests.get(entry.request.as_ref()?)
    }

    /// The record of a package that went, by its name in the history.
    pub fn record(&self, name: &str) -> Option<&RepoDataRecord> {
        self.records.get(name)
    }

    /// Records the packages after the last revision of `history`.
    fn add(&mut self, history: &[Revision], note: Note<'_>) -> Result<()> {
        let Some(last) = history.len().checked_sub(1) else { return Ok(()) };
        let mut packages = note.packages;
        packages.sort_by(|a, b| a.name.cmp(&b.name));
        let mut keys = Vec::with_capacity(packages.len());
        for noted in packages {
            let key = key_of(&noted)?;
            self.packages.insert(key.clone(), noted);
            keys.push(key);
        }
        self.revisions.retain(|entry| entry.revision < last);
        let request = key_of(&note.request)?;
        self.requests.insert(request.clone(), note.request);
        self.revisions.push(Entry { revision: last, history: digest_of(&history[last]), packages: keys, request: Some(request) });
        let used: BTreeSet<&String> = self.revisions.iter().flat_map(|entry| entry.packages.iter().chain(&entry.request)).collect();
        let used: BTreeSet<String> = used.into_iter().cloned().collect();
        self.packages.retain(|key, _| used.contains(key));
        self.requests.retain(|key, _| used.contains(key));
        self.records.extend(note.gone.into_iter().map(|record| (history_name(record), without_secrets(record))));
        let there: BTreeSet<String> = note.there.iter().map(history_name).collect();
        self.records.retain(|name, _| !there.contains(name));
        Ok(())
    }
}

fn key_of(value: &impl Serialize) -> Result<String> {
    let bytes = serde_json::to_vec(value).map_err(|error| Error::failure("cannot write what a revision holds").because(error))?;
    Ok(hex_text(&Sha256::digest(bytes))[..16].to_owned())
}

fn digest_of(revision: &Revision) -> String {
    let added = revision.added.iter().map(|name| format!("+{name}\n"));
    let removed = revision.removed.iter().map(|name| format!("-{name}\n"));
    let lines: String = removed.chain(added).collect();
    hex_text(&Sha256::digest(lines))[..16].to_owned()
}

/// Writes the record of `stage`: that of the environment `base`, if its history goes on, and what the last revision of `history` has.
///
/// # Errors
/// The file cannot be written. A record of `base` that makes no sense is given up.
pub(crate) fn note(stage: &Path, base: Option<&Path>, history: &str, note: Note<'_>) -> Result<()> {
    let history = crate::prefix::parse_history(history);
    let mut book = base.map(|base| Book::read(base, &history).unwrap_or_default()).unwrap_or_default();
    book.schema_version = SCHEMA;
    book.add(&history, note)?;
    let mut text = serde_json::to_vec(&book).map_err(|error| Error::failure("cannot write what the revisions hold").because(error))?;
    text.push(b'\n');
    let path = stage.join(FILE);
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|error| Error::io("create the folder", folder, &error))?;
    }
    replace(&path, &text)
}

/// The revisions of an environment with both halves, for people: Python packages are `pypi::NAME-VERSION-pypi_0`. Where a revision or the one before has
/// no record, its Python half is left out.
///
/// # Errors
/// As for [`Prefix::history`] and [`Book::read`].
pub fn with_both_halves(prefix: &Prefix) -> Result<Vec<Revision>> {
    let mut history = prefix.history()?;
    let book = Book::read(prefix.path(), &history)?;
    let names = |number: usize| -> Option<BTreeSet<String>> {
        book.at(number).map(|packages| packages.into_iter().map(Noted::history_name).collect())
    };
    for (number, revision) in history.iter_mut().enumerate() {
        let before = if number == 0 { Some(BTreeSet::new()) } else { names(number - 1) };
        let (Some(before), Some(after)) = (before, names(number)) else { continue };
        revision.added.extend(after.difference(&before).cloned());
        revision.removed.extend(before.difference(&after).cloned());
    }
    Ok(history)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(name: &str, version: &str) -> Noted {
        Noted { name: name.to_owned(), version: version.to_owned(), source: None }
    }

    #[test]
    fn a_record_counts_only_with_its_history() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("conda-meta/tare")).unwrap();
        let entry = |name: &str| format!("==> 2026-01-01 10:00:00 <==\n# cmd: tare\n+{name}\n");
        let (one, two, three) = (entry("x-1-0"), entry("y-1-0"), entry("z-1-0"));
        let root = folder.path();
        let of = |packages: Vec<Noted>, text: &str| Note {
            packages,
            request: Request { metadata: serde_json::json!({ "pip": [text] }), ..Request::default() },
            gone: Vec::new(),
            there: &[],
        };
        note(root, None, &one, of(vec![noted("b", "1"), noted("a", "1")], "first")).unwrap();
        note(root, Some(root), &format!("{one}{two}"), of(vec![noted("a", "2"), noted("b", "1")], "second")).unwrap();
        let history = crate::prefix::parse_history(&format!("{one}{two}{three}"));
        let book = Book::read(root, &history).unwrap();
        let names =
            |number: usize| book.at(number).map(|list| list.iter().map(|n| format!("{} {}", n.name, n.version)).collect::<Vec<_>>());
        assert_eq!(names(0).unwrap(), ["a 1", "b 1"]);
        assert_eq!(names(1).unwrap(), ["a 2", "b 1"]);
        let asked = |number: usize| book.request(number).map(|request| request.metadata["pip"][0].clone());
        assert_eq!((asked(0), asked(1), asked(2)), (Some("first".into()), Some("second".into()), None));
        // Another tool's revision.
        assert_eq!(names(2), None);
        // Another history.
        let book = Book::read(root, &crate::prefix::parse_history(&format!("{one}{three}"))).unwrap();
        assert!(book.at(0).is_some() && book.at(1).is_none());
        std::fs::write(root.join(FILE), "{").unwrap();
        assert!(Book::read(root, &history).unwrap_err().hints()[0].contains("remove the file"));
        // What makes no sense is no obstacle for a change.
        note(root, Some(root), &one, of(Vec::new(), "")).unwrap();
        assert_eq!(Book::read(root, &history).unwrap().at(0).unwrap().len(), 0);
    }
}
