//! The launcher dies without a word, and the next one takes over.

use std::collections::BTreeSet;

use job_contract::status::{JobStatus, StepStatus};
use nix::sys::signal::{Signal, killpg};

use crate::harness::Place;

#[tokio::test(flavor = "multi_thread")]
async fn every_run_accepted_in_a_burst_runs_once_although_the_launcher_is_killed() {
    const JOBS: usize = 40;
    let place = Place::new();
    let mut first = place.serve(&[]);
    let requests: Vec<_> = (1..=JOBS)
        .map(|job| {
            let request = first.request(&place.script(job, ""));
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

    let mut second = place.serve(&[]);
    // The platform delivers again what it got no answer to, and something it did.
    for job in 1..=JOBS {
        if !accepted.contains(&job) || job % 5 == 0 {
            second.post(&place.script(job, "")).await;
        }
    }
    for job in 1..=JOBS {
        // A run that the first launcher saw to its end is not told by the second.
        if !is_over(&place, job) {
            second.wait_for_end(job, "step");
        }
        assert_eq!(place.times_run(job), 1, "job {job}");
        assert_eq!(
            place.step_status(job, "step"),
            StepStatus::Completed,
            "job {job}"
        );
    }
    assert_eq!(place.claims(), JOBS);
}

fn is_over(place: &Place, job: usize) -> bool {
    let record = place.platform().job(&job.to_string()).unwrap();
    record.is_some_and(|record| record.status.is_over())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_outlives_its_launcher_is_waited_for() {
    let place = Place::new();
    let first = place.serve(&[]);
    let barrier = place.barrier("barrier");
    first.post(&place.script(1, &barrier.wait())).await;
    barrier.reached();
    first.crash();

    let mut second = place.serve(&[]);
    second.wait_for("found the executor of a former launcher at work", |_| true);
    second.post(&place.script(1, &barrier.wait())).await;
    barrier.open();
    second.wait_for_end(1, "step");
    assert_eq!(place.record(1).status, JobStatus::Completed);
    assert_eq!(place.times_run(1), 1);
    assert_eq!(second.count("started an executor"), 0);
    assert_eq!(place.leftovers(), Vec::<std::path::PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claimed_step_whose_executor_died_too_is_failed_and_not_run_again() {
    let place = Place::new();
    let first = place.serve(&[]);
    let barrier = place.barrier("barrier");
    let job = place.script(1, &format!("echo so far; {}", barrier.wait()));
    first.post(&job).await;
    barrier.reached();
    let executor = place.executor(1);
    first.crash();
    killpg(executor, Signal::SIGKILL).unwrap();

    let mut second = place.serve(&[]);
    second.wait_for_end(1, "step");
    let record = place.record(1);
    assert_eq!(record.status, JobStatus::Failed);
    assert_eq!(place.step_status(1, "step"), StepStatus::Failed);
    let output = place.output(1, "step");
    assert!(
        output.contains("was lost") || output.contains("has failed"),
        "{output}"
    );
    second.post(&job).await;
    second.post(&place.script(2, "")).await;
    second.wait_for_end(2, "step");
    assert_eq!(place.times_run(1), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_is_killed_fails_its_step() {
    let place = Place::new();
    let mut launcher = place.serve(&[]);
    let barrier = place.barrier("barrier");
    let job = place.script(1, &format!("echo so far; {}", barrier.wait()));
    launcher.post(&job).await;
    barrier.reached();
    place.wait_for_log(1, "so far");
    killpg(place.executor(1), Signal::SIGKILL).unwrap();
    launcher.wait_for_end(1, "step");
    assert_eq!(place.record(1).status, JobStatus::Failed);
    let output = place.output(1, "step");
    assert!(output.contains("SIGKILL"), "{output}");
    assert!(output.contains("so far"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_left_on_purpose_are_found_again() {
    let place = Place::new();
    let mut first = place.serve(&[("MAYFLY_RUNS_ON_STOP", "leave")]);
    let barrier = place.barrier("barrier");
    first.post(&place.script(1, &barrier.wait())).await;
    barrier.reached();
    first.signal(Signal::SIGTERM);
    first.wait_for("stopped", |_| true);
    assert!(first.end().success());

    let mut second = place.serve(&[]);
    barrier.open();
    second.wait_for_end(1, "step");
    assert_eq!(place.step_status(1, "step"), StepStatus::Completed);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_data_directory_has_one_launcher() {
    let place = Place::new();
    let _first = place.serve(&[]);
    let second = std::process::Command::new(env!("CARGO_BIN_EXE_api-launcher"))
        .args(["serve", "--target=process", "--listen=127.0.0.1:0"])
        .env("MAYFLY_ALLOW_UNAUTHENTICATED", "true")
        .env("MAYFLY_DATA_DIR", place.data())
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(75));
    let stderr = String::from_utf8(second.stderr).unwrap();
    assert!(stderr.contains("another launcher serves"), "{stderr}");
}
