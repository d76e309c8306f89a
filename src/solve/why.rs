use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use rattler_conda_types::{MatchSpec, PackageName, PackageRecord};

use super::hints;
use crate::error::{Error, Result};

/// Paths listed; more are counted as "more".
const PATHS: usize = 50;
/// Steps of the search for paths, a bound for records with very many of them.
const WORK: usize = 200_000;

/// The half of an environment that a package is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// A conda package.
    #[default]
    Conda,
    /// A Python package that no conda package brought.
    Pypi,
}

/// A package as the search for reasons sees it.
#[derive(Debug, Clone, Default)]
pub struct Package {
    /// Normalised name.
    pub name: String,
    /// Version.
    pub version: String,
    /// Build; `pypi_0` for a Python package, as `list` shows it.
    pub build: String,
    /// Its half.
    pub source: Source,
    /// Where it was asked for and how (`requested`, the spec), if it was.
    pub request: Option<(String, String)>,
    /// What it needs: key of the package, and the dependency as written.
    pub needs: BTreeMap<String, String>,
    /// The Python distributions of a conda package, normalised.
    pub brings: BTreeSet<String>,
}

/// Who needs whom. Keys are names of conda packages, and `pypi::NAME` for Python packages.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    /// By key.
    pub packages: BTreeMap<String, Package>,
    /// It is that of a lock, not of an environment.
    pub is_lock: bool,
}

/// One package on a path, and the dependency that leads to it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Step {
    /// Normalised name.
    pub name: String,
    /// Its half.
    pub source: Source,
    /// Version installed.
    pub version: String,
    /// Build installed.
    pub build: String,
    /// What asks for it: the request for the first step, the dependency of the step before for the others.
    pub spec: String,
    /// For people, in front of a request.
    #[serde(skip)]
    lead: String,
}

/// Why a package is there.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Why {
    /// The package asked about. Where a Python distribution was asked about that a conda package brings: that package.
    pub name: String,
    /// Its half.
    pub source: Source,
    /// The Python distribution that was asked about, where a conda package of another name brings it.
    pub distribution: Option<String>,
    /// Its version.
    pub version: String,
    /// Its build.
    pub build: String,
    /// Whether it was requested itself.
    pub requested: bool,
    /// Packages that directly depend on it (Python packages as `pypi::NAME`), with the dependency.
    pub needed_by: Vec<(String, String)>,
    /// Dependency paths from a requested package to it, shortest first, ties by name. None repeats a package.
    pub paths: Vec<Vec<Step>>,
    /// Whether there are more paths than listed.
    pub truncated: bool,
}

impl Why {
    /// The shortest path, if any request leads to the package.
    pub fn shortest(&self) -> Option<&[Step]> {
        self.paths.first().map(Vec::as_slice)
    }

    /// A tree for reading: one branch per path.
    pub fn text(&self) -> String {
        let mut out = String::new();
        if let Some(distribution) = &self.distribution {
            let _ = writeln!(out, "`{distribution}` is in the conda package `{}`", self.name);
        }
        let _ = write!(out, "{} {} {}", self.name, self.version, self.build);
        if self.paths.is_empty() {
            out.push_str("\n  nothing that was requested needs it");
            if !self.needed_by.is_empty() {
                let by: Vec<String> = self.needed_by.iter().map(|(name, _)| name.clone()).collect();
                let _ = write!(out, "; it is needed by {}", super::explain::list(&by, 5));
            }
            return out;
        }
        for (index, path) in self.paths.iter().enumerate() {
            let last = index + 1 == self.paths.len() && !self.truncated;
            let (branch, bar) = if last { ("╰─ ", "   ") } else { ("├─ ", "│  ") };
            for (depth, step) in path.iter().enumerate() {
                if depth == 0 {
                    let _ = write!(out, "\n{branch}{}: `{}`", step.lead, step.spec);
                    if path.len() > 1 {
                        let _ = write!(out, " ({} {})", step.name, step.version);
                    }
                } else {
                    let _ = write!(out, "\n{bar}{}╰─ needs `{}`", "   ".repeat(depth - 1), step.spec);
                    if depth + 1 < path.len() {
                        let _ = write!(out, " ({} {})", step.name, step.version);
                    }
                }
            }
        }
        if self.truncated {
            out.push_str("\n╰─ and more paths");
        }
        out
    }
}

impl Graph {
    /// The graph of conda packages. Conditional dependencies and extras count where the package they name is there.
    pub fn of_conda<T: AsRef<PackageRecord>>(records: &[T], requested: &[MatchSpec]) -> Self {
        let mut graph = Graph::default();
        for record in records {
            let record = record.as_ref();
            graph.packages.entry(record.name.as_normalized().to_owned()).or_insert_with(|| Package {
                name: record.name.as_normalized().to_owned(),
                version: record.version.to_string(),
                build: record.build.to_string(),
                ..Package::default()
            });
        }
        for record in records {
            let record = record.as_ref();
            for text in record.depends.iter().chain(record.extra_depends.values().flatten()) {
                let on = PackageName::normalized_name_from_matchspec_str(text);
                graph.link(record.name.as_normalized(), &on, text);
            }
        }
        for spec in requested {
            if let Some(package) = spec.name.as_exact().and_then(|name| graph.packages.get_mut(name.as_normalized())) {
                package.request = Some(("requested".to_owned(), super::explain::text_of(spec)));
            }
        }
        graph
    }

    /// Notes that one package needs another, if both are there.
    pub fn link(&mut self, from: &str, on: &str, text: &str) {
        if from != on
            && self.packages.contains_key(on)
            && let Some(package) = self.packages.get_mut(from)
        {
            package.needs.entry(on.to_owned()).or_insert_with(|| text.to_owned());
        }
    }

