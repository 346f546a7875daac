//! HTTP calls to the platform: signed, with limits on time and size, and retried until the caller's deadline. Knows
//! nothing of the content of the calls.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use job_contract::chain;
use pool_protocol::problem::Problem;
use pool_protocol::{IDEMPOTENCY_KEY, version};
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Method, Response, StatusCode, Url};
use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Map, Value};
use tracing::warn;
use uuid::Uuid;

use super::error::TerrakubeError;
use super::token::TokenSource;
use runtime::Deadline;

/// Media type of JSON:API, which the platform requires for changes.
pub(crate) const JSON_API: &str = "application/vnd.api+json";
/// Media type of the job context, and of a hub.
pub(crate) const JSON: &str = "application/json";

/// How servers know Mayfly.
pub(crate) const USER_AGENT: &str = concat!("mayfly/", env!("CARGO_PKG_VERSION"));
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The platform locks the job's row before it answers a change of a job, and may wait for that.
const ATTEMPT_TIMEOUT: Duration = Duration::from_mins(1);
/// The longest `Retry-After` that the client obeys.
pub(crate) const LONGEST_RETRY_AFTER: Duration = Duration::from_mins(1);
/// The longest part of an error text that goes into a message.
const DETAIL_CHARS: usize = 300;

/// The pauses between repeated calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) first_pause: Duration,
    pub(crate) longest_pause: Duration,
    /// The pause between two checks whether a dispatch is recorded.
    pub(crate) dispatch_poll: Duration,
    /// The longest time from the start of the read of a job context until a claim is written there.
    pub(crate) claim_write: Duration,
    /// How long other claimants may overwrite a claim in a job context. Much longer than `claim_write`: after it, each claimant
    /// that read the context before this claim was written has written its own claim or given up.
    pub(crate) claim_settle: Duration,
}

impl Pace {
    pub(crate) const USUAL: Self = Self {
        first_pause: Duration::from_millis(500),
        longest_pause: Duration::from_secs(15),
        dispatch_poll: Duration::from_secs(1),
        claim_write: Duration::from_secs(1),
        claim_settle: Duration::from_secs(2),
    };

    pub(crate) fn pauses(self) -> ExponentialBackoff {
        ExponentialBuilder::default()
            .with_min_delay(self.first_pause)
            .with_max_delay(self.longest_pause)
            .with_jitter()
            .without_max_times()
            .build()
    }
}

/// One call.
#[derive(Debug)]
pub(crate) struct Call {
    method: Method,
    url: Url,
    media_type: &'static str,
    body: Option<Vec<u8>>,
    limit: usize,
    lifetime: Duration,
    /// Names the call at a hub, which takes its repetition for the same.
    key: Option<Uuid>,
}

impl Call {
    pub(crate) fn new(method: Method, url: Url, media_type: &'static str) -> Self {
        Self {
            method,
            url,
            media_type,
            body: None,
            limit: 4 * 1024 * 1024,
            lifetime: super::token::CALL,
            key: None,
        }
    }

    /// Adds a document to send.
    pub(crate) fn body(mut self, document: &impl Serialize) -> Self {
        let body =
            serde_json::to_vec(document).expect("documents have string keys and plain values");
        self.body = Some(body);
        self
    }

    /// For a hub itself, not for the platform behind it.
    pub(crate) fn for_hub(mut self) -> Self {
        self.key = Some(Uuid::new_v4());
        self
    }

    pub(crate) const fn limit(mut self, bytes: usize) -> Self {
        self.limit = bytes;
        self
    }

    pub(crate) const fn lifetime(mut self, lifetime: Duration) -> Self {
        self.lifetime = lifetime;
        self
    }

    /// The name of the call in messages.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.method, self.url)
    }
}

/// An HTTP client that signs its requests with tokens.
#[derive(Debug)]
pub(crate) struct Client {
    http: reqwest::Client,
    tokens: TokenSource,
    pace: Pace,
}

