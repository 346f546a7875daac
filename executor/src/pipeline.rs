//! One step, top to bottom: decode, prepare the workspace, resolve the tool, claim, run the phases, store,
//! report, exit code.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::time::{Duration, SystemTime};

use control_plane::local::LocalPlatform;
use control_plane::platform::{Claim, Holder, Outcome, PlanReference, Standing};
use control_plane::{Platform, StepRef};
use futures_util::FutureExt as _;
use job_contract::keys::ObjectKey;
use job_contract::progress::Phase;
use job_contract::report::{ChangeCounts, FinalReport, ToolRecord};
use job_contract::settlement::{self, Ending};
use job_contract::status::{JobStatus, StepStatus};
use job_contract::{Exit, JobData, StepType};
use tracing::{error, info, warn};
use uuid::Uuid;

use crate::Ended;
use crate::artifacts::Store;
use crate::config::Config;
use crate::fault::chain;
use crate::operation::{self, Operated, Prepared, scripts_in};
use crate::plan;
use crate::run::{Run, StageError, step_ref};
use crate::scripts::{self, Moment};
use crate::stop::Stop;
use crate::tool::{self, ResolvedTool, ToolConfig};
use crate::workspace::{self, ArchiveLimits, AzureEnvironment, Workspace, WorkspaceConfig};

/// How long sinks may take to receive the rest of the log.
const LOG_FLUSH: Duration = Duration::from_mins(1);

/// What became of a step: everything its report says.
#[derive(Debug)]
struct Verdict {
    exit: Exit,
    ending: Ending,
    after_ok: bool,
    changes: Option<ChangeCounts>,
    plan: PlanReference,
    commit_id: String,
    tool: Option<ToolRecord>,
    error: Option<String>,
    hint: Option<String>,
    /// Whether the platform is told. A step that is somebody else's, or over, is not ours to report.
    reported: bool,
}

impl Verdict {
    fn failed(error: &StageError) -> Self {
        Self {
            exit: error.exit(),
            ending: Ending::NotReached,
            after_ok: true,
            changes: None,
            plan: PlanReference::Keep,
            commit_id: String::new(),
            tool: None,
            error: Some(error.story()),
            hint: error.hint(),
            reported: true,
        }
    }

    fn not_ours(exit: Exit, error: String) -> Self {
        Self {
            exit,
            error: Some(error),
            hint: None,
            reported: false,
            ..Self::failed(&StageError::Panicked)
        }
    }
}

/// Runs the step and returns its report. The exit code of the process follows from it.
pub async fn run(config: &Config, job: JobData, stop: Stop) -> Ended {
    let identity = identity(&job);
    let run = match Run::open(config, job.clone(), stop) {
        Ok(run) => run,
        Err(failure) => return refuse(config, &job, identity, &failure).await,
    };
    let verdict = caught(Box::pin(execute(&run)))
        .await
        .unwrap_or_else(|_| Verdict::failed(&StageError::Panicked));
    conclude(run, identity, verdict).await
}

/// A report that so far says only whose it is.
pub fn identity(job: &JobData) -> FinalReport {
    FinalReport {
        job_id: job.job_id.clone(),
        step_id: job.step_id.clone(),
        step_type: job.step_type.clone(),
        ..FinalReport::default()
    }
}

/// A run that could not even be opened: told to the platform if the document says where it belongs.
async fn refuse(
    config: &Config,
    job: &JobData,
    identity: FinalReport,
    failure: &StageError,
) -> Ended {
    let verdict = Verdict::failed(failure);
    error!(
        error = verdict.error,
        hint = verdict.hint,
        "the step cannot run"
    );
    let reported = match config.folders(std::env::var_os("HOME")) {
        Ok(folders) if is_addressable(job) && !config.run.disable_acknowledge => {
            let outcome = Outcome {
                settlement: settlement::settle(
                    StepType::Approval,
                    Ending::NotReached,
                    true,
                    false,
                    1,
                ),
                output: None,
                plan: PlanReference::Keep,
                commit_id: String::new(),
            };
            let platform = Platform::Local(LocalPlatform::new(&folders.data));
            let told = platform.report_outcome(&step_ref(job), &outcome).await;
            told.inspect_err(|error| {
                error!(error = chain(error), "the failure could not be reported");
            })
            .is_ok()
        }
        _ => false,
    };
    let report = FinalReport {
        outcome: verdict.exit.code(),
        error: verdict.error,
        hint: verdict.hint,
        ..identity
    };
    Ended { report, reported }
}

/// Whether a document that is not usable at least says which step it is.
fn is_addressable(job: &JobData) -> bool {
    let plain = JobData {
        step_type: Some(StepType::Approval.name().to_owned()),
        ..job.clone()
    };
    plain.validate().is_ok()
}

