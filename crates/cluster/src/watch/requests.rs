//! The requests of the watcher to the API server and to the observer.

use std::collections::BTreeSet;

use job_contract::annotations;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, Preconditions};
use serde_json::json;
use tracing::{debug, warn};
use verdict::Verdict;

use super::message::{JobRef, Request, Response};
use super::observer::{ReportOutcome, RunObserver};
use crate::{Cluster, ClusterError};

impl Request {
    /// Whether the request waits for the platform or for Redis, which may be slow.
    pub(super) fn is_slow(&self) -> bool {
        matches!(
            self,
            Self::Heartbeat { .. }
                | Self::Report { .. }
                | Self::CompleteReport { .. }
                | Self::ReportGone { .. }
        )
    }

    pub(super) async fn perform(
        self,
        job: &JobRef,
        cluster: &Cluster,
        observer: &dyn RunObserver,
    ) -> Response {
        let JobRef { run, uid } = job;
        match self {
            Self::Events {
                job,
                pods,
                has_ended,
            } => cluster.fetch_events(&job, &pods, has_ended).await,
            Self::Heartbeat { .. } => Response::Heartbeat(observer.check_heartbeat(run).await),
            Self::Release { remove_incomplete } => {
                Response::Release(cluster.release_held(&run.name, remove_incomplete).await)
            }
            Self::Report { verdict, keep } => {
                Response::Report(cluster.report_end(job, *verdict, keep, observer).await)
            }
            Self::CompleteReport { verdict, keep } => {
                let verdict = cluster.with_lock_holder(*verdict).await;
                observer.on_more(run, &verdict).await;
                cluster.note_reported(job, Some(&verdict), keep).await;
                Response::Report(ReportOutcome::Delivered)
            }
            Self::NoteReported { verdict, keep } => {
                cluster.note_reported(job, verdict.as_deref(), keep).await;
                Response::Report(ReportOutcome::Delivered)
            }
            Self::ReportGone { verdict } => {
                let verdict = cluster.with_lock_holder(*verdict).await;
                Response::ReportGone(observer.on_ended(run, &verdict).await)
            }
            Self::Stop { verdict } => {
                let stopped = cluster.stop(job, &verdict).await;
                if let Err(error) = &stopped {
                    warn!(run = run.name, %error, "containers that outlived an executor could not be stopped, trying again");
                }
                Response::Stop {
                    done: stopped.is_ok(),
                }
            }
            Self::Fill { job } => {
                let created = cluster.create_fill_job(&job).await;
                let is_over = match &created {
                    Ok(made) => {
                        made.log(run, &job);
                        true
                    }
                    Err(error) => {
                        warn!(%run, %error, "no Job was made for the providers that the run lacked in the store");
                        !error.is_transient()
                    }
                };
                Response::Fill { done: is_over }
            }
            Self::Remove => {
                let _ = cluster.remove_ended(&run.name, uid).await;
                Response::Remove
            }
        }
    }
}

impl Cluster {
    /// Fetches the events of a run whose pods are known so far. The two watches are not in step: the Job may be seen to be
    /// over before the end of its pod is. So the pods of a run that has ended are fetched too.
    async fn fetch_events(&self, job: &Job, known: &[Pod], has_ended: bool) -> Response {
        let pods = if has_ended {
            self.pods_of(job).await.unwrap_or_default()
        } else {
            Vec::new()
        };
        let events = self.events_of(job, known).await.unwrap_or_default();
        Response::Events { events, pods }
    }

    /// Events about a run's Job and its pods. A pod that is gone is known by its name, if the Job or an event has it.
    pub(crate) async fn events_of(
        &self,
        job: &Job,
        pods: &[Pod],
    ) -> Result<Vec<Event>, ClusterError> {
        const DOING: &str = "list the events of the run";
        let of = |meta: &ObjectMeta| {
            meta.uid
                .as_ref()
                .map(|uid| format!("involvedObject.uid={uid}"))
        };
        let mut found = Vec::new();
        for subject in of(&job.metadata)
            .into_iter()
            .chain(pods.iter().filter_map(|pod| of(&pod.metadata)))
        {
            found.extend(self.events_with(&subject, DOING).await?);
        }
        let is_gone = |name: &&str| {
            !pods
                .iter()
                .any(|pod| pod.metadata.name.as_deref() == Some(name))
        };
        let named = verdict::created_pods(&found)
            .chain(verdict::failure_of_pod(job).map(|(name, _)| name))
            .filter(is_gone);
        let gone: BTreeSet<String> = named.map(str::to_owned).collect();
        for name in gone {
            let subject = format!("involvedObject.name={name}");
            found.extend(self.events_with(&subject, DOING).await?);
        }
        Ok(found)
    }

