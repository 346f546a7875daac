//! Folders that belong to their owner alone.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

/// Makes a folder and its parents for their owner alone.
pub fn private_folder(folder: &Path) -> io::Result<&Path> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    Ok(folder)
}
