//! The main job in one call: inputs to an environment, or to the plan of one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rattler_conda_types::RepoDataRecord;
use serde_json::{Value, json};

use crate::change::Lost;
use crate::channel::Session;
use crate::config::Settings;
use crate::diff::{self, Side};
use crate::error::{Error, Result};
use crate::install::{self, Cancel, ExistingEnvironment, Installed, LinkMode, LinkScripts, Plan, Stamp, TargetState};
use crate::prefix::{Places, Which};
use crate::pypi::{PypiPlan, PypiRecord, PypiSource, Section};
use crate::report::{Progress, Silent};
use crate::resolve::{self, Inputs, Prepared, Resolved};
use crate::solve;

/// What `create` is asked for besides its inputs.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `-n`.
    pub name: Option<String>,
    /// `-p`.
    pub prefix: Option<PathBuf>,
    /// Only plan.
    pub dry_run: bool,
    /// Replace an environment that differs.
    pub force: bool,
    /// How files are linked; else the setting.
    pub link_mode: Option<LinkMode>,
    /// Leave out byte code.
    pub no_compile: bool,
    /// Let later packages overwrite files of earlier ones.
    pub clobber: bool,
    /// Let packages have symbolic links that point out of the environment.
    pub allow_external_links: bool,
    /// Replace a frozen environment too.
    pub override_frozen: bool,
    /// Packages whose link scripts may run.
    pub allow_link_scripts: Vec<String>,
    /// How long to wait for the prefix lock.
    pub lock_timeout: Option<Duration>,
    /// The command line, for the history.
    pub command: Vec<String>,
    /// Stops the work.
    pub cancel: Cancel,
}

/// What came out.
pub enum Outcome {
    /// The environment was there already, made from the same input and intact.
    Same {
        /// Where it is.
        prefix: PathBuf,
    },
    /// `--dry-run`.
    Planned(Box<Planned>),
    /// It was made.
    Created(Box<Planned>, Box<Installed>),
}

/// A solved request and its place.
pub struct Planned {
    /// Where.
    pub prefix: PathBuf,
    /// The request.
    pub prepared: Prepared,
    /// The records.
    pub resolved: Resolved,
    /// The pip half; `None` without a `pip:` section.
    pub pypi: Option<PypiPlan>,
}

/// Creates an environment. In every case of failure the target is as it was.
///
/// # Errors
/// See [`resolve::prepare`], [`resolve::resolve`] and [`install::create`]; a target that is something else than absent,
/// an empty folder or the same environment.
pub async fn create(inputs: &Inputs, options: &Options, settings: &Settings, progress: Arc<dyn Progress>) -> Result<Outcome> {
    let session = Session::open(settings, progress.clone())?;
    let prepared = resolve::prepare(inputs, settings, &session, &*progress).await?;
    let prefix = place(options, &prepared, settings)?;

    {
        let request = Request { prepared: &prepared, inputs, settings };
        match install::state_of_target(&prefix)? {
            TargetState::Environment(existing) => match difference(&existing, &request, !options.force, &*progress) {
                None => return Ok(Outcome::Same { prefix }),
                Some(why) if options.dry_run && options.force => {
                    progress.note(&format!("the environment that is there would be replaced: {why}"));
                    tell_lost(&prefix, &*progress);
                }
                Some(why) if options.dry_run => {
                    let hints: Vec<String> = in_place(inputs, options).into_iter().chain(["to replace it: --force".to_owned()]).collect();
                    progress.warn(&format!("there already is an environment, and it differs: {why}"), &hints);
                }
                Some(_) if options.force => {
                    // Refused, and told, before anything is lost.
                    install::accept_target(&prefix, true, options.override_frozen)?;
                    tell_lost(&prefix, &*progress);
                }
                Some(why) => {
                    let lost = Lost::with(&prefix).unwrap_or_default();
                    let mut error = Error::failure(format!("there already is an environment at `{}`, and it differs", prefix.display()))
                        .because(why)
                        .hint(if lost.is_empty() {
                            "to replace it: --force"
                        } else {
                            "to replace it, without what is named above: --force"
                        })
                        .hint(in_place(inputs, options).unwrap_or_else(|| {
                            "to change it and keep what is yours in it: tare install, or tare update -f FILE --prune".to_owned()
                        }))
                        .hint("to make another one: -n NAME");
                    for line in lost.lines() {
                        error = error.because(format!("a new one would not have its {line}"));
                    }
                    return Err(error);
                }
            },
            _ if options.dry_run => {}
            TargetState::Absent | TargetState::EmptyFolder | TargetState::Foreign | TargetState::File => {
                // Refused now rather than after a long solve.
                install::accept_target(&prefix, options.force, options.override_frozen)?;
            }
        }
    }

    let resolved = resolve::resolve(&prepared, Vec::new(), solve::Favor::Newest, inputs, settings, &session, progress.clone()).await?;
    if let Some(solution) = &resolved.solution {
        resolve::tell(solution, &*progress);
    }
    let pip = resolve::PipOptions { dry_run: options.dry_run, held: Vec::new(), clobber: options.clobber, cancel: options.cancel.clone() };
    let pypi = resolve::pip_half(&prepared, &resolved.records, &pip, settings, &session, progress.clone()).await?;
    let planned = Planned { prefix, prepared, resolved, pypi };
    if options.dry_run {
        return Ok(Outcome::Planned(Box::new(planned)));
    }
    let mut plan = plan(&planned, options, settings)?;
    if plan.replace {
        crate::notebook::carry_over(&install::resolve_prefix(&planned.prefix)?, &mut plan, settings, &*progress)?;
    }
    match install::create_with(&plan, &session.package_cache, session.client.clone(), progress.clone()).await {
        Ok(installed) => Ok(Outcome::Created(Box::new(planned), Box::new(installed))),
        Err(error) => {
            // Another process may have made the very environment while this one waited for its lock.
            if !options.force
                && !plan.placed.load(std::sync::atomic::Ordering::SeqCst)
                && let Ok(TargetState::Environment(existing)) = install::state_of_target(&planned.prefix)
                && difference(&existing, &Request { prepared: &planned.prepared, inputs, settings }, true, &Silent).is_none()
            {
                return Ok(Outcome::Same { prefix: planned.prefix });
            }
            Err(error)
        }
    }
}

