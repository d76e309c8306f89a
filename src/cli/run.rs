//! `tare run`

use super::args::{Global, RunArgs};
use super::context::{environment, locate, settings};
use crate::error::{Error, Result};
use crate::prefix::{self, Prefix, RunOptions};

pub fn run(args: &RunArgs, global: &Global) -> Result<u8> {
    let mut env = Vec::new();
    for pair in &args.env {
        match pair.split_once('=') {
            Some((name, value)) if !name.is_empty() => env.push((name.to_owned(), value.to_owned())),
            _ => return Err(Error::usage(format!("`{pair}` is not NAME=VALUE"))),
        }
    }
    let settings = settings(global)?;
    let prefix = Prefix::open(locate(&args.environment, &settings)?)?;
    let options = RunOptions { cwd: args.cwd.clone(), set: env, clean: args.clean_env };
    prefix::run(&prefix, &args.command, &options, &environment())
}
