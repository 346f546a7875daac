//! Checks JSON that the hub passes on as it is, in one pass that keeps nothing of it.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The deepest nesting of a document. Its readers accept 128 levels, and messages wrap it.
pub(super) const MAX_DEPTH: usize = 100;

/// Returns whether every reader accepts this JSON: it is valid and not too deep, each text is whole, and each number is finite.
pub(super) fn is_readable(json: &[u8]) -> bool {
    let mut reader = serde_json::Deserializer::from_slice(json);
    let read = Levels(MAX_DEPTH).deserialize(&mut reader);
    read.is_ok() && reader.end().is_ok()
}

/// Reads a value with this many levels at most.
#[derive(Clone, Copy)]
struct Levels(usize);

impl Levels {
    fn below<E: serde::de::Error>(self) -> Result<Self, E> {
        let below = self.0.checked_sub(1).map(Self);
        below.ok_or_else(|| E::custom("it has too many levels"))
    }
}

impl<'de> DeserializeSeed<'de> for Levels {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        // `deserialize_ignored_any` would not look into texts and numbers.
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Levels {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let below = self.below()?;
        while items.next_element_seed(below)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        let below = self.below()?;
        // Keys are texts, and serde_json reads them whole.
        while fields.next_key::<IgnoredAny>()?.is_some() {
            fields.next_value_seed(below)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::flat(r#"{"jobId":"7","a":[1,-1,1.5,true,null,"\ud83d\ude00"]} "#.to_owned(), true)]
    #[case::deep(nested(99), true)]
    #[case::too_deep(nested(100), false)]
    #[case::far_too_deep(nested(100_000), false)]
    #[case::half_a_pair(r#"{"x":"\ud800"}"#.to_owned(), false)]
    #[case::half_a_pair_in_a_key(r#"{"\ud800":1}"#.to_owned(), false)]
    #[case::endless(r#"{"x":1e999}"#.to_owned(), false)]
    #[case::half(r#"{"x":1"#.to_owned(), false)]
    #[case::more(r"{}{}".to_owned(), false)]
    fn what_an_agent_cannot_read_is_found(#[case] json: String, #[case] expected: bool) {
        assert_eq!(is_readable(json.as_bytes()), expected);
    }

    #[test]
    fn a_text_that_is_no_utf_8_is_found() {
        assert!(!is_readable(b"{\"x\":\"\xff\"}"));
        assert!(!is_readable(b"{\"\xff\":1}"));
    }

    fn nested(levels: usize) -> String {
        format!(r#"{{"x":{}{}}}"#, "[".repeat(levels), "]".repeat(levels))
    }
}
