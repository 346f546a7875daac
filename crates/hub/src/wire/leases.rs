//! Handles calls of agents and executors for a lease.
//!
//! An agent may use the token of its pool for its leases, because a restarted agent follows executors of an earlier
//! process and has lost their job tokens. Only the job token allows `accept` and `heartbeat`.

use std::cmp::Ordering;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use pool_protocol::id::{LeaseId, TaskId};
use pool_protocol::lease::{Acceptance, Decline, End, Ended, Lease, LeaseRef, Started};
use pool_protocol::path::LeaseCall;
use pool_protocol::problem::Code;
use pool_protocol::task::TaskState;
use pool_store::state::EndReason;
use pool_store::{Ending, LeaseStatus, Refusal, TaskView};
use tracing::info;

use super::answer::{Answer, json, read};
use super::{ONE_END, ONE_LEASE, ONE_TEXT, seconds, time_after};
use crate::Hub;
use crate::budget::TakenBytes;
use crate::callers::{check_version, has_agent_token};
use crate::duties::sweep::log_change;
use crate::failure::Failure;

pub(super) async fn call(
    State(hub): State<Arc<Hub>>,
    headers: HeaderMap,
    Path((task, lease, call)): Path<(String, String, String)>,
    body: Body,
) -> Answer {
    check_version(&headers)?;
    let answered = answer(&hub, &headers, (&task, &lease, &call), body).await;
    if let Err(failure) = &answered
        && matches!(failure.code(), Code::LeaseSuperseded | Code::LeaseExpired)
    {
        hub.metrics.stale.inc();
    }
    answered
}

async fn answer(
    hub: &Hub,
    headers: &HeaderMap,
    (task, lease, call): (&str, &str, &str),
    body: Body,
) -> Answer {
    let call = LeaseCall::of_name(call);
    let (view, grant) = authorize(hub, headers, task, lease, call).await?;
    if let Some(answer) = answer_unread(&view, grant, call)? {
        return Ok(answer);
    }
    let mut taken = if has_agent_token(headers) {
        hub.budget.of_pool(&view.pool)
    } else {
        hub.budget.of_task(&view.pool, view.task)
    };
    let taken = &mut taken;
    match call {
        Some(LeaseCall::Started) => {
            let started: Started = read(body, ONE_LEASE, taken).await?;
            let status = hub.store.started(grant, &started.executor).await?;
            info!(task = %grant.task, executor = started.executor, "an executor was started");
            Ok(lease_of(hub, status))
        }
        Some(LeaseCall::Decline) => {
            let decline: Decline = read(body, ONE_TEXT, taken).await?;
            // It may have been the last attempt.
            if let Some(logs) = &hub.run_logs {
                logs.keep(grant.lease);
            }
            let state = hub.store.decline(grant, &decline).await?;
            if let Some(logs) = hub.run_logs.as_ref().filter(|_| !state.is_terminal()) {
                logs.forget(grant.lease);
            }
            declined(hub, grant, &decline, state).await;
            Ok(ended(grant, state))
        }
        Some(LeaseCall::Accept) => {
            let acceptance: Acceptance = read(body, ONE_LEASE, taken).await?;
            hub.require_credential(grant.task).await?;
            let status = hub.store.accept(grant, &acceptance.holder).await?;
            info!(task = %grant.task, holder = acceptance.holder.name, "an executor has accepted a task");
            Ok(lease_of(hub, status))
        }
        Some(LeaseCall::Heartbeat) => {
            let heartbeat: Acceptance = read(body, ONE_LEASE, taken).await?;
            if !is_accepted(&view) && view.lease == Some(grant.lease) {
                // The heartbeat would accept the task. The credential of another lease says nothing about this one.
                hub.require_credential(grant.task).await?;
            }
            Ok(lease_of(
                hub,
                hub.store.lease_heartbeat(grant, &heartbeat).await?,
            ))
        }
        Some(LeaseCall::Complete) => end(hub, grant, Ending::Completed, body, taken).await,
        Some(LeaseCall::Fail) => end(hub, grant, Ending::Failed, body, taken).await,
        Some(LeaseCall::Cancelled) => end(hub, grant, Ending::Cancelled, body, taken).await,
        None => Err(Failure::new(
            Code::RequestInvalid,
            "this hub has no such call; lines of the run log go through the relay",
        )),
    }
}

