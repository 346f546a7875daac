//! Determines how one pod of a run ended, from the most specific source.

use std::fmt::Write as _;

use job_contract::Exit;
use job_contract::report::{FinalReport, LockStatus, StateLock, StopReason};
use k8s_openapi::api::core::v1::{ContainerStateTerminated, Event, Pod};

use super::evidence::Evidence;
use super::kind::VerdictKind;
use super::step_start::Started;
use super::{facts, step_start};

/// SIGKILL, as an exit code.
pub(super) const KILLED: i32 = 137;

pub(super) struct PodEnd {
    pub(super) kind: VerdictKind,
    pub(super) sentence: String,
    pub(super) started: Started,
    pub(super) evidence: Vec<Evidence>,
    pub(super) outcome: Exit,
    pub(super) report: Option<FinalReport>,
}

impl PodEnd {
    pub(super) fn silent(kind: VerdictKind, sentence: String, started: Started) -> Self {
        Self {
            kind,
            sentence,
            started,
            evidence: Vec::new(),
            outcome: kind.outcome(),
            report: None,
        }
    }

    /// Whether the executor ended because it was stopped. The Job may have the cause.
    pub(super) const fn is_stopped(&self) -> bool {
        matches!(self.kind, VerdictKind::Signalled | VerdictKind::Deleted)
    }
}

/// Determines how a pod ended, from the most specific source.
pub(super) fn of_pod(pod: &Pod, events: &[Event]) -> PodEnd {
    let started = step_start::of_pod(pod, events);
    let mut end = spoken(pod)
        .or_else(|| by_pod_reason(pod, started))
        .or_else(|| by_disruption(pod, started))
        .or_else(|| by_init_container(pod))
        .or_else(|| by_executor(pod, started))
        .unwrap_or_else(|| vanished(pod, started));
    // An executor that was stopped reports this, but does not know the cause. The pod shows the cause.
    if matches!(
        end.kind,
        VerdictKind::Signalled | VerdictKind::Infrastructure
    ) && let Some(cause) = by_pod_reason(pod, started)
        .or_else(|| by_disruption(pod, started))
        .or_else(|| by_deletion(pod, started))
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
    let in_the_way = |lock: &StateLock| lock.status == LockStatus::InTheWay;
    let kind = match exit {
        Exit::StepFailed => match report.stopped {
            Some(StopReason::Cancelled) => VerdictKind::Cancelled,
            Some(StopReason::Deadline) => VerdictKind::DeadlineExceeded,
            Some(StopReason::Silence) => VerdictKind::Silence,
            Some(StopReason::Memory) => VerdictKind::MemoryStop,
            _ if report.lock.as_ref().is_some_and(in_the_way) => VerdictKind::StateLocked,
            // If the kernel kills only one process, the executor survives its tool.
            _ if was_out_of_memory(pod) => VerdictKind::OomKilled,
            Some(StopReason::Signal | StopReason::CutOff) | None => VerdictKind::StepFailed,
        },
        other => VerdictKind::from(other),
    };
    let sentence = match (exit, &report.error) {
        (Exit::Done, None) => "the step did what it was asked to do".to_owned(),
        (Exit::Done, Some(error)) if report.unreported => {
            format!(
                "the step did what it was asked to do, and its executor could not tell the platform: {error}"
            )
        }
        (other, None) => other.to_string(),
        (_, Some(error)) if kind == VerdictKind::OomKilled => format!(
            "{error}; a process of the step was killed for using more memory {}",
            than_its_limit(pod)
        ),
        (_, Some(error)) => error.clone(),
    };
    Some(PodEnd {
        kind,
        sentence,
        started: step_start::by_exit(exit),
        evidence: Vec::new(),
        outcome: exit,
        report: Some(report),
    })
}

