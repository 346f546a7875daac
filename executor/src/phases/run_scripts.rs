//! Runs the scripts of a step: around an operation, or instead of one.
//!
//! `scripts` knows how a script runs.

use std::path::Path;

use job_contract::final_statuses::Ending;
use job_contract::progress::Phase;
use job_contract::{Command, Exit};

use crate::child_env::ChildEnv;
use crate::context::RunContext;
use crate::error::{StepError, catch_panic};
use crate::operation::OperationContext;
use crate::scripts::{self, ApiToken, PlatformApi, Scripts, ScriptsEnd};
use crate::step_result::StepResult;
use crate::tool::ResolvedTool;
use crate::workspace::Workspace;

/// Runs the scripts of a phase around the operation; false if a stop order ended them. A script that fails is an error.
pub(crate) async fn run_scripts(
    context: &OperationContext<'_, '_>,
    phase: Phase,
    env: &mut ChildEnv,
    terraform_output: &str,
) -> Result<bool, StepError> {
    let (run, prepared) = (context.run, context.prepared);
    let commands: &[Command] = if phase == Phase::OnFailure {
        &run.job.on_failure_list
    } else {
        &run.job.command_list
    };
    let commands = scripts::select(commands, phase);
    if commands.is_empty() {
        // After a stop order, no further phase starts.
        return Ok(run.stop.given().is_none() || phase == Phase::After);
    }
    let scripts = scripts_in(run, &prepared.working_dir, Some(&prepared.tool));
    let work = async {
        let end = scripts.run(&commands, env, terraform_output).await?;
        is_done(end, &place(phase, prepared.operation.phase()))
    };
    run.timer
        .time(phase, work, |done| matches!(done, Ok(true)))
        .await
}

/// Runs a step of scripts: every command in the clone root, by priority.
pub(crate) async fn run_script_step(
    run: &RunContext<'_>,
    workspace: &Workspace,
    tool: Option<&ResolvedTool>,
) -> StepResult {
    let mut env = run.child_env().clone();
    let commands = scripts::select(&run.job.command_list, Phase::Scripts);
    let scripts = scripts_in(run, &workspace.root, tool);
    let work = async {
        for (name, value) in &workspace.environment {
            env.set(name, value)?;
        }
        is_done(scripts.run(&commands, &mut env, "").await?, "a script")
    };
    let done = run
        .timer
        .time(Phase::Scripts, catch_panic(work), |done| {
            matches!(done, Ok(true))
        })
        .await;
    let result = match done {
        Ok(true) => StepResult::new(Exit::Done, Ending::Success),
        Ok(false) => StepResult::new(Exit::StepFailed, Ending::Failure).or_stopped(&run.stop),
        Err(error) => {
            run.log_error(Some(&error.to_string()), error.hint().as_deref())
                .await;
            let exit = if error.exit() == Exit::Defect {
                Exit::Defect
            } else {
                Exit::StepFailed
            };
            let failed = StepResult {
                exit,
                ending: Ending::Failure,
                ..StepResult::failed(&error)
            };
            failed.or_stopped(&run.stop)
        }
    };
    StepResult {
        commit_id: workspace.commit_id.clone(),
        ..result
    }
}

/// Which scripts those of a phase are.
fn place(phase: Phase, operation: Phase) -> String {
    match phase {
        Phase::BeforeInit => "a script before init".to_owned(),
        Phase::Before => format!("a script before the {}", operation.name()),
        Phase::After => format!("a script after the {}", operation.name()),
        _ => "a script on failure".to_owned(),
    }
}

/// False if a stop order ended the scripts.
fn is_done(end: ScriptsEnd, scripts: &str) -> Result<bool, StepError> {
    match end {
        ScriptsEnd::Done => Ok(true),
        ScriptsEnd::Stopped => Ok(false),
        ScriptsEnd::Failed(ended) => {
            let text = format!("{scripts} ended with {ended}");
            Err(StepError::new(Exit::StepFailed, text))
        }
    }
}

fn scripts_in<'r>(
    run: &'r RunContext<'_>,
    dir: &'r Path,
    tool: Option<&'r ResolvedTool>,
) -> Scripts<'r> {
    Scripts {
        job: run.child_job(),
        dir,
        private: run.layout.private(),
        tool,
        api: platform_api(run),
        log: &run.log,
        palette: run.palette(),
        stop: &run.stop,
        budget: run.budget,
    }
}

fn platform_api<'r>(run: &'r RunContext<'_>) -> PlatformApi<'r> {
    let own = run.config.platform.public_url().map(str::to_owned);
    match &run.platform_server {
        Some(server) => PlatformApi {
            url: Some(server.api()),
            token: ApiToken::OfRun(server.secret()),
        },
        None => PlatformApi {
            url: own,
            token: run
                .connections
                .tokens()
                .map_or(ApiToken::None, ApiToken::Minted),
        },
    }
}
