use job_contract::Exit;
use rstest::rstest;
use serde_json::{Value, json};

use super::*;

/// Seconds after the moment the Job of every test was released, which had waited for its turn before.
fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_767_225_600 + seconds).unwrap()
}

fn time(seconds: i64) -> String {
    at(seconds).to_string()
}

fn merge(base: &mut Value, patch: Value) {
    match (base, patch) {
        (Value::Object(base), Value::Object(patch)) => {
            for (key, value) in patch {
                merge(base.entry(key).or_insert(Value::Null), value);
            }
        }
        (base, patch) => *base = patch,
    }
}

fn job(patch: Value) -> Job {
    let mut job = json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": "job-412-7", "namespace": "runs", "uid": "j1", "creationTimestamp": time(-600),
            "labels": {"mayfly.dev/job-id": "412", "mayfly.dev/step-id": "7"}},
        "spec": {"suspend": false, "activeDeadlineSeconds": 21600, "template": {"spec": {"containers": []}}},
        "status": {"startTime": time(0)},
    });
    merge(&mut job, patch);
    serde_json::from_value(job).unwrap()
}

fn over(type_: &str, reason: &str) -> Job {
    job(json!({"status": {"conditions": [
        {"type": "FailureTarget", "status": "True"},
        {"type": type_, "status": "True", "reason": reason, "message": "as it was said"}]}}))
}

fn failed() -> Job {
    over("Failed", "BackoffLimitExceeded")
}

fn pod(patch: Value) -> Pod {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "job-412-7-x9k2p", "namespace": "runs", "uid": "p1", "creationTimestamp": time(1)},
        "spec": {"nodeName": "node-3", "containers": [
            {"name": "executor", "image": "registry.example/executor:1", "resources": {"limits": {"memory": "2Gi"}}}]},
        "status": {"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": time(2)}]},
    });
    merge(&mut pod, patch);
    serde_json::from_value(pod).unwrap()
}

fn waiting_container(reason: &str, message: &str) -> Pod {
    pod(json!({"status": {"containerStatuses": [{
        "name": "executor", "image": "registry.example/executor:1", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"waiting": {"reason": reason, "message": message}}}]}}))
}

fn ended_container(code: i32, reason: &str, message: &str) -> Value {
    json!({"status": {"phase": if code == 0 { "Succeeded" } else { "Failed" }, "containerStatuses": [{
        "name": "executor", "image": "registry.example/executor:1", "imageID": "x", "ready": false, "restartCount": 0,
        "state": {"terminated": {"exitCode": code, "reason": reason, "message": message,
            "startedAt": time(5), "finishedAt": time(50)}}}]}})
}

fn event(reason: &str, message: &str, seconds: i64) -> Event {
    serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": format!("{reason}.{seconds}"), "namespace": "runs"},
        "involvedObject": {}, "type": "Warning", "reason": reason, "message": message,
        "firstTimestamp": time(seconds), "lastTimestamp": time(seconds)}))
    .unwrap()
}

fn see(job: &Job, pods: &[Pod], events: &[Event], seconds: i64) -> Observation {
    observe(job, pods, events, at(seconds), &Timeouts::default())
}

fn wait(observation: Observation) -> Wait {
    match observation {
        Observation::Waiting(wait) => wait,
        other => panic!("not waiting: {other:?}"),
    }
}

fn end(observation: Observation) -> Verdict {
    match observation {
        Observation::Ended(verdict) => *verdict,
        other => panic!("not ended: {other:?}"),
    }
}

const REPORT: &str = r#"{"jobId":"412","stepId":"7","outcome":1,"error":"init failed","hint":"look at the log","phases":[]}"#;

