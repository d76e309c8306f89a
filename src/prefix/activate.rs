//! Activation: the scripts that put an environment into a running shell and take it out again.
//!
//! The state is kept where conda keeps it, in variables of the shell, so that the two tools can work in one shell: CONDA_SHLVL counts, CONDA_PREFIX and
//! CONDA_PREFIX_N name the environments, CONDA_STACKED_N marks one that was put on top of the last, and `__CONDA_SHLVL_N_NAME` is what NAME was before. One
//! more variable a level, `__TARE_ENV_N`, lists the names that were set, so that an environment can be left even if it has been deleted or changed meanwhile.
//!
//! Values are quoted so that no shell looks into them: a variable of an environment file is data, whatever characters it has. (rattler's own scripts put
//! values between double quotes, where `$` and backticks are still alive, and its deactivation needs the environment's files, so neither is used here.)

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Prefix;
use super::run::{Environment, display_name, run_environment};
use super::shell::Shell;
use crate::error::{Error, Result};

/// What stands before the prompt while an environment is active: conda's `changeps1` and `env_prompt`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Whether the prompt is changed at all.
    pub change: bool,
    /// With `{default_env}`, `{stacked_env}`, `{name}` and `{prefix}` in it.
    pub template: String,
}

impl Default for Prompt {
    fn default() -> Self {
        Prompt { change: true, template: "({default_env}) ".to_owned() }
    }
}

impl Prompt {
    /// The text for the environment `names[0]` at `prefix`; `names` goes on with those it is stacked on. Characters that a shell would expand in a prompt, now or
    /// when a theme shows the variable, become `?`.
    fn modifier(&self, prefix: &str, names: &[String]) -> String {
        if !self.change {
            return String::new();
        }
        let base = Path::new(prefix).file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let text = self
            .template
            .replace("{default_env}", names.first().map_or("", String::as_str))
            .replace("{stacked_env}", &names.join(","))
            .replace("{name}", &base)
            .replace("{prefix}", prefix);
        text.chars().map(|c| if c.is_control() || matches!(c, '$' | '`' | '\\' | '!') { '?' } else { c }).collect()
    }
}

/// What was done at one level, in `__TARE_ENV_N`.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Record {
    prefix: String,
    /// Names of the variables that were set.
    set: Vec<String>,
    /// Whether CONDA_SHLVL was there before.
    #[serde(default)]
    counted: bool,
}

/// One environment of the shell.
#[derive(Debug, Clone)]
struct Level {
    /// From 1.
    number: u32,
    prefix: String,
    /// The one below is still in effect.
    stacked: bool,
    record: Option<Record>,
}

impl Level {
    fn is_alive(&self) -> bool {
        Path::new(&self.prefix).join("conda-meta").is_dir()
    }
    fn folders(&self) -> String {
        folders(&self.prefix)
    }
}

/// What goes on PATH for an environment, as one text.
fn folders(prefix: &str) -> String {
    if cfg!(windows) {
        let parts = ["", r"\Library\mingw-w64\bin", r"\Library\usr\bin", r"\Library\bin", r"\Scripts", r"\bin"];
        parts.map(|part| format!("{prefix}{part}")).join(";")
    } else {
        format!("{prefix}/bin")
    }
}

fn get<'a>(env: &'a Environment, name: &str) -> Option<&'a str> {
    env.get(OsStr::new(name)).and_then(|value| value.to_str()).filter(|value| !value.is_empty())
}

fn record_name(number: u32) -> String {
    format!("__TARE_ENV_{number}")
}

fn backup(number: u32, name: &str) -> String {
    format!("__CONDA_SHLVL_{}_{name}", number.saturating_sub(1))
}

