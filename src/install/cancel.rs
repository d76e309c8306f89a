//! A switch that Ctrl-C flips and that every long step looks at.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

use crate::error::{Error, Kind, Result};

#[derive(Debug, Default)]
struct Inner {
    flag: AtomicBool,
    notify: Notify,
}

/// Asks a running operation to stop and undo what it has not finished. Clones share one switch.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<Inner>);

impl Cancel {
    /// A switch that is off.
    pub fn new() -> Self {
        Self::default()
    }

    /// Flips the switch. It cannot be flipped back.
    pub fn cancel(&self) {
        self.0.flag.store(true, Ordering::SeqCst);
        self.0.notify.notify_waiters();
    }

    /// Whether the switch was flipped.
    pub fn is_cancelled(&self) -> bool {
        self.0.flag.load(Ordering::SeqCst)
    }

    /// `Err` of kind [`Kind::Interrupted`] (exit code 130) once the switch was flipped.
    ///
    /// # Errors
    /// See above.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(interrupted()) } else { Ok(()) }
    }

    /// Resolves when the switch is flipped.
    pub async fn cancelled(&self) {
        loop {
            let notified = self.0.notify.notified();
            if self.is_cancelled() {
                return;
            }
            notified.await;
        }
    }
}

/// The error of an operation that was stopped.
pub(crate) fn interrupted() -> Error {
    Error::new(Kind::Interrupted, "interrupted, nothing was changed")
}

/// Flips the switch when dropped, unless disarmed: work on other threads stops when the future that waits for it is dropped.
pub(crate) struct CancelOnDrop(Option<Cancel>);

impl CancelOnDrop {
    pub(crate) fn new(cancel: Cancel) -> Self {
        CancelOnDrop(Some(cancel))
    }
    pub(crate) fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(cancel) = &self.0 {
            cancel.cancel();
        }
    }
}
