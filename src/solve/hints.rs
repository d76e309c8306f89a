//! What to try next. A hint that says "it solves with …" was proven by another run of the solver; a hint that only
//! points somewhere (names, channels) says no more than what is known.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rattler_conda_types::package::BuildString;
use rattler_conda_types::{GenericVirtualPackage, MatchSpec, PackageName, ParseMatchSpecOptions, StringMatcher, Version, VersionSpec};

use super::engine::{Found, Plan, Problem, Verdict};
use super::explain::{Facts, Finding, KEPT, Leaf, either, list, text_of};
use super::{GpuIntent, PriorityChoice, gpu};

/// Time for all proofs of one failure. Tests must not depend on how busy the machine is.
const BUDGET: Duration = Duration::from_secs(if cfg!(test) { 300 } else { 20 });
/// Hints shown.
const HINTS: usize = 6;

/// Import and PyPI names that people write for a conda package of another name.
const ALIASES: &[(&str, &str)] = &[
    ("torch", "pytorch"),
    ("pytorch-cu", "pytorch-gpu"),
    ("tensorflow-gpu", "tensorflow"),
    ("torch-geometric", "pyg"),
    ("torch_geometric", "pyg"),
    ("sklearn", "scikit-learn"),
    ("skimage", "scikit-image"),
    ("opencv-python", "opencv"),
    ("opencv-python-headless", "opencv"),
    ("cv2", "opencv"),
    ("pil", "pillow"),
    ("yaml", "pyyaml"),
    ("bs4", "beautifulsoup4"),
    ("tables", "pytables"),
    ("msgpack", "msgpack-python"),
    ("faiss-gpu-cu12", "faiss-gpu"),
    ("cuda", "cuda-version"),
    ("jupyter-lab", "jupyterlab"),
    ("huggingface-hub", "huggingface_hub"),
    ("typing-extensions", "typing_extensions"),
    ("ruamel-yaml", "ruamel.yaml"),
    ("graphviz-python", "python-graphviz"),
    ("nodejs-bin", "nodejs"),
    ("gcc", "cxx-compiler"),
    ("g++", "cxx-compiler"),
    ("nvcc", "cuda-nvcc"),
];

/// A virtual package `name version build`.
pub(super) fn virtual_package(name: &str, version: &str, build: &str) -> Option<GenericVirtualPackage> {
    Some(GenericVirtualPackage {
        name: PackageName::new_unchecked(name),
        version: version.parse().ok()?,
        build_string: BuildString::new_unchecked(build),
    })
}

/// Runs variations of a plan within one time budget.
pub(super) struct Prover<'p, 'a> {
    problem: &'p Problem<'a>,
    deadline: Instant,
}

impl<'p, 'a> Prover<'p, 'a> {
    pub fn new(problem: &'p Problem<'a>) -> Self {
        Prover { problem, deadline: Instant::now() + problem.request.timeout.map_or(BUDGET, |timeout| timeout.min(BUDGET)) }
    }

    /// The solution of a varied plan, if one was found in time.
    pub fn solves(&self, plan: &Plan) -> Option<Found> {
        let left = self.deadline.checked_duration_since(Instant::now())?;
        let mut plan = plan.clone();
        plan.timeout = Some(plan.timeout.map_or(left, |timeout| timeout.min(left)));
        match self.problem.run(&plan) {
            Ok(Verdict::Solved(found)) => Some(found),
            _ => None,
        }
    }
}

