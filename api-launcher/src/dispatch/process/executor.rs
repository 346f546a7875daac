//! An executor on this machine that outlives its launcher. Its standard input is a locked file, so the kernel
//! itself tells a later launcher whether it still lives; its streams are files, so nothing breaks when nobody
//! reads them.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use job_contract::Document;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::Child;

use super::seal::Seal;
use crate::run::data::{DataError, attempt_lock};
use crate::run::environment::{self, Setup};
use crate::run::executor::{ExecutorError, Program, Streams, tree};

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

    fn work(&self) -> PathBuf {
        self.path.join("work")
    }

    /// By which everything is known that the run has started.
    pub(super) fn mark(&self) -> String {
        self.work().to_string_lossy().into_owned()
    }

    /// Ends what an executor that is gone has left at work, unless it had come to its end: then it leaves only what was
    /// meant to stay.
    pub(super) async fn clear(&self, seal: &Seal, status: Option<ExitStatus>) {
        // Anybody who runs here can write a report.
        if self.path.exists() && seal.report_in(self, status).is_none() {
            tree::kill_leftovers(&self.work()).await;
        }
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
        seal: &Seal,
        job: &Document,
    ) -> Result<Executor, StartError> {
        let work_dir = self.work();
        fs::create_dir_all(&work_dir).map_err(StartError::Folder)?;
        let lock = attempt_lock(&self.lock())?.ok_or(StartError::InUse)?;
        let setup = Setup {
            data_dir,
            work_dir: &work_dir,
            report: &self.report(),
            job_file: self.path.join("job"),
            color: false,
            remote,
            report_key: Some(seal.secret_of(self)),
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

    /// Kills it with all that it started.
    pub(super) fn kill(&self) {
        if let Some(pid) = self.pid() {
            let _ = tree::kill(pid);
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Instant;

    use super::*;

    /// The id that is written there, once it is.
    async fn noted(path: &Path) -> Pid {
        let begun = Instant::now();
        loop {
            let text = fs::read_to_string(path).unwrap_or_default();
            if let Some(id) = text.strip_suffix('\n') {
                return Pid::from_raw(id.parse().unwrap());
            }
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "{}",
                path.display()
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn is_at_work(pid: Pid) -> bool {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    }

    #[tokio::test]
    async fn an_executor_is_killed_with_its_tool_which_has_a_group_of_its_own() {
        let temp = tempfile::tempdir().unwrap();
        let (program, tool) = (temp.path().join("program"), temp.path().join("tool"));
        let script = format!(
            "#!/bin/bash\ntrap '' TERM\nset -m\n\
             {{ trap '' TERM INT; echo $BASHPID > {}; while :; do sleep 1; done; }} &\nwait\n",
            tool.display()
        );
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        let folder = RunFolder::new(temp.path().join("run"));
        fs::create_dir(temp.path().join("run")).unwrap();
        let program = Program::choose(Some(&program)).unwrap();
        let job = Document::written(&job_contract::JobData::default());
        let mut executor = folder
            .start(&program, temp.path(), false, &Seal::new(None), &job)
            .unwrap();
        let tool = noted(&tool).await;
        executor.terminate();
        assert!(is_at_work(tool));
        executor.kill();
        let status = executor.ended().await.unwrap();
        assert!(status.is_some());
        // Whoever wrote this, it was not the executor.
        fs::write(folder.report(), "{}").unwrap();
        folder.clear(&Seal::new(None), status).await;
        let killed = Instant::now();
        while is_at_work(tool) {
            assert!(killed.elapsed() < Duration::from_secs(30), "it goes on");
            tokio::task::yield_now().await;
        }
        assert!(folder.orphan().is_none());
    }
}
