//! Tokens of agents, executors, operators and sessions.
//!
//! A pool token has 256 random bits, and the hub stores only its SHA-256. A job token, an access token and a session
//! contain their rights and a code under a key of the hub, so the hub stores nothing.

use std::{fmt, iter};

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use uuid::Uuid;

use crate::id::PoolName;
use crate::lease::LeaseRef;

const POOL_PREFIX: &str = "mfp";
const JOB_PREFIX: &str = "mfr";
const OPERATOR_PREFIX: &str = "mfo";
const SESSION_PREFIX: &str = "mfs";
const ACCESS_PREFIX: &str = "mfa";
/// Number of characters of a token's checksum.
const CHECKSUM: usize = 6;

/// Why a text is not a pool token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("this is no token of a pool: it must look like `mfp_<pool>_<secret>_<checksum>`")]
    Form,
    #[error("the checksum of the pool token is wrong: it was not copied as a whole")]
    Checksum,
}

/// A token of a pool. It is shown once, at its creation.
#[derive(Clone, PartialEq, Eq)]
pub struct PoolToken {
    pool: PoolName,
    text: String,
}

impl PoolToken {
    /// Returns a new token for a pool.
    pub fn new(pool: PoolName) -> Self {
        let body = format!("{POOL_PREFIX}_{pool}_{}", hex(&random_key()));
        let text = format!("{body}_{}", checksum(&body));
        Self { pool, text }
    }

    /// Parses a token.
    ///
    /// # Errors
    /// If the text has another form, or its checksum is wrong.
    pub fn parse(text: &str) -> Result<Self, TokenError> {
        let (body, sum) = text.rsplit_once('_').ok_or(TokenError::Form)?;
        let mut parts = body.split('_');
        let (prefix, pool, secret) = (parts.next(), parts.next(), parts.next());
        let pool = pool
            .and_then(|pool| pool.parse().ok())
            .ok_or(TokenError::Form)?;
        if prefix != Some(POOL_PREFIX) || secret.is_none_or(str::is_empty) || parts.next().is_some()
        {
            return Err(TokenError::Form);
        }
        if checksum(body) != sum {
            return Err(TokenError::Checksum);
        }
        Ok(Self {
            pool,
            text: text.to_owned(),
        })
    }

    /// Returns the pool of the token.
    pub const fn pool(&self) -> &PoolName {
        &self.pool
    }

    /// Returns the token as text.
    pub fn reveal(&self) -> &str {
        &self.text
    }

    /// Returns what the hub stores: the SHA-256 of the token in hexadecimal digits.
    pub fn digest(&self) -> String {
        hex(&Sha256::digest(&self.text))
    }

    /// Returns whether the token has this digest. Takes constant time.
    pub fn has_digest(&self, digest: &str) -> bool {
        self.digest().as_bytes().ct_eq(digest.as_bytes()).into()
    }
}

impl fmt::Debug for PoolToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolToken")
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

/// A token of an operator, who sees all pools and takes no runs. It is shown once, at its creation.
#[derive(Clone, PartialEq, Eq)]
pub struct OperatorToken(String);

impl OperatorToken {
    /// Returns a new token.
    pub fn random() -> Self {
        let body = format!("{OPERATOR_PREFIX}_{}", hex(&random_key()));
        Self(format!("{body}_{}", checksum(&body)))
    }

    /// Parses a token. Returns `None` if the text has another form.
    pub fn parse(text: &str) -> Option<Self> {
        let (body, sum) = text.rsplit_once('_')?;
        let (prefix, _) = body.split_once('_')?;
        (prefix == OPERATOR_PREFIX && checksum(body) == sum).then(|| Self(text.to_owned()))
    }

    /// Returns the token as text.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Returns what the hub stores: the SHA-256 of the token in hexadecimal digits.
    pub fn digest(&self) -> String {
        hex(&Sha256::digest(&self.0))
    }
}

impl fmt::Debug for OperatorToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperatorToken").finish_non_exhaustive()
    }
}

/// The rights of an access token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessGrant {
    pub pool: PoolName,
    /// Digest of the pool's entry under `oidc` that allowed the exchange.
    pub trust: String,
    /// The end, in seconds since 1970.
    pub expires: u64,
}

impl AccessGrant {
    /// Returns whether a text has the form of an access token.
    pub fn is_token(text: &str) -> bool {
        text.strip_prefix(ACCESS_PREFIX)
            .is_some_and(|rest| rest.starts_with('_'))
    }
}

/// The keys of the hub's job tokens, access tokens and sessions. The first one signs, and each verifies.
#[derive(Clone)]
pub struct JobTokenKeys {
    first: Vec<u8>,
    others: Vec<Vec<u8>>,
}

