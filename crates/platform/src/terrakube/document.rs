//! The parts of the platform's JSON:API documents that Mayfly uses. A change contains only what it changes. So the platform
//! keeps the rest, also if another client writes it at the same time (W-30).

use job_contract::status::{JobStatus, StepStatus};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// Widths of the platform's columns, in characters.
pub(super) const STEP_NAME_WIDTH: usize = 128;
pub(super) const STEP_OUTPUT_WIDTH: usize = 1024;
pub(super) const JOB_OUTPUT_WIDTH: usize = 1024;
pub(super) const JOB_PLAN_WIDTH: usize = 1024;
pub(super) const JOB_COMMIT_WIDTH: usize = 64;
pub(super) const HISTORY_REFERENCE_WIDTH: usize = 36;

/// A job and its steps.
#[derive(Debug, Deserialize)]
pub(super) struct JobDocument {
    data: JobResource,
    #[serde(default)]
    included: Vec<Included>,
}

#[derive(Debug, Deserialize)]
struct JobResource {
    attributes: JobAttributes,
    #[serde(default)]
    relationships: Relationships,
}

/// The platform's record of a job.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct JobAttributes {
    pub(super) status: JobStatus,
    #[serde(default, deserialize_with = "unless_empty")]
    pub(super) terraform_plan: Option<String>,
    #[serde(default, deserialize_with = "unless_empty")]
    pub(super) override_source: Option<String>,
    /// Absent until the first step has been reported.
    #[serde(default)]
    pub(super) output: Option<String>,
    /// Absent until an executor has read the source.
    #[serde(default)]
    pub(super) commit_id: Option<String>,
    /// The job's template, base64 of YAML.
    #[serde(default, deserialize_with = "unless_empty")]
    pub(super) tcl: Option<String>,
}

/// An organization.
#[derive(Debug, Deserialize)]
pub(super) struct OrganizationDocument {
    pub(super) data: Organization,
}

#[derive(Debug, Deserialize)]
pub(super) struct Organization {
    pub(super) attributes: OrganizationAttributes,
}

#[derive(Debug, Deserialize)]
pub(super) struct OrganizationAttributes {
    pub(super) name: String,
}

/// What a hub says about the registry behind it.
#[derive(Debug, Deserialize)]
pub(super) struct RegistryHosts {
    pub(super) hosts: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Relationships {
    #[serde(default)]
    step: Relationship,
}

#[derive(Debug, Default, Deserialize)]
struct Relationship {
    #[serde(default, deserialize_with = "null_as_empty")]
    data: Vec<Value>,
}

#[derive(Debug, Deserialize)]
struct Included {
    #[serde(rename = "type")]
    kind: String,
    id: String,
    #[serde(default)]
    attributes: Value,
}

/// The platform's record of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KnownStep {
    pub(super) id: String,
    /// `None` for a status of another release.
    pub(super) status: Option<StepStatus>,
    pub(super) number: Option<i64>,
    pub(super) output: Option<String>,
}

impl JobDocument {
    pub(super) const fn job(&self) -> &JobAttributes {
        &self.data.attributes
    }

    pub(super) fn into_job(self) -> JobAttributes {
        self.data.attributes
    }

    /// How many steps the job's template has.
    pub(super) fn template_steps(&self) -> usize {
        self.data.relationships.step.data.len()
    }

    pub(super) fn steps(&self) -> impl Iterator<Item = KnownStep> + '_ {
        let steps = self.included.iter().filter(|one| one.kind == "step");
        steps.map(|step| {
            let text = |name: &str| step.attributes.get(name).and_then(Value::as_str);
            KnownStep {
                id: step.id.clone(),
                status: text("status")
                    .and_then(|status| serde_json::from_value(Value::from(status)).ok()),
                number: step.attributes.get("stepNumber").and_then(Value::as_i64),
                output: text("output").map(str::to_owned),
            }
        })
    }

    pub(super) fn step(&self, id: &str) -> Option<KnownStep> {
        self.steps().find(|step| step.id == id)
    }
}

