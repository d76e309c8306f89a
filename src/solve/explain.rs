//! Why a request has no solution.
//!
//! The solver only proves that there is none. The reasons shown come from the records themselves: starting from the
//! requests, every candidate that lacks a usable candidate for one of its dependencies is struck out, with the reason,
//! until nothing changes (arc consistency). Where a request is left with nothing, the reasons of its candidates are
//! gathered, merged and shown. Only where this finds nothing (a conflict that needs a search to see) the smallest set of
//! requests that cannot be met together is looked for, and the solver's own text is condensed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rattler_conda_types::{GenericVirtualPackage, MatchSpec, Matches, RepoDataRecord, Version};

use super::engine::{Plan, Problem, Verdict, clip, cutoff, record_options, shown, tier_key};
use super::hints;
use super::{GpuIntent, PriorityChoice};
use crate::error::{Error, Kind};

/// Groups of candidates shown below one headline.
const GROUPS: usize = 5;
/// Steps of a dependency chain shown.
const STEPS: usize = 4;
/// Time for striking out, and for the smallest set of requests in conflict. Tests must not depend on how busy the machine
/// is.
const SEARCH: Duration = Duration::from_secs(if cfg!(test) { 300 } else { 6 });

/// The source of a [`super::Request::pins`] record, in texts.
pub(super) const KEPT: &str = "a package that must stay as it is";

/// A dependency of a record, read once.
pub(super) struct Dep {
    pub entry: usize,
    /// The text as written, in the form `name version build`.
    pub text: String,
    /// What follows the name; empty for any version.
    pub rest: String,
    pub spec: MatchSpec,
    /// Candidates of `entry` that match, dead or not.
    pub candidates: Vec<usize>,
}

/// Why a candidate cannot be taken.
#[derive(Clone)]
pub(super) enum Reason {
    /// Published after the cutoff.
    TooNew,
    /// A channel of higher priority has the name.
    Priority { used: String },
    /// A spec asks for another channel.
    Channel { wanted: String },
    /// Another request for the same name excludes it.
    NotRequested { spec: String },
    /// A constraint or pin excludes it.
    Pinned { spec: String, source: String },
    /// No candidate is left for this dependency.
    Needs(Rc<Dep>),
    /// It forbids something that is there: a virtual package, or whatever is left of a needed package.
    Forbids(Rc<Dep>),
    /// A needed package asks for others.
    Demanded { by: usize, dep: Rc<Dep> },
}

/// A build of a package, or a virtual package.
pub(super) struct Candidate<'a> {
    pub record: Option<&'a RepoDataRecord>,
    pub virt: Option<GenericVirtualPackage>,
    pub dead: Option<Reason>,
}

impl Candidate<'_> {
    pub fn version(&self) -> Option<&Version> {
        match (self.record, &self.virt) {
            (Some(record), _) => Some(record.package_record.version.version()),
            (None, Some(virt)) => Some(&virt.version),
            (None, None) => None,
        }
    }
}

/// All that is known of a name.
pub(super) struct Entry<'a> {
    pub name: String,
    pub candidates: Vec<Candidate<'a>>,
    mandatory: bool,
}

/// The state of the elimination.
pub(super) struct Facts<'p, 'a> {
    pub problem: &'p Problem<'a>,
    pub plan: &'p Plan,
    by_name: HashMap<&'a str, Vec<(usize, &'a RepoDataRecord)>>,
    pub entries: Vec<Entry<'a>>,
    index: HashMap<String, usize>,
    deps: HashMap<String, Option<Rc<Dep>>>,
    /// The requests, in order, with their matches.
    pub roots: Vec<Rc<Dep>>,
    cutoff: Option<rattler_solve::ExcludeNewer>,
}

