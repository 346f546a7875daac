//! What a real API server fills in where an object says nothing.
//!
//! As far as a client can see; defaults of kinds that runs never use are left out.

use serde_json::{Value, json};

use super::validation::{items, quantity};

/// Sets `field` where it is missing.
fn default(object: &mut Value, field: &str, value: Value) {
    if object[field].is_null() {
        object[field] = value;
    }
}

fn each(value: &mut Value, list: &str, mut work: impl FnMut(&mut Value)) {
    for item in value
        .get_mut(list)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        work(item);
    }
}

/// Fills in what depends on nothing but the object.
pub(crate) fn apply(kind: &str, object: &mut Value) {
    match kind {
        "Job" => job(object),
        "Pod" => {
            default(&mut object["spec"], "enableServiceLinks", true.into());
            pod_spec(&mut object["spec"]);
            // Of a pod, not of a template.
            each(&mut object["spec"], "containers", requests_from_limits);
            each(&mut object["spec"], "initContainers", requests_from_limits);
        }
        "Secret" => default(object, "type", "Opaque".into()),
        "PersistentVolumeClaim" => default(&mut object["spec"], "volumeMode", "Filesystem".into()),
        "Namespace" => {
            let name = object["metadata"]["name"].clone();
            default(&mut object["metadata"], "labels", json!({}));
            object["metadata"]["labels"]["kubernetes.io/metadata.name"] = name;
        }
        _ => {}
    }
}

fn job(job: &mut Value) {
    if job["spec"].is_null() {
        job["spec"] = json!({});
    }
    let spec = &mut job["spec"];
    if spec["completions"].is_null() && spec["parallelism"].is_null() {
        spec["completions"] = 1.into();
    }
    default(spec, "parallelism", 1.into());
    default(spec, "backoffLimit", 6.into());
    default(spec, "completionMode", "NonIndexed".into());
    default(spec, "suspend", false.into());
    default(spec, "manualSelector", false.into());
    let replacement = if spec["podFailurePolicy"].is_null() {
        "TerminatingOrFailed"
    } else {
        "Failed"
    };
    default(spec, "podReplacementPolicy", replacement.into());
    each(&mut spec["podFailurePolicy"], "rules", |rule| {
        each(rule, "onPodConditions", |condition| {
            default(condition, "status", "True".into());
        });
    });
    if spec["template"].is_null() {
        spec["template"] = json!({});
    }
    let template = &mut spec["template"];
    default(template, "metadata", json!({}));
    default(template, "spec", json!({}));
    pod_spec(&mut template["spec"]);
}

/// Labels and selector that tie a new Job to its pods.
pub(crate) fn job_identity(job: &mut Value) {
    let uid = job["metadata"]["uid"].clone();
    let name = job["metadata"]["name"].clone();
    let had_labels = job["metadata"]["labels"]
        .as_object()
        .is_some_and(|labels| !labels.is_empty());
    if job["spec"]["manualSelector"] != true {
        let template = &mut job["spec"]["template"]["metadata"];
        default(template, "labels", json!({}));
        for prefix in ["", "batch.kubernetes.io/"] {
            template["labels"][format!("{prefix}controller-uid")] = uid.clone();
            template["labels"][format!("{prefix}job-name")] = name.clone();
        }
        default(&mut job["spec"], "selector", json!({}));
        default(&mut job["spec"]["selector"], "matchLabels", json!({}));
        job["spec"]["selector"]["matchLabels"]["batch.kubernetes.io/controller-uid"] = uid;
    }
    if !had_labels && !job["spec"]["template"]["metadata"]["labels"].is_null() {
        job["metadata"]["labels"] = job["spec"]["template"]["metadata"]["labels"].clone();
    }
}

fn pod_spec(spec: &mut Value) {
    default(spec, "restartPolicy", "Always".into());
    default(spec, "terminationGracePeriodSeconds", 30.into());
    default(spec, "dnsPolicy", "ClusterFirst".into());
    default(spec, "securityContext", json!({}));
    default(spec, "schedulerName", "default-scheduler".into());
    let account = spec["serviceAccountName"].clone();
    if account.is_string() {
        default(spec, "serviceAccount", account);
    }
    each(spec, "containers", container);
    each(spec, "initContainers", container);
    each(spec, "volumes", |volume| {
        for kind in ["secret", "configMap", "projected", "downwardAPI"] {
            if volume[kind].is_object() {
                default(&mut volume[kind], "defaultMode", 420.into());
            }
        }
    });
}

fn requests_from_limits(container: &mut Value) {
    let resources = &mut container["resources"];
    for (name, limit) in resources["limits"].as_object().cloned().unwrap_or_default() {
        default(resources, "requests", json!({}));
        default(&mut resources["requests"], &name, limit);
    }
}

/// How a pod stands when its node runs short: by its requests and limits.
pub(crate) fn qos_class(spec: &Value) -> &'static str {
    let containers = || {
        ["containers", "initContainers"]
            .into_iter()
            .flat_map(|list| items(&spec[list]))
    };
    let given = |container: &Value, list: &str, name: &str| {
        let quantity = container["resources"][list][name].as_str();
        quantity
            .and_then(quantity::parse)
            .filter(|value| *value > 0.0)
    };
    let (lists, names) = (["requests", "limits"], ["cpu", "memory"]);
    let any = containers().any(|container| {
        let mut all = lists.iter().flat_map(|list| names.map(|name| (list, name)));
        all.any(|(list, name)| given(container, list, name).is_some())
    });
    let all_equal = containers().all(|container| {
        names.iter().all(|name| {
            let limit = given(container, "limits", name);
            limit.is_some() && limit == given(container, "requests", name)
        })
    });
    match (any, all_equal) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}

fn container(container: &mut Value) {
    let image = container["image"].as_str().unwrap_or("");
    let last = image.rsplit('/').next().unwrap_or("");
    let latest =
        !image.contains('@') && last.split_once(':').is_none_or(|(_, tag)| tag == "latest");
    default(
        container,
        "imagePullPolicy",
        if latest { "Always" } else { "IfNotPresent" }.into(),
    );
    default(
        container,
        "terminationMessagePath",
        "/dev/termination-log".into(),
    );
    default(container, "terminationMessagePolicy", "File".into());
    default(container, "resources", json!({}));
    each(container, "env", |variable| {
        if variable["valueFrom"]["fieldRef"].is_object() {
            default(
                &mut variable["valueFrom"]["fieldRef"],
                "apiVersion",
                "v1".into(),
            );
        }
    });
    each(container, "ports", |port| {
        default(port, "protocol", "TCP".into());
    });
}
