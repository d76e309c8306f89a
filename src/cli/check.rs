//! `tare check`, and the check at the end of `tare create --check`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::args::{CheckArgs, CheckFormatArg, CheckHowArgs, CheckLevelArg};
use super::blocking;
use super::context::{Context, environment, places};
use crate::check::memory::SelfTest;
use crate::check::{self, Level, Machine, MemoryTest, Options, Report, Subject, html, junit, text};
use crate::error::{Error, Result};
use crate::gpu::info;
use crate::platform::gpu::{self, Probe};
use crate::ui::Verbosity;

/// How long each library of the driver has to answer.
const DRIVER_LIMIT: Duration = Duration::from_secs(5);
/// Seconds that each program of a check gets where there is no limit for the whole.
const TIMEOUT: u64 = 180;

pub async fn check(args: CheckArgs, context: &Context<'_>) -> Result<u8> {
    let begun = Instant::now();
    let printer = context.printer;
    let format = match (args.format, &args.output) {
        (Some(format), _) => format,
        (None, Some(path)) => format_of(path),
        (None, None) if printer.is_json() => CheckFormatArg::Json,
        (None, None) => CheckFormatArg::Text,
    };
    if printer.is_json() && args.output.is_none() && format != CheckFormatArg::Json {
        return Err(Error::usage("`--json` and `--format` contradict each other")
            .hint("leave one of them out, or write the other to a file: -o FILE"));
    }
    if let Some(out) = &args.output {
        super::gpu::check_out(out, None)?;
    }
    let (subjects, single) = subjects(&args, context).await?;
    let machine = machine(args.how.timeout, context).await?;
    let mut results: Vec<(String, Result<Report>)> = Vec::new();
    for (name, subject) in subjects {
        let result = match subject {
            Ok(subject) => {
                if !single {
                    printer.detail(&format!("checking `{name}`"));
                }
                let result = run(subject, &args.how, if single { begun } else { Instant::now() }, machine.clone(), context).await;
                // Stopped by Ctrl-C: the rest is not begun.
                if result.as_ref().is_err_and(|error| error.kind() == crate::error::Kind::Interrupted) {
                    return result.map(|_| 0);
                }
                result
            }
            Err(error) => Err(error),
        };
        if single {
            let report = result?;
            remember(&report, context);
            return present_one(&report, format, args.output.as_deref(), context);
        }
        if let Ok(report) = &result {
            remember(report, context);
        }
        results.push((name, result));
    }
    present_all(results, format, args.output.as_deref(), context)
}

/// What to check, each with a name to show; whether it is one that was named.
async fn subjects(args: &CheckArgs, context: &Context<'_>) -> Result<(Vec<(String, Result<Subject>)>, bool)> {
    if args.all {
        let known = crate::prefix::list_known(&places(&context.settings), false);
        let subjects = known
            .into_iter()
            .map(|known| (known.name.unwrap_or_else(|| known.prefix.display().to_string()), Subject::at(&known.prefix)))
            .collect::<Vec<_>>();
        if subjects.is_empty() {
            return Err(Error::failure("there are no environments to check").hint("name one by its path: tare check -p PATH"));
        }
        return Ok((subjects, false));
    }
    let subject = match &args.python {
        Some(python) => {
            let (python, env) = (python.clone(), environment());
            let limit = Duration::from_secs(args.how.timeout.unwrap_or(TIMEOUT));
            blocking(move |cancel| Subject::of_python(&python, &env, limit, cancel)).await?
        }
        None => Subject::at(&context.locate(&args.environment)?)?,
    };
    Ok((vec![(String::new(), Ok(subject))], true))
}

/// Asks the driver now: an answer from the cache would hide what has changed since.
async fn machine(timeout: Option<u64>, context: &Context<'_>) -> Result<Machine> {
    let limit = timeout.map_or(DRIVER_LIMIT, |seconds| DRIVER_LIMIT.min(Duration::from_secs(seconds)));
    let settings = &context.settings;
    let (env, cache) = (settings.env.clone(), settings.cache_dir.value.clone());
    let prober = super::gpu::prober()?;
    blocking(move |_| {
        // The check is about the machine: what CUDA_VISIBLE_DEVICES hides is a remark of a step.
        let ask = |route: &str| {
            let mut command = prober(route);
            command.env_remove("CUDA_VISIBLE_DEVICES").env_remove("NVIDIA_VISIBLE_DEVICES");
            command
        };
        std::thread::scope(|scope| {
            let info = scope.spawn(|| info::look(&ask, Path::new("/"), limit));
            let found = gpu::detect(&Probe { cache: false, ..Probe::default() }, &env, cache.as_deref());
            let info = info.join().map_err(|_| Error::failure("the driver could not be asked"))?;
            Ok(Machine::of(&found, &info))
        })
    })
    .await
}

