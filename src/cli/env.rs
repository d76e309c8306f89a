//! `tare env`

use serde_json::json;

use super::context::Context;
use crate::error::Result;
use crate::prefix::KnownEnvironment;
use crate::ui::table;

/// Lists the known environments, in conda's shape with `--json`.
pub fn list(context: &Context<'_>) -> Result<u8> {
    let known = crate::prefix::list_known(&context.settings);
    context.printer.json(&json!({
        "envs": known.iter().map(|environment| &environment.prefix).collect::<Vec<_>>(),
        "envs_details": known,
    }));
    if known.is_empty() {
        context.printer.note("no environments; make one: tare create -f environment.yml");
    }
    context.printer.data(&table_of(&known));
    Ok(0)
}

/// Name, active mark, path.
pub fn table_of(known: &[KnownEnvironment]) -> String {
    let rows: Vec<Vec<String>> = known
        .iter()
        .map(|environment| {
            vec![
                environment.name.clone().unwrap_or_default(),
                if environment.active { "*".into() } else { String::new() },
                environment.prefix.display().to_string(),
            ]
        })
        .collect();
    table::columns(&rows, &[])
}
