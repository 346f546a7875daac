//! The sweep (contract 2.6): a job that is with an executor and has no heartbeat fails, once a grace period since its
//! last change is over.

use std::sync::Arc;
use std::time::Duration;

use crate::ledger::Actor;
use crate::platform::Shared;
use crate::records::Status;

const EVERY: Duration = Duration::from_millis(200);

/// Looks again and again, for ever. Without Redis there is nothing to judge by.
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
                // A Redis that does not answer says nothing about anybody.
                Err(_) => {}
            }
        }
    }
}

fn overdue(shared: &Shared) -> Vec<u32> {
    let grace = shared.settings.grace;
    shared.read(|records| {
        records
            .jobs
            .values()
            .filter(|job| job.status.is_with_an_executor() && job.updated.elapsed() > grace)
            .map(|job| job.id)
            .collect()
    })
}

async fn fail(shared: &Shared, id: u32) {
    let row = shared.row(id);
    let held = row.lock().await;
    let failed = shared.write(|records| {
        let job = records.job(id);
        let late = job.updated.elapsed() > shared.settings.grace;
        let still = job.status.is_with_an_executor() && late;
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
