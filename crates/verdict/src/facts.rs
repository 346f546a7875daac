//! Reads single facts from Jobs, pods and events, without conclusions.

use job_contract::annotations::{QUEUE, RELEASED_AT, STORED_AT};
use job_contract::labels;
use job_contract::report::FinalReport;
use job_contract::{Exit, StepType};
use k8s_openapi::api::batch::v1::{Job, JobCondition};
use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateTerminated, ContainerStatus, Event, Pod, PodCondition,
};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::evidence::Evidence;

/// The container that runs the step.
pub const EXECUTOR: &str = "executor";

/// The reason in the status of a container that the kubelet does not know any more.
pub const STATUS_UNKNOWN: &str = "ContainerStatusUnknown";

/// The largest number of events in a verdict.
const LAST_EVENTS: usize = 3;

/// The condition that ends the Job, if it has ended.
pub fn terminal(job: &Job) -> Option<&JobCondition> {
    job.status
        .as_ref()?
        .conditions
        .as_ref()?
        .iter()
        .find(|c| matches!(c.type_.as_str(), "Complete" | "Failed") && c.status == "True")
}

/// Returns the pod whose failure failed the Job, and its executor's exit code. They are in the message of the Job's
/// condition: `Container executor for pod runs/x failed with exit code 143 matching FailJob rule at index 0`, or `Pod
/// runs/x has condition DisruptionTarget matching ...`.
pub fn failure_of_pod(job: &Job) -> Option<(&str, Option<i32>)> {
    let message = terminal(job)?.message.as_deref()?;
    let (name, rest) = ["for pod ", "Pod "].into_iter().find_map(|before| {
        let (_, rest) = message.split_once(before)?;
        let (pod, rest) = rest.split_once(' ')?;
        Some((pod.split_once('/')?.1, rest))
    })?;
    let code = rest
        .strip_prefix("failed with exit code ")
        .and_then(|rest| rest.split(' ').next()?.parse().ok());
    Some((name, code))
}

/// Returns how many pods the Job's status counts. It does not count pods that a disruption ended.
pub(super) fn pods_counted(job: &Job) -> usize {
    let Some(status) = &job.status else { return 0 };
    let count = |count: Option<i32>| usize::try_from(count.unwrap_or(0)).unwrap_or(0);
    let ended = count(status.failed) + count(status.succeeded);
    // The controller lists a pod here until it has counted it.
    let uncounted = status.uncounted_terminated_pods.as_ref().map_or(0, |pods| {
        let listed = [&pods.failed, &pods.succeeded];
        listed.into_iter().flatten().map(Vec::len).sum()
    });
    pods_active(job) + count(status.terminating) + ended.max(uncounted)
}

/// Returns how many pods that have not ended the Job's status counts.
pub(super) fn pods_active(job: &Job) -> usize {
    let active = job.status.as_ref().and_then(|status| status.active);
    usize::try_from(active.unwrap_or(0)).unwrap_or(0)
}

/// The names of the pods that the Job controller says it created.
pub fn created_pods(events: &[Event]) -> impl Iterator<Item = &str> {
    events
        .iter()
        .filter(|event| event.reason.as_deref() == Some("SuccessfulCreate"))
        .filter_map(|event| event.message.as_deref()?.strip_prefix("Created pod: "))
        .map(str::trim)
}

/// Whether the Job has had a pod, according to the Job and to events about it.
pub(super) fn had_pod(job: &Job, events: &[Event]) -> bool {
    pods_counted(job) > 0 || created_pods(events).next().is_some()
}

/// Whether the Job controller may replace a failed pod.
pub(super) fn may_try_again(job: &Job) -> bool {
    let limit = job.spec.as_ref().and_then(|spec| spec.backoff_limit);
    limit != Some(0)
}

pub fn is_suspended(job: &Job) -> bool {
    job.spec.as_ref().and_then(|spec| spec.suspend) == Some(true)
}

/// Returns the queue of the cluster that the Job waits for, also if it has not entered it yet.
pub(super) fn queue(job: &Job) -> Option<&String> {
    let meta = &job.metadata;
    let awaited = meta.annotations.as_ref().and_then(|all| all.get(QUEUE));
    awaited.or_else(|| meta.labels.as_ref()?.get(labels::KUEUE_QUEUE))
}

/// Whether a queue of the cluster releases the Job, and not the launcher.
pub fn is_queued_by_cluster(job: &Job) -> bool {
    let names = job.metadata.labels.as_ref();
    names.is_some_and(|names| names.contains_key(labels::KUEUE_QUEUE))
}