#[test]
fn the_announcement_of_an_end_is_not_an_end() {
    for announced in ["SuccessCriteriaMet", "FailureTarget"] {
        let job = job(json!({"status": {"conditions": [{"type": announced, "status": "True"}]}}));
        let running = pod(
            json!({"status": {"phase": "Running", "containerStatuses": [{
            "name": "executor", "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "state": {"running": {"startedAt": time(5)}}}]}}),
        );
        assert_eq!(see(&job, &[running], &[], 60), Observation::InProgress);
    }
}

#[test]
fn a_condition_that_is_false_does_not_end_the_job() {
    let job = job(json!({"status": {"conditions": [{"type": "Failed", "status": "False"}]}}));
    assert!(matches!(see(&job, &[], &[], 1), Observation::Waiting(_)));
}

#[rstest]
#[case::with_its_exit_code(1, "Error", failed())]
#[case::with_0(0, "Completed", over("Complete", "CompletionsReached"))]
fn the_executors_report_is_the_verdict(#[case] code: i32, #[case] reason: &str, #[case] job: Job) {
    let pod = pod(ended_container(code, reason, REPORT));
    let verdict = end(see(&job, &[pod], &[], 60));
    assert_eq!(verdict.kind, VerdictKind::StepFailed);
    assert_eq!(verdict.sentence, "init failed");
    assert_eq!(verdict.advice.as_deref(), Some("look at the log"));
    assert_eq!(verdict.outcome, Exit::StepFailed);
    assert!(verdict.executor_reported() && verdict.job_over);
    assert_eq!(verdict.started, Started::Yes);
}

#[rstest]
#[case::any_json("{}")]
#[case::words("Killed")]
#[case::log_tail("{\"outcome\":\"x\"}")]
fn a_termination_message_of_others_is_not_a_report(#[case] message: &str) {
    let pod = pod(ended_container(1, "Error", message));
    let verdict = end(see(&failed(), &[pod], &[], 60));
    assert!(!verdict.executor_reported());
    assert_eq!(verdict.kind, VerdictKind::StepFailed);
}

#[rstest]
#[case::done(0, "Completed", VerdictKind::Completed)]
#[case::step(1, "Error", VerdictKind::StepFailed)]
#[case::defect(2, "Error", VerdictKind::Defect)]
#[case::configuration(64, "Error", VerdictKind::ConfigMissing)]
#[case::job_data(65, "Error", VerdictKind::BadJobData)]
#[case::infrastructure(75, "Error", VerdictKind::Infrastructure)]
#[case::claimed(76, "Error", VerdictKind::Claimed)]
#[case::terminated(143, "Error", VerdictKind::Signalled)]
#[case::oom(137, "OOMKilled", VerdictKind::OomKilled)]
#[case::oom_of_a_child(1, "OOMKilled", VerdictKind::OomKilled)]
#[case::oom_that_did_no_harm(0, "OOMKilled", VerdictKind::Completed)]
#[case::killed_under_a_limit(137, "Error", VerdictKind::Signalled)]
#[case::restarted_node(255, "Unknown", VerdictKind::NodeLost)]
#[case::foreign_255(255, "Error", VerdictKind::Lost)]
#[case::foreign(99, "Error", VerdictKind::Lost)]
#[case::unknown_to_the_node(137, "ContainerStatusUnknown", VerdictKind::NodeLost)]
#[case::no_such_binary(128, "StartError", VerdictKind::ConfigMissing)]
fn an_end_without_a_report_is_explained_from_the_container(
    #[case] code: i32,
    #[case] reason: &str,
    #[case] kind: VerdictKind,
) {
    let pod = pod(ended_container(code, reason, ""));
    let verdict = end(see(&failed(), &[pod], &[], 60));
    assert_eq!(verdict.kind, kind);
    assert!(!verdict.executor_reported());
    assert!(
        verdict
            .evidence
            .iter()
            .any(|fact| fact.text.contains(&format!("exit code {code}"))),
        "{:?}",
        verdict.evidence
    );
    assert!(verdict.evidence.contains(&Evidence::new("node", "node-3")));
}

/// The API server moves the time of a deletion when the kubelet confirms it, which is after the end.
#[rstest]
#[case::stopped(143, VerdictKind::Deleted)]
#[case::failed_by_itself(1, VerdictKind::StepFailed)]
fn a_deletion_that_the_kubelet_has_confirmed_explains_a_signal(
    #[case] code: i32,
    #[case] kind: VerdictKind,
) {
    let mut pod = pod(ended_container(code, "Error", ""));
    pod.metadata.deletion_timestamp = Some(serde_json::from_value(json!(time(52))).unwrap());
    pod.metadata.deletion_grace_period_seconds = Some(0);
    let verdict = end(see(&failed(), &[pod], &[], 60));
    assert_eq!(verdict.kind, kind, "{verdict:?}");
}

/// The kernel killed the tool, and the executor survived it: so it is with control groups of version 1.
#[test]
fn the_verdict_of_a_tool_out_of_memory_has_the_executors_error() {
    let report = REPORT.replace(r#""hint":"look at the log","#, "");
    let pod = pod(ended_container(1, "OOMKilled", &report));
    let verdict = end(see(&failed(), &[pod], &[], 60));
    assert_eq!(verdict.kind, VerdictKind::OomKilled);
    let sentence =
        "init failed; a process of the step was killed for using more memory than its limit of 2Gi";
    assert_eq!(verdict.sentence, sentence);
    assert!(verdict.advice.unwrap().contains("memory limit"));
    assert_eq!(verdict.outcome, Exit::StepFailed);
    assert!(verdict.report.is_some());
}

#[test]
fn out_of_memory_names_the_limit() {
    let pod = pod(ended_container(137, "OOMKilled", ""));
    let verdict = end(see(&failed(), &[pod], &[], 60));
    assert!(verdict.sentence.contains("2Gi"), "{}", verdict.sentence);
    assert!(verdict.advice.unwrap().contains("memory limit"));
}

#[test]
fn a_killed_executor_was_out_of_memory_only_if_the_kubelet_reports_it() {
    let mut pod = pod(ended_container(137, "Error", ""));
    let limited = end(see(&failed(), std::slice::from_ref(&pod), &[], 60));
    assert_eq!(limited.kind, VerdictKind::Signalled);
    let words = "one possible cause is its memory limit of 2Gi";
    assert!(limited.sentence.contains(words), "{}", limited.sentence);
    pod.spec.as_mut().unwrap().containers[0].resources = None;
    let verdict = end(see(&failed(), &[pod], &[], 60));
    assert_eq!(verdict.kind, VerdictKind::Signalled);
    assert_eq!(verdict.outcome, Exit::Signal(9));
    assert!(!verdict.sentence.contains("memory"), "{}", verdict.sentence);
}

#[rstest]
#[case("Evicted", VerdictKind::Evicted, Started::No)]
#[case("Preempting", VerdictKind::Preempted, Started::No)]
#[case("NodeLost", VerdictKind::NodeLost, Started::Unknown)]
#[case("Terminated", VerdictKind::NodeLost, Started::No)]
#[case("NodeShutdown", VerdictKind::NodeLost, Started::No)]
#[case("OutOfcpu", VerdictKind::Infrastructure, Started::No)]
#[case("UnexpectedAdmissionError", VerdictKind::Infrastructure, Started::No)]
fn the_reason_of_the_pod_counts(
    #[case] reason: &str,
    #[case] kind: VerdictKind,
    #[case] started: Started,
) {
    let pod = pod(json!({"status": {"phase": "Failed", "reason": reason,
        "message": "The node was low on resource: ephemeral-storage."}}));
    let verdict = end(see(&failed(), &[pod], &[], 60));
    assert_eq!((verdict.kind, verdict.started), (kind, started));
    assert!(verdict.evidence.iter().any(|fact| {
        fact.text
            .contains("The node was low on resource: ephemeral-storage.")
    }));
}

#[rstest]
#[case("PreemptionByScheduler", VerdictKind::Preempted)]
#[case("DeletionByTaintManager", VerdictKind::NodeLost)]
#[case("DeletionByPodGC", VerdictKind::NodeLost)]
#[case("EvictionByEvictionAPI", VerdictKind::Evicted)]
#[case("TerminationByKubelet", VerdictKind::Evicted)]
fn a_disruption_is_named(#[case] reason: &str, #[case] kind: VerdictKind) {
    let mut state = ended_container(143, "Error", "");
    merge(
        &mut state,
        json!({"status": {"conditions": [
            {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "why"}]}}),
    );
    let verdict = end(see(&failed(), &[pod(state)], &[], 60));
    assert_eq!((verdict.kind, verdict.started), (kind, Started::Yes));
    assert!(verdict.advice.unwrap().contains("plan again"));
}

#[test]
fn the_report_of_a_stopped_executor_does_not_hide_the_cause() {
    let report = r#"{"jobId":"412","stepId":"7","outcome":143,"error":"stopped by SIGTERM"}"#;
    let mut state = ended_container(143, "Error", report);
    merge(
        &mut state,
        json!({"status": {"reason": "Evicted", "message": "disk pressure"}}),
    );
    let verdict = end(see(&failed(), &[pod(state)], &[], 60));
    assert_eq!(verdict.kind, VerdictKind::Evicted);
    assert!(verdict.executor_reported());
    assert!(
        verdict
            .evidence
            .contains(&Evidence::new("executor", "stopped by SIGTERM"))
    );
}

#[test]
fn the_verdict_of_a_deadline_has_its_length() {
    let job = over("Failed", "DeadlineExceeded");
    let verdict = end(see(&job, &[], &[], 21_700));
    assert_eq!(verdict.kind, VerdictKind::DeadlineExceeded);
    assert!(verdict.sentence.contains("21600 s"), "{}", verdict.sentence);

    let finished = pod(ended_container(1, "Error", REPORT));
    let verdict = end(see(&job, &[finished], &[], 21_700));
    assert_eq!(
        verdict.kind,
        VerdictKind::StepFailed,
        "the executor was done first"
    );
}

/// As it is before Kubernetes 1.31.
#[test]
fn a_job_that_failed_at_its_deadline_is_over_with_its_pod() {
    let late = job(json!({"status": {"conditions": [
        {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "lastTransitionTime": time(100)}]}}));
    let running = |deletion: Option<i64>| {
        pod(json!({
            "metadata": {"deletionTimestamp": deletion.map(time)},
            "status": {"phase": "Running", "containerStatuses": [{
                "name": "executor", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "state": {"running": {"startedAt": time(5)}}}]},
        }))
    };
    for (deletion, overdue) in [(None, 130), (Some(400), 430)] {
        let pods = [running(deletion)];
        let held = wait(see(&late, &pods, &[], overdue - 1));
        assert_eq!(
            (held.reason, held.until),
            (WaitReason::Stopping, Some(at(overdue)))
        );
        let verdict = end(see(&late, &pods, &[], overdue));
        assert_eq!(verdict.kind, VerdictKind::DeadlineExceeded);
    }
    let ended = pod(ended_container(143, "Error", ""));
    let verdict = end(see(&late, &[ended], &[], 101));
    assert_eq!(verdict.kind, VerdictKind::DeadlineExceeded);
}

#[test]
fn a_failed_job_without_a_trace_is_lost() {
    let verdict = end(see(&failed(), &[], &[], 60));
    assert_eq!(verdict.kind, VerdictKind::Lost);
    assert_eq!(verdict.started, Started::Unknown);
    assert!(verdict.evidence[0].text.contains("BackoffLimitExceeded"));
}

#[test]
fn a_deleted_job_is_deleted_before_or_while_it_ran() {
    let before = gone(&job(json!({})), &[], &[]);
    assert_eq!(
        (before.kind, before.started),
        (VerdictKind::Deleted, Started::No)
    );
    let running = pod(
        json!({"status": {"phase": "Running", "containerStatuses": [{
        "name": "executor", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "state": {"running": {"startedAt": time(5)}}}]}}),
    );
    let during = gone(&job(json!({})), &[running], &[]);
    assert_eq!(
        (during.kind, during.started),
        (VerdictKind::Deleted, Started::Yes)
    );
    let reported = pod(ended_container(0, "Completed", r#"{"outcome":0}"#));
    let after = gone(&job(json!({})), &[reported], &[]);
    assert_eq!(after.kind, VerdictKind::Completed);
}

#[test]
fn a_deleted_job_whose_pod_may_not_be_looked_at_may_have_changed_something() {
    let cancelled = json!({"annotations": {CANCELLED: time(3)}});
    for (metadata, kind) in [
        (json!({}), VerdictKind::Deleted),
        (cancelled, VerdictKind::Cancelled),
    ] {
        for count in ["active", "terminating", "failed"] {
            let job = job(json!({"metadata": metadata, "status": {count: 1}}));
            let verdict = gone(&job, &[], &[]);
            assert_eq!(
                (verdict.kind, verdict.started),
                (kind, Started::Unknown),
                "{count}"
            );
            assert!(verdict.advice.unwrap().starts_with("plan again"), "{count}");
        }
    }
    let never = job(json!({"status": {"active": 0, "failed": 0}}));
    assert_eq!(gone(&never, &[], &[]).started, Started::No);
}

#[test]
fn the_last_pod_decides_and_earlier_ones_are_evidence() {
    let first = pod(ended_container(75, "Error", ""));
    let mut second = pod(ended_container(0, "Completed", r#"{"outcome":0}"#));
    second.metadata.uid = Some("p2".into());
    second.metadata.creation_timestamp = first
        .metadata
        .creation_timestamp
        .clone()
        .map(|_| k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(70)));
    second.metadata.name = Some("second".into());
    let verdict = end(see(&over("Complete", ""), &[second, first], &[], 100));
    assert_eq!(verdict.kind, VerdictKind::Completed);
    assert_eq!(verdict.pod.as_deref(), Some("second"));
    assert!(
        verdict
            .evidence
            .iter()
            .any(|fact| fact.source.starts_with("earlier pod"))
    );
}

fn created(mut pod: Pod, uid: &str, seconds: i64) -> Pod {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    pod.metadata.uid = Some(uid.into());
    pod.metadata.name = Some(format!("job-412-7-{uid}"));
    pod.metadata.creation_timestamp = Some(Time(at(seconds)));
    pod
}

fn disrupted(code: i32, message: &str) -> Pod {
    let mut ended = ended_container(code, "Error", message);
    merge(
        &mut ended,
        json!({"status": {"conditions": [
        {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]}}),
    );
    pod(ended)
}

#[test]
fn a_pod_that_finds_the_step_begun_leaves_the_verdict_to_the_one_that_began_it() {
    let claimed = r#"{"outcome":76,"error":"taken","unreported":true}"#;
    let first = disrupted(137, "");
    let second = created(pod(ended_container(76, "Error", claimed)), "p2", 70);
    let verdict = end(see(&failed(), &[second.clone(), first], &[], 100));
    assert_eq!(
        (verdict.kind, verdict.started),
        (VerdictKind::Evicted, Started::Yes)
    );
    assert!(
        !verdict.executor_reported(),
        "the platform was told by neither"
    );
    let mut evidence = verdict.evidence.iter();
    assert!(evidence.any(|fact| fact.source == "later pod job-412-7-p2"));
    // Without the first, its end is not known, but the platform has to be told all the same.
    let verdict = end(see(&failed(), &[second], &[], 100));
    assert_eq!(verdict.kind, VerdictKind::Claimed);
    assert!(!verdict.executor_reported());
}

#[test]
fn the_verdict_of_a_disrupted_pod_that_began_nothing_has_the_reason() {
    let stopped = r#"{"outcome":75,"error":"stopped by signal 15","unreported":true}"#;
    let verdict = end(see(&failed(), &[disrupted(75, stopped)], &[], 60));
    assert_eq!(
        (verdict.kind, verdict.started),
        (VerdictKind::Evicted, Started::No)
    );
    assert_eq!(verdict.outcome, Exit::Infrastructure);
    assert!(!verdict.executor_reported());
}

#[rstest]
#[case(75, 2, true)]
#[case(137, 2, true)]
// It has stopped in order, and told the platform.
#[case(143, 2, false)]
#[case(137, 0, false)]
fn a_disrupted_pod_is_followed_by_another_while_that_is_safe(
    #[case] code: i32,
    #[case] backoff_limit: i32,
    #[case] again: bool,
) {
    let job = job(json!({"spec": {"backoffLimit": backoff_limit}}));
    for going in [false, true] {
        let mut pod = disrupted(code, "");
        if going {
            pod.metadata.deletion_timestamp = pod.metadata.creation_timestamp.clone();
        }
        let seen = see(&job, &[pod], &[], 60);
        let waits =
            matches!(&seen, Observation::Waiting(wait) if wait.reason == WaitReason::AnotherPod);
        assert_eq!(waits, again, "{code} {going}: {seen:?}");
    }
}

#[test]
fn a_job_that_is_seen_before_its_pod_has_not_lost_its_pod() {
    let counted = job(json!({"status": {"active": 1}}));
    let held = wait(see(&counted, &[], &[], 1));
    assert_eq!(held.reason, WaitReason::Pod);
    assert!(!held.reason.is_news());
    assert_eq!(wait(see(&counted, &[], &[], 9000)).until, None);
}

#[test]
fn a_run_whose_pod_is_gone_is_not_given_up_as_one_that_never_had_any() {
    let failed = job(json!({"status": {"failed": 1}}));
    assert_eq!(
        wait(see(&failed, &[], &[], 9000)).reason,
        WaitReason::AnotherPod
    );
    let made = event("SuccessfulCreate", "Created pod: job-412-7-x9k2p", 2);
    let uncounted = job(json!({}));
    assert_eq!(
        wait(see(&uncounted, &[], &[made], 9000)).until,
        None,
        "Kubernetes is about to replace it"
    );
}

/// As the kubelet leaves it of a container that it lost, and of one that never was.
fn status_unknown() -> Value {
    json!({"status": {"phase": "Failed", "containerStatuses": [{
        "name": "executor", "image": "", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "startedAt": null,
            "message": "The container could not be located when the pod was terminated"}}}]}})
}

fn started(uid: &str, path: &str) -> Event {
    let mut event = event("Started", "Container started", 5);
    event.involved_object.uid = Some(uid.into());
    event.involved_object.field_path = Some(path.into());
    event
}

#[test]
fn a_container_that_the_node_lost_had_begun_if_the_kubelet_reported_its_start() {
    let pod = pod(status_unknown());
    let start_of = |events: &[Event]| {
        let verdict = end(see(&failed(), std::slice::from_ref(&pod), events, 60));
        assert_eq!(verdict.kind, VerdictKind::NodeLost);
        let advice = verdict.advice.unwrap();
        assert!(advice.starts_with("plan again before applying"), "{advice}");
        verdict.started
    };
    assert_eq!(
        start_of(&[started("p1", "spec.containers{executor}")]),
        Started::Yes
    );
    assert_eq!(start_of(&[]), Started::Unknown);
    assert_eq!(
        start_of(&[started("p1", "spec.initContainers{proxy}")]),
        Started::Unknown
    );
}

#[rstest]
#[case::bad_configuration(64, "Error", Started::No)]
#[case::bad_job_data(65, "Error", Started::No)]
#[case::infrastructure(75, "Error", Started::No)]
#[case::no_such_binary(128, "StartError", Started::No)]
// Another pod of the run has the claim.
#[case::claimed(76, "Error", Started::Yes)]
#[case::failed(1, "Error", Started::Yes)]
#[case::killed(137, "Error", Started::Yes)]
#[case::foreign(99, "Error", Started::Yes)]
#[case::restarted_node(255, "Unknown", Started::Yes)]
fn the_exit_code_decides_whether_the_step_began(
    #[case] code: i32,
    #[case] reason: &str,
    #[case] started: Started,
) {
    let pod = pod(ended_container(code, reason, ""));
    assert_eq!(end(see(&failed(), &[pod], &[], 60)).started, started);
}

fn unschedulable() -> Pod {
    created(
        pod(
            json!({"spec": {"nodeName": null}, "status": {"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
         "message": "0/1 nodes are available: 1 node(s) were unschedulable.", "lastTransitionTime": time(400)}]}}),
        ),
        "p2",
        400,
    )
}

/// The node was killed in the middle of the apply, and no node takes the pod in the place of the first.
#[rstest]
#[case::while_it_waits(job(json!({})))]
#[case::at_the_deadline(over("Failed", "BackoffLimitExceeded"))]
fn a_replacement_that_never_ran_does_not_hide_the_pod_that_began(#[case] job: Job) {
    let mut lost = ended_container(137, "ContainerStatusUnknown", "");
    merge(
        &mut lost,
        json!({"metadata": {"deletionTimestamp": time(350)}, "status": {"conditions": [
        {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}]}}),
    );
    let verdict = end(see(&job, &[unschedulable(), pod(lost)], &[], 1400));
    assert_eq!(
        (verdict.kind, verdict.started),
        (VerdictKind::NodeLost, Started::Yes)
    );
    assert_eq!(verdict.outcome, Exit::Signal(9));
    let advice = verdict.advice.unwrap();
    assert!(
        advice.contains("some changes may have been made"),
        "{advice}"
    );
}

/// The object of the first pod is gone, as after a restart of the launcher.
#[rstest]
#[case::counted(json!({"failed": 1, "active": 1}), vec![], Started::Unknown)]
#[case::created(json!({}), vec![event("SuccessfulCreate", "Created pod: job-412-7-p1", 1)], Started::Unknown)]
#[case::started(json!({}), vec![started("p1", "spec.containers{executor}")], Started::Yes)]
#[case::late(json!({}), vec![], Started::Unknown)]
#[case::refused_before(json!({}), vec![event("FailedCreate", "exceeded quota: runs", 100)], Started::No)]
fn a_replacement_that_never_ran_is_no_evidence_about_a_deleted_pod(
    #[case] status: Value,
    #[case] events: Vec<Event>,
    #[case] started: Started,
) {
    let job = job(json!({"status": status}));
    let verdict = end(see(&job, &[unschedulable()], &events, 1400));
    assert_eq!(
        (verdict.kind, verdict.started),
        (VerdictKind::NeverScheduled, started)
    );
    let advice = verdict.advice.unwrap();
    assert_eq!(
        advice.contains("plan again before applying"),
        started != Started::No,
        "{advice}"
    );
    // This code would say that the step is safe to run again.
    assert_eq!(
        verdict.outcome == Exit::Infrastructure,
        started == Started::No
    );
}

#[rstest]
#[case::out_of_memory(137, "OOMKilled")]
#[case::killed(137, "Error")]
#[case::unknown(137, "ContainerStatusUnknown")]
fn a_plan_that_was_cut_off_has_changed_nothing(#[case] code: i32, #[case] reason: &str) {
    for (step_type, may_change) in [
        ("plan", false),
        ("plan-destroy", false),
        ("apply", true),
        ("custom-scripts", true),
    ] {
        let mut job = failed();
        job.metadata
            .labels
            .as_mut()
            .unwrap()
            .insert("mayfly.dev/step-type".into(), step_type.into());
        let verdict = end(see(
            &job,
            &[pod(ended_container(code, reason, ""))],
            &[],
            60,
        ));
        let advice = verdict.advice.unwrap();
        assert_eq!(
            advice.contains("changes may have been made"),
            may_change,
            "{step_type}: {advice}"
        );
        assert_eq!(
            advice.contains("a plan changes nothing"),
            !may_change,
            "{step_type}: {advice}"
        );
    }
}

#[test]
fn to_start_again_is_advised_only_where_nothing_began() {
    for kind in VerdictKind::ALL {
        for started in [Started::Yes, Started::Unknown] {
            for may_change in [true, false] {
                let next = advice::next_step(kind, started, may_change).unwrap_or_default();
                assert!(
                    !next.contains("start the run again"),
                    "{kind} {started:?}: {next}"
                );
            }
        }
    }
}

#[test]
fn what_is_not_known_is_null_for_machines_and_stays_unknown_when_it_is_read_again() {
    let verdict = end(see(&failed(), &[], &[], 60));
    let value = serde_json::to_value(&verdict).unwrap();
    assert_eq!(value["started"], Value::Null);
    assert_eq!(serde_json::from_value::<Verdict>(value).unwrap(), verdict);
    // As an older launcher has written it.
    let mut old = serde_json::to_value(&verdict).unwrap();
    old["started"] = json!(true);
    old.as_object_mut().unwrap().remove("mayChange");
    let old: Verdict = serde_json::from_value(old).unwrap();
    assert_eq!((old.started, old.may_change), (Started::Yes, true));
}

/// `kubectl delete pod`: nothing but the deletion marks the pod.
#[rstest]
#[case::with_a_report(
    143,
    r#"{"jobId":"412","stepId":"7","outcome":143,"error":"stopped by SIGTERM"}"#,
    Started::Yes
)]
#[case::silent(143, "", Started::Yes)]
#[case::killed(137, "", Started::Yes)]
#[case::before_the_claim(75, "", Started::No)]
fn the_verdict_of_a_deleted_pod_names_the_deletion(
    #[case] code: i32,
    #[case] message: &str,
    #[case] started: Started,
) {
    let deleted = |seconds: i64| {
        let mut patch = ended_container(code, "Error", message);
        merge(
            &mut patch,
            json!({"metadata": {"deletionTimestamp": time(seconds),
            "deletionGracePeriodSeconds": 30}}),
        );
        pod(patch)
    };
    let verdict = end(see(&failed(), &[deleted(75)], &[], 60));
    assert_eq!(
        (verdict.kind, verdict.started),
        (VerdictKind::Deleted, started)
    );
    // It had ended at 50, before it was deleted.
    let verdict = end(see(&failed(), &[deleted(1000)], &[], 1000));
    assert_ne!(verdict.kind, VerdictKind::Deleted);
    // The Job controller deletes pods too, and the Job says why.
    let late = over("Failed", "DeadlineExceeded");
    let verdict = end(see(&late, &[deleted(75)], &[], 60));
    assert_eq!(
        (verdict.kind, verdict.started),
        (VerdictKind::DeadlineExceeded, started)
    );
}

/// The Job is deleted after that, and before the launcher has told the platform.
#[test]
fn the_end_of_an_executor_is_not_hidden_by_a_later_deletion() {
    let mut patch = ended_container(137, "OOMKilled", "");
    merge(
        &mut patch,
        json!({"metadata": {"deletionTimestamp": time(90), "deletionGracePeriodSeconds": 30}}),
    );
    let verdict = gone(&job(json!({})), &[pod(patch)], &[]);
    assert_eq!(verdict.kind, VerdictKind::OomKilled);
}

#[test]
fn a_failed_job_is_evidence_of_a_deleted_pod() {
    let failed = |message: &str| {
        job(json!({"status": {"conditions": [
            {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": message}]}}))
    };
    let by_code = failed(
        "Container executor for pod runs/job-412-7-x9k2p failed with exit code 143 matching FailJob rule at index 0",
    );
    let kind = |events: &[Event]| end(see(&by_code, &[], events, 60)).kind;
    assert_eq!(kind(&[]), VerdictKind::Signalled);
    let preempted = event("Preempted", "Preempted by a pod on node node-3", 50);
    assert_eq!(kind(&[preempted]), VerdictKind::Preempted);
    let evicted = event("Evicted", "The node was low on resource: memory.", 50);
    assert_eq!(kind(&[evicted]), VerdictKind::Evicted);
    let by_condition = failed(
        "Pod runs/job-412-7-x9k2p has condition DisruptionTarget matching FailJob rule at index 1",
    );
    assert_eq!(
        end(see(&by_condition, &[], &[], 60)).kind,
        VerdictKind::Evicted
    );
    assert_eq!(
        failure_of_pod(&by_condition),
        Some(("job-412-7-x9k2p", None))
    );
}

/// A container that runs beside the executor, as a native sidecar or as what a webhook put there.
fn beside() -> Value {
    json!({"name": "mesh", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "state": {"running": {"startedAt": time(5)}}})
}

#[test]
fn a_run_ends_with_its_executor_and_what_outlives_it_is_stopped_after_its_time() {
    let mut patch = ended_container(0, "Completed", r#"{"outcome":0}"#);
    merge(&mut patch, json!({"status": {"phase": "Running"}}));
    let mut alone = pod(patch.clone());
    patch["status"]["containerStatuses"]
        .as_array_mut()
        .unwrap()
        .push(beside());
    let with_mesh = [pod(patch)];
    let job = job(json!({}));
    let verdict = end(see(&job, &with_mesh, &[], 50));
    assert_eq!(verdict.kind, VerdictKind::Completed);
    assert!(verdict.executor_reported() && verdict.job_over);
    let (until, fact) = lingers(&with_mesh, &Timeouts::default()).unwrap();
    assert_eq!(until, at(110), "a minute after the executor's end");
    assert!(fact.text.contains("`mesh`"));
    // A native sidecar is the kubelet's to end, and may take the grace period of the pod for that.
    let native = serde_json::from_value(json!([beside()])).unwrap();
    alone.status.as_mut().unwrap().init_container_statuses = native;
    let verdict = end(see(&job, std::slice::from_ref(&alone), &[], 50));
    assert_eq!(verdict.kind, VerdictKind::Completed);
    assert!(verdict.executor_reported() && verdict.job_over);
    assert!(lingers(&[alone], &Timeouts::default()).is_none());
}

/// The Job controller makes one only once the pod has ended.
#[test]
fn where_another_pod_would_follow_what_outlives_the_executor_is_given_its_time_first() {
    let mut patch = ended_container(75, "Error", "");
    merge(&mut patch, json!({"status": {"phase": "Running"}}));
    patch["status"]["containerStatuses"]
        .as_array_mut()
        .unwrap()
        .push(beside());
    let (job, pods) = (job(json!({})), [pod(patch)]);
    let wait = wait(see(&job, &pods, &[], 60));
    assert_eq!(wait.reason, WaitReason::Stopping);
    assert_eq!(wait.until, Some(at(110)));
    let verdict = end(see(&job, &pods, &[], 110));
    assert_eq!(verdict.kind, VerdictKind::Infrastructure);
    assert!(!verdict.job_over, "it has to be stopped");
    let mut evidence = verdict.evidence.iter();
    assert!(evidence.any(|fact| fact.text.contains("`mesh`")));
}

/// A native sidecar still runs in each of these pods.
#[rstest]
#[case::failed(1, "Error", false, Some(VerdictKind::StepFailed))]
#[case::out_of_memory(137, "OOMKilled", false, Some(VerdictKind::OomKilled))]
#[case::evicted_at_work(143, "Error", true, Some(VerdictKind::Evicted))]
#[case::began_nothing(75, "Error", false, None)]
#[case::killed_by_a_disruption(137, "Error", true, None)]
fn a_run_is_over_when_its_executor_is_unless_another_pod_follows(
    #[case] code: i32,
    #[case] reason: &str,
    #[case] is_disrupted: bool,
    #[case] kind: Option<VerdictKind>,
) {
    let mut patch = ended_container(code, reason, "");
    merge(&mut patch, json!({"status": {"phase": "Running"}}));
    if is_disrupted {
        merge(
            &mut patch,
            json!({"status": {"conditions": [
            {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]}}),
        );
    }
    match (see(&job(json!({})), &[pod(patch)], &[], 51), kind) {
        (Observation::Ended(verdict), Some(kind)) => assert_eq!(verdict.kind, kind),
        (Observation::Waiting(wait), None) => assert_eq!(wait.reason, WaitReason::AnotherPod),
        (other, _) => panic!("{other:?}"),
    }
}

#[test]
fn a_pod_that_failed_is_older_than_its_replacement_of_the_same_second() {
    let failed = pod(ended_container(75, "Error", ""));
    let mut replacement = pod(ended_container(0, "Completed", r#"{"outcome":0}"#));
    // Names are random, so the order must not hang on them.
    replacement.metadata.name = Some("a".into());
    for pods in [[failed.clone(), replacement.clone()], [replacement, failed]] {
        let verdict = end(see(&over("Complete", ""), &pods, &[], 100));
        assert_eq!(verdict.kind, VerdictKind::Completed);
    }
}

#[test]
fn a_failing_init_container_is_named_and_a_native_side_car_ignored() {
    let status = |name: &str, code: i32| {
        json!({"name": name, "image": "", "imageID": "", "ready": false,
        "restartCount": 0, "state": {"terminated": {"exitCode": code, "reason": "Error", "message": "no CA"}}})
    };
    let spec = json!([{"name": "proxy", "restartPolicy": "Always"}, {"name": "certificates"}]);
    let broken = pod(
        json!({"spec": {"initContainers": spec}, "status": {"phase": "Failed",
        "initContainerStatuses": [status("proxy", 137), status("certificates", 3)]}}),
    );
    let verdict = end(see(&failed(), &[broken], &[], 60));
    assert_eq!(verdict.kind, VerdictKind::Infrastructure);
    assert!(
        verdict.sentence.contains("`certificates`") && verdict.sentence.contains('3'),
        "{}",
        verdict.sentence
    );

    let mut fine = ended_container(0, "Completed", r#"{"outcome":0}"#);
    merge(
        &mut fine,
        json!({"spec": {"initContainers": spec}, "status": {
        "initContainerStatuses": [status("proxy", 137), status("certificates", 0)]}}),
    );
    let verdict = end(see(&over("Complete", ""), &[pod(fine)], &[], 60));
    assert_eq!(verdict.kind, VerdictKind::Completed);
}

#[test]
fn a_suspended_job_waits_for_its_turn_without_limit() {
    let job = job(json!({"spec": {"suspend": true}, "status": null}));
    let held = wait(see(&job, &[], &[], 100_000));
    assert_eq!((held.reason, held.until), (WaitReason::Queued, None));
}

#[test]
fn the_wait_for_a_quota_has_the_message_of_the_api_server() {
    let words = "Error creating: pods \"job-412-7-abcde\" is forbidden: exceeded quota: runs, requested: pods=1, used: pods=10, limited: pods=10";
    let held = wait(see(
        &job(json!({})),
        &[],
        &[event("FailedCreate", words, 1)],
        10_000,
    ));
    assert_eq!((held.reason, held.until), (WaitReason::Quota, None));
    assert!(
        held.sentence
            .ends_with("exceeded quota: runs, requested: pods=1, used: pods=10, limited: pods=10"),
        "{}",
        held.sentence
    );
    let verdict = end(see(
        &over("Failed", "DeadlineExceeded"),
        &[],
        &[event("FailedCreate", words, 1)],
        30_000,
    ));
    assert_eq!(verdict.kind, VerdictKind::QuotaExceeded);
    assert!(verdict.sentence.contains("exceeded quota"));
    assert!(
        verdict
            .evidence
            .iter()
            .any(|fact| fact.text.contains("DeadlineExceeded"))
    );
    let verdict = end(see(
        &failed(),
        &[],
        &[event("FailedCreate", words, 1)],
        30_000,
    ));
    assert_eq!(verdict.kind, VerdictKind::QuotaExceeded);
}

#[test]
fn a_refused_pod_is_explained_at_once_and_failed_after_its_grace() {
    let words = "Error creating: pods \"x\" is forbidden: violates PodSecurity \"restricted:latest\": hostPath volumes";
    let events = [event("FailedCreate", words, 1)];
    let held = wait(see(&job(json!({})), &[], &events, 5));
    assert_eq!(
        (held.reason, held.until),
        (WaitReason::Admission, Some(at(120)))
    );
    let verdict = end(see(&job(json!({})), &[], &events, 120));
    assert_eq!(verdict.kind, VerdictKind::AdmissionRefused);
    assert!(!verdict.job_over);
    assert_eq!(verdict.started, Started::No);
    assert!(verdict.sentence.contains("violates PodSecurity"));
}

#[test]
fn a_missing_pod_is_explained_then_failed() {
    let job = job(json!({}));
    let first = wait(see(&job, &[], &[], 10));
    assert!(!first.reason.is_news());
    assert_eq!(first.until, Some(at(30)));
    let then = wait(see(&job, &[], &[], 30));
    assert!(then.reason.is_news());
    assert_eq!(
        (then.reason, then.until),
        (WaitReason::NoPod, Some(at(120)))
    );
    assert_eq!(
        end(see(&job, &[], &[], 120)).kind,
        VerdictKind::Infrastructure
    );
}

#[test]
fn the_schedulers_message_is_shown_until_the_run_is_given_up() {
    let words = "0/12 nodes are available: 12 Insufficient cpu.";
    let pod = pod(
        json!({"spec": {"nodeName": null}, "status": {"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words,
         "lastTransitionTime": time(2)}]}}),
    );
    let held = wait(see(&job(json!({})), std::slice::from_ref(&pod), &[], 901));
    assert_eq!((held.reason, held.until), (WaitReason::Node, Some(at(902))));
    assert!(held.sentence.ends_with(words));
    let verdict = end(see(&job(json!({})), &[pod], &[], 902));
    assert_eq!(verdict.kind, VerdictKind::NeverScheduled);
    assert!(verdict.sentence.ends_with(words));
}

#[rstest]
#[case("ErrImagePull", VerdictKind::ImageNotPulled, WaitReason::Image)]
#[case("ImagePullBackOff", VerdictKind::ImageNotPulled, WaitReason::Image)]
#[case("ErrImageNeverPull", VerdictKind::ImageNotPulled, WaitReason::Image)]
#[case(
    "CreateContainerConfigError",
    VerdictKind::ConfigMissing,
    WaitReason::Config
)]
#[case("CreateContainerError", VerdictKind::Infrastructure, WaitReason::Start)]
fn a_container_that_cannot_start_has_thirty_seconds(
    #[case] reason: &str,
    #[case] kind: VerdictKind,
    #[case] waits_for: WaitReason,
) {
    let words = "secret \"cloud-credentials\" not found";
    let pod = waiting_container(reason, words);
    let held = wait(see(&job(json!({})), std::slice::from_ref(&pod), &[], 31));
    assert_eq!((held.reason, held.until), (waits_for, Some(at(32))));
    assert!(held.sentence.contains(words), "{}", held.sentence);
    let verdict = end(see(&job(json!({})), &[pod], &[], 32));
    assert_eq!(verdict.kind, kind);
    assert!(verdict.sentence.contains(words));
    assert!(!verdict.job_over);
}

/// A queue of the cluster may start the Job before its Secret is stored, and the next delivery of the platform stores it.
#[rstest]
#[case(json!({}), 60)]
#[case(json!({"mayfly.dev/stored-at": time(32)}), 62)]
fn a_job_of_a_queue_has_time_for_its_job_data(#[case] noted: Value, #[case] until: i64) {
    let queue = json!({"kueue.x-k8s.io/queue-name": "runs"});
    let job = job(
        json!({"metadata": {"creationTimestamp": time(0), "labels": queue, "annotations": noted}}),
    );
    let pod = waiting_container(
        "CreateContainerConfigError",
        "secret \"job-412-7\" not found",
    );
    let held = wait(see(&job, std::slice::from_ref(&pod), &[], until - 1));
    assert_eq!(
        (held.reason, held.until),
        (WaitReason::Config, Some(at(until)))
    );
    let verdict = end(see(&job, &[pod], &[], until));
    assert_eq!(verdict.kind, VerdictKind::ConfigMissing);
}

#[test]
fn a_name_that_is_no_image_name_fails_at_once() {
    let pod = waiting_container("InvalidImageName", "couldn't parse image name \"A B\"");
    assert_eq!(
        end(see(&job(json!({})), &[pod], &[], 3)).kind,
        VerdictKind::ImageNotPulled
    );
}

#[test]
fn a_slow_pull_that_fails_late_has_its_grace_from_the_failure() {
    let pod = waiting_container(
        "ImagePullBackOff",
        "Back-off pulling image \"registry.example/executor:1\"",
    );
    let complaint = event(
        "Failed",
        "Failed to pull image \"registry.example/executor:1\": 401 Unauthorized",
        200,
    );
    let held = wait(see(&job(json!({})), &[pod], &[complaint], 210));
    assert_eq!(held.until, Some(at(230)));
    assert!(
        held.sentence.contains("401 Unauthorized"),
        "{}",
        held.sentence
    );
}

#[test]
fn a_back_off_repeats_the_cause_and_is_no_news() {
    let cause = "failed to resolve reference \"registry.example/executor:1\": not found";
    let said = |reason: &str, message: &str| {
        let pod = waiting_container(reason, message);
        wait(see(&job(json!({})), &[pod], &[], 10)).sentence
    };
    let back_off =
        format!("Back-off pulling image \"registry.example/executor:1\": ErrImagePull: {cause}");
    assert_eq!(
        said("ErrImagePull", cause),
        said("ImagePullBackOff", &back_off)
    );
}

/// In the words of the kubelet of Kubernetes 1.36.
#[rstest]
#[case::config_map("MountVolume.SetUp failed for volume \"config\" : configmap \"cli\" not found")]
#[case::secret("MountVolume.SetUp failed for volume \"credentials\" : secret \"cloud\" not found")]
#[case::one_of_several(
    "MountVolume.SetUp failed for volume \"all\" : [secret \"a\" not found, configmap \"b\" not found]"
)]
#[case::key(
    "MountVolume.SetUp failed for volume \"config\" : configmap references non-existent config key: rc"
)]
fn a_volume_whose_source_is_missing_has_thirty_seconds(#[case] words: &str) {
    let pod = waiting_container("ContainerCreating", "");
    let mount = event("FailedMount", words, 10);
    // It says again and again that it still waits, and then does not say for what.
    let unmounted = "Unable to attach or mount volumes: unmounted volumes=[config]: timed out waiting for the condition";
    let events = [mount, event("FailedMount", unmounted, 20)];
    let seen = |seconds| {
        see(
            &job(json!({})),
            std::slice::from_ref(&pod),
            &events,
            seconds,
        )
    };
    let held = wait(seen(39));
    assert_eq!(
        (held.reason, held.until),
        (WaitReason::Config, Some(at(40)))
    );
    let verdict = end(seen(40));
    assert_eq!(
        (verdict.kind, verdict.started),
        (VerdictKind::ConfigMissing, Started::No)
    );
    assert!(verdict.sentence.contains(words), "{}", verdict.sentence);
    assert!(!verdict.job_over);
}

#[rstest]
#[case("MountVolume.SetUp failed for volume \"nfs\" : mount failed: exit status 32")]
#[case(
    "MountVolume.SetUp failed for volume \"x\" : failed to sync configmap cache: timed out waiting for the condition"
)]
#[case("MountVolume.SetUp failed for volume \"x\" : object \"runs\"/\"cli\" not registered")]
fn a_volume_that_may_still_be_mounted_has_five_minutes(#[case] words: &str) {
    let pod = waiting_container("ContainerCreating", "");
    let events = [event("FailedMount", words, 10)];
    let seen = |seconds| {
        see(
            &job(json!({})),
            std::slice::from_ref(&pod),
            &events,
            seconds,
        )
    };
    assert_eq!(wait(seen(301)).until, Some(at(302)));
    assert_eq!(end(seen(302)).kind, VerdictKind::ConfigMissing);
}

/// Its image takes long; the complaint about a volume is still there.
#[test]
fn a_volume_that_was_mounted_late_is_no_reason_to_give_up() {
    let pod = waiting_container("ContainerCreating", "");
    let mount = event(
        "FailedMount",
        "MountVolume.SetUp failed for volume \"c\" : configmap \"cli\" not found",
        10,
    );
    let pulling = event(
        "Pulling",
        "Pulling image \"registry.example/executor:1\"",
        12,
    );
    let held = wait(see(
        &job(json!({})),
        std::slice::from_ref(&pod),
        &[mount.clone(), pulling],
        200,
    ));
    assert_eq!(held.reason, WaitReason::Image);
    // The event of another pod of the run.
    let mut others = mount;
    others.involved_object.uid = Some("p0".into());
    let held = wait(see(&job(json!({})), &[pod], &[others], 200));
    assert_eq!(held.reason, WaitReason::Start);
}

#[rstest]
#[case(
    "0/2 nodes are available: persistentvolumeclaim \"terrakube-plugin-pvc\" not found. preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling."
)]
#[case(
    "0/2 nodes are available: persistentvolumeclaim \"terrakube-plugin-pvc\" not found. not found"
)]
#[case("persistentvolumeclaim \"cache\" bound to non-existent persistentvolume \"pv-1\"")]
fn a_claim_that_is_missing_has_thirty_seconds(#[case] words: &str) {
    let pod = pod(
        json!({"spec": {"nodeName": null}, "status": {"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words,
         "lastTransitionTime": time(2)}]}}),
    );
    let seen = |seconds| see(&job(json!({})), std::slice::from_ref(&pod), &[], seconds);
    let held = wait(seen(31));
    assert_eq!(
        (held.reason, held.until),
        (WaitReason::Config, Some(at(32)))
    );
    let verdict = end(seen(32));
    assert_eq!(verdict.kind, VerdictKind::ConfigMissing);
    assert!(verdict.sentence.contains(words), "{}", verdict.sentence);
}

