//! The observer before a platform that is away, and before a cluster that keeps logs.

use std::convert::Infallible;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use axum::http::{Request, Response};
use futures_util::future::join_all;
use job_contract::Exit;
use job_contract::status::JobStatus;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::client::Body;
use platform::local::StepRecord;
use platform::redis::{Redis, RedisArgs};
use platform::terrakube::{Terrakube, TerrakubeArgs};
use reporter::{LocalReporter, TerrakubeReporter};
use serde_json::json;
use tower::service_fn;
use verdict::{Started, Wait, WaitReason};

use super::*;

fn run() -> RunRef {
    RunRef {
        job_id: "412".into(),
        step_id: "step".into(),
        name: "job-412-step".into(),
        organization_id: "org".into(),
        workspace_id: "ws".into(),
        step_type: "terraformPlan",
        lease: None,
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
        started: Started::Yes,
        may_change: true,
        job_over: true,
        pod: Some("run-a".into()),
        report: None,
    }
}

fn assert_says(metrics: &Metrics, lines: &[&str]) {
    let text = metrics.render();
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
        Some(Arc::new(LocalReporter::new(folder.path()))),
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

/// A cluster whose containers have printed lines. The test releases them one by one. The number counts how many
/// of them are being given out.
fn cluster(turns: Arc<Semaphore>, given: Arc<Given>) -> Cluster {
    let service = service_fn(move |request: Request<Body>| {
        let (turns, given) = (Arc::clone(&turns), Arc::clone(&given));
        async move {
            let path = request.uri().path();
            assert!(path.ends_with("/pods/run-a/log"), "{path}");
            let at_once = given.at_once.fetch_add(1, Ordering::SeqCst) + 1;
            given.most.fetch_max(at_once, Ordering::SeqCst);
            turns.acquire().await.unwrap().forget();
            given.at_once.fetch_sub(1, Ordering::SeqCst);
            let own =
                json!({"timestamp": "t", "level": "INFO", "message": "m", "target": "executor"});
            let answer = format!("{own}\nall it said\n");
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
    let reporter = Arc::new(LocalReporter::new(folder.path()));
    let (turns, given) = (Arc::new(Semaphore::new(0)), Arc::new(Given::default()));
    let observer = Observer::new(Some(reporter.clone()), Metrics::default())
        .recovering_from(cluster(Arc::clone(&turns), Arc::clone(&given)));
    let runs = (0..RUNS).map(|n| RunRef {
        job_id: n.to_string(),
        ..run()
    });
    let runs: Vec<RunRef> = runs.collect();
    for run in &runs {
        let queued = reporter.records().update_job(&step_of(run), |record| {
            record.status = JobStatus::Running;
            record
                .steps
                .push(StepRecord::pending("step", "terraformPlan"));
        });
        queued.unwrap();
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
fn away() -> Arc<dyn PlatformReporter> {
    let terrakube = TerrakubeArgs {
        api_url: Some("http://127.0.0.1:1".into()),
        public_api_url: Some("http://127.0.0.1:1".into()),
        enable_security: Some("false".into()),
        report_patience_seconds: Some("600".into()),
        ..TerrakubeArgs::default()
    };
    let redis = RedisArgs {
        redis_hostname: Some("127.0.0.1".into()),
        redis_port: Some("1".into()),
        ..RedisArgs::default()
    };
    let redis = Redis::new(redis.resolve().unwrap().unwrap());
    let config = terrakube.resolve().unwrap().unwrap();
    let terrakube = Terrakube::new(config, Some(redis.clone())).unwrap();
    Arc::new(TerrakubeReporter::new(terrakube, None, Some(redis)).unwrap())
}

#[tokio::test]
async fn a_held_run_has_a_heartbeat_until_it_is_watched_or_dropped() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let metrics = Metrics::default().for_cluster();
    let observer = Observer::new(Some(away()), metrics.clone());
    let beats = || observer.runs.heartbeats.count();
    observer.on_held(&run());
    observer.on_held(&run());
    assert_eq!(beats(), 1);
    observer.on_forgotten(&run());
    assert_eq!(beats(), 0);

    // One heart is enough for a run that is watched, though its Job is seen to be held once more.
    observer.on_held(&run());
    observer.on_observation(&run(), &waits());
    observer.on_held(&run());
    assert_eq!(beats(), 1);
    observer.on_forgotten(&run());
    assert_eq!(beats(), 0);
    assert!(observer.runs.tracked().is_empty());

    // A run that its launcher completed needs no report.
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
async fn a_replica_that_no_longer_watches_sends_no_heartbeats() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let observer = Arc::new(Observer::new(Some(away()), Metrics::default()));
    let other = RunRef {
        job_id: "413".into(),
        ..run()
    };
    let beats = || observer.runs.heartbeats.count();
    let guard = observer.start_watch();
    observer.on_observation(&run(), &Observation::InProgress);
    observer.on_running(&run(), Some(Duration::ZERO));
    observer.on_held(&other);
    assert_eq!(beats(), 2);
    drop(guard);
    assert_eq!(beats(), 0);
    // What was under way.
    observer.on_running(&run(), None);
    observer.runs.mark_ended(&run());
    observer.on_held(&other);
    assert_eq!(beats(), 0);
}

#[tokio::test]
async fn a_job_whose_end_the_platform_does_not_accept_has_a_heartbeat_for_a_limited_time() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let observer = Observer::new(Some(away()), Metrics::default());
    let reporter = observer.reporter.clone().unwrap();
    let beats = |after: Duration| {
        let (patience, now) = (reporter.report_patience(), Instant::now() + after);
        observer.runs.stop_late_heartbeats(patience, now);
        observer.runs.heartbeats.count() == 1
    };
    observer.on_observation(&run(), &Observation::InProgress);
    beats(Duration::from_hours(1));
    // Its executor's own heartbeat is over.
    observer.runs.mark_ended(&run());
    assert!(beats(Duration::from_mins(9)), "there is still time");
    assert!(!beats(Duration::from_mins(10)));
    observer.runs.mark_ended(&run());
    assert_eq!(observer.runs.heartbeats.count(), 0);
}
