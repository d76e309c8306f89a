//! One hermetic environment for black-box tests: own HOME, cache, configuration and working directory, no variable of
//! the developer's machine but PATH, no network beyond loopback.

pub mod channel;
#[path = "../../../src/channel/test_server.rs"]
pub mod server;
#[path = "../../../src/pypi/test_wheel.rs"]
pub mod wheel;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A temporary world for one test. Removed when dropped.
pub struct TestEnv {
    root: tempfile::TempDir,
    vars: Vec<(String, String)>,
}

/// What a command printed and returned.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl TestEnv {
    pub fn new() -> Self {
        let root = tempfile::Builder::new().prefix("tare-test-").tempdir().expect("a temporary folder");
        for folder in ["home", "cache", "work", "envs"] {
            std::fs::create_dir(root.path().join(folder)).expect("a folder");
        }
        TestEnv { root, vars: Vec::new() }
    }

    /// Sets a variable for every command of this environment.
    pub fn var(mut self, name: &str, value: impl Into<String>) -> Self {
        self.vars.push((name.to_owned(), value.into()));
        self
    }

    pub fn path(&self) -> &Path {
        self.root.path()
    }
    pub fn home(&self) -> PathBuf {
        self.path().join("home")
    }
    pub fn cache(&self) -> PathBuf {
        self.path().join("cache")
    }
    /// Working directory of the commands.
    pub fn work(&self) -> PathBuf {
        self.path().join("work")
    }
    /// Where `-n NAME` environments live.
    pub fn envs(&self) -> PathBuf {
        self.path().join("envs")
    }

    /// Writes a file below the working directory.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.work().join(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        std::fs::write(&path, contents).expect("a file");
        path
    }

    /// A command that runs the binary hermetically.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tare"));
        command
            .args(args)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.home())
            .env("TARE_CACHE_DIR", self.cache())
            .env("TARE_ROOT", self.path())
            .env("LC_ALL", "C.UTF-8")
            .env("NO_COLOR", "1")
            // Whatever GPU the machine has, a test sees none unless it says so.
            .env("CONDA_OVERRIDE_CUDA", "")
            // Nothing leaves this machine: every other host is behind a proxy that is not there.
            .env("HTTP_PROXY", "http://127.0.0.1:9")
            .env("HTTPS_PROXY", "http://127.0.0.1:9")
            .env("NO_PROXY", "127.0.0.1,localhost")
            .current_dir(self.work())
            .stdin(Stdio::null());
        if let Some(python) = std::env::var_os("TARE_HOST_PYTHON") {
            command.env("TARE_HOST_PYTHON", python);
        }
        for (name, value) in &self.vars {
            command.env(name, value);
        }
        command
    }

    /// Runs the binary to its end.
    pub fn tare(&self, args: &[&str]) -> Ran {
        self.ran(self.command(args).output().expect("the binary runs"))
    }

    /// Runs the binary with `input` on stdin.
    pub fn tare_with_stdin(&self, args: &[&str], input: &[u8]) -> Ran {
        use std::io::Write;
        let mut child =
            self.command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
        // A command that refuses early closes its end first.
        let _ = child.stdin.take().expect("a pipe").write_all(input);
        self.ran(child.wait_with_output().expect("the binary ends"))
    }

    /// Texts with the temporary paths replaced by `[HOME]`, `[WORK]`, … .
    pub fn ran(&self, output: Output) -> Ran {
        use std::os::unix::process::ExitStatusExt;
        let code = output.status.code().unwrap_or_else(|| 1000 + output.status.signal().unwrap_or(0));
        Ran { code, stdout: self.filter(&output.stdout), stderr: self.filter(&output.stderr) }
    }

    fn filter(&self, bytes: &[u8]) -> String {
        let mut text = String::from_utf8_lossy(bytes).into_owned();
        for (folder, name) in [("home", "[HOME]"), ("cache", "[CACHE]"), ("work", "[WORK]"), ("envs", "[ENVS]")] {
            text = text.replace(&self.path().join(folder).display().to_string(), name);
        }
        text.replace(&self.path().display().to_string(), "[ROOT]")
    }
}

impl Ran {
    /// Fails the test with everything printed unless the exit code is `code`.
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Self {
        assert_eq!(self.code, code, "exit code\n--- stdout\n{}\n--- stderr\n{}", self.stdout, self.stderr);
        self
    }

    /// Exit code 0.
    #[track_caller]
    pub fn ok(self) -> Self {
        self.expect_code(0)
    }

    /// The one JSON document on stdout.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("no JSON: {error}\n{}\n--- stderr\n{}", self.stdout, self.stderr))
    }

    /// Fails the test unless stderr holds `text`.
    #[track_caller]
    pub fn stderr_has(self, text: &str) -> Self {
        assert!(self.stderr.contains(text), "no `{text}` in stderr\n--- stdout\n{}\n--- stderr\n{}", self.stdout, self.stderr);
        self
    }

    /// Fails the test unless stdout holds `text`.
    #[track_caller]
    pub fn stdout_has(self, text: &str) -> Self {
        assert!(self.stdout.contains(text), "no `{text}` in stdout\n--- stdout\n{}\n--- stderr\n{}", self.stdout, self.stderr);
        self
    }
}

/// The folder of real data, or `None` after saying so.
pub fn shared_data() -> Option<PathBuf> {
    let path =
        std::env::var_os("TARE_SHARED_DATA").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data"), PathBuf::from);
    if path.is_dir() {
        Some(path)
    } else {
        eprintln!("skipped: no shared data");
        None
    }
}

/// A folder as sorted `path kind mode sha256-or-target` lines, leaving out paths that end in one of `without`.
pub fn tree(root: &Path, without: &[&str]) -> Vec<String> {
    use sha2::Digest;
    use std::os::unix::fs::PermissionsExt;
    let mut lines = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.strip_prefix(root).expect("below the root").display().to_string();
            if without.iter().any(|end| name.ends_with(end)) {
                continue;
            }
            let about = std::fs::symlink_metadata(&path).expect("metadata");
            if about.is_symlink() {
                lines.push(format!("{name} -> {}", std::fs::read_link(&path).expect("a link").display()));
            } else if about.is_dir() {
                folders.push(path);
            } else {
                let digest = sha2::Sha256::digest(std::fs::read(&path).expect("a file"));
                let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
                lines.push(format!("{name} {:o} {hex}", about.permissions().mode() & 0o7777));
            }
        }
    }
    lines.sort();
    lines
}
