//! Running uv, pip and builds: a scrubbed environment, a process group of their own, a limit of time, and errors a person can read.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::channel::redact_text;
use crate::child::{self, Descendants, Ended, Keep, Limits};
use crate::error::{Error, Kind, Result};
use crate::install::Cancel;
use crate::prefix::Environment;

/// Variables that every child gets. Nothing that changes what Python imports or which packages count, but all that the network and compilers need.
const KEPT: &[&str] = &[
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "TZ",
    "TERM",
    "NETRC",
    "SSH_AUTH_SOCK",
    "DBUS_SESSION_BUS_ADDRESS",
    "SYSTEMROOT",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "SSL_CLIENT_CERT",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    // pip: where to look and how to get there.
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_NO_INDEX",
    "PIP_TRUSTED_HOST",
    "PIP_CERT",
    "PIP_CLIENT_CERT",
    "PIP_PROXY",
    "PIP_TIMEOUT",
    "PIP_DEFAULT_TIMEOUT",
    "PIP_RETRIES",
    "PIP_CONFIG_FILE",
    "PIP_CACHE_DIR",
    "PIP_NO_CACHE_DIR",
    "PIP_KEYRING_PROVIDER",
    // uv: the same.
    "UV_INDEX_URL",
    "UV_DEFAULT_INDEX",
    "UV_EXTRA_INDEX_URL",
    "UV_INDEX",
    "UV_FIND_LINKS",
    "UV_NO_INDEX",
    "UV_INSECURE_HOST",
    "UV_KEYRING_PROVIDER",
    "UV_NATIVE_TLS",
    "UV_SYSTEM_CERTS",
    "UV_HTTP_TIMEOUT",
    "UV_HTTP_RETRIES",
    "UV_CONFIG_FILE",
    "UV_NO_CONFIG",
    "UV_CACHE_DIR",
    // Compilers.
    "CC",
    "CXX",
    "FC",
    "AR",
    "LD",
    "NM",
    "CFLAGS",
    "CXXFLAGS",
    "CPPFLAGS",
    "FFLAGS",
    "LDFLAGS",
    "MAKEFLAGS",
    "MAX_JOBS",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "CPATH",
    "PKG_CONFIG_PATH",
    "CARGO_HOME",
    "RUSTUP_HOME",
    "RUSTUP_TOOLCHAIN",
    "CUDA_HOME",
    "CUDA_PATH",
    "TORCH_CUDA_ARCH_LIST",
];

/// Beginnings of names that are kept too.
const KEPT_PREFIXES: &[&str] = &["LC_", "XDG_", "GIT_", "CMAKE_", "SETUPTOOLS_SCM_"];

/// How long a resolver may take.
pub const RESOLVE_LIMIT: Duration = Duration::from_secs(30 * 60);
/// How long one build may take.
pub const BUILD_LIMIT: Duration = Duration::from_secs(2 * 60 * 60);

/// The variables of a child, from those of this process: see [`KEPT`]. `UV_INDEX_NAME_USERNAME` and `…_PASSWORD` are kept as well.
pub fn scrubbed(all: impl Iterator<Item = (OsString, OsString)>, tmp: &Path) -> Environment {
    let keep = |name: &OsStr| {
        let Some(name) = name.to_str() else { return false };
        KEPT.contains(&name)
            || KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            || (name.starts_with("UV_INDEX_") && (name.ends_with("_USERNAME") || name.ends_with("_PASSWORD")))
    };
    let mut env: Environment = all.filter(|(name, _)| keep(name)).collect();
    let mut set = |name: &str, value: OsString| {
        env.insert(name.into(), value);
    };
    set("TMPDIR", tmp.into());
    set("PYTHONDONTWRITEBYTECODE", "1".into());
    set("PYTHONNOUSERSITE", "1".into());
    set("PYTHONUNBUFFERED", "1".into());
    set("PYTHONIOENCODING", "utf-8".into());
    set("PIP_DISABLE_PIP_VERSION_CHECK", "1".into());
    set("PIP_NO_INPUT", "1".into());
    set("PIP_NO_COLOR", "1".into());
    set("PIP_PROGRESS_BAR", "off".into());
    set("UV_NO_PROGRESS", "1".into());
    set("UV_PYTHON_DOWNLOADS", "never".into());
    set("NO_COLOR", "1".into());
    // Zip archives cannot hold anything older; the same source gives the same wheel.
    set("SOURCE_DATE_EPOCH", "315532800".into());
    env
}

