use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use rattler_conda_types::{MatchSpec, PackageName, PackageRecord};

use super::hints;
use crate::error::{Error, Result};

/// Paths listed; more are counted as "more".
const PATHS: usize = 50;
/// Steps of the search for paths, a bound for records with very many of them.
const WORK: usize = 200_000;

/// One package on a path, and the dependency that leads to it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Step {
    /// Normalised name.
    pub name: String,
    /// Version installed.
    pub version: String,
    /// Build installed.
    pub build: String,
    /// What asks for it: the request for the first step, the dependency of the step before for the others.
    pub spec: String,
}

/// Why a package is there.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Why {
    /// The package asked about.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its build.
    pub build: String,
    /// Whether it was requested itself.
    pub requested: bool,
    /// Packages that directly depend on it, with the dependency.
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
        let mut out = format!("{} {} {}", self.name, self.version, self.build);
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
                    let _ = write!(out, "\n{branch}requested: `{}`", step.spec);
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

/// Explains why the package `name` is among `records`: the dependency paths that lead to it from what was `requested`.
/// Conditional dependencies and extras count where the package they name is there.
///
/// # Errors
/// When no such package is among the records, with the nearest names as a hint.
pub fn why<T: AsRef<PackageRecord>>(records: &[T], requested: &[MatchSpec], name: &str) -> Result<Why> {
    let wanted = name.trim().to_lowercase();
    let mut by_name: BTreeMap<&str, &PackageRecord> = BTreeMap::new();
    for record in records {
        by_name.entry(record.as_ref().name.as_normalized()).or_insert(record.as_ref());
    }
    let Some(&target) = by_name.get(wanted.as_str()) else {
        let names: BTreeSet<String> = by_name.keys().map(|name| (*name).to_owned()).collect();
        let mut error = Error::failure(format!("`{name}` is not in the environment"));
        let mut close = hints::similar(&wanted, &names);
        if close.is_empty() && wanted.len() >= 3 {
            close = names.iter().filter(|known| known.contains(&wanted)).take(3).cloned().collect();
        }
        if !close.is_empty() {
            error = error.hint(format!("did you mean {}?", super::explain::either(&close, 3)));
        }
        return Err(error);
    };
    // Who depends on whom, among the records.
    let mut needs: BTreeMap<&str, BTreeMap<&str, &str>> = BTreeMap::new();
    let mut needed_by: BTreeMap<&str, BTreeMap<&str, &str>> = BTreeMap::new();
    for (&from, record) in &by_name {
        for text in record.depends.iter().chain(record.extra_depends.values().flatten()) {
            let on = PackageName::normalized_name_from_matchspec_str(text);
            if let Some((&on, _)) = by_name.get_key_value(&*on)
                && on != from
            {
                needs.entry(from).or_default().entry(on).or_insert(text);
                needed_by.entry(on).or_default().entry(from).or_insert(text);
            }
        }
    }
    // Only packages from which the target can be reached lie on a path.
    let mut distance: BTreeMap<&str, usize> = BTreeMap::from([(wanted.as_str(), 0)]);
    let mut queue: VecDeque<&str> = VecDeque::from([wanted.as_str()]);
    while let Some(at) = queue.pop_front() {
        let next = distance.get(at).copied().unwrap_or_default() + 1;
        for &from in needed_by.get(at).into_iter().flat_map(BTreeMap::keys) {
            if !distance.contains_key(from) {
                distance.insert(from, next);
                queue.push_back(from);
            }
        }
    }
    let roots: BTreeMap<String, String> = requested
        .iter()
        .filter_map(|spec| Some((spec.name.as_exact()?.as_normalized().to_owned(), super::explain::text_of(spec))))
        .filter(|(name, _)| distance.contains_key(name.as_str()))
        .collect();

    // Paths in order of length: each path waits with the least length it can still end with.
    let mut waiting: BTreeSet<(usize, Vec<&str>)> =
        roots.keys().filter_map(|root| by_name.get_key_value(root.as_str())).map(|(&root, _)| (distance[root] + 1, vec![root])).collect();
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
        for &on in needs.get(at).into_iter().flat_map(BTreeMap::keys) {
            work += 1;
            if let Some(left) = distance.get(on)
                && !path.contains(&on)
                // Another request on the way starts a path of its own.
                && (on == wanted || !roots.contains_key(on))
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
    let step = |name: &str, spec: &str| {
        let record = by_name.get(name);
        Step {
            name: name.to_owned(),
            version: record.map(|record| record.version.to_string()).unwrap_or_default(),
            build: record.map(|record| record.build.to_string()).unwrap_or_default(),
            spec: spec.to_owned(),
        }
    };
    let paths = paths
        .into_iter()
        .map(|path| {
            path.iter()
                .enumerate()
                .map(|(index, name)| match index {
                    0 => step(name, roots.get(*name).map_or("", String::as_str)),
                    _ => step(name, needs.get(path[index - 1]).and_then(|on| on.get(name)).copied().unwrap_or("")),
                })
                .collect()
        })
        .collect();
    Ok(Why {
        name: wanted.clone(),
        version: target.version.to_string(),
        build: target.build.to_string(),
        requested: requested.iter().any(|spec| spec.name.as_exact().is_some_and(|exact| exact.as_normalized() == wanted)),
        needed_by: needed_by
            .get(wanted.as_str())
            .into_iter()
            .flatten()
            .map(|(name, spec)| ((*name).to_owned(), (*spec).to_owned()))
            .collect(),
        paths,
        truncated,
    })
}
