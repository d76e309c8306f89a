//! CUDA or CPU: which builds a solution holds, and why. Nothing about the GPU is decided silently: every solution carries
//! a [`GpuOutcome`], and where it says that another choice would have worked, the solver was run to see.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use rattler_conda_types::{MatchSpec, Matches as _, PackageName, ParseMatchSpecOptions, RepoDataRecord};

use super::engine::{Found, Plan, Problem, Verdict, shown};
use super::explain::{self, text_of};
use super::hints::{Prover, virtual_package};
use super::{PinnedSpec, Request};
use crate::error::{Error, Kind, Result};
use crate::platform::{GpuIntent, Provenance};

/// Well-known packages whose builds differ by CUDA or CPU; the first found gives the headline. Every other package whose
/// builds are of both kinds is found by its records: see [`all_packages`].
const FRAMEWORKS: &[&str] = &[
    "pytorch",
    "jaxlib",
    "tensorflow-base",
    "tensorflow",
    "libtorch",
    "torchvision",
    "libtorchvision",
    "torchaudio",
    "cupy-core",
    "cupy",
    "libxgboost",
    "py-xgboost",
    "xgboost",
    "lightgbm",
    "liblightgbm",
    "libfaiss",
    "faiss",
    "onnxruntime",
    "onnxruntime-cpp",
    "paddlepaddle",
    "mxnet",
    "libmxnet",
    "xformers",
    "flash-attn",
    "vllm",
    "bitsandbytes",
    "deepspeed",
    "pyg",
    "pytorch_scatter",
    "pytorch_sparse",
    "pytorch_cluster",
    "dgl",
    "libcudf",
    "cudf",
    "libcuml",
    "cuml",
    "openmm",
    "llama.cpp",
    "ctranslate2",
    "catboost",
    "magma",
    "libmagma",
];

/// Packages that carry the version of the CUDA toolkit, the run-time library itself first: `cuda-version` may be newer
/// where it is there for something else.
const TOOLKIT: &[&str] = &["cuda-cudart", "cudatoolkit", "pytorch-cuda", "cuda-version", "cuda-runtime", "cuda-toolkit"];

/// Dependencies that only CUDA builds have.
const CUDA_DEPENDENCIES: &[&str] = &[
    "__cuda",
    "cuda-version",
    "cudatoolkit",
    "pytorch-cuda",
    "cuda-cudart",
    "libcudart",
    "cudnn",
    "libcudnn",
    "libcublas",
    "nccl",
    "cuda-nvrtc",
    "libcufft",
    "libcurand",
    "libcusolver",
    "libcusparse",
    "cuda-runtime",
    "cuda-toolkit",
    "cuda-libraries",
    "cuda-nvtx",
];

/// What sort of build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuVariant {
    /// Built for CUDA.
    Cuda,
    /// Built for ROCm.
    Rocm,
    /// Built for the processor only.
    Cpu,
    /// Some packages CUDA, some not.
    Mixed,
    /// No package of the solution has builds of both kinds.
    None,
}

/// A package whose builds differ.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct GpuPackage {
    /// Normalised name.
    pub name: String,
    /// Version.
    pub version: String,
    /// Build string.
    pub build: String,
    /// Channel, without secrets.
    pub channel: String,
    /// What sort of build it is.
    pub variant: GpuVariant,
    /// The CUDA version it was built for, `12.6`, where the record tells.
    pub cuda: Option<String>,
}

/// What became of the GPU in a solution, and why.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct GpuOutcome {
    /// The intent the request had.
    pub intent: GpuIntent,
    /// The packages concerned, the leading framework first.
    pub packages: Vec<GpuPackage>,
    /// All together.
    pub variant: GpuVariant,
    /// Version of the CUDA toolkit in the solution, `12.6`.
    pub cuda: Option<String>,
    /// The newest CUDA version the driver allows (`__cuda`).
    pub driver_limit: Option<String>,
    /// Why it is this variant; empty where there is nothing to say.
    pub reason: String,
    /// What to do for the other one.
    pub hint: Option<String>,
    /// Whether another run of the solver proved `reason` and `hint`.
    pub proven: bool,
    /// How `__cuda` was obtained, where it was.
    pub provenance: Option<Provenance>,
    /// The route, flag or variable `__cuda` came from.
    pub source: Option<String>,
    /// Constraints that `--gpu require` added.
    pub constraints: Vec<String>,
}

