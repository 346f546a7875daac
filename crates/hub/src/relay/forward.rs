//! Sends requests to the platform, with a new token of the platform that is valid for a minute. Only the headers that
//! are named here pass. Redirects are not followed.

use std::io;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes, HttpBody as _};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use http_service::body::{self as request_body, BodyError};
use job_contract::chain;
use platform::StepRef;
use platform::live::{LiveDocument, LiveStream, MAX_RELAYED_BYTES};
use platform::terrakube::token::BRIEF;
use platform::terrakube::{Terrakube, extended};
use pool_protocol::problem::Code;
use reqwest::Method;
use secrecy::ExposeSecret as _;
use serde_json::json;
use tracing::{debug, warn};
use url::Url;

use super::Destination;
use super::body;
use super::rules::{Call, RelayRefusal, own_history};
use super::turns::Turn;
use super::{registry, scripts};
use crate::budget::TakenBytes;
use crate::failure::Failure;
use crate::json_check;
use crate::passing::passed_on;

const JSON_API: &str = "application/vnd.api+json";
const JSON: &str = "application/json";
/// Where a registry says that a module is.
const MODULE_LOCATION: HeaderName = HeaderName::from_static("x-terraform-get");
const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
/// The largest context of a job.
pub(super) const MAX_CONTEXT: usize = 64 * MIB;
/// The largest one in the records of this machine. It is checked as a whole, and is a file for each job.
pub(super) const MAX_RECORDED_CONTEXT: usize = 4 * MIB;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The platform may wait for the lock on the row of a job.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_mins(1);
/// Archives can be large.
const CONTENT_TIMEOUT: Duration = Duration::from_mins(10);
/// How long a body may take that is read whole.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// The bytes that each byte of a document takes: as it arrives, as it is read, and as it is sent.
const COST: usize = 3;
/// Those of a live view, which is also encoded for Redis.
const LIVE_COST: usize = 6;
/// Those of a document of a script, whose values are not known.
const SCRIPT_COST: usize = 12;
/// The largest document of a script.
const MAX_SCRIPT: usize = 256 * KIB;

/// A checked request.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) call: Call,
    pub(super) method: Method,
    pub(super) path: Vec<String>,
    pub(super) query: Option<String>,
    pub(super) body: Content,
    /// The bytes of the document.
    pub(super) taken: TakenBytes,
}

/// A request that [`Call::find`] has let pass.
#[derive(Debug)]
pub(super) struct Asked<'r> {
    pub(super) call: Call,
    pub(super) method: Method,
    /// The path below the platform's URL.
    pub(super) path: &'r [&'r str],
    pub(super) query: Option<&'r str>,
}

/// What a request says.
#[derive(Debug)]
pub(super) enum Content {
    None,
    /// A document that was checked.
    Document(Bytes),
    /// The context of the job on its way to a platform. The path says whose it is; what it says is the run's own.
    Context(Body),
}

impl Outgoing {
    /// Reads and checks the body of a request to `to`. `taken` takes its bytes.
    pub(super) async fn new(
        asked: Asked<'_>,
        step: &StepRef,
        to: &Destination,
        body: Body,
        mut taken: TakenBytes,
    ) -> Result<Self, RelayRefusal> {
        let Asked { call, path, .. } = asked;
        let body = match (call, to) {
            (Call::WriteContext, Destination::Terrakube(_)) => {
                // A longer body breaks off at the platform, and its sender would repeat it.
                if body.size_hint().lower() > MAX_CONTEXT as u64 {
                    return Err(RelayRefusal::TooLarge(MAX_CONTEXT));
                }
                Content::Context(body)
            }
            (Call::WriteContext, Destination::Records(_)) => {
                let context = read(body, MAX_RECORDED_CONTEXT, 1, &mut taken).await;
                let context = context.map_err(|refusal| match refusal {
                    RelayRefusal::TooLarge(limit) => RelayRefusal::ContextTooLarge(limit),
                    other => other,
                })?;
                let is_object = context.trim_ascii_start().first() == Some(&b'{');
                if !is_object || !json_check::is_readable(&context) {
                    return Err(RelayRefusal::Unread(
                        "it is no JSON object of a usual depth",
                    ));
                }
                Content::Document(context.into())
            }
            _ => {
                let cost = match call {
                    Call::ShowChanges => LIVE_COST,
                    Call::OfScript => SCRIPT_COST,
                    _ => COST,
                };
                let bytes = read(body, largest(call), cost, &mut taken).await?;
                let checked = match call {
                    Call::OfScript => scripts::document(&path[1..], &bytes, step)?,
                    call if has_body(call) => body::check(call, &bytes, step, to.public_url())?,
                    _ => Vec::new(),
                };
                if has_body(call) || !checked.is_empty() {
                    Content::Document(checked.into())
                } else {
                    Content::None
                }
            }
        };
        Ok(Self {
            call,
            method: asked.method,
            path: path.iter().map(|part| (*part).to_owned()).collect(),
            query: asked.query.map(str::to_owned),
            body,
            taken,
        })
    }

