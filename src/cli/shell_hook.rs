//! `tare shell-hook`

use std::collections::HashMap;

use super::args::ShellHookArgs;
use super::context::{Context, environment};
use crate::error::Result;
use crate::prefix::{self, Prefix, Shell};

pub fn shell_hook(args: &ShellHookArgs, context: &Context<'_>) -> Result<u8> {
    let prefix = Prefix::open(context.locate(&args.environment)?)?;
    if context.printer.is_json() {
        context.printer.json(&prefix::shell_hook_json(&prefix, &environment())?);
        return Ok(0);
    }
    let shell = match &args.shell {
        Some(name) => name.parse()?,
        None => Shell::detect(|name| std::env::var(name).ok()),
    };
    let env: HashMap<String, String> =
        environment().into_iter().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))).collect();
    context.printer.raw(&prefix::activation(&prefix, shell, &env)?);
    Ok(0)
}
