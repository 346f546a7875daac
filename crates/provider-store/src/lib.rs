//! The packages of providers that runs share. A package is the archive that its registry publishes. Its name in the store is its
//! SHA-256, so that whoever reads it can check it, and nobody has to trust who wrote it.
//!
//! Layout: `providers/v1/<host>/<namespace>/<type>/<version>/<os_arch>/<sha256>.zip`, beside it the same package unpacked, in
//! `<sha256>/files`, if somebody does that whom runs trust, and `providers/tmp` for what is not complete. A package appears by a
//! rename. Its time of modification says when it was used last. Beside them, `modules/v1` has the objects of repositories of modules.
//!
//! This crate knows neither registries nor lock files, and not how an archive is unpacked.
//!
//! - [`Package`] names a package. [`ProviderStore`] gives and takes archives; `unpacked` does so with unpacked packages.
//! - `eviction` lists and removes what is there, and also the tools below the same folder.
//! - `tool_files` has what tools of pods are made from, `modules` what clones of modules are made from.
//! - `folder` opens folders without following links. `files_digest` is the digest that the tool computes of a package's files.
//! - [`Progress`] tells a slow volume from one that hangs.

mod eviction;
mod files_digest;
mod folder;
mod modules;
mod package;
mod progress;
mod tool_files;
mod unpacked;

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use job_contract::encoding::hex;
use runtime::regular_file;
use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;
use tracing::warn;

pub use self::eviction::{Entry, Item, Pruned};
use self::folder::Folder;
pub use self::modules::{Bundle, LARGEST_BUNDLE};
pub use self::package::Package;
pub use self::progress::Progress;
pub use self::unpacked::{Access, Unpacked, is_on_writable_volume};

const PROVIDERS: &str = "providers/v1";
const TMP: &str = "providers/tmp";
const EXTENSION: &str = "zip";
/// Bytes of an archive. No provider has more.
pub const LARGEST_ARCHIVE: u64 = 2 * 1024 * 1024 * 1024;
const BUFFER_BYTES: usize = 256 * 1024;
/// So much is written to the volume before it is waited for. A slow volume shows by that that it goes on.
const SYNC_BYTES: usize = 32 * 1024 * 1024;

/// A store. Nothing is created before the first package.
#[derive(Clone, Debug)]
pub struct ProviderStore {
    root: PathBuf,
    progress: Progress,
}

