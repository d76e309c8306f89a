//! Activation scripts for shells.
//!
//! Values are quoted so that no shell looks into them: a variable of an environment file is data, whatever characters it has. (rattler's own scripts put
//! values between double quotes, where `$` and backticks are still alive, so they are not used here.)

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::Prefix;
use super::run::{Environment, display_name, run_environment};
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
}

impl Shell {
    /// The shell of the user: SHELL, else a POSIX one.
    pub fn detect(env: impl Fn(&str) -> Option<String>) -> Self {
        let name = env("SHELL").and_then(|path| Path::new(&path).file_name().map(|name| name.to_string_lossy().into_owned()));
        name.and_then(|name| name.parse().ok()).unwrap_or(Shell::Posix)
    }

    /// The ending of scripts in `activate.d` that it can run.
    fn extension(self) -> &'static str {
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => "sh",
            Shell::Fish => "fish",
            Shell::PowerShell => "ps1",
        }
    }

    /// `text` as a word that the shell takes as it is.
    fn quote(self, text: &str) -> String {
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => format!("'{}'", text.replace('\'', r"'\''")),
            Shell::Fish => format!("'{}'", text.replace('\\', r"\\").replace('\'', r"\'")),
            // PowerShell ends a string at typographic quotes too, and doubling is how each is written.
            Shell::PowerShell => {
                let doubled: String = text
                    .chars()
                    .flat_map(|c| {
                        std::iter::repeat_n(c, if matches!(c, '\'' | '\u{2018}' | '\u{2019}' | '\u{201a}' | '\u{201b}') { 2 } else { 1 })
                    })
                    .collect();
                format!("'{doubled}'")
            }
        }
    }

    fn set(self, name: &str, value: &str) -> String {
        let value = self.quote(value);
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => format!("export {name}={value}\n"),
            Shell::Fish => format!("set -gx {name} {value}\n"),
            Shell::PowerShell => format!("${{Env:{name}}} = {value}\n"),
        }
    }

    fn unset(self, name: &str) -> String {
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => format!("unset {name}\n"),
            Shell::Fish => format!("set -e {name}\n"),
            Shell::PowerShell => format!("Remove-Item -ErrorAction SilentlyContinue 'Env:{name}'\n"),
        }
    }

    fn copy(self, from: &str, to: &str) -> String {
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => format!("export {to}=\"${{{from}-}}\"\n"),
            Shell::Fish => format!("set -gx {to} ${from}\n"),
            Shell::PowerShell => format!("${{Env:{to}}} = ${{Env:{from}}}\n"),
        }
    }

    /// Puts a folder in front of the PATH that there is when the script runs, which may be later and elsewhere.
    fn prepend_path(self, folder: &str) -> String {
        let folder = self.quote(folder);
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => format!("export PATH={folder}\"${{PATH:+:${{PATH}}}}\"\n"),
            Shell::Fish => format!("set -gx PATH {folder} $PATH\n"),
            Shell::PowerShell => format!("${{Env:PATH}} = {folder} + [IO.Path]::PathSeparator + ${{Env:PATH}}\n"),
        }
    }

    fn set_path(self, folders: &[PathBuf]) -> String {
        let folders: Vec<String> = folders.iter().map(|folder| folder.to_string_lossy().into_owned()).collect();
        match self {
            Shell::Fish => {
                let words: Vec<String> = folders.iter().map(|folder| self.quote(folder)).collect();
                format!("set -gx PATH {}\n", words.join(" "))
            }
            _ => self.set("PATH", &folders.join(if cfg!(windows) { ";" } else { ":" })),
        }
    }

    fn source(self, script: &Path) -> String {
        let script = self.quote(&script.to_string_lossy());
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh | Shell::PowerShell => format!(". {script}\n"),
            Shell::Fish => format!("source {script}\n"),
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
            _ => {
                return Err(Error::usage(format!("`{text}` is no shell that scripts can be made for"))
                    .hint("one of posix, bash, zsh, fish, powershell"));
            }
        })
    }
}

/// The scripts of `etc/conda/KIND` that `shell` can run, in order of name.
fn scripts(prefix: &Path, kind: &str, shell: Shell) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(prefix.join("etc/conda").join(kind))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == shell.extension()) && path.is_file())
        .collect();
    found.sort();
    found
}

