//! The state of a workspace in the container of backend states, with the lock of the tool's own backend: a lease of the blob that
//! does not end, whose id is the id of the lock. A part of the blob's metadata describes it.
//!
//! Between the two requests, this process can end. So a lease that is not described is short, and ends by itself.

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use object_store::{HeaderMap, HeaderValue};
use serde::Deserialize;
use uuid::Uuid;

use super::holder::Holder;
use super::{Azure, Call, SERVICE, client, container, none_without_container};
use crate::clouds::conditional::Compared;
use crate::clouds::remote::{Remote, client_error};
use crate::error::StoreError;
use crate::state_place::StatePlace;
use crate::transfer::{Condition, Content, Upload};

/// The header of a lease's id.
const LEASE_ID: &str = "x-ms-lease-id";
const METADATA: &str = "x-ms-meta-";
/// The metadata with the description of the lock, in base64. It is that of the tool's own backend.
const DESCRIPTION: &str = "x-ms-meta-terraformlockid";
/// How long a lease lasts that is not described, in seconds: the shortest time that is allowed.
const SHORT: &str = "15";
/// The duration of a lease that does not end.
const ENDLESS: &str = "-1";

/// A state in the container of backend states.
pub(super) struct StateBlob {
    pub(super) azure: Azure,
    /// The name of the blob.
    pub(super) name: String,
}

/// What is known of a blob without its content.
struct Properties {
    is_leased: bool,
    /// The headers of its metadata.
    metadata: HeaderMap,
}

impl Properties {
    /// The description of the lock, which may be that of an earlier one.
    fn description(&self) -> Option<Bytes> {
        let text = self.metadata.get(DESCRIPTION)?;
        STANDARD.decode(text).ok().map(Bytes::from)
    }
}

/// The lease of a lock: the tool describes a lock with its id.
fn lease_of(description: &[u8]) -> Option<Uuid> {
    #[derive(Deserialize)]
    #[serde(rename_all = "UPPERCASE")]
    struct Description {
        id: Uuid,
    }
    let described: Description = serde_json::from_slice(description).ok()?;
    Some(described.id)
}

/// Adds a condition to headers.
fn under(condition: &Condition, mut headers: HeaderMap) -> HeaderMap {
    if let Some((name, value)) = Compared::Tag.header(condition) {
        headers.insert(name, value);
    }
    headers
}

fn header(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).expect("an id or base64 is a header")
}

impl StateBlob {
    fn blob(&self) -> String {
        format!("{}/{}", self.azure.settings.container, self.name)
    }

    /// Sends a request about the blob.
    async fn send(
        &self,
        action: &'static str,
        (method, query): (&'static str, Option<&'static str>),
        lease: Option<Uuid>,
        mut headers: HeaderMap,
    ) -> Result<HeaderMap, StoreError> {
        if let Some(lease) = lease {
            headers.insert(LEASE_ID, header(&lease.to_string()));
        }
        let call = Call {
            action,
            method,
            object: &self.blob(),
            query,
            headers,
        };
        self.azure.send(&call).await
    }

