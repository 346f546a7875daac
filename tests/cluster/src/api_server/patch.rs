//! The patch languages: JSON merge patch, JSON patch, strategic merge patch.
//!
//! Pure. Server-side apply is its own language, in `apply`.

use serde_json::{Map, Value};

use super::status::ApiError;

/// RFC 7386.
pub(crate) fn merge(target: &mut Value, patch: &Value) {
    let Some(fields) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    for (key, value) in fields {
        if value.is_null() {
            if let Some(fields) = target.as_object_mut() {
                fields.remove(key);
            }
        } else {
            merge(&mut target[key], value);
        }
    }
}

/// By which field the elements of a list are told apart, or nothing where the list is one value.
pub(crate) fn merge_key(list: &str) -> Option<&'static str> {
    Some(match list {
        "containers"
        | "initContainers"
        | "ephemeralContainers"
        | "env"
        | "volumes"
        | "imagePullSecrets" => "name",
        "volumeMounts" => "mountPath",
        "volumeDevices" => "devicePath",
        "ports" => "containerPort",
        "ownerReferences" => "uid",
        "conditions" => "type",
        "hostAliases" => "ip",
        "topologySpreadConstraints" => "topologyKey",
        _ => return None,
    })
}

/// The strategic merge patch of built-in kinds.
pub(crate) fn strategic(target: &mut Value, patch: &Value) -> Result<(), ApiError> {
    let Some(fields) = patch.as_object() else {
        *target = patch.clone();
        return Ok(());
    };
    match patch["$patch"].as_str() {
        None | Some("merge") => {}
        Some("replace") => {
            let mut fields = fields.clone();
            fields.remove("$patch");
            *target = Value::Object(fields);
            return Ok(());
        }
        Some("delete") => {
            *target = Value::Object(Map::new());
            return Ok(());
        }
        Some(other) => {
            return Err(ApiError::bad_request(format!(
                "unknown patch type: {other}"
            )));
        }
    }
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    for (key, value) in fields {
        if key == "$patch" || key.starts_with("$setElementOrder/") {
            continue;
        }
        if key == "$retainKeys" {
            let keep = value.as_array().cloned().unwrap_or_default();
            if let Some(fields) = target.as_object_mut() {
                fields.retain(|name, _| keep.iter().any(|kept| kept == name));
            }
            continue;
        }
        if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
            let gone = value.as_array().cloned().unwrap_or_default();
            if let Some(items) = target[list].as_array_mut() {
                items.retain(|item| !gone.contains(item));
            }
            continue;
        }
        if value.is_null() {
            if let Some(fields) = target.as_object_mut() {
                fields.remove(key);
            }
        } else if let Some(items) = value.as_array() {
            strategic_list(&mut target[key], key, items)?;
        } else {
            strategic(&mut target[key], value)?;
        }
    }
    Ok(())
}

fn strategic_list(target: &mut Value, name: &str, items: &[Value]) -> Result<(), ApiError> {
    if name == "finalizers" {
        let mut all = target.as_array().cloned().unwrap_or_default();
        all.extend(
            items
                .iter()
                .filter(|item| !all.contains(item))
                .cloned()
                .collect::<Vec<_>>(),
        );
        *target = all.into();
        return Ok(());
    }
    let Some(key) = merge_key(name) else {
        *target = items.to_vec().into();
        return Ok(());
    };
    if items.iter().any(|item| item["$patch"] == "replace") {
        *target = items
            .iter()
            .filter(|item| item["$patch"] != "replace")
            .cloned()
            .collect();
        return Ok(());
    }
    let mut all = target.as_array().cloned().unwrap_or_default();
    for item in items {
        if item[key].is_null() {
            return Err(ApiError::bad_request(format!(
                "map: {item} does not contain declared merge key: {key}"
            )));
        }
        let known = all.iter().position(|other| other[key] == item[key]);
        match (item["$patch"] == "delete", known) {
            (true, Some(at)) => {
                all.remove(at);
            }
            (true, None) => {}
            (false, Some(at)) => strategic(&mut all[at], item)?,
            (false, None) => all.push(item.clone()),
        }
    }
    *target = all.into();
    Ok(())
}

/// RFC 6902.
pub(crate) fn json_patch(target: &mut Value, operations: &Value) -> Result<(), ApiError> {
    let Some(operations) = operations.as_array() else {
        return Err(ApiError::bad_request(
            "json: cannot unmarshal object into Go value of type jsonpatch.Patch",
        ));
    };
    for operation in operations {
        operate(target, operation).map_err(|why| {
            ApiError::new(
                422,
                "Invalid",
                format!("the server rejected our request due to an error in our request: {why}"),
            )
        })?;
    }
    Ok(())
}