    /// Stops a run that was given up, has its end reported, and writes both onto the Job.
    async fn report_end(
        &self,
        job: &JobRef,
        verdict: Verdict,
        keep: Option<i32>,
        observer: &dyn RunObserver,
    ) -> ReportOutcome {
        let verdict = self.with_lock_holder(verdict).await;
        if !verdict.job_over {
            match self.stop(job, &verdict).await {
                // Its pod may still start, so the platform must not hear of an end. At the latest, the Job's own deadline
                // ends it. A Job that is gone starts nothing.
                Err(error) if !error.is_not_found() => {
                    warn!(run = %job.run, %error, "a run that cannot start could not be stopped, trying again");
                    return ReportOutcome::Retry;
                }
                _ => {}
            }
        }
        if verdict.executor_reported() {
            self.note_reported(job, Some(&verdict), keep).await;
            return ReportOutcome::Delivered;
        }
        let outcome = observer.on_ended(&job.run, &verdict).await;
        match &outcome {
            ReportOutcome::Delivered => self.note_reported(job, Some(&verdict), keep).await,
            ReportOutcome::Refused(why) => {
                let noted = (annotations::REPORT_REFUSED, why.clone());
                self.note_end(job, Some(&verdict), noted, keep).await;
            }
            ReportOutcome::Retry => {}
        }
        outcome
    }

    /// Ends a Job and writes the verdict onto it. A deadline that has passed keeps the Job, so that the run can be explained
    /// and a late duplicate of its delivery still finds it.
    async fn stop(&self, job: &JobRef, verdict: &Verdict) -> Result<(), ClusterError> {
        let text = serde_json::to_string(verdict).unwrap_or_default();
        let stop = json!({
            "metadata": {"uid": job.uid, "annotations": {annotations::VERDICT: text}},
            "spec": {"activeDeadlineSeconds": 1},
        });
        let name = &job.run.name;
        self.patch_job("stop the run", name, &stop).await.map(drop)
    }

    /// Writes onto the Job that the platform knows how the run ended, so that no later watcher reports it again. If this is
    /// lost, a later watcher finds the same end, and the platform knows it already.
    async fn note_reported(&self, job: &JobRef, verdict: Option<&Verdict>, keep: Option<i32>) {
        let noted = (annotations::REPORTED_AT, self.now().to_string());
        self.note_end(job, verdict, noted, keep).await;
    }

    /// Writes onto the Job that there is nothing more to report, and lets the Job go in its time.
    async fn note_end(
        &self,
        job: &JobRef,
        verdict: Option<&Verdict>,
        (name, text): (&str, String),
        keep: Option<i32>,
    ) {
        let mut patch = json!({"metadata": {"uid": job.uid, "annotations": {name: text}}});
        if let Some(verdict) = verdict {
            let verdict = serde_json::to_string(verdict).unwrap_or_default();
            patch["metadata"]["annotations"][annotations::VERDICT] = verdict.into();
        }
        if let Some(seconds) = keep {
            patch["spec"] = json!({"ttlSecondsAfterFinished": seconds});
        }
        let noted = self.patch_job("note the report of the run", &job.run.name, &patch);
        if let Err(error) = noted.await {
            debug!(run = %job.run, %error, "the report of the run could not be noted on its Job");
        }
    }

    async fn remove_ended(&self, name: &str, uid: &str) -> Result<(), ClusterError> {
        let meant = Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: None,
        };
        let params = DeleteParams::background();
        self.delete_job("remove an ended run", name, params, meant)
            .await
            .map(drop)
    }
}
