//! The log on disk. One thread appends to it, and each sink reads it at its own speed. At the end it is stored as the step's
//! output. If it cannot grow, lines go directly to the sinks, and a notice in the file has the number of missing lines.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::sync::mpsc::UnboundedReceiver;
use tracing::{info, warn};

use super::SpoolSummary;
use super::feed::Feed;
use super::lines::{count_lines, whole_lines_len};

/// Name of the log in its folder.
const FILE_NAME: &str = "run.log";
/// The space that is reserved after the log for the notice of missing lines.
const NOTICE_BYTES: u64 = 4096;
/// How much more space is reserved at a time, so that small writes need no new space.
const RESERVED_BYTES: usize = 64 * 1024;
/// The content of reserved space: empty lines. They do not disturb readers of the file, and a file system does not store them
/// as a hole.
static BLANK: [u8; RESERVED_BYTES] = [b'\n'; RESERVED_BYTES];
/// Small chunks in the queue are written together, up to this size.
const WRITE_BYTES: usize = 64 * 1024;
/// The pause before a write to a full disk is retried.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A command for the spool's thread.
#[derive(Debug)]
pub(super) enum Command {
    /// Append complete, redacted lines, and free the `reserved` bytes of the queue.
    Append { text: Vec<u8>, reserved: usize },
    /// Feed another sink, from the beginning.
    Feed(Arc<Feed>),
    /// Execute the commands that were sent so far, then end.
    Finish,
}

/// The notice that replaces missing lines.
pub(super) fn missing_lines_notice(lines: u64, why: &str) -> String {
    format!("[mayfly] log lines missing here: {lines} ({why})\n")
}

/// The writing end of the spool.
#[derive(Debug)]
pub(super) struct Spool {
    path: PathBuf,
    file: Arc<File>,
    length: u64,
    /// The length of the file with the reserved space. Text that overwrites reserved space fits also on a full disk.
    reserved: u64,
    max_bytes: u64,
    gap: Option<Gap>,
    feeds: Vec<Arc<Feed>>,
    summary: Arc<Mutex<SpoolSummary>>,
}

/// Lines that are missing at the current end of the file.
#[derive(Debug)]
struct Gap {
    lines: u64,
    why: String,
    /// `None` if a retry cannot help.
    retry_at: Option<Instant>,
}

/// Closes the semaphore, so that writers do not wait for a thread that has ended, also after a panic.
struct CloseOnDrop<'a>(&'a Semaphore);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Spool {
    /// Creates a new log. An existing one is replaced.
    pub(super) fn create(folder: &Path, max_bytes: u64) -> io::Result<Self> {
        let path = folder.join(FILE_NAME);
        let file = create_private(&path)?;
        let mut spool = Self::over(path, file, max_bytes);
        // Reserved space is optional: a full disk must not prevent delivery to the sinks.
        if let Err(error) = spool.reserve(0) {
            warn!(%error, "could not reserve disk space for the run's log");
        }
        Ok(spool)
    }

