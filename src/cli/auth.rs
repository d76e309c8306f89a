//! `tare auth`

use std::io::Read;

use serde_json::json;

use super::args::AuthCommand;
use super::context::Context;
use crate::channel::auth::{self, Secret};
use crate::error::{Error, Result};

pub fn auth(command: AuthCommand, context: &Context<'_>) -> Result<u8> {
    let printer = context.printer;
    let progress = printer.progress();
    match command {
        AuthCommand::Login { host, token, conda_token, username, password } => {
            let secret = match (token, conda_token, username, password) {
                (Some(token), ..) => Secret::Token(value(token)?),
                (_, Some(token), ..) => Secret::CondaToken(value(token)?),
                (_, _, Some(user), Some(password)) => Secret::Basic { user, password: value(password)? },
                _ => {
                    return Err(Error::usage("no credentials were given")
                        .hint("--token, --conda-token, or --username with --password; `-` as the value reads it from stdin"));
                }
            };
            let stored = auth::login(&context.settings, &host, &secret, &*progress)?;
            printer.note(&format!("stored credentials for `{}` in {}", stored.host, stored.place));
            printer.json(&json!({ "stored": stored }));
        }
        AuthCommand::Logout { host } => {
            let removed = auth::logout(&context.settings, &host, &*progress)?;
            for stored in &removed {
                printer.note(&format!("removed credentials for `{}` from {}", stored.host, stored.place));
            }
            printer.json(&json!({ "removed": removed }));
        }
    }
    Ok(0)
}

/// The value itself, or what stdin holds for `-`.
fn value(argument: String) -> Result<String> {
    if argument != "-" {
        return Ok(argument);
    }
    let mut text = String::new();
    std::io::stdin().take(1 << 20).read_to_string(&mut text).map_err(|error| Error::failure("cannot read stdin").because(error))?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}
