//! `tare install`, `update`, `remove`, `rename`, `create --clone`, `env config vars`

use std::time::Duration;

use serde_json::json;

use super::args::{
    ChangeArgs, CreateArgs, EnvironmentArgs, InstallArgs, LinkArgs, RelocateArgs, RemoveArgs, RenameArgs, UpdateArgs, VarsCommand,
};
use super::context::{Context, inputs, link_mode};
use super::create::name_of;
use crate::change::{self, ChangePlan, Changed, Mode, Options, Outcome};
use crate::error::{Error, Result};
use crate::install::{Cancel, LinkMode};
use crate::prefix::{Prefix, Which};
use crate::resolve::count;
use crate::text::quoted;
use crate::ui::{human_bytes, table};

fn options(change: &ChangeArgs, link: &LinkArgs) -> Options {
    Options {
        which: which(&change.environment),
        dry_run: change.dry_run,
        link_mode: link.link_mode.map(link_mode).or(link.copy.then_some(LinkMode::Copy)),
        no_compile: link.no_compile,
        clobber: link.clobber,
        allow_link_scripts: link.allow_link_scripts.clone(),
        allow_external_links: link.allow_external_links,
        lock_timeout: link.lock_timeout.map(Duration::from_secs),
        override_frozen: change.override_frozen,
        give_up_files: change.yes,
        command: std::env::args().collect(),
        cancel: Cancel::new(),
    }
}

fn which(environment: &EnvironmentArgs) -> Which {
    Which { name: environment.name.clone(), prefix: environment.prefix.clone() }
}

pub async fn install(args: InstallArgs, context: &Context<'_>) -> Result<u8> {
    if let Some(revision) = args.revision {
        let options = options(&args.change, &args.link);
        let outcome = change::revert(revision, &options, &context.settings, context.printer.progress()).await?;
        tell(&outcome, &options, context);
        return Ok(0);
    }
    let mut request = inputs(&args.specs, &args.files, &args.channels, &args.target);
    request.no_pip = args.no_pip;
    let mode = Mode::Install { force_reinstall: args.force_reinstall };
    let options = options(&args.change, &args.link);
    let outcome = change::change(mode, &request, &options, &context.settings, context.printer.progress()).await?;
    tell(&outcome, &options, context);
    Ok(0)
}

pub async fn update(args: UpdateArgs, context: &Context<'_>) -> Result<u8> {
    let mut request = inputs(&args.specs, &args.files, &args.channels, &args.target);
    request.no_pip = args.no_pip;
    let options = options(&args.change, &args.link);
    let outcome =
        change::change(Mode::Update { prune: args.prune }, &request, &options, &context.settings, context.printer.progress()).await?;
    tell(&outcome, &options, context);
    Ok(0)
}

pub async fn remove(args: RemoveArgs, context: &Context<'_>) -> Result<u8> {
    if args.all {
        return remove_environment(&args.change, args.lock_timeout, context).await;
    }
    let link = LinkArgs { lock_timeout: args.lock_timeout, ..LinkArgs::default() };
    let options = options(&args.change, &link);
    let outcome = change::remove(&args.packages, !args.no_prune, &options, &context.settings, context.printer.progress()).await?;
    tell(&outcome, &options, context);
    Ok(0)
}

pub async fn remove_environment(args: &ChangeArgs, lock_timeout: Option<u64>, context: &Context<'_>) -> Result<u8> {
    let link = LinkArgs { lock_timeout, ..LinkArgs::default() };
    let options = options(args, &link);
    let prefix = change::remove_environment(&options, &context.settings, context.printer.progress()).await?;
    if options.dry_run {
        context.printer.data(&format!("would remove the environment {}\n", prefix.display()));
    } else {
        context.printer.note(&format!("removed the environment `{}`", prefix.display()));
    }
    context.printer.json(&json!({ "prefix": prefix, "dry_run": options.dry_run, "changed": !options.dry_run }));
    Ok(0)
}

