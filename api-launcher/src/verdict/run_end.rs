//! Runs that are over: who or what ended them.

use std::fmt::Write as _;

use job_contract::Exit;
use job_contract::report::{FinalReport, LockStanding, StateLock, StopReason};
use k8s_openapi::api::core::v1::{ContainerStateTerminated, Event, Pod};

use crate::cluster::annotations::CANCELLED_AT;

use super::waiting::{Refusal, refused};
use super::{Begun, Evidence, Run, Verdict, VerdictKind, aftermath, begun, facts};

/// SIGKILL, as an exit code.
pub(super) const KILLED: i32 = 137;

/// How one pod ended.
pub(super) struct PodEnd {
    pub(super) kind: VerdictKind,
    pub(super) sentence: String,
    pub(super) begun: Begun,
    evidence: Vec<Evidence>,
    outcome: Exit,
    report: Option<FinalReport>,
}

/// The verdict on a Job whose condition says that it is over.
pub(super) fn ended(run: &Run<'_>) -> Verdict {
    let condition = facts::terminal(run.job);
    let complete = condition.is_some_and(|condition| condition.type_ == "Complete");
    let reason = condition.and_then(|condition| condition.reason.as_deref());
    let mut end = match speaker(run.pods, run.events) {
        Some(pod) => of_pod(pod, run.events),
        None if complete => no_pod_complete(),
        None => no_pod_failed(run),
    };
    let silent = end.report.is_none() || is_stopped(&end);
    // A pod that was never let in is the cause; the deadline only ended the wait for it.
    let refused = matches!(
        end.kind,
        VerdictKind::QuotaExceeded | VerdictKind::AdmissionRefused | VerdictKind::ConfigMissing
    );
    if reason == Some("DeadlineExceeded") && silent && !refused {
        end = deadline(run, end);
    }
    if let Some(condition) = condition.filter(|_| !complete) {
        let words = [condition.reason.as_deref(), condition.message.as_deref()];
        let words: Vec<&str> = words.into_iter().flatten().collect();
        end.evidence
            .push(Evidence::new("Job condition Failed", words.join(": ")));
    }
    verdict(end, run)
}

/// The verdict on a Job that is no longer there.
pub(super) fn gone(run: &Run<'_>) -> Verdict {
    if facts::terminal(run.job).is_some() {
        return ended(run);
    }
    let speaker = speaker(run.pods, run.events);
    let ended_before = speaker.is_some_and(|pod| {
        facts::executor_end(pod).is_some() && !facts::was_deleted_before_its_end(pod)
    });
    let end = match speaker.map(|pod| of_pod(pod, run.events)) {
        Some(end) if (end.report.is_some() || ended_before) && !is_stopped(&end) => end,
        other => deleted(run, other),
    };
    verdict(end, run)
}

/// Whether the executor ended because it was stopped, for which the Job may have the cause.
const fn is_stopped(end: &PodEnd) -> bool {
    matches!(end.kind, VerdictKind::Signalled | VerdictKind::Deleted)
}

/// The verdict on a run whose executor has ended. Its pod needs nobody any more to end.
pub(super) fn executor_ended(run: &Run<'_>) -> Verdict {
    let end =
        speaker(run.pods, run.events).map_or_else(no_pod_complete, |pod| of_pod(pod, run.events));
    verdict(end, run)
}

/// The verdict on a run of which only events are left. They tell nothing of what they do not name.
pub(super) fn traced(run: &Run<'_>) -> Verdict {
    let mut end = if facts::terminal(run.job).is_some() {
        ended(run)
    } else {
        let sentence = "the run's Job is gone, and nothing tells how the run ended".to_owned();
        verdict(
            PodEnd::silent(VerdictKind::Lost, sentence, Begun::Unknown),
            run,
        )
    };
    // That no pod is named says nothing: its events may be too old to be kept.
    end.begun = end.begun.max(Begun::Unknown);
    end.advice = aftermath::advice(&end, None);
    end
}

/// The verdict of an executor that has ended in a pod that goes on, and has to be stopped.
pub(super) fn cut_short(run: &Run<'_>, why: Evidence) -> Verdict {
    let mut verdict = executor_ended(run);
    verdict.evidence.push(why);
    verdict.job_over = false;
    verdict
}

