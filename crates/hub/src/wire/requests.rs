//! Handles version discovery and requests for tasks.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use pool_protocol::problem::Code;
use pool_protocol::task::{LeasedTask, Task, TaskRequest};
use pool_protocol::version::Versions;
use pool_store::LeaseRequest;
use serde_json::value::RawValue;
use tracing::{error, info};

use super::answer::{Answer, json, read, task_json};
use super::{LONGEST_WAIT, MANY_LEASES, seconds, time_after};
use crate::Hub;
use crate::failure::Failure;

/// Returns the supported versions. Needs neither a version nor a token.
pub(super) async fn protocol() -> Response {
    json(&Versions::OURS)
}

pub(super) async fn task(State(hub): State<Arc<Hub>>, headers: HeaderMap, body: Body) -> Answer {
    let agent = hub.agent(&headers)?;
    let mut taken = hub.budget.of_pool(agent.pool());
    let request: TaskRequest = read(body, MANY_LEASES, &mut taken).await?;
    if request.available_capacity == 0 {
        let text = "`availableCapacity` is 0: request a task when the instance has capacity";
        return Err(Failure::new(Code::RequestInvalid, text));
    }
    let Some(_share) = hub.polls.take(agent.pool()) else {
        let text = "too many requests for tasks wait: try again later";
        return Err(Failure::new(Code::RateLimited, text));
    };
    // The request itself is small, and it can wait for long.
    drop(taken);
    let wait = Duration::from_secs(request.wait_seconds.into()).min(LONGEST_WAIT);
    let lease = LeaseRequest {
        pool: agent.pool().clone(),
        credential: agent.credential(),
        instance: request.instance_id,
        holding: request.holding,
        wait,
    };
    let leased = tokio::select! {
        biased;
        // A token that was removed gets no more tasks.
        failure = hub.token_ends(&agent) => return Err(failure),
        leased = hub.store.lease(&lease) => leased?,
        () = hub.shutdown.graceful.cancelled() => None,
    };
    match leased {
        Some(leased) => deliver(&hub, &lease, leased),
        None => Ok(StatusCode::NO_CONTENT.into_response()),
    }
}

fn deliver(hub: &Hub, request: &LeaseRequest, leased: pool_store::LeasedTask) -> Answer {
    let grant = leased.grant;
    if leased.redelivered {
        hub.metrics.redelivered(&request.pool);
    }
    info!(
        pool = %request.pool,
        instance = %request.instance,
        task = %grant.task,
        lease = %grant.lease,
        job_id = leased.task.job,
        step_id = leased.task.step,
        attempt = leased.attempt,
        redelivered = leased.redelivered,
        "leased a task to an instance"
    );
    let data = leased.payload.0;
    let mut taken = hub.budget.of_pool(&request.pool);
    // What is made of it on the way to a response goes before the response is sent.
    if !taken.grow(data.len()) {
        let text = "too many job documents are on their way to this pool: try again";
        return Err(Failure::new(Code::RateLimited, text));
    }
    let payload = String::from_utf8(data).ok();
    let payload = payload.and_then(|json| RawValue::from_string(json).ok());
    let payload = payload.ok_or_else(|| {
        error!(task = %grant.task, "the document of a task cannot be read");
        Failure::new(Code::Other, "the document of the task cannot be read")
    })?;
    let document = LeasedTask {
        task_id: grant.task,
        lease_id: grant.lease,
        fencing_token: grant.fencing_token,
        leased_at: time_after(Duration::ZERO),
        expires_at: time_after(leased.expires_in),
        expires_in_seconds: seconds(leased.expires_in),
        attempt: leased.attempt,
        job_token: hub.keys.current().sign(grant),
        task: Task {
            organization_id: leased.task.organization,
            workspace_id: leased.task.workspace,
            job_id: leased.task.job,
            step_id: leased.task.step,
            kind: leased.task.kind,
            payload,
            traceparent: leased.task.traceparent,
        },
    };
    task_json(&document, taken)
}
