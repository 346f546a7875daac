//! Exactly one Job for each run, whoever delivers how often, and whatever dies.

use integration_tests::{Repository, job};
use test_cluster::Fault;

use super::{LAUNCHER, Place, deliver_all, many, name, post_all, suspended};

/// Jobs of a busy platform that comes back.
const BURST: usize = 300;

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_duplicates_at_two_replicas_make_one_job() {
    let place = Place::without_pods().await;
    let plan = job::plan(&Repository::fixture());
    let replicas = [place.serve(), place.serve()];
    let posts = (0..20).map(|number| (replicas[number % 2].door(), plan.clone()));
    let answers = post_all(posts.collect()).await;
    assert_eq!(answers, vec![Some(202); 20]);
    place.assert_exactly_one_each(&[plan]).await;
    assert_eq!(place.jobs_created(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_killed_in_a_burst_leaves_exactly_one_job_each() {
    let place = Place::without_pods().await;
    let jobs = many(&job::plan(&Repository::fixture()), BURST);
    let (doomed, other) = (place.serve(), place.serve());
    // Some deliveries hang between Job and Secret, so that the crash finds them there however fast the rest is.
    place
        .cluster
        .faults()
        .next(20, "create", "secrets", Fault::Hang);
    let posts = jobs.iter().map(|job| (doomed.door(), job.clone()));
    let burst = tokio::spawn(post_all(posts.collect()));
    place
        .until("the burst is under way", |state| {
            (!state.secrets.is_empty()).then_some(())
        })
        .await;
    doomed.crash();
    let answers = burst.await.unwrap();
    // What was accepted before the crash is in the cluster, whatever the platform does next.
    let state = place.state().await;
    for (job, answer) in jobs.iter().zip(&answers) {
        let there = state.job(&name(job)).is_some();
        assert!(there || *answer != Some(202), "{} is lost", name(job));
    }
    assert!(
        answers.contains(&None),
        "the crash came after the burst: {answers:?}"
    );

    let restarted = place.serve();
    deliver_all(&[restarted.door(), other.door()], &jobs).await;
    place.assert_exactly_one_each(&jobs).await;
    assert_eq!(place.jobs_created(), BURST, "no Job was made twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_replica_had_accepted_is_released_without_another_delivery() {
    let place = Place::without_pods().await;
    let jobs = many(&job::plan(&Repository::fixture()), 3);
    let doomed = place.serve();
    let faults = place.cluster.faults();
    faults.next_of(LAUNCHER, 1000, "patch", "jobs", Fault::InternalError);
    for job in &jobs {
        doomed.accept(job).await;
    }
    assert!(place.state().await.jobs.iter().all(suspended));
    doomed.crash();
    faults.clear();
    let _other = place.serve();
    place.assert_exactly_one_each(&jobs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_cut_between_job_and_secret_is_completed_by_the_next() {
    let place = Place::without_pods().await;
    let plan = job::plan(&Repository::fixture());
    let doomed = place.serve();
    let faults = place.cluster.faults();
    faults.next_of(LAUNCHER, 1, "create", "secrets", Fault::Hang);
    let delivery = tokio::spawn(post_all(vec![(doomed.door(), plan.clone())]));
    place
        .until("the Job is there", |state| {
            state.job(&name(&plan)).is_some().then_some(())
        })
        .await;
    doomed.crash();
    assert_eq!(delivery.await.unwrap(), [None]);
    assert!(place.state().await.secrets.is_empty());
    let other = place.serve();
    other.accept(&plan).await;
    place.assert_exactly_one_each(&[plan]).await;
    assert_eq!(place.jobs_created(), 1);
}
