//! Target `kubernetes`: each task becomes a Job, which carries its lease. The cluster is the only record.

mod runs;

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::env;
use job_contract::report::ReportKey;
use pool_protocol::id::AgentName;
use pool_protocol::lease::{DeclineReason, End};
use pool_protocol::path::LeaseCall;
use secrecy::ExposeSecret as _;
use tokio::sync::{mpsc, watch};
use tracing::warn;

use self::runs::{Observer, RunView, Runs};
use super::lease::{Held, LeaseRef, Stop};
use super::target::{Executor, Found, Order, RunEnd, StartFailure, Target};
use crate::kubernetes::cluster::{
    Cluster, ClusterError, ConnectError, RunKey, Submitted, annotations, labels,
};
use crate::kubernetes::config::Deployment;
use crate::kubernetes::dispatch_target::settings::ClusterSettings;
use crate::kubernetes::manifest::{self, Manifest};
use crate::kubernetes::verdict::{Started, Verdict, VerdictKind};

/// How long the requests of one start may take: as long as a lease lasts without a word.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the Job of an earlier lease is removed before the task is handed back.
const ROUNDS: usize = 4;
/// How often the Job of a run is looked for that the watch does not speak of.
const LOOK: Duration = Duration::from_mins(1);

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
    /// Connects to the cluster.
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
        let cluster = cluster.with_report_key(report_key);
        let cluster = match watching.rate {
            Some(rate) => cluster.with_rate_limit(rate),
            None => cluster,
        };
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

    /// The objects of a task.
    fn manifest(&self, order: &Order) -> Result<Manifest, StartFailure> {
        let manifest = manifest::build(&order.job, &self.deployment)
            .map_err(|errors| StartFailure::Never("config_missing", errors.to_string()))?;
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
        // Ours last, so that they replace other values of these names.
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

    async fn begin(&self, order: &Order) -> Result<Box<dyn Executor>, StartFailure> {
        let manifest = self.manifest(order)?;
        let name = manifest.job.metadata.name.clone().unwrap_or_default();
        // Before the Job exists: the watch may be faster than the answer.
        let view = self.runs.begin(order.lease.lease);
        let submitted = tokio::time::timeout(START_TIMEOUT, self.submit(&manifest, &name, order));
        let failure = match submitted.await {
            Ok(Ok(())) => return Ok(Box::new(self.job(order.lease, name, view))),
            Ok(Err(failure)) => failure,
            // What the requests left in the cluster is adopted at the next lease, or removed as incomplete.
            Err(_) => again("the Kubernetes API takes too long"),
        };
        self.runs.end(order.lease.lease);
        Err(failure)
    }

    async fn submit(
        &self,
        manifest: &Manifest,
        name: &str,
        order: &Order,
    ) -> Result<(), StartFailure> {
        for _ in 0..ROUNDS {
            match self
                .cluster
                .accept(manifest)
                .await
                .map_err(|error| classify(&error))?
            {
                Submitted::Created => return Ok(()),
                Submitted::AlreadyThere => {}
            }
            // A Job of this lease is that of an interrupted start. That of an earlier lease has not accepted the task: the
            // hub would not have given it again.
            let removed = self.cluster.remove_unless_leased(name, &order.lease).await;
            if !removed.map_err(|error| classify(&error))? {
                return Ok(());
            }
            warn!(job = name, "removed the Job of an earlier lease");
        }
        Err(again("the Job of an earlier lease does not go away"))
    }

    fn job(&self, lease: LeaseRef, name: String, view: watch::Receiver<RunView>) -> JobOfLease {
        JobOfLease {
            cluster: self.cluster.clone(),
            runs: Arc::clone(&self.runs),
            lease,
            name,
            view,
        }
    }

    fn found(&self, run: RunKey) -> Option<Found> {
        let lease = run.lease?;
        Some(Found {
            lease,
            run: run.to_string(),
            executor: Box::new(self.job(lease, run.name, self.runs.begin(lease.lease))),
        })
    }
}

fn again(text: &str) -> StartFailure {
    StartFailure::Again(DeclineReason::Failed, text.to_owned())
}