impl GpuOutcome {
    /// The one line after a solve; `None` where no package is concerned.
    pub fn line(&self) -> Option<String> {
        let lead = self.packages.first()?;
        let what = match (self.variant, &lead.cuda) {
            (GpuVariant::Cuda | GpuVariant::Mixed, Some(cuda)) if lead.variant == GpuVariant::Cuda => format!("CUDA {cuda} build"),
            (GpuVariant::Cuda, _) => match &self.cuda {
                Some(cuda) => format!("CUDA {cuda} build"),
                None => "CUDA build".into(),
            },
            (GpuVariant::Rocm, _) => "ROCm build".into(),
            (GpuVariant::Mixed, _) => "CPU build, beside CUDA builds".into(),
            _ => "CPU build".into(),
        };
        let mut line = format!("{} {}: {what}", lead.name, lead.version);
        // The leading package stands for the well-known ones; any other is named.
        let beside = |same: bool| -> Vec<String> {
            self.packages[1..]
                .iter()
                .filter(|package| !FRAMEWORKS.contains(&package.name.as_str()) && (package.variant == lead.variant) == same)
                .map(|package| package.name.clone())
                .collect()
        };
        let (same, other) = (beside(true), beside(false));
        let mut parts = Vec::new();
        if !same.is_empty() {
            parts.push(format!("like {}", explain::list(&same, 3)));
        }
        if !other.is_empty() {
            let kind = if lead.variant == GpuVariant::Cpu { "not the CPU build" } else { "CPU build" };
            parts.push(format!("{}: {kind}", explain::list(&other, 3)));
        }
        if !parts.is_empty() {
            line.push_str(&format!(" ({})", parts.join("; ")));
        }
        if !self.reason.is_empty() {
            line.push_str(match self.variant {
                GpuVariant::Cpu => ", ",
                _ => "; ",
            });
            line.push_str(&self.reason);
        }
        if let Some(hint) = &self.hint {
            line.push_str(": ");
            line.push_str(hint);
        }
        Some(line)
    }
}

/// Major and minor number of a version text.
pub(super) fn major_minor(text: &str) -> Option<(u64, u64)> {
    let mut parts = text.split('.');
    let major = parts.next()?.parse().ok()?;
    Some((major, parts.next().and_then(|part| part.parse().ok()).unwrap_or(0)))
}

/// The CUDA version in a build string: `cuda126_mkl…`, `py3.11_cuda11.8_cudnn8`, `py311_cu118`.
fn build_cuda(build: &str) -> Option<String> {
    let lower = build.to_lowercase();
    for (at, _) in lower.match_indices("cu") {
        let after = lower[at + 2..].strip_prefix("da").unwrap_or(&lower[at + 2..]);
        if at > 0 && lower.as_bytes()[at - 1].is_ascii_alphanumeric() {
            continue;
        }
        let digits: String = after.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        let digits = digits.trim_end_matches('.');
        if let Some((major, rest)) = digits.split_once('.') {
            let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
            if !major.is_empty() && !minor.is_empty() {
                return Some(format!("{major}.{minor}"));
            }
        } else if digits.len() == 3 || digits.len() == 4 {
            return Some(format!("{}.{}", &digits[..2], &digits[2..]));
        } else if digits.len() == 2 && !digits.starts_with('1') {
            return Some(format!("{}.{}", &digits[..1], &digits[1..]));
        }
    }
    None
}

/// What sort of build a record is; `None` where it does not tell.
pub(super) fn variant_of(record: &RepoDataRecord) -> Option<GpuVariant> {
    let package = &record.package_record;
    let build = package.build.as_str().to_lowercase();
    let words: Vec<&str> = build.split(['_', '-']).collect();
    if words.iter().any(|word| word.starts_with("rocm") || word.starts_with("hip")) {
        return Some(GpuVariant::Rocm);
    }
    let depends_on = |wanted: &str| package.depends.iter().any(|text| PackageName::normalized_name_from_matchspec_str(text) == wanted);
    let mutex = |kind: &str| package.depends.iter().any(|text| text.starts_with("pytorch-mutex ") && text.ends_with(kind));
    let cuda_word = words.iter().any(|word| word.starts_with("cuda") && *word != "cudnn") || build_cuda(&build).is_some();
    if words.iter().any(|word| word.starts_with("cpu")) && !cuda_word || mutex(" cpu") || depends_on("cpuonly") {
        return Some(GpuVariant::Cpu);
    }
    if cuda_word || mutex(" cuda") || CUDA_DEPENDENCIES.iter().any(|name| depends_on(name)) {
        return Some(GpuVariant::Cuda);
    }
    None
}

