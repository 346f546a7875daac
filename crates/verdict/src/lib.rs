//! Determines how a run ended, from its Job, its pods and their events alone. Pure: no client, no clock.
//!
//! A Job is over when its condition `Complete` or `Failed` is true, not before. `SuccessCriteriaMet` and
//! `FailureTarget` only announce it. If the executor left its final report as the termination message, that report is
//! the verdict. All other code here is for runs without such a report.
//!
//! The files, from the bottom:
//! - [`facts`] reads the objects.
//! - [`step_start`] decides whether the step started.
//! - [`pod_end`] decides how one pod ended, and [`run_end`] how the run ended.
//! - [`advice`] adds what to do.
//! - [`pending_pod`] and [`unfinished`] are for runs that are not over.

mod advice;
mod evidence;
mod facts;
mod kind;
mod lock;
mod lost_node;
mod model;
mod pending_pod;
mod pod_end;
mod pod_rejection;
mod report_evidence;
mod run_end;
mod step_start;
mod unfinished;
mod wait;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;

use self::model::RunObjects;

pub use evidence::Evidence;
pub use facts::{
    EXECUTOR, STATUS_UNKNOWN, UNPROVEN, condition_time, created_pods, executor_ended,
    executor_started, executor_state, failure_of_pod, final_report, in_order, is_about,
    is_queued_by_cluster, is_suspended, newest, released, seen, terminal,
};
pub use kind::VerdictKind;
pub use lock::LockHolder;
pub use lost_node::{Suspect, suspect};
pub use model::{Observation, Timeouts, Verdict, Wait, WaitReason};
pub use step_start::Started;

/// Observes a run at `now`.
///
/// `pods` are the pods of this Job, in any order. `events` are about the Job and its pods. Without events, sentences
/// are less exact, and quota cannot be distinguished from admission.
pub fn observe(
    job: &Job,
    pods: &[Pod],
    events: &[Event],
    now: Timestamp,
    timeouts: &Timeouts,
) -> Observation {
    let run = RunObjects { job, pods, events };
    if terminal(job).is_some() {
        let stopping = unfinished::stopped_at_deadline(&run, now);
        return stopping.unwrap_or_else(|| Observation::Ended(Box::new(run_end::ended(&run))));
    }
    unfinished::unfinished(&run, now, timeouts)
}

/// Returns a container that still runs in the pod of an ended executor, and until when it may run. Some service meshes
/// leave one. The kubelet does not end it. Without a stop, the Job would run until its deadline.
pub fn lingers(pods: &[Pod], timeouts: &Timeouts) -> Option<(Timestamp, Evidence)> {
    unfinished::lingers(facts::newest(pods)?, timeouts)
}

/// Returns the verdict on a run whose Job is gone, from its last known objects.
pub fn gone(job: &Job, pods: &[Pod], events: &[Event]) -> Verdict {
    run_end::gone(&RunObjects { job, pods, events })
}

/// Returns how this pod ended, in one sentence. `None`: it has not ended.
pub fn end_of_pod(pod: &Pod, events: &[Event]) -> Option<String> {
    facts::has_ended(pod).then(|| pod_end::of_pod(pod, events).sentence)
}

/// Whether this pod started the step.
pub fn started_by(pod: &Pod, events: &[Event]) -> Started {
    step_start::of_pod(pod, events)
}

/// Returns the pods that the Job controller created and that are gone, and whether events show that they started the
/// step. Events can be missing.
pub fn gone_pods<'a>(
    pods: &'a [Pod],
    events: &'a [Event],
) -> impl Iterator<Item = (&'a str, Started)> {
    let is_seen = |name: &str| pods.iter().any(|pod| facts::name(pod) == name);
    created_pods(events)
        .filter(move |name| !is_seen(name))
        .map(|name| {
            let of = |event: &Event| event.involved_object.name.as_deref() == Some(name);
            let started = facts::starts(events).any(of);
            (
                name,
                if started {
                    Started::Yes
                } else {
                    Started::Unknown
                },
            )
        })
}

/// Returns the verdict on a run of which only events are left. `job` contains what they show about it.
pub fn from_events(job: &Job, events: &[Event]) -> Verdict {
    let pods = &[];
    run_end::from_events(&RunObjects { job, pods, events })
}

/// Whether events would add to this observation.
pub fn wants_events(observation: &Observation) -> bool {
    match observation {
        Observation::Waiting(wait) => {
            !matches!(wait.reason, WaitReason::Queued | WaitReason::Stopping)
        }
        Observation::InProgress => false,
        Observation::Ended(verdict) => {
            !verdict.executor_reported() && verdict.kind != VerdictKind::Completed
        }
    }
}

#[cfg(test)]
mod tests;
