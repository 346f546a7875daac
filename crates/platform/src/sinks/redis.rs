//! Writes the live log to a stream in Redis. People and the tool's remote client read it during the run (contract 7.3).
//!
//! A batch of lines is one transaction, so Redis has all of it or nothing. If the answer is lost, the sink reads the stream
//! after the last known entry: our lines there have their numbers. So no line is lost or written twice, as long as Redis
//! keeps what it has acknowledged.
//!
//! Newer platforms delete the stream a moment after they have recorded the dispatch, and so maybe after the first lines. Nothing says
//! when. So the sink keeps these lines for a while, looks for its last entry with each batch and in between, and writes all of
//! them again if it is gone. It does not after an order to stop the run: the platform also deletes the stream of a cancelled
//! job, and does not come back to it.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::time::{Duration, Instant};

use job_contract::chain;
use run_log::{Batch, LINE_BYTES, Sink, SinkError};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::java;
use crate::redis::{Field, Redis, RedisError, Retention, StoredEntry, StreamEntry};

/// The consumer groups of the platform. None of its programs reads through them, but their creation creates the stream.
const GROUPS: [&str; 2] = ["CLI", "UI"];
/// How many entries are read at a time to find lines that may have been written.
const LOOK_BACK: usize = 500;
/// How many entries are copied at a time. An executor's lines may have 1 MiB.
const COPIED: usize = 32;
/// How long after the first line the platform may still delete the stream. Its lock on a job that it dispatches lasts 90 s.
const DISPATCH_LIMIT: Duration = Duration::from_mins(2);
/// How much of the first lines is kept for that: of each its text and [`LINE_BYTES`]. A run with more has written for a while.
const KEPT_BYTES: u64 = 1024 * 1024;
/// How many lines are sent at a time. Each takes about 2 KiB on its way, however short it is.
const SENT_LINES: usize = 1000;
/// The pauses between two checks of the stream.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The stream, and the step that writes.
#[derive(Clone, Debug)]
pub struct RedisLog {
    pub redis: Redis,
    /// The job; all its steps share the stream.
    pub job_id: String,
    pub step_id: String,
    /// Is cancelled when the run is to stop. Lines that are deleted then stay deleted.
    pub stop: CancellationToken,
}

/// Writes to the stream of a job.
#[derive(Debug)]
pub struct RedisSink {
    redis: Redis,
    stream: Stream,
    /// The thread that uses the runtime must also create and drop it.
    runtime: Option<Runtime>,
    state: State,
    stop: CancellationToken,
    /// `None` when the platform deletes the stream no more.
    beginning: Option<Beginning>,
}

/// The first lines, which the platform may delete.
#[derive(Debug)]
struct Beginning {
    /// When the first one was written.
    since: Option<Instant>,
    /// With their numbers.
    lines: Vec<(u64, Box<[u8]>)>,
    bytes: u64,
    pause: Duration,
}

impl Beginning {
    const fn new() -> Self {
        Self {
            since: None,
            lines: Vec::new(),
            bytes: 0,
            pause: FIRST_PAUSE,
        }
    }

    fn is_over(&self) -> bool {
        let is_late = |since: Instant| since.elapsed() > DISPATCH_LIMIT;
        self.bytes > KEPT_BYTES || self.since.is_some_and(is_late)
    }

    fn keep(&mut self, first_line: u64, lines: &[&[u8]]) {
        self.since.get_or_insert_with(Instant::now);
        for (number, line) in (first_line..).zip(lines) {
            self.bytes += line.len() as u64 + LINE_BYTES;
            self.lines.push((number, (*line).into()));
        }
    }
}

/// What the sink knows about the end of the stream.
#[derive(Debug)]
enum State {
    Unknown,
    Known(Position),
    /// Our lines may have been added after this entry.
    InDoubt(Position),
    /// The platform has deleted lines of ours.
    Deleted,
}

/// Id of an entry. `None` is the beginning of the stream.
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

    fn check(&mut self) -> Option<Duration> {
        self.beginning.take_if(|beginning| beginning.is_over());
        let beginning = self.beginning.as_mut()?;
        let pause = beginning.pause;
        beginning.pause = (pause * 2).min(LONGEST_PAUSE);
        // Before the first line there is no runtime, and nothing to check.
        if let Some(runtime) = self.runtime.take() {
            if let Err(error) = runtime.block_on(self.check_stream()) {
                debug!(
                    error = chain(&error),
                    "could not check the stream of the live log"
                );
            }
            self.runtime = Some(runtime);
        }
        Some(pause)
    }
}

