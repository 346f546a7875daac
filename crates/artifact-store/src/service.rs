//! What a kind of store can do. A new kind implements this, has its settings in [`crate::settings`], and tells the tool's
//! backend in [`crate::backend`] where it keeps states.

use std::fmt::Debug;
use std::path::Path;

use async_trait::async_trait;
use bytes::Bytes;
use job_contract::keys::ObjectKey;
use secrecy::SecretString;

use crate::backend::BackendSettings;
use crate::digest::Digest;
use crate::error::StoreError;
use crate::retry::Health;

/// One kind of store.
#[async_trait]
pub(crate) trait ObjectService: Debug + Send + Sync {
    /// The reference under which an object is known to the platform.
    fn reference(&self, key: &ObjectKey) -> String;

    /// Stores bytes, over whatever was there.
    async fn put(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError>;

    /// Stores a file's content, over whatever was there.
    async fn put_file(&self, key: &ObjectKey, source: &Path) -> Result<(), StoreError>;

    /// Copies the object behind a reference into a new file.
    async fn fetch(&self, reference: &str, target: &Path) -> Result<Digest, StoreError>;

    /// Content of an object; `None` when there is none.
    async fn read(&self, key: &ObjectKey) -> Result<Option<Bytes>, StoreError>;

    /// Where the tool's own backend keeps the state of a workspace.
    fn backend(&self, organization: &str, workspace: &str) -> BackendSettings;

    /// How the service is, where it is on a network.
    fn health(&self) -> Option<&Health> {
        None
    }

    /// The credentials it was opened with.
    fn secrets(&self) -> Vec<SecretString> {
        Vec::new()
    }
}
