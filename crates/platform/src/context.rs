//! Merges patches into the job context, which others write too (contract 6.6).

use serde_json::{Map, Value, json};

/// Whether the structured output of a job is stored. Newer platforms send it for a job without a context, too.
const STATUS: &str = "structuredOutputStatus";
/// The structured output that an executor stores.
const OUTPUT: [&str; 4] = [
    "planStructuredOutput",
    "applyStructuredOutput",
    "jobDiagnostics",
    "terraformOutputs",
];

/// Merges objects key by key, and replaces all other values.
pub fn merge(target: &mut Map<String, Value>, patch: &Map<String, Value>) {
    for (key, value) in patch {
        match (target.get_mut(key), value) {
            (Some(Value::Object(known)), Value::Object(more)) => merge(known, more),
            _ => {
                target.insert(key.clone(), value.clone());
            }
        }
    }
}

/// Removes the platform's own words from a context, so that they are not sent back to it.
pub(crate) fn without_status(mut context: Map<String, Value>) -> Map<String, Value> {
    context.remove(STATUS);
    context
}

/// Adds that the structured output is stored, if the context has some. Newer platforms show it only then. Older ones ignore it.
pub(crate) fn with_status(mut context: Map<String, Value>) -> Map<String, Value> {
    if OUTPUT.iter().any(|key| context.contains_key(*key)) {
        context.insert(STATUS.to_owned(), json!({"state": "PERSISTED"}));
    }
    context
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::nothing(json!({}), json!({}))]
    #[case::a_note(json!({"mayflyClaims": {"a": 1}}), json!({"mayflyClaims": {"a": 1}}))]
    #[case::a_plan(
        json!({"planStructuredOutput": {"a": []}, "script": 1}),
        json!({"planStructuredOutput": {"a": []}, "script": 1, "structuredOutputStatus": {"state": "PERSISTED"}})
    )]
    #[case::outputs(
        json!({"terraformOutputs": {"a": []}}),
        json!({"terraformOutputs": {"a": []}, "structuredOutputStatus": {"state": "PERSISTED"}})
    )]
    fn the_status_of_the_platform_is_not_sent_back_and_ours_follows_the_content(
        #[case] content: Value,
        #[case] expected: Value,
    ) {
        for state in ["PENDING", "UNAVAILABLE", "PERSISTED"] {
            let mut read = content.as_object().unwrap().clone();
            read.insert(STATUS.to_owned(), json!({"state": state, "more": true}));
            let read = without_status(read);
            assert_eq!(Value::Object(read.clone()), content);
            assert_eq!(Value::Object(with_status(read)), expected);
        }
    }
}
