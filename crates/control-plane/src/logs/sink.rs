//! What a sink is to the log: something that takes text in order, or says why it cannot.
//!
//! Each sink has a thread of its own, so that it may block, or drive an asynchronous client with a runtime handle
//! of its own, without any other sink or the run noticing.

use std::io;
use std::path::PathBuf;

use super::api::{ApiLog, ApiSink};
use super::file::FileSink;
use super::limited::LimitedSink;
use super::redis::{RedisLog, RedisSink};
use super::stdout::StdoutSink;

/// Where a run's log goes.
#[derive(Clone, Debug)]
pub enum SinkConfig {
    /// Standard output of this process.
    Stdout,
    /// A file, created 0600 and appended to.
    File(PathBuf),
    /// The job's stream in Redis (contract 7.3).
    Redis(RedisLog),
    /// The platform's API, which adds to the same stream (contract 7.7).
    Api(ApiLog),
    /// The beginning of the log alone. Then a line says where the rest is.
    Limited {
        /// Gets the beginning.
        sink: Box<Self>,
        /// Bytes of the lines, and 128 more for each.
        max_bytes: u64,
    },
}

/// Text on its way to a sink.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch<'a> {
    /// Redacted UTF-8 up to the end of a line. It begins within a line only where the sink itself stopped.
    pub(super) text: &'a [u8],
    /// Number of the first line in the run, from 1 on; the number of lost lines is skipped. A line keeps its
    /// number however often it is tried, so sinks that cannot know what arrived can tell repetitions.
    pub(super) first_line: u64,
}

/// Why a sink took nothing.
#[derive(Debug)]
pub(super) enum SinkError {
    /// The reader is slow; no fault. Returned after at most [`POLL_INTERVAL`](super::POLL_INTERVAL).
    Busy,
    /// Worth trying again, after a pause.
    Unavailable(io::Error),
    /// There is nobody left to deliver to.
    Gone(io::Error),
}

/// An open sink.
#[derive(Debug)]
pub(super) enum Sink {
    Stdout(StdoutSink),
    File(FileSink),
    Redis(RedisSink),
    Api(ApiSink),
    Limited(Box<LimitedSink>),
}

impl Sink {
    pub(super) fn open(config: SinkConfig) -> io::Result<Self> {
        Ok(match config {
            SinkConfig::Stdout => Self::Stdout(StdoutSink::new()?),
            SinkConfig::File(path) => Self::File(FileSink::new(path)),
            SinkConfig::Redis(log) => Self::Redis(RedisSink::new(&log)),
            SinkConfig::Api(log) => Self::Api(ApiSink::new(log)),
            SinkConfig::Limited { sink, max_bytes } => {
                let sink = Self::open(*sink)?;
                Self::Limited(Box::new(LimitedSink::new(sink, max_bytes)))
            }
        })
    }

    /// For messages.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Stdout(_) => "stdout".to_owned(),
            Self::File(sink) => sink.path().display().to_string(),
            Self::Redis(sink) => sink.name(),
            Self::Api(sink) => sink.name(),
            Self::Limited(sink) => sink.name(),
        }
    }

    /// Hands over the beginning of a batch and returns how many bytes were taken, at least one.
    pub(super) fn deliver(&mut self, batch: Batch<'_>) -> Result<usize, SinkError> {
        match self {
            Self::Stdout(sink) => sink.deliver(batch.text),
            Self::File(sink) => sink.deliver(batch.text),
            Self::Redis(sink) => sink.deliver(batch),
            Self::Api(sink) => sink.deliver(batch),
            Self::Limited(sink) => sink.deliver(batch),
        }
    }
}
