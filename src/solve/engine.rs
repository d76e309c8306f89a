use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rattler_conda_types::{
    Channel, GenericVirtualPackage, MatchSpec, MatchSpecCondition, PackageName, ParseMatchSpecOptions, RepoDataRecord, RepodataRevision,
    Version,
};
use rattler_solve::{ChannelPriority, ExcludeNewer, SolveError, SolverImpl, SolverTask, TimestampPolicy, resolvo};
use url::Url;

use super::lint::{Level, Lint};
use super::{ChannelRecords, Favor, PinnedSpec, PriorityChoice, Request};
use crate::error::{Error, Kind, Result};

/// Faults in repodata are named one by one up to this many.
const WARNINGS: usize = 8;

/// How a dependency text of a record is to be read: as the solver reads it.
pub(super) fn record_options() -> ParseMatchSpecOptions {
    ParseMatchSpecOptions::lenient().with_repodata_revision(RepodataRevision::V3)
}

/// The request and its records after a check of both; every run of the solver starts from it.
pub(super) struct Problem<'a> {
    pub request: &'a Request,
    /// Records of one channel and subdir each, in priority order, without those that would crash the solver.
    pub tiers: Vec<ChannelRecords<'a>>,
    /// The specs with their channels made to agree with the records' channels.
    pub specs: Vec<MatchSpec>,
    /// All constraints, with where they come from.
    pub constraints: Vec<PinnedSpec>,
    pub warnings: Vec<String>,
}

/// Everything that can be varied between runs: what hints are proven with.
#[derive(Clone)]
pub(super) struct Plan {
    pub priority: PriorityChoice,
    pub specs: Vec<MatchSpec>,
    pub constraints: Vec<PinnedSpec>,
    pub virtual_packages: Vec<GenericVirtualPackage>,
    pub exclude_newer: Option<jiff::Timestamp>,
    /// Whether the request's locked records are favoured and its pins kept.
    pub pins: bool,
    pub timeout: Option<Duration>,
    /// Names of which only CUDA builds are allowed, each with who says so.
    pub cuda_only: Vec<(String, String)>,
}

impl Plan {
    fn version_of(&self, name: &str) -> Option<&Version> {
        self.virtual_packages.iter().find(|package| package.name.as_normalized() == name).map(|package| &package.version)
    }

    /// The CUDA version the driver allows, if there is a driver.
    pub fn cuda(&self) -> Option<&Version> {
        self.version_of("__cuda")
    }

    /// The least compute capability of the cards, if known.
    pub fn cuda_arch(&self) -> Option<&Version> {
        self.version_of("__cuda_arch")
    }

    /// The same plan on a machine that has `package`, in place of one of the same name.
    pub fn with_virtual(&self, package: GenericVirtualPackage) -> Plan {
        let mut plan = self.clone();
        plan.virtual_packages.retain(|had| had.name != package.name);
        plan.virtual_packages.push(package);
        plan
    }
}

/// What one run found.
pub(super) struct Found {
    pub records: Vec<RepoDataRecord>,
    pub features: BTreeMap<String, Vec<String>>,
}

pub(super) enum Verdict {
    Solved(Found),
    /// The solver's own words; the last resort of an explanation.
    Unsolvable(String),
}

