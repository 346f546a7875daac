//! Tracks failures that keep every run from starting: a missing namespace or a missing right.
//!
//! The failure may be temporary, for example while manifests are applied. So dispatches are delayed at first. The platform
//! dispatches in one order for all organizations, and a delayed dispatch delays all others. So after a timeout, runs are
//! accepted and fail with the reason (contract 3.6).

use std::sync::Mutex;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::metrics::Metrics;

/// How long dispatches are delayed. The platform dispatches again after 30 seconds.
pub(super) const FAILURE_TIMEOUT: Duration = Duration::from_secs(30);

/// What tried to use the cluster. A dispatch uses more rights than a probe, so a probe cannot show that a dispatch would
/// succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CheckedBy {
    Probe,
    Dispatch,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DispatchMode {
    /// Runs can start. The launcher accepts dispatches.
    Accept,
    /// Dispatches are delayed for this reason.
    Delay(String),
    /// Runs fail with this reason.
    Fail(String),
}

#[derive(Debug)]
struct Failure {
    since: Instant,
    by: CheckedBy,
    reason: String,
}

/// The failure that this process knows. Replicas do not share it.
#[derive(Debug)]
pub(super) struct StartFailureTracker {
    timeout: Duration,
    metrics: Metrics,
    failure: Mutex<Option<Failure>>,
}

impl StartFailureTracker {
    pub(super) const fn new(timeout: Duration, metrics: Metrics) -> Self {
        Self {
            timeout,
            metrics,
            failure: Mutex::new(None),
        }
    }

    /// Records a failure and returns the dispatch mode.
    pub(super) fn record_failure(&self, by: CheckedBy, reason: &str) -> DispatchMode {
        let mut failure = runtime::lock(&self.failure);
        if let Some(known) = &mut *failure {
            known.by = known.by.max(by);
            reason.clone_into(&mut known.reason);
        } else {
            warn!(
                reason,
                seconds = self.timeout.as_secs(),
                "the cluster lets no run start; if that lasts, runs are accepted and failed with this reason"
            );
            self.metrics.barred(true);
            *failure = Some(Failure {
                since: Instant::now(),
                by,
                reason: reason.to_owned(),
            });
        }
        mode_of(failure.as_ref(), self.timeout)
    }

    /// Records a success. It clears the failure if the same check or a weaker one recorded it.
    pub(super) fn record_success(&self, by: CheckedBy) {
        let mut failure = runtime::lock(&self.failure);
        if failure.take_if(|known| known.by <= by).is_some() {
            info!("the cluster lets runs start again");
            self.metrics.barred(false);
        }
    }

    pub(super) fn mode(&self) -> DispatchMode {
        let failure = runtime::lock(&self.failure);
        mode_of(failure.as_ref(), self.timeout)
    }
}

fn mode_of(failure: Option<&Failure>, timeout: Duration) -> DispatchMode {
    match failure {
        None => DispatchMode::Accept,
        Some(failure) if failure.since.elapsed() < timeout => {
            DispatchMode::Delay(failure.reason.clone())
        }
        Some(failure) => DispatchMode::Fail(failure.reason.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dispatches_are_delayed_at_first_and_runs_fail_after_the_timeout() {
        let metrics = Metrics::default().for_cluster();
        let young = StartFailureTracker::new(FAILURE_TIMEOUT, metrics.clone());
        assert_eq!(young.mode(), DispatchMode::Accept);
        let reason = || "no right".to_owned();
        assert_eq!(
            young.record_failure(CheckedBy::Dispatch, "no right"),
            DispatchMode::Delay(reason())
        );
        assert!(metrics.render().contains("mayfly_barred 1\n"));
        let old = StartFailureTracker::new(Duration::ZERO, Metrics::default());
        old.record_failure(CheckedBy::Probe, "no right");
        assert_eq!(old.mode(), DispatchMode::Fail(reason()));
    }

    #[test]
    fn a_successful_probe_does_not_clear_the_failure_of_a_dispatch() {
        let metrics = Metrics::default().for_cluster();
        let start_failures = StartFailureTracker::new(FAILURE_TIMEOUT, metrics.clone());
        start_failures.record_failure(CheckedBy::Dispatch, "no right to create Secrets");
        // A probe makes no Secret.
        start_failures.record_success(CheckedBy::Probe);
        assert_ne!(start_failures.mode(), DispatchMode::Accept);
        start_failures.record_success(CheckedBy::Dispatch);
        assert_eq!(start_failures.mode(), DispatchMode::Accept);
        assert!(metrics.render().contains("mayfly_barred 0\n"));
        start_failures.record_failure(CheckedBy::Probe, "no namespace");
        start_failures.record_success(CheckedBy::Probe);
        assert_eq!(start_failures.mode(), DispatchMode::Accept);
    }
}
