//! Puts secrets in the place of references: first those that the workspace needs, and all others once workspace and tool are
//! ready. It comes before the claim, so a store that cannot be reached leaves the step to another executor.
//!
//! `references` knows where references are. The log masks every secret before this phase returns.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

use job_contract::JobData;
use secrecy::ExposeSecret;
use tracing::warn;

use crate::context::{ResolvedRun, RunContext, child_env};
use crate::error::StepError;
use crate::phases::init::read_declarations;
use crate::references::{Extent, FilledJob, References, has_secret_inputs};

/// The job with the secrets that the workspace needs.
pub(crate) async fn resolve_source<'j>(
    run: &RunContext<'_>,
    job: Cow<'j, JobData>,
) -> Result<Cow<'j, JobData>, StepError> {
    Ok(match fill(run, &job, Extent::Source).await? {
        Some(filled) => Cow::Owned(filled.job),
        None => job,
    })
}

/// Resolves all references of the run. An apply of a stored plan needs only its ephemeral inputs, unless its scripts need all.
/// `planned` is the working directory of such an apply.
pub(crate) async fn resolve_references(
    run: &RunContext<'_>,
    planned: Option<&Path>,
) -> Result<(), StepError> {
    let has_scripts = !run.job.command_list.is_empty() || !run.job.on_failure_list.is_empty();
    let ephemeral;
    let extent = match planned {
        Some(dir) if !has_scripts => {
            ephemeral = ephemeral_inputs(run, dir).await?;
            Extent::NotPlanned(&ephemeral)
        }
        _ => Extent::All,
    };
    let Some(filled) = fill(run, &run.job, extent).await? else {
        return Ok(());
    };
    let env = child_env(run.config, &run.folders, &filled.job)?;
    let resolved = ResolvedRun {
        job: filled.job,
        env,
        expressions: filled.expressions,
    };
    run.resolved.get_or_init(|| resolved);
    Ok(())
}

/// The inputs that are in no plan, if any input has references.
async fn ephemeral_inputs(run: &RunContext<'_>, dir: &Path) -> Result<BTreeSet<String>, StepError> {
    if run.references.is_none() || !has_secret_inputs(&run.job) {
        return Ok(BTreeSet::new());
    }
    let declarations = read_declarations(run, dir).await?;
    let found = declarations.ephemeral(&run.job.variables);
    Ok(found.map(|(name, _)| name.clone()).collect())
}

/// `None` if references are off.
async fn fill(
    run: &RunContext<'_>,
    job: &JobData,
    extent: Extent<'_>,
) -> Result<Option<FilledJob>, StepError> {
    let Some(references) = &run.references else {
        return Ok(None);
    };
    let summary = References::summary(job, extent);
    if let Some(text) = &summary {
        run.log.writer().line(text).await;
    }
    let began = Instant::now();
    let resolving = Box::pin(references.resolve(job, extent));
    let filled = run.unless_stopped(resolving).await?;
    run.log
        .add_secrets(filled.secrets.iter().map(ExposeSecret::expose_secret));
    if summary.is_some() {
        let text = format!("Resolved in {} ms.", began.elapsed().as_millis());
        run.log.writer().line(&text).await;
    }
    for place in &filled.too_short {
        let text = format!(
            "WARNING: a secret in {place} has less than 6 bytes, so the log cannot mask it."
        );
        warn!("{text}");
        run.log.writer().line(&text).await;
    }
    Ok(Some(filled))
}
