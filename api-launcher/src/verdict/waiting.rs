//! Runs that are not over: what they wait for, for how long, and when there is no hope left.

use std::time::Duration;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ContainerStateWaiting, Event, Pod};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::cluster::labels;

use super::{
    Evidence, Observation, Timeouts, Verdict, VerdictKind, Wait, WaitReason, ending, facts,
};

/// SIGKILL, as an exit code.
const KILLED: i32 = 137;

pub(super) fn unfinished(
    job: &Job,
    pods: &[Pod],
    events: &[Event],
    now: Timestamp,
    timeouts: &Timeouts,
) -> Observation {
    let clock = Clock { now, timeouts };
    let Some(pod) = facts::newest(pods) else {
        return without_pod(job, events, &clock);
    };
    if facts::executor_state(pod).is_some_and(|state| state.running.is_some()) {
        return Observation::Running;
    }
    let disrupted = facts::is_disrupted(pod);
    if job.metadata.deletion_timestamp.is_some()
        || (pod.metadata.deletion_timestamp.is_some() && !disrupted)
    {
        return stopping(job, &clock);
    }
    match facts::phase(pod) {
        "Pending" | "Running" if disrupted && pod.metadata.deletion_timestamp.is_some() => {
            failed_pod(job, pod, &clock)
        }
        "Pending" => pending(pod, events, &clock),
        // The executor has ended; the Job's own word on it is still to come.
        "Running" => lingering(pod, pods, events, &clock),
        "Succeeded" => Observation::Running,
        "Failed" => failed_pod(job, pod, &clock),
        _ => Observation::Running,
    }
}

/// The time, and how long things may take.
struct Clock<'a> {
    now: Timestamp,
    timeouts: &'a Timeouts,
}

impl Clock<'_> {
    fn expired(&self, since: Timestamp, limit: Duration) -> bool {
        self.now >= after(since, limit)
    }
}

fn after(since: Timestamp, limit: Duration) -> Timestamp {
    SignedDuration::try_from(limit)
        .ok()
        .and_then(|limit| since.checked_add(limit).ok())
        .unwrap_or(Timestamp::MAX)
}

