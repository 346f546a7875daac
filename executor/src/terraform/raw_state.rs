//! The parts of a state file that publishing needs: serial, lineage and outputs.

use std::collections::BTreeMap;
use std::io::Read;

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

/// Which state it is, of any size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StateMark {
    pub(crate) serial: u64,
    /// An encrypted state may have none.
    pub(crate) lineage: String,
    /// Whether it has neither resources nor outputs.
    pub(crate) is_empty: bool,
}

impl StateMark {
    /// Reads a state, and keeps nothing else of it in memory.
    pub(crate) fn read(state: impl Read) -> Result<Self, serde_json::Error> {
        let found: Parts = serde_json::from_reader(state)?;
        let has_resources = found.resources.is_some_and(|list| !list.is_empty());
        let has_outputs = found.outputs.is_some_and(|outputs| !outputs.is_empty());
        Ok(Self {
            serial: found.serial,
            lineage: found.lineage,
            is_empty: !has_resources && !has_outputs && found.encrypted_data.is_none(),
        })
    }

    /// Whether this state is the other one, or one that followed it.
    pub(crate) fn follows(&self, other: &Self) -> bool {
        let is_unmarked = self.lineage.is_empty() && !self.is_empty;
        is_unmarked || (self.lineage == other.lineage && self.serial >= other.serial)
    }
}

#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    serial: u64,
    #[serde(default)]
    lineage: String,
    outputs: Option<Map<String, Value>>,
    resources: Option<Vec<IgnoredAny>>,
    encrypted_data: Option<IgnoredAny>,
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
    fn a_state_is_followed_by_itself_and_by_later_ones_of_its_lineage() {
        let mark = |text: &str| StateMark::read(text.as_bytes()).unwrap();
        let seven = mark(STATE);
        assert!(!seven.is_empty && seven.follows(&seven));
        let at = |lineage: &str, serial: u64| {
            mark(&format!(
                r#"{{"version":4,"serial":{serial},"lineage":"{lineage}","outputs":{{}},"resources":[]}}"#
            ))
        };
        assert!(at("l", 0).is_empty);
        assert!(at("l", 8).follows(&seven) && !at("l", 6).follows(&seven));
        assert!(!at("other", 8).follows(&seven) && !at("", 0).follows(&seven));
        // OpenTofu may keep both numbers in the part that it encrypts.
        assert!(mark(r#"{"meta":{},"encrypted_data":"x"}"#).follows(&seven));
    }

    #[test]
    fn other_documents_are_no_state() {
        assert!(RawState::parse(b"").is_none());
        assert!(RawState::parse(b"Error: no state").is_none());
    }
}
