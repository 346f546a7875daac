//! The tool's JSON: a stream of events, one on each line. Lines that begin with `plan ` or `state ` are outputs of `show`. For
//! any input, the list of changes stays valid, and contains no sensitive value.

#![no_main]

use std::collections::HashSet;

use executor::terraform::events::console_text;
use executor::terraform::structured::Structured;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|data: &[u8]| {
    let mut structured = Structured::default();
    let mut sensitive = Vec::new();
    for line in data.split(|byte| *byte == b'\n') {
        if let Some(plan) = document(line, b"plan ") {
            structured.complete_from_plan(&plan);
            for change in plan["resource_changes"].as_array().into_iter().flatten() {
                let change = &change["change"];
                for (value, marks) in [("before", "before_sensitive"), ("after", "after_sensitive")]
                {
                    marked(&change[value], &change[marks], &mut sensitive);
                }
            }
        } else if let Some(state) = document(line, b"state ") {
            // For an apply that completed, and for one that did not.
            structured.complete_from_state(&state, line.len() % 2 == 0);
        } else if let Some(event @ Value::Object(_)) = document(line, b"") {
            if let Some(text) = console_text(&event) {
                // Only line numbers are added to the text of the event.
                assert!(text.len() <= 64 * line.len());
            }
            structured.event(&event);
        }
    }
    check(&structured);
    let again = Structured::seeded(&structured.changes());
    assert_eq!(again.counted(), structured.counted());
    check(&again);

    // The check is possible only if the value cannot come into the list in another way.
    let text = String::from_utf8_lossy(data);
    let shown = structured.changes().to_string();
    for value in sensitive {
        if value.len() >= 8 && text.matches(value.as_str()).count() == 1 {
            assert!(!shown.contains(&value), "{value} is sensitive");
        }
    }
});

fn document(line: &[u8], kind: &[u8]) -> Option<Value> {
    serde_json::from_slice(line.strip_prefix(kind)?).ok()
}

fn check(structured: &Structured) {
    let changes = structured.changes();
    let changes = changes.as_array().expect("a list");
    let mut addresses = HashSet::new();
    for change in changes {
        let address = change["address"]
            .as_str()
            .expect("every change has an address");
        assert!(addresses.insert(address), "{address} appears twice");
        assert!(change.get("previousStatus").is_none());
    }
    let counted = structured.counted();
    let most = u64::try_from(changes.len()).expect("a count");
    for count in [counted.add, counted.change, counted.remove, counted.import] {
        assert!(count <= most);
    }
    for diagnostic in structured.diagnostics().as_array().expect("a list") {
        assert!(diagnostic["summary"].is_string());
    }
}

/// The texts that `marks` marks as sensitive.
fn marked(value: &Value, marks: &Value, found: &mut Vec<String>) {
    match (value, marks) {
        (Value::String(text), Value::Bool(true)) => found.push(text.clone()),
        (Value::Object(parts), Value::Bool(true)) => {
            for part in parts.values() {
                marked(part, marks, found);
            }
        }
        (Value::Array(parts), Value::Bool(true)) => {
            for part in parts {
                marked(part, marks, found);
            }
        }
        (Value::Object(parts), Value::Object(marks)) => {
            for (name, part) in parts {
                marked(part, marks.get(name).unwrap_or(&Value::Null), found);
            }
        }
        (Value::Array(parts), Value::Array(marks)) => {
            for (part, marks) in parts.iter().zip(marks) {
                marked(part, marks, found);
            }
        }
        _ => {}
    }
}
