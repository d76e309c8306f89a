//! Why a package is in an environment or a lock: who asked for it, in which half, and what leads from there to it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::str::FromStr;

use pep508_rs::{ExtraName, MarkerEnvironment, Requirement};
use rattler_conda_types::{MatchSpec, RepoDataRecord, Subdir};
use url::Url;

use crate::error::Result;
use crate::export::{Subject, choose_platform, requirement_name};
use crate::lock::{Lock, LockedPlatform};
use crate::prefix::{Prefix, normalize};
use crate::pypi::{self, Version, installed};
use crate::solve::{Graph, Package, Source, Why};
use crate::spec;

/// A Python package, wherever it is noted.
struct Python {
    name: String,
    version: String,
    requires: Vec<String>,
    /// Extras that the request names.
    extras: Vec<String>,
    /// Lead and text of the request.
    request: Option<(String, String)>,
}

/// Why `name` is in the environment at `prefix`: a conda package, `pypi::NAME`, a Python package of either half.
///
/// # Errors
/// It is not there; what is installed cannot be read.
pub fn in_prefix(prefix: &Prefix, name: &str) -> Result<Why> {
    let subject = Subject::of_prefix(prefix, Vec::new())?;
    let written = prefix.metadata().ok().and_then(|facts| facts.get("pip").cloned()).unwrap_or_default();
    let written: Vec<String> = written.as_array().into_iter().flatten().filter_map(|line| Some(line.as_str()?.to_owned())).collect();
    let all = installed::read(prefix);
    // Who does not mark what was asked for (an old pip, other tools) leaves only what nothing else needs.
    let marked = all.iter().any(|installed| installed.requested);
    let needed: BTreeSet<String> = all.iter().flat_map(|installed| &installed.requires).filter_map(|line| requirement_name(line)).collect();
    let python: Vec<Python> = all
        .into_iter()
        .map(|installed| {
            let extras = installed.tare.as_ref().map(|tare| tare.record.extras.clone()).unwrap_or_default();
            let requested = if marked { installed.requested } else { !needed.contains(&installed.name) };
            let lead = match (&installed.tare, installed.installer.as_str()) {
                (Some(_), _) if installed.name == crate::notebook::PACKAGE => "installed by `tare notebook`".to_owned(),
                (Some(_), _) => SECTION.to_owned(),
                (None, "") => "installed by another tool".to_owned(),
                (None, tool) => format!("installed by {tool}"),
            };
            let request = requested.then(|| (lead, line_of(&installed.name, &extras, &written)));
            Python { name: installed.name, version: installed.version, requires: installed.requires, extras, request }
        })
        .collect();
    // What conda packages bring is read from the metadata inside them.
    let mut brought: Vec<Brought> = Vec::new();
    for provided in pypi::provided(prefix)?.into_values() {
        brought.push(Brought { package: provided.package_name, name: provided.name.to_string(), requires: provided.requires_dist });
    }
    graph(&subject.conda, &requested(&subject)?, python, brought, subject.platform, false).why(name)
}

/// Why `name` is on a platform of the lock `file`; `platform`: its name, else that of this machine, or the only one.
///
/// A lock does not say which Python distributions a conda package brings: those of its purls and of its own name count.
///
/// # Errors
/// The file is no lock or has not this platform; the package is not there.
pub fn in_lock(file: &Path, platform: Option<&str>, here: Option<Subdir>, name: &str) -> Result<Why> {
    let lock = crate::lock::read_file(file, &crate::lock::ReadOptions::default())?;
    let platform = choose_platform(&lock, platform, here)?;
    of_platform(&lock, platform)?.why(name)
}

const SECTION: &str = "requested in the `pip:` section";

