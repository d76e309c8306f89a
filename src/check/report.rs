//! What a check found: the document that is printed, stored and turned into pages.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::subject;
use crate::channel::{mask_secrets, redact_text};
use crate::error::{Error, Kind, Result};
use crate::install::{TARE_FOLDER, digest_of};
use crate::prefix::Prefix;

/// Version of the document. A change that a reader could trip over gets a new one.
pub const CHECK_VERSION: u32 = 1;

/// What a step or a whole check came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It was done, and all was right.
    Pass,
    /// It was done, and something was wrong.
    Fail,
    /// It was not done, or not to its end.
    NotTested,
}

impl Verdict {
    /// `PASS`, `FAIL` or `NOT TESTED`.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Pass => "PASS",
            Verdict::Fail => "FAIL",
            Verdict::NotTested => "NOT TESTED",
        }
    }
}

/// Which exit code the failure of a step leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Files are not as installed: exit code 5.
    Files,
    /// Everything else: exit code 6.
    Gpu,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Short name, stable: `files`, `interpreter`, `torch`, `architectures`, `versions`, `driver`, `libraries`, `cpu`, `gpu`, `allocator`,
    /// `clean-slate`, `memory`.
    pub id: String,
    /// What it asks, for people.
    pub title: String,
    /// What it came to.
    pub verdict: Verdict,
    /// Why: one line.
    pub reason: String,
    /// What was looked at and seen.
    #[serde(default)]
    pub evidence: Vec<String>,
    /// What is worth knowing although it is no failure.
    #[serde(default)]
    pub remarks: Vec<String>,
    /// What to do about a failure, best first.
    #[serde(default)]
    pub remedies: Vec<String>,
    /// Seconds it took.
    pub seconds: f64,
    /// Which exit code its failure leads to.
    pub class: Class,
    /// Whether `--require-gpu` needs it: exit code 8 where it is NOT TESTED.
    pub required: bool,
    /// Figures; their shape depends on the step.
    #[serde(default)]
    pub details: Value,
}

/// The driver of the machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Driver {
    /// Version of the driver (`550.54.14`).
    pub version: Option<String>,
    /// Highest CUDA version it supports.
    pub cuda: Option<String>,
    /// What said so: `nvml`, `libcuda`, `nvidia-smi` or `kernel`.
    pub source: Option<String>,
    /// What is wrong with it, where something is: a stub in its place, a library that does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// What to try next about that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Applies `mask` to every text of a document.
fn mask_value(value: &mut Value, mask: &dyn Fn(&str) -> String) {
    match value {
        Value::String(text) => *text = mask(text),
        Value::Array(items) => items.iter_mut().for_each(|item| mask_value(item, mask)),
        Value::Object(fields) => fields.values_mut().for_each(|field| mask_value(field, mask)),
        _ => {}
    }
}

/// A GPU of the machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Index in the driver's order.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// `MAJOR.MINOR`.
    pub compute_capability: Option<String>,
}

/// A fact of the environment, for the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    /// What.
    pub name: String,
    /// The value.
    pub value: String,
}

/// A piece of a card's memory in the picture of the memory test.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// Device it is on.
    pub device: u32,
    /// Offset in bytes from the beginning of what is shown.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// `good`, `bad`, `used` (by others) or `untested`.
    pub state: String,
    /// More, for a pointer held over it.
    pub note: String,
}

/// A rate that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// Device it is of.
    pub device: u32,
    /// What was done.
    pub name: String,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// The card's own copy rate, bytes per second.
    pub reference: Option<f64>,
}

/// What the memory test adds to the pages.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryPicture {
    /// Pieces of memory, by device and offset.
    pub map: Vec<Piece>,
    /// Rates, in the order in which they were measured.
    pub rates: Vec<Rate>,
}