    /// The document, if it has lines of the run log.
    pub(super) fn lines(&self) -> Option<Bytes> {
        match &self.body {
            Content::Document(lines) if self.call == Call::AddLines => Some(lines.clone()),
            _ => None,
        }
    }
}

const fn largest(call: Call) -> usize {
    match call {
        Call::ChangeJob | Call::ChangeStep => 64 * KIB,
        Call::AddHistory => 16 * KIB,
        Call::AddLines => MIB,
        Call::ShowChanges => MAX_RELAYED_BYTES,
        Call::OfScript => MAX_SCRIPT,
        _ => 0,
    }
}

async fn read(
    body: Body,
    limit: usize,
    cost: usize,
    taken: &mut TakenBytes,
) -> Result<Vec<u8>, RelayRefusal> {
    let take = |length| taken.grow(length * cost);
    let read = request_body::read_in_time(body, limit, BODY_TIMEOUT, take).await;
    read.map_err(|error| match error {
        BodyError::TooSlow => RelayRefusal::Unread("it did not arrive in time"),
        BodyError::TooLarge => RelayRefusal::TooLarge(limit),
        BodyError::Busy => RelayRefusal::Busy,
        BodyError::Broken => RelayRefusal::Unread("it broke off"),
    })
}

const fn has_body(call: Call) -> bool {
    matches!(
        call,
        Call::ChangeJob
            | Call::ChangeStep
            | Call::AddHistory
            | Call::AddLines
            | Call::SetUpLog
            | Call::ShowChanges
    )
}

/// The client of the relay to Terrakube.
#[derive(Debug)]
pub(crate) struct ToTerrakube {
    terrakube: Terrakube,
    http: reqwest::Client,
    /// The platform's registry of modules and providers.
    registry: Option<Url>,
}

impl ToTerrakube {
    pub(super) fn new(terrakube: Terrakube) -> Result<Self, reqwest::Error> {
        let http = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .user_agent(concat!("mayfly/", env!("CARGO_PKG_VERSION")))
            .build()?;
        let domain = terrakube.config().registry_domain.as_ref();
        // Tools reach it like this too.
        let registry = domain.and_then(|domain| Url::parse(&format!("https://{domain}/")).ok());
        Ok(Self {
            terrakube,
            http,
            registry,
        })
    }

    /// The address of the platform that users know.
    pub(super) fn public_url(&self) -> &Url {
        &self.terrakube.config().public_url
    }

    pub(super) async fn send(
        &self,
        outgoing: Outgoing,
        step: &StepRef,
        turn: Turn,
    ) -> Result<Response, Failure> {
        let Outgoing {
            call,
            method: asked,
            path,
            query,
            body,
            taken: _taken,
        } = outgoing;
        let body = match (call, body) {
            (Call::ReadHosts, _) => return Ok(self.hosts()),
            (Call::ShowChanges, Content::Document(state)) => {
                return self.show_changes(&state, step).await;
            }
            (_, body) => body,
        };
        let path: Vec<_> = path.iter().map(String::as_str).collect();
        let url = self.url(call, &path, query.as_deref(), step).await?;
        let (method, media_type, timeout, limit) = properties(call, asked);
        let mut request = self
            .http
            .request(method, url)
            .timeout(timeout)
            .header(header::ACCEPT, media_type);
        let body = match body {
            Content::None => None,
            Content::Document(bytes) => Some(reqwest::Body::from(bytes)),
            Content::Context(body) => {
                let stream = body.into_data_stream().map_err(io::Error::other);
                Some(reqwest::Body::wrap_stream(limited(stream, MAX_CONTEXT)))
            }
        };
        if let Some(body) = body {
            request = request.header(header::CONTENT_TYPE, media_type).body(body);
        }
        // Releases are public, so no token is sent.
        let tokens = &self.terrakube.config().tokens;
        let token = match call {
            Call::ReadReleases => None,
            Call::ReadContent => tokens.mint(BRIEF),
            _ => tokens.for_step(step).mint(BRIEF),
        };
        if let Some(token) = token {
            request = request.bearer_auth(token.expose_secret());
        }
        let answer = request.send().await.map_err(|error| {
            let error = error.without_url();
            warn!(
                ?call,
                error = chain(&error),
                "the platform did not respond to a request of the relay"
            );
            bad_gateway("the platform does not respond: try again")
        })?;
        let location = self.location(call, &answer);
        let mut response = respond(answer, limit, timeout, turn);
        response
            .headers_mut()
            .extend(location.map(|location| (MODULE_LOCATION, location)));
        Ok(response)
    }

