//! Changes through JSON:API (contract 5): statuses of jobs and steps, and histories. Forbidden changes that the API accepts
//! are stored and noted.

use std::sync::Arc;

use axum::body::Body;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::{Answer, Call, JSON_API, Refusal, json_response, not_found, refuse, response};
use crate::ledger::{Actor, Rule};
use crate::platform::Shared;
use crate::records::{History, Job, Records, Status, Step};
use crate::streams::Findings;

/// The type of an attribute.
#[derive(Clone, Copy)]
enum Kind {
    Status,
    Flag,
    Number,
    /// Text with at most this number of characters.
    Text(usize),
    /// The API stores it, and no report may change it.
    Foreign,
}

const WIDE: usize = usize::MAX;

const JOB: &[(&str, Kind)] = &[
    ("status", Kind::Status),
    ("output", Kind::Text(1024)),
    ("planChanges", Kind::Flag),
    ("terraformPlan", Kind::Text(1024)),
    ("commitId", Kind::Text(64)),
    ("overrideSource", Kind::Foreign),
    ("tcl", Kind::Foreign),
    ("approvalTeam", Kind::Foreign),
    ("templateReference", Kind::Foreign),
];

const STEP: &[(&str, Kind)] = &[
    ("status", Kind::Status),
    ("output", Kind::Text(1024)),
    ("name", Kind::Text(128)),
];

const HISTORY: &[(&str, Kind)] = &[
    ("output", Kind::Text(WIDE)),
    ("jobReference", Kind::Text(36)),
    ("serial", Kind::Number),
    ("md5", Kind::Text(WIDE)),
    ("lineage", Kind::Text(WIDE)),
];

/// Attributes of a document, each known and of its type.
struct Attributes {
    given: Map<String, Value>,
    foreign: Findings,
}

impl Attributes {
    fn read(
        call: &Call,
        resource: &str,
        id: Option<&str>,
        known: &[(&str, Kind)],
    ) -> Result<Self, Refusal> {
        call.must_be(JSON_API)?;
        let document = call.json()?;
        let about = format!("{} {}", call.method, call.path);
        let data = &document["data"];
        let named = data["type"] == resource && id.is_none_or(|id| data["id"] == id);
        let Some(given) = data["attributes"].as_object().filter(|_| named) else {
            return refuse(400, Rule::BadDocument, format!("{about}: {document}"));
        };
        let mut foreign = Findings::new();
        if data.get("relationships").is_some() {
            foreign.push((Rule::ForeignAttribute, format!("{about}: relationships")));
        }
        for (name, value) in given {
            let Some((_, kind)) = known.iter().find(|(known, _)| known == name) else {
                return refuse(400, Rule::UnknownAttribute, format!("{about}: {name}"));
            };
            let fits = match kind {
                Kind::Status => serde_json::from_value::<Status>(value.clone()).is_ok(),
                Kind::Flag => value.is_boolean(),
                Kind::Number => value.is_i64() || value.is_u64(),
                Kind::Text(_) | Kind::Foreign => value.is_string() || value.is_null(),
            };
            if !fits {
                return refuse(
                    400,
                    Rule::BadDocument,
                    format!("{about}: {name} is {value}"),
                );
            }
            let text = value.as_str().unwrap_or_default();
            match kind {
                Kind::Text(width) if text.chars().count() > *width => {
                    return refuse(400, Rule::TooWide, format!("{about}: {name}"));
                }
                Kind::Foreign => foreign.push((Rule::ForeignAttribute, format!("{about}: {name}"))),
                _ => {}
            }
        }
        Ok(Self {
            given: given.clone(),
            foreign,
        })
    }

    fn status(&self) -> Option<Status> {
        serde_json::from_value(self.given.get("status")?.clone()).ok()
    }

    /// Sets a column if the attribute is given.
    fn put(&self, name: &str, column: &mut Option<String>) {
        if let Some(value) = self.given.get(name) {
            *column = value.as_str().map(str::to_owned);
        }
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.given.get(name)?.as_str()
    }
}

