//! The key of a service account of Google, and tokens that an RSA key signs.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use job_contract::jwt::UnsignedToken;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{ErrorClass, ReadError};
use crate::reference::StoreKind;

const LIFETIME_SECONDS: u64 = 3600;
const SEQUENCE: u8 = 0x30;
const INTEGER: u8 = 0x02;
const OCTETS: u8 = 0x04;

/// The document that Google gives for a key.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ServiceAccountKey {
    pub(crate) client_email: String,
    pub(crate) private_key: SecretString,
    pub(crate) private_key_id: Option<String>,
    pub(crate) project_id: Option<String>,
}

impl ServiceAccountKey {
    /// A token that proves the account to the token service.
    pub(crate) fn assertion(&self, audience: &str, scope: &str) -> Result<SecretString, ReadError> {
        let unusable = || {
            let detail = "the private key of the service account is no RSA key in PEM";
            ReadError::new(StoreKind::Gcp, ErrorClass::CredentialsRejected, detail)
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_err(|_| unusable())?.as_secs();
        let claims = json!({
            "iss": self.client_email,
            "scope": scope,
            "aud": audience,
            "iat": now,
            "exp": now + LIFETIME_SECONDS,
        });
        signed_token(&self.private_key, self.private_key_id.clone(), &claims).ok_or_else(unusable)
    }
}

/// A JSON Web Token that an RSA key in PEM has signed (RS256). `None` if the key cannot be used.
#[must_use]
pub fn signed_token(
    key: &SecretString,
    key_id: Option<String>,
    claims: &Value,
) -> Option<SecretString> {
    let key = RsaKeyPair::from_der(&rsa_key(key.expose_secret())?).ok()?;
    let mut header = json!({"typ": "JWT", "alg": "RS256"});
    if let Some(id) = key_id {
        header["kid"] = id.into();
    }
    let token = UnsignedToken::new(&header, claims);
    let mut signature = vec![0; key.public().modulus_len()];
    let random = SystemRandom::new();
    key.sign(
        &RSA_PKCS1_SHA256,
        &random,
        token.signing_input(),
        &mut signature,
    )
    .ok()?;
    Some(token.with_signature(&signature).into())
}

/// The RSA key in a PEM of PKCS #8 or PKCS #1.
fn rsa_key(pem: &str) -> Option<Vec<u8>> {
    let lines = pem.lines().map(str::trim);
    let body: String = lines.filter(|line| !line.starts_with("-----")).collect();
    let der = STANDARD.decode(body).ok()?;
    let (content, _) = element(&der, SEQUENCE)?;
    let (_, after_version) = element(content, INTEGER)?;
    match element(after_version, SEQUENCE) {
        // PKCS #8: version, algorithm, key.
        Some((_, after_algorithm)) => Some(element(after_algorithm, OCTETS)?.0.to_vec()),
        // PKCS #1: version and numbers.
        None => Some(der),
    }
}

/// The content of the first element, and what follows it.
fn element(der: &[u8], kind: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = der.split_first()?;
    let (&first, mut rest) = rest.split_first()?;
    let mut length = usize::from(first);
    if first >= 0x80 {
        let bytes = usize::from(first & 0x7f);
        if bytes > 4 || rest.len() < bytes {
            return None;
        }
        let (number, after) = rest.split_at(bytes);
        length = number
            .iter()
            .fold(0, |length, byte| length << 8 | usize::from(*byte));
        rest = after;
    }
    (found == kind && rest.len() >= length).then(|| rest.split_at(length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_key_is_no_key() {
        for pem in [
            "",
            "hunter2",
            "-----BEGIN PRIVATE KEY-----\nMAA=\n-----END PRIVATE KEY-----",
            "MIT/////AgEA",
        ] {
            assert_eq!(rsa_key(pem), None, "{pem}");
        }
    }
}
