//! Secrets with any of their characters escaped in any of the ways there are, also one in another: quotes of a shell
//! in JSON, JSON in an address, an address in HTML. A run of letters and digits, which nobody escapes, tells where one
//! may stand; around it, text and secret are compared character by character. Pure.

use std::ops::Range;

use super::numerals::{digits, number};

/// Fewer characters, quotes aside, are no proof.
const MIN_SIGNIFICANT: usize = 6;
/// A character of ASCII takes no more bytes than this, backslashes before it aside, and others no more than the second.
const MAX_ASCII_BYTES: usize = 24;
const MAX_CHAR_BYTES: usize = 64;
/// So many ways to read a text are followed at once; more than two are there in texts made for that only.
const MAX_READINGS: usize = 8;

/// What programs write in names for characters.
const NAMES: [(&str, char); 6] = [
    ("amp;", '&'),
    ("lt;", '<'),
    ("gt;", '>'),
    ("quot;", '"'),
    ("apos;", '\''),
    ("nbsp;", '\u{a0}'),
];
/// The same for letters behind a backslash.
const LETTERS: [(u8, char); 13] = [
    (b'a', '\u{7}'),
    (b'b', '\u{8}'),
    (b't', '\t'),
    (b'n', '\n'),
    (b'v', '\u{b}'),
    (b'f', '\u{c}'),
    (b'r', '\r'),
    (b'e', '\u{1b}'),
    (b'E', '\u{1b}'),
    (b'N', '\u{85}'),
    (b'_', '\u{a0}'),
    (b'L', '\u{2028}'),
    (b'P', '\u{2029}'),
];

/// A backslash, and what it is in an address, and in an address in another.
const BACKSLASHES: [&[u8]; 5] = [b"\\", b"%5C", b"%5c", b"%255C", b"%255c"];

/// Quotes and backslashes are put between characters and doubled by whoever quotes, and are compared only where they are
/// written in another way.
const QUOTES: [char; 3] = ['\'', '"', '\\'];

fn is_quote(byte: u8) -> bool {
    QUOTES.contains(&char::from(byte))
}

/// One secret.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lenient {
    text: String,
    /// Where its anchor begins and ends.
    anchor: (usize, usize),
}

impl Lenient {
    /// `None` if it is found as it is, or cannot be told from other texts.
    pub(super) fn new(text: &str) -> Option<Self> {
        let is_ordinary = |byte: &u8| byte.is_ascii_alphanumeric();
        let significant = text.bytes().filter(|byte| !is_quote(*byte)).count();
        if significant < MIN_SIGNIFICANT || text.as_bytes().iter().all(is_ordinary) {
            return None;
        }
        let mut anchor = 0..0;
        let mut start = 0;
        for run in text.as_bytes().split(|byte| !is_ordinary(byte)) {
            if run.len() > anchor.len() {
                anchor = start..start + run.len();
            }
            start += run.len() + 1;
        }
        let text = text.to_owned();
        (!anchor.is_empty()).then_some(Self {
            text,
            anchor: (anchor.start, anchor.end),
        })
    }

    /// Whether this is found in all its shapes, from its first character to its last, or has but one.
    pub(super) fn finds(text: &str) -> bool {
        let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let ends_in_quotes = text.starts_with(QUOTES) || text.ends_with(QUOTES);
        is_plain || (!ends_in_quotes && Self::new(text).is_some())
    }

    /// What stands in every text that shows the secret.
    pub(super) fn anchor(&self) -> &str {
        &self.text[self.anchor.0..self.anchor.1]
    }

    /// More than this is not looked at.
    pub(super) fn longest(&self) -> usize {
        8 * self.text.len() + MAX_CHAR_BYTES
    }

    /// Where the secret stands around its anchor.
    pub(super) fn around(&self, text: &[u8], anchor: Range<usize>) -> Option<Range<usize>> {
        let reach = self.longest();
        let text = &text[..text.len().min(anchor.start.saturating_add(reach))];
        let ends = walk(
            self.text[self.anchor.1..].chars(),
            anchor.end,
            |end, c, next| {
                for at in behind_quotes(text, end) {
                    read(text, at, c, |end| add(next, end));
                }
            },
        )?;
        let end = ends.into_iter().max()?;
        let text = &text[..end];
        let least = end.saturating_sub(reach);
        let before = self.text[..self.anchor.0].chars().rev();
        let starts = walk(before, anchor.start, |start, c, next| {
            for end in before_quotes(text, start) {
                read_back(text, end, c, |start| add(next, start));
            }
        })?;
        let start = starts.into_iter().min()?;
        (start >= least).then_some(start..end)
    }
}