    /// Returns where the tool finds a module that the registry has named.
    fn location(&self, call: Call, answer: &reqwest::Response) -> Option<HeaderValue> {
        let named = answer.headers().get(MODULE_LOCATION)?.to_str().ok()?;
        let registry = self
            .registry
            .as_ref()
            .filter(|_| call == Call::ReadRegistry)?;
        HeaderValue::from_str(&registry::location(named, registry)).ok()
    }

    /// Returns the hosts of modules and providers that are found through the relay.
    fn hosts(&self) -> Response {
        let domain = self.terrakube.config().registry_domain.as_ref();
        let hosts: Vec<_> = domain
            .filter(|_| self.registry.is_some())
            .into_iter()
            .collect();
        Json(json!({ "hosts": hosts })).into_response()
    }

    async fn show_changes(&self, state: &[u8], step: &StepRef) -> Result<Response, Failure> {
        let state: LiveDocument = serde_json::from_slice(state)
            .map_err(|_| Failure::new(Code::RequestInvalid, "it is no state of an operation"))?;
        if let Some(redis) = self.terrakube.redis() {
            let stream = LiveStream::new(redis.clone(), &step.job_id, &step.step_id);
            stream.add(&state).await.map_err(|error| {
                warn!(error, "a live view of a run does not reach Redis");
                bad_gateway("the platform does not take the live view")
            })?;
        }
        Ok(StatusCode::NO_CONTENT.into_response())
    }

    /// Returns an address of the registry. The platform knows the name by which its addresses say whose module it is.
    async fn registry(&self, path: &[&str], step: &StepRef) -> Result<Url, Failure> {
        let forbidden = |text: &str| Failure::new(Code::ExecutorPoolForbidden, text);
        let registry = self.registry.as_ref();
        let registry = registry.ok_or_else(|| forbidden("the hub knows no registry"))?;
        let name = self.terrakube.organization_name(step).await;
        let name = name.map_err(|error| {
            warn!(
                error = chain(&error),
                "the name of an organization cannot be found"
            );
            bad_gateway("the platform does not say the name of the organization: try again")
        })?;
        if registry::namespace(path).is_none_or(|(_, namespace)| namespace != name) {
            let text = format!("the relay passes on modules and providers of `{name}` alone");
            warn!(
                job_id = step.job_id,
                ?path,
                "the relay has refused a module of another organization"
            );
            return Err(forbidden(&text));
        }
        Ok(extended(registry, &[&[registry::ROOT], path].concat()))
    }

    async fn url(
        &self,
        call: Call,
        path: &[&str],
        query: Option<&str>,
        step: &StepRef,
    ) -> Result<Url, Failure> {
        let config = self.terrakube.config();
        let (org, job) = (step.organization_id.as_str(), step.job_id.as_str());
        let job_path = ["api", "v1", "organization", org, "job", job];
        let history = [
            "api",
            "v1",
            "organization",
            org,
            "workspace",
            &step.workspace_id,
            "history",
        ];
        Ok(match call {
            Call::ReadJob => {
                let mut url = extended(&config.api_url, &job_path);
                url.set_query(Some("include=step"));
                url
            }
            Call::ChangeJob => extended(&config.api_url, &job_path),
            Call::ChangeStep => {
                let step = [&job_path[..], &["step", &step.step_id]].concat();
                extended(&config.api_url, &step)
            }
            Call::ReadHistory => {
                let mut url = extended(&config.api_url, &history);
                url.query_pairs_mut()
                    .append_pair("filter[history]", &own_history(step));
                url
            }
            Call::AddHistory => extended(&config.api_url, &history),
            Call::SetUpLog => extended(&config.api_url, &["logs", job, "setup-consumer-groups"]),
            Call::AddLines => extended(&config.api_url, &["logs"]),
            Call::ReadContext | Call::WriteContext => {
                extended(&config.public_url, &["context", "v1", job])
            }
            Call::ReadReleases => extended(&config.api_url, &["tofu", "index.json"]),
            Call::ReadContent => {
                let content = path[path.len().saturating_sub(2)..].join("/");
                self.content(&content, step).await?
            }
            Call::ReadRegistry | Call::ReadModule => self.registry(&path[1..], step).await?,
            Call::OfScript => {
                let mut url = extended(&config.api_url, &path[1..]);
                url.set_query(query);
                url
            }
            Call::ReadHosts | Call::ShowChanges => config.api_url.clone(),
        })
    }

