//! Which packages stay, go and come.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use indexmap::IndexMap;
use rattler::install::PythonInfo;
use rattler_conda_types::{MatchSpec, PackageName, PackageRecord, RepoDataRecord, Subdir};
use serde_json::{Value, json};

use super::Open;
use super::apply::Known;
use crate::create::{self, Planned};
use crate::error::Result;
use crate::install::link::python_of;
use crate::pypi::ReadyWheel;
use crate::pypi::installed::Changes;
use crate::report::Progress;

/// What a change would do.
pub struct ChangePlan {
    /// The environment.
    pub prefix: PathBuf,
    /// The packages that come, dependencies first.
    pub link: Vec<RepoDataRecord>,
    /// The solved request; `None` where nothing was solved.
    pub planned: Option<Planned>,
    /// What is asked for after the change, by name.
    pub requested: IndexMap<String, String>,
    /// What happens to the Python packages that no conda package brought.
    pub pypi: Changes,
    pub(super) keep: Vec<Known>,
    pub(super) unlink: Vec<Known>,
    pub(super) update_specs: Vec<MatchSpec>,
    pub(super) remove_specs: Vec<String>,
    pub(super) variables: Option<IndexMap<String, String>>,
    /// Nothing about the recorded input changes.
    pub(super) same_input: bool,
    python_moves: Option<(String, String)>,
}

/// One line of a plan for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanRow {
    /// `+` comes, `-` goes, `~` changes.
    pub sign: char,
    /// Name of the package.
    pub name: String,
    /// It is a Python package that no conda package brings.
    pub python: bool,
    /// Version and build before.
    pub old: Option<(String, String)>,
    /// Version and build after.
    pub new: Option<(String, String)>,
    /// Where the new one comes from.
    pub channel: Option<String>,
    /// Bytes of the new archive.
    pub size: Option<u64>,
}

impl PlanRow {
    fn new(sign: char, name: &str) -> Self {
        PlanRow { sign, name: name.to_owned(), python: false, old: None, new: None, channel: None, size: None }
    }

    /// What the package becomes.
    fn becomes(&mut self, new: Option<(String, String)>, channel: String, size: Option<u64>) {
        if self.old.is_some() {
            self.sign = '~';
        }
        (self.new, self.channel, self.size) = (new, Some(channel), size);
    }
}

/// Whether two records are the same package, so that its files can stay.
fn same_package(a: &PackageRecord, b: &PackageRecord) -> bool {
    if a.name != b.name || a.version != b.version || a.build != b.build || a.subdir != b.subdir {
        return false;
    }
    match (a.sha256, b.sha256, a.md5, b.md5) {
        (Some(a), Some(b), ..) => a == b,
        (_, _, Some(a), Some(b)) => a == b,
        _ => true,
    }
}

impl ChangePlan {
    /// From what is installed to `records`; packages in `again` are linked anew in any case.
    pub(super) fn new(open: &Open, records: &[RepoDataRecord], again: &BTreeSet<PackageName>) -> Result<Self> {
        let subdir = open.prefix.subdir().unwrap_or(Subdir::Linux64);
        let old_python = python_of(open.known.iter().map(|known| &known.record.repodata_record.package_record), subdir)?;
        let new_python = python_of(records.iter().map(|record| &record.package_record), subdir)?;
        let place = |python: &Option<PythonInfo>| python.as_ref().map(|python| (python.short_version, python.site_packages_path.clone()));
        let moved = place(&old_python) != place(&new_python);
        let mut plan = ChangePlan {
            prefix: open.prefix.path().to_owned(),
            link: Vec::new(),
            planned: None,
            requested: open.requested.clone(),
            pypi: Changes::none(open.python.clone()),
            keep: Vec::new(),
            unlink: Vec::new(),
            update_specs: Vec::new(),
            remove_specs: Vec::new(),
            variables: None,
            same_input: false,
            python_moves: None,
        };
        if moved && let (Some(old), Some(new)) = (&old_python, &new_python) {
            let text = |python: &PythonInfo| format!("{}.{}", python.short_version.0, python.short_version.1);
            plan.python_moves = Some((text(old), text(new)));
        }
        let wanted: BTreeMap<&PackageName, &RepoDataRecord> = records.iter().map(|record| (&record.package_record.name, record)).collect();
        let mut kept: BTreeSet<&PackageName> = BTreeSet::new();
        for known in &open.known {
            let old = &known.record.repodata_record.package_record;
            let stays = wanted.get(&old.name).is_some_and(|new| {
                same_package(old, &new.package_record) && !again.contains(&old.name) && !(moved && old.noarch.is_python())
            });
            if stays {
                kept.insert(known.name());
                plan.keep.push(known.clone());
            } else {
                plan.unlink.push(known.clone());
            }
        }
        if plan.python_moves.is_some() {
            plan.move_python(records, subdir);
        }
        plan.link = records.iter().filter(|record| !kept.contains(&record.package_record.name)).cloned().collect();
        Ok(plan)
    }

