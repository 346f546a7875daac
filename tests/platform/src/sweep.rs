//! The sweep (contract 2.6). It fails a dispatched job without a heartbeat after the grace period since its last change.

use std::sync::Arc;
use std::time::Duration;

use crate::ledger::Actor;
use crate::platform::Shared;
use crate::records::{Job, Status};

const EVERY: Duration = Duration::from_millis(200);

/// Checks all jobs again and again. Without Redis there are no heartbeats to check.
pub(crate) async fn run(shared: Arc<Shared>) {
    if !shared.streams.has_redis() {
        return;
    }
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        for job in overdue(&shared) {
            match shared.streams.heartbeat(job).await {
                Ok(None) => fail(&shared, job).await,
                Ok(Some(_)) => shared.write(|records| records.job_mut(job).spared += 1),
                // Without an answer of Redis no job fails.
                Err(_) => {}
            }
        }
    }
}

/// A job without a heartbeat is lost by now.
fn is_late(job: &Job, grace: Duration) -> bool {
    let late = job.grace_ended || job.updated.elapsed() > grace;
    job.status.is_with_an_executor() && late
}

fn overdue(shared: &Shared) -> Vec<u32> {
    let grace = shared.settings.grace;
    shared.read(|records| {
        records
            .jobs
            .values()
            .filter(|job| is_late(job, grace))
            .map(|job| job.id)
            .collect()
    })
}

async fn fail(shared: &Shared, id: u32) {
    let row = shared.row(id);
    let held = row.lock().await;
    let failed = shared.write(|records| {
        let still = is_late(records.job(id), shared.settings.grace);
        if still {
            records.set_job(id, Status::Failed, Actor::Sweep);
            records.close_steps(id, Status::Failed, Actor::Sweep);
        }
        still
    });
    drop(held);
    if failed {
        shared.fire(id);
    }
}
