//! Python programs in a child process that cannot hurt: a time limit, a process group of its own, and bounded output.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::install::Cancel;
use crate::prefix::Environment;

/// How a child ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// With this exit code.
    Exited(i32),
    /// By this signal.
    Signal(i32),
    /// It was killed at the time limit.
    TimedOut,
    /// It was killed because this program is being stopped.
    Stopped,
    /// It could not be started: why.
    NotStarted(String),
}

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

/// Name of a signal and what it means (signal(7), Linux on x86-64 and arm64).
pub fn signal_text(signal: i32) -> String {
    let (name, what) = match signal {
        4 => ("SIGILL", "an instruction that this processor does not have"),
        6 => ("SIGABRT", "the program gave up"),
        7 => ("SIGBUS", "memory or a file behind it is not there"),
        8 => ("SIGFPE", "an arithmetic fault"),
        9 => ("SIGKILL", "killed from outside, often for lack of memory"),
        11 => ("SIGSEGV", "an access to memory that is not its own"),
        15 => ("SIGTERM", "asked to end"),
        31 => ("SIGSYS", "a system call that is not allowed here"),
        other => return format!("signal {other}"),
    };
    format!("{name} ({what})")
}

/// Ends a child with everything it started, also when the work is abandoned half way.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(Some(_))) {
            return;
        }
        #[cfg(unix)]
        if let Some(group) = i32::try_from(self.0.id()).ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = self.0.kill();
        // A process stuck in a driver does not die at once: it is waited for a little only.
        let until = Instant::now() + Duration::from_secs(2);
        while Instant::now() < until && matches!(self.0.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Reads a stream to its end on a thread and keeps `most` bytes of its beginning or its end. Not joined: a grandchild that inherited the
/// pipe may keep it open for ever.
fn reader(stream: Option<impl Read + Send + 'static>, most: usize, end: bool) -> Receiver<String> {
    let (sender, receiver) = channel();
    if let Some(mut stream) = stream {
        std::thread::spawn(move || {
            let mut kept: VecDeque<u8> = VecDeque::new();
            let mut buffer = [0u8; 8192];
            loop {
                match stream.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(read) if end => {
                        kept.extend(&buffer[..read]);
                        let over = kept.len().saturating_sub(most);
                        kept.drain(..over);
                    }
                    Ok(read) => kept.extend(&buffer[..read.min(most.saturating_sub(kept.len()))]),
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            let bytes: Vec<u8> = kept.into();
            let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
        });
    }
    receiver
}

/// Runs `program` (the text of a Python program) with `arguments` under `python`, with exactly the variables `env`, in the folder `cwd`. Its
/// process group is killed at `limit` and when `cancel` is flipped.
pub fn run(python: &Path, program: &str, arguments: &[&OsStr], env: &Environment, cwd: &Path, limit: Duration, cancel: &Cancel) -> Run {
    let mut command = Command::new(python);
    // The program is no file: neither its folder nor a `__pycache__` comes into play. Byte code is not written into the environment.
    command.arg("-B").arg("-c").arg(program).args(arguments).env_clear().envs(env).current_dir(cwd);
    run_command(command, limit, cancel)
}

/// Runs `command` with nothing on stdin. Its process group is killed at `limit` and when `cancel` is flipped.
pub fn run_command(mut command: Command, limit: Duration, cancel: &Cancel) -> Run {
    let started = Instant::now();
    let made = |ended: Ended| Run { ended, stdout: String::new(), stderr: String::new(), stage: None, elapsed: started.elapsed(), limit };
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = match command.spawn() {
        Ok(child) => Guard(child),
        Err(error) => return made(Ended::NotStarted(error.to_string())),
    };
    let stdout = reader(child.0.stdout.take(), MOST, false);
    let stderr = reader(child.0.stderr.take(), MOST_ERRORS, true);
    let mut pause = Duration::from_millis(1);
    let ended = loop {
        match child.0.try_wait() {
            Ok(Some(status)) => break ended(status),
            Ok(None) if cancel.is_cancelled() => break Ended::Stopped,
            Ok(None) if started.elapsed() >= limit => break Ended::TimedOut,
            Ok(None) => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(20));
            }
            Err(error) => break Ended::NotStarted(error.to_string()),
        }
    };
    let elapsed = started.elapsed();
    drop(child);
    let stdout = stdout.recv_timeout(Duration::from_millis(500)).unwrap_or_default();
    let all = stderr.recv_timeout(Duration::from_millis(500)).unwrap_or_default();
    let stage = all.lines().filter_map(|line| line.strip_prefix(STAGE)).next_back().map(str::to_owned);
    let stderr = all.lines().filter(|line| !line.starts_with(STAGE)).collect::<Vec<_>>().join("\n");
    Run { ended, stdout, stderr, stage, elapsed, limit }
}

fn ended(status: std::process::ExitStatus) -> Ended {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return Ended::Signal(signal);
    }
    Ended::Exited(status.code().unwrap_or(-1))
}