fn operate(target: &mut Value, operation: &Value) -> Result<(), String> {
    let path = operation["path"].as_str().ok_or("missing path")?;
    let from = operation["from"].as_str();
    match operation["op"].as_str().unwrap_or("") {
        "add" => add(target, path, operation["value"].clone()),
        "remove" => remove(target, path).map(|_| ()),
        "replace" => {
            remove(target, path)?;
            add(target, path, operation["value"].clone())
        }
        "move" => {
            let value = remove(target, from.ok_or("missing from")?)?;
            add(target, path, value)
        }
        "copy" => {
            let value = target
                .pointer(from.ok_or("missing from")?)
                .cloned()
                .ok_or("missing source")?;
            add(target, path, value)
        }
        "test" if target.pointer(path).unwrap_or(&Value::Null) == &operation["value"] => Ok(()),
        "test" => Err(format!("testing value {path} failed: test failed")),
        other => Err(format!("unexpected kind: {other}")),
    }
}

fn parent<'a>(target: &'a mut Value, path: &str) -> Result<(&'a mut Value, String), String> {
    let (parent, last) = path
        .rsplit_once('/')
        .ok_or_else(|| format!("invalid path: {path}"))?;
    let parent = target
        .pointer_mut(parent)
        .ok_or_else(|| format!("doc is missing path: {path}"))?;
    Ok((parent, last.replace("~1", "/").replace("~0", "~")))
}

fn add(target: &mut Value, path: &str, value: Value) -> Result<(), String> {
    if path.is_empty() {
        *target = value;
        return Ok(());
    }
    let (parent, last) = parent(target, path)?;
    match parent {
        Value::Object(fields) => {
            fields.insert(last, value);
        }
        Value::Array(items) if last == "-" => items.push(value),
        Value::Array(items) => {
            let at: usize = last.parse().map_err(|_| format!("invalid index: {last}"))?;
            if at > items.len() {
                return Err(format!("invalid index referenced: {at}"));
            }
            items.insert(at, value);
        }
        _ => return Err(format!("doc is missing path: {path}")),
    }
    Ok(())
}

fn remove(target: &mut Value, path: &str) -> Result<Value, String> {
    let (parent, last) = parent(target, path)?;
    let missing = || format!("remove operation does not apply: doc is missing path: {path}");
    match parent {
        Value::Object(fields) => fields.shift_remove(&last).ok_or_else(missing),
        Value::Array(items) => {
            let at: usize = last.parse().map_err(|_| format!("invalid index: {last}"))?;
            if at < items.len() {
                Ok(items.remove(at))
            } else {
                Err(missing())
            }
        }
        _ => Err(missing()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{json_patch, merge, strategic};

    #[test]
    fn a_merge_patch_replaces_lists_and_removes_with_null() {
        let mut target = json!({"a": {"b": 1, "c": [1, 2]}, "d": 1});
        merge(
            &mut target,
            &json!({"a": {"c": [3], "b": null}, "e": {"f": null}}),
        );
        assert_eq!(target, json!({"a": {"c": [3]}, "d": 1, "e": {}}));
    }

    #[test]
    fn a_strategic_patch_merges_lists_by_key() {
        let mut target =
            json!({"containers": [{"name": "a", "image": "1"}, {"name": "b"}], "tolerations": [1]});
        let patch = json!({
            "containers": [{"name": "a", "image": "2"}, {"name": "b", "$patch": "delete"}, {"name": "c"}],
            "tolerations": [2],
        });
        strategic(&mut target, &patch).unwrap();
        assert_eq!(
            target,
            json!({"containers": [{"name": "a", "image": "2"}, {"name": "c"}], "tolerations": [2]})
        );
    }

    #[test]
    fn a_json_patch_stops_at_a_failed_test() {
        let mut target = json!({"a": [1, 2], "b/c": 1});
        json_patch(
            &mut target,
            &json!([{"op": "add", "path": "/a/-", "value": 3}, {"op": "remove", "path": "/b~1c"}]),
        )
        .unwrap();
        assert_eq!(target, json!({"a": [1, 2, 3]}));
        assert!(
            json_patch(
                &mut target,
                &json!([{"op": "test", "path": "/a/0", "value": 9}])
            )
            .is_err()
        );
    }
}
