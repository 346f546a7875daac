//! Packages of providers that a run needs by its lock file: from the store that runs share, or from their registry. `init` finds
//! them in a folder of the run, laid out like a mirror, and downloads nothing.
//!
//! Nothing is used that does not have a digest of the lock file: neither what the store has, which other runs may have written,
//! nor what a registry sends.
//!
//! - [`lock_file`] knows the digests. [`package`] unpacks and checks an archive. [`registry`] downloads it.

pub(crate) mod lock_file;
pub(crate) mod package;
pub(crate) mod registry;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use provider_store::{Package, ProviderStore};
use tokio::time::timeout;

use self::lock_file::Locked;
use self::package::PackageError;
use self::registry::{Registry, RegistryError};
use crate::workspace::StopOnDrop;

/// How long the store may take for a package. A network volume may hang for ever.
const STORE_TIMEOUT: Duration = Duration::from_mins(1);

/// Where packages come from, and where they are put.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    /// The store that runs share, if there is one.
    pub(crate) store: Option<ProviderStore>,
    pub(crate) registry: Arc<Registry>,
    /// The folder of the run that the tool uses as a mirror.
    pub(crate) overlay: PathBuf,
    /// A folder of the run for archives.
    pub(crate) scratch: PathBuf,
    /// How many are fetched at a time.
    pub(crate) at_a_time: usize,
}

/// A package that is ready for the tool.
#[derive(Debug)]
pub(crate) struct Provided {
    pub(crate) package: Package,
    /// The digest of its files, as lock files have it.
    pub(crate) h1: String,
    pub(crate) from: Origin,
    /// Why the archive is not in the store now.
    pub(crate) not_published: Option<io::Error>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Store,
    Registry,
}

/// Why a package is left to the tool.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProvideError {
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Package(#[from] PackageError),
    #[error("its archive could not be read or written")]
    Io(#[from] io::Error),
    #[error("the archive of its registry has no digest of the lock file")]
    OtherDigest,
    #[error("the store does not answer")]
    StoreHangs,
    #[error("unpacking it ended unexpectedly")]
    Task(#[from] tokio::task::JoinError),
}

impl Sources {
    /// Provides the packages of a lock file, several at a time.
    pub(crate) async fn provide(
        &self,
        locked: Vec<Locked>,
    ) -> Vec<(Package, Result<Provided, ProvideError>)> {
        stream::iter(locked.into_iter().enumerate())
            .map(async |(number, locked)| {
                let package = locked.package.clone();
                (package, self.one(number, locked).await)
            })
            .buffered(self.at_a_time)
            .collect()
            .await
    }

    async fn one(&self, number: usize, locked: Locked) -> Result<Provided, ProvideError> {
        let locked = Arc::new(locked);
        let target = self.overlay.join(locked.package.folder());
        // Work in other threads ends soon after this future is dropped.
        let stop = StopOnDrop::default();
        if let Some(store) = self.store.clone() {
            let archive = self.scratch.join(format!("{number}-stored.zip"));
            let (locked, target, stopped) = (Arc::clone(&locked), target.clone(), stop.flag());
            let found = move || from_store(&store, &locked, &archive, &target, &stopped);
            let found = tokio::task::spawn_blocking(found);
            match timeout(STORE_TIMEOUT, found).await {
                Ok(found) => {
                    if let Some(provided) = found? {
                        return Ok(provided);
                    }
                }
                // That thread may write into its own folder for as long as the volume hangs.
                Err(_) => return Err(ProvideError::StoreHangs),
            }
        }
        let archive = self.scratch.join(format!("{number}.zip"));
        let sha256 = self.registry.fetch(&locked.package, &archive).await?;
        let (package, stopped) = (locked.package.clone(), stop.flag());
        let (path, digest) = (archive.clone(), sha256.clone());
        let unpack = move || checked(&locked, &digest, &path, &target, &stopped);
        let h1 = tokio::task::spawn_blocking(unpack).await??;
        let not_published = self.publish(&package, &archive, &sha256).await;
        Ok(Provided {
            package,
            h1,
            from: Origin::Registry,
            not_published,
        })
    }

    /// Publishes an archive, and removes it. Returns why it is not published.
    async fn publish(&self, package: &Package, archive: &Path, sha256: &str) -> Option<io::Error> {
        let (store, package) = (self.store.clone(), package.clone());
        let (archive, sha256) = (archive.to_owned(), sha256.to_owned());
        let publish = tokio::task::spawn_blocking(move || {
            let published = store.map(|store| store.publish(&package, &archive, &sha256));
            std::fs::remove_file(archive).and(published.unwrap_or(Ok(())))
        });
        match timeout(STORE_TIMEOUT, publish).await {
            Ok(published) => published.unwrap_or_else(|error| Err(error.into())).err(),
            Err(_) => Some(io::Error::from(io::ErrorKind::TimedOut)),
        }
    }
}

/// Provides a package from the store. Everything that goes wrong there means that the store does not have it.
fn from_store(
    store: &ProviderStore,
    locked: &Locked,
    archive: &Path,
    target: &Path,
    stopped: &AtomicBool,
) -> Option<Provided> {
    // Without a digest of the archive, each archive of this version may be the one.
    let digests = if locked.zip_digests.is_empty() {
        store.digests(&locked.package)
    } else {
        locked.zip_digests.clone()
    };
    digests.into_iter().find_map(|sha256| {
        let copied = store.copy(&locked.package, &sha256, archive);
        let is_there = copied.unwrap_or_else(|error| {
            tracing::warn!(%error, package = %locked.package, "the provider store cannot be read");
            false
        });
        let h1 = is_there.then(|| checked(locked, &sha256, archive, target, stopped))?;
        std::fs::remove_file(archive).ok()?;
        Some(Provided {
            package: locked.package.clone(),
            h1: h1.ok()?,
            from: Origin::Store,
            not_published: None,
        })
    })
}

/// Unpacks an archive, and returns the digest of its files. They are removed if the lock file has neither their digest nor the one
/// of the archive.
fn checked(
    locked: &Locked,
    sha256: &str,
    archive: &Path,
    target: &Path,
    stopped: &AtomicBool,
) -> Result<String, ProvideError> {
    let h1 = package::unpack(archive, target, stopped)?;
    let is_zip = locked.zip_digests.iter().any(|known| known == sha256);
    if is_zip || locked.h1_digests.contains(&h1) {
        Ok(h1)
    } else {
        runtime::tree_removal::remove(target)?;
        Err(ProvideError::OtherDigest)
    }
}