/// What a request that failed means for the task.
fn classify(error: &ClusterError) -> StartFailure {
    let text = job_contract::chain(error);
    if error.is_quota() {
        StartFailure::Again(DeclineReason::Quota, text)
    } else if error.is_transient() || error.concerns_every_run() {
        StartFailure::Again(DeclineReason::Failed, text)
    } else {
        StartFailure::Never("admission_refused", text)
    }
}

impl Target for KubernetesTarget {
    fn name(&self) -> &'static str {
        "kubernetes"
    }

    fn installation(&self) -> &str {
        &self.installation
    }

    fn find(&self) -> BoxFuture<'_, Result<Vec<Found>, String>> {
        async {
            let runs = self.cluster.leased(self.agent.as_str()).await;
            let runs = runs.map_err(|error| job_contract::chain(&error))?;
            Ok(runs.into_iter().filter_map(|run| self.found(run)).collect())
        }
        .boxed()
    }

    fn start<'a>(
        &'a self,
        order: &'a Order,
    ) -> BoxFuture<'a, Result<Box<dyn Executor>, StartFailure>> {
        self.begin(order).boxed()
    }

    fn work(&self, found: mpsc::UnboundedSender<Found>) -> BoxFuture<'_, ()> {
        async move {
            let (sender, mut unknown) = mpsc::unbounded_channel();
            let observer = Arc::new(Observer::new(Arc::clone(&self.runs), sender));
            let watch = self.cluster.watch(self.settings.watch.clone(), observer);
            let adopt = async {
                while let Some(run) = unknown.recv().await {
                    if let Some(run) = self.found(run) {
                        // Without a receiver the agent has ended.
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
    view: watch::Receiver<RunView>,
}

impl JobOfLease {
    async fn follow(&mut self, held: &Held) -> RunEnd {
        let mut is_missing = false;
        loop {
            let view = self.view.borrow_and_update().clone();
            held.set_reason(view.reason);
            if let Some(verdict) = &view.end {
                return judge(verdict);
            }
            if view.is_forgotten {
                let text = "its Job was removed before it had its job data";
                return RunEnd::Again(DeclineReason::Failed, text.to_owned());
            }
            tokio::select! {
                changed = self.view.changed() => if changed.is_err() {
                    return RunEnd::Elsewhere;
                },
                // The watch may have missed all of its life.
                () = tokio::time::sleep(LOOK) => {
                    let is_gone = matches!(self.cluster.is_there(&self.name).await, Ok(false));
                    if is_gone && is_missing {
                        let text = "its Job is gone";
                        return RunEnd::Again(DeclineReason::Failed, text.to_owned());
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

    fn ended<'a>(&'a mut self, held: &'a Held) -> BoxFuture<'a, RunEnd> {
        self.follow(held).boxed()
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
                // Its end follows, or has come.
                Ok(()) | Err(ClusterError::NoSuchRun(_)) => Ok(()),
                Err(error) => Err(job_contract::chain(&error)),
            }
        }
        .boxed()
    }

    fn forget(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.runs.end(self.lease.lease);
        std::future::ready(()).boxed()
    }
}

/// What the end of a Job means for its task.
fn judge(verdict: &Verdict) -> RunEnd {
    let reported = verdict.executor_reported();
    let is_untouched = verdict.started == Started::No && !reported;
    let call = match verdict.kind {
        VerdictKind::Claimed => return RunEnd::Elsewhere,
        VerdictKind::Infrastructure if is_untouched => {
            return RunEnd::Again(DeclineReason::Failed, verdict.text());
        }
        VerdictKind::QuotaExceeded if is_untouched => {
            return RunEnd::Again(DeclineReason::Quota, verdict.text());
        }
        VerdictKind::Completed => LeaseCall::Complete,
        VerdictKind::Cancelled => LeaseCall::Cancelled,
        _ => LeaseCall::Fail,
    };
    RunEnd::Over(
        call,
        End {
            exit_code: Some(verdict.outcome.code().into()),
            final_log_sequence: None,
            diagnostic: verdict.text(),
            verdict: Some(verdict.kind.name().to_owned()),
            reported,
        },
    )
}

#[cfg(test)]
mod tests;