fn find_job(shared: &Shared, id: &str) -> Result<u32, Refusal> {
    let known = |id: &u32| shared.read(|records| records.jobs.contains_key(id));
    match id.parse().ok().filter(known) {
        Some(id) => Ok(id),
        None => not_found("such job"),
    }
}

/// Changes a job. It waits for the lock of the job's row. Then the scheduler looks at the job, unless it is `running`.
pub(super) async fn patch_job(shared: &Arc<Shared>, call: &Call, id: &str) -> Answer {
    let attributes = Attributes::read(call, "job", Some(id), JOB)?;
    let id = find_job(shared, id)?;
    note_open_post(shared, call, id);
    let row = shared.row(id);
    let held = row.lock().await;
    let findings = shared.write(|records| {
        let before = records.job(id).clone();
        store_job(records, id, &attributes);
        judge_job(&before, records.job(id), attributes.status())
    });
    note(shared, call, attributes.foreign.into_iter().chain(findings));
    drop(held);
    let status = shared.read(|records| records.job(id).status);
    if status != Status::Running {
        shared.fire(id);
    }
    Ok(response(204, "", Body::empty()))
}

fn store_job(records: &mut Records, id: u32, attributes: &Attributes) {
    let job = records.job_mut(id);
    attributes.put("output", &mut job.output);
    attributes.put("terraformPlan", &mut job.terraform_plan);
    attributes.put("commitId", &mut job.commit_id);
    if let Some(Value::Bool(changes)) = attributes.given.get("planChanges") {
        job.plan_changes = *changes;
    }
    let status = attributes.status().unwrap_or(job.status);
    records.set_job(id, status, Actor::Client);
}

/// Violations by a change of a job.
fn judge_job(before: &Job, after: &Job, status: Option<Status>) -> Findings {
    let mut findings = Findings::new();
    let mut found = |rule, why: String| findings.push((rule, why));
    let unchanged = Job {
        updated: before.updated,
        spared: before.spared,
        ..after.clone()
    } == *before;
    if unchanged {
        return findings;
    }
    if before.status.is_terminal() {
        found(Rule::TerminalJob, format!("it is {}", before.status));
    }
    let Some(status) = status else {
        return findings;
    };
    if !before.status.is_terminal() && !before.status.is_with_an_executor() {
        found(Rule::BeforeQueue, format!("it is {}", before.status));
    }
    match status {
        Status::Running => {}
        Status::Pending | Status::Completed | Status::Failed => {
            if let Some(step) = before.dispatched_step()
                && !step.status.is_terminal()
            {
                let why = format!("step {} is {}", step.flow.kind, step.status);
                found(Rule::JobBeforeStep, why);
            }
        }
        other => found(Rule::ForeignAttribute, format!("status {other}")),
    }
    if after.status == Status::Pending && !after.plan_changes {
        found(Rule::PendingWithoutChanges, "it is wedged".to_owned());
    }
    findings
}

fn note_open_post(shared: &Shared, call: &Call, id: u32) {
    if shared.read(|records| records.open_posts.contains(&id)) {
        let why = format!("{} {}", call.method, call.path);
        shared.ledger().violated(Rule::DuringDispatch, why);
    }
}

fn note(shared: &Shared, call: &Call, findings: impl IntoIterator<Item = (Rule, String)>) {
    let about = |(rule, why)| (rule, format!("{} {}: {why}", call.method, call.path));
    shared.found(findings.into_iter().map(about));
}

/// Changes a step, without a lock.
pub(super) fn patch_step(shared: &Shared, call: &Call, id: &str, step: &str) -> Answer {
    let attributes = Attributes::read(call, "step", Some(step), STEP)?;
    let id = find_job(shared, id)?;
    if shared.read(|records| records.job(id).step(step).is_none()) {
        return not_found("such step");
    }
    note_open_post(shared, call, id);
    let findings = shared.write(|records| {
        let before = records.job(id).clone();
        store_step(records, id, step, &attributes);
        let after = records.job(id).step(step).cloned();
        let (Some(old), Some(new)) = (before.step(step), after) else {
            return Findings::new();
        };
        let mut findings = judge_step(&before, old, &new, attributes.status());
        findings.extend(judge_output(shared, records, &before, &new, &attributes));
        findings
    });
    note(shared, call, findings.into_iter().chain(attributes.foreign));
    Ok(response(204, "", Body::empty()))
}

