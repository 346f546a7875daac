//! Changes of a file under a condition. Who changes it has a lock on its folder meanwhile, so that two cannot do it at once.

use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use runtime::private_file::private_folder;

use crate::error::{FOLDER, OBJECT, StoreError};
use crate::transfer::Condition;

/// The right to change a file, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    _folder: Option<File>,
}

/// The version of a file: each one that takes its place is another file.
pub(super) fn version(facts: &Metadata) -> String {
    format!("{}-{}-{}", facts.ino(), facts.mtime(), facts.mtime_nsec())
}

/// The condition that a file is still what it is now.
pub(super) fn unchanged(path: &Path) -> Result<Condition, StoreError> {
    Ok(Condition::of(now(path)?.as_deref()))
}

/// The version of what has the name of a file; `None` if nothing has it.
fn now(path: &Path) -> Result<Option<String>, StoreError> {
    match fs::symlink_metadata(path) {
        Ok(facts) => Ok(Some(version(&facts))),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(None),
            _ => Err(StoreError::read(OBJECT, path)(error)),
        },
    }
}

/// Waits for the right to change a file, and checks the condition.
pub(super) fn begin(path: &Path, condition: &Condition) -> Result<Turn, StoreError> {
    if *condition == Condition::Any {
        return Ok(Turn { _folder: None });
    }
    let folder = lock(path);
    if !condition.holds(now(path)?.as_deref()) {
        let object = path.display().to_string();
        return Err(StoreError::Changed { object });
    }
    Ok(Turn { _folder: folder })
}

/// Locks the folder of a file. On a disk without locks, the check alone has to do: a state must not become unwritable there.
fn lock(path: &Path) -> Option<File> {
    let folder = path.parent().expect("keys have a folder");
    let locked = File::open(folder).and_then(|folder| folder.lock().map(|()| folder));
    locked
        .inspect_err(|error| tracing::debug!(%error, "the folder of the store has no locks"))
        .ok()
}

/// Whether the disk of a folder has locks for folders. NFS has none.
pub(super) fn has_locks(folder: &Path) -> Result<bool, StoreError> {
    private_folder(folder).map_err(StoreError::write(FOLDER, folder))?;
    let open = || File::open(folder).map_err(StoreError::read(FOLDER, folder));
    let (one, two) = (open()?, open()?);
    let is_held = |lock: Result<(), TryLockError>| matches!(lock, Err(TryLockError::WouldBlock));
    let first = one.try_lock();
    // Some disks give every lock that is asked for.
    Ok(is_held(two.try_lock()) && (first.is_ok() || is_held(first)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_this_machine_has_locks_also_while_another_has_one() {
        let folder = tempfile::tempdir().unwrap();
        let other = File::open(folder.path()).unwrap();
        assert!(has_locks(folder.path()).unwrap());
        other.lock().unwrap();
        assert!(has_locks(folder.path()).unwrap());
    }
}
