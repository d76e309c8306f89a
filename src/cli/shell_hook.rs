//! `tare shell-hook`

use serde_json::json;

use super::args::ShellHookArgs;
use super::context::Context;
use crate::error::Result;
use crate::prefix::Prefix;

pub fn shell_hook(args: &ShellHookArgs, context: &Context<'_>) -> Result<u8> {
    let prefix = Prefix::open(&context.locate(&args.environment)?)?;
    if context.printer.is_json() {
        let variables = crate::prefix::run_environment(&prefix)?;
        context.printer.json(&json!({ "prefix": prefix.path(), "environment_variables": variables }));
        return Ok(0);
    }
    context.printer.raw(&crate::prefix::activation(&prefix, args.shell.as_deref())?);
    Ok(0)
}
