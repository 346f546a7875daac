//! Faults that tests order: matching requests fail in a given way.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::records::Status;

/// How a request fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// This status, and nothing is done.
    Status(u16),
    /// This status and a number of seconds to wait, and nothing is done.
    RetryAfter(u16, u64),
    /// A redirect to that address, and nothing is done.
    Redirect(&'static str),
    /// This status, after the work is done.
    StatusAfter(u16),
    /// The request is handled after this time.
    Slow(Duration),
    /// The request is answered. After that its job has this status.
    Then(Status),
    /// The connection ends before anything is done.
    DropBefore,
    /// The connection ends after the work is done, before the answer.
    DropAfter,
}

/// Which requests fail, how, and how often.
#[derive(Debug, Clone)]
pub struct Fault {
    pub method: &'static str,
    /// What the path contains. With `$` at its end: what the path without its query ends with. Empty is any.
    pub path: String,
    pub effect: Effect,
    /// How many requests fail.
    pub times: usize,
}

impl Fault {
    /// The next matching request fails.
    pub fn once(method: &'static str, path: &str, effect: Effect) -> Self {
        Self {
            method,
            path: path.to_owned(),
            effect,
            times: 1,
        }
    }

    /// All matching requests fail until the faults are cleared.
    pub fn always(method: &'static str, path: &str, effect: Effect) -> Self {
        Self {
            times: usize::MAX,
            ..Self::once(method, path, effect)
        }
    }
}

impl Fault {
    fn is_about(&self, path: &str) -> bool {
        match self.path.strip_suffix('$') {
            Some(end) => path.split('?').next().unwrap_or(path).ends_with(end),
            None => path.contains(&self.path),
        }
    }
}

/// The ordered faults that have not happened.
#[derive(Debug, Default)]
pub(crate) struct Faults(Mutex<Vec<Fault>>);

impl Faults {
    pub(crate) fn order(&self, fault: Fault) {
        self.lock().push(fault);
    }

    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    /// How many requests of this method will fail.
    pub(crate) fn left(&self, method: &str) -> usize {
        let faults = self.lock();
        let of_method = faults.iter().filter(|fault| fault.method == method);
        of_method.fold(0, |left, fault| left.saturating_add(fault.times))
    }

    pub(crate) fn take(&self, method: &str, path: &str) -> Option<Effect> {
        let mut faults = self.lock();
        let hit = |fault: &&mut Fault| fault.method == method && fault.is_about(path);
        let fault = faults.iter_mut().find(hit)?;
        fault.times -= 1;
        let effect = fault.effect;
        faults.retain(|fault| fault.times > 0);
        Some(effect)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Fault>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
