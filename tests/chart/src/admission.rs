//! A `ValidatingAdmissionPolicy`, judged by its own expressions as the API server judges.

use cel::{Context, Program, Value as Outcome};
use serde_json::{Map, Value, json};

use crate::Document;

/// A policy of the chart.
#[derive(Clone, Copy, Debug)]
pub struct Policy<'a>(&'a Value);

impl<'a> Policy<'a> {
    /// The one of a document.
    #[track_caller]
    pub fn of(document: &'a Document) -> Self {
        assert_eq!(document.kind(), "ValidatingAdmissionPolicy", "{document}");
        Self(&document.value["spec"])
    }

    /// Why an object somebody creates is refused, one line for every validation that does; `None` where the policy is
    /// not for them. An expression that fails refuses, as with `failurePolicy: Fail`.
    pub fn refusals(&self, user: &str, object: &Value) -> Option<Vec<String>> {
        let mut context = Context::default();
        let request = json!({"userInfo": {"username": user}});
        context.add_variable("object", object).unwrap();
        context.add_variable("request", &request).unwrap();
        let meant = self
            .list("matchConditions")
            .all(|condition| is_true(&context, condition) == Ok(true));
        if !meant {
            return None;
        }
        let mut variables = Map::new();
        for variable in self.list("variables") {
            context.add_variable("variables", &variables).unwrap();
            let value = evaluated(&context, variable).unwrap_or_else(|error| panic!("{error}"));
            let name = variable["name"].as_str().unwrap().to_owned();
            variables.insert(name, value);
        }
        context.add_variable("variables", &variables).unwrap();
        let refusal = |validation: &Value| match is_true(&context, validation) {
            Ok(true) => None,
            Ok(false) => Some(validation["message"].as_str().unwrap().to_owned()),
            Err(error) => Some(error),
        };
        Some(self.list("validations").filter_map(refusal).collect())
    }

    fn list(&self, name: &str) -> impl Iterator<Item = &'a Value> {
        self.0[name].as_array().into_iter().flatten()
    }
}

/// What the expression of an entry comes to.
fn outcome(context: &Context<'_, '_>, entry: &Value) -> Result<Outcome, String> {
    let expression = entry["expression"].as_str().unwrap();
    let told = |error: &dyn std::fmt::Display| format!("{error}: {expression}");
    let program = Program::compile(expression).map_err(|error| told(&error))?;
    program.execute(context).map_err(|error| told(&error))
}

fn is_true(context: &Context<'_, '_>, entry: &Value) -> Result<bool, String> {
    match outcome(context, entry)? {
        Outcome::Bool(is_true) => Ok(is_true),
        other => Err(format!("{other:?} is no verdict: {entry}")),
    }
}

fn evaluated(context: &Context<'_, '_>, entry: &Value) -> Result<Value, String> {
    let outcome = outcome(context, entry)?;
    outcome
        .json()
        .map_err(|error| format!("{error:?}: {entry}"))
}
