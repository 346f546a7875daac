//! The closing summary: the result of the run, where its artifacts are, and what to do next.

use std::fmt::Write as _;
use std::path::PathBuf;

use job_contract::StepType;
use job_contract::progress::Phase;
use job_contract::report::ChangeCounts;
use serde_json::Value;

use super::super::event::{Event, Output, RunStatus, RunSummary, StepSummary};
use crate::terminal::paint::Paint;
use crate::terminal::text::duration;

/// Phases shorter than this are left out of the list of durations.
const LISTED_MS: u64 = 10;
/// Longer values are better read with the tool's own `output` command.
const MAX_VALUE_CHARS: usize = 160;

/// What the summary needs to know, gathered from the events.
#[derive(Debug, Default)]
pub(super) struct Summary {
    steps: Vec<Step>,
    outputs: Vec<Output>,
    end: Option<RunSummary>,
}

#[derive(Debug)]
struct Step {
    /// On the wire.
    kind: String,
    phases: Vec<(Phase, u64)>,
    end: Option<StepSummary>,
}

impl Step {
    fn is(&self, types: &[StepType]) -> bool {
        StepType::parse(&self.kind).is_some_and(|step| types.contains(&step))
    }
}

impl Summary {
    pub(super) fn note(&mut self, event: &Event) {
        match event {
            Event::StepStarted { step_type } => self.steps.push(Step {
                kind: step_type.clone(),
                phases: Vec::new(),
                end: None,
            }),
            Event::PhaseFinished {
                phase, duration_ms, ..
            } => {
                if let Some(step) = self.steps.last_mut() {
                    step.phases.push((*phase, *duration_ms));
                }
            }
            Event::StepFinished(end) => {
                if let Some(step) = self.steps.last_mut() {
                    step.end = Some(end.clone());
                }
            }
            Event::Outputs { outputs } => self.outputs.clone_from(outputs),
            Event::RunFinished(end) => self.end = Some(end.clone()),
            _ => {}
        }
    }

    pub(super) fn failed(&self) -> bool {
        self.end.as_ref().is_some_and(|end| end.exit_code != 0)
    }

    fn changes(&self) -> Option<ChangeCounts> {
        self.steps
            .iter()
            .rev()
            .find_map(|step| step.end.as_ref()?.changes)
    }

    fn is_destroy(&self) -> bool {
        self.steps
            .iter()
            .any(|step| step.is(&[StepType::PlanDestroy, StepType::Destroy]))
    }
}

/// The summary as lines.
pub(super) fn render(summary: &Summary, paint: Paint) -> String {
    let Some(end) = &summary.end else {
        return String::new();
    };
    let mut text = String::new();
    if !summary.steps.is_empty() {
        text.push('\n');
    }
    headline(&mut text, summary, end, paint);
    if !summary.outputs.is_empty() {
        section(
            &mut text,
            paint,
            "Outputs",
            outputs(&summary.outputs, paint),
        );
    }
    section(&mut text, paint, "Time", times(summary));
    section(&mut text, paint, "Files", files(summary));
    if let Some(hint) = &end.hint {
        let label = if end.exit_code == 0 { "next:" } else { "hint:" };
        let _ = writeln!(text, "{} {hint}", paint.bold(label));
    }
    text
}

fn headline(text: &mut String, summary: &Summary, end: &RunSummary, paint: Paint) {
    let time = duration(end.duration_ms);
    let counts = summary.changes().map(|c| counts(&c)).unwrap_or_default();
    let result = match end.status {
        RunStatus::Applied if summary.is_destroy() => paint.green("Destroyed"),
        RunStatus::Applied => paint.green("Applied"),
        RunStatus::NoChanges => paint.green("No changes"),
        RunStatus::Planned => paint.yellow("Planned, not applied"),
        RunStatus::Declined => paint.yellow("Not applied"),
        RunStatus::Completed => paint.green("Done"),
        RunStatus::Failed => paint.red("error:"),
        RunStatus::Interrupted => paint.red("Interrupted:"),
    };
    let _ = match end.status {
        RunStatus::Failed | RunStatus::Interrupted => {
            writeln!(
                text,
                "{result} {}",
                end.error.as_deref().unwrap_or("the run failed")
            )
        }
        RunStatus::NoChanges => writeln!(text, "{} in {time}", paint.bold(&result)),
        _ if counts.is_empty() => writeln!(text, "{} in {time}", paint.bold(&result)),
        _ => writeln!(text, "{}: {counts}, in {time}", paint.bold(&result)),
    };
}

