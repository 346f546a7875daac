//! What the watcher sees, told to the platform: that a run's job is alive, why a run waits, in the run's own log, and how
//! a run ended whose executor could not say it. In return the platform is asked which runs are cancelled.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};
use job_contract::chain;
use job_contract::status::JobStatus;
use platform::StepRef;
use platform::heartbeat::Beat;
use tempfile::TempDir;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, info, warn};

use crate::cluster::watch::{Heartbeat, ReportOutcome, RunCounts, RunObserver};
use crate::cluster::{Cluster, RunKey, SaveError};
use crate::dispatch::reporter::{PlatformReporter, ReportError};
use crate::metrics::Metrics;
use crate::verdict::{Observation, Verdict, VerdictKind};

/// How often the platform is asked whether a run was cancelled (contract 11.4), and how long after it was first seen a
/// run is asked for at all: the request that brought it may still be open.
const CANCEL_POLL: Duration = Duration::from_secs(5);
/// How long a dispatch takes at most to be answered once its Job is there.
const ANSWER: Duration = Duration::from_secs(2);
/// How many runs are asked for at a time.
const AT_ONCE: usize = 16;
/// So many logs are recovered at a time.
const RECOVERIES: usize = 2;
/// How long the container of an executor has to run before its own heartbeat counts alone. A stock one shows the first
/// sign of life 15 s after its Java has come up; what the launcher wrote last counts for another 45 s.
const TAKE_OVER: Duration = Duration::from_mins(1);
/// What a started executor has to notice a cancellation by itself, which it asks for as often, and to wind up.
const HEAD_START: Duration = Duration::from_secs(30);

/// Speaks for runs at the platform's reporter; without one, only in the launcher's own log.
#[derive(Debug)]
pub(super) struct Observer {
    reporter: Option<PlatformReporter>,
    /// Has what runs printed.
    cluster: Option<Cluster>,
    metrics: Metrics,
    head_start: Duration,
    /// What containers printed is kept on disk until it is part of an output, and any of it may be large.
    recoveries: Semaphore,
    /// Runs that are not over, or whose end the platform does not know yet.
    live: Mutex<BTreeMap<RunKey, Live>>,
    /// Runs of which nothing is known yet but that their Jobs are held, with their heartbeats.
    held: Mutex<BTreeMap<RunKey, Option<Beat>>>,
    /// Another watches by now: what is still under way is brought to its end, but keeps nothing alive.
    relieved: AtomicBool,
}

/// For as long as this lives, its observer is the one to keep runs alive.
#[derive(Debug)]
pub(super) struct Duty(Arc<Observer>);

impl Drop for Duty {
    fn drop(&mut self) {
        self.0.relieved.store(true, Ordering::SeqCst);
        // Whoever adds a run holds the lock, and has seen this or is seen here.
        self.0.live().clear();
        self.0.held().clear();
    }
}

/// A run the platform waits for.
struct Live {
    since: Instant,
    /// Until its executor beats, and again from its end until the platform knows how it ended: otherwise it would say that
    /// the run was lost, and not why. When that takes too long, the platform has to be free to say so.
    beat: Option<Beat>,
    /// Writes one reason after the other.
    notes: Option<Notes>,
    /// The platform's job was over the last time somebody looked, and not by being cancelled: its executor may have
    /// said so itself and be about to end.
    over_before: bool,
    /// The run is being stopped, or has ended.
    leaving: bool,
    /// When it ended; it is counted, and only its report is missing.
    ended: Option<Instant>,
}

/// The reasons a run waits for, on their way into its log; what has not been written when this is dropped is not.
struct Notes {
    sender: UnboundedSender<String>,
    _writer: AbortOnDropHandle<()>,
}

impl fmt::Debug for Live {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Live")
            .field("since", &self.since)
            .field("leaving", &self.leaving)
            .finish_non_exhaustive()
    }
}

impl Observer {
    pub(super) const fn new(reporter: Option<PlatformReporter>, metrics: Metrics) -> Self {
        Self {
            reporter,
            cluster: None,
            metrics,
            head_start: HEAD_START,
            recoveries: Semaphore::const_new(RECOVERIES),
            live: Mutex::new(BTreeMap::new()),
            held: Mutex::new(BTreeMap::new()),
            relieved: AtomicBool::new(false),
        }
    }

