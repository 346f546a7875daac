//! `POST /api/v1/terraform-rs`, also below `/pools/{pool}`: handles one dispatch, from the head of the request to the
//! response.

use std::time::Instant;

use axum::body::HttpBody as _;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use http_service::body;
use job_contract::{Document, JobData};
use reporter::dispatch::{Acceptance, response_signal};
use serde_json::error::Category;
use tokio::sync::{AcquireError, SemaphorePermit};
use tracing::{info, warn};

use super::answer::{self, RequestError};
use super::auth::AuthError;
use super::{AppState, BODY_TIMEOUT, KIB, MAX_BODY_BYTES};
use crate::metrics::DispatchResult;

/// The request header with the trace of the sender.
const TRACEPARENT: &str = "traceparent";

/// The bytes that each byte of a document takes, if the whole job is made of it: many short variables.
const COST_AS_JOB: usize = 10;
/// The same if it is stored as it is.
const COST_AS_BYTES: usize = 4;

pub(super) async fn dispatch(State(state): State<AppState>, request: Request) -> Response {
    let started = Instant::now();
    let handled = handle(&state, request).await;
    respond(&state, started, handled)
}

pub(super) async fn dispatch_to_pool(
    State(state): State<AppState>,
    Path(pool): Path<String>,
    request: Request,
) -> Response {
    let started = Instant::now();
    let handled = handle_for_pool(&state, &pool, request).await;
    respond(&state, started, handled)
}

type Handled = Result<(Response, DispatchResult), RequestError>;

fn respond(state: &AppState, started: Instant, handled: Handled) -> Response {
    let (response, result) = match handled {
        Ok(handled) => handled,
        Err(error) => {
            warn!(reason = %error, "a dispatch was refused");
            let result = error.result();
            (error.into_response(), result)
        }
    };
    state.metrics.dispatched(result, started.elapsed());
    response
}

async fn handle(state: &AppState, request: Request) -> Handled {
    let (headers, body, _permits) = receive(state, request, COST_AS_JOB).await?;
    let job = parse(body, Document::from_json)?;
    if let Some(fallback) = state.routing.fallback_for(&job) {
        let response = fallback
            .forward(&headers, job.json().to_vec())
            .await
            .map_err(|error| RequestError::Unavailable(error.to_string()))?;
        info!(
            job_id = job.job_id,
            step_id = job.step_id,
            status = response.status().as_u16(),
            "passed on to the persistent executor"
        );
        return Ok((answer::forwarded(response), DispatchResult::Forwarded));
    }
    validate(state, &job)?;
    let (job_id, step_id) = (job.job_id.clone(), job.step_id.clone());
    let (pending, response_sent) = response_signal();
    let acceptance = state.target.accept(job, response_sent).await?;
    info!(job_id, step_id, accepted = ?acceptance, "accepted a dispatch");
    Ok((answer::accepted(pending), result_of(acceptance)))
}

async fn handle_for_pool(state: &AppState, pool: &str, request: Request) -> Handled {
    let (headers, json, _permits) = receive(state, request, COST_AS_BYTES).await?;
    let job = parse(json.as_slice(), JobData::head)?;
    validate(state, &job)?;
    let Some(hub) = &state.hub else {
        return Err(RequestError::UnknownPool(pool.to_owned()));
    };
    let traceparent = headers.get(TRACEPARENT);
    let traceparent = traceparent.and_then(|value| value.to_str().ok());
    let (job_id, step_id) = (job.job_id.clone(), job.step_id.clone());
    let acceptance = hub.submit(pool, json, job, traceparent).await?;
    info!(job_id, step_id, pool, accepted = ?acceptance, "accepted a dispatch");
    let (pending, _) = response_signal();
    Ok((answer::accepted(pending), result_of(acceptance)))
}

const fn result_of(acceptance: Acceptance) -> DispatchResult {
    match acceptance {
        Acceptance::New => DispatchResult::Accepted,
        Acceptance::Duplicate => DispatchResult::Duplicate,
    }
}

/// The turn of a dispatch, and its memory. They are kept until the dispatch is accepted.
type Permits<'a> = (SemaphorePermit<'a>, SemaphorePermit<'a>);

/// Authorizes a request, and reads its body, which takes `cost` times its length.
async fn receive(
    state: &AppState,
    request: Request,
    cost: usize,
) -> Result<(HeaderMap, Vec<u8>, Permits<'_>), RequestError> {
    let (head, body) = request.into_parts();
    authorize(state, &head.headers)?;
    let length = body.size_hint().upper().unwrap_or(u64::MAX);
    let length =
        usize::try_from(length).map_or(MAX_BODY_BYTES, |length| length.min(MAX_BODY_BYTES));
    let kib = u32::try_from((cost * length).div_ceil(KIB)).unwrap_or(u32::MAX);
    let unavailable = |error: AcquireError| RequestError::Unavailable(error.to_string());
    let turn = state.turns.acquire().await.map_err(unavailable)?;
    let memory = state.memory.acquire_many(kib).await.map_err(unavailable)?;
    let body = body::read_in_time(body, MAX_BODY_BYTES, BODY_TIMEOUT, |_| true).await?;
    Ok((head.headers, body, (turn, memory)))
}

fn validate(state: &AppState, job: &JobData) -> Result<(), RequestError> {
    job.validate()
        .map_err(|error| RequestError::Invalid(error.to_string()))?;
    let source = job.source.as_deref().filter(|_| !job.is_remote_content());
    if let (Some(allowed), Some(source)) = (&state.allowed, source) {
        allowed
            .judge(source.trim())
            .map_err(|refusal| RequestError::Invalid(refusal.to_string()))?;
    }
    Ok(())
}

/// Checks the token before the body is read. An unauthorized sender must not fill the launcher's memory.
fn authorize(state: &AppState, headers: &HeaderMap) -> Result<(), RequestError> {
    // Browsers send `Origin` with each POST. A page of any site could reach this machine from its user's browser.
    if state.gate.is_open() && headers.contains_key(header::ORIGIN) {
        return Err(RequestError::Unauthorized(AuthError::WebPage));
    }
    let authorization = headers.get(header::AUTHORIZATION);
    state
        .gate
        .check(authorization.map(HeaderValue::as_bytes))
        .map_err(RequestError::Unauthorized)
}

/// The message names the position of an error. It never quotes the document, because most of it can be secret.
fn parse<B, T>(
    body: B,
    parse: impl FnOnce(B) -> Result<T, serde_json::Error>,
) -> Result<T, RequestError> {
    parse(body).map_err(|error| {
        let reason = match error.classify() {
            Category::Eof => "it ends too early",
            Category::Data => "a property has the wrong type",
            Category::Syntax | Category::Io => "it is not valid JSON",
        };
        RequestError::Invalid(format!(
            "the body is not a job document: {reason} at line {} column {}",
            error.line(),
            error.column()
        ))
    })
}