pub(super) fn hints(facts: &mut Facts<'_, '_>, finding: &Finding) -> Vec<String> {
    let prover = Prover::new(facts.problem);
    let mut hints: Vec<String> = Vec::new();
    let mut add = |hint: Option<String>| {
        if let Some(hint) = hint
            && !hints.contains(&hint)
        {
            hints.push(hint);
        }
    };
    let mut leaves: Vec<Leaf> = Vec::new();
    for leaf in &finding.leaves {
        if !leaves.contains(leaf) {
            leaves.push(leaf.clone());
        }
    }
    let unknowns = leaves.iter().filter(|leaf| matches!(leaf, Leaf::Unknown { .. })).count();
    let most = HINTS.max(unknowns + 2).min(3 * HINTS);
    // What a hint already said would be installed, as `name version`.
    let mut said: Vec<String> = Vec::new();
    // A clash with the request's own sibling says nothing where the machine lacks something.
    for leaf in leaves.iter().filter(|leaf| matches!(leaf, Leaf::NoVirtual { .. } | Leaf::VirtualVersion { .. })) {
        add(machine(facts, &prover, leaf, finding));
    }
    // The reasons shown are those of one request; a driver may be what several of them lack.
    let told = leaves.iter().any(|leaf| matches!(leaf, Leaf::NoVirtual { name } if name == "__cuda"));
    if facts.plan.cuda().is_none() && !told {
        let mut met = false;
        facts.each_match_of("__cuda", |_| met = true);
        if met {
            add(cuda(facts, &prover, None));
        }
    }
    for leaf in &leaves {
        match leaf {
            Leaf::Unknown { name } => {
                let requested = facts.roots.iter().any(|root| facts.entries[root.entry].name == *name);
                for hint in unknown(facts, name, requested) {
                    // With several names a hint must say which one it is about.
                    add(Some(if unknowns > 1 && !hint.contains(&format!("`{name}`")) { format!("`{name}`: {hint}") } else { hint }));
                }
            }
            Leaf::NoMatch { name } => {
                let (hint, proven) = nearest(facts, &prover, name);
                said.extend(proven);
                add(hint);
            }
            _ => {}
        }
    }
    if let Some(request) = &finding.request
        && request.spec.channel.is_some()
    {
        add(free(
            facts,
            &prover,
            |spec| spec.name == request.spec.name && spec.channel.is_some(),
            |spec| spec.channel = None,
            "from any channel",
        ));
    }
    for leaf in &leaves {
        match leaf {
            // `gpu::settle` says itself what can be done about its own constraint.
            Leaf::Pinned { source, .. } if !source.starts_with("`--gpu") => {
                let mut plan = facts.plan.clone();
                plan.constraints.retain(|pinned| pinned.source != *source);
                plan.pins = plan.pins && source != KEPT;
                if prover.solves(&plan).is_some() {
                    add(Some(match leaf {
                        Leaf::Pinned { spec, source } if source == KEPT => format!("it solves if `{spec}` may change"),
                        _ => format!("it solves without the pin of {source}"),
                    }));
                }
            }
            Leaf::TooNew { .. } => add(newer(facts, &prover)),
            Leaf::Priority { .. } if facts.problem.request.priority == PriorityChoice::Strict => {
                let mut plan = facts.plan.clone();
                plan.priority = PriorityChoice::Flexible;
                if prover.solves(&plan).is_some() {
                    add(Some("it solves with `--channel-priority flexible`: packages may then come from several channels".into()));
                }
            }
            _ => {}
        }
    }
    // Requests that stand in the way, each left free in turn; the finding's own request last.
    let mut blamed: Vec<String> =
        leaves.iter().filter_map(|leaf| if let Leaf::Request { spec } = leaf { Some(spec.clone()) } else { None }).collect();
    if leaves.iter().any(|leaf| matches!(leaf, Leaf::Demanded { .. } | Leaf::Forbidden { .. } | Leaf::Deep)) || leaves.is_empty() {
        blamed.extend(facts.plan.specs.iter().map(text_of));
    }
    if let Some(request) = &finding.request
        && !facts.entries[request.entry].candidates.is_empty()
    {
        blamed.push(text_of(&request.spec));
    }
    let mut tried = BTreeSet::new();
    let mut freed = 0;
    for spec in blamed {
        if freed < 3 && tried.insert(spec.clone()) {
            let hint = free(facts, &prover, |candidate| text_of(candidate) == spec && has_more_than_name(candidate), strip, "left free");
            freed += usize::from(hint.is_some());
            add(hint.filter(|hint| !said.iter().any(|said| hint.contains(&format!(", as `{said} ")))));
        }
    }
    add(dead_channel(facts));
    if facts.problem.request.priority == PriorityChoice::Auto && facts.problem.several_tiers() && hints.len() < most {
        hints.push("strict and flexible channel priority were both tried".into());
    }
    hints.truncate(most);
    hints
}

fn has_more_than_name(spec: &MatchSpec) -> bool {
    text_of(spec).contains(' ') || spec.channel.is_some()
}

fn strip(spec: &mut MatchSpec) {
    spec.version = None;
    spec.build = None;
    spec.build_number = None;
}

/// Whether the request solves with the chosen specs changed; names what would be installed.
fn free(
    facts: &Facts<'_, '_>,
    prover: &Prover<'_, '_>,
    which: impl Fn(&MatchSpec) -> bool,
    change: impl Fn(&mut MatchSpec),
    how: &str,
) -> Option<String> {
    let mut plan = facts.plan.clone();
    let mut changed = None;
    for spec in &mut plan.specs {
        if which(spec) {
            let before = if spec.version.is_none() && spec.build.is_none() { spec.to_string() } else { text_of(spec) };
            change(spec);
            changed = Some((before, spec.name.as_exact()?.clone()));
        }
    }
    let (before, name) = changed?;
    let found = prover.solves(&plan)?;
    let record = found.records.iter().find(|record| record.package_record.name == name)?;
    let package = &record.package_record;
    let from =
        if how == "from any channel" { format!(" from `{}`", super::engine::shown(record.channel.as_deref())) } else { String::new() };
    Some(format!("it solves with `{before}` {how}, as `{} {} {}`{from}", name.as_normalized(), package.version, package.build))
}

