//! The launcher dies without a word, and the next one takes over.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use job_contract::Exit;
use job_contract::final_statuses::Ending;
use job_contract::report::{Author, FinalReport, ReportKey, UnreportedStep};
use job_contract::status::{JobStatus, StepStatus};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use platform::local::JobRecord;
use test_peers::process::{ends, has_ended};

use crate::harness::{Barrier, Fixture, Launcher, secret, step_ref};

#[tokio::test(flavor = "multi_thread")]
async fn every_run_accepted_in_a_burst_runs_once_although_the_launcher_is_killed() {
    const JOBS: usize = 40;
    let fixture = Fixture::new();
    let first = fixture.serve(&[]);
    let requests: Vec<_> = (1..=JOBS)
        .map(|job| {
            let request = first.request(&fixture.script(job, ""));
            tokio::spawn(async move {
                let answer = request.send().await.ok()?;
                (answer.status() == 202).then_some(job)
            })
        })
        .collect();
    // In the midst of it: some run, some wait, some are being written.
    first.wait_for("started an executor", |_| true);
    first.crash();
    let mut accepted = BTreeSet::new();
    for request in requests {
        accepted.extend(request.await.unwrap());
    }

    let second = fixture.serve(&[]);
    // The platform delivers again what it got no answer to, and something it did.
    for job in 1..=JOBS {
        if !accepted.contains(&job) || job % 5 == 0 {
            second.post(&fixture.script(job, "")).await;
        }
    }
    for job in 1..=JOBS {
        // A run that the first launcher saw to its end is not told by the second.
        if !is_over(&fixture, job) {
            second.wait_for_end(job, "step");
        }
        assert_eq!(fixture.times_run(job), 1, "job {job}");
        assert_eq!(
            fixture.step_status(job, "step"),
            StepStatus::Completed,
            "job {job}"
        );
    }
    assert_eq!(fixture.claims(), JOBS);
}

