//! Operations of the agent and the executor that have a lease.

use pool_protocol::lease::{Acceptance, Decline, End, Holder, LeaseRef};
use pool_protocol::task::TaskState;

use super::Store;
use crate::clock::{Millis, between};
use crate::error::{Error, Refusal};
use crate::model::{Ending, LeaseStatus};
use crate::state::{Event, Task};
use crate::text::identifier;

/// The longest final report of an executor, in bytes. A termination message has at most 4096.
const REPORT: usize = 8192;

impl Store {
    /// Stores that an executor exists. `executor` names the Job or the process, for people.
    pub async fn started(&self, grant: LeaseRef, executor: &str) -> Result<LeaseStatus, Error> {
        let event = Event::Started { grant, executor };
        self.change_lease(grant, event).await
    }

    /// Returns a task to the queue, because its agent declines it.
    pub async fn decline(&self, grant: LeaseRef, decline: &Decline) -> Result<TaskState, Error> {
        let event = Event::Decline { grant, decline };
        let (task, _) = self.change(grant.task, event).await?;
        Ok(task.state.protocol_state())
    }

    /// Accepts a task for an executor: the claim. Only one holder can accept it, and may repeat the request. Deletes
    /// the payload.
    pub async fn accept(&self, grant: LeaseRef, holder: &Holder) -> Result<LeaseStatus, Error> {
        identifier("the holder's UID", &holder.uid)?;
        let event = Event::Accept { grant, holder };
        self.change_lease(grant, event).await
    }

    /// Stores a heartbeat of the executor that has accepted the task. If the store was restored from an older backup,
    /// this restores the acceptance. Until then, the store refuses the end of the task as not accepted or expired.
    pub async fn lease_heartbeat(
        &self,
        grant: LeaseRef,
        heartbeat: &Acceptance,
    ) -> Result<LeaseStatus, Error> {
        identifier("the holder's UID", &heartbeat.holder.uid)?;
        let event = Event::Heartbeat { grant, heartbeat };
        self.change_lease(grant, event).await
    }

    /// Ends the task. If it has already ended, the first result counts.
    pub async fn end(
        &self,
        grant: LeaseRef,
        ending: Ending,
        end: &End,
    ) -> Result<TaskState, Error> {
        if end
            .final_log_sequence
            .is_some_and(|last| i64::try_from(last).is_err())
        {
            let text = "`finalLogSequence` is larger than 2^63 - 1".to_owned();
            return Err(Refusal::RequestInvalid(text).into());
        }
        if let Some(report) = &end.report {
            let length = serde_json::Value::Object(report.clone()).to_string().len();
            if length > REPORT {
                let text = format!("`report` has {length} bytes: at most {REPORT} are stored");
                return Err(Refusal::RequestInvalid(text).into());
            }
        }
        let event = Event::End { grant, ending, end };
        let (task, _) = self.change(grant.task, event).await?;
        Ok(task.state.protocol_state())
    }

    async fn change_lease(&self, grant: LeaseRef, event: Event<'_>) -> Result<LeaseStatus, Error> {
        let (task, now) = self.change(grant.task, event).await?;
        Ok(self.status(&task, grant, now))
    }

    fn status(&self, task: &Task, grant: LeaseRef, now: Millis) -> LeaseStatus {
        LeaseStatus {
            grant,
            state: task.state.protocol_state(),
            expires_in: between(now, task.deadline(&self.rules)),
            cancel_requested: task.cancel_requested,
        }
    }
}
