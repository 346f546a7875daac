//! Merges patches into the job context, which others write too (contract 6.6).

use serde_json::{Map, Value};

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
