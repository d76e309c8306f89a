//! The self-test in a process of its own: a driver that hangs or crashes ends that process, and the answer is FAIL with the call it was in.
//!
//! ```text
//! tare gpu selftest ─ Request ─> `__gpu-selftest` ─ lines of Said ─> progress, report
//!                                       └─ notes of its calls (`driver::mark`) ─> which call it is in
//! ```

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::report::{Cause, Report};
use super::{Level, Options, Segments, selftest};
use crate::child::{self, Descendants, Ended, Keep, Limits};
use crate::error::{Error, Kind, Result};
use crate::gpu::driver::mark;
use crate::report::{Phase, Progress, TaskId};

/// How long one call of the driver may take by default.
pub const CALL_LIMIT: Duration = Duration::from_secs(60);
/// How long after the budget a call is waited for that was under way when it was spent.
const GRACE: Duration = Duration::from_secs(15);
/// A call that takes less is none that hangs.
const SLOW: Duration = Duration::from_secs(5);
/// Begin of the lines that are ours: a driver's library may print as well.
const OURS: &str = "tare-selftest ";

/// What the process is asked for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Request {
    /// As on the command line; see [`selftest`].
    pub devices: Vec<String>,
    pub level: Level,
    pub budget: Option<Duration>,
    /// Bytes.
    pub reserve: Option<u64>,
    pub even_if_busy: bool,
    pub segments: Segments,
    pub fade: Duration,
    pub seed: Option<u64>,
    /// How long one call of the driver may take.
    pub call_limit: Duration,
}

impl Request {
    /// The options of the test.
    pub fn options(&self) -> Options {
        let mut options = Options::new(self.level);
        (options.budget, options.reserve, options.even_if_busy) = (self.budget, self.reserve, self.even_if_busy);
        (options.segments, options.fade) = (self.segments, self.fade);
        options.seed = self.seed.unwrap_or(options.seed);
        options
    }

    /// Only simulated cards: nothing there can hang or crash.
    pub fn is_simulated(&self) -> bool {
        !self.devices.is_empty() && self.devices.iter().all(|name| name.starts_with("sim:"))
    }
}

/// What a self-test came to, ready to be shown.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Told {
    /// The report as a document.
    pub document: Value,
    /// The report for people.
    pub text: String,
    /// The exit code; with `--require-gpu`.
    pub codes: (u8, u8),
}

impl From<&Report> for Told {
    fn from(report: &Report) -> Self {
        Told { document: serde_json::json!(report), text: report.text(), codes: (report.exit_code(false), report.exit_code(true)) }
    }
}

/// A line of the process.
#[derive(Debug, Serialize, Deserialize)]
enum Said {
    Start { id: u64, label: String, total: Option<u64> },
    Total { id: u64, total: u64 },
    At { id: u64, position: u64 },
    Finish { id: u64 },
    Note { text: String },
    Warn { text: String, hints: Vec<String> },
    Done { told: Box<Told> },
    Failed { usage: bool, message: String, causes: Vec<String>, hints: Vec<String> },
}

/// Progress as lines.
struct Lines<'w> {
    write: &'w (dyn Fn(&str) + Sync),
    next: AtomicU64,
}

impl Lines<'_> {
    fn say(&self, said: &Said) {
        if let Ok(text) = serde_json::to_string(said) {
            (self.write)(&format!("{OURS}{text}\n"));
        }
    }
}

impl Progress for Lines<'_> {
    fn note(&self, message: &str) {
        self.say(&Said::Note { text: message.to_owned() });
    }
    fn warn(&self, message: &str, hints: &[String]) {
        self.say(&Said::Warn { text: message.to_owned(), hints: hints.to_vec() });
    }
    fn start(&self, _: Phase, label: &str, total: Option<u64>) -> TaskId {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.say(&Said::Start { id, label: label.to_owned(), total });
        TaskId(id)
    }
    fn set_total(&self, task: TaskId, total: u64) {
        self.say(&Said::Total { id: task.0, total });
    }
    fn advance_to(&self, task: TaskId, position: u64) {
        self.say(&Said::At { id: task.0, position });
    }
    fn finish(&self, task: TaskId) {
        self.say(&Said::Finish { id: task.0 });
    }
}

/// The body of the process: tests and writes lines. `notes`: where its calls are noted.
pub fn main(request: &str, notes: &Path, write: &(dyn Fn(&str) + Sync)) {
    child::die_with_parent();
    let lines = Lines { write, next: AtomicU64::new(1) };
    // Without notes a hang has no name, no more.
    let _ = mark::into(notes);
    let result = serde_json::from_str::<Request>(request)
        .map_err(|error| Error::failure("the self-test was asked for something that cannot be read").because(error))
        .and_then(|request| selftest(&request.devices, &request.options(), &lines));
    lines.say(&match result {
        Ok(report) => Said::Done { told: Box::new(Told::from(&report)) },
        Err(error) => Said::Failed {
            usage: error.kind() == Kind::Usage,
            message: error.message().to_owned(),
            causes: error.causes().to_vec(),
            hints: error.hints().to_vec(),
        },
    });
}