pub(super) fn created(job: &Job) -> Option<Timestamp> {
    job.metadata.creation_timestamp.as_ref().map(|time| time.0)
}

/// The platform delivers a run again after this time, if the delivery got no answer.
const REDELIVERY: SignedDuration = SignedDuration::from_secs(30);

/// Returns when the Secret of a Job should be there, if a queue of the cluster releases the Job. The queue may start it before the
/// Secret is stored. If the launcher is killed then, the next delivery stores the Secret and writes down when.
pub(super) fn job_data_due(job: &Job) -> Option<Timestamp> {
    if !is_queued_by_cluster(job) {
        return None;
    }
    let stored = time_noted(job, STORED_AT);
    stored.or_else(|| created(job)?.checked_add(REDELIVERY).ok())
}

fn time_noted(job: &Job, annotation: &str) -> Option<Timestamp> {
    let annotations = job.metadata.annotations.as_ref()?;
    annotations.get(annotation)?.parse().ok()
}

/// Returns when the Job was last released. The launcher writes it down; a queue of the cluster does not. The Job
/// controller sets the start time only when it handles the Job, and sets it again after each suspension.
pub fn released(job: &Job) -> Option<Timestamp> {
    let noted = time_noted(job, RELEASED_AT);
    let status = job.status.as_ref();
    let started = status.and_then(|status| status.start_time.as_ref());
    noted.max(started.map(|time| time.0))
}

/// Returns the pod of the Job that was created last.
pub fn newest(pods: &[Pod]) -> Option<&Pod> {
    in_order(pods).pop()
}

/// Returns the pods in the order of their creation.
pub fn in_order<'a>(pods: impl IntoIterator<Item = &'a Pod>) -> Vec<&'a Pod> {
    let mut pods: Vec<&Pod> = pods.into_iter().collect();
    // Creation times are in whole seconds. Within one second, a failed pod was created before its replacement, because
    // the replacement is created after the failure (`podReplacementPolicy: Failed`).
    pods.sort_by_key(|pod| {
        let status = pod.status.as_ref();
        let failed = status.and_then(|status| status.phase.as_deref()) == Some("Failed");
        (
            pod.metadata.creation_timestamp.as_ref().map(|time| time.0),
            !failed,
            status
                .and_then(|status| status.start_time.as_ref())
                .map(|time| time.0),
            pod.metadata.name.as_deref(),
        )
    });
    pods
}

pub(super) fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or("?")
}

pub(super) fn node(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

pub(super) fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Pending")
}

pub(super) fn condition<'a>(pod: &'a Pod, type_: &str) -> Option<&'a PodCondition> {
    pod.status
        .as_ref()?
        .conditions
        .as_ref()?
        .iter()
        .find(|condition| condition.type_ == type_)
}

/// Whether the cluster, not the executor, ended the pod or is about to end it.
pub(super) fn is_disrupted(pod: &Pod) -> bool {
    condition(pod, "DisruptionTarget").is_some_and(|condition| condition.status == "True")
}

/// When a condition of the pod became true.
pub fn condition_time(pod: &Pod, type_: &str) -> Option<Timestamp> {
    let condition = condition(pod, type_).filter(|condition| condition.status == "True")?;
    condition.last_transition_time.as_ref().map(|time| time.0)
}

/// Statuses of the init containers whose end matters. A native sidecar is stopped after the other containers, so its
/// exit code means nothing.
pub(super) fn init_statuses(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    let sidecars: Vec<&str> = pod
        .spec
        .iter()
        .flat_map(|spec| spec.init_containers.iter().flatten())
        .filter(|container| container.restart_policy.as_deref() == Some("Always"))
        .map(|container| container.name.as_str())
        .collect();
    pod.status
        .iter()
        .flat_map(|status| status.init_container_statuses.iter().flatten())
        .filter(move |status| !sidecars.contains(&status.name.as_str()))
}

/// Statuses of all containers, with init containers and sidecars. Each of them can prevent the start of the pod.
pub(super) fn all_statuses(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    pod.status.iter().flat_map(|status| {
        status
            .init_container_statuses
            .iter()
            .flatten()
            .chain(status.container_statuses.iter().flatten())
    })
}

fn executor_status(pod: &Pod) -> Option<&ContainerStatus> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses
        .iter()
        .find(|status| status.name == EXECUTOR)
        .or_else(|| statuses.first().filter(|_| statuses.len() == 1))
}

/// State of the executor's container.
pub fn executor_state(pod: &Pod) -> Option<&ContainerState> {
    executor_status(pod)?.state.as_ref()
}

