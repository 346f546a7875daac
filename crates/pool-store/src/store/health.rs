//! Whether the store can be written, and when it was brought into its file.

use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use super::Store;
use crate::clock::{Millis, millis};
use crate::db::Tx;
use crate::error::Error;

/// The pause between two checkpoints.
const CHECKPOINT: Millis = 60_000;
/// The hub sweeps every second. If it has not for so long, the store does not answer.
const SILENT: Millis = 30_000;
/// The bytes of a task of the usual size, written twice.
const USUAL: u64 = 64 << 10;

/// What the store knows of its database.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// Why the last sweep could not write.
    write_error: Mutex<Option<String>>,
    /// The free bytes in the file of SQLite, which new tasks use again.
    reusable: AtomicU64,
    /// The time of the last sweep that has ended, on the clock of the process.
    swept_at: AtomicI64,
    checkpoint_at: AtomicI64,
}

impl Store {
    /// Returns why the store cannot be used now: the last write failed or does not end. Reads no table.
    pub fn problem(&self) -> Option<String> {
        let error = runtime::lock(&self.health.write_error).clone();
        error.or_else(|| self.silence())
    }

    fn silence(&self) -> Option<String> {
        let silent = millis(self.database.elapsed()) - self.health.swept_at.load(Ordering::Relaxed);
        (silent > SILENT).then(|| {
            let seconds = silent / 1000;
            format!("the store has not answered for {seconds} s: look at its disk, or at the database server and the network to it")
        })
    }

    /// Returns why the store takes no more tasks of the usual size: the disk has little left but the reserve. The tasks that it
    /// has go on.
    pub fn lack_of_space(&self) -> Option<String> {
        self.lack_of_bytes(USUAL)
    }

    fn lack_of_bytes(&self, bytes: u64) -> Option<String> {
        let reusable = self.health.reusable.load(Ordering::Relaxed);
        self.database.lack_of_space(reusable, bytes)
    }

    /// Reads how many bytes of the file can be used again.
    pub(super) async fn read_reusable(&self, tx: &mut Tx) -> Result<(), Error> {
        let reusable = tx.reusable().await?;
        self.health.reusable.store(reusable, Ordering::Relaxed);
        Ok(())
    }

    /// Refuses a task if the disk has too little space for it. The document is written twice: into the log, then into the
    /// file.
    pub(super) async fn require_space(&self, tx: &mut Tx, document: usize) -> Result<(), Error> {
        self.read_reusable(tx).await?;
        let bytes = u64::try_from(document)
            .unwrap_or(u64::MAX)
            .saturating_mul(2);
        let lack = self.lack_of_bytes(bytes);
        lack.map_or(Ok(()), |lack| Err(Error::Unavailable(lack.into())))
    }

    /// Remembers that a sweep has ended, also with an error.
    pub(super) fn swept(&self) {
        let now = millis(self.database.elapsed());
        self.health.swept_at.store(now, Ordering::Relaxed);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixture::*;

    #[tokio::test]
    async fn a_document_that_is_too_large_for_the_disk_does_not_make_it_full() {
        let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
        let store = &fixture.store;
        let mut tx = store.begin().await.unwrap();
        let refused = store.require_space(&mut tx, usize::MAX).await;
        tx.rollback().await.unwrap();
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("bytes left"), "{text}");
        assert_eq!(store.problem(), None);
    }

    #[tokio::test]
    async fn what_an_emptied_queue_leaves_in_the_file_is_known() {
        let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
        let reusable = || fixture.store.health.reusable.load(Ordering::Relaxed);
        let task = fixture
            .store
            .submit(large("1", 2 << 20))
            .await
            .unwrap()
            .task();
        fixture.pass(1).await;
        assert!(reusable() < 1 << 20, "{}", reusable());
        fixture.store.request_cancel(task).await.unwrap();
        fixture.pass(1).await;
        assert!(reusable() >= 2 << 20, "{}", reusable());
    }

    #[tokio::test]
    async fn a_store_that_is_not_swept_has_a_problem() {
        let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
        fixture.clock.pass(30);
        assert_eq!(fixture.store.problem(), None);
        fixture.clock.pass(1);
        let problem = fixture.store.problem().unwrap();
        assert!(problem.contains("not answered for 31 s"), "{problem}");
        fixture.store.sweep().await.unwrap();
        assert_eq!(fixture.store.problem(), None);
    }

    #[tokio::test]
    async fn an_error_is_over_when_another_hub_sweeps() {
        let Some(fixture) = Fixture::open(Engine::Postgres).await else {
            return;
        };
        let store = &fixture.store;
        store.wrote(Some(&Error::Unavailable("no network".into())));
        assert!(store.problem().unwrap().contains("no network"));
        let mut other = store.begin().await.unwrap();
        assert!(other.try_lock("sweep").await.unwrap());
        store.sweep().await.unwrap();
        other.rollback().await.unwrap();
        assert_eq!(store.problem(), None);
    }
}
