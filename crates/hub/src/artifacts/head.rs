//! Reads serial and lineage of a state as it passes, in bounded memory. The rest of the document stays unread: it is the tool's.

/// The longest text of a name or of a value that is kept. Longer ones are none of a state's head.
const LONGEST: usize = 256;

/// Serial and lineage of a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StateHead {
    pub(super) serial: u64,
    pub(super) lineage: String,
}

/// Finds the head in a document that arrives in chunks.
#[derive(Debug, Default)]
pub(super) struct HeadScanner {
    depth: u64,
    is_in_string: bool,
    is_escaped: bool,
    /// Whether the document has anything after its end, or does not begin as an object.
    is_broken: bool,
    is_over: bool,
    place: Place,
    name: Text,
    value: Text,
    serial: Option<u64>,
    lineage: Option<String>,
}

/// The place in the outermost object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Name,
    Value,
}

/// The JSON of a name or of a value.
#[derive(Debug, Default)]
struct Text {
    bytes: Vec<u8>,
    is_too_long: bool,
}

impl Text {
    fn push(&mut self, byte: u8) {
        if self.bytes.len() < LONGEST {
            self.bytes.push(byte);
        } else {
            self.is_too_long = true;
        }
    }

    fn take<T: serde::de::DeserializeOwned>(&mut self) -> Option<T> {
        let Self { bytes, is_too_long } = std::mem::take(self);
        serde_json::from_slice(&bytes).ok().filter(|_| !is_too_long)
    }
}

impl HeadScanner {
    /// Reads the next bytes of the document.
    pub(super) fn read(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.step(*byte);
        }
    }

    /// Returns the head as far as it is known. The rest of the document may change it.
    pub(super) fn so_far(&self) -> Option<StateHead> {
        let (serial, lineage) = (self.serial?, self.lineage.clone()?);
        Some(StateHead { serial, lineage })
    }

    /// Returns the head; `None` if the document is no whole state.
    pub(super) fn finish(self) -> Option<StateHead> {
        let is_whole = self.is_over && !self.is_broken;
        let (serial, lineage) = (self.serial?, self.lineage?);
        is_whole.then_some(StateHead { serial, lineage })
    }

    fn step(&mut self, byte: u8) {
        if self.is_over || self.depth == 0 {
            match byte {
                b'{' if !self.is_over => self.depth = 1,
                byte if byte.is_ascii_whitespace() => {}
                _ => self.is_broken = true,
            }
            return;
        }
        if self.is_in_string {
            self.keep(byte);
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = true,
                b'"' => self.is_in_string = false,
                _ => {}
            }
            return;
        }
        match byte {
            b'"' => {
                self.is_in_string = true;
                self.keep(byte);
            }
            b'{' | b'[' => {
                self.keep(byte);
                self.depth += 1;
            }
            b'}' | b']' => {
                self.depth -= 1;
                if self.depth == 0 {
                    self.end_value();
                    self.is_over = true;
                } else {
                    self.keep(byte);
                }
            }
            b':' if self.depth == 1 => self.place = Place::Value,
            b',' if self.depth == 1 => self.end_value(),
            _ => self.keep(byte),
        }
    }

    /// Keeps what stands in the outermost object itself.
    fn keep(&mut self, byte: u8) {
        if self.depth == 1 {
            match self.place {
                Place::Name => self.name.push(byte),
                Place::Value => self.value.push(byte),
            }
        }
    }

    /// The tool takes the last of several values, and ignores the case of names.
    fn end_value(&mut self) {
        self.place = Place::Name;
        let name: Option<String> = self.name.take();
        let name = name.unwrap_or_default().to_ascii_lowercase();
        match name.as_str() {
            "serial" => self.serial = self.value.take(),
            "lineage" => self.lineage = self.value.take(),
            _ => self.value = Text::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn head(document: &[u8], chunk: usize) -> Option<StateHead> {
        let mut scanner = HeadScanner::default();
        document.chunks(chunk).for_each(|chunk| scanner.read(chunk));
        scanner.finish()
    }

    #[rstest]
    #[case(r#"{"serial": 7, "lineage": "l", "resources": [{"serial": 9}]}"#)]
    #[case(r#" {"a":{"lineage":"x"},"lineage":"l","b":"}\"{","serial":7} "#)]
    #[case(r#"{"serial":6,"lineage":"\u006c","Serial":7}"#)]
    fn the_head_is_found_wherever_it_stands(#[case] document: &str) {
        let expected = StateHead {
            serial: 7,
            lineage: "l".to_owned(),
        };
        for chunk in [1, 3, 1000] {
            assert_eq!(head(document.as_bytes(), chunk), Some(expected.clone()));
        }
    }

    #[rstest]
    #[case("")]
    #[case("null")]
    #[case(r#"{"serial":7}"#)]
    #[case(r#"{"serial":"7","lineage":"l"}"#)]
    #[case(r#"{"serial":-7,"lineage":"l"}"#)]
    #[case(r#"{"serial":7,"lineage":"l""#)]
    #[case(r#"{"serial":7,"lineage":"l"}x"#)]
    #[case(r#"[{"serial":7,"lineage":"l"}]"#)]
    #[case(r#"}{"serial":7,"lineage":"l"}"#)]
    fn what_is_no_whole_state_has_no_head(#[case] document: &str) {
        assert_eq!(head(document.as_bytes(), 2), None);
    }

    #[test]
    fn the_head_is_known_before_the_end() {
        let mut scanner = HeadScanner::default();
        scanner.read(br#"{"version":4,"serial":7,"lineage":"l""#);
        assert_eq!(scanner.so_far(), None);
        scanner.read(b",\"resources\":[");
        let lineage = "l".to_owned();
        assert_eq!(scanner.so_far(), Some(StateHead { serial: 7, lineage }));
    }

    #[test]
    fn long_texts_take_no_memory() {
        let long = "x".repeat(1 << 20);
        let document = json!({"serial": 7, "lineage": long, long.as_str(): 1}).to_string();
        let mut scanner = HeadScanner::default();
        scanner.read(document.as_bytes());
        assert!(scanner.name.bytes.capacity() + scanner.value.bytes.capacity() <= 4 * LONGEST);
        assert_eq!(scanner.finish(), None);
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[\\PC\\\\\"{}\\[\\],:]{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[\\PC\\\\\"{},:]{0,6}", inner, 0..4)
                    .prop_map(|fields| json!(fields)),
            ]
        })
    }

    proptest! {
        #[test]
        fn it_reads_what_a_parser_reads(
            serial in any::<u64>(),
            lineage in "[a-z\\\\\"]{0,8}",
            other in values(),
            chunk in 1..9_usize,
        ) {
            let document = json!({"other": other, "serial": serial, "lineage": lineage, "last": other});
            let found = head(document.to_string().as_bytes(), chunk);
            prop_assert_eq!(found, Some(StateHead { serial, lineage }));
        }
    }
}
