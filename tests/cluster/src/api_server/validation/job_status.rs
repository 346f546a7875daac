//! The status of a Job: what its controller may say. Most rules are asked only when what they are about changes.

use serde_json::{Value, json};

use super::{Errors, items};

const CONDITIONS: &str = "status.conditions";

/// A Job with a new status, and before.
struct Change<'a> {
    new: &'a Value,
    old: &'a Value,
}

fn is(job: &Value, condition: &str) -> bool {
    items(&job["status"]["conditions"])
        .iter()
        .any(|known| known["type"] == condition && known["status"] == "True")
}

fn is_finished(job: &Value) -> bool {
    is(job, "Complete") || is(job, "Failed")
}

fn count(job: &Value, field: &str) -> i64 {
    job["status"][field].as_i64().unwrap_or(0)
}

fn uncounted(job: &Value) -> usize {
    let uncounted = &job["status"]["uncountedTerminatedPods"];
    items(&uncounted["failed"]).len() + items(&uncounted["succeeded"]).len()
}

pub(crate) fn validate(new: &Value, old: Option<&Value>, errors: &mut Errors) {
    let old = old.unwrap_or(&Value::Null);
    let change = Change { new, old };
    for field in ["active", "succeeded", "failed", "ready", "terminating"] {
        if count(new, field) < 0 {
            let why = "must be greater than or equal to 0";
            errors.invalid(format!("status.{field}"), &new["status"][field], why);
        }
    }
    change.conditions(errors);
    change.times(errors);
    change.pods(errors);
}

impl Change<'_> {
    fn turned(&self, condition: &str) -> bool {
        is(self.new, condition) != is(self.old, condition)
    }

    fn changed(&self, field: &str) -> bool {
        self.new["status"][field] != self.old["status"][field]
    }

    fn finished_now(&self) -> bool {
        is_finished(self.new) != is_finished(self.old)
    }

    fn conditions(&self, errors: &mut Errors) {
        let mut refuse = |why: &str| errors.invalid(CONDITIONS, &json!("[]"), why);
        let (complete, failed) = (is(self.new, "Complete"), is(self.new, "Failed"));
        if complete && failed && (self.turned("Complete") || self.turned("Failed")) {
            refuse("cannot set Complete=True and Failed=true conditions");
        }
        if complete
            && is(self.new, "FailureTarget")
            && (self.turned("Complete") || self.turned("FailureTarget"))
        {
            refuse("cannot set Complete=True and FailureTarget=true conditions");
        }
        if failed && !is(self.new, "FailureTarget") && self.turned("Failed") {
            refuse("cannot set Failed=True condition without the FailureTarget=true condition");
        }
        if complete && !is(self.new, "SuccessCriteriaMet") && self.turned("Complete") {
            refuse(
                "cannot set Complete=True condition without the SuccessCriteriaMet=true condition",
            );
        }
        for condition in ["Failed", "Complete", "FailureTarget"] {
            if is(self.old, condition) && !is(self.new, condition) {
                refuse(&format!(
                    "cannot disable the terminal {condition}=True condition"
                ));
            }
        }
        if is(self.old, "SuccessCriteriaMet") && !is(self.new, "SuccessCriteriaMet") {
            refuse("cannot disable the SuccessCriteriaMet=True condition");
        }
    }

    fn times(&self, errors: &mut Errors) {
        let (status, was) = (&self.new["status"], &self.old["status"]);
        let (start, completion) = (&status["startTime"], &status["completionTime"]);
        let complete = is(self.new, "Complete");
        if self.turned("Complete") || self.changed("completionTime") {
            if !complete && !completion.is_null() {
                let why = "cannot set completionTime when there is no Complete=True condition";
                errors.invalid("status.completionTime", completion, why);
            }
            if complete && completion.is_null() {
                let why = "completionTime is required for Complete jobs";
                errors.required("status.completionTime", why);
            }
        }
        // Of one form and zone, so that text compares as time does.
        if (self.changed("startTime") || self.changed("completionTime"))
            && let (Some(start), Some(end)) = (start.as_str(), completion.as_str())
            && end < start
        {
            let why = "must be equal to or after `startTime`";
            errors.invalid("status.completionTime", completion, why);
        }
        if (self.finished_now() || self.changed("startTime"))
            && is_finished(self.new)
            && start.is_null()
        {
            errors.required("status.startTime", "startTime is required for finished job");
        }
        if !completion.is_null()
            && !was["completionTime"].is_null()
            && self.changed("completionTime")
        {
            errors.invalid("status.completionTime", completion, "field is immutable");
        }
        let suspended = self.new["spec"]["suspend"] == true;
        if !was["startTime"].is_null() && self.changed("startTime") && !suspended {
            let why = "field is immutable for unsuspended job once set";
            errors.invalid("status.startTime", start, why);
        }
    }

    fn pods(&self, errors: &mut Errors) {
        let finished = is_finished(self.new);
        for field in ["active", "terminating"] {
            let asked = self.finished_now() || self.changed(field);
            if asked && finished && count(self.new, field) > 0 {
                let why = format!("{field}>0 is invalid for finished job");
                errors.invalid(format!("status.{field}"), &self.new["status"][field], &why);
            }
        }
        if (self.finished_now() || self.changed("uncountedTerminatedPods"))
            && finished
            && uncounted(self.new) > 0
        {
            let pods = &self.new["status"]["uncountedTerminatedPods"];
            let why = "must be empty for finished job";
            errors.invalid("status.uncountedTerminatedPods", pods, why);
        }
        if (self.changed("ready") || self.changed("active"))
            && count(self.new, "ready") > count(self.new, "active")
        {
            let ready = &self.new["status"]["ready"];
            errors.invalid(
                "status.ready",
                ready,
                "cannot set more ready pods than active",
            );
        }
        for field in ["failed", "succeeded"] {
            if count(self.new, field) < count(self.old, field) {
                let why = format!("cannot decrease the {field} counter");
                errors.invalid(format!("status.{field}"), &self.new["status"][field], &why);
            }
        }
    }
}
