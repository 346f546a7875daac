//! An executor on this machine that may outlive its launcher. Its standard input is a locked file, so that the kernel
//! tells a later launcher whether the executor still runs. Its streams are files, which need no reader.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use data_dir::{DataError, PID_BYTES, attempt_lock};
use job_contract::{Document, env};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use runtime::{handover, regular_file};
use tokio::process::Child;

use crate::environment::{self, Platform, Setup};
use crate::executor::{ExecutorError, Program, Streams, tree};
use crate::run_folder::RunFolder;

/// How often a former launcher's executor is looked at.
const WATCH: Duration = Duration::from_millis(250);

/// The longest grace period of an executor by default.
const GRACE: Duration = Duration::from_mins(5);

/// Why an executor could not be started or found.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("could not prepare the run's folder")]
    Folder(#[source] io::Error),
    #[error(transparent)]
    Lock(#[from] DataError),
    #[error("the run's folder is in use")]
    InUse,
    #[error(transparent)]
    Executor(#[from] ExecutorError),
}

/// A running executor: a child of this process, or one that a former launcher started.
#[derive(Debug)]
pub struct DetachedExecutor {
    folder: RunFolder,
    child: Option<Child>,
}

impl DetachedExecutor {
    /// Returns the executor that a former launcher left running here.
    pub fn find(folder: &RunFolder) -> Option<Self> {
        (folder.lock().exists() && folder.is_locked()).then(|| Self {
            folder: folder.clone(),
            child: None,
        })
    }

    /// Starts an executor for the job.
    pub fn start(
        folder: &RunFolder,
        program: &Program,
        data_dir: &Path,
        platform: Platform<'_>,
        report_key: String,
        job: &Document,
    ) -> Result<Self, StartError> {
        let work_dir = folder.work();
        fs::create_dir_all(&work_dir).map_err(StartError::Folder)?;
        let lock = attempt_lock(&folder.lock())?.ok_or(StartError::InUse)?;
        let setup = Setup {
            data_dir,
            work_dir: &work_dir,
            report: &folder.report(),
            color: false,
            platform,
            structured_output: true,
            report_key: Some(report_key),
        };
        let environment = environment::build(&setup, job, handover::var_os);
        let file = |path: PathBuf| File::create_new(path).map_err(StartError::Folder);
        let streams = Streams {
            stdin: Stdio::from(lock),
            stdout: Stdio::from(file(folder.log())?),
            stderr: Stdio::from(file(folder.diagnostics())?),
        };
        // Later the code of the run could put a FIFO in its place.
        let mut note = file(folder.pid())?;
        let child = program.spawn(environment, streams)?;
        if let Some(pid) = child.id()
            && let Err(error) = note.write_all(pid.to_string().as_bytes())
        {
            tracing::warn!(%error, "could not note the executor's process id");
        }
        Ok(Self {
            folder: folder.clone(),
            child: Some(child),
        })
    }

    /// Waits for the end of the executor. Only a child has an exit status. The future may be dropped and called again.
    pub async fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        if let Some(child) = &mut self.child {
            return child.wait().await.map(Some);
        }
        while self.folder.is_locked() {
            tokio::time::sleep(WATCH).await;
        }
        Ok(None)
    }

    /// Returns the process id, while it runs.
    pub fn id(&self) -> Option<i32> {
        self.pid().map(Pid::as_raw)
    }

    /// Asks it to stop gracefully.
    pub fn terminate(&self) {
        if let Some(pid) = self.pid() {
            let _ = kill(pid, Signal::SIGTERM);
        }
    }

    /// Kills it with all that it started.
    pub fn kill(&self) {
        if let Some(pid) = self.pid() {
            let _ = tree::kill(pid);
        }
    }

    /// The process id, while it is certainly this executor's.
    fn pid(&self) -> Option<Pid> {
        let pid = match &self.child {
            Some(child) => child.id()?.cast_signed(),
            None if self.folder.is_locked() => {
                regular_file::read_text_unlinked(&self.folder.pid(), PID_BYTES)
                    .ok()?
                    .trim()
                    .parse()
                    .ok()?
            }
            None => return None,
        };
        Some(Pid::from_raw(pid))
    }
}

/// Returns how long after the first signal an executor is killed: it should have ended within its own grace period.
pub fn kill_after() -> Duration {
    kill_after_grace(std::env::var(env::GRACE_PERIOD_SECONDS).ok().as_deref())
}

fn kill_after_grace(configured: Option<&str>) -> Duration {
    let configured = configured.and_then(|text| text.trim().parse::<u32>().ok());
    let grace = configured.map_or(GRACE, |seconds| Duration::from_secs(seconds.into()));
    grace + Duration::from_mins(1)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use test_peers::process::{ends, has_ended};
    use test_peers::wait::{DEADLINE, until};

    use super::*;
    use crate::report_verifier::ReportVerifier;

    /// The id that is written there, once it is.
    async fn noted(path: &Path) -> Pid {
        let id = async || {
            let text = fs::read_to_string(path).unwrap_or_default();
            text.strip_suffix('\n').map(|id| id.parse().unwrap())
        };
        Pid::from_raw(until("the id of a process", id).await)
    }

    #[test]
    fn an_executor_is_killed_after_its_grace_period() {
        for (configured, seconds) in [
            (None, 360),
            (Some(""), 360),
            (Some("soon"), 360),
            (Some("30"), 90),
            (Some(" 900"), 960),
        ] {
            let found = kill_after_grace(configured);
            assert_eq!(found, Duration::from_secs(seconds), "{configured:?}");
        }
    }

    /// Code of the run can put one in the place of the file with the process id.
    #[test]
    fn a_fifo_instead_of_the_process_id_is_not_waited_for() {
        let temp = tempfile::tempdir().unwrap();
        let folder = RunFolder::new(temp.path().to_owned());
        let _held = attempt_lock(&folder.lock()).unwrap().unwrap();
        nix::unistd::mkfifo(&folder.pid(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let found = DetachedExecutor::find(&folder).unwrap();
        let (said, hear) = std::sync::mpsc::channel();
        std::thread::spawn(move || said.send(found.id()));
        assert_eq!(hear.recv_timeout(DEADLINE), Ok(None));
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
        let secret = ReportVerifier::new(None).secret_of(&folder);
        let mut executor = DetachedExecutor::start(
            &folder,
            &program,
            temp.path(),
            Platform::Machine(&[]),
            secret,
            &job,
        )
        .unwrap();
        let tool = noted(&tool).await;
        executor.terminate();
        assert!(!has_ended(tool));
        executor.kill();
        let status = executor.ended().await.unwrap();
        assert!(status.is_some());
        tree::kill_leftovers(&folder.work()).await;
        assert!(ends(tool), "it goes on");
        // A process that another test starts has the lock until it executes its program.
        let is_free = async || DetachedExecutor::find(&folder).is_none().then_some(());
        until("the end of the lock", is_free).await;
    }
}
