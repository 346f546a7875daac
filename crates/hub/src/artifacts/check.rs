//! Decides whether a state may take the place of another one.

use std::sync::Arc;

use artifact_store::{Condition, Content, Digest, WorkspaceState};
use futures_util::TryStreamExt as _;
use job_contract::StepType;
use job_contract::encoding::hex;
use pool_protocol::id::TaskId;
use pool_protocol::problem::Code;
use pool_store::TaskView;
use sha2::{Digest as _, Sha256};

use super::changes::SAVE;
use super::head::{HeadScanner, StateHead};
use super::locks::{self, is_of};
use super::{again, check_again, conflict, failed};
use crate::Hub;
use crate::failure::Failure;

/// A state as it is stored.
#[derive(Debug)]
pub(super) struct StoredState {
    /// `None`: it is no state of the tool.
    head: Option<StateHead>,
    digest: Digest,
    version: String,
}

impl StoredState {
    pub(super) fn sha256(&self) -> &str {
        &self.digest.sha256
    }
}

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Write {
    Replace,
    /// The state is there: an answer was lost.
    Nothing,
}

/// Why a state is not stored.
#[derive(Debug)]
pub(super) enum Refused {
    /// It is there: the answer to an earlier request was lost.
    AlreadyThere,
    Because(Failure),
}

/// What is checked before a state takes the place of another one.
pub(super) struct Check {
    pub(super) hub: Arc<Hub>,
    pub(super) task: TaskView,
    pub(super) state: WorkspaceState,
    /// The lock of the tool.
    pub(super) lock: Option<String>,
    pub(super) before: Option<StoredState>,
    /// That the stored state is still this one.
    pub(super) condition: Condition,
    pub(super) digest: Digest,
}

impl Check {
    /// Decides what the write of a state with this head does.
    pub(super) async fn decide(&self, head: &StateHead) -> Result<Write, Failure> {
        let before = self.before.as_ref();
        if before.is_some_and(|before| before.digest == self.digest) {
            return Ok(Write::Nothing);
        }
        let (hub, task) = (&self.hub, &self.task);
        may_change(hub, task)?;
        has_seen(hub, task.task, before).await?;
        follows(before, head).map_err(conflict)?;
        check_lock(hub, &self.state, self.lock.as_deref(), task.task).await?;
        Ok(Write::Replace)
    }

    /// The content has arrived, which may have taken minutes. Nobody may have changed anything meanwhile.
    pub(super) async fn at_the_end(&self, head: Option<StateHead>) -> Result<(), Refused> {
        let head = head.ok_or_else(|| conflict("it is no state: it has no serial and lineage"));
        let head = head.map_err(Refused::Because)?;
        match self.decide(&head).await {
            Ok(Write::Replace) => self.note().await.map_err(Refused::Because),
            Ok(Write::Nothing) => Err(Refused::AlreadyThere),
            Err(why) => Err(Refused::Because(why)),
        }
    }

    /// Notes what is stored, if it may be.
    async fn note(&self) -> Result<(), Failure> {
        check_again(&self.hub, &self.task, SAVE).await?;
        let now = self.state.open().await.map_err(|error| failed(&error))?;
        let now = now.filter(|now| now.size_bytes > 0).map(|now| now.version);
        if now != self.before.as_ref().map(|before| before.version.clone()) {
            // It may have been an earlier attempt of the same write, at another hub.
            return Err(again("the state was changed meanwhile: try again"));
        }
        let (store, task) = (&self.hub.store, self.task.task);
        let before = self.before.as_ref().map(StoredState::sha256);
        store
            .stores_state(task, before, &self.digest.sha256)
            .await?;
        Ok(())
    }
}

/// Returns whether a refusal is about the state, and not about the sender or the time. Repetition does not change it.
pub(super) const fn is_about_state(why: &Failure) -> bool {
    matches!(
        why.code(),
        Code::RequestInvalid | Code::ExecutorPoolForbidden
    )
}

/// Whether a step may change the state. The operator may let scripts do it.
pub(super) fn changes_state(hub: &Hub, task: &TaskView) -> bool {
    let changes = StepType::parse(&task.kind).is_some_and(StepType::changes_infrastructure);
    changes || hub.lets_scripts_change_state(&task.pool)
}