/// The machine lacks something: would it solve on one that has it?
fn machine(facts: &Facts<'_, '_>, prover: &Prover<'_, '_>, leaf: &Leaf, finding: &Finding) -> Option<String> {
    let (name, has) = match leaf {
        Leaf::NoVirtual { name } => (name.as_str(), None),
        Leaf::VirtualVersion { name, has } => (name.as_str(), Some(has.as_str())),
        _ => return None,
    };
    match name {
        "__cuda" => cuda(facts, prover, has),
        "__glibc" | "__osx" | "__linux" | "__win" if has.is_some() => {
            // The smallest version named anywhere that makes it solve.
            let mut wanted: BTreeSet<Version> = BTreeSet::new();
            facts.each_spec_of(name, |spec| operands(spec, &mut wanted));
            if let Some(request) = &finding.request
                && let Some(version) = &request.spec.version
                && request.spec.name.as_exact().is_some_and(|exact| exact.as_normalized() == name)
            {
                operands(version, &mut wanted);
            }
            let has: Version = has?.parse().ok()?;
            let above = wanted.into_iter().filter(|version| *version > has && !version.to_string().contains("a0"));
            for version in above.take(5) {
                let plan = facts.plan.with_virtual(virtual_package(name, &version.to_string(), "0")?);
                if prover.solves(&plan).is_some() {
                    let what = match name {
                        "__glibc" => format!("glibc {version} (this machine has {has})"),
                        "__osx" => format!("macOS {version} (the target has {has})"),
                        _ => format!("`{name}` {version} (the target has {has})"),
                    };
                    return Some(format!(
                        "it solves for a system with {what}: to solve for such a machine add `--virtual-package {name}={version}`; for this one, ask for older versions"
                    ));
                }
            }
            None
        }
        "__archspec" => {
            let mut builds: BTreeSet<String> = BTreeSet::new();
            facts.each_match_of(name, |spec| {
                if let Some(StringMatcher::Exact(build)) = &spec.build {
                    builds.insert(build.clone());
                }
            });
            for build in builds.into_iter().take(4) {
                let plan = facts.plan.with_virtual(virtual_package(name, "1", &build)?);
                if prover.solves(&plan).is_some() {
                    return Some(format!("it solves for a processor of the kind `{build}`: `--virtual-package __archspec=1={build}`"));
                }
            }
            None
        }
        _ => None,
    }
}

/// Whether a CUDA driver is all that is missing, and the least version that was proven to do.
fn cuda(facts: &Facts<'_, '_>, prover: &Prover<'_, '_>, has: Option<&str>) -> Option<String> {
    let generous = facts.plan.with_virtual(virtual_package("__cuda", "99.9", "0")?);
    let found = prover.solves(&generous)?;
    // The toolkit that comes along says which driver it wants; without one, the least version that some package names.
    let mut named: BTreeSet<Version> = BTreeSet::new();
    facts.each_spec_of("__cuda", |spec| operands(spec, &mut named));
    let lack = |version: &Version| has.and_then(|has| has.parse().ok()).is_none_or(|has: Version| *version > has);
    let named: Vec<String> = named.into_iter().filter(lack).map(|version| version.to_string()).collect();
    let of_version = found
        .records
        .iter()
        .find(|record| record.package_record.name.as_normalized() == "cuda-version")
        .map(|record| record.package_record.version.to_string());
    let usual = if has.is_none() { vec!["12.9".to_owned(), "13.0".to_owned()] } else { Vec::new() };
    let mut candidates: Vec<String> = Vec::new();
    let ends = named.iter().take(4).chain(named.iter().rev().take(4)).cloned();
    for version in gpu::toolkit(&found.records).into_iter().chain(of_version).chain(ends).chain(usual) {
        if !candidates.contains(&version) {
            candidates.push(version);
        }
    }
    let version = candidates.into_iter().find(|version| {
        virtual_package("__cuda", version, "0").is_some_and(|package| prover.solves(&facts.plan.with_virtual(package)).is_some())
    })?;
    Some(match (facts.problem.request.gpu, has) {
        (GpuIntent::None, _) => format!("it solves with a CUDA {version} driver: leave out `--gpu none`, or do not ask for a GPU build"),
        (_, None) => format!("only `__cuda` is missing: to solve for a machine with a CUDA driver add `--cuda {version}`"),
        (_, Some(has)) => format!(
            "it solves for a driver that allows CUDA {version}; this one allows {has}: update the driver, or solve for another machine with `--cuda {version}`"
        ),
    })
}

