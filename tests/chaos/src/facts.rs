//! Reads the facts from the peers. No fact comes from the programs under test.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::Result;
use job_contract::encoding::hex;
use job_contract::keys::ObjectKey;
use md5::{Digest as _, Md5};
use serde_json::Value;
use test_peers::terraform;
use test_platform::{History, Records, Status};

use crate::check::{Ending, Facts, Job, Line, Lock, Published, Run, State, Step, StoreOutages};
use crate::journey::FinishedRun;
use crate::peers::{LINES, Peers};
use crate::schedule::Kind;

/// Writes step outputs and container logs into a folder, for analysis.
pub(crate) fn dump(peers: &Peers, folder: &Path) -> Result<()> {
    let records = peers.platform.records();
    for job in records.jobs.values() {
        for step in &job.steps {
            if let Some(text) = output(peers, &records, job.id, &step.id)? {
                let name = format!("job-{}-{}.output", job.id, step.flow.kind);
                fs::write(folder.join(name), text)?;
            }
        }
    }
    for (number, log) in peers.side.logs()?.into_iter().enumerate() {
        fs::write(folder.join(format!("container-{number}.log")), log)?;
    }
    fs::write(folder.join("platform"), peers.platform.report())?;
    Ok(())
}

/// The evidence of a run with a violation: step outputs, and what its side knows of it.
pub(crate) fn evidence(peers: &Peers, finished: &FinishedRun) -> Result<String> {
    let records = peers.platform.records();
    let broken = broken_connections(peers, finished, &records);
    let mut text = format!(
        "{}, {broken} broken connections to the store, Redis lost its data: {}\n",
        finished.run, finished.redis_lost_data
    );
    for id in &finished.jobs {
        text.push_str(&peers.side.evidence(*id)?);
        for step in &records.job(*id).steps {
            let title = format!("output of job {id}, {}: {}", step.flow.kind, step.status);
            let stored = output(peers, &records, *id, &step.id)?;
            let stored = stored.as_deref().unwrap_or("(none is stored)");
            // Writing to a string does not fail.
            let _ = writeln!(text, "--- {title}\n{}", stored.trim_end());
        }
    }
    Ok(text)
}

/// The lines of all programs' logs that contain one of these texts.
pub(crate) fn lines_with(folder: &Path, texts: &[String]) -> Result<String> {
    let mut lines = String::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "log") {
            let log = fs::read(path)?;
            let log = String::from_utf8_lossy(&log);
            for line in log.lines() {
                if texts.iter().any(|text| line.contains(text)) {
                    lines.push_str(line);
                    lines.push('\n');
                }
            }
        }
    }
    Ok(lines)
}

/// Collects the facts about these runs. The objects that are left in the cluster are added later.
pub(crate) async fn collect(peers: &Peers, finished: &[FinishedRun]) -> Result<Facts> {
    peers.platform.look_back().await;
    let records = peers.platform.records();
    let printed = printed(peers)?;
    let denied: BTreeSet<String> = peers.side.denied().into_iter().collect();
    let violations = peers.platform.ledger().violations;
    let mut runs = Vec::new();
    for finished in finished {
        runs.push(run(peers, finished, &records, &printed)?);
    }
    let broken = peers.store_proxy.broken().len();
    let known: usize = runs.iter().map(|run| run.broken_connections).sum();
    let store = StoreOutages {
        count: peers.store_outages.load(Ordering::SeqCst),
        broken,
        of_unknown_runs: broken.saturating_sub(known),
    };
    Ok(Facts {
        runs,
        left: Vec::new(),
        store,
        denied: denied.into_iter().collect(),
        broken: violations.iter().map(ToString::to_string).collect(),
    })
}

/// How many connections of a run to the store were broken.
fn broken_connections(peers: &Peers, finished: &FinishedRun, records: &Records) -> usize {
    let broken = peers.store_proxy.broken();
    let is_its = |sent: &&String| finished.has_sent(sent, &records.organization);
    broken.iter().filter(is_its).count()
}

/// Lines of every container, by run.
type Printed = BTreeMap<u32, Vec<Vec<Line>>>;

fn printed(peers: &Peers) -> Result<Printed> {
    let mut printed = Printed::new();
    for log in peers.side.logs()? {
        let mut of_container = BTreeMap::<u32, Vec<Line>>::new();
        for (run, line) in marks(&log) {
            of_container.entry(run).or_default().push(line);
        }
        for (run, lines) in of_container {
            printed.entry(run).or_default().push(lines);
        }
    }
    Ok(printed)
}

