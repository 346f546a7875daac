//! The run log, from the bytes of the tool to all sinks:
//!
//! bytes → lines → redaction → spool on disk → sinks
//!
//! Writers split their bytes into lines and redact them in the caller's task. One thread appends the lines to the spool.
//! Each sink has its own thread that reads the spool from its own position. So memory stays small if a sink is far behind,
//! and a sink that fails delays no writer. Writers wait for the disk, never for a sink.
//!
//! All of this blocks on disks, pipes and terminals, sometimes without limit. So it uses threads: a blocked thread of the
//! runtime's pool would prevent the runtime's shutdown.
//!
//! This crate does not know what is written, or why.

mod delivery;
mod encodings;
mod feed;
mod file;
mod index;
mod limited;
mod lines;
mod redact;
mod secrets;
mod sink;
mod split_secrets;
mod spool;
mod stdout;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use runtime::Deadline;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

use self::feed::Feed;
use self::lines::{LineBuffer, count_lines};
use self::spool::{Command, Spool};

pub use self::file::FileSink;
pub use self::limited::{LINE_BYTES, LimitedSink};
pub use self::lines::{char_boundary, whole_lines_len};
pub use self::redact::{MASK, Redactor};
pub use self::secrets::{secrets_in, secrets_of};
pub use self::sink::{Batch, Sink, SinkError};
pub use self::stdout::StdoutSink;

/// The largest part of a chunk that is processed at a time.
const CHUNK_BYTES: usize = 64 * 1024;
/// How many bytes may wait for the spool.
const IN_FLIGHT_BYTES: usize = 512 * 1024;
/// How long the end of a run waits for a sink that has never accepted a line.
const FIRST_DELIVERY: Duration = Duration::from_secs(10);
/// How often a thread that waits for a reader checks its deadline.
pub const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The folder and the limits of a log.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// Existing folder, private to the run.
    pub spool_dir: PathBuf,
    /// Longer lines are split.
    pub max_line_bytes: usize,
    /// The largest size of the spool. Later lines reach only sinks that are fast enough.
    pub max_spool_bytes: u64,
}

impl LogConfig {
    /// The default limits: 1 MiB for a line, 2 GiB for the log.
    pub fn new(spool_dir: impl Into<PathBuf>) -> Self {
        Self {
            spool_dir: spool_dir.into(),
            max_line_bytes: 1024 * 1024,
            max_spool_bytes: 2 * 1024 * 1024 * 1024,
        }
    }
}

/// Why a log could not be started.
#[derive(Debug, thiserror::Error)]
#[error("could not {action}")]
pub struct LogError {
    /// A verb phrase.
    action: String,
    #[source]
    source: io::Error,
}

impl LogError {
    fn new(action: impl Into<String>, source: io::Error) -> Self {
        let action = action.into();
        Self { action, source }
    }
}

/// The result of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSummary {
    pub lines: u64,
    /// The log on disk, with the number of missing lines.
    pub spool: SpoolSummary,
    /// One for each sink, in the order of [`RunLog::start`].
    pub sinks: Vec<SinkSummary>,
}

impl LogSummary {
    /// Whether the spool and all sinks have every line.
    pub fn is_complete(&self) -> bool {
        self.spool.missing == 0 && self.sinks.iter().all(|sink| sink.lost == 0)
    }
}

/// The result of the log on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpoolSummary {
    pub path: PathBuf,
    pub bytes: u64,
    pub lines: u64,
    /// Lines that are missing because the disk or the limit was full. A notice replaces them in the file.
    pub missing: u64,
    /// Why the file could not grow.
    pub last_error: Option<String>,
}

/// The result of a log at one sink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SinkSummary {
    /// `stdout`, a path, or the address on the platform.
    pub name: String,
    /// Lines that arrived completely, and those beyond the limit of a limited sink.
    pub delivered: u64,
    pub lost: u64,
    /// The last error, even if a later attempt succeeded.
    pub last_error: Option<String>,
}

/// One run's log.
#[derive(Debug)]
pub struct RunLog {
    shared: Arc<Shared>,
    spool_path: PathBuf,
    spool_summary: Arc<Mutex<SpoolSummary>>,
    spool_ended: oneshot::Receiver<()>,
    spooled: Arc<File>,
    sinks: Mutex<Vec<RunningSink>>,
    /// [`FIRST_DELIVERY`], except in tests.
    first_delivery: Duration,
}

#[derive(Debug)]
struct RunningSink {
    name: String,
    feed: Arc<Feed>,
    ended: oneshot::Receiver<()>,
}

/// The state that all writers share.
#[derive(Debug)]
struct Shared {
    redactor: RwLock<Arc<Redactor>>,
    commands: UnboundedSender<Command>,
    /// Limits the bytes in the queue. The queue itself has no limit, so that a writer can send its last line when it is
    /// dropped.
    queue_permits: Arc<Semaphore>,
    written: AtomicU64,
    writes: AtomicU64,
    max_line_bytes: usize,
}

