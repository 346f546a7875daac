//! The interface of a sink: it accepts text in order, or returns why it cannot.
//!
//! Each sink has its own thread, so it may block, or use an asynchronous client with its own runtime. This delays neither
//! the run nor other sinks.

use std::fmt;
use std::io;
use std::time::Duration;

/// Text for a sink.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Redacted UTF-8 that ends with a line. It begins within a line only if the sink accepted a part of that line before.
    pub text: &'a [u8],
    /// Number of the first line in the run, from 1 on. Lost lines have numbers too. A repeated line keeps its number, so a
    /// sink can recognise repetitions.
    pub first_line: u64,
    /// Whether the log has ended: no line follows but those that wait already.
    pub is_over: bool,
}

/// Why a sink accepted nothing.
#[derive(Debug)]
pub enum SinkError {
    /// The reader is slow, which is no error. Returned after at most [`POLL_INTERVAL`](crate::POLL_INTERVAL).
    Busy,
    /// The text is taken together with what follows within this time, or at the end of the log.
    Early(Duration),
    /// A retry after a pause may succeed.
    Unavailable(io::Error),
    /// The receiver does not exist any more.
    Gone(io::Error),
}

/// A destination of a run's log.
pub trait Sink: fmt::Debug + Send {
    /// The name in messages.
    fn name(&self) -> String;

    /// Accepts the beginning of a batch and returns its length in bytes, at least one.
    fn deliver(&mut self, batch: Batch<'_>) -> Result<usize, SinkError>;

    /// Checks that the receiver still has what it accepted. The sink's thread calls it while no text waits, and at the end of the
    /// log. Returns after which time to call it again; `None` if never.
    fn check(&mut self) -> Option<Duration> {
        None
    }
}
