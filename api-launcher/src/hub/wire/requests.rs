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
use tracing::{error, info};

use super::answer::{Answer, Failure, json, read};
use super::{LONGEST_WAIT, seconds, time_after};
use crate::hub::Hub;
use crate::sealing;

/// Returns the supported versions. Needs neither a version nor a token.
pub(super) async fn protocol() -> Response {
    json(&Versions::OURS)
}

/// Waits for a task.
pub(super) async fn task(State(hub): State<Arc<Hub>>, headers: HeaderMap, body: Body) -> Answer {
    let agent = hub.agent(&headers)?;
    let request: TaskRequest = read(body).await?;
    if request.available_capacity == 0 {
        let text = "`availableCapacity` is 0: request a task when the instance has capacity";
        return Err(Failure::new(Code::RequestInvalid, text));
    }
    let Some(_share) = hub.polls.take(agent.pool()) else {
        let text = "too many requests for tasks wait: try again later";
        return Err(Failure::new(Code::RateLimited, text));
    };
    let wait = Duration::from_secs(request.wait_seconds.into()).min(LONGEST_WAIT);
    let lease = LeaseRequest {
        pool: agent.pool().clone(),
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
        job_id = leased.job,
        step_id = leased.step,
        attempt = leased.attempt,
        redelivered = leased.redelivered,
        "leased a task to an instance"
    );
    let data = leased.payload.data;
    let (payload, sealed_payload) = if let Some(key_id) = leased.payload.key_id {
        (None, Some(sealing::to_payload(key_id, &data)))
    } else {
        let payload = serde_json::from_slice(&data).map_err(|cause| {
            error!(task = %grant.task, line = cause.line(), "the document of a task cannot be read");
            Failure::new(Code::Other, "the document of the task cannot be read")
        })?;
        (Some(payload), None)
    };
    Ok(json(&LeasedTask {
        task_id: grant.task,
        lease_id: grant.lease,
        fencing_token: grant.fencing_token,
        leased_at: time_after(Duration::ZERO),
        expires_at: time_after(leased.expires_in),
        expires_in_seconds: seconds(leased.expires_in),
        attempt: leased.attempt,
        job_token: hub.keys.current().sign(grant),
        task: Task {
            organization_id: leased.organization,
            workspace_id: leased.workspace,
            job_id: leased.job,
            step_id: leased.step,
            kind: leased.kind,
            payload,
            sealed_payload,
            traceparent: leased.traceparent,
        },
    }))
}
