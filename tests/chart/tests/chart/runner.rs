//! The runner of suites: it finds what is wrong, and refuses what it does not know.

use std::fs;

use tempfile::TempDir;
use test_chart::Suite;
use test_chart::suite::{Failure, Kitchen};

const CHART: &str = "apiVersion: v2\nname: small\nversion: 1.0.0\n";
const TEMPLATES: &[(&str, &str)] = &[
    (
        "map.yaml",
        "{{- if not .Values.name }}{{ fail \"name is missing\" }}{{ end }}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .Release.Name }}-{{ .Values.name }}
  namespace: {{ .Release.Namespace }}
  annotations:
    a.b/c: {{ .Capabilities.KubeVersion.Version }}
data:
  secret: {{ b64enc \"hidden\" }}
  empty: \"\"
",
    ),
    (
        "pods.yaml",
        "{{- range .Values.pods }}
---
apiVersion: v1
kind: Pod
metadata:
  name: {{ .name }}
spec:
  containers:
    - name: a
      env: [{name: A, value: one}, {name: B, value: two, more: 1}]
{{- end }}
",
    ),
];
const HEAD: &str =
    "release: {name: r, namespace: there}\nset: {name: x, pods: [{name: p}, {name: q}]}\n";

fn chart() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("templates")).unwrap();
    fs::create_dir(folder.path().join("tests")).unwrap();
    fs::write(folder.path().join("Chart.yaml"), CHART).unwrap();
    fs::write(folder.path().join("values.yaml"), "name: \"\"\npods: []\n").unwrap();
    for (name, text) in TEMPLATES {
        fs::write(folder.path().join("templates").join(name), text).unwrap();
    }
    folder
}

fn suite(chart: &TempDir, text: &str) -> Result<Suite, String> {
    let file = chart.path().join("tests/one_test.yaml");
    fs::write(&file, text).unwrap();
    Suite::read(chart.path(), &file)
}

