//! Leaves the files that a plan step has changed to the apply of its plan, and takes them there.
//!
//! `plan_files` knows which files those are. This phase stores them beside the plan, and notes them in the plan's record.

use std::fs::File;
use std::path::Path;

use artifact_store::{Digest, StoreError};
use job_contract::keys::ObjectKey;
use job_contract::{JobData, chain, env};
use tracing::warn;

use crate::context::RunContext;
use crate::error::StepError;
use crate::operation::OperationContext;
use crate::plan_files::{
    self, Choice, PackError, Packed, PlanFilesRecord, Snapshot, StoredFiles, listed,
};
use crate::stored_plan::{self, PlanRecord, ReviewedPlan};
use crate::workspace::{ArchiveLimits, StopOnDrop, Workspace};

/// More files are packages of a language, which are better installed again.
const MAX_ENTRIES: u64 = 50_000;
const ARCHIVE: &str = "plan-files.tar.gz";

/// The work tree before the scripts of a plan step.
#[derive(Debug)]
pub(crate) struct TreeBefore {
    choice: Choice,
    snapshot: Result<Snapshot, PackError>,
}

fn limits(run: &RunContext<'_>) -> ArchiveLimits {
    ArchiveLimits {
        max_bytes: run.config.run.plan_files_max_bytes,
        max_entries: MAX_ENTRIES,
    }
}

/// Looks at the work tree before a script can change it. `None` if the operator keeps files from applies.
pub(crate) async fn look_before(
    run: &RunContext<'_>,
    workspace: &Workspace,
) -> Result<Option<TreeBefore>, StepError> {
    if !run.config.run.plan_files {
        return Ok(None);
    }
    let data_dir = run.child_env().get("TF_DATA_DIR");
    let data_dir = data_dir.and_then(|folder| Path::new(folder).file_name()?.to_str());
    let choice = Choice {
        root: workspace.root.clone(),
        data_dir: data_dir.map(str::to_owned),
        only: run.job.artifact_patterns.clone(),
        exclude: excluded(&run.job),
        limits: limits(run),
    };
    let (looking, stop) = (choice.clone(), StopOnDrop::default());
    let stopped = stop.flag();
    let looked = tokio::task::spawn_blocking(move || looking.snapshot(&stopped));
    let looked = run.unless_stopped(async { looked.await.map_err(|_| StepError::panicked()) });
    Ok(Some(TreeBefore {
        choice,
        snapshot: looked.await?,
    }))
}

/// The patterns by which a workspace excludes files: one in a line, or separated by commas.
fn excluded(job: &JobData) -> Vec<String> {
    let text = job.environment_variables.get(env::PLAN_FILES_EXCLUDE);
    let patterns = text.into_iter().flat_map(|text| text.split(['\n', ',']));
    let patterns = patterns.map(str::trim).filter(|line| !line.is_empty());
    patterns.map(str::to_owned).collect()
}

/// Stores what differs from the tree before the step, and notes it in the plan's record. An error means that the store cannot be
/// used. Files that are too many or too large are left out, and the log says so.
pub(crate) async fn leave_files(
    context: &OperationContext<'_, '_>,
    before: TreeBefore,
    record: &mut PlanRecord,
) -> Result<(), StepError> {
    let run = context.run;
    let mut files = PlanFilesRecord {
        providers: plan_files::providers(&context.prepared.working_dir),
        ..PlanFilesRecord::default()
    };
    let archive = run.layout.private().join(ARCHIVE);
    match pack(run, before, &archive).await? {
        Ok(packed) => {
            if !packed.refused.is_empty() {
                let names = listed(&packed.refused);
                let text = format!(
                    "Not left to the apply, because they lead out of the source or are no files: {names}"
                );
                run.log.writer().line(&text).await;
            }
            if !packed.paths.is_empty() {
                store(run, &packed, &archive, &mut files).await?;
            }
        }
        Err(error) => files.left_out = Some(error.to_string()),
    }
    if let Some(why) = &files.left_out {
        let text = format!("The files of this step are not left to its apply: {why}");
        run.log_failure(&text).await;
    }
    if files == PlanFilesRecord::default() {
        return Ok(());
    }
    record.files = Some(files);
    let noted = stored_plan::note(&run.store, &run.job, Some(record.clone()));
    run.stored(noted).await?;
    publish_record(run, record).await;
    Ok(())
}

async fn pack(
    run: &RunContext<'_>,
    before: TreeBefore,
    archive: &Path,
) -> Result<Result<Packed, PackError>, StepError> {
    let TreeBefore { choice, snapshot } = before;
    let snapshot = match snapshot {
        Ok(snapshot) => snapshot,
        Err(error) => return Ok(Err(error)),
    };
    let (target, stop) = (archive.to_owned(), StopOnDrop::default());
    let stopped = stop.flag();
    let packing = move || choice.pack(&snapshot, &target, &stopped);
    let packing = tokio::task::spawn_blocking(packing);
    run.unless_stopped(async { packing.await.map_err(|_| StepError::panicked()) })
        .await
}

