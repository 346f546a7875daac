//! The plan in the artifact store, between plan step and apply step (contract 6.2). This module stores the plan,
//! records it in a note, and decides which plan an apply may use.
//!
//! An apply uses exactly the reviewed plan. The plan step records the plan's digest and the tool's version separately
//! from the plan, in the job context and in the store. The apply step refuses a plan that is missing, empty, altered or
//! of unknown origin. If no platform records the steps of a job, the note in the store also shows that the job was
//! planned.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use artifact_store::{Digest, HTTP, Store, StoreError};
use job_contract::job::NO_COMMIT;
use job_contract::keys::ObjectKey;
use job_contract::{Exit, JobData, Tool, env};
use platform::StepView;
use runtime::regular_file;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tracing::warn;

use crate::error::{PLAN_AGAIN, StepError};
use crate::plan_files::PlanFilesRecord;
use crate::tool::ResolvedTool;

/// Key of the job context in which plan steps save their [`PlanRecord`].
pub const CONTEXT_KEY: &str = "mayflyPlan";

/// The plan, in messages.
const PLAN: &str = "the reviewed plan";

/// Every plan file is a zip archive.
const ZIP_MAGIC: &[u8] = b"PK\x03\x04";

/// The metadata of a stored plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanRecord {
    /// Where it is stored.
    pub reference: String,
    pub sha256: String,
    pub size_bytes: u64,
    /// The tool that made it. No other tool can apply it.
    pub tool: Tool,
    pub version: String,
    /// The commit that it was made of. Its apply takes the same one.
    pub commit_id: String,
    /// The tool's backend, which is a part of the plan. Earlier versions did not note it, and used no hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// The hooks of the operator that have let this plan pass. Without it, an executor with a `post-plan` hook asks its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judged_by: Option<String>,
    /// The files that its step leaves to the apply. Earlier versions left none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<PlanFilesRecord>,
}

impl PlanRecord {
    /// The patch of the job context that saves this record for a step.
    pub fn patch(&self, step_id: &str) -> Map<String, Value> {
        let mut patch = Map::new();
        patch.insert(CONTEXT_KEY.to_owned(), json!({ step_id: self }));
        patch
    }

    fn find(context: &Map<String, Value>, reference: &str) -> Option<Self> {
        let plans = context.get(CONTEXT_KEY)?.as_object()?.values();
        plans
            .filter_map(|record| serde_json::from_value::<Self>(record.clone()).ok())
            .find(|record| record.reference == reference)
    }
}

/// The note of a plan step in the store. It is for an apply step whose pod shares only the store with the plan step's
/// pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanNote {
    /// The step that planned last.
    pub step_id: String,
    /// Its plan; none while the step is planning, or if planning failed.
    pub plan: Option<PlanRecord>,
}

fn note_key(job: &JobData) -> ObjectKey {
    ObjectKey::plan_record(&job.organization_id, &job.workspace_id, &job.job_id)
}

impl PlanNote {
    /// Saves the note for later steps.
    pub async fn save(&self, store: &Store, job: &JobData) -> Result<(), StoreError> {
        let text = serde_json::to_vec(self).expect("a note has no failing serialiser");
        store.put(&note_key(job), text).await.map(drop)
    }

    /// The note of the job; none if no plan step has saved one.
    pub async fn read(store: &Store, job: &JobData) -> Result<Option<Self>, StepError> {
        let key = note_key(job);
        let text = store
            .read(&key)
            .await
            .map_err(|error| unavailable(PLAN, &error))?;
        let note = text.map(|text| serde_json::from_slice(&text)).transpose();
        note.map_err(|source| {
            let note = key.in_bucket();
            refusal(format!("the note of the plan in `{note}` cannot be read")).because(&source)
        })
    }
}

/// A plan that the tool has made.
#[derive(Debug)]
pub struct NewPlan<'p> {
    pub file: &'p Path,
    pub digest: Digest,
    pub tool: &'p ResolvedTool,
    pub commit_id: &'p str,
    /// The tool's backend.
    pub backend: &'static str,
}

