//! Saves the state after an apply or a destroy, whatever the result (contract 6.4). It rescues a state that the tool
//! could not store. It publishes a copy, its rendering and a history record. It releases a lock that the tool left when
//! it died. State never appears in the log.
//!
//! An operation counts as successful only if the store has the state that the tool has written.
//!
//! This module knows nothing of the operation except how it ended.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use artifact_store::BackendSettings;
use bytes::Bytes;
use job_contract::Exit;
use job_contract::encoding::hex;
use job_contract::kept_state::KeptState;
use job_contract::keys::ObjectKey;
use job_contract::report::{ApplyProgress, StateLock, StateStatus};
use md5::{Digest as _, Md5};
use platform::History;
use runtime::regular_file;
use serde_json::Value;
use tracing::warn;

use crate::child_env::ChildEnv;
use crate::context::RunContext;
use crate::error::{StepError, catch_panic};
use crate::phases::find_kept_state::{list_state, remedy};
use crate::phases::release_lock::release_leftover_lock;
use crate::phases::rescue_state::{Rescue, StateOutcome, find_errored_state};
use crate::phases::stored_state::{Stored, has_state_in_store, read_stored};
use crate::terraform::Terraform;
use crate::terraform::lock_error::EndedTool;
use crate::terraform::progress::Progress;
use crate::terraform::raw_state::{MAX_DOCUMENT_BYTES, RawState, StateMark};
use crate::terraform::state_summary::StateSummary;
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
    /// What the store had before the operation.
    pub(crate) before: Stored<StateSummary>,
}

/// Where the state is.
#[derive(Debug)]
pub(crate) struct SavedState {
    pub(crate) published: Option<PublishedState>,
    /// Why there is no copy of a stored state, or why it is not certain that the store has the state.
    pub(crate) missing: Option<StepError>,
    /// Whether the store has the state that the tool has written. Without that, no operation is successful.
    pub(crate) is_confirmed: bool,
    pub(crate) outcome: Option<StateOutcome>,
    pub(crate) lock: Option<StateLock>,
}

impl SavedState {
    /// The end of an operation that changed nothing.
    pub(crate) const fn unchanged() -> Self {
        Self {
            published: None,
            missing: None,
            is_confirmed: true,
            outcome: None,
            lock: None,
        }
    }

