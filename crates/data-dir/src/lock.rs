//! Locks between launchers: they belong to an open file, so the kernel drops them with the process, however it ends.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use super::{DataError, create_private};

/// Opens a lock file, made with its folder when it is not there.
pub(super) fn open(path: &Path) -> Result<File, DataError> {
    if let Some(folder) = path.parent() {
        create_private(folder)?;
    }
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(DataError::io("open", path))
}

/// Opens a lock file and waits until it is ours. For sections of microseconds only.
pub(super) fn wait(path: &Path) -> Result<File, DataError> {
    let file = open(path)?;
    file.lock().map_err(DataError::io("lock", path))?;
    Ok(file)
}

/// Opens a lock file and locks it unless another process has.
pub fn attempt(path: &Path) -> Result<Option<File>, DataError> {
    let file = open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(DataError::io("lock", path)(error)),
    }
}

/// Locked by the one launcher that runs a workspace. The tool's own state lock would stop a second run too, but
/// only after it has been packed and planned, and with words about state.
#[derive(Debug)]
pub struct WorkspaceLock {
    _file: File,
}

impl WorkspaceLock {
    pub(super) fn take(path: &Path) -> Result<Self, DataError> {
        let Some(mut file) = attempt(path)? else {
            return Err(DataError::WorkspaceBusy {
                holder: holder(path),
            });
        };
        // The content names the holder for people. Only the lock itself proves that the workspace is in use.
        let _ = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| write!(file, "{}", std::process::id()));
        Ok(Self { _file: file })
    }
}

fn holder(path: &Path) -> String {
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(32).read_to_string(&mut text))
        .ok()
        .and_then(|_| text.trim().parse::<u32>().ok())
        .map_or_else(String::new, |pid| format!(" (process {pid})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_second_run_names_the_run_that_holds_the_workspace() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("locks/ws.lock");
        let first = WorkspaceLock::take(&path).unwrap();
        let error = WorkspaceLock::take(&path).unwrap_err();
        assert!(
            error
                .to_string()
                .contains(&format!("process {}", std::process::id())),
            "{error}"
        );
        drop(first);
        // A child that another test starts at this moment holds what is open here until it runs its program.
        wait(&path).unwrap();
        WorkspaceLock::take(&path).unwrap();
    }
}