/// Says what a replaced environment takes with it.
fn tell_lost(prefix: &Path, progress: &dyn Progress) {
    let Ok(lost) = Lost::with(prefix) else { return };
    for line in lost.lines() {
        progress.warn(
            &format!("with the environment that is replaced go {line}"),
            &["to keep them, change the environment instead: tare update -f FILE --prune".to_owned()],
        );
    }
}

fn place(options: &Options, prepared: &Prepared, settings: &Settings) -> Result<PathBuf> {
    let spec = &prepared.spec;
    let mut which = Which { name: options.name.clone(), prefix: options.prefix.clone() };
    if which == Which::default() {
        which.name.clone_from(&spec.name);
        if which.name.is_none() {
            which.prefix.clone_from(&spec.prefix);
        }
    }
    crate::prefix::place_for_new(&which, &places(settings))
}

/// Where environments are looked for.
pub fn places(settings: &Settings) -> Places {
    let mut places = Places::new(settings.envs_dirs.value.clone(), settings.home.clone(), |name| std::env::var(name).ok());
    places.only_root = settings.root.value.is_some() && settings.root.is_of_this_call();
    places
}

/// What is asked for, read and judged.
struct Request<'a> {
    prepared: &'a Prepared,
    inputs: &'a Inputs,
    settings: &'a Settings,
}

/// Why the environment is not what the request would make; `None` if it is. Nothing is solved for that: an equal request
/// is enough, whatever the channels have got since. Files of nobody in site-packages are `tolerated` and told, or a difference.
fn difference(existing: &ExistingEnvironment, request: &Request<'_>, tolerated: bool, progress: &dyn Progress) -> Option<String> {
    let Some(stamp) = &existing.stamp else { return Some("it was not made by tare".to_owned()) };
    if stamp.prefix != existing.prefix {
        return Some(format!("it was made at `{}` and moved", stamp.prefix.display()));
    }
    let same_input = stamp.metadata.get("input_digest").and_then(Value::as_str) == Some(&request.prepared.digest);
    if !same_input && let Some(why) = other_request(existing, stamp, request) {
        return Some(why);
    }
    let look = install::look(&existing.prefix, stamp);
    if let Some(why) = look.difference().or_else(|| if same_input { None } else { unsatisfied(&existing.prefix, request.prepared) }) {
        return Some(why);
    }
    let alien = look.aliens.first()?;
    if !tolerated {
        return Some(format!("`{}` belongs to no package", alien.display()));
    }
    install::tell_aliens(&existing.prefix, &look.aliens, progress);
    None
}

