//! The platform on one machine: one record per job in the data directory, with the data that Terrakube's API would have.
//!
//! `api-launcher run` creates the record and reads it; executors write their reports to it. A change takes a lock file,
//! reads the record, and replaces it by rename. So a reader always sees a complete record, and a crash leaves the previous
//! one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use job_contract::StepType;
use job_contract::keys::{Area, ObjectKey};
use job_contract::status::{JobStatus, StepStatus};
use nix::fcntl::{Flock, FlockArg};
use runtime::private_file::private_folder;
use runtime::regular_file;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::context::merge;
use crate::{
    Claim, History, Holder, Outcome, PlanReference, PlatformError, StartReport, StepRef, StepView,
};

/// More than a record or a job context needs.
const MAX_BYTES: u64 = 64 * 1024 * 1024;

/// The platform's record of one job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobRecord {
    pub organization_id: String,
    pub workspace_id: String,
    pub status: JobStatus,
    #[serde(default)]
    pub plan_changes: bool,
    #[serde(default)]
    pub terraform_plan: Option<String>,
    #[serde(default)]
    pub commit_id: Option<String>,
    pub steps: Vec<StepRecord>,
    /// States published by the job, oldest first.
    #[serde(default)]
    pub history: Vec<History>,
}

/// The platform's record of one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StepRecord {
    pub id: String,
    /// Type on the wire.
    #[serde(rename = "type")]
    pub step_type: String,
    pub status: StepStatus,
    #[serde(default)]
    pub output: Option<String>,
}

impl JobRecord {
    /// A queued job with these pending steps.
    pub fn queued(organization_id: &str, workspace_id: &str, steps: Vec<StepRecord>) -> Self {
        Self {
            organization_id: organization_id.to_owned(),
            workspace_id: workspace_id.to_owned(),
            status: JobStatus::Queue,
            plan_changes: false,
            terraform_plan: None,
            commit_id: None,
            steps,
            history: Vec::new(),
        }
    }

    /// The step with that id.
    pub fn step(&self, id: &str) -> Option<&StepRecord> {
        self.steps.iter().find(|step| step.id == id)
    }

    /// The step with that id. A step that is not in the template is added.
    pub fn step_mut(&mut self, step: &StepRef) -> &mut StepRecord {
        let index = self
            .steps
            .iter()
            .position(|known| known.id == step.step_id)
            .unwrap_or_else(|| {
                self.steps
                    .push(StepRecord::pending(&step.step_id, &step.step_type));
                self.steps.len() - 1
            });
        &mut self.steps[index]
    }
}

impl StepRecord {
    /// A step that has not run.
    pub fn pending(id: &str, step_type: &str) -> Self {
        Self {
            id: id.to_owned(),
            step_type: step_type.to_owned(),
            status: StepStatus::Pending,
            output: None,
        }
    }
}

/// The records below one data directory.
#[derive(Clone, Debug)]
pub struct LocalPlatform {
    data_dir: PathBuf,
}

