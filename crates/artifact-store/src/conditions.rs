//! Asks a store which conditions it keeps. Services that are compatible with S3 may ignore or refuse them, in part or altogether.

use crate::error::StoreError;
use crate::state_place::StatePlace;
use crate::transfer::{Condition, PART_BYTES, Upload};

/// A change that can have a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// An object appears.
    Create,
    /// An object takes the place of another one.
    Replace,
    /// The same, when the parts of a large object are joined.
    Join,
    Delete,
}

impl Change {
    pub const ALL: [Self; 4] = [Self::Create, Self::Replace, Self::Join, Self::Delete];

    /// The name in logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Replace => "replace",
            Self::Join => "join",
            Self::Delete => "delete",
        }
    }
}

/// The conditions that a store keeps. It ignores or refuses the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptConditions(Vec<Change>);

impl KeptConditions {
    /// All of them, or none.
    pub(crate) fn all_if(is_kept: bool) -> Self {
        let all = Change::ALL.into_iter();
        Self(all.filter(|_| is_kept).collect())
    }

    /// Whether the store keeps the condition of a change.
    pub fn has(&self, change: Change) -> bool {
        self.0.contains(&change)
    }

    /// The names of the changes whose conditions the store does not keep; `None` if it keeps all.
    pub fn lacks(&self) -> Option<String> {
        let all = Change::ALL.into_iter();
        let lacks = all.filter(|change| !self.has(*change));
        let names: Vec<_> = lacks.map(Change::name).collect();
        (!names.is_empty()).then(|| names.join(", "))
    }

    fn note(&mut self, change: Change, done: Result<(), StoreError>) -> Result<(), StoreError> {
        match done {
            Err(StoreError::Changed { .. }) => self.0.push(change),
            done => done?,
        }
        Ok(())
    }
}

/// Asks with the object in a place that nobody else uses. Afterwards there is no object.
pub(crate) async fn ask(place: &dyn StatePlace) -> Result<KeptConditions, StoreError> {
    let mut kept = KeptConditions(Vec::new());
    let asked = change_wrongly(place, &mut kept).await;
    let removed = match &asked {
        Ok(()) => remove(place, &mut kept).await,
        Err(_) => place.delete(None, &Condition::Any).await,
    };
    // The first error says more.
    asked.and(removed).map(|()| kept)
}

/// Makes every change under a condition that is not true.
async fn change_wrongly(
    place: &dyn StatePlace,
    kept: &mut KeptConditions,
) -> Result<(), StoreError> {
    let absent = Condition::Absent;
    put(place, b"1".to_vec(), &absent).await?;
    kept.note(Change::Create, put(place, b"2".to_vec(), &absent).await)?;
    let first = look_at(place).await?;
    // It is true now, and not afterwards.
    put(place, b"3".to_vec(), &first).await?;
    kept.note(Change::Replace, put(place, b"4".to_vec(), &first).await)?;
    let parts = vec![0; PART_BYTES];
    kept.note(Change::Join, put(place, parts, &first).await)?;
    kept.note(Change::Delete, place.delete(None, &first).await)
}

async fn put(
    place: &dyn StatePlace,
    content: Vec<u8>,
    condition: &Condition,
) -> Result<(), StoreError> {
    place.put(Upload::of(content.into()), None, condition).await
}

/// Removes what is left under a condition that is true. A service that refuses this compares in a way of its own.
async fn remove(place: &dyn StatePlace, kept: &mut KeptConditions) -> Result<(), StoreError> {
    let last = look_at(place).await?;
    if last == Condition::Absent {
        return Ok(());
    }
    match place.delete(None, &last).await {
        Err(StoreError::Changed { .. }) => {
            kept.0.retain(|change| *change != Change::Delete);
            place.delete(None, &Condition::Any).await
        }
        removed => removed,
    }
}

async fn look_at(place: &dyn StatePlace) -> Result<Condition, StoreError> {
    let found = place.open().await?;
    Ok(Condition::unchanged(found.as_ref()))
}