/// Returns how the executor's container ended. After a restart of the node, this may be in the last state.
pub(super) fn executor_end(pod: &Pod) -> Option<&ContainerStateTerminated> {
    let status = executor_status(pod)?;
    [&status.state, &status.last_state]
        .into_iter()
        .find_map(|state| state.as_ref()?.terminated.as_ref())
}

/// Whether a pod has ended, or is about to end.
pub(crate) fn has_ended(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
        || executor_end(pod).is_some()
        || pod.metadata.deletion_timestamp.is_some()
}

/// Whether the deletion of the pod was requested before its executor ended. Then the deletion may have ended it. The
/// time of a deletion is the time at which it must be complete.
pub(super) fn was_deleted_before_its_end(pod: &Pod) -> bool {
    let meta = &pod.metadata;
    let Some(deletion) = &meta.deletion_timestamp else {
        return false;
    };
    // When the kubelet confirms the end of a pod, the API server replaces the deletion time with the time of the end.
    // If the executor was stopped by a signal then, the deletion stopped it.
    let is_confirmed = meta.deletion_grace_period_seconds == Some(0);
    if is_confirmed && matches!(exit_of(pod), Some(Exit::Signal(_))) {
        return true;
    }
    let grace = SignedDuration::from_secs(meta.deletion_grace_period_seconds.unwrap_or(0));
    let asked = deletion.0.checked_sub(grace).unwrap_or(deletion.0);
    let end = executor_end(pod).and_then(|end| end.finished_at.as_ref());
    end.is_none_or(|end| asked <= end.0)
}

/// Returns the exit of the executor's container, if its code is one of the executor's.
pub(super) fn exit_of(pod: &Pod) -> Option<Exit> {
    Exit::from_code(executor_end(pod)?.exit_code)
}

/// Returns the kubelet's events about the start of an executor. An event names the container by a path in the pod. An
/// event without a path may be about any container.
pub(super) fn starts(events: &[Event]) -> impl Iterator<Item = &Event> {
    events.iter().filter(|event| {
        let path = event.involved_object.field_path.as_deref();
        event.reason.as_deref() == Some("Started")
            && path.is_none_or(|path| path == "spec.containers{executor}")
    })
}

/// Returns the init container whose failure prevented the start of the executor, and its end.
pub(super) fn failed_init(pod: &Pod) -> Option<(&str, &ContainerStateTerminated)> {
    init_statuses(pod).find_map(|status| {
        let end = status.state.as_ref()?.terminated.as_ref()?;
        (end.exit_code != 0).then_some((status.name.as_str(), end))
    })
}

/// Returns the names of the containers beside the executor that still run. Native sidecars are left out, because the
/// kubelet ends them.
pub(super) fn others_running(pod: &Pod) -> String {
    let statuses = pod.status.iter();
    let others = statuses
        .flat_map(|status| status.container_statuses.iter().flatten())
        .filter(|status| status.name != EXECUTOR)
        .filter(|status| {
            let state = status.state.as_ref();
            state.is_some_and(|state| state.running.is_some())
        })
        .map(|status| format!("container `{}`", status.name));
    others.collect::<Vec<_>>().join(" and ")
}

/// When the executor's container started.
pub fn executor_started(pod: &Pod) -> Option<Timestamp> {
    let state = executor_state(pod)?;
    let running = state.running.as_ref().map(|running| &running.started_at);
    let ended = state.terminated.as_ref().map(|end| &end.started_at);
    Some(running.or(ended)?.as_ref()?.0)
}

/// When the executor's container ended.
pub fn executor_ended(pod: &Pod) -> Option<Timestamp> {
    Some(executor_end(pod)?.finished_at.as_ref()?.0)
}

/// The prefix of a report without proof that the executor wrote it. No report begins with it.
pub const UNPROVEN: &str = "not proven: ";

/// The largest part of such a report that is shown.
const MAX_UNPROVEN_CHARS: usize = 200;

/// Returns what such a report contains, for a person.
pub(super) fn unproven(pod: &Pod) -> Option<Evidence> {
    let message = executor_end(pod)?.message.as_deref()?;
    let report: FinalReport =
        serde_json::from_str(message.strip_prefix(UNPROVEN)?).unwrap_or_default();
    // Programs of the run may have written it. A line break would let it imitate Mayfly's lines.
    let said = report.error.map_or_else(String::new, |error| {
        let plain = error.chars().filter(|c| !c.is_control());
        format!(": {}", plain.take(MAX_UNPROVEN_CHARS).collect::<String>())
    });
    Some(Evidence::new(
        "termination message",
        format!("the pod left a message that could not be verified{said}"),
    ))
}

