//! What a test sees of its namespace.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod, Secret};
use kube::ResourceExt;
use serde_json::json;

/// What a cluster holds, in one namespace.
#[derive(Debug, Clone, Default)]
pub struct State {
    /// All Jobs.
    pub jobs: Vec<Job>,
    /// All pods.
    pub pods: Vec<Pod>,
    /// All Secrets.
    pub secrets: Vec<Secret>,
    /// All events.
    pub events: Vec<Event>,
}

/// What a wait has seen last, which has found nothing.
#[derive(Debug, thiserror::Error)]
pub enum Seen {
    /// What was looked for is not there.
    #[error("{:#}", json!([.0.jobs, .0.pods, .0.events]))]
    State(State),
    /// The namespace could not be read.
    #[error("the namespace could not be read: {0}")]
    Unread(#[source] kube::Error),
}

impl State {
    /// The Job of this name.
    pub fn job(&self, name: &str) -> Option<&Job> {
        self.jobs.iter().find(|job| job.name_any() == name)
    }

    /// The pods of a Job.
    pub fn pods_of(&self, job: &str) -> Vec<&Pod> {
        let owned = |pod: &&Pod| {
            pod.owner_references()
                .iter()
                .any(|owner| owner.kind == "Job" && owner.name == job)
        };
        self.pods.iter().filter(owned).collect()
    }

    /// Whether a Job has a condition with status `True`.
    pub fn has_condition(&self, job: &str, kind: &str) -> bool {
        let status = self.job(job).and_then(|job| job.status.as_ref());
        let conditions = status
            .into_iter()
            .flat_map(|status| status.conditions.iter().flatten());
        conditions
            .into_iter()
            .any(|condition| condition.type_ == kind && condition.status == "True")
    }

    /// Whether an event with this reason is there.
    pub fn has_event(&self, reason: &str) -> bool {
        self.events
            .iter()
            .any(|event| event.reason.as_deref() == Some(reason))
    }
}
