//! A scanner finds nothing there is no reason for.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;
use test_chart::Release;
use test_chart::programs::{output, python};

use crate::releases;

/// Checks of the scanner that are left out, and why.
const LEFT_OUT: &[(&str, &str)] = &[
    (
        "CKV_K8S_11",
        "a CPU limit throttles; whoever wants one sets it",
    ),
    (
        "CKV_K8S_15",
        "a tag of ours never moves, so pulling each time only adds a way to fail",
    ),
    (
        "CKV_K8S_38",
        "the launcher talks to the Kubernetes API, and so does the test of its rights",
    ),
    (
        "CKV_K8S_40",
        "volumes of existing installations belong to user 1000",
    ),
    (
        "CKV_K8S_43",
        "a digest is for whoever installs: image.digest",
    ),
    ("CKV_K8S_8", "pods of `helm test` end by themselves"),
    ("CKV_K8S_9", "pods of `helm test` end by themselves"),
    (
        "CKV_K8S_35",
        "the executor's contract and the platform's clients take secrets by environment",
    ),
];

/// What the scanner finds, as `check: resource`.
fn scan(text: &str) -> BTreeSet<String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rendered.yaml");
    fs::write(&file, text).unwrap();
    let mut command = python("scan/bin/checkov");
    command
        .args([
            "--framework",
            "kubernetes",
            "--skip-download",
            "--compact",
            "--quiet",
            "-o",
            "json",
        ])
        .env_remove("BC_API_KEY")
        .arg("-f")
        .arg(&file);
    let output = output(&mut command);
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let summary = if report["summary"].is_object() {
        &report["summary"]
    } else {
        &report
    };
    assert!(summary["passed"].as_u64().unwrap() > 50, "{summary}");
    let failed = report["results"]["failed_checks"]
        .as_array()
        .into_iter()
        .flatten();
    failed
        .map(|check| {
            format!(
                "{}: {}",
                check["check_id"].as_str().unwrap(),
                check["resource"].as_str().unwrap()
            )
        })
        .collect()
}

#[test]
fn a_scanner_finds_nothing_there_is_no_reason_for() {
    let text = |(_, release): (String, Release)| release.text().unwrap();
    let all: String = releases().into_iter().map(text).collect();
    let found = scan(&all);
    let reasoned = |finding: &&String| {
        LEFT_OUT
            .iter()
            .any(|(check, _)| finding.starts_with(&format!("{check}:")))
    };
    let other: Vec<_> = found.iter().filter(|finding| !reasoned(finding)).collect();
    assert!(other.is_empty(), "{other:#?}");
    // A reason for nothing is no reason.
    for (check, why) in LEFT_OUT {
        let used = found
            .iter()
            .any(|finding| finding.starts_with(&format!("{check}:")));
        assert!(used, "{check} is not found any more: {why}");
    }
}