impl<'p, 'a> Facts<'p, 'a> {
    pub fn new(problem: &'p Problem<'a>, plan: &'p Plan) -> Self {
        let mut by_name: HashMap<&'a str, Vec<(usize, &'a RepoDataRecord)>> = HashMap::new();
        for (index, tier) in problem.tiers.iter().enumerate() {
            for &record in &tier.records {
                by_name.entry(record.package_record.name.as_normalized()).or_default().push((index, record));
            }
        }
        let mut facts = Facts {
            problem,
            plan,
            by_name,
            entries: Vec::new(),
            index: HashMap::new(),
            deps: HashMap::new(),
            roots: Vec::new(),
            cutoff: plan.exclude_newer.map(cutoff),
        };
        for spec in &plan.specs {
            if spec.condition.is_none()
                && let Some(dep) = facts.dep_of(spec.clone())
            {
                facts.roots.push(dep);
            }
        }
        facts
    }

    fn dep_of(&mut self, spec: MatchSpec) -> Option<Rc<Dep>> {
        let name = spec.name.as_exact()?.as_normalized().to_owned();
        let entry = self.entry(&name);
        let candidates = self.entries[entry]
            .candidates
            .iter()
            .enumerate()
            .filter(|(_, candidate)| match (candidate.record, &candidate.virt) {
                (Some(record), _) => spec.matches(record),
                (None, Some(virt)) => spec.matches(virt),
                (None, None) => false,
            })
            .map(|(index, _)| index)
            .collect();
        let rest = rest_of(&spec);
        let text = if rest.is_empty() { name } else { format!("{name} {rest}") };
        Some(Rc::new(Dep { entry, text, rest, spec, candidates }))
    }

    /// A dependency text of a record; `None` for one with a condition or that cannot be read.
    fn dep(&mut self, text: &str) -> Option<Rc<Dep>> {
        if let Some(known) = self.deps.get(text) {
            return known.clone();
        }
        let made = match MatchSpec::from_str(text, record_options()) {
            Ok(spec) if spec.condition.is_none() => self.dep_of(spec),
            _ => None,
        };
        self.deps.insert(text.to_owned(), made.clone());
        made
    }

    pub fn all_names(&self) -> Vec<&'a str> {
        let mut names: Vec<&'a str> = self.by_name.keys().copied().collect();
        names.sort_unstable();
        names
    }

    fn entry(&mut self, name: &str) -> usize {
        if let Some(&index) = self.index.get(name) {
            return index;
        }
        let mut candidates: Vec<Candidate<'a>> = self
            .plan
            .virtual_packages
            .iter()
            .filter(|virt| virt.name.as_normalized() == name)
            .map(|virt| Candidate { record: None, virt: Some(virt.clone()), dead: None })
            .collect();
        let records = self.by_name.get(name).cloned().unwrap_or_default();
        let channel = self.plan.specs.iter().find(|spec| is(spec, name) && spec.channel.is_some()).and_then(|spec| spec.channel.clone());
        let strict = matches!(self.plan.priority, PriorityChoice::Strict | PriorityChoice::Auto);
        let mut first_tier = None;
        let mut seen = BTreeSet::new();
        for (tier, record) in records {
            let multi = self.problem.tiers[tier].multi_channel;
            let key = tier_key(multi, record);
            let from_channel = channel.as_ref().is_none_or(|wanted| {
                if multi.is_some() && multi == wanted.name.as_deref() {
                    true
                } else {
                    record.channel.as_deref() == Some(wanted.canonical_name().as_str())
                }
            });
            let dead = if !from_channel {
                let wanted = channel.as_ref().map(|wanted| wanted.name().to_owned()).unwrap_or_default();
                Some(Reason::Channel { wanted })
            } else if strict && *first_tier.get_or_insert(key) != key {
                let used = first_tier.map(|(multi, channel)| multi.map_or_else(|| shown(channel), str::to_owned)).unwrap_or_default();
                Some(Reason::Priority { used })
            } else if self.cutoff.as_ref().is_some_and(|cutoff| cutoff.is_excluded(record)) {
                Some(Reason::TooNew)
            } else {
                self.outside_requests(record)
            };
            // The same build as .conda and .tar.bz2 is one candidate.
            if seen.insert((
                record.channel.as_deref(),
                record.package_record.version.version().clone(),
                record.package_record.build.as_str(),
            )) {
                candidates.push(Candidate { record: Some(record), virt: None, dead });
            }
        }
        // Newest first: what is shown first is what a person would want.
        candidates.sort_by(|a, b| {
            let number = |c: &Candidate<'_>| {
                c.record.map(|record| (record.package_record.build_number, record.package_record.build.as_str().to_owned()))
            };
            b.version().cmp(&a.version()).then_with(|| number(b).cmp(&number(a)))
        });
        let index = self.entries.len();
        self.entries.push(Entry { name: name.to_owned(), candidates, mandatory: false });
        self.index.insert(name.to_owned(), index);
        index
    }

    fn outside_requests(&self, record: &RepoDataRecord) -> Option<Reason> {
        let name = record.package_record.name.as_normalized();
        for spec in self.plan.specs.iter().filter(|spec| is(spec, name) && spec.condition.is_none()) {
            if !spec.matches(record) || spec.subdir.as_ref().is_some_and(|subdir| *subdir != record.package_record.subdir) {
                return Some(Reason::NotRequested { spec: text_of(spec) });
            }
        }
        for pinned in self.plan.constraints.iter().filter(|pinned| is(&pinned.spec, name)) {
            let spec = &pinned.spec;
            let other = spec.channel.as_ref().is_some_and(|channel| record.channel.as_deref() != Some(channel.canonical_name().as_str()));
            if other || !spec.matches(record) {
                return Some(Reason::Pinned { spec: text_of(spec), source: pinned.source.clone() });
            }
        }
        if let Some((_, source)) = self.plan.cuda_only.iter().find(|(of, _)| of == name)
            && !super::gpu::is_cuda_build(record)
        {
            return Some(Reason::Pinned { spec: format!("{name} (CUDA builds)"), source: source.clone() });
        }
        if self.plan.pins
            && let Some(pin) = self.problem.request.pins.iter().find(|pin| pin.package_record.name.as_normalized() == name)
            && (pin.package_record.version != record.package_record.version || pin.package_record.build != record.package_record.build)
        {
            let package = &pin.package_record;
            return Some(Reason::Pinned { spec: format!("{name} {} {}", package.version, package.build), source: KEPT.into() });
        }
        None
    }

    fn live(&self, dep: &Dep) -> bool {
        dep.candidates.iter().any(|&index| self.entries[dep.entry].candidates[index].dead.is_none())
    }

    /// Strikes out candidates until nothing changes. Stops early once a request has nothing left.
    /// `narrow`: also let needed packages restrict each other.
    fn eliminate(&mut self, narrow: bool) -> Option<Failure> {
        let deadline = Instant::now() + SEARCH;
        let mut first = true;
        loop {
            let mut changed = false;
            // Forwards once, which meets every name (new entries join while walking); then what was met last first, so
            // that a missing end of a long chain travels to its start in one pass.
            let known = if first { usize::MAX } else { self.entries.len() };
            let mut step = 0;
            while step < known.min(self.entries.len()) {
                let position = if first { step } else { known - 1 - step };
                for candidate in 0..self.entries[position].candidates.len() {
                    let Candidate { record: Some(record), dead: None, .. } = self.entries[position].candidates[candidate] else { continue };
                    if let Some(reason) = self.fault(record) {
                        self.entries[position].candidates[candidate].dead = Some(reason);
                        changed = true;
                    }
                }
                step += 1;
                if step % 64 == 0 && Instant::now() > deadline {
                    return None;
                }
            }
            // Entries met while walking backwards are walked in the next round.
            changed |= first || self.entries.len() > known;
            first = false;
            if let Some(root) = self.roots.iter().find(|root| !self.live(root)) {
                return Some(Failure::Request(root.clone()));
            }
            if narrow {
                match self.narrow() {
                    Ok(more) => changed |= more,
                    Err(failure) => return Some(failure),
                }
            }
            if !changed {
                return None;
            }
        }
    }

    fn fault(&mut self, record: &'a RepoDataRecord) -> Option<Reason> {
        for text in &record.package_record.depends {
            if let Some(dep) = self.dep(text)
                && !self.live(&dep)
            {
                return Some(Reason::Needs(dep));
            }
        }
        for text in &record.package_record.constrains {
            let Some(dep) = self.dep(text) else { continue };
            let entry = &self.entries[dep.entry];
            let present = entry.candidates.iter().any(|candidate| candidate.virt.is_some());
            if (present || entry.mandatory) && !entry.candidates.is_empty() && !self.live(&dep) {
                return Some(Reason::Forbids(dep));
            }
        }
        None
    }

    /// Marks what every remaining candidate of a needed package needs as needed too, and restricts it to what they ask.
    fn narrow(&mut self) -> Result<bool, Failure> {
        let mut changed = false;
        for root in self.roots.clone() {
            let entry = &mut self.entries[root.entry];
            changed |= !entry.mandatory;
            entry.mandatory = true;
        }
        for position in 0..self.entries.len() {
            if !self.entries[position].mandatory {
                continue;
            }
            let alive: Vec<&'a RepoDataRecord> = self.entries[position]
                .candidates
                .iter()
                .filter(|candidate| candidate.dead.is_none())
                .filter_map(|candidate| candidate.record)
                .collect();
            if alive.is_empty() {
                continue;
            }
            // dependency name -> candidates allowed by each live record; a name counts only where all have it.
            let mut allowed: BTreeMap<usize, (usize, BTreeSet<usize>, Rc<Dep>)> = BTreeMap::new();
            for record in &alive {
                let mut own: BTreeMap<usize, (BTreeSet<usize>, Rc<Dep>)> = BTreeMap::new();
                for text in &record.package_record.depends {
                    let Some(dep) = self.dep(text) else { continue };
                    let set: BTreeSet<usize> = dep.candidates.iter().copied().collect();
                    own.entry(dep.entry).and_modify(|(had, _)| *had = had.intersection(&set).copied().collect()).or_insert((set, dep));
                }
                for (entry, (set, dep)) in own {
                    let slot = allowed.entry(entry).or_insert_with(|| (0, BTreeSet::new(), dep));
                    slot.0 += 1;
                    slot.1.extend(set);
                }
            }
            for (entry, (count, set, dep)) in allowed {
                if count < alive.len() {
                    continue;
                }
                changed |= !self.entries[entry].mandatory;
                self.entries[entry].mandatory = true;
                let mut struck = false;
                for (index, candidate) in self.entries[entry].candidates.iter_mut().enumerate() {
                    if candidate.dead.is_none() && !set.contains(&index) {
                        candidate.dead = Some(Reason::Demanded { by: position, dep: dep.clone() });
                        struck = true;
                    }
                }
                changed |= struck;
                if struck && self.entries[entry].candidates.iter().all(|candidate| candidate.dead.is_some()) {
                    return Err(Failure::Between(entry));
                }
            }
        }
        Ok(changed)
    }
}

