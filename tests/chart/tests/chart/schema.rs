//! The schema of values: local, closed, and of the same keys as the values.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};
use test_chart::values::rows;
use test_chart::{Release, chart};

fn schema() -> Value {
    let text = fs::read_to_string(chart().join("values.schema.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn defaults() -> Value {
    let text = fs::read_to_string(chart().join("values.yaml")).unwrap();
    serde_saphyr::from_str(&text).unwrap()
}

/// Helm and helm-unittest hold it to its own schema, and values to it.
#[test]
fn the_schema_names_nothing_elsewhere() {
    let text = schema().to_string();
    let mut references = text.split("\"$ref\":");
    references.next();
    let mut seen = 0;
    for rest in references {
        assert!(rest.starts_with("\"#/"), "{}", &rest[..rest.len().min(80)]);
        seen += 1;
    }
    assert!(seen > 50, "only {seen} references were found");
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

/// Maps whose keys are ours: those the documented values lie in.
fn maps() -> BTreeSet<String> {
    let mut found = BTreeSet::from([String::new()]);
    for row in rows().unwrap() {
        let mut path = String::new();
        let (parents, _) = row.key.rsplit_once('.').unwrap_or_default();
        for key in parents.split('.').filter(|key| !key.is_empty()) {
            path = format!("{path}/{key}");
            found.insert(path.clone());
        }
    }
    assert!(found.len() > 25, "{found:?}");
    found
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
    for path in maps() {
        let described = at(&schema, &path).unwrap_or_else(|| panic!("the schema has no {path}"));
        let described: BTreeSet<&String> = described["properties"]
            .as_object()
            .unwrap()
            .keys()
            .collect();
        let there: BTreeSet<&String> = defaults
            .pointer(&path)
            .unwrap()
            .as_object()
            .unwrap()
            .keys()
            .collect();
        assert_eq!(described, there, "{path}");
    }
}

#[test]
fn an_unknown_key_is_refused_at_every_level() {
    for path in maps() {
        // A parent chart shares it with all its charts.
        if path == "/global" {
            continue;
        }
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
