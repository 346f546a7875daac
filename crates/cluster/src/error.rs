//! Classifies errors of the API server, and retries requests.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use kube::core::Status;
use tracing::debug;

use super::credential::CredentialError;
use super::{Cluster, RetryPolicy};

/// A request to the cluster that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// There was no response, or it could not be read.
    #[error("could not {action}: no answer from the Kubernetes API")]
    NoAnswer {
        action: &'static str,
        #[source]
        source: Box<kube::Error>,
    },
    /// The request was not sent, because there is no credential.
    #[error("could not {action}: no credential for the Kubernetes API")]
    Credential {
        action: &'static str,
        #[source]
        source: CredentialError,
    },
    /// The API server is too busy, broken, or out of quota.
    #[error("could not {action} now: {message}")]
    Busy {
        action: &'static str,
        message: String,
        retry_after: Option<Duration>,
    },
    /// The API server refuses the request. A retry does not help.
    #[error("could not {action}: {message}")]
    Refused {
        action: &'static str,
        message: String,
        code: u16,
        reason: String,
    },
    /// Another object has the name.
    #[error("the {kind} `{name}` exists and belongs to another run or owner")]
    NameTaken { kind: &'static str, name: String },
    /// A request cannot be made from what was given.
    #[error("the manifest has no {0}")]
    Incomplete(&'static str),
    /// No run matches this name.
    #[error("no run `{0}` in the cluster")]
    NoSuchRun(String),
    /// The objects changed repeatedly during the request.
    #[error("could not {action}: the objects of the run kept changing")]
    Unsettled { action: &'static str },
}

impl ClusterError {
    /// Whether the same request may succeed later.
    pub const fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::NoAnswer { .. }
                | Self::Credential { .. }
                | Self::Busy { .. }
                | Self::Unsettled { .. }
        )
    }

    /// Whether the cluster refuses this run, and would refuse it again.
    pub fn concerns_one_run(&self) -> bool {
        !self.is_transient() && !self.concerns_every_run()
    }

    /// Whether this error prevents every run: the launcher is not authorized, may not create the objects of runs, or
    /// its namespace is gone.
    pub fn concerns_every_run(&self) -> bool {
        match self {
            Self::Refused { code, message, .. } => match code {
                401 | 404 => true,
                // Admission refuses single objects with the same code. Only the message of a missing right contains
                // this word.
                403 => message.contains(" cannot "),
                _ => false,
            },
            _ => false,
        }
    }

    /// Whether a quota of the namespace has no room.
    pub fn is_quota(&self) -> bool {
        matches!(self, Self::Busy { message, .. } if message.contains("exceeded quota"))
    }

    /// Returns the `Retry-After` of the API server.
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { code: 404, .. })
    }

    pub(super) fn is_forbidden(&self) -> bool {
        matches!(self, Self::Refused { code: 403, .. })
    }

    pub(super) fn is_already_exists(&self) -> bool {
        matches!(self, Self::Refused { reason, .. } if reason == "AlreadyExists")
    }

    /// Whether a precondition failed: the object is another one, or has changed. A wrong `uid` is refused as invalid,
    /// because it is immutable.
    pub(super) fn is_conflict(&self) -> bool {
        matches!(
            self,
            Self::Refused {
                code: 409 | 422,
                ..
            }
        ) && !self.is_already_exists()
    }

    pub(super) fn from_kube(action: &'static str, error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::from_status(action, &status),
            error => match CredentialError::within(error) {
                Ok(source) => Self::Credential { action, source },
                Err(error) => Self::NoAnswer {
                    action,
                    source: Box::new(error),
                },
            },
        }
    }

    fn from_status(action: &'static str, status: &Status) -> Self {
        let code = status.code;
        let quota = code == 403 && status.message.contains("exceeded quota");
        let message = if status.message.is_empty() {
            format!("the API server answered {code}")
        } else {
            status.message.clone()
        };
        if code == 429 || code >= 500 || quota {
            let seconds = status
                .details
                .as_ref()
                .map_or(0, |details| details.retry_after_seconds);
            return Self::Busy {
                action,
                message,
                retry_after: (seconds > 0).then(|| Duration::from_secs(seconds.into())),
            };
        }
        Self::Refused {
            action,
            message,
            code,
            reason: status.reason.clone(),
        }
    }

    /// Whether a retry within the call can help. An exceeded quota lasts longer than a call.
    fn is_worth_a_retry(&self) -> bool {
        match self {
            Self::NoAnswer { .. } | Self::Credential { .. } => true,
            Self::Busy { .. } => !self.is_quota(),
            _ => false,
        }
    }
}

impl RetryPolicy {
    fn pauses(&self) -> ExponentialBackoff {
        let retries = usize::try_from(self.attempts.saturating_sub(1)).unwrap_or(usize::MAX);
        ExponentialBuilder::default()
            .with_min_delay(self.first_pause)
            .with_max_delay(self.longest_pause)
            .with_max_times(retries)
            .build()
    }

    /// Returns the pause before the next attempt. `None`: the caller gets the error.
    fn pause(&self, pauses: &mut ExponentialBackoff, error: &ClusterError) -> Option<Duration> {
        if !error.is_worth_a_retry() {
            return None;
        }
        let own = pauses.next()?;
        match error.retry_after() {
            Some(asked) if asked > self.longest_pause => None,
            Some(asked) => Some(asked.max(own)),
            None => Some(own),
        }
    }
}

impl Cluster {
    /// Sends a request. Retries it within the retry policy while the API server cannot respond.
    pub(super) async fn request_with_retries<T, F>(
        &self,
        action: &'static str,
        mut request: impl FnMut() -> F,
    ) -> Result<T, ClusterError>
    where
        F: Future<Output = Result<T, kube::Error>>,
    {
        let mut attempt = 1;
        let mut pauses = self.retry_policy.pauses();
        loop {
            let begun = Instant::now();
            let answer = request().await;
            let milliseconds = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
            let error = match answer {
                Ok(answer) => {
                    debug!(action, attempt, milliseconds, "asked the cluster");
                    return Ok(answer);
                }
                Err(error) => ClusterError::from_kube(action, error),
            };
            let pause = self.retry_policy.pause(&mut pauses, &error);
            debug!(action, attempt, milliseconds, %error, ?pause, "the cluster refused");
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => return Err(error),
            }
            attempt += 1;
        }
    }
}
