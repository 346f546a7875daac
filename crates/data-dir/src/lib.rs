//! The data directory, as far as the launcher writes there itself: job ids, locks, and the files of runs in progress.
//! Executors store their files there as `job_contract::keys` says.
//!
//! [`DataDirArgs`] is the option, and [`DataDir`] the folder that it names. Of that come job ids, [`WorkspaceLock`]s and
//! [`WorkFolder`]s. This crate must not know what a run is, beyond its ids.

mod jobs;
mod lock;
mod work;

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use job_contract::{Exit, env};
use nix::errno::Errno;
use runtime::setting::is_wrong_place;

pub use lock::WorkspaceLock;
pub use lock::attempt as attempt_lock;
pub use work::{PID_BYTES, WorkFolder};

/// The option that names the data directory.
#[derive(Args, Clone, Debug, Default)]
pub struct DataDirArgs {
    /// Where state, plans, outputs, logs, downloaded tools and the queue of `serve` are kept
    /// [default: `mayfly` in your data folder]
    #[arg(long, value_name = "DIR", env = env::DATA_DIR, value_hint = ValueHint::DirPath)]
    pub data_dir: Option<PathBuf>,
}

impl DataDirArgs {
    /// Returns the data directory that the option names.
    pub fn given(&self) -> Option<&Path> {
        self.data_dir.as_deref()
    }

    /// Returns the data directory that the option names, or the default.
    pub fn locate(&self) -> Result<DataDir, DataError> {
        DataDir::locate(self.given())
    }
}

/// The root of everything kept on this machine.
#[derive(Clone, Debug)]
pub struct DataDir {
    path: PathBuf,
}

/// Why the data directory cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("this user has no home folder to keep data in")]
    NoHome,
    #[error("could not {action} `{}`", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("another run of this workspace is in progress{holder}")]
    WorkspaceBusy { holder: String },
    #[error("all job ids of `{}` are used up", path.display())]
    NoJobIdLeft { path: PathBuf },
}

impl DataError {
    /// Whose fault it is.
    pub fn exit(&self) -> Exit {
        match self {
            Self::NoHome => Exit::BadConfiguration,
            Self::Io { source, .. } if is_wrong_place(source) => Exit::BadConfiguration,
            Self::Io { .. } | Self::WorkspaceBusy { .. } | Self::NoJobIdLeft { .. } => {
                Exit::Infrastructure
            }
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Io { source, .. } if is_wrong_place(source) => Some(
                "name a folder you can write in with --data-dir or MAYFLY_DATA_DIR; it is created if it does not exist",
            ),
            Self::NoHome | Self::NoJobIdLeft { .. } => Some("name another folder with --data-dir"),
            Self::WorkspaceBusy { .. } => Some("wait for it to end, or stop it with Ctrl-C there"),
            Self::Io { .. } => None,
        }
    }

    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}

impl DataDir {
    /// Returns the data directory that is given, or else the one in the user's data folder. It is not created yet.
    pub fn locate(given: Option<&Path>) -> Result<Self, DataError> {
        let path = match given {
            Some(path) => path.to_owned(),
            None => directories::ProjectDirs::from("dev", "mayfly", "mayfly")
                .ok_or(DataError::NoHome)?
                .data_dir()
                .to_owned(),
        };
        let path = std::path::absolute(&path).map_err(DataError::io("find", &path))?;
        Ok(Self { path })
    }

    /// Makes sure the directory exists, for its owner alone when it is new, and names it as the file system
    /// does.
    pub fn create(self) -> Result<Self, DataError> {
        create_private(&self.path)?;
        let path = self
            .path
            .canonicalize()
            .map_err(DataError::io("open", &self.path))?;
        Ok(Self { path })
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of the launcher's own files.
    pub fn launcher(&self) -> PathBuf {
        self.path.join("launcher")
    }

    /// Returns the next unused job id.
    pub fn allocate_job_id(&self) -> Result<i32, DataError> {
        jobs::allocate(&self.launcher(), &self.path.join("platform/jobs"))
    }

    /// Makes this the only run of a workspace, until the lock is dropped.
    pub fn lock_workspace(
        &self,
        organization: &str,
        workspace: &str,
    ) -> Result<WorkspaceLock, DataError> {
        let name = format!("{organization}_{workspace}.lock");
        WorkspaceLock::take(&self.launcher().join("workspaces").join(name))
    }

    /// A folder for the files of one run, removed when it is dropped. Leftovers of crashed runs are removed
    /// first.
    pub fn work_folder(&self, job_id: &str) -> Result<WorkFolder, DataError> {
        WorkFolder::create(&self.launcher().join("work"), job_id)
    }
}

fn create_private(path: &Path) -> Result<(), DataError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|error| match error.kind() {
            // What is there is no folder.
            io::ErrorKind::AlreadyExists => Errno::ENOTDIR.into(),
            _ => error,
        })
        .map_err(DataError::io("create", path))
}
