//! Request, target and repodata to a set of records, and the explanation of why there is none.
//!
//! [`solve`] is synchronous work for one core: call it from `spawn_blocking`. It never writes to the terminal and
//! touches no file. The answer for a request is deterministic: same request and records, same records, texts and order.
//! Everything is described for users in `docs/solving.md`.

/// One run of the solver over the candidates: priorities, pins, exclusions.
mod engine;
/// Why there is no solution: facts about the records, and the tree made of them.
mod explain;
/// Which build, CUDA or CPU, the solution holds, and why.
pub mod gpu;
/// What to try next, each proven by another run of the solver.
mod hints;
/// Things in a request or a solution that are probably not what the user wants.
pub mod lint;
/// The order in which records are listed and linked.
mod order;
/// Driver against toolkit, card against toolkit, before anything is installed.
pub mod preflight;
/// Dependency paths from what was requested to a package.
mod why;

#[cfg(test)]
mod real_tests;
#[cfg(test)]
mod synthetic_tests;
#[cfg(test)]
pub(crate) mod testing;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rattler_conda_types::{GenericVirtualPackage, MatchSpec, PackageName, ParseMatchSpecOptions, RepoDataRecord, Subdir};
use rattler_repodata_gateway::RepoData;

use crate::error::{Error, Kind, Place, Result};
use crate::platform::{GpuIntent, Provenance, Target};

pub use gpu::{GpuOutcome, GpuPackage, GpuVariant};
pub use lint::{Level, Lint};
pub use order::topological;
pub use rattler_solve::CancellationToken;
pub use why::{Graph, Package, Source, Step, Why, why};

/// How channels are ranked against each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PriorityChoice {
    /// Strict; if that cannot be solved and flexible can, flexible, said loudly and recorded.
    #[default]
    Auto,
    /// A package comes only from the first channel that has its name.
    Strict,
    /// Earlier channels first, whatever the version; later ones where the earlier cannot serve.
    Flexible,
    /// The highest version wins, whatever the channel.
    Disabled,
}

impl fmt::Display for PriorityChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PriorityChoice::Auto => "auto",
            PriorityChoice::Strict => "strict",
            PriorityChoice::Flexible => "flexible",
            PriorityChoice::Disabled => "disabled",
        })
    }
}

/// What to do with [`Request::locked`], the records of a lock or of an installed environment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Favor {
    /// Keep each as it is where the request allows.
    #[default]
    Locked,
    /// Keep all but these, which may move to their newest.
    AllBut(BTreeSet<PackageName>),
    /// Disregard them.
    Newest,
}

/// A constraint with the name of where it comes from, shown when it is the reason for a failure.
#[derive(Debug, Clone)]
pub struct PinnedSpec {
    /// What may be installed under this name; it does not ask for the package.
    pub spec: MatchSpec,
    /// For example `conda-meta/pinned line 3` or `pinned_packages of /home/u/.condarc`.
    pub source: String,
}

/// What a failed solve may ask about the world outside the loaded records. Every answer only feeds a hint, so "nothing
/// known" (the defaults) is always a fair answer. Answers must be quick; they are asked once or twice per failure.
pub trait Lookup: Send + Sync {
    /// All package names of the requested channels and subdirs (for misspelt names).
    fn names(&self) -> Vec<String> {
        Vec::new()
    }
    /// Other known channels that have a package of this name, best first, as one would write them after `-c`.
    fn other_channels(&self, _name: &str) -> Vec<String> {
        Vec::new()
    }
    /// Other subdirs of the requested channels that have a package of this name.
    fn other_subdirs(&self, _name: &str) -> Vec<Subdir> {
        Vec::new()
    }
}

/// What to solve.
#[derive(Clone)]
pub struct Request {
    /// What must be there. Every spec names exactly one package.
    pub specs: Vec<MatchSpec>,
    /// What must hold for a package if it gets in at all.
    pub constraints: Vec<MatchSpec>,
    /// As `constraints`, with a source to name in errors.
    pub pinned_specs: Vec<PinnedSpec>,
    /// Records that cannot change if their name is needed.
    pub pins: Vec<RepoDataRecord>,
    /// Records of a lock or of the present environment: see `update`.
    pub locked: Vec<RepoDataRecord>,
    /// The channels as shown to people, in priority order.
    pub channels: Vec<String>,
    /// Those of them that nobody named.
    pub appended: Vec<String>,
    /// How channels are ranked.
    pub priority: PriorityChoice,
    /// The machine solved for.
    pub target: Target,
    /// What to do about the GPU.
    pub gpu: GpuIntent,
    /// Nothing published after this moment.
    pub exclude_newer: Option<jiff::Timestamp>,
    /// What to do with `locked`.
    pub update: Favor,
    /// Limit for each run of the solver; explanations get as much again at most.
    pub timeout: Option<Duration>,
    /// Set from another thread to stop.
    pub cancel: Option<CancellationToken>,
    /// Lints not to report, by code.
    pub silence: BTreeSet<String>,
    /// Version of the kernel driver (`550.54.14`) for the preflight, in place of the one the target detected.
    pub driver_version: Option<String>,
    /// Names of projects in the `pip:` section, normalised, for the lints.
    pub pip_names: Vec<String>,
    /// Knowledge for hints.
    pub lookup: Option<Arc<dyn Lookup>>,
}

