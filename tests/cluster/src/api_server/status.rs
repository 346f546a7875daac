//! What the server answers when it refuses: `Status` objects in the words of a real API server.
//!
//! Knows nothing of storage or of requests beyond the names it is given.

use axum::body::Body;
use axum::http::{Response, StatusCode, header};
use serde_json::{Map, Value, json};

use super::resource::ResourceType;
use super::validation::Errors;

/// A refusal; becomes a `Status` object.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    pub(crate) code: u16,
    reason: &'static str,
    pub(crate) message: String,
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

    fn about(mut self, resource: &ResourceType, name: &str) -> Self {
        self.details = about(resource.group, resource.plural, name);
        self
    }

    pub(crate) fn not_found(resource: &ResourceType, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", resource.qualified());
        Self::new(404, "NotFound", message).about(resource, name)
    }

    pub(crate) fn no_such_path() -> Self {
        Self::new(
            404,
            "NotFound",
            "the server could not find the requested resource",
        )
    }

    pub(crate) fn already_exists(resource: &ResourceType, name: &str) -> Self {
        let message = format!("{} \"{name}\" already exists", resource.qualified());
        Self::new(409, "AlreadyExists", message).about(resource, name)
    }

    pub(crate) fn conflict(resource: &ResourceType, name: &str, why: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} \"{name}\": {why}",
            resource.qualified()
        );
        Self::new(409, "Conflict", message).about(resource, name)
    }

    pub(crate) fn modified(resource: &ResourceType, name: &str) -> Self {
        let why = "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(resource, name, why)
    }

    /// Server-side apply met fields that another manager owns.
    pub(crate) fn apply_conflict(conflicts: &[(String, String)]) -> Self {
        let plural = if conflicts.len() == 1 {
            "conflict"
        } else {
            "conflicts"
        };
        let list: Vec<String> = conflicts
            .iter()
            .map(|(manager, field)| format!("conflict with \"{manager}\": {field}"))
            .collect();
        let mut error = Self::new(
            409,
            "Conflict",
            format!(
                "Apply failed with {} {plural}: {}",
                conflicts.len(),
                list.join("\n")
            ),
        );
        let causes: Vec<Value> = conflicts
            .iter()
            .map(|(manager, field)| {
                json!({"reason": "FieldManagerConflict", "message": format!("conflict with \"{manager}\""), "field": field})
            })
            .collect();
        error.details.insert("causes".into(), causes.into());
        error
    }

    pub(crate) fn invalid(resource: &ResourceType, name: &str, errors: &Errors) -> Self {
        let kind = if resource.group.is_empty() {
            resource.kind.to_owned()
        } else {
            format!("{}.{}", resource.kind, resource.group)
        };
        let mut error = Self::new(
            422,
            "Invalid",
            format!("{kind} \"{name}\" is invalid: {}", errors.sentence()),
        );
        error.details = about(resource.group, resource.kind, name);
        error.details.insert("causes".into(), errors.causes());
        error
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// Refused by admission: quota, a namespace that ends, a missing account.
    pub(crate) fn refused(group: &str, resource: &str, name: &str, why: &str) -> Self {
        let quoted = if name.is_empty() {
            String::new()
        } else {
            format!(" \"{name}\"")
        };
        let dot = if group.is_empty() { "" } else { "." };
        let message = format!("{resource}{dot}{group}{quoted} is forbidden: {why}");
        let mut error = Self::new(403, "Forbidden", message);
        error.details = about(group, resource, name);
        error
    }

    pub(crate) fn forbidden_path(user: &str, verb: &str, path: &str) -> Self {
        Self::new(
            403,
            "Forbidden",
            format!("forbidden: User \"{user}\" cannot {verb} path \"{path}\""),
        )
    }

    pub(crate) fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    pub(crate) fn method_not_allowed() -> Self {
        Self::new(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )
    }

    pub(crate) fn unsupported_media_type(accepted: &[&str]) -> Self {
        Self::new(
            415,
            "UnsupportedMediaType",
            format!(
                "the body of the request was in an unknown format - accepted media types include: {}",
                accepted.join(", ")
            ),
        )
    }

    pub(crate) fn not_acceptable() -> Self {
        Self::new(
            406,
            "NotAcceptable",
            "only the following media types are accepted: application/json",
        )
    }

    pub(crate) fn too_large(limit: usize) -> Self {
        Self::new(
            413,
            "RequestEntityTooLarge",
            format!("Request entity too large: limit is {limit}"),
        )
    }

    pub(crate) fn expired(message: impl Into<String>) -> Self {
        Self::new(410, "Expired", message)
    }

    pub(crate) fn version_from_the_future(asked: u64, current: u64) -> Self {
        let mut error = Self::new(
            504,
            "Timeout",
            format!("Too large resource version: {asked}, current: {current}"),
        );
        error.details.insert(
            "causes".into(),
            json!([{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]),
        );
        error.details.insert("retryAfterSeconds".into(), 1.into());
        error.retry_after = Some(1);
        error
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

    pub(crate) fn detailed(mut self, details: Value) -> Self {
        self.set_details(details);
        self
    }

    pub(crate) fn set_details(&mut self, details: Value) {
        if let Value::Object(details) = details {
            self.details = details;
        }
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

fn about(group: &str, kind: &str, name: &str) -> Map<String, Value> {
    let mut details = Map::new();
    for (key, value) in [("name", name), ("group", group), ("kind", kind)] {
        if !value.is_empty() {
            details.insert(key.to_owned(), value.into());
        }
    }
    details
}

/// What a delete answers when nothing is left of the object.
pub(crate) fn deleted(resource: &ResourceType, name: &str, uid: &str) -> Value {
    let mut details = about(resource.group, resource.plural, name);
    details.insert("uid".into(), uid.into());
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
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
