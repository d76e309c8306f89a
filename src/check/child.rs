//! Python programs in a child process: see [`crate::child`]. They say on stderr which stage they have begun, and their answer is a line of JSON.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::child::{Descendants, Keep, Limits};
pub use crate::child::{Ended, signal_text};
use crate::install::Cancel;
use crate::prefix::Environment;

/// What a child did.
#[derive(Debug, Clone)]
pub struct Run {
    /// How it ended.
    pub ended: Ended,
    /// What it wrote to stdout, at most [`MOST`] bytes of it.
    pub stdout: String,
    /// The end of what it wrote to stderr, at most [`MOST_ERRORS`] bytes, without the marks of its progress.
    pub stderr: String,
    /// The last stage it said to have begun.
    pub stage: Option<String>,
    /// How long it ran.
    pub elapsed: Duration,
    /// The limit it ran under.
    pub limit: Duration,
}

const MOST: usize = 4 << 20;
const MOST_ERRORS: usize = 64 << 10;
const STAGE: &str = "tare-stage ";

impl Run {
    /// The line of JSON that the program printed at its end; libraries may have printed other lines before.
    pub fn answer(&self) -> Option<serde_json::Value> {
        let line = self.stdout.lines().rev().find(|line| line.starts_with('{'))?;
        serde_json::from_str::<serde_json::Value>(line).ok().filter(serde_json::Value::is_object)
    }

    /// The last lines of stderr that are not empty, without control characters.
    pub fn last_errors(&self, count: usize) -> Vec<String> {
        let lines: Vec<&str> = self.stderr.lines().filter(|line| !line.trim().is_empty()).collect();
        lines[lines.len().saturating_sub(count)..]
            .iter()
            .map(|line| line.chars().filter(|c| !c.is_control()).take(300).collect::<String>())
            .collect()
    }

    /// In words, for a program that gave no answer: "was ended by SIGSEGV (…) during `import`".
    pub fn ended_text(&self) -> String {
        let during = self.stage.as_deref().map(|stage| format!(" during `{stage}`")).unwrap_or_default();
        match &self.ended {
            Ended::Exited(0) => "ended without an answer".to_owned(),
            Ended::Exited(code) => format!("ended with exit code {code}{during}"),
            Ended::Signal(signal) => format!("crashed{during}: {}", signal_text(*signal)),
            Ended::TimedOut => format!("did not end within {} s and was killed{during}", self.limit.as_secs_f32().round()),
            Ended::Stopped => "was stopped".to_owned(),
            Ended::NotStarted(why) => format!("could not be started: {why}"),
        }
    }
}

/// Runs `program` (the text of a Python program) with `arguments` under `python`, with exactly the variables `env`, in the folder `cwd`. Its
/// process group is killed at `limit` and when `cancel` is flipped.
pub fn run(python: &Path, program: &str, arguments: &[&OsStr], env: &Environment, cwd: &Path, limit: Duration, cancel: &Cancel) -> Run {
    let mut command = Command::new(python);
    // The program is no file: neither its folder nor a `__pycache__` comes into play. Byte code is not written into the environment.
    command.arg("-B").arg("-c").arg(program).args(arguments).env_clear().envs(env).current_dir(cwd);
    run_command(command, limit, cancel)
}

/// Runs `command` with nothing on stdin. It and what it has started is killed at `limit` and when `cancel` is flipped.
pub fn run_command(command: Command, limit: Duration, cancel: &Cancel) -> Run {
    let limits = Limits {
        deadline: Some(Instant::now() + limit),
        stop: &|| cancel.is_cancelled(),
        stdout: Keep::First(MOST),
        stderr: Keep::Last(MOST_ERRORS),
        descendants: Descendants::Kill,
    };
    let ran = crate::child::run(command, &limits);
    let all = ran.err();
    let stage = all.lines().filter_map(|line| line.strip_prefix(STAGE)).next_back().map(str::to_owned);
    let stderr = all.lines().filter(|line| !line.starts_with(STAGE)).collect::<Vec<_>>().join("\n");
    Run { stdout: ran.out(), stderr, stage, elapsed: ran.elapsed, limit, ended: ran.ended }
}
