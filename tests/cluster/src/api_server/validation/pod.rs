//! Pods and pod templates: containers, environment, volumes, resources, tolerations.

use serde_json::{Value, json};

use super::{Errors, items, meta, quantity, secret};

pub(crate) fn validate(new: &Value, old: Option<&Value>, errors: &mut Errors) {
    validate_spec(&new["spec"], "spec", errors);
    if let Some(old) = old
        && frozen(&new["spec"]) != frozen(&old["spec"])
    {
        errors.forbidden(
            "spec",
            "pod updates may not change fields other than `spec.containers[*].image`,\
             `spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing \
             tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)",
        );
    }
}

/// A spec without what may change.
fn frozen(spec: &Value) -> Value {
    let mut spec = spec.clone();
    if let Some(fields) = spec.as_object_mut() {
        fields.remove("tolerations");
        fields.remove("activeDeadlineSeconds");
        for list in ["containers", "initContainers"] {
            for container in fields
                .get_mut(list)
                .and_then(Value::as_array_mut)
                .into_iter()
                .flatten()
            {
                container["image"] = Value::Null;
            }
        }
    }
    spec
}

/// Checks the spec of a pod at `path`.
pub(crate) fn validate_spec(spec: &Value, path: &str, errors: &mut Errors) {
    let volumes = volumes(spec, path, errors);
    let mut names: Vec<&Value> = Vec::new();
    if items(&spec["containers"]).is_empty() {
        errors.required(format!("{path}.containers"), "");
    }
    for list in ["initContainers", "containers"] {
        for (index, container) in items(&spec[list]).iter().enumerate() {
            let path = format!("{path}.{list}[{index}]");
            if names.contains(&&container["name"]) {
                errors.duplicate(format!("{path}.name"), &container["name"]);
            }
            names.push(&container["name"]);
            validate_container(container, &path, &volumes, errors);
        }
    }
    if !matches!(
        spec["restartPolicy"].as_str(),
        Some("Always" | "OnFailure" | "Never")
    ) {
        errors.unsupported(
            format!("{path}.restartPolicy"),
            &spec["restartPolicy"],
            &["Always", "OnFailure", "Never"],
        );
    }
    if spec["terminationGracePeriodSeconds"]
        .as_i64()
        .is_some_and(|seconds| seconds < 0)
    {
        errors.invalid(
            format!("{path}.terminationGracePeriodSeconds"),
            &spec["terminationGracePeriodSeconds"],
            "must be greater than or equal to 0",
        );
    }
    if spec["activeDeadlineSeconds"]
        .as_i64()
        .is_some_and(|seconds| seconds < 1)
    {
        errors.invalid(
            format!("{path}.activeDeadlineSeconds"),
            &spec["activeDeadlineSeconds"],
            "must be between 1 and 2147483647, inclusive",
        );
    }
    meta::labels(
        &spec["nodeSelector"],
        &format!("{path}.nodeSelector"),
        errors,
    );
    for (field, rule) in [
        ("serviceAccountName", "subdomain"),
        ("nodeName", "subdomain"),
        ("hostname", "label"),
    ] {
        let text = spec[field].as_str().unwrap_or("");
        let problems = if rule == "label" {
            meta::dns_label(text)
        } else {
            meta::dns_subdomain(text)
        };
        for why in problems.iter().filter(|_| !text.is_empty()) {
            errors.invalid(format!("{path}.{field}"), &spec[field], why);
        }
    }
    for (index, toleration) in items(&spec["tolerations"]).iter().enumerate() {
        validate_toleration(toleration, &format!("{path}.tolerations[{index}]"), errors);
    }
    for (index, reference) in items(&spec["imagePullSecrets"]).iter().enumerate() {
        if reference["name"].as_str().unwrap_or("").is_empty() {
            errors.required(format!("{path}.imagePullSecrets[{index}].name"), "");
        }
    }
}

