//! The packages of providers that runs share. A package is the archive that its registry publishes. Its name in the store is its
//! SHA-256, so that whoever reads it can check it, and nobody has to trust who wrote it.
//!
//! Layout: `providers/v1/<host>/<namespace>/<type>/<version>/<os_arch>/<sha256>.zip`, and `providers/tmp` for what is not complete.
//! A package appears by a rename. Its time of modification says when it was used last.
//!
//! This crate knows neither registries nor lock files.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use job_contract::encoding::hex;
use runtime::regular_file;
use sha2::{Digest as _, Sha256};
use tracing::warn;

const PROVIDERS: &str = "providers/v1";
const TMP: &str = "providers/tmp";
const EXTENSION: &str = "zip";
/// What a killed run has left may be removed after this time.
const ABANDONED: Duration = Duration::from_hours(24);
/// A package that was just published is not removed.
const YOUNG: Duration = Duration::from_hours(1);
/// The components of a package's path.
const DEPTH: usize = 5;
const LONGEST_NAME: usize = 200;
const BUFFER_BYTES: usize = 256 * 1024;

/// A provider in one version for one platform.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Package {
    pub host: String,
    pub namespace: String,
    pub name: String,
    pub version: String,
    /// `linux_amd64`, say.
    pub platform: String,
}

impl Package {
    /// Returns the package of an address, such as `registry.terraform.io/hashicorp/aws`. `None` if one of the texts cannot be the
    /// name of a folder.
    pub fn new(address: &str, version: &str, platform: &str) -> Option<Self> {
        let mut parts = address.split('/');
        let address = (parts.next()?, parts.next()?, parts.next()?, parts.next());
        let (host, namespace, name, None) = address else {
            return None;
        };
        let texts = [host, namespace, name, version, platform];
        texts.into_iter().all(is_name).then(|| Self {
            host: host.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            version: version.to_owned(),
            platform: platform.to_owned(),
        })
    }

    /// The address of the provider.
    pub fn address(&self) -> String {
        format!("{}/{}/{}", self.host, self.namespace, self.name)
    }

    /// The folder of the package in the layout of a mirror in a file system.
    pub fn folder(&self) -> PathBuf {
        let parts = [
            &self.host,
            &self.namespace,
            &self.name,
            &self.version,
            &self.platform,
        ];
        parts.iter().collect()
    }
}

impl std::fmt::Display for Package {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} ({})", self.address(), self.version, self.platform)
    }
}

/// Whether a text is the name of a folder, and nothing else.
fn is_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_+:".contains(&byte);
    (1..=LONGEST_NAME).contains(&text.len()) && !text.starts_with('.') && text.bytes().all(is_plain)
}

fn is_sha256(text: &str) -> bool {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    text.len() == 64 && text.bytes().all(is_digit)
}

/// A package in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub package: Package,
    pub sha256: String,
    pub size_bytes: u64,
    /// When it was published or used last.
    pub used: SystemTime,
}

/// What removal of packages has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    pub removed: Vec<Entry>,
    /// The bytes of the packages that stay.
    pub kept_bytes: u64,
}

/// A store. Nothing is created before the first package.
#[derive(Clone, Debug)]
pub struct ProviderStore {
    root: PathBuf,
}

impl ProviderStore {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    fn folder(&self, package: &Package) -> PathBuf {
        self.root.join(PROVIDERS).join(package.folder())
    }

    /// Where a package is.
    pub fn path(&self, package: &Package, sha256: &str) -> PathBuf {
        self.folder(package).join(format!("{sha256}.{EXTENSION}"))
    }

    /// The digests of the archives that the store has of a package, as their names say.
    pub fn digests(&self, package: &Package) -> Vec<String> {
        let entries = fs::read_dir(self.folder(package));
        let entries = entries.into_iter().flatten().flatten();
        let mut digests: Vec<_> = entries
            .filter_map(|entry| digest_in(&entry.path()))
            .collect();
        digests.sort();
        digests
    }

