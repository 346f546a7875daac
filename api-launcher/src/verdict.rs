//! What has become of a run, told from its Job, its pods and their events alone. Pure: no client, no clock.
//!
//! A Job is over when its condition `Complete` or `Failed` is true, not before: `SuccessCriteriaMet` and
//! `FailureTarget` only announce it. When the executor left its final report as the termination message, that
//! report is the verdict; everything else here is for runs that could not speak for themselves.

mod aftermath;
mod begun;
mod ending;
mod facts;
mod lost;
mod waiting;

use std::fmt;
use std::time::Duration;

use job_contract::Exit;
use job_contract::report::FinalReport;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use aftermath::LockHolder;
pub use begun::Begun;
pub(crate) use ending::speaker;
pub(crate) use facts::{
    EXECUTOR, STATUS_UNKNOWN, UNPROVEN, condition_time, created_pods, executor_ended,
    executor_started, executor_state, failure_of_pod, final_report, in_order, is_about,
    is_suspended, newest, released, seen, terminal,
};
pub use lost::{Suspect, suspect};

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
    /// From the executor's end to the end of what somebody put beside it, which is then stopped.
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

/// Where a run stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observation {
    /// Nothing of the run's own has started yet.
    Waiting(Wait),
    /// The executor is at work.
    Running,
    /// The run is over, or there is no hope for it.
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
    #[serde(rename = "started")]
    pub begun: Begun,
    /// Whether a step of this type may change anything. A plan does not.
    #[serde(default = "may_change")]
    pub may_change: bool,
    /// Whether the Job is over, or ends by itself. Otherwise it has still to be stopped.
    pub job_over: bool,
    /// The executor's own words, if it left any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<FinalReport>,
}

/// Of a verdict that was recorded without it.
const fn may_change() -> bool {
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
    /// Whether the executor told the platform itself how the run ended, so that nobody has to in its place.
    pub fn spoke(&self) -> bool {
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
        self.begun != Begun::No && !self.report.as_ref().is_some_and(complete)
    }

    /// Whether the launcher has something to add though the executor spoke.
    pub(crate) fn wants_more(&self) -> bool {
        self.lacks_log() || self.lock_host().is_some()
    }

    /// The host that the lock on the state names, if there is one: the name of a pod, if it was taken in one.
    pub fn lock_host(&self) -> Option<&str> {
        aftermath::standing_lock(self.report.as_ref()?)?.host()
    }

    /// Adds what is known of the pod the lock was taken in.
    pub fn tell_lock_holder(&mut self, holder: &LockHolder) {
        let Some(host) = self.lock_host().map(str::to_owned) else {
            return;
        };
        aftermath::tell_holder(&mut self.evidence, &host, holder);
        self.advice = aftermath::advice(self, Some(holder));
    }

    /// What [`Verdict::tell_lock_holder`] added, for the run's log.
    pub fn lock_remark(&self) -> Option<String> {
        let told = aftermath::holder_told(&self.evidence)?;
        let lock = aftermath::standing_lock(self.report.as_ref()?)?;
        let advice = self.advice.as_deref().unwrap_or_default();
        Some(format!(
            "The lock {} on the state: {told}. What to do: {advice}",
            lock.id
        ))
    }
}

/// Every way a run can end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VerdictKind {
    Completed,
    StepFailed,
    NeverScheduled,
    ImageNotPulled,
    ConfigMissing,
    QuotaExceeded,
    AdmissionRefused,
    OomKilled,
    Evicted,
    Preempted,
    NodeLost,
    DeadlineExceeded,
    Deleted,
    Lost,
    BadJobData,
    Claimed,
    Infrastructure,
    Defect,
    Signalled,
    /// The job was cancelled.
    Cancelled,
    /// The executor stopped the tool before the kernel would have killed it for its memory.
    MemoryStop,
    /// The executor stopped the tool because nothing was heard of it.
    Silence,
    /// Somebody else's lock was on the state.
    StateLocked,
}

impl VerdictKind {
    /// Every kind there is.
    pub const ALL: [Self; 23] = [
        Self::Completed,
        Self::StepFailed,
        Self::NeverScheduled,
        Self::ImageNotPulled,
        Self::ConfigMissing,
        Self::QuotaExceeded,
        Self::AdmissionRefused,
        Self::OomKilled,
        Self::Evicted,
        Self::Preempted,
        Self::NodeLost,
        Self::DeadlineExceeded,
        Self::Deleted,
        Self::Lost,
        Self::BadJobData,
        Self::Claimed,
        Self::Infrastructure,
        Self::Defect,
        Self::Signalled,
        Self::Cancelled,
        Self::MemoryStop,
        Self::Silence,
        Self::StateLocked,
    ];

