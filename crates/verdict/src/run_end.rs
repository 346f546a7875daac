//! Builds verdicts on runs that are over, whose Job is gone, or that were given up.

use job_contract::Exit;
use job_contract::annotations::CANCELLED_AT;
use k8s_openapi::api::core::v1::{Event, Pod};

use super::evidence::Evidence;
use super::kind::VerdictKind;
use super::model::{RunObjects, Verdict};
use super::pod_end::{PodEnd, by_exit_code, no_pod_complete, of_pod};
use super::pod_rejection::{PodRejection, pod_rejection};
use super::step_start::{Started, deciding_pod, most_certain_start};
use super::{advice, facts, report_evidence, step_start};

/// Returns the verdict on a Job whose condition shows that it is over.
pub(super) fn ended(run: &RunObjects<'_>) -> Verdict {
    let condition = facts::terminal(run.job);
    let complete = condition.is_some_and(|condition| condition.type_ == "Complete");
    let reason = condition.and_then(|condition| condition.reason.as_deref());
    let mut end = match deciding_pod(run.pods, run.events) {
        Some(pod) => of_pod(pod, run.events),
        None if complete => no_pod_complete(),
        None => no_pod_failed(run),
    };
    let silent = end.report.is_none() || end.is_stopped();
    // If the cluster never admitted the pod, that is the cause. The deadline only ended the wait.
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

/// Returns the verdict on a Job that is gone.
pub(super) fn gone(run: &RunObjects<'_>) -> Verdict {
    if facts::terminal(run.job).is_some() {
        return ended(run);
    }
    let deciding_pod = deciding_pod(run.pods, run.events);
    let ended_before = deciding_pod.is_some_and(|pod| {
        facts::executor_end(pod).is_some() && !facts::was_deleted_before_its_end(pod)
    });
    let end = match deciding_pod.map(|pod| of_pod(pod, run.events)) {
        Some(end) if (end.report.is_some() || ended_before) && !end.is_stopped() => end,
        other => deleted(run, other),
    };
    verdict(end, run)
}

/// Returns the verdict on a run whose executor has ended. Its pod ends by itself.
pub(super) fn executor_ended(run: &RunObjects<'_>) -> Verdict {
    let end = deciding_pod(run.pods, run.events)
        .map_or_else(no_pod_complete, |pod| of_pod(pod, run.events));
    verdict(end, run)
}

/// Returns the verdict on a run of which only events are left.
pub(super) fn from_events(run: &RunObjects<'_>) -> Verdict {
    let mut end = if facts::terminal(run.job).is_some() {
        ended(run)
    } else {
        let sentence = "the run's Job is gone, and nothing shows how the run ended".to_owned();
        verdict(
            PodEnd::silent(VerdictKind::Lost, sentence, Started::Unknown),
            run,
        )
    };
    // Without an event, a pod may still have existed: events are kept for a limited time.
    end.started = end.started.max(Started::Unknown);
    end.advice = advice::advice(&end, None);
    end
}

/// Returns the verdict on an ended executor whose pod still runs and must be stopped.
pub(super) fn cut_short(run: &RunObjects<'_>, why: Evidence) -> Verdict {
    let mut verdict = executor_ended(run);
    verdict.evidence.push(why);
    verdict.job_over = false;
    verdict
}

/// Returns the verdict on a run whose newest pod never starts, or that has no pod. If an earlier pod started the step,
/// the end of that pod is the end of the run.
pub(super) fn given_up(
    kind: VerdictKind,
    sentence: String,
    evidence: Vec<Evidence>,
    run: &RunObjects<'_>,
) -> Verdict {
    let waits = facts::newest(run.pods);
    let earlier = run.pods.iter().filter(|pod| !is_same(pod, waits));
    let end = match most_certain_start(earlier, run.events) {
        Some((pod, started)) if started != Started::No => {
            let mut end = of_pod(pod, run.events);
            let later = waits.map(|pod| Evidence::new(later(pod), sentence));
            end.evidence.extend(later);
            end.evidence.extend(evidence);
            end
        }
        _ => PodEnd {
            evidence,
            ..PodEnd::silent(kind, sentence, Started::No)
        },
    };
    Verdict {
        job_over: false,
        ..verdict(end, run)
    }
}

fn verdict(mut end: PodEnd, run: &RunObjects<'_>) -> Verdict {
    let RunObjects { job, pods, events } = *run;
    end.started = end.started.max(step_start::of_run(job, pods, events));
    // This exit code would mean that the step can run again safely.
    if end.started != Started::No && end.outcome == Exit::Infrastructure {
        end.outcome = VerdictKind::Lost.outcome();
    }
    match &end.report {
        Some(report) => drop(end.evidence.splice(0..0, report_evidence::evidence(report))),
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
        started: end.started,
        may_change: facts::may_change(job),
        job_over: true,
        pod: deciding_pod(pods, events).and_then(|pod| pod.metadata.name.clone()),
        report: end.report,
    };
    verdict.advice = advice::advice(&verdict, None);
    verdict
}

fn is_same(pod: &Pod, other: Option<&Pod>) -> bool {
    other.is_some_and(|other| other.metadata.uid == pod.metadata.uid)
}

fn later(pod: &Pod) -> String {
    format!("later pod {}", facts::name(pod))
}

/// Adds how the other pods ended.
fn others(pods: &[Pod], events: &[Event]) -> Vec<Evidence> {
    let (Some(deciding_pod), newest) = (deciding_pod(pods, events), facts::newest(pods)) else {
        return Vec::new();
    };
    pods.iter()
        .filter(|pod| !is_same(pod, Some(deciding_pod)) && facts::has_ended(pod))
        .map(|pod| {
            let source = if is_same(pod, newest) {
                later(pod)
            } else {
                format!("earlier pod {}", facts::name(pod))
            };
            Evidence::new(source, of_pod(pod, events).sentence)
        })
        .collect()
}

fn no_pod_failed(run: &RunObjects<'_>) -> PodEnd {
    let refusal = facts::last_event(run.events, &["FailedCreate"])
        .and_then(|event| event.message.as_deref())
        .map(pod_rejection);
    match refusal {
        Some(PodRejection::Quota(text)) => PodEnd::silent(
            VerdictKind::QuotaExceeded,
            format!("there was no room in the namespace's quota: {text}"),
            Started::No,
        ),
        Some(PodRejection::MissingObject(text)) => PodEnd::silent(
            VerdictKind::ConfigMissing,
            format!("the pod of this run could not be created: {text}"),
            Started::No,
        ),
        Some(PodRejection::Admission(text)) => PodEnd::silent(
            VerdictKind::AdmissionRefused,
            format!("the API server refused the pod of this run: {text}"),
            Started::No,
        ),
        None => last_words(run),
    }
}

/// Uses what the cluster still has about a pod that is gone: events, and the reason in the Job's condition.
fn last_words(run: &RunObjects<'_>) -> PodEnd {
    let words = |reasons| facts::last_event(run.events, reasons)?.message.as_deref();
    let silent = |kind, sentence| PodEnd::silent(kind, sentence, Started::Unknown);
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
            Exit::from_code(code).map_or(Started::Yes, step_start::by_exit),
        ),
        Some((_, None)) => silent(
            VerdictKind::Evicted,
            "the cluster removed the pod for reasons of its own".to_owned(),
        ),
        None => silent(
            VerdictKind::Lost,
            "the Job failed and its pod is gone: nothing shows how the run ended".to_owned(),
        ),
    }
}

fn deadline(run: &RunObjects<'_>, end: PodEnd) -> PodEnd {
    let seconds = run
        .job
        .spec
        .as_ref()
        .and_then(|spec| spec.active_deadline_seconds);
    let limit = seconds.map_or(String::new(), |seconds| format!(" of {seconds} s"));
    // If no pod is left, the Job and its events decide.
    let started = match deciding_pod(run.pods, run.events) {
        Some(_) => end.started,
        None => step_start::of_run(run.job, run.pods, run.events),
    };
    let unscheduled = if started == Started::No {
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
        started,
        evidence,
        outcome: end
            .report
            .as_ref()
            .map_or(VerdictKind::DeadlineExceeded.outcome(), |_| end.outcome),
        report: end.report,
    }
}

fn deleted(run: &RunObjects<'_>, end: Option<PodEnd>) -> PodEnd {
    let job = run.job;
    let started = step_start::of_run(job, run.pods, run.events);
    let when = match started {
        Started::Yes => "while it was running",
        Started::Unknown => "when it may have been running",
        Started::No => "before it had started",
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
