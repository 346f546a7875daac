//! Transitions that report the end of runs, also of runs whose Job is gone. Pure.

use job_contract::annotations;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use verdict::{Observation, Verdict};

use super::message::{Diagnostic, Effect, JobRef, ObserverCall, Request};
use super::observer::ReportOutcome;
use super::release::LOOK_AGAIN;
use super::report::GoneRun;
use super::run::{JobStage, TrackedRun};
use super::state::{Transition, Wakeup};
use crate::annotation;
use crate::submit::KEPT_UNREPORTED;

impl Transition<'_> {
    /// Reports the end of a run, or writes down that it is reported. Does nothing while a report is in progress or before
    /// its next attempt is due.
    pub(super) fn report_end(&mut self, run: &mut TrackedRun, verdict: Verdict) {
        if run.report.is_in_progress {
            return;
        }
        let keep = run.time_to_live(self.now.server);
        if run.report.is_done {
            // One request notes the report and the time the Job is kept. It may have failed. The verdict on a run that was
            // given up still says that its Job is not over.
            let is_over = verdict.job_over || run.stage == JobStage::Over;
            if keep.is_some() && is_over {
                let verdict = None;
                self.begin_report(run, Request::NoteReported { verdict, keep });
            }
            return;
        }
        if let Some(due) = run.report.due.filter(|due| *due > self.now.server) {
            self.wake_at(due, &run.job_ref.run.name);
            return;
        }
        let has_reported = verdict.executor_reported() && verdict.job_over;
        let needs_supplement = has_reported && verdict.needs_supplement();
        let verdict = Box::new(verdict);
        let request = if !has_reported {
            Request::Report { verdict, keep }
        } else if needs_supplement {
            Request::CompleteReport { verdict, keep }
        } else {
            // The report of a pod that is being deleted is lost with the pod.
            let JobRef { run, uid } = &run.job_ref;
            let are_going = self.state.pods.are_going(&run.name, uid);
            let verdict = are_going.then_some(verdict);
            Request::NoteReported { verdict, keep }
        };
        self.begin_report(run, request);
    }

    fn begin_report(&mut self, run: &mut TrackedRun, request: Request) {
        run.report.is_in_progress = true;
        self.request(&run.job_ref, request);
    }

    pub(super) fn on_reported(&mut self, job: &JobRef, outcome: &ReportOutcome) {
        let (first, now) = (self.state.settings.report_again, self.now);
        let Some(run) = self.state.run_of(job) else {
            // Its Job went meanwhile.
            self.on_gone_reported(job, outcome);
            return;
        };
        run.report.is_in_progress = false;
        if *outcome == ReportOutcome::Retry {
            let due = run.report.retry(&job.uid, first, now);
            self.wake_at(due, &job.run.name);
            return;
        }
        run.report.is_done = true;
        // Unless the watch shows the Job with its own time to live by then, it is written again.
        if run.report.keep_seconds.is_some() {
            self.wake_after(LOOK_AGAIN, &job.run.name);
        }
    }

    /// Takes in that the Job of a run is gone. If its end is not reported yet, the report continues without the Job.
    pub(super) fn on_job_gone(&mut self, name: &str) {
        let Some(run) = self.state.runs.remove(name) else {
            return;
        };
        let run = *run;
        let uid = run.job_ref.uid.clone();
        let pods = self.state.pods.of(name, &uid);
        self.state.pods.forget(name);
        self.state.removing.remove(&uid);
        self.effects.push(Effect::ForgetSecret(uid.clone()));
        let job: Job = run.job.open();
        // A Job that never got its job data was never accepted: no platform waits for it.
        let is_unaccepted = (run.stage == JobStage::Held && self.state.releasing.remove(&uid))
            || annotation(&job.metadata, annotations::NOT_ACCEPTED).is_some();
        if run.report.is_done || is_unaccepted {
            self.forget(&run.job_ref.run);
            return;
        }
        let verdict = verdict::gone(&job, &pods, &run.events.open());
        let observation = Observation::Ended(Box::new(verdict.clone()));
        let key = run.job_ref.run.clone();
        self.call(ObserverCall::Observation(key, observation));
        if verdict.executor_reported() {
            return;
        }
        if was_kept_long_enough(&run, self.now.server) {
            self.give_up(&run.job_ref);
            return;
        }
        self.report_without_job(run, verdict);
    }

    fn report_without_job(&mut self, run: TrackedRun, verdict: Verdict) {
        let JobRef { run: key, uid } = run.job_ref;
        let first = self.state.settings.report_again;
        let is_in_progress = run.report.is_in_progress;
        let gone = GoneRun::new(key, &uid, verdict, run.report, first, self.now);
        let due = gone.due;
        self.state.gone_runs.insert(uid.clone(), gone);
        match due {
            _ if is_in_progress => {}
            Some(due) => self.wake_gone_at(due, uid),
            None => self.report_gone(&uid),
        }
    }

    /// Begins the next attempt to report a run whose Job is gone.
    pub(super) fn report_gone(&mut self, uid: &str) {
        let Some(gone) = self.state.gone_runs.get_mut(uid) else {
            return;
        };
        gone.due = None;
        let job = JobRef {
            run: gone.key.clone(),
            uid: uid.to_owned(),
        };
        let verdict = Box::new(gone.verdict.clone());
        self.request(&job, Request::ReportGone { verdict });
    }

    pub(super) fn on_gone_reported(&mut self, job: &JobRef, outcome: &ReportOutcome) {
        let now = self.now;
        let Some(gone) = self.state.gone_runs.get_mut(&job.uid) else {
            return;
        };
        if *outcome != ReportOutcome::Retry {
            self.state.gone_runs.remove(&job.uid);
            return;
        }
        if now.local.duration_since(gone.since) >= KEPT_UNREPORTED {
            self.state.gone_runs.remove(&job.uid);
            self.give_up(job);
            return;
        }
        let due = gone.retry(now);
        self.wake_gone_at(due, job.uid.clone());
    }

    fn wake_gone_at(&mut self, at: Timestamp, uid: String) {
        self.state.wakeups.insert((at, Wakeup::GoneRun(uid)));
    }

    fn give_up(&mut self, job: &JobRef) {
        self.log(Diagnostic::NeverReported(job.run.clone()));
        self.forget(&job.run);
    }
}

/// Whether a Job was kept for its report for as long as a report may take.
fn was_kept_long_enough(run: &TrackedRun, now: Timestamp) -> bool {
    let kept = SignedDuration::try_from(KEPT_UNREPORTED).unwrap_or(SignedDuration::MAX);
    run.end
        .is_some_and(|end| now.duration_since(end.finished) >= kept)
}
