//! Changes the outputs of steps in the artifact store.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::path::Path;

use artifact_store::{Store, StoreError};
use job_contract::keys::ObjectKey;
use platform::StepRef;
use tokio::sync::{Mutex, MutexGuard, Semaphore};

use super::ReportError;

/// How many outputs are edited at a time. Each of them may be a large file on disk.
const EDITS: usize = 2;

/// The outputs of steps in the artifact store.
#[derive(Debug)]
pub(crate) struct OutputStore {
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

    /// Changes the output of the step and returns its address in the store. `change` edits a local copy.
    pub(super) async fn change(
        &self,
        step: &StepRef,
        change: impl FnOnce(&Path) -> io::Result<()> + Send + 'static,
    ) -> Result<String, ReportError> {
        let _lock = self.locks.lock(&step.step_id).await;
        let key = ObjectKey::step_output(&step.organization_id, &step.job_id, &step.step_id);
        let _edit = self.edits.acquire().await;
        // Logs may be larger than the memory of this process.
        let folder = tempfile::tempdir().map_err(ReportError::Draft)?;
        let draft = folder.path().join("output");
        match self.store.fetch(&self.store.reference(&key), &draft).await {
            Ok(_) | Err(StoreError::Missing { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let edited = draft.clone();
        tokio::task::spawn_blocking(move || change(&edited))
            .await
            .map_err(io::Error::other)
            .flatten()
            .map_err(ReportError::Draft)?;
        Ok(self.store.put_file(&key, &draft).await?)
    }
}