/// A whole check.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`CHECK_VERSION`].
    pub schema_version: u32,
    /// Whether the exit code is 0.
    pub success: bool,
    /// FAIL if a step failed, PASS if all passed, else NOT TESTED.
    pub verdict: Verdict,
    /// Exit code: 0, 5, 6 or 8.
    pub exit_code: u8,
    /// Version of tare.
    pub tare_version: String,
    /// When it ended: RFC 3339, UTC.
    pub time: String,
    /// The environment.
    pub prefix: PathBuf,
    /// Who made it.
    pub kind: subject::Kind,
    /// Its interpreter.
    pub python: Option<PathBuf>,
    /// `quick`, `standard` or `thorough`.
    pub level: String,
    /// Whether `--require-gpu` was given.
    pub require_gpu: bool,
    /// Digest of the set of conda packages (as in the lock); `None` where there are none.
    pub lock_digest: Option<String>,
    /// The driver.
    pub driver: Driver,
    /// The GPUs.
    pub devices: Vec<Device>,
    /// Facts of the environment.
    pub environment: Vec<Fact>,
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// The memory test, where it ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryPicture>,
}

impl Report {
    /// Masks credentials in all that was seen: values of variables and URLs come from anywhere. `secrets`: those of the environment, which may stand
    /// where no URL is left.
    pub(super) fn redact(&mut self, secrets: &[String]) {
        let mask = |text: &str| mask_secrets(&redact_text(text), secrets);
        for step in &mut self.steps {
            step.reason = mask(&step.reason);
            for line in [&mut step.evidence, &mut step.remarks, &mut step.remedies].into_iter().flatten() {
                *line = mask(line);
            }
            mask_value(&mut step.details, &mask);
        }
        for fact in &mut self.environment {
            fact.value = mask(&fact.value);
        }
        for text in [&mut self.driver.problem, &mut self.driver.hint].into_iter().flatten() {
            *text = mask(text);
        }
    }

    /// The step of that name.
    pub fn step(&self, id: &str) -> Option<&Step> {
        self.steps.iter().find(|step| step.id == id)
    }

    /// Number of steps of a verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.steps.iter().filter(|step| step.verdict == verdict).count()
    }

    /// Sets verdict, exit code and success from the steps.
    pub fn conclude(&mut self) {
        self.exit_code = exit_code(&self.steps, self.require_gpu);
        self.success = self.exit_code == 0;
        self.verdict = if self.count(Verdict::Fail) > 0 {
            Verdict::Fail
        } else if self.count(Verdict::NotTested) > 0 || self.steps.is_empty() {
            Verdict::NotTested
        } else {
            Verdict::Pass
        };
    }

    /// One line: "PASS: all 12 steps", "FAIL: libraries; 3 steps passed, 5 not tested", "nothing failed: 7 steps passed, 5 not tested".
    pub fn summary(&self) -> String {
        let (passed, untested) = (self.count(Verdict::Pass), self.count(Verdict::NotTested));
        match self.verdict {
            Verdict::Pass => format!("PASS: all {passed} steps"),
            Verdict::Fail => {
                let failed: Vec<&str> =
                    self.steps.iter().filter(|step| step.verdict == Verdict::Fail).map(|step| step.id.as_str()).collect();
                format!("FAIL: {}; {passed} passed, {untested} not tested", failed.join(", "))
            }
            Verdict::NotTested if passed == 0 => "nothing could be tested".to_owned(),
            Verdict::NotTested => format!("nothing failed: {passed} passed, {untested} not tested"),
        }
    }
}

/// 5 where files failed, else 6 where another step failed, else 8 where the GPU is required and a step for it was not done, else 0.
pub fn exit_code(steps: &[Step], require_gpu: bool) -> u8 {
    let failed = |class: Class| steps.iter().any(|step| step.verdict == Verdict::Fail && step.class == class);
    if failed(Class::Files) {
        Kind::Verification.exit_code()
    } else if failed(Class::Gpu) {
        Kind::GpuCheck.exit_code()
    } else if require_gpu && steps.iter().any(|step| step.required && step.verdict == Verdict::NotTested) {
        Kind::NotTested.exit_code()
    } else {
        0
    }
}

/// The worst of several exit codes: 5, 6, 8 in that order, then any other, then 0.
pub fn worst(codes: impl IntoIterator<Item = u8>) -> u8 {
    let rank = |code: u8| match code {
        0 => 9,
        2 => 1,
        5 => 2,
        6 => 3,
        8 => 4,
        _ => 5,
    };
    codes.into_iter().min_by_key(|code| rank(*code)).unwrap_or(0)
}