    /// Returns the address of the content of a run. The job names it, and it must be at the platform.
    async fn content(&self, requested: &str, step: &StepRef) -> Result<Url, Failure> {
        let source = self.terrakube.override_source(step).await;
        let source = source.map_err(|error| {
            debug!(
                error = chain(&error),
                "the content of a run cannot be found"
            );
            bad_gateway("the platform does not say where the content of the run is: try again")
        })?;
        let config = self.terrakube.config();
        let url = source.and_then(|source| Url::parse(&source).ok());
        let url = url.filter(|url| {
            [&config.public_url, &config.api_url]
                .iter()
                .any(|base| base.origin() == url.origin())
                && url
                    .path()
                    .ends_with(&format!("/configuration-versions/{requested}"))
        });
        url.ok_or_else(|| {
            warn!(
                job_id = step.job_id,
                requested, "the relay has refused content that the job does not name"
            );
            let text = "the job has no content at the platform";
            Failure::new(Code::ExecutorPoolForbidden, text)
        })
    }
}

/// Returns method, media type, timeout and largest response of a request.
fn properties(call: Call, asked: Method) -> (Method, &'static str, Duration, usize) {
    let (method, media_type) = match call {
        Call::OfScript => (asked, JSON_API),
        Call::ReadJob | Call::ReadHistory => (Method::GET, JSON_API),
        Call::ChangeJob | Call::ChangeStep => (Method::PATCH, JSON_API),
        Call::AddHistory | Call::SetUpLog | Call::AddLines => (Method::POST, JSON_API),
        Call::ReadContext => (Method::GET, JSON),
        Call::WriteContext => (Method::POST, JSON),
        Call::ReadContent | Call::ReadModule => (Method::GET, "*/*"),
        Call::ReadReleases | Call::ReadRegistry | Call::ReadHosts => (Method::GET, JSON),
        Call::ShowChanges => (Method::POST, JSON),
    };
    let (timeout, limit) = match call {
        Call::ReadContent | Call::ReadModule => (CONTENT_TIMEOUT, 1024 * MIB),
        Call::ReadContext | Call::WriteContext => (CALL_TIMEOUT, MAX_CONTEXT),
        _ => (CALL_TIMEOUT, 8 * MIB),
    };
    (method, media_type, timeout, limit)
}

fn respond(answer: reqwest::Response, limit: usize, in_all: Duration, turn: Turn) -> Response {
    let status = answer.status();
    let kept: Vec<_> = [header::CONTENT_TYPE, header::RETRY_AFTER]
        .into_iter()
        .filter_map(|name| Some((name.clone(), answer.headers().get(name)?.clone())))
        .collect();
    let pieces = answer
        .bytes_stream()
        .map_err(|error| io::Error::other(error.without_url()));
    let pieces = passed_on(limited(pieces, limit), in_all, turn);
    let mut response = Response::new(Body::from_stream(pieces));
    *response.status_mut() = status;
    response.headers_mut().extend(kept);
    // Responses are for this executor only.
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Returns the stream. It fails if it has more than `limit` bytes.
fn limited<S>(stream: S, limit: usize) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static
where
    S: Stream<Item = io::Result<Bytes>> + Send + 'static,
{
    let mut left = limit;
    stream.map(move |piece| {
        let piece = piece?;
        left = left
            .checked_sub(piece.len())
            .ok_or_else(|| io::Error::new(io::ErrorKind::FileTooLarge, "it is too large"))?;
        Ok(piece)
    })
}

fn bad_gateway(text: &str) -> Failure {
    Failure::new(Code::Other, text).with_status(StatusCode::BAD_GATEWAY)
}
