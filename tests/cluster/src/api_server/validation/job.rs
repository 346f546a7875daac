//! Jobs: their spec, what of it may change, and their status.

use serde_json::{Value, json};

use super::{Errors, items, meta, pod};

const TEMPLATE: &str = "spec.template";

pub(crate) fn validate(new: &Value, old: Option<&Value>, errors: &mut Errors) {
    let spec = &new["spec"];
    for field in [
        "parallelism",
        "completions",
        "activeDeadlineSeconds",
        "backoffLimit",
        "ttlSecondsAfterFinished",
    ] {
        if spec[field].as_i64().is_some_and(|number| number < 0) {
            errors.invalid(
                format!("spec.{field}"),
                &spec[field],
                "must be greater than or equal to 0",
            );
        }
    }
    if old.is_none() {
        selector(new, errors);
    }
    let mode = spec["completionMode"].as_str().unwrap_or("NonIndexed");
    if !matches!(mode, "NonIndexed" | "Indexed") {
        errors.unsupported(
            "spec.completionMode",
            &spec["completionMode"],
            &["NonIndexed", "Indexed"],
        );
    }
    if mode == "Indexed" && spec["completions"].is_null() {
        errors.required("spec.completions", "when completion mode is Indexed");
    }
    template(spec, errors);
    failure_policy(spec, errors);
    replacement_policy(spec, errors);
    if let Some(old) = old {
        unchanged(new, old, errors);
    }
}

fn selector(job: &Value, errors: &mut Errors) {
    let spec = &job["spec"];
    let labels = &spec["template"]["metadata"]["labels"];
    let wanted = &spec["selector"]["matchLabels"];
    if spec["manualSelector"] != true {
        if wanted["batch.kubernetes.io/controller-uid"] != job["metadata"]["uid"] {
            errors.invalid(
                "spec.selector",
                &spec["selector"],
                "`selector` not auto-generated",
            );
        }
        return;
    }
    let matching = wanted
        .as_object()
        .into_iter()
        .flatten()
        .all(|(key, value)| labels[key] == *value);
    if !matching || wanted.is_null() {
        errors.invalid(
            "spec.template.metadata.labels",
            labels,
            "`selector` does not match template `labels`",
        );
    }
}

fn template(spec: &Value, errors: &mut Errors) {
    let template = &spec["template"];
    meta::labels(
        &template["metadata"]["labels"],
        "spec.template.labels",
        errors,
    );
    meta::annotations(
        &template["metadata"]["annotations"],
        "spec.template.annotations",
        errors,
    );
    pod::validate_spec(&template["spec"], "spec.template.spec", errors);
    let policy = &template["spec"]["restartPolicy"];
    let path = "spec.template.spec.restartPolicy";
    match policy.as_str().unwrap_or("") {
        "Always" | "" => errors.required(path, "valid values: \"OnFailure\", \"Never\""),
        "OnFailure" | "Never" => {
            if policy != "Never" && !spec["podFailurePolicy"].is_null() {
                errors.invalid(
                    path,
                    policy,
                    "only \"Never\" is supported when podFailurePolicy is specified",
                );
            }
        }
        _ => errors.unsupported(path, policy, &["OnFailure", "Never"]),
    }
}

fn failure_policy(spec: &Value, errors: &mut Errors) {
    let rules = items(&spec["podFailurePolicy"]["rules"]);
    let containers: Vec<&Value> = ["containers", "initContainers"]
        .iter()
        .flat_map(|list| items(&spec["template"]["spec"][*list]))
        .map(|container| &container["name"])
        .collect();
    if rules.len() > 20 {
        errors.push(
            "FieldValueTooMany",
            "spec.podFailurePolicy.rules",
            format!("Too many: {}: must have at most 20 items", rules.len()),
        );
    }
    for (index, rule) in rules.iter().enumerate() {
        failure_rule(
            rule,
            &format!("spec.podFailurePolicy.rules[{index}]"),
            &containers,
            errors,
        );
    }
}

