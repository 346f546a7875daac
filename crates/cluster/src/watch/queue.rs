//! Transitions over all runs: the release of suspended Jobs, and the removal of Jobs beyond the history limits. Pure.

use k8s_openapi::api::batch::v1::Job;

use super::history::{EndedRun, HistoryLimits, surplus};
use super::message::{Diagnostic, JobRef, ObserverCall, Request};
use super::observer::RunCounts;
use super::release::{Candidate, LOOK_AGAIN, split};
use super::run::JobStage;
use super::state::{Transition, Wakeup};
use crate::ClusterError;
use crate::submit::{ReleaseOutcome, trial_advice};

impl Transition<'_> {
    /// Releases the suspended Jobs whose turn it is, and tells the observer of those that wait.
    pub(super) fn review_releases(&mut self) {
        if !self.state.jobs_listed {
            return;
        }
        let limit = self.state.max_in_flight;
        let now = self.now.local;
        let mut counts = RunCounts::default();
        let mut candidates = Vec::new();
        let mut later = Vec::new();
        let mut due_now = Vec::new();
        for (name, run) in &self.state.runs {
            let is_releasing = self.state.releasing.contains(&run.job_ref.uid);
            match run.stage {
                JobStage::InFlight => counts.in_flight += 1,
                JobStage::Held if is_releasing => counts.in_flight += 1,
                JobStage::Held => counts.held += 1,
                JobStage::Queued => counts.queued += 1,
                JobStage::Over => {}
            }
            let is_outside_queue = run.stage == JobStage::Queued && run.release.awaits_queue;
            if is_releasing || !(is_outside_queue || run.stage == JobStage::Held) {
                continue;
            }
            let due = run.release.due(run.first_seen, limit);
            if due > now {
                later.push((name.clone(), due - now));
            } else if is_outside_queue {
                due_now.push(name.clone());
            } else {
                candidates.push(Candidate {
                    created: run.created,
                    name: name.clone(),
                });
            }
        }
        let (released, waiting) = split(candidates, counts.in_flight, limit);
        counts.held -= released.len();
        counts.in_flight += released.len();
        self.call(ObserverCall::Counts(counts));
        for candidate in waiting {
            self.announce_queued(&candidate.name);
        }
        for (name, pause) in later {
            let is_run = |wakeup: &Wakeup| matches!(wakeup, Wakeup::Run(run) if *run == name);
            if !self.state.wakeups.iter().any(|(_, wakeup)| is_run(wakeup)) {
                self.wake_after(pause, &name);
            }
        }
        due_now.extend(released.into_iter().map(|candidate| candidate.name));
        for name in due_now {
            self.release(&name);
        }
    }

    /// Tells the observer of a run that waits for its turn, once.
    fn announce_queued(&mut self, name: &str) {
        let Some((name, mut run)) = self.state.runs.remove_entry(name) else {
            return;
        };
        if run.announced.is_none() {
            let job: Job = run.job.open();
            let timeouts = &self.state.settings.timeouts;
            let observation = verdict::observe(&job, &[], &[], self.now.server, timeouts);
            self.announce(&mut run, &observation);
        }
        self.state.runs.insert(name, run);
    }

    fn release(&mut self, name: &str) {
        let Some(run) = self.state.runs.get(name) else {
            return;
        };
        let age = self.now.local.duration_since(run.first_seen);
        let remove_incomplete = age >= self.state.settings.incomplete_after;
        let job = run.job_ref.clone();
        self.state.releasing.insert(job.uid.clone());
        self.request(&job, Request::Release { remove_incomplete });
    }

    pub(super) fn on_released(
        &mut self,
        job: &JobRef,
        outcome: Result<ReleaseOutcome, ClusterError>,
    ) {
        let is_tracked = self.state.run_of(job).is_some();
        // A removed Job stays in this set until its deletion is seen, which then ends it without a report.
        if !is_tracked || !matches!(outcome, Ok(ReleaseOutcome::Removed)) {
            self.state.releasing.remove(&job.uid);
        }
        let now = self.now.local;
        let Some(run) = self.state.run_of(job) else {
            return;
        };
        match outcome {
            // The watch will say so too.
            Ok(ReleaseOutcome::Released) if run.stage == JobStage::Queued => {
                run.release.awaits_queue = false;
            }
            // Until then the run needs its slot.
            Ok(ReleaseOutcome::Released) => run.stage = JobStage::InFlight,
            Ok(ReleaseOutcome::Removed) => {}
            outcome => {
                run.release.not_before = Some(now + LOOK_AGAIN);
                let blocked = outcome
                    .err()
                    .and_then(|error| Some((trial_advice(&error)?, error)));
                if let Some((advice, error)) = blocked
                    && !std::mem::replace(&mut run.release.is_logged, true)
                {
                    self.log(Diagnostic::StaysSuspended {
                        run: job.run.clone(),
                        error: error.to_string(),
                        advice,
                    });
                }
                self.wake_after(LOOK_AGAIN, &job.run.name);
            }
        }
    }

    /// Removes the oldest ended Jobs beyond the history limits.
    pub(super) fn review_history(&mut self) {
        let limits = self.state.settings.history;
        if limits == HistoryLimits::NONE || !self.state.jobs_listed {
            return;
        }
        let reported = self.state.runs.iter().filter(|(_, run)| {
            run.report.is_done && !self.state.removing.contains(&run.job_ref.uid)
        });
        let ended = reported.filter_map(|(name, run)| {
            let end = run.end?;
            Some(EndedRun {
                name: name.clone(),
                successful: end.is_successful,
                finished: end.finished,
            })
        });
        for name in surplus(ended.collect(), limits) {
            let Some(run) = self.state.runs.get(&name) else {
                continue;
            };
            let job = run.job_ref.clone();
            self.state.removing.insert(job.uid.clone());
            self.request(&job, Request::Remove);
        }
    }
}
