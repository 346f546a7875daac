//! The paused clock of a test in which real sockets, processes or threads take part.

use std::sync::mpsc;

use tokio::task::spawn_blocking;

use crate::wait::DEADLINE;

/// A paused clock that only `advance` moves, until this is dropped.
#[derive(Debug)]
pub struct HeldClock {
    _held: mpsc::Sender<()>,
}

/// Holds the paused clock of this test. Without this, it moves by itself while the test waits for something real. A test that hangs
/// gets the moving clock again after the usual deadline.
#[must_use]
pub fn hold_clock() -> HeldClock {
    let (held, release) = mpsc::channel();
    // The clock does not move by itself while a blocking task runs.
    spawn_blocking(move || release.recv_timeout(DEADLINE));
    HeldClock { _held: held }
}
