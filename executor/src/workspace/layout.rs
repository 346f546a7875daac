//! The folders of one run: their paths, their permissions, and their removal. This module knows nothing of the files
//! that others put into them.
//!
//! The work tree of a workspace has the same path in all its steps. Configurations may keep absolute paths, such as
//! `abspath(path.module)`, in plans and states, and an apply must find the paths of its plan. So executors that share a
//! folder take turns, with a lock that the kernel releases when its holder dies. All other folders belong to one run.
//!
//! The parent of the work tree belongs to the run too, because modules and scripts write into `..`. What a killed executor has left
//! running keeps its folders until it ends: it may be a tool that still changes something.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nix::fcntl::OFlag;
use runtime::{folder_users, regular_file, tree_removal};

use super::io_error;
use crate::error::StepError;

const OWNER_ONLY_DIR: u32 = 0o700;
const OWNER_ONLY_FILE: u32 = 0o600;
const RUN_PREFIX: &str = "run-";
const TREE_LOCK: &str = "lock";
/// The work tree in the folder of a workspace.
const TREE: &str = "tree";
/// Larger than any holder's name.
const MAX_HOLDER_BYTES: u64 = 512;

/// The parent folders of a run's folders.
#[derive(Clone, Copy, Debug)]
pub struct LayoutConfig<'p> {
    /// The parent of folders that belong to this run alone.
    pub work_dir: &'p Path,
    /// The parent of the work trees of workspaces.
    pub checkouts: &'p Path,
    /// Identifies the organization and the workspace.
    pub name: &'p str,
}

/// The folders of one run, 0700.
///
/// [`Layout::remove`] removes them. Dropping the value removes them too, but only logs errors. The next executor
/// removes the folders of a killed one.
#[derive(Debug)]
pub struct Layout {
    root: PathBuf,
    private: PathBuf,
    spool: PathBuf,
    /// The folder of the workspace, which holds the work tree and what code of the run writes beside it.
    workspace: PathBuf,
    checkout: PathBuf,
    checkout_lock: PathBuf,
    /// The work tree belongs to this run while this file is locked.
    turn: OnceLock<File>,
    /// The run's own folder. It is locked for the whole run.
    _root_lock: Option<File>,
}

/// Whose turn it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn {
    /// This run holds the work tree, which is empty.
    Taken,
    /// Another run holds it.
    Held,
    /// Its holder was killed, and these processes still use it.
    Left(Vec<u32>),
}

impl Layout {
    /// Creates the run's own folders, and their parents if these are missing. The work tree is created when it is this
    /// run's turn.
    pub fn create(config: LayoutConfig<'_>) -> Result<Self, StepError> {
        let work_dir = create_folder(config.work_dir)?;
        let checkouts = create_folder(config.checkouts)?;
        // The lock covers sweeping and creating, so that a new folder is never found without its lock.
        let _area_lock = lock_folder(&work_dir);
        sweep_runs(&work_dir);
        sweep_trees(&checkouts);
        let root = tempfile::Builder::new()
            .prefix(RUN_PREFIX)
            .permissions(Permissions::from_mode(OWNER_ONLY_DIR))
            .tempdir_in(&work_dir)
            .map_err(io_error("create a folder in", &work_dir))?
            .keep();
        let workspace = checkouts.join(config.name);
        let layout = Self {
            private: root.join("private"),
            spool: root.join("spool"),
            checkout: workspace.join(TREE),
            workspace,
            checkout_lock: checkouts.join(format!("{}.{TREE_LOCK}", config.name)),
            turn: OnceLock::new(),
            _root_lock: lock_folder(&root),
            root,
        };
        for folder in [&layout.private, &layout.spool] {
            create_private_dir(folder).map_err(io_error("create", folder))?;
        }
        Ok(layout)
    }

