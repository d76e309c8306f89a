//! `tare why`

use super::args::WhyArgs;
use super::context::Context;
use crate::error::Result;
use crate::prefix::Prefix;
use crate::why;

pub fn why(args: &WhyArgs, context: &Context<'_>) -> Result<u8> {
    let mut why = match &args.lock {
        Some(lock) => why::in_lock(lock, args.platform.as_deref(), context.tool_platform(), &args.package)?,
        None => why::in_prefix(&Prefix::open(context.locate(&args.environment)?)?, &args.package)?,
    };
    context.printer.json(&why);
    if !args.all {
        let shortest = why.paths.first().map_or(0, Vec::len);
        let before = why.paths.len();
        why.paths.retain(|path| path.len() == shortest);
        why.truncated |= why.paths.len() < before;
    }
    context.printer.data(&why.text());
    Ok(0)
}