/// Returns the task and the lease of a call if the caller may make the call.
async fn authorize(
    hub: &Hub,
    headers: &HeaderMap,
    task: &str,
    lease: &str,
    call: Option<LeaseCall>,
) -> Result<(TaskView, LeaseRef), Failure> {
    let ids = task
        .parse::<TaskId>()
        .ok()
        .zip(lease.parse::<LeaseId>().ok());
    if !has_agent_token(headers) {
        let (task, lease) = ids.ok_or(Refusal::TaskNotFound)?;
        let grant = hub.holder(headers, task, lease)?;
        let found = hub.store.task(task).await?.ok_or(Refusal::TaskNotFound)?;
        return Ok((found, grant));
    }
    let agent = hub.agent(headers)?;
    if matches!(call, Some(LeaseCall::Accept | LeaseCall::Heartbeat)) {
        let text = "this call needs the job token of the lease: only the executor makes it";
        return Err(Failure::new(Code::ExecutorPoolForbidden, text));
    }
    let (task, lease) = ids.ok_or(Refusal::TaskNotFound)?;
    hub.lease_of_agent(&agent, task, lease).await
}

/// Answers a call without its body if the lease is not the last one, or the task is over. Whoever kept the token of such a
/// lease may take no memory with it. The store decides all other calls.
fn answer_unread(
    task: &TaskView,
    grant: LeaseRef,
    call: Option<LeaseCall>,
) -> Result<Option<axum::response::Response>, Refusal> {
    let Some(call) = call else {
        return Ok(None);
    };
    if let Some(end) = &task.end {
        let is_repeated = is_end_in(call, task.state)
            && end.reason == EndReason::Finished
            && (task.lease, task.fencing_token) == (Some(grant.lease), grant.fencing_token);
        return match end.reported {
            _ if !is_repeated => Err(Refusal::TaskAlreadyTerminal),
            true => Ok(Some(ended(grant, task.state))),
            // The body may say that it is reported.
            false => Ok(None),
        };
    }
    match grant.fencing_token.cmp(&task.fencing_token) {
        Ordering::Less => Err(Refusal::LeaseSuperseded),
        // The store was restored from a backup that does not know the lease. Only a heartbeat brings it back.
        Ordering::Greater if call != LeaseCall::Heartbeat => Err(Refusal::LeaseExpired),
        _ => Ok(None),
    }
}

/// Returns whether this call ends a task in this state.
const fn is_end_in(call: LeaseCall, state: TaskState) -> bool {
    matches!(
        (call, state),
        (LeaseCall::Complete, TaskState::Completed)
            | (LeaseCall::Fail, TaskState::Failed)
            | (LeaseCall::Cancelled, TaskState::Cancelled)
    )
}

/// Returns whether an executor has accepted the task. It stays so until the task is over.
const fn is_accepted(task: &TaskView) -> bool {
    matches!(task.state, TaskState::Running | TaskState::Orphaned)
}

async fn end(
    hub: &Hub,
    grant: LeaseRef,
    ending: Ending,
    body: Body,
    taken: &mut TakenBytes,
) -> Answer {
    let end: End = read(body, ONE_END, taken).await?;
    if let Some(logs) = hub.run_logs.as_ref().filter(|_| !end.reported) {
        logs.keep(grant.lease);
    }
    let state = hub.store.end(grant, ending, &end).await?;
    info!(
        task = %grant.task,
        ?state,
        exit_code = end.exit_code,
        verdict = end.verdict,
        reported = end.reported,
        "a task has ended"
    );
    if end.reported {
        hub.heartbeats.release(&grant.task);
    } else {
        hub.ended.notify_one();
    }
    Ok(ended(grant, state))
}

async fn declined(hub: &Hub, grant: LeaseRef, decline: &Decline, state: TaskState) {
    info!(
        task = %grant.task,
        reason = ?decline.reason,
        diagnostic = decline.diagnostic,
        ?state,
        "an agent has declined a task"
    );
    if let Ok(Some(task)) = hub.store.task(grant.task).await {
        hub.metrics.declined(&task.pool, decline.reason);
        if state.is_terminal() {
            log_change(hub, &task);
        }
    }
}

fn ended(grant: LeaseRef, state: TaskState) -> axum::response::Response {
    json(&Ended {
        task_id: grant.task,
        state,
    })
}

fn lease_of(hub: &Hub, status: LeaseStatus) -> axum::response::Response {
    let grant = status.grant;
    json(&Lease {
        task_id: grant.task,
        lease_id: grant.lease,
        fencing_token: grant.fencing_token,
        state: status.state,
        expires_at: time_after(status.expires_in),
        expires_in_seconds: seconds(status.expires_in),
        lost_in_seconds: seconds(hub.lost_after),
        job_token: hub.keys.current().sign(grant),
        cancel_requested: status.cancel_requested,
    })
}
