//! Tests of the relay between executors of a pool and the platform.

use std::time::Duration;

use pool_protocol::problem::Code;
use pool_protocol::task::LeasedTask;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use test_platform::{Effect, Fault, Flow, Ledger, NewJob, Release, Status, Workspace};

use super::client::{Client, executor_of};
use super::fixture::Fixture;

/// Returns the executor of a new lease. It has not accepted its task.
async fn leased(fixture: &Fixture, agent: &Client) -> (Client, LeasedTask) {
    fixture.dispatched_plan().await;
    let lease = agent.request(agent.register().await).await;
    (executor_of(agent, &lease), lease)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_reads_before_its_claim_and_writes_after_it() {
    let pending = json!({"structuredOutputStatus": {"state": "PENDING"}});
    for (release, none) in [(Release::Old, json!({})), (Release::Newest, pending)] {
        let fixture = Fixture::under(release).await;
        let hub = fixture.serve();
        let (executor, lease) = leased(&fixture, &fixture.client(&hub)).await;
        let context = format!("/context/v1/{}", lease.task.job_id);
        let document = json!({"terrakubeUI": {"a": "b"}});
        let found = executor.relay(&lease, Method::GET, &context, None).await;
        assert_eq!(found.ok(), none);
        let write = || executor.relay(&lease, Method::POST, &context, Some(document.clone()));
        assert_eq!(write().await.refused(), Code::LeaseNotAccepted);
        executor.accept(&lease, "pod").await.ok();
        write().await.ok();
        let found = executor.relay(&lease, Method::GET, &context, None).await;
        assert_eq!(found.ok(), document);
        fixture.platform.assert_kept().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_passes_only_content_of_the_run() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let [mine, other] = ["mine", "other"].map(|text| fixture.platform.upload(text.into()));
    let workspace = fixture
        .platform
        .workspace(Workspace::new("https://git.example.test/a.git"));
    let job = NewJob::new(&workspace, Flow::only("terraformPlan")).from_upload(&mine);
    let job = fixture.platform.start_job(job);
    fixture.platform.until_job(job, Status::Queue).await;
    let agent = fixture.client(&hub);
    let lease = agent.request(agent.register().await).await;
    let executor = executor_of(&agent, &lease);

    let below = |url: &str| {
        url.strip_prefix(&fixture.platform.url())
            .unwrap()
            .to_owned()
    };
    let found = executor
        .relay(&lease, Method::GET, &below(&mine), None)
        .await;
    assert_eq!(found.ok(), Value::String("mine".to_owned()));
    let refused = executor
        .relay(&lease, Method::GET, &below(&other), None)
        .await;
    assert_eq!(refused.refused(), Code::ExecutorPoolForbidden);
    fixture.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_of_the_platform_pass_unchanged_and_its_failure_is_reported() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let (executor, lease) = leased(&fixture, &fixture.client(&hub)).await;
    let context = format!("/context/v1/{}", lease.task.job_id);
    let read_context = || executor.relay(&lease, Method::GET, &context, None);
    for status in [404, 409, 500] {
        let fault = Fault::once("GET", &context, Effect::Status(status));
        fixture.platform.fault(fault);
        assert_eq!(read_context().await.status.as_u16(), status);
    }
    let elsewhere = Effect::Redirect("http://127.0.0.1:1/");
    fixture
        .platform
        .fault(Fault::once("GET", &context, elsewhere));
    assert!(read_context().await.status.is_redirection());
    fixture
        .platform
        .fault(Fault::always("GET", &context, Effect::DropBefore));
    let answer = read_context().await;
    assert_eq!(answer.status, StatusCode::BAD_GATEWAY);
    assert_eq!(
        answer.body["title"],
        "the platform does not respond: try again"
    );
}

/// The platform still works on what it was sent.
#[tokio::test(flavor = "multi_thread")]
async fn a_sender_that_leaves_keeps_its_turn_until_the_platform_answers() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let (executor, lease) = leased(&fixture, &fixture.client(&hub)).await;
    let context = format!("/context/v1/{}", lease.task.job_id);
    let slow = Effect::Slow(Duration::from_mins(10));
    fixture.platform.fault(Fault::always("GET", &context, slow));
    let read = || executor.relay(&lease, Method::GET, &context, None);
    // A task has eight turns. Each read that gets one leaves before its answer.
    for turn in 1..=8 {
        let asked = |ledger: &Ledger| {
            let reads = ledger.requests.iter();
            let reads = reads.filter(|request| request.path == context);
            (reads.count() == turn).then_some(())
        };
        tokio::select! {
            answer = read() => panic!("{turn}: {answer:?}"),
            () = fixture.platform.until_asked("the read", asked) => {}
        }
    }
    assert_eq!(read().await.refused(), Code::RateLimited);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_too_large_log_is_refused_with_413() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let (executor, lease) = leased(&fixture, &fixture.client(&hub)).await;
    executor.accept(&lease, "pod").await.ok();
    let line = json!({"jobId": 412, "stepId": lease.task.step_id, "lineNumber": 1,
        "output": "x".repeat(5 << 20)});
    let lines = json!({"data": [line]});
    let answer = executor
        .relay(&lease, Method::POST, "/logs", Some(lines))
        .await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_with_another_boundary_has_no_relay() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let (executor, lease) = leased(&fixture, &fixture.client(&hub)).await;
    let token = json!({"id": "t", "sha256": fixture.token.digest()});
    let eu = json!({"organizations": ["*"], "boundary": "direct", "tokens": [token]});
    fixture.replace_pools(&json!({"pools": {"eu": eu}}).to_string());
    let context = format!("/context/v1/{}", lease.task.job_id);
    let answer = executor.relay(&lease, Method::GET, &context, None).await;
    assert_eq!(answer.refused(), Code::ExecutorPoolForbidden);
    // The lease itself is still valid.
    executor.accept(&lease, "pod").await.ok();
}