/// The published states.
#[derive(Debug, Deserialize)]
pub(super) struct HistoryDocument {
    data: Vec<HistoryResource>,
}

#[derive(Debug, Deserialize)]
struct HistoryResource {
    attributes: HistoryAttributes,
}

#[derive(Debug, Deserialize)]
struct HistoryAttributes {
    #[serde(default)]
    output: Option<String>,
}

impl HistoryDocument {
    /// The addresses of the states.
    pub(super) fn outputs(&self) -> impl Iterator<Item = &str> + '_ {
        let states = self.data.iter();
        states.filter_map(|state| state.attributes.output.as_deref())
    }
}

/// A change of a resource, or a new resource.
#[derive(Debug, Serialize)]
pub(super) struct Change<'c, A> {
    data: ChangeData<'c, A>,
}

#[derive(Debug, Serialize)]
struct ChangeData<'c, A> {
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'c str>,
    attributes: A,
}

impl<'c, A> Change<'c, A> {
    pub(super) const fn of(kind: &'static str, id: &'c str, attributes: A) -> Self {
        let id = Some(id);
        Self {
            data: ChangeData {
                kind,
                id,
                attributes,
            },
        }
    }

    pub(super) const fn new(kind: &'static str, attributes: A) -> Self {
        Self {
            data: ChangeData {
                kind,
                id: None,
                attributes,
            },
        }
    }
}

/// The changed attributes of a job.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct JobChange<'c> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) status: Option<&'c JobStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) plan_changes: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) output: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) terraform_plan: Option<&'c str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) commit_id: Option<&'c str>,
}

/// The changed attributes of a step.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StepChange<'c> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) status: Option<StepStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) output: Option<&'c str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<&'c str>,
}

fn unless_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    Ok(text.filter(|text| !text.trim().is_empty()))
}

fn null_as_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Value>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_job_is_read_with_its_steps_and_without_what_is_not_known_here() {
        let document: JobDocument = serde_json::from_value(json!({
            "data": {
                "type": "job", "id": "412",
                "attributes": {"status": "running", "terraformPlan": "", "output": null, "newer": {"a": 1}},
                "relationships": {"step": {"data": [{"type": "step", "id": "a"}, {"type": "step", "id": "b"}]},
                                  "workspace": {"data": {"type": "workspace", "id": "w"}}},
            },
            "included": [
                {"type": "step", "id": "a", "attributes": {"status": "completed", "stepNumber": 100, "output": "log"}},
                {"type": "step", "id": "b", "attributes": {"status": "postponed"}},
                {"type": "workspace", "id": "w"},
            ],
        }))
        .unwrap();
        assert_eq!(document.job().status, JobStatus::Running);
        assert_eq!(document.job().terraform_plan, None);
        assert_eq!(document.template_steps(), 2);
        assert_eq!(
            document.steps().collect::<Vec<_>>(),
            [
                KnownStep {
                    id: "a".into(),
                    status: Some(StepStatus::Completed),
                    number: Some(100),
                    output: Some("log".into())
                },
                KnownStep {
                    id: "b".into(),
                    status: None,
                    number: None,
                    output: None
                },
            ]
        );
    }

    #[test]
    fn a_job_without_steps_is_still_a_job() {
        let document: JobDocument = serde_json::from_value(json!({
            "data": {"attributes": {"status": "queue"}, "relationships": {"step": {"data": null}}},
        }))
        .unwrap();
        assert_eq!(document.template_steps(), 0);
        assert!(document.step("a").is_none());
    }

    #[test]
    fn a_change_names_only_what_changes() {
        let change = JobChange {
            status: Some(&JobStatus::Running),
            ..JobChange::default()
        };
        assert_eq!(
            serde_json::to_value(Change::of("job", "412", change)).unwrap(),
            json!({"data": {"type": "job", "id": "412", "attributes": {"status": "running"}}})
        );
    }
}
