//! Answers requests from the records of this machine, in the platform's documents. So executors need not know which platform
//! the hub has.

use axum::Json;
use axum::body::HttpBody as _;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use job_contract::chain;
use job_contract::status::JobStatus;
use platform::local::{JobRecord, LocalPlatform, StepRecord};
use platform::{History, PlatformError, StepRef};
use pool_protocol::problem::Code;
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::error;

use super::body::{Document, JobChange, StepChange};
use super::forward::{CALL_TIMEOUT, Content, Outgoing};
use super::rules::{Call, RelayRefusal};
use super::turns::Turn;
use crate::failure::Failure;
use crate::passing;

/// Where OpenTofu itself lists its releases.
const TOFU_RELEASES: &str = "https://api.github.com/repos/opentofu/opentofu/releases";

/// The states of one job that are recorded.
const MAX_STATES: usize = 1000;
/// The bytes of their texts. The record is a file that each change writes anew.
const MAX_STATE_BYTES: usize = 512 * 1024;

/// Carries the request out. Records are files, so a thread that may wait does it.
pub(super) async fn answer(
    records: &LocalPlatform,
    outgoing: Outgoing,
    step: &StepRef,
    turn: Turn,
) -> Result<Response, Failure> {
    let (records, step) = (records.clone(), step.clone());
    let answered = tokio::task::spawn_blocking(move || {
        // The work goes on if the executor disconnects, and so does its turn.
        let answer = answer_now(&records, &outgoing, &step);
        (answer, outgoing.taken, turn)
    });
    let (answer, mut taken, turn) = answered.await.map_err(|error| {
        error!(%error, "a request to the records of jobs has failed");
        Failure::new(Code::Other, "the hub could not answer")
    })?;
    let answer = answer?;
    // What the executor has not read is in memory.
    let length = answer.body().size_hint().lower();
    if !usize::try_from(length).is_ok_and(|length| taken.grow(length)) {
        return Err(Failure::new(
            Code::RateLimited,
            RelayRefusal::Busy.to_string(),
        ));
    }
    Ok(passing::whole(answer, CALL_TIMEOUT, (taken, turn)).await)
}

