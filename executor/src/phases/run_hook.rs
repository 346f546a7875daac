//! Runs a hook of the operator around the operation, and decides whether the run may go on.
//!
//! No code of the run influences a hook: nothing of it is alive while a hook runs, and a hook has an environment, a folder and a
//! home of its own. So no code of the run can read what a hook knows, either.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use job_contract::{Exit, chain, env};
use run_log::LogWriter;
use runtime::private_file::private_folder;
use runtime::{reaper, tree_removal};
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};
use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::child_env::ChildEnv;
use crate::error::StepError;
use crate::hooks::{HookPoint, HookResult, HookSettings, OnFailure};
use crate::operation::OperationContext;
use crate::process::{self, Consumer, Ended, Interrupt, Invocation, Limit};
use crate::stop::{Cause, Stop};
use crate::stored_plan::ReviewedPlan;
use crate::workspace::write_private_file;

/// Key of the job context in which the results of hooks are, by step and hook.
const CONTEXT_KEY: &str = "mayflyHooks";
/// The same names in the folder of every hook.
const PLAN: &str = "plan.tfplan";
const PLAN_JSON: &str = "plan.json";
const OUTCOME: &str = "outcome.json";
const METADATA: &str = "metadata.json";
const RESULT: &str = "result.json";
/// From the interrupt to the kill.
const GRACE: Duration = Duration::from_secs(5);
/// More output of a hook is dropped.
const MAX_OUTPUT_BYTES: usize = 1 << 20;
const CONTEXT_TIMEOUT: Duration = Duration::from_secs(10);
/// What a hook gets of the executor's environment: how to find programs, and how to reach the network.
const INHERITED: &[&str] = &[
    "LANG",
    "LANGUAGE",
    "PATH",
    "TZ",
    "ALL_PROXY",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NODE_EXTRA_CA_CERTS",
    "NO_PROXY",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "all_proxy",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    env::RUN_MARK,
];

/// What a hook is told beside the metadata.
#[derive(Debug, Default)]
pub(crate) struct HookInput<'i> {
    /// The plan that has been made, or is about to be applied.
    pub(crate) plan: Option<&'i ReviewedPlan>,
    /// How the operation ended.
    pub(crate) outcome: Option<Value>,
}

/// How a hook ended.
struct Judgement {
    result: HookResult,
    /// What was wrong, as the rest of a sentence about the hook.
    failure: Option<String>,
}

/// Runs the hook of this point, if the operator has one; false if a stop order ended it. An error means that the run must not
/// go on.
pub(crate) async fn run_hook(
    context: &OperationContext<'_, '_>,
    point: HookPoint,
    env: &ChildEnv,
    input: HookInput<'_>,
) -> Result<bool, StepError> {
    let run = context.run;
    let Some(settings) = run.hooks.settings(point) else {
        return Ok(true);
    };
    if run.stop.given().is_some() {
        return Ok(false);
    }
    let folder = run.layout.private().join("hook");
    let judged = judge(context, point, settings, env, &input, &folder).await;
    // The plan as JSON holds values that the tool hides in its output.
    tree_removal::remove(&folder).map_err(|source| {
        StepError::work_folder("could not remove the folder of a hook", &folder, &source)
    })?;
    let Judgement { result, failure } = judged?;
    if failure.is_some() && run.stop.given().is_some() {
        return Ok(false);
    }
    let name = point.name();
    for line in result.lines() {
        run.log.writer().line(&format!("{name}: {line}")).await;
    }
    let goes_on = if settings.exempts(&run.job.workspace_id) {
        Some("the operator has exempted this workspace, so the run goes on")
    } else {
        (settings.on_failure == OnFailure::Warn)
            .then_some("the operator only wants a warning, so the run goes on")
    };
    let outcome = match (&failure, goes_on) {
        (None, _) => "passed",
        (Some(_), Some(_)) => "warned",
        (Some(_), None) => "failed",
    };
    publish(
        context,
        point,
        outcome,
        &result,
        failure.as_deref(),
        input.plan,
    )
    .await;
    match (failure, goes_on) {
        (None, _) => Ok(true),
        (Some(failure), Some(why)) => {
            let text = format!("warning: the operator's hook `{name}` {failure}; {why}");
            run.log_failure(&text).await;
            Ok(true)
        }
        (Some(failure), None) => {
            let text = format!("the operator's hook `{name}` {failure}");
            Err(StepError::new(Exit::StepFailed, text)
                .with_hint("the operator of this executor decides with hooks which runs may go on"))
        }
    }
}

