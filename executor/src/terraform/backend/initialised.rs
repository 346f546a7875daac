//! The backend that `init` has set up, as the tool notes it in its folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use artifact_store::BackendSettings;
use runtime::regular_file;
use serde_json::Value;

use crate::child_env::ChildEnv;
use crate::error::StepError;

/// The tool's variable for its folder.
const DATA_DIR: &str = "TF_DATA_DIR";
/// The tool's variable for its workspace.
pub(crate) const WORKSPACE: &str = "TF_WORKSPACE";
pub(crate) const DEFAULT_WORKSPACE: &str = "default";
/// The tool's own folder in the root module.
const FOLDER: &str = ".terraform";
const BACKEND_FILE: &str = "terraform.tfstate";
const WORKSPACE_FILE: &str = "environment";
/// Where files of an earlier `init` are put.
const SET_ASIDE: &str = "set-aside";
const MAX_FILE_BYTES: u64 = 1 << 20;

/// A backend that `init` has set up.
#[derive(Debug)]
pub(crate) struct Initialised {
    /// Without it, the tool keeps the state in its working directory.
    kind: Option<String>,
    settings: Value,
    workspace: String,
}

impl Initialised {
    /// Reads what the tool has noted.
    pub(crate) fn read(working_dir: &Path, env: &ChildEnv) -> Result<Self, StepError> {
        let folder = data_dir(working_dir, env);
        let text = read_text(&folder.join(BACKEND_FILE))?;
        let note: Value = match text.as_deref() {
            None => Value::Null,
            Some(text) => serde_json::from_str(text)
                .map_err(|source| unreadable(&folder.join(BACKEND_FILE)).because(&source))?,
        };
        let kind = note.pointer("/backend/type").and_then(Value::as_str);
        let settings = note.pointer("/backend/config").cloned();
        let of_run = env.get(WORKSPACE).and_then(|name| name.to_str());
        let workspace = match of_run.filter(|name| !name.is_empty()) {
            Some(name) => Some(name.to_owned()),
            None => read_text(&folder.join(WORKSPACE_FILE))?,
        };
        let workspace = workspace.unwrap_or_default().trim().to_owned();
        Ok(Self {
            kind: kind.filter(|kind| !kind.is_empty()).map(str::to_owned),
            settings: settings.unwrap_or_default(),
            workspace: if workspace.is_empty() {
                DEFAULT_WORKSPACE.to_owned()
            } else {
                workspace
            },
        })
    }

    /// How it differs from the backend of the run, as far as that decides where the state is.
    pub(crate) fn difference(&self, ours: &BackendSettings) -> Option<String> {
        let Some(kind) = &self.kind else {
            return Some("the tool has set up no backend".to_owned());
        };
        if kind != ours.kind() {
            let ours = ours.kind();
            return Some(format!(
                "the tool has set up the backend `{kind}` instead of `{ours}`"
            ));
        }
        if self.workspace != DEFAULT_WORKSPACE {
            let workspace = self.workspace.escape_debug();
            return Some(format!("the tool has selected its workspace `{workspace}`"));
        }
        let is_met = |setting: &Setting<'_>| setting.is_met_by(self.value(setting.name));
        let setting = place(ours).into_iter().find(|setting| !is_met(setting))?;
        let found = match self.value(setting.name) {
            Some(found) => format!("`{}`", found.escape_debug()),
            None => "not set".to_owned(),
        };
        Some(format!(
            "`{}` of the backend `{kind}` is {found}, which is not that of this run",
            setting.name
        ))
    }

    fn value(&self, name: &str) -> Option<&str> {
        let nested = self.settings.pointer("/endpoints/s3");
        let nested = nested.filter(|_| name == ENDPOINT);
        text(nested).or_else(|| text(self.settings.get(name)))
    }
}

/// A text that is not empty.
fn text(value: Option<&Value>) -> Option<&str> {
    value?.as_str().filter(|text| !text.is_empty())
}

/// Newer versions of the tool have it in `endpoints`.
const ENDPOINT: &str = "endpoint";