/// Names that are CUDA itself: their builds are no choice between CUDA and CPU.
pub(super) fn part_of_cuda(name: &str) -> bool {
    TOOLKIT.contains(&name)
        || CUDA_DEPENDENCIES.contains(&name)
        || ["cuda-", "libcu", "libnv", "libnpp", "nvidia-"].iter().any(|start| name.starts_with(start))
        || matches!(name, "pytorch-mutex" | "cpuonly")
}

/// Whether a record is a CUDA build: by its build string, or by a dependency on `__cuda` or a part of the toolkit.
pub(super) fn is_cuda_build(record: &RepoDataRecord) -> bool {
    let package = &record.package_record;
    // Most records are none of it; that must be quick to see.
    let suspicious = package.build.as_str().contains("cu")
        || package.depends.iter().any(|text| {
            let name = text.split(|c: char| c.is_whitespace() || "<>=!~[".contains(c)).next().unwrap_or_default();
            CUDA_DEPENDENCIES.contains(&name.rsplit("::").next().unwrap_or(name))
        });
    suspicious && variant_of(record) == Some(GpuVariant::Cuda)
}

/// The CUDA version a record was built for.
fn cuda_of(record: &RepoDataRecord) -> Option<String> {
    if let Some(text) = build_cuda(record.package_record.build.as_str()) {
        return Some(text);
    }
    // The lower bound of `cuda-version >=12.9,<13` is what it was built with.
    record.package_record.depends.iter().find_map(|text| {
        let rest = text
            .strip_prefix("cuda-version ")
            .or_else(|| text.strip_prefix("pytorch-cuda "))
            .or_else(|| text.strip_prefix("cudatoolkit "))?;
        let number: String =
            rest.trim_start_matches(['>', '=', '~', ' ']).chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        let (major, minor) = number.trim_end_matches('.').split_once('.')?;
        Some(format!("{major}.{}", minor.split('.').next()?))
    })
}

/// The version `X.Y` of the CUDA toolkit among the records.
pub(super) fn toolkit(records: &[RepoDataRecord]) -> Option<String> {
    for name in TOOLKIT {
        if let Some(record) = records.iter().find(|record| record.package_record.name.as_normalized() == *name)
            && let Some((major, minor)) = record.package_record.version.version().as_major_minor()
        {
            return Some(format!("{major}.{minor}"));
        }
    }
    packages(records).into_iter().find_map(|package| package.cuda)
}

/// The records the toolkit version was read from.
pub(super) fn toolkit_packages(records: &[RepoDataRecord]) -> Vec<String> {
    TOOLKIT
        .iter()
        .filter(|name| records.iter().any(|record| record.package_record.name.as_normalized() == **name))
        .map(|name| (*name).to_owned())
        .collect()
}

/// The packages of a solution whose builds differ by CUDA or CPU, leading frameworks first.
pub(super) fn packages(records: &[RepoDataRecord]) -> Vec<GpuPackage> {
    let mut packages = Vec::new();
    for name in FRAMEWORKS {
        for record in records.iter().filter(|record| record.package_record.name.as_normalized() == *name) {
            if let Some(variant) = variant_of(record) {
                packages.push(GpuPackage {
                    name: (*name).to_owned(),
                    version: record.package_record.version.to_string(),
                    build: record.package_record.build.to_string(),
                    channel: shown(record.channel.as_deref()),
                    variant,
                    cuda: if variant == GpuVariant::Cuda { cuda_of(record) } else { None },
                });
            }
        }
    }
    packages
}

