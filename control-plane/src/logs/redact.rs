//! Masks known secrets in text, in every encoding they are likely to be printed in. Knows the values; where they
//! come from, and what becomes of the text, is decided elsewhere.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use serde_json::Value;

use super::encodings::add_forms;

/// What stands in the place of a secret.
pub const MASK: &str = "***";

/// The known secrets, ready to be looked for.
///
/// Values of several lines are masked line by line, and texts shorter than four bytes never. The values are kept
/// in memory as long as the redactor: they are what it looks for.
///
/// # Caveats
/// Not found: secrets with colour codes between their characters, or in encodings that depend on more than the
/// secret, such as compression.
#[derive(Clone, Default)]
pub struct Redactor {
    forms: BTreeSet<String>,
    matcher: Matcher,
    longest: usize,
}

#[derive(Clone, Default)]
enum Matcher {
    /// No secrets.
    #[default]
    Nothing,
    /// The union of all overlapping matches is masked, so that of two secrets that overlap nothing is left;
    /// leftmost matches would leave the end of the second.
    Forms(AhoCorasick),
    /// More secrets than an automaton can hold. Losing the log is better than showing them.
    Everything,
}

impl fmt::Debug for Redactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redactor")
            .field("forms", &self.forms.len())
            .finish_non_exhaustive()
    }
}

impl Redactor {
    /// Masks these values from now on.
    pub fn new<I: IntoIterator<Item = impl AsRef<str>>>(secrets: I) -> Self {
        Self::default().with(secrets)
    }

    /// The same redactor with more secrets.
    #[must_use]
    pub fn with<I: IntoIterator<Item = impl AsRef<str>>>(&self, secrets: I) -> Self {
        let mut forms = self.forms.clone();
        for secret in secrets {
            add_forms(secret.as_ref(), &mut forms);
        }
        if forms.len() == self.forms.len() {
            return self.clone();
        }
        let longest = forms.iter().map(String::len).max().unwrap_or_default();
        // Contiguous: a table over all bytes is no faster here and takes ten times the memory.
        let matcher = AhoCorasick::builder()
            .match_kind(MatchKind::Standard)
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(&forms)
            .map_or(Matcher::Everything, Matcher::Forms);
        Self {
            forms,
            matcher,
            longest,
        }
    }

    /// The text without secrets; borrowed when there were none.
    pub fn redact<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let found = self.find(text.as_bytes());
        if found.is_empty() {
            return Cow::Borrowed(text);
        }
        let mut masked = String::with_capacity(text.len());
        let mut at = 0;
        for secret in found {
            masked.push_str(&text[at..secret.start]);
            masked.push_str(MASK);
            at = secret.end;
        }
        masked.push_str(&text[at..]);
        Cow::Owned(masked)
    }

    /// Masks secrets in all strings of a document, names of members included.
    pub fn redact_json(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let Cow::Owned(masked) = self.redact(text) {
                    *text = masked;
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.redact_json(item)),
            Value::Object(members) => {
                if members
                    .keys()
                    .any(|name| matches!(self.redact(name), Cow::Owned(_)))
                {
                    *members = std::mem::take(members)
                        .into_iter()
                        .map(|(name, value)| (self.redact(&name).into_owned(), value))
                        .collect();
                }
                members.values_mut().for_each(|item| self.redact_json(item));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// How many bytes the longest text looked for has: a secret that begins in front of a byte ends less than
    /// this many bytes behind it.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// Appends `text[range]` to `out` without secrets, with regard to what stands around the range. A secret that
    /// reaches into the range from before it is taken as masked already.
    pub(super) fn mask_range(&self, text: &[u8], range: Range<usize>, out: &mut Vec<u8>) {
        let mut at = range.start;
        for secret in self.find(text) {
            if secret.end <= range.start {
                continue;
            }
            if secret.start >= range.end {
                break;
            }
            if secret.start >= range.start {
                out.extend_from_slice(&text[at..secret.start]);
                out.extend_from_slice(MASK.as_bytes());
            }
            at = secret.end;
        }
        if at < range.end {
            out.extend_from_slice(&text[at..range.end]);
        }
    }

    /// Where secrets stand, in order and apart from each other. Patterns are UTF-8 and a valid sequence is found
    /// only where it begins, so the bounds never cut a character.
    fn find(&self, text: &[u8]) -> Vec<Range<usize>> {
        let mut found: Vec<Range<usize>> = Vec::new();
        match &self.matcher {
            Matcher::Nothing => {}
            Matcher::Everything => {
                let mut start = 0;
                for line in text.split(|byte| *byte == b'\n') {
                    found.push(start..start + line.len());
                    start += line.len() + 1;
                }
                found.retain(|line| !line.is_empty());
            }
            Matcher::Forms(forms) => {
                // Matches come in the order of their ends.
                for secret in forms.find_overlapping_iter(text) {
                    let mut start = secret.start();
                    while let Some(last) = found.pop_if(|last| last.end >= start) {
                        start = start.min(last.start);
                    }
                    found.push(start..secret.end());
                }
            }
        }
        found
    }
}
