//! Target `process`: executors are processes of this machine, each with its own folder. Folder and executor outlive the
//! agent.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;

use data_dir::{DataDir, DataError, attempt_lock};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::report::{FinalReport, ReportKey, StopReason};
use job_contract::{Exit, chain};
use pool_protocol::id::LeaseId;
use pool_protocol::lease::{DeclineReason, End, LeaseRef};
use pool_protocol::path::LeaseCall;
use processes::detached::{DetachedExecutor, StartError, kill_after};
use processes::environment::{Access, Lease, Platform};
use processes::executor::{self, Program, tree};
use processes::report_verifier::ReportVerifier;
use processes::run_folder::RunFolder;
use runtime::private_file::private_folder;
use runtime::setting::is_wrong_place;
use runtime::{regular_file, tree_removal};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{error, warn};
use uuid::Uuid;
use verdict::VerdictKind;

use super::lease::{AgentLease, Stop};
use super::target::{
    Executor, FoundExecutor, RunEnd, StartFailure, StartRequest, Target, over, unreported,
};

/// The agent's folder in that of the launcher, and the folder of runs in it.
const FOLDER: &str = "agent";
const RUNS: &str = "runs";
/// The file with the lease in the folder of a run.
const LEASE: &str = "lease.json";
const LEASE_BYTES: u64 = 64 * 1024;

/// The settings of target `process`.
#[derive(Debug)]
pub struct ProcessSettings {
    pub data: DataDir,
    pub program: Program,
    /// Variables of the agent's environment that executors get.
    pub forwarded: Vec<String>,
    /// What executors know of the platform.
    pub access: Access,
    /// Verifies the final reports of executors, including those that an earlier agent has started.
    pub report_key: Option<ReportKey>,
}

/// Why the target cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenProcessError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error("could not open the folder of runs `{}`", path.display())]
    Folder {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("another agent runs in `{}`", path.display())]
    InUse { path: PathBuf },
}

impl OpenProcessError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::Data(error) => error.exit(),
            Self::Folder { source, .. } if is_wrong_place(source) => Exit::BadConfiguration,
            Self::Folder { .. } | Self::InUse { .. } => Exit::Infrastructure,
        }
    }
}

/// The target.
#[derive(Debug)]
pub struct ProcessTarget {
    /// The folder that contains the folders of runs.
    runs: PathBuf,
    data: PathBuf,
    program: Program,
    forwarded: Vec<String>,
    access: Access,
    verifier: Arc<ReportVerifier>,
    installation: String,
    /// The lock that keeps other agents from using the folder.
    _lock: fs::File,
}

/// The content of the file with the lease.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct LeaseFile {
    #[serde(flatten)]
    lease: LeaseRef,
    run: String,
    /// The URL of the lease. Files of earlier versions have none.
    #[serde(default)]
    url: Option<String>,
}

impl ProcessTarget {
    /// Opens the folder of runs.
    pub fn open(settings: ProcessSettings) -> Result<Self, OpenProcessError> {
        let data = settings.data.create()?;
        let folder = data.launcher().join(FOLDER);
        let runs = folder.join(RUNS);
        private_folder(&runs).map_err(|source| OpenProcessError::Folder {
            path: runs.clone(),
            source,
        })?;
        let lock = attempt_lock(&folder.join("lock"))?;
        let lock = lock.ok_or_else(|| OpenProcessError::InUse {
            path: data.path().to_owned(),
        })?;
        Ok(Self {
            // The lock of the folder says that there is one agent, whatever the machine is called at its next start.
            installation: match settings.access {
                Access::Agent => installation(data.path()),
                Access::Records | Access::Terrakube => Uuid::nil().to_string(),
            },
            data: data.path().to_owned(),
            runs,
            program: settings.program,
            forwarded: settings.forwarded,
            access: settings.access,
            verifier: Arc::new(ReportVerifier::new(settings.report_key)),
            _lock: lock,
        })
    }

    fn path(&self, lease: &LeaseRef) -> PathBuf {
        self.runs.join(lease.lease.to_string())
    }

    /// Returns the log of a run in a data directory.
    pub fn log_of(data: &Path, lease: LeaseId) -> PathBuf {
        let runs = data.join("launcher").join(FOLDER).join(RUNS);
        RunFolder::new(runs.join(lease.to_string())).log()
    }