/// Whether each CUDA package of a solution has, at the same version, a CUDA build that leaves room for `spec`, a spec of `cuda-version`.
/// A quick look that can only rule out: builds that name no `cuda-version` of their own count as fitting.
pub(super) fn same_versions_allow(problem: &Problem<'_>, packages: &[GpuPackage], spec: &MatchSpec) -> bool {
    let records = || problem.tiers.iter().flat_map(|tier| tier.records.iter().copied());
    let toolkits: Vec<&RepoDataRecord> =
        records().filter(|record| record.package_record.name.as_normalized() == "cuda-version" && spec.matches(*record)).collect();
    let fits = |record: &RepoDataRecord| {
        record.package_record.depends.iter().all(|text| {
            PackageName::normalized_name_from_matchspec_str(text) != "cuda-version"
                || MatchSpec::from_str(text, super::engine::record_options())
                    .is_ok_and(|depends| toolkits.iter().any(|toolkit| depends.matches(*toolkit)))
        })
    };
    packages.iter().filter(|package| package.variant == GpuVariant::Cuda).all(|package| {
        records().any(|record| {
            let of = &record.package_record;
            of.name.as_normalized() == package.name && of.version.to_string() == package.version && is_cuda_build(record) && fits(record)
        })
    })
}

/// [`packages`], and after them every other package of a solution whose records are builds of both kinds: those that
/// were requested first. Of one that only came along, the builds of its version count: an old CUDA build is no choice
/// there.
pub(super) fn all_packages(problem: &Problem<'_>, records: &[RepoDataRecord]) -> Vec<GpuPackage> {
    let mut all = packages(records);
    let others: HashMap<&str, &RepoDataRecord> = records
        .iter()
        .map(|record| (record.package_record.name.as_normalized(), record))
        .filter(|(name, _)| !FRAMEWORKS.contains(name) && !part_of_cuda(name))
        .collect();
    let mut kinds: BTreeMap<(bool, &str), (bool, bool)> = BTreeMap::new();
    for record in problem.tiers.iter().flat_map(|tier| &tier.records) {
        let package = &record.package_record;
        let Some((name, chosen)) = others.get_key_value(package.name.as_normalized()) else { continue };
        let asked = requested(problem.request, name);
        if asked || package.version == chosen.package_record.version {
            let seen = kinds.entry((!asked, name)).or_default();
            if is_cuda_build(record) { seen.0 = true } else { seen.1 = true }
        }
    }
    for ((_, name), _) in kinds.into_iter().filter(|(_, both)| *both == (true, true)) {
        let record = others[name];
        let variant = match variant_of(record) {
            Some(GpuVariant::Rocm) => GpuVariant::Rocm,
            _ if is_cuda_build(record) => GpuVariant::Cuda,
            _ => GpuVariant::Cpu,
        };
        all.push(GpuPackage {
            name: name.to_owned(),
            version: record.package_record.version.to_string(),
            build: record.package_record.build.to_string(),
            channel: shown(record.channel.as_deref()),
            variant,
            cuda: if variant == GpuVariant::Cuda { cuda_of(record) } else { None },
        });
    }
    all
}

fn requested(request: &Request, name: &str) -> bool {
    request.specs.iter().any(|spec| spec.name.as_exact().is_some_and(|exact| exact.as_normalized() == name))
}

/// Whether a package decides what the solution is: a well-known one, or one that was asked for.
fn leading(request: &Request, package: &GpuPackage) -> bool {
    FRAMEWORKS.contains(&package.name.as_str()) || requested(request, &package.name)
}

/// What the leading packages are, or where there are none, all.
fn overall(request: &Request, packages: &[GpuPackage]) -> GpuVariant {
    let mut kinds: BTreeSet<GpuVariant> =
        packages.iter().filter(|package| leading(request, package)).map(|package| package.variant).collect();
    if kinds.is_empty() {
        kinds = packages.iter().map(|package| package.variant).collect();
    }
    match kinds.len() {
        0 => GpuVariant::None,
        1 => kinds.first().copied().unwrap_or(GpuVariant::None),
        _ => GpuVariant::Mixed,
    }
}

/// Describes the solution and, for `--gpu require`, replaces it by one with GPU builds.
///
/// # Errors
/// [`Kind::Unsatisfiable`] when `--gpu require` cannot be met.
pub(super) fn settle(problem: &Problem<'_>, plan: &mut Plan, found: Found) -> Result<(Found, GpuOutcome)> {
    let request = problem.request;
    let mut outcome = describe(problem, plan, &found.records);
    if request.gpu != GpuIntent::Require {
        if outcome.variant == GpuVariant::Cpu || outcome.variant == GpuVariant::Mixed {
            reason(problem, plan, &found, &mut outcome);
        }
        return Ok((found, outcome));
    }
    let (found, outcome) = require_leading(problem, plan, found, outcome)?;
    require_others(problem, plan, found, outcome)
}

