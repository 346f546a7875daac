//! Reads bodies, and writes responses: JSON or a problem.

use std::convert::Infallible;
use std::future::ready;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use http_service::body::{self, BodyError};
use pool_protocol::problem::Code;
use pool_protocol::task::LeasedTask;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{BODY_TIMEOUT, Size};
use crate::budget::TakenBytes;
use crate::failure::Failure;

/// The result of a handler.
pub(super) type Answer = Result<Response, Failure>;

pub(super) fn json(document: &impl Serialize) -> Response {
    Json(document).into_response()
}

/// Reads a document of this size at most. `taken` takes its bytes until the call is answered. The error names the position,
/// and quotes nothing.
pub(super) async fn read<T: DeserializeOwned>(
    body: Body,
    size: Size,
    taken: &mut TakenBytes,
) -> Result<T, Failure> {
    let Size { limit, cost } = size;
    let take = |length| taken.grow(length * cost);
    let bytes = body::read_in_time(body, limit, BODY_TIMEOUT, take).await;
    let bytes = bytes.map_err(|error| match error {
        BodyError::TooSlow => invalid("the body did not arrive in time".to_owned()),
        BodyError::Busy => Failure::new(
            Code::RateLimited,
            "the hub has too many bodies in progress for this pool: try again",
        ),
        BodyError::TooLarge => invalid(format!("the body has more than {limit} bytes")),
        BodyError::Broken => invalid("the body cannot be read".to_owned()),
    })?;
    serde_json::from_slice(&bytes).map_err(|error| {
        invalid(format!(
            "the body is not the document of this call: line {} column {}",
            error.line(),
            error.column()
        ))
    })
}

/// Returns a response with the document of a task. `taken` has its bytes until they are sent.
pub(super) fn task_json(document: &LeasedTask, taken: TakenBytes) -> Answer {
    let bytes = serde_json::to_vec(document)
        .map_err(|_| Failure::new(Code::Other, "the task cannot be written"))?;
    let length = bytes.len();
    // The connection asks for a second piece only after it has taken the first one.
    let pieces = stream::unfold((Some(bytes), taken), |(bytes, taken)| {
        let piece = bytes.map(|bytes| Ok::<_, Infallible>(Bytes::from(bytes)));
        ready(piece.map(|piece| (piece, (None, taken))))
    });
    let mut response = Response::new(Body::from_stream(pieces));
    let headers = response.headers_mut();
    let json = HeaderValue::from_static("application/json");
    headers.insert(header::CONTENT_TYPE, json);
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    Ok(response)
}

fn invalid(text: String) -> Failure {
    Failure::new(Code::RequestInvalid, text)
}