/// What elimination ended with.
pub(super) enum Failure {
    /// This request has no candidate left.
    Request(Rc<Dep>),
    /// Needed packages leave nothing of this name.
    Between(usize),
}

/// The last link of a chain: what stands in the way.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Leaf {
    /// A virtual package is absent.
    NoVirtual {
        name: String,
    },
    /// A virtual package is there with a version that does not do.
    VirtualVersion {
        name: String,
        has: String,
    },
    /// No package of that name in any channel.
    Unknown {
        name: String,
    },
    /// No such version or build.
    NoMatch {
        name: String,
    },
    Request {
        spec: String,
    },
    Pinned {
        spec: String,
        source: String,
    },
    TooNew {
        name: String,
    },
    Priority {
        name: String,
        used: String,
    },
    Channel {
        name: String,
        wanted: String,
    },
    Demanded {
        by: String,
        spec: String,
    },
    Forbidden {
        name: String,
    },
    /// Too deep or circular.
    Deep,
}

/// From a candidate to what stands in its way.
#[derive(Clone)]
pub(super) struct Chain {
    /// Names and specs of the dependencies followed.
    pub steps: Vec<(String, String)>,
    pub leaf: Leaf,
}

impl Facts<'_, '_> {
    pub(super) fn chain(&self, entry: usize, candidate: usize) -> Chain {
        let mut steps = Vec::new();
        let (mut entry, mut candidate) = (entry, candidate);
        loop {
            let name = self.entries[entry].name.clone();
            let leaf = match &self.entries[entry].candidates[candidate].dead {
                None => Leaf::Deep,
                Some(Reason::TooNew) => Leaf::TooNew { name },
                Some(Reason::Priority { used }) => Leaf::Priority { name, used: used.clone() },
                Some(Reason::Channel { wanted }) => Leaf::Channel { name, wanted: wanted.clone() },
                Some(Reason::NotRequested { spec }) => Leaf::Request { spec: spec.clone() },
                Some(Reason::Pinned { spec, source }) => Leaf::Pinned { spec: spec.clone(), source: source.clone() },
                Some(Reason::Demanded { by, dep }) => Leaf::Demanded { by: self.entries[*by].name.clone(), spec: dep.text.clone() },
                Some(Reason::Forbids(dep)) => {
                    steps.push((self.entries[dep.entry].name.clone(), dep.rest.clone()));
                    match self.entries[dep.entry].candidates.iter().find_map(|candidate| candidate.virt.as_ref()) {
                        Some(virt) => Leaf::VirtualVersion { name: self.entries[dep.entry].name.clone(), has: virt.version.to_string() },
                        None => Leaf::Forbidden { name: self.entries[dep.entry].name.clone() },
                    }
                }
                Some(Reason::Needs(dep)) => {
                    steps.push((self.entries[dep.entry].name.clone(), dep.rest.clone()));
                    match self.leaf_of(dep) {
                        Ok(leaf) => leaf,
                        Err(next) => {
                            if steps.len() > 5000 {
                                Leaf::Deep
                            } else {
                                (entry, candidate) = (dep.entry, next);
                                continue;
                            }
                        }
                    }
                }
            };
            return Chain { steps, leaf };
        }
    }

