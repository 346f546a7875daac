//! The types in which verdicts and observations are said.

use std::time::Duration;

use job_contract::Exit;
use job_contract::report::FinalReport;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::evidence::Evidence;
use super::kind::VerdictKind;
use super::step_start::Started;

/// What the cluster has of a run.
pub(super) struct RunObjects<'a> {
    pub(super) job: &'a Job,
    pub(super) pods: &'a [Pod],
    pub(super) events: &'a [Event],
}

/// How long each kind of waiting may last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// No pod for a released Job: from here on it is explained.
    pub no_pod_explain: Duration,
    /// No pod for a released Job: from here on it has failed, unless quota or a suspension holds it.
    pub no_pod: Duration,
    /// No node for the pod.
    pub unschedulable: Duration,
    /// The image or the configuration of a container cannot be had.
    pub container_error: Duration,
    /// From a node for the pod to the executor's start: pulls, volumes, init containers.
    pub start: Duration,
    /// From the executor's end to the end of the containers beside it, which are then stopped.
    pub linger: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            no_pod_explain: Duration::from_secs(30),
            no_pod: Duration::from_mins(2),
            unschedulable: Duration::from_mins(15),
            container_error: Duration::from_secs(30),
            start: Duration::from_mins(5),
            linger: Duration::from_mins(1),
        }
    }
}

/// What is observed of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observation {
    /// Nothing of the run's own has started yet.
    Waiting(Wait),
    /// The executor is at work, or it has ended and the Job's own condition is still to come.
    InProgress,
    /// The run is over, or it was given up.
    Ended(Box<Verdict>),
}

/// Why a run waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Wait {
    pub reason: WaitReason,
    /// For the run's log.
    pub sentence: String,
    /// When this wait began.
    pub since: Timestamp,
    /// When the observation changes though nothing happens in the cluster; `None` while there is no limit.
    pub until: Option<Timestamp>,
}

/// What a run waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitReason {
    /// Held back until others have ended, or by a queue of the cluster.
    Queued,
    /// The pod is about to be created.
    Pod,
    /// The pod should have been created by now.
    NoPod,
    /// A resource quota has no room for the pod.
    Quota,
    /// The API server refuses the pod.
    Admission,
    /// No node takes the pod.
    Node,
    /// The image is not there yet.
    Image,
    /// A Secret, a `ConfigMap` or a volume is not there yet.
    Config,
    /// Volumes, network, init containers.
    Start,
    /// The node cannot set up the pod.
    Sandbox,
    /// A pod failed before it did anything; Kubernetes makes another.
    AnotherPod,
    /// Everything that was asked to stop is stopping.
    Stopping,
}

impl WaitReason {
    /// Whether the sentence tells the reader something. The first seconds of every run are not news.
    pub const fn is_news(self) -> bool {
        !matches!(self, Self::Pod | Self::Start | Self::Stopping)
    }
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Verdict {
    pub kind: VerdictKind,
    /// The cause, in one sentence.
    pub sentence: String,
    /// What the sentence rests on, most telling first.
    pub evidence: Vec<Evidence>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// What an executor that could still speak would have ended with.
    #[serde(serialize_with = "exit_code", deserialize_with = "exit_of_code")]
    pub outcome: Exit,
    /// Whether the step had begun, that is, whether anything may have been changed.
    pub started: Started,
    /// Whether a step of this type may change anything. A plan does not.
    #[serde(default = "may_change_by_default")]
    pub may_change: bool,
    /// Whether the Job is over, or ends by itself. Otherwise it has still to be stopped.
    pub job_over: bool,
    /// The executor's own words, if it left any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<FinalReport>,
}

/// Of a verdict that was recorded without it.
const fn may_change_by_default() -> bool {
    true
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature serde asks for"
)]
fn exit_code<S: Serializer>(exit: &Exit, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u8(exit.code())
}

fn exit_of_code<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Exit, D::Error> {
    let code = u8::deserialize(deserializer)?;
    Exit::from_code(code.into())
        .ok_or_else(|| serde::de::Error::custom(format!("no executor ends with {code}")))
}

impl Verdict {
    /// Whether the executor reported the end of the run itself, so that the launcher need not.
    pub fn executor_reported(&self) -> bool {
        self.report
            .as_ref()
            .is_some_and(|report| !report.unreported)
    }

    /// The executor's report of a step that was done, of which the platform was not told.
    pub fn unreported_success(&self) -> Option<&FinalReport> {
        self.report
            .as_ref()
            .filter(|report| report.is_unreported_success())
    }

    /// Whether the log of the run may be missing lines that its container still has.
    pub fn lacks_log(&self) -> bool {
        let complete = |report: &FinalReport| !report.unreported && report.lost_log_lines == 0;
        self.started != Started::No && !self.report.as_ref().is_some_and(complete)
    }
}
