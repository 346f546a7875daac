//! A state in a bucket, whose lock is an object beside it.

use std::time::SystemTime;

use async_trait::async_trait;
use bytes::Bytes;

use crate::clouds::remote::Remote;
use crate::error::StoreError;
use crate::state_place::StatePlace;
use crate::transfer::{Condition, Content, Upload};

/// The state, and its lock.
pub(crate) struct StateObject {
    pub(crate) remote: Remote,
    pub(crate) name: String,
    /// The name of the lock, if the tool's own backend takes one.
    pub(crate) lock: Option<String>,
}

impl StateObject {
    /// The condition that a lock still has this description; `None` if it has not.
    async fn held(&self, lock: &str, info: &[u8]) -> Result<Option<Condition>, StoreError> {
        let found = self.remote.look_at(lock).await?;
        let found = found.filter(|(found, _)| found == info);
        Ok(found.map(|(_, condition)| condition))
    }
}

#[async_trait]
impl StatePlace for StateObject {
    async fn open(&self) -> Result<Option<Content>, StoreError> {
        self.remote.open(&self.name).await
    }

    async fn put(
        &self,
        upload: Upload,
        _lock: Option<&str>,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        self.remote.put_upload(&self.name, upload, condition).await
    }

    async fn delete(&self, _lock: Option<&str>, condition: &Condition) -> Result<(), StoreError> {
        self.remote.delete(&self.name, condition).await
    }

    fn has_lock(&self) -> bool {
        self.lock.is_some()
    }

    async fn lock(&self, info: Bytes) -> Result<bool, StoreError> {
        match &self.lock {
            Some(lock) => self.remote.create(lock, info).await,
            None => Ok(true),
        }
    }

    async fn lock_info(&self) -> Result<Option<Bytes>, StoreError> {
        match &self.lock {
            Some(lock) => self.remote.read(lock).await,
            None => Ok(None),
        }
    }

    fn lock_is_object(&self) -> bool {
        self.lock.is_some()
    }

    async fn unlock(&self, info: &[u8]) -> Result<(), StoreError> {
        let Some(lock) = &self.lock else {
            return Ok(());
        };
        let Some(condition) = self.held(lock, info).await? else {
            return Ok(());
        };
        match self.remote.delete(lock, &condition).await {
            // Somebody else may have taken it.
            Err(StoreError::Changed { object }) => match self.held(lock, info).await? {
                Some(_) => Err(StoreError::Changed { object }),
                None => Ok(()),
            },
            deleted => deleted,
        }
    }

    async fn unlock_once(&self, info: &[u8], since: SystemTime) -> Result<(), StoreError> {
        let Some(lock) = &self.lock else {
            return Ok(());
        };
        let Some(condition) = self.held(lock, info).await? else {
            return Ok(());
        };
        // A service that takes a condition here may keep it.
        match self.remote.delete_once(lock, &condition, since).await {
            // Somebody else has taken it, or the service compares in a way of its own.
            Err(StoreError::Changed { .. }) => match self.held(lock, info).await? {
                Some(_) => {
                    let any = &Condition::Any;
                    self.remote.delete_once(lock, any, since).await
                }
                None => Ok(()),
            },
            deleted => deleted,
        }
    }
}