    /// A dependency nothing is left for: the leaf itself, or the candidate to follow.
    pub(super) fn leaf_of(&self, dep: &Dep) -> Result<Leaf, usize> {
        let entry = &self.entries[dep.entry];
        let name = entry.name.clone();
        // Newest first, but builds for another Python, or of another channel, say least.
        let telling = |index: &&usize| match &entry.candidates[**index].dead {
            Some(Reason::Priority { .. } | Reason::Channel { .. }) => 2,
            Some(Reason::Needs(on)) if matches!(self.entries[on.entry].name.as_str(), "python" | "python_abi") => 1,
            _ => 0,
        };
        if let Some(&best) = dep.candidates.iter().min_by_key(telling) {
            return Err(best);
        }
        Ok(if name.starts_with("__") {
            match entry.candidates.first().and_then(|candidate| candidate.version()) {
                Some(version) => Leaf::VirtualVersion { name, has: version.to_string() },
                None => Leaf::NoVirtual { name },
            }
        } else if entry.candidates.is_empty() {
            Leaf::Unknown { name }
        } else {
            Leaf::NoMatch { name }
        })
    }
}

/// Candidates with one reason.
pub(super) struct Group {
    name: String,
    versions: BTreeSet<Version>,
    builds: usize,
    /// Names along the chain, each with the specs seen.
    steps: Vec<(String, Vec<String>)>,
    pub leaf: Leaf,
}

/// Merges candidates by the names along their chains and the leaf.
pub(super) fn group(facts: &Facts<'_, '_>, entry: usize, candidates: &[usize]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut index: HashMap<(Vec<String>, Leaf), usize> = HashMap::new();
    for &candidate in candidates {
        let chain = facts.chain(entry, candidate);
        let names: Vec<String> = chain.steps.iter().map(|(name, _)| name.clone()).collect();
        let at = *index.entry((names, chain.leaf.clone())).or_insert_with(|| {
            groups.push(Group {
                name: facts.entries[entry].name.clone(),
                versions: BTreeSet::new(),
                builds: 0,
                steps: chain.steps.iter().map(|(name, _)| (name.clone(), Vec::new())).collect(),
                leaf: chain.leaf.clone(),
            });
            groups.len() - 1
        });
        let group = &mut groups[at];
        group.builds += 1;
        if let Some(version) = facts.entries[entry].candidates[candidate].version() {
            group.versions.insert(version.clone());
        }
        for ((_, specs), (_, spec)) in group.steps.iter_mut().zip(&chain.steps) {
            if !specs.contains(spec) {
                specs.push(spec.clone());
            }
        }
    }
    groups
}

/// `name rest`, or `name` alone.
fn named(name: &str, specs: &[String]) -> String {
    let specs: Vec<&String> = specs.iter().filter(|spec| !spec.is_empty()).collect();
    match specs.as_slice() {
        [] => format!("`{name}`"),
        [one] => format!("`{name} {}`", clip(one)),
        [first, second] => format!("`{name} {}` or `{}`", clip(first), clip(second)),
        [first, second, third] => format!("`{name} {}`, `{}` or `{}`", clip(first), clip(second), clip(third)),
        // The order is newest first.
        [first, .., last] => format!("`{name} {}` … `{}`", clip(first), clip(last)),
    }
}