impl Client {
    pub(crate) fn new(tokens: TokenSource, pace: Pace) -> Result<Self, TerrakubeError> {
        // A redirect would send the token to another address.
        let http = reqwest::Client::builder()
            .redirect(Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(ATTEMPT_TIMEOUT)
            .user_agent(USER_AGENT)
            .build()
            .map_err(TerrakubeError::Client)?;
        Ok(Self { http, tokens, pace })
    }

    /// Sends a call with retries, and returns the document of the answer.
    pub(crate) async fn request_json<T: DeserializeOwned>(
        &self,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<T, TerrakubeError> {
        let mut retry = self.retry(deadline);
        loop {
            match self.request_json_once(call, deadline).await {
                Ok(document) => return Ok(document),
                Err(error) => retry.after(error).await?,
            }
        }
    }

    /// Sends a call once, and returns the document of the answer.
    pub(crate) async fn request_json_once<T: DeserializeOwned>(
        &self,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<T, TerrakubeError> {
        let answer = self.request_once(call, deadline).await?;
        serde_json::from_slice(&answer).map_err(|source| {
            let call_name = call.name();
            if call.key.is_some() {
                return TerrakubeError::foreign(call_name, StatusCode::OK, None);
            }
            TerrakubeError::Malformed {
                call: call_name,
                source,
            }
        })
    }

    /// Sends a call with retries, and returns the body of the answer.
    pub(crate) async fn request(
        &self,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<Vec<u8>, TerrakubeError> {
        let mut retry = self.retry(deadline);
        loop {
            match self.request_once(call, deadline).await {
                Ok(answer) => return Ok(answer),
                Err(error) => retry.after(error).await?,
            }
        }
    }

    /// Sends a call once.
    pub(crate) async fn request_once(
        &self,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<Vec<u8>, TerrakubeError> {
        // The platform could still execute a request after the caller's deadline, so it is not sent.
        if deadline.is_over() {
            return Err(TerrakubeError::OutOfTime { call: call.name() });
        }
        tokio::select! {
            biased;
            attempt = self.attempt(call) => attempt,
            () = deadline.over() => Err(TerrakubeError::OutOfTime { call: call.name() }),
        }
    }

    /// A series of attempts.
    pub(crate) fn retry<'p>(&self, deadline: &'p Deadline) -> Retry<'p> {
        Retry {
            pauses: self.pace.pauses(),
            deadline,
            last: None,
        }
    }

    async fn attempt(&self, call: &Call) -> Result<Vec<u8>, TerrakubeError> {
        let mut request = self
            .http
            .request(call.method.clone(), call.url.clone())
            .header(ACCEPT, call.media_type);
        if let Some(body) = &call.body {
            request = request
                .header(CONTENT_TYPE, call.media_type)
                .body(body.clone());
        }
        if let Some(key) = call.key {
            request = request.header(IDEMPOTENCY_KEY, key.to_string());
        }
        // Each attempt with a token of its own: the last one may be minutes after the first.
        request = self.tokens.authorize(request, call.lifetime);
        let transfer = |source: reqwest::Error| TerrakubeError::Transfer {
            call: call.name(),
            source: source.without_url(),
        };
        let mut answer = request.send().await.map_err(transfer)?;
        let status = answer.status();
        if !status.is_success() {
            return Err(self.refusal(call, answer).await);
        }
        let mut body = Vec::new();
        while let Some(chunk) = answer.chunk().await.map_err(transfer)? {
            if body.len() + chunk.len() > call.limit {
                return Err(TerrakubeError::TooLarge {
                    call: call.name(),
                    limit: call.limit,
                });
            }
            body.extend_from_slice(&chunk);
        }
        if self.tokens.is_of_lease() && is_foreign(&body) {
            return Err(TerrakubeError::foreign(call.name(), status, None));
        }
        Ok(body)
    }

    async fn refusal(&self, call: &Call, answer: Response) -> TerrakubeError {
        let (name, status) = (call.name(), answer.status());
        let retry_after = retry_after(answer.headers());
        let body = explanation(answer).await;
        if self.tokens.is_of_lease() {
            // The hub's own words, and not the platform's.
            if let Ok(problem) = serde_json::from_slice::<Problem>(&body) {
                return TerrakubeError::Hub {
                    call: name,
                    status,
                    code: problem.code,
                    detail: in_one_line(&hub_detail(&problem)),
                    retry_after,
                };
            }
            if call.key.is_some() || is_foreign(&body) {
                return TerrakubeError::foreign(name, status, retry_after);
            }
        }
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                TerrakubeError::Refused { call: name, status }
            }
            StatusCode::NOT_FOUND | StatusCode::GONE if !is_of_platform(&call.method, &body) => {
                TerrakubeError::foreign(name, status, retry_after)
            }
            StatusCode::NOT_FOUND | StatusCode::GONE => TerrakubeError::Gone { call: name },
            _ => TerrakubeError::Status {
                call: name,
                status,
                retry_after,
                detail: detail(&body),
            },
        }
    }
}

/// Attempts of one call, with growing pauses.
#[derive(Debug)]
pub(crate) struct Retry<'p> {
    pauses: ExponentialBackoff,
    deadline: &'p Deadline,
    last: Option<TerrakubeError>,
}