/// Hints for a name no channel has. `requested`: the user wrote it.
fn unknown(facts: &Facts<'_, '_>, name: &str, requested: bool) -> Vec<String> {
    let mut hints = Vec::new();
    let lookup = facts.problem.request.lookup.as_deref();
    if let Some(lookup) = lookup {
        let channels = lookup.other_channels(name);
        if let Some(first) = channels.first() {
            hints.push(format!("`{name}` exists in channel {}: add `-c {first}`", list(&channels, 3)));
        }
        let subdirs: Vec<String> = lookup.other_subdirs(name).iter().map(ToString::to_string).collect();
        if !subdirs.is_empty() {
            hints.push(format!("`{name}` exists in these channels only for {}", list(&subdirs, 4)));
        }
    }
    if !requested {
        return hints;
    }
    let mut names: BTreeSet<String> = facts.all_names().into_iter().map(str::to_owned).collect();
    if let Some(lookup) = lookup {
        names.extend(lookup.names());
    }
    let normal = name.to_lowercase();
    // Its records may all have been left out as unreadable: the spelling is right.
    names.remove(&normal);
    if let Some((_, target)) = ALIASES.iter().find(|(alias, _)| *alias == normal) {
        hints.push(format!("the conda package is called `{target}`"));
    } else {
        let close = similar(&normal, &names);
        if !close.is_empty() {
            hints.push(format!("did you mean {}?", either(&close, 3)));
        }
    }
    let found = !hints.is_empty();
    if let Some(channel) = facts.problem.request.appended.first() {
        hints.push(crate::channel::appended_hint(channel));
    }
    if !found {
        // No index is asked: whether it has the name is for the resolver to find out.
        hints
            .push(format!("if it is a project of the Python package index: 'pypi::{name}', or a line under `pip:` of the environment.yml"));
    }
    hints
}

/// Up to three names that a slip of the fingers, or a swapped `-`, `_` or `py`, would turn into `name`; best first.
pub(super) fn similar(name: &str, names: &BTreeSet<String>) -> Vec<String> {
    let plain = |text: &str| text.replace(['_', '.'], "-");
    let wanted = plain(name);
    let limit = match wanted.chars().count() {
        0..=2 => return Vec::new(),
        3..=5 => 1,
        6..=11 => 2,
        _ => 3,
    };
    let mut scored: Vec<(usize, &String)> = names
        .iter()
        .filter(|known| known.len().abs_diff(name.len()) <= 8)
        .filter_map(|known| {
            let have = plain(known);
            let distance = if have == wanted {
                0
            } else if have == format!("py{wanted}")
                || have == format!("py-{wanted}")
                || have == format!("python-{wanted}")
                || have == format!("{wanted}-python")
                || wanted == format!("python-{have}")
                || wanted == format!("py{have}")
            {
                1
            } else {
                strsim::damerau_levenshtein(&wanted, &have)
            };
            (distance <= limit).then_some((distance, known))
        })
        .collect();
    scored.sort();
    scored.into_iter().take(3).map(|(_, known)| known.clone()).collect()
}

/// All versions named in a version spec.
fn operands(spec: &VersionSpec, into: &mut BTreeSet<Version>) {
    match spec {
        VersionSpec::Range(_, version) | VersionSpec::Exact(_, version) => {
            into.insert(version.clone());
        }
        VersionSpec::StrictRange(_, version) => {
            into.insert(version.clone().into_inner());
        }
        VersionSpec::Group(_, parts) => parts.iter().for_each(|part| operands(part, into)),
        VersionSpec::Any | VersionSpec::None => {}
    }
}