    fn process(&self, lease: &LeaseRef, running: Option<DetachedExecutor>) -> Process {
        let path = self.path(lease);
        Process {
            folder: RunFolder::new(path.clone()),
            path,
            running,
            verifier: Arc::clone(&self.verifier),
            kill_at: None,
        }
    }

    /// Returns the executors of earlier agents. A folder without an executor comes from an interrupted start, and is
    /// removed.
    fn scan(&self) -> io::Result<Vec<FoundExecutor>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.runs)? {
            let path = entry?.path();
            let note = regular_file::read_text_unlinked(&path.join(LEASE), LEASE_BYTES)
                .ok()
                .and_then(|text| serde_json::from_str::<LeaseFile>(&text).ok())
                .filter(|note| self.path(&note.lease) == path);
            let folder = RunFolder::new(path.clone());
            match note {
                // The file for diagnostics is created just before the executor starts.
                Some(note) if folder.diagnostics().exists() => {
                    let running = DetachedExecutor::find(&folder);
                    found.push(FoundExecutor {
                        lease: note.lease,
                        run: note.run,
                        url: note.url,
                        executor: Box::new(self.process(&note.lease, running)),
                    });
                }
                _ => remove(&path),
            }
        }
        Ok(found)
    }

    fn start_or_adopt(&self, order: &StartRequest) -> Result<Process, StartError> {
        let path = self.path(&order.lease);
        let folder = RunFolder::new(path.clone());
        if let Some(running) = DetachedExecutor::find(&folder) {
            return Ok(self.process(&order.lease, Some(running)));
        }
        tree_removal::remove(&path).map_err(StartError::Folder)?;
        private_folder(&path).map_err(StartError::Folder)?;
        let note = LeaseFile {
            lease: order.lease,
            run: format!("{}/{}", order.job.job_id, order.job.step_id),
            url: Some(order.url.clone()),
        };
        let note = serde_json::to_vec(&note).map_err(io::Error::from);
        // Code of another run could have put a FIFO in its place.
        note.and_then(|note| File::create_new(path.join(LEASE))?.write_all(&note))
            .map_err(StartError::Folder)?;
        let lease = Lease {
            url: &order.url,
            token: &order.token,
            forwarded: &self.forwarded,
            access: self.access,
        };
        let running = DetachedExecutor::start(
            &folder,
            &self.program,
            &self.data,
            Platform::Hub(&lease),
            self.verifier.secret_of(&folder),
            &order.job,
        )?;
        Ok(self.process(&order.lease, Some(running)))
    }
}

impl Target for ProcessTarget {
    fn name(&self) -> &'static str {
        "process"
    }

    fn installation(&self) -> &str {
        &self.installation
    }

    fn find(&self) -> BoxFuture<'_, Result<Vec<FoundExecutor>, String>> {
        let found = self.scan().map_err(|error| {
            let path = self.runs.display();
            format!("`{path}` cannot be read: {error}")
        });
        std::future::ready(found).boxed()
    }

    fn start<'a>(
        &'a self,
        order: &'a StartRequest,
    ) -> BoxFuture<'a, Result<Box<dyn Executor>, StartFailure>> {
        let started = match self.start_or_adopt(order) {
            Ok(process) => Ok(Box::new(process) as Box<dyn Executor>),
            Err(failure) => {
                let text = chain(&failure);
                error!(error = text, "an executor could not be started");
                let path = self.path(&order.lease);
                // The folder may contain job data.
                if DetachedExecutor::find(&RunFolder::new(path.clone())).is_none() {
                    remove(&path);
                }
                Err(StartFailure::Decline(DeclineReason::Failed, text))
            }
        };
        std::future::ready(started).boxed()
    }

    fn work(&self, _found: mpsc::UnboundedSender<FoundExecutor>) -> BoxFuture<'_, ()> {
        std::future::pending().boxed()
    }
}

/// An executor as a process.
#[derive(Debug)]
struct Process {
    path: PathBuf,
    folder: RunFolder,
    /// `None`: it had already ended when it was found.
    running: Option<DetachedExecutor>,
    verifier: Arc<ReportVerifier>,
    kill_at: Option<Instant>,
}

impl Executor for Process {
    fn name(&self) -> String {
        let pid = self.running.as_ref().and_then(DetachedExecutor::id);
        pid.map_or_else(
            || "a process that has ended".to_owned(),
            |pid| format!("process {pid}"),
        )
    }

