//! Tests of runs from their dispatch to their end.

use pool_protocol::path::LeaseCall;
use pool_protocol::task::LeasedTask;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use test_platform::Status;

use super::client::Client;
use super::fixture::Fixture;

/// Returns a change of a resource in the form of JSON:API.
pub(super) fn change(kind: &str, id: &str, attributes: Value) -> Value {
    json!({"data": {"type": kind, "id": id, "attributes": attributes}})
}

/// Acts as the executor of a lease: the claim, a line of the log, the reports and the end.
pub(super) async fn run_plan(fixture: &Fixture, executor: &Client, lease: &LeasedTask) {
    executor.accept(lease, "pod").await.ok();
    let task = &lease.task;
    let job = format!(
        "/api/v1/organization/{}/job/{}",
        task.organization_id, task.job_id
    );
    let step = format!("{job}/step/{}", task.step_id);
    let output = format!(
        "{}/tfoutput/v1/organization/{}/job/{}/step/{}",
        fixture.platform.url(),
        task.organization_id,
        task.job_id,
        task.step_id
    );
    let send = async |method: Method, path: &str, body: Value| {
        executor.relay(lease, method, path, Some(body)).await.ok();
    };
    let running = change(
        "job",
        &task.job_id,
        json!({"status": "running", "commitId": "9f"}),
    );
    send(Method::PATCH, &job, running).await;
    let running = change(
        "step",
        &task.step_id,
        json!({"status": "running", "output": output}),
    );
    send(Method::PATCH, &step, running).await;
    let set_up = format!("/logs/{}/setup-consumer-groups", task.job_id);
    executor
        .relay(lease, Method::POST, &set_up, None)
        .await
        .ok();
    let line = json!({"jobId": task.job_id.parse::<u32>().unwrap(), "stepId": task.step_id,
        "lineNumber": 1, "output": "No changes."});
    send(Method::POST, "/logs", json!({"data": [line]})).await;
    fixture.store_output(task);
    let done = change(
        "step",
        &task.step_id,
        json!({"status": "completed", "output": output}),
    );
    send(Method::PATCH, &step, done).await;
    let done =
        json!({"status": "completed", "planChanges": false, "output": "", "terraformPlan": ""});
    send(Method::PATCH, &job, change("job", &task.job_id, done)).await;
    let end = json!({"exitCode": 0, "reported": true});
    let ended = executor.lease(lease, LeaseCall::Complete, end).await.ok();
    assert_eq!(ended["state"], "COMPLETED");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_run_log_shows_a_missing_agent_and_a_new_agent_gets_the_run_at_once() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let job = fixture.dispatched_plan().await;
    fixture.until_alive(job).await;
    fixture
        .platform
        .until_streamed(
            job,
            "Waiting in pool `eu`, position 1: the pool has no agent that is online",
        )
        .await;

    let agent = fixture.client(&hub);
    let instance = agent.register().await;
    // The request does not wait for a run.
    let lease = agent.try_request(instance, 0, &[]).await.ok();
    let lease: LeasedTask = serde_json::from_value(lease).unwrap();
    assert_eq!(lease.task.job_id, job.to_string());
    assert_eq!((&*lease.task.kind, lease.attempt), ("terraformPlan", 1));
    let payload: Value = serde_json::from_str(lease.task.payload.get()).unwrap();
    assert_eq!(payload, fixture.platform.job_data(job));
    fixture.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_agent_gets_a_run_that_is_dispatched_meanwhile() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let instance = agent.register().await;
    let waiting = tokio::spawn(async move { agent.request(instance).await });
    hub.until_metric("mayfly_pool_polls_waiting 1").await;
    let job = fixture.dispatched_plan().await;
    let lease = waiting.await.unwrap();
    assert_eq!(lease.task.job_id, job.to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_cancelled_in_the_queue_is_never_leased() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let job = fixture.dispatched_plan().await;
    hub.until_metric(r#"mayfly_pool_tasks{pool="eu",state="available"} 1"#)
        .await;
    fixture.platform.cancel(job).await;
    hub.until_metric(r#"mayfly_pool_tasks{pool="eu",state="available"} 0"#)
        .await;

    let agent = fixture.client(&hub);
    let instance = agent.register().await;
    let answer = agent.try_request(instance, 1, &[]).await;
    assert_eq!(answer.status, StatusCode::NO_CONTENT, "{answer:?}");
    assert_eq!(fixture.platform.job(job).status, Status::Cancelled);
    fixture.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_request_ends_when_the_hub_stops() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let instance = agent.register().await;
    let waiting = tokio::spawn(async move { agent.try_request(instance, 50, &[]).await });
    hub.until_metric("mayfly_pool_polls_waiting 1").await;
    let running = hub.0.running;
    running.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(waiting.await.unwrap().status, StatusCode::NO_CONTENT);
    let finished = running.wait();
    assert_eq!(finished.code(), 0, "{finished}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dispatch_to_target_none_is_refused_with_advice() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    fixture
        .platform
        .dispatch_to(&format!("{}/api/v1/terraform-rs", hub.url()));
    let job = fixture.start_plan();
    fixture.platform.until_job(job, Status::Failed).await;
    let token = fixture.platform.dispatch_token();
    let document = json!({"type": "terraformPlan", "organizationId": "o", "workspaceId": "w",
        "jobId": "1", "stepId": "s"});
    let post = |path: &str| {
        let request = reqwest::Client::new().post(format!("{}{path}", hub.url()));
        request
            .bearer_auth(&token)
            .body(document.to_string())
            .send()
    };
    let refused = post("/api/v1/terraform-rs").await.unwrap();
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    assert!(refused.text().await.unwrap().contains("/pools/"));
    let unknown = post("/pools/asia/api/v1/terraform-rs").await.unwrap();
    assert_eq!(unknown.status(), StatusCode::NOT_FOUND);
    assert!(unknown.text().await.unwrap().contains("`asia`"));
}
