//! Runs that are not over: what they wait for, for how long, and when there is no hope left.

use std::time::Duration;

use job_contract::Exit;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ContainerStateWaiting, Event, Pod};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::cluster::labels;

use super::{
    Begun, Evidence, Observation, Run, Timeouts, VerdictKind, Wait, WaitReason, begun, ending,
    facts,
};

pub(super) fn unfinished(run: &Run<'_>, now: Timestamp, timeouts: &Timeouts) -> Observation {
    let clock = Clock { now, timeouts };
    let job = run.job;
    let Some(pod) = facts::newest(run.pods) else {
        return without_pod(run, &clock);
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
            failed_pod(run, pod, &clock)
        }
        "Pending" => pending(run, pod, &clock),
        // The executor has ended; the Job's own word on it is still to come.
        "Running" => lingering(run, pod, &clock),
        "Succeeded" => Observation::Running,
        "Failed" => failed_pod(run, pod, &clock),
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
    evidence: Vec<Evidence>,
    run: &Run<'_>,
) -> Observation {
    Observation::Ended(Box::new(ending::given_up(kind, sentence, evidence, run)))
}

fn without_pod(run: &Run<'_>, clock: &Clock<'_>) -> Observation {
    let Run { job, events, .. } = *run;
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
        if facts::pods_active(job) > 0 {
            // Job and pods are watched apart: the pod is yet to be seen, or its end was seen before the Job's count of it.
            return waiting(WaitReason::Pod, "waiting for the pod", since, None);
        }
        let sentence = "the pod of this run is gone; Kubernetes makes another, or ends the Job";
        return waiting(WaitReason::AnotherPod, sentence, since, None);
    }
    if let Some(Refusal::Missing(text)) = refusal {
        let sentence = format!("the pod cannot be created: {text}");
        return lacking(sentence, since, vec![], run, clock);
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
                WaitReason::NoPod,
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
            run,
        ),
        _ => given_up(
            VerdictKind::Infrastructure,
            format!(
                "Kubernetes created no pod for this run within {} s",
                limits.no_pod.as_secs()
            ),
            vec![],
            run,
        ),
    }
}

