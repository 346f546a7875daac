//! The Job controller: pods for Jobs that are not suspended, and what becomes of the Job when they end.
//!
//! As the real one, except: completion indexes and success policies are not followed, and the back-off after a failed
//! pod starts at a fifth of a second.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::batch::v1::{Job, JobCondition, JobSpec, JobStatus, UncountedTerminatedPods};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::controller::{Action as Next, Controller};
use kube::runtime::watcher;
use kube::{Api, Client, Resource as _, ResourceExt};
use serde_json::json;

use super::events::{Source, emit};
use super::failure::{self, Action};

/// Keeps a pod until its end is counted.
pub(crate) const TRACKING: &str = "batch.kubernetes.io/job-tracking";

const BACKOFF: Duration = Duration::from_millis(200);
const BACKOFF_MOST: Duration = Duration::from_secs(5);

/// Runs until the runtime ends.
pub(crate) async fn run(client: Client) {
    let jobs = Api::<Job>::all(client.clone());
    let pods = Api::<Pod>::all(client.clone());
    let config = || watcher::Config::default();
    Controller::new(jobs, config())
        .owns(pods, config())
        .run(
            |job, client| async move { reconcile(&job, &client).await },
            |_, _, _| Next::requeue(BACKOFF),
            Arc::new(client),
        )
        .for_each(|_| async {})
        .await;
}

/// A Job and its pods, as they are now.
struct Sync<'a> {
    client: &'a Client,
    job: Job,
    spec: JobSpec,
    pods: Vec<Pod>,
    status: JobStatus,
    requeue: Option<Duration>,
    /// Pods whose end is accounted for.
    done: Vec<String>,
    /// Events to leave once the status is stored.
    news: Vec<(&'static str, &'static str, String)>,
}

fn is_true(status: &JobStatus, kind: &str) -> bool {
    status
        .conditions
        .iter()
        .flatten()
        .any(|condition| condition.type_ == kind && condition.status == "True")
}

fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Pending")
}

