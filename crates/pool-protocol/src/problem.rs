//! Errors of the protocol: `application/problem+json` (RFC 9457) with a stable code.

use std::fmt;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// The media type of problems.
pub const MEDIA_TYPE: &str = "application/problem+json";

/// Stable codes of errors. Agents decide by these codes and never by texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Code {
    /// The version header is missing or not an integer.
    ExecutorProtocolVersionRequired,
    /// The hub does not support the version.
    ExecutorProtocolVersionUnsupported,
    /// The token is missing, unknown, expired or revoked.
    ExecutorAuthenticationFailed,
    /// The token is valid for another pool, task or call.
    ExecutorPoolForbidden,
    /// The pool leases no tasks for the moment.
    ExecutorPoolPaused,
    /// The instance belongs to another pool.
    InstancePoolMismatch,
    /// The instance is not registered, or was removed: register again.
    InstanceUnknown,
    /// Another installation uses this name, and is online.
    InstanceNameTaken,
    /// The task does not exist.
    TaskNotFound,
    /// The lease ended before the task was accepted.
    LeaseExpired,
    /// A later lease or another executor has the task.
    LeaseSuperseded,
    /// The call needs an accepted lease.
    LeaseNotAccepted,
    /// The task is accepted and can no longer be declined.
    LeaseAccepted,
    /// The task is over.
    TaskAlreadyTerminal,
    /// The task was cancelled before it was accepted.
    TaskCancelled,
    /// The request cannot be read, or a field has a value that is not allowed.
    RequestInvalid,
    /// The hub cannot write its store now.
    StoreUnavailable,
    /// Too many requests.
    RateLimited,
    /// A code of a later version of the protocol.
    #[serde(other)]
    Other,
}

impl Code {
    /// Returns the HTTP status of the code.
    pub const fn status(self) -> u16 {
        match self {
            Self::ExecutorProtocolVersionRequired | Self::RequestInvalid => 400,
            Self::ExecutorAuthenticationFailed => 401,
            Self::ExecutorPoolForbidden | Self::InstancePoolMismatch => 403,
            Self::TaskNotFound => 404,
            Self::InstanceNameTaken
            | Self::LeaseExpired
            | Self::LeaseSuperseded
            | Self::LeaseNotAccepted
            | Self::LeaseAccepted
            | Self::TaskAlreadyTerminal
            | Self::TaskCancelled => 409,
            Self::InstanceUnknown => 410,
            Self::ExecutorProtocolVersionUnsupported => 426,
            Self::RateLimited => 429,
            Self::Other => 500,
            Self::ExecutorPoolPaused | Self::StoreUnavailable => 503,
        }
    }
}

/// The response to a request that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// A URN that contains the code.
    #[serde(rename = "type")]
    pub kind: String,
    /// What was wrong, for people. It never contains a secret.
    pub title: String,
    pub status: u16,
    pub code: Code,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_version: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_version: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_version: Option<u32>,
}

impl Problem {
    /// Returns a problem with the status of its code.
    pub fn new(code: Code, title: impl Into<String>) -> Self {
        let name = serde_json::to_value(code).ok();
        let name = name.as_ref().and_then(serde_json::Value::as_str);
        let name = name.unwrap_or_default().to_ascii_lowercase();
        Self {
            kind: format!("urn:terrakube:executor:error:{}", name.replace('_', "-")),
            title: title.into(),
            status: code.status(),
            code,
            requested_version: None,
            min_version: None,
            max_version: None,
        }
    }

    /// Adds the versions of the server and the version of the client.
    #[must_use]
    pub const fn with_versions(
        mut self,
        ours: RangeInclusive<u32>,
        requested: Option<u32>,
    ) -> Self {
        self.requested_version = requested;
        self.min_version = Some(*ours.start());
        self.max_version = Some(*ours.end());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.title)
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn type_status_and_code_of_a_problem_agree() {
        let problem = Problem::new(Code::LeaseSuperseded, "another pod has accepted the task");
        assert_eq!(
            serde_json::to_value(&problem).unwrap(),
            json!({
                "type": "urn:terrakube:executor:error:lease-superseded",
                "title": "another pod has accepted the task",
                "status": 409,
                "code": "LEASE_SUPERSEDED",
            })
        );
    }

    #[test]
    fn an_unknown_code_is_read_as_other() {
        let problem: Problem = serde_json::from_value(json!({
            "type": "urn:x", "title": "new", "status": 418, "code": "TEAPOT", "traceId": "1",
        }))
        .unwrap();
        assert_eq!((problem.code, problem.status), (Code::Other, 418));
    }
}
