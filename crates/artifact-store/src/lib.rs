//! The artifact store for plans, states and step output (contract 6): a folder, S3, Azure Blob Storage or GCS.
//!
//! - [`Store`] is what an executor uses. It may be the store of a hub ([`HubStore`]).
//! - [`ServedStore`] is what the hub uses to pass artifacts on, and what an executor uses to write under a condition.
//!
//! Without the feature `full` there is no store of a cloud.
//!
//! This crate knows the object keys of `job-contract` and the protocol of each service. It knows nothing of the tool that
//! makes the objects, nor of the platform that reads them. Memory is bounded for objects of any size.

#[cfg(feature = "full")]
mod clouds;
#[cfg(not(feature = "full"))]
#[path = "no_clouds.rs"]
mod clouds;
mod conditions;
mod digest;
mod error;
mod hub;
mod kept;
mod local;
mod object_name;
mod request;
mod served;
mod service;
mod settings;
mod state_backend;
mod state_place;
mod transfer;

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use job_contract::keys::{Area, ObjectKey};
use secrecy::SecretString;
use tokio::sync::watch;

use digest::Hasher;
use error::SOURCE;
use local::Local;
use request::Health;
use service::{ObjectService, ServedService};

pub use conditions::{Change, KeptConditions};
pub use digest::Digest;
pub use error::StoreError;
pub use hub::{CurrentToken, HubSettings, HubStore, StateLocked};
pub use kept::UNREADABLE_LIST;
pub use request::RequestTiming;
pub use runtime::setting::HttpUrl;
pub use served::{ServedStore, WorkspaceState};
pub use settings::{
    AzureSettings, GcsSettings, S3Credentials, S3Settings, StoreArgs, StoreConfigError, StoreKind,
    StoreSettings,
};
pub use state_backend::{
    AzureIdentity, AzureLogin, BackendSettings, GcsLogin, HTTP, Handover, S3Login, StaticKeys,
};
pub use transfer::{Condition, Content, Upload};

/// The largest object that is read into memory.
pub const READ_BYTES: u64 = 16 * 1024 * 1024;

/// How often an object is written. The last time is without a condition.
const ATTEMPTS: usize = 3;

