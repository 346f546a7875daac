//! `POST /api/v1/terraform-rs`: handles one dispatch, from the head of the request to the response.

use std::time::Instant;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::StreamExt as _;
use job_contract::Document;
use serde_json::error::Category;
use tracing::{info, warn};

use super::answer::{self, RequestError};
use super::{AppState, BODY_TIMEOUT, MAX_BODY_BYTES};
use crate::dispatch::Acceptance;
use crate::dispatch::response::response_signal;
use crate::metrics::DispatchResult;

/// If the connection closes while the sender still sends, the sender loses the response. So the rest is read and
/// thrown away, up to this size.
const MAX_DISCARDED_BYTES: usize = 8 * MAX_BODY_BYTES;

pub(super) async fn dispatch(State(state): State<AppState>, request: Request) -> Response {
    let started = Instant::now();
    let (response, result) = match handle(&state, request).await {
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

async fn handle(
    state: &AppState,
    request: Request,
) -> Result<(Response, DispatchResult), RequestError> {
    let (head, body) = request.into_parts();
    authorize(state, &head.headers)?;
    let _permit = state.bodies.acquire().await;
    let body = tokio::time::timeout(BODY_TIMEOUT, read(body))
        .await
        .map_err(|_| RequestError::TooSlow)??;
    let job = parse(body)?;
    if let Some(fallback) = state.routing.fallback_for(&job) {
        let response = fallback
            .forward(&head.headers, job.json().to_vec())
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
    job.validate()
        .map_err(|error| RequestError::Invalid(error.to_string()))?;
    let (job_id, step_id) = (job.job_id.clone(), job.step_id.clone());
    let (pending, response_sent) = response_signal();
    let acceptance = state.target.accept(job, response_sent).await?;
    info!(job_id, step_id, accepted = ?acceptance, "accepted a dispatch");
    let result = match acceptance {
        Acceptance::New => DispatchResult::Accepted,
        Acceptance::Duplicate => DispatchResult::Duplicate,
    };
    Ok((answer::accepted(pending), result))
}

/// Checks the token before the body is read. An unauthorized sender must not fill the launcher's memory.
fn authorize(state: &AppState, headers: &HeaderMap) -> Result<(), RequestError> {
    let authorization = headers.get(header::AUTHORIZATION);
    state
        .gate
        .check(authorization.map(HeaderValue::as_bytes))
        .map_err(RequestError::Unauthorized)
}

async fn read(body: Body) -> Result<Vec<u8>, RequestError> {
    let mut stream = body.into_data_stream();
    let mut whole = Vec::new();
    let mut length = 0;
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|_| RequestError::Broken)?;
        length += piece.len();
        if length <= MAX_BODY_BYTES {
            whole.extend_from_slice(&piece);
        } else if length > MAX_DISCARDED_BYTES {
            break;
        }
    }
    if length > MAX_BODY_BYTES {
        return Err(RequestError::TooLarge);
    }
    Ok(whole)
}

/// The message names the position of an error. It never quotes the document, because most of it can be secret.
fn parse(body: Vec<u8>) -> Result<Document, RequestError> {
    Document::from_json(body).map_err(|error| {
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