/// Whether `name` can be a variable in every shell; others are left out of scripts, where they could be commands.
fn is_variable_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn checked_variables(prefix: &Prefix) -> Result<Vec<(String, String)>> {
    let variables: Vec<(String, String)> = prefix.all_variables()?.into_iter().collect();
    if let Some((bad, _)) = variables.iter().find(|(name, value)| !is_variable_name(name) || value.contains('\0')) {
        return Err(Error::failure(format!("{bad:?} cannot be a variable of a shell"))
            .because(format!("the environment `{}` sets it", prefix.path().display()))
            .hint("names have letters, digits and `_` only"));
    }
    Ok(variables)
}

fn backup(name: &str) -> String {
    format!("CONDA_ENV_SHLVL_1_{name}")
}

/// Removes `prefix` from the shell: its scripts, its variables (older values come back), its folder on PATH.
fn leave(script: &mut String, prefix: &Path, shell: Shell, env: &HashMap<String, String>) -> Result<()> {
    for path in scripts(prefix, "deactivate.d", shell).iter().rev() {
        script.push_str(&shell.source(path));
    }
    let variables = Prefix::open(prefix).and_then(|prefix| checked_variables(&prefix)).unwrap_or_default();
    for (name, _) in variables {
        if env.contains_key(&backup(&name)) {
            script.push_str(&shell.copy(&backup(&name), &name));
            script.push_str(&shell.unset(&backup(&name)));
        } else {
            script.push_str(&shell.unset(&name));
        }
    }
    Ok(())
}

fn path_without(env: &HashMap<String, String>, prefix: &Path) -> Vec<PathBuf> {
    let bin = prefix.join("bin");
    env.get("PATH").map(|path| std::env::split_paths(path).filter(|folder| *folder != bin).collect()).unwrap_or_default()
}

/// The script that activates the environment when `shell` evaluates it. `env`: the variables of the shell; an environment that is active
/// there is deactivated first.
///
/// # Errors
/// The variables of the environment cannot be read or are no variables of a shell.
pub fn activation(prefix: &Prefix, shell: Shell, env: &HashMap<String, String>) -> Result<String> {
    let mut script = String::new();
    let variables = checked_variables(prefix)?;
    // A prefix that is gone has nothing to deactivate.
    let active = env.get("CONDA_PREFIX").map(PathBuf::from).filter(|path| path.join("conda-meta").is_dir());
    let bin = prefix.path().join("bin");
    match &active {
        Some(active) => {
            leave(&mut script, active, shell, env)?;
            let mut folders = vec![bin.clone()];
            folders.extend(path_without(env, active).into_iter().filter(|folder| *folder != bin));
            script.push_str(&shell.set_path(&folders));
        }
        None => script.push_str(&shell.prepend_path(&bin.to_string_lossy())),
    }
    let name = display_name(prefix.path());
    script.push_str(&shell.set("CONDA_PREFIX", &prefix.path().to_string_lossy()));
    script.push_str(&shell.set("CONDA_DEFAULT_ENV", &name));
    script.push_str(&shell.set("CONDA_PROMPT_MODIFIER", &format!("({name}) ")));
    script.push_str(&shell.set("CONDA_SHLVL", "1"));
    for (name, value) in &variables {
        // With an environment active, what is set may be that one's value, which `leave` has just taken back.
        if env.contains_key(name) && active.is_none() {
            script.push_str(&shell.copy(name, &backup(name)));
        }
        script.push_str(&shell.set(name, value));
    }
    for path in scripts(prefix.path(), "activate.d", shell) {
        script.push_str(&shell.source(&path));
    }
    Ok(script)
}

/// The script that undoes [`activation`]; `env`: the variables of the shell.
///
/// # Errors
/// None at present; damaged variables of the environment are left as they are.
pub fn deactivation(prefix: &Prefix, shell: Shell, env: &HashMap<String, String>) -> Result<String> {
    let mut script = String::new();
    leave(&mut script, prefix.path(), shell, env)?;
    script.push_str(&shell.set_path(&path_without(env, prefix.path())));
    for name in ["CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_PROMPT_MODIFIER", "CONDA_SHLVL"] {
        let _ = write!(script, "{}", shell.unset(name));
    }
    Ok(script)
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
