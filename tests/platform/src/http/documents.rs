//! Records as JSON:API documents.

use serde_json::{Value, json};

use super::{Answer, Call, JSON_API, json_response, not_found};
use crate::platform::Shared;
use crate::records::{Job, Step};

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
            "autoApply": job.auto_apply,
            "approvalTeam": null,
            "tcl": null,
            "templateReference": null,
        },
        "relationships": {
            "organization": {"data": {"type": "organization", "id": organization}},
            "workspace": {"data": {"type": "workspace", "id": job.workspace}},
            "step": {"data": steps},
        },
    })
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

pub(super) fn workspace(shared: &Shared, id: &str) -> Answer {
    let found = shared.read(|records| records.workspaces.get(id).cloned());
    let Some(workspace) = found else {
        return not_found("such workspace");
    };
    let document = json!({"data": {
        "type": "workspace",
        "id": workspace.id,
        "attributes": {
            "name": workspace.name,
            "source": workspace.source,
            "branch": workspace.branch,
            "folder": workspace.folder,
            "terraformVersion": workspace.terraform_version,
            "iacType": workspace.iac_type,
            "locked": workspace.locked,
        },
    }});
    Ok(json_response(200, JSON_API, &document))
}