impl RedisSink {
    /// A sink that does not connect yet.
    pub fn new(log: &RedisLog) -> Self {
        Self {
            redis: log.redis.separate(),
            stream: Stream::new(&log.job_id, &log.step_id),
            runtime: None,
            state: State::Unknown,
            stop: log.stop.clone(),
            beginning: Some(Beginning::new()),
        }
    }

    async fn add(&mut self, batch: Batch<'_>) -> Result<usize, RedisError> {
        let lines = batch.text.split_inclusive(|byte| *byte == b'\n');
        let lines: Vec<&[u8]> = lines.take(SENT_LINES).collect();
        let entries: Vec<_> = (batch.first_line..)
            .zip(&lines)
            .map(|(number, line)| self.stream.entry(number, line))
            .collect();
        loop {
            let (position, there) = self.find_end(batch.first_line).await?;
            let there = usize::try_from(there).unwrap_or(usize::MAX);
            if there > 0 {
                self.state = State::Known(position);
                self.keep(batch.first_line, &lines[..there.min(lines.len())]);
                return Ok(lines.iter().take(there).map(|line| line.len()).sum());
            }
            let after = position.as_deref();
            let appended = self
                .redis
                .append_after(&self.stream.key, after, &entries)
                .await;
            match appended {
                Ok(appended) if !appended.follows && self.may_restore() => {
                    self.state = State::Deleted;
                }
                Ok(appended) => {
                    self.state = State::Known(appended.last_id.or(position));
                    self.keep(batch.first_line, &lines);
                    return Ok(lines.iter().map(|line| line.len()).sum());
                }
                Err(error) => {
                    self.state = State::InDoubt(position);
                    return Err(error);
                }
            }
        }
    }

    /// Returns the last entry of the stream, and how many lines from `first_line` on are in it.
    async fn find_end(&mut self, first_line: u64) -> Result<(Position, u64), RedisError> {
        match std::mem::replace(&mut self.state, State::Unknown) {
            State::Known(position) => Ok((position, 0)),
            State::Unknown => Ok((self.open().await?, 0)),
            State::Deleted => Ok((self.restore().await?, 0)),
            State::InDoubt(position) => match self.look_back(&position, first_line).await {
                Ok(Some(found)) => Ok(found),
                Ok(None) => Ok((self.restore().await?, 0)),
                Err(error) => {
                    self.state = State::InDoubt(position);
                    Err(error)
                }
            },
        }
    }

    /// Keeps lines that the stream has.
    fn keep(&mut self, first_line: u64, lines: &[&[u8]]) {
        if let Some(beginning) = &mut self.beginning {
            beginning.keep(first_line, lines);
        }
        self.beginning.take_if(|beginning| beginning.is_over());
    }

    async fn check_stream(&mut self) -> Result<(), RedisError> {
        let is_deleted = match &self.state {
            State::Known(Some(id)) => !self.redis.has_entry(&self.stream.key, id).await?,
            State::Deleted => true,
            State::Known(None) | State::Unknown | State::InDoubt(_) => false,
        };
        if is_deleted && self.may_restore() {
            self.state = State::Known(self.restore().await?);
        }
        Ok(())
    }

    fn may_restore(&self) -> bool {
        self.beginning.is_some() && !self.stop.is_cancelled()
    }

    /// Writes the first lines again, in the place of those that came after the deletion. Returns the last entry.
    async fn restore(&mut self) -> Result<Position, RedisError> {
        // Also after an error: what it may have written is found and replaced the next time.
        self.state = State::Deleted;
        let mut last = None;
        if let Some(beginning) = &self.beginning {
            let later = self.own_entries().await?;
            // If the order to stop came meanwhile, the caller writes only its own lines again.
            let lines: &[(u64, Box<[u8]>)] = if self.may_restore() {
                &beginning.lines
            } else {
                &[]
            };
            let entries: Vec<_> = lines
                .iter()
                .map(|(number, line)| self.stream.entry(*number, line))
                .collect();
            let added = self.redis.replace(&self.stream.key, &later, &entries);
            last = added.await?;
        }
        // The stream may be deleted again by now. The next look at the last line shows that.
        let end = self.open().await?;
        Ok(last.or(end))
    }

