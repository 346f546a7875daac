//! Runs that are over: who or what ended them.

use job_contract::Exit;
use job_contract::report::{FinalReport, LockStanding, StateLock, StopReason};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ContainerStateTerminated, Event, Pod};

use crate::cluster::annotations::CANCELLED_AT;

use super::waiting::{Refusal, refused};
use super::{Evidence, Verdict, VerdictKind, aftermath, facts};

/// After a step that may have changed something, where nothing else is known.
pub(super) const PLAN_AGAIN: &str =
    "plan again before applying: some changes may have been made, and a state lock may be left";

/// Whether the Job ever had a pod, by its own account. Pods may not be looked at everywhere.
fn had_pod(job: &Job) -> bool {
    job.status.as_ref().is_some_and(|status| {
        let counts = [
            status.active,
            status.terminating,
            status.failed,
            status.succeeded,
        ];
        counts.into_iter().flatten().any(|count| count > 0)
    })
}

/// How one pod ended.
pub(super) struct PodEnd {
    pub(super) kind: VerdictKind,
    pub(super) sentence: String,
    pub(super) started: bool,
    evidence: Vec<Evidence>,
    outcome: Exit,
    report: Option<FinalReport>,
}

/// The verdict on a Job whose condition says that it is over.
pub(super) fn ended(job: &Job, pods: &[Pod], events: &[Event]) -> Verdict {
    let condition = facts::terminal(job);
    let complete = condition.is_some_and(|condition| condition.type_ == "Complete");
    let reason = condition.and_then(|condition| condition.reason.as_deref());
    let mut end = match speaker(pods) {
        Some(pod) => of_pod(pod),
        None if complete => no_pod_complete(),
        None => no_pod_failed(job, events),
    };
    let silent = end.report.is_none() || matches!(end.kind, VerdictKind::Signalled);
    // A pod that was never let in is the cause; the deadline only ended the wait for it.
    let refused = matches!(
        end.kind,
        VerdictKind::QuotaExceeded | VerdictKind::AdmissionRefused
    );
    if reason == Some("DeadlineExceeded") && silent && !refused {
        end = deadline(job, end);
    }
    if let Some(condition) = condition.filter(|_| !complete) {
        let words = [condition.reason.as_deref(), condition.message.as_deref()];
        let words: Vec<&str> = words.into_iter().flatten().collect();
        end.evidence
            .push(Evidence::new("Job condition Failed", words.join(": ")));
    }
    verdict(end, pods, events)
}

/// The verdict on a Job that is no longer there.
pub(super) fn gone(job: &Job, pods: &[Pod], events: &[Event]) -> Verdict {
    if facts::terminal(job).is_some() {
        return ended(job, pods, events);
    }
    let end = match speaker(pods).map(of_pod) {
        Some(end) if end.report.is_some() && end.kind != VerdictKind::Signalled => end,
        other => deleted(job, other),
    };
    verdict(end, pods, events)
}

/// The verdict of an executor that has ended in a pod that goes on, and has to be stopped.
pub(super) fn cut_short(pods: &[Pod], events: &[Event], why: &str) -> Verdict {
    let mut end = speaker(pods).map_or_else(no_pod_complete, of_pod);
    end.evidence.push(Evidence::new("pod", why));
    Verdict {
        job_over: false,
        ..verdict(end, pods, events)
    }
}

fn verdict(mut end: PodEnd, pods: &[Pod], events: &[Event]) -> Verdict {
    match &end.report {
        Some(report) => drop(end.evidence.splice(0..0, aftermath::evidence(report))),
        None => end.evidence.extend(facts::warnings(events)),
    }
    end.evidence.extend(others(pods));
    let advice = aftermath::advice(end.kind, end.started, end.report.as_ref(), None);
    Verdict {
        kind: end.kind,
        sentence: end.sentence,
        evidence: end.evidence,
        advice,
        outcome: end.outcome,
        started: end.started,
        job_over: true,
        report: end.report,
    }
}

