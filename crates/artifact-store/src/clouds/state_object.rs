//! A state in a bucket, whose lock is an object beside it.

use async_trait::async_trait;
use bytes::Bytes;

use crate::clouds::remote::Remote;
use crate::error::StoreError;
use crate::service::StatePlace;
use crate::transfer::{Content, Upload};

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

    async fn put(&self, upload: Upload, _lock: Option<&str>) -> Result<(), StoreError> {
        self.remote.put_upload(&self.name, upload).await
    }

    async fn delete(&self, _lock: Option<&str>) -> Result<(), StoreError> {
        self.remote.delete(&self.name).await
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

    async fn unlock(&self, _info: &[u8]) -> Result<(), StoreError> {
        match &self.lock {
            Some(lock) => self.remote.delete(lock).await,
            None => Ok(()),
        }
    }
}