pub async fn rename(args: RenameArgs, context: &Context<'_>) -> Result<u8> {
    let mut options = options(&args.change, &args.link);
    let given = which(&args.change.environment);
    let (old, new) = match (args.names.as_slice(), given == Which::default()) {
        ([new], false) => (given, new),
        ([old, new], true) => (change::named(old), new),
        ([_], true) => return Err(Error::usage("the environment to rename is not named").hint("tare rename OLD NEW")),
        _ => return Err(Error::usage("three names are too many").hint("tare rename OLD NEW, or tare rename -n OLD NEW")),
    };
    options.which = Which::default();
    if options.dry_run {
        let from = crate::prefix::locate(&old, &super::context::places(&context.settings))?;
        context.printer.data(&format!("would rename {} to {new}\n", from.display()));
        context.printer.json(&json!({ "from": from, "to": new, "dry_run": true, "changed": false }));
        return Ok(0);
    }
    let renamed = change::rename_environment(&old, new, &options, &context.settings, context.printer.progress()).await?;
    context.printer.note(&format!("renamed `{}` to `{}`", renamed.from.display(), renamed.to.display()));
    let kernels = super::notebook::left_behind(&renamed.from, &renamed.to, context);
    context.printer.json(&json!({
        "from": renamed.from, "to": renamed.to, "changed": true, "installed": renamed.made, "kernels_left_behind": kernels
    }));
    Ok(0)
}

pub async fn relocate(args: RelocateArgs, context: &Context<'_>) -> Result<u8> {
    let options = options(&args.change, &args.link);
    let printer = context.printer;
    let changed = change::relocate_environment(&options, &context.settings, printer.progress()).await?;
    match &changed {
        Some(changed) => printer.note(&format!("repaired `{}`: {}", changed.prefix.display(), details(changed))),
        None if options.dry_run => printer.data("nothing was changed: this is a dry run\n"),
        None => printer.note("the environment is where it was made: nothing to do"),
    }
    printer.json(&json!({ "changed": changed.is_some(), "dry_run": options.dry_run, "installed": changed }));
    Ok(0)
}

/// `create --clone`
pub async fn clone(source: &str, args: &CreateArgs, context: &Context<'_>) -> Result<u8> {
    let change = ChangeArgs { environment: args.environment.clone(), dry_run: args.dry_run, ..ChangeArgs::default() };
    let options = options(&change, &args.link);
    if options.dry_run {
        let places = super::context::places(&context.settings);
        let from = Prefix::open(crate::prefix::locate(&change::named(source), &places)?)?;
        let to = crate::prefix::place_for_new(&options.which, &places)?;
        let packages = both_halves(from.records()?.len(), from.pip_distributions().len()).unwrap_or_else(|| count(0, "package"));
        context.printer.data(&format!("would copy {} to {}: {packages}\n", from.path().display(), to.display()));
        context.printer.json(&json!({ "from": from.path(), "prefix": to, "dry_run": true, "changed": false }));
        return Ok(0);
    }
    let changed = change::clone_environment(source, &options, &context.settings, context.printer.progress()).await?;
    context.printer.note(&format!("created `{}` as a copy: {}", changed.prefix.display(), details(&changed)));
    let mut document = json!({ "prefix": changed.prefix, "dry_run": false, "changed": true, "installed": changed });
    super::notebook::after_create(&changed.prefix, args.notebook, &mut document, context).await?;
    let code = super::check::after_create(&changed.prefix, super::check::wanted(args), &mut document, context).await?;
    context.printer.json(&document);
    Ok(code)
}

pub async fn variables(command: VarsCommand, context: &Context<'_>) -> Result<u8> {
    let printer = context.printer;
    let progress = printer.progress();
    let change = |override_frozen: bool| Options { override_frozen, command: std::env::args().collect(), ..Options::default() };
    let variables = match command {
        VarsCommand::List { environment } => {
            let variables = Prefix::open(context.locate(&environment)?)?.variables()?;
            printer.json_bare(&json!(variables));
            let lines: String = variables.iter().map(|(name, value)| format!("{name} = {value}\n")).collect();
            if !lines.is_empty() {
                printer.data(&lines);
            }
            return Ok(0);
        }
        VarsCommand::Set { variables, environment, override_frozen } => {
            let mut pairs = Vec::new();
            for text in &variables {
                let (name, value) = text.split_once('=').ok_or_else(|| Error::usage(format!("`{text}` is not NAME=VALUE")))?;
                pairs.push((name.trim().to_owned(), value.to_owned()));
            }
            change::set_variables(&context.locate(&environment)?, &pairs, &change(override_frozen), &*progress).await?
        }
        VarsCommand::Unset { variables, environment, override_frozen } => {
            change::unset_variables(&context.locate(&environment)?, &variables, &change(override_frozen), &*progress).await?
        }
    };
    printer.note("to see it in a shell where the environment is active, activate it again");
    printer.json(&json!({ "variables": variables }));
    Ok(0)
}

