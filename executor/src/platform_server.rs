//! Passes what the tool and scripts of a run ask the platform on to the hub of the lease. The tool finds the platform's registry
//! of modules and providers here, and scripts its API. The hub decides what passes; none of them gets the token of the lease.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use job_contract::chain;
use platform::terrakube::{TerrakubeConfig, TokenSource, token};
use reqwest::redirect::Policy;
use run_log::LogWriter;
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use tracing::warn;
use url::Url;

use crate::loopback::{self, Body, Loopback, status, streamed, whole};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the hub may send nothing. It asks the platform first.
const READ_TIMEOUT: Duration = Duration::from_mins(2);
/// The longest text of a refusal.
const MAX_REFUSAL: usize = 64 * 1024;
/// So many different refusals are in the log of a run.
const MAX_REFUSALS: usize = 20;
/// What an answer has that the tool or a script reads.
const KEPT: [HeaderName; 3] = [
    CONTENT_TYPE,
    RETRY_AFTER,
    HeaderName::from_static("x-terraform-get"),
];

/// The server of one run. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct PlatformServer {
    loopback: Loopback,
    password: SecretString,
}

impl PlatformServer {
    /// Starts the server on a free port.
    pub(crate) fn start(config: &TerrakubeConfig, log: LogWriter) -> io::Result<Self> {
        // A redirect would send the token of the lease to another address.
        let http = reqwest::Client::builder()
            .redirect(Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .build()
            .map_err(io::Error::other)?;
        let password = loopback::new_password();
        let passing = Arc::new(Passing {
            http,
            hub: config.api_url.clone(),
            tokens: config.tokens.clone(),
            bearer: format!("Bearer {}", password.expose_secret()).into(),
            password: password.clone(),
            log,
            refusals: Mutex::default(),
        });
        let answer = move |request| {
            let passing = Arc::clone(&passing);
            async move { passing.answer(request).await }
        };
        Ok(Self {
            loopback: Loopback::start(answer)?,
            password,
        })
    }

    /// The address of the platform's API for scripts, which send the password as their token.
    pub(crate) fn api(&self) -> String {
        format!("http://{}", self.loopback.address())
    }

    /// The address of the registry, with the password: what fetches the archive of a module sends no token.
    pub(crate) fn registry(&self) -> SecretString {
        let (address, password) = (self.loopback.address(), self.password.expose_secret());
        format!("http://{address}/registry/{password}").into()
    }

    /// The password, which must never appear in a log.
    pub(crate) const fn secret(&self) -> &SecretString {
        &self.password
    }
}

/// Why the hub refuses (`application/problem+json`).
#[derive(Deserialize)]
struct Problem {
    title: String,
    detail: Option<String>,
}

struct Passing {
    http: reqwest::Client,
    /// The platform's address at the hub.
    hub: Url,
    tokens: TokenSource,
    password: SecretString,
    bearer: SecretString,
    log: LogWriter,
    /// Those that the log has.
    refusals: Mutex<BTreeSet<String>>,
}

impl Passing {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let path = match self.path_at_hub(&request) {
            Ok(path) => path,
            Err(code) => return status(code),
        };
        let mut url = self.hub.clone();
        url.set_path(&format!("{}/{path}", self.hub.path().trim_end_matches('/')));
        url.set_query(request.uri().query());
        let (head, body) = request.into_parts();
        let sent = self.http.request(head.method.clone(), url);
        let mut sent = self.tokens.authorize(sent, token::BRIEF);
        if head.method != Method::GET {
            let chunks = body.into_data_stream();
            sent = sent.body(reqwest::Body::wrap_stream(chunks));
        }
        let answer = match sent.send().await {
            Ok(answer) => answer,
            Err(error) => {
                let error = error.without_url();
                warn!(error = chain(&error), cause = ?error.source(), "the hub did not answer a request of the run");
                return status(StatusCode::BAD_GATEWAY);
            }
        };
        self.pass_on(answer).await
    }

    /// Returns the path below the platform's address at the hub. It is sent as it came: a path that a client or server might
    /// read otherwise is refused.
    fn path_at_hub(&self, request: &Request<Incoming>) -> Result<String, StatusCode> {
        let path = request.uri().path();
        let parts: Vec<_> = path.split('/').skip(1).collect();
        if !parts.iter().all(|part| is_plain(part)) {
            return Err(StatusCode::BAD_REQUEST);
        }
        if let ["registry", given, rest @ ..] = &parts[..] {
            if !loopback::is_same(given.as_bytes(), &self.password) {
                return Err(StatusCode::UNAUTHORIZED);
            }
            return match *request.method() {
                Method::GET => Ok(format!("registry/{}", rest.join("/"))),
                _ => Err(StatusCode::METHOD_NOT_ALLOWED),
            };
        }
        let given = request.headers().get(AUTHORIZATION);
        if !given.is_some_and(|given| loopback::is_same(given.as_bytes(), &self.bearer)) {
            return Err(StatusCode::UNAUTHORIZED);
        }
        Ok(match &parts[..] {
            // The executor may do this itself.
            ["context", ..] => parts.join("/"),
            _ => format!("scripts/{}", parts.join("/")),
        })
    }

    async fn pass_on(&self, answer: reqwest::Response) -> Response<Body> {
        let mut response = status(answer.status());
        for name in KEPT {
            let value = answer.headers().get(&name).cloned();
            response
                .headers_mut()
                .extend(value.map(|value| (name, value)));
        }
        *response.body_mut() = if answer.status() == StatusCode::FORBIDDEN {
            let text = self.refusal(answer).await;
            whole(text)
        } else {
            streamed(answer.bytes_stream().map_err(Into::into))
        };
        response
    }

    /// Returns the text of a refusal. The log of the run says once why the hub refuses.
    async fn refusal(&self, mut answer: reqwest::Response) -> Bytes {
        let mut text = Vec::new();
        while let Ok(Some(chunk)) = answer.chunk().await {
            if text.len() + chunk.len() > MAX_REFUSAL {
                break;
            }
            text.extend_from_slice(&chunk);
        }
        if let Ok(Problem { title, detail }) = serde_json::from_slice(&text) {
            let why = detail.unwrap_or(title);
            let is_new = {
                let mut refusals = runtime::lock(&self.refusals);
                refusals.len() < MAX_REFUSALS && refusals.insert(why.clone())
            };
            if is_new {
                let line = format!("The hub refused a request of this run: {why}.");
                self.log.line(&line).await;
            }
        }
        text.into()
    }
}

/// Ids, names and versions need no other characters.
fn is_plain(part: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    part.bytes().all(known) && !part.bytes().all(|byte| byte == b'.')
}
