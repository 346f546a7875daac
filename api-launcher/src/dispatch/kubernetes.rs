//! The Kubernetes target: a dispatch becomes one Job, and one replica watches what becomes of it. The cluster
//! alone remembers runs; nothing is kept here.

mod barrier;
mod observer;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex as SyncMutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::status::JobStatus;
use job_contract::{Document, JobData, chain, env};
use platform::StepRef;
use platform::heartbeat::{self, Beat};
use tokio::sync::Mutex;
use tokio::time::{self, timeout_at};
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

use self::barrier::{Barrier, Stand, Witness};
use self::observer::{Duty, Observer};
use super::reporter::PlatformReporter;
use super::{Accepted, Answered, Readiness, Refused, has_nothing_to_run};
use crate::cluster::lease::{LeaseSettings, LeaseState};
use crate::cluster::{Cluster, ClusterError, Submitted, labels};
use crate::config::Deployment;
use crate::manifest::{self, Manifest, ManifestErrors};
use crate::metrics::Metrics;
use crate::serve::config::Watching;
use crate::shutdown::Shutdown;

/// How long an answer about the cluster is good: the question is open to everybody, and must stay cheap.
const FRESH: Duration = Duration::from_secs(5);
/// Probes give up after a second or a few.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a dispatch may take. Terrakube hangs up after a minute, and would not learn that it may try again.
const ACCEPTANCE: Duration = Duration::from_secs(30);

/// How long whoever accepted a run beats for it. That is one beat, since it is over before the next would come, and good for
/// 45 seconds: another replica that watches has noticed by then, and the heartbeat of a short run is gone soon enough
/// after its end (contract 2.6).
const UNTIL_WATCHED: Duration = Duration::from_secs(heartbeat::INTERVAL.as_secs() - 2);
/// How long the platform is told of a step that has nothing to run. It is less than the watcher leaves to its launcher.
const COMPLETION: Duration = Duration::from_secs(15);
/// How long after a refusal its reason is tried to be told.
const REFUSAL: Duration = Duration::from_mins(2);
const REFUSAL_AGAIN: Duration = Duration::from_secs(5);

/// The target.
#[derive(Debug)]
pub(crate) struct KubernetesTarget {
    cluster: Cluster,
    deployment: Deployment,
    watching: Watching,
    /// The platform the launcher reports to, where one is configured.
    reporter: Option<PlatformReporter>,
    metrics: Metrics,
    shutdown: Shutdown,
    /// What was promised by an answer and is done after it.
    promised: TaskTracker,
    last: Mutex<Option<(Instant, Readiness)>>,
    barrier: Barrier,
    /// How it stands with the Lease, once that is known.
    lease: SyncMutex<Option<LeaseState>>,
    /// Whether the cluster has been seen to take Jobs from this launcher.
    takes_jobs: AtomicBool,
    /// How long a dispatch may take.
    acceptance: Duration,
}

impl KubernetesTarget {
    /// Without a reporter, verdicts are only logged.
    pub(crate) fn new(
        cluster: Cluster,
        deployment: Deployment,
        watching: Watching,
        reporter: Option<PlatformReporter>,
        metrics: Metrics,
        shutdown: Shutdown,
    ) -> Self {
        let cluster = cluster.with_max_in_flight(watching.max_in_flight);
        let cluster = match watching.rate {
            Some(rate) => cluster.with_rate_limit(rate),
            None => cluster,
        };
        let metrics = metrics.for_cluster();
        Self {
            cluster,
            deployment,
            watching,
            reporter,
            barrier: Barrier::new(barrier::PATIENCE, metrics.clone()),
            lease: SyncMutex::new(None),
            takes_jobs: AtomicBool::new(false),
            metrics,
            shutdown,
            promised: TaskTracker::new(),
            last: Mutex::new(None),
            acceptance: ACCEPTANCE,
        }
    }

    /// Watches the runs while this replica holds the Lease, and stops what the platform has cancelled.
    pub(super) async fn work(&self) {
        tokio::join!(self.relieve(), self.lead());
    }

    /// Whoever starts may follow one that died, and the Lease of the dead is not to be had at once: everybody who comes
    /// beats once for each run that is not over, so that none is given up for lost before somebody watches it.
    async fn relieve(&self) {
        let Some(reporter) = self
            .reporter
            .as_ref()
            .filter(|reporter| reporter.has_heartbeats())
        else {
            return;
        };
        let unfinished = tokio::select! {
            unfinished = self.cluster.unfinished() => unfinished,
            () = self.shutdown.draining.cancelled() => return,
        };
        match unfinished {
            // Their executors may be at work.
            Ok(runs) => runs.iter().for_each(|run| {
                self.keep_alive(reporter.beat_until_taken_over(&run.job_id, None));
            }),
            Err(error) => warn!(%error, "runs of launchers before this one were not looked for"),
        }
    }

