//! Everything that may be repeated freely, and the claim that ends it: workspace, reviewed plan, tool.

use std::borrow::Cow;
use std::future::Future;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use job_contract::progress::Phase;
use job_contract::status::JobStatus;
use job_contract::{Exit, JobData, StepType, chain, env};
use platform::{Claim, Holder, Start, StartPermission, StepView};
use platform::{Platform, PlatformError, StepRef};
use serde_json::{Map, Value};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};
use uuid::Uuid;

use crate::child_env;
use crate::config::Config;
use crate::context::RunContext;
use crate::error::StepError;
use crate::operation::Prepared;
use crate::phases::conclude::{StepResult, output_key};
use crate::running_report::Running;
use crate::scripts;
use crate::stored_plan;
use crate::tool::{self, ResolvedTool, ToolConfig};
use crate::workspace::{
    self, ArchiveLimits, AzureEnvironment, Workspace, WorkspaceConfig, WorkspaceError,
};

/// How long the job context is asked for.
const CONTEXT_TIME: Duration = Duration::from_secs(10);

/// How often a step looks whether the folder of its workspace is free, and from when on it says that it waits.
const TURN_POLL: Duration = Duration::from_millis(200);
const TURN_TOLD_AFTER: Duration = Duration::from_secs(1);

/// What a step is ready for.
pub(crate) enum Readiness {
    Ready(Box<Prepared>),
    Scripts(Box<Workspace>, Option<ResolvedTool>),
    NotOurs(Box<StepResult>),
}

/// Waits until the platform lets the step run, and opens the log to those who follow it. Nothing may be written there
/// before (contract 2.5). `Err` holds a verdict on a step that is not to run.
pub(crate) async fn admit(run: &RunContext<'_>) -> Result<Result<StepView, StepResult>, StepError> {
    let asked = async { Ok(run.connections.platform.start_permission(&run.step).await?) };
    let view = match unless_stopped(run, asked).await? {
        StartPermission::Granted(view) => view,
        StartPermission::Over(status) => return Ok(Err(job_is_over(run, &status).await)),
        StartPermission::Settled(_) => return Ok(Err(step_has_ended(run))),
        StartPermission::NotDispatched(status) => return Ok(Err(not_dispatched(run, &status))),
    };
    if let Some(sink) = run.connections.live_log(&run.job) {
        run.log.attach(sink)?;
    }
    Ok(Ok(run.view.get_or_init(|| view).clone()))
}

/// The platform repeats the dispatch. A launcher that knows this one already starts it again when it is told so; any
/// other starts another executor.
fn not_dispatched(run: &RunContext<'_>, status: &JobStatus) -> StepResult {
    let text = format!(
        "the platform has not recorded the dispatch, the job is {status}: nothing is run until it does"
    );
    warn!("{text}");
    let exit = if run.config.run.outcome_exit_code {
        Exit::Infrastructure
    } else {
        Exit::Done
    };
    StepResult::not_ours(exit, text)
}

/// Everything that may be repeated freely, and the claim that ends it.
pub(crate) async fn prepare(run: &RunContext<'_>, view: &StepView) -> Result<Readiness, StepError> {
    scripts::check(&run.job, &run.env.path())?;
    for name in child_env::without_effect(&run.job) {
        let text = format!(
            "`{}` names `{name}`, a setting of the executor, where it has no effect: what stands there reaches the tool \
             and scripts alone.",
            env::EPHEMERAL_ENV
        );
        run.log.writer().line(&text).await;
    }
    refuse_policies(run).await?;
    let workspace = run
        .phase(
            Phase::Workspace,
            unless_stopped(run, Box::pin(prepare_workspace(run))),
        )
        .await?;
    if run.step_type.uses_tool() {
        let working_dir = working_dir(run, &workspace).await?;
        let plan = reviewed_plan(run, view).await?;
        let pinned = plan
            .as_ref()
            .and_then(|plan| plan.record.as_ref())
            .map(|record| record.version.as_str());
        let range = pinned.unwrap_or(&run.job.terraform_version);
        let tool = run
            .phase(
                Phase::Tool,
                unless_stopped(run, Box::pin(resolve_tool(run, range))),
            )
            .await?;
        Ok(match claim(run, &workspace).await? {
            Some(refusal) => Readiness::NotOurs(Box::new(refusal)),
            None => Readiness::Ready(Box::new(Prepared {
                workspace,
                working_dir,
                tool,
                plan,
            })),
        })
    } else {
        let tool = if run.job.command_list.is_empty() {
            None
        } else {
            optional_tool(run).await
        };
        Ok(match claim(run, &workspace).await? {
            Some(refusal) => Readiness::NotOurs(Box::new(refusal)),
            None => Readiness::Scripts(Box::new(workspace), tool),
        })
    }
}

