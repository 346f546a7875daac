//! A file as a sink of the run's log.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use crate::{Batch, Sink, SinkError};

/// Appends to a file, which is opened for the first write.
#[derive(Debug)]
pub struct FileSink {
    path: PathBuf,
    file: Option<File>,
}

impl FileSink {
    /// A sink for this file. The first write creates it with mode 0600.
    pub const fn new(path: PathBuf) -> Self {
        Self { path, file: None }
    }

    fn append(&mut self, text: &[u8]) -> io::Result<usize> {
        if self.file.is_none() {
            self.file = Some(
                OpenOptions::new()
                    .append(true)
                    .create(true)
                    .mode(0o600)
                    .open(&self.path)?,
            );
        }
        let file = self.file.as_mut().expect("opened just now");
        loop {
            match file.write(text) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(taken) => return Ok(taken),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Sink for FileSink {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn deliver(&mut self, batch: Batch<'_>) -> Result<usize, SinkError> {
        self.append(batch.text).map_err(|error| {
            // A folder may be mounted again at the same path, so the next attempt opens the file again.
            self.file = None;
            SinkError::Unavailable(error)
        })
    }
}