    /// Watches from now on, until the result is dropped. That is once: whoever watches again begins with nothing.
    pub(super) fn on_duty(self: &Arc<Self>) -> Duty {
        Duty(Arc::clone(self))
    }

    fn beat(&self, run: &RunKey) -> Option<Beat> {
        let reporter = self.reporter.as_ref()?;
        (!self.relieved.load(Ordering::SeqCst))
            .then(|| reporter.beat(&run.job_id))
            .flatten()
    }

    /// The logs of runs that could not deliver theirs are recovered from there.
    #[must_use]
    pub(super) fn recovering_from(mut self, cluster: Cluster) -> Self {
        self.cluster = Some(cluster);
        self
    }

    /// Ends runs whose jobs the platform has ended. Runs until it is dropped.
    pub(super) async fn stop_cancelled(&self, cluster: &Cluster) {
        let Some(reporter) = &self.reporter else {
            return;
        };
        let mut turns = tokio::time::interval(CANCEL_POLL);
        turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut stops = JoinSet::new();
        loop {
            tokio::select! {
                _ = turns.tick() => {
                    self.let_go(reporter);
                    for run in self.cancelled(reporter).await {
                        let (cluster, head_start) = (cluster.clone(), self.head_start);
                        stops.spawn(async move {
                            let stopped = cluster.cancel(&run.name, head_start).await;
                            (run, stopped)
                        });
                    }
                }
                Some(Ok((run, stopped))) = stops.join_next() => match stopped {
                    Ok(done) => info!(%run, ?done, "its job is over at the platform"),
                    Err(error) => {
                        warn!(%run, %error, "a cancelled run could not be stopped, trying again");
                        if let Some(live) = self.live().get_mut(&run) {
                            live.leaving = false;
                        }
                    }
                }
            }
        }
    }

