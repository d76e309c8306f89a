//! `tare verify`

use std::time::Duration;

use serde_json::json;

use super::args::VerifyArgs;
use super::context::Context;
use crate::change::{self, Repaired};
use crate::error::{Error, Kind, Result};
use crate::install::Cancel;
use crate::prefix::{Prefix, Which};
use crate::resolve::count;
use crate::verify::{self, Fault, Options, Report};

pub async fn verify(args: VerifyArgs, context: &Context<'_>) -> Result<u8> {
    let printer = context.printer;
    let check = Options { extra: !args.no_extra, ..Options::default() };
    let (prefix, mut report, repaired) = if args.repair {
        let repaired = repair(&args, check, context).await?;
        (Prefix::open_any(&repaired.prefix)?, repaired.after.clone(), Some(repaired))
    } else {
        let prefix = Prefix::open_any(context.locate(&args.environment)?)?;
        let report = verify::verify(&prefix, check, &*printer.progress())?;
        (prefix, report, None)
    };
    if let Some(lock) = &args.lock {
        report.findings.extend(crate::diff::against_lock(&prefix, lock)?);
    }
    let mut document = json!(report);
    document["prefix"] = json!(prefix.path());
    document["success"] = json!(report.is_ok());
    if let Some(repaired) = &repaired {
        document["repair"] = json!({
            "dry_run": args.dry_run,
            "packages": repaired.packages,
            "fetched": repaired.fetched,
            "siblings": repaired.siblings,
            "repaired": repaired.fixed().collect::<Vec<_>>(),
            "unrepaired": repaired.unrepaired,
            "changed": repaired.changed,
        });
        tell(repaired, &report, args.dry_run, context);
    }
    printer.json(&document);
    printer.data(&report.text());
    if !report.is_ok() {
        let text = report.text();
        let summary = text.lines().last().unwrap_or_default();
        let mut error = Error::new(Kind::Verification, format!("`{}` is not as installed: {summary}", prefix.path().display()));
        let first: Vec<&str> = text.lines().take(10).filter(|line| *line != summary).collect();
        error = error.because(format!("\n{}", first.join("\n")));
        printer.annotate_error(&error);
    }
    Ok(if report.is_ok() { 0 } else { Kind::Verification.exit_code() })
}

async fn repair(args: &VerifyArgs, check: Options, context: &Context<'_>) -> Result<Repaired> {
    let options = change::Options {
        which: Which { name: args.environment.name.clone(), prefix: args.environment.prefix.clone() },
        dry_run: args.dry_run,
        lock_timeout: args.lock_timeout.map(Duration::from_secs),
        override_frozen: args.override_frozen,
        command: std::env::args().collect(),
        cancel: Cancel::new(),
        ..change::Options::default()
    };
    change::repair(check, &options, &context.settings, context.printer.progress()).await
}

fn tell(repaired: &Repaired, left: &Report, dry_run: bool, context: &Context<'_>) {
    let printer = context.printer;
    let names = repaired.packages.join(", ");
    let number = count(repaired.packages.len(), "package");
    if dry_run && !repaired.packages.is_empty() {
        printer.note(&format!("would link {number} anew: {names}"));
        if !repaired.fetched.is_empty() {
            printer
                .note(&format!("would fetch again, because the copies in the cache are damaged or gone: {}", repaired.fetched.join(", ")));
        }
    } else if repaired.changed.is_some() {
        printer.note(&format!("linked {number} anew: {names}"));
        for finding in repaired.fixed().filter(|finding| !finding.path.is_empty()) {
            printer.note(&format!("repaired `{}`: {}", finding.path, finding.fault.sentence()));
        }
    }
    tell_siblings(&repaired.siblings, context);
    for unrepaired in &repaired.unrepaired {
        printer.warn(&format!("`{}` cannot be repaired: {}", unrepaired.package, unrepaired.why), &[]);
    }
    if dry_run {
        return;
    }
    let has = |fault: Fault| left.findings.iter().any(|finding| finding.fault == fault);
    let conda = |package: &Option<String>| package.as_ref().is_some_and(|name| repaired.unrepaired.iter().any(|u| u.package == *name));
    let python = left.findings.iter().any(|finding| {
        matches!(finding.fault, Fault::Missing | Fault::Changed | Fault::WrongMode | Fault::DamagedRecord | Fault::StalePyc)
            && !finding.path.starts_with("conda-meta")
            && !conda(&finding.package)
    });
    let mut hints: Vec<&str> = Vec::new();
    if has(Fault::Moved) {
        hints.push("an environment that was moved is repaired for its new place: tare relocate");
    }
    if has(Fault::Extra) {
        hints.push("files of no package are yours: remove them, or leave them out of the check: --no-extra");
    }
    if has(Fault::Foreign) {
        hints.push("what another tool installed is for that tool to remove");
    }
    if python {
        hints.push("what pip installed is installed again by pip: python -m pip install --force-reinstall --no-deps NAME");
    }
    if has(Fault::Drift) {
        hints.push("to make the packages those of the lock: tare sync");
    }
    if left.findings.iter().any(|finding| finding.path == "conda-meta/state") {
        hints.push("variables are set again by: tare env config vars set NAME=VALUE");
    }
    if !hints.is_empty() {
        let hints: Vec<String> = hints.iter().map(ToString::to_string).collect();
        printer.warn(&format!("{} cannot be repaired", count(left.findings.len(), "fault")), &hints);
    }
}

/// Environments, and files of each, that are named one by one.
const SHOWN: usize = 3;

/// Other environments that share the damaged files: one warning with all of them, one hint.
fn tell_siblings(siblings: &[change::Sibling], context: &Context<'_>) {
    let Some(first) = siblings.first() else { return };
    let more = |number: usize| if number > SHOWN { format!(" and {} more", number - SHOWN) } else { String::new() };
    let lines: Vec<String> = siblings
        .iter()
        .take(SHOWN)
        .map(|sibling| {
            let files: Vec<String> = sibling.files.iter().take(SHOWN).map(|file| format!("`{file}`")).collect();
            format!("`{}`: {}{}", sibling.prefix.display(), files.join(", "), more(sibling.files.len()))
        })
        .collect();
    let who =
        if siblings.len() == 1 { "another environment has".to_owned() } else { format!("{} other environments have", siblings.len()) };
    let message = format!("{who} the same damaged files, which this does not repair: {}{}", lines.join("; "), more(siblings.len()));
    let place = crate::text::quoted(&first.prefix.display().to_string());
    let each = if siblings.len() == 1 { "it" } else { "each of them" };
    context.printer.warn(&message, &[format!("to repair {each} too: tare verify -p {place} --repair")]);
}
