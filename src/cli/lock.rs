//! `tare lock`

use std::path::PathBuf;

use serde_json::json;

use super::args::LockArgs;
use super::context::{Context, gpu, pip_resolver, priority};
use crate::error::{Error, Result};
use crate::lock::{self, CheckOptions, MakeOptions, PlatformChange, ReadOptions};
use crate::resolve::{Inputs, count};
use crate::spec::{Fetched, Input};

pub async fn lock(args: LockArgs, context: &Context<'_>) -> Result<u8> {
    if args.check {
        return check(&args, context);
    }
    if args.files.is_empty() && args.specs.is_empty() {
        return Err(Error::usage("there is nothing to lock").hint("name the file: tare lock -f environment.yml"));
    }
    let inputs = Inputs {
        files: args.files.clone(),
        specs: args.specs.clone(),
        channels: args.channels.channels.clone(),
        override_channels: args.channels.override_channels,
        priority: priority(&args.channels),
        exclude_newer: args.channels.exclude_newer.clone(),
        cuda: args.cuda.clone(),
        virtual_packages: args.virtual_packages.clone(),
        gpu: gpu(args.gpu),
        pip_resolver: pip_resolver(&args.channels),
        no_pip: args.no_pip,
        ..Inputs::default()
    };
    let options = MakeOptions {
        platforms: args.platforms.clone(),
        output: args.output.clone(),
        update: args.update.clone(),
        upgrade: args.upgrade,
        gpu_given: args.gpu.is_some(),
        dry_run: args.dry_run,
    };
    let printer = context.printer;
    let made = lock::make(&inputs, &options, &context.settings, printer.progress()).await?;
    let shown = made.path.display();
    let message = match (made.changed, args.dry_run) {
        (false, _) => format!("`{shown}` is up to date"),
        (true, true) => format!("`{shown}` would change"),
        (true, false) => format!("wrote `{shown}`"),
    };
    printer.note(&message);
    for change in &made.changes {
        for line in change_lines(change) {
            if args.dry_run {
                printer.data(&format!("{line}\n"));
            } else {
                printer.note(&line);
            }
        }
    }
    printer.json(&json!({
        "lock": made.path,
        "changed": made.changed,
        "dry_run": args.dry_run,
        "platforms": made.changes,
        "provenance": made.lock.provenance,
    }));
    Ok(0)
}

/// What became different on a platform, one line for each package.
fn change_lines(change: &PlatformChange) -> Vec<String> {
    let mut lines = vec![format!("{}: {}", change.platform, count(change.packages, "package"))];
    let quiet = change.changed.is_empty() && change.removed.is_empty() && change.added.len() == change.packages;
    if quiet {
        return lines;
    }
    lines.extend(change.added.iter().map(|text| format!("  + {text}")));
    lines.extend(change.removed.iter().map(|text| format!("  - {text}")));
    lines.extend(change.changed.iter().map(|text| format!("  ~ {text}")));
    lines
}

fn check(args: &LockArgs, context: &Context<'_>) -> Result<u8> {
    // A positional argument that is a lock is the lock; anything else is a match spec.
    let (mut lock, mut specs) = (None::<PathBuf>, Vec::new());
    for text in &args.specs {
        let file = std::path::Path::new(text);
        let looks = [".lock", ".yml", ".yaml", ".txt", ".toml"].iter().any(|ending| text.ends_with(ending)) || file.is_file();
        if looks && lock.is_none() { lock = Some(file.to_owned()) } else { specs.push(text.clone()) }
    }
    let lock = lock.unwrap_or_else(|| args.output.clone());
    if args.files.is_empty() && specs.is_empty() {
        return Err(Error::usage("there is nothing to check the lock against").hint("name the file: tare lock --check -f environment.yml"));
    }
    let read = ReadOptions { environment: args.environment.clone(), ..ReadOptions::default() };
    let locked = lock::read_file(&lock, &read)?;
    let options = CheckOptions {
        specs,
        channels: args.channels.channels.clone(),
        override_channels: args.channels.override_channels,
        platforms: args.platforms.clone(),
        no_pip: args.no_pip,
        lock_name: lock.display().to_string(),
    };
    let checked = lock::check(&locked, &local_files(&args.files)?, &options, &context.settings)?;
    for remark in &checked.remarks {
        context.printer.note(remark);
    }
    let message = format!("`{}` satisfies what is asked for: {}", lock.display(), checked.text());
    context.printer.note(&message);
    context.printer.json(&json!({ "lock": lock, "satisfied": true, "checked": checked }));
    Ok(0)
}

/// The texts of input files, none of which may be a URL: a check needs no network.
pub(super) fn local_files(files: &[String]) -> Result<Vec<Fetched>> {
    let cwd = std::env::current_dir().map_err(|error| Error::failure("the current folder is gone").because(error))?;
    let mut fetched = Vec::new();
    for file in files {
        match Input::parse(file)?.read_local(&cwd)? {
            Some(text) => fetched.push(text),
            None => {
                return Err(Error::usage("a check uses no network, so it reads no file by URL")
                    .hint("download the file first, or pipe it in: -f -"));
            }
        }
    }
    Ok(fetched)
}

/// A lock checked against the files of a command, before it is installed.
pub(super) fn check_against(lock: &std::path::Path, options: &CheckOptions, files: &[String], context: &Context<'_>) -> Result<()> {
    let locked = lock::read_file(lock, &ReadOptions::default())?;
    lock::check(&locked, &local_files(files)?, options, &context.settings)?;
    Ok(())
}
