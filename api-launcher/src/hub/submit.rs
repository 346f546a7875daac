//! Stores dispatches in the queue of a pool.

use std::sync::Arc;

use job_contract::{Document, JobData};
use pool_protocol::id::{PoolName, TaskId};
use pool_store::{Content, Payload, Submission, Submitted};
use serde_json::Value;
use tracing::{error, warn};

use super::Hub;
use super::pools::Pool;
use crate::dispatch::Acceptance;
use crate::sealing::{Envelope, SealError};

/// The longest document of a pool. A longer one does not fit into Secrets of a cluster.
const MAX_DOCUMENT_BYTES: usize = 4 * 1024 * 1024;
/// The deepest nesting of a document. Its readers accept 128 levels, and messages wrap it.
const MAX_DEPTH: usize = 100;
/// The length of a `traceparent` of version 00.
const TRACEPARENT: usize = 55;

/// Why a dispatch was not accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SubmitError {
    #[error("there is no pool `{}`", .0.escape_debug())]
    UnknownPool(String),
    #[error("{0}")]
    Store(#[from] pool_store::Error),
}

impl Hub {
    /// Stores the job of a dispatch durably. A job that the pool does not take is stored too, and its step fails with
    /// the reason.
    pub(crate) async fn submit(
        self: &Arc<Self>,
        pool: &str,
        job: &Document,
        traceparent: Option<&str>,
    ) -> Result<Acceptance, SubmitError> {
        let pools = self.pools.current();
        let known = pool.parse::<PoolName>().ok();
        let known = known.and_then(|name| Some((pools.get(&name)?, name)));
        let Some((settings, name)) = known else {
            return Err(SubmitError::UnknownPool(pool.chars().take(64).collect()));
        };
        let task = TaskId::new();
        let content = if !settings.takes(&job.organization_id) {
            Err(format!(
                "pool `{name}` takes no runs of organization `{}`: add it to the organizations of the pool",
                job.organization_id
            ))
        } else if job.json().len() > MAX_DOCUMENT_BYTES {
            Err(format!(
                "the job document has {} bytes, and pool `{name}` takes {MAX_DOCUMENT_BYTES}: make its variables and scripts shorter",
                job.json().len()
            ))
        } else if !is_readable(job.json()) {
            Err(format!(
                "the job document has a value that agents cannot read: more than {MAX_DEPTH} levels, half of a surrogate pair, \
                 or a number without end"
            ))
        } else {
            let envelope = Envelope {
                pool: &name,
                task,
                job: &job.job_id,
                step: &job.step_id,
            };
            payload(settings, &envelope, job).map_err(|error| error.to_string())
        };
        if let Err(reason) = &content {
            warn!(pool = %name, job_id = job.job_id, step_id = job.step_id, reason, "refused a run of a pool");
        }
        let submission = Submission {
            task,
            pool: name,
            organization: job.organization_id.clone(),
            workspace: job.workspace_id.clone(),
            job: job.job_id.clone(),
            step: job.step_id.clone(),
            kind: job.step_type.clone().unwrap_or_default(),
            traceparent: traceparent
                .filter(|text| is_traceparent(text))
                .map(str::to_owned),
            content: content.map_or_else(Content::Refused, Content::Payload),
        };
        // The spawned task stores the run and starts its heartbeat even if the sender disconnects.
        let (hub, job_id) = (Arc::clone(self), job.job_id.clone());
        let queued = JobData::clone(job);
        let stored = tokio::spawn(async move {
            let submitted = hub.store.submit(submission).await?;
            if let Err(error) = hub.reporter.mark_queued(&queued) {
                // The run is confirmed when a later delivery succeeds in this.
                return Err(pool_store::Error::Unavailable(Box::new(error)));
            }
            if let Submitted::New(task) = submitted {
                hub.heartbeats.start(&*hub.reporter, task, &job_id);
            }
            Ok::<_, pool_store::Error>(submitted)
        });
        let submitted = stored
            .await
            .map_err(|error| pool_store::Error::Unavailable(error.into()))
            .flatten()
            .inspect_err(|error| error!(%error, "a run of a pool could not be stored"))?;
        Ok(match submitted {
            Submitted::New(_) => Acceptance::New,
            Submitted::Duplicate(_) => Acceptance::Duplicate,
        })
    }
}

/// Returns whether every agent can read this JSON. The properties that the hub does not know are not checked before.
fn is_readable(json: &[u8]) -> bool {
    fn depth(value: &Value) -> usize {
        match value {
            Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
            Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
            _ => 0,
        }
    }
    serde_json::from_slice(json).is_ok_and(|value| depth(&value) <= MAX_DEPTH)
}

/// What is stored of a document: nothing that the hub can read, if the pool has a key.
fn payload(pool: &Pool, envelope: &Envelope<'_>, job: &Document) -> Result<Payload, SealError> {
    let Some(key) = pool.public_keys.first() else {
        return Ok(Payload {
            key_id: None,
            data: job.json().to_vec(),
        });
    };
    Ok(Payload {
        key_id: Some(key.id().to_owned()),
        data: key.seal(envelope, job.json())?,
    })
}

/// Returns whether a text is a `traceparent` of W3C Trace Context.
fn is_traceparent(text: &str) -> bool {
    let digits = |part: &str| {
        part.bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let zero = |part: &str| part.bytes().all(|byte| byte == b'0');
    let parts: Vec<&str> = text.split('-').collect();
    text.len() == TRACEPARENT
        && matches!(parts[..], ["00", trace, span, flags]
            if trace.len() == 32 && span.len() == 16
                && [trace, span, flags].into_iter().all(digits)
                && !zero(trace) && !zero(span))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::flat(r#"{"jobId":"7"}"#.to_owned(), true)]
    #[case::deep(nested(99), true)]
    #[case::too_deep(nested(100), false)]
    #[case::far_too_deep(nested(100_000), false)]
    #[case::half_a_pair(r#"{"x":"\ud800"}"#.to_owned(), false)]
    #[case::endless(r#"{"x":1e999}"#.to_owned(), false)]
    fn what_an_agent_cannot_read_is_not_stored(#[case] json: String, #[case] expected: bool) {
        assert_eq!(is_readable(json.as_bytes()), expected);
    }

    fn nested(levels: usize) -> String {
        format!(r#"{{"x":{}{}}}"#, "[".repeat(levels), "]".repeat(levels))
    }

    #[rstest]
    #[case("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", true)]
    #[case("00-00000000000000000000000000000000-b7ad6b7169203331-01", false)]
    #[case("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", false)]
    #[case("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", false)]
    #[case("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", false)]
    #[case("", false)]
    fn only_a_traceparent_is_passed_on(#[case] text: &str, #[case] expected: bool) {
        assert_eq!(is_traceparent(text), expected);
    }
}
