//! The hand-over of a reviewed plan from the plan step to the apply step (contract 6.2).
//!
//! What was reviewed is what is applied: the plan step leaves the plan's digest and the tool's version in the
//! job context, apart from the plan itself, and the apply step refuses a plan that is missing, empty or altered.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use artifact_store::{Digest, Store, StoreError, regular_file};
use control_plane::platform::Standing;
use job_contract::Tool;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Key of the job context under which plan steps leave their [`PlanRecord`].
pub const CONTEXT_KEY: &str = "mayflyPlan";

/// Every plan file is a zip archive.
const ZIP_MAGIC: &[u8] = b"PK\x03\x04";

/// What is known of a stored plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanRecord {
    /// Where it is stored.
    pub reference: String,
    pub sha256: String,
    pub size_bytes: u64,
    /// The tool that made it, and the only one that can apply it.
    pub tool: Tool,
    pub version: String,
    pub commit_id: String,
}

impl PlanRecord {
    /// The context patch that leaves this record for a step.
    pub fn patch(&self, step_id: &str) -> Map<String, Value> {
        let mut patch = Map::new();
        patch.insert(CONTEXT_KEY.to_owned(), json!({ step_id: self }));
        patch
    }

    fn find(context: &Map<String, Value>, reference: &str) -> Option<Self> {
        let records = context.get(CONTEXT_KEY)?.as_object()?.values();
        records
            .filter_map(|record| serde_json::from_value::<Self>(record.clone()).ok())
            .find(|record| record.reference == reference)
    }
}

