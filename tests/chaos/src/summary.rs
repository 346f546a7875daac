//! The summary of a journey, as text and as JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use crate::check::{Ending, Facts, Findings, Kind, StoreOutages, Violation};
use crate::journey::{FinishedRun, Options};

/// What the oracle counts: what exists is compared with what the last state has.
const ORACLE: [(&str, &[Kind]); 3] = [
    ("states_lost", &[Kind::StateLost, Kind::StateMissing]),
    ("older_published", &[Kind::OlderPublished]),
    ("living_locks_removed", &[Kind::LockRemoved]),
];

/// Runs, faults and violations of a journey.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Seed of the schedule.
    pub seed: u64,
    /// The runs of the schedule.
    pub runs: u32,
    /// Number of the platform's jobs with each outcome.
    pub outcomes: BTreeMap<&'static str, u32>,
    /// Number of runs with each fault.
    pub faults: BTreeMap<&'static str, u32>,
    /// Number of runs of each kind.
    pub kinds: BTreeMap<&'static str, u32>,
    /// Processes of the tool that began an apply or a destroy.
    pub changes_begun: u32,
    /// Numbered lines in stored outputs.
    pub lines: usize,
    /// Versions of states in the store.
    pub states: usize,
    /// Programs started, by kind, the first ones included.
    pub started: BTreeMap<&'static str, u32>,
    /// Responses between a hub and its peers, and those that were disturbed.
    pub responses: BTreeMap<&'static str, u64>,
    /// Outages of the store.
    pub store: StoreOutages,
    /// Runs with a failure that an outage of the store excuses.
    pub excused: Vec<String>,
    /// How often a state was written again as it was.
    pub rewritten: usize,
    /// The violations.
    pub found: Vec<Violation>,
    /// Evidence of each run with a violation.
    pub evidence: Vec<String>,
    /// Duration of the journey.
    pub took: Duration,
}

impl Summary {
    pub(crate) fn new(
        options: &Options,
        facts: &Facts,
        finished: &[FinishedRun],
        found: Findings,
        took: Duration,
    ) -> Self {
        let mut summary = Self {
            seed: options.seed,
            runs: u32::try_from(finished.len()).unwrap_or(u32::MAX),
            outcomes: BTreeMap::new(),
            faults: BTreeMap::new(),
            kinds: BTreeMap::new(),
            changes_begun: 0,
            lines: 0,
            states: 0,
            started: BTreeMap::new(),
            responses: BTreeMap::new(),
            store: facts.store,
            excused: found.excused.into_iter().collect(),
            rewritten: found.rewritten,
            found: found.violations,
            evidence: Vec::new(),
            took,
        };
        for finished in finished {
            *summary.kinds.entry(finished.run.kind.name()).or_default() += 1;
            let fault = finished.run.fault.map_or("no fault", |fault| fault.name());
            *summary.faults.entry(fault).or_default() += 1;
        }
        for run in &facts.runs {
            summary.states += run.versions.len();
            let tools = run
                .begun
                .iter()
                .filter(|(what, _)| what.starts_with("tool "));
            summary.changes_begun += tools.map(|(_, times)| times).sum::<u32>();
            for job in &run.jobs {
                let ending = job
                    .endings
                    .last()
                    .map_or("none", |ending: &Ending| ending.name());
                *summary.outcomes.entry(ending).or_default() += 1;
                let stored = job.steps.iter().filter_map(|step| step.stored.as_ref());
                summary.lines += stored.map(Vec::len).sum::<usize>();
            }
        }
        summary
    }

    /// Whether there is no violation.
    pub fn passed(&self) -> bool {
        self.found.is_empty()
    }

    /// Whether this run has a violation, or a violation names one of its jobs.
    pub(crate) fn concerns(&self, finished: &FinishedRun) -> bool {
        let name = finished.run.to_string();
        let names_job = |text: &str| finished.jobs.iter().any(|job| names_job(text, *job));
        self.found
            .iter()
            .any(|found| found.of.starts_with(&name) || names_job(&found.detail))
    }