/// A run that lacks an object which its pod names.
fn lacking(
    sentence: String,
    since: Timestamp,
    evidence: Vec<Evidence>,
    run: &Run<'_>,
    clock: &Clock<'_>,
) -> Observation {
    let limit = clock.timeouts.container_error;
    if clock.expired(since, limit) {
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

/// Why the Job controller could not create the pod.
pub(super) enum Refusal<'a> {
    Quota(&'a str),
    /// An object the pod names is not there: its service account.
    Missing(&'a str),
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
        None if names_missing_object(text) => Refusal::Missing(text),
        None => Refusal::Admission(text),
    }
}

/// Whether these words say that an object which the pod names is not there. Nothing changes until somebody creates it.
fn names_missing_object(words: &str) -> bool {
    const KINDS: [&str; 4] = [
        "configmap",
        "secret",
        "persistentvolumeclaim",
        "serviceaccount",
    ];
    // These name an object that is there, and a key or a volume that is not.
    const OTHERS: [&str; 3] = [
        "references non-existent config key",
        "references non-existent secret key",
        "bound to non-existent persistentvolume",
    ];
    let is_missing = |(at, kind): (usize, &str)| {
        let rest = &words[at + kind.len()..];
        let rest = rest.strip_prefix('s').unwrap_or(rest);
        let name = rest
            .strip_prefix(" \"")
            .and_then(|rest| rest.split_once('"'));
        name.is_some_and(|(_, rest)| rest.starts_with(" not found"))
    };
    KINDS
        .iter()
        .any(|kind| words.match_indices(kind).any(is_missing))
        || OTHERS.iter().any(|other| words.contains(other))
}

fn pending(run: &Run<'_>, pod: &Pod, clock: &Clock<'_>) -> Observation {
    let created = pod
        .metadata
        .creation_timestamp
        .as_ref()
        .map_or(clock.now, |time| time.0);
    if let Some(held) = unscheduled(run, pod, created, clock) {
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
            stuck_container(run, pod, &place, state, kind, scheduled, clock)
        }
        None => starting(run, pod, scheduled, clock),
    }
}

fn unscheduled(
    run: &Run<'_>,
    pod: &Pod,
    created: Timestamp,
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
        facts::last_event(run.events, &["FailedScheduling"]).and_then(|e| e.message.as_deref())
    });
    if reason == Some("SchedulingGated") {
        let sentence = "waiting for the scheduling gates of the pod to be lifted";
        return Some(waiting(WaitReason::Queued, sentence, since, None));
    }
    if let Some(words) = words.filter(|words| names_missing_object(words)) {
        let sentence = format!("the pod cannot be scheduled: {}", words.trim());
        let evidence = vec![Evidence::new("pod", facts::name(pod))];
        return Some(lacking(sentence, since, evidence, run, clock));
    }
    if !clock.expired(since, limit) {
        let until = Some(after(since, limit));
        return Some(match words {
            Some(words) => {
                let scaling = facts::last_event(run.events, &["TriggeredScaleUp", "Nominated"]);
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
        run,
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
    run: &Run<'_>,
    pod: &Pod,
    container: &Container<'_>,
    state: &ContainerStateWaiting,
    kind: VerdictKind,
    scheduled: Timestamp,
    clock: &Clock<'_>,
) -> Observation {
    let reason = state.reason.as_deref().unwrap_or("?");
    // The state carries no time. The first complaint about it does, when events can be read.
    let complaint = facts::last_event(
        run.events,
        &["Failed", "InspectFailed", "ErrImageNeverPull"],
    );
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
    given_up(kind, sentence, evidence, run)
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

fn starting(run: &Run<'_>, pod: &Pod, scheduled: Timestamp, clock: &Clock<'_>) -> Observation {
    let events = run.events;
    let limit = clock.timeouts.start;
    let mut evidence = Vec::new();
    if let Some(node) = facts::node(pod) {
        evidence.push(Evidence::new("node", node));
    }
    let mount = failed_mount(pod, events);
    let mount_words = mount.and_then(|event| event.message.as_deref());
    if let Some((mount, words)) = mount.zip(mount_words.filter(|words| names_missing_object(words)))
    {
        let since = facts::first_seen(mount).map_or(scheduled, |time| time.max(scheduled));
        return lacking(cannot_mount(words), since, evidence, run, clock);
    }
    let sandbox = last_event_of(pod, events, &["FailedCreatePodSandBox"]);
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
            cannot_mount(words),
        )
    } else if let Some(words) = sandbox_words {
        (
            WaitReason::Sandbox,
            VerdictKind::Infrastructure,
            format!("the node cannot set up the pod: {}", words.trim()),
        )
    } else if let Some(init) = init {
        (
            WaitReason::Start,
            VerdictKind::Infrastructure,
            format!("init container `{}` is running", init.name),
        )
    } else if let Some(pulling) = pulling(pod, events) {
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
    given_up(
        kind,
        format!(
            "the executor did not start within {} s of its pod getting a node: {sentence}",
            limit.as_secs()
        ),
        evidence,
        run,
    )
}

fn cannot_mount(words: &str) -> String {
    format!("a volume of the pod cannot be mounted: {}", words.trim())
}

fn last_event_of<'a>(pod: &Pod, events: &'a [Event], reasons: &[&str]) -> Option<&'a Event> {
    let events = events.iter().filter(|event| facts::is_about(event, pod));
    facts::last_event(events, reasons)
}

/// The last complaint about a volume, unless all volumes are mounted by now: only then does the kubelet set up the pod
/// and fetch images.
fn failed_mount<'a>(pod: &Pod, events: &'a [Event]) -> Option<&'a Event> {
    const MOUNTED: [&str; 4] = ["FailedCreatePodSandBox", "Pulling", "Pulled", "Created"];
    let is_complaint = |event: &&Event| {
        let message = event.message.as_deref().unwrap_or_default();
        // After a while the kubelet also says that it still waits, without the cause.
        !message.contains("timed out waiting for the condition")
    };
    let of_pod = || events.iter().filter(|event| facts::is_about(event, pod));
    let reasons = ["FailedMount", "FailedAttachVolume"];
    let complaint = facts::last_event(of_pod().filter(is_complaint), &reasons)
        .or_else(|| facts::last_event(of_pod(), &reasons))?;
    let is_set_up = facts::condition_time(pod, "PodReadyToStartContainers").is_some();
    let mounted = facts::last_event(of_pod(), &MOUNTED);
    let is_mounted = mounted.is_some_and(|event| facts::seen(event) >= facts::seen(complaint));
    (!is_set_up && !is_mounted).then_some(complaint)
}

