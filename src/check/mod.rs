//! Will GPU work in this environment be right? Steps with evidence, each PASS, FAIL or NOT TESTED.
//!
//! ```text
//! Subject ─ check ─> Report ─> text, JSON, JUnit, HTML; kept in the environment
//! ```
//! What can be read from files is read from files, so that an environment that does not even import is explained. Programs of the environment run in
//! child processes with a time limit. Nothing in the environment is changed but tare's own note of the result.

mod archs;
mod child;
mod compat;
/// The page for a browser.
pub mod html;
/// The report for CI systems.
pub mod junit;
mod loader;
/// The memory self-test as a step.
pub mod memory;
mod programs;
/// What a check found.
pub mod report;
mod steps;
/// What is checked.
pub mod subject;
/// The report for people.
pub mod text;
mod torch;

use std::path::PathBuf;
use std::time::{Duration, Instant};

pub use report::{Class, Device, Driver, Fact, Last, MemoryPicture, Piece, Rate, Report, Step, Verdict, last, store, worst, write_whole};
pub use subject::{Kind, Subject};

use crate::channel::secrets_in;
use crate::error::Result;
use crate::gpu::info::GpuInfo;
use crate::install::Cancel;
use crate::platform::GpuDetection;
use crate::prefix::Environment;
use crate::report::{Phase, Progress};

/// How much is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Level {
    /// Seconds: files by presence and size, a short memory test.
    #[default]
    Quick,
    /// Files by hash, the usual memory test.
    Standard,
    /// The same with the long memory test.
    Thorough,
}

impl Level {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Level::Quick => "quick",
            Level::Standard => "standard",
            Level::Thorough => "thorough",
        }
    }
}

/// The machine: what its driver says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// The driver; all empty where there is none.
    pub driver: Driver,
    /// The GPUs.
    pub devices: Vec<Device>,
    /// Contradictions between the routes by which the driver was asked.
    pub remarks: Vec<String>,
    /// How the CUDA driver library fails, where it does: a fault, and no lack of a GPU.
    pub broken: Option<String>,
}

impl Machine {
    /// Whether there is a driver and a GPU.
    pub fn has_gpu(&self) -> bool {
        !self.devices.is_empty()
    }

    /// Why no GPU can be used, for a reason: "this machine has no NVIDIA driver".
    pub fn why_none(&self) -> String {
        if let Some(problem) = &self.driver.problem {
            problem.clone()
        } else if self.driver == Driver::default() {
            "this machine has no NVIDIA driver".to_owned()
        } else {
            "the driver of this machine shows no GPU".to_owned()
        }
    }
}

impl From<&GpuDetection> for Machine {
    fn from(found: &GpuDetection) -> Self {
        let driver = Driver {
            version: found.driver_version(),
            cuda: found.cuda.as_ref().map(|(version, _)| version.clone()),
            source: found.cuda.as_ref().map(|(_, source)| source.clone()),
            ..Driver::default()
        };
        let mut devices: Vec<Device> = found
            .devices
            .iter()
            .map(|device| Device {
                index: device.index,
                name: device.name.clone(),
                memory_bytes: device.memory_bytes,
                compute_capability: device.compute_capability.clone(),
            })
            .collect();
        // Without `nvidia-smi` only the lowest compute capability is known.
        if let (true, Some((capability, _))) = (devices.is_empty(), &found.compute_capability) {
            devices.push(Device {
                index: 0,
                name: "GPU (its name is not known)".into(),
                memory_bytes: None,
                compute_capability: Some(capability.clone()),
            });
        }
        Machine { driver, devices, remarks: found.remarks.clone(), broken: None }
    }
}

impl Machine {
    /// From all routes, and what NVML and libcuda say of each card. `nvidia-smi`, which lists devices, needs NVML: where that hangs, libcuda tells.
    pub fn of(found: &GpuDetection, info: &GpuInfo) -> Self {
        let mut machine = Machine::from(found);
        let silent = |name: &str, problem: &str| {
            (problem.starts_with("did not answer") || problem.starts_with("crashed")).then(|| format!("{name} {problem}"))
        };
        let told: Vec<Device> = info
            .cards
            .iter()
            .enumerate()
            .filter_map(|(index, card)| {
                let nvml = card.nvml.as_ref();
                let name = card.cuda.as_ref().map(|cuda| cuda.name.clone()).or_else(|| nvml?.name.value().cloned())?;
                let capability =
                    card.cuda.as_ref().map(|cuda| cuda.compute_capability).or_else(|| nvml?.compute_capability.value().copied());
                Some(Device {
                    index: u32::try_from(index).ok()?,
                    name,
                    memory_bytes: card
                        .cuda
                        .as_ref()
                        .map(|cuda| cuda.total_memory)
                        .or_else(|| nvml?.memory.value().map(|memory| memory.total)),
                    compute_capability: capability.map(|(major, minor)| format!("{major}.{minor}")),
                })
            })
            .collect();
        // `nvidia-smi` knows every card of the machine, whatever this process may use.
        if !found.devices.iter().any(|device| !device.name.is_empty()) && !told.is_empty() {
            machine.devices = told;
        }
        let driver = &mut machine.driver;
        driver.version = driver.version.take().or_else(|| info.nvml.driver.clone());
        if driver.cuda.is_none() {
            let layer =
                [("nvml", &info.nvml), ("libcuda", &info.libcuda)].into_iter().find_map(|(name, layer)| Some((name, layer.cuda.clone()?)));
            (driver.source, driver.cuda) = layer.map(|(name, cuda)| (name.to_owned(), cuda)).unzip();
        }
        if let (true, Some(problem)) = (info.libcuda.library, &info.libcuda.problem) {
            driver.problem = Some(silent("libcuda", problem).unwrap_or_else(|| problem.clone()));
            driver.hint = info.libcuda.hint.clone();
            machine.broken = driver.problem.clone().filter(|_| info.libcuda.failed);
        } else if let (true, Some(problem)) = (info.nvml.library, &info.nvml.problem) {
            driver.problem = Some(silent("NVML", problem).unwrap_or_else(|| problem.clone()));
        }
        // Said once, and by the one who waited longer.
        let both = [("nvml", "NVML", &info.nvml), ("libcuda", "libcuda", &info.libcuda)];
        for (route, name, layer) in both {
            if let Some(text) = layer.problem.as_deref().and_then(|problem| silent(name, problem)) {
                machine.remarks.retain(|remark| !remark.starts_with(&format!("{route}: ")));
                machine.remarks.push(text);
            }
        }
        machine
    }
}

