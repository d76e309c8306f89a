//! `tare diff`

use std::path::Path;

use serde_json::json;

use super::args::{DiffArgs, DiffFormat, EnvironmentArgs};
use super::context::Context;
use crate::diff::{self, Side};
use crate::error::{Kind, Result};
use crate::prefix::Prefix;

pub fn diff(args: &DiffArgs, context: &Context<'_>) -> Result<u8> {
    let printer = context.printer;
    let report = diff::compare(&side(&args.a, context)?, &side(&args.b, context)?, args.platform.as_deref())?;
    for note in &report.notes {
        printer.note(note);
    }
    let mut document = json!(report);
    document["success"] = json!(report.equal);
    printer.json(&document);
    let markdown = args.markdown || args.format == DiffFormat::Markdown;
    printer.data(&if markdown { report.markdown() } else { report.text() });
    Ok(if report.equal { 0 } else { Kind::Drift.exit_code() })
}

/// A folder is an environment, another path a file, anything else the name of an environment.
fn side(text: &str, context: &Context<'_>) -> Result<Side> {
    let path = Path::new(text);
    if path.is_dir() {
        return Side::of_prefix(text, &Prefix::open_any(path)?);
    }
    if path.exists() || text.contains(['/', '.']) {
        let subdir = context.tool_platform().unwrap_or(rattler_conda_types::Subdir::NoArch);
        return Side::of_file(text, path, subdir);
    }
    let which = EnvironmentArgs { name: Some(text.to_owned()), prefix: None };
    Side::of_prefix(text, &Prefix::open_any(context.locate(&which)?)?)
}