/// `2.4.0`, `2.4.0, 2.5.1`, `2.4.0 to 2.12.0`.
pub(super) fn versions(set: &BTreeSet<Version>) -> String {
    match (set.len(), set.first(), set.last()) {
        (0, ..) | (_, None, _) | (_, _, None) => String::new(),
        (1..=3, ..) => set.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        (_, Some(first), Some(last)) => format!("{first} to {last}"),
    }
}

/// `a`, `b` and `c`; more than `limit` are counted.
pub(super) fn list(names: &[String], limit: usize) -> String {
    let shown: Vec<String> = names.iter().take(limit).map(|name| format!("`{name}`")).collect();
    let more = names.len().saturating_sub(limit);
    match (shown.as_slice(), more) {
        ([], _) => String::new(),
        ([one], 0) => one.clone(),
        ([head @ .., last], 0) => format!("{} and {last}", head.join(", ")),
        (all, more) => format!("{} and {more} more", all.join(", ")),
    }
}

/// `a`, `b` or `c`: as [`list`], for a choice.
pub(super) fn either(names: &[String], limit: usize) -> String {
    let shown: Vec<String> = names.iter().take(limit).map(|name| format!("`{name}`")).collect();
    match shown.as_slice() {
        [] => String::new(),
        [one] => one.clone(),
        [head @ .., last] => format!("{} or {last}", head.join(", ")),
    }
}

fn is(spec: &MatchSpec, name: &str) -> bool {
    spec.name.as_exact().is_some_and(|exact| exact.as_normalized() == name)
}

/// Version and build of a spec, without name and channel.
pub(super) fn rest_of(spec: &MatchSpec) -> String {
    let mut rest = spec.version.as_ref().map(ToString::to_string).unwrap_or_default();
    if rest == "*" {
        rest.clear();
    }
    if let Some(build) = &spec.build {
        let build = build.to_string();
        if build != "*" {
            rest = if rest.is_empty() { format!("* {build}") } else { format!("{rest} {build}") };
        }
    }
    if let Some(number) = &spec.build_number {
        rest.push_str(&format!("[build_number={number}]"));
    }
    rest
}

/// A request as shown to people: name, version, build.
pub(super) fn text_of(spec: &MatchSpec) -> String {
    let name = spec.name.as_exact().map_or_else(|| spec.name.to_string(), |name| name.as_normalized().to_owned());
    let rest = rest_of(spec);
    if rest.is_empty() { name } else { format!("{name} {rest}") }
}

/// What a missing virtual package means.
fn absent(name: &str, intent: GpuIntent) -> String {
    match name {
        "__cuda" if intent == GpuIntent::None => "which `--gpu none` removes".into(),
        "__cuda" => "which this machine does not have: no CUDA driver was found or assumed".into(),
        "__glibc" => "which only Linux with the GNU C library has".into(),
        "__linux" | "__unix" | "__osx" | "__win" => "which the platform solved for is not".into(),
        _ => "which this machine does not have".into(),
    }
}

fn leaf_text(leaf: &Leaf, has_steps: bool, intent: GpuIntent) -> String {
    match leaf {
        Leaf::NoVirtual { name } => absent(name, intent),
        Leaf::VirtualVersion { name, has } => match name.as_str() {
            "__cuda" => format!("but the driver allows only CUDA {has}"),
            "__glibc" => format!("but this machine has glibc {has}"),
            "__archspec" => "but this processor is another one".into(),
            "__osx" => format!("but this is macOS {has}"),
            _ => format!("but this machine has `{name} {has}`"),
        },
        Leaf::Unknown { .. } => "which no channel of this request has".into(),
        Leaf::NoMatch { .. } => "of which no build exists".into(),
        Leaf::Request { spec } if !has_steps => format!("ruled out by the request `{}`", clip(spec)),
        Leaf::Pinned { spec, source } if !has_steps => format!("ruled out: `{}` is set by {}", clip(spec), clip(source)),
        Leaf::Request { spec } => format!("but the request is `{}`", clip(spec)),
        Leaf::Pinned { spec, source } => format!("but `{}` is set by {}", clip(spec), clip(source)),
        Leaf::TooNew { .. } if has_steps => "which is newer than `--exclude-newer` allows".into(),
        Leaf::TooNew { .. } => "newer than `--exclude-newer` allows".into(),
        Leaf::Priority { used, .. } if has_steps => format!("but strict channel priority allows that name only from `{used}`"),
        Leaf::Priority { used, .. } => format!("hidden: strict channel priority allows this name only from `{used}`"),
        Leaf::Channel { wanted, .. } if has_steps => format!("but that name is requested from `{wanted}`"),
        Leaf::Channel { wanted, .. } => format!("in another channel than the requested `{wanted}`"),
        Leaf::Demanded { by, spec } if !has_steps => format!("ruled out: `{by}` needs `{}`", clip(spec)),
        Leaf::Demanded { by, spec } => format!("but `{by}` needs `{}`", clip(spec)),
        Leaf::Forbidden { .. } => "and nothing of it that fits is left".into(),
        Leaf::Deep if has_steps => "which leads too far to show".into(),
        Leaf::Deep => "ruled out by a conflict too far away to show".into(),
    }
}