    /// A spool in an empty file that is open for reading and writing.
    pub(super) fn over(path: PathBuf, file: File, max_bytes: u64) -> Self {
        let summary = SpoolSummary {
            path: path.clone(),
            ..SpoolSummary::default()
        };
        Self {
            path,
            file: Arc::new(file),
            length: 0,
            reserved: 0,
            max_bytes,
            gap: None,
            feeds: Vec::new(),
            summary: Arc::new(Mutex::new(summary)),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    pub(super) fn summary(&self) -> Arc<Mutex<SpoolSummary>> {
        Arc::clone(&self.summary)
    }

    /// Adds a sink. A sink that is added later gets the earlier lines that are on disk.
    pub(super) fn feed(&mut self, feed: Arc<Feed>) {
        if self.length > 0 {
            feed.add_spooled(0..self.length);
        }
        self.feeds.push(feed);
    }

    /// Executes commands until the end of the log.
    pub(super) fn run(
        mut self,
        mut commands: UnboundedReceiver<Command>,
        queue_permits: &Semaphore,
    ) {
        let closed_at_the_end = CloseOnDrop(queue_permits);
        while let Some(command) = commands.blocking_recv() {
            let (mut text, mut reserved) = match command {
                Command::Append { text, reserved } => (text, reserved),
                Command::Feed(feed) => {
                    self.feed(feed);
                    continue;
                }
                Command::Finish => {
                    // Commands that were sent before are still received.
                    commands.close();
                    continue;
                }
            };
            while text.len() < WRITE_BYTES {
                match commands.try_recv() {
                    Ok(Command::Append {
                        text: more,
                        reserved: also,
                    }) => {
                        text.extend_from_slice(&more);
                        reserved += also;
                    }
                    // The new sink first gets the lines on disk, and then this text like all other sinks.
                    Ok(Command::Feed(feed)) => self.feed(feed),
                    Ok(Command::Finish) => commands.close(),
                    Err(_) => break,
                }
            }
            self.append(&text);
            queue_permits.add_permits(reserved);
        }
        drop(closed_at_the_end);
        self.finish();
    }

    /// Appends complete lines to the disk, or passes them directly to the sinks.
    fn append(&mut self, text: &[u8]) {
        let kept = self.keep(text);
        if kept > 0 {
            let range = self.length - kept as u64..self.length;
            for feed in &self.feeds {
                feed.add_spooled(range.clone());
            }
        }
        let lines = count_lines(&text[..kept]);
        let rest: Arc<[u8]> = text[kept..].into();
        let missing = count_lines(&rest);
        self.update(|summary| {
            summary.lines += lines;
            summary.missing += missing;
        });
        if missing > 0 {
            if let Some(gap) = &mut self.gap {
                gap.lines += missing;
            }
            for feed in &self.feeds {
                feed.add_direct(&rest, missing);
            }
        }
    }

    /// Writes as many complete lines as fit on the disk, after the notice of an open gap. If none fits, the gap stays open,
    /// or a new one opens.
    fn keep(&mut self, text: &[u8]) -> usize {
        let Some(gap) = self.gap.take() else {
            return self.keep_here(text);
        };
        if gap.retry_at.is_none_or(|at| at > Instant::now()) {
            self.gap = Some(gap);
            return 0;
        }
        let before = self.length;
        // The sinks have these lines, so they get no notice.
        let kept = if self.write_notice(&gap) {
            self.keep_here(text)
        } else {
            0
        };
        if kept == 0 {
            self.cut_back(before);
            self.gap = Some(Gap {
                retry_at: Some(Instant::now() + RETRY_AFTER),
                ..gap
            });
        } else {
            info!("the run's log on disk can grow again");
        }
        kept
    }

    /// Writes as many complete lines as fit, and opens a gap if some do not fit.
    fn keep_here(&mut self, text: &[u8]) -> usize {
        let allowed = self.max_bytes.saturating_sub(self.length + NOTICE_BYTES);
        let refused = self.reserve(allowed.min(text.len() as u64)).err();
        let reserved = self.reserved.saturating_sub(self.length + NOTICE_BYTES);
        let limit = usize::try_from(reserved.min(allowed)).unwrap_or(usize::MAX);
        let fitting = if text.len() > limit {
            whole_lines_len(&text[..limit])
        } else {
            text.len()
        };
        let (kept, error) = self.write(&text[..fitting]);
        if let Some(error) = error.or(refused) {
            self.open_gap(error.to_string(), Some(Instant::now() + RETRY_AFTER));
        } else if fitting < text.len() {
            let why = format!("it may not exceed {} bytes", self.max_bytes);
            self.open_gap(why, None);
        }
        kept
    }

    /// Reserves space for so much text and for the notice of missing lines after it. After an error, a part of the space may
    /// be reserved.
    fn reserve(&mut self, bytes: u64) -> io::Result<()> {
        let wanted = self.length + bytes + NOTICE_BYTES;
        if wanted <= self.reserved {
            return Ok(());
        }
        let ahead = wanted.saturating_add(RESERVED_BYTES as u64);
        let ahead = ahead.min(self.max_bytes).max(wanted);
        while self.reserved < ahead {
            let missing = usize::try_from(ahead - self.reserved).unwrap_or(usize::MAX);
            let (written, error) =
                self.write_at(&BLANK[..missing.min(RESERVED_BYTES)], self.reserved);
            self.reserved += written as u64;
            match error {
                Some(error) if self.reserved < wanted => return Err(error),
                Some(_) => break,
                None => {}
            }
        }
        Ok(())
    }

    fn cut_back(&mut self, length: u64) {
        self.length = length;
        self.update(|summary| summary.bytes = length);
    }

    fn open_gap(&mut self, why: String, retry_at: Option<Instant>) {
        warn!(why, path = %self.path.display(), "the run's log on disk cannot grow; lines go only to its sinks");
        self.update(|summary| summary.last_error = Some(why.clone()));
        self.gap = Some(Gap {
            lines: 0,
            why,
            retry_at,
        });
    }

    /// Writes the notice of missing lines.
    fn write_notice(&mut self, gap: &Gap) -> bool {
        let notice = missing_lines_notice(gap.lines, &gap.why);
        self.write(notice.as_bytes()).1.is_none()
    }

    /// Writes at the end of the log, and returns the length of the complete lines that were written. A partial line after them
    /// is overwritten later, or cut off at the end.
    fn write(&mut self, text: &[u8]) -> (usize, Option<io::Error>) {
        let (written, error) = self.write_at(text, self.length);
        let kept = whole_lines_len(&text[..written]);
        self.length += kept as u64;
        self.reserved = self.reserved.max(self.length);
        let length = self.length;
        self.update(|summary| summary.bytes = length);
        (kept, error)
    }

    /// Writes until the end of the text or an error, and returns the number of written bytes.
    fn write_at(&self, text: &[u8], at: u64) -> (usize, Option<io::Error>) {
        let mut written = 0;
        while written < text.len() {
            match self.file.write_at(&text[written..], at + written as u64) {
                Ok(0) => return (written, Some(io::ErrorKind::WriteZero.into())),
                Ok(length) => written += length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (written, Some(error)),
            }
        }
        (written, None)
    }

    fn finish(&mut self) {
        if let Some(gap) = self.gap.take()
            && !self.write_notice(&gap)
        {
            warn!(path = %self.path.display(), "could not write the notice of missing lines to the run's log on disk");
        }
        for feed in &self.feeds {
            feed.end();
        }
    }

    fn update(&self, change: impl FnOnce(&mut SpoolSummary)) {
        change(&mut runtime::lock(&self.summary));
    }
}

/// Truncates the file to the length of the log, also after a panic.
impl Drop for Spool {
    fn drop(&mut self) {
        if let Err(error) = self.file.set_len(self.length) {
            warn!(path = %self.path.display(), %error, "could not remove the reserved space from the run's log");
        }
    }
}

/// Creates a private file. An existing file is removed first, so that its mode or a planted link has no effect.
fn create_private(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}
