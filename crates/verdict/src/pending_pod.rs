//! Determines what a pending pod waits for: a node, its containers, images or volumes.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStateWaiting, Event, Pod};
use k8s_openapi::jiff::Timestamp;

use super::evidence::Evidence;
use super::facts;
use super::kind::VerdictKind;
use super::model::{Observation, RunObjects, WaitReason};
use super::pod_rejection::names_missing_object;
use super::wait::{WaitLimits, after, given_up, lacking, waiting};

pub(super) fn pending(run: &RunObjects<'_>, pod: &Pod, limits: &WaitLimits<'_>) -> Observation {
    let created = pod
        .metadata
        .creation_timestamp
        .as_ref()
        .map_or(limits.now, |time| time.0);
    if let Some(wait) = unscheduled(run, pod, created, limits) {
        return wait;
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
            stuck_container(run, pod, &place, state, kind, scheduled, limits)
        }
        None => starting(run, pod, scheduled, limits),
    }
}

fn unscheduled(
    run: &RunObjects<'_>,
    pod: &Pod,
    created: Timestamp,
    limits: &WaitLimits<'_>,
) -> Option<Observation> {
    if facts::node(pod).is_some() {
        return None;
    }
    let condition = facts::condition(pod, "PodScheduled").filter(|c| c.status == "False");
    let reason = condition.and_then(|c| c.reason.as_deref());
    let since = condition
        .and_then(|c| c.last_transition_time.as_ref())
        .map_or(created, |time| time.0);
    let limit = limits.timeouts.unschedulable;
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
        return Some(lacking(sentence, since, evidence, run, limits));
    }
    if !limits.expired(since, limit) {
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

/// Returns the verdict for a container that keeps this reason for waiting.
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
    run: &RunObjects<'_>,
    pod: &Pod,
    container: &Container<'_>,
    state: &ContainerStateWaiting,
    kind: VerdictKind,
    scheduled: Timestamp,
    limits: &WaitLimits<'_>,
) -> Observation {
    let reason = state.reason.as_deref().unwrap_or("?");
    // The state has no time. The first event about it has, if events are readable.
    let complaint = facts::last_event(
        run.events,
        &["Failed", "InspectFailed", "ErrImageNeverPull"],
    );
    let since = complaint
        .and_then(facts::first_seen)
        .map_or(scheduled, |time| time.max(scheduled));
    let due = facts::job_data_due(run.job).filter(|_| kind == VerdictKind::ConfigMissing);
    let since = due.map_or(since, |due| due.max(since));
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
        limits.timeouts.container_error
    };
    let sentence = format!("{what}: {words}");
    if !limits.expired(since, limit) {
        return waiting(wait, sentence, since, Some(after(since, limit)));
    }
    let mut evidence = vec![Evidence::new(format!("container {name}"), reason)];
    if let Some(node) = facts::node(pod) {
        evidence.push(Evidence::new("node", node));
    }
    given_up(kind, sentence, evidence, run)
}

/// Returns the most exact message for a container that cannot start. A back-off only shows that it failed before.
fn cause(state: &ContainerStateWaiting, complaint: Option<&Event>) -> String {
    // Between attempts, the kubelet repeats the cause after its back-off. The same sentence is used, so that it is no
    // change.
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

fn starting(
    run: &RunObjects<'_>,
    pod: &Pod,
    scheduled: Timestamp,
    limits: &WaitLimits<'_>,
) -> Observation {
    let events = run.events;
    let limit = limits.timeouts.start;
    let mut evidence = Vec::new();
    if let Some(node) = facts::node(pod) {
        evidence.push(Evidence::new("node", node));
    }
    let mount = failed_mount(pod, events);
    let mount_words = mount.and_then(|event| event.message.as_deref());
    if let Some((mount, words)) = mount.zip(mount_words.filter(|words| names_missing_object(words)))
    {
        let since = facts::first_seen(mount).map_or(scheduled, |time| time.max(scheduled));
        return lacking(cannot_mount(words), since, evidence, run, limits);
    }
    let (reason, kind, sentence) = obstacle(pod, events, mount_words);
    if !limits.expired(scheduled, limit) {
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

/// Returns why a pod with a node has not started yet, and the verdict if it never starts.
fn obstacle(
    pod: &Pod,
    events: &[Event],
    mount_words: Option<&str>,
) -> (WaitReason, VerdictKind, String) {
    let sandbox = last_event_of(pod, events, &["FailedCreatePodSandBox"]);
    let sandbox_words = sandbox.and_then(|event| event.message.as_deref());
    let init = facts::init_statuses(pod).find(|status| {
        status
            .state
            .as_ref()
            .is_some_and(|state| state.running.is_some())
    });
    if let Some(words) = mount_words {
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
    }
}

fn cannot_mount(words: &str) -> String {
    format!("a volume of the pod cannot be mounted: {}", words.trim())
}

fn last_event_of<'a>(pod: &Pod, events: &'a [Event], reasons: &[&str]) -> Option<&'a Event> {
    let events = events.iter().filter(|event| facts::is_about(event, pod));
    facts::last_event(events, reasons)
}

/// Returns the last warning about a volume, unless all volumes are mounted. Only after that does the kubelet set up the
/// pod and pull images.
fn failed_mount<'a>(pod: &Pod, events: &'a [Event]) -> Option<&'a Event> {
    const MOUNTED: [&str; 4] = ["FailedCreatePodSandBox", "Pulling", "Pulled", "Created"];
    let is_complaint = |event: &&Event| {
        let message = event.message.as_deref().unwrap_or_default();
        // After a while, the kubelet also reports that it still waits. That message lacks the cause.
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

/// Returns the message of a pull that is in progress.
fn pulling<'a>(pod: &Pod, events: &'a [Event]) -> Option<&'a str> {
    let begun = last_event_of(pod, events, &["Pulling"])?;
    let done = last_event_of(pod, events, &["Pulled"]);
    if done.is_some_and(|done| facts::seen(done) >= facts::seen(begun)) {
        return None;
    }
    begun.message.as_deref()
}
