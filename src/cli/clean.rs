//! `tare clean`

use serde_json::json;

use super::args::CleanArgs;
use super::context::Context;
use crate::error::{Error, Result};
use crate::install::Cancel;
use crate::install::clean::{self, CacheFolders, CacheKind, CleanOptions};
use crate::resolve::count;
use crate::ui::human_bytes;

pub async fn clean(args: &CleanArgs, context: &Context<'_>) -> Result<u8> {
    let mut kinds = Vec::new();
    for (wanted, these) in [
        (args.all || args.packages || args.force_packages, &[CacheKind::Packages, CacheKind::Wheels][..]),
        (args.all || args.repodata, &[CacheKind::Repodata]),
        (args.all || args.host, &[CacheKind::Host]),
        (args.all || args.leftovers, &[CacheKind::Temporary]),
    ] {
        if wanted {
            kinds.extend_from_slice(these);
        }
    }
    if kinds.is_empty() {
        return Err(Error::usage("nothing to clean was named").hint("`tare clean --all`, or see `tare clean --help`"));
    }
    let folders = CacheFolders::under(context.settings.cache_dir()?);
    let options = CleanOptions { kinds, also_in_use: args.force_packages, dry_run: args.dry_run };
    let cleaned = clean::clean(&folders, &options, &*context.printer.progress(), &Cancel::new()).await?;
    if args.dry_run {
        for item in &cleaned.removed {
            context.printer.data(&item.path.display().to_string());
        }
    }
    let verb = if args.dry_run { "would remove" } else { "removed" };
    context.printer.note(&format!("{verb} {}, {}", count(cleaned.removed.len(), "item"), human_bytes(cleaned.bytes)));
    context.printer.json(&json!({ "dry_run": args.dry_run, "removed": cleaned.removed, "bytes": cleaned.bytes }));
    Ok(0)
}
