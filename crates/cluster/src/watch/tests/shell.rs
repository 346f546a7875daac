//! The watcher against an API server: its watches, its requests, and what is left for the next watcher.

use std::io;
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, pending, ready};
use http::StatusCode;
use job_contract::report::{Author, FinalReport, ReportKey};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use test_peers::wait::until;
use verdict::{Observation, Timeouts, Verdict, VerdictKind};

use super::super::shell::AT_ONCE;
use super::super::{HistoryLimits, ReportOutcome, RunObserver, WatchSettings};
use crate::fake_server::{Crash, Server, inline, objects, refusal};
use crate::submit::KEPT_UNREPORTED;
use crate::{Cluster, RunRef};

/// Records its calls, and answers reports as it is set.
#[derive(Default)]
struct Recorder {
    observations: Mutex<Vec<(String, Observation)>>,
    /// Reports that were delivered.
    delivered: Mutex<Vec<(String, VerdictKind)>>,
    /// The number of reports that fail before one succeeds.
    failures: Mutex<usize>,
    /// Every report is refused with these words.
    refusal: Mutex<Option<&'static str>>,
    attempts: Mutex<usize>,
}

impl RunObserver for Recorder {
    fn on_observation(&self, run: &RunRef, observation: &Observation) {
        let mut observations = self.observations.lock().unwrap();
        observations.push((run.to_string(), observation.clone()));
    }

    fn on_ended<'a>(
        &'a self,
        run: &'a RunRef,
        verdict: &'a Verdict,
    ) -> BoxFuture<'a, ReportOutcome> {
        *self.attempts.lock().unwrap() += 1;
        let mut failures = self.failures.lock().unwrap();
        if *failures > 0 {
            *failures -= 1;
            return ready(ReportOutcome::Retry).boxed();
        }
        if let Some(refusal) = *self.refusal.lock().unwrap() {
            return ready(ReportOutcome::Refused(refusal.to_owned())).boxed();
        }
        let mut delivered = self.delivered.lock().unwrap();
        delivered.push((run.to_string(), verdict.kind));
        ready(ReportOutcome::Delivered).boxed()
    }
}

impl Recorder {
    /// Fails every report.
    fn failing() -> Self {
        Self {
            failures: Mutex::new(usize::MAX),
            ..Self::default()
        }
    }

    fn delivered(&self) -> Vec<(String, VerdictKind)> {
        self.delivered.lock().unwrap().clone()
    }

    fn attempts(&self) -> usize {
        *self.attempts.lock().unwrap()
    }

    fn observed(&self, is_it: impl Fn(&Observation) -> bool) -> bool {
        let observations = self.observations.lock().unwrap();
        observations
            .iter()
            .any(|(_, observation)| is_it(observation))
    }
}

struct Watching {
    recorder: Arc<Recorder>,
    task: tokio::task::JoinHandle<()>,
}

impl Deref for Watching {
    type Target = Recorder;

    fn deref(&self) -> &Recorder {
        &self.recorder
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A watcher that repeats failed reports often.
fn watching(cluster: Cluster) -> Watching {
    watching_with(cluster, often(), Recorder::default())
}

fn often() -> WatchSettings {
    WatchSettings {
        report_again: Duration::from_millis(5),
        ..WatchSettings::default()
    }
}

fn watching_with(cluster: Cluster, settings: WatchSettings, recorder: Recorder) -> Watching {
    let recorder = Arc::new(recorder);
    let observer: Arc<dyn RunObserver> = Arc::clone(&recorder) as _;
    let task = tokio::spawn(async move { cluster.watch(settings, observer).await });
    Watching { recorder, task }
}

async fn until_delivered(watching: &Watching) {
    until("it is reported", async || !watching.delivered().is_empty()).await;
}

async fn until_reported_at(server: &Server) {
    until("it is noted", async || {
        annotation_of(server, "job-1-a", "mayfly.dev/reported-at").is_string()
    })
    .await;
}

/// A server with the run `1/a`.
async fn submitted() -> Arc<Server> {
    let server = Server::start();
    let run = inline("1", "a");
    Box::pin(server.cluster().submit(&run)).await.unwrap();
    server
}

fn suspended(server: &Server, name: &str) -> bool {
    server.object("jobs", name).unwrap()["spec"]["suspend"] == json!(true)
}

fn annotation_of(server: &Server, name: &str, annotation: &str) -> Value {
    server.object("jobs", name).unwrap()["metadata"]["annotations"][annotation].clone()
}

fn over(server: &Server, name: &str, type_: &str) {
    server.put(
        "jobs",
        json!({"metadata": {"name": name}, "status": {"conditions": [
        {"type": type_, "status": "True", "lastTransitionTime": Timestamp::now().to_string()}]}}),
    );
}

fn pod(server: &Server, job: &str, status: Value) {
    server.put("pods", pod_of(server, job, status));
}

/// The pod of a run, as the Job controller and the kubelet would have it.
fn pod_of(server: &Server, job: &str, status: Value) -> Value {
    let uid = server.object("jobs", job).unwrap()["metadata"]["uid"].clone();
    let now = Timestamp::now().to_string();
    let mut status = status;
    status["conditions"] =
        json!([{"type": "PodScheduled", "status": "True", "lastTransitionTime": now}]);
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("{job}-x"), "namespace": "runs",
            "labels": {"batch.kubernetes.io/job-name": job, "app.kubernetes.io/managed-by": "mayfly"},
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": uid}]},
        "spec": {"nodeName": "node-1", "containers": [{"name": "executor",
            "resources": {"limits": {"memory": "1Gi"}}}]},
        "status": status})
}

