//! A request that failed, and the problem that answers it.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pool_protocol::problem::{self, Code, Problem};
use pool_store::Refusal;
use tracing::warn;

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

    /// Adds to its text.
    pub(crate) fn and(mut self, text: &str) -> Self {
        self.0.title.push_str(text);
        self
    }

    #[cfg(test)]
    pub(crate) const fn status(&self) -> u16 {
        self.0.status
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
