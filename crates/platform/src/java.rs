//! Reads and writes strings in Java's serialisation, in which the platform writes keys, fields and values in Redis
//! (contract 7.2). Knows neither Redis nor what the strings mean.

/// Magic and version of every serialised stream.
const HEADER: [u8; 4] = [0xac, 0xed, 0x00, 0x05];
/// A string whose length takes two bytes.
const SHORT: u8 = 0x74;
/// A string whose length takes eight bytes.
const LONG: u8 = 0x7c;

/// Serialises `text`.
pub fn encode(text: &str) -> Vec<u8> {
    let length = modified_len(text);
    let mut bytes = Vec::with_capacity(HEADER.len() + 9 + length);
    bytes.extend_from_slice(&HEADER);
    if let Ok(length) = u16::try_from(length) {
        bytes.push(SHORT);
        bytes.extend_from_slice(&length.to_be_bytes());
    } else {
        bytes.push(LONG);
        bytes.extend_from_slice(&(length as u64).to_be_bytes());
    }
    if length == text.len() {
        // Java writes this text as plain UTF-8.
        bytes.extend_from_slice(text.as_bytes());
    } else {
        push_modified(text, &mut bytes);
    }
    bytes
}

/// Reads one serialised string; other bytes are none. Java allows unpaired surrogates and Rust does not, so each becomes
/// U+FFFD.
pub fn decode(bytes: &[u8]) -> Option<String> {
    let (kind, rest) = bytes.strip_prefix(&HEADER)?.split_first()?;
    let (announced, text) = match *kind {
        SHORT => {
            let (length, text) = rest.split_first_chunk()?;
            (u64::from(u16::from_be_bytes(*length)), text)
        }
        LONG => {
            let (length, text) = rest.split_first_chunk()?;
            (u64::from_be_bytes(*length), text)
        }
        _ => return None,
    };
    if announced != text.len() as u64 {
        return None;
    }
    let text = char::decode_utf16(utf16_units(text)?)
        .map(|unit| unit.unwrap_or(char::REPLACEMENT_CHARACTER));
    Some(text.collect())
}

fn modified_len(text: &str) -> usize {
    text.chars()
        .map(|c| match c {
            '\0' => 2,
            c if c.len_utf16() == 2 => 6,
            c => c.len_utf8(),
        })
        .sum()
}

/// Appends a text in modified UTF-8. U+0000 takes two bytes, so that no byte is zero. A character of more than 16 bits is
/// written as two surrogates of three bytes each.
fn push_modified(text: &str, bytes: &mut Vec<u8>) {
    let mut buffer = [0; 4];
    for c in text.chars() {
        match c {
            '\0' => bytes.extend_from_slice(&[0xc0, 0x80]),
            c if c.len_utf16() == 2 => {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    let [high, low] = unit.to_be_bytes();
                    bytes.push(0xe0 | high >> 4);
                    bytes.push(0x80 | (high & 0x0f) << 2 | low >> 6);
                    bytes.push(0x80 | low & 0x3f);
                }
            }
            c => bytes.extend_from_slice(c.encode_utf8(&mut buffer).as_bytes()),
        }
    }
}