#[test]
fn a_service_account_that_is_missing_has_thirty_seconds() {
    let words = "Error creating: pods \"job-412-7-\" is forbidden: error looking up service account runs/mayfly-executor: serviceaccount \"mayfly-executor\" not found";
    let events = [event("FailedCreate", words, 1)];
    let held = wait(see(&job(json!({})), &[], &events, 29));
    assert_eq!(
        (held.reason, held.until),
        (WaitReason::Config, Some(at(30)))
    );
    for verdict in [
        see(&job(json!({})), &[], &events, 30),
        see(&failed(), &[], &events, 30),
    ] {
        let verdict = end(verdict);
        assert_eq!(verdict.kind, VerdictKind::ConfigMissing);
        assert!(verdict.sentence.ends_with("\"mayfly-executor\" not found"));
    }
}

#[test]
fn a_sandbox_that_fails_has_a_wait_of_its_own() {
    let pod = waiting_container("ContainerCreating", "");
    let events = [event(
        "FailedCreatePodSandBox",
        "network: no IP addresses available",
        10,
    )];
    let held = wait(see(&job(json!({})), &[pod], &events, 20));
    assert_eq!(held.reason, WaitReason::Sandbox);
    assert!(held.reason.is_news());
}

#[test]
fn a_pod_that_failed_before_it_did_anything_is_followed_by_another() {
    let pod = pod(ended_container(75, "Error", ""));
    assert_eq!(
        wait(see(&job(json!({})), &[pod], &[], 60)).reason,
        WaitReason::AnotherPod
    );
}

