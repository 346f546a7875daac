//! What lets no run of the cluster start, as long as it stands: a namespace or a right that is missing.
//!
//! It may pass by itself, as while manifests are applied, so dispatches are put off at first. But the platform dispatches
//! in one order for all organizations: a run that is put off for ever holds up all others. So after a while runs are
//! accepted and failed with the reason (contract 3.6).

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::metrics::Metrics;

/// How long dispatches are put off. The platform dispatches again after 30 seconds.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// Who met the barrier. What only a dispatch has met, only a dispatch can find gone: it uses more rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Witness {
    Probe,
    Dispatch,
}

/// How it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stand {
    /// Nothing is in the way.
    Open,
    /// Dispatches are put off, for this reason.
    PutsOff(String),
    /// Runs fail, for this reason.
    Fails(String),
}

#[derive(Debug)]
struct Met {
    since: Instant,
    by: Witness,
    reason: String,
}

/// The memory of this process. Another replica makes its own experience.
#[derive(Debug)]
pub(super) struct Barrier {
    patience: Duration,
    metrics: Metrics,
    met: Mutex<Option<Met>>,
}

impl Barrier {
    pub(super) const fn new(patience: Duration, metrics: Metrics) -> Self {
        Self {
            patience,
            metrics,
            met: Mutex::new(None),
        }
    }

    /// Notes that it stands, and says how.
    pub(super) fn met(&self, by: Witness, reason: &str) -> Stand {
        let mut met = self.met.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &mut *met {
            known.by = known.by.max(by);
            reason.clone_into(&mut known.reason);
        } else {
            warn!(
                reason,
                seconds = self.patience.as_secs(),
                "the cluster lets no run start; if that lasts, runs are accepted and failed with this reason"
            );
            self.metrics.barred(true);
            *met = Some(Met {
                since: Instant::now(),
                by,
                reason: reason.to_owned(),
            });
        }
        stand(met.as_ref(), self.patience)
    }

    /// Notes that nothing was in the way of this witness.
    pub(super) fn passed(&self, by: Witness) {
        let mut met = self.met.lock().unwrap_or_else(PoisonError::into_inner);
        if met.take_if(|known| known.by <= by).is_some() {
            info!("the cluster lets runs start again");
            self.metrics.barred(false);
        }
    }

    pub(super) fn stand(&self) -> Stand {
        let met = self.met.lock().unwrap_or_else(PoisonError::into_inner);
        stand(met.as_ref(), self.patience)
    }
}

fn stand(met: Option<&Met>, patience: Duration) -> Stand {
    match met {
        None => Stand::Open,
        Some(met) if met.since.elapsed() < patience => Stand::PutsOff(met.reason.clone()),
        Some(met) => Stand::Fails(met.reason.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_put_off_at_first_and_fail_when_it_lasts() {
        let metrics = Metrics::default().for_cluster();
        let young = Barrier::new(PATIENCE, metrics.clone());
        assert_eq!(young.stand(), Stand::Open);
        let reason = || "no right".to_owned();
        assert_eq!(
            young.met(Witness::Dispatch, "no right"),
            Stand::PutsOff(reason())
        );
        assert!(metrics.render(None).contains("mayfly_barred 1\n"));
        let old = Barrier::new(Duration::ZERO, Metrics::default());
        old.met(Witness::Probe, "no right");
        assert_eq!(old.stand(), Stand::Fails(reason()));
    }

    #[test]
    fn only_who_does_as_much_finds_it_gone() {
        let metrics = Metrics::default().for_cluster();
        let barrier = Barrier::new(PATIENCE, metrics.clone());
        barrier.met(Witness::Dispatch, "no right to create Secrets");
        // A probe makes no Secret.
        barrier.passed(Witness::Probe);
        assert_ne!(barrier.stand(), Stand::Open);
        barrier.passed(Witness::Dispatch);
        assert_eq!(barrier.stand(), Stand::Open);
        assert!(metrics.render(None).contains("mayfly_barred 0\n"));
        barrier.met(Witness::Probe, "no namespace");
        barrier.passed(Witness::Probe);
        assert_eq!(barrier.stand(), Stand::Open);
    }
}
