//! A store whose objects a hub passes on: to it come uploads of unknown senders, and the requests of the tool's `http`
//! backend about the state of a workspace.

use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use bytes::Bytes;
use job_contract::keys::ObjectKey;
use uuid::Uuid;

use crate::conditions::{Change, KeptConditions};
use crate::error::StoreError;
use crate::request::RequestTiming;
use crate::service::ServedService;
use crate::settings::StoreSettings;
use crate::state_place::StatePlace;
use crate::transfer::{Condition, Content, Upload};

/// A store whose objects a hub passes on. Clones share it.
#[derive(Clone, Debug)]
pub struct ServedStore {
    service: Arc<dyn ServedService>,
    /// Empty until the store was asked.
    kept: Arc<OnceLock<KeptConditions>>,
    /// The name of the object with which it is asked. Where it cannot be removed, the next question makes no other one.
    asked: Uuid,
}

impl ServedStore {
    /// Opens the configured store. It sends no request yet.
    pub fn open(settings: &StoreSettings, timing: &RequestTiming) -> Result<Self, StoreError> {
        Ok(Self::of_service(crate::open(settings, timing)?))
    }

    pub(crate) fn of_service(service: Arc<dyn ServedService>) -> Self {
        Self {
            service,
            kept: Arc::default(),
            asked: Uuid::new_v4(),
        }
    }

    /// Asks the store which conditions it keeps. For this it stores an object that nobody else uses, and removes it. If it is
    /// killed meanwhile, the object stays.
    pub async fn ask_conditions(&self) -> Result<KeptConditions, StoreError> {
        let name = self.asked.to_string();
        let found = self.service.ask_conditions(&name).await?;
        Ok(self.kept.get_or_init(|| found).clone())
    }

    /// The reference by which the platform knows an object. The object need not exist yet.
    pub fn reference(&self, key: &ObjectKey) -> String {
        self.service.reference_of(key)
    }

    /// The key of a reference; `None` if the reference is not in this store.
    pub fn key_behind(&self, reference: &str) -> Option<ObjectKey> {
        self.service.key_behind(reference)
    }

    /// Opens an object; `None` if it does not exist.
    pub async fn read(&self, key: &ObjectKey) -> Result<Option<Content>, StoreError> {
        self.service.open(key).await
    }

    /// Stores an upload, if the condition is true when the store has all of it; otherwise [`StoreError::Changed`]. An existing
    /// object is replaced by the whole of it, or stays. A service that knows no conditions stores it in any case.
    pub async fn put(
        &self,
        key: &ObjectKey,
        upload: Upload,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        self.service.put_upload(key, upload, condition).await
    }

    /// The state of a workspace, where the tool's own backend keeps it.
    pub fn state(&self, organization: &str, workspace: &str) -> WorkspaceState {
        let place = self.service.state(organization, workspace);
        let keeps_deletes = || self.kept.get().is_some_and(|kept| kept.has(Change::Delete));
        WorkspaceState {
            unlocks_on_condition: !place.lock_is_object() || keeps_deletes(),
            place,
        }
    }
}

/// The state of a workspace, where the tool's own backend keeps it.
#[derive(Clone)]
pub struct WorkspaceState {
    place: Arc<dyn StatePlace>,
    unlocks_on_condition: bool,
}

impl std::fmt::Debug for WorkspaceState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WorkspaceState")
    }
}

impl WorkspaceState {
    /// Opens the state; `None` if there is none.
    pub async fn open(&self) -> Result<Option<Content>, StoreError> {
        self.place.open().await
    }

    /// Replaces the state under a condition, as [`ServedStore::put`] does. `lock` is the id of the lock that the caller has.
    /// Where locks are leases, nobody else's write succeeds.
    pub async fn put(
        &self,
        upload: Upload,
        lock: Option<&str>,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        self.place.put(upload, lock, condition).await
    }

    /// Removes the state, as [`Self::put`] replaces it. It is no error if there is none.
    pub async fn delete(
        &self,
        lock: Option<&str>,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        match condition {
            Condition::Absent => Ok(()),
            condition => self.place.delete(lock, condition).await,
        }
    }

    /// Whether the tool's own backend takes a lock in this store that others than the tool can take.
    pub fn has_lock(&self) -> bool {
        self.place.has_lock()
    }

    /// Takes the lock, if the store has one. `info` is what the tool's own backend writes into it. `false` if somebody has
    /// the lock.
    pub async fn lock(&self, info: Bytes) -> Result<bool, StoreError> {
        self.place.lock(info).await
    }

    /// What the holder of the lock has written; `None` if nobody has it.
    pub async fn lock_info(&self) -> Result<Option<Bytes>, StoreError> {
        self.place.lock_info().await
    }

    /// Whether [`Self::unlock`] can release no lock but the one whose holder has written that. Otherwise use [`Self::unlock_once`].
    pub fn unlocks_on_condition(&self) -> bool {
        self.unlocks_on_condition
    }

    /// Releases the lock whose holder has written this. It is no error if nobody has it, or if somebody else has taken it since.
    pub async fn unlock(&self, info: &[u8]) -> Result<(), StoreError> {
        self.place.unlock(info).await
    }

    /// Does the same where the service may release the lock of somebody else. It sends one request at most that the service may do
    /// late, and none later than a minute after `since`. If it is not known whether the service does it, the error is
    /// [`StoreError::Uncertain`].
    pub async fn unlock_once(&self, info: &[u8], since: SystemTime) -> Result<(), StoreError> {
        self.place.unlock_once(info, since).await
    }
}
