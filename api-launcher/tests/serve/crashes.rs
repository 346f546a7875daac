//! The launcher dies without a word, and the next one takes over.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;

use job_contract::Exit;
use job_contract::final_statuses::Ending;
use job_contract::report::{FinalReport, UnreportedStep};
use job_contract::status::{JobStatus, StepStatus};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use test_peers::gate::Gate;
use test_peers::process::{Running, ends, has_ended};

use crate::harness::{Fixture, Launcher};

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
        second.wait_for_end(job, "step");
        assert_eq!(fixture.times_run(job), 1, "job {job}");
        assert_eq!(
            fixture.step_status(job, "step"),
            StepStatus::Completed,
            "job {job}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_outlives_its_launcher_is_waited_for() {
    let fixture = Fixture::new();
    let first = fixture.serve(&[]);
    let gate = fixture.gate();
    first.post(&fixture.script(1, &gate.words())).await;
    let at_gate = gate.reached();
    first.crash();

    let second = fixture.serve(&[]);
    second.wait_for("found an executor of an earlier agent", |_| true);
    second.post(&fixture.script(1, &gate.words())).await;
    drop(at_gate);
    second.wait_for_end(1, "step");
    assert_eq!(fixture.record(1).status, JobStatus::Completed);
    assert_eq!(fixture.times_run(1), 1);
    assert_eq!(second.count("started an executor"), 0);
    fixture.until_no_folders();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claimed_step_whose_executor_is_killed_too_fails_and_is_not_run_again() {
    let fixture = Fixture::new();
    let first = fixture.serve(&[("MAYFLY_ALLOW_UNAUTHENTICATED", "page")]);
    let gate = fixture.gate();
    let job = fixture.script(1, &format!("echo so far; {}", gate.words()));
    first.post(&job).await;
    let _at_gate = gate.reached();
    first.until_log("so far").await;
    let executor = fixture.executor(1);
    first.crash();
    killpg(executor, Signal::SIGKILL).unwrap();

    let second = fixture.serve(&[]);
    second.wait_for_end(1, "step");
    let record = fixture.record(1);
    assert_eq!(record.status, JobStatus::Failed);
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Failed);
    let output = fixture.output(1, "step");
    for expected in ["so far", "was lost", "plan again"] {
        assert!(output.contains(expected), "{expected}: {output}");
    }
    second.post(&job).await;
    second.post(&fixture.script(2, "")).await;
    second.wait_for_end(2, "step");
    assert_eq!(fixture.times_run(1), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_is_killed_fails_its_step() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[("MAYFLY_ALLOW_UNAUTHENTICATED", "page")]);
    let gate = fixture.gate();
    let job = fixture.script(
        1,
        &format!(
            "echo the beginning; seq 60000; echo so far; {}",
            gate.words()
        ),
    );
    launcher.post(&job).await;
    let _at_gate = gate.reached();
    launcher.until_log("so far").await;
    killpg(fixture.executor(1), Signal::SIGKILL).unwrap();
    launcher.wait_for_end(1, "step");
    assert_eq!(fixture.record(1).status, JobStatus::Failed);
    let output = fixture.output(1, "step");
    assert!(output.contains("SIGKILL"), "{output}");
    // Also what the hub no longer has in its memory.
    assert!(output.contains("so far") && output.contains("the beginning"));
}

