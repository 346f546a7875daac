//! What a store has, and which of that goes when it is too large. The tools that executors have downloaded into the same folder
//! count too.
//!
//! Others may have put anything there. What cannot be read or removed is left out, and the rest goes on.

use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, Seek as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use runtime::regular_file;
use tracing::warn;

use super::{
    Archive, PROVIDERS, Package, ProviderStore, TMP, absent_is_none, archive_name, copy_hashed,
    digest_in,
};
use crate::folder::{Folder, bytes_of};
use crate::{files_digest, is_sha256, modules, unpacked};

/// What a killed run has left may be removed after this time.
const ABANDONED: Duration = Duration::from_hours(24);
/// What was just published or used is not removed. No clock of another machine is further ahead.
const YOUNG: Duration = Duration::from_hours(1);
/// The components of a package's path.
const DEPTH: usize = 5;
/// The folders of tools, each with one folder for a version. Executors lock a file in it while they install that version, and
/// programs while they use them.
const TOOLS: [&str; 2] = ["terraform", "tofu"];
/// Where these are: in the store itself, or where pods have them if the tool may take the store for its own cache, whose folders
/// have the names of hosts.
const PLACES: [&str; 2] = ["", ".tools"];
const TOOL_LOCK: &str = ".lock";

/// What an entry of a store is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Item {
    Archive {
        package: Package,
        sha256: String,
    },
    Unpacked {
        package: Package,
        sha256: String,
    },
    /// `place`: the folder in the store that has it, if it is not in the store itself.
    Tool {
        name: String,
        version: String,
        place: &'static str,
    },
    /// Objects of a repository of modules, up to a commit.
    Module {
        repository: String,
        commit: String,
    },
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

/// What goes wrong with single entries. Others can make as much of that as they like, so it is said once.
#[derive(Default)]
struct Failures {
    count: usize,
    first: Option<io::Error>,
}

impl Failures {
    fn note(&mut self, error: io::Error) {
        self.count += 1;
        self.first.get_or_insert(error);
    }

    fn report(self, what: &str) {
        if let Some(error) = self.first {
            warn!(%error, self.count, "{what}");
        }
    }
}

#[derive(Default)]
struct Found {
    entries: Vec<Entry>,
    failures: Failures,
}

impl Found {
    /// Another run may have removed it, put something else in its place, or closed it.
    fn readable<T>(&mut self, found: io::Result<T>) -> Option<T> {
        absent_is_none(found).unwrap_or_else(|error| {
            self.failures.note(error);
            None
        })
    }
}

impl ProviderStore {
    /// Everything that the store has, by name.
    pub fn list(&self) -> io::Result<Vec<Entry>> {
        let Some(root) = absent_is_none(Folder::open(&self.root))? else {
            return Ok(Vec::new());
        };
        let mut found = Found::default();
        if let Some(top) = found.readable(root.below(Path::new(PROVIDERS))) {
            self.visit(&top, &mut Vec::new(), &mut found);
        }
        for (place, tool) in PLACES
            .iter()
            .flat_map(|place| TOOLS.map(|tool| (place, tool)))
        {
            // In the data directory of a machine, a workspace may be called like that.
            if let Ok(versions) = root.below(&Path::new(place).join(tool)) {
                self.visit_tools(&versions, place, tool, &mut found);
            }
        }
        if let Some(modules) = found.readable(root.below(Path::new(modules::MODULES))) {
            self.visit_modules(&modules, &mut found);
        }
        let text = "entries of the provider store cannot be read, and are left out";
        found.failures.report(text);
        let mut entries = found.entries;
        entries.sort_by(|one, other| one.item.cmp(&other.item));
        Ok(entries)
    }

