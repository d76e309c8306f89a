//! Programs in a process of their own that cannot hurt: with a time limit, bounded output, and an end for everything they started.
//!
//! ```text
//! tare ─┬─ watcher (`/bin/sh`, leader of a process group, reads a pipe that tare holds)
//!       └─ program (in that group) ─ what it starts
//! ```
//! The group is killed when the program has ended, at the limit, and when the work is given up. Should tare itself be killed, with SIGKILL too, its
//! end of the pipe closes and the watcher kills the group: a parent-death signal would reach the program only, and not what it has started. While the
//! watcher is not waited for, the number of the group belongs to nobody else.
//!
//! What takes itself out of the group (a daemon with a session of its own) is left alone, and its hold on the pipes is not waited for.

use std::collections::VecDeque;
use std::io::Read;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// With this exit code.
    Exited(i32),
    /// By this signal.
    Signal(i32),
    /// It was killed at the time limit.
    TimedOut,
    /// It was killed because nobody wants it any more.
    Stopped,
    /// It could not be started: why.
    NotStarted(String),
}

impl Ended {
    /// With exit code 0.
    pub fn well(&self) -> bool {
        *self == Ended::Exited(0)
    }

    /// Why there is no result: `crashed: SIGSEGV (…)`. `None` after a good end.
    pub fn problem(&self, limit: Duration) -> Option<String> {
        Some(match self {
            Ended::Exited(0) => return None,
            Ended::Exited(code) => format!("ended with exit code {code}"),
            Ended::Signal(signal) => format!("crashed: {}", signal_text(*signal)),
            Ended::TimedOut => format!("did not answer within {:.1} s", limit.as_secs_f32()),
            Ended::Stopped => "was stopped".to_owned(),
            Ended::NotStarted(error) => format!("could not be started: {error}"),
        })
    }
}

impl From<ExitStatus> for Ended {
    fn from(status: ExitStatus) -> Self {
        #[cfg(unix)]
        if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
            return Ended::Signal(signal);
        }
        Ended::Exited(status.code().unwrap_or(-1))
    }
}

/// Name of a signal and what it means (signal(7), Linux on x86-64 and arm64).
pub fn signal_text(signal: i32) -> String {
    let (name, what) = match signal {
        1 => ("SIGHUP", "the terminal is gone"),
        2 => ("SIGINT", "Ctrl-C"),
        4 => ("SIGILL", "an instruction that this processor does not have"),
        6 => ("SIGABRT", "the program gave up"),
        7 => ("SIGBUS", "memory or a file behind it is not there"),
        8 => ("SIGFPE", "an arithmetic fault"),
        9 => ("SIGKILL", "killed from outside, often for lack of memory"),
        11 => ("SIGSEGV", "an access to memory that is not its own"),
        13 => ("SIGPIPE", "nobody reads what it writes"),
        15 => ("SIGTERM", "asked to end"),
        31 => ("SIGSYS", "a system call that is not allowed here"),
        other => return format!("signal {other}"),
    };
    format!("{name} ({what})")
}

/// What is kept of a stream, in bytes. The rest is read and thrown away: a program must not wait for a full pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The beginning.
    First(usize),
    /// The end.
    Last(usize),
    /// Nothing, and it is not read: it goes where that of this process goes.
    Inherit,
}

/// What becomes of the processes that the program has started and not waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Descendants {
    /// They end with it.
    Kill,
    /// They are left: what a person's own scripts start in the background is theirs. The program stays in the process group of its caller.
    Leave,
}

/// How to run a program.
pub struct Limits<'a> {
    /// When it is killed; `None`: never.
    pub deadline: Option<Instant>,
    /// Asked every few milliseconds: whether the work is given up.
    pub stop: &'a dyn Fn() -> bool,
    /// Of standard output.
    pub stdout: Keep,
    /// Of standard error.
    pub stderr: Keep,
    pub descendants: Descendants,
}

impl Limits<'_> {
    /// Until `deadline`, with 1 MiB of each stream kept.
    pub fn until(deadline: Instant) -> Self {
        let deadline = Some(deadline);
        Limits { deadline, stop: &|| false, stdout: Keep::First(1 << 20), stderr: Keep::Last(1 << 20), descendants: Descendants::Kill }
    }
}

/// What a program did.
#[derive(Debug, Clone)]
pub struct Ran {
    pub ended: Ended,
    /// What was kept of standard output, also where it did not come to its end.
    pub stdout: Vec<u8>,
    /// What was kept of standard error.
    pub stderr: Vec<u8>,
    /// How long it ran.
    pub elapsed: Duration,
}

impl Ran {
    /// Standard output as text.
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Standard error as text.
    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }
}