    /// Opens an archive. `None` if there is none. Nothing says that it is what its name says, nor that it stays as it is: the caller
    /// checks what it has read.
    pub fn open(&self, package: &Package, sha256: &str) -> io::Result<Option<File>> {
        if !is_sha256(sha256) {
            return Ok(None);
        }
        // Code of a run may have put a link or a FIFO in its place.
        match regular_file::open_unlinked(&self.path(package, sha256)) {
            Ok(archive) => Ok(Some(archive)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Copies an archive into a new file. `false` if there is none. One that is not what its name says is removed, if it can
    /// be, and counts as none.
    pub fn copy(&self, package: &Package, sha256: &str, target: &Path) -> io::Result<bool> {
        let Some(mut source) = self.open(package, sha256)? else {
            return Ok(false);
        };
        let mut copy = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(target)?;
        let copied = copy_hashed(&mut source, &mut copy);
        let is_it = matches!(&copied, Ok(digest) if digest == sha256);
        if !is_it {
            fs::remove_file(target)?;
            copied?;
            warn!(%package, sha256, "an archive in the provider store is not what its name says");
            let _ = fs::remove_file(self.path(package, sha256));
            return Ok(false);
        }
        note_use(&source);
        Ok(true)
    }

    /// Adds an archive that the caller has verified. It is no error if another run has added it.
    pub fn publish(&self, package: &Package, archive: &Path, sha256: &str) -> io::Result<()> {
        let path = self.path(package, sha256);
        let size = fs::metadata(archive)?.len();
        if fs::symlink_metadata(&path).is_ok_and(|found| found.is_file() && found.len() == size) {
            return Ok(());
        }
        let (folder, tmp) = (self.folder(package), self.root.join(TMP));
        fs::create_dir_all(&folder)?;
        fs::create_dir_all(&tmp)?;
        let mut unfinished = tempfile::Builder::new().tempfile_in(&tmp)?;
        io::copy(&mut regular_file::open(archive)?, &mut unfinished)?;
        unfinished.flush()?;
        unfinished
            .as_file()
            .set_permissions(Permissions::from_mode(0o444))?;
        unfinished.as_file().sync_all()?;
        // What the volume has, and not what was sent to it.
        if sha256_of(unfinished.path())? != sha256 {
            return Err(io::Error::other("the volume has not kept what was written"));
        }
        let renamed = unfinished.persist(&path).map_err(|failed| failed.error);
        // A network volume may report an error of a rename that it has done.
        if let Err(error) = renamed
            && sha256_of(&path).ok().as_deref() != Some(sha256)
        {
            return Err(error);
        }
        File::open(&folder)?.sync_all()
    }

    /// All packages, by name.
    pub fn list(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        let top = self.root.join(PROVIDERS);
        visit(&top, &mut Vec::new(), &mut entries)?;
        entries.sort_by(|one, other| {
            (&one.package, &one.sha256).cmp(&(&other.package, &other.sha256))
        });
        Ok(entries)
    }

    /// Whether an archive is what its name says.
    pub fn verify(&self, entry: &Entry) -> io::Result<bool> {
        let path = self.path(&entry.package, &entry.sha256);
        Ok(sha256_of(&path)? == entry.sha256)
    }

    /// Removes an archive. It is no error if it is gone.
    pub fn remove(&self, entry: &Entry) -> io::Result<()> {
        match fs::remove_file(self.path(&entry.package, &entry.sha256)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes packages that were not used for `unused`, and then those that were used the longest time ago, until the rest has
    /// at most nine tenths of `max_bytes`, if all together have more than that. Runs use copies, so none misses what is removed.
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
            let is_surplus =
                is_over && kept_bytes > max_bytes - max_bytes / 10 && age(&entry) > YOUNG;
            if is_unused || is_surplus {
                self.remove(&entry)?;
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
        let left = fs::read_dir(self.root.join(TMP));
        for entry in left.into_iter().flatten().flatten() {
            let modified = entry.metadata().and_then(|found| found.modified());
            let is_abandoned = modified
                .ok()
                .and_then(|modified| modified.elapsed().ok())
                .is_some_and(|age| age > ABANDONED);
            if is_abandoned && let Err(error) = fs::remove_file(entry.path()) {
                warn!(%error, "what a killed run has left in the provider store is not removed");
            }
        }
    }
}

/// Notes that an archive of the store was used.
pub fn note_use(archive: &File) {
    // A store may be one that cannot be written.
    let _ = archive.set_modified(SystemTime::now());
}

/// The SHA-256 of a file's content, in lower-case hex.
pub fn sha256_of(path: &Path) -> io::Result<String> {
    copy_hashed(&mut regular_file::open_unlinked(path)?, &mut io::sink())
}

/// Copies, and returns the SHA-256 of the bytes that were written. The source is read once, so nobody can change it between the
/// copy and the check.
fn copy_hashed(source: &mut File, target: &mut impl io::Write) -> io::Result<String> {
    let (mut hasher, mut buffer) = (Sha256::new(), vec![0; BUFFER_BYTES]);
    loop {
        match source.read(&mut buffer)? {
            0 => return Ok(hex(&hasher.finalize())),
            read => {
                hasher.update(&buffer[..read]);
                target.write_all(&buffer[..read])?;
            }
        }
    }
}

fn digest_in(path: &Path) -> Option<String> {
    let is_archive = path.extension().is_some_and(|end| end == EXTENSION);
    let digest = path.file_stem()?.to_str()?;
    (is_archive && is_sha256(digest)).then(|| digest.to_owned())
}

/// Visits the folders of packages. Anything else in the store is none of its business.
fn visit(folder: &Path, names: &mut Vec<String>, found: &mut Vec<Entry>) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        let (path, metadata) = (entry.path(), entry.metadata()?);
        let Some(name) = entry.file_name().to_str().map(str::to_owned) else {
            continue;
        };
        if names.len() < DEPTH && metadata.is_dir() {
            names.push(name);
            visit(&path, names, found)?;
            names.pop();
        } else if let [host, namespace, name, version, platform] = &names[..]
            && metadata.is_file()
            && let Some(sha256) = digest_in(&path)
            && let Some(package) =
                Package::new(&format!("{host}/{namespace}/{name}"), version, platform)
        {
            found.push(Entry {
                package,
                sha256,
                size_bytes: metadata.len(),
                used: metadata.modified()?,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
