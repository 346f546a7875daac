//! Checks the documents of executors. They must be about their own job and step, and have only the fields of reports, each of
//! its type. The relay serializes what it has read, so that the platform cannot read it differently.

use std::borrow::Cow;

use job_contract::status::{JobStatus, StepStatus};
use platform::StepRef;
use platform::live::LiveDocument;
use serde::{Deserialize, Deserializer, Serialize};
use url::Url;

use super::rules::{Call, RelayRefusal, is_plain, job_reference};
use crate::addresses::{is_address, may_be_plan};
use crate::json_check;

/// The longest digest or lineage of a state, in bytes.
const MAX_TEXT: usize = 256;
/// The statuses that executors give a job.
const JOB_STATUSES: [JobStatus; 4] = [
    JobStatus::Running,
    JobStatus::Pending,
    JobStatus::Completed,
    JobStatus::Failed,
];
/// The statuses that executors give a step.
const STEP_STATUSES: [StepStatus; 3] = [
    StepStatus::Running,
    StepStatus::Completed,
    StepStatus::Failed,
];
const NO_REPORT: &str = "a field is missing, has another type, or is none of a report";

/// A JSON:API document with one resource.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Document<'d, A> {
    #[serde(borrow)]
    pub(super) data: Resource<'d, A>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Resource<'d, A> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'d, str>,
    #[serde(
        default,
        deserialize_with = "present",
        skip_serializing_if = "Option::is_none"
    )]
    id: Option<Cow<'d, str>>,
    pub(super) attributes: A,
}

/// What executors report of a job.
#[derive(Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct JobChange {
    #[serde(deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub(super) status: Option<JobStatus>,
    #[serde(deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub(super) plan_changes: Option<bool>,
    #[serde(deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    output: Option<String>,
    #[serde(deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub(super) terraform_plan: Option<String>,
    #[serde(deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub(super) commit_id: Option<String>,
}

/// What executors report of a step.
#[derive(Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct StepChange {
    #[serde(deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub(super) status: Option<StepStatus>,
    #[serde(deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub(super) output: Option<String>,
    #[serde(deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

/// A state that a job has published.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct StateRecord {
    output: String,
    job_reference: String,
    serial: u64,
    md5: String,
    lineage: String,
}

/// Lines of the run log.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Lines<'d> {
    #[serde(borrow)]
    data: Vec<LogLine<'d>>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct LogLine<'d> {
    job_id: u64,
    #[serde(borrow)]
    step_id: Cow<'d, str>,
    line_number: u64,
    #[serde(borrow)]
    output: Cow<'d, str>,
}

