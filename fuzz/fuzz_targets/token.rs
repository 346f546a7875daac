//! Tokens and their secrets. An input is an `Authorization` header, or the header and the claims of a token on two lines. The
//! target signs the latter with the right secret. A token is accepted only if its claims allow it.

#![no_main]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api_launcher::auth::{AuthError, Gate, InternalSecret};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, EncodingKey, crypto};
use libfuzzer_sys::fuzz_target;
use platform::terrakube::token::{CALL, TokenSource};
use secrecy::ExposeSecret as _;
use serde_json::Value;

const SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
const KEY: &[u8] = b"0123456789abcdef0123456789abcdef";
const NOW: u32 = 1_767_225_600;
const PLATFORM: &str = "TERRAKUBE_INTERNAL";

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(NOW.into())
}

fuzz_target!(|data: &[u8]| {
    let gate = Gate::new(Some(InternalSecret::parse(SECRET).expect("a secret")), now);
    // No input guesses a signature.
    assert!(gate.check(Some(data)).is_err());
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    assert!(
        gate.check(Some(format!("Bearer {text}").as_bytes()))
            .is_err()
    );
    secret(text);
    if let Some((header, claims)) = text.split_once('\n') {
        signed(&gate, header, claims);
    }
});

fn signed(gate: &Gate, header: &str, claims: &str) {
    let token = format!(
        "{}.{}",
        URL_SAFE_NO_PAD.encode(header),
        URL_SAFE_NO_PAD.encode(claims)
    );
    let key = EncodingKey::from_secret(KEY);
    let header = serde_json::from_str::<Value>(header).unwrap_or_default();
    let claims = serde_json::from_str::<Value>(claims).unwrap_or_default();
    for (name, algorithm) in [
        ("HS256", Algorithm::HS256),
        ("HS384", Algorithm::HS384),
        ("HS512", Algorithm::HS512),
    ] {
        let signature = crypto::sign(token.as_bytes(), &key, algorithm).expect("any key signs");
        let authorization = format!("Bearer {token}.{signature}");
        if gate.check(Some(authorization.as_bytes())).is_ok() {
            assert_eq!(header["alg"], name);
            assert!(is_the_platforms(&claims), "{claims}");
        }
    }
}

fn is_the_platforms(claims: &Value) -> bool {
    let (now, skew) = (f64::from(NOW), 60.0);
    let audience = match &claims["aud"] {
        Value::Array(many) => many.iter().any(|one| one == PLATFORM),
        one => one == PLATFORM,
    };
    audience
        && claims["iss"] == PLATFORM
        && claims["exp"].as_f64().is_some_and(|end| end + skew >= now)
        && claims["nbf"]
            .as_f64()
            .is_none_or(|start| start - skew <= now)
}

/// Both programs accept the same secrets, and an executor's token never counts as the platform's.
fn secret(text: &str) {
    match (InternalSecret::parse(text), TokenSource::parse(text)) {
        (Ok(secret), Ok(source)) => {
            let token = source.mint(CALL).expect("it has a key");
            let authorization = format!("Bearer {}", token.expose_secret());
            let checked = Gate::new(Some(secret), now).check(Some(authorization.as_bytes()));
            assert_eq!(checked, Err(AuthError::Issuer));
        }
        (Err(here), Err(there)) => {
            let message = here.to_string();
            assert_eq!(message, there.to_string());
            // The message contains nothing of the text.
            let counted = message
                .strip_prefix("holds ")
                .and_then(|rest| rest.strip_suffix(" bytes, at least 32 are needed"))
                .is_some_and(|count| count.parse::<usize>().is_ok_and(|count| count < 32));
            assert!(counted || message == "is not base64", "{message}");
        }
        (here, there) => unreachable!("only one of two reads it: {here:?}, {there:?}"),
    }
}
