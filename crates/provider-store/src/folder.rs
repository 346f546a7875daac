//! Folders that are opened one below the other, so that a link in the place of one leads nowhere. Code of other runs may put links
//! into a store that it can write.

use std::ffi::OsStr;
use std::fs::{self, File, FileType};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};

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

    /// The same, and makes what is missing.
    pub(crate) fn make_below(&self, relative: &Path) -> io::Result<Self> {
        let mut found: Option<Self> = None;
        for name in relative {
            let parent = found.as_ref().unwrap_or(self);
            match mkdirat(parent, name, Mode::from_bits_truncate(0o755)) {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(error) => return Err(error.into()),
            }
            found = Some(parent.child(name)?);
        }
        found.ok_or_else(|| io::ErrorKind::InvalidInput.into())
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
        let mut bytes = 0;
        for (name, kind) in self.entries()? {
            if kind.is_file() {
                bytes += fs::symlink_metadata(self.at(&name))?.len();
            } else if kind.is_dir() && levels > 0 {
                bytes += self.below(Path::new(&name))?.bytes(levels - 1)?;
            }
        }
        Ok(bytes)
    }

    /// Writes what was renamed in this folder to the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        File::open(self.path())?.sync_all()
    }
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
