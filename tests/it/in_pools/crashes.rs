//! Tests of killed hubs: every dispatch that was answered 202 ends exactly once.

use integration_tests::Running;
use pool_protocol::path::LeaseCall;
use serde_json::json;
use test_platform::Status;

use super::client::executor_of;
use super::fixture::Fixture;
use super::runs::run_plan;

#[tokio::test(flavor = "multi_thread")]
async fn an_accepted_run_survives_every_kill_of_the_hub() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let job = fixture.dispatched_plan().await;
    hub.crash();

    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let instance = agent.register().await;
    let lease = agent.request(instance).await;
    assert_eq!(lease.task.job_id, job.to_string());
    hub.crash();

    // The instance does not name the lease, so it gets the lease again.
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let again = agent.request(instance).await;
    assert_eq!(
        (again.lease_id, again.fencing_token, again.attempt),
        (lease.lease_id, lease.fencing_token, 1)
    );
    assert_eq!(again.job_token, lease.job_token);
    executor_of(&agent, &again).accept(&again, "pod").await.ok();
    hub.crash();

    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let executor = executor_of(&agent, &lease);
    let heartbeat = executor.lease_heartbeat(&lease, "pod").await.ok();
    assert_eq!(heartbeat["state"], "RUNNING");
    assert_eq!(
        agent
            .try_request(instance, 1, &[lease.lease_id])
            .await
            .status,
        204
    );
    run_plan(&fixture, &executor, &lease).await;
    fixture.platform.until_job(job, Status::Completed).await;
    assert_eq!(fixture.reports(job, Status::Completed), 2);
    fixture.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreported_outcome_of_a_killed_hub_is_reported_once() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let job = fixture.dispatched_plan().await;
    let agent = fixture.client(&hub);
    let lease = agent.request(agent.register().await).await;
    executor_of(&agent, &lease).accept(&lease, "pod").await.ok();
    fixture.platform.go_down().await;
    let end = json!({"exitCode": 137, "diagnostic": "the container was killed: out of memory"});
    agent.lease(&lease, LeaseCall::Fail, end.clone()).await.ok();
    hub.crash();

    fixture.platform.come_up().await;
    let hub = fixture.serve();
    fixture.platform.until_job(job, Status::Failed).await;
    hub.until_metric(r#"mayfly_pool_tasks{pool="eu",state="unreported"} 0"#)
        .await;
    let output = fixture.output(job);
    assert!(output.contains("out of memory"), "{output}");
    // A repeated call changes nothing.
    fixture
        .client(&hub)
        .lease(&lease, LeaseCall::Fail, end)
        .await
        .ok();
    assert_eq!(fixture.reports(job, Status::Failed), 2);
    fixture.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_hub_on_the_same_file_does_not_start() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let second = Running::start(&mut fixture.command()).wait();
    assert_eq!(second.code(), 64, "{second}");
    assert!(
        second.stderr.contains("another process uses the store"),
        "{second}"
    );
    assert!(hub.get("/actuator/health/readiness").await.contains("UP"));
}
