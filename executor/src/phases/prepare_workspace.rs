//! Prepares the workspace of the step: waits for its folder, and fetches the sources and the extension repository. An apply takes
//! the commit of its plan.
//!
//! This phase turns job and settings into a request. `workspace` knows how sources are fetched.

use std::borrow::Cow;
use std::ffi::OsString;
use std::mem::discriminant;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use git_logins::{Logins, Settings};
use job_contract::{Exit, JobData};
use runtime::handover;
use secrecy::{ExposeSecret, SecretString};
use secret_stores::RunIds;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::context::RunContext;
use crate::error::StepError;
use crate::phases::resolve_references::resolve_source;
use crate::scripts;
use crate::stored_plan::ReviewedPlan;
use crate::workspace::{self, ArchiveLimits, AzureEnvironment, Turn, Workspace, WorkspaceConfig};

/// How often a step checks whether the folder of its workspace is free, and after how long it logs that it waits.
const TURN_POLL: Duration = Duration::from_millis(200);
const TURN_ANNOUNCED_AFTER: Duration = Duration::from_secs(1);

/// The sources of the job, in the folder of its workspace: of an apply, those of its plan.
pub(crate) async fn prepare_workspace(
    run: &RunContext<'_>,
    plan: Option<&ReviewedPlan>,
) -> Result<Workspace, StepError> {
    let planned = plan.and_then(ReviewedPlan::commit);
    let job = resolve_source(run, with_content(run).await?).await?;
    let environment: Vec<_> = run
        .child_env()
        .inherited()
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let config = WorkspaceConfig {
        known_hosts: run.config.source.ssh_known_hosts_file.clone(),
        allowed: run.config.source.allow_list()?,
        archive_limits: ArchiveLimits {
            max_bytes: run.config.source.archive_max_bytes,
            max_entries: run.config.source.archive_max_entries,
        },
        path: run.child_env().path(),
        home: run.folders.home.clone(),
        logins: git_logins(run, &environment)?,
        environment,
        content_token: run.connections.content_token(),
        azure: AzureEnvironment::from_lookup(|name| std::env::var(name).ok()),
    };
    let workspace = match workspace::prepare(&job, planned, &run.layout, &config).await {
        Ok(workspace) => workspace,
        Err(error) => return Err(log_workspace_error(run, error).await),
    };
    run.commit_id.get_or_init(|| workspace.commit_id.clone());
    if let Some(planned) = planned.filter(|_| !job.is_remote_content()) {
        log_planned_commit(run, &workspace, planned).await;
    }
    clone_tools_repository(run, &job, &workspace, &config).await?;
    Ok(workspace)
}

/// The operator's logins for git servers that this run may use.
fn git_logins(
    run: &RunContext<'_>,
    environment: &[(OsString, OsString)],
) -> Result<Option<Arc<Logins>>, StepError> {
    let ids = RunIds {
        organization: &run.job.organization_id,
        workspace: &run.job.workspace_id,
    };
    let settings = Settings::read(&|name| handover::var(name), ids).map_err(|wrong| {
        StepError::new(Exit::BadConfiguration, wrong)
            .with_hint("docs/git-servers.md describes the list of logins")
    })?;
    if settings.is_empty() {
        return Ok(None);
    }
    let secrets = settings.secrets().iter();
    run.log
        .add_secrets(secrets.map(ExposeSecret::expose_secret));
    let log = run.log.writer();
    let mask = move |token: &SecretString| log.add_secrets([token.expose_secret()]);
    let client = workspace::http_client(environment)?;
    let logins = Logins::new(settings, client, Box::new(mask));
    Ok(Some(Arc::new(logins)))
}

/// Clones the operator's extension repository for a step with scripts. If it fails, scripts run without it, because
/// they may not need it.
async fn clone_tools_repository(
    run: &RunContext<'_>,
    job: &JobData,
    workspace: &Workspace,
    config: &WorkspaceConfig,
) -> Result<(), StepError> {
    let source = &run.config.source;
    let has_scripts = !run.job.command_list.is_empty() || !run.job.on_failure_list.is_empty();
    let repository = source.tools_repository.as_deref();
    let Some(repository) = repository.filter(|url| has_scripts && !url.is_empty()) else {
        return Ok(());
    };
    let dir = if run.step_type.uses_tool() {
        working_dir(run, workspace).await?
    } else {
        workspace.root.clone()
    };
    let target = scripts::tools_repository(&dir);
    let cloned = workspace::clone_tools_repository(
        repository,
        source.tools_branch.as_deref().unwrap_or("main"),
        &target,
        &job.environment_variables,
        &run.layout,
        config,
    );
    if let Err(error) = cloned.await {
        warn!(%error, "the extension repository could not be cloned");
    }
    Ok(())
}

