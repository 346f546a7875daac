//! The folders of one run: where they lie, who may read them, and how they go away again. Knows nothing of what
//! the other modules put into them.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use super::{WorkspaceError, io_error};

const OWNER_ONLY_DIR: u32 = 0o700;
const OWNER_ONLY_FILE: u32 = 0o600;
/// A process that is just being killed may still add files while they are removed.
const REMOVE_ATTEMPTS: u32 = 4;

/// The folders of one run, 0700, below one folder of their own on the work dir.
///
/// They are removed by [`Layout::remove`], or as well as can be when the value is dropped.
#[derive(Debug)]
pub struct Layout {
    root: PathBuf,
    checkout: PathBuf,
    private: PathBuf,
    spool: PathBuf,
}

impl Layout {
    /// Makes the folders below `work_dir`, which is made too if it is missing.
    pub fn create(work_dir: &Path) -> Result<Self, WorkspaceError> {
        fs::create_dir_all(work_dir).map_err(io_error("create the work dir", work_dir))?;
        // One spelling from here on, so that paths can be compared with canonical ones.
        let work_dir = fs::canonicalize(work_dir).map_err(io_error("find", work_dir))?;
        let root = tempfile::Builder::new()
            .prefix("run-")
            .permissions(Permissions::from_mode(OWNER_ONLY_DIR))
            .tempdir_in(&work_dir)
            .map_err(io_error("create a folder in", &work_dir))?
            .keep();
        let layout = Self {
            checkout: root.join("checkout"),
            private: root.join("private"),
            spool: root.join("spool"),
            root,
        };
        for folder in [&layout.checkout, &layout.private, &layout.spool] {
            create_private_dir(folder).map_err(io_error("create", folder))?;
        }
        Ok(layout)
    }

    /// The clone root: work tree or unpacked content, readable by the user's code.
    pub fn checkout(&self) -> &Path {
        &self.checkout
    }

    /// Generated secrets.
    pub fn private(&self) -> &Path {
        &self.private
    }

    /// The log spool.
    pub fn spool(&self) -> &Path {
        &self.spool
    }

    /// Removes everything, also read-only files a tool left. Nothing to remove is no error.
    pub fn remove(self) -> Result<(), WorkspaceError> {
        remove_tree(&self.root).map_err(io_error("remove", &self.root))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.root) {
            tracing::warn!(path = %self.root.display(), %error, "could not remove the folders of the run");
        }
    }
}

/// Creates `path` and what is missing above it, for this user alone.
pub(super) fn create_private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(OWNER_ONLY_DIR)
        .create(path)
}

/// Writes a file only this user can read. An earlier file of that name is replaced, never written through.
pub(crate) fn write_private_file(path: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        create_private_dir(parent)?;
    }
    remove_file_if_present(path)?;
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(OWNER_ONLY_FILE)
        .open(path)?
        .write_all(content)
}

/// Removes a file or link; none being there is fine.
pub(super) fn remove_file_if_present(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes a whole tree, read-only folders in it included; none being there is fine.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    let mut attempt = 1;
    loop {
        match fs::remove_dir_all(path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if attempt == REMOVE_ATTEMPTS => return Err(error),
            Err(error) => {
                if error.kind() == io::ErrorKind::PermissionDenied {
                    open_folders(path)?;
                }
                attempt += 1;
            }
        }
    }
}

/// Makes every folder of a tree writable for its owner: files go by the permissions of the folder they are in.
fn open_folders(path: &Path) -> io::Result<()> {
    let kind = fs::symlink_metadata(path)?.file_type();
    if !kind.is_dir() {
        return Ok(());
    }
    fs::set_permissions(path, Permissions::from_mode(OWNER_ONLY_DIR))?;
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            open_folders(&entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn folders_and_private_files_belong_to_the_owner_alone() {
        let work = tempfile::tempdir().unwrap();
        let layout = Layout::create(&work.path().join("not/there/yet")).unwrap();
        for folder in [layout.checkout(), layout.private(), layout.spool()] {
            assert_eq!(mode(folder), 0o700);
        }
        let secret = layout.private().join("deep/secret");
        write_private_file(&secret, b"first").unwrap();
        write_private_file(&secret, b"2nd").unwrap();
        assert_eq!(mode(&secret), 0o600);
        assert_eq!(mode(secret.parent().unwrap()), 0o700);
        assert_eq!(fs::read(&secret).unwrap(), b"2nd");
    }

    #[test]
    fn two_runs_on_one_work_dir_do_not_meet() {
        let work = tempfile::tempdir().unwrap();
        let first = Layout::create(work.path()).unwrap();
        let second = Layout::create(work.path()).unwrap();
        assert_ne!(first.checkout(), second.checkout());
        first.remove().unwrap();
        assert!(second.checkout().is_dir());
    }

    #[test]
    fn removal_takes_read_only_trees_and_leaves_what_links_point_to() {
        let work = tempfile::tempdir().unwrap();
        let kept = work.path().join("kept");
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "x").unwrap();
        let layout = Layout::create(work.path()).unwrap();
        let root = layout.root.clone();
        let deep = layout.checkout().join("a/b");
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("file"), "x").unwrap();
        std::os::unix::fs::symlink(&kept, deep.join("link")).unwrap();
        fs::set_permissions(&deep, Permissions::from_mode(0o500)).unwrap();
        fs::set_permissions(layout.checkout().join("a"), Permissions::from_mode(0o500)).unwrap();
        layout.remove().unwrap();
        assert!(!root.exists());
        assert!(kept.join("file").exists());
    }

    // Root may remove from read-only folders, so the step that needs permissions is shown on its own.
    #[test]
    fn read_only_folders_are_opened_before_the_second_attempt() {
        let work = tempfile::tempdir().unwrap();
        let deep = work.path().join("a/b");
        fs::create_dir_all(&deep).unwrap();
        fs::set_permissions(&deep, Permissions::from_mode(0o500)).unwrap();
        open_folders(work.path()).unwrap();
        assert_eq!(mode(&deep), 0o700);
    }

    #[test]
    fn dropping_removes_and_a_missing_tree_is_no_error() {
        let work = tempfile::tempdir().unwrap();
        let root = {
            let layout = Layout::create(work.path()).unwrap();
            layout.root.clone()
        };
        assert!(!root.exists());
        remove_tree(&root).unwrap();
    }
}