fn tell(outcome: &Outcome, options: &Options, context: &Context<'_>) {
    let printer = context.printer;
    let plan = &outcome.plan;
    let mut document = if printer.wants_json() { plan.json(options.dry_run) } else { json!({}) };
    document["changed"] = json!(outcome.changed.is_some());
    match &outcome.changed {
        None if options.dry_run && !plan.is_empty() => printer.data(&plan_text(plan)),
        None => {
            let message = format!("`{}` is already as asked: nothing to do", plan.prefix.display());
            document["message"] = json!(message);
            if options.dry_run {
                printer.data(&format!("{message}\n"));
            } else {
                printer.note(&message);
            }
        }
        Some(changed) => {
            for row in plan.rows() {
                let version = |side: &Option<(String, String)>| side.as_ref().map(|(version, _)| version.clone()).unwrap_or_default();
                match row.sign {
                    '~' if row.old == row.new => printer.note(&format!("{} {} linked anew", row.name, version(&row.new))),
                    '~' => printer.note(&format!("{} {} -> {}", row.name, version(&row.old), version(&row.new))),
                    '-' => printer.note(&format!("{} {} removed", row.name, version(&row.old))),
                    _ => printer.note(&format!("{} {} added", row.name, version(&row.new))),
                }
            }
            for saved in &changed.saved {
                printer.warn(&format!("your file is now `{}`", changed.prefix.join(saved).display()), &[]);
            }
            let place = name_of(&changed.prefix, context).unwrap_or_else(|| quoted(&changed.prefix.display().to_string()));
            printer.note(&format!("changed `{place}`: {}", details(changed)));
            document["installed"] = json!(changed);
        }
    }
    printer.json(&document);
}

fn details(changed: &Changed) -> String {
    let seconds = changed.seconds;
    let both = |conda: usize, python: usize, what: &str| both_halves(conda, python).map(|counted| format!("{counted} {what}"));
    let mut parts: Vec<String> = both(changed.linked, changed.python_linked, "linked").into_iter().collect();
    parts.extend(both(changed.unlinked, changed.python_unlinked, "removed"));
    parts.extend(both(changed.kept, changed.python_kept, "kept"));
    if changed.compiled > 0 {
        parts.push(format!("{} compiled", count(changed.compiled, "Python file")));
    }
    let mut text = if parts.is_empty() { "no package linked".to_owned() } else { parts.join(", ") };
    text.push_str(&format!(", in {:.1} s", seconds.fetch + seconds.link + seconds.compile + seconds.finish));
    if let Some(why) = &changed.not_compiled {
        text.push_str(&format!("; Python files were not compiled: {why}"));
    }
    text
}

/// `2 packages and 1 Python package`; `None` for none.
fn both_halves(conda: usize, python: usize) -> Option<String> {
    let halves = [(conda, "package"), (python, "Python package")];
    let counted: Vec<String> = halves.iter().filter(|(number, _)| *number > 0).map(|(number, word)| count(*number, word)).collect();
    (!counted.is_empty()).then(|| counted.join(" and "))
}

/// The plan for people.
fn plan_text(plan: &ChangePlan) -> String {
    let mut rows = vec![["", "package", "before", "after", "build", "channel", "size"].map(str::to_owned).to_vec()];
    let (mut total, mut conda, mut python) = (0, 0, 0);
    for row in plan.rows() {
        total += row.size.unwrap_or(0);
        *(if row.python { &mut python } else { &mut conda }) += 1;
        let version = |side: &Option<(String, String)>| side.as_ref().map(|(version, _)| version.clone()).unwrap_or_default();
        let build = row.new.as_ref().or(row.old.as_ref()).map(|(_, build)| build.clone()).unwrap_or_default();
        rows.push(vec![
            row.sign.to_string(),
            row.name.clone(),
            version(&row.old),
            version(&row.new),
            build,
            row.channel.clone().unwrap_or_default(),
            row.size.map(human_bytes).unwrap_or_default(),
        ]);
    }
    format!(
        "would change {}: {}, {} kept, {} to link\n\n{}",
        plan.prefix.display(),
        both_halves(conda, python).unwrap_or_else(|| count(0, "package")),
        both_halves(plan.kept(), plan.python_kept()).unwrap_or_else(|| "none".to_owned()),
        human_bytes(total),
        table::columns(&rows, &[6])
    )
}
