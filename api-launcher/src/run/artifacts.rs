//! What a step has left behind: the executor's final report, the platform's record, the job's context, and
//! where the files lie.

use std::path::{Path, PathBuf};

use job_contract::JobData;
use job_contract::keys::{Area, ObjectKey, errored_file, local_backend_state};
use job_contract::report::FinalReport;
use platform::PlatformError;
use platform::local::{JobRecord, LocalPlatform};
use runtime::regular_file;
use serde::Deserialize;
use serde_json::Value;

use super::event::Output;

/// A report larger than this is none of ours.
const MAX_REPORT_BYTES: u64 = 1 << 20;

/// The executor's own words about its end, if it left any. Code of the run can put anything in their place.
pub(crate) fn final_report(path: &Path) -> Option<FinalReport> {
    let text = regular_file::read(path, MAX_REPORT_BYTES).ok()?;
    serde_json::from_slice(&text).ok()
}

/// The step's log at rest, if there is one.
pub(crate) fn log_path(data_dir: &Path, job: &JobData) -> Option<PathBuf> {
    let key = ObjectKey::step_output(&job.organization_id, &job.job_id, &job.step_id);
    existing(data_dir.join(Area::Output.local_folder()).join(key.path))
}

/// The workspace's state, if it has one.
pub(crate) fn state_path(data_dir: &Path, job: &JobData) -> Option<PathBuf> {
    existing(data_dir.join(local_backend_state(&job.organization_id, &job.workspace_id)))
}

/// Where a copy of a state is, if the step cannot store it.
pub(crate) fn errored_paths(data_dir: &Path, job: &JobData) -> [PathBuf; 2] {
    let (organization, workspace) = (&job.organization_id, &job.workspace_id);
    let (job, step) = (&job.job_id, &job.step_id);
    let key = ObjectKey::errored_state(organization, workspace, job, step);
    [
        data_dir.join(Area::State.local_folder()).join(key.path),
        data_dir.join(errored_file(organization, workspace, job, step)),
    ]
}

/// The plan the step has stored, if it has.
pub(crate) fn plan_path(data_dir: &Path, job: &JobData) -> Option<PathBuf> {
    let key = ObjectKey::plan(
        &job.organization_id,
        &job.workspace_id,
        &job.job_id,
        &job.step_id,
    );
    existing(data_dir.join(Area::State.local_folder()).join(key.path))
}

fn existing(path: PathBuf) -> Option<PathBuf> {
    path.is_file().then_some(path)
}

/// Status of a step in the platform's words.
pub(crate) fn step_status(record: &JobRecord, step_id: &str) -> Option<String> {
    let status = record.step(step_id)?.status;
    serde_json::to_value(status)
        .ok()?
        .as_str()
        .map(str::to_owned)
}

/// Outputs the step has published (contract 6.6), by name.
pub(crate) fn outputs(
    platform: &LocalPlatform,
    job: &JobData,
) -> Result<Vec<Output>, PlatformError> {
    #[derive(Deserialize)]
    struct Published {
        name: String,
        #[serde(rename = "type", default)]
        value_type: Value,
        #[serde(default)]
        sensitive: bool,
        #[serde(default)]
        value: Value,
    }
    let context = platform.context(&job.job_id)?;
    let published = context
        .get("terraformOutputs")
        .and_then(|steps| steps.get(&job.step_id))
        .and_then(Value::as_array);
    Ok(published
        .into_iter()
        .flatten()
        .filter_map(|output| Published::deserialize(output).ok())
        .map(|output| Output {
            // A sensitive value is not shown, wherever it was set.
            value: if output.sensitive {
                Value::Null
            } else {
                output.value
            },
            name: output.name,
            value_type: output.value_type,
            sensitive: output.sensitive,
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    #[test]
    fn outputs_come_from_the_step_and_hide_what_is_sensitive() {
        let temp = tempfile::tempdir().unwrap();
        let job = JobData {
            job_id: "7".into(),
            step_id: "apply".into(),
            ..JobData::default()
        };
        let path = temp
            .path()
            .join(Area::Output.local_folder())
            .join(ObjectKey::context("7").path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let context = json!({"terraformOutputs": {
            "plan": [{"name": "other", "value": 1}],
            "apply": [
                {"name": "a", "type": "string", "sensitive": false, "value": "x"},
                {"name": "b", "sensitive": true, "value": "hunter2"},
                "junk",
            ],
        }});
        fs::write(path, context.to_string()).unwrap();
        let found = outputs(&LocalPlatform::new(temp.path()), &job).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(
            (found[0].name.as_str(), &found[0].value),
            ("a", &json!("x"))
        );
        assert_eq!((found[1].sensitive, &found[1].value), (true, &Value::Null));
    }

    #[test]
    fn a_missing_or_torn_report_is_none() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("report");
        assert_eq!(final_report(&path), None);
        fs::write(&path, "{").unwrap();
        assert_eq!(final_report(&path), None);
        fs::write(&path, r#"{"outcome":1,"error":"no"}"#).unwrap();
        assert_eq!(final_report(&path).unwrap().outcome, 1);
    }

    #[test]
    fn a_report_that_is_a_pipe_is_ignored_without_waiting() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("report");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let (said, hear) = std::sync::mpsc::channel();
        std::thread::spawn(move || said.send(final_report(&path).is_none()));
        let said = hear.recv_timeout(test_peers::wait::DEADLINE);
        assert_eq!(said, Ok(true));
    }
}
