//! Terrakube's API as the executor and the launcher use it: where a step stands, who runs it, how it goes and how it
//! ended, the job context, published states (contract 5). Knows neither Kubernetes nor how Terraform is run, and never
//! shows a token to anything but the configured addresses.

pub mod args;
mod claims;
mod client;
mod context;
mod document;
pub mod error;
mod report;
mod standing;
mod template;
#[cfg(test)]
mod tests;
pub mod token;

use std::sync::Arc;
use std::time::Duration;

use reqwest::{Method, Url};
use serde::Serialize;

use self::client::{Call, Client, JSON_API, Pace};
use self::document::{Change, HISTORY_REFERENCE_WIDTH, JobDocument, fitting};
use crate::patience::Patience;
use crate::platform::{History, StepRef};
use crate::redis::Redis;

pub use args::{TerrakubeArgs, TerrakubeConfig};
pub use error::TerrakubeError;
pub use token::{SecretError, TokenSource};

/// How long ordinary calls are tried: long enough for the API to be restarted.
const ORDINARY: Duration = Duration::from_mins(1);

/// Terrakube's API. Clones share the connection.
#[derive(Clone, Debug)]
pub struct Terrakube(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: TerrakubeConfig,
    client: Client,
    pace: Pace,
    /// Where claims are atomic.
    redis: Option<Redis>,
    /// Merging is reading and writing: our own merges must not overtake one another.
    merging: tokio::sync::Mutex<()>,
}

impl Terrakube {
    /// The platform at those addresses, and the Redis that belongs to it. Nothing is sent yet.
    pub fn new(config: TerrakubeConfig, redis: Option<Redis>) -> Result<Self, TerrakubeError> {
        Self::with_pace(config, redis, Pace::default())
    }

    fn with_pace(
        config: TerrakubeConfig,
        redis: Option<Redis>,
        pace: Pace,
    ) -> Result<Self, TerrakubeError> {
        Ok(Self(Arc::new(Inner {
            client: Client::new(config.tokens.clone(), pace)?,
            config,
            redis,
            pace,
            merging: tokio::sync::Mutex::default(),
        })))
    }

    /// How the API is reached.
    pub fn config(&self) -> &TerrakubeConfig {
        &self.0.config
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

    /// Where the content of a CLI-driven run is (contract 8.6); `None` when the job names nothing.
    pub async fn override_source(&self, step: &StepRef) -> Result<Option<String>, TerrakubeError> {
        let document = self.job(step, &Patience::lasting(ORDINARY)).await?;
        Ok(document.into_job().override_source)
    }

    /// Records a published state. A record whose answer is lost may be written twice; both name the same state. The
    /// contract has no way to ask for the records of a workspace (5.6, 6.4), so nobody can look before telling it again.
    pub async fn record_history(
        &self,
        step: &StepRef,
        history: &History,
        patience: &Patience,
    ) -> Result<(), TerrakubeError> {
        let (org, workspace) = (&step.organization_id, &step.workspace_id);
        let url = self.api(&["organization", org, "workspace", workspace, "history"]);
        let history = History {
            job_reference: fitting(&history.job_reference, HISTORY_REFERENCE_WIDTH).to_owned(),
            ..history.clone()
        };
        let call = Call::new(Method::POST, url, JSON_API).body(&Change::new("history", history));
        self.0.client.tell(&call, patience).await.map(drop)
    }

    /// The job and its steps as they are now.
    async fn job(
        &self,
        step: &StepRef,
        patience: &Patience,
    ) -> Result<JobDocument, TerrakubeError> {
        let mut url = self.job_url(step);
        url.set_query(Some("include=step"));
        let call = Call::new(Method::GET, url, JSON_API);
        self.0.client.ask(&call, patience).await
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

/// Ids are encoded on the way, so that none can lead elsewhere.
fn extended(base: &Url, path: &[&str]) -> Url {
    let mut url = base.clone();
    url.path_segments_mut()
        .expect("base addresses are http or https")
        .pop_if_empty()
        .extend(path);
    url
}