    fn ended<'a>(&'a mut self, _lease: &'a AgentLease) -> BoxFuture<'a, RunEnd> {
        async {
            let status = loop {
                let kill_at = self.kill_at;
                let Some(running) = &mut self.running else {
                    break None;
                };
                tokio::select! {
                    biased;
                    ended = running.ended() => match ended {
                        Ok(status) => break status,
                        Err(error) => {
                            error!(%error, "could not wait for an executor");
                            break None;
                        }
                    },
                    () = sleep_until(kill_at) => {
                        warn!(path = %self.path.display(), "the executor did not stop and was killed");
                        running.kill();
                        self.kill_at = None;
                    }
                }
            };
            tree::kill_leftovers(&self.folder.work()).await;
            let report = self.verifier.read_report(&self.folder, status);
            judge(report.as_ref(), status)
        }
        .boxed()
    }

    fn stop(&mut self, stop: Stop) -> BoxFuture<'_, Result<(), String>> {
        if let Some(running) = &self.running {
            match stop {
                // The executor is running. If it has not accepted the task, the hub refuses it, and it ends.
                Stop::Withdraw => {}
                Stop::Terminate => {
                    running.terminate();
                    self.kill_at = Some(Instant::now() + kill_after());
                }
                Stop::Kill => running.kill(),
            }
        }
        std::future::ready(Ok(())).boxed()
    }

    fn forget(self: Box<Self>) -> BoxFuture<'static, ()> {
        async move {
            // Code of the run can have filled the folder. The agent sends heartbeats meanwhile.
            let path = self.path;
            let _ = tokio::task::spawn_blocking(move || remove(&path)).await;
        }
        .boxed()
    }
}

