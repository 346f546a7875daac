//! The copies of states that could not be stored, in the data directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use job_contract::JobData;
use job_contract::keys::errored_file;
use runtime::private_file::private_folder;
use tracing::warn;

use crate::terraform::ErroredState;
use crate::workspace::{remove_file_if_present, write_private_file};

/// The copy of a step's state.
pub(crate) fn path_on_disk(data_dir: &Path, job: &JobData) -> PathBuf {
    data_dir.join(errored_file(
        &job.organization_id,
        &job.workspace_id,
        &job.job_id,
        &job.step_id,
    ))
}

/// Keeps a state on the disk. A file of the tool takes no more room there, if it is on the same disk.
pub(crate) fn keep_on_disk(errored: &ErroredState, path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        private_folder(folder)?;
    }
    if let ErroredState::File(file) = errored
        // Code of the run may have put a link there.
        && fs::symlink_metadata(file)?.is_file()
    {
        remove_file_if_present(path)?;
        if fs::hard_link(file, path).is_ok() {
            return Ok(());
        }
    }
    let written = errored
        .content()
        .and_then(|state| write_private_file(path, &state));
    // A part of a state would pass for a whole one.
    written.or_else(|error| remove_file_if_present(path).and(Err(error)))
}

/// Removes a copy that is needed no more.
pub(crate) fn remove_from_disk(path: &Path) {
    if let Err(error) = remove_file_if_present(path) {
        warn!(%error, path = %path.display(), "the copy of a state could not be removed");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    /// It takes no room on a disk that has none.
    #[test]
    fn a_file_of_the_tool_is_linked_and_a_link_is_copied() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), "state").unwrap();
        symlink(path("file"), path("link")).unwrap();
        let links = |name: &str| {
            let copy = path("kept").join(name);
            keep_on_disk(&ErroredState::File(path(name)), &copy).unwrap();
            let facts = fs::symlink_metadata(copy).unwrap();
            (facts.is_file(), facts.nlink())
        };
        assert_eq!((links("file"), links("link")), ((true, 2), (true, 1)));
    }
}
