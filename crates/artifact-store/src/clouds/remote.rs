//! One bucket or container of a service: reads and writes objects in bounded memory, with timeouts and retries.

use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::{StreamExt as _, TryStreamExt as _};
use job_contract::keys::ObjectKey;
use object_store::path::Path as Location;
use object_store::{
    BackoffConfig, ClientOptions, HeaderValue, MultipartUpload, ObjectStore, ObjectStoreExt as _,
    PutMode, RetryConfig,
};
use tokio::fs::File;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use uuid::Uuid;

use crate::READ_BYTES;
use crate::digest::{Digest, Hasher};
use crate::error::{Answer, SOURCE, StoreError, TARGET};
use crate::local::{create_private, discard};
use crate::request::{Health, RequestTiming};
use crate::transfer::{Check, Condition, Content, PART_BYTES, Upload};
use runtime::regular_file;

use super::answers::Signs;
use super::conditional::{Once, Writers};
use super::connector::Connector;
use super::meaning::{Meaning, meaning};

/// What is read of a file at a time. Memory holds it beside the part.
const READ_AHEAD_BYTES: usize = 256 * 1024;

/// The longest time to delete the parts of a failed upload.
const ABORT_TIME: Duration = Duration::from_secs(5);

impl RequestTiming {
    pub(crate) fn client_options(&self, allow_http: bool) -> ClientOptions {
        let agent = concat!("mayfly/", env!("CARGO_PKG_VERSION"));
        ClientOptions::new()
            .with_user_agent(HeaderValue::from_static(agent))
            .with_connect_timeout(self.connect_timeout)
            .with_read_timeout(self.read_timeout)
            .with_timeout(self.request_timeout)
            .with_allow_http(allow_http)
    }

    pub(crate) fn retry_config(&self) -> RetryConfig {
        RetryConfig {
            backoff: BackoffConfig {
                init_backoff: self.first_pause,
                max_backoff: self.longest_pause,
                base: 2.,
            },
            // The time limits retries, not their number.
            max_retries: usize::MAX,
            retry_timeout: self.retry_for,
        }
    }

    pub(crate) fn connector(&self, service: &'static str, signs: Signs) -> Connector {
        Connector {
            service,
            signs,
            health: Health::default(),
            longest_pause: self.retry_for,
        }
    }
}

/// A bucket or container, as messages name it.
#[derive(Clone, Debug)]
pub(crate) struct BucketInfo {
    pub(crate) service: &'static str,
    pub(crate) name: String,
    /// The setting that names the bucket.
    pub(crate) setting: &'static str,
    /// The settings that hold the credentials.
    pub(crate) credential_settings: &'static str,
}

/// The client of one bucket or container.
#[derive(Clone, Debug)]
pub(crate) struct Remote {
    pub(crate) client: Arc<dyn ObjectStore>,
    pub(crate) writers: Writers,
    pub(crate) bucket: BucketInfo,
    pub(crate) health: Health,
}

impl Remote {
    /// Stores bytes under a condition.
    pub(crate) async fn put(
        &self,
        name: &str,
        bytes: Bytes,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        self.under(condition)?.put_whole(name, bytes).await
    }

    async fn put_whole(&self, name: &str, bytes: Bytes) -> Result<(), StoreError> {
        let location = location(name)?;
        self.client
            .put(&location, bytes.into())
            .await
            .map(drop)
            .map_err(|error| self.failed("store", name, &error))
    }

    /// Stores a file under a condition.
    pub(crate) async fn put_file(
        &self,
        name: &str,
        path: &Path,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        let source = Source::file(path)?;
        self.put_source(name, source, condition).await
    }

    /// Stores content that a sender has declared. Without all of it, and nothing else, there is no object.
    pub(crate) async fn put_upload(
        &self,
        name: &str,
        upload: Upload,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        let object = format!("{}/{name}", self.bucket.name);
        let source = Source::upload(upload, object);
        self.put_source(name, source, condition).await
    }

    async fn put_source(
        &self,
        name: &str,
        mut source: Source,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        let first = source.part().await?;
        let under = self.under(condition)?;
        if first.len() < PART_BYTES {
            under.put_whole(name, first).await
        } else if *condition == Condition::Any || self.writers.cover_parts() {
            under.put_parts(name, first, source).await
        } else {
            self.put_aside(&under, name, first, source).await
        }
    }

    /// The same bucket, with a client that changes objects only under a condition.
    fn under(&self, condition: &Condition) -> Result<Self, StoreError> {
        let client = self.writers.client(condition);
        let client = client.map_err(|error| client_error(self.bucket.service, &error))?;
        Ok(Self {
            client: client.unwrap_or_else(|| Arc::clone(&self.client)),
            ..self.clone()
        })
    }

