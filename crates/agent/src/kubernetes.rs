//! Target `kubernetes`: each task becomes a Job with the labels of its lease. The cluster is the only record.

mod runs;

use std::sync::Arc;
use std::time::Duration;

use cluster::check::{CheckResult, Expectations};
use cluster::settings::ClusterSettings;
use cluster::{Cluster, ClusterError, ConnectError, RetryPolicy, RunRef, Submitted, rights};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::env;
use job_contract::report::{FinalReport, ReportKey};
use job_contract::{annotations, labels};
use manifest::Deployment;
use manifest::Manifest;
use pool_protocol::id::AgentName;
use pool_protocol::lease::{DeclineReason, End, LeaseRef};
use pool_protocol::path::LeaseCall;
use secrecy::ExposeSecret as _;
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};
use verdict::{Started, Verdict, VerdictKind};

use self::runs::{AgentObserver, ObservedRun, Runs};
use super::lease::{AgentLease, Stop};
use super::target::{Executor, FoundExecutor, RunEnd, StartFailure, StartRequest, Target};

/// The timeout for all requests of one start: as long as a lease lasts without a heartbeat.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The timeout for the look for what a pod may do without.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);
/// How many attempts there are to replace the Job of an earlier lease before the task is declined.
const MAX_ATTEMPTS: usize = 4;
/// How often the existence of a Job is checked while the watch has no news of it.
const EXISTENCE_CHECK_INTERVAL: Duration = Duration::from_mins(1);

/// The settings of target `kubernetes`.
#[derive(Debug)]
pub(crate) struct KubernetesSettings {
    pub(crate) deployment: Deployment,
    pub(crate) cluster: ClusterSettings,
    /// Variables of the agent's environment that executors get.
    pub(crate) forwarded: Vec<(String, String)>,
    /// Verifies the final reports of executors.
    pub(crate) report_key: Option<ReportKey>,
}

/// Checks the agent's rights, and what pods of runs refer to.
pub(crate) async fn check(settings: KubernetesSettings) -> Result<Vec<CheckResult>, ConnectError> {
    let deployment = settings.deployment;
    let references = match manifest::references(&deployment) {
        Ok(references) => references,
        Err(errors) => {
            let wrong = CheckResult::failed("settings of runs", errors.to_string(), "correct them");
            return Ok(vec![wrong]);
        }
    };
    let cluster = Cluster::connect(Some(deployment.namespace)).await?;
    let cluster = cluster.with_retry_policy(RetryPolicy {
        attempts: 1,
        ..RetryPolicy::default()
    });
    let expected = Expectations {
        rights: rights::of_agents().collect(),
        job_data_in_secret: true,
        references,
    };
    Ok(cluster.check(&expected).await)
}

/// The target.
#[derive(Debug)]
pub(crate) struct KubernetesTarget {
    cluster: Cluster,
    deployment: Deployment,
    settings: ClusterSettings,
    forwarded: Vec<(String, String)>,
    agent: AgentName,
    installation: String,
    runs: Arc<Runs>,
}

impl KubernetesTarget {
    pub(crate) async fn connect(
        settings: KubernetesSettings,
        agent: AgentName,
    ) -> Result<Self, ConnectError> {
        let KubernetesSettings {
            deployment,
            cluster: mut watching,
            forwarded,
            report_key,
        } = settings;
        for warning in &deployment.warnings {
            warn!("{warning}");
        }
        let cluster = Cluster::connect(Some(deployment.namespace.clone())).await?;
        let has_key = report_key.is_some();
        let cluster = cluster.with_report_key(report_key);
        if watching.watch.fill.is_some() && !has_key {
            warn!(
                hint = format!("give agent and executors the same {}", env::REPORT_KEY),
                "final reports cannot be verified: the store of providers is not filled"
            );
        }
        watching.watch.selector = labels::of_agent(agent.as_str());
        Ok(Self {
            installation: cluster.identity().to_owned(),
            cluster,
            deployment,
            settings: watching,
            forwarded,
            agent,
            runs: Arc::default(),
        })
    }

    fn manifest(&self, order: &StartRequest) -> Result<Manifest, StartFailure> {
        let manifest = manifest::build(&order.job, &self.deployment)
            .map_err(|errors| StartFailure::Fail(VerdictKind::ConfigMissing, errors.to_string()))?;
        let names: Vec<&str> = self
            .forwarded
            .iter()
            .map(|(name, _)| name.as_str())
            .collect();
        let forwarded = names.join(",");
        let own = [
            (env::LEASE_URL, order.url.as_str()),
            (env::LEASE_TOKEN, order.token.expose_secret()),
            (env::ENV_FORWARD, forwarded.as_str()),
        ];
        let forwarded = self.forwarded.iter();
        let forwarded = forwarded.map(|(name, value)| (name.as_str(), value.as_str()));
        // The agent's own variables come last, so that they override others with the same names.
        let variables = forwarded.chain(own).collect::<Vec<_>>();
        let manifest = manifest.with_secret_environment(&variables);
        let LeaseRef {
            task,
            lease,
            fencing_token,
        } = order.lease;
        Ok(manifest.labelled(
            &[
                (labels::TASK, &task.to_string()),
                (labels::LEASE, &lease.to_string()),
                (labels::AGENT, self.agent.as_str()),
            ],
            &[(annotations::FENCING_TOKEN, &fencing_token.to_string())],
        ))
    }

