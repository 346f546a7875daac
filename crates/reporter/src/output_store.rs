//! Changes the outputs of steps in the artifact store.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::path::{Path, PathBuf};

use artifact_store::{Store, StoreError};
use job_contract::keys::ObjectKey;
use platform::StepRef;
use tempfile::TempDir;
use tokio::sync::{Mutex, MutexGuard, Semaphore, SemaphorePermit};

use super::ReportError;

/// How many outputs are edited at a time. Each of them may be a large file on disk.
const EDITS: usize = 2;
/// The largest output that is changed, in bytes. A run decides how long its output is, and the reports of all runs share the
/// disk for temporary files. The chart's `launcher.tmpSizeLimit` follows from it.
const LARGEST_OUTPUT: u64 = 64 << 20;
/// The name of the copy.
const DRAFT: &str = "output";

/// The outputs of steps in the artifact store.
#[derive(Debug)]
pub struct OutputStore {
    store: Store,
    locks: StepLocks,
    edits: Semaphore,
}

/// An output is read, changed and written back. Two changes of one output must not overlap, or a reason for waiting
/// replaces a verdict. Steps share a few locks.
#[derive(Debug, Default)]
struct StepLocks([Mutex<()>; 16]);

impl StepLocks {
    async fn lock(&self, step_id: &str) -> MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        step_id.hash(&mut hasher);
        let index = usize::try_from(hasher.finish() % 16).unwrap_or_default();
        self.0[index].lock().await
    }
}

impl OutputStore {
    pub(super) fn new(store: Store) -> Self {
        Self {
            store,
            locks: StepLocks::default(),
            edits: Semaphore::new(EDITS),
        }
    }

    /// Fetches the output of the step for a change. Other changes of it wait.
    pub(super) async fn edit(&self, step: &StepRef) -> Result<Edit<'_>, ReportError> {
        let lock = self.locks.lock(&step.step_id).await;
        let key = ObjectKey::step_output(&step.organization_id, &step.job_id, &step.step_id);
        let permit = self.edits.acquire().await;
        let permit = permit.expect("nobody closes it");
        // Logs may be larger than the memory of this process.
        let folder = tempfile::tempdir().map_err(ReportError::Draft)?;
        let (reference, draft) = (self.store.reference(&key).await?, folder.path().join(DRAFT));
        let fetched = self
            .store
            .fetch_at_most(&reference, &draft, LARGEST_OUTPUT)
            .await;
        let is_too_large = match fetched {
            Ok(_) | Err(StoreError::Missing { .. }) => false,
            Err(error @ StoreError::TooLarge { .. }) => {
                tracing::warn!(
                    job_id = step.job_id,
                    step_id = step.step_id,
                    %error,
                    "the output of a step is left as it is"
                );
                true
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Edit {
            store: &self.store,
            key,
            folder,
            is_too_large,
            _lock: lock,
            _permit: permit,
        })
    }
}

/// A copy of an output on this machine.
#[derive(Debug)]
pub(super) struct Edit<'s> {
    store: &'s Store,
    key: ObjectKey,
    folder: TempDir,
    is_too_large: bool,
    _lock: MutexGuard<'s, ()>,
    _permit: SemaphorePermit<'s>,
}

impl Edit<'_> {
    /// Returns the path of another file of the change. It goes with the copy.
    pub(super) fn beside(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Changes the copy, stores it and returns its address in the store. An output that is too large stays as it is.
    pub(super) async fn store(
        self,
        change: impl FnOnce(&Path) -> io::Result<()> + Send + 'static,
    ) -> Result<String, ReportError> {
        if self.is_too_large {
            return Ok(self.store.reference(&self.key).await?);
        }
        let draft = self.beside(DRAFT);
        let edited = draft.clone();
        tokio::task::spawn_blocking(move || change(&edited))
            .await
            .map_err(io::Error::other)
            .flatten()
            .map_err(ReportError::Draft)?;
        Ok(self.store.put_file(&self.key, &draft).await?)
    }
}
