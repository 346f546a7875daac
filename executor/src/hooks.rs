//! The operator's hooks: which there are, their settings, and what they answer.
//!
//! A hook is an executable in a folder that the operator provides. It runs in every run, whatever the workspace says. The
//! folder's content is noted before any code of the run starts, because that code may be able to write there. How a hook runs is
//! the subject of `phases::run_hook`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use artifact_store::Digest;
use job_contract::{Exit, env};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{AccessFlags, eaccess};
use runtime::{handover, regular_file};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::StepError;

/// Settings of the hooks, beside them.
const SETTINGS: &str = "settings.json";
const MAX_SETTINGS_BYTES: u64 = 1 << 20;
/// Far more than policies need. The folder is read twice for each hook, unless it cannot be written.
const MAX_FOLDER_BYTES: u64 = 256 << 20;
const MAX_FOLDER_DEPTH: usize = 16;
const MAX_RESULT_BYTES: u64 = 1 << 20;
/// Shorter values are masked only if their name says that they are secret. A currency is none.
const MIN_SECRET_BYTES: usize = 8;

/// When a hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum HookPoint {
    PreInit,
    PrePlan,
    PostPlan,
    PreApply,
    PostApply,
}

impl HookPoint {
    const ALL: [Self; 5] = [
        Self::PreInit,
        Self::PrePlan,
        Self::PostPlan,
        Self::PreApply,
        Self::PostApply,
    ];

    /// The name of the executable.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::PreInit => "pre-init",
            Self::PrePlan => "pre-plan",
            Self::PostPlan => "post-plan",
            Self::PreApply => "pre-apply",
            Self::PostApply => "post-apply",
        }
    }
}

/// What a failed hook does to the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OnFailure {
    #[default]
    Fail,
    Warn,
}

/// The operator's settings of one hook.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct HookSettings {
    timeout_seconds: u64,
    pub(crate) on_failure: OnFailure,
    /// Ids of workspaces whose runs go on after a failure.
    exempt: Vec<String>,
}

impl Default for HookSettings {
    fn default() -> Self {
        Self {
            timeout_seconds: 300,
            on_failure: OnFailure::Fail,
            exempt: Vec::new(),
        }
    }
}

impl HookSettings {
    pub(crate) const fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_seconds)
    }

    pub(crate) fn exempts(&self, workspace_id: &str) -> bool {
        self.exempt.iter().any(|id| id == workspace_id)
    }
}

/// The hooks of the operator; none without a folder.
#[derive(Default)]
pub(crate) struct Hooks {
    folder: PathBuf,
    found: BTreeMap<HookPoint, HookSettings>,
    /// SHA-256 of the folder's content.
    digest: String,
    /// Whether nobody on this machine can write there. Then a change is the operator's.
    is_read_only: bool,
    variables: Vec<(OsString, OsString)>,
}

/// The values of variables are secrets.
impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks")
            .field("folder", &self.folder)
            .field("found", &self.found)
            .finish_non_exhaustive()
    }
}

impl Hooks {
    /// Reads the folder. This comes before any code of the run.
    pub(crate) fn load(folder: Option<&Path>) -> Result<Self, StepError> {
        let Some(folder) = folder else {
            return Ok(Self::default());
        };
        let prefix = env::FOR_HOOKS_PREFIX.len();
        let variables = handover::with_prefix(env::FOR_HOOKS_PREFIX).into_iter();
        let variables = variables.filter_map(|(name, value)| {
            let name = name.to_str()?.get(prefix..)?;
            (!name.is_empty()).then(|| (OsString::from(name), value))
        });
        let read = |text: &str, source| {
            let folder = folder.display();
            unusable(format!("{text} of the hooks in `{folder}`")).because(&source)
        };
        let digest =
            digest_of(folder).map_err(|source| read("could not read the folder", source))?;
        let flags = statvfs(folder)
            .map_err(|source| read("could not look at the file system", io::Error::from(source)))?;
        Ok(Self {
            found: find(folder)?,
            folder: folder.to_owned(),
            digest,
            is_read_only: flags.flags().contains(FsFlags::ST_RDONLY),
            variables: variables.collect(),
        })
    }

