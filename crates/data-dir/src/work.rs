//! The files of one run in progress: the packed content, the executors' work folders, their final reports.
//! They hold secrets and die with the run; a run that crashed is cleaned up by the next one.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::signal::killpg;
use nix::unistd::Pid;
use runtime::{folder_users, regular_file, tree_removal};

use super::{DataError, create_private, lock};

const LOCK: &str = "lock";
/// Names the process group of an executor that may outlive its launcher.
const EXECUTOR: &str = "executor";
/// More than a process id needs.
pub const PID_BYTES: u64 = 32;

/// A run's own folder.
#[derive(Debug)]
pub struct WorkFolder {
    path: PathBuf,
    /// Its lock tells other launchers that this one lives.
    _lock: File,
}

impl WorkFolder {
    /// Sweeping and creating exclude each other, so a folder is never seen without its lock.
    pub(super) fn create(area: &Path, job_id: &str) -> Result<Self, DataError> {
        create_private(area)?;
        let _area_lock = lock::wait(&area.join(".lock"))?;
        sweep(area);
        let path = tempfile::Builder::new()
            .prefix(&format!("{job_id}-"))
            .tempdir_in(area)
            .map_err(DataError::io("create a folder in", area))?
            .keep();
        let lock = lock::wait(&path.join(LOCK))?;
        Ok(Self { path, _lock: lock })
    }

    /// A path in the folder; nothing is created.
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }

    /// Creates a folder in it.
    pub fn subfolder(&self, name: &str) -> Result<PathBuf, DataError> {
        let path = self.path.join(name);
        create_private(&path)?;
        Ok(path)
    }

    /// Notes which process group works here, for the case that this process dies before it.
    pub fn note_executor(&self, group: u32) -> Result<(), DataError> {
        let path = self.path.join(EXECUTOR);
        fs::write(&path, group.to_string()).map_err(DataError::io("write", &path))
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        // What cannot be removed now is removed by the next run's sweep.
        let _ = tree_removal::remove(&self.path);
    }
}

/// Removes the folders whose launcher and executor are gone. What cannot be removed does not stop this run.
fn sweep(area: &Path) {
    for entry in fs::read_dir(area).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && is_abandoned(&path) {
            let _ = tree_removal::remove(&path);
        }
    }
}

/// Whether launcher and executor are gone, and what they have started. A tool needs the private files of its run until it ends.
fn is_abandoned(path: &Path) -> bool {
    matches!(lock::attempt(&path.join(LOCK)), Ok(Some(_)))
        && !executor_lives(path)
        && folder_users::knowing(path).is_empty()
}

fn executor_lives(path: &Path) -> bool {
    let group = regular_file::read_text_unlinked(&path.join(EXECUTOR), PID_BYTES)
        .ok()
        .and_then(|text| text.parse::<i32>().ok());
    // Group ids are reused; a wrong "lives" only leaves the folder for a later sweep.
    group.is_some_and(|group| killpg(Pid::from_raw(group), None) != Err(Errno::ESRCH))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt as _;
    use std::process::{Command, Stdio};

    #[test]
    fn a_run_removes_its_folder_and_leaves_those_of_living_runs() {
        let temp = tempfile::tempdir().unwrap();
        let first = WorkFolder::create(temp.path(), "1").unwrap();
        fs::write(first.join("content.tar.gz"), "secret").unwrap();
        let second = WorkFolder::create(temp.path(), "2").unwrap();
        assert!(first.join("content.tar.gz").exists());
        let path = first.join("");
        drop(first);
        assert!(!path.exists());
        assert!(second.join("lock").exists());
    }

    #[test]
    fn the_folder_of_a_crashed_run_is_swept_once_its_executor_is_gone() {
        let temp = tempfile::tempdir().unwrap();
        let crashed = temp.path().join("1-crashed");
        fs::create_dir(&crashed).unwrap();
        fs::write(crashed.join(LOCK), "").unwrap();
        let mut executor = Command::new("cat")
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        fs::write(crashed.join(EXECUTOR), executor.id().to_string()).unwrap();

        drop(WorkFolder::create(temp.path(), "2").unwrap());
        assert!(crashed.exists(), "its executor still works there");

        // The tool of an executor leads a group of its own.
        let mut tool = Command::new("cat")
            .stdin(Stdio::piped())
            .env("PRIVATE", crashed.join("private"))
            .spawn()
            .unwrap();
        drop(executor.stdin.take());
        executor.wait().unwrap();
        drop(WorkFolder::create(temp.path(), "3").unwrap());
        assert!(crashed.exists(), "its tool still works there");

        drop(tool.stdin.take());
        tool.wait().unwrap();
        drop(WorkFolder::create(temp.path(), "4").unwrap());
        assert!(!crashed.exists());
    }
}