/// What is asked of an environment that was changed since it was made, or was made by another text, beside what is recorded of it; `None` if that is the
/// same. Each command that changes an environment keeps the record of what is asked of it.
fn other_request(existing: &ExistingEnvironment, stamp: &Stamp, request: &Request<'_>) -> Option<String> {
    let prepared = request.prepared;
    let facts = &stamp.metadata;
    let Some(before) = facts.get("input_parts").and_then(Value::as_object) else {
        return Some("it was made from another input".to_owned());
    };
    let list = |key: &str| -> BTreeSet<String> {
        facts[key].as_array().into_iter().flatten().filter_map(|text| Some(text.as_str()?.to_owned())).collect()
    };
    let differs = |key: &str| match key {
        // What archives and URLs bring is recorded by other names.
        "explicit" => prepared.spec.explicit.is_some() || before.get(key) != prepared.parts.get(key),
        "dependencies" => request.specs().is_none_or(|specs| specs != recorded_specs(stamp)),
        // Compared with the match specs.
        "default_packages" => false,
        "variables" => {
            let variables = crate::prefix::Prefix::open(&existing.prefix).and_then(|prefix| prefix.variables());
            variables.map_or(true, |variables| variables != prepared.spec.variables)
        }
        "channels" => facts[key] != json!(prepared.channels.iter().map(|channel| &channel.display).collect::<Vec<_>>()),
        "pip" => {
            let section = prepared.pip.clone().unwrap_or_default();
            let lines = list("pip");
            let known = facts["pip_contents"].as_object();
            let contents = section.contents();
            lines != section.requirements.iter().map(crate::spec::PipItem::shown).collect()
                || list("pip_context") != section.context().into_iter().collect()
                || lines
                    .iter()
                    .any(|line| known.and_then(|known| known.get(line)).and_then(Value::as_str) != contents.get(line).map(String::as_str))
        }
        _ => before.get(key) != prepared.parts.get(key),
    };
    let parts: Vec<String> = prepared.parts.keys().filter(|key| differs(key)).map(|key| part(key)).collect();
    (!parts.is_empty()).then(|| format!("it was made from another input; what differs: {}", parts.join(", ")))
}

/// The match specs of an environment.
fn recorded_specs(stamp: &Stamp) -> BTreeSet<String> {
    let canonical = |text: &String| crate::spec::parse_match_spec(text, None).map_or_else(|_| text.clone(), |spec| spec.to_string());
    stamp.requested.iter().map(canonical).collect()
}

impl Request<'_> {
    /// The match specs; `None` where a package is asked for otherwise.
    fn specs(&self) -> Option<BTreeSet<String>> {
        let mut specs = BTreeSet::new();
        let mut names = BTreeSet::new();
        for dependency in &self.prepared.spec.dependencies {
            let crate::spec::Dependency::Match { spec, .. } = dependency else { return None };
            names.extend(spec.name.as_exact().cloned());
            specs.insert(spec.to_string());
        }
        if self.inputs.default_packages {
            for text in &self.settings.create_default_packages.value {
                let spec = crate::spec::parse_match_spec(text, None).ok()?;
                if spec.name.as_exact().is_none_or(|name| !names.contains(name)) {
                    specs.insert(spec.to_string());
                }
            }
        }
        Some(specs)
    }
}

/// What the environment lacks of the request; `None` if it has it all.
fn unsatisfied(prefix: &Path, prepared: &Prepared) -> Option<String> {
    let look = || -> Result<Option<String>> {
        let prefix = crate::prefix::Prefix::open(prefix)?;
        let mut spec = prepared.spec.clone();
        let section = prepared.pip.clone().unwrap_or_default();
        spec.pip.clone_from(&section.requirements);
        let (asked, there) = (Side::of_request("the request", spec), Side::of_prefix("the environment", &prefix)?);
        let report = diff::compare(&asked, &there, None)?;
        if let Some(first) = report.differences.first() {
            return Ok(Some(format!("it is not as asked for: {}", first.line())));
        }
        let lacking = crate::pypi::installed::lacking(&prefix, &section)?;
        Ok(lacking.map(|(name, needs)| format!("`{name}` needs `{needs}`, which is not there")))
    };
    look().unwrap_or_else(|error| Some(error.to_string()))
}

/// A part of a request as people know it.
fn part(key: &str) -> String {
    let text = match key {
        "pip" => "the `pip:` section",
        "explicit" => "the list of archives",
        "priority" => "the channel priority",
        "exclude_newer" => "`--exclude-newer`",
        "subdir" => "the platform",
        "virtual_packages" => "the virtual packages that were assumed",
        "gpu" => "what is asked of the GPU",
        "pins" => "the pins of the configuration",
        other => return format!("the {}", other.replace('_', " ")),
    };
    text.to_owned()
}