    pub(crate) fn has(&self, point: HookPoint) -> bool {
        self.found.contains_key(&point)
    }

    pub(crate) fn settings(&self, point: HookPoint) -> Option<&HookSettings> {
        self.found.get(&point)
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn program(&self, point: HookPoint) -> PathBuf {
        self.folder.join(point.name())
    }

    /// What identifies these hooks, with their settings and all files beside them.
    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// The variables that hooks get, and nothing else in the run.
    pub(crate) fn variables(&self) -> &[(OsString, OsString)] {
        &self.variables
    }

    /// What the log must not show.
    pub(crate) fn secrets(&self) -> Vec<String> {
        let pairs = self.variables.iter();
        let pairs = pairs.filter_map(|(name, value)| Some((name.to_str()?, value.to_str()?)));
        pairs
            .flat_map(|(name, value)| {
                let long = (value.len() >= MIN_SECRET_BYTES).then(|| value.to_owned());
                run_log::secrets_in(name, value).into_iter().chain(long)
            })
            .collect()
    }

    /// Refuses hooks that something on this machine has changed since the run began.
    pub(crate) fn check_unchanged(&self) -> Result<(), StepError> {
        if self.is_read_only {
            return Ok(());
        }
        let folder = self.folder.display();
        match digest_of(&self.folder) {
            Ok(digest) if digest == self.digest => Ok(()),
            Ok(_) => Err(StepError::new(
                Exit::StepFailed,
                format!("the operator's hooks in `{folder}` have changed during the run"),
            )
            .with_hint(
                "mount the folder read-only, so that no code of a run can write there; if the operator has changed the \
                 hooks, run again",
            )),
            Err(source) => Err(StepError::infrastructure(format!(
                "could not read the hooks in `{folder}` again"
            ))
            .because(&source)),
        }
    }
}

fn unusable(text: impl Into<String>) -> StepError {
    StepError::new(Exit::BadConfiguration, text).with_hint(format!(
        "`{}` names a folder with executables such as `post-plan`, see docs/hooks.md",
        env::HOOKS_DIR
    ))
}

/// The hooks in the folder, with their settings.
fn find(folder: &Path) -> Result<BTreeMap<HookPoint, HookSettings>, StepError> {
    let file = folder.join(SETTINGS);
    let mut settings: BTreeMap<HookPoint, HookSettings> =
        match regular_file::read(&file, MAX_SETTINGS_BYTES) {
            Ok(text) => serde_json::from_slice(&text).map_err(|source| {
                unusable(format!(
                    "the settings of the hooks in `{}` are wrong",
                    file.display()
                ))
                .because(&source)
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(source) => {
                let text = format!(
                    "could not read the settings of the hooks in `{}`",
                    file.display()
                );
                return Err(unusable(text).because(&source));
            }
        };
    let mut found = BTreeMap::new();
    for point in HookPoint::ALL {
        let path = folder.join(point.name());
        let settings = settings.remove(&point);
        let is_file = match fs::metadata(&path) {
            Ok(metadata) => metadata.is_file(),
            Err(error) if error.kind() == io::ErrorKind::NotFound && settings.is_none() => continue,
            Err(source) => {
                let text = format!("could not find the hook `{}`", path.display());
                return Err(unusable(text).because(&source));
            }
        };
        if !is_file || eaccess(&path, AccessFlags::X_OK).is_err() {
            return Err(unusable(format!(
                "the hook `{}` is no file that can be executed",
                path.display()
            )));
        }
        let settings = settings.unwrap_or_default();
        if settings.timeout_seconds == 0 {
            return Err(unusable(format!(
                "`timeoutSeconds` of `{}` in `{}` must be 1 or more",
                point.name(),
                file.display()
            )));
        }
        found.insert(point, settings);
    }
    Ok(found)
}

/// SHA-256 of all files below the folder, with their names. Kubernetes replaces names with two dots at the front when a
/// `ConfigMap` changes, and the others are links to what is there.
fn digest_of(folder: &Path) -> io::Result<String> {
    let mut list = String::new();
    let mut budget = MAX_FOLDER_BYTES;
    list_files(folder, MAX_FOLDER_DEPTH, &mut budget, &mut list)?;
    Ok(Digest::of_rest(&mut list.as_bytes())?.sha256)
}

fn list_files(folder: &Path, depth: usize, budget: &mut u64, list: &mut String) -> io::Result<()> {
    let too_large = || {
        let text = format!(
            "it holds more than {MAX_FOLDER_BYTES} bytes, or too many folders in each other"
        );
        io::Error::new(io::ErrorKind::FileTooLarge, text)
    };
    let depth = depth.checked_sub(1).ok_or_else(too_large)?;
    let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut paths: Vec<PathBuf> = entries.collect::<io::Result<_>>()?;
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("..") {
            continue;
        }
        let metadata = fs::metadata(&path)?;
        if metadata.is_dir() {
            let _ = writeln!(list, "{name:?} (");
            list_files(&path, depth, budget, list)?;
            list.push_str(")\n");
        } else {
            *budget = budget.checked_sub(metadata.len()).ok_or_else(too_large)?;
            let digest = Digest::of(&path)?;
            let _ = writeln!(list, "{name:?} {}", digest.sha256);
        }
    }
    Ok(())
}

/// What a hook answers in `result.json`, if it leaves one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct HookResult {
    /// One line for the log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) summary: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) checks: Vec<Check>,
    /// Anything for readers of the job context.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub(crate) data: Value,
}

/// One check of a hook.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Check {
    pub(crate) name: String,
    pub(crate) level: Level,
    pub(crate) passed: bool,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) message: String,
}

