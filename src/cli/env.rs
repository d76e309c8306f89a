//! `tare env`

use serde_json::json;

use super::context::{Context, places};
use crate::error::Result;

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
