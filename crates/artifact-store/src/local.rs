//! The local store: files below the data directory. A file is written completely or not at all. Only its owner can read
//! it, because plans and states hold secrets.

mod change;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _};
use job_contract::keys::{self, Area, ObjectKey};
use tokio_util::io::{ReaderStream, SyncIoBridge};

use crate::READ_BYTES;
use crate::conditions::KeptConditions;
use crate::digest::{Digest, Hasher};
use crate::error::{FOLDER, OBJECT, SOURCE, StoreError, TARGET};
use crate::object_name::key_of;
use crate::service::{ObjectService, ServedService};
use crate::state_backend::BackendSettings;
use crate::state_place::StatePlace;
use crate::transfer::{Check, Condition, Content, Upload};
use runtime::private_file::private_folder;
use runtime::regular_file;

const CHUNK_BYTES: usize = 64 * 1024;

/// Files below a data directory.
#[derive(Clone, Debug)]
pub(crate) struct Local {
    root: PathBuf,
}

impl Local {
    pub(crate) fn new(data_dir: &Path) -> Self {
        Self {
            root: data_dir.to_owned(),
        }
    }

    fn path(&self, key: &ObjectKey) -> PathBuf {
        self.root.join(key.area.local_folder()).join(&key.path)
    }

    async fn write(
        &self,
        key: &ObjectKey,
        condition: &Condition,
        write: impl FnOnce(&mut File, &Path) -> Result<(), StoreError> + Send + 'static,
    ) -> Result<(), StoreError> {
        // A crash of the machine may lose the name of a new log, but never a part of a log. Plans and states stay.
        replace(self.path(key), key.area != Area::Output, condition, write).await
    }

    fn copy_out(&self, reference: &str, target: &Path, limit: u64) -> Result<Digest, StoreError> {
        let path = self.resolve(reference)?;
        let unreadable = StoreError::read(OBJECT, &path);
        let unwritable = StoreError::write(TARGET, target);
        // Code of a run on this machine may have put a link or a FIFO in its place meanwhile.
        let mut source = regular_file::open_unlinked(&path).map_err(&unreadable)?;
        let size = source.metadata().map_err(&unreadable)?.len();
        StoreError::unless_fits(reference, size, limit)?;
        let mut file = create_private(target).map_err(&unwritable)?;
        let copied = copy_digesting(&mut source, &mut file, unreadable, unwritable);
        if copied.is_err() {
            discard(target);
        }
        copied
    }

    /// A reference is a path. It must be below this store, so that a record cannot name another file.
    fn resolve(&self, reference: &str) -> Result<PathBuf, StoreError> {
        let path = Path::new(reference);
        let canonical = |what, path: &Path| match path.canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(StoreError::Missing {
                object: reference.to_owned(),
            }),
            found => found.map_err(StoreError::read(what, path)),
        };
        let (root, resolved) = (canonical(FOLDER, &self.root)?, canonical(OBJECT, path)?);
        if resolved.starts_with(root) {
            Ok(resolved)
        } else {
            Err(StoreError::Foreign {
                reference: reference.to_owned(),
            })
        }
    }

    fn reference_of(&self, key: &ObjectKey) -> String {
        self.path(key).display().to_string()
    }
}

#[async_trait]
impl ObjectService for Local {
    async fn reference(&self, key: &ObjectKey) -> Result<String, StoreError> {
        Ok(self.reference_of(key))
    }

    async fn unchanged(&self, key: &ObjectKey) -> Result<Condition, StoreError> {
        let path = self.path(key);
        blocking(move || change::unchanged(&path)).await
    }

    async fn put(
        &self,
        key: &ObjectKey,
        bytes: Bytes,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        self.write(key, condition, move |file, path| {
            file.write_all(&bytes)
                .map_err(StoreError::write(OBJECT, path))
        })
        .await
    }

    async fn put_file(
        &self,
        key: &ObjectKey,
        source: &Path,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        let source = source.to_owned();
        self.write(key, condition, move |file, path| {
            let unreadable = StoreError::read(SOURCE, &source);
            let mut input = regular_file::open(&source).map_err(&unreadable)?;
            let unwritable = StoreError::write(OBJECT, path);
            copy_digesting(&mut input, file, unreadable, unwritable).map(drop)
        })
        .await
    }