/// Writes into the run's log that an apply takes the commit of its plan, and what became of the branch since.
async fn log_planned_commit(run: &RunContext<'_>, workspace: &Workspace, planned: &str) {
    let branch = &run.job.branch;
    let text = match &workspace.branch_head {
        Some(head) if *head == workspace.head => {
            format!("Taking commit {planned}, of which the plan was made.")
        }
        Some(head) => format!(
            "Taking commit {planned}, of which the plan was made. The branch `{branch}` has moved to {head} since, which is not applied."
        ),
        None => format!(
            "Taking commit {planned}, of which the plan was made. The branch `{branch}` no longer exists."
        ),
    };
    info!("{text}");
    run.log.writer().line(&text).await;
}

/// Waits until no other step of the workspace uses the shared folder. A wait happens on one machine only: a pod has a
/// folder of its own.
pub(crate) async fn wait_for_turn(run: &RunContext<'_>) -> Result<(), StepError> {
    let holder = format!("job {}, step {}", run.job.job_id, run.job.step_id);
    let (began, mut announced) = (Instant::now(), None);
    let _waiting = Waiting::begin(&run.waiting);
    loop {
        let turn = match run.layout.try_take_turn(&holder) {
            Ok(Turn::Taken) => return Ok(()),
            Ok(turn) => turn,
            Err(error) => return Err(log_workspace_error(run, error).await),
        };
        // A step that has just reported its end will release the folder soon.
        let kind = Some(discriminant(&turn));
        if announced != kind && began.elapsed() >= TURN_ANNOUNCED_AFTER {
            announced = kind;
            let text = waiting_text(run, &turn);
            info!("{text}");
            run.log.writer().line(&text).await;
        }
        sleep(TURN_POLL).await;
    }
}

/// What a step waits for, for people.
fn waiting_text(run: &RunContext<'_>, turn: &Turn) -> String {
    let (holder, folder) = (run.layout.holder(), run.layout.checkout().display());
    let Turn::Left(processes) = turn else {
        return format!(
            "Waiting for another step of this workspace ({holder}), which works in `{folder}`."
        );
    };
    let ids: Vec<_> = processes.iter().map(u32::to_string).collect();
    let ids = ids.join(", ");
    format!(
        "Waiting for the end of what the killed executor of another step of this workspace ({holder}) has left running in `{folder}`: process {ids}."
    )
}

/// The root module's folder.
pub(crate) async fn working_dir(
    run: &RunContext<'_>,
    workspace: &Workspace,
) -> Result<PathBuf, StepError> {
    match workspace.working_dir(&run.job) {
        Ok(folder) => Ok(folder),
        Err(error) => Err(log_workspace_error(run, error).await),
    }
}

/// Reports in the run's log that there is no workspace (contract 4.1).
async fn log_workspace_error(run: &RunContext<'_>, error: StepError) -> StepError {
    run.log.writer().line("Failed to prepare work dir").await;
    error
}

/// Clears the flag when the wait ends, also after a stop order.
struct Waiting<'w>(&'w AtomicBool);

impl<'w> Waiting<'w> {
    fn begin(waiting: &'w AtomicBool) -> Self {
        waiting.store(true, Ordering::Relaxed);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// The job with its content. For CLI-driven runs, the platform knows the content; otherwise the document names it
/// (W-33).
async fn with_content<'r>(run: &'r RunContext<'_>) -> Result<Cow<'r, JobData>, StepError> {
    if !run.job.is_remote_content() {
        return Ok(Cow::Borrowed(&run.job));
    }
    let source = run.connections.platform.override_source(&run.step).await?;
    Ok(match source {
        Some(_) => Cow::Owned(JobData {
            source,
            ..run.job.clone()
        }),
        None => Cow::Borrowed(&run.job),
    })
}