/// Where one gets from a place past these characters, a step for each; `None` if the text holds something else.
fn walk(
    characters: impl Iterator<Item = char>,
    from: usize,
    step: impl Fn(usize, char, &mut Vec<usize>),
) -> Option<Vec<usize>> {
    let mut places = vec![from];
    for c in characters {
        let mut next = Vec::new();
        for place in places {
            step(place, c, &mut next);
            if may_be_missing(c) {
                add(&mut next, place);
            }
        }
        if next.is_empty() {
            return None;
        }
        places = next;
    }
    Some(places)
}

/// Control characters are left out by some who show a text.
fn may_be_missing(c: char) -> bool {
    QUOTES.contains(&c) || (c.is_control() && c != '\n')
}

/// Where a text goes on behind quotes and backslashes as they are, and behind those that were encoded.
fn behind_quotes(text: &[u8], at: usize) -> Vec<usize> {
    let skip = |at: usize| {
        at + text[at..]
            .iter()
            .take_while(|byte| is_quote(**byte))
            .count()
    };
    let mut places = vec![skip(at)];
    let mut seen = 0;
    while let Some(at) = places.get(seen).copied() {
        seen += 1;
        if text
            .get(at)
            .is_some_and(|byte| b"%&ux01234567".contains(byte))
        {
            for quote in QUOTES {
                read(text, at, quote, |end| add(&mut places, skip(end)));
            }
        }
    }
    places
}

/// Where a text ends in front of such.
fn before_quotes(text: &[u8], at: usize) -> Vec<usize> {
    let skip = |at: usize| {
        at - text[..at]
            .iter()
            .rev()
            .take_while(|byte| is_quote(**byte))
            .count()
    };
    let mut places = vec![skip(at)];
    let mut seen = 0;
    while let Some(at) = places.get(seen).copied() {
        seen += 1;
        let may_end = |byte: &u8| byte.is_ascii_hexdigit() || b";}".contains(byte);
        if at > 0 && may_end(&text[at - 1]) {
            for quote in QUOTES {
                read_back(text, at, quote, |start| add(&mut places, skip(start)));
            }
        }
    }
    places
}

/// Calls `starts` with every place where a way to write this character begins that ends here.
fn read_back(text: &[u8], end: usize, expected: char, mut starts: impl FnMut(usize)) {
    let most = match expected {
        c if c.is_ascii_alphanumeric() => 1,
        c if c.is_ascii() => MAX_ASCII_BYTES,
        _ => MAX_CHAR_BYTES,
    };
    for at in end.saturating_sub(most)..end {
        let mut ends_here = false;
        read(text, at, expected, |other| ends_here |= other == end);
        if ends_here {
            starts(at);
        }
    }
}

fn add(positions: &mut Vec<usize>, position: usize) {
    if positions.len() < MAX_READINGS && !positions.contains(&position) {
        positions.push(position);
    }
}

