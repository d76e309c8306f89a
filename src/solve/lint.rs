//! Things in a request or a solution that solve, but are probably not what the user wants. Every lint has a code by which
//! it can be silenced ([`super::Request::silence`]).

use std::collections::BTreeSet;

use rattler_conda_types::{PackageName, RepoDataRecord};

use super::engine::{Problem, shown};
use super::explain::{list, text_of};
use super::{GpuIntent, GpuOutcome, GpuVariant, PriorityChoice, Request, gpu};

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Worth knowing.
    Note,
    /// Probably not wanted.
    Warning,
    /// Will not work.
    Error,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Lint {
    /// Stable name of the finding.
    pub code: &'static str,
    /// How bad it is.
    pub level: Level,
    /// What was found.
    pub message: String,
    /// What to do.
    pub hints: Vec<String>,
    /// The packages concerned.
    pub packages: Vec<String>,
}

/// All codes with what they mean, for the reference page and for refusing unknown codes.
pub const CODES: &[(&str, &str)] = &[
    ("priority-fell-back", "strict channel priority had no solution, flexible had one"),
    ("dead-pytorch-channel", "the `pytorch` channel, which ended with pytorch 2.5, is used"),
    ("pytorch-cuda", "`pytorch-cuda`, which only that channel has, is requested"),
    ("cudatoolkit", "`cudatoolkit`, which ended with CUDA 11.8, is requested"),
    ("mixed-torch-channels", "packages of the torch family come from different channels"),
    ("cpuonly-with-gpu", "`cpuonly` or a CPU build stands beside a GPU request or a CUDA build"),
    ("torch-twice", "torch comes from conda and from pip"),
    ("undated-package", "a package without a date passed `--exclude-newer`"),
    ("gpu-require-idle", "`--gpu require` was given and no package of the solution can use a GPU"),
    ("gpu-none-cuda", "`--gpu none` was given and the solution has a CUDA build"),
    ("driver-too-old", "the driver cannot run the CUDA toolkit of the solution"),
    ("driver-minor-compatibility", "the toolkit is newer than the driver, within the same major version"),
    ("card-too-old", "the toolkit no longer supports the card"),
    ("card-too-new", "the toolkit is older than the card"),
];

/// The torch family: names built against one particular torch.
pub(super) const TORCH: &[&str] = &[
    "pytorch",
    "libtorch",
    "torchvision",
    "libtorchvision",
    "torchaudio",
    "torchtext",
    "torchdata",
    "pytorch3d",
    "xformers",
    "pytorch-scatter",
    "pytorch_scatter",
    "pytorch_sparse",
    "pytorch-sparse",
    "pytorch_cluster",
    "torchtriton",
];

/// Projects of the Python package index that bring their own torch.
const PIP_TORCH: &[&str] = &["torch", "torchvision", "torchaudio", "torchtext"];

/// Whether a channel, as shown, is the `pytorch` channel.
pub(super) fn is_pytorch_channel(channel: &str) -> bool {
    let text = channel.trim_end_matches('/');
    text == "pytorch" || text.ends_with("/pytorch")
}

