//! The memory self-test as a step: `tare gpu selftest --json` in a process of its own, so that a driver that crashes or hangs ends that process only.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::child::{self, Ended};
use super::report::{MemoryPicture, Piece, Rate};
use super::{Level, MemoryOutcome, MemoryTest};
use crate::gpu::human;
use crate::install::Cancel;
use crate::prefix::Environment;
use crate::report::Progress;

/// The self-test by this program.
#[derive(Debug, Clone)]
pub struct SelfTest {
    /// The program; it understands `gpu selftest`.
    pub program: PathBuf,
    /// Its variables.
    pub env: Environment,
}

/// How long before the limit no pass is begun any more: what is under way still has to end.
const GRACE: Duration = Duration::from_secs(20);

impl MemoryTest for SelfTest {
    fn run(&self, level: Level, given: Option<Duration>, cancel: &Cancel, _: &dyn Progress) -> MemoryOutcome {
        let mut command = Command::new(&self.program);
        command.args(["gpu", "selftest", "--device", "all", "--level", level.name(), "--json"]).env_clear().envs(&self.env);
        let usual = Duration::from_secs(match level {
            Level::Quick => 300,
            Level::Standard => 1800,
            Level::Thorough => 7200,
        });
        let limit = given.unwrap_or(usual);
        if given.is_some() {
            // What is not done in time is then NOT TESTED; only what hangs is killed.
            let budget = limit.saturating_sub(GRACE).max(limit / 2).as_secs_f64();
            command.args(["--budget", &format!("{budget:.1}s"), "--call-limit", &format!("{budget:.1}s")]);
        }
        let run = child::run_command(command, limit, cancel);
        let not_tested = |reason: String| MemoryOutcome { reason, ..MemoryOutcome::default() };
        // The document is more than one line.
        let document = serde_json::from_str::<Value>(&run.stdout).ok();
        match (document, &run.ended) {
            (Some(document), _) if document.get("status").is_some() => outcome(&document),
            (Some(document), _) => not_tested(format!("the self-test could not be run: {}", text(&document, "message"))),
            (None, Ended::Stopped) => not_tested("the self-test was stopped".into()),
            // What is left over of the time for a check may not even be enough to begin.
            (None, Ended::TimedOut) if given.is_some_and(|limit| limit < GRACE) => {
                not_tested(format!("only {:.0} s of the time for the whole check were left for it", limit.as_secs_f64()))
            }
            (None, Ended::Exited(_) | Ended::NotStarted(_)) => MemoryOutcome {
                reason: format!("the self-test {}", run.ended_text()),
                evidence: run.last_errors(6),
                ..MemoryOutcome::default()
            },
            // A driver that crashes or hangs under the test is a fault, not a reason not to test.
            (None, Ended::Signal(_) | Ended::TimedOut) => MemoryOutcome {
                passed: Some(false),
                reason: format!("the self-test {}", run.ended_text()),
                evidence: run.last_errors(6),
                remedies: vec!["run it alone to see more: tare gpu selftest -v; a driver that crashes or hangs is to be reinstalled, a card that hangs to be reset".into()],
                ..MemoryOutcome::default()
            },
        }
    }
}

fn text(value: &Value, key: &str) -> String {
    value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn number(value: &Value, key: &str) -> u64 {
    value.get(key).and_then(Value::as_u64).unwrap_or(0)
}

fn list<'v>(value: &'v Value, key: &str) -> impl Iterator<Item = &'v Value> {
    value.get(key).and_then(Value::as_array).into_iter().flatten()
}

