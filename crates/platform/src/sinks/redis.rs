//! The stream in Redis from which people and the tool's remote client read a run's log while it runs (contract 7.3).
//!
//! Lines are added in transactions, so that a batch is there as a whole or not at all. When the answer to one is lost,
//! the stream itself says whether it arrived: our lines behind the last entry we know of carry their numbers. So
//! nothing is lost and nothing doubled, as long as Redis keeps what it acknowledged.

use std::io;

use job_contract::chain;
use run_log::{Batch, Sink, SinkError};
use tokio::runtime::Runtime;

use crate::java;
use crate::redis::{Entry, Field, Redis, RedisError, Retention, StoredEntry};

/// Readers the platform makes; none of its programs reads through them, but they make the stream.
const GROUPS: [&str; 2] = ["CLI", "UI"];
/// How much of the stream is looked through at a time for lines whose fate is unknown.
const LOOK_BACK: usize = 500;

/// Which stream, and as whom.
#[derive(Clone, Debug)]
pub struct RedisLog {
    /// Where it is.
    pub redis: Redis,
    /// The job; all its steps share the stream.
    pub job_id: String,
    /// The step that writes.
    pub step_id: String,
}

/// Writes to the stream of a job.
#[derive(Debug)]
pub struct RedisSink {
    redis: Redis,
    stream: Stream,
    /// Made by the thread that uses it, and dropped there: no other may.
    runtime: Option<Runtime>,
    state: State,
}

/// What is known of the stream.
#[derive(Debug)]
enum State {
    /// Not asked yet.
    Unknown,
    /// We know its last entry, which is ours or was there before us.
    Known(Position),
    /// Something may have been added behind it.
    InDoubt(Position),
}

/// Id of an entry; none is the beginning of the stream.
type Position = Option<String>;

impl Sink for RedisSink {
    fn name(&self) -> String {
        format!("redis {}", self.redis.address())
    }

    fn deliver(&mut self, batch: Batch<'_>) -> Result<usize, SinkError> {
        let runtime = match self.runtime.take() {
            Some(runtime) => runtime,
            None => tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(SinkError::Unavailable)?,
        };
        let taken = runtime.block_on(self.add(batch));
        self.runtime = Some(runtime);
        taken.map_err(|error| SinkError::Unavailable(io::Error::other(chain(&error))))
    }
}

impl RedisSink {
    /// Nothing is asked of Redis yet.
    pub fn new(log: &RedisLog) -> Self {
        Self {
            redis: log.redis.separate(),
            stream: Stream::new(&log.job_id, &log.step_id),
            runtime: None,
            state: State::Unknown,
        }
    }

    async fn add(&mut self, batch: Batch<'_>) -> Result<usize, RedisError> {
        let (position, there) = match std::mem::replace(&mut self.state, State::Unknown) {
            State::Known(position) => (position, 0),
            State::Unknown => (self.open().await?, 0),
            State::InDoubt(position) => match self.look_back(&position, batch.first_line).await {
                Ok(found) => found,
                Err(error) => {
                    self.state = State::InDoubt(position);
                    return Err(error);
                }
            },
        };
        let lines: Vec<&[u8]> = batch.text.split_inclusive(|byte| *byte == b'\n').collect();
        let there = usize::try_from(there).unwrap_or(usize::MAX);
        if there > 0 {
            self.state = State::Known(position);
            return Ok(lines.iter().take(there).map(|line| line.len()).sum());
        }
        let entries: Vec<_> = (batch.first_line..)
            .zip(&lines)
            .map(|(number, line)| self.stream.entry(number, line))
            .collect();
        match self
            .redis
            .append(&self.stream.key, &entries, Retention::default())
            .await
        {
            Ok(ids) => {
                self.state = State::Known(ids.into_iter().next_back().or(position));
                Ok(batch.text.len())
            }
            Err(error) => {
                self.state = State::InDoubt(position);
                Err(error)
            }
        }
    }

