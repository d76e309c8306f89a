//! Work with a driver library in a process of its own: what hangs there is killed, what crashes there is only told of.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How a child ended.
#[derive(Debug)]
pub enum Ended {
    /// It could not be started.
    NotStarted(std::io::Error),
    /// It was killed at the limit, with all it had started.
    TimedOut,
    /// It ended by itself.
    Done {
        status: ExitStatus,
        /// What it wrote to stderr, at most 1 MiB.
        stderr: String,
    },
}

impl Ended {
    /// Why there is no result: `crashed (signal: 11 (SIGSEGV))`. `None` after a good end.
    pub fn problem(&self, limit: Duration) -> Option<String> {
        match self {
            Ended::NotStarted(error) => Some(format!("could not be started: {error}")),
            Ended::TimedOut => Some(format!("did not answer within {:.1} s", limit.as_secs_f32())),
            Ended::Done { status, .. } if status.success() => None,
            Ended::Done { status, .. } => Some(format!("crashed ({status})")),
        }
    }
}

/// Longest line that is passed on; what comes after it is cut off.
const LONGEST_LINE: u64 = 64 << 20;

/// Runs `command` with nothing on stdin until `deadline`. Each line of its stdout goes to `line` as it comes, without the
/// line feed. The child gets a process group of its own, so that everything it started dies with it at the deadline.
pub fn run(mut command: Command, deadline: Instant, line: &mut dyn FnMut(&str)) -> Ended {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Ended::NotStarted(error),
    };
    // The readers are not joined: a grandchild that inherited a pipe may keep it open for ever.
    let (sender, lines) = channel();
    if let Some(stdout) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            loop {
                let mut bytes = Vec::new();
                match stdout.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut bytes) {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
                let text = String::from_utf8_lossy(&bytes);
                if sender.send(text.trim_end_matches(['\n', '\r']).to_owned()).is_err() {
                    return;
                }
            }
        });
    }
    let (sender, stderr) = channel();
    if let Some(stream) = child.stderr.take() {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let mut stream = stream.take(1 << 20);
            let _ = stream.read_to_end(&mut bytes);
            // What comes after is thrown away, but read: a child must not wait for a full pipe.
            let _ = std::io::copy(&mut stream.into_inner(), &mut std::io::sink());
            let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
        });
    }
    let mut pause = Duration::from_millis(1);
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if Instant::now() < deadline => {
                match lines.recv_timeout(pause.min(deadline.saturating_duration_since(Instant::now()))) {
                    Ok(text) => line(&text),
                    Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(Duration::from_millis(20)),
                    // Its stdout is closed; it still has to end.
                    Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
            Ok(None) | Err(_) => break None,
        }
    };
    let Some(status) = status else {
        #[cfg(unix)]
        if let Some(group) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = child.kill();
        // A process stuck in the driver does not die at once: it is not waited for here.
        std::thread::spawn(move || child.wait());
        while let Ok(text) = lines.try_recv() {
            line(&text);
        }
        return Ended::TimedOut;
    };
    let rest =
        Instant::now() + deadline.saturating_duration_since(Instant::now()).clamp(Duration::from_millis(100), Duration::from_secs(2));
    while let Ok(text) = lines.recv_timeout(rest.saturating_duration_since(Instant::now())) {
        line(&text);
    }
    Ended::Done { status, stderr: stderr.recv_timeout(Duration::from_millis(100)).unwrap_or_default() }
}

/// For the child, at its start: it dies when its parent does. It is in a process group of its own, where Ctrl-C of the
/// terminal does not reach it.
pub fn die_with_parent() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_script(script: &str, limit: Duration) -> (Vec<String>, Ended) {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        let mut lines = Vec::new();
        let ended = run(command, Instant::now() + limit, &mut |line| lines.push(line.to_owned()));
        (lines, ended)
    }

    #[test]
    fn lines_come_as_they_are_written_and_the_end_is_told() {
        let (lines, ended) = run_script("echo one; echo two; echo problem >&2; exit 3", Duration::from_secs(20));
        assert_eq!(lines, ["one", "two"]);
        let Ended::Done { status, stderr } = &ended else { panic!("{ended:?}") };
        assert_eq!((status.code(), stderr.as_str()), (Some(3), "problem\n"));
        assert_eq!(ended.problem(Duration::ZERO).as_deref(), Some("crashed (exit status: 3)"));
        let (lines, ended) = run_script("printf 'no line feed'; kill -SEGV $$", Duration::from_secs(20));
        assert_eq!(lines, ["no line feed"]);
        assert!(ended.problem(Duration::ZERO).is_some_and(|text| text.contains("SIGSEGV")));
    }

    #[test]
    fn what_hangs_is_killed_and_what_it_said_is_kept() {
        let begin = Instant::now();
        let (lines, ended) = run_script("echo begun; sleep 30", Duration::from_millis(400));
        assert!(matches!(ended, Ended::TimedOut) && begin.elapsed() < Duration::from_secs(5));
        assert_eq!(lines, ["begun"]);
    }
}
