//! The variables of an environment (`conda-meta/state`).

use indexmap::IndexMap;

use super::{Options, lock};
use crate::error::{Error, Result};
use crate::install::{self, ExistingEnvironment, metadata};
use crate::prefix::Prefix;
use crate::report::Progress;

/// Accepts what can be the name of a variable.
///
/// # Errors
/// Usage: not letters, digits and `_`, or starting with a digit; `PATH`, which activation itself sets.
pub fn check_variable(name: &str) -> Result<()> {
    let mut bytes = name.bytes();
    let first = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_');
    if !first || !bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
        return Err(Error::usage(format!("{name:?} cannot be the name of a variable"))
            .because("a name is made of letters, digits and `_`, and does not start with a digit"));
    }
    if name.eq_ignore_ascii_case("PATH") {
        return Err(Error::usage("`PATH` cannot be a variable of an environment").because("activation itself sets it"));
    }
    Ok(())
}

/// Changes the variables under the lock. The file appears whole or stays as it was.
async fn edit(
    path: &std::path::Path,
    options: &Options,
    progress: &dyn Progress,
    change: impl FnOnce(&mut IndexMap<String, String>) -> Result<()>,
) -> Result<IndexMap<String, String>> {
    let path = install::resolve_prefix(path)?;
    if !install::needs_recovery(&path) {
        Prefix::open(&path)?;
    }
    let _lock = lock(&path, options, progress).await?;
    let prefix = Prefix::open(&path)?;
    let existing = ExistingEnvironment { prefix: path.clone(), stamp: None, frozen: prefix.is_frozen() };
    install::refuse_frozen(&existing, options.override_frozen)?;
    let mut variables = prefix.variables()?;
    let before = variables.clone();
    change(&mut variables)?;
    if variables == before {
        return Ok(variables);
    }
    let meta = path.join("conda-meta");
    let state = meta.join("state");
    match metadata::state_text(&variables) {
        Some(text) => {
            let write = || -> std::io::Result<()> {
                use std::io::Write;
                let mut file = tempfile::Builder::new().prefix(".state-").tempfile_in(&meta)?;
                file.write_all(text.as_bytes())?;
                file.as_file().sync_all()?;
                file.persist(&state).map_err(|error| error.error)?;
                Ok(())
            };
            write().map_err(|error| Error::io("write", &state, &error))?;
            metadata::set_mode(&state, 0o644)?;
        }
        None => match std::fs::remove_file(&state) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", &state, &error)),
            _ => {}
        },
    }
    Ok(variables)
}

/// Sets variables, in the order given. Returns all of them.
///
/// # Errors
/// A bad name; no environment; a frozen one; the lock is held; the file cannot be written.
pub async fn set_variables(
    path: &std::path::Path,
    new: &[(String, String)],
    options: &Options,
    progress: &dyn Progress,
) -> Result<IndexMap<String, String>> {
    for (name, value) in new {
        check_variable(name)?;
        if value.contains('\0') {
            return Err(Error::usage(format!("the value of `{name}` contains a NUL")));
        }
    }
    edit(path, options, progress, |variables| {
        variables.extend(new.iter().cloned());
        Ok(())
    })
    .await
}

/// Removes variables. Returns those that are left.
///
/// # Errors
/// As for [`set_variables`]; a variable that is not set.
pub async fn unset_variables(
    path: &std::path::Path,
    names: &[String],
    options: &Options,
    progress: &dyn Progress,
) -> Result<IndexMap<String, String>> {
    edit(path, options, progress, |variables| {
        for name in names {
            if variables.shift_remove(name).is_none() {
                return Err(
                    Error::failure(format!("the environment has no variable `{name}`")).hint("those it has: tare env config vars list")
                );
            }
        }
        Ok(())
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_variables() {
        for good in ["A", "_x1", "CUDA_VISIBLE_DEVICES"] {
            check_variable(good).unwrap();
        }
        for bad in ["", "1A", "A-B", "A B", "A=B", "Path", "Ä"] {
            assert_eq!(check_variable(bad).unwrap_err().exit_code(), 2, "{bad}");
        }
    }
}
