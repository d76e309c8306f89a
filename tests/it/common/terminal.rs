//! A shell in a pseudo-terminal, driven as a person would: lines are typed, and what appears is read.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::TestEnv;

pub struct Terminal {
    child: Child,
    input: ChildStdin,
    shown: Arc<Mutex<Vec<u8>>>,
    typed: usize,
    dump: PathBuf,
}

/// The program on PATH, or `None` after saying that it is not there.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file());
    if found.is_none() {
        eprintln!("skipped: no {name}");
    }
    found
}

impl Terminal {
    /// Starts a command line in a terminal of its own, by the program `script` of util-linux. `vars` are set on top.
    pub fn start(env: &TestEnv, command_line: &str, vars: &[(&str, &str)]) -> Self {
        let mut command = env.other("script");
        command.args(["-qec", &format!("stty cols 300 rows 50; exec {command_line}"), "/dev/null"]);
        command.env("SHELL", "/bin/sh").env("TERM", "xterm").env_remove("NO_COLOR");
        command.envs(vars.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("`script` runs");
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (mut output, into) = (child.stdout.take().expect("a pipe"), shown.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut buffer) {
                into.lock().expect("no panic").extend(&buffer[..read]);
            }
        });
        let input = child.stdin.take().expect("a pipe");
        let mut terminal = Terminal { child, input, shown, typed: 0, dump: env.path().join("variables") };
        terminal.run("");
        terminal
    }

    /// Types a line, waits until the shell has done it, and gives back what appeared meanwhile.
    #[track_caller]
    pub fn run(&mut self, line: &str) -> String {
        self.typed += 1;
        let from = self.shown.lock().expect("no panic").len();
        let (mark, typed) = (format!("done-{}-done", self.typed), format!("echo done-'{}'-done", self.typed));
        for line in [line, &typed] {
            self.input.write_all(format!("{line}\n").as_bytes()).expect("the shell reads");
            self.input.flush().expect("the shell reads");
        }
        let started = Instant::now();
        loop {
            let text = String::from_utf8_lossy(&self.shown.lock().expect("no panic")[from..]).into_owned();
            if text.contains(&mark) {
                return text;
            }
            if started.elapsed() > Duration::from_secs(60) {
                let _ = self.child.kill();
                panic!("`{line}` does not end:\n{}", self.text());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// All that has appeared.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().expect("no panic")).into_owned()
    }

    /// The variables that programs started by the shell get.
    #[track_caller]
    pub fn variables(&mut self) -> BTreeMap<String, String> {
        let _ = std::fs::remove_file(&self.dump);
        let line = format!("/usr/bin/env -0 > '{}'", self.dump.display());
        let shown = self.run(&line);
        parse(&std::fs::read(&self.dump).unwrap_or_else(|error| panic!("{error}: {shown}")))
    }

    /// Types a last line and gives back the exit code.
    pub fn end(mut self, line: &str) -> i32 {
        let _ = self.input.write_all(format!("{line}\n").as_bytes());
        let _ = self.input.flush();
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code().unwrap_or(-1);
            }
            if started.elapsed() > Duration::from_secs(60) {
                let _ = self.child.kill();
                panic!("the shell does not end:\n{}", self.text());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Output of `env -0`, without what a shell counts and notes for itself.
pub fn parse(bytes: &[u8]) -> BTreeMap<String, String> {
    String::from_utf8_lossy(bytes)
        .split('\0')
        .filter_map(|entry| entry.split_once('='))
        .filter(|(name, _)| !matches!(*name, "_" | "SHLVL" | "PWD" | "OLDPWD" | "LINES" | "COLUMNS"))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}