#[test]
fn events_are_fetched_only_when_they_can_change_the_observation() {
    let spoken = see(
        &failed(),
        &[pod(ended_container(1, "Error", REPORT))],
        &[],
        60,
    );
    assert!(!wants_events(&spoken));
    assert!(!wants_events(&Observation::InProgress));
    let silent = see(
        &failed(),
        &[pod(ended_container(137, "OOMKilled", ""))],
        &[],
        60,
    );
    assert!(wants_events(&silent));
}

#[test]
fn a_verdict_for_machines_carries_the_exit_code() {
    let verdict = end(see(
        &failed(),
        &[pod(ended_container(137, "OOMKilled", ""))],
        &[],
        60,
    ));
    let value = serde_json::to_value(verdict).unwrap();
    assert_eq!(value["kind"], "oom_killed");
    assert_eq!(value["outcome"], 137);
}

fn spoken(report: Value) -> Verdict {
    let mut whole = json!({"jobId": "412", "stepId": "7", "outcome": 1, "phases": []});
    merge(&mut whole, report);
    let code = i32::try_from(whole["outcome"].as_i64().unwrap()).unwrap();
    let ended = pod(ended_container(code, "Error", &whole.to_string()));
    end(see(&failed(), &[ended], &[], 60))
}

#[rstest]
#[case("memory", VerdictKind::MemoryStop)]
#[case("silence", VerdictKind::Silence)]
#[case("deadline", VerdictKind::DeadlineExceeded)]
#[case("cancelled", VerdictKind::Cancelled)]
fn whatever_made_an_executor_stop_its_step_is_the_verdict(
    #[case] reason: &str,
    #[case] kind: VerdictKind,
) {
    let verdict = spoken(json!({"stopped": reason, "error": "apply: stopped"}));
    assert_eq!((verdict.kind, verdict.outcome), (kind, Exit::StepFailed));
    assert_eq!(verdict.sentence, "apply: stopped");
    assert!(verdict.advice.is_some());
    // It was done all the same.
    let done = spoken(json!({"stopped": reason, "outcome": 0}));
    assert_eq!(done.kind, VerdictKind::Completed);
    // Nothing had begun, and another pod may do it.
    let before = spoken(json!({"stopped": reason, "outcome": 75}));
    assert_eq!(before.kind, VerdictKind::Infrastructure);
}