/// What the document of a self-test says to the check.
fn outcome(document: &Value) -> MemoryOutcome {
    let strings = |value: &Value, key: &str| list(value, key).filter_map(|hint| hint.as_str().map(str::to_owned)).collect::<Vec<_>>();
    let mut out = MemoryOutcome {
        passed: match text(document, "status").as_str() {
            "pass" => Some(true),
            "fail" => Some(false),
            _ => None,
        },
        reason: text(document, "reason"),
        remedies: strings(document, "hints"),
        details: document.clone(),
        ..MemoryOutcome::default()
    };
    let mut picture = MemoryPicture::default();
    let mut summaries = Vec::new();
    for (index, device) in list(document, "devices").enumerate() {
        let name = text(device, "device");
        summaries.push(format!("{name}: {}", text(device, "summary")));
        out.remedies.extend(strings(device, "hints"));
        if let Some(coverage) = device.get("coverage").filter(|coverage| number(coverage, "bytes") > 0) {
            let share = |key: &str| coverage.get(key).and_then(Value::as_f64).unwrap_or(0.0) * 100.0;
            out.evidence.push(format!(
                "{name}: {} tested, {:.1} % of the card and {:.1} % of what was free",
                human(number(coverage, "bytes")),
                share("of_total"),
                share("of_free")
            ));
        }
        // The worst finding is the summary.
        for finding in list(device, "findings").filter(|finding| text(finding, "text") != text(device, "summary")).take(12) {
            out.evidence.push(format!("{name}, {}: {}", text(finding, "step"), text(finding, "text")));
        }
        for mismatch in list(device, "mismatches").take(4) {
            out.evidence.push(format!(
                "{name}, {}: at {} expected {} got {} (xor {})",
                text(mismatch, "step"),
                text(mismatch, "address"),
                text(mismatch, "expected"),
                text(mismatch, "got"),
                text(mismatch, "xor")
            ));
        }
        for rate in list(device, "bandwidth") {
            let share =
                rate.get("of_copy_rate").and_then(Value::as_f64).map(|share| format!(", {:.0} % of the card's copy rate", share * 100.0));
            let speed = rate.get("gb_per_s").and_then(Value::as_f64).unwrap_or(0.0);
            out.evidence.push(format!("{name}, {}: {speed:.0} GB/s{}", text(rate, "kind"), share.unwrap_or_default()));
        }
        let open: Vec<String> = list(device, "steps")
            // What an earlier failure made pointless says nothing.
            .filter(|step| text(step, "status") == "not-tested" && text(step, "cause") != "stopped")
            .map(|step| format!("{} ({})", text(step, "name"), text(step, "detail")))
            .collect();
        if !open.is_empty() {
            out.remarks.push(format!("{name}: not tested: {}", open.join(", ")));
        }
        draw(u32::try_from(index).unwrap_or(0), device, &mut picture);
    }
    if out.reason.is_empty() {
        out.reason = summaries.join("; ");
    }
    out.remedies.dedup();
    if !picture.map.is_empty() || !picture.rates.is_empty() {
        out.picture = Some(picture);
    }
    out
}

