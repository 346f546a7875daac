//! What Helm makes of the chart on a real node.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::ResourceExt as _;
use serde_json::json;

use super::{Fixture, Stage};

/// Names of what is there in a namespace, but what a cluster puts in every namespace.
async fn there(fixture: &Fixture) -> Vec<String> {
    let mut found = Vec::new();
    macro_rules! add {
        ($($kind:ident)*) => {$(
            let names = fixture.list::<$kind>().await.into_iter().map(|object| object.name_any());
            found.extend(names.map(|name| format!("{} {name}", stringify!($kind))));
        )*};
    }
    add!(Deployment Lease ConfigMap Pod Secret Service ServiceAccount PodDisruptionBudget Role RoleBinding);
    let of_cluster = ["ConfigMap kube-root-ca.crt", "ServiceAccount default"];
    found.retain(|name| !of_cluster.contains(&name.as_str()));
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn helm_installs_tests_and_removes_a_release_and_leaves_nothing_but_tests() {
    let Some(fixture) = Fixture::new(false).await else {
        return;
    };
    let canary = json!({"tests": {"canary": {"enabled": true}}});
    let stage = Stage::prepare(fixture, canary).await;
    let before = there(&stage.fixture).await;
    stage.install().await;
    assert!(there(&stage.fixture).await.len() > before.len() + 10);

    let test = ["test", "mayfly", "--logs", "--timeout", "10m"];
    let said = stage.fixture.helm(&test);
    for words in [
        "GET /actuator/health/readiness: 200",
        "GET /metrics: 200",
        "POST /api/v1/terraform-rs: 401",
        "Nothing is missing",
        "the canary sings",
    ] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    assert_eq!(
        said.matches("Phase:          Succeeded").count(),
        3,
        "{said}"
    );

    let remove = ["uninstall", "mayfly", "--wait", "--timeout", "10m"];
    stage.fixture.helm(&remove);
    let mut expected = before;
    // Helm keeps the pods of tests, for their logs; the canary's run ends with its time to live.
    for test in ["canary", "http", "rights"] {
        expected.push(format!("Pod mayfly-test-{test}"));
    }
    expected.sort();
    let of_run = |name: &String| name.contains(" job-");
    stage
        .fixture
        .until("nothing of the release is left", async || {
            let left = there(&stage.fixture).await;
            let mut left: Vec<_> = left.into_iter().filter(|name| !of_run(name)).collect();
            left.sort();
            (left == expected).then_some(())
        })
        .await;
}
