//! Whether the driver and the cards of the target can run the CUDA toolkit of a solution, told before anything is
//! downloaded.
//!
//! NVIDIA's rule: a driver runs every older toolkit, and, by minor-version compatibility, every toolkit of its own major
//! version (no JIT of newer PTX, no features that need the newer driver). The tables are of the CUDA release notes.

use rattler_conda_types::{RepoDataRecord, Version};

use super::gpu;
use super::lint::{Level, Lint};

/// Least Linux driver for any toolkit of a major version (minor-version compatibility).
pub const MAJOR_FLOOR: &[(u64, &str)] = &[(11, "450.80.02"), (12, "525.60.13"), (13, "580.65.06")];

/// The Linux driver that came with each toolkit: the least with which nothing is missing.
pub const BUNDLED: &[(Pair, &str)] = &[
    ((11, 3), "465.19.01"),
    ((11, 4), "470.82.01"),
    ((11, 5), "495.29.05"),
    ((11, 6), "510.47.03"),
    ((11, 7), "515.65.01"),
    ((11, 8), "520.61.05"),
    ((12, 0), "525.60.13"),
    ((12, 1), "530.30.02"),
    ((12, 2), "535.54.03"),
    ((12, 3), "545.23.06"),
    ((12, 4), "550.54.14"),
    ((12, 5), "555.42.02"),
    ((12, 6), "560.28.03"),
    // The release notes' table; the run file itself was 570.86.10.
    ((12, 8), "570.26"),
    ((12, 9), "575.51.03"),
    ((13, 0), "580.65.06"),
    ((13, 1), "590.44.01"),
];

/// Major and minor number.
pub type Pair = (u64, u64);

/// Compute capability of cards and the first toolkit whose compiler knew them.
const ARCH_SINCE: &[(Pair, Pair)] =
    &[((8, 0), (11, 0)), ((8, 6), (11, 1)), ((8, 9), (11, 8)), ((9, 0), (11, 8)), ((10, 0), (12, 8)), ((12, 0), (12, 8))];
/// Least compute capability a toolkit of a major version still supports.
const ARCH_FLOOR: &[(u64, Pair)] = &[(11, (3, 5)), (12, (5, 0)), (13, (7, 5))];

/// What is judged.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'f> {
    /// The records of a solution.
    pub records: &'f [RepoDataRecord],
    /// `__cuda`: the newest CUDA version the driver allows.
    pub cuda: Option<&'f Version>,
    /// `__cuda_arch`: the least compute capability of the cards.
    pub cuda_arch: Option<&'f Version>,
    /// Version of the kernel driver, where known.
    pub driver: Option<&'f str>,
}

/// The least driver for any toolkit of this major version.
pub fn floor(major: u64) -> Option<&'static str> {
    MAJOR_FLOOR.iter().find(|(of, _)| *of == major).map(|(_, driver)| *driver)
}

/// The driver that came with a toolkit.
pub fn bundled(toolkit: (u64, u64)) -> Option<&'static str> {
    BUNDLED.iter().find(|(of, _)| *of == toolkit).map(|(_, driver)| *driver)
}

fn driver_number(text: &str) -> Option<Vec<u64>> {
    text.trim().split('.').map(|part| part.parse().ok()).collect()
}

/// Whether driver version `a` is older than `b`; `None` where one cannot be read.
pub fn older(a: &str, b: &str) -> Option<bool> {
    Some(driver_number(a)? < driver_number(b)?)
}

/// The lint about a toolkit that is newer than the driver within one major version.
pub(super) const MINOR_COMPATIBILITY: &str = "driver-minor-compatibility";

/// The `cuda-version` spec a hint says to add.
fn advice(hint: &str) -> Option<&str> {
    let (_, rest) = hint.split_once("add `")?;
    let (spec, _) = rest.split_once('`')?;
    spec.starts_with("cuda-version").then_some(spec)
}

