//! Builds all responses of the service. The platform fails the job on every status except 202 and 503 (contract 2.4).

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_service::body::BodyError;
use hub::SubmitError;
use reporter::dispatch::{DispatchError, PendingResponse};
use serde_json::json;

use super::auth::AuthError;
use crate::metrics::DispatchResult;

#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    #[error(transparent)]
    Unauthorized(AuthError),
    #[error("the body is larger than {} MiB", super::MAX_BODY_BYTES / (1024 * 1024))]
    TooLarge,
    #[error("the body did not arrive within {} s", super::BODY_TIMEOUT.as_secs())]
    TooSlow,
    #[error("the body could not be read")]
    Broken,
    #[error("{0}")]
    Invalid(String),
    #[error("there is no pool `{}` here: correct the URL of the agent", .0.escape_debug())]
    UnknownPool(String),
    #[error("nothing can be accepted now: {0}")]
    Unavailable(String),
}

impl RequestError {
    pub(super) const fn result(&self) -> DispatchResult {
        match self {
            Self::Unauthorized(_) => DispatchResult::Unauthorized,
            Self::TooLarge => DispatchResult::TooLarge,
            Self::TooSlow | Self::Broken => DispatchResult::Timeout,
            Self::Invalid(_) | Self::UnknownPool(_) => DispatchResult::Invalid,
            Self::Unavailable(_) => DispatchResult::Unavailable,
        }
    }

    const fn status(&self) -> StatusCode {
        match self {
            Self::Unauthorized(_) => StatusCode::UNAUTHORIZED,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Broken | Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::UnknownPool(_) => StatusCode::NOT_FOUND,
            // A slow network is temporary. The status 408 would fail the job.
            Self::TooSlow | Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

impl From<DispatchError> for RequestError {
    fn from(error: DispatchError) -> Self {
        match error {
            DispatchError::Unavailable(reason) => Self::Unavailable(reason),
            DispatchError::Invalid(reason) => Self::Invalid(reason),
        }
    }
}

impl From<BodyError> for RequestError {
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::TooLarge => Self::TooLarge,
            BodyError::Busy => Self::Unavailable("too many bodies are in progress".to_owned()),
            BodyError::TooSlow => Self::TooSlow,
            BodyError::Broken => Self::Broken,
        }
    }
}

impl From<SubmitError> for RequestError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::UnknownPool(pool) => Self::UnknownPool(pool),
            error @ SubmitError::Store(_) => DispatchError::from(error).into(),
        }
    }
}

impl IntoResponse for RequestError {
    fn into_response(self) -> Response {
        let mut response = error(self.status(), &self.to_string());
        let headers = response.headers_mut();
        if matches!(self, Self::Unauthorized(_)) {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // The unread rest of a body must not be parsed as the next request.
        if matches!(self, Self::TooLarge | Self::TooSlow | Self::Broken) {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// Returns the response of an accepted dispatch. Its body keeps `pending` until the connection takes it.
pub(super) fn accepted(pending: PendingResponse) -> Response {
    const DOCUMENT: &[u8] = b"{}";
    // The connection asks for a second piece only after it has taken the first one.
    let pieces = futures_util::stream::unfold((true, pending), |(first, pending)| {
        let piece = first.then(|| Ok::<_, Infallible>(Bytes::from_static(DOCUMENT)));
        std::future::ready(piece.map(|piece| (piece, (false, pending))))
    });
    let mut response = Response::new(Body::from_stream(pieces));
    *response.status_mut() = StatusCode::ACCEPTED;
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(DOCUMENT.len()));
    response
}

/// Forwards a response of the persistent executor. Its body is streamed.
pub(super) fn forwarded(from: reqwest::Response) -> Response {
    let status = from.status();
    let kind = from.headers().get(header::CONTENT_TYPE).cloned();
    let mut response = Response::new(Body::from_stream(from.bytes_stream()));
    *response.status_mut() = status;
    if let Some(kind) = kind {
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    response
}

pub(super) fn error(status: StatusCode, message: &str) -> Response {
    json_body(status, json!({ "error": message }).to_string())
}

/// Text that is JSON already.
pub(super) fn json_body(status: StatusCode, text: String) -> Response {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_temporary_failures_ask_for_another_dispatch() {
        for (error, status) in [
            (
                RequestError::Unauthorized(AuthError::Missing),
                StatusCode::UNAUTHORIZED,
            ),
            (RequestError::TooLarge, StatusCode::PAYLOAD_TOO_LARGE),
            (
                RequestError::Invalid(String::new()),
                StatusCode::BAD_REQUEST,
            ),
            (RequestError::TooSlow, StatusCode::SERVICE_UNAVAILABLE),
            (
                RequestError::Unavailable(String::new()),
                StatusCode::SERVICE_UNAVAILABLE,
            ),
        ] {
            let words = error.to_string();
            assert_eq!(error.into_response().status(), status, "{words}");
        }
    }

    #[test]
    fn the_rest_of_a_slow_body_is_not_taken_for_the_next_request() {
        let response = RequestError::TooSlow.into_response();
        assert_eq!(response.headers()[header::CONNECTION], "close");
        assert_eq!(RequestError::TooSlow.result(), DispatchResult::Timeout);
    }
}
