//! Paths by their text alone.

use std::path::{Component, Path, PathBuf};

/// `path` without `.` and `..`, as the tool resolves the sources of modules. Links are not followed.
pub fn lexical(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                clean.pop();
            }
            other => clean.push(other),
        }
    }
    clean
}