fn of_platform(lock: &Lock, platform: &LockedPlatform) -> Result<Graph> {
    let subject = Subject::of_lock(lock, platform)?;
    let marked = platform.pypi.iter().any(|package| package.requested);
    let needed: BTreeSet<String> =
        platform.pypi.iter().flat_map(|package| &package.requires_dist).filter_map(|line| requirement_name(line)).collect();
    let python = platform
        .pypi
        .iter()
        .map(|package| {
            let name = normalize(&package.name);
            let (is_root, lead) = match marked {
                true => (package.requested, SECTION),
                // Locks of other tools do not tell.
                false => (!needed.contains(&name), "needed by no other package of the lock"),
            };
            Python {
                request: is_root.then(|| (lead.to_owned(), line_of(&name, &package.extras, &lock.provenance.pip))),
                name,
                version: package.version.clone().unwrap_or_default(),
                requires: package.requires_dist.clone(),
                extras: package.extras.clone(),
            }
        })
        .collect();
    let brought = subject.conda.iter().flat_map(|record| {
        let package = record.package_record.name.as_normalized();
        crate::lock::brought(record).map(|name| Brought { name, package: package.to_owned(), requires: Vec::new() })
    });
    Ok(graph(&subject.conda, &requested(&subject)?, python, brought.collect(), subject.platform, true))
}

fn requested(subject: &Subject) -> Result<Vec<MatchSpec>> {
    subject.requested.values().map(|text| spec::parse_match_spec(text, None)).collect()
}

/// The line of the section about a package, else what is known of it.
fn line_of(name: &str, extras: &[String], written: &[String]) -> String {
    let lines: Vec<&str> =
        written.iter().filter(|line| requirement_name(line).is_some_and(|named| named == name)).map(String::as_str).collect();
    match lines.as_slice() {
        [] if extras.is_empty() => name.to_owned(),
        [] => format!("{name}[{}]", extras.join(",")),
        lines => lines.join("`, `"),
    }
}

/// A distribution of a conda package.
struct Brought {
    package: String,
    name: String,
    requires: Vec<String>,
}

fn graph(
    conda: &[RepoDataRecord],
    requested: &[MatchSpec],
    python: Vec<Python>,
    brought: Vec<Brought>,
    subdir: Option<Subdir>,
    is_lock: bool,
) -> Graph {
    let mut graph = Graph::of_conda(conda, requested);
    graph.is_lock = is_lock;
    let version = graph.packages.get("python").and_then(|package| Version::from_str(&package.version).ok());
    let markers = version.zip(subdir).and_then(|(version, subdir)| pypi::markers(&version, subdir).ok());
    // Keys by the name of the distribution, and what each distribution needs.
    let mut keys: BTreeMap<String, String> = BTreeMap::new();
    let mut needs: Vec<(String, Vec<String>)> = Vec::new();
    let mut extras: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for Brought { package, name, requires } in brought {
        if let Some(known) = graph.packages.get_mut(&package) {
            known.brings.insert(name.clone());
        }
        needs.push((name.clone(), requires));
        keys.insert(name, package);
    }
    for Python { name, version, requires, extras: asked, request } in python {
        let key = format!("pypi::{name}");
        let made = Package { name: name.clone(), version, build: "pypi_0".to_owned(), source: Source::Pypi, request, ..Package::default() };
        graph.packages.insert(key.clone(), made);
        extras.entry(name.clone()).or_default().extend(asked.iter().map(|extra| normalize(extra)));
        needs.push((name.clone(), requires));
        // Python finds one of the two; the one that pip put there lies over the other.
        keys.insert(name, key);
    }
    // Extras that one package asks of another bring requirements of their own.
    loop {
        let before: usize = extras.values().map(BTreeSet::len).sum();
        for (name, requires) in &needs {
            let active = extras.get(name).cloned().unwrap_or_default();
            for (text, requirement) in requires.iter().filter_map(|text| Some((text, parse(text)?))) {
                let on = normalize(requirement.name.as_ref());
                if !holds(&requirement, markers.as_ref(), &active) {
                    continue;
                }
                let more = requirement.extras.iter().map(|extra| normalize(extra.as_ref()));
                extras.entry(on.clone()).or_default().extend(more);
                if let (Some(from), Some(on)) = (keys.get(name), keys.get(&on)) {
                    graph.link(from, on, text);
                }
            }
        }
        if extras.values().map(BTreeSet::len).sum::<usize>() == before {
            return graph;
        }
    }
}

