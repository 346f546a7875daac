//! A state that the tool writes. A large one is in a file of the run's private folder, because the tool has it in memory at the same
//! time. The file is for this user alone, and its name is removed at once, so it ends with this process at the latest.
//!
//! If the disk does not take the state, it stays in memory. It may be the only copy.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::Path;
use std::sync::Arc;

use artifact_store::Digest;
use bytes::Bytes;
use job_contract::encoding::hex;
use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;
use tracing::warn;

/// A smaller state stays in memory.
pub(super) const IN_MEMORY: usize = 1024 * 1024;

/// What has come of a state.
#[derive(Debug)]
pub(super) struct ReceivedState<'f> {
    /// The folder of its file. None after the disk has failed.
    folder: Option<&'f Path>,
    memory: Vec<u8>,
    file: Option<File>,
    /// How much is in the file.
    written: u64,
    sha256: Sha256,
}

/// A whole state.
#[derive(Debug)]
pub(super) enum WholeState {
    Memory(Bytes),
    File(Arc<File>, Digest),
}

impl<'f> ReceivedState<'f> {
    /// Nothing has come yet.
    pub(super) fn new(folder: &'f Path) -> Self {
        Self {
            folder: Some(folder),
            memory: Vec::new(),
            file: None,
            written: 0,
            sha256: Sha256::default(),
        }
    }

    /// Adds what has come. An error means that what came before is lost.
    pub(super) fn add(&mut self, chunk: &[u8]) -> io::Result<()> {
        self.sha256.update(chunk);
        if let Some(file) = &mut self.file {
            match file.write_all(chunk) {
                Ok(()) => {
                    self.written += chunk.len() as u64;
                    return Ok(());
                }
                Err(error) => self.move_to_memory(&error)?,
            }
        }
        self.memory.extend_from_slice(chunk);
        if self.memory.len() > IN_MEMORY {
            self.move_to_file();
        }
        Ok(())
    }

    /// The state, when all of it has come.
    pub(super) fn finish(self) -> WholeState {
        match self.file {
            None => WholeState::Memory(self.memory.into()),
            Some(file) => {
                let digest = Digest {
                    size_bytes: self.written,
                    sha256: hex(&self.sha256.finalize()),
                };
                WholeState::File(Arc::new(file), digest)
            }
        }
    }

    fn move_to_file(&mut self) {
        let Some(folder) = self.folder else {
            return;
        };
        let file = NamedTempFile::new_in(folder).map(NamedTempFile::into_file);
        let moved = file.and_then(|mut file| {
            file.write_all(&self.memory)?;
            Ok(file)
        });
        match moved {
            Ok(file) => {
                self.file = Some(file);
                self.written = self.memory.len() as u64;
                self.memory = Vec::new();
            }
            Err(error) => self.leave_disk(&error),
        }
    }

    fn move_to_memory(&mut self, failure: &io::Error) -> io::Result<()> {
        self.leave_disk(failure);
        if let Some(mut file) = self.file.take() {
            file.rewind()?;
            file.take(self.written).read_to_end(&mut self.memory)?;
        }
        Ok(())
    }

    fn leave_disk(&mut self, failure: &io::Error) {
        warn!(error = %failure, "a state stays in memory, because it cannot be written to the disk");
        self.folder = None;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A file that is open for reading alone fails as a full disk does.
    #[test]
    fn a_disk_that_becomes_full_loses_no_part_of_a_state() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("begun");
        fs::write(&path, "begun, and torn").unwrap();
        let mut state = ReceivedState {
            file: Some(File::open(&path).unwrap()),
            written: 5,
            ..ReceivedState::new(folder.path())
        };
        state.add(b" and ").unwrap();
        state.add(&vec![b'x'; 2 * IN_MEMORY]).unwrap();
        let WholeState::Memory(state) = state.finish() else {
            panic!("it is in a file");
        };
        assert_eq!(state.len(), 10 + 2 * IN_MEMORY);
        assert!(state.starts_with(b"begun and xxx"));
    }

    #[test]
    fn the_digest_of_a_file_is_that_of_its_content() {
        let folder = tempfile::tempdir().unwrap();
        let mut state = ReceivedState::new(folder.path());
        state.add(&vec![b'a'; IN_MEMORY]).unwrap();
        for chunk in [b"b", b"c"] {
            state.add(chunk).unwrap();
        }
        let WholeState::File(file, digest) = state.finish() else {
            panic!("it is in memory");
        };
        let mut content = &*file;
        content.rewind().unwrap();
        assert_eq!(Digest::of_rest(&mut content).unwrap(), digest);
        assert_eq!(digest.size_bytes, IN_MEMORY as u64 + 2);
    }
}