    /// How many runs have a violation of each kind that the oracle counts.
    fn oracle(&self) -> BTreeMap<&'static str, usize> {
        let count = |kinds: &[Kind]| {
            let found = self.found.iter();
            let found = found.filter(|found| kinds.contains(&found.kind));
            found.map(|found| &found.of).collect::<BTreeSet<_>>().len()
        };
        ORACLE.map(|(name, kinds)| (name, count(kinds))).into()
    }

    /// The summary as JSON.
    pub fn as_json(&self) -> Value {
        let found = self.found.iter().map(|found| {
            json!({"kind": format!("{:?}", found.kind), "of": found.of, "detail": found.detail})
        });
        json!({
            "seed": self.seed,
            "runs": self.runs,
            "passed": self.passed(),
            "outcomes": self.outcomes,
            "faults": self.faults,
            "kinds": self.kinds,
            "changes_begun": self.changes_begun,
            "lines": self.lines,
            "states": self.states,
            "started": self.started,
            "responses": self.responses,
            "store": {
                "outages": self.store.count,
                "broken": self.store.broken,
                "of_unknown_runs": self.store.of_unknown_runs,
            },
            "excused": self.excused,
            "rewritten": self.rewritten,
            "oracle": self.oracle(),
            "seconds": self.took.as_secs(),
            "discrepancies": found.collect::<Vec<_>>(),
            "evidence": self.evidence,
        })
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "seed {}, {} runs, {} s",
            self.seed,
            self.runs,
            self.took.as_secs()
        )?;
        writeln!(f, "runs      {}", list(&self.kinds))?;
        writeln!(f, "faults    {}", list(&self.faults))?;
        writeln!(f, "jobs      {}", list(&self.outcomes))?;
        writeln!(
            f,
            "seen      {} applies and destroys begun, {} states, {} lines",
            self.changes_begun, self.states, self.lines
        )?;
        let [lost, older, locks] = ORACLE.map(|(name, _)| self.oracle()[name]);
        writeln!(
            f,
            "oracle    {lost} states lost, {older} older published, {locks} locks of living runs removed"
        )?;
        writeln!(f, "started   {}", list(&self.started))?;
        if !self.responses.is_empty() {
            writeln!(f, "responses {}", list(&self.responses))?;
        }
        writeln!(
            f,
            "store     {} outages, which broke {} connections, {} of unknown runs; {} states written again",
            self.store.count, self.store.broken, self.store.of_unknown_runs, self.rewritten
        )?;
        writeln!(f, "excused   {} runs by these outages", self.excused.len())?;
        for excused in &self.excused {
            writeln!(f, "  {excused}")?;
        }
        for found in &self.found {
            writeln!(f, "  {found}")?;
        }
        for evidence in &self.evidence {
            writeln!(f, "\n{evidence}")?;
        }
        if self.passed() {
            write!(f, "all rules hold")
        } else {
            write!(f, "{} violations", self.found.len())
        }
    }
}

fn list<N: fmt::Display>(counts: &BTreeMap<&str, N>) -> String {
    let each = counts.iter().map(|(name, count)| format!("{count} {name}"));
    each.collect::<Vec<_>>().join(", ")
}

fn names_job(text: &str, job: u32) -> bool {
    let mut named = text.split("job ").skip(1).filter_map(|rest| {
        let number = rest.split(|one: char| !one.is_ascii_digit()).next()?;
        number.parse::<u32>().ok()
    });
    named.any(|named| named == job)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oracle_counts_the_runs_that_break_its_rules() {
        let violation = |kind, of: &str| Violation {
            kind,
            of: of.to_owned(),
            detail: String::new(),
        };
        let mut summary = Summary::default();
        let zeros = "oracle    0 states lost, 0 older published, 0 locks of living runs removed\n";
        assert!(summary.to_string().contains(zeros));
        summary.found = vec![
            violation(Kind::StateMissing, "run 1"),
            violation(Kind::StateLost, "run 1"),
            violation(Kind::StateLost, "run 2"),
            violation(Kind::OlderPublished, "run 1"),
            violation(Kind::LockRemoved, "run 3"),
            violation(Kind::Locked, "run 4"),
        ];
        let expected = json!({"states_lost": 2, "older_published": 1, "living_locks_removed": 1});
        assert_eq!(summary.as_json()["oracle"], expected);
    }

    #[test]
    fn a_violation_is_about_the_jobs_that_it_names() {
        let text = "task 7 of job 41: Running, reported: false";
        assert!(names_job(text, 41));
        assert!(!names_job(text, 4) && !names_job(text, 7) && !names_job("job x", 4));
    }
}