    /// The ids of the run's lines.
    async fn own_entries(&self) -> Result<Vec<String>, RedisError> {
        let (mut own, mut last) = (Vec::new(), None::<String>);
        loop {
            let after = last.as_deref();
            let entries = self
                .redis
                .entries_after(&self.stream.key, after, LOOK_BACK)
                .await?;
            let is_end = entries.len() < LOOK_BACK;
            for entry in entries {
                // Remarks have the number 0.
                if self
                    .stream
                    .line_number(&entry)
                    .is_some_and(|number| number > 0)
                {
                    own.push(entry.id.clone());
                }
                last = Some(entry.id);
            }
            if is_end {
                return Ok(own);
            }
        }
    }

    /// Creates the groups and finds the end of the stream.
    async fn open(&self) -> Result<Position, RedisError> {
        for group in GROUPS {
            self.redis.create_group(&self.stream.key, group).await?;
        }
        self.redis.last_id(&self.stream.key).await
    }

    /// Returns the last entry, and how many lines from `first_line` on are in the stream. `None` if lines before them were deleted.
    async fn look_back(
        &self,
        position: &Position,
        first_line: u64,
    ) -> Result<Option<(Position, u64)>, RedisError> {
        if let (Some(id), Some(_)) = (position, &self.beginning)
            && !self.redis.has_entry(&self.stream.key, id).await?
        {
            return Ok(None);
        }
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
                return Ok(Some((last, next_line - first_line)));
            }
        }
    }
}

/// What to do with a line that is in the stream already, with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeated {
    /// Several executors may have written, and begin with the same lines.
    Keep,
    /// Lines came through the API. Those whose answer was lost came twice.
    Skip,
}

/// The stream of a job's log for other writers than the run, which write before the run's log begins or after it was
/// interrupted.
#[derive(Clone, Debug)]
pub struct JobStream {
    redis: Redis,
    stream: Stream,
}

impl JobStream {
    /// The stream of a job. Its entries belong to one step. This does not connect yet.
    pub fn new(redis: &Redis, job_id: &str, step_id: &str) -> Self {
        Self {
            redis: redis.clone(),
            stream: Stream::new(job_id, step_id),
        }
    }

    /// Adds lines that are not part of the run's log. They have the number 0, so that the run's sink ignores them.
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

    /// Writes the lines of the step that are in the stream now. At most `limit` bytes are read: each entry counts
    /// [`LINE_BYTES`], and the text of the step. A run decides how long its lines are and how many, so few are in memory at
    /// a time.
    pub async fn copy(
        &self,
        target: &mut (impl io::Write + Send),
        limit: u64,
        repeated: Repeated,
    ) -> Result<(), CopyError> {
        let key = &self.stream.key;
        // What is added meanwhile does not prolong the copy.
        let Some(end) = self.redis.last_id(key).await? else {
            return Ok(());
        };
        let (mut left, mut last) = (limit, None);
        let mut known = HashSet::new();
        loop {
            let after = last.as_deref();
            let entries = self.redis.entries_after(key, after, COPIED).await?;
            let Some(entry) = entries.last() else {
                return Ok(());
            };
            last = Some(entry.id.clone());
            for entry in &entries {
                let line = self.stream.output(entry);
                let length = line.as_ref().map_or(0, String::len) as u64;
                let Some(rest) = left.checked_sub(LINE_BYTES + length) else {
                    return Ok(());
                };
                left = rest;
                // Remarks have the number 0.
                let number = self.stream.line_number(entry).unwrap_or_default();
                let may_be_known = repeated == Repeated::Skip && number > 0;
                let is_new = |line: &String| !may_be_known || known.insert((number, hash(line)));
                if let Some(line) = line.filter(is_new) {
                    writeln!(target, "{line}")?;
                }
                if entry.id == end {
                    return Ok(());
                }
            }
        }
    }
}

/// A live log could not be copied.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error(transparent)]
    Redis(#[from] RedisError),
    #[error("the copy could not be written")]
    Write(#[from] io::Error),
}

fn hash(line: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    line.hash(&mut hasher);
    hasher.finish()
}

/// The stream of a job with the entries of one step.
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

    /// The entry of a line. Readers add the line break themselves.
    fn entry(&self, number: u64, line: &[u8]) -> StreamEntry {
        let text = String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(line));
        vec![
            self.job_id.clone(),
            self.step_id.clone(),
            field("lineNumber", &number.to_string()),
            field("output", &text),
        ]
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
        if !entry.entry.contains(&self.step_id) {
            return None;
        }
        let name = java::encode(name);
        let (_, value) = entry.entry.iter().find(|(known, _)| *known == name)?;
        java::decode(value)
    }
}

fn field(name: &str, value: &str) -> Field {
    (java::encode(name), java::encode(value))
}