    /// The end of an operation whose state may be anywhere.
    pub(crate) fn unknown(error: StepError) -> Self {
        Self {
            missing: Some(error),
            is_confirmed: false,
            ..Self::unchanged()
        }
    }
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
    /// The tool has written a state that the store does not have.
    Elsewhere(StateStatus, StepError),
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
                changes: &end.progress,
                before: &end.before,
                errored,
            };
            let (outcome, lock) = rescue.run().await;
            (Some(outcome), lock)
        }
        None => (None, None),
    };
    // After a failure, the rendering shows which changes the state lacks.
    let rendered = terraform.structured_output || !end.success;
    // What the rescue keeps has more than what the tool can read, and the same name.
    let may_keep = rescued
        .as_ref()
        .is_none_or(|outcome| outcome.status == StateStatus::Rescued);
    let publishing =
        async { Ok(publish(run, terraform, env, end.success, rendered, may_keep).await) };
    let published = catch_panic(publishing)
        .await
        .unwrap_or_else(|panicked| Err(PublishError::Unread(panicked)));
    let lock = match (lock, &end.tool_with_lock) {
        (None, Some(tool)) => release_leftover_lock(run, terraform, env, tool).await,
        (lock, _) => lock,
    };
    let outcome = rescued.or_else(|| describe_stored_state(end, &published));
    let is_confirmed = matches!(published, Ok(_) | Err(PublishError::NotCopied(_)));
    let (published, missing) = match published {
        Ok(published) => (published, None),
        Err(
            PublishError::Unread(error)
            | PublishError::Elsewhere(_, error)
            | PublishError::NotCopied(error),
        ) => (None, Some(error)),
    };
    SavedState {
        published,
        missing,
        is_confirmed,
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
        Err(PublishError::Elsewhere(status, error)) => of(*status, error.to_string(), error.hint()),
        Ok(None) | Err(PublishError::NotCopied(_)) if end.success => {
            of(StateStatus::Stored, "the state is stored".into(), None)
        }
        Err(PublishError::NotCopied(error)) => of(
            StateStatus::Stored,
            format!("the state is stored, but no copy of it is published: {error}"),
            error.hint(),
        ),
        _ if !end.success && !end.progress.has_begun() => None,
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
    success: bool,
    rendered: bool,
    may_keep: bool,
) -> Result<Option<PublishedState>, PublishError> {
    let json = catch_panic(async {
        if rendered {
            terraform.show_state_json(env).await
        } else {
            Ok(None)
        }
    });
    let (json, raw) = tokio::join!(
        json,
        confirmed_state(run, terraform, env, success, may_keep)
    );
    let Some(raw) = raw? else {
        return Ok(None);
    };
    let (job, name) = (&run.job, run.stored(run.store.state_name()).await);
    let name = name.map_err(PublishError::NotCopied)?;
    let key = ObjectKey::state_raw(&job.organization_id, &job.workspace_id, &name);
    run.stored(run.store.put(&key, raw.clone()))
        .await
        .map_err(PublishError::NotCopied)?;
    let parsed = RawState::parse(&raw);
    let Some(text) = json.map_err(PublishError::NotCopied)? else {
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

/// Reads the state, and makes sure that the store has what the tool has written.
async fn confirmed_state(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
    success: bool,
    may_keep: bool,
) -> Result<Option<Bytes>, PublishError> {
    let state = if let BackendSettings::Local { path } = &run.backend {
        // A tool that was killed may not start again, and its file has the state.
        if success {
            let pulled = pull(terraform, env).await?;
            confirm(run, &pulled, success, may_keep).await?;
        }
        let state = local_state(path, terraform, env).await;
        state.map_err(PublishError::Unread)?
    } else {
        let pulled = pull(terraform, env).await?;
        confirm(run, &pulled, success, may_keep).await?;
        Some(pulled)
    };
    Ok(state.filter(|state| !state.is_empty()).map(Bytes::from))
}

/// The state as the tool sees it.
async fn pull(terraform: &Terraform<'_>, env: &ChildEnv) -> Result<Vec<u8>, PublishError> {
    let pulled = terraform.state_pull(env).await;
    // The output of a failed `state pull` is not a state (W-40).
    let pulled = pulled.map_err(PublishError::Unread)?;
    pulled.ok_or_else(|| {
        PublishError::Unread(StepError::infrastructure(
            "the state could not be read back from the tool's backend",
        ))
    })
}

/// The file of the local backend, which can be read even if the tool cannot. The tool reads an encrypted one.
async fn local_state(
    path: &Path,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
) -> Result<Option<Vec<u8>>, StepError> {
    match regular_file::read(path, MAX_DOCUMENT_BYTES as u64) {
        Ok(state) if is_encrypted(&state) => {
            Ok(Some(terraform.state_pull(env).await?.unwrap_or(state)))
        }
        Ok(state) => Ok(Some(state)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StepError::working_dir(path, &source)),
    }
}

/// Asks the store for the state that the tool has written. After a failure, an answer that cannot be had changes nothing. A state that
/// the store lacks is kept, if nothing else is.
async fn confirm(
    run: &RunContext<'_>,
    pulled: &[u8],
    success: bool,
    may_keep: bool,
) -> Result<(), PublishError> {
    if pulled.is_empty() || !has_state_in_store(run) {
        return Ok(());
    }
    let written = StateMark::read(pulled).map_err(|source| {
        let text = "what the tool's backend has is not a state";
        StepError::infrastructure(text).because(&source)
    });
    let looking = async {
        let written = written?;
        let stored = stored_mark(run).await?;
        Ok::<_, StepError>((is_stored(&written, &stored), written))
    };
    match looking.await {
        Ok((true, _)) => Ok(()),
        Ok((false, _)) if !may_keep => {
            let text = "the tool's backend has another state than the store";
            Err(PublishError::Unread(StepError::infrastructure(text)))
        }
        Ok((false, written)) => Err(keep_elsewhere(run, pulled, &written).await),
        Err(error) if success => Err(PublishError::Unread(error)),
        Err(error) => {
            warn!(%error, "whether the store has the state is not known");
            Ok(())
        }
    }
}

/// Another run may have followed since. Some backends store no state without content.
fn is_stored(written: &StateMark, stored: &Stored<StateMark>) -> bool {
    match stored {
        Stored::State(stored) => stored.follows(written),
        Stored::Nothing => written.is_empty,
        Stored::Hidden => true,
    }
}

async fn stored_mark(run: &RunContext<'_>) -> Result<Stored<StateMark>, StepError> {
    let (stored, _) = read_stored(run, StateMark::read).await?;
    Ok(match stored {
        Stored::State(read) => Stored::State(read.map_err(|source| {
            StepError::infrastructure("the state could not be read back from the store")
                .because(&source)
        })?),
        Stored::Nothing => Stored::Nothing,
        Stored::Hidden => Stored::Hidden,
    })
}

/// Keeps a state that the platform does not read, and says where it is.
async fn keep_elsewhere(run: &RunContext<'_>, pulled: &[u8], written: &StateMark) -> PublishError {
    let job = &run.job;
    let key = ObjectKey::errored_state(
        &job.organization_id,
        &job.workspace_id,
        &job.job_id,
        &job.step_id,
    );
    // If the executor is killed in between, the list blocks runs all the same.
    let listed = run.stored(list_state(run, KeptState::default())).await;
    let keeping = run.store.put(&key, Bytes::copy_from_slice(pulled));
    let (status, kept) = match (run.stored(keeping).await, listed) {
        (Ok(kept), Ok(())) => (StateStatus::Kept, format!("and is kept in {kept}")),
        (Ok(kept), Err(error)) => (
            StateStatus::Kept,
            format!("and is in {kept}, but could not be listed: {error}"),
        ),
        (Err(error), _) => (
            StateStatus::Unknown,
            format!("and could not be kept: {error}"),
        ),
    };
    let text = format!(
        "the tool has written a state with serial {} and lineage `{}`, which is not where the platform reads it, {kept}",
        written.serial,
        written.lineage.escape_debug()
    );
    let hint = format!(
        "find out which backend the tool has used; {}",
        remedy(run, false)
    );
    PublishError::Elsewhere(
        status,
        StepError::new(Exit::StepFailed, text).with_hint(hint),
    )
}

fn is_encrypted(state: &[u8]) -> bool {
    RawState::parse(state).is_some_and(|state| state.is_encrypted())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_state_that_the_store_lacks_or_has_of_another_lineage_is_not_stored() {
        let mark = |lineage: &str, serial, is_empty| StateMark {
            serial,
            lineage: lineage.to_owned(),
            is_empty,
        };
        let written = mark("l", 3, false);
        let has = |lineage: &str, serial| {
            let stored = Stored::State(mark(lineage, serial, false));
            is_stored(&written, &stored)
        };
        assert!(has("l", 3) && has("l", 4));
        assert!(!has("l", 2) && !has("other", 3));
        assert!(!is_stored(&written, &Stored::Nothing));
        assert!(is_stored(&mark("", 0, true), &Stored::Nothing));
        assert!(is_stored(&written, &Stored::Hidden));
    }

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
            before: Stored::Nothing,
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