/// Tasks of the process, as they are shown here.
#[derive(Default)]
struct Tasks {
    shown: BTreeMap<u64, (TaskId, String, u64, Option<u64>)>,
}

impl Tasks {
    fn take(&mut self, said: &Said, progress: &dyn Progress) {
        match said {
            Said::Start { id, label, total } => {
                let task = progress.start(Phase::Other, label, *total);
                self.shown.insert(*id, (task, label.clone(), 0, *total));
            }
            Said::Total { id, total } => {
                if let Some((task, _, _, whole)) = self.shown.get_mut(id) {
                    *whole = Some(*total);
                    progress.set_total(*task, *total);
                }
            }
            Said::At { id, position } => {
                if let Some((task, _, at, _)) = self.shown.get_mut(id) {
                    *at = *position;
                    progress.advance_to(*task, *position);
                }
            }
            Said::Finish { id } => {
                if let Some((task, ..)) = self.shown.remove(id) {
                    progress.finish(task);
                }
            }
            Said::Note { text } => progress.note(text),
            Said::Warn { text, hints } => progress.warn(text, hints),
            Said::Done { .. } | Said::Failed { .. } => {}
        }
    }

    /// What was under way, in words: "cuda:0: passes over the memory, pass 12 of 40".
    fn underway(&self) -> Vec<String> {
        let pass = |at: u64, total: Option<u64>| total.map(|total| format!(", pass {} of {total}", at + 1)).unwrap_or_default();
        self.shown.values().map(|(_, label, at, total)| format!("{label}{}", pass(*at, *total))).collect()
    }
}

/// Tests in a process of its own. `command` makes its command from the request and the file for notes; it must lead to [`main`].
///
/// # Errors
/// Those of [`selftest`]; the process cannot be started; `stop` was answered with true (kind interrupted).
pub fn selftest_apart(
    request: &Request,
    command: &dyn Fn(&str, &Path) -> Command,
    progress: &dyn Progress,
    stop: &dyn Fn() -> bool,
) -> Result<Told> {
    let nowhere = |error: &dyn std::fmt::Display| Error::failure("the self-test cannot be started").because(error);
    let folder = tempfile::tempdir().map_err(|error| nowhere(&error))?;
    let notes = folder.path().join("notes");
    let asked = serde_json::to_string(request).map_err(|error| nowhere(&error))?;
    let mut tasks = Tasks::default();
    let mut answer = None;
    let state = std::cell::RefCell::new((mark::Reader::default(), Instant::now(), None));
    let answered = std::cell::Cell::new(None::<Instant>);
    let began = Instant::now();
    let asked_to_stop = std::cell::Cell::new(false);
    let given_up = || {
        if stop() {
            asked_to_stop.set(true);
            return true;
        }
        // Whatever its libraries do at the end of the process: the answer is there.
        if let Some(at) = answered.get() {
            return at.elapsed() > SLOW;
        }
        let mut state = state.borrow_mut();
        let (reader, looked, hang) = &mut *state;
        if looked.elapsed() < Duration::from_millis(50) {
            return false;
        }
        *looked = Instant::now();
        let late = request.budget.is_some_and(|budget| began.elapsed() > budget + GRACE);
        *hang = reader.look(&notes).filter(|call| call.waited > request.call_limit || (late && call.waited > SLOW));
        hang.is_some()
    };
    let limits =
        Limits { deadline: None, stop: &given_up, stdout: Keep::First(0), stderr: Keep::Last(64 << 10), descendants: Descendants::Kill };
    let ran = child::run_lines(command(&asked, &notes), &limits, &mut |line| {
        let Some(said) = line.strip_prefix(OURS).and_then(|text| serde_json::from_str::<Said>(text).ok()) else { return };
        tasks.take(&said, progress);
        if matches!(said, Said::Done { .. } | Said::Failed { .. }) {
            answered.set(Some(Instant::now()));
            answer = Some(said);
        }
    });
    let underway = tasks.underway();
    for (task, ..) in std::mem::take(&mut tasks.shown).into_values() {
        progress.finish(task);
    }
    match answer {
        _ if asked_to_stop.get() => return Err(Error::new(Kind::Interrupted, "the self-test was stopped")),
        Some(Said::Done { told }) => {
            if let Ended::Signal(_) = ran.ended {
                let problem = ran.ended.problem(ran.elapsed).unwrap_or_default();
                progress.warn(&format!("after the test was complete its process {problem}"), &[]);
            }
            return Ok(*told);
        }
        Some(Said::Failed { usage, message, causes, hints }) => {
            let kind = if usage { Kind::Usage } else { Kind::Failure };
            return Err(causes.into_iter().fold(Error::new(kind, message), |error, cause| error.because(cause)).hints_from(hints));
        }
        _ => {}
    }
    if let Ended::NotStarted(error) = &ran.ended {
        return Err(nowhere(error));
    }
    let (mut reader, _, hang) = state.into_inner();
    // What it was in when it ended.
    reader.look(&notes);
    let entered = reader.entered();
    let last = hang.as_ref().map(|call| call.call.clone()).or_else(|| entered.first().cloned());
    let mut place = last.as_deref().map(|call| format!(" in `{call}`")).unwrap_or_default();
    // Of several threads the one that did it cannot be told for certain.
    let others: Vec<String> = entered.iter().skip(1).map(|call| format!("`{call}`")).collect();
    if !others.is_empty() {
        place.push_str(&format!(", or in what other threads were in: {}", others.join(", ")));
    }
    let library =
        if last.as_deref().is_some_and(|call| call.starts_with("NVML")) { "the driver's management library" } else { "the driver" };
    let (cause, mut text) = match (&ran.ended, &hang) {
        (_, Some(hang)) => {
            (Cause::Timeout, format!("{library} did not come back from `{}` within {:.0} s", hang.call, hang.waited.as_secs_f64()))
        }
        // Nobody but a person or the system sends these.
        (Ended::Signal(1 | 2 | 9 | 15), _) => {
            (Cause::Stopped, format!("the process of the test was ended from outside{place}: {}", problem(&ran.ended)))
        }
        (Ended::Signal(signal), _) if last.is_some() => {
            (Cause::DriverError, format!("{library} crashed{place}: {}", child::signal_text(*signal)))
        }
        _ => (Cause::DriverError, format!("the process of the test {}{place}", problem(&ran.ended))),
    };
    if !underway.is_empty() {
        text.push_str(&format!(" (during {})", underway.join("; ")));
    }
    if let Some(line) = ran.err().lines().map(str::trim).rfind(|line| !line.is_empty()) {
        let line: String = line.chars().filter(|c| !c.is_control()).take(300).collect();
        text.push_str(&format!("; its last words: {line}"));
    }
    // Cards by the names of their tasks, else as they were asked for.
    let mut names: Vec<String> = underway.iter().filter_map(|label| Some(label.split_once(": ")?.0.to_owned())).collect();
    if names.is_empty() {
        names = if request.devices.is_empty() { vec!["all".to_owned()] } else { request.devices.clone() };
    }
    Ok(Told::from(&super::broken(&names, &request.options(), cause, &text, last.as_deref(), ran.elapsed)))
}