/// Refuses a change by a step that only reads the state.
pub(super) fn may_change(hub: &Hub, task: &TaskView) -> Result<(), Failure> {
    if changes_state(hub, task) {
        return Ok(());
    }
    let text = "only an apply or a destroy changes the state: a step of this type may read it. To let its scripts change it, the \
                operator sets `scriptState: write` for the pool in the file of the pools";
    Err(Failure::new(Code::ExecutorPoolForbidden, text))
}

/// Refuses a change of a state that the task has not seen.
pub(super) async fn has_seen(
    hub: &Hub,
    task: TaskId,
    before: Option<&StoredState>,
) -> Result<(), Failure> {
    let seen = hub.store.seen_state(task).await?;
    if seen.is(before.map(StoredState::sha256)) {
        return Ok(());
    }
    Err(conflict(
        "somebody has changed the state since this run has read or stored it last",
    ))
}

/// Refuses a write while somebody else has the lock, and a write without a lock of a task that had one.
pub(super) async fn check_lock(
    hub: &Hub,
    state: &WorkspaceState,
    own: Option<&str>,
    task: TaskId,
) -> Result<(), Failure> {
    let info = state.lock_info().await.map_err(|error| failed(&error))?;
    if let Some(info) = info {
        return if is_of(&info, own, task) {
            Ok(())
        } else {
            Err(locks::held(&info))
        };
    }
    if state.has_lock() && hub.store.must_lock_state(task, own.is_some()).await? {
        return Err(conflict(
            "this run no longer has the lock of the state: take it again before the state is written",
        ));
    }
    Ok(())
}

/// Reads the state before a write; `None` if there is none.
pub(super) async fn stored(content: Option<Content>) -> Result<Option<StoredState>, Failure> {
    let Some(content) = content.filter(|content| content.size_bytes > 0) else {
        return Ok(None);
    };
    let (mut scanner, mut hasher) = (HeadScanner::default(), Sha256::new());
    let mut chunks = content.chunks;
    while let Some(chunk) = chunks.try_next().await.map_err(|error| failed(&error))? {
        scanner.read(&chunk);
        hasher.update(&chunk);
    }
    let digest = Digest {
        size_bytes: content.size_bytes,
        sha256: hex(&hasher.finalize()),
    };
    Ok(Some(StoredState {
        head: scanner.finish(),
        digest,
        version: content.version,
    }))
}

/// Decides whether a state may follow the stored one.
fn follows(before: Option<&StoredState>, head: &StateHead) -> Result<(), &'static str> {
    let Some(before) = before else {
        return Ok(());
    };
    let Some(stored) = &before.head else {
        return Err("the stored state has no serial and lineage, so nothing can follow it");
    };
    if stored.lineage != head.lineage {
        Err("the stored state has another lineage: it belongs to other resources")
    } else if head.serial > stored.serial {
        Ok(())
    } else {
        Err(
            "the stored state has the same serial or a later one: somebody has changed it meanwhile",
        )
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn digest(sha256: &str) -> Digest {
        Digest {
            size_bytes: 1,
            sha256: sha256.to_owned(),
        }
    }

    fn head(serial: u64, lineage: &str) -> StateHead {
        StateHead {
            serial,
            lineage: lineage.to_owned(),
        }
    }

    #[rstest]
    #[case::first(None, head(0, "l"), Ok(()))]
    #[case::next(Some(6), head(7, "l"), Ok(()))]
    #[case::smaller(Some(8), head(7, "l"), Err("later"))]
    #[case::same_serial(Some(7), head(7, "l"), Err("same serial"))]
    #[case::lineage(Some(6), head(7, "m"), Err("another lineage"))]
    fn a_state_follows_an_earlier_one_of_its_lineage(
        #[case] before: Option<u64>,
        #[case] after: StateHead,
        #[case] expected: Result<(), &str>,
    ) {
        let before = before.map(|serial| StoredState {
            head: Some(head(serial, "l")),
            digest: digest("before"),
            version: String::new(),
        });
        match (follows(before.as_ref(), &after), expected) {
            (Ok(()), Ok(())) => {}
            (Err(found), Err(part)) => assert!(found.contains(part), "{found}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nothing_follows_what_is_no_state() {
        let before = StoredState {
            head: None,
            digest: digest("before"),
            version: String::new(),
        };
        let refused = follows(Some(&before), &head(7, "l")).unwrap_err();
        assert!(refused.contains("no serial and lineage"), "{refused}");
    }
}
