//! Reports of ended runs.

use std::time::Duration;

use rstest::rstest;
use serde_json::{Value, json};
use verdict::VerdictKind;

use super::super::message::{Diagnostic, ObserverCall, Request, Response};
use super::super::observer::ReportOutcome;
use super::machine::{
    Machine, at, job, over, pod_with_executor, pod_with_report, pod_without_hope,
};
use crate::fake_server::merge;
use crate::submit::KEPT_UNREPORTED;

fn reported(outcome: ReportOutcome) -> Response {
    Response::Report(outcome)
}

fn is_report(request: &Request) -> bool {
    matches!(request, Request::Report { .. } | Request::ReportGone { .. })
}

fn noted_keep(machine: &Machine) -> Vec<Option<i32>> {
    let keep = machine.requests().filter_map(|request| match request {
        Request::NoteReported { keep, .. } => Some(*keep),
        _ => None,
    });
    keep.collect()
}

/// A Job that is kept for a day, and for ten minutes once it is reported.
fn kept(patch: Value) -> Value {
    let mut kept = job(
        "a",
        json!({"metadata": {"annotations": {"mayfly.dev/keep-seconds": "600"}},
            "spec": {"ttlSecondsAfterFinished": KEPT_UNREPORTED.as_secs()}}),
    );
    merge(&mut kept, patch);
    kept
}

#[test]
fn the_report_of_a_run_has_one_series_of_attempts_with_growing_pauses() {
    let mut machine = Machine::with(job("a", over("Failed", 0)));
    assert_eq!(machine.requests().filter(|it| is_report(it)).count(), 1);
    for pause in [5, 10] {
        machine.take();
        machine.respond("a", reported(ReportOutcome::Retry));
        // What happens to the Job meanwhile is no reason to try again.
        machine.job(job("a", over("Failed", 0)));
        assert!(!machine.requests().any(is_report));
        let waited = machine.pass_until(is_report);
        assert!((pause..2 * pause).contains(&waited.as_secs()), "{waited:?}");
    }
    // Neither is that the Job goes, also while a report is in progress.
    machine.take();
    machine.job_is_gone(job("a", over("Failed", 0)));
    machine.pass(Duration::from_hours(1));
    assert!(!machine.requests().any(is_report));
    machine.respond("a", reported(ReportOutcome::Retry));
    let waited = machine.pass_until(is_report);
    assert!((20..40).contains(&waited.as_secs()), "{waited:?}");
    machine.respond("a", Response::ReportGone(ReportOutcome::Delivered));
    machine.take();
    machine.pass(Duration::from_hours(1));
    assert!(!machine.requests().any(is_report));
}

/// Its log is read from the pod.
#[test]
fn a_verdict_that_an_earlier_version_recorded_gets_its_pod() {
    let killed = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
    let verdict = json!({"kind": "oom_killed", "sentence": "it was killed", "evidence": [], "outcome": 75,
        "started": true, "jobOver": false});
    let annotations = json!({"mayfly.dev/verdict": verdict.to_string()});
    let mut machine = Machine::with(job("a", json!({})));
    machine.pod(pod_with_executor("a", "Failed", &killed));
    machine.take();
    machine.job(job("a", json!({"metadata": {"annotations": annotations}})));
    let reported = machine.requests().find_map(|request| match request {
        Request::Report { verdict, .. } => Some(&verdict.pod),
        _ => None,
    });
    assert!(reported.unwrap().is_some());
}

#[test]
fn a_job_deleted_before_the_next_attempt_does_not_make_it_earlier() {
    let mut machine = Machine::with(job("a", over("Failed", 0)));
    machine.respond("a", reported(ReportOutcome::Retry));
    machine.take();
    machine.job_is_gone(job("a", over("Failed", 0)));
    assert!(!machine.requests().any(is_report));
    let waited = machine.pass_until(is_report);
    assert!((5..10).contains(&waited.as_secs()), "{waited:?}");
}

#[test]
fn the_response_for_an_earlier_job_of_the_same_name_changes_nothing() {
    let mut machine = Machine::with(job("a", over("Failed", 0)));
    machine.take();
    machine.respond_for("uid-of-another", "a", reported(ReportOutcome::Retry));
    machine.pass(Duration::from_hours(1));
    assert!(!machine.requests().any(is_report), "one is in progress");
}

#[rstest]
#[case::that_is_written_down(json!({"mayfly.dev/report-refused": "no"}))]
#[case::that_was_just_made(json!({}))]
fn a_refusal_is_final(#[case] annotations: Value) {
    let mut ended = job("a", over("Failed", 0));
    let is_new = annotations == json!({});
    merge(&mut ended["metadata"]["annotations"], annotations);
    let mut machine = Machine::with(ended.clone());
    assert_eq!(machine.requests().any(is_report), is_new);
    if is_new {
        let refused = ReportOutcome::Refused("no".to_owned());
        machine.respond("a", reported(refused));
    }
    machine.take();
    machine.job_is_gone(ended);
    machine.pass(Duration::from_hours(1));
    assert_eq!(machine.requests().count(), 0);
    let calls: Vec<_> = machine.calls().collect();
    assert!(
        matches!(calls[..], [ObserverCall::Forgotten(_)]),
        "{calls:?}"
    );
}