    async fn fetch(
        &self,
        reference: &str,
        target: &Path,
        limit: u64,
    ) -> Result<Digest, StoreError> {
        let (store, reference, target) = (self.clone(), reference.to_owned(), target.to_owned());
        blocking(move || store.copy_out(&reference, &target, limit)).await
    }

    async fn read(&self, key: &ObjectKey) -> Result<Option<Bytes>, StoreError> {
        let path = self.path(key);
        blocking(move || {
            let failed = StoreError::read(OBJECT, &path);
            let file = match regular_file::open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                opened => opened.map_err(&failed)?,
            };
            let size = file.metadata().map_err(&failed)?.len();
            StoreError::unless_fits(&path.display().to_string(), size, READ_BYTES)?;
            let mut bytes = Vec::new();
            let read = file.take(READ_BYTES).read_to_end(&mut bytes);
            read.map_err(failed)?;
            Ok(Some(bytes.into()))
        })
        .await
    }

    fn backend(&self, organization: &str, workspace: &str) -> BackendSettings {
        BackendSettings::Local {
            path: self
                .root
                .join(keys::local_backend_state(organization, workspace)),
        }
    }
}

#[async_trait]
impl ServedService for Local {
    fn reference_of(&self, key: &ObjectKey) -> String {
        self.reference_of(key)
    }

    fn key_behind(&self, reference: &str) -> Option<ObjectKey> {
        Area::ALL.into_iter().find_map(|area| {
            let path = Path::new(reference).strip_prefix(self.root.join(area.local_folder()));
            key_of(&format!(
                "{}/{}",
                area.bucket_prefix(),
                path.ok()?.to_str()?
            ))
        })
    }

    async fn open(&self, key: &ObjectKey) -> Result<Option<Content>, StoreError> {
        open(self.path(key)).await
    }

    async fn put_upload(
        &self,
        key: &ObjectKey,
        upload: Upload,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        let object = self.reference_of(key);
        self.write(key, condition, copy_upload(upload, object))
            .await
    }

    fn state(&self, organization: &str, workspace: &str) -> Arc<dyn StatePlace> {
        let path = keys::local_backend_state(organization, workspace);
        Arc::new(StateFile(self.root.join(path)))
    }

    async fn ask_conditions(&self, _name: &str) -> Result<KeptConditions, StoreError> {
        let root = self.root.clone();
        let has_locks = blocking(move || change::has_locks(&root)).await?;
        Ok(KeptConditions::all_if(has_locks))
    }
}

/// The state of the tool's local backend. The tool locks the file for its process, which no other process can do for it.
struct StateFile(PathBuf);

#[async_trait]
impl StatePlace for StateFile {
    async fn open(&self) -> Result<Option<Content>, StoreError> {
        open(self.0.clone()).await
    }

    async fn put(
        &self,
        upload: Upload,
        _lock: Option<&str>,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        let object = self.0.display().to_string();
        let write = copy_upload(upload, object);
        replace(self.0.clone(), true, condition, write).await
    }

    async fn delete(&self, _lock: Option<&str>, condition: &Condition) -> Result<(), StoreError> {
        let (path, condition) = (self.0.clone(), condition.clone());
        blocking(move || {
            if !path.exists() {
                return Ok(());
            }
            let _turn = change::begin(&path, &condition)?;
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    Err(StoreError::write(OBJECT, &path)(error))
                }
                _ => Ok(()),
            }
        })
        .await
    }

    fn has_lock(&self) -> bool {
        false
    }

    async fn lock(&self, _info: Bytes) -> Result<bool, StoreError> {
        Ok(true)
    }

    async fn lock_info(&self) -> Result<Option<Bytes>, StoreError> {
        Ok(None)
    }

    async fn unlock(&self, _info: &[u8]) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Replaces a file by what `write` writes, or leaves it as it is.
