//! Reads bodies, and writes responses: JSON or a problem.

use axum::Json;
use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pool_protocol::problem::{self, Code, Problem};
use pool_store::Refusal;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::warn;

use super::{BODY_TIMEOUT, MAX_BODY_BYTES};
use crate::http::body;

/// The `Retry-After` of an overloaded hub, in seconds.
const RETRY_AFTER: u32 = 5;

/// A request that failed.
#[derive(Debug)]
pub(crate) struct Failure(Problem);

impl Failure {
    pub(crate) fn new(code: Code, title: impl Into<String>) -> Self {
        Self(Problem::new(code, title))
    }

    /// Replaces the default status of the code.
    pub(crate) fn with_status(mut self, status: StatusCode) -> Self {
        self.0.status = status.as_u16();
        self
    }

    pub(crate) const fn code(&self) -> Code {
        self.0.code
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl From<pool_store::Error> for Failure {
    fn from(error: pool_store::Error) -> Self {
        let code = error.code();
        match &error {
            pool_store::Error::Refused(refusal) => Self::new(code, refusal.to_string()),
            pool_store::Error::Unavailable(_) => {
                warn!(%error, "the store of pools cannot be used");
                Self::new(code, "the hub cannot use its store now: try again")
            }
        }
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal.code(), refusal.to_string())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Self(problem) = self;
        let status =
            StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(&problem)).into_response();
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static(problem::MEDIA_TYPE),
        );
        match problem.code {
            Code::RateLimited | Code::StoreUnavailable => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER));
            }
            Code::ExecutorAuthenticationFailed => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

/// The result of a handler.
pub(super) type Answer = Result<Response, Failure>;

/// Returns a response with this document.
pub(super) fn json(document: &impl Serialize) -> Response {
    Json(document).into_response()
}

/// Reads a document. The error names the position, and quotes nothing.
pub(super) async fn read<T: DeserializeOwned>(body: Body) -> Result<T, Failure> {
    serde_json::from_slice(&bytes(body).await?).map_err(|error| {
        invalid(format!(
            "the body is not the document of this call: line {} column {}",
            error.line(),
            error.column()
        ))
    })
}

/// Reads a body.
async fn bytes(body: Body) -> Result<Vec<u8>, Failure> {
    tokio::time::timeout(BODY_TIMEOUT, body::read(body, MAX_BODY_BYTES))
        .await
        .map_err(|_| invalid("the body did not arrive in time".to_owned()))?
        .map_err(|_| {
            invalid(format!(
                "the body cannot be read, or has more than {MAX_BODY_BYTES} bytes"
            ))
        })
}

fn invalid(text: String) -> Failure {
    Failure::new(Code::RequestInvalid, text)
}
