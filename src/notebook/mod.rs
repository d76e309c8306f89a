//! Environments as Jupyter kernels, and the Python package `tare_notebook` that goes into them.

mod kernel;
mod package;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

pub(crate) use kernel::inside as kernelspecs_inside;
pub use kernel::{DataDirs, Kernel, KernelState, Place, default_name, list, remove};
pub use package::{PACKAGE, wheel_bytes, wheel_file_name, write_sources};

use crate::change;
use crate::config::Settings;
use crate::error::{Error, Kind, Result};
use crate::install::Plan;
use crate::prefix::{self, Environment, Prefix, RunOptions};
use crate::pypi::{PypiPlan, ReadyWheel, WheelFile};
use crate::report::Progress;

/// What `notebook install` is told.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Name of the kernel; from the environment's otherwise.
    pub name: Option<String>,
    /// What people see in the list of kernels.
    pub display_name: Option<String>,
    /// Where the kernelspec goes.
    pub place: Place,
    /// The program that starts the kernel: this one.
    pub binary: PathBuf,
    /// Only the package, no kernelspec.
    pub no_kernel: bool,
    /// Where Jupyter keeps its data.
    pub dirs: DataDirs,
}

/// What `notebook install` did.
#[derive(Debug, Clone, Serialize)]
pub struct Done {
    /// The environment.
    pub prefix: PathBuf,
    /// The kernel; `None` where only the package was asked for.
    pub kernel: Option<Kernel>,
    /// Version of `tare_notebook` in the environment.
    pub package: String,
    /// The package was not there before, or another version of it.
    pub changed: bool,
}

/// Whether `ipykernel` is in the environment.
pub fn has_ipykernel(prefix: &Path) -> bool {
    prefix::site_packages(prefix).iter().any(|site| prefix.join(site).join("ipykernel_launcher.py").is_file())
}

/// Whether `tare_notebook` is in the environment.
pub fn has_package(prefix: &Path) -> bool {
    prefix::site_packages(prefix).iter().any(|site| prefix.join(site).join("tare_notebook/__init__.py").is_file())
}

/// The package as this program makes it.
fn made_here(settings: &Settings) -> Result<ReadyWheel> {
    let binary = std::env::current_exe().map_err(|error| Error::failure("the path of this program cannot be told").because(error))?;
    package::ready(settings.cache_dir()?, &binary)
}

/// Puts the package into the plan of an environment that takes the place of one that has it: it is tare's own, so no lock and no request names it.
///
/// # Errors
/// The cache cannot be written.
pub(crate) fn carry_over(replaced: &Path, plan: &mut Plan, settings: &Settings, progress: &dyn Progress) -> Result<()> {
    let (noted, _) = crate::pypi::installed::noted(replaced);
    let Some(before) = noted.into_iter().find(|record| record.record.is_tooling() && replaced.join(&record.dist_info).is_dir()) else {
        return Ok(());
    };
    if plan.pypi.iter().flat_map(|pypi| &pypi.wheels).any(|ready| ready.record.name == before.record.name) {
        return Ok(());
    }
    let version = crate::pypi::install::python_version(plan.records.iter().map(|record| &record.package_record));
    match version.filter(|version| before.fits(plan.subdir, version)) {
        Some(python) => {
            let ready = made_here(settings)?;
            plan.pypi.get_or_insert(PypiPlan { wheels: Vec::new(), python, engine: None, clobber: false }).wheels.push(ready);
        }
        None => progress.warn("`tare_notebook` goes: the environment has no Python for it any more", &[]),
    }
    Ok(())
}

/// Makes the package again where it is among `wheels`: by now it may have left the cache.
///
/// # Errors
/// The cache cannot be written.
pub(crate) fn refresh(wheels: &mut [ReadyWheel], settings: &Settings) -> Result<()> {
    for ready in wheels.iter_mut().filter(|ready| ready.record.is_tooling()) {
        *ready = made_here(settings)?;
    }
    Ok(())
}

/// The very same wheel, if this program makes it; else as it was noted, which the cache may have.
pub(crate) fn same_again(ready: ReadyWheel, settings: &Settings) -> ReadyWheel {
    if !ready.record.is_tooling() {
        return ready;
    }
    let hash = |ready: &ReadyWheel| match &ready.wheel {
        WheelFile::Local { sha256, .. } => Some(sha256.clone()),
        WheelFile::Remote => None,
    };
    match made_here(settings) {
        Ok(made) if hash(&made) == hash(&ready) => made,
        _ => ready,
    }
}

fn no_ipykernel(prefix: &Path) -> Error {
    Error::failure(format!("`{}` has no ipykernel", prefix.display()))
        .because("a Jupyter kernel for Python is started by `python -m ipykernel_launcher`")
        .hint(format!("add it: {}", add_ipykernel(prefix)))
}

