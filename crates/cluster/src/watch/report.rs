//! The attempts to report the end of one run. There is one series of attempts, whatever else makes the watcher look at the
//! run. Pure.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::{Duration, Instant};

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use k8s_openapi::jiff::Timestamp;
use verdict::Verdict;

use super::message::Now;
use crate::RunRef;

/// The longest pause between two attempts, without its jitter.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// How far the report of a run has come.
#[derive(Debug, Default)]
pub(super) struct ReportProgress {
    /// There is nothing more to report: the platform knows how the run ended, or will never accept it.
    pub(super) is_done: bool,
    pub(super) is_in_progress: bool,
    /// Before this time there is no further attempt.
    pub(super) due: Option<Timestamp>,
    pauses: Option<ReportPauses>,
    /// How long the Job is to be kept once its end is reported. `None` once this is set, or if it is kept as it is.
    pub(super) keep_seconds: Option<i32>,
}

impl ReportProgress {
    /// Plans the attempt after one that failed, and returns its time.
    pub(super) fn retry(&mut self, uid: &str, first: Duration, now: Now) -> Timestamp {
        let pauses = self
            .pauses
            .get_or_insert_with(|| ReportPauses::new(uid, first));
        let due = now.after(pauses.next());
        self.due = Some(due);
        due
    }
}

/// The report of a run whose Job is gone.
#[derive(Debug)]
pub(super) struct GoneRun {
    pub(super) key: RunRef,
    pub(super) verdict: Verdict,
    /// The time of the next attempt. `None` while one is in progress.
    pub(super) due: Option<Timestamp>,
    pauses: ReportPauses,
    /// When its Job was seen to be gone.
    pub(super) since: Instant,
}

impl GoneRun {
    /// Continues the attempts that were begun while the Job was there.
    pub(super) fn new(
        key: RunRef,
        uid: &str,
        verdict: Verdict,
        report: ReportProgress,
        first: Duration,
        now: Now,
    ) -> Self {
        let due = report.due.filter(|due| *due > now.server);
        Self {
            key,
            verdict,
            // What is in progress brings a response.
            due: due.filter(|_| !report.is_in_progress),
            pauses: report
                .pauses
                .unwrap_or_else(|| ReportPauses::new(uid, first)),
            since: now.local,
        }
    }

    /// Plans the attempt after one that failed, and returns its time.
    pub(super) fn retry(&mut self, now: Now) -> Timestamp {
        let due = now.after(self.pauses.next());
        self.due = Some(due);
        due
    }
}

/// The pauses between the attempts to report one run. They double, with a jitter that differs from run to run.
#[derive(Debug)]
struct ReportPauses(Box<ExponentialBackoff>);

impl ReportPauses {
    fn new(uid: &str, first: Duration) -> Self {
        let mut seed = DefaultHasher::new();
        uid.hash(&mut seed);
        let pauses = ExponentialBuilder::default()
            .with_min_delay(first)
            .with_max_delay(LONGEST_PAUSE.max(first))
            .with_jitter()
            .with_jitter_seed(seed.finish())
            .without_max_times()
            .build();
        Self(Box::new(pauses))
    }

    fn next(&mut self) -> Duration {
        self.0.next().unwrap_or(LONGEST_PAUSE)
    }
}