/// The numbered lines in a text, with their runs. The tool may cut lines of provisioners, so cut lines are joined. A line that
/// lost a byte, or that something else has cut, does not count. A failed tool repeats the output of its provisioner; repeated
/// lines do not count twice.
pub(crate) fn marks(text: &str) -> Vec<(u32, Line)> {
    let mark = |line: &str| {
        let (before, rest) = line.rsplit_once("mark/")?;
        let mut words = rest.strip_suffix(';')?.split('/');
        let run = words.next()?.parse().ok()?;
        let phase = words.next()?.to_owned();
        let number = words.next()?.parse().ok()?;
        let is_first_hand = match phase.as_str() {
            "plan" | "script" => before.is_empty(),
            _ => before.ends_with("(local-exec): "),
        };
        let whole = is_first_hand && words.next().is_none();
        whole.then_some((run, Line { phase, number }))
    };
    let is_whole = |line: &str| line.starts_with("mark/") && line.ends_with(';');
    let text = terraform::whole(text, is_whole);
    text.lines().filter_map(mark).collect()
}

fn state_key(organization: &str, workspace: &str) -> String {
    format!("tfstate/{organization}/{workspace}/terraform.tfstate")
}

/// The key of the lock of a workspace's state.
pub(crate) fn lock_key(organization: &str, workspace: &str) -> String {
    format!("{}.tflock", state_key(organization, workspace))
}

/// The lock of a run's state that is in the store.
pub(crate) fn left_lock(
    peers: &Peers,
    finished: &FinishedRun,
    organization: &str,
) -> Result<Option<String>> {
    let key = lock_key(organization, &finished.workspace);
    Ok(peers.store.object(&key)?)
}

fn run(peers: &Peers, finished: &FinishedRun, records: &Records, printed: &Printed) -> Result<Run> {
    let number = finished.run.number;
    let journal = peers.journal(number);
    let mut run = Run {
        name: finished.run.to_string(),
        fault_happened: finished.fault_happened,
        begun: begun(&journal),
        accepted_bad: finished.accepted_bad.clone(),
        broken_connections: broken_connections(peers, finished, records),
        ..Run::default()
    };
    if finished.run.kind == Kind::BadData {
        return Ok(run);
    }
    let key = state_key(&records.organization, &finished.workspace);
    let (versions, deletions) = peers.store.versions(&key)?;
    run.versions = versions.iter().map(|version| state(version)).collect();
    run.versions.extend((0..deletions).map(|_| None));
    let of_container = printed.get(&number).cloned().unwrap_or_default();
    for id in &finished.jobs {
        run.jobs
            .push(job(peers, finished, *id, records, &of_container)?);
    }
    let mut jobs = finished.jobs.iter();
    run.tool_was_killed = jobs.any(|job| finished.tool_was_killed(*job));
    // No state has what a killed tool has made. What it was to destroy, an earlier tool has made.
    if !run.tool_was_killed || finished.run.kind == Kind::Destroy {
        run.exists = peers.existing(number);
    }
    run.kept = kept(peers, finished, records)?;
    run.recorded = recorded(finished, records);
    run.removed_locks = peers.side.removed_locks(&finished.workspace);
    if !run.tool_was_killed
        && let Some(lock) = left_lock(peers, finished, &records.organization)?
    {
        let lock: Value = serde_json::from_str(&lock).unwrap_or_default();
        let id = lock["ID"].as_str().unwrap_or_default();
        let mut reported = false;
        for output in outputs(peers, finished, records)? {
            reported |= !id.is_empty() && output.contains(id);
        }
        run.left_lock = Some(Lock {
            info: lock.to_string(),
            reported,
        });
    }
    Ok(run)
}

/// The serial numbers on record for the workspace of a run, in their order.
fn recorded(finished: &FinishedRun, records: &Records) -> Vec<u64> {
    let histories = records.histories.iter();
    let histories = histories.filter(|history| history.workspace == finished.workspace);
    histories.map(serial).collect()
}

fn serial(history: &History) -> u64 {
    u64::try_from(history.serial).unwrap_or_default()
}

