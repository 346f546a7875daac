//! Keeps a state that was refused, beside the state of its workspace. It may be the only record of what a run has made, so runs of
//! the workspace wait until somebody has stored or dropped it.

use std::sync::Arc;

use job_contract::StepType;
use job_contract::kept_state::{self, KeptState};
use job_contract::keys::{Artifact, ObjectKey, errored_state_name};
use pool_store::TaskView;
use tracing::warn;

use super::changes::SAVE;
use super::upload::Incoming;
use super::{condition, failed, put};
use crate::Hub;
use crate::failure::Failure;

/// What can be done with such a state of a task.
pub(crate) fn advice(task: &TaskView) -> String {
    if !is_listed(task) {
        return "compare it with what `state pull` of the tool prints, and store it with `state push` if it is the right one"
            .to_owned();
    }
    let command = |verb| kept_state::command(verb, &task.organization, &task.workspace);
    format!(
        "store it with `{}` or drop it with `{}`, with the settings of the store of the hub; until then, no run of the workspace plans \
         or applies",
        command("store"),
        command("drop")
    )
}

/// Whether runs wait for such a state. A step that changes no infrastructure has made nothing.
fn is_listed(task: &TaskView) -> bool {
    StepType::parse(&task.kind).is_some_and(StepType::changes_infrastructure)
}

/// Keeps a refused state. Returns the reason, with the place of the state. If it cannot be kept, the sender learns that instead.
pub(super) async fn keep(
    hub: &Arc<Hub>,
    task: &TaskView,
    key: &ObjectKey,
    (incoming, why): (Incoming, Failure),
) -> Failure {
    match store(hub, task, key, incoming).await {
        Ok(place) => why.and(&format!("; it is kept in `{place}`: {}", advice(task))),
        Err(failure) => failure,
    }
}

async fn store(
    hub: &Arc<Hub>,
    task: &TaskView,
    key: &ObjectKey,
    incoming: Incoming,
) -> Result<String, Failure> {
    let condition = condition(hub.artifacts.store()?, Artifact::ErroredState, key).await?;
    put(hub, task, SAVE, (key, &condition), incoming).await?;
    note(hub, task, key).await
}

/// Notes where a state of a task is kept, and returns it.
pub(super) async fn note(hub: &Hub, task: &TaskView, key: &ObjectKey) -> Result<String, Failure> {
    let store = hub.artifacts.store()?;
    let place = store.reference(key);
    hub.store.kept_state(task.task, &place).await?;
    if is_listed(task) {
        let name = errored_state_name(&task.job, &task.step);
        let seen = hub.store.seen_state(task.task).await?;
        let state = KeptState {
            follows: seen.last().map(str::to_owned),
            is_whole: false,
        };
        let listing = store.change_kept_states(&task.organization, &task.workspace, |list| {
            list.states.insert(name.clone(), state.clone());
        });
        listing.await.map_err(|error| failed(&error))?;
    }
    warn!(
        task = %task.task,
        job_id = task.job,
        step_id = task.step,
        workspace_id = task.workspace,
        place,
        "a state that could not be stored is kept"
    );
    Ok(place)
}

/// Takes the state of a task from the list, because the task has stored it after all.
pub(super) async fn unlist(hub: &Hub, task: &TaskView) -> Result<(), Failure> {
    if hub.store.seen_state(task.task).await?.kept.is_none() {
        return Ok(());
    }
    let name = errored_state_name(&task.job, &task.step);
    let store = hub.artifacts.store()?;
    let listing = store.change_kept_states(&task.organization, &task.workspace, |list| {
        list.states.remove(&name);
    });
    listing.await.map_err(|error| failed(&error))
}
