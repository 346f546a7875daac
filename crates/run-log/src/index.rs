//! An index of search patterns. A pattern is a text in one encoding.
//!
//! The size of the index is proportional to the number of patterns, not to their lengths. It keeps only the first bytes of
//! each pattern. When these are found in a log, the index encodes some texts again to compare the rest: one for each step of
//! a binary search. So the length of the longest text limits the work for one byte of a log.

use std::borrow::Cow;
use std::ops::Range;

use super::encodings::Encoding;

/// The shortest pattern. Shorter texts are part of ordinary words and numbers.
pub(super) const MIN_PATTERN_BYTES: usize = 4;
/// Bits of the filter for each pattern. With so many, the filter rarely passes a place at which no pattern begins.
const FILTER_BITS_PER_PATTERN: usize = 16;
/// The number of no pattern.
const NONE: u32 = u32::MAX;

/// The patterns of some texts, in alphabetical order.
pub(super) struct Index<T: ?Sized + 'static> {
    encodings: &'static [Encoding<T>],
    texts: Vec<Box<T>>,
    patterns: Vec<Pattern>,
    /// Has a bit for the first [`MIN_PATTERN_BYTES`] of every pattern.
    filter: Vec<u64>,
    longest: usize,
}

#[derive(Clone, Copy)]
struct Pattern {
    /// The first bytes. Zeros follow a shorter pattern.
    anchor: [u8; 8],
    /// Number of the text, times the number of encodings, plus the encoding.
    id: u32,
    length: u32,
    /// Number of the longest other pattern with which this one begins, or [`NONE`].
    prefix: u32,
}

impl Pattern {
    fn first(self) -> [u8; MIN_PATTERN_BYTES] {
        let [a, b, c, d, ..] = self.anchor;
        [a, b, c, d]
    }
}

impl<T: ?Sized> Index<T> {
    pub(super) fn new(encodings: &'static [Encoding<T>], texts: Vec<Box<T>>) -> Self {
        let mut index = Self {
            encodings,
            texts,
            patterns: Vec::new(),
            filter: Vec::new(),
            longest: 0,
        };
        let mut patterns = index.unsorted();
        patterns.sort_unstable_by_key(|pattern| pattern.anchor);
        for same in patterns.chunk_by_mut(|one, other| one.anchor == other.anchor) {
            if same.len() > 1 {
                same.sort_by_cached_key(|pattern| index.text(*pattern).into_owned());
            }
        }
        let words = (patterns.len() * FILTER_BITS_PER_PATTERN / 64).next_power_of_two();
        index.filter = vec![0; words];
        for pattern in &patterns {
            let (word, bit) = slot(words, pattern.first());
            index.filter[word] |= bit;
        }
        index.patterns = index.with_prefixes(patterns);
        index
    }

    fn unsorted(&mut self) -> Vec<Pattern> {
        let mut patterns = Vec::new();
        let mut seen = Vec::with_capacity(self.encodings.len());
        for (number, text) in self.texts.iter().enumerate() {
            for (way, encoding) in self.encodings.iter().enumerate() {
                let pattern = encoding(text);
                // A pattern of several lines is never found, because logs are read line by line.
                if pattern.len() < MIN_PATTERN_BYTES
                    || pattern.contains('\n')
                    || seen.contains(&pattern)
                {
                    continue;
                }
                patterns.push(Pattern {
                    anchor: anchor(pattern.as_bytes()),
                    id: to_u32(number * self.encodings.len() + way),
                    length: to_u32(pattern.len()),
                    prefix: NONE,
                });
                self.longest = self.longest.max(pattern.len());
                seen.push(pattern);
            }
            seen.clear();
        }
        patterns
    }

    /// Drops what is there twice, and notes the prefixes. The patterns are in alphabetical order.
    fn with_prefixes(&self, patterns: Vec<Pattern>) -> Vec<Pattern> {
        let mut different: Vec<Pattern> = Vec::with_capacity(patterns.len());
        // Each begins with the one before it, and the last pattern begins with all of them.
        let mut prefixes: Vec<(u32, Cow<'_, str>)> = Vec::new();
        for mut pattern in patterns {
            let text = self.text(pattern);
            while prefixes
                .pop_if(|(_, prefix)| !text.starts_with(&**prefix))
                .is_some()
            {}
            let prefix = prefixes.last();
            if prefix.is_some_and(|(_, prefix)| *prefix == text) {
                continue;
            }
            pattern.prefix = prefix.map_or(NONE, |(number, _)| *number);
            prefixes.push((to_u32(different.len()), text));
            different.push(pattern);
        }
        different
    }

    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    fn text(&self, pattern: Pattern) -> Cow<'_, str> {
        #[cfg(test)]
        work::done(pattern.length);
        let id = pattern.id as usize;
        let count = self.encodings.len();
        self.encodings[id % count](&self.texts[id / count])
    }

