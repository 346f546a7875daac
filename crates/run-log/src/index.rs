//! An index of the encoded forms of many texts. Its size is proportional to the number of forms and not to their
//! lengths: it keeps the first bytes of each form and encodes the text again when a place in a log begins with them.

use std::borrow::Cow;
use std::ops::Range;

use super::encodings::Encoding;

/// No form is shorter. Shorter texts are part of ordinary words and numbers.
pub(super) const MIN_FORM_BYTES: usize = 4;
/// Bits of the filter for each form, so that the filter rarely passes a place where no form begins.
const FILTER_BITS_PER_FORM: usize = 16;

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

/// Texts in these encodings, in alphabetical order. Callers pass the same texts to every method.
#[derive(Debug)]
pub(super) struct Index {
    encodings: &'static [Encoding],
    forms: Vec<Form>,
    /// Has a bit for the first [`MIN_FORM_BYTES`] of every form.
    filter: Vec<u64>,
    /// Bytes of the longest form.
    longest: usize,
}

#[derive(Clone, Copy, Debug)]
struct Form {
    /// The first bytes as a number that is ordered like them.
    anchor: u64,
    /// Number of the text, times the number of encodings, plus the encoding.
    id: usize,
}

impl Form {
    fn first(self) -> [u8; MIN_FORM_BYTES] {
        let [a, b, c, d, ..] = self.anchor.to_be_bytes();
        [a, b, c, d]
    }
}

impl Index {
    pub(super) fn new(encodings: &'static [Encoding], texts: &Texts) -> Self {
        let mut index = Self {
            encodings,
            forms: Vec::new(),
            filter: Vec::new(),
            longest: 0,
        };
        for (number, text) in texts.iter().enumerate() {
            index.add(number, text);
        }
        index.forms.sort_unstable_by_key(|form| form.anchor);
        let mut forms = std::mem::take(&mut index.forms);
        for same in forms.chunk_by_mut(|one, other| one.anchor == other.anchor) {
            if same.len() > 1 {
                same.sort_by_cached_key(|form| index.text(*form, texts).into_owned());
            }
        }
        let words = (forms.len() * FILTER_BITS_PER_FORM / 64).next_power_of_two();
        index.filter = vec![0; words];
        for form in &forms {
            let (word, bit) = slot(words, form.first());
            index.filter[word] |= bit;
        }
        index.forms = forms;
        index
    }

    fn add(&mut self, number: usize, text: &str) {
        let mut seen = Vec::with_capacity(self.encodings.len());
        for (way, encoding) in self.encodings.iter().enumerate() {
            let form = encoding(text);
            // A form of several lines is never seen, because logs are read line by line.
            if form.len() < MIN_FORM_BYTES || form.contains('\n') || seen.contains(&form) {
                continue;
            }
            self.forms.push(Form {
                anchor: anchor(form.as_bytes()),
                id: number * self.encodings.len() + way,
            });
            self.longest = self.longest.max(form.len());
            seen.push(form);
        }
    }

    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    #[cfg(test)]
    pub(super) fn forms(&self) -> usize {
        self.forms.len()
    }

    fn text<'a>(&self, form: Form, texts: &'a Texts) -> Cow<'a, str> {
        let count = self.encodings.len();
        self.encodings[form.id % count](texts.get(form.id / count))
    }

    /// Where in `log` a form may begin.
    pub(super) fn places<'a>(&'a self, log: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
        let words = self.filter.len();
        let starts = log.windows(MIN_FORM_BYTES).enumerate();
        starts.filter_map(move |(at, first)| {
            let (word, bit) = slot(words, [first[0], first[1], first[2], first[3]]);
            (self.filter[word] & bit != 0).then_some(at)
        })
    }

    /// How long the longest form is that `log` begins with.
    pub(super) fn form_at(&self, mut log: &[u8], texts: &Texts) -> Option<usize> {
        loop {
            // No form before this one has more in common with the log.
            let last = self.forms[..self.count_until(log, texts)].last()?;
            if !log.starts_with(&last.first()) {
                return None;
            }
            let form = self.text(*last, texts);
            let common = form.bytes().zip(log).take_while(|(a, b)| a == *b).count();
            if common == form.len() {
                return Some(common);
            }
            log = &log[..common];
        }
    }

    /// Whether a form begins with `log` and does not end there.
    pub(super) fn goes_on_behind(&self, log: &[u8], texts: &Texts) -> bool {
        let next = self.forms.get(self.count_until(log, texts));
        next.is_some_and(|form| self.text(*form, texts).as_bytes().starts_with(log))
    }

    /// How many forms stand before `log` in alphabetical order, or are equal to it.
    fn count_until(&self, log: &[u8], texts: &Texts) -> usize {
        let first = anchor(log);
        self.forms.partition_point(|form| {
            form.anchor < first || form.anchor == first && self.text(*form, texts).as_bytes() <= log
        })
    }
}

fn anchor(text: &[u8]) -> u64 {
    let mut first = [0; 8];
    let length = text.len().min(first.len());
    first[..length].copy_from_slice(&text[..length]);
    u64::from_be_bytes(first)
}

fn slot(words: usize, first: [u8; MIN_FORM_BYTES]) -> (usize, u64) {
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
        assert_eq!(index.places(b"a log of some length").count(), 0);
        assert_eq!(index.form_at(b"abcd", &texts), None);
        assert!(!index.goes_on_behind(b"abcd", &texts));
    }

    proptest! {
        /// Few letters, so that many texts begin alike.
        #[test]
        fn an_index_finds_what_a_plain_search_finds(
            texts in proptest::collection::vec("[ab]{4,14}", 0..40),
            log in "[ab]{0,20}",
        ) {
            let (index, all) = indexed(&texts);
            let places: Vec<_> = index.places(log.as_bytes()).collect();
            for at in 0..log.len() {
                let rest = &log[at..];
                let whole = texts.iter().filter(|text| rest.starts_with(*text)).map(String::len).max();
                prop_assert!(whole.is_none() || places.contains(&at));
                prop_assert_eq!(index.form_at(rest.as_bytes(), &all), whole);
                let part = texts.iter().any(|text| text.len() > rest.len() && text.starts_with(rest));
                prop_assert_eq!(index.goes_on_behind(rest.as_bytes(), &all), part);
            }
        }
    }
}
