//! Whether the Kubernetes API knows every field of a document: it is read into the API's types and written again, and
//! what is lost on the way is no field of theirs.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{
    ConfigMap, Namespace, PersistentVolume, PersistentVolumeClaim, Pod, ResourceQuota, Secret,
    Service, ServiceAccount,
};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::api::storage::v1::StorageClass;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

type Judge = fn(&Value) -> Result<(), Problem>;

/// The kinds a document may be of.
const KINDS: &[(&str, &str, Judge)] = &[
    ("v1", "ConfigMap", round_trip::<ConfigMap>),
    ("v1", "Namespace", round_trip::<Namespace>),
    ("v1", "PersistentVolume", round_trip::<PersistentVolume>),
    (
        "v1",
        "PersistentVolumeClaim",
        round_trip::<PersistentVolumeClaim>,
    ),
    ("v1", "Pod", round_trip::<Pod>),
    ("v1", "ResourceQuota", round_trip::<ResourceQuota>),
    ("v1", "Secret", round_trip::<Secret>),
    ("v1", "Service", round_trip::<Service>),
    ("v1", "ServiceAccount", round_trip::<ServiceAccount>),
    ("apps/v1", "Deployment", round_trip::<Deployment>),
    ("batch/v1", "Job", round_trip::<Job>),
    ("coordination.k8s.io/v1", "Lease", round_trip::<Lease>),
    (
        "networking.k8s.io/v1",
        "NetworkPolicy",
        round_trip::<NetworkPolicy>,
    ),
    (
        "policy/v1",
        "PodDisruptionBudget",
        round_trip::<PodDisruptionBudget>,
    ),
    ("rbac.authorization.k8s.io/v1", "Role", round_trip::<Role>),
    (
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        round_trip::<RoleBinding>,
    ),
    (
        "storage.k8s.io/v1",
        "StorageClass",
        round_trip::<StorageClass>,
    ),
    (
        "admissionregistration.k8s.io/v1",
        "ValidatingAdmissionPolicy",
        round_trip::<ValidatingAdmissionPolicy>,
    ),
    (
        "admissionregistration.k8s.io/v1",
        "ValidatingAdmissionPolicyBinding",
        round_trip::<ValidatingAdmissionPolicyBinding>,
    ),
    (
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        round_trip::<Custom<Monitor>>,
    ),
    (
        "monitoring.coreos.com/v1",
        "PodMonitor",
        round_trip::<Custom<Monitor>>,
    ),
    (
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        round_trip::<Custom<Rules>>,
    ),
];

/// What is wrong with a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// No such kind is known.
    Kind(String),
    /// A value of the wrong type, or a field that must be there is not.
    Type(String),
    /// Fields the API does not know.
    Lost(Vec<String>),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => write!(f, "no kind {kind} is known"),
            Self::Type(why) => f.write_str(why),
            Self::Lost(fields) => write!(f, "no such fields: {}", fields.join(", ")),
        }
    }
}

/// Looks at a document.
pub fn check(document: &Value) -> Result<(), Problem> {
    let [version, kind] =
        ["apiVersion", "kind"].map(|name| document[name].as_str().unwrap_or_default());
    let known = KINDS
        .iter()
        .find(|known| (known.0, known.1) == (version, kind));
    match known {
        Some((.., judge)) => judge(document),
        None => Err(Problem::Kind(format!("{version} {kind}"))),
    }
}

fn round_trip<T: DeserializeOwned + Serialize>(document: &Value) -> Result<(), Problem> {
    let wrong = |error: serde_json::Error| Problem::Type(error.to_string());
    let read: T = serde_json::from_value(document.clone()).map_err(wrong)?;
    let written = serde_json::to_value(read).map_err(wrong)?;
    let mut lost = Vec::new();
    compare(document, Some(&written), &mut String::new(), &mut lost);
    if lost.is_empty() {
        Ok(())
    } else {
        Err(Problem::Lost(lost))
    }
}