impl ProviderStore {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            progress: Progress::default(),
        }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The part of this store that has the tools of a `place`.
    #[must_use]
    pub fn of_place(&self, place: &str) -> Self {
        Self {
            root: self.root.join(place),
            progress: self.progress.clone(),
        }
    }

    /// Counts while this value and its clones work.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    fn relative(package: &Package) -> PathBuf {
        Path::new(PROVIDERS).join(package.folder())
    }

    /// The open folder of a package. `None` if there is none.
    fn folder(&self, package: &Package) -> io::Result<Option<Folder>> {
        self.progress.step();
        let opened = Folder::open(&self.root).and_then(|root| root.below(&Self::relative(package)));
        self.progress.step();
        absent_is_none(opened)
    }

    fn tmp(&self) -> io::Result<Folder> {
        Folder::open(&self.root)?.make_below(Path::new(TMP))
    }

    /// Where the archive of a package is.
    pub fn path(&self, package: &Package, sha256: &str) -> PathBuf {
        let folder = self.root.join(Self::relative(package));
        folder.join(archive_name(sha256))
    }

    /// The digests of the archives that the store has of a package, as their names say.
    pub fn digests(&self, package: &Package) -> Vec<String> {
        let folder = self.folder(package).ok().flatten();
        let entries = folder.and_then(|folder| folder.entries().ok());
        let names = entries.into_iter().flatten();
        let mut digests: Vec<_> = names
            .filter_map(|(name, _)| digest_in(&name).map(str::to_owned))
            .collect();
        digests.sort();
        digests
    }

    /// Opens an archive. `None` if there is none. Nothing says that it is what its name says, nor that it stays as it is: the caller
    /// checks what it has read.
    pub fn open(&self, package: &Package, sha256: &str) -> io::Result<Option<Archive>> {
        if !is_sha256(sha256) {
            return Ok(None);
        }
        let Some(folder) = self.folder(package)? else {
            return Ok(None);
        };
        // Code of a run may have put a link or a FIFO in its place.
        let opened = regular_file::open_unlinked(&folder.at(archive_name(sha256)));
        let Some(file) = absent_is_none(opened)? else {
            return Ok(None);
        };
        if file.metadata()?.len() > LARGEST_ARCHIVE {
            Self::remove_altered(package, sha256, &folder);
            return Ok(None);
        }
        Ok(Some(Archive {
            file,
            progress: self.progress.clone(),
        }))
    }

    fn remove_altered(package: &Package, sha256: &str, folder: &Folder) {
        warn!(%package, sha256, "an archive in the provider store is not what its name says");
        let _ = fs::remove_file(folder.at(archive_name(sha256)));
    }

    /// Copies an archive into a new file. `false` if there is none. One that is not what its name says is removed, if it can
    /// be, and counts as none.
    pub fn copy(&self, package: &Package, sha256: &str, target: &Path) -> io::Result<bool> {
        let Some(mut source) = self.open(package, sha256)? else {
            return Ok(false);
        };
        let mut copy = new_file(target)?;
        let copied = copy_hashed(&mut source, &mut copy);
        let is_it = matches!(&copied, Ok(digest) if digest == sha256);
        if !is_it {
            fs::remove_file(target)?;
            copied?;
            if let Some(folder) = self.folder(package)? {
                Self::remove_altered(package, sha256, &folder);
            }
            return Ok(false);
        }
        source.note_use();
        Ok(true)
    }

    /// Adds an archive that the caller has verified. It is no error if another run has added it.
    pub fn publish(&self, package: &Package, archive: &Path, sha256: &str) -> io::Result<()> {
        if !is_sha256(sha256) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (relative, name) = (Self::relative(package), archive_name(sha256));
        self.add(&relative, &name, archive, sha256)
    }

    /// Adds a file with this digest.
    fn add(&self, relative: &Path, name: &str, source: &Path, sha256: &str) -> io::Result<()> {
        let size = fs::metadata(source)?.len();
        fs::create_dir_all(&self.root)?;
        let root = Folder::open(&self.root)?;
        let folder = root.make_below(relative)?;
        let found = fs::symlink_metadata(folder.at(name));
        if found.is_ok_and(|found| found.is_file() && found.len() == size) {
            return Ok(());
        }
        let tmp = self.tmp()?;
        self.progress.step();
        let mut unfinished = tempfile::Builder::new().tempfile_in(tmp.path())?;
        self.progress.step();
        self.write(&mut regular_file::open(source)?, unfinished.as_file())?;
        unfinished.flush()?;
        unfinished
            .as_file()
            .set_permissions(Permissions::from_mode(0o444))?;
        unfinished.as_file().sync_all()?;
        self.progress.step();
        // What the volume has, and not what was sent to it.
        if self.digest(unfinished.path())? != sha256 {
            return Err(io::Error::other("the volume has not kept what was written"));
        }
        self.progress.step();
        let renamed = Self::persist(unfinished, &folder.at(name), &tmp);
        self.progress.step();
        self.true_of(renamed, || Ok(self.digest(&folder.at(name))? == sha256))?;
        folder.sync()?;
        self.progress.step();
        Ok(())
    }

    /// Gives a complete file its name. A folder that others have put there would be in the way for ever.
    fn persist(unfinished: NamedTempFile, path: &Path, tmp: &Folder) -> io::Result<()> {
        let persisted = unfinished.persist(path).or_else(|failed| {
            if failed.error.kind() == io::ErrorKind::IsADirectory {
                Self::set_aside(path, tmp)?;
                return Ok(failed.file.persist(path)?);
            }
            Err(failed.error)
        });
        persisted.map(drop)
    }

    /// Moves something to what is not complete, where it is removed sooner or later. `None` if it is gone.
    fn set_aside(path: &Path, tmp: &Folder) -> io::Result<Option<PathBuf>> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let new = tmp.at(format!(
            "removed-{}-{}",
            std::process::id(),
            now.unwrap_or_default().as_nanos()
        ));
        let renamed = absent_is_none(fs::rename(path, &new))?;
        Ok(renamed.map(|()| new))
    }

    /// What a rename has done. A network volume may report an error of one that it has done.
    fn true_of(
        &self,
        renamed: io::Result<()>,
        is_there: impl FnOnce() -> io::Result<bool>,
    ) -> io::Result<()> {
        let renamed = tests_rename(renamed);
        match renamed {
            Err(error) if !is_there().unwrap_or(false) => Err(error),
            _ => {
                self.progress.step();
                Ok(())
            }
        }
    }

    /// Writes a file to the volume in pieces.
    fn write(&self, source: &mut File, mut target: &File) -> io::Result<()> {
        let (mut buffer, mut unsynced) = (vec![0; BUFFER_BYTES], 0);
        loop {
            let read = source.read(&mut buffer)?;
            if read == 0 {
                return Ok(());
            }
            target.write_all(&buffer[..read])?;
            unsynced += read;
            if unsynced >= SYNC_BYTES {
                target.sync_data()?;
                unsynced = 0;
            }
            self.progress.step();
        }
    }

    fn digest(&self, path: &Path) -> io::Result<String> {
        let mut archive = Archive {
            file: regular_file::open_unlinked(path)?,
            progress: self.progress.clone(),
        };
        copy_hashed(&mut archive, &mut io::sink())
    }
}

