//! One attempt of a rescue: it compares the state with the stored one, and stores it if it may take the place of that one.

use std::io;

use artifact_store::{BackendSettings, Condition, ServedStore, Upload};
use job_contract::report::{ApplyProgress, StateLock};
use tracing::warn;

use super::{Rescue, RescueProgress, capitalised};
use crate::error::StepError;
use crate::phases::stored_state::{Stored, read_summary};
use crate::terraform::ErroredState;
use crate::terraform::state_summary::StateSummary;

/// The end of one attempt.
pub(super) enum Push {
    Stored,
    Failed(Option<StateLock>),
    /// Only a person can decide whether the state is stored.
    Refused(String),
}

impl Rescue<'_, '_> {
    /// Why the state itself may not be whole: the tool can leave a part of it, which would forget resources.
    pub(super) fn doubt(&self, own: Option<&StateSummary>) -> Option<String> {
        let Some(own) = own else {
            return Some("the tool has left only a part of it".to_owned());
        };
        if own.is_encrypted {
            return None;
        }
        let is_changed = |address: &str| self.changes.has_changed(address);
        let before = self.before.known();
        let forgotten = before.map(|before| own.forgotten(before, is_changed));
        let mut lacking = forgotten.unwrap_or_default();
        lacking.extend(self.changes.missing_from(|address| own.has(address)));
        lacking.truncate(ApplyProgress::MAX_ADDRESSES);
        (!lacking.is_empty()).then(|| {
            let lacking = lacking.join(", ");
            format!("it lacks resources that the run has not destroyed: {lacking}")
        })
    }

    pub(super) async fn push(&self, progress: &mut RescueProgress) -> Push {
        match Box::pin(self.compare_and_push(progress)).await {
            Ok(pushed) => pushed,
            Err(error) => {
                if progress.is_first {
                    let text = format!("{}.", capitalised(&error.to_string()));
                    self.run.log_failure(&text).await;
                }
                warn!(%error, "the state could not be stored");
                Push::Failed(None)
            }
        }
    }

    async fn compare_and_push(&self, progress: &mut RescueProgress) -> Result<Push, StepError> {
        let refused = |why: &str| Ok(Push::Refused(why.to_owned()));
        let own = match (&progress.doubt, &progress.summary) {
            (None, Some(own)) => own,
            (doubt, _) => return refused(doubt.as_deref().unwrap_or_default()),
        };
        let place = match (&self.run.backend, self.run.store.served()) {
            (BackendSettings::Local { .. }, Some(store)) => Some(store),
            _ => None,
        };
        let (stored, condition) = read_summary(self.run, progress.reading_time()).await?;
        let before = self.before.known();
        let stored = match stored {
            // The tool alone can compare it.
            Stored::Hidden => return self.push_with_tool(&self.errored, progress).await,
            Stored::Nothing => None,
            Stored::State(Some(stored)) => Some(stored),
            // On a full disk, the tool leaves a part of a state in its file. The run had read a whole one, or none.
            Stored::State(None) if place.is_some() && !matches!(self.before, Stored::Hidden) => {
                before.cloned()
            }
            Stored::State(None) => return refused("the stored state is not a whole state"),
        };
        let known = before.map(|before| before.sha256.as_str());
        let is_changed = |address: &str| self.changes.has_changed(address);
        let serial = match own.follow(stored.as_ref(), known, is_changed) {
            Ok(serial) => serial,
            Err(why) => return refused(why),
        };
        if let Some(stored) = stored {
            progress.follows = Some(stored.sha256);
        }
        let state = if serial == own.serial {
            self.errored.clone()
        } else {
            let state = self.errored.with_serial(serial);
            let state = state.map_err(|error| unreadable(&error))?;
            state.ok_or_else(|| StepError::infrastructure("the state has no serial"))?
        };
        match place {
            Some(store) => self.replace(store, &state, &condition).await,
            None => self.push_with_tool(&state, progress).await,
        }
    }

    /// Replaces the file of the tool's local backend as a whole. On a full disk, the tool would leave a part of a state there.
    async fn replace(
        &self,
        store: &ServedStore,
        state: &ErroredState,
        condition: &Condition,
    ) -> Result<Push, StepError> {
        let content = state.content().map_err(|error| unreadable(&error))?;
        let upload = Upload::of(content);
        let job = &self.run.job;
        let place = store.state(&job.organization_id, &job.workspace_id);
        let replacing = place.put(upload, None, condition);
        self.run.stored(replacing).await?;
        Ok(Push::Stored)
    }

    async fn push_with_tool(
        &self,
        state: &ErroredState,
        progress: &RescueProgress,
    ) -> Result<Push, StepError> {
        let output = self.terraform.state_push(self.env, state).await?;
        if output.ok {
            return Ok(Push::Stored);
        }
        if progress.is_first {
            self.run.log_output(&output.text).await;
        }
        Ok(Push::Failed(output.lock()))
    }
}

fn unreadable(source: &io::Error) -> StepError {
    StepError::infrastructure("could not read the state that the tool has left").because(source)
}
