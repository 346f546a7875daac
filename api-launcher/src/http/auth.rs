//! Verifies the bearer token of the platform (contract 2.3).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http_service::bearer;
use job_contract::secret::{self, SecretError};
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode};
use serde::Deserialize;

/// Issuer and audience of the platform's tokens.
const PLATFORM: &str = "TERRAKUBE_INTERNAL";
const ALGORITHMS: [Algorithm; 3] = [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512];
/// How far the clocks of two machines may be apart.
const SKEW: Duration = Duration::from_mins(1);

/// The secret shared with the platform.
#[derive(Clone)]
pub struct InternalSecret(DecodingKey);

impl std::fmt::Debug for InternalSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("InternalSecret")
    }
}

impl InternalSecret {
    /// Checks signatures with the platform's secret, written as [`secret::decode`] reads it.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        Ok(Self(DecodingKey::from_secret(&secret::decode(text)?)))
    }
}

/// What every token must say.
#[derive(Deserialize)]
struct Claims {
    iss: Option<String>,
    aud: Option<Audience>,
    exp: Option<f64>,
    nbf: Option<f64>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Many(Vec<String>),
}

impl Audience {
    fn holds(&self, name: &str) -> bool {
        match self {
            Self::One(one) => one == name,
            Self::Many(many) => many.iter().any(|one| one == name),
        }
    }
}

/// Why a request is not authorized. The sender sees it, so it contains no secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    #[error("the request has no bearer token in its `Authorization` header")]
    Missing,
    #[error("the bearer token is not a JSON Web Token with algorithm HS256, HS384 or HS512")]
    Malformed,
    #[error("the bearer token's signature does not match: it was made with another secret")]
    Signature,
    #[error("the bearer token's claims cannot be read")]
    Claims,
    #[error("the bearer token does not say when it expires")]
    NoExpiry,
    #[error("the bearer token has expired")]
    Expired,
    #[error("the bearer token is not valid yet")]
    NotYet,
    #[error("the bearer token's issuer is not `{PLATFORM}`")]
    Issuer,
    #[error(
        "the request comes from a web page (header `Origin`). Without authentication, only programs may dispatch"
    )]
    WebPage,
    #[error("the bearer token's audience is not `{PLATFORM}`")]
    Audience,
}

/// Authorizes requests.
#[derive(Clone, Debug)]
pub struct Gate {
    /// If it is `None`, every request is authorized.
    secret: Option<InternalSecret>,
    now: fn() -> SystemTime,
}

impl Gate {
    /// Creates a gate for tokens that are signed with this secret. Without a secret, every request passes. `now` is the
    /// clock.
    pub const fn new(secret: Option<InternalSecret>, now: fn() -> SystemTime) -> Self {
        Self { secret, now }
    }

    /// Returns whether every request is authorized.
    pub(crate) const fn is_open(&self) -> bool {
        self.secret.is_none()
    }

    /// Checks the value of an `Authorization` header.
    pub fn check(&self, authorization: Option<&[u8]>) -> Result<(), AuthError> {
        let Some(secret) = &self.secret else {
            return Ok(());
        };
        let token = authorization.and_then(bearer).ok_or(AuthError::Missing)?;
        let claims = verify(token, secret)?;
        let now = (self.now)()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs_f64();
        let skew = SKEW.as_secs_f64();
        if claims.exp.ok_or(AuthError::NoExpiry)? + skew < now {
            return Err(AuthError::Expired);
        }
        if claims.nbf.is_some_and(|from| from - skew > now) {
            return Err(AuthError::NotYet);
        }
        if claims.iss.as_deref() != Some(PLATFORM) {
            return Err(AuthError::Issuer);
        }
        if !claims.aud.is_some_and(|aud| aud.holds(PLATFORM)) {
            return Err(AuthError::Audience);
        }
        Ok(())
    }
}

/// The signature alone is checked here, in constant time; times are compared with a clock that can be given.
fn verify(token: &str, secret: &InternalSecret) -> Result<Claims, AuthError> {
    let mut validation = Validation::new(Algorithm::HS256);
    validation.algorithms = ALGORITHMS.to_vec();
    validation.required_spec_claims.clear();
    validation.validate_exp = false;
    validation.validate_aud = false;
    decode::<serde_json::Value>(token, &secret.0, &validation)
        .map_err(|error| match error.kind() {
            ErrorKind::InvalidSignature => AuthError::Signature,
            _ => AuthError::Malformed,
        })
        .and_then(|token| serde_json::from_value(token.claims).map_err(|_| AuthError::Claims))
}