/// What the memory self-test says to the check.
#[derive(Debug, Clone, Default)]
pub struct MemoryOutcome {
    /// What it came to; `None`: NOT TESTED.
    pub passed: Option<bool>,
    /// Why: one line.
    pub reason: String,
    /// What was seen.
    pub evidence: Vec<String>,
    /// Worth knowing.
    pub remarks: Vec<String>,
    /// What to do about it.
    pub remedies: Vec<String>,
    /// The figures of the test.
    pub details: serde_json::Value,
    /// For the page.
    pub picture: Option<MemoryPicture>,
}

/// The memory self-test, as the check calls it.
pub trait MemoryTest: Sync {
    /// Tests the memory of all GPUs at a level, for at most `limit` (else as long as the level needs at most). Must look at `cancel`.
    fn run(&self, level: Level, limit: Option<Duration>, cancel: &Cancel, progress: &dyn Progress) -> MemoryOutcome;
}

/// How to check.
pub struct Options<'a> {
    /// How much.
    pub level: Level,
    /// A CPU build is a failure, and so is (with exit code 8) what cannot be tested.
    pub require_gpu: bool,
    /// Time limit of each program that is run.
    pub limit: Duration,
    /// The end of the whole check, and how long it was to take: then this holds instead of `limit`. What there is no time left for is NOT TESTED.
    pub whole: Option<(std::time::Instant, Duration)>,
    /// Stops the check.
    pub cancel: Cancel,
    /// The variables of the caller.
    pub env: Environment,
    /// The machine.
    pub machine: Machine,
    /// The memory self-test.
    pub memory: Option<&'a dyn MemoryTest>,
    /// The root of the file system: where the loader's configuration and the system's libraries are.
    pub root: PathBuf,
}

/// Checks an environment.
///
/// # Errors
/// Stopped by `cancel`. Everything else is a verdict.
pub fn check(subject: &Subject, options: &Options<'_>, progress: &dyn Progress) -> Result<Report> {
    let task = progress.start(Phase::Other, "going through the steps", Some(steps::ALL.len() as u64));
    let mut state = steps::State::new(subject, options, progress);
    let mut done = Vec::new();
    let mut result = Ok(());
    for (index, (id, title, class, required, work)) in steps::ALL.iter().enumerate() {
        result = options.cancel.check();
        if result.is_err() {
            break;
        }
        let started = Instant::now();
        // Scripts of the environment that took all of the time are what `interpreter` tells.
        let outcome = match state.no_time() {
            Some(why) if state.env.is_ok() || *id != "interpreter" => steps::Outcome::not_tested(why),
            _ => work(&mut state),
        };
        done.push(Step {
            id: (*id).to_owned(),
            title: (*title).to_owned(),
            verdict: outcome.verdict,
            reason: outcome.reason,
            evidence: outcome.evidence,
            remarks: outcome.remarks,
            remedies: outcome.remedies,
            seconds: (started.elapsed().as_secs_f64() * 1000.0).round() / 1000.0,
            class: *class,
            required: *required,
            details: outcome.details,
        });
        progress.advance_to(task, index as u64 + 1);
    }
    progress.finish(task);
    result?;
    // The last step may have been cut short.
    options.cancel.check()?;
    let mut report = Report {
        schema_version: report::CHECK_VERSION,
        success: false,
        verdict: Verdict::NotTested,
        exit_code: 0,
        tare_version: env!("CARGO_PKG_VERSION").to_owned(),
        time: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        prefix: subject.prefix.path().to_owned(),
        kind: subject.kind,
        python: subject.python.clone(),
        level: options.level.name().to_owned(),
        require_gpu: options.require_gpu,
        lock_digest: report::digest(&subject.prefix),
        driver: options.machine.driver.clone(),
        devices: options.machine.devices.clone(),
        environment: state.facts(),
        steps: done,
        memory: state.picture.take(),
    };
    let secrets: Vec<String> = options.env.values().flat_map(|value| secrets_in(&value.to_string_lossy())).collect();
    report.redact(&secrets);
    report.conclude();
    Ok(report)
}

#[cfg(test)]
mod tests;