/// An archive in a store. Its reads count as progress.
#[derive(Debug)]
pub struct Archive {
    file: File,
    progress: Progress,
}

impl Archive {
    /// Notes that it was used.
    pub fn note_use(&self) {
        // A store may be one that cannot be written.
        let _ = self.file.set_modified(SystemTime::now());
    }

    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            file: self.file.try_clone()?,
            progress: self.progress.clone(),
        })
    }
}

impl Read for Archive {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer);
        self.progress.step();
        read
    }
}

impl Seek for Archive {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// The SHA-256 of a file's content, in lower-case hex.
pub fn sha256_of(path: &Path) -> io::Result<String> {
    copy_hashed(&mut regular_file::open_unlinked(path)?, &mut io::sink())
}

/// Copies, and returns the SHA-256 of the bytes that were written. The source is read once, so nobody can change it between the
/// copy and the check. It stops behind [`LARGEST_ARCHIVE`], so that the digest is another one: code of a run may have made a file of any length.
fn copy_hashed(source: &mut impl Read, target: &mut impl io::Write) -> io::Result<String> {
    let mut source = source.take(LARGEST_ARCHIVE + 1);
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

fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

fn absent_is_none<T>(opened: io::Result<T>) -> io::Result<Option<T>> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn archive_name(sha256: &str) -> String {
    format!("{sha256}.{EXTENSION}")
}

/// The digest in the name of an archive.
fn digest_in(name: &str) -> Option<&str> {
    let digest = name.strip_suffix(EXTENSION)?.strip_suffix('.')?;
    is_sha256(digest).then_some(digest)
}

fn is_sha256(text: &str) -> bool {
    is_hex(text, 64)
}

/// Whether a text is so many digits in lower-case hex.
fn is_hex(text: &str, digits: usize) -> bool {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    text.len() == digits && text.bytes().all(is_digit)
}

#[cfg(not(test))]
fn tests_rename(renamed: io::Result<()>) -> io::Result<()> {
    renamed
}

#[cfg(test)]
use tests::tests_rename;

#[cfg(test)]
mod tests;
