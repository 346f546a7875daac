//! Checks tokens of OpenID providers, which agents exchange for access tokens. Everything in a token is untrusted until
//! its signature is checked.

mod keys;

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, Validation};
use serde::Deserialize;
use serde_json::{Map, Value};

pub(crate) use self::keys::Issuers;
use self::keys::Key;

/// How much the clocks of the provider and the hub may differ, in seconds.
const SKEW: u64 = 60;
/// An older token is not accepted.
const MAX_AGE: Duration = Duration::from_hours(24);
/// The longest token that is read.
const MAX_TOKEN_BYTES: usize = 16 * 1024;
/// How many characters of a token's text are quoted.
const MAX_QUOTED: usize = 120;
/// The claims that every token must have.
const REQUIRED: [&str; 5] = ["exp", "iat", "iss", "aud", "sub"];

/// An entry under `oidc` of a pool: which tokens of a provider the pool accepts.
#[derive(Debug)]
pub(crate) struct Trust {
    /// The id of this entry in access tokens. It changes with every field.
    pub(crate) digest: String,
    pub(crate) issuer: String,
    pub(crate) audiences: Vec<String>,
    /// Exact subjects, or prefixes with `*` at the end.
    pub(crate) subjects: Vec<String>,
    /// The values that claims must have.
    pub(crate) claims: Map<String, Value>,
    /// The file with the keys of a provider that the hub cannot reach.
    pub(crate) jwks_file: Option<PathBuf>,
}

/// Why a token is not accepted. Clients see it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("the token is no signed JSON Web Token")]
    Form,
    #[error("the token is not signed: its `alg` is `none`")]
    Unsigned,
    #[error("the token is signed with {0}, and only RS256, ES256 and EdDSA are accepted")]
    Algorithm(String),
    #[error("the header of the token has `crit`, which is not supported")]
    Critical,
    #[error("the header of the token names no key (`kid`)")]
    NoKeyId,
    #[error("the pool does not trust the issuer of the token, {0}")]
    Issuer(String),
    #[error("the issuer has no key {0} for this algorithm")]
    UnknownKey(String),
    #[error("the keys of the issuer cannot be read now: the log of the hub says why")]
    NoKeys,
    #[error("the signature of the token is wrong")]
    Signature,
    #[error("the token has expired")]
    Expired,
    #[error("the token is not valid yet: compare the clocks of issuer and hub")]
    Early,
    #[error("the token was issued more than 24 hours ago")]
    Old,
    #[error("the token has no valid claim `{0}`")]
    Missing(String),
    #[error("the token is for another audience than the pool expects")]
    Audience,
    #[error("the pool does not trust the subject of the token, {0}")]
    Subject(String),
    #[error("the claim `{0}` of the token is not what the pool requires")]
    Claim(String),
}

/// A token of a provider, before its signature is checked.
pub(crate) struct IdToken<'t> {
    text: &'t str,
    algorithm: Algorithm,
    key_id: String,
    issuer: String,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    crit: Option<Value>,
}

#[derive(Deserialize)]
struct Unverified {
    iss: Option<String>,
}

impl<'t> IdToken<'t> {
    /// Parses a token without checking it.
    pub(crate) fn parse(text: &'t str) -> Result<Self, Refusal> {
        let mut parts = text.split('.');
        let (Some(header), Some(claims), Some(_), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(Refusal::Form);
        };
        if text.len() > MAX_TOKEN_BYTES {
            return Err(Refusal::Form);
        }
        let header: Header = part(header)?;
        let algorithm = match header.alg.as_str() {
            "RS256" => Algorithm::RS256,
            "ES256" => Algorithm::ES256,
            "EdDSA" => Algorithm::EdDSA,
            "none" => return Err(Refusal::Unsigned),
            other => return Err(Refusal::Algorithm(quote(other))),
        };
        if header.crit.is_some() {
            return Err(Refusal::Critical);
        }
        let claims: Unverified = part(claims)?;
        Ok(Self {
            text,
            algorithm,
            key_id: header.kid.ok_or(Refusal::NoKeyId)?,
            issuer: claims.iss.ok_or(Refusal::Missing("iss".to_owned()))?,
        })
    }