impl LocalPlatform {
    /// The platform with its records in `data_dir`. It reads and writes nothing yet.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
        }
    }

    /// The record of a job.
    pub fn job(&self, job_id: &str) -> Result<Option<JobRecord>, PlatformError> {
        read_json(&self.job_path(job_id))
    }

    /// Creates or replaces the record of a job that has not begun. Each later change writes the whole record.
    pub fn put_job(&self, job_id: &str, record: &JobRecord) -> Result<(), PlatformError> {
        let path = self.job_path(job_id);
        let _lock = lock(&path)?;
        write_json(&path, record, Durability::Eventual)
    }

    /// Changes the record of a job in one atomic step. A job without a record starts as
    /// [`JobRecord::queued`] with no steps.
    pub fn update_job(
        &self,
        step: &StepRef,
        change: impl FnOnce(&mut JobRecord),
    ) -> Result<(), PlatformError> {
        self.change_job(step, Durability::Synced, change)
    }

    /// Like [`Self::update_job`], for the progress of a job. If the machine crashes, the record may lack this change. That
    /// is as if the machine had crashed a moment earlier, because claim and outcome of a step are on disk.
    pub fn update_progress(
        &self,
        step: &StepRef,
        change: impl FnOnce(&mut JobRecord),
    ) -> Result<(), PlatformError> {
        self.change_job(step, Durability::Complete, change)
    }

    fn change_job(
        &self,
        step: &StepRef,
        durability: Durability,
        change: impl FnOnce(&mut JobRecord),
    ) -> Result<(), PlatformError> {
        let path = self.job_path(&step.job_id);
        let _lock = lock(&path)?;
        let mut record = read_json(&path)?.unwrap_or_else(|| {
            JobRecord::queued(&step.organization_id, &step.workspace_id, Vec::new())
        });
        change(&mut record);
        write_json(&path, &record, durability)
    }

    pub(crate) fn step_view(&self, step: &StepRef) -> Result<StepView, PlatformError> {
        let record = self.job(&step.job_id)?.unwrap_or_else(|| {
            JobRecord::queued(&step.organization_id, &step.workspace_id, Vec::new())
        });
        Ok(StepView {
            step: record.step(&step.step_id).map(|known| known.status),
            planned: record
                .steps
                .iter()
                .any(|known| is_plan(&known.step_type) && known.status == StepStatus::Completed),
            template_steps: record.steps.len().max(1),
            half_reported: record.is_half_reported(&step.step_id),
            terraform_plan: record.terraform_plan.filter(|plan| !plan.is_empty()),
            status: record.status,
        })
    }

    /// The holder of the claim on a step, if there is one. After a crash of the machine a claim may be unreadable, and still
    /// counts.
    pub fn claimed_by(&self, step: &StepRef) -> Result<Option<Holder>, PlatformError> {
        match read_json(&self.claim_path(step)) {
            Err(PlatformError::Corrupt { .. }) => Ok(Some(Holder::unknown())),
            read => read,
        }
    }

    /// The claim appears completely or not at all: it is written to a temporary file, which is then linked to its name. The
    /// link fails if the name exists.
    pub(crate) fn claim(&self, step: &StepRef, holder: &Holder) -> Result<Claim, PlatformError> {
        let path = self.claim_path(step);
        let fail = |action| PlatformError::record(action, &path);
        let folder = private_parent(&path).map_err(fail("create the folder of"))?;
        let mut draft = tempfile::NamedTempFile::new_in(folder).map_err(fail("write"))?;
        let text = serde_json::to_vec(holder).expect("a holder has no failing serialiser");
        draft.write_all(&text).map_err(fail("write"))?;
        match fs::hard_link(draft.path(), &path) {
            // A plan may be repeated, also after a crash of the machine.
            Ok(()) if is_plan(&step.step_type) => Ok(Claim::Granted),
            // Most file systems put the new name on disk together with the file, so that the second call does not wait.
            Ok(()) => draft
                .as_file()
                .sync_all()
                .and_then(|()| sync_folder(folder))
                .map(|()| Claim::Granted)
                .map_err(fail("write")),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let holder = self.claimed_by(step)?;
                Ok(Claim::Taken(holder.unwrap_or_else(Holder::unknown)))
            }
            Err(error) => Err(fail("write")(error)),
        }
    }

    pub(crate) fn report_running(
        &self,
        step: &StepRef,
        commit: &str,
        output: &str,
    ) -> Result<StartReport, PlatformError> {
        let mut start = StartReport::Accepted;
        self.update_progress(step, |record| {
            let known = record.step(&step.step_id).map(|known| known.status);
            let ended = !matches!(
                known,
                None | Some(StepStatus::Pending | StepStatus::Running)
            );
            if record.status.is_over() || ended && record.status != JobStatus::Rejected {
                start = StartReport::Ended(record.status.clone());
                return;
            }
            if record.status != JobStatus::Rejected {
                record.status = JobStatus::Running;
                record.commit_id = Some(commit.to_owned());
            }
            let step = record.step_mut(step);
            step.status = StepStatus::Running;
            step.output = Some(output.to_owned());
        })?;
        Ok(start)
    }

    pub(crate) fn report_outcome(
        &self,
        step: &StepRef,
        outcome: &Outcome,
    ) -> Result<(), PlatformError> {
        self.update_job(step, |record| {
            let rejected = record.status == JobStatus::Rejected;
            let known = record.step_mut(step);
            known.status = if rejected {
                StepStatus::Failed
            } else {
                outcome.statuses.step
            };
            known.output.clone_from(&outcome.output);
            if rejected || record.status == JobStatus::Cancelled {
                return;
            }
            record.status = outcome.statuses.job.clone();
            record.plan_changes = outcome.statuses.plan_changes;
            if outcome.commit_id.is_some() {
                record.commit_id.clone_from(&outcome.commit_id);
            }
            match &outcome.plan {
                PlanReference::Keep => {}
                PlanReference::Set(plan) => record.terraform_plan = Some(plan.clone()),
                PlanReference::Clear => record.terraform_plan = None,
            }
            record.complete_when_done();
        })
    }

    /// The context document of a job.
    pub fn context(&self, job_id: &str) -> Result<Map<String, Value>, PlatformError> {
        Ok(read_json(&self.context_path(job_id))?.unwrap_or_default())
    }

    /// The context document of a job as it is stored.
    pub fn stored_context(&self, job_id: &str) -> Result<Option<Vec<u8>>, PlatformError> {
        read_record(&self.context_path(job_id))
    }

    /// Replaces the context document of a job by a JSON object, which is stored as it is.
    pub fn store_context(&self, job_id: &str, json: &[u8]) -> Result<(), PlatformError> {
        let path = self.context_path(job_id);
        let _lock = lock(&path)?;
        write_record(&path, json, Durability::Eventual)
    }

    /// Merges `more` into the context document of a job.
    pub fn merge_context(
        &self,
        job_id: &str,
        more: &Map<String, Value>,
    ) -> Result<(), PlatformError> {
        let path = self.context_path(job_id);
        let _lock = lock(&path)?;
        let mut context = read_json(&path)?.unwrap_or_default();
        merge(&mut context, more);
        write_json(&path, &context, Durability::Eventual)
    }

    pub(crate) fn record_history(
        &self,
        step: &StepRef,
        history: &History,
    ) -> Result<(), PlatformError> {
        // The report of the outcome follows, and puts the whole record on disk.
        self.update_progress(step, |record| record.history.push(history.clone()))
    }

    fn claim_path(&self, step: &StepRef) -> PathBuf {
        self.data_dir
            .join("platform/claims")
            .join(format!("{}-{}.json", step.job_id, step.step_id))
    }

    fn job_path(&self, job_id: &str) -> PathBuf {
        self.data_dir
            .join("platform/jobs")
            .join(format!("{job_id}.json"))
    }

    fn context_path(&self, job_id: &str) -> PathBuf {
        self.data_dir
            .join(Area::Output.local_folder())
            .join(ObjectKey::context(job_id).path)
    }
}