impl RunLog {
    /// Starts a log. A sink that does not work yet is no error: it is retried until the end.
    pub fn start(
        config: LogConfig,
        redactor: Redactor,
        sinks: Vec<Box<dyn Sink>>,
    ) -> Result<Self, LogError> {
        let LogConfig {
            spool_dir: folder,
            max_line_bytes,
            max_spool_bytes,
        } = config;
        let spool = Spool::create(&folder, max_spool_bytes).map_err(|error| {
            LogError::new(
                format!("create the run's log in `{}`", folder.display()),
                error,
            )
        })?;
        Self::start_over(spool, max_line_bytes, redactor, sinks)
    }

    fn start_over(
        mut spool: Spool,
        max_line_bytes: usize,
        redactor: Redactor,
        sinks: Vec<Box<dyn Sink>>,
    ) -> Result<Self, LogError> {
        let spooled = spool.file();
        let mut running = Vec::new();
        for sink in sinks {
            let sink = RunningSink::start(sink, &spooled)?;
            spool.feed(Arc::clone(&sink.feed));
            running.push(sink);
        }
        let (commands, receiver) = mpsc::unbounded_channel();
        let queue_permits = Arc::new(Semaphore::new(IN_FLIGHT_BYTES));
        let spool_path = spool.path().to_owned();
        let spool_summary = spool.summary();
        let spool_permits = Arc::clone(&queue_permits);
        let spool_ended = start_thread("log-spool", move || spool.run(receiver, &spool_permits))?;
        Ok(Self {
            shared: Arc::new(Shared {
                redactor: RwLock::new(Arc::new(redactor)),
                commands,
                queue_permits,
                written: AtomicU64::new(0),
                writes: AtomicU64::new(0),
                max_line_bytes,
            }),
            spool_path,
            spool_summary,
            spool_ended,
            spooled,
            sinks: Mutex::new(running),
            first_delivery: FIRST_DELIVERY,
        })
    }

    /// Adds a sink to a running log. The sink gets the log from its beginning.
    pub fn attach(&self, sink: Box<dyn Sink>) -> Result<(), LogError> {
        let sink = RunningSink::start(sink, &self.spooled)?;
        let _ = self
            .shared
            .commands
            .send(Command::Feed(Arc::clone(&sink.feed)));
        runtime::lock(&self.sinks).push(sink);
        Ok(())
    }

    /// A new writer, for one stream of bytes.
    pub fn writer(&self) -> LogWriter {
        LogWriter::new(Arc::clone(&self.shared))
    }

    /// Masks more secrets in everything that is written from now on.
    pub fn add_secrets<I: IntoIterator<Item = impl AsRef<str>>>(&self, secrets: I) {
        self.shared.add_secrets(secrets);
    }

    /// The current redactor, for output that is not part of the log.
    pub fn redactor(&self) -> Arc<Redactor> {
        self.shared.redactor()
    }

    /// A counter of the log's writes.
    pub fn pulse(&self) -> Pulse {
        Pulse {
            shared: Arc::clone(&self.shared),
        }
    }

    /// The redacted log on disk. It is complete after [`RunLog::finish`].
    pub fn spool(&self) -> &Path {
        &self.spool_path
    }

    /// Delivers everything written so far and returns the result. Close all writers first: later lines are dropped. Lines
    /// that are not delivered within `deadline` count as lost.
    pub async fn finish(self, deadline: Duration) -> LogSummary {
        self.finish_within(&Deadline::after(deadline)).await
    }

    /// Like [`Self::finish`], with a deadline that may become earlier meanwhile.
    pub async fn finish_within(self, until: &Deadline) -> LogSummary {
        let (shared, spool_ended) = (self.shared, self.spool_ended);
        let running = self
            .sinks
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        let feeds: Vec<_> = running.iter().map(|sink| Arc::clone(&sink.feed)).collect();
        for feed in &feeds {
            feed.set_first_deadline(Instant::now() + self.first_delivery);
        }
        let given_up = CancellationToken::new();
        let watch = async {
            until.over().await;
            for feed in &feeds {
                feed.set_deadline(Instant::now());
            }
            // Threads check the deadline themselves. A thread that blocks in a system call is abandoned.
            tokio::time::sleep(5 * POLL_INTERVAL).await;
            given_up.cancel();
            std::future::pending::<()>().await;
        };
        let _ = shared.commands.send(Command::Finish);
        let deliver = async {
            tokio::select! {
                biased;
                _ = spool_ended => {}
                () = given_up.cancelled() => {}
            }
            let written = shared.written.load(Ordering::Acquire);
            let mut sinks = Vec::new();
            for sink in running {
                sinks.push(sink.finish(&given_up, written).await);
            }
            (written, sinks)
        };
        let (written, sinks) = tokio::select! {
            biased;
            delivered = deliver => delivered,
            () = watch => unreachable!("the watch never ends"),
        };
        let spool = runtime::lock(&self.spool_summary).clone();
        LogSummary {
            lines: written,
            spool: SpoolSummary {
                missing: written - spool.lines.min(written),
                ..spool
            },
            sinks,
        }
    }
}