/// How long a process that was killed is waited for: one that is stuck in a driver does not die at once.
const DYING: Duration = Duration::from_secs(2);
/// How long the streams are read after the end, where something that left the group still holds them.
const REST: Duration = Duration::from_millis(300);
/// Longest line that is handed on; what comes after is handed on as another.
const LONGEST_LINE: usize = 64 << 20;

/// Holds the process group together: see the head of this file.
struct Watcher {
    shell: Child,
    /// Closed when this process ends, however it ends.
    _alive: Option<ChildStdin>,
}

impl Watcher {
    /// `None` where there is no shell: the program then leads its group, and nobody looks after it should this process be killed.
    fn start() -> Option<Watcher> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "read -r tare; kill -KILL 0"]).env_clear().current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut shell = command.spawn().ok()?;
        let alive = shell.stdin.take();
        Some(Watcher { shell, _alive: alive })
    }
}

/// The program with its group. Dropping it ends both, also when a panic unwinds.
struct Running {
    child: Child,
    watcher: Option<Watcher>,
    descendants: Descendants,
    done: bool,
}

impl Running {
    fn end(&mut self) {
        if self.descendants == Descendants::Kill {
            #[cfg(unix)]
            {
                // Without a watcher the number of the group is free again once the program was waited for.
                let leader = self.watcher.as_ref().map(|watcher| watcher.shell.id()).or((!self.done).then(|| self.child.id()));
                if let Some(group) = leader.and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw) {
                    let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
                }
            }
        }
        if !self.done {
            let _ = self.child.kill();
            let until = Instant::now() + DYING;
            while Instant::now() < until && matches!(self.child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(5));
            }
            self.done = true;
        }
        end_watcher(self.watcher.take());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

enum Piece {
    Out(Vec<u8>),
    Err(Vec<u8>),
}

/// Reads a stream on a thread. Not joined: a process that inherited the pipe and left the group may keep it open for ever; the thread ends with its
/// next piece.
fn reader(stream: Option<impl Read + Send + 'static>, sender: SyncSender<Piece>, make: fn(Vec<u8>) -> Piece) {
    let Some(mut stream) = stream else { return };
    std::thread::spawn(move || {
        let mut buffer = vec![0u8; 32 << 10];
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => return,
                Ok(read) => {
                    if sender.send(make(buffer[..read].to_vec())).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
}

/// What is kept of one stream.
struct Kept {
    bytes: VecDeque<u8>,
    keep: Keep,
}

impl Kept {
    fn add(&mut self, piece: &[u8]) {
        match self.keep {
            Keep::First(most) => self.bytes.extend(&piece[..piece.len().min(most.saturating_sub(self.bytes.len()))]),
            Keep::Last(most) => {
                self.bytes.extend(piece);
                let over = self.bytes.len().saturating_sub(most);
                self.bytes.drain(..over);
            }
            Keep::Inherit => {}
        }
    }
}

/// Standard output by lines, as it comes.
struct Lines<'l> {
    line: &'l mut dyn FnMut(&str),
    begun: Vec<u8>,
}

impl Lines<'_> {
    fn add(&mut self, piece: &[u8]) {
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            self.begun.extend_from_slice(part);
            if part.ends_with(b"\n") || self.begun.len() >= LONGEST_LINE {
                self.finish();
            }
        }
    }

    fn finish(&mut self) {
        if !self.begun.is_empty() {
            let text = String::from_utf8_lossy(&self.begun).into_owned();
            self.begun.clear();
            (self.line)(text.trim_end_matches(['\n', '\r']));
        }
    }
}

/// A program that is talked to. It and what it starts end when this is dropped, and when this process ends, however that comes.
pub(crate) struct Talk(Running);

impl Talk {
    /// Starts `command`, whose streams are set up by the caller.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(command: &mut Command) -> std::io::Result<Talk> {
        let watcher = Watcher::start();
        join_group(command, watcher.as_ref());
        match spawn(command, None) {
            Ok(child) => Ok(Talk(Running { child, watcher, descendants: Descendants::Kill, done: false })),
            Err(error) => {
                end_watcher(watcher);
                Err(error)
            }
        }
    }

    /// The program, for its streams.
    pub fn child(&mut self) -> &mut Child {
        &mut self.0.child
    }

    /// Waits for its end, and ends what it has left behind.
    ///
    /// # Errors
    /// As for [`Child::wait`].
    pub fn wait(mut self) -> std::io::Result<ExitStatus> {
        let status = self.0.child.wait()?;
        self.0.done = true;
        Ok(status)
    }
}

/// The program goes into the group that the watcher leads; without one it leads its own.
fn join_group(command: &mut Command, watcher: Option<&Watcher>) {
    #[cfg(unix)]
    {
        let group = watcher.and_then(|watcher| i32::try_from(watcher.shell.id()).ok()).unwrap_or(0);
        std::os::unix::process::CommandExt::process_group(command, group);
    }
    #[cfg(not(unix))]
    let _ = (command, watcher);
}