impl JobRecord {
    /// Whether the step has an outcome that its job lacks. An executor behind a hub reports the two one after the other.
    fn is_half_reported(&self, step_id: &str) -> bool {
        let has = |step: &StepRecord, statuses: &[StepStatus]| statuses.contains(&step.status);
        let ended = [StepStatus::Completed, StepStatus::Failed];
        self.status == JobStatus::Running
            && self.step(step_id).is_some_and(|step| has(step, &ended))
            && !self
                .steps
                .iter()
                .any(|step| has(step, &[StepStatus::Running]))
    }

    /// Completes a job that is `pending` but has no next step (contract 2.8).
    pub fn complete_when_done(&mut self) {
        let waiting = self
            .steps
            .iter()
            .any(|step| step.status == StepStatus::Pending);
        match self.status {
            JobStatus::Pending if !waiting => self.status = JobStatus::Completed,
            JobStatus::Completed => {
                for step in self
                    .steps
                    .iter_mut()
                    .filter(|step| step.status == StepStatus::Pending)
                {
                    step.status = StepStatus::NotExecuted;
                }
            }
            _ => {}
        }
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, PlatformError> {
    let record = read_record(path)?;
    let parsed = record.map(|text| serde_json::from_slice(&text)).transpose();
    parsed.map_err(|source| PlatformError::Corrupt {
        path: path.to_owned(),
        source,
    })
}

/// Code of a run can put a FIFO in the place of a record.
fn read_record(path: &Path) -> Result<Option<Vec<u8>>, PlatformError> {
    match regular_file::read(path, MAX_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(PlatformError::record("read", path)(error)),
    }
}

fn is_plan(step_type: &str) -> bool {
    matches!(
        StepType::parse(step_type),
        Some(StepType::Plan | StepType::PlanDestroy)
    )
}

/// Whether a write must be on disk before the call returns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Durability {
    /// For records on which the platform decides.
    Synced,
    /// For records that may be older after a crash of the machine, but never incomplete.
    Complete,
    /// For records that are only shown. The rename keeps them complete for readers.
    Eventual,
}

fn write_json<T: Serialize>(
    path: &Path,
    value: &T,
    durability: Durability,
) -> Result<(), PlatformError> {
    let mut text = serde_json::to_vec_pretty(value)
        .map_err(|error| PlatformError::record("write", path)(error.into()))?;
    text.push(b'\n');
    write_record(path, &text, durability)
}

fn write_record(path: &Path, text: &[u8], durability: Durability) -> Result<(), PlatformError> {
    let write = || {
        let folder = private_parent(path)?;
        let mut draft = tempfile::NamedTempFile::new_in(folder)?;
        draft.write_all(text)?;
        if durability != Durability::Eventual {
            draft.as_file().sync_all()?;
        }
        draft.persist(path)?;
        match durability {
            Durability::Synced => sync_folder(folder),
            Durability::Complete | Durability::Eventual => Ok(()),
        }
    };
    write().map_err(PlatformError::record("write", path))
}

/// Locks a record for writing. Readers need no lock.
fn lock(path: &Path) -> Result<Flock<File>, PlatformError> {
    let lock_path = path.with_extension("lock");
    let open = || {
        private_parent(path)?;
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            // To open a FIFO for writing alone waits for a reader.
            .read(true)
            .write(true)
            .mode(0o600)
            .open(&lock_path)?;
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| io::Error::from(errno))
    };
    open().map_err(PlatformError::record("lock", &lock_path))
}