/// Uses the reason that the kubelet or the node controller wrote into the pod's status.
fn by_pod_reason(pod: &Pod, started: Started) -> Option<PodEnd> {
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

/// Uses the condition that marks a pod as disrupted by the cluster.
fn by_disruption(pod: &Pod, started: Started) -> Option<PodEnd> {
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
    let (name, end) = facts::failed_init(pod)?;
    let why = end.reason.as_deref().unwrap_or("Error");
    let mut found = PodEnd::silent(
        VerdictKind::Infrastructure,
        format!(
            "init container `{name}` ended with exit code {} ({why}), so the executor never started",
            end.exit_code
        ),
        Started::No,
    );
    if let Some(words) = end.message.as_deref().filter(|words| !words.is_empty()) {
        found.evidence.push(Evidence::new(
            format!("init container {name}"),
            words.trim(),
        ));
    }
    Some(found)
}

/// Whether a process in the executor's container was killed for its memory.
fn was_out_of_memory(pod: &Pod) -> bool {
    let reason = facts::executor_end(pod).and_then(|end| end.reason.as_deref());
    reason == Some("OOMKilled")
}

fn than_its_limit(pod: &Pod) -> String {
    facts::memory_limit(pod).map_or_else(
        || "than its node had".to_owned(),
        |limit| format!("than its limit of {limit}"),
    )
}

fn by_executor(pod: &Pod, started: Started) -> Option<PodEnd> {
    let end = facts::executor_end(pod)?;
    let code = end.exit_code;
    let reason = end.reason.as_deref().unwrap_or_default();
    let words = end.message.as_deref().map_or("", str::trim);
    // The reason is the same if only one process was killed and the step succeeded anyway.
    if was_out_of_memory(pod) && code != 0 {
        let than = than_its_limit(pod);
        return Some(PodEnd::silent(
            VerdictKind::OomKilled,
            format!("the executor was killed for using more memory {than}"),
            started,
        ));
    }
    if matches!(reason, "ContainerCannotRun" | "StartError") {
        return Some(PodEnd::silent(
            VerdictKind::ConfigMissing,
            format!("the executor's container could not be run: {words}"),
            started,
        ));
    }
    if reason == facts::STATUS_UNKNOWN {
        if pod.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let node = facts::node(pod).unwrap_or("?");
        return Some(PodEnd::silent(
            VerdictKind::NodeLost,
            format!("the node `{node}` no longer knows how the executor ended"),
            started,
        ));
    }
    // containerd reports this for a container that was lost in a restart of its node.
    if code == 255 && reason == "Unknown" {
        let node = facts::node(pod).unwrap_or("?");
        return Some(PodEnd::silent(
            VerdictKind::NodeLost,
            format!("the node `{node}` was restarted while the executor ran"),
            started,
        ));
    }
    let mut end = by_exit_code(code, started);
    // Any process can send SIGKILL. If the kernel sends it for lack of memory, the kubelet reports that.
    if let Some(limit) = facts::memory_limit(pod).filter(|_| code == KILLED) {
        let _ = write!(
            end.sentence,
            "; one possible cause is its memory limit of {limit}"
        );
    }
    Some(end)
}

pub(super) fn by_exit_code(code: i32, started: Started) -> PodEnd {
    let exit = Exit::from_code(code);
    let kind = exit.map_or(VerdictKind::Lost, VerdictKind::from);
    let sentence = match exit {
        Some(Exit::Done) => "the step ran to its end".to_owned(),
        Some(Exit::StepFailed) => "the step failed; its log has the cause".to_owned(),
        Some(Exit::Defect) => "the executor ended because of a defect of its own".to_owned(),
        Some(Exit::BadConfiguration) => "the executor could not use its configuration".to_owned(),
        Some(Exit::BadJobData) => "the executor could not use the job data".to_owned(),
        Some(Exit::Infrastructure) => "infrastructure failed before the step was begun".to_owned(),
        Some(Exit::Claimed) => {
            "another pod had begun this step, so it was not run a second time".to_owned()
        }
        Some(Exit::Signal(signal)) => {
            format!("the executor was ended by signal {signal} before it could report")
        }
        None => format!("the executor ended with exit code {code}, which it never uses itself"),
    };
    let mut end = PodEnd::silent(kind, sentence, started);
    if let Some(exit) = exit {
        end.outcome = exit;
    }
    end
}

/// If the cluster itself deletes a pod, the pod has a disruption condition. A pod that the Job controller deletes has
/// none: the Job has the reason.
fn by_deletion(pod: &Pod, started: Started) -> Option<PodEnd> {
    if !facts::was_deleted_before_its_end(pod) {
        return None;
    }
    let when = match started {
        Started::Yes => "while the executor ran",
        Started::Unknown => "when the executor may have been running",
        Started::No => "before the step had begun",
    };
    let sentence = format!("the pod was deleted {when}");
    Some(PodEnd::silent(VerdictKind::Deleted, sentence, started))
}

/// Nothing shows how the container ended.
fn vanished(pod: &Pod, started: Started) -> PodEnd {
    if let Some(end) = by_deletion(pod, started) {
        return end;
    }
    if facts::phase(pod) == "Succeeded" {
        return no_pod_complete();
    }
    let sentence = "the pod ended and nothing shows how it ended".to_owned();
    PodEnd::silent(VerdictKind::Lost, sentence, started)
}

pub(super) fn no_pod_complete() -> PodEnd {
    let sentence = "the step ran to its end; its pod is gone".to_owned();
    PodEnd::silent(VerdictKind::Completed, sentence, Started::Yes)
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
