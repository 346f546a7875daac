//! Dispatches that run to their end.

use std::fs;
use std::process::Command;

use job_contract::status::{JobStatus, StepStatus};
use nix::sys::signal::Signal;
use test_peers::port::Port;
use test_peers::process::Running;
use test_platform::Secret;

use crate::harness::{Fixture, step_ref};

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_and_its_apply_run_to_completed() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[]);
    let mut plan = fixture.job(7, "plan", "terraformPlan");
    plan["variables"]["password"] = "hunter2".into();
    launcher.post(&plan).await;
    launcher.wait_for_end(7, "plan");
    assert_eq!(fixture.step_status(7, "plan"), StepStatus::Completed);
    launcher
        .post(&fixture.job(7, "apply", "terraformApply"))
        .await;
    launcher.wait_for_end(7, "apply");

    let record = fixture.record(7);
    assert_eq!(record.status, JobStatus::Completed, "{record:#?}");
    let state = fixture
        .data()
        .join("local/backend/org/ws/terraform.tfstate");
    assert!(fs::read_to_string(state).unwrap().contains("hello"));
    assert!(fixture.output(7, "apply").contains("Apply complete!"));
    fixture.until_no_folders();
    assert!(!launcher.log().contains("hunter2"));
    let metrics = launcher.get("/metrics").await;
    for line in [
        "mayfly_dispatches_total{result=\"accepted\"} 2",
        "mayfly_pool_tasks{pool=\"local\",state=\"running\"} 0",
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_concurrent_duplicates_are_one_run() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[]);
    let job = fixture.script(1, "");
    futures_util::future::join_all((0..20).map(|_| launcher.post(&job))).await;
    launcher.wait_for_end(1, "step");
    launcher.post(&job).await;
    // Whatever was queued behind would have started before this one ends.
    launcher.post(&fixture.script(2, "")).await;
    launcher.wait_for_end(2, "step");
    assert_eq!(launcher.count("started an executor"), 2);
    assert_eq!(fixture.times_run(1), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_waiting_run_is_next() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[("MAYFLY_CONCURRENCY", "1")]);
    let gate = fixture.gate();
    launcher.post(&fixture.script(9, &gate.words())).await;
    let at_gate = gate.reached();
    for job in [3, 1, 2] {
        launcher.post(&fixture.script(job, "")).await;
    }
    assert_eq!(
        launcher.get("/actuator/health/readiness").await,
        r#"{"status":"UP"}"#
    );
    drop(at_gate);
    for job in [3, 1, 2] {
        launcher.wait_for_end(job, "step");
    }
    let ledger = fs::read_to_string(fixture.path("ledger")).unwrap();
    assert_eq!(ledger, "9\n3\n1\n2\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_job_stops_whether_it_runs_or_waits() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[("MAYFLY_CONCURRENCY", "1")]);
    let gate = fixture.gate();
    let running = fixture.script(1, &gate.words());
    launcher.post(&running).await;
    let _at_gate = gate.reached();
    let waiting = fixture.script(2, "");
    launcher.post(&waiting).await;
    for job in [&waiting, &running] {
        let cancel = |record: &mut platform::local::JobRecord| {
            record.status = JobStatus::Cancelled;
        };
        fixture
            .platform()
            .update_job(&step_ref(job), cancel)
            .unwrap();
    }
    launcher.wait_for_end(1, "step");
    launcher.wait_for_end(2, "step");
    assert_eq!(fixture.record(1).status, JobStatus::Cancelled);
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Failed);
    assert_eq!(fixture.record(2).status, JobStatus::Cancelled);
    assert_eq!(fixture.step_status(2, "step"), StepStatus::Cancelled);
    assert_eq!(fixture.times_run(2), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_interrupts_what_runs_and_keeps_what_waits() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[("MAYFLY_CONCURRENCY", "1")]);
    let gate = fixture.gate();
    launcher.post(&fixture.script(1, &gate.words())).await;
    let _at_gate = gate.reached();
    launcher.post(&fixture.script(2, "")).await;
    launcher.signal(Signal::SIGTERM);
    // Dispatches are still accepted until the executor has reported.
    let stopping = "stopping: no further run begins here; another signal stops at once";
    launcher.wait_for(stopping, |_| true);
    launcher.wait_for("stopped", |_| true);
    assert!(launcher.end().success());
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Failed);
    assert_eq!(fixture.times_run(2), 0);

    let launcher = fixture.serve(&[]);
    launcher.wait_for_end(2, "step");
    assert_eq!(fixture.step_status(2, "step"), StepStatus::Completed);
    assert_eq!(fixture.times_run(1), 1);
}

#[test]
fn a_second_start_that_misses_the_file_of_the_secret_says_what_to_do() {
    let fixture = Fixture::new();
    let file = fixture.path("internal-secret");
    fs::write(&file, Secret::long().text()).unwrap();
    let name = file.to_str().unwrap();
    let settings = [("InternalSecret", ""), ("InternalSecretFile", name)];
    // Target `process` removes it.
    fixture.serve(&settings).crash();
    let mut again = Command::new(env!("CARGO_BIN_EXE_api-launcher"));
    fixture.configure(&mut again);
    let ended = Running::start(again.envs(settings)).wait();
    assert_eq!(ended.code(), 64, "{ended}");
    let expected = format!(
        "error: `InternalSecretFile` names `{name}`, which does not exist: an earlier start may have removed it. \
         Write the secret into it before each start, or set `InternalSecret`\n"
    );
    assert_eq!(ended.stderr, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_for_other_addresses_is_not_between_the_parts_of_a_launcher() {
    let fixture = Fixture::new();
    // Nobody listens there.
    let proxy = Port::take().unwrap();
    let proxy = format!("http://{}", proxy.address());
    let launcher = fixture.serve(&[("http_proxy", &proxy), ("HTTPS_PROXY", &proxy)]);
    launcher.post(&fixture.script(1, "echo $no_proxy")).await;
    launcher.wait_for_end(1, "step");
    assert_eq!(fixture.step_status(1, "step"), StepStatus::Completed);
    assert!(fixture.output(1, "step").contains("127.0.0.1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_of_the_readme_runs() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[]);
    let hello = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/hello/main.tf");
    let scripts = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/scripts/job.json");
    fixture.repository.commit(&[(
        "examples/hello/main.tf",
        &fs::read_to_string(hello).unwrap(),
    )]);
    let document = fs::read_to_string(scripts).unwrap();
    let repository = fixture.repository.path().display().to_string();
    let document = document.replace("@REPOSITORY@", &repository);
    let document = serde_json::from_str(&document).unwrap();
    let step = step_ref(&document);
    launcher.post(&document).await;
    let job = step.job_id.parse().unwrap();
    launcher.wait_for_end(job, &step.step_id);
    let status = fixture.step_status(job, &step.step_id);
    assert_eq!(status, StepStatus::Completed, "{}", launcher.log());
}