/// Gives the hook its files, and runs it. An error is not the hook's.
async fn judge(
    context: &OperationContext<'_, '_>,
    point: HookPoint,
    settings: &HookSettings,
    env: &ChildEnv,
    input: &HookInput<'_>,
    folder: &Path,
) -> Result<Judgement, StepError> {
    end_leftovers().await?;
    let failed = |failure: String| Judgement {
        result: HookResult::default(),
        failure: Some(failure),
    };
    let not_prepared = |source: io::Error| {
        StepError::work_folder("could not prepare the folder of a hook", folder, &source)
    };
    let renew = || tree_removal::remove(folder).map_err(not_prepared);
    let write = |name: &str, content: &[u8]| {
        write_private_file(&folder.join(name), content).map_err(not_prepared)
    };
    renew()?;
    let shown = match input.plan {
        None => None,
        Some(plan) => {
            let Some(shown) = show_plan(context, plan, env, folder).await? else {
                return Ok(failed(
                    "needs the plan as JSON, which the tool could not make".into(),
                ));
            };
            // Providers of the workspace took part in it. What they have left, and what they have written, does not reach the hook.
            end_leftovers().await?;
            renew()?;
            Some((plan, shown))
        }
    };
    write(METADATA, &json_text(&metadata(context, point)))?;
    if let Some(outcome) = &input.outcome {
        write(OUTCOME, &json_text(outcome))?;
    }
    if let Some((plan, shown)) = shown {
        write(PLAN_JSON, &shown)?;
        plan.copy_to(&folder.join(PLAN))?;
    }
    context.run.hooks.check_unchanged()?;
    let ended = run_program(context, point, settings, folder).await;
    end_leftovers().await?;
    let failure = match ended? {
        Some(ended) if ended.is_success() => None,
        Some(ended) => Some(format!("ended with {ended}")),
        None => {
            let limit = humantime::format_duration(settings.timeout());
            Some(format!("did not end within {limit}"))
        }
    };
    Ok(match HookResult::read(&folder.join(RESULT)) {
        Ok(result) => Judgement {
            failure: failure.or_else(|| match result.refusals() {
                0 => None,
                1 => Some("has a mandatory check that failed".into()),
                count => Some(format!("has {count} mandatory checks that failed")),
            }),
            result,
        },
        Err(wrong) => failed(failure.unwrap_or(wrong)),
    })
}

/// The plan as JSON; `None` if the tool could not make one document of it.
async fn show_plan(
    context: &OperationContext<'_, '_>,
    plan: &ReviewedPlan,
    env: &ChildEnv,
    folder: &Path,
) -> Result<Option<Vec<u8>>, StepError> {
    let file = folder.join(PLAN);
    private_folder(folder).map_err(|source| {
        StepError::work_folder("could not prepare the folder of a hook", folder, &source)
    })?;
    plan.copy_to(&file)?;
    // Variables of the run could make the tool show something else.
    let env = env.without_prefix("TF_CLI_ARGS");
    let shown = context.terraform.show_plan_file_json(&env, &file).await?;
    // A hook may read only the first of several documents.
    Ok(shown.filter(|text| serde_json::from_slice::<IgnoredAny>(text).is_ok()))
}

/// Ends what code of the run, or of a hook, has left in the background: it could read the environment and the files of the hook,
/// and what a hook leaves behind would be there for code of the run.
pub(crate) async fn end_leftovers() -> Result<(), StepError> {
    let ended = tokio::task::spawn_blocking(reaper::end_orphans).await;
    match ended.map_err(|_| StepError::panicked())? {
        0 => Ok(()),
        left => {
            let text =
                format!("{left} background processes of the run did not end, so no hook can run");
            Err(StepError::new(Exit::StepFailed, text))
        }
    }
}