/// The command that adds ipykernel where the environment gets its packages from.
pub fn add_ipykernel(prefix: &Path) -> String {
    // From the index where the Python packages are from there, or where no channel can have it: `host` has interpreters only.
    let (records, _) = crate::pypi::installed::noted(prefix);
    let python_half = records.iter().any(|record| record.record.name.as_ref() != PACKAGE);
    let facts = Prefix::open(prefix).and_then(|prefix| prefix.metadata()).unwrap_or_default();
    let channels: Vec<&str> = facts["channels"].as_array().into_iter().flatten().filter_map(serde_json::Value::as_str).collect();
    let only_host = !channels.is_empty() && channels.iter().all(|channel| *channel == "host");
    let package = if python_half || only_host { "pypi::ipykernel" } else { "ipykernel" };
    format!("tare install -p {} {package}", crate::text::quoted(&prefix.display().to_string()))
}

/// Puts `tare_notebook` into the environment at `change.which` and, unless told otherwise, makes the environment a kernel.
///
/// # Errors
/// No environment, or one that was moved; no Python or no ipykernel in it; the package cannot be linked; the name of the kernel is another's.
pub async fn install(
    prefix: &Path,
    options: &Options,
    change: &change::Options,
    settings: &Settings,
    progress: Arc<dyn Progress>,
) -> Result<Done> {
    let opened = Prefix::open(prefix)?;
    let prefix = opened.path().to_owned();
    if !prefix.join("bin/python").exists() {
        return Err(Error::failure(format!("`{}` has no Python", prefix.display()))
            .hint(format!("add it: tare install -p {} python", crate::text::quoted(&prefix.display().to_string()))));
    }
    let kernel = if options.no_kernel {
        None
    } else {
        if !has_ipykernel(&prefix) {
            return Err(no_ipykernel(&prefix));
        }
        // Refused before anything is changed.
        Some(kernel::prepare(&prefix, options)?)
    };
    let staged = match &kernel {
        Some(kernel) if !change.dry_run => Some(kernel::stage(kernel, &options.binary)?),
        _ => None,
    };
    let ready = package::ready(settings.cache_dir()?, &options.binary)?;
    let mut change = change.clone();
    change.which = prefix::Which { name: None, prefix: Some(prefix.clone()) };
    let outcome = change::add_wheels(&[ready], &change, settings, progress).await?;
    if let Some(staged) = staged {
        staged.place()?;
    }
    Ok(Done { prefix, kernel, package: env!("CARGO_PKG_VERSION").to_owned(), changed: !outcome.plan.is_empty() })
}

/// Starts the kernel of an environment; only returns if that cannot be. What is wrong is for the log of the Jupyter server.
///
/// # Errors
/// The environment is gone or was moved, or has no ipykernel: kind run, so that the server sees the kernel die instead of waiting for it.
pub fn launch(prefix: &Path, connection_file: &str, env: &Environment) -> Result<u8> {
    let dead = |error: Error| error.with_kind(Kind::Run(125));
    let again = || format!("to make the kernel again: tare notebook install -p '{}'", prefix.display());
    let gone =
        |error: Error| dead(error.context("the environment of this kernel cannot be used")).hint("to see all kernels: tare notebook list");
    if !prefix.exists() {
        return Err(dead(
            Error::failure(format!("the environment of this kernel is gone: `{}` is not there", prefix.display()))
                .because("it was removed, renamed or moved after the kernel was made")
                .hint(again())
                .hint("to see kernels whose environments are gone, and remove them: tare notebook list, tare notebook remove NAME"),
        ));
    }
    let opened = Prefix::open(prefix).map_err(gone)?;
    if let Some(stamp) = opened.stamp().map_err(gone)?
        && stamp.prefix != prefix
        && std::fs::canonicalize(&stamp.prefix).ok() != std::fs::canonicalize(prefix).ok()
    {
        return Err(dead(
            Error::failure(format!(
                "the environment of this kernel was moved: `{}` was made as `{}`",
                prefix.display(),
                stamp.prefix.display()
            ))
            .hint(format!("repair it where it is: tare relocate -p '{}'", prefix.display())),
        ));
    }
    if !has_ipykernel(prefix) {
        return Err(dead(no_ipykernel(prefix)));
    }
    // The server may run in another environment: what it set for its own libraries and Python is not for this one.
    let mut clean = env.clone();
    for name in ["LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "PYTHONEXECUTABLE", "__PYVENV_LAUNCHER__", "VIRTUAL_ENV"] {
        clean.remove(std::ffi::OsStr::new(name));
    }
    let python = prefix.join("bin/python").display().to_string();
    let command = [python, "-m".to_owned(), "ipykernel_launcher".to_owned(), "-f".to_owned(), connection_file.to_owned()];
    prefix::run(&opened, &command.map(std::ffi::OsString::from), &RunOptions::default(), &clean)
}
