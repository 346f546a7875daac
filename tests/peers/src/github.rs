//! GitHub Enterprise with one App: its interface for tokens, as GitHub's reference describes it, and git. Requests that GitHub would
//! refuse are refused.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use rsa::pkcs1::DecodeRsaPrivateKey as _;
use rsa::traits::PublicKeyParts as _;
use serde_json::{Value, json};

use crate::git_http::{self, GitHttpOptions};
use crate::http::{Request, Response, Server};
use crate::sshd::generate_rsa_pem;

/// The id of the App.
pub const APP: &str = "Iv23liMayfly";
/// The installation of the owner `team`.
const INSTALLATION: u64 = 4711;
/// The repositories that it has.
const REPOSITORIES: [&str; 2] = ["repo", "module"];
const MAX_JWT_SECONDS: u64 = 600;
/// In place of the path that a token is for: there is none.
const ENDED: &str = "";

/// A running server.
#[derive(Debug)]
pub struct GitHub {
    server: Server,
    key: String,
    tokens: Arc<Mutex<BTreeMap<String, String>>>,
}

impl GitHub {
    /// Serves the repositories below `folder`, as `/OWNER/NAME.git`. Tokens last for `lifetime`.
    ///
    /// # Errors
    /// Fails when no port can be had.
    pub fn start(folder: &Path, lifetime: Duration) -> io::Result<Self> {
        let pem = generate_rsa_pem()?;
        let key = rsa::RsaPrivateKey::from_pkcs1_pem(&pem).map_err(io::Error::other)?;
        let [n, e] = [key.n(), key.e()].map(rsa::BigUint::to_bytes_be);
        let public = DecodingKey::from_rsa_raw_components(&n, &e);
        let tokens = Arc::<Mutex<BTreeMap<String, String>>>::default();
        let (folder, known) = (folder.to_path_buf(), Arc::clone(&tokens));
        let server = Server::start(move |request| {
            let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
            match request.path.strip_prefix("/api/v3/") {
                Some(path) => answer(&public, &mut known, lifetime, path, request),
                None => git(&folder, &known, request),
            }
        })?;
        Ok(Self {
            server,
            key: pem,
            tokens,
        })
    }

    /// The server.
    pub const fn server(&self) -> &Server {
        &self.server
    }

    /// The key of the App, in PEM of PKCS #1, as GitHub gives it.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Ends all tokens that were made so far, as their time does.
    pub fn end_tokens(&self) {
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        for path in tokens.values_mut() {
            ENDED.clone_into(path);
        }
    }

    /// The tokens that were made.
    pub fn tokens(&self) -> Vec<String> {
        let tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.keys().cloned().collect()
    }
}

fn refuse(status: u16, message: &str) -> Response {
    Response::new(status, json!({ "message": message }).to_string())
}

fn answer(
    public: &DecodingKey,
    tokens: &mut BTreeMap<String, String>,
    lifetime: Duration,
    path: &str,
    request: &Request,
) -> Response {
    if request.header("user-agent").is_none()
        || request.header("accept") != Some("application/vnd.github+json")
    {
        return refuse(403, "Request forbidden by administrative rules");
    }
    if !is_of_app(public, request) {
        return refuse(401, "A JSON web token could not be decoded");
    }
    let segments: Vec<&str> = path.split('/').collect();
    match (&*request.method, &*segments) {
        ("GET", ["repos", "team", name, "installation"]) if REPOSITORIES.contains(name) => {
            Response::new(
                200,
                json!({ "id": INSTALLATION, "account": { "login": "team" } }).to_string(),
            )
        }
        // It is installed there for other repositories alone.
        ("GET", ["repos", "team", "unselected", "installation"]) => {
            Response::new(200, json!({ "id": INSTALLATION }).to_string())
        }
        ("GET", ["repos", "team", "renamed", "installation"]) => {
            refuse(301, "Moved Permanently").with_header("Location", "/api/v3/repositories/1")
        }
        ("POST", ["app", "installations", id, "access_tokens"])
            if *id == INSTALLATION.to_string() =>
        {
            let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
            let names = body["repositories"].as_array().cloned().unwrap_or_default();
            let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
            let permissions = json!({ "contents": "read", "metadata": "read" });
            if names.is_empty()
                || body["permissions"] != permissions
                || names.iter().any(|name| !REPOSITORIES.contains(name))
            {
                return refuse(422, "There is at least one repository that does not exist");
            }
            // Tokens are as long as GitHub's newest.
            let token = format!("ghs_{}{:0>600}", tokens.len(), names[0]);
            tokens.insert(token.clone(), format!("/team/{}.git/", names[0]));
            let ends = humantime::format_rfc3339_seconds(SystemTime::now() + lifetime);
            let repositories: Vec<Value> = names
                .iter()
                .map(|name| json!({ "name": name, "full_name": format!("team/{name}") }))
                .collect();
            let document = json!({
                "token": token,
                "expires_at": ends.to_string(),
                "permissions": permissions,
                "repositories": repositories,
            });
            Response::new(201, document.to_string())
        }
        _ => refuse(404, "Not Found"),
    }
}

/// Whether the App has signed the request, for at most ten minutes.
fn is_of_app(public: &DecodingKey, request: &Request) -> bool {
    let token = request
        .header("authorization")
        .and_then(|header| header.strip_prefix("Bearer "));
    let mut validation = Validation::new(Algorithm::RS256);
    validation.set_issuer(&[APP]);
    validation.set_required_spec_claims(&["exp", "iss"]);
    validation.leeway = 0;
    let claims = token
        .and_then(|token| jsonwebtoken::decode::<Value>(token, public, &validation).ok())
        .map(|decoded| decoded.claims)
        .unwrap_or_default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_secs();
    let [issued, ends] = ["iat", "exp"].map(|name| claims[name].as_u64().unwrap_or_default());
    issued > 0 && issued <= now && ends <= now + MAX_JWT_SECONDS
}

fn git(folder: &Path, tokens: &BTreeMap<String, String>, request: &Request) -> Response {
    let token = request.basic_auth();
    let token = token
        .as_deref()
        .and_then(|login| login.strip_prefix("x-access-token:"));
    let path = token.and_then(|token| tokens.get(token));
    match path.filter(|path| *path != ENDED) {
        Some(path) if request.path.starts_with(path) => {
            git_http::answer(folder, &GitHttpOptions::default(), request)
        }
        Some(_) => Response::new(404, "Not Found"),
        None => Response::new(401, "").with_header("WWW-Authenticate", "Basic realm=\"GitHub\""),
    }
}
