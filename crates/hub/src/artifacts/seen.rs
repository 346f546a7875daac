//! Notes which state a task has been given. A task may store a state only on what it has seen.

use std::io;
use std::sync::Arc;

use artifact_store::{Content, StoreError};
use futures_util::{StreamExt as _, stream};
use job_contract::encoding::hex;
use pool_protocol::id::TaskId;
use sha2::{Digest as _, Sha256};

use crate::Hub;

/// The reader of a state.
struct Reader {
    hub: Arc<Hub>,
    task: TaskId,
    sha256: Sha256,
    /// How many bytes are still to be read.
    left: u64,
}

/// Returns a state whose reader has seen it when it has all of it. Its end is passed on only after that is noted.
pub(super) fn noted(hub: Arc<Hub>, task: TaskId, state: Content) -> Content {
    let reader = Reader {
        hub,
        task,
        sha256: Sha256::new(),
        left: state.size_bytes,
    };
    let start = (state.chunks, reader);
    let chunks = stream::unfold(start, async |(mut chunks, mut reader)| {
        let next = match chunks.next().await? {
            Ok(chunk) => reader.read(&chunk).await.map(|()| chunk),
            Err(error) => Err(error),
        };
        Some((next, (chunks, reader)))
    });
    Content {
        size_bytes: state.size_bytes,
        version: state.version,
        chunks: chunks.boxed(),
    }
}

impl Reader {
    async fn read(&mut self, chunk: &[u8]) -> Result<(), StoreError> {
        if self.left == 0 {
            return Ok(());
        }
        self.sha256.update(chunk);
        self.left = self.left.saturating_sub(chunk.len() as u64);
        if self.left > 0 {
            return Ok(());
        }
        let sha256 = hex(&std::mem::take(&mut self.sha256).finalize());
        let noted = self.hub.store.saw_state(self.task, Some(&sha256)).await;
        noted.map_err(|error| StoreError::Broken(io::Error::other(error)))
    }
}
