//! `tare clean`

use serde_json::json;

use super::args::CleanArgs;
use super::context::Context;
use crate::error::{Error, Result};
use crate::install::clean::{self, CacheFolders, What};
use crate::resolve::count;
use crate::ui::{human_bytes, table};

pub fn clean(args: &CleanArgs, context: &Context<'_>) -> Result<u8> {
    let what = What {
        unused_packages: args.all || args.packages,
        all_packages: args.force_packages,
        repodata: args.all || args.repodata,
        host: args.all || args.host,
        leftovers: args.all || args.leftovers,
    };
    if what == What::default() {
        return Err(Error::usage("nothing to clean was named").hint("`tare clean --all`, or see `tare clean --help`"));
    }
    let folders = CacheFolders::under(&context.settings.cache_dir.value);
    let known: Vec<_> = crate::prefix::list_known(&context.settings).into_iter().map(|environment| environment.prefix).collect();
    let removed = clean::clean(&folders, &context.settings.envs_dirs.value, &known, what, args.dry_run)?;
    let bytes: u64 = removed.iter().map(|item| item.bytes).sum();
    let rows: Vec<Vec<String>> =
        removed.iter().map(|item| vec![item.kind.to_string(), item.name.clone(), human_bytes(item.bytes)]).collect();
    context.printer.data(&table::columns(&rows, &[2]));
    let verb = if args.dry_run { "would remove" } else { "removed" };
    context.printer.note(&format!("{verb} {}, {}", count(removed.len(), "item"), human_bytes(bytes)));
    context.printer.json(&json!({ "dry_run": args.dry_run, "removed": removed, "bytes": bytes }));
    Ok(0)
}
