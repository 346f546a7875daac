//! Runs that nothing happens to, or nothing but their launcher.

use std::collections::BTreeSet;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::{Value, json};
use test_platform::{Flow, Status, Variable};

use super::{BEGUN, Stage, provisioned};
use integration_tests::Repository;

/// Of a workspace, as the platform hands it over.
const OWN_SECRET: &str = "value-that-nobody-may-read";

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_and_an_apply_run_through_and_leave_nothing() {
    let short = json!({"executor": {"job": {"ttlSecondsAfterFinished": 5}}});
    let Some(stage) = Stage::with(short).await else {
        return;
    };
    let workspace = stage
        .workspace(Repository::fixture())
        .with(Variable::terraform("greeting", "good day"))
        .with(Variable::env("CLOUD_TOKEN", OWN_SECRET));
    let job = stage.start_in(workspace, Flow::plan_approve_apply());
    stage.platform.until_job(job, Status::WaitingApproval).await;
    stage.platform.approve(job).await;
    stage
        .platform
        .until_step(job, "terraformApply", Status::Running)
        .await;
    let jobs = stage.fixture.list::<Job>().await;
    assert!(!jobs.is_empty());
    let specs = json!(jobs).to_string();
    let [access, secret] = [stage.store.access_key(), stage.store.secret_key()];
    for word in [OWN_SECRET, &stage.platform.secret(), access, secret] {
        assert!(!specs.contains(word), "{word} is in {specs}");
    }
    let done = stage.platform.until_job(job, Status::Completed).await;
    assert_eq!(done.step_statuses(), [Status::Completed; 3]);
    let output = stage.output(job, "terraformApply");
    assert!(
        output.contains("Apply complete! Resources: 1 added"),
        "{output}"
    );
    let stored: Vec<Value> = stage
        .store
        .objects()
        .unwrap()
        .iter()
        .filter_map(|(_, content)| serde_json::from_slice(content).ok())
        .collect();
    let made = |state: &Value| state["outputs"]["greeting"]["value"] == "good day";
    assert!(stored.iter().any(made), "{stored:?}");

    // By its time to live, with everything it owns.
    let of_run = |name: String| name.starts_with("job-").then_some(name);
    stage
        .fixture
        .until("nothing is left of the runs", async || {
            let jobs = stage.fixture.list::<Job>().await.into_iter();
            let pods = stage.fixture.list::<Pod>().await.into_iter();
            let secrets = stage.fixture.list::<Secret>().await.into_iter();
            let names = jobs.map(|job| job.name_any());
            let names = names.chain(pods.map(|pod| pod.name_any()));
            let names = names.chain(secrets.map(|secret| secret.name_any()));
            let left: Vec<_> = names.filter_map(of_run).collect();
            left.is_empty().then_some(())
        })
        .await;
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_that_is_replaced_under_load_loses_no_run_and_doubles_none() {
    let Some(stage) = Stage::with(json!({})).await else {
        return;
    };
    let start = || {
        stage.start(
            provisioned(&format!("echo {BEGUN}; sleep 3")),
            Flow::only("terraformApply"),
        )
    };
    let mut jobs: Vec<u32> = (0..3).map(|_| start()).collect();
    stage.platform.until_job(jobs[0], Status::Queue).await;
    let launchers = stage.fixture.list::<Pod>().await.into_iter();
    let launchers: Vec<_> = launchers
        .map(|pod| pod.name_any())
        .filter(|name| name.starts_with("mayfly-"))
        .collect();
    assert_eq!(launchers.len(), 1, "{launchers:?}");
    let pods = stage.fixture.all::<Pod>();
    // Without a chance to say goodbye.
    let at_once = DeleteParams::default().grace_period(0);
    pods.delete(&launchers[0], &at_once).await.unwrap();
    jobs.extend((0..3).map(|_| start()));
    let mut expected = BTreeSet::new();
    for job in jobs {
        stage.platform.until_job(job, Status::Completed).await;
        assert_eq!(stage.times_begun(job, "terraformApply"), 1);
        expected.insert(stage.name(job, "terraformApply"));
    }
    let made = stage.fixture.list::<Job>().await;
    let made: BTreeSet<_> = made.iter().map(ResourceExt::name_any).collect();
    assert_eq!(made, expected);
    for name in &expected {
        assert_eq!(stage.pods_of(name).await.len(), 1, "{name}");
    }
    stage.platform.assert_kept().await;
}
