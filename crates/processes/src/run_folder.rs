//! The files of one run in progress.

use std::path::PathBuf;

use data_dir::attempt_lock;

/// The folder of one run in progress.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    pub const fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// What the executor printed.
    pub fn log(&self) -> PathBuf {
        self.path.join("log")
    }

    /// The diagnostics of the executor.
    pub fn diagnostics(&self) -> PathBuf {
        self.path.join("diagnostics")
    }

    /// The final report of the executor.
    pub fn report(&self) -> PathBuf {
        self.path.join("report")
    }

    /// The standard input of the executor, locked while it runs.
    pub fn lock(&self) -> PathBuf {
        self.path.join("lock")
    }

    /// The process id of the executor.
    pub fn pid(&self) -> PathBuf {
        self.path.join("pid")
    }

    /// The working folder of the executor.
    pub fn work(&self) -> PathBuf {
        self.path.join("work")
    }

    /// The name of the run in its report. Every process of the run has it in its environment.
    pub fn run_name(&self) -> String {
        self.work().to_string_lossy().into_owned()
    }

    /// Returns whether an executor runs here.
    pub fn is_locked(&self) -> bool {
        matches!(attempt_lock(&self.lock()), Ok(None))
    }
}
