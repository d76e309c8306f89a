//! The report for a browser: one file, with style inside; it asks nothing of the network and runs no script.

use std::fmt::Write as _;

use super::report::{MemoryPicture, Report, Verdict};
use crate::gpu::human;

const STYLE: &str = include_str!("page.css");

/// Text as it may stand between tags and in attributes.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && c != '\n' && c != '\t' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

fn mark(verdict: Verdict) -> (&'static str, &'static str) {
    match verdict {
        Verdict::Pass => ("pass", "✓"),
        Verdict::Fail => ("fail", "✗"),
        Verdict::NotTested => ("open", "–"),
    }
}

/// The page for one report or several.
pub fn page(reports: &[Report]) -> String {
    let title = match reports {
        [report] => format!("tare check: {}", report.prefix.display()),
        _ => format!("tare check: {} environments", reports.len()),
    };
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">\n\
         <meta name=\"referrer\" content=\"no-referrer\">\n<title>{}</title>\n<style>\n{}\n</style>\n</head>\n<body>\n",
        escape(&title),
        STYLE.trim_end()
    );
    for report in reports {
        section(&mut out, report);
    }
    out.push_str("</body>\n</html>\n");
    out
}

fn section(out: &mut String, report: &Report) {
    let (class, sign) = mark(report.verdict);
    let _ = write!(
        out,
        "<header class=\"{class}\">\n<h1><span class=\"sign\" aria-hidden=\"true\">{sign}</span> {}</h1>\n<p>{} · {} · {} · level {} · exit code {}</p>\n</header>\n<main>\n",
        escape(&report.summary()),
        escape(&report.prefix.display().to_string()),
        escape(report.kind.name()),
        escape(&report.time),
        escape(&report.level),
        report.exit_code
    );
    if report.verdict == Verdict::NotTested {
        out.push_str("<p class=\"hint\">NOT TESTED is no failure: the step could not be done here, and the page says why. It is no PASS either.</p>\n");
    }
    out.push_str("<section aria-labelledby=\"h-steps\">\n<h2 id=\"h-steps\">Steps</h2>\n<div class=\"steps\">\n");
    for step in &report.steps {
        let (class, sign) = mark(step.verdict);
        let open = if step.verdict == Verdict::Fail { " open" } else { "" };
        let _ = writeln!(
            out,
            "<details class=\"{class}\"{open}><summary><span class=\"badge\">{sign} {}</span><b>{}</b><span class=\"reason\">{}</span><span class=\"time\">{:.2} s</span></summary>",
            step.verdict.name(),
            escape(&step.title),
            escape(&step.reason),
            step.seconds
        );
        for (name, lines) in [("evidence", &step.evidence), ("worth knowing", &step.remarks), ("what to do", &step.remedies)] {
            if !lines.is_empty() {
                let _ = write!(out, "<h3>{name}</h3><ul>");
                for line in lines {
                    let _ = write!(out, "<li>{}</li>", escape(line));
                }
                out.push_str("</ul>\n");
            }
        }
        if step.evidence.is_empty() && step.remarks.is_empty() && step.remedies.is_empty() {
            out.push_str("<p class=\"hint\">nothing more to say</p>\n");
        }
        out.push_str("</details>\n");
    }
    out.push_str("</div>\n</section>\n");
    match &report.memory {
        Some(picture) => memory(out, picture),
        None => {
            let why = report.step("memory").map_or("it is no part of this report", |step| step.reason.as_str());
            let _ = write!(
                out,
                "<section aria-labelledby=\"h-map\">\n<h2 id=\"h-map\">Memory map and bandwidth</h2>\n<p class=\"hint\">No memory was tested: {}.</p>\n</section>\n",
                escape(why)
            );
        }
    }
    tables(out, report);
    out.push_str("</main>\n");
}

fn table(out: &mut String, title: &str, id: &str, rows: &[(String, String)]) {
    let _ = write!(out, "<section aria-labelledby=\"{id}\">\n<h2 id=\"{id}\">{}</h2>\n<table>\n", escape(title));
    for (name, value) in rows {
        let _ = writeln!(out, "<tr><th scope=\"row\">{}</th><td>{}</td></tr>", escape(name), escape(value));
    }
    out.push_str("</table>\n</section>\n");
}

fn tables(out: &mut String, report: &Report) {
    let mut rows: Vec<(String, String)> = report.environment.iter().map(|fact| (fact.name.clone(), fact.value.clone())).collect();
    rows.push(("interpreter".into(), report.python.as_ref().map_or_else(|| "none".into(), |path| path.display().to_string())));
    rows.push(("digest of the packages".into(), report.lock_digest.clone().unwrap_or_else(|| "none".into())));
    out.push_str("<div class=\"two\">\n");
    table(out, "Environment", "h-environment", &rows);
    let or_none = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".into());
    let mut rows = vec![
        ("driver".to_owned(), or_none(&report.driver.version)),
        ("CUDA up to".to_owned(), or_none(&report.driver.cuda)),
        ("told by".to_owned(), or_none(&report.driver.source)),
    ];
    rows.extend(report.driver.problem.iter().map(|problem| ("problem".to_owned(), problem.clone())));
    rows.extend(report.driver.hint.iter().map(|hint| ("hint".to_owned(), hint.clone())));
    for device in &report.devices {
        let mut value = device.name.clone();
        if let Some(bytes) = device.memory_bytes {
            let _ = write!(value, ", {}", human(bytes));
        }
        if let Some(capability) = &device.compute_capability {
            let _ = write!(value, ", compute capability {capability}");
        }
        rows.push((format!("GPU {}", device.index), value));
    }
    if report.devices.is_empty() {
        rows.push(("GPU".into(), "none".into()));
    }
    rows.push(("tare".into(), report.tare_version.clone()));
    table(out, "Driver", "h-driver", &rows);
    out.push_str("</div>\n");
}