/// Stores a plan, and saves its note for later steps. The order does not matter: an apply refuses a plan that is missing, or
/// that differs from its note. A plan that could not be stored has no note.
pub async fn store(
    store: &Store,
    job: &JobData,
    plan: NewPlan<'_>,
) -> Result<PlanRecord, StoreError> {
    let key = ObjectKey::plan(
        &job.organization_id,
        &job.workspace_id,
        &job.job_id,
        &job.step_id,
    );
    let record = PlanRecord {
        reference: store.reference(&key).await?,
        sha256: plan.digest.sha256,
        size_bytes: plan.digest.size_bytes,
        tool: plan.tool.tool,
        version: plan.tool.version.to_string(),
        commit_id: plan.commit_id.to_owned(),
        backend: Some(plan.backend.to_owned()),
        judged_by: None,
        files: None,
    };
    let (stored, noted) = tokio::join!(
        store.put_file(&key, plan.file),
        note(store, job, Some(record.clone()))
    );
    if let Err(error) = stored {
        if noted.is_ok()
            && let Err(error) = note(store, job, None).await
        {
            warn!(%error, "the note of a plan that could not be stored is not removed");
        }
        return Err(error);
    }
    noted?;
    Ok(record)
}

/// Saves the note that the job was planned, and its plan.
pub async fn note(
    store: &Store,
    job: &JobData,
    plan: Option<PlanRecord>,
) -> Result<(), StoreError> {
    let step_id = job.step_id.clone();
    PlanNote { step_id, plan }.save(store, job).await
}

/// An apply must not use the plan. The document is valid, but the plan that it refers to is not.
fn refusal(text: impl Into<String>) -> StepError {
    StepError::new(Exit::StepFailed, text).with_hint(PLAN_AGAIN)
}

/// The template forbids an apply without a plan, and no step has planned.
fn unplanned() -> StepError {
    let text = "the template requires a saved plan (`requireSavedPlan`), and no step of the job has made one";
    StepError::new(Exit::StepFailed, text)
        .with_hint("add a step of the type `terraformPlan` before the apply to the template")
}

/// What an apply needs cannot be had from the store.
pub(crate) fn unavailable(what: &str, error: &StoreError) -> StepError {
    let exit = match error {
        // The cause is neither the plan nor the review.
        StoreError::Unavailable { .. } => Exit::Infrastructure,
        _ => Exit::StepFailed,
    };
    StepError::new(exit, format!("{what} cannot be fetched"))
        .because(error)
        .with_hint(error.hint().unwrap_or_else(|| PLAN_AGAIN.to_owned()))
}

/// What an apply needs is not what the plan step has stored.
pub(crate) fn altered(what: &str, reference: &str) -> StepError {
    refusal(format!(
        "{what} in `{reference}` was altered after it was made"
    ))
}

/// A fetched plan that may be applied.
#[derive(Debug)]
pub struct ReviewedPlan {
    file: PathBuf,
    digest: Digest,
    reference: String,
    /// The record of the plan step. Other executors save none.
    pub record: Option<PlanRecord>,
    /// Whether this step has made it.
    is_own: bool,
}

/// The inputs for fetching the job's plan: the facts about it, and the folder for its content.
#[derive(Debug)]
pub struct PlanFetcher<'h> {
    pub job: &'h JobData,
    pub view: &'h StepView,
    pub context: &'h Map<String, Value>,
    pub store: &'h Store,
    /// The tool's backend, which must be the one of the plan.
    pub backend: &'static str,
    /// A folder that no other user can read.
    pub private: &'h Path,
    /// Whether a platform records the job's steps and its plan. If not, the note in the store counts.
    pub platform_keeps_records: bool,
    /// Whether a plan without a record may be applied.
    pub mixed_fleet: bool,
}

