//! Secrets of several words that were folded into lines at their blanks, as Terraform folds what it has to say: some
//! words stand at the end of a line and the others at the beginning of the next. Pure.

use std::collections::BTreeSet;
use std::ops::Range;

/// Shorter parts are no proof.
const MIN_PART_BYTES: usize = 6;
/// A word of letters that is not longer stands at the beginning of many lines, and tells little alone.
const MAX_ORDINARY_BYTES: usize = 12;
/// Whoever has more words is a text rather than a phrase, and has too many parts.
const MOST_WORDS: usize = 24;
/// What stands before the text of a line is shorter than this.
const MOST_BEFORE: usize = 256;

/// Some of a secret's words, in their order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Folded {
    text: String,
    /// Whether the secret begins with them, and may do so anywhere in a line.
    begins: bool,
    /// Whether it ends with them.
    ends: bool,
}

impl Folded {
    /// What may stand on a line of its own.
    pub(super) fn parts(secret: &str) -> BTreeSet<Self> {
        let mut words: Vec<Range<usize>> = Vec::new();
        let mut start = 0;
        for word in secret.split([' ', '\t']) {
            if !word.is_empty() {
                words.push(start..start + word.len());
            }
            start += word.len() + 1;
        }
        if words.len() > MOST_WORDS {
            return BTreeSet::new();
        }
        let last = words.len().saturating_sub(1);
        let all = (0..words.len()).flat_map(|from| (from..words.len()).map(move |to| (from, to)));
        all.filter(|(from, to)| (*from, *to) != (0, last))
            .map(|(from, to)| Self {
                text: secret[words[from].start..words[to].end].to_owned(),
                begins: from == 0,
                ends: to == last,
            })
            .filter(|part| part.text.len() >= MIN_PART_BYTES && !is_ordinary(&part.text))
            .collect()
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Whether a line was folded around this part of the text.
    pub(super) fn is_at(&self, text: &[u8], place: &Range<usize>) -> bool {
        (self.begins || begins_line(text, place.start)) && (self.ends || ends_line(text, place.end))
    }
}

fn is_ordinary(part: &str) -> bool {
    part.len() <= MAX_ORDINARY_BYTES && part.chars().all(char::is_alphabetic)
}

/// Whether nothing but a margin, which may be coloured, stands before this place in its line.
fn begins_line(text: &[u8], place: usize) -> bool {
    let before = &text[place.saturating_sub(MOST_BEFORE)..place];
    let line = match before.iter().rposition(|byte| *byte == b'\n') {
        Some(newline) => &before[newline + 1..],
        None if before.len() < MOST_BEFORE => before,
        None => return false,
    };
    is_margin(line)
}

/// Whether nothing of the line is left behind this place.
fn ends_line(text: &[u8], place: usize) -> bool {
    let behind = &text[place..text.len().min(place + MOST_BEFORE)];
    match behind.iter().position(|byte| *byte == b'\n') {
        Some(newline) => is_margin(&behind[..newline]),
        None => behind.len() < MOST_BEFORE && is_margin(behind),
    }
}

/// A secret that was masked there is not one.
fn is_margin(mut text: &[u8]) -> bool {
    while let [first, rest @ ..] = text {
        text = match first {
            b'\x1b' => match behind_codes(rest) {
                Some(behind) => behind,
                None => return false,
            },
            b'*' => return false,
            _ if first.is_ascii_alphanumeric() => return false,
            _ => rest,
        };
    }
    true
}

/// What stands behind the rest of a sequence that sets colours.
fn behind_codes(text: &[u8]) -> Option<&[u8]> {
    let codes = text.strip_prefix(b"[")?;
    let end = codes
        .iter()
        .position(|byte| !b"0123456789;".contains(byte))?;
    let (end, behind) = codes[end..].split_first()?;
    end.is_ascii_alphabetic().then_some(behind)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::logs::Redactor;

    const PHRASE: &str = "correct horse battery st4ple";

    #[rstest]
    #[case::at_either_end(
        "pass correct horse\nbattery st4ple, they say",
        "pass ***\n***, they say"
    )]
    #[case::indented("is correct\n    horse battery st4ple", "is correct\n    ***")]
    #[case::in_three(
        "correct \n\u{2502} horse battery \n\u{2502} st4ple.",
        "correct \n\u{2502} *** \n\u{2502} ***."
    )]
    #[case::coloured(
        "\x1b[31m\u{2502}\x1b[0m correct horse\x1b[0m\n\x1b[31m\u{2502}\x1b[0m \x1b[0mbattery st4ple",
        "\x1b[31m\u{2502}\x1b[0m ***\x1b[0m\n\x1b[31m\u{2502}\x1b[0m \x1b[0m***"
    )]
    #[case::not_folded(
        "the correct horse has a battery st4ple",
        "the correct horse has a battery st4ple"
    )]
    #[case::elsewhere(
        "correct horses\nno battery st4ple\nbattery",
        "correct horses\nno battery st4ple\nbattery"
    )]
    fn words_of_a_phrase_are_masked_where_a_line_was_folded(
        #[case] text: &str,
        #[case] masked: &str,
    ) {
        assert_eq!(Redactor::new([PHRASE]).redact(text), masked);
    }
}
