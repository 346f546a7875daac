//! Delivers the log to one sink, in order and once. It reads the spool, retries after errors, and ends when everything is
//! delivered, when the deadline passes, or when the reader is closed.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use tracing::{info, warn};

use super::feed::{Feed, Segment};
use super::lines::{count_lines, whole_lines_len};
use super::sink::{Batch, Sink, SinkError};
use super::spool::missing_lines_notice;

/// How much is read from the spool at a time. Only a single longer line takes more.
const BATCH_BYTES: usize = 64 * 1024;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How long no text waits before the sink checks what it has delivered.
const FIRST_CHECK: Duration = Duration::from_millis(100);

/// Delivers until nothing is left to do for this sink.
pub(super) fn deliver_all(sink: Box<dyn Sink>, feed: &Feed, spool: &File) {
    let mut delivery = Delivery {
        name: sink.name(),
        sink,
        feed,
        next_line: 1,
        pause: FIRST_PAUSE,
        failing: false,
    };
    let mut buffer = Vec::new();
    let mut check_after = Some(FIRST_CHECK);
    loop {
        while let Some(pause) = check_after
            && feed.is_quiet_for(pause)
        {
            check_after = delivery.sink.check();
        }
        let Some(segment) = feed.next() else {
            break;
        };
        let go_on = match segment {
            Segment::Spooled(range) => match read_lines(spool, range, &mut buffer) {
                Ok(()) => delivery.hand_over(&buffer, Counted::Yes),
                Err(error) => delivery.wait_after(&error),
            },
            Segment::Direct { text, at } => delivery.hand_over(&text[at..], Counted::Yes),
            Segment::Lost(lines) => delivery.tell_lost(lines),
        };
        if !go_on {
            break;
        }
    }
    if check_after.is_some() && !feed.is_over() {
        delivery.sink.check();
    }
}

/// Whether text is part of the run's log, or a notice about it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Counted {
    Yes,
    No,
}

struct Delivery<'a> {
    name: String,
    sink: Box<dyn Sink>,
    feed: &'a Feed,
    next_line: u64,
    pause: Duration,
    failing: bool,
}

impl Delivery<'_> {
    /// Returns whether to continue.
    fn hand_over(&mut self, mut text: &[u8], counted: Counted) -> bool {
        while !text.is_empty() {
            if self.feed.is_over() {
                return false;
            }
            let batch = Batch {
                text,
                first_line: self.next_line,
                is_over: self.feed.has_ended(),
            };
            match self.sink.deliver(batch) {
                Ok(taken) => {
                    if counted == Counted::Yes {
                        let lines = count_lines(&text[..taken]);
                        self.next_line += lines;
                        self.feed.advance(taken, lines);
                    }
                    text = &text[taken..];
                    self.note_success();
                }
                Err(SinkError::Busy) => {}
                Err(SinkError::Early(time)) => self.feed.wait_for_end(time),
                Err(SinkError::Unavailable(error)) => {
                    if !self.wait_after(&error) {
                        return false;
                    }
                }
                Err(SinkError::Gone(error)) => {
                    warn!(sink = %self.name, line = self.next_line, %error,
                        "the reader of this sink of the run's log is closed");
                    self.feed.note_error(&error);
                    self.feed.close();
                    return false;
                }
            }
        }
        true
    }

    fn tell_lost(&mut self, lines: u64) -> bool {
        let notice = missing_lines_notice(lines, "the disk is full and this sink is too slow");
        let go_on = self.hand_over(notice.as_bytes(), Counted::No);
        self.next_line += lines;
        self.feed.pass_lost(lines);
        go_on
    }

    fn wait_after(&mut self, error: &io::Error) -> bool {
        if !self.failing {
            self.failing = true;
            warn!(sink = %self.name, line = self.next_line, %error,
                "a sink of the run's log is not available, retrying until the run ends");
        }
        self.feed.note_error(error);
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        self.feed.pause(pause)
    }

    fn note_success(&mut self) {
        if self.failing {
            self.failing = false;
            self.pause = FIRST_PAUSE;
            info!(sink = %self.name, line = self.next_line,
                "a sink of the run's log is available again");
        }
    }
}

/// Reads whole lines from the beginning of the range, which ends with one.
fn read_lines(spool: &File, range: Range<u64>, buffer: &mut Vec<u8>) -> io::Result<()> {
    let available = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
    let mut wanted = available.min(BATCH_BYTES);
    loop {
        buffer.clear();
        buffer.resize(wanted, 0);
        spool.read_exact_at(buffer, range.start)?;
        match whole_lines_len(buffer) {
            0 if wanted < available => wanted = available.min(wanted * 2),
            // This cannot happen, because the range ends with a line. The text is delivered all the same.
            0 => return Ok(()),
            length => {
                buffer.truncate(length);
                // Frees the memory of a very long line before the end of the run.
                buffer.shrink_to(BATCH_BYTES);
                return Ok(());
            }
        }
    }
}
