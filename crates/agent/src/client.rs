//! Sends requests to the hub. Each function makes one attempt. [`answer`] decides what follows a failure.

pub(crate) mod answer;
pub(crate) mod exchange;
pub(crate) mod token;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use job_contract::chain;
use pool_protocol::IDEMPOTENCY_KEY;
use pool_protocol::id::InstanceId;
use pool_protocol::instance::{InstanceHeartbeat, InstanceOrders, Registered, Registration};
use pool_protocol::lease::LeaseRef;
use pool_protocol::path::{self, LeaseCall};
use pool_protocol::task::{LeasedTask, TaskRequest};
use pool_protocol::version;
use reqwest::redirect::Policy;
use reqwest::{Method, header};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Serialize;
use serde::de::DeserializeOwned;
use url::Url;
use uuid::Uuid;

use self::answer::{Answer, Failure};
use self::exchange::Exchange;
use self::token::PoolTokenSource;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout of a call, in addition to the wait that the request contains.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout of an exchange. The hub may send two requests to the provider.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(30);
/// The largest response that is read. A task with the largest job document is smaller.
const MAX_ANSWER_BYTES: usize = 32 * 1024 * 1024;

/// The source of the agent's token.
#[derive(Clone, Debug)]
pub(crate) enum AgentToken {
    Pool(PoolTokenSource),
    Exchange(Arc<Exchange>),
}

/// A client of one hub. Clones share the connections.
#[derive(Clone, Debug)]
pub(crate) struct HubClient {
    http: reqwest::Client,
    base: String,
    token: AgentToken,
    contact: Arc<Mutex<Contact>>,
}

/// When the hub was last reached, and why it refuses the agent.
#[derive(Debug)]
struct Contact {
    last: Option<Instant>,
    problem: Option<String>,
}

struct Call<'a> {
    method: Method,
    path: &'a str,
    /// The job token of a lease. Without it, the call uses the agent's own token.
    token: Option<&'a SecretString>,
    key: Option<Uuid>,
    timeout: Duration,
}