/// What does not hold of assertions about a template.
fn failures(template: &str, asserts: &[&str]) -> Vec<Failure> {
    let chart = chart();
    let asserts: Vec<_> = asserts
        .iter()
        .map(|assert| {
            format!(
                "      - {assert}
"
            )
        })
        .collect();
    let asserts = asserts.concat();
    let text =
        format!("{HEAD}tests:\n  - it: works\n    template: {template}\n    asserts:\n{asserts}");
    let suite = suite(&chart, &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    suite.failures(&Kitchen::default())
}

const OF_THE_MAP: &[&str] = &[
    "equal: {path: metadata.name, value: r-x}",
    "equal: {path: data.secret, value: hidden, decodeBase64: true}",
    "notEqual: {path: metadata.namespace, value: other}",
    "exists: {path: 'metadata.annotations[\"a.b/c\"]'}",
    "notExists: {path: data.nothing}",
    "isNull: {path: data.nothing}",
    "isKind: {of: ConfigMap}",
    "isAPIVersion: {of: v1}",
    "isSubset: {path: '', content: {kind: ConfigMap, metadata: {name: r-x}}}",
    "isNotSubset: {path: metadata, content: {name: other}}",
    "isNullOrEmpty: {path: data.empty}",
    "isNotEmpty: {path: data.secret}",
    "isType: {path: data, type: 'map[string]interface {}'}",
    "lengthEqual: {path: data, count: 2}",
    "matchRegex: {path: metadata.name, pattern: ^r-}",
    "notMatchRegex: {path: metadata.name, pattern: ^x}",
    "containsDocument: {kind: ConfigMap, apiVersion: v1, name: r-x, namespace: there}",
    "hasDocuments: {count: 1}",
    "notFailedTemplate: {}",
];

const OF_THE_PODS: &[&str] = &[
    "hasDocuments: {count: 2}",
    "isKind: {of: Pod}",
    "contains: {path: 'spec.containers[0].env', content: {name: A, value: one}}",
    "contains: {path: 'spec.containers[0].env', content: {name: B}, any: true, count: 1}",
    "notContains: {path: 'spec.containers[0].env', content: {name: B}}",
    "{equal: {path: metadata.name, value: q}, documentIndex: 1}",
    "{isKind: {of: Pod}, documentSelector: {path: metadata.name, value: p}}",
    "{equal: {path: 'spec.containers[0].env[?(@.name == \"B\")].value', value: two}, not: false}",
];

#[test]
fn what_holds_is_found_to_hold() {
    assert_eq!(failures("map.yaml", OF_THE_MAP), []);
    assert_eq!(failures("templates/pods.yaml", OF_THE_PODS), []);
}

#[test]
fn every_assertion_fails_once_it_is_spoilt() {
    let chart = chart();
    for (template, asserts) in [("map.yaml", OF_THE_MAP), ("pods.yaml", OF_THE_PODS)] {
        for assert in asserts {
            let text = format!(
                "{HEAD}tests:\n  - it: works\n    template: {template}\n    asserts:\n      - {assert}\n"
            );
            let suite = suite(&chart, &text).unwrap();
            let kitchen = Kitchen::default();
            for spoilt in suite.spoilt() {
                assert!(spoilt.fails(&kitchen), "{spoilt}");
            }
        }
    }
}

#[test]
fn an_assertion_holds_for_every_document_or_not_at_all() {
    let one_of_two = [
        "equal: {path: metadata.name, value: p}",
        "notEqual: {path: metadata.name, value: p}",
    ];
    for assert in one_of_two {
        assert_eq!(failures("pods.yaml", &[assert]).len(), 1, "{assert}");
    }
    let nothing_to_look_at = [
        "{isKind: {of: Pod}, template: absent.yaml}",
        "{isKind: {of: Pod}, documentIndex: 2}",
        "{notEqual: {path: kind, value: a}, documentSelector: {path: metadata.name, value: z}}",
        "notEqual: {path: data.absent, value: a}",
        "notContains: {path: data.absent, content: a}",
    ];
    for assert in nothing_to_look_at {
        assert_eq!(failures("pods.yaml", &[assert]).len(), 1, "{assert}");
    }
}

#[test]
fn a_template_that_fails_is_asked_for_by_its_words() {
    let chart = chart();
    let with = |assert: &str, name: &str| {
        let text = format!(
            "release: {{name: r, namespace: there}}\ntests:\n  - it: fails\n    set: {{name: {name}}}\n    asserts: [{assert}]\n"
        );
        suite(&chart, &text)
            .unwrap()
            .failures(&Kitchen::default())
            .len()
    };
    assert_eq!(
        with("failedTemplate: {errorMessage: name is missing}", "''"),
        0
    );
    assert_eq!(with("failedTemplate: {errorPattern: is missing$}", "''"), 0);
    assert_eq!(with("failedTemplate: {}", "''"), 0);
    assert_eq!(with("failedTemplate: {errorMessage: missing}", "''"), 1);
    assert_eq!(with("failedTemplate: {}", "x"), 1);
    assert_eq!(with("isKind: {of: ConfigMap}", "''"), 1);
    assert_eq!(with("notFailedTemplate: {}", "''"), 1);
}

#[test]
fn values_and_capabilities_of_a_test_lie_over_those_of_its_suite() {
    let chart = chart();
    fs::write(
        chart.path().join("tests/more.yaml"),
        "name: file\npods: []\n",
    )
    .unwrap();
    let text = "
release: {name: r, namespace: there}
values: [more.yaml]
capabilities: {majorVersion: 1, minorVersion: 29}
templates: [map.yaml]
tests:
  - it: has the file
    asserts:
      - equal: {path: metadata.name, value: r-file}
      - equal: {path: 'metadata.annotations[\"a.b/c\"]', value: v1.29.0}
  - it: has its own
    set: {name: own}
    release: {name: other}
    capabilities: {minorVersion: 31}
    asserts:
      - equal: {path: metadata.name, value: other-own}
      - equal: {path: 'metadata.annotations[\"a.b/c\"]', value: v1.31.0}
";
    assert_eq!(
        suite(&chart, text).unwrap().failures(&Kitchen::default()),
        []
    );
}

#[test]
fn what_the_runner_does_not_know_is_refused() {
    let chart = chart();
    let test = |rest: &str| format!("{HEAD}tests:\n  - it: works\n{rest}");
    let assert = |assert: &str| test(&format!("    asserts: [{assert}]\n"));
    for (text, word) in [
        (assert("matchSnapshot: {}"), "matchSnapshot"),
        (assert("equals: {path: a, value: b}"), "equals"),
        (assert("equal: {path: a, values: b}"), "values"),
        (assert("equal: {path: a}"), "value"),
        (assert("equal: {path: 'a[', value: b}"), "path"),
        (
            assert("{equal: {path: a, value: b}, exists: {path: a}}"),
            "one thing",
        ),
        (assert("matchRegex: {path: a, pattern: '('}"), "matchRegex"),
        (test("    asserts: []\n"), "asserts"),
        (
            test("    skip: true\n    asserts: [notFailedTemplate: {}]\n"),
            "skip",
        ),
        (format!("{HEAD}tests: []\n"), "without tests"),
        (
            format!("chart: {{version: 1.0.0}}\n{HEAD}tests: []\n"),
            "chart",
        ),
        (
            "tests:\n  - it: a\n    asserts: [notFailedTemplate: {}]\n".to_owned(),
            "names its release",
        ),
    ] {
        let error = suite(&chart, &text).expect_err(&text);
        assert!(error.contains(word), "{word}: {error}");
    }
}