/// Creates the folder of `path`, private to its owner because records contain what was planned and applied.
fn private_parent(path: &Path) -> io::Result<&Path> {
    let folder = path.parent();
    private_folder(folder.expect("every record is below the data directory"))
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use job_contract::final_statuses::{Ending, FinalStatuses};
    use serde_json::json;
    use std::sync::{Barrier, mpsc};
    use std::thread;
    use test_peers::wait::DEADLINE;

    fn step(id: &str, step_type: StepType) -> StepRef {
        StepRef {
            organization_id: "org".into(),
            workspace_id: "ws".into(),
            job_id: "7".into(),
            step_id: id.into(),
            step_type: step_type.name().into(),
        }
    }

    fn holder(uid: usize) -> Holder {
        Holder {
            pod: format!("pod-{uid}"),
            uid: uid.to_string(),
            since: "2026-01-01T00:00:00Z".into(),
        }
    }

    fn two_steps(platform: &LocalPlatform) {
        let steps = vec![
            StepRecord::pending("plan", "terraformPlan"),
            StepRecord::pending("apply", "terraformApply"),
        ];
        platform
            .put_job("7", &JobRecord::queued("org", "ws", steps))
            .unwrap();
    }

    fn outcome(step_type: StepType, ending: Ending, plan: PlanReference) -> Outcome {
        Outcome {
            statuses: FinalStatuses::of(step_type, ending, true, false, 2),
            output: Some("log".into()),
            note: None,
            plan,
            commit_id: Some("abc".into()),
        }
    }

    /// Code of a run can put one in the place of each file.
    #[test]
    fn a_fifo_instead_of_a_record_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let platform = LocalPlatform::new(folder.path());
        let path = platform.job_path("7");
        private_parent(&path).unwrap();
        for path in [path.with_extension("lock"), path] {
            nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        }
        let (said, hear) = mpsc::channel();
        thread::spawn(move || {
            said.send(platform.job("7").is_err()).unwrap();
            let changed = platform.update_job(&step("plan", StepType::Plan), |_| {});
            said.send(changed.is_err()).unwrap();
        });
        for _ in 0..2 {
            assert_eq!(hear.recv_timeout(DEADLINE), Ok(true));
        }
    }

    #[test]
    fn plan_and_apply_bring_the_record_to_completed() {
        let folder = tempfile::tempdir().unwrap();
        let platform = LocalPlatform::new(folder.path());
        two_steps(&platform);
        let (plan, apply) = (step("plan", StepType::Plan), step("apply", StepType::Apply));

        assert!(!platform.step_view(&apply).unwrap().planned);
        platform.report_running(&plan, "abc", "log").unwrap();
        assert_eq!(
            platform.job("7").unwrap().unwrap().status,
            JobStatus::Running
        );
        let planned = outcome(
            StepType::Plan,
            Ending::Changes,
            PlanReference::Set("/plan".into()),
        );
        platform.report_outcome(&plan, &planned).unwrap();

        let view = platform.step_view(&apply).unwrap();
        assert_eq!(view.status, JobStatus::Pending);
        assert!(view.planned);
        assert_eq!(view.terraform_plan.as_deref(), Some("/plan"));
        platform
            .report_outcome(
                &apply,
                &outcome(StepType::Apply, Ending::Success, PlanReference::Keep),
            )
            .unwrap();
        assert_eq!(
            platform.job("7").unwrap().unwrap().status,
            JobStatus::Completed
        );
    }

    #[test]
    fn a_plan_without_changes_leaves_the_apply_unexecuted() {
        let folder = tempfile::tempdir().unwrap();
        let platform = LocalPlatform::new(folder.path());
        two_steps(&platform);
        let done = outcome(
            StepType::Plan,
            Ending::Success,
            PlanReference::Set("/plan".into()),
        );
        platform
            .report_outcome(&step("plan", StepType::Plan), &done)
            .unwrap();
        let record = platform.job("7").unwrap().unwrap();
        assert_eq!(record.status, JobStatus::Completed);
        assert_eq!(
            record.step("apply").unwrap().status,
            StepStatus::NotExecuted
        );
    }

    #[test]
    fn a_cancelled_job_keeps_its_status() {
        let folder = tempfile::tempdir().unwrap();
        let platform = LocalPlatform::new(folder.path());
        let apply = step("apply", StepType::Apply);
        platform
            .update_job(&apply, |record| record.status = JobStatus::Cancelled)
            .unwrap();
        platform
            .report_outcome(
                &apply,
                &outcome(StepType::Apply, Ending::Failure, PlanReference::Keep),
            )
            .unwrap();
        let record = platform.job("7").unwrap().unwrap();
        assert_eq!(record.status, JobStatus::Cancelled);
        assert_eq!(record.step("apply").unwrap().status, StepStatus::Failed);
    }

    #[test]
    fn an_unreadable_claim_is_a_claim() {
        let folder = tempfile::tempdir().unwrap();
        let platform = LocalPlatform::new(folder.path());
        let apply = step("apply", StepType::Apply);
        let path = platform.claim_path(&apply);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        assert_eq!(
            platform.claim(&apply, &holder(1)).unwrap(),
            Claim::Taken(Holder::unknown())
        );
    }

    #[test]
    fn one_of_many_claimants_is_granted_the_step() {
        let folder = tempfile::tempdir().unwrap();
        let platform = LocalPlatform::new(folder.path());
        let apply = step("apply", StepType::Apply);
        let start = Barrier::new(16);
        let claims: Vec<Claim> = thread::scope(|scope| {
            let threads: Vec<_> = (0..16)
                .map(|uid| {
                    let (platform, apply, start) = (&platform, &apply, &start);
                    scope.spawn(move || {
                        start.wait();
                        platform.claim(apply, &holder(uid)).unwrap()
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let winner = claims
            .iter()
            .position(|claim| *claim == Claim::Granted)
            .unwrap();
        for (uid, claim) in claims.iter().enumerate().filter(|(uid, _)| *uid != winner) {
            assert_eq!(*claim, Claim::Taken(holder(winner)), "claimant {uid}");
        }
    }

    #[test]
    fn concurrent_updates_of_one_record_are_all_kept() {
        let folder = tempfile::tempdir().unwrap();
        let platform = LocalPlatform::new(folder.path());
        thread::scope(|scope| {
            for writer in 0..8 {
                let platform = &platform;
                scope.spawn(move || {
                    for n in 0..10 {
                        let patch = json!({ "k": { format!("{writer}-{n}"): true } });
                        platform
                            .merge_context("7", patch.as_object().unwrap())
                            .unwrap();
                    }
                });
            }
        });
        assert_eq!(
            platform.context("7").unwrap()["k"]
                .as_object()
                .unwrap()
                .len(),
            80
        );
    }

    #[test]
    fn a_context_patch_keeps_what_it_does_not_name() {
        let folder = tempfile::tempdir().unwrap();
        let platform = LocalPlatform::new(folder.path());
        for patch in [
            json!({"user": 1, "plans": {"a": [1]}}),
            json!({"plans": {"b": [2]}}),
        ] {
            platform
                .merge_context("7", patch.as_object().unwrap())
                .unwrap();
        }
        assert_eq!(
            Value::Object(platform.context("7").unwrap()),
            json!({"user": 1, "plans": {"a": [1], "b": [2]}})
        );
    }

    #[test]
    fn a_corrupt_record_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let platform = LocalPlatform::new(folder.path());
        two_steps(&platform);
        fs::write(folder.path().join("platform/jobs/7.json"), "{").unwrap();
        let error = platform.job("7").unwrap_err().to_string();
        assert!(error.contains("7.json"), "{error}");
    }
}