fn parse(text: &str) -> Option<Requirement<Url>> {
    Requirement::from_str(text).ok()
}

fn holds(requirement: &Requirement<Url>, markers: Option<&MarkerEnvironment>, extras: &BTreeSet<String>) -> bool {
    let extras: Vec<ExtraName> = extras.iter().filter_map(|extra| ExtraName::from_str(extra).ok()).collect();
    markers.is_none_or(|markers| requirement.evaluate_markers(markers, &extras))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn python(name: &str, requires: &[&str], extras: &[&str], line: Option<&str>) -> Python {
        Python {
            name: name.to_owned(),
            version: "1.0".to_owned(),
            requires: requires.iter().map(ToString::to_string).collect(),
            extras: extras.iter().map(ToString::to_string).collect(),
            request: line.map(|line| (SECTION.to_owned(), line.to_owned())),
        }
    }

    fn conda(name: &str, version: &str, depends: &[&str]) -> RepoDataRecord {
        crate::solve::testing::record("conda-forge", &format!("{name} {version} py_0"), depends, &[])
    }

    #[test]
    fn both_halves_are_followed_with_markers_and_extras() {
        let records =
            [conda("python", "3.11.4", &[]), conda("pytorch", "2.7.1", &["python", "sympy"]), conda("sympy", "1.13", &["python"])];
        let brought = vec![
            Brought { package: "pytorch".into(), name: "torch".into(), requires: vec!["opt ; extra == 'fast'".into()] },
            Brought { package: "sympy".into(), name: "sympy".into(), requires: Vec::new() },
        ];
        let packages = vec![
            python("app", &["Torch[fast]>=2", "tool>=1 ; python_version >= '3.8'", "tool ; sys_platform == 'win32'"], &[], Some("app>=1")),
            python("tool", &["addon ; extra == 'more'"], &[], None),
            python("opt", &[], &[], None),
            python("addon", &[], &[], None),
        ];
        let requested = [spec::parse_match_spec("python=3.11", None).unwrap()];
        let graph = graph(&records, &requested, packages, brought, Some(Subdir::Linux64), false);
        let text = |name: &str| graph.why(name).unwrap().text();
        insta::assert_snapshot!(text("Tool"), @r"
        tool 1.0 pypi_0
        ╰─ requested in the `pip:` section: `app>=1` (app 1.0)
           ╰─ needs `tool>=1 ; python_version >= '3.8'`
        ");
        insta::assert_snapshot!(text("torch"), @r"
        `torch` is in the conda package `pytorch`
        pytorch 2.7.1 py_0
        ╰─ requested in the `pip:` section: `app>=1` (app 1.0)
           ╰─ needs `Torch[fast]>=2`
        ");
        insta::assert_snapshot!(text("opt"), @r"
        opt 1.0 pypi_0
        ╰─ requested in the `pip:` section: `app>=1` (app 1.0)
           ╰─ needs `Torch[fast]>=2` (pytorch 2.7.1)
              ╰─ needs `opt ; extra == 'fast'`
        ");
        insta::assert_snapshot!(text("pypi::addon"), @r"
        addon 1.0 pypi_0
          nothing that was requested needs it
        ");
        insta::assert_snapshot!(text("python"), @r"
        python 3.11.4 py_0
        ├─ requested: `python 3.11.*`
        ├─ requested in the `pip:` section: `app>=1` (app 1.0)
        │  ╰─ needs `Torch[fast]>=2` (pytorch 2.7.1)
        │     ╰─ needs `python`
        ╰─ requested in the `pip:` section: `app>=1` (app 1.0)
           ╰─ needs `Torch[fast]>=2` (pytorch 2.7.1)
              ╰─ needs `sympy` (sympy 1.13)
                 ╰─ needs `python`
        ");
        assert_eq!(graph.why("pypi::python").unwrap_err().message(), "`pypi::python` is not in the environment");
    }
}
