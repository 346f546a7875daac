//! Keeps a state that was refused, beside the state of its workspace. It may be the only record of what a run has made, so runs of
//! the workspace wait until somebody has stored or dropped it.

use std::sync::Arc;

use job_contract::chain;
use job_contract::kept_state::{self, KeptState};
use job_contract::keys::{Artifact, ObjectKey, errored_state_name};
use pool_store::TaskView;
use tracing::warn;

use super::changes::SAVE;
use super::check::changes_state;
use super::upload::Incoming;
use super::{condition, failed, put};
use crate::Hub;
use crate::failure::Failure;

/// What can be done with such a state of a task. `is_listed` is whether runs wait for it.
pub(crate) fn advice(task: &TaskView, is_listed: bool) -> String {
    if !is_listed {
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

/// Whether runs wait for such a state. A step that may not change the state has made nothing.
pub(crate) fn is_listed(hub: &Hub, task: &TaskView) -> bool {
    changes_state(hub, task)
}

/// Keeps a refused state. Returns the reason, with the place of the state. If it cannot be kept, the sender learns that instead.
pub(super) async fn keep(
    hub: &Arc<Hub>,
    task: &TaskView,
    key: &ObjectKey,
    (incoming, why): (Incoming, Failure),
) -> Failure {
    match store(hub, task, key, incoming).await {
        Ok(place) => why.and(&format!(
            "; it is kept in `{place}`: {}",
            advice(task, is_listed(hub, task))
        )),
        Err(failure) => failure,
    }
}

async fn store(
    hub: &Arc<Hub>,
    task: &TaskView,
    key: &ObjectKey,
    incoming: Incoming,
) -> Result<String, Failure> {
    let listed = list(hub, task).await;
    let condition = condition(hub.artifacts.store()?, Artifact::ErroredState, key).await?;
    put(hub, task, SAVE, (key, &condition), incoming).await?;
    note(hub, task, key, listed).await
}

/// Adds the state of a task to the list, if runs wait for it. This comes before the state is kept, so that no kept state is missing
/// there: if the hub is killed in between, an entry without a state still holds the runs back.
pub(super) async fn list(hub: &Hub, task: &TaskView) -> Result<(), Failure> {
    if !is_listed(hub, task) {
        return Ok(());
    }
    let name = errored_state_name(&task.job, &task.step);
    let seen = hub.store.seen_state(task.task).await?;
    let state = KeptState {
        follows: seen.last().map(str::to_owned),
        is_whole: false,
    };
    let store = hub.artifacts.store()?;
    let listing = store.change_kept_states(&task.organization, &task.workspace, |list| {
        list.states.insert(name.clone(), state.clone());
    });
    listing.await.map_err(|error| failed(&error))
}

/// Notes where a state of a task is kept, and returns it. `listed` is whether [`list`] has worked: the state is kept also if not.
pub(super) async fn note(
    hub: &Hub,
    task: &TaskView,
    key: &ObjectKey,
    listed: Result<(), Failure>,
) -> Result<String, Failure> {
    let place = hub.artifacts.store()?.reference(key);
    hub.store.kept_state(task.task, &place).await?;
    warn!(
        task = %task.task,
        job_id = task.job,
        step_id = task.step,
        workspace_id = task.workspace,
        place,
        "a state that could not be stored is kept"
    );
    let unlisted =
        |why: Failure| why.and(&format!("; the state is kept in `{place}`, and not listed"));
    listed.map_err(unlisted)?;
    Ok(place)
}

/// Takes the state of a task from the list, because the task has stored it after all. Also one of which the database knows nothing: a
/// hub of an earlier version forgets it without this, and a killed hub may have noted it in the list alone.
pub(super) async fn unlist(hub: &Hub, task: &TaskView) -> Result<(), Failure> {
    if !is_listed(hub, task) {
        return Ok(());
    }
    let is_known = hub.store.seen_state(task.task).await?.kept.is_some();
    let name = errored_state_name(&task.job, &task.step);
    let store = hub.artifacts.store()?;
    let listing = store.change_kept_states(&task.organization, &task.workspace, |list| {
        list.states.remove(&name);
    });
    match listing.await {
        // The state is stored, and most likely was never listed.
        Err(error) if !is_known => {
            warn!(
                error = chain(&error),
                task = %task.task,
                "whether a stored state is listed as a kept one is not known"
            );
            Ok(())
        }
        listed => listed.map_err(|error| failed(&error)),
    }
}