/// Policies are not evaluated here. A plan that comes with some would pass over a mandatory one, so that it is not made,
/// unless the operator says so. A workspace's own variables are not the operator's word.
async fn refuse_policies(run: &RunContext<'_>) -> Result<(), StepError> {
    let what = match run.step_type {
        StepType::Plan | StepType::PlanDestroy if run.job.has_policies() => {
            "the plan comes with policies (`policyList`)"
        }
        StepType::PolicyEvaluation => "the step is to evaluate policies (`policyEvaluation`)",
        _ => return Ok(()),
    };
    let mut own = child_env::extra_variables(&run.job);
    let by_workspace = own.any(|(name, _)| name == env::IGNORE_POLICIES);
    if !run.config.run.ignore_policies || by_workspace {
        return Err(policies_not_evaluated(what));
    }
    let text = format!(
        "WARNING: {what}, and NONE IS EVALUATED: the operator has set {}",
        env::IGNORE_POLICIES
    );
    warn!("{text}");
    run.log.writer().line(&run.palette().failure(&text)).await;
    Ok(())
}

fn policies_not_evaluated(what: &str) -> StepError {
    let hint = format!(
        "run the workspace with an executor that evaluates policies, or have the operator set `{}=true` on this one, \
         which passes over all of them",
        env::IGNORE_POLICIES
    );
    let problem = format!("{what}, and this executor does not evaluate policies: nothing was run");
    // The document is sound; what it refers to says no.
    StepError::new(Exit::StepFailed, problem).with_hint(hint)
}

/// A job that ended meanwhile is not run, and neither is a step that has an outcome in a job that goes on.
async fn job_is_over(run: &RunContext<'_>, status: &JobStatus) -> StepResult {
    if status.is_over() || *status == JobStatus::Rejected {
        let text = format!("the job is already {status}: nothing is run");
        warn!("{text}");
        run.log.writer().line(&text).await;
        return StepResult::not_ours(Exit::Done, text);
    }
    step_has_ended(run)
}

/// The log is that of whoever ran the step, so nothing is written there. Its outcome is known, so this is none.
pub(crate) fn step_has_ended(run: &RunContext<'_>) -> StepResult {
    let text = format!(
        "step {} has already ended: it is not run again",
        run.step.step_id
    );
    warn!("{text}");
    StepResult::not_ours(Exit::Done, text)
}

/// Gives up work that may be repeated when a stop order comes: nothing has been changed yet.
async fn unless_stopped<T>(
    run: &RunContext<'_>,
    work: impl Future<Output = Result<T, StepError>>,
) -> Result<T, StepError> {
    tokio::select! {
        biased;
        _ = run.stop.ordered() => Err(StepError::stopped()),
        result = work => result,
    }
}

async fn prepare_workspace(run: &RunContext<'_>) -> Result<Workspace, StepError> {
    wait_for_turn(run).await?;
    let job = with_content(run).await?;
    let config = WorkspaceConfig {
        known_hosts: run.config.source.ssh_known_hosts_file.clone(),
        archive_limits: ArchiveLimits {
            max_bytes: run.config.source.archive_max_bytes,
            max_entries: run.config.source.archive_max_entries,
        },
        path: run.env.path(),
        home: run.folders.home.clone(),
        environment: run
            .env
            .inherited()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
        content_token: run.connections.content_token(),
        azure: AzureEnvironment::from_lookup(|name| std::env::var(name).ok()),
    };
    let notify = |text: &str| info!("{text}");
    let workspace = match workspace::prepare(&job, &run.layout, &config, &notify).await {
        Ok(workspace) => workspace,
        Err(error) => return Err(log_workspace_error(run, error).await),
    };
    let wants_tools = !run.job.command_list.is_empty() || !run.job.on_failure_list.is_empty();
    let repository = run
        .config
        .source
        .tools_repository
        .as_deref()
        .filter(|url| !url.is_empty());
    if let (true, Some(repository)) = (wants_tools, repository) {
        let dir = if run.step_type.uses_tool() {
            working_dir(run, &workspace).await?
        } else {
            workspace.root.clone()
        };
        let branch = run.config.source.tools_branch.as_deref().unwrap_or("main");
        let target = scripts::tools_repository(&dir);
        let variables = &run.job.environment_variables;
        let cloned = workspace::clone_tools_repository(
            repository,
            branch,
            &target,
            variables,
            &run.layout,
            &config,
        );
        if let Err(error) = cloned.await {
            warn!(
                error = chain(&error),
                "the extension repository could not be cloned"
            );
        }
    }
    Ok(workspace)
}

