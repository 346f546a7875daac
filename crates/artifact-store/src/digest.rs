//! Size and SHA-256 of content.

use std::io::{self, Read as _};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use runtime::regular_file;

const CHUNK_BYTES: usize = 64 * 1024;

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
        let mut file = regular_file::open(path)?;
        let mut hasher = Hasher::default();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            match file.read(&mut chunk) {
                Ok(0) => return Ok(hasher.finish()),
                Ok(length) => hasher.update(&chunk[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
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

    pub(crate) fn finish(self) -> Digest {
        Digest {
            size_bytes: self.size_bytes,
            sha256: hex(&self.sha256.finalize()),
        }
    }
}

/// Lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            write!(text, "{byte:02x}").expect("writing to a string cannot fail");
            text
        })
}
