//! Tests of runs that their executors do not end.

use job_contract::env;
use pool_protocol::path::LeaseCall;
use pool_protocol::problem::Code;
use reqwest::Method;
use serde_json::json;
use test_platform::{Release, Status};

use super::client::executor_of;
use super::fixture::Fixture;
use super::runs::change;

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_run_fails_once_and_its_executor_is_refused() {
    let fixture = Fixture::new().await.with(env::POOL_LOST_SECONDS, "10");
    let hub = fixture.serve();
    let job = fixture.dispatched_plan().await;
    let agent = fixture.client(&hub);
    let lease = agent.request(agent.register().await).await;
    let executor = executor_of(&agent, &lease);
    executor.accept(&lease, "pod").await.ok();

    fixture.platform.until_job(job, Status::Failed).await;
    hub.until_metric(r#"mayfly_pool_lost_total{pool="eu"} 1"#)
        .await;
    hub.until_metric(r#"mayfly_pool_tasks{pool="eu",state="unreported"} 0"#)
        .await;
    // One report for the job, and one for its step.
    assert_eq!(fixture.reports(job, Status::Failed), 2);
    let output = fixture.output(job);
    assert!(output.contains("no heartbeat from"), "{output}");

    let heartbeat = executor.lease_heartbeat(&lease, "pod").await;
    assert_eq!(heartbeat.refused(), Code::TaskAlreadyTerminal);
    let step = format!(
        "/api/v1/organization/{}/job/{job}/step/{}",
        lease.task.organization_id, lease.task.step_id
    );
    let done = change("step", &lease.task.step_id, json!({"status": "completed"}));
    let done = executor
        .relay(&lease, Method::PATCH, &step, Some(done))
        .await;
    assert_eq!(done.refused(), Code::TaskAlreadyTerminal);
    fixture.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_of_another_organization_fails_with_the_reason() {
    for release in Release::ALL {
        let fixture = Fixture::under(release).await;
        let hub = fixture.serve();
        fixture.dispatch_to(&hub, "us");
        let job = fixture.start_plan();
        fixture.platform.until_job(job, Status::Failed).await;
        let output = fixture.output(job);
        assert!(
            output.contains("pool `us` takes no runs of organization"),
            "{output}"
        );

        let agent = fixture.client(&hub).with_token(&fixture.token_of_us());
        let answer = agent.try_request(agent.register().await, 1, &[]).await;
        assert_eq!(answer.status, 204, "{answer:?}");
        fixture.platform.assert_kept().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_an_agent_cannot_start_fails_with_its_diagnostic() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let job = fixture.dispatched_plan().await;
    let agent = fixture.client(&hub);
    let lease = agent.request(agent.register().await).await;
    let end = json!({"diagnostic": "the image does not exist", "verdict": "image"});
    let ended = agent.lease(&lease, LeaseCall::Fail, end).await.ok();
    assert_eq!(ended["state"], "FAILED");
    fixture.platform.until_job(job, Status::Failed).await;
    let output = fixture.output(job);
    assert!(output.contains("the image does not exist"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_its_agent_declines_is_leased_again() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    fixture.dispatched_plan().await;
    let agent = fixture.client(&hub);
    let instance = agent.register().await;
    let first = agent.request(instance).await;
    let decline = json!({"reason": "DRAINING", "diagnostic": "the agent stops"});
    agent.lease(&first, LeaseCall::Decline, decline).await.ok();
    let second = agent.request(instance).await;
    assert_eq!(second.task_id, first.task_id);
    assert!(second.lease_id != first.lease_id && second.fencing_token > first.fencing_token);

    // The first executor is late. None of its calls counts.
    let (late, executor) = (executor_of(&agent, &first), executor_of(&agent, &second));
    for call in [
        LeaseCall::Started,
        LeaseCall::Accept,
        LeaseCall::Heartbeat,
        LeaseCall::Complete,
        LeaseCall::Fail,
        LeaseCall::Cancelled,
    ] {
        let body = json!({"holder": {"uid": "late", "name": "late"}});
        let answer = late.lease(&first, call, body).await;
        assert_eq!(answer.refused(), Code::LeaseSuperseded, "{call:?}");
    }
    let read = format!("/context/v1/{}", first.task.job_id);
    let answer = late.relay(&first, Method::GET, &read, None).await;
    assert_eq!(answer.refused(), Code::LeaseSuperseded);
    assert_eq!(
        executor.accept(&second, "pod").await.ok()["state"],
        "RUNNING"
    );
    let other = executor.accept(&second, "other").await;
    assert_eq!(other.refused(), Code::LeaseSuperseded);
    hub.until_metric(r#"mayfly_pool_declined_total{pool="eu",reason="draining"} 1"#)
        .await;
}