/// The environments of the shell, the first one first. Nonsense in the variables is read as far as it makes sense.
fn levels(env: &Environment) -> Vec<Level> {
    let Some(top) = get(env, "CONDA_PREFIX") else { return Vec::new() };
    // The count may be missing, in a container for example.
    let count = get(env, "CONDA_SHLVL").and_then(|text| text.trim().parse::<u32>().ok()).unwrap_or(0).clamp(1, 1000);
    let level = |number: u32, prefix: &str| Level {
        number,
        prefix: prefix.to_owned(),
        stacked: number > 1 && get(env, &format!("CONDA_STACKED_{number}")).is_some(),
        record: get(env, &record_name(number))
            .and_then(|text| serde_json::from_str::<Record>(text).ok())
            // What another tool has done at this level since is not what the record says.
            .filter(|record| record.prefix == prefix && record.set.iter().all(|name| is_variable_name(name))),
    };
    let mut all: Vec<Level> = (1..count).filter_map(|number| Some(level(number, get(env, &format!("CONDA_PREFIX_{number}"))?))).collect();
    all.push(level(count, top));
    all
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

fn checked_variables(prefix: &Prefix, shell: Shell) -> Result<Vec<(String, String)>> {
    let variables: Vec<(String, String)> = prefix.all_variables()?.into_iter().collect();
    let sets = || format!("the environment `{}` sets it", prefix.path().display());
    if let Some((bad, _)) = variables.iter().find(|(name, value)| !is_variable_name(name) || value.contains('\0')) {
        return Err(Error::failure(format!("{bad:?} cannot be a variable of a shell"))
            .because(sets())
            .hint("names have letters, digits and `_` only"));
    }
    if let Some((bad, _)) = variables.iter().find(|(name, _)| shell.reserved().contains(&name.as_str())) {
        return Err(Error::failure(format!("`{bad}` cannot be set in {}: it belongs to the shell", shell.name()))
            .because(sets())
            .hint(format!("tare env config vars unset {bad} -p '{}'", prefix.path().display())));
    }
    Ok(variables)
}

/// Makes the scripts for one shell.
#[derive(Debug, Clone)]
pub struct Activator<'a> {
    /// The shell that will run them.
    pub shell: Shell,
    /// Its variables.
    pub env: &'a Environment,
    /// Its prompt.
    pub prompt: Prompt,
}

