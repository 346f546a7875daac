//! Signature Version 4 of AWS, for requests that post a body to `/`. Pure.

use std::time::SystemTime;

use hmac::{Hmac, KeyInit as _, Mac as _};
use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};
use url::Url;

/// Keys of a user or of a session.
#[derive(Clone, Debug)]
pub struct Keys {
    pub access_key_id: String,
    pub secret_access_key: SecretString,
    pub session_token: Option<SecretString>,
}

/// What a signature covers beside time and keys.
#[derive(Clone, Copy, Debug)]
pub struct Scope<'a> {
    pub region: &'a str,
    pub service: &'a str,
}

/// The headers that authenticate a `POST` of a body to the root of a host: also those that were given, which the signature
/// covers. Names are in lower case.
pub fn sign(
    url: &Url,
    headers: &[(&'static str, &str)],
    body: &str,
    keys: &Keys,
    scope: Scope<'_>,
    now: SystemTime,
) -> Vec<(&'static str, String)> {
    let time = humantime::format_rfc3339_seconds(now).to_string();
    let time = time.replace(['-', ':'], "");
    let date = &time[..8];
    let mut signed: Vec<(&'static str, String)> = headers
        .iter()
        .map(|(name, value)| (*name, (*value).to_owned()))
        .collect();
    signed.push(("x-amz-date", time.clone()));
    if let Some(token) = &keys.session_token {
        signed.push(("x-amz-security-token", token.expose_secret().to_owned()));
    }
    let mut all = signed.clone();
    all.push(("host", host(url)));
    all.sort_unstable();
    let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");
    let lines = all.iter().fold(String::new(), |lines, (name, value)| {
        lines + name + ":" + value.trim() + "\n"
    });
    let canonical = format!("POST\n/\n\n{lines}\n{names}\n{}", digest(body.as_bytes()));
    let Scope { region, service } = scope;
    let place = format!("{date}/{region}/{service}/aws4_request");
    let to_sign = format!(
        "AWS4-HMAC-SHA256\n{time}\n{place}\n{}",
        digest(canonical.as_bytes())
    );
    let key = signing_key(keys.secret_access_key.expose_secret(), date, scope);
    let signature = hex(&mac(&key, &to_sign));
    let id = &keys.access_key_id;
    let authorization = format!(
        "AWS4-HMAC-SHA256 Credential={id}/{place}, SignedHeaders={names}, Signature={signature}"
    );
    signed.push(("authorization", authorization));
    signed
}

/// Host and port as a client sends them.
pub(crate) fn host(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    }
}

/// The SHA-256 of a body, as the header `x-amz-content-sha256` has it.
pub fn digest(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn signing_key(secret: &str, date: &str, scope: Scope<'_>) -> Vec<u8> {
    let parts = [date, scope.region, scope.service, "aws4_request"];
    let first = format!("AWS4{secret}").into_bytes();
    parts.iter().fold(first, |key, part| mac(&key, part))
}

fn mac(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("any length is a key");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";

    /// `post-vanilla` of the vendor's test suite.
    #[test]
    fn the_vendors_example_has_the_vendors_signature() {
        let keys = Keys {
            access_key_id: "AKIDEXAMPLE".into(),
            secret_access_key: SECRET.into(),
            session_token: None,
        };
        let scope = Scope {
            region: "us-east-1",
            service: "service",
        };
        let url = Url::parse("https://example.amazonaws.com/").unwrap();
        let now = humantime::parse_rfc3339("2015-08-30T12:36:00Z").unwrap();
        let headers = sign(&url, &[], "", &keys, scope, now);
        let (_, authorization) = headers.last().unwrap();
        assert_eq!(
            authorization,
            "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, \
             SignedHeaders=host;x-amz-date, \
             Signature=5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"
        );
    }

    #[test]
    fn the_vendors_example_has_the_vendors_key() {
        let scope = Scope {
            region: "us-east-1",
            service: "iam",
        };
        let key = signing_key(SECRET, "20150830", scope);
        assert_eq!(
            hex(&key),
            "c4afb1cc5771d871763a393e44b703571b55cc28424d1a5e86da6ed3c154a4b9"
        );
    }
}
