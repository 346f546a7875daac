//! Masks known secrets in text, in every encoding they are likely to be printed in. Knows the values; where they
//! come from, and what becomes of the text, is decided elsewhere.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use serde_json::Value;

use super::encodings::Forms;
use super::folded::Folded;
use super::lenient::Lenient;
use super::wrapped::Wrapped;

/// What stands in the place of a secret.
pub const MASK: &str = "***";

/// The known secrets, ready to be looked for.
///
/// Values of several lines are masked line by line, and texts shorter than four bytes never. The values are kept
/// in memory as long as the redactor: they are what it looks for.
///
/// # Caveats
/// Not found: secrets with colour codes between their characters, an ordinary word of a phrase that was folded around it,
/// anything of one of more than 24 words there, and encodings that depend on more than the secret, such as compression.
#[derive(Clone, Default)]
pub struct Redactor {
    forms: Forms,
    matcher: Matcher,
    wrapped: Wrapped,
    /// Whose anchors the matcher looks for behind all forms, and in this order.
    lenient: Vec<Lenient>,
    /// The same of parts of phrases, behind all anchors.
    folded: Vec<Folded>,
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
            .field("forms", &self.forms.whole.len())
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
            forms.add(secret.as_ref());
        }
        if forms.whole.len() == self.forms.whole.len() {
            return self.clone();
        }
        let lenient: Vec<_> = forms.lenient.iter().cloned().collect();
        let folded: Vec<_> = forms.folded.iter().cloned().collect();
        let lengths = forms.whole.iter().map(String::len);
        let longest = lengths.chain(lenient.iter().map(Lenient::longest)).max();
        let anchors = lenient.iter().map(Lenient::anchor);
        let parts = folded.iter().map(Folded::text);
        let whole = forms.whole.iter().map(String::as_str);
        // Contiguous: a table over all bytes is no faster here and takes ten times the memory.
        let matcher = AhoCorasick::builder()
            .match_kind(MatchKind::Standard)
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(whole.chain(anchors).chain(parts))
            .map_or(Matcher::Everything, Matcher::Forms);
        Self {
            wrapped: Wrapped::new(&forms.wrapped),
            forms,
            matcher,
            lenient,
            folded,
            longest: longest.unwrap_or_default(),
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
                let mut others = Vec::new();
                // Matches come in the order of their ends.
                for place in forms.find_overlapping_iter(text) {
                    let range = place.start()..place.end();
                    let number = place.pattern().as_usize();
                    let Some(number) = number.checked_sub(self.forms.whole.len()) else {
                        join(&mut found, range);
                        continue;
                    };
                    match number.checked_sub(self.lenient.len()) {
                        None => others.extend(self.lenient[number].around(text, range)),
                        Some(number) if self.folded[number].is_at(text, &range) => {
                            others.push(range);
                        }
                        Some(_) => {}
                    }
                }
                // What is left of secrets where the end of a line stands between its parts.
                self.wrapped.find(text, |part| others.push(part));
                if !others.is_empty() {
                    others.append(&mut found);
                    others.sort_unstable_by_key(|secret| (secret.end, secret.start));
                    for secret in others {
                        join(&mut found, secret);
                    }
                }
            }
        }
        found
    }
}

