//! Where the tool's own backend keeps the state of a workspace.

use std::time::SystemTime;

use async_trait::async_trait;
use bytes::Bytes;

use crate::error::StoreError;
use crate::transfer::{Condition, Content, Upload};

/// The place of a workspace's state, with the lock that the tool's own backend takes there.
#[async_trait]
pub(crate) trait StatePlace: Send + Sync {
    async fn open(&self) -> Result<Option<Content>, StoreError>;
    /// Replaces the state. `lock` is the id of the lock that the caller has.
    async fn put(
        &self,
        upload: Upload,
        lock: Option<&str>,
        condition: &Condition,
    ) -> Result<(), StoreError>;
    /// Removes the state. `lock` is the id of the lock that the caller has.
    async fn delete(&self, lock: Option<&str>, condition: &Condition) -> Result<(), StoreError>;
    /// Whether the store has a lock.
    fn has_lock(&self) -> bool;
    /// Takes the lock. `false` if somebody has it.
    async fn lock(&self, info: Bytes) -> Result<bool, StoreError>;
    /// Whether the lock is an object. Whoever deletes it then releases it, unless the service keeps the condition of the delete.
    fn lock_is_object(&self) -> bool {
        false
    }
    /// What the holder of the lock has written; `None` if nobody has it.
    async fn lock_info(&self) -> Result<Option<Bytes>, StoreError>;
    /// Releases the lock that has this description.
    async fn unlock(&self, info: &[u8]) -> Result<(), StoreError>;
    /// Does the same with one request at most that the service may do late. `since` is when that was decided.
    async fn unlock_once(&self, info: &[u8], _since: SystemTime) -> Result<(), StoreError> {
        self.unlock(info).await
    }
}