/// The verdict on a run whose newest pod, if it has any, waits in vain. If an earlier pod began, the end of that pod is
/// the run's.
pub(super) fn given_up(
    kind: VerdictKind,
    sentence: String,
    evidence: Vec<Evidence>,
    run: &Run<'_>,
) -> Verdict {
    let waits = facts::newest(run.pods);
    let earlier = run.pods.iter().filter(|pod| !is(pod, waits));
    let end = match began_most(earlier, run.events) {
        Some((pod, begun)) if begun != Begun::No => {
            let mut end = of_pod(pod, run.events);
            let later = waits.map(|pod| Evidence::new(later(pod), sentence));
            end.evidence.extend(later);
            end.evidence.extend(evidence);
            end
        }
        _ => PodEnd {
            evidence,
            ..PodEnd::silent(kind, sentence, Begun::No)
        },
    };
    Verdict {
        job_over: false,
        ..verdict(end, run)
    }
}

fn verdict(mut end: PodEnd, run: &Run<'_>) -> Verdict {
    let Run { job, pods, events } = *run;
    end.begun = end.begun.max(begun::of_run(job, pods, events));
    // This code says that the step is safe to run again.
    if end.begun != Begun::No && end.outcome == Exit::Infrastructure {
        end.outcome = VerdictKind::Lost.outcome();
    }
    match &end.report {
        Some(report) => drop(end.evidence.splice(0..0, aftermath::evidence(report))),
        None => {
            for warning in facts::warnings(events) {
                if !end.evidence.iter().any(|fact| fact.text == warning.text) {
                    end.evidence.push(warning);
                }
            }
        }
    }
    end.evidence.extend(others(pods, events));
    let mut verdict = Verdict {
        kind: end.kind,
        sentence: end.sentence,
        evidence: end.evidence,
        advice: None,
        outcome: end.outcome,
        begun: end.begun,
        may_change: facts::may_change(job),
        job_over: true,
        report: end.report,
    };
    verdict.advice = aftermath::advice(&verdict, None);
    verdict
}

/// The pod whose end is the run's. That is the newest, unless it did not begin the step and an earlier one did or may
/// have.
pub(crate) fn speaker<'a>(pods: &'a [Pod], events: &[Event]) -> Option<&'a Pod> {
    let newest = facts::newest(pods)?;
    match began_most(pods, events) {
        Some((pod, begun)) if begun > begun::of_pod(newest, events) => Some(pod),
        _ => Some(newest),
    }
}

/// The first of the pods that are most certain to have begun the step.
fn began_most<'a>(
    pods: impl IntoIterator<Item = &'a Pod>,
    events: &[Event],
) -> Option<(&'a Pod, Begun)> {
    // Of equals the last is taken.
    facts::in_order(pods)
        .into_iter()
        .rev()
        .map(|pod| (pod, begun::of_pod(pod, events)))
        .max_by_key(|(_, begun)| *begun)
}

fn is(pod: &Pod, other: Option<&Pod>) -> bool {
    other.is_some_and(|other| other.metadata.uid == pod.metadata.uid)
}

fn later(pod: &Pod) -> String {
    format!("later pod {}", facts::name(pod))
}

/// What became of the other pods that have ended.
fn others(pods: &[Pod], events: &[Event]) -> Vec<Evidence> {
    let (Some(speaker), newest) = (speaker(pods, events), facts::newest(pods)) else {
        return Vec::new();
    };
    pods.iter()
        .filter(|pod| !is(pod, Some(speaker)) && facts::has_ended(pod))
        .map(|pod| {
            let source = if is(pod, newest) {
                later(pod)
            } else {
                format!("earlier pod {}", facts::name(pod))
            };
            Evidence::new(source, of_pod(pod, events).sentence)
        })
        .collect()
}

impl PodEnd {
    fn silent(kind: VerdictKind, sentence: String, begun: Begun) -> Self {
        Self {
            kind,
            sentence,
            begun,
            evidence: Vec::new(),
            outcome: kind.outcome(),
            report: None,
        }
    }
}

