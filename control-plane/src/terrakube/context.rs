//! The job context: a document that the executor, the platform and users' scripts write in turn (contract 6.6).

use std::time::Duration;

use reqwest::{Method, Url};
use serde_json::{Map, Value};
use tracing::debug;

use super::client::{Call, JSON};
use super::token::BRIEF;
use super::{ORDINARY, Terrakube, TerrakubeError, extended};
use crate::context::merge;
use crate::patience::Patience;
use crate::platform::StepRef;

/// Large plans make large documents.
const LIMIT: usize = 64 * 1024 * 1024;
/// What is merged is shown, not relied on; the next merge brings it again.
const MERGE_PATIENCE: Duration = Duration::from_secs(15);

impl Terrakube {
    /// The document; empty when there is none.
    pub async fn context(&self, step: &StepRef) -> Result<Map<String, Value>, TerrakubeError> {
        self.read_context(step, &Patience::lasting(ORDINARY)).await
    }

    /// Merges a patch into the document as it is now. The platform refuses documents of jobs that are over or gone
    /// (404, 409); nobody looks at those.
    pub async fn merge_context(
        &self,
        step: &StepRef,
        patch: &Map<String, Value>,
    ) -> Result<(), TerrakubeError> {
        let _one_at_a_time = self.0.merging.lock().await;
        let patience = Patience::lasting(MERGE_PATIENCE);
        let mut context = self.read_context(step, &patience).await?;
        merge(&mut context, patch);
        let call = self.context_call(Method::POST, step).body(&context);
        match self.0.client.tell(&call, &patience).await {
            Err(error) if error.means_no_such_job() => {
                debug!(%error, "the platform takes no job context any more");
                Ok(())
            }
            other => other.map(drop),
        }
    }

    /// The same for who can do without.
    pub(super) async fn brief_context(
        &self,
        step: &StepRef,
    ) -> Result<Map<String, Value>, TerrakubeError> {
        self.read_context(step, &Patience::lasting(MERGE_PATIENCE))
            .await
    }

    async fn read_context(
        &self,
        step: &StepRef,
        patience: &Patience,
    ) -> Result<Map<String, Value>, TerrakubeError> {
        let call = self.context_call(Method::GET, step);
        match self.0.client.ask(&call, patience).await {
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
        extended(&self.config().public_url, &["context", "v1", &step.job_id])
    }
}