    /// Takes the work tree for this run, and empties it and its parent, unless another run holds it, or processes of a killed
    /// one use it. Other runs read `holder`.
    pub fn try_take_turn(&self, holder: &str) -> Result<Turn, StepError> {
        let path = &self.checkout_lock;
        let Some(mut lock) = try_lock(path).map_err(io_error("lock", path))? else {
            return Ok(Turn::Held);
        };
        let left = processes_left(&self.workspace);
        if !left.is_empty() {
            return Ok(Turn::Left(left));
        }
        tree_removal::remove(&self.workspace).map_err(io_error("remove", &self.workspace))?;
        create_private_dir(&self.checkout).map_err(io_error("create", &self.checkout))?;
        lock.set_len(0)
            .and_then(|()| lock.write_all(holder.as_bytes()))
            .map_err(io_error("write", path))?;
        // A run takes its turn only once. A second lock would be released here.
        let _ = self.turn.set(lock);
        Ok(Turn::Taken)
    }

    /// The holder of the work tree, as the holder wrote it.
    pub fn holder(&self) -> String {
        regular_file::read_text(&self.checkout_lock, MAX_HOLDER_BYTES)
            .unwrap_or_default()
            .chars()
            .filter(|char| !char.is_control())
            .collect()
    }

    /// The clone root: work tree or unpacked content. The user's code can read it.
    pub fn checkout(&self) -> &Path {
        &self.checkout
    }

    /// The folder of generated secrets.
    pub fn private(&self) -> &Path {
        &self.private
    }

    /// The folder of the log spool.
    pub fn spool(&self) -> &Path {
        &self.spool
    }

    /// Removes all folders, including read-only files of a tool. Missing folders are no error.
    pub fn remove(mut self) -> Result<(), StepError> {
        self.clear()
    }

    /// This has an effect only once, because another run may hold the work tree afterwards.
    fn clear(&mut self) -> Result<(), StepError> {
        let tree = match self.turn.take() {
            None => Ok(()),
            Some(_lock) => tree_removal::remove(&self.workspace)
                .and_then(|()| remove_file_if_present(&self.checkout_lock))
                .map_err(io_error("remove", &self.workspace)),
        };
        tree_removal::remove(&self.root).map_err(io_error("remove", &self.root))?;
        tree
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        if let Err(error) = self.clear() {
            tracing::warn!(%error, "could not remove the folders of the run");
        }
    }
}

/// Creates a folder, and returns its canonical path, so that it can be compared with other canonical paths.
fn create_folder(folder: &Path) -> Result<PathBuf, StepError> {
    create_private_dir(folder).map_err(io_error("create the folder", folder))?;
    fs::canonicalize(folder).map_err(io_error("find", folder))
}

/// Locks a folder itself while the file is open. Without locks in the file system, no folder is swept.
fn lock_folder(folder: &Path) -> Option<File> {
    let locked = File::open(folder).and_then(|file| file.lock().map(|()| file));
    locked
        .inspect_err(|error| {
            tracing::warn!(%error, path = %folder.display(), "could not lock a folder of the run");
        })
        .ok()
}

fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .mode(OWNER_ONLY_FILE)
        .open(path)
}