fn no_pod_complete() -> PodEnd {
    let sentence = "the step ran to its end; its pod is gone".to_owned();
    PodEnd::silent(VerdictKind::Completed, sentence, Begun::Yes)
}

fn no_pod_failed(run: &Run<'_>) -> PodEnd {
    let refusal = facts::last_event(run.events, &["FailedCreate"])
        .and_then(|event| event.message.as_deref())
        .map(refused);
    match refusal {
        Some(Refusal::Quota(text)) => PodEnd::silent(
            VerdictKind::QuotaExceeded,
            format!("there was no room in the namespace's quota: {text}"),
            Begun::No,
        ),
        Some(Refusal::Missing(text)) => PodEnd::silent(
            VerdictKind::ConfigMissing,
            format!("the pod of this run could not be created: {text}"),
            Begun::No,
        ),
        Some(Refusal::Admission(text)) => PodEnd::silent(
            VerdictKind::AdmissionRefused,
            format!("the API server refused the pod of this run: {text}"),
            Begun::No,
        ),
        None => last_words(run),
    }
}

/// What the cluster still tells of a pod that is gone: events about it, and the Job's reason to fail.
fn last_words(run: &Run<'_>) -> PodEnd {
    let words = |reasons| facts::last_event(run.events, reasons)?.message.as_deref();
    let silent = |kind, sentence| PodEnd::silent(kind, sentence, Begun::Unknown);
    if let Some(words) = words(&["Preempted"]) {
        let sentence = "the pod had to make room for one of higher priority".to_owned();
        let mut end = silent(VerdictKind::Preempted, sentence);
        end.evidence
            .push(Evidence::new("event Preempted", words.trim()));
        return end;
    }
    if let Some(words) = words(&["Evicted"]) {
        let sentence = format!("the pod was evicted: {}", words.trim());
        return silent(VerdictKind::Evicted, sentence);
    }
    if let Some(words) = words(&["TaintManagerEviction", "NodeNotReady"]) {
        let sentence = format!("the pod was removed from its node: {}", words.trim());
        return silent(VerdictKind::NodeLost, sentence);
    }
    match facts::failure_of_pod(run.job) {
        Some((_, Some(code))) => by_exit_code(
            code,
            Exit::from_code(code).map_or(Begun::Yes, begun::by_exit),
        ),
        Some((_, None)) => silent(
            VerdictKind::Evicted,
            "the cluster removed the pod for reasons of its own".to_owned(),
        ),
        None => silent(
            VerdictKind::Lost,
            "the Job failed and its pod is gone: nothing tells how the run ended".to_owned(),
        ),
    }
}

fn deadline(run: &Run<'_>, end: PodEnd) -> PodEnd {
    let seconds = run
        .job
        .spec
        .as_ref()
        .and_then(|spec| spec.active_deadline_seconds);
    let limit = seconds.map_or(String::new(), |seconds| format!(" of {seconds} s"));
    // Where no pod is left, the Job and its events tell.
    let begun = match speaker(run.pods, run.events) {
        Some(_) => end.begun,
        None => begun::of_run(run.job, run.pods, run.events),
    };
    let unscheduled = if begun == Begun::No {
        ", before it had started"
    } else {
        ""
    };
    let mut evidence = end.evidence;
    if end.kind != VerdictKind::Lost {
        evidence.push(Evidence::new("pod", end.sentence));
    }
    PodEnd {
        kind: VerdictKind::DeadlineExceeded,
        sentence: format!("the run exceeded its deadline{limit}{unscheduled}"),
        begun,
        evidence,
        outcome: end
            .report
            .as_ref()
            .map_or(VerdictKind::DeadlineExceeded.outcome(), |_| end.outcome),
        report: end.report,
    }
}

fn deleted(run: &Run<'_>, end: Option<PodEnd>) -> PodEnd {
    let job = run.job;
    let begun = begun::of_run(job, run.pods, run.events);
    let when = match begun {
        Begun::Yes => "while it was running",
        Begun::Unknown => "when it may have been running",
        Begun::No => "before it had started",
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
        ..PodEnd::silent(kind, sentence, begun)
    }
}