async fn store(
    run: &RunContext<'_>,
    packed: &Packed,
    archive: &Path,
    files: &mut PlanFilesRecord,
) -> Result<(), StepError> {
    let job = &run.job;
    let key = ObjectKey::plan_files(
        &job.organization_id,
        &job.workspace_id,
        &job.job_id,
        &job.step_id,
    );
    let digest = Digest::of(archive).map_err(|source| StepError::working_dir(archive, &source))?;
    let storing = async { Ok(run.store.put_file(&key, archive).await) };
    let reference = match run.stored(storing).await? {
        Ok(reference) => reference,
        Err(
            StoreError::Foreign { .. } | StoreError::Rejected { .. } | StoreError::TooLarge { .. },
        ) if run.store.hub().is_some() => {
            files.left_out = Some("the hub does not take them".to_owned());
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let text = format!(
        "Left to the apply: {} files, {} bytes: {}",
        packed.paths.len(),
        packed.bytes,
        listed(&packed.paths)
    );
    run.log.writer().line(&text).await;
    files.archive = Some(StoredFiles {
        reference,
        sha256: digest.sha256,
        size_bytes: digest.size_bytes,
    });
    Ok(())
}

/// Publishes the plan's record again, with its files. If that fails, the apply finds them in the note in the store.
async fn publish_record(run: &RunContext<'_>, record: &PlanRecord) {
    let patch = record.patch(&run.job.step_id);
    let deadline = run.while_saving(std::time::Duration::MAX);
    let published = tokio::select! {
        biased;
        published = run.connections.platform.merge_context(&run.step, &patch) => {
            published.map_err(|error| chain(&error))
        }
        () = deadline.over() => Err("the time for saving is over".to_owned()),
    };
    if let Err(error) = published {
        warn!(error, "the record of the plan is not in the job context");
    }
}

/// Puts the files of the reviewed plan into the work tree. A plan of other executors has none.
pub(crate) async fn take_files(
    run: &RunContext<'_>,
    workspace: &Workspace,
    plan: &ReviewedPlan,
) -> Result<(), StepError> {
    let files = plan
        .record
        .as_ref()
        .and_then(|record| record.files.as_ref());
    let Some(files) = files else {
        return Ok(());
    };
    if let Some(why) = &files.left_out {
        let text = format!("Files that the plan's step has changed are missing here: {why}");
        run.log.writer().line(&text).await;
    }
    let Some(stored) = &files.archive else {
        return Ok(());
    };
    if !run.config.run.plan_files {
        let text = format!(
            "The files of the plan are not used, because `{}` is `false`.",
            env::PLAN_FILES
        );
        run.log.writer().line(&text).await;
        return Ok(());
    }
    let archive = run.layout.private().join(ARCHIVE);
    let fetched = run
        .store
        .fetch_at_most(&stored.reference, &archive, stored.size_bytes)
        .await;
    let is_it = match fetched {
        Ok(digest) => stored.is(&digest),
        Err(StoreError::TooLarge { .. }) => false,
        Err(error) => return Err(stored_plan::unavailable("the files of the plan", &error)),
    };
    if !is_it {
        return Err(stored_plan::altered(
            "the files of the plan",
            &stored.reference,
        ));
    }
    let archive =
        File::open(&archive).map_err(|source| StepError::working_dir(&archive, &source))?;
    let (root, limits) = (workspace.root.clone(), limits(run));
    let stop = StopOnDrop::default();
    let stopped = stop.flag();
    let unpack = move || plan_files::unpack(archive, &root, limits, &stopped);
    let unpacked = tokio::task::spawn_blocking(unpack).await;
    let unpacked = unpacked.map_err(|_| StepError::panicked())??;
    let text = format!(
        "Taken over from the plan: {} files, {} bytes.",
        unpacked.entries, unpacked.bytes
    );
    run.log.writer().line(&text).await;
    Ok(())
}

/// Names the providers that `init` has chosen and the plan was not made with.
pub(crate) async fn name_other_providers(context: &OperationContext<'_, '_>) {
    let record = context
        .prepared
        .plan
        .as_ref()
        .and_then(|plan| plan.record.as_ref());
    let Some(files) = record.and_then(|record| record.files.as_ref()) else {
        return;
    };
    let now = plan_files::providers(&context.prepared.working_dir);
    let differences = plan_files::differences(&files.providers, &now);
    if !differences.is_empty() {
        let text = format!(
            "Providers differ from the plan's: {}",
            differences.join(", ")
        );
        context.run.log_failure(&text).await;
    }
}