    async fn submit_or_adopt(
        &self,
        order: &StartRequest,
    ) -> Result<Box<dyn Executor>, StartFailure> {
        let manifest = self.manifest(order)?;
        let looking = self.cluster.without_missing_cache(manifest.clone());
        let looking = tokio::time::timeout(LOOK_TIMEOUT, looking);
        let manifest = looking.await.unwrap_or(manifest);
        for note in &manifest.notes {
            info!(lease = %order.lease.lease, "{note}");
        }
        let name = manifest.job.metadata.name.clone().unwrap_or_default();
        // This comes before the creation of the Job, because the watch may be faster than the response.
        let view = self.runs.follow(order.lease.lease);
        let submitted = tokio::time::timeout(START_TIMEOUT, self.submit(&manifest, &name, order));
        let failure = match submitted.await {
            Ok(Ok(())) => return Ok(Box::new(self.job(order.lease, name, view))),
            Ok(Err(failure)) => failure,
            // The next lease adopts the created objects, or removes them as incomplete.
            Err(_) => retryable("the Kubernetes API takes too long"),
        };
        self.runs.unfollow(order.lease.lease);
        Err(failure)
    }

    async fn submit(
        &self,
        manifest: &Manifest,
        name: &str,
        order: &StartRequest,
    ) -> Result<(), StartFailure> {
        for _ in 0..MAX_ATTEMPTS {
            // A Job with this lease comes from an interrupted start. A Job with an earlier lease has not accepted the
            // task, because the hub would not have leased the task again. It must not get the job data of this lease.
            let is_free = self.cluster.remove_unless_leased(name, &order.lease).await;
            let is_free = is_free.map_err(|error| classify(&error))?;
            let submitted = self.cluster.accept(manifest).await;
            match submitted.map_err(|error| classify(&error))? {
                Submitted::AlreadyThere if is_free => {
                    warn!(job = name, "the Job of another lease appeared meanwhile");
                }
                Submitted::Created | Submitted::AlreadyThere => return Ok(()),
            }
        }
        Err(retryable("the Job of an earlier lease does not go away"))
    }

    fn job(&self, lease: LeaseRef, name: String, view: watch::Receiver<ObservedRun>) -> JobOfLease {
        JobOfLease {
            cluster: self.cluster.clone(),
            runs: Arc::clone(&self.runs),
            lease,
            name,
            view,
        }
    }

    fn found(&self, run: RunRef) -> Option<FoundExecutor> {
        let lease = run.lease?;
        Some(FoundExecutor {
            lease,
            run: run.to_string(),
            // Jobs belong to the agent of their label, whatever address its hub has.
            url: None,
            executor: Box::new(self.job(lease, run.name, self.runs.follow(lease.lease))),
        })
    }
}

fn retryable(text: &str) -> StartFailure {
    StartFailure::Decline(DeclineReason::Failed, text.to_owned())
}

/// Returns what a failed request means for the task.
fn classify(error: &ClusterError) -> StartFailure {
    let text = job_contract::chain(error);
    if error.is_quota() {
        StartFailure::Decline(DeclineReason::Quota, text)
    } else if error.is_transient() || error.concerns_every_run() {
        StartFailure::Decline(DeclineReason::Failed, text)
    } else {
        StartFailure::Fail(VerdictKind::AdmissionRefused, text)
    }
}

impl Target for KubernetesTarget {
    fn name(&self) -> &'static str {
        "kubernetes"
    }

    fn installation(&self) -> &str {
        &self.installation
    }

    fn find(&self) -> BoxFuture<'_, Result<Vec<FoundExecutor>, String>> {
        async {
            let runs = self.cluster.leased(self.agent.as_str()).await;
            let runs = runs.map_err(|error| job_contract::chain(&error))?;
            Ok(runs.into_iter().filter_map(|run| self.found(run)).collect())
        }
        .boxed()
    }

    fn start<'a>(
        &'a self,
        order: &'a StartRequest,
    ) -> BoxFuture<'a, Result<Box<dyn Executor>, StartFailure>> {
        self.submit_or_adopt(order).boxed()
    }

    fn work(&self, found: mpsc::UnboundedSender<FoundExecutor>) -> BoxFuture<'_, ()> {
        async move {
            let (sender, mut unknown) = mpsc::unbounded_channel();
            let observer = Arc::new(AgentObserver::new(Arc::clone(&self.runs), sender));
            let watch = self.cluster.watch(self.settings.watch.clone(), observer);
            let adopt = async {
                while let Some(run) = unknown.recv().await {
                    if let Some(run) = self.found(run) {
                        // If there is no receiver, the agent has ended.
                        let _ = found.send(run);
                    }
                }
            };
            tokio::join!(watch, adopt);
        }
        .boxed()
    }
}