impl Activator<'_> {
    /// The script that activates the environment. What is active is deactivated first and comes back when this one is deactivated; with `stack` it stays in effect
    /// below. An environment that is active already is activated anew.
    ///
    /// # Errors
    /// The variables of the environment cannot be read or are no variables of a shell; its path cannot be on PATH.
    pub fn activate(&self, prefix: &Prefix, stack: bool) -> Result<String> {
        let path = on_path(prefix.path())?;
        let variables = checked_variables(prefix, self.shell)?;
        let mut levels = levels(self.env);
        if levels.last().is_some_and(|top| top.prefix == path) {
            return self.reactivate();
        }
        let mut script = String::new();
        let mut old = None;
        let mut stacked = stack && !levels.is_empty();
        let mut number = levels.last().map_or(0, |top| top.number) + 1;
        if let Some(top) = levels.last().cloned() {
            if stack {
                script.push_str(&self.shell.set(&format!("CONDA_PREFIX_{}", top.number), &top.prefix));
            } else {
                self.leave(&mut script, &top);
                old = Some(top.folders());
                if top.is_alive() {
                    script.push_str(&self.shell.set(&format!("CONDA_PREFIX_{}", top.number), &top.prefix));
                } else {
                    // There is nothing to come back to: the new one takes its place.
                    number = top.number;
                    stacked = top.stacked;
                    levels.pop();
                }
            }
        }
        script.push_str(&self.shell.change_path(old.as_deref(), Some(&folders(&path))));
        let flag = format!("CONDA_STACKED_{number}");
        if stacked {
            script.push_str(&self.shell.set(&flag, "true"));
        } else if self.env.contains_key(OsStr::new(&flag)) {
            script.push_str(&self.shell.unset(&flag));
        }
        levels.push(Level { number, prefix: path, stacked, record: None });
        self.enter(&mut script, &levels, &variables);
        Ok(script + self.shell.rehash())
    }

    /// Whether no environment is active.
    pub fn is_idle(&self) -> bool {
        levels(self.env).is_empty()
    }

    /// The script that deactivates what is active, and activates again what was active before. `None` if nothing is active.
    ///
    /// # Errors
    /// As for [`Activator::activate`], about the environment that comes back.
    pub fn deactivate(&self) -> Result<Option<String>> {
        let mut levels = levels(self.env);
        let Some(top) = levels.pop() else { return Ok(None) };
        let mut script = String::new();
        self.leave(&mut script, &top);
        self.forget_stacked(&mut script, &top);
        let mut old = top.folders();
        let mut in_effect = top.stacked;
        while let Some(below) = levels.last().cloned() {
            script.push_str(&self.shell.unset(&format!("CONDA_PREFIX_{}", below.number)));
            if !below.is_alive() {
                if in_effect {
                    script.push_str(&self.shell.change_path(Some(&old), None));
                    self.leave(&mut script, &below);
                    old = below.folders();
                }
                self.forget_stacked(&mut script, &below);
                in_effect = below.stacked;
                levels.pop();
                continue;
            }
            if in_effect {
                script.push_str(&self.shell.change_path(Some(&old), None));
                self.name(&mut script, &levels);
            } else {
                let prefix = Prefix::open(&below.prefix)?;
                let variables = checked_variables(&prefix, self.shell)?;
                script.push_str(&self.shell.change_path(Some(&old), Some(&below.folders())));
                self.enter(&mut script, &levels, &variables);
            }
            return Ok(Some(script + self.shell.rehash()));
        }
        script.push_str(&self.shell.change_path(Some(&old), None));
        script.push_str(&self.shell.prompt("", true));
        for name in ["CONDA_PREFIX", "CONDA_DEFAULT_ENV"] {
            script.push_str(&self.shell.unset(name));
        }
        script.push_str(&if self.counted() { self.shell.set("CONDA_SHLVL", "0") } else { self.shell.unset("CONDA_SHLVL") });
        Ok(Some(script + self.shell.rehash()))
    }

    /// The script that deactivates what is active and activates it again: its scripts and variables may have changed. Empty if nothing is active.
    ///
    /// # Errors
    /// As for [`Activator::activate`]; the environment is gone.
    pub fn reactivate(&self) -> Result<String> {
        let levels = levels(self.env);
        let Some(top) = levels.last() else { return Ok(String::new()) };
        let prefix = Prefix::open(&top.prefix).map_err(|error| error.hint("to leave it: tare deactivate"))?;
        let variables = checked_variables(&prefix, self.shell)?;
        let mut script = String::new();
        self.leave(&mut script, top);
        script.push_str(&self.shell.ensure_path(&top.folders()));
        self.enter(&mut script, &levels, &variables);
        Ok(script + self.shell.rehash())
    }

    /// Whether CONDA_SHLVL was there before the first environment: conda's own set-up makes it 0.
    fn counted(&self) -> bool {
        let levels = levels(self.env);
        let has = |name: &str| self.env.contains_key(OsStr::new(name));
        match levels.iter().find_map(|level| level.record.as_ref()) {
            Some(record) => record.counted,
            None if levels.is_empty() => has("CONDA_SHLVL"),
            None => has("CONDA_EXE"),
        }
    }

    fn forget_stacked(&self, script: &mut String, level: &Level) {
        if level.stacked {
            script.push_str(&self.shell.unset(&format!("CONDA_STACKED_{}", level.number)));
        }
    }

    /// Takes the last of `levels` into effect: everything but PATH.
    fn enter(&self, script: &mut String, levels: &[Level], variables: &[(String, String)]) {
        let Some(top) = levels.last() else { return };
        let record =
            Record { prefix: top.prefix.clone(), set: variables.iter().map(|(name, _)| name.clone()).collect(), counted: self.counted() };
        self.name(script, levels);
        script.push_str(&self.shell.set(&record_name(top.number), &serde_json::to_string(&record).unwrap_or_default()));
        for (name, value) in variables {
            script.push_str(&self.shell.save(name, &backup(top.number, name)));
            script.push_str(&self.shell.set(name, value));
        }
        script.push_str(&self.shell.source(&scripts(Path::new(&top.prefix), "activate.d", self.shell)));
    }

    /// Says which environment is active.
    fn name(&self, script: &mut String, levels: &[Level]) {
        let Some(top) = levels.last() else { return };
        let mut names = vec![display_name(Path::new(&top.prefix))];
        for pair in levels.windows(2).rev() {
            if !pair[1].stacked {
                break;
            }
            names.push(display_name(Path::new(&pair[0].prefix)));
        }
        script.push_str(&self.shell.prompt(&self.prompt.modifier(&top.prefix, &names), false));
        script.push_str(&self.shell.set("CONDA_PREFIX", &top.prefix));
        script.push_str(&self.shell.set("CONDA_DEFAULT_ENV", &names[0]));
        script.push_str(&self.shell.set("CONDA_SHLVL", &top.number.to_string()));
    }

    /// Takes a level out of effect: its scripts, its variables (older values come back); everything but PATH and names.
    fn leave(&self, script: &mut String, level: &Level) {
        let mut scripts = scripts(Path::new(&level.prefix), "deactivate.d", self.shell);
        scripts.reverse();
        script.push_str(&self.shell.source(&scripts));
        for name in set_by(level, self.shell).iter().rev() {
            script.push_str(&self.shell.restore(name, &backup(level.number, name)));
        }
        if self.env.contains_key(OsStr::new(&record_name(level.number))) {
            script.push_str(&self.shell.unset(&record_name(level.number)));
        }
    }
}

