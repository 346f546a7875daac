//! Unpacked packages. A run uses them where they are, so only somebody whom runs trust makes them, and a run uses them only if it
//! cannot write them. It keeps a shared lock on the file beside them for as long as it lives, and who removes them wants the
//! exclusive one.

use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nix::sys::statfs::{
    BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, F2FS_SUPER_MAGIC, FsType, OVERLAYFS_SUPER_MAGIC,
    TMPFS_MAGIC, XFS_SUPER_MAGIC, fstatfs,
};
use nix::sys::statvfs::{FsFlags, fstatvfs};
use runtime::regular_file;

use super::{Package, Progress, ProviderStore, files_digest, is_sha256};
use crate::folder::Folder;

pub(crate) const FILES: &str = "files";
/// The digest of the files, beside them. It also has the locks.
pub(crate) const DIGEST: &str = "h1";
const LONGEST_DIGEST: u64 = 100;
/// The characters of a SHA-256 in base64.
const DIGEST_CHARACTERS: usize = 44;
/// File systems on a disk of this machine. Others may be a network, where a lock, a file that is mapped, or the server may vanish.
/// ZFS has no name in the list of the kernel.
const LOCAL: [FsType; 6] = [
    EXT4_SUPER_MAGIC,
    XFS_SUPER_MAGIC,
    BTRFS_SUPER_MAGIC,
    F2FS_SUPER_MAGIC,
    TMPFS_MAGIC,
    OVERLAYFS_SUPER_MAGIC,
];

/// How a run uses packages of a store that it cannot write. One that it can write is always copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Where they are, if they are on a disk of this machine.
    #[default]
    Auto,
    /// Where they are.
    Link,
    Copy,
}

impl FromStr for Access {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "link" => Ok(Self::Link),
            "copy" => Ok(Self::Copy),
            _ => Err("expected `auto`, `link` or `copy`"),
        }
    }
}

/// An unpacked package that is not removed while this value lives.
#[derive(Debug)]
pub struct Unpacked {
    pub package: Package,
    /// The folder of its files.
    pub files: PathBuf,
    /// The digest of its files, `h1:…`, which was verified when they were published.
    pub h1: String,
    _lock: File,
}

impl Unpacked {
    /// Whether the files have this digest now. A disk may have damaged them.
    pub fn is_intact(&self, progress: &Progress) -> bool {
        let digest = Folder::open(&self.files).and_then(|files| files_digest::of(&files, progress));
        digest.is_ok_and(|digest| digest == self.h1)
    }
}

