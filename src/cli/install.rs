//! `tare install` (planning only)

use super::args::InstallArgs;
use super::context::{Context, inputs};
use crate::create;
use crate::error::{Error, Result};

pub async fn install(args: InstallArgs, context: &Context<'_>) -> Result<u8> {
    if !args.dry_run {
        return Err(Error::failure("changing an environment in place is not possible yet")
            .hint("`--dry-run` shows the plan; `tare create --force` makes the environment anew"));
    }
    let prefix = context.locate(&args.environment)?;
    let request = inputs(&args.specs, &[], &args.channels, &args.target);
    let planned = create::plan_install(&prefix, &request, &context.settings, context.printer.progress()).await?;
    context.printer.data(&super::create::plan_text(&planned));
    context.printer.json(&create::plan_json(&planned, true));
    Ok(0)
}