    /// Runs that are to be stopped now.
    async fn cancelled(&self, reporter: &PlatformReporter) -> Vec<RunKey> {
        let asked: Vec<RunKey> = self
            .live()
            .iter()
            .filter(|(_, live)| !live.leaving && live.since.elapsed() >= CANCEL_POLL)
            .map(|(run, _)| run.clone())
            .collect();
        let statuses: Vec<_> = futures_util::stream::iter(asked)
            .map(|run| async move {
                let status = status_of(reporter, &run).await;
                (run, status)
            })
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        let mut live = self.live();
        statuses
            .into_iter()
            .filter_map(|(run, status)| {
                let entry = live.get_mut(&run)?;
                entry.leaving = match status {
                    Some(JobStatus::Cancelled) => true,
                    Some(JobStatus::Failed) => std::mem::replace(&mut entry.over_before, true),
                    _ => false,
                };
                entry.leaving.then_some(run)
            })
            .collect()
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<RunKey, Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<RunKey, Option<Beat>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A run that is not over, or not reported, is kept track of, and with a beat kept alive by that from now on.
    fn seen(&self, run: &RunKey, beat: Option<Beat>) {
        let mut live = self.live();
        let entry = live.entry(run.clone()).or_insert_with(|| Live {
            since: Instant::now(),
            beat: None,
            notes: None,
            over_before: false,
            leaving: false,
            ended: None,
        });
        if beat.is_some() {
            entry.beat = beat;
        }
    }

    /// Its report begins: nobody else keeps its job alive any more.
    fn has_ended(&self, run: &RunKey) {
        self.seen(run, None);
        let beat = self.beat(run);
        let mut live = self.live();
        let Some(entry) = live.get_mut(run) else {
            return;
        };
        entry.leaving = true;
        if entry.ended.is_none() {
            entry.ended = Some(Instant::now());
            entry.beat = beat;
        }
    }

    /// Stops keeping the jobs of runs alive whose end the platform has not taken in all the time there is for that.
    fn let_go(&self, reporter: &PlatformReporter) {
        let patience = reporter.report_patience();
        for (run, entry) in self.live().iter_mut() {
            let lasted = entry.ended.is_some_and(|ended| ended.elapsed() >= patience);
            if lasted && entry.beat.take().is_some() {
                warn!(%run, "the platform does not take its end: its job is not kept alive any longer");
            }
        }
    }

    fn note(&self, run: &RunKey, sentence: &str) {
        let Some(reporter) = &self.reporter else {
            return;
        };
        let mut live = self.live();
        let Some(entry) = live.get_mut(run) else {
            return;
        };
        let notes = entry.notes.get_or_insert_with(|| {
            let (notes, receiver) = mpsc::unbounded_channel();
            let writer = tokio::spawn(write_notes(reporter.clone(), run.clone(), receiver));
            Notes {
                sender: notes,
                _writer: AbortOnDropHandle::new(writer),
            }
        });
        let _ = notes.sender.send(sentence.to_owned());
    }

    /// Reports for its executor how the step ended, unless the platform knows an outcome.
    async fn settle(&self, run: &RunKey, verdict: &Verdict) -> Result<(), ReportError> {
        let Some(reporter) = &self.reporter else {
            return Ok(());
        };
        let Some(step) = reporter.known(step_of(run))? else {
            return Ok(());
        };
        let (_turn, saved) = match self.recoverable(verdict) {
            Some(cluster) => {
                // For a platform that hears nothing, no log is fetched.
                reporter.stand(&step).await?;
                let turn = self.recoveries.acquire().await;
                (Some(turn), self.save_log(run, verdict, cluster).await?)
            }
            None => (None, None),
        };
        let log = saved.as_ref().map(SavedLog::path);
        match verdict.unreported_success() {
            Some(report) => {
                reporter
                    .vouch(&step, report, &verdict.sentence, log.as_deref())
                    .await
            }
            None => reporter.settle(&step, &told(verdict), log.as_deref()).await,
        }
    }

    /// Who has what the container of the run printed, where the run's log may lack it.
    fn recoverable(&self, verdict: &Verdict) -> Option<&Cluster> {
        // A node that does not answer has nothing to give, and would be asked for as long as the platform waits.
        let is_there = verdict.job_over || verdict.kind != VerdictKind::NodeLost;
        self.cluster
            .as_ref()
            .filter(|_| verdict.lacks_log() && is_there)
    }

    /// What the container of the run printed. An error is worth another attempt.
    async fn save_log(
        &self,
        run: &RunKey,
        verdict: &Verdict,
        cluster: &Cluster,
    ) -> Result<Option<SavedLog>, ReportError> {
        let fetched = async {
            let saved = SavedLog(tempfile::tempdir()?);
            let size = cluster.save_log(&run.name, &saved.path()).await?;
            Ok::<_, SaveError>((size > 0).then_some(saved))
        };
        match fetched.await {
            Ok(saved) => Ok(saved),
            // Its pod is gone, or may not be looked at.
            Err(error) if error.is_final() => {
                debug!(%run, error = chain(&error), "the log of the container is not to be had");
                Ok(None)
            }
            Err(error) if self.waits_for_log(run, verdict) => Err(ReportError::Container(error)),
            Err(error) => {
                warn!(%run, error = chain(&error), "the log of the container is lost");
                Ok(None)
            }
        }
    }

    /// Whether there is time to ask again for what the container of a run printed. A node that is lost does not answer.
    fn waits_for_log(&self, run: &RunKey, verdict: &Verdict) -> bool {
        let Some(reporter) = &self.reporter else {
            return false;
        };
        let ended = self.live().get(run).and_then(|live| live.ended);
        verdict.kind != VerdictKind::NodeLost
            && ended.is_some_and(|ended| ended.elapsed() < reporter.log_patience())
    }

    /// Adds to a run that was reported what its executor could not know, or not deliver.
    async fn add_more(&self, run: &RunKey, verdict: &Verdict) -> Result<(), ReportError> {
        let Some(reporter) = &self.reporter else {
            return Ok(());
        };
        let Some(step) = reporter.known(step_of(run))? else {
            return Ok(());
        };
        let remark = verdict.lock_remark();
        if let Some(cluster) = self.recoverable(verdict) {
            let _turn = self.recoveries.acquire().await;
            if let Some(saved) = self.save_log(run, verdict, cluster).await? {
                reporter
                    .restore_log(&step, &saved.path(), remark.as_deref())
                    .await?;
            }
        }
        match remark {
            Some(line) => reporter.append(&step, &line).await,
            None => Ok(()),
        }
    }

    /// Tells the job what its step came to, where the executor told the step alone.
    async fn finish(&self, run: &RunKey) -> Result<(), ReportError> {
        let Some(reporter) = &self.reporter else {
            return Ok(());
        };
        match reporter.known(step_of(run))? {
            Some(step) => reporter.finish(&step).await,
            None => Ok(()),
        }
    }
}

impl RunObserver for Observer {
    fn on_held(&self, run: &RunKey) {
        if !self.live().contains_key(run) {
            let mut held = self.held();
            held.entry(run.clone()).or_insert_with(|| self.beat(run));
        }
    }

