use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Error;

type Lookup = dyn Fn(&str) -> Option<String> + Send + Sync;

/// A look-up of environment variables: the process's, or a made-up set in tests. Cheap to clone.
#[derive(Clone)]
pub struct Environment(Arc<Lookup>);

impl fmt::Debug for Environment {
    /// Without the values: some are secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Environment(..)")
    }
}

impl Environment {
    /// The environment of this process. Values that are not UTF-8 count as unset.
    pub fn process() -> Self {
        Environment(Arc::new(|name| std::env::var(name).ok()))
    }

    /// No variable is set.
    pub fn empty() -> Self {
        Environment(Arc::new(|_| None))
    }

    /// Exactly these variables are set.
    pub fn from_map(variables: HashMap<String, String>) -> Self {
        Environment(Arc::new(move |name| variables.get(name).cloned()))
    }

    /// Exactly these variables are set.
    pub fn from_pairs<const N: usize>(variables: [(&str, &str); N]) -> Self {
        Self::from_map(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    /// The value of a variable; an empty one is `Some("")`.
    pub fn get(&self, name: &str) -> Option<String> {
        (self.0)(name)
    }

    /// The first executable file of that name on PATH.
    pub fn find_program(&self, name: &str) -> Option<PathBuf> {
        let path = self.get("PATH")?;
        std::env::split_paths(&path).filter(|folder| folder.is_absolute()).map(|folder| folder.join(name)).find(|file| is_executable(file))
    }
}

#[cfg(unix)]
fn is_executable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    file.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

#[cfg(not(unix))]
fn is_executable(file: &Path) -> bool {
    file.is_file()
}

/// Replaces `$NAME` and `${NAME}`; a variable that is not set stays as it is written (as Python's `expandvars`).
pub fn expand_variables(text: &str, env: &Environment) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        let (name, len) = match after.strip_prefix('{') {
            Some(inner) => match inner.find('}') {
                Some(end) => (&inner[..end], end + 2),
                None => ("", 0),
            },
            None => {
                let end = after.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(after.len());
                (&after[..end], end)
            }
        };
        match (!name.is_empty()).then(|| env.get(name)).flatten() {
            Some(value) => out.push_str(&value),
            None => out.push_str(&rest[at..=at + len]),
        }
        rest = &after[len..];
    }
    out.push_str(rest);
    out
}

/// The user's home folder: HOME, and where it is not set, what the system's list of users says. `None` also for a HOME that is empty or no absolute path:
/// nothing may be written to wherever such a value happens to lead.
pub fn home_dir() -> Option<PathBuf> {
    let set = std::env::var_os("HOME").filter(|_| cfg!(unix)).map(PathBuf::from);
    set.or_else(dirs::home_dir).filter(|home| home.is_absolute())
}

/// Why there is no home folder, with what to do; `what`: what was wanted there.
pub fn no_home(env: &Environment, what: &str) -> Error {
    let why = match env.get("HOME") {
        Some(text) if text.is_empty() => "HOME is empty".to_owned(),
        Some(text) if Path::new(&text).is_relative() => format!("HOME is `{text}`, which is no absolute path"),
        _ => "HOME is not set, and the system's list of users names none".to_owned(),
    };
    Error::usage(format!("there is no home folder for {what}")).because(why).hint("set HOME to the absolute path of your home folder")
}

/// Replaces a leading `~` or `~/`.
pub fn expand_home(text: &str, home: Option<&Path>) -> PathBuf {
    match (home, text.strip_prefix('~')) {
        (Some(home), Some("")) => home.to_path_buf(),
        (Some(home), Some(rest)) if rest.starts_with('/') => home.join(rest.trim_start_matches('/')),
        _ => PathBuf::from(text),
    }
}