/// Checks a request and its solution.
pub(super) fn check(request: &Request, records: &[RepoDataRecord]) -> Vec<Lint> {
    let mut lints = Vec::new();
    let mut push = |code, level, message: String, hints: &[&str], packages: Vec<String>| {
        lints.push(Lint { code, level, message, hints: hints.iter().map(|hint| (*hint).to_owned()).collect(), packages });
    };
    let requested: BTreeSet<&str> = request.specs.iter().filter_map(|spec| spec.name.as_exact()).map(|name| name.as_normalized()).collect();
    let find = |name: &str| records.iter().find(|record| record.package_record.name.as_normalized() == name);

    let from_dead: Vec<String> = records
        .iter()
        .filter(|record| is_pytorch_channel(record.channel.as_deref().unwrap_or_default()))
        .map(|record| record.package_record.name.as_normalized().to_owned())
        .collect();
    if !from_dead.is_empty() {
        push(
            "dead-pytorch-channel",
            Level::Warning,
            format!(
                "{} from the `pytorch` channel, which ended with pytorch 2.5: there will be no newer versions and no fixes",
                comes(&from_dead)
            ),
            &[
                "conda-forge has current builds: `-c conda-forge pytorch-gpu` (CPU: `pytorch-cpu`), with `cuda-version=12.6` to choose the CUDA version",
            ],
            from_dead,
        );
    }
    if requested.contains("pytorch-cuda") {
        push(
            "pytorch-cuda",
            Level::Warning,
            "`pytorch-cuda` exists only for the `pytorch` channel".into(),
            &["on conda-forge ask for `pytorch-gpu` and `cuda-version=12.6`"],
            vec!["pytorch-cuda".into()],
        );
    }
    if requested.contains("cudatoolkit") {
        push(
            "cudatoolkit",
            Level::Warning,
            "`cudatoolkit` ended with CUDA 11.8: since CUDA 12 the toolkit is many packages".into(),
            &[
                "choose the CUDA version with `cuda-version=12.6`; frameworks bring the parts they need, `cuda-toolkit` is the whole with the compiler",
            ],
            vec!["cudatoolkit".into()],
        );
    }
    let torch: Vec<(&str, String)> = records
        .iter()
        .filter(|record| TORCH.contains(&record.package_record.name.as_normalized()))
        .map(|record| (record.package_record.name.as_normalized(), shown(record.channel.as_deref())))
        .collect();
    let channels: BTreeSet<&String> = torch.iter().map(|(_, channel)| channel).collect();
    if channels.len() > 1 {
        let parts: Vec<String> = channels
            .iter()
            .map(|channel| {
                let names: Vec<String> = torch.iter().filter(|(_, of)| of == *channel).map(|(name, _)| (*name).to_owned()).collect();
                format!("{} from `{channel}`", list(&names, 4))
            })
            .collect();
        push(
            "mixed-torch-channels",
            Level::Warning,
            format!(
                "packages of the torch family come from different channels: {}; they are built against different torch libraries",
                parts.join(", ")
            ),
            &["take all of them from one channel, or use strict channel priority"],
            torch.iter().map(|(name, _)| (*name).to_owned()).collect(),
        );
    }
    let cpuonly = find("cpuonly").is_some() || find("pytorch-mutex").is_some_and(|record| record.package_record.build.as_str() == "cpu");
    let wants_gpu: Vec<&str> = ["pytorch-cuda", "pytorch-gpu", "cudatoolkit", "cuda-version", "tensorflow-gpu"]
        .into_iter()
        .filter(|name| requested.contains(name))
        .collect();
    let cuda_packages: Vec<String> =
        gpu::packages(records).into_iter().filter(|package| package.variant == GpuVariant::Cuda).map(|package| package.name).collect();
    if cpuonly && (!wants_gpu.is_empty() || !cuda_packages.is_empty()) {
        let beside = if wants_gpu.is_empty() {
            list(&cuda_packages, 4)
        } else {
            list(&wants_gpu.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(), 4)
        };
        push(
            "cpuonly-with-gpu",
            Level::Warning,
            format!("`cpuonly` makes torch a CPU build, and the environment also has {beside}"),
            &["leave out `cpuonly`, or leave out the GPU packages"],
            vec!["cpuonly".into()],
        );
    }
    let pip: Vec<String> = request.pip_names.iter().filter(|name| PIP_TORCH.contains(&name.as_str())).cloned().collect();
    if !pip.is_empty() && (find("pytorch").is_some() || find("libtorch").is_some()) {
        push(
            "torch-twice",
            Level::Warning,
            format!("{} under `pip:` would be installed over the torch that conda installs", list(&pip, 3)),
            &["ask for torch in one place: either conda's `pytorch-gpu` or pip's `torch`"],
            pip,
        );
    }
    lints
}

