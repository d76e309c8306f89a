//! `tare create`

use std::time::Duration;

use serde_json::json;

use super::args::CreateArgs;
use super::context::{Context, inputs, link_mode};
use crate::create::{self, Options, Outcome, Planned};
use crate::error::Result;
use crate::install::{Cancel, Installed, LinkMode};
use crate::pypi::PypiSource;
use crate::resolve::count;
use crate::ui::{human_bytes, table};

pub async fn create(args: CreateArgs, context: &Context<'_>) -> Result<u8> {
    if args.locked || args.lock.is_some() {
        return super::sync::create(args, context).await;
    }
    if let Some(source) = &args.clone {
        return super::change::clone(source, &args, context).await;
    }
    let mut request = inputs(&args.specs, &args.files, &args.channels, &args.target);
    request.no_pip = args.no_pip;
    request.default_packages = !args.no_default_packages;
    request.target_given = args.environment.name.is_some() || args.environment.prefix.is_some();
    let options = Options {
        name: args.environment.name.clone(),
        prefix: args.environment.prefix.clone(),
        dry_run: args.dry_run,
        force: args.force,
        link_mode: args.link.link_mode.map(link_mode).or(args.link.copy.then_some(LinkMode::Copy)),
        no_compile: args.link.no_compile,
        clobber: args.link.clobber,
        allow_external_links: args.link.allow_external_links,
        override_frozen: args.override_frozen,
        allow_link_scripts: args.link.allow_link_scripts.clone(),
        lock_timeout: args.link.lock_timeout.map(Duration::from_secs),
        // A path may be no UTF-8; the history is text.
        command: std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect(),
        cancel: Cancel::new(),
    };
    let printer = context.printer;
    let started = std::time::Instant::now();
    match create::create(&request, &options, &context.settings, printer.progress()).await? {
        Outcome::Same { prefix } => {
            let message = format!("`{}` is already as asked: nothing to do", prefix.display());
            printer.note(&message);
            let mut document = json!({ "message": message, "prefix": prefix, "changed": false });
            super::notebook::after_create(&prefix, args.notebook, &mut document, context).await?;
            let code = super::check::after_create(&prefix, super::check::wanted(&args), &mut document, context).await?;
            printer.json(&document);
            return Ok(code);
        }
        Outcome::Planned(planned) => {
            printer.data(&plan_text(&planned));
            if printer.wants_json() {
                printer.json(&create::plan_json(&planned, true));
            }
        }
        Outcome::Created(planned, installed) => {
            let environment = match &args.environment.prefix {
                Some(_) => format!("-p {}", quoted(&installed.prefix.display().to_string())),
                None => match name_of(&installed.prefix, context) {
                    Some(name) => format!("-n {name}"),
                    None => format!("-p {}", quoted(&installed.prefix.display().to_string())),
                },
            };
            printer.note(&summary("created", &installed, started.elapsed()));
            printer.note(&super::shell::how_to_use(&environment, context));
            let mut document = if printer.wants_json() { create::plan_json(&planned, false) } else { json!({}) };
            document["changed"] = json!(true);
            document["installed"] = json!(*installed);
            super::notebook::after_create(&installed.prefix, args.notebook, &mut document, context).await?;
            let code = super::check::after_create(&installed.prefix, super::check::wanted(&args), &mut document, context).await?;
            printer.json(&document);
            return Ok(code);
        }
    }
    Ok(0)
}

pub(super) use crate::text::quoted;

/// The name of an environment that lies in the first environments folder.
pub(super) fn name_of(prefix: &std::path::Path, context: &Context<'_>) -> Option<String> {
    let folder = context.settings.envs_dirs.value.first()?;
    let folder = std::fs::canonicalize(folder).unwrap_or_else(|_| folder.clone());
    let parent = std::fs::canonicalize(prefix.parent()?).ok()?;
    (parent == folder).then(|| prefix.file_name().map(|name| name.to_string_lossy().into_owned())).flatten()
}

/// `verb`: what was done.
pub(super) fn summary(verb: &str, installed: &Installed, elapsed: std::time::Duration) -> String {
    let mut text = format!("{verb} `{}`: {}", installed.prefix.display(), count(installed.linked, "package"));
    if installed.python_packages > 0 {
        text.push_str(&format!(" and {}", count(installed.python_packages, "Python package")));
    }
    // One entry a cache folder; what they have in common is told once.
    let modes: std::collections::BTreeSet<String> = installed.link_modes.iter().map(|(_, mode)| mode.to_string()).collect();
    let modes: Vec<String> = modes.into_iter().collect();
    if !modes.is_empty() {
        text.push_str(&format!(" by {}", modes.join(" and ")));
    }
    if installed.compiled > 0 {
        text.push_str(&format!(", {} compiled", count(installed.compiled, "Python file")));
    }
    text.push_str(&format!(", in {:.1} s", elapsed.as_secs_f64()));
    if let Some(why) = &installed.not_compiled {
        text.push_str(&format!("; Python files were not compiled: {why}"));
    }
    text
}

/// The plan for people.
pub fn plan_text(planned: &Planned) -> String {
    let mut rows = vec![["package", "version", "build", "channel", "size"].map(str::to_owned).to_vec()];
    let mut records: Vec<_> = planned.resolved.records.iter().collect();
    records.sort_by(|a, b| a.package_record.name.as_normalized().cmp(b.package_record.name.as_normalized()));
    for record in records {
        let package = &record.package_record;
        rows.push(vec![
            package.name.as_normalized().to_owned(),
            package.version.to_string(),
            package.build.to_string(),
            crate::install::channel_name(record),
            package.size.map(human_bytes).unwrap_or_default(),
        ]);
    }
    let mut size = crate::install::total_size(&planned.resolved.records);
    for ready in planned.pypi.iter().flat_map(|pypi| &pypi.wheels) {
        let record = &ready.record;
        let (build, bytes) = match &record.source {
            PypiSource::Archive { url, size, .. } if url.path().ends_with(".whl") => ("wheel", *size),
            PypiSource::Archive { size, .. } => ("source", *size),
            PypiSource::Vcs { .. } => ("repository", None),
            PypiSource::Directory { editable: true, .. } => ("editable", None),
            PypiSource::Directory { .. } => ("folder", None),
        };
        size = size.saturating_add(bytes.unwrap_or(0));
        rows.push(vec![
            record.name.to_string(),
            record.version.to_string(),
            build.to_owned(),
            "pypi".to_owned(),
            bytes.map(human_bytes).unwrap_or_default(),
        ]);
    }
    let packages = rows.len() - 1;
    format!(
        "would create {} for {}: {}, {}\n\n{}",
        planned.prefix.display(),
        planned.prepared.target.subdir,
        count(packages, "package"),
        human_bytes(size),
        table::columns(&rows, &[4])
    )
}
