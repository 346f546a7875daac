//! Starts an executor process with the environment of a pod, for benchmarks.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use job_contract::keys::ObjectKey;
use job_contract::report::FinalReport;
use job_contract::{JobData, encoding, env};

/// The job data of all benchmarks. The ids can be equal, because each run has its own data directory.
pub(super) fn job(step_type: job_contract::StepType, content: &Path) -> JobData {
    JobData {
        step_type: Some(step_type.name().to_owned()),
        organization_id: "bench-organization".to_owned(),
        workspace_id: "bench-workspace".to_owned(),
        job_id: "1".to_owned(),
        step_id: format!("bench-{step_type}"),
        terraform_version: "*".to_owned(),
        source: Some(format!("file://{}", content.display())),
        branch: job_contract::job::REMOTE_CONTENT.to_owned(),
        folder: Some("/".to_owned()),
        vcs_type: Some("PUBLIC".to_owned()),
        ..JobData::default()
    }
}

/// The folders of one executor.
pub(super) struct ExecutorFolders {
    pub(super) folder: PathBuf,
    pub(super) path: OsString,
}

impl ExecutorFolders {
    pub(super) fn new(folder: PathBuf, path: OsString) -> Result<Self> {
        for name in ["data", "home", "work"] {
            fs::create_dir_all(folder.join(name))?;
        }
        Ok(Self { folder, path })
    }

    /// Records the job as a platform does before it dispatches the first step.
    pub(super) fn queue(&self, steps: &[&JobData]) -> Result<()> {
        let folder = self.folder.join("data/platform/jobs");
        fs::create_dir_all(&folder)?;
        let steps: Vec<_> = steps
            .iter()
            .map(|job| serde_json::json!({"id": job.step_id, "type": job.step_type, "status": "pending"}))
            .collect();
        let record = serde_json::json!({
            "organizationId": "bench-organization", "workspaceId": "bench-workspace", "status": "queue",
            "steps": steps,
        });
        fs::write(folder.join("1.json"), record.to_string())?;
        Ok(())
    }

    pub(super) fn command(&self, binary: &Path, job: &JobData) -> Command {
        let mut command = Command::new(binary);
        command
            .env_clear()
            .env("PATH", &self.path)
            .env("HOME", self.folder.join("home"))
            .env(env::BATCH, "true")
            .env(env::JOB_DATA, encoding::encode(job))
            .env(env::STATE_TYPE, "LocalTerraformStateImpl")
            .env(env::COLOR_OUTPUT, "false")
            .env(env::DATA_DIR, self.folder.join("data"))
            .env(env::WORK_DIR, self.folder.join("work"))
            .env(env::OUTCOME_EXIT_CODE, "true")
            .env(env::LOG_FORMAT, "json")
            .env(env::TOOL_SELECTION, "installed")
            .env(env::TERMINATION_LOG, self.folder.join("termination"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// The path of a step's log.
    pub(super) fn step_output(&self, job: &JobData) -> PathBuf {
        let key = ObjectKey::step_output(&job.organization_id, &job.job_id, &job.step_id);
        self.folder
            .join("data")
            .join(key.area.local_folder())
            .join(key.path)
    }

    /// Fails with the executor's final report if the step did not succeed.
    pub(super) fn ensure_done(&self, status: std::process::ExitStatus) -> Result<()> {
        let path = self.folder.join("termination");
        let said = fs::read_to_string(&path).context("the executor wrote no final report")?;
        fs::remove_file(path)?;
        let report: FinalReport =
            serde_json::from_str(&said).with_context(|| format!("no final report: {said}"))?;
        ensure!(
            status.success() && report.outcome == 0,
            "the executor ended with {status}: {said}"
        );
        Ok(())
    }
}

/// Packs a folder as content for [`job`].
pub(super) fn pack(folder: &Path, archive: &Path) -> Result<()> {
    let status = Command::new("tar")
        .arg("-czf")
        .arg(archive)
        .arg("-C")
        .arg(folder)
        .arg(".")
        .status()
        .context("could not start `tar`")?;
    ensure!(status.success(), "tar failed ({status})");
    Ok(())
}
