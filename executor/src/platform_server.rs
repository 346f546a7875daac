//! Passes what the tool and scripts of a run ask the platform on to the hub of the lease. The tool finds the platform's registry
//! of modules and providers here, and scripts its API. The hub decides what passes; none of them gets the token of the lease.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use job_contract::chain;
use platform::terrakube::{TerrakubeConfig, TokenSource, token};
use reqwest::redirect::Policy;
use run_log::LogWriter;
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tracing::warn;
use url::Url;

use crate::loopback::{self, Body, Loopback, status, streamed, whole};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the hub may send nothing. It waits for a turn, and asks the platform.
const READ_TIMEOUT: Duration = Duration::from_mins(4);
/// How long a request waits for those before it, whose readers may have stopped.
const PLACE_TIMEOUT: Duration = Duration::from_mins(1);
/// The longest text of a refusal.
const MAX_REFUSAL: usize = 64 * 1024;
/// So many different refusals are in the log of a run.
const MAX_REFUSALS: usize = 20;
/// Requests at a time. The hub takes eight of a task, and the executor needs some of them.
const AT_A_TIME: usize = 3;
/// What the tool and scripts need.
const METHODS: [Method; 4] = [Method::GET, Method::POST, Method::PATCH, Method::DELETE];
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
            places: Arc::new(Semaphore::new(AT_A_TIME)),
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
    places: Arc<Semaphore>,
}