/// Whether a failed check is only shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    Advisory,
    Mandatory,
}

impl HookResult {
    /// Reads the answer; an empty one if the hook has left none.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        match regular_file::read(path, MAX_RESULT_BYTES) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|error| format!("left a `result.json` that is wrong: {error}")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(format!("left a `result.json` that cannot be read: {error}")),
        }
    }

    /// The lines for the log.
    pub(crate) fn lines(&self) -> Vec<String> {
        let failed = self.checks.iter().filter(|check| !check.passed);
        let failed = failed.map(|check| {
            let level = match check.level {
                Level::Advisory => "advisory",
                Level::Mandatory => "mandatory",
            };
            let colon = if check.message.is_empty() { "" } else { ": " };
            one_line(&format!(
                "{level} check `{}` failed{colon}{}",
                check.name, check.message
            ))
        });
        self.summary
            .iter()
            .map(|text| one_line(text))
            .chain(failed)
            .collect()
    }

    /// How many mandatory checks have failed.
    pub(crate) fn refusals(&self) -> usize {
        let refuses = |check: &&Check| !check.passed && check.level == Level::Mandatory;
        self.checks.iter().filter(refuses).count()
    }
}

/// The text without control characters, which could forge other lines of the log.
fn one_line(text: &str) -> String {
    text.trim().replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            let mode = if name.contains('.') { 0o644 } else { 0o755 };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        folder
    }

    #[test]
    fn hooks_have_settings_and_defaults() {
        let text = r#"{"post-plan": {"timeoutSeconds": 7, "onFailure": "warn", "exempt": ["w1"]}}"#;
        let folder = folder(&[("post-plan", ""), ("pre-apply", ""), (SETTINGS, text)]);
        let hooks = Hooks::load(Some(folder.path())).unwrap();
        assert!(!hooks.has(HookPoint::PreInit));
        let settings = hooks.settings(HookPoint::PostPlan).unwrap();
        assert_eq!(settings.timeout(), Duration::from_secs(7));
        assert_eq!(settings.on_failure, OnFailure::Warn);
        assert!(settings.exempts("w1") && !settings.exempts("w2"));
        assert_eq!(
            hooks.settings(HookPoint::PreApply),
            Some(&HookSettings::default())
        );
    }

    #[test]
    fn hooks_that_cannot_be_used_are_refused_with_what_is_wrong() {
        let cases: [(&[(&str, &str)], &str); 5] = [
            (
                &[(SETTINGS, r#"{"post-plan": {}}"#)],
                "could not find the hook `",
            ),
            (
                &[(SETTINGS, r#"{"post_plan": {}}"#)],
                "unknown variant `post_plan`",
            ),
            (
                &[
                    ("post-plan", ""),
                    (SETTINGS, r#"{"post-plan": {"time": 1}}"#),
                ],
                "unknown field `time`",
            ),
            (
                &[
                    ("post-plan", ""),
                    (SETTINGS, r#"{"post-plan": {"timeoutSeconds": 0}}"#),
                ],
                "must be 1 or more",
            ),
            (&[("post-plan", ""), (SETTINGS, "{")], "EOF"),
        ];
        for (files, text) in cases {
            let folder = folder(files);
            let error = Hooks::load(Some(folder.path())).unwrap_err();
            assert_eq!(error.exit(), Exit::BadConfiguration);
            assert!(error.to_string().contains(text), "{error}");
        }
        let folder = folder(&[("post-plan", "")]);
        let plain = fs::Permissions::from_mode(0o644);
        fs::set_permissions(folder.path().join("post-plan"), plain).unwrap();
        let error = Hooks::load(Some(folder.path())).unwrap_err().to_string();
        assert!(
            error.ends_with("is no file that can be executed"),
            "{error}"
        );
        let error = Hooks::load(Some(Path::new("/nonexistent"))).unwrap_err();
        assert!(error.to_string().contains("`/nonexistent`"), "{error}");
    }

    #[test]
    fn any_change_in_the_folder_is_noticed() {
        let changes: [fn(&Path); 4] = [
            |folder| fs::write(folder.join("post-plan"), "evil").unwrap(),
            |folder| fs::write(folder.join("more.rego"), "").unwrap(),
            |folder| fs::remove_file(folder.join("policy.rego")).unwrap(),
            |folder| fs::write(folder.join("sub/data.json"), "{}").unwrap(),
        ];
        for change in changes {
            let folder = folder(&[("post-plan", "good"), ("policy.rego", "good")]);
            fs::create_dir(folder.path().join("sub")).unwrap();
            let hooks = Hooks::load(Some(folder.path())).unwrap();
            hooks.check_unchanged().unwrap();
            change(folder.path());
            let error = hooks.check_unchanged().unwrap_err().to_string();
            assert!(error.ends_with("have changed during the run"), "{error}");
        }
    }

    #[test]
    fn results_become_lines_and_refusals() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("result.json");
        assert_eq!(HookResult::read(&path), Ok(HookResult::default()));
        let text = r#"{"summary": "two\nlines", "checks": [
            {"name": "a", "level": "mandatory", "passed": false, "message": "no\u001b[2J"},
            {"name": "b", "level": "advisory", "passed": false},
            {"name": "c", "level": "mandatory", "passed": true}]}"#;
        fs::write(&path, text).unwrap();
        let result = HookResult::read(&path).unwrap();
        assert_eq!(result.refusals(), 1);
        assert_eq!(
            result.lines(),
            [
                "two lines",
                "mandatory check `a` failed: no [2J",
                "advisory check `b` failed"
            ]
        );
        fs::write(&path, r#"{"check": []}"#).unwrap();
        assert!(
            HookResult::read(&path)
                .unwrap_err()
                .contains("unknown field `check`")
        );
    }

    #[test]
    fn values_of_hooks_are_masked_unless_they_are_short_and_harmless() {
        let pair = |name: &str, value: &str| (name.into(), value.into());
        let hooks = Hooks {
            variables: vec![
                pair("INFRACOST_API_KEY", "ico-abcdefghi"),
                pair("INFRACOST_CURRENCY", "EUR"),
            ],
            ..Hooks::default()
        };
        let secrets = hooks.secrets();
        assert!(secrets.iter().any(|secret| secret == "ico-abcdefghi"));
        assert!(!secrets.iter().any(|secret| secret == "EUR"));
        assert!(!format!("{hooks:?}").contains("ico-"));
    }
}
