//! Reads and writes the job context, which the executor, the platform and users' scripts all write (contract 6.6).

use std::time::Duration;

use reqwest::{Method, Url};
use serde_json::{Map, Value, json};
use tokio::time::Instant;
use tracing::debug;

use super::{CALL_TIMEOUT, Terrakube, TerrakubeError};
use crate::StepRef;
use crate::calls::address::extended;
use crate::calls::client::{Call, JSON};
use crate::calls::token::BRIEF;
use crate::context::{merge, with_status, without_status};
use runtime::Deadline;

/// The largest document. Large plans make large documents.
const LIMIT: usize = 64 * 1024 * 1024;
/// How long a merge is retried. Users see the merged values, but no decision needs them, and the next merge repeats them.
const MERGE_TIMEOUT: Duration = Duration::from_secs(15);

/// The result of [`Terrakube::insert_note`].
#[derive(Debug)]
pub(super) enum Insertion {
    Inserted,
    Existing(Value),
}

impl Terrakube {
    /// The document without the platform's own status; empty if there is none.
    pub async fn context(&self, step: &StepRef) -> Result<Map<String, Value>, TerrakubeError> {
        self.read_context(step, &Deadline::after(CALL_TIMEOUT))
            .await
    }

    /// Merges a patch into the current document. The platform refuses documents of jobs that have ended or do not exist
    /// (404, 409). Users no longer see those, so that is no error.
    pub async fn merge_context(
        &self,
        step: &StepRef,
        patch: &Map<String, Value>,
    ) -> Result<(), TerrakubeError> {
        let _one_at_a_time = self.0.merging.lock().await;
        let deadline = Deadline::after(MERGE_TIMEOUT);
        let mut context = self.read_context(step, &deadline).await?;
        merge(&mut context, patch);
        let call = self.context_write(step, context);
        match self.0.client.request(&call, &deadline).await {
            Err(error) if error.means_no_such_job() => {
                debug!(%error, "the platform no longer accepts a job context for this job");
                Ok(())
            }
            other => other.map(drop),
        }
    }

    /// Writes a note of a step under `key`, unless there is one. The read and the write take at most `limit` together. A read that took too long is repeated. A write that failed is not repeated, because the platform may
    /// still execute it.
    pub(super) async fn insert_note(
        &self,
        step: &StepRef,
        key: &str,
        note: &Value,
        limit: Duration,
    ) -> Result<Insertion, TerrakubeError> {
        let _one_at_a_time = self.0.merging.lock().await;
        let until = Instant::now() + MERGE_TIMEOUT;
        loop {
            let (start, deadline) = (Instant::now(), Deadline::after(limit));
            let mut context = match self.read_context(step, &deadline).await {
                Err(error) if error.may_pass() && Instant::now() < until => continue,
                context => context?,
            };
            let known = context.get(key).and_then(|notes| notes.get(&step.step_id));
            if let Some(known) = known {
                return Ok(Insertion::Existing(known.clone()));
            }
            // Leaves enough time for the write.
            if start.elapsed() > limit / 2 && Instant::now() < until {
                continue;
            }
            let patch = json!({ key: { step.step_id.as_str(): note } });
            merge(&mut context, patch.as_object().expect("an object"));
            let call = self.context_write(step, context);
            self.0.client.request_once(&call, &deadline).await?;
            return if start.elapsed() > limit {
                Err(TerrakubeError::OutOfTime { call: call.name() })
            } else {
                Ok(Insertion::Inserted)
            };
        }
    }

    /// The document, with a short deadline.
    pub(super) async fn context_for_claim(
        &self,
        step: &StepRef,
    ) -> Result<Map<String, Value>, TerrakubeError> {
        self.read_context(step, &Deadline::after(MERGE_TIMEOUT))
            .await
    }

    async fn read_context(
        &self,
        step: &StepRef,
        deadline: &Deadline,
    ) -> Result<Map<String, Value>, TerrakubeError> {
        let call = self.context_call(Method::GET, step);
        match self.0.client.request_json(&call, deadline).await {
            Err(TerrakubeError::Gone { .. }) => Ok(Map::new()),
            other => other.map(without_status),
        }
    }

    fn context_write(&self, step: &StepRef, context: Map<String, Value>) -> Call {
        self.context_call(Method::POST, step)
            .body(&with_status(context))
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
