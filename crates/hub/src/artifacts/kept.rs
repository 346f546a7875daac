//! Keeps a state that was refused, beside the state of its workspace. It may be the only record of what a run has made.

use std::sync::Arc;

use job_contract::keys::{Artifact, ObjectKey};
use pool_store::TaskView;
use tracing::warn;

use super::changes::SAVE;
use super::upload::Incoming;
use super::{condition, put};
use crate::Hub;
use crate::failure::Failure;

/// What can be done with such a state.
pub(crate) const ADVICE: &str = "compare it with what `state pull` of the tool prints, and store it with `state push` if it is the right one";

/// Keeps a refused state. Returns the reason, with the place of the state. If it cannot be kept, the sender learns that instead.
pub(super) async fn keep(
    hub: &Arc<Hub>,
    task: &TaskView,
    key: &ObjectKey,
    (incoming, why): (Incoming, Failure),
) -> Failure {
    match store(hub, task, key, incoming).await {
        Ok(place) => why.and(&format!("; it is kept in `{place}`: {ADVICE}")),
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
    Ok(place)
}
