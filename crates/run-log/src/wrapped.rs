//! Secrets in encoded text that was broken into lines, as `base64` and `xxd` write it: the beginning of a form at the end of
//! one line is joined with the ends of the next ones.

use std::ops::Range;

use super::encodings::is_opaque;
use super::index::{Index, Texts};

/// Shorter parts at the end of a line are masked only if they are known with the next line: they are worth five bytes of
/// a secret at most, and could be words.
const MIN_PART_BYTES: usize = 8;
/// So many beginnings of forms are remembered while lines of something else come between. The newest ones stay.
const MAX_BEGINNINGS: usize = 16;

/// What the lines so far ended with.
#[derive(Clone, Debug, Default)]
pub(super) struct Wrapped {
    /// Beginnings of forms whose rest has not come yet.
    beginnings: Vec<Vec<u8>>,
    /// The end of the last lines, shorter than [`MIN_PART_BYTES`].
    end: Vec<u8>,
}

impl Wrapped {
    /// Calls `found` with the parts of `line` that belong to a form which begins in an earlier line, or goes on in a later
    /// one.
    pub(super) fn find(
        &mut self,
        line: &[u8],
        indexes: &[(&Index, &Texts)],
        mut found: impl FnMut(Range<usize>),
    ) {
        let place = last_run(line);
        let run = &line[place.clone()];
        let mut beginnings = Vec::new();
        for beginning in self.beginnings.drain(..) {
            let joined = [&beginning, run].concat();
            match Joined::of(&joined, indexes) {
                Joined::GoesOn => {
                    found(place.clone());
                    beginnings.push(joined);
                }
                Joined::Ends(length) if length > beginning.len() => {
                    found(place.start..place.start + length - beginning.len());
                }
                // Something else came between.
                Joined::Ends(_) | Joined::Neither => beginnings.push(beginning),
            }
        }
        // Forms that begin in the last line with too little to be known, and those that begin in this one.
        let before = self.end.len();
        self.end.extend_from_slice(run);
        for index in indexes {
            for at in index.0.places(&self.end) {
                let joined = &self.end[at..];
                if joined.len() < MIN_PART_BYTES {
                    break;
                }
                let start = place.start + at.saturating_sub(before);
                match Joined::of(joined, std::slice::from_ref(index)) {
                    Joined::GoesOn => {
                        found(start..place.end);
                        beginnings.push(joined.to_vec());
                    }
                    Joined::Ends(length) if at < before && at + length > before => {
                        found(start..place.start + at + length - before);
                    }
                    Joined::Ends(_) | Joined::Neither => {}
                }
            }
        }
        beginnings.drain(..beginnings.len().saturating_sub(MAX_BEGINNINGS));
        self.beginnings = beginnings;
        let superfluous = self.end.len().saturating_sub(MIN_PART_BYTES - 1);
        self.end.drain(..superfluous);
    }
}

/// What the ends of lines are together.
enum Joined {
    /// A form begins with them.
    GoesOn,
    /// They begin with a form of this length.
    Ends(usize),
    Neither,
}

impl Joined {
    fn of(joined: &[u8], indexes: &[(&Index, &Texts)]) -> Self {
        let goes_on = |(index, texts): &(&Index, &Texts)| index.goes_on_behind(joined, texts);
        if indexes.iter().any(goes_on) {
            return Self::GoesOn;
        }
        let form = |(index, texts): &(&Index, &Texts)| index.form_at(joined, texts);
        match indexes.iter().filter_map(form).max() {
            Some(length) if length >= MIN_PART_BYTES => Self::Ends(length),
            _ => Self::Neither,
        }
    }
}

/// The encoded text at the end of a line, whatever stands before it and closes it.
fn last_run(line: &[u8]) -> Range<usize> {
    let closes = |byte: &u8| byte.is_ascii_whitespace() || b"\"',;)]}".contains(byte);
    let end = line.iter().rposition(|byte| !closes(byte));
    let end = end.map_or(0, |at| at + 1);
    let before = line[..end].iter().rposition(|byte| !is_opaque(*byte));
    before.map_or(0, |at| at + 1)..end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encodings::{Encoding, as_it_is};

    const AS_IT_IS: &[Encoding] = &[as_it_is];

    fn masked(texts: &[&str], text: &str) -> String {
        let texts: Texts = texts.iter().copied().collect();
        let index = Index::new(AS_IT_IS, &texts);
        let mut wrapped = Wrapped::default();
        let lines = text.split_inclusive('\n').map(|line| {
            let mut masked = line.as_bytes().to_vec();
            wrapped.find(line.as_bytes(), &[(&index, &texts)], |range| {
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
