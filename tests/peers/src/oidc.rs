//! An OpenID provider: a discovery document and a key set over TLS, and keys that sign any token.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, PublicKeyData as _};
use rsa::pkcs1::EncodeRsaPrivateKey as _;
use rsa::traits::PublicKeyParts as _;
use serde_json::{Value, json};

use crate::http::{Request, Response, Server};

const DISCOVERY: &str = "/.well-known/openid-configuration";
const JWKS: &str = "/keys";

/// A key that signs tokens.
pub struct SigningKey {
    /// The `kid` of the key.
    pub id: String,
    /// The algorithm of its signatures.
    pub algorithm: Algorithm,
    key: EncodingKey,
    /// The public half.
    pub jwk: Value,
}

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SigningKey")
            .field("jwk", &self.jwk)
            .finish_non_exhaustive()
    }
}

impl SigningKey {
    /// Returns a new key for `RS256`, `ES256` or `EdDSA`.
    pub fn new(id: &str, algorithm: Algorithm) -> Self {
        let (key, mut jwk) = match algorithm {
            Algorithm::RS256 => rsa_key(2048),
            Algorithm::ES256 => {
                let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("a P-256 key");
                // The bytes are an uncompressed point.
                let (x, y) = pair.der_bytes()[1..].split_at(32);
                let jwk = json!({"kty": "EC", "crv": "P-256", "x": BASE64.encode(x), "y": BASE64.encode(y)});
                (EncodingKey::from_ec_der(&pair.serialize_der()), jwk)
            }
            Algorithm::EdDSA => {
                let pair = KeyPair::generate_for(&PKCS_ED25519).expect("an Ed25519 key");
                let jwk =
                    json!({"kty": "OKP", "crv": "Ed25519", "x": BASE64.encode(pair.der_bytes())});
                (EncodingKey::from_ed_der(&pair.serialize_der()), jwk)
            }
            other => unreachable!("no test signs with {other:?}"),
        };
        jwk["kid"] = id.into();
        jwk["use"] = "sig".into();
        Self {
            id: id.to_owned(),
            algorithm,
            key,
            jwk,
        }
    }

    /// Returns a token with these claims.
    pub fn sign(&self, claims: &Value) -> String {
        let mut header = Header::new(self.algorithm);
        header.kid = Some(self.id.clone());
        jsonwebtoken::encode(&header, claims, &self.key).expect("the key signs")
    }
}

/// Returns an RSA key with this number of bits, and its public half.
pub fn rsa_key(bits: usize) -> (EncodingKey, Value) {
    let key = rsa::RsaPrivateKey::new(&mut rand::thread_rng(), bits).expect("an RSA key");
    let [n, e] = [key.n(), key.e()].map(|number| BASE64.encode(number.to_bytes_be()));
    let der = key.to_pkcs1_der().expect("it can be encoded");
    let jwk = json!({"kty": "RSA", "n": n, "e": e});
    (EncodingKey::from_rsa_der(der.as_bytes()), jwk)
}

/// Returns the seconds since 1970.
pub fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("a time after 1970").as_secs()
}

/// A running provider.
#[derive(Debug)]
pub struct Issuer {
    server: Server,
    keys: Arc<Mutex<Vec<Value>>>,
}

impl Issuer {
    /// Starts a provider that publishes these keys.
    pub fn start(keys: &[&SigningKey]) -> io::Result<Self> {
        let published = keys.iter().map(|key| key.jwk.clone()).collect();
        let keys = Arc::new(Mutex::new(published));
        let shared = Arc::clone(&keys);
        let server = Server::start_tls(move |request| answer(request, &shared))?;
        Ok(Self { server, keys })
    }

    /// Returns the `iss` of its tokens.
    pub fn url(&self) -> String {
        self.server.url()
    }

    /// Returns the certificate of the provider in PEM.
    pub fn certificate(&self) -> &str {
        self.server.certificate().expect("it speaks TLS")
    }

    /// Publishes only these keys from now on.
    pub fn publish(&self, keys: &[&SigningKey]) {
        let mut published = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        *published = keys.iter().map(|key| key.jwk.clone()).collect();
    }

    /// Returns how often the keys were read.
    pub fn reads(&self) -> usize {
        let requests = self.server.requests();
        requests.iter().filter(|one| one.path == JWKS).count()
    }

    /// Returns the claims of a token that is valid for an hour.
    pub fn claims(&self, audience: &str, subject: &str) -> Value {
        let now = now();
        json!({"iss": self.url(), "aud": [audience], "sub": subject, "iat": now, "nbf": now, "exp": now + 3600})
    }
}

fn answer(request: &Request, keys: &Mutex<Vec<Value>>) -> Response {
    let url = format!("https://{}", request.header("host").unwrap_or_default());
    let document = match request.path.as_str() {
        DISCOVERY => json!({"issuer": url, "jwks_uri": format!("{url}{JWKS}")}),
        JWKS => json!({"keys": *keys.lock().unwrap_or_else(PoisonError::into_inner)}),
        _ => return Response::new(404, ""),
    };
    Response::new(200, document.to_string()).with_header("Content-Type", "application/json")
}
