//! Folders that are opened one below the other, so that a link in the place of one leads nowhere. Code of other runs may put links
//! into a store that it can write.

use std::ffi::OsStr;
use std::fs::{self, File, FileType, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

/// Bytes of a block as the system counts them, on each file system.
const BLOCK: u64 = 512;

/// An open folder.
#[derive(Debug)]
pub(crate) struct Folder(File);

impl Folder {
    /// Opens the folder at a path of the operator, which may be a link.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Self(File::from(openat(
            AT_FDCWD,
            path,
            flags,
            Mode::empty(),
        )?)))
    }

    /// Opens a folder below this one. A link, or anything else that is no folder, is an error.
    pub(crate) fn below(&self, relative: &Path) -> io::Result<Self> {
        let mut found: Option<Self> = None;
        for name in relative {
            let parent = found.as_ref().unwrap_or(self);
            found = Some(parent.child(name)?);
        }
        found.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// The same, and makes what is missing. Anything else that is in the place of a folder goes: one file would keep all packages of
    /// a registry out.
    pub(crate) fn make_below(&self, relative: &Path) -> io::Result<Self> {
        let mut found: Option<Self> = None;
        for name in relative {
            let parent = found.as_ref().unwrap_or(self);
            let child = parent.make_child(name);
            found = Some(match child {
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                    unlinkat(parent, name, UnlinkatFlags::NoRemoveDir)?;
                    parent.make_child(name)?
                }
                made => made?,
            });
        }
        found.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    fn make_child(&self, name: &OsStr) -> io::Result<Self> {
        match mkdirat(self, name, Mode::from_bits_truncate(0o755)) {
            Ok(()) | Err(Errno::EEXIST) => self.child(name),
            Err(error) => Err(error.into()),
        }
    }

    fn child(&self, name: &OsStr) -> io::Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        match openat(self, name, flags, Mode::empty()) {
            Ok(child) => Ok(Self(File::from(child))),
            Err(Errno::ELOOP | Errno::ENOTDIR) => {
                let text = format!("`{}` is no folder", name.display());
                Err(io::Error::new(io::ErrorKind::NotADirectory, text))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The path of something in this folder, which nobody can give another meaning.
    pub(crate) fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path().join(name)
    }

    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }

    /// The names in this folder that are texts, in no order.
    pub(crate) fn entries(&self) -> io::Result<Vec<(String, FileType)>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(self.path())? {
            let entry = entry?;
            if let Ok(name) = entry.file_name().into_string() {
                entries.push((name, entry.file_type()?));
            }
        }
        Ok(entries)
    }

    /// The bytes of all files below this folder. Links and what is nested too deep do not count.
    pub(crate) fn bytes(&self, levels: usize) -> io::Result<u64> {
        let mut bytes: u64 = 0;
        for (name, kind) in self.entries()? {
            if kind.is_file() {
                bytes = bytes.saturating_add(bytes_of(&fs::symlink_metadata(self.at(&name))?));
            } else if kind.is_dir() && levels > 0 {
                bytes = bytes.saturating_add(self.below(Path::new(&name))?.bytes(levels - 1)?);
            }
        }
        Ok(bytes)
    }

    /// Writes what was renamed in this folder to the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        File::open(self.path())?.sync_all()
    }
}

/// The bytes of a file that the disk has. A file with holes may seem to be larger than any disk.
pub(crate) fn bytes_of(metadata: &Metadata) -> u64 {
    let allocated = metadata.blocks().saturating_mul(BLOCK);
    metadata.len().min(allocated)
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
