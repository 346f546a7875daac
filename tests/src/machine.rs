//! A machine that runs steps: a data directory with its records, and executors with the environment of a pod.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::lchown;
use std::path::{Path, PathBuf};
use std::process::Command;

use job_contract::env;
use job_contract::keys::{ObjectKey, local_backend_state};
use job_contract::progress::Diagnostic;
use job_contract::report::FinalReport;
use job_contract::status::JobStatus;
use job_contract::{JobData, encoding};
use platform::StepRef;
use platform::local::{JobRecord, LocalPlatform, StepRecord};
use serde_json::{Map, Value};
use tempfile::TempDir;
use test_peers::gate::Gate;
use test_peers::process::copy_program;

use crate::process::{Finished, Running};
use crate::tool;

/// Makes a folder read-only, as the mount of a pod may be, for the program behind it.
const READ_ONLY: &str = "mount --bind -o ro \"$0\" \"$0\" && exec \"$@\"";

/// A temporary data directory, where executors run as processes.
#[derive(Debug)]
pub struct Machine {
    folder: TempDir,
    executor: PathBuf,
}

impl Machine {
    /// An empty data directory. Its runs use this executor binary.
    pub fn new(executor: impl Into<PathBuf>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["data", "home", "work"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        Self {
            folder,
            executor: executor.into(),
        }
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn data_dir(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// A path for files of the test, outside the folders that Mayfly writes to.
    pub fn scratch(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A gate for the runs of a test.
    pub fn gate(&self) -> Gate {
        Gate::new(self.scratch("gate"))
    }

    /// Records a job with these steps, as a platform does before it dispatches the first.
    pub fn queue(&self, steps: &[&JobData]) {
        let records = steps
            .iter()
            .map(|job| StepRecord::pending(&job.step_id, job.step_type.as_deref().unwrap_or("")))
            .collect();
        let first = steps.first().expect("a job has a step");
        let record = JobRecord::queued(&first.organization_id, &first.workspace_id, records);
        self.platform().put_job(&first.job_id, &record).unwrap();
    }

    fn platform(&self) -> LocalPlatform {
        LocalPlatform::new(self.data_dir())
    }

    /// The platform's record of a job.
    pub fn record(&self, job: &JobData) -> JobRecord {
        self.platform()
            .job(&job.job_id)
            .unwrap()
            .unwrap_or_else(|| panic!("there is no record of job {}", job.job_id))
    }

    /// Status of job and step as text.
    pub fn statuses(&self, job: &JobData) -> (String, String) {
        let record = self.record(job);
        let step = record
            .step(&job.step_id)
            .unwrap_or_else(|| panic!("the record has no step {}", job.step_id));
        let step = serde_json::to_value(step.status).unwrap();
        (record.status.to_string(), step.as_str().unwrap().to_owned())
    }

    /// Replaces the plan's path in the record.
    pub fn set_plan(&self, job: &JobData, plan: Option<&Path>) {
        let plan = plan.map(|path| path.display().to_string());
        self.edit(job, |record| record.terraform_plan = plan);
    }

    /// Changes the record atomically.
    fn edit(&self, job: &JobData, change: impl FnOnce(&mut JobRecord)) {
        let step = StepRef::of(job);
        self.platform().update_job(&step, change).unwrap();
    }

    /// Sets the status of the job, as a person at the platform does.
    pub fn set_status(&self, job: &JobData, status: JobStatus) {
        self.edit(job, |record| record.status = status);
    }

    pub fn context(&self, job: &JobData) -> Map<String, Value> {
        self.platform().context(&job.job_id).unwrap()
    }

    /// Path of a stored object.
    pub fn object(&self, key: &ObjectKey) -> PathBuf {
        self.data_dir()
            .join(key.area.local_folder())
            .join(&key.path)
    }

    pub fn plan_file(&self, job: &JobData) -> PathBuf {
        self.object(&ObjectKey::plan(
            &job.organization_id,
            &job.workspace_id,
            &job.job_id,
            &job.step_id,
        ))
    }

    /// The stored log of a step.
    pub fn output_if_any(&self, job: &JobData) -> Option<String> {
        let key = ObjectKey::step_output(&job.organization_id, &job.job_id, &job.step_id);
        fs::read_to_string(self.object(&key)).ok()
    }

    /// The stored log of a step. Fails without one.
    pub fn step_output(&self, job: &JobData) -> String {
        let key = ObjectKey::step_output(&job.organization_id, &job.job_id, &job.step_id);
        let path = self.object(&key);
        fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("no step output at {}: {error}", path.display()))
    }

    /// The workspace's state as the backend holds it.
    pub fn state(&self, job: &JobData) -> Option<Value> {
        let path = local_backend_state(&job.organization_id, &job.workspace_id);
        let text = fs::read(self.data_dir().join(path)).ok()?;
        Some(serde_json::from_slice(&text).unwrap())
    }

    /// Addresses (`type.name`) of the resources in the workspace's state, which must be there.
    pub fn resources(&self, job: &JobData) -> Vec<String> {
        let state = self.state(job).expect("no state is stored");
        let resources = state["resources"].as_array().cloned().unwrap_or_default();
        resources
            .iter()
            .map(|resource| {
                let part = |name: &str| resource[name].as_str().unwrap().to_owned();
                format!("{}.{}", part("type"), part("name"))
            })
            .collect()
    }

    /// Value of an output in the workspace's state.
    pub fn output(&self, job: &JobData, name: &str) -> Value {
        self.state(job).unwrap_or_default()["outputs"][name]["value"].clone()
    }

    /// An executor for this step, about to be started.
    pub fn executor(&self, job: &JobData) -> ExecutorRun<'_> {
        self.executor_with_data(Some(&encoding::encode(job)))
            .env("PATH", tool::search_path(job.tool()))
    }

    /// An executor with this text as job data.
    pub fn executor_with_data(&self, job_data: Option<&str>) -> ExecutorRun<'_> {
        let work_dir = tempfile::tempdir_in(self.scratch("work")).unwrap();
        let termination_log = work_dir.path().with_extension("termination");
        let run = ExecutorRun {
            machine: self,
            executor: self.executor.clone(),
            environment: Vec::new(),
            wrapper: Vec::new(),
            work_dir,
            termination_log,
        };
        let run = run
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.scratch("home"))
            .env("LANG", "C.UTF-8")
            .env(env::BATCH, "true")
            .env(env::STATE_TYPE, "LocalTerraformStateImpl")
            .env(env::COLOR_OUTPUT, "false")
            .env(env::DATA_DIR, self.data_dir())
            .env(env::OUTCOME_EXIT_CODE, "true")
            .env(env::LOG_FORMAT, "json")
            .env(env::TOOL_SELECTION, "installed");
        let (work, termination) = (run.work_dir.path().to_owned(), run.termination_log.clone());
        let run = run
            .env(env::WORK_DIR, work)
            .env(env::TERMINATION_LOG, termination);
        match job_data {
            Some(text) => run.env(env::JOB_DATA, text),
            None => run,
        }
    }

