//! Reads and caches the keys of OpenID providers from their discovery documents, or reads them from files.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use job_contract::chain;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use runtime::regular_file;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::Instant;
use tracing::{info, warn};

use super::{Refusal, Trust, quote};

/// The shortest time between two requests to a provider, so that tokens with unknown keys cannot cause more.
const MIN_REQUEST_INTERVAL: Duration = Duration::from_mins(1);
/// Older keys are read again, so that withdrawn keys end.
const MAX_CACHE_AGE: Duration = Duration::from_hours(1);
/// How long keys are used while the provider cannot be reached.
const MAX_KEY_AGE: Duration = Duration::from_hours(24);
const TIMEOUT: Duration = Duration::from_secs(10);
/// The largest document of a provider that is read.
const MAX_BYTES: u64 = 256 * 1024;
/// The length in bytes of the shortest RSA modulus that is accepted.
const RSA_BYTES: usize = 256;
const ED25519_BYTES: usize = 32;

/// A key, and the only algorithm for which it is valid.
#[derive(Clone, Debug)]
pub(super) struct Key {
    algorithm: Algorithm,
    pub(super) key: DecodingKey,
}

/// The keys of a provider by their ids.
type KeySet = HashMap<String, Key>;

/// The cached keys of all providers.
#[derive(Debug)]
pub(crate) struct Issuers {
    http: reqwest::Client,
    known: Mutex<HashMap<String, Arc<Issuer>>>,
}

/// A provider.
#[derive(Debug, Default)]
struct Issuer {
    cached: Mutex<CachedKeys>,
    /// Locked while the provider may be asked. Tokens with known keys do not wait for it.
    asking: tokio::sync::Mutex<()>,
}

impl Issuer {
    fn cached(&self) -> MutexGuard<'_, CachedKeys> {
        runtime::lock(&self.cached)
    }
}

/// The cached keys of a provider.
#[derive(Debug, Default)]
struct CachedKeys {
    keys: KeySet,
    read: Option<Instant>,
    asked: Option<Instant>,
    /// Whether the last request for the keys failed.
    failed: bool,
}

#[derive(Deserialize)]
struct Discovery {
    issuer: String,
    jwks_uri: String,
}

#[derive(Deserialize)]
struct Jwks {
    keys: Vec<Value>,
}

impl Issuers {
    /// Returns an empty cache. Certificates are checked as in all clients. Tests name theirs in `SSL_CERT_FILE`.
    pub(crate) fn new() -> Result<Self, reqwest::Error> {
        let http = reqwest::Client::builder()
            .https_only(true)
            .redirect(reqwest::redirect::Policy::none())
            .timeout(TIMEOUT)
            .user_agent(concat!("mayfly/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self {
            http,
            known: Mutex::default(),
        })
    }

    /// Returns a key of a provider. If the future is dropped during a request, the provider is not asked again for a
    /// minute.
    pub(super) async fn key(
        &self,
        trust: &Trust,
        id: &str,
        algorithm: Algorithm,
    ) -> Result<Key, Refusal> {
        let find = |keys: &KeySet| {
            let key = keys.get(id).filter(|key| key.algorithm == algorithm);
            key.cloned().ok_or_else(|| Refusal::UnknownKey(quote(id)))
        };
        if let Some(file) = &trust.jwks_file {
            let keys = read_file(file).map_err(|problem| {
                warn!(file = %file.display(), problem, "the keys of an issuer cannot be read");
                Refusal::NoKeys
            })?;
            return find(&keys);
        }
        let known = {
            let mut all = runtime::lock(&self.known);
            Arc::clone(all.entry(trust.issuer.clone()).or_default())
        };
        let is_within = |at: Option<Instant>, time| at.is_some_and(|at| at.elapsed() < time);
        let current = || {
            let cached = known.cached();
            let is_current = is_within(cached.read, MAX_CACHE_AGE);
            find(&cached.keys).ok().filter(|_| is_current)
        };
        if let Some(key) = current() {
            return Ok(key);
        }
        let _asking = known.asking.lock().await;
        if let Some(key) = current() {
            return Ok(key);
        }
        if !is_within(known.cached().asked, MIN_REQUEST_INTERVAL) {
            known.cached().asked = Some(Instant::now());
            let fetched = self.fetch(&trust.issuer).await;
            let mut cached = known.cached();
            cached.failed = fetched.is_err();
            match fetched {
                Ok(keys) => {
                    info!(
                        issuer = trust.issuer,
                        keys = keys.len(),
                        "read the keys of an issuer"
                    );
                    (cached.keys, cached.read) = (keys, Some(Instant::now()));
                }
                Err(problem) => {
                    warn!(
                        issuer = trust.issuer,
                        problem, "the keys of an issuer cannot be read"
                    );
                }
            }
        }
        let cached = known.cached();
        if !is_within(cached.read, MAX_KEY_AGE) {
            return Err(Refusal::NoKeys);
        }
        let found = find(&cached.keys);
        found.map_err(|refusal| {
            if cached.failed {
                Refusal::NoKeys
            } else {
                refusal
            }
        })
    }

