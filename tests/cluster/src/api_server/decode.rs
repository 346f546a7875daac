//! From a body to an object of a kind: what cannot be decoded is a bad request, unknown fields are dropped.

use axum::body::Bytes;
use k8s_openapi::api::authorization::v1::SelfSubjectAccessReview;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{
    ConfigMap, Event, Namespace, PersistentVolumeClaim, Pod, Secret, ServiceAccount,
};
use k8s_openapi::api::events::v1::Event as NewEvent;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::resource::ResourceType;
use super::status::ApiError;
use super::validation::quantity;

/// Decodes JSON that must be an object.
pub(crate) fn json(body: &Bytes) -> Result<Value, ApiError> {
    let value: Value = serde_json::from_slice(body).map_err(|error| {
        ApiError::bad_request(format!(
            "couldn't get version/kind; json parse error: {error}"
        ))
    })?;
    if value.is_object() {
        return Ok(value);
    }
    Err(ApiError::bad_request(
        "couldn't get version/kind; json parse error: json: cannot unmarshal into Go value of type struct",
    ))
}

/// An object of the kind `resource`, as a client may send it: the type may be left out, not wrong.
pub(crate) fn object(resource: &ResourceType, value: Value) -> Result<Value, ApiError> {
    let expected = resource.api_version();
    let version = value["apiVersion"].as_str().unwrap_or("");
    let kind = value["kind"].as_str().unwrap_or("");
    if !version.is_empty() && version != expected {
        let known = super::resource::RESOURCES
            .iter()
            .any(|r| r.api_version() == version && r.kind == kind);
        return Err(ApiError::bad_request(if known {
            format!(
                "the API version in the data ({version}) does not match the expected API version ({expected})"
            )
        } else {
            unknown_kind(kind, version)
        }));
    }
    if !kind.is_empty() && kind != resource.kind {
        let known = super::resource::RESOURCES
            .iter()
            .any(|r| r.api_version() == expected && r.kind == kind);
        return Err(ApiError::bad_request(if known {
            format!(
                "{kind} in version \"{}\" cannot be handled as a {}: converting to {} is not possible",
                resource.version, resource.kind, resource.kind
            )
        } else {
            unknown_kind(kind, &expected)
        }));
    }
    let mut object = typed(resource, value)?;
    // The type first, as servers write it.
    let mut ordered = serde_json::json!({"apiVersion": expected, "kind": resource.kind});
    if let (Some(ordered), Some(fields)) = (ordered.as_object_mut(), object.as_object_mut()) {
        fields.remove("apiVersion");
        fields.remove("kind");
        ordered.append(fields);
    }
    if !ordered["metadata"].is_object() {
        ordered["metadata"] = serde_json::json!({});
    }
    Ok(ordered)
}

fn unknown_kind(kind: &str, version: &str) -> String {
    format!(
        "no kind \"{kind}\" is registered for version \"{version}\" in scheme \"pkg/api/legacyscheme/scheme.go:30\""
    )
}

fn typed(resource: &ResourceType, mut value: Value) -> Result<Value, ApiError> {
    value["apiVersion"] = resource.api_version().into();
    value["kind"] = resource.kind.into();
    let decoded = match (resource.group, resource.kind) {
        ("batch", "Job") => through::<Job>(value),
        ("", "Pod") => through::<Pod>(value),
        ("", "Secret") => through::<Secret>(with_string_data(value)),
        ("", "ConfigMap") => through::<ConfigMap>(value),
        ("", "Event") => through::<Event>(value),
        ("events.k8s.io", "Event") => through::<NewEvent>(value),
        ("", "PersistentVolumeClaim") => through::<PersistentVolumeClaim>(value),
        ("", "ServiceAccount") => through::<ServiceAccount>(value),
        ("", "Namespace") => through::<Namespace>(value),
        ("coordination.k8s.io", "Lease") => through::<Lease>(value),
        ("authorization.k8s.io", _) => through::<SelfSubjectAccessReview>(value),
        (_, "Role") => through::<Role>(value),
        (_, "RoleBinding") => through::<RoleBinding>(value),
        _ => Ok(value),
    };
    let decoded = decoded.and_then(|mut object| match wrong_quantity(&object) {
        None => {
            write_canonically(&mut object);
            Ok(object)
        }
        Some(_) => Err("quantities must match the regular expression \
                        '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
            .to_owned()),
    });
    decoded.map_err(|why| {
        ApiError::bad_request(format!(
            "{} in version \"{}\" cannot be handled as a {}: {why}",
            resource.kind, resource.version, resource.kind
        ))
    })
}

/// Quantities in their one form; lists without elements are not there.
fn write_canonically(value: &mut Value) {
    let Some(fields) = value.as_object_mut() else {
        for item in value.as_array_mut().into_iter().flatten() {
            write_canonically(item);
        }
        return;
    };
    fields.retain(|key, inner| {
        key == "rules" || inner.as_array().is_none_or(|list| !list.is_empty())
    });
    for (key, inner) in fields {
        match key.as_str() {
            "limits" | "requests" => {
                for amount in inner
                    .as_object_mut()
                    .into_iter()
                    .flatten()
                    .map(|(_, amount)| amount)
                {
                    *amount = quantity::canonical(amount.as_str().unwrap_or("")).into();
                }
            }
            "sizeLimit" => *inner = quantity::canonical(inner.as_str().unwrap_or("")).into(),
            _ => write_canonically(inner),
        }
    }
}

fn through<T: DeserializeOwned + Serialize>(value: Value) -> Result<Value, String> {
    let decoded: T = serde_json::from_value(value).map_err(|error| format!("json: {error}"))?;
    serde_json::to_value(decoded).map_err(|error| error.to_string())
}

/// `stringData` is written into `data` and never read back.
fn with_string_data(mut secret: Value) -> Value {
    use base64::Engine as _;
    let Some(plain) = secret
        .as_object_mut()
        .and_then(|fields| fields.remove("stringData"))
    else {
        return secret;
    };
    for (key, value) in plain.as_object().into_iter().flatten() {
        if let Some(text) = value.as_str() {
            if !secret["data"].is_object() {
                secret["data"] = serde_json::json!({});
            }
            secret["data"][key] = base64::prelude::BASE64_STANDARD.encode(text).into();
        }
    }
    secret
}

/// A limit or request that is no quantity, wherever resources are.
fn wrong_quantity(value: &Value) -> Option<&Value> {
    match value {
        Value::Object(fields) => fields.iter().find_map(|(key, inner)| {
            if matches!(key.as_str(), "limits" | "requests") {
                let amounts = inner.as_object()?;
                return amounts
                    .values()
                    .find(|amount| amount.as_str().and_then(quantity::parse).is_none());
            }
            wrong_quantity(inner)
        }),
        Value::Array(list) => list.iter().find_map(wrong_quantity),
        _ => None,
    }
}
