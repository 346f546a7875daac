//! The platform delivers at least once; what it delivers runs at most once.

use std::time::Duration;

use integration_tests::Repository;
use test_cluster::Fault;
use test_platform::{Flow, Platform, Status};

use super::{Ground, Stage};
use crate::kubernetes::{LAUNCHER, Place};

#[tokio::test(flavor = "multi_thread")]
async fn a_dispatch_that_was_not_answered_in_time_is_not_run_twice_when_it_is_repeated() {
    let ground = Ground::Cluster(Box::new(Place::new().await));
    let platform = Platform::builder().answer_within(Duration::from_secs(2));
    let stage = Stage::on(ground, platform).await;
    stage
        .place()
        .cluster
        .faults()
        .next_of(LAUNCHER, 1, "create", "secrets", Fault::Hang);
    let _launcher = stage.serve();
    let job = stage.start(&Repository::fixture(), Flow::plan_apply());
    let job = stage.platform.until_job(job, Status::Completed).await;
    assert!(job.posts > 2, "every dispatch was answered in time");
    let cluster = stage.place().state().await;
    assert_eq!(
        (cluster.jobs.len(), cluster.secrets.len()),
        (2, 3),
        "the settings and one Secret for each Job"
    );
    stage.platform.assert_kept().await;
}
