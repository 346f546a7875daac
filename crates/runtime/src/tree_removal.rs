//! Removes folders that the user's code has filled. Code can nest folders deeper than a stack or a path reaches, take the rights
//! of folders away, and replace them with links during the removal.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

/// A process that is being killed may still add files during the removal.
const ATTEMPTS: u32 = 4;
const OWNER_ONLY: u32 = 0o700;

/// Removes a whole tree, including read-only folders. A link goes itself, and a missing tree is no error.
///
/// It needs a few descriptors and no deep stack: what a folder contains moves up to the top before the folder is removed.
pub fn remove(path: &Path) -> io::Result<()> {
    let mut attempt = 1;
    loop {
        match remove_once(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(_) if attempt < ATTEMPTS => attempt += 1,
            done => return done,
        }
    }
}

fn remove_once(path: &Path) -> io::Result<()> {
    let top = match open_folder(AT_FDCWD, path.as_os_str()) {
        Ok(top) => top,
        Err(Errno::ENOTDIR | Errno::ELOOP) => return fs::remove_file(path),
        Err(error) => return Err(error.into()),
    };
    let mut moved = 0;
    let mut folders = remove_files(&top)?;
    while let Some(name) = folders.pop() {
        let folder = match open_folder(&top, &name) {
            Ok(folder) => folder,
            // Another process has removed it.
            Err(Errno::ENOENT) => continue,
            Err(error) => return Err(error.into()),
        };
        for inner in remove_files(&folder)? {
            folders.extend(move_up(&folder, &inner, &top, &mut moved)?);
        }
        absent_is_fine(unlinkat(&top, &*name, UnlinkatFlags::RemoveDir))?;
    }
    fs::remove_dir(path)
}

/// Opens a folder, which may have no rights, and gives its owner all rights. The rights of a folder decide about removing what is
/// in it.
fn open_folder(parent: impl std::os::fd::AsFd, name: &OsStr) -> nix::Result<File> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let folder = File::from(openat(parent, name, flags, Mode::empty())?);
    let mode = folder.metadata().map(|found| found.permissions().mode());
    if mode.is_ok_and(|mode| mode & OWNER_ONLY != OWNER_ONLY) {
        // If it belongs to another user, the next operation fails.
        let _ = fs::set_permissions(path_of(&folder), Permissions::from_mode(OWNER_ONLY));
    }
    Ok(folder)
}

fn path_of(folder: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()))
}

/// Removes the files and the empty folders of a folder. Returns its other folders.
fn remove_files(folder: &File) -> io::Result<Vec<OsString>> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(path_of(folder))? {
        let name = entry?.file_name();
        let removed = match unlinkat(folder, &*name, UnlinkatFlags::NoRemoveDir) {
            // It is a folder, or the file cannot be removed.
            Err(error @ (Errno::EISDIR | Errno::EPERM)) => {
                match unlinkat(folder, &*name, UnlinkatFlags::RemoveDir) {
                    Err(Errno::ENOTDIR) => Err(error),
                    Err(Errno::ENOTEMPTY | Errno::EEXIST) => {
                        folders.push(name);
                        Ok(())
                    }
                    removed => removed,
                }
            }
            removed => removed,
        };
        absent_is_fine(removed)?;
    }
    Ok(folders)
}

/// Moves a folder to the top, and returns its new name. `None`: another process has removed it.
fn move_up(
    folder: &File,
    name: &OsStr,
    top: &File,
    moved: &mut u64,
) -> io::Result<Option<OsString>> {
    // Only a folder that may be written can get another parent.
    let opened = open_folder(folder, name).map(drop);
    loop {
        let new = OsString::from(format!("removed-{moved}"));
        *moved += 1;
        match opened.and_then(|()| renameat(folder, name, top, &*new)) {
            Ok(()) => return Ok(Some(new)),
            Err(Errno::ENOENT) => return Ok(None),
            // There is something of this name.
            Err(Errno::EEXIST | Errno::ENOTEMPTY | Errno::ENOTDIR) if opened.is_ok() => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn absent_is_fine(removed: nix::Result<()>) -> io::Result<()> {
    match removed {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use nix::fcntl::AT_FDCWD;
    use nix::sys::resource::{Resource, setrlimit};
    use nix::sys::stat::mkdirat;
    use nix::unistd::{Uid, geteuid, setfsuid};

    use super::*;
    use crate::test_process;

    const LEVELS: u32 = 4_000;

    /// Nests folders: each new one takes the earlier ones in.
    fn nest(folder: &Path) {
        let name = |level: u32| {
            folder.join(if level.is_multiple_of(2) {
                "even"
            } else {
                "odd"
            })
        };
        for level in 0..LEVELS {
            mkdirat(AT_FDCWD, &name(level), Mode::S_IRWXU).unwrap();
            fs::write(name(level).join("file"), "x").unwrap();
            if level > 0 {
                fs::rename(name(level - 1), name(level).join("inner")).unwrap();
            }
        }
    }

    /// The limit on descriptors is that of the whole process, so the test has a process of its own.
    #[test]
    fn a_deep_tree_needs_neither_a_deep_stack_nor_many_descriptors() {
        let test =
            "tree_removal::tests::a_deep_tree_needs_neither_a_deep_stack_nor_many_descriptors";
        test_process::alone(test, || {
            let folder = tempfile::tempdir().unwrap();
            let tree = folder.path().join("tree");
            fs::create_dir(&tree).unwrap();
            nest(&tree);
            setrlimit(Resource::RLIMIT_NOFILE, 32, 32).unwrap();
            remove(&tree).unwrap();
            assert!(!tree.exists());
        });
    }

    /// Root may do everything. So a thread without the rights of root does it.
    #[test]
    fn folders_without_rights_are_removed_and_targets_of_links_are_not() {
        let as_nobody = || {
            if geteuid().is_root() {
                setfsuid(Uid::from_raw(65534));
            }
            let folder = tempfile::tempdir().unwrap();
            let (tree, kept) = (folder.path().join("tree"), folder.path().join("kept"));
            fs::create_dir(&kept).unwrap();
            fs::write(kept.join("file"), "x").unwrap();
            let deep = tree.join("a/b/c");
            fs::create_dir_all(&deep).unwrap();
            fs::write(deep.join("file"), "x").unwrap();
            // A name that the removal uses itself.
            fs::create_dir_all(tree.join("removed-0/full")).unwrap();
            symlink(&kept, deep.join("link")).unwrap();
            for (path, mode) in [("a/b/c", 0o000), ("a/b", 0o500), ("a", 0o400)] {
                fs::set_permissions(tree.join(path), Permissions::from_mode(mode)).unwrap();
            }
            remove(&tree).unwrap();
            assert!(!tree.exists());
            symlink(&kept, &tree).unwrap();
            remove(&tree).unwrap();
            assert!(!tree.is_symlink());
            remove(&tree).unwrap();
            assert!(kept.join("file").exists());
        };
        std::thread::spawn(as_nobody).join().unwrap();
    }
}
