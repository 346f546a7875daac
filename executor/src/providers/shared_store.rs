//! The provider store as one run uses it: takes packages, copies archives, and keeps or notes what the run has downloaded. Each of these
//! ends in time, because a network volume may hang for ever. Nothing that a store has is trusted, because other runs may have
//! written it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use job_contract::provider_cache::MOST_WANTED;
use provider_store::{Access, Package, ProviderStore, Unpacked};
use tokio::time::timeout;
use tracing::warn;

use super::lock_file::Locked;
use super::package::{self, PackageError};
use crate::volume::Volume;
use crate::workspace::StopOnDrop;

/// How long nothing may move on its volume.
const PATIENCE: Duration = Duration::from_mins(1);
/// How long a run waits for the removal of packages. Others may have put millions of files there.
const REMOVAL: Duration = Duration::from_secs(30);
/// So many archives may be the one that a lock file without digests of archives means. Others may have put more there.
const MOST_CANDIDATES: usize = 8;

/// The store that runs share.
#[derive(Clone, Debug)]
pub(crate) struct SharedStore {
    store: ProviderStore,
    access: Access,
    volume: Volume,
    /// What the run lacked. `None`: the run publishes it.
    wanted: Option<Wanted>,
}

/// A package that the store had.
#[derive(Debug)]
pub(crate) struct Taken {
    /// The digest of its files.
    pub(crate) h1: String,
    /// If it is used where it is, it stays there for as long as this lives.
    pub(crate) held: Option<Unpacked>,
}

/// The packages that a run lacked in a store that runs only read. Jobs of the operator fetch them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted(Arc<Mutex<BTreeSet<String>>>);

impl Wanted {
    pub(crate) fn note(&self, package: &Package) {
        let Package {
            version, platform, ..
        } = package;
        let name = format!("{}/{version}/{platform}", package.address());
        let mut noted = runtime::lock(&self.0);
        if noted.len() < MOST_WANTED {
            noted.insert(name);
        }
    }

    /// Each as a [`WantedPackage`](job_contract::provider_cache::WantedPackage).
    pub(crate) fn names(&self) -> Vec<String> {
        runtime::lock(&self.0).iter().cloned().collect()
    }
}

impl SharedStore {
    /// A store to which the run publishes.
    pub(crate) fn new(store: ProviderStore) -> Self {
        Self {
            store,
            access: Access::default(),
            volume: Volume::new(PATIENCE),
            wanted: None,
        }
    }

    /// A store that the run only reads.
    pub(crate) fn read_only(store: ProviderStore, wanted: Wanted) -> Self {
        Self {
            wanted: Some(wanted),
            ..Self::new(store)
        }
    }

    /// What else uses this volume gives it up together with this store.
    pub(crate) fn on(self, volume: Volume, access: Access) -> Self {
        Self {
            access,
            volume,
            ..self
        }
    }

    /// Whether the volume hangs. Then nothing of it is used any more.
    pub(crate) fn hangs(&self) -> bool {
        self.volume.hangs()
    }

    /// Links or unpacks a locked package into `target`. `None` if the store does not have it. `scratch` is a path for a copy of its
    /// archive.
    pub(crate) async fn unpack(
        &self,
        locked: &Arc<Locked>,
        target: &Path,
        scratch: &Path,
    ) -> io::Result<Option<Taken>> {
        if self.hangs() {
            return Ok(None);
        }
        let stop = StopOnDrop::default();
        let taking = Taking {
            store: self.store.clone(),
            access: self.access,
            locked: Arc::clone(locked),
            target: target.to_owned(),
            scratch: scratch.to_owned(),
            stopped: stop.flag(),
        };
        self.in_time(move || Ok(taking.taken())).await
    }

    /// Copies an archive into a new file. `false` if the store does not have it. The copy is what `sha256` says.
    pub(crate) async fn copy(
        &self,
        package: &Package,
        sha256: &str,
        target: &Path,
    ) -> io::Result<bool> {
        let (store, package) = (self.store.clone(), package.clone());
        let (sha256, target) = (sha256.to_owned(), target.to_owned());
        self.in_time(move || store.copy(&package, &sha256, &target))
            .await
    }

