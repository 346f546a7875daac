//! The state machine of a watcher, with a time and objects that the test sets. No server, no waiting.

use std::time::{Duration, Instant};

use job_contract::report::FinalReport;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::runtime::watcher::Event;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use verdict::Observation;

use super::super::WatchSettings;
use super::super::message::{
    Diagnostic, Effect, Input, JobRef, Now, ObserverCall, Request, Response,
};
use super::super::state::WatchState;
use crate::RunRef;
use crate::fake_server::merge;

/// Seconds after the start of every test.
pub(super) fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_767_225_600 + seconds).unwrap()
}

fn parse<K: DeserializeOwned>(object: Value) -> K {
    serde_json::from_value(object).unwrap()
}

/// The Job of the run `1/<step>`, released at the start.
pub(super) fn job(step: &str, patch: Value) -> Value {
    let mut job = json!({"metadata": {"name": format!("job-1-{step}"), "uid": format!("uid-{step}"),
        "creationTimestamp": at(-5).to_string(), "annotations": {"mayfly.dev/released-at": at(0).to_string()},
        "labels": {"mayfly.dev/job-id": "1", "mayfly.dev/step-id": step}},
        "spec": {"suspend": false, "template": {}}});
    merge(&mut job, patch);
    job
}

/// Such a Job before its release.
pub(super) fn held(step: &str, created: i64) -> Value {
    let at = at(created).to_string();
    let meta = json!({"creationTimestamp": at, "annotations": {"mayfly.dev/released-at": null}});
    job(step, json!({"metadata": meta, "spec": {"suspend": true}}))
}

/// What the Job controller writes when a Job is over.
pub(super) fn over(type_: &str, seconds: i64) -> Value {
    let at = at(seconds).to_string();
    json!({"status": {"conditions": [{"type": type_, "status": "True", "lastTransitionTime": at}]}})
}

/// A pod of [`job`] with this status.
pub(super) fn pod(step: &str, mut status: Value) -> Value {
    let now = at(0).to_string();
    let scheduled = json!([{"type": "PodScheduled", "status": "True", "lastTransitionTime": now}]);
    let conditions = &mut status["conditions"];
    if conditions.is_null() {
        *conditions = scheduled;
    }
    json!({"metadata": {"name": format!("job-1-{step}-x"), "uid": "u-x", "creationTimestamp": now,
            "labels": {"batch.kubernetes.io/job-name": format!("job-1-{step}")}},
        "spec": {"nodeName": "node-1", "containers": [{"name": "executor"}]}, "status": status})
}

pub(super) fn container(name: &str, state: &Value) -> Value {
    json!({"name": name, "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": state})
}

pub(super) fn pod_with_executor(step: &str, phase: &str, state: &Value) -> Value {
    let statuses = [container("executor", state)];
    pod(step, json!({"phase": phase, "containerStatuses": statuses}))
}

/// A pod whose executor left a report of this outcome. Its seal was checked before.
pub(super) fn pod_with_report(step: &str, outcome: u8) -> Value {
    let report = FinalReport {
        outcome,
        ..FinalReport::default()
    };
    let ended = json!({"exitCode": outcome, "message": report.to_termination_message(None)});
    let phase = if outcome == 0 { "Succeeded" } else { "Failed" };
    pod_with_executor(step, phase, &json!({"terminated": ended}))
}

/// A pod that waits for an image that cannot be had, at once without hope.
pub(super) fn pod_without_hope(step: &str) -> Value {
    let waiting = json!({"waiting": {"reason": "InvalidImageName", "message": "A B"}});
    pod_with_executor(step, "Pending", &waiting)
}

pub(super) struct Machine {
    state: WatchState,
    now: Now,
    effects: Vec<Effect>,
}

impl Machine {
    /// A watcher that has listed these Jobs, and no pods.
    pub(super) fn start(settings: WatchSettings, limit: usize, jobs: Vec<Value>) -> Self {
        let now = Now {
            server: at(0),
            local: Instant::now(),
        };
        let mut machine = Self {
            state: WatchState::new(settings, limit),
            now,
            effects: Vec::new(),
        };
        machine.advance(Input::Pod(Box::new(Event::Init)));
        machine.advance(Input::Pod(Box::new(Event::InitDone)));
        machine.advance(Input::Job(Box::new(Event::Init)));
        for job in jobs {
            machine.advance(Input::Job(Box::new(Event::InitApply(parse(job)))));
        }
        machine.feed(Input::Job(Box::new(Event::InitDone)));
        machine
    }