impl<'a> Problem<'a> {
    /// Checks the request and the records.
    pub fn new(request: &'a Request, repodata: &[ChannelRecords<'a>]) -> Result<Self> {
        let mut warnings = Warnings::default();
        let mut readable: HashMap<&str, Text> = HashMap::new();
        let tiers: Vec<ChannelRecords<'a>> = repodata.iter().map(|tier| clean(tier, &mut readable, &mut warnings)).collect();

        let mut specs = Vec::with_capacity(request.specs.len());
        let mut channel_of: HashMap<&str, (&MatchSpec, String)> = HashMap::new();
        for spec in &request.specs {
            let name = exact_name(spec, "a request")?;
            if let Some(condition) = &spec.condition
                && !safe_condition(condition)
            {
                return Err(Error::usage(format!("`{spec}` has a condition inside a condition"))
                    .because("conditions can be joined by `and` and `or`, not nested"));
            }
            if let Some(channel) = &spec.channel {
                let wanted = channel.canonical_name();
                match channel_of.get(name.as_normalized()) {
                    Some((other, had)) if *had != wanted => {
                        return Err(Error::new(Kind::Unsatisfiable, format!("`{}` is requested from two channels", name.as_normalized()))
                            .because(format!("`{other}` and `{spec}` cannot both hold"))
                            .hint("name one channel for it"));
                    }
                    Some(_) => {}
                    None => {
                        channel_of.insert(name.as_normalized(), (spec, wanted));
                    }
                }
            }
            specs.push(agree_channel(spec, &tiers));
        }
        let mut constraints = Vec::new();
        for spec in &request.constraints {
            constraints.push(PinnedSpec { spec: spec.clone(), source: "a constraint of this request".into() });
        }
        constraints.extend(request.pinned_specs.iter().cloned());
        for pinned in &mut constraints {
            exact_name(&pinned.spec, &pinned.source)?;
            pinned.spec = agree_channel(&pinned.spec, &tiers);
        }
        Ok(Problem { request, tiers, specs, constraints, warnings: warnings.finish() })
    }

    /// The plan of the request itself.
    pub fn plan(&self, priority: PriorityChoice) -> Plan {
        Plan {
            priority,
            specs: self.specs.clone(),
            constraints: self.constraints.clone(),
            virtual_packages: self.request.virtual_packages(),
            exclude_newer: self.request.exclude_newer,
            pins: true,
            timeout: self.request.timeout,
            cuda_only: Vec::new(),
        }
    }

    /// Whether channel priority can make a difference.
    pub fn several_tiers(&self) -> bool {
        let mut first: Option<(Option<&str>, Option<&str>)> = None;
        for tier in self.tiers.iter().filter(|tier| !tier.records.is_empty()) {
            let key = tier_key(tier.multi_channel, tier.records[0]);
            match first {
                None => first = Some(key),
                Some(had) if had != key => return true,
                Some(_) => {}
            }
        }
        false
    }

    /// Runs the solver.
    ///
    /// # Errors
    /// Cancelled, out of time, or records the solver cannot handle.
    pub fn run(&self, plan: &Plan) -> Result<Verdict> {
        let started = Instant::now();
        let excluded = self.excluded(plan);
        let locked: Vec<&RepoDataRecord> = if !plan.pins {
            Vec::new()
        } else {
            match &self.request.update {
                Favor::Newest => Vec::new(),
                Favor::Locked => self.request.locked.iter().collect(),
                Favor::AllBut(names) => self.request.locked.iter().filter(|record| !names.contains(&record.package_record.name)).collect(),
            }
        };
        let available: Vec<resolvo::RepoData<'_>> =
            self.tiers.iter().map(|tier| resolvo::RepoData { records: tier.records.clone(), multi_channel: tier.multi_channel }).collect();
        let task = SolverTask {
            available_packages: available,
            locked_packages: locked,
            pinned_packages: if plan.pins { self.request.pins.iter().collect() } else { Vec::new() },
            virtual_packages: plan.virtual_packages.clone(),
            specs: plan.specs.clone(),
            constraints: plan.constraints.iter().map(|pinned| pinned.spec.clone()).collect(),
            timeout: plan.timeout,
            channel_priority: match plan.priority {
                PriorityChoice::Auto | PriorityChoice::Strict => ChannelPriority::Strict,
                PriorityChoice::Flexible => ChannelPriority::Flexible,
                PriorityChoice::Disabled => ChannelPriority::Disabled,
            },
            exclude_newer: plan.exclude_newer.map(cutoff),
            strategy: rattler_solve::SolveStrategy::Highest,
            dependency_overrides: Vec::new(),
            excluded_candidates: excluded,
            cancellation_token: self.request.cancel.clone(),
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| resolvo::Solver.solve(task)));
        match outcome {
            Ok(Ok(result)) => {
                let features = result
                    .extras
                    .into_iter()
                    .map(|(name, mut extras)| {
                        extras.sort();
                        (name.as_normalized().to_owned(), extras)
                    })
                    .collect();
                Ok(Verdict::Solved(Found { records: result.records, features }))
            }
            Ok(Err(SolveError::Unsolvable(texts))) => Ok(Verdict::Unsolvable(texts.join("\n"))),
            Ok(Err(SolveError::Cancelled)) => {
                if self.request.cancel.as_ref().is_some_and(rattler_solve::CancellationToken::is_cancelled) {
                    return Err(Error::new(Kind::Interrupted, "the solve was stopped"));
                }
                Err(Error::failure(format!(
                    "no solution was found within {:.1} s",
                    plan.timeout.unwrap_or_else(|| started.elapsed()).as_secs_f64()
                ))
                .because("the solver was stopped by its time limit; the request may or may not be satisfiable")
                .hint("name versions for the large packages (`python=3.12`, `pytorch=2.8`), or allow more time"))
            }
            Ok(Err(other)) => Err(Error::failure("the solver cannot handle these records").because(other)),
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
                Err(Error::failure("the solver gave up on these records")
                    .because(text.unwrap_or_else(|| "an inner check of the solver failed".into()))
                    .hint("a channel with malformed records can cause this: try with fewer channels"))
            }
        }
    }

    /// Candidates ruled out by what the solver itself does not look at: the subdir of a spec, the channel of a constraint.
    fn excluded(&self, plan: &Plan) -> HashMap<Url, Arc<str>> {
        let mut excluded = HashMap::new();
        let subdirs: Vec<(&PackageName, &str)> = plan
            .specs
            .iter()
            .chain(plan.constraints.iter().map(|pinned| &pinned.spec))
            .filter_map(|spec| Some((spec.name.as_exact()?, spec.subdir.as_deref()?)))
            .collect();
        let channels: Vec<(&PackageName, String, &str)> = plan
            .constraints
            .iter()
            .filter_map(|pinned| {
                Some((pinned.spec.name.as_exact()?, pinned.spec.channel.as_ref()?.canonical_name(), pinned.source.as_str()))
            })
            .collect();
        if subdirs.is_empty() && channels.is_empty() && plan.cuda_only.is_empty() {
            return excluded;
        }
        for record in self.tiers.iter().flat_map(|tier| &tier.records) {
            let name = &record.package_record.name;
            for (_, subdir) in subdirs.iter().filter(|(of, _)| *of == name) {
                if record.package_record.subdir != *subdir {
                    excluded.insert(record.url.clone(), Arc::from(format!("not in the requested subdir `{subdir}`")));
                }
            }
            if let Some((_, source)) = plan.cuda_only.iter().find(|(of, _)| of == name.as_normalized())
                && !super::gpu::is_cuda_build(record)
            {
                excluded.insert(record.url.clone(), Arc::from(format!("no CUDA build, as asked by {source}")));
            }
            for (_, channel, source) in channels.iter().filter(|(of, ..)| *of == name) {
                if record.channel.as_deref() != Some(channel) {
                    excluded.insert(record.url.clone(), Arc::from(format!("not from `{channel}`, the channel set by {source}")));
                }
            }
        }
        excluded
    }

    /// Lints that need the problem: packages without a date under `exclude_newer`.
    pub fn lints(&self, records: &[RepoDataRecord]) -> Vec<Lint> {
        let mut lints = Vec::new();
        if self.request.exclude_newer.is_some() {
            let undated: Vec<String> = records
                .iter()
                .filter(|record| record.package_record.indexed_timestamp.or(record.package_record.timestamp).is_none())
                .map(|record| record.package_record.name.as_normalized().to_owned())
                .collect();
            if !undated.is_empty() {
                lints.push(Lint {
                    code: "undated-package",
                    level: Level::Note,
                    message: format!(
                        "{} has no date in the repodata, so `--exclude-newer` lets it through",
                        super::explain::list(&undated, 4)
                    ),
                    hints: Vec::new(),
                    packages: undated,
                });
            }
        }
        lints
    }
}

