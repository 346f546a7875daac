//! Changes of a file under a condition. Who changes it has a lock on its folder meanwhile, so that two cannot do it at once.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::error::{OBJECT, StoreError};
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

/// Waits for the right to change a file, and checks the condition.
pub(super) fn begin(path: &Path, condition: &Condition) -> Result<Turn, StoreError> {
    if *condition == Condition::Any {
        return Ok(Turn { _folder: None });
    }
    let folder = lock(path);
    let now = match fs::symlink_metadata(path) {
        Ok(facts) => Some(version(&facts)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(StoreError::read(OBJECT, path)(error)),
    };
    if !condition.holds(now.as_deref()) {
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
