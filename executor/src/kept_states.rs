//! The copies of states that could not be stored, in the data directory. The artifact store has others, and a list of them.
//! [`command`] stores or drops both.

pub mod command;

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use job_contract::JobData;
use job_contract::kept_state::KeptState;
use job_contract::keys::{errored_file, errored_folder};
use runtime::private_file::private_folder;
use runtime::regular_file;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::error::StepError;
use crate::terraform::ErroredState;
use crate::workspace::{remove_file_if_present, write_private_file};

/// The extension of a copy on disk.
const STATE: &str = "tfstate";
/// The extension of what is noted about it.
const NOTE: &str = "json";
/// The largest note.
const MAX_NOTE_BYTES: u64 = 64 * 1024;

/// What is noted about a copy on disk.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Note {
    #[serde(flatten)]
    pub(crate) state: KeptState,
    /// What the artifact store of the run would call the copy. It is not known behind a hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reference: Option<String>,
}

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

/// Gives the file of the tool a content of its own, if it is a second name of a copy. Scripts that follow may use the tool, which writes
/// into a file that is there. Without room for two, only the copy stays.
pub(crate) fn separate(errored: &ErroredState) {
    let ErroredState::File(file) = errored else {
        return;
    };
    let links = fs::symlink_metadata(file).map(|facts| MetadataExt::nlink(&facts));
    if !links.is_ok_and(|links| links > 1) {
        return;
    }
    let content = errored.content();
    let written = content.and_then(|state| write_private_file(file, &state));
    if written.is_err()
        && let Err(error) = remove_file_if_present(file)
    {
        warn!(%error, path = %file.display(), "the tool can still write over the copy of a state");
    }
}

/// Notes what is known about a copy. Without the note, only a person can decide whether it is stored.
pub(crate) fn note_on_disk(path: &Path, note: &Note) {
    let text = serde_json::to_vec(note).expect("digests are a document");
    if let Err(error) = write_private_file(&path.with_extension(NOTE), &text) {
        warn!(%error, "what is known about a kept state could not be written");
    }
}

/// Removes a copy whose state a run has stored or kept elsewhere.
pub(crate) fn remove_from_disk(path: &Path) {
    for path in [path.to_owned(), path.with_extension(NOTE)] {
        if let Err(error) = remove_file_if_present(&path) {
            warn!(%error, path = %path.display(), "the copy of a state could not be removed");
        }
    }
}

/// The copies of a workspace's states, in the order of their names.
pub(crate) fn states_on_disk(
    data_dir: &Path,
    organization: &str,
    workspace: &str,
) -> Result<Vec<PathBuf>, StepError> {
    let folder = data_dir.join(errored_folder(organization, workspace));
    match states_in(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        states => states
            .map_err(|error| StepError::work_folder("could not read the folder", &folder, &error)),
    }
}

fn states_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut states = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == STATE) {
            states.push(path);
        }
    }
    states.sort();
    Ok(states)
}

/// What was noted about a copy.
fn note_of(path: &Path) -> Note {
    let note = regular_file::read_unlinked(&path.with_extension(NOTE), MAX_NOTE_BYTES);
    let note = note
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok());
    note.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

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

    /// A script after a failed apply runs the tool, and it cannot store its state either.
    #[test]
    fn what_the_tool_writes_later_changes_no_copy() {
        let folder = tempfile::tempdir().unwrap();
        let (file, copy) = (folder.path().join("file"), folder.path().join("kept/file"));
        fs::write(&file, "state").unwrap();
        let errored = ErroredState::File(file.clone());
        keep_on_disk(&errored, &copy).unwrap();
        separate(&errored);
        assert_eq!(fs::read_to_string(&file).unwrap(), "state");
        // It truncates the file that is there.
        fs::write(&file, "later").unwrap();
        assert_eq!(fs::read_to_string(&copy).unwrap(), "state");
    }
}
