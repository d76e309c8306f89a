//! The report for people.

use super::report::{DeviceReport, Report, Status};
use crate::gpu::human;

/// Findings that are shown one by one.
const SHOWN: usize = 6;

impl Report {
    /// The report, one block a card, the verdict last.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for device in &self.devices {
            out.push_str(&device.text());
            out.push('\n');
        }
        if let Some(reason) = &self.reason {
            out.push_str(&format!("{}: {reason}\n", self.status.text()));
        } else if self.devices.len() > 1 {
            let with = |status| self.devices.iter().filter(|device| device.status == status).count();
            out.push_str(&format!(
                "{}: {} cards: {} passed, {} failed, {} not tested\n",
                self.status.text(),
                self.devices.len(),
                with(Status::Pass),
                with(Status::Fail),
                with(Status::NotTested)
            ));
        }
        for hint in &self.hints {
            out.push_str(&format!("hint: {hint}\n"));
        }
        out
    }
}

impl DeviceReport {
    /// One card.
    fn text(&self) -> String {
        let mut out = self.device.clone();
        if let Some(properties) = &self.properties {
            let (major, minor) = properties.compute_capability;
            out.push_str(&format!("  {}, {}, compute capability {major}.{minor}", properties.name, human(properties.total_memory)));
        }
        out.push('\n');
        for step in &self.steps {
            // The title says how it should be: beside FAIL it would read as its opposite.
            let told = match (&step.detail, step.status) {
                (Some(detail), Status::Fail) => detail.clone(),
                (None, Status::Fail) => format!("this does not hold: {}", step.title),
                (Some(detail), _) => format!("{}: {detail}", step.title),
                (None, _) => step.title.to_owned(),
            };
            out.push_str(&format!("  {:<10}  {:<19}  {told}\n", step.status.text(), step.name));
        }
        if !self.bandwidth.is_empty() {
            let copy = self.copy_gb_per_s.map_or_else(String::new, |rate| format!("; the card copies at {rate:.0} GB/s"));
            let rates: Vec<String> = self
                .bandwidth
                .iter()
                .map(|kind| {
                    let part = kind.of_copy_rate.map_or_else(String::new, |part| format!(" ({:.0} %)", 100.0 * part));
                    format!("{} {:.0} GB/s{part}", kind.kind, kind.gb_per_s)
                })
                .collect();
            let above = self.bandwidth.iter().any(|kind| kind.of_copy_rate.is_some_and(|part| part >= 1.005));
            let why =
                if above { "; above 100 %: a copy reads and writes in turns, a pass that does one of them need not turn" } else { "" };
            out.push_str(&format!("  bandwidth: {}{copy}{why}\n", rates.join(", ")));
        }
        for finding in self.findings.iter().skip(1).take(SHOWN) {
            out.push_str(&format!("  also: {}\n", finding.text));
        }
        if self.findings.len() > SHOWN + 1 {
            out.push_str(&format!("  also: {} findings more (`--json` has all)\n", self.findings.len() - SHOWN - 1));
        }
        for wrong in self.mismatches.iter().take(SHOWN) {
            let place = wrong.offset.map_or_else(String::new, |offset| format!(" (offset {offset:#x})"));
            out.push_str(&format!(
                "  wrong word at {}{place} in {}: expected {}, got {}, xor {}\n",
                wrong.address, wrong.step, wrong.expected, wrong.got, wrong.xor
            ));
        }
        if self.mismatch_count as usize > SHOWN.min(self.mismatches.len()) {
            out.push_str(&format!("  {} wrong words in all\n", self.mismatch_count));
        }
        if !self.mismatches.is_empty() || self.findings.iter().any(|finding| !finding.addresses.is_empty()) {
            out.push_str("  addresses are virtual, as this process saw the memory; offsets count the tested memory, block after block");
            // A description names places in the card: the two are not to be compared.
            out.push_str(if self.device.starts_with("sim:") { "; those of `--device sim:` are physical, in the card\n" } else { "\n" });
        }
        out.push_str(&format!("{}: {}: {} ({})\n", self.device, self.status.text(), self.summary, seconds(self.seconds)));
        for hint in &self.hints {
            out.push_str(&format!("hint: {hint}\n"));
        }
        out
    }
}

fn seconds(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.0} ms", seconds * 1e3) } else { format!("{seconds:.1} s") }
}