/// A setting of a backend that decides where the state is.
struct Setting<'s> {
    name: &'static str,
    /// The value of this run.
    ours: Option<&'s str>,
    /// Whether it may be missing too. Then the tool has it from its environment, or as its default.
    may_be_missing: bool,
}

impl<'s> Setting<'s> {
    const fn exactly(name: &'static str, ours: Option<&'s str>) -> Self {
        Self {
            name,
            ours,
            may_be_missing: false,
        }
    }

    const fn at_most(name: &'static str, ours: &'s str) -> Self {
        Self {
            name,
            ours: Some(ours),
            may_be_missing: true,
        }
    }

    fn is_met_by(&self, found: Option<&str>) -> bool {
        found == self.ours || (found.is_none() && self.may_be_missing)
    }
}

/// Where the state of the run is.
fn place(ours: &BackendSettings) -> Vec<Setting<'_>> {
    let exactly = |name, value| Setting::exactly(name, Some(value));
    match ours {
        BackendSettings::Hub => unreachable!("the run serves the state of its hub"),
        BackendSettings::Http { address, .. } => vec![
            Setting::at_most("address", address),
            Setting::at_most("lock_address", address),
            Setting::at_most("unlock_address", address),
            Setting::at_most("update_method", "POST"),
            Setting::at_most("lock_method", "LOCK"),
            Setting::at_most("unlock_method", "UNLOCK"),
        ],
        BackendSettings::Local { path } => {
            vec![Setting::exactly("path", path.to_str())]
        }
        BackendSettings::S3 {
            bucket,
            key,
            endpoint,
            ..
        } => vec![
            exactly("bucket", bucket),
            exactly("key", key),
            Setting::exactly(ENDPOINT, endpoint.as_deref()),
        ],
        BackendSettings::Azurerm {
            account,
            container,
            key,
            ..
        } => vec![
            exactly("storage_account_name", account),
            exactly("container_name", container),
            exactly("key", key),
        ],
        BackendSettings::Gcs { bucket, prefix, .. } => vec![
            exactly("bucket", bucket),
            exactly("prefix", prefix),
            Setting::exactly("storage_custom_endpoint", None),
        ],
    }
}

