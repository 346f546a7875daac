//! Observes runs whose Job is not over.

use job_contract::Exit;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;

use super::evidence::Evidence;
use super::kind::VerdictKind;
use super::lost_node::overdue;
use super::model::{Observation, RunObjects, Timeouts, WaitReason};
use super::pending_pod::pending;
use super::pod_rejection::{PodRejection, pod_rejection};
use super::step_start::Started;
use super::wait::{WaitLimits, after, given_up, lacking, waiting};
use super::{facts, pod_end, run_end, step_start};

pub(super) fn unfinished(run: &RunObjects<'_>, now: Timestamp, timeouts: &Timeouts) -> Observation {
    let limits = WaitLimits { now, timeouts };
    let job = run.job;
    let Some(pod) = facts::newest(run.pods) else {
        return without_pod(run, &limits);
    };
    if facts::executor_state(pod).is_some_and(|state| state.running.is_some()) {
        return Observation::InProgress;
    }
    let disrupted = facts::is_disrupted(pod);
    if job.metadata.deletion_timestamp.is_some()
        || (pod.metadata.deletion_timestamp.is_some() && !disrupted)
    {
        return stopping(job, &limits);
    }
    match facts::phase(pod) {
        "Pending" | "Running" if disrupted && pod.metadata.deletion_timestamp.is_some() => {
            failed_pod(run, pod, &limits)
        }
        "Pending" => pending(run, pod, &limits),
        // The executor has ended. The Job's condition does not show it yet.
        "Running" => lingering(run, pod, &limits),
        "Succeeded" => Observation::InProgress,
        "Failed" => failed_pod(run, pod, &limits),
        _ => Observation::InProgress,
    }
}

fn stopping(job: &Job, limits: &WaitLimits<'_>) -> Observation {
    let since = job.metadata.deletion_timestamp.as_ref();
    waiting(
        WaitReason::Stopping,
        "being stopped",
        since.map_or(limits.now, |time| time.0),
        None,
    )
}

/// Returns the wait for a pod that Kubernetes stops at the deadline of its Job. Before Kubernetes 1.31, the Job has
/// already failed then. On a node that does not answer, the pod may never end.
pub(super) fn stopped_at_deadline(run: &RunObjects<'_>, now: Timestamp) -> Option<Observation> {
    let end = facts::terminal(run.job)?;
    let pod = facts::newest(run.pods)?;
    let is_at_work = facts::phase(pod) == "Running"
        && facts::executor_state(pod).is_some_and(|state| state.running.is_some());
    if end.reason.as_deref() != Some("DeadlineExceeded") || !is_at_work {
        return None;
    }
    let since = end.last_transition_time.as_ref()?.0;
    // Job and pods are watched separately, so the deletion of the pod may not be visible yet.
    let deletion = pod.metadata.deletion_timestamp.as_ref();
    let until = overdue(deletion.map_or(since, |time| time.0));
    let sentence = "being stopped at its deadline";
    (now < until).then(|| waiting(WaitReason::Stopping, sentence, since, Some(until)))
}

fn without_pod(run: &RunObjects<'_>, limits: &WaitLimits<'_>) -> Observation {
    let RunObjects { job, events, .. } = *run;
    if job.metadata.deletion_timestamp.is_some() {
        return stopping(job, limits);
    }
    if facts::is_suspended(job) {
        return queued(job, limits);
    }
    // Without a recorded release, the Job counts as just released.
    let since = facts::released(job).unwrap_or(limits.now);
    let rejection = facts::last_event(events, &["FailedCreate"])
        .and_then(|event| event.message.as_deref())
        .map(pod_rejection);
    match rejection {
        Some(PodRejection::Quota(text)) => {
            let sentence = format!("waiting for room in the namespace's quota: {text}");
            waiting(WaitReason::Quota, sentence, since, None)
        }
        // A replacement pod may take as long as the first one.
        None if facts::had_pod(job, events) => pod_gone(job, since),
        Some(PodRejection::MissingObject(text)) => {
            let sentence = format!("the pod cannot be created: {text}");
            lacking(sentence, since, vec![], run, limits)
        }
        Some(PodRejection::Admission(text)) => rejected(text, since, run, limits),
        None => no_pod(since, run, limits),
    }
}

fn queued(job: &Job, limits: &WaitLimits<'_>) -> Observation {
    let sentence = match facts::queue(job) {
        Some(queue) => format!("waiting to be admitted by the queue `{queue}`"),
        None => "waiting for its turn: as many runs as are allowed at once are at work".to_owned(),
    };
    let created = facts::created(job).unwrap_or(limits.now);
    waiting(WaitReason::Queued, sentence, created, None)
}

