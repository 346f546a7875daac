//! What can go wrong between a program and Terrakube's API, whose fault that is, and what to do about it.

use std::time::Duration;

use job_contract::{Exit, env};
use pool_protocol::problem::Code;
use reqwest::StatusCode;

/// A call that did not succeed. Calls are named by method and address, never with a token or their content.
#[derive(Debug, thiserror::Error)]
pub enum TerrakubeError {
    /// The HTTP client cannot be set up, for example for a malformed proxy.
    #[error("could not set up the HTTP client")]
    Client(#[source] reqwest::Error),
    /// No answer, or one that breaks off.
    #[error("no answer to `{call}`")]
    Transfer {
        /// Method and address.
        call: String,
        /// Why; without the address.
        #[source]
        source: reqwest::Error,
    },
    /// The platform does not let us.
    #[error("the platform refused `{call}` with {status}")]
    Refused {
        /// Method and address.
        call: String,
        /// 401 or 403.
        status: StatusCode,
    },
    /// The job or record does not exist, or not any more.
    #[error("the platform does not know what `{call}` asks for")]
    Gone {
        /// Method and address.
        call: String,
    },
    /// Another answer than success.
    #[error("`{call}` was answered {status}{detail}")]
    Status {
        /// Method and address.
        call: String,
        /// The answer's status.
        status: StatusCode,
        /// What the answer says about it, after a colon; may be empty.
        detail: String,
        /// When to come back, where the answer says so.
        retry_after: Option<Duration>,
    },
    /// The hub that has given the lease on the step does not do it.
    #[error("the hub refused `{call}` with {status}: {detail}")]
    Hub {
        /// Method and address.
        call: String,
        /// The answer's status.
        status: StatusCode,
        /// By which programs tell refusals apart.
        code: Code,
        /// What the hub says about it.
        detail: String,
        /// When to come back, where the answer says so.
        retry_after: Option<Duration>,
    },
    /// An answer of something between: neither the hub's nor the platform's.
    #[error(
        "`{call}` was answered {status}, and not by the hub: something between answers in its place"
    )]
    Foreign {
        /// Method and address.
        call: String,
        /// The answer's status.
        status: StatusCode,
        /// When to come back, where the answer says so.
        retry_after: Option<Duration>,
    },
    /// More than any document of the platform should hold.
    #[error("the answer to `{call}` is larger than {limit} bytes")]
    TooLarge {
        /// Method and address.
        call: String,
        /// How much is read.
        limit: usize,
    },
    /// Not the document it should be.
    #[error("the answer to `{call}` cannot be understood")]
    Malformed {
        /// Method and address.
        call: String,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// A job of no steps, however often it is read.
    #[error("the platform names no step of job {job_id}")]
    NoSteps {
        /// The job.
        job_id: String,
    },
    /// The time for the call is over, and not even one attempt ended.
    #[error("there was no time left for `{call}`")]
    OutOfTime {
        /// Method and address.
        call: String,
    },
    /// It is not certain that the step is ours alone; it has not been begun.
    #[error("the step could not be claimed by a note in the job context, and is not begun")]
    Unclaimed(#[source] Box<Self>),
    /// Another writer of the job context, or the platform itself, overwrote what was written to it.
    #[error("the note that was written about step {step_id} is missing")]
    NoteLost {
        /// The step.
        step_id: String,
    },
}

impl TerrakubeError {
    pub(super) const fn foreign(
        call: String,
        status: StatusCode,
        retry_after: Option<Duration>,
    ) -> Self {
        Self::Foreign {
            call,
            status,
            retry_after,
        }
    }

    /// Why the lease is not this executor's any more, if it is not.
    pub(crate) fn lost_lease(&self) -> Option<String> {
        match self {
            Self::Hub {
                status: StatusCode::CONFLICT,
                detail,
                ..
            } if !self.is_unaccepted() => Some(detail.clone()),
            _ => None,
        }
    }

    /// Whether the hub does not know that the task was accepted, as one that was restored may not.
    pub(crate) const fn is_unaccepted(&self) -> bool {
        matches!(
            self,
            Self::Hub {
                code: Code::LeaseNotAccepted,
                ..
            }
        )
    }

    /// Whether trying again may help.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Transfer { .. } | Self::Foreign { .. } => true,
            // The next heartbeat says so.
            _ if self.is_unaccepted() => true,
            Self::Status { status, .. } | Self::Hub { status, .. } => {
                status.is_server_error()
                    || matches!(
                        *status,
                        StatusCode::TOO_MANY_REQUESTS
                            | StatusCode::REQUEST_TIMEOUT
                            | StatusCode::TOO_EARLY
                    )
            }
            _ => false,
        }
    }

    /// Whether it may not be so a little later.
    pub(super) fn may_pass(&self) -> bool {
        self.is_transient() || matches!(self, Self::OutOfTime { .. })
    }

    /// Whether the platform says that the job is gone, or takes nothing any more.
    pub(super) const fn means_no_such_job(&self) -> bool {
        matches!(
            self,
            Self::Gone { .. }
                | Self::Status {
                    status: StatusCode::CONFLICT,
                    ..
                }
        )
    }

    /// Whether the platform refuses the request, and would refuse it again. A refused token does not count: that is an
    /// error of the configuration, which the operator corrects.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Gone { .. } => true,
            Self::Status { status, .. } => status.is_client_error() && !self.is_transient(),
            _ => false,
        }
    }

    /// When the platform asks us to come back.
    pub(crate) const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. }
            | Self::Hub { retry_after, .. }
            | Self::Foreign { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// The exit code when this keeps a step from being started.
    pub const fn exit(&self) -> Exit {
        match self {
            Self::Refused { .. }
            | Self::Hub {
                status: StatusCode::UPGRADE_REQUIRED,
                ..
            } => Exit::BadConfiguration,
            Self::Hub {
                status: StatusCode::CONFLICT,
                ..
            } => Exit::Claimed,
            // The job of the step was deleted, and another attempt does not bring it back.
            Self::Gone { .. } => Exit::StepFailed,
            Self::Client(_)
            | Self::Transfer { .. }
            | Self::Status { .. }
            | Self::Hub { .. }
            | Self::Foreign { .. }
            | Self::TooLarge { .. }
            | Self::Malformed { .. }
            | Self::NoSteps { .. }
            | Self::OutOfTime { .. }
            | Self::Unclaimed(_)
            | Self::NoteLost { .. } => Exit::Infrastructure,
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        let (api, secret, lease) = (env::API_URL, env::INTERNAL_SECRET, env::LEASE_URL);
        Some(match self {
            Self::Client(_) => "check the proxy variables".to_owned(),
            Self::Transfer { .. } | Self::OutOfTime { .. } => format!(
                "check that the address in `{api}` or `{lease}` is reachable from here, and the proxy variables and network policy"
            ),
            Self::Foreign { .. } => format!(
                "check that the address in `{lease}` is the hub's, and which proxy or gateway is before it"
            ),
            Self::Hub {
                status: StatusCode::UPGRADE_REQUIRED,
                ..
            } => "use an executor and a hub that speak a common version: those of one release do".to_owned(),
            Self::Refused { .. } => format!(
                "check that `{secret}` is the platform's secret, and that the clocks of both machines agree"
            ),
            Self::Gone { .. } => {
                format!("the job was deleted, or the address in `{api}` is not the platform's")
            }
            Self::NoSteps { .. } => {
                "start a new job: the platform has lost this one's steps, or does not show them"
                    .to_owned()
            }
            Self::Malformed { .. } => {
                format!("check that the address in `{api}` is the platform's API")
            }
            Self::Unclaimed(_) | Self::NoteLost { .. } => {
                "the step may be started again; if it is said to be taken by this pod then, start a new job. With a Redis \
                 that answers, no note is needed"
                    .to_owned()
            }
            Self::Status { .. } | Self::Hub { .. } | Self::TooLarge { .. } => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_final_unless_it_is_for_now_or_a_fault_of_the_configuration() {
        let call = || "PATCH http://api/job/1".to_owned();
        let is_final = |status: StatusCode| {
            let error = TerrakubeError::Status {
                call: call(),
                status,
                detail: String::new(),
                retry_after: None,
            };
            error.is_final()
        };
        for status in [400, 405, 409, 422] {
            assert!(is_final(StatusCode::from_u16(status).unwrap()), "{status}");
        }
        for status in [302, 408, 425, 429, 500, 502, 503, 504] {
            assert!(!is_final(StatusCode::from_u16(status).unwrap()), "{status}");
        }
        assert!(TerrakubeError::Gone { call: call() }.is_final());
        let status = StatusCode::UNAUTHORIZED;
        let refused = TerrakubeError::Refused {
            call: call(),
            status,
        };
        assert!(!refused.is_final());
    }
}
