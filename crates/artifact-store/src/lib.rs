//! Where plans, states and step output are kept (contract 6): a folder, S3, Azure Blob Storage or GCS.
//!
//! Knows the object keys of `job-contract` and the protocol of each service; nothing of the tool that makes the
//! objects, nor of the platform that reads them. Content passes in bounded memory, whatever its size.

mod azure;
mod backend;
mod digest;
mod error;
mod gcs;
mod local;
mod reference;
mod remote;
mod retry;
mod s3;
mod service;
mod settings;

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use job_contract::keys::ObjectKey;
use secrecy::SecretString;
use tokio::sync::watch;

use azure::Azure;
use gcs::Gcs;
use local::Local;
use retry::Health;
use s3::S3;
use service::ObjectService;

pub use backend::{BackendSettings, Handover, StaticKeys};
pub use digest::{Digest, hex};
pub use error::StoreError;
pub use remote::Limits;
pub use runtime::setting::HttpUrl;
pub use settings::{
    AzureSettings, GcsSettings, S3Credentials, S3Settings, StoreArgs, StoreConfigError, StoreKind,
    StoreSettings,
};

/// The largest object that is read into memory.
pub const READ_BYTES: u64 = 16 * 1024 * 1024;

/// A store of artifacts.
#[derive(Clone, Debug)]
pub struct Store {
    service: Arc<dyn ObjectService>,
}

impl Store {
    /// The local store below a data directory.
    pub fn local(data_dir: &Path) -> Self {
        Self {
            service: Arc::new(Local::new(data_dir)),
        }
    }

    /// Opens the store that is configured. Nothing is asked of a service yet.
    pub fn open(settings: &StoreSettings) -> Result<Self, StoreError> {
        Self::open_with(settings, &Limits::default())
    }

    /// Opens it with other limits than the usual ones.
    pub fn open_with(settings: &StoreSettings, limits: &Limits) -> Result<Self, StoreError> {
        let service: Arc<dyn ObjectService> = match settings {
            StoreSettings::Local { data_dir } => return Ok(Self::local(data_dir)),
            StoreSettings::S3(settings) => Arc::new(S3::open(settings, limits)?),
            StoreSettings::Azure(settings) => Arc::new(Azure::open(settings, limits)?),
            StoreSettings::Gcs(settings) => Arc::new(Gcs::open(settings, limits)?),
        };
        Ok(Self { service })
    }

    /// The reference under which an object is known to the platform; it need not exist yet.
    pub fn reference(&self, key: &ObjectKey) -> String {
        self.service.reference(key)
    }

    /// Stores bytes, over whatever was there, and returns the object's reference.
    pub async fn put(
        &self,
        key: &ObjectKey,
        bytes: impl Into<Bytes>,
    ) -> Result<String, StoreError> {
        self.service.put(key, bytes.into()).await?;
        Ok(self.reference(key))
    }

    /// Stores a file's content, over whatever was there, and returns the object's reference.
    pub async fn put_file(&self, key: &ObjectKey, source: &Path) -> Result<String, StoreError> {
        self.service.put_file(key, source).await?;
        Ok(self.reference(key))
    }

    /// Copies the object behind a reference into a new file, private to its owner, and returns its size and
    /// digest. Whether an object without content is acceptable is for the caller to say; one that does not exist
    /// is [`StoreError::Missing`]. After an error there is no file.
    pub async fn fetch(&self, reference: &str, target: &Path) -> Result<Digest, StoreError> {
        self.service.fetch(reference, target).await
    }

    /// Content of an object; `None` when there is none. One of more than [`READ_BYTES`] is
    /// [`StoreError::TooLarge`]: what may be large is fetched into a file.
    pub async fn read(&self, key: &ObjectKey) -> Result<Option<Bytes>, StoreError> {
        self.service.read(key).await
    }

    /// Where the tool's own backend keeps the state of a workspace, and how it gets there.
    pub fn backend(&self, organization: &str, workspace: &str) -> BackendSettings {
        self.service.backend(organization, workspace)
    }

    /// What is wrong with the service at the moment, for as long as requests are repeated. `None` for a folder.
    pub fn trouble(&self) -> Option<watch::Receiver<Option<String>>> {
        self.service.health().map(Health::watch)
    }

    /// What must never appear in a log: the credentials this store was opened with.
    pub fn secrets(&self) -> Vec<SecretString> {
        self.service.secrets()
    }
}
