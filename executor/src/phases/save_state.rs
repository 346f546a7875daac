//! Saves the state after an apply or a destroy, whatever the result (contract 6.4). It rescues a state that the tool
//! could not store. It publishes a copy, its rendering and a history record. It releases a lock that the tool left when
//! it died. State never appears in the log.
//!
//! This module knows nothing of the operation except how it ended.

use std::collections::HashSet;
use std::io;
use std::time::SystemTime;

use artifact_store::BackendSettings;
use bytes::Bytes;
use job_contract::encoding::hex;
use job_contract::keys::ObjectKey;
use job_contract::report::{ApplyProgress, StateLock, StateStatus};
use md5::{Digest as _, Md5};
use platform::History;
use runtime::regular_file;
use serde_json::Value;
use tracing::warn;

use crate::child_env::ChildEnv;
use crate::context::RunContext;
use crate::error::StepError;
use crate::phases::release_lock::release_leftover_lock;
use crate::phases::rescue_state::{Rescue, StateOutcome, find_errored_state};
use crate::terraform::Terraform;
use crate::terraform::lock_error::EndedTool;
use crate::terraform::progress::Progress;
use crate::terraform::raw_state::{MAX_DOCUMENT_BYTES, RawState};
use crate::terraform::structured::addresses;

/// The end of an apply or a destroy, as far as the state depends on it.
#[derive(Debug)]
pub(crate) struct ApplyEnd {
    pub(crate) success: bool,
    pub(crate) progress: Progress,
    /// The tool's process, if it may have left its lock.
    pub(crate) tool_with_lock: Option<EndedTool>,
    /// When `errored.tfstate` was written, if it existed before the operation.
    pub(crate) errored_before: Option<SystemTime>,
    /// The state that the tool printed because it could not write that file.
    pub(crate) printed_state: Option<Bytes>,
}

/// Where the state is.
#[derive(Debug)]
pub(crate) struct SavedState {
    pub(crate) published: Option<PublishedState>,
    /// Why there is no copy of a stored state.
    pub(crate) missing: Option<StepError>,
    pub(crate) outcome: Option<StateOutcome>,
    pub(crate) lock: Option<StateLock>,
}

/// A published state.
#[derive(Debug)]
pub(crate) struct PublishedState {
    /// The raw state, if it could be parsed.
    pub(crate) raw: Option<RawState>,
    /// The state as JSON, if it was rendered.
    pub(crate) json: Option<Value>,
    pub(crate) history: Option<History>,
}

/// Why no copy of the state is published.
#[derive(Debug)]
enum PublishError {
    /// The state could not be read back, so its content is unknown.
    Unread(StepError),
    /// The state exists, but the artifact store did not accept the copy.
    NotCopied(StepError),
}

/// Saves the state, if there is one. The lock is released last, so that no other run changes the state before it is
/// read here.
pub(crate) async fn save_state(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
    end: &ApplyEnd,
) -> SavedState {
    let (before, printed) = (end.errored_before, end.printed_state.as_ref());
    let (rescued, lock) = match find_errored_state(terraform.working_dir, before, printed) {
        Some(errored) => {
            let rescue = Rescue {
                run,
                terraform,
                env,
                tool: end.tool_with_lock.as_ref(),
                errored,
            };
            let (outcome, lock) = rescue.run().await;
            (Some(outcome), lock)
        }
        None => (None, None),
    };
    // After a failure, the rendering shows which changes the state lacks.
    let rendered = terraform.structured_output || !end.success;
    let published = publish(run, terraform, env, rendered).await;
    let lock = match (lock, &end.tool_with_lock) {
        (None, Some(tool)) => release_leftover_lock(run, terraform, env, tool).await,
        (lock, _) => lock,
    };
    let outcome = rescued.or_else(|| describe_stored_state(end, &published));
    let (published, missing) = match published {
        Ok(published) => (published, None),
        Err(PublishError::Unread(error) | PublishError::NotCopied(error)) => (None, Some(error)),
    };
    SavedState {
        published,
        missing,
        outcome,
        lock,
    }
}

/// Where a state is that the tool stored itself. `None` if there was nothing to store.
fn describe_stored_state(
    end: &ApplyEnd,
    published: &Result<Option<PublishedState>, PublishError>,
) -> Option<StateOutcome> {
    let of = |status, sentence: String, hint| {
        Some(StateOutcome {
            status,
            sentence,
            hint,
        })
    };
    let lost = find_lost_changes(end, published);
    if !lost.is_empty() {
        let mut named = lost[..lost.len().min(ApplyProgress::MAX_ADDRESSES)].join(", ");
        if lost.len() > ApplyProgress::MAX_ADDRESSES {
            named.push_str(", \u{2026}");
        }
        return of(
            StateStatus::Unknown,
            format!("the state does not contain the last changes: {named}"),
            Some("import these resources, or the next apply creates them a second time".into()),
        );
    }
    match published {
        Ok(Some(_)) => of(StateStatus::Stored, "the state is stored".into(), None),
        // The tool succeeds only after it has stored the state.
        _ if end.success => of(StateStatus::Stored, "the state is stored".into(), None),
        Err(PublishError::NotCopied(error)) => of(
            StateStatus::Stored,
            format!("the state is stored, but no copy of it is published: {error}"),
            error.hint(),
        ),
        _ if !end.progress.has_begun() => None,
        Ok(None) => of(StateStatus::Unknown, "there is no state".into(), None),
        Err(PublishError::Unread(error)) => of(
            StateStatus::Unknown,
            format!("it is not known whether the state is stored: {error}"),
            error.hint(),
        ),
    }
}

