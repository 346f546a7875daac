//! Secrets for tests: random values, and a search that finds them in every encoding. It shares no code with the redaction
//! under test.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};

/// This number of consecutive bytes of a secret, in any encoding, is a leak. It is too long to occur by chance.
const WINDOW: usize = 16;
/// Size of the table that rejects most windows by their first bytes.
const FILTER_BITS: u32 = 20;

/// A secret with a random value.
#[derive(Debug, Clone)]
pub struct TestSecret {
    pub name: &'static str,
    pub value: String,
}

fn letters(count: usize) -> String {
    const LETTERS: &[u8] = b"ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz23456789";
    let random = RandomState::new();
    (0..count)
        .map(|at| random.hash_one(at) % LETTERS.len() as u64)
        .map(|at| char::from(LETTERS[usize::try_from(at).unwrap()]))
        .collect()
}

impl TestSecret {
    /// A word of letters and digits.
    pub fn word(name: &'static str) -> Self {
        Self::after(name, "")
    }

    /// A word that begins like this.
    pub fn after(name: &'static str, prefix: &str) -> Self {
        Self::new(name, format!("{prefix}{}", letters(40)))
    }

    /// A value with the characters that encodings escape.
    pub fn awkward(name: &'static str) -> Self {
        let part = || letters(9);
        let value = format!(
            "{}/{}+{}\"{}'{}&{}%{}<{}\\{}",
            part(),
            part(),
            part(),
            part(),
            part(),
            part(),
            part(),
            part(),
            part()
        );
        Self::new(name, value)
    }

    /// A private key of several lines.
    pub fn key(name: &'static str) -> Self {
        let lines: Vec<String> = [64, 64, 64, 40].into_iter().map(letters).collect();
        Self::new(
            name,
            format!(
                "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----\n",
                lines.join("\n")
            ),
        )
    }

    pub fn new(name: &'static str, value: String) -> Self {
        Self { name, value }
    }

    /// The value as a part of a URL.
    pub fn in_address(&self) -> String {
        String::from_utf8(percent(&self.value, true, false)).unwrap()
    }

    /// The lines that are secret.
    fn lines(&self) -> impl Iterator<Item = &str> {
        let lines = self.value.lines();
        lines.filter(|line| !line.starts_with("-----") && line.len() >= WINDOW)
    }

    /// The encodings of each line.
    fn encodings(&self) -> Vec<Vec<u8>> {
        let mut encodings = Vec::new();
        for line in self.lines() {
            encodings.push(line.as_bytes().to_vec());
            encodings.push(serde_json::to_string(line).unwrap().into_bytes());
            for (upper, plus) in [(true, false), (false, false), (true, true)] {
                encodings.push(percent(line, upper, plus));
            }
            let hex = line.bytes().map(|byte| format!("{byte:02x}"));
            encodings.push(hex.collect::<String>().into_bytes());
            for engine in [&STANDARD_NO_PAD, &URL_SAFE_NO_PAD] {
                for lead in 0..3 {
                    let long = [&b"\0\0\0"[..lead], line.as_bytes()].concat();
                    let encoded = engine.encode(long).into_bytes();
                    // Without the characters that depend on the neighbouring bytes.
                    let from = (lead * 8).div_ceil(6);
                    let to = (lead + line.len()) * 8 / 6;
                    encodings.push(encoded[from..to].to_vec());
                }
            }
        }
        encodings
    }
}

fn percent(text: &str, upper: bool, plus: bool) -> Vec<u8> {
    let encode = |byte: u8| match byte {
        b' ' if plus => "+".to_owned(),
        byte if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) => {
            char::from(byte).to_string()
        }
        byte if upper => format!("%{byte:02X}"),
        byte => format!("%{byte:02x}"),
    };
    text.bytes().map(encode).collect::<String>().into_bytes()
}

/// A found part of a secret.
#[derive(Debug)]
pub struct Found {
    pub name: &'static str,
    /// The text around it.
    pub around: String,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "part of {} in {:?}", self.name, self.around)
    }
}

/// A search for parts of secrets.
pub struct Search {
    windows: HashMap<[u8; WINDOW], &'static str>,
    filter: Vec<bool>,
}

impl fmt::Debug for Search {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Search").field(&self.windows.len()).finish()
    }
}

fn slot(window: &[u8]) -> usize {
    let first = [window[0], window[1], window[2], window[3]];
    let mixed = u32::from_le_bytes(first).wrapping_mul(0x9e37_79b1);
    usize::try_from(mixed >> (32 - FILTER_BITS)).unwrap_or(0)
}

impl Search {
    /// A search for these secrets in all encodings.
    pub fn of<'p>(secrets: impl IntoIterator<Item = &'p TestSecret>) -> Self {
        let mut search = Self {
            windows: HashMap::new(),
            filter: vec![false; 1 << FILTER_BITS],
        };
        for secret in secrets {
            for encoding in secret.encodings() {
                for window in encoding.windows(WINDOW) {
                    search.filter[slot(window)] = true;
                    let window = window.try_into().unwrap();
                    search.windows.insert(window, secret.name);
                }
            }
        }
        search
    }

    /// The first part of each secret in these bytes.
    pub fn find(&self, bytes: &[u8]) -> Vec<Found> {
        let mut all = Vec::<Found>::new();
        for (at, window) in bytes.windows(WINDOW).enumerate() {
            if !self.filter[slot(window)] {
                continue;
            }
            if let Some(name) = self.windows.get(window)
                && all.iter().all(|found| found.name != *name)
            {
                let around = &bytes[at.saturating_sub(60)..bytes.len().min(at + 60)];
                let around = String::from_utf8_lossy(around).into_owned();
                all.push(Found { name, around });
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    #[test]
    fn parts_of_a_secret_are_found_in_every_shape() {
        let (word, awkward, key) = (
            TestSecret::word("word"),
            TestSecret::awkward("awkward"),
            TestSecret::key("key"),
        );
        let search = Search::of([&word, &awkward, &key]);
        let found = |text: &str| search.find(text.as_bytes()).first().map(|found| found.name);
        assert_eq!(found(&format!("x{}y", &word.value[5..21])), Some("word"));
        assert_eq!(found(&word.value[5..20]), None);
        assert_eq!(found(&STANDARD.encode(&awkward.value)), Some("awkward"));
        for user in ["u", "us", "use"] {
            let login = STANDARD.encode(format!("{user}:{}", awkward.value));
            // A part of a wrapped line, without its begin and end.
            assert_eq!(found(&login[20..44]), Some("awkward"), "{user}");
        }
        let encoded = String::from_utf8(percent(&awkward.value, false, false)).unwrap();
        assert!(encoded.contains("%2f"));
        assert_eq!(found(&encoded), Some("awkward"));
        let line = key.value.lines().nth(2).unwrap();
        assert_eq!(found(&format!("│ {line}")), Some("key"));
        assert_eq!(found("-----BEGIN OPENSSH PRIVATE KEY-----"), None);
        assert_eq!(found(&TestSecret::word("another").value), None);
    }
}