    /// Keeps an archive for later runs, or notes that it is wanted. All archives that a run has downloaded come here, and nowhere
    /// else. The caller has checked that its registry names this SHA-256 for this package.
    pub(crate) async fn keep(
        &self,
        package: &Package,
        archive: &Path,
        sha256: &str,
    ) -> io::Result<()> {
        if let Some(wanted) = &self.wanted {
            wanted.note(package);
            return Ok(());
        }
        let (store, package) = (self.store.clone(), package.clone());
        let (archive, sha256) = (archive.to_owned(), sha256.to_owned());
        self.in_time(move || store.publish(&package, &archive, &sha256))
            .await
    }

    /// Removes packages that nobody uses, if the store has become too large.
    pub(crate) async fn prune(&self, max_bytes: u64) {
        if self.wanted.is_some() {
            return;
        }
        let store = self.store.clone();
        match self
            .removed(REMOVAL, move || store.prune(max_bytes, None))
            .await
        {
            Ok(pruned) if pruned.kept_bytes > max_bytes => {
                warn!(
                    pruned.kept_bytes,
                    max_bytes, "the provider store is too large"
                );
            }
            Ok(_) => {}
            Err(error) => warn!(%error, "the provider store could not be cleaned up"),
        }
    }

    /// The removal goes on if it takes longer than `limit`. Nobody needs what it does.
    async fn removed<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let ended = timeout(limit, self.in_time(work)).await;
        ended.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "it takes too long")))
    }

    async fn in_time<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        self.volume.in_time(self.store.progress(), work).await
    }
}

/// A package on its way from the store.
struct Taking {
    store: ProviderStore,
    access: Access,
    locked: Arc<Locked>,
    target: PathBuf,
    scratch: PathBuf,
    stopped: Arc<AtomicBool>,
}

impl Taking {
    /// Everything that goes wrong means that the store does not have the package.
    fn taken(&self) -> Option<Taken> {
        let Locked {
            package,
            zip_digests,
            ..
        } = &*self.locked;
        // Without a digest of the archive, each archive of this version may be the one.
        let digests = match zip_digests[..] {
            [] => {
                let mut found = self.store.digests(package);
                found.truncate(MOST_CANDIDATES);
                found
            }
            _ => zip_digests.clone(),
        };
        digests.iter().find_map(|sha256| {
            let unpacked = |h1| Taken { h1, held: None };
            let taken = match self.linked(sha256) {
                Ok(None) => self.by_files(sha256).map(|h1| h1.map(unpacked)),
                linked => linked,
            };
            let taken = match taken {
                Ok(None) => self.by_archive(sha256).map(|h1| h1.map(unpacked)),
                taken => taken,
            };
            taken.unwrap_or_else(|error| {
                warn!(%error, %package, "the package in the provider store cannot be used");
                None
            })
        })
    }

    /// Somebody whom runs trust has unpacked it, and this run cannot change it.
    fn linked(&self, sha256: &str) -> Result<Option<Taken>, PackageError> {
        let Locked {
            package,
            h1_digests,
            ..
        } = &*self.locked;
        let Some(held) = self.store.hold(package, sha256, self.access)? else {
            return Ok(None);
        };
        if !self.locked.has_zip(sha256) && !h1_digests.contains(&held.h1) {
            return Ok(None);
        }
        package::check_platform(&held.files, &package.name)?;
        if let Some(parent) = self.target.parent() {
            fs::create_dir_all(parent)?;
        }
        symlink(&held.files, &self.target)?;
        Ok(Some(Taken {
            h1: held.h1.clone(),
            held: Some(held),
        }))
    }

