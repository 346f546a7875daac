//! What of a run would lead the tool to another state than the one that the platform reads: variables of its environment, and
//! files of its source.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use artifact_store::BackendSettings;
use hcl_edit::structure::Body;
use job_contract::Tool;
use runtime::regular_file;
use serde_json::Value;

use super::initialised::{DEFAULT_WORKSPACE, WORKSPACE};
use crate::child_env::ChildEnv;
use crate::error::StepError;
use crate::terraform::raw_state::StateMark;
use crate::terraform::requirements::objects;
use crate::terraform::variables::{MAX_FILE_BYTES, Syntax, configuration_files};

/// Variables whose names begin so have arguments of the tool.
const ARGUMENT_VARIABLES: &str = "TF_CLI_ARGS";
/// Arguments that decide where the state is.
const ARGUMENTS: [&str; 6] = [
    "backend",
    "backend-config",
    "force-copy",
    "migrate-state",
    "state",
    "state-out",
];
/// Settings of a backend that do not decide where the state is. After `init`, the rest is compared too.
const HARMLESS_SETTINGS: [&str; 9] = [
    "acl",
    "dynamodb_table",
    "encrypt",
    "kms_encryption_key",
    "kms_key_id",
    "max_retries",
    "retry_max",
    "retry_wait_max",
    "retry_wait_min",
];
/// Domains of the services themselves, with their private endpoints.
const OWN_DOMAINS: [&str; 3] = [".amazonaws.com", ".amazonaws.com.cn", ".googleapis.com"];
/// Variables by which the backends of these stores find another service.
const S3_ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT_URL_S3", "AWS_S3_ENDPOINT", "AWS_ENDPOINT_URL"];
const GCS_ENDPOINTS: [&str; 3] = [
    "GOOGLE_BACKEND_STORAGE_CUSTOM_ENDPOINT",
    "GOOGLE_STORAGE_CUSTOM_ENDPOINT",
    "STORAGE_EMULATOR_HOST",
];
/// Blocks in `terraform` that say where the state is.
const BLOCKS: [&str; 3] = ["backend", "cloud", "state_store"];
/// The state of a root module without a backend, and the folder of those of its other workspaces.
const STATE: &str = "terraform.tfstate";
const STATES: &str = "terraform.tfstate.d";

/// Refuses variables that lead elsewhere.
pub(crate) fn refuse_variables(ours: &BackendSettings, env: &ChildEnv) -> Result<(), StepError> {
    let workspace = env.get(WORKSPACE).map(OsStr::to_string_lossy);
    let workspace = workspace.filter(|name| !name.is_empty() && name != DEFAULT_WORKSPACE);
    if let Some(workspace) = workspace {
        let workspace = workspace.escape_debug();
        return Err(StepError::user(format!(
            "`{WORKSPACE}` is `{workspace}`, and the platform reads only the state of the tool's workspace `{DEFAULT_WORKSPACE}`"
        ))
        .with_hint(format!(
            "remove `{WORKSPACE}`, and give each state a workspace of the platform, or a folder of its own"
        )));
    }
    for (name, arguments) in env.iter() {
        let name = name.to_string_lossy();
        let argument = name
            .starts_with(ARGUMENT_VARIABLES)
            .then(|| deciding_argument(&arguments.to_string_lossy()))
            .flatten();
        if let Some(argument) = argument {
            return Err(StepError::user(format!(
                "`{name}` has `-{argument}`, which leads the tool to another state than the one that the platform reads"
            ))
            .with_hint(format!("remove `-{argument}` from `{name}`")));
        }
    }
    let endpoints: &[&str] = match ours {
        BackendSettings::S3 { endpoint: None, .. } => &S3_ENDPOINTS,
        BackendSettings::Gcs { .. } => &GCS_ENDPOINTS,
        _ => &[],
    };
    let leads_elsewhere = |name: &&&str| {
        let value = env.get(name).unwrap_or_default().to_string_lossy();
        !value.is_empty() && !is_own_domain(&value)
    };
    match endpoints.iter().find(leads_elsewhere) {
        None => Ok(()),
        Some(name) => Err(StepError::user(format!(
            "`{name}` leads the tool's backend to another service than the one that has the state"
        ))
        .with_hint(format!(
            "remove `{name}`, and set the endpoint in the configuration of the provider that needs it"
        ))),
    }
}

/// Whether an endpoint is one of the service itself, such as a private one.
fn is_own_domain(endpoint: &str) -> bool {
    let host = endpoint
        .split_once("://")
        .map_or(endpoint, |(_, rest)| rest);
    let host = host.split(['/', ':']).next().unwrap_or_default();
    OWN_DOMAINS.iter().any(|domain| host.ends_with(domain))
}

