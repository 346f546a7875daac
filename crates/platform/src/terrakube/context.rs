//! The job context: a document that the executor, the platform and users' scripts write in turn (contract 6.6).

use std::time::Duration;

use reqwest::{Method, Url};
use serde_json::{Map, Value, json};
use tokio::time::Instant;
use tracing::debug;

use super::client::{Call, JSON};
use super::token::BRIEF;
use super::{ORDINARY, Terrakube, TerrakubeError, extended};
use crate::StepRef;
use crate::context::merge;
use runtime::Deadline;

/// Large plans make large documents.
const LIMIT: usize = 64 * 1024 * 1024;
/// What is merged is shown, not relied on; the next merge brings it again.
const MERGE_PATIENCE: Duration = Duration::from_secs(15);

/// The result of writing a note.
#[derive(Debug)]
pub(super) enum Note {
    /// It was written where there was none.
    Ours,
    /// There is one already.
    Anothers(Value),
}

impl Terrakube {
    /// The document; empty when there is none.
    pub async fn context(&self, step: &StepRef) -> Result<Map<String, Value>, TerrakubeError> {
        self.read_context(step, &Deadline::after(ORDINARY)).await
    }

    /// Merges a patch into the document as it is now. The platform refuses documents of jobs that are over or gone
    /// (404, 409), whose documents are no longer shown.
    pub async fn merge_context(
        &self,
        step: &StepRef,
        patch: &Map<String, Value>,
    ) -> Result<(), TerrakubeError> {
        let _one_at_a_time = self.0.merging.lock().await;
        let deadline = Deadline::after(MERGE_PATIENCE);
        let mut context = self.read_context(step, &deadline).await?;
        merge(&mut context, patch);
        let call = self.context_call(Method::POST, step).body(&context);
        match self.0.client.tell(&call, &deadline).await {
            Err(error) if error.means_no_such_job() => {
                debug!(%error, "the platform takes no job context any more");
                Ok(())
            }
            other => other.map(drop),
        }
    }

    /// Puts a note of a step under `key`, unless there is one. From looking to the acknowledged writing no more than
    /// `prompt` goes by. A look that took too long is repeated; a writing that failed is not, for it may yet be done.
    pub(super) async fn note(
        &self,
        step: &StepRef,
        key: &str,
        note: &Value,
        prompt: Duration,
    ) -> Result<Note, TerrakubeError> {
        let _one_at_a_time = self.0.merging.lock().await;
        let until = Instant::now() + MERGE_PATIENCE;
        loop {
            let (start, deadline) = (Instant::now(), Deadline::after(prompt));
            let mut context = match self.read_context(step, &deadline).await {
                Err(error) if error.may_pass() && Instant::now() < until => continue,
                context => context?,
            };
            let known = context.get(key).and_then(|notes| notes.get(&step.step_id));
            if let Some(known) = known {
                return Ok(Note::Anothers(known.clone()));
            }
            // The writing shall not fail for want of time.
            if start.elapsed() > prompt / 2 && Instant::now() < until {
                continue;
            }
            let patch = json!({ key: { step.step_id.as_str(): note } });
            merge(&mut context, patch.as_object().expect("an object"));
            let call = self.context_call(Method::POST, step).body(&context);
            self.0.client.once(&call, &deadline).await?;
            return if start.elapsed() > prompt {
                Err(TerrakubeError::OutOfTime { call: call.name() })
            } else {
                Ok(Note::Ours)
            };
        }
    }

    /// The same for who can do without.
    pub(super) async fn brief_context(
        &self,
        step: &StepRef,
    ) -> Result<Map<String, Value>, TerrakubeError> {
        self.read_context(step, &Deadline::after(MERGE_PATIENCE))
            .await
    }

    async fn read_context(
        &self,
        step: &StepRef,
        deadline: &Deadline,
    ) -> Result<Map<String, Value>, TerrakubeError> {
        let call = self.context_call(Method::GET, step);
        match self.0.client.ask(&call, deadline).await {
            Err(TerrakubeError::Gone { .. }) => Ok(Map::new()),
            other => other,
        }
    }

    fn context_call(&self, method: Method, step: &StepRef) -> Call {
        Call::new(method, self.context_url(step), JSON)
            .limit(LIMIT)
            .lifetime(BRIEF)
    }

    fn context_url(&self, step: &StepRef) -> Url {
        let config = self.config();
        let base = if config.is_relayed() {
            &config.api_url
        } else {
            &config.public_url
        };
        extended(base, &["context", "v1", &step.job_id])
    }
}
