//! Refuses an operation in a workspace that has a kept state. The stored state lacks what the kept one has, so the operation would
//! create it a second time. It also changes the list of kept states for the phases that keep one.

use artifact_store::{BackendSettings, Store, StoreError};
use job_contract::kept_state::{self, KeptState, KeptStates};
use job_contract::keys::{ObjectKey, errored_state_name};
use job_contract::{Exit, chain};
use tracing::warn;

use crate::context::RunContext;
use crate::error::StepError;
use crate::kept_states::states_on_disk;
use crate::operation::Operation;

/// Refuses an operation while the workspace has a kept state. Steps of scripts may still run.
pub(crate) async fn find_kept_state(run: &RunContext<'_>) -> Result<(), StepError> {
    match Operation::of(run.step_type) {
        Some(_) => refuse(run, &run.store).await,
        None => Ok(()),
    }
}

/// Asks again before the operation changes something, because another run may have kept a state since. A hub tells a store once, so it
/// is asked with a new one.
pub(crate) async fn find_kept_state_again(run: &RunContext<'_>) -> Result<(), StepError> {
    if run.store.hub().is_none() {
        return refuse(run, &run.store).await;
    }
    let relaying = run.connections.relaying_lease();
    let store = run.config.store.open(&run.folders, relaying, &run.job)?;
    refuse(run, &store).await
}

async fn refuse(run: &RunContext<'_>, store: &Store) -> Result<(), StepError> {
    let (organization, workspace) = (&run.job.organization_id, &run.job.workspace_id);
    let names = match store.kept_states(organization, workspace).await {
        // Services answer so for a list that does not exist, if the credentials may not list objects. Runs with them begin all the same.
        Err(error) if error.may_be_missing() => {
            let hint = error.hint().unwrap_or_default();
            let text = format!(
                "WARNING: whether a state of this workspace is kept is not known: {}; {hint}",
                chain(&error)
            );
            warn!("{text}");
            run.log_failure(&text).await;
            Vec::new()
        }
        names => names?,
    };
    let on_disk = states_on_disk(&run.folders.data, organization, workspace)?;
    let place = match (names.first(), on_disk.first()) {
        (Some(name), _) => {
            let key = ObjectKey::state_raw(organization, workspace, name);
            let reference = store.served().map(|store| store.reference(&key));
            reference.unwrap_or_else(|| key.in_bucket())
        }
        (None, Some(path)) => path.display().to_string(),
        (None, None) => return Ok(()),
    };
    let text = format!(
        "a state of this workspace is not stored, and is kept in {place}: nothing was begun"
    );
    let hint = remedy(run, !on_disk.is_empty());
    Err(StepError::new(Exit::StepFailed, text).with_hint(hint))
}

/// How a person ends it, and where.
pub(crate) fn remedy(run: &RunContext<'_>, is_on_disk: bool) -> String {
    let job = &run.job;
    let is_local = matches!(run.backend, BackendSettings::Local { .. });
    let options = if is_local || is_on_disk {
        format!(" --data-dir {}", run.folders.data.display())
    } else {
        String::new()
    };
    let command = |verb| {
        let command = kept_state::command(verb, &job.organization_id, &job.workspace_id);
        format!("`{command}{options}`")
    };
    let place = match run.store.hub() {
        Some(_) => ", with the settings of the store of the hub",
        None if is_local => "",
        None => ", with the settings of the store",
    };
    format!(
        "store it with {}, or drop it with {}{place}; until then, no run of this workspace plans or applies",
        command("store"),
        command("drop")
    )
}

/// Adds the state of a run, which is in the artifact store, to the list. A hub does that itself.
pub(crate) async fn list_state(run: &RunContext<'_>, state: KeptState) -> Result<(), StoreError> {
    change_list(run, |list, name| {
        list.states.insert(name.to_owned(), state.clone());
    })
    .await
}

/// Takes the state of a run from the list, because it is stored.
pub(crate) async fn unlist_state(run: &RunContext<'_>) -> Result<(), StoreError> {
    change_list(run, |list, name| {
        list.states.remove(name);
    })
    .await
}

async fn change_list(
    run: &RunContext<'_>,
    change: impl Fn(&mut KeptStates, &str) + Send + Sync,
) -> Result<(), StoreError> {
    let Some(store) = run.store.served() else {
        return Ok(());
    };
    let job = &run.job;
    let name = errored_state_name(&job.job_id, &job.step_id);
    let change = |list: &mut KeptStates| change(list, &name);
    store
        .change_kept_states(&job.organization_id, &job.workspace_id, change)
        .await
}
