//! The parts of a state file that publishing needs: serial, lineage and outputs.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The largest JSON document of the tool that is read into memory. Plans of thousands of resources are much smaller.
pub(crate) const MAX_DOCUMENT_BYTES: usize = 512 * 1024 * 1024;

/// Parts of a state file (format version 4).
#[derive(Debug, Deserialize)]
pub struct RawState {
    #[serde(default)]
    pub serial: u64,
    #[serde(default)]
    pub lineage: String,
    #[serde(default)]
    pub outputs: BTreeMap<String, Output>,
    #[serde(default)]
    encrypted_data: Option<IgnoredAny>,
}

/// An output value, in the shape of `output -json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    #[serde(default)]
    pub sensitive: bool,
    #[serde(rename = "type", default)]
    pub value_type: Value,
    #[serde(default)]
    pub value: Value,
}

impl RawState {
    /// Parses a state file; `None` if it is empty or not a state.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    /// Whether OpenTofu encrypted it. Then only the tool can read outputs and resources.
    pub const fn is_encrypted(&self) -> bool {
        self.encrypted_data.is_some()
    }

    /// What `output -json` prints.
    pub fn outputs_json(&self) -> Value {
        json!(self.outputs)
    }

    /// The outputs for the job context: sorted by name, without sensitive values (contract 6.6).
    pub fn outputs_for_context(&self) -> Value {
        let entry = |(name, output): (&String, &Output)| {
            let mut entry = Map::new();
            entry.insert("name".into(), json!(name));
            entry.insert("type".into(), output.value_type.clone());
            entry.insert("sensitive".into(), json!(output.sensitive));
            entry.insert(
                "value".into(),
                if output.sensitive {
                    Value::Null
                } else {
                    output.value.clone()
                },
            );
            Value::Object(entry)
        };
        self.outputs.iter().map(entry).collect()
    }

    /// The outputs for people: one line `name = value` each (contract 7.6).
    pub fn outputs_text(&self) -> Vec<String> {
        let line = |(name, output): (&String, &Output)| {
            if output.sensitive {
                format!("{name} = <sensitive>")
            } else {
                format!("{name} = {}", output.value)
            }
        };
        self.outputs.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATE: &str = r#"{"version":4,"serial":7,"lineage":"l","outputs":{
        "b":{"value":"x \"y\"","type":"string"},
        "a":{"value":{"k":[1]},"type":["object",{}],"sensitive":true}},"resources":[]}"#;

    #[test]
    fn outputs_take_the_three_forms_of_the_contract() {
        let state = RawState::parse(STATE.as_bytes()).unwrap();
        assert_eq!((state.serial, state.lineage.as_str()), (7, "l"));
        assert_eq!(
            state.outputs_text(),
            ["a = <sensitive>", r#"b = "x \"y\"""#]
        );
        assert_eq!(
            state.outputs_json()["b"],
            json!({"sensitive": false, "type": "string", "value": "x \"y\""})
        );
        let context = state.outputs_for_context();
        assert_eq!(
            context[0],
            json!({"name": "a", "type": ["object", {}], "sensitive": true, "value": null})
        );
        assert_eq!(context[1]["value"], "x \"y\"");
    }

    #[test]
    fn other_documents_are_no_state() {
        assert!(RawState::parse(b"").is_none());
        assert!(RawState::parse(b"Error: no state").is_none());
    }
}