    /// A watcher that has listed one Job.
    pub(super) fn with(job: Value) -> Self {
        Self::start(WatchSettings::default(), 0, vec![job])
    }

    pub(super) fn job(&mut self, job: Value) {
        self.feed(Input::Job(Box::new(Event::Apply(parse::<Job>(job)))));
    }

    pub(super) fn job_is_gone(&mut self, job: Value) {
        self.feed(Input::Job(Box::new(Event::Delete(parse::<Job>(job)))));
    }

    pub(super) fn pod(&mut self, pod: Value) {
        self.feed(Input::Pod(Box::new(Event::Apply(parse::<Pod>(pod)))));
    }

    /// Answers the request about the Job of [`job`].
    pub(super) fn respond(&mut self, step: &str, response: Response) {
        self.respond_for(&format!("uid-{step}"), step, response);
    }

    /// The same for a Job of another UID.
    pub(super) fn respond_for(&mut self, uid: &str, step: &str, response: Response) {
        let meta = parse::<Job>(job(step, json!({}))).metadata;
        let run = RunRef::of(&meta).unwrap();
        let uid = uid.to_owned();
        self.feed(Input::Response(Box::new(JobRef { run, uid }), response));
    }

    /// Lets time pass, with every alarm at its time.
    pub(super) fn pass(&mut self, time: Duration) {
        let end = self.now.server + SignedDuration::try_from(time).unwrap();
        while let Some(at) = self.state.next_alarm().filter(|at| *at <= end) {
            self.set_time(at.max(self.now.server));
            self.feed(Input::Alarm);
        }
        self.set_time(end);
    }

    fn set_time(&mut self, server: Timestamp) {
        let passed = server.duration_since(self.now.server);
        self.now.local += Duration::try_from(passed).unwrap();
        self.now.server = server;
    }

    /// Lets time pass until there is such a request, and returns how long that took.
    pub(super) fn pass_until(&mut self, is_it: impl Fn(&Request) -> bool) -> Duration {
        let begun = self.now.local;
        while !self.requests().any(&is_it) {
            let next = self.state.next_alarm().expect("something is planned");
            let pause = next.duration_since(self.now.server);
            self.pass(Duration::try_from(pause).unwrap_or_default());
        }
        self.now.local.duration_since(begun)
    }

    fn feed(&mut self, input: Input) {
        self.advance(input);
        self.advance(Input::QueueReview);
    }

    /// Requests for events are answered at once: there are none.
    fn advance(&mut self, input: Input) {
        for effect in self.state.advance(input, self.now) {
            if let Effect::Request(job, Request::Events { .. }) = &effect {
                let none = Response::Events {
                    events: Vec::new(),
                    pods: Vec::new(),
                };
                let answer = Input::Response(Box::new(job.clone()), none);
                self.effects.push(effect);
                self.advance(answer);
            } else {
                self.effects.push(effect);
            }
        }
    }

    /// The effects since this was called last.
    pub(super) fn take(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// The requests since [`Machine::take`], without those for events.
    pub(super) fn requests(&self) -> impl Iterator<Item = &Request> {
        self.effects.iter().filter_map(|effect| match effect {
            Effect::Request(_, Request::Events { .. }) => None,
            Effect::Request(_, request) => Some(request),
            _ => None,
        })
    }

    /// The names of Jobs for which there is a request to release or remove them.
    pub(super) fn released(&self) -> Vec<&str> {
        let released = self.effects.iter().filter_map(|effect| match effect {
            Effect::Request(job, Request::Release { .. } | Request::Remove) => Some(job),
            _ => None,
        });
        released.map(|job| job.run.name.as_str()).collect()
    }

    pub(super) fn calls(&self) -> impl Iterator<Item = &ObserverCall> {
        self.effects.iter().filter_map(|effect| match effect {
            Effect::Call(ObserverCall::Counts(_)) => None,
            Effect::Call(call) => Some(call),
            _ => None,
        })
    }

    pub(super) fn diagnostics(&self) -> impl Iterator<Item = &Diagnostic> {
        self.effects.iter().filter_map(|effect| match effect {
            Effect::Diagnostic(line) => Some(line),
            _ => None,
        })
    }

    /// The observations that the observer got, with their steps.
    pub(super) fn observations(&self) -> Vec<(&str, &Observation)> {
        let observations = self.calls().filter_map(|call| match call {
            ObserverCall::Observation(run, observation) => {
                Some((run.step_id.as_str(), observation))
            }
            _ => None,
        });
        observations.collect()
    }
}
