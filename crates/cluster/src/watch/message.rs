//! What goes into the state of the watcher, and what comes out: inputs and effects. Data only.

use std::time::{Duration, Instant};

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::runtime::watcher;
use verdict::{Observation, Verdict};

use super::observer::{Heartbeat, ReportOutcome, RunCounts};
use crate::submit::ReleaseOutcome;
use crate::{ClusterError, RunRef};

/// The time of an input, by two clocks. The state reads no clock itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    /// The API server's clock, which wrote the times in all objects.
    pub(super) server: Timestamp,
    /// The monotonic clock of this machine.
    pub(super) local: Instant,
}

impl Now {
    /// The server's time after a pause. A pause beyond all time ends at the last moment there is.
    pub(super) fn after(&self, pause: Duration) -> Timestamp {
        SignedDuration::try_from(pause)
            .ok()
            .and_then(|pause| self.server.checked_add(pause).ok())
            .unwrap_or(Timestamp::MAX)
    }
}

/// One Job of a run. A Job that is created again under the same name has another UID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JobRef {
    pub(super) run: RunRef,
    pub(super) uid: String,
}

/// Something that happened outside the state.
#[derive(Debug)]
pub(super) enum Input {
    /// An event of the watch of Jobs.
    Job(Box<watcher::Event<Job>>),
    /// An event of the watch of pods.
    Pod(Box<watcher::Event<Pod>>),
    /// The launcher has no right to watch pods, as with the Role of Terrakube's documentation.
    PodsForbidden,
    /// The time of the next wake-up has come.
    Alarm,
    /// Changes have been gathered for a moment: it is time to look at the release queue and the history.
    QueueReview,
    /// Every run is to be looked at again, in case an event was missed.
    Resync,
    Response(Box<JobRef>, Response),
}

/// Something that the state asks for.
#[derive(Debug, PartialEq)]
pub(super) enum Effect {
    Call(ObserverCall),
    /// A request about a Job. It runs beside the others, and its response is an input.
    Request(JobRef, Request),
    Diagnostic(Diagnostic),
    /// The Secret of this Job (a UID) need not be remembered any more.
    ForgetSecret(String),
}

/// A call of the observer that returns at once.
#[derive(Debug, PartialEq)]
pub(super) enum ObserverCall {
    Held(RunRef),
    Forgotten(RunRef),
    Observation(RunRef, Observation),
    Running(RunRef, Option<Duration>),
    Counts(RunCounts),
}

#[derive(Debug, PartialEq)]
pub(super) enum Request {
    /// Fetches the events of a run and, once its end was seen, its pods as they are now.
    Events {
        job: Box<Job>,
        pods: Vec<Pod>,
        has_ended: bool,
    },
    /// Looks for a heartbeat of the executor after this pause.
    Heartbeat {
        pause: Duration,
    },
    /// Releases a suspended Job, or removes it if its job data is missing and no request is about to store it.
    Release {
        remove_incomplete: bool,
    },
    /// Stops a run that was given up, reports its end, and writes both onto the Job.
    Report {
        verdict: Box<Verdict>,
        keep: Option<i32>,
    },
    /// Adds to what the executor reported, then writes the verdict onto the Job.
    CompleteReport {
        verdict: Box<Verdict>,
        keep: Option<i32>,
    },
    /// Writes onto the Job that the platform knows how the run ended, and the verdict if there is one.
    NoteReported {
        verdict: Option<Box<Verdict>>,
        keep: Option<i32>,
    },
    /// Reports the end of a run whose Job is gone.
    ReportGone {
        verdict: Box<Verdict>,
    },
    /// Ends the Job of a run that is over and writes the verdict onto it.
    Stop {
        verdict: Box<Verdict>,
    },
    /// Creates a Job that fills the store of providers.
    Fill {
        job: Box<Job>,
    },
    Remove,
}

#[derive(Debug)]
pub(super) enum Response {
    Events {
        events: Vec<Event>,
        pods: Vec<Pod>,
    },
    Heartbeat(Heartbeat),
    Release(Result<ReleaseOutcome, ClusterError>),
    /// To every request that reports or notes a report.
    Report(ReportOutcome),
    ReportGone(ReportOutcome),
    Stop {
        done: bool,
    },
    Fill {
        done: bool,
    },
    Remove,
}

#[derive(Debug, PartialEq)]
pub(super) enum Diagnostic {
    RunEnded(RunRef, Box<Verdict>),
    /// The Job was gone before its end could be reported.
    NeverReported(RunRef),
    /// The API server does not say whether the job data of a run is stored.
    StaysSuspended {
        run: RunRef,
        error: String,
        advice: &'static str,
    },
}
