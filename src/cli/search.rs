//! `tare search`

use serde_json::json;

use super::args::SearchArgs;
use super::context::{Context, inputs};
use crate::error::Result;
use crate::search;
use crate::ui::{human_bytes, table};

pub async fn search(args: &SearchArgs, context: &Context<'_>) -> Result<u8> {
    let request = inputs(&[], &[], &args.channels, &args.target);
    let found = search::search(&args.spec, &request, &context.settings, context.printer.progress()).await?;
    let shown: Vec<_> = found.iter().map(|record| crate::create::record_json(record, true)).collect();
    context.printer.json(&json!({ "packages": shown }));
    if args.info {
        for record in &found {
            let package = &record.package_record;
            let mut text = format!("{} {} {}\n", package.name.as_normalized(), package.version, package.build);
            text.push_str(&format!("  channel     {}/{}\n", crate::install::channel_name(record), package.subdir));
            text.push_str(&format!("  url         {}\n", crate::channel::redact_url(&record.url)));
            if let Some(size) = package.size {
                text.push_str(&format!("  size        {} ({size} bytes)\n", human_bytes(size)));
            }
            if let Some(license) = &package.license {
                text.push_str(&format!("  license     {license}\n"));
            }
            for (title, list) in [("depends", &package.depends), ("constrains", &package.constrains)] {
                for (nth, item) in list.iter().enumerate() {
                    text.push_str(&format!("  {:<11} {item}\n", if nth == 0 { title } else { "" }));
                }
            }
            context.printer.data(&text);
        }
        return Ok(0);
    }
    let mut rows = vec![["name", "version", "builds", "channel"].map(str::to_owned).to_vec()];
    let mut groups = 0;
    for group in found.chunk_by(|a, b| {
        a.package_record.name == b.package_record.name && a.package_record.version == b.package_record.version && a.channel == b.channel
    }) {
        groups += 1;
        if args.limit > 0 && rows.len() > args.limit {
            continue;
        }
        let first = &group[0].package_record;
        let mut builds: Vec<String> = group.iter().take(3).map(|record| record.package_record.build.to_string()).collect();
        if group.len() > 3 {
            builds.push(format!("and {} more", group.len() - 3));
        }
        rows.push(vec![
            first.name.as_normalized().to_owned(),
            first.version.to_string(),
            builds.join(", "),
            crate::install::channel_name(&group[0]),
        ]);
    }
    let left = groups - (rows.len() - 1);
    context.printer.data(&table::columns(&rows, &[]));
    if left > 0 {
        context.printer.note(&format!("{left} more: --limit 0 shows all"));
    }
    Ok(0)
}