fn waiting(
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

fn stopping(job: &Job, clock: &Clock<'_>) -> Observation {
    let since = job.metadata.deletion_timestamp.as_ref();
    waiting(
        WaitReason::Stopping,
        "being stopped",
        since.map_or(clock.now, |time| time.0),
        None,
    )
}

/// A verdict on a run that Kubernetes would go on waiting for.
fn given_up(
    kind: VerdictKind,
    sentence: String,
    mut evidence: Vec<Evidence>,
    events: &[Event],
) -> Observation {
    for warning in facts::warnings(events) {
        if !evidence.iter().any(|fact| fact.text == warning.text) {
            evidence.push(warning);
        }
    }
    Observation::Ended(Box::new(Verdict {
        kind,
        sentence,
        evidence,
        advice: ending::advice(kind, false).map(str::to_owned),
        outcome: kind.outcome(),
        started: false,
        job_over: false,
        report: None,
    }))
}

fn without_pod(job: &Job, events: &[Event], clock: &Clock<'_>) -> Observation {
    let created = facts::created(job).unwrap_or(clock.now);
    if job.metadata.deletion_timestamp.is_some() {
        return stopping(job, clock);
    }
    if facts::is_suspended(job) {
        let queue = job
            .metadata
            .labels
            .as_ref()
            .and_then(|labels| labels.get(labels::KUEUE_QUEUE));
        let sentence = match queue {
            Some(queue) => format!("waiting to be admitted by the queue `{queue}`"),
            None => "waiting for its turn: as many runs as are allowed at once are at work".into(),
        };
        return waiting(WaitReason::Queued, sentence, created, None);
    }
    // Released by somebody who did not write it down, a moment ago as far as can be told.
    let since = facts::released(job).unwrap_or(clock.now);
    let limits = clock.timeouts;
    let refusal = facts::last_event(events, &["FailedCreate"])
        .and_then(|event| event.message.as_deref())
        .map(refused);
    if let Some(Refusal::Quota(text)) = refusal {
        let sentence = format!("waiting for room in the namespace's quota: {text}");
        return waiting(WaitReason::Quota, sentence, since, None);
    }
    // Its pod is gone, which is no reason to wait less than for the first.
    if facts::had_pod(job, events) && refusal.is_none() {
        let sentence = "the pod of this run is gone; Kubernetes makes another, or ends the Job";
        return waiting(WaitReason::AnotherPod, sentence, since, None);
    }
    let until = Some(after(since, limits.no_pod));
    if !clock.expired(since, limits.no_pod) {
        return match refusal {
            Some(Refusal::Admission(text)) => waiting(
                WaitReason::Admission,
                format!("the API server refuses the pod: {text}"),
                since,
                until,
            ),
            _ if clock.expired(since, limits.no_pod_explain) => waiting(
                WaitReason::AnotherPod,
                "Kubernetes has not created a pod for this run yet",
                since,
                until,
            ),
            _ => waiting(
                WaitReason::Pod,
                "waiting for the pod",
                since,
                Some(after(since, limits.no_pod_explain)),
            ),
        };
    }
    match refusal {
        Some(Refusal::Admission(text)) => given_up(
            VerdictKind::AdmissionRefused,
            format!("the API server refuses the pod of this run: {text}"),
            vec![],
            events,
        ),
        _ => given_up(
            VerdictKind::Infrastructure,
            format!(
                "Kubernetes created no pod for this run within {} s",
                limits.no_pod.as_secs()
            ),
            vec![],
            events,
        ),
    }
}

/// Why the Job controller could not create the pod.
pub(super) enum Refusal<'a> {
    Quota(&'a str),
    Admission(&'a str),
}

/// Takes the API server's words out of a `FailedCreate` event. Only an exceeded quota passes by itself.
pub(super) fn refused(message: &str) -> Refusal<'_> {
    let text = message
        .trim()
        .strip_prefix("Error creating: ")
        .unwrap_or(message)
        .trim();
    match text.find("exceeded quota") {
        Some(at) => Refusal::Quota(&text[at..]),
        None => Refusal::Admission(text),
    }
}

fn pending(pod: &Pod, events: &[Event], clock: &Clock<'_>) -> Observation {
    let created = pod
        .metadata
        .creation_timestamp
        .as_ref()
        .map_or(clock.now, |time| time.0);
    if let Some(held) = unscheduled(pod, created, events, clock) {
        return held;
    }
    let scheduled = facts::condition_time(pod, "PodScheduled").unwrap_or(created);
    let stuck = facts::all_statuses(pod).find_map(|status| {
        let waiting = status.state.as_ref()?.waiting.as_ref()?;
        Some((
            status.name.as_str(),
            status.image.as_str(),
            waiting,
            stuck_kind(waiting)?,
        ))
    });
    match stuck {
        Some((name, image, state, kind)) => {
            let place = Container { name, image };
            stuck_container(pod, &place, state, kind, scheduled, events, clock)
        }
        None => starting(pod, scheduled, events, clock),
    }
}

fn unscheduled(
    pod: &Pod,
    created: Timestamp,
    events: &[Event],
    clock: &Clock<'_>,
) -> Option<Observation> {
    if facts::node(pod).is_some() {
        return None;
    }
    let condition = facts::condition(pod, "PodScheduled").filter(|c| c.status == "False");
    let reason = condition.and_then(|c| c.reason.as_deref());
    let since = condition
        .and_then(|c| c.last_transition_time.as_ref())
        .map_or(created, |time| time.0);
    let limit = clock.timeouts.unschedulable;
    let words = condition.and_then(|c| c.message.as_deref()).or_else(|| {
        facts::last_event(events, &["FailedScheduling"]).and_then(|e| e.message.as_deref())
    });
    if reason == Some("SchedulingGated") {
        let sentence = "waiting for the scheduling gates of the pod to be lifted";
        return Some(waiting(WaitReason::Queued, sentence, since, None));
    }
    if !clock.expired(since, limit) {
        let until = Some(after(since, limit));
        return Some(match words {
            Some(words) => {
                let scaling = facts::last_event(events, &["TriggeredScaleUp", "Nominated"]);
                let hope = scaling.map_or("", |_| " (another node is on its way)");
                let sentence = format!("waiting for a node: {}{hope}", words.trim());
                waiting(WaitReason::Node, sentence, since, until)
            }
            None => waiting(WaitReason::Pod, "waiting for a node", since, until),
        });
    }
    let words = words.map_or(String::new(), |words| format!(": {}", words.trim()));
    Some(given_up(
        VerdictKind::NeverScheduled,
        format!("no node took the pod within {} s{words}", limit.as_secs()),
        vec![Evidence::new("pod", facts::name(pod))],
        events,
    ))
}

/// A container and the image it wants.
struct Container<'a> {
    name: &'a str,
    image: &'a str,
}