/// Puts the backend and the workspace of an earlier `init` aside, because `init` would ask whether to migrate the state. Returns
/// their paths. `root` is the work tree.
pub(crate) fn set_aside(
    root: &Path,
    working_dir: &Path,
    env: &ChildEnv,
    ours: &BackendSettings,
) -> Result<Vec<PathBuf>, StepError> {
    let folder = data_dir(working_dir, env);
    let is_there = |name: &&str| folder.join(name).symlink_metadata().is_ok();
    let names: Vec<_> = [BACKEND_FILE, WORKSPACE_FILE]
        .into_iter()
        .filter(is_there)
        .collect();
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let is_in_tree = folder
        .canonicalize()
        .is_ok_and(|real| real.starts_with(root));
    if !is_in_tree {
        // Another step of this workspace may have used the same folder.
        return match Initialised::read(working_dir, env)?.difference(ours) {
            None => Ok(Vec::new()),
            Some(difference) => Err(foreign_folder(&folder, env, &difference)),
        };
    }
    let target = folder.join(SET_ASIDE);
    fs::create_dir_all(&target).map_err(|source| StepError::working_dir(&target, &source))?;
    for name in &names {
        let from = folder.join(name);
        fs::rename(&from, target.join(name))
            .map_err(|source| StepError::working_dir(&from, &source))?;
    }
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

fn foreign_folder(folder: &Path, env: &ChildEnv, difference: &str) -> StepError {
    let folder = folder.display();
    let (cause, advice) = match env.get(DATA_DIR) {
        Some(_) => (format!("`{DATA_DIR}`"), format!("remove `{DATA_DIR}`")),
        None => (
            format!("the link `{FOLDER}`"),
            format!("remove `{FOLDER}` from the source"),
        ),
    };
    StepError::user(format!(
        "{cause} leads out of the source to `{folder}`, which another init has set up: {difference}"
    ))
    .with_hint(format!(
        "{advice}, or let it lead to a folder of this workspace alone"
    ))
}

/// The tool's own folder.
fn data_dir(working_dir: &Path, env: &ChildEnv) -> PathBuf {
    let folder = env.get(DATA_DIR).filter(|folder| !folder.is_empty());
    working_dir.join(folder.unwrap_or(FOLDER.as_ref()))
}

/// `None` if there is no such file.
fn read_text(path: &Path) -> Result<Option<String>, StepError> {
    match regular_file::read_text(path, MAX_FILE_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(unreadable(path).because(&source)),
    }
}

fn unreadable(path: &Path) -> StepError {
    let path = path.display();
    StepError::user(format!(
        "could not read in `{path}` which backend the tool has set up"
    ))
}

#[cfg(test)]
mod tests {
    use job_contract::JobData;
    use secrecy::SecretString;
    use serde_json::json;

    use super::*;

    fn env(pairs: &[(&str, &str)]) -> ChildEnv {
        let mut env = ChildEnv::new(Vec::new(), &[], &JobData::default()).unwrap();
        for (name, value) in pairs {
            env.set(name, value).unwrap();
        }
        env
    }

    fn local() -> BackendSettings {
        BackendSettings::Local {
            path: "/d/terraform.tfstate".into(),
        }
    }

    fn s3(endpoint: Option<&str>) -> BackendSettings {
        BackendSettings::S3 {
            bucket: "b".into(),
            region: "r".into(),
            key: "k".into(),
            login: artifact_store::S3Login::Ambient,
            role: None,
            handover: artifact_store::Handover::Outside,
            use_lockfile: false,
            endpoint: endpoint.map(str::to_owned),
            path_style: true,
        }
    }

    fn http() -> BackendSettings {
        BackendSettings::Http {
            address: "http://127.0.0.1:1/state".into(),
            user: "u".into(),
            password: SecretString::from("p"),
        }
    }

    /// A root module in which the tool has noted this backend.
    fn noted(kind: &str, config: &Value) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join(FOLDER);
        fs::create_dir(&data).unwrap();
        let note = json!({"version": 3, "backend": {"type": kind, "config": config, "hash": 1}});
        fs::write(data.join(BACKEND_FILE), note.to_string()).unwrap();
        folder
    }

    fn difference(kind: &str, config: &Value, ours: &BackendSettings) -> Option<String> {
        let folder = noted(kind, config);
        let found = Initialised::read(folder.path(), &env(&[])).unwrap();
        found.difference(ours)
    }

    #[test]
    fn what_decides_where_the_state_is_must_be_that_of_the_run() {
        for (kind, config, ours, expected) in [
            (
                "local",
                json!({"path": "/d/terraform.tfstate"}),
                local(),
                None,
            ),
            ("local", json!({"path": "x"}), local(), Some("`path`")),
            ("local", json!({"path": null}), local(), Some("not set")),
            ("s3", json!({}), local(), Some("`s3` instead of `local`")),
            (
                "s3",
                json!({"bucket": "b", "key": "k", "endpoints": null}),
                s3(None),
                None,
            ),
            (
                "s3",
                json!({"bucket": "b", "key": "k", "endpoints": {"s3": "http://x"}}),
                s3(None),
                Some("`endpoint`"),
            ),
            (
                "s3",
                json!({"bucket": "b", "key": "k", "endpoints": {"s3": "http://s"}}),
                s3(Some("http://s")),
                None,
            ),
            (
                "s3",
                json!({"bucket": "b", "key": "k", "endpoint": "http://s"}),
                s3(Some("http://s")),
                None,
            ),
            (
                "s3",
                json!({"bucket": "b", "key": "other"}),
                s3(None),
                Some("`key`"),
            ),
            ("http", json!({"address": null}), http(), None),
            (
                "http",
                json!({"update_method": "GET"}),
                http(),
                Some("`update_method`"),
            ),
            (
                "http",
                json!({"address": "http://x"}),
                http(),
                Some("`address`"),
            ),
        ] {
            let found = difference(kind, &config, &ours);
            match (&found, expected) {
                (None, None) => {}
                (Some(found), Some(words)) => assert!(found.contains(words), "{found}"),
                _ => panic!("{config}: {found:?}"),
            }
        }
    }

    #[test]
    fn each_setting_of_azure_and_google_that_decides_where_the_state_is_must_be_that_of_the_run() {
        let azurerm = BackendSettings::Azurerm {
            resource_group: None,
            account: "a".into(),
            container: "c".into(),
            key: "k".into(),
            login: artifact_store::AzureLogin::Key(SecretString::from("x")),
            handover: artifact_store::Handover::Outside,
        };
        let gcs = BackendSettings::Gcs {
            bucket: "b".into(),
            prefix: "p".into(),
            login: artifact_store::GcsLogin::Key(SecretString::from("{}")),
            handover: artifact_store::Handover::Outside,
        };
        let places = [
            (
                azurerm,
                json!({"storage_account_name": "a", "container_name": "c", "key": "k"}),
            ),
            (
                gcs,
                json!({"bucket": "b", "prefix": "p", "storage_custom_endpoint": null}),
            ),
        ];
        for (ours, place) in places {
            assert_eq!(difference(ours.kind(), &place, &ours), None);
            for name in place.as_object().unwrap().keys() {
                let mut other = place.clone();
                other[name] = json!("http://elsewhere");
                let found = difference(ours.kind(), &other, &ours).unwrap();
                assert!(found.contains(&format!("`{name}`")), "{found}");
            }
        }
    }

    #[test]
    fn the_workspace_of_the_tool_must_be_its_default() {
        let folder = noted("local", &json!({"path": "/d/terraform.tfstate"}));
        let read = |pairs: &[(&str, &str)]| {
            let found = Initialised::read(folder.path(), &env(pairs)).unwrap();
            found.difference(&local())
        };
        assert_eq!(read(&[]), None);
        assert!(read(&[(WORKSPACE, "prod")]).unwrap().contains("`prod`"));
        fs::write(folder.path().join(FOLDER).join(WORKSPACE_FILE), "dev\n").unwrap();
        assert!(read(&[]).unwrap().contains("`dev`"));
        // Where there is nothing, the tool keeps the state beside the configuration.
        let elsewhere = read(&[(DATA_DIR, "data")]).unwrap();
        assert!(elsewhere.contains("no backend"), "{elsewhere}");
    }

    #[test]
    fn what_an_earlier_init_has_left_is_put_aside_within_the_source_alone() {
        let folder = noted("s3", &json!({"bucket": "of-somebody"}));
        let root = folder.path().canonicalize().unwrap();
        let note = root.join(FOLDER).join(BACKEND_FILE);
        let moved = set_aside(&root, &root, &env(&[]), &local()).unwrap();
        assert_eq!(moved, std::slice::from_ref(&note));
        assert!(
            !note.exists()
                && root
                    .join(FOLDER)
                    .join(SET_ASIDE)
                    .join(BACKEND_FILE)
                    .exists()
        );
        let again = set_aside(&root, &root, &env(&[]), &local()).unwrap();
        assert!(again.is_empty(), "{again:?}");

        let foreign = noted("s3", &json!({}));
        let data = foreign.path().join(FOLDER);
        let outside = env(&[(DATA_DIR, data.to_str().unwrap())]);
        let error = set_aside(&root, &root, &outside, &local()).unwrap_err();
        assert!(error.to_string().contains(DATA_DIR), "{error}");
        assert!(data.join(BACKEND_FILE).exists());
        // An earlier step of this workspace has used it too.
        let own = noted("local", &json!({"path": "/d/terraform.tfstate"}));
        let data = own.path().join(FOLDER);
        let outside = env(&[(DATA_DIR, data.to_str().unwrap())]);
        assert!(
            set_aside(&root, &root, &outside, &local())
                .unwrap()
                .is_empty()
        );
        assert!(data.join(BACKEND_FILE).exists());
    }
}