fn validate_toleration(toleration: &Value, path: &str, errors: &mut Errors) {
    let key = toleration["key"].as_str().unwrap_or("");
    let operator = toleration["operator"].as_str().unwrap_or("");
    let value = toleration["value"].as_str().unwrap_or("");
    for why in meta::qualified_name(key).iter().filter(|_| !key.is_empty()) {
        errors.invalid(format!("{path}.key"), &toleration["key"], why);
    }
    if key.is_empty() && operator != "Exists" {
        errors.invalid(
            format!("{path}.operator"),
            &json!(operator),
            "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
        );
    }
    if !toleration["tolerationSeconds"].is_null() && toleration["effect"] != "NoExecute" {
        errors.invalid(
            format!("{path}.effect"),
            &toleration["effect"],
            "effect must be 'NoExecute' when `tolerationSeconds` is set",
        );
    }
    match operator {
        "Equal" | "" => {
            for why in meta::label_value(value) {
                errors.invalid(format!("{path}.operator"), &toleration["value"], &why);
            }
        }
        "Exists" if value.is_empty() => {}
        "Exists" => errors.invalid(
            format!("{path}.operator"),
            &toleration["operator"],
            "value must be empty when `operator` is 'Exists'",
        ),
        _ => errors.unsupported(
            format!("{path}.operator"),
            &toleration["operator"],
            &["Equal", "Exists"],
        ),
    }
    let effect = toleration["effect"].as_str().unwrap_or("");
    if !matches!(effect, "" | "NoSchedule" | "PreferNoSchedule" | "NoExecute") {
        errors.unsupported(
            format!("{path}.effect"),
            &toleration["effect"],
            &["NoSchedule", "PreferNoSchedule", "NoExecute"],
        );
    }
}

fn volumes<'a>(spec: &'a Value, path: &str, errors: &mut Errors) -> Vec<&'a Value> {
    let mut names: Vec<&Value> = Vec::new();
    for (index, volume) in items(&spec["volumes"]).iter().enumerate() {
        let path = format!("{path}.volumes[{index}]");
        let name = volume["name"].as_str().unwrap_or("");
        if name.is_empty() {
            errors.required(format!("{path}.name"), "");
        } else {
            for why in meta::dns_label(name) {
                errors.invalid(format!("{path}.name"), &volume["name"], &why);
            }
        }
        if names.contains(&&volume["name"]) {
            errors.duplicate(format!("{path}.name"), &volume["name"]);
        }
        names.push(&volume["name"]);
        let sources = volume.as_object().map_or(0, |fields| {
            fields.keys().filter(|key| *key != "name").count()
        });
        match sources {
            0 => errors.required(&path, "must specify a volume type"),
            1 => {}
            _ => errors.forbidden(&path, "may not specify more than 1 volume type"),
        }
        for (source, field) in [
            ("secret", "secretName"),
            ("configMap", "name"),
            ("persistentVolumeClaim", "claimName"),
        ] {
            if !volume[source].is_null() && volume[source][field].as_str().unwrap_or("").is_empty()
            {
                errors.required(format!("{path}.{source}.{field}"), "");
            }
        }
        let limit = &volume["emptyDir"]["sizeLimit"];
        if let Some(text) = limit
            .as_str()
            .filter(|text| quantity::parse(text).is_none())
        {
            errors.invalid(
                format!("{path}.emptyDir.sizeLimit"),
                &json!(text),
                "must be a quantity",
            );
        }
    }
    names
}

fn validate_container(container: &Value, path: &str, volumes: &[&Value], errors: &mut Errors) {
    match container["name"].as_str().unwrap_or("") {
        "" => errors.required(format!("{path}.name"), ""),
        name => {
            for why in meta::dns_label(name) {
                errors.invalid(format!("{path}.name"), &container["name"], &why);
            }
        }
    }
    let image = container["image"].as_str().unwrap_or("");
    if image.is_empty() {
        errors.required(format!("{path}.image"), "");
    } else if image.trim() != image {
        errors.invalid(
            format!("{path}.image"),
            &container["image"],
            "must not have leading or trailing whitespace",
        );
    }
    if !matches!(
        container["imagePullPolicy"].as_str(),
        None | Some("Always" | "IfNotPresent" | "Never")
    ) {
        errors.unsupported(
            format!("{path}.imagePullPolicy"),
            &container["imagePullPolicy"],
            &["Always", "IfNotPresent", "Never"],
        );
    }
    environment(container, path, errors);
    mounts(container, path, volumes, errors);
    resources(
        &container["resources"],
        &format!("{path}.resources"),
        errors,
    );
}

