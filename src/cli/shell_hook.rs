//! `tare shell-hook`

use super::args::ShellHookArgs;
use super::context::{Context, environment};
use super::shell::{calling, prompt};
use crate::error::{Error, Result};
use crate::prefix::{self, Activator, Prefix};

pub fn shell_hook(args: &ShellHookArgs, context: &Context<'_>) -> Result<u8> {
    let env = environment();
    let shell = calling(args.shell.as_deref())?;
    let activator = Activator { shell, env: &env, prompt: prompt(&context.settings) };
    if args.deactivate {
        if context.printer.is_json() {
            return Err(Error::usage("what deactivation does is known by the shell only").hint("leave out --json"));
        }
        context.printer.raw(&activator.deactivate()?.unwrap_or_default());
        return Ok(0);
    }
    let prefix = Prefix::open(context.locate(&args.environment)?)?;
    if context.printer.is_json() {
        context.printer.json(&prefix::shell_hook_json(&prefix, &env)?);
    } else {
        context.printer.raw(&activator.activate(&prefix, args.stack)?);
    }
    Ok(0)
}
