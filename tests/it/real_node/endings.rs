//! Runs that end otherwise than their executors meant to, and what is said of them.

use std::time::Duration;

use integration_tests::Repository;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, EvictParams};
use serde_json::json;
use test_platform::{Flow, Status};
use verdict::VerdictKind;

use super::{Stage, endless, provisioned};

const APPLY: &str = "terraformApply";

/// A limit that the tool keeps, and no soft one before it.
fn limited() -> serde_json::Value {
    json!({"executor": {"memorySoftLimitPercent": 0, "resources": {"limits": {"memory": "320Mi"}}}})
}

/// A text that does not fit into the limit: the tool asks for all of it at once.
fn greedy() -> Repository {
    let thousandfold = |text: &str| format!("join(\"\", [for each in range(1000) : {text}])");
    Repository::module(&format!(
        "locals {{\n  kilo = {}\n  mega = {}\n}}\noutput \"giga\" {{\n  value = length({})\n}}\n",
        thousandfold("\"x\""),
        thousandfold("local.kilo"),
        thousandfold("local.mega"),
    ))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_report_of_a_tool_killed_for_its_memory_has_advice() {
    let Some(stage) = Stage::with(limited()).await else {
        return;
    };
    let job = stage.start(greedy(), Flow::only("terraformPlan"));
    let verdict = stage
        .failed(job, "terraformPlan", VerdictKind::OomKilled)
        .await;
    let advice = verdict.advice.unwrap();
    assert!(advice.contains("raise the memory limit"), "{advice}");
    let output = stage.output(job, "terraformPlan");
    // Which process it kills is the kernel's choice: where it is the executor too, the launcher tells of it.
    let by_executor = output.contains("The tool was killed");
    assert!(by_executor || output.contains(&advice), "{output}");
}

/// The kernel kills only the largest process, where control groups are of version 1 or the kubelet is set so.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_completes_although_something_in_it_was_killed_for_memory_is_completed() {
    let Some(stage) = Stage::with(limited()).await else {
        return;
    };
    let job = stage.start(
        provisioned("tail /dev/zero; echo ended-with-$?"),
        Flow::only(APPLY),
    );
    stage.platform.until_job(job, Status::Completed).await;
    let (verdict, output) = stage.verdict(job, APPLY).await;
    assert_eq!(
        verdict.kind,
        VerdictKind::Completed,
        "{verdict:#?}\n{output}"
    );
    assert!(output.contains("ended-with-137"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_verdict_of_an_evicted_apply_names_the_eviction_and_it_is_not_run_again() {
    let Some(stage) =
        Stage::with(json!({"executor": {"podDisruptionBudget": {"enabled": false}}})).await
    else {
        return;
    };
    let [evicted, deleted] = [(); 2].map(|()| stage.start(endless(), Flow::only(APPLY)));
    let pods = stage.fixture.all::<Pod>();
    let pod = stage.at_work(evicted, APPLY).await;
    pods.evict(&pod, &EvictParams::default()).await.unwrap();
    let pod = stage.at_work(deleted, APPLY).await;
    pods.delete(&pod, &DeleteParams::default()).await.unwrap();
    for (job, kind) in [
        (evicted, VerdictKind::Evicted),
        (deleted, VerdictKind::Deleted),
    ] {
        stage.failed(job, APPLY, kind).await;
        assert_eq!(stage.times_begun(job, APPLY), 1);
        let name = stage.name(job, APPLY);
        let failed = stage
            .fixture
            .all::<Job>()
            .get(&name)
            .await
            .unwrap()
            .status
            .unwrap();
        assert_eq!(failed.active.unwrap_or(0), 0);
    }
}

/// A drain waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn the_charts_budget_keeps_an_apply_from_being_evicted() {
    let Some(stage) = Stage::with(json!({})).await else {
        return;
    };
    let job = stage.start(endless(), Flow::only(APPLY));
    let pod = stage.at_work(job, APPLY).await;
    let pods = stage.fixture.all::<Pod>();
    let params = EvictParams::default();
    let asked = pods.evict(&pod, &params);
    // The client asks again and again while the answer is "not now".
    let evicted = tokio::time::timeout(Duration::from_secs(5), asked).await;
    match evicted {
        Err(_) => {}
        Ok(Err(kube::Error::Api(status))) if status.code == 429 => {}
        other => panic!("{other:?}"),
    }
    let pod = pods.get(&pod).await.unwrap();
    assert_eq!(pod.metadata.deletion_timestamp, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_cannot_be_pulled_ends_the_run() {
    let missing = json!({
        "executor": {"image": {"repository": "mayfly-executor-that-is-missing"}},
        "launcher": {"jobs": {"containerErrorTimeoutSeconds": 5}},
    });
    let Some(stage) = Stage::with(missing).await else {
        return;
    };
    let job = stage.start(Repository::fixture(), Flow::only("terraformPlan"));
    let verdict = stage
        .failed(job, "terraformPlan", VerdictKind::ImageNotPulled)
        .await;
    assert!(
        verdict.sentence.contains("mayfly-executor-that-is-missing"),
        "{verdict:#?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_native_sidecar_that_ignores_its_end_does_not_keep_a_finished_run_running() {
    let stubborn = json!({
        "name": "stubborn",
        "image": test_cluster::node::images::name_of(images::Program::Executor),
        "command": ["/bin/bash", "-c", "trap '' TERM; while :; do sleep 1; done"],
        "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
    });
    // The kubelet gives it all of the grace period to end.
    let with_sidecar = json!({"executor": {
        "sidecars": [stubborn],
        "applyTerminationGracePeriodSeconds": 30,
    }});
    let Some(stage) = Stage::with(with_sidecar).await else {
        return;
    };
    let job = stage.start(Repository::fixture(), Flow::only(APPLY));
    stage.platform.until_job(job, Status::Completed).await;
    let (verdict, output) = stage.verdict(job, APPLY).await;
    assert_eq!(
        verdict.kind,
        VerdictKind::Completed,
        "{verdict:#?}\n{output}"
    );
    let name = stage.name(job, APPLY);
    let complete = async || {
        let job = stage.fixture.all::<Job>().get(&name).await.unwrap();
        let mut conditions = job.status?.conditions?.into_iter();
        conditions
            .any(|condition| condition.type_ == "Complete" && condition.status == "True")
            .then_some(())
    };
    stage.fixture.until("the Job is complete", complete).await;
}
