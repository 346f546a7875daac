//! Turns a stream of bytes into complete, redacted lines of valid UTF-8. No I/O.
//!
//! Lines end at `\n` or `\r\n`. A single `\r` stays inside its line: progress bars use it to overwrite themselves. So the
//! stored text looks in a terminal like the output, and a progress bar takes one line.

use super::redact::Redactor;
use super::split_secrets::SplitSecrets;

/// How much of an unfinished line is kept before it is redacted in parts. After that, only as much is kept as a secret at the
/// end may need.
const UNFINISHED_BYTES: usize = 64 * 1024;

/// The bytes of one writer that are not yet passed on.
#[derive(Debug)]
pub(super) struct LineBuffer {
    /// The received bytes of the unfinished line. `redacted` is the length of the part that is redacted already. That part is
    /// kept because a secret may continue after it.
    raw: Vec<u8>,
    redacted: usize,
    /// The redacted part of an unfinished line that is too long to be kept back.
    redacted_start: Vec<u8>,
    split: SplitSecrets,
    max_line_bytes: usize,
}

impl LineBuffer {
    pub(super) fn new(max_line_bytes: usize) -> Self {
        Self {
            raw: Vec::new(),
            redacted: 0,
            redacted_start: Vec::new(),
            split: SplitSecrets::default(),
            // One character must fit, or the split would never end.
            max_line_bytes: max_line_bytes.max(4),
        }
    }

    /// Appends to `out` all lines that `chunk` completes, each with a newline.
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
        let split = Some(&mut self.split);
        let range = self.redacted..self.raw.len();
        redactor.mask_range(&self.raw, range, split, &mut self.redacted_start);
        if self.redacted_start.last() == Some(&b'\r') {
            self.redacted_start.pop();
        }
        let mut line = std::mem::take(&mut self.redacted_start);
        line.push(b'\n');
        self.emit(&line, out);
        self.raw.clear();
        self.redacted = 0;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.raw.is_empty() && self.redacted_start.is_empty()
    }

    fn whole_lines(&mut self, lines: &[u8], redactor: &Redactor, out: &mut Vec<u8>) {
        let start = out.len();
        let split = Some(&mut self.split);
        redactor.mask_range(lines, 0..lines.len(), split, out);
        if lines.contains(&b'\r') {
            remove_carriage_returns(out, start);
        }
        self.replace_and_split(out, start);
    }

    /// Keeps the beginning of an unfinished line.
    fn hold(&mut self, text: &[u8], redactor: &Redactor, out: &mut Vec<u8>) {
        self.raw.extend_from_slice(text);
        let reach = redactor.longest().saturating_sub(1);
        if self.raw.len() - self.redacted <= UNFINISHED_BYTES + reach {
            return;
        }
        let end = char_boundary(&self.raw, self.raw.len() - reach);
        if end > self.redacted {
            redactor.mask_range(
                &self.raw,
                self.redacted..end,
                None,
                &mut self.redacted_start,
            );
            self.redacted = end;
        }
        let superfluous = self.redacted.saturating_sub(reach);
        self.raw.drain(..superfluous);
        self.redacted -= superfluous;
        while self.redacted_start.len() > self.max_line_bytes {
            let cut = char_boundary(&self.redacted_start, self.max_line_bytes);
            let rest = self.redacted_start.split_off(cut);
            let mut line = std::mem::replace(&mut self.redacted_start, rest);
            line.push(b'\n');
            self.emit(&line, out);
        }
    }

    fn emit(&self, line: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(line);
        self.replace_and_split(out, start);
    }

    /// Replaces invalid UTF-8 and splits long lines after `start`.
    fn replace_and_split(&self, out: &mut Vec<u8>, start: usize) {
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

/// Number of lines in a text of complete lines.
pub(super) fn count_lines(text: &[u8]) -> u64 {
    // A sum of 8 bits is vectorised; one wide sum is not.
    text.chunks(255)
        .map(|part| {
            let newlines: u8 = part.iter().map(|byte| u8::from(*byte == b'\n')).sum();
            u64::from(newlines)
        })
        .sum()
}

/// The length of the complete lines at the beginning of a text.
pub fn whole_lines_len(text: &[u8]) -> usize {
    text.iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |newline| newline + 1)
}

fn line_end(text: &[u8]) -> usize {
    text.iter()
        .position(|byte| *byte == b'\n')
        .expect("the text ends with a newline")
}

/// Turns `\r\n` into `\n` after `start`.
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