/// Calls `ends` with every place where a way to write this character ends that begins here.
fn read(text: &[u8], at: usize, expected: char, mut ends: impl FnMut(usize)) {
    let Some(first) = text.get(at) else {
        return;
    };
    let mut utf8 = [0; 4];
    let utf8 = expected.encode_utf8(&mut utf8).as_bytes();
    // Masking works on single lines.
    if text[at..].starts_with(utf8) && expected != '\n' {
        let end = at + utf8.len();
        ends(end);
        // As formats and templates double what means something to them.
        if expected.is_ascii_punctuation() && text[end..].starts_with(utf8) {
            ends(end + utf8.len());
        }
    }
    if expected.is_ascii_alphanumeric() {
        return;
    }
    // Forms; addresses, to which both are the same.
    if (expected, *first) == (' ', b'+') || (expected, *first) == ('\\', b'/') {
        ends(at + 1);
    }
    let is_escaped = BACKSLASHES.iter().any(|one| text[..at].ends_with(one));
    if *first == b'%' {
        if let &[byte] = utf8 {
            percent(text, at, byte, &mut ends);
        } else {
            let whole = all_of(utf8, at, |at, byte| {
                let mut first = None;
                percent(text, at, byte, &mut |end| first = first.or(Some(end)));
                first
            });
            whole.into_iter().for_each(&mut ends);
            // JavaScript's oldest way.
            if let Ok(byte) = u8::try_from(expected) {
                percent(text, at, byte, &mut ends);
            }
        }
        if text.get(at + 1) == Some(&b'u')
            && let Some(end) = units(text, at + 1, expected, percent_sign)
        {
            ends(end);
        }
    }
    if *first == b'&' {
        entity(text, at + 1, expected, &mut ends);
    } else if is_escaped && text[at..].starts_with(b"u0026") {
        entity(text, at + "u0026".len(), expected, &mut ends);
    }
    if let Some(end) = all_of(utf8, at, |at, byte| {
        let at = at + backslashes(text, at);
        (text.get(at) == Some(&byte) && byte != b'\n').then_some(at + 1)
    }) {
        ends(end);
    }
    if !is_escaped {
        return;
    }
    if LETTERS.contains(&(*first, expected)) {
        ends(at + 1);
    }
    if let Some(end) = units(text, at, expected, backslashes) {
        ends(end);
    }
    if let Some((code, end)) = code_point(text, at)
        && code == u32::from(expected)
    {
        ends(end);
    }
    if let Some(end) = all_of(utf8, at, |at, byte| {
        let at = at
            + text
                .get(at..)?
                .iter()
                .take_while(|byte| **byte == b'\\')
                .count();
        let (code, end) = code_point(text, at + backslashes(text, at))?;
        (code == u32::from(byte)).then_some(end)
    }) {
        ends(end);
    }
}

/// Every byte of a character in turn.
fn all_of(bytes: &[u8], at: usize, one: impl Fn(usize, u8) -> Option<usize>) -> Option<usize> {
    bytes.iter().try_fold(at, |at, byte| one(at, *byte))
}

/// How many bytes of backslashes stand here, encoded ones among them.
fn backslashes(text: &[u8], at: usize) -> usize {
    let all = text.get(at..).unwrap_or_default();
    let mut rest = all;
    while let Some(after) = BACKSLASHES.iter().find_map(|one| rest.strip_prefix(*one)) {
        rest = after;
    }
    all.len() - rest.len()
}

/// `%2F`, also where percent signs were encoded again.
fn percent(text: &[u8], at: usize, byte: u8, ends: &mut impl FnMut(usize)) {
    let Some(mut rest) = text.get(at..).and_then(|rest| rest.strip_prefix(b"%")) else {
        return;
    };
    loop {
        if number(rest, 16, 2, 2) == Some(u32::from(byte)) {
            ends(text.len() - rest.len() + 2);
        }
        match rest.strip_prefix(b"25") {
            Some(after) => rest = after,
            None => return,
        }
    }
}

fn percent_sign(text: &[u8], at: usize) -> usize {
    usize::from(text.get(at) == Some(&b'%'))
}

/// `u20ac`, and a pair of those with a sign between them for what is larger.
fn units(
    text: &[u8],
    mut at: usize,
    expected: char,
    sign: impl Fn(&[u8], usize) -> usize,
) -> Option<usize> {
    for (index, unit) in expected.encode_utf16(&mut [0; 2]).iter().enumerate() {
        if index > 0 {
            at += sign(text, at);
        }
        let rest = text.get(at..)?.strip_prefix(b"u")?;
        if number(rest, 16, 4, 4)? != u32::from(*unit) {
            return None;
        }
        at += 5;
    }
    Some(at)
}

/// `u{e9}`, `x{e9}`, `U000000e9`, `xe9` and `351`, whether it stands for a character or a byte.
fn code_point(text: &[u8], at: usize) -> Option<(u32, usize)> {
    let rest = text.get(at..)?;
    let (letter, behind) = rest.split_first()?;
    if b"ux".contains(letter)
        && let Some(inner) = behind.strip_prefix(b"{")
    {
        let length = digits(inner, 16, 6);
        let code = number(inner, 16, 1, 6)?;
        return (inner.get(length) == Some(&b'}')).then_some((code, at + length + 3));
    }
    match letter {
        b'U' => Some((number(behind, 16, 8, 8)?, at + 9)),
        b'x' => Some((number(behind, 16, 2, 2)?, at + 3)),
        b'0'..=b'7' => Some((number(rest, 8, 1, 3)?, at + digits(rest, 8, 3))),
        _ => None,
    }
}

