//! Kills the process before a statement, to simulate a crash.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of the statement before which the process is killed. 1 is the first.
pub(crate) const KILL_AT: &str = "POOL_STORE_TEST_KILL_AT";

static REACHED: AtomicU64 = AtomicU64::new(0);

/// Counts a statement that is about to run.
pub(crate) fn reached() {
    let number = REACHED.fetch_add(1, Ordering::SeqCst) + 1;
    let kill_at = std::env::var(KILL_AT).ok();
    if kill_at.and_then(|number| number.parse().ok()) == Some(number) {
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).unwrap();
    }
}