impl PlanFetcher<'_> {
    /// Fetches the job's plan; `None` if the job has no plan step whose plan it must use.
    pub async fn fetch(&self) -> Result<Option<ReviewedPlan>, StepError> {
        let mut note = None;
        let mut reference = self.view.terraform_plan.clone();
        let mut planned = self.view.planned;
        if reference.is_none() && !planned && !self.platform_keeps_records {
            note = PlanNote::read(self.store, self.job).await?;
            planned = note.is_some();
            let plan = note.as_ref().and_then(|note| note.plan.as_ref());
            reference = plan.map(|plan| plan.reference.clone());
        }
        let Some(reference) = reference else {
            return if planned {
                Err(refusal(
                    "the job has a reviewed plan, but the platform no longer knows where it is stored",
                ))
            } else if self.job.require_saved_plan {
                Err(unplanned())
            } else {
                Ok(None)
            };
        };
        let mut record = PlanRecord::find(self.context, &reference);
        // Some platforms have no job context, and in some the last update of the record is missing, with its files.
        if record.as_ref().is_none_or(|record| record.files.is_none()) {
            if note.is_none() {
                note = match PlanNote::read(self.store, self.job).await {
                    Err(error) if record.is_some() => {
                        warn!(%error, "the note of the plan is not used");
                        None
                    }
                    read => read?,
                };
            }
            let noted = note
                .and_then(|note| note.plan)
                .filter(|noted| noted.reference == reference);
            record = match (record, noted) {
                (Some(record), Some(noted)) if record.sha256 == noted.sha256 => Some(noted),
                (Some(record), _) => Some(record),
                (None, noted) => noted,
            };
        }
        if record.is_none() && !self.mixed_fleet {
            let hint = format!(
                "plan again; if other executors make plans too, set {}=true to apply their plans",
                env::MIXED_FLEET
            );
            let text =
                format!("the plan in `{reference}` has no record of the executor that made it");
            return Err(refusal(text).with_hint(hint));
        }
        check_backend(record.as_ref(), self.backend, &reference)?;
        fetch_and_check(self.store, self.private, self.job.tool(), reference, record)
            .await
            .map(Some)
    }
}

/// Refuses a plan with another backend: the tool would read and write the state somewhere else.
fn check_backend(record: Option<&PlanRecord>, own: &str, reference: &str) -> Result<(), StepError> {
    let made = record.and_then(|record| record.backend.as_deref());
    let of_hub = "is kept by a hub (backend `http`)";
    let text = match made {
        Some(made) if made == own => return Ok(()),
        None if own != HTTP => return Ok(()),
        Some(HTTP) => format!("state {of_hub}, and this executor uses the backend `{own}`"),
        Some(made) => format!("state is in the backend `{made}`, and this executor uses `{own}`"),
        None => format!("state is not kept by a hub, and this executor's state {of_hub}"),
    };
    Err(refusal(format!(
        "the reviewed plan in `{reference}` cannot be applied here: its {text}"
    )))
}

async fn fetch_and_check(
    store: &Store,
    private: &Path,
    tool: Tool,
    reference: String,
    record: Option<PlanRecord>,
) -> Result<ReviewedPlan, StepError> {
    let file = private.join("reviewed.tfPlan");
    let digest = store
        .fetch(&reference, &file)
        .await
        .map_err(|error| unavailable(PLAN, &error))?;
    if digest.size_bytes == 0 {
        return Err(refusal(format!(
            "the reviewed plan in `{reference}` is empty"
        )));
    }
    match &record {
        Some(record)
            if record.sha256 != digest.sha256 || record.size_bytes != digest.size_bytes =>
        {
            return Err(altered(PLAN, &reference));
        }
        Some(record) if record.tool != tool => {
            return Err(refusal(format!(
                "the reviewed plan was made by {}, this step uses {tool}",
                record.tool
            )));
        }
        Some(_) => {}
        None if is_zip(&file) => {}
        None => return Err(refusal(format!("the file in `{reference}` is not a plan"))),
    }
    Ok(ReviewedPlan {
        file,
        digest,
        reference,
        record,
        is_own: false,
    })
}

