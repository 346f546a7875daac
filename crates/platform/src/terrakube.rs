//! The client of Terrakube's API for executor and launcher: step views, claims, status reports, the job context and
//! published states (contract 5). It knows neither Kubernetes nor how Terraform is run. It sends tokens only to the
//! configured addresses.

mod args;
mod claims;
mod context;
mod document;
mod report;
mod step_view;
#[cfg(feature = "full")]
mod template;
#[cfg(not(feature = "full"))]
#[path = "terrakube/no_template.rs"]
mod template;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use job_contract::chain;
use reqwest::{Method, Url};
use serde::Serialize;
use tracing::debug;

use self::document::{
    Change, HISTORY_REFERENCE_WIDTH, HistoryDocument, JobDocument, OrganizationDocument,
    RegistryHosts,
};

use crate::calls::client::{Call, Client, JSON, JSON_API, Pace};
use crate::calls::text::fitting;
use crate::lease::Lease;
use crate::redis::Redis;
use crate::step::RunEnd;
use crate::{History, StepRef};
use runtime::Deadline;

pub use args::{TerrakubeArgs, TerrakubeConfig};

pub use crate::calls::address::extended;
pub use crate::calls::error::TerrakubeError;
pub use crate::calls::token::{self, TokenSource};

/// How long most calls are retried: long enough for a restart of the API.
const CALL_TIMEOUT: Duration = Duration::from_mins(1);
/// How long the lookup of a record is retried before the record is sent again.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(30);

/// Terrakube's API. Clones share the connection.
#[derive(Clone, Debug)]
pub struct Terrakube(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: TerrakubeConfig,
    client: Client,
    pace: Pace,
    /// Claims in Redis are atomic. A lease takes precedence: its hub keeps the claim.
    redis: Option<Redis>,
    lease: Option<Lease>,
    /// A merge reads and writes, so this process must not run two merges at once.
    merging: tokio::sync::Mutex<()>,
}

impl Terrakube {
    /// A client for the platform at these addresses, and for its Redis. It sends no request yet.
    pub fn new(config: TerrakubeConfig, redis: Option<Redis>) -> Result<Self, TerrakubeError> {
        Self::with_pace(config, redis, Pace::USUAL)
    }

    fn with_pace(
        config: TerrakubeConfig,
        redis: Option<Redis>,
        pace: Pace,
    ) -> Result<Self, TerrakubeError> {
        Ok(Self(Arc::new(Inner {
            client: Client::new(config.tokens.clone(), pace)?,
            lease: config.lease.clone().map(Lease::new).transpose()?,
            config,
            redis,
            pace,
            merging: tokio::sync::Mutex::default(),
        })))
    }

    /// The settings of the client.
    pub fn config(&self) -> &TerrakubeConfig {
        &self.0.config
    }

    /// Notes what the executor does, for the hub.
    pub(crate) fn enter(&self, phase: &'static str) {
        if let Some(lease) = &self.0.lease {
            lease.enter(phase);
        }
    }

    /// Ends the task of the step at its hub, if there is one.
    pub async fn end(&self, end: &RunEnd, deadline: &Deadline) -> Result<(), TerrakubeError> {
        match &self.0.lease {
            Some(lease) => lease.end(end, deadline).await,
            None => Ok(()),
        }
    }

    /// The address under which the platform shows the stored output of a step (contract 6.3).
    pub fn step_output(&self, step: &StepRef) -> String {
        let (org, job, id) = (&step.organization_id, &step.job_id, &step.step_id);
        self.public(&[
            "tfoutput",
            "v1",
            "organization",
            org,
            "job",
            job,
            "step",
            id,
        ])
    }

    /// The address under which the platform shows a stored state (contract 6.4).
    pub fn state_output(&self, step: &StepRef, name: &str) -> String {
        let (org, workspace) = (&step.organization_id, &step.workspace_id);
        let file = format!("{name}.json");
        let path = [
            "tfstate",
            "v1",
            "organization",
            org,
            "workspace",
            workspace,
            "state",
            &file,
        ];
        self.public(&path)
    }

    /// The address of the content of a CLI-driven run (contract 8.6). `None` if the job has none.
    pub async fn override_source(&self, step: &StepRef) -> Result<Option<String>, TerrakubeError> {
        let document = self.job(step, &Deadline::after(CALL_TIMEOUT)).await?;
        Ok(document.into_job().override_source)
    }

    /// The name of an organization, as the registry of modules and providers has it.
    pub async fn organization_name(&self, step: &StepRef) -> Result<String, TerrakubeError> {
        let mut url = self.api(&["organization", &step.organization_id]);
        // Otherwise the platform lists everything that the organization has.
        url.set_query(Some("fields[organization]=name"));
        let call = Call::new(Method::GET, url, JSON_API);
        let deadline = Deadline::after(CALL_TIMEOUT);
        let document: OrganizationDocument = self.0.client.request_json(&call, &deadline).await?;
        Ok(document.data.attributes.name)
    }

