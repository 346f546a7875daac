//! Size and SHA-256 of content.

use std::io::{self, Read, Write};
use std::path::Path;

use job_contract::encoding::hex;
use runtime::regular_file;
use sha2::{Digest as _, Sha256};

/// Size and SHA-256 of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digest {
    pub size_bytes: u64,
    /// Lower-case hex.
    pub sha256: String,
}

impl Digest {
    /// The digest of a file.
    pub fn of(path: &Path) -> io::Result<Self> {
        Self::of_rest(&mut regular_file::open(path)?)
    }

    /// The digest of what is still to be read.
    pub fn of_rest(content: &mut impl Read) -> io::Result<Self> {
        let mut hasher = Hasher::default();
        io::copy(content, &mut hasher)?;
        Ok(hasher.finish())
    }
}

/// Computes a [`Digest`] of content in chunks.
#[derive(Debug, Default)]
pub(crate) struct Hasher {
    size_bytes: u64,
    sha256: Sha256,
}

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.size_bytes += bytes.len() as u64;
        self.sha256.update(bytes);
    }

    pub(crate) const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub(crate) fn finish(self) -> Digest {
        Digest {
            size_bytes: self.size_bytes,
            sha256: hex(&self.sha256.finalize()),
        }
    }
}

impl Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
