//! Releases the lock on the state if the tool died with it, and names a lock of another run (decision 0011).
//!
//! `terraform::lock_error` decides which process had a lock.

use std::time::{Duration, SystemTime};

use job_contract::Tool;
use job_contract::keys::PLAN_FILE;
use job_contract::progress::Phase;
use job_contract::report::{LockStatus, StateLock};
use tracing::{info, warn};

use crate::child_env::ChildEnv;
use crate::context::RunContext;
use crate::operation::OperationContext;
use crate::process::{Completion, Ended};
use crate::state_server::StateServer;
use crate::step_result::{OperationDetails, join_present};
use crate::terraform::Terraform;
use crate::terraform::lock_error::EndedTool;

/// How long the hub may take to release a lock. If it does not, it releases the lock when the task is over.
const HUB_TIMEOUT: Duration = Duration::from_secs(10);

/// The tool's process if it may have left its lock: it died, its end was not observed, or its output said so. A tool
/// that ends in another way has released its lock.
pub(crate) fn find_tool_with_lock(
    context: &OperationContext<'_, '_>,
    started: SystemTime,
    done: Option<Completion>,
) -> Option<EndedTool> {
    let (run, terraform) = (context.run, &context.terraform);
    let phase = context.prepared.operation.phase();
    let has_released = match done.map(|done| done.ended) {
        // A tool that crashes ends with the same exit code.
        Some(Ended::Code(2)) => {
            phase == Phase::Plan && terraform.working_dir.join(PLAN_FILE).exists()
        }
        Some(Ended::Code(code)) => matches!(code, 0 | 1),
        Some(Ended::Signal(_)) | None => false,
    };
    if has_released && !terraform.events.locks().is_unreleased() {
        return None;
    }
    let host = nix::unistd::gethostname().ok()?.into_string().ok()?;
    Some(EndedTool {
        operation: match phase {
            Phase::Plan => "OperationTypePlan",
            _ => "OperationTypeApply",
        },
        // The check fails for pods in the node's network: their host name is that of the node.
        host_is_unique: run.config.run.pod_name.as_ref() == Some(&host),
        host,
        started,
        locked_at: terraform.events.progress().locked_at(),
    })
}

/// Releases the lock of the step at the hub, if the hub keeps the state. It knows the locks of the step, and the tool would not say
/// who has one. The tool has ended.
pub(crate) async fn release_lock_at_hub(run: &RunContext<'_>) {
    let Some(server) = &run.state_server else {
        return;
    };
    let deadline = run.while_saving(HUB_TIMEOUT);
    tokio::select! {
        biased;
        () = server.release_lock() => {}
        () = deadline.over() => warn!("the hub does not answer whether the tool left its lock"),
    }
}

/// Finds and releases the lock that the tool left. The caller has read everything it needs from the state.
pub(crate) async fn release_leftover_lock(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
    tool: &EndedTool,
) -> Option<StateLock> {
    if run.state_server.is_some() {
        release_lock_at_hub(run).await;
        return None;
    }
    let probe = terraform.probe_lock(env).await;
    let lock = match &probe {
        Ok(output) if output.ok => return None,
        Ok(output) => output.lock(),
        Err(_) => None,
    };
    let Some(lock) = lock else {
        warn!(
            error = probe.as_ref().err().map(ToString::to_string),
            "whether the tool left its lock on the state is not known"
        );
        if let Ok(output) = &probe {
            run.log_output(&output.text).await;
        }
        let text = "Whether the tool left its lock on the state is not known.";
        run.log_failure(text).await;
        return None;
    };
    if tool.may_have_taken(&lock) {
        return Some(release_own_lock(run, terraform, env, tool, lock).await);
    }
    info!(
        lock.id,
        lock.who, "the state is locked, and not by this run"
    );
    None
}

/// Releases a lock only if the dead process certainly took it. It never touches any other lock.
pub(crate) async fn release_own_lock(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
    tool: &EndedTool,
    lock: StateLock,
) -> StateLock {
    if !tool.may_have_taken(&lock) {
        return lock;
    }
    if tool.certainly_took(&lock) {
        match terraform.force_unlock(env, &lock.id).await {
            Ok(output) if output.ok => {
                let text = format!(
                    "The tool left its lock {} on the state. It is released.",
                    lock.id
                );
                run.log.writer().line(&text).await;
                return StateLock {
                    status: LockStatus::Released,
                    ..lock
                };
            }
            Ok(output) => run.log_output(&output.text).await,
            Err(error) => warn!(%error, "the lock could not be released"),
        }
    }
    let text = format!("The state is still locked {}.", describe(&lock));
    run.log_failure(&text).await;
    StateLock {
        status: LockStatus::LeftBehind,
        ..lock
    }
}

/// Records the lock of another run or person if it blocked the tool. Then the tool changed nothing.
pub(crate) fn record_blocking_lock(
    context: &OperationContext<'_, '_>,
    details: &mut OperationDetails,
) -> bool {
    let Some(lock) = context.terraform.events.locks().blocking() else {
        return false;
    };
    let server = context.run.state_server.as_ref();
    let lock = server.and_then(StateServer::blocking_lock).unwrap_or(lock);
    details.sentence = Some(format!(
        "the state is locked {}: nothing was changed",
        describe(&lock)
    ));
    details.lock = Some(lock);
    add_unlock_hint(context, details);
    true
}

/// Adds advice about the lock to the hint.
pub(crate) fn add_unlock_hint(context: &OperationContext<'_, '_>, details: &mut OperationDetails) {
    let lock = details.lock.as_ref();
    let advice = lock.and_then(|lock| unlock_hint(lock, context.run.job.tool()));
    details.hint = join_present([details.hint.take(), advice], "; ");
}

/// The holder and the age of a lock, for people.
fn describe(lock: &StateLock) -> String {
    // People do not need fractions of seconds.
    let since = lock.created.split('.').next().unwrap_or_default();
    let since = since.trim_end_matches(" +0000 UTC").trim_end_matches('Z');
    format!(
        "by {} since {since} UTC ({}, lock {})",
        lock.who, lock.operation, lock.id
    )
}

/// Advice about a lock that was not released.
fn unlock_hint(lock: &StateLock, tool: Tool) -> Option<String> {
    let unlock = format!("`{} force-unlock {}`", tool.binary(), lock.id);
    match lock.status {
        LockStatus::InTheWay => Some(format!(
            "wait until the run that holds the lock has ended; if that run no longer exists, release the lock with {unlock}"
        )),
        LockStatus::LeftBehind => Some(format!(
            "once nothing else runs on this workspace, release the lock with {unlock}"
        )),
        LockStatus::Released => None,
    }
}
