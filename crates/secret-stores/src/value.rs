//! What a store holds under one name, and the text that a reference takes of it.

use base64::Engine;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Map, Value};

use crate::error::{ErrorClass, ReadError};
use crate::reference::StoreKind;

/// The largest secret of any store that is supported.
const MAX_BYTES: usize = 65_536;

/// A secret as it was read.
pub enum SecretValue {
    Text(SecretString),
    /// The members of a secret of Vault.
    Members(Map<String, Value>),
}

/// The value is left out.
impl std::fmt::Debug for SecretValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Text(_) => "Text",
            Self::Members(_) => "Members",
        })
    }
}

impl SecretValue {
    pub(crate) fn of_base64(
        store: StoreKind,
        engine: &impl Engine,
        encoded: &SecretString,
    ) -> Result<Self, ReadError> {
        let unusable = |detail| ReadError::new(store, ErrorClass::Unusable, detail);
        let bytes = engine.decode(encoded.expose_secret());
        let bytes = bytes.map_err(|_| unusable("it is no base64"))?;
        let text = String::from_utf8(bytes).map_err(|_| unusable("it is binary"))?;
        Ok(Self::Text(text.into()))
    }

    /// The text that a reference with this key takes.
    pub fn select(&self, store: StoreKind, key: Option<&str>) -> Result<SecretString, ReadError> {
        let unusable = |detail| ReadError::new(store, ErrorClass::Unusable, detail);
        let text = match (self, key) {
            (Self::Text(text), None) => text.expose_secret().to_owned(),
            (Self::Text(text), Some(key)) => {
                let document: Value = serde_json::from_str(text.expose_secret())
                    .map_err(|_| unusable("it is not JSON, so it has no keys"))?;
                let found = if key.starts_with('/') {
                    document.pointer(key)
                } else {
                    document.get(key)
                };
                scalar(found).map_err(unusable)?
            }
            (Self::Members(members), key) => {
                scalar(members.get(key.unwrap_or_default())).map_err(|detail| match detail {
                    MISSING => ReadError::new(store, ErrorClass::NotFound, MISSING),
                    detail => unusable(detail),
                })?
            }
        };
        if text.contains('\0') {
            return Err(unusable("it holds a NUL character"));
        }
        if text.len() > MAX_BYTES {
            return Err(unusable("it is larger than 65,536 bytes"));
        }
        Ok(text.into())
    }
}

const MISSING: &str = "there is no such key";

fn scalar(value: Option<&Value>) -> Result<String, &'static str> {
    match value {
        None => Err(MISSING),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(number @ (Value::Number(_) | Value::Bool(_))) => Ok(number.to_string()),
        Some(_) => Err("the key holds no text, number or boolean"),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("a\n", None, Ok("a\n"))]
    #[case(r#"{"a":"x","/b":1}"#, Some("a"), Ok("x"))]
    #[case(r#"{"a":{"b":[true]}}"#, Some("/a/b/0"), Ok("true"))]
    #[case(r#"{"a":12345678901234567890}"#, Some("a"), Ok("12345678901234567890"))]
    #[case(
        r#"{"a":null}"#,
        Some("a"),
        Err("the key holds no text, number or boolean")
    )]
    #[case("{}", Some("a"), Err(MISSING))]
    #[case("plain", Some("a"), Err("it is not JSON, so it has no keys"))]
    #[case("a\0b", None, Err("it holds a NUL character"))]
    fn a_key_selects_text(
        #[case] text: &str,
        #[case] key: Option<&str>,
        #[case] expected: Result<&str, &str>,
    ) {
        let found = SecretValue::Text(text.into()).select(StoreKind::Aws, key);
        match (found, expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found.expose_secret(), expected),
            (Err(error), Err(expected)) => assert_eq!(error.detail, expected),
            (found, expected) => panic!("{found:?} {expected:?}"),
        }
    }
}
