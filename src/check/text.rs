//! The report for people.

use std::fmt::Write as _;

use super::report::{Report, Verdict};

/// One line a step; details for failures, and for all with `verbose`; then one line that sums it up.
pub fn text(report: &Report, verbose: bool) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "check of `{}` ({})", report.prefix.display(), report.kind.name());
    if let Some(machine) = machine(report) {
        let _ = writeln!(out, "{machine}");
    }
    if let Some(hint) = &report.driver.hint {
        let _ = writeln!(out, "hint: {hint}");
    }
    out.push('\n');
    for step in &report.steps {
        let _ = writeln!(out, "{:<10}  {:<13}  {}", step.verdict.name(), step.id, step.reason);
        let failed = step.verdict == Verdict::Fail;
        if failed || verbose {
            for line in &step.evidence {
                let _ = writeln!(out, "{:27}{line}", "");
            }
        }
        for line in &step.remarks {
            let _ = writeln!(out, "{:27}note: {line}", "");
        }
        if failed || (verbose && step.verdict != Verdict::Pass) || (step.verdict == Verdict::Pass && !step.remarks.is_empty()) {
            for line in &step.remedies {
                let _ = writeln!(out, "{:27}hint: {line}", "");
            }
        }
    }
    let _ = writeln!(out, "\n{}", report.summary());
    if report.exit_code == 8 {
        let _ = writeln!(out, "`--require-gpu` was given, and what is required could not be tested");
    }
    out
}

fn machine(report: &Report) -> Option<String> {
    if report.devices.is_empty() {
        if let Some(problem) = &report.driver.problem {
            return Some(format!("no GPU to work with ({problem}): what needs a GPU is not tested"));
        }
        if report.driver.version.is_none() && report.driver.cuda.is_none() {
            return Some("no NVIDIA driver on this machine: what needs a GPU is not tested".to_owned());
        }
    }
    let mut parts = Vec::new();
    if let Some(version) = &report.driver.version {
        parts.push(format!("driver {version}"));
    }
    if let Some(cuda) = &report.driver.cuda {
        parts.push(format!("CUDA up to {cuda}"));
    }
    parts.extend(report.devices.iter().map(|device| device.name.clone()));
    let problem = report.driver.problem.as_ref().map(|problem| format!("; {problem}")).unwrap_or_default();
    Some(format!("{}{problem}", parts.join(", ")))
}

/// One row an environment, for `--all`.
pub fn table(reports: &[(String, Result<Report, String>)]) -> String {
    let mut rows = vec![["environment", "result", "torch", ""].map(str::to_owned).to_vec()];
    for (name, result) in reports {
        rows.push(match result {
            Ok(report) => vec![
                name.clone(),
                match report.verdict {
                    Verdict::Fail => "FAIL".into(),
                    Verdict::Pass => "PASS".into(),
                    Verdict::NotTested => "ok so far".into(),
                },
                report.environment.iter().find(|fact| fact.name == "torch").map_or_else(|| "-".into(), |fact| fact.value.clone()),
                report.summary(),
            ],
            Err(error) => vec![name.clone(), "ERROR".into(), "-".into(), error.clone()],
        });
    }
    crate::ui::table::columns(&rows, &[])
}
