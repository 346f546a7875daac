//! Decides whether the step of a run was started: yes, no, or unknown. Pure.
//!
//! The status of the executor's container and the events about a pod show whether that pod started the step. A run was
//! started if one of its pods started it. Deleted pods count too: the Job and its events show that they existed.

use job_contract::Exit;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::SignedDuration;
use serde::{Deserialize, Serialize};

use super::facts;

/// The Job controller creates the first pod within this time after the Job's start. A pod that was created later may be
/// a replacement.
const FIRST_POD: SignedDuration = SignedDuration::from_secs(10);

/// Whether something was started. In JSON: `true`, `false`, or `null` if it is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "Option<bool>", into = "Option<bool>")]
pub enum Started {
    /// It is proven that nothing was started.
    No,
    /// It is not known.
    Unknown,
    Yes,
}

impl From<Option<bool>> for Started {
    fn from(started: Option<bool>) -> Self {
        match started {
            Some(true) => Self::Yes,
            Some(false) => Self::No,
            None => Self::Unknown,
        }
    }
}

impl From<Started> for Option<bool> {
    fn from(started: Started) -> Self {
        match started {
            Started::Yes => Some(true),
            Started::No => Some(false),
            Started::Unknown => None,
        }
    }
}

/// Whether an executor with this exit may have started the step.
pub(super) const fn by_exit(exit: Exit) -> Started {
    match exit {
        // All of these come before the claim. With `Claimed`, another pod started the step, and this one did nothing.
        Exit::BadConfiguration | Exit::BadJobData | Exit::Infrastructure | Exit::Claimed => {
            Started::No
        }
        Exit::Done | Exit::StepFailed | Exit::Defect | Exit::Signal(_) => Started::Yes,
    }
}

/// Whether the executor of this pod started the step.
pub(super) fn of_pod(pod: &Pod, events: &[Event]) -> Started {
    let lost = Some(facts::STATUS_UNKNOWN);
    let failed_init = facts::failed_init(pod).filter(|(_, end)| end.reason.as_deref() != lost);
    if facts::node(pod).is_none() || failed_init.is_some() {
        return Started::No;
    }
    if facts::executor_state(pod).is_some_and(|state| state.running.is_some()) {
        return Started::Yes;
    }
    if let Some(end) = facts::executor_end(pod) {
        return if matches!(
            end.reason.as_deref(),
            Some("ContainerCannotRun" | "StartError")
        ) {
            Started::No
        } else if end.started_at.is_some() || end.reason.as_deref() != lost {
            Exit::from_code(end.exit_code).map_or(Started::Yes, by_exit)
        } else {
            // The kubelet reports this for a container that it lost, and for one that never existed.
            by_event(pod, events)
        };
    }
    let started = by_event(pod, events);
    if started == Started::Yes || !is_waiting(pod) && !is_refused(pod) {
        started
    } else {
        Started::No
    }
}

/// Whether the kubelet still has to start the executor.
fn is_waiting(pod: &Pod) -> bool {
    facts::phase(pod) == "Pending" && pod.metadata.deletion_timestamp.is_none()
}

/// Whether the kubelet refused the pod. Then the pod's status has no containers. A pod that was evicted or stopped has
/// their statuses.
fn is_refused(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let reason = status.and_then(|status| status.reason.as_deref());
    facts::phase(pod) == "Failed"
        && facts::all_statuses(pod).next().is_none()
        && reason.is_some_and(|reason| reason != "NodeLost")
}

/// The kubelet sends an event for each container that it starts. A missing event may be lost or too old.
fn by_event(pod: &Pod, events: &[Event]) -> Started {
    if facts::starts(events).any(|event| facts::is_about(event, pod)) {
        Started::Yes
    } else {
        Started::Unknown
    }
}

/// Whether a pod of this Job started the step.
pub(super) fn of_run(job: &Job, pods: &[Pod], events: &[Event]) -> Started {
    let seen = pods.iter().map(|pod| {
        // The pod that holds the claim started the step.
        let claimed = facts::exit_of(pod) == Some(Exit::Claimed);
        if claimed {
            Started::Yes
        } else {
            of_pod(pod, events)
        }
    });
    seen.max()
        .unwrap_or(Started::No)
        .max(by_unseen(job, pods, events))
}

/// Returns what a deleted pod may have done.
fn by_unseen(job: &Job, pods: &[Pod], events: &[Event]) -> Started {
    if facts::starts(events).any(|event| !pods.iter().any(|pod| facts::is_about(event, pod))) {
        return Started::Yes;
    }
    let is_seen = |name| pods.iter().any(|pod| facts::name(pod) == name);
    let unseen = facts::created_pods(events).any(|name| !is_seen(name));
    if unseen || facts::pods_counted(job) > pods.len() || replaced_another(job, pods, events) {
        Started::Unknown
    } else {
        Started::No
    }
}

/// Whether the first known pod was created so late that an earlier one may have existed.
fn replaced_another(job: &Job, pods: &[Pod], events: &[Event]) -> bool {
    let created = |pod: &Pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    let status = job.status.as_ref();
    let start = status.and_then(|status| status.start_time.as_ref());
    let first = pods.iter().filter_map(created).min();
    let refused = facts::last_event(events, &["FailedCreate"]).is_some();
    start
        .zip(first)
        .is_some_and(|(start, first)| first.duration_since(start.0) > FIRST_POD && !refused)
}

/// Returns the pod whose end is the end of the run. This is the newest pod, unless an earlier pod is more certain to
/// have started the step.
pub(crate) fn deciding_pod<'a>(pods: &'a [Pod], events: &[Event]) -> Option<&'a Pod> {
    let newest = facts::newest(pods)?;
    match most_certain_start(pods, events) {
        Some((pod, started)) if started > of_pod(newest, events) => Some(pod),
        _ => Some(newest),
    }
}

/// Returns the first of the pods that are most certain to have started the step.
pub(super) fn most_certain_start<'a>(
    pods: impl IntoIterator<Item = &'a Pod>,
    events: &[Event],
) -> Option<(&'a Pod, Started)> {
    // `max_by_key` returns the last of equal elements.
    facts::in_order(pods)
        .into_iter()
        .rev()
        .map(|pod| (pod, of_pod(pod, events)))
        .max_by_key(|(_, started)| *started)
}
