//! The API server fails at every step of a dispatch.

use integration_tests::{Repository, job};
use test_cluster::Fault;

use super::{Fixture, LAUNCHER, deliver_all, many};

/// More than a launcher tries within one delivery.
const LONG: usize = 20;

const STEPS: [(&str, &str); 3] = [("create", "jobs"), ("create", "secrets"), ("patch", "jobs")];

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_at_any_step_is_made_up_for_within_the_delivery() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let launcher = fixture.serve();
    let jobs = many(&job::plan(&Repository::fixture()), 2 * STEPS.len());
    let mut next = jobs.iter();
    for (verb, resource) in STEPS {
        for fault in [Fault::DropAfter, Fault::DropBefore] {
            fixture
                .cluster
                .faults()
                .next_of(LAUNCHER, 1, verb, resource, fault);
            launcher.endpoint.accept(next.next().unwrap()).await;
        }
    }
    fixture.assert_exactly_one_each(&jobs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dispatch_given_up_at_any_step_is_completed_by_the_next_delivery() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let launcher = fixture.serve();
    // The third step comes after the answer.
    let given_up = [
        ("create", "jobs", Fault::InternalError),
        ("create", "secrets", Fault::TooManyRequests(1)),
        ("create", "secrets", Fault::DropBefore),
        ("create", "secrets", Fault::DropAfter),
    ];
    let jobs = many(&job::plan(&Repository::fixture()), given_up.len());
    for (job, (verb, resource, fault)) in jobs.iter().zip(given_up) {
        let faults = fixture.cluster.faults();
        faults.next_of(LAUNCHER, LONG, verb, resource, fault);
        let refused = launcher.endpoint.post(job).await.unwrap();
        assert_eq!(refused, 503, "{verb} {resource}");
        faults.clear();
        launcher.endpoint.accept(job).await;
    }
    fixture.assert_exactly_one_each(&jobs).await;
    assert_eq!(fixture.jobs_created(), jobs.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_release_failed_is_released_by_the_watcher() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let launcher = fixture.serve();
    let plan = job::plan(&Repository::fixture());
    let faults = fixture.cluster.faults();
    // As often as the delivery tries, and the watcher once more.
    faults.next_of(LAUNCHER, 5, "patch", "jobs", Fault::InternalError);
    launcher.endpoint.accept(&plan).await;
    fixture.assert_exactly_one_each(&[plan]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_api_server_loses_and_doubles_no_run() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let replicas = [fixture.serve(), fixture.serve()];
    let jobs = many(&job::plan(&Repository::fixture()), 12);
    for fault in [
        Fault::TooManyRequests(1),
        Fault::InternalError,
        Fault::Unavailable,
        Fault::DropAfter,
    ] {
        fixture
            .cluster
            .faults()
            .next_of(LAUNCHER, LONG, "*", "*", fault);
    }
    // Each round uses up faults, so there is a last one.
    let doors = replicas.each_ref().map(|replica| replica.endpoint.clone());
    deliver_all(&doors, &jobs).await;
    fixture.assert_exactly_one_each(&jobs).await;
}
