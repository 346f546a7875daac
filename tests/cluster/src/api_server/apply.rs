//! Server-side apply: who owns which field, and what an apply changes.
//!
//! Lists with a merge key are owned by element, other lists as one value. Owners made by plain updates are not
//! tracked; only managers that apply are held against each other.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::patch::merge_key;
use super::status::ApiError;

/// A field: names, and `k:<key>=<value>` for elements of lists.
type Path = Vec<String>;

/// Merges `config` into `live` (an empty object when there is none).
pub(crate) fn apply(
    live: &mut Value,
    config: &Value,
    manager: &str,
    force: bool,
    now: &str,
) -> Result<(), ApiError> {
    let mut config = config.clone();
    if let Some(meta) = config.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in [
            "managedFields",
            "resourceVersion",
            "uid",
            "creationTimestamp",
            "namespace",
            "name",
        ] {
            meta.remove(field);
        }
    }
    let mut wanted = BTreeSet::new();
    leaves(&config, &mut Vec::new(), &mut wanted);
    wanted
        .retain(|path| !matches!(path[0].as_str(), "apiVersion" | "kind") && path != &["metadata"]);
    let mut managers: Vec<(String, BTreeSet<Path>)> = managers(live);
    let conflicts: Vec<(String, String)> = managers
        .iter()
        .filter(|(other, _)| other != manager)
        .flat_map(|(other, owned)| {
            let differing = owned.iter().filter(|path| wanted.contains(*path));
            differing
                .filter(|path| find(live, path) != find(&config, path))
                .map(|path| (other.clone(), format!(".{}", path.join("."))))
                .collect::<Vec<_>>()
        })
        .collect();
    if !conflicts.is_empty() && !force {
        return Err(ApiError::apply_conflict(&conflicts));
    }
    drop_abandoned(live, &managers, manager, &wanted);
    merge(live, &config, "");
    for (other, owned) in &mut managers {
        if other != manager {
            owned.retain(|path| {
                !conflicts
                    .iter()
                    .any(|(_, field)| *field == format!(".{}", path.join(".")))
            });
        }
    }
    managers.retain(|(other, owned)| other != manager && !owned.is_empty());
    managers.push((manager.to_owned(), wanted));
    write_managers(live, &managers, now);
    Ok(())
}

/// Removes what this manager applied before and no longer says, where nobody else says it.
fn drop_abandoned(
    live: &mut Value,
    managers: &[(String, BTreeSet<Path>)],
    manager: &str,
    wanted: &BTreeSet<Path>,
) {
    let before = managers
        .iter()
        .filter(|(other, _)| other == manager)
        .flat_map(|(_, owned)| owned);
    for path in before.filter(|path| !wanted.contains(*path)) {
        let shared = managers
            .iter()
            .any(|(other, owned)| other != manager && owned.contains(path));
        if !shared {
            remove(live, path);
        }
    }
}

fn leaves(value: &Value, path: &mut Path, out: &mut BTreeSet<Path>) {
    match value {
        Value::Object(fields) if !fields.is_empty() || path.is_empty() => {
            for (key, inner) in fields {
                path.push(key.clone());
                leaves(inner, path, out);
                path.pop();
            }
        }
        Value::Array(items) => match path.last().and_then(|list| merge_key(list)) {
            Some(key) if !items.is_empty() => {
                for item in items {
                    path.push(format!("k:{key}={}", item[key]));
                    leaves(item, path, out);
                    path.pop();
                }
            }
            _ => {
                out.insert(path.clone());
            }
        },
        _ => {
            out.insert(path.clone());
        }
    }
}

fn position(items: &[Value], part: &str) -> Option<usize> {
    let (key, text) = part.strip_prefix("k:")?.split_once('=')?;
    let value: Value = serde_json::from_str(text).ok()?;
    items.iter().position(|item| item[key] == value)
}

fn find<'a>(value: &'a Value, path: &[String]) -> Option<&'a Value> {
    path.iter().try_fold(value, |at, part| match at {
        Value::Array(items) => items.get(position(items, part)?),
        other => other.get(part),
    })
}

fn remove(value: &mut Value, path: &[String]) {
    let [part, rest @ ..] = path else { return };
    match value {
        Value::Object(fields) if rest.is_empty() => {
            fields.shift_remove(part);
        }
        Value::Object(fields) => {
            if let Some(inner) = fields.get_mut(part) {
                remove(inner, rest);
            }
        }
        Value::Array(items) => {
            let Some(at) = position(items, part) else {
                return;
            };
            // The key of an element is the element.
            if rest.len() == 1 && part.starts_with(&format!("k:{}=", rest[0])) {
                items.remove(at);
            } else {
                remove(&mut items[at], rest);
            }
        }
        _ => {}
    }
}