impl ReviewedPlan {
    /// A plan that the tool has just made, as its record describes it.
    pub fn of_record(file: &Path, record: PlanRecord) -> Self {
        Self {
            file: file.to_owned(),
            digest: Digest {
                sha256: record.sha256.clone(),
                size_bytes: record.size_bytes,
            },
            reference: record.reference.clone(),
            record: Some(record),
            is_own: true,
        }
    }

    /// A plan that this step has made for itself. It takes the file into a folder of its own.
    pub fn take(made: &Path, folder: &Path) -> io::Result<Self> {
        let file = folder.join("own.tfPlan");
        fs::copy(made, &file)?;
        Ok(Self {
            digest: Digest::of(&file)?,
            reference: file.display().to_string(),
            file,
            record: None,
            is_own: true,
        })
    }

    /// Whether another step has made it.
    pub fn is_reviewed(&self) -> bool {
        !self.is_own
    }

    /// The commit that it was made of. Content without a repository has none.
    pub fn commit(&self) -> Option<&str> {
        let commit = self.record.as_ref()?.commit_id.as_str();
        Some(commit).filter(|commit| !commit.is_empty() && *commit != NO_COMMIT)
    }

    /// SHA-256 of the plan.
    pub fn sha256(&self) -> &str {
        &self.digest.sha256
    }

    /// The hooks that have let this very plan pass.
    pub fn judged_by(&self) -> Option<&str> {
        self.record.as_ref()?.judged_by.as_deref()
    }

    /// Checks that a copy is still the plan.
    pub fn check_copy(&self, copy: &Path) -> Result<(), StepError> {
        match Digest::of(copy) {
            Ok(digest) if digest == self.digest => Ok(()),
            _ => Err(altered(PLAN, &self.reference)),
        }
    }

    /// Copies the plan to `target`, replacing any file of a script, and checks it again. So the applied plan is the
    /// fetched one.
    pub fn copy_to(&self, target: &Path) -> Result<(), StepError> {
        let copy = || {
            match fs::remove_file(target) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            fs::copy(&self.file, target)?;
            Digest::of(target)
        };
        let copied = copy().map_err(|source| {
            let target = target.display();
            refusal(format!("could not put the reviewed plan into `{target}`")).because(&source)
        })?;
        if copied == self.digest {
            Ok(())
        } else {
            Err(altered(PLAN, &self.reference))
        }
    }
}

fn is_zip(path: &Path) -> bool {
    let mut magic = [0; 4];
    regular_file::open(path)
        .and_then(|mut file| file.read_exact(&mut magic))
        .is_ok()
        && magic == ZIP_MAGIC
}

#[cfg(test)]
mod tests {
    use super::*;
    use job_contract::status::JobStatus;
    use tempfile::TempDir;

    struct Fixture {
        folder: TempDir,
        store: Store,
        reference: String,
    }

    impl Fixture {
        async fn new(plan: &'static [u8]) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let store = Store::local(folder.path());
            let reference = store
                .put(&ObjectKey::plan("o", "w", "1", "s"), plan)
                .await
                .unwrap();
            Self {
                folder,
                store,
                reference,
            }
        }

        fn record(&self) -> PlanRecord {
            let digest = Digest::of(Path::new(&self.reference)).unwrap();
            PlanRecord {
                reference: self.reference.clone(),
                sha256: digest.sha256,
                size_bytes: digest.size_bytes,
                tool: Tool::Terraform,
                version: "1.9.8".into(),
                commit_id: "c".into(),
                backend: Some("local".into()),
                judged_by: None,
                files: None,
            }
        }

        async fn fetch(
            &self,
            context: &Map<String, Value>,
        ) -> Result<Option<ReviewedPlan>, StepError> {
            let view = step_view(Some(self.reference.clone()), true);
            self.fetch_as(&view, context, |_| {}).await
        }