/// The pod whose end is the run's: the last one, unless it only found that another had begun the step.
pub(crate) fn speaker(pods: &[Pod]) -> Option<&Pod> {
    let newest = facts::newest(pods)?;
    if of_pod(newest).kind != VerdictKind::Claimed {
        return Some(newest);
    }
    let before: Vec<&Pod> = pods
        .iter()
        .filter(|pod| pod.metadata.uid != newest.metadata.uid)
        .filter(|pod| {
            let end = of_pod(pod);
            end.started && end.kind != VerdictKind::Claimed
        })
        .collect();
    Some(facts::newest_of(before).unwrap_or(newest))
}

/// What became of the other pods.
fn others(pods: &[Pod]) -> Vec<Evidence> {
    let (Some(speaker), Some(newest)) = (speaker(pods), facts::newest(pods)) else {
        return Vec::new();
    };
    pods.iter()
        .filter(|pod| pod.metadata.uid != speaker.metadata.uid)
        .map(|pod| {
            let which = if pod.metadata.uid == newest.metadata.uid {
                "later"
            } else {
                "earlier"
            };
            let source = format!("{which} pod {}", facts::name(pod));
            Evidence::new(source, of_pod(pod).sentence)
        })
        .collect()
}

impl PodEnd {
    fn silent(kind: VerdictKind, sentence: String, started: bool) -> Self {
        Self {
            kind,
            sentence,
            started,
            evidence: Vec::new(),
            outcome: kind.outcome(),
            report: None,
        }
    }
}

fn no_pod_complete() -> PodEnd {
    let sentence = "the step ran to its end; its pod is gone".to_owned();
    PodEnd::silent(VerdictKind::Completed, sentence, true)
}

fn no_pod_failed(job: &Job, events: &[Event]) -> PodEnd {
    let refusal = facts::last_event(events, &["FailedCreate"])
        .and_then(|event| event.message.as_deref())
        .map(refused);
    match refusal {
        Some(Refusal::Quota(text)) => PodEnd::silent(
            VerdictKind::QuotaExceeded,
            format!("there was no room in the namespace's quota: {text}"),
            false,
        ),
        Some(Refusal::Admission(text)) => PodEnd::silent(
            VerdictKind::AdmissionRefused,
            format!("the API server refused the pod of this run: {text}"),
            false,
        ),
        None => last_words(job, events),
    }
}

/// What the cluster still tells of a pod that is gone: events about it, and the Job's reason to fail.
fn last_words(job: &Job, events: &[Event]) -> PodEnd {
    let words = |reasons| facts::last_event(events, reasons)?.message.as_deref();
    if let Some(words) = words(&["Preempted"]) {
        let sentence = "the pod had to make room for one of higher priority".to_owned();
        let mut end = PodEnd::silent(VerdictKind::Preempted, sentence, true);
        end.evidence
            .push(Evidence::new("event Preempted", words.trim()));
        return end;
    }
    if let Some(words) = words(&["Evicted"]) {
        let sentence = format!("the pod was evicted: {}", words.trim());
        return PodEnd::silent(VerdictKind::Evicted, sentence, true);
    }
    if let Some(words) = words(&["TaintManagerEviction", "NodeNotReady"]) {
        let sentence = format!("the pod was removed from its node: {}", words.trim());
        return PodEnd::silent(VerdictKind::NodeLost, sentence, true);
    }
    match facts::failure_of_pod(job) {
        Some((_, Some(code))) => by_exit_code(code, true),
        Some((_, None)) => PodEnd::silent(
            VerdictKind::Evicted,
            "the cluster removed the pod for reasons of its own".to_owned(),
            true,
        ),
        None => PodEnd::silent(
            VerdictKind::Lost,
            "the Job failed and its pod is gone: nothing tells how the run ended".to_owned(),
            true,
        ),
    }
}