    /// Runs this step to its end.
    pub fn run(&self, job: &JobData) -> Outcome {
        self.executor(job).run()
    }
}

/// An executor about to be started.
#[derive(Debug)]
pub struct ExecutorRun<'a> {
    machine: &'a Machine,
    executor: PathBuf,
    environment: Vec<(OsString, OsString)>,
    wrapper: Vec<OsString>,
    work_dir: TempDir,
    termination_log: PathBuf,
}

impl ExecutorRun<'_> {
    /// Sets a variable of the executor's environment. The last value counts.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment
            .push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Removes a variable from the executor's environment.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.environment.retain(|(known, _)| known != name);
        self
    }

    /// The folder the run may work in.
    pub fn work_dir(&self) -> &Path {
        self.work_dir.path()
    }

    /// Starts the executor as another user, and makes this user the owner of all files. Needs root.
    #[must_use]
    pub fn as_user(mut self, user: u32) -> Self {
        // The other user may not be able to read the build folder.
        let executor = self.machine.scratch("executor");
        copy_program(&self.executor, &executor);
        self.executor = executor;
        give_away(self.machine.folder(), user);
        let id = |option: &str| format!("--{option}={user}");
        self.wrapper = ["setpriv", &id("reuid"), &id("regid"), "--clear-groups"]
            .iter()
            .map(OsString::from)
            .collect();
        self
    }

    /// Starts the executor with a program. The path of the executor is its last argument.
    #[must_use]
    pub fn wrapped_in(mut self, words: &[&str]) -> Self {
        self.wrapper = words.iter().map(OsString::from).collect();
        self
    }

    /// Starts the executor where this folder is read-only. Needs root.
    #[must_use]
    pub fn with_read_only(self, folder: &Path) -> Self {
        let folder = folder.to_str().unwrap();
        self.wrapped_in(&["unshare", "--mount", "sh", "-ec", READ_ONLY, folder])
    }

    pub fn start(self) -> RunningExecutor {
        let mut words = self.wrapper.iter().map(OsString::as_os_str);
        let mut command = Command::new(words.next().unwrap_or(self.executor.as_os_str()));
        command.args(words);
        if !self.wrapper.is_empty() {
            command.arg(&self.executor);
        }
        command
            .env_clear()
            .envs(self.environment)
            .current_dir(self.work_dir.path());
        RunningExecutor {
            running: Running::start(&mut command),
            work_dir: self.work_dir,
            termination_log: self.termination_log,
        }
    }

    pub fn run(self) -> Outcome {
        self.start().wait()
    }
}

