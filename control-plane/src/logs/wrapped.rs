//! Secrets in encoded text that was broken into lines, as `base64` and `xxd` write it: a part of an encoded secret
//! stands at the end of one line and the rest on the next. Pure; which texts encode secrets is decided elsewhere.

use std::collections::BTreeSet;
use std::io::BufRead as _;
use std::ops::Range;

/// Shorter parts are left alone: they are worth five bytes of a secret at most, and could be words.
const MIN_PART_BYTES: usize = 8;
/// Bits of the filter for each place in the texts, so that it rarely says that something may be there.
const FILTER_SPREAD: usize = 16;

type Part = [u8; MIN_PART_BYTES];

/// Encoded secrets, ready to be looked for in parts.
#[derive(Clone, Default)]
pub(super) struct Wrapped {
    /// All texts, with a separator behind each that occurs in none.
    texts: Vec<u8>,
    /// Where a part begins that lies in one text, in the order of the parts.
    places: Vec<u32>,
    /// Says of most parts that they are nowhere.
    filter: Vec<u64>,
}

const SEPARATOR: u8 = b'\n';

impl Wrapped {
    /// Looks for these texts, which consist of nothing but [`is_encoded`] bytes.
    pub(super) fn new(texts: &BTreeSet<String>) -> Self {
        let mut all = Vec::new();
        for text in texts {
            all.extend_from_slice(text.as_bytes());
            all.push(SEPARATOR);
        }
        let end = u32::try_from(all.len()).unwrap_or(u32::MAX);
        let mut wrapped = Self {
            texts: all,
            ..Self::default()
        };
        wrapped.places = (0..end)
            .filter(|place| {
                let part = wrapped.part_at(*place);
                part.is_some_and(|part| !part.contains(&SEPARATOR))
            })
            .collect();
        let mut places = std::mem::take(&mut wrapped.places);
        places.sort_unstable_by_key(|place| wrapped.part_at(*place));
        let words = (places.len() * FILTER_SPREAD / 64).next_power_of_two();
        wrapped.filter = vec![0; words];
        for place in &places {
            if let Some(part) = wrapped.part_at(*place) {
                let (word, bit) = wrapped.slot(part);
                wrapped.filter[word] |= bit;
            }
        }
        wrapped.places = places;
        wrapped
    }

    #[cfg(test)]
    pub(super) fn memory_usage(&self) -> usize {
        self.texts.capacity() + 4 * self.places.capacity() + 8 * self.filter.capacity()
    }

    fn part_at(&self, place: u32) -> Option<Part> {
        let place = usize::try_from(place).ok()?;
        let part = self.texts.get(place..place + MIN_PART_BYTES)?;
        part.try_into().ok()
    }