/// A program to run.
#[derive(Debug, Clone)]
pub struct Job {
    /// The program.
    pub program: PathBuf,
    /// Its arguments. No credentials: others can see them.
    pub args: Vec<OsString>,
    /// All its variables.
    pub env: Environment,
    /// Where it runs.
    pub cwd: PathBuf,
    /// How long it may take.
    pub limit: Duration,
}

/// What a program did.
#[derive(Debug, Clone)]
pub struct Ran {
    /// Exit code 0.
    pub success: bool,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Most bytes that are kept of each stream.
const MAX_OUTPUT: usize = 16 << 20;

/// Stops the program when its future is dropped, and waits until it has ended: what it works on is removed next.
struct Abandoned {
    cancel: Cancel,
    ended: Receiver<()>,
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        self.cancel.cancel();
        // The sender goes with the thread.
        let _ = self.ended.recv_timeout(Duration::from_secs(5));
    }
}

/// Runs a program to its end. It and what it has started is killed when the future is dropped, when `cancel` is flipped and when the time is up.
///
/// # Errors
/// It cannot be started; cancelled (kind interrupted); took too long. An exit code other than 0 is no error here.
pub async fn run(job: &Job, cancel: &Cancel) -> Result<Ran> {
    cancel.check()?;
    let shown = job.program.display();
    let mut command = Command::new(&job.program);
    command.args(&job.args).env_clear().envs(&job.env).current_dir(&job.cwd);
    let (own, theirs, deadline) = (Cancel::new(), cancel.clone(), Instant::now() + job.limit);
    let (sender, ended) = channel();
    let abandoned = Abandoned { cancel: own.clone(), ended };
    let thread = tokio::task::spawn_blocking(move || {
        let limits = Limits {
            deadline: Some(deadline),
            stop: &|| own.is_cancelled() || theirs.is_cancelled(),
            stdout: Keep::First(MAX_OUTPUT),
            stderr: Keep::First(MAX_OUTPUT),
            descendants: Descendants::Kill,
        };
        let ran = child::run(command, &limits);
        drop(sender);
        ran
    });
    let ran = thread.await.map_err(|error| Error::failure(format!("cannot wait for `{shown}`")).because(error))?;
    drop(abandoned);
    match &ran.ended {
        Ended::NotStarted(error) => return Err(Error::failure(format!("cannot run `{shown}`")).because(error)),
        Ended::Stopped => return Err(crate::install::cancel::interrupted()),
        Ended::TimedOut => {
            return Err(Error::failure(format!("`{shown}` was stopped after {} minutes", job.limit.as_secs() / 60))
                .because("it did not come to an end"));
        }
        Ended::Exited(_) | Ended::Signal(_) => {}
    }
    let mut stderr = ran.err();
    if let Ended::Signal(signal) = ran.ended {
        stderr.push_str(&format!("\n`{shown}` was ended by {}", child::signal_text(signal)));
    }
    let ran = Ran { success: ran.ended.well(), stdout: ran.out(), stderr };
    tracing::debug!("{shown}: {}\n{}\n{}", ran.success, redact_text(&ran.stdout), redact_text(&ran.stderr));
    Ok(ran)
}

/// Most lines of a program's messages in an error.
const MAX_LINES: usize = 40;