/// A plan an apply must not use.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The job was planned, but the platform knows no plan.
    #[error("the job has a reviewed plan, but the platform no longer knows where it is stored")]
    Unknown,
    /// It cannot be fetched.
    #[error("the reviewed plan cannot be fetched")]
    Unavailable(#[source] StoreError),
    /// It is empty.
    #[error("the reviewed plan in `{reference}` is empty")]
    Empty { reference: String },
    /// It is not what the plan step stored.
    #[error("the reviewed plan in `{reference}` was altered after it was made")]
    Altered { reference: String },
    /// It is no plan at all.
    #[error("what is stored in `{reference}` is not a plan")]
    NotAPlan { reference: String },
    /// The other tool made it.
    #[error("the reviewed plan was made by {made_by}, this step uses {asked}")]
    OtherTool { made_by: Tool, asked: Tool },
    /// It could not be laid into the working directory.
    #[error("could not put the reviewed plan into `{}`", path.display())]
    Place {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// A fetched plan that may be applied.
#[derive(Debug)]
pub struct ReviewedPlan {
    file: PathBuf,
    digest: Digest,
    reference: String,
    /// What the plan step left; a platform's own executor leaves nothing.
    pub record: Option<PlanRecord>,
}

/// Fetches the job's plan into `private`; `None` when the job has no plan step whose plan it must use.
pub async fn fetch(
    standing: &Standing,
    context: &Map<String, Value>,
    store: &Store,
    private: &Path,
    tool: Tool,
) -> Result<Option<ReviewedPlan>, PlanError> {
    let Some(reference) = standing.terraform_plan.clone() else {
        return if standing.planned {
            Err(PlanError::Unknown)
        } else {
            Ok(None)
        };
    };
    let file = private.join("reviewed.tfPlan");
    let digest = store
        .fetch(&reference, &file)
        .await
        .map_err(PlanError::Unavailable)?;
    if digest.size_bytes == 0 {
        return Err(PlanError::Empty { reference });
    }
    let record = PlanRecord::find(context, &reference);
    match &record {
        Some(record)
            if record.sha256 != digest.sha256 || record.size_bytes != digest.size_bytes =>
        {
            return Err(PlanError::Altered { reference });
        }
        Some(record) if record.tool != tool => {
            return Err(PlanError::OtherTool {
                made_by: record.tool,
                asked: tool,
            });
        }
        Some(_) => {}
        None if is_zip(&file) => {}
        None => return Err(PlanError::NotAPlan { reference }),
    }
    Ok(Some(ReviewedPlan {
        file,
        digest,
        reference,
        record,
    }))
}

impl ReviewedPlan {
    /// Lays the plan at `target`, replacing whatever scripts put there, and checks it once more: what is applied
    /// is what was fetched.
    pub fn place(&self, target: &Path) -> Result<(), PlanError> {
        let place = || {
            match fs::remove_file(target) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            fs::copy(&self.file, target)?;
            Digest::of(target)
        };
        let placed = place().map_err(|source| PlanError::Place {
            path: target.to_owned(),
            source,
        })?;
        if placed == self.digest {
            Ok(())
        } else {
            Err(PlanError::Altered {
                reference: self.reference.clone(),
            })
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
    use job_contract::keys::ObjectKey;
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
            }
        }

        async fn fetch(
            &self,
            context: &Map<String, Value>,
        ) -> Result<Option<ReviewedPlan>, PlanError> {
            let private = tempfile::tempdir_in(self.folder.path()).unwrap().keep();
            let standing = standing(Some(self.reference.clone()), true);
            fetch(&standing, context, &self.store, &private, Tool::Terraform).await
        }
    }

    fn standing(terraform_plan: Option<String>, planned: bool) -> Standing {
        Standing {
            status: JobStatus::Queue,
            step: None,
            template_steps: 2,
            terraform_plan,
            planned,
            half_told: false,
        }
    }

    #[tokio::test]
    async fn an_unaltered_plan_is_placed_over_whatever_is_there() {
        let fixture = Fixture::new(b"PK\x03\x04plan").await;
        let plan = fixture
            .fetch(&fixture.record().patch("s"))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(plan.record, Some(fixture.record()));
        let target = fixture.folder.path().join("terraformLibrary.tfPlan");
        fs::write(&target, "forged").unwrap();
        plan.place(&target).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"PK\x03\x04plan");
    }

    #[tokio::test]
    async fn an_altered_empty_or_missing_plan_is_refused() {
        let fixture = Fixture::new(b"PK\x03\x04plan").await;
        let context = fixture.record().patch("s");
        fs::write(&fixture.reference, b"PK\x03\x04PLAN").unwrap();
        assert!(matches!(
            fixture.fetch(&context).await,
            Err(PlanError::Altered { .. })
        ));
        fs::write(&fixture.reference, b"").unwrap();
        assert!(matches!(
            fixture.fetch(&context).await,
            Err(PlanError::Empty { .. })
        ));
        fs::remove_file(&fixture.reference).unwrap();
        assert!(matches!(
            fixture.fetch(&context).await,
            Err(PlanError::Unavailable(_))
        ));
    }

    #[tokio::test]
    async fn a_planned_job_without_a_plan_is_refused_and_an_unplanned_one_applies_directly() {
        let fixture = Fixture::new(b"").await;
        let fetch = async |planned| {
            fetch(
                &standing(None, planned),
                &Map::new(),
                &fixture.store,
                fixture.folder.path(),
                Tool::Terraform,
            )
            .await
        };
        assert!(matches!(fetch(true).await, Err(PlanError::Unknown)));
        assert!(fetch(false).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_plan_without_a_record_must_at_least_be_one() {
        assert!(
            Fixture::new(b"PK\x03\x04plan")
                .await
                .fetch(&Map::new())
                .await
                .unwrap()
                .is_some()
        );
        assert!(matches!(
            Fixture::new(b"hello").await.fetch(&Map::new()).await,
            Err(PlanError::NotAPlan { .. })
        ));
    }

    #[tokio::test]
    async fn a_plan_of_the_other_tool_is_refused() {
        let fixture = Fixture::new(b"PK\x03\x04plan").await;
        let record = PlanRecord {
            tool: Tool::OpenTofu,
            ..fixture.record()
        };
        assert!(matches!(
            fixture.fetch(&record.patch("s")).await,
            Err(PlanError::OtherTool { .. })
        ));
    }
}
