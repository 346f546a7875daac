//! Turns a stream of bytes into whole, redacted lines of valid UTF-8. No I/O.
//!
//! Lines end at `\n` or `\r\n`. A lone `\r` stays inside its line: it is how progress bars draw over themselves,
//! the stored text should look in a terminal as the output did, and one line per frame would bury the log.

use super::redact::Redactor;

/// How much of an unfinished line is kept before it is redacted bit by bit; beyond that, only as much as a secret
/// at the end needs.
const UNFINISHED_BYTES: usize = 64 * 1024;

/// What one writer has received and not yet passed on.
#[derive(Debug)]
pub(super) struct LineBuffer {
    /// The unfinished line as it came, from `redacted` on. What precedes is kept because a secret may reach from
    /// there into what follows.
    raw: Vec<u8>,
    redacted: usize,
    /// The beginning of an unfinished line that is too long to be kept back, without secrets.
    beginning: Vec<u8>,
    max_line_bytes: usize,
}

impl LineBuffer {
    pub(super) fn new(max_line_bytes: usize) -> Self {
        Self {
            raw: Vec::new(),
            redacted: 0,
            beginning: Vec::new(),
            // A character must fit, or splitting would never end.
            max_line_bytes: max_line_bytes.max(4),
        }
    }

    /// Appends all lines that `chunk` completes to `out`, each with a newline.
    pub(super) fn push(&mut self, chunk: &[u8], redactor: &Redactor, out: &mut Vec<u8>) {
        let Some(last) = chunk.iter().rposition(|byte| *byte == b'\n') else {
            self.hold(chunk, redactor, out);
            return;
        };
        let (mut lines, rest) = chunk.split_at(last + 1);
        if !self.is_empty() {
            let first = line_end(lines);
            self.raw.extend_from_slice(&lines[..first]);
            self.close(redactor, out);
            lines = &lines[first + 1..];
        }
        self.whole_lines(lines, redactor, out);
        self.hold(rest, redactor, out);
    }

    /// Ends an unfinished line.
    pub(super) fn close(&mut self, redactor: &Redactor, out: &mut Vec<u8>) {
        if self.is_empty() {
            return;
        }
        self.redact_until(self.raw.len(), redactor);
        if self.beginning.last() == Some(&b'\r') {
            self.beginning.pop();
        }
        let mut line = std::mem::take(&mut self.beginning);
        line.push(b'\n');
        self.emit(&line, out);
        self.raw.clear();
        self.redacted = 0;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.raw.is_empty() && self.beginning.is_empty()
    }

    fn whole_lines(&self, lines: &[u8], redactor: &Redactor, out: &mut Vec<u8>) {
        let start = out.len();
        if lines.contains(&b'\r') {
            redactor.mask_range(lines, 0..lines.len(), out);
            remove_carriage_returns(out, start);
        } else {
            redactor.mask_range(lines, 0..lines.len(), out);
        }
        self.make_presentable(out, start);
    }

    /// Keeps the beginning of a line whose end has not come yet.
    fn hold(&mut self, text: &[u8], redactor: &Redactor, out: &mut Vec<u8>) {
        self.raw.extend_from_slice(text);
        let reach = redactor.longest().saturating_sub(1);
        if self.raw.len() - self.redacted <= UNFINISHED_BYTES + reach {
            return;
        }
        self.redact_until(char_boundary(&self.raw, self.raw.len() - reach), redactor);
        let superfluous = self.redacted.saturating_sub(reach);
        self.raw.drain(..superfluous);
        self.redacted -= superfluous;
        while self.beginning.len() > self.max_line_bytes {
            let cut = char_boundary(&self.beginning, self.max_line_bytes);
            let rest = self.beginning.split_off(cut);
            let mut line = std::mem::replace(&mut self.beginning, rest);
            line.push(b'\n');
            self.emit(&line, out);
        }
    }

    fn redact_until(&mut self, end: usize, redactor: &Redactor) {
        if end > self.redacted {
            redactor.mask_range(&self.raw, self.redacted..end, &mut self.beginning);
            self.redacted = end;
        }
    }

    fn emit(&self, line: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(line);
        self.make_presentable(out, start);
    }

    /// Replaces what is not UTF-8 and splits what is too long, in the lines behind `start`.
    fn make_presentable(&self, out: &mut Vec<u8>, start: usize) {
        if std::str::from_utf8(&out[start..]).is_err() {
            let repaired = String::from_utf8_lossy(&out[start..]).into_owned();
            out.truncate(start);
            out.extend_from_slice(repaired.as_bytes());
        }
        let may_hold_long_line = out.len() - start > self.max_line_bytes + 1;
        if may_hold_long_line
            && out[start..]
                .split(|byte| *byte == b'\n')
                .any(|line| line.len() > self.max_line_bytes)
        {
            let lines = out.split_off(start);
            for mut line in lines.split_inclusive(|byte| *byte == b'\n') {
                while line.len() > self.max_line_bytes + 1 {
                    let (piece, rest) = line.split_at(char_boundary(line, self.max_line_bytes));
                    out.extend_from_slice(piece);
                    out.push(b'\n');
                    line = rest;
                }
                out.extend_from_slice(line);
            }
        }
    }
}

/// Number of lines in a text of whole lines.
pub(super) fn count_lines(text: &[u8]) -> u64 {
    // Eight bits at a time vectorise; one wide sum does not.
    text.chunks(255)
        .map(|part| {
            let newlines: u8 = part.iter().map(|byte| u8::from(*byte == b'\n')).sum();
            u64::from(newlines)
        })
        .sum()
}

/// How much of the text is whole lines.
pub(super) fn whole_lines_len(text: &[u8]) -> usize {
    text.iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |newline| newline + 1)
}

fn line_end(text: &[u8]) -> usize {
    text.iter()
        .position(|byte| *byte == b'\n')
        .expect("the text ends with a newline")
}

/// Turns `\r\n` into `\n` behind `start`.
fn remove_carriage_returns(out: &mut Vec<u8>, start: usize) {
    let lines = out.split_off(start);
    for line in lines.split_inclusive(|byte| *byte == b'\n') {
        match line.strip_suffix(b"\r\n") {
            Some(text) => {
                out.extend_from_slice(text);
                out.push(b'\n');
            }
            None => out.extend_from_slice(line),
        }
    }
}

/// The last place at or before `at` where no character is cut; `at` itself in bytes that are no UTF-8.
fn char_boundary(text: &[u8], at: usize) -> usize {
    let is_continuation = |at: usize| text.get(at).is_some_and(|byte| byte & 0xc0 == 0x80);
    (at.saturating_sub(3)..=at)
        .rev()
        .find(|at| !is_continuation(*at))
        .filter(|boundary| *boundary > 0 || at == 0)
        .unwrap_or(at)
}