impl JobTokenKeys {
    /// Returns keys with these bytes.
    pub const fn new(first: Vec<u8>, others: Vec<Vec<u8>>) -> Self {
        Self { first, others }
    }

    /// Makes a job token. The same grant gives the same token.
    pub fn sign(&self, grant: LeaseRef) -> String {
        self.with_code(format!(
            "{JOB_PREFIX}_{}.{}.{}",
            grant.task, grant.lease, grant.fencing_token
        ))
    }

    /// Makes the token of a session at the status page. It contains `session`.
    pub fn sign_session(&self, session: &str) -> String {
        self.with_code(format!("{SESSION_PREFIX}_{session}"))
    }

    /// Returns the content of a session token, if one of the keys made it.
    pub fn verify_session<'t>(&self, token: &'t str) -> Option<&'t str> {
        let (prefix, session) = self.without_code(token)?.split_once('_')?;
        (prefix == SESSION_PREFIX).then_some(session)
    }

    /// Returns the rights of a job token, if one of the keys made it.
    pub fn verify(&self, token: &str) -> Option<LeaseRef> {
        let [task, lease, fencing_token] = self.parts(token, JOB_PREFIX)?;
        Some(LeaseRef {
            task: task.parse().ok()?,
            lease: lease.parse().ok()?,
            fencing_token: fencing_token.parse().ok()?,
        })
    }

    /// Makes an access token.
    pub fn sign_access(&self, grant: &AccessGrant) -> String {
        self.with_code(format!(
            "{ACCESS_PREFIX}_{}.{}.{}",
            grant.pool, grant.trust, grant.expires
        ))
    }

    /// Returns the rights of an access token, if one of the keys made it. It may have expired.
    pub fn verify_access(&self, token: &str) -> Option<AccessGrant> {
        let [pool, trust, expires] = self.parts(token, ACCESS_PREFIX)?;
        Some(AccessGrant {
            pool: pool.parse().ok()?,
            trust: trust.to_owned(),
            expires: expires.parse().ok()?,
        })
    }

    /// Returns keys for another purpose, in the same order. They tell nothing about these. No token has a purpose as its text.
    pub fn derive(&self, purpose: &str) -> impl Iterator<Item = [u8; 32]> {
        self.all()
            .map(move |key| code(key, purpose).finalize().into_bytes().into())
    }

    fn all(&self) -> impl Iterator<Item = &Vec<u8>> {
        iter::once(&self.first).chain(&self.others)
    }

    fn with_code(&self, body: String) -> String {
        let code = code(&self.first, &body).finalize().into_bytes();
        body + "." + &BASE64_URL_SAFE_NO_PAD.encode(code)
    }

    /// Returns the parts between the prefix and the code, if one of the keys made the code.
    fn parts<'t>(&self, token: &'t str, prefix: &str) -> Option<[&'t str; 3]> {
        let (found, rest) = self.without_code(token)?.split_once('_')?;
        let parts: Vec<&str> = rest.split('.').collect();
        parts.try_into().ok().filter(|_| found == prefix)
    }

    fn without_code<'t>(&self, token: &'t str) -> Option<&'t str> {
        let (body, found) = token.rsplit_once('.')?;
        let found = BASE64_URL_SAFE_NO_PAD.decode(found).ok()?;
        let mut keys = self.all();
        keys.any(|key| code(key, body).verify_slice(&found).is_ok())
            .then_some(body)
    }
}

impl fmt::Debug for JobTokenKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobTokenKeys").finish_non_exhaustive()
    }
}

fn code(key: &[u8], body: &str) -> Hmac<Sha256> {
    let mut code = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    code.update(body.as_bytes());
    code
}

/// Returns 256 random bits.
pub fn random_key() -> [u8; 32] {
    let mut key = Sha256::new();
    // Four UUIDs of version 4 have 488 random bits.
    for _ in 0..4 {
        key.update(Uuid::new_v4());
    }
    key.finalize().into()
}