/// Runs the executable; `None` if it took too long.
async fn run_program(
    context: &OperationContext<'_, '_>,
    point: HookPoint,
    settings: &HookSettings,
    folder: &Path,
) -> Result<Option<Ended>, StepError> {
    let run = context.run;
    let invocation = Invocation {
        program: run.hooks.program(point),
        args: Vec::new(),
        dir: folder.to_owned(),
        env: environment(context, folder),
        input: None,
        prints_document: false,
    };
    // The hook has a stop order of its own, which its time limit gives too.
    let stop = Stop::default();
    let limit = Limit {
        stop: stop.clone(),
        interrupt: Some(Interrupt::Group),
        grace: GRACE.min(run.budget.tool),
    };
    let mut output = LimitedOutput {
        log: run.log.writer(),
        left: MAX_OUTPUT_BYTES,
    };
    let done = {
        let running = std::pin::pin!(process::run(&invocation, &limit, &mut output));
        let ordering = async {
            tokio::select! {
                order = run.stop.ordered() => stop.order(order.cause),
                () = sleep(settings.timeout()) => stop.order(Cause::Deadline(settings.timeout())),
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            done = running => done,
            () = ordering => unreachable!("it only gives an order"),
        }
    };
    output.log.close().await;
    if output.left == 0 {
        let text = format!(
            "{}: more output than {MAX_OUTPUT_BYTES} bytes was dropped",
            point.name()
        );
        run.log.writer().line(&text).await;
    }
    let is_late = stop
        .given()
        .is_some_and(|order| matches!(order.cause, Cause::Deadline(_)));
    match done {
        Ok(_) if is_late => Ok(None),
        Ok(done) => Ok(Some(done.ended)),
        // Such as a program for another machine, or a missing interpreter. 126 is what shells say of it.
        Err(error) => {
            run.log_failure(&error.to_string()).await;
            Ok(Some(Ended::Code(126)))
        }
    }
}

/// Takes a hook's output up to a limit, and reads on.
struct LimitedOutput {
    log: LogWriter,
    left: usize,
}

impl Consumer for LimitedOutput {
    async fn consume(&mut self, chunk: &[u8]) {
        let taken = chunk.len().min(self.left);
        self.left -= taken;
        if taken > 0 {
            self.log.write(&chunk[..taken]).await;
        }
    }
}

fn environment(context: &OperationContext<'_, '_>, folder: &Path) -> Vec<(OsString, OsString)> {
    let run = context.run;
    let inherited = run.child_env().inherited().filter(|(name, _)| {
        name.to_str()
            .is_some_and(|name| INHERITED.contains(&name) || name.starts_with("LC_"))
    });
    let own: [(&str, PathBuf); 4] = [
        ("HOME", folder.to_owned()),
        ("TMPDIR", folder.to_owned()),
        (env::HOOKS_DIR, run.hooks.folder().to_owned()),
        (env::HOOK_WORKING_DIR, context.prepared.working_dir.clone()),
    ];
    let mut environment = process::environment(inherited);
    environment.extend(run.hooks.variables().iter().cloned());
    environment.extend(process::environment(own));
    environment
}

/// The facts about the run. Ids and names only: the address of a source may hold a password.
fn metadata(context: &OperationContext<'_, '_>, point: HookPoint) -> Value {
    let (run, prepared) = (context.run, context.prepared);
    let job = &run.job;
    json!({
        "hook": point.name(),
        "organizationId": job.organization_id,
        "workspaceId": job.workspace_id,
        "jobId": job.job_id,
        "stepId": job.step_id,
        "operation": prepared.operation.banner_name().to_lowercase(),
        "destroys": prepared.operation.destroys(),
        "tool": prepared.tool.tool.to_string(),
        "toolVersion": prepared.tool.version.to_string(),
        "branch": job.branch,
        "commitId": prepared.workspace.commit_id,
        "workingDirectory": prepared.working_dir,
    })
}

fn json_text(value: &Value) -> Vec<u8> {
    serde_json::to_vec_pretty(value).expect("a JSON value has no failing serialiser")
}

/// Shows the result in the job context. A platform that does not take it still has the log.
async fn publish(
    context: &OperationContext<'_, '_>,
    point: HookPoint,
    outcome: &str,
    result: &HookResult,
    failure: Option<&str>,
    plan: Option<&ReviewedPlan>,
) {
    let run = context.run;
    let mut shown = json!({ "outcome": outcome, "hooks": run.hooks.digest() });
    if let Some(failure) = failure {
        shown["failure"] = failure.into();
    }
    if let Some(plan) = plan {
        shown["planSha256"] = plan.sha256().into();
    }
    if *result != HookResult::default() {
        shown["result"] = json!(result);
    }
    run.log.redactor().redact_json(&mut shown);
    let mut patch = Map::new();
    let shown = json!({ &run.step.step_id: { point.name(): shown } });
    patch.insert(CONTEXT_KEY.to_owned(), shown);
    let published = run.connections.platform.merge_context(&run.step, &patch);
    match timeout(CONTEXT_TIMEOUT, published).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(
            error = chain(&error),
            "the result of a hook is not in the job context"
        ),
        Err(_) => warn!("the result of a hook is not in the job context: no answer in time"),
    }
}
