//! Progress of a step. The executor writes it to its diagnostics on stderr, and the launcher reads it. In a pod these lines are
//! ordinary structured logs.

use std::fmt;

use serde::{Deserialize, Serialize};

/// `target` of the diagnostics that carry a [`Progress`].
pub const TARGET: &str = "mayfly::progress";

/// A timed part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Fetch the source and prepare the workspace.
    Workspace,
    /// Find, or download and verify, the tool.
    Tool,
    Claim,
    BeforeInit,
    Init,
    /// Scripts between init and the operation.
    Before,
    Plan,
    Apply,
    Destroy,
    /// The commands of a `customScripts` or `approval` step.
    Scripts,
    /// Store the state, its history and the outputs.
    State,
    /// Render the plan as text and as JSON.
    Show,
    OnFailure,
    After,
    Store,
    Report,
}

impl Phase {
    /// The name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Workspace => "workspace",
            Self::Tool => "tool",
            Self::Claim => "claim",
            Self::BeforeInit => "before_init",
            Self::Init => "init",
            Self::Before => "before",
            Self::Plan => "plan",
            Self::Apply => "apply",
            Self::Destroy => "destroy",
            Self::Scripts => "scripts",
            Self::State => "state",
            Self::Show => "show",
            Self::OnFailure => "on_failure",
            Self::After => "after",
            Self::Store => "store",
            Self::Report => "report",
        }
    }

    /// The name in messages, as the object of "running".
    pub const fn label(self) -> &'static str {
        match self {
            Self::BeforeInit => "scripts before init",
            Self::Before => "scripts before",
            Self::OnFailure => "scripts on failure",
            Self::After => "scripts after",
            _ => self.name(),
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// The fields of an executor's diagnostic in `json` format that readers need. Unknown fields are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnostic {
    /// `ERROR`, `WARN`, `INFO`, `DEBUG` or `TRACE`.
    pub level: String,
    #[serde(default)]
    pub message: String,
    /// Module, or [`TARGET`] for progress.
    #[serde(default)]
    pub target: String,
    /// The kind of progress; absent in other diagnostics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<Progress>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ok: Option<bool>,
}

impl Diagnostic {
    /// Reads one line of the executor's stderr. `None` if the line is no diagnostic.
    pub fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}

/// The kind of a progress diagnostic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    PhaseStarted,
    PhaseFinished,
}

impl Progress {
    /// The value of the `event` field.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PhaseStarted => "phase_started",
            Self::PhaseFinished => "phase_finished",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn diagnostics_are_read_back() {
        let line = r#"{"timestamp":"2026-01-01T00:00:00Z","level":"INFO","message":"init done","event":"phase_finished","phase":"before_init","duration_ms":12,"ok":true,"target":"mayfly::progress"}"#;
        let diagnostic = Diagnostic::parse(line).unwrap();
        assert_eq!(diagnostic.event, Some(Progress::PhaseFinished));
        assert_eq!(diagnostic.phase, Some(Phase::BeforeInit));
        assert_eq!(diagnostic.duration_ms, Some(12));
        assert_eq!(Diagnostic::parse("thread 'main' panicked"), None);
        assert_eq!(
            serde_json::to_value(Progress::PhaseFinished).unwrap(),
            Progress::PhaseFinished.name()
        );
    }
}
