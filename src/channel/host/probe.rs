//! Asks an interpreter what it is, by running it once.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::child::{self, Ended, Keep, Limits};

/// How long an interpreter may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How much of the answer and of the error output is read, in bytes.
const LIMIT: usize = 64 * 1024;

/// Runs on Python 2.7 too, so that an old interpreter is refused for its age and not with a traceback.
const QUESTION: &str = r#"
import json, sys, sysconfig
prefix = getattr(sys, "base_prefix", sys.prefix)
exec_prefix = getattr(sys, "base_exec_prefix", sys.exec_prefix)
places = {"base": prefix, "installed_base": prefix, "platbase": exec_prefix, "installed_platbase": exec_prefix}
schemes = sysconfig.get_scheme_names()
paths = {}
for name in ("stdlib", "platstdlib", "purelib", "include", "platinclude"):
    paths[name] = sysconfig.get_path(name, "posix_prefix", places)
built = ""
try:
    name = sysconfig._get_sysconfigdata_name()
    built = str(__import__(name, fromlist=["build_time_vars"]).build_time_vars.get("prefix", ""))
except Exception:
    pass
implementation = getattr(sys, "implementation", None)
level = {"alpha": "a", "beta": "b", "candidate": "rc"}.get(sys.version_info[3])
version = "%d.%d.%d" % tuple(sys.version_info[:3])
if level:
    version += "%s%d" % (level, sys.version_info[4])
answer = {
    "implementation": implementation.name if implementation else "cpython",
    "version": version,
    "major": sys.version_info[0],
    "minor": sys.version_info[1],
    "base_prefix": prefix,
    "base_exec_prefix": exec_prefix,
    "built_prefix": built,
    "abiflags": getattr(sys, "abiflags", ""),
    "wheels": str(sysconfig.get_config_var("WHEEL_PKG_DIR") or ""),
    "patched": "deb_system" in schemes or "posix_local" in schemes,
    "paths": paths,
}
sys.stdout.write(json.dumps(answer))
"#;

/// What an interpreter says of itself.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub(super) struct Answer {
    /// `cpython`, `pypy`, …
    pub implementation: String,
    /// `3.11.7`, `3.14.0rc1`.
    pub version: String,
    pub major: u32,
    pub minor: u32,
    /// The prefix of the installation below any virtual environment.
    pub base_prefix: PathBuf,
    pub base_exec_prefix: PathBuf,
    /// The prefix that was given to `configure`; empty if unknown.
    pub built_prefix: String,
    /// `t` for a free-threaded build, `d` for a debug build; empty for the usual one.
    pub abiflags: String,
    /// Where a distribution keeps the wheels of `ensurepip`; empty for the bundled ones.
    pub wheels: String,
    /// Whether sysconfig carries the install schemes that Debian or Fedora adds.
    pub patched: bool,
    /// Absolute paths by sysconfig's names: stdlib, platstdlib, purelib, include, platinclude.
    pub paths: BTreeMap<String, PathBuf>,
}

/// Runs `python` and reads its answer.
///
/// # Errors
/// A text: it cannot be started, does not answer within 10 s, fails, or answers nonsense.
pub(super) fn ask(python: &Path) -> Result<Answer, String> {
    let output = run(python, &["-E", "-s", "-S", "-B", "-c", QUESTION], PATIENCE)?;
    serde_json::from_slice(&output).map_err(|error| format!("its answer cannot be read: {error}"))
}

/// The real executable behind a script that starts Python (a pyenv shim, a wrapper).
///
/// # Errors
/// As [`ask`].
pub(super) fn executable_behind(script: &Path) -> Result<PathBuf, String> {
    let question = "import sys; sys.stdout.write(sys.executable)";
    let output = run(script, &["-E", "-s", "-S", "-B", "-c", question], PATIENCE)?;
    let text = String::from_utf8(output).map_err(|_| "its answer is no text".to_owned())?;
    if text.starts_with('/') { Ok(PathBuf::from(text)) } else { Err("it does not know its own path".into()) }
}

/// Runs a program; what it leaves running ends with it.
fn run(program: &Path, arguments: &[&str], patience: Duration) -> Result<Vec<u8>, String> {
    let mut command = Command::new(program);
    command.args(arguments).current_dir("/");
    for (name, _) in std::env::vars_os() {
        let name_text = name.to_string_lossy();
        if name_text.starts_with("PYTHON") || name_text == "__PYVENV_LAUNCHER__" {
            command.env_remove(&name);
        }
    }
    if let Some(folders) = library_path(program) {
        command.env("LD_LIBRARY_PATH", folders);
    }
    let limits = Limits { stdout: Keep::First(LIMIT), stderr: Keep::Last(64 << 10), ..Limits::until(Instant::now() + patience) };
    let ran = child::run(command, &limits);
    match &ran.ended {
        Ended::Exited(0) => Ok(ran.stdout),
        Ended::TimedOut => Err(format!("it does not answer within {} s", patience.as_secs())),
        Ended::NotStarted(error) => Err(format!("it cannot be started: {error}")),
        ended => {
            let text = ran.err();
            let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no message");
            Err(format!("it does not run ({}): {last}", ended.problem(patience).unwrap_or_default()))
        }
    }
}

/// The libraries of the installation itself come first, as they do in the package. An interpreter without a search path would
/// otherwise load the libpython of another installation and answer for that one.
fn library_path(program: &Path) -> Option<OsString> {
    let prefix = program.parent()?.parent()?;
    let own = ["lib", "lib64"].into_iter().map(|name| prefix.join(name)).filter(|folder| folder.is_dir());
    let given = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    // An empty entry would mean the current folder.
    std::env::join_paths(own.chain(std::env::split_paths(&given).filter(|folder| folder.is_absolute()))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn script(dir: &Path, text: &str) -> PathBuf {
        let path = dir.join("python3");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn what_does_not_run_or_answers_nonsense_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let failing = script(dir.path(), "#!/bin/sh\necho 'libpython3.11.so.1.0: cannot open' >&2\nexit 127\n");
        let error = ask(&failing).unwrap_err();
        assert_eq!(error, "it does not run (ended with exit code 127): libpython3.11.so.1.0: cannot open");
        let nonsense = script(dir.path(), "#!/bin/sh\necho hello\n");
        assert!(ask(&nonsense).unwrap_err().starts_with("its answer cannot be read"));
        let error = ask(&dir.path().join("none")).unwrap_err();
        assert!(error.starts_with("it cannot be started"), "{error}");
    }

    #[test]
    fn what_hangs_is_stopped_with_what_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let hanging = script(dir.path(), "#!/bin/sh\nsleep 3 &\nwait\n");
        let started = Instant::now();
        let error = run(&hanging, &[], Duration::from_millis(300)).unwrap_err();
        assert_eq!(error, "it does not answer within 0 s");
        assert!(started.elapsed() < Duration::from_secs(2));
    }
}