fn deadline(job: &Job, end: PodEnd) -> PodEnd {
    let seconds = job
        .spec
        .as_ref()
        .and_then(|spec| spec.active_deadline_seconds);
    let limit = seconds.map_or(String::new(), |seconds| format!(" of {seconds} s"));
    let unscheduled = if end.started || end.kind == VerdictKind::Lost {
        ""
    } else {
        ", before it had started"
    };
    let mut evidence = end.evidence;
    if end.kind != VerdictKind::Lost {
        evidence.push(Evidence::new("pod", end.sentence));
    }
    PodEnd {
        kind: VerdictKind::DeadlineExceeded,
        sentence: format!("the run exceeded its deadline{limit}{unscheduled}"),
        started: end.started,
        evidence,
        outcome: end
            .report
            .as_ref()
            .map_or(VerdictKind::DeadlineExceeded.outcome(), |_| end.outcome),
        report: end.report,
    }
}

fn deleted(job: &Job, end: Option<PodEnd>) -> PodEnd {
    let (started, when) = match &end {
        Some(end) if end.started => (true, "while it was running"),
        None if had_pod(job) => (true, "when it may have been running"),
        _ => (false, "before it had started"),
    };
    let cancelled = job
        .metadata
        .annotations
        .as_ref()
        .is_some_and(|annotations| annotations.contains_key(CANCELLED_AT));
    let (kind, sentence) = if cancelled {
        (
            VerdictKind::Cancelled,
            format!("the run was cancelled {when}"),
        )
    } else {
        (
            VerdictKind::Deleted,
            format!("the run's Job was deleted {when}"),
        )
    };
    let (evidence, report) = end.map_or((Vec::new(), None), |end| (end.evidence, end.report));
    PodEnd {
        evidence,
        report,
        ..PodEnd::silent(kind, sentence, started)
    }
}

/// How a pod ended, by the most specific source there is.
pub(super) fn of_pod(pod: &Pod) -> PodEnd {
    let started = facts::has_started(pod) && !facts::began_nothing(pod);
    let mut end = spoken(pod)
        .or_else(|| by_pod_reason(pod, started))
        .or_else(|| by_disruption(pod, started))
        .or_else(|| by_init_container(pod))
        .or_else(|| by_executor(pod, started))
        .unwrap_or_else(|| vanished(pod, started));
    // An executor that was told to stop says so, but not why: that the pod knows.
    if matches!(
        end.kind,
        VerdictKind::Signalled | VerdictKind::Infrastructure
    ) && let Some(cause) = by_pod_reason(pod, true).or_else(|| by_disruption(pod, true))
    {
        end.kind = cause.kind;
        end.evidence.push(Evidence::new("executor", end.sentence));
        end.sentence = cause.sentence;
    }
    end.evidence.splice(0..0, container_facts(pod));
    end
}

fn spoken(pod: &Pod) -> Option<PodEnd> {
    let report = facts::final_report(pod)?;
    let exit = Exit::from_code(i32::from(report.outcome)).unwrap_or(Exit::Defect);
    let in_the_way = |lock: &StateLock| lock.standing == LockStanding::InTheWay;
    let kind = match exit {
        Exit::Done => VerdictKind::Completed,
        Exit::StepFailed => match report.stopped {
            Some(StopReason::Cancelled) => VerdictKind::Cancelled,
            Some(StopReason::Deadline) => VerdictKind::DeadlineExceeded,
            Some(StopReason::Silence) => VerdictKind::Silence,
            Some(StopReason::Memory) => VerdictKind::MemoryStop,
            _ if report.lock.as_ref().is_some_and(in_the_way) => VerdictKind::StateLocked,
            Some(StopReason::Signal) | None => VerdictKind::StepFailed,
        },
        Exit::Defect => VerdictKind::Defect,
        Exit::BadConfiguration => VerdictKind::ConfigMissing,
        Exit::BadJobData => VerdictKind::BadJobData,
        Exit::Infrastructure => VerdictKind::Infrastructure,
        Exit::Claimed => VerdictKind::Claimed,
        Exit::Signal(_) => VerdictKind::Signalled,
    };
    let sentence = match (exit, &report.error) {
        (Exit::Done, None) => "the step did what it was asked to do".to_owned(),
        (Exit::Done, Some(error)) if report.unreported => {
            format!(
                "the step did what it was asked to do, and its executor could not tell the platform: {error}"
            )
        }
        (other, None) => other.to_string(),
        (_, Some(error)) => error.clone(),
    };
    Some(PodEnd {
        kind,
        sentence,
        // Its process had, but nothing of the step.
        started: exit != Exit::Infrastructure,
        evidence: Vec::new(),
        outcome: exit,
        report: Some(report),
    })
}

