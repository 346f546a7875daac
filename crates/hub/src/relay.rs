//! The relay: executors of a pool send requests to the platform through the hub, with the token of their lease instead
//! of a secret of the platform. The relay passes only requests about their own organization, workspace, job and step.
//!
//! - [`rules`] says which requests there are, and which of them a task may make in its state. Pure.
//! - [`body`] checks what a request says. Pure.
//! - [`scripts`] says what scripts may ask, and [`registry`] what the registry of modules is asked. Pure.
//! - [`turns`] limits the requests of each task and each pool, and [`log_limit`] the live log of each task.
//! - [`forward`] sends it to Terrakube, and [`records`] answers it from the records of this machine.

mod body;
mod calls;
mod forward;
mod log_limit;
mod records;
mod registry;
pub(crate) mod rules;
mod scripts;
#[cfg(test)]
mod tests;
mod turns;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use platform::local::LocalPlatform;
use platform::{Platform, StepRef};
use pool_protocol::id::{LeaseId, PoolName, TaskId};
use pool_protocol::problem::Code;
use pool_store::{Refusal, TaskView};
use tracing::{debug, error, warn};
use url::Url;

use self::forward::{Asked, Outgoing, ToTerrakube};
use self::log_limit::LogLimits;
use self::rules::{Call, RelayRefusal};
use self::turns::Turns;
pub(crate) use self::turns::{Place, Turn};
use super::failure::Failure;
use super::pools::{Boundary, ScriptAccess, StateAccess};
use super::{Hub, step_of};

/// The way of executors to the platform.
#[derive(Debug)]
pub(crate) struct Relay {
    to: Destination,
    turns: Turns,
    logs: LogLimits,
}

/// Where requests go.
#[derive(Debug)]
enum Destination {
    Terrakube(Box<ToTerrakube>),
    Records(LocalPlatform),
}

impl Destination {
    /// Returns the address of the platform that users know.
    fn public_url(&self) -> Option<&Url> {
        match self {
            Self::Terrakube(terrakube) => Some(terrakube.public_url()),
            Self::Records(_) => None,
        }
    }
}

impl Relay {
    pub(crate) fn new(platform: &Platform) -> Result<Self, reqwest::Error> {
        let to = match platform {
            Platform::Terrakube(terrakube) => {
                Destination::Terrakube(Box::new(ToTerrakube::new(terrakube.clone())?))
            }
            Platform::Local(records) => Destination::Records(records.clone()),
        };
        Ok(Self {
            to,
            turns: Turns::new(),
            logs: LogLimits::default(),
        })
    }

    /// Returns the address of the platform that users know.
    pub(crate) fn public_url(&self) -> Option<&Url> {
        self.to.public_url()
    }

    pub(crate) const fn turns(&self) -> &Turns {
        &self.turns
    }

    async fn send(
        &self,
        outgoing: Outgoing,
        step: &StepRef,
        turn: Turn,
    ) -> Result<Response, Failure> {
        match &self.to {
            Destination::Terrakube(terrakube) => terrakube.send(outgoing, step, turn).await,
            Destination::Records(records) => records::answer(records, outgoing, step, turn).await,
        }
    }
}

pub(super) async fn handle(State(hub): State<Arc<Hub>>, request: Request) -> Response {
    match pass(&hub, request).await {
        Ok(response) => response,
        Err(failure) => failure.into_response(),
    }
}