fn is_over(fixture: &Fixture, job: usize) -> bool {
    let record = fixture.platform().job(&job.to_string()).unwrap();
    record.is_some_and(|record| record.status.is_over())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_outlives_its_launcher_is_waited_for() {
    let fixture = Fixture::new();
    let first = fixture.serve(&[]);
    let barrier = fixture.barrier("barrier");
    first.post(&fixture.script(1, &barrier.wait())).await;
    barrier.reached();
    first.crash();

    let second = fixture.serve(&[]);
    second.wait_for("found the executor of a former launcher at work", |_| true);
    second.post(&fixture.script(1, &barrier.wait())).await;
    barrier.open();
    second.wait_for_end(1, "step");
    assert_eq!(fixture.record(1).status, JobStatus::Completed);
    assert_eq!(fixture.times_run(1), 1);
    assert_eq!(second.count("started an executor"), 0);
    assert_eq!(fixture.leftovers(), Vec::<std::path::PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claimed_step_whose_executor_is_killed_too_fails_and_is_not_run_again() {
    let fixture = Fixture::new();
    let first = fixture.serve(&[]);
    let barrier = fixture.barrier("barrier");
    let job = fixture.script(1, &format!("echo so far; {}", barrier.wait()));
    first.post(&job).await;
    barrier.reached();
    let executor = fixture.executor(1);
    first.crash();
    killpg(executor, Signal::SIGKILL).unwrap();

    let second = fixture.serve(&[]);
    second.wait_for_end(1, "step");
    let record = fixture.record(1);
    assert_eq!(record.status, JobStatus::Failed);
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Failed);
    let output = fixture.output(1, "step");
    assert!(
        output.contains("was lost") || output.contains("has failed"),
        "{output}"
    );
    second.post(&job).await;
    second.post(&fixture.script(2, "")).await;
    second.wait_for_end(2, "step");
    assert_eq!(fixture.times_run(1), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_is_killed_fails_its_step() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[]);
    let barrier = fixture.barrier("barrier");
    let job = fixture.script(1, &format!("echo so far; {}", barrier.wait()));
    launcher.post(&job).await;
    barrier.reached();
    fixture.wait_for_log(1, "so far");
    killpg(fixture.executor(1), Signal::SIGKILL).unwrap();
    launcher.wait_for_end(1, "step");
    assert_eq!(fixture.record(1).status, JobStatus::Failed);
    let output = fixture.output(1, "step");
    assert!(output.contains("SIGKILL"), "{output}");
    assert!(output.contains("so far"), "{output}");
}

/// A script that notes its id, has a child that does the same in a session of its own and elsewhere, and waits.
fn entangled(fixture: &Fixture, barrier: &Barrier) -> String {
    let (own, child) = (fixture.path("script"), fixture.path("child"));
    format!(
        "echo $$ > {}\n\
         setsid --fork bash -c 'cd /; trap \"\" TERM INT; echo $$ > {}; while :; do sleep 1; done' \
         </dev/null >/dev/null 2>&1\n\
         until [[ -s {} ]]; do :; done\n{}",
        own.display(),
        child.display(),
        child.display(),
        barrier.wait(),
    )
}

/// What the two have noted, which are at work.
fn both_at_work(fixture: &Fixture) -> [Pid; 2] {
    ["script", "child"].map(|name| {
        let noted = fs::read_to_string(fixture.path(name)).unwrap();
        let process = Pid::from_raw(noted.trim().parse().unwrap());
        assert!(!has_ended(process), "{name}");
        process
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn all_processes_of_a_step_end_once_its_executor_is_killed() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[]);
    let barrier = fixture.barrier("barrier");
    launcher
        .post(&fixture.script(1, &entangled(&fixture, &barrier)))
        .await;
    barrier.reached();
    let both = both_at_work(&fixture);
    kill(fixture.executor(1), Signal::SIGKILL).unwrap();
    launcher.wait_for_end(1, "step");
    both.into_iter().for_each(until_gone);
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Failed);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_processes_of_a_step_end_once_its_executor_and_launcher_are_killed() {
    let fixture = Fixture::new();
    let first = fixture.serve(&[]);
    let barrier = fixture.barrier("barrier");
    first
        .post(&fixture.script(1, &entangled(&fixture, &barrier)))
        .await;
    barrier.reached();
    let executor = fixture.executor(1);
    first.crash();
    kill(executor, Signal::SIGKILL).unwrap();
    until_gone(executor);
    let both = both_at_work(&fixture);
    let second = fixture.serve(&[]);
    second.wait_for_end(1, "step");
    both.into_iter().for_each(until_gone);
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Failed);
}

/// The report as the executor of job 1 leaves it.
fn sealed(fixture: &Fixture, report: &FinalReport) -> String {
    let data = fixture.path(".").canonicalize().unwrap().join("data");
    let run = data.join("launcher/queue/runs/1_step/work");
    let run = run.to_str().unwrap();
    let report = FinalReport {
        author: Some(Author {
            run: run.to_owned(),
            exit_code: report.outcome,
        }),
        ..report.clone()
    };
    let key = ReportKey::parse(&secret()).unwrap().secret_of_run(run);
    report.to_termination_message(Some(&ReportKey::parse(&key).unwrap()))
}

/// An executor that does as told: `words`, then its report and its end.
fn executor(fixture: &Fixture, words: &str, report: &FinalReport) -> String {
    executor_that_leaves(fixture, words, &sealed(fixture, report), report.outcome)
}

fn executor_that_leaves(fixture: &Fixture, words: &str, message: &str, code: u8) -> String {
    let said = fixture.path("said");
    fs::write(&said, message).unwrap();
    let program = fixture.path("executor");
    let script = format!(
        "#!/bin/bash\necho so far\n{words}\ncp {} \"$MAYFLY_TERMINATION_LOG\"\nexit {}\n",
        said.display(),
        code
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    program.to_str().unwrap().to_owned()
}

/// Of an executor to which the platform did not listen.
fn done() -> FinalReport {
    FinalReport {
        outcome: Exit::Done.code(),
        unreported: true,
        unreported_step: Some(UnreportedStep {
            ending: Ending::Success,
            after_ok: true,
            ignore_error: false,
            plan: None,
        }),
        ..FinalReport::default()
    }
}

fn assert_told_as_done(fixture: &Fixture) {
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Completed);
    assert_eq!(fixture.record(1).status, JobStatus::Completed);
    let output = fixture.output(1, "step");
    assert!(output.starts_with("so far\n"), "{output}");
    assert!(output.contains("so the launcher did"), "{output}");
    assert_eq!(fixture.leftovers(), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_step_without_a_report_is_reported_with_its_log() {
    let fixture = Fixture::new();
    let program = executor(&fixture, "", &done());
    let launcher = fixture.serve(&[("MAYFLY_EXECUTOR", &program)]);
    launcher.post(&fixture.script(1, "")).await;
    launcher.wait_for_end(1, "step");
    assert_told_as_done(&fixture);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_launcher_reports_a_step_that_finished_without_a_report() {
    for watched in [true, false] {
        let fixture = Fixture::new();
        let barrier = fixture.barrier("barrier");
        let program = executor(&fixture, &barrier.wait(), &done());
        let second = taken_over(&fixture, &barrier, &program, watched).await;
        second.wait_for_end(1, "step");
        assert_told_as_done(&fixture);
        assert_eq!(second.count("started an executor"), 0);
    }
}

/// The run's own code can write to that file, also what an earlier executor of the run has sealed.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_is_not_reported_as_done_because_of_an_unsealed_report() {
    let unsealed = |_: &Fixture| serde_json::to_string(&done()).unwrap();
    let of_another_end = |fixture: &Fixture| sealed(fixture, &done());
    for forged in [&unsealed as &dyn Fn(&Fixture) -> String, &of_another_end] {
        let fixture = Fixture::new();
        let program = executor_that_leaves(&fixture, "", &forged(&fixture), 1);
        let launcher = fixture.serve(&[("MAYFLY_EXECUTOR", &program)]);
        launcher.post(&fixture.script(1, "")).await;
        launcher.wait_for_end(1, "step");
        assert_eq!(fixture.step_status(1, "step"), StepStatus::Failed);
        assert_eq!(fixture.record(1).status, JobStatus::Failed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_outcome_of_a_cancelled_step_is_not_reported() {
    let fixture = Fixture::new();
    let barrier = fixture.barrier("barrier");
    let words = format!("trap '' TERM; {}", barrier.wait());
    let program = executor(&fixture, &words, &done());
    let launcher = fixture.serve(&[("MAYFLY_EXECUTOR", &program)]);
    let job = fixture.script(1, "");
    launcher.post(&job).await;
    barrier.reached();
    let cancel = |record: &mut JobRecord| record.status = JobStatus::Cancelled;
    fixture
        .platform()
        .update_job(&step_ref(&job), cancel)
        .unwrap();
    barrier.open();
    launcher.wait_for_end(1, "step");
    assert_eq!(fixture.record(1).status, JobStatus::Cancelled);
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Cancelled);
}

/// How an executor ended is not known to a launcher that did not start it; what it said is.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_another_executor_holds_is_left_to_it_by_the_next_launcher_too() {
    let claimed = FinalReport {
        outcome: Exit::Claimed.code(),
        unreported: true,
        error: Some("step step was already taken by pod other".to_owned()),
        ..FinalReport::default()
    };
    for watched in [true, false] {
        let fixture = Fixture::new();
        let barrier = fixture.barrier("barrier");
        let program = executor(&fixture, &barrier.wait(), &claimed);
        let second = taken_over(&fixture, &barrier, &program, watched).await;
        second.wait_for_end(1, "step");
        assert_eq!(second.count("another executor holds the step"), 1);
        assert!(!fixture.record(1).status.is_over());
        assert_eq!(fixture.step_status(1, "step"), StepStatus::Pending);
    }
}

/// An executor before which infrastructure fails so often; then the step is done. It notes that it was there.
fn executor_behind_failures(fixture: &Fixture, failures: usize) -> String {
    let lost = FinalReport {
        outcome: Exit::Infrastructure.code(),
        unreported: true,
        error: Some("registry.example.test does not answer".to_owned()),
        ..FinalReport::default()
    };
    let failure = fixture.path("failure");
    fs::write(&failure, sealed(fixture, &lost)).unwrap();
    let words = format!(
        "echo 1 >> {ledger}\nif (( $(wc -l < {ledger}) <= {failures} )); then\n\
         cp {} \"$MAYFLY_TERMINATION_LOG\"\nexit {}\nfi",
        failure.display(),
        lost.outcome,
        ledger = fixture.path("ledger").display(),
    );
    executor(fixture, &words, &done())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_before_which_infrastructure_failed_is_started_again() {
    let fixture = Fixture::new();
    let program = executor_behind_failures(&fixture, 1);
    let launcher = fixture.serve(&[("MAYFLY_EXECUTOR", &program)]);
    launcher.post(&fixture.script(1, "")).await;
    launcher.wait_for_end(1, "step");
    assert_eq!(fixture.times_run(1), 2);
    assert_told_as_done(&fixture);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_before_which_infrastructure_fails_again_and_again_fails_with_the_reason() {
    let fixture = Fixture::new();
    let program = executor_behind_failures(&fixture, 99);
    let launcher = fixture.serve(&[("MAYFLY_EXECUTOR", &program)]);
    launcher.post(&fixture.script(1, "")).await;
    launcher.wait_for_end(1, "step");
    assert_eq!(fixture.times_run(1), 3);
    assert_eq!(fixture.record(1).status, JobStatus::Failed);
    let output = fixture.output(1, "step");
    assert!(
        output.contains("registry.example.test does not answer"),
        "{output}"
    );
}

/// A claimed step is nobody's but the one's who claimed it, whatever that one says.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_was_taken_is_not_started_again_whatever_its_executor_ends_with() {
    let fixture = Fixture::new();
    let barrier = fixture.barrier("barrier");
    let wait = format!("{}\n", barrier.wait());
    let words = fs::read_to_string(executor_behind_failures(&fixture, 99)).unwrap();
    let program = fixture.path("executor");
    fs::write(&program, words.replacen('\n', &format!("\n{wait}"), 1)).unwrap();
    let launcher = fixture.serve(&[("MAYFLY_EXECUTOR", program.to_str().unwrap())]);
    let job = fixture.script(1, "");
    launcher.post(&job).await;
    barrier.reached();
    fixture.claim(&job).await;
    barrier.open();
    launcher.wait_for_end(1, "step");
    assert_eq!(fixture.times_run(1), 1);
    assert_eq!(fixture.record(1).status, JobStatus::Failed);
}

/// A launcher after one that has crashed, and whose executor comes to its end while it is watched, or before.
async fn taken_over(
    fixture: &Fixture,
    barrier: &Barrier,
    program: &str,
    watched: bool,
) -> Launcher {
    let settings = [("MAYFLY_EXECUTOR", program)];
    let first = fixture.serve(&settings);
    let job = fixture.script(1, "");
    first.post(&job).await;
    first.wait_for("started an executor", |_| true);
    barrier.reached();
    fixture.claim(&job).await;
    let executor = fixture.executor(1);
    first.crash();
    if watched {
        let second = fixture.serve(&settings);
        second.wait_for("found the executor of a former launcher at work", |_| true);
        barrier.open();
        second
    } else {
        barrier.open();
        until_gone(executor);
        fixture.serve(&settings)
    }
}

fn until_gone(process: Pid) {
    assert!(ends(process), "{process} goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_left_on_purpose_are_found_again() {
    let fixture = Fixture::new();
    let first = fixture.serve(&[("MAYFLY_RUNS_ON_STOP", "leave")]);
    let barrier = fixture.barrier("barrier");
    first.post(&fixture.script(1, &barrier.wait())).await;
    barrier.reached();
    first.signal(Signal::SIGTERM);
    first.wait_for("stopped", |_| true);
    assert!(first.end().success());

    let second = fixture.serve(&[]);
    barrier.open();
    second.wait_for_end(1, "step");
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Completed);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_data_directory_has_one_launcher() {
    let fixture = Fixture::new();
    let _first = fixture.serve(&[]);
    let second = std::process::Command::new(env!("CARGO_BIN_EXE_api-launcher"))
        .args(["serve", "--target=process", "--listen=127.0.0.1:0"])
        .env("MAYFLY_ALLOW_UNAUTHENTICATED", "true")
        .env("MAYFLY_DATA_DIR", fixture.data())
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(75));
    let stderr = String::from_utf8(second.stderr).unwrap();
    assert!(stderr.contains("another launcher serves"), "{stderr}");
}