        async fn fetch_as(
            &self,
            view: &StepView,
            context: &Map<String, Value>,
            change: impl FnOnce(&mut PlanFetcher<'_>),
        ) -> Result<Option<ReviewedPlan>, StepError> {
            let private = tempfile::tempdir_in(self.folder.path()).unwrap().keep();
            let mut fetcher = PlanFetcher {
                job: &job(),
                view,
                context,
                store: &self.store,
                backend: "local",
                private: &private,
                platform_keeps_records: true,
                mixed_fleet: false,
            };
            change(&mut fetcher);
            fetcher.fetch().await
        }

        async fn note(&self, plan: Option<PlanRecord>) {
            let note = PlanNote {
                step_id: "s".into(),
                plan,
            };
            note.save(&self.store, &job()).await.unwrap();
        }
    }

    fn assert_refused(fetched: Result<Option<ReviewedPlan>, StepError>, problem: &str) {
        let error = fetched.unwrap_err();
        assert!(error.to_string().contains(problem), "{error}");
        assert_eq!(error.exit(), Exit::StepFailed);
    }

    fn job() -> JobData {
        JobData {
            organization_id: "o".into(),
            workspace_id: "w".into(),
            job_id: "1".into(),
            step_id: "apply".into(),
            ..JobData::default()
        }
    }

    fn step_view(terraform_plan: Option<String>, planned: bool) -> StepView {
        StepView {
            status: JobStatus::Queue,
            step: None,
            template_steps: 2,
            terraform_plan,
            planned,
            half_reported: false,
        }
    }

    #[tokio::test]
    async fn an_unaltered_plan_replaces_an_existing_file() {
        let fixture = Fixture::new(b"PK\x03\x04plan").await;
        let plan = fixture
            .fetch(&fixture.record().patch("s"))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(plan.record, Some(fixture.record()));
        let target = fixture.folder.path().join("terraformLibrary.tfPlan");
        fs::write(&target, "forged").unwrap();
        plan.copy_to(&target).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"PK\x03\x04plan");
    }

    #[tokio::test]
    async fn an_altered_empty_or_missing_plan_is_refused() {
        let fixture = Fixture::new(b"PK\x03\x04plan").await;
        let context = fixture.record().patch("s");
        fs::write(&fixture.reference, b"PK\x03\x04PLAN").unwrap();
        assert_refused(fixture.fetch(&context).await, "was altered");
        fs::write(&fixture.reference, b"").unwrap();
        assert_refused(fixture.fetch(&context).await, "is empty");
        fs::remove_file(&fixture.reference).unwrap();
        assert_refused(fixture.fetch(&context).await, "cannot be fetched");
    }