async fn pass(hub: &Arc<Hub>, request: Request) -> Result<Response, Failure> {
    let (head, body) = request.into_parts();
    // The decoded parameters of the route are not used, because two parsers of one path could differ.
    let target = rules::split(head.uri.path()).ok_or(Refusal::TaskNotFound)?;
    let authorize = || authorize(hub, &head.headers, target.task, target.lease);
    let task = authorize().await?;
    let refuse = |denied| refuse(&task, &head.method, head.uri.path(), &denied);
    let step = step_of(&task);
    let query = head.uri.query();
    let call = Call::find(&head.method, &target.path, query, &step)
        .and_then(|call| rules::check_state(&task, call.when()).map(|()| call));
    let call = call.map_err(refuse)?;
    if call == Call::OfScript && !hub.lets_scripts_ask(&task.pool) {
        let reason = "the file of the pools does not let scripts of this pool use the API (`scripts: workspace`)";
        return Err(refuse(RelayRefusal::Request(reason)));
    }
    let place = hub.relay.turns.place(task.task)?;
    let bytes = hub.budget.of_task(&task.pool, task.task);
    let to = &hub.relay.to;
    let asked = Asked {
        call,
        method: head.method.clone(),
        path: &target.path,
        query,
    };
    let outgoing = Outgoing::new(asked, &step, to, body, bytes).await;
    let outgoing = outgoing.map_err(refuse)?;
    let turn = hub.relay.turns.next(&task.pool, place).await?;
    // The task may have ended while its body or its turn was waited for.
    rules::check_state(&authorize().await?, call.when()).map_err(refuse)?;
    debug!(task = %task.task, ?call, "relayed");
    let lines = outgoing.lines();
    if lines.is_some() && hub.relay.logs.is_full(task.task) {
        // An executor would repeat what is refused.
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    // A sender that leaves frees neither its turn nor its bytes while the platform works, and what it has added counts.
    let hub = Arc::clone(hub);
    let sent = tokio::spawn(async move {
        let response = hub.relay.send(outgoing, &step, turn).await?;
        if let Some(lines) = lines.filter(|_| response.status().is_success()) {
            note_lines(&hub, &task, &lines);
        }
        Ok(response)
    });
    sent.await.unwrap_or_else(|error| {
        error!(%error, "a relayed request ended without an answer");
        Err(Failure::new(
            Code::Other,
            "the request ended without an answer: try again",
        ))
    })
}

impl Hub {
    /// Returns whether scripts of a pool may use the platform's API.
    fn lets_scripts_ask(&self, pool: &PoolName) -> bool {
        let pools = self.pools.current();
        pools.get(pool).map(|pool| pool.scripts) == Some(ScriptAccess::Workspace)
    }

    /// Returns whether scripts of a pool may change the state of their workspace.
    pub(crate) fn lets_scripts_change_state(&self, pool: &PoolName) -> bool {
        let pools = self.pools.current();
        pools.get(pool).map(|pool| pool.script_state) == Some(StateAccess::Write)
    }
}

/// Notes lines that the platform has accepted.
fn note_lines(hub: &Hub, task: &TaskView, lines: &[u8]) {
    if hub.relay.logs.add(task.task, lines.len()) {
        warn!(
            task = %task.task,
            pool = %task.pool,
            job_id = task.job,
            step_id = task.step,
            "the live log of a task has reached its limit, further lines are dropped"
        );
    }
    hub.tails.add(task.task, lines);
}

/// Returns the task of a request, if its token is valid for the current lease of the task.
pub(crate) async fn authorize(
    hub: &Hub,
    headers: &HeaderMap,
    task: TaskId,
    lease: LeaseId,
) -> Result<TaskView, Failure> {
    let grant = hub.holder(headers, task, lease)?;
    let view = hub.store.task(task).await?.ok_or(Refusal::TaskNotFound)?;
    if (view.lease, view.fencing_token) != (Some(grant.lease), grant.fencing_token) {
        hub.metrics.stale.inc();
        return Err(Refusal::LeaseSuperseded.into());
    }
    let pools = hub.pools.current();
    if pools.get(&view.pool).map(|pool| pool.boundary) == Some(Boundary::Relay) {
        return Ok(view);
    }
    let text = format!("pool `{}` has no relay to the platform", view.pool);
    Err(Failure::new(Code::ExecutorPoolForbidden, text))
}

pub(crate) fn refuse(
    task: &TaskView,
    method: &Method,
    path: &str,
    refusal: &RelayRefusal,
) -> Failure {
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
        RelayRefusal::Busy => Failure::new(Code::RateLimited, refusal.to_string()),
        RelayRefusal::Unread(_) => Failure::new(Code::RequestInvalid, refusal.to_string()),
        RelayRefusal::TooLarge(_) | RelayRefusal::ContextTooLarge(_) => {
            Failure::new(Code::RequestInvalid, refusal.to_string())
                .with_status(StatusCode::PAYLOAD_TOO_LARGE)
        }
    }
}
