//! An index of search patterns. A pattern is a text in one encoding.
//!
//! The size of the index is proportional to the number of patterns, not to their lengths. It keeps only the first bytes of
//! each pattern. When these are found in a log, the index encodes the text again to compare the rest.

use std::borrow::Cow;
use std::ops::Range;

use super::encodings::Encoding;

/// The shortest pattern. Shorter texts are part of ordinary words and numbers.
pub(super) const MIN_PATTERN_BYTES: usize = 4;
/// Bits of the filter for each pattern. With so many, the filter rarely passes a place at which no pattern begins.
const FILTER_BITS_PER_PATTERN: usize = 16;

/// Many texts in one string.
#[derive(Debug, Default)]
pub(super) struct Texts {
    all: String,
    ranges: Vec<Range<usize>>,
}

impl Texts {
    pub(super) fn push(&mut self, text: &str) {
        let start = self.all.len();
        self.all.push_str(text);
        self.ranges.push(start..self.all.len());
    }

    pub(super) fn get(&self, number: usize) -> &str {
        &self.all[self.ranges[number].clone()]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &str> {
        self.ranges.iter().map(|range| &self.all[range.clone()])
    }
}

impl<'a> FromIterator<&'a str> for Texts {
    fn from_iter<I: IntoIterator<Item = &'a str>>(texts: I) -> Self {
        let mut all = Self::default();
        texts.into_iter().for_each(|text| all.push(text));
        all
    }
}

/// The patterns of some texts, in alphabetical order. Callers must pass the same texts to every method.
#[derive(Debug)]
pub(super) struct Index {
    encodings: &'static [Encoding],
    patterns: Vec<Pattern>,
    /// Has a bit for the first [`MIN_PATTERN_BYTES`] of every pattern.
    filter: Vec<u64>,
    /// Bytes of the longest pattern.
    longest: usize,
}

#[derive(Clone, Copy, Debug)]
struct Pattern {
    /// The first bytes as a number with the same order.
    anchor: u64,
    /// Number of the text, times the number of encodings, plus the encoding.
    id: usize,
}

impl Pattern {
    fn first(self) -> [u8; MIN_PATTERN_BYTES] {
        let [a, b, c, d, ..] = self.anchor.to_be_bytes();
        [a, b, c, d]
    }
}

impl Index {
    pub(super) fn new(encodings: &'static [Encoding], texts: &Texts) -> Self {
        let mut index = Self {
            encodings,
            patterns: Vec::new(),
            filter: Vec::new(),
            longest: 0,
        };
        for (number, text) in texts.iter().enumerate() {
            index.add(number, text);
        }
        index
            .patterns
            .sort_unstable_by_key(|pattern| pattern.anchor);
        let mut patterns = std::mem::take(&mut index.patterns);
        for same in patterns.chunk_by_mut(|one, other| one.anchor == other.anchor) {
            if same.len() > 1 {
                same.sort_by_cached_key(|pattern| index.text(*pattern, texts).into_owned());
            }
        }
        let words = (patterns.len() * FILTER_BITS_PER_PATTERN / 64).next_power_of_two();
        index.filter = vec![0; words];
        for pattern in &patterns {
            let (word, bit) = slot(words, pattern.first());
            index.filter[word] |= bit;
        }
        index.patterns = patterns;
        index
    }

    fn add(&mut self, number: usize, text: &str) {
        let mut seen = Vec::with_capacity(self.encodings.len());
        for (way, encoding) in self.encodings.iter().enumerate() {
            let pattern = encoding(text);
            // A pattern of several lines is never found, because logs are read line by line.
            if pattern.len() < MIN_PATTERN_BYTES
                || pattern.contains('\n')
                || seen.contains(&pattern)
            {
                continue;
            }
            self.patterns.push(Pattern {
                anchor: anchor(pattern.as_bytes()),
                id: number * self.encodings.len() + way,
            });
            self.longest = self.longest.max(pattern.len());
            seen.push(pattern);
        }
    }

    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    #[cfg(test)]
    pub(super) fn patterns(&self) -> usize {
        self.patterns.len()
    }

