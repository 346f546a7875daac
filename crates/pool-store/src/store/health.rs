//! Whether the store can be written, and when it was brought into its file.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::Store;
use crate::clock::Millis;
use crate::error::Error;

/// The pause between two checkpoints.
const CHECKPOINT: Millis = 60_000;

/// What the store knows of its database.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// Why the last sweep could not write.
    write_error: Mutex<Option<String>>,
    /// The bytes of the last task that was refused because of the disk.
    refused: AtomicU64,
    checkpoint_at: AtomicI64,
}

impl Store {
    /// Returns why the store takes no tasks now: the last write failed, or the disk is full. Reads no table.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let error = self.health.write_error.lock();
        let error = error.unwrap_or_else(PoisonError::into_inner).clone();
        let refused = self.health.refused.load(Ordering::Relaxed);
        error.or_else(|| self.database.lack_of_space(refused))
    }

    /// Refuses a task if the disk has too little space for it. The document is written twice: into the log, then into the
    /// file.
    pub(super) fn require_space(&self, document: usize) -> Result<(), Error> {
        let bytes = u64::try_from(document)
            .unwrap_or(u64::MAX)
            .saturating_mul(2);
        let lack = self.database.lack_of_space(bytes);
        let refused = if lack.is_some() { bytes } else { 0 };
        self.health.refused.store(refused, Ordering::Relaxed);
        lack.map_or(Ok(()), |lack| Err(Error::Unavailable(lack.into())))
    }

    /// Remembers whether the store could be written.
    pub(super) fn wrote(&self, error: Option<&Error>) {
        let mut known = self.health.write_error.lock();
        let known = known.as_mut().unwrap_or_else(|poisoned| poisoned.get_mut());
        **known = error.map(ToString::to_string);
    }

    /// Makes a checkpoint if it is time.
    pub(super) async fn checkpoint(&self, now: Millis) -> Result<(), Error> {
        if now - self.health.checkpoint_at.load(Ordering::Relaxed) < CHECKPOINT {
            return Ok(());
        }
        self.health.checkpoint_at.store(now, Ordering::Relaxed);
        self.database.checkpoint().await
    }
}
