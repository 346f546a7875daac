//! Limits how much of a log a sink gets. All runs share the Redis with the live log, and one run must not fill it.

use std::time::Duration;

use crate::{Batch, Sink, SinkError};

/// What a line counts in addition to its text: about as many bytes as it takes in Redis.
pub const LINE_BYTES: u64 = 128;

/// Passes the beginning of a log to a sink, and then one line that says where the rest is.
#[derive(Debug)]
pub struct LimitedSink {
    sink: Box<dyn Sink>,
    max_bytes: u64,
    left: u64,
    is_full: bool,
}

impl LimitedSink {
    /// Limits a sink to `max_bytes`. Each line counts with its bytes plus 128.
    pub const fn new(sink: Box<dyn Sink>, max_bytes: u64) -> Self {
        Self {
            sink,
            max_bytes,
            left: max_bytes,
            is_full: false,
        }
    }
}

impl Sink for LimitedSink {
    fn name(&self) -> String {
        self.sink.name()
    }

    /// Text beyond the limit counts as accepted.
    fn deliver(&mut self, batch: Batch<'_>) -> Result<usize, SinkError> {
        if self.is_full {
            return Ok(batch.text.len());
        }
        let mut left = self.left;
        let fits = |line: &&[u8]| {
            left.checked_sub(line.len() as u64 + LINE_BYTES)
                .inspect(|rest| left = *rest)
                .is_some()
        };
        let lines = batch.text.split_inclusive(|byte| *byte == b'\n');
        let length = lines.take_while(fits).map(<[u8]>::len).sum();
        if length == 0 {
            let notice = format!(
                "[mayfly] The live log ends here, at its limit of {} bytes. The log of the run's pod goes on. The complete log \
                 is stored as the output of this step when the step ends.\n",
                self.max_bytes
            );
            // The notice has the number of the first omitted line. So the sink recognises it if it is sent again.
            self.sink.deliver(Batch {
                text: notice.as_bytes(),
                ..batch
            })?;
            self.is_full = true;
            return Ok(batch.text.len());
        }
        let taken = self.sink.deliver(Batch {
            text: &batch.text[..length],
            ..batch
        })?;
        let taken_lines = batch.text[..taken].split_inclusive(|byte| *byte == b'\n');
        let cost: u64 = taken_lines.map(|line| line.len() as u64 + LINE_BYTES).sum();
        self.left = self.left.saturating_sub(cost);
        Ok(taken)
    }

    fn check(&mut self) -> Option<Duration> {
        self.sink.check()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::FileSink;

    fn deliver_all(sink: &mut LimitedSink, mut text: &str) {
        let mut first_line = 1;
        while !text.is_empty() {
            let batch = Batch {
                text: text.as_bytes(),
                first_line,
                is_over: false,
            };
            let taken = sink.deliver(batch).unwrap();
            first_line += text[..taken].lines().count() as u64;
            text = &text[taken..];
        }
    }

    #[test]
    fn a_sink_gets_whole_lines_up_to_its_limit_and_then_one_that_says_where_the_rest_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sink.log");
        for (limit, lines) in [(0, 0), (133, 0), (134, 1), (500, 3), (5000, 37)] {
            let _ = fs::remove_file(&path);
            let mut sink = LimitedSink::new(Box::new(FileSink::new(path.clone())), limit);
            // Any line may be the first that does not fit.
            for _ in 0..50 {
                deliver_all(&mut sink, "12345\n12345\n");
            }
            let text = fs::read_to_string(&path).unwrap();
            let (kept, notice) = text.split_at(6 * lines);
            assert_eq!(kept, "12345\n".repeat(lines), "{limit}");
            assert!(
                notice.starts_with("[mayfly] The live log ends here"),
                "{text}"
            );
            assert!(notice.contains(&format!(" {limit} bytes")), "{text}");
            assert_eq!(notice.lines().count(), 1, "{text}");
        }
    }

    #[test]
    fn a_log_within_the_limit_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sink.log");
        let mut sink = LimitedSink::new(Box::new(FileSink::new(path.clone())), 268);
        deliver_all(&mut sink, "12345\n12345\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "12345\n12345\n");
    }
}
