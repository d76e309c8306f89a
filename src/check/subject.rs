//! What is checked: a prefix of any kind, or an interpreter.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::child;
use crate::child::Descendants;
use crate::error::{Error, Result};
use crate::install::Cancel;
use crate::prefix::{Activation, Environment, Prefix, run_environment_with};

/// Who made the environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// tare.
    Tare,
    /// conda, mamba, micromamba or pixi.
    Conda,
    /// `venv`, `virtualenv` or uv.
    Venv,
    /// An interpreter that is no environment: of the system, pyenv, uv.
    Interpreter,
}

impl Kind {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Tare => "environment of tare",
            Kind::Conda => "environment of conda",
            Kind::Venv => "virtual environment",
            Kind::Interpreter => "plain interpreter",
        }
    }
}

/// A path as a word of a command line.
fn word(path: &Path) -> String {
    crate::text::quoted(&path.display().to_string())
}

/// An environment or interpreter to check.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Who made it.
    pub kind: Kind,
    /// Where it is.
    pub prefix: Prefix,
    /// Its interpreter; `None` if it has none.
    pub python: Option<PathBuf>,
}

impl Subject {
    /// A remedy that adds a package, by its name in conda channels and in Python package indexes: what can install into this kind.
    pub fn add(&self, conda: &str, python: &str) -> String {
        match self.kind {
            Kind::Tare | Kind::Conda => format!("to add it: tare install {} {conda}", self.argument()),
            Kind::Venv | Kind::Interpreter => {
                let program = self.program();
                format!("to add it: {program} -m pip install {python}, or uv pip install --python {program} {python}")
            }
        }
    }

    /// The environment at `path`.
    ///
    /// # Errors
    /// There is none.
    pub fn at(path: &Path) -> Result<Self> {
        let prefix = Prefix::open_any(path).map_err(|error| {
            if !path.is_dir() {
                return error;
            }
            // A project with its environment in it, or an installation of Python.
            let inner = [".venv", "venv", "env"].iter().map(|name| path.join(name)).find(|inner| inner.join("pyvenv.cfg").is_file());
            let python = ["bin/python3", "bin/python"].iter().map(|name| path.join(name)).find(|python| python.exists());
            match (inner, python) {
                (Some(inner), _) => error.hint(format!("did you mean the virtual environment in it? tare check -p {}", word(&inner))),
                (None, Some(python)) => error.hint(format!("check the interpreter in it: tare check --python {}", word(&python))),
                (None, None) => error
                    .hint("a virtual environment: tare check -p PROJECT/.venv; any interpreter: tare check --python /usr/bin/python3")
                    .hint("the environments there are: tare env list"),
            }
        })?;
        let kind = if prefix.is_venv() {
            Kind::Venv
        } else if matches!(prefix.stamp(), Ok(None)) {
            Kind::Conda
        } else {
            Kind::Tare
        };
        // `is_file` follows links: the interpreter of a venv whose base is gone is still what the environment would start.
        let python =
            ["bin/python", "bin/python3"].iter().map(|name| prefix.path().join(name)).find(|path| std::fs::symlink_metadata(path).is_ok());
        Ok(Subject { kind, prefix, python })
    }