/// Which verdict a container's reason for waiting leads to when it stays.
fn stuck_kind(state: &ContainerStateWaiting) -> Option<VerdictKind> {
    Some(match state.reason.as_deref()? {
        "ErrImagePull"
        | "ImagePullBackOff"
        | "ErrImageNeverPull"
        | "InvalidImageName"
        | "ImageInspectError"
        | "RegistryUnavailable"
        | "SignatureValidationFailed" => VerdictKind::ImageNotPulled,
        "CreateContainerConfigError" => VerdictKind::ConfigMissing,
        "CreateContainerError"
        | "RunContainerError"
        | "PreCreateHookError"
        | "PreStartHookError"
        | "PostStartHookError"
        | "CrashLoopBackOff" => VerdictKind::Infrastructure,
        _ => return None,
    })
}

fn stuck_container(
    pod: &Pod,
    container: &Container<'_>,
    state: &ContainerStateWaiting,
    kind: VerdictKind,
    scheduled: Timestamp,
    events: &[Event],
    clock: &Clock<'_>,
) -> Observation {
    let reason = state.reason.as_deref().unwrap_or("?");
    // The state carries no time. The first complaint about it does, when events can be read.
    let complaint = facts::last_event(events, &["Failed", "InspectFailed", "ErrImageNeverPull"]);
    let since = complaint
        .and_then(facts::first_seen)
        .map_or(scheduled, |time| time.max(scheduled));
    let words = cause(state, complaint);
    let Container { name, image } = container;
    let (what, wait) = match kind {
        VerdictKind::ImageNotPulled => (
            format!("the image `{image}` of container `{name}` could not be pulled"),
            WaitReason::Image,
        ),
        VerdictKind::ConfigMissing => (
            format!("container `{name}` lacks a part of its configuration"),
            WaitReason::Config,
        ),
        _ => (
            format!("container `{name}` could not be started"),
            WaitReason::Start,
        ),
    };
    let limit = if reason == "InvalidImageName" {
        Duration::ZERO
    } else {
        clock.timeouts.container_error
    };
    let sentence = format!("{what}: {words}");
    if !clock.expired(since, limit) {
        return waiting(wait, sentence, since, Some(after(since, limit)));
    }
    let mut evidence = vec![Evidence::new(format!("container {name}"), reason)];
    if let Some(node) = facts::node(pod) {
        evidence.push(Evidence::new("node", node));
    }
    given_up(kind, sentence, evidence, events)
}

/// The most telling words for a container that cannot start: a back-off only says that it has failed before.
fn cause(state: &ContainerStateWaiting, complaint: Option<&Event>) -> String {
    // Between attempts the kubelet repeats the cause behind its back-off; said alike, it is no change.
    let said = state.message.as_deref().map(|said| {
        said.rsplit_once("ErrImagePull: ")
            .map_or(said, |(_, cause)| cause)
            .trim()
    });
    let complained = complaint.and_then(|event| event.message.as_deref());
    let backing_off = said.is_none_or(|said| said.starts_with("Back-off") || said.is_empty());
    match (said, complained) {
        (_, Some(words)) if backing_off && words != "Error: ImagePullBackOff" => words.trim(),
        (Some(words), _) if !words.is_empty() => words,
        _ => state.reason.as_deref().unwrap_or("no reason given"),
    }
    .to_owned()
}

