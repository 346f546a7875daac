//! Runs that wait for their turn on one machine.

use integration_tests::Repository;
use job_contract::env;
use test_platform::{Effect, Fault, Flow, Ledger, Platform, Records, Status};

use super::{RunTarget, Stage};
use crate::machine;

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_waits_for_its_turn_on_one_machine_has_a_heartbeat() {
    let stage = Stage::on_this_machine().await;
    let gate = stage.machine().gate();
    let _launcher = stage.serve_with(&[(env::CONCURRENCY, "1")]);
    let first = stage.start(gate.repository(), Flow::only("terraformApply"));
    stage.platform.until_streamed(first, "at-the-gate").await;
    let second = stage.start(Repository::fixture(), Flow::only("terraformPlan"));
    stage.platform.until_job(second, Status::Queue).await;
    stage.platform.end_grace(second).await;
    let spared = |records: &Records| (records.job(second).spared >= 2).then_some(());
    stage
        .platform
        .until("the sweep finds it alive", spared)
        .await;
    gate.open().await;
    for job in [first, second] {
        stage.platform.until_job(job, Status::Completed).await;
    }
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_waits_for_its_turn_on_one_machine_is_not_started() {
    let stage = Stage::on(RunTarget::Machine(machine()), Platform::builder()).await;
    let gate = stage.machine().gate();
    let _launcher = stage.serve_with(&[(env::CONCURRENCY, "1")]);
    let first = stage.start(gate.repository(), Flow::only("terraformApply"));
    stage.platform.until_streamed(first, "at-the-gate").await;
    let second = stage.start(Repository::fixture(), Flow::only("terraformApply"));
    stage.platform.until_job(second, Status::Queue).await;
    stage.platform.cancel(second).await;
    gate.open().await;
    stage.platform.until_job(first, Status::Completed).await;
    // The third proves that the turn of the second has passed.
    let third = stage.start(Repository::fixture(), Flow::only("terraformApply"));
    stage.platform.until_job(third, Status::Completed).await;
    assert!(stage.state(second).is_null());
    assert_eq!(
        stage.platform.job(second).step_statuses(),
        [Status::Cancelled]
    );
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_survives_a_single_refusal_of_the_platform() {
    let stage = Stage::on(RunTarget::Machine(machine()), Platform::builder()).await;
    let gate = stage.machine().gate();
    let _launcher = stage.serve_with(&[(env::CONCURRENCY, "1")]);
    let first = stage.start(gate.repository(), Flow::only("terraformApply"));
    stage.platform.until_streamed(first, "at-the-gate").await;
    let second = stage.start(Repository::fixture(), Flow::only("terraformApply"));
    stage.platform.until_job(second, Status::Queue).await;
    let path = format!("/job/{second}");
    stage
        .platform
        .fault(Fault::once("GET", &path, Effect::Status(404)));
    let refused = |ledger: &Ledger| {
        let mut requests = ledger.requests.iter();
        requests.any(|request| request.status == 404).then_some(())
    };
    stage.platform.until_asked("it is refused", refused).await;
    gate.open().await;
    stage.platform.until_job(second, Status::Completed).await;
    stage.platform.assert_kept().await;
}
