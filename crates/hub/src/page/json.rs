//! What the status page shows, as JSON for scripts. Job data is never in it.

use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::Uri;
use axum::response::{IntoResponse as _, Response};
use pool_protocol::id::{PoolName, TaskId};
use pool_protocol::problem::Code;
use pool_store::state::TaskEnd;
use pool_store::{Condition, EventView, InstanceView, Page, TaskFilter, TaskView, Wait};
use serde_json::{Value, json};

use super::access::Site;
use super::overview::Summary;
use super::viewer::Viewer;
use super::{ROWS, log_response, more, parameter};
use crate::failure::Failure;

pub(super) async fn pools(State(site): State<Site>, viewer: Viewer) -> Result<Response, Failure> {
    let summaries = site.summaries(&viewer).await?;
    let pools: Vec<Value> = summaries.iter().map(pool).collect();
    Ok(Json(json!({ "pools": pools })).into_response())
}

pub(super) async fn agents(
    State(site): State<Site>,
    viewer: Viewer,
    Path(name): Path<String>,
    uri: Uri,
) -> Result<Response, Failure> {
    let name = seen(&site, &viewer, &name).await?;
    let page = Page {
        after: parameter(&uri, "after"),
        limit: ROWS,
    };
    let agents = site.hub.store.instances(Some(&name), page).await?;
    let next = more(&agents, |agent| agent.instance.to_string());
    let agents: Vec<Value> = agents.iter().map(agent).collect();
    Ok(Json(json!({"agents": agents, "next": next})).into_response())
}

/// Runs that are not over, oldest first; with `state=over` those that are, the last one first.
pub(super) async fn runs(
    State(site): State<Site>,
    viewer: Viewer,
    Path(name): Path<String>,
    uri: Uri,
) -> Result<Response, Failure> {
    let name = seen(&site, &viewer, &name).await?;
    let state: Option<String> = parameter(&uri, "state");
    let listed = match state.as_deref() {
        None | Some("open") => TaskFilter::Open,
        Some("over") => TaskFilter::Latest,
        Some(_) => {
            let text = "`state` must be `open` or `over`";
            return Err(Failure::new(Code::RequestInvalid, text));
        }
    };
    let page = Page {
        after: parameter(&uri, "after"),
        limit: ROWS,
    };
    let runs = site.hub.store.tasks(Some(&name), listed, page).await?;
    let next = more(&runs, |run| run.task.to_string());
    let runs: Vec<Value> = runs.iter().map(run).collect();
    Ok(Json(json!({"runs": runs, "next": next})).into_response())
}

pub(super) async fn one_run(
    State(site): State<Site>,
    viewer: Viewer,
    Path((name, id)): Path<(String, String)>,
) -> Result<Response, Failure> {
    let task = find(&site, &viewer, &name, &id).await?;
    let mut document = run(&task);
    let is_in_line = !matches!(task.wait, Some(Wait::Workspace(_)));
    let position = site.hub.store.position(task.task).await?;
    document["position"] = json!(position.filter(|_| is_in_line));
    document["keptState"] = json!(site.hub.store.seen_state(task.task).await?.kept);
    let events = site.hub.store.events(task.task).await?;
    document["events"] = events.iter().map(event).collect();
    Ok(Json(document).into_response())
}

pub(super) async fn log(
    State(site): State<Site>,
    viewer: Viewer,
    Path((name, id)): Path<(String, String)>,
    uri: Uri,
) -> Result<Response, Failure> {
    let task = find(&site, &viewer, &name, &id).await?;
    Ok(log_response(&site, &task, &uri))
}

fn unknown() -> Failure {
    let text = "there is nothing at this address, or your token does not show it";
    Failure::new(Code::TaskNotFound, text)
}

