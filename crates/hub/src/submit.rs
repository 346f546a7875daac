//! Stores dispatches in the queue of a pool.

use std::sync::Arc;

use job_contract::{JobData, encoding};
use pool_protocol::id::{PoolName, TaskId};
use pool_store::{Content, Payload, Refusal, Submission, Submitted};
use reporter::dispatch::{Acceptance, DispatchError};
use tokio::task::spawn_blocking;
use tracing::error;

use super::Hub;
use super::json_check::{MAX_DEPTH, is_readable};
use super::pools::Pools;

/// The longest document of a pool.
const MAX_DOCUMENT_BYTES: usize = 4 * 1024 * 1024;
/// The length of a `traceparent` of version 00.
const TRACEPARENT: usize = 55;

/// Why a dispatch was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    #[error("there is no pool `{}`", .0.escape_debug())]
    UnknownPool(String),
    #[error("{0}")]
    Store(#[from] pool_store::Error),
}

impl From<SubmitError> for DispatchError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::Store(pool_store::Error::Refused(Refusal::RequestInvalid(reason))) => {
                Self::Invalid(reason)
            }
            error => Self::Unavailable(error.to_string()),
        }
    }
}

impl Hub {
    /// Stores the job of a dispatch durably, with its document as the platform sent it. `job` has the ids and the type. A job
    /// that the pool does not take is stored too, and its step fails with the reason.
    pub async fn submit(
        self: &Arc<Self>,
        pool: &str,
        json: Vec<u8>,
        job: JobData,
        traceparent: Option<&str>,
    ) -> Result<Acceptance, SubmitError> {
        let pools = self.pools.current();
        let known = pool.parse::<PoolName>().ok();
        let Some(name) = known.filter(|name| pools.get(name).is_some()) else {
            return Err(SubmitError::UnknownPool(pool.chars().take(64).collect()));
        };
        let task = TaskId::new();
        let (pool, organization) = (name.clone(), job.organization_id.clone());
        // A long document keeps a thread busy for a while.
        let content = spawn_blocking(move || content(&pools, &pool, &organization, json)).await;
        let content = content.map_err(|error| pool_store::Error::Unavailable(error.into()))?;
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
        let hub = Arc::clone(self);
        let stored = tokio::spawn(async move {
            let submitted = hub.store.submit(submission).await?;
            if let Err(error) = hub.reporter.mark_queued(&job) {
                // The run is confirmed when a later delivery succeeds in this.
                return Err(pool_store::Error::Unavailable(Box::new(error)));
            }
            if let Submitted::New(task) = submitted {
                hub.heartbeats
                    .start(&task, || hub.reporter.start_heartbeat(&job.job_id));
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

/// Returns what is stored of a document, or why the pool does not take it.
fn content(
    pools: &Pools,
    name: &PoolName,
    organization: &str,
    json: Vec<u8>,
) -> Result<Payload, String> {
    if !pools.get(name).is_some_and(|pool| pool.takes(organization)) {
        return Err(format!(
            "pool `{name}` takes no runs of organization `{organization}`: add it to the organizations of the pool"
        ));
    }
    check(&json, name)?;
    Ok(Payload(json))
}

/// Checks whether each agent can start the job: it reads the document, and on target `kubernetes` a Secret holds it. The hub
/// does not know the targets of agents that may come.
fn check(json: &[u8], pool: &PoolName) -> Result<(), String> {
    let advice = "make its variables and scripts shorter";
    let bytes = json.len();
    if bytes > MAX_DOCUMENT_BYTES {
        Err(format!(
            "the job document has {bytes} bytes, and pool `{pool}` takes {MAX_DOCUMENT_BYTES}: {advice}"
        ))
    } else if !encoding::fits_environment(json) {
        Err(format!(
            "the job document has {bytes} bytes, and is too large for a Secret, which holds {} bytes of it as compressed \
             base64: {advice}",
            encoding::MAX_ENVIRONMENT_BYTES
        ))
    } else if !is_readable(json) {
        Err(format!(
            "the job document has a value that agents cannot read: more than {MAX_DEPTH} levels, half of a surrogate pair, \
             or a number without end"
        ))
    } else {
        Ok(())
    }
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
    #[case::usual(b"a".repeat(MAX_DOCUMENT_BYTES - 8), None)]
    #[case::too_long(b"a".repeat(MAX_DOCUMENT_BYTES - 7), Some("takes 4194304"))]
    #[case::for_a_secret(noise(780_000), None)]
    #[case::for_a_secret_if_compressed(noise(1_200_000), None)]
    #[case::too_large_for_a_secret(noise(1_500_000), Some("too large for a Secret"))]
    #[case::unreadable(b"\\ud800".to_vec(), Some("cannot read"))]
    fn a_pool_takes_what_each_agent_can_start(
        #[case] text: Vec<u8>,
        #[case] refused: Option<&str>,
    ) {
        let json = [br#"{"a":""#, &*text, br#""}"#].concat();
        let checked = check(&json, &"eu".parse().unwrap());
        let reason = checked.as_ref().err();
        assert_eq!(reason.is_some(), refused.is_some(), "{reason:?}");
        assert!(
            reason.is_none_or(|reason| reason.contains(refused.unwrap())),
            "{reason:?}"
        );
    }

    /// Text that does not compress well.
    fn noise(bytes: usize) -> Vec<u8> {
        let mut seed = 88_172_645_463_325_252_u64;
        let mut next = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            b'a' + u8::try_from(seed % 26).unwrap()
        };
        (0..bytes).map(|_| next()).collect()
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