/// Names of the variables that a level set: from its record, else what the environment says now.
fn set_by(level: &Level, shell: Shell) -> Vec<String> {
    match &level.record {
        Some(record) => record.set.clone(),
        None => {
            let variables = Prefix::open(&level.prefix).and_then(|prefix| checked_variables(&prefix, shell)).unwrap_or_default();
            variables.into_iter().map(|(name, _)| name).collect()
        }
    }
}

/// `env` without what active environments have set in it, and without the notes about them. PATH is left to the caller, scripts are not run.
pub(super) fn without_active(env: &Environment) -> Environment {
    let mut result = env.clone();
    let mut in_effect = true;
    for level in levels(env).into_iter().rev() {
        if in_effect {
            for name in set_by(&level, Shell::Posix).iter().rev() {
                match result.remove(OsStr::new(&backup(level.number, name))) {
                    Some(value) => result.insert(OsString::from(name), value),
                    None => result.remove(OsStr::new(name)),
                };
            }
        }
        in_effect &= level.stacked;
    }
    let noted = |name: &OsString| {
        let name = name.to_string_lossy();
        ["CONDA_PREFIX_", "CONDA_STACKED_", "__TARE_ENV_", "__CONDA_SHLVL_"]
            .iter()
            .any(|start| name.strip_prefix(start).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())))
    };
    result.retain(|name, _| !noted(name));
    result
}

/// The prefix as text that can be an entry of PATH.
fn on_path(prefix: &Path) -> Result<String> {
    let fail = |why: &str| {
        Error::failure(format!("the environment `{}` cannot be activated", prefix.display()))
            .because(why)
            .hint("give it another path: tare rename -p OLD NEW")
    };
    let text = prefix.to_str().ok_or_else(|| fail("its path is no UTF-8"))?;
    let separator = if cfg!(windows) { ';' } else { ':' };
    if text.contains(separator) {
        return Err(fail(&format!("a folder with `{separator}` in its path cannot be on PATH")));
    }
    Ok(text.to_owned())
}

/// What activation changes, for `shell-hook --json`: the variables it sets, and those it removes as null.
///
/// # Errors
/// As for [`run_environment`].
pub fn shell_hook_json(prefix: &Prefix, env: &Environment) -> Result<serde_json::Value> {
    let after = run_environment(prefix, env)?;
    let text = |value: &OsString| value.to_string_lossy().into_owned();
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
