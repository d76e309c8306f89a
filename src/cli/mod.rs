//! The command line: arguments in, one library call, result to `ui`.

mod args;
mod auth;
mod change;
mod check;
mod clean;
mod config;
mod context;
mod convert;
mod create;
mod diff;
#[cfg(test)]
mod documents;
mod env;
mod export;
mod gpu;
mod info;
mod list;
mod lock;
mod notebook;
mod reference;
mod run;
mod search;
mod shell;
mod shell_hook;
mod sync;
mod verify;
mod why;

use std::ffi::OsString;
use std::future::Future;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use crate::error::{Error, Kind, Result};
use crate::install::{Cancel, CancelOnDrop};
use crate::ui::{ColorChoice, Masked, Printer, Verbosity};
use args::{Cli, Command};
use context::Context;

/// Runs the program with the arguments and the environment of this process.
pub fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) => return usage(&error, &args),
    };
    // What a hook prints on stdout is evaluated by a shell: errors have no place there.
    let json = cli.global.json && !matches!(cli.command, Command::Hook(_));
    let verbosity = match (cli.global.quiet, cli.global.verbose) {
        (true, _) => Verbosity::Quiet,
        (false, 0) => Verbosity::Normal,
        (false, _) => Verbosity::Verbose,
    };
    let printer = Printer::new(verbosity, json, cli.global.color);
    let code = start_logs(&cli.global).and_then(|()| dispatch(cli, &printer)).unwrap_or_else(|error| {
        printer.error(&error);
        error.exit_code()
    });
    if printer.lost_output() && code == 0 {
        return ExitCode::from(Kind::Failure.exit_code());
    }
    ExitCode::from(code)
}

/// The CLI reference page, generated from the definitions.
pub fn reference() -> String {
    reference::markdown(&Cli::command())
}

/// Help, version and usage errors. With `--json` a usage error is a document like every other error.
fn usage(error: &clap::Error, args: &[OsString]) -> ExitCode {
    use clap::error::ErrorKind;
    if args.get(1).is_some_and(|arg| arg == "__hook") {
        // The shell function evaluates stdout, and the user typed what comes after the name of the shell.
        let typed: Vec<&OsString> = args.iter().take(1).chain(args.iter().skip(3)).collect();
        let shown = Cli::try_parse_from(typed).err();
        let error = shown.as_ref().unwrap_or(error);
        Printer::new(Verbosity::Normal, false, ColorChoice::Auto).usage(&error.render().ansi().to_string());
        return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
    }
    if let Some(hint) = command_of_another(error, args) {
        let printer = Printer::new(Verbosity::Normal, args.iter().any(|arg| arg == "--json"), ColorChoice::Auto);
        let message = error.render().to_string().lines().next().unwrap_or_default().trim_start_matches("error: ").replace('\'', "`");
        printer.error(&Error::usage(message).hint(hint).hint("all commands: tare --help"));
        return ExitCode::from(Kind::Usage.exit_code());
    }
    if !matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) && args.iter().any(|arg| arg == "--json") {
        let text = error.render().to_string();
        let message = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
        let printer = Printer::new(Verbosity::Normal, true, ColorChoice::Never);
        printer.error(&Error::usage(message).hint("see `tare --help`"));
        return ExitCode::from(Kind::Usage.exit_code());
    }
    if error.use_stderr() {
        Printer::new(Verbosity::Normal, false, ColorChoice::Auto).usage(&error.render().ansi().to_string());
    } else if let Err(lost) = error.print()
        && lost.kind() != std::io::ErrorKind::BrokenPipe
    {
        Printer::new(Verbosity::Normal, false, ColorChoice::Auto).error(&Error::failure("cannot write to standard output").because(lost));
        return ExitCode::from(Kind::Failure.exit_code());
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// What does here the work of a command that conda, pixi, uv or pip has and tare has not.
fn command_of_another(error: &clap::Error, args: &[OsString]) -> Option<&'static str> {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    let first = args.iter().skip(1).find(|arg| !arg.to_string_lossy().starts_with('-'))?;
    if error.kind() != ErrorKind::InvalidSubcommand || first != typed.as_str() {
        return None;
    }
    Some(match typed.as_str() {
        "add" => "to add packages to an environment: tare install -n NAME PACKAGE",
        "tree" => "what needs a package: tare why -n NAME PACKAGE; all packages: tare list -n NAME",
        "outdated" => "what an update would change: tare update -n NAME --dry-run",
        "freeze" => "packages of pip: tare export -n NAME --format pip; all packages: tare list -n NAME --export",
        "pip" => "to install from a Python package index: tare install -n NAME pypi::PACKAGE; pip itself: tare run -n NAME python -m pip",
        "upgrade" => "tare update -n NAME PACKAGE",
        "show" => "tare list -n NAME PACKAGE, or what needs it: tare why -n NAME PACKAGE",
        "venv" => "tare create -n NAME python=3.11",
        "compare" => "tare diff A B",
        "doctor" => "tare check -n NAME",
        _ => return None,
    })
}

