//! Writes the small programs that git starts.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use crate::workspace::write_private_file;

const EXECUTABLE: u32 = 0o700;

pub(super) fn write_program(path: &Path, text: &str) -> io::Result<()> {
    write_private_file(path, text.as_bytes())?;
    fs::set_permissions(path, Permissions::from_mode(EXECUTABLE))
}