/// The Job of a lease.
#[derive(Debug)]
struct JobOfLease {
    cluster: Cluster,
    runs: Arc<Runs>,
    lease: LeaseRef,
    name: String,
    view: watch::Receiver<ObservedRun>,
}

impl JobOfLease {
    async fn follow(&mut self, lease: &AgentLease) -> RunEnd {
        let mut is_missing = false;
        loop {
            let view = self.view.borrow_and_update().clone();
            lease.set_reason(view.reason);
            if let Some(verdict) = &view.end {
                return judge(verdict);
            }
            if view.is_forgotten {
                let text = "its Job was removed before its job data was stored";
                return RunEnd::Decline(DeclineReason::Failed, text.to_owned());
            }
            tokio::select! {
                changed = self.view.changed() => if changed.is_err() {
                    return RunEnd::Elsewhere;
                },
                // The watch may have missed the whole life of the Job.
                () = tokio::time::sleep(EXISTENCE_CHECK_INTERVAL) => {
                    let is_gone = matches!(self.cluster.is_there(&self.name).await, Ok(false));
                    if is_gone && is_missing {
                        let text = "its Job is gone";
                        return RunEnd::Decline(DeclineReason::Failed, text.to_owned());
                    }
                    is_missing = is_gone;
                }
            }
        }
    }
}

impl Executor for JobOfLease {
    fn name(&self) -> String {
        format!("{}/{}", self.cluster.namespace(), self.name)
    }

    fn ended<'a>(&'a mut self, lease: &'a AgentLease) -> BoxFuture<'a, RunEnd> {
        self.follow(lease).boxed()
    }

    fn stop(&mut self, stop: Stop) -> BoxFuture<'_, Result<(), String>> {
        async move {
            let stopped = match stop {
                Stop::Withdraw => self.cluster.withdraw(&self.name).await,
                Stop::Terminate => self
                    .cluster
                    .cancel(&self.name, Duration::ZERO)
                    .await
                    .map(drop),
                Stop::Kill => self.cluster.kill(&self.name).await,
            };
            match stopped {
                // The end follows, or has already been observed.
                Ok(()) | Err(ClusterError::NoSuchRun(_)) => Ok(()),
                Err(error) => Err(job_contract::chain(&error)),
            }
        }
        .boxed()
    }

    fn forget(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.runs.unfollow(self.lease.lease);
        std::future::ready(()).boxed()
    }
}

/// Returns what the end of a Job means for its task.
fn judge(verdict: &Verdict) -> RunEnd {
    let reported = verdict.executor_reported();
    let is_untouched = verdict.started == Started::No && !reported;
    let unreported_success = verdict.unreported_success();
    let call = match verdict.kind {
        _ if unreported_success.is_some() => LeaseCall::Complete,
        VerdictKind::Claimed => return RunEnd::Elsewhere,
        VerdictKind::Infrastructure if is_untouched => {
            return RunEnd::Decline(DeclineReason::Failed, verdict.text());
        }
        VerdictKind::QuotaExceeded if is_untouched => {
            return RunEnd::Decline(DeclineReason::Quota, verdict.text());
        }
        VerdictKind::Completed => LeaseCall::Complete,
        VerdictKind::Cancelled => LeaseCall::Cancelled,
        _ => LeaseCall::Fail,
    };
    let end = End {
        exit_code: Some(verdict.outcome.code().into()),
        final_log_sequence: None,
        diagnostic: verdict.text(),
        verdict: Some(verdict.kind.name().to_owned()),
        reported,
        report: unreported_success.and_then(FinalReport::for_hub),
    };
    if verdict.report.is_none() && vanishes(verdict.kind) {
        return RunEnd::Lost(DeclineReason::Failed, end);
    }
    RunEnd::Over(call, end)
}

/// Returns whether a run of this kind may end at any time, also before its executor has accepted the task.
const fn vanishes(kind: VerdictKind) -> bool {
    matches!(
        kind,
        VerdictKind::Signalled
            | VerdictKind::Lost
            | VerdictKind::Deleted
            | VerdictKind::NodeLost
            | VerdictKind::Evicted
            | VerdictKind::Preempted
    )
}

#[cfg(test)]
mod tests;
