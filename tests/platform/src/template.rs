//! Flow entries: what a template makes of a job's steps (contract 2.8).

use serde_json::{Value, json};

/// One entry of a template; a job has a step for each.
#[derive(Debug, Clone, PartialEq)]
pub struct Flow {
    /// `terraformPlan`, `approval` and so on.
    pub kind: String,
    /// Number of the step, ascending.
    pub number: u32,
    /// Name of the step.
    pub name: String,
    /// Scripts, as the template has them; null for none.
    pub commands: Value,
    /// Scripts after a failure.
    pub on_failure: Value,
    /// Scripts after a rejected approval.
    pub on_reject: Value,
    /// Whether a failure is ignored.
    pub ignore_error: bool,
}

impl Flow {
    /// An entry without scripts.
    pub fn new(kind: &str, number: u32) -> Self {
        Self {
            kind: kind.to_owned(),
            number,
            name: format!("{kind} {number}"),
            commands: Value::Null,
            on_failure: Value::Null,
            on_reject: Value::Null,
            ignore_error: false,
        }
    }

    /// The platform's default template: plan, approval, apply.
    pub fn plan_approve_apply() -> Vec<Self> {
        vec![
            Self::new("terraformPlan", 100),
            Self::new("approval", 150),
            Self::new("terraformApply", 200),
        ]
    }

    /// A plan, and an apply without approval.
    pub fn plan_apply() -> Vec<Self> {
        vec![
            Self::new("terraformPlan", 100),
            Self::new("terraformApply", 200),
        ]
    }

    /// A single step.
    pub fn only(kind: &str) -> Vec<Self> {
        vec![Self::new(kind, 100)]
    }

    /// The same entry with a script.
    #[must_use]
    pub fn with_script(mut self, script: &str) -> Self {
        self.commands = script_list(script);
        self
    }

    /// The same entry with a script for its failure.
    #[must_use]
    pub fn on_failure(mut self, script: &str) -> Self {
        self.on_failure = script_list(script);
        self
    }

    /// The same entry with a script for its rejection.
    #[must_use]
    pub fn on_reject(mut self, script: &str) -> Self {
        self.on_reject = script_list(script);
        self
    }
}

fn script_list(script: &str) -> Value {
    json!([{
        "runtime": "BASH", "script": script, "priority": 100,
        "before": false, "after": false, "verbose": false, "beforeInit": false,
    }])
}
