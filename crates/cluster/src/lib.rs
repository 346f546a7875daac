//! The only crate with a Kubernetes client, for launchers and agents.
//!
//! Kubernetes is the only database. Each Job records its run, and whether the run was released, cancelled or reported.
//! So a restarted launcher, or another replica, knows as much as the one before.
//!
//! - [`Cluster`] is one namespace of a cluster: [`Cluster::submit`] creates the Job of a run and its Secret,
//!   [`Cluster::cancel`] stops it, [`Cluster::logs`] follows it, [`Cluster::explain`](explain) says what became of it.
//! - [`watch`] follows all runs, and tells a [`RunObserver`](watch::RunObserver) what happens to them.
//! - [`lease`] chooses the replica that watches, [`check`] says whether a run would start here, and [`rights`] lists what all of
//!   this may do.
//! - [`job_settings`] are the options of Jobs, [`settings`] those of the use of a cluster.
//!
//! This crate must not know the platform, the hub or the HTTP service. What a Job contains is decided by `manifest`, and how a
//! run ended by `verdict`.

mod cache;
mod cache_claim;
mod cancel;
pub mod check;
mod clock;
mod connect;
mod credential;
mod error;
pub mod explain;
mod fill;
mod job;
pub mod job_settings;
pub mod lease;
mod leased;
mod logs;
mod report_seal;
pub mod rights;
pub mod settings;
mod submit;
mod view;
pub mod watch;

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use job_contract::report::ReportKey;
use job_contract::{annotations, labels};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client};
use pool_protocol::lease::LeaseRef;
use serde::Serialize;

use self::clock::ServerClock;

pub use cancel::Cancelled;
pub use connect::{Access, ConnectError};
pub use credential::CredentialError;
pub use error::ClusterError;
pub use logs::{LogLine, SaveError};
pub use submit::Submitted;
pub use view::{RunState, RunView};

/// Name under which writes appear in managed fields.
const FIELD_MANAGER: &str = "mayfly";

/// A run: one step of one job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RunRef {
    pub job_id: String,
    pub step_id: String,
    /// Name of its Job.
    pub name: String,
    /// Organization of the run. Empty if the Job does not name it.
    #[serde(skip)]
    pub organization_id: String,
    /// See [`RunRef::organization_id`].
    #[serde(skip)]
    pub workspace_id: String,
    /// Type of the step, as the platform spells it. Empty if the Job does not name it.
    #[serde(skip)]
    pub step_type: &'static str,
    /// The lease of the agent that runs it.
    #[serde(skip)]
    pub lease: Option<LeaseRef>,
}

impl RunRef {
    /// The run of a Job of ours.
    pub fn of(meta: &ObjectMeta) -> Option<Self> {
        let labels = meta.labels.as_ref()?;
        let optional = |name| labels.get(name).cloned().unwrap_or_default();
        Some(Self {
            job_id: labels.get(labels::JOB_ID)?.clone(),
            step_id: labels.get(labels::STEP_ID)?.clone(),
            name: meta.name.clone()?,
            organization_id: optional(labels::ORGANIZATION),
            workspace_id: optional(labels::WORKSPACE),
            step_type: labels
                .get(labels::STEP_TYPE)
                .and_then(|value| labels::step_type(value))
                .map(job_contract::StepType::name)
                .unwrap_or_default(),
            lease: lease_of(meta),
        })
    }

    /// Whether a user means this run: by its Job's name, its job's id, or `job/step`.
    pub fn is_meant_by(&self, word: &str) -> bool {
        word == self.name
            || word == self.job_id
            || word
                .split_once('/')
                .is_some_and(|(job, step)| job == self.job_id && step == self.step_id)
    }
}

impl fmt::Display for RunRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.job_id, self.step_id)
    }
}

/// How often and how long the launcher retries within one call to the API server.
#[derive(Clone, Debug)]
pub struct RetryPolicy {
    /// Attempts for one request.
    pub attempts: u32,
    /// Pause before the second attempt; doubles from then on.
    pub first_pause: Duration,
    /// The caller handles a longer `Retry-After`.
    pub longest_pause: Duration,
    /// The timeout of a request. Watches and logs have none.
    pub answer: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts: 4,
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(5),
            answer: Duration::from_secs(10),
        }
    }
}