    async fn fetch(&self, issuer: &str) -> Result<KeySet, String> {
        let url = format!(
            "{}/.well-known/openid-configuration",
            issuer.trim_end_matches('/')
        );
        let discovery: Discovery = self.get(&url).await?;
        if discovery.issuer != issuer {
            let other = quote(&discovery.issuer);
            return Err(format!("{url} is the document of another issuer, {other}"));
        }
        let jwks: Jwks = self.get(&discovery.jwks_uri).await?;
        Ok(key_set(&jwks))
    }

    async fn get<T: DeserializeOwned>(&self, url: &str) -> Result<T, String> {
        let response = self.http.get(url).send().await;
        let mut response = response.map_err(|error| chain(&error))?;
        if response.status() != reqwest::StatusCode::OK {
            return Err(format!("{url} answers with status {}", response.status()));
        }
        let mut body = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(|error| chain(&error))? {
            body.extend_from_slice(&piece);
            if body.len() as u64 > MAX_BYTES {
                return Err(format!("{url} has more than {MAX_BYTES} bytes"));
            }
        }
        serde_json::from_slice(&body).map_err(|error| format!("{url} cannot be read: {error}"))
    }
}

fn read_file(path: &Path) -> Result<KeySet, String> {
    let text = regular_file::read_text(path, MAX_BYTES).map_err(|error| error.to_string())?;
    let jwks = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    Ok(key_set(&jwks))
}

/// Returns the keys that can be used. A provider may also have others.
fn key_set(jwks: &Jwks) -> KeySet {
    let usable = |value: &Value| {
        let jwk = Jwk::deserialize(value).ok()?;
        let id = jwk.common.key_id.clone()?;
        Some((id, usable(&jwk)?))
    };
    jwks.keys.iter().filter_map(usable).collect()
}

fn usable(jwk: &Jwk) -> Option<Key> {
    let decode = |text: &str| BASE64_URL_SAFE_NO_PAD.decode(text).ok();
    let algorithm = match &jwk.algorithm {
        AlgorithmParameters::RSA(key) => {
            let modulus = decode(&key.n)?;
            let length = modulus.iter().skip_while(|byte| **byte == 0).count();
            (length >= RSA_BYTES).then_some(Algorithm::RS256)?
        }
        AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => {
            Algorithm::ES256
        }
        // The verifier does not check the length.
        AlgorithmParameters::OctetKeyPair(key)
            if key.curve == EllipticCurve::Ed25519 && decode(&key.x)?.len() == ED25519_BYTES =>
        {
            Algorithm::EdDSA
        }
        _ => return None,
    };
    let is_for_this = |known: &jsonwebtoken::jwk::KeyAlgorithm| {
        known.to_string().parse::<Algorithm>().ok() == Some(algorithm)
    };
    let for_signatures = |known: &PublicKeyUse| *known == PublicKeyUse::Signature;
    let common = &jwk.common;
    if !common.key_algorithm.as_ref().is_none_or(is_for_this)
        || !common.public_key_use.as_ref().is_none_or(for_signatures)
    {
        return None;
    }
    let key = DecodingKey::from_jwk(jwk).ok()?;
    Some(Key { algorithm, key })
}

#[cfg(test)]
pub(super) fn parse(jwks: Value) -> HashMap<String, Key> {
    key_set(&Jwks::deserialize(jwks).unwrap())
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use serde_json::json;
    use test_peers::oidc::SigningKey;

    use super::*;

    #[tokio::test]
    async fn a_token_with_a_known_key_does_not_wait_for_the_provider() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let issuers = Issuers::new().unwrap();
        let issuer = Arc::<Issuer>::default();
        let key = SigningKey::new("one", Algorithm::ES256);
        issuer.cached().keys = parse(json!({"keys": [key.jwk]}));
        issuer.cached().read = Some(Instant::now());
        let url = "https://issuer.test".to_owned();
        let known = HashMap::from([(url.clone(), Arc::clone(&issuer))]);
        *issuers.known.lock().unwrap() = known;
        let trust = Trust {
            digest: "d".to_owned(),
            issuer: url,
            audiences: Vec::new(),
            subjects: Vec::new(),
            claims: serde_json::Map::new(),
            jwks_file: None,
        };
        let _asking = issuer.asking.lock().await;
        let find = |id| issuers.key(&trust, id, Algorithm::ES256).now_or_never();
        assert!(find("one").unwrap().is_ok());
        assert!(find("other").is_none(), "one at a time asks");
    }
}
