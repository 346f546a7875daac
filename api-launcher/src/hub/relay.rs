//! The relay: executors of a pool send requests to the platform through the hub, with the token of their lease instead
//! of a secret of the platform. The relay passes only requests about their own organization, workspace, job and step.
//!
//! - [`rules`] decides which requests pass in which state of the task. Pure.
//! - [`body`] checks the bodies of requests. Pure.
//! - [`forward`] sends requests to the platform.

mod body;
mod forward;
mod rules;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use platform::StepRef;
use pool_protocol::id::{LeaseId, TaskId};
use pool_protocol::problem::Code;
use pool_store::{Refusal, TaskView};
use tracing::{debug, warn};

use self::forward::Outgoing;
use self::rules::{Call, RelayRefusal};
use super::pools::Boundary;
use super::wire::Failure;
use super::{Hub, step_of};

pub(crate) use self::forward::Relay;

/// Handles a request of an executor to the platform.
pub(super) async fn handle(State(hub): State<Arc<Hub>>, request: Request) -> Response {
    match pass(&hub, request).await {
        Ok(response) => response,
        Err(failure) => failure.into_response(),
    }
}

async fn pass(hub: &Hub, request: Request) -> Result<Response, Failure> {
    let (head, body) = request.into_parts();
    // The decoded parameters of the route are not used, because two parsers of one path could differ.
    let target = rules::split(head.uri.path()).ok_or(Refusal::TaskNotFound)?;
    let task = authorize(hub, &head.headers, target.task, target.lease).await?;
    let step = step_of(&task);
    let call = Call::find(&head.method, &target.path, head.uri.query(), &step)
        .and_then(|call| rules::check_state(&task, call).map(|()| call));
    let call = call.map_err(|refusal| refuse(&task, &head.method, head.uri.path(), &refusal))?;
    let outgoing = Outgoing::new(call, &target.path, &step, body)
        .await
        .map_err(|refusal| refuse(&task, &head.method, head.uri.path(), &refusal))?;
    debug!(task = %task.task, ?call, "relayed");
    let lines = outgoing.lines.clone();
    let response = hub.relay.send(outgoing, &step).await?;
    if let Some(lines) = lines.filter(|_| response.status().is_success()) {
        hub.tails.add(task.task, &lines);
    }
    Ok(response)
}

/// Returns the task of a request, if its token is valid for the current lease of the task.
async fn authorize(
    hub: &Hub,
    headers: &HeaderMap,
    task: TaskId,
    lease: LeaseId,
) -> Result<TaskView, Failure> {
    let grant = hub.holder(headers, task, lease)?;
    let view = hub.store.task(task).await?.ok_or(Refusal::TaskNotFound)?;
    if (view.lease, view.fencing_token) != (Some(grant.lease), grant.fencing_token) {
        hub.metrics.stale();
        return Err(Refusal::LeaseSuperseded.into());
    }
    let pools = hub.pools.current();
    if pools.get(&view.pool).map(|pool| pool.boundary) == Some(Boundary::Relay) {
        return Ok(view);
    }
    let text = format!("pool `{}` has no relay to the platform", view.pool);
    Err(Failure::new(Code::ExecutorPoolForbidden, text))
}

fn refuse(task: &TaskView, method: &Method, path: &str, refusal: &RelayRefusal) -> Failure {
    warn!(
        task = %task.task,
        pool = %task.pool,
        job_id = task.job,
        step_id = task.step,
        %method,
        path = path.chars().take(256).collect::<String>(),
        reason = %refusal,
        "the relay has refused a request"
    );
    match refusal {
        RelayRefusal::State(refusal) => refusal.clone().into(),
        RelayRefusal::Request(_) | RelayRefusal::Body(_) => {
            Failure::new(Code::ExecutorPoolForbidden, refusal.to_string())
        }
        RelayRefusal::Unread(_) => Failure::new(Code::RequestInvalid, refusal.to_string()),
        RelayRefusal::TooLarge(_) => Failure::new(Code::RequestInvalid, refusal.to_string())
            .with_status(StatusCode::PAYLOAD_TOO_LARGE),
    }
}

/// Returns the path of the step output. Addresses in reports must end with it.
fn output_path(step: &StepRef) -> String {
    format!(
        "/tfoutput/v1/organization/{}/job/{}/step/{}",
        step.organization_id, step.job_id, step.step_id
    )
}
