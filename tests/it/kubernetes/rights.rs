//! The launcher asks the cluster for what it was granted, and for nothing else.

use api_launcher::cluster::rights::{Place as Where, RIGHTS, Right};
use integration_tests::{Repository, job};
use test_cluster::{Request, Rule};

use super::{LAUNCHER, Place, RUNS};

pub(super) fn rule(right: &Right) -> Rule {
    let resource = match right.subresource {
        "" => right.resource.to_owned(),
        below => format!("{}/{below}", right.resource),
    };
    Rule {
        api_groups: vec![right.group.to_owned()],
        resources: vec![resource],
        resource_names: Vec::new(),
        verbs: vec![right.verb.to_owned()],
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_with_its_rights_alone_carries_a_run_and_is_denied_nothing() {
    let (place, repository) = (Place::new().await, Repository::fixture());
    // Runs and launcher share a namespace here.
    let in_one = |right: &&Right| matches!(right.place, Where::Runs | Where::Launcher);
    let rules: Vec<Rule> = RIGHTS.iter().filter(in_one).map(rule).collect();
    place.cluster.grant(LAUNCHER, RUNS, &rules);
    let plan = job::plan(&repository);
    place.site.queue(&[&plan]);
    let launcher = place.serve();
    assert_eq!(launcher.door().get("/actuator/health/readiness").await, 200);
    launcher.accept(&plan).await;
    launcher.accept(&plan).await;
    place.until_over(&plan, "Complete").await;

    let recorded = place.cluster.recorded().of(LAUNCHER);
    let rights = |requests: Vec<&Request>| -> Vec<String> {
        requests.into_iter().map(Request::right).collect()
    };
    assert_eq!(rights(recorded.denied()), Vec::<String>::new());
    assert_eq!(rights(recorded.beyond(&rules)), Vec::<String>::new());
    assert!(!recorded.requests().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_without_rights_says_503_and_is_not_ready() {
    let place = Place::without_pods().await;
    place.cluster.revoke(LAUNCHER);
    let launcher = place.serve();
    let plan = job::plan(&Repository::fixture());
    assert_eq!(launcher.door().post(&plan).await.unwrap(), 503);
    assert_eq!(launcher.door().get("/actuator/health/readiness").await, 503);
    assert!(place.state().await.jobs.is_empty());
}
