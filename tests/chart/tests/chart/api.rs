//! Every document is what the Kubernetes API takes it for.

use std::fs;

use test_chart::api;
use test_chart::programs::{python, told};

use crate::{VERSIONS, documents, releases};

#[test]
fn the_api_knows_every_field_of_every_document() {
    let mut wrong = Vec::new();
    for (name, documents) in documents() {
        for document in &documents {
            if let Err(problem) = api::check(&document.value) {
                wrong.push(format!("{name}: {document}: {problem}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Another reader, with the schemas of each version, and with YAML as Kubernetes reads it.
fn takes_every_document_of_its_own_kinds(version: &str) {
    let folder = tempfile::tempdir().unwrap();
    let minor = version.trim_end_matches(".0");
    let mut command = python("chart/bin/kubernetes-validate");
    command.args(["--strict", "--quiet", "--no-warn", "-k", minor]);
    for (name, release) in releases() {
        let file = folder.path().join(format!("{name}.yaml"));
        fs::write(&file, release.on(version).text().unwrap()).unwrap();
        command.arg(file);
    }
    told(&mut command);
}

#[test]
fn the_oldest_version_takes_every_document_of_its_own_kinds() {
    takes_every_document_of_its_own_kinds(VERSIONS[0]);
}

#[test]
fn the_first_version_with_admission_policies_takes_every_document_of_its_own_kinds() {
    takes_every_document_of_its_own_kinds(VERSIONS[1]);
}

#[test]
fn the_version_our_types_are_of_takes_every_document_of_its_own_kinds() {
    takes_every_document_of_its_own_kinds(VERSIONS[2]);
}

#[test]
fn the_newest_version_takes_every_document_of_its_own_kinds() {
    takes_every_document_of_its_own_kinds(VERSIONS[3]);
}

#[test]
fn an_environment_names_nothing_twice() {
    let mut seen = 0;
    for (name, documents) in documents() {
        for document in documents {
            let spec = match document.kind() {
                "Pod" => &document.value["spec"],
                _ => &document.value["spec"]["template"]["spec"],
            };
            for kind in ["containers", "initContainers"] {
                for container in spec[kind].as_array().into_iter().flatten() {
                    let variables = container["env"].as_array().into_iter().flatten();
                    let mut names: Vec<_> = variables
                        .map(|variable| variable["name"].as_str().unwrap())
                        .collect();
                    let all = names.len();
                    names.sort_unstable();
                    names.dedup();
                    assert_eq!(names.len(), all, "{name}: {document}: {names:?}");
                    seen += all;
                }
            }
        }
    }
    assert!(seen > 0);
}