    /// The hosts of modules and providers that are found through a hub's relay.
    pub async fn registry_hosts(&self) -> Result<Vec<String>, TerrakubeError> {
        let url = extended(&self.0.config.api_url, &["registry"]);
        let call = Call::new(Method::GET, url, JSON);
        let deadline = Deadline::after(CALL_TIMEOUT);
        let found: RegistryHosts = self.0.client.request_json(&call, &deadline).await?;
        Ok(found.hosts)
    }

    /// Shows the live view of an operation through a hub's relay.
    pub(crate) async fn show_changes(
        &self,
        state: &impl Serialize,
        deadline: &Deadline,
    ) -> Result<(), TerrakubeError> {
        let url = extended(&self.0.config.api_url, &["live"]);
        let call = Call::new(Method::POST, url, JSON).body(state);
        self.0.client.request_once(&call, deadline).await.map(drop)
    }

    /// The platform's Redis, where it is known.
    pub fn redis(&self) -> Option<&Redis> {
        self.0.redis.as_ref()
    }

    /// Reports a published state. An attempt whose answer was lost may have succeeded. So the history is read before the
    /// state is sent again.
    pub async fn record_history(
        &self,
        step: &StepRef,
        history: &History,
        deadline: &Deadline,
    ) -> Result<(), TerrakubeError> {
        let history = History {
            job_reference: fitting(&history.job_reference, HISTORY_REFERENCE_WIDTH).to_owned(),
            ..history.clone()
        };
        let call = Call::new(Method::POST, self.history_url(step), JSON_API)
            .body(&Change::new("history", &history));
        let mut retry = self.0.client.retry(deadline);
        while let Err(error) = self.0.client.request_once(&call, deadline).await {
            retry.after(error).await?;
            match self.has_history(step, &history, deadline).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                // A state that is recorded twice is better than one that is not recorded.
                Err(error) => debug!(
                    error = chain(&error),
                    "could not read whether the state is recorded"
                ),
            }
        }
        Ok(())
    }

    /// Whether the history of the job contains the state.
    async fn has_history(
        &self,
        step: &StepRef,
        history: &History,
        deadline: &Deadline,
    ) -> Result<bool, TerrakubeError> {
        let deadline = deadline.at_most(LOOKUP_TIMEOUT);
        let mut url = self.history_url(step);
        url.query_pairs_mut()
            .append_pair("filter[history]", &of_job(&history.job_reference));
        let call = Call::new(Method::GET, url, JSON_API);
        let known: HistoryDocument = self.0.client.request_json(&call, &deadline).await?;
        // A relay may have recorded the state below another address.
        let own = file_name(&history.output);
        Ok(known.outputs().any(|output| file_name(output) == own))
    }

    fn history_url(&self, step: &StepRef) -> Url {
        let (org, workspace) = (&step.organization_id, &step.workspace_id);
        self.api(&["organization", org, "workspace", workspace, "history"])
    }

    /// The job and its steps as they are now.
    async fn job(
        &self,
        step: &StepRef,
        deadline: &Deadline,
    ) -> Result<JobDocument, TerrakubeError> {
        let mut url = self.job_url(step);
        url.set_query(Some("include=step"));
        let call = Call::new(Method::GET, url, JSON_API);
        self.0.client.request_json(&call, deadline).await
    }

    fn job_url(&self, step: &StepRef) -> Url {
        self.api(&["organization", &step.organization_id, "job", &step.job_id])
    }

    fn job_change(&self, step: &StepRef, change: impl Serialize) -> Call {
        let document = Change::of("job", &step.job_id, change);
        Call::new(Method::PATCH, self.job_url(step), JSON_API).body(&document)
    }

    fn step_change(&self, step: &StepRef, change: impl Serialize) -> Call {
        let (org, job, id) = (&step.organization_id, &step.job_id, &step.step_id);
        let url = self.api(&["organization", org, "job", job, "step", id]);
        Call::new(Method::PATCH, url, JSON_API).body(&Change::of("step", id, change))
    }

    fn api(&self, path: &[&str]) -> Url {
        extended(&self.0.config.api_url, &[&["api", "v1"], path].concat())
    }

    fn public(&self, path: &[&str]) -> String {
        extended(&self.0.config.public_url, path).to_string()
    }
}

/// The last segment of an address.
fn file_name(address: &str) -> Option<&str> {
    address.rsplit('/').next()
}

/// A filter for the history of a job, in the platform's query language.
fn of_job(reference: &str) -> String {
    let quoted = reference.replace('\\', "\\\\").replace('\'', "\\'");
    format!("jobReference=='{quoted}'")
}