impl HubClient {
    /// Returns a client of the hub at this address. A hub that is here, in this process, is not behind a proxy.
    pub(crate) fn new(
        base: &Url,
        is_here: bool,
        token: AgentToken,
    ) -> Result<Self, reqwest::Error> {
        let builder = reqwest::Client::builder();
        let builder = if is_here { builder.no_proxy() } else { builder };
        let http = builder
            // A redirect would send the token to another address.
            .redirect(Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .user_agent(concat!("mayfly-agent/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self {
            http,
            base: base.as_str().trim_end_matches('/').to_owned(),
            token,
            contact: Arc::new(Mutex::new(Contact {
                last: None,
                problem: None,
            })),
        })
    }

    pub(crate) async fn register(
        &self,
        key: Uuid,
        registration: &Registration,
    ) -> Result<Registered, Failure> {
        let call = Call::post(path::REGISTER).with_key(key);
        self.request_json(call, registration).await
    }

    pub(crate) async fn heartbeat(
        &self,
        instance: InstanceId,
        heartbeat: &InstanceHeartbeat,
    ) -> Result<InstanceOrders, Failure> {
        let path = path::instance_heartbeat(instance);
        self.request_json(Call::post(&path), heartbeat).await
    }

    /// Waits for a task. The leases in the request change from call to call, so each call has a new idempotency key.
    pub(crate) async fn request_task(
        &self,
        request: &TaskRequest,
    ) -> Result<Option<LeasedTask>, Failure> {
        let mut call = Call::post(path::REQUEST_TASK).with_key(Uuid::new_v4());
        call.timeout += Duration::from_secs(request.wait_seconds.into());
        self.request(call, request).await
    }

    /// Makes a call for a lease. For a lease that was found, the agent has no job token and uses its own token.
    pub(crate) async fn lease<T: DeserializeOwned>(
        &self,
        lease: &LeaseRef,
        token: Option<&SecretString>,
        call: LeaseCall,
        key: Uuid,
        body: &impl Serialize,
    ) -> Result<T, Failure> {
        let path = path::lease(lease.task, lease.lease, call);
        let mut call = Call::post(&path).with_key(key);
        call.token = token;
        self.request_json(call, body).await
    }

    pub(crate) async fn remove(&self, instance: InstanceId) -> Result<(), Failure> {
        let path = path::instance(instance);
        let call = Call {
            method: Method::DELETE,
            ..Call::post(&path)
        };
        let answer = self.send(&call, None).await?;
        self.record_contact(answer.read::<serde::de::IgnoredAny>(), true)
            .map(drop)
    }

    /// Returns the URL of a lease, for its executor.
    pub(crate) fn lease_url(&self, lease: &LeaseRef) -> String {
        format!("{}{}", self.base, lease_path(lease))
    }

    /// Returns the hub of the URL of a lease, if it is another one. What is no such URL names no hub.
    pub(crate) fn other_hub(&self, lease: &LeaseRef, url: &str) -> Option<Url> {
        let base = url.strip_suffix(&lease_path(lease))?;
        (base != self.base).then(|| Url::parse(base).ok())?
    }

    /// Returns how long ago the hub was reached, and why it refuses the agent now.
    pub(crate) fn silence(&self) -> (Option<Duration>, Option<String>) {
        let contact = runtime::lock(&self.contact);
        let silence = contact.last.map(|last| last.elapsed());
        (silence, contact.problem.clone())
    }

    async fn request_json<T: DeserializeOwned>(
        &self,
        call: Call<'_>,
        body: &impl Serialize,
    ) -> Result<T, Failure> {
        let answer = self.request(call, body).await?;
        answer.ok_or_else(|| Failure::Unreachable("the answer has no body".to_owned()))
    }

    async fn request<T: DeserializeOwned>(
        &self,
        call: Call<'_>,
        body: &impl Serialize,
    ) -> Result<Option<T>, Failure> {
        let is_own_token = call.token.is_none();
        let body = serde_json::to_vec(body).expect("the bodies of the protocol are plain JSON");
        let answer = self.send(&call, Some(&body)).await?;
        self.record_contact(answer.read(), is_own_token)
    }

    async fn send(&self, call: &Call<'_>, body: Option<&[u8]>) -> Result<Answer, Failure> {
        if let Some(token) = call.token {
            return self.attempt(call, body, token).await;
        }
        let token = self.own_token().await?;
        let answer = self.attempt(call, body, &token).await?;
        match &self.token {
            // The access token may have expired while the request waited at the hub.
            AgentToken::Exchange(exchange) if answer.status == 401 => {
                exchange.discard(&token).await;
                let token = self.own_token().await?;
                self.attempt(call, body, &token).await
            }
            _ => Ok(answer),
        }
    }

    async fn own_token(&self) -> Result<SecretString, Failure> {
        let token = match &self.token {
            AgentToken::Pool(source) => source.read().map_err(Failure::Unauthorized),
            AgentToken::Exchange(exchange) => {
                let send = async |form: String| {
                    let request = self
                        .http
                        .post(format!("{}{}", self.base, path::TOKEN))
                        .timeout(EXCHANGE_TIMEOUT)
                        .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
                    read(request.body(form)).await
                };
                exchange.token(send).await
            }
        };
        match token {
            Ok(token) => Ok(token),
            Err(failure) => self.record_contact(Err(failure), true),
        }
    }

    async fn attempt(
        &self,
        call: &Call<'_>,
        body: Option<&[u8]>,
        token: &SecretString,
    ) -> Result<Answer, Failure> {
        let mut request = self
            .http
            .request(call.method.clone(), format!("{}{}", self.base, call.path))
            .timeout(call.timeout)
            .header(version::HEADER, version::VERSION)
            .bearer_auth(token.expose_secret());
        if let Some(key) = call.key {
            request = request.header(IDEMPOTENCY_KEY, key.to_string());
        }
        if let Some(body) = body {
            request = request
                .header(header::CONTENT_TYPE, "application/json")
                .body(body.to_vec());
        }
        read(request).await
    }

    /// Stores whether the hub was reached and accepts the agent's own token. The result of a call with a job token
    /// says nothing about the agent's token.
    fn record_contact<T>(
        &self,
        result: Result<T, Failure>,
        is_own_token: bool,
    ) -> Result<T, Failure> {
        let mut contact = runtime::lock(&self.contact);
        match &result {
            Err(Failure::Unreachable(_)) => {}
            Err(failure @ (Failure::Unauthorized(_) | Failure::Forbidden(_))) => {
                if is_own_token {
                    contact.problem = Some(failure.to_string());
                }
            }
            _ => {
                contact.last = Some(Instant::now());
                if is_own_token {
                    contact.problem = None;
                }
            }
        }
        drop(contact);
        result
    }
}

async fn read(request: reqwest::RequestBuilder) -> Result<Answer, Failure> {
    let unreachable = |error: reqwest::Error| Failure::Unreachable(chain(&error));
    let mut response = request.send().await.map_err(unreachable)?;
    let retry_after = response.headers().get(header::RETRY_AFTER);
    let retry_after = retry_after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let mut answer = Answer {
        status: response.status().as_u16(),
        retry_after: retry_after.map(Duration::from_secs),
        body: Vec::new(),
    };
    while let Some(piece) = response.chunk().await.map_err(unreachable)? {
        if answer.body.len() + piece.len() > MAX_ANSWER_BYTES {
            return Err(Failure::Unreachable("the answer is too long".to_owned()));
        }
        answer.body.extend_from_slice(&piece);
    }
    Ok(answer)
}

impl<'a> Call<'a> {
    const fn post(path: &'a str) -> Self {
        Self {
            method: Method::POST,
            path,
            token: None,
            key: None,
            timeout: ANSWER_TIMEOUT,
        }
    }

    const fn with_key(mut self, key: Uuid) -> Self {
        self.key = Some(key);
        self
    }
}

/// Returns the path of a lease.
fn lease_path(lease: &LeaseRef) -> String {
    let relay = path::relay(lease.task, lease.lease);
    let path = relay.rsplit_once('/').map_or("", |(lease, _)| lease);
    path.to_owned()
}
