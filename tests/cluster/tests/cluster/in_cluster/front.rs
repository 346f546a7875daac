//! What a client meets on the way to the API server: who it is there, what is recorded of it, and what goes wrong when a
//! test asks for it.

use futures_util::TryStreamExt as _;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DeleteParams, ListParams, PostParams, WatchParams};
use kube::core::{NamespaceResourceScope, WatchEvent};
use kube::{Api, Client, Resource};
use serde_json::json;
use test_cluster::{ADMIN, Cluster, Fault, Request, Rule};

use super::cluster;

/// A namespace behind a front.
struct Subject {
    cluster: Cluster,
    namespace: String,
}

impl Subject {
    async fn new() -> Option<Self> {
        let cluster = cluster().await?;
        let namespace = cluster.fresh_namespace("front").await.unwrap();
        Some(Self { cluster, namespace })
    }

    fn asked_by<K>(&self, identity: &str) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        let client: Client = self.cluster.client(identity).unwrap();
        Api::namespaced(client, &self.namespace)
    }
}

/// The code and the message of a refusal.
fn refusal<T: std::fmt::Debug>(answer: Result<T, kube::Error>) -> (u16, String) {
    match answer {
        Err(kube::Error::Api(status)) => (status.code, status.message),
        other => panic!("{other:?}"),
    }
}

fn job(name: &str) -> Job {
    serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"suspend": true, "template": {"spec": {
            "restartPolicy": "Never", "containers": [{"name": "executor", "image": "tool"}],
        }}},
    }))
    .unwrap()
}

#[tokio::test]
async fn an_identity_may_do_what_it_was_granted_and_nothing_else() {
    let Some(subject) = Subject::new().await else {
        return;
    };
    let (cluster, namespace) = (&subject.cluster, &subject.namespace);
    let strings = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
    let rule = Rule {
        api_groups: strings(&["batch"]),
        resources: strings(&["jobs"]),
        verbs: strings(&["create", "get"]),
        ..Rule::default()
    };
    let rules = std::slice::from_ref(&rule);
    cluster.grant("launcher", namespace, rules).await.unwrap();
    let jobs = subject.asked_by::<Job>("launcher");
    jobs.create(&PostParams::default(), &job("a"))
        .await
        .unwrap();
    let (code, message) = refusal(jobs.delete("a", &DeleteParams::default()).await);
    assert_eq!(code, 403, "{message}");
    assert!(message.contains("User \"launcher\" cannot delete resource \"jobs\""));
    let pods = subject.asked_by::<k8s_openapi::api::core::v1::Pod>("launcher");
    let (code, message) = refusal(pods.logs("none", &kube::api::LogParams::default()).await);
    assert_eq!(code, 403, "{message}");
    assert!(message.contains("cannot get resource \"pods/log\""));

    let recorded = cluster.recorded().of("launcher");
    let denied = recorded.denied().into_iter().map(Request::right);
    assert_eq!(
        denied.collect::<Vec<_>>(),
        ["delete jobs.batch", "get pods/log"]
    );
    assert_eq!(recorded.unused(rules), ["get jobs.batch"]);
    cluster.revoke("launcher").await.unwrap();
    assert_eq!(refusal(jobs.get("a").await).0, 403);
    subject.asked_by::<Job>(ADMIN).get("a").await.unwrap();
}

#[tokio::test]
async fn ordered_faults_happen_once_each() {
    let Some(subject) = Subject::new().await else {
        return;
    };
    let (faults, jobs) = (subject.cluster.faults(), subject.asked_by::<Job>(ADMIN));
    // The client itself comes again after such an answer.
    faults.next(1, "list", "jobs", Fault::TooManyRequests(1));
    jobs.list(&ListParams::default()).await.unwrap();
    let recorded = subject.cluster.recorded();
    let requests = recorded.requests().iter();
    let lists = requests.filter(|request| request.right() == "list jobs.batch");
    let answers = lists.map(|request| request.status).collect::<Vec<_>>();
    assert_eq!(answers, [429, 200]);
    for (fault, is_stored) in [(Fault::DropBefore, false), (Fault::DropAfter, true)] {
        faults.next(1, "create", "jobs", fault);
        let made = jobs.create(&PostParams::default(), &job("a")).await;
        assert!(
            !matches!(made, Ok(_) | Err(kube::Error::Api(_))),
            "{made:?}"
        );
        assert_eq!(jobs.get_opt("a").await.unwrap().is_some(), is_stored);
    }
    let made = jobs.create(&PostParams::default(), &job("a")).await;
    assert_eq!(refusal(made).0, 409);
}

#[tokio::test]
async fn a_version_that_is_too_old_ends_a_watch_with_an_event_and_refuses_a_list() {
    let Some(subject) = Subject::new().await else {
        return;
    };
    let maps = subject.asked_by::<ConfigMap>(ADMIN);
    let faults = subject.cluster.faults();
    faults.next(1, "watch", "configmaps", Fault::Expired);
    let events = maps.watch(&WatchParams::default(), "1").await.unwrap();
    let events: Vec<_> = events.try_collect().await.unwrap();
    let [WatchEvent::Error(status)] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!((status.code, status.reason.as_str()), (410, "Expired"));

    faults.next(1, "list", "configmaps", Fault::Expired);
    assert_eq!(refusal(maps.list(&ListParams::default()).await).0, 410);
    maps.list(&ListParams::default()).await.unwrap();
}