/// A script that notes its id, has a child that does the same in a session of its own and elsewhere, and waits.
fn entangled(fixture: &Fixture, gate: &Gate) -> String {
    let (own, child) = (fixture.path("script"), fixture.path("child"));
    format!(
        "echo $$ > {}\n\
         setsid --fork bash -c 'cd /; trap \"\" TERM INT; echo $$ > {}; while :; do sleep 1; done' \
         </dev/null >/dev/null 2>&1\n\
         until [[ -s {} ]]; do :; done\n{}",
        own.display(),
        child.display(),
        child.display(),
        gate.words(),
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
    let gate = fixture.gate();
    launcher
        .post(&fixture.script(1, &entangled(&fixture, &gate)))
        .await;
    let _at_gate = gate.reached();
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
    let gate = fixture.gate();
    first
        .post(&fixture.script(1, &entangled(&fixture, &gate)))
        .await;
    let _at_gate = gate.reached();
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

/// Code of a run can write to the file of the final report.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_whose_code_forges_a_report_and_kills_the_executor_fails() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[]);
    let gate = fixture.gate();
    let script = format!("echo ${{MAYFLY_RUN_MARK:?}}; {}", gate.words());
    launcher.post(&fixture.script(1, &script)).await;
    let _at_gate = gate.reached();
    let forged = FinalReport {
        outcome: Exit::Done.code(),
        unreported: true,
        unreported_step: Some(UnreportedStep {
            ending: Ending::Success,
            after_ok: true,
            ignore_error: false,
            plan: None,
        }),
        ..FinalReport::default()
    };
    let forged = serde_json::to_string(&forged).unwrap();
    fs::write(fixture.run_folder(1).join("report"), forged).unwrap();
    kill(fixture.executor(1), Signal::SIGKILL).unwrap();
    launcher.wait_for_end(1, "step");
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Failed);
    assert_eq!(fixture.record(1).status, JobStatus::Failed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_before_which_infrastructure_failed_is_started_again() {
    let fixture = Fixture::new();
    let starts = fixture.path("starts");
    let program = fixture.path("executor");
    let script = format!(
        "#!/bin/bash\necho >> {starts}\nif (( $(wc -l < {starts}) == 1 )); then exit {}; fi\nexec {} executor\n",
        Exit::Infrastructure.code(),
        env!("CARGO_BIN_EXE_api-launcher"),
        starts = starts.display(),
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let launcher = fixture.serve(&[("MAYFLY_EXECUTOR", program.to_str().unwrap())]);
    launcher.post(&fixture.script(1, "")).await;
    launcher.wait_for_end(1, "step");
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Completed);
    assert_eq!(fs::read_to_string(starts).unwrap().len(), 2);
    assert_eq!(fixture.times_run(1), 1);
}

fn until_gone(process: Pid) {
    assert!(ends(process), "{process} goes on");
}

/// A gate at which the second resource of the module waits.
fn gated(fixture: &Fixture) -> Gate {
    let gate = fixture.gate();
    fixture.repository.commit(&[("main.tf", &gate.module())]);
    gate
}

/// A launcher that is in the midst of an apply, which waits at the gate.
async fn applying(fixture: &Fixture, gate: &Gate) -> (Launcher, File) {
    let launcher = fixture.serve(&[]);
    launcher
        .post(&fixture.job(7, "plan", "terraformPlan"))
        .await;
    launcher.wait_for_end(7, "plan");
    launcher
        .post(&fixture.job(7, "apply", "terraformApply"))
        .await;
    (launcher, gate.reached())
}

/// The state, which nobody holds.
fn state(fixture: &Fixture) -> String {
    let folder = fixture.data().join("local/backend/org/ws");
    let names = fs::read_dir(&folder).unwrap();
    let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    assert!(!format!("{names:?}").contains("lock"), "{names:?}");
    fs::read_to_string(folder.join("terraform.tfstate")).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_apply_whose_launcher_is_killed_completes() {
    let fixture = Fixture::new();
    let gate = gated(&fixture);
    let (first, at_gate) = applying(&fixture, &gate).await;
    first.crash();
    let second = fixture.serve(&[]);
    drop(at_gate);
    second.wait_for_end(7, "apply");
    assert_eq!(fixture.record(7).status, JobStatus::Completed);
    assert!(state(&fixture).contains("\"second\""));
    assert_eq!(second.count("started an executor"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_apply_whose_launcher_stops_saves_the_state() {
    let fixture = Fixture::new();
    let gate = gated(&fixture);
    let (launcher, _at_gate) = applying(&fixture, &gate).await;
    launcher.signal(Signal::SIGTERM);
    assert!(launcher.end().success());
    assert_eq!(fixture.record(7).status, JobStatus::Failed);
    assert!(state(&fixture).contains("\"first\""));
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_left_on_purpose_are_found_again() {
    let fixture = Fixture::new();
    let first = fixture.serve(&[("MAYFLY_RUNS_ON_STOP", "leave")]);
    let gate = fixture.gate();
    first.post(&fixture.script(1, &gate.words())).await;
    let at_gate = gate.reached();
    first.signal(Signal::SIGTERM);
    first.wait_for("stopped", |_| true);
    assert!(first.end().success());

    let second = fixture.serve(&[]);
    drop(at_gate);
    second.wait_for_end(1, "step");
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Completed);
}

/// What a launcher on this data directory says that cannot start.
fn refused(fixture: &Fixture, code: i32) -> String {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_api-launcher"));
    command
        .args(["serve", "--target=process", "--listen=127.0.0.1:0"])
        .env("MAYFLY_ALLOW_UNAUTHENTICATED", "true")
        .env("MAYFLY_DATA_DIR", fixture.data());
    let launcher = Running::start(&mut command).wait();
    assert_eq!(launcher.code(), code, "{launcher}");
    launcher.stderr
}

#[test]
fn one_data_directory_has_one_launcher() {
    let fixture = Fixture::new();
    let _first = fixture.serve(&[]);
    let said = refused(&fixture, 75);
    assert!(said.contains("another agent runs in"), "{said}");
}

#[test]
fn accepted_runs_in_the_queue_of_an_earlier_version_are_not_passed_over() {
    let fixture = Fixture::new();
    let entries = fixture.data().join("launcher/queue/entries");
    fs::create_dir_all(&entries).unwrap();
    let entry = entries.join("7_step.run");
    fs::write(&entry, "{\"acceptedAt\":1}\n{}").unwrap();
    let said = refused(&fixture, 64);
    let folder = fixture
        .data()
        .canonicalize()
        .unwrap()
        .join("launcher/queue");
    let folder = folder.display().to_string();
    assert!(
        said.contains(&folder) && said.contains("remove the folder"),
        "{said}"
    );
    // A launcher of that version would take other runs.
    let lock = File::create(entries.join("../lock")).unwrap();
    lock.lock().unwrap();
    let said = refused(&fixture, 75);
    assert!(said.contains("a launcher of an earlier version"), "{said}");
    drop(lock);
    // Runs that were over leave nothing of importance.
    fs::remove_file(entry).unwrap();
    drop(fixture.serve(&[]));
}