/// The words of a pull that has begun and not ended.
fn pulling<'a>(pod: &Pod, events: &'a [Event]) -> Option<&'a str> {
    let begun = last_event_of(pod, events, &["Pulling"])?;
    let done = last_event_of(pod, events, &["Pulled"]);
    if done.is_some_and(|done| facts::seen(done) >= facts::seen(begun)) {
        return None;
    }
    begun.message.as_deref()
}

/// The executor has ended, and its pod has not. With that the run is over, whatever goes on beside it. Only where another pod
/// would follow, it is stopped with what keeps that from coming.
fn lingering(run: &Run<'_>, pod: &Pod, clock: &Clock<'_>) -> Observation {
    if facts::executor_ended(pod).is_none() {
        return Observation::Running;
    }
    if !may_be_replaced(run, pod) {
        return Observation::Ended(Box::new(ending::executor_ended(run)));
    }
    match lingers(pod, clock.timeouts) {
        None => failed_pod(run, pod, clock),
        Some((until, fact)) if clock.now < until => {
            let since = facts::executor_ended(pod).unwrap_or(clock.now);
            waiting(WaitReason::Stopping, fact.text, since, Some(until))
        }
        Some((_, fact)) => Observation::Ended(Box::new(ending::cut_short(run, fact))),
    }
}

pub(super) fn lingers(pod: &Pod, timeouts: &Timeouts) -> Option<(Timestamp, Evidence)> {
    let ended = facts::executor_ended(pod)?;
    let others = facts::others_running(pod);
    let text = format!("the executor has ended, but {others} has not");
    (!others.is_empty()).then(|| (after(ended, timeouts.linger), Evidence::new("pod", text)))
}

/// Whether the Job controller may make another pod in the place of this one, which has ended or is about to: where the
/// executor ended before the claim, or where it was killed by a disruption.
fn may_be_replaced(run: &Run<'_>, pod: &Pod) -> bool {
    let code = facts::executor_end(pod).map(|end| end.exit_code);
    let again = match code {
        None => facts::is_disrupted(pod) || begun::of_pod(pod, run.events) == Begun::No,
        Some(ending::KILLED) => facts::is_disrupted(pod),
        Some(code) => code == i32::from(Exit::Infrastructure.code()),
    };
    again && facts::may_try_again(run.job)
}

/// The pod failed, the Job has not: either its condition is about to follow, or another pod is.
fn failed_pod(run: &Run<'_>, pod: &Pod, clock: &Clock<'_>) -> Observation {
    if !may_be_replaced(run, pod) {
        return Observation::Running;
    }
    let since = facts::executor_end(pod)
        .and_then(|end| end.finished_at.as_ref())
        .map_or(clock.now, |time| time.0);
    let end = ending::of_pod(pod, run.events).sentence;
    let sentence = format!("{end}; Kubernetes makes another attempt");
    waiting(WaitReason::AnotherPod, sentence, since, None)
}