impl Group {
    fn line(&self, intent: GpuIntent) -> String {
        let shown = versions(&self.versions);
        let mut line = format!("`{}`{}{shown}", self.name, if shown.is_empty() { "" } else { " " });
        if self.builds > 1 {
            line.push_str(&format!(" ({} builds)", self.builds));
        }
        let verb = if self.builds > 1 { "need" } else { "needs" };
        let skipped = self.steps.len().saturating_sub(STEPS);
        for (index, (name, specs)) in self.steps.iter().enumerate() {
            let forbids = index + 1 == self.steps.len() && matches!(self.leaf, Leaf::Forbidden { .. });
            let verb = if index == 0 { verb } else { "needs" };
            let verb = if forbids { "allows only" } else { verb };
            if skipped > 0 && index == STEPS - 1 {
                line.push_str(&format!(", which after {skipped} more {}", if skipped == 1 { "step" } else { "steps" }));
            }
            if skipped > 0 && index >= STEPS - 1 && index + 1 < self.steps.len() {
                continue;
            }
            line.push_str(&match index {
                0 => format!(" {verb} {}", named(name, specs)),
                _ if skipped > 0 && index + 1 == self.steps.len() => format!(" {verb} {}", named(name, specs)),
                _ => format!(", which {verb} {}", named(name, specs)),
            });
        }
        line.push_str(match (self.steps.is_empty(), self.builds > 1) {
            (false, _) => ", ",
            (true, false) => " is ",
            (true, true) => " are ",
        });
        line.push_str(&leaf_text(&self.leaf, !self.steps.is_empty(), intent));
        line
    }
}

/// Lines of groups, the most frequent reasons first where there are too many.
fn lines(groups: &[Group], intent: GpuIntent) -> Vec<String> {
    let mut lines: Vec<String> = groups.iter().take(GROUPS).map(|group| group.line(intent)).collect();
    let rest = groups.get(GROUPS..).unwrap_or_default();
    if !rest.is_empty() {
        let builds: usize = rest.iter().map(|group| group.builds).sum();
        lines.push(format!("{builds} more builds fail for {} other reasons", rest.len()));
    }
    lines
}

/// What an explanation found, for the hints.
pub(super) struct Finding {
    pub message: String,
    pub causes: Vec<String>,
    pub leaves: Vec<Leaf>,
    /// The request at fault, where it is one.
    pub request: Option<Rc<Dep>>,
}

/// Builds the error for an unsolvable plan. `text` is what the solver said.
pub(super) fn explain(problem: &Problem<'_>, plan: &Plan, text: &str) -> Error {
    let (finding, hints) = {
        let mut facts = Facts::new(problem, plan);
        let finding = find(&mut facts, text);
        let hints = hints::hints(&mut facts, &finding);
        (finding, hints)
    };
    let mut error = Error::new(Kind::Unsatisfiable, finding.message);
    if let Some(request) = &finding.request
        && let Some(name) = request.spec.name.as_exact()
    {
        // A record left out as faulty may be the one that was meant.
        let file = format!("`{}-", name.as_normalized());
        for warning in problem.warnings.iter().filter(|warning| warning.starts_with(&file)).take(3) {
            error = error.because(warning);
        }
    }
    for cause in finding.causes {
        error = error.because(cause);
    }
    error.hints_from(hints)
}

/// The reasons, without hints: for `--gpu` and others that prove something by a run that fails.
pub(super) fn reasons(problem: &Problem<'_>, plan: &Plan, text: &str) -> Finding {
    let mut facts = Facts::new(problem, plan);
    find(&mut facts, text)
}

fn find(facts: &mut Facts<'_, '_>, text: &str) -> Finding {
    // A request that matches nothing at all says everything.
    if let Some(finding) = all_hopeless(facts) {
        return finding;
    }
    let failure = facts.eliminate(false).or_else(|| facts.eliminate(true));
    match failure {
        Some(Failure::Request(root)) => {
            let intent = facts.problem.request.gpu;
            // Candidates another request for the same name rules out say less than the rest.
            let groups = group(facts, root.entry, &root.candidates);
            let telling: Vec<&Group> = groups.iter().filter(|group| !group.steps.is_empty()).collect();
            let leaves = groups.iter().map(|group| group.leaf.clone()).collect();
            let message = format!("no build of `{}` can be used here", root.text);
            let causes = if telling.is_empty() { lines(&groups, intent) } else { lines(&order_groups(groups), intent) };
            Finding { message, causes, leaves, request: Some(root) }
        }
        Some(Failure::Between(entry)) => {
            let intent = facts.problem.request.gpu;
            let all: Vec<usize> = (0..facts.entries[entry].candidates.len()).collect();
            let groups = order_groups(group(facts, entry, &all));
            let mut wanted: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
            for candidate in &facts.entries[entry].candidates {
                match &candidate.dead {
                    Some(Reason::Demanded { by, dep }) => {
                        wanted.entry(facts.entries[*by].name.clone()).or_default().insert(dep.text.clone());
                    }
                    Some(Reason::NotRequested { spec }) => {
                        wanted.entry(String::new()).or_default().insert(spec.clone());
                    }
                    _ => {}
                }
            }
            let mut causes = Vec::new();
            let mut sides = Vec::new();
            for (by, specs) in &wanted {
                let specs: Vec<String> = specs.iter().cloned().collect();
                if by.is_empty() {
                    sides.push("the request".to_owned());
                    causes.push(format!("the request is {}", list(&specs, 3)));
                } else {
                    sides.push(format!("`{by}`"));
                    causes.push(format!("{}`{by}` needs {}", facts.needed_through(by), list(&specs, 3)));
                }
            }
            let name = facts.entries[entry].name.clone();
            let message = match sides.as_slice() {
                [] => format!("nothing of `{name}` is left that all needed packages accept"),
                [one] => format!("{one} needs a `{name}` that cannot be used here"),
                [head @ .., last] => format!("{} and {last} need different builds of `{name}`", head.join(", ")),
            };
            let leaves: Vec<Leaf> = groups.iter().map(|group| group.leaf.clone()).collect();
            let others: Vec<Group> = groups
                .into_iter()
                .filter(|group| !matches!(group.leaf, Leaf::Demanded { .. } | Leaf::Request { .. }) || !group.steps.is_empty())
                .collect();
            causes.extend(lines(&others, intent));
            Finding { message, causes, leaves, request: None }
        }
        None => searched(facts, text),
    }
}