    /// Joins parts in another object, which is then copied under the condition.
    async fn put_aside(
        &self,
        under: &Self,
        name: &str,
        first: Bytes,
        source: Source,
    ) -> Result<(), StoreError> {
        let aside = format!("{name}.{}.upload", Uuid::new_v4());
        let (from, to) = (location(&aside)?, location(name)?);
        self.put_parts(&aside, first, source).await?;
        let copied = under.client.copy(&from, &to).await;
        if let Err(error) = self.delete(&aside, &Condition::Any).await {
            tracing::warn!(%error, object = aside, "could not delete a copied upload: delete it");
        }
        copied.map_err(|error| self.failed("store", name, &error))
    }

    async fn put_parts(
        &self,
        name: &str,
        first: Bytes,
        mut source: Source,
    ) -> Result<(), StoreError> {
        let failed = |error| self.failed("store", name, &error);
        let location = location(name)?;
        let started = self.client.put_multipart(&location).await;
        let mut upload = started.map_err(failed)?;
        let sent = match send_parts(upload.as_mut(), first, &mut source).await {
            Ok(()) => upload.complete().await.map(drop).map_err(failed),
            Err(PartError::Source(error)) => Err(error),
            Err(PartError::Store(error)) => Err(failed(error)),
        };
        if sent.is_err() {
            abandon(upload.as_mut()).await;
        }
        sent
    }

    pub(crate) async fn fetch(
        &self,
        name: &str,
        target: &Path,
        limit: u64,
    ) -> Result<Digest, StoreError> {
        let failed = |error| self.failed("fetch", name, &error);
        let found = self.client.get(&location(name)?).await.map_err(failed)?;
        StoreError::unless_fits(
            &format!("{}/{name}", self.bucket.name),
            found.meta.size,
            limit,
        )?;
        let unwritable = StoreError::write(TARGET, target);
        let mut file = create_private(target).map_err(&unwritable)?;
        let copied = async {
            let mut hasher = Hasher::default();
            let mut content = found.into_stream();
            while let Some(chunk) = content.try_next().await.map_err(failed)? {
                hasher.update(&chunk);
                // A chunk has the size of one read from the socket. To write it takes microseconds; another
                // thread would take longer.
                file.write_all(&chunk).map_err(&unwritable)?;
            }
            Ok(hasher.finish())
        }
        .await;
        if copied.is_err() {
            discard(target);
        }
        copied
    }

    /// Opens an object; `None` if it does not exist.
    pub(crate) async fn open(&self, name: &str) -> Result<Option<Content>, StoreError> {
        let found = match self.client.get(&location(name)?).await {
            Ok(found) => found,
            Err(error) => {
                return match self.failed("fetch", name, &error) {
                    StoreError::Missing { .. } => Ok(None),
                    error => Err(error),
                };
            }
        };
        let (remote, name) = (self.clone(), name.to_owned());
        Ok(Some(Content {
            size_bytes: found.meta.size,
            version: self.writers.version(&found.meta),
            chunks: found
                .into_stream()
                .map_err(move |error| remote.failed("fetch", &name, &error))
                .boxed(),
        }))
    }