fn cpu_builds(outcome: &GpuOutcome, which: impl Fn(&GpuPackage) -> bool) -> Vec<GpuPackage> {
    outcome.packages.iter().filter(|package| package.variant == GpuVariant::Cpu && which(package)).cloned().collect()
}

/// The leading packages must be CUDA builds.
fn require_leading(problem: &Problem<'_>, plan: &mut Plan, found: Found, mut outcome: GpuOutcome) -> Result<(Found, GpuOutcome)> {
    let request = problem.request;
    let cpu = cpu_builds(&outcome, |package| leading(request, package));
    if cpu.is_empty() {
        return Ok((found, outcome));
    }
    let forces = forces(problem, &cpu, "`--gpu require`");
    if forces.is_empty() {
        return Err(refused(&cpu)
            .because(format!("no channel of this request has a CUDA build of `{}`", cpu[0].name))
            .hint("conda-forge has CUDA builds of the common frameworks: `-c conda-forge`"));
    }
    let base = plan.clone();
    forces.iter().for_each(|force| force.apply(plan));
    match problem.run(plan)? {
        Verdict::Solved(found) => {
            outcome = describe(problem, plan, &found.records);
            outcome.constraints = forces.iter().map(Force::text).collect();
            let cpu = cpu_builds(&outcome, |package| leading(request, package));
            if cpu.is_empty() {
                outcome.reason = join(&outcome.reason, "chosen because of `--gpu require`");
                outcome.proven = true;
                return Ok((found, outcome));
            }
            Err(refused(&cpu).because(format!("`{}` has no CUDA build that fits the rest of the request", cpu[0].name)))
        }
        Verdict::Unsolvable(text) => {
            // Which of them cannot be met?
            let mut losing = Vec::new();
            for force in &forces {
                let mut alone = base.clone();
                force.apply(&mut alone);
                if let Verdict::Unsolvable(text) = problem.run(&alone)? {
                    losing.push((force, alone, text));
                }
            }
            let error = match asks_for_cpu(request) {
                Some(spec) => refused(&cpu)
                    .because(format!("the request asks for the CPU build: `{spec}`"))
                    .hint(format!("leave out `{spec}`, or `--gpu require`")),
                None => refused(&cpu),
            };
            Err(match losing.into_iter().next() {
                Some((force, alone, text)) => lost(problem, error, Some(force), &alone, &text),
                None => lost(problem, error, None, plan, &text),
            })
        }
    }
}

/// Packages that only came along become CUDA builds where that fits. Where it does not, that is said; it is an error
/// only if nothing in the solution would use the GPU.
fn require_others(problem: &Problem<'_>, plan: &mut Plan, mut found: Found, mut outcome: GpuOutcome) -> Result<(Found, GpuOutcome)> {
    let request = problem.request;
    let mut tried: BTreeSet<String> = BTreeSet::new();
    let mut refusal: Option<(GpuPackage, Force, Plan, String)> = None;
    while tried.len() < 6
        && let Some(package) =
            cpu_builds(&outcome, |package| !leading(request, package) && !tried.contains(&package.name)).into_iter().next()
    {
        tried.insert(package.name.clone());
        let Some(force) = forces(problem, std::slice::from_ref(&package), "`--gpu require`").pop() else { continue };
        let mut with = plan.clone();
        force.apply(&mut with);
        match problem.run(&with)? {
            Verdict::Solved(other) => {
                let better = describe(problem, &with, &other.records);
                if !cpu_builds(&better, |package| leading(request, package)).is_empty() {
                    continue;
                }
                let mut constraints = std::mem::take(&mut outcome.constraints);
                constraints.push(force.text());
                (found, outcome, *plan) = (other, better, with);
                outcome.constraints = constraints;
                outcome.reason = join(&outcome.reason, "chosen because of `--gpu require`");
                outcome.proven = true;
            }
            Verdict::Unsolvable(text) => {
                refusal.get_or_insert((package, force, with, text));
            }
        }
    }
    let Some((package, force, with, text)) = refusal else { return Ok((found, outcome)) };
    if !outcome.packages.iter().any(|package| matches!(package.variant, GpuVariant::Cuda | GpuVariant::Rocm)) {
        return Err(lost(problem, refused(&[package]), Some(&force), &with, &text));
    }
    let finding = explain::reasons(problem, &with, &text);
    let because = finding.causes.first().and_then(|cause| cause.lines().next()).map_or(finding.message, str::to_owned);
    outcome.reason = join(&outcome.reason, &format!("`{}` stays a CPU build, because no CUDA build of it fits: {because}", package.name));
    Ok((found, outcome))
}

