//! Reads the state where the platform reads it, without the tool.

use std::io::{BufReader, Read};
use std::time::Duration;

use artifact_store::{BackendSettings, Condition, S3Login, StoreError};
use job_contract::chain;
use tokio::time::timeout;
use tracing::warn;

use crate::context::RunContext;
use crate::error::StepError;
use crate::terraform::state_summary::StateSummary;

/// Variables with the key by which a backend has its state encrypted in the bucket.
const CUSTOMER_KEYS: [&str; 2] = ["AWS_SSE_CUSTOMER_KEY", "GOOGLE_ENCRYPTION_KEY"];
/// How long the store may take to show a state that is only compared.
pub(crate) const SUMMARY_TIMEOUT: Duration = Duration::from_secs(10);

/// What the store has where the platform reads the state.
#[derive(Debug)]
pub(crate) enum Stored<T> {
    Nothing,
    State(T),
    /// It is not known. The store's client may not read it, although the tool's backend may.
    Hidden,
}

impl<T> Stored<T> {
    /// What is stored and known.
    pub(crate) const fn known(&self) -> Option<&T> {
        match self {
            Self::State(state) => Some(state),
            Self::Nothing | Self::Hidden => None,
        }
    }
}

/// Whether the store's client finds the state where the tool's backend does. With roles it uses no endpoint (contract 6.5). It has no
/// key of the run.
pub(crate) fn has_state_in_store(run: &RunContext<'_>) -> bool {
    let has_key = CUSTOMER_KEYS
        .iter()
        .any(|name| run.child_env().get(name).is_some());
    !has_key
        && !matches!(
            &run.backend,
            BackendSettings::S3 {
                endpoint: Some(_),
                login: S3Login::WebIdentity { .. } | S3Login::Container | S3Login::Ambient,
                ..
            }
        )
}

/// Reads the state on a thread that may block. Also returns the condition that it has not changed since.
pub(crate) async fn read_stored<T: Send + 'static>(
    run: &RunContext<'_>,
    read: impl FnOnce(Box<dyn Read + Send>) -> T + Send + 'static,
) -> Result<(Stored<T>, Condition), StepError> {
    let (job, store) = (&run.job, &run.store);
    let opening = async {
        match store
            .open_state(&job.organization_id, &job.workspace_id)
            .await
        {
            Err(error @ StoreError::Refused { .. }) => {
                warn!(error = chain(&error), "the stored state cannot be compared");
                Ok(None)
            }
            opened => opened.map(Some),
        }
    };
    let Some(opened) = run.stored(opening).await? else {
        return Ok((Stored::Hidden, Condition::Any));
    };
    let condition = Condition::unchanged(opened.as_ref());
    let Some(content) = opened.filter(|content| content.size_bytes > 0) else {
        return Ok((Stored::Nothing, condition));
    };
    let reading = move || read(Box::new(BufReader::new(content.into_blocking_reader())));
    let reading = async { Ok::<_, StoreError>(tokio::task::spawn_blocking(reading).await) };
    let read = run.stored(reading).await?;
    let read = read.map_err(|_| StepError::panicked())?;
    Ok((Stored::State(read), condition))
}

/// Reads what the stored state has, within `limit`; `None` if it is not a whole one.
pub(crate) async fn read_summary(
    run: &RunContext<'_>,
    limit: Duration,
) -> Result<(Stored<Option<StateSummary>>, Condition), StepError> {
    if !has_state_in_store(run) {
        return Ok((Stored::Hidden, Condition::Any));
    }
    let reading = timeout(limit, read_stored(run, StateSummary::read)).await;
    reading.unwrap_or_else(|_| {
        Err(StepError::infrastructure(
            "the store did not show the state in time",
        ))
    })
}

/// Reads what the store has before an operation. The tool must not have read it yet: it would not know what is stored in between.
pub(crate) async fn read_before(run: &RunContext<'_>) -> Stored<StateSummary> {
    match read_summary(run, SUMMARY_TIMEOUT).await {
        Ok((Stored::State(Some(summary)), _)) => Stored::State(summary),
        Ok((Stored::Nothing, _)) => Stored::Nothing,
        Ok(_) => Stored::Hidden,
        Err(error) => {
            warn!(%error, "the state before the operation is not known");
            Stored::Hidden
        }
    }
}