    #[tokio::test]
    async fn a_planned_job_without_a_plan_is_refused_and_an_unplanned_one_applies_directly() {
        let fixture = Fixture::new(b"").await;
        let fetch = async |planned| {
            let view = step_view(None, planned);
            fixture.fetch_as(&view, &Map::new(), |_| {}).await
        };
        assert_refused(fetch(true).await, "no longer knows");
        assert!(fetch(false).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn an_unplanned_job_that_requires_a_saved_plan_is_refused() {
        let fixture = Fixture::new(b"PK\x03\x04plan").await;
        let job = JobData {
            require_saved_plan: true,
            ..job()
        };
        let private = tempfile::tempdir().unwrap();
        for (platform_keeps_records, mixed_fleet) in [(true, false), (true, true), (false, false)] {
            let fetcher = PlanFetcher {
                job: &job,
                view: &step_view(None, false),
                context: &Map::new(),
                store: &fixture.store,
                backend: "local",
                private: private.path(),
                platform_keeps_records,
                mixed_fleet,
            };
            assert_refused(fetcher.fetch().await, "requires a saved plan");
        }
    }

    #[tokio::test]
    async fn a_plan_without_a_record_is_refused_unless_fleets_are_mixed() {
        let fixture = Fixture::new(b"PK\x03\x04plan").await;
        let refused = fixture.fetch(&Map::new()).await.unwrap_err();
        let hint = refused.hint().unwrap();
        assert!(hint.contains("MAYFLY_MIXED_FLEET=true"), "{hint}");
        assert_refused(Err(refused), "has no record");
        // A record of another plan does not count.
        let other = PlanRecord {
            reference: "elsewhere".into(),
            ..fixture.record()
        };
        fixture.note(Some(other.clone())).await;
        assert_refused(fixture.fetch(&other.patch("s")).await, "has no record");
        let mixed = |fetcher: &mut PlanFetcher<'_>| fetcher.mixed_fleet = true;
        let view = step_view(Some(fixture.reference.clone()), true);
        let fetched = fixture.fetch_as(&view, &Map::new(), mixed).await;
        assert_eq!(fetched.unwrap().unwrap().record, None);
    }

    #[tokio::test]
    async fn a_file_without_a_record_must_be_a_plan() {
        let fixture = Fixture::new(b"hello").await;
        let mixed = |fetcher: &mut PlanFetcher<'_>| fetcher.mixed_fleet = true;
        let view = step_view(Some(fixture.reference.clone()), true);
        assert_refused(
            fixture.fetch_as(&view, &Map::new(), mixed).await,
            "is not a plan",
        );
    }

    #[tokio::test]
    async fn a_record_in_the_store_is_enough_without_a_context() {
        let fixture = Fixture::new(b"PK\x03\x04plan").await;
        fixture.note(Some(fixture.record())).await;
        let plan = fixture.fetch(&Map::new()).await.unwrap().unwrap();
        assert_eq!(plan.record, Some(fixture.record()));
        fs::write(&fixture.reference, b"PK\x03\x04PLAN").unwrap();
        assert_refused(fixture.fetch(&Map::new()).await, "was altered");
    }

    #[tokio::test]
    async fn the_note_in_the_store_is_used_if_no_other_record_has_the_plan() {
        let fixture = Fixture::new(b"PK\x03\x04plan").await;
        let fetch = async |on_platform| {
            let change =
                |fetcher: &mut PlanFetcher<'_>| fetcher.platform_keeps_records = on_platform;
            let view = step_view(None, false);
            fixture.fetch_as(&view, &Map::new(), change).await
        };
        assert!(
            fetch(false).await.unwrap().is_none(),
            "it was never planned"
        );
        fixture.note(None).await;
        // It was planned, and there is no plan.
        assert_refused(fetch(false).await, "no longer knows");
        fixture.note(Some(fixture.record())).await;
        let plan = fetch(false).await.unwrap().unwrap();
        assert_eq!(plan.record, Some(fixture.record()));
        // The platform's record takes precedence.
        assert!(fetch(true).await.unwrap().is_none());
        let note = note_key(&job());
        fixture.store.put(&note, "{").await.unwrap();
        assert_refused(fetch(false).await, "cannot be read");
    }

    #[tokio::test]
    async fn a_plan_of_another_backend_is_refused_by_name() {
        let fixture = Fixture::new(b"PK\x03\x04plan").await;
        let fetch = async |made: Option<&str>, own: &'static str| {
            let record = PlanRecord {
                backend: made.map(str::to_owned),
                ..fixture.record()
            };
            let view = step_view(Some(fixture.reference.clone()), true);
            let change = |fetcher: &mut PlanFetcher<'_>| fetcher.backend = own;
            fixture.fetch_as(&view, &record.patch("s"), change).await
        };
        assert_refused(fetch(Some("http"), "s3").await, "is kept by a hub");
        assert_refused(fetch(Some("s3"), "http").await, "is in the backend `s3`");
        assert_refused(fetch(None, "http").await, "is not kept by a hub");
        fetch(Some("http"), "http").await.unwrap();
        fetch(None, "s3").await.unwrap();
    }

    #[tokio::test]
    async fn a_plan_of_the_other_tool_is_refused() {
        let fixture = Fixture::new(b"PK\x03\x04plan").await;
        let record = PlanRecord {
            tool: Tool::OpenTofu,
            ..fixture.record()
        };
        assert_refused(
            fixture.fetch(&record.patch("s")).await,
            "was made by OpenTofu",
        );
    }
}