    async fn lead(&self) {
        let namespace = self.watching.lease_namespace.as_ref();
        let namespace = namespace.unwrap_or(&self.deployment.namespace);
        let lease = LeaseSettings::new(namespace, &self.watching.lease_name, identity());
        // At the first word, so that the next watches while this one still accepts.
        let stop = self.shutdown.draining.cancelled();
        // A term may end because the API server is away. Nobody watches then, so that who did keeps its runs alive until it
        // begins anew, or another has.
        let duty = SyncMutex::new(None);
        let take_duty = |next: Option<Duty>| {
            *duty.lock().unwrap_or_else(PoisonError::into_inner) = next;
        };
        let work = || {
            let observer = Observer::new(self.reporter.clone(), self.metrics.clone())
                .recovering_from(self.cluster.clone());
            let observer = Arc::new(observer);
            take_duty(Some(observer.on_duty()));
            async move {
                let _watching = self.metrics.watch();
                tokio::join!(
                    self.cluster
                        .watch(self.watching.watch.clone(), Arc::clone(&observer) as _),
                    observer.stop_cancelled(&self.cluster),
                );
            }
        };
        let told = |standing| {
            if standing == LeaseState::StandsBy {
                take_duty(None);
            }
            *self.lease.lock().unwrap_or_else(PoisonError::into_inner) = Some(standing);
        };
        self.cluster.lead(&lease, stop, work, told).await;
    }

    /// Waits for what was promised by answers, of which there are no more.
    pub(super) async fn keep_promises(&self) {
        self.promised.close();
        self.promised.wait().await;
    }

    /// Makes the run's Job and lets it run. A second delivery meets the first in the cluster.
    ///
    /// The reporter hears of it afterwards: a record that says `queue` has a Job behind it, wherever a crash falls. One
    /// between the two is made up for by the delivery that follows, since this one was not answered.
    pub(super) async fn accept(
        &self,
        job: Document,
        answered: Answered,
    ) -> Result<Accepted, Refused> {
        let until = time::Instant::now() + self.acceptance;
        let manifest = manifest::build(&job, &self.deployment);
        let notes = manifest
            .as_ref()
            .map(|manifest| manifest.notes.clone())
            .unwrap_or_default();
        for note in &notes {
            info!(job_id = job.job_id, step_id = job.step_id, "{note}");
        }
        let reporter = self.reporter.as_ref();
        if reporter.is_some_and(|reporter| has_outcome(reporter, &job)) {
            info!(
                job_id = job.job_id,
                step_id = job.step_id,
                "a dispatch of a step that is over: nothing is run"
            );
            return Ok(Accepted::Duplicate);
        }
        let accepted = match manifest {
            Ok(manifest)
                if reporter.is_some_and(PlatformReporter::is_remote)
                    && has_nothing_to_run(&job)
                    && is_released_by_us(&manifest) =>
            {
                self.hold(manifest, until).await
            }
            manifest => {
                let accepted = self.submit(manifest, until).await;
                accepted.map(|accepted| (accepted, None))
            }
        };
        let accepted = match accepted {
            Err(Unmade::Unfit(reason)) => {
                let accepted = self.came_before(&job, reason, until).await;
                accepted.map(|accepted| (accepted, None))
            }
            accepted => accepted,
        };
        let Some(reporter) = reporter else {
            return Ok(accepted?.0);
        };
        match accepted {
            Ok((accepted, held)) => {
                reporter
                    .queue(&job)
                    .map_err(|error| Refused::Unavailable(chain(&error)))?;
                self.keep_alive(match accepted {
                    Accepted::Duplicate => reporter.beat_until_taken_over(&job.job_id, None),
                    Accepted::New => reporter.beat(&job.job_id),
                });
                match held {
                    Some(name) => self.complete(reporter, job.into_job(), name, answered),
                    None if accepted == Accepted::New && !notes.is_empty() => {
                        self.remark(reporter, &job, notes, answered);
                    }
                    None => {}
                }
                Ok(accepted)
            }
            Err(Unmade::Unfit(reason) | Unmade::Barred(reason)) => {
                self.refuse(reporter, job.into_job(), reason, answered)
                    .await
            }
            Err(Unmade::NotNow(reason)) => Err(Refused::Unavailable(reason)),
        }
    }