#[test]
fn a_job_that_was_deleted_is_reported_as_deleted() {
    let mut machine = Machine::with(job("a", json!({})));
    machine.job_is_gone(job("a", json!({})));
    let kinds: Vec<_> = machine.requests().collect();
    assert!(
        matches!(&kinds[..], [Request::ReportGone { verdict }] if verdict.kind == VerdictKind::Deleted),
        "{kinds:?}"
    );
}

#[test]
fn a_run_without_a_job_is_given_up_after_a_day() {
    let mut machine = Machine::with(job("a", json!({})));
    machine.job_is_gone(job("a", json!({})));
    let mut passed = Duration::ZERO;
    while machine.diagnostics().all(is_end) {
        machine.respond("a", Response::ReportGone(ReportOutcome::Retry));
        machine.take();
        passed += machine.pass_until(is_report);
        machine.respond("a", Response::ReportGone(ReportOutcome::Retry));
    }
    assert!(passed >= KEPT_UNREPORTED, "{passed:?}");
}

fn is_end(line: &Diagnostic) -> bool {
    matches!(line, Diagnostic::RunEnded(..))
}

#[test]
fn a_run_that_was_kept_for_as_long_as_a_report_may_take_is_not_reported_once_its_job_is_gone() {
    let mut machine = Machine::with(job("a", over("Failed", -24 * 3600)));
    machine.respond("a", reported(ReportOutcome::Retry));
    machine.take();
    machine.job_is_gone(job("a", over("Failed", -24 * 3600)));
    machine.pass(Duration::from_hours(1));
    assert!(!machine.requests().any(is_report));
    let lines: Vec<_> = machine.diagnostics().collect();
    assert!(
        matches!(lines[..], [Diagnostic::NeverReported(_)]),
        "{lines:?}"
    );
}

#[test]
fn a_run_that_reported_itself_is_kept_for_its_own_time_once_that_is_written_down() {
    let mut machine = Machine::with(kept(json!({})));
    machine.pass(Duration::from_secs(30));
    machine.take();
    machine.pod(pod_with_report("a", 0));
    machine.job(kept(over("Complete", 30)));
    assert_eq!(noted_keep(&machine), [Some(600)]);
    let asked_for_events =
        |effect: &super::super::message::Effect| format!("{effect:?}").contains("Events {");
    assert!(!machine.take().iter().any(asked_for_events));
    // The first attempt failed, so the Job is still kept for a day.
    machine.respond("a", reported(ReportOutcome::Delivered));
    machine.pass(Duration::from_secs(5));
    assert_eq!(noted_keep(&machine), [Some(605)]);
    machine.take();
    machine.job(kept(
        json!({"spec": {"ttlSecondsAfterFinished": 605}, "status": over("Complete", 30)["status"]}),
    ));
    machine.respond("a", reported(ReportOutcome::Delivered));
    machine.pass(Duration::from_hours(1));
    assert_eq!(machine.requests().count(), 0);
}

#[rstest]
#[case::that_is_kept_for_a_while(kept(over("Complete", 0)))]
#[case::that_is_kept_for_ever(job("a", over("Complete", 0)))]
fn the_end_of_a_run_that_reported_itself_is_logged_by_one_watcher_only(#[case] mut ended: Value) {
    let ends = |ended: &Value| {
        let mut machine = Machine::with(job("a", json!({})));
        machine.pod(pod_with_report("a", 0));
        machine.job(ended.clone());
        assert!(!machine.requests().any(is_report));
        machine.diagnostics().filter(|line| is_end(line)).count()
    };
    assert_eq!(ends(&ended), 1);
    ended["metadata"]["annotations"]["mayfly.dev/reported-at"] = json!(at(0).to_string());
    let mut next = Machine::with(ended);
    next.pod(pod_with_report("a", 0));
    assert_eq!(next.diagnostics().count(), 0);
}

#[test]
fn a_run_that_was_given_up_is_kept_for_its_own_time_though_its_report_could_not_be_noted() {
    let mut machine = Machine::with(kept(json!({})));
    machine.pod(pod_without_hope("a"));
    assert_eq!(machine.requests().filter(|it| is_report(it)).count(), 1);
    machine.take();
    machine.respond("a", reported(ReportOutcome::Delivered));
    machine.pass(Duration::from_secs(10));
    assert_eq!(noted_keep(&machine), [], "its Job is not over");
    machine.job(kept(over("Failed", 10)));
    assert_eq!(noted_keep(&machine), [Some(600)]);
    assert!(!machine.requests().any(is_report));
}

#[test]
fn the_verdict_on_the_job_is_reported_whatever_its_pods_show() {
    let mut first = Machine::with(job("a", json!({})));
    first.pod(pod_without_hope("a"));
    let request = first.requests().find(|it| is_report(it)).unwrap();
    let Request::Report { verdict, .. } = request else {
        panic!("{request:?}");
    };
    let noted = serde_json::to_string(verdict).unwrap();
    let mut ended = job("a", over("Failed", 0));
    ended["metadata"]["annotations"]["mayfly.dev/verdict"] = json!(noted);
    let mut second = Machine::with(ended);
    second.pod(pod_with_executor(
        "a",
        "Failed",
        &json!({"terminated": {"exitCode": 143}}),
    ));
    let again = second.requests().find(|it| is_report(it)).unwrap();
    let keep = None;
    let verdict = verdict.clone();
    assert_eq!(*again, Request::Report { verdict, keep });
}
