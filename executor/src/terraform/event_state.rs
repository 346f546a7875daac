//! The state of the running operation, from the tool's events. The reader of the tool's output updates it without
//! blocking. The publisher reads it at any time.

use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::Notify;

use crate::terraform::lock_error::{LockWatch, without_colours};
use crate::terraform::progress::Progress;
use crate::terraform::structured::Structured;

/// The combined events of one operation. Clones share it.
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

    /// Processes one event of the tool.
    pub fn event(&self, event: &Value) {
        let mut summary = self.lock();
        summary.structured.event(event);
        summary.progress.event(event);
        summary.lock.event(event);
        drop(summary);
        self.0.changed.notify_one();
    }

    /// Processes one line of a tool that writes no JSON.
    pub fn line(&self, line: &[u8]) {
        let line = without_colours(&String::from_utf8_lossy(line));
        let mut summary = self.lock();
        summary.progress.line(&line);
        summary.lock.line(&line);
    }

    /// Keeps the state that the tool printed because no disk accepted it.
    pub fn state(&self, state: Bytes) {
        self.lock().state = Some(state);
    }

    /// The printed state, if there is one.
    pub fn printed_state(&self) -> Option<Bytes> {
        self.lock().state.clone()
    }

    /// Removes and returns the changes at the end of the operation.
    pub fn take(&self) -> Structured {
        std::mem::take(&mut self.lock().structured)
    }

    /// The progress of the operation.
    pub fn progress(&self) -> Progress {
        self.lock().progress.clone()
    }

    /// The locks that the tool reported.
    pub fn locks(&self) -> LockWatch {
        self.lock().lock.clone()
    }

    /// Waits for the next change.
    pub async fn changed(&self) {
        self.0.changed.notified().await;
    }

    /// The current changes and diagnostics.
    pub fn snapshot(&self) -> (Value, Value) {
        let summary = self.lock();
        (
            summary.structured.changes(),
            summary.structured.diagnostics(),
        )
    }

    fn lock(&self) -> MutexGuard<'_, Summary> {
        // If an update panicked, at worst an event is missing in the counts.
        runtime::lock(&self.0.summary)
    }
}