/// Colour class of a piece; only known words get into the page.
fn state_class(state: &str) -> &'static str {
    match state {
        "good" => "m-good",
        "bad" => "m-bad",
        "used" => "m-used",
        _ => "m-open",
    }
}

fn memory(out: &mut String, picture: &MemoryPicture) {
    out.push_str("<section aria-labelledby=\"h-map\">\n<h2 id=\"h-map\">Memory map of the test</h2>\n");
    let mut devices: Vec<u32> = picture.map.iter().map(|piece| piece.device).collect();
    devices.sort_unstable();
    devices.dedup();
    for device in devices {
        let pieces: Vec<_> = picture.map.iter().filter(|piece| piece.device == device).collect();
        let total = pieces.iter().map(|piece| piece.offset.saturating_add(piece.bytes)).max().unwrap_or(0).max(1);
        let of = |state: &str| pieces.iter().filter(|piece| piece.state == state).map(|piece| piece.bytes).fold(0u64, u64::saturating_add);
        let _ = write!(
            out,
            "<h3>GPU {device}: {} tested, {} bad, {} used by others, of {}</h3>\n<svg class=\"map\" viewBox=\"0 0 1000 36\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"memory of GPU {device}\">\n<rect class=\"m-open\" x=\"0\" y=\"0\" width=\"1000\" height=\"36\"/>\n",
            human(of("good").saturating_add(of("bad"))),
            human(of("bad")),
            human(of("used")),
            human(total)
        );
        // Faults are drawn last and never thinner than can be seen.
        for bad in [false, true] {
            for piece in pieces.iter().filter(|piece| (piece.state == "bad") == bad) {
                let x = piece.offset as f64 / total as f64 * 1000.0;
                let width = (piece.bytes as f64 / total as f64 * 1000.0).max(if bad { 2.0 } else { 0.0 });
                let _ = writeln!(
                    out,
                    "<rect class=\"{}\" x=\"{x:.2}\" y=\"0\" width=\"{width:.2}\" height=\"36\"><title>{} at {}: {}{}{}</title></rect>",
                    state_class(&piece.state),
                    human(piece.bytes),
                    human(piece.offset),
                    escape(&piece.state),
                    if piece.note.is_empty() { "" } else { ", " },
                    escape(&piece.note)
                );
            }
        }
        out.push_str("</svg>\n");
    }
    out.push_str("<p class=\"legend\"><span class=\"swatch m-good\"></span>good <span class=\"swatch m-bad\"></span>bad <span class=\"swatch m-used\"></span>used by others <span class=\"swatch m-open\"></span>not tested</p>\n</section>\n");
    if picture.rates.is_empty() {
        return;
    }
    let most = picture.rates.iter().flat_map(|rate| [rate.bytes_per_second, rate.reference.unwrap_or(0.0)]).fold(1.0, f64::max);
    let row = 24;
    let height = picture.rates.len() * row + 6;
    let _ = write!(
        out,
        "<section aria-labelledby=\"h-rate\">\n<h2 id=\"h-rate\">Bandwidth of each pass</h2>\n<svg class=\"rates\" viewBox=\"0 0 1000 {height}\" role=\"img\" aria-label=\"bandwidth of each pass\">\n"
    );
    for (index, rate) in picture.rates.iter().enumerate() {
        let y = index * row + 3;
        let scale = |value: f64| (if value.is_finite() { value.max(0.0) } else { 0.0 }) / most * 500.0;
        let share = rate
            .reference
            .filter(|reference| *reference > 0.0)
            .map(|reference| format!(", {:.0} % of a copy", rate.bytes_per_second / reference * 100.0));
        let _ = write!(
            out,
            "<text x=\"236\" y=\"{}\" text-anchor=\"end\">GPU {} {}</text><rect class=\"bar\" x=\"244\" y=\"{y}\" width=\"{:.1}\" height=\"16\"/>",
            y + 13,
            rate.device,
            escape(&rate.name),
            scale(rate.bytes_per_second)
        );
        if let Some(reference) = rate.reference {
            let x = 244.0 + scale(reference);
            let _ = write!(out, "<line class=\"reference\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{}\" y2=\"{}\"/>", y - 2, y + 18);
        }
        let _ =
            writeln!(out, "<text x=\"768\" y=\"{}\">{:.0} GB/s{}</text>", y + 13, rate.bytes_per_second / 1e9, share.unwrap_or_default());
    }
    out.push_str("</svg>\n<p class=\"legend\">The line across each bar is the card's own copy rate.</p>\n</section>\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_gets_out_of_its_element() {
        assert_eq!(escape("<script>&\"'\u{1b}"), "&lt;script&gt;&amp;&quot;&#39;\u{fffd}");
        assert_eq!(state_class("\"><script>"), "m-open");
    }
}
