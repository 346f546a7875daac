use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::report::{Author, FinalReport, ReportKey};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::runtime::watcher;
use serde_json::{Value, json};

use super::super::stand_in::{Crash, Server, inline, objects, refusal};
use super::heartbeat::SILENCE;
use super::run::TrackedRun;
use super::*;
use crate::cluster::RunKey;
use crate::cluster::cache::{JobFeed, Pods, trimmed_job};
use crate::cluster::submit::KEPT_UNREPORTED;
use crate::verdict::{Observation, Timeouts, Verdict, VerdictKind, WaitReason};

const LISTEN_AGAIN: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Notebook {
    said: Mutex<Vec<(String, Observation)>>,
    ended: Mutex<Vec<(String, VerdictKind)>>,
    /// Runs that are held, and have not been forgotten.
    held: Mutex<Vec<String>>,
    /// Reports that fail before one succeeds.
    deaf: Mutex<usize>,
    /// Every report is refused for good, with these words.
    refusal: Mutex<Option<&'static str>>,
    attempts: Mutex<Vec<(String, Instant)>>,
    life: Mutex<Option<Heartbeat>>,
    listened: Mutex<usize>,
}

impl RunObserver for Notebook {
    fn on_held(&self, run: &RunKey) {
        self.held.lock().unwrap().push(run.to_string());
    }

    fn on_forgotten(&self, run: &RunKey) {
        self.held
            .lock()
            .unwrap()
            .retain(|held| *held != run.to_string());
    }

    fn on_observation(&self, run: &RunKey, observation: &Observation) {
        let mut said = self.said.lock().unwrap();
        said.push((run.to_string(), observation.clone()));
    }

    fn check_heartbeat<'a>(&'a self, _: &'a RunKey) -> BoxFuture<'a, Heartbeat> {
        *self.listened.lock().unwrap() += 1;
        let life = *self.life.lock().unwrap();
        futures_util::future::ready(life.unwrap_or(Heartbeat::Unknown)).boxed()
    }

    fn on_ended<'a>(
        &'a self,
        run: &'a RunKey,
        verdict: &'a Verdict,
    ) -> BoxFuture<'a, ReportOutcome> {
        let attempt = (run.to_string(), Instant::now());
        self.attempts.lock().unwrap().push(attempt);
        let mut deaf = self.deaf.lock().unwrap();
        if *deaf > 0 {
            *deaf -= 1;
            return futures_util::future::ready(ReportOutcome::Retry).boxed();
        }
        if let Some(refusal) = *self.refusal.lock().unwrap() {
            return futures_util::future::ready(ReportOutcome::Refused(refusal.to_owned())).boxed();
        }
        let mut ended = self.ended.lock().unwrap();
        ended.push((run.to_string(), verdict.kind));
        futures_util::future::ready(ReportOutcome::Delivered).boxed()
    }
}

impl Notebook {
    fn ended(&self) -> Vec<(String, VerdictKind)> {
        self.ended.lock().unwrap().clone()
    }

    fn attempts(&self, run: &str) -> Vec<Instant> {
        let attempts = self.attempts.lock().unwrap();
        let of = attempts.iter().filter(|(of, _)| of == run);
        of.map(|(_, at)| *at).collect()
    }

    fn waits(&self) -> Vec<String> {
        let said = self.said.lock().unwrap();
        said.iter()
            .filter_map(|(_, observation)| match observation {
                Observation::Waiting(wait) if wait.reason.is_news() => Some(wait.sentence.clone()),
                _ => None,
            })
            .collect()
    }
}

