//! Answers requests from the records of this machine, in the platform's documents. So executors need not know which platform
//! the hub has.

use axum::Json;
use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use job_contract::chain;
use job_contract::status::{JobStatus, StepStatus};
use platform::local::{JobRecord, LocalPlatform, StepRecord};
use platform::{History, PlatformError, StepRef};
use pool_protocol::problem::Code;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tracing::error;

use super::forward::{BODY_TIMEOUT, Content, MAX_CONTEXT, Outgoing};
use super::rules::Call;
use crate::http::body as request_body;
use crate::hub::wire::Failure;

/// Where OpenTofu itself lists its releases.
const TOFU_RELEASES: &str = "https://api.github.com/repos/opentofu/opentofu/releases";

/// The records of jobs in a data directory.
#[derive(Debug)]
pub(crate) struct Records(LocalPlatform);

/// A document with one resource.
#[derive(Debug, Deserialize)]
struct Document<A> {
    data: Resource<A>,
}

#[derive(Debug, Deserialize)]
struct Resource<A> {
    attributes: A,
}

/// What a report changes of a job.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct JobChange {
    status: Option<JobStatus>,
    plan_changes: Option<bool>,
    terraform_plan: Option<String>,
    commit_id: Option<String>,
}

/// What a report changes of a step.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StepChange {
    status: Option<StepStatus>,
    output: Option<String>,
}

impl Records {
    pub(super) const fn new(records: LocalPlatform) -> Self {
        Self(records)
    }

    /// Carries the request out.
    pub(super) async fn answer(
        &self,
        outgoing: Outgoing,
        step: &StepRef,
    ) -> Result<Response, Failure> {
        let records = &self.0;
        let document = match outgoing.body {
            Content::None => Vec::new(),
            Content::Document(bytes) => bytes.to_vec(),
            Content::Context(body) => context(body).await?,
        };
        match outgoing.call {
            Call::ReadJob => match records
                .job(&step.job_id)
                .map_err(|error| unavailable(&error))?
            {
                Some(record) => Ok(answer(job_document(&step.job_id, &record))),
                None => Ok(StatusCode::NOT_FOUND.into_response()),
            },
            Call::ChangeJob => {
                let change: Document<JobChange> = read(&document)?;
                let change = change.data.attributes;
                let changed = records.update_job(step, |record| change.apply(record));
                changed.map_err(|error| unavailable(&error))?;
                Ok(StatusCode::NO_CONTENT.into_response())
            }
            Call::ChangeStep => {
                let change: Document<StepChange> = read(&document)?;
                let change = change.data.attributes;
                let changed = records.update_job(step, |record| {
                    change.apply(record.step_mut(step));
                });
                changed.map_err(|error| unavailable(&error))?;
                Ok(StatusCode::NO_CONTENT.into_response())
            }
            Call::ReadHistory => {
                let record = records
                    .job(&step.job_id)
                    .map_err(|error| unavailable(&error))?;
                let history = record.map(|record| record.history).unwrap_or_default();
                let resource = |state: &History| json!({"type": "history", "id": state.md5, "attributes": state});
                let data: Vec<Value> = history.iter().map(resource).collect();
                Ok(answer(json!({ "data": data })))
            }
            Call::AddHistory => {
                let state: Document<History> = read(&document)?;
                let state = state.data.attributes;
                let added = records.update_job(step, |record| {
                    // An executor that got no answer sends it again.
                    if !record.history.contains(&state) {
                        record.history.push(state);
                    }
                });
                added.map_err(|error| unavailable(&error))?;
                Ok((StatusCode::CREATED, Json(json!({}))).into_response())
            }
            // The log passes here for the status page. The executor stores all of it at its end.
            Call::SetUpLog | Call::AddLines => Ok(answer(json!({}))),
            Call::ReadContext => {
                let context = records
                    .context(&step.job_id)
                    .map_err(|error| unavailable(&error))?;
                Ok(answer(Value::Object(context)))
            }
            Call::WriteContext => {
                let context: Map<String, Value> = read(&document)?;
                let merged = records.merge_context(&step.job_id, &context);
                merged.map_err(|error| unavailable(&error))?;
                Ok(answer(json!({})))
            }
            Call::ReadContent => {
                let text = "the job has no content at the platform";
                Err(Failure::new(Code::ExecutorPoolForbidden, text))
            }
            Call::ReadReleases => {
                let location = HeaderValue::from_static(TOFU_RELEASES);
                Ok((StatusCode::FOUND, [(header::LOCATION, location)]).into_response())
            }
        }
    }
}