#[test]
fn a_signal_stays_a_signal() {
    let verdict = spoken(json!({"stopped": "signal", "outcome": 143}));
    assert_eq!(verdict.kind, VerdictKind::Signalled);
    assert_eq!(verdict.outcome, Exit::Signal(15));
}

fn facts_of(verdict: &Verdict, source: &str) -> Vec<String> {
    let found = verdict.evidence.iter();
    let found = found.filter(|fact| fact.source == source);
    found.map(|fact| fact.text.clone()).collect()
}

#[test]
fn a_verdict_has_the_changes_made_and_left_and_the_place_of_the_state() {
    let verdict = spoken(json!({
        "stopped": "signal", "outcome": 143, "error": "apply: stopped",
        "progress": {"applied": 3, "failed": ["aws_vpc.a"], "unfinished": ["aws_eip.b"], "notBegun": 2},
        "state": "kept",
    }));
    assert_eq!(
        facts_of(&verdict, "changes"),
        ["3 made; failed: aws_vpc.a; begun, and not known to have ended: aws_eip.b; 2 not begun"]
    );
    assert_eq!(facts_of(&verdict, "state").len(), 1);
    let advice = verdict.advice.unwrap();
    assert!(advice.contains("plan again before applying"), "{advice}");
    assert!(advice.contains("errored.tfstate"), "{advice}");
    assert!(!advice.contains("may have been"), "it is known: {advice}");

    let nothing = spoken(json!({
        "stopped": "signal", "outcome": 143,
        "progress": {"applied": 0, "failed": [], "unfinished": [], "notBegun": 5}, "state": "stored",
    }));
    let advice = nothing.advice.unwrap();
    assert!(advice.contains("nothing had been changed"), "{advice}");
}

