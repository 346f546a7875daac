//! A plan and its apply, each as a Job.

use integration_tests::{Repository, job};
use job_contract::{JobData, StepType};
use serde_json::json;
use test_cluster::ADMIN;

use super::{Fixture, LAUNCHER, name};

const TOKEN: &str = "ghs_planted0token1for2the3clone";
const SENSITIVE: &str = "planted-sensitive-variable";

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_and_its_apply_run_as_two_jobs() {
    let (fixture, repository) = (or_skip!(Fixture::new().await), Repository::fixture());
    let mut plan = job::plan(&repository);
    plan.variables.insert("greeting".into(), SENSITIVE.into());
    let plan = JobData {
        access_token: Some(TOKEN.into()),
        ..plan
    };
    let apply = job::apply_after(&plan);
    fixture.machine.queue(&[&plan, &apply]);
    let launcher = fixture.serve();

    launcher.endpoint.accept(&plan).await;
    fixture.until_over(&plan, "Complete").await;
    assert_eq!(
        fixture.machine.statuses(&plan),
        ("pending".into(), "completed".into())
    );
    assert!(fixture.machine.record(&plan).plan_changes);

    launcher.endpoint.accept(&apply).await;
    fixture.until_over(&apply, "Complete").await;
    assert_eq!(
        fixture.machine.statuses(&apply),
        ("completed".into(), "completed".into())
    );
    assert_eq!(
        fixture.machine.resources(&apply),
        ["terraform_data.greeting"]
    );
    assert_eq!(fixture.machine.output(&apply, "greeting"), SENSITIVE);

    // Delivered again after its end, it is answered and nothing happens.
    launcher.endpoint.accept(&apply).await;
    fixture
        .assert_exactly_one_each(&[plan.clone(), apply.clone()])
        .await;
    assert_eq!(fixture.jobs_created(), 2);
    let state = fixture.state().await;
    assert_eq!(state.pods.len(), 2);
    let visible = json!([state.jobs, state.pods, state.events]).to_string();
    let encoded = job_contract::encoding::encode(&apply);
    for secret in [TOKEN, SENSITIVE, &encoded] {
        assert!(!visible.contains(secret), "{secret} is in {visible}");
    }
    assert!(state.job(&name(&plan)).is_some(), "{visible}");
    let strangers: Vec<String> = fixture
        .cluster
        .recorded()
        .requests()
        .iter()
        .filter(|request| {
            ![LAUNCHER, ADMIN, test_cluster::CONTROLLERS].contains(&request.identity.as_str())
        })
        .map(|request| format!("{} {}", request.identity, request.right()))
        .collect();
    assert_eq!(
        strangers,
        Vec::<String>::new(),
        "a pod asked the API server"
    );
}

/// As if what collects the logs of containers had gone.
#[tokio::test(flavor = "multi_thread")]
async fn an_apply_completes_in_a_pod_whose_streams_have_no_reader() {
    let (fixture, repository) = (or_skip!(Fixture::new().await), Repository::fixture());
    let apply = job::step(StepType::Apply, &repository);
    fixture.machine.queue(&[&apply]);
    fixture.image_that_first(
        "pipe=$(mktemp -u)\nmkfifo \"$pipe\"\nexec 3<>\"$pipe\"\nexec >\"$pipe\" 2>&1 3>&-\nrm \"$pipe\"",
    );
    let launcher = fixture.serve();
    launcher.endpoint.accept(&apply).await;
    fixture.until_over(&apply, "Complete").await;
    assert_eq!(
        fixture.machine.resources(&apply),
        ["terraform_data.greeting"]
    );
    let output = fixture.machine.step_output(&apply);
    assert!(output.contains("Apply complete!"), "{output}");
}
