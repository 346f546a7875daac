//! The only module that sends requests to the Kubernetes API.
//!
//! Kubernetes is the only database. Each Job records its run, and whether the run was released, cancelled or reported.
//! So a restarted launcher, or another replica, knows as much as the one before. This module knows neither the
//! platform's HTTP requests nor how a manifest is built.

mod cache;
mod cancel;
pub mod check;
mod clock;
mod connect;
mod credential;
mod error;
pub mod explain;
pub mod lease;
mod leased;
pub mod limit;
mod logs;
mod readiness;
mod report_seal;
pub mod rights;
mod submit;
mod view;
pub mod watch;

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use job_contract::report::ReportKey;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client};
use serde::Serialize;

use self::clock::ServerClock;
use self::limit::RateLimit;
use crate::agent::lease::LeaseRef;

pub use cancel::Cancelled;
pub use connect::{Access, ConnectError};
pub use credential::CredentialError;
pub use error::ClusterError;
pub use logs::{LogLine, SaveError};
pub use submit::Submitted;
pub use view::{RunState, RunView};

/// Labels on the Jobs and pods of runs, as the watcher reads them.
pub mod labels {
    pub use crate::kubernetes::manifest::labels::{
        JOB_ID, ORGANIZATION, STEP_ID, STEP_TYPE, WORKSPACE, step_type,
    };

    /// Selects every object of every run.
    pub const SELECTOR: &str = "app.kubernetes.io/managed-by=mayfly";
    /// Set by the Job controller on its pods.
    pub const JOB_NAME: &str = "batch.kubernetes.io/job-name";
    /// The agent that runs the task; without it, a launcher of this cluster does.
    pub const AGENT: &str = "mayfly.dev/agent";
    /// The task of a hub.
    pub const TASK: &str = "mayfly.dev/task-id";
    /// The lease on it.
    pub const LEASE: &str = "mayfly.dev/lease-id";

    /// Selects the objects of the runs that the launcher watches itself.
    pub fn of_launcher() -> String {
        format!("{SELECTOR},!{AGENT}")
    }

    /// Selects the objects of the runs of an agent.
    pub fn of_agent(name: &str) -> String {
        format!("{SELECTOR},{AGENT}={name}")
    }

    /// With this label the queue of the cluster releases the Job, not the launcher.
    pub const KUEUE_QUEUE: &str = "kueue.x-k8s.io/queue-name";
    /// The value of that label until the Job may be released. Kueue never admits a Job of a queue that does not exist. To a
    /// Job without the label, it may give the default queue of the namespace.
    pub const NO_QUEUE: &str = "none.mayfly.dev";
}

/// Annotations that the launcher writes onto a Job during a run.
pub mod annotations {
    /// The Secret of this Job is stored. Every replica may release the Job.
    pub const STORED_AT: &str = "mayfly.dev/stored-at";
    /// Grows with each lease of the task.
    pub const FENCING_TOKEN: &str = "mayfly.dev/fencing-token";
    /// The queue of the cluster that the Job enters once its Secret is stored.
    pub const QUEUE: &str = "mayfly.dev/queue";
    /// The Job was allowed to run.
    pub const RELEASED_AT: &str = "mayfly.dev/released-at";
    /// The Job never got its job data and is being replaced. No dispatch of it was answered, so its deletion is not reported.
    pub const NOT_ACCEPTED: &str = "mayfly.dev/not-accepted";
    /// A person or the platform asked for the end of the run.
    pub const CANCELLED_AT: &str = "mayfly.dev/cancelled-at";
    /// The verdict on a run whose executor did not report, as JSON.
    pub const VERDICT: &str = "mayfly.dev/verdict";
    /// The step has nothing to run. The replica that accepted it reports it as done. If that fails, the Job runs.
    pub const NOTHING_TO_RUN: &str = "mayfly.dev/nothing-to-run";
    /// The platform knows how the run ended.
    pub const REPORTED_AT: &str = "mayfly.dev/reported-at";
    /// Why the platform will never accept the report of how the run ended. The report is not repeated.
    pub const REPORT_REFUSED: &str = "mayfly.dev/report-refused";
    /// How many seconds the Job is kept once the platform knows how the run ended, or will not.
    pub const KEEP_SECONDS: &str = "mayfly.dev/keep-seconds";
}

/// A run: one step of one job.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RunKey {
    pub job_id: String,
    pub step_id: String,
    /// Name of its Job.
    pub name: String,
    /// Organization of the run. Empty if the Job does not name it.
    #[serde(skip)]
    pub organization_id: String,
    /// See [`RunKey::organization_id`].
    #[serde(skip)]
    pub workspace_id: String,
    /// Type of the step, as the platform spells it. Empty if the Job does not name it.
    #[serde(skip)]
    pub step_type: &'static str,
    /// The lease of the agent that runs it.
    #[serde(skip)]
    pub(crate) lease: Option<LeaseRef>,
}

impl RunKey {
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

impl fmt::Display for RunKey {
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
    /// For what must not wait behind the rest.
    urgent: Client,
    namespace: String,
    /// Tells this cluster and namespace from others.
    identity: String,
    max_in_flight: usize,
    retry_policy: RetryPolicy,
    rate: Option<RateLimit>,
    clock: Arc<ServerClock>,
    /// The key of the seals on final reports. Without it, no report counts.
    report_key: Option<ReportKey>,
    /// UIDs of Jobs whose Secret this process knows to be stored.
    stored: Arc<Mutex<HashSet<String>>>,
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
            urgent: client.clone(),
            client: client.clone(),
            connection: client,
            namespace: namespace.into(),
            identity: String::new(),
            max_in_flight: 0,
            retry_policy: RetryPolicy::default(),
            rate: None,
            clock: Arc::default(),
            report_key: None,
            stored: Arc::default(),
        };
        cluster.connected()
    }

    /// With clients as the settings want them. What waits for its turn is not yet unanswered, so the deadline is the
    /// innermost.
    fn connected(mut self) -> Self {
        let connection = self.connection.clone();
        let (clock, retry_policy) = (Arc::clone(&self.clock), self.retry_policy.answer);
        self.urgent = connect::answering(connection, &self.namespace, clock, retry_policy);
        self.client = match self.rate {
            Some(rate) => connect::limited(self.urgent.clone(), &self.namespace, rate),
            None => self.urgent.clone(),
        };
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

    /// At most so many requests, Leases excepted: a Lease that is renewed too late is lost.
    #[must_use]
    pub fn with_rate_limit(mut self, limit: RateLimit) -> Self {
        self.rate = Some(limit);
        self.connected()
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
    pub(crate) fn identity(&self) -> &str {
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
        let mut stored = self.stored.lock().expect("no holder of this lock panics");
        // This only saves a request. The limit is for a replica that never releases Jobs.
        if stored.len() >= REMEMBERED {
            stored.clear();
        }
        stored.insert(uid.to_owned());
    }

    fn forget_stored(&self, uid: &str) {
        let mut stored = self.stored.lock().expect("no holder of this lock panics");
        stored.remove(uid);
    }

    fn knows_stored(&self, uid: &str) -> bool {
        let stored = self.stored.lock().expect("no holder of this lock panics");
        stored.contains(uid)
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
