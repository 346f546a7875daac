//! Strings as Java's object serialisation writes them, which is how the API keeps everything in Redis (contract 7.2).

const MAGIC: [u8; 4] = [0xac, 0xed, 0x00, 0x05];
const SHORT: u8 = 0x74;
const LONG: u8 = 0x7c;

/// Why bytes are not a serialised string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Written without serialisation, as other clients of Redis do.
    #[error("no serialised object")]
    Plain,
    /// Another serialised object.
    #[error("a serialised object that is no string")]
    NoString,
    /// The length does not fit what follows.
    #[error("the length says {said}, and {there} bytes follow")]
    Length {
        /// What the length field says.
        said: u64,
        /// How many bytes there are.
        there: u64,
    },
    /// Not the encoding Java reads: plain UTF-8 of a character beyond the basic plane, for one.
    #[error("no modified UTF-8 at byte {0}")]
    Text(usize),
}

/// The bytes of a string.
pub fn encode(text: &str) -> Vec<u8> {
    let mut body = Vec::with_capacity(text.len());
    for unit in text.encode_utf16() {
        match unit {
            0x0001..=0x007f => body.push(byte(unit)),
            0x0000 | 0x0080..=0x07ff => body.extend([byte(0xc0 | unit >> 6), tail(unit)]),
            _ => body.extend([byte(0xe0 | unit >> 12), tail(unit >> 6), tail(unit)]),
        }
    }
    let mut bytes = MAGIC.to_vec();
    if let Ok(length) = u16::try_from(body.len()) {
        bytes.push(SHORT);
        bytes.extend(length.to_be_bytes());
    } else {
        bytes.push(LONG);
        bytes.extend((body.len() as u64).to_be_bytes());
    }
    bytes.extend(body);
    bytes
}

fn byte(bits: u16) -> u8 {
    bits.to_be_bytes()[1]
}

fn tail(bits: u16) -> u8 {
    byte(0x80 | bits & 0x3f)
}

/// The string in these bytes, if Java can read it.
pub fn decode(bytes: &[u8]) -> Result<String, DecodeError> {
    let object = bytes.strip_prefix(&MAGIC).ok_or(DecodeError::Plain)?;
    let (length, body) = match object.split_first() {
        Some((&SHORT, rest)) => rest.split_at_checked(2),
        Some((&LONG, rest)) => rest.split_at_checked(8),
        _ => None,
    }
    .ok_or(DecodeError::NoString)?;
    let said = length
        .iter()
        .fold(0, |number, byte| number << 8 | u64::from(*byte));
    let there = body.len() as u64;
    if said != there {
        return Err(DecodeError::Length { said, there });
    }
    let mut units = Vec::with_capacity(body.len());
    let mut at = 0;
    while at < body.len() {
        let (unit, length) = unit(&body[at..]).ok_or(DecodeError::Text(at))?;
        units.push(unit);
        at += length;
    }
    Ok(String::from_utf16_lossy(&units))
}

/// The first UTF-16 unit of modified UTF-8, and how many bytes it takes.
fn unit(bytes: &[u8]) -> Option<(u16, usize)> {
    let tail = |byte: u8| (byte & 0xc0 == 0x80).then_some(u16::from(byte & 0x3f));
    match *bytes {
        [a, ..] if a < 0x80 => Some((a.into(), 1)),
        [a, b, ..] if a & 0xe0 == 0xc0 => Some((u16::from(a & 0x1f) << 6 | tail(b)?, 2)),
        [a, b, c, ..] if a & 0xf0 == 0xe0 => {
            Some((u16::from(a & 0x0f) << 12 | tail(b)? << 6 | tail(c)?, 3))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").unwrap();
            text
        })
    }

    #[test]
    fn strings_have_the_bytes_java_gives_them() {
        for (text, bytes) in [
            ("", "aced0005740000"),
            ("1", "aced000574000131"),
            ("42-context", "aced000574000a34322d636f6e74657874"),
            (
                "executor-job-heartbeat:42",
                "aced00057400196578656375746f722d6a6f622d6865617274626561743a3432",
            ),
            ("lineNumber", "aced000574000a6c696e654e756d626572"),
            ("\u{e9}\0\u{1f600}", "aced000574000ac3a9c080eda0bdedb880"),
        ] {
            assert_eq!(hex(&encode(text)), bytes, "{text:?}");
            assert_eq!(decode(&encode(text)).as_deref(), Ok(text));
        }
        let long = "a".repeat(70_000);
        assert!(hex(&encode(&long)).starts_with("aced00057c000000000001117061"));
        assert_eq!(decode(&encode(&long)), Ok(long));
    }

    #[test]
    fn what_java_would_not_read_is_not_read() {
        let string = |body: &[u8]| {
            let length = u16::try_from(body.len()).unwrap().to_be_bytes();
            [&MAGIC[..], &[SHORT], &length, body].concat()
        };
        assert_eq!(decode(b"output"), Err(DecodeError::Plain));
        assert_eq!(
            decode(&[&MAGIC[..], b"s"].concat()),
            Err(DecodeError::NoString)
        );
        let cut = &encode("output")[..10];
        assert_eq!(decode(cut), Err(DecodeError::Length { said: 6, there: 3 }));
        // Standard UTF-8.
        assert_eq!(
            decode(&string("x\u{1f600}".as_bytes())),
            Err(DecodeError::Text(1))
        );
        assert_eq!(decode(&string(&[0xc3])), Err(DecodeError::Text(0)));
    }
}