    fn text<'a>(&self, pattern: Pattern, texts: &'a Texts) -> Cow<'a, str> {
        let count = self.encodings.len();
        self.encodings[pattern.id % count](texts.get(pattern.id / count))
    }

    /// The places in `log` at which a pattern may begin.
    pub(super) fn candidates<'a>(&'a self, log: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
        let words = self.filter.len();
        let starts = log.windows(MIN_PATTERN_BYTES).enumerate();
        starts.filter_map(move |(at, first)| {
            let (word, bit) = slot(words, [first[0], first[1], first[2], first[3]]);
            (self.filter[word] & bit != 0).then_some(at)
        })
    }

    /// The length of the longest pattern with which `log` begins.
    pub(super) fn pattern_at(&self, mut log: &[u8], texts: &Texts) -> Option<usize> {
        loop {
            // No earlier pattern has a longer common prefix with the log.
            let last = self.patterns[..self.count_until(log, texts)].last()?;
            if !log.starts_with(&last.first()) {
                return None;
            }
            let pattern = self.text(*last, texts);
            let common = pattern
                .bytes()
                .zip(log)
                .take_while(|(a, b)| a == *b)
                .count();
            if common == pattern.len() {
                return Some(common);
            }
            log = &log[..common];
        }
    }

    /// Whether `log` is the beginning of a longer pattern.
    pub(super) fn is_pattern_prefix(&self, log: &[u8], texts: &Texts) -> bool {
        let next = self.patterns.get(self.count_until(log, texts));
        next.is_some_and(|pattern| self.text(*pattern, texts).as_bytes().starts_with(log))
    }

    /// The number of patterns that are equal to `log` or before it in alphabetical order.
    fn count_until(&self, log: &[u8], texts: &Texts) -> usize {
        let first = anchor(log);
        self.patterns.partition_point(|pattern| {
            pattern.anchor < first
                || pattern.anchor == first && self.text(*pattern, texts).as_bytes() <= log
        })
    }
}

fn anchor(text: &[u8]) -> u64 {
    let mut first = [0; 8];
    let length = text.len().min(first.len());
    first[..length].copy_from_slice(&text[..length]);
    u64::from_be_bytes(first)
}

fn slot(words: usize, first: [u8; MIN_PATTERN_BYTES]) -> (usize, u64) {
    let mixed = u64::from(u32::from_le_bytes(first)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let word = usize::try_from(mixed >> 32).unwrap_or(0) & (words - 1);
    (word, 1 << ((mixed >> 26) & 63))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::encodings::as_it_is;
    use super::*;

    const AS_IT_IS: &[Encoding] = &[as_it_is];

    fn indexed(texts: &[String]) -> (Index, Texts) {
        let texts = texts.iter().map(String::as_str).collect();
        (Index::new(AS_IT_IS, &texts), texts)
    }

    #[test]
    fn an_empty_index_finds_nothing() {
        let (index, texts) = indexed(&[]);
        assert_eq!(index.candidates(b"a log of some length").count(), 0);
        assert_eq!(index.pattern_at(b"abcd", &texts), None);
        assert!(!index.is_pattern_prefix(b"abcd", &texts));
    }

    proptest! {
        /// The texts have few letters, so that many have the same beginning.
        #[test]
        fn an_index_finds_what_a_plain_search_finds(
            texts in proptest::collection::vec("[ab]{4,14}", 0..40),
            log in "[ab]{0,20}",
        ) {
            let (index, all) = indexed(&texts);
            let candidates: Vec<_> = index.candidates(log.as_bytes()).collect();
            for at in 0..log.len() {
                let rest = &log[at..];
                let whole = texts.iter().filter(|text| rest.starts_with(*text)).map(String::len).max();
                prop_assert!(whole.is_none() || candidates.contains(&at));
                prop_assert_eq!(index.pattern_at(rest.as_bytes(), &all), whole);
                let part = texts.iter().any(|text| text.len() > rest.len() && text.starts_with(rest));
                prop_assert_eq!(index.is_pattern_prefix(rest.as_bytes(), &all), part);
            }
        }
    }
}