impl Facts<'_, '_> {
    /// `` `x`, requested, `` or nothing: how a demanding package relates to the request.
    fn needed_through(&self, name: &str) -> &'static str {
        if self.roots.iter().any(|root| self.entries[root.entry].name == name) { "the requested " } else { "" }
    }
}

/// Those that say most first: what the machine lacks; then what the newest builds fail for; then builds for another
/// Python, which there are of nearly everything; last what another channel or request hides altogether.
fn order_groups(mut groups: Vec<Group>) -> Vec<Group> {
    let rank = |group: &Group| match &group.leaf {
        Leaf::NoVirtual { .. } | Leaf::VirtualVersion { .. } => 0,
        _ if group.steps.is_empty() => 3,
        Leaf::Request { spec } if spec.starts_with("python ") && group.steps.len() <= 2 => 2,
        _ => 1,
    };
    groups.sort_by(|a, b| rank(a).cmp(&rank(b)).then_with(|| b.versions.last().cmp(&a.versions.last())).then(b.builds.cmp(&a.builds)));
    groups
}

/// Every request that nothing matches, told at once; names that no channel has come first.
fn all_hopeless(facts: &Facts<'_, '_>) -> Option<Finding> {
    let mut roots: Vec<Rc<Dep>> = Vec::new();
    for root in facts.roots.iter().filter(|root| root.candidates.is_empty()) {
        if !roots.iter().any(|had| had.text == root.text) {
            roots.push(root.clone());
        }
    }
    let nowhere = |root: &Dep| facts.entries[root.entry].candidates.is_empty() && !facts.entries[root.entry].name.starts_with("__");
    let mut unknown: Vec<String> = Vec::new();
    for root in roots.iter().filter(|root| nowhere(root)) {
        let name = &facts.entries[root.entry].name;
        if !unknown.contains(name) {
            unknown.push(name.clone());
        }
    }
    roots.sort_by_key(|root| !nowhere(root));
    let mut findings = roots.iter().map(|root| hopeless(facts, root));
    let mut first = findings.next()?;
    if unknown.len() > 1 {
        first.message = format!("no packages {} {}", list(&unknown, 20), facts.place());
    }
    for (other, root) in findings.zip(&roots[1..]) {
        if nowhere(root) {
            if !first.leaves.contains(&other.leaves[0]) {
                first.leaves.extend(other.leaves);
            }
        } else {
            first.causes.push(format!("also, {}", other.message));
            first.causes.extend(other.causes);
            first.leaves.extend(other.leaves);
        }
    }
    Some(first)
}

impl Facts<'_, '_> {
    /// Where was looked: the channels and the subdir.
    fn place(&self) -> String {
        let request = self.problem.request;
        let channels = if request.channels.is_empty() { "any channel".to_owned() } else { list(&request.channels, 4) };
        format!("in {channels} for {}", request.target.subdir)
    }
}