async fn replace(
    path: PathBuf,
    keeps_name: bool,
    condition: &Condition,
    write: impl FnOnce(&mut File, &Path) -> Result<(), StoreError> + Send + 'static,
) -> Result<(), StoreError> {
    let condition = condition.clone();
    blocking(move || {
        let failed = StoreError::write(OBJECT, &path);
        let folder = path.parent().expect("keys have a folder");
        let draft = private_folder(folder).and_then(tempfile::NamedTempFile::new_in);
        let mut draft = draft.map_err(&failed)?;
        write(draft.as_file_mut(), &path)?;
        draft.as_file().sync_all().map_err(&failed)?;
        let _turn = change::begin(&path, &condition)?;
        let keep = || {
            draft.persist(&path)?;
            if keeps_name {
                File::open(folder)?.sync_all()
            } else {
                Ok(())
            }
        };
        keep().map_err(&failed)
    })
    .await
}

/// Copies an upload into a file, and checks it.
fn copy_upload(
    upload: Upload,
    object: String,
) -> impl FnOnce(&mut File, &Path) -> Result<(), StoreError> + Send + 'static {
    let mut content = SyncIoBridge::new(upload.content);
    let mut check = Check::new(upload.digest, object);
    move |file, path| {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let length = match content.read(&mut chunk) {
                Ok(0) => return check.finish(),
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(StoreError::broken(error)),
            };
            check.update(&chunk[..length])?;
            file.write_all(&chunk[..length])
                .map_err(StoreError::write(OBJECT, path))?;
        }
    }
}

/// Opens a file of the store; `None` if it does not exist.
async fn open(path: PathBuf) -> Result<Option<Content>, StoreError> {
    let failed = StoreError::read(OBJECT, &path);
    let opened = blocking(move || {
        let failed = StoreError::read(OBJECT, &path);
        // Code of a run on this machine may have put a link or a FIFO in its place.
        match regular_file::open_unlinked(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => {
                let file = opened.map_err(&failed)?;
                let facts = file.metadata().map_err(&failed)?;
                Ok(Some((file, facts.len(), change::version(&facts))))
            }
        }
    });
    Ok(opened.await?.map(|(file, size_bytes, version)| {
        let file = tokio::fs::File::from_std(file);
        Content {
            size_bytes,
            version,
            chunks: ReaderStream::with_capacity(file, CHUNK_BYTES)
                .map_err(failed)
                .boxed(),
        }
    }))
}

/// Creates a file that only its owner can read.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// Removes the file of an aborted copy, so that half an object is never used as an object.
pub(crate) fn discard(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::warn!(%error, path = %path.display(), "could not remove an incomplete file");
    }
}

fn copy_digesting(
    source: &mut File,
    target: &mut File,
    unreadable: impl Fn(io::Error) -> StoreError,
    unwritable: impl Fn(io::Error) -> StoreError,
) -> Result<Digest, StoreError> {
    let mut hasher = Hasher::default();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let length = match source.read(&mut chunk) {
            Ok(0) => return Ok(hasher.finish()),
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(unreadable(error)),
        };
        hasher.update(&chunk[..length]);
        target.write_all(&chunk[..length]).map_err(&unwritable)?;
    }
}

