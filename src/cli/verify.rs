//! `tare verify`

use serde_json::json;

use super::args::VerifyArgs;
use super::context::Context;
use crate::error::{Kind, Result};
use crate::prefix::Prefix;
use crate::verify::{self, Options};

pub fn verify(args: &VerifyArgs, context: &Context<'_>) -> Result<u8> {
    let prefix = Prefix::open_any(context.locate(&args.environment)?)?;
    let printer = context.printer;
    let mut report = verify::verify(&prefix, Options { extra: !args.no_extra, ..Options::default() }, &*printer.progress())?;
    if let Some(lock) = &args.lock {
        report.findings.extend(crate::diff::against_lock(&prefix, lock)?);
    }
    let mut document = json!(report);
    document["prefix"] = json!(prefix.path());
    document["success"] = json!(report.is_ok());
    printer.json(&document);
    printer.data(&report.text());
    Ok(if report.is_ok() { 0 } else { Kind::Verification.exit_code() })
}