    /// Visits the folders of packages. Anything else in the store is none of its business.
    fn visit(&self, folder: &Folder, names: &mut Vec<String>, found: &mut Found) {
        for (name, kind) in found.readable(folder.entries()).unwrap_or_default() {
            self.progress.step();
            if names.len() < DEPTH {
                if kind.is_dir()
                    && let Some(inner) = found.readable(folder.below(Path::new(&name)))
                {
                    names.push(name);
                    self.visit(&inner, names, found);
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
            let entry = if kind.is_dir() && is_sha256(&name) {
                of_unpacked(folder, package, name)
            } else if kind.is_file()
                && let Some(sha256) = digest_in(&name)
            {
                of_archive(folder, package, sha256)
            } else {
                continue;
            };
            let entry = found.readable(entry);
            found.entries.extend(entry);
        }
    }

    fn visit_tools(&self, versions: &Folder, place: &'static str, tool: &str, found: &mut Found) {
        for (version, _) in found.readable(versions.entries()).unwrap_or_default() {
            self.progress.step();
            let Ok(folder) = versions.below(Path::new(&version)) else {
                continue;
            };
            let mut entry = Entry {
                item: Item::Tool {
                    name: tool.to_owned(),
                    version,
                    place,
                },
                size_bytes: 0,
                used: SystemTime::UNIX_EPOCH,
            };
            for (name, kind) in found.readable(folder.entries()).unwrap_or_default() {
                if kind.is_file()
                    && name != TOOL_LOCK
                    && let Some(metadata) = found.readable(fs::symlink_metadata(folder.at(name)))
                {
                    entry.size_bytes = entry.size_bytes.saturating_add(bytes_of(&metadata));
                    entry.used = entry.used.max(used(&metadata));
                }
            }
            if entry.size_bytes > 0 {
                found.entries.push(entry);
            }
        }
    }

    fn visit_modules(&self, repositories: &Folder, found: &mut Found) {
        for (name, _) in found.readable(repositories.entries()).unwrap_or_default() {
            self.progress.step();
            let Some(repository) = modules::repository_of(&name) else {
                continue;
            };
            let Ok(folder) = repositories.below(Path::new(&name)) else {
                continue;
            };
            for (name, kind) in found.readable(folder.entries()).unwrap_or_default() {
                if let Some(commit) = modules::commit_in(&name)
                    && kind.is_file()
                    && let Some(metadata) = found.readable(fs::symlink_metadata(folder.at(&name)))
                {
                    found.entries.push(Entry {
                        size_bytes: bytes_of(&metadata),
                        used: used(&metadata),
                        item: Item::Module {
                            repository: repository.clone(),
                            commit: commit.to_owned(),
                        },
                    });
                }
            }
        }
    }

    /// Whether an entry is what its name says. Unpacked files must be those of the archive beside them: `h1_of` reads it, and returns
    /// their digest. Nothing here can tell that of a tool or a
    /// module.
    pub fn verify(
        &self,
        entry: &Entry,
        h1_of: impl FnOnce(Archive) -> io::Result<String>,
    ) -> io::Result<bool> {
        match &entry.item {
            Item::Archive { package, sha256 } => {
                let folder = self.folder(package)?.ok_or(io::ErrorKind::NotFound)?;
                Ok(&self.digest(&folder.at(archive_name(sha256)))? == sha256)
            }
            Item::Unpacked { package, sha256 } => {
                let Some(mut archive) = self.open(package, sha256)? else {
                    return Ok(false);
                };
                if &copy_hashed(&mut archive, &mut io::sink())? != sha256 {
                    return Ok(false);
                }
                archive.rewind()?;
                self.has_unpacked(package, sha256, &h1_of(archive)?)
            }
            Item::Tool { .. } | Item::Module { .. } => Ok(true),
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
            Item::Tool {
                name,
                version,
                place,
            } => {
                let relative: PathBuf = [place, &**name, version].iter().collect();
                let folder = Folder::open(&self.root)?.below(&relative);
                match absent_is_none(folder)? {
                    Some(folder) => remove_tool(&folder, name),
                    None => Ok(true),
                }
            }
            Item::Module { repository, commit } => {
                self.remove_bundle(repository, commit)?;
                Ok(true)
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
        let sizes = entries.iter().map(|entry| entry.size_bytes);
        let mut kept_bytes = sizes.fold(0, u64::saturating_add);
        let is_over = kept_bytes > max_bytes;
        let (mut removed, mut failures) = (Vec::new(), Failures::default());
        for entry in entries {
            let is_unused = unused.is_some_and(|unused| age(&entry) > unused);
            let is_surplus = is_over && kept_bytes > max_bytes - max_bytes / 10;
            if (!is_unused && !is_surplus) || age(&entry) <= YOUNG {
                continue;
            }
            match self.remove(&entry) {
                Ok(true) => {
                    kept_bytes = kept_bytes.saturating_sub(entry.size_bytes);
                    removed.push(entry);
                }
                Ok(false) => {}
                Err(error) => failures.note(error),
            }
        }
        failures.report("entries of the provider store could not be removed");
        Ok(Pruned {
            removed,
            kept_bytes,
        })
    }

    /// Removes what killed runs have left.
    fn sweep(&self) {
        for place in PLACES {
            let tmp = Path::new(place).join(TMP);
            let tmp = Folder::open(&self.root).and_then(|root| root.below(&tmp));
            let Ok(tmp) = tmp else { continue };
            let mut failures = Failures::default();
            for (name, _) in tmp.entries().unwrap_or_default() {
                self.progress.step();
                let path = tmp.at(name);
                let found = fs::symlink_metadata(&path);
                let is_abandoned =
                    found.is_ok_and(|found| used(&found).elapsed().unwrap_or_default() > ABANDONED);
                if is_abandoned && let Err(error) = runtime::tree_removal::remove(&path) {
                    failures.note(error);
                }
            }
            failures.report("what killed runs have left in the provider store is not removed");
        }
    }
}

/// When something was used last, as its time of modification says. Others can set that. One that no clock has yet reached would be
/// the last for ever, so it counts as the first.
fn used(metadata: &Metadata) -> SystemTime {
    let latest = SystemTime::now() + YOUNG;
    let modified = metadata.modified().ok();
    modified
        .filter(|modified| (SystemTime::UNIX_EPOCH..latest).contains(modified))
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

fn of_archive(folder: &Folder, package: Package, sha256: &str) -> io::Result<Entry> {
    let metadata = fs::symlink_metadata(folder.at(archive_name(sha256)))?;
    Ok(Entry {
        size_bytes: bytes_of(&metadata),
        used: used(&metadata),
        item: Item::Archive {
            package,
            sha256: sha256.to_owned(),
        },
    })
}

fn of_unpacked(folder: &Folder, package: Package, sha256: String) -> io::Result<Entry> {
    let entry = folder.below(Path::new(&sha256))?;
    let noted = fs::symlink_metadata(entry.at(unpacked::DIGEST));
    // Without a digest, it is damaged, but it has a size and an age.
    let noted = noted.or_else(|_| fs::symlink_metadata(folder.at(&sha256)))?;
    Ok(Entry {
        size_bytes: entry.bytes(files_digest::LEVELS)?,
        used: used(&noted),
        item: Item::Unpacked { package, sha256 },
    })
}

/// Removes the files of a tool's version, the program first. The folder stays, because an executor may wait for its lock.
fn remove_tool(folder: &Folder, program: &str) -> io::Result<bool> {
    let mut held: Vec<File> = Vec::new();
    for name in [TOOL_LOCK, program] {
        let path = folder.at(name);
        // Nobody has locked anything but a file.
        let is_file = absent_is_none(fs::symlink_metadata(&path))?.is_some_and(|it| it.is_file());
        if !is_file {
            continue;
        }
        let Some(file) = absent_is_none(regular_file::open_unlinked(&path))? else {
            continue;
        };
        match file.try_lock() {
            Ok(()) => held.push(file),
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    let mut entries = folder.entries()?;
    entries.sort_by_key(|(name, _)| name != program);
    for (name, kind) in entries {
        if kind.is_file() && name != TOOL_LOCK {
            absent_is_none(fs::remove_file(folder.at(name)))?;
        }
    }
    Ok(true)
}