/// Digest of the conda packages of an environment; `None` where there are none.
pub fn digest(prefix: &Prefix) -> Option<String> {
    let records = prefix.records_and_damage().ok()?.0;
    let records: Vec<_> = records.into_iter().map(|record| record.repodata_record).collect();
    (!records.is_empty()).then(|| digest_of(&records))
}

fn path_in(prefix: &Path) -> PathBuf {
    prefix.join(TARE_FOLDER).join("check.json")
}

/// Keeps the report in the environment, under `conda-meta/tare/`, whole or not at all. Where there is no `conda-meta` nothing is written.
///
/// # Errors
/// The folder or the file cannot be written.
pub fn store(report: &Report) -> Result<Option<PathBuf>> {
    if !report.prefix.join("conda-meta").is_dir() {
        return Ok(None);
    }
    let path = path_in(&report.prefix);
    let folder = report.prefix.join(TARE_FOLDER);
    std::fs::create_dir_all(&folder).map_err(|error| Error::io("make the folder", &folder, &error))?;
    let mut text = serde_json::to_vec_pretty(report).map_err(|error| Error::failure("the report cannot be written").because(error))?;
    text.push(b'\n');
    // It is tare's own: a link is not followed out of the environment, a pipe is not waited for.
    if std::fs::symlink_metadata(&path).is_ok_and(|about| !about.is_file() && !about.is_dir()) {
        std::fs::remove_file(&path).map_err(|error| Error::io("replace", &path, &error))?;
    }
    write_whole(&path, &text)?;
    Ok(Some(path))
}

/// Writes a file so that a reader sees the old one or the new one.
///
/// # Errors
/// The folder is not there, or the file cannot be written.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    crate::files::write_whole(path, bytes).map_err(|error| Error::io("write", path, &error))
}

/// The last check of an environment, as it was stored.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Last {
    /// When.
    pub time: String,
    /// What it came to.
    pub verdict: Verdict,
    /// Its exit code.
    pub exit_code: u8,
    /// One line.
    pub summary: String,
    /// The packages were changed since.
    pub outdated: bool,
}

impl Last {
    /// "2026-12-01 01:02 UTC: PASS: all 12 steps".
    pub fn text(&self) -> String {
        let when = self.time.get(..16).unwrap_or(&self.time).replace('T', " ");
        let outdated = if self.outdated { " (packages were changed since)" } else { "" };
        format!("{when} UTC: {}{outdated}", self.summary)
    }
}

/// Reads what the last check of `prefix` left. `None` if there was none, or it cannot be understood.
pub fn last(prefix: &Prefix) -> Option<Last> {
    let report: Report = serde_json::from_slice(&crate::files::read(&path_in(prefix.path()), crate::files::MOST).ok()?).ok()?;
    if report.schema_version > CHECK_VERSION {
        return None;
    }
    let outdated = report.lock_digest != digest(prefix);
    Some(Last { summary: report.summary(), time: report.time, verdict: report.verdict, exit_code: report.exit_code, outdated })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(verdict: Verdict, class: Class, required: bool) -> Step {
        Step {
            id: "x".into(),
            title: String::new(),
            verdict,
            reason: String::new(),
            evidence: Vec::new(),
            remarks: Vec::new(),
            remedies: Vec::new(),
            seconds: 0.0,
            class,
            required,
            details: Value::Null,
        }
    }

    #[test]
    fn codes_come_in_the_order_5_6_8() {
        let (files, gpu) = (step(Verdict::Fail, Class::Files, false), step(Verdict::Fail, Class::Gpu, true));
        let (good, open, other) = (
            step(Verdict::Pass, Class::Gpu, true),
            step(Verdict::NotTested, Class::Gpu, true),
            step(Verdict::NotTested, Class::Files, false),
        );
        for (steps, require, expected) in [
            (vec![good.clone()], true, 0),
            (vec![good.clone(), open.clone()], false, 0),
            (vec![good.clone(), open.clone()], true, 8),
            (vec![good, other], true, 0),
            (vec![open.clone(), gpu.clone()], true, 6),
            (vec![open, gpu, files], true, 5),
        ] {
            assert_eq!(exit_code(&steps, require), expected);
        }
        assert_eq!(worst([0, 8, 6]), 6);
        assert_eq!(worst([0, 8, 5, 6]), 5);
        assert_eq!((worst([0, 0]), worst([])), (0, 0));
    }
}
