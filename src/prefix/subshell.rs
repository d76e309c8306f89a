//! `shell`: a new shell inside an environment, with the user's own start-up files.

use std::ffi::{OsStr, OsString};
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};

use super::activate::{Activator, Prompt};
use super::init::{Tool, function};
use super::run::{Environment, RunOptions, execute};
use super::shell::Shell;
use super::{Prefix, run};
use crate::error::{Error, Kind, Result};

/// How to start the shell.
#[derive(Debug, Clone)]
pub struct SubShell {
    /// Which one.
    pub shell: Shell,
    /// Arguments for it; with any the shell is not made interactive here.
    pub args: Vec<OsString>,
    /// A person sits at the other end.
    pub interactive: bool,
    /// This program, for the shell to call.
    pub tool: PathBuf,
    /// What stands before the prompt.
    pub prompt: Prompt,
}

/// Becomes a shell in the environment: its exit code is the shell's. The user's start-up files are read first, so that what they do to PATH or
/// which environment they activate comes before this one.
///
/// # Errors
/// The environment cannot be activated; the shell is not there or cannot be started (125 to 127 as for `run`).
pub fn sub_shell(prefix: &Prefix, how: &SubShell, env: &Environment) -> Result<u8> {
    let shell = how.shell;
    // What is wrong with the environment is told here, before a shell starts without it.
    Activator { shell, env, prompt: how.prompt.clone() }.activate(prefix, false)?;
    let program = program(shell, env);
    if !how.interactive || !how.args.is_empty() {
        let argv: Vec<OsString> = std::iter::once(program).chain(how.args.iter().cloned()).collect();
        return run(prefix, &argv, &RunOptions::default(), env);
    }
    let call = shell.quote(&how.tool.to_string_lossy());
    let path = shell.quote(&prefix.path().to_string_lossy());
    let name = shell.name();
    let activate = match shell {
        Shell::Posix | Shell::Bash | Shell::Zsh => format!("eval \"$({call} __hook {name} activate {path})\"\n"),
        Shell::Fish => format!("eval ({call} __hook {name} activate {path} | string collect)\n"),
        Shell::PowerShell => format!("Invoke-Expression -Command (& {call} __hook {name} activate {path} | Out-String)\n"),
    };
    let setup = format!("{}{activate}", function(shell, &Tool::At(how.tool.clone())));
    let fail = |error: std::io::Error| Error::new(Kind::Run(125), "cannot prepare the start of the shell").because(error);
    let mut env = env.clone();
    let mut argv = vec![program];
    // Lives until the shell has taken this process over.
    let mut kept = None;
    match shell {
        Shell::Bash | Shell::Posix => {
            let (mut file, number) = open_for_child().map_err(fail)?;
            let mut text = if number < 10 || shell == Shell::Bash { format!("exec {number}<&-\n") } else { String::new() };
            if shell == Shell::Bash {
                text.push_str("if [ -f ~/.bashrc ]; then . ~/.bashrc; fi\n");
                argv.extend(["--rcfile".into(), format!("/dev/fd/{number}").into(), "-i".into()]);
            } else {
                match env.insert("ENV".into(), format!("/dev/fd/{number}").into()) {
                    Some(old) => {
                        text.push_str(&format!("ENV={}\nif [ -f \"$ENV\" ]; then . \"$ENV\"; fi\n", shell.quote(&old.to_string_lossy())))
                    }
                    None => text.push_str("unset ENV\n"),
                }
                argv.push("-i".into());
            }
            text.push_str(&setup);
            file.write_all(text.as_bytes()).and_then(|()| file.rewind()).map_err(fail)?;
            kept = Some(file);
        }
        Shell::Zsh => {
            let folder = tempfile::Builder::new().prefix("tare-zsh-").tempdir().map_err(fail)?;
            for (name, text) in zsh_files(folder.path(), env.get(OsStr::new("ZDOTDIR")), &setup) {
                std::fs::write(folder.path().join(name), text).map_err(fail)?;
            }
            env.insert("ZDOTDIR".into(), folder.path().into());
            argv.push("-i".into());
            // The shell removes it when it has read it; if there is no shell, it goes here.
            return execute(&argv, &env);
        }
        Shell::Fish => {
            argv.extend(["-C".into(), setup.into()]);
        }
        Shell::PowerShell => {
            argv.extend(["-NoExit".into(), "-Command".into(), setup.into()]);
        }
    }
    let result = execute(&argv, &env);
    drop(kept);
    result
}

/// A file without a name that is open in the program that this process becomes, and its number.
#[cfg(unix)]
fn open_for_child() -> std::io::Result<(std::fs::File, i32)> {
    use std::os::fd::AsRawFd;
    let file = tempfile::tempfile()?;
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty())?;
    let number = file.as_raw_fd();
    Ok((file, number))
}

#[cfg(not(unix))]
fn open_for_child() -> std::io::Result<(std::fs::File, i32)> {
    Err(std::io::Error::other("this shell cannot be started here"))
}

/// The shell's program: the user's own if SHELL is one of that kind, else by name.
fn program(shell: Shell, env: &Environment) -> OsString {
    if let Some(own) = env.get(OsStr::new("SHELL"))
        && let Some(name) = Path::new(own).file_name().and_then(OsStr::to_str)
        && name.parse::<Shell>().is_ok_and(|own| own == shell)
        && Path::new(own).is_file()
    {
        return own.clone();
    }
    match shell {
        Shell::Posix => "sh".into(),
        Shell::PowerShell => "pwsh".into(),
        other => other.name().into(),
    }
}

/// Start-up files for zsh, which has no option to name one: they hand over to those of the user, whose own ones may move ZDOTDIR.
fn zsh_files(folder: &Path, zdotdir: Option<&OsString>, setup: &str) -> [(&'static str, String); 2] {
    let quote = |text: &str| Shell::Zsh.quote(text);
    let folder = quote(&folder.to_string_lossy());
    let back = match zdotdir {
        Some(old) => format!("ZDOTDIR={}\n", quote(&old.to_string_lossy())),
        None => "unset ZDOTDIR\n".to_owned(),
    };
    let env = format!(
        "{back}if [[ -f ${{ZDOTDIR:-$HOME}}/.zshenv ]]; then . ${{ZDOTDIR:-$HOME}}/.zshenv; fi\nif [[ -n ${{ZDOTDIR+x}} ]]; then __tare_zdotdir=$ZDOTDIR; fi\nexport ZDOTDIR={folder}\n"
    );
    let rc = format!(
        "command rm -rf -- {folder}\nif [[ -n ${{__tare_zdotdir+x}} ]]; then ZDOTDIR=$__tare_zdotdir; unset __tare_zdotdir; else unset ZDOTDIR; fi\nif [[ ${{HISTFILE-}} == {folder}/* ]]; then HISTFILE=${{ZDOTDIR:-$HOME}}/${{HISTFILE:t}}; fi\nif [[ -f ${{ZDOTDIR:-$HOME}}/.zshrc ]]; then . ${{ZDOTDIR:-$HOME}}/.zshrc; fi\n{setup}"
    );
    [(".zshenv", env), (".zshrc", rc)]
}