async fn seen(site: &Site, viewer: &Viewer, name: &str) -> Result<PoolName, Failure> {
    let name: PoolName = name.parse().map_err(|_| unknown())?;
    let summaries = site.summaries(viewer).await?;
    let is_seen = summaries.iter().any(|summary| summary.pool == name);
    is_seen.then_some(name).ok_or_else(unknown)
}

async fn find(site: &Site, viewer: &Viewer, pool: &str, id: &str) -> Result<TaskView, Failure> {
    let id: TaskId = id.parse().map_err(|_| unknown())?;
    let task = site.hub.store.task(id).await?;
    task.filter(|task| task.pool.as_str() == pool && viewer.sees(&task.pool))
        .ok_or_else(unknown)
}

fn pool(summary: &Summary) -> Value {
    let problems: Vec<String> = summary
        .problems()
        .into_iter()
        .map(|(_, text)| text)
        .collect();
    let oldest = summary.counts.as_ref().and_then(|view| view.oldest);
    json!({
        "pool": summary.pool,
        "waiting": summary.waiting(),
        "active": summary.running(),
        "agentsOnline": summary.of(|view| view.online),
        "agentsOffline": summary.of(|view| view.offline),
        "slots": summary.of(|view| view.capacity),
        "freeSlots": summary.of(|view| view.free),
        "unreported": summary.of(|view| view.unreported),
        "oldestWaitsSeconds": oldest.map(seconds),
        "problems": problems,
    })
}

fn agent(agent: &InstanceView) -> Value {
    let condition = match agent.condition {
        Condition::Online => "online",
        Condition::Draining => "draining",
        Condition::Degraded => "degraded",
        Condition::Offline => "offline",
    };
    json!({
        "instanceId": agent.instance,
        "agent": agent.agent,
        "condition": condition,
        "version": agent.version,
        "platform": agent.operating_system,
        "architecture": agent.architecture,
        "target": agent.target,
        "tags": agent.tags,
        "slots": agent.capacity,
        "freeSlots": agent.free,
        "runs": agent.tasks,
        "failures": agent.failures,
        "lastSeenSeconds": seconds(agent.last_seen),
    })
}

fn run(task: &TaskView) -> Value {
    let wait = task.wait.map(|wait| match wait {
        Wait::Unconfirmed => "unconfirmed",
        Wait::Pause(_) => "pause",
        Wait::Workspace(_) => "workspace",
        Wait::NoInstance => "no_agent",
        Wait::NoCapacity => "no_free_slot",
        Wait::Turn => "turn",
    });
    let waits_for_run = match task.wait {
        Some(Wait::Workspace(active)) => Some(active),
        _ => None,
    };
    json!({
        "run": task.task,
        "pool": task.pool,
        "organizationId": task.organization,
        "workspaceId": task.workspace,
        "jobId": task.job,
        "stepId": task.step,
        "type": task.kind,
        "state": task.state,
        "waitsFor": wait,
        "waitsForRun": waits_for_run,
        "submittedSecondsAgo": seconds(task.age),
        "attempts": task.attempts,
        "reasons": task.reasons,
        "agent": task.agent,
        "executor": task.executor,
        "acceptedBy": task.holder,
        "phase": task.phase,
        "silentSeconds": task.silent.map(seconds),
        "cancelRequested": task.cancel_requested,
        "traceparent": task.traceparent,
        "end": task.end.as_ref().map(|reached| end(task, reached)),
    })
}

fn end(task: &TaskView, end: &TaskEnd) -> Value {
    json!({
        "reason": end.reason.name(),
        "diagnostic": end.diagnostic,
        "exitCode": end.exit_code,
        "verdict": end.verdict,
        "secondsAgo": task.ended.map(seconds),
        "reported": end.reported,
    })
}

fn event(event: &EventView) -> Value {
    json!({
        "at": humantime::format_rfc3339_millis(event.at).to_string(),
        "from": event.from,
        "to": event.to,
        "by": event.actor,
        "note": event.note,
    })
}

const fn seconds(time: Duration) -> u64 {
    time.as_secs()
}
