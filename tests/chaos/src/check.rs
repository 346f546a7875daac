//! The rules that must hold after the last run. This module is pure: it knows facts and no peers.
//!
//! Facts come from outside the programs under test: the platform's records, a journal that the tool's own processes
//! keep, the versions of the state in the object store, what containers wrote, and what is left of the runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::Value;

/// How a job or a step can end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ending {
    /// It succeeded.
    Completed,
    /// It failed.
    Failed,
    /// A person cancelled it.
    Cancelled,
    /// It did not start.
    NotExecuted,
}

impl Ending {
    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::NotExecuted => "not executed",
        }
    }
}

/// A numbered line of a phase of a run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Line {
    /// The phase that printed it.
    pub phase: String,
    /// Its number in the phase, from 1.
    pub number: u32,
}

impl Line {
    /// A line.
    pub fn new(phase: &str, number: u32) -> Self {
        Self {
            phase: phase.to_owned(),
            number,
        }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{} {}`", self.phase, self.number)
    }
}

/// One step of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Its name on the platform.
    pub name: String,
    /// Whether a dispatch of it was accepted.
    pub accepted: bool,
    /// All its outcomes, in order.
    pub endings: Vec<Ending>,
    /// The lines that it prints if it is not stopped.
    pub script: Vec<Line>,
    /// Whether it prints all lines also if it fails.
    pub prints_all: bool,
    /// The lines that each of its containers printed.
    pub printed: Vec<Vec<Line>>,
    /// The lines of its stored output.
    pub stored: Option<Vec<Line>>,
}

/// A state in the store.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Serial number; each write increases it.
    pub serial: u64,
    /// Id that stays the same for the whole life of a state.
    pub lineage: String,
    /// Names of its resources.
    pub resources: BTreeSet<String>,
    /// All that it says.
    pub content: Value,
}

/// The platform's record of a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Serial number of the state.
    pub serial: u64,
    /// Whether the store has the state that the record describes.
    pub stored: bool,
}

/// A state lock without a process that holds it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lock {
    /// The content of the lock in the store.
    pub info: String,
    /// Whether a stored output contains its id.
    pub reported: bool,
}

/// A state lock that a hub has removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemovedLock {
    /// The content of the lock.
    pub info: String,
    /// Whether the executor had asked for it.
    pub is_asked_for: bool,
    /// Whether the task of the lock was over.
    pub is_over: bool,
}

/// One job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Its name on the platform.
    pub name: String,
    /// All its outcomes, in order.
    pub endings: Vec<Ending>,
    /// The outcomes that it may have if the store works.
    pub permitted: BTreeSet<Ending>,
    /// Its steps, in order.
    pub steps: Vec<Step>,
    /// Whether a completed job must have published a state.
    pub publishes: bool,
    /// The states that it published.
    pub published: Vec<Published>,
}

/// One run of the schedule: a workspace and its jobs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// Its name in the schedule.
    pub name: String,
    /// Whether the scheduled fault happened.
    pub fault_happened: bool,
    /// Its jobs, in order.
    pub jobs: Vec<Job>,
    /// How often each changing operation of the tool, and each script, began.
    pub begun: BTreeMap<String, u32>,
    /// Every version of the workspace's state, oldest first. `None` for a version that cannot be read, and for a deletion.
    pub versions: Vec<Option<State>>,
    /// Resources that exist, whatever a state says. What a killed tool has made does not count.
    pub exists: BTreeSet<String>,
    /// Resources in states that the store keeps beside the state, and that an output of the run names.
    pub kept: BTreeSet<String>,
    /// Whether a tool of the run was killed.
    pub tool_was_killed: bool,
    /// Serial numbers of the states that the platform has on record, in their order.
    pub recorded: Vec<u64>,
    /// The lock that is left on the state although no tool was killed.
    pub left_lock: Option<Lock>,
    /// The locks of the state that a hub has removed.
    pub removed_locks: Vec<RemovedLock>,
    /// Answers that accepted requests which the launcher must refuse.
    pub accepted_bad: Vec<String>,
    /// Connections of the run to the store that an outage broke.
    pub broken_connections: usize,
}

/// Outages of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreOutages {
    /// How many there were.
    pub count: usize,
    /// The connections that they broke.
    pub broken: usize,
    /// Those of them whose run is not known.
    pub of_unknown_runs: usize,
}

/// All facts about a journey.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// The runs.
    pub runs: Vec<Run>,
    /// Outages of the store.
    pub store: StoreOutages,
    /// What is left of the runs: objects, as kind and name, processes, folders and tasks.
    pub left: Vec<String>,
    /// Requests that the API server refused because a right was missing.
    pub denied: Vec<String>,
    /// Broken rules of the platform's contract.
    pub broken: Vec<String>,
}

/// A kind of violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The scheduled fault did not happen, so the run proves nothing.
    FaultMissed,
    /// An accepted run has no outcome.
    NoOutcome,
    /// An accepted run has more than one outcome.
    SecondOutcome,
    /// A run has an outcome without an explanation.
    WrongOutcome,
    /// Something that changes infrastructure ran twice.
    RanTwice,
    /// A run completed, but its tool never ran.
    NeverRan,
    /// Something exists that no state has, or a state has what does not exist.
    StateMissing,
    /// A state was replaced by another one, or deleted.
    StateLost,
    /// An older state took the place of a newer one, in the store or on record.
    OlderPublished,
    /// The platform has no record of a state, or the store lacks a recorded state.
    NotPublished,
    /// The platform has more than one record of a state.
    RecordedTwice,
    /// A state lock is left without a reason, or no output contains its id.
    Locked,
    /// The lock of a living run was removed.
    LockRemoved,
    /// The stored output lacks a line.
    LineMissing,
    /// The stored output has a line twice or in the wrong order.
    LineMisplaced,
    /// Something of a run is left: an object, a process, a folder or a task.
    Leftover,
    /// The launcher accepted a request that it must refuse.
    BadAccepted,
    /// A right was missing.
    Denied,
    /// The platform's contract was broken.
    RuleBroken,
    /// The outages of the store cannot be the cause of so many failures.
    TooManyExcused,
}

/// One violation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The broken rule.
    pub kind: Kind,
    /// The run, job and step, or the object.
    pub of: String,
    /// The wrong fact.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}: {}", self.kind, self.of, self.detail)
    }
}

/// What the check of a journey has found.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Every violation.
    pub violations: Vec<Violation>,
    /// Runs with a failure that is no violation, because an outage broke their connections to the store.
    pub excused: BTreeSet<String>,
    /// How often a state was written again as it was.
    pub rewritten: usize,
}

/// Runs that an outage of the store may fail, on average. It breaks the connections of that moment and the next few. Clients
/// retry, so that most of these runs succeed.
const EXCUSED_BY_AN_OUTAGE: usize = 1;

/// Checks all rules.
pub fn check(facts: &Facts) -> Findings {
    let mut found = Findings::default();
    for run in &facts.runs {
        found.run(run);
    }
    let (excused, outages) = (found.excused.len(), facts.store.count);
    if excused > outages * EXCUSED_BY_AN_OUTAGE {
        let detail = format!("{excused} runs are excused with {outages} outages of the store");
        found.add(Kind::TooManyExcused, "the whole journey", detail);
    }
    for (kind, all) in [
        (Kind::Leftover, &facts.left),
        (Kind::Denied, &facts.denied),
        (Kind::RuleBroken, &facts.broken),
    ] {
        for one in all {
            found.add(kind, "the whole journey", one.clone());
        }
    }
    found
}

impl Findings {
    fn add(&mut self, kind: Kind, of: &str, detail: impl Into<String>) {
        self.violations.push(Violation {
            kind,
            of: of.to_owned(),
            detail: detail.into(),
        });
    }

    /// Excuses a failure of a run, if an outage of the store can be its cause.
    fn is_excused(&mut self, run: &Run) -> bool {
        let may_be = run.broken_connections > 0;
        if may_be {
            self.excused.insert(run.name.clone());
        }
        may_be
    }

    fn run(&mut self, run: &Run) {
        let last = run.jobs.last().and_then(|job| job.endings.last());
        let failed = last == Some(&Ending::Failed);
        // It may have failed before the point of its fault.
        if !(run.fault_happened || failed && self.is_excused(run)) {
            self.add(
                Kind::FaultMissed,
                &run.name,
                "the scheduled fault did not happen",
            );
        }
        for job in &run.jobs {
            self.job(&format!("{}: {}", run.name, job.name), run, job);
        }
        for (what, times) in &run.begun {
            if *times > 1 {
                self.add(
                    Kind::RanTwice,
                    &run.name,
                    format!("{what} began {times} times"),
                );
            }
        }
        let done = run
            .jobs
            .iter()
            .filter(|job| job.publishes && job.endings.first() == Some(&Ending::Completed));
        let tools = run
            .begun
            .iter()
            .filter(|(what, _)| what.starts_with("tool "));
        let begun: u32 = tools.map(|(_, times)| times).sum();
        if u32::try_from(done.count()).unwrap_or(u32::MAX) > begun {
            self.add(Kind::NeverRan, &run.name, "it completed, but no tool ran");
        }
        self.state(run);
        if let Some(lock) = &run.left_lock
            && !(lock.reported && self.is_excused(run))
        {
            self.add(Kind::Locked, &run.name, lock.info.clone());
        }
        for lock in &run.removed_locks {
            if !(lock.is_asked_for || lock.is_over) {
                self.add(Kind::LockRemoved, &run.name, lock.info.clone());
            }
        }
        for answer in &run.accepted_bad {
            self.add(Kind::BadAccepted, &run.name, answer.clone());
        }
    }

    fn job(&mut self, of: &str, run: &Run, job: &Job) {
        self.outcome(of, &job.endings);
        if let Some(ending) = job.endings.last()
            && !job.permitted.contains(ending)
            && !(*ending == Ending::Failed && self.is_excused(run))
        {
            let expected: Vec<_> = job.permitted.iter().map(|ending| ending.name()).collect();
            let detail = format!("{}, not {}", ending.name(), expected.join(" or "));
            self.add(Kind::WrongOutcome, of, detail);
        }
        for step in &job.steps {
            let of = format!("{of}: {}", step.name);
            if step.accepted || !step.endings.is_empty() {
                self.outcome(&of, &step.endings);
            }
            self.lines(&of, run, step);
        }
        self.publications(of, job);
    }

    fn outcome(&mut self, of: &str, endings: &[Ending]) {
        match endings {
            [] => self.add(Kind::NoOutcome, of, "it has no outcome"),
            [_] => {}
            all => {
                let all: Vec<_> = all.iter().map(|ending| ending.name()).collect();
                self.add(Kind::SecondOutcome, of, all.join(", then "));
            }
        }
    }

    fn publications(&mut self, of: &str, job: &Job) {
        let completed = job.endings.last() == Some(&Ending::Completed);
        let serials: BTreeSet<u64> = job.published.iter().map(|one| one.serial).collect();
        if job.publishes && completed && serials.len() != 1 {
            let detail = format!("{} states are recorded", serials.len());
            self.add(Kind::NotPublished, of, detail);
        }
        if job.published.len() > serials.len() {
            let detail = format!(
                "{} records of {} states",
                job.published.len(),
                serials.len()
            );
            self.add(Kind::RecordedTwice, of, detail);
        }
        for published in job.published.iter().filter(|published| !published.stored) {
            let detail = format!("the store does not have the state {}", published.serial);
            self.add(Kind::NotPublished, of, detail);
        }
    }

    fn lines(&mut self, of: &str, run: &Run, step: &Step) {
        let none = Vec::new();
        let stored = step.stored.as_ref().unwrap_or(&none);
        let mut seen = BTreeSet::new();
        let mut last = None;
        for line in stored {
            let place = step.script.iter().position(|other| other == line);
            if !seen.insert(line) {
                self.add(Kind::LineMisplaced, of, format!("{line} appears twice"));
            } else if place.is_none() || place < last {
                self.add(Kind::LineMisplaced, of, format!("{line} is out of order"));
            }
            last = place.max(last);
        }
        let lacks = |due: &[Line]| due.iter().any(|line| !seen.contains(line));
        let whole = match step.endings.last() {
            Some(Ending::Completed) => true,
            // Without the store, its tool may have failed before it printed them.
            Some(Ending::Failed) => {
                step.prints_all && !(lacks(&step.script) && self.is_excused(run))
            }
            _ => false,
        };
        let due = if whole { &step.script } else { &none };
        let due = due.iter().chain(step.printed.iter().flatten());
        let missing: BTreeSet<_> = due.filter(|line| !seen.contains(line)).collect();
        if let (Some(first), Some(last)) = (missing.first(), missing.last()) {
            let detail = match &step.stored {
                None => "there is no output".to_owned(),
                Some(_) => format!("{} lines, {first} to {last}", missing.len()),
            };
            self.add(Kind::LineMissing, of, detail);
        }
    }

    fn state(&mut self, run: &Run) {
        let mut before: Option<&State> = None;
        for version in &run.versions {
            match (before, version) {
                (_, None) => self.add(
                    Kind::StateLost,
                    &run.name,
                    "it was deleted or cannot be read",
                ),
                (Some(old), Some(new)) if new.lineage != old.lineage => {
                    self.add(Kind::StateLost, &run.name, "it was replaced by another one");
                }
                (Some(old), Some(new)) if new.serial < old.serial => {
                    let detail = format!("{} was replaced by {}", old.serial, new.serial);
                    self.add(Kind::OlderPublished, &run.name, detail);
                }
                (Some(old), Some(new)) if new.serial == old.serial => {
                    if new.content == old.content {
                        self.rewritten += 1;
                    } else {
                        let detail = format!("{} was replaced by another {0}", old.serial);
                        self.add(Kind::StateLost, &run.name, detail);
                    }
                }
                _ => {}
            }
            before = version.as_ref().or(before);
        }
        self.resources(run, before);
        self.records(run, before);
    }

    /// Compares what exists with what the last state has.
    fn resources(&mut self, run: &Run, last: Option<&State>) {
        let none = BTreeSet::new();
        let in_state = last.map_or(&none, |state| &state.resources);
        for resource in run.exists.difference(in_state) {
            if !run.kept.contains(resource) {
                let detail = format!("`{resource}` exists but is in no state");
                self.add(Kind::StateMissing, &run.name, detail);
            }
        }
        if run.tool_was_killed {
            return;
        }
        for resource in in_state.difference(&run.exists) {
            let detail = format!("`{resource}` is in the state but does not exist");
            self.add(Kind::StateMissing, &run.name, detail);
        }
    }

    /// Compares the states on record with each other, and with the last one in the store.
    fn records(&mut self, run: &Run, last: Option<&State>) {
        let job = run.jobs.last();
        let is_done =
            job.is_some_and(|job| job.publishes && job.endings.last() == Some(&Ending::Completed));
        let mut newest = 0;
        for serial in &run.recorded {
            if *serial < newest {
                let detail = format!("{serial} is on record after {newest}");
                self.add(Kind::OlderPublished, &run.name, detail);
            }
            newest = newest.max(*serial);
        }
        // A completed run has published what it has stored last. One without a record is found elsewhere.
        let is_compared = is_done && !run.recorded.is_empty();
        let last = last.map(|state| state.serial);
        if let Some(last) = last.filter(|last| is_compared && newest < *last) {
            let detail = format!("{newest} is on record, and {last} is stored");
            self.add(Kind::OlderPublished, &run.name, detail);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lines(phase: &str, count: u32) -> Vec<Line> {
        (1..=count).map(|number| Line::new(phase, number)).collect()
    }

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn state(serial: u64) -> State {
        State {
            serial,
            lineage: "one".to_owned(),
            resources: names(&["first", "second"]),
            content: json!({"serial": serial}),
        }
    }

    /// Facts without a violation: one completed apply.
    fn good() -> Facts {
        let step = Step {
            name: "apply".to_owned(),
            accepted: true,
            endings: vec![Ending::Completed],
            script: lines("first", 3),
            prints_all: true,
            printed: vec![lines("first", 3)],
            stored: Some(lines("first", 3)),
        };
        let job = Job {
            name: "job 1".to_owned(),
            endings: vec![Ending::Completed],
            permitted: [Ending::Completed].into(),
            steps: vec![step],
            publishes: true,
            published: vec![Published {
                serial: 2,
                stored: true,
            }],
        };
        let run = Run {
            name: "run 1".to_owned(),
            fault_happened: true,
            jobs: vec![job],
            begun: [("tool apply", 1), ("begin first", 1)]
                .map(|(what, times)| (what.to_owned(), times))
                .into(),
            versions: vec![Some(state(1)), Some(state(2))],
            exists: names(&["first", "second"]),
            recorded: vec![2],
            ..Run::default()
        };
        Facts {
            runs: vec![run],
            ..Facts::default()
        }
    }

    /// The violations in correct facts with one mistake.
    fn found(change: impl FnOnce(&mut Facts)) -> Vec<Kind> {
        let mut facts = good();
        change(&mut facts);
        kinds(&check(&facts))
    }

    fn kinds(found: &Findings) -> Vec<Kind> {
        found.violations.iter().map(|one| one.kind).collect()
    }

    fn with_run(change: impl FnOnce(&mut Run)) -> Vec<Kind> {
        found(|facts| change(&mut facts.runs[0]))
    }

    fn with_job(change: impl FnOnce(&mut Job)) -> Vec<Kind> {
        with_run(|run| change(&mut run.jobs[0]))
    }

    fn with_step(change: impl FnOnce(&mut Step)) -> Vec<Kind> {
        with_job(|job| change(&mut job.steps[0]))
    }

    #[test]
    fn correct_facts_have_no_violation() {
        assert_eq!(found(|_| {}), []);
    }

    #[test]
    fn a_fault_that_did_not_happen_proves_nothing() {
        assert_eq!(
            with_run(|run| run.fault_happened = false),
            [Kind::FaultMissed]
        );
    }

    #[test]
    fn an_accepted_run_without_an_outcome_is_found() {
        assert_eq!(with_step(|step| step.endings.clear()), [Kind::NoOutcome]);
        let none = with_job(|job| job.endings.clear());
        assert!(none.contains(&Kind::NoOutcome), "{none:?}");
        // A step that was never dispatched needs no outcome.
        let not_sent = with_step(|step| {
            step.endings.clear();
            step.accepted = false;
        });
        assert_eq!(not_sent, []);
    }

    #[test]
    fn a_second_outcome_is_found() {
        let second = with_step(|step| step.endings.push(Ending::Failed));
        assert_eq!(second, [Kind::SecondOutcome]);
        let second = with_job(|job| job.endings.insert(0, Ending::Failed));
        assert_eq!(second, [Kind::SecondOutcome]);
    }

    #[test]
    fn an_outcome_that_nothing_explains_is_found() {
        let wrong = with_job(|job| job.endings = vec![Ending::Failed]);
        assert_eq!(wrong, [Kind::WrongOutcome]);
        let may = with_job(|job| {
            job.endings = vec![Ending::Failed];
            job.permitted.insert(Ending::Failed);
        });
        assert_eq!(may, []);
    }

    #[test]
    fn a_second_apply_is_found_and_a_completed_one_that_never_was() {
        let twice = with_run(|run| {
            run.begun.insert("tool apply".to_owned(), 2);
        });
        assert_eq!(twice, [Kind::RanTwice]);
        // Its scripts ran, but not the tool.
        let never = with_run(|run| {
            run.begun.remove("tool apply");
        });
        assert_eq!(never, [Kind::NeverRan]);
    }

    #[test]
    fn a_state_that_lacks_what_was_made_is_found() {
        let lacks = with_run(|run| run.versions = vec![None]);
        let expected = [Kind::StateLost, Kind::StateMissing, Kind::StateMissing];
        assert_eq!(lacks, expected);
        let lacks = with_run(|run| run.versions.clear());
        assert_eq!(lacks, [Kind::StateMissing, Kind::StateMissing]);
    }

    #[test]
    fn what_exists_is_compared_with_what_the_states_have() {
        let gone = |killed| {
            with_run(move |run| {
                run.exists = names(&["second"]);
                run.tool_was_killed = killed;
            })
        };
        assert_eq!(gone(false), [Kind::StateMissing]);
        assert_eq!(gone(true), []);
        let more = |kept: &[&str]| {
            let kept = names(kept);
            with_run(move |run| {
                run.exists.insert("third".to_owned());
                run.kept = kept;
            })
        };
        assert_eq!(more(&[]), [Kind::StateMissing]);
        assert_eq!(more(&["third"]), []);
    }

    #[test]
    fn a_record_of_an_older_state_is_found() {
        let recorded = |serials: &'static [u64]| {
            with_run(move |run| {
                run.recorded = serials.to_vec();
            })
        };
        assert_eq!(recorded(&[1, 2]), []);
        assert_eq!(recorded(&[2, 1]), [Kind::OlderPublished]);
        assert_eq!(recorded(&[1]), [Kind::OlderPublished]);
    }

    #[test]
    fn a_lock_is_removed_if_its_run_asks_for_it_or_is_over() {
        let removed = |is_asked_for, is_over| {
            let info = "07ce11eb".to_owned();
            with_run(move |run| {
                run.removed_locks = vec![RemovedLock {
                    info,
                    is_asked_for,
                    is_over,
                }];
            })
        };
        assert_eq!(removed(false, false), [Kind::LockRemoved]);
        assert_eq!(removed(true, false), []);
        assert_eq!(removed(false, true), []);
    }

    #[test]
    fn a_state_replaced_by_an_older_or_another_one_is_found() {
        let older = with_run(|run| run.versions.push(Some(state(1))));
        assert_eq!(older, [Kind::OlderPublished]);
        let another = with_run(|run| {
            let other = State {
                lineage: "other".to_owned(),
                ..state(2)
            };
            run.versions.push(Some(other));
        });
        assert_eq!(another, [Kind::StateLost]);
        let deleted = with_run(|run| run.versions.push(None));
        assert_eq!(deleted, [Kind::StateLost]);
    }

    #[test]
    fn a_state_replaced_by_another_one_of_its_serial_is_found_and_the_same_one_is_counted() {
        let other = with_run(|run| {
            let content = json!({"serial": 2, "check_results": []});
            run.versions.push(Some(State {
                content,
                ..state(2)
            }));
        });
        assert_eq!(other, [Kind::StateLost]);
        let mut facts = good();
        facts.runs[0].versions.push(Some(state(2)));
        let found = check(&facts);
        assert_eq!((kinds(&found), found.rewritten), (vec![], 1));
    }

    #[test]
    fn a_state_that_is_not_on_record_or_not_in_the_store_is_found() {
        let none = with_job(|job| job.published.clear());
        assert_eq!(none, [Kind::NotPublished]);
        let again = |serial| {
            move |job: &mut Job| {
                let stored = true;
                job.published.push(Published { serial, stored });
            }
        };
        assert_eq!(with_job(again(3)), [Kind::NotPublished]);
        assert_eq!(with_job(again(2)), [Kind::RecordedTwice]);
        let gone = with_job(|job| job.published[0].stored = false);
        assert_eq!(gone, [Kind::NotPublished]);
    }

    #[test]
    fn a_lock_left_without_a_reason_or_a_message_is_found() {
        let left = |reported, broken_connections| {
            let info = "07ce11eb".to_owned();
            found(move |facts| {
                facts.store.count = 1;
                facts.runs[0].broken_connections = broken_connections;
                facts.runs[0].left_lock = Some(Lock { info, reported });
            })
        };
        assert_eq!(left(false, 0), [Kind::Locked]);
        assert_eq!(left(false, 1), [Kind::Locked]);
        assert_eq!(left(true, 0), [Kind::Locked]);
        assert_eq!(left(true, 1), []);
    }

    /// A run that failed, and that an outage of the store may have failed.
    fn failed(run: &mut Run, broken_connections: usize) {
        run.broken_connections = broken_connections;
        run.jobs[0].endings = vec![Ending::Failed];
    }

    #[test]
    fn only_a_run_with_a_broken_connection_is_excused_and_only_what_it_can_cause() {
        let with = |change: fn(&mut Run)| {
            let mut facts = good();
            facts.store.count = 1;
            change(&mut facts.runs[0]);
            let found = check(&facts);
            (kinds(&found), found.excused.len())
        };
        assert_eq!(with(|run| failed(run, 0)), (vec![Kind::WrongOutcome], 0));
        assert_eq!(with(|run| failed(run, 1)), (vec![], 1));
        let fault = |run: &mut Run| {
            failed(run, 1);
            run.fault_happened = false;
        };
        assert_eq!(with(fault), (vec![], 1));
        // Its fault did not happen, and it did not fail either.
        let fault = |run: &mut Run| {
            run.broken_connections = 1;
            run.fault_happened = false;
        };
        assert_eq!(with(fault), (vec![Kind::FaultMissed], 0));
        let cancelled = |run: &mut Run| {
            run.broken_connections = 1;
            run.jobs[0].endings = vec![Ending::Cancelled];
        };
        assert_eq!(with(cancelled), (vec![Kind::WrongOutcome], 0));
        let lost = |run: &mut Run| {
            failed(run, 1);
            run.versions.clear();
        };
        assert_eq!(with(lost), (vec![Kind::StateMissing; 2], 1));
        // Nothing needs an excuse.
        assert_eq!(with(|run| run.broken_connections = 1), (vec![], 0));
    }

    #[test]
    fn a_failed_apply_owes_all_its_lines_unless_an_outage_failed_it_before() {
        let short = |broken_connections| {
            found(|facts| {
                facts.store.count = 1;
                let run = &mut facts.runs[0];
                run.broken_connections = broken_connections;
                run.jobs[0].endings = vec![Ending::Failed];
                run.jobs[0].permitted = [Ending::Failed].into();
                let step = &mut run.jobs[0].steps[0];
                step.endings = vec![Ending::Failed];
                step.printed = vec![lines("first", 1)];
                step.stored = Some(lines("first", 1));
            })
        };
        assert_eq!(short(0), [Kind::LineMissing]);
        assert_eq!(short(1), []);
    }

    #[test]
    fn outages_do_not_excuse_everything() {
        let excused = |runs: u32, outages| {
            let mut facts = good();
            facts.store.count = outages;
            let run = |number| {
                let mut run = facts.runs[0].clone();
                run.name = format!("run {number}");
                failed(&mut run, 1);
                run
            };
            facts.runs = (0..runs).map(run).collect();
            kinds(&check(&facts))
        };
        assert_eq!(excused(2, 2), []);
        assert_eq!(excused(3, 2), [Kind::TooManyExcused]);
        assert_eq!(excused(1, 0), [Kind::TooManyExcused]);
    }

    #[test]
    fn a_line_that_is_missing_at_any_place_is_found() {
        for at in 0..3 {
            let missing = with_step(|step| {
                step.stored.as_mut().unwrap().remove(at);
            });
            assert_eq!(missing, [Kind::LineMissing], "{at}");
        }
        assert_eq!(with_step(|step| step.stored = None), [Kind::LineMissing]);
        // No container printed the line. A completed step must have it all the same.
        let never = with_step(|step| {
            step.printed.clear();
            step.stored.as_mut().unwrap().pop();
        });
        assert_eq!(never, [Kind::LineMissing]);
    }

    #[test]
    fn a_killed_run_owes_the_lines_it_printed_and_no_others() {
        let killed = |stored: u32| {
            with_job(|job| {
                job.endings = vec![Ending::Failed];
                job.permitted = [Ending::Failed].into();
                job.steps[0].endings = vec![Ending::Failed];
                job.steps[0].prints_all = false;
                job.steps[0].printed = vec![lines("first", 2)];
                job.steps[0].stored = Some(lines("first", stored));
            })
        };
        assert_eq!(killed(1), [Kind::LineMissing]);
        assert_eq!(killed(2), []);
        assert_eq!(
            killed(3),
            [],
            "more was rescued than the container had written"
        );
    }

    #[test]
    fn a_line_that_is_there_twice_or_too_early_or_unheard_of_is_found() {
        let twice = with_step(|step| step.stored.as_mut().unwrap().push(Line::new("first", 3)));
        assert_eq!(twice, [Kind::LineMisplaced]);
        let swapped = with_step(|step| step.stored.as_mut().unwrap().swap(0, 1));
        assert_eq!(swapped, [Kind::LineMisplaced]);
        let foreign = with_step(|step| step.stored.as_mut().unwrap().push(Line::new("x", 1)));
        assert_eq!(foreign, [Kind::LineMisplaced]);
    }

    #[test]
    fn what_is_left_denied_let_in_or_broken_is_found() {
        let one = || vec!["Secret job-1".to_owned()];
        assert_eq!(found(|facts| facts.left = one()), [Kind::Leftover]);
        assert_eq!(found(|facts| facts.denied = one()), [Kind::Denied]);
        assert_eq!(found(|facts| facts.broken = one()), [Kind::RuleBroken]);
        assert_eq!(
            with_run(|run| run.accepted_bad = one()),
            [Kind::BadAccepted]
        );
    }
}
