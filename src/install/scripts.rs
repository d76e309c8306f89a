//! Pre- and post-link scripts of packages: programs of the channel that conda runs while it installs.
//!
//! tare runs none unless the package is allowed by name, and then only the post-link script, in the finished environment: in the stage it would write
//! the stage's path into files. Pre-link scripts are deprecated by conda itself and never run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use super::Plan;
use super::fetch::Cached;
use super::link::script_path;
use crate::child::{self, Descendants, Ended, Limits};
use crate::error::{Error, Result};
use crate::report::Progress;

/// Runs the post-link scripts of allowed packages, in package order.
pub(crate) fn run_allowed(
    plan: &Plan,
    prefix: &Path,
    packages: &[Cached],
    scripts: &BTreeMap<usize, Vec<PathBuf>>,
    progress: &dyn Progress,
) -> Result<()> {
    for number in scripts.keys() {
        let record = &packages[*number].record.package_record;
        if !plan.link_scripts.allow.contains(&record.name) {
            continue;
        }
        let name = record.name.as_normalized();
        let script = prefix.join(script_path(record, "post-link", plan.subdir));
        if !script.exists() {
            progress.note(&format!("`{name}` has a pre-link script only, which is never run"));
            continue;
        }
        let mut path = std::ffi::OsString::from(prefix.join("bin"));
        if let Some(old) = std::env::var_os("PATH") {
            path.push(":");
            path.push(old);
        }
        let mut command = Command::new("/bin/sh");
        command
            .arg("-e")
            .arg(&script)
            .current_dir(prefix)
            .env("PREFIX", prefix)
            .env("CONDA_PREFIX", prefix)
            .env("ROOT_PREFIX", prefix)
            .env("PKG_NAME", name)
            .env("PKG_VERSION", record.version.to_string())
            .env("PKG_BUILDNUM", record.build_number.to_string())
            .env("PATH", path);
        // What a script starts in the background stays, and holds nothing up.
        let limits = Limits { deadline: None, descendants: Descendants::Leave, ..Limits::until(Instant::now()) };
        let ran = child::run(command, &limits);
        if let Ended::NotStarted(error) = &ran.ended {
            return Err(Error::failure(format!("cannot run `{}`", script.display())).because(error));
        }
        let (out, err) = (ran.out(), ran.err());
        for line in out.lines().chain(err.lines()) {
            tracing::debug!("post-link of {name}: {line}");
        }
        // The script's messages for the user, as conda does it.
        let messages = prefix.join(".messages.txt");
        if let Ok(text) = std::fs::read_to_string(&messages) {
            progress.note(&format!("`{name}` says: {}", text.trim()));
            let _ = std::fs::remove_file(&messages);
        }
        if let Some(problem) = ran.ended.problem(ran.elapsed) {
            let last = err.trim().lines().last().unwrap_or_default().to_owned();
            let mut error = Error::failure(format!("the post-link script of `{name}` failed")).because(format!("it {problem}"));
            if !last.is_empty() {
                error = error.because(last);
            }
            return Err(error.hint(format!("the environment is complete apart from that: `{}`", prefix.display())));
        }
    }
    Ok(())
}