    fn on_forgotten(&self, run: &RunKey) {
        self.live().remove(run);
        self.held().remove(run);
    }

    fn on_observation(&self, run: &RunKey, observation: &Observation) {
        match observation {
            // Its end may be known to the platform already, as after a restart.
            Observation::Ended(verdict) => {
                // A run that was over when it was first seen was counted by who saw it end.
                let live = self.live().remove(run);
                if live.is_some_and(|live| live.ended.is_none()) {
                    self.metrics.ended(verdict.kind);
                }
            }
            Observation::Waiting(wait) => {
                self.seen(run, self.beat(run));
                if wait.reason.is_news() {
                    info!(%run, sentence = wait.sentence, "a run waits");
                    self.note(run, &wait.sentence);
                }
            }
            Observation::InProgress => {
                self.seen(run, None);
                // The log is its executor's from now on: what a late writer stores would take the place of it.
                if let Some(live) = self.live().get_mut(run) {
                    live.notes = None;
                }
            }
        }
        self.held().remove(run);
    }

    fn on_running(&self, run: &RunKey, since: Option<Duration>) {
        let Some(reporter) = &self.reporter else {
            return;
        };
        if self.relieved.load(Ordering::SeqCst) {
            return;
        }
        // Where no container can be looked at, it is not known when it starts.
        let within = since.map(|since| TAKE_OVER.saturating_sub(since));
        let beat = reporter.beat_until_taken_over(&run.job_id, within);
        self.seen(run, beat);
    }

    fn check_heartbeat<'a>(&'a self, run: &'a RunKey) -> BoxFuture<'a, Heartbeat> {
        async move {
            match &self.reporter {
                Some(reporter) => reporter.listen(&run.job_id).await,
                None => Heartbeat::Unknown,
            }
        }
        .boxed()
    }

    fn on_ended<'a>(
        &'a self,
        run: &'a RunKey,
        verdict: &'a Verdict,
    ) -> BoxFuture<'a, ReportOutcome> {
        async move {
            self.has_ended(run);
            let settled = match verdict.kind {
                // An executor of another make ends with 0 once it has reported, or has given up between step and job.
                VerdictKind::Completed if verdict.report.is_none() => self.finish(run).await,
                _ => self.settle(run, verdict).await,
            };
            match settled {
                Ok(()) => {
                    self.live().remove(run);
                    ReportOutcome::Delivered
                }
                Err(error) if error.is_final() => {
                    let why = chain(&error);
                    warn!(%run, error = why, "the platform will not be told how a run ended");
                    self.metrics.report_failed();
                    self.live().remove(run);
                    ReportOutcome::Refused(why)
                }
                Err(error) => {
                    warn!(%run, error = chain(&error), "the verdict could not be reported, trying again");
                    self.metrics.report_failed();
                    ReportOutcome::Retry
                }
            }
        }
        .boxed()
    }

    fn on_more<'a>(&'a self, run: &'a RunKey, verdict: &'a Verdict) -> BoxFuture<'a, ()> {
        async move {
            if let Err(error) = self.add_more(run, verdict).await {
                warn!(%run, error = chain(&error), "the log of the run could not be completed");
            }
        }
        .boxed()
    }

    fn on_counts(&self, counts: RunCounts) {
        self.metrics.stand(counts);
    }
}

/// What a container printed of a run's log, kept as long as this is.
struct SavedLog(TempDir);

impl SavedLog {
    fn path(&self) -> PathBuf {
        self.0.path().join("container")
    }
}