/// The reason the kubelet or the node controller wrote into the pod's status.
fn by_pod_reason(pod: &Pod, started: bool) -> Option<PodEnd> {
    let status = pod.status.as_ref()?;
    let reason = status.reason.as_deref()?;
    let words = status.message.as_deref().map_or("", str::trim);
    let node = facts::node(pod).unwrap_or("?");
    let (kind, sentence) = match reason {
        "Evicted" => (
            VerdictKind::Evicted,
            format!("the node `{node}` evicted the pod: {words}"),
        ),
        "Preempting" | "Preempted" => (
            VerdictKind::Preempted,
            format!("the pod had to make room for one of higher priority on `{node}`"),
        ),
        "NodeLost" => (
            VerdictKind::NodeLost,
            format!("the node `{node}` was lost while the pod ran on it"),
        ),
        "Shutdown" | "NodeShutdown" | "Terminated" => (
            VerdictKind::NodeLost,
            format!("the node `{node}` was shut down"),
        ),
        "DeadlineExceeded" => (
            VerdictKind::DeadlineExceeded,
            "the pod exceeded its deadline".to_owned(),
        ),
        "UnexpectedAdmissionError" | "NodeAffinity" | "AppArmor" | "TopologyAffinityError" => (
            VerdictKind::Infrastructure,
            format!("the node `{node}` refused the pod: {words}"),
        ),
        other if other.starts_with("OutOf") => (
            VerdictKind::Infrastructure,
            format!("the node `{node}` had no room for the pod after all: {words}"),
        ),
        _ => return None,
    };
    let mut end = PodEnd::silent(kind, sentence.trim_end_matches(": ").to_owned(), started);
    end.evidence
        .push(Evidence::new("pod status", join(reason, words)));
    Some(end)
}

/// The condition that marks a pod as disrupted by the cluster.
fn by_disruption(pod: &Pod, started: bool) -> Option<PodEnd> {
    let condition = facts::condition(pod, "DisruptionTarget").filter(|c| c.status == "True")?;
    let reason = condition.reason.as_deref().unwrap_or("?");
    let node = facts::node(pod).unwrap_or("?");
    let (kind, sentence) = match reason {
        "PreemptionByScheduler" | "PreemptionByKubeScheduler" => (
            VerdictKind::Preempted,
            "the pod had to make room for one of higher priority".to_owned(),
        ),
        "DeletionByTaintManager" | "DeletionByPodGC" => (
            VerdictKind::NodeLost,
            format!("the node `{node}` was lost or drained of its pods"),
        ),
        "EvictionByEvictionAPI" => (
            VerdictKind::Evicted,
            format!("the pod was evicted from `{node}`, as a drain does"),
        ),
        "TerminationByKubelet" => (
            VerdictKind::Evicted,
            format!("the node `{node}` stopped the pod to protect itself"),
        ),
        _ => (
            VerdictKind::Evicted,
            format!("the cluster removed the pod from `{node}`"),
        ),
    };
    let mut end = PodEnd::silent(kind, sentence, started);
    let words = condition.message.as_deref().unwrap_or_default();
    end.evidence.push(Evidence::new(
        "pod condition DisruptionTarget",
        join(reason, words),
    ));
    Some(end)
}