    /// The digest of its files says that it is the one. Then nothing reads its archive but the unpacking itself.
    fn by_files(&self, sha256: &str) -> Result<Option<String>, PackageError> {
        let known = &self.locked.h1_digests;
        if known.is_empty() {
            return Ok(None);
        }
        let Some(archive) = self.store.open(&self.locked.package, sha256)? else {
            return Ok(None);
        };
        let used = archive.try_clone()?;
        match package::unpack(archive, &self.target, &self.stopped) {
            Ok(h1) if known.contains(&h1) => {
                self.check_platform()?;
                used.note_use();
                Ok(Some(h1))
            }
            Ok(_) => {
                runtime::tree_removal::remove(&self.target)?;
                Ok(None)
            }
            Err(PackageError::Stopped) => Err(PackageError::Stopped),
            // The copy of an archive tells whether it is one that another run has changed.
            Err(_) => Ok(None),
        }
    }

    /// The digest of its archive says that it is the one.
    fn by_archive(&self, sha256: &str) -> Result<Option<String>, PackageError> {
        let package = &self.locked.package;
        if !self.locked.has_zip(sha256) || !self.store.copy(package, sha256, &self.scratch)? {
            return Ok(None);
        }
        let archive = fs::File::open(&self.scratch)?;
        fs::remove_file(&self.scratch)?;
        let h1 = package::unpack(archive, &self.target, &self.stopped)?;
        self.check_platform()?;
        Ok(Some(h1))
    }

    /// A lock file has digests of the packages of all platforms. So a genuine package of another one may have the name of this one.
    fn check_platform(&self) -> Result<(), PackageError> {
        package::check_platform(&self.target, &self.locked.package.name).inspect_err(|_| {
            if let Err(error) = runtime::tree_removal::remove(&self.target) {
                warn!(%error, "a package of another platform could not be removed");
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::sync::mpsc;

    use provider_store::sha256_of;
    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;

    /// Lock files may have no digests of archives. Then names tell nothing.
    #[tokio::test]
    async fn not_every_archive_that_others_have_planted_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let mut program = Vec::new();
        let own = fs::File::open("/proc/self/exe").unwrap();
        own.take(64).read_to_end(&mut program).unwrap();
        let mut zip = ZipWriter::new(fs::File::create(path("zip")).unwrap());
        zip.start_file("terraform-provider-null", SimpleFileOptions::default())
            .unwrap();
        zip.write_all(&program).unwrap();
        zip.finish().unwrap();
        let opened = fs::File::open(path("zip")).unwrap();
        let h1 = package::unpack(opened, &path("files"), &AtomicBool::default()).unwrap();
        let package = Package::new("registry.example.test/acme/null", "1.0.0", "linux_amd64");
        let package = package.unwrap();
        let store = ProviderStore::new(path("store"));
        let sha256 = sha256_of(&path("zip")).unwrap();
        store.publish(&package, &path("zip"), &sha256).unwrap();
        let locked = Arc::new(Locked {
            package: package.clone(),
            h1_digests: vec![h1],
            zip_digests: Vec::new(),
        });
        let shared = SharedStore::new(store.clone());
        for number in 1..=MOST_CANDIDATES {
            // Before the genuine one.
            let planted = store.path(&package, &format!("{number:064x}"));
            fs::write(&planted, "no archive").unwrap();
            let target = path(&format!("target-{number}"));
            let taken = shared.unpack(&locked, &target, &path("scratch")).await;
            assert_eq!(taken.unwrap().is_some(), number < MOST_CANDIDATES);
            // None was copied: a copy would have shown that it is not what its name says.
            assert!(planted.exists());
        }
    }

    #[tokio::test]
    async fn a_run_does_not_wait_for_the_removal_of_what_others_have_planted() {
        let folder = tempfile::tempdir().unwrap();
        let shared = SharedStore::new(ProviderStore::new(folder.path()));
        let (end, ended) = mpsc::channel::<()>();
        let progress = shared.store.progress().clone();
        let work = move || {
            while ended.try_recv() == Err(mpsc::TryRecvError::Empty) {
                progress.step();
                std::thread::yield_now();
            }
            Ok(())
        };
        let waited = shared.removed(Duration::from_millis(50), work);
        let waited = timeout(PATIENCE, waited).await.unwrap();
        assert_eq!(waited.unwrap_err().to_string(), "it takes too long");
        assert!(!shared.hangs());
        drop(end);
    }
}
