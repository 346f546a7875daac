//! `POST /api/v1/terraform-rs`: one dispatch, from its head to its answer.

use std::time::Instant;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::StreamExt as _;
use job_contract::Document;
use serde_json::error::Category;
use tracing::{info, warn};

use super::answer::{self, Refusal};
use super::{AppState, BODY_TIMEOUT, MAX_BODY_BYTES};
use crate::dispatch::{self, Accepted, Refused};
use crate::metrics::DispatchResult;

/// A sender that has not read its answer gets none when the connection closes under what it still sends.
const MAX_DRAINED_BYTES: usize = 8 * MAX_BODY_BYTES;

pub(super) async fn dispatch(State(state): State<AppState>, request: Request) -> Response {
    let started = Instant::now();
    let (response, result) = match handle(&state, request).await {
        Ok(answered) => answered,
        Err(refusal) => {
            warn!(reason = %refusal, "a dispatch was refused");
            let result = refusal.result();
            (refusal.into_response(), result)
        }
    };
    state.metrics.dispatched(result, started.elapsed());
    response
}

async fn handle(state: &AppState, request: Request) -> Result<(Response, DispatchResult), Refusal> {
    let (head, body) = request.into_parts();
    authorize(state, &head.headers)?;
    let _place = state.bodies.acquire().await;
    let body = tokio::time::timeout(BODY_TIMEOUT, read(body))
        .await
        .map_err(|_| Refusal::TooSlow)??;
    let job = parse(body)?;
    if let Some(fallback) = state.routing.elsewhere(&job) {
        let response = fallback
            .forward(&head.headers, job.json().to_vec().into())
            .await
            .map_err(|error| Refusal::Unavailable(error.to_string()))?;
        info!(
            job_id = job.job_id,
            step_id = job.step_id,
            status = response.status().as_u16(),
            "passed on to the persistent executor"
        );
        return Ok((response, DispatchResult::Forwarded));
    }
    job.validate()
        .map_err(|error| Refusal::Invalid(error.to_string()))?;
    let (job_id, step_id) = (job.job_id.clone(), job.step_id.clone());
    let (answering, answered) = dispatch::answer();
    let accepted = state
        .target
        .accept(job, answered)
        .await
        .map_err(|refused| match refused {
            Refused::Unavailable(reason) => Refusal::Unavailable(reason),
            Refused::Invalid(reason) => Refusal::Invalid(reason),
        })?;
    info!(job_id, step_id, ?accepted, "accepted a dispatch");
    let result = match accepted {
        Accepted::New => DispatchResult::Accepted,
        Accepted::Duplicate => DispatchResult::Duplicate,
    };
    Ok((answer::accepted(answering), result))
}

/// Before the body: nobody unknown makes the launcher hold megabytes.
fn authorize(state: &AppState, headers: &HeaderMap) -> Result<(), Refusal> {
    let authorization = headers.get(header::AUTHORIZATION);
    state
        .gate
        .check(authorization.map(HeaderValue::as_bytes))
        .map_err(Refusal::Unauthorized)
}

async fn read(body: Body) -> Result<Vec<u8>, Refusal> {
    let mut stream = body.into_data_stream();
    let mut whole = Vec::new();
    let mut length = 0;
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|_| Refusal::Broken)?;
        length += piece.len();
        if length <= MAX_BODY_BYTES {
            whole.extend_from_slice(&piece);
        } else if length > MAX_DRAINED_BYTES {
            break;
        }
    }
    if length > MAX_BODY_BYTES {
        return Err(Refusal::TooLarge);
    }
    Ok(whole)
}

/// The message says where, and never quotes: most of a document can be secret.
fn parse(body: Vec<u8>) -> Result<Document, Refusal> {
    Document::from_json(body).map_err(|error| {
        let problem = match error.classify() {
            Category::Eof => "it ends too early",
            Category::Data => "a property has the wrong type",
            Category::Syntax | Category::Io => "it is not valid JSON",
        };
        Refusal::Invalid(format!(
            "the body is not a job document: {problem} at line {} column {}",
            error.line(),
            error.column()
        ))
    })
}
