//! Google Secret Manager with its token services, as their references describe them. There is no emulator of them. Unknown paths,
//! tokens and methods are refused.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use rsa::pkcs8::EncodePrivateKey as _;
use rsa::traits::PublicKeyParts as _;
use serde_json::{Value, json};

use crate::http::{Request, Response, Server};

/// The account whose key there is.
pub const ACCOUNT: &str = "mayfly@project-1.iam.gserviceaccount.com";
/// Its project.
pub const PROJECT: &str = "project-1";
/// What the token file of a federated account has to hold.
pub const SUBJECT_TOKEN: &str = "header.subject-token-of-the-pod.signature";
/// The audience of a federated account.
pub const AUDIENCE: &str =
    "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/x";
/// The hosts that lead here.
pub const HOSTS: [&str; 5] = [
    "secretmanager.googleapis.com",
    "secretmanager.europe-west3.rep.googleapis.com",
    "oauth2.googleapis.com",
    "sts.googleapis.com",
    "iamcredentials.googleapis.com",
];

const SCOPE: &str = "https://www.googleapis.com/auth/cloud-platform";

/// A running service.
#[derive(Debug)]
pub struct GoogleSecrets {
    server: Server,
    document: String,
}

impl GoogleSecrets {
    /// Starts a service with these secrets, by `projects/…/secrets/…/versions/…`.
    ///
    /// # Errors
    /// Fails when no port can be had.
    pub fn start(secrets: &[(&str, &[u8])]) -> io::Result<Self> {
        let key =
            rsa::RsaPrivateKey::new(&mut rand::thread_rng(), 2048).map_err(io::Error::other)?;
        let [n, e] = [key.n(), key.e()].map(rsa::BigUint::to_bytes_be);
        let public = DecodingKey::from_rsa_raw_components(&n, &e);
        let pem = key
            .to_pkcs8_pem(rsa::pkcs8::LineEnding::LF)
            .map_err(io::Error::other)?;
        let document = json!({
            "type": "service_account",
            "project_id": PROJECT,
            "private_key_id": "key-1",
            "private_key": pem.as_str(),
            "client_email": ACCOUNT,
        });
        let secrets: BTreeMap<String, Vec<u8>> = secrets
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.to_vec()))
            .collect();
        let server = Server::start(move |request| answer(request, &secrets, &public))?;
        Ok(Self {
            server,
            document: document.to_string(),
        })
    }

    /// The document with the key of the account.
    pub fn key_document(&self) -> &str {
        &self.document
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Every request so far.
    pub fn requests(&self) -> Vec<Request> {
        self.server.requests()
    }
}

