//! `tare list`

use serde_json::json;

use super::args::ListArgs;
use super::context::Context;
use crate::error::Result;
use crate::prefix::{self, Hashes, ListOptions, Prefix, Row};

pub fn list(args: &ListArgs, context: &Context<'_>) -> Result<u8> {
    let prefix = Prefix::open_any(context.locate(&args.environment)?)?;
    let printer = context.printer;
    if args.revisions {
        let revisions = crate::pypi::revisions::with_both_halves(&prefix)?;
        if revisions.is_empty() {
            printer.note("the environment has no history");
        }
        printer.json_bare(&prefix::revisions_json(&revisions));
        printer.data(&prefix::revisions_text(&revisions));
        return Ok(0);
    }
    let platform = context.tool_platform();
    if args.explicit && !printer.is_json() {
        let hashes = match (args.md5, args.sha256) {
            (true, _) => Hashes::Md5,
            (_, true) => Hashes::Sha256,
            _ => Hashes::None,
        };
        let text = prefix::explicit_text(&prefix, hashes, platform)?;
        let mut pip = prefix.pip_distributions();
        pip.retain(|distribution| !crate::pypi::installed::of(&prefix, distribution).is_tooling());
        if !pip.is_empty() {
            let names: Vec<String> = pip.iter().map(|distribution| format!("`{}`", distribution.name)).collect();
            printer.warn(
                &format!("an explicit list cannot name what pip installed, and leaves out {}", names.join(", ")),
                &["tare export has formats that can".to_owned()],
            );
        }
        printer.data(&text);
        return Ok(0);
    }
    let options = ListOptions { pattern: args.pattern.clone(), full_name: args.full_name, no_pip: args.no_pip, reverse: args.reverse };
    let rows = prefix::rows(&prefix, &options)?;
    // conda ends this document without a line feed.
    printer.json_exactly(&json!(rows));
    if printer.is_json() {
        return Ok(0);
    }
    // The table is conda's; what it has no place for goes beside it.
    if !args.export
        && !args.canonical
        && let Some(last) = crate::check::last(&prefix)
    {
        printer.note(&format!("last check: {}", last.text()));
    }
    for row in rows.iter().filter(|row| row.tooling) {
        let (name, version) = (&row.name, &row.version);
        printer.note(&match args.export {
            true => format!("`{name}` is tare's own tooling and left out: tare notebook install puts it where it is wanted"),
            false => format!("`{name} {version}` is tare's own tooling (tare notebook): in no lock and no export"),
        });
    }
    printer.data(&if args.export {
        prefix::export_text(&rows, platform)
    } else if args.canonical {
        rows.iter().map(|row: &Row| prefix::canonical(row) + "\n").collect()
    } else if args.fields.is_empty() {
        prefix::list_text(&prefix, &rows)
    } else {
        prefix::list_fields_text(&prefix, &rows, &args.fields)?
    });
    Ok(0)
}