/// A CUDA build, or a part of the CUDA toolkit, that came in although `--gpu none` was given, and the request behind it.
pub(super) fn cuda_despite_none(request: &Request, outcome: &GpuOutcome, records: &[RepoDataRecord]) -> Option<Lint> {
    if request.gpu != GpuIntent::None {
        return None;
    }
    let mut packages: Vec<String> =
        outcome.packages.iter().filter(|package| package.variant == GpuVariant::Cuda).map(|package| package.name.clone()).collect();
    let builds = packages.len();
    packages.extend(gpu::toolkit_packages(records).into_iter().filter(|name| name != "cuda-version"));
    let name = packages.first()?.clone();
    let package = &records.iter().find(|record| record.package_record.name.as_normalized() == name)?.package_record;
    let what = if builds > 0 {
        format!("`{name} {} {}` is a CUDA build", package.version, package.build)
    } else {
        format!("`{name} {}`, a part of the CUDA toolkit, is in the solution", package.version)
    };
    let asks = request.specs.iter().find(|spec| {
        let build = spec.build.as_ref().map(ToString::to_string).unwrap_or_default();
        spec.name.as_exact().map(PackageName::as_normalized).is_some_and(|of| {
            of != "cuda-version"
                && (gpu::part_of_cuda(of) || of.ends_with("-gpu"))
                && records.iter().any(|record| record.package_record.name.as_normalized() == of)
        }) || build.contains("cuda")
    });
    let (by, hint) = match asks {
        Some(spec) => (Some(text_of(spec)), format!("leave out `{}`, or `--gpu none`", text_of(spec))),
        None => {
            let why = super::why(records, &request.specs, &name).ok();
            let by = why.as_ref().and_then(|why| why.shortest()).and_then(|path| path.first()).map(|step| step.spec.clone());
            (
                by,
                "`--gpu none` only removes `__cuda` from the solve: ask for the CPU build by its name or build, or leave out `--gpu none`"
                    .to_owned(),
            )
        }
    };
    let by = by.map(|by| format!(": the request `{by}` brings it in")).unwrap_or_default();
    Some(Lint {
        code: "gpu-none-cuda",
        level: Level::Warning,
        message: format!("`--gpu none` was given, and {what}{by}"),
        hints: vec![hint],
        packages,
    })
}

fn comes(names: &[String]) -> String {
    if names.len() == 1 { format!("{} comes", list(names, 1)) } else { format!("{} come", list(names, 4)) }
}

/// What was lost by leaving strict priority: the packages that would not have been allowed.
pub(super) fn priority_fell_back(problem: &Problem<'_>, records: &[RepoDataRecord]) -> Lint {
    let mut first = std::collections::HashMap::new();
    for tier in &problem.tiers {
        for record in &tier.records {
            first.entry(record.package_record.name.as_normalized()).or_insert((tier.multi_channel, record.channel.as_deref()));
        }
    }
    let strays: Vec<&RepoDataRecord> = records
        .iter()
        .filter(|record| {
            first
                .get(record.package_record.name.as_normalized())
                .is_some_and(|(multi, channel)| multi.is_none() && *channel != record.channel.as_deref())
        })
        .collect();
    let names: Vec<String> = strays
        .iter()
        .map(|record| format!("{} (from {})", record.package_record.name.as_normalized(), shown(record.channel.as_deref())))
        .collect();
    let what = if names.is_empty() { String::new() } else { format!(": {} would not be allowed by strict", list(&names, 5)) };
    Lint {
        code: "priority-fell-back",
        level: Level::Warning,
        message: format!("there is no solution with strict channel priority; flexible priority was used{what}"),
        hints: vec![
            format!(
                "make it a decision: `--channel-priority {}`, or name the channel in the request (`conda-forge::NAME`)",
                PriorityChoice::Flexible
            ),
            "mixing builds of one library from several channels can break at run time".into(),
        ],
        packages: strays.iter().map(|record| record.package_record.name.as_normalized().to_owned()).collect(),
    }
}
