//! The account of the operation that runs, where whoever shows it can look at any time: the reader of the tool's
//! output keeps it and waits for nobody.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::Notify;

use crate::terraform::lock::{LockWatch, without_colours};
use crate::terraform::progress::Progress;
use crate::terraform::structured::Structured;

/// The account of one operation. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Board(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    account: Mutex<Account>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Account {
    structured: Structured,
    progress: Progress,
    lock: LockWatch,
    state: Option<Bytes>,
}

impl Board {
    /// Starts from this account.
    pub fn begin(&self, structured: Structured) {
        *self.lock() = Account {
            structured,
            ..Account::default()
        };
        self.0.changed.notify_one();
    }

    /// Takes one event of the tool.
    pub fn event(&self, event: &Value) {
        let mut account = self.lock();
        account.structured.event(event);
        account.progress.event(event);
        account.lock.event(event);
        drop(account);
        self.0.changed.notify_one();
    }

    /// Takes one line of a tool that speaks no JSON.
    pub fn line(&self, line: &[u8]) {
        let line = without_colours(&String::from_utf8_lossy(line));
        let mut account = self.lock();
        account.progress.line(&line);
        account.lock.line(&line);
    }

    /// Takes the state the tool printed because no disk took it.
    pub fn state(&self, state: Bytes) {
        self.lock().state = Some(state);
    }

    /// The state the tool printed, if it did.
    pub fn state_said(&self) -> Option<Bytes> {
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
        let account = self.lock();
        (
            account.structured.changes(),
            account.structured.diagnostics(),
        )
    }

    fn lock(&self) -> MutexGuard<'_, Account> {
        // An event that panicked has at worst counted too little.
        self.0
            .account
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
