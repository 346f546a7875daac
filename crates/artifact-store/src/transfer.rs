//! Content that passes through a process: a hub gets it from one side, and sends it to the other.

use std::fmt;
use std::io::{self, Cursor, Read};

use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, TryStreamExt as _};
use tokio::io::AsyncRead;
use tokio_util::io::{StreamReader, SyncIoBridge};

use crate::digest::{Digest, Hasher};
use crate::error::StoreError;

/// The size of the parts in which an upload is sent, if it is as long. No part of S3 may be smaller, except the last.
pub(crate) const PART_BYTES: usize = 5 * 1024 * 1024;

/// Content on its way into a store. Its sender has declared its size and digest.
pub struct Upload {
    pub content: Box<dyn AsyncRead + Send + Unpin>,
    pub digest: Digest,
}

impl Upload {
    /// An upload of bytes in memory.
    pub fn of(bytes: Bytes) -> Self {
        Self {
            digest: Digest::of_rest(&mut &bytes[..]).expect("memory can be read"),
            content: Box::new(Cursor::new(bytes)),
        }
    }
}

/// Content on its way out of a store.
pub struct Content {
    pub size_bytes: u64,
    /// Another content of the same object has another one. Empty if the service names none.
    pub version: String,
    pub chunks: BoxStream<'static, Result<Bytes, StoreError>>,
}

impl Content {
    /// Reads all of it, if it has at most `limit` bytes. `object` names it.
    pub async fn collect(self, object: &str, limit: u64) -> Result<Bytes, StoreError> {
        StoreError::unless_fits(object, self.size_bytes, limit)?;
        let (mut whole, mut chunks) = (Vec::new(), self.chunks);
        while let Some(chunk) = chunks.try_next().await? {
            whole.extend_from_slice(&chunk);
        }
        Ok(whole.into())
    }

    /// A reader for a thread that may block, within a runtime.
    pub fn into_blocking_reader(self) -> impl Read + Send {
        let chunks = self.chunks.map_err(io::Error::other).boxed();
        SyncIoBridge::new(StreamReader::new(chunks))
    }
}

/// What must be true of an object, so that a request changes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Nothing.
    Any,
    /// There is no object.
    Absent,
    /// The object still has this [`Content::version`].
    Version(String),
}

impl Condition {
    /// The condition that an object has not changed since it was looked at.
    pub fn unchanged(found: Option<&Content>) -> Self {
        Self::of(found.map(|content| content.version.as_str()))
    }

    /// The condition that an object still has this version. Without a version of what is there, nothing can be asked.
    pub(crate) fn of(version: Option<&str>) -> Self {
        match version {
            None => Self::Absent,
            Some("") => Self::Any,
            Some(version) => Self::Version(version.to_owned()),
        }
    }

    /// Whether it is true of an object with this version.
    pub(crate) fn holds(&self, version: Option<&str>) -> bool {
        match self {
            Self::Any => true,
            Self::Absent => version.is_none(),
            Self::Version(known) => version == Some(known.as_str()),
        }
    }
}

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upload")
            .field("digest", &self.digest)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Content")
            .field("size_bytes", &self.size_bytes)
            .finish_non_exhaustive()
    }
}

/// Checks whether content is what its sender has declared.
pub(crate) struct Check {
    expected: Digest,
    hasher: Hasher,
    object: String,
}

impl Check {
    pub(crate) fn new(expected: Digest, object: String) -> Self {
        Self {
            expected,
            hasher: Hasher::default(),
            object,
        }
    }

    /// Adds the next bytes. An error if there are more than declared.
    pub(crate) fn update(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.hasher.update(bytes);
        if self.hasher.size_bytes() > self.expected.size_bytes {
            return Err(self.altered());
        }
        Ok(())
    }

    /// An error if the content differs.
    pub(crate) fn finish(mut self) -> Result<(), StoreError> {
        let found = std::mem::take(&mut self.hasher).finish();
        if found == self.expected {
            Ok(())
        } else {
            Err(self.altered())
        }
    }

    fn altered(&self) -> StoreError {
        StoreError::Altered {
            object: self.object.clone(),
        }
    }
}