struct Watching {
    notebook: Arc<Notebook>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn watching(cluster: Cluster, settings: WatchSettings) -> Watching {
    watching_with(cluster, settings, Notebook::default())
}

fn watching_with(cluster: Cluster, settings: WatchSettings, notebook: Notebook) -> Watching {
    let notebook = Arc::new(notebook);
    let observer: Arc<dyn RunObserver> = Arc::clone(&notebook) as _;
    let task = tokio::spawn(async move { cluster.watch(settings, observer).await });
    Watching { notebook, task }
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(15), "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
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
async fn runs_are_released_oldest_first_within_the_limit() {
    let server = Server::start();
    let cluster = server.cluster().with_max_in_flight(1);
    for (step, created) in [("c", 3), ("a", 1), ("b", 2)] {
        let mut objects = inline("1", step);
        let at = Timestamp::from_second(1_767_225_600 + created).unwrap();
        objects.job.metadata.creation_timestamp = Some(at.into());
        cluster.submit(&objects).await.unwrap();
    }
    let watching = watching(cluster, WatchSettings::default());
    until("the oldest is released", || !suspended(&server, "job-1-a")).await;
    let told = || {
        let said = watching.notebook.said.lock().unwrap();
        said.iter()
            .filter(|(_, said)| {
                matches!(said, Observation::Waiting(wait) if wait.reason == WaitReason::Queued)
            })
            .map(|(run, _)| run.clone())
            .collect::<Vec<_>>()
    };
    until("the others are told", || told().len() == 2).await;
    assert!(
        !told().contains(&"1/a".to_owned()),
        "it had its turn at once"
    );
    assert!(suspended(&server, "job-1-b") && suspended(&server, "job-1-c"));
    over(&server, "job-1-a", "Complete");
    until("the next is released", || !suspended(&server, "job-1-b")).await;
    assert!(suspended(&server, "job-1-c"));
    // They were made long ago, which is no reason to give one up at its release.
    until("its release is seen", || {
        let said = watching.notebook.said.lock().unwrap();
        said.iter().any(|(run, said)| {
            run == "1/b"
                && matches!(said, Observation::Waiting(wait) if wait.reason == WaitReason::Pod)
        })
    })
    .await;
    for job in ["job-1-a", "job-1-b"] {
        let job = server.object("jobs", job).unwrap();
        assert!(job["spec"]["activeDeadlineSeconds"].is_null(), "{job}");
    }
}

#[tokio::test]
async fn a_run_whose_launcher_died_before_its_release_is_released() {
    let server = Server::start();
    server
        .crashing(Crash::Before(2))
        .submit(&objects("1", "a"))
        .await
        .unwrap_err();
    assert!(suspended(&server, "job-1-a"));
    let _watching = watching(server.cluster(), WatchSettings::default());
    until("it is released", || !suspended(&server, "job-1-a")).await;
}

#[tokio::test]
async fn a_step_with_nothing_to_run_is_told_of_at_once_while_its_launcher_has_its_turn() {
    let server = Server::start();
    server.cluster().hold(&inline("1", "a")).await.unwrap();
    let watching = watching(server.cluster(), WatchSettings::default());
    until("it is told of", || {
        !watching.notebook.held.lock().unwrap().is_empty()
    })
    .await;
    assert!(suspended(&server, "job-1-a"), "its launcher may report it");
    assert!(watching.notebook.said.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_job_that_was_never_accepted_is_forgotten_once_it_is_gone() {
    let server = Server::start();
    server
        .crashing(Crash::Before(1))
        .submit(&objects("1", "a"))
        .await
        .unwrap_err();
    let settings = WatchSettings {
        incomplete_after: Duration::ZERO,
        ..WatchSettings::default()
    };
    let watching = watching(server.cluster(), settings);
    let held = || watching.notebook.held.lock().unwrap().len();
    until("it is told of", || held() > 0).await;
    until("it is removed", || {
        server.object("jobs", "job-1-a").is_none()
    })
    .await;
    until("it is forgotten", || held() == 0).await;
    assert!(watching.notebook.ended().is_empty());
}

#[tokio::test]
async fn a_run_that_ended_without_a_word_is_reported_once_across_restarts() {
    let server = Server::start();
    server.cluster().submit(&objects("1", "a")).await.unwrap();
    let first = watching(server.cluster(), WatchSettings::default());
    pod(
        &server,
        "job-1-a",
        json!({"phase": "Failed", "containerStatuses": [{"name": "executor", "image": "",
        "imageID": "", "ready": false, "restartCount": 0,
        "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]}),
    );
    over(&server, "job-1-a", "Failed");
    until("it is reported", || !first.notebook.ended().is_empty()).await;
    assert_eq!(
        first.notebook.ended(),
        [("1/a".to_owned(), VerdictKind::OomKilled)]
    );
    until("it is noted", || {
        annotation_of(&server, "job-1-a", "mayfly.dev/reported-at").is_string()
    })
    .await;
    drop(first);

    let second = watching(server.cluster(), WatchSettings::default());
    until("the second watcher knows it", || {
        !second.notebook.said.lock().unwrap().is_empty()
    })
    .await;
    let said = second.notebook.said.lock().unwrap()[0].1.clone();
    assert!(matches!(said, Observation::Ended(verdict) if verdict.kind == VerdictKind::OomKilled));
    assert!(second.notebook.ended().is_empty());
}

#[tokio::test]
async fn a_report_that_failed_is_made_again() {
    let server = Server::start();
    server.cluster().submit(&inline("1", "a")).await.unwrap();
    let watching = watching(server.cluster(), WatchSettings::default());
    *watching.notebook.deaf.lock().unwrap() = 1;
    until("it is watched", || {
        !watching.notebook.said.lock().unwrap().is_empty()
    })
    .await;
    over(&server, "job-1-a", "Failed");
    until("it is reported", || !watching.notebook.ended().is_empty()).await;
    assert_eq!(watching.notebook.ended()[0].1, VerdictKind::Lost);
}

#[tokio::test]
async fn a_job_that_is_seen_to_be_over_before_its_pod_is_has_the_pods_verdict() {
    let server = Server::start();
    server.cluster().submit(&inline("1", "a")).await.unwrap();
    let watching = watching(server.cluster(), WatchSettings::default());
    until("it is watched", || {
        !watching.notebook.said.lock().unwrap().is_empty()
    })
    .await;
    let dead = container(&json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}));
    let dead = pod_of(&server, "job-1-a", dead);
    server.put_unheard("pods", dead);
    over(&server, "job-1-a", "Failed");
    until("it is reported", || !watching.notebook.ended().is_empty()).await;
    assert_eq!(watching.notebook.ended()[0].1, VerdictKind::OomKilled);
}

fn report_key() -> ReportKey {
    ReportKey::parse(&"MDEy".repeat(12)).unwrap()
}

/// A pod of `job-1-a` whose executor left a sealed report of this outcome.
fn spoken_pod(server: &Arc<Server>, outcome: u8) {
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
    let phase = if outcome == 0 { "Succeeded" } else { "Failed" };
    let ended = json!({"phase": phase, "containerStatuses": [{"name": "executor", "image": "",
        "imageID": "", "ready": false, "restartCount": 0, "state": {"terminated": {"exitCode": outcome,
            "message": report.to_termination_message(Some(&report_key()))}}}]});
    let mut pod = pod_of(server, "job-1-a", ended);
    pod["metadata"]["uid"] = json!("u-x");
    pod["metadata"]["labels"]["mayfly.dev/job-id"] = json!("1");
    pod["metadata"]["labels"]["mayfly.dev/step-id"] = json!("a");
    server.put("pods", pod);
}

#[tokio::test]
async fn a_run_that_spoke_for_itself_is_not_reported() {
    let server = Server::start();
    server.cluster().submit(&inline("1", "a")).await.unwrap();
    spoken_pod(&server, 1);
    over(&server, "job-1-a", "Failed");
    let cluster = server.cluster().with_report_key(Some(report_key()));
    let watching = watching(cluster, WatchSettings::default());
    let spoken = |(_, said): &(String, Observation)| matches!(said, Observation::Ended(verdict) if verdict.kind == VerdictKind::StepFailed);
    until("it is observed", || {
        watching.notebook.said.lock().unwrap().iter().any(spoken)
    })
    .await;
    assert!(watching.notebook.ended().is_empty());
    assert!(!server.requests().contains(&"get events".to_owned()));
}

#[tokio::test]
async fn the_reason_of_a_wait_is_told_once_a_change() {
    let server = Server::start();
    server.cluster().submit(&inline("1", "a")).await.unwrap();
    let watching = watching(server.cluster(), WatchSettings::default());
    let waiting = |reason: &str, message: &str| {
        container(&json!({"waiting": {"reason": reason, "message": message}}))
    };
    pod(&server, "job-1-a", waiting("ErrImagePull", "no such host"));
    until("the reason is told", || {
        watching.notebook.waits().len() == 1
    })
    .await;
    pod(&server, "job-1-a", waiting("ErrImagePull", "no such host"));
    pod(
        &server,
        "job-1-a",
        waiting("CreateContainerConfigError", "secret \"x\" not found"),
    );
    until("the change is told", || {
        watching.notebook.waits().len() == 2
    })
    .await;
    let waits = watching.notebook.waits();
    assert!(waits[0].contains("no such host") && waits[1].contains("secret \"x\""));
}

#[tokio::test]
async fn a_hopeless_run_is_stopped_reported_and_kept_with_its_verdict() {
    let server = Server::start();
    server.cluster().submit(&inline("1", "a")).await.unwrap();
    let watching = watching(server.cluster(), WatchSettings::default());
    pod(
        &server,
        "job-1-a",
        container(&json!({"waiting": {"reason": "InvalidImageName", "message": "A B"}})),
    );
    until("it is reported", || !watching.notebook.ended().is_empty()).await;
    assert_eq!(watching.notebook.ended()[0].1, VerdictKind::ImageNotPulled);
    let job = server.object("jobs", "job-1-a").unwrap();
    assert_eq!(job["spec"]["activeDeadlineSeconds"], 1);
    server.remove("pods", "job-1-a-x");
    over(&server, "job-1-a", "Failed");
    let explained = server.cluster().explain("job-1-a").await.unwrap();
    assert_eq!(explained.verdict.unwrap().kind, VerdictKind::ImageNotPulled);
    assert_eq!(watching.notebook.ended().len(), 1);
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
    let watching = watching(cluster, WatchSettings::default());
    until("it is said to be at work", || {
        let said = watching.notebook.said.lock().unwrap();
        said.iter().any(|(_, said)| *said == Observation::Running)
    })
    .await;
    assert!(watching.notebook.ended().is_empty());
    over(&server, "job-1-a", "Failed");
    until("it is reported", || !watching.notebook.ended().is_empty()).await;
    assert_eq!(watching.notebook.ended().len(), 1);
}

#[tokio::test]
async fn a_run_that_could_not_be_stopped_is_not_yet_reported_to_have_ended() {
    let server = Server::start();
    server.cluster().submit(&inline("1", "a")).await.unwrap();
    let refusals = Arc::new(Mutex::new(vec![
        StatusCode::FORBIDDEN,
        StatusCode::UNPROCESSABLE_ENTITY,
    ]));
    let left = Arc::clone(&refusals);
    let cluster = server.faulty(move |line, _| {
        let code = line
            .starts_with("PATCH")
            .then(|| left.lock().unwrap().pop())?;
        code.map(|code| refusal(code, "Refused", "an admission webhook says no"))
    });
    let settings = WatchSettings {
        report_again: Duration::from_millis(5),
        ..WatchSettings::default()
    };
    let watching = watching(cluster, settings);
    pod(
        &server,
        "job-1-a",
        container(&json!({"waiting": {"reason": "InvalidImageName", "message": "A B"}})),
    );
    until("it is reported", || !watching.notebook.ended().is_empty()).await;
    assert!(refusals.lock().unwrap().is_empty());
    let job = server.object("jobs", "job-1-a").unwrap();
    assert_eq!(
        job["spec"]["activeDeadlineSeconds"], 1,
        "it is stopped first"
    );
}

#[tokio::test]
async fn a_job_that_somebody_deleted_is_reported_as_deleted() {
    let server = Server::start();
    server.cluster().submit(&inline("1", "a")).await.unwrap();
    let watching = watching(server.cluster(), WatchSettings::default());
    until("it is watched", || {
        !watching.notebook.said.lock().unwrap().is_empty()
    })
    .await;
    server.remove("jobs", "job-1-a");
    until("it is reported", || !watching.notebook.ended().is_empty()).await;
    assert_eq!(watching.notebook.ended()[0].1, VerdictKind::Deleted);
}

/// Never ends a report, except for one run, whose reports fail at once.
struct Slow {
    refused: &'static str,
    asked: Mutex<HashMap<String, usize>>,
}

impl Slow {
    fn asked(&self, run: &str) -> usize {
        self.asked.lock().unwrap().get(run).copied().unwrap_or(0)
    }
}

impl RunObserver for Slow {
    fn on_observation(&self, _: &RunKey, _: &Observation) {}

    fn on_ended<'a>(&'a self, run: &'a RunKey, _: &'a Verdict) -> BoxFuture<'a, ReportOutcome> {
        let run = run.to_string();
        let is_refused = run == self.refused;
        *self.asked.lock().unwrap().entry(run).or_default() += 1;
        if is_refused {
            futures_util::future::ready(ReportOutcome::Retry).boxed()
        } else {
            futures_util::future::pending().boxed()
        }
    }
}

#[tokio::test]
async fn reports_that_take_long_are_made_once_and_keep_no_run_from_its_release() {
    let server = Server::start();
    let cluster = server.cluster().with_max_in_flight(100);
    let steps: Vec<String> = (0..20).map(|number| format!("s{number}")).collect();
    for step in &steps {
        cluster.submit(&inline("1", step)).await.unwrap();
    }
    let slow = Arc::new(Slow {
        refused: "1/s0",
        asked: Mutex::default(),
    });
    let observer: Arc<dyn RunObserver> = Arc::clone(&slow) as _;
    let settings = WatchSettings {
        report_again: Duration::from_millis(5),
        ..WatchSettings::default()
    };
    let watched = cluster.clone();
    let task = tokio::spawn(async move { watched.watch(settings, observer).await });
    until("all are released", || {
        steps
            .iter()
            .all(|step| !suspended(&server, &format!("job-1-{step}")))
    })
    .await;
    for step in &steps[..12] {
        server.remove("jobs", &format!("job-1-{step}"));
    }
    let all = || {
        let of = |step: &String| slow.asked(&format!("1/{step}")) > 0;
        steps[1..12].iter().all(of)
    };
    until("all are asked for", all).await;
    let before = slow.asked("1/s0");
    until("many alarms have gone off", || {
        slow.asked("1/s0") > before + 5
    })
    .await;
    let once = |step: &String| slow.asked(&format!("1/{step}")) == 1;
    assert!(steps[1..12].iter().all(once));
    for step in &steps[12..] {
        server.remove("jobs", &format!("job-1-{step}"));
    }
    cluster.submit(&inline("1", "held")).await.unwrap();
    until("it is released", || !suspended(&server, "job-1-held")).await;
    task.abort();
}

#[tokio::test]
async fn history_keeps_the_newest_that_were_reported() {
    let server = Server::start();
    for step in ["a", "b"] {
        server.cluster().submit(&inline("1", step)).await.unwrap();
        let at = format!("2026-01-01T00:00:0{}Z", if step == "a" { 1 } else { 2 });
        server.put("jobs", json!({"metadata": {"name": format!("job-1-{step}"),
            "annotations": {"mayfly.dev/reported-at": at}},
            "status": {"conditions": [{"type": "Failed", "status": "True", "lastTransitionTime": at}]}}));
    }
    let settings = WatchSettings {
        history: HistoryLimits {
            failed: Some(1),
            successful: None,
        },
        ..WatchSettings::default()
    };
    let _watching = watching(server.cluster(), settings);
    until("the older is removed", || server.count("jobs") == 1).await;
    assert!(server.object("jobs", "job-1-b").is_some());
}

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

/// Lines of this program's own log.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Lines {
    /// What this thread logs from now on, for as long as the guard lives.
    fn of_this_thread() -> (Self, tracing::subscriber::DefaultGuard) {
        let lines = Self::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .finish();
        (lines, tracing::subscriber::set_default(subscriber))
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

#[rstest::rstest]
#[case::a_full_quota(
    403,
    "exceeded quota: secrets, requested: secrets=1",
    "raise the quota"
)]
#[case::a_webhook(
    400,
    "admission webhook \"w\" does not support dry run",
    "NoneOnDryRun"
)]
#[case::a_policy(403, "secrets is forbidden", "api-launcher check")]
#[tokio::test]
async fn a_run_whose_job_data_cannot_be_looked_for_is_told_of_once_with_what_to_do(
    #[case] code: u16,
    #[case] message: &'static str,
    #[case] advice: &str,
) {
    let (lines, _guard) = Lines::of_this_thread();
    let server = Server::start();
    // Its launcher died before the release.
    server
        .crashing(Crash::Within(2))
        .submit(&objects("1", "a"))
        .await
        .unwrap_err();
    let tried = Arc::new(Mutex::new(0));
    let trials = Arc::clone(&tried);
    let cluster = server.faulty(move |line, _| {
        (line.starts_with("POST") && line.ends_with("/secrets")).then(|| {
            *trials.lock().unwrap() += 1;
            refusal(StatusCode::from_u16(code).unwrap(), "Refused", message)
        })
    });
    let _watching = watching(cluster, WatchSettings::default());
    until("it is tried again", || *tried.lock().unwrap() > 1).await;
    assert!(suspended(&server, "job-1-a"));
    let told = lines.text();
    assert_eq!(told.matches("a run stays suspended").count(), 1, "{told}");
    assert!(told.contains(advice) && told.contains("1/a"), "{told}");
}

#[tokio::test]
async fn how_long_a_run_has_waited_is_told_by_the_clock_of_the_api_server() {
    let settings = WatchSettings {
        timeouts: Timeouts {
            no_pod: Duration::from_hours(2),
            ..Timeouts::default()
        },
        ..WatchSettings::default()
    };
    // Hours the server's clock is ahead, hours since it saw the release, and whether that is too long.
    for (ahead, waited, too_long) in [
        (-10, 1, false),
        (10, 1, false),
        (-10, 3, true),
        (10, 3, true),
    ] {
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
        // A launcher that starts only now gives nobody more time.
        let watching = watching(server.cluster(), settings.clone());
        let said = || watching.notebook.said.lock().unwrap().first().cloned();
        until("it is judged", || said().is_some()).await;
        let given_up = matches!(said(), Some((_, Observation::Ended(_))));
        assert_eq!(given_up, too_long, "{ahead} {waited}: {:?}", said());
    }
}

/// The Job controller sets the start time of a Job that was created suspended only when it comes to it.
#[tokio::test]
async fn a_run_is_patiently_waited_for_from_its_release_however_long_ago_it_was_made() {
    let server = Server::start();
    let cluster = server.cluster().with_max_in_flight(1);
    let mut objects = inline("1", "a");
    let long_ago = server.now() - SignedDuration::from_hours(3);
    objects.job.metadata.creation_timestamp = Some(long_ago.into());
    cluster.submit(&objects).await.unwrap();
    let watching = watching(cluster, WatchSettings::default());
    until("it is released", || !suspended(&server, "job-1-a")).await;
    until("it is told of", || {
        !watching.notebook.said.lock().unwrap().is_empty()
    })
    .await;
    let said = watching.notebook.said.lock().unwrap()[0].1.clone();
    let waits = |said: &Observation| matches!(said, Observation::Waiting(wait) if wait.reason == WaitReason::Pod);
    assert!(waits(&said), "{said:?}");
    let job = server.object("jobs", "job-1-a").unwrap();
    assert!(job["status"]["startTime"].is_null());
    assert!(job["spec"]["activeDeadlineSeconds"].is_null());
}

/// Made by an earlier launcher, or released by a queue of the cluster, which write no release down.
#[tokio::test]
async fn a_run_whose_release_nobody_wrote_down_is_waited_for_from_when_it_is_first_seen() {
    let server = Server::start();
    let long_ago = server.now() - SignedDuration::from_hours(3);
    let mut job = serde_json::to_value(inline("1", "a").job).unwrap();
    job["metadata"]["creationTimestamp"] = json!(long_ago.to_string());
    job["spec"]["suspend"] = json!(false);
    server.put("jobs", job);
    let settings = WatchSettings {
        timeouts: Timeouts {
            no_pod_explain: Duration::from_millis(50),
            no_pod: Duration::from_millis(500),
            ..Timeouts::default()
        },
        ..WatchSettings::default()
    };
    let watching = watching(server.cluster(), settings);
    until("it is given up in the end", || {
        !watching.notebook.ended().is_empty()
    })
    .await;
    let said = watching.notebook.said.lock().unwrap();
    let waited = |said: &Observation| matches!(said, Observation::Waiting(_));
    assert!(waited(&said[0].1), "{said:?}");
}

/// A run whose Job is to live for ten minutes after its end.
async fn accepted_for_ten_minutes(server: &Arc<Server>) {
    let mut objects = inline("1", "a");
    objects
        .job
        .spec
        .as_mut()
        .unwrap()
        .ttl_seconds_after_finished = Some(600);
    Box::pin(server.cluster().accept(&objects)).await.unwrap();
}

/// Such a run, which has ended without a word.
async fn ended_without_a_word(server: &Arc<Server>) {
    accepted_for_ten_minutes(server).await;
    until("it is released", || !suspended(server, "job-1-a")).await;
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

const OFTEN: Duration = Duration::from_millis(5);

#[tokio::test]
async fn a_run_whose_report_fails_has_one_series_of_attempts_further_and_further_apart() {
    let server = Server::start();
    ended_without_a_word(&server).await;
    let settings = WatchSettings {
        report_again: Duration::from_millis(500),
        ..WatchSettings::default()
    };
    let deaf = Notebook {
        deaf: Mutex::new(usize::MAX),
        ..Notebook::default()
    };
    let watching = watching_with(server.cluster(), settings, deaf);
    let attempts = || watching.notebook.attempts("1/a");
    until("it is tried", || !attempts().is_empty()).await;
    // Whatever happens to its Job meanwhile is no reason to try again, and neither is that it goes.
    let mut touched = 0;
    until("it is tried for the third time", || {
        touched += 1;
        let noted = json!({"mayfly.dev/touched": touched.to_string()});
        server.put(
            "jobs",
            json!({"metadata": {"name": "job-1-a", "annotations": noted}}),
        );
        attempts().len() == 3
    })
    .await;
    assert!(touched > 10);
    server.remove("jobs", "job-1-a");
    until("it is tried for the fourth time", || attempts().len() == 4).await;
    let attempts = attempts();
    for (before, pause) in [500, 1000, 2000].into_iter().enumerate() {
        let was = attempts[before + 1].duration_since(attempts[before]);
        // The clock of alarms is told in whole milliseconds.
        assert!(was.as_millis() >= pause - 5, "{before}: {was:?}");
    }
}

#[tokio::test]
async fn a_refusal_is_final_and_a_later_watcher_knows_it() {
    let server = Server::start();
    ended_without_a_word(&server).await;
    let settings = || WatchSettings {
        report_again: OFTEN,
        ..WatchSettings::default()
    };
    let refused = || Notebook {
        refusal: Mutex::new(Some("the platform does not know the job")),
        ..Notebook::default()
    };
    let first = watching_with(server.cluster(), settings(), refused());
    until("the refusal is noted", || {
        annotation_of(&server, "job-1-a", "mayfly.dev/report-refused").is_string()
    })
    .await;
    assert_eq!(first.notebook.attempts("1/a").len(), 1);
    // Nobody is to be told any more.
    assert!(has_its_own_time(&server));
    drop(first);
    let second = watching_with(server.cluster(), settings(), refused());
    until("the second watcher knows it", || {
        !second.notebook.said.lock().unwrap().is_empty()
    })
    .await;
    server.remove("jobs", "job-1-a");
    let other = inline("1", "b");
    Box::pin(server.cluster().submit(&other)).await.unwrap();
    until("the second watcher has seen it go", || {
        let said = second.notebook.said.lock().unwrap();
        said.iter().any(|(run, _)| run == "1/b")
    })
    .await;
    assert!(second.notebook.attempts("1/a").is_empty());
}

#[tokio::test]
async fn a_run_is_kept_until_it_is_reported_by_whichever_watcher() {
    let server = Server::start();
    ended_without_a_word(&server).await;
    let day = KEPT_UNREPORTED.as_secs();
    assert_eq!(time_to_live(&server), day);
    let settings = || WatchSettings {
        report_again: OFTEN,
        ..WatchSettings::default()
    };
    let deaf = Notebook {
        deaf: Mutex::new(usize::MAX),
        ..Notebook::default()
    };
    let first = watching_with(server.cluster(), settings(), deaf);
    until("it is tried", || first.notebook.attempts("1/a").len() > 2).await;
    assert_eq!(time_to_live(&server), day);
    drop(first);

    // The next one reports it, and ends before it has noted that.
    let cut = server.faulty(|line, _| {
        line.starts_with("PATCH")
            .then(|| refusal(StatusCode::BAD_REQUEST, "BadRequest", "no"))
    });
    let second = watching(cut, settings());
    until("it is reported", || !second.notebook.ended().is_empty()).await;
    drop(second);
    assert_eq!(time_to_live(&server), day);

    let third = watching(server.cluster(), settings());
    until("it is noted", || {
        annotation_of(&server, "job-1-a", "mayfly.dev/reported-at").is_string()
    })
    .await;
    assert_eq!(third.notebook.ended().len(), 1);
    assert!(has_its_own_time(&server));
}

#[tokio::test]
async fn a_run_that_spoke_for_itself_is_kept_for_its_own_time() {
    let server = Server::start();
    accepted_for_ten_minutes(&server).await;
    spoken_pod(&server, 0);
    over(&server, "job-1-a", "Complete");
    // The first attempt to say so fails.
    let failed = Arc::new(Mutex::new(false));
    let told = Arc::clone(&failed);
    let cluster = server.faulty(move |line, _| {
        let first =
            line.starts_with("PATCH") && !std::mem::replace(&mut *told.lock().unwrap(), true);
        first.then(|| refusal(StatusCode::BAD_REQUEST, "BadRequest", "no"))
    });
    let cluster = cluster.with_report_key(Some(report_key()));
    let watching = watching(cluster, WatchSettings::default());
    until("it was tried", || *failed.lock().unwrap()).await;
    until("its time is set", || has_its_own_time(&server)).await;
    assert!(watching.notebook.ended().is_empty());
}

#[rstest::rstest]
#[case::that_is_kept_for_a_while(Some(600))]
#[case::that_is_kept_for_ever(None)]
#[tokio::test]
async fn the_end_of_a_run_that_spoke_for_itself_is_logged_by_one_watcher_only(
    #[case] keep: Option<i32>,
) {
    let (lines, _guard) = Lines::of_this_thread();
    let server = Server::start();
    let mut objects = inline("1", "a");
    let spec = objects.job.spec.as_mut().unwrap();
    spec.ttl_seconds_after_finished = keep;
    Box::pin(server.cluster().accept(&objects)).await.unwrap();
    spoken_pod(&server, 0);
    over(&server, "job-1-a", "Complete");
    for watcher in ["the first", "the next"] {
        let cluster = server.cluster().with_report_key(Some(report_key()));
        let watching = watching(cluster, WatchSettings::default());
        until(watcher, || {
            let said = watching.notebook.said.lock().unwrap();
            said.iter()
                .any(|(_, said)| matches!(said, Observation::Ended(_)))
        })
        .await;
        until("it is noted", || {
            annotation_of(&server, "job-1-a", "mayfly.dev/reported-at").is_string()
        })
        .await;
        assert!(watching.notebook.ended().is_empty());
    }
    let told = lines.text();
    assert_eq!(told.matches("a run has ended").count(), 1, "{told}");
}

#[tokio::test]
async fn a_run_that_was_given_up_is_kept_for_its_own_time_though_its_report_could_not_be_noted() {
    let server = Server::start();
    accepted_for_ten_minutes(&server).await;
    until("it is released", || !suspended(&server, "job-1-a")).await;
    let patches = Arc::new(Mutex::new(0));
    let made = Arc::clone(&patches);
    let cluster = server.faulty(move |line, _| {
        let mut made = made.lock().unwrap();
        *made += usize::from(line.starts_with("PATCH"));
        // The first one stops the run.
        (line.starts_with("PATCH") && *made == 2)
            .then(|| refusal(StatusCode::BAD_REQUEST, "BadRequest", "no"))
    });
    let watching = watching(cluster, WatchSettings::default());
    pod(
        &server,
        "job-1-a",
        container(&json!({"waiting": {"reason": "InvalidImageName", "message": "A B"}})),
    );
    until("it was tried", || *patches.lock().unwrap() == 2).await;
    assert_eq!(time_to_live(&server), KEPT_UNREPORTED.as_secs());
    over(&server, "job-1-a", "Failed");
    until("its time is set", || has_its_own_time(&server)).await;
    assert_eq!(watching.notebook.attempts("1/a").len(), 1);
}

/// A run whose executor was at work when its node went.
async fn at_work(server: &Arc<Server>) {
    let run = inline("1", "a");
    Box::pin(server.cluster().submit(&run)).await.unwrap();
    let began = Timestamp::now().to_string();
    let mut pod = pod_of(
        server,
        "job-1-a",
        json!({"phase": "Running", "containerStatuses": [{"name": "executor", "image": "",
            "imageID": "", "ready": true, "restartCount": 0, "state": {"running": {"startedAt": began}}}]}),
    );
    pod["status"]["conditions"] =
        json!([{"type": "Ready", "status": "True"}, {"type": "ContainersReady", "status": "True"}]);
    server.put("pods", pod);
}

/// What the node controller writes when a node does not answer.
fn node_does_not_answer(server: &Server) {
    server.put(
        "pods",
        json!({"metadata": {"name": "job-1-a-x"}, "status": {"conditions": [
        {"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]}}),
    );
}

fn watching_life(server: &Arc<Server>, life: Heartbeat) -> Watching {
    let notebook = Notebook {
        life: Mutex::new(Some(life)),
        ..Notebook::default()
    };
    watching_with(server.cluster(), WatchSettings::default(), notebook)
}

#[tokio::test]
async fn a_run_whose_node_is_lost_is_stopped_and_reported_once_its_executor_is_not_heard() {
    let server = Server::start();
    at_work(&server).await;
    let watching = watching_life(&server, Heartbeat::Present);
    until("it runs", || {
        let said = watching.notebook.said.lock().unwrap();
        said.iter().any(|(_, said)| *said == Observation::Running)
    })
    .await;
    node_does_not_answer(&server);
    let begun = Instant::now();
    *watching.notebook.life.lock().unwrap() = Some(Heartbeat::Missing);
    let listened = Duration::from_mins(1);
    while watching.notebook.ended().is_empty() {
        assert!(begun.elapsed() < listened, "it is reported");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(begun.elapsed() >= SILENCE, "one silent moment is no proof");
    assert_eq!(watching.notebook.ended()[0].1, VerdictKind::NodeLost);
    // No other pod takes the place of one that may go on.
    let job = server.object("jobs", "job-1-a").unwrap();
    assert_eq!(job["spec"]["activeDeadlineSeconds"], 1);
    assert!(job["metadata"]["annotations"]["mayfly.dev/verdict"].is_string());
}

#[tokio::test]
async fn a_run_on_a_node_that_cannot_be_reached_goes_on_while_its_executor_is_heard() {
    let server = Server::start();
    at_work(&server).await;
    node_does_not_answer(&server);
    // Kubernetes has given the pod up, and nobody there confirms it.
    let gone = (server.now() - SignedDuration::from_hours(1)).to_string();
    server.put(
        "pods",
        json!({"metadata": {"name": "job-1-a-x", "deletionTimestamp": gone}}),
    );
    let watching = watching_life(&server, Heartbeat::Present);
    let listened = || *watching.notebook.listened.lock().unwrap();
    let begun = Instant::now();
    while begun.elapsed() < SILENCE + LISTEN_AGAIN || listened() < 4 {
        assert!(watching.notebook.ended().is_empty());
        assert!(
            begun.elapsed() < Duration::from_mins(1),
            "it is listened for"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let job = server.object("jobs", "job-1-a").unwrap();
    assert!(job["spec"]["activeDeadlineSeconds"].is_null());
}

#[tokio::test]
async fn where_executors_cannot_be_heard_a_pod_that_is_never_gone_is_lost() {
    let server = Server::start();
    at_work(&server).await;
    node_does_not_answer(&server);
    let watching = watching_life(&server, Heartbeat::Unknown);
    until("it runs", || {
        !watching.notebook.said.lock().unwrap().is_empty()
    })
    .await;
    assert!(watching.notebook.ended().is_empty(), "it may be at work");
    let overdue = (server.now() - SignedDuration::from_secs(31)).to_string();
    server.put(
        "pods",
        json!({"metadata": {"name": "job-1-a-x", "deletionTimestamp": overdue}}),
    );
    until("it is given up", || !watching.notebook.ended().is_empty()).await;
    assert_eq!(watching.notebook.ended()[0].1, VerdictKind::NodeLost);
}

#[tokio::test]
async fn a_run_that_was_kept_for_all_the_time_a_report_may_take_is_not_reported_once_it_is_gone() {
    let server = Server::start();
    ended_without_a_word(&server).await;
    let then = (server.now() - SignedDuration::from_hours(24)).to_string();
    server.put(
        "jobs",
        json!({"metadata": {"name": "job-1-a"}, "status": {"conditions": [
            {"type": "Failed", "status": "True", "lastTransitionTime": then}]}}),
    );
    let settings = WatchSettings {
        report_again: OFTEN,
        ..WatchSettings::default()
    };
    let deaf = Notebook {
        deaf: Mutex::new(usize::MAX),
        ..Notebook::default()
    };
    let watching = watching_with(server.cluster(), settings, deaf);
    let attempts = |run: &str| watching.notebook.attempts(run).len();
    until("it is tried", || attempts("1/a") > 0).await;
    // Its time to live is over.
    server.remove("jobs", "job-1-a");
    let other = inline("1", "b");
    Box::pin(server.cluster().submit(&other)).await.unwrap();
    over(&server, "job-1-b", "Failed");
    until("the other one is tried", || attempts("1/b") > 0).await;
    let before = attempts("1/a");
    until("the other one is tried often", || attempts("1/b") > 6).await;
    assert_eq!(attempts("1/a"), before);
}

#[tokio::test]
async fn a_run_that_was_stopped_for_its_lost_node_has_that_verdict_whoever_reports_it() {
    let server = Server::start();
    at_work(&server).await;
    let overdue = (server.now() - SignedDuration::from_secs(31)).to_string();
    server.put(
        "pods",
        json!({"metadata": {"name": "job-1-a-x", "deletionTimestamp": overdue}}),
    );
    let deaf = Notebook {
        deaf: Mutex::new(usize::MAX),
        ..Notebook::default()
    };
    let first = watching_with(server.cluster(), WatchSettings::default(), deaf);
    until("it is stopped, and not reported", || {
        !first.notebook.attempts("1/a").is_empty()
    })
    .await;
    let job = server.object("jobs", "job-1-a").unwrap();
    assert_eq!(job["spec"]["activeDeadlineSeconds"], 1);
    drop(first);
    server.remove("pods", "job-1-a-x");
    over(&server, "job-1-a", "Failed");
    let second = watching(server.cluster(), WatchSettings::default());
    until("it is reported", || !second.notebook.ended().is_empty()).await;
    assert_eq!(second.notebook.ended()[0].1, VerdictKind::NodeLost);
}

/// A pod of `job-1-a` whose executor was killed, while a container that a webhook put beside it goes on.
fn outlived(server: &Server) {
    let now = Timestamp::now().to_string();
    let status = |name: &str, state: Value| json!({"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state});
    let executor = status(
        "executor",
        json!({"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": now}}),
    );
    let mesh = status("mesh", json!({"running": {"startedAt": now}}));
    let status = json!({"phase": "Running", "containerStatuses": [executor, mesh]});
    pod(server, "job-1-a", status);
}

#[tokio::test]
async fn a_run_ends_with_its_executor_and_what_outlives_it_is_stopped_later_by_whichever_watcher() {
    let server = Server::start();
    let run = inline("1", "a");
    Box::pin(server.cluster().submit(&run)).await.unwrap();
    outlived(&server);
    let settings = |linger: Duration| WatchSettings {
        timeouts: Timeouts {
            linger,
            ..Timeouts::default()
        },
        ..WatchSettings::default()
    };
    let patient = watching(server.cluster(), settings(Duration::from_hours(1)));
    until("it is noted", || {
        annotation_of(&server, "job-1-a", "mayfly.dev/reported-at").is_string()
    })
    .await;
    let reported = [("1/a".to_owned(), VerdictKind::OomKilled)];
    assert_eq!(patient.notebook.ended(), reported);
    let deadline =
        || server.object("jobs", "job-1-a").unwrap()["spec"]["activeDeadlineSeconds"].clone();
    assert_ne!(deadline(), json!(1), "the other container has time to end");
    drop(patient);

    let refused = Arc::new(Mutex::new(false));
    let told = Arc::clone(&refused);
    let cluster = server.faulty(move |line, _| {
        let first =
            line.starts_with("PATCH") && !std::mem::replace(&mut *told.lock().unwrap(), true);
        first.then(|| refusal(StatusCode::BAD_REQUEST, "BadRequest", "no"))
    });
    let impatient = watching(cluster, settings(Duration::ZERO));
    until("it was tried", || *refused.lock().unwrap()).await;
    until("it is stopped", || deadline() == json!(1)).await;
    // With the Job its pod goes, which had told how the run ended.
    server.remove("pods", "job-1-a-x");
    over(&server, "job-1-a", "Failed");
    let explained = server.cluster().explain("job-1-a").await.unwrap();
    let verdict = explained.verdict.unwrap();
    assert_eq!(verdict.kind, VerdictKind::OomKilled);
    assert!(impatient.notebook.ended().is_empty());
}
