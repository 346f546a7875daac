//! Records as JSON:API documents.
//!
//! A token that may read a workspace may read its histories: upstream has no separate rule for them. Their collection takes
//! filters in RSQL, as all collections of Elide do.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::{Answer, Call, JSON_API, Refusal, json_response, not_found, refuse};
use crate::ledger::Rule;
use crate::platform::Shared;
use crate::records::{History, Job, ORGANIZATION, Step};

pub(super) fn organization(shared: &Shared, id: &str) -> Answer {
    if shared.read(|records| records.organization != id) {
        return not_found("such organization");
    }
    let attributes = json!({"name": ORGANIZATION, "disabled": false});
    let data = json!({"type": "organization", "id": id, "attributes": attributes});
    Ok(json_response(200, JSON_API, &json!({ "data": data })))
}

pub(super) fn workspace(shared: &Shared, id: &str) -> Answer {
    let name = shared.read(|records| Some(records.workspaces.get(id)?.name.clone()));
    let Some(name) = name else {
        return not_found("such workspace");
    };
    let data = json!({"type": "workspace", "id": id, "attributes": {"name": name}});
    Ok(json_response(200, JSON_API, &json!({ "data": data })))
}

pub(super) fn job(shared: &Shared, call: &Call, id: &str) -> Answer {
    let with_steps = call.path.contains("include=step");
    let organization = shared.read(|records| records.organization.clone());
    let found = shared.read(|records| records.jobs.get(&id.parse().ok()?).cloned());
    let Some(job) = found else {
        return not_found("such job");
    };
    let mut document = json!({"data": resource(&job, &organization)});
    if with_steps {
        let steps: Vec<Value> = job.steps.iter().map(|step| included(&job, step)).collect();
        document["included"] = Value::Array(steps);
    }
    Ok(json_response(200, JSON_API, &document))
}

fn resource(job: &Job, organization: &str) -> Value {
    let steps = job.steps.iter();
    let steps: Vec<Value> = steps
        .map(|step| json!({"type": "step", "id": step.id}))
        .collect();
    json!({
        "type": "job",
        "id": job.id.to_string(),
        "attributes": {
            "status": job.status,
            "output": job.output,
            "planChanges": job.plan_changes,
            "terraformPlan": job.terraform_plan,
            "commitId": job.commit_id,
            "overrideSource": job.override_source,
            "overrideBranch": job.override_branch,
            "refresh": job.refresh,
            "refreshOnly": job.refresh_only,
            "autoApply": false,
            "approvalTeam": null,
            "tcl": template(job),
            "templateReference": null,
        },
        "relationships": {
            "organization": {"data": {"type": "organization", "id": organization}},
            "workspace": {"data": {"type": "workspace", "id": job.workspace}},
            "step": {"data": steps},
        },
    })
}

/// The template as the API stores it.
fn template(job: &Job) -> String {
    let entry = |step: &Step| format!("- type: {}\n  step: {}\n", step.flow.kind, step.flow.number);
    let entries: String = job.steps.iter().map(entry).collect();
    STANDARD.encode(format!("flow:\n{entries}"))
}

fn included(job: &Job, step: &Step) -> Value {
    json!({
        "type": "step",
        "id": step.id,
        "attributes": {
            "name": step.name,
            "output": step.output,
            "status": step.status,
            "stepNumber": step.flow.number,
        },
        "relationships": {"job": {"data": {"type": "job", "id": job.id.to_string()}}},
    })
}

/// The largest number of records in an answer without paging.
const PAGE: usize = 500;

/// Histories of a workspace, all or those of a filter.
pub(super) fn histories(shared: &Shared, call: &Call, workspace: &str) -> Answer {
    let query = call.query();
    let filter = match query.as_slice() {
        [] => None,
        [(name, filter)] if name == "filter[history]" => Some(filter_of(call, filter)?),
        _ => return refuse(400, Rule::BadDocument, format!("GET {}", call.path)),
    };
    let found: Option<Vec<Value>> = shared.read(|records| {
        records.workspaces.get(workspace)?;
        let of_workspace = |history: &&History| history.workspace == workspace;
        let histories = records.histories.iter().filter(of_workspace);
        let shown = histories.map(attributes).filter(|(_, attributes)| {
            let wanted = filter.as_ref();
            wanted.is_none_or(|(name, value)| attributes[name] == *value)
        });
        let shown = shown
            .map(|(id, attributes)| json!({"type": "history", "id": id, "attributes": attributes}));
        Some(shown.take(PAGE).collect())
    });
    match found {
        Some(histories) => Ok(json_response(200, JSON_API, &json!({"data": histories}))),
        None => not_found("such workspace"),
    }
}

fn attributes(history: &History) -> (&str, Value) {
    let attributes = json!({
        "output": history.output,
        "jobReference": history.job_reference,
        "serial": history.serial,
        "md5": history.md5,
        "lineage": history.lineage,
    });
    (&history.id, attributes)
}

/// One comparison with a text. No client needs more of RSQL.
fn filter_of(call: &Call, filter: &str) -> Result<(String, String), Refusal> {
    let texts = ["output", "jobReference", "md5", "lineage"];
    let parts = filter
        .split_once("==")
        .filter(|(name, _)| texts.contains(name));
    let value = parts.and_then(|(_, value)| value.strip_prefix('\'')?.strip_suffix('\''));
    match (parts, value) {
        // `*` is a wildcard, and `\\` is an escape.
        (Some((name, _)), Some(value)) if !value.contains(['\'', '*', '\\']) => {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => refuse(
            400,
            Rule::BadDocument,
            format!("GET {}: {filter}", call.path),
        ),
    }
}