/// A request nothing matches.
fn hopeless(facts: &Facts<'_, '_>, root: &Rc<Dep>) -> Finding {
    let entry = &facts.entries[root.entry];
    let name = &entry.name;
    let place = facts.place();
    if entry.candidates.is_empty() {
        let leaf = if name.starts_with("__") { Leaf::NoVirtual { name: name.clone() } } else { Leaf::Unknown { name: name.clone() } };
        let message = if name.starts_with("__") {
            format!("the request is `{}`, {}", root.text, absent(name, facts.problem.request.gpu))
        } else {
            format!("no package `{name}` {place}")
        };
        return Finding { message, causes: Vec::new(), leaves: vec![leaf], request: Some(root.clone()) };
    }
    if let Some(virt) = entry.candidates.iter().find_map(|candidate| candidate.virt.as_ref()) {
        let leaf = Leaf::VirtualVersion { name: name.clone(), has: virt.version.to_string() };
        let message = format!("the request is `{}`, {}", root.text, leaf_text(&leaf, false, facts.problem.request.gpu));
        return Finding { message, causes: Vec::new(), leaves: vec![leaf], request: Some(root.clone()) };
    }
    let of_version: Vec<&Candidate<'_>> = entry
        .candidates
        .iter()
        .filter(|candidate| {
            root.spec.version.as_ref().is_none_or(|wanted| candidate.version().is_some_and(|version| wanted.matches(version)))
        })
        .collect();
    let message = format!("no build of `{}` {place}", root.text);
    let mut causes = Vec::new();
    if of_version.is_empty() {
        let all: BTreeSet<Version> = entry.candidates.iter().filter_map(|candidate| candidate.version().cloned()).collect();
        causes.push(format!("the channels have `{name}` {}", versions(&all)));
    } else {
        let builds: BTreeSet<String> = of_version
            .iter()
            .filter_map(|candidate| candidate.record)
            .map(|record| record.package_record.build.as_str().to_owned())
            .collect();
        let newest: Vec<String> = of_version
            .iter()
            .take(40)
            .filter_map(|candidate| candidate.record)
            .map(|record| record.package_record.build.as_str().to_owned())
            .fold(Vec::new(), |mut list, build| {
                if !list.contains(&build) {
                    list.push(build);
                }
                list
            });
        let which = if root.spec.version.is_some() { "the version" } else { "the package" };
        causes.push(match newest.as_slice() {
            [one] => format!("{which} is there, but its only build, `{one}`, does not fit"),
            [_, _, _, _, ..] => {
                format!("{which} is there, but none of its {} builds fits; the newest are {}", builds.len(), list(&newest[..3], 3))
            }
            few => format!("{which} is there, but none of its builds fits: {}", list(few, 3)),
        });
    }
    Finding { message, causes, leaves: vec![Leaf::NoMatch { name: name.clone() }], request: Some(root.clone()) }
}

/// The smallest set of requests in conflict, by leaving out one after the other, and the solver's text condensed.
fn searched(facts: &Facts<'_, '_>, text: &str) -> Finding {
    let started = Instant::now();
    let mut kept: Vec<MatchSpec> = facts.plan.specs.clone();
    let mut position = 0;
    let mut complete = true;
    while position < kept.len() {
        if started.elapsed() > SEARCH {
            complete = false;
            break;
        }
        let mut plan = facts.plan.clone();
        plan.specs = kept.iter().enumerate().filter(|(index, _)| *index != position).map(|(_, spec)| spec.clone()).collect();
        plan.timeout = Some(SEARCH);
        match facts.problem.run(&plan) {
            // Still unsolvable without it: it has no part in this.
            Ok(Verdict::Unsolvable(_)) => kept = plan.specs,
            _ => position += 1,
        }
    }
    let names: Vec<String> = kept.iter().map(text_of).collect();
    let message = match (names.len(), complete) {
        (0, _) => "the machine itself rules out every solution".to_owned(),
        (1, _) => format!("no build of `{}` can be used here", names[0]),
        (_, true) => format!("{} cannot be installed together", list(&names, 6)),
        (_, false) => format!("no solution has all of {}", list(&names, 6)),
    };
    Finding { message, causes: condense(text), leaves: Vec::new(), request: None }
}

/// The solver's own tree, shortened: repeated lines once, at most twelve, no deeper than four.
fn condense(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut dropped = 0;
    for line in text.lines() {
        let body = line.trim_start_matches(|c: char| c.is_whitespace() || "│├└╰─".contains(c));
        let depth = (line.chars().count() - body.chars().count()) / 3;
        if body.is_empty() || body.starts_with("The following packages are incompatible") {
            continue;
        }
        if depth > 4 || lines.len() >= 12 || !seen.insert(body.to_owned()) {
            dropped += 1;
            continue;
        }
        lines.push(format!("{}{}", "  ".repeat(depth.saturating_sub(1)), clip(body.trim_end_matches('.'))));
    }
    if dropped > 0 {
        lines.push(format!("{dropped} more lines of this kind"));
    }
    // One cause with its lines below each other: the order carries the meaning.
    if lines.is_empty() { Vec::new() } else { vec![lines.join("\n")] }
}

impl Facts<'_, '_> {
    /// Every dependency on `name` that was met so far.
    pub(super) fn each_match_of(&self, name: &str, mut visit: impl FnMut(&MatchSpec)) {
        for dep in self.deps.values().flatten() {
            if self.entries[dep.entry].name == name {
                visit(&dep.spec);
            }
        }
    }

    /// Every version asked of `name` that was met so far.
    pub(super) fn each_spec_of(&self, name: &str, mut visit: impl FnMut(&rattler_conda_types::VersionSpec)) {
        self.each_match_of(name, |spec| {
            if let Some(version) = &spec.version {
                visit(version);
            }
        });
    }

    /// Dates of requested packages hidden by the cutoff.
    pub(super) fn dates_hidden(&self) -> Vec<jiff::Timestamp> {
        self.roots
            .iter()
            .flat_map(|root| root.candidates.iter().map(|&index| &self.entries[root.entry].candidates[index]))
            .filter(|candidate| matches!(candidate.dead, Some(Reason::TooNew)))
            .filter_map(|candidate| candidate.record)
            .filter_map(|record| record.package_record.indexed_timestamp.or(record.package_record.timestamp))
            .map(|stamp| stamp.jiff_timestamp())
            .collect()
    }
}