impl ProviderStore {
    /// Holds an unpacked package. `None` if the store has none, if somebody is about to remove it, or if this process could write
    /// it.
    pub fn hold(
        &self,
        package: &Package,
        sha256: &str,
        access: Access,
    ) -> io::Result<Option<Unpacked>> {
        if access == Access::Copy || !is_sha256(sha256) {
            return Ok(None);
        }
        let Some(folder) = self.folder(package)? else {
            return Ok(None);
        };
        // For nearly all packages of nearly all stores, this is the end.
        if !may_link(&folder, access)? {
            return Ok(None);
        }
        let Some(entry) = super::absent_is_none(folder.below(Path::new(sha256)))? else {
            return Ok(None);
        };
        entry.below(Path::new(FILES))?;
        let lock = regular_file::open_unlinked(&entry.at(DIGEST))?;
        match lock.try_lock_shared() {
            Ok(()) => {}
            // Somebody removes it, or hostile code has the lock.
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // It may have been removed before it was locked.
        let Some(still) = super::absent_is_none(folder.below(Path::new(sha256)))? else {
            return Ok(None);
        };
        let (locked, named) = (lock.metadata()?, fs::symlink_metadata(still.at(DIGEST))?);
        // What is mounted there may be another file system than that of the folder.
        if (locked.dev(), locked.ino()) != (named.dev(), named.ino()) || !may_link(&still, access)?
        {
            return Ok(None);
        }
        let h1 = regular_file::read_text_unlinked(&still.at(DIGEST), LONGEST_DIGEST)?;
        self.progress.step();
        // It comes into the lock file, of which the tool reads nothing if one digest is none.
        if !is_h1(&h1) {
            return Ok(None);
        }
        let root = std::path::absolute(&self.root)?;
        let files = root.join(Self::relative(package)).join(sha256).join(FILES);
        Ok(Some(Unpacked {
            package: package.clone(),
            files,
            h1,
            _lock: lock,
        }))
    }

    /// Whether runs may link to what is in the store, if it is mounted read-only for them.
    pub fn is_on_disk_of_node(&self) -> io::Result<bool> {
        Ok(LOCAL.contains(&fstatfs(&File::open(&self.root)?)?.filesystem_type()))
    }

    /// Adds the files of an archive that the caller has verified. `h1` is their digest, as the archive has it. `unpack` unpacks it into a
    /// folder. It is no error if they are there.
    pub fn publish_unpacked(
        &self,
        package: &Package,
        sha256: &str,
        h1: &str,
        unpack: impl FnOnce(&Path) -> io::Result<()>,
    ) -> io::Result<()> {
        if !is_sha256(sha256) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        fs::create_dir_all(&self.root)?;
        let folder = Folder::open(&self.root)?.make_below(&Self::relative(package))?;
        if self.is_unpacked(&folder, sha256, h1).unwrap_or(false) {
            return Ok(());
        }
        self.progress.step();
        let tmp = self.tmp()?;
        let unfinished = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o755))
            .tempdir_in(tmp.path())?;
        self.progress.step();
        let files = unfinished.path().join(FILES);
        unpack(&files)?;
        self.progress.step();
        sync_below(&Folder::open(&files)?)?;
        let mut digest = File::create_new(unfinished.path().join(DIGEST))?;
        digest.write_all(h1.as_bytes())?;
        digest.set_permissions(Permissions::from_mode(0o444))?;
        digest.sync_all()?;
        let entry = Folder::open(unfinished.path())?;
        entry.sync()?;
        self.progress.step();
        // What the volume has, and not what was sent to it.
        if files_digest::of(&entry.below(Path::new(FILES))?, &self.progress)? != h1 {
            return Err(io::Error::other("the volume has not kept what was written"));
        }
        self.progress.step();
        // One that is damaged or forged is in the way.
        if fs::symlink_metadata(folder.at(sha256)).is_ok() {
            self.discard(&folder, sha256)?;
        }
        let renamed = fs::rename(unfinished.path(), folder.at(sha256));
        self.progress.step();
        // Another one may have published the same.
        self.true_of(renamed, || self.is_unpacked(&folder, sha256, h1))?;
        folder.sync()?;
        self.progress.step();
        Ok(())
    }

    /// Whether the files of a package are there, and have the digest `h1`, which the caller has from the archive. The one beside them
    /// says nothing by itself: who could write the files could write it too.
    pub fn has_unpacked(&self, package: &Package, sha256: &str, h1: &str) -> io::Result<bool> {
        match self.folder(package)? {
            Some(folder) => self.is_unpacked(&folder, sha256, h1),
            None => Ok(false),
        }
    }

    fn is_unpacked(&self, folder: &Folder, sha256: &str, h1: &str) -> io::Result<bool> {
        let Some(entry) = super::absent_is_none(folder.below(Path::new(sha256)))? else {
            return Ok(false);
        };
        let noted = regular_file::read_text_unlinked(&entry.at(DIGEST), LONGEST_DIGEST)?;
        Ok(noted == h1 && files_digest::of(&entry.below(Path::new(FILES))?, &self.progress)? == h1)
    }

    /// Removes unpacked files, unless a run holds them. Readers see all of them or none.
    pub(crate) fn discard(&self, folder: &Folder, name: &str) -> io::Result<bool> {
        let lock = regular_file::open_unlinked(&folder.at(name).join(DIGEST));
        let lock = lock.ok();
        if let Some(lock) = &lock {
            match lock.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(false),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        let tmp = self.tmp()?;
        let Some(aside) = Self::set_aside(&folder.at(name), &tmp)? else {
            return Ok(true);
        };
        self.progress.step();
        runtime::tree_removal::remove(&aside)?;
        self.progress.step();
        Ok(true)
    }
}

fn is_h1(text: &str) -> bool {
    let is_base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte);
    let digest = text.strip_prefix("h1:").unwrap_or_default();
    digest.len() == DIGEST_CHARACTERS && digest.bytes().all(is_base64)
}

/// Whether what is in this folder can be used where it is.
fn may_link(folder: &Folder, access: Access) -> io::Result<bool> {
    let is_read_only = fstatvfs(folder)?.flags().contains(FsFlags::ST_RDONLY);
    let is_local = || Ok::<_, io::Error>(LOCAL.contains(&fstatfs(folder)?.filesystem_type()));
    Ok(is_read_only && (access == Access::Link || is_local()?))
}

/// Whether a folder, which may not exist yet, is on a volume that is mounted beside the root of this process, and can be written.
pub fn is_on_writable_volume(path: &Path) -> io::Result<bool> {
    let path = std::path::absolute(path)?;
    for existing in path.ancestors() {
        if let Some(folder) = super::absent_is_none(Folder::open(existing))? {
            let is_read_only = fstatvfs(&folder)?.flags().contains(FsFlags::ST_RDONLY);
            let (here, root) = (fs::metadata(folder.path())?, fs::metadata("/")?);
            return Ok(!is_read_only && here.dev() != root.dev());
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// Writes all files below a folder to the disk, and the folders after them.
fn sync_below(folder: &Folder) -> io::Result<()> {
    for (name, kind) in folder.entries()? {
        if kind.is_dir() {
            sync_below(&folder.below(Path::new(&name))?)?;
        } else {
            regular_file::open_unlinked(&folder.at(&name))?.sync_all()?;
        }
    }
    folder.sync()
}