/// Adds a range that ends behind all others.
fn join(found: &mut Vec<Range<usize>>, mut range: Range<usize>) {
    while let Some(last) = found.pop_if(|last| last.end >= range.start) {
        range.start = range.start.min(last.start);
    }
    found.push(range);
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
    use proptest::prelude::*;
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    /// Holds every kind of character an encoding treats on its own.
    const AWKWARD: &str = "p\u{e4}ss w\"or'd/$1+2&3?<4>~(%7B)`\\n\t!=";

    #[rstest]
    #[case::as_it_is(AWKWARD)]
    #[case::json(r#"p\u00e4ss w\"or'd/$1+2&3?<4>~(%7B)`\\n\t!="#)]
    #[case::json_of_terraform("p\u{e4}ss w\\\"or'd/$1+2\\u00263?\\u003c4\\u003e~(%7B)`\\\\n\\t!=")]
    #[case::json_in_json("p\u{e4}ss w\\\\\\\"or'd/$1+2&3?<4>~(%7B)`\\\\\\\\n\\\\t!=")]
    #[case::query_escape(
        "p%C3%A4ss+w%22or%27d%2F%241%2B2%263%3F%3C4%3E~%28%257B%29%60%5Cn%09%21%3D"
    )]
    #[case::percent("p%C3%A4ss%20w%22or%27d%2F%241%2B2%263%3F%3C4%3E~%28%257B%29%60%5Cn%09%21%3D")]
    #[case::percent_in_lower_case(
        "p%c3%a4ss%20w%22or%27d%2f%241%2b2%263%3f%3c4%3e~%28%257B%29%60%5cn%09%21%3d"
    )]
    #[case::encode_uri_component(
        "p%C3%A4ss%20w%22or'd%2F%241%2B2%263%3F%3C4%3E~(%257B)%60%5Cn%09!%3D"
    )]
    #[case::single_quoted("p\u{e4}ss w\"or'\\''d/$1+2&3?<4>~(%7B)`\\n\t!=")]
    #[case::double_quoted("p\u{e4}ss w\\\"or'd/\\$1+2&3?<4>~(%7B)\\`\\\\n\t!=")]
    #[case::ansi_quoted("p\u{e4}ss w\"or\\'d/$1+2&3?<4>~(%7B)`\\\\n\\t!=")]
    fn every_way_to_print_a_secret_is_masked(#[case] printed: &str) {
        let redactor = Redactor::new([AWKWARD]);
        assert_eq!(
            redactor.redact(&format!("a {printed} b {printed}")),
            "a *** b ***"
        );
    }

    #[test]
    fn hcl_templates_in_a_secret_are_masked_as_terraform_prints_them() {
        let redactor = Redactor::new(["abc${d}%{e}"]);
        assert_eq!(redactor.redact(r#"x = "abc$${d}%%{e}""#), r#"x = "***""#);
    }

    #[test]
    fn of_overlapping_secrets_nothing_is_left() {
        let redactor = Redactor::new(["abcdef", "defghi", "ghijkl", "bcde"]);
        assert_eq!(redactor.redact("<abcdefghijkl>"), "<***>");
        assert_eq!(redactor.redact("<abcdefghi>"), "<***>");
        assert_eq!(redactor.redact("<xbcdex>"), "<x***x>");
        assert_eq!(redactor.redact("<abcdefabcdef>"), "<***>");
    }

    #[test]
    fn each_line_of_a_key_is_masked_by_itself_and_the_whole_in_one_line() {
        let key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\r\nAQEFAASCBKcwggSjAgEAAoIB\n==\n-----END PRIVATE KEY-----\n";
        let redactor = Redactor::new([key]);
        assert_eq!(
            redactor.redact(" + key = <<EOT\n     AQEFAASCBKcwggSjAgEAAoIB\n   EOT"),
            " + key = <<EOT\n     ***\n   EOT"
        );
        for printed in [
            json!(key).to_string(),
            STANDARD.encode(key),
            format!("{key:?}"),
        ] {
            let masked = redactor.redact(&printed).into_owned();
            assert!(!masked.contains("MII") && masked.len() < 16, "{masked}");
        }
    }

    #[test]
    fn wrapped_base64_is_masked_line_by_line() {
        let secret: String = ('!'..'~').collect();
        let redactor = Redactor::new([&secret]);
        for width in [64, 76] {
            let encoded = STANDARD.encode(&secret);
            for line in encoded.as_bytes().chunks(width) {
                let line = std::str::from_utf8(line).unwrap();
                assert_eq!(redactor.redact(line), MASK, "{width}: {line}");
            }
        }
    }

    #[test]
    fn a_secret_of_any_size_is_masked_whole() {
        let numbers: Vec<String> = (0..3000)
            .map(|number| format!("{number:x}\u{e4}"))
            .collect();
        let secret = numbers.join(";");
        let redactor = Redactor::new([&secret]);
        assert_eq!(redactor.redact(&format!("<{secret}>")), "<***>");
        let document = json!({ "a": secret }).to_string();
        assert_eq!(redactor.redact(&document), r#"{"a":"***"}"#);
        // Bits that two pieces share belong to neither.
        assert!(redactor.redact(&STANDARD.encode(&secret)).len() < 64);
    }

    #[test]
    fn documents_lose_secrets_in_members_and_names() {
        let mut document =
            json!({"a": ["hunter22", 1, null], "hunter22": {"b": "xhunter22"}, "c": "d"});
        Redactor::new(["hunter22"]).redact_json(&mut document);
        assert_eq!(
            document,
            json!({"a": ["***", 1, null], "***": {"b": "x***"}, "c": "d"})
        );
    }

    #[test]
    fn too_short_secrets_are_left_alone() {
        let redactor = Redactor::new(["", " ", "1", "abc", "a\nb"]);
        assert!(matches!(redactor.redact("1 abc a"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_redactor_that_cannot_know_its_secrets_masks_whole_lines() {
        let redactor = Redactor {
            matcher: Matcher::Everything,
            ..Redactor::default()
        };
        assert_eq!(redactor.redact("ab\n\ncd\n"), "***\n\n***\n");
    }

    #[test]
    fn the_secrets_of_a_large_job_take_little_memory() {
        let lines = |count: usize| {
            let lines = (0..count).map(|line| format!("{line:04}{}\n", "Ab+/9".repeat(12)));
            lines.collect::<String>()
        };
        let mut secrets = vec![AWKWARD.to_owned(), "eyJ".to_owned() + &"aZ0_-".repeat(300)];
        secrets.extend((40..43).map(lines));
        secrets.extend(
            (0..50).map(|number| {
                format!("ghs_{}", lines(1).replace("00", &number.to_string()).trim())
            }),
        );
        let redactor = Redactor::new(&secrets);
        let Matcher::Forms(forms) = &redactor.matcher else {
            panic!("too many forms");
        };
        let bytes = forms.memory_usage() + redactor.wrapped.memory_usage();
        assert!(
            bytes < 7_000_000,
            "{bytes} bytes for {} secrets",
            secrets.len()
        );
    }

    #[test]
    fn debug_output_shows_no_secret() {
        assert!(!format!("{:?}", Redactor::new(["hunter22"])).contains("hunter"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn text_without_secrets_passes_as_it_is(
            secrets in proptest::collection::vec("[ -~]{6,40}", 0..5),
            text in "(.|\n){0,200}",
        ) {
            let redactor = Redactor::new(&secrets);
            prop_assume!(!redactor.forms.whole.iter().any(|form| text.contains(form)));
            prop_assert_eq!(redactor.redact(&text), text.as_str());
        }

        /// What is left of a base64 text is what encodes its surroundings, and at most one character on either
        /// side that they share with the secret.
        #[test]
        fn embedded_base64_is_masked_at_every_alignment(
            secret in "[ -)+-~]{8,60}",
            before in proptest::collection::vec(any::<u8>(), 0..9),
            after in proptest::collection::vec(any::<u8>(), 0..9),
        ) {
            prop_assume!(secret.trim() == secret);
            let redactor = Redactor::new([&secret]);
            let plain = [before.as_slice(), secret.as_bytes(), after.as_slice()].concat();
            for engine in [&STANDARD, &STANDARD_NO_PAD, &URL_SAFE, &URL_SAFE_NO_PAD] {
                let masked = redactor.redact(&engine.encode(&plain)).into_owned();
                let (left, right) = masked.split_once(MASK).expect("something is masked");
                prop_assert!(left.len() <= (before.len() * 8).div_ceil(6), "{}", masked);
                prop_assert!(right.len() <= (after.len() * 8).div_ceil(6) + 3, "{}", masked);
            }
        }
    }
}
