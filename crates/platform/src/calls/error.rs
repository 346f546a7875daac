//! Errors of calls to Terrakube's API, with their exit codes and the next step.

use std::time::Duration;

use job_contract::{Exit, env};
use pool_protocol::problem::Code;
use reqwest::StatusCode;

/// Why a call failed. Messages name a call by method and address, without token and content.
#[derive(Debug, thiserror::Error)]
pub enum TerrakubeError {
    /// The HTTP client cannot be set up, for example for a malformed proxy.
    #[error("could not set up the HTTP client")]
    Client(#[source] reqwest::Error),
    /// The platform sent no answer, or an incomplete one.
    #[error("no answer to `{call}`")]
    Transfer {
        call: String,
        /// The cause, without the address.
        #[source]
        source: reqwest::Error,
    },
    #[error("the platform refused `{call}` with {status}")]
    Refused { call: String, status: StatusCode },
    /// The job or record does not exist, or was deleted.
    #[error("the platform does not know what `{call}` asks for")]
    Gone { call: String },
    #[error("`{call}` was answered {status}{detail}")]
    Status {
        call: String,
        status: StatusCode,
        /// The error text of the answer, after a colon; may be empty.
        detail: String,
        retry_after: Option<Duration>,
    },
    #[error("the hub refused `{call}` with {status}: {detail}")]
    Hub {
        call: String,
        status: StatusCode,
        code: Code,
        detail: String,
        retry_after: Option<Duration>,
    },
    /// An answer that neither the hub nor the platform wrote, such as the page of a proxy.
    #[error(
        "`{call}` was answered with {status}, but neither by the hub nor by the platform: a proxy or gateway answers instead"
    )]
    Foreign {
        call: String,
        status: StatusCode,
        retry_after: Option<Duration>,
    },
    /// The answer is larger than any document of the platform should be.
    #[error("the answer to `{call}` is larger than {limit} bytes")]
    TooLarge { call: String, limit: usize },
    #[error("the answer to `{call}` is not the expected document")]
    Malformed {
        call: String,
        #[source]
        source: serde_json::Error,
    },
    /// The platform lists no steps for the job, also after several reads.
    #[error("the platform lists no steps of job {job_id}")]
    NoSteps { job_id: String },
    /// The deadline passed before one attempt ended.
    #[error("there was no time left for `{call}`")]
    OutOfTime { call: String },
    #[error("could not claim the step in the job context; the step was not started")]
    ClaimUncertain(#[source] Box<Self>),
    /// Another writer of the job context, or the platform itself, overwrote the claim.
    #[error("the claim on step {step_id} is missing in the job context after it was written")]
    ClaimOverwritten { step_id: String },
}

impl TerrakubeError {
    pub(crate) const fn foreign(
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

    /// The reason why this executor has lost the lease, if it has.
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

    /// Whether the hub does not know that the task was accepted. This happens after its store was restored.
    const fn is_unaccepted(&self) -> bool {
        matches!(
            self,
            Self::Hub {
                code: Code::LeaseNotAccepted,
                ..
            }
        )
    }

    /// Whether a retry may help.
    pub(crate) fn is_transient(&self) -> bool {
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

    /// Whether the same call may succeed a little later.
    pub(crate) fn may_pass(&self) -> bool {
        self.is_transient() || matches!(self, Self::OutOfTime { .. })
    }

    /// Whether the platform says that the job does not exist, or takes no more changes.
    pub(crate) const fn means_no_such_job(&self) -> bool {
        matches!(
            self,
            Self::Gone { .. }
                | Self::Status {
                    status: StatusCode::CONFLICT,
                    ..
                }
        )
    }

    /// Whether the platform would refuse the request again. A refused token does not count: the operator can correct the
    /// configuration.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Gone { .. } => true,
            Self::Status { status, .. } => status.is_client_error() && !self.is_transient(),
            _ => false,
        }
    }

    /// The pause that the platform asks for.
    pub(crate) const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. }
            | Self::Hub { retry_after, .. }
            | Self::Foreign { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// The exit code if the error prevents the start of a step.
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
            // The job was deleted, so a retry cannot help.
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
            | Self::ClaimUncertain(_)
            | Self::ClaimOverwritten { .. } => Exit::Infrastructure,
        }
    }

    /// The next step for the operator.
    pub fn hint(&self) -> Option<String> {
        let (api, secret, lease) = (env::API_URL, env::INTERNAL_SECRET, env::LEASE_URL);
        Some(match self {
            Self::Client(_) => "check the proxy variables".to_owned(),
            Self::Transfer { .. } | Self::OutOfTime { .. } => format!(
                "check that the address in `{api}` or `{lease}` is reachable from here; check the proxy variables and the network policy"
            ),
            Self::Foreign { .. } => format!(
                "check that the address in `{lease}` is the hub's, or that in `{api}` the platform's, and which proxy or gateway is before it"
            ),
            Self::Hub {
                status: StatusCode::UPGRADE_REQUIRED,
                ..
            } => "use an executor and a hub that speak a common version: those of one release do".to_owned(),
            Self::Refused {
                status: StatusCode::FORBIDDEN,
                ..
            } => format!(
                "the platform gives the token no such right: use a release of Mayfly that knows how this release of Terrakube \
                 reads tokens; check that `{secret}` is the platform's secret"
            ),
            Self::Refused { .. } => format!(
                "check that `{secret}` is the platform's secret, and that the clocks of both machines agree"
            ),
            Self::Gone { .. } => format!(
                "the job was deleted, or the address in `{api}` is not the platform's, or this release of Terrakube hides \
                 jobs from the tokens of this release of Mayfly"
            ),
            Self::NoSteps { .. } => format!(
                "start a new job: the platform has lost the steps of this job, or does not show them. If it shows those of no \
                 job, this release of Terrakube hides them from the tokens of this release of Mayfly: use a newer one; check \
                 that `{secret}` is the platform's secret"
            ),
            Self::Malformed { .. } => {
                format!("check that the address in `{api}` is the platform's API")
            }
            Self::ClaimUncertain(_) | Self::ClaimOverwritten { .. } => {
                "start the step again; if this pod is then named as its holder, start a new job. A working Redis avoids \
                 this error"
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
