//! `tare why`

use super::args::WhyArgs;
use super::context::Context;
use crate::error::Result;
use crate::prefix::Prefix;
use crate::solve;

pub fn why(args: &WhyArgs, context: &Context<'_>) -> Result<u8> {
    let prefix = Prefix::open(context.locate(&args.environment)?)?;
    let records = prefix.records()?;
    let packages: Vec<_> = records.iter().map(|record| record.repodata_record.package_record.clone()).collect();
    let why = solve::why(&packages, &prefix.requested()?, &args.package)?;
    context.printer.json(&why);
    context.printer.data(&why.text(args.all));
    Ok(0)
}
