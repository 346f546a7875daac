//! The schema of values: sound, local, closed, and true of every file of values.

use std::fs;

use serde_json::{Value, json};
use test_chart::programs::{python, told};
use test_chart::{Release, chart, values_files};

fn schema() -> Value {
    let text = fs::read_to_string(chart().join("values.schema.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn defaults() -> Value {
    let text = fs::read_to_string(chart().join("values.yaml")).unwrap();
    serde_saphyr::from_str(&text).unwrap()
}

fn checker() -> std::process::Command {
    let mut command = python("chart/bin/check-jsonschema");
    // What Helm's own validator takes for patterns.
    command.args(["--regex-variant", "nonunicode"]);
    command
}

#[test]
fn the_schema_keeps_to_its_own_schema_and_names_nothing_elsewhere() {
    let schema = schema();
    assert_eq!(schema["$schema"], "http://json-schema.org/draft-07/schema#");
    told(
        checker()
            .arg("--check-metaschema")
            .arg(chart().join("values.schema.json")),
    );
    let text = schema.to_string();
    for (at, _) in text.match_indices("\"$ref\":") {
        let rest = &text[at + 7..];
        assert!(rest.starts_with("\"#/"), "{}", &rest[..rest.len().min(80)]);
    }
}

#[test]
fn every_file_of_values_keeps_to_the_schema() {
    let mut files: Vec<_> = values_files().into_iter().map(|(_, file)| file).collect();
    files.push(chart().join("values.yaml"));
    let mut command = checker();
    command
        .arg("--schemafile")
        .arg(chart().join("values.schema.json"));
    told(command.args(files));
}

/// Follows local references.
fn resolved<'s>(root: &'s Value, mut schema: &'s Value) -> &'s Value {
    while let Some(reference) = schema["$ref"].as_str() {
        let pointer = reference.trim_start_matches('#');
        schema = root
            .pointer(pointer)
            .unwrap_or_else(|| panic!("no {reference}"));
    }
    schema
}

/// Collects every map of values that has keys of ours, with its path.
fn maps(value: &Value, path: &str, found: &mut Vec<String>) {
    let Some(map) = value
        .as_object()
        .filter(|map| !map.is_empty() || path.is_empty())
    else {
        return;
    };
    found.push(path.to_owned());
    for (key, value) in map {
        maps(value, &format!("{path}/{key}"), found);
    }
}

/// The schema of the values at a path, if it says anything of them.
fn at<'s>(root: &'s Value, path: &str) -> Option<&'s Value> {
    let mut schema = resolved(root, root);
    for key in path.split('/').skip(1) {
        let key = schema["properties"].get(key)?;
        schema = resolved(root, key);
    }
    Some(schema)
}

#[test]
fn values_and_schema_have_the_same_keys() {
    let (schema, defaults) = (schema(), defaults());
    let mut paths = Vec::new();
    maps(&defaults, "", &mut paths);
    assert!(paths.len() > 30, "{paths:?}");
    for path in paths {
        let described = at(&schema, &path).unwrap_or_else(|| panic!("the schema has no {path}"));
        // Maps with keys of users: labels, limits, security contexts.
        let Some(properties) = described["properties"].as_object() else {
            continue;
        };
        let value = defaults.pointer(&path).unwrap().as_object().unwrap();
        let absent: Vec<_> = value
            .keys()
            .filter(|key| !properties.contains_key(*key))
            .collect();
        assert!(absent.is_empty(), "the schema has no {absent:?} of {path}");
        let absent: Vec<_> = properties
            .keys()
            .filter(|key| !value.contains_key(*key))
            .collect();
        assert!(absent.is_empty(), "values.yaml has no {absent:?} of {path}");
    }
}

#[test]
fn a_key_nobody_reads_is_refused_wherever_it_stands() {
    let (schema, defaults) = (schema(), defaults());
    let mut paths = Vec::new();
    maps(&defaults, "", &mut paths);
    let ours =
        |path: &String| at(&schema, path).is_some_and(|schema| schema["properties"].is_object());
    let ours: Vec<_> = paths.into_iter().filter(ours).collect();
    assert!(ours.len() > 25, "{ours:?}");
    for path in ours {
        let mut values = json!({});
        let mut place = &mut values;
        for key in path.split('/').skip(1) {
            place = place
                .as_object_mut()
                .unwrap()
                .entry(key)
                .or_insert(json!({}));
        }
        place["imge"] = json!("typo");
        let refused = Release::new().set(values).text();
        let error = refused.expect_err(&format!("{path}/imge is taken"));
        assert!(error.contains("imge"), "{path}: {error}");
    }
}
