//! The types of verdicts and observations.

use std::time::Duration;

use job_contract::Exit;
use job_contract::report::FinalReport;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::evidence::Evidence;
use super::kind::VerdictKind;
use super::step_start::{Started, deciding_pod};

/// The objects of a run in the cluster.
pub(super) struct RunObjects<'a> {
    pub(super) job: &'a Job,
    pub(super) pods: &'a [Pod],
    pub(super) events: &'a [Event],
}

/// Timeouts of each kind of wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// A released Job without a pod: after this time, the wait is explained.
    pub no_pod_explain: Duration,
    /// A released Job without a pod: after this time, the run has failed, unless a quota or a suspension holds it.
    pub no_pod: Duration,
    /// A pod without a node.
    pub unschedulable: Duration,
    /// A container without its image or configuration.
    pub container_error: Duration,
    /// From the pod's node to the start of the executor: pulls, volumes, init containers.
    pub start: Duration,
    /// From the end of the executor to the end of the other containers. They are then stopped.
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

/// The observed state of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observation {
    /// Nothing of the run has started yet.
    Waiting(Wait),
    /// The executor runs. Or it has ended, and the Job's condition does not show it yet.
    InProgress,
    /// The run is over, or the launcher has given it up.
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
    /// When the observation changes although nothing happens in the cluster. `None`: there is no limit.
    pub until: Option<Timestamp>,
}

/// What a run waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitReason {
    /// Suspended until other runs have ended, or until a queue of the cluster admits it.
    Queued,
    /// The Job controller is about to create the pod.
    Pod,
    /// The Job controller should have created the pod by now.
    NoPod,
    /// A resource quota is exhausted.
    Quota,
    /// The API server refuses the pod.
    Admission,
    /// No node fits the pod.
    Node,
    /// The image is not pulled yet.
    Image,
    /// A Secret, a `ConfigMap` or a volume is missing.
    Config,
    /// Volumes, network, init containers.
    Start,
    /// The node cannot set up the pod.
    Sandbox,
    /// A pod failed before it started the step. Kubernetes creates another one.
    AnotherPod,
    /// The pod is being stopped.
    Stopping,
}

impl WaitReason {
    /// Whether the sentence is news for the reader. The first seconds of every run are not.
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
    /// The facts behind the sentence, the most important first.
    pub evidence: Vec<Evidence>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// The exit with which the executor would have ended, if it could.
    #[serde(serialize_with = "exit_code", deserialize_with = "exit_of_code")]
    pub outcome: Exit,
    /// Whether the step was started. Only then may something have been changed.
    pub started: Started,
    /// Whether a step of this type may change anything. A plan does not.
    #[serde(default = "may_change_by_default")]
    pub may_change: bool,
    /// Whether the Job is over, or ends by itself. Otherwise it must still be stopped.
    pub job_over: bool,
    /// The name of the pod whose end is the end of the run. `None`: no pod is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The executor's report, if it left one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<FinalReport>,
}

/// For recorded verdicts without this field.
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
    /// Returns this verdict, which was recorded on the Job, with its pod. Earlier versions recorded none.
    #[must_use]
    pub fn with_pod_of(mut self, pods: &[Pod]) -> Self {
        let pod = || deciding_pod(pods, &[])?.metadata.name.clone();
        self.pod = self.pod.or_else(pod);
        self
    }

    /// Whether the executor itself reported the end of the run. Then the launcher need not report it.
    pub fn executor_reported(&self) -> bool {
        self.report
            .as_ref()
            .is_some_and(|report| !report.unreported)
    }

    /// The verdict as people read it.
    pub fn text(&self) -> String {
        let evidence = self
            .evidence
            .iter()
            .map(|evidence| format!("  {}: {}", evidence.source, evidence.text));
        let advice = self
            .advice
            .iter()
            .map(|advice| format!("What to do: {advice}"));
        let lines: Vec<String> = std::iter::once(self.sentence.clone())
            .chain(evidence)
            .chain(advice)
            .collect();
        lines.join("\n")
    }

    /// Returns the executor's report of a successful step that the platform does not know yet.
    pub fn unreported_success(&self) -> Option<&FinalReport> {
        self.report
            .as_ref()
            .filter(|report| report.is_unreported_success())
    }

    /// Whether the run log may lack lines that the container still has.
    pub fn lacks_log(&self) -> bool {
        let complete = |report: &FinalReport| !report.unreported && report.lost_log_lines == 0;
        self.started != Started::No && !self.report.as_ref().is_some_and(complete)
    }
}
