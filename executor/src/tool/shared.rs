//! A tool cache that others can write: a volume that pods share. It has the archives of releases, with the publisher's signed lists of
//! digests. A run uses nothing where it is. It copies an archive, checks the copy by the list each time, and unpacks it into a folder
//! of its own. No lock in such a cache is waited for, because code of any run could keep it.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::path::PathBuf;

use job_contract::chain;
use job_contract::job::Tool;
use provider_store::ProviderStore;
use semver::Version;
use tempfile::NamedTempFile;
use tracing::warn;

use super::cache::Slot;
use super::index::OsArch;
use super::verify::{self, Keyring, MAX_ARCHIVE, MAX_SMALL_FILE};
use crate::volume::Volume;

pub(super) const LIST: &str = "SHA256SUMS";
pub(super) const SIGNATURE: &str = "SHA256SUMS.sig";

/// A list of digests with a signature that was checked.
#[derive(Debug)]
pub(super) struct SignedList {
    pub(super) list: Vec<u8>,
    pub(super) signature: Vec<u8>,
}

/// The cache, and where a run keeps what it takes from there.
#[derive(Clone, Debug)]
pub struct SharedCache {
    store: ProviderStore,
    volume: Volume,
    private: PathBuf,
}

impl SharedCache {
    /// `private`: a folder of the run.
    pub(crate) fn new(cache: PathBuf, volume: Volume, private: PathBuf) -> Self {
        Self {
            store: ProviderStore::new(cache),
            volume,
            private,
        }
    }

    /// Where the run's own copies are.
    pub(super) const fn private(&self) -> &PathBuf {
        &self.private
    }

    /// The versions that may be there.
    pub(super) async fn versions(&self, tool: Tool) -> Vec<Version> {
        let store = self.store.clone();
        let found = self
            .volume
            .in_time(self.store.progress(), move || {
                store.tool_versions(tool.binary())
            })
            .await;
        let names = found.unwrap_or_else(|error| {
            warn!(%error, "the tool cache cannot be read");
            Vec::new()
        });
        let names = names.iter();
        names.filter_map(|name| Slot::version(tool, name)).collect()
    }

    /// Makes a copy of a version for this run. `None` if the cache does not have it, or not as its publisher signed it.
    pub(super) async fn take(
        &self,
        tool: Tool,
        version: &Version,
        keyring: Keyring,
    ) -> Option<PathBuf> {
        let (it, version) = (self.clone(), version.clone());
        let taken = self
            .volume
            .in_time(self.store.progress(), move || {
                it.taken(tool, &version, &keyring)
            })
            .await;
        taken.unwrap_or_else(|error| {
            warn!(%error, "a tool in the cache cannot be used");
            None
        })
    }

    fn taken(
        &self,
        tool: Tool,
        version: &Version,
        keyring: &Keyring,
    ) -> io::Result<Option<PathBuf>> {
        let folder = Slot::folder_name(tool, version);
        let archive_name = archive_name(tool, version);
        let open = |name: &str| self.store.open_tool_file(tool.binary(), &folder, name);
        let small = |name: &str| {
            let mut content = Vec::new();
            let Some(file) = open(name)? else {
                return Ok::<_, io::Error>(None);
            };
            file.take(MAX_SMALL_FILE).read_to_end(&mut content)?;
            Ok(Some(content))
        };
        let (Some(list), Some(signature)) = (small(LIST)?, small(SIGNATURE)?) else {
            return Ok(None);
        };
        let refused = |why: String| {
            warn!(%tool, %version, why, "a tool in the cache is not used");
            Ok(None)
        };
        if let Err(error) = keyring.check(&list, &signature) {
            return refused(chain(&error));
        }
        let expected = verify::listed_digest(&String::from_utf8_lossy(&list), &archive_name);
        let (Some(expected), Some(mut archive)) = (expected, open(&archive_name)?) else {
            return Ok(None);
        };
        let slot = Slot::new(&self.private, tool, version);
        let own = |error| io::Error::other(chain(&error));
        let mut copy = slot.unfinished().map_err(own)?;
        io::copy(&mut (&mut archive).take(MAX_ARCHIVE), &mut copy)?;
        copy.flush()?;
        if verify::file_digest(copy.as_file())? != expected {
            return refused("its archive is not the one that was signed".to_owned());
        }
        archive.note_use();
        let path = slot.install(copy.as_file(), &archive_name).map_err(own)?;
        Ok(Some(path))
    }

    /// Keeps a release for other runs.
    pub(super) async fn keep(
        &self,
        tool: Tool,
        version: &Version,
        archive: NamedTempFile,
        list: SignedList,
    ) {
        let (store, private) = (self.store.clone(), self.private.clone());
        let (folder, archive_name) = (
            Slot::folder_name(tool, version),
            archive_name(tool, version),
        );
        let keeping = move || {
            let own = tempfile::tempdir_in(private)?;
            let (of_list, of_signature) = (own.path().join(LIST), own.path().join(SIGNATURE));
            fs::write(&of_list, list.list)?;
            fs::write(&of_signature, list.signature)?;
            // Readers begin with the last one.
            let files = [
                (&*archive_name, archive.path()),
                (LIST, &of_list),
                (SIGNATURE, &of_signature),
            ];
            store.publish_tool_files(tool.binary(), &folder, &files)
        };
        if let Err(error) = self.volume.in_time(self.store.progress(), keeping).await {
            warn!(%error, "the tool is not in the cache");
        }
    }
}

/// The name of a release's archive in its publisher's list. It has version and platform, so a signed archive of another one is none.
pub(super) fn archive_name(tool: Tool, version: &Version) -> String {
    format!("{}_{version}_{}.zip", tool.binary(), OsArch::current())
}