fn end_watcher(watcher: Option<Watcher>) {
    if let Some(mut watcher) = watcher {
        let _ = watcher.shell.kill();
        let _ = watcher.shell.wait();
    }
}

/// Runs `command` with nothing on stdin. Blocks until it has ended, or was made to: see [`Limits`].
pub fn run(command: Command, limits: &Limits<'_>) -> Ran {
    execute(command, limits, None)
}

/// As [`run`]; each line of standard output goes to `line` as it comes, without the line feed, and is not kept.
pub fn run_lines(command: Command, limits: &Limits<'_>, line: &mut dyn FnMut(&str)) -> Ran {
    execute(command, limits, Some(Lines { line, begun: Vec::new() }))
}

fn execute(mut command: Command, limits: &Limits<'_>, mut lines: Option<Lines<'_>>) -> Ran {
    let started = Instant::now();
    let pipe = |keep: Keep| if keep == Keep::Inherit { Stdio::inherit() } else { Stdio::piped() };
    command.stdin(Stdio::null()).stdout(pipe(limits.stdout)).stderr(pipe(limits.stderr));
    let mut watcher = None;
    if limits.descendants == Descendants::Kill {
        watcher = Watcher::start();
        join_group(&mut command, watcher.as_ref());
    }
    let child = match spawn(&mut command, limits.deadline) {
        Ok(child) => child,
        Err(error) => {
            end_watcher(watcher);
            let ended = Ended::NotStarted(error.to_string());
            return Ran { ended, stdout: Vec::new(), stderr: Vec::new(), elapsed: started.elapsed() };
        }
    };
    let mut running = Running { child, watcher, descendants: limits.descendants, done: false };
    let (sender, pieces) = sync_channel(64);
    reader(running.child.stdout.take(), sender.clone(), Piece::Out);
    reader(running.child.stderr.take(), sender, Piece::Err);
    let mut stdout = Kept { bytes: VecDeque::new(), keep: limits.stdout };
    let mut stderr = Kept { bytes: VecDeque::new(), keep: limits.stderr };
    let mut take = |piece: Piece| match (piece, &mut lines) {
        (Piece::Out(bytes), Some(lines)) => lines.add(&bytes),
        (Piece::Out(bytes), None) => stdout.add(&bytes),
        (Piece::Err(bytes), _) => stderr.add(&bytes),
    };
    let ended = watch(&mut running, &pieces, limits, &mut take);
    let elapsed = started.elapsed();
    // First the end of all that holds the pipes, then what is still in them.
    running.end();
    let until = Instant::now() + REST;
    while let Ok(piece) = pieces.recv_timeout(until.saturating_duration_since(Instant::now())) {
        take(piece);
    }
    if let Some(lines) = &mut lines {
        lines.finish();
    }
    Ran { ended, stdout: stdout.bytes.into(), stderr: stderr.bytes.into(), elapsed }
}

