//! Transitions that look at one run: the observation, the calls of the observer, and what the state of the run needs. Pure.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use verdict::{Observation, Verdict, executor_started, newest};

use super::events::EventsNeed;
use super::message::{ObserverCall, Request};
use super::run::{JobStage, TrackedRun};
use super::state::{PodAccess, Transition};
use crate::view::recorded_verdict;

impl Transition<'_> {
    pub(super) fn observe_all(&mut self) {
        let names: Vec<String> = self.state.runs.keys().cloned().collect();
        for name in names {
            self.observe(&name);
        }
    }

    /// Looks at a run, tells the observer what is new, and does what the run's state needs.
    pub(super) fn observe(&mut self, name: &str) {
        if !self.state.jobs_listed || self.state.pod_access == PodAccess::NotYet {
            return;
        }
        // Out of the table while it is looked at.
        if let Some((name, mut run)) = self.state.runs.remove_entry(name) {
            self.observe_run(&mut run);
            self.state.runs.insert(name, run);
        }
    }

    fn observe_run(&mut self, run: &mut TrackedRun) {
        let job = run.released_job();
        let pods = self.state.pods.of(&run.job_ref.run.name, &run.job_ref.uid);
        let now = self.now.server;
        // A run that was given up is ended by its deadline, which would hide why. The verdict on the Job says it.
        let recorded = recorded_verdict(&job).map(|verdict| verdict.with_pod_of(&pods));
        let recorded = recorded.map(|verdict| Observation::Ended(Box::new(verdict)));
        let observation = recorded
            .or_else(|| self.state.without_pods(&job))
            .unwrap_or_else(|| {
                let timeouts = &self.state.settings.timeouts;
                verdict::observe(&job, &pods, &run.events.open(), now, timeouts)
            });
        let lost = self.lost_node(run, &observation, &pods);
        let observation = lost.map_or(observation, |lost| Observation::Ended(Box::new(lost)));
        if self.awaits_events(run, &observation, &pods) {
            return;
        }
        // Whether a held run has to wait for its turn is known when the release queue is reviewed.
        if run.stage == JobStage::Held && !matches!(observation, Observation::Ended(_)) {
            return;
        }
        if self.announce(run, &observation) && observation == Observation::InProgress {
            let started = newest(&pods).and_then(executor_started);
            let since = started.map(|at| Duration::try_from(now.duration_since(at)));
            let since = since.map(Result::unwrap_or_default);
            let key = run.job_ref.run.clone();
            self.call(ObserverCall::Running(key, since));
        }
        match observation {
            Observation::Waiting(wait) => {
                if let Some(until) = wait.until {
                    self.wake_at(until.max(now), &run.job_ref.run.name);
                }
            }
            Observation::InProgress => {}
            Observation::Ended(verdict) => {
                self.fill_store(run, &pods);
                self.stop_lingering(run, &verdict, &pods);
                self.report_end(run, *verdict);
            }
        }
    }

    /// The verdict on a run whose node is lost. Kubernetes shows such a run as running, for minutes or for ever. If the node
    /// only cannot be reached, its executor may be at work: the heartbeat decides. Where heartbeats cannot be read, the run
    /// has the time until Kubernetes gives its pod up.
    fn lost_node(
        &mut self,
        run: &mut TrackedRun,
        observation: &Observation,
        pods: &[Pod],
    ) -> Option<Verdict> {
        let has_ended = matches!(observation, Observation::Ended(_));
        let may_be_lost = !has_ended && run.stage == JobStage::InFlight;
        // A pod that is gone looks like one whose deletion is overdue.
        let present = if may_be_lost && verdict::suspect(pods).is_some() {
            let (name, uid) = (&run.job_ref.run.name, &run.job_ref.uid);
            self.state.pods.present_of(name, uid)
        } else {
            Vec::new()
        };
        let Some(suspect) = verdict::suspect(&present) else {
            run.heartbeat = None;
            return None;
        };
        let now = self.now;
        let is_overdue = suspect.is_overdue(now.server);
        if let Some(from) = suspect.overdue_from.filter(|from| *from > now.server) {
            self.wake_at(from, &run.job_ref.run.name);
        }
        if !is_overdue && !suspect.is_unready() {
            run.heartbeat = None;
            return None;
        }
        let heartbeat = run.heartbeat.get_or_insert_default();
        if heartbeat.is_lost(is_overdue, now.local) {
            return Some(suspect.verdict(&run.job.open()));
        }
        if let Some(pause) = heartbeat.begin() {
            self.request(&run.job_ref, Request::Heartbeat { pause });
        }
        None
    }

    /// Fetches the events of a run if they are needed. Whether the run has to be left alone until they are there.
    fn awaits_events(
        &mut self,
        run: &mut TrackedRun,
        observation: &Observation,
        pods: &[Pod],
    ) -> bool {
        if run.report.is_done {
            return false;
        }
        let name = &run.job_ref.run.name;
        match run.events.need(observation, self.now) {
            EventsNeed::Nothing(again) => {
                if let Some(at) = again {
                    self.wake_at(at, name);
                }
                false
            }
            EventsNeed::Pending => true,
            EventsNeed::Fetch {
                holds_back,
                again_in,
            } => {
                if let Some(pause) = again_in {
                    self.wake_after(pause, name);
                }
                let request = Request::Events {
                    job: Box::new(run.job.open()),
                    pods: pods.to_vec(),
                    has_ended: matches!(observation, Observation::Ended(_)),
                };
                self.request(&run.job_ref, request);
                holds_back
            }
        }
    }

    /// Ends the Job of a run that is over, once a container has outlived its executor for too long. This does not depend on
    /// the report. With its pod the Job loses what tells how the run ended, so the verdict is written onto the Job.
    fn stop_lingering(&mut self, run: &mut TrackedRun, verdict: &Verdict, pods: &[Pod]) {
        if !verdict.job_over || run.stage == JobStage::Over {
            return;
        }
        let timeouts = &self.state.settings.timeouts;
        let Some((until, fact)) = verdict::lingers(pods, timeouts) else {
            return;
        };
        if until > self.now.server {
            self.wake_at(until, &run.job_ref.run.name);
            return;
        }
        if std::mem::replace(&mut run.is_stopping, true) {
            return;
        }
        let mut verdict = Box::new(verdict.clone());
        if !verdict.evidence.contains(&fact) {
            verdict.evidence.push(fact);
        }
        self.request(&run.job_ref, Request::Stop { verdict });
    }
}