fn pod_gone(job: &Job, since: Timestamp) -> Observation {
    if facts::pods_active(job) > 0 {
        // Job and pods are watched separately. Either the pod is not visible yet, or its end is visible before the
        // Job's count of it.
        return waiting(WaitReason::Pod, "waiting for the pod", since, None);
    }
    let sentence = "the pod of this run is gone; Kubernetes makes another, or ends the Job";
    waiting(WaitReason::AnotherPod, sentence, since, None)
}

fn rejected(
    text: &str,
    since: Timestamp,
    run: &RunObjects<'_>,
    limits: &WaitLimits<'_>,
) -> Observation {
    let limit = limits.timeouts.no_pod;
    if limits.expired(since, limit) {
        let sentence = format!("the API server refuses the pod of this run: {text}");
        return given_up(VerdictKind::AdmissionRefused, sentence, vec![], run);
    }
    let sentence = format!("the API server refuses the pod: {text}");
    let until = Some(after(since, limit));
    waiting(WaitReason::Admission, sentence, since, until)
}

fn no_pod(since: Timestamp, run: &RunObjects<'_>, limits: &WaitLimits<'_>) -> Observation {
    let Timeouts {
        no_pod_explain,
        no_pod,
        ..
    } = *limits.timeouts;
    if limits.expired(since, no_pod) {
        let seconds = no_pod.as_secs();
        let sentence = format!("Kubernetes created no pod for this run within {seconds} s");
        return given_up(VerdictKind::Infrastructure, sentence, vec![], run);
    }
    if limits.expired(since, no_pod_explain) {
        let sentence = "Kubernetes has not created a pod for this run yet";
        let until = Some(after(since, no_pod));
        return waiting(WaitReason::NoPod, sentence, since, until);
    }
    let until = Some(after(since, no_pod_explain));
    waiting(WaitReason::Pod, "waiting for the pod", since, until)
}

/// Handles an executor that has ended in a pod that has not. The run is over, even if other containers still run. If
/// Kubernetes would replace the pod, these containers delay the replacement. After a timeout, the launcher stops the
/// Job.
fn lingering(run: &RunObjects<'_>, pod: &Pod, limits: &WaitLimits<'_>) -> Observation {
    if facts::executor_ended(pod).is_none() {
        return Observation::InProgress;
    }
    if !may_be_replaced(run, pod) {
        return Observation::Ended(Box::new(run_end::executor_ended(run)));
    }
    match lingers(pod, limits.timeouts) {
        None => failed_pod(run, pod, limits),
        Some((until, fact)) if limits.now < until => {
            let since = facts::executor_ended(pod).unwrap_or(limits.now);
            waiting(WaitReason::Stopping, fact.text, since, Some(until))
        }
        Some((_, fact)) => Observation::Ended(Box::new(run_end::cut_short(run, fact))),
    }
}

pub(super) fn lingers(pod: &Pod, timeouts: &Timeouts) -> Option<(Timestamp, Evidence)> {
    let ended = facts::executor_ended(pod)?;
    let others = facts::others_running(pod);
    let text = format!("the executor has ended, but {others} has not");
    (!others.is_empty()).then(|| (after(ended, timeouts.linger), Evidence::new("pod", text)))
}

/// Whether the Job controller may replace this pod, which has ended or is about to end. It does so if the executor
/// ended before the claim, or if a disruption killed it.
fn may_be_replaced(run: &RunObjects<'_>, pod: &Pod) -> bool {
    let code = facts::executor_end(pod).map(|end| end.exit_code);
    let again = match code {
        None => facts::is_disrupted(pod) || step_start::of_pod(pod, run.events) == Started::No,
        Some(pod_end::KILLED) => facts::is_disrupted(pod),
        Some(code) => code == i32::from(Exit::Infrastructure.code()),
    };
    again && facts::may_try_again(run.job)
}

/// The pod failed and the Job did not. Either the Job's condition follows, or another pod.
fn failed_pod(run: &RunObjects<'_>, pod: &Pod, limits: &WaitLimits<'_>) -> Observation {
    if !may_be_replaced(run, pod) {
        return Observation::InProgress;
    }
    let since = facts::executor_end(pod)
        .and_then(|end| end.finished_at.as_ref())
        .map_or(limits.now, |time| time.0);
    let end = pod_end::of_pod(pod, run.events).sentence;
    let sentence = format!("{end}; Kubernetes makes another attempt");
    waiting(WaitReason::AnotherPod, sentence, since, None)
}