impl Retry<'_> {
    /// Waits before the next attempt. Returns the error if a retry would not help, or if the deadline has passed.
    pub(crate) async fn after(&mut self, error: TerrakubeError) -> Result<(), TerrakubeError> {
        if matches!(error, TerrakubeError::OutOfTime { .. }) {
            // The last error says more than that the time is over.
            return Err(self.last.take().unwrap_or(error));
        }
        if !error.is_transient() {
            return Err(error);
        }
        if self.last.is_none() {
            warn!(
                error = chain(&error),
                "the platform is not available, retrying"
            );
        }
        let pause = self.pauses.next().unwrap_or(LONGEST_RETRY_AFTER);
        let pause = error
            .retry_after()
            .map_or(pause, |asked| asked.max(pause).min(LONGEST_RETRY_AFTER));
        tokio::select! {
            biased;
            () = self.deadline.over() => Err(error),
            () = tokio::time::sleep(pause) => {
                self.last = Some(error);
                Ok(())
            }
        }
    }
}

/// The pause of a `Retry-After` header in seconds, as servers send it. A date is ignored.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers
        .get(RETRY_AFTER)?
        .to_str()
        .ok()?
        .trim()
        .parse()
        .ok()?;
    Some(Duration::from_secs(seconds))
}

/// Whether the body is no JSON, such as the page of a proxy.
fn is_foreign(body: &[u8]) -> bool {
    !body.is_empty() && serde_json::from_slice::<IgnoredAny>(body).is_err()
}

/// Whether the platform itself says that something does not exist. Its answers to reads are objects of JSON. Those to writes may
/// be empty.
fn is_of_platform(method: &Method, body: &[u8]) -> bool {
    let is_object = serde_json::from_slice::<Map<String, Value>>(body).is_ok();
    is_object || (*method != Method::GET && body.is_empty())
}

/// The body of an error answer. Empty if it is too large.
async fn explanation(mut answer: Response) -> Vec<u8> {
    const LIMIT: usize = 64 * 1024;
    let mut body = Vec::new();
    // The failure itself is known, so an incomplete error text is no problem.
    while let Ok(Some(chunk)) = answer.chunk().await {
        body.extend_from_slice(&chunk);
        if body.len() > LIMIT {
            break;
        }
    }
    body
}

/// What JSON:API says about a failure, in one line: `: ` and the text, or nothing.
fn detail(body: &[u8]) -> String {
    let document = serde_json::from_slice::<serde_json::Value>(body).unwrap_or_default();
    let text = document
        .pointer("/errors/0/detail")
        .or_else(|| document.pointer("/message"))
        .and_then(serde_json::Value::as_str)
        .unwrap_or_default();
    if text.is_empty() {
        return String::new();
    }
    format!(": {}", in_one_line(text))
}

/// What a hub says about a failure, with the versions of both sides where these do not meet.
fn hub_detail(problem: &Problem) -> String {
    match (problem.min_version, problem.max_version) {
        (Some(min), Some(max)) => format!(
            "{}; the hub speaks versions {min} to {max} of the protocol, this executor version {}",
            problem.title,
            version::VERSION
        ),
        _ => problem.title.clone(),
    }
}

fn in_one_line(text: &str) -> String {
    let text = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(DETAIL_CHARS);
    text.collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::net::TcpListener;

    use rstest::rstest;
    use test_peers::http::{Response, Server};

    use super::*;

    #[rstest]
    #[case::platform(Method::GET, r#"{"errors":[{"detail":"unknown"}]}"#, true)]
    #[case::page(Method::GET, "<html>default backend - 404</html>", false)]
    #[case::nothing(Method::GET, "", false)]
    #[case::text(Method::GET, r#""not found""#, false)]
    #[case::write(Method::POST, "", true)]
    #[case::write_to_a_page(Method::POST, "<html>404</html>", false)]
    #[tokio::test]
    async fn only_the_platform_says_that_something_does_not_exist(
        #[case] method: Method,
        #[case] body: &'static str,
        #[case] is_gone: bool,
    ) {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = Server::start(move |_| Response::new(404, body)).unwrap();
        let client = Client::new(TokenSource::disabled(), Pace::USUAL).unwrap();
        let call = Call::new(method, Url::parse(&server.url()).unwrap(), JSON);
        let deadline = Deadline::after(Duration::from_mins(1));
        let error = client.request_once(&call, &deadline).await.unwrap_err();
        assert_eq!(matches!(error, TerrakubeError::Gone { .. }), is_gone);
        assert_eq!(error.is_transient(), !is_gone);
    }

    #[tokio::test]
    async fn no_call_is_made_when_time_is_up() {
        // Each client does this. An earlier provider stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        server.set_nonblocking(true).unwrap();
        let url = format!("http://{}/", server.local_addr().unwrap());
        let client = Client::new(TokenSource::disabled(), Pace::USUAL).unwrap();
        let call = Call::new(Method::GET, Url::parse(&url).unwrap(), JSON);
        let deadline = Deadline::after(Duration::ZERO);
        let result = client.request(&call, &deadline).await;
        assert!(matches!(result, Err(TerrakubeError::OutOfTime { .. })));
        let called = server.accept().map(drop).map_err(|error| error.kind());
        assert_eq!(called, Err(io::ErrorKind::WouldBlock));
    }
}