/// Opens and locks the file; `None` while another process holds the lock. The last holder may have removed the file
/// meanwhile. A lock on a removed file excludes no other process, so the path is then opened again.
fn try_lock(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file = open_lock(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let opened = file.metadata()?;
        match fs::symlink_metadata(path) {
            Ok(current) if (current.dev(), current.ino()) == (opened.dev(), opened.ino()) => {
                return Ok(Some(file));
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
}

/// The processes that a killed executor has left in its folder. Without the folder there are none.
fn processes_left(folder: &Path) -> Vec<u32> {
    if folder.exists() {
        folder_users::using(folder)
    } else {
        Vec::new()
    }
}

/// Removes the folders of runs that have ended. An error does not stop this run.
fn sweep_runs(work_dir: &Path) {
    for entry in fs::read_dir(work_dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_run = entry.file_name().to_string_lossy().starts_with(RUN_PREFIX);
        if is_run
            // Code of a run can put a FIFO in its place.
            && let Ok(folder) = OpenOptions::new()
                .read(true)
                .custom_flags(OFlag::O_DIRECTORY.bits())
                .open(&path)
            && folder.try_lock().is_ok()
            && folder_users::knowing(&path).is_empty()
        {
            log_removal(&path, tree_removal::remove(&path));
        }
    }
}

/// Removes the work trees of runs that have ended, with their parents.
fn sweep_trees(checkouts: &Path) {
    for entry in fs::read_dir(checkouts).into_iter().flatten().flatten() {
        let lock = entry.path();
        if lock.extension().is_some_and(|end| end == TREE_LOCK)
            && let Ok(Some(_held)) = try_lock(&lock)
        {
            let workspace = lock.with_extension("");
            if processes_left(&workspace).is_empty() {
                let removed = tree_removal::remove(&workspace);
                let removed = removed.and_then(|()| remove_file_if_present(&lock));
                log_removal(&workspace, removed);
            }
        }
    }
}

fn log_removal(path: &Path, removed: io::Result<()>) {
    if let Err(error) = removed {
        tracing::warn!(%error, path = %path.display(), "could not remove the files of a killed executor");
    }
}

/// Creates `path` and its missing parents, for this user alone.
pub(super) fn create_private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(OWNER_ONLY_DIR)
        .create(path)
}

/// Writes a file that only this user can read. It replaces an earlier file or link of that name.
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

/// Removes a file or link. A missing one is no error.
pub(crate) fn remove_file_if_present(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn layout_of(work: &Path, name: &str) -> Layout {
        Layout::create(LayoutConfig {
            work_dir: work,
            checkouts: &work.join("workspaces"),
            name,
        })
        .unwrap()
    }

    fn layout(work: &Path) -> Layout {
        layout_of(work, "o_w")
    }

    #[test]
    fn folders_and_private_files_belong_to_the_owner_alone() {
        let work = tempfile::tempdir().unwrap();
        let layout = layout(&work.path().join("not/there/yet"));
        assert_eq!(layout.try_take_turn("").unwrap(), Turn::Taken);
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
    fn runs_of_one_workspace_share_only_the_tree_and_take_turns() {
        let work = tempfile::tempdir().unwrap();
        let first = layout(work.path());
        let second = layout(work.path());
        assert_eq!(first.checkout(), second.checkout());
        assert_ne!(first.private(), second.private());
        assert_eq!(first.try_take_turn("job 1, step a").unwrap(), Turn::Taken);
        fs::write(first.checkout().join("main.tf"), "").unwrap();
        assert_eq!(second.try_take_turn("job 2, step b").unwrap(), Turn::Held);
        assert_eq!(second.holder(), "job 1, step a");

        // Meanwhile a run of another workspace starts and ends.
        let other = layout_of(work.path(), "o_other");
        assert_eq!(other.try_take_turn("").unwrap(), Turn::Taken);
        other.remove().unwrap();

        assert!(first.checkout().join("main.tf").exists());
        first.remove().unwrap();
        assert!(second.private().is_dir());
        assert_eq!(second.try_take_turn("job 2, step b").unwrap(), Turn::Taken);
        assert_eq!(fs::read_dir(second.checkout()).unwrap().count(), 0);
        second.remove().unwrap();
        assert_eq!(
            fs::read_dir(work.path().join("workspaces"))
                .unwrap()
                .count(),
            0
        );
    }

    #[test]
    fn the_parent_of_the_tree_is_empty_before_a_run_and_removed_after_it() {
        let work = tempfile::tempdir().unwrap();
        let first = layout(work.path());
        assert_eq!(first.try_take_turn("").unwrap(), Turn::Taken);
        let shared = first.checkout().join("../shared.txt");
        fs::write(&shared, "of the first").unwrap();
        let other = layout_of(work.path(), "o_other");
        assert_eq!(other.try_take_turn("").unwrap(), Turn::Taken);
        assert!(!other.checkout().join("../shared.txt").exists());
        first.remove().unwrap();

        let second = layout(work.path());
        // Also what a killed executor has left.
        create_private_dir(second.checkout()).unwrap();
        fs::write(&shared, "of a killed one").unwrap();
        assert_eq!(second.try_take_turn("").unwrap(), Turn::Taken);
        let parent = second.checkout().parent().unwrap();
        assert_eq!(fs::read_dir(parent).unwrap().count(), 1);
        let (parent, shared) = (parent.to_owned(), shared.exists());
        second.remove().unwrap();
        assert!(!shared && !parent.exists());
    }

    #[test]
    fn what_a_killed_executor_has_left_running_keeps_its_folders_until_it_ends() {
        let work = tempfile::tempdir().unwrap();
        let folder = fs::canonicalize(work.path()).unwrap();
        let (run, tree) = (
            folder.join("run-killed"),
            folder.join("workspaces/o_w/tree"),
        );
        let state = tree.join("errored.tfstate");
        for folder in [&run, &tree] {
            create_private_dir(folder).unwrap();
        }
        fs::write(&state, "{}").unwrap();
        fs::write(folder.join("workspaces/o_w.lock"), "job 1").unwrap();
        let mut tool = Command::new("cat")
            .current_dir(&tree)
            .arg("-")
            .arg(run.join("private/variables"))
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();

        let next = layout(work.path());
        assert_eq!(next.try_take_turn("").unwrap(), Turn::Left(vec![tool.id()]));
        assert!(state.exists() && run.exists());
        assert_eq!(next.holder(), "job 1");

        drop(tool.stdin.take());
        tool.wait().unwrap();
        assert_eq!(next.try_take_turn("").unwrap(), Turn::Taken);
        assert!(!state.exists());
        drop(layout_of(work.path(), "o_other"));
        assert!(!run.exists());
    }

    #[test]
    fn a_run_without_its_turn_leaves_the_tree_unchanged() {
        let work = tempfile::tempdir().unwrap();
        let first = layout(work.path());
        assert_eq!(first.try_take_turn("").unwrap(), Turn::Taken);
        drop(layout(work.path()));
        assert!(first.checkout().is_dir());
    }

    /// No process holds the lock of the files of a killed executor.
    #[test]
    fn the_next_start_removes_what_a_killed_executor_left() {
        let work = tempfile::tempdir().unwrap();
        let leftovers = [
            work.path().join("run-killed"),
            work.path().join("workspaces/o_killed"),
        ];
        for folder in &leftovers {
            create_private_dir(&folder.join("private")).unwrap();
            fs::write(folder.join("private/token"), "secret").unwrap();
        }
        fs::write(work.path().join("workspaces/o_killed.lock"), "job 1").unwrap();
        let next = layout(work.path());
        for folder in leftovers {
            assert!(!folder.exists(), "{}", folder.display());
        }
        // Old files in the run's own workspace are removed even without a lock file.
        create_private_dir(&next.checkout().join("old")).unwrap();
        assert_eq!(next.try_take_turn("").unwrap(), Turn::Taken);
        assert_eq!(fs::read_dir(next.checkout()).unwrap().count(), 0);
    }

    /// Root may remove files from read-only folders. So a thread without the rights of root does it.
    #[test]
    fn removal_includes_read_only_trees_but_not_the_targets_of_links() {
        let as_nobody = || {
            if nix::unistd::geteuid().is_root() {
                nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
            }
            remove_read_only_tree();
        };
        std::thread::spawn(as_nobody).join().unwrap();
    }

    fn remove_read_only_tree() {
        let work = tempfile::tempdir().unwrap();
        let kept = work.path().join("kept");
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "x").unwrap();
        let layout = layout(work.path());
        assert_eq!(layout.try_take_turn("").unwrap(), Turn::Taken);
        let (root, checkout) = (layout.root.clone(), layout.checkout.clone());
        let deep = layout.checkout().join("a/b");
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("file"), "x").unwrap();
        std::os::unix::fs::symlink(&kept, deep.join("link")).unwrap();
        fs::set_permissions(&deep, Permissions::from_mode(0o500)).unwrap();
        fs::set_permissions(layout.checkout().join("a"), Permissions::from_mode(0o500)).unwrap();
        let refused = fs::remove_file(deep.join("file")).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        layout.remove().unwrap();
        assert!(!root.exists());
        assert!(!checkout.exists());
        assert!(kept.join("file").exists());
    }

    #[test]
    fn dropping_removes_and_a_missing_tree_is_no_error() {
        let work = tempfile::tempdir().unwrap();
        let root = {
            let layout = layout(work.path());
            layout.root.clone()
        };
        assert!(!root.exists());
        tree_removal::remove(&root).unwrap();
    }
}
