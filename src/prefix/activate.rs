//! Activation scripts for shells.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rattler_conda_types::Subdir;
use rattler_shell::activation::{ActivationVariables, Activator, PathModificationBehavior};
use rattler_shell::shell::ShellEnum;

use super::Prefix;
use super::run::{Environment, run_environment};
use crate::error::{Error, Result};

/// A shell that scripts are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shell {
    /// sh, dash and other POSIX shells.
    Posix,
    /// bash.
    Bash,
    /// zsh.
    Zsh,
    /// fish.
    Fish,
    /// PowerShell, all versions.
    PowerShell,
    /// xonsh.
    Xonsh,
    /// cmd.exe.
    Cmd,
    /// nushell.
    Nu,
}

impl Shell {
    /// The shell of the user: SHELL, else a POSIX one.
    pub fn detect(env: impl Fn(&str) -> Option<String>) -> Self {
        let name = env("SHELL").and_then(|path| Path::new(&path).file_name().map(|name| name.to_string_lossy().into_owned()));
        name.and_then(|name| name.parse().ok()).unwrap_or(Shell::Posix)
    }

    fn rattler(self) -> ShellEnum {
        match self {
            // The script for bash uses `export`, `unset` and `.` only.
            Shell::Posix | Shell::Bash => ShellEnum::Bash(Default::default()),
            Shell::Zsh => ShellEnum::Zsh(Default::default()),
            Shell::Fish => ShellEnum::Fish(Default::default()),
            Shell::PowerShell => ShellEnum::PowerShell(Default::default()),
            Shell::Xonsh => ShellEnum::Xonsh(Default::default()),
            Shell::Cmd => ShellEnum::CmdExe(Default::default()),
            Shell::Nu => ShellEnum::NuShell(Default::default()),
        }
    }
}

impl FromStr for Shell {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text.trim_end_matches(".exe") {
            "sh" | "dash" | "ash" | "ksh" | "posix" => Shell::Posix,
            "bash" => Shell::Bash,
            "zsh" => Shell::Zsh,
            "fish" => Shell::Fish,
            "powershell" | "pwsh" => Shell::PowerShell,
            "xonsh" => Shell::Xonsh,
            "cmd" => Shell::Cmd,
            "nu" | "nushell" => Shell::Nu,
            _ => {
                return Err(Error::usage(format!("`{text}` is no shell that is known here"))
                    .hint("one of posix, bash, zsh, fish, powershell, xonsh, cmd, nu"));
            }
        })
    }
}

fn activator(prefix: &Prefix, shell: Shell) -> Result<Activator<ShellEnum>> {
    let subdir = Subdir::current().ok_or_else(|| Error::failure("this machine's platform is not known to conda"))?;
    let fail = |error: &(dyn std::error::Error + 'static)| {
        Error::failure(format!("cannot prepare `{}` for a shell", prefix.path().display())).because_of(error)
    };
    // Damaged variables get our message, which names the file and says what it should look like.
    let variables = prefix.all_variables()?;
    let mut activator = Activator::from_path(prefix.path(), shell.rattler(), subdir).map_err(|error| fail(&error))?;
    // As written: the crate would turn their names to upper case.
    activator.env_vars = variables;
    activator.env_vars.insert("CONDA_DEFAULT_ENV".to_owned(), super::run::display_name(prefix.path()));
    Ok(activator)
}

fn variables(env: &HashMap<String, String>, active: Option<PathBuf>) -> ActivationVariables {
    ActivationVariables {
        // A prefix that is gone cannot be deactivated.
        conda_prefix: active.filter(|path| path.join("conda-meta").is_dir()),
        path: None,
        path_modification_behavior: PathModificationBehavior::Prepend,
        current_env: env.clone(),
    }
}

/// The script that activates the environment when `shell` evaluates it. `env`: the variables of the shell; an environment that is active
/// there is deactivated first.
///
/// # Errors
/// The variables of the environment cannot be read.
pub fn activation(prefix: &Prefix, shell: Shell, env: &HashMap<String, String>) -> Result<String> {
    let active = env.get("CONDA_PREFIX").map(PathBuf::from);
    let fail = |error: &(dyn std::error::Error + 'static)| Error::failure("cannot write the activation script").because_of(error);
    let result = activator(prefix, shell)?.activation(variables(env, active)).map_err(|error| fail(&error))?;
    result.script.contents().map_err(|error| fail(&error))
}

/// The script that undoes [`activation`].
///
/// # Errors
/// As for [`activation`].
pub fn deactivation(prefix: &Prefix, shell: Shell, env: &HashMap<String, String>) -> Result<String> {
    let fail = |error: &(dyn std::error::Error + 'static)| Error::failure("cannot write the deactivation script").because_of(error);
    let result = activator(prefix, shell)?.deactivation(variables(env, None)).map_err(|error| fail(&error))?;
    result.script.contents().map_err(|error| fail(&error))
}

/// What activation changes, for `shell-hook --json`: the variables it sets, and those it removes as null.
///
/// # Errors
/// As for [`run_environment`].
pub fn shell_hook_json(prefix: &Prefix, env: &Environment) -> Result<serde_json::Value> {
    let after = run_environment(prefix, env)?;
    let text = |value: &std::ffi::OsString| value.to_string_lossy().into_owned();
    let mut changed = serde_json::Map::new();
    for (name, value) in &after {
        if env.get(name) != Some(value) {
            changed.insert(text(name), text(value).into());
        }
    }
    for name in env.keys().filter(|name| !after.contains_key(*name)) {
        changed.insert(text(name), serde_json::Value::Null);
    }
    Ok(serde_json::json!({ "schema_version": 1, "prefix": prefix.path(), "environment_variables": changed }))
}