    fn slot(&self, part: Part) -> (usize, u64) {
        let mixed = u64::from_le_bytes(part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let word = usize::try_from(mixed >> 32).unwrap_or(0) & (self.filter.len() - 1);
        (word, 1 << ((mixed >> 26) & 63))
    }

    /// Where this part stands in the texts.
    fn places_of(&self, part: &[u8]) -> &[u32] {
        let Ok(part) = Part::try_from(part) else {
            return &[];
        };
        let (word, bit) = self.slot(part);
        if self.filter[word] & bit == 0 {
            return &[];
        }
        let from = self
            .places
            .partition_point(|place| self.part_at(*place) < Some(part));
        let length =
            self.places[from..].partition_point(|place| self.part_at(*place) == Some(part));
        &self.places[from..from + length]
    }

    /// The text before and from a place on.
    fn around(&self, place: u32) -> (&[u8], &[u8]) {
        let (before, after) = self.texts.split_at(usize::try_from(place).unwrap_or(0));
        let start = before.iter().rposition(|byte| *byte == SEPARATOR);
        let end = after.iter().position(|byte| *byte == SEPARATOR);
        (
            &before[start.map_or(0, |at| at + 1)..],
            &after[..end.unwrap_or(after.len())],
        )
    }

    /// Calls `found` with parts of secrets at which lines of `text` were broken.
    pub(super) fn find(&self, text: &[u8], mut found: impl FnMut(Range<usize>)) {
        if self.places.is_empty() {
            return;
        }
        let mut start = 0;
        while start < text.len() {
            // Searches as fast as the system can, and cannot fail in memory.
            let length = (&text[start..]).skip_until(b'\n').unwrap_or(text.len());
            let run = last_run(&text[start..start + length]);
            let (from, run) = (start + run.start, &text[start..][run]);
            if run.len() >= MIN_PART_BYTES {
                if let Some(length) = self.rest_at_the_beginning(run) {
                    found(from..from + length);
                }
                if let Some(length) = self.beginning_at_the_end(run) {
                    let end = from + run.len();
                    found(end - length..end);
                }
            }
            start += length;
        }
    }

    /// How much at the beginning of a run is the rest of a text, or more of one that goes on behind the run.
    fn rest_at_the_beginning(&self, run: &[u8]) -> Option<usize> {
        let places = self.places_of(&run[..MIN_PART_BYTES]).iter();
        places
            .filter_map(|place| {
                let (_, rest) = self.around(*place);
                let common = rest.len().min(run.len());
                (rest[..common] == run[..common]).then_some(common)
            })
            .max()
    }

    /// How much at the end of a run is the beginning of a text.
    fn beginning_at_the_end(&self, run: &[u8]) -> Option<usize> {
        let places = self.places_of(&run[run.len() - MIN_PART_BYTES..]).iter();
        places
            .filter_map(|place| {
                let (before, _) = self.around(*place);
                let rest = &run[..run.len() - MIN_PART_BYTES];
                rest.ends_with(before)
                    .then_some(before.len() + MIN_PART_BYTES)
            })
            .max()
    }
}

/// Of both alphabets of base64, and with them of hexadecimal numbers.
fn is_encoded(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"+/-_=".contains(&byte)
}

/// The encoded text at the end of a line, whatever stands before it and closes it.
fn last_run(line: &[u8]) -> Range<usize> {
    let closes = |byte: &u8| byte.is_ascii_whitespace() || b"\"',;)]}".contains(byte);
    let end = line.iter().rposition(|byte| !closes(byte));
    let end = end.map_or(0, |at| at + 1);
    let before = line[..end].iter().rposition(|byte| !is_encoded(*byte));
    before.map_or(0, |at| at + 1)..end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(texts: &[&str], text: &str) -> String {
        let texts = texts.iter().map(|text| (*text).to_owned()).collect();
        let mut masked = text.as_bytes().to_vec();
        Wrapped::new(&texts).find(text.as_bytes(), |range| masked[range].fill(b'*'));
        String::from_utf8(masked).unwrap()
    }

    #[test]
    fn both_parts_of_a_broken_text_are_found_behind_whatever_prefix() {
        let texts = ["c2VjcmV0LXNlY3JldC1zZWNyZXQ", "0123456789abcdef"];
        assert_eq!(
            masked(
                &texts,
                "x: YWFhc2VjcmV0LX\n x NlY3JldC1z\r\n│ ZWNyZXQxYWFh\"\n"
            ),
            "x: YWFh**********\n x **********\r\n│ ZWNyZXQxYWFh\"\n",
            "seven characters are no part"
        );
        assert_eq!(
            masked(&texts, "  aa012345678\n  9abcdefbb\n"),
            "  aa*********\n  9abcdefbb\n"
        );
        assert_eq!(masked(&texts, "89abcdefbb"), "********bb");
    }

    #[test]
    fn what_is_no_part_of_a_broken_text_stays() {
        for text in [
            "",
            "\n\n",
            "short",
            "ordinary words stand here\n",
            "01234567 89abcdef x",
        ] {
            assert_eq!(masked(&["0123456789abcdef"], text), text);
            assert_eq!(masked(&[], text), text);
        }
    }
}