/// The last position at or before `at` that cuts no character. In bytes that are not UTF-8, `at` itself.
pub fn char_boundary(text: &[u8], at: usize) -> usize {
    let is_continuation = |at: usize| text.get(at).is_some_and(|byte| byte & 0xc0 == 0x80);
    (at.saturating_sub(3)..=at)
        .rev()
        .find(|at| !is_continuation(*at))
        .filter(|boundary| *boundary > 0 || at == 0)
        .unwrap_or(at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn through<'a>(
        max_line_bytes: usize,
        redactor: &Redactor,
        chunks: impl IntoIterator<Item = &'a [u8]>,
    ) -> String {
        let mut buffer = LineBuffer::new(max_line_bytes);
        let mut out = Vec::new();
        for chunk in chunks {
            buffer.push(chunk, redactor, &mut out);
        }
        buffer.close(redactor, &mut out);
        assert!(buffer.is_empty());
        String::from_utf8(out).unwrap()
    }

    #[rstest]
    #[case::unix(b"a\nb\n", "a\nb\n")]
    #[case::windows(b"a\r\nb\r\n", "a\nb\n")]
    #[case::unterminated(b"a\nb", "a\nb\n")]
    #[case::unterminated_windows(b"a\r\nb\r", "a\nb\n")]
    #[case::progress(b"1%\r2%\r3%\n", "1%\r2%\r3%\n")]
    #[case::empty_lines(b"\n\na\n\n\r\n", "\n\na\n\n\n")]
    #[case::nothing(b"", "")]
    #[case::not_utf8(b"a\xffb\xc3\nc\xe2\x82\n", "a\u{fffd}b\u{fffd}\nc\u{fffd}\n")]
    #[case::nul_and_colours(b"\x1b[32ma\0b\x1b[0m\n", "\x1b[32ma\0b\x1b[0m\n")]
    #[case::wide("\u{e4}\u{20ac}\u{1f600}\n".as_bytes(), "\u{e4}\u{20ac}\u{1f600}\n")]
    fn lines_come_out_the_same_however_they_came_in(#[case] input: &[u8], #[case] lines: &str) {
        for size in 1..=input.len().max(1) {
            let chunks = input.chunks(size);
            assert_eq!(
                through(100, &Redactor::default(), chunks),
                lines,
                "in chunks of {size}"
            );
        }
    }

    #[test]
    fn long_lines_are_split_where_no_character_is_cut() {
        let line = "\u{20ac}".repeat(10) + "\nshort\n";
        let split = "\u{20ac}\u{20ac}\u{20ac}\n".repeat(3) + "\u{20ac}\nshort\n";
        assert_eq!(through(11, &Redactor::default(), [line.as_bytes()]), split);
    }

    #[test]
    fn endless_lines_take_no_endless_memory() {
        let mut buffer = LineBuffer::new(1024 * 1024);
        let (mut out, mut length) = (Vec::new(), 0);
        for _ in 0..1000 {
            buffer.push(&[b'x'; 10_000], &Redactor::new(["hunter22"]), &mut out);
            length += out.len();
            out.clear();
            assert!(buffer.raw.len() + buffer.redacted_start.len() < 1_300_000);
        }
        assert!(length > 8_000_000);
    }

    #[test]
    fn a_secret_across_the_end_of_what_is_redacted_early_is_masked() {
        let secret = "0123456789".repeat(100);
        let redactor = Redactor::new([&secret]);
        for known in 1..secret.len() {
            let filler = "x".repeat(UNFINISHED_BYTES + redactor.longest() - known);
            let (before, after) = secret.split_at(known);
            let first = format!("{filler}{before}");
            let out = through(
                usize::MAX / 2,
                &redactor,
                [first.as_bytes(), after.as_bytes()],
            );
            assert!(out == format!("{filler}***\n"), "{known}");
        }
    }

    #[test]
    fn newlines_are_counted_in_texts_of_any_length() {
        for length in [0, 1, 254, 255, 256, 511, 10_000] {
            assert_eq!(count_lines(&vec![b'\n'; length]), length as u64);
        }
        assert_eq!(count_lines(b"a\nb"), 1);
    }

    proptest! {
        #[test]
        fn a_secret_is_masked_however_the_text_is_cut(
            secret in "[a-zA-Z0-9+/=_.\u{e4}-]{4,60}",
            around in proptest::collection::vec("[ -)+-~\u{20ac}]{0,30}", 2..6),
            newlines in any::<bool>(),
            cuts in proptest::collection::vec(1usize..40, 1..20),
            max_line_bytes in 20usize..200,
        ) {
            let glue = if newlines { format!("{secret}\n") } else { secret.clone() };
            let text = around.join(&glue);
            let redactor = Redactor::new([&secret]);
            let mut rest = text.as_bytes();
            let mut chunks = Vec::new();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (chunk, after) = rest.split_at(rest.len().min(*cut));
                chunks.push(chunk);
                rest = after;
            }
            let out = through(max_line_bytes, &redactor, chunks);
            prop_assert!(!out.contains(&secret), "{}", out);
            prop_assert!(!out.replace('\n', "").contains(&secret) || text.replace(&glue, "").replace('\n', "").contains(&secret), "{}", out);
            prop_assert!(out.lines().all(|line| line.len() <= max_line_bytes));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Long lines are redacted in parts. Secrets are masked at every boundary of parts, and all other text stays.
        #[test]
        fn secrets_in_endless_lines_are_masked_wherever_the_line_is_cut(
            gaps in proptest::collection::vec(0usize..40_000, 1..10),
            chunk in 1000usize..70_000,
            secret_length in 4usize..3000,
        ) {
            let secret: String = ('a'..='z').cycle().take(secret_length - 1).chain(['#']).collect();
            let redactor = Redactor::new([&secret]);
            let filler = |length: usize| "0123\u{20ac}".repeat(length / 7);
            let text: String = gaps.iter().map(|gap| filler(*gap) + "<" + &secret + ">").collect();
            let masked: String = gaps.iter().map(|gap| filler(*gap) + "<***>").collect();
            let out = through(50_000, &redactor, text.as_bytes().chunks(chunk));
            prop_assert_eq!(out.replace('\n', "") == masked, true);
            prop_assert!(out.lines().all(|line| line.len() <= 50_000));
        }
    }
}