/// Resources in the states that the store keeps beside the state, and that an output of the run names.
fn kept(peers: &Peers, finished: &FinishedRun, records: &Records) -> Result<BTreeSet<String>> {
    let outputs = outputs(peers, finished, records)?;
    let mut kept = BTreeSet::new();
    for id in &finished.jobs {
        for step in &records.job(*id).steps {
            let (organization, workspace) = (&records.organization, &finished.workspace);
            let key = ObjectKey::errored_state(organization, workspace, &id.to_string(), &step.id);
            let key = key.in_bucket();
            let is_named = outputs.iter().any(|output| output.contains(&key));
            let found = peers.store.object(&key)?.filter(|_| is_named);
            let state = found.and_then(|text| state(&text));
            kept.extend(state.into_iter().flat_map(|state| state.resources));
        }
    }
    Ok(kept)
}

/// Stored outputs of a run.
fn outputs(peers: &Peers, finished: &FinishedRun, records: &Records) -> Result<Vec<String>> {
    let mut outputs = Vec::new();
    for job in &finished.jobs {
        for step in &records.job(*job).steps {
            outputs.extend(output(peers, records, *job, &step.id)?);
        }
    }
    Ok(outputs)
}

fn output(peers: &Peers, records: &Records, job: u32, step: &str) -> Result<Option<String>> {
    let organization = &records.organization;
    let key = format!("tfoutput/{organization}/{job}/{step}.tfoutput");
    Ok(peers.store.object(&key)?)
}

/// How often each changing operation of the tool, and each script, began. The keys are lines of the journal.
fn begun(journal: &[String]) -> BTreeMap<String, u32> {
    let mut begun = BTreeMap::new();
    for line in journal {
        let counts = line.starts_with("tool ") || line.starts_with("begin ");
        if counts && line != "begin plan" {
            *begun.entry(line.clone()).or_default() += 1;
        }
    }
    begun
}

fn state(text: &str) -> Option<State> {
    let content: Value = serde_json::from_str(text).ok()?;
    let resources = content["resources"].as_array()?;
    Some(State {
        serial: content["serial"].as_u64()?,
        lineage: content["lineage"].as_str()?.to_owned(),
        resources: resources
            .iter()
            .filter_map(|resource| resource["name"].as_str().map(str::to_owned))
            .collect(),
        content,
    })
}

fn job(
    peers: &Peers,
    finished: &FinishedRun,
    id: u32,
    records: &Records,
    of_container: &[Vec<Line>],
) -> Result<Job> {
    let record = records.job(id);
    let mut steps = Vec::new();
    for step in &record.steps {
        let stored = output(peers, records, id, &step.id)?;
        let script = script(finished.run.kind, &step.flow.kind);
        let printed: Vec<Vec<Line>> = of_container
            .iter()
            .map(|lines| {
                let ours = lines.iter().filter(|line| script.contains(line));
                ours.cloned().collect()
            })
            .filter(|lines: &Vec<Line>| !lines.is_empty() && !finished.log_is_lost(id))
            .collect();
        let accepted = records
            .transitions
            .iter()
            .any(|change| change.job == id && change.to == Status::Queue)
            && (record.dispatched.as_ref() == Some(&step.id) || stored.is_some());
        steps.push(Step {
            name: step.flow.kind.clone(),
            accepted,
            endings: endings(records, id, Some(step.flow.number)),
            prints_all: finished.prints_all_lines_if_it_fails(),
            script,
            printed,
            stored: stored.map(|text| {
                let marks = marks(&text).into_iter().map(|(_, line)| line);
                let mut lines: Vec<Line> = marks.collect();
                if finished.log_is_stored_twice(id) {
                    let mut seen = BTreeSet::new();
                    lines.retain(|line| seen.insert(line.clone()));
                }
                lines
            }),
        });
    }
    let mut published = Vec::new();
    let histories = records.histories.iter();
    for history in histories.filter(|history| history.job_reference == id.to_string()) {
        published.push(publication(peers, &records.organization, history)?);
    }
    Ok(Job {
        name: format!("job {id}"),
        endings: endings(records, id, None),
        permitted: finished.permitted(id),
        steps,
        publishes: !matches!(finished.run.kind, Kind::Scripts | Kind::FailingPlan),
        published,
    })
}

fn endings(records: &Records, job: u32, step: Option<u32>) -> Vec<Ending> {
    let changes = records.transitions.iter();
    let of_it = changes.filter(|change| change.job == job && change.step == step);
    of_it.filter_map(|change| ending(change.to)).collect()
}