    /// Returns the first trust that accepts the token, and its subject.
    pub(crate) async fn accepted_by<'p>(
        &self,
        trusts: &'p [Trust],
        issuers: &Issuers,
    ) -> Result<(&'p Trust, String), Refusal> {
        let mut refusal = Refusal::Issuer(quote(&self.issuer));
        for trust in trusts.iter().filter(|trust| trust.issuer == self.issuer) {
            let key = issuers.key(trust, &self.key_id, self.algorithm).await;
            match key.and_then(|key| self.check(trust, &key, SystemTime::now())) {
                Ok(subject) => return Ok((trust, subject)),
                // Several clusters may have the same issuer and different keys. The refusal of the entry with this key
                // says more.
                Err(Refusal::UnknownKey(_)) if !matches!(refusal, Refusal::Issuer(_)) => {}
                Err(other) => refusal = other,
            }
        }
        Err(refusal)
    }

    /// Returns the subject of a token that the trust accepts.
    fn check(&self, trust: &Trust, key: &Key, now: SystemTime) -> Result<String, Refusal> {
        let mut validation = Validation::new(self.algorithm);
        validation.leeway = SKEW;
        validation.validate_nbf = true;
        validation.set_required_spec_claims(&REQUIRED);
        validation.set_issuer(&[&trust.issuer]);
        validation.set_audience(&trust.audiences);
        let token = jsonwebtoken::decode::<Map<String, Value>>(self.text, &key.key, &validation);
        let claims = token.map_err(|error| refusal(error.into_kind()))?.claims;
        check_age(&claims, now)?;
        let subject = claims.get("sub").and_then(Value::as_str);
        let subject = subject.ok_or_else(|| Refusal::Missing("sub".to_owned()))?;
        if !trust
            .subjects
            .iter()
            .any(|known| matches_pattern(known, subject))
        {
            return Err(Refusal::Subject(quote(subject)));
        }
        for (name, required) in &trust.claims {
            if !claims
                .get(name)
                .is_some_and(|found| satisfies(found, required))
            {
                return Err(Refusal::Claim(name.clone()));
            }
        }
        Ok(subject.to_owned())
    }
}

fn part<T: serde::de::DeserializeOwned>(part: &str) -> Result<T, Refusal> {
    let bytes = BASE64_URL_SAFE_NO_PAD.decode(part);
    let bytes = bytes.map_err(|_| Refusal::Form)?;
    serde_json::from_slice(&bytes).map_err(|_| Refusal::Form)
}

fn refusal(kind: ErrorKind) -> Refusal {
    match kind {
        ErrorKind::ExpiredSignature => Refusal::Expired,
        ErrorKind::ImmatureSignature => Refusal::Early,
        ErrorKind::InvalidAudience => Refusal::Audience,
        ErrorKind::MissingRequiredClaim(name) | ErrorKind::InvalidClaimFormat(name) => {
            Refusal::Missing(name)
        }
        ErrorKind::Base64(_) | ErrorKind::Json(_) | ErrorKind::Utf8(_) => Refusal::Form,
        _ => Refusal::Signature,
    }
}

fn check_age(claims: &Map<String, Value>, now: SystemTime) -> Result<(), Refusal> {
    let issued = claims.get("iat").and_then(Value::as_f64);
    let issued = issued.ok_or_else(|| Refusal::Missing("iat".to_owned()))?;
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (age, skew) = (now.as_secs_f64() - issued, Duration::from_secs(SKEW));
    if age < -skew.as_secs_f64() {
        Err(Refusal::Early)
    } else if age > (MAX_AGE + skew).as_secs_f64() {
        Err(Refusal::Old)
    } else {
        Ok(())
    }
}

fn matches_pattern(pattern: &str, subject: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => subject.starts_with(start),
        None => subject == pattern,
    }
}

/// Returns whether a claim has the required value: the same value, an item of a list, or the fields of an object.
fn satisfies(found: &Value, required: &Value) -> bool {
    match (found, required) {
        (Value::Object(found), Value::Object(required)) => {
            required.iter().all(|(name, required)| {
                found
                    .get(name)
                    .is_some_and(|found| satisfies(found, required))
            })
        }
        (Value::Array(items), Value::String(_)) => items.contains(required),
        _ => found == required,
    }
}

/// Quotes a text of a token. It may contain anything.
fn quote(text: &str) -> String {
    format!("{:?}", text.chars().take(MAX_QUOTED).collect::<String>())
}

#[cfg(test)]
mod tests;
