//! Folders that only their owner can use.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

/// Creates a folder and its parents with access only for the owner.
pub fn private_folder(folder: &Path) -> io::Result<&Path> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    Ok(folder)
}
