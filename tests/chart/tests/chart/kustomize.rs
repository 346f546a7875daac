//! What `kubectl kustomize` makes of the plain manifests and of the examples. Where there is no `kubectl`, the
//! tests are skipped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use test_chart::programs::{helm_with, kubectl, told};
use test_chart::{chart, root};
use test_peers::skips::needed;

/// `kubectl`, or nothing where the test is skipped.
#[track_caller]
fn kubectl_or_skip() -> Option<PathBuf> {
    needed(kubectl().ok_or("no kubectl on PATH"))
}

/// The documents of a kustomization.
fn built(kubectl: &Path, folder: &Path) -> Vec<Value> {
    let text = told(Command::new(kubectl).arg("kustomize").arg(folder));
    documents(&text)
}

fn documents(text: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    documents
        .into_iter()
        .filter(|document| !document.is_null())
        .collect()
}

fn names(documents: &[Value]) -> Vec<String> {
    let name = |document: &Value| {
        let text = |at: &str| {
            document
                .pointer(at)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        [
            text("/kind"),
            text("/metadata/namespace"),
            text("/metadata/name"),
        ]
        .join("/")
    };
    let mut names: Vec<String> = documents.iter().map(name).collect();
    names.sort();
    names
}

#[test]
fn the_plain_manifests_are_what_their_kustomization_makes() {
    let Some(kubectl) = kubectl_or_skip() else {
        return;
    };
    let folder = root().join("rbac");
    let mut plain = Vec::new();
    for file in ["launcher.yaml", "executor.yaml"] {
        plain.extend(documents(&fs::read_to_string(folder.join(file)).unwrap()));
    }
    let built = built(&kubectl, &folder);
    assert_eq!(names(&built), names(&plain));
    for document in &plain {
        assert!(built.contains(document), "{document:#}");
    }
}

#[test]
fn the_examples_hold_both_namespaces_to_the_standard_and_bind_the_launcher_where_it_is() {
    let Some(kubectl) = kubectl_or_skip() else {
        return;
    };
    let examples = root().join("examples/kustomize");
    let namespaces = built(&kubectl, &examples.join("namespaces"));
    let mut seen = 0;
    let enforced = "/metadata/labels/pod-security.kubernetes.io~1enforce";
    for namespace in namespaces
        .iter()
        .filter(|document| document["kind"] == "Namespace")
    {
        assert_eq!(
            namespace.pointer(enforced).unwrap(),
            "restricted",
            "{namespace:#}"
        );
        seen += 1;
    }
    assert_eq!(seen, 2);
    let account = |namespace: &str| format!("ServiceAccount/{namespace}/mayfly-launcher");
    assert!(names(&namespaces).contains(&account("mayfly")));
    let rights = built(&kubectl, &examples.join("rights"));
    assert!(!names(&rights).contains(&account("runs")));
    let mut bound = 0;
    for binding in rights
        .iter()
        .filter(|document| document["kind"] == "RoleBinding")
    {
        assert_eq!(binding["metadata"]["namespace"], "runs", "{binding:#}");
        let subject = &binding["subjects"][0];
        assert_eq!(
            (&subject["name"], &subject["namespace"]),
            (&"mayfly-launcher".into(), &"mayfly".into())
        );
        let role = format!("Role/runs/{}", binding["roleRef"]["name"].as_str().unwrap());
        assert!(names(&rights).contains(&role), "{role}");
        bound += 1;
    }
    assert_eq!(bound, 2);
}

#[test]
fn helm_passes_the_chart_through_the_post_renderer_of_the_example() {
    if kubectl_or_skip().is_none() {
        return;
    }
    let values = chart().join("ci/default-values.yaml");
    let arguments = |command: &mut Command| {
        command
            .arg(chart())
            .args(["--namespace", "mayfly", "--values"])
            .arg(&values);
    };
    let mut plain = helm_with(["template", "mayfly", "--no-hooks"]);
    arguments(&mut plain);
    let mut patched = helm_with(["template", "mayfly", "--no-hooks"]);
    arguments(&mut patched);
    patched
        .arg("--post-renderer")
        .arg(root().join("examples/kustomize/post-render/render.sh"));
    let (plain, patched) = (documents(&told(&mut plain)), documents(&told(&mut patched)));
    assert_eq!(names(&patched), names(&plain));
    for document in &patched {
        let label = "/metadata/labels/example.com~1cost-center";
        assert_eq!(document.pointer(label).unwrap(), "42", "{document:#}");
    }
    let deployment = patched
        .iter()
        .find(|document| document["kind"] == "Deployment")
        .unwrap();
    let hosts = &deployment["spec"]["template"]["spec"]["hostAliases"];
    assert_eq!(hosts[0]["hostnames"][0], "terrakube.example.com");
}