impl Request {
    /// A request with defaults for everything but its target.
    pub fn new(target: Target) -> Self {
        Request {
            specs: Vec::new(),
            constraints: Vec::new(),
            pinned_specs: Vec::new(),
            pins: Vec::new(),
            locked: Vec::new(),
            channels: Vec::new(),
            appended: Vec::new(),
            priority: PriorityChoice::default(),
            target,
            gpu: GpuIntent::default(),
            exclude_newer: None,
            update: Favor::default(),
            timeout: None,
            cancel: None,
            silence: BTreeSet::new(),
            driver_version: None,
            pip_names: Vec::new(),
            lookup: None,
        }
    }

    /// The version of the kernel driver: as given, or as detected where `__cuda` itself was detected. A driver that was
    /// assumed has only a CUDA version.
    fn driver(&self) -> Option<&str> {
        let detected = self.gpu != GpuIntent::None && self.target.cuda().is_some_and(|cuda| cuda.provenance == Provenance::Detected);
        let routes = || {
            ["kernel", "nvml", "nvidia-smi", "libcuda"]
                .into_iter()
                .filter_map(|name| self.target.gpu.routes.iter().find(|route| route.name == name))
        };
        self.driver_version.as_deref().or_else(|| if detected { routes().find_map(|route| route.driver.as_deref()) } else { None })
    }

    /// The virtual packages of the target after the GPU intent: `none` removes every CUDA one.
    pub fn virtual_packages(&self) -> Vec<GenericVirtualPackage> {
        let mut list = self.target.virtual_package_list();
        if self.gpu == GpuIntent::None {
            list.retain(|package| !matches!(package.name.as_normalized(), "__cuda" | "__cuda_arch"));
        }
        list
    }
}

/// The records of one channel and subdir. A borrowed view of what the gateway returns, or of anything else.
#[derive(Debug, Clone, Default)]
pub struct ChannelRecords<'a> {
    /// The records, in the order of the repodata.
    pub records: Vec<&'a RepoDataRecord>,
    /// The multichannel (`defaults`) the channel was asked for through.
    pub multi_channel: Option<&'a str>,
}

impl<'a> From<&'a RepoData> for ChannelRecords<'a> {
    fn from(data: &'a RepoData) -> Self {
        // Names that begin with `__` are the machine's to say (CEP 30): a channel that lists `__cuda` decides nothing.
        let records = data.iter().filter(|record| !record.package_record.name.as_normalized().starts_with("__")).collect();
        ChannelRecords { records, multi_channel: data.multi_channel() }
    }
}

/// What was solved.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Solution {
    /// The records, each after what it depends on; ties by name.
    pub records: Vec<RepoDataRecord>,
    /// The channel priority that gave the solution: strict, flexible or disabled.
    pub priority_used: PriorityChoice,
    /// Whether `auto` had to leave strict.
    pub priority_fell_back: bool,
    /// CUDA or CPU, and why.
    pub gpu: GpuOutcome,
    /// Things that are probably not what the user wants.
    pub lints: Vec<Lint>,
    /// Driver and card against the toolkit of the solution.
    pub preflight: Vec<Lint>,
    /// Optional features (extras) that were activated, by package name.
    pub features: std::collections::BTreeMap<String, Vec<String>>,
    /// Faults in the repodata that were stepped around.
    pub warnings: Vec<String>,
    /// The virtual packages that were given to the solver.
    pub virtual_packages: Vec<GenericVirtualPackage>,
    /// Milliseconds of the run that found the solution.
    #[serde(skip)]
    pub solve_ms: u128,
}

/// Solves `request` over what the gateway returned, in channel priority order.
///
/// # Errors
/// [`Kind::Unsatisfiable`] with a short tree as causes and hints; [`Kind::Usage`] for a spec that names no single
/// package; [`Kind::Interrupted`] when cancelled; [`Kind::Failure`] for a timeout.
pub fn solve(request: &Request, repodata: &[RepoData]) -> Result<Solution> {
    let views: Vec<ChannelRecords<'_>> = repodata.iter().map(ChannelRecords::from).collect();
    solve_records(request, &views)
}