/// Waits until no other step of the workspace works in the folder that both would use. That is the case on one machine
/// only: a pod has its folder for itself.
async fn wait_for_turn(run: &RunContext<'_>) -> Result<(), StepError> {
    let holder = format!("job {}, step {}", run.job.job_id, run.job.step_id);
    let (began, mut told) = (Instant::now(), false);
    let _waiting = Waiting::begin(&run.waiting);
    loop {
        match run.layout.try_take_turn(&holder) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => return Err(log_workspace_error(run, error).await),
        }
        // A step that has just reported its end is about to leave.
        if !told && began.elapsed() >= TURN_TOLD_AFTER {
            told = true;
            let text = format!(
                "Waiting for another step of this workspace ({}), which works in `{}`.",
                run.layout.holder(),
                run.layout.checkout().display()
            );
            info!("{text}");
            run.log.writer().line(&text).await;
        }
        sleep(TURN_POLL).await;
    }
}

/// The root module's folder.
async fn working_dir(run: &RunContext<'_>, workspace: &Workspace) -> Result<PathBuf, StepError> {
    match workspace.working_dir(&run.job) {
        Ok(folder) => Ok(folder),
        Err(error) => Err(log_workspace_error(run, error).await),
    }
}

/// Says in the run's log that there is no workspace (contract 4.1).
async fn log_workspace_error(run: &RunContext<'_>, error: WorkspaceError) -> StepError {
    run.log.writer().line("Failed to prepare work dir").await;
    error.into()
}

/// Ends with the wait, also when a stop order ends that.
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

/// The job with the content it is run on: of CLI-driven runs the platform knows it, and where it does not, the document
/// does (W-33).
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

async fn reviewed_plan(
    run: &RunContext<'_>,
    view: &StepView,
) -> Result<Option<stored_plan::ReviewedPlan>, StepError> {
    if run.step_type != StepType::Apply {
        return Ok(None);
    }
    // Without a plan there is nothing to compare.
    let context = if view.terraform_plan.is_some() {
        known_context(run).await
    } else {
        Map::new()
    };
    let handover = stored_plan::Handover {
        job: &run.job,
        view,
        context: &context,
        store: &run.store,
        private: run.layout.private(),
        on_record: !run.connections.is_local(),
        mixed_fleet: run.config.run.mixed_fleet,
    };
    Ok(handover.fetch().await?)
}

/// The job context, as far as it is to be had: no platform needs it for running a job, and not every installation lets an
/// executor reach it. Where it is not, what the plan step left in the store has to do.
pub(crate) async fn known_context(run: &RunContext<'_>) -> Map<String, Value> {
    match timeout(CONTEXT_TIME, run.connections.platform.context(&run.step)).await {
        Ok(Ok(context)) => return context,
        Ok(Err(error)) => warn!(
            error = chain(&error),
            "the job context is not available, going on without it"
        ),
        Err(_) => warn!("the job context is not available in time, going on without it"),
    }
    Map::new()
}

async fn resolve_tool(run: &RunContext<'_>, range: &str) -> Result<ResolvedTool, StepError> {
    let (terraform_index, tofu_index) = run.config.release_indexes()?;
    let tools = &run.config.tools;
    let config = ToolConfig {
        cache_dir: run.folders.tool_cache.clone(),
        terraform_index,
        tofu_index,
        mirror: tools.release_mirror_url.clone(),
        selection: tools.tool_selection,
        signatures: tools.release_signatures,
        extra_keys: tools.release_keys_file.clone(),
        path: run.env.path(),
        retry_for: tool::RETRY_FOR,
    };
    let notify = |text: &str| info!("{text}");
    let resolved = tool::resolve(run.job.tool(), range, &config, &notify).await?;
    info!(version = %resolved.version, path = %resolved.path.display(), "using {}", resolved.tool);
    Ok(resolved)
}

