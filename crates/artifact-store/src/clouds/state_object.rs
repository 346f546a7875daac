//! A state in a bucket, whose lock is an object beside it.

use async_trait::async_trait;
use bytes::Bytes;

use crate::clouds::remote::Remote;
use crate::error::StoreError;
use crate::service::StatePlace;
use crate::transfer::{Condition, Content, Upload};

/// The state, and its lock.
pub(crate) struct StateObject {
    pub(crate) remote: Remote,
    pub(crate) name: String,
    /// The name of the lock, if the tool's own backend takes one.
    pub(crate) lock: Option<String>,
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

    async fn unlock(&self, info: &[u8]) -> Result<(), StoreError> {
        let Some(lock) = &self.lock else {
            return Ok(());
        };
        let Some((_, condition)) = self
            .remote
            .look_at(lock)
            .await?
            .filter(|(found, _)| found == info)
        else {
            return Ok(());
        };
        match self.remote.delete(lock, &condition).await {
            // Somebody else has taken it, or the service compares in a way of its own.
            Err(StoreError::Changed { .. }) => match self.remote.look_at(lock).await? {
                Some((found, _)) if found == info => {
                    self.remote.delete(lock, &Condition::Any).await
                }
                _ => Ok(()),
            },
            deleted => deleted,
        }
    }
}