/// `1 to add` would be wrong after an apply, `1 added` after a plan: signs fit both.
fn counts(changes: &ChangeCounts) -> String {
    let mut text = format!("+{} ~{} -{}", changes.add, changes.change, changes.remove);
    if changes.import > 0 {
        let _ = write!(text, ", {} imported", changes.import);
    }
    if changes.forget > 0 {
        let _ = write!(text, ", {} forgotten", changes.forget);
    }
    text
}

fn section(text: &mut String, paint: Paint, title: &str, lines: Vec<String>) {
    for (n, line) in lines.into_iter().enumerate() {
        let label = if n == 0 { title } else { "" };
        let _ = writeln!(text, "  {} {line}", paint.dim(&format!("{label:<8}")));
    }
}

fn outputs(outputs: &[Output], paint: Paint) -> Vec<String> {
    let width = outputs
        .iter()
        .map(|output| output.name.chars().count())
        .max()
        .unwrap_or(0);
    outputs
        .iter()
        .map(|output| {
            let value = if output.sensitive {
                paint.dim("(sensitive)")
            } else {
                value(&output.value)
            };
            format!("{:<width$} = {value}", output.name)
        })
        .collect()
}

/// One line, with control characters escaped as JSON escapes them.
fn value(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(MAX_VALUE_CHARS) {
        Some((cut, _)) => format!("{}\u{2026}", &text[..cut]),
        None => text,
    }
}

fn times(summary: &Summary) -> Vec<String> {
    summary
        .steps
        .iter()
        .filter_map(|step| {
            let total = step.end.as_ref()?.duration_ms;
            let phases: Vec<String> = step
                .phases
                .iter()
                .filter(|(_, ms)| *ms >= LISTED_MS)
                .map(|(phase, ms)| format!("{phase} {}", duration(*ms)))
                .collect();
            let name = step_word(&step.kind);
            Some(if phases.is_empty() {
                format!("{name} {}", duration(total))
            } else {
                format!("{name} {} ({})", duration(total), phases.join(", "))
            })
        })
        .collect()
}

fn files(summary: &Summary) -> Vec<String> {
    let ends = || summary.steps.iter().filter_map(|step| step.end.as_ref());
    let last = |path: fn(&StepSummary) -> Option<&PathBuf>| ends().filter_map(path).next_back();
    let line = |name: &str, path: &PathBuf| format!("{name:<5} {}", path.display());
    let logs = ends().filter_map(|end| end.log_path.as_ref());
    let mut lines: Vec<String> = logs.map(|path| line("log", path)).collect();
    lines.extend(last(|end| end.plan_path.as_ref()).map(|path| line("plan", path)));
    lines.extend(last(|end| end.state_path.as_ref()).map(|path| line("state", path)));
    lines
}