fn container(state: &Value) -> Value {
    json!({"phase": "Pending", "containerStatuses": [{"name": "executor", "image": "registry.example/e:1",
        "imageID": "", "ready": false, "restartCount": 0, "state": state}]})
}

#[tokio::test]
async fn a_run_whose_launcher_crashed_before_its_release_is_released() {
    let server = Server::start();
    server
        .crashing(Crash::Before(2))
        .submit(&objects("1", "a"))
        .await
        .unwrap_err();
    assert!(suspended(&server, "job-1-a"));
    let _watching = watching(server.cluster());
    until("it is released", async || !suspended(&server, "job-1-a")).await;
}

#[tokio::test]
async fn a_job_that_is_seen_to_be_over_before_its_pod_is_has_the_pods_verdict() {
    let server = submitted().await;
    let watching = watching(server.cluster());
    until("it is watched", async || watching.observed(|_| true)).await;
    let dead = container(&json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}));
    let dead = pod_of(&server, "job-1-a", dead);
    server.put_unheard("pods", dead);
    over(&server, "job-1-a", "Failed");
    until_delivered(&watching).await;
    assert_eq!(watching.delivered()[0].1, VerdictKind::OomKilled);
}

fn report_key() -> ReportKey {
    ReportKey::parse(&"MDEy".repeat(12)).unwrap()
}

/// A pod of `job-1-a` whose executor left a sealed report of this outcome.
fn pod_with_report(server: &Arc<Server>, outcome: u8) {
    let report = FinalReport {
        job_id: "1".into(),
        step_id: "a".into(),
        outcome,
        author: Some(Author {
            run: "u-x".into(),
            exit_code: outcome,
        }),
        ..FinalReport::default()
    };
    let message = report.to_termination_message(Some(&report_key()));
    let ended = container(&json!({"terminated": {"exitCode": outcome, "message": message}}));
    let mut pod = pod_of(server, "job-1-a", ended);
    pod["metadata"]["uid"] = json!("u-x");
    pod["metadata"]["labels"]["mayfly.dev/job-id"] = json!("1");
    pod["metadata"]["labels"]["mayfly.dev/step-id"] = json!("a");
    server.put("pods", pod);
}

#[tokio::test]
async fn a_run_whose_executor_left_a_sealed_report_is_not_reported() {
    let server = submitted().await;
    pod_with_report(&server, 1);
    over(&server, "job-1-a", "Failed");
    let cluster = server.cluster().with_report_key(Some(report_key()));
    let watching = watching(cluster);
    let step_failed = |observation: &Observation| matches!(observation, Observation::Ended(verdict) if verdict.kind == VerdictKind::StepFailed);
    until("it is observed", async || watching.observed(step_failed)).await;
    assert!(watching.delivered().is_empty());
    assert!(!server.requests().contains(&"get events".to_owned()));
}

#[tokio::test]
async fn a_run_that_was_given_up_is_stopped_then_reported_and_kept_with_its_verdict() {
    let server = submitted().await;
    let codes = [StatusCode::FORBIDDEN, StatusCode::UNPROCESSABLE_ENTITY];
    let left = Arc::new(Mutex::new(codes.to_vec()));
    let refusals = Arc::clone(&left);
    let cluster = server.faulty(move |line, _| {
        let is_patch = line.starts_with("PATCH");
        let code = is_patch.then(|| refusals.lock().unwrap().pop())??;
        Some(refusal(code, "Refused", "an admission webhook says no"))
    });
    let watching = watching(cluster);
    let waiting = json!({"waiting": {"reason": "InvalidImageName", "message": "A B"}});
    pod(&server, "job-1-a", container(&waiting));
    until_delivered(&watching).await;
    assert!(left.lock().unwrap().is_empty());
    assert_eq!(watching.delivered()[0].1, VerdictKind::ImageNotPulled);
    let job = server.object("jobs", "job-1-a").unwrap();
    assert_eq!(job["spec"]["activeDeadlineSeconds"], 1, "stopped first");
    server.remove("pods", "job-1-a-x");
    over(&server, "job-1-a", "Failed");
    let explained = server.cluster().explain("job-1-a").await.unwrap();
    assert_eq!(explained.verdict.unwrap().kind, VerdictKind::ImageNotPulled);
    assert_eq!(watching.delivered().len(), 1);
}