/// `amp;`, `#38;` and `#x26;`, also where ampersands were encoded again.
fn entity(text: &[u8], at: usize, expected: char, ends: &mut impl FnMut(usize)) {
    let mut rest = text.get(at..).unwrap_or_default();
    loop {
        let start = text.len() - rest.len();
        for (name, c) in NAMES {
            if c == expected && rest.starts_with(name.as_bytes()) {
                ends(start + name.len());
            }
        }
        if let Some(number) = rest.strip_prefix(b"#")
            && let Some(length) = numbered(number, expected)
        {
            ends(start + 1 + length);
        }
        match rest.strip_prefix(b"amp;") {
            Some(after) => rest = after,
            None => return,
        }
    }
}

/// How long `38;` or `x26;` is, if it stands for this character.
fn numbered(text: &[u8], expected: char) -> Option<usize> {
    let hexadecimal = text.strip_prefix(b"x").or(text.strip_prefix(b"X"));
    let (rest, radix) = hexadecimal.map_or((text, 10), |rest| (rest, 16));
    let length = digits(rest, radix, 7);
    let is_it =
        number(rest, radix, 1, 7)? == u32::from(expected) && rest.get(length) == Some(&b';');
    is_it.then(|| text.len() - rest.len() + length + 1)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const SECRET: &str = "-a b&\"correct'\\h\u{e9}\u{1f600}%7$";

    fn masked(secret: &str, text: &str) -> String {
        let lenient = Lenient::new(secret).unwrap();
        let mut masked = text.to_owned();
        for (at, anchor) in text.rmatch_indices(lenient.anchor()) {
            if let Some(found) = lenient.around(text.as_bytes(), at..at + anchor.len()) {
                masked.replace_range(found, "*");
            }
        }
        masked
    }

    #[rstest]
    #[case::as_it_is(SECRET)]
    #[case::every_way_at_once(
        r#"-a%20b\\u0026amp;%5C%22correct'"'"'\\\\h\xc3\xA9\ud83d\ude00%257$$"#
    )]
    #[case::bytes_in_octal(r"-a\ b\&\42correct\47\134h\303\251\360\237\230\200%7\$")]
    #[case::html(r"-a+b&#38;&quot;correct&#x27;\h&#233;&#x1F600;%7&#36;")]
    #[case::old_javascript("-a%20b%26%22correct%27%5Ch%E9%uD83D%uDE00%257%24")]
    #[case::code_points(r"\x2da\x{20}b\u{26}correct\u0027\u005ch\u{e9}\U0001f600\x257\u0024")]
    fn a_secret_is_found_in_any_mixture_of_escapes(#[case] text: &str) {
        assert_eq!(
            masked(SECRET, &format!("<{text}>")).replace('\\', ""),
            "<*>"
        );
    }

    #[rstest]
    #[case("-a b&correct'h\u{e9}\u{1f600}%7")]
    #[case("a b&correct'h\u{e9}\u{1f600}%7$")]
    #[case("-a  b&correct'h\u{e9}\u{1f600}%7$")]
    #[case("-a b&amp;correctly'h\u{e9}\u{1f600}%7$")]
    #[case("-a b%27correct'h\u{e9}\u{1f600}%7$")]
    #[case("-a b&correct'h\\u00e8\u{1f600}%7$")]
    #[case("correct")]
    fn what_is_another_text_stays(#[case] text: &str) {
        assert_eq!(masked(SECRET, text), text);
    }

    #[test]
    fn no_match_reaches_over_the_end_of_a_line() {
        let secret = "one=1\ntwo=2";
        assert_eq!(masked(secret, r"a one=1\\ntwo\u003d2 b"), "a * b");
        for text in [secret, "one=1\\\ntwo=2"] {
            assert_eq!(masked(secret, text), text);
        }
    }

    #[test]
    fn what_cannot_be_told_from_other_texts_is_not_looked_for() {
        for text in [
            "",
            "plain",
            "''a\"\"b\\\\c",
            "!@#$%^&*()",
            "\u{e9}\u{e9}\u{e9}",
        ] {
            assert_eq!(Lenient::new(text), None, "{text}");
        }
        assert!(Lenient::finds("plain") && !Lenient::finds("''a\"\"b"));
    }

    #[test]
    fn endless_escapes_are_no_endless_search() {
        let ends = "%25".repeat(100_000);
        let text = format!(
            "{}correct{}{}",
            "\\".repeat(300_000),
            "\\'".repeat(300_000),
            ends
        );
        assert_eq!(masked(SECRET, &text), text);
    }
}