fn remove(path: &Path) {
    if let Err(error) = tree_removal::remove(path) {
        warn!(path = %path.display(), %error, "the folder of a run could not be removed");
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Returns what the end of an executor means for its task. There is no status if an earlier agent had started it.
fn judge(report: Option<&FinalReport>, status: Option<ExitStatus>) -> RunEnd {
    let (exit, complaint) = match (status, report) {
        (Some(status), _) => executor::judge(executor::Ended {
            status,
            stopped_by: None,
        }),
        (None, Some(report)) => match Exit::from_code(report.outcome.into()) {
            Some(exit) => (exit, None),
            None => (Exit::Defect, None),
        },
        (None, None) => {
            let text = "the executor was lost while no agent watched it. What it was changing may exist without being in the state: plan \
                        again before anything else";
            let end = unreported(None, VerdictKind::Lost, text.to_owned());
            return RunEnd::Lost(DeclineReason::Failed, end);
        }
    };
    let reported = report.and_then(|report| report.error.clone()).or(complaint);
    let text = reported.unwrap_or_else(|| exit.to_string());
    let reported = report.is_some_and(|report| !report.unreported);
    let is_cancelled = report.is_some_and(|report| report.stopped == Some(StopReason::Cancelled));
    let end = |verdict: Option<VerdictKind>, diagnostic: String| End {
        exit_code: Some(exit.code().into()),
        final_log_sequence: None,
        diagnostic,
        verdict: verdict.map(|kind| kind.name().to_owned()),
        reported,
        report: report.and_then(FinalReport::for_hub),
    };
    if report.is_some_and(FinalReport::is_unreported_success) {
        let end = End {
            exit_code: Some(0),
            ..end(None, text)
        };
        return RunEnd::Over(LeaseCall::Complete, end);
    }
    match exit {
        Exit::Claimed => RunEnd::Elsewhere,
        Exit::Infrastructure if !reported => {
            RunEnd::Lost(DeclineReason::Failed, end(Some(exit.into()), text))
        }
        Exit::Signal(_) if report.is_none() => {
            RunEnd::Lost(DeclineReason::Failed, end(Some(exit.into()), text))
        }
        Exit::Done if report.is_some() => {
            RunEnd::Over(LeaseCall::Complete, end(None, String::new()))
        }
        Exit::Done => {
            let text = "the executor ended without a report of the step's outcome".to_owned();
            over(LeaseCall::Fail, Some(0), VerdictKind::Lost, text)
        }
        _ if is_cancelled => RunEnd::Over(
            LeaseCall::Cancelled,
            end(Some(VerdictKind::Cancelled), text),
        ),
        exit => RunEnd::Over(LeaseCall::Fail, end(Some(exit.into()), text)),
    }
}

/// Returns an id of machine and folder. It differs between two agents of the same name.
fn installation(data: &Path) -> String {
    let machine = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let host = nix::unistd::gethostname().unwrap_or_default();
    let mut hash = Sha256::new();
    for part in [
        machine.trim().as_bytes(),
        host.as_encoded_bytes(),
        data.as_os_str().as_encoded_bytes(),
    ] {
        hash.update(part);
        hash.update([0]);
    }
    let digest = hash.finalize();
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    Uuid::from_bytes(id).to_string()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use job_contract::final_statuses::Ending;
    use job_contract::report::UnreportedStep;
    use rstest::rstest;

    use super::*;

    fn exited(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    /// Removing takes as long as the code of the run likes, and the agent has its heartbeats to send.
    #[tokio::test]
    async fn the_folder_of_a_run_is_removed_beside_other_work() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("run");
        fs::create_dir(&path).unwrap();
        for number in 0..2_000 {
            fs::write(path.join(number.to_string()), "").unwrap();
        }
        let process = Process {
            folder: RunFolder::new(path.clone()),
            path: path.clone(),
            running: None,
            verifier: Arc::new(ReportVerifier::new(None)),
            kill_at: None,
        };
        let mut forgetting = Box::new(process).forget();
        assert!(futures_util::poll!(&mut forgetting).is_pending());
        forgetting.await;
        assert!(!path.exists());
    }

    fn report(outcome: Exit, unreported: bool) -> FinalReport {
        FinalReport {
            outcome: outcome.code(),
            unreported,
            ..FinalReport::default()
        }
    }

    #[rstest]
    #[case::done(Some(report(Exit::Done, false)), Some(exited(0)), "COMPLETE true")]
    #[case::done_and_unreported(Some(report(Exit::Done, true)), Some(exited(1)), "COMPLETE false")]
    #[case::done_without_a_report(None, Some(exited(0)), "FAIL lost false")]
    #[case::failed(
        Some(report(Exit::StepFailed, false)),
        Some(exited(1)),
        "FAIL step_failed true"
    )]
    #[case::infrastructure(None, Some(exited(75)), "LOST infrastructure")]
    #[case::infrastructure_unreported(
        Some(report(Exit::Infrastructure, true)),
        Some(exited(75)),
        "LOST infrastructure"
    )]
    #[case::claimed(None, Some(exited(76)), "ELSEWHERE")]
    #[case::configuration(None, Some(exited(64)), "FAIL config_missing false")]
    #[case::job_data(None, Some(exited(65)), "FAIL bad_job_data false")]
    #[case::killed(None, Some(ExitStatus::from_raw(9)), "LOST signalled")]
    #[case::panicked(None, Some(exited(101)), "FAIL defect false")]
    #[case::lost(None, None, "LOST lost")]
    #[case::left_a_report(Some(report(Exit::StepFailed, false)), None, "FAIL step_failed true")]
    #[case::cancelled(
        Some(FinalReport { stopped: Some(StopReason::Cancelled), ..report(Exit::Signal(15), false) }),
        Some(exited(143)),
        "CANCELLED cancelled true"
    )]
    fn each_end_of_an_executor_has_its_call(
        #[case] report: Option<FinalReport>,
        #[case] status: Option<ExitStatus>,
        #[case] expected: &str,
    ) {
        let end = match judge(report.as_ref(), status) {
            RunEnd::Decline(..) => "DECLINE".to_owned(),
            RunEnd::Lost(_, end) => format!("LOST {}", end.verdict.unwrap_or_default()),
            RunEnd::Elsewhere => "ELSEWHERE".to_owned(),
            RunEnd::Over(call, end) => {
                let verdict = end.verdict.map(|verdict| format!(" {verdict}"));
                format!(
                    "{}{} {}",
                    call.name().to_uppercase(),
                    verdict.unwrap_or_default(),
                    end.reported
                )
            }
        };
        assert_eq!(end, expected);
    }

    #[test]
    fn the_hub_gets_the_report_that_the_executor_could_not_deliver() {
        let report = FinalReport {
            unreported_step: Some(UnreportedStep {
                ending: Ending::Changes,
                after_ok: true,
                ignore_error: false,
                plan: Some("the plan".to_owned()),
            }),
            ..report(Exit::Done, true)
        };
        let RunEnd::Over(LeaseCall::Complete, end) = judge(Some(&report), Some(exited(1))) else {
            panic!("it is completed");
        };
        assert!(end.report.is_some() && !end.reported, "{end:?}");
        assert_eq!(end.exit_code, Some(0));
    }
}
