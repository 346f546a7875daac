//! Time limits of waiting runs, and what follows when they expire.

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::evidence::Evidence;
use super::kind::VerdictKind;
use super::model::{Observation, RunObjects, Timeouts, Wait, WaitReason};
use super::run_end;

pub(super) struct WaitLimits<'a> {
    pub(super) now: Timestamp,
    pub(super) timeouts: &'a Timeouts,
}

impl WaitLimits<'_> {
    pub(super) fn expired(&self, since: Timestamp, limit: Duration) -> bool {
        self.now >= after(since, limit)
    }
}

pub(super) fn after(since: Timestamp, limit: Duration) -> Timestamp {
    SignedDuration::try_from(limit)
        .ok()
        .and_then(|limit| since.checked_add(limit).ok())
        .unwrap_or(Timestamp::MAX)
}

pub(super) fn waiting(
    reason: WaitReason,
    sentence: impl Into<String>,
    since: Timestamp,
    until: Option<Timestamp>,
) -> Observation {
    Observation::Waiting(Wait {
        reason,
        sentence: sentence.into(),
        since,
        until,
    })
}

/// Builds the verdict on a run for which Kubernetes would still wait.
pub(super) fn given_up(
    kind: VerdictKind,
    sentence: String,
    evidence: Vec<Evidence>,
    run: &RunObjects<'_>,
) -> Observation {
    Observation::Ended(Box::new(run_end::given_up(kind, sentence, evidence, run)))
}

/// Handles a run whose pod names a missing object.
pub(super) fn lacking(
    sentence: String,
    since: Timestamp,
    evidence: Vec<Evidence>,
    run: &RunObjects<'_>,
    limits: &WaitLimits<'_>,
) -> Observation {
    let limit = limits.timeouts.container_error;
    if limits.expired(since, limit) {
        given_up(VerdictKind::ConfigMissing, sentence, evidence, run)
    } else {
        waiting(
            WaitReason::Config,
            sentence,
            since,
            Some(after(since, limit)),
        )
    }
}