fn store_step(records: &mut Records, id: u32, step: &str, attributes: &Attributes) {
    let steps = &mut records.job_mut(id).steps;
    if let Some(found) = steps.iter_mut().find(|known| known.id == step) {
        attributes.put("output", &mut found.output);
        if let Some(name) = attributes.text("name") {
            name.clone_into(&mut found.name);
        }
    }
    if let Some(status) = attributes.status() {
        records.set_step(id, step, status, Actor::Client);
    }
}

/// Violations by a change of a step.
fn judge_step(job: &Job, before: &Step, after: &Step, status: Option<Status>) -> Findings {
    let mut findings = Findings::new();
    if before == after {
        return findings;
    }
    let mut found = |rule, why: String| findings.push((rule, why));
    let waits = !job.status.is_terminal() && !job.status.is_with_an_executor();
    if waits {
        found(Rule::BeforeQueue, format!("the job is {}", job.status));
    } else if job.dispatched.as_deref() != Some(&before.id) {
        found(Rule::BeforeQueue, "another step was dispatched".to_owned());
    }
    if before.status.is_terminal() && before.status != after.status {
        found(Rule::TerminalStep, format!("it is {}", before.status));
    }
    match status {
        Some(Status::Completed) if job.status == Status::Rejected => {
            found(
                Rule::TerminalJob,
                "completed, and the job is rejected".to_owned(),
            );
        }
        None | Some(Status::Running | Status::Completed | Status::Failed) => {}
        Some(other) => found(Rule::ForeignAttribute, format!("status {other}")),
    }
    findings
}

/// Violations of the rule that a final step names its stored output.
fn judge_output(
    shared: &Shared,
    records: &Records,
    job: &Job,
    step: &Step,
    given: &Attributes,
) -> Findings {
    let is_over = matches!(step.status, Status::Completed | Status::Failed);
    let has_no_log = ["approval", "customScripts"].contains(&step.flow.kind.as_str());
    let Some(output) = step.output.as_deref() else {
        // Without storage, a launcher reports the reason as the name.
        let said = has_no_log || given.text("name").is_some();
        let silent = given.status().is_some() && !said;
        let missing = (Rule::Output, "the step has none".to_owned());
        return silent.then_some(missing).into_iter().collect();
    };
    let organization = &records.organization;
    let place = format!(
        "organization/{organization}/job/{}/step/{}",
        job.id, step.id
    );
    let expected = format!("{}/tfoutput/v1/{place}", shared.url());
    if output != expected {
        return vec![(Rule::Output, format!("`{output}` instead of `{expected}`"))];
    }
    let outputs = shared.outputs();
    let stored = outputs.is_none_or(|all| all.find(organization, job.id, &step.id).is_some());
    let told = given.status().is_some() && given.text("output").is_some();
    if is_over && told && !stored {
        return vec![(Rule::Output, "it is not stored".to_owned())];
    }
    Findings::new()
}

/// A new history of a workspace.
pub(super) fn post_history(shared: &Shared, call: &Call, workspace: &str) -> Answer {
    let attributes = Attributes::read(call, "history", None, HISTORY)?;
    if shared.read(|records| !records.workspaces.contains_key(workspace)) {
        return not_found("such workspace");
    }
    let text = |name: &str| attributes.text(name).unwrap_or_default().to_owned();
    let history = History {
        id: Uuid::new_v4().to_string(),
        workspace: workspace.to_owned(),
        output: text("output"),
        job_reference: text("jobReference"),
        serial: attributes
            .given
            .get("serial")
            .and_then(Value::as_i64)
            .unwrap_or_default(),
        md5: text("md5"),
        lineage: text("lineage"),
    };
    let document = json!({"data": {
        "type": "history", "id": history.id, "attributes": attributes.given,
    }});
    shared.write(|records| records.histories.push(history));
    Ok(json_response(201, JSON_API, &document))
}