/// The step of a run, as its Job names it.
fn step_of(run: &RunKey) -> StepRef {
    StepRef {
        organization_id: run.organization_id.clone(),
        workspace_id: run.workspace_id.clone(),
        job_id: run.job_id.clone(),
        step_id: run.step_id.clone(),
        step_type: run.step_type.clone(),
    }
}

/// The platform's word on the job of a run; a platform that does not answer has cancelled nothing.
async fn status_of(reporter: &PlatformReporter, run: &RunKey) -> Option<JobStatus> {
    let step = reporter.known(step_of(run)).ok()??;
    match reporter.stand(&step).await {
        Ok(stand) => Some(stand.job),
        Err(error) => {
            debug!(%run, error = chain(&error), "where its job stands is not known at the moment");
            None
        }
    }
}

/// Writes what comes, in order, until nothing more will.
async fn write_notes(
    reporter: PlatformReporter,
    run: RunKey,
    mut notes: UnboundedReceiver<String>,
) {
    // The request that brought the run may still be open.
    tokio::time::sleep(ANSWER).await;
    while let Some(sentence) = notes.recv().await {
        let written = match reporter.known(step_of(&run)) {
            Ok(Some(step)) => reporter.note(&step, &sentence).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            warn!(%run, error = chain(&error), "the reason could not be written into the run's log");
        }
    }
}

