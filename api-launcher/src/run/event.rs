//! What happens in a run, as events: the one stream every view is fed from, and the lines of `--output json`
//! (docs/run-events.md).

use std::path::PathBuf;
use std::time::SystemTime;

use job_contract::progress::Phase;
use job_contract::report::{ChangeCounts, ToolRecord};
use serde::Serialize;
use serde_json::Value;

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged, rename_all_fields = "camelCase")]
pub(crate) enum Event {
    /// The run has its job id and its data directory.
    RunStarted {
        /// Folder or job document, as it was named.
        source: String,
        organization_id: String,
        workspace_id: String,
        tool: &'static str,
        tool_version: String,
        data_dir: PathBuf,
    },
    /// An executor process is about to be started.
    StepStarted {
        /// Type of the step on the wire.
        step_type: String,
    },
    PhaseStarted {
        phase: Phase,
    },
    PhaseFinished {
        phase: Phase,
        duration_ms: u64,
        ok: bool,
    },
    /// A line of the run's log: the tool's and the scripts' output.
    Log {
        line: String,
    },
    /// Something the executor or the launcher itself has to say.
    Diagnostic {
        level: Level,
        message: String,
    },
    /// An executor process has ended.
    StepFinished(StepSummary),
    /// The outputs of the root module after an apply.
    Outputs {
        outputs: Vec<Output>,
    },
    /// The end; always the last event.
    RunFinished(RunSummary),
}

impl Event {
    /// The words in `type`, in the order of the variants.
    pub(crate) const NAMES: [&'static str; 9] = [
        "run_started",
        "step_started",
        "phase_started",
        "phase_finished",
        "log",
        "diagnostic",
        "step_finished",
        "outputs",
        "run_finished",
    ];

    /// The word in `type`.
    pub(crate) const fn name(&self) -> &'static str {
        Self::NAMES[match self {
            Self::RunStarted { .. } => 0,
            Self::StepStarted { .. } => 1,
            Self::PhaseStarted { .. } => 2,
            Self::PhaseFinished { .. } => 3,
            Self::Log { .. } => 4,
            Self::Diagnostic { .. } => 5,
            Self::StepFinished(_) => 6,
            Self::Outputs { .. } => 7,
            Self::RunFinished(_) => 8,
        }]
    }

    /// A diagnostic of the launcher itself.
    pub(crate) fn warning(message: impl Into<String>) -> Self {
        Self::Diagnostic {
            level: Level::Warn,
            message: message.into(),
        }
    }
}

/// How much a diagnostic matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Level {
    Error,
    Warn,
    Info,
    Debug,
    /// A line of the executor's stderr that is no diagnostic, as it came.
    Output,
}

impl Level {
    /// The level an executor's diagnostic names.
    pub(crate) fn parse(word: &str) -> Self {
        match word {
            "ERROR" => Self::Error,
            "WARN" => Self::Warn,
            "INFO" => Self::Info,
            _ => Self::Debug,
        }
    }
}

/// How a step ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StepSummary {
    /// Status of the step in the platform's words; absent when the executor ended without reporting one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<String>,
    pub(crate) exit_code: u8,
    pub(crate) duration_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) changes: Option<ChangeCounts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool: Option<ToolRecord>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) plan_path: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) log_path: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) state_path: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hint: Option<String>,
}

/// An output of the root module.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Output {
    pub(crate) name: String,
    /// The tool's own description of the type.
    #[serde(rename = "type")]
    pub(crate) value_type: Value,
    pub(crate) sensitive: bool,
    /// `null` when sensitive.
    pub(crate) value: Value,
}

/// How the run ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RunSummary {
    pub(crate) status: RunStatus,
    pub(crate) exit_code: u8,
    pub(crate) duration_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hint: Option<String>,
}

/// The run's result in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RunStatus {
    /// The plan was applied.
    Applied,
    /// The plan found nothing to do.
    NoChanges,
    /// The plan found changes, and the run did not ask whether to apply them.
    Planned,
    /// The plan found changes, and the answer was no.
    Declined,
    /// The step of a job document ended as it should.
    Completed,
    /// It did not work.
    Failed,
    /// A signal ended it.
    Interrupted,
}

