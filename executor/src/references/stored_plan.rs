//! The secrets among the inputs of a stored plan, which the log must not show. The job says which inputs have references, and the plan
//! what was in their place.

use job_contract::JobData;
use run_log::secrets_in;
use secrecy::SecretString;
use secret_stores::Template;
use serde_json::Value;

use super::{MIN_MASKED_BYTES, has_references, members};

/// The inputs of a run that have references.
fn inputs_with_references(job: &JobData) -> impl Iterator<Item = (&String, &str)> {
    let inputs = job.variables.iter();
    let inputs = inputs.map(|(name, input)| (name, input.value.as_str()));
    inputs.filter(|(_, text)| has_references(text))
}

/// Whether a stored plan of the run has secrets.
pub(crate) fn has_secret_inputs(job: &JobData) -> bool {
    inputs_with_references(job).next().is_some()
}

/// What the log must not show of the inputs in a stored plan. `plan` is the plan as the tool shows it.
pub(crate) fn secrets_of_plan(job: &JobData, plan: &Value) -> Vec<SecretString> {
    let mut found = Vec::new();
    for (name, text) in inputs_with_references(job) {
        let value = &plan["variables"][name]["value"];
        add_of_plan(text, value, &mut found);
        if let Some(value) = value.as_str() {
            found.extend(secrets_in(name, value).into_iter().map(SecretString::from));
        }
    }
    found
}

/// Adds the secrets of a value that was made of a text with references.
fn add_of_plan(text: &str, value: &Value, found: &mut Vec<SecretString>) {
    let written = match value.as_str() {
        Some(value) => {
            add_text(value, found);
            if let Ok(template) = Template::scan(text) {
                for secret in template.secrets_in(value) {
                    add_text(secret, found);
                    members(&serde_json::from_str(secret).unwrap_or_default(), found);
                }
            }
            &serde_json::from_str(value).unwrap_or_default()
        }
        None => value,
    };
    match serde_json::from_str(text) {
        Ok(text) => add_of_document(&text, written, found),
        Err(_) if value.is_string() => {}
        Err(_) => add_all(value, found),
    }
}

/// Adds the secrets of a document that was made of one with references in its texts.
fn add_of_document(text: &Value, value: &Value, found: &mut Vec<SecretString>) {
    match (text, value) {
        (Value::String(text), value) if has_references(text) => match value {
            Value::String(_) => add_of_plan(text, value, found),
            other => add_text(&other.to_string(), found),
        },
        (Value::Object(texts), Value::Object(values)) => {
            for (name, value) in values {
                if let Some(text) = texts.get(name) {
                    add_of_document(text, value, found);
                } else {
                    // The name has a reference.
                    add_text(name, found);
                    add_all(value, found);
                }
            }
        }
        // A set has another order.
        (Value::Array(_), Value::Array(_)) if has_references(&text.to_string()) => {
            add_all(value, found);
        }
        _ => {}
    }
}

fn add_all(value: &Value, found: &mut Vec<SecretString>) {
    match value {
        Value::String(text) => add_text(text, found),
        Value::Array(items) => items.iter().for_each(|item| add_all(item, found)),
        Value::Object(entries) => {
            entries.values().for_each(|item| add_all(item, found));
        }
        Value::Number(number) => add_text(&number.to_string(), found),
        Value::Bool(_) | Value::Null => {}
    }
}

fn add_text(text: &str, found: &mut Vec<SecretString>) {
    if text.len() >= MIN_MASKED_BYTES {
        found.push(text.into());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use secrecy::ExposeSecret;

    use super::*;

    /// Values of other types than text are as the tool has converted them.
    #[test]
    fn secrets_of_a_stored_plan_are_those_of_inputs_with_references() {
        let mut job = JobData::default();
        for (name, text) in [
            ("whole", "${ssm:a}"),
            ("embedded", "postgres://u:${ssm:a}@db.example.test/app"),
            (
                "map",
                "{\"k\": \"${ssm:a}\", \"plain\": \"eu-central-1\", \"deep\": {\"l\": [\"${ssm:b}\"]}}",
            ),
            (
                "text",
                "{\"k\": \"x-${ssm:a}\", \"plain\": \"eu-central-1\"}",
            ),
            ("list", "${ssm:c}"),
            ("number", "${ssm:d}"),
            ("other", "eu-central-1"),
        ] {
            job.variables.insert(name.into(), text.into());
        }
        let plan = serde_json::json!({ "variables": {
            "whole": { "value": "secret-1" },
            "embedded": { "value": "postgres://u:secret-2@db.example.test/app" },
            "map": { "value": { "k": "secret-3", "plain": "eu-central-1", "deep": { "l": ["other-element", "secret-4"] } } },
            "text": { "value": "{\"k\": \"x-secret-5\", \"plain\": \"eu-central-1\"}" },
            "list": { "value": ["secret-6"] },
            "number": { "value": 1_234_567 },
            "other": { "value": "eu-central-1" },
        }});
        assert!(has_secret_inputs(&job) && !has_secret_inputs(&JobData::default()));
        let found = secrets_of_plan(&job, &plan);
        let found: BTreeSet<_> = found.iter().map(ExposeSecret::expose_secret).collect();
        for secret in [
            "secret-1", "secret-2", "secret-3", "secret-4", "secret-5", "secret-6", "1234567",
        ] {
            assert!(found.contains(secret), "{secret}: {found:?}");
        }
        assert!(!found.contains("eu-central-1"), "{found:?}");
    }
}
