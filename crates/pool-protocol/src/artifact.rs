//! The artifacts of a step, which executors write into the store of the hub and read from it.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::token::hex;

/// The header with the SHA-256 of a body (RFC 9530), as [`content_digest`] writes it. Each body that is stored has one.
pub const CONTENT_DIGEST: &str = "content-digest";

/// The parameter of a read of the state by a rescue. What a rescue reads, its run has not seen: a state must not follow it.
pub const RESCUE: &str = "rescue";

/// What the store of the hub calls the artifacts of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Artifacts {
    /// The reference by which the platform knows each artifact. The artifact need not exist yet.
    pub references: BTreeMap<String, String>,
    /// The name under which the step publishes its state.
    pub state_name: String,
    /// States of the workspace that are kept and not stored. No run plans then.
    #[serde(default)]
    pub kept: Vec<String>,
}

/// Returns the value of [`CONTENT_DIGEST`] for a SHA-256 in hexadecimal.
pub fn content_digest(sha256: &str) -> String {
    let digits = sha256.as_bytes().chunks(2);
    let bytes: Vec<u8> = digits
        .filter_map(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok())
        .collect();
    format!("sha-256=:{}:", STANDARD.encode(bytes))
}

/// Returns the SHA-256 in a value of [`CONTENT_DIGEST`], in lower-case hexadecimal.
pub fn sha256_of(content_digest: &str) -> Option<String> {
    let text = content_digest.trim().strip_prefix("sha-256=:")?;
    let bytes = STANDARD.decode(text.strip_suffix(':')?).ok()?;
    (bytes.len() == 32).then(|| hex(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_written_as_in_the_standard() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let text = content_digest(empty);
        assert_eq!(
            text,
            "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:"
        );
        assert_eq!(sha256_of(&text).as_deref(), Some(empty));
        for other in ["", "sha-256=::", "sha-256=:AAAA:", "md5=:AAAA:"] {
            assert_eq!(sha256_of(other), None, "{other}");
        }
    }
}
