//! `tare convert`

use super::args::ConvertArgs;
use super::context::Context;
use super::export as shared;
use crate::error::Result;
use crate::export;

pub fn convert(args: &ConvertArgs, context: &Context<'_>) -> Result<u8> {
    let format = shared::format(args.to.as_deref(), &args.output)?;
    let options = shared::options(&args.shape, context)?;
    let exported = if args.from.is_dir() {
        export::export(&shared::subject_of_folder(&args.from, context)?, format, &options)?
    } else {
        export::export_file(&args.from, format, &options, args.shape.platform.as_deref())?
    };
    shared::write(&exported, format, &args.output, context)
}