    /// The key of a package by what people call it: the name of a conda package, `pypi::NAME`, the name of a Python package, or that of a Python
    /// distribution in a conda package. In this order.
    fn find(&self, asked: &str) -> Option<&str> {
        let (conda, python) = match asked.strip_prefix("pypi::") {
            Some(name) => (None, crate::prefix::normalize(name.trim())),
            None => (Some(asked.to_lowercase()), crate::prefix::normalize(asked)),
        };
        let brought = || self.packages.iter().find(|(_, package)| package.brings.contains(&python));
        conda
            .and_then(|name| self.packages.get_key_value(&name))
            .or_else(|| self.packages.get_key_value(&format!("pypi::{python}")))
            .or_else(brought)
            .map(|(key, _)| key.as_str())
    }

    /// The dependency paths that lead to `name` from what was requested.
    ///
    /// # Errors
    /// When no such package is there, with the nearest names as a hint.
    pub fn why(&self, name: &str) -> Result<Why> {
        let asked = name.trim();
        let Some(wanted) = self.find(asked) else { return Err(self.absent(asked)) };
        let target = &self.packages[wanted];
        let mut needed_by: BTreeMap<&str, BTreeMap<&str, &str>> = BTreeMap::new();
        for (from, package) in &self.packages {
            for (on, text) in &package.needs {
                needed_by.entry(on).or_default().entry(from).or_insert(text);
            }
        }
        // Only packages from which the target can be reached lie on a path.
        let mut distance: BTreeMap<&str, usize> = BTreeMap::from([(wanted, 0)]);
        let mut queue: VecDeque<&str> = VecDeque::from([wanted]);
        while let Some(at) = queue.pop_front() {
            let next = distance.get(at).copied().unwrap_or_default() + 1;
            for &from in needed_by.get(at).into_iter().flat_map(BTreeMap::keys) {
                if !distance.contains_key(from) {
                    distance.insert(from, next);
                    queue.push_back(from);
                }
            }
        }
        let is_root = |key: &str| self.packages.get(key).is_some_and(|package| package.request.is_some());

        // Paths in order of length: each path waits with the least length it can still end with.
        let mut waiting: BTreeSet<(usize, Vec<&str>)> =
            distance.iter().filter(|(key, _)| is_root(key)).map(|(&root, far)| (far + 1, vec![root])).collect();
        let mut paths: Vec<Vec<&str>> = Vec::new();
        let mut truncated = false;
        let mut work = 0;
        while let Some((_, path)) = waiting.pop_first() {
            let Some(&at) = path.last() else { continue };
            if at == wanted {
                if paths.len() == PATHS {
                    truncated = true;
                    break;
                }
                paths.push(path);
                continue;
            }
            for on in self.packages[at].needs.keys().map(String::as_str) {
                work += 1;
                if let Some(left) = distance.get(on)
                    && !path.contains(&on)
                    // Another request on the way starts a path of its own.
                    && (on == wanted || !is_root(on))
                {
                    let mut longer = path.clone();
                    longer.push(on);
                    waiting.insert((longer.len() + left, longer));
                }
            }
            if work > WORK || waiting.len() > WORK {
                truncated = true;
                break;
            }
        }
        let paths = paths.iter().map(|path| (0..path.len()).map(|index| self.step(path, index)).collect()).collect();
        let python = crate::prefix::normalize(asked.strip_prefix("pypi::").unwrap_or(asked));
        Ok(Why {
            name: target.name.clone(),
            source: target.source,
            distribution: (target.source == Source::Conda && python != target.name && asked.to_lowercase() != target.name)
                .then_some(python),
            version: target.version.clone(),
            build: target.build.clone(),
            requested: target.request.is_some(),
            needed_by: needed_by.get(wanted).into_iter().flatten().map(|(name, spec)| ((*name).to_owned(), (*spec).to_owned())).collect(),
            paths,
            truncated,
        })
    }

    fn step(&self, path: &[&str], index: usize) -> Step {
        let package = &self.packages[path[index]];
        let (lead, spec) = match index.checked_sub(1) {
            None => package.request.clone().unwrap_or_default(),
            Some(before) => (String::new(), self.packages[path[before]].needs[path[index]].clone()),
        };
        Step {
            name: package.name.clone(),
            source: package.source,
            version: package.version.clone(),
            build: package.build.clone(),
            spec,
            lead,
        }
    }

    fn absent(&self, asked: &str) -> Error {
        let wanted = asked.to_lowercase();
        let names: BTreeSet<String> =
            self.packages.values().flat_map(|package| package.brings.iter().chain([&package.name])).cloned().collect();
        let error = Error::failure(format!("`{asked}` is not in the {}", if self.is_lock { "lock" } else { "environment" }));
        let mut close = hints::similar(&wanted, &names);
        if close.is_empty() && wanted.len() >= 3 {
            close = names.iter().filter(|known| known.contains(&wanted)).take(3).cloned().collect();
        }
        if close.is_empty() { error } else { error.hint(format!("did you mean {}?", super::explain::either(&close, 3))) }
    }
}

/// Explains why the conda package `name` is among `records`: the dependency paths that lead to it from what was `requested`.
///
/// # Errors
/// When no such package is among the records, with the nearest names as a hint.
pub fn why<T: AsRef<PackageRecord>>(records: &[T], requested: &[MatchSpec], name: &str) -> Result<Why> {
    Graph::of_conda(records, requested).why(name)
}
