//! The release of suspended Jobs, and the removal of ended ones.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use verdict::{Observation, WaitReason};

use super::super::message::{Diagnostic, ObserverCall, Request, Response};
use super::super::{HistoryLimits, WatchSettings};
use super::machine::{Machine, at, held, job, over};
use crate::ClusterError;
use crate::submit::{DRY_RUN_ACTION, ReleaseOutcome};

fn reason(observation: &Observation) -> Option<WaitReason> {
    match observation {
        Observation::Waiting(wait) => Some(wait.reason),
        _ => None,
    }
}

#[test]
fn runs_are_released_oldest_first_within_the_limit() {
    let jobs = vec![held("c", -1), held("a", -3), held("b", -2)];
    let mut machine = Machine::start(WatchSettings::default(), 1, jobs);
    assert_eq!(machine.released(), ["job-1-a"]);
    let queued = machine.observations();
    let queued: Vec<_> = queued
        .iter()
        .map(|(step, said)| (*step, reason(said)))
        .collect();
    let is_queued = Some(WaitReason::Queued);
    assert_eq!(queued, [("b", is_queued), ("c", is_queued)]);

    machine.take();
    machine.respond("a", Response::Release(Ok(ReleaseOutcome::Released)));
    machine.pass(Duration::from_mins(1));
    assert!(machine.released().is_empty(), "the slot is taken");
    machine.job(job("a", over("Complete", 60)));
    assert_eq!(machine.released(), ["job-1-b"]);
}

/// The Job controller sets the start time of a Job that was created suspended only when it comes to it.
#[test]
fn the_wait_for_a_pod_begins_with_the_release() {
    let long_ago = at(-3 * 3600).to_string();
    for noted in [json!(at(0).to_string()), json!(null)] {
        // Without a note: made by an earlier launcher, or released by a queue of the cluster.
        let meta = json!({"creationTimestamp": long_ago,
            "annotations": {"mayfly.dev/released-at": noted}});
        let mut machine = Machine::with(job("a", json!({"metadata": meta})));
        let said = machine.observations();
        assert_eq!(reason(said[0].1), Some(WaitReason::Pod), "{said:?}");
        let waited = machine.pass_until(|request| matches!(request, Request::Report { .. }));
        assert_eq!(waited, Duration::from_mins(2));
    }
}

#[test]
fn a_step_with_nothing_to_run_is_announced_at_once_and_released_after_its_launchers_turn() {
    let mut nothing = held("a", 0);
    nothing["metadata"]["annotations"]["mayfly.dev/nothing-to-run"] = json!("true");
    let mut machine = Machine::with(nothing);
    let calls: Vec<_> = machine.calls().collect();
    assert!(matches!(calls[..], [ObserverCall::Held(_)]), "{calls:?}");
    let turn = machine.pass_until(|request| matches!(request, Request::Release { .. }));
    assert_eq!(turn, Duration::from_secs(20));
}

/// Its launcher has died. The limit of the launcher does not apply to a queue of the cluster.
#[test]
fn a_job_that_is_not_in_its_queue_enters_it_whatever_the_limit() {
    let outside = |created| {
        let mut job = held("a", created);
        job["metadata"]["annotations"]["mayfly.dev/queue"] = json!("team");
        job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = json!("none.mayfly.dev");
        job
    };
    let jobs = vec![job("b", json!({})), outside(0)];
    let mut machine = Machine::start(WatchSettings::default(), 1, jobs);
    let said = machine.observations();
    let said = said.iter().find(|(step, _)| *step == "a").unwrap();
    assert!(
        matches!(said.1, Observation::Waiting(wait) if wait.sentence.contains("`team`")),
        "{said:?}"
    );
    let turn = machine.pass_until(|request| matches!(request, Request::Release { .. }));
    assert_eq!(turn, Duration::from_secs(2));
    assert_eq!(machine.released(), ["job-1-a"]);
    machine.take();
    machine.respond("a", Response::Release(Ok(ReleaseOutcome::Released)));
    machine.pass(Duration::from_mins(1));
    assert!(machine.released().is_empty(), "it is in its queue");
}

#[test]
fn a_job_that_never_got_its_job_data_is_removed() {
    let mut machine = Machine::with(held("a", 0));
    let mut removed_after = Duration::ZERO;
    loop {
        removed_after += machine.pass_until(|request| matches!(request, Request::Release { .. }));
        let removes = Request::Release {
            remove_incomplete: true,
        };
        if machine.requests().any(|request| *request == removes) {
            break;
        }
        machine.take();
        machine.respond("a", Response::Release(Ok(ReleaseOutcome::Incomplete)));
    }
    let (least, most) = (Duration::from_mins(1), Duration::from_secs(66));
    assert!((least..most).contains(&removed_after), "{removed_after:?}");
    machine.take();
    machine.respond("a", Response::Release(Ok(ReleaseOutcome::Removed)));
    machine.job_is_gone(held("a", 0));
    let calls: Vec<_> = machine.calls().collect();
    assert!(
        matches!(
            calls[..],
            [ObserverCall::Held(_), ObserverCall::Forgotten(_)]
        ),
        "{calls:?}"
    );
    assert_eq!(machine.requests().count(), 0);
}

/// By a delivery of another launcher, which creates it again.
#[test]
fn a_job_that_is_replaced_because_it_was_never_accepted_is_not_reported() {
    let mut machine = Machine::with(held("a", 0));
    machine.take();
    let mut replaced = held("a", 0);
    replaced["metadata"]["annotations"]["mayfly.dev/not-accepted"] = json!("true");
    machine.job_is_gone(replaced);
    let calls: Vec<_> = machine.calls().collect();
    assert!(
        matches!(calls[..], [.., ObserverCall::Forgotten(_)]),
        "{calls:?}"
    );
    assert_eq!(machine.requests().count(), 0);
}

#[test]
fn why_a_run_stays_suspended_is_logged_once() {
    let mut machine = Machine::with(held("a", 0));
    for _ in 0..2 {
        machine.pass_until(|request| matches!(request, Request::Release { .. }));
        let error = ClusterError::Refused {
            action: DRY_RUN_ACTION,
            message: "no".to_owned(),
            code: 403,
            reason: "Forbidden".to_owned(),
        };
        machine.respond("a", Response::Release(Err(error)));
    }
    let lines: Vec<_> = machine.diagnostics().collect();
    let is_it = |line: &Diagnostic| matches!(line, Diagnostic::StaysSuspended { run, .. } if run.step_id == "a");
    assert!(lines.len() == 1 && is_it(lines[0]), "{lines:?}");
}

#[test]
fn the_history_keeps_the_newest_runs_and_those_that_are_not_reported() {
    let ended = |step: &str, second: i64, reported: Option<Timestamp>| {
        let mut job = job(step, over("Failed", second));
        if let Some(at) = reported {
            job["metadata"]["annotations"]["mayfly.dev/reported-at"] = json!(at.to_string());
        }
        job
    };
    let jobs = vec![
        ended("unreported", -9, None),
        ended("old", -8, Some(at(-8))),
        ended("new", -7, Some(at(-7))),
    ];
    let history = HistoryLimits {
        failed: Some(1),
        successful: None,
    };
    let settings = WatchSettings {
        history,
        ..WatchSettings::default()
    };
    let mut machine = Machine::start(settings, 0, jobs);
    assert_eq!(machine.released(), ["job-1-old"]);
    machine.take();
    machine.pass(Duration::from_mins(1));
    machine.respond("new", Response::Remove);
    assert!(machine.released().is_empty(), "its removal is in progress");
}