async fn run(subject: Subject, how: &CheckHowArgs, begun: Instant, machine: Machine, context: &Context<'_>) -> Result<Report> {
    let level = match how.level {
        CheckLevelArg::Quick => Level::Quick,
        CheckLevelArg::Standard => Level::Standard,
        CheckLevelArg::Thorough => Level::Thorough,
    };
    let (require_gpu, limit) = (how.require_gpu, Duration::from_secs(how.timeout.unwrap_or(TIMEOUT)));
    let whole = how.timeout.map(Duration::from_secs).map(|time| (begun + time, time));
    let progress = context.printer.progress();
    let env = environment();
    blocking(move |cancel| {
        let memory = std::env::current_exe().ok().map(|program| SelfTest { program, env: env.clone() });
        let options = Options {
            level,
            require_gpu,
            limit,
            whole,
            cancel: cancel.clone(),
            env,
            machine,
            memory: memory.as_ref().map(|test| test as &dyn MemoryTest),
            root: PathBuf::from("/"),
        };
        check::check(&subject, &options, &*progress)
    })
    .await
}

/// Keeps the result in the environment; where that is not possible the check still counts.
fn remember(report: &Report, context: &Context<'_>) {
    if let Err(error) = check::store(report) {
        context.printer.detail(&format!("the result is not kept in the environment: {error}"));
    }
}

fn format_of(path: &Path) -> CheckFormatArg {
    match path.extension().and_then(|extension| extension.to_str()).unwrap_or_default().to_ascii_lowercase().as_str() {
        "json" => CheckFormatArg::Json,
        "xml" => CheckFormatArg::Junit,
        "html" | "htm" => CheckFormatArg::Html,
        _ => CheckFormatArg::Text,
    }
}

/// A document as text, with a line feed at its end.
fn pretty(document: &Value) -> String {
    format!("{document:#}\n")
}

fn verbose(context: &Context<'_>) -> bool {
    context.printer.verbosity() >= Verbosity::Verbose
}

fn present_one(report: &Report, format: CheckFormatArg, output: Option<&Path>, context: &Context<'_>) -> Result<u8> {
    let document = json!(report);
    let for_people = text::text(report, verbose(context));
    let rendered = match format {
        CheckFormatArg::Text => for_people.clone(),
        CheckFormatArg::Json => pretty(&document),
        CheckFormatArg::Junit => junit::junit(std::slice::from_ref(report))?,
        CheckFormatArg::Html => html::page(std::slice::from_ref(report)),
    };
    emit(&rendered, &for_people, &document, format, output, context)?;
    Ok(report.exit_code)
}

fn present_all(results: Vec<(String, Result<Report>)>, format: CheckFormatArg, output: Option<&Path>, context: &Context<'_>) -> Result<u8> {
    let code = check::worst(results.iter().map(|(_, result)| match result {
        Ok(report) => report.exit_code,
        Err(error) => error.exit_code(),
    }));
    let rows: Vec<(String, Result<Report, String>)> =
        results.into_iter().map(|(name, result)| (name, result.map_err(|error| error.to_string()))).collect();
    let document = json!({
        "success": code == 0,
        "exit_code": code,
        "environments": rows.iter().map(|(name, result)| match result {
            Ok(report) => json!({ "name": name, "report": report }),
            Err(error) => json!({ "name": name, "error": error }),
        }).collect::<Vec<_>>(),
    });
    let for_people = text::table(&rows);
    let reports: Vec<Report> = rows.iter().filter_map(|(_, result)| result.as_ref().ok().cloned()).collect();
    let rendered = match format {
        CheckFormatArg::Text => for_people.clone(),
        CheckFormatArg::Json => {
            let mut all = json!({ "schema_version": crate::ui::SCHEMA_VERSION });
            if let (Some(all), Value::Object(parts)) = (all.as_object_mut(), &document) {
                all.extend(parts.clone());
            }
            pretty(&all)
        }
        CheckFormatArg::Junit => junit::junit(&reports)?,
        CheckFormatArg::Html => html::page(&reports),
    };
    emit(&rendered, &for_people, &document, format, output, context)?;
    Ok(code)
}

/// The report to the file or to stdout; beside a file, the text for people.
fn emit(
    rendered: &str,
    for_people: &str,
    document: &Value,
    format: CheckFormatArg,
    output: Option<&Path>,
    context: &Context<'_>,
) -> Result<()> {
    let printer = context.printer;
    if let Some(out) = output {
        check::write_whole(out, rendered.as_bytes())?;
        printer.note(&format!("wrote `{}`", out.display()));
    }
    if printer.is_json() {
        printer.json(document);
    } else if output.is_some() || format == CheckFormatArg::Text {
        printer.data(for_people);
    } else {
        printer.raw(rendered);
    }
    Ok(())
}

/// The check at the end of `create --check` (`wanted`: with `--require-gpu` or without): prints the report, adds it to the command's document, and
/// returns its exit code. The environment stays whatever comes out.
pub async fn after_create(prefix: &Path, wanted: Option<bool>, document: &mut Value, context: &Context<'_>) -> Result<u8> {
    let Some(require_gpu) = wanted else { return Ok(0) };
    let how = CheckHowArgs { level: CheckLevelArg::Quick, require_gpu, timeout: None };
    let machine = machine(None, context).await?;
    let report = run(Subject::at(prefix)?, &how, Instant::now(), machine, context).await?;
    remember(&report, context);
    context.printer.data(&text::text(&report, verbose(context)));
    document["check"] = json!(report);
    document["success"] = json!(report.success);
    Ok(report.exit_code)
}

/// Whether `create` is to check at its end, and how.
pub fn wanted(args: &super::args::CreateArgs) -> Option<bool> {
    args.check.then_some(args.require_gpu)
}