/// Checks the document of a request, and returns it as it is sent. Addresses of a record are made anew below `public_url`, if
/// the platform has one: its pages send the tokens of their users to them.
pub(super) fn check(
    call: Call,
    bytes: &[u8],
    step: &StepRef,
    public_url: Option<&Url>,
) -> Result<Vec<u8>, RelayRefusal> {
    match call {
        Call::SetUpLog if bytes.is_empty() => Ok(Vec::new()),
        Call::ChangeJob => {
            let mut document = resource::<JobChange>(bytes, "job", Some(&step.job_id))?;
            let given = document.data.attributes.status.as_ref();
            if !given.is_none_or(|status| JOB_STATUSES.contains(status)) {
                return Err(RelayRefusal::Body(NO_REPORT));
            }
            let output = &mut document.data.attributes.output;
            // It is a text for people. Instead of an address that somebody may open, the record keeps what it has.
            output.take_if(|output| is_address(output));
            let plan = &mut document.data.attributes.terraform_plan;
            plan.take_if(|plan| !may_be_plan(plan));
            write(&document)
        }
        Call::ChangeStep => {
            let mut document = resource::<StepChange>(bytes, "step", Some(&step.step_id))?;
            let given = document.data.attributes.status;
            if !given.is_none_or(|status| STEP_STATUSES.contains(&status)) {
                return Err(RelayRefusal::Body(NO_REPORT));
            }
            let own = format!(
                "/tfoutput/v1/organization/{}/job/{}/step/{}",
                step.organization_id, step.job_id, step.step_id
            );
            let is_own = |path: &str| path.ends_with(&own).then(|| own.clone());
            if let Some(output) = &mut document.data.attributes.output {
                own_address(output, public_url, is_own)?;
            }
            write(&document)
        }
        Call::AddHistory => {
            let mut document = resource::<StateRecord>(bytes, "history", None)?;
            let state = &mut document.data.attributes;
            if state.job_reference != job_reference(step) {
                return Err(RelayRefusal::Body("it is about another job"));
            }
            if state.md5.len() > MAX_TEXT || state.lineage.len() > MAX_TEXT {
                return Err(RelayRefusal::Body("`md5` or `lineage` is too long"));
            }
            let states = format!(
                "/tfstate/v1/organization/{}/workspace/{}/state/",
                step.organization_id, step.workspace_id
            );
            let is_own = |path: &str| {
                let (_, name) = path.rsplit_once(&states)?;
                is_plain(name).then(|| format!("{states}{name}"))
            };
            own_address(&mut state.output, public_url, is_own)?;
            write(&document)
        }
        Call::AddLines => {
            let lines: Lines<'_> = read(bytes)?;
            let is_own = |line: &LogLine<'_>| {
                line.job_id.to_string() == step.job_id && line.step_id == step.step_id
            };
            if lines.data.iter().all(is_own) {
                write(&lines)
            } else {
                Err(RelayRefusal::Body("a line is about another step"))
            }
        }
        Call::ShowChanges => {
            let state: LiveDocument = read(bytes)?;
            if state.is_whole() && json_check::is_readable(bytes) {
                write(&state)
            } else {
                Err(RelayRefusal::Body(NO_REPORT))
            }
        }
        _ => Err(RelayRefusal::Body("this request has none")),
    }
}

/// Reads a document with one resource of this type and id.
fn resource<'d, A: Deserialize<'d>>(
    bytes: &'d [u8],
    kind: &str,
    id: Option<&str>,
) -> Result<Document<'d, A>, RelayRefusal> {
    let document: Document<'_, A> = read(bytes)?;
    if document.data.kind != kind {
        return Err(RelayRefusal::Body("it is of another type"));
    }
    if document.data.id.as_deref() != id {
        return Err(RelayRefusal::Body("it is about another resource"));
    }
    Ok(document)
}

fn read<'d, T: Deserialize<'d>>(bytes: &'d [u8]) -> Result<T, RelayRefusal> {
    serde_json::from_slice(bytes).map_err(|_| {
        if json_check::is_readable(bytes) {
            RelayRefusal::Body(NO_REPORT)
        } else {
            RelayRefusal::Unread("it is not valid JSON")
        }
    })
}

fn write(document: &impl Serialize) -> Result<Vec<u8>, RelayRefusal> {
    serde_json::to_vec(document).map_err(|_| RelayRefusal::Unread("it cannot be written"))
}

/// Reads a field that may be absent and is never null.
fn present<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    T::deserialize(deserializer).map(Some)
}

/// Makes the address of a record anew. It must be the run's own: `own_path` returns the path of one that is.
fn own_address(
    address: &mut String,
    public_url: Option<&Url>,
    own_path: impl Fn(&str) -> Option<String>,
) -> Result<(), RelayRefusal> {
    let url = Url::parse(address).ok();
    let path = url
        .filter(|url| url.query().is_none() && url.fragment().is_none())
        .and_then(|url| own_path(url.path()))
        .ok_or(RelayRefusal::Body("`output` is not an address of this run"))?;
    if let Some(public_url) = public_url {
        *address = public_url.as_str().trim_end_matches('/').to_owned() + &path;
    }
    Ok(())
}
