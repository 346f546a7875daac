//! The compact form of JSON Web Tokens (RFC 7515). The caller has the key and signs.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Serialize;

/// A token without its signature.
pub struct UnsignedToken(String);

/// Shows no claims.
impl std::fmt::Debug for UnsignedToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UnsignedToken")
    }
}

impl UnsignedToken {
    /// Encodes header and claims, with their members in the given order.
    ///
    /// # Panics
    /// If one of them is no JSON.
    #[must_use]
    pub fn new(header: &impl Serialize, claims: &impl Serialize) -> Self {
        Self(format!("{}.{}", encoded(header), encoded(claims)))
    }

    /// The bytes to sign.
    #[must_use]
    pub fn signing_input(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// The token with the signature of its bytes.
    #[must_use]
    pub fn with_signature(self, signature: &[u8]) -> String {
        format!("{}.{}", self.0, URL_SAFE_NO_PAD.encode(signature))
    }
}

fn encoded(part: &impl Serialize) -> String {
    let json = serde_json::to_vec(part).expect("headers and claims are JSON");
    URL_SAFE_NO_PAD.encode(json)
}

#[cfg(test)]
mod tests {
    use hmac::{Hmac, KeyInit as _, Mac as _};
    use serde_json::json;
    use sha2::Sha256;

    use super::*;

    #[test]
    fn a_token_is_the_one_of_every_other_library() {
        let token = UnsignedToken::new(
            &json!({"alg": "HS256", "typ": "JWT"}),
            &json!({"sub": "1234567890", "name": "John Doe", "iat": 1_516_239_022}),
        );
        let mut code = Hmac::<Sha256>::new_from_slice(b"your-256-bit-secret").unwrap();
        code.update(token.signing_input());
        let signature = code.finalize().into_bytes();
        assert_eq!(
            token.with_signature(&signature),
            "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.\
             eyJzdWIiOiIxMjM0NTY3ODkwIiwibmFtZSI6IkpvaG4gRG9lIiwiaWF0IjoxNTE2MjM5MDIyfQ.\
             SflKxwRJSMeKKF2QT4fwpMeJf36POk6yJV_adQssw5c"
        );
    }
}