/// Counts the writes to a log, so that a silent run is noticed.
#[derive(Clone, Debug)]
pub struct Pulse {
    shared: Arc<Shared>,
}

impl Pulse {
    /// Writes so far.
    pub fn count(&self) -> u64 {
        self.shared.writes.load(Ordering::Relaxed)
    }
}

impl RunningSink {
    fn start(sink: Box<dyn Sink>, spooled: &Arc<File>) -> Result<Self, LogError> {
        let name = sink.name();
        let feed = Arc::new(Feed::default());
        let (source, spooled) = (Arc::clone(&feed), Arc::clone(spooled));
        let ended = start_thread("log-sink", move || {
            delivery::deliver_all(sink, &source, &spooled);
        })?;
        Ok(Self { name, feed, ended })
    }

    async fn finish(self, given_up: &CancellationToken, written: u64) -> SinkSummary {
        let stuck = tokio::select! {
            biased;
            _ = self.ended => false,
            () = given_up.cancelled() => true,
        };
        let (delivered, last_error) = self.feed.outcome();
        if stuck {
            self.feed.close();
        }
        let last_error = match last_error {
            None if stuck => Some("blocked while writing".to_owned()),
            None if delivered < written => Some("not delivered in time".to_owned()),
            error => error,
        };
        SinkSummary {
            name: self.name,
            delivered,
            lost: written - delivered.min(written),
            last_error,
        }
    }
}

/// Starts a thread. The receiver ends when the thread ends, also after a panic.
fn start_thread(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> Result<oneshot::Receiver<()>, LogError> {
    let (ended, receiver) = oneshot::channel();
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            work();
            let _ = ended.send(());
        })
        .map_err(|error| LogError::new("start a thread for the run's log", error))?;
    Ok(receiver)
}

impl Shared {
    fn add_secrets<I: IntoIterator<Item = impl AsRef<str>>>(&self, secrets: I) {
        let mut redactor = self
            .redactor
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *redactor = Arc::new(redactor.with(secrets));
    }

    fn redactor(&self) -> Arc<Redactor> {
        Arc::clone(&self.redactor.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until the spool can take a chunk. `None` after the log's end.
    async fn reserve(&self, bytes: usize) -> Option<usize> {
        let reserved = bytes.clamp(1, IN_FLIGHT_BYTES);
        let permits = u32::try_from(reserved).unwrap_or(u32::MAX);
        self.queue_permits
            .acquire_many(permits)
            .await
            .ok()?
            .forget();
        Some(reserved)
    }

    fn send(&self, text: Vec<u8>, reserved: usize) {
        if text.is_empty() {
            self.queue_permits.add_permits(reserved);
            return;
        }
        let lines = count_lines(&text);
        self.written.fetch_add(lines, Ordering::AcqRel);
        if self
            .commands
            .send(Command::Append { text, reserved })
            .is_err()
        {
            self.written.fetch_sub(lines, Ordering::AcqRel);
        }
    }
}

/// A writer of a run's log. Clones share only the log. Each has its own unfinished line, so lines of several writers never
/// mix.
///
/// Dropping a writer closes it.
pub struct LogWriter {
    shared: Arc<Shared>,
    lines: LineBuffer,
}

impl fmt::Debug for LogWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogWriter").finish_non_exhaustive()
    }
}

impl Clone for LogWriter {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.shared))
    }
}

impl LogWriter {
    fn new(shared: Arc<Shared>) -> Self {
        let lines = LineBuffer::new(shared.max_line_bytes);
        Self { shared, lines }
    }

    /// Writes one line, or several if the text has newlines. Independent of an unfinished line of [`LogWriter::write`].
    pub async fn line(&self, text: &str) {
        let mut lines = self.clone();
        lines.write(text.as_bytes()).await;
        lines.write(b"\n").await;
    }

    /// Writes bytes. Waits for a slow disk, never for a sink.
    ///
    /// # Caveats
    /// If the future is dropped before its end, an unknown part of the chunk is written.
    pub async fn write(&mut self, chunk: &[u8]) {
        self.shared.writes.fetch_add(1, Ordering::Relaxed);
        for piece in chunk.chunks(CHUNK_BYTES) {
            let Some(reserved) = self.shared.reserve(piece.len()).await else {
                return;
            };
            let redactor = self.shared.redactor();
            let mut text = Vec::with_capacity(piece.len());
            self.lines.push(piece, &redactor, &mut text);
            self.shared.send(text, reserved);
        }
    }

    /// Masks more secrets, as [`RunLog::add_secrets`].
    pub fn add_secrets<I: IntoIterator<Item = impl AsRef<str>>>(&self, secrets: I) {
        self.shared.add_secrets(secrets);
    }

    /// Ends the stream: an unfinished last line becomes a line.
    pub async fn close(mut self) {
        if let Some(reserved) = self.shared.reserve(1).await {
            self.end(reserved);
        }
    }

    fn end(&mut self, reserved: usize) {
        let mut text = Vec::new();
        self.lines.close(&self.shared.redactor(), &mut text);
        self.shared.send(text, reserved);
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        if !self.lines.is_empty() {
            self.end(0);
        }
    }
}
