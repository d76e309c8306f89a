//! The CLI reference page (`docs/cli.md`), generated from the clap definitions.

use std::fmt::Write;

/// Markdown for a command and everything below it; hidden commands and options are left out.
pub fn markdown(command: &clap::Command) -> String {
    let mut command = command.clone();
    command.build();
    let mut text = String::from("# Command line reference\n\nGenerated from the program; `tare COMMAND --help` shows the same.\n");
    let globals: Vec<String> = command.get_arguments().filter(|arg| arg.is_global_set()).map(|arg| arg.get_id().to_string()).collect();
    section(&command, "tare", &globals, true, &mut text);
    text
}

fn section(command: &clap::Command, path: &str, globals: &[String], top: bool, text: &mut String) {
    // Writing to a String cannot fail.
    let _ = write!(text, "\n## `{path}`\n\n");
    if let Some(about) = command.get_long_about().or(command.get_about()) {
        let about = about.to_string();
        let (prose, examples) = about.split_once("Examples:\n").map_or((about.as_str(), None), |(prose, rest)| (prose, Some(rest)));
        let _ = writeln!(text, "{}", prose.trim());
        if let Some(examples) = examples {
            let _ = write!(text, "\n```sh\n");
            for line in examples.lines() {
                let _ = writeln!(text, "{}", line.trim());
            }
            let _ = writeln!(text, "```");
        }
    }
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").trim();
    let usage =
        if usage.starts_with("tare") { usage.to_owned() } else { format!("{path} {}", usage.split_once(' ').map_or("", |(_, rest)| rest)) };
    let _ = write!(text, "\n```text\n{usage}\n```\n");

    let mut heading = None;
    for arg in command.get_arguments() {
        let id = arg.get_id().as_str();
        if arg.is_hide_set() || id == "help" || id == "version" || (!top && globals.iter().any(|global| global == id)) {
            continue;
        }
        let this = arg.get_help_heading().unwrap_or(if arg.is_positional() { "Arguments" } else { "Options" });
        if heading != Some(this) {
            let _ = write!(text, "\n**{this}**\n\n");
            heading = Some(this);
        }
        let _ = write!(text, "- `{}`", signature(arg));
        if let Some(help) = arg.get_long_help().or(arg.get_help()) {
            let _ = write!(text, ": {}", help.to_string().replace('\n', " "));
        }
        let values: Vec<_> = arg.get_possible_values().into_iter().filter(|value| !value.is_hide_set()).collect();
        if arg.get_action().takes_values() && !values.is_empty() {
            let names: Vec<String> = values.iter().map(|value| format!("`{}`", value.get_name())).collect();
            let _ = write!(text, " (one of {})", names.join(", "));
        }
        if let Some(env) = arg.get_env() {
            let _ = write!(text, " (environment: `{}`)", env.to_string_lossy());
        }
        if arg.get_action().takes_values() && !arg.get_default_values().is_empty() {
            let values: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
            let _ = write!(text, " (default: `{}`)", values.join(" "));
        }
        text.push('\n');
    }
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        section(sub, &format!("{path} {}", sub.get_name()), globals, false, text);
    }
    if top && let Some(after) = command.get_after_help() {
        let _ = write!(text, "\n{after}\n");
    }
}

fn signature(arg: &clap::Arg) -> String {
    let value = arg.get_value_names().map(|names| names.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "));
    let value = value.filter(|_| arg.get_action().takes_values());
    if arg.is_positional() {
        return value.unwrap_or_else(|| arg.get_id().to_string().to_uppercase());
    }
    let mut text = String::new();
    if let Some(short) = arg.get_short() {
        let _ = write!(text, "-{short}");
    }
    if let Some(long) = arg.get_long() {
        let _ = write!(text, "{}--{long}", if text.is_empty() { "" } else { ", " });
    }
    if let Some(value) = value {
        let _ = write!(text, " {value}");
    }
    text
}