    /// The environment that an interpreter belongs to. `python` is a path, or a name to look for on PATH. The interpreter is started to ask
    /// where it belongs, for at most `limit`; if it does not start, its path tells.
    ///
    /// # Errors
    /// Usage: there is no such program; it is no Python.
    pub fn of_python(python: &OsStr, env: &Environment, limit: Duration, cancel: &Cancel) -> Result<Self> {
        let path = if Path::new(python).components().count() > 1 {
            std::path::absolute(python).unwrap_or_else(|_| PathBuf::from(python))
        } else {
            let folders = env.get(OsStr::new("PATH")).cloned().unwrap_or_default();
            std::env::split_paths(&folders).map(|folder| folder.join(python)).find(|path| path.is_file()).ok_or_else(|| {
                Error::usage(format!("there is no program `{}` on PATH", python.to_string_lossy()))
                    .hint("give its path: --python /usr/bin/python3")
            })?
        };
        if std::fs::symlink_metadata(&path).is_err() {
            return Err(Error::usage(format!("there is no interpreter `{}`", path.display())));
        }
        let program = "import json, sys; print(json.dumps({'prefix': sys.prefix, 'executable': sys.executable}))";
        let run = child::run(&path, program, &[], env, Path::new("/"), limit, cancel);
        cancel.check()?;
        let answer = run.answer();
        let text = |key: &str| answer.as_ref().and_then(|answer| answer.get(key)?.as_str()).map(PathBuf::from);
        let folder = match text("prefix") {
            Some(prefix) => prefix,
            None => {
                let from_path = path.parent().and_then(Path::parent).filter(|folder| is_any_environment(folder));
                from_path.map(Path::to_owned).ok_or_else(|| {
                    let mut error = Error::usage(format!("`{}` does not answer as a Python interpreter does", path.display()))
                        .because(run.ended_text());
                    if let Some(line) = run.last_errors(1).pop() {
                        error = error.because(line);
                    }
                    error
                })?
            }
        };
        let python = Some(text("executable").filter(|path| !path.as_os_str().is_empty()).unwrap_or(path));
        if folder.join("conda-meta").is_dir() || folder.join("pyvenv.cfg").is_file() {
            return Ok(Subject { python, ..Self::at(&folder)? });
        }
        Ok(Subject { kind: Kind::Interpreter, prefix: Prefix::open_interpreter(&folder)?, python })
    }

    /// The variables with which a command in the environment runs when the caller has `env`. Its activation scripts get `limit`; what they start
    /// in the background ends with them.
    ///
    /// # Errors
    /// Those of the environment cannot be read, or its activation scripts fail.
    pub fn environment(&self, env: &Environment, limit: Duration, cancel: &Cancel) -> Result<Environment> {
        match self.kind {
            Kind::Tare | Kind::Conda => {
                let stop = || cancel.is_cancelled();
                run_environment_with(&self.prefix, env, &Activation { limit, stop: &stop, descendants: Descendants::Kill })
            }
            Kind::Interpreter => Ok(env.clone()),
            Kind::Venv => {
                // What its `activate` does.
                let mut env = env.clone();
                let mut path: OsString = self.prefix.path().join("bin").into();
                if let Some(old) = env.get(OsStr::new("PATH")) {
                    path.push(":");
                    path.push(old);
                }
                env.insert("PATH".into(), path);
                env.insert("VIRTUAL_ENV".into(), self.prefix.path().into());
                env.remove(OsStr::new("PYTHONHOME"));
                Ok(env)
            }
        }
    }

    /// How to name it in a command line of tare, for a shell.
    pub fn argument(&self) -> String {
        match (self.kind, &self.python) {
            (Kind::Interpreter, Some(python)) => format!("--python {}", word(python)),
            _ => format!("-p {}", word(self.prefix.path())),
        }
    }

    /// Its interpreter in a command line, for a shell.
    pub fn program(&self) -> String {
        self.python.as_deref().map_or_else(|| "python".to_owned(), word)
    }

    /// Folders whose files are the environment's own. A virtual environment with the packages of its base has those too.
    pub fn folders(&self) -> Vec<PathBuf> {
        let root = self.prefix.path();
        let mut folders = vec![root.to_owned()];
        folders.extend(root.canonicalize().ok());
        if self.kind == Kind::Venv {
            let text = crate::files::read_text(&root.join("pyvenv.cfg")).unwrap_or_default();
            let value = |key: &str| {
                text.lines()
                    .filter_map(|line| line.split_once('='))
                    .find(|(name, _)| name.trim() == key)
                    .map(|(_, value)| value.trim().to_owned())
            };
            // `home` is the `bin` of the base.
            if let Some(base) = value("home").as_deref().and_then(|home| Path::new(home).parent()) {
                if value("include-system-site-packages").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
                    folders.push(base.to_owned());
                } else {
                    // libpython and what the standard library links to.
                    folders.push(base.join("lib"));
                }
            }
        }
        folders.dedup();
        folders
    }
}

fn is_any_environment(folder: &Path) -> bool {
    folder.join("conda-meta").is_dir() || folder.join("pyvenv.cfg").is_file() || !crate::prefix::site_packages(folder).is_empty()
}
