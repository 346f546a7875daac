//! Masks known secrets in text, in every encoding in which tools are likely to print them. Knows only the values, not their
//! origin or the use of the text.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use icu_normalizer::ComposingNormalizerBorrowed;
use serde_json::Value;

use super::encodings::{BINARY_ENCODINGS, TEXT_ENCODINGS, echoed};
use super::index::{Index, MIN_PATTERN_BYTES};
use super::split_secrets::SplitSecrets;

/// The text in place of a secret.
pub const MASK: &str = "***";

/// Shorter lines of a multi-line value are not masked, because `key:` and `EOF` are lines too.
const MIN_LINE_BYTES: usize = 6;
/// The largest piece of a value. Larger values are masked in pieces. This limits the work for one byte of a log, and how much
/// of an endless line must be kept back.
const PIECE_BYTES: usize = 96;
/// Pieces overlap by at least this. So no base64 character encodes bits of two pieces and is part of neither. If a line ends
/// with a piece, it also ends with enough of the next piece to be known as its beginning.
const OVERLAP_BYTES: usize = 8;

/// Finds and masks the known secrets.
///
/// Multi-line values are masked line by line. Texts shorter than four bytes are never masked. The redactor keeps the values
/// in memory, because it searches for them. Memory is proportional to the values. The time to redact a text is proportional to
/// the text, and grows with the logarithm of the number of values. To add secrets one by one costs a logarithmic factor more
/// than to add all at once.
///
/// # Caveats
/// It does not find:
/// - secrets with colour codes between their characters;
/// - secrets that Terraform breaks at a space, to fit an error message into its line length;
/// - secrets in encodings within encodings, except for the listed ones;
/// - encodings that depend on more than the secret, such as compression.
#[derive(Clone, Default)]
pub struct Redactor {
    /// Each has more bytes than the next.
    layers: Vec<Arc<Layer>>,
}

impl fmt::Debug for Redactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secrets = self.layers.iter().map(|layer| layer.values.len());
        f.debug_struct("Redactor")
            .field("secrets", &secrets.sum::<usize>())
            .finish_non_exhaustive()
    }
}

/// Secrets that became known at about the same time.
struct Layer {
    values: BTreeSet<Box<str>>,
    bytes: usize,
    /// Finds the values in text encodings. Also the lines of multi-line values, and the lines that `echo` prints for a value.
    text: Index<str>,
    /// Finds the values in binary encodings.
    binary: Index<[u8]>,
}

impl Layer {
    fn new(values: BTreeSet<Box<str>>) -> Self {
        let multi_line = values.iter().filter(|value| value.contains(ends_line));
        let echoed: Vec<String> = values
            .iter()
            .filter_map(|value| match echoed(value) {
                Cow::Owned(shown) if *shown != **value => Some(shown),
                _ => None,
            })
            .collect();
        let parts = multi_line
            .map(|value| &**value)
            .chain(echoed.iter().map(String::as_str))
            .flat_map(lines);
        let texts = values.iter().map(|value| &**value).chain(parts);
        let texts: BTreeSet<_> = texts.flat_map(text_pieces).collect();
        let bytes: BTreeSet<_> = values.iter().flat_map(|value| byte_pieces(value)).collect();
        Self {
            bytes: values.iter().map(|value| value.len()).sum(),
            text: Index::new(TEXT_ENCODINGS, texts.into_iter().map(Box::from).collect()),
            binary: Index::new(BINARY_ENCODINGS, bytes.into_iter().map(Box::from).collect()),
            values,
        }
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
        let mut values = BTreeSet::<Box<str>>::new();
        let mut bytes = 0;
        let mut add = |value: &str| {
            let is_known = |layer: &Arc<Layer>| layer.values.contains(value);
            if value.len() >= MIN_PATTERN_BYTES
                && !self.layers.iter().any(is_known)
                && values.insert(value.into())
            {
                bytes += value.len();
            }
        };
        for secret in secrets {
            let secret = secret.as_ref().trim();
            add(secret);
            // Terraform normalises all texts to NFC.
            if let Cow::Owned(composed) = ComposingNormalizerBorrowed::new_nfc().normalize(secret) {
                add(&composed);
            }
        }
        let mut layers = self.layers.clone();
        if values.is_empty() {
            return Self { layers };
        }
        // A value moves only to a layer that is at least twice as large. So it moves a logarithmic number of times.
        while let Some(layer) = layers.pop_if(|layer| layer.bytes <= bytes) {
            bytes += layer.bytes;
            values.extend(layer.values.iter().cloned());
        }
        layers.push(Arc::new(Layer::new(values)));
        Self { layers }
    }