/// The number of Jobs that are remembered to have their Secret.
const REMEMBERED: usize = 20_000;

/// One namespace of a cluster, in which runs are Jobs.
#[derive(Clone)]
pub struct Cluster {
    /// As it was given.
    connection: Client,
    client: Client,
    namespace: String,
    /// Tells this cluster and namespace from others.
    identity: String,
    max_in_flight: usize,
    retry_policy: RetryPolicy,
    clock: Arc<ServerClock>,
    /// The key of the seals on final reports. Without it, no report counts.
    report_key: Option<ReportKey>,
    /// UIDs of Jobs whose Secret this process knows to be stored.
    stored: Arc<Mutex<HashSet<String>>>,
    /// Held while a Job that fills the store of providers is made.
    fills: Arc<tokio::sync::Mutex<()>>,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("namespace", &self.namespace)
            .field("max_in_flight", &self.max_in_flight)
            .finish_non_exhaustive()
    }
}

impl Cluster {
    /// A cluster behind a client that exists already.
    pub fn from_client(client: Client, namespace: impl Into<String>) -> Self {
        let cluster = Self {
            client: client.clone(),
            connection: client,
            namespace: namespace.into(),
            identity: String::new(),
            max_in_flight: 0,
            retry_policy: RetryPolicy::default(),
            clock: Arc::default(),
            report_key: None,
            stored: Arc::default(),
            fills: Arc::default(),
        };
        cluster.connected()
    }

    /// With a client whose requests have the deadline of the retry policy.
    fn connected(mut self) -> Self {
        let connection = self.connection.clone();
        let (clock, retry_policy) = (Arc::clone(&self.clock), self.retry_policy.answer);
        self.client = connect::answering(connection, &self.namespace, clock, retry_policy);
        self
    }

    /// At most so many runs are released at once; 0 means no limit. With a limit only the watcher releases.
    #[must_use]
    pub fn with_max_in_flight(mut self, limit: usize) -> Self {
        self.max_in_flight = limit;
        self
    }

    /// Believes the reports that are sealed with this key.
    #[must_use]
    pub fn with_report_key(mut self, key: Option<ReportKey>) -> Self {
        self.report_key = key;
        self
    }

    /// Other limits for the wait for an answer, and for retries within one call.
    #[must_use]
    pub fn with_retry_policy(mut self, retry_policy: RetryPolicy) -> Self {
        self.retry_policy = retry_policy;
        self.connected()
    }

    /// What time it is for the API server, which wrote the times of all objects.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// What tells this cluster and namespace from others.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Namespace of the runs.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    fn jobs(&self) -> Api<Job> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn events(&self) -> Api<Event> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn note_stored(&self, uid: &str) {
        let mut stored = runtime::lock(&self.stored);
        // This only saves a request. The limit is for a replica that never releases Jobs.
        if stored.len() >= REMEMBERED {
            stored.clear();
        }
        stored.insert(uid.to_owned());
    }

    fn forget_stored(&self, uid: &str) {
        runtime::lock(&self.stored).remove(uid);
    }

    fn knows_stored(&self, uid: &str) -> bool {
        runtime::lock(&self.stored).contains(uid)
    }
}

/// The lease that the Job carries.
fn lease_of(meta: &ObjectMeta) -> Option<LeaseRef> {
    Some(LeaseRef {
        task: label(meta, labels::TASK)?.parse().ok()?,
        lease: label(meta, labels::LEASE)?.parse().ok()?,
        fencing_token: annotation(meta, annotations::FENCING_TOKEN)?.parse().ok()?,
    })
}

/// An annotation of ours.
fn annotation<'a>(meta: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    meta.annotations.as_ref()?.get(name).map(String::as_str)
}

fn label<'a>(meta: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    meta.labels.as_ref()?.get(name).map(String::as_str)
}

#[cfg(test)]
mod fake_server;