/// How a pod ended, by the most specific source there is.
pub(super) fn of_pod(pod: &Pod, events: &[Event]) -> PodEnd {
    let begun = begun::of_pod(pod, events);
    let mut end = spoken(pod)
        .or_else(|| by_pod_reason(pod, begun))
        .or_else(|| by_disruption(pod, begun))
        .or_else(|| by_init_container(pod))
        .or_else(|| by_executor(pod, begun))
        .unwrap_or_else(|| vanished(pod, begun));
    // An executor that was told to stop says so, but not why: that the pod knows.
    if matches!(
        end.kind,
        VerdictKind::Signalled | VerdictKind::Infrastructure
    ) && let Some(cause) = by_pod_reason(pod, begun)
        .or_else(|| by_disruption(pod, begun))
        .or_else(|| by_deletion(pod, begun))
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
        begun: begun::by_exit(exit),
        evidence: Vec::new(),
        outcome: exit,
        report: Some(report),
    })
}

/// The reason the kubelet or the node controller wrote into the pod's status.
fn by_pod_reason(pod: &Pod, begun: Begun) -> Option<PodEnd> {
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
    let mut end = PodEnd::silent(kind, sentence.trim_end_matches(": ").to_owned(), begun);
    end.evidence
        .push(Evidence::new("pod status", join(reason, words)));
    Some(end)
}

/// The condition that marks a pod as disrupted by the cluster.
fn by_disruption(pod: &Pod, begun: Begun) -> Option<PodEnd> {
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
    let mut end = PodEnd::silent(kind, sentence, begun);
    let words = condition.message.as_deref().unwrap_or_default();
    end.evidence.push(Evidence::new(
        "pod condition DisruptionTarget",
        join(reason, words),
    ));
    Some(end)
}

fn by_init_container(pod: &Pod) -> Option<PodEnd> {
    let (name, end) = facts::failed_init(pod)?;
    let why = end.reason.as_deref().unwrap_or("Error");
    let mut found = PodEnd::silent(
        VerdictKind::Infrastructure,
        format!(
            "init container `{name}` ended with exit code {} ({why}), so the executor never started",
            end.exit_code
        ),
        Begun::No,
    );
    if let Some(words) = end.message.as_deref().filter(|words| !words.is_empty()) {
        found.evidence.push(Evidence::new(
            format!("init container {name}"),
            words.trim(),
        ));
    }
    Some(found)
}

fn by_executor(pod: &Pod, begun: Begun) -> Option<PodEnd> {
    let end = facts::executor_end(pod)?;
    let code = end.exit_code;
    let reason = end.reason.as_deref().unwrap_or_default();
    let words = end.message.as_deref().map_or("", str::trim);
    if reason == "OOMKilled" {
        let than = facts::memory_limit(pod).map_or_else(
            || "than its node had".to_owned(),
            |limit| format!("than its limit of {limit}"),
        );
        return Some(PodEnd::silent(
            VerdictKind::OomKilled,
            format!("the executor was killed for using more memory {than}"),
            begun,
        ));
    }
    if matches!(reason, "ContainerCannotRun" | "StartError") {
        return Some(PodEnd::silent(
            VerdictKind::ConfigMissing,
            format!("the executor's container could not be run: {words}"),
            begun,
        ));
    }
    if reason == facts::STATUS_UNKNOWN {
        if pod.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let node = facts::node(pod).unwrap_or("?");
        return Some(PodEnd::silent(
            VerdictKind::NodeLost,
            format!("the node `{node}` no longer knows what became of the executor"),
            begun,
        ));
    }
    // What containerd says of a container that was lost with its node's last boot.
    if code == 255 && reason == "Unknown" {
        let node = facts::node(pod).unwrap_or("?");
        return Some(PodEnd::silent(
            VerdictKind::NodeLost,
            format!("the node `{node}` was restarted while the executor ran"),
            begun,
        ));
    }
    let mut end = by_exit_code(code, begun);
    // Anybody may send SIGKILL. That it was the kernel, for want of memory, the kubelet says if it knows.
    if let Some(limit) = facts::memory_limit(pod).filter(|_| code == KILLED) {
        let _ = write!(
            end.sentence,
            "; one possible cause is its memory limit of {limit}"
        );
    }
    Some(end)
}