/// A step type in a word.
pub(super) fn step_word(step_type: &str) -> &'static str {
    match StepType::parse(step_type) {
        Some(StepType::Plan) => "plan",
        Some(StepType::PlanDestroy) => "plan to destroy",
        Some(StepType::Apply) => "apply",
        Some(StepType::Destroy) => "destroy",
        Some(StepType::CustomScripts) => "scripts",
        Some(StepType::Approval) => "approval",
        Some(StepType::PolicyEvaluation) => "policies",
        None => "step",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn end(status: RunStatus, exit_code: u8) -> RunSummary {
        RunSummary {
            status,
            exit_code,
            duration_ms: 2345,
            error: None,
            hint: None,
        }
    }

    fn step(summary: &mut Summary, step_type: StepType, changes: Option<ChangeCounts>) {
        summary.note(&Event::StepStarted {
            step_type: step_type.name().into(),
        });
        for (phase, duration_ms) in [(Phase::Claim, 1), (Phase::Init, 480), (Phase::Plan, 310)] {
            summary.note(&Event::PhaseFinished {
                phase,
                duration_ms,
                ok: true,
            });
        }
        summary.note(&Event::StepFinished(StepSummary {
            status: Some("completed".into()),
            duration_ms: 912,
            changes,
            plan_path: (step_type == StepType::Plan).then(|| "/data/plan".into()),
            log_path: Some(format!("/data/{step_type}.tfoutput").into()),
            state_path: (step_type == StepType::Apply).then(|| "/data/terraform.tfstate".into()),
            ..StepSummary::default()
        }));
    }

    fn counted(add: u64, change: u64, remove: u64) -> ChangeCounts {
        ChangeCounts {
            add,
            change,
            remove,
            ..ChangeCounts::default()
        }
    }

    #[test]
    fn imported_and_forgotten_resources_are_shown_if_there_are_any() {
        let some = ChangeCounts {
            import: 1,
            forget: 2,
            ..counted(0, 0, 0)
        };
        assert_eq!(counts(&some), "+0 ~0 -0, 1 imported, 2 forgotten");
        assert_eq!(counts(&counted(1, 0, 0)), "+1 ~0 -0");
    }

    #[test]
    fn an_applied_run_shows_counts_outputs_times_and_files() {
        let mut summary = Summary::default();
        step(&mut summary, StepType::Plan, Some(counted(2, 1, 0)));
        step(&mut summary, StepType::Apply, Some(counted(2, 1, 0)));
        let output = |name: &str, sensitive, value| Output {
            name: name.into(),
            value_type: "string".into(),
            sensitive,
            value,
        };
        summary.note(&Event::Outputs {
            outputs: vec![
                output("greeting", false, json!("hello\nworld")),
                output("hosts", false, json!(["a", "b"])),
                output("password", true, Value::Null),
            ],
        });
        summary.note(&Event::RunFinished(end(RunStatus::Applied, 0)));
        insta::assert_snapshot!(render(&summary, Paint { on: false }));
    }

    #[test]
    fn a_failed_run_names_the_fault_first() {
        let mut summary = Summary::default();
        step(&mut summary, StepType::Plan, None);
        summary.note(&Event::RunFinished(RunSummary {
            error: Some("terraform plan ended with exit code 1".into()),
            hint: Some("read the log".into()),
            ..end(RunStatus::Failed, 1)
        }));
        assert!(summary.failed());
        insta::assert_snapshot!(render(&summary, Paint { on: false }));
    }

    #[test]
    fn a_planned_run_shows_the_next_command() {
        let mut summary = Summary::default();
        step(&mut summary, StepType::Plan, Some(counted(0, 0, 3)));
        summary.note(&Event::RunFinished(RunSummary {
            hint: Some("add --auto-approve to apply".into()),
            ..end(RunStatus::Planned, 0)
        }));
        insta::assert_snapshot!(render(&summary, Paint { on: false }));
    }

    #[test]
    fn a_run_that_never_started_is_one_sentence() {
        let mut summary = Summary::default();
        summary.note(&Event::RunFinished(RunSummary {
            error: Some("there is no folder `x`".into()),
            ..end(RunStatus::Failed, 64)
        }));
        assert_eq!(
            render(&summary, Paint { on: false }),
            "error: there is no folder `x`\n"
        );
    }

    #[test]
    fn long_values_are_cut_between_characters() {
        let text = value(&json!("\u{e9}".repeat(500)));
        assert_eq!(text.chars().count(), MAX_VALUE_CHARS + 1);
    }
}