fn starting(pod: &Pod, scheduled: Timestamp, events: &[Event], clock: &Clock<'_>) -> Observation {
    let limit = clock.timeouts.start;
    let mount = facts::last_event(events, &["FailedMount", "FailedAttachVolume"]);
    let mount_words = mount.and_then(|event| event.message.as_deref());
    let sandbox = facts::last_event(events, &["FailedCreatePodSandBox"]);
    let sandbox_words = sandbox.and_then(|event| event.message.as_deref());
    let init = facts::init_statuses(pod).find(|status| {
        status
            .state
            .as_ref()
            .is_some_and(|state| state.running.is_some())
    });
    let (reason, kind, sentence) = if let Some(words) = mount_words {
        (
            WaitReason::Config,
            VerdictKind::ConfigMissing,
            format!("a volume of the pod cannot be mounted: {}", words.trim()),
        )
    } else if let Some(words) = sandbox_words {
        (
            WaitReason::AnotherPod,
            VerdictKind::Infrastructure,
            format!("the node cannot set up the pod: {}", words.trim()),
        )
    } else if let Some(init) = init {
        (
            WaitReason::Start,
            VerdictKind::Infrastructure,
            format!("init container `{}` is running", init.name),
        )
    } else if let Some(pulling) = pulling(events) {
        (
            WaitReason::Image,
            VerdictKind::ImageNotPulled,
            format!("the node is fetching the image: {pulling}"),
        )
    } else {
        (
            WaitReason::Start,
            VerdictKind::Infrastructure,
            "the pod is starting".to_owned(),
        )
    };
    if !clock.expired(scheduled, limit) {
        return waiting(reason, sentence, scheduled, Some(after(scheduled, limit)));
    }
    let mut evidence = Vec::new();
    if let Some(node) = facts::node(pod) {
        evidence.push(Evidence::new("node", node));
    }
    given_up(
        kind,
        format!(
            "the executor did not start within {} s of its pod getting a node: {sentence}",
            limit.as_secs()
        ),
        evidence,
        events,
    )
}

/// The words of a pull that has begun and not ended.
fn pulling(events: &[Event]) -> Option<&str> {
    let begun = facts::last_event(events, &["Pulling"])?;
    let done = facts::last_event(events, &["Pulled"]);
    if done.is_some_and(|done| facts::seen(done) >= facts::seen(begun)) {
        return None;
    }
    begun.message.as_deref()
}

/// The executor has ended, and a container that something put beside it has not, as service meshes do: the Job would
/// go on until its deadline. What the pod template brings is a native side-car, which ends with the executor.
fn lingering(pod: &Pod, pods: &[Pod], events: &[Event], clock: &Clock<'_>) -> Observation {
    let Some(ended) = facts::executor_end(pod).and_then(|end| end.finished_at.as_ref()) else {
        return Observation::Running;
    };
    let others = facts::others_running(pod);
    if others.is_empty() {
        return Observation::Running;
    }
    let sentence = format!("the executor has ended, but {others} has not");
    let limit = clock.timeouts.linger;
    if !clock.expired(ended.0, limit) {
        let until = Some(after(ended.0, limit));
        return waiting(WaitReason::Stopping, sentence, ended.0, until);
    }
    Observation::Ended(Box::new(ending::cut_short(pods, events, &sentence)))
}

/// The pod failed, the Job has not: either its condition is about to follow, or another pod is.
fn failed_pod(job: &Job, pod: &Pod, clock: &Clock<'_>) -> Observation {
    let end = ending::of_pod(pod);
    let killed = facts::executor_end(pod).is_none_or(|end| end.exit_code == KILLED);
    let cut_off = killed && facts::is_disrupted(pod);
    if end.kind == VerdictKind::Infrastructure || !end.started || cut_off {
        return replaced(job, pod, clock);
    }
    Observation::Running
}

/// A pod that is not the last: the Job controller makes another, where it may.
fn replaced(job: &Job, pod: &Pod, clock: &Clock<'_>) -> Observation {
    if !facts::may_try_again(job) {
        return Observation::Running;
    }
    let since = facts::executor_end(pod)
        .and_then(|end| end.finished_at.as_ref())
        .map_or(clock.now, |time| time.0);
    let sentence = format!(
        "{}; Kubernetes makes another attempt",
        ending::of_pod(pod).sentence
    );
    waiting(WaitReason::AnotherPod, sentence, since, None)
}