/// Debug logs to stderr (`-vv`, `-vvv`, `TARE_LOG`) and to `--log-file`.
fn start_logs(global: &args::Global) -> Result<()> {
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::util::SubscriberInitExt;
    use tracing_subscriber::{EnvFilter, Layer, fmt};
    let wanted = match global.verbose {
        0 | 1 => None,
        2 => Some("debug,hyper=info,h2=info,rustls=info"),
        _ => Some("trace"),
    };
    let from_env = std::env::var("TARE_LOG").ok().filter(|text| !text.is_empty());
    if wanted.is_none() && from_env.is_none() && global.log_file.is_none() {
        return Ok(());
    }
    let filter = |directives: &str| {
        EnvFilter::try_new(directives).map_err(|error| Error::usage(format!("bad log filter `{directives}`")).because(error))
    };
    let to_stderr = match from_env.as_deref().or(wanted) {
        Some(directives) => Some(fmt::layer().with_writer(|| Masked(std::io::stderr())).with_target(true).with_filter(filter(directives)?)),
        None => None,
    };
    let to_file = match &global.log_file {
        Some(path) => {
            let file =
                std::fs::OpenOptions::new().create(true).append(true).open(path).map_err(|error| Error::io("write", path, &error))?;
            let file = std::sync::Arc::new(file);
            let layer = fmt::layer().with_ansi(false).with_writer(move || Masked(file.clone()));
            Some(layer.with_filter(filter("debug,hyper=info,h2=info,rustls=info")?))
        }
        None => None,
    };
    // A second subscriber in one process (tests) is no reason to fail.
    let _ = tracing_subscriber::registry().with(to_stderr).with(to_file).try_init();
    Ok(())
}

