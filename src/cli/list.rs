//! `tare list`

use super::args::ListArgs;
use super::context::Context;
use crate::error::Result;
use crate::prefix::{self, Hashes, ListOptions, Prefix};

pub fn list(args: &ListArgs, context: &Context<'_>) -> Result<u8> {
    let prefix = Prefix::open(context.locate(&args.environment)?)?;
    let printer = context.printer;
    if args.revisions {
        let revisions = prefix.history()?;
        printer.json_bare(&serde_json::json!(revisions));
        printer.data(&prefix::revisions_text(&revisions));
        return Ok(0);
    }
    if args.explicit && !printer.is_json() {
        let hashes = match (args.md5, args.sha256) {
            (true, _) => Hashes::Md5,
            (_, true) => Hashes::Sha256,
            _ => Hashes::None,
        };
        printer.data(&prefix::explicit_text(&prefix, hashes)?);
        return Ok(0);
    }
    let options = ListOptions { pattern: args.pattern.clone(), full_name: args.full_name, no_pip: args.no_pip, ..ListOptions::default() };
    let rows = prefix::rows(&prefix, &options)?;
    printer.json_bare(&serde_json::json!(rows));
    printer.data(&if args.export { prefix::export_text(&prefix, &rows) } else { prefix::list_text(&prefix, &rows) });
    Ok(0)
}
