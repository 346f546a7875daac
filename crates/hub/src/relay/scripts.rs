//! What scripts of a run may ask the platform's API, where the file of the pools lets them: about their workspace, and about
//! their job. Pure.
//!
//! The platform does what a token of its own executors asks for, for all organizations. Its API follows relationships from one
//! resource to another, in paths, queries and documents, also where a document has the name of one among its attributes. So each
//! of these has to be listed here. Attributes that name a record of any organization by its id are not.

use std::collections::BTreeMap;

use axum::http::Method;
use platform::StepRef;
use serde::{Deserialize, Serialize};

use super::calls::RelayRefusal;

/// What scripts may read of a workspace.
const READABLE: [&str; 4] = ["variable", "schedule", "workspaceTag", "history"];
/// What they may send about each kind. All are texts, numbers or truth values.
const ATTRIBUTES: [(&str, &[&str]); 3] = [
    (
        "workspace",
        &[
            "description",
            "locked",
            "lockDescription",
            "terraformVersion",
            "branch",
            "folder",
        ],
    ),
    (
        "variable",
        &[
            "key",
            "value",
            "description",
            "category",
            "sensitive",
            "hcl",
        ],
    ),
    (
        "job",
        &[
            "tcl",
            "overrideBranch",
            "refresh",
            "refreshOnly",
            "comments",
        ],
    ),
];
/// What may come with a resource.
const INCLUDED: [&str; 5] = ["variable", "schedule", "workspaceTag", "history", "step"];

const QUERY: &str =
    "scripts may only ask for `include` of what is below a workspace or job, and for pages";
const DOCUMENT: &str = "scripts send one resource with the attributes that are listed for it, and without relationships";

/// A path of the API below the organization, and what it is about.
fn resource<'p>(path: &[&'p str], step: &StepRef) -> Option<Resource<'p>> {
    let ["api", "v1", "organization", organization, rest @ ..] = path else {
        return None;
    };
    let is_own = |given: &str, own: &str| !own.is_empty() && given == own;
    if !is_own(organization, &step.organization_id) {
        return None;
    }
    let found = |kind: &'p str, id| Some(Resource { kind, id });
    let is_below =
        |own: &str, kind: &str| is_own(own, &step.workspace_id) && READABLE.contains(&kind);
    match rest {
        [kind @ "workspace", id] if is_own(id, &step.workspace_id) => found(kind, Some(*id)),
        ["workspace", own, kind] if is_below(own, kind) => found(kind, None),
        ["workspace", own, kind, id] if is_below(own, kind) => found(kind, Some(*id)),
        [kind @ "job"] => found(kind, None),
        [kind @ "job", id] if is_own(id, &step.job_id) => found(kind, Some(*id)),
        ["job", own, kind @ "step"] if is_own(own, &step.job_id) => found(kind, None),
        ["job", own, kind @ "step", id] if is_own(own, &step.job_id) => found(kind, Some(*id)),
        _ => None,
    }
}

struct Resource<'p> {
    kind: &'p str,
    /// `None`: all of them.
    id: Option<&'p str>,
}

impl Resource<'_> {
    fn takes(&self, method: &Method) -> bool {
        match (method.as_str(), self.id) {
            ("GET", id) => self.kind != "job" || id.is_some(),
            ("POST", None) => matches!(self.kind, "variable" | "job"),
            ("PATCH", Some(_)) => matches!(self.kind, "variable" | "workspace"),
            ("DELETE", Some(_)) => self.kind == "variable",
            _ => false,
        }
    }
}

/// Checks a request of a script. `path` is below the platform's URL.
pub(super) fn check(
    method: &Method,
    path: &[&str],
    query: Option<&str>,
    step: &StepRef,
) -> Result<(), RelayRefusal> {
    if !resource(path, step).is_some_and(|resource| resource.takes(method)) {
        return Err(RelayRefusal::Request(
            "scripts may ask the API only about their own workspace and job",
        ));
    }
    let query = query.unwrap_or_default();
    let is_known = |name: &str, value: &str| match name {
        "include" => value.split(',').all(|part| INCLUDED.contains(&part)),
        _ => name.starts_with("page["),
    };
    let mut pairs = url::form_urlencoded::parse(query.as_bytes());
    if pairs.all(|(name, value)| is_known(&name, &value)) {
        Ok(())
    } else {
        Err(RelayRefusal::Request(QUERY))
    }
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Document {
    data: Data,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Data {
    #[serde(rename = "type")]
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(default)]
    attributes: BTreeMap<String, Scalar>,
    #[serde(skip_serializing_if = "Option::is_none")]
    relationships: Option<Relationships>,
}

/// What has neither fields nor items.
#[derive(Deserialize, Serialize)]
#[serde(untagged)]
enum Scalar {
    None,
    Flag(bool),
    Number(serde_json::Number),
    Text(String),
}

/// Only a new job has one.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Relationships {
    workspace: Relationship,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Relationship {
    data: Identifier,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Identifier {
    #[serde(rename = "type")]
    kind: String,
    id: String,
}

/// Checks the document of a request that [`check`] has let pass, and returns it as it is sent.
pub(super) fn document(
    path: &[&str],
    bytes: &[u8],
    step: &StepRef,
) -> Result<Vec<u8>, RelayRefusal> {
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    let refused = || RelayRefusal::Body(DOCUMENT);
    let document: Document = serde_json::from_slice(bytes).map_err(|_| refused())?;
    let resource = resource(path, step).ok_or_else(refused)?;
    let data = &document.data;
    let related = data.relationships.as_ref();
    let is_related = match resource.kind {
        "job" => related.is_some_and(|related| {
            let workspace = &related.workspace.data;
            workspace.kind == "workspace" && workspace.id == step.workspace_id
        }),
        _ => related.is_none(),
    };
    let is_same = resource.id.is_none() || data.id.as_deref() == resource.id;
    let listed = ATTRIBUTES.iter().find(|(kind, _)| *kind == resource.kind);
    let is_listed = |name: &String| listed.is_some_and(|(_, names)| names.contains(&name.as_str()));
    let are_listed = data.attributes.keys().all(is_listed);
    if data.kind != resource.kind || !is_same || !is_related || !are_listed {
        return Err(refused());
    }
    serde_json::to_vec(&document).map_err(|_| refused())
}