/// What is to be stored.
#[derive(Clone, Copy)]
enum Given<'g> {
    Bytes(&'g Bytes),
    File(&'g Path),
}

/// A store of artifacts.
#[derive(Clone, Debug)]
pub struct Store {
    service: Arc<dyn ObjectService>,
    kind: Kind,
}

/// Whose store it is, and what only that kind can do.
#[derive(Clone, Debug)]
enum Kind {
    Hub(HubStore),
    Own(ServedStore),
}

impl Store {
    /// The local store below a data directory.
    pub fn local(data_dir: &Path) -> Self {
        Self::of_service(Arc::new(Local::new(data_dir)))
    }

    fn of_service(service: Arc<dyn ServedService>) -> Self {
        Self {
            service: service.clone(),
            kind: Kind::Own(ServedStore::of_service(service)),
        }
    }

    /// Opens the configured store. It sends no request yet.
    pub fn open(settings: &StoreSettings) -> Result<Self, StoreError> {
        Self::open_with(settings, &RequestTiming::default())
    }

    /// Opens the configured store with other timeouts and retries than the default.
    pub fn open_with(settings: &StoreSettings, timing: &RequestTiming) -> Result<Self, StoreError> {
        Ok(Self::of_service(open(settings, timing)?))
    }

    /// The store of a hub, for one step.
    pub fn of_hub(store: HubStore) -> Self {
        Self {
            service: Arc::new(store.clone()),
            kind: Kind::Hub(store),
        }
    }

    /// The store of a hub, if this is one. It keeps the state of the workspace too.
    pub fn hub(&self) -> Option<&HubStore> {
        match &self.kind {
            Kind::Hub(hub) => Some(hub),
            Kind::Own(_) => None,
        }
    }

    /// The same store with its conditions, and with the states of workspaces. `None` for the store of a hub.
    pub fn served(&self) -> Option<&ServedStore> {
        match &self.kind {
            Kind::Hub(_) => None,
            Kind::Own(store) => Some(store),
        }
    }

    /// The reference by which the platform knows an object. The object need not exist yet.
    pub async fn reference(&self, key: &ObjectKey) -> Result<String, StoreError> {
        self.service.reference(key).await
    }

    /// Stores bytes and returns the object's reference. An existing object is replaced, but none that appears after this call, because
    /// the service may do a request late: then the error is [`StoreError::Changed`]. A service that refuses a condition that is true
    /// stores it without one.
    pub async fn put(
        &self,
        key: &ObjectKey,
        bytes: impl Into<Bytes>,
    ) -> Result<String, StoreError> {
        self.replace(key, Given::Bytes(&bytes.into())).await?;
        self.reference(key).await
    }

    /// Stores a file's content and returns the object's reference. It replaces an object as [`Self::put`] does.
    pub async fn put_file(&self, key: &ObjectKey, source: &Path) -> Result<String, StoreError> {
        self.replace(key, Given::File(source)).await?;
        self.reference(key).await
    }

    async fn replace(&self, key: &ObjectKey, given: Given<'_>) -> Result<(), StoreError> {
        let before = self.condition(key).await?;
        for _ in 1..ATTEMPTS {
            match self.put_under(key, given, &before).await {
                Err(changed @ StoreError::Changed { .. }) => {
                    if self.condition(key).await? != before {
                        // The answer to the same request may have been lost.
                        let is_own = self.has(key, given).await?;
                        return if is_own { Ok(()) } else { Err(changed) };
                    }
                }
                stored => return stored,
            }
        }
        // Nobody has changed it, so the service compares in a way of its own.
        self.put_under(key, given, &Condition::Any).await
    }

    async fn put_under(
        &self,
        key: &ObjectKey,
        given: Given<'_>,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        match given {
            Given::Bytes(bytes) => self.service.put(key, bytes.clone(), condition).await,
            Given::File(path) => self.service.put_file(key, path, condition).await,
        }
    }

    /// Whether an object has this content.
    async fn has(&self, key: &ObjectKey, given: Given<'_>) -> Result<bool, StoreError> {
        let Some(store) = self.served() else {
            return Ok(false);
        };
        let Some(found) = store.read(key).await? else {
            return Ok(false);
        };
        let own = match given {
            Given::Bytes(bytes) => Digest::of_rest(&mut &bytes[..]).expect("memory can be read"),
            Given::File(path) => {
                let path = path.to_owned();
                let read = move || Digest::of(&path).map_err(StoreError::read(SOURCE, &path));
                local::blocking(read).await?
            }
        };
        let (mut hasher, mut chunks) = (Hasher::default(), found.chunks);
        while let Some(chunk) = chunks.try_next().await? {
            hasher.update(&chunk);
        }
        Ok(hasher.finish() == own)
    }

    /// The condition that an object is still what it is now. An output has none: its writers add to what it has.
    async fn condition(&self, key: &ObjectKey) -> Result<Condition, StoreError> {
        if key.area == Area::Output {
            return Ok(Condition::Any);
        }
        match self.service.unchanged(key).await {
            // The credentials may be for writes alone.
            Err(StoreError::Refused { .. }) => Ok(Condition::Any),
            found => found,
        }
    }

    /// Copies the object of a reference into a new file, private to its owner, and returns its size and digest.
    /// An empty object is no error; an object that does not exist is [`StoreError::Missing`]. After an error there
    /// is no file.
    pub async fn fetch(&self, reference: &str, target: &Path) -> Result<Digest, StoreError> {
        self.fetch_at_most(reference, target, u64::MAX).await
    }

    /// Does the same for an object of at most `limit` bytes. A larger one is [`StoreError::TooLarge`].
    pub async fn fetch_at_most(
        &self,
        reference: &str,
        target: &Path,
        limit: u64,
    ) -> Result<Digest, StoreError> {
        self.service.fetch(reference, target, limit).await
    }

    /// Reads an object; `None` if it does not exist. An object of more than [`READ_BYTES`] is
    /// [`StoreError::TooLarge`]: use [`Self::fetch`] for objects that may be large.
    pub async fn read(&self, key: &ObjectKey) -> Result<Option<Bytes>, StoreError> {
        self.service.read(key).await
    }

    /// Opens the state of a workspace, where the tool's own backend keeps it; `None` if there is none.
    pub async fn open_state(
        &self,
        organization: &str,
        workspace: &str,
    ) -> Result<Option<Content>, StoreError> {
        match &self.kind {
            // The lease names the workspace. Whoever asks only compares, so the run has not seen it.
            Kind::Hub(hub) => hub.state(true).await,
            Kind::Own(store) => store.state(organization, workspace).open().await,
        }
    }

    /// The names of the states that are kept for a workspace and not stored. A hub is asked once. [`StoreError::Refused`] says that this
    /// is not known.
    pub async fn kept_states(
        &self,
        organization: &str,
        workspace: &str,
    ) -> Result<Vec<String>, StoreError> {
        match &self.kind {
            Kind::Hub(hub) => Ok(hub.artifacts().await?.kept.clone()),
            Kind::Own(store) => {
                let kept = store.kept_states(organization, workspace).await?;
                Ok(kept.states.into_keys().collect())
            }
        }
    }

    /// The name under which a step publishes its state.
    pub async fn state_name(&self) -> Result<String, StoreError> {
        self.service.state_name().await
    }

    /// Where the tool's own backend keeps the state of a workspace, and how the backend gets its credentials.
    pub fn backend(&self, organization: &str, workspace: &str) -> BackendSettings {
        self.service.backend(organization, workspace)
    }

    /// A watch on what is wrong with the service while requests are repeated. `None` for a folder.
    pub fn trouble(&self) -> Option<watch::Receiver<Option<String>>> {
        self.service.health().map(Health::watch)
    }

    /// The credentials of this store, which must never appear in a log.
    pub fn secrets(&self) -> Vec<SecretString> {
        self.service.secrets()
    }
}

fn open(
    settings: &StoreSettings,
    timing: &RequestTiming,
) -> Result<Arc<dyn ServedService>, StoreError> {
    match settings {
        StoreSettings::Local { data_dir } => Ok(Arc::new(Local::new(data_dir))),
        StoreSettings::S3(settings) => clouds::open_s3(settings, timing),
        StoreSettings::Azure(settings) => clouds::open_azure(settings, timing),
        StoreSettings::Gcs(settings) => clouds::open_gcs(settings, timing),
    }
}
