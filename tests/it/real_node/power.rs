//! A node that dies and comes back. Nothing else runs on it meanwhile.

use api_launcher::kubernetes::verdict::VerdictKind;
use serde_json::json;
use test_platform::{Flow, Status};

use super::{Place, Stage, endless};

const APPLY: &str = "terraformApply";

#[tokio::test(flavor = "multi_thread")]
async fn the_verdict_of_an_apply_on_a_rebooted_node_names_the_reboot_and_it_is_not_run_again() {
    let place = or_skip!(Place::new(true).await);
    let stage = Stage::at(place, json!({})).await;
    let job = stage.start(endless(), Flow::only(APPLY));
    stage.at_work(job, APPLY).await;
    stage.place.node.power_off().unwrap();
    stage.place.node.power_on().unwrap();
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