fn by_init_container(pod: &Pod) -> Option<PodEnd> {
    let (name, end) = facts::init_statuses(pod).find_map(|status| {
        let end = status.state.as_ref()?.terminated.as_ref()?;
        (end.exit_code != 0).then_some((status.name.as_str(), end))
    })?;
    let why = end.reason.as_deref().unwrap_or("Error");
    let mut found = PodEnd::silent(
        VerdictKind::Infrastructure,
        format!(
            "init container `{name}` ended with exit code {} ({why}), so the executor never started",
            end.exit_code
        ),
        false,
    );
    if let Some(words) = end.message.as_deref().filter(|words| !words.is_empty()) {
        found.evidence.push(Evidence::new(
            format!("init container {name}"),
            words.trim(),
        ));
    }
    Some(found)
}

fn by_executor(pod: &Pod, started: bool) -> Option<PodEnd> {
    let end = facts::executor_end(pod)?;
    let code = end.exit_code;
    let reason = end.reason.as_deref().unwrap_or_default();
    let words = end.message.as_deref().map_or("", str::trim);
    if reason == "OOMKilled" {
        let limit = facts::memory_limit(pod);
        return Some(oom(limit, "the executor was killed for using more memory"));
    }
    if matches!(reason, "ContainerCannotRun" | "StartError") {
        return Some(PodEnd::silent(
            VerdictKind::ConfigMissing,
            format!("the executor's container could not be run: {words}"),
            false,
        ));
    }
    if reason == "ContainerStatusUnknown" {
        if pod.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let node = facts::node(pod).unwrap_or("?");
        return Some(PodEnd::silent(
            VerdictKind::NodeLost,
            format!("the node `{node}` no longer knows what became of the executor"),
            true,
        ));
    }
    if code == 137 && pod.metadata.deletion_timestamp.is_none() {
        // The kernel may pick the tool's process, or the runtime may not tell: with a limit it is the likely cause.
        if let Some(limit) = facts::memory_limit(pod) {
            return Some(oom(
                Some(limit),
                "the executor was killed (137), most likely for using more memory",
            ));
        }
    }
    Some(by_exit_code(code, started))
}

fn oom(limit: Option<&str>, what: &str) -> PodEnd {
    let than = limit.map_or_else(
        || "than its node had".to_owned(),
        |limit| format!("than its limit of {limit}"),
    );
    PodEnd::silent(VerdictKind::OomKilled, format!("{what} {than}"), true)
}

fn by_exit_code(code: i32, started: bool) -> PodEnd {
    let exit = Exit::from_code(code);
    let (kind, sentence) = match exit {
        Some(Exit::Done) => (VerdictKind::Completed, "the step ran to its end".to_owned()),
        Some(Exit::StepFailed) => (
            VerdictKind::StepFailed,
            "the step failed; its log has the cause".to_owned(),
        ),
        Some(Exit::Defect) => (
            VerdictKind::Defect,
            "the executor ended because of a defect of its own".to_owned(),
        ),
        Some(Exit::BadConfiguration) => (
            VerdictKind::ConfigMissing,
            "the executor could not use its configuration".to_owned(),
        ),
        Some(Exit::BadJobData) => (
            VerdictKind::BadJobData,
            "the executor could not use the job data".to_owned(),
        ),
        Some(Exit::Infrastructure) => (
            VerdictKind::Infrastructure,
            "infrastructure failed before the step was begun".to_owned(),
        ),
        Some(Exit::Claimed) => (
            VerdictKind::Claimed,
            "another pod had begun this step, so it was not run a second time".to_owned(),
        ),
        Some(Exit::Signal(signal)) => (
            VerdictKind::Signalled,
            format!("the executor was ended by signal {signal} before it could report"),
        ),
        None => (
            VerdictKind::Lost,
            format!("the executor ended with exit code {code}, which it never uses itself"),
        ),
    };
    let mut end = PodEnd::silent(kind, sentence, started);
    if let Some(exit) = exit {
        end.outcome = exit;
    }
    end
}

