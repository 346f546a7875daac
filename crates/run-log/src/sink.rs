//! What a sink is to the log: something that takes text in order, or says why it cannot.
//!
//! Each sink has a thread of its own, so that it may block, or drive an asynchronous client with a runtime handle
//! of its own, without any other sink or the run noticing.

use std::fmt;
use std::io;

/// Text on its way to a sink.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Redacted UTF-8 up to the end of a line. It begins within a line only where the sink itself stopped.
    pub text: &'a [u8],
    /// Number of the first line in the run, from 1 on; the number of lost lines is skipped. A line keeps its
    /// number however often it is tried, so sinks that cannot know what arrived can tell repetitions.
    pub first_line: u64,
}

/// Why a sink took nothing.
#[derive(Debug)]
pub enum SinkError {
    /// The reader is slow; no fault. Returned after at most [`POLL_INTERVAL`](crate::POLL_INTERVAL).
    Busy,
    /// Worth trying again, after a pause.
    Unavailable(io::Error),
    /// The receiver is gone.
    Gone(io::Error),
}

/// A place where a run's log goes.
pub trait Sink: fmt::Debug + Send {
    /// For messages.
    fn name(&self) -> String;

    /// Takes the beginning of a batch and returns how many bytes that was, at least one.
    fn deliver(&mut self, batch: Batch<'_>) -> Result<usize, SinkError>;
}