fn checksum(body: &str) -> String {
    let mut sum = hex(&Sha256::digest(body));
    sum.truncate(CHECKSUM);
    sum
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        text.push(char::from_digit(u32::from(byte >> 4), 16).unwrap_or_default());
        text.push(char::from_digit(u32::from(byte & 15), 16).unwrap_or_default());
        text
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::id::{LeaseId, TaskId};

    fn pool() -> PoolName {
        "eu-west".parse().unwrap()
    }

    fn grant() -> LeaseRef {
        LeaseRef {
            task: TaskId::new(),
            lease: LeaseId::new(),
            fencing_token: 3,
        }
    }

    #[test]
    fn a_pool_token_is_parsed_and_has_its_digest() {
        let token = PoolToken::new(pool());
        let read = PoolToken::parse(token.reveal()).unwrap();
        assert_eq!(read, token);
        assert_eq!(read.pool(), &pool());
        assert!(read.has_digest(&token.digest()));
        assert!(!PoolToken::new(pool()).has_digest(&token.digest()));
        assert!(!read.has_digest(""));
    }

    #[rstest]
    #[case::empty("")]
    #[case::a_job_token("mfr_x.y.z")]
    #[case::no_secret("mfp_eu__1234ab")]
    #[case::no_pool("mfp__secret_1234ab")]
    #[case::more("mfp_eu_a_b_1234ab")]
    fn other_texts_are_not_pool_tokens(#[case] text: &str) {
        assert_eq!(PoolToken::parse(text), Err(TokenError::Form));
    }

    #[test]
    fn an_incomplete_token_has_a_wrong_checksum() {
        let token = PoolToken::new(pool());
        let text = token.reveal();
        let cut = &text[..text.len() - 1];
        assert_eq!(PoolToken::parse(cut), Err(TokenError::Checksum));
    }

    #[test]
    fn debug_output_contains_no_token() {
        let token = PoolToken::new(pool());
        let secret = token.reveal().split('_').nth(2).unwrap();
        assert!(!format!("{token:?}").contains(secret));
        assert!(
            !format!("{:?}", JobTokenKeys::new(b"planted".to_vec(), Vec::new()))
                .contains("planted")
        );
    }

    #[test]
    fn an_operator_token_is_not_a_pool_token() {
        let token = OperatorToken::random();
        assert_eq!(OperatorToken::parse(token.reveal()), Some(token.clone()));
        assert!(PoolToken::parse(token.reveal()).is_err());
        assert_eq!(OperatorToken::parse(PoolToken::new(pool()).reveal()), None);
        assert_eq!(OperatorToken::parse(&token.reveal()[1..]), None);
        assert!(!format!("{token:?}").contains("mfo"));
    }

    #[test]
    fn a_session_is_not_a_job_token() {
        let key = JobTokenKeys::new(b"key".to_vec(), Vec::new());
        let session = key.sign_session("1.eu.ab");
        assert_eq!(key.verify_session(&session), Some("1.eu.ab"));
        assert_eq!(key.verify(&session), None);
        assert_eq!(key.verify_session(&key.sign(grant())), None);
        let other = JobTokenKeys::new(b"other".to_vec(), Vec::new());
        assert_eq!(other.verify_session(&session), None);
        assert_eq!(key.verify_session(&session.replace("eu", "us")), None);
    }

    #[test]
    fn a_job_token_contains_its_grant() {
        let key = JobTokenKeys::new(b"key".to_vec(), Vec::new());
        let grant = grant();
        let token = key.sign(grant);
        assert_eq!(key.verify(&token), Some(grant));
        assert_eq!(key.sign(grant), token);
    }

    #[test]
    fn an_access_token_contains_its_grant_and_is_not_a_job_token() {
        let key = JobTokenKeys::new(b"key".to_vec(), Vec::new());
        let grant = AccessGrant {
            pool: pool(),
            trust: "9f31c2aa".to_owned(),
            expires: 1_800_000_000,
        };
        let token = key.sign_access(&grant);
        assert!(AccessGrant::is_token(&token));
        assert_eq!(key.verify_access(&token), Some(grant.clone()));
        assert_eq!(key.verify(&token), None);
        assert_eq!(key.verify_access(&key.sign(self::grant())), None);
        for forged in [
            token.replace("eu-west", "us-west"),
            token.replace("1800000000", "1900000000"),
            JobTokenKeys::new(b"other".to_vec(), Vec::new()).sign_access(&grant),
        ] {
            assert_eq!(key.verify_access(&forged), None, "{forged}");
        }
        assert!(!AccessGrant::is_token(PoolToken::new(pool()).reveal()));
    }

    #[test]
    fn a_job_token_cannot_be_changed_or_made_without_the_key() {
        let key = JobTokenKeys::new(b"key".to_vec(), Vec::new());
        let token = key.sign(grant());
        let (body, code) = token.rsplit_once('.').unwrap();
        let later = body.rsplit_once('.').unwrap().0;
        for forged in [
            JobTokenKeys::new(b"other".to_vec(), Vec::new()).sign(grant()),
            format!("{later}.4.{code}"),
            format!("{body}."),
            body.to_owned(),
            String::new(),
        ] {
            assert_eq!(key.verify(&forged), None, "{forged}");
        }
    }
}