    /// Python packages follow to the site-packages of another Python, as far as their wheels fit it.
    fn move_python(&mut self, records: &[RepoDataRecord], subdir: Subdir) {
        let packages = records.iter().map(|record| &record.package_record);
        let Some(version) = crate::pypi::install::python_version(packages) else { return };
        for installed in std::mem::take(&mut self.pypi.keep) {
            match installed.tare.as_ref().filter(|tare| tare.fits(subdir, &version)) {
                Some(tare) => {
                    self.pypi.link.push(tare.ready());
                    self.pypi.unlink.push(installed);
                }
                None => self.pypi.keep.push(installed),
            }
        }
    }

    /// Changes the Python packages towards `wanted`. Those that are not named stay, and move with Python; with `prune` they go.
    pub(super) fn take_python(&mut self, open: &Open, wanted: &[ReadyWheel], prune: bool) {
        let names: BTreeSet<&str> = wanted.iter().map(|ready| ready.record.name.as_ref()).collect();
        let towards = Changes::towards(open.python.clone(), wanted, prune);
        if self.python_moves.is_none() {
            self.pypi = towards;
            return;
        }
        // Nothing stays where it is when site-packages moves.
        let moved = std::mem::take(&mut self.pypi);
        let gone: BTreeSet<String> = towards.unlink.iter().map(|installed| installed.name.clone()).collect();
        let is_wanted = |name: &str| names.contains(name);
        let is_gone = |name: &str| gone.contains(name);
        let mut changes = Changes { link: wanted.to_vec(), ..Changes::default() };
        changes
            .link
            .extend(moved.link.into_iter().filter(|ready| !is_wanted(ready.record.name.as_ref()) && !is_gone(ready.record.name.as_ref())));
        for installed in moved.keep {
            if is_wanted(&installed.name) || is_gone(&installed.name) {
                changes.unlink.push(installed)
            } else {
                changes.keep.push(installed)
            }
        }
        changes.unlink.extend(moved.unlink);
        self.pypi = changes;
    }

    /// The full version of the interpreter after the change.
    pub(super) fn python_version(&self) -> Option<crate::pypi::Version> {
        let kept = self.keep.iter().map(|known| &known.record.repodata_record.package_record);
        crate::pypi::install::python_version(self.link.iter().map(|record| &record.package_record).chain(kept))
    }

    /// Whether the environment already is as asked.
    pub(super) fn is_nothing(&self, open: &Open) -> bool {
        let canonical = |requested: &IndexMap<String, String>| -> BTreeMap<String, String> {
            requested
                .iter()
                .map(|(name, text)| {
                    let text = crate::spec::parse_match_spec(text, None).map_or_else(|_| text.clone(), |spec| spec.to_string());
                    (name.clone(), text)
                })
                .collect()
        };
        self.link.is_empty()
            && self.unlink.is_empty()
            && self.pypi.is_empty()
            && self.variables.is_none()
            && self.same_input
            && canonical(&self.requested) == canonical(&open.requested)
    }

    /// The specs of `requested` that can be read.
    pub(super) fn requested_specs(&self) -> Vec<MatchSpec> {
        self.requested.values().filter_map(|text| crate::spec::parse_match_spec(text, None).ok()).collect()
    }