fn answer(request: &Request, secrets: &BTreeMap<String, Vec<u8>>, key: &DecodingKey) -> Response {
    let host = request.header("host").unwrap_or_default();
    let form = form(&request.body);
    let field = |name: &str| form.get(name).map(String::as_str).unwrap_or_default();
    match (request.method.as_str(), host, request.path.as_str()) {
        ("POST", "oauth2.googleapis.com", "/token") => {
            let is_grant = field("grant_type") == "urn:ietf:params:oauth:grant-type:jwt-bearer";
            if is_grant && is_assertion(field("assertion"), key) {
                token("ya29.of-the-key")
            } else {
                document(
                    400,
                    &json!({ "error": "invalid_grant", "error_description": "Invalid JWT Signature." }),
                )
            }
        }
        ("POST", "sts.googleapis.com", "/v1/token") => {
            let expected = [
                (
                    "grant_type",
                    "urn:ietf:params:oauth:grant-type:token-exchange",
                ),
                ("audience", AUDIENCE),
                ("scope", SCOPE),
                (
                    "requested_token_type",
                    "urn:ietf:params:oauth:token-type:access_token",
                ),
                ("subject_token_type", "urn:ietf:params:oauth:token-type:jwt"),
                ("subject_token", SUBJECT_TOKEN),
            ];
            if expected.iter().all(|(name, value)| field(name) == *value) {
                token("ya29.federated")
            } else {
                document(400, &json!({ "error": "invalid_request" }))
            }
        }
        (
            "POST",
            "iamcredentials.googleapis.com",
            "/v1/projects/-/serviceAccounts/mayfly@project-1.iam.gserviceaccount.com:generateAccessToken",
        ) => {
            if request.header("authorization") != Some("Bearer ya29.federated") {
                return refused(401, "UNAUTHENTICATED");
            }
            document(
                200,
                &json!({ "accessToken": "ya29.impersonated", "expireTime": "2099-01-01T00:00:00Z" }),
            )
        }
        ("GET", _, "/computeMetadata/v1/instance/service-accounts/default/token") => {
            if request.header("metadata-flavor") != Some("Google") {
                return Response::new(403, "");
            }
            token("ya29.of-the-node")
        }
        ("GET", host, path) if host.starts_with("secretmanager.") => {
            let bearer = request.header("authorization").unwrap_or_default();
            let known = ["of-the-key", "federated", "impersonated", "of-the-node"];
            if !known
                .iter()
                .any(|name| bearer == format!("Bearer ya29.{name}"))
            {
                return refused(401, "UNAUTHENTICATED");
            }
            let name = path
                .strip_prefix("/v1/")
                .and_then(|path| path.strip_suffix(":access"));
            let name = name.unwrap_or_default();
            if name.contains("/forbidden/") {
                return refused(403, "PERMISSION_DENIED");
            }
            if name.contains("/disabled/") {
                return refused(400, "FAILED_PRECONDITION");
            }
            let Some(value) = secrets.get(name) else {
                return refused(404, "NOT_FOUND");
            };
            let sum = if name.contains("/corrupt/") {
                1
            } else {
                crc32c(value)
            };
            let payload = json!({ "data": STANDARD.encode(value), "dataCrc32c": sum.to_string() });
            document(200, &json!({ "name": name, "payload": payload }))
        }
        _ => Response::new(404, ""),
    }
}

fn is_assertion(assertion: &str, key: &DecodingKey) -> bool {
    let mut validation = Validation::new(Algorithm::RS256);
    validation.set_audience(&["https://oauth2.googleapis.com/token"]);
    validation.set_issuer(&[ACCOUNT]);
    let token = jsonwebtoken::decode::<Value>(assertion, key, &validation);
    token.is_ok_and(|token| {
        let lifetime = token.claims["exp"]
            .as_u64()
            .zip(token.claims["iat"].as_u64());
        token.header.kid.as_deref() == Some("key-1")
            && token.claims["scope"] == SCOPE
            && lifetime.is_some_and(|(end, begin)| end - begin <= 3600)
    })
}

pub(crate) fn form(body: &[u8]) -> BTreeMap<String, String> {
    let text = String::from_utf8_lossy(body);
    let pairs = text.split('&').filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(name, value)| (decoded(name), decoded(value)))
        .collect()
}

fn decoded(text: &str) -> String {
    let text = text.replace('+', " ");
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let hex = (first == b'%').then(|| after.get(..2)).flatten();
        let hex = hex.and_then(|hex| std::str::from_utf8(hex).ok());
        if let Some(byte) = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            bytes.push(byte);
            rest = &after[2..];
        } else {
            bytes.push(first);
            rest = after;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn token(text: &str) -> Response {
    document(
        200,
        &json!({ "access_token": text, "expires_in": 3599, "token_type": "Bearer" }),
    )
}

fn refused(status: u16, code: &str) -> Response {
    // The real service says more, and so could a secret be in it.
    let message = "a message with canary-in-a-message";
    document(
        status,
        &json!({ "error": { "code": status, "message": message, "status": code } }),
    )
}

pub(crate) fn document(status: u16, document: &Value) -> Response {
    Response::new(status, document.to_string()).with_header("Content-Type", "application/json")
}

fn crc32c(bytes: &[u8]) -> u32 {
    let sum = bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            if sum & 1 == 1 {
                (sum >> 1) ^ 0x82f6_3b78
            } else {
                sum >> 1
            }
        })
    });
    !sum
}