/// An argument that decides where the state is. The tool splits the text as a shell does.
fn deciding_argument(text: &str) -> Option<&'static str> {
    let text = text.replace('\\', "");
    let words = text.split(|c: char| c.is_whitespace() || matches!(c, '"' | '\''));
    let arguments = words.filter(|word| word.starts_with('-'));
    let mut arguments = arguments.map(|word| {
        let word = word.trim_start_matches('-');
        word.split_once('=').unwrap_or((word, ""))
    });
    arguments.find_map(|(name, value)| {
        let setting = value.split_once('=').map(|(setting, _)| setting.trim());
        let is_harmless = name == "backend-config"
            && setting.is_some_and(|setting| HARMLESS_SETTINGS.contains(&setting));
        let known = ARGUMENTS.into_iter().find(|known| *known == name);
        known.filter(|_| !is_harmless)
    })
}

/// A file that takes the place of the run's backend.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rival {
    pub(crate) name: String,
    /// `false` for a file that cannot be read here, and that may do so.
    pub(crate) is_certain: bool,
}

impl Rival {
    fn of(path: &Path, syntax: Syntax, ours: &str) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        // OpenTofu then does not read the file `ours` at all.
        let is_instead = ours.strip_suffix(".tf") == name.strip_suffix(".tofu");
        let is_later = is_override(name) && name > ours;
        let takes_place = if is_instead {
            Some(true)
        } else if is_later {
            sets_backend(path, syntax)
        } else {
            Some(false)
        };
        (takes_place != Some(false)).then(|| Self {
            name: name.to_owned(),
            is_certain: takes_place.is_some(),
        })
    }
}

/// The files of a root module that take the place of the backend in the file `ours`. The tool merges override files in the order of
/// their names.
pub(crate) fn rivals(dir: &Path, tool: Tool, ours: &str) -> Result<Vec<Rival>, StepError> {
    let files = configuration_files(dir, tool)?.into_iter();
    let found = files.filter_map(|(path, syntax)| Rival::of(&path, syntax, ours));
    let mut rivals: Vec<_> = found.collect();
    rivals.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(rivals)
}

fn is_override(name: &str) -> bool {
    let stem = name.strip_suffix(".json").unwrap_or(name);
    let stem = stem
        .strip_suffix(".tf")
        .or_else(|| stem.strip_suffix(".tofu"));
    stem.is_some_and(|stem| stem == "override" || stem.ends_with("_override"))
}

/// Whether a file says where the state is; `None` if it cannot be read.
fn sets_backend(path: &Path, syntax: Syntax) -> Option<bool> {
    let text = regular_file::read_text(path, MAX_FILE_BYTES).ok()?;
    let text = text.trim_start_matches('\u{feff}');
    Some(match syntax {
        Syntax::Native => {
            let body: Body = text.parse().ok()?;
            let mut settings = body.get_blocks("terraform");
            settings.any(|block| BLOCKS.iter().any(|name| block.body.has_blocks(name)))
        }
        Syntax::Json => {
            let document: Value = serde_json::from_str(text).ok()?;
            let mut settings = objects(&document, "terraform");
            settings.any(|settings| BLOCKS.iter().any(|name| settings.contains_key(*name)))
        }
    })
}

/// The first file with a state of the source itself, about which `init` would ask whether to migrate it. A state without resources
/// and outputs is none.
pub(crate) fn own_state(dir: &Path) -> Option<PathBuf> {
    let others = fs::read_dir(dir.join(STATES))
        .into_iter()
        .flatten()
        .flatten();
    let mut others: Vec<_> = others.map(|entry| entry.path().join(STATE)).collect();
    others.sort();
    let mut files = std::iter::once(dir.join(STATE)).chain(others);
    files.find(|file| has_content(file))
}

/// What is no state is left to the tool, which says so.
fn has_content(file: &Path) -> bool {
    let opened: Option<File> = regular_file::open(file).ok();
    let mark = opened.and_then(|file| StateMark::read(BufReader::new(file)).ok());
    mark.is_some_and(|mark| !mark.is_empty)
}

#[cfg(test)]
mod tests {
    use job_contract::JobData;

    use super::*;
    use crate::terraform::backend::tests::s3_settings;

    const S3_BLOCK: &str = "terraform {\n  backend \"s3\" {}\n}\n";
    const OURS: &str = "aws_backend_override.tf";

    fn env(name: &str, value: &str) -> ChildEnv {
        let mut env = ChildEnv::new(Vec::new(), &[], &JobData::default()).unwrap();
        env.set(name, value).unwrap();
        env
    }

    fn local() -> BackendSettings {
        BackendSettings::Local {
            path: "/d/terraform.tfstate".into(),
        }
    }