impl JobChange {
    /// A job that was cancelled or rejected stays so.
    fn apply(self, record: &mut JobRecord) {
        if matches!(record.status, JobStatus::Cancelled | JobStatus::Rejected) {
            return;
        }
        if let Some(status) = self.status {
            record.status = status;
        }
        if let Some(changes) = self.plan_changes {
            record.plan_changes = changes;
        }
        if let Some(plan) = self.terraform_plan {
            record.terraform_plan = Some(plan).filter(|plan| !plan.is_empty());
        }
        if let Some(commit) = self.commit_id {
            record.commit_id = Some(commit);
        }
        record.complete_when_done();
    }
}

impl StepChange {
    fn apply(self, step: &mut StepRecord) {
        if let Some(status) = self.status {
            step.status = status;
        }
        if let Some(output) = self.output {
            step.output = Some(output);
        }
    }
}

/// A job as the platform shows it.
fn job_document(job: &str, record: &JobRecord) -> Value {
    let steps = record.steps.iter().zip(1..);
    let (links, included): (Vec<Value>, Vec<Value>) = steps
        .map(|(step, number)| {
            let link = json!({"type": "step", "id": step.id});
            let mut resource = link.clone();
            resource["attributes"] =
                json!({"status": step.status, "stepNumber": number, "output": step.output});
            (link, resource)
        })
        .unzip();
    json!({
        "data": {
            "type": "job", "id": job,
            "attributes": {
                "status": record.status, "planChanges": record.plan_changes,
                "terraformPlan": record.terraform_plan, "commitId": record.commit_id,
            },
            "relationships": {"step": {"data": links}},
        },
        "included": included,
    })
}

async fn context(body: Body) -> Result<Vec<u8>, Failure> {
    let unread = || Failure::new(Code::RequestInvalid, "the context cannot be read");
    tokio::time::timeout(BODY_TIMEOUT, request_body::read(body, MAX_CONTEXT))
        .await
        .map_err(|_| unread())?
        .map_err(|_| unread())
}

fn read<T: DeserializeOwned>(document: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(document).map_err(|error| {
        let place = format!("line {} column {}", error.line(), error.column());
        let text = format!("the document cannot be read: {place}");
        Failure::new(Code::RequestInvalid, text)
    })
}

fn answer(document: Value) -> Response {
    let mut response = Json(document).into_response();
    // What an executor reads is for it alone.
    let no_store = HeaderValue::from_static("no-store");
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, no_store);
    response
}

fn unavailable(error: &PlatformError) -> Failure {
    error!(
        error = chain(error),
        "the record of a job cannot be read or written"
    );
    let text = "the hub cannot use the records of jobs now: try again";
    Failure::new(Code::Other, text).with_status(StatusCode::BAD_GATEWAY)
}

#[cfg(test)]
mod tests {
    use axum::body::Bytes;
    use job_contract::StepType;

    use super::*;

    struct Fixture {
        _folder: tempfile::TempDir,
        records: Records,
        plan: StepRef,
    }

