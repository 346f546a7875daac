//! What the operator sets on `serve` is what happens in the cluster.

use std::fs;

use api_launcher::kubernetes::verdict::VerdictKind;
use integration_tests::{Repository, fifo, job};
use job_contract::env;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use test_cluster::{ADMIN, Cluster};

use super::{Place, ROLES, name, rules};

#[tokio::test(flavor = "multi_thread")]
async fn no_more_jobs_are_released_than_may_be_in_flight_and_the_lease_is_the_one_named() {
    // The Role names the Lease, and so does the operator who names another.
    let roles = ROLES.replace(
        "resourceNames: [\"mayfly-launcher\"]",
        "resourceNames: [\"of-these-runs\"]",
    );
    assert_ne!(roles, ROLES);
    let place = or_skip!(Place::of(Cluster::builder(), &rules(&roles)).await);
    let repository = Repository::fixture();
    let gate = fifo(place.machine.scratch("gate"));
    let begun = gate.with_extension("begun");
    // The first of them waits at the gate.
    place.image_that_first(&format!(
        "if mkdir '{}' 2>/dev/null; then cat '{}'; fi",
        begun.display(),
        gate.display()
    ));
    let launcher = place.serve_with(&[
        (env::MAX_JOBS_IN_FLIGHT, "1"),
        (env::LEASE_NAME, "of-these-runs"),
    ]);
    let first = job::plan(&repository);
    let second = job::apply_after(&first);
    place.machine.queue(&[&first, &second]);
    launcher.accept(&first).await;
    let at_work = |_: &test_cluster::State| begun.exists().then_some(());
    place.until("the first is at work", at_work).await;
    launcher.accept(&second).await;
    place.until_waiting_for_its_turn(&second).await;
    let client = place.cluster.client(ADMIN).unwrap();
    let leases = Api::<Lease>::namespaced(client, &place.runs);
    leases.get("of-these-runs").await.unwrap();

    fs::write(&gate, "").unwrap();
    place.until_over(&first, "Complete").await;
    place.until_over(&second, "Complete").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unschedulable_run_is_given_up_after_the_configured_time() {
    let (place, repository) = (or_skip!(Place::new().await), Repository::fixture());
    let data = place.machine.data_dir();
    let launcher = place.serve_with(&[
        (env::UNSCHEDULABLE_SECONDS, "1"),
        (env::DATA_DIR, data.to_str().unwrap()),
    ]);
    let mut plan = job::plan(&repository);
    let selector = "EPHEMERAL_CONFIG_NODE_SELECTOR_TAGS".to_owned();
    plan.environment_variables
        .insert(selector, "disk=none".to_owned());
    place.machine.queue(&[&plan]);
    launcher.accept(&plan).await;
    place.until_over(&plan, "Failed").await;
    let explanation = place.library().explain(&name(&plan)).await.unwrap();
    let verdict = explanation.verdict.unwrap();
    assert_eq!(verdict.kind, VerdictKind::NeverScheduled);
    assert!(
        verdict.sentence.contains("within 1 s"),
        "{}",
        verdict.sentence
    );
    place.until_reported(&plan, "no node took the pod").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_rate_holds_up_but_loses_nothing() {
    let (place, repository) = (or_skip!(Place::new().await), Repository::fixture());
    let launcher = place.serve_with(&[
        (env::KUBE_REQUESTS_PER_SECOND, "20"),
        (env::KUBE_BURST, "2"),
    ]);
    let jobs = super::many(&job::plan(&repository), 6);
    for job in &jobs {
        place.machine.queue(&[job]);
        launcher.accept(job).await;
    }
    place.assert_exactly_one_each(&jobs).await;
}
