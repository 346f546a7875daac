//! States that runs could not store, and that are kept beside the state of their workspace. No run of the workspace plans or applies
//! until each of them is stored or dropped.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What is noted about a kept state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeptState {
    /// SHA-256 of the stored state that its run had read or stored last; `None` if there was none, or it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follows: Option<String>,
    /// Whether its run knows that it lacks nothing that the run has not destroyed.
    #[serde(default)]
    pub is_whole: bool,
}

/// The kept states of a workspace, by name, as the artifact store has them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptStates {
    #[serde(default)]
    pub states: BTreeMap<String, KeptState>,
}

/// The command that does this with the kept state of a workspace.
pub fn command(verb: &str, organization: &str, workspace: &str) -> String {
    format!("api-launcher state {verb} {organization}/{workspace}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_another_version_can_be_read() {
        let text = r#"{"states":{"errored-1-s":{"later":1},"errored-2-s":{"follows":"ab","isWhole":true}}}"#;
        let list: KeptStates = serde_json::from_str(text).unwrap();
        assert_eq!(list.states["errored-1-s"], KeptState::default());
        let noted = KeptState {
            follows: Some("ab".to_owned()),
            is_whole: true,
        };
        assert_eq!(list.states["errored-2-s"], noted);
        assert_eq!(
            serde_json::from_str::<KeptStates>("{}").unwrap(),
            KeptStates::default()
        );
    }
}
