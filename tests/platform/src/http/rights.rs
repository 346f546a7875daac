//! What a token permits (contract 5.2). The newest release classifies internal tokens. Older ones read only their issuer.

use axum::http::Method;
use serde_json::Value;

use super::{Call, Refusal, refuse};
use crate::ledger::Rule;
use crate::platform::Shared;
use crate::records::Records;
use crate::release::Release;
use crate::token::{Bearer, INTERNAL};

/// What a request is about.
#[derive(Debug, Clone, Copy)]
pub(super) enum About<'a> {
    Organization,
    Workspace(&'a str),
    /// A job or one of its steps.
    Job(&'a str),
    Context(&'a str),
    /// The log stream of a job.
    Log(&'a str),
    /// Lines of the log streams of jobs that the body names.
    Lines,
    /// What a command line has uploaded.
    Content,
}

/// Fails unless the token permits the request.
pub(super) fn check(
    shared: &Shared,
    call: &Call,
    bearer: &Bearer,
    about: About<'_>,
) -> Result<(), Refusal> {
    let is_open = shared.settings.release == Release::Old;
    let is_permitted = if bearer.issuer == INTERNAL {
        is_open || shared.read(|records| permits(records, call, bearer, about))
    } else {
        let is_for_programs = matches!(about, About::Log(_) | About::Lines | About::Content);
        call.method == Method::GET && !is_for_programs
    };
    if is_permitted {
        return Ok(());
    }
    let (issuer, subject) = (&bearer.issuer, bearer.subject.as_deref());
    let why = format!("{} {} by {issuer} {subject:?}", call.method, call.path);
    refuse(403, Rule::Forbidden, why)
}

/// The rights of an internal token of the newest release.
fn permits(records: &Records, call: &Call, bearer: &Bearer, about: About<'_>) -> bool {
    let is_own = bearer.organization.is_none()
        || bearer.organization.as_ref() == Some(&records.organization);
    let of_workspace = |workspace: &str| bearer.workspace.as_deref() == Some(workspace) && is_own;
    match about {
        // The rules of logs could not be read. Here they are those of contexts.
        About::Context(job) | About::Log(job) => is_not_of_another(records, bearer, job),
        About::Lines => jobs_of(call).all(|job| is_not_of_another(records, bearer, &job)),
        // Nobody knows whether a token of a workspace is enough.
        About::Content => bearer.is_of_an_executor(),
        About::Organization => bearer.is_of_an_executor() || bearer.workspace.is_some() && is_own,
        About::Workspace(workspace) => {
            let has_job = |job: &str| workspace_of(records, job) == Some(workspace);
            bearer.is_of_an_executor()
                || of_workspace(workspace) && bearer.job.as_deref().is_some_and(has_job)
        }
        About::Job(job) => {
            bearer.is_of_an_executor()
                || bearer.job.as_deref() == Some(job)
                    && workspace_of(records, job).is_some_and(of_workspace)
        }
    }
}

/// Whether the token names no job and no workspace but these. Its subject does not matter.
fn is_not_of_another(records: &Records, bearer: &Bearer, job: &str) -> bool {
    let of_job = bearer.job.as_deref().is_none_or(|named| named == job);
    let named = bearer.workspace.as_deref();
    of_job && named.is_none_or(|named| workspace_of(records, job) == Some(named))
}

fn workspace_of<'r>(records: &'r Records, job: &str) -> Option<&'r str> {
    Some(&records.jobs.get(&job.parse().ok()?)?.workspace)
}

/// The jobs of lines.
fn jobs_of(call: &Call) -> impl Iterator<Item = String> {
    let document: Value = serde_json::from_slice(&call.body).unwrap_or_default();
    let lines = document["data"].as_array().cloned().unwrap_or_default();
    lines.into_iter().map(|line| line["jobId"].to_string())
}