    #[test]
    fn variables_that_lead_to_another_state_are_refused_by_name() {
        for (name, value, word) in [
            ("TF_WORKSPACE", "prod", "`prod`"),
            (
                "TF_CLI_ARGS_init",
                "-backend-config=path=x",
                "-backend-config",
            ),
            (
                "TF_CLI_ARGS_init",
                "-upgrade \"-backend=false\"",
                "`-backend`",
            ),
            ("TF_CLI_ARGS_init", "-migrate-state", "-migrate-state"),
            ("TF_CLI_ARGS", "--state='x y'", "`-state`"),
            (
                "TF_CLI_ARGS_apply",
                "-parallelism=2 \\-state-out x",
                "`-state-out`",
            ),
        ] {
            let error = refuse_variables(&local(), &env(name, value)).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(name) && text.contains(word), "{text}");
            assert!(error.hint().unwrap().contains(name), "{error:?}");
        }
        for (name, value) in [
            ("TF_WORKSPACE", ""),
            ("TF_WORKSPACE", "default"),
            ("TF_CLI_ARGS_init", "-upgrade -reconfigure"),
            ("TF_CLI_ARGS_init", "-backend-config=dynamodb_table=locks"),
            ("TF_CLI_ARGS_plan", "-var=x=-state -target=\"a.state\""),
            ("AWS_ENDPOINT_URL_S3", "http://localhost"),
        ] {
            refuse_variables(&local(), &env(name, value)).unwrap();
        }
    }

    #[test]
    fn another_service_is_refused_where_the_backend_would_use_it() {
        let gcs = BackendSettings::Gcs {
            bucket: "b".into(),
            prefix: "p".into(),
            login: artifact_store::GcsLogin::Identity { document: None },
            handover: artifact_store::Handover::Outside,
        };
        let s3 = |endpoint| s3_settings(artifact_store::Handover::Outside, endpoint);
        let refused = |settings: &BackendSettings, name: &str| {
            refuse_variables(settings, &env(name, "http://x")).is_err()
        };
        assert!(refused(&s3(None), "AWS_ENDPOINT_URL"));
        let private = env(
            "AWS_ENDPOINT_URL_S3",
            "https://bucket.vpce-1-2.s3.eu-west-1.vpce.amazonaws.com",
        );
        assert!(refuse_variables(&s3(None), &private).is_ok());
        // The argument of the backend wins.
        assert!(!refused(&s3(Some("http://s3")), "AWS_ENDPOINT_URL"));
        assert!(refused(&gcs, "STORAGE_EMULATOR_HOST"));
        assert!(!refused(&gcs, "AWS_ENDPOINT_URL"));
    }

    fn rivals_of(files: &[(&str, &str)], tool: Tool) -> Vec<(String, bool)> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let found = rivals(folder.path(), tool, OURS).unwrap();
        let found = found.into_iter();
        found.map(|rival| (rival.name, rival.is_certain)).collect()
    }

    #[test]
    fn files_that_the_tool_merges_after_the_backend_are_found() {
        let cloud = r#"{"terraform": [{"cloud": {}}]}"#;
        let files = [
            (OURS, S3_BLOCK),
            ("main.tf", S3_BLOCK),
            ("a_override.tf", S3_BLOCK),
            ("b_override.tf", "locals {}\n"),
            ("c_override.tf", "terraform {"),
            ("d_override.tf.json", cloud),
            (
                "override.tf",
                "\u{feff}terraform {\n  backend \"local\" {}\n}\n",
            ),
            ("zz_override.tofu", S3_BLOCK),
            ("aws_backend_override.tofu", ""),
        ];
        let both = [
            ("c_override.tf".to_owned(), false),
            ("d_override.tf.json".to_owned(), true),
            ("override.tf".to_owned(), true),
        ];
        assert_eq!(rivals_of(&files, Tool::Terraform), both);
        let by_tofu = rivals_of(&files, Tool::OpenTofu);
        assert_eq!(
            by_tofu.first(),
            Some(&("aws_backend_override.tofu".to_owned(), true))
        );
        assert_eq!(by_tofu[1..4], both);
        assert_eq!(by_tofu.last(), Some(&("zz_override.tofu".to_owned(), true)));
    }

    #[test]
    fn a_state_of_the_source_counts_if_it_has_content() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        fs::write(file(STATE), r#"{"version":4,"outputs":{},"resources":[]}"#).unwrap();
        assert_eq!(own_state(folder.path()), None);
        let other = file(STATES).join("prod").join(STATE);
        fs::create_dir_all(other.parent().unwrap()).unwrap();
        fs::write(&other, r#"{"version":4,"outputs":{"o":{}},"resources":[]}"#).unwrap();
        assert_eq!(own_state(folder.path()), Some(other));
        fs::write(file(STATE), r#"{"version":4,"resources":[{}]}"#).unwrap();
        assert_eq!(own_state(folder.path()), Some(file(STATE)));
    }
}
