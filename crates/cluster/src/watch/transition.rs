//! The state machine of the watcher: what each input does. Pure.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::runtime::watcher;

use super::message::{Effect, Input, JobRef, Now, ObserverCall, Response};
use super::observer::Heartbeat;
use super::release::LOOK_AGAIN;
use super::run::{JobStage, TrackedRun};
use super::state::{PodAccess, Transition, Wakeup, WatchState};
use crate::RunRef;
use crate::cache::{Change, trimmed_job};

impl WatchState {
    /// Takes in one input and returns its effects, in the order in which they are to be carried out.
    pub(super) fn advance(&mut self, input: Input, now: Now) -> Vec<Effect> {
        let mut transition = Transition {
            state: self,
            now,
            effects: Vec::new(),
        };
        transition.on_input(input);
        transition.effects
    }
}

impl Transition<'_> {
    fn on_input(&mut self, input: Input) {
        match input {
            Input::Job(event) => self.on_job_event(*event),
            Input::Pod(event) => self.on_pod_event(*event),
            Input::PodsForbidden => self.on_pods_forbidden(),
            Input::Alarm => self.on_alarm(),
            Input::QueueReview => {
                self.review_releases();
                self.review_history();
            }
            Input::Resync => self.observe_all(),
            Input::Response(job, response) => self.on_response(&job, response),
        }
    }

    fn on_job_event(&mut self, event: watcher::Event<Job>) {
        let is_listed = matches!(event, watcher::Event::InitDone);
        for change in self.state.job_feed.changes(event) {
            match change {
                Change::Seen(job) => self.on_job(&job),
                Change::Gone(name) => self.on_job_gone(&name),
            }
        }
        if is_listed && !self.state.jobs_listed {
            self.state.jobs_listed = true;
            self.observe_all();
        }
    }

    fn on_job(&mut self, job: &Job) {
        let (Some(run), Some(uid)) = (RunRef::of(&job.metadata), job.metadata.uid.clone()) else {
            return;
        };
        let job_ref = JobRef { run, uid };
        let name = job_ref.run.name.clone();
        let job = trimmed_job(job);
        let mut run = self
            .state
            .runs
            .remove(&name)
            .filter(|run| run.job_ref.uid == job_ref.uid)
            .unwrap_or_else(|| Box::new(TrackedRun::new(job_ref, &job, self.now)));
        run.update(&job, self.now);
        if run.stage == JobStage::Held {
            self.call(ObserverCall::Held(run.job_ref.run.clone()));
        }
        self.state.runs.insert(name.clone(), run);
        self.observe(&name);
    }

    fn on_pod_event(&mut self, event: watcher::Event<Pod>) {
        let is_listed = matches!(event, watcher::Event::InitDone);
        for job in self.state.pods.apply(event) {
            self.observe(&job);
        }
        if is_listed && self.state.pod_access != PodAccess::Listed {
            self.state.pod_access = PodAccess::Listed;
            self.observe_all();
        }
    }

    fn on_pods_forbidden(&mut self) {
        if self.state.pod_access != PodAccess::Forbidden {
            self.state.pod_access = PodAccess::Forbidden;
            self.observe_all();
        }
    }

    fn on_alarm(&mut self) {
        let now = self.now.server;
        while self.state.next_alarm().is_some_and(|at| at <= now) {
            match self.state.wakeups.pop_first() {
                Some((_, Wakeup::Run(name))) => self.observe(&name),
                Some((_, Wakeup::GoneRun(uid))) => {
                    let gone = self.state.gone_runs.get(&uid);
                    if gone.is_some_and(|gone| gone.due.is_some_and(|due| due <= now)) {
                        self.report_gone(&uid);
                    }
                }
                None => break,
            }
        }
    }

    fn on_response(&mut self, job: &JobRef, response: Response) {
        match response {
            Response::Events { events, pods } => self.on_events(job, &events, pods),
            Response::Heartbeat(found) => self.on_heartbeat(job, found),
            Response::Release(outcome) => self.on_released(job, outcome),
            Response::Report(outcome) => self.on_reported(job, &outcome),
            Response::ReportGone(outcome) => self.on_gone_reported(job, &outcome),
            Response::Stop { done } => self.on_stopped(job, done),
            Response::Fill { done } => self.on_filled(job, done),
            // A Job that could not be removed is found again at the next review.
            Response::Remove => drop(self.state.removing.remove(&job.uid)),
        }
    }

    fn on_events(&mut self, job: &JobRef, events: &[Event], pods: Vec<Pod>) {
        for pod in pods {
            self.state.pods.apply(watcher::Event::Apply(pod));
        }
        if let Some(run) = self.state.run_of(job) {
            run.events.finish(events);
            self.observe(&job.run.name);
        }
    }

    fn on_heartbeat(&mut self, job: &JobRef, found: Heartbeat) {
        let now = self.now.local;
        let run = self.state.run_of(job);
        if let Some(check) = run.and_then(|run| run.heartbeat.as_mut()) {
            check.finish(found, now);
            self.observe(&job.run.name);
        }
    }

    fn on_stopped(&mut self, job: &JobRef, done: bool) {
        if let Some(run) = self.state.run_of(job).filter(|_| !done) {
            run.is_stopping = false;
            self.wake_after(LOOK_AGAIN, &job.run.name);
        }
    }
}