/// [`solve`] over borrowed records.
///
/// # Errors
/// As [`solve`].
pub fn solve_records(request: &Request, repodata: &[ChannelRecords<'_>]) -> Result<Solution> {
    let problem = engine::Problem::new(request, repodata)?;
    let started = Instant::now();
    let first = match request.priority {
        PriorityChoice::Auto => PriorityChoice::Strict,
        chosen => chosen,
    };
    let mut used = first;
    let mut verdict = problem.run(&problem.plan(first))?;
    if let (engine::Verdict::Unsolvable(_), PriorityChoice::Auto) = (&verdict, request.priority)
        && problem.several_tiers()
        && let solved @ engine::Verdict::Solved(_) = problem.run(&problem.plan(PriorityChoice::Flexible))?
    {
        used = PriorityChoice::Flexible;
        verdict = solved;
    }
    let solve_ms = started.elapsed().as_millis();
    let found = match verdict {
        engine::Verdict::Solved(found) => found,
        engine::Verdict::Unsolvable(text) => return Err(explain::explain(&problem, &problem.plan(first), &text)),
    };

    let mut plan = problem.plan(used);
    let (found, gpu) = gpu::settle(&problem, &mut plan, found)?;
    let records = order::topological(found.records);
    let mut lints = lint::check(request, &records);
    if used != first {
        lints.insert(0, lint::priority_fell_back(&problem, &records));
    }
    let judge = |records: &[RepoDataRecord]| {
        preflight::check(&preflight::Facts { records, cuda: plan.cuda(), cuda_arch: plan.cuda_arch(), driver: request.driver() })
    };
    let mut preflight: Vec<Lint> = judge(&records).into_iter().filter(|lint| !request.silence.contains(lint.code)).collect();
    // A hint to choose another toolkit is given only where the request leaves the choice, and where it solves and helps.
    let chosen =
        request.specs.iter().chain(&request.constraints).chain(request.pinned_specs.iter().map(|pinned| &pinned.spec)).any(|spec| {
            spec.name.as_exact().is_some_and(|name| name.as_normalized() == "cuda-version")
                && (spec.version.is_some() || spec.build.is_some())
        });
    let prover = hints::Prover::new(&problem);
    let packages = gpu::packages(&records);
    let had_cuda = packages.iter().any(|package| package.variant == GpuVariant::Cuda);
    preflight::retain_proven(&mut preflight, |text, code| {
        let Ok(spec) = MatchSpec::from_str(text, ParseMatchSpecOptions::lenient()) else { return false };
        if chosen {
            return false;
        }
        // An exact fit is no advice where it means an older framework, and most often this is seen without a run of the solver.
        let keeps = code == preflight::MINOR_COMPATIBILITY;
        if keeps && !gpu::same_versions_allow(&problem, &packages, &spec) {
            return false;
        }
        let mut with = plan.clone();
        with.specs.push(spec);
        prover.solves(&with).is_some_and(|found| {
            let then = gpu::packages(&found.records);
            judge(&found.records).iter().all(|lint| lint.code != code)
                && (!had_cuda || then.iter().any(|package| package.variant == GpuVariant::Cuda))
                && (!keeps || packages.iter().all(|had| then.iter().any(|new| new.name == had.name && new.version == had.version)))
        })
    });
    lints.extend(problem.lints(&records));
    if request.gpu == GpuIntent::Require && gpu.variant == GpuVariant::None {
        lints.push(Lint {
            code: "gpu-require-idle",
            level: Level::Warning,
            message: "`--gpu require` was given, and no package of this solution has CUDA and CPU builds to choose from".into(),
            hints: vec!["ask for a framework (`pytorch-gpu`, `jaxlib`), or check the GPU of the finished environment".into()],
            packages: Vec::new(),
        });
    }
    lints.extend(lint::cuda_despite_none(request, &gpu, &records));
    lints.retain(|lint| !request.silence.contains(lint.code));
    if request.gpu == GpuIntent::Require
        && let Some(fatal) = preflight.iter().find(|lint| lint.level == Level::Error)
    {
        return Err(Error::new(Kind::Unsatisfiable, fatal.message.clone())
            .because("`--gpu require` asks for an environment that can use the GPU of this machine")
            .hints_from(fatal.hints.iter().cloned()));
    }
    Ok(Solution {
        records,
        priority_used: used,
        priority_fell_back: used != first,
        gpu,
        lints,
        preflight,
        features: found.features,
        warnings: problem.warnings.clone(),
        virtual_packages: plan.virtual_packages,
        solve_ms,
    })
}

/// Reads a `conda-meta/pinned` file: one match spec a line, `#` comments. `name` is how the file is called in errors.
///
/// # Errors
/// [`Kind::Usage`] with the place of the first line that is no match spec.
pub fn parse_pinned(text: &str, name: &str) -> Result<Vec<PinnedSpec>> {
    let mut pinned = Vec::new();
    let mut offset = 0;
    for (index, line) in text.split_inclusive('\n').enumerate() {
        let start = offset;
        offset += line.len();
        let body = line.split('#').next().unwrap_or("").trim();
        if body.is_empty() {
            continue;
        }
        let spec = MatchSpec::from_str(body, ParseMatchSpecOptions::lenient()).map_err(|error| {
            let at = start + (line.len() - line.trim_start().len());
            Error::usage(format!("`{body}` is not a match spec")).because(error).at(Place {
                name: name.into(),
                text: text.into(),
                offset: at,
                len: body.len(),
                label: "this pin".into(),
            })
        })?;
        pinned.push(PinnedSpec { spec, source: format!("{name} line {}", index + 1) });
    }
    Ok(pinned)
}