/// The refusal with the reasons why the CUDA builds cannot be had.
fn lost(problem: &Problem<'_>, mut error: Error, force: Option<&Force>, plan: &Plan, text: &str) -> Error {
    if let Some(force) = force {
        error = error.because(format!("`{}` cannot be met", force.text()));
    }
    let inner = explain::explain(problem, plan, text);
    error = error.because(inner.message());
    for cause in inner.causes() {
        error = error.because(cause);
    }
    let had: Vec<String> = error.hints().to_vec();
    error.hints_from(inner.hints().iter().filter(|hint| !had.contains(hint)).cloned())
}

fn refused(cpu: &[GpuPackage]) -> Error {
    Error::new(
        Kind::Unsatisfiable,
        format!("`--gpu require` refuses this solution: `{} {} {}` is a CPU build", cpu[0].name, cpu[0].version, cpu[0].build),
    )
}

fn join(a: &str, b: &str) -> String {
    if a.is_empty() { b.to_owned() } else { format!("{a}; {b}") }
}

/// What the records say, without reasons that need another run.
fn describe(problem: &Problem<'_>, plan: &Plan, records: &[RepoDataRecord]) -> GpuOutcome {
    let request = problem.request;
    let packages = all_packages(problem, records);
    let variant = overall(request, &packages);
    let driver = if request.gpu == GpuIntent::None { None } else { request.target.cuda() };
    let limit = plan.cuda().map(ToString::to_string);
    let reason = match (variant, &limit, driver) {
        (GpuVariant::Cuda | GpuVariant::Mixed, Some(limit), Some(driver)) => match driver.provenance {
            Provenance::Detected | Provenance::Default => format!("this machine's driver allows up to {limit}"),
            Provenance::Assumed | Provenance::Overridden => {
                format!("the driver assumed by {} allows up to {limit}", source(&driver.source, limit))
            }
        },
        (GpuVariant::Cuda, None, _) if request.gpu == GpuIntent::None => "although `--gpu none` was given".into(),
        (GpuVariant::Cuda, None, _) if !request.target.is_native => {
            "no driver is assumed for the target: it runs where there is one".into()
        }
        (GpuVariant::Cuda, None, _) => "no driver was found or assumed: it runs where there is one".into(),
        _ => String::new(),
    };
    GpuOutcome {
        intent: request.gpu,
        variant,
        cuda: toolkit(records).or_else(|| packages.iter().find_map(|package| package.cuda.clone())),
        packages,
        driver_limit: limit,
        reason,
        hint: None,
        proven: false,
        provenance: driver.map(|driver| driver.provenance),
        source: driver.map(|driver| driver.source.clone()),
        constraints: Vec::new(),
    }
}

fn source(source: &str, limit: &str) -> String {
    if source == "--cuda" { format!("`--cuda {limit}`") } else { format!("`{source}`") }
}

/// A request that itself asks for a CPU build.
fn asks_for_cpu(request: &Request) -> Option<String> {
    request.specs.iter().find_map(|spec| {
        let name = spec.name.as_exact()?.as_normalized();
        let build = spec.build.as_ref().map(ToString::to_string).unwrap_or_default().to_lowercase();
        let framework = FRAMEWORKS.contains(&name);
        let asks = matches!(name, "cpuonly" | "pytorch-cpu" | "tensorflow-cpu" | "faiss-cpu") || (framework && build.contains("cpu"));
        asks.then(|| text_of(spec))
    })
}

/// What leaves only the CUDA builds of a package.
#[derive(Clone)]
struct Force {
    name: String,
    /// A constraint on the build string, where that tells the builds apart.
    glob: Option<PinnedSpec>,
    source: String,
}

impl Force {
    fn apply(&self, plan: &mut Plan) {
        match &self.glob {
            Some(pinned) => plan.constraints.push(pinned.clone()),
            None => plan.cuda_only.push((self.name.clone(), self.source.clone())),
        }
    }

    fn text(&self) -> String {
        match &self.glob {
            Some(pinned) => text_of(&pinned.spec),
            None => format!("{} (CUDA builds)", self.name),
        }
    }
}

