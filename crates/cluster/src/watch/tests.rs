mod fill;
mod machine;
mod observations;
mod releases;
mod reports;
mod shell;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher;
use serde_json::json;

use super::run::TrackedRun;
use crate::cache::{JobFeed, Pods, trimmed_job};

#[test]
fn ten_thousand_runs_fit_in_memory() {
    let mut feed = JobFeed::default();
    let mut pods = Pods::default();
    let job: Job = serde_json::from_value(
        json!({"metadata": {"name": "job-1-a", "uid": "u", "managedFields": [],
        "labels": {"mayfly.dev/job-id": "1", "mayfly.dev/step-id": "a"}},
        "spec": {"template": {"spec": {"containers": [{"name": "executor", "env": [
            {"name": "EphemeralJobData", "value": "x".repeat(90_000)}]}]}}}}),
    )
    .unwrap();
    let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p",
        "labels": {"batch.kubernetes.io/job-name": "job-1-a"}},
        "spec": {"containers": [{"name": "executor", "env": [
            {"name": "EphemeralJobData", "value": "x".repeat(90_000)}]}]}}))
    .unwrap();
    let changes = feed.changes(watcher::Event::Apply(job.clone()));
    assert_eq!(changes.len(), 1);
    pods.apply(watcher::Event::Apply(pod));
    let kept = serde_json::to_vec(&trimmed_job(&job)).unwrap().len()
        + serde_json::to_vec(&pods.of("job-1-a", "u")).unwrap().len();
    assert!(
        kept + size_of::<TrackedRun>() < 3000,
        "{kept} + {}",
        size_of::<TrackedRun>()
    );
}
