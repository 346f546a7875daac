//! Ends the process before a statement, as a crash does.

use std::sync::atomic::{AtomicU64, Ordering};

/// Names the statement before which the process ends: 1 is the first.
pub(crate) const KILL_AT: &str = "POOL_STORE_TEST_KILL_AT";

static REACHED: AtomicU64 = AtomicU64::new(0);

/// A statement is about to run.
pub(crate) fn reached() {
    let number = REACHED.fetch_add(1, Ordering::SeqCst) + 1;
    let kill_at = std::env::var(KILL_AT).ok();
    if kill_at.and_then(|number| number.parse().ok()) == Some(number) {
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).unwrap();
    }
}