fn answer_now(
    records: &LocalPlatform,
    outgoing: &Outgoing,
    step: &StepRef,
) -> Result<Response, Failure> {
    let document: &[u8] = match &outgoing.body {
        Content::Document(bytes) => bytes,
        Content::None | Content::Context(_) => &[],
    };
    match outgoing.call {
        Call::ReadJob => {
            let record = records.job(&step.job_id);
            if let Some(record) = record.map_err(|error| unavailable(&error))? {
                return Ok(document_of(job_document(&step.job_id, &record)));
            }
            // A 404 of a proxy has another body, and says nothing about a job.
            let missing = json!({"errors": [{"detail": "there is no such job"}]});
            Ok((StatusCode::NOT_FOUND, document_of(missing)).into_response())
        }
        Call::ChangeJob => {
            let change: Document<'_, JobChange> = read(document)?;
            let change = change.data.attributes;
            let changed = records.update_job(step, |record| change.apply(record));
            changed.map_err(|error| unavailable(&error))?;
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        Call::ChangeStep => {
            let change: Document<'_, StepChange> = read(document)?;
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
            let resource =
                |state: &History| json!({"type": "history", "id": state.md5, "attributes": state});
            let data: Vec<Value> = history.iter().map(resource).collect();
            Ok(document_of(json!({ "data": data })))
        }
        Call::AddHistory => {
            let state: Document<'_, History> = read(document)?;
            let state = state.data.attributes;
            let mut is_full = false;
            let added = records.update_job(step, |record| {
                // An executor that got no answer sends it again.
                if record.history.contains(&state) {
                    return;
                }
                let bytes: usize = record.history.iter().chain([&state]).map(size).sum();
                is_full = record.history.len() >= MAX_STATES || bytes > MAX_STATE_BYTES;
                if !is_full {
                    record.history.push(state);
                }
            });
            added.map_err(|error| unavailable(&error))?;
            if is_full {
                let text = format!(
                    "the job has published {MAX_STATES} states or {MAX_STATE_BYTES} bytes about them, and no more are recorded"
                );
                return Err(Failure::new(Code::RequestInvalid, text));
            }
            Ok((StatusCode::CREATED, Json(json!({}))).into_response())
        }
        // The log passes here for the status page. The executor stores all of it at its end.
        Call::SetUpLog | Call::AddLines | Call::ShowChanges => Ok(document_of(json!({}))),
        Call::ReadHosts => Ok(document_of(json!({"hosts": []}))),
        Call::ReadRegistry | Call::ReadModule | Call::OfScript => {
            let text = "the hub has no platform";
            Err(Failure::new(Code::ExecutorPoolForbidden, text))
        }
        Call::ReadContext => {
            let context = records
                .stored_context(&step.job_id)
                .map_err(|error| unavailable(&error))?;
            let context = context.unwrap_or_else(|| b"{}".to_vec());
            let json = HeaderValue::from_static("application/json");
            Ok(for_it_alone(
                ([(header::CONTENT_TYPE, json)], context).into_response(),
            ))
        }
        // As at the platform, a context replaces the one before. Executors read it, and send it back with more.
        Call::WriteContext => {
            let stored = records.store_context(&step.job_id, document);
            stored.map_err(|error| unavailable(&error))?;
            Ok(document_of(json!({})))
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

/// The bytes of the texts of a state.
const fn size(state: &History) -> usize {
    state.output.len() + state.job_reference.len() + state.md5.len() + state.lineage.len()
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

fn read<'d, T: Deserialize<'d>>(document: &'d [u8]) -> Result<T, Failure> {
    serde_json::from_slice(document).map_err(|error| {
        let place = format!("line {} column {}", error.line(), error.column());
        let text = format!("the document cannot be read: {place}");
        Failure::new(Code::RequestInvalid, text)
    })
}

fn document_of(document: Value) -> Response {
    for_it_alone(Json(document).into_response())
}

/// What an executor reads is for it alone.
fn for_it_alone(mut response: Response) -> Response {
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
    use std::time::Duration;

    use axum::body::Bytes;
    use job_contract::StepType;
    use job_contract::status::StepStatus;
    use pool_protocol::id::TaskId;

    use super::super::turns::Turns;
    use axum::http::Method;

    use super::*;
    use crate::budget::Budget;

    struct Fixture {
        _folder: tempfile::TempDir,
        records: LocalPlatform,
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
            records,
            plan,
        }
    }

    impl Fixture {
        fn call(&self, call: Call, body: Option<Value>) -> Result<Response, Failure> {
            let document = |value: Value| Content::Document(Bytes::from(value.to_string()));
            let outgoing = Outgoing {
                call,
                method: Method::GET,
                path: Vec::new(),
                query: None,
                body: body.map_or(Content::None, document),
                taken: Budget::new().of_pool(&"eu".parse().unwrap()),
            };
            answer_now(&self.records, &outgoing, &self.plan)
        }

        fn change(&self, call: Call, attributes: impl Into<Value>) {
            let body = json!({"data": {"type": "any", "attributes": attributes.into()}});
            let response = self.call(call, Some(body)).unwrap();
            assert!(response.status().is_success(), "{response:?}");
        }

        async fn read(&self, call: Call) -> Value {
            let response = self.call(call, None).unwrap();
            let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await;
            serde_json::from_slice(&bytes.unwrap()).unwrap()
        }

        fn record(&self) -> JobRecord {
            self.records.job("7").unwrap().unwrap()
        }
    }

    #[tokio::test]
    async fn reports_of_a_plan_change_the_record_as_those_of_a_local_executor() {
        let fixture = fixture();
        fixture.change(
            Call::ChangeJob,
            json!({"status": "running", "commitId": "9f"}),
        );
        fixture.change(
            Call::ChangeStep,
            json!({"status": "running", "output": "log"}),
        );
        let seen = fixture.read(Call::ReadJob).await;
        assert_eq!(seen["data"]["attributes"]["status"], "running");
        assert_eq!(seen["included"][0]["attributes"]["status"], "running");
        let links = seen["data"]["relationships"]["step"]["data"].as_array();
        assert_eq!(links.unwrap().len(), 2);
        fixture.change(Call::ChangeStep, json!({"status": "completed"}));
        let done = json!({"status": "pending", "planChanges": true, "terraformPlan": "/plan"});
        fixture.change(Call::ChangeJob, done);
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
        fixture.change(Call::ChangeJob, done);
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
            .update_job(&fixture.plan, |record| {
                record.status = JobStatus::Cancelled;
            })
            .unwrap();
        fixture.change(Call::ChangeJob, json!({"status": "completed"}));
        assert_eq!(fixture.record().status, JobStatus::Cancelled);
    }

    #[tokio::test]
    async fn states_are_recorded_once_and_a_context_replaces_the_one_before() {
        let fixture = fixture();
        let state = |serial: usize| json!({"output": "https://hub/state", "jobReference": "7", "serial": serial, "md5": "5f", "lineage": "l"});
        for _ in 0..2 {
            fixture.change(Call::AddHistory, state(1));
        }
        let history = fixture.read(Call::ReadHistory).await;
        assert_eq!(history["data"].as_array().unwrap().len(), 1);
        assert_eq!(history["data"][0]["attributes"], state(1));
        assert_eq!(fixture.read(Call::ReadContext).await, json!({}));
        for context in [json!({"a": 1}), json!({"b": {"c": 2}})] {
            let stored = fixture.call(Call::WriteContext, Some(context.clone()));
            assert!(stored.unwrap().status().is_success());
            assert_eq!(fixture.read(Call::ReadContext).await, context);
        }
        let lines = fixture.call(Call::AddLines, Some(json!({}))).unwrap();
        assert!(lines.status().is_success());
    }

    #[test]
    fn the_record_of_a_job_has_a_limit() {
        let fixture = fixture();
        let state = |serial: usize| History {
            output: "https://hub/state".into(),
            job_reference: "7".into(),
            serial: serial as u64,
            md5: "5f".into(),
            lineage: "l".into(),
        };
        let fill = |record: &mut JobRecord| record.history = (0..MAX_STATES).map(state).collect();
        fixture.records.update_job(&fixture.plan, fill).unwrap();
        let add = |state: History| {
            let body = json!({"data": {"type": "any", "attributes": state}});
            fixture.call(Call::AddHistory, Some(body))
        };
        assert!(add(state(0)).is_ok(), "it is recorded already");
        assert!(add(state(MAX_STATES)).is_err());
        assert_eq!(fixture.record().history.len(), MAX_STATES);
    }

    #[test]
    fn the_texts_of_states_have_a_limit_in_all() {
        let fixture = fixture();
        let add = |serial: usize| {
            let output = "x".repeat(15_000);
            let state = json!({"output": output, "jobReference": "7", "serial": serial, "md5": "5f", "lineage": "l"});
            fixture.call(
                Call::AddHistory,
                Some(json!({"data": {"type": "any", "attributes": state}})),
            )
        };
        let fits = MAX_STATE_BYTES / 15_000;
        assert!((0..fits).all(|serial| add(serial).is_ok()));
        assert!(add(fits).is_err());
        assert_eq!(fixture.record().history.len(), fits);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_keeps_its_turn_and_its_bytes_until_it_is_read() {
        let (fixture, budget, turns) = (fixture(), Budget::new(), Turns::new());
        let context = json!({"a": "x".repeat(3 << 20)});
        fixture.call(Call::WriteContext, Some(context)).unwrap();
        let (eu, task) = ("eu".parse().unwrap(), TaskId::new());
        let read = async || {
            let outgoing = Outgoing {
                call: Call::ReadContext,
                method: Method::GET,
                path: Vec::new(),
                query: None,
                body: Content::None,
                taken: budget.of_task(&eu, task),
            };
            let turn = turns.next(&eu, turns.place(task).unwrap()).await.unwrap();
            answer(&fixture.records, outgoing, &fixture.plan, turn).await
        };
        let first = read().await.unwrap();
        let refused = read().await.unwrap_err();
        assert_eq!(
            refused.code(),
            Code::RateLimited,
            "a second one is too much"
        );
        let places: Vec<_> = (0..8).map_while(|_| turns.place(task).ok()).collect();
        assert_eq!(places.len(), 7, "the answer is on its way");
        drop(places);
        let whole = axum::body::to_bytes(first.into_body(), usize::MAX).await;
        assert!(whole.unwrap().len() > 3 << 20);
        tokio::time::sleep(Duration::from_secs(1)).await;
        read().await.unwrap();
    }
}
