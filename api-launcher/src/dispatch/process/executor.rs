//! An executor on this machine that outlives its launcher. Its standard input is a locked file, so the kernel
//! itself tells a later launcher whether it still lives; its streams are files, so nothing breaks when nobody
//! reads them.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use job_contract::JobData;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use tokio::process::Child;

use crate::run::data::{DataError, attempt_lock};
use crate::run::environment::{self, Setup};
use crate::run::executor::{ExecutorError, Program, Streams};

/// How often a former launcher's executor is looked at.
const WATCH: Duration = Duration::from_millis(250);

/// Why an executor could not be started or found.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error("could not prepare the run's folder")]
    Folder(#[source] io::Error),
    #[error(transparent)]
    Lock(#[from] DataError),
    #[error("the run's folder is in use")]
    InUse,
    #[error(transparent)]
    Executor(#[from] ExecutorError),
}

/// The files of one run in progress.
#[derive(Clone, Debug)]
pub(super) struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    pub(super) const fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// What the executor printed.
    pub(super) fn log(&self) -> PathBuf {
        self.path.join("log")
    }

    /// The executor's final report.
    pub(super) fn report(&self) -> PathBuf {
        self.path.join("report")
    }

    fn lock(&self) -> PathBuf {
        self.path.join("lock")
    }

    fn pid(&self) -> PathBuf {
        self.path.join("pid")
    }

    fn is_locked(&self) -> bool {
        matches!(attempt_lock(&self.lock()), Ok(None))
    }

    /// The executor a former launcher has left running here, if it still does.
    pub(super) fn orphan(&self) -> Option<Executor> {
        (self.lock().exists() && self.is_locked()).then(|| Executor {
            folder: self.clone(),
            child: None,
        })
    }

    /// Starts an executor for the job.
    pub(super) fn start(
        &self,
        program: &Program,
        data_dir: &Path,
        remote: bool,
        job: &JobData,
    ) -> Result<Executor, StartError> {
        let work_dir = self.path.join("work");
        fs::create_dir_all(&work_dir).map_err(StartError::Folder)?;
        let lock = attempt_lock(&self.lock())?.ok_or(StartError::InUse)?;
        let setup = Setup {
            data_dir,
            work_dir: &work_dir,
            report: &self.report(),
            job_file: self.path.join("job"),
            color: false,
            remote,
        };
        let environment = environment::build(&setup, job, |name| std::env::var_os(name))
            .map_err(StartError::Folder)?;
        let file = |path: PathBuf| File::create_new(path).map_err(StartError::Folder);
        let streams = Streams {
            stdin: Stdio::from(lock),
            stdout: Stdio::from(file(self.log())?),
            stderr: Stdio::from(file(self.path.join("diagnostics"))?),
        };
        let child = program.spawn(environment, streams)?;
        if let Some(pid) = child.id()
            && let Err(error) = fs::write(self.pid(), pid.to_string())
        {
            tracing::warn!(%error, "could not note the executor's process id");
        }
        Ok(Executor {
            folder: self.clone(),
            child: Some(child),
        })
    }
}

/// An executor at work: our child, or one of a launcher that is gone.
#[derive(Debug)]
pub(super) struct Executor {
    folder: RunFolder,
    child: Option<Child>,
}

impl Executor {
    /// Returns when it has ended; how is known of a child only. Safe to drop and call again.
    pub(super) async fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        if let Some(child) = &mut self.child {
            return child.wait().await.map(Some);
        }
        while self.folder.is_locked() {
            tokio::time::sleep(WATCH).await;
        }
        Ok(None)
    }

    /// Asks it to stop gracefully.
    pub(super) fn terminate(&self) {
        if let Some(pid) = self.pid() {
            let _ = kill(pid, Signal::SIGTERM);
        }
    }

    /// Kills it with all that it started in its group.
    pub(super) fn kill(&self) {
        if let Some(pid) = self.pid() {
            let _ = killpg(pid, Signal::SIGKILL);
        }
    }

    /// The process id, while it is certainly this executor's.
    fn pid(&self) -> Option<Pid> {
        let pid = match &self.child {
            Some(child) => child.id()?.cast_signed(),
            None if self.folder.is_locked() => fs::read_to_string(self.folder.pid())
                .ok()?
                .trim()
                .parse()
                .ok()?,
            None => return None,
        };
        Some(Pid::from_raw(pid))
    }
}