/// The command that would change the environment into what is asked for, if one does.
fn in_place(inputs: &Inputs, options: &Options) -> Option<String> {
    if inputs.files.is_empty() || inputs.files.iter().any(|file| file == "-") || !inputs.specs.is_empty() {
        return None;
    }
    let mut command = "to change it in place: tare update".to_owned();
    match (&options.name, &options.prefix) {
        (Some(name), _) => command.push_str(&format!(" -n {name}")),
        (_, Some(prefix)) => command.push_str(&format!(" -p {}", crate::text::quoted(&prefix.display().to_string()))),
        _ => {}
    }
    for file in &inputs.files {
        command.push_str(&format!(" -f {}", crate::text::quoted(&crate::spec::mask_secrets(file))));
    }
    Some(command + " --prune")
}

/// Packages whose link scripts may run, by name.
///
/// # Errors
/// Text that is no package name.
pub(crate) fn link_scripts(names: &[String]) -> Result<LinkScripts> {
    let mut allow = Vec::new();
    for name in names {
        allow.push(name.parse().map_err(|error| Error::usage(format!("`{name}` is no package name")).because(error))?);
    }
    Ok(LinkScripts { allow })
}

/// How files are linked: what was chosen on the command line, else what the settings say.
///
/// # Errors
/// A setting that is no link mode; its source is named.
pub(crate) fn link_mode(chosen: Option<LinkMode>, settings: &Settings) -> Result<LinkMode> {
    match chosen {
        Some(mode) => Ok(mode),
        None if settings.always_copy.value => Ok(LinkMode::Copy),
        None => {
            settings.link_mode.value.parse().map_err(|error: Error| error.because(format!("it was set by {}", settings.link_mode.source)))
        }
    }
}

pub(crate) fn plan(planned: &Planned, options: &Options, settings: &Settings) -> Result<Plan> {
    let prepared = &planned.prepared;
    let mut plan = Plan::new(&planned.prefix, prepared.target.subdir, planned.resolved.records.clone());
    plan.requested.clone_from(&planned.resolved.requested);
    plan.pypi.clone_from(&planned.pypi);
    plan.variables.clone_from(&prepared.spec.variables);
    plan.command.clone_from(&options.command);
    plan.link_mode = link_mode(options.link_mode, settings)?;
    plan.compile = settings.compile.value && !options.no_compile;
    plan.clobber = options.clobber;
    plan.external_links = if options.allow_external_links { install::ExternalLinks::Warn } else { install::ExternalLinks::Deny };
    plan.override_frozen = options.override_frozen;
    plan.lock_timeout = options.lock_timeout;
    plan.replace = options.force;
    plan.concurrency = settings.concurrency.value;
    plan.cancel = options.cancel.clone();
    plan.link_scripts = link_scripts(&options.allow_link_scripts)?;
    plan.metadata = facts(planned);
    Ok(plan)
}

/// What is recorded about how the environment came about.
pub(crate) fn facts(planned: &Planned) -> Value {
    let prepared = &planned.prepared;
    let solution = planned.resolved.solution.as_ref();
    json!({
        "input_digest": prepared.digest,
        "input_parts": prepared.parts,
        "sources": prepared.spec.sources.iter().map(|source| json!({ "name": source.name, "sha256": source.sha256 })).collect::<Vec<_>>(),
        "channels": prepared.channels.iter().map(|channel| &channel.display).collect::<Vec<_>>(),
        "nodefaults": prepared.spec.nodefaults,
        "channel_priority": solution.map(|solution| solution.priority_used),
        "channel_priority_fell_back": solution.is_some_and(|solution| solution.priority_fell_back),
        "exclude_newer": prepared.exclude_newer.map(|time| time.to_string()),
        "virtual_packages": virtual_packages(prepared),
        "gpu_intent": prepared.gpu,
        "gpu": solution.map(|solution| &solution.gpu),
        "pip_resolver": planned.pypi.as_ref().and_then(|pypi| pypi.engine.as_ref()),
        "pip": prepared.pip.iter().flat_map(|section| &section.requirements).map(crate::spec::PipItem::shown).collect::<Vec<_>>(),
        "pip_context": prepared.pip.as_ref().map(Section::context).unwrap_or_default(),
        "pip_contents": prepared.pip.as_ref().map(Section::contents).unwrap_or_default(),
    })
}

/// The virtual packages of the target as JSON: name, version, build, provenance, source.
pub fn virtual_packages(prepared: &Prepared) -> Vec<Value> {
    virtual_packages_json(&prepared.target)
}

