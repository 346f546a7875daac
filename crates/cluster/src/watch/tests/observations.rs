//! What is observed of runs that are not over yet, lost nodes included.

use std::time::Duration;

use serde_json::{Value, json};
use verdict::{Observation, VerdictKind};

use super::super::heartbeat::SILENCE;
use super::super::message::{ObserverCall, Request, Response};
use super::super::observer::{Heartbeat, ReportOutcome};
use super::machine::{Machine, at, container, job, pod, pod_with_executor};

#[test]
fn the_reason_of_a_wait_is_announced_once_a_change() {
    let waiting = |reason: &str, message: &str| {
        let state = json!({"waiting": {"reason": reason, "message": message}});
        pod_with_executor("a", "Pending", &state)
    };
    let mut machine = Machine::with(job("a", json!({})));
    machine.pod(waiting("ErrImagePull", "no such host"));
    // Looked at again for another reason.
    machine.job(job("a", json!({})));
    machine.pod(waiting(
        "CreateContainerConfigError",
        "secret \"x\" not found",
    ));
    let news = machine.observations().into_iter();
    let news: Vec<&str> = news
        .filter_map(|(_, observation)| match observation {
            Observation::Waiting(wait) if wait.reason.is_news() => Some(wait.sentence.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(news.len(), 2, "{news:?}");
    assert!(news[0].contains("no such host") && news[1].contains("secret \"x\""));
}

/// A pod at work.
fn at_work() -> Value {
    with_ready("True")
}

/// The pod of a node that the node controller gets no answer from.
fn unready() -> Value {
    with_ready("False")
}

fn with_ready(ready: &str) -> Value {
    let running = json!({"running": {"startedAt": at(0).to_string()}});
    let conditions =
        json!([{"type": "Ready", "status": ready}, {"type": "ContainersReady", "status": "True"}]);
    let statuses = [container("executor", &running)];
    pod(
        "a",
        json!({"phase": "Running", "conditions": conditions, "containerStatuses": statuses}),
    )
}

/// The same when it had to be gone at this second.
fn deleted(mut pod: Value, second: i64) -> Value {
    pod["metadata"]["deletionTimestamp"] = json!(at(second).to_string());
    pod
}

fn is_check(request: &Request) -> bool {
    matches!(request, Request::Heartbeat { .. })
}

fn is_lost(request: &Request) -> bool {
    matches!(request, Request::Report { verdict, .. }
        if verdict.kind == VerdictKind::NodeLost && !verdict.job_over)
}

/// A run at work, then this pod.
fn machine_with(pod: Value) -> Machine {
    let mut machine = Machine::with(job("a", json!({})));
    machine.pod(at_work());
    let is_running = |call: &ObserverCall| matches!(call, ObserverCall::Running(_, Some(_)));
    assert!(machine.calls().any(is_running));
    machine.pod(pod);
    machine
}

/// Answers checks as they come, for so long.
fn check_for(machine: &mut Machine, heartbeat: Heartbeat, time: Duration) {
    let mut passed = Duration::ZERO;
    while passed < time {
        let checks = machine.requests().filter_map(|request| match request {
            Request::Heartbeat { pause } => Some(*pause),
            _ => None,
        });
        let pauses: Vec<Duration> = checks.collect();
        assert_eq!(pauses.len(), 1, "one check at a time");
        machine.take();
        passed += pauses[0];
        machine.pass(pauses[0]);
        machine.respond("a", Response::Heartbeat(heartbeat));
        if machine.requests().any(is_lost) {
            return;
        }
    }
}

#[test]
fn a_run_whose_node_is_lost_is_given_up_once_its_executor_has_been_silent() {
    let mut machine = machine_with(unready());
    check_for(&mut machine, Heartbeat::Present, Duration::from_mins(1));
    assert!(!machine.requests().any(is_lost));
    let nearly = SILENCE.checked_sub(Duration::from_secs(5)).unwrap();
    check_for(&mut machine, Heartbeat::Missing, nearly);
    assert!(!machine.requests().any(is_lost), "one look is no proof");
    check_for(&mut machine, Heartbeat::Missing, SILENCE);
    assert!(machine.requests().any(is_lost));
}

#[test]
fn a_run_on_a_node_that_cannot_be_reached_goes_on_while_its_executor_sends_heartbeats() {
    // Kubernetes has given the pod up, and no kubelet confirms it.
    let mut machine = machine_with(deleted(unready(), -3600));
    check_for(&mut machine, Heartbeat::Present, Duration::from_mins(10));
    assert!(!machine.requests().any(is_lost));
}

#[test]
fn where_heartbeats_cannot_be_read_only_a_pod_whose_deletion_is_overdue_is_lost() {
    let mut machine = machine_with(unready());
    check_for(&mut machine, Heartbeat::Unknown, Duration::from_mins(10));
    assert!(!machine.requests().any(is_lost));
    machine.pod(deleted(unready(), 600));
    assert!(!machine.requests().any(is_lost), "it has a while to go");
    machine.pass(Duration::from_secs(31));
    assert!(machine.requests().any(is_lost));
}

#[test]
fn a_node_that_answers_again_is_not_checked_any_more() {
    let mut machine = machine_with(unready());
    assert!(machine.requests().any(is_check));
    machine.respond("a", Response::Heartbeat(Heartbeat::Missing));
    machine.pod(at_work());
    machine.take();
    machine.pass(Duration::from_hours(1));
    assert_eq!(machine.requests().count(), 0);
    // The silence of then proves nothing later.
    machine.pod(unready());
    let requests: Vec<_> = machine.requests().collect();
    assert!(
        matches!(requests[..], [Request::Heartbeat { .. }]),
        "{requests:?}"
    );
}

#[test]
fn a_run_ends_with_its_executor_and_what_outlives_it_is_stopped_later() {
    let now = at(0).to_string();
    let killed = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": now}});
    let mesh = json!({"running": {"startedAt": now}});
    let statuses = [container("executor", &killed), container("mesh", &mesh)];
    let mut machine = Machine::with(job("a", json!({})));
    machine.pod(pod(
        "a",
        json!({"phase": "Running", "containerStatuses": statuses}),
    ));
    let requests: Vec<_> = machine.requests().collect();
    assert!(
        matches!(&requests[..], [Request::Report { verdict, .. }] if verdict.kind == VerdictKind::OomKilled),
        "{requests:?}"
    );
    machine.take();
    machine.respond("a", Response::Report(ReportOutcome::Delivered));
    let is_stop = |request: &Request| matches!(request, Request::Stop { verdict } if verdict.kind == VerdictKind::OomKilled);
    assert_eq!(machine.pass_until(is_stop), Duration::from_mins(1));
    machine.take();
    machine.respond("a", Response::Stop { done: false });
    assert_eq!(machine.pass_until(is_stop), Duration::from_secs(5));
    machine.take();
    machine.respond("a", Response::Stop { done: true });
    machine.pass(Duration::from_hours(1));
    assert_eq!(machine.requests().count(), 0);
}
