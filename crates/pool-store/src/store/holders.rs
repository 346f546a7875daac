//! What the holder of a lease says: its agent, and its executor.

use pool_protocol::lease::{Acceptance, Decline, End, Holder};
use pool_protocol::task::TaskState;
use pool_protocol::token::JobGrant;

use super::Store;
use crate::clock::{Millis, between};
use crate::error::{Error, Refusal};
use crate::model::{Ending, LeaseStatus};
use crate::state::{Event, Task};
use crate::text::identifier;

impl Store {
    /// An executor exists. `executor` names the Job or the process, for people.
    pub async fn started(&self, grant: JobGrant, executor: &str) -> Result<LeaseStatus, Error> {
        let event = Event::Started { grant, executor };
        self.hold(grant, event).await
    }

    /// The agent hands the task back.
    pub async fn decline(&self, grant: JobGrant, decline: &Decline) -> Result<TaskState, Error> {
        let event = Event::Decline { grant, decline };
        let (task, _) = self.change(grant.task, event).await?;
        Ok(task.state.on_the_wire())
    }

    /// An executor takes the task: the claim. It is granted to one holder, and to it again. Deletes the payload.
    pub async fn accept(&self, grant: JobGrant, holder: &Holder) -> Result<LeaseStatus, Error> {
        identifier("the holder's UID", &holder.uid)?;
        let event = Event::Accept { grant, holder };
        self.hold(grant, event).await
    }

    /// An executor that has accepted the task lives. If the store has forgotten that, because it was restored from a
    /// backup, it knows it again. After such a restore an end is refused as not accepted or expired until there was a beat.
    pub async fn beat(&self, grant: JobGrant, beat: &Acceptance) -> Result<LeaseStatus, Error> {
        identifier("the holder's UID", &beat.holder.uid)?;
        let event = Event::Beat { grant, beat };
        self.hold(grant, event).await
    }

    /// The task has ended. There is one result: the first one counts.
    pub async fn end(
        &self,
        grant: JobGrant,
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
        let event = Event::End { grant, ending, end };
        let (task, _) = self.change(grant.task, event).await?;
        Ok(task.state.on_the_wire())
    }

    async fn hold(&self, grant: JobGrant, event: Event<'_>) -> Result<LeaseStatus, Error> {
        let (task, now) = self.change(grant.task, event).await?;
        Ok(self.status(&task, grant, now))
    }

    fn status(&self, task: &Task, grant: JobGrant, now: Millis) -> LeaseStatus {
        LeaseStatus {
            grant,
            state: task.state.on_the_wire(),
            expires_in: between(now, task.deadline(&self.rules)),
            cancel_requested: task.cancel_requested,
        }
    }
}