fn merge(live: &mut Value, config: &Value, name: &str) {
    match config {
        Value::Object(fields) => {
            if !live.is_object() {
                *live = json!({});
            }
            for (key, inner) in fields {
                merge(&mut live[key], inner, key);
            }
        }
        Value::Array(items) => {
            let Some(key) = merge_key(name) else {
                *live = config.clone();
                return;
            };
            let mut all = live.as_array().cloned().unwrap_or_default();
            for item in items {
                match all.iter_mut().find(|other| other[key] == item[key]) {
                    Some(other) => merge(other, item, ""),
                    None => all.push(item.clone()),
                }
            }
            *live = all.into();
        }
        other => *live = other.clone(),
    }
}

fn managers(live: &Value) -> Vec<(String, BTreeSet<Path>)> {
    let entries = live["metadata"]["managedFields"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    entries
        .iter()
        .map(|entry| {
            let mut paths = BTreeSet::new();
            read_fields(&entry["fieldsV1"], &mut Vec::new(), &mut paths);
            (entry["manager"].as_str().unwrap_or("").to_owned(), paths)
        })
        .collect()
}

/// `f:name` for fields, `k:{"key":value}` for elements.
fn read_fields(fields: &Value, path: &mut Path, out: &mut BTreeSet<Path>) {
    let Some(map) = fields.as_object() else {
        return;
    };
    if map.is_empty() && !path.is_empty() {
        out.insert(path.clone());
    }
    for (key, inner) in map {
        let part = if let Some(name) = key.strip_prefix("f:") {
            name.to_owned()
        } else {
            let element: Map<String, Value> = key
                .strip_prefix("k:")
                .and_then(|text| serde_json::from_str(text).ok())
                .unwrap_or_default();
            element
                .iter()
                .next()
                .map_or_else(String::new, |(key, value)| format!("k:{key}={value}"))
        };
        path.push(part);
        read_fields(inner, path, out);
        path.pop();
    }
}

fn write_managers(live: &mut Value, managers: &[(String, BTreeSet<Path>)], now: &str) {
    let version = live["apiVersion"].clone();
    let entries: Vec<Value> = managers
        .iter()
        .map(|(manager, paths)| {
            let mut fields = json!({});
            for path in paths {
                let mut at = &mut fields;
                for part in path {
                    let key = match part
                        .strip_prefix("k:")
                        .and_then(|element| element.split_once('='))
                    {
                        Some((key, value)) => format!("k:{{\"{key}\":{value}}}"),
                        None => format!("f:{part}"),
                    };
                    at = &mut at[key];
                    if at.is_null() {
                        *at = json!({});
                    }
                }
            }
            json!({
                "manager": manager, "operation": "Apply", "apiVersion": version, "time": now,
                "fieldsType": "FieldsV1", "fieldsV1": fields,
            })
        })
        .collect();
    live["metadata"]["managedFields"] = entries.into();
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::apply;

    #[test]
    fn a_field_of_another_manager_is_a_conflict_unless_forced() {
        let mut live = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}});
        apply(
            &mut live,
            &json!({"data": {"a": "1", "b": "1"}}),
            "one",
            false,
            "t",
        )
        .unwrap();
        let refused =
            apply(&mut live, &json!({"data": {"a": "2"}}), "two", false, "t").unwrap_err();
        assert_eq!(refused.code, 409);
        assert_eq!(
            refused.message,
            "Apply failed with 1 conflict: conflict with \"one\": .data.a"
        );
        apply(&mut live, &json!({"data": {"a": "2"}}), "two", true, "t").unwrap();
        assert_eq!(live["data"], json!({"a": "2", "b": "1"}));
    }

    #[test]
    fn what_a_manager_no_longer_applies_is_removed() {
        let mut live = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}});
        let both = json!({"spec": {"containers": [{"name": "a", "image": "1"}, {"name": "b", "image": "1"}]}});
        apply(&mut live, &both, "one", false, "t").unwrap();
        apply(
            &mut live,
            &json!({"spec": {"containers": [{"name": "a"}]}}),
            "one",
            false,
            "t",
        )
        .unwrap();
        assert_eq!(live["spec"]["containers"], json!([{"name": "a"}]));
    }
}
