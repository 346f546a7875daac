//! The API server fails at every step of a dispatch.

use integration_tests::{Repository, job};
use test_cluster::Fault;

use super::{LAUNCHER, Place, many, post_all};

/// More than a launcher tries within one delivery.
const LONG: usize = 20;

const STEPS: [(&str, &str); 3] = [("create", "jobs"), ("create", "secrets"), ("patch", "jobs")];

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_at_any_step_is_made_up_for_within_the_delivery() {
    let place = Place::without_pods().await;
    let launcher = place.serve();
    let jobs = many(&job::plan(&Repository::fixture()), 2 * STEPS.len());
    let mut next = jobs.iter();
    for (verb, resource) in STEPS {
        for fault in [Fault::DropAfter, Fault::DropBefore] {
            place
                .cluster
                .faults()
                .next_of(LAUNCHER, 1, verb, resource, fault);
            launcher.accept(next.next().unwrap()).await;
        }
    }
    place.assert_exactly_one_each(&jobs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dispatch_given_up_at_any_step_is_completed_by_the_next_delivery() {
    let place = Place::without_pods().await;
    let launcher = place.serve();
    // The third step comes after the answer.
    let steps = &STEPS[..2];
    let jobs = many(&job::plan(&Repository::fixture()), steps.len());
    for (job, (verb, resource)) in jobs.iter().zip(steps) {
        let faults = place.cluster.faults();
        faults.next_of(LAUNCHER, LONG, verb, resource, Fault::InternalError);
        let refused = launcher.door().post(job).await.unwrap();
        assert_eq!(refused, 503, "{verb} {resource}");
        faults.clear();
        launcher.accept(job).await;
    }
    place.assert_exactly_one_each(&jobs).await;
    assert_eq!(place.jobs_created(), jobs.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_release_failed_is_released_by_whoever_watches() {
    let place = Place::without_pods().await;
    let launcher = place.serve();
    let plan = job::plan(&Repository::fixture());
    let faults = place.cluster.faults();
    // As often as the delivery tries, and the watcher once more.
    faults.next_of(LAUNCHER, 5, "patch", "jobs", Fault::InternalError);
    launcher.accept(&plan).await;
    place.assert_exactly_one_each(&[plan]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_in_trouble_loses_and_doubles_nothing() {
    let place = Place::without_pods().await;
    let replicas = [place.serve(), place.serve()];
    let jobs = many(&job::plan(&Repository::fixture()), 12);
    for fault in [
        Fault::TooManyRequests(1),
        Fault::InternalError,
        Fault::Unavailable,
        Fault::DropAfter,
    ] {
        place
            .cluster
            .faults()
            .next_of(LAUNCHER, LONG, "*", "*", fault);
    }
    let mut left = jobs.clone();
    // Each round uses up faults, so there is a last one.
    for _ in 0..4 * LONG {
        let posts = left.iter().enumerate();
        let posts = posts.map(|(number, job)| (replicas[number % 2].door(), job.clone()));
        let answers = post_all(posts.collect()).await;
        for answer in &answers {
            assert!(matches!(answer, Some(202 | 503)), "{answers:?}");
        }
        let mut answers = answers.into_iter();
        left.retain(|_| answers.next() != Some(Some(202)));
        if left.is_empty() {
            break;
        }
    }
    assert!(left.is_empty(), "{} are never accepted", left.len());
    place.assert_exactly_one_each(&jobs).await;
}
