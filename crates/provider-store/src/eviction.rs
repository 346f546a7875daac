//! What a store has, and which of that goes when it is too large. The tools that executors have downloaded into the same folder
//! count too.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use runtime::regular_file;
use tracing::warn;

use super::{PROVIDERS, Package, ProviderStore, TMP, absent_is_none, archive_name, digest_in};
use crate::folder::Folder;
use crate::{files_digest, is_sha256, unpacked};

/// What a killed run has left may be removed after this time.
const ABANDONED: Duration = Duration::from_hours(24);
/// What was just published or used is not removed.
const YOUNG: Duration = Duration::from_hours(1);
/// The components of a package's path.
const DEPTH: usize = 5;
/// The folders of tools, each with one folder for a version. Executors lock a file in it while they install that version, and
/// programs while they use them.
const TOOLS: [&str; 2] = ["terraform", "tofu"];
const TOOL_LOCK: &str = ".lock";

/// What an entry of a store is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Item {
    Archive { package: Package, sha256: String },
    Unpacked { package: Package, sha256: String },
    Tool { name: String, version: String },
}

/// An entry of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub item: Item,
    pub size_bytes: u64,
    /// When it was published or used last.
    pub used: SystemTime,
}

/// What removal has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    pub removed: Vec<Entry>,
    /// The bytes of what stays.
    pub kept_bytes: u64,
}

impl ProviderStore {
    /// Everything that the store has, by name.
    pub fn list(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        let Some(root) = absent_is_none(Folder::open(&self.root))? else {
            return Ok(entries);
        };
        if let Some(top) = absent_is_none(root.below(Path::new(PROVIDERS)))? {
            self.visit(&top, &mut Vec::new(), &mut entries)?;
        }
        for tool in TOOLS {
            // In the data directory of a machine, a workspace may be called like that.
            if let Ok(versions) = root.below(Path::new(tool)) {
                self.visit_tools(&versions, tool, &mut entries)?;
            }
        }
        entries.sort_by(|one, other| one.item.cmp(&other.item));
        Ok(entries)
    }

    /// Visits the folders of packages. Anything else in the store is none of its business.
    fn visit(
        &self,
        folder: &Folder,
        names: &mut Vec<String>,
        found: &mut Vec<Entry>,
    ) -> io::Result<()> {
        for (name, kind) in folder.entries()? {
            self.progress.step();
            if names.len() < DEPTH {
                // Another run may have removed it, or put something else in its place.
                if kind.is_dir()
                    && let Ok(inner) = folder.below(Path::new(&name))
                {
                    names.push(name);
                    self.visit(&inner, names, found)?;
                    names.pop();
                }
                continue;
            }
            let [host, namespace, provider, version, platform] = &names[..] else {
                continue;
            };
            let address = format!("{host}/{namespace}/{provider}");
            let Some(package) = Package::new(&address, version, platform) else {
                continue;
            };
            if kind.is_dir() && is_sha256(&name) {
                if let Some(entry) = absent_is_none(of_unpacked(folder, package, name))? {
                    found.push(entry);
                }
            } else if kind.is_file()
                && let Some(sha256) = digest_in(&name)
                && let Some(metadata) = absent_is_none(fs::symlink_metadata(folder.at(&name)))?
            {
                found.push(Entry {
                    item: Item::Archive {
                        package,
                        sha256: sha256.to_owned(),
                    },
                    size_bytes: metadata.len(),
                    used: metadata.modified()?,
                });
            }
        }
        Ok(())
    }

    fn visit_tools(&self, versions: &Folder, tool: &str, found: &mut Vec<Entry>) -> io::Result<()> {
        for (version, _) in versions.entries()? {
            self.progress.step();
            let Ok(folder) = versions.below(Path::new(&version)) else {
                continue;
            };
            let mut entry = Entry {
                item: Item::Tool {
                    name: tool.to_owned(),
                    version,
                },
                size_bytes: 0,
                used: SystemTime::UNIX_EPOCH,
            };
            for (name, kind) in folder.entries()? {
                if kind.is_file()
                    && name != TOOL_LOCK
                    && let Some(metadata) = absent_is_none(fs::symlink_metadata(folder.at(name)))?
                {
                    entry.size_bytes += metadata.len();
                    entry.used = entry.used.max(metadata.modified()?);
                }
            }
            if entry.size_bytes > 0 {
                found.push(entry);
            }
        }
        Ok(())
    }

