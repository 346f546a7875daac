//! What the tool's events have said so far of the operation that runs. The reader of the tool's output writes it, without
//! waiting; the publisher reads it at any time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::Notify;

use crate::terraform::lock_error::{LockWatch, without_colours};
use crate::terraform::progress::Progress;
use crate::terraform::structured::Structured;

/// The events of one operation, summed up. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct EventState(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    summary: Mutex<Summary>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Summary {
    structured: Structured,
    progress: Progress,
    lock: LockWatch,
    state: Option<Bytes>,
}

impl EventState {
    /// Starts from this list of changes.
    pub fn begin(&self, structured: Structured) {
        *self.lock() = Summary {
            structured,
            ..Summary::default()
        };
        self.0.changed.notify_one();
    }

    /// Takes one event of the tool.
    pub fn event(&self, event: &Value) {
        let mut summary = self.lock();
        summary.structured.event(event);
        summary.progress.event(event);
        summary.lock.event(event);
        drop(summary);
        self.0.changed.notify_one();
    }

    /// Takes one line of a tool that speaks no JSON.
    pub fn line(&self, line: &[u8]) {
        let line = without_colours(&String::from_utf8_lossy(line));
        let mut summary = self.lock();
        summary.progress.line(&line);
        summary.lock.line(&line);
    }

    /// Takes the state the tool printed because no disk took it.
    pub fn state(&self, state: Bytes) {
        self.lock().state = Some(state);
    }

    /// The state the tool printed, if it did.
    pub fn printed_state(&self) -> Option<Bytes> {
        self.lock().state.clone()
    }

    /// The changes at the end; none are left.
    pub fn take(&self) -> Structured {
        std::mem::take(&mut self.lock().structured)
    }

    /// How far the operation came.
    pub fn progress(&self) -> Progress {
        self.lock().progress.clone()
    }

    /// What the tool said of locks.
    pub fn locks(&self) -> LockWatch {
        self.lock().lock.clone()
    }

    /// Returns once something has changed since the last time.
    pub async fn changed(&self) {
        self.0.changed.notified().await;
    }

    /// Changes and diagnostics as they are now.
    pub fn picture(&self) -> (Value, Value) {
        let summary = self.lock();
        (
            summary.structured.changes(),
            summary.structured.diagnostics(),
        )
    }

    fn lock(&self) -> MutexGuard<'_, Summary> {
        // An event that panicked has at worst counted too little.
        self.0
            .summary
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
