//! What the operator sets on `serve` is what happens in the cluster.

use integration_tests::{Repository, job};
use job_contract::env;
use verdict::VerdictKind;

use super::{Fixture, name};

#[tokio::test(flavor = "multi_thread")]
async fn no_more_jobs_are_released_than_may_be_in_flight() {
    let fixture = or_skip!(Fixture::new().await);
    let repository = Repository::fixture();
    let gate = fixture.machine.gate();
    let begun = gate.path().with_extension("begun");
    // The first of them waits at the gate.
    fixture.image_that_first(&format!(
        "if mkdir '{}' 2>/dev/null; then cat '{}'; fi",
        begun.display(),
        gate.path().display()
    ));
    let launcher = fixture.serve_with(&[(env::MAX_JOBS_IN_FLIGHT, "1")]);
    let first = job::plan(&repository);
    let second = job::apply_after(&first);
    fixture.machine.queue(&[&first, &second]);
    launcher.endpoint.accept(&first).await;
    let at_work = |_: &test_cluster::State| begun.exists().then_some(());
    fixture.until("the first is at work", at_work).await;
    launcher.endpoint.accept(&second).await;
    fixture.until_waiting_for_its_turn(&second).await;
    gate.open().await;
    fixture.until_over(&first, "Complete").await;
    fixture.until_over(&second, "Complete").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unschedulable_run_is_given_up_after_the_configured_time() {
    let (fixture, repository) = (or_skip!(Fixture::new().await), Repository::fixture());
    let data = fixture.machine.data_dir();
    let launcher = fixture.serve_with(&[
        (env::UNSCHEDULABLE_SECONDS, "1"),
        (env::DATA_DIR, data.to_str().unwrap()),
    ]);
    let mut plan = job::plan(&repository);
    let selector = "EPHEMERAL_CONFIG_NODE_SELECTOR_TAGS".to_owned();
    plan.environment_variables
        .insert(selector, "disk=none".to_owned());
    fixture.machine.queue(&[&plan]);
    launcher.endpoint.accept(&plan).await;
    fixture.until_over(&plan, "Failed").await;
    let explanation = fixture.library().explain(&name(&plan)).await.unwrap();
    let verdict = explanation.verdict.unwrap();
    assert_eq!(verdict.kind, VerdictKind::NeverScheduled);
    assert!(
        verdict.sentence.contains("within 1 s"),
        "{}",
        verdict.sentence
    );
    fixture.until_reported(&plan, "no node took the pod").await;
}