/// Runs blocking file operations on a thread of their own.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime shuts down and drops this future.
            Err(_) => std::future::pending().await,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    async fn put(store: &Local, key: &ObjectKey, content: &'static [u8]) {
        let content = Bytes::from_static(content);
        store.put(key, content, &Condition::Any).await.unwrap();
    }

    #[tokio::test]
    async fn objects_are_read_back_unchanged_and_are_private() {
        let folder = tempfile::tempdir().unwrap();
        let store = Local::new(folder.path());
        let key = ObjectKey::plan("o", "w", "1", "s");
        assert_eq!(store.read(&key).await.unwrap(), None);
        put(&store, &key, b"plan").await;
        let reference = store.reference_of(&key);
        assert_eq!(mode(Path::new(&reference)), 0o600);
        let target = folder.path().join("copy");
        let digest = store.fetch(&reference, &target, u64::MAX).await.unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"plan");
        assert_eq!(mode(&target), 0o600);
        assert_eq!(digest, Digest::of(&target).unwrap());
        assert_eq!(
            digest.sha256,
            "64879f7d6b960a01909762d911a32d4582c20010c5641ee90278b644a9e3b525"
        );
        assert_eq!(&store.read(&key).await.unwrap().unwrap()[..], b"plan");
    }

    #[tokio::test]
    async fn references_outside_the_store_are_refused() {
        let (folder, outside) = (
            tempfile::tempdir().unwrap(),
            tempfile::NamedTempFile::new().unwrap(),
        );
        let store = Local::new(folder.path());
        let target = folder.path().join("copy");
        let reference = outside.path().to_str().unwrap();
        let error = store.fetch(reference, &target, u64::MAX).await.unwrap_err();
        assert!(matches!(error, StoreError::Foreign { .. }), "{error}");
        let error = store
            .fetch("/nonexistent", &target, u64::MAX)
            .await
            .unwrap_err();
        assert!(matches!(error, StoreError::Missing { .. }), "{error}");
        assert!(!target.exists());
    }

    /// Code of a run on this machine can put one in the place of an object.
    #[test]
    fn a_fifo_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let store = Local::new(folder.path());
        let key = ObjectKey::step_output("o", "1", "s");
        let path = store.path(&key);
        private_folder(path.parent().unwrap()).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let (said, hear) = std::sync::mpsc::channel();
        let target = folder.path().join("copy");
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap();
            let read = runtime.block_on(store.read(&key));
            said.send(read.is_err()).unwrap();
            let copied = store.copy_out(path.to_str().unwrap(), &target, u64::MAX);
            said.send(copied.is_err()).unwrap();
        });
        for _ in 0..2 {
            let refused = hear.recv_timeout(test_peers::wait::DEADLINE);
            assert_eq!(refused, Ok(true));
        }
    }

    #[tokio::test]
    async fn a_failed_write_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let store = Local::new(folder.path());
        let key = ObjectKey::plan("o", "w", "1", "s");
        let missing = Path::new("/nonexistent");
        let error = store.put_file(&key, missing, &Condition::Any).await;
        assert!(matches!(error, Err(StoreError::Read { what: SOURCE, .. })));
        let left = fs::read_dir(folder.path().join("local/state/o/w/1/s"))
            .unwrap()
            .count();
        assert_eq!(left, 0);
    }

    #[tokio::test]
    async fn a_file_that_is_there_is_not_overwritten_by_a_fetch() {
        let folder = tempfile::tempdir().unwrap();
        let store = Local::new(folder.path());
        let key = ObjectKey::plan("o", "w", "1", "s");
        put(&store, &key, b"plan").await;
        let target = folder.path().join("copy");
        fs::write(&target, "mine").unwrap();
        let error = store
            .fetch(&store.reference_of(&key), &target, u64::MAX)
            .await;
        assert!(matches!(error, Err(StoreError::Write { what: TARGET, .. })));
        assert_eq!(fs::read(&target).unwrap(), b"mine");
    }

    #[tokio::test]
    async fn an_object_above_the_limit_is_not_fetched() {
        let folder = tempfile::tempdir().unwrap();
        let store = Local::new(folder.path());
        let key = ObjectKey::step_output("o", "1", "s");
        put(&store, &key, b"log").await;
        let target = folder.path().join("copy");
        let error = store.fetch(&store.reference_of(&key), &target, 2).await;
        assert!(matches!(error, Err(StoreError::TooLarge { bytes: 3, .. })));
        assert!(!target.exists());
        let fetched = store.fetch(&store.reference_of(&key), &target, 3).await;
        fetched.unwrap();
    }

    #[tokio::test]
    async fn an_object_too_large_for_memory_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let store = Local::new(folder.path());
        let key = ObjectKey::step_output("o", "1", "s");
        put(&store, &key, b"log").await;
        let file = OpenOptions::new()
            .write(true)
            .open(store.path(&key))
            .unwrap();
        file.set_len(READ_BYTES).unwrap();
        assert!(store.read(&key).await.unwrap().is_some());
        file.set_len(READ_BYTES + 1).unwrap();
        let error = store.read(&key).await.unwrap_err();
        assert!(matches!(error, StoreError::TooLarge { .. }), "{error:?}");
    }
}
