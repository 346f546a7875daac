//! The API server accepts what is installed, and the Jobs that launchers create with it.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use integration_tests::{Repository, job};
use k8s_openapi::api::core::v1::PodSpec;
use serde_json::{Value, json};
use test_chart::programs::{kubectl, operator, told};
use test_chart::{Release, chart, root, values_files};
use test_peers::skips::needed;

use super::dry_run::DryRun;
use super::{makers_of_jobs, merge, rendered, variable};

/// The group of the Prometheus operator's kinds, which a cluster need not have.
const OPERATOR: &str = "monitoring.coreos.com";

fn read(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The values that the documents show.
fn documented() -> Vec<(String, Value)> {
    let mut found = Vec::new();
    let install = fs::read_to_string(root().join("docs/install.md")).unwrap();
    let mut blocks = install
        .split("```yaml\n")
        .skip(1)
        .map(|rest| read(rest.split_once("```").unwrap().0));
    // The first block is a whole file. The others are merged over it, except for those of another release.
    let whole = blocks.next().unwrap();
    for block in blocks.chain([json!({})]) {
        let is_other = block.pointer("/launcher/enabled") == Some(&json!(false));
        let mut values = if is_other { json!({}) } else { whole.clone() };
        merge(&mut values, block);
        found.push(("docs/install.md".to_owned(), values));
    }
    let readme = fs::read_to_string(chart().join("README.md")).unwrap();
    for rest in readme.split("<<END\n").skip(1) {
        let (block, _) = rest.split_once("\n    END\n").unwrap();
        found.push(("README.md".to_owned(), read(block)));
    }
    assert!(found.len() >= 4, "{found:?}");
    found
}

/// Has the server take the objects of every release that are of the operator's kinds, or all others. Returns how many there
/// are of each kind.
async fn taken(server: &DryRun, of_operator: bool) -> BTreeMap<String, usize> {
    let files = values_files().into_iter();
    let files = files.map(|(name, file)| (name, Release::new().with(&file)));
    let documented = documented().into_iter();
    let documented = documented.map(|(name, values)| (name, Release::new().set(values)));
    let (mut wrong, mut taken) = (Vec::new(), BTreeMap::new());
    for (name, release) in files.chain(documented) {
        for document in release.on(&server.version).documents() {
            if document.text_at("/apiVersion").starts_with(OPERATOR) != of_operator {
                continue;
            }
            match server.takes(&document.value).await {
                Ok(()) => *taken.entry(document.kind().to_owned()).or_default() += 1,
                Err(why) => wrong.push(format!("{name}: {document}: {why}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    taken
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_takes_every_object_of_every_release() {
    let Some(server) = DryRun::start().await else {
        return;
    };
    let taken = taken(&server, false).await;
    assert!(taken.values().sum::<usize>() > 100, "{taken:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_takes_the_monitors_and_alert_rules_of_every_release() {
    let Some(folder) = needed(operator()) else {
        return;
    };
    let Some(mut server) = DryRun::start().await else {
        return;
    };
    let kinds = ["PodMonitor", "PrometheusRule", "ServiceMonitor"];
    let definitions = kinds.map(|kind| {
        let file = format!("{OPERATOR}_{}s.yaml", kind.to_lowercase());
        serde_saphyr::from_str(&fs::read_to_string(folder.join(file)).unwrap()).unwrap()
    });
    server.define(&definitions).await;
    let taken = taken(&server, true).await;
    assert!(taken.keys().eq(kinds), "{taken:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_takes_the_plain_manifests_and_the_examples_of_kustomize() {
    let Some(kubectl) = needed(kubectl().ok_or("no kubectl on PATH")) else {
        return;
    };
    let Some(server) = DryRun::start().await else {
        return;
    };
    let examples =
        ["namespaces", "rights"].map(|name| root().join("examples/kustomize").join(name));
    let kustomizations = [&[root().join("rbac")], &examples[..]].concat();
    let plain = ["rbac/agent.yaml", "rbac/seed.yaml"];
    let mut texts = plain
        .map(|file| fs::read_to_string(root().join(file)).unwrap())
        .to_vec();
    for folder in kustomizations {
        texts.push(told(Command::new(&kubectl).arg("kustomize").arg(folder)));
    }
    let mut taken = 0;
    for text in texts {
        for object in serde_saphyr::from_multiple::<Value>(&text).unwrap() {
            assert_eq!(server.takes(&object).await, Ok(()), "{object:#}");
            taken += 1;
        }
    }
    assert!(taken > 15, "{taken}");
}

/// Names of objects of a kind that a pod's spec refers to.
fn referred(spec: &PodSpec) -> Vec<(&'static str, String)> {
    let mut names = Vec::new();
    let mut add = |kind, name: Option<String>| names.extend(name.map(|name| (kind, name)));
    add("ServiceAccount", spec.service_account_name.clone());
    for volume in spec.volumes.iter().flatten() {
        let map = volume.config_map.as_ref().map(|source| source.name.clone());
        add("ConfigMap", map);
        let claim = volume.persistent_volume_claim.as_ref();
        add(
            "PersistentVolumeClaim",
            claim.map(|source| source.claim_name.clone()),
        );
    }
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_takes_the_jobs_of_every_release_and_they_find_what_they_name() {
    let Some(server) = DryRun::start().await else {
        return;
    };
    let repository = Repository::fixture();
    let plan = job::plan(&repository);
    let steps = [
        plan.clone(),
        job::apply_after(&plan),
        job::scripts(&repository, vec![job::bash(1, "true")]),
    ];
    let (mut seen, mut found) = (0, 0);
    for (name, file) in values_files() {
        let documents = Release::new().with(&file).documents();
        for deployment in makers_of_jobs(&documents) {
            let runs = variable(deployment, "ExecutorEphemeralNamespace");
            for step in &steps {
                let objects = rendered(&documents, deployment, step);
                for object in &objects {
                    assert_eq!(server.takes(object).await, Ok(()), "{name}: {object:#}");
                    assert_eq!(object["metadata"]["namespace"], runs, "{name}");
                    let text = object.to_string();
                    // Argo CD would take the Job for one of its own, and remove it.
                    assert!(
                        !text.contains("app.kubernetes.io/instance"),
                        "{name}: {text}"
                    );
                }
                let job = objects
                    .iter()
                    .find(|object| object["kind"] == "Job")
                    .unwrap();
                let spec = &job["spec"]["template"]["spec"];
                let spec: PodSpec = serde_json::from_value(spec.clone()).unwrap();
                for (kind, referred) in referred(&spec) {
                    let of_chart = referred.starts_with("mayfly");
                    let is_there = documents.iter().any(|document| {
                        document.kind() == kind
                            && document.name() == referred
                            && document.namespace() == runs
                    });
                    assert!(
                        is_there || !of_chart,
                        "{name}: no {kind} {referred} in {runs}"
                    );
                    found += usize::from(is_there);
                }
                seen += 1;
            }
        }
    }
    assert!(seen >= 15 && found >= 15, "{seen} steps, {found} objects");
}
