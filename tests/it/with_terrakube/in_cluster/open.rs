//! The platform locks a job's row while its dispatch is open. Mayfly sends no request about the job meanwhile.

use std::time::{Duration, Instant};

use integration_tests::Repository;
use test_cluster::{Fault, State};
use test_platform::{Flow, Platform, Status};

use crate::in_cluster::{Fixture, LAUNCHER};
use crate::with_terrakube::{RunTarget, Stage};

/// How long the platform waits for an answer.
const OPEN: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread")]
async fn a_step_with_nothing_to_run_is_not_reported_before_the_response_to_its_dispatch() {
    let run_target = RunTarget::Cluster(Box::new(or_skip!(Fixture::new().await)));
    let stage = Stage::on(run_target, Platform::builder().answer_within(OPEN)).await;
    let _launcher = stage.serve();
    let job = stage.start(Repository::fixture(), Flow::plan_approve_apply());
    stage.platform.until_job(job, Status::WaitingApproval).await;
    let planned = |state: &State| {
        let name = state.jobs[0].metadata.name.as_deref().unwrap_or_default();
        state.has_condition(name, "Complete").then_some(())
    };
    stage
        .fixture()
        .until("the plan's Job is over", planned)
        .await;

    // The approval's Job is there, for the watcher to see, and the answer is not.
    let faults = stage.fixture().cluster.faults();
    faults.next_of(LAUNCHER, 1, "create", "secrets", Fault::Hang);
    let opened = Instant::now();
    stage.platform.approve(job).await;
    let held = |state: &State| (state.jobs.len() == 2).then_some(());
    stage
        .fixture()
        .until("the approval's Job is there", held)
        .await;
    let job = stage.platform.until_job(job, Status::Completed).await;

    assert!(
        job.posts > 3,
        "the approval's dispatch was answered in time"
    );
    let ledger = stage.platform.ledger();
    // A dispatch that opened later than this moment was open for at least that long.
    let early: Vec<_> = ledger
        .requests
        .iter()
        .filter(|request| request.job == Some(job.id) && request.during_dispatch)
        .filter(|request| request.at >= opened && request.at < opened + OPEN)
        .collect();
    assert!(early.is_empty(), "{early:#?}");
    assert_eq!(job.step_statuses(), [Status::Completed; 3]);
    stage.platform.assert_kept().await;
}