#[tokio::test]
async fn where_pods_may_not_be_looked_at_runs_are_judged_by_their_jobs() {
    let server = Server::start();
    let cluster = server.faulty(|line, _| {
        line.ends_with("/pods")
            .then(|| refusal(StatusCode::FORBIDDEN, "Forbidden", "no pods for you"))
    });
    cluster.submit(&inline("1", "a")).await.unwrap();
    // Without a pod in sight for longer than any run may be.
    let long_ago = Timestamp::from_second(1_767_225_600).unwrap().to_string();
    server.put(
        "jobs",
        json!({"metadata": {"name": "job-1-a", "creationTimestamp": long_ago},
            "status": {"startTime": long_ago}}),
    );
    let watching = watching(cluster);
    until("it is said to be at work", async || {
        watching.observed(|observation| *observation == Observation::InProgress)
    })
    .await;
    assert!(watching.delivered().is_empty());
    over(&server, "job-1-a", "Failed");
    until_delivered(&watching).await;
    assert_eq!(watching.delivered().len(), 1);
}

/// The log of this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn lines_with(&self, words: &str) -> usize {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().filter(|line| line.contains(words)).count()
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_refused_is_tried_ever_more_rarely_and_logged_once() {
    let log = Log::default();
    let sink = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || sink.clone());
    let _guard = tracing::subscriber::set_default(subscriber.finish());
    let server = Server::start();
    let lists = Arc::new(Mutex::new((0, true)));
    let counted = Arc::clone(&lists);
    let cluster = server.faulty(move |line, _| {
        let mut counted = counted.lock().unwrap();
        let (count, is_refused) = &mut *counted;
        line.ends_with("/pods").then(|| *count += 1)?;
        is_refused.then(|| refusal(StatusCode::FORBIDDEN, "Forbidden", "no pods for you"))
    });
    let _watching = watching(cluster);
    tokio::time::sleep(Duration::from_mins(10)).await;
    let tried = lists.lock().unwrap().0;
    assert!((10..40).contains(&tried), "{tried} lists in ten minutes");
    assert_eq!(log.lines_with("no right to watch pods"), 1);
    lists.lock().unwrap().1 = false;
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(log.lines_with("the right to watch pods is there again"), 1);
    assert_eq!(log.lines_with("no right to watch pods"), 1);
}

/// Never ends a report.
#[derive(Default)]
struct Stuck(Mutex<usize>);

impl RunObserver for Stuck {
    fn on_observation(&self, _: &RunRef, _: &Observation) {}

    fn on_ended<'a>(&'a self, _: &'a RunRef, _: &'a Verdict) -> BoxFuture<'a, ReportOutcome> {
        *self.0.lock().unwrap() += 1;
        pending().boxed()
    }
}

#[tokio::test]
async fn reports_that_take_long_keep_no_run_from_its_release() {
    let server = Server::start();
    let cluster = server.cluster().with_max_in_flight(100);
    for step in 0..AT_ONCE {
        let step = format!("s{step}");
        cluster.submit(&inline("1", &step)).await.unwrap();
        over(&server, &format!("job-1-{step}"), "Failed");
    }
    let stuck = Arc::new(Stuck::default());
    let observer: Arc<dyn RunObserver> = Arc::clone(&stuck) as _;
    let watched = cluster.clone();
    let task = tokio::spawn(async move { watched.watch(often(), observer).await });
    until("all are being reported", async || {
        *stuck.0.lock().unwrap() == AT_ONCE
    })
    .await;
    cluster.submit(&inline("1", "held")).await.unwrap();
    until("it is released", async || !suspended(&server, "job-1-held")).await;
    task.abort();
}

#[tokio::test]
async fn the_waiting_time_of_a_run_follows_the_clock_of_the_api_server() {
    let settings = WatchSettings {
        timeouts: Timeouts {
            no_pod: Duration::from_hours(2),
            ..Timeouts::default()
        },
        ..WatchSettings::default()
    };
    // Hours the server's clock is ahead, hours since it saw the release, and whether that is too long.
    for (ahead, waited, too_long) in [(-10, 1, false), (10, 3, true)] {
        let hours = SignedDuration::from_hours;
        let server = Server::start();
        server.set_clock(hours(ahead));
        server.cluster().submit(&objects("1", "a")).await.unwrap();
        let released = annotation_of(&server, "job-1-a", "mayfly.dev/released-at");
        let released: Timestamp = released.as_str().unwrap().parse().unwrap();
        let difference = server.now().duration_since(released);
        assert!(difference.abs() < hours(5), "{difference:?}");

        let then = (server.now() - hours(waited)).to_string();
        server.put(
            "jobs",
            json!({"metadata": {"name": "job-1-a", "creationTimestamp": then,
                "annotations": {"mayfly.dev/released-at": then}}}),
        );
        // A launcher that starts only now extends no deadline.
        let watching = watching_with(server.cluster(), settings.clone(), Recorder::default());
        until("it is judged", async || watching.observed(|_| true)).await;
        let given_up = watching.observed(|said| matches!(said, Observation::Ended(_)));
        assert_eq!(given_up, too_long, "{ahead} {waited}");
    }
}

