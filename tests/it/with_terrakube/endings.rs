//! Runs of one machine that end early, and an executor that cannot start.

use integration_tests::Repository;
use integration_tests::process::Stream;
use job_contract::{encoding, env};
use serde_json::Value;
use test_platform::{Effect, Fault, Flow, Native, Platform, Status, Variable};

use super::{RunTarget, Stage};
use crate::machine;

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_job_was_removed_is_stopped_and_dropped() {
    let stage = Stage::on(RunTarget::Machine(machine()), Platform::builder()).await;
    let gate = stage.machine().gate();
    let launcher = stage.serve_with(&[
        (env::STATUS_POLL_SECONDS, "1"),
        (env::REPORT_PATIENCE_SECONDS, "5"),
    ]);
    let job = stage.start(gate.repository(), Flow::only("terraformApply"));
    stage.platform.until_streamed(job, "at-the-gate").await;
    let path = format!("/job/{job}");
    for method in ["GET", "PATCH"] {
        let fault = Fault::always(method, &path, Effect::Status(404));
        stage.platform.fault(fault);
    }
    stage
        .platform
        .until_streamed(job, "Interrupt received")
        .await;
    tokio::task::block_in_place(|| {
        launcher
            .running
            .find_line(Stream::Stderr, "the run is dropped", |line| {
                let line: Value = serde_json::from_str(line).ok()?;
                let is_dropped = line["message"] == "the outcome of a task could not be reported"
                    && line["again"] == false;
                is_dropped.then_some(())
            });
    });
}

/// As in the platform's own Jobs, whose container logs are not shown.
#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_redis_setting_is_reported_through_the_api() {
    let native = Native::new(|_| async { Ok(()) });
    let platform = Platform::builder().native(native);
    let stage = Stage::of(RunTarget::Machine(machine()), platform, None).await;
    stage.platform.edit(|records| {
        records
            .globals
            .push(Variable::env(env::EPHEMERAL_SWITCH, "true"));
    });
    let job = stage.start(Repository::fixture(), Flow::only("terraformApply"));
    stage.platform.until_job(job, Status::Queue).await;
    let data = serde_json::from_value(stage.platform.job_data(job)).unwrap();
    let keystore = stage.machine().scratch("truststore.jks");
    std::fs::write(&keystore, b"\xfe\xed\xfe\xed\0\0\0\x02").unwrap();

    let run = stage
        .machine()
        .executor_with_data(Some(&encoding::encode(&data)))
        .without(env::OUTCOME_EXIT_CODE)
        .env(env::REDIS_HOSTNAME, "127.0.0.1")
        .env(env::REDIS_SSL, "true")
        .env(env::REDIS_TRUSTSTORE_PATH, keystore);
    let settings = stage.settings().into_iter();
    let run = settings.fold(run, |run, (name, value)| run.env(name, value));
    let outcome = tokio::task::block_in_place(|| run.run()).expect_code(0);

    let job = stage.platform.until_job(job, Status::Failed).await;
    assert_eq!(job.step_statuses(), [Status::Failed], "{outcome}");
    assert!(
        job.steps[0].name.contains("Redis"),
        "{:?} {outcome}",
        job.steps[0]
    );
    assert!(stage.state(job.id).is_null());
    stage.platform.assert_kept().await;
}
