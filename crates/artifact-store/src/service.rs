//! The interfaces of a kind of store. A new kind implements [`ObjectService`] and [`ServedService`], adds its settings to
//! [`crate::settings`], and adds a variant to [`BackendSettings`] for the tool's own backend.

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use job_contract::keys::{self, ObjectKey};
use secrecy::SecretString;
use uuid::Uuid;

use crate::conditions::{self, KeptConditions};
use crate::digest::Digest;
use crate::error::StoreError;
use crate::request::Health;
use crate::state_backend::BackendSettings;
use crate::state_place::StatePlace;
use crate::transfer::{Condition, Content, Upload};

/// One kind of store.
#[async_trait]
pub(crate) trait ObjectService: Debug + Send + Sync {
    /// The reference by which the platform knows an object.
    async fn reference(&self, key: &ObjectKey) -> Result<String, StoreError>;

    /// The condition that an object is still what it is now. [`Condition::Any`] if somebody else cares for conditions.
    async fn unchanged(&self, key: &ObjectKey) -> Result<Condition, StoreError>;

    /// Stores bytes under a condition. An existing object is replaced.
    async fn put(
        &self,
        key: &ObjectKey,
        bytes: Bytes,
        condition: &Condition,
    ) -> Result<(), StoreError>;

    /// Stores a file's content under a condition. An existing object is replaced.
    async fn put_file(
        &self,
        key: &ObjectKey,
        source: &Path,
        condition: &Condition,
    ) -> Result<(), StoreError>;

    /// Copies the object of a reference into a new file.
    async fn fetch(&self, reference: &str, target: &Path, limit: u64)
    -> Result<Digest, StoreError>;

    /// Reads an object; `None` if it does not exist.
    async fn read(&self, key: &ObjectKey) -> Result<Option<Bytes>, StoreError>;

    /// The name under which a state is published.
    async fn state_name(&self) -> Result<String, StoreError> {
        Ok(Uuid::new_v4().to_string())
    }

    /// Where the tool's own backend keeps the state of a workspace.
    fn backend(&self, organization: &str, workspace: &str) -> BackendSettings;

    /// The state of the service, if it is reached over a network.
    fn health(&self) -> Option<&Health> {
        None
    }

    /// The credentials of the store.
    fn secrets(&self) -> Vec<SecretString> {
        Vec::new()
    }
}

/// One kind of store, for a hub.
#[async_trait]
pub(crate) trait ServedService: ObjectService {
    /// The reference by which the platform knows an object.
    fn reference_of(&self, key: &ObjectKey) -> String;

    /// The key of a reference; `None` if the reference is not in this store.
    fn key_behind(&self, reference: &str) -> Option<ObjectKey>;

    /// Opens an object; `None` if it does not exist.
    async fn open(&self, key: &ObjectKey) -> Result<Option<Content>, StoreError>;

    /// Stores an upload under a condition. An existing object is replaced by the whole of it, or stays.
    async fn put_upload(
        &self,
        key: &ObjectKey,
        upload: Upload,
        condition: &Condition,
    ) -> Result<(), StoreError>;

    /// The place in which the tool's own backend keeps the state of a workspace.
    fn state(&self, organization: &str, workspace: &str) -> Arc<dyn StatePlace>;

    /// Asks which conditions the service keeps. It stores an object with this name that nobody else uses, and removes it.
    async fn ask_conditions(&self, name: &str) -> Result<KeptConditions, StoreError> {
        let place = self.state(keys::OF_HUB, name);
        conditions::ask(&*place).await
    }
}
