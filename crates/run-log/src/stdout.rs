//! Standard output as a sink of the run's log. A slow or closed reader must not delay the run.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{Batch, LogError, POLL_INTERVAL, Sink, SinkError};

/// How much a ready pipe accepts without blocking (`PIPE_BUF` of Linux). Other processes share the descriptor, so it cannot be
/// made non-blocking.
const READY_BYTES: usize = 4096;

/// Writes to a descriptor without blocking.
#[derive(Debug)]
pub struct StdoutSink {
    output: File,
    /// The largest write. A write to a regular file never blocks, so it has no limit.
    at_most: usize,
}

impl StdoutSink {
    /// Standard output of this process.
    pub fn open() -> Result<Self, LogError> {
        let output = io::stdout().as_fd().try_clone_to_owned();
        let output =
            output.map_err(|error| LogError::new("open a sink of the run's log", error))?;
        Ok(Self::over(output))
    }

    /// Writes to the descriptor itself, without the buffer and the lock of the standard library.
    pub(super) fn over(output: OwnedFd) -> Self {
        let output = File::from(output);
        let is_file = output.metadata().is_ok_and(|metadata| metadata.is_file());
        Self {
            output,
            at_most: if is_file { usize::MAX } else { READY_BYTES },
        }
    }

    /// Waits until the descriptor is ready. An error on it counts as ready, because the write returns the error.
    fn wait_until_ready(&self) -> Result<(), SinkError> {
        let timeout = PollTimeout::try_from(POLL_INTERVAL).unwrap_or(PollTimeout::MAX);
        let mut output = [PollFd::new(self.output.as_fd(), PollFlags::POLLOUT)];
        match poll(&mut output, timeout) {
            Ok(0) | Err(Errno::EINTR) => Err(SinkError::Busy),
            Ok(_) => Ok(()),
            Err(errno) => Err(SinkError::Unavailable(errno.into())),
        }
    }
}

impl Sink for StdoutSink {
    fn name(&self) -> String {
        "stdout".to_owned()
    }

    fn deliver(&mut self, Batch { text, .. }: Batch<'_>) -> Result<usize, SinkError> {
        self.wait_until_ready()?;
        match self.output.write(&text[..text.len().min(self.at_most)]) {
            Ok(0) => Err(SinkError::Unavailable(io::ErrorKind::WriteZero.into())),
            Ok(taken) => Ok(taken),
            Err(error) => Err(match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => SinkError::Busy,
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                    SinkError::Gone(error)
                }
                _ if error.raw_os_error() == Some(Errno::EBADF as i32) => SinkError::Gone(error),
                // The terminal was closed.
                _ if error.raw_os_error() == Some(Errno::EIO as i32) => SinkError::Gone(error),
                _ => SinkError::Unavailable(error),
            }),
        }
    }
}