    /// Tells the run's log of settings that have no effect, once the platform lets anybody write there.
    fn remark(
        &self,
        reporter: &PlatformReporter,
        job: &JobData,
        notes: Vec<String>,
        answered: Answered,
    ) {
        let (reporter, step) = (reporter.clone(), StepRef::of(job));
        self.promised.spawn(async move {
            answered.wait().await;
            let told = async {
                for note in &notes {
                    while let Err(error) = reporter.note(&step, note).await {
                        debug!(error = chain(&error), "a note has to wait");
                        tokio::time::sleep(REFUSAL_AGAIN).await;
                    }
                }
            };
            if tokio::time::timeout(REFUSAL, told).await.is_err() {
                warn!(
                    job_id = step.job_id,
                    step_id = step.step_id,
                    "settings without effect could not be told in the run's log"
                );
            }
        });
    }

    /// Beats once. The watcher does the same as soon as it has seen the run; it may be another replica, or about to be
    /// one.
    fn keep_alive(&self, beat: Option<Beat>) {
        if let Some(beat) = beat {
            let stop = self.shutdown.graceful.clone();
            tokio::spawn(async move {
                tokio::select! {
                    () = tokio::time::sleep(UNTIL_WATCHED) => {}
                    () = stop.cancelled() => {}
                }
                drop(beat);
            });
        }
    }

    /// A run that cannot be is failed with the reason in its output. A platform on record is also told so by the
    /// answer; Terrakube would show nothing of that but its number, so that it is answered as if it were accepted.
    async fn refuse(
        &self,
        reporter: &PlatformReporter,
        job: JobData,
        reason: String,
        answered: Answered,
    ) -> Result<Accepted, Refused> {
        if reporter.is_remote() {
            let (reporter, beat) = (reporter.clone(), reporter.beat(&job.job_id));
            self.promised.spawn(async move {
                answered.wait().await;
                let told = tokio::time::timeout(REFUSAL, tell_refused(&reporter, &job, &reason));
                if told.await.is_err() {
                    warn!(
                        job_id = job.job_id,
                        step_id = job.step_id,
                        reason,
                        "the reason of a refusal did not reach the platform"
                    );
                }
                drop(beat);
            });
            return Ok(Accepted::New);
        }
        if let Err(error) = reporter.refuse(&job, &reason).await {
            warn!(
                error = chain(&error),
                job_id = job.job_id,
                step_id = job.step_id,
                "the reason of a refusal could not be put on record"
            );
        }
        Err(Refused::Invalid(reason))
    }

    async fn submit(&self, manifest: Built, until: time::Instant) -> Result<Accepted, Unmade> {
        let manifest = manifest.map_err(|errors| Unmade::Unfit(errors.to_string()))?;
        let cluster = self.cluster.clone();
        // Releasing is not waited for: the run is safe in the cluster by then, and the watcher releases what is left
        // over.
        self.made(
            until,
            async move { cluster.accept(&manifest).await }.boxed(),
        )
        .await
    }

    /// An earlier delivery may have been accepted, before a setting or the cluster's rules changed. Then this one is as well:
    /// any other answer would fail the job that runs (contract 2.5).
    async fn came_before(
        &self,
        job: &JobData,
        reason: String,
        until: time::Instant,
    ) -> Result<Accepted, Unmade> {
        let there = self.cluster.has_run(&job.job_id, &job.step_id).boxed();
        let error = match timeout_at(until, there).await {
            Ok(Ok(true)) => return Ok(Accepted::Duplicate),
            Ok(Ok(false)) => return Err(Unmade::Unfit(reason)),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the Kubernetes API takes too long".to_owned(),
        };
        Err(Unmade::NotNow(format!(
            "{reason}; and whether it was accepted before is not known: {error}"
        )))
    }

    /// The sender may hang up; what was begun is finished all the same, or given up when it takes too long. What that
    /// leaves in the cluster is found by the next delivery, and by the watcher.
    async fn made(
        &self,
        until: time::Instant,
        submission: BoxFuture<'static, Result<Submitted, ClusterError>>,
    ) -> Result<Accepted, Unmade> {
        let submitted = match tokio::spawn(timeout_at(until, submission)).await {
            Ok(Ok(Ok(submitted))) => submitted,
            Ok(Ok(Err(error))) => return Err(self.unmade(&error)),
            Ok(Err(_)) => {
                let reason = "the Kubernetes API takes too long";
                warn!(reason, "a dispatch did not become a Job");
                return Err(Unmade::NotNow(reason.to_owned()));
            }
            Err(_) => return Err(Unmade::NotNow("the launcher is stopping".to_owned())),
        };
        self.barrier.passed(Witness::Dispatch);
        Ok(match submitted {
            Submitted::Created => Accepted::New,
            Submitted::AlreadyThere => Accepted::Duplicate,
        })
    }