/// What leaves only CUDA builds of these packages. Packages without any CUDA build in the channels get nothing.
fn forces(problem: &Problem<'_>, cpu: &[GpuPackage], source: &str) -> Vec<Force> {
    let mut forces = Vec::new();
    for package in cpu {
        let (mut long, mut short, mut silent, mut blurred) = (false, false, false, false);
        for record in
            problem.tiers.iter().flat_map(|tier| &tier.records).filter(|record| record.package_record.name.as_normalized() == package.name)
        {
            let build = record.package_record.build.as_str().to_lowercase();
            if variant_of(record) == Some(GpuVariant::Cuda) {
                let named = build.contains("cuda");
                long |= named;
                short |= !named && build_cuda(&build).is_some();
                silent |= !named && build_cuda(&build).is_none();
            } else {
                blurred |= build.contains("cu");
            }
        }
        if !(long || short || silent) {
            continue;
        }
        let known = FRAMEWORKS.contains(&package.name.as_str());
        let glob = match (long, short) {
            (false, false) => None,
            _ if !known && (silent || blurred) => None,
            (true, false) => Some("*cuda*"),
            (_, true) => Some("*cu*"),
        };
        let pinned = glob
            .and_then(|glob| MatchSpec::from_str(&format!("{} * {glob}", package.name), ParseMatchSpecOptions::lenient()).ok())
            .map(|spec| PinnedSpec { spec, source: source.to_owned() });
        forces.push(Force { name: package.name.clone(), glob: pinned, source: source.to_owned() });
    }
    forces
}

/// The newest CUDA versions for which there are builds of the package, best first.
fn cuda_candidates(problem: &Problem<'_>, package: &GpuPackage) -> Vec<String> {
    let mut seen: Vec<(String, String)> = problem
        .tiers
        .iter()
        .flat_map(|tier| &tier.records)
        .filter(|record| record.package_record.name.as_normalized() == package.name && variant_of(record) == Some(GpuVariant::Cuda))
        .filter_map(|record| Some((record.package_record.version.to_string(), cuda_of(record).or_else(|| driver_of(record))?)))
        .collect();
    // Builds of the version that was chosen count first: that is what the user would get instead.
    seen.sort_by_key(|(version, cuda)| (*version != package.version, std::cmp::Reverse(major_minor(cuda))));
    let mut cudas = Vec::new();
    for (_, cuda) in seen {
        if !cudas.contains(&cuda) {
            cudas.push(cuda);
        }
    }
    if cudas.is_empty() {
        cudas.push("12.9".into());
    }
    cudas
}

/// The least driver a record itself asks for: `12.0` of `__cuda >=12`.
fn driver_of(record: &RepoDataRecord) -> Option<String> {
    record.package_record.depends.iter().find_map(|text| {
        let rest = text.strip_prefix("__cuda ")?;
        let number: String =
            rest.trim_start_matches(['>', '=', '~', ' ']).chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        let (major, minor) = major_minor(number.trim_end_matches('.'))?;
        Some(format!("{major}.{minor}"))
    })
}

