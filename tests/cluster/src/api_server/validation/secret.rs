//! Secrets and config maps: keys, encoding, size, immutability.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use super::Errors;

const LIMIT: usize = 1024 * 1024;
const KEY: &str = "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or \
     'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')";

/// Why `text` is no key of a Secret or config map.
pub(crate) fn key_problem(text: &str) -> Option<&'static str> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if text.len() > 253 {
        return Some("must be no more than 253 bytes");
    }
    if text.is_empty() || !text.bytes().all(fits) {
        return Some(KEY);
    }
    if text == "." || text.starts_with("..") {
        return Some("must not be '.' or start with '..'");
    }
    None
}

pub(crate) fn validate(new: &Value, old: Option<&Value>, errors: &mut Errors) {
    let is_secret = new["kind"] == "Secret";
    let mut size = 0;
    for map in ["data", "binaryData"] {
        for (key, value) in new[map].as_object().into_iter().flatten() {
            if let Some(why) = key_problem(key) {
                errors.invalid(format!("{map}[{key}]"), &json!(key), why);
            }
            let text = value.as_str().unwrap_or("");
            let encoded = is_secret || map == "binaryData";
            size += if encoded {
                BASE64_STANDARD.decode(text).map_or(0, |bytes| bytes.len())
            } else {
                text.len()
            };
        }
    }
    if size > LIMIT {
        errors.too_long(if is_secret { "data" } else { "" }, LIMIT);
    }
    let Some(old) = old else { return };
    if is_secret && new["type"] != old["type"] {
        errors.invalid("type", &new["type"], "field is immutable");
    }
    if old["immutable"] == true {
        if new["immutable"] != true {
            errors.forbidden("immutable", "field is immutable when `immutable` is set");
        }
        for map in ["data", "binaryData"] {
            if new[map] != old[map] {
                errors.forbidden(map, "field is immutable when `immutable` is set");
            }
        }
    }
}