    /// Whether an entry is what its name or the digest beside it says. Nothing here can tell that of a tool.
    pub fn verify(&self, entry: &Entry) -> io::Result<bool> {
        match &entry.item {
            Item::Archive { package, sha256 } => {
                let folder = self.folder(package)?.ok_or(io::ErrorKind::NotFound)?;
                Ok(&self.digest(&folder.at(archive_name(sha256)))? == sha256)
            }
            Item::Unpacked { package, sha256 } => {
                let folder = self.folder(package)?.ok_or(io::ErrorKind::NotFound)?;
                self.is_unpacked(&folder, sha256)
            }
            Item::Tool { .. } => Ok(true),
        }
    }

    /// Removes an entry. `false`: a run uses it. It is no error if it is gone.
    pub fn remove(&self, entry: &Entry) -> io::Result<bool> {
        match &entry.item {
            Item::Archive { package, sha256 } => {
                if let Some(folder) = self.folder(package)? {
                    absent_is_none(fs::remove_file(folder.at(archive_name(sha256))))?;
                }
                Ok(true)
            }
            Item::Unpacked { package, sha256 } => match self.folder(package)? {
                Some(folder) => self.discard(&folder, sha256),
                None => Ok(true),
            },
            Item::Tool { name, version } => {
                let folder = Folder::open(&self.root)?.below(&PathBuf::from(name).join(version));
                match absent_is_none(folder)? {
                    Some(folder) => remove_tool(&folder, name),
                    None => Ok(true),
                }
            }
        }
    }

    /// Removes what was not used for `unused`, and then what was used the longest time ago, until the rest has at most nine tenths
    /// of `max_bytes`, if all together have more than that. What was used in the last hour stays, and so does what a run holds.
    /// Runs use copies of the rest, so none misses what is removed.
    pub fn prune(&self, max_bytes: u64, unused: Option<Duration>) -> io::Result<Pruned> {
        self.sweep();
        let now = SystemTime::now();
        let age = |entry: &Entry| now.duration_since(entry.used).unwrap_or_default();
        let mut entries = self.list()?;
        entries.sort_by_key(|entry| entry.used);
        let mut kept_bytes: u64 = entries.iter().map(|entry| entry.size_bytes).sum();
        let is_over = kept_bytes > max_bytes;
        let mut removed = Vec::new();
        for entry in entries {
            let is_unused = unused.is_some_and(|unused| age(&entry) > unused);
            let is_surplus = is_over && kept_bytes > max_bytes - max_bytes / 10;
            if (is_unused || is_surplus) && age(&entry) > YOUNG && self.remove(&entry)? {
                kept_bytes -= entry.size_bytes;
                removed.push(entry);
            }
        }
        Ok(Pruned {
            removed,
            kept_bytes,
        })
    }

    /// Removes what killed runs have left.
    fn sweep(&self) {
        let tmp = Folder::open(&self.root).and_then(|root| root.below(Path::new(TMP)));
        let Ok(tmp) = tmp else { return };
        for (name, _) in tmp.entries().unwrap_or_default() {
            self.progress.step();
            let path = tmp.at(name);
            let modified = fs::symlink_metadata(&path).and_then(|found| found.modified());
            let is_abandoned = modified
                .ok()
                .and_then(|modified| modified.elapsed().ok())
                .is_some_and(|age| age > ABANDONED);
            if is_abandoned && let Err(error) = runtime::tree_removal::remove(&path) {
                warn!(%error, "what a killed run has left in the provider store is not removed");
            }
        }
    }
}

fn of_unpacked(folder: &Folder, package: Package, sha256: String) -> io::Result<Entry> {
    let entry = folder.below(Path::new(&sha256))?;
    let noted = fs::symlink_metadata(entry.at(unpacked::DIGEST));
    // Without a digest, it is damaged, but it has a size and an age.
    let used = noted.or_else(|_| fs::symlink_metadata(folder.at(&sha256)))?;
    Ok(Entry {
        size_bytes: entry.bytes(files_digest::LEVELS)?,
        used: used.modified()?,
        item: Item::Unpacked { package, sha256 },
    })
}

/// Removes the files of a tool's version, the program first. The folder stays, because an executor may wait for its lock.
fn remove_tool(folder: &Folder, program: &str) -> io::Result<bool> {
    let mut held: Vec<File> = Vec::new();
    for name in [TOOL_LOCK, program] {
        let Some(file) = absent_is_none(regular_file::open_unlinked(&folder.at(name)))? else {
            continue;
        };
        match file.try_lock() {
            Ok(()) => held.push(file),
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    absent_is_none(fs::remove_file(folder.at(program)))?;
    for (name, kind) in folder.entries()? {
        if kind.is_file() && name != TOOL_LOCK {
            absent_is_none(fs::remove_file(folder.at(name)))?;
        }
    }
    Ok(true)
}
