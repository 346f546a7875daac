//! The state of the watcher, and one transition of it. Pure: it performs no request and reads no clock.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::jiff::Timestamp;
use verdict::{Observation, is_suspended, terminal};

use super::WatchSettings;
use super::message::{Diagnostic, Effect, JobRef, Now, ObserverCall, Request};
use super::report::GoneRun;
use super::run::TrackedRun;
use crate::RunRef;
use crate::cache::{JobFeed, Pods};

/// All that the watcher knows.
#[derive(Debug)]
pub(super) struct WatchState {
    pub(super) settings: WatchSettings,
    /// At most so many runs are released at once. 0 means no limit.
    pub(super) max_in_flight: usize,
    pub(super) job_feed: JobFeed,
    pub(super) pods: Pods,
    /// By the Job's name. Boxed, so that the spare capacity of a growing table costs little.
    pub(super) runs: HashMap<String, Box<TrackedRun>>,
    /// Runs whose Job is gone and whose end is not reported yet, by UID.
    pub(super) gone_runs: HashMap<String, GoneRun>,
    /// When runs are looked at although nothing happened.
    pub(super) wakeups: BTreeSet<(Timestamp, Wakeup)>,
    /// Jobs whose release is in progress, by UID.
    pub(super) releasing: HashSet<String>,
    /// Jobs that are being removed because of the history limits, by UID.
    pub(super) removing: HashSet<String>,
    /// The first list of Jobs is complete. Before that, the number of free slots is unknown.
    pub(super) jobs_listed: bool,
    pub(super) pod_access: PodAccess,
}

/// What is woken.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wakeup {
    /// A run, by the name of its Job.
    Run(String),
    /// A run whose Job is gone, by its UID.
    GoneRun(String),
}

/// What can be seen of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PodAccess {
    /// The first list is not complete: no run can be judged.
    NotYet,
    /// Pods may not be read: runs are judged by their Jobs alone.
    Forbidden,
    Listed,
}

impl WatchState {
    pub(super) fn new(settings: WatchSettings, max_in_flight: usize) -> Self {
        Self {
            settings,
            max_in_flight,
            job_feed: JobFeed::default(),
            pods: Pods::default(),
            runs: HashMap::new(),
            gone_runs: HashMap::new(),
            wakeups: BTreeSet::new(),
            releasing: HashSet::new(),
            removing: HashSet::new(),
            jobs_listed: false,
            pod_access: PodAccess::NotYet,
        }
    }

    /// When the next [`Input::Alarm`](super::message::Input::Alarm) is due.
    pub(super) fn next_alarm(&self) -> Option<Timestamp> {
        self.wakeups.first().map(|(at, _)| *at)
    }

    /// The run of exactly this Job.
    pub(super) fn run_of(&mut self, job: &JobRef) -> Option<&mut TrackedRun> {
        let run = self.runs.get_mut(&job.run.name)?;
        (run.job_ref.uid == job.uid).then_some(run)
    }

    /// Where pods may not be read, a run is at work from its release until its Job is over: that no pod is seen proves
    /// nothing, and no run may be given up for it.
    pub(super) fn without_pods(&self, job: &Job) -> Option<Observation> {
        let is_at_work = terminal(job).is_none() && !is_suspended(job);
        (self.pod_access == PodAccess::Forbidden && is_at_work).then_some(Observation::InProgress)
    }
}

/// One transition of the state: its time, and the effects it has so far.
#[derive(Debug)]
pub(super) struct Transition<'s> {
    pub(super) state: &'s mut WatchState,
    pub(super) now: Now,
    pub(super) effects: Vec<Effect>,
}

impl Transition<'_> {
    pub(super) fn call(&mut self, call: ObserverCall) {
        self.effects.push(Effect::Call(call));
    }

    pub(super) fn request(&mut self, job: &JobRef, request: Request) {
        self.effects.push(Effect::Request(job.clone(), request));
    }

    pub(super) fn log(&mut self, line: Diagnostic) {
        self.effects.push(Effect::Diagnostic(line));
    }

    /// Looks at a run again at this time.
    pub(super) fn wake_at(&mut self, at: Timestamp, name: &str) {
        let wakeup = Wakeup::Run(name.to_owned());
        self.state.wakeups.insert((at, wakeup));
    }

    /// Looks at a run again after this pause.
    pub(super) fn wake_after(&mut self, pause: Duration, name: &str) {
        self.wake_at(self.now.after(pause), name);
    }

    /// Calls the observer if the observation is news, and returns whether it is.
    pub(super) fn announce(&mut self, run: &mut TrackedRun, observation: &Observation) -> bool {
        if is_same(run.announced.as_ref(), observation) {
            return false;
        }
        // The same end in other words, or one that an earlier watcher has reported.
        let is_known = run.report.is_done || matches!(run.announced, Some(Observation::Ended(_)));
        let key = run.job_ref.run.clone();
        if let Observation::Ended(verdict) = observation
            && !is_known
        {
            self.log(Diagnostic::RunEnded(key.clone(), verdict.clone()));
        }
        self.call(ObserverCall::Observation(key, observation.clone()));
        run.announced = Some(observation.clone());
        true
    }

    /// Tells the observer that nothing more follows about this run.
    pub(super) fn forget(&mut self, run: &RunRef) {
        self.call(ObserverCall::Forgotten(run.clone()));
    }
}

/// Whether the observer would learn nothing new.
fn is_same(announced: Option<&Observation>, now: &Observation) -> bool {
    match (announced, now) {
        (Some(Observation::Waiting(announced)), Observation::Waiting(now)) => {
            announced.reason == now.reason && announced.sentence == now.sentence
        }
        (Some(Observation::InProgress), Observation::InProgress) => true,
        (Some(Observation::Ended(announced)), Observation::Ended(now)) => {
            announced.kind == now.kind
        }
        _ => false,
    }
}