/// The cutoff as the solver takes it. Old records (and about 2 % of conda-forge, `_openmp_mutex` among them) have no
/// date at all: they stay usable, and a lint names those that were chosen.
pub(super) fn cutoff(moment: jiff::Timestamp) -> ExcludeNewer {
    ExcludeNewer::from_datetime(moment).with_timestamp_policy(TimestampPolicy::AllowMissing)
}

/// What channel priority counts as one channel: a multichannel, or else the record's channel.
pub(super) fn tier_key<'r>(multi_channel: Option<&'r str>, record: &'r RepoDataRecord) -> (Option<&'r str>, Option<&'r str>) {
    match multi_channel {
        Some(name) => (Some(name), None),
        None => (None, record.channel.as_deref()),
    }
}

/// The one package a spec names.
fn exact_name<'s>(spec: &'s MatchSpec, what: &str) -> Result<&'s PackageName> {
    spec.name.as_exact().ok_or_else(|| {
        Error::usage(format!("`{spec}` names no single package"))
            .because(format!("{what} needs the exact name of a package"))
            .hint("write the name without `*` or `^…$`")
    })
}

/// `conda-forge::x` must also find a conda-forge that was given as a mirror URL or a folder: if no record of that name
/// comes from the spec's own channel, and exactly one channel's address ends in its name, that one is meant.
fn agree_channel(spec: &MatchSpec, tiers: &[ChannelRecords<'_>]) -> MatchSpec {
    let Some(channel) = &spec.channel else { return spec.clone() };
    let wanted = channel.canonical_name();
    let mut addresses: Vec<&str> = Vec::new();
    for tier in tiers {
        if tier.multi_channel.is_some() && tier.multi_channel == channel.name.as_deref() {
            return spec.clone();
        }
        // All records of one tier come from one channel.
        if let Some(address) = tier.records.first().and_then(|record| record.channel.as_deref()) {
            if address == wanted {
                return spec.clone();
            }
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
    }
    let Some(name) = channel.name.as_deref() else { return spec.clone() };
    let tail = format!("/{}", name.trim_matches('/'));
    let mut fitting = addresses.iter().filter(|address| address.trim_end_matches('/').ends_with(&tail));
    let (Some(address), None) = (fitting.next(), fitting.next()) else { return spec.clone() };
    let Ok(url) = Url::parse(address) else { return spec.clone() };
    let mut spec = spec.clone();
    let mut agreed = Channel::from_url(url);
    agreed.name = channel.name.clone();
    spec.channel = Some(Arc::new(agreed));
    spec
}

/// How a dependency text reads.
#[derive(Clone)]
enum Text {
    Good,
    /// The solver ignores the record.
    Unreadable(String),
    /// The solver would crash on the record.
    Unusable,
}

/// Sees without a parser that a text is a plain spec, as all but a few in a channel are: a name, then perhaps versions joined by `,` or `|`, then
/// perhaps a build. Says no wherever it is not sure.
fn plainly_good(text: &str) -> bool {
    let mut words = text.split(' ');
    let name = words.next().unwrap_or_default();
    let named = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-'))
        && name.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase() || byte == b'_');
    let version = |text: &str| {
        let bare = [">=", "<=", "==", "!=", ">", "<", ""].iter().find_map(|operator| text.strip_prefix(operator)).unwrap_or_default();
        // A star has a meaning of its own after some operators.
        let bare = if bare.len() == text.len() { bare.strip_suffix(".*").unwrap_or(bare) } else { bare };
        bare.split('.').all(|part| {
            let letters = part.trim_start_matches(|c: char| c.is_ascii_digit());
            part.len() > letters.len()
                && part.len() - letters.len() < 18
                && letters.trim_start_matches(|c: char| c.is_ascii_lowercase()).bytes().all(|byte| byte.is_ascii_digit())
                && letters.len() < 18
        })
    };
    named
        && words.next().is_none_or(|versions| versions == "*" || versions.split([',', '|']).all(version))
        && words.next().is_none_or(|build| {
            !build.is_empty()
                && !build.contains("**")
                && build.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'*'))
        })
        && words.next().is_none()
}

