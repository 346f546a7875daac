//! The job context (contract 6.6): violations in a document that replaces another.

use serde_json::{Map, Value, json};

use crate::ledger::Rule;
use crate::streams::Findings;

/// Violations when `new` replaces `old`.
pub(crate) fn findings(job: u32, old: &Map<String, Value>, new: &Map<String, Value>) -> Findings {
    let mut findings = Findings::new();
    lost(&format!("job {job}"), old, new, &mut findings);
    for key in ["planStructuredOutput", "applyStructuredOutput"] {
        let steps = new.get(key).and_then(Value::as_object);
        for change in steps
            .into_iter()
            .flatten()
            .filter_map(|(_, list)| list.as_array())
            .flatten()
        {
            for (value, marks) in [("before", "beforeSensitive"), ("after", "afterSensitive")] {
                if reveals(&change[value], &change[marks]) {
                    let why = format!("`{value}` of {} in job {job}", change["address"]);
                    findings.push((Rule::SensitiveValue, why));
                }
            }
        }
    }
    findings
}

/// Violations of the rules for the status of the document. The platform shows the status before the content.
pub(crate) fn status_findings(job: u32, new: &Map<String, Value>) -> Findings {
    let status = new.get("structuredOutputStatus");
    let stored = json!({"state": "PERSISTED"});
    let has_output = ["planStructuredOutput", "applyStructuredOutput"]
        .iter()
        .any(|key| new.contains_key(*key));
    let is_right = match status {
        None => !has_output,
        Some(status) => *status == stored,
    };
    let wrong = (
        Rule::ContextStatus,
        format!("job {job} is stored as {status:?}"),
    );
    (!is_right).then_some(wrong).into_iter().collect()
}

/// Keys that the new document lacks.
fn lost(path: &str, old: &Map<String, Value>, new: &Map<String, Value>, findings: &mut Findings) {
    for (key, value) in old {
        let path = format!("{path}, {key}");
        match (value.as_object(), new.get(key)) {
            (_, None) => findings.push((Rule::ContextLost, path)),
            (Some(value), Some(Value::Object(now))) => lost(&path, value, now, findings),
            _ => {}
        }
    }
}

/// Whether a value is present that the marks call sensitive.
fn reveals(value: &Value, marks: &Value) -> bool {
    match marks {
        Value::Bool(sensitive) => *sensitive && !value.is_null(),
        Value::Object(marks) => marks.iter().any(|(key, marks)| reveals(&value[key], marks)),
        Value::Array(marks) => {
            let mut marks = marks.iter().enumerate();
            marks.any(|(at, marks)| reveals(&value[at], marks))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(old: &Value, new: &Value) -> Vec<Rule> {
        let found = findings(1, old.as_object().unwrap(), new.as_object().unwrap());
        found.into_iter().map(|(rule, _)| rule).collect()
    }

    #[test]
    fn a_document_that_drops_what_others_stored_is_found() {
        let old = json!({"mine": 1, "terrakubeUI": {"step-1": "x"}});
        let merged = json!({"mine": 2, "terrakubeUI": {"step-1": "y", "step-2": "z"}});
        assert_eq!(rules(&old, &merged), []);
        assert_eq!(
            rules(&old, &json!({"terrakubeUI": {"step-1": "x"}})),
            [Rule::ContextLost]
        );
        assert_eq!(
            rules(&old, &json!({"mine": 1, "terrakubeUI": {}})),
            [Rule::ContextLost]
        );
    }

    #[test]
    fn a_status_that_is_echoed_or_left_out_is_found() {
        let rules = |document: Value| {
            let found = status_findings(1, document.as_object().unwrap());
            found.into_iter().map(|(rule, _)| rule).collect::<Vec<_>>()
        };
        let with = |state: &str| json!({"planStructuredOutput": {}, "structuredOutputStatus": {"state": state}});
        assert_eq!(rules(with("PERSISTED")), []);
        assert_eq!(rules(json!({"mine": 1})), []);
        for wrong in [
            with("PENDING"),
            json!({"structuredOutputStatus": {"state": "PENDING"}}),
            json!({"applyStructuredOutput": {}}),
        ] {
            assert_eq!(rules(wrong.clone()), [Rule::ContextStatus], "{wrong}");
        }
    }

    #[test]
    fn a_value_marked_as_sensitive_is_found() {
        let change = |after: Value| {
            let marks = json!({"input": true, "tags": [false, true]});
            json!({"planStructuredOutput": {"s": [{"address": "a", "after": after, "afterSensitive": marks}]}})
        };
        let clean = change(json!({"input": null, "other": 1, "tags": ["x", null]}));
        assert_eq!(rules(&json!({}), &clean), []);
        for after in [
            json!({"input": "p"}),
            json!({"input": null, "tags": ["x", "p"]}),
        ] {
            assert_eq!(rules(&json!({}), &change(after)), [Rule::SensitiveValue]);
        }
    }
}