/// Nothing tells how the container ended.
fn vanished(pod: &Pod, started: bool) -> PodEnd {
    if pod.metadata.deletion_timestamp.is_some() {
        let when = if started {
            "while the executor ran"
        } else {
            "before the executor had started"
        };
        return PodEnd::silent(
            VerdictKind::Deleted,
            format!("the pod was deleted {when}"),
            started,
        );
    }
    if facts::phase(pod) == "Succeeded" {
        return no_pod_complete();
    }
    let sentence = "the pod ended and left nothing that tells how".to_owned();
    PodEnd::silent(VerdictKind::Lost, sentence, started)
}

fn join(reason: &str, words: &str) -> String {
    if words.is_empty() {
        reason.to_owned()
    } else {
        format!("{reason}: {words}")
    }
}

fn container_facts(pod: &Pod) -> Vec<Evidence> {
    let mut evidence = Vec::new();
    if let Some(ContainerStateTerminated {
        exit_code, reason, ..
    }) = facts::executor_end(pod)
    {
        let reason = reason.as_deref().unwrap_or("no reason");
        evidence.push(Evidence::new(
            format!("container {}", facts::EXECUTOR),
            format!("{reason}, exit code {exit_code}"),
        ));
    }
    if let Some(node) = facts::node(pod) {
        evidence.push(Evidence::new("node", node));
    }
    evidence
}

/// What to do about a verdict, for someone who knows Terraform and has a cluster's operator to ask.
pub(super) const fn advice(kind: VerdictKind, started: bool) -> Option<&'static str> {
    Some(match kind {
        VerdictKind::Completed => return None,
        VerdictKind::StepFailed => "see the log of the step",
        VerdictKind::NeverScheduled => {
            "ask for less (EPHEMERAL_*_REQUEST), check node selector and tolerations, or give the cluster more nodes"
        }
        VerdictKind::ImageNotPulled => {
            "check the image's name and tag, the pull secret, and that the nodes reach the registry"
        }
        VerdictKind::ConfigMissing => {
            "create what is named here in the namespace of the runs, or correct its name; `api-launcher check` looks for it"
        }
        VerdictKind::QuotaExceeded => {
            "start the run again when others have ended, or raise the quota of the namespace"
        }
        VerdictKind::AdmissionRefused => {
            "change the setting the policy objects to, or have the policy changed"
        }
        VerdictKind::OomKilled => {
            "raise the memory limit of the run or lower its parallelism; before applying again, plan: some changes may have been made"
        }
        VerdictKind::Evicted | VerdictKind::Preempted | VerdictKind::NodeLost if started => {
            PLAN_AGAIN
        }
        VerdictKind::Evicted | VerdictKind::Preempted | VerdictKind::NodeLost => {
            "nothing had been started: start the run again"
        }
        VerdictKind::DeadlineExceeded => {
            "raise the deadline, or find out from the log what the run was waiting for"
        }
        VerdictKind::Deleted
        | VerdictKind::Lost
        | VerdictKind::Signalled
        | VerdictKind::Cancelled
            if started =>
        {
            PLAN_AGAIN
        }
        VerdictKind::Deleted
        | VerdictKind::Lost
        | VerdictKind::Signalled
        | VerdictKind::Cancelled => "nothing had been started: start the run again",
        VerdictKind::MemoryStop => {
            "raise the memory limit of the run or lower the tool's parallelism"
        }
        VerdictKind::Silence => "find out what the tool waits for, or raise the limit on silence",
        VerdictKind::StateLocked => {
            "start the run again once the lock is gone; nothing was changed"
        }
        VerdictKind::BadJobData => {
            "launcher and executor may be of releases too far apart; report it with both versions"
        }
        VerdictKind::Claimed => {
            "look at what the first pod of this step left: state, log, and a state lock; then plan again"
        }
        VerdictKind::Infrastructure => "nothing had been started: start the run again",
        VerdictKind::Defect => "report it, with the log of the run",
    })
}
