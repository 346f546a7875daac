//! The executor's final report: what it leaves for the launcher, also as the container's
//! termination message, so that `kubectl describe` is enough.

mod key;
mod message;

use serde::{Deserialize, Serialize};

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
    /// Job of the step; empty when the job data could not be decoded.
    pub job_id: String,
    /// The step; empty likewise.
    pub step_id: String,
    /// Type of the step on the wire.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub step_type: Option<String>,
    /// [`crate::Exit`] code of the outcome, whatever the process itself ends with.
    pub outcome: u8,
    /// What went wrong, in one sentence without secrets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Why the step was stopped before it was done, if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<StopReason>,
    /// The tool that ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool: Option<ToolRecord>,
    /// Commit that was checked out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit_id: Option<String>,
    /// Counts of a plan, apply or destroy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes: Option<ChangeCounts>,
    /// How far an apply or a destroy came that did not end well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<ApplyProgress>,
    /// Where the state of an apply or a destroy is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<StateStanding>,
    /// The lock on the state that stood in the way, or that was left behind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lock: Option<StateLock>,
    /// Durations, in the order the phases ran.
    pub phases: Vec<PhaseTiming>,
    /// Lines of the run's log that never reached every sink; 0 unless something was lost.
    #[serde(skip_serializing_if = "is_zero")]
    pub lost_log_lines: u64,
    /// The executor did not report to the platform: the launcher has to, unless the step is tried again.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unreported: bool,
    /// What the launcher has to report of a step that was done and not reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub untold: Option<Untold>,
    /// The process that wrote the report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub author: Option<Author>,
}

/// The process that wrote a report. The launcher compares it with what else it knows of the
/// process, so that it never takes a report for that of another run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Author {
    /// UID of its pod; on one machine, the mark of its run.
    pub run: String,
    /// The code it ends with.
    pub exit_code: u8,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature serde asks for"
)]
const fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl FinalReport {
    /// Whether the step was done, and the platform was not told.
    pub const fn is_unreported_success(&self) -> bool {
        self.unreported && self.outcome == Exit::Done.code()
    }
}

/// What [`crate::final_statuses::FinalStatuses::of`] has to know of a step, and what it leaves behind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Untold {
    pub ending: Ending,
    pub after_ok: bool,
    pub ignore_error: bool,
    /// Where the plan is that was stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
}

/// Why an executor stopped a step before it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StopReason {
    /// A signal told the executor to end.
    Signal,
    /// The platform's job was cancelled.
    Cancelled,
    /// The run's own time was up.
    Deadline,
    /// Nothing was written to the log for too long.
    Silence,
    /// Memory was about to run out.
    Memory,
}

/// The tool that ran a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolRecord {
    /// Terraform or OpenTofu.
    pub name: Tool,
    /// Its exact version.
    pub version: String,
}

/// How many resources an operation creates, changes and removes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChangeCounts {
    pub add: u64,
    pub change: u64,
    #[serde(rename = "destroy")]
    pub remove: u64,
    pub import: u64,
}

impl ChangeCounts {
    /// Whether nothing is created, changed, removed or imported.
    pub const fn is_empty(&self) -> bool {
        self.add == 0 && self.change == 0 && self.remove == 0 && self.import == 0
    }
}

/// How far an apply or a destroy came.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApplyProgress {
    /// Changes that were made.
    pub applied: u64,
    /// Addresses of resources whose change failed; the first [`ApplyProgress::MAX_ADDRESSES`].
    pub failed: Vec<String>,
    /// Addresses whose change had begun and of whose end nothing is known; as many.
    pub unfinished: Vec<String>,
    /// Changes that were planned and not begun; `None` where the plan is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_begun: Option<u64>,
}

impl ApplyProgress {
    /// More addresses than this are only counted in the log.
    pub const MAX_ADDRESSES: usize = 10;
}

/// Where the state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StateStanding {
    /// The tool stored it.
    Stored,
    /// The tool could not store it and left `errored.tfstate`, which was pushed.
    Rescued,
    /// `errored.tfstate` could not be pushed and is kept in the artifact store.
    Kept,
    /// Whether the backend has it is not known, or it certainly lacks something.
    Unknown,
}

/// A lock on a state, as the tool describes it (`statemgr.LockInfo` of Terraform and `OpenTofu`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StateLock {
    pub id: String,
    /// `user@host`; in a pod the host is the pod's name.
    pub who: String,
    /// What its holder does, such as `OperationTypeApply`.
    pub operation: String,
    /// When it was taken, as the tool writes it.
    pub created: String,
    /// Where the state is, if the backend says so.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub path: String,
    pub standing: LockStanding,
}

impl StateLock {
    /// The host it was taken on: a pod's name when its holder was a pod.
    pub fn host(&self) -> Option<&str> {
        self.who.rsplit_once('@').map(|(_, host)| host)
    }
}

/// Whose a lock is, and whether it was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LockStanding {
    /// Of another run or person: the step did not run, or its state could not be pushed, because of it.
    InTheWay,
    /// This step's own, whose tool died with it; the executor released it.
    Released,
    /// This step's own, and it could not be released.
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
