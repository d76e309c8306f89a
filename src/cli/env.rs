//! `tare env`

use serde_json::json;

use super::args::EnvDigestArgs;
use super::context::{Context, places};
use crate::error::Result;
use crate::prefix::Prefix;

/// Lists the known environments, in conda's shape with `--json`.
pub fn list(context: &Context<'_>) -> Result<u8> {
    let known = crate::prefix::list_known(&places(&context.settings), false);
    context.printer.json(&json!({
        "envs": known.iter().map(|environment| &environment.prefix).collect::<Vec<_>>(),
        "envs_details": known,
    }));
    if known.is_empty() {
        context.printer.note("no environments; make one: tare create -f environment.yml");
    } else {
        context.printer.data(&crate::prefix::environments_text(&known));
    }
    Ok(0)
}

/// One hash of everything in an environment.
pub fn digest(args: &EnvDigestArgs, context: &Context<'_>) -> Result<u8> {
    let printer = context.printer;
    let prefix = Prefix::open(context.locate(&args.environment)?)?;
    let tree = crate::verify::tree_digest(&prefix, args.relocatable, &*printer.progress())?;
    let mut document = json!({ "prefix": prefix.path(), "digest": tree.digest, "relocatable": tree.relocatable });
    if args.files {
        document["files"] = json!(tree.lines);
        printer.data(&tree.lines.iter().map(|line| format!("{line}\n")).collect::<String>());
    }
    printer.json(&document);
    printer.data(&format!("{}\n", tree.digest));
    Ok(0)
}