/// Script steps get the tool on their `PATH` where it can be had (W-25); many do not need it.
async fn optional_tool(run: &RunContext<'_>) -> Option<ResolvedTool> {
    match unless_stopped(run, Box::pin(resolve_tool(run, &run.job.terraform_version))).await {
        Ok(tool) => Some(tool),
        Err(error) => {
            warn!(
                %error,
                "scripts run without the tool on PATH"
            );
            None
        }
    }
}

/// Takes the claim on the step and reports it running; `Some` when the step is not ours to run.
async fn claim(
    run: &RunContext<'_>,
    workspace: &Workspace,
) -> Result<Option<StepResult>, StepError> {
    if run.stop.given().is_some() {
        return Err(StepError::stopped());
    }
    let claim = run
        .phase(
            Phase::Claim,
            run.connections
                .platform
                .claim(&run.step, &holder(run.config)),
        )
        .await?;
    match claim {
        Claim::Held(holder) if changes_something(&run.job) => {
            let verdict = held(&run.step, &holder);
            if let Some(text) = &verdict.error {
                run.log.writer().line(&run.palette().failure(text)).await;
            }
            return Ok(Some(verdict));
        }
        Claim::Held(holder) => {
            // Its outcome may be under review already, and what it stored must stay what was reviewed.
            let deadline = run.deadline();
            let known = run
                .connections
                .platform
                .step_view(&run.step, &deadline)
                .await?;
            if known.step_has_ended() && !known.status.is_over() {
                return Ok(Some(step_has_ended(run)));
            }
            info!(%holder, "the step was started before; repeating it changes nothing");
        }
        Claim::Granted => {}
    }
    if !run.config.run.disable_acknowledge {
        let stored = run.store.reference(&output_key(&run.job));
        let output = run.connections.platform.step_output(&run.step, stored);
        let running = Running {
            platform: run.connections.platform.clone(),
            step: run.step.clone(),
            commit_id: workspace.commit_id.clone(),
            output,
        };
        match running.tell().await {
            Ok(Start::Told) => {}
            Ok(Start::Over(status)) => return Ok(Some(job_is_over(run, &status).await)),
            // The step is claimed: giving up now would leave it to nobody.
            Err(error) => {
                warn!(
                    error = chain(&error),
                    "the step could not be reported as running, trying again beside it"
                );
                run.announcement.get_or_init(|| running.repeat());
            }
        }
    }
    Ok(None)
}

/// Whether the step must not be run twice. Of a step nobody here can read the worst is assumed.
pub(crate) fn changes_something(job: &JobData) -> bool {
    match job.step_type() {
        Ok(step_type) if step_type.uses_tool() => step_type.changes_infrastructure(),
        Ok(_) => !job.command_list.is_empty(),
        Err(_) => true,
    }
}

/// Claims a step that fails before it is begun, so that its failure may be reported: whoever holds it may be in the
/// middle of it, and reports it. `Some` when it is somebody else's.
pub(crate) async fn claim_to_report(
    platform: &Platform,
    config: &Config,
    job: &JobData,
) -> Result<Option<StepResult>, PlatformError> {
    let step = StepRef::of(job);
    if !changes_something(job) {
        return Ok(None);
    }
    Ok(match platform.claim(&step, &holder(config)).await? {
        Claim::Granted => None,
        Claim::Held(holder) => Some(held(&step, &holder)),
    })
}

fn held(step: &StepRef, holder: &Holder) -> StepResult {
    let text = format!(
        "step {} was already taken by pod {holder}: it is not run again",
        step.step_id
    );
    warn!("{text}");
    StepResult::not_ours(Exit::Claimed, text)
}

fn holder(config: &Config) -> Holder {
    let host = || {
        nix::unistd::gethostname()
            .ok()
            .and_then(|name| name.into_string().ok())
    };
    Holder {
        pod: config
            .run
            .pod_name
            .clone()
            .or_else(host)
            .unwrap_or_else(|| "unknown".to_owned()),
        uid: config
            .run
            .pod_uid
            .clone()
            .unwrap_or_else(|| Uuid::new_v4().to_string()),
        since: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
    }
}