/// Starts a program. Somebody may still have its file open for writing, such as a child between fork and exec: that is waited for.
fn spawn(command: &mut Command, deadline: Option<Instant>) -> std::io::Result<Child> {
    let until = Instant::now() + DYING;
    let until = deadline.map_or(until, |deadline| deadline.min(until));
    loop {
        match command.spawn() {
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
}

/// Takes what comes until the program has ended or has to.
fn watch(running: &mut Running, pieces: &Receiver<Piece>, limits: &Limits<'_>, take: &mut dyn FnMut(Piece)) -> Ended {
    let mut pause = Duration::from_millis(1);
    loop {
        match running.child.try_wait() {
            Ok(Some(status)) => {
                running.done = true;
                return status.into();
            }
            Ok(None) => {}
            Err(error) => return Ended::NotStarted(error.to_string()),
        }
        if (limits.stop)() {
            return Ended::Stopped;
        }
        let left = limits.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Ended::TimedOut;
        }
        let wait = left.map_or(pause, |left| left.min(pause));
        match pieces.recv_timeout(wait) {
            Ok(piece) => {
                take(piece);
                // All that is there: the end of the program need not be asked for after each.
                pieces.try_iter().take(64).for_each(&mut *take);
            }
            Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(Duration::from_millis(20)),
            // Its streams are closed; it still has to end.
            Err(RecvTimeoutError::Disconnected) => {
                std::thread::sleep(wait);
                pause = (pause * 2).min(Duration::from_millis(20));
            }
        }
    }
}

/// For a child that is this program, at its start: it dies when its parent does. It is in a process group of its own, where Ctrl-C of the
/// terminal does not reach it.
pub fn die_with_parent() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    fn limits(limit: Duration) -> Limits<'static> {
        Limits::until(Instant::now() + limit)
    }

    fn run_script(script: &str, limit: Duration) -> (Vec<String>, Ran) {
        let mut lines = Vec::new();
        let ran = run_lines(shell(script), &limits(limit), &mut |line| lines.push(line.to_owned()));
        (lines, ran)
    }

    const LONG: Duration = Duration::from_secs(20);

    /// Whether a process is there and no corpse.
    fn alive(pid: &str) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|text| !text.rsplit(')').next().unwrap_or_default().trim().starts_with('Z'))
    }

    #[test]
    fn lines_come_as_they_are_written_and_the_end_is_told() {
        let (lines, ran) = run_script("echo one; echo two; echo problem >&2; exit 3", LONG);
        assert_eq!(lines, ["one", "two"]);
        assert_eq!((&ran.ended, ran.err().as_str()), (&Ended::Exited(3), "problem\n"));
        assert_eq!(ran.ended.problem(Duration::ZERO).as_deref(), Some("ended with exit code 3"));
        let (lines, ran) = run_script("printf 'no line feed'; kill -SEGV $$", LONG);
        assert_eq!(lines, ["no line feed"]);
        assert!(ran.ended.problem(Duration::ZERO).is_some_and(|text| text.contains("SIGSEGV")));
        let ran = run(Command::new("/no/such/program"), &limits(LONG));
        assert!(matches!(ran.ended, Ended::NotStarted(_)));
    }

    #[test]
    fn what_hangs_is_killed_and_what_it_said_is_kept() {
        let begin = Instant::now();
        let (lines, ran) = run_script("echo begun; printf half; echo oh >&2; sleep 30", Duration::from_millis(400));
        assert!(ran.ended == Ended::TimedOut && begin.elapsed() < Duration::from_secs(5));
        assert_eq!((lines, ran.err()), (vec!["begun".to_owned(), "half".to_owned()], "oh\n".to_owned()));
        let ran = run(shell("echo out; sleep 30"), &Limits { stop: &|| true, ..limits(LONG) });
        assert!(ran.ended == Ended::Stopped && begin.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn what_it_started_ends_with_it_and_holds_nothing_up() {
        let begin = Instant::now();
        let ran = run(shell("sleep 300 & echo $!; exit 0"), &limits(LONG));
        assert_eq!(ran.ended, Ended::Exited(0));
        assert!(begin.elapsed() < Duration::from_secs(5));
        let pid = ran.out();
        assert!(!pid.trim().is_empty());
        let until = Instant::now() + Duration::from_secs(5);
        while alive(pid.trim()) {
            assert!(Instant::now() < until, "{pid} is still there");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn who_is_talked_to_ends_with_the_talk() {
        use std::io::{BufRead, BufReader};
        let mut command = shell("sleep 300 & echo $$ $!; read line; exit 4");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let begin = |command: &mut Command| {
            let mut talk = Talk::start(command).unwrap();
            let mut line = String::new();
            BufReader::new(talk.child().stdout.take().unwrap()).read_line(&mut line).unwrap();
            let pids: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            assert!(pids.len() == 2 && pids.iter().all(|pid| alive(pid)), "{line}");
            (talk, pids)
        };
        let (talk, mut pids) = begin(&mut command);
        drop(talk);
        let (mut talk, more) = begin(&mut command);
        drop(talk.child().stdin.take());
        assert_eq!(talk.wait().unwrap().code(), Some(4));
        pids.extend(more);
        let until = Instant::now() + Duration::from_secs(5);
        while let Some(pid) = pids.iter().find(|pid| alive(pid)) {
            assert!(Instant::now() < until, "{pid} is still there");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(Talk::start(&mut Command::new("/no/such/program")).is_err());
    }

    #[test]
    fn what_is_to_be_left_is_left_and_holds_nothing_up() {
        let begin = Instant::now();
        let ran = run(shell("sleep 20 & echo $!"), &Limits { descendants: Descendants::Leave, ..limits(LONG) });
        assert!(ran.ended.well() && begin.elapsed() < Duration::from_secs(5));
        let pid = ran.out().trim().to_owned();
        assert!(alive(&pid), "{pid}");
        let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }

    #[test]
    fn output_is_bounded_at_the_end_that_was_asked_for() {
        let script = "i=0; while [ $i -lt 20000 ]; do echo 1234567890; echo abcdefghij >&2; i=$((i+1)); done; echo last; echo end >&2";
        let ran = run(shell(script), &Limits { stdout: Keep::First(25), stderr: Keep::Last(15), ..limits(LONG) });
        assert_eq!((ran.out().as_str(), ran.err().as_str()), ("1234567890\n1234567890\n123", "abcdefghij\nend\n"));
    }
}