const LOCKED: &str = r#"{"lock": {"id": "9db590f1", "who": "mayfly@job-9-1-abcde", "operation": "OperationTypeApply",
    "created": "2026-01-01 00:00:00 UTC", "status": "inTheWay"}}"#;

#[test]
fn a_state_lock_is_the_verdict_with_its_holder_and_whether_that_pod_exists() {
    let report: Value = serde_json::from_str(LOCKED).unwrap();
    let mut verdict = spoken(report);
    assert_eq!(verdict.kind, VerdictKind::StateLocked);
    let [lock] = &facts_of(&verdict, "state lock")[..] else {
        panic!("{:?}", verdict.evidence);
    };
    for word in ["9db590f1", "mayfly@job-9-1-abcde", "OperationTypeApply"] {
        assert!(lock.contains(word), "{lock}");
    }
    assert_eq!(verdict.lock_host(), Some("job-9-1-abcde"));
    assert!(
        verdict
            .advice
            .as_ref()
            .unwrap()
            .contains("force-unlock 9db590f1")
    );

    let holder = pod(json!({"metadata": {"name": "job-9-1-abcde",
        "labels": {"mayfly.dev/job-id": "9", "mayfly.dev/step-id": "1"}}, "status": {"phase": "Running"}}));
    let ended = pod(json!({"status": {"phase": "Failed"}}));
    let host = "job-9-1-abcde";
    let of = |host, pod| LockHolder::of(host, "runs", pod);
    for (holder, words, unlock) in [
        (of(host, Some(&holder)), "of run 9/1, is still there", false),
        (of(host, Some(&ended)), "has ended", true),
        (of(host, None), "in the namespace `runs`", true),
        (of("laptop", None), "taken elsewhere", true),
    ] {
        verdict.tell_lock_holder(&holder);
        // In place of what was told before.
        let [told] = &facts_of(&verdict, "lock holder")[..] else {
            panic!("{:?}", verdict.evidence);
        };
        assert!(told.contains(words), "{told}");
        let advice = verdict.advice.as_deref().unwrap();
        assert_eq!(advice.contains("force-unlock 9db590f1"), unlock, "{advice}");
        let remark = verdict.lock_remark().unwrap();
        assert!(
            remark.contains(words) && remark.contains(advice),
            "{remark}"
        );
    }
}

