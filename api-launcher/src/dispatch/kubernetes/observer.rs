//! What the watcher sees, told to the platform: why a run waits, in the run's own log, and how a run ended whose
//! executor could not say it.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::status::JobStatus;
use tracing::{info, warn};

use crate::cluster::watch::RunObserver;
use crate::cluster::{Cluster, RunKey};
use crate::dispatch::desk::{Desk, SettleError};
use crate::verdict::{Observation, Verdict, VerdictKind};

/// How often the platform is asked whether a run was cancelled (contract 11.4).
const CANCEL_POLL: Duration = Duration::from_secs(5);
/// What a started executor has to notice a cancellation by itself.
const HEAD_START: Duration = Duration::from_secs(10);

/// Speaks for runs at the platform's desk; without one, only in the launcher's own log.
#[derive(Debug)]
pub(super) struct Observer {
    desk: Option<Desk>,
    /// Runs that are not over, as far as the watcher has said.
    live: Mutex<BTreeSet<RunKey>>,
}

impl Observer {
    pub(super) const fn new(desk: Option<Desk>) -> Self {
        Self {
            desk,
            live: Mutex::new(BTreeSet::new()),
        }
    }

    /// Ends runs whose jobs the platform has cancelled. Runs until it is dropped.
    pub(super) async fn stop_cancelled(&self, cluster: &Cluster) {
        let Some(desk) = &self.desk else { return };
        let mut turns = tokio::time::interval(CANCEL_POLL);
        turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            turns.tick().await;
            for run in &self.live() {
                if !is_cancelled(desk, run) {
                    continue;
                }
                match cluster.cancel(&run.name, HEAD_START).await {
                    Ok(done) => info!(%run, ?done, "cancelled at the platform"),
                    Err(error) => warn!(%run, %error, "a cancelled run could not be stopped"),
                }
            }
        }
    }

    fn live(&self) -> BTreeSet<RunKey> {
        self.live
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn note(&self, run: &RunKey, sentence: &str) -> Result<(), SettleError> {
        let Some(desk) = &self.desk else {
            return Ok(());
        };
        match desk.known(&run.job_id, &run.step_id)? {
            Some(job) if !desk.stand(&job)?.is_settled() => desk.note(&job, sentence),
            _ => Ok(()),
        }
    }

    /// Fails the step on behalf of its executor, unless the platform knows an outcome.
    async fn settle(&self, run: &RunKey, verdict: &Verdict) -> Result<(), SettleError> {
        let Some(desk) = &self.desk else {
            return Ok(());
        };
        let Some(job) = desk.known(&run.job_id, &run.step_id)? else {
            return Ok(());
        };
        let stand = desk.stand(&job)?;
        if stand.is_settled() {
            return Ok(());
        }
        if stand.job.is_over() {
            return desk.skip(&job);
        }
        desk.fail(&job, &story(verdict), std::path::Path::new(""))
            .await
    }
}

impl RunObserver for Observer {
    fn on_observation(&self, run: &RunKey, observation: &Observation) {
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        match observation {
            Observation::Ended(_) => live.remove(run),
            Observation::Waiting(_) | Observation::Running => live.insert(run.clone()),
        };
        drop(live);
        if let Observation::Waiting(wait) = observation
            && wait.reason.is_news()
        {
            info!(%run, sentence = wait.sentence, "a run waits");
            if let Err(error) = self.note(run, &wait.sentence) {
                warn!(%run, %error, "the reason could not be written into the run's log");
            }
        }
    }

    fn on_ended<'a>(&'a self, run: &'a RunKey, verdict: &'a Verdict) -> BoxFuture<'a, bool> {
        async move {
            self.live.lock().unwrap_or_else(PoisonError::into_inner).remove(run);
            info!(%run, verdict = ?verdict.kind, sentence = verdict.sentence, "a run ended without a word of its executor");
            // An executor of another make ends with 0 only once it has reported.
            if verdict.kind == VerdictKind::Completed {
                return true;
            }
            match self.settle(run, verdict).await {
                Ok(()) => true,
                Err(error) => {
                    warn!(%run, %error, "the verdict could not be reported");
                    false
                }
            }
        }
        .boxed()
    }
}

fn is_cancelled(desk: &Desk, run: &RunKey) -> bool {
    let stand = desk
        .known(&run.job_id, &run.step_id)
        .and_then(|job| job.map(|job| desk.stand(&job)).transpose());
    matches!(stand, Ok(Some(stand)) if stand.job == JobStatus::Cancelled)
}

/// The verdict as people read it in the run's log.
fn story(verdict: &Verdict) -> String {
    let evidence = verdict
        .evidence
        .iter()
        .map(|evidence| format!("  {}: {}", evidence.source, evidence.text));
    let advice = verdict
        .advice
        .iter()
        .map(|advice| format!("What to do: {advice}"));
    let lines: Vec<String> = std::iter::once(verdict.sentence.clone())
        .chain(evidence)
        .chain(advice)
        .collect();
    lines.join("\n")
}