    /// Whether no package comes or goes.
    pub fn is_empty(&self) -> bool {
        self.link.is_empty() && self.unlink.is_empty() && self.pypi.is_empty()
    }

    /// Number of packages that stay.
    pub fn kept(&self) -> usize {
        self.keep.len()
    }

    /// Number of Python packages that stay, of those that no conda package brings.
    pub fn python_kept(&self) -> usize {
        self.pypi.keep.len()
    }

    pub(super) fn warn_about_pip(&self, progress: &dyn Progress) {
        let Some((old, new)) = &self.python_moves else { return };
        let names: Vec<String> = self.pypi.keep.iter().map(|installed| installed.name.clone()).collect();
        if !names.is_empty() {
            progress.warn(
                &format!("Python moves from {old} to {new}, which does not see what pip installed: {}", super::apply::quoted_list(&names)),
                &[format!("install them again afterwards: tare run python -m pip install {}", names.join(" "))],
            );
        }
    }

    /// The rows for people, sorted by name.
    pub fn rows(&self) -> Vec<PlanRow> {
        let version = |record: &PackageRecord| Some((record.version.to_string(), record.build.to_string()));
        let mut rows: BTreeMap<&str, PlanRow> = BTreeMap::new();
        let mut python: BTreeMap<&str, PlanRow> = BTreeMap::new();
        for known in &self.unlink {
            let record = &known.record.repodata_record.package_record;
            let name = record.name.as_normalized();
            rows.insert(name, PlanRow { old: version(record), ..PlanRow::new('-', name) });
        }
        for record in &self.link {
            let package = &record.package_record;
            let name = package.name.as_normalized();
            let row = rows.entry(name).or_insert_with(|| PlanRow::new('+', name));
            row.becomes(version(package), crate::install::channel_name(record), package.size);
        }
        let build = |version: &dyn std::fmt::Display| Some((version.to_string(), "pypi_0".to_owned()));
        for installed in &self.pypi.unlink {
            python.insert(&installed.name, PlanRow { python: true, old: build(&installed.version), ..PlanRow::new('-', &installed.name) });
        }
        for ready in &self.pypi.link {
            let name = ready.record.name.as_ref();
            let size = match &ready.record.source {
                crate::pypi::PypiSource::Archive { size, .. } => *size,
                _ => None,
            };
            let row = python.entry(name).or_insert_with(|| PlanRow { python: true, ..PlanRow::new('+', name) });
            row.becomes(build(&ready.record.version), "pypi".to_owned(), size);
        }
        rows.into_values().chain(python.into_values()).collect()
    }

    /// The plan in conda's shape: `actions` with PREFIX, FETCH, LINK and UNLINK. FETCH lists every LINK.
    pub fn json(&self, dry_run: bool) -> Value {
        let prefix = self.prefix.display().to_string();
        let mut document = match &self.planned {
            Some(planned) => create::plan_json(planned, dry_run),
            None => json!({ "dry_run": dry_run, "prefix": prefix }),
        };
        let unlink: Vec<Value> = self.unlink.iter().rev().map(|known| create::record_json(&known.record.repodata_record, false)).collect();
        document["actions"] = json!({
            "PREFIX": prefix,
            "FETCH": self.link.iter().map(|record| create::record_json(record, true)).collect::<Vec<_>>(),
            "LINK": self.link.iter().map(|record| create::record_json(record, false)).collect::<Vec<_>>(),
            "UNLINK": unlink,
        });
        document["total_size"] = json!(self.link.iter().filter_map(|record| record.package_record.size).sum::<u64>());
        document["kept"] = json!(self.keep.len());
        if !self.pypi.is_empty() {
            let link = self.pypi.link.iter().map(|ready| json!({ "name": ready.record.name, "version": ready.record.version.to_string() }));
            let unlink = self.pypi.unlink.iter().map(|installed| json!({ "name": installed.name, "version": installed.version }));
            document["pypi"] = json!({
                "link": link.collect::<Vec<_>>(), "unlink": unlink.collect::<Vec<_>>(), "kept": self.pypi.keep.len()
            });
        }
        document
    }
}