const fn ending(status: Status) -> Option<Ending> {
    match status {
        Status::Completed | Status::NoChanges => Some(Ending::Completed),
        Status::Failed | Status::Rejected => Some(Ending::Failed),
        Status::Cancelled => Some(Ending::Cancelled),
        Status::NotExecuted => Some(Ending::NotExecuted),
        _ => None,
    }
}

/// The numbered lines that a step of this type prints in a run of this kind.
fn script(kind: Kind, step: &str) -> Vec<Line> {
    let phases: &[&str] = match (kind, step) {
        (Kind::PlanApply | Kind::Approved, "terraformPlan") => &["plan"],
        (Kind::BadSetting | Kind::BadFolder | Kind::FailingPlan, _) => &[],
        (_, "terraformApply") => &["first", "second"],
        (_, "terraformDestroy") => &["gone"],
        (_, "customScripts") => &["script"],
        _ => &[],
    };
    let lines = |phase: &&str| {
        let phase = (*phase).to_owned();
        (1..=2 * LINES).map(move |number| Line {
            phase: phase.clone(),
            number,
        })
    };
    phases.iter().flat_map(lines).collect()
}

/// Whether the store has the state of a platform's record, under the recorded address.
fn publication(peers: &Peers, organization: &str, history: &History) -> Result<Published> {
    let serial = serial(history);
    // The address is the platform's own. The store uses the same name.
    let name = history.output.rsplit_once("/state/");
    let name = name.and_then(|(_, name)| name.strip_suffix(".json"));
    let stored = match name {
        None => false,
        Some(name) => {
            let base = format!("tfstate/{organization}/{}/state/{name}", history.workspace);
            let shown = peers.store.object(&format!("{base}.json"))?;
            let raw = peers.store.object(&format!("{base}.raw.json"))?;
            let is_recorded = |raw: String| {
                let state = state(&raw);
                state.is_some_and(|it| it.serial == serial && it.lineage == history.lineage)
                    && hex(&Md5::digest(&raw)) == history.md5
            };
            shown.is_some() && raw.is_some_and(is_recorded)
        }
    };
    Ok(Published { serial, stored })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbered_lines_are_found_however_the_tool_shows_them() {
        let text = "mark/3/plan/1;\nterraform_data.first (local-exec): mark/3/first/2;\n\
                    Output: mark/3/first/1;\nmark/3/first/2;\nExecuting: [\"sh\" \"-c\" \"echo mark/$RUN\"]\nremarks\n";
        assert_eq!(found(text), ["3 `plan 1`", "3 `first 2`"]);
    }

    fn found(text: &str) -> Vec<String> {
        let marks = marks(text).into_iter();
        marks.map(|(run, line)| format!("{run} {line}")).collect()
    }

    #[test]
    fn a_line_that_the_tool_has_cut_is_one_line_and_what_has_lost_a_byte_is_none() {
        let cut = |one: &str, other: &str| {
            let of = "terraform_data.first (local-exec): ";
            found(&format!("{of}mark/3/first/1;\n{of}{one}\n{of}{other}\n"))
        };
        assert_eq!(cut("mark/3/first/1", "2;"), ["3 `first 1`", "3 `first 12`"]);
        assert_eq!(cut("mark/3/fir", "st/12;"), ["3 `first 1`", "3 `first 12`"]);
        assert_eq!(cut("mark/3/first/1", ""), ["3 `first 1`"]);
        assert_eq!(cut("mark/3/first", "12;"), ["3 `first 1`"]);
        // The tool does not cut the output of scripts.
        assert_eq!(found("mark/3/plan/1\n2;\n"), Vec::<String>::new());
    }

    #[test]
    fn only_what_changes_something_counts_as_begun() {
        let journal = [
            "begin plan",
            "tool apply",
            "begin first",
            "end first",
            "tool apply",
        ];
        let counted = begun(&journal.map(str::to_owned));
        let expected = [("begin first".to_owned(), 1), ("tool apply".to_owned(), 2)];
        assert_eq!(counted, expected.into());
    }

    #[test]
    fn a_state_is_read_with_its_serial_and_resources() {
        let text = r#"{"serial": 4, "lineage": "x", "resources": [{"name": "first"}]}"#;
        let state = state(text).unwrap();
        assert_eq!((state.serial, state.resources.len()), (4, 1));
        assert_eq!(super::state("{"), None);
    }
}