    fn fixture() -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let records = LocalPlatform::new(folder.path());
        let steps = vec![
            StepRecord::pending("plan", StepType::Plan.name()),
            StepRecord::pending("apply", StepType::Apply.name()),
        ];
        records
            .put_job("7", &JobRecord::queued("org", "ws", steps))
            .unwrap();
        let plan = StepRef {
            organization_id: "org".into(),
            workspace_id: "ws".into(),
            job_id: "7".into(),
            step_id: "plan".into(),
            step_type: StepType::Plan.name().into(),
        };
        Fixture {
            _folder: folder,
            records: Records::new(records),
            plan,
        }
    }

    impl Fixture {
        async fn call(&self, call: Call, body: Option<Value>) -> Response {
            let body = match body {
                Some(value) if call == Call::WriteContext => {
                    Content::Context(Body::from(value.to_string()))
                }
                Some(value) => Content::Document(Bytes::from(value.to_string())),
                None => Content::None,
            };
            let outgoing = Outgoing {
                call,
                content: String::new(),
                body,
            };
            self.records.answer(outgoing, &self.plan).await.unwrap()
        }

        async fn change(&self, call: Call, attributes: Value) {
            let body = json!({"data": {"attributes": attributes}});
            let response = self.call(call, Some(body)).await;
            assert!(response.status().is_success(), "{response:?}");
        }

        async fn read(&self, call: Call) -> Value {
            let response = self.call(call, None).await;
            let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await;
            serde_json::from_slice(&bytes.unwrap()).unwrap()
        }

        fn record(&self) -> JobRecord {
            self.records.0.job("7").unwrap().unwrap()
        }
    }

    #[tokio::test]
    async fn reports_of_a_plan_change_the_record_as_those_of_a_local_executor() {
        let fixture = fixture();
        fixture
            .change(
                Call::ChangeJob,
                json!({"status": "running", "commitId": "9f"}),
            )
            .await;
        fixture
            .change(
                Call::ChangeStep,
                json!({"status": "running", "output": "log"}),
            )
            .await;
        let seen = fixture.read(Call::ReadJob).await;
        assert_eq!(seen["data"]["attributes"]["status"], "running");
        assert_eq!(seen["included"][0]["attributes"]["status"], "running");
        let links = seen["data"]["relationships"]["step"]["data"].as_array();
        assert_eq!(links.unwrap().len(), 2);
        fixture
            .change(Call::ChangeStep, json!({"status": "completed"}))
            .await;
        let done = json!({"status": "pending", "planChanges": true, "terraformPlan": "/plan"});
        fixture.change(Call::ChangeJob, done).await;
        let record = fixture.record();
        assert_eq!(record.status, JobStatus::Pending);
        assert_eq!(record.terraform_plan.as_deref(), Some("/plan"));
        assert_eq!(record.step("plan").unwrap().status, StepStatus::Completed);
        assert!(record.plan_changes);
    }

    #[tokio::test]
    async fn a_plan_without_changes_completes_the_job_and_its_next_step_does_not_run() {
        let fixture = fixture();
        let done = json!({"status": "completed", "planChanges": false, "terraformPlan": ""});
        fixture.change(Call::ChangeJob, done).await;
        let record = fixture.record();
        assert_eq!(record.terraform_plan, None);
        assert_eq!(
            record.step("apply").unwrap().status,
            StepStatus::NotExecuted
        );
    }

    #[tokio::test]
    async fn a_cancelled_job_stays_cancelled() {
        let fixture = fixture();
        fixture
            .records
            .0
            .update_job(&fixture.plan, |record| {
                record.status = JobStatus::Cancelled;
            })
            .unwrap();
        fixture
            .change(Call::ChangeJob, json!({"status": "completed"}))
            .await;
        assert_eq!(fixture.record().status, JobStatus::Cancelled);
    }

    #[tokio::test]
    async fn states_are_recorded_once_and_the_context_is_merged() {
        let fixture = fixture();
        let state = json!({"output": "https://hub/state", "jobReference": "7", "serial": 1, "md5": "5f", "lineage": "l"});
        for _ in 0..2 {
            fixture.change(Call::AddHistory, state.clone()).await;
        }
        let history = fixture.read(Call::ReadHistory).await;
        assert_eq!(history["data"].as_array().unwrap().len(), 1);
        assert_eq!(history["data"][0]["attributes"], state);
        for part in [json!({"a": 1}), json!({"b": 2})] {
            fixture.call(Call::WriteContext, Some(part)).await;
        }
        assert_eq!(
            fixture.read(Call::ReadContext).await,
            json!({"a": 1, "b": 2})
        );
        let lines = fixture.call(Call::AddLines, Some(json!({}))).await;
        assert!(lines.status().is_success());
    }
}
