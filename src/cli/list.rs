//! `tare list`

use super::args::ListArgs;
use super::context::Context;
use crate::error::Result;
use crate::prefix::{Prefix, list};

pub fn list(args: &ListArgs, context: &Context<'_>) -> Result<u8> {
    let prefix = Prefix::open(&context.locate(&args.environment)?)?;
    let options = list::Options { pattern: args.pattern.clone(), full_name: args.full_name, pip: !args.no_pip };
    if args.revisions {
        let revisions = list::revisions(&prefix)?;
        context.printer.json_bare(&serde_json::json!(revisions));
        context.printer.data(&list::revisions_text(&revisions));
        return Ok(0);
    }
    let packages = list::packages(&prefix, &options)?;
    if context.printer.is_json() {
        context.printer.json_bare(&list::json(&packages));
    } else if args.explicit {
        let hash = match (args.md5, args.sha256) {
            (true, _) => list::Hash::Md5,
            (_, true) => list::Hash::Sha256,
            _ => list::Hash::None,
        };
        context.printer.data(&list::explicit(&prefix, &options, hash)?);
    } else if args.export {
        context.printer.data(&list::export(&prefix, &packages));
    } else {
        context.printer.data(&list::text(&prefix, &packages));
    }
    Ok(0)
}
