//! Progress bars on a terminal, plain lines elsewhere.

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::Verbosity;
use crate::channel::redact_text;
use crate::report::{Phase, Progress, TaskId};

const YELLOW: anstyle::Style = anstyle::AnsiColor::Yellow.on_default().bold();
const CYAN: anstyle::Style = anstyle::AnsiColor::Cyan.on_default().bold();
const DIM: anstyle::Style = anstyle::Style::new().dimmed();

/// How progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Not at all.
    Hidden,
    /// One line when a phase's task ends.
    Lines,
    /// Moving bars.
    Bars,
}

struct Task {
    phase: Phase,
    label: String,
    total: Option<u64>,
    bar: Option<ProgressBar>,
}

/// Shows progress; see [`Mode`].
pub struct Bars {
    mode: Mode,
    verbosity: Verbosity,
    json: bool,
    multi: MultiProgress,
    next: AtomicU64,
    tasks: Mutex<HashMap<u64, Task>>,
    warnings: Mutex<Vec<String>>,
    /// The last line of a task that ended.
    last: Mutex<Option<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bars {
    pub fn new(mode: Mode, verbosity: Verbosity, json: bool) -> Self {
        Bars {
            mode,
            verbosity,
            json,
            multi: MultiProgress::new(),
            next: AtomicU64::new(1),
            tasks: Mutex::default(),
            warnings: Mutex::default(),
            last: Mutex::default(),
        }
    }

    pub fn warnings(&self) -> Vec<String> {
        lock(&self.warnings).clone()
    }

    pub fn remember_warning(&self, text: &str) {
        let text = &redact_text(text);
        let mut warnings = lock(&self.warnings);
        if !warnings.iter().any(|known| known == text) {
            warnings.push(text.clone());
        }
    }

    /// Runs `write` with the bars out of the way.
    pub fn suspend<R>(&self, write: impl FnOnce() -> R) -> R {
        if self.mode == Mode::Bars { self.multi.suspend(write) } else { write() }
    }

    /// Removes all bars.
    pub fn clear(&self) {
        lock(&self.tasks).clear();
        let _ = self.multi.clear();
    }

    fn line(&self, text: &str) {
        self.suspend(|| {
            let _ = writeln!(anstream::stderr().lock(), "{}", redact_text(text));
        });
    }

    fn style(phase: Phase, known: bool) -> ProgressStyle {
        let template = match (phase, known) {
            (Phase::Repodata | Phase::Download, true) => {
                "{prefix:>10} {wide_msg} {bytes:>10}/{total_bytes:<10} {bytes_per_sec:>12} [{bar:24}]"
            }
            (Phase::Repodata | Phase::Download, false) => "{prefix:>10} {wide_msg} {bytes:>10} {spinner}",
            (_, true) => "{prefix:>10} {wide_msg} {pos:>6}/{len:<6} [{bar:24}]",
            (_, false) => "{prefix:>10} {wide_msg} {spinner}",
        };
        // The templates are constants; the default style is the harmless answer to a typing error in one.
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
    }
}

/// The word before a label; none before one that says itself what is done ("linking packages").
fn word(phase: Phase, label: &str) -> &'static str {
    if label.split(' ').next().is_some_and(|first| first.ends_with("ing")) {
        return "";
    }
    match phase {
        Phase::Repodata => "repodata",
        Phase::Solve => "solve",
        Phase::Download => "fetch",
        Phase::Unpack => "verify",
        Phase::Link => "link",
        Phase::Compile => "compile",
        Phase::Other => "",
    }
}

impl Progress for Bars {
    fn note(&self, message: &str) {
        if self.verbosity >= Verbosity::Normal && !self.json {
            self.line(message);
        }
    }

    fn warn(&self, message: &str, hints: &[String]) {
        self.remember_warning(message);
        if self.verbosity >= Verbosity::Normal && !self.json {
            self.line(&format!("{YELLOW}warning{YELLOW:#}: {message}"));
            for hint in hints {
                self.line(&format!("{CYAN}hint{CYAN:#}: {hint}"));
            }
        }
    }

    fn start(&self, phase: Phase, label: &str, total: Option<u64>) -> TaskId {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let bar = (self.mode == Mode::Bars).then(|| {
            let bar = match total {
                Some(total) => ProgressBar::new(total),
                None => ProgressBar::new_spinner(),
            };
            let bar = self.multi.add(bar);
            bar.set_style(Self::style(phase, total.is_some()));
            bar.set_prefix(word(phase, label));
            bar.set_message(label.to_owned());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        lock(&self.tasks).insert(id, Task { phase, label: label.to_owned(), total, bar });
        TaskId(id)
    }

    fn set_total(&self, task: TaskId, total: u64) {
        if let Some(task) = lock(&self.tasks).get_mut(&task.0) {
            let was_known = task.total.replace(total).is_some();
            if let Some(bar) = &task.bar {
                bar.set_length(total);
                if !was_known {
                    bar.set_style(Self::style(task.phase, true));
                }
            }
        }
    }

    fn advance_to(&self, task: TaskId, position: u64) {
        if let Some(Task { bar: Some(bar), .. }) = lock(&self.tasks).get(&task.0) {
            bar.set_position(position);
        }
    }

    fn finish(&self, task: TaskId) {
        let Some(task) = lock(&self.tasks).remove(&task.0) else { return };
        if let Some(bar) = task.bar {
            bar.finish_and_clear();
            self.multi.remove(&bar);
        }
        // Of nothing there is nothing to tell.
        if self.mode == Mode::Lines && task.total != Some(0) {
            let total = match (task.phase, task.total) {
                (Phase::Repodata | Phase::Download, Some(total)) => format!(" ({})", super::human_bytes(total)),
                (_, Some(total)) => format!(" ({total})"),
                (_, None) => String::new(),
            };
            let line = format!("{:>10} {}{total}", word(task.phase, &task.label), task.label);
            // The same work done again, such as for another plan, is no news.
            let before = lock(&self.last).replace(line.clone());
            if before.as_ref() != Some(&line) {
                self.line(&format!("{DIM}{line}{DIM:#}"));
            }
        }
    }
}