/// Returns the report that the executor left as its termination message.
pub fn final_report(pod: &Pod) -> Option<FinalReport> {
    let message = executor_end(pod)?.message.as_deref()?;
    // Every field of a report has a default. So only an object with an outcome is a report.
    let value: serde_json::Value = serde_json::from_str(message.trim()).ok()?;
    value.get("outcome")?.as_u64()?;
    serde_json::from_value(value).ok()
}

/// Returns the memory limit of the executor's container, as the specification spells it.
pub(super) fn memory_limit(pod: &Pod) -> Option<&str> {
    let containers = &pod.spec.as_ref()?.containers;
    let executor = containers
        .iter()
        .find(|container| container.name == EXECUTOR)
        .or_else(|| containers.first())?;
    let limits = executor.resources.as_ref()?.limits.as_ref()?;
    limits.get("memory").map(|quantity| quantity.0.as_str())
}

/// Returns when an event was last seen.
pub fn seen(event: &Event) -> Option<Timestamp> {
    let series = event
        .series
        .as_ref()
        .and_then(|series| series.last_observed_time.as_ref());
    series
        .map(|time| time.0)
        .or_else(|| event.last_timestamp.as_ref().map(|time| time.0))
        .or_else(|| event.event_time.as_ref().map(|time| time.0))
        .or_else(|| {
            event
                .metadata
                .creation_timestamp
                .as_ref()
                .map(|time| time.0)
        })
}

/// Returns when an event was first seen.
pub(super) fn first_seen(event: &Event) -> Option<Timestamp> {
    event
        .first_timestamp
        .as_ref()
        .map(|time| time.0)
        .or_else(|| event.event_time.as_ref().map(|time| time.0))
        .or_else(|| seen(event))
}

/// Whether an event is about this pod. A Job that is tried again has several pods.
pub fn is_about(event: &Event, pod: &Pod) -> bool {
    let uid = event.involved_object.uid.as_ref();
    uid.is_none_or(|uid| pod.metadata.uid.as_ref() == Some(uid))
}

/// The last event with one of these reasons.
pub(super) fn last_event<'a>(
    events: impl IntoIterator<Item = &'a Event>,
    reasons: &[&str],
) -> Option<&'a Event> {
    events
        .into_iter()
        .filter(|event| {
            event
                .reason
                .as_deref()
                .is_some_and(|reason| reasons.contains(&reason))
        })
        .max_by_key(|event| seen(event))
}

/// Returns the last warnings, newest first, without repetitions.
pub(super) fn warnings(events: &[Event]) -> Vec<Evidence> {
    let mut warnings: Vec<&Event> = events
        .iter()
        .filter(|event| event.type_.as_deref() == Some("Warning"))
        .collect();
    warnings.sort_by_key(|event| std::cmp::Reverse(seen(event)));
    let mut evidence: Vec<Evidence> = Vec::new();
    for event in warnings {
        let fact = Evidence::new(
            format!("event {}", event.reason.as_deref().unwrap_or("?")),
            event.message.as_deref().unwrap_or_default().trim(),
        );
        if evidence.len() < LAST_EVENTS && !evidence.contains(&fact) {
            evidence.push(fact);
        }
    }
    evidence
}

/// Whether the step of a Job may change something. A plan changes nothing. For an unknown type the answer is not known.
pub(crate) fn may_change(job: &Job) -> bool {
    let labels = job.metadata.labels.as_ref();
    let step_type = labels
        .and_then(|labels| labels.get(labels::STEP_TYPE))
        .and_then(|value| labels::step_type(value));
    !matches!(step_type, Some(StepType::Plan | StepType::PlanDestroy))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_latest_of_release_and_start_counts() {
        let released = |noted: Value, started: Value| {
            let job = json!({
                "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z",
                    "annotations": {"mayfly.dev/released-at": noted}},
                "status": {"startTime": started}});
            let job: Job = serde_json::from_value(job).unwrap();
            super::released(&job).map(|time| time.to_string())
        };
        let (early, late) = ("2026-01-01T01:00:00Z", "2026-01-01T02:00:00Z");
        for (noted, started, counts) in [
            (json!(early), Value::Null, Some(early)),
            (json!(late), json!(early), Some(late)),
            (json!(early), json!(late), Some(late)),
            (json!("soon"), json!(early), Some(early)),
            (json!("soon"), Value::Null, None),
        ] {
            assert_eq!(
                released(noted.clone(), started).as_deref(),
                counts,
                "{noted}"
            );
        }
    }
}