    /// Creates an object. `false` if it exists.
    pub(crate) async fn create(&self, name: &str, bytes: Bytes) -> Result<bool, StoreError> {
        let location = location(name)?;
        let options = PutMode::Create.into();
        match self.client.put_opts(&location, bytes.into(), options).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
            Err(error) => Err(self.failed("store", name, &error)),
        }
    }

    /// Deletes an object under a condition. It is no error if it does not exist.
    pub(crate) async fn delete(&self, name: &str, condition: &Condition) -> Result<(), StoreError> {
        let under = self.under(condition)?;
        match under.client.delete(&location(name)?).await {
            Ok(()) => Ok(()),
            Err(error) => match self.failed("delete", name, &error) {
                StoreError::Missing { .. } => Ok(()),
                error => Err(error),
            },
        }
    }

    /// Deletes an object with one request at most that may be done late. `since` is when that was decided.
    pub(crate) async fn delete_once(
        &self,
        name: &str,
        condition: &Condition,
        since: SystemTime,
    ) -> Result<(), StoreError> {
        let once = Arc::new(Once::new(since));
        let client = self.writers.client_once(condition, &once);
        let client = client.map_err(|error| client_error(self.bucket.service, &error))?;
        let Err(error) = client.delete(&location(name)?).await else {
            return Ok(());
        };
        if once.is_unknown() {
            let object = format!("{}/{name}", self.bucket.name);
            return Err(StoreError::Uncertain { object });
        }
        match self.failed("delete", name, &error) {
            StoreError::Missing { .. } => Ok(()),
            error => Err(error),
        }
    }

    /// The condition that an object is still what it is now.
    pub(crate) async fn unchanged(&self, name: &str) -> Result<Condition, StoreError> {
        let found = self.open(name).await?;
        Ok(Condition::unchanged(found.as_ref()))
    }

    pub(crate) async fn read(&self, name: &str) -> Result<Option<Bytes>, StoreError> {
        let found = self.look_at(name).await?;
        Ok(found.map(|(bytes, _)| bytes))
    }

    /// Reads an object. Returns the condition that it has not changed since.
    pub(crate) async fn look_at(
        &self,
        name: &str,
    ) -> Result<Option<(Bytes, Condition)>, StoreError> {
        let read = async {
            let failed = |error| self.failed("fetch", name, &error);
            let found = self.client.get(&location(name)?).await.map_err(failed)?;
            StoreError::unless_fits(
                &format!("{}/{name}", self.bucket.name),
                found.meta.size,
                READ_BYTES,
            )?;
            let condition = Condition::of(Some(&self.writers.version(&found.meta)));
            let bytes = found.bytes().await.map_err(failed)?;
            Ok::<_, StoreError>((bytes, condition))
        };
        match read.await {
            Ok(found) => Ok(Some(found)),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn failed(&self, action: &'static str, name: &str, error: &object_store::Error) -> StoreError {
        let service = self.bucket.service;
        let object = format!("{}/{name}", self.bucket.name);
        match (meaning(error), action) {
            (Meaning::Refused, _) => StoreError::Refused {
                service,
                object,
                settings: self.bucket.credential_settings,
                source: Answer::of(error),
            },
            (Meaning::NoBucket, _) => StoreError::NoBucket {
                service,
                bucket: self.bucket.name.clone(),
                setting: self.bucket.setting,
            },
            // A write creates the object, unless its condition names one.
            (Meaning::Changed, _) | (Meaning::Missing, "store") => StoreError::Changed { object },
            (Meaning::Missing, _) => StoreError::Missing { object },
            (Meaning::Locked, _) => StoreError::Locked { object },
            (Meaning::Unavailable, _) => StoreError::Unavailable {
                service,
                action,
                object,
                source: Answer::of(error),
            },
        }
    }
}

pub(crate) fn client_error(service: &'static str, error: &object_store::Error) -> StoreError {
    StoreError::Client {
        service,
        source: Answer::of(error),
    }
}

/// Names come from job data and references. A name that no object can have is in no store of ours.
fn location(name: &str) -> Result<Location, StoreError> {
    Location::parse(name).map_err(|_| StoreError::Foreign {
        reference: name.to_owned(),
    })
}

/// The key of a reference, or an error if the reference is not in this store.
pub(crate) fn found(key: Option<ObjectKey>, reference: &str) -> Result<ObjectKey, StoreError> {
    key.ok_or_else(|| StoreError::Foreign {
        reference: reference.to_owned(),
    })
}

/// Content that is read in parts.
struct Source {
    content: Box<dyn AsyncRead + Send + Unpin>,
    failed: Box<dyn Fn(io::Error) -> StoreError + Send + Sync>,
    /// The memory of the part, for all parts in turn.
    buffer: BytesMut,
    /// What the content must be, and what was read of it.
    check: Option<Check>,
}

impl Source {
    fn file(path: &Path) -> Result<Self, StoreError> {
        let failed = StoreError::read(SOURCE, path);
        let mut file = File::from_std(regular_file::open(path).map_err(&failed)?);
        file.set_max_buf_size(READ_AHEAD_BYTES);
        Ok(Self {
            content: Box::new(file),
            failed: Box::new(failed),
            buffer: BytesMut::new(),
            check: None,
        })
    }

    fn upload(upload: Upload, object: String) -> Self {
        let check = Check::new(upload.digest, object);
        Self {
            content: upload.content,
            failed: Box::new(StoreError::broken),
            buffer: BytesMut::new(),
            check: Some(check),
        }
    }

    /// The next part. Only the last part may be shorter, or empty. The last one of an upload is an error if the upload is not
    /// what its sender has declared.
    async fn part(&mut self) -> Result<Bytes, StoreError> {
        // Reuses the memory of the part before, which has been sent. A new allocation could be elsewhere, and take as much again.
        self.buffer.reserve(PART_BYTES);
        let mut space = (&mut self.buffer).limit(PART_BYTES);
        while space.has_remaining_mut() {
            let read = self.content.read_buf(&mut space).await;
            if read.map_err(&self.failed)? == 0 {
                break;
            }
        }
        let part = self.buffer.split().freeze();
        if let Some(check) = &mut self.check {
            check.update(&part)?;
        }
        if part.len() < PART_BYTES
            && let Some(check) = self.check.take()
        {
            check.finish()?;
        }
        Ok(part)
    }
}

enum PartError {
    Source(StoreError),
    Store(object_store::Error),
}

async fn send_parts(
    upload: &mut dyn MultipartUpload,
    first: Bytes,
    source: &mut Source,
) -> Result<(), PartError> {
    let mut part = first;
    while !part.is_empty() {
        let sent = upload.put_part(part.into()).await;
        sent.map_err(PartError::Store)?;
        part = source.part().await.map_err(PartError::Source)?;
    }
    Ok(())
}

/// Deletes the parts of a failed upload, because they cost money. If the service does not respond in time, the parts stay.
async fn abandon(upload: &mut dyn MultipartUpload) {
    match tokio::time::timeout(ABORT_TIME, upload.abort()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::warn!(error = %Answer::of(&error), "could not delete the parts of a failed upload");
        }
        Err(_) => tracing::warn!("could not delete the parts of a failed upload"),
    }
}