/// A running executor.
#[derive(Debug)]
pub struct RunningExecutor {
    pub running: Running,
    work_dir: TempDir,
    termination_log: PathBuf,
}

impl RunningExecutor {
    pub fn wait(self) -> Outcome {
        let finished = self.running.wait();
        let termination_message = fs::read_to_string(&self.termination_log).unwrap_or_default();
        let report = serde_json::from_str(&termination_message).ok();
        let left_behind = files_below(self.work_dir.path());
        Outcome {
            finished,
            termination_message,
            report,
            left_behind,
        }
    }
}

/// The end of an executor.
#[derive(Debug)]
pub struct Outcome {
    pub finished: Finished,
    pub termination_message: String,
    pub report: Option<FinalReport>,
    /// Files that are left in the run's own folder.
    pub left_behind: Vec<PathBuf>,
}

impl Outcome {
    pub fn code(&self) -> i32 {
        self.finished.code()
    }

    /// Fails unless the exit code is this one.
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Self {
        assert_eq!(self.code(), code, "{self}");
        self
    }

    /// The run's log.
    pub fn log(&self) -> &str {
        &self.finished.stdout
    }

    /// The final report.
    #[track_caller]
    pub fn report(&self) -> &FinalReport {
        self.report
            .as_ref()
            .unwrap_or_else(|| panic!("no final report\n{self}"))
    }

    /// The error in the final report.
    #[track_caller]
    pub fn error(&self) -> &str {
        self.report()
            .error
            .as_deref()
            .unwrap_or_else(|| panic!("the final report names no error\n{self}"))
    }

    /// The executor's diagnostics.
    pub fn diagnostics(&self) -> Vec<Diagnostic> {
        self.finished
            .stderr
            .lines()
            .filter_map(Diagnostic::parse)
            .collect()
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}\n--- termination message\n{}\n--- left behind: {:?}",
            self.finished, self.termination_message, self.left_behind
        )
    }
}

/// Every file and link below a folder, at any depth. A folder that does not exist has none.
///
/// # Panics
/// If a folder cannot be read: what is in it is not known.
pub fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries.unwrap_or_else(|error| panic!("{}: {error}", folder.display())),
        };
        for entry in entries {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.is_symlink() {
                folders.push(path);
            } else {
                files.push(path);
            }
        }
    }
    files
}

/// Makes another user the owner of everything in a folder, the folder included.
pub fn give_away(folder: &Path, user: u32) {
    let mut paths = vec![folder.to_owned()];
    while let Some(path) = paths.pop() {
        lchown(&path, Some(user), Some(user)).unwrap();
        if path.is_dir() && !path.is_symlink() {
            paths.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
        }
    }
}