    /// Appends the range of the longest pattern at each place of `log`.
    pub(super) fn find(&self, log: &[u8], found: &mut Vec<Range<usize>>) {
        for at in self.candidates(log) {
            if let Some(length) = self.pattern_at(&log[at..]) {
                found.push(at..at + length);
            }
        }
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
    pub(super) fn pattern_at(&self, log: &[u8]) -> Option<usize> {
        // A pattern with which the log begins is also a prefix of all patterns between it and the log.
        let mut pattern = self.patterns[..self.count_until(log)].last()?;
        if !log.starts_with(&pattern.first()) {
            return None;
        }
        let text = self.text(*pattern);
        let common = text.bytes().zip(log).take_while(|(a, b)| a == *b).count();
        while pattern.length as usize > common {
            pattern = self.patterns.get(pattern.prefix as usize)?;
        }
        Some(pattern.length as usize)
    }

    /// Whether `log` is the beginning of a longer pattern.
    pub(super) fn is_pattern_prefix(&self, log: &[u8]) -> bool {
        let next = self.patterns.get(self.count_until(log));
        next.is_some_and(|pattern| self.text(*pattern).as_bytes().starts_with(log))
    }

    /// The number of patterns that are equal to `log` or before it in alphabetical order.
    fn count_until(&self, log: &[u8]) -> usize {
        let first = anchor(log);
        self.patterns.partition_point(|pattern| {
            pattern.anchor < first
                || pattern.anchor == first && self.text(*pattern).as_bytes() <= log
        })
    }
}

fn anchor(text: &[u8]) -> [u8; 8] {
    let mut first = [0; 8];
    let length = text.len().min(first.len());
    first[..length].copy_from_slice(&text[..length]);
    first
}

fn to_u32(number: usize) -> u32 {
    u32::try_from(number).expect("fewer patterns than 2^32")
}

fn slot(words: usize, first: [u8; MIN_PATTERN_BYTES]) -> (usize, u64) {
    let mixed = u64::from(u32::from_le_bytes(first)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let word = usize::try_from(mixed >> 32).unwrap_or(0) & (words - 1);
    (word, 1 << ((mixed >> 26) & 63))
}

/// Counts the work of a search: bytes of patterns that were encoded to be compared.
#[cfg(test)]
pub(super) mod work {
    use std::cell::Cell;

    thread_local! {
        static BYTES: Cell<u64> = const { Cell::new(0) };
    }

    pub(super) fn done(bytes: u32) {
        BYTES.set(BYTES.get() + u64::from(bytes));
    }

    pub(in super::super) fn of(search: impl FnOnce()) -> u64 {
        let before = BYTES.get();
        search();
        BYTES.get() - before
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::encodings::as_it_is;
    use super::*;

    const AS_IT_IS: &[Encoding<str>] = &[as_it_is];

    impl<T: ?Sized> Index<T> {
        pub(in super::super) fn patterns(&self) -> Vec<String> {
            let patterns = self.patterns.iter();
            patterns
                .map(|pattern| self.text(*pattern).into_owned())
                .collect()
        }
    }

    fn indexed(texts: &[String]) -> Index<str> {
        Index::new(
            AS_IT_IS,
            texts.iter().map(|text| text.as_str().into()).collect(),
        )
    }

    #[test]
    fn an_empty_index_finds_nothing() {
        let index = indexed(&[]);
        assert_eq!(index.candidates(b"a log of some length").count(), 0);
        assert_eq!(index.pattern_at(b"abcd"), None);
        assert!(!index.is_pattern_prefix(b"abcd"));
    }

    proptest! {
        /// The texts have few letters, so that many have the same beginning.
        #[test]
        fn an_index_finds_what_a_plain_search_finds(
            texts in proptest::collection::vec("[ab]{4,14}", 0..40),
            log in "[ab]{0,20}",
        ) {
            let index = indexed(&texts);
            let candidates: Vec<_> = index.candidates(log.as_bytes()).collect();
            for at in 0..log.len() {
                let rest = &log[at..];
                let whole = texts.iter().filter(|text| rest.starts_with(*text)).map(String::len).max();
                prop_assert!(whole.is_none() || candidates.contains(&at));
                prop_assert_eq!(index.pattern_at(rest.as_bytes()), whole);
                let part = texts.iter().any(|text| text.len() > rest.len() && text.starts_with(rest));
                prop_assert_eq!(index.is_pattern_prefix(rest.as_bytes()), part);
            }
        }
    }
}