    /// Masks secrets in a text. The result is borrowed if the text has none.
    pub fn redact<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let found = self.find(text.as_bytes(), Some(&mut SplitSecrets::default()));
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

    /// Masks secrets in all strings of a document, also in names of members.
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

    /// The length of the longest pattern, in bytes. A secret that begins before a byte ends less than this many bytes after
    /// it.
    pub(super) fn longest(&self) -> usize {
        let layers = self.layers.iter();
        let longest = layers.map(|layer| layer.text.longest().max(layer.binary.longest()));
        longest.max().unwrap_or_default()
    }

    /// Appends `text[range]` to `out` without secrets. The text around the range is searched too. A secret that begins
    /// before the range counts as masked already. `split` has the state of earlier lines; it is set if the range ends with
    /// the end of a line.
    pub(super) fn mask_range(
        &self,
        text: &[u8],
        range: Range<usize>,
        split: Option<&mut SplitSecrets>,
        out: &mut Vec<u8>,
    ) {
        let mut at = range.start;
        for secret in self.find(text, split) {
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

    /// The ranges of secrets, in order and without overlap: overlapping secrets become one range. Patterns are UTF-8, so a
    /// range never cuts a character.
    fn find(&self, text: &[u8], split: Option<&mut SplitSecrets>) -> Vec<Range<usize>> {
        let mut found: Vec<Range<usize>> = Vec::new();
        for layer in &self.layers {
            layer.text.find(text, &mut found);
            layer.binary.find(text, &mut found);
        }
        if let Some(split) = split.filter(|_| !self.layers.is_empty()) {
            let layers = self.layers.iter();
            let indexes: Vec<_> = layers.map(|layer| &layer.binary).collect();
            let mut start = 0;
            for line in text.split_inclusive(|byte| *byte == b'\n') {
                split.find(line, &indexes, |part| {
                    found.push(start + part.start..start + part.end);
                });
                start += line.len();
            }
        }
        found.sort_unstable_by_key(|secret| secret.start);
        found.dedup_by(|next, last| {
            let touches = next.start <= last.end;
            if touches {
                last.end = last.end.max(next.end);
            }
            touches
        });
        found
    }
}

/// Whether some tool breaks lines at this character. Terraform also breaks error texts at tabs and spaces. A value is not
/// split at its spaces, because ordinary text has its words too.
fn ends_line(c: char) -> bool {
    matches!(c, '\t'..='\r' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// The lines of a value that are masked. They are trimmed, because tools indent multi-line values.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    let lines = text.split(ends_line).map(str::trim);
    lines.filter(|line| line.len() >= MIN_LINE_BYTES)
}

fn text_pieces(text: &str) -> impl Iterator<Item = &str> {
    pieces(text.len(), |at| text.floor_char_boundary(at)).map(|piece| &text[piece])
}

/// The pieces begin at multiples of three bytes. So the end of the last one is encoded in base64 like the end of the text.
fn byte_pieces(text: &str) -> impl Iterator<Item = &[u8]> {
    pieces(text.len(), |at| at - at % 3).map(|piece| &text.as_bytes()[piece])
}

/// Splits a text of this length into pieces. `cut` is the last place at or before another at which a piece may begin or end.
/// The last piece is always full, so that it is never too short to be masked.
fn pieces(length: usize, cut: impl Fn(usize) -> usize) -> impl Iterator<Item = Range<usize>> {
    let mut next = Some(0);
    std::iter::from_fn(move || {
        let start = next?;
        let end = cut(start + PIECE_BYTES);
        if end < length {
            next = Some(cut(end - OVERLAP_BYTES));
            return Some(start..end);
        }
        next = None;
        Some(cut(length.saturating_sub(PIECE_BYTES))..length)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::process::Command;

    use base64::Engine as _;
    use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
    use proptest::prelude::*;
    use proptest::sample::Index;
    use rstest::rstest;
    use serde_json::json;

    use super::super::index::work;
    use super::*;

    /// A secret with every kind of character that an encoding treats differently.
    const AWKWARD: &str = "p\u{e4}ss w\"or'd/$1+2&3?<4>~(%7B)`\\n\t!=";

    #[rstest]
    #[case::as_it_is(AWKWARD)]
    #[case::json(r#"p\u00e4ss w\"or'd/$1+2&3?<4>~(%7B)`\\n\t!="#)]
    #[case::json_of_terraform("p\u{e4}ss w\\\"or'd/$1+2\\u00263?\\u003c4\\u003e~(%7B)`\\\\n\\t!=")]
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
    fn what_dash_makes_of_a_secret_is_masked_on_all_its_lines() {
        for letter in '!'..='~' {
            let secret = format!("correct-horse\\{letter}battery-staple");
            let output = Command::new("dash")
                .args(["-c", "echo \"$0\""])
                .arg(&secret)
                .output()
                .unwrap();
            let shown = String::from_utf8_lossy(&output.stdout);
            let redactor = Redactor::new([&secret]);
            // Some tools end a line at `\r`, and Terraform breaks error texts at tabs.
            for line in shown.split(['\n', '\r', '\t']) {
                let masked = redactor.redact(line);
                assert!(!masked.contains("horse"), "{letter}: {masked}");
                assert!(!masked.contains("battery-"), "{letter}: {masked}");
            }
        }
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
            let lines: Vec<_> = encoded.as_bytes().chunks(width).collect();
            let text = String::from_utf8(lines.join(&b'\n')).unwrap();
            let masked = redactor.redact(&text);
            assert_eq!(masked, vec![MASK; lines.len()].join("\n"), "{width}");
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
        // Two pieces share the bits of one base64 character, which is part of neither.
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

    /// Values of all kinds, `bytes` in all.
    fn large(bytes: usize) -> Vec<String> {
        let token = |number: usize| {
            let mixed = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            format!("{mixed:016x}{:016X}", mixed.rotate_left(23) ^ 0x5bd1_e995)
        };
        let mut values = Vec::new();
        let mut left = bytes;
        for number in 0.. {
            let value = match number % 4 {
                0 => token(number),
                1 => format!("pa$$ '{}\" \u{e4}\\{}", token(number), token(number + 7)),
                2 => (0..20)
                    .map(|line| token(number * 100 + line) + "\n")
                    .collect(),
                _ => (0..200)
                    .map(|part| token(number * 1000 + part) + "/+")
                    .collect(),
            };
            if value.len() > left {
                break;
            }
            left -= value.len();
            values.push(value);
        }
        values
    }

    impl Redactor {
        fn patterns(&self) -> Vec<String> {
            let layers = self.layers.iter();
            layers
                .flat_map(|layer| [layer.text.patterns(), layer.binary.patterns()].concat())
                .collect()
        }
    }

    #[test]
    fn the_index_grows_with_the_number_of_different_pieces() {
        let forms = TEXT_ENCODINGS.len() + BINARY_ENCODINGS.len();
        let token = |start: char| (start..='~').collect::<String>();
        let one = Redactor::new([&token('!')]).patterns().len();
        assert!((1..=forms).contains(&one));
        let long = Redactor::new([large(40_000).concat()]).patterns().len();
        assert!((400..500 * forms).contains(&long), "{long}");
        let same: Vec<_> = (0..200).map(|_| token('!')).collect();
        let same = Redactor::new([same.concat()]).patterns().len();
        assert!(same < 96 * forms, "{same}");
        let prefix = large(40_000).concat();
        let shared: Vec<_> = ('a'..='z').map(|end| format!("{prefix}{end}")).collect();
        let shared = Redactor::new(shared).patterns().len();
        assert!(shared < long + 27 * 2 * forms, "{shared}");
    }

    /// Sets of secrets, and texts that have much in common with them.
    fn adversarial(length: usize) -> Vec<(&'static str, Vec<String>, String)> {
        const TEXT_BYTES: usize = 4000;
        let fill =
            |text: &str| text.repeat(TEXT_BYTES.div_ceil(text.len()))[..TEXT_BYTES].to_owned();
        let prefix: String = large(40_000)
            .concat()
            .chars()
            .filter(char::is_ascii_graphic)
            .take(length)
            .collect();
        let ends = |ends: usize| (0..ends).map(|end| format!("{prefix}{end:05}"));
        let nested = |text: &str| {
            (4..length)
                .step_by(length.div_ceil(100))
                .map(|end| text[..end].to_owned())
                .collect()
        };
        let letters = |period: &str| period.repeat(length.div_ceil(period.len()));
        vec![
            ("a shared prefix", ends(200).collect(), fill(&prefix)),
            (
                "a shared prefix of 8 bytes",
                (0..200)
                    .map(|end| format!("{}{end:05}{prefix}", &prefix[..8]))
                    .collect(),
                fill(&prefix[..8]),
            ),
            (
                "a shared prefix in base64",
                ends(200).collect(),
                fill(&STANDARD.encode(&prefix)),
            ),
            (
                "a shared prefix in base64, in lines",
                ends(200).collect(),
                fill(&format!("{}\n", &STANDARD.encode(&prefix)[..40])),
            ),
            (
                "a prefix in base64, then short lines",
                ends(200).collect(),
                format!(
                    "{}\n{}",
                    &STANDARD.encode(&prefix)[..40],
                    fill("for each of these\n")
                ),
            ),
            (
                "all secrets",
                ends(200).collect(),
                fill(&ends(200).collect::<String>()),
            ),
            ("prefixes of each other", nested(&prefix), fill(&prefix)),
            ("one letter", vec![letters("a")], fill("a")),
            ("one letter, many lengths", nested(&letters("a")), fill("a")),
            (
                "one letter and another",
                (4..80).map(|end| "z".repeat(end) + "a").collect(),
                fill("z"),
            ),
            ("one special character", vec![letters("\"")], fill("\\\"")),
            ("one letter in base64", vec![letters("a")], fill("YWFh")),
            (
                "one letter in base64, in lines",
                vec![letters("a")],
                fill("YWFhYWFhYWFh\n"),
            ),
            ("a period in hexadecimal", vec![letters("ab")], fill("6162")),
        ]
    }

    #[test]
    fn the_work_for_a_text_depends_on_neither_the_lengths_of_secrets_nor_on_what_they_share() {
        let mut most = BTreeMap::new();
        for length in [200, 3000] {
            for (name, secrets, text) in adversarial(length) {
                let redactor = Redactor::new(&secrets);
                let work = work::of(|| drop(redactor.redact(&text)));
                let per_byte = work / text.len() as u64;
                let most = most.entry(name).or_insert(0);
                *most = per_byte.max(*most);
            }
        }
        most.retain(|_, per_byte| *per_byte > 2000);
        assert!(most.is_empty(), "{most:?}");
    }

    #[test]
    fn a_secret_that_is_added_alone_rebuilds_little() {
        let values = large(40_000);
        let mut redactor = Redactor::default();
        let mut built = 0;
        for value in &values {
            let before = redactor.layers.clone();
            redactor = redactor.with([value]);
            let is_new = |layer: &&Arc<Layer>| !before.iter().any(|old| Arc::ptr_eq(old, layer));
            built += redactor
                .layers
                .iter()
                .filter(is_new)
                .map(|layer| layer.bytes)
                .sum::<usize>();
        }
        let bytes: usize = redactor.layers.iter().map(|layer| layer.bytes).sum();
        // The logarithm of the total size divided by the smallest size.
        assert!(built < 12 * bytes, "{built} bytes were indexed for {bytes}");
        assert!(redactor.layers.len() < 12);
        let all = Redactor::new(&values);
        for value in &values {
            assert_eq!(redactor.redact(value), all.redact(value));
            assert!(
                !redactor.redact(value).contains(char::is_alphanumeric),
                "{value}"
            );
        }
        let same = redactor.with(&values);
        assert!(
            same.layers
                .iter()
                .zip(&redactor.layers)
                .all(|(a, b)| Arc::ptr_eq(a, b))
        );
    }

    #[test]
    fn debug_output_shows_no_secret() {
        assert!(!format!("{:?}", Redactor::new(["hunter22"])).contains("hunter"));
    }

    /// What a search for each piece in each encoding masks.
    fn masked_one_by_one(secrets: &[String], text: &str) -> String {
        let mut patterns = BTreeSet::new();
        for secret in secrets {
            for encoding in TEXT_ENCODINGS {
                patterns.extend(text_pieces(secret).map(encoding));
            }
            for encoding in BINARY_ENCODINGS {
                patterns.extend(byte_pieces(secret).map(encoding));
            }
        }
        let mut is_secret = vec![false; text.len()];
        for pattern in patterns
            .iter()
            .filter(|pattern| pattern.len() >= MIN_PATTERN_BYTES)
        {
            for at in
                (0..text.len()).filter(|at| text.as_bytes()[*at..].starts_with(pattern.as_bytes()))
            {
                is_secret[at..at + pattern.len()].fill(true);
            }
        }
        let mut masked = String::new();
        let mut at = 0;
        for same in is_secret.chunk_by(|one, other| one == other) {
            masked.push_str(if same[0] {
                MASK
            } else {
                &text[at..at + same.len()]
            });
            at += same.len();
        }
        masked
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// The secrets share prefixes, and the text consists of parts of their encodings.
        #[test]
        fn a_text_is_masked_as_by_a_search_for_each_piece(
            prefix in "[ab\"\u{e4}]{4,260}",
            ends in proptest::collection::vec((any::<Index>(), "[ab]{4,8}"), 1..6),
            parts in proptest::collection::vec(any::<[Index; 4]>(), 1..8),
        ) {
            let secrets: Vec<_> = ends
                .iter()
                .map(|(cut, end)| prefix[..prefix.floor_char_boundary(cut.index(prefix.len()))].to_owned() + end)
                .collect();
            let encoded = |secret: &str, way: usize| match way.checked_sub(TEXT_ENCODINGS.len()) {
                None => TEXT_ENCODINGS[way](secret).into_owned(),
                Some(way) => BINARY_ENCODINGS[way](secret.as_bytes()).into_owned(),
            };
            let parts = parts.iter().map(|[secret, way, from, to]| {
                let ways = TEXT_ENCODINGS.len() + BINARY_ENCODINGS.len();
                let text = encoded(&secrets[secret.index(secrets.len())], way.index(ways));
                let [from, to] = [from, to].map(|at| text.floor_char_boundary(at.index(text.len() + 1)));
                text[from.min(to)..from.max(to)].to_owned()
            });
            // The end of a line could be the beginning of a text that is broken into lines.
            let text = parts.collect::<String>() + " .";
            let redactor = Redactor::new(&secrets);
            prop_assert_eq!(redactor.redact(&text), masked_one_by_one(&secrets, &text));
        }

        #[test]
        fn text_without_secrets_passes_as_it_is(
            secrets in proptest::collection::vec("[ -~]{6,40}", 0..5),
            text in "(.|\n){0,200}",
        ) {
            let redactor = Redactor::new(&secrets);
            prop_assume!(!redactor.patterns().iter().any(|pattern| text.contains(pattern)));
            prop_assert_eq!(redactor.redact(&text), text.as_str());
        }

        /// Outside the mask, only the base64 of the surroundings is left, and at most one character on each side that
        /// encodes both surroundings and secret.
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