/// The step itself. Every early return is a verdict, so that the tail of the run happens whatever it is.
async fn execute(run: &Run<'_>) -> Verdict {
    match Box::pin(prepare(run)).await {
        Ok(Readiness::Ready(prepared)) => Box::pin(operate(run, *prepared)).await,
        Ok(Readiness::Scripts(workspace, tool)) => {
            script_step(run, &workspace, tool.as_ref()).await
        }
        Ok(Readiness::NotOurs(verdict)) => *verdict,
        Err(failure) => {
            tell(run, &failure).await;
            stopped_or(run, Verdict::failed(&failure))
        }
    }
}

enum Readiness {
    Ready(Box<Prepared>),
    Scripts(Box<Workspace>, Option<ResolvedTool>),
    NotOurs(Box<Verdict>),
}

/// Everything that may be repeated freely, and the claim that ends it.
async fn prepare(run: &Run<'_>) -> Result<Readiness, StageError> {
    let standing = run.platform.standing(&run.step).await?;
    // A rejected job still runs the scripts of its rejection, which arrive as an approval step (contract 2.5).
    let rejected = standing.status == JobStatus::Rejected && run.step_type != StepType::Approval;
    if standing.status.is_over() || rejected {
        let text = format!("the job is already {}: nothing is run", standing.status);
        warn!("{text}");
        run.log.writer().line(&text).await;
        return Ok(Readiness::NotOurs(Box::new(Verdict::not_ours(
            Exit::Done,
            text,
        ))));
    }
    scripts::check(&run.job, &run.env.path())?;
    if !run.job.policy_list.is_empty() {
        warn!(
            policies = run.job.policy_list.len(),
            "the job carries policies, which are not evaluated here"
        );
    }
    let workspace = run
        .phase(
            Phase::Workspace,
            unless_stopped(run, prepare_workspace(run)),
        )
        .await?;
    if run.step_type.uses_tool() {
        let working_dir = workspace.working_dir(&run.job)?;
        let plan = reviewed_plan(run, &standing).await?;
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

/// Gives up work that may be repeated when a stop order comes: nothing has been changed yet.
async fn unless_stopped<T>(
    run: &Run<'_>,
    work: impl Future<Output = Result<T, StageError>>,
) -> Result<T, StageError> {
    tokio::select! {
        biased;
        _ = run.stop.ordered() => Err(StageError::Stopped),
        result = work => result,
    }
}

async fn prepare_workspace(run: &Run<'_>) -> Result<Workspace, StageError> {
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
        content_token: None,
        azure: AzureEnvironment::from_lookup(|name| std::env::var(name).ok()),
    };
    let notify = |text: &str| info!("{text}");
    let workspace = workspace::prepare(&run.job, &run.layout, &config, &notify).await?;
    let wants_tools = !run.job.command_list.is_empty() || !run.job.on_failure_list.is_empty();
    let repository = run
        .config
        .source
        .tools_repository
        .as_deref()
        .filter(|url| !url.is_empty());
    if let (true, Some(repository)) = (wants_tools, repository) {
        let dir = if run.step_type.uses_tool() {
            workspace.working_dir(&run.job)?
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

async fn reviewed_plan(
    run: &Run<'_>,
    standing: &Standing,
) -> Result<Option<plan::ReviewedPlan>, StageError> {
    if run.step_type != StepType::Apply {
        return Ok(None);
    }
    let context = run.platform.context(&run.step).await?;
    Ok(plan::fetch(
        standing,
        &context,
        &run.store,
        run.layout.private(),
        run.job.tool(),
    )?)
}

async fn resolve_tool(run: &Run<'_>, range: &str) -> Result<ResolvedTool, StageError> {
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
    };
    let notify = |text: &str| info!("{text}");
    let resolved = tool::resolve(run.job.tool(), range, &config, &notify).await?;
    info!(version = %resolved.version, path = %resolved.path.display(), "using {}", resolved.tool);
    Ok(resolved)
}

/// Script steps get the tool on their `PATH` where it can be had (W-25); many do not need it.
async fn optional_tool(run: &Run<'_>) -> Option<ResolvedTool> {
    match unless_stopped(run, Box::pin(resolve_tool(run, &run.job.terraform_version))).await {
        Ok(tool) => Some(tool),
        Err(error) => {
            warn!(
                error = error.story(),
                "scripts run without the tool on PATH"
            );
            None
        }
    }
}

/// Takes the claim on the step and reports it running; `Some` when the step is not ours to run.
async fn claim(run: &Run<'_>, workspace: &Workspace) -> Result<Option<Verdict>, StageError> {
    if run.stop.given().is_some() {
        return Err(StageError::Stopped);
    }
    let claim = run
        .phase(Phase::Claim, run.platform.claim(&run.step, &holder(run)))
        .await?;
    let runs_scripts = !run.job.command_list.is_empty() && !run.step_type.uses_tool();
    match claim {
        Claim::Held(holder) if run.step_type.changes_infrastructure() || runs_scripts => {
            let text = format!(
                "step {} was already taken by pod {holder}: it is not run again",
                run.step.step_id
            );
            run.log.writer().line(&run.palette().failure(&text)).await;
            return Ok(Some(Verdict::not_ours(Exit::Claimed, text)));
        }
        Claim::Held(holder) => {
            info!(%holder, "the step was started before; repeating it changes nothing");
        }
        Claim::Granted => {}
    }
    if !run.config.run.disable_acknowledge {
        let output = run.store.reference(&output_key(&run.job));
        let told = run
            .platform
            .report_running(&run.step, &workspace.commit_id, &output)
            .await;
        // The step is claimed: giving up now would leave it to nobody. The final report says it all anyway.
        if let Err(error) = told {
            warn!(
                error = chain(&error),
                "the step could not be reported as running"
            );
        }
    }
    Ok(None)
}

fn holder(run: &Run<'_>) -> Holder {
    let host = || {
        nix::unistd::gethostname()
            .ok()
            .and_then(|name| name.into_string().ok())
    };
    Holder {
        pod: run
            .config
            .run
            .pod_name
            .clone()
            .or_else(host)
            .unwrap_or_else(|| "unknown".to_owned()),
        uid: run
            .config
            .run
            .pod_uid
            .clone()
            .unwrap_or_else(|| Uuid::new_v4().to_string()),
        since: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
    }
}

async fn operate(run: &Run<'_>, prepared: Prepared) -> Verdict {
    let operated = caught(Box::pin(operation::run(run, &prepared))).await;
    let operated = operated.unwrap_or_else(|_| Operated {
        ending: Ending::Failure,
        after_ok: true,
        changes: None,
        plan: None,
        error: Some(StageError::Panicked),
    });
    if let Some(failure) = &operated.error {
        tell(run, failure).await;
    }
    // Whether the step failed does not depend on the template, only what becomes of the job does.
    let settlement = settlement::settle(
        run.step_type,
        operated.ending,
        operated.after_ok,
        run.job.ignore_error,
        2,
    );
    let failed = settlement.step == StepStatus::Failed;
    let is_plan = matches!(run.step_type, StepType::Plan | StepType::PlanDestroy);
    let verdict = Verdict {
        // What fails after the claim is the step's own failure, unless we are at fault.
        exit: match &operated.error {
            Some(StageError::Panicked) => Exit::Defect,
            _ if failed => Exit::StepFailed,
            _ => Exit::Done,
        },
        ending: operated.ending,
        after_ok: operated.after_ok,
        changes: operated.changes,
        plan: match operated.plan {
            Some(reference) if !failed => PlanReference::Set(reference),
            _ if is_plan => PlanReference::Clear,
            _ => PlanReference::Keep,
        },
        commit_id: prepared.workspace.commit_id.clone(),
        tool: Some(ToolRecord {
            name: prepared.tool.tool,
            version: prepared.tool.version.to_string(),
        }),
        hint: operated.error.as_ref().and_then(StageError::hint),
        error: operated.error.as_ref().map(StageError::story),
        reported: true,
    };
    stopped_or(run, verdict)
}

/// `customScripts` and `approval`: every command in the clone root, by priority.
async fn script_step(run: &Run<'_>, workspace: &Workspace, tool: Option<&ResolvedTool>) -> Verdict {
    let mut env = run.env.clone();
    let commands = scripts::select(&run.job.command_list, Moment::Always);
    let scripts = scripts_in(run, &workspace.root, tool);
    let work = async {
        for (name, value) in &workspace.environment {
            env.set(name, value)?;
        }
        Ok::<_, StageError>(scripts.run(&commands, &mut env, "").await?)
    };
    let done = run
        .clock
        .time(Phase::Scripts, caught(work), |done| {
            matches!(done, Ok(Ok(true)))
        })
        .await;
    let failure = match done {
        Ok(Ok(ok)) => {
            let ending = if ok { Ending::Success } else { Ending::Failure };
            return stopped_or(
                run,
                Verdict {
                    exit: if ok { Exit::Done } else { Exit::StepFailed },
                    ending,
                    commit_id: workspace.commit_id.clone(),
                    error: None,
                    hint: None,
                    ..Verdict::failed(&StageError::Panicked)
                },
            );
        }
        Ok(Err(failure)) => failure,
        Err(_) => StageError::Panicked,
    };
    tell(run, &failure).await;
    let exit = if matches!(failure, StageError::Panicked) {
        Exit::Defect
    } else {
        Exit::StepFailed
    };
    Verdict {
        exit,
        commit_id: workspace.commit_id.clone(),
        ..Verdict::failed(&failure)
    }
}

/// A step that failed under a stop order failed because of it. One that was done anyway is done.
fn stopped_or(run: &Run<'_>, verdict: Verdict) -> Verdict {
    match run.stop.given() {
        Some(order) if matches!(verdict.exit, Exit::StepFailed | Exit::Infrastructure) => Verdict {
            exit: Exit::Signal(order.signal),
            error: Some(format!(
                "stopped by signal {} before it was done",
                order.signal
            )),
            hint: None,
            ..verdict
        },
        _ => verdict,
    }
}

/// Says in the run's log why it ends; the platform shows nothing else.
async fn tell(run: &Run<'_>, failure: &StageError) {
    let log = run.log.writer();
    if let StageError::Workspace(_) = failure {
        log.line("Failed to prepare work dir").await;
    }
    log.line(
        &run.palette()
            .failure(&format!("error: {}", failure.story())),
    )
    .await;
    if let Some(hint) = failure.hint() {
        log.line(&format!("hint: {hint}")).await;
    }
}

/// The tail of every run: the log delivered and stored, the outcome reported, nothing left behind.
async fn conclude(run: Run<'_>, identity: FinalReport, mut verdict: Verdict) -> Ended {
    let Run {
        log,
        layout,
        clock,
        stop,
        ..
    } = run;
    let summary = log.finish(flush_time(&stop)).await;
    let reporter = Reporter {
        config: run.config,
        job: &run.job,
        step: &run.step,
        platform: &run.platform,
        store: &run.store,
    };
    let told = clock
        .time(
            Phase::Report,
            reporter.report(&verdict, &summary.spool.path),
            Result::is_ok,
        )
        .await;
    if let Err(failure) = &told {
        error!(error = failure.story(), "the outcome could not be reported");
        if verdict.exit == Exit::Done {
            // Not `Infrastructure`: that would promise that starting again is safe.
            verdict.exit = Exit::StepFailed;
        }
        verdict.error.get_or_insert_with(|| failure.story());
    }
    if let Err(failure) = layout.remove() {
        error!(
            error = chain(&failure),
            "the workspace could not be removed"
        );
    }
    let report = FinalReport {
        outcome: verdict.exit.code(),
        error: verdict.error,
        hint: verdict.hint,
        tool: verdict.tool,
        commit_id: Some(verdict.commit_id).filter(|commit| !commit.is_empty()),
        changes: verdict.changes,
        phases: clock.timings(),
        lost_log_lines: summary
            .sinks
            .iter()
            .map(|sink| sink.lost)
            .max()
            .unwrap_or_default(),
        ..identity
    };
    // A claimed step is told to nobody: its holder reports it.
    Ended {
        report,
        reported: told.is_ok() && verdict.exit != Exit::Claimed,
    }
}

/// Under a stop order the process has little time left; the report matters more than the last lines.
fn flush_time(stop: &Stop) -> Duration {
    if stop.given().is_some() {
        Duration::from_secs(5)
    } else {
        LOG_FLUSH
    }
}

struct Reporter<'r> {
    config: &'r Config,
    job: &'r JobData,
    step: &'r StepRef,
    platform: &'r Platform,
    store: &'r Store,
}

impl Reporter<'_> {
    async fn report(&self, verdict: &Verdict, log: &Path) -> Result<(), StageError> {
        if !verdict.reported {
            return Ok(());
        }
        // The outcome matters more than the log: it is reported even when the log could not be stored.
        let output = self.store.put_file(&output_key(self.job), log);
        if !self.config.run.disable_acknowledge {
            let outcome = self.outcome(verdict, output.as_ref().ok()).await?;
            self.platform.report_outcome(self.step, &outcome).await?;
        }
        output?;
        Ok(())
    }

    async fn outcome(
        &self,
        verdict: &Verdict,
        output: Option<&String>,
    ) -> Result<Outcome, StageError> {
        let template_steps = self.platform.standing(self.step).await?.template_steps;
        Ok(Outcome {
            settlement: settlement::settle(
                self.job.step_type()?,
                verdict.ending,
                verdict.after_ok,
                self.job.ignore_error,
                template_steps,
            ),
            output: output.cloned(),
            plan: verdict.plan.clone(),
            commit_id: verdict.commit_id.clone(),
        })
    }
}

fn output_key(job: &JobData) -> ObjectKey {
    ObjectKey::step_output(&job.organization_id, &job.job_id, &job.step_id)
}

/// Turns a panic into an error: the tail of the run still happens.
async fn caught<T>(work: impl Future<Output = T>) -> Result<T, Box<dyn Any + Send>> {
    AssertUnwindSafe(work).catch_unwind().await
}
