//! What the front answers itself when it refuses: `Status` objects in the words of an API server.

use axum::body::Body;
use axum::http::{Response, StatusCode, header};
use serde_json::{Map, Value, json};

/// A refusal; becomes a `Status` object.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    code: u16,
    reason: &'static str,
    message: String,
    details: Map<String, Value>,
    retry_after: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            details: Map::new(),
            retry_after: None,
        }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// Refused for want of a right.
    pub(crate) fn forbidden(resource: &str, name: &str, why: &str) -> Self {
        let message = format!("{resource} \"{name}\" is forbidden: {why}");
        let mut error = Self::new(403, "Forbidden", message);
        error.details.insert("name".into(), name.into());
        error.details.insert("kind".into(), resource.into());
        error
    }

    pub(crate) fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    pub(crate) fn too_many_requests(seconds: u64) -> Self {
        let mut error = Self::new(
            429,
            "TooManyRequests",
            "the server has received too many requests and has asked us to try again later",
        );
        error
            .details
            .insert("retryAfterSeconds".into(), seconds.into());
        error.retry_after = Some(seconds);
        error
    }

    pub(crate) fn internal(message: &str) -> Self {
        Self::new(
            500,
            "InternalError",
            format!("Internal error occurred: {message}"),
        )
    }

    /// The wire form.
    pub(crate) fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason,
        });
        if !self.details.is_empty() {
            status["details"] = Value::Object(self.details.clone());
        }
        status["code"] = self.code.into();
        status
    }

    pub(crate) fn response(&self) -> Response<Body> {
        let mut response = json_response(self.code, &self.status());
        if let Some(seconds) = self.retry_after {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

pub(crate) fn json_response(code: u16, body: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() =
        StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/json"),
    );
    response
}