    /// The word on the wire and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::StepFailed => "step_failed",
            Self::NeverScheduled => "never_scheduled",
            Self::ImageNotPulled => "image_not_pulled",
            Self::ConfigMissing => "config_missing",
            Self::QuotaExceeded => "quota_exceeded",
            Self::AdmissionRefused => "admission_refused",
            Self::OomKilled => "oom_killed",
            Self::Evicted => "evicted",
            Self::Preempted => "preempted",
            Self::NodeLost => "node_lost",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Deleted => "deleted",
            Self::Lost => "lost",
            Self::BadJobData => "bad_job_data",
            Self::Claimed => "claimed",
            Self::Infrastructure => "infrastructure",
            Self::Defect => "defect",
            Self::Signalled => "signalled",
            Self::Cancelled => "cancelled",
            Self::MemoryStop => "memory_stop",
            Self::Silence => "silence",
            Self::StateLocked => "state_locked",
        }
    }

    /// What the executor would have ended with, had it been able to.
    pub(crate) const fn outcome(self) -> Exit {
        match self {
            Self::Completed => Exit::Done,
            Self::StepFailed | Self::MemoryStop | Self::Silence | Self::StateLocked => {
                Exit::StepFailed
            }
            Self::NeverScheduled
            | Self::ImageNotPulled
            | Self::QuotaExceeded
            | Self::Infrastructure => Exit::Infrastructure,
            Self::ConfigMissing | Self::AdmissionRefused => Exit::BadConfiguration,
            Self::BadJobData => Exit::BadJobData,
            Self::Claimed => Exit::Claimed,
            Self::Defect => Exit::Defect,
            Self::Preempted
            | Self::DeadlineExceeded
            | Self::Deleted
            | Self::Signalled
            | Self::Cancelled => Exit::Signal(15),
            Self::OomKilled | Self::Evicted | Self::NodeLost | Self::Lost => Exit::Signal(9),
        }
    }
}

impl fmt::Display for VerdictKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One fact a verdict rests on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evidence {
    /// Where it was read: `container executor`, `node`, `event FailedScheduling`…
    pub source: String,
    /// What it says.
    pub text: String,
}

impl Evidence {
    pub(crate) fn new(source: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            source: source.into(),
            text: text.into(),
        }
    }
}

/// What the objects of a run say about it at `now`.
///
/// `pods` are those of this Job, in any order; `events` those about the Job and its pods, and may be empty: they
/// only make sentences better and tell quota from admission.
pub fn observe(
    job: &Job,
    pods: &[Pod],
    events: &[Event],
    now: Timestamp,
    timeouts: &Timeouts,
) -> Observation {
    let run = Run { job, pods, events };
    if terminal(job).is_some() {
        return Observation::Ended(Box::new(ending::ended(&run)));
    }
    waiting::unfinished(&run, now, timeouts)
}

/// A container that goes on in the pod of an ended run beside its executor, as service meshes leave some, and until when it
/// may. The kubelet does not end it: the Job has to be stopped, or would go on until its deadline.
pub fn lingers(pods: &[Pod], timeouts: &Timeouts) -> Option<(Timestamp, Evidence)> {
    waiting::lingers(facts::newest(pods)?, timeouts)
}

/// The verdict on a run whose Job is gone, from the last that was seen of it.
pub fn gone(job: &Job, pods: &[Pod], events: &[Event]) -> Verdict {
    ending::gone(&Run { job, pods, events })
}

/// How this pod ended, in one sentence, if it has.
pub(crate) fn end_of_pod(pod: &Pod, events: &[Event]) -> Option<String> {
    facts::has_ended(pod).then(|| ending::of_pod(pod, events).sentence)
}

/// Whether this pod began the step.
pub(crate) fn begun_by(pod: &Pod, events: &[Event]) -> Begun {
    begun::of_pod(pod, events)
}

/// The pods that the Job controller created and that are gone, with what the events tell of each. It may be much less
/// than what happened.
pub(crate) fn gone_pods<'a>(
    pods: &'a [Pod],
    events: &'a [Event],
) -> impl Iterator<Item = (&'a str, Begun)> {
    let is_seen = |name: &str| pods.iter().any(|pod| facts::name(pod) == name);
    created_pods(events)
        .filter(move |name| !is_seen(name))
        .map(|name| {
            let of = |event: &Event| event.involved_object.name.as_deref() == Some(name);
            let started = facts::starts(events).any(of);
            (name, if started { Begun::Yes } else { Begun::Unknown })
        })
}

/// The verdict on a run of which only events are left. `job` has what they tell of it.
pub(crate) fn traced(job: &Job, events: &[Event]) -> Verdict {
    let pods = &[];
    ending::traced(&Run { job, pods, events })
}

/// What the cluster has of a run.
struct Run<'a> {
    job: &'a Job,
    pods: &'a [Pod],
    events: &'a [Event],
}

/// Whether events would make this observation say more.
pub fn wants_events(observation: &Observation) -> bool {
    match observation {
        Observation::Waiting(wait) => {
            !matches!(wait.reason, WaitReason::Queued | WaitReason::Stopping)
        }
        Observation::Running => false,
        Observation::Ended(verdict) => !verdict.spoke() && verdict.kind != VerdictKind::Completed,
    }
}

#[cfg(test)]
mod tests;
