//! Requests outside JSON:API: job context, log lines, uploaded content (contract 6.6, 7.5, 8.6).

use axum::body::Body;
use serde_json::{Map, Value, json};

use super::{Answer, Call, JSON, JSON_API, Refusal, json_response, not_found, refuse, response};
use crate::context;
use crate::ledger::Rule;
use crate::platform::Shared;
use crate::records::{Job, Status};
use crate::release::Release;
use crate::streams::{Findings, LogEntry};

/// The answer when Redis is away.
fn unavailable(error: &redis::RedisError) -> Refusal {
    Refusal {
        status: 500,
        rule: None,
        why: error.to_string(),
    }
}

fn find(shared: &Shared, id: &str) -> Option<Job> {
    shared.read(|records| records.jobs.get(&id.parse().ok()?).cloned())
}

/// The context of a job. When there is none, it is empty, or says in newer releases that it is pending.
pub(super) fn context(shared: &Shared, id: &str) -> Answer {
    let found = shared.read(|records| records.contexts.get(&id.parse().ok()?).cloned());
    let document = match (found, shared.settings.release) {
        (Some(found), _) => Value::Object(found),
        (None, Release::Old) => json!({}),
        (None, Release::Newest) if find(shared, id).is_none() => return not_found("such job"),
        (None, Release::Newest) => json!({"structuredOutputStatus": {"state": "PENDING"}}),
    };
    Ok(json_response(200, JSON, &document))
}

/// Replaces the context of a job that has not failed or been cancelled.
pub(super) fn replace_context(shared: &Shared, call: &Call, id: &str) -> Answer {
    call.must_be(JSON)?;
    let about = format!("POST {}", call.path);
    let Value::Object(new) = call.json()? else {
        return refuse(400, Rule::BadDocument, about);
    };
    let Some(job) = find(shared, id) else {
        return not_found("such job");
    };
    if matches!(
        job.status,
        Status::Failed
            | Status::Cancelled
            | Status::Rejected
            | Status::Unknown
            | Status::NotExecuted
    ) {
        // The job may have ended while the request was on its way.
        return Err(Refusal {
            status: 409,
            rule: None,
            why: format!("{about}: the job is {}", job.status),
        });
    }
    let findings = shared.write(|records| {
        let old: Map<String, Value> = records.contexts.remove(&job.id).unwrap_or_default();
        let mut findings = context::findings(job.id, &old, &new);
        if shared.settings.release == Release::Newest {
            findings.extend(context::status_findings(job.id, &new));
        }
        records.contexts.insert(job.id, new.clone());
        findings
    });
    shared.found(findings);
    Ok(json_response(200, JSON, &Value::Object(new)))
}

/// Makes the groups of a job's log stream.
pub(super) async fn create_groups(shared: &Shared, call: &Call, id: &str) -> Answer {
    call.must_be(JSON_API)?;
    let Some(job) = find(shared, id) else {
        return refuse(404, Rule::BadDocument, format!("groups for job {id}"));
    };
    shared
        .streams
        .create_groups(job.id)
        .await
        .map_err(|error| unavailable(&error))?;
    Ok(response(200, "", Body::empty()))
}

/// Appends lines to the log streams of their jobs.
pub(super) async fn append_lines(shared: &Shared, call: &Call) -> Answer {
    call.must_be(JSON_API)?;
    let document = call.json()?;
    let wrong = |what: &Value| refuse(400, Rule::LogEntry, format!("POST /logs: {what}"));
    let Some(lines) = document["data"].as_array() else {
        return wrong(&document);
    };
    for line in lines {
        let Some(entry) = line_of(line) else {
            return wrong(line);
        };
        let Some(job) = find(shared, &entry.job_id) else {
            return wrong(line);
        };
        shared.found(judge_line(&job, &entry));
        let appended = shared.streams.append(job.id, &[entry]).await;
        appended.map_err(|error| unavailable(&error))?;
    }
    Ok(response(200, "", Body::empty()))
}

fn line_of(line: &Value) -> Option<LogEntry> {
    Some(LogEntry {
        job_id: line["jobId"].as_u64()?.to_string(),
        step_id: line["stepId"].as_str()?.to_owned(),
        line_number: line["lineNumber"].as_u64().filter(|number| *number > 0)?,
        output: line["output"].as_str()?.to_owned(),
    })
}

fn judge_line(job: &Job, entry: &LogEntry) -> Findings {
    let line = &entry.output;
    let Some(step) = job.step(&entry.step_id) else {
        return vec![(
            Rule::LogEntry,
            format!("{line:?} of no step of job {}", job.id),
        )];
    };
    let over = matches!(step.status, Status::Completed | Status::Failed);
    let early = !job.status.is_terminal() && !job.status.is_with_an_executor();
    let wrong = if over && job.status != Status::Failed {
        Some((
            Rule::LogAfterEnd,
            format!("job {}: {line:?} when the step was {}", job.id, step.status),
        ))
    } else if early {
        Some((
            Rule::BeforeQueue,
            format!("job {}: {line:?} when it was {}", job.id, job.status),
        ))
    } else {
        None
    };
    wrong.into_iter().collect()
}

/// Content a command line has uploaded.
pub(super) fn content(shared: &Shared, id: &str) -> Answer {
    match shared.read(|records| records.uploads.get(id).cloned()) {
        Some(content) => Ok(response(
            200,
            "application/octet-stream",
            Body::from(content),
        )),
        None => not_found("such content"),
    }
}
