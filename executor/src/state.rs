//! Publishes the state after an apply or a destroy, whatever became of it (contract 6.4): the state itself, its
//! raw form, a history record, and the outputs. State never goes to the log.

use std::path::Path;

use artifact_store::{BackendSettings, hex};
use bytes::Bytes;
use control_plane::platform::History;
use job_contract::keys::ObjectKey;
use md5::{Digest as _, Md5};
use serde_json::Value;
use tracing::warn;
use uuid::Uuid;

use crate::child_env::ChildEnv;
use crate::run::{Run, StageError};
use crate::terraform::Terraform;
use crate::terraform::state::RawState;

/// The tool's last resort when it could not store the state.
const ERRORED_STATE: &str = "errored.tfstate";

/// A published state.
#[derive(Debug)]
pub struct Published {
    /// The raw state, as far as it is understood.
    pub raw: Option<RawState>,
    /// The state for machines.
    pub json: Option<Value>,
    /// What the platform is to record of it.
    pub history: Option<History>,
}

/// Stores what state there is; `None` when there is none.
pub async fn publish(
    run: &Run<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
) -> Result<Option<Published>, StageError> {
    rescue(run, terraform, env).await?;
    let (json, raw) = tokio::join!(
        terraform.show_state_json(env),
        raw_state(run, terraform, env)
    );
    let Some(raw) = raw? else { return Ok(None) };
    let (job, name) = (&run.job, Uuid::new_v4().to_string());
    let key = ObjectKey::state_raw(&job.organization_id, &job.workspace_id, &name);
    run.store.put(&key, raw.clone()).await?;
    let parsed = RawState::parse(&raw);
    let Some(text) = json? else {
        warn!("the tool could not render the state as JSON; only the raw state is stored");
        return Ok(Some(Published {
            raw: parsed,
            json: None,
            history: None,
        }));
    };
    let key = ObjectKey::state_json(&job.organization_id, &job.workspace_id, &name);
    let text = Bytes::from(text);
    let stored = run.store.put(&key, text.clone()).await?;
    let history = History {
        output: run.link.platform.state_output(&run.step, &name, stored),
        job_reference: job.job_id.clone(),
        serial: parsed.as_ref().map_or(0, |state| state.serial),
        md5: hex(&Md5::digest(&raw)),
        lineage: parsed
            .as_ref()
            .map(|state| state.lineage.clone())
            .unwrap_or_default(),
    };
    Ok(Some(Published {
        raw: parsed,
        json: serde_json::from_slice(&text).ok(),
        history: Some(history),
    }))
}

/// The local backend's file is read as it is, which works even when the tool does not. Any other backend is asked
/// through the tool, and so is the local one for a CLI workspace other than the default, whose state is elsewhere.
async fn raw_state(
    run: &Run<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
) -> Result<Option<Bytes>, StageError> {
    let is_default = env
        .get("TF_WORKSPACE")
        .is_none_or(|workspace| workspace == "default");
    let backend = run
        .store
        .backend(&run.job.organization_id, &run.job.workspace_id);
    let state = match backend {
        BackendSettings::Local { path } if is_default => match tokio::fs::read(&path).await {
            Ok(state) => Some(state),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(source) => {
                return Err(StageError::WorkingDir {
                    path: path.display().to_string(),
                    source,
                });
            }
        },
        // What a failed `state pull` prints is no state (W-40).
        _ => terraform.state_pull(env).await?,
    };
    Ok(state.filter(|state| !state.is_empty()).map(Bytes::from))
}

/// Pushes a state the tool could not store, and keeps a copy in the store should that fail again.
async fn rescue(
    run: &Run<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
) -> Result<(), StageError> {
    let file = terraform.working_dir.join(ERRORED_STATE);
    if !Path::exists(&file) {
        return Ok(());
    }
    let log = run.log.writer();
    log.line("The tool could not store the state and left it in errored.tfstate: storing it now.")
        .await;
    let pushed = terraform.state_push(env, &file, run.log.writer()).await?;
    if pushed.ended.is_success() {
        log.line("The state is stored.").await;
        return Ok(());
    }
    let job = &run.job;
    let name = format!("errored-{}-{}", job.job_id, job.step_id);
    let key = ObjectKey::state_raw(&job.organization_id, &job.workspace_id, &name);
    let kept = run.store.put_file(&key, &file).await?;
    let text = format!(
        "The state could not be stored. It is kept in {kept}: push it with `state push` before the next run."
    );
    log.line(&run.palette().failure(&text)).await;
    Ok(())
}