fn over(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

fn deleting(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

fn tracked(pod: &Pod) -> bool {
    pod.finalizers()
        .iter()
        .any(|finalizer| finalizer == TRACKING)
}

async fn reconcile(seen: &Job, client: &Client) -> Result<Next, kube::Error> {
    let namespace = seen.namespace().unwrap_or_default();
    let jobs = Api::<Job>::namespaced(client.clone(), &namespace);
    // The cache may be behind; decisions are made on what is.
    let Some(job) = jobs.get_opt(&seen.name_any()).await? else {
        return Ok(Next::await_change());
    };
    let Some(spec) = job.spec.clone() else {
        return Ok(Next::await_change());
    };
    if spec
        .managed_by
        .as_deref()
        .is_some_and(|name| name != "kubernetes.io/job-controller")
    {
        return Ok(Next::await_change());
    }
    let uid = job.uid().unwrap_or_default();
    let selector =
        ListParams::default().labels(&format!("batch.kubernetes.io/controller-uid={uid}"));
    let pods = Api::<Pod>::namespaced(client.clone(), &namespace)
        .list(&selector)
        .await?
        .items;
    let pods = pods
        .into_iter()
        .filter(|pod| pod.owner_references().iter().any(|owner| owner.uid == uid))
        .collect();
    let status = job.status.clone().unwrap_or_default();
    let mut sync = Sync {
        client,
        job,
        spec,
        pods,
        status,
        requeue: None,
        done: Vec::new(),
        news: Vec::new(),
    };
    sync.run().await?;
    Ok(sync.requeue.map_or_else(Next::await_change, Next::requeue))
}

impl Sync<'_> {
    fn pods_api(&self) -> Api<Pod> {
        Api::namespaced(
            self.client.clone(),
            &self.job.namespace().unwrap_or_default(),
        )
    }

    fn jobs_api(&self) -> Api<Job> {
        Api::namespaced(
            self.client.clone(),
            &self.job.namespace().unwrap_or_default(),
        )
    }

    async fn run(&mut self) -> Result<(), kube::Error> {
        if self.job.metadata.deletion_timestamp.is_some() {
            return self.release(|_| true).await;
        }
        if is_true(&self.status, "Complete") || is_true(&self.status, "Failed") {
            self.release(|_| true).await?;
            return self.expire().await;
        }
        let before = self.status.clone();
        let suspended = self.spec.suspend == Some(true);
        if self.status.start_time.is_none() && !suspended {
            self.status.start_time = Some(Time(Timestamp::now()));
        }
        let failed_by_policy = self.count();
        self.decide(failed_by_policy, suspended).await?;
        self.census();
        self.conclude();
        if self.status != before {
            self.store().await?;
        }
        for (kind, reason, message) in std::mem::take(&mut self.news) {
            emit(
                self.client,
                &self.job,
                Source::JobController,
                kind,
                reason,
                &message,
            )
            .await;
        }
        let done = self.done.clone();
        self.release(|pod| pod.uid().is_some_and(|uid| done.contains(&uid)))
            .await?;
        self.forget_counted();
        Ok(())
    }

    /// Whether a pod counts as failed although it has not ended: it is on its way out and may be replaced.
    fn failed(&self, pod: &Pod) -> bool {
        let only_failed = self.spec.pod_replacement_policy.as_deref() == Some("Failed");
        phase(pod) == "Failed" || (!only_failed && deleting(pod) && phase(pod) != "Succeeded")
    }

    /// Counts pods that ended since the last time. Returns the message of a `FailJob` rule.
    fn count(&mut self) -> Option<String> {
        let mut counted = self
            .status
            .uncounted_terminated_pods
            .take()
            .unwrap_or_default();
        let known: Vec<String> = counted
            .failed
            .iter()
            .flatten()
            .chain(counted.succeeded.iter().flatten())
            .cloned()
            .collect();
        // Counted before, and let go since.
        let waiting = |uid: &String| {
            self.pods
                .iter()
                .any(|pod| pod.uid().as_ref() == Some(uid) && tracked(pod))
        };
        for uids in [&mut counted.failed, &mut counted.succeeded]
            .into_iter()
            .flatten()
        {
            uids.retain(waiting);
        }
        let mut fatal = None;
        let (mut succeeded, mut failed) = (Vec::new(), Vec::new());
        for pod in self.pods.iter().filter(|pod| tracked(pod)) {
            let uid = pod.uid().unwrap_or_default();
            if known.contains(&uid) {
                continue;
            }
            if phase(pod) == "Succeeded" {
                succeeded.push(uid);
            } else if self.failed(pod) {
                match failure::action(&self.job, pod) {
                    Action::Ignore => self.done.push(uid),
                    Action::Count => failed.push(uid),
                    Action::FailJob(message) => {
                        fatal = fatal.or(Some(message));
                        failed.push(uid);
                    }
                }
            }
        }
        let add = |count: &mut Option<i32>, new: &[String]| {
            *count = Some(count.unwrap_or(0) + i32::try_from(new.len()).unwrap_or(i32::MAX))
                .filter(|n| *n > 0);
        };
        self.done
            .extend(known.iter().chain(&succeeded).chain(&failed).cloned());
        add(&mut self.status.succeeded, &succeeded);
        add(&mut self.status.failed, &failed);
        counted.succeeded.get_or_insert_default().extend(succeeded);
        counted.failed.get_or_insert_default().extend(failed);
        self.status.uncounted_terminated_pods = Some(counted);
        self.tidy_uncounted();
        fatal
    }

    fn tidy_uncounted(&mut self) {
        if let Some(counted) = &mut self.status.uncounted_terminated_pods {
            counted.failed = counted.failed.take().filter(|list| !list.is_empty());
            counted.succeeded = counted.succeeded.take().filter(|list| !list.is_empty());
        }
    }

    fn forget_counted(&mut self) {
        // Done by the next pass, which the released pods cause.
        if self.status.uncounted_terminated_pods != Some(UncountedTerminatedPods::default()) {
            self.requeue = Some(self.requeue.unwrap_or(BACKOFF).min(BACKOFF));
        }
    }

    fn deadline(&self) -> Option<Duration> {
        let seconds = self.spec.active_deadline_seconds?;
        let start = self.status.start_time.as_ref()?.0;
        let until = start + SignedDuration::from_secs(seconds);
        // Nothing is left once it is past.
        Some(Duration::try_from(until.duration_since(Timestamp::now())).unwrap_or_default())
    }

    fn failure(&mut self, by_policy: Option<String>, suspended: bool) -> Option<(String, String)> {
        if let Some(known) = self
            .status
            .conditions
            .iter()
            .flatten()
            .find(|condition| condition.type_ == "FailureTarget")
        {
            return Some((
                known.reason.clone().unwrap_or_default(),
                known.message.clone().unwrap_or_default(),
            ));
        }
        if let Some(message) = by_policy {
            return Some(("PodFailurePolicy".into(), message));
        }
        let limit = self.spec.backoff_limit.unwrap_or(6);
        let restarts: i32 = self
            .pods
            .iter()
            .filter(|pod| !over(pod))
            .filter_map(|pod| pod.status.as_ref()?.container_statuses.as_ref())
            .flatten()
            .map(|container| container.restart_count)
            .sum();
        if self.status.failed.unwrap_or(0) > limit || restarts > limit {
            return Some((
                "BackoffLimitExceeded".into(),
                "Job has reached the specified backoff limit".into(),
            ));
        }
        let left = self.deadline().filter(|_| !suspended)?;
        if left.is_zero() {
            return Some((
                "DeadlineExceeded".into(),
                "Job was active longer than specified deadline".into(),
            ));
        }
        self.requeue = Some(left);
        None
    }

    async fn decide(
        &mut self,
        by_policy: Option<String>,
        suspended: bool,
    ) -> Result<(), kube::Error> {
        let wanted = self.spec.completions.unwrap_or(1);
        if let Some((reason, message)) = self.failure(by_policy, suspended) {
            self.condition("FailureTarget", "True", &reason, &message);
            return self.stop_active().await;
        }
        if self.status.succeeded.unwrap_or(0) >= wanted {
            self.condition(
                "SuccessCriteriaMet",
                "True",
                "CompletionsReached",
                "Reached expected number of succeeded pods",
            );
            return self.stop_active().await;
        }
        if suspended {
            if !is_true(&self.status, "Suspended") {
                self.condition("Suspended", "True", "JobSuspended", "Job suspended");
                self.news
                    .push(("Normal", "Suspended", "Job suspended".into()));
            }
            self.status.start_time = None;
            return self.stop_active().await;
        }
        if is_true(&self.status, "Suspended") {
            self.condition("Suspended", "False", "JobResumed", "Job resumed");
            self.status.start_time = Some(Time(Timestamp::now()));
            self.news.push(("Normal", "Resumed", "Job resumed".into()));
        }
        self.create_pods(wanted).await
    }

    fn condition(&mut self, kind: &str, status: &str, reason: &str, message: &str) {
        let now = Time(Timestamp::now());
        let new = JobCondition {
            type_: kind.into(),
            status: status.into(),
            reason: Some(reason.into()),
            message: Some(message.into()),
            last_probe_time: Some(now.clone()),
            last_transition_time: Some(now),
        };
        let all = self.status.conditions.get_or_insert_default();
        match all.iter_mut().find(|condition| condition.type_ == kind) {
            Some(old) if old.status == status => {}
            Some(old) => *old = new,
            None => all.push(new),
        }
    }

    async fn stop_active(&mut self) -> Result<(), kube::Error> {
        let api = self.pods_api();
        let active: Vec<String> = self
            .pods
            .iter()
            .filter(|pod| !over(pod) && !deleting(pod))
            .map(ResourceExt::name_any)
            .collect();
        for name in active {
            ignore_missing(api.delete(&name, &DeleteParams::background()).await)?;
            self.news
                .push(("Normal", "SuccessfulDelete", format!("Deleted pod: {name}")));
        }
        let selector = format!(
            "batch.kubernetes.io/controller-uid={}",
            self.job.uid().unwrap_or_default()
        );
        self.pods = api
            .list(&ListParams::default().labels(&selector))
            .await?
            .items;
        Ok(())
    }

    /// How long to wait after the last failure.
    fn backoff(&self) -> Duration {
        let failed = u32::try_from(self.status.failed.unwrap_or(0)).unwrap_or(0);
        if failed == 0 {
            return Duration::ZERO;
        }
        let ended = self
            .pods
            .iter()
            .filter(|pod| phase(pod) == "Failed")
            .filter_map(|pod| {
                let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
                Some(
                    statuses
                        .first()?
                        .state
                        .as_ref()?
                        .terminated
                        .as_ref()?
                        .finished_at
                        .as_ref()?
                        .0,
                )
            })
            .max();
        let Some(ended) = ended else {
            return Duration::ZERO;
        };
        let wait = BACKOFF
            .saturating_mul(2_u32.saturating_pow(failed - 1))
            .min(BACKOFF_MOST);
        let since = Duration::try_from(Timestamp::now().duration_since(ended)).unwrap_or_default();
        wait.saturating_sub(since)
    }

    async fn create_pods(&mut self, wanted: i32) -> Result<(), kube::Error> {
        let only_failed = self.spec.pod_replacement_policy.as_deref() == Some("Failed");
        let alive = self
            .pods
            .iter()
            .filter(|pod| !over(pod) && (only_failed || !deleting(pod)))
            .count();
        let parallel = self
            .spec
            .parallelism
            .unwrap_or(1)
            .min(wanted - self.status.succeeded.unwrap_or(0));
        let missing = usize::try_from(parallel).unwrap_or(0).saturating_sub(alive);
        if missing == 0 {
            return Ok(());
        }
        let wait = self.backoff();
        if !wait.is_zero() {
            self.requeue = Some(self.requeue.unwrap_or(wait).min(wait));
            return Ok(());
        }
        for _ in 0..missing {
            match self
                .pods_api()
                .create(&PostParams::default(), &self.pod())
                .await
            {
                Ok(pod) => {
                    let message = format!("Created pod: {}", pod.name_any());
                    self.news.push(("Normal", "SuccessfulCreate", message));
                    self.pods.push(pod);
                }
                Err(kube::Error::Api(status)) => {
                    self.news.push((
                        "Warning",
                        "FailedCreate",
                        format!("Error creating: {}", status.message),
                    ));
                    self.requeue = Some(BACKOFF_MOST / 10);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn pod(&self) -> Pod {
        let template = &self.spec.template;
        let from = template.metadata.clone().unwrap_or_default();
        let mut pod = Pod {
            spec: template.spec.clone(),
            ..Pod::default()
        };
        pod.metadata.generate_name = Some(format!("{}-", self.job.name_any()));
        pod.metadata.labels = from.labels;
        pod.metadata.annotations = from.annotations;
        pod.metadata.finalizers = Some(vec![TRACKING.to_owned()]);
        pod.metadata.owner_references = Some(vec![OwnerReference {
            api_version: Job::api_version(&()).into_owned(),
            kind: Job::kind(&()).into_owned(),
            name: self.job.name_any(),
            uid: self.job.uid().unwrap_or_default(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }]);
        pod
    }

    /// Active, ready and terminating pods.
    fn census(&mut self) {
        let number = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
        let active: Vec<&Pod> = self
            .pods
            .iter()
            .filter(|pod| !over(pod) && !deleting(pod))
            .collect();
        let ready = active.iter().filter(|pod| phase(pod) == "Running").count();
        let terminating = self
            .pods
            .iter()
            .filter(|pod| !over(pod) && deleting(pod))
            .count();
        self.status.active = Some(number(active.len())).filter(|count| *count > 0);
        self.status.ready = Some(number(ready));
        self.status.terminating = Some(number(terminating));
    }

    /// The terminal condition, once no pod is left.
    fn conclude(&mut self) {
        let left = self.status.active.unwrap_or(0) + self.status.terminating.unwrap_or(0);
        // Nor is it over while a pod that ended is held for being counted.
        let all_counted =
            self.status.uncounted_terminated_pods == Some(UncountedTerminatedPods::default());
        if left > 0 || !all_counted {
            return;
        }
        let target = self
            .status
            .conditions
            .iter()
            .flatten()
            .find(|condition| {
                matches!(
                    condition.type_.as_str(),
                    "FailureTarget" | "SuccessCriteriaMet"
                ) && condition.status == "True"
            })
            .cloned();
        let Some(target) = target else { return };
        let reason = target.reason.unwrap_or_default();
        let message = target.message.unwrap_or_default();
        if target.type_ == "FailureTarget" {
            self.condition("Failed", "True", &reason, &message);
            let reason = match reason.as_str() {
                "DeadlineExceeded" => "DeadlineExceeded",
                "PodFailurePolicy" => "PodFailurePolicy",
                _ => "BackoffLimitExceeded",
            };
            self.news.push(("Warning", reason, message));
        } else {
            self.condition("Complete", "True", &reason, &message);
            self.status.completion_time = Some(Time(Timestamp::now()));
            self.news
                .push(("Normal", "Completed", "Job completed".into()));
        }
    }

    async fn store(&mut self) -> Result<(), kube::Error> {
        let mut job = self.job.clone();
        job.status = Some(self.status.clone());
        let name = job.name_any();
        self.job = self
            .jobs_api()
            .replace_status(&name, &PostParams::default(), &job)
            .await?;
        Ok(())
    }

    /// Lets pods go whose end is counted, or that nobody counts any more.
    async fn release(&self, which: impl Fn(&Pod) -> bool) -> Result<(), kube::Error> {
        for pod in self.pods.iter().filter(|pod| tracked(pod) && which(pod)) {
            untrack(&self.pods_api(), pod).await?;
        }
        Ok(())
    }

    /// Deletes the Job when its time after the end is over.
    async fn expire(&mut self) -> Result<(), kube::Error> {
        let Some(ttl) = self.spec.ttl_seconds_after_finished else {
            return Ok(());
        };
        let ended = self
            .status
            .conditions
            .iter()
            .flatten()
            .find(|condition| matches!(condition.type_.as_str(), "Complete" | "Failed"))
            .and_then(|condition| condition.last_transition_time.as_ref());
        let Some(Time(ended)) = ended else {
            return Ok(());
        };
        let age = Duration::try_from(Timestamp::now().duration_since(*ended)).unwrap_or_default();
        let left = Duration::from_secs(u64::try_from(ttl).unwrap_or(0)).saturating_sub(age);
        if left.is_zero() {
            return ignore_missing(
                self.jobs_api()
                    .delete(&self.job.name_any(), &DeleteParams::foreground())
                    .await,
            );
        }
        self.requeue = Some(left);
        Ok(())
    }
}

/// Takes the tracking finalizer off a pod.
pub(crate) async fn untrack(pods: &Api<Pod>, pod: &Pod) -> Result<(), kube::Error> {
    let rest: Vec<&String> = pod
        .finalizers()
        .iter()
        .filter(|finalizer| *finalizer != TRACKING)
        .collect();
    let patch = json!({"metadata": {"uid": pod.uid(), "finalizers": rest}});
    ignore_missing(
        pods.patch(
            &pod.name_any(),
            &PatchParams::default(),
            &Patch::Merge(patch),
        )
        .await,
    )
}

/// Done is done, whoever did it.
pub(crate) fn ignore_missing<T>(result: Result<T, kube::Error>) -> Result<(), kube::Error> {
    match result {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
        Err(error) => Err(error),
    }
}