/// What a program printed, for an error: credentials and `hide` (paths that mean nothing to the user) masked, progress left out, cut in the middle.
pub fn readable(text: &str, hide: &[(&Path, &str)]) -> String {
    let mut text = redact_text(text);
    for (path, name) in hide {
        text = text.replace(&path.display().to_string(), name);
    }
    let noise = |line: &str| {
        let line = line.trim();
        line.is_empty()
            || ["Collecting ", "Downloading ", "Using cached ", "Obtaining ", "Processing ", "Looking in ", "Requirement already"]
                .iter()
                .any(|start| line.starts_with(start))
            || line.ends_with(": started")
            || line.ends_with("finished with status 'done'")
            || (line.starts_with("WARNING: ") && line.contains("Retrying (Retry("))
            || ["[notice]", "INFO: pip is looking at", "To fix this you could try", "1. loosen the range", "2. remove package versions"]
                .iter()
                .any(|start| line.starts_with(start))
            || line.contains("for help visit")
            || ["See above for output", "hint: See above", "note: This is an issue with the package", "note: This error originates from"]
                .iter()
                .any(|part| line.contains(part))
            || line.ends_with("finished with status 'error'")
    };
    let mut lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !noise(line)).collect();
    lines.dedup();
    if lines.len() > MAX_LINES {
        let tail = lines.split_off(lines.len() - (MAX_LINES - 10));
        lines.truncate(9);
        lines.push("…");
        lines.extend(tail);
    }
    lines.join("\n")
}

/// Where a failure of a resolver or a build comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Nothing fits.
    Unsatisfiable,
    /// An index or server cannot be reached, or refuses.
    Network,
    /// What was downloaded has another hash.
    Hash,
    /// A source could not be built.
    Build,
    /// Anything else.
    Other,
}

impl Cause {
    /// From what uv or pip printed.
    pub fn of(text: &str) -> Self {
        let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
        if has(&["DO NOT MATCH THE HASHES", "Hash mismatch", "hash mismatch", "Hashes are required", "hashes are required"]) {
            return Cause::Hash;
        }
        if has(&[
            "Max retries exceeded",
            "Retrying (Retry(",
            "NewConnectionError",
            "Failed to establish a new connection",
            "Temporary failure in name resolution",
            "Could not fetch URL",
            "could not be queried due to",
            "returned a 403",
            "401 Unauthorized",
            "HTTP error 4",
            "HTTP error 5",
            "ReadTimeoutError",
            "ConnectTimeoutError",
            "SSLError",
            "Credentials not correct",
            "error sending request",
            "Failed to fetch",
            "Network connectivity is disabled",
            "network was disabled",
            "client error (Connect)",
            "operation timed out",
            "Could not connect",
            "ConnectionResetError",
            "could not resolve host",
            "Could not resolve host",
        ]) {
            return Cause::Network;
        }
        if has(&["ResolutionImpossible", "No matching distribution found", "No solution found", "conflicting dependencies"]) {
            return Cause::Unsatisfiable;
        }
        if has(&[
            "metadata-generation-failed",
            "subprocess-exited-with-error",
            "Failed building wheel",
            "Failed to build",
            "Failed to download and build",
            "build backend",
            "did not run successfully",
            "BackendUnavailable",
        ]) {
            return Cause::Build;
        }
        if has(&["requires a different Python", "is not a supported wheel on this platform", "Could not find a version", "incompatible"]) {
            return Cause::Unsatisfiable;
        }
        Cause::Other
    }