#[test]
fn a_lock_of_an_unknown_pod_may_be_held_elsewhere_and_the_advice_is_not_to_break_it() {
    let mut verdict = spoken(serde_json::from_str(LOCKED).unwrap());
    verdict.tell_lock_holder(&LockHolder::of("job-9-1-abcde", "runs", None));
    let [told] = &facts_of(&verdict, "lock holder")[..] else {
        panic!("{:?}", verdict.evidence);
    };
    assert!(!told.contains("gone"), "nobody knows: {told}");
    let advice = verdict.advice.unwrap();
    assert!(!advice.contains("release it"), "{advice}");
    assert!(!advice.contains("any more"), "{advice}");
    let (look, unlock) = (advice.find("look there first"), advice.find("force-unlock"));
    assert!(look.is_some() && look < unlock, "{advice}");
}

#[test]
fn an_error_beside_a_successful_step_is_shown_unless_it_prevented_the_report() {
    let sentence = |unreported| {
        let error = "the job was cancelled before the step began";
        spoken(json!({"outcome": 0, "error": error, "unreported": unreported})).sentence
    };
    assert_eq!(
        sentence(false),
        "the job was cancelled before the step began"
    );
    assert!(sentence(true).contains("could not tell the platform: the job was"));
}

#[test]
fn a_released_lock_needs_no_advice() {
    let mut report: Value = serde_json::from_str(LOCKED).unwrap();
    report["lock"]["status"] = json!("released");
    let verdict = spoken(report);
    assert_eq!(verdict.kind, VerdictKind::StepFailed);
    assert_eq!(facts_of(&verdict, "state lock").len(), 1);
    assert_eq!(verdict.lock_host(), None);
    assert!(!verdict.advice.unwrap().contains("force-unlock"));
}

#[test]
fn a_run_cancelled_through_the_launcher_is_cancelled_and_not_deleted() {
    let cancelled = job(json!({"metadata": {"annotations": {CANCELLED: time(3)}}}));
    let verdict = gone(&cancelled, &[], &[]);
    assert_eq!(verdict.kind, VerdictKind::Cancelled);
    assert_eq!(verdict.outcome, Exit::Signal(15));
}

const CANCELLED: &str = job_contract::annotations::CANCELLED_AT;

#[test]
fn every_kind_stands_in_both_tables_of_the_documents() {
    let tables = [
        include_str!("../../../docs/architecture.md"),
        include_str!("../../../docs/operations.md"),
    ];
    for table in tables {
        let kinds: Vec<&str> = table
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split(" | ").next())
            .flat_map(|cell| cell.split(['`', ',', ' ']))
            .collect();
        for kind in VerdictKind::ALL {
            assert!(kinds.contains(&kind.name()), "{} is missing", kind.name());
        }
    }
}