/// A run whose Job is to live for ten minutes after its end, and which has ended without a word.
async fn ended_without_a_word(server: &Arc<Server>) {
    let mut objects = inline("1", "a");
    let spec = objects.job.spec.as_mut().unwrap();
    spec.ttl_seconds_after_finished = Some(600);
    Box::pin(server.cluster().accept(&objects)).await.unwrap();
    until("it is released", async || !suspended(server, "job-1-a")).await;
    over(server, "job-1-a", "Failed");
}

fn time_to_live(server: &Server) -> u64 {
    let job = server.object("jobs", "job-1-a").unwrap();
    job["spec"]["ttlSecondsAfterFinished"].as_u64().unwrap()
}

/// From when it is set on; Kubernetes counts from the end of the Job.
fn has_its_own_time(server: &Server) -> bool {
    (600..660).contains(&time_to_live(server))
}

#[tokio::test]
async fn a_refusal_is_written_onto_the_job() {
    let server = Server::start();
    ended_without_a_word(&server).await;
    let refused = Recorder {
        refusal: Mutex::new(Some("the platform does not know the job")),
        ..Recorder::default()
    };
    let watching = watching_with(server.cluster(), often(), refused);
    until("the refusal is noted", async || {
        annotation_of(&server, "job-1-a", "mayfly.dev/report-refused").is_string()
    })
    .await;
    assert_eq!(watching.attempts(), 1);
    assert!(has_its_own_time(&server));
}

#[tokio::test]
async fn a_run_is_kept_until_some_watcher_reports_it_and_is_then_for_the_history_to_remove() {
    let server = Server::start();
    ended_without_a_word(&server).await;
    let day = KEPT_UNREPORTED.as_secs();
    assert_eq!(time_to_live(&server), day);
    let failing = Recorder::failing();
    let first = watching_with(server.cluster(), often(), failing);
    until("it is tried", async || first.attempts() > 2).await;
    assert_eq!(time_to_live(&server), day);
    drop(first);

    // The next one reports it, and ends before it has noted that.
    let cut = server.faulty(|line, _| {
        line.starts_with("PATCH")
            .then(|| refusal(StatusCode::BAD_REQUEST, "BadRequest", "no"))
    });
    let second = watching(cut);
    until_delivered(&second).await;
    drop(second);
    assert_eq!(time_to_live(&server), day);

    let third = watching(server.cluster());
    until_reported_at(&server).await;
    assert_eq!(third.delivered().len(), 1);
    assert!(has_its_own_time(&server));
    drop(third);

    let none_failed = HistoryLimits {
        failed: Some(0),
        successful: None,
    };
    let settings = WatchSettings {
        history: none_failed,
        ..often()
    };
    let fourth = watching_with(server.cluster(), settings, Recorder::default());
    let is_gone = || server.object("jobs", "job-1-a").is_none();
    until("the history removes it", async || is_gone()).await;
    assert!(fourth.observed(|said| matches!(said, Observation::Ended(_))));
    assert_eq!(fourth.attempts(), 0, "the platform knows");
}

#[tokio::test]
async fn a_run_stopped_for_its_lost_node_has_that_verdict_from_every_launcher() {
    let server = submitted().await;
    let running = container(&json!({"running": {"startedAt": server.now().to_string()}}));
    let mut at_work = pod_of(&server, "job-1-a", running);
    let overdue = server.now() - SignedDuration::from_secs(31);
    at_work["metadata"]["deletionTimestamp"] = json!(overdue.to_string());
    server.put("pods", at_work);
    let failing = Recorder::failing();
    let first = watching_with(server.cluster(), often(), failing);
    until("it is stopped, and not reported", async || {
        first.attempts() > 0
    })
    .await;
    let job = server.object("jobs", "job-1-a").unwrap();
    assert_eq!(job["spec"]["activeDeadlineSeconds"], 1);
    drop(first);
    server.remove("pods", "job-1-a-x");
    over(&server, "job-1-a", "Failed");
    let second = watching(server.cluster());
    until_delivered(&second).await;
    assert_eq!(second.delivered()[0].1, VerdictKind::NodeLost);
}