#[cfg(test)]
pub(super) use tests::{PLATFORM_TOKEN, gate, when_issued};

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use jsonwebtoken::{EncodingKey, Header, encode};
    use rstest::rstest;
    use serde_json::{Value, json};

    /// Contract appendix A.
    pub(crate) const SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
    pub(crate) const PLATFORM_TOKEN: &str = "eyJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJURVJSQUtVQkVfSU5URVJOQUwiLCJzdWIiOiJUZXJyYWt1YmUgSW50ZXJuYWwgKFRva2VuKSIsImF1ZCI6WyJURVJSQUtVQkVfSU5URVJOQUwiXSwianRpIjoiMDAwMDAwMDAtMDAwMC00MDAwLTgwMDAtMDAwMDAwMDAwMDAxIiwiZW1haWwiOiJpbnRlcm5hbEB0ZXJyYWt1YmUuaW8iLCJlbWFpbF92ZXJpZmllZCI6dHJ1ZSwibmFtZSI6IlRlcnJha3ViZSBBcGkiLCJpYXQiOjE3NjcyMjU2MDAsImV4cCI6MTc2NzIyNTYxMH0.rrVPHw73YZdwPEWVfZxzNs9G1AgwPUQJ3yRNHS194Wo";
    const EXECUTOR_TOKEN: &str = "eyJ0eXAiOiJKV1QiLCJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJUZXJyYWt1YmVJbnRlcm5hbCIsInN1YiI6IlRlcnJha3ViZUludGVybmFsIChUT0tFTikiLCJhdWQiOiJUZXJyYWt1YmVJbnRlcm5hbCIsImVtYWlsIjoibm8tcmVwbHlAdGVycmFrdWJlLmlvIiwiZW1haWxfdmVyaWZpZWQiOnRydWUsIm5hbWUiOiJUZXJyYWt1YmVJbnRlcm5hbCBDbGllbnQiLCJpYXQiOjE3NjcyMjU2MDAsImV4cCI6MTc2NzIyNTY2MH0.UpBfXtjUA3-PS6f9PVLXOmcK1qBrKtfX0BKLNQrBsBE";
    const ISSUED: u64 = 1_767_225_600;

    /// The moment the vectors were signed.
    pub(crate) fn when_issued() -> SystemTime {
        at(0)
    }

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(ISSUED + seconds)
    }

    pub(crate) fn gate(now: fn() -> SystemTime) -> Gate {
        Gate::new(Some(InternalSecret::parse(SECRET).unwrap()), now)
    }

    fn check(now: fn() -> SystemTime, token: &str) -> Result<(), AuthError> {
        gate(now).check(Some(format!("Bearer {token}").as_bytes()))
    }

    fn signed(algorithm: Algorithm, secret: &[u8], claims: &Value) -> String {
        encode(
            &Header::new(algorithm),
            claims,
            &EncodingKey::from_secret(secret),
        )
        .unwrap()
    }

    fn claims() -> Value {
        json!({"iss": PLATFORM, "aud": [PLATFORM], "exp": ISSUED + 10})
    }

    #[rstest]
    #[case(when_issued, Ok(()))]
    // Ten seconds of validity and sixty of skew.
    #[case(|| at(70), Ok(()))]
    #[case(|| at(71), Err(AuthError::Expired))]
    fn the_platforms_token_is_good_until_it_expires(
        #[case] now: fn() -> SystemTime,
        #[case] expected: Result<(), AuthError>,
    ) {
        assert_eq!(check(now, PLATFORM_TOKEN), expected);
    }

    #[test]
    fn an_executors_token_is_not_the_platforms() {
        assert_eq!(check(when_issued, EXECUTOR_TOKEN), Err(AuthError::Issuer));
    }

    #[rstest]
    #[case(32, Algorithm::HS256)]
    #[case(48, Algorithm::HS384)]
    #[case(64, Algorithm::HS512)]
    fn longer_secrets_bring_stronger_algorithms(
        #[case] length: usize,
        #[case] algorithm: Algorithm,
    ) {
        // Bytes that need `-` and `_`, or `+` and `/`, in base64.
        let secret: Vec<u8> = (0xb8..=0xff).take(length).collect();
        let token = format!("bearer {}", signed(algorithm, &secret, &claims()));
        for text in [
            base64::engine::general_purpose::STANDARD.encode(&secret),
            base64::engine::general_purpose::STANDARD_NO_PAD.encode(&secret),
            base64::engine::general_purpose::URL_SAFE.encode(&secret),
            format!("{}\n", URL_SAFE_NO_PAD.encode(&secret)),
        ] {
            let gate = Gate::new(Some(InternalSecret::parse(&text).unwrap()), when_issued);
            assert_eq!(gate.check(Some(token.as_bytes())), Ok(()), "{text}");
        }
    }

    #[test]
    fn a_secret_whose_last_character_has_bits_to_spare_is_the_platforms_secret_all_the_same() {
        let text = SECRET.replace("WY=", "WZ=");
        assert_ne!(text, SECRET);
        let gate = Gate::new(Some(InternalSecret::parse(&text).unwrap()), when_issued);
        let header = format!("Bearer {PLATFORM_TOKEN}");
        assert_eq!(gate.check(Some(header.as_bytes())), Ok(()));
    }

    #[rstest]
    #[case(json!({"iss": null}), AuthError::Issuer)]
    #[case(json!({"iss": "TerrakubeInternal"}), AuthError::Issuer)]
    #[case(json!({"aud": ["somebody"]}), AuthError::Audience)]
    #[case(json!({"aud": null}), AuthError::Audience)]
    #[case(json!({"exp": null}), AuthError::NoExpiry)]
    #[case(json!({"exp": "soon"}), AuthError::Claims)]
    #[case(json!({"nbf": ISSUED + 61}), AuthError::NotYet)]
    fn every_claim_counts(#[case] change: Value, #[case] expected: AuthError) {
        let mut claims = claims();
        for (name, value) in change.as_object().unwrap() {
            claims[name] = value.clone();
        }
        let token = signed(
            Algorithm::HS256,
            b"0123456789abcdef0123456789abcdef",
            &claims,
        );
        assert_eq!(check(when_issued, &token), Err(expected));
    }

    #[test]
    fn an_audience_may_be_one_text() {
        let mut claims = claims();
        claims["aud"] = PLATFORM.into();
        let secret = b"0123456789abcdef0123456789abcdef";
        let token = signed(Algorithm::HS256, secret, &claims);
        assert_eq!(check(when_issued, &token), Ok(()));
    }

    #[test]
    fn forged_tokens_are_refused() {
        let forged = |header: &str, signature: &str| {
            let part = |text: &str| URL_SAFE_NO_PAD.encode(text);
            format!(
                "{}.{}.{signature}",
                part(header),
                part(&claims().to_string())
            )
        };
        let wrong = signed(Algorithm::HS256, &[7; 32], &claims());
        for (token, expected) in [
            (forged(r#"{"alg":"none"}"#, ""), AuthError::Malformed),
            (forged(r#"{"alg":"None"}"#, "AAAA"), AuthError::Malformed),
            (forged(r#"{"alg":"RS256"}"#, "AAAA"), AuthError::Malformed),
            (forged(r#"{"alg":"HS256"}"#, ""), AuthError::Signature),
            (wrong, AuthError::Signature),
            ("nonsense".to_owned(), AuthError::Malformed),
        ] {
            assert_eq!(check(when_issued, &token), Err(expected), "{token}");
        }
    }

    #[rstest]
    #[case(None)]
    #[case(Some("Basic dXNlcg=="))]
    #[case(Some("Bearer "))]
    #[case(Some("Bearer"))]
    fn a_request_without_a_token_is_refused(#[case] header: Option<&str>) {
        let result = gate(when_issued).check(header.map(str::as_bytes));
        assert_eq!(result, Err(AuthError::Missing));
    }

    #[test]
    fn a_bad_secret_is_refused_without_being_quoted() {
        assert_eq!(
            InternalSecret::parse("aHVudGVyMg==").unwrap_err(),
            SecretError::TooShort { found: 7 }
        );
        assert_eq!(
            InternalSecret::parse("hunter 2 is no secret").unwrap_err(),
            SecretError::NotBase64
        );
    }
}
