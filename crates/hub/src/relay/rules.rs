//! Decides which requests of an executor pass, by method, path, query and the state of its task.

use std::time::Duration;

use axum::http::Method;
use platform::StepRef;
use pool_protocol::id::{LeaseId, TaskId};
use pool_protocol::task::TaskState;
use pool_store::state::EndReason;
use pool_store::{Refusal, TaskView};

use super::{registry, scripts};

pub(crate) use super::calls::{Call, RelayRefusal, is_plain};

/// For how long a task that is over may store its state and its log.
const AFTERWARDS: Duration = Duration::from_mins(10);
/// The width of the platform's column for the job of a state.
const REFERENCE_WIDTH: usize = 36;
/// The longest path of a request.
const MAX_PATH: usize = 1024;
const NO_SUCH: &str = "executors make no such request";

/// The parts of a path of the relay.
#[derive(Debug)]
pub(super) struct Target<'p> {
    pub(super) task: TaskId,
    pub(super) lease: LeaseId,
    /// The path below the platform's URL.
    pub(super) path: Vec<&'p str>,
}

/// Splits the path of a request without decoding it.
pub(super) fn split(path: &str) -> Option<Target<'_>> {
    let rest = path.strip_prefix("/api/v1/executor/tasks/")?;
    let (task, rest) = rest.split_once("/leases/")?;
    let (lease, rest) = rest.split_once("/platform/")?;
    Some(Target {
        task: task.parse().ok()?,
        lease: lease.parse().ok()?,
        path: rest.split('/').collect(),
    })
}

impl Call {
    /// Returns the call of a request. Everything in its path must belong to the step.
    pub(super) fn find(
        method: &Method,
        path: &[&str],
        query: Option<&str>,
        step: &StepRef,
    ) -> Result<Self, RelayRefusal> {
        let length: usize = path.iter().map(|part| part.len() + 1).sum();
        if length > MAX_PATH || !path.iter().all(|part| is_plain(part)) {
            return Err(RelayRefusal::Request("its path is not in plain form"));
        }
        if let ["scripts", path @ ..] = path {
            return scripts::check(method, path, query, step).map(|()| Self::OfScript);
        }
        let call = Self::of_path(method, path, step)?;
        if call.takes_query(query, step) {
            Ok(call)
        } else {
            Err(RelayRefusal::Request(
                "its query is not one that this path takes",
            ))
        }
    }

    fn of_path(method: &Method, path: &[&str], step: &StepRef) -> Result<Self, RelayRefusal> {
        let own = |id: &str, of: &str| !id.is_empty() && id == of;
        let (org, job) = (&step.organization_id, &step.job_id);
        let (call, is_own) = match (method.as_str(), path) {
            ("GET", ["api", "v1", "organization", o, "job", j]) => {
                (Self::ReadJob, own(o, org) && own(j, job))
            }
            ("PATCH", ["api", "v1", "organization", o, "job", j]) => {
                (Self::ChangeJob, own(o, org) && own(j, job))
            }
            ("PATCH", ["api", "v1", "organization", o, "job", j, "step", s]) => (
                Self::ChangeStep,
                own(o, org) && own(j, job) && own(s, &step.step_id),
            ),
            (
                method @ ("GET" | "POST"),
                ["api", "v1", "organization", o, "workspace", w, "history"],
            ) => {
                let call = match method {
                    "GET" => Self::ReadHistory,
                    _ => Self::AddHistory,
                };
                (call, own(o, org) && own(w, &step.workspace_id))
            }
            ("POST", ["logs"]) => (Self::AddLines, true),
            ("POST", ["logs", j, "setup-consumer-groups"]) => (Self::SetUpLog, own(j, job)),
            ("GET", ["context", "v1", j]) => (Self::ReadContext, own(j, job)),
            ("POST", ["context", "v1", j]) => (Self::WriteContext, own(j, job)),
            // `ToTerrakube::content` checks later that the job names this content.
            (
                "GET",
                [
                    "remote",
                    "tfe",
                    "v2",
                    "configuration-versions",
                    _,
                    "terraformContent.tar.gz",
                ],
            ) => (Self::ReadContent, true),
            ("GET", ["tofu", "index.json"]) => (Self::ReadReleases, true),
            ("POST", ["live"]) => (Self::ShowChanges, true),
            ("GET", ["registry"]) => (Self::ReadHosts, true),
            // `ToTerrakube::registry` checks later that it is the run's own organization.
            ("GET", ["registry", rest @ ..]) => match registry::namespace(rest) {
                Some((call, _)) => (call, true),
                None => return Err(RelayRefusal::Request(NO_SUCH)),
            },
            _ => return Err(RelayRefusal::Request(NO_SUCH)),
        };
        if is_own {
            Ok(call)
        } else {
            Err(RelayRefusal::Request("it is about another run"))
        }
    }

