//! What is asked of the Python half, as tare's notes keep it: the lines of the `pip:` sections and arguments so far (`pip`), what such sections said besides
//! (`pip_context`), and digests of what lines install from this machine (`pip_contents`).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::{Mode, Open};
use crate::export::requirement_name;
use crate::install::Stamp;
use crate::prefix::normalize;
use crate::pypi::installed::{Changes, Installed};
use crate::pypi::{Name, PypiSource, ReadyWheel, Section};
use crate::report::Progress;
use crate::resolve;
use crate::spec::{PipItem, PipKind, Requirement, is_argument};

const LINES: &str = "pip";
const CONTEXT: &str = "pip_context";
const CONTENTS: &str = "pip_contents";

/// The lines in the notes.
fn lines(facts: &Value) -> impl Iterator<Item = &str> {
    facts[LINES].as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// The requirements by name and version among them.
fn recorded(stamp: Option<&Stamp>) -> BTreeMap<String, (&str, Requirement)> {
    let mut found = BTreeMap::new();
    for line in stamp.into_iter().flat_map(|stamp| lines(&stamp.metadata)) {
        if let Ok(requirement) = line.parse::<Requirement>()
            && !matches!(requirement.version_or_url, Some(pep508_rs::VersionOrUrl::Url(_)))
        {
            found.insert(normalize(requirement.name.as_ref()), (line, requirement));
        }
    }
    found
}

/// The Python packages that are named on the command line.
pub(super) fn arguments(section: &Section) -> impl Iterator<Item = &Name> {
    section.requirements.iter().filter(|item| is_argument(item.place.as_ref())).filter_map(|item| match &item.kind {
        PipKind::Requirement { requirement, .. } => Some(&requirement.name),
        _ => None,
    })
}

/// `update NAME` of a Python package that no conda package has the name of: as `pypi::NAME`.
pub(super) fn qualify(open: &Open, specs: &mut [String]) {
    for text in specs.iter_mut() {
        let Some(name) = requirement_name(text.trim()).filter(|_| !text.contains("::")) else { continue };
        let is_conda = open.known.iter().any(|known| normalize(known.name().as_normalized()) == name);
        let rest = text.trim()[text.trim().find(|c: char| "=<>!~ [".contains(c)).unwrap_or(text.trim().len())..].trim();
        // `name=1.2` is of conda's language; in that of Python packages it means the same with two.
        let written = match rest.strip_prefix('=').filter(|version| !version.starts_with('=') && !version.contains([',', '|', '='])) {
            Some(version) => format!("{name}=={}.*", version.trim_end_matches(".*").trim_end_matches('*')),
            None => text.trim().to_owned(),
        };
        if !is_conda && open.python.iter().any(|installed| installed.name == name) && written.parse::<Requirement>().is_ok() {
            *text = format!("pypi::{written}");
        }
    }
}

/// What was asked for before holds on: of a package that is updated by its bare name, and of those that the request does not name. Returns the packages
/// that are updated by their bare names and were never asked for otherwise: nothing new is recorded about them.
pub(super) fn recall(mode: Mode, open: &Open, prepared: &mut resolve::Prepared) -> BTreeSet<String> {
    let mut carried = BTreeSet::new();
    let Some(section) = prepared.pip.as_mut().filter(|_| mode != Mode::Update { prune: true }) else { return carried };
    let recorded = recorded(open.stamp.as_ref());
    if matches!(mode, Mode::Update { .. }) {
        for item in section.requirements.iter_mut().filter(|item| is_argument(item.place.as_ref())) {
            let PipKind::Requirement { requirement, hashes } = &item.kind else { continue };
            let is_bare =
                requirement.version_or_url.is_none() && requirement.extras.is_empty() && requirement.marker == pep508_rs::MarkerTree::TRUE;
            if !is_bare || !hashes.is_empty() {
                continue;
            }
            let name = normalize(requirement.name.as_ref());
            match recorded.get(&name) {
                Some((line, earlier)) => {
                    let kind = PipKind::Requirement { requirement: Box::new(earlier.clone()), hashes: Vec::new() };
                    *item = PipItem { kind, text: (*line).to_owned(), ..item.clone() };
                }
                None => {
                    carried.insert(name);
                }
            }
        }
    }
    // Constraints would need hashes too.
    if section.has_hashes() || section.options.require_hashes {
        return carried;
    }
    let named: BTreeSet<String> = section.written_names().map(|name| name.to_string()).collect();
    let others =
        recorded.into_iter().filter(|(name, _)| !named.contains(name) && open.python.iter().any(|installed| installed.name == *name));
    let held = others.filter(|(_, (_, requirement))| requirement.version_or_url.is_some()).map(|(_, (_, mut requirement))| {
        // A constraint has no extras.
        requirement.extras.clear();
        requirement.to_string()
    });
    section.hold_requests(held.collect());
    carried
}

/// Leaves packages out of the notes of a change, and unasked for where they were: see [`recall`].
pub(super) fn leave_out(carried: &BTreeSet<String>, open: &Open, facts: &mut Value, wheels: &mut [ReadyWheel]) {
    if let Some(lines) = facts[LINES].as_array_mut() {
        lines.retain(|line| !line.as_str().and_then(requirement_name).is_some_and(|name| carried.contains(&name)));
    }
    for ready in wheels.iter_mut().filter(|ready| carried.contains(ready.record.name.as_ref())) {
        ready.record.requested = open.python.iter().any(|installed| installed.name == ready.record.name.as_ref() && installed.requested);
    }
}

/// Says that an update of everything is one of conda's packages.
pub(super) fn tell_of_python(open: &Open, progress: &dyn Progress) {
    let names: Vec<&str> =
        open.python.iter().filter(|installed| !installed.is_tooling()).map(|installed| installed.name.as_str()).collect();
    let Some(first) = names.first() else { return };
    let which = if names.len() == 1 { format!("`{first}` stays") } else { format!("the {} Python packages stay", names.len()) };
    let named: Vec<String> = names.iter().take(3).map(|name| format!("pypi::{name}")).collect();
    let more = if names.len() > 3 { " …" } else { "" };
    progress.note(&format!("{which} as installed: to update Python packages, name them: tare update {}{more}", named.join(" ")));
}

/// Adds what was asked for before to the notes of a change: lines of packages that it does not name, context, digests.
pub(super) fn keep(facts: &mut Value, stamp: Option<&Stamp>) {
    let Some(before) = stamp.map(|stamp| &stamp.metadata) else { return };
    let own: BTreeSet<String> = lines(facts).map(|line| requirement_name(line).unwrap_or_else(|| line.to_owned())).collect();
    let kept: Vec<&str> =
        lines(before).filter(|line| !own.contains(&requirement_name(line).unwrap_or_else(|| (*line).to_owned()))).collect();
    let mut all: Vec<Value> = kept.iter().map(|line| Value::from(*line)).collect();
    if let Some(lines) = facts[LINES].as_array_mut() {
        all.append(lines);
        *lines = all;
    }
    let mut context: Vec<Value> = before[CONTEXT].as_array().cloned().unwrap_or_default();
    if let Some(new) = facts[CONTEXT].as_array_mut() {
        for line in new.drain(..) {
            if !context.contains(&line) {
                context.push(line);
            }
        }
        *new = context;
    }
    if let (Some(old), Some(new)) = (before[CONTENTS].as_object(), facts[CONTENTS].as_object_mut()) {
        for (line, digest) in old.iter().filter(|(line, _)| kept.contains(&line.as_str())) {
            new.entry(line.clone()).or_insert_with(|| digest.clone());
        }
    }
}

/// Whether both ask for the same lines.
pub(super) fn same(facts: &Value, stamp: Option<&Stamp>) -> bool {
    let null = Value::Null;
    let before = stamp.map_or(&null, |stamp| &stamp.metadata);
    lines(facts).collect::<BTreeSet<_>>() == lines(before).collect::<BTreeSet<_>>()
}

/// Takes the lines of packages that go from the notes.
pub(super) fn forget(facts: &mut Map<String, Value>, changes: &Changes) {
    let gone: Vec<&Installed> =
        changes.unlink.iter().filter(|installed| !changes.link.iter().any(|ready| ready.record.name.as_ref() == installed.name)).collect();
    let mut taken = BTreeSet::new();
    if let Some(Value::Array(lines)) = facts.get_mut(LINES) {
        lines.retain(|line| {
            let text = line.as_str().unwrap_or_default();
            let goes = gone.iter().any(|installed| is_line_of(text, installed));
            if goes {
                taken.insert(text.to_owned());
            }
            !goes
        });
    }
    if let Some(Value::Object(contents)) = facts.get_mut(CONTENTS) {
        contents.retain(|line, _| !taken.contains(line));
    }
}

/// Whether a line asked for a package: by its name, or by the place it is from.
fn is_line_of(line: &str, installed: &Installed) -> bool {
    let target = line.trim().trim_start_matches("--editable").trim_start_matches("-e").trim_start_matches('=').trim();
    let by_place = target.contains(['/', '\\']) || target.starts_with('.') || target.contains("://");
    if target.split(['[', '@', ' ', ';']).next().is_some_and(|name| !name.contains(['/', '.', ':'])) || !by_place {
        return requirement_name(target).is_some_and(|name| name == installed.name);
    }
    let Some(tare) = &installed.tare else { return false };
    let last = |text: &str| {
        let text = text.split(['[', ';', '#', ' ']).next().unwrap_or(text);
        text.trim_end_matches('/').rsplit(['/', '\\']).next().unwrap_or(text).to_owned()
    };
    match &tare.record.source {
        PypiSource::Directory { path, .. } => last(target) == last(&path.display().to_string()),
        PypiSource::Archive { url, .. } => last(target) == last(url.path()),
        PypiSource::Vcs { url, .. } => target.contains(url.as_str().trim_end_matches('/')),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pypi::{PypiRecord, TareRecord, WheelFacts};

    fn installed(name: &str, source: Option<PypiSource>) -> Installed {
        let record = |source| PypiRecord {
            name: name.parse().unwrap(),
            version: "1".parse().unwrap(),
            source,
            requires_dist: Vec::new(),
            requires_python: None,
            requested: true,
            extras: Vec::new(),
        };
        let wheel = WheelFacts { file_name: format!("{name}-1-py3-none-any.whl"), sha256: String::new(), size: 0, built: false };
        let tare = source.map(|source| TareRecord {
            schema_version: 1,
            record: record(source),
            wheel,
            dist_info: String::new(),
            files: Vec::new(),
        });
        Installed {
            name: name.to_owned(),
            version: "1".to_owned(),
            info: std::path::PathBuf::new(),
            installer: String::new(),
            requested: true,
            files: None,
            tare,
            requires: Vec::new(),
        }
    }

    #[test]
    fn lines_go_with_their_packages() {
        let folder = |path: &str| Some(PypiSource::Directory { path: path.into(), editable: false });
        let archive = |url: &str| {
            Some(PypiSource::Archive { url: url.parse().unwrap(), sha256: None, size: None, index: None, direct: true, subdirectory: None })
        };
        let git = Some(PypiSource::Vcs {
            system: "git".into(),
            url: "https://h.example/o/r".parse().unwrap(),
            requested_revision: None,
            commit: "c".into(),
            subdirectory: None,
        });
        for (line, package, source, expected) in [
            ("Foo.Bar[x]>=1 ; python_version>'3'", "foo-bar", None, true),
            ("foo @ https://h.example/foo-1.zip", "foo", None, true),
            ("foo-baz", "foo", None, false),
            ("./pkg[a]", "mine", folder("/w/pkg"), true),
            ("-e ./pkg", "mine", folder("../w/pkg"), true),
            ("./other", "mine", folder("/w/pkg"), false),
            ("./wheels/direct-1.0-py3-none-any.whl", "direct", archive("file:///w/wheels/direct-1.0-py3-none-any.whl"), true),
            ("git+https://h.example/o/r@v1", "r", git.clone(), true),
            ("git+https://h.example/o/other@v1", "r", git, false),
        ] {
            assert_eq!(is_line_of(line, &installed(package, source)), expected, "{line}");
        }
    }

    #[test]
    fn notes_of_changes_add_up_and_go() {
        let stamp = |facts: Value| {
            let text = serde_json::json!({ "schema_version": 1, "tare_version": "", "prefix": "/e", "subdir": "linux-64", "environment_digest": "",
                "compiled": true, "requested": [], "state_sha256": null, "records": [], "metadata": facts });
            serde_json::from_value::<Stamp>(text).unwrap()
        };
        let before = stamp(serde_json::json!({ "pip": ["a<2", "./x", "b"], "pip_context": ["hold c<1"], "pip_contents": { "./x": "1" } }));
        let mut facts = serde_json::json!({ "pip": ["B>=3", "d"], "pip_context": ["--pre"], "pip_contents": {} });
        keep(&mut facts, Some(&before));
        assert_eq!(
            facts,
            serde_json::json!({ "pip": ["a<2", "./x", "B>=3", "d"], "pip_context": ["hold c<1", "--pre"], "pip_contents": { "./x": "1" } })
        );
        assert!(!same(&facts, Some(&before)) && same(&facts, Some(&stamp(facts.clone()))));
        let source = PypiSource::Directory { path: "/w/x".into(), editable: false };
        let changes = Changes { unlink: vec![installed("mine", Some(source)), installed("d", None)], ..Changes::default() };
        forget(facts.as_object_mut().unwrap(), &changes);
        assert_eq!((facts["pip"].clone(), facts["pip_contents"].clone()), (serde_json::json!(["a<2", "B>=3"]), serde_json::json!({})));
        assert_eq!(recorded(Some(&before)).keys().collect::<Vec<_>>(), ["a", "b"]);
    }
}
