//! `tare sync` and `tare create --lock`

use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use super::args::{CreateArgs, LinkArgs, SyncArgs};
use super::context::{Context, link_mode};
use super::create::{name_of, summary};
use crate::error::{Error, Result};
use crate::install::{Cancel, LinkMode};
use crate::lock::{self, CheckOptions, SyncOptions, Synced};
use crate::resolve::count;
use crate::text::quoted;
use crate::ui::{human_bytes, table};

pub async fn sync(args: SyncArgs, context: &Context<'_>) -> Result<u8> {
    let options = SyncOptions {
        lock: args.lock,
        name: args.target.name,
        prefix: args.target.prefix,
        environment: args.environment,
        platform: args.platform,
        categories: args.categories,
        no_pip: args.no_pip,
        force: args.force,
        dry_run: args.dry_run,
        ..link_options(&args.link)
    };
    run(&options, None, false, context).await
}

/// `create --lock LOCK` and `create --locked`: the lock must satisfy the files and specs, if there are any.
pub async fn create(args: CreateArgs, context: &Context<'_>) -> Result<u8> {
    let lock = args.lock.clone().unwrap_or_else(|| PathBuf::from("tare.lock"));
    let target = &args.target;
    if target.cuda.is_some() || target.gpu.is_some() || !target.virtual_packages.is_empty() {
        let files = if args.files.is_empty() && args.specs.is_empty() { vec!["environment.yml".to_owned()] } else { args.files.clone() };
        let mut wanted: Vec<String> = target.cuda.iter().map(|version| format!("--cuda {version}")).collect();
        wanted.extend(target.virtual_packages.iter().map(|text| format!("--virtual-package {text}")));
        if wanted.is_empty() {
            wanted.push("--gpu none (or auto, require)".to_owned());
        }
        return Err(Error::usage("the machine that a lock is for was decided when it was made")
            .because("`--cuda`, `--gpu` and `--virtual-package` have no meaning with `--lock`")
            .hint(format!("lock again: {}", lock::command(&files, &args.specs, &lock.display().to_string(), &wanted.join(" ")))));
    }
    if !args.files.is_empty() || !args.specs.is_empty() {
        let check = CheckOptions {
            specs: args.specs.clone(),
            channels: args.channels.channels.clone(),
            override_channels: args.channels.override_channels,
            platforms: args.target.platform.clone().into_iter().collect(),
            no_pip: args.no_pip,
            lock_name: lock.display().to_string(),
        };
        super::lock::check_against(&lock, &check, &args.files, context)?;
    }
    let options = SyncOptions {
        lock,
        name: args.environment.name.clone(),
        prefix: args.environment.prefix.clone(),
        platform: args.target.platform.clone(),
        no_pip: args.no_pip,
        force: args.force,
        only_new: true,
        dry_run: args.dry_run,
        ..link_options(&args.link)
    };
    run(&options, super::check::wanted(&args), args.notebook, context).await
}

fn link_options(link: &LinkArgs) -> SyncOptions {
    SyncOptions {
        link_mode: link.link_mode.map(link_mode).or(link.copy.then_some(LinkMode::Copy)),
        no_compile: link.no_compile,
        clobber: link.clobber,
        allow_link_scripts: link.allow_link_scripts.clone(),
        lock_timeout: link.lock_timeout.map(Duration::from_secs),
        command: std::env::args().collect(),
        cancel: Cancel::new(),
        ..SyncOptions::default()
    }
}

/// `check`: whether the environment is checked at the end, with `--require-gpu` or without. `notebook`: whether it becomes a Jupyter kernel.
async fn run(options: &SyncOptions, check: Option<bool>, notebook: bool, context: &Context<'_>) -> Result<u8> {
    let started = std::time::Instant::now();
    let printer = context.printer;
    match lock::sync(options, &context.settings, printer.progress()).await? {
        Synced::Same { prefix } => {
            let message = format!("`{}` is what the lock says: nothing to do", prefix.display());
            printer.note(&message);
            let mut document = json!({ "message": message, "prefix": prefix, "changed": false });
            super::notebook::after_create(&prefix, notebook, &mut document, context).await?;
            let code = super::check::after_create(&prefix, check, &mut document, context).await?;
            printer.json(&document);
            return Ok(code);
        }
        Synced::Planned { prefix, platform, records, python } => {
            let mut rows = vec![["package", "version", "build", "channel", "size"].map(str::to_owned).to_vec()];
            for record in &records {
                let package = &record.package_record;
                rows.push(vec![
                    package.name.as_normalized().to_owned(),
                    package.version.to_string(),
                    package.build.to_string(),
                    crate::install::channel_name(record),
                    package.size.map(human_bytes).unwrap_or_default(),
                ]);
            }
            for package in &python {
                rows.push(vec![
                    package.name.clone(),
                    package.version.clone().unwrap_or_default(),
                    "pypi_0".to_owned(),
                    "pypi".to_owned(),
                    package.size.map(human_bytes).unwrap_or_default(),
                ]);
            }
            printer.data(&format!(
                "would make {} what the lock says for {platform}: {}\n\n{}",
                prefix.display(),
                count(records.len() + python.len(), "package"),
                table::columns(&rows, &[4])
            ));
            let link: Vec<_> = records.iter().map(|record| crate::create::record_json(record, false)).collect();
            let fetch: Vec<_> = records.iter().map(|record| crate::create::record_json(record, true)).collect();
            printer.json(&json!({
                "dry_run": true,
                "prefix": prefix,
                "platform": platform,
                "actions": { "PREFIX": prefix, "FETCH": fetch, "LINK": link },
                "pypi": python.iter().map(|package| json!({ "name": package.name, "version": package.version })).collect::<Vec<_>>(),
            }));
        }
        Synced::Done(installed) => {
            let environment = match name_of(&installed.prefix, context) {
                Some(name) if options.prefix.is_none() => format!("-n {name}"),
                _ => format!("-p {}", quoted(&installed.prefix.display().to_string())),
            };
            printer.note(&summary(if installed.replaced { "changed" } else { "created" }, &installed, started.elapsed()));
            printer.note(&super::shell::how_to_use(&environment, context));
            let mut document = json!({ "prefix": installed.prefix, "changed": true, "installed": *installed });
            super::notebook::after_create(&installed.prefix, notebook, &mut document, context).await?;
            let code = super::check::after_create(&installed.prefix, check, &mut document, context).await?;
            printer.json(&document);
            return Ok(code);
        }
    }
    Ok(0)
}
