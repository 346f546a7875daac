//! The tally of a journey, for people and as JSON.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use crate::books::{Discrepancy, Ending, Facts};
use crate::journey::{Driven, Options};

/// What was run, what happened, and what does not add up.
#[derive(Clone, Debug)]
pub struct Tally {
    /// What decided it.
    pub seed: u64,
    /// The runs of the schedule.
    pub runs: u32,
    /// Jobs of the platform, by how they ended.
    pub outcomes: BTreeMap<&'static str, u32>,
    /// What happened to runs, and how often.
    pub strikes: BTreeMap<&'static str, u32>,
    /// Kinds of runs, and how many.
    pub kinds: BTreeMap<&'static str, u32>,
    /// Processes of the tool that began an apply or a destroy.
    pub changes_begun: u32,
    /// Numbered lines in stored outputs.
    pub lines: usize,
    /// Versions of states in the store.
    pub states: usize,
    /// Launchers started, the first two included.
    pub launchers: u32,
    /// What does not add up.
    pub found: Vec<Discrepancy>,
    /// What explains each run that does not add up.
    pub evidence: Vec<String>,
    /// How long it took.
    pub took: Duration,
}

impl Tally {
    pub(crate) fn new(
        options: &Options,
        facts: &Facts,
        driven: &[Driven],
        found: Vec<Discrepancy>,
        launchers: u32,
        took: Duration,
    ) -> Self {
        let mut tally = Self {
            seed: options.seed,
            runs: u32::try_from(driven.len()).unwrap_or(u32::MAX),
            outcomes: BTreeMap::new(),
            strikes: BTreeMap::new(),
            kinds: BTreeMap::new(),
            changes_begun: 0,
            lines: 0,
            states: 0,
            launchers,
            found,
            evidence: Vec::new(),
            took,
        };
        for driven in driven {
            *tally.kinds.entry(driven.run.kind.name()).or_default() += 1;
            let strike = driven.run.strike.map_or("in peace", |strike| strike.name());
            *tally.strikes.entry(strike).or_default() += 1;
        }
        for run in &facts.runs {
            tally.states += run.versions.len();
            let tools = run
                .begun
                .iter()
                .filter(|(what, _)| what.starts_with("tool "));
            tally.changes_begun += tools.map(|(_, times)| times).sum::<u32>();
            for job in &run.jobs {
                let ending = job
                    .endings
                    .last()
                    .map_or("none", |ending: &Ending| ending.name());
                *tally.outcomes.entry(ending).or_default() += 1;
                let stored = job.steps.iter().filter_map(|step| step.stored.as_ref());
                tally.lines += stored.map(Vec::len).sum::<usize>();
            }
        }
        tally
    }

    /// Whether everything adds up.
    pub fn balances(&self) -> bool {
        self.found.is_empty()
    }

    /// Whether something about this run does not add up.
    pub(crate) fn concerns(&self, driven: &Driven) -> bool {
        let name = driven.run.to_string();
        self.found.iter().any(|found| found.of.starts_with(&name))
    }

    /// For programs.
    pub fn as_json(&self) -> Value {
        let found = self.found.iter().map(|found| {
            json!({"kind": format!("{:?}", found.kind), "of": found.of, "detail": found.detail})
        });
        json!({
            "seed": self.seed,
            "runs": self.runs,
            "balances": self.balances(),
            "outcomes": self.outcomes,
            "strikes": self.strikes,
            "kinds": self.kinds,
            "changes_begun": self.changes_begun,
            "lines": self.lines,
            "states": self.states,
            "launchers": self.launchers,
            "seconds": self.took.as_secs(),
            "discrepancies": found.collect::<Vec<_>>(),
            "evidence": self.evidence,
        })
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |counts: &BTreeMap<&str, u32>| {
            let each = counts.iter().map(|(name, count)| format!("{count} {name}"));
            each.collect::<Vec<_>>().join(", ")
        };
        writeln!(
            f,
            "seed {}, {} runs, {} s",
            self.seed,
            self.runs,
            self.took.as_secs()
        )?;
        writeln!(f, "runs      {}", list(&self.kinds))?;
        writeln!(f, "strikes   {}", list(&self.strikes))?;
        writeln!(f, "jobs      {}", list(&self.outcomes))?;
        writeln!(
            f,
            "seen      {} applies and destroys begun, {} states, {} lines, {} launchers",
            self.changes_begun, self.states, self.lines, self.launchers
        )?;
        for found in &self.found {
            writeln!(f, "  {found}")?;
        }
        for evidence in &self.evidence {
            writeln!(f, "\n{evidence}")?;
        }
        if self.balances() {
            write!(f, "the books balance")
        } else {
            write!(f, "{} entries do not add up", self.found.len())
        }
    }
}