fn judge(text: &str) -> Text {
    if plainly_good(text) {
        return Text::Good;
    }
    match MatchSpec::from_str(text, record_options()) {
        Ok(spec) if spec.name.as_exact().is_none() => Text::Unusable,
        Ok(spec) => match &spec.condition {
            Some(condition) if !safe_condition(condition) => Text::Unusable,
            _ => Text::Good,
        },
        Err(error) => Text::Unreadable(error.to_string()),
    }
}

/// Whether every leaf is a plain spec that survives being written and read again, as the solver will do with it.
fn safe_condition(condition: &MatchSpecCondition) -> bool {
    match condition {
        MatchSpecCondition::MatchSpec(spec) => {
            spec.condition.is_none()
                && MatchSpec::from_str(&spec.to_string(), record_options())
                    .is_ok_and(|again| again.condition.is_none() && again.name.as_exact().is_some())
        }
        MatchSpecCondition::And(left, right) | MatchSpecCondition::Or(left, right) => safe_condition(left) && safe_condition(right),
    }
}

#[derive(Default)]
struct Warnings {
    texts: Vec<String>,
    more: usize,
}

impl Warnings {
    fn push(&mut self, text: String) {
        if self.texts.len() < WARNINGS { self.texts.push(text) } else { self.more += 1 }
    }