/// Addresses of objects that were created, but are missing in the state.
fn find_lost_changes(
    end: &ApplyEnd,
    published: &Result<Option<PublishedState>, PublishError>,
) -> Vec<String> {
    // A killed tool may not have stored its last changes, and a failed one may have been unable to.
    match published {
        Ok(Some(PublishedState {
            json: Some(json), ..
        })) if !end.success => {
            let in_state: HashSet<&str> = addresses(json);
            end.progress
                .missing_from(|address| in_state.contains(address))
        }
        Ok(None) if !end.success => end.progress.missing_from(|_| false),
        _ => Vec::new(),
    }
}

/// Publishes copies; `None` if there is no state. The tool renders the state as JSON only if `rendered`.
async fn publish(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
    rendered: bool,
) -> Result<Option<PublishedState>, PublishError> {
    let json = async {
        if rendered {
            terraform.show_state_json(env).await
        } else {
            Ok(None)
        }
    };
    let (json, raw) = tokio::join!(json, raw_state(run, terraform, env));
    let Some(raw) = raw.map_err(PublishError::Unread)? else {
        return Ok(None);
    };
    let (job, name) = (&run.job, run.stored(run.store.state_name()).await);
    let name = name.map_err(PublishError::NotCopied)?;
    let key = ObjectKey::state_raw(&job.organization_id, &job.workspace_id, &name);
    run.stored(run.store.put(&key, raw.clone()))
        .await
        .map_err(PublishError::NotCopied)?;
    let parsed = RawState::parse(&raw);
    let Some(text) = json.map_err(PublishError::Unread)? else {
        if rendered {
            warn!("the tool could not render the state as JSON; only the raw state is stored");
        }
        return Ok(Some(PublishedState {
            raw: parsed,
            json: None,
            history: None,
        }));
    };
    let key = ObjectKey::state_json(&job.organization_id, &job.workspace_id, &name);
    let text = Bytes::from(text);
    let stored = run
        .stored(run.store.put(&key, text.clone()))
        .await
        .map_err(PublishError::NotCopied)?;
    let history = History {
        output: run
            .connections
            .platform
            .state_output(&run.step, &name, stored),
        job_reference: job.job_id.clone(),
        serial: parsed.as_ref().map_or(0, |state| state.serial),
        md5: hex(&Md5::digest(&raw)),
        lineage: parsed
            .as_ref()
            .map(|state| state.lineage.clone())
            .unwrap_or_default(),
    };
    Ok(Some(PublishedState {
        raw: parsed,
        json: serde_json::from_slice(&text).ok(),
        history: Some(history),
    }))
}

/// Reads the state. The local backend's file is read directly, which works even if the tool does not. The tool reads
/// the state of any other backend. It also reads an encrypted local state. The local state of a CLI workspace other than
/// the default has another path, so the tool reads it too.
async fn raw_state(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
) -> Result<Option<Bytes>, StepError> {
    let is_default = env
        .get("TF_WORKSPACE")
        .is_none_or(|workspace| workspace == "default");
    let state = match &run.backend {
        BackendSettings::Local { path } if is_default => {
            match regular_file::read(path, MAX_DOCUMENT_BYTES as u64) {
                Ok(state) if is_encrypted(&state) => {
                    Some(terraform.state_pull(env).await?.unwrap_or(state))
                }
                Ok(state) => Some(state),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(source) => return Err(StepError::working_dir(path, &source)),
            }
        }
        // The output of a failed `state pull` is not a state (W-40).
        _ => {
            let state = terraform.state_pull(env).await?;
            Some(state.ok_or_else(|| {
                StepError::infrastructure(
                    "the state could not be read back from the tool's backend",
                )
            })?)
        }
    };
    Ok(state.filter(|state| !state.is_empty()).map(Bytes::from))
}

fn is_encrypted(state: &[u8]) -> bool {
    RawState::parse(state).is_some_and(|state| state.is_encrypted())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The tool may have reported a failure to store in a form that is not recognised.
    #[test]
    fn a_state_without_a_created_object_does_not_count_as_stored() {
        let mut progress = Progress::default();
        progress.line("terraform_data.made: Creating...");
        progress.line("terraform_data.made: Creation complete after 0s [id=1]");
        let end = ApplyEnd {
            success: false,
            progress,
            tool_with_lock: None,
            errored_before: None,
            printed_state: None,
        };
        let status = |addresses: &[&str]| {
            let resources: Vec<_> = addresses
                .iter()
                .map(|address| json!({"address": address}))
                .collect();
            let published = PublishedState {
                raw: None,
                json: Some(json!({"values": {"root_module": {"resources": resources}}})),
                history: None,
            };
            let outcome = describe_stored_state(&end, &Ok(Some(published)));
            outcome.map(|outcome| outcome.status)
        };
        let stored = status(&["terraform_data.made"]);
        assert_eq!(stored, Some(StateStatus::Stored));
        assert_eq!(status(&[]), Some(StateStatus::Unknown));
    }
}