fn by_exit_code(code: i32, begun: Begun) -> PodEnd {
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
    let mut end = PodEnd::silent(kind, sentence, begun);
    if let Some(exit) = exit {
        end.outcome = exit;
    }
    end
}

/// Whatever the cluster deletes for reasons of its own has the condition of a disruption. The Job controller's deletions
/// have none: why it ends its pods, the Job says.
fn by_deletion(pod: &Pod, begun: Begun) -> Option<PodEnd> {
    if !facts::was_deleted_before_its_end(pod) {
        return None;
    }
    let when = match begun {
        Begun::Yes => "while the executor ran",
        Begun::Unknown => "when the executor may have been running",
        Begun::No => "before the step had begun",
    };
    let sentence = format!("the pod was deleted {when}");
    Some(PodEnd::silent(VerdictKind::Deleted, sentence, begun))
}

/// Nothing tells how the container ended.
fn vanished(pod: &Pod, begun: Begun) -> PodEnd {
    if let Some(end) = by_deletion(pod, begun) {
        return end;
    }
    if facts::phase(pod) == "Succeeded" {
        return no_pod_complete();
    }
    let sentence = "the pod ended and left nothing that tells how".to_owned();
    PodEnd::silent(VerdictKind::Lost, sentence, begun)
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
    evidence.extend(facts::unproven(pod));
    if let Some(node) = facts::node(pod) {
        evidence.push(Evidence::new("node", node));
    }
    evidence
}

/// What to do about the cause of a verdict, for someone who knows Terraform and has a cluster's operator to ask.
pub(super) const fn remedy(kind: VerdictKind) -> Option<&'static str> {
    Some(match kind {
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
            "wait until other runs have ended, or raise the quota of the namespace"
        }
        VerdictKind::AdmissionRefused => {
            "change the setting the policy objects to, or have the policy changed"
        }
        VerdictKind::OomKilled => "raise the memory limit of the run or lower its parallelism",
        VerdictKind::DeadlineExceeded => {
            "raise the deadline, or find out from the log what the run was waiting for"
        }
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
        VerdictKind::Defect => "report it, with the log of the run",
        VerdictKind::Completed
        | VerdictKind::Evicted
        | VerdictKind::Preempted
        | VerdictKind::NodeLost
        | VerdictKind::Deleted
        | VerdictKind::Lost
        | VerdictKind::Signalled
        | VerdictKind::Cancelled
        | VerdictKind::Infrastructure => return None,
    })
}

/// What to do about what the run may have left behind, where its executor did not tell. To start the run again is
/// advised only where it is proven that nothing began.
pub(super) const fn next_step(
    kind: VerdictKind,
    begun: Begun,
    may_change: bool,
) -> Option<&'static str> {
    let is_cause_outside_the_step = matches!(
        kind,
        VerdictKind::NeverScheduled
            | VerdictKind::ImageNotPulled
            | VerdictKind::ConfigMissing
            | VerdictKind::QuotaExceeded
            | VerdictKind::AdmissionRefused
    );
    let is_cut_off = matches!(
        kind,
        VerdictKind::OomKilled
            | VerdictKind::Evicted
            | VerdictKind::Preempted
            | VerdictKind::NodeLost
            | VerdictKind::DeadlineExceeded
            | VerdictKind::Deleted
            | VerdictKind::Lost
            | VerdictKind::Signalled
            | VerdictKind::Cancelled
            | VerdictKind::Infrastructure
    );
    match begun {
        Begun::No if is_cut_off => Some("nothing had been started: start the run again"),
        Begun::Yes | Begun::Unknown if !(is_cut_off || is_cause_outside_the_step) => None,
        Begun::No => None,
        Begun::Yes | Begun::Unknown if !may_change => {
            Some("plan again: a plan changes nothing, but a state lock may be left")
        }
        Begun::Yes => Some(
            "plan again before applying: some changes may have been made, and a state lock may be left",
        ),
        Begun::Unknown => Some(
            "plan again before applying: it is not known whether the step had begun, so changes may have been made, \
             and a state lock may be left",
        ),
    }
}