    /// What stands in the way of every run is worth a retry, for a while; what stands in the way of this one is not.
    fn unmade(&self, error: &ClusterError) -> Unmade {
        warn!(error = chain(error), "a dispatch did not become a Job");
        if error.is_transient() {
            return Unmade::NotNow(error.to_string());
        }
        if !error.concerns_every_run() {
            return Unmade::Unfit(error.to_string());
        }
        match self.barrier.met(Witness::Dispatch, &error.to_string()) {
            Stand::Fails(reason) => Unmade::Barred(format!(
                "{reason}. No run can start until that is mended: `api-launcher check` tells what is missing"
            )),
            Stand::PutsOff(reason) => Unmade::NotNow(reason),
            Stand::Open => Unmade::NotNow(error.to_string()),
        }
    }

    /// Keeps a step in the cluster that has nothing to run, without a pod: only in case it cannot be completed.
    async fn hold(
        &self,
        manifest: Manifest,
        until: time::Instant,
    ) -> Result<(Accepted, Option<String>), Unmade> {
        let name = manifest.job.metadata.name.clone();
        let cluster = self.cluster.clone();
        let held = self.made(until, async move { cluster.hold(&manifest).await }.boxed());
        Ok((held.await?, name))
    }

    /// Reports a step that has nothing to run, once the answer has left. Should that fail, a pod does it.
    fn complete(
        &self,
        reporter: &PlatformReporter,
        job: JobData,
        name: String,
        answered: Answered,
    ) {
        let (reporter, cluster) = (reporter.clone(), self.cluster.clone());
        self.promised.spawn(async move {
            answered.wait().await;
            let completed = tokio::time::timeout(COMPLETION, reporter.complete(&job)).await;
            let done = match completed {
                Ok(Ok(())) => {
                    info!(
                        job_id = job.job_id,
                        step_id = job.step_id,
                        "completed a step with nothing to run"
                    );
                    cluster.dismiss(&name).await
                }
                failed => {
                    let error = match &failed {
                        Ok(Err(error)) => chain(error),
                        _ => "the platform takes too long".to_owned(),
                    };
                    warn!(
                        job_id = job.job_id,
                        step_id = job.step_id,
                        error,
                        "a step with nothing to run could not be completed, a pod does it"
                    );
                    cluster.release(&name).await
                }
            };
            if let Err(error) = done {
                warn!(%error, run = name, "the watcher has to see to a run with nothing to do");
            }
        });
    }

    /// Whether the cluster answers, and lets this launcher look at runs.
    pub(super) async fn readiness(&self) -> Readiness {
        // One question at a time: who comes meanwhile gets its answer.
        let mut last = self.last.lock().await;
        if let Some((at, readiness)) = &*last
            && at.elapsed() < FRESH
        {
            return readiness.clone();
        }
        let readiness = match tokio::time::timeout(PATIENCE, self.probe()).await {
            Ok(Ok(())) => {
                self.barrier.passed(Witness::Probe);
                self.readiness_behind_the_barrier()
            }
            Ok(Err(error)) if error.concerns_every_run() => {
                self.barrier.met(Witness::Probe, &error.to_string());
                self.readiness_behind_the_barrier()
            }
            Ok(Err(error)) => Readiness::NotReady(error.to_string()),
            Err(_) => Readiness::NotReady("the Kubernetes API does not answer".to_owned()),
        };
        *last = Some((Instant::now(), readiness.clone()));
        readiness
    }

    fn readiness_behind_the_barrier(&self) -> Readiness {
        match self.barrier.stand() {
            Stand::Open => self.readiness_with_the_lease(),
            Stand::PutsOff(reason) => Readiness::NotReady(reason),
            Stand::Fails(reason) => Readiness::Impaired(reason),
        }
    }

    /// A replica that stands by is as ready as the holder. One that could not take over is not: nobody may be watching.
    fn readiness_with_the_lease(&self) -> Readiness {
        let lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        match &*lease {
            None | Some(LeaseState::Holder | LeaseState::StandsBy) => Readiness::Ready,
            Some(LeaseState::NotAllowed) => Readiness::Impaired(format!(
                "no right to hold the Lease `{}`: this replica watches the runs without one, which only a single replica \
                 may do. Grant it what `rbac/launcher.yaml` does",
                self.watching.lease_name
            )),
            Some(LeaseState::OutOfReach(cause)) => Readiness::NotReady(format!(
                "the Lease `{}` cannot be had, so that nobody may be watching the runs: {cause}",
                self.watching.lease_name
            )),
        }
    }

