//! `tare init`, `activate`, `deactivate`, `shell`, and what the shell function of `init` evaluates

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::args::{ActivateArgs, EnvironmentArgs, Global, HookArgs, HookCommand, InitArgs, ShellArgs};
use super::context::{self, Context, environment};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::prefix::{self, Activator, Change, Prefix, Prompt, Shell, SubShell, Tool};

/// The shells that `init` sets up, and their programs.
const SHELLS: [(Shell, &[&str]); 4] =
    [(Shell::Bash, &["bash"]), (Shell::Zsh, &["zsh"]), (Shell::Fish, &["fish"]), (Shell::PowerShell, &["pwsh", "powershell"])];

/// The shell that is named, else the one that called.
pub fn calling(name: Option<&str>) -> Result<Shell> {
    match name {
        Some(name) => name.parse(),
        None => Ok(Shell::calling(|name| std::env::var(name).ok())),
    }
}

/// The settings of the prompt.
pub fn prompt(settings: &Settings) -> Prompt {
    Prompt { change: settings.changeps1.value, template: settings.env_prompt.value.clone() }
}

/// This program, as the shell function shall call it: by its name if PATH leads to it.
fn tool(settings: &Settings) -> Result<Tool> {
    let own = own_path()?;
    let same = |found: &PathBuf| found.canonicalize().ok().is_some_and(|found| own.canonicalize().ok() == Some(found));
    Ok(match settings.env.find_program("tare").filter(same) {
        Some(_) => Tool::OnPath,
        None => Tool::At(own),
    })
}

fn own_path() -> Result<PathBuf> {
    std::env::current_exe().map_err(|error| Error::failure("cannot find out where this program is").because(error))
}

fn rc_file(shell: Shell, settings: &Settings) -> Result<PathBuf> {
    let home = settings.home("start-up files")?;
    if !home.is_dir() {
        return Err(Error::failure(format!("the home folder `{}` is not there", home.display())).hint("set HOME to your home folder"));
    }
    let set = |name: &str| settings.env.get(name).filter(|text| !text.is_empty()).map(PathBuf::from);
    let config = set("XDG_CONFIG_HOME").filter(|path| path.is_absolute()).unwrap_or_else(|| home.join(".config"));
    let zdotdir = set("ZDOTDIR");
    if let Some(folder) = zdotdir.as_ref().filter(|folder| shell == Shell::Zsh && folder.is_relative()) {
        return Err(Error::usage(format!("ZDOTDIR is `{}`, which is no absolute path", folder.display()))
            .because("which `.zshrc` is read depends on the folder that zsh is started in")
            .hint("set ZDOTDIR to an absolute path, or unset it"));
    }
    prefix::rc_file(shell, home, &config, zdotdir.as_deref())
}

pub fn init(args: &InitArgs, context: &Context<'_>) -> Result<u8> {
    let settings = &context.settings;
    let installed = |programs: &[&str]| programs.iter().any(|program| settings.env.find_program(program).is_some());
    let mut shells: Vec<Shell> = if args.all {
        SHELLS.iter().filter(|(_, programs)| args.undo || installed(programs)).map(|(shell, _)| *shell).collect()
    } else if args.shells.is_empty() {
        vec![calling(None)?]
    } else {
        args.shells.iter().map(|name| name.parse()).collect::<Result<_>>()?
    };
    let mut seen = std::collections::HashSet::new();
    shells.retain(|shell| seen.insert(*shell));
    let files = shells.iter().map(|shell| rc_file(*shell, settings)).collect::<Result<Vec<_>>>()?;
    let tool = tool(settings)?;
    let mut done = Vec::new();
    // All or none: what cannot be changed is found out before anything is.
    if !args.dry_run {
        for (shell, file) in shells.iter().zip(&files) {
            prefix::initialize(*shell, file, &tool, args.undo, true)?;
        }
    }
    for (shell, file) in shells.iter().zip(&files) {
        done.push(prefix::initialize(*shell, file, &tool, args.undo, args.dry_run)?);
    }
    if context.printer.is_json() {
        context.printer.json(&json!({ "dry_run": args.dry_run, "shells": done }));
        return Ok(0);
    }
    for one in &done {
        let file = one.file.display();
        let text = match (one.change, args.dry_run) {
            (Change::Unchanged, _) => format!("{}: nothing to do in {file}", one.shell),
            (Change::Removed, true) => format!("{}: would take the block of tare out of {file}", one.shell),
            (Change::Removed, false) => format!("{}: took the block of tare out of {file}", one.shell),
            (_, true) => format!("{}: would write into {file}:\n{}", one.shell, one.block.trim_end()),
            (_, false) => format!("{}: wrote into {file}", one.shell),
        };
        context.printer.data(&text);
    }
    if !args.dry_run && !args.undo && done.iter().any(|one| one.change != Change::Unchanged) {
        context.printer.note("open a new shell; then: tare activate NAME");
    }
    Ok(0)
}