/// Collects what is in `before` and not in `after`.
fn compare(before: &Value, after: Option<&Value>, path: &mut String, lost: &mut Vec<String>) {
    let length = path.len();
    match (before, after) {
        // Nothing is said, so nothing can be lost.
        (Value::Null, _) => {}
        (Value::Object(before), after) if !before.is_empty() => {
            for (key, value) in before {
                let _ = write!(path, ".{key}");
                compare(value, after.and_then(|after| after.get(key)), path, lost);
                path.truncate(length);
            }
        }
        (Value::Array(before), Some(Value::Array(after))) => {
            for (at, value) in before.iter().enumerate() {
                let _ = write!(path, "[{at}]");
                compare(value, after.get(at), path, lost);
                path.truncate(length);
            }
        }
        // An empty map of a type that leaves out what it does not have.
        (Value::Object(_), _) => {}
        (before, after) if after == Some(before) => {}
        _ => lost.push(path.trim_start_matches('.').to_owned()),
    }
}

/// A kind of the Prometheus operator: not its whole schema, but the fields that make sense in a chart, from its API
/// reference. Another one is taken for a mistake until it is added here.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Custom<S> {
    api_version: String,
    kind: String,
    metadata: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
    spec: S,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Monitor {
    selector: k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    namespace_selector: Option<NamespaceSelector>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    job_label: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    target_labels: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pod_target_labels: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sample_limit: Option<u64>,
    /// Of a `ServiceMonitor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    endpoints: Option<Vec<Endpoint>>,
    /// Of a `PodMonitor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pod_metrics_endpoints: Option<Vec<Endpoint>>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct NamespaceSelector {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    any: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    match_names: Option<Vec<String>>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Endpoint {
    port: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scheme: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    interval: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scrape_timeout: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    honor_labels: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    relabelings: Option<Vec<Relabeling>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    metric_relabelings: Option<Vec<Relabeling>>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Relabeling {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    source_labels: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    separator: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    target_label: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    regex: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    modulus: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    replacement: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    action: Option<String>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Rules {
    groups: Vec<Group>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Group {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    interval: Option<String>,
    rules: Vec<Rule>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    alert: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    record: Option<String>,
    expr: String,
    #[serde(default, rename = "for", skip_serializing_if = "Option::is_none")]
    lasting: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    keep_firing_for: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    labels: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    annotations: Option<BTreeMap<String, String>>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_the_api_does_not_know_is_named() {
        let job = |field: &str, value: Value| {
            json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"},
                "spec": {"template": {"spec": {"containers": []}}, field: value}})
        };
        assert_eq!(check(&job("backoffLimit", json!(0))), Ok(()));
        let typo = Problem::Lost(vec!["spec.ttlSecondAfterFinished".to_owned()]);
        assert_eq!(check(&job("ttlSecondAfterFinished", json!(1))), Err(typo));
        assert!(matches!(
            check(&job("backoffLimit", json!("0"))),
            Err(Problem::Type(_))
        ));
        let unknown = json!({"apiVersion": "batch/v2", "kind": "Job"});
        assert_eq!(
            check(&unknown),
            Err(Problem::Kind("batch/v2 Job".to_owned()))
        );
    }

    #[test]
    fn kinds_of_the_operator_have_the_fields_of_its_reference() {
        let monitor = |endpoint: Value| {
            json!({"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor", "metadata": {"name": "a"},
                "spec": {"selector": {"matchLabels": {"a": "b"}}, "endpoints": [endpoint]}})
        };
        assert_eq!(
            check(&monitor(json!({"port": "http", "interval": "30s"}))),
            Ok(())
        );
        for wrong in [
            json!({"port": "http", "scrapeInterval": "30s"}),
            json!({"port": 80}),
        ] {
            assert!(
                matches!(check(&monitor(wrong.clone())), Err(Problem::Type(_))),
                "{wrong}"
            );
        }
    }
}