    fn finish(mut self) -> Vec<String> {
        if self.more > 0 {
            self.texts.push(format!("{} more records have faults of this kind", self.more));
        }
        self.texts
    }
}

/// Leaves out records that would stop or crash the solver and names every faulty one.
fn clean<'a>(tier: &ChannelRecords<'a>, readable: &mut HashMap<&'a str, Text>, warnings: &mut Warnings) -> ChannelRecords<'a> {
    let mut seen: HashMap<&rattler_conda_types::package::DistArchiveIdentifier, &'a RepoDataRecord> =
        HashMap::with_capacity(tier.records.len());
    let mut records = Vec::with_capacity(tier.records.len());
    for &record in &tier.records {
        let label = || format!("`{}` of `{}`", record.identifier, shown(record.channel.as_deref()));
        if let Some(first) = seen.get(&record.identifier) {
            if *first != record {
                warnings.push(format!("{} stands in the repodata twice with different contents; the first is used", label()));
            }
            continue;
        }
        seen.insert(&record.identifier, record);
        let package = &record.package_record;
        let mut usable = true;
        for text in package.depends.iter().chain(&package.constrains).chain(package.extra_depends.values().flatten()) {
            match readable.entry(text).or_insert_with(|| judge(text)) {
                Text::Good => {}
                Text::Unreadable(why) => {
                    warnings.push(format!("{} is left out: its dependency `{}` cannot be read: {}", label(), clip(text), clip(why)));
                    usable = false;
                    break;
                }
                Text::Unusable => {
                    warnings.push(format!("{} is left out: its dependency `{}` is of a kind the solver cannot take", label(), clip(text)));
                    usable = false;
                    break;
                }
            }
        }
        if usable {
            records.push(record);
        }
    }
    ChannelRecords { records, multi_channel: tier.multi_channel }
}

/// At most 120 characters of a text from outside, without control characters.
pub(super) fn clip(text: &str) -> String {
    let mut short: String = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).take(120).collect();
    if text.chars().nth(120).is_some() {
        short.push('…');
    }
    short
}

/// A channel's address for people: the well-known host and secrets left out.
pub(super) fn shown(channel: Option<&str>) -> String {
    let Some(text) = channel else { return "an unnamed channel".into() };
    let text = text.trim_end_matches('/');
    match text.strip_prefix("https://conda.anaconda.org/") {
        Some(name) if !name.starts_with("t/") => name.to_owned(),
        _ => match Url::parse(text) {
            Ok(url) => rattler_redaction::Redact::redact(url).to_string().trim_end_matches('/').to_owned(),
            Err(_) => text.to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn plain_specs_are_seen_without_a_parser() {
        for text in
            ["python", "python >=3.11,<3.12.0a0", "python_abi 3.11.* *_cp311", "__glibc >=2.17", "libblas 3.9.0|3.10.0 12_mkl", "x *"]
        {
            assert!(plainly_good(text), "{text}");
        }
        for text in [
            "",
            " x",
            "x  1",
            "x *.1",
            "x >=1.*",
            "x[build=1]",
            "x 1..2",
            "x >=",
            "x 1,",
            "*x",
            "c::x",
            "x 1 b c",
            "x; if y",
            "x 1+2",
            "X",
            "x 1 a**",
        ] {
            assert!(!plainly_good(text), "{text}");
        }
    }

    proptest! {
        /// What is waved through is what the parser takes for a plain spec of one package.
        #[test]
        fn what_is_waved_through_is_good(text in "[a-z_][a-z0-9_-]{0,5}( ((>=|<=|==|!=|>|<)?[0-9]{1,3}(\\.[0-9a-z]{1,5}){0,3}(\\.\\*)?[,|]?){0,3}( [a-z0-9_*]{0,6})?)?") {
            if plainly_good(&text) {
                let spec = MatchSpec::from_str(&text, record_options());
                prop_assert!(spec.as_ref().is_ok_and(|spec| spec.name.as_exact().is_some() && spec.condition.is_none()), "{text}: {spec:?}");
            }
        }
    }
}