impl Passing {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let authorization = request.headers().get(AUTHORIZATION);
        let given = authorization.map(HeaderValue::as_bytes);
        let path = match self.path_at_hub(request.method(), request.uri().path(), given) {
            Ok(path) => path,
            Err(code) => return status(code),
        };
        let place = Arc::clone(&self.places).acquire_owned();
        let Ok(Ok(place)) = timeout(PLACE_TIMEOUT, place).await else {
            return status(StatusCode::SERVICE_UNAVAILABLE);
        };
        let mut url = self.hub.clone();
        url.set_path(&format!("{}/{path}", self.hub.path().trim_end_matches('/')));
        url.set_query(request.uri().query());
        let (head, body) = request.into_parts();
        let sent = self.http.request(head.method.clone(), url);
        let mut sent = self.tokens.authorize(sent, token::BRIEF);
        if head.method != Method::GET {
            sent = sent.body(reqwest::Body::wrap(body));
        }
        let answer = match sent.send().await {
            Ok(answer) => answer,
            Err(error) => {
                let error = error.without_url();
                warn!(error = chain(&error), cause = ?error.source(), "the hub did not answer a request of the run");
                return status(StatusCode::BAD_GATEWAY);
            }
        };
        self.pass_on(answer, place).await
    }

    /// Returns the path below the platform's address at the hub. It is sent as it came: a path that a client or server might
    /// read otherwise is refused.
    fn path_at_hub(
        &self,
        method: &Method,
        path: &str,
        authorization: Option<&[u8]>,
    ) -> Result<String, StatusCode> {
        if !METHODS.contains(method) {
            return Err(StatusCode::METHOD_NOT_ALLOWED);
        }
        let parts: Vec<_> = path.split('/').skip(1).collect();
        if !parts.iter().all(|part| is_plain(part)) {
            return Err(StatusCode::BAD_REQUEST);
        }
        if let ["registry", given, rest @ ..] = &parts[..] {
            if !loopback::is_same(given.as_bytes(), &self.password) {
                return Err(StatusCode::UNAUTHORIZED);
            }
            return match *method {
                Method::GET => Ok(format!("registry/{}", rest.join("/"))),
                _ => Err(StatusCode::METHOD_NOT_ALLOWED),
            };
        }
        if !authorization.is_some_and(|given| loopback::is_same(given, &self.bearer)) {
            return Err(StatusCode::UNAUTHORIZED);
        }
        Ok(match &parts[..] {
            // The executor may do this itself.
            ["context", ..] => parts.join("/"),
            _ => format!("scripts/{}", parts.join("/")),
        })
    }

    /// `place`: the place of the request, until its answer was read.
    async fn pass_on(
        &self,
        answer: reqwest::Response,
        place: OwnedSemaphorePermit,
    ) -> Response<Body> {
        let mut response = status(answer.status());
        for name in KEPT {
            let value = answer.headers().get(&name).cloned();
            response
                .headers_mut()
                .extend(value.map(|value| (name, value)));
        }
        let is_refused = |code: StatusCode| {
            matches!(code, StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS)
                || code.is_server_error()
        };
        *response.body_mut() = if is_refused(answer.status()) {
            let text = self.refusal(answer).await;
            whole(text)
        } else {
            let chunks = answer.bytes_stream().map_err(Into::into);
            streamed(chunks.inspect(move |_| {
                let _in_use = &place;
            }))
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

#[cfg(test)]
mod tests {
    use platform::terrakube::token::TokenSource;
    use rstest::rstest;
    use run_log::{LogConfig, Redactor, RunLog};

    use super::*;

    fn passing(log: LogWriter) -> Passing {
        Passing {
            http: reqwest::Client::new(),
            hub: Url::parse("http://hub.example.test/platform").unwrap(),
            tokens: TokenSource::disabled(),
            password: "p".to_owned().into(),
            bearer: "Bearer p".to_owned().into(),
            log,
            refusals: Mutex::default(),
            places: Arc::new(Semaphore::new(AT_A_TIME)),
        }
    }

    #[rstest]
    #[case(
        "GET /api/v1/organization/o",
        Some("Bearer p"),
        Ok("scripts/api/v1/organization/o")
    )]
    #[case("POST /logs", Some("Bearer p"), Ok("scripts/logs"))]
    #[case("POST /context/v1/7", Some("Bearer p"), Ok("context/v1/7"))]
    #[case("GET /registry/p/modules/v1/a", None, Ok("registry/modules/v1/a"))]
    #[case::no_token("GET /context/v1/7", None, Err(401))]
    #[case::another_token("GET /context/v1/7", Some("Bearer q"), Err(401))]
    #[case::another_password("GET /registry/q/modules", Some("Bearer p"), Err(401))]
    #[case::no_password("GET /registry", Some("Bearer p"), Ok("scripts/registry"))]
    #[case::change_of_the_registry("POST /registry/p/modules", None, Err(405))]
    #[case::trace("TRACE /context/v1/7", Some("Bearer p"), Err(405))]
    #[case::connect("CONNECT hub:443", Some("Bearer p"), Err(405))]
    #[case::all("OPTIONS *", Some("Bearer p"), Err(405))]
    #[case::dots("GET /context/v1/../../logs", Some("Bearer p"), Err(400))]
    #[case::encoded_dots("GET /context/%2e%2e/logs", Some("Bearer p"), Err(400))]
    #[case::empty_part("GET //hub/context/v1/7", Some("Bearer p"), Err(400))]
    #[case::end("GET /context/v1/7/", Some("Bearer p"), Err(400))]
    #[case::back_slash("GET /context\\..\\logs", Some("Bearer p"), Err(400))]
    #[tokio::test]
    async fn paths_are_passed_on_as_they_are_or_not_at_all(
        #[case] request: &str,
        #[case] token: Option<&str>,
        #[case] expected: Result<&str, u16>,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let log = RunLog::start(
            LogConfig::new(folder.path().to_owned()),
            Redactor::new([""; 0]),
            Vec::new(),
        );
        let log = log.unwrap();
        // Clients need one, and this may be the first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (method, path) = request.split_once(' ').unwrap();
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let passing = passing(log.writer());
        let found = passing.path_at_hub(&method, path, token.map(str::as_bytes));
        let found = found.map_err(|code| code.as_u16());
        assert_eq!(found.as_deref().map_err(|code| *code), expected);
    }
}
