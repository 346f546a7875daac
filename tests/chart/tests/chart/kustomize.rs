//! What `kubectl kustomize` makes of the plain manifests and of the examples. Where there is no `kubectl`, nothing is
//! proven; CI has one.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use test_chart::api;
use test_chart::programs::{helm_with, kubectl, told};
use test_chart::{chart, root};

/// The documents of a kustomization.
fn built(kubectl: &Path, folder: &Path) -> Vec<Value> {
    let text = told(Command::new(kubectl).arg("kustomize").arg(folder));
    documents(&text)
}

fn documents(text: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    let documents: Vec<Value> = documents.into_iter().filter(|document| !document.is_null()).collect();
    for document in &documents {
        assert_eq!(api::check(document), Ok(()), "{document:#}");
    }
    documents
}

fn names(documents: &[Value]) -> Vec<String> {
    let name = |document: &Value| {
        let text = |at: &str| document.pointer(at).and_then(Value::as_str).unwrap_or_default().to_owned();
        [text("/kind"), text("/metadata/namespace"), text("/metadata/name")].join("/")
    };
    let mut names: Vec<String> = documents.iter().map(name).collect();
    names.sort();
    names
}

#[test]
fn the_plain_manifests_are_what_their_kustomization_makes() {
    let Some(kubectl) = kubectl() else { return };
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

/// Copied, so that nothing is written into the repository.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &to);
        } else {
            fs::copy(&path, &to).unwrap();
        }
    }
}
