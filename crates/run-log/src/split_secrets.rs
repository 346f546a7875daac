//! Finds encoded secrets that are split over lines, as `base64` and `xxd` print them. It joins the encoded text at the ends
//! of successive lines and compares it with the patterns of the secrets.

use std::ops::Range;

use super::encodings::is_base64_or_hex;
use super::index::Index;

/// A shorter part at the end of a line is masked only if the next line confirms it. Such a part could be a word. It encodes
/// at most five bytes of a secret.
const MIN_PART_BYTES: usize = 8;
/// How many prefixes of patterns are kept while unrelated lines are read. The newest ones are kept.
const MAX_PREFIXES: usize = 32;

/// The ends of the lines that were read so far.
#[derive(Clone, Debug, Default)]
pub(super) struct SplitSecrets {
    /// Prefixes of patterns. The rest was not read yet.
    prefixes: Vec<Vec<u8>>,
    /// The end of the last lines, shorter than [`MIN_PART_BYTES`].
    line_end: Vec<u8>,
}

impl SplitSecrets {
    /// Calls `found` for each part of `line` that belongs to a pattern over several lines.
    pub(super) fn find(
        &mut self,
        line: &[u8],
        indexes: &[&Index<[u8]>],
        mut found: impl FnMut(Range<usize>),
    ) {
        let place = last_run(line);
        let run = &line[place.clone()];
        let longest = indexes.iter().map(|index| index.longest()).max();
        let longest = longest.unwrap_or_default();
        let mut prefixes = Vec::new();
        for prefix in self.prefixes.drain(..) {
            // No pattern reaches further.
            let next = &run[..run.len().min(longest.saturating_sub(prefix.len()))];
            let joined = [&prefix, next].concat();
            if indexes.iter().any(|index| index.is_pattern_prefix(&joined)) {
                found(place.clone());
                prefixes.push(joined);
                continue;
            }
            match complete_pattern(&joined, indexes) {
                Some(length) if length > prefix.len() => {
                    found(place.start..place.start + length - prefix.len());
                }
                // The line is unrelated.
                _ => prefixes.push(prefix),
            }
        }
        // Patterns that begin in this line, or in the last line with a part that was too short.
        let before = self.line_end.len();
        self.line_end.extend_from_slice(run);
        for index in indexes {
            for at in index.candidates(&self.line_end) {
                let joined = &self.line_end[at..];
                if joined.len() < MIN_PART_BYTES {
                    break;
                }
                let start = place.start + at.saturating_sub(before);
                if joined.len() < index.longest() && index.is_pattern_prefix(joined) {
                    found(start..place.end);
                    prefixes.push(joined.to_vec());
                } else if at < before
                    && let Some(length) = complete_pattern(joined, std::slice::from_ref(index))
                    && at + length > before
                {
                    found(start..place.start + at + length - before);
                }
            }
        }
        prefixes.drain(..prefixes.len().saturating_sub(MAX_PREFIXES));
        self.prefixes = prefixes;
        let superfluous = self.line_end.len().saturating_sub(MIN_PART_BYTES - 1);
        self.line_end.drain(..superfluous);
    }
}

/// The length of the longest pattern with which the joined ends of lines begin.
fn complete_pattern(joined: &[u8], indexes: &[&Index<[u8]>]) -> Option<usize> {
    let lengths = indexes.iter().filter_map(|index| index.pattern_at(joined));
    lengths.max().filter(|length| *length >= MIN_PART_BYTES)
}

/// The encoded text at the end of a line, without closing quotes and brackets.
fn last_run(line: &[u8]) -> Range<usize> {
    let closes = |byte: &u8| byte.is_ascii_whitespace() || b"\"',;)]}".contains(byte);
    let end = line.iter().rposition(|byte| !closes(byte));
    let end = end.map_or(0, |at| at + 1);
    let before = line[..end]
        .iter()
        .rposition(|byte| !is_base64_or_hex(*byte));
    before.map_or(0, |at| at + 1)..end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encodings::Encoding;

    const AS_IT_IS: &[Encoding<[u8]>] = &[String::from_utf8_lossy];

    fn masked(texts: &[&str], text: &str) -> String {
        let texts = texts.iter().map(|text| text.as_bytes().into()).collect();
        let index = Index::new(AS_IT_IS, texts);
        let mut split = SplitSecrets::default();
        let lines = text.split_inclusive('\n').map(|line| {
            let mut masked = line.as_bytes().to_vec();
            split.find(line.as_bytes(), &[&index], |range| {
                masked[range].fill(b'*');
            });
            String::from_utf8(masked).unwrap()
        });
        lines.collect()
    }

    #[test]
    fn all_parts_of_a_broken_text_are_found_behind_whatever_prefix() {
        let texts = ["c2VjcmV0LXNlY3JldC1zZWNyZXQ", "0123456789abcdef"];
        assert_eq!(
            masked(
                &texts,
                "x: YWFhc2VjcmV0LX\n x NlY3JldC1z\r\n│ ZWNyZXQxYWFh\"\n"
            ),
            "x: YWFh**********\n x **********\r\n│ *******xYWFh\"\n"
        );
        assert_eq!(
            masked(&texts, "  aa012345678\n  9abcdefbb\n"),
            "  aa*********\n  *******bb\n"
        );
        assert_eq!(
            masked(&texts, "0123456\n789abcdefbb\n"),
            "0123456\n*********bb\n",
            "seven characters are no part before the rest is known"
        );
        assert_eq!(
            masked(
                &texts,
                "a: 01234567\nb: still creating\nb: c2VjcmV0LXNl\na: 89abcdef\nb: Y3JldC1zZWNyZXQ\n"
            ),
            "a: ********\nb: still creating\nb: ************\na: ********\nb: ***************\n",
            "lines of something else between"
        );
        let narrow: String = texts[0].chars().flat_map(|c| [c, '\n']).collect();
        let left = "c2VjcmV".chars().flat_map(|c| [c, '\n']);
        assert_eq!(
            masked(&texts, &narrow),
            left.chain("*\n".repeat(20).chars()).collect::<String>()
        );
    }

    #[test]
    fn what_is_no_part_of_a_broken_text_stays() {
        for text in [
            "",
            "\n\n",
            "short",
            "ordinary words stand here\n",
            "01234567 89abcdef x",
            "89abcdefbb",
            "0123456\n\nx\n789abcdef\n",
        ] {
            assert_eq!(masked(&["0123456789abcdef"], text), text);
            assert_eq!(masked(&[], text), text);
        }
    }
}
