//! zstd frames of job documents.

use std::io::{self, Read as _};

/// The default level. Job documents are small and short-lived, so a higher level has no use.
const LEVEL: i32 = 3;

pub(crate) fn compress(json: &[u8]) -> io::Result<Vec<u8>> {
    zstd::bulk::compress(json, LEVEL)
}

/// The first `limit` bytes of what a frame holds.
pub(crate) fn decompress(frame: &[u8], limit: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    let decoder = zstd::stream::read::Decoder::new(frame)?;
    decoder.take(limit).read_to_end(&mut content)?;
    Ok(content)
}