/// How a new environment is used; `environment`: its `-n` or `-p`. `tare activate` where `tare init` was done for the calling shell.
pub fn how_to_use(environment: &str, context: &Context<'_>) -> String {
    let file = calling(None).and_then(|shell| rc_file(shell, &context.settings));
    if file.is_ok_and(|file| prefix::is_initialized(&file)) {
        return format!("to use it: tare activate {environment}, or tare run {environment} COMMAND");
    }
    format!("to use it: tare run {environment} COMMAND, or eval \"$(tare shell-hook {environment})\"")
}

/// `tare activate` and `tare deactivate` without the shell function: a program cannot do it.
pub fn explain(command: &str, target: Option<&ActivateArgs>, context: &Context<'_>) -> Result<u8> {
    let shell = calling(None)?;
    let mut named = match target.map(|args| (&args.target, &args.environment.name, &args.environment.prefix)) {
        Some((_, Some(name), _)) => format!(" -n {name}"),
        Some((_, _, Some(path))) => format!(" -p {}", path.display()),
        Some((Some(text), _, _)) if is_path(text) => format!(" -p {text}"),
        Some((Some(text), _, _)) => format!(" -n {text}"),
        Some((None, None, None)) => " -n NAME".to_owned(),
        None => " --deactivate".to_owned(),
    };
    named.insert_str(0, "tare shell-hook");
    let here = match shell {
        Shell::Fish => format!("{named} -s fish | source"),
        Shell::PowerShell => format!("{named} -s powershell | Out-String | Invoke-Expression"),
        _ => format!("eval \"$({named})\""),
    };
    let mut error = Error::failure(format!("`tare {command}` has to change this shell, and a program cannot do that by itself"));
    error = match rc_file(shell, &context.settings) {
        Ok(file) if prefix::is_initialized(&file) => error
            .because(format!("the function `tare` of `{}` is not loaded", file.display()))
            .hint("open a new shell, and try again there"),
        Ok(_) => error.because("the shell is not set up for it").hint(format!("once: tare init {}, and open a new shell", shell.name())),
        Err(_) => error.because("the shell is not set up for it"),
    };
    Err(error.hint(format!("only now and here: {here}")))
}

fn is_path(text: &str) -> bool {
    text.contains('/') || text.starts_with('.') || (cfg!(windows) && text.contains('\\'))
}

/// The environment that `activate` means.
fn wanted(args: &ActivateArgs, settings: &Settings) -> Result<PathBuf> {
    let Some(text) = &args.target else { return context::locate(&args.environment, settings) };
    let which = if is_path(text) {
        EnvironmentArgs { name: None, prefix: Some(PathBuf::from(text)) }
    } else {
        EnvironmentArgs { name: Some(text.clone()), prefix: None }
    };
    context::locate(&which, settings).map_err(|error| {
        let here = Path::new(text).join("conda-meta").is_dir();
        if here && which.name.is_some() { error.hint(format!("for the folder of that name: tare activate ./{text}")) } else { error }
    })
}

/// What the shell function evaluates.
pub fn hook(args: &HookArgs, context: &Context<'_>) -> Result<u8> {
    let env = environment();
    let activator = Activator { shell: args.shell.parse()?, env: &env, prompt: prompt(&context.settings) };
    let script = match &args.command {
        HookCommand::Activate(args) => {
            if args.target.is_none() && args.environment.name.is_none() && args.environment.prefix.is_none() && activator.is_idle() {
                return Err(Error::usage("no environment is named and none is active")
                    .hint("name one: tare activate NAME")
                    .hint("the environments there are: tare env list"));
            }
            activator.activate(&Prefix::open(wanted(args, &context.settings)?)?, args.stack)?
        }
        HookCommand::Deactivate(_) => activator.deactivate()?.unwrap_or_else(|| {
            context.printer.note("no environment is active");
            String::new()
        }),
        HookCommand::Reactivate => activator.reactivate().unwrap_or_else(|error| {
            // The command before it has done its work.
            context.printer.warn_error(&error);
            String::new()
        }),
    };
    context.printer.raw(&script);
    Ok(0)
}

pub fn shell(args: &ShellArgs, global: &Global) -> Result<u8> {
    let settings = context::settings(global)?;
    let prefix = Prefix::open(context::locate(&args.environment, &settings)?)?;
    let how = SubShell {
        shell: calling(args.shell.as_deref())?,
        args: args.args.clone(),
        interactive: std::io::stdin().is_terminal(),
        tool: own_path()?,
        prompt: prompt(&settings),
    };
    prefix::sub_shell(&prefix, &how, &environment())
}
