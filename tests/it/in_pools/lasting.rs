//! Journeys that take minutes. The stage `pools` of `cargo xtask ci` runs them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use integration_tests::process::Stream;
use integration_tests::{Repository, Running};
use job_contract::env;
use nix::sys::signal::{Signal, kill};
use test_peers::proxy::Moment;
use test_peers::wait::{DEADLINE, within};
use test_platform::{Flow, NewJob, Status, Workspace};

use super::agent::ends_with;
use super::kills::{Point, Run, STARTED, try_points};

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn a_run_ends_once_wherever_a_process_is_killed_or_a_call_is_lost() {
    let tried = try_points(|_, _| true).await;
    tried.assert_hit(Point::of);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_executor_that_was_cut_off_before_its_claim_changes_nothing_later() {
    let mut run = Run::start().await;
    run.start_agent();
    run.until_asked_for_tasks().await;
    let held = run.to_hub.hold(|call| call.is(STARTED, 1, Moment::Sent));
    let job = run.fixture.start_note();
    let held = held.await.unwrap();
    // Neither the agent nor its executor reaches the hub any more.
    run.to_hub.cut();
    drop(held);
    let hub = run.hub.as_ref().unwrap().url();
    let other = Running::start(&mut run.fixture.agent_named("eu-2", "other", &hub));
    run.fixture.platform.until_job(job, Status::Completed).await;
    let changes = run.changes();
    other.signal(Signal::SIGTERM);
    ends_with(other, 0);
    run.to_hub.heal();
    // Its executor asks again after a pause of up to a minute. The answer is that the job is over, or the lease.
    let agent = run.agent.as_ref().unwrap();
    let has_ended = async || {
        let log = agent.text(Stream::Stderr);
        let ends = ["another executor has the task", "a task has ended"];
        let has_ended = ends.iter().any(|end| log.contains(end));
        if has_ended { Ok(()) } else { Err(log) }
    };
    let ended = within(2 * DEADLINE, "the end of the executor", has_ended).await;
    ended.unwrap();
    run.assert_nothing_left().await;
    assert_eq!((run.fixture.times_run(), run.changes()), (1, changes));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_run_that_is_cut_off_for_a_while_completes_and_its_log_says_so_once() {
    // The executor waits for 110 s. The hub misses its heartbeats after 70.
    let mut run = Run::start_with(&[(env::POOL_LOST_SECONDS, "140")]).await;
    run.start_agent();
    let gate = run.fixture.gate();
    let job = run.fixture.start_script(&gate);
    let platform = &run.fixture.platform;
    platform.until_streamed(job, "at-the-gate").await;
    run.to_hub.cut();
    platform
        .until_streamed(job, "No heartbeat from the executor")
        .await;
    run.to_hub.heal();
    let hub = run.hub.as_ref().unwrap();
    hub.until_metric(r#"mayfly_pool_tasks{pool="eu",state="orphaned"} 0"#)
        .await;
    let lines = platform.streamed(job).await;
    let lines = lines
        .iter()
        .filter(|line| line.output.contains("No heartbeat from"));
    assert_eq!(lines.count(), 1);
    gate.open().await;
    platform.until_job(job, Status::Completed).await;
    run.assert_nothing_left().await;
    assert_eq!(
        (
            run.fixture.times_run(),
            run.fixture.reports(job, Status::Failed)
        ),
        (1, 0)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_run_that_is_cut_off_for_good_fails_once_and_its_executor_stops() {
    let mut run = Run::start_with(&[(env::POOL_LOST_SECONDS, "40")]).await;
    run.start_agent();
    let gate = run.fixture.gate();
    let job = run.fixture.start_script(&gate);
    let platform = &run.fixture.platform;
    platform.until_streamed(job, "at-the-gate").await;
    run.to_hub.cut();
    platform.until_job(job, Status::Failed).await;
    let output = run.fixture.output(job);
    for words in [
        "no heartbeat from",
        "eu-1",
        "may have changed the infrastructure",
    ] {
        assert!(output.contains(words), "{words}: {output}");
    }
    let changes = run.changes();
    run.to_hub.heal();
    run.assert_nothing_left().await;
    assert_eq!(run.changes(), changes);
    // One of the job, and one of its step.
    assert_eq!(run.fixture.reports(job, Status::Failed), 2);
}

/// A change of a step's status. The second one is its outcome.
const OUTCOME: &str = "PATCH /api/v1/organization/{}/job/{}/step/{}";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_plan_that_its_executor_cannot_report_is_applied_all_the_same() {
    let mut run = Run::start().await;
    run.start_agent();
    run.until_asked_for_tasks().await;
    let held = run
        .to_platform
        .hold(|call| call.is(OUTCOME, 2, Moment::Sent));
    let repository = Repository::fixture();
    let platform = &run.fixture.platform;
    let workspace = platform.workspace(Workspace::new(&repository.url()));
    let job = platform.start_job(NewJob::new(&workspace, Flow::plan_apply()));
    let held = held.await.unwrap();
    run.to_platform.cut();
    drop(held);
    // Stopped, it repeats its report only until its grace period ends.
    kill(run.fixture.executor(), Signal::SIGTERM).unwrap();
    let hub = run.hub.as_ref().unwrap();
    let owed = r#"mayfly_pool_tasks{pool="eu",state="unreported"} 1"#;
    let has_given_up = || async { hub.get("/metrics").await.contains(owed) };
    let gives_up = within(2 * DEADLINE, "the executor gives up", has_given_up).await;
    gives_up.unwrap();
    run.to_platform.heal();
    let done = platform.until_job(job, Status::Completed).await;
    assert_eq!(done.step_statuses(), [Status::Completed; 2]);
    let output = platform.step_output(job, &done.step_of("terraformApply").id);
    assert!(output.unwrap_or_default().contains("1 added"));
    run.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_run_that_never_starts_is_given_up_after_five_attempts_and_others_run_meanwhile() {
    let mut run = Run::start().await;
    let given_up = run.fixture.start_note();
    let program = run.fixture.path("executor");
    let script = format!(
        "#!/bin/sh\ngrep -q '\"run\":\"{given_up}/' \"${{{}%/*}}/lease.json\" && exit 75\nexec '{}'\n",
        env::TERMINATION_LOG,
        crate::EXECUTOR,
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = run.fixture.agent(&run.to_hub.url());
    run.agent = Some(Running::start(command.env(env::EXECUTOR, &program)));
    let hub = run.hub.as_ref().unwrap();
    hub.until_metric(r#"mayfly_pool_declined_total{pool="eu",reason="failed"} 1"#)
        .await;
    let other = run.fixture.start_note();
    run.fixture
        .platform
        .until_job(other, Status::Completed)
        .await;
    // The last pause alone takes 80 s.
    let has_failed = || async { run.fixture.platform.job(given_up).status == Status::Failed };
    let fails = within(3 * DEADLINE, "the run is given up", has_failed).await;
    assert!(fails.is_ok(), "{}", run.fixture.platform.report());
    let output = run.fixture.output(given_up);
    assert!(output.contains("given up after 5 attempts"), "{output}");
    for number in 1..=5 {
        assert!(
            output.contains(&format!("{number}. agent eu-1 declined it")),
            "{output}"
        );
    }
    let hub = run.hub.as_ref().unwrap();
    hub.until_metric(r#"mayfly_pool_poison_total{pool="eu"} 1"#)
        .await;
    run.assert_nothing_left().await;
    assert_eq!(run.fixture.times_run(), 1);
}
