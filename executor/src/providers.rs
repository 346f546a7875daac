//! Packages of providers that a run needs by its lock file: from the store that runs share, or from their registry. `init` finds
//! them in a folder of the run, laid out like a mirror, and downloads nothing.
//!
//! Nothing is used that does not have a digest of the lock file: neither what the store has, which other runs may have written,
//! nor what a registry sends.
//!
//! - [`lock_file`] knows the digests. [`package`] unpacks and checks an archive. [`registry`] downloads it. [`shared_store`] is the
//!   only part that uses the store.
//! - [`registry_server`] gives the tool what the lock file does not have.

pub(crate) mod lock_file;
pub(crate) mod package;
pub(crate) mod registry;
pub(crate) mod registry_server;
pub(crate) mod shared_store;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use futures_util::stream::{self, StreamExt as _};
use provider_store::{Package, Unpacked};

use self::lock_file::Locked;
use self::package::PackageError;
use self::registry::{Registry, RegistryError};
use self::shared_store::SharedStore;
use crate::workspace::StopOnDrop;

/// Where packages come from, and where they are put.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    /// The store that runs share, if there is one.
    pub(crate) store: Option<SharedStore>,
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
    /// What the tool uses where it is in the store.
    pub(crate) held: Option<Unpacked>,
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
        if let Some(store) = &self.store {
            let scratch = self.scratch.join(format!("{number}-stored.zip"));
            if let Some(taken) = store.unpack(&locked, &target, &scratch).await? {
                return Ok(Provided {
                    package: locked.package.clone(),
                    h1: taken.h1,
                    held: taken.held,
                    from: Origin::Store,
                    not_published: None,
                });
            }
        }
        let archive = self.scratch.join(format!("{number}.zip"));
        let sha256 = self.registry.fetch(&locked.package, &archive).await?;
        // Work in other threads ends soon after this future is dropped.
        let stop = StopOnDrop::default();
        let (package, stopped) = (locked.package.clone(), stop.flag());
        let (path, digest) = (archive.clone(), sha256.clone());
        let unpack = move || checked(&locked, &digest, &path, &target, &stopped);
        let h1 = tokio::task::spawn_blocking(unpack).await??;
        let not_published = match &self.store {
            Some(store) => store.keep(&package, &archive, &sha256).await.err(),
            None => None,
        };
        std::fs::remove_file(archive)?;
        Ok(Provided {
            package,
            h1,
            held: None,
            from: Origin::Registry,
            not_published,
        })
    }
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
    let h1 = package::unpack(File::open(archive)?, target, stopped)?;
    if locked.has_zip(sha256) || locked.h1_digests.contains(&h1) {
        Ok(h1)
    } else {
        runtime::tree_removal::remove(target)?;
        Err(ProvideError::OtherDigest)
    }
}