/// Takes out the hints to add a `cuda-version` that `proven`, given that spec and the code of the lint, does not confirm.
pub(super) fn retain_proven(lints: &mut [Lint], mut proven: impl FnMut(&str, &str) -> bool) {
    for lint in lints {
        let code = lint.code;
        lint.hints = std::mem::take(&mut lint.hints)
            .into_iter()
            .filter_map(|hint| match advice(&hint) {
                Some(spec) if !proven(spec, code) => hint.contains("or update the driver").then(|| "update the driver".to_owned()),
                _ => Some(hint),
            })
            .collect();
    }
}

/// Compares the toolkit of the records with driver and cards. Errors are things that will not run, warnings may not.
/// Nothing is said where there is no CUDA toolkit, or no driver to compare with (the GPU outcome tells that).
pub fn check(facts: &Facts<'_>) -> Vec<Lint> {
    let mut lints = Vec::new();
    let Some(text) = gpu::toolkit(facts.records) else { return lints };
    let Some(toolkit) = gpu::major_minor(&text) else { return lints };
    let packages: Vec<String> = gpu::toolkit_packages(facts.records);
    let make = |code, level, message: String, hints: Vec<String>| Lint { code, level, message, hints, packages: packages.clone() };
    let needs = match (floor(toolkit.0), bundled(toolkit)) {
        (Some(floor), Some(bundled)) if floor != bundled => {
            format!("CUDA {text} needs a driver of at least {floor}, and {bundled} for everything in it")
        }
        (Some(floor), _) => format!("CUDA {text} needs a driver of at least {floor}"),
        (None, Some(bundled)) => format!("CUDA {text} needs a driver of at least {bundled}"),
        (None, None) => format!("CUDA {text} needs a newer driver"),
    };
    let mut judged = false;
    if let Some(driver) = facts.driver {
        if let Some(floor) = floor(toolkit.0)
            && older(driver, floor) == Some(true)
        {
            judged = true;
            lints.push(make(
                "driver-too-old",
                Level::Error,
                format!("driver {driver} cannot run CUDA {text} at all"),
                vec![needs.clone(), "update the driver".into()],
            ));
        } else if let Some(bundled) = bundled(toolkit)
            && older(driver, bundled) == Some(true)
        {
            judged = true;
            lints.push(make(
                MINOR_COMPATIBILITY,
                Level::Warning,
                format!("driver {driver} runs CUDA {text} only by minor-version compatibility: code that has to be compiled at run time, or that needs newer driver features, fails"),
                vec![needs.clone()],
            ));
        }
    }
    if let Some(cuda) = facts.cuda
        && let Some(limit) = cuda.as_major_minor()
        && !judged
    {
        if toolkit.0 > limit.0 {
            lints.push(make(
                "driver-too-old",
                Level::Error,
                format!("the environment has CUDA {text}, and the driver allows at most {cuda}"),
                vec![needs, format!("add `cuda-version<={cuda}` to the request, or update the driver")],
            ));
        } else if toolkit > limit {
            lints.push(make(
                MINOR_COMPATIBILITY,
                Level::Warning,
                format!("the environment has CUDA {text} and the driver was made for {cuda}: minor-version compatibility covers this, except code that has to be compiled at run time or that needs newer driver features"),
                vec![needs, format!("for an exact fit add `cuda-version={cuda}` to the request")],
            ));
        }
    }
    if let Some(arch) = facts.cuda_arch
        && let Some(card) = arch.as_major_minor()
    {
        if let Some((_, least)) = ARCH_FLOOR.iter().find(|(major, _)| *major == toolkit.0)
            && card < *least
        {
            lints.push(make(
                "card-too-old",
                Level::Error,
                format!("CUDA {text} no longer supports cards of compute capability {arch}"),
                vec![format!("add `cuda-version<{}` to the request", toolkit.0)],
            ));
        }
        let since = ARCH_SINCE.iter().rev().find(|(of, _)| *of <= card).map(|(_, since)| *since);
        if let Some(since) = since
            && toolkit < since
        {
            lints.push(make(
                "card-too-new",
                Level::Warning,
                format!("CUDA {text} is older than cards of compute capability {arch}: there is no code for them, and most libraries fail with `no kernel image is available`"),
                vec![format!("add `cuda-version>={}.{}` to the request", since.0, since.1)],
            ));
        }
    }
    lints
}