/// Map and rates of one card. Blocks are drawn one after the other, then what was not tested, then what others use: addresses of a card are virtual,
/// so there is no truer order.
fn draw(index: u32, device: &Value, picture: &mut MemoryPicture) {
    let mut piece = |offset: u64, bytes: u64, state: &str, note: String| {
        if bytes > 0 {
            picture.map.push(Piece { device: index, offset, bytes, state: state.to_owned(), note });
        }
    };
    let mut end = 0u64;
    let mut located: Vec<u64> = Vec::new();
    for mismatch in list(device, "mismatches") {
        if let Some(offset) = mismatch.get("offset").and_then(Value::as_u64) {
            located.push(offset);
        }
    }
    for block in list(device, "blocks") {
        let (offset, bytes, wrong) = (number(block, "offset"), number(block, "bytes"), number(block, "mismatches"));
        let known = located.iter().any(|at| (offset..offset.saturating_add(bytes)).contains(at));
        // Where single words are known to be bad, they are drawn instead of the block.
        let state = if wrong > 0 && !known { "bad" } else { "good" };
        let note = if wrong > 0 { format!("{wrong} wrong words") } else { String::new() };
        piece(offset, bytes, state, note);
        end = end.max(offset.saturating_add(bytes));
    }
    for mismatch in list(device, "mismatches") {
        if let Some(offset) = mismatch.get("offset").and_then(Value::as_u64) {
            piece(offset, 8, "bad", format!("expected {} got {}", text(mismatch, "expected"), text(mismatch, "got")));
        }
    }
    if let Some(coverage) = device.get("coverage").filter(|_| end > 0) {
        let (total, free) = (number(coverage, "total"), number(coverage, "free"));
        let used = total.saturating_sub(free);
        let rest = total.saturating_sub(used).saturating_sub(end);
        piece(end, rest, "untested", "left free".to_owned());
        piece(end.saturating_add(rest), used, "used", "in use before the test".to_owned());
    }
    let reference = device.get("copy_gb_per_s").and_then(Value::as_f64).map(|rate| rate * 1e9);
    for rate in list(device, "bandwidth") {
        picture.rates.push(Rate {
            device: index,
            name: text(rate, "kind"),
            bytes_per_second: rate.get("gb_per_s").and_then(Value::as_f64).unwrap_or(0.0).max(0.0) * 1e9,
            reference,
        });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::report::Silent;

    #[test]
    fn a_report_becomes_a_step_with_its_picture() {
        let document = json!({
            "status": "fail", "reason": null, "hints": [], "level": "quick",
            "devices": [{
                "device": "cuda:0", "status": "fail", "summary": "a bit is stuck", "hints": ["take the card out of use"],
                "coverage": { "bytes": 20u64 << 30, "total": 24u64 << 30, "free": 22u64 << 30, "of_total": 0.8333, "of_free": 0.909 },
                "steps": [{ "name": "walking", "status": "fail", "detail": "x" }, { "name": "xid", "status": "not-tested", "detail": "not supported" }],
                "findings": [{ "cause": "stuck-bit", "step": "walking", "text": "bit 3 is always 0" }],
                "mismatches": [{ "step": "walking", "address": "0x10", "offset": 4096, "expected": "0x8", "got": "0x0", "xor": "0x8" }],
                "blocks": [{ "offset": 0, "bytes": 10u64 << 30, "mismatches": 2 }, { "offset": 10u64 << 30, "bytes": 10u64 << 30, "mismatches": 0 }],
                "copy_gb_per_s": 900.0,
                "bandwidth": [{ "kind": "verify", "gb_per_s": 850.0, "of_copy_rate": 0.944 }],
            }],
        });
        let out = outcome(&document);
        assert_eq!((out.passed, out.reason.as_str()), (Some(false), "cuda:0: a bit is stuck"));
        assert_eq!(out.remedies, ["take the card out of use"]);
        assert_eq!(out.remarks, ["cuda:0: not tested: xid (not supported)"]);
        assert!(
            out.evidence.contains(&"cuda:0: 20.00 GiB tested, 83.3 % of the card and 90.9 % of what was free".to_owned()),
            "{:?}",
            out.evidence
        );
        assert!(out.evidence.contains(&"cuda:0, verify: 850 GB/s, 94 % of the card's copy rate".to_owned()));
        let picture = out.picture.unwrap();
        let states: Vec<(&str, u64)> = picture.map.iter().map(|piece| (piece.state.as_str(), piece.bytes)).collect();
        assert_eq!(states, [("good", 10 << 30), ("good", 10 << 30), ("bad", 8), ("untested", 2 << 30), ("used", 2 << 30)]);
        assert_eq!(picture.rates[0].reference, Some(9e11));
        let none = outcome(&json!({ "status": "not-tested", "reason": "busy", "devices": [] }));
        assert_eq!((none.passed, none.reason.as_str(), none.picture), (None, "busy", None));
    }

    #[test]
    fn a_self_test_that_crashes_or_says_nothing_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let run = |script: &str| {
            let program = folder.path().join("tare");
            std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
            SelfTest { program, env: std::env::vars_os().collect() }.run(Level::Quick, None, &Cancel::new(), &Silent)
        };
        for (script, passed, part) in [
            (
                "echo '{\"status\":\"pass\",\"devices\":[{\"device\":\"cuda:0\",\"summary\":\"all right\"}]}'",
                Some(true),
                "cuda:0: all right",
            ),
            ("echo '{\"success\":false,\"message\":\"no such option\"}'; exit 2", None, "could not be run: no such option"),
            ("kill -SEGV $$", Some(false), "SIGSEGV"),
            ("echo oops >&2; exit 3", None, "exit code 3"),
        ] {
            let out = run(script);
            assert_eq!(out.passed, passed, "{script}: {out:?}");
            assert!(out.reason.contains(part), "{script}: {}", out.reason);
        }
    }
}
