//! What an object must satisfy before it is stored, in the words of a real API server.
//!
//! Pure: an object (and, for updates, the one before) in, errors with field paths out.

pub(crate) mod job;
mod job_status;
pub(crate) mod meta;
pub(crate) mod pod;
pub(crate) mod quantity;
pub(crate) mod secret;

use serde_json::{Value, json};

use super::resource::ResourceType;

/// The problems of one object.
#[derive(Debug, Default)]
pub(crate) struct Errors(Vec<FieldError>);

#[derive(Debug)]
struct FieldError {
    reason: &'static str,
    field: String,
    body: String,
}

impl Errors {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn push(&mut self, reason: &'static str, field: impl Into<String>, body: String) {
        self.0.push(FieldError {
            reason,
            field: field.into(),
            body,
        });
    }

    pub(crate) fn invalid(&mut self, field: impl Into<String>, value: &Value, detail: &str) {
        self.push(
            "FieldValueInvalid",
            field,
            format!("Invalid value: {value}: {detail}"),
        );
    }

    pub(crate) fn required(&mut self, field: impl Into<String>, detail: &str) {
        let body = if detail.is_empty() {
            "Required value".to_owned()
        } else {
            format!("Required value: {detail}")
        };
        self.push("FieldValueRequired", field, body);
    }

    pub(crate) fn forbidden(&mut self, field: impl Into<String>, detail: &str) {
        self.push("FieldValueForbidden", field, format!("Forbidden: {detail}"));
    }

    pub(crate) fn unsupported(
        &mut self,
        field: impl Into<String>,
        value: &Value,
        supported: &[&str],
    ) {
        let list: Vec<String> = supported
            .iter()
            .map(|value| format!("\"{value}\""))
            .collect();
        let body = format!(
            "Unsupported value: {value}: supported values: {}",
            list.join(", ")
        );
        self.push("FieldValueNotSupported", field, body);
    }

    pub(crate) fn duplicate(&mut self, field: impl Into<String>, value: &Value) {
        self.push(
            "FieldValueDuplicate",
            field,
            format!("Duplicate value: {value}"),
        );
    }

    pub(crate) fn unknown(&mut self, field: impl Into<String>, value: &Value) {
        self.push("FieldValueNotFound", field, format!("Not found: {value}"));
    }

    pub(crate) fn too_long(&mut self, field: impl Into<String>, limit: usize) {
        self.push(
            "FieldValueTooLong",
            field,
            format!("Too long: may not be more than {limit} bytes"),
        );
    }

    pub(crate) fn sentence(&self) -> String {
        let mut all: Vec<String> = self
            .0
            .iter()
            .map(|error| format!("{}: {}", error.field, error.body))
            .collect();
        if all.len() == 1 {
            all.remove(0)
        } else {
            format!("[{}]", all.join(", "))
        }
    }

    pub(crate) fn causes(&self) -> Value {
        self.0
            .iter()
            .map(|error| json!({"reason": error.reason, "message": error.body, "field": error.field}))
            .collect()
    }
}

/// The elements of a list, empty when there is none.
pub(crate) fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Checks what is to be stored. `old` is the object an update replaces.
pub(crate) fn validate(
    resource: &ResourceType,
    new: &Value,
    old: Option<&Value>,
    status_only: bool,
) -> Errors {
    let mut errors = Errors::default();
    meta::validate(resource, new, old, &mut errors);
    match (resource.kind, status_only) {
        ("Job", false) => job::validate(new, old, &mut errors),
        ("Job", true) => job_status::validate(new, old, &mut errors),
        ("Pod", false) => pod::validate(new, old, &mut errors),
        ("Secret" | "ConfigMap", _) => secret::validate(new, old, &mut errors),
        ("Lease", _) => lease(new, &mut errors),
        ("Event", _) => event(new, &mut errors),
        _ => {}
    }
    errors
}

fn lease(lease: &Value, errors: &mut Errors) {
    let spec = &lease["spec"];
    for field in ["leaseDurationSeconds"] {
        if spec[field].as_i64().is_some_and(|seconds| seconds <= 0) {
            errors.invalid(
                format!("spec.{field}"),
                &spec[field],
                "must be greater than 0",
            );
        }
    }
    if spec["leaseTransitions"]
        .as_i64()
        .is_some_and(|number| number < 0)
    {
        errors.invalid(
            "spec.leaseTransitions",
            &spec["leaseTransitions"],
            "must be greater than or equal to 0",
        );
    }
}

fn event(event: &Value, errors: &mut Errors) {
    let about = &event["involvedObject"]["namespace"];
    let namespace = event["metadata"]["namespace"].as_str().unwrap_or("");
    let about_namespace = about.as_str().unwrap_or("");
    if !about_namespace.is_empty() && about_namespace != namespace {
        errors.invalid(
            "involvedObject.namespace",
            about,
            "does not match event.namespace",
        );
    }
    if event["eventTime"].is_string() {
        for field in [
            "reportingComponent",
            "reportingInstance",
            "action",
            "reason",
        ] {
            if event[field].as_str().unwrap_or("").is_empty() {
                let shown = if field == "reportingComponent" {
                    "reportingController"
                } else {
                    field
                };
                errors.required(shown, "");
            }
        }
    }
}