    /// Makes the groups and finds the end of the stream.
    async fn open(&self) -> Result<Position, RedisError> {
        for group in GROUPS {
            self.redis.create_group(&self.stream.key, group).await?;
        }
        self.redis.last_id(&self.stream.key).await
    }

    /// Where the stream ends for us, and how many lines from `first_line` on are there.
    async fn look_back(
        &self,
        position: &Position,
        first_line: u64,
    ) -> Result<(Position, u64), RedisError> {
        let mut last = position.clone();
        let mut next_line = first_line;
        loop {
            let entries = self
                .redis
                .entries_after(&self.stream.key, last.as_deref(), LOOK_BACK)
                .await?;
            let is_end = entries.len() < LOOK_BACK;
            for entry in entries {
                if let Some(number) = self.stream.line_number(&entry) {
                    next_line = next_line.max(number + 1);
                }
                last = Some(entry.id);
            }
            if is_end {
                return Ok((last, next_line - first_line));
            }
        }
    }
}

/// The stream of a job's log for writers outside of the run, which write before the run's own log
/// begins, or after it broke off.
#[derive(Clone, Debug)]
pub struct JobStream {
    redis: Redis,
    stream: Stream,
}

impl JobStream {
    /// The stream of a job, in the name of one of its steps. Nothing is asked of Redis yet.
    pub fn new(redis: &Redis, job_id: &str, step_id: &str) -> Self {
        Self {
            redis: redis.clone(),
            stream: Stream::new(job_id, step_id),
        }
    }

    /// Adds lines that are no part of the run's own log. They are numbered 0, so that they are not taken for its lines.
    pub async fn remark(&self, text: &str) -> Result<(), RedisError> {
        let entries: Vec<_> = text
            .lines()
            .map(|line| self.stream.entry(0, line.as_bytes()))
            .collect();
        self.redis
            .append(&self.stream.key, &entries, Retention::default())
            .await
            .map(drop)
    }

    /// What the step has written so far, as far as it is still there; at most the first `limit` bytes and the line in
    /// which they end.
    pub async fn text(&self, limit: usize) -> Result<String, RedisError> {
        let (mut text, mut last) = (String::new(), None);
        while text.len() < limit {
            let entries = self
                .redis
                .entries_after(&self.stream.key, last.as_deref(), LOOK_BACK)
                .await?;
            let Some(entry) = entries.last() else { break };
            last = Some(entry.id.clone());
            for line in entries.iter().filter_map(|entry| self.stream.output(entry)) {
                text.push_str(&line);
                text.push('\n');
            }
        }
        Ok(text)
    }
}

/// The stream of a job as one step writes it.
#[derive(Clone, Debug)]
struct Stream {
    key: Vec<u8>,
    job_id: Field,
    step_id: Field,
}

impl Stream {
    fn new(job_id: &str, step_id: &str) -> Self {
        Self {
            key: java::encode(job_id),
            job_id: field("jobId", job_id),
            step_id: field("stepId", step_id),
        }
    }

    /// Readers end lines themselves.
    fn entry(&self, number: u64, line: &[u8]) -> Entry {
        let text = String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(line));
        Entry(vec![
            self.job_id.clone(),
            self.step_id.clone(),
            field("lineNumber", &number.to_string()),
            field("output", &text),
        ])
    }

    /// The number of a line of this step.
    fn line_number(&self, entry: &StoredEntry) -> Option<u64> {
        self.own_field(entry, "lineNumber")?.parse().ok()
    }

    /// The text of a line of this step.
    fn output(&self, entry: &StoredEntry) -> Option<String> {
        self.own_field(entry, "output")
    }

    fn own_field(&self, entry: &StoredEntry, name: &str) -> Option<String> {
        let Entry(fields) = &entry.entry;
        if !fields.contains(&self.step_id) {
            return None;
        }
        let name = java::encode(name);
        let (_, value) = fields.iter().find(|(known, _)| *known == name)?;
        java::decode(value).ok()
    }
}

fn field(name: &str, value: &str) -> Field {
    (java::encode(name), java::encode(value))
}
