//! Opens a SQLite file. One process uses it, with one connection.

use std::fs::{File as Handle, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Row as _, Sqlite, SqliteConnection, SqlitePool};

use super::{ACQUIRE, migrations, wal};
use crate::clock::{Millis, millis};
use crate::error::{Error, OpenError};

/// The space that the queue leaves free on its disk, in bytes. The tasks in the queue need it for their way through the
/// states, and the next start of the hub needs it to open the file. A write-ahead log of 1 MiB, the largest document, and
/// the history that a start writes for ten thousand tasks are less. Free pages of the file count, because they are used again.
/// But half of the reserve must be free on the disk, because the log cannot use them.
const RESERVE: u64 = 32 << 20;
/// Pages in the write-ahead log after which SQLite brings them into the file: 1 MiB.
const WAL_PAGES: &str = "256";
/// Bytes to which the log shrinks when it is written again from its beginning. A large document makes it longer.
const WAL_BYTES: &str = "1048576";

pub(super) struct File {
    folder: PathBuf,
    pool: SqlitePool,
    /// The store's time at `opened_at`.
    time: Millis,
    opened_at: Duration,
    /// The lock file. It stays locked until the database is closed.
    lock: Mutex<Option<Handle>>,
}

impl File {
    /// Opens the database. Fails if another process has it open.
    pub(super) async fn open(path: &Path, opened_at: Duration) -> Result<Self, OpenError> {
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        refuse_network(folder)?;
        let lock = lock(&with_suffix(path, ".lock"))?;
        // SQLite creates its other files with the permissions of this one.
        private(path).map_err(|source| unusable(path, source))?;
        let log = with_suffix(path, "-wal");
        if let Some(damage) = wal::damage(&log) {
            tracing::error!(
                file = %log.display(),
                %damage,
                "the write-ahead log of the store is damaged: what was stored last is lost. Look on the platform for jobs that were \
                 started shortly before the hub ended, or restore a backup"
            );
        }
        let options = SqliteConnectOptions::new()
            .filename(path)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .pragma("wal_autocheckpoint", WAL_PAGES)
            .pragma("journal_size_limit", WAL_BYTES)
            // Documents are encrypted. An earlier version stored them as they are.
            .pragma("secure_delete", "ON")
            .busy_timeout(Duration::from_secs(5));
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .acquire_timeout(ACQUIRE)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            .connect_with(options)
            .await
            .map_err(OpenError::Database)?;
        migrations()
            .run(&pool)
            .await
            .map_err(OpenError::Migration)?;
        // From here on, the file has its tables and all that the last process stored, also in a copy without the log.
        let checkpoint = sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)");
        if let Err(error) = checkpoint.execute(&pool).await {
            tracing::warn!(%error, "the write-ahead log of the store could not be brought into its file");
        }
        let time = sqlx::query("SELECT at FROM clock")
            .fetch_one(&pool)
            .await
            .and_then(|row| row.try_get("at"))
            .map_err(OpenError::Database)?;
        Ok(Self {
            folder: folder.to_owned(),
            pool,
            time,
            opened_at,
            lock: Mutex::new(Some(lock)),
        })
    }

    pub(super) async fn connection(&self) -> Result<PoolConnection<Sqlite>, Error> {
        Ok(self.pool.acquire().await?)
    }

    /// Brings what was committed into the file. Waits for no reader.
    pub(super) async fn checkpoint(&self) -> Result<(), Error> {
        let mut connection = self.connection().await?;
        let checkpoint = sqlx::query("PRAGMA wal_checkpoint(PASSIVE)");
        checkpoint.execute(&mut *connection).await?;
        Ok(())
    }

    /// Returns why the disk has too little space, if it has less than the reserve and this document need. So many bytes of
    /// the file can be used again.
    pub(super) fn lack_of_space(&self, reusable: u64, document: u64) -> Option<String> {
        let disk = nix::sys::statvfs::statvfs(&self.folder).ok()?;
        #[allow(
            clippy::useless_conversion,
            reason = "the width of the numbers differs between C libraries"
        )]
        let bytes_of = |blocks| u64::from(blocks).saturating_mul(u64::from(disk.fragment_size()));
        let (size, free) = (bytes_of(disk.blocks()), bytes_of(disk.blocks_available()));
        missing(size, free, reusable, document).map(|needed| {
            format!(
                "the disk of the store at `{}` has {free} bytes left, and {needed} are needed: make space, or use a larger disk",
                self.folder.display()
            )
        })
    }

    pub(super) fn now(&self, elapsed: Duration) -> Millis {
        let passed = elapsed.saturating_sub(self.opened_at);
        self.time.saturating_add(millis(passed))
    }

    /// Closes the connection and unlocks the file. Then another process may open it.
    pub(super) async fn close(&self) {
        self.pool.close().await;
        let mut lock = runtime::lock(&self.lock);
        // A child process that was just forked has the file open too. So dropping the file is not enough.
        if let Some(lock) = lock.take()
            && let Err(error) = lock.unlock()
        {
            tracing::warn!(%error, "the lock of the store ends with the process");
        }
    }
}

/// Ends the transaction of a connection, if there is one: its last statement, which nobody waits for, may have begun it or ended
/// it. SQLite runs the statements of a connection one after the other.
pub(super) async fn discard(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    // A savepoint begins a transaction outside of one. So there is always one to roll back.
    for sql in ["SAVEPOINT left", "ROLLBACK"] {
        sqlx::query(sql).execute(&mut *connection).await?;
    }
    Ok(())
}