    /// Asks for the properties of the blob; `None` if there is none. With a lease, it is an error if the blob has not that one.
    async fn properties(&self, lease: Option<Uuid>) -> Result<Option<Properties>, StoreError> {
        let asked = self.send("look at", ("HEAD", None), lease, HeaderMap::new());
        let headers = match asked.await {
            Ok(headers) => headers,
            Err(StoreError::Missing { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let status = headers.get("x-ms-lease-status");
        let metadata = headers.iter();
        let metadata = metadata.filter(|(name, _)| name.as_str().starts_with(METADATA));
        Ok(Some(Properties {
            is_leased: status.is_some_and(|status| status == "locked"),
            metadata: metadata
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
        }))
    }

    /// Takes a lease. Its holder changes how long it lasts.
    async fn acquire(&self, lease: Uuid, duration: &'static str) -> Result<(), StoreError> {
        let mut headers = HeaderMap::new();
        headers.insert("x-ms-lease-action", HeaderValue::from_static("acquire"));
        headers.insert("x-ms-lease-duration", HeaderValue::from_static(duration));
        headers.insert("x-ms-proposed-lease-id", header(&lease.to_string()));
        let taken = self.send("lock", ("PUT", Some("comp=lease")), None, headers);
        taken.await.map(drop)
    }

    /// Takes a short lease, also of a blob that does not exist yet.
    async fn acquire_new(&self, lease: Uuid) -> Result<(), StoreError> {
        match self.acquire(lease, SHORT).await {
            Err(StoreError::Missing { .. }) => {}
            taken => return taken,
        }
        let container = &self.azure.settings.container;
        self.azure.create_container(container).await?;
        // Somebody else may create it first.
        self.azure.backend.create(&self.name, Bytes::new()).await?;
        self.acquire(lease, SHORT).await
    }

    /// Replaces the description of the lock.
    async fn describe(&self, lease: Uuid, description: Option<&[u8]>) -> Result<(), StoreError> {
        let found = self.properties(Some(lease)).await?;
        let mut metadata = found.map(|found| found.metadata).unwrap_or_default();
        metadata.remove(DESCRIPTION);
        if let Some(description) = description {
            metadata.insert(DESCRIPTION, header(&STANDARD.encode(description)));
        }
        let query = ("PUT", Some("comp=metadata"));
        let described = self.send("lock", query, Some(lease), metadata);
        described.await.map(drop)
    }

    async fn release(&self, lease: Uuid) -> Result<(), StoreError> {
        self.acquire(lease, SHORT).await?;
        self.describe(lease, None).await?;
        let mut headers = HeaderMap::new();
        headers.insert("x-ms-lease-action", HeaderValue::from_static("release"));
        let query = ("PUT", Some("comp=lease"));
        let released = self.send("unlock", query, Some(lease), headers);
        released.await.map(drop)
    }

    /// The lease that a change needs. A blob without a lease can be changed by anybody.
    async fn needed(&self, lock: Option<&str>) -> Result<Option<(Uuid, Properties)>, StoreError> {
        let Some(lease) = lock.and_then(|lock| lock.parse().ok()) else {
            return Ok(None);
        };
        let found = none_without_container(self.properties(None).await)?;
        let found = found.filter(|found| found.is_leased);
        Ok(found.map(|found| (lease, found)))
    }

    /// A client that writes the blob for the holder of the lease, under a condition. What it writes keeps the metadata.
    fn client_of_holder(
        &self,
        lease: Uuid,
        metadata: HeaderMap,
        condition: &Condition,
    ) -> Result<Remote, StoreError> {
        let azure = &self.azure;
        let mut of_lease = HeaderMap::new();
        of_lease.insert(LEASE_ID, header(&lease.to_string()));
        let holder = Holder {
            signer: azure.signer.clone(),
            lease: of_lease,
            whole: under(condition, metadata),
        };
        let (settings, name) = (&azure.settings, &azure.settings.container);
        // With credentials of its own, it would ask for them with the headers of the holder.
        let credentials = Some(azure.signer.credentials.clone());
        let client = client(settings, &azure.timing, name, holder, credentials);
        let client = client.map_err(|error| client_error(SERVICE, &error))?;
        let Remote {
            writers, health, ..
        } = azure.backend.clone();
        Ok(container(client, writers, name, settings, health))
    }
}

#[async_trait]
impl StatePlace for StateBlob {
    async fn open(&self) -> Result<Option<Content>, StoreError> {
        none_without_container(self.azure.backend.open(&self.name).await)
    }

    async fn put(
        &self,
        upload: Upload,
        lock: Option<&str>,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        if let Some((lease, found)) = self.needed(lock).await? {
            let client = self.client_of_holder(lease, found.metadata, condition)?;
            // The client has the condition.
            return client.put_upload(&self.name, upload, &Condition::Any).await;
        }
        let container = &self.azure.settings.container;
        self.azure.create_container(container).await?;
        let backend = &self.azure.backend;
        backend.put_upload(&self.name, upload, condition).await
    }

    async fn delete(&self, lock: Option<&str>, condition: &Condition) -> Result<(), StoreError> {
        let lease = self.needed(lock).await?.map(|(lease, _)| lease);
        let headers = under(condition, HeaderMap::new());
        let deleted = self.send("delete", ("DELETE", None), lease, headers);
        match deleted.await {
            Ok(_) | Err(StoreError::Missing { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn has_lock(&self) -> bool {
        true
    }

    async fn lock(&self, info: Bytes) -> Result<bool, StoreError> {
        let Some(lease) = lease_of(&info) else {
            return Err(StoreError::Locked {
                object: self.blob(),
            });
        };
        // Everybody may read the id of a lease. So the lease alone does not say whose it is.
        if self.lock_info().await?.is_some_and(|other| other != info) {
            return Ok(false);
        }
        let locked = async {
            self.acquire_new(lease).await?;
            self.describe(lease, Some(&info)).await?;
            self.acquire(lease, ENDLESS).await
        };
        match locked.await {
            Ok(()) => Ok(true),
            Err(StoreError::Locked { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn lock_info(&self) -> Result<Option<Bytes>, StoreError> {
        let found = self.properties(None).await?;
        let described = found.filter(|found| found.is_leased);
        let Some(described) = described.and_then(|found| found.description()) else {
            return Ok(None);
        };
        let Some(lease) = lease_of(&described) else {
            return Ok(Some(described));
        };
        // It may be the description of an earlier lock.
        match self.properties(Some(lease)).await {
            Ok(found) => Ok(found.map(|_| described)),
            Err(StoreError::Locked { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn unlock(&self, info: &[u8]) -> Result<(), StoreError> {
        let Some(lease) = lease_of(info) else {
            return Ok(());
        };
        match self.release(lease).await {
            // The blob is gone, or somebody else has locked it.
            Ok(()) | Err(StoreError::Missing { .. } | StoreError::Locked { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
