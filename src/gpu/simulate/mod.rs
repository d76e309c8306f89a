//! `tare gpu simulate`: scripted scenarios through the caching allocator on the simulated GPU.
//!
//! ```text
//! SCENARIO.toml ─ scenario::parse ─> Scenario ─ run::run ─> Report ─ text
//!                                             └ run::record ─> Snapshot (for the summary and its page)
//! ```

/// What two well-known networks allocate.
pub mod networks;
/// Running.
pub mod run;
/// The file format.
pub mod scenario;

use std::fmt::Write as _;

pub use run::{Report, Run, default_variations, record, run, run_one};
pub use scenario::{Scenario, Variation, parse};

use self::run::{Outcome, PhaseReport};
use crate::gpu::alloc::Evidence;
use crate::gpu::summary::clean;
use crate::gpu::{human, plural};

/// The scenarios that come with the program: name and text.
pub const SHIPPED: [(&str, &str); 4] = [
    ("two-models", include_str!("../../../scenarios/two-models.toml")),
    ("training-loop", include_str!("../../../scenarios/training-loop.toml")),
    ("notebook", include_str!("../../../scenarios/notebook.toml")),
    ("serving", include_str!("../../../scenarios/serving.toml")),
];

/// The text of a scenario that comes with the program, by name (with or without `.toml`).
pub fn shipped(name: &str) -> Option<&'static str> {
    let name = name.strip_suffix(".toml").unwrap_or(name);
    SHIPPED.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// The report for people.
pub fn text(report: &Report) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{}", report.scenario);
    if !report.summary.is_empty() {
        let _ = writeln!(out, "{}", clean_lines(&report.summary));
    }
    let settings = report.runs.first().is_some_and(|run| run.evidence != report.evidence);
    let _ = writeln!(
        out,
        "\ncard {}, context of the process {}, other processes {}; rules of {} (core rules {}{}), seed {}",
        human(report.capacity),
        human(report.context),
        human(report.other_processes),
        report.policy,
        report.evidence,
        if settings { ", settings unverified" } else { "" },
        report.seed
    );
    for run in &report.runs {
        run_text(&mut out, run, report.evidence);
    }
    compare_text(&mut out, report);
    for surprise in &report.surprises {
        let _ = writeln!(out, "not as expected: {surprise}");
    }
    out
}

fn clean_lines(text: &str) -> String {
    text.lines().map(clean).collect::<Vec<_>>().join("\n")
}

fn run_text(out: &mut String, run: &Run, core: Evidence) {
    let _ = write!(out, "\n{}", clean(&run.name));
    if !run.conf.is_empty() && run.conf != run.name {
        let _ = write!(out, "  [{}]", clean(&run.conf));
    }
    out.push('\n');
    if run.evidence != core {
        let _ = writeln!(out, "  settings {}", run.evidence);
    }
    for warning in &run.warnings {
        let _ = writeln!(out, "  warning: {warning}");
    }
    let width = run.phases.iter().map(|phase| phase.name.chars().count()).max().unwrap_or(0).clamp(5, 40);
    let _ = writeln!(
        out,
        "  {:<width$}  {:>11} {:>11} {:>11} {:>12} {:>12} {:>12}  outcome",
        "phase", "allocated", "reserved", "nvidia-smi", "largest free", "pinned", "empty_cache"
    );
    for phase in &run.phases {
        let name: String = phase.name.chars().take(width).collect();
        let outcome = match &phase.outcome {
            Outcome::Completed => "ok".to_owned(),
            Outcome::OutOfMemory(oom) => format!("OUT OF MEMORY at {} ({})", clean(&oom.tensor), human(oom.requested)),
            Outcome::Skipped => "not reached".to_owned(),
        };
        if phase.outcome == Outcome::Skipped {
            let _ = writeln!(out, "  {name:<width$}  {:>11} {:>11} {:>11} {:>12} {:>12} {:>12}  {outcome}", "-", "-", "-", "-", "-", "-");
            continue;
        }
        let _ = writeln!(
            out,
            "  {name:<width$}  {:>11} {:>11} {:>11} {:>12} {:>12} {:>12}  {outcome}",
            human(phase.allocated),
            human(phase.reserved),
            human(phase.nvidia_smi),
            human(phase.largest_free),
            human(phase.split.pinned + phase.split.expandable_rest),
            human(phase.empty_cache_returns),
        );
    }
    for phase in &run.phases {
        pins_text(out, phase);
    }
    for phase in &run.phases {
        why_text(out, phase);
    }
}

/// Who pins most after a phase, where more than a hundredth of the reserved memory is pinned.
fn pins_text(out: &mut String, phase: &PhaseReport) {
    let pinned = phase.split.pinned + phase.split.expandable_rest;
    let Some(group) = phase.pinned_by.first().filter(|_| phase.outcome == Outcome::Completed && pinned * 100 > phase.reserved) else {
        return;
    };
    let _ = writeln!(
        out,
        "  pins after `{}`: {} of `{}` in {} segment{} pin {} free",
        clean(&phase.name),
        human(group.bytes),
        clean(&group.name),
        group.segments,
        plural(group.segments as u64),
        human(group.strands)
    );
}

fn why_text(out: &mut String, phase: &PhaseReport) {
    let Outcome::OutOfMemory(oom) = &phase.outcome else { return };
    let _ = writeln!(
        out,
        "  why: `{}` (line {}) needs {} from the driver, which has {}; {} are reserved but free, in pieces of at most {}",
        clean(&oom.tensor),
        oom.line,
        human(oom.from_driver),
        human(oom.device_free),
        human(oom.free_but_reserved),
        human(oom.largest_free)
    );
    for group in oom.pinned_by.iter().filter(|group| group.strands > 0).take(4) {
        let _ = writeln!(
            out,
            "    {} of `{}` in {} segment{} pin {} free",
            human(group.bytes),
            clean(&group.name),
            group.segments,
            plural(group.segments as u64),
            human(group.strands)
        );
    }
}

fn compare_text(out: &mut String, report: &Report) {
    let width = report.runs.iter().map(|run| run.name.chars().count()).max().unwrap_or(0).clamp(9, 48);
    let _ =
        writeln!(out, "\n{:<width$}  {:>13} {:>13} {:>7} {:>7}  outcome", "variation", "peak reserved", "peak in use", "used", "retries");
    for run in &report.runs {
        let failed = run.phases.iter().find(|phase| matches!(phase.outcome, Outcome::OutOfMemory(_)));
        let outcome = match failed {
            None => "completes".to_owned(),
            Some(phase) => format!("out of memory in `{}`", clean(&phase.name)),
        };
        let used = if run.peak_reserved == 0 { 0.0 } else { 100.0 * run.peak_allocated as f64 / run.peak_reserved as f64 };
        let name: String = clean(&run.name).chars().take(width).collect();
        let _ = writeln!(
            out,
            "{name:<width$}  {:>13} {:>13} {used:>5.1} % {:>7}  {outcome}",
            human(run.peak_reserved),
            human(run.peak_allocated),
            run.retries
        );
    }
}

#[cfg(test)]
mod tests;