fn failure_rule(rule: &Value, path: &str, containers: &[&Value], errors: &mut Errors) {
    match rule["action"].as_str().unwrap_or("") {
        "" => errors.required(
            format!("{path}.action"),
            "valid values: \"Count\", \"FailIndex\", \"FailJob\", \"Ignore\"",
        ),
        "Count" | "FailJob" | "Ignore" => {}
        "FailIndex" => {
            errors.invalid(
                format!("{path}.action"),
                &rule["action"],
                "requires the backoffLimitPerIndex to be set",
            );
        }
        _ => errors.unsupported(
            format!("{path}.action"),
            &rule["action"],
            &["Count", "FailIndex", "FailJob", "Ignore"],
        ),
    }
    let codes = &rule["onExitCodes"];
    let conditions = items(&rule["onPodConditions"]);
    match (codes.is_null(), conditions.is_empty()) {
        (true, true) => errors.invalid(
            path,
            &json!(""),
            "specifying one of OnExitCodes and OnPodConditions is required",
        ),
        (false, false) => {
            errors.invalid(
                path,
                &json!(""),
                "specifying both OnExitCodes and OnPodConditions is not supported",
            );
        }
        (false, true) => exit_codes(codes, &format!("{path}.onExitCodes"), containers, errors),
        (true, false) => {}
    }
    for (index, condition) in conditions.iter().enumerate() {
        let path = format!("{path}.onPodConditions[{index}]");
        if condition["type"].as_str().unwrap_or("").is_empty() {
            errors.invalid(
                format!("{path}.type"),
                &json!(""),
                "name part must be non-empty",
            );
        }
        if !matches!(
            condition["status"].as_str(),
            Some("True" | "False" | "Unknown")
        ) {
            errors.unsupported(
                format!("{path}.status"),
                &condition["status"],
                &["False", "True", "Unknown"],
            );
        }
    }
}

fn exit_codes(codes: &Value, path: &str, containers: &[&Value], errors: &mut Errors) {
    let operator = codes["operator"].as_str().unwrap_or("");
    match operator {
        "" => errors.required(
            format!("{path}.operator"),
            "valid values: \"In\", \"NotIn\"",
        ),
        "In" | "NotIn" => {}
        _ => errors.unsupported(
            format!("{path}.operator"),
            &codes["operator"],
            &["In", "NotIn"],
        ),
    }
    let name = &codes["containerName"];
    if !name.is_null() && !containers.contains(&name) {
        errors.invalid(
            format!("{path}.containerName"),
            name,
            "must be one of the container or initContainer names in the pod template",
        );
    }
    let values = items(&codes["values"]);
    if values.is_empty() {
        errors.invalid(
            format!("{path}.values"),
            &json!([]),
            "at least one value is required",
        );
    }
    if values.len() > 255 {
        errors.push(
            "FieldValueTooMany",
            format!("{path}.values"),
            format!("Too many: {}: must have at most 255 items", values.len()),
        );
    }
    for (index, value) in values.iter().enumerate() {
        let path = format!("{path}.values[{index}]");
        if values[..index].contains(value) {
            errors.duplicate(path, value);
        } else if index > 0 && values[index - 1].as_i64() > value.as_i64() {
            errors.invalid(
                path.rsplit_once('[').map_or("", |(list, _)| list),
                &codes["values"],
                "must be ordered",
            );
        } else if operator == "In" && value == 0 {
            errors.invalid(path, value, "must not be 0 for the In operator");
        }
    }
}

fn replacement_policy(spec: &Value, errors: &mut Errors) {
    let policy = &spec["podReplacementPolicy"];
    let path = "spec.podReplacementPolicy";
    match policy.as_str() {
        None | Some("Failed") => {}
        Some("TerminatingOrFailed") if spec["podFailurePolicy"].is_null() => {}
        Some("TerminatingOrFailed") => errors.unsupported(path, policy, &["Failed"]),
        Some(_) => errors.unsupported(path, policy, &["Failed", "TerminatingOrFailed"]),
    }
}

/// A template without what may change while the Job never started: where its pods may run.
fn without_scheduling(template: &Value) -> Value {
    let mut template = template.clone();
    for field in ["nodeSelector", "affinity", "tolerations", "schedulingGates"] {
        if let Some(spec) = template["spec"].as_object_mut() {
            spec.remove(field);
        }
    }
    if let Some(meta) = template["metadata"].as_object_mut() {
        meta.remove("labels");
        meta.remove("annotations");
    }
    template
}

fn unchanged(new: &Value, old: &Value, errors: &mut Errors) {
    let (spec, was) = (&new["spec"], &old["spec"]);
    for field in [
        "completions",
        "selector",
        "completionMode",
        "podFailurePolicy",
        "backoffLimitPerIndex",
        "managedBy",
    ] {
        let elastic = field == "completions" && spec["completionMode"] == "Indexed";
        if spec[field] != was[field] && !elastic {
            errors.invalid(format!("spec.{field}"), &spec[field], "field is immutable");
        }
    }
    let never_started = was["suspend"] == true && old["status"]["startTime"].is_null();
    let same = if never_started {
        without_scheduling(&spec["template"]) == without_scheduling(&was["template"])
    } else {
        spec["template"] == was["template"]
    };
    if !same {
        errors.invalid(TEMPLATE, &spec["template"], "field is immutable");
    }
}