    /// The kind of error it is.
    pub fn kind(self) -> Kind {
        match self {
            Cause::Unsatisfiable => Kind::Unsatisfiable,
            Cause::Network => Kind::Network,
            Cause::Hash => Kind::Verification,
            Cause::Build | Cause::Other => Kind::Failure,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(script: &str, limit: Duration) -> Job {
        let env = scrubbed(std::env::vars_os(), Path::new("/tmp"));
        Job { program: "/bin/sh".into(), args: vec!["-c".into(), script.into()], env, cwd: "/".into(), limit }
    }

    #[tokio::test]
    async fn output_is_read_and_a_failure_is_no_error() {
        let ran = run(&job("echo out; echo err >&2; exit 3", RESOLVE_LIMIT), &Cancel::new()).await.unwrap();
        assert_eq!((ran.success, ran.stdout.as_str(), ran.stderr.as_str()), (false, "out\n", "err\n"));
    }

    #[tokio::test]
    async fn what_a_program_leaves_running_does_not_hold_us_up() {
        let begin = Instant::now();
        let ran = run(&job("echo out; sleep 60 & exit 0", RESOLVE_LIMIT), &Cancel::new()).await.unwrap();
        assert!(ran.success && ran.stdout == "out\n" && begin.elapsed() < Duration::from_secs(10), "{ran:?}");
    }

    #[tokio::test]
    async fn a_future_that_is_dropped_takes_its_program_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("pid");
        let job = job(&format!("echo $$ > {}; sleep 60", mark.display()), RESOLVE_LIMIT);
        let cancel = Cancel::new();
        let ran = tokio::time::timeout(Duration::from_millis(500), run(&job, &cancel)).await;
        assert!(ran.is_err() && !cancel.is_cancelled());
        let pid = std::fs::read_to_string(&mark).unwrap();
        assert!(!Path::new("/proc").join(pid.trim()).exists(), "{pid}");
    }

    #[tokio::test]
    async fn grandchildren_end_with_the_time_and_with_the_switch() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("alive");
        let script = format!("(sleep 1; touch {}) & wait", mark.display());
        let error = run(&job(&script, Duration::from_millis(200)), &Cancel::new()).await.unwrap_err();
        assert!(error.to_string().contains("was stopped after"), "{error}");
        let cancel = Cancel::new();
        let switch = cancel.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            switch.cancel();
        });
        assert_eq!(run(&job(&script, RESOLVE_LIMIT), &cancel).await.unwrap_err().exit_code(), 130);
        tokio::time::sleep(Duration::from_millis(1300)).await;
        assert!(!mark.exists());
    }

    #[test]
    fn variables_that_change_the_outcome_do_not_reach_the_child() {
        let all = [
            ("PYTHONPATH", "/x"),
            ("PIP_PRE", "1"),
            ("PIP_INDEX_URL", "https://pypi.example/simple"),
            ("PIP_USER", "1"),
            ("UV_RESOLUTION", "lowest"),
            ("UV_INDEX_PRIVATE_PASSWORD", "s"),
            ("VIRTUAL_ENV", "/v"),
            ("CONDA_PREFIX", "/c"),
            ("https_proxy", "http://p"),
        ];
        let env = scrubbed(all.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))), Path::new("/t"));
        let has = |name: &str| env.contains_key(OsStr::new(name));
        assert!(has("PIP_INDEX_URL") && has("UV_INDEX_PRIVATE_PASSWORD") && has("https_proxy"));
        for gone in ["PYTHONPATH", "PIP_PRE", "PIP_USER", "UV_RESOLUTION", "VIRTUAL_ENV", "CONDA_PREFIX"] {
            assert!(!has(gone), "{gone}");
        }
    }

    #[test]
    fn messages_are_shortened_and_hold_no_secrets() {
        let text = format!(
            "Looking in indexes: x\nWARNING: Retrying (Retry(total=4)) after\nERROR: cannot get https://me:hunter2@pypi.example/simple in /w/tmp\n{}",
            (0..100).map(|n| format!("line {n}\n")).collect::<String>()
        );
        let shown = readable(&text, &[(Path::new("/w"), "[work]")]);
        assert!(shown.contains("[work]/tmp") && !shown.contains("hunter2") && !shown.contains("Retrying"), "{shown}");
        assert!(shown.lines().count() <= MAX_LINES && shown.ends_with("line 99"), "{shown}");
    }
}