/// The 16-bit units of a text. As lenient as Java.
fn utf16_units(text: &[u8]) -> Option<Vec<u16>> {
    let mut units = Vec::with_capacity(text.len());
    let mut at = 0;
    while let Some(&first) = text.get(at) {
        let continuation = |offset: usize| {
            text.get(at + offset)
                .filter(|&&byte| byte & 0xc0 == 0x80)
                .map(|&byte| u16::from(byte & 0x3f))
        };
        let (unit, length) = match first {
            0x00..=0x7f => (u16::from(first), 1),
            0xc0..=0xdf => (u16::from(first & 0x1f) << 6 | continuation(1)?, 2),
            0xe0..=0xef => (
                u16::from(first & 0x0f) << 12 | continuation(1)? << 6 | continuation(2)?,
                3,
            ),
            _ => return None,
        };
        units.push(unit);
        at += length;
    }
    Some(units)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn hex(bytes: &[u8]) -> String {
        use std::fmt::Write as _;
        bytes.iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    /// Produced by JDK 17.
    #[rstest]
    #[case("", "aced0005740000")]
    #[case("1", "aced000574000131")]
    #[case("42", "aced00057400023432")]
    #[case("42-context", "aced000574000a34322d636f6e74657874")]
    #[case(
        "executor-job-heartbeat:42",
        "aced00057400196578656375746f722d6a6f622d6865617274626561743a3432"
    )]
    #[case("jobId", "aced00057400056a6f624964")]
    #[case("stepId", "aced0005740006737465704964")]
    #[case("lineNumber", "aced000574000a6c696e654e756d626572")]
    #[case("output", "aced00057400066f7574707574")]
    #[case("é\0😀", "aced000574000ac3a9c080eda0bdedb880")]
    fn strings_become_the_bytes_of_a_jdk(#[case] text: &str, #[case] expected: &str) {
        let bytes = encode(text);
        assert_eq!(hex(&bytes), expected);
        assert_eq!(decode(&bytes).as_deref(), Some(text));
    }

    #[test]
    fn the_long_form_begins_above_65535_bytes() {
        let short = encode(&"a".repeat(65_535));
        assert_eq!(hex(&short[..7]), "aced000574ffff");
        let long = encode(&"a".repeat(70_000));
        assert_eq!(hex(&long[..13]), "aced00057c0000000000011170");
        assert_eq!(long.len(), 70_013);
        assert!(long[13..].iter().all(|byte| *byte == 0x61));
        // Each takes six bytes, so the length of the encoded text decides, not the length of the string.
        let emoji = "😀".repeat(10_923);
        assert_eq!(encode(&emoji)[4], LONG);
        assert_eq!(decode(&encode(&emoji)), Some(emoji));
    }

    #[rstest]
    #[case(b"")]
    #[case(b"plain text")]
    #[case(b"\xac\xed\x00\x05")]
    #[case(b"\xac\xed\x00\x05\x74\x00")]
    #[case(b"\xac\xed\x00\x05\x73\x72")]
    #[case(b"\xac\xed\x00\x05\x74\x00\x02a")]
    #[case(b"\xac\xed\x00\x05\x74\x00\x01ab")]
    #[case(b"\xac\xed\x00\x05\x7c\xff\xff\xff\xff\xff\xff\xff\xff")]
    #[case(b"\xac\xed\x00\x05\x74\x00\x02a\x80")]
    #[case(b"\xac\xed\x00\x05\x74\x00\x01\xc3")]
    #[case(b"\xac\xed\x00\x05\x74\x00\x04\xf0\x9f\x98\x80")]
    fn other_bytes_are_refused(#[case] bytes: &[u8]) {
        assert_eq!(decode(bytes), None);
    }

    #[test]
    fn half_a_surrogate_pair_is_replaced() {
        assert_eq!(
            decode(b"\xac\xed\x00\x05\x74\x00\x04a\xed\xa0\xbd").as_deref(),
            Some("a\u{fffd}")
        );
    }

    proptest! {
        #[test]
        fn every_string_survives_the_round_trip(text in any::<String>()) {
            prop_assert_eq!(decode(&encode(&text)), Some(text));
        }

        #[test]
        fn strings_of_unusual_characters_survive_too(text in "[\\x00\u{7f}\u{80}\u{7ff}\u{800}\u{ffff}\u{10000}\u{10ffff}]{0,200}") {
            prop_assert_eq!(decode(&encode(&text)), Some(text));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in any::<Vec<u8>>(), serialised in any::<bool>()) {
            let mut input = if serialised { HEADER.to_vec() } else { Vec::new() };
            input.extend(bytes);
            let _ = decode(&input);
        }

        #[test]
        fn no_text_makes_it_panic(text in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut input = HEADER.to_vec();
            input.push(SHORT);
            input.extend(u16::try_from(text.len()).unwrap().to_be_bytes());
            input.extend(text);
            let _ = decode(&input);
        }
    }
}
