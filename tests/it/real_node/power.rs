//! A node that dies and comes back. Nothing else runs on it meanwhile.

use serde_json::json;
use test_platform::{Flow, Status};
use verdict::VerdictKind;

use super::{Fixture, Stage, endless};

const APPLY: &str = "terraformApply";

#[tokio::test(flavor = "multi_thread")]
async fn the_verdict_of_an_apply_on_a_rebooted_node_names_the_reboot_and_it_is_not_run_again() {
    let fixture = or_skip!(Fixture::new(true).await);
    let stage = Stage::at(fixture, json!({})).await;
    let job = stage.start(endless(), Flow::only(APPLY));
    stage.at_work(job, APPLY).await;
    stage.fixture.node.power_off().unwrap();
    stage.fixture.node.power_on().unwrap();
    let verdict = stage.failed(job, APPLY, VerdictKind::NodeLost).await;
    let advice = verdict.advice.unwrap();
    assert!(advice.contains("plan again"), "{advice}");
    assert_eq!(stage.pods_of(&stage.name(job, APPLY)).await.len(), 1);

    // The launcher was on the same node, and runs what comes next.
    let next = stage.start(
        integration_tests::Repository::fixture(),
        Flow::only("terraformPlan"),
    );
    stage.platform.until_job(next, Status::Completed).await;
}