/// Returns how many bytes a disk must have left for a document, if it has less. The document is written twice: into the log,
/// then into the file.
fn missing(size: u64, free: u64, reusable: u64, document: u64) -> Option<u64> {
    // A small disk can be used too.
    let reserve = RESERVE.min(size / 4);
    let for_log = (reserve / 2).saturating_add(document);
    let needed = reserve.saturating_add(document.saturating_mul(2));
    let needed = needed.saturating_sub(reusable).max(for_log);
    (free < needed).then_some(needed)
}

fn lock(path: &Path) -> Result<Handle, OpenError> {
    let file = private(path).map_err(|source| unusable(path, source))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(OpenError::InUse(path.to_owned())),
        Err(TryLockError::Error(source)) => Err(unusable(path, source)),
    }
}

/// Opens or creates a file that only its owner can read.
fn private(path: &Path) -> io::Result<Handle> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.mode(0o600).open(path)
}

fn unusable(path: &Path, source: io::Error) -> OpenError {
    OpenError::File {
        path: path.to_owned(),
        source,
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn refuse_network(folder: &Path) -> Result<(), OpenError> {
    let stat = nix::sys::statfs::statfs(folder).map_err(|error| unusable(folder, error.into()))?;
    match network_kind(&stat) {
        None => Ok(()),
        Some(kind) => Err(OpenError::NetworkFileSystem {
            folder: folder.to_owned(),
            kind,
        }),
    }
}

#[cfg(target_os = "linux")]
fn network_kind(stat: &nix::sys::statfs::Statfs) -> Option<&'static str> {
    // The width of the type differs between C libraries.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    kind_of_number(stat.filesystem_type().0 as u32)
}

/// Returns the name of a network file system. The numbers are those of `statfs(2)`.
#[cfg(target_os = "linux")]
const fn kind_of_number(number: u32) -> Option<&'static str> {
    match number {
        0x6969 => Some("NFS"),
        0x517B | 0xFF53_4D42 | 0xFE53_4D42 => Some("SMB"),
        0x6573_5546 => Some("FUSE"),
        _ => None,
    }
}

#[cfg(not(target_os = "linux"))]
fn network_kind(stat: &nix::sys::statfs::Statfs) -> Option<&'static str> {
    let name = stat.filesystem_type_name();
    match name {
        "nfs" => Some("NFS"),
        "smbfs" => Some("SMB"),
        name if name.contains("fuse") => Some("FUSE"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::nfs(0x6969, Some("NFS"))]
    #[case::smb(0x517B, Some("SMB"))]
    #[case::cifs(0xFF53_4D42, Some("SMB"))]
    #[case::smb2(0xFE53_4D42, Some("SMB"))]
    #[case::fuse(0x6573_5546, Some("FUSE"))]
    #[case::ext4(0xEF53, None)]
    #[case::tmpfs(0x0102_1994, None)]
    #[cfg(target_os = "linux")]
    fn network_file_systems_are_recognized_by_number(
        #[case] number: u32,
        #[case] kind: Option<&'static str>,
    ) {
        assert_eq!(kind_of_number(number), kind);
    }

    #[rstest]
    #[case::enough(1000, 250, 0, 0, None)]
    #[case::less_than_the_reserve(1000, 249, 0, 0, Some(250))]
    #[case::with_a_document(1000, 269, 0, 10, Some(270))]
    #[case::an_emptied_queue_has_space(1000, 200, 100, 10, None)]
    #[case::but_the_log_cannot_use_it(1000, 130, 1_000_000, 10, Some(135))]
    #[case::a_large_disk(1 << 40, RESERVE, 0, 0, None)]
    #[case::garbage(1 << 40, 1, 0, u64::MAX, Some(u64::MAX))]
    fn free_pages_of_the_file_count_as_free_space(
        #[case] size: u64,
        #[case] free: u64,
        #[case] reusable: u64,
        #[case] document: u64,
        #[case] expected: Option<u64>,
    ) {
        assert_eq!(missing(size, free, reusable, document), expected);
    }

    #[tokio::test]
    async fn a_file_that_is_open_cannot_be_opened_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hub.db");
        let first = File::open(&path, Duration::ZERO).await.unwrap();
        let second = File::open(&path, Duration::ZERO).await.err().unwrap();
        assert!(matches!(&second, OpenError::InUse(lock) if lock.ends_with("hub.db.lock")));
        assert!(second.to_string().contains("hub.db.lock"), "{second}");
        first.close().await;
        File::open(&path, Duration::ZERO).await.unwrap();
    }

    #[tokio::test]
    async fn commits_are_durable_and_the_files_are_private() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hub.db");
        let file = File::open(&path, Duration::ZERO).await.unwrap();
        for (pragma, expected) in [
            ("PRAGMA journal_mode", "wal"),
            ("PRAGMA locking_mode", "normal"),
        ] {
            let row = sqlx::query(pragma).fetch_one(&file.pool).await.unwrap();
            assert_eq!(row.get::<String, _>(0), expected);
        }
        let row = sqlx::query("PRAGMA synchronous")
            .fetch_one(&file.pool)
            .await
            .unwrap();
        assert_eq!(row.get::<i64, _>(0), 2, "FULL");
        for name in ["hub.db", "hub.db-wal", "hub.db-shm", "hub.db.lock"] {
            let metadata = folder.path().join(name).metadata().unwrap();
            assert_eq!(metadata.permissions().mode() & 0o777, 0o600, "{name}");
        }
    }

    #[tokio::test]
    async fn the_error_names_a_missing_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing/hub.db");
        let error = File::open(&path, Duration::ZERO).await.err().unwrap();
        assert!(error.to_string().contains("missing"), "{error}");
    }
}
