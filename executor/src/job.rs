//! Finds and decodes the job data.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use job_contract::encoding::{self, MAX_DOCUMENT_BYTES};
use job_contract::{JobData, env};
use tracing::debug;

use crate::config::JobConfig;
use crate::error::StepError;

/// Why the process has no job.
#[derive(Debug)]
pub struct JobError {
    pub error: StepError,
    /// The step's identity, if the document contains it.
    pub identity: Box<JobData>,
    /// Whether the data are not those for which this executor was started. Then everything that came with them may be
    /// foreign.
    pub is_foreign: bool,
}

impl From<StepError> for JobError {
    fn from(error: StepError) -> Self {
        Self {
            error,
            identity: Box::default(),
            is_foreign: false,
        }
    }
}

/// Decodes the job of this process.
pub fn decode(config: &JobConfig) -> Result<JobData, JobError> {
    let text = match (&config.job_data, &config.job_data_file) {
        (Some(data), _) if is_given(data) => data.as_bytes().to_vec(),
        (_, Some(path)) => {
            let text = read(path).map_err(|source| {
                let path = path.display();
                StepError::user(format!("could not read the job data in `{path}`"))
                    .because(&source)
                    .with_hint(
                        "mount the file that holds the job data, readable by the executor's user",
                    )
            })?;
            remove(path);
            text
        }
        (_, None) => {
            let text = format!(
                "there is no job data: neither `{}` nor `{}` is set",
                env::JOB_DATA,
                env::JOB_DATA_FILE
            );
            let hint = "the executor is started by a launcher; to run a folder on this machine use `api-launcher run`";
            return Err(StepError::user(text).with_hint(hint).into());
        }
    };
    // Before anything is read from them. Somebody else may have written them.
    let expected = config.job_data_sha256.as_deref();
    if expected.is_some_and(|expected| expected != encoding::digest(&[&text])) {
        let error = StepError::user(format!(
            "the job data are not those of this run: they do not have the digest in `{}`",
            env::JOB_DATA_DIGEST
        ));
        let hint = "the Secret of the run holds what its launcher did not store: find out who may create Secrets in the \
                    namespace of the runs, and start the job again";
        return Err(JobError {
            is_foreign: true,
            ..error.with_hint(hint).into()
        });
    }
    encoding::decode(&text).map_err(|error| JobError {
        identity: encoding::identify(&text).unwrap_or_default().into(),
        ..StepError::user(error.to_string())
            .with_hint("send base64 of the JSON document, on its own or zstd-compressed")
            .into()
    })
}

/// A blank variable counts as not set.
fn is_given(data: &str) -> bool {
    !data.trim().is_empty()
}

/// Removes the job data file unread. The process calls this if it ends because its settings are unusable.
pub(crate) fn discard() {
    let is_elsewhere = std::env::var(env::JOB_DATA).is_ok_and(|data| is_given(&data));
    let file = std::env::var_os(env::JOB_DATA_FILE).filter(|_| !is_elsewhere);
    if let Some(path) = file {
        remove(Path::new(&path));
    }
}

/// Reads no more than the decoder accepts.
fn read(path: &PathBuf) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?
        .take(2 * MAX_DOCUMENT_BYTES as u64)
        .read_to_end(&mut text)?;
    Ok(text)
}

/// Removes the file, because tools and scripts run as the same user and could read it. Removal can fail, for example on
/// a read-only volume. Then the creator of the volume has to keep tools and scripts away from it.
fn remove(path: &Path) {
    let is_file = path.symlink_metadata().is_ok_and(|file| file.is_file());
    if is_file && let Err(error) = fs::remove_file(path) {
        debug!(%error, path = %path.display(), "the file of the job data could not be removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(data: Option<&str>, file: Option<PathBuf>) -> JobConfig {
        JobConfig {
            job_data: data.map(str::to_owned),
            job_data_file: file,
            job_data_sha256: None,
        }
    }

    #[test]
    fn the_environment_wins_over_the_file_unless_it_is_empty() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            encoding::encode(&JobData {
                job_id: "2".into(),
                ..JobData::default()
            }),
        )
        .unwrap();
        let path = Some(file.path().to_owned());
        assert_eq!(
            decode(&config(Some(r#"{"jobId":"1"}"#), path.clone()))
                .unwrap()
                .job_id,
            "1"
        );
        assert!(file.path().exists());
        assert_eq!(decode(&config(Some(""), path)).unwrap().job_id, "2");
        assert!(!file.path().exists(), "the file was not removed");
    }

    #[test]
    fn an_unreadable_document_may_still_name_its_step() {
        let whose = |data: &str| {
            let job = decode(&config(Some(data), None)).unwrap_err().identity;
            (job.job_id, job.step_id)
        };
        let ids = r#""jobId":"7","stepId":"s","organizationId":"o","workspaceId":"w""#;
        let identity = ("7".to_owned(), "s".to_owned());
        assert_eq!(whose(&format!(r#"{{{ids},"refresh":"soon"}}"#)), identity);
        let unknown = (String::new(), String::new());
        assert_eq!(whose(r#"{"jobId":"7","refresh":"soon"}"#), unknown);
        assert_eq!(whose(&format!("{{{ids}")), unknown);
    }

    #[test]
    fn job_data_of_another_digest_are_refused_unread() {
        let ours = encoding::encode(&JobData::default());
        // As they come in several variables.
        let (one, other) = ours.split_at(ours.len() / 2);
        let digest = encoding::digest(&[one, other]);
        let of = |data: &str, digest: &str| {
            decode(&JobConfig {
                job_data_sha256: Some(digest.to_owned()),
                ..config(Some(data), None)
            })
        };
        assert_eq!(of(&ours, &digest).unwrap(), JobData::default());
        let foreign = encoding::encode(&JobData {
            job_id: "7".into(),
            step_id: "s".into(),
            organization_id: "o".into(),
            ..JobData::default()
        });
        for (data, digest) in [(&*foreign, &*digest), ("no base64", &digest), (&ours, "")] {
            assert!(of(data, digest).unwrap_err().is_foreign);
        }
    }

    #[test]
    fn missing_job_data_are_named() {
        let error = |file| decode(&config(None, file)).unwrap_err().error.to_string();
        assert!(error(None).starts_with("there is no job data: "));
        let unreadable = error(Some("/nonexistent".into()));
        let expected = "could not read the job data in `/nonexistent`: ";
        assert!(unreadable.starts_with(expected), "{unreadable}");
    }
}
