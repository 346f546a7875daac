//! Remembers that the cluster lets no run start, because a namespace or a right is missing.
//!
//! The cause may pass, for example while manifests are applied, so dispatches are delayed at first. But the platform
//! dispatches in one order for all organizations: a delayed dispatch holds up all others. So after a while runs are accepted
//! and fail with the reason (contract 3.6).

use std::sync::{Mutex, PoisonError};
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

/// What happens to dispatches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BarrierState {
    /// Runs can start.
    Open,
    /// Dispatches are delayed for this reason.
    Delays(String),
    /// Runs fail with this reason.
    Fails(String),
}

#[derive(Debug)]
struct Failure {
    since: Instant,
    by: CheckedBy,
    reason: String,
}

/// The barrier as this process sees it. Replicas do not share it.
#[derive(Debug)]
pub(super) struct Barrier {
    timeout: Duration,
    metrics: Metrics,
    failure: Mutex<Option<Failure>>,
}

impl Barrier {
    pub(super) const fn new(timeout: Duration, metrics: Metrics) -> Self {
        Self {
            timeout,
            metrics,
            failure: Mutex::new(None),
        }
    }

    /// Records a failure and returns the state.
    pub(super) fn record_failure(&self, by: CheckedBy, reason: &str) -> BarrierState {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
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
        state_of(failure.as_ref(), self.timeout)
    }

    /// Records a success. It ends the barrier if the failure came from the same check or a lesser one.
    pub(super) fn record_success(&self, by: CheckedBy) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.take_if(|known| known.by <= by).is_some() {
            info!("the cluster lets runs start again");
            self.metrics.barred(false);
        }
    }

    pub(super) fn state(&self) -> BarrierState {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        state_of(failure.as_ref(), self.timeout)
    }
}

fn state_of(failure: Option<&Failure>, timeout: Duration) -> BarrierState {
    match failure {
        None => BarrierState::Open,
        Some(failure) if failure.since.elapsed() < timeout => {
            BarrierState::Delays(failure.reason.clone())
        }
        Some(failure) => BarrierState::Fails(failure.reason.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_put_off_at_first_and_fail_when_it_lasts() {
        let metrics = Metrics::default().for_cluster();
        let young = Barrier::new(FAILURE_TIMEOUT, metrics.clone());
        assert_eq!(young.state(), BarrierState::Open);
        let reason = || "no right".to_owned();
        assert_eq!(
            young.record_failure(CheckedBy::Dispatch, "no right"),
            BarrierState::Delays(reason())
        );
        assert!(metrics.render(None).contains("mayfly_barred 1\n"));
        let old = Barrier::new(Duration::ZERO, Metrics::default());
        old.record_failure(CheckedBy::Probe, "no right");
        assert_eq!(old.state(), BarrierState::Fails(reason()));
    }

    #[test]
    fn a_successful_probe_does_not_clear_the_failure_of_a_dispatch() {
        let metrics = Metrics::default().for_cluster();
        let barrier = Barrier::new(FAILURE_TIMEOUT, metrics.clone());
        barrier.record_failure(CheckedBy::Dispatch, "no right to create Secrets");
        // A probe makes no Secret.
        barrier.record_success(CheckedBy::Probe);
        assert_ne!(barrier.state(), BarrierState::Open);
        barrier.record_success(CheckedBy::Dispatch);
        assert_eq!(barrier.state(), BarrierState::Open);
        assert!(metrics.render(None).contains("mayfly_barred 0\n"));
        barrier.record_failure(CheckedBy::Probe, "no namespace");
        barrier.record_success(CheckedBy::Probe);
        assert_eq!(barrier.state(), BarrierState::Open);
    }
}