/// As [`virtual_packages`], of a target.
pub fn virtual_packages_json(target: &crate::platform::Target) -> Vec<Value> {
    target
        .virtual_packages
        .iter()
        .map(|package| {
            json!({
                "name": package.package.name.as_normalized(),
                "version": package.package.version.to_string(),
                "build": package.package.build_string.to_string(),
                "provenance": package.provenance,
                "source": package.source,
            })
        })
        .collect()
}

/// The plan in conda's shape (`actions.FETCH`, `actions.LINK`) plus tare's own keys. FETCH lists every LINK.
pub fn plan_json(planned: &Planned, dry_run: bool) -> Value {
    let records = &planned.resolved.records;
    let prepared = &planned.prepared;
    let solution = planned.resolved.solution.as_ref();
    json!({
        "dry_run": dry_run,
        "prefix": planned.prefix.display().to_string(),
        "actions": {
            "PREFIX": planned.prefix.display().to_string(),
            "FETCH": records.iter().map(|record| record_json(record, true)).collect::<Vec<_>>(),
            "LINK": records.iter().map(|record| record_json(record, false)).collect::<Vec<_>>(),
        },
        "platform": prepared.target.subdir.as_str(),
        "channels": prepared.channels.iter().map(|channel| &channel.display).collect::<Vec<_>>(),
        "channel_priority": solution.map(|solution| solution.priority_used),
        "virtual_packages": virtual_packages(prepared),
        "gpu": solution.map(|solution| &solution.gpu),
        "lints": solution.map(|solution| solution.lints.iter().chain(&solution.preflight).collect::<Vec<_>>()),
        "total_size": install::total_size(records),
        "pypi": planned.pypi.as_ref().map(|pypi| pypi.wheels.iter().map(|ready| pypi_json(&ready.record)).collect::<Vec<_>>()),
        "pip_resolver": planned.pypi.as_ref().and_then(|pypi| pypi.engine.as_ref()),
    })
}

/// A Python package of a plan: name, version, `url` (of a folder: its path), `sha256`, `size`, whether it was asked for, is editable, and is pinned.
pub fn pypi_json(record: &PypiRecord) -> Value {
    let (url, sha256, size, editable) = match &record.source {
        PypiSource::Archive { url, sha256, size, .. } => (crate::channel::redact_url(url), sha256.clone(), *size, false),
        PypiSource::Vcs { system, url, commit, .. } => {
            (format!("{system}+{}@{commit}", crate::channel::redact_url(url)), None, None, false)
        }
        PypiSource::Directory { path, editable } => (path.display().to_string(), None, None, *editable),
    };
    json!({
        "name": record.name,
        "version": record.version.to_string(),
        "channel": "pypi",
        "url": url,
        "sha256": sha256,
        "size": size,
        "requested": record.requested,
        "extras": record.extras,
        "editable": editable,
        "pinned": record.source.is_pinned(),
        "requires_dist": record.requires_dist,
        "requires_python": record.requires_python,
    })
}

/// One record with conda's keys. `fetch`: `channel` is the URL of the subdir (as in conda's FETCH), else the channel's name.
pub fn record_json(record: &RepoDataRecord, fetch: bool) -> Value {
    let package = &record.package_record;
    let file = record.identifier.to_file_name();
    let dist_name = file.strip_suffix(".conda").or(file.strip_suffix(".tar.bz2")).unwrap_or(&file).to_owned();
    let url = crate::channel::redact_url(&record.url);
    let base = url.rsplit_once('/').map_or(url.as_str(), |(base, _)| base).to_owned();
    let channel_url = base.rsplit_once('/').map_or(base.as_str(), |(channel, _)| channel).to_owned();
    json!({
        "name": package.name.as_normalized(),
        "version": package.version.to_string(),
        "build": package.build.to_string(),
        "build_string": package.build.to_string(),
        "build_number": package.build_number,
        "channel": if fetch { base } else { install::channel_name(record) },
        "base_url": channel_url,
        "url": url,
        "fn": file,
        "dist_name": dist_name,
        "md5": package.md5.map(|hash| crate::text::hex(&hash)),
        "sha256": package.sha256.map(|hash| crate::text::hex(&hash)),
        "size": package.size,
        "subdir": package.subdir,
        "platform": package.subdir,
        "depends": package.depends,
        "constrains": package.constrains,
        "license": package.license,
        "timestamp": package.timestamp.as_ref().map(|time| time.timestamp_millis()),
    })
}
