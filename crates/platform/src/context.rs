//! How the job context is changed: by patches, merged into whatever others have written (contract 6.6).

use serde_json::{Map, Value};

/// Objects are merged key by key, everything else is replaced.
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
