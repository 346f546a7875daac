//! The executor's final report for the launcher. It is also the container's termination message, so that
//! `kubectl describe` shows it.

mod key;
mod message;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::exit::Exit;
use crate::final_statuses::Ending;
use crate::job::Tool;
use crate::progress::Phase;

pub use key::ReportKey;
pub use message::MAX_TERMINATION_MESSAGE_BYTES;

/// How a step ended, and how long its parts took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FinalReport {
    /// Id of the job; empty if the job data could not be decoded.
    pub job_id: String,
    /// Id of the step; empty if the job data could not be decoded.
    pub step_id: String,
    /// Type of the step on the wire.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub step_type: Option<String>,
    /// [`crate::Exit`] code of the outcome. The process itself may end with another code.
    pub outcome: u8,
    /// The error, in one sentence without secrets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The next step for the user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Why the step was stopped before its end, if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool: Option<ToolRecord>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit_id: Option<String>,
    /// Counts of a plan, apply or destroy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes: Option<ChangeCounts>,
    /// Progress of an apply or a destroy that failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<ApplyProgress>,
    /// Where the state is after an apply or a destroy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<StateStatus>,
    /// The lock on the state that stopped the step, or that the step could not release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lock: Option<StateLock>,
    /// Durations of the phases, in the order in which they ran.
    pub phases: Vec<PhaseTiming>,
    /// Packages of providers that the run did not find in the store that only the operator's Jobs fill. Each is a
    /// [`WantedPackage`](crate::provider_cache::WantedPackage).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub wanted: Vec<String>,
    /// The number of log lines that at least one sink did not get.
    #[serde(skip_serializing_if = "is_zero")]
    pub lost_log_lines: u64,
    /// The executor did not report to the platform. The launcher must report, unless the step runs again.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unreported: bool,
    /// The data for the launcher's report of a step that was done but not reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreported_step: Option<UnreportedStep>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub author: Option<Author>,
}

/// The process that wrote a report. The launcher compares it with the pod or process it watches, so that it never uses the
/// report of another run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Author {
    /// UID of the pod; on one machine, the mark of the run.
    pub run: String,
    pub exit_code: u8,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde requires this signature"
)]
const fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl FinalReport {
    /// Whether the step was done but not reported to the platform.
    pub const fn is_unreported_success(&self) -> bool {
        self.unreported && self.outcome == Exit::Done.code()
    }

    /// The part that a hub needs to report the step, if the executor did not report it.
    pub fn for_hub(&self) -> Option<Map<String, Value>> {
        self.unreported_step.as_ref()?;
        let part = Self {
            job_id: self.job_id.clone(),
            step_id: self.step_id.clone(),
            outcome: self.outcome,
            commit_id: self.commit_id.clone(),
            unreported: self.unreported,
            unreported_step: self.unreported_step.clone(),
            ..Self::default()
        };
        match serde_json::to_value(part) {
            Ok(Value::Object(part)) => Some(part),
            _ => None,
        }
    }
}

/// What [`crate::final_statuses::FinalStatuses::of`] has to know of a step, and what it leaves behind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnreportedStep {
    pub ending: Ending,
    pub after_ok: bool,
    pub ignore_error: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
}

/// Why an executor stopped a step before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StopReason {
    Signal,
    Cancelled,
    Deadline,
    /// The run wrote nothing to its log for too long.
    Silence,
    /// The memory limit was almost reached.
    Memory,
    /// The hub did not answer, and could soon have given the workspace to another run.
    CutOff,
}

/// The tool that ran a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolRecord {
    pub name: Tool,
    pub version: String,
}

/// How many resources an operation creates, changes, removes, imports and forgets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChangeCounts {
    pub add: u64,
    pub change: u64,
    #[serde(rename = "destroy")]
    pub remove: u64,
    pub import: u64,
    /// Resources that are removed from the state and not destroyed. Only OpenTofu counts them.
    #[serde(skip_serializing_if = "is_zero")]
    pub forget: u64,
}

impl ChangeCounts {
    /// Whether nothing is created, changed, removed, imported or forgotten.
    pub const fn is_empty(&self) -> bool {
        self.add == 0
            && self.change == 0
            && self.remove == 0
            && self.import == 0
            && self.forget == 0
    }
}

/// Progress of an apply or a destroy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApplyProgress {
    pub applied: u64,
    /// Addresses of resources whose change failed; the first [`ApplyProgress::MAX_ADDRESSES`].
    pub failed: Vec<String>,
    /// Addresses of resources whose change began but has no known end; the first [`ApplyProgress::MAX_ADDRESSES`].
    pub unfinished: Vec<String>,
    /// Number of planned changes that did not begin; `None` if the plan is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_begun: Option<u64>,
}

impl ApplyProgress {
    /// The longest list of addresses. The log only counts the rest.
    pub const MAX_ADDRESSES: usize = 10;
}

/// Where the state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StateStatus {
    Stored,
    /// The tool could not store it and wrote `errored.tfstate`, which the executor pushed.
    Rescued,
    /// `errored.tfstate` could not be pushed, or may not take the place of the stored state, and is kept in the artifact store.
    Kept,
    /// The backend may not have it, or it is incomplete.
    Unknown,
}

/// A lock on a state, as the tool describes it (`statemgr.LockInfo` of Terraform and `OpenTofu`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StateLock {
    pub id: String,
    /// `user@host`; in a pod the host is the pod's name.
    pub who: String,
    /// The operation of its holder, such as `OperationTypeApply`.
    pub operation: String,
    /// Time of the lock, as the tool writes it.
    pub created: String,
    /// Address of the state, if the backend says it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub path: String,
    pub status: LockStatus,
}

impl StateLock {
    /// The host of its holder. For a pod, the pod's name.
    pub fn host(&self) -> Option<&str> {
        self.who.rsplit_once('@').map(|(_, host)| host)
    }
}

/// The owner of a lock, and whether it was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LockStatus {
    /// Another run or a person holds it. Because of it, the step did not run, or its state could not be pushed.
    InTheWay,
    /// This step had it when its tool died. The executor released it.
    Released,
    /// This step had it, and the executor could not release it.
    LeftBehind,
}

/// Duration of one phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PhaseTiming {
    pub phase: Phase,
    pub duration_ms: u64,
    pub ok: bool,
}
