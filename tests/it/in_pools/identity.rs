//! Tests of versions and tokens, and of the separation of pools and runs.

use std::process::Command;

use integration_tests::Running;
use integration_tests::process::Stream;
use pool_protocol::path::{self, LeaseCall};
use pool_protocol::problem::Code;
use pool_protocol::token::PoolToken;
use pool_protocol::version;
use reqwest::{Method, StatusCode};
use serde_json::json;
use test_platform::Status;

use super::client::executor_of;
use super::fixture::Fixture;
use super::runs::change;

#[tokio::test(flavor = "multi_thread")]
async fn an_old_client_learns_that_it_is_old_and_not_that_its_token_is_wrong() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let found = agent
        .plain(Method::GET, path::PROTOCOL)
        .send()
        .await
        .unwrap();
    assert_eq!(found.headers()[version::MAX_HEADER], "1");
    assert_eq!(
        found.json::<serde_json::Value>().await.unwrap()["maxVersion"],
        1
    );

    let register_with = async |header: Option<&str>| {
        let mut request = agent
            .plain(Method::POST, path::REGISTER)
            .bearer_auth("nonsense");
        if let Some(header) = header {
            request = request.header(version::HEADER, header);
        }
        let answer = request.send().await.unwrap();
        assert_eq!(answer.headers()["content-type"], "application/problem+json");
        let problem = answer.json::<serde_json::Value>().await.unwrap();
        problem["code"].as_str().unwrap().to_owned()
    };
    assert_eq!(
        register_with(None).await,
        "EXECUTOR_PROTOCOL_VERSION_REQUIRED"
    );
    assert_eq!(
        register_with(Some("9")).await,
        "EXECUTOR_PROTOCOL_VERSION_UNSUPPORTED"
    );
    assert_eq!(
        register_with(Some("1")).await,
        "EXECUTOR_AUTHENTICATION_FAILED"
    );
    let newer = agent.register_with("eu-1", "one", [2, 3]).await;
    assert_eq!(newer.refused(), Code::ExecutorProtocolVersionUnsupported);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_token_is_valid_for_its_own_run_only() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let instance = agent.register().await;
    fixture.dispatched_plan().await;
    let first = agent.request(instance).await;
    fixture.dispatched_plan().await;
    let answer = agent
        .try_request(instance, 50, &[first.lease_id])
        .await
        .ok();
    let second: pool_protocol::task::LeasedTask = serde_json::from_value(answer).unwrap();
    let [one, two] = [&first, &second].map(|lease| executor_of(&agent, lease));
    two.accept(&second, "two").await.ok();

    for call in LeaseCall::ALL {
        let answer = one.lease(&second, call, json!({})).await;
        assert_eq!(answer.refused(), Code::ExecutorPoolForbidden, "{call:?}");
    }
    one.accept(&first, "one").await.ok();
    let context = |job: &str| format!("/context/v1/{job}");
    let (mine, other) = (context(&first.task.job_id), context(&second.task.job_id));
    for (lease, path) in [(&second, &other), (&first, &other), (&second, &mine)] {
        let answer = one.relay(lease, Method::GET, path, None).await;
        assert_eq!(answer.refused(), Code::ExecutorPoolForbidden, "{path}");
    }
    let job = format!(
        "/api/v1/organization/{}/job/{}",
        first.task.organization_id, first.task.job_id
    );
    let body = change("job", &second.task.job_id, json!({"status": "failed"}));
    let answer = one.relay(&first, Method::PATCH, &job, Some(body)).await;
    assert_eq!(answer.refused(), Code::ExecutorPoolForbidden);
    let escape = format!("{job}/..%2F{}", second.task.job_id);
    let answer = one.relay(&first, Method::GET, &escape, None).await;
    assert_eq!(answer.refused(), Code::ExecutorPoolForbidden);
    one.relay(&first, Method::GET, &mine, None).await.ok();

    // None of these requests reached the platform.
    let ledger = fixture.platform.ledger();
    let about_other = |request: &&test_platform::Request| {
        request.path.starts_with("/context") && request.path.contains(&second.task.job_id)
    };
    assert_eq!(ledger.requests.iter().filter(about_other).count(), 0);

    let end = json!({"exitCode": 0, "reported": true});
    one.lease(&first, LeaseCall::Complete, end.clone())
        .await
        .ok();
    one.lease(&first, LeaseCall::Complete, end).await.ok();
    for call in [LeaseCall::Started, LeaseCall::Heartbeat, LeaseCall::Fail] {
        let body = json!({"holder": {"uid": "one", "name": "one"}});
        let answer = one.lease(&first, call, body).await;
        assert_eq!(answer.refused(), Code::TaskAlreadyTerminal, "{call:?}");
    }
    let answer = one.relay(&first, Method::GET, &mine, None).await;
    assert_eq!(answer.refused(), Code::TaskAlreadyTerminal);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_gets_only_runs_of_its_pool_and_cannot_act_as_executor() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let instance = agent.register().await;
    fixture.dispatched_plan().await;
    let lease = agent.request(instance).await;

    let stranger = agent.with_token(&fixture.token_of_us());
    let theirs = stranger.register().await;
    assert_eq!(stranger.try_request(theirs, 1, &[]).await.status, 204);
    assert_eq!(
        stranger.heartbeat(instance).await.refused(),
        Code::InstancePoolMismatch
    );
    let answer = stranger.try_request(instance, 1, &[]).await;
    assert_eq!(answer.refused(), Code::InstancePoolMismatch);
    for call in [LeaseCall::Started, LeaseCall::Decline, LeaseCall::Fail] {
        let answer = stranger.lease(&lease, call, json!({})).await;
        assert_eq!(answer.refused(), Code::TaskNotFound, "{call:?}");
    }
    for call in [LeaseCall::Accept, LeaseCall::Heartbeat] {
        let body = json!({"holder": {"uid": "agent", "name": "agent"}});
        let answer = agent.lease(&lease, call, body).await;
        assert_eq!(answer.refused(), Code::ExecutorPoolForbidden, "{call:?}");
    }
    let answer = agent
        .relay(&lease, Method::GET, "/tofu/index.json", None)
        .await;
    assert_eq!(answer.refused(), Code::ExecutorAuthenticationFailed);
    // An executor cannot act as an agent either.
    let executor = executor_of(&agent, &lease);
    let answer = executor.try_register("eu-2", "two").await;
    assert_eq!(answer.refused(), Code::ExecutorAuthenticationFailed);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_installations_do_not_share_a_name() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let first = agent.register().await;
    let answer = agent.try_register("eu-1", "two").await;
    let text = answer.body["title"].as_str().unwrap().to_owned();
    assert_eq!(answer.refused(), Code::InstanceNameTaken);
    assert!(
        text.contains("choose another name") && !text.contains("`one`"),
        "{text}"
    );
    let line = hub.0.running.line_with(Stream::Stderr, "refused a name");
    assert!(line.contains("\"in_use_by\":\"one\""), "{line}");
    assert_eq!(
        agent.register().await,
        first,
        "the same process registers again"
    );
    agent.remove(first).await;
    agent.try_register("eu-1", "two").await.ok();
    assert_eq!(
        agent.heartbeat(first).await.refused(),
        Code::InstanceUnknown
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_token_ends_its_leases_unless_the_agent_has_another() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let old = fixture.client(&hub);
    let token = PoolToken::new("eu".parse().unwrap());
    let new = old.with_token(token.reveal());
    fixture.write_pools(&[&fixture.token, &token]);
    let instance = old.register().await;
    let job = fixture.dispatched_plan().await;
    let running = old.request(instance).await;
    let executor = executor_of(&old, &running);
    executor.accept(&running, "one").await.ok();
    fixture.dispatched_plan().await;
    let leased = old.take(instance, std::slice::from_ref(&running)).await;
    fixture.dispatched_plan().await;
    let other = new.try_register("eu-2", "two").await.ok();
    let other = serde_json::from_value(other["instanceId"].clone()).unwrap();
    let kept = new.request(other).await;
    let keeps = executor_of(&new, &kept);
    keeps.accept(&kept, "two").await.ok();

    fixture.write_pools(&[&token]);
    // No run starts under it any more.
    let late = executor_of(&old, &leased);
    assert_eq!(
        late.accept(&leased, "three").await.refused(),
        Code::LeaseExpired
    );
    // A heartbeat would accept it too.
    assert_eq!(
        late.lease_heartbeat(&leased, "three").await.refused(),
        Code::LeaseExpired
    );
    // What runs has a moment in which the agent can come with its new token.
    executor.lease_heartbeat(&running, "one").await.ok();
    fixture.platform.until_job(job, Status::Failed).await;
    let beat = executor.lease_heartbeat(&running, "one").await;
    assert_eq!(beat.refused(), Code::TaskAlreadyTerminal);
    let history = format!(
        "/api/v1/organization/{}/workspace/{}/history",
        running.task.organization_id, running.task.workspace_id
    );
    let body = Some(json!({}));
    let state = executor.relay(&running, Method::POST, &history, body);
    assert_eq!(state.await.refused(), Code::TaskAlreadyTerminal);
    let output = fixture.output(job);
    assert!(
        output.contains("the token of agent eu-1 is no longer valid"),
        "{output}"
    );
    // Its other run is for another agent. The agent with the new token has kept its own.
    let beat = late.lease_heartbeat(&leased, "three").await;
    assert!(matches!(
        beat.refused(),
        Code::LeaseExpired | Code::LeaseSuperseded
    ));
    keeps.lease_heartbeat(&kept, "two").await.ok();
    let again = new.take(other, std::slice::from_ref(&kept)).await;
    assert_eq!(again.task_id, leased.task_id);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_replaced_without_a_restart() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let old = fixture.client(&hub);
    let token = PoolToken::new("eu".parse().unwrap());
    let new = old.with_token(token.reveal());
    assert_eq!(
        new.try_register("eu-1", "one").await.refused(),
        Code::ExecutorAuthenticationFailed
    );

    fixture.write_pools(&[&fixture.token, &token]);
    let instance = old.register().await;
    new.heartbeat(instance).await.ok();
    old.heartbeat(instance).await.ok();
    let waiting = old.clone();
    let waiting = tokio::spawn(async move { waiting.try_request(instance, 50, &[]).await });
    hub.until_metric("mayfly_pool_polls_waiting 1").await;

    fixture.write_pools(&[&token]);
    // The waiting request ends without a further request.
    let ended = waiting.await.unwrap();
    assert_eq!(ended.refused(), Code::ExecutorAuthenticationFailed);
    assert_eq!(
        old.heartbeat(instance).await.refused(),
        Code::ExecutorAuthenticationFailed
    );
    new.heartbeat(instance).await.ok();

    fixture.replace_pools("pools: [");
    new.heartbeat(instance).await.ok();
    let readiness = hub.get("/actuator/health/readiness").await;
    let readiness: serde_json::Value = serde_json::from_str(&readiness).unwrap();
    assert_eq!(readiness["status"], "UP");
    assert!(
        readiness["problem"].to_string().contains("is no YAML"),
        "{readiness}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_are_too_large_or_unreadable_are_refused() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let large = json!({"systemId": "x".repeat(600_000)});
    assert_eq!(
        agent.post(path::REGISTER, large).await.refused(),
        Code::RequestInvalid
    );
    assert_eq!(
        agent.post(path::REGISTER, json!([])).await.refused(),
        Code::RequestInvalid
    );
    let unknown = agent
        .post("/api/v1/executor/instances/x/heartbeat", json!({}))
        .await;
    assert_eq!(unknown.status, StatusCode::GONE);
    let head = "x".repeat(300_000);
    let sent = agent
        .plain(Method::GET, path::PROTOCOL)
        .header("x-large", head)
        .send()
        .await;
    assert!(sent.is_err() || sent.unwrap().status() == 431);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_token_is_valid_with_its_line() {
    let fixture = Fixture::new().await;
    let made = Running::start(
        Command::new(crate::LAUNCHER).args(["pool", "token", "new", "--pool", "asia"]),
    )
    .wait();
    assert_eq!(made.code(), 0, "{made}");
    let token = made.stdout.trim();
    assert!(!made.stderr.contains(token), "{made}");
    let line = made
        .stderr
        .lines()
        .find(|line| line.trim().starts_with("- "));
    fixture.replace_pools(&format!(
        "pools:\n  asia:\n    organizations: ['*']\n    tokens:\n{}\n",
        line.unwrap()
    ));
    let hub = fixture.serve();
    let agent = fixture.client(&hub).with_token(token);
    agent.register().await;
}
