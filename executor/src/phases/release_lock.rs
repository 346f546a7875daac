//! The lock on the state after the tool: given back when the tool died with it, told when it is somebody else's.

use std::time::SystemTime;

use job_contract::Tool;
use job_contract::chain;
use job_contract::keys::PLAN_FILE;
use job_contract::progress::Phase;
use job_contract::report::{LockStanding, StateLock};
use tracing::{info, warn};

use crate::child_env::ChildEnv;
use crate::context::RunContext;
use crate::process::{Completion, Ended};
use crate::terraform::Terraform;
use crate::terraform::lock_error::Tenure;

/// The tenure of a process of the tool that may have left its lock, if it may: one that died, that nobody saw end, or
/// that said so. Whatever else ends has given its lock back.
pub(crate) fn tenure(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    phase: Phase,
    started: SystemTime,
    done: Option<Completion>,
) -> Option<Tenure> {
    let gave_back = match done.map(|done| done.ended) {
        // A tool that crashes ends with the same code.
        Some(Ended::Code(2)) => {
            phase == Phase::Plan && terraform.working_dir.join(PLAN_FILE).exists()
        }
        Some(Ended::Code(code)) => matches!(code, 0 | 1),
        Some(Ended::Signal(_)) | None => false,
    };
    if gave_back && !terraform.events.locks().is_unreleased() {
        return None;
    }
    let host = nix::unistd::gethostname().ok()?.into_string().ok()?;
    Some(Tenure {
        operation: match phase {
            Phase::Plan => "OperationTypePlan",
            _ => "OperationTypeApply",
        },
        // Pods on the network of their node share its name instead.
        host_is_ours_alone: run.config.run.pod_name.as_ref() == Some(&host),
        host,
        started,
        held: terraform.events.progress().locked_by(),
    })
}

/// Looks for the lock the tool left and gives it back. Whatever had to be read from the state has been read.
pub(crate) async fn release(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
    tenure: &Tenure,
) -> Option<StateLock> {
    let probe = terraform.touch_lock(env).await;
    let lock = match &probe {
        Ok(said) if said.ok => return None,
        Ok(said) => said.lock(),
        Err(_) => None,
    };
    let Some(lock) = lock else {
        let error = probe.as_ref().err().map(|error| chain(error));
        warn!(
            error,
            "whether the tool left its lock on the state is not known"
        );
        let mut log = run.log.writer();
        if let Ok(said) = &probe {
            log.write(&said.words).await;
        }
        let text = "Whether the tool left its lock on the state is not known.";
        log.line(&run.palette().failure(text)).await;
        log.close().await;
        return None;
    };
    if tenure.allows(&lock) {
        return Some(settle(run, terraform, env, tenure, lock).await);
    }
    info!(
        lock.id,
        lock.who, "the state is locked, and not by this run"
    );
    None
}

/// Gives a lock back if it certainly was the dead process's own. Nobody else's is ever touched.
pub(crate) async fn settle(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
    tenure: &Tenure,
    lock: StateLock,
) -> StateLock {
    let log = run.log.writer();
    if !tenure.allows(&lock) {
        return lock;
    }
    if tenure.proves(&lock) {
        match terraform.force_unlock(env, &lock.id).await {
            Ok(said) if said.ok => {
                let text = format!(
                    "The tool left its lock {} on the state. It is released.",
                    lock.id
                );
                log.line(&text).await;
                return StateLock {
                    standing: LockStanding::Released,
                    ..lock
                };
            }
            Ok(said) => {
                let mut log = run.log.writer();
                log.write(&said.words).await;
                log.close().await;
            }
            Err(error) => warn!(error = chain(&error), "the lock could not be released"),
        }
    }
    let text = format!("The state is still locked {}.", words(&lock));
    log.line(&run.palette().failure(&text)).await;
    StateLock {
        standing: LockStanding::LeftBehind,
        ..lock
    }
}

/// By whom and since when, for people.
pub(crate) fn words(lock: &StateLock) -> String {
    // Fractions of seconds are of no use to them.
    let since = lock.created.split('.').next().unwrap_or_default();
    let since = since.trim_end_matches(" +0000 UTC").trim_end_matches('Z');
    format!(
        "by {} since {since} UTC ({}, lock {})",
        lock.who, lock.operation, lock.id
    )
}

/// What to do about a lock that stands.
pub(crate) fn advice(lock: &StateLock, tool: Tool) -> Option<String> {
    let unlock = format!("`{} force-unlock {}`", tool.binary(), lock.id);
    match lock.standing {
        LockStanding::InTheWay => Some(format!(
            "wait until the run that holds the lock has ended; if there is none any more, release the lock with {unlock}"
        )),
        LockStanding::LeftBehind => Some(format!(
            "once nothing else runs on this workspace, release the lock with {unlock}"
        )),
        LockStanding::Released => None,
    }
}