fn environment(container: &Value, path: &str, errors: &mut Errors) {
    for (index, variable) in items(&container["env"]).iter().enumerate() {
        let path = format!("{path}.env[{index}]");
        let name = variable["name"].as_str().unwrap_or("");
        if name.is_empty() {
            errors.required(format!("{path}.name"), "");
        } else if name.contains('=') || !name.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
            errors.invalid(
                format!("{path}.name"),
                &variable["name"],
                "a valid environment variable name must consist only of printable ASCII characters other than '='",
            );
        }
        let source = &variable["valueFrom"];
        if source.is_null() {
            continue;
        }
        if !variable["value"].as_str().unwrap_or("").is_empty() {
            errors.invalid(
                format!("{path}.valueFrom"),
                &json!(""),
                "may not be specified when `value` is not empty",
            );
        }
        match source.as_object().map_or(0, serde_json::Map::len) {
            0 => errors.invalid(
                format!("{path}.valueFrom"),
                &json!(""),
                "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`",
            ),
            1 => {}
            _ => errors.invalid(format!("{path}.valueFrom"), &json!(""), "may not have more than one field specified at a time"),
        }
        for kind in ["secretKeyRef", "configMapKeyRef"] {
            let reference = &source[kind];
            if reference.is_null() {
                continue;
            }
            for field in ["name", "key"] {
                if reference[field].as_str().unwrap_or("").is_empty() {
                    errors.required(format!("{path}.valueFrom.{kind}.{field}"), "");
                }
            }
            let key = reference["key"].as_str().unwrap_or("");
            if let Some(why) = secret::key_problem(key).filter(|_| !key.is_empty()) {
                errors.invalid(
                    format!("{path}.valueFrom.{kind}.key"),
                    &reference["key"],
                    why,
                );
            }
        }
    }
    for (index, source) in items(&container["envFrom"]).iter().enumerate() {
        let path = format!("{path}.envFrom[{index}]");
        for kind in ["secretRef", "configMapRef"] {
            if !source[kind].is_null() && source[kind]["name"].as_str().unwrap_or("").is_empty() {
                errors.required(format!("{path}.{kind}.name"), "");
            }
        }
        if source["secretRef"].is_null() && source["configMapRef"].is_null() {
            errors.invalid(
                path,
                &json!(""),
                "must specify one of: `configMapRef` or `secretRef`",
            );
        }
    }
}

fn mounts(container: &Value, path: &str, volumes: &[&Value], errors: &mut Errors) {
    let mounts = items(&container["volumeMounts"]);
    for (index, mount) in mounts.iter().enumerate() {
        let path = format!("{path}.volumeMounts[{index}]");
        if mount["name"].as_str().unwrap_or("").is_empty() {
            errors.required(format!("{path}.name"), "");
        } else if !volumes.contains(&&mount["name"]) {
            errors.unknown(format!("{path}.name"), &mount["name"]);
        }
        if mount["mountPath"].as_str().unwrap_or("").is_empty() {
            errors.required(format!("{path}.mountPath"), "");
        }
        if mounts[..index]
            .iter()
            .any(|other| other["mountPath"] == mount["mountPath"])
        {
            errors.invalid(
                format!("{path}.mountPath"),
                &mount["mountPath"],
                "must be unique",
            );
        }
        let sub = mount["subPath"].as_str().unwrap_or("");
        if sub.starts_with('/') {
            errors.invalid(
                format!("{path}.subPath"),
                &mount["subPath"],
                "must be a relative path",
            );
        } else if sub.split('/').any(|part| part == "..") {
            errors.invalid(
                format!("{path}.subPath"),
                &mount["subPath"],
                "must not contain '..'",
            );
        }
    }
}

fn resources(resources: &Value, path: &str, errors: &mut Errors) {
    let amount = |list: &str, name: &str| resources[list][name].as_str().and_then(quantity::parse);
    for list in ["limits", "requests"] {
        for (name, value) in resources[list].as_object().into_iter().flatten() {
            if amount(list, name).is_some_and(|amount| amount < 0.0) {
                errors.invalid(
                    format!("{path}.{list}[{name}]"),
                    value,
                    "must be greater than or equal to 0",
                );
            }
            if !name.contains('/')
                && !matches!(
                    name.as_str(),
                    "cpu" | "memory" | "ephemeral-storage" | "storage"
                )
                && !name.starts_with("hugepages-")
            {
                errors.invalid(
                    format!("{path}.{list}[{name}]"),
                    &json!(name),
                    "must be a standard resource type or fully qualified",
                );
            }
        }
    }
    for (name, value) in resources["requests"].as_object().into_iter().flatten() {
        if let (Some(wanted), Some(limit)) = (amount("requests", name), amount("limits", name))
            && wanted > limit
        {
            let limit = resources["limits"][name].as_str().unwrap_or("");
            errors.invalid(
                format!("{path}.requests"),
                value,
                &format!("must be less than or equal to {name} limit of {limit}"),
            );
        }
    }
}