fn problem(ended: &Ended) -> String {
    ended.problem(Duration::ZERO).unwrap_or_else(|| "ended without an answer".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Silent;

    fn request(call_limit: Duration) -> Request {
        Request {
            devices: vec!["cuda:0".into()],
            level: Level::Quick,
            budget: None,
            reserve: None,
            even_if_busy: false,
            segments: Segments::Both,
            fade: Duration::ZERO,
            seed: None,
            call_limit,
        }
    }

    fn ask(script: &str, stop: &dyn Fn() -> bool) -> Result<Told> {
        let command = |_: &str, notes: &Path| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script, "sh"]).arg(notes);
            command
        };
        selftest_apart(&request(Duration::from_millis(300)), &command, &Silent, stop)
    }

    const NOTE: &str = r#"printf '%-64s' "0000000000000001 + cuMemAlloc" > "$1"; "#;
    const START: &str = r#"echo 'tare-selftest {"Start":{"id":1,"label":"cuda:0: testing memory","total":40}}'; "#;

    #[test]
    fn a_hang_and_a_crash_are_failures_that_name_the_call() {
        let told = ask(&format!("{START}{NOTE}sleep 60"), &|| false).unwrap();
        assert_eq!((told.codes, told.document["devices"][0]["cause"].as_str()), ((6, 6), Some("timeout")), "{}", told.text);
        assert!(told.text.contains("the driver did not come back from `cuMemAlloc` within 0 s"), "{}", told.text);
        assert!(told.text.contains("(during cuda:0: testing memory, pass 1 of 40)"), "{}", told.text);
        let told = ask(&format!("echo noise; {NOTE}echo oh no >&2; kill -SEGV $$"), &|| false).unwrap();
        assert_eq!((told.codes, told.document["devices"][0]["cause"].as_str()), ((6, 6), Some("driver-error")), "{}", told.text);
        let finding = &told.document["devices"][0]["findings"][0];
        assert_eq!(finding["call"], "cuMemAlloc");
        assert!(
            told.text.contains("the driver crashed in `cuMemAlloc`: SIGSEGV") && told.text.contains("its last words: oh no"),
            "{}",
            told.text
        );
    }

    #[test]
    fn what_is_ended_from_outside_is_not_tested_and_what_is_stopped_an_error() {
        let told = ask(&format!("{NOTE}kill -KILL $$"), &|| false).unwrap();
        assert_eq!((told.codes, told.document["status"].as_str()), ((0, 8), Some("not-tested")), "{}", told.text);
        assert_eq!(ask("sleep 60", &|| true).unwrap_err().exit_code(), 130);
        let failed = r#"echo 'tare-selftest {"Failed":{"usage":true,"message":"no","causes":[],"hints":["h"]}}'"#;
        assert_eq!(ask(failed, &|| false).unwrap_err().exit_code(), 2);
        let command = |_: &str, _: &Path| Command::new("/no/such/program");
        assert_eq!(selftest_apart(&request(CALL_LIMIT), &command, &Silent, &|| false).unwrap_err().exit_code(), 1);
    }
}
