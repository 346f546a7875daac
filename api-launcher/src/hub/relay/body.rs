//! Checks the documents of executors. They must be about their own job and step, and have only the fields of reports.
//! The relay serializes the parsed document again, so that the platform cannot read it differently.

use platform::StepRef;
use serde_json::{Map, Value};
use url::Url;

use super::rules::{Call, RelayRefusal, is_plain, job_reference};

/// Checks the document of a request, and returns it as it is sent. Addresses of a record are made anew below `public_url`, if
/// the platform has one: its pages send the tokens of their users to them.
pub(super) fn check(
    call: Call,
    bytes: &[u8],
    step: &StepRef,
    public_url: Option<&Url>,
) -> Result<Vec<u8>, RelayRefusal> {
    if call == Call::SetUpLog {
        return if bytes.is_empty() {
            Ok(Vec::new())
        } else {
            Err(RelayRefusal::Body("this request has none"))
        };
    }
    let mut document: Value =
        serde_json::from_slice(bytes).map_err(|_| RelayRefusal::Unread("it is not valid JSON"))?;
    match call {
        Call::ChangeJob => {
            let attributes = resource(&document, "job", Some(&step.job_id))?;
            check_fields(attributes, &JOB)?;
            check_status(attributes, &JOB_STATUSES)?;
        }
        Call::ChangeStep => {
            let attributes = resource(&document, "step", Some(&step.step_id))?;
            check_fields(attributes, &STEP)?;
            check_status(attributes, &STEP_STATUSES)?;
            let own = format!(
                "/tfoutput/v1/organization/{}/job/{}/step/{}",
                step.organization_id, step.job_id, step.step_id
            );
            let is_own = |path: &str| path.ends_with(&own).then(|| own.clone());
            let output = own_output(attributes, public_url, is_own)?;
            set_output(&mut document, output);
        }
        Call::AddHistory => {
            let attributes = resource(&document, "history", None)?;
            check_fields(attributes, &HISTORY)?;
            let reference = attributes.get("jobReference").and_then(Value::as_str);
            if reference != Some(&job_reference(step)) {
                return Err(RelayRefusal::Body("it is about another job"));
            }
            let states = format!(
                "/tfstate/v1/organization/{}/workspace/{}/state/",
                step.organization_id, step.workspace_id
            );
            let is_own = |path: &str| {
                let (_, name) = path.rsplit_once(&states)?;
                is_plain(name).then(|| format!("{states}{name}"))
            };
            let output = own_output(attributes, public_url, is_own)?;
            set_output(&mut document, output);
        }
        Call::AddLines => lines(&document, step)?,
        _ => return Err(RelayRefusal::Body("this request has none")),
    }
    serde_json::to_vec(&document).map_err(|_| RelayRefusal::Unread("it cannot be written"))
}

const JOB: [&str; 5] = [
    "status",
    "planChanges",
    "output",
    "terraformPlan",
    "commitId",
];
const JOB_STATUSES: [&str; 4] = ["running", "pending", "completed", "failed"];
const STEP: [&str; 3] = ["status", "output", "name"];
const STEP_STATUSES: [&str; 3] = ["running", "completed", "failed"];
const HISTORY: [&str; 5] = ["output", "jobReference", "serial", "md5", "lineage"];
const LINE: [&str; 4] = ["jobId", "stepId", "lineNumber", "output"];

/// Returns the attributes of the only resource of a JSON:API document.
fn resource<'d>(
    document: &'d Value,
    kind: &str,
    id: Option<&str>,
) -> Result<&'d Map<String, Value>, RelayRefusal> {
    let top = document.as_object();
    let data = top
        .filter(|top| top.len() == 1)
        .and_then(|top| top.get("data"));
    let data = data.and_then(Value::as_object);
    let data = data.ok_or(RelayRefusal::Body("it must have `data` alone"))?;
    check_fields(data, &["type", "id", "attributes"])?;
    if data.get("type").and_then(Value::as_str) != Some(kind) {
        return Err(RelayRefusal::Body("it is of another type"));
    }
    if data.get("id").map(Value::as_str) != id.map(Some) {
        return Err(RelayRefusal::Body("it is about another resource"));
    }
    let attributes = data.get("attributes").and_then(Value::as_object);
    let attributes = attributes.ok_or(RelayRefusal::Body("it has no attributes"))?;
    let is_flat = |value: &Value| !value.is_object() && !value.is_array();
    if attributes.values().all(is_flat) {
        Ok(attributes)
    } else {
        Err(RelayRefusal::Body("an attribute has another type"))
    }
}

fn check_fields(fields: &Map<String, Value>, known: &[&str]) -> Result<(), RelayRefusal> {
    if fields.keys().all(|name| known.contains(&name.as_str())) {
        Ok(())
    } else {
        Err(RelayRefusal::Body(
            "it has a field that reports do not have",
        ))
    }
}

fn check_status(attributes: &Map<String, Value>, known: &[&str]) -> Result<(), RelayRefusal> {
    match attributes.get("status").map(Value::as_str) {
        None => Ok(()),
        Some(Some(status)) if known.contains(&status) => Ok(()),
        Some(_) => Err(RelayRefusal::Body("executors report no such status")),
    }
}

/// Returns the address that a record gets. It must be the run's own: `own_path` returns the path of one that is.
fn own_output(
    attributes: &Map<String, Value>,
    public_url: Option<&Url>,
    own_path: impl Fn(&str) -> Option<String>,
) -> Result<Option<String>, RelayRefusal> {
    let Some(output) = attributes.get("output") else {
        return Ok(None);
    };
    let url = output.as_str().and_then(|text| Url::parse(text).ok());
    let path = url
        .as_ref()
        .filter(|url| url.query().is_none() && url.fragment().is_none())
        .and_then(|url| own_path(url.path()))
        .ok_or(RelayRefusal::Body("`output` is not an address of this run"))?;
    let base = |public_url: &Url| public_url.as_str().trim_end_matches('/').to_owned();
    Ok(public_url.map(|public_url| base(public_url) + &path))
}

fn set_output(document: &mut Value, output: Option<String>) {
    if let Some(output) = output {
        document["data"]["attributes"]["output"] = output.into();
    }
}

fn lines(document: &Value, step: &StepRef) -> Result<(), RelayRefusal> {
    let top = document.as_object().filter(|top| top.len() == 1);
    let lines = top
        .and_then(|top| top.get("data"))
        .and_then(Value::as_array);
    let lines = lines.ok_or(RelayRefusal::Body("it must have lines in `data` alone"))?;
    for line in lines {
        let line = line
            .as_object()
            .ok_or(RelayRefusal::Body("a line is no object"))?;
        check_fields(line, &LINE)?;
        let job = line.get("jobId").and_then(Value::as_u64);
        let of_step = line.get("stepId").and_then(Value::as_str);
        if job.map(|id| id.to_string()).as_ref() != Some(&step.job_id)
            || of_step != Some(&step.step_id)
        {
            return Err(RelayRefusal::Body("a line is about another step"));
        }
    }
    Ok(())
}