/// The verdict as people read it in the run's log.
fn told(verdict: &Verdict) -> String {
    let evidence = verdict
        .evidence
        .iter()
        .map(|evidence| format!("  {}: {}", evidence.source, evidence.text));
    let advice = verdict
        .advice
        .iter()
        .map(|advice| format!("What to do: {advice}"));
    let lines: Vec<String> = std::iter::once(verdict.sentence.clone())
        .chain(evidence)
        .chain(advice)
        .collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use platform::redis::{Redis, RedisArgs};
    use platform::terrakube::{Terrakube, TerrakubeArgs};

    use std::convert::Infallible;
    use std::fs;
    use std::sync::atomic::AtomicUsize;

    use axum::http::{Request, Response};
    use futures_util::future::join_all;
    use job_contract::Exit;
    use k8s_openapi::jiff::Timestamp;
    use kube::Client;
    use kube::client::Body;
    use platform::local::StepRecord;
    use serde_json::json;
    use tower::service_fn;

    use super::*;
    use crate::verdict::{Begun, Wait, WaitReason};

    fn run() -> RunKey {
        RunKey {
            job_id: "412".into(),
            step_id: "step".into(),
            name: "job-412-step".into(),
            organization_id: "org".into(),
            workspace_id: "ws".into(),
            step_type: "terraformPlan".into(),
        }
    }

    fn waits() -> Observation {
        Observation::Waiting(Wait {
            reason: WaitReason::Pod,
            sentence: "waiting for the pod".into(),
            since: Timestamp::UNIX_EPOCH,
            until: None,
        })
    }

    fn verdict(kind: VerdictKind) -> Verdict {
        Verdict {
            kind,
            sentence: "it was killed".into(),
            evidence: Vec::new(),
            advice: None,
            outcome: Exit::Infrastructure,
            begun: Begun::Yes,
            may_change: true,
            job_over: true,
            report: None,
        }
    }

    fn assert_says(metrics: &Metrics, lines: &[&str]) {
        let text = metrics.render(None);
        for line in lines {
            assert!(text.lines().any(|found| found == *line), "{line}\n{text}");
        }
    }

    #[tokio::test]
    async fn a_run_is_counted_once_by_who_saw_it_end_and_every_failed_report() {
        let folder = tempfile::tempdir().unwrap();
        let jobs = folder.path().join("platform/jobs");
        fs::create_dir_all(&jobs).unwrap();
        fs::write(jobs.join("412.json"), "no record").unwrap();
        let metrics = Metrics::default().for_cluster();
        let observer = Observer::new(
            Some(PlatformReporter::local(folder.path())),
            metrics.clone(),
        );
        let verdict = verdict(VerdictKind::OomKilled);
        let ended = Observation::Ended(Box::new(verdict.clone()));

        // As after a restart: another has counted it.
        observer.on_observation(&run(), &ended);
        assert_says(
            &metrics,
            &[r#"mayfly_runs_ended_total{verdict="oom_killed"} 0"#],
        );
        observer.on_observation(&run(), &Observation::InProgress);
        observer.on_observation(&run(), &ended);
        assert_eq!(
            observer.on_ended(&run(), &verdict).await,
            ReportOutcome::Retry
        );
        assert_eq!(
            observer.on_ended(&run(), &verdict).await,
            ReportOutcome::Retry
        );
        // Its Job is gone before it could be reported.
        observer.on_observation(&run(), &ended);
        assert_says(
            &metrics,
            &[
                r#"mayfly_runs_ended_total{verdict="oom_killed"} 1"#,
                r#"mayfly_runs_finished_total{outcome="failed"} 1"#,
                r#"mayfly_runs_finished_total{outcome="done"} 0"#,
                "mayfly_report_failures_total 2",
            ],
        );
    }

    /// A cluster whose containers have printed something, which it gives out one by one as it is told to, and how many
    /// of them are being given out.
    fn cluster(turns: Arc<Semaphore>, given: Arc<Given>) -> Cluster {
        let service = service_fn(move |request: Request<Body>| {
            let (turns, given) = (Arc::clone(&turns), Arc::clone(&given));
            async move {
                let path = request.uri().path();
                let answer = if path.ends_with("/log") {
                    let at_once = given.at_once.fetch_add(1, Ordering::SeqCst) + 1;
                    given.most.fetch_max(at_once, Ordering::SeqCst);
                    turns.acquire().await.unwrap().forget();
                    given.at_once.fetch_sub(1, Ordering::SeqCst);
                    let own = json!({"timestamp": "t", "level": "INFO", "message": "m", "target": "executor"});
                    format!("{own}\nall it said\n")
                } else if path.contains("/jobs/") {
                    json!({"metadata": {"name": "run", "uid": "1"}}).to_string()
                } else {
                    let status = json!({"name": "executor", "image": "", "imageID": "", "ready": false,
                        "restartCount": 0, "state": {"terminated": {"exitCode": 137}}});
                    let owner =
                        json!({"apiVersion": "batch/v1", "kind": "Job", "name": "run", "uid": "1"});
                    let pod = json!({"metadata": {"name": "run-a", "ownerReferences": [owner]},
                        "status": {"phase": "Failed", "containerStatuses": [status]}});
                    json!({"metadata": {}, "items": [pod]}).to_string()
                };
                Ok::<_, Infallible>(Response::new(axum::body::Body::from(answer)))
            }
        });
        Cluster::from_client(Client::new(service, "runs"), "runs")
    }

    #[derive(Debug, Default)]
    struct Given {
        at_once: AtomicUsize,
        most: AtomicUsize,
    }

    #[tokio::test]
    async fn however_many_runs_end_at_once_few_of_their_logs_are_recovered_at_a_time() {
        const RUNS: usize = 7;
        let folder = tempfile::tempdir().unwrap();
        let reporter = PlatformReporter::local(folder.path());
        let (turns, given) = (Arc::new(Semaphore::new(0)), Arc::new(Given::default()));
        let observer = Observer::new(Some(reporter.clone()), Metrics::default())
            .recovering_from(cluster(Arc::clone(&turns), Arc::clone(&given)));
        let runs = (0..RUNS).map(|n| RunKey {
            job_id: n.to_string(),
            ..run()
        });
        let runs: Vec<RunKey> = runs.collect();
        for run in &runs {
            reporter.edit(&step_of(run), |record| {
                record.status = JobStatus::Running;
                record
                    .steps
                    .push(StepRecord::pending("step", "terraformPlan"));
            });
        }
        let verdict = verdict(VerdictKind::OomKilled);
        let ends = join_all(runs.iter().map(|run| observer.on_ended(run, &verdict)));
        let turns = async {
            while given.at_once.load(Ordering::SeqCst) < RECOVERIES {
                tokio::task::yield_now().await;
            }
            assert_eq!(observer.recoveries.available_permits(), 0);
            turns.add_permits(RUNS);
        };
        let (told, ()) = tokio::join!(ends, turns);
        assert!(
            told.into_iter()
                .all(|told| told == ReportOutcome::Delivered)
        );
        assert_eq!(given.most.load(Ordering::SeqCst), RECOVERIES);
        for run in &runs {
            let key = format!("local/output/org/{}/step.tfoutput", run.job_id);
            let output = fs::read_to_string(folder.path().join(key)).unwrap();
            assert_eq!(output, "all it said\nit was killed\n");
        }
    }

    /// A platform that is away, and its Redis with it.
    fn away() -> PlatformReporter {
        let terrakube = TerrakubeArgs {
            api_url: Some("http://127.0.0.1:1".to_owned()),
            public_api_url: Some("http://127.0.0.1:1".to_owned()),
            enable_security: Some("false".to_owned()),
            report_patience_seconds: Some("600".to_owned()),
            ..TerrakubeArgs::default()
        };
        let redis = RedisArgs {
            redis_hostname: Some("127.0.0.1".to_owned()),
            redis_port: Some("1".to_owned()),
            ..RedisArgs::default()
        };
        let redis = Redis::new(redis.resolve().unwrap().unwrap());
        let config = terrakube.resolve().unwrap().unwrap();
        let terrakube = Terrakube::new(config, Some(redis.clone())).unwrap();
        PlatformReporter::terrakube(terrakube, None, Some(redis)).unwrap()
    }

    #[tokio::test]
    async fn a_run_whose_job_is_held_is_kept_alive_until_it_is_watched_or_forgotten() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let metrics = Metrics::default().for_cluster();
        let observer = Observer::new(Some(away()), metrics.clone());
        let beats = || observer.held().values().flatten().count();
        observer.on_held(&run());
        observer.on_held(&run());
        assert_eq!(beats(), 1);
        observer.on_forgotten(&run());
        assert_eq!(beats(), 0);

        // One heart is enough for a run that is watched, though its Job is seen to be held once more.
        observer.on_held(&run());
        observer.on_observation(&run(), &waits());
        observer.on_held(&run());
        assert_eq!(beats(), 0);
        assert!(observer.live()[&run()].beat.is_some());
        observer.on_forgotten(&run());
        assert!(observer.live().is_empty());

        // One that its launcher completed ends for nobody.
        observer.on_held(&run());
        let ended = verdict(VerdictKind::Deleted);
        observer.on_observation(&run(), &Observation::Ended(Box::new(ended)));
        assert_eq!(beats(), 0);
        assert_says(
            &metrics,
            &[r#"mayfly_runs_ended_total{verdict="deleted"} 0"#],
        );
    }

    #[tokio::test]
    async fn who_watches_no_longer_keeps_nothing_alive() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let observer = Arc::new(Observer::new(Some(away()), Metrics::default()));
        let other = RunKey {
            job_id: "413".into(),
            ..run()
        };
        let beats = || {
            let live = observer.live();
            let live = live.values().filter(|live| live.beat.is_some()).count();
            live + observer.held().values().flatten().count()
        };
        let duty = observer.on_duty();
        observer.on_observation(&run(), &Observation::InProgress);
        observer.on_running(&run(), Some(Duration::ZERO));
        observer.on_held(&other);
        assert_eq!(beats(), 2);
        drop(duty);
        assert_eq!(beats(), 0);
        // What was under way.
        observer.on_running(&run(), None);
        observer.has_ended(&run());
        observer.on_held(&other);
        assert_eq!(beats(), 0);
    }

    #[tokio::test]
    async fn a_job_whose_end_is_not_taken_is_kept_alive_for_a_while_only() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let observer = Observer::new(Some(away()), Metrics::default());
        let reporter = observer.reporter.clone().unwrap();
        let beats = |after: Duration| {
            let ended = Instant::now().checked_sub(after).unwrap();
            observer.live().get_mut(&run()).unwrap().ended = Some(ended);
            observer.let_go(&reporter);
            observer.live()[&run()].beat.is_some()
        };
        observer.on_observation(&run(), &Observation::InProgress);
        observer.let_go(&reporter);
        // Its executor's own heartbeat is over.
        observer.has_ended(&run());
        assert!(beats(Duration::from_secs(590)), "there is still time");
        assert!(!beats(Duration::from_mins(10)));
        observer.has_ended(&run());
        assert!(observer.live()[&run()].beat.is_none());
    }
}