    fn takes_query(self, query: Option<&str>, step: &StepRef) -> bool {
        let pairs: Vec<_> =
            url::form_urlencoded::parse(query.unwrap_or_default().as_bytes()).collect();
        let pairs: Vec<(&str, &str)> = pairs
            .iter()
            .map(|(name, value)| (&**name, &**value))
            .collect();
        match (self, &pairs[..]) {
            (Self::ReadJob, [("include", "step")]) => true,
            (Self::ReadHistory, [("filter[history]", filter)]) => *filter == own_history(step),
            (Self::ReadHistory, []) => false,
            (_, pairs) => pairs.is_empty(),
        }
    }

    /// What is done after the end saves what a run leaves behind: state and log. Executors report statuses before they end
    /// their task, and otherwise the hub reports the outcome. So no status changes after the end.
    pub(super) const fn when(self) -> When {
        let before_acceptance = matches!(
            self,
            Self::ReadJob
                | Self::ReadContext
                | Self::ReadContent
                | Self::ReadReleases
                | Self::ReadHosts
                | Self::ReadRegistry
                | Self::ReadModule
        );
        let after_end = matches!(
            self,
            Self::ReadJob | Self::ReadHistory | Self::AddHistory | Self::SetUpLog | Self::AddLines
        );
        When {
            before_acceptance,
            after_end,
        }
    }
}

/// When an executor may make a request, besides the time in which it has the task.
#[derive(Clone, Copy, Debug)]
pub(crate) struct When {
    /// Before it accepts the task.
    pub(crate) before_acceptance: bool,
    /// For a time after the end of the task, to save what the run leaves behind.
    pub(crate) after_end: bool,
}

/// Returns the filter for the states that the job has published, in the platform's query language.
pub(super) fn own_history(step: &StepRef) -> String {
    format!("jobReference=='{}'", job_reference(step))
}

/// Returns the reference to the job in the history of states.
pub(super) fn job_reference(step: &StepRef) -> String {
    step.job_id.chars().take(REFERENCE_WIDTH).collect()
}

/// Checks whether the state of the task allows the request.
pub(crate) fn check_state(task: &TaskView, when: When) -> Result<(), RelayRefusal> {
    let refusal = match task.state {
        // An orphaned run may still run, and its reports count.
        TaskState::Running | TaskState::Orphaned => return Ok(()),
        TaskState::Leased if when.before_acceptance => return Ok(()),
        TaskState::Leased => Refusal::LeaseNotAccepted,
        TaskState::Available => Refusal::LeaseExpired,
        TaskState::Completed | TaskState::Failed | TaskState::Cancelled => {
            let is_fresh = task.ended.is_some_and(|ago| ago <= AFTERWARDS);
            let is_trusted = task
                .end
                .as_ref()
                .is_none_or(|end| end.reason != EndReason::Revoked);
            // The last lease of a task that nobody has accepted may have been revoked before. It has nothing to save.
            let is_accepted = task.holder.is_some();
            if is_fresh && is_trusted && is_accepted && when.after_end {
                return Ok(());
            }
            Refusal::TaskAlreadyTerminal
        }
    };
    Err(RelayRefusal::State(refusal))
}
