//! A reader with an allowance. It keeps readers of archives from loading endless names and lists into memory.

use std::cell::Cell;
use std::io::{self, Read, Seek, SeekFrom};
use std::rc::Rc;

/// Bytes that are read reduce the allowance, which the caller can set again.
pub(crate) struct Metered<R> {
    inner: R,
    allowance: Rc<Cell<u64>>,
}

#[derive(Debug, thiserror::Error)]
#[error("the description of an entry is too large")]
struct TooMuch;

impl<R> Metered<R> {
    /// Returns the reader, and its allowance in bytes.
    pub(crate) fn new(inner: R, allowance: u64) -> (Self, Rc<Cell<u64>>) {
        let allowance = Rc::new(Cell::new(allowance));
        let metered = Self {
            inner,
            allowance: Rc::clone(&allowance),
        };
        (metered, allowance)
    }
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        let remaining = self
            .allowance
            .get()
            .checked_sub(read as u64)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, TooMuch))?;
        self.allowance.set(remaining);
        Ok(read)
    }
}

impl<R: Seek> Seek for Metered<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

/// Whether the allowance was the reason of an error.
pub(crate) fn is_too_much(error: &io::Error) -> bool {
    let inner = error.get_ref();
    inner.is_some_and(<dyn std::error::Error + Send + Sync>::is::<TooMuch>)
}