fn dispatch(cli: Cli, printer: &Printer) -> Result<u8> {
    let global = cli.global;
    match cli.command {
        Command::Completions(args) => {
            let mut script = Vec::new();
            clap_complete::generate(args.shell, &mut Cli::command(), "tare", &mut script);
            printer.raw(&String::from_utf8_lossy(&script));
            Ok(0)
        }
        Command::DetectGpu { route } => {
            printer.raw(&crate::platform::detect_child_main(&route));
            Ok(0)
        }
        Command::GpuProbe { route, interval } => gpu::probe(&route, interval, printer),
        Command::GpuSelftest { request, notes } => gpu::selftest_apart(&request, &notes, printer),
        Command::Gpu(command) => gpu::run(command, printer),
        Command::Run(args) => run::run(&args, &global).map_err(|error| match error.kind() {
            Kind::Run(_) => error,
            _ => error.with_kind(Kind::Run(125)),
        }),
        Command::Shell(args) => shell::shell(&args, &global),
        // A kernel becomes another program, and reads no configuration of tare's.
        Command::Notebook(notebook::NotebookCommand::Launch(args)) => notebook::launch(&args),
        command => {
            let context = Context::load(&global, printer)?;
            match command {
                Command::Create(args) | Command::Env(args::EnvCommand::Create(args)) => block_on(create::create(*args, &context)),
                Command::Lock(args) => block_on(lock::lock(*args, &context)),
                Command::Sync(args) => block_on(sync::sync(*args, &context)),
                Command::Install(args) => block_on(change::install(*args, &context)),
                Command::Update(args) | Command::Env(args::EnvCommand::Update(args)) => block_on(change::update(*args, &context)),
                Command::Remove(args) => block_on(change::remove(*args, &context)),
                Command::Relocate(args) => block_on(change::relocate(*args, &context)),
                Command::Rename(args) => block_on(change::rename(*args, &context)),
                Command::Env(args::EnvCommand::Remove(args)) => {
                    block_on(change::remove_environment(&args.change, args.lock_timeout, &context))
                }
                Command::Env(args::EnvCommand::Config(args::EnvConfigCommand::Vars(command))) => {
                    block_on(change::variables(command, &context))
                }
                Command::List(args) => list::list(&args, &context),
                Command::Export(args) => export::export(&args, &context),
                Command::Env(args::EnvCommand::Export(args)) => export::export(&args, &context),
                Command::Convert(args) => convert::convert(&args, &context),
                Command::Verify(args) => block_on(verify::verify(args, &context)),
                Command::Check(args) => block_on(check::check(args, &context)),
                Command::Diff(args) => diff::diff(&args, &context),
                Command::Env(args::EnvCommand::List) => env::list(&context),
                Command::Env(args::EnvCommand::Digest(args)) => env::digest(&args, &context),
                Command::Init(args) => shell::init(&args, &context),
                Command::Activate(args) => shell::explain("activate", Some(&args), &context),
                Command::Deactivate(_) => shell::explain("deactivate", None, &context),
                Command::Hook(args) => shell::hook(&args, &context),
                Command::ShellHook(args) => shell_hook::shell_hook(&args, &context),
                Command::Info(args) => info::info(&args, &context),
                Command::Search(args) => block_on(search::search(&args, &context)),
                Command::Why(args) => why::why(&args, &context),
                Command::Config(args) => config::config(args.command, &context),
                Command::Clean(args) => block_on(clean::clean(&args, &context)),
                Command::Auth(args) => auth::auth(args, &context),
                Command::Notebook(command) => block_on(notebook::run(command, &context)),
                Command::Completions(_)
                | Command::DetectGpu { .. }
                | Command::GpuProbe { .. }
                | Command::GpuSelftest { .. }
                | Command::Gpu(_)
                | Command::Run(_)
                | Command::Shell(_) => Ok(0),
            }
        }
    }
}

/// Runs a future to its end, or drops it on Ctrl-C or SIGTERM: what it was building is removed by the guards it holds.
fn block_on<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    // A task for each package and a thread for each task would be a crowd at one lock; some threads only wait for a disk.
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .max_blocking_threads(2 * cores.max(2))
        .enable_all()
        .build()
        .map_err(|error| Error::failure("cannot start worker threads").because(error))?;
    let result = runtime.block_on(async {
        let interrupted = interrupted();
        tokio::select! {
            result = future => result,
            signal = interrupted => Err(Error::new(Kind::Interrupted, format!("stopped by {signal}"))),
        }
    });
    // Tasks that only waited for the network must not hold the exit up.
    runtime.shutdown_timeout(std::time::Duration::from_secs(5));
    result
}

/// Runs `work` on a thread. When the future is dropped (Ctrl-C), the switch that `work` got is flipped.
async fn blocking<T: Send + 'static>(work: impl FnOnce(&Cancel) -> Result<T> + Send + 'static) -> Result<T> {
    let cancel = Cancel::new();
    let guard = CancelOnDrop::new(cancel.clone());
    let result = tokio::task::spawn_blocking(move || work(&cancel)).await;
    guard.disarm();
    result.map_err(|error| Error::failure("the work ended unexpectedly").because(error))?
}

async fn interrupted() -> &'static str {
    use tokio::signal::unix::{SignalKind, signal};
    match (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) {
        (Ok(mut interrupt), Ok(mut terminate)) => {
            tokio::select! {
                _ = interrupt.recv() => "Ctrl-C",
                _ = terminate.recv() => "SIGTERM",
            }
        }
        // Without handlers the signals end the process as always.
        _ => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
