//! `tare run`

use super::args::{EnvironmentArgs, Global, RunArgs};
use super::context::{environment, locate, settings};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::prefix::{self, Prefix, RunOptions};
use crate::text::quoted;

pub fn run(args: &RunArgs, global: &Global) -> Result<u8> {
    let mut env = Vec::new();
    for pair in &args.env {
        match pair.split_once('=') {
            Some((name, value)) if !name.is_empty() => env.push((name.to_owned(), value.to_owned())),
            _ => return Err(Error::usage(format!("`{pair}` is not NAME=VALUE"))),
        }
    }
    let settings = settings(global)?;
    let options = RunOptions { cwd: args.cwd.clone(), set: env, clean: args.clean_env };
    locate(&args.environment, &settings)
        .and_then(Prefix::open)
        .and_then(|prefix| prefix::run(&prefix, &args.command, &options, &environment()))
        .map_err(|error| as_environment(error, args, &settings))
}

/// `tare run NAME COMMAND`: the first word is an environment and no program.
fn as_environment(error: Error, args: &RunArgs, settings: &Settings) -> Error {
    let Some(name) = args.command.first().and_then(|word| word.to_str()) else { return error };
    let named = EnvironmentArgs { name: Some(name.to_owned()), prefix: None };
    let given = args.environment.name.is_some() || args.environment.prefix.is_some();
    if given || crate::prefix::validate_name(name).is_err() || locate(&named, settings).is_err() {
        return error;
    }
    let rest: Vec<String> = args.command[1..].iter().map(|word| quoted(&word.to_string_lossy())).collect();
    let rest = if rest.is_empty() { "COMMAND".to_owned() } else { rest.join(" ") };
    error.hint(format!("`{name}` is an environment: tare run -n {name} {rest}"))
}
