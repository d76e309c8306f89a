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
    let mut requested = Vec::new();
    for text in prefix.requested_specs()?.values() {
        requested.push(crate::spec::parse_match_spec(text, None)?);
    }
    let mut why = solve::why(&packages, &requested, &args.package)?;
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