    /// Looks at runs, and once whether there can be any: admission hears of that, and is not asked all the time.
    async fn probe(&self) -> Result<(), ClusterError> {
        self.cluster.check_access().await?;
        if !self.takes_jobs.load(Ordering::Relaxed) {
            self.cluster.check_creation().await?;
            self.takes_jobs.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Why a dispatch did not become a Job.
#[derive(Debug)]
enum Unmade {
    /// It may, later.
    NotNow(String),
    /// Nothing becomes a Job, and has not for a while.
    Barred(String),
    /// It never will.
    Unfit(String),
}

impl From<Unmade> for Refused {
    fn from(unmade: Unmade) -> Self {
        match unmade {
            Unmade::NotNow(reason) => Self::Unavailable(reason),
            Unmade::Barred(reason) | Unmade::Unfit(reason) => Self::Invalid(reason),
        }
    }
}

/// What came of building the objects of a run.
type Built = Result<Manifest, ManifestErrors>;

/// What a queue of the cluster releases is not held by the launcher.
fn is_released_by_us(manifest: &Manifest) -> bool {
    !manifest
        .job
        .metadata
        .labels
        .as_ref()
        .is_some_and(|names| names.contains_key(labels::KUEUE_QUEUE))
}

async fn tell_refused(reporter: &PlatformReporter, job: &JobData, reason: &str) {
    while let Err(error) = reporter.refuse(job, reason).await {
        let is_final = error.is_final();
        warn!(
            error = chain(&error),
            job_id = job.job_id,
            step_id = job.step_id,
            reason,
            again = !is_final,
            "the reason of a refusal could not be told"
        );
        if is_final {
            return;
        }
        tokio::time::sleep(REFUSAL_AGAIN).await;
    }
}

/// Whether the records of this machine know how the step ended: a delivery that was late, of a run whose Job is gone by
/// now. What is dispatched because its job was rejected belongs to a step that is over, and is run all the same.
fn has_outcome(reporter: &PlatformReporter, job: &JobData) -> bool {
    match reporter.on_record(&StepRef::of(job)) {
        Ok(stand) => {
            stand.is_some_and(|stand| stand.is_settled() && stand.job != JobStatus::Rejected)
        }
        Err(error) => {
            // The claim keeps a step from being done twice.
            warn!(
                error = chain(&error),
                job_id = job.job_id,
                step_id = job.step_id,
                "the platform could not be asked whether the step is over"
            );
            false
        }
    }
}

/// Who holds the Lease: the pod, or the host and process where there is none.
fn identity() -> String {
    std::env::var(env::POD_NAME).unwrap_or_else(|_| {
        let host = nix::unistd::gethostname()
            .ok()
            .and_then(|name| name.into_string().ok());
        format!(
            "{}-{}",
            host.as_deref().unwrap_or("launcher"),
            std::process::id()
        )
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex as Record};

    use artifact_store::Store;
    use axum::http::{Method, Request, Response, StatusCode};
    use job_contract::keys::ObjectKey;
    use job_contract::status::StepStatus;
    use kube::Client;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tower::service_fn;

    use super::*;
    use crate::cluster::RetryPolicy;
    use crate::dispatch::answer as answer_to;
    use crate::manifest::executor_kind::{ExecutorKind, ExecutorKindSetting};

    type Asked = Arc<Record<Vec<String>>>;

    /// An API server that stores what it is given, or answers every request with one refusal.
    fn target(refusal: Option<(u16, &'static str)>) -> (KubernetesTarget, Asked) {
        let asked = Asked::default();
        let record = Arc::clone(&asked);
        let service = service_fn(move |request: Request<Body>| {
            let record = Arc::clone(&record);
            async move {
                let (head, body) = request.into_parts();
                let kind = head.uri.path().rsplit('/').next().unwrap().to_owned();
                let line = format!("{} {kind}", head.method);
                let is_there = record.lock().unwrap().contains(&"POST jobs".to_owned());
                record.lock().unwrap().push(line.clone());
                let body = axum::body::to_bytes(axum::body::Body::new(body), usize::MAX);
                let body = body.await.unwrap();
                if line == "GET job-412-step" && refusal.is_none_or(|(code, _)| code < 500) {
                    let is_there = is_there && refusal.is_none();
                    return Ok(if is_there {
                        reply(200, &known())
                    } else {
                        absent()
                    });
                }
                Ok::<_, Infallible>(answer(refusal, &head.method, &body))
            }
        });
        let retry_policy = RetryPolicy {
            attempts: 2,
            first_pause: Duration::from_millis(1),
            longest_pause: Duration::from_millis(1),
            answer: Duration::from_secs(10),
        };
        let cluster = Cluster::from_client(Client::new(service, "runs"), "runs")
            .with_retry_policy(retry_policy);
        (target_of(cluster), asked)
    }

    fn target_of(cluster: Cluster) -> KubernetesTarget {
        KubernetesTarget::new(
            cluster,
            Deployment::default(),
            Watching::default(),
            None,
            Metrics::default(),
            Shutdown::default(),
        )
    }

    /// An API server that takes requests and never says anything, or never ends what it says.
    fn hanging(speaks: bool, answer: Duration) -> KubernetesTarget {
        let service = service_fn(move |_: Request<Body>| async move {
            if !speaks {
                std::future::pending::<()>().await;
            }
            let silence = futures_util::stream::pending::<Result<String, Infallible>>();
            Ok::<_, Infallible>(Response::new(axum::body::Body::from_stream(silence)))
        });
        let retry_policy = RetryPolicy {
            attempts: 2,
            first_pause: Duration::from_millis(1),
            longest_pause: Duration::from_millis(1),
            answer,
        };
        target_of(
            Cluster::from_client(Client::new(service, "runs"), "runs")
                .with_retry_policy(retry_policy),
        )
    }

    #[tokio::test]
    async fn what_has_no_effect_is_told_in_the_runs_log() {
        let folder = tempfile::tempdir().unwrap();
        let (mut target, _) = target(None);
        target.reporter = Some(PlatformReporter::local(folder.path()));
        target.deployment.executor_kind = ExecutorKindSetting::Always(ExecutorKind::Stock);
        let mut job = job();
        job.environment_variables.insert(
            env::EPHEMERAL_ENV.to_owned(),
            "LOCALDOMAIN=elsewhere.example;TF_LOG=info".to_owned(),
        );
        let key = ObjectKey::step_output(&job.organization_id, &job.job_id, &job.step_id);
        assert_eq!(accept(&target, job).await, Ok(Accepted::New));
        target.promised.close();
        target.promised.wait().await;
        let store = Store::local(folder.path());
        let output = folder.path().join("output");
        store.fetch(&store.reference(&key), &output).await.unwrap();
        let output = std::fs::read_to_string(output).unwrap();
        assert!(
            output.contains("`LOCALDOMAIN`, which has no effect"),
            "{output}"
        );
        assert!(
            !output.contains("elsewhere") && !output.contains("TF_LOG"),
            "{output}"
        );
    }

    const SOON: Duration = Duration::from_millis(50);
    const NEVER: Duration = Duration::from_hours(1);

    #[tokio::test]
    async fn a_cluster_that_hangs_is_for_later() {
        for (speaks, answer, acceptance) in [
            (false, SOON, NEVER),
            (true, SOON, NEVER),
            (false, NEVER, SOON),
        ] {
            let mut target = hanging(speaks, answer);
            target.acceptance = acceptance;
            let accepted = tokio::time::timeout(Duration::from_secs(10), accept(&target, job()));
            let refused = accepted.await.expect("it is answered").unwrap_err();
            assert!(matches!(refused, Refused::Unavailable(_)), "{refused:?}");
        }
        assert!(ACCEPTANCE < Duration::from_mins(1));
    }

    fn answer(
        refusal: Option<(u16, &'static str)>,
        method: &Method,
        body: &[u8],
    ) -> Response<Body> {
        let (code, value) = match (refusal, method) {
            (Some((code, message)), _) => (
                code,
                json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                       "reason": "Refused", "message": message}),
            ),
            (None, &Method::POST) => {
                let mut object: Value = serde_json::from_slice(body).unwrap();
                object["metadata"]["uid"] = "u-1".into();
                (201, object)
            }
            (None, &Method::GET) => return absent(),
            (None, _) => (200, known()),
        };
        reply(code, &value)
    }

    fn absent() -> Response<Body> {
        let value = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                           "reason": "NotFound", "message": "not found"});
        reply(404, &value)
    }

    fn known() -> Value {
        json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job-412-step",
               "labels": {labels::JOB_ID: "412", labels::STEP_ID: "step"}}})
    }

    fn reply(code: u16, value: &Value) -> Response<Body> {
        let mut response = Response::new(Body::from(value.to_string().into_bytes()));
        *response.status_mut() = StatusCode::from_u16(code).unwrap();
        response
    }

    async fn accept(target: &KubernetesTarget, job: JobData) -> Result<Accepted, Refused> {
        let (answering, answered) = answer_to();
        let accepted = target.accept(Document::written(&job), answered).await;
        drop(answering);
        accepted
    }

    /// A record of a job that waits, as the platform makes it before it dispatches.
    fn on_record(data: &std::path::Path) -> PlatformReporter {
        let reporter = PlatformReporter::local(data);
        reporter.queue(&job()).unwrap();
        reporter
    }

    fn with_desk(
        refusal: Option<(u16, &'static str)>,
        reporter: &PlatformReporter,
    ) -> KubernetesTarget {
        let (mut target, _) = target(refusal);
        target.reporter = Some(reporter.clone());
        target
    }

    #[tokio::test]
    async fn a_refused_run_does_not_wait_on_record_and_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let reporter = on_record(folder.path());
        let target = with_desk(None, &reporter);
        assert!(matches!(
            accept(&target, wrong_job()).await,
            Err(Refused::Invalid(_))
        ));
        let stand = reporter.stand(&StepRef::of(&job())).await.unwrap();
        assert_eq!(
            (stand.job, stand.step),
            (JobStatus::Failed, StepStatus::Failed)
        );
        let record = reporter.record("412").unwrap();
        let output = record.step("step").unwrap().output.clone().unwrap();
        let output = std::fs::read_to_string(output).unwrap();
        assert!(output.contains("EPHEMERAL_CPU_REQUEST"), "{output}");
    }

    #[tokio::test]
    async fn what_cannot_be_accepted_yet_leaves_no_record() {
        let folder = tempfile::tempdir().unwrap();
        let reporter = PlatformReporter::local(folder.path());
        let target = with_desk(Some((503, "overloaded")), &reporter);
        assert!(matches!(
            accept(&target, job()).await,
            Err(Refused::Unavailable(_))
        ));
        assert_eq!(reporter.record("412"), None);
        // Nobody waits for a job the platform has never put on record.
        let target = with_desk(Some((422, "spec is invalid")), &reporter);
        assert!(matches!(
            accept(&target, job()).await,
            Err(Refused::Invalid(_))
        ));
        assert_eq!(reporter.record("412"), None);
    }

    #[tokio::test]
    async fn a_step_that_is_over_gets_no_second_job_unless_its_job_was_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let reporter = on_record(folder.path());
        let step = StepRef::of(&job());
        let put = |status: JobStatus| {
            let change = |record: &mut platform::local::JobRecord| {
                record.status = status;
                record.steps[0].status = StepStatus::Completed;
            };
            reporter.edit(&step, change);
        };
        put(JobStatus::Completed);
        let (mut target, asked) = target(None);
        target.reporter = Some(reporter.clone());
        assert_eq!(accept(&target, job()).await, Ok(Accepted::Duplicate));
        assert!(asked.lock().unwrap().is_empty(), "no Job is made");
        put(JobStatus::Rejected);
        assert_eq!(accept(&target, job()).await, Ok(Accepted::New));
    }

    #[tokio::test]
    async fn an_accepted_run_is_on_record_as_queued() {
        let folder = tempfile::tempdir().unwrap();
        let reporter = PlatformReporter::local(folder.path());
        let target = with_desk(None, &reporter);
        assert_eq!(accept(&target, job()).await, Ok(Accepted::New));
        let stand = reporter.stand(&StepRef::of(&job())).await.unwrap();
        assert_eq!(
            (stand.job, stand.step),
            (JobStatus::Queue, StepStatus::Pending)
        );
    }

    fn job() -> JobData {
        serde_json::from_value(json!({
            "type": "terraformPlan",
            "organizationId": "org",
            "workspaceId": "ws",
            "jobId": "412",
            "stepId": "step",
        }))
        .unwrap()
    }

    /// One with a setting that breaks a rule.
    fn wrong_job() -> JobData {
        let wrong = ("EPHEMERAL_CPU_REQUEST".to_owned(), "a lot".to_owned());
        JobData {
            environment_variables: [wrong].into(),
            ..job()
        }
    }

    #[tokio::test]
    async fn a_dispatch_becomes_a_job_with_its_secret_that_is_released() {
        let (target, asked) = target(None);
        assert_eq!(accept(&target, job()).await, Ok(Accepted::New));
        assert_eq!(
            *asked.lock().unwrap(),
            ["POST jobs", "POST secrets", "PATCH job-412-step"]
        );
    }

    #[tokio::test]
    async fn what_concerns_every_run_is_for_later_and_what_concerns_one_is_not() {
        let forbidden = "jobs.batch is forbidden: User \"x\" cannot create resource \"jobs\"";
        for (code, message, later) in [
            (503, "overloaded", true),
            (401, "Unauthorized", true),
            (403, forbidden, true),
            (403, "admission webhook \"p\" denied the request", false),
            (422, "spec is invalid", false),
        ] {
            let (target, _) = target(Some((code, message)));
            let refused = accept(&target, job()).await.unwrap_err();
            assert_eq!(
                matches!(refused, Refused::Unavailable(_)),
                later,
                "{code} {message}: {refused:?}"
            );
        }
    }

    #[tokio::test]
    async fn a_right_that_stays_missing_fails_the_run_with_the_reason() {
        let forbidden = "jobs.batch is forbidden: User \"x\" cannot create resource \"jobs\"";
        let folder = tempfile::tempdir().unwrap();
        let reporter = on_record(folder.path());
        let mut target = with_desk(Some((403, forbidden)), &reporter);
        assert!(matches!(
            accept(&target, job()).await,
            Err(Refused::Unavailable(_))
        ));
        let barrier = || Barrier::new(Duration::ZERO, Metrics::default());
        target.barrier = barrier();
        let refused = accept(&target, job()).await.unwrap_err();
        assert!(matches!(refused, Refused::Invalid(_)), "{refused:?}");
        let stand = reporter.stand(&StepRef::of(&job())).await.unwrap();
        assert_eq!(stand.job, JobStatus::Failed);
        let record = reporter.record("412").unwrap();
        let output = record.step("step").unwrap().output.clone().unwrap();
        let output = std::fs::read_to_string(output).unwrap();
        assert!(output.contains("cannot create resource"), "{output}");
        assert!(output.contains("`api-launcher check`"), "{output}");
        // Whoever looks at it is told, and dispatches still come.
        let barred = target.readiness().await;
        assert!(
            matches!(&barred, Readiness::Impaired(why) if why.contains("cannot")),
            "{barred:?}"
        );
        // Where a Job can be made again, nothing is in the way.
        let (mut mended, _) = super::tests::target(None);
        mended.barrier = barrier();
        mended.barrier.met(Witness::Dispatch, forbidden);
        assert_eq!(accept(&mended, job()).await, Ok(Accepted::New));
        assert_eq!(mended.readiness().await, Readiness::Ready);
    }

    #[tokio::test]
    async fn a_setting_that_breaks_a_rule_is_named_and_no_job_is_made() {
        let (target, asked) = target(None);
        let refused = accept(&target, wrong_job()).await.unwrap_err();
        assert!(matches!(refused, Refused::Invalid(_)), "{refused:?}");
        assert!(refused.to_string().contains("EPHEMERAL_CPU_REQUEST"));
        assert_eq!(*asked.lock().unwrap(), ["GET job-412-step"]);
    }

    #[tokio::test]
    async fn a_run_that_came_before_is_accepted_though_a_setting_breaks_a_rule_now() {
        let folder = tempfile::tempdir().unwrap();
        for reporter in [None, Some(PlatformReporter::local(folder.path()))] {
            let (mut target, _) = target(None);
            target.reporter = reporter;
            assert_eq!(accept(&target, job()).await, Ok(Accepted::New));
            let again = accept(&target, wrong_job()).await;
            assert_eq!(again, Ok(Accepted::Duplicate));
        }
        let record = PlatformReporter::local(folder.path())
            .record("412")
            .unwrap();
        assert_eq!(record.status, JobStatus::Queue);
        // Where that cannot be told, it may come again.
        let (away, _) = target(Some((503, "overloaded")));
        let refused = accept(&away, wrong_job()).await.unwrap_err();
        assert!(matches!(refused, Refused::Unavailable(_)), "{refused:?}");
    }

    #[tokio::test]
    async fn readiness_asks_the_cluster_once_in_a_while() {
        let (ready, asked) = target(None);
        for _ in 0..5 {
            assert_eq!(ready.readiness().await, Readiness::Ready);
        }
        assert_eq!(
            *asked.lock().unwrap(),
            ["GET mayfly-readiness", "POST jobs"]
        );
        *ready.last.lock().await = None;
        ready.readiness().await;
        let last = asked.lock().unwrap().last().cloned();
        assert_eq!(last.as_deref(), Some("GET mayfly-readiness"));
        let (away, _) = target(Some((403, "forbidden")));
        assert!(matches!(away.readiness().await, Readiness::NotReady(_)));
    }

    #[tokio::test]
    async fn a_replica_that_stands_by_is_ready_and_one_that_could_not_take_over_is_not() {
        let (target, _) = target(None);
        let readiness = async |standing| {
            *target.lease.lock().unwrap() = Some(standing);
            *target.last.lock().await = None;
            target.readiness().await
        };
        assert_eq!(readiness(LeaseState::StandsBy).await, Readiness::Ready);
        assert_eq!(readiness(LeaseState::Holder).await, Readiness::Ready);
        // Under the Role of Terrakube's documentation a single launcher does its work.
        let alone = readiness(LeaseState::NotAllowed).await;
        assert!(
            matches!(&alone, Readiness::Impaired(why) if why.contains("rbac/launcher.yaml")),
            "{alone:?}"
        );
        let away = readiness(LeaseState::OutOfReach("no such namespace".into())).await;
        assert!(
            matches!(&away, Readiness::NotReady(why) if why.ends_with("no such namespace")),
            "{away:?}"
        );
    }
}
