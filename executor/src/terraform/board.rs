//! The changes of the operation that runs, where whoever shows them can look at any time: the reader of the tool's
//! events keeps the account and waits for nobody.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tokio::sync::Notify;

use crate::terraform::structured::Structured;

/// The account of one operation. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Board(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    structured: Mutex<Structured>,
    changed: Notify,
}

impl Board {
    /// Starts from this account.
    pub fn begin(&self, structured: Structured) {
        *self.lock() = structured;
        self.0.changed.notify_one();
    }

    /// Takes one event of the tool.
    pub fn event(&self, event: &Value) {
        self.lock().event(event);
        self.0.changed.notify_one();
    }

    /// The account at the end; an empty one is left.
    pub fn take(&self) -> Structured {
        std::mem::take(&mut *self.lock())
    }

    /// Returns once something has changed since the last time.
    pub async fn changed(&self) {
        self.0.changed.notified().await;
    }

    /// Changes and diagnostics as they are now.
    pub fn picture(&self) -> (Value, Value) {
        let structured = self.lock();
        (structured.changes(), structured.diagnostics())
    }

    fn lock(&self) -> MutexGuard<'_, Structured> {
        // An event that panicked has at worst counted too little.
        self.0
            .structured
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
