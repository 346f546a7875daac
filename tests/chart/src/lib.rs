//! The chart, rendered by a real Helm, and the table of its values. What the chart should say stands in its suites and in the
//! tests.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::must_use_candidate,
    reason = "a harness fails a test by panicking, with all there is to know about it"
)]

pub mod programs;
pub mod render;
pub mod values;

use std::fs;
use std::path::{Path, PathBuf};

pub use render::{Document, Release};

/// Root of the workspace.
pub fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().nth(2).expect("two folders down")
}

/// The chart.
pub fn chart() -> PathBuf {
    root().join("helm/mayfly")
}

/// The files in a folder whose names end so, in the order of their names.
pub fn files(folder: &Path, suffix: &str) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut found: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().ends_with(suffix))
        .collect();
    found.sort();
    found
}

/// The values the chart is proven with, each with its name.
pub fn values_files() -> Vec<(String, PathBuf)> {
    let suffix = "-values.yaml";
    let found = files(&chart().join("ci"), suffix).into_iter();
    let found: Vec<_> = found
        .map(|path| {
            let name = path.file_name().unwrap().to_string_lossy();
            (name.trim_end_matches(suffix).to_owned(), path)
        })
        .collect();
    assert!(found.len() >= 5, "{found:?}");
    found
}
