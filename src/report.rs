//! How library code tells of its progress without writing to the terminal: it calls a [`Progress`], and `ui` shows it.

/// What kind of work a task is. The unit of its total follows from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Fetching repodata; unit: bytes.
    Repodata,
    /// Solving; no total.
    Solve,
    /// Downloading package archives; unit: bytes.
    Download,
    /// Verifying and unpacking into the cache; unit: packages.
    Unpack,
    /// Linking packages into the stage; unit: packages.
    Link,
    /// Compiling Python byte code; unit: files.
    Compile,
    /// Anything else, named by its label; unit: steps.
    Other,
}

/// Names a running task of one [`Progress`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TaskId(pub u64);

/// The receiver of progress and remarks. Methods must be cheap and must not fail.
pub trait Progress: Send + Sync {
    /// A remark worth reading once (what was chosen and why). Style as for errors.
    fn note(&self, message: &str);
    /// Something is probably not what the user wants.
    fn warn(&self, message: &str, hints: &[String]);
    /// A task begins. `total` in the unit of `phase`, if known.
    fn start(&self, phase: Phase, label: &str, total: Option<u64>) -> TaskId;
    /// The total of a task became known or changed.
    fn set_total(&self, task: TaskId, total: u64);
    /// The task is now at `position`.
    fn advance_to(&self, task: TaskId, position: u64);
    /// The task ended, well or not.
    fn finish(&self, task: TaskId);
}

/// Discards everything.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn note(&self, _: &str) {}
    fn warn(&self, _: &str, _: &[String]) {}
    fn start(&self, _: Phase, _: &str, _: Option<u64>) -> TaskId {
        TaskId(0)
    }
    fn set_total(&self, _: TaskId, _: u64) {}
    fn advance_to(&self, _: TaskId, _: u64) {}
    fn finish(&self, _: TaskId) {}
}