/// An event as a line of JSON.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Line<'a> {
    #[serde(rename = "type")]
    name: &'static str,
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    job_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_id: Option<&'a str>,
    #[serde(flatten)]
    event: &'a Event,
}

impl<'a> Line<'a> {
    /// The line for an event of this job and step at this time.
    pub(crate) fn new(
        event: &'a Event,
        time: SystemTime,
        job_id: Option<&'a str>,
        step_id: Option<&'a str>,
    ) -> Self {
        Self {
            name: event.name(),
            time: humantime::format_rfc3339_millis(time).to_string(),
            job_id,
            step_id,
            event,
        }
    }

    /// Its text, without the line end.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("an event has string keys and no failing serialiser")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, UNIX_EPOCH};

    const DOCUMENTATION: &str = include_str!("../../../docs/run-events.md");

    fn all() -> Vec<Event> {
        vec![
            Event::RunStarted {
                source: "examples/hello".into(),
                organization_id: "o".into(),
                workspace_id: "w".into(),
                tool: "terraform",
                tool_version: "*".into(),
                data_dir: "/data".into(),
            },
            Event::StepStarted {
                step_type: "terraformPlan".into(),
            },
            Event::PhaseStarted { phase: Phase::Init },
            Event::PhaseFinished {
                phase: Phase::BeforeInit,
                duration_ms: 12,
                ok: true,
            },
            Event::Log {
                line: "Plan: 1 to add, 0 to change, 0 to destroy.".into(),
            },
            Event::warning("careful"),
            Event::StepFinished(StepSummary {
                status: Some("completed".into()),
                changes: Some(ChangeCounts {
                    add: 1,
                    ..ChangeCounts::default()
                }),
                plan_path: Some("/data/plan".into()),
                ..StepSummary::default()
            }),
            Event::Outputs {
                outputs: vec![Output {
                    name: "password".into(),
                    value_type: "string".into(),
                    sensitive: true,
                    value: Value::Null,
                }],
            },
            Event::RunFinished(RunSummary {
                status: RunStatus::NoChanges,
                exit_code: 0,
                duration_ms: 7,
                error: None,
                hint: None,
            }),
        ]
    }

    #[test]
    fn events_are_flat_objects_with_type_time_and_ids() {
        let lines: Vec<Value> = all()
            .iter()
            .map(|event| {
                let time = UNIX_EPOCH + Duration::from_millis(1_767_225_600_123);
                let line = Line::new(event, time, Some("7"), Some("step")).to_json();
                serde_json::from_str(&line).unwrap()
            })
            .collect();
        insta::assert_yaml_snapshot!(lines);
    }

    #[test]
    fn the_documentation_names_exactly_these_events() {
        let documented: Vec<&str> = DOCUMENTATION
            .lines()
            .filter_map(|line| line.strip_prefix("### `")?.strip_suffix('`'))
            .collect();
        assert_eq!(documented, Event::NAMES);
        assert_eq!(
            all().iter().map(Event::name).collect::<Vec<_>>(),
            Event::NAMES
        );
    }

    #[test]
    fn the_documentation_names_every_field_and_status() {
        for event in all() {
            let Value::Object(fields) = serde_json::to_value(&event).unwrap() else {
                panic!("{} is no object", event.name());
            };
            let heading = format!("### `{}`", event.name());
            let section = DOCUMENTATION.split(&heading).nth(1).unwrap();
            let section = section.split("\n### ").next().unwrap();
            for field in fields.keys() {
                assert!(
                    section.contains(&format!("| `{field}` |")),
                    "{heading}: {field}"
                );
            }
        }
        for status in [
            RunStatus::Applied,
            RunStatus::NoChanges,
            RunStatus::Planned,
            RunStatus::Declined,
            RunStatus::Completed,
            RunStatus::Failed,
            RunStatus::Interrupted,
        ] {
            let word = serde_json::to_value(status).unwrap();
            assert!(DOCUMENTATION.contains(&format!("| `{}` |", word.as_str().unwrap())));
        }
    }
}