/// The versions just below and above what was asked for, and those that solve, as `name version`. The explanation names
/// up to three versions itself: then only what solves is worth saying.
fn nearest(facts: &Facts<'_, '_>, prover: &Prover<'_, '_>, name: &str) -> (Option<String>, Vec<String>) {
    let nothing = (None, Vec::new());
    let Some(request) = facts.roots.iter().find(|root| root.candidates.is_empty() && facts.entries[root.entry].name == name) else {
        return nothing;
    };
    let Some(wanted) = request.spec.version.as_ref() else { return nothing };
    let mut asked = BTreeSet::new();
    operands(wanted, &mut asked);
    let all: BTreeSet<&Version> = facts.entries[request.entry].candidates.iter().filter_map(|candidate| candidate.version()).collect();
    if all.iter().any(|version| wanted.matches(version)) {
        return nothing;
    }
    let (Some(low), Some(high)) = (asked.first(), asked.last()) else { return nothing };
    let below = all.iter().rev().find(|version| **version < low);
    let above = all.iter().find(|version| **version > high);
    let near: Vec<String> = [below, above].into_iter().flatten().map(ToString::to_string).collect();
    let mut proven = Vec::new();
    for version in near.iter().rev() {
        let mut plan = facts.plan.clone();
        for spec in plan.specs.iter_mut().filter(|spec| text_of(spec) == text_of(&request.spec)) {
            match MatchSpec::from_str(&format!("{name}=={version}"), ParseMatchSpecOptions::lenient()) {
                Ok(exact) => spec.version = exact.version,
                Err(_) => return nothing,
            }
        }
        if prover.solves(&plan).is_some() {
            proven.push(version.clone());
        }
    }
    let specs: Vec<String> = proven.iter().map(|version| format!("{name}={version}")).collect();
    let named = all.len() <= 3;
    let shown = match near.len() {
        0 => return nothing,
        1 => format!("the nearest version of `{name}` is {}", list(&near, 2)),
        _ => format!("the nearest versions of `{name}` are {}", list(&near, 2)),
    };
    let hint = match specs.as_slice() {
        [] if named => return nothing,
        [] => shown,
        some if named => format!("it solves with {}", either(some, 2)),
        [one] if near.len() == 1 => format!("it solves with the nearest version, `{one}`"),
        some if some.len() == near.len() => format!("it solves with the nearest versions, {}", either(some, 2)),
        some => format!("{shown}; it solves with {}", either(some, 2)),
    };
    (Some(hint), proven.into_iter().map(|version| format!("{name} {version}")).collect())
}

/// Whether a later cutoff would do, and which.
fn newer(facts: &Facts<'_, '_>, prover: &Prover<'_, '_>) -> Option<String> {
    let cutoff = facts.plan.exclude_newer?;
    let mut plan = facts.plan.clone();
    plan.exclude_newer = None;
    let found = prover.solves(&plan)?;
    // The dates at which more becomes visible: those of this solution; the earliest that is proven to do is named.
    let mut dates: Vec<jiff::Timestamp> = found
        .records
        .iter()
        .filter_map(|record| record.package_record.indexed_timestamp.or(record.package_record.timestamp))
        .map(|stamp| stamp.jiff_timestamp())
        .filter(|date| *date > cutoff)
        .collect();
    dates.extend(facts.dates_hidden());
    dates.sort();
    dates.dedup();
    let day = |date: jiff::Timestamp| date.to_zoned(jiff::tz::TimeZone::UTC).date().tomorrow().ok();
    let mut days: Vec<jiff::civil::Date> = dates.into_iter().filter_map(day).collect();
    days.dedup();
    let (mut low, mut high) = (0, days.len());
    let mut best = None;
    while low < high && prover.deadline > Instant::now() {
        let middle = usize::midpoint(low, high);
        plan.exclude_newer = days[middle].to_zoned(jiff::tz::TimeZone::UTC).ok().map(|zoned| zoned.timestamp());
        if prover.solves(&plan).is_some() {
            best = Some(days[middle]);
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Some(match best {
        Some(day) => format!("it solves with a later cutoff: `--exclude-newer {day}`"),
        None => "it solves without `--exclude-newer`".into(),
    })
}

/// The pytorch channel ended: what to ask for instead.
fn dead_channel(facts: &Facts<'_, '_>) -> Option<String> {
    let request = facts.problem.request;
    let uses = request.channels.iter().any(|channel| super::lint::is_pytorch_channel(channel));
    let asks = facts.plan.specs.iter().find(|spec| spec.name.as_exact().is_some_and(|name| name.as_normalized() == "pytorch-cuda"));
    (uses && asks.is_some()).then(|| {
        let version = asks.and_then(|spec| spec.version.as_ref()).map(ToString::to_string).unwrap_or_default();
        let version = version.trim_end_matches(".*").trim_start_matches("==").to_owned();
        let pin = if version.is_empty() || version.contains([',', '|', '<', '>']) { String::new() } else { format!(" cuda-version={version}") };
        format!("the `pytorch` channel has nothing newer than pytorch 2.5: with `-c conda-forge` alone ask for `pytorch-gpu{pin}` instead of `pytorch pytorch-cuda`")
    })
}
