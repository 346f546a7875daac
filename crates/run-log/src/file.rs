//! A file as a sink of the run's log.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use crate::{Batch, Sink, SinkError};

/// Appends to a file that is opened when there is something to write.
#[derive(Debug)]
pub struct FileSink {
    path: PathBuf,
    file: Option<File>,
}

impl FileSink {
    /// The file is created 0600, with the first text.
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
            // A folder may be mounted again under the same name; the next attempt opens it anew.
            self.file = None;
            SinkError::Unavailable(error)
        })
    }
}
