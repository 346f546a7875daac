//! What was checked and how long it took, for people and as JSON.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Output;
use crate::stage::Job;

/// One scenario while it runs, and what became of it.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) scenario: String,
    output: Output,
    started: Instant,
    took: Duration,
    checks: Vec<(String, Result<(), String>)>,
    jobs: Vec<Value>,
}

impl Record {
    pub(crate) fn new(scenario: &str, output: Output) -> Self {
        let record = Self {
            scenario: scenario.to_owned(),
            output,
            started: Instant::now(),
            took: Duration::ZERO,
            checks: Vec::new(),
            jobs: Vec::new(),
        };
        record.say(&format!("\n{scenario}"));
        record
    }

    /// Notes a check; `found` is what there was instead.
    pub(crate) fn check(&mut self, what: &str, holds: bool, found: impl FnOnce() -> String) {
        let result = if holds { Ok(()) } else { Err(found()) };
        match &result {
            Ok(()) => self.say(&format!("  ok      {what}")),
            Err(found) => self.say(&format!("  FAILED  {what}: {found}")),
        }
        self.checks.push((what.to_owned(), result));
    }

    /// Notes how long a job took to stand where it was awaited.
    pub(crate) fn job(&mut self, name: &str, job: &Job, took: Duration) {
        let (id, statuses, seconds) = (&job.id, job.statuses(), rounded(took));
        self.say(&format!(
            "  {seconds:>5.1} s {name}: job {id} is {statuses}"
        ));
        let job = json!({"name": name, "id": id, "statuses": statuses, "seconds": seconds});
        self.jobs.push(job);
    }

    pub(crate) fn end(&mut self, outcome: Result<(), anyhow::Error>) {
        if let Err(error) = outcome {
            self.check("it could be run to its end", false, || format!("{error:#}"));
        }
        self.took = self.started.elapsed();
    }

    pub(crate) fn passed(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(|(_, result)| result.is_ok())
    }

    fn say(&self, line: &str) {
        if self.output == Output::Text {
            println!("{line}");
        }
    }

    fn as_json(&self) -> Value {
        let checks = self.checks.iter().map(|(what, result)| match result {
            Ok(()) => json!({"check": what, "passed": true}),
            Err(found) => json!({"check": what, "passed": false, "found": found}),
        });
        json!({
            "scenario": self.scenario, "passed": self.passed(), "seconds": rounded(self.took),
            "jobs": self.jobs, "checks": checks.collect::<Vec<_>>(),
        })
    }
}

/// Everything as one document. `trouble` is what kept the scenarios from being run or their records from being removed.
pub(crate) fn as_json(records: &[Record], trouble: &[String]) -> Value {
    let passed = trouble.is_empty() && records.iter().all(Record::passed);
    let scenarios: Vec<_> = records.iter().map(Record::as_json).collect();
    json!({"passed": passed, "trouble": trouble, "scenarios": scenarios})
}

pub(crate) fn summary(records: &[Record]) -> String {
    let rows = records.iter().map(|record| {
        let word = if record.passed() { "passed" } else { "FAILED" };
        let jobs = record.jobs.iter().map(|job| {
            format!(
                "{} {} s",
                job["name"].as_str().unwrap_or("?"),
                job["seconds"]
            )
        });
        format!(
            "{:<10} {word}  {:>6.1} s  {:>2} checks  {}",
            record.scenario,
            record.took.as_secs_f64(),
            record.checks.len(),
            jobs.collect::<Vec<_>>().join(", "),
        )
    });
    rows.collect::<Vec<_>>().join("\n")
}

fn rounded(took: Duration) -> f64 {
    (took.as_secs_f64() * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_scenario_passes_if_every_check_holds_and_there_was_one() {
        let mut record = Record::new("plan", Output::Json);
        assert!(!record.passed());
        record.check("the status", true, String::new);
        record.end(Ok(()));
        assert!(record.passed());
        assert_eq!(as_json(&[record], &[])["passed"], true);
    }

    #[test]
    fn a_failure_has_its_finding_and_fails_the_report() {
        let mut record = Record::new("plan", Output::Json);
        record.check("the status", false, || "failed".into());
        record.end(Err(anyhow!("no answer")));
        assert!(summary(std::slice::from_ref(&record)).contains("FAILED"));
        let report = as_json(&[record], &[]);
        assert_eq!(report["passed"], false);
        let checks = &report["scenarios"][0]["checks"];
        assert_eq!(checks[0]["found"], "failed");
        assert_eq!(checks[1]["found"], "no answer");
    }

    #[test]
    fn an_error_outside_the_scenarios_fails_the_report() {
        assert_eq!(
            as_json(&[], &["left an organization".into()])["passed"],
            false
        );
    }
}