/// Why there are CPU builds, with a proof where one can be had.
fn reason(problem: &Problem<'_>, plan: &Plan, found: &Found, outcome: &mut GpuOutcome) {
    let request = problem.request;
    let Some(lead) = outcome.packages.iter().find(|package| package.variant == GpuVariant::Cpu).cloned() else { return };
    if outcome.variant == GpuVariant::Mixed {
        outcome.reason = join(&outcome.reason, &format!("`{} {}` is a CPU build", lead.name, lead.version));
    }
    let mixed = outcome.reason.clone();
    let mut say = |reason: String, hint: Option<String>, proven: bool| {
        outcome.reason = join(&mixed, &reason);
        outcome.hint = hint;
        outcome.proven = proven;
    };
    let subdir = request.target.subdir;
    if subdir.is_osx() {
        return say("because there is no CUDA on macOS".into(), None, true);
    }
    if let Some(spec) = asks_for_cpu(request) {
        return say(format!("because the request asks for it (`{spec}`)"), None, true);
    }
    if request.gpu == GpuIntent::None {
        return say("because `--gpu none` removes `__cuda` from the solve".into(), None, true);
    }
    let prover = Prover::new(problem);
    let forces = forces(problem, std::slice::from_ref(&lead), "the check for a CUDA build");
    if forces.is_empty() {
        return say(format!("because no channel of this request has a CUDA build of `{}` for {subdir}", lead.name), None, true);
    }
    // Another run of the solver is too much to pay for a package that only came along (`libarrow` in every second environment).
    if !leading(request, &lead) {
        let also = match plan.cuda() {
            Some(_) => String::new(),
            None => cuda_candidates(problem, &lead).first().map_or_else(String::new, |cuda| format!("--cuda {cuda} ")),
        };
        let hint = format!("to have a CUDA build where one fits add `{also}--gpu require`");
        return say("as nothing that was asked for chooses between CUDA and CPU".into(), Some(hint), false);
    }
    let is_cuda = |records: &[RepoDataRecord]| {
        records.iter().any(|record| record.package_record.name.as_normalized() == lead.name && is_cuda_build(record))
    };
    if plan.cuda().is_none() {
        for cuda in cuda_candidates(problem, &lead).into_iter().take(2) {
            let Some(virt) = virtual_package("__cuda", &cuda, "0") else { continue };
            let with = plan.with_virtual(virt);
            if prover.solves(&with).is_some_and(|found| is_cuda(&found.records)) {
                return say(
                    "because `__cuda` is absent".into(),
                    Some(format!("add `--cuda {cuda}` to pin a GPU build from this machine")),
                    true,
                );
            }
            let mut forced = with;
            forces.iter().for_each(|force| force.apply(&mut forced));
            if prover.solves(&forced).is_some_and(|found| is_cuda(&found.records)) {
                return say(
                    "because `__cuda` is absent".into(),
                    Some(format!("add `--cuda {cuda} --gpu require` to pin a GPU build from this machine")),
                    true,
                );
            }
        }
        // Builds that do not even need `__cuda` (the pytorch channel).
        let mut forced = plan.clone();
        forces.iter().for_each(|force| force.apply(&mut forced));
        return match prover.solves(&forced) {
            Some(found) if is_cuda(&found.records) => say(
                "as the solver prefers it here".into(),
                Some(format!("for the CUDA build ask for `{}`", glob_of(&forced, &lead, &found))),
                true,
            ),
            _ => say("and no driver version makes a CUDA build fit the rest of the request".into(), None, false),
        };
    }
    let limit = plan.cuda().map(ToString::to_string).unwrap_or_default();
    let mut forced = plan.clone();
    forces.iter().for_each(|force| force.apply(&mut forced));
    match problem.run(&forced) {
        Ok(Verdict::Solved(other)) if is_cuda(&other.records) => {
            let version = |found: &Found| {
                found
                    .records
                    .iter()
                    .find(|record| record.package_record.name.as_normalized() == lead.name)
                    .map(|record| record.package_record.version.clone())
            };
            let (chosen, possible) = (version(found), version(&other));
            let why = match (&chosen, &possible) {
                (Some(chosen), Some(possible)) if possible.version() < chosen.version() => {
                    format!("although `__cuda={limit}` is there, because the newest CUDA build that fits is {possible}")
                }
                _ => format!("although `__cuda={limit}` is there, because other packages come out newer with it"),
            };
            say(why, Some(format!("for the CUDA build add `--gpu require`, or ask for `{}`", glob_of(&forced, &lead, &other))), true);
        }
        Ok(Verdict::Unsolvable(text)) => {
            let finding = explain::reasons(problem, &forced, &text);
            let because = finding.causes.first().and_then(|cause| cause.lines().next()).map_or(finding.message, str::to_owned);
            say(format!("although `__cuda={limit}` is there, because no CUDA build fits the request: {because}"), None, true);
        }
        _ => say(format!("although `__cuda={limit}` is there"), None, false),
    }
}

/// The CUDA build of the package, as one would ask for it.
fn glob_of(plan: &Plan, package: &GpuPackage, found: &Found) -> String {
    if plan.cuda_only.iter().any(|(name, _)| *name == package.name)
        && let Some(record) = found.records.iter().find(|record| record.package_record.name.as_normalized() == package.name)
    {
        return format!("{}={}={}", package.name, record.package_record.version, record.package_record.build);
    }
    plan.constraints
        .iter()
        .rev()
        .find(|pinned| pinned.spec.name.as_exact().is_some_and(|name| name.as_normalized() == package.name))
        .and_then(|pinned| pinned.spec.build.as_ref())
        .map_or_else(|| package.name.clone(), |build| format!("{}=*={build}", package.name))
}
