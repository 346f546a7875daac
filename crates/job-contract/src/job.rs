//! The job document: one dispatch, one step (contract 1).
//!
//! Parsing is lenient (contract 1.5): unknown properties are ignored, missing and null ones get their defaults, and
//! `variables` may be an object or an array of `{key, value, hcl}`. [`JobData::validate`] is a separate check, so that the job
//! and the step of an invalid document are known.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// `branch` of runs whose content is a tarball instead of a git reference. Contract 8.6.
pub const REMOTE_CONTENT: &str = "remote-content";
/// Commit id of runs that have no commit. Contract 4.1.
pub const NO_COMMIT: &str = "000000000";

/// One dispatch, as Terrakube sends it (contract 1.2).
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct JobData {
    /// Scripts of this flow entry.
    #[serde(deserialize_with = "null_as_default")]
    pub command_list: Vec<Command>,
    #[serde(deserialize_with = "null_as_default")]
    pub on_failure_list: Vec<Command>,
    /// Type of the step on the wire; use [`JobData::step_type`].
    #[serde(rename = "type")]
    pub step_type: Option<String>,
    /// Organization, a UUID.
    #[serde(deserialize_with = "null_as_default")]
    pub organization_id: String,
    /// Workspace, a UUID.
    #[serde(deserialize_with = "null_as_default")]
    pub workspace_id: String,
    /// Job, a base-10 integer in a string.
    #[serde(deserialize_with = "text")]
    pub job_id: String,
    /// Step, a UUID.
    #[serde(deserialize_with = "null_as_default")]
    pub step_id: String,
    /// Exact version or range of the tool (contract 9.2).
    #[serde(deserialize_with = "null_as_default")]
    pub terraform_version: String,
    /// Git URL, or tarball URL when `branch` is [`REMOTE_CONTENT`].
    pub source: Option<String>,
    /// Branch or tag, or [`REMOTE_CONTENT`].
    #[serde(deserialize_with = "null_as_default")]
    pub branch: String,
    /// Sub-directory of the source that holds the root module.
    pub folder: Option<String>,
    /// Kind of VCS, as in contract 8.2.
    pub vcs_type: Option<String>,
    /// `OAUTH`, `STANDALONE` or null.
    pub connection_type: Option<String>,
    /// `false` adds `-refresh=false`.
    #[serde(deserialize_with = "null_as_default")]
    pub refresh: bool,
    /// `true` adds `-refresh-only`.
    #[serde(deserialize_with = "null_as_default")]
    pub refresh_only: bool,
    /// `false` for CLI-driven runs. Their init prints output only if it fails.
    #[serde(deserialize_with = "null_as_default")]
    pub show_header: bool,
    /// Contract 4.6.
    #[serde(deserialize_with = "null_as_default")]
    pub ignore_error: bool,
    /// VCS token, or the SSH private key for `SSH~*`. Secret.
    pub access_token: Option<String>,
    /// Private key for module downloads. Secret.
    pub module_ssh_key: Option<String>,
    pub commit_id: Option<String>,
    /// OpenTofu instead of Terraform.
    #[serde(deserialize_with = "null_as_default")]
    pub tofu: bool,
    /// Environment of the tool and of scripts; null values count as not set. Values may be secret.
    #[serde(deserialize_with = "environment")]
    pub environment_variables: BTreeMap<String, String>,
    /// Input variables; null values count as not set. Values may be secret.
    #[serde(deserialize_with = "variables", serialize_with = "write_variables")]
    pub variables: BTreeMap<String, Variable>,
    /// The files that a plan step leaves to the apply, as patterns. Newer releases send them; what they look like there is not
    /// known, so anything but texts is ignored (contract 13.1).
    #[serde(deserialize_with = "patterns", skip_serializing_if = "Vec::is_empty")]
    pub artifact_patterns: Vec<String>,
    /// Whether an apply needs the plan of another step. Newer releases send it (contract 13.1).
    #[serde(
        deserialize_with = "null_as_default",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub require_saved_plan: bool,
    /// Policies of newer releases, which Mayfly does not evaluate: read it through [`JobData::has_policies`]
    /// (contract 13.1).
    #[serde(skip_serializing_if = "Value::is_null")]
    pub policy_list: Value,
}

impl Default for JobData {
    fn default() -> Self {
        Self {
            command_list: Vec::new(),
            on_failure_list: Vec::new(),
            step_type: None,
            organization_id: String::new(),
            workspace_id: String::new(),
            job_id: String::new(),
            step_id: String::new(),
            terraform_version: String::new(),
            source: None,
            branch: String::new(),
            folder: None,
            vcs_type: None,
            connection_type: None,
            // Absent means the entity's own default (contract 1.2), not false.
            refresh: true,
            refresh_only: false,
            show_header: true,
            ignore_error: false,
            access_token: None,
            module_ssh_key: None,
            commit_id: None,
            tofu: false,
            environment_variables: BTreeMap::new(),
            variables: BTreeMap::new(),
            artifact_patterns: Vec::new(),
            require_saved_plan: false,
            policy_list: Value::Null,
        }
    }
}

/// Shows which job this is, and nothing that could be a secret.
impl fmt::Debug for JobData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobData")
            .field("type", &self.step_type)
            .field("organization_id", &self.organization_id)
            .field("workspace_id", &self.workspace_id)
            .field("job_id", &self.job_id)
            .field("step_id", &self.step_id)
            .finish_non_exhaustive()
    }
}

impl JobData {
    /// Reads the ids and the type of a document, and nothing else.
    ///
    /// # Errors
    /// The bytes are no JSON object, or one of these has another type.
    pub fn head(json: &[u8]) -> Result<Self, serde_json::Error> {
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        struct Head {
            #[serde(rename = "type")]
            step_type: Option<String>,
            #[serde(deserialize_with = "null_as_default")]
            organization_id: String,
            #[serde(deserialize_with = "null_as_default")]
            workspace_id: String,
            #[serde(deserialize_with = "text")]
            job_id: String,
            #[serde(deserialize_with = "null_as_default")]
            step_id: String,
            source: Option<String>,
            #[serde(deserialize_with = "null_as_default")]
            branch: String,
        }
        let head: Head = serde_json::from_slice(json)?;
        Ok(Self {
            step_type: head.step_type,
            organization_id: head.organization_id,
            workspace_id: head.workspace_id,
            job_id: head.job_id,
            step_id: head.step_id,
            source: head.source,
            branch: head.branch,
            ..Self::default()
        })
    }

    /// What this step does.
    pub fn step_type(&self) -> Result<StepType, JobDataError> {
        match self.step_type.as_deref() {
            None | Some("") => Err(JobDataError::Missing { field: "type" }),
            Some(text) => StepType::parse(text)
                .ok_or_else(|| JobDataError::UnknownType { found: shown(text) }),
        }
    }

    /// Whether there is anything in the list of policies. What a policy looks like is not known here.
    pub fn has_policies(&self) -> bool {
        match &self.policy_list {
            Value::Null => false,
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
            Value::String(text) => !text.is_empty(),
            Value::Bool(_) | Value::Number(_) => true,
        }
    }

    /// Which tool this step uses.
    pub const fn tool(&self) -> Tool {
        if self.tofu {
            Tool::OpenTofu
        } else {
            Tool::Terraform
        }
    }

    /// Whether the content is a tarball rather than a git reference (contract 8.6).
    pub fn is_remote_content(&self) -> bool {
        self.branch == REMOTE_CONTENT
    }

    /// The first comma element of `folder`, or `/`.
    pub fn folder(&self) -> &str {
        let folder = self.folder.as_deref().unwrap_or("/");
        folder.split(',').next().unwrap_or(folder).trim()
    }

    /// The commit to check out, if one is named.
    pub fn commit(&self) -> Option<&str> {
        self.commit_id
            .as_deref()
            .map(str::trim)
            .filter(|id| !id.is_empty() && *id != NO_COMMIT)
    }

    /// Checks the properties that every step needs, and reports the first problem.
    pub fn validate(&self) -> Result<(), JobDataError> {
        self.step_type()?;
        for (field, value) in [
            ("organizationId", &self.organization_id),
            ("workspaceId", &self.workspace_id),
            ("jobId", &self.job_id),
            ("stepId", &self.step_id),
        ] {
            if value.is_empty() {
                return Err(JobDataError::Missing { field });
            }
            if !is_path_segment(value) {
                return Err(JobDataError::BadId { field });
            }
        }
        if self.job_id.parse::<i32>().is_err() {
            return Err(JobDataError::BadJobId {
                found: shown(&self.job_id),
            });
        }
        Ok(())
    }
}

/// Whether an id is one plain path segment. Ids become file names and object keys.
fn is_path_segment(id: &str) -> bool {
    id.len() <= 128
        && id != "."
        && id != ".."
        && id
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}

/// A value of the document for a message: short, and on one line.
fn shown(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut shown: String = text
        .chars()
        .take(LONGEST)
        .flat_map(char::escape_debug)
        .collect();
    if text.chars().nth(LONGEST).is_some() {
        shown.push('…');
    }
    shown
}

/// The problem of a job document. Messages name fields, never values that could be secret.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobDataError {
    /// A property that every step needs is missing.
    #[error("`{field}` is missing from the job data")]
    Missing { field: &'static str },
    /// An id is no plain path segment.
    #[error(
        "`{field}` in the job data may hold only letters, digits, `-`, `_` and `.`, 128 at most"
    )]
    BadId { field: &'static str },
    /// The job id is no 32-bit integer.
    #[error("`jobId` in the job data must be a 32-bit integer, found `{found}`")]
    BadJobId { found: String },
    /// The step type is none of those in contract 4.2.
    #[error("`type` in the job data is `{found}`, expected one of {}", StepType::NAMES.join(", "))]
    UnknownType { found: String },
}

/// `type` of a step (contract 4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StepType {
    /// `terraformPlan`
    Plan,
    /// `terraformPlanDestroy`
    PlanDestroy,
    /// `terraformApply`
    Apply,
    /// `terraformDestroy`
    Destroy,
    /// `customScripts`
    CustomScripts,
    /// `approval`
    Approval,
    /// `policyEvaluation`, of newer releases (contract 13.1).
    PolicyEvaluation,
}

impl StepType {
    pub(crate) const ALL: [Self; 7] = [
        Self::Plan,
        Self::PlanDestroy,
        Self::Apply,
        Self::Destroy,
        Self::CustomScripts,
        Self::Approval,
        Self::PolicyEvaluation,
    ];

    /// The names on the wire, in the order of the variants.
    pub const NAMES: [&'static str; 7] = [
        "terraformPlan",
        "terraformPlanDestroy",
        "terraformApply",
        "terraformDestroy",
        "customScripts",
        "approval",
        "policyEvaluation",
    ];

    /// The name on the wire.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// The type with exactly that name.
    pub fn parse(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|step_type| step_type.name() == name)
    }

    /// Whether the step can change infrastructure by itself. Such a step must run at most once.
    pub const fn changes_infrastructure(self) -> bool {
        matches!(self, Self::Apply | Self::Destroy)
    }

    /// Whether the step runs the tool at all.
    pub const fn uses_tool(self) -> bool {
        !matches!(
            self,
            Self::CustomScripts | Self::Approval | Self::PolicyEvaluation
        )
    }
}

impl fmt::Display for StepType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Terraform or OpenTofu.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tool {
    /// `terraform`
    Terraform,
    /// `tofu`
    #[serde(rename = "tofu")]
    OpenTofu,
}

impl Tool {
    /// Name of the binary, and of the tool in object keys (contract 9.4).
    pub const fn binary(self) -> &'static str {
        match self {
            Self::Terraform => "terraform",
            Self::OpenTofu => "tofu",
        }
    }

    /// The name in banners (contract 7.6).
    pub const fn banner(self) -> &'static str {
        match self {
            Self::Terraform => "Terraform",
            Self::OpenTofu => "Tofu",
        }
    }
}

impl fmt::Display for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Terraform => "Terraform",
            Self::OpenTofu => "OpenTofu",
        })
    }
}

/// One script of a step (contract 1.3).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Command {
    /// `BASH` or `GROOVY`. Null is refused when the command runs.
    pub runtime: Option<String>,
    #[serde(deserialize_with = "null_as_default")]
    pub script: String,
    /// Ascending order of execution.
    #[serde(deserialize_with = "null_as_default")]
    pub priority: i64,
    /// Runs after init and before the operation.
    #[serde(deserialize_with = "null_as_default")]
    pub before: bool,
    /// Runs after a successful operation.
    #[serde(deserialize_with = "null_as_default")]
    pub after: bool,
    /// Prints a banner with the script's source around it.
    #[serde(deserialize_with = "null_as_default")]
    pub verbose: bool,
    /// Runs before init; overrides `before`.
    #[serde(deserialize_with = "null_as_default")]
    pub before_init: bool,
}

impl Command {
    /// The interpreter of the script, if it is known.
    pub fn runtime(&self) -> Option<Runtime> {
        match self.runtime.as_deref() {
            Some("BASH") => Some(Runtime::Bash),
            Some("GROOVY") => Some(Runtime::Groovy),
            _ => None,
        }
    }
}

/// Interpreter of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// `BASH`
    Bash,
    /// `GROOVY`
    Groovy,
}

/// An input variable.
#[derive(Clone, PartialEq, Eq)]
pub struct Variable {
    /// The text as the user typed it. May be secret.
    pub value: String,
    /// Whether the value is an expression or a literal string; only in the array of newer releases. With `None`, the declared
    /// type decides (contract 8.8).
    pub hcl: Option<bool>,
}

impl fmt::Debug for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Variable")
            .field("hcl", &self.hcl)
            .finish_non_exhaustive()
    }
}

impl From<&str> for Variable {
    fn from(value: &str) -> Self {
        Self {
            value: value.to_owned(),
            hcl: None,
        }
    }
}

/// Writes an object of strings, which every release reads. With `hcl` flags, writes the array of newer releases.
fn write_variables<S: serde::Serializer>(
    variables: &BTreeMap<String, Variable>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Entry<'a> {
        key: &'a str,
        value: &'a str,
        hcl: bool,
    }
    if variables.values().all(|variable| variable.hcl.is_none()) {
        let pairs = variables.iter();
        return serializer.collect_map(pairs.map(|(name, variable)| (name, &variable.value)));
    }
    serializer.collect_seq(variables.iter().map(|(key, variable)| Entry {
        key,
        value: &variable.value,
        hcl: variable.hcl.unwrap_or(false),
    }))
}

fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// A list of strings, or one string.
fn patterns<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let text = |value| match value {
        Value::String(text) => Some(text),
        _ => None,
    };
    Ok(match Value::deserialize(deserializer)? {
        Value::Array(list) => list.into_iter().filter_map(text).collect(),
        value => text(value).into_iter().collect(),
    })
}

/// A string. Some senders write a number.
fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(scalar_text(Value::deserialize(deserializer)?).unwrap_or_default())
}

/// Text of a scalar; `None` for null. Lists and objects keep their JSON text, which is also an HCL expression.
fn scalar_text(value: Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text),
        other => Some(other.to_string()),
    }
}

/// The text of a scalar. A document can have very many, so none is kept as a [`Value`].
#[derive(Default)]
struct Scalar(Option<String>);

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Value::deserialize(deserializer).map(|value| Self(scalar_text(value)))
    }
}

fn environment<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    let map = Option::<BTreeMap<String, Scalar>>::deserialize(deserializer)?.unwrap_or_default();
    Ok(map
        .into_iter()
        .filter_map(|(name, Scalar(text))| Some((name, text?)))
        .collect())
}

fn variables<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, Variable>, D::Error> {
    #[derive(Deserialize)]
    struct Entry {
        key: String,
        #[serde(default)]
        value: Scalar,
        #[serde(default)]
        hcl: Option<bool>,
    }
    struct Variables;
    impl<'de> Visitor<'de> for Variables {
        type Value = BTreeMap<String, Variable>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("an object or an array of variables")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(BTreeMap::new())
        }

        fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
            let mut variables = BTreeMap::new();
            while let Some((name, Scalar(value))) = fields.next_entry()? {
                variables.extend(value.map(|value| (name, Variable { value, hcl: None })));
            }
            Ok(variables)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
            let mut variables = BTreeMap::new();
            while let Some(Entry { key, value, hcl }) = items.next_element()? {
                let hcl = Some(hcl.unwrap_or(false));
                variables.extend(value.0.map(|value| (key, Variable { value, hcl })));
            }
            Ok(variables)
        }
    }
    deserializer.deserialize_any(Variables)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn parse(text: &str) -> JobData {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn nulls_and_absent_properties_take_their_defaults() {
        let job = parse(
            r#"{"commandList":null,"variables":null,"environmentVariables":null,"refresh":null}"#,
        );
        assert!(
            job.command_list.is_empty()
                && job.variables.is_empty()
                && job.environment_variables.is_empty()
        );
        assert!(
            !job.refresh,
            "null for a boolean is false on the stock side"
        );
        assert!(parse("{}").refresh, "absent is the entity's default");
    }

    #[test]
    fn null_variables_count_as_not_set() {
        let job =
            parse(r#"{"variables":{"a":null,"b":"x"},"environmentVariables":{"C":null,"D":"1"}}"#);
        assert_eq!(job.variables.keys().collect::<Vec<_>>(), ["b"]);
        assert_eq!(job.environment_variables.keys().collect::<Vec<_>>(), ["D"]);
    }

    #[test]
    fn variables_may_be_an_array_with_hcl_flags() {
        let job = parse(
            r#"{"variables":[{"key":"a","value":"[1]","hcl":true},{"key":"b","value":"[1]"}]}"#,
        );
        assert_eq!(job.variables["a"].hcl, Some(true));
        assert_eq!(job.variables["b"].hcl, Some(false));
    }

    #[test]
    fn the_head_of_a_document_is_read_alone() {
        let document = r#"{"jobId":7,"type":"approval","stepId":"s","organizationId":"o","workspaceId":null,
            "variables":{"a":"b"},"commandList":3}"#;
        let head = JobData::head(document.as_bytes()).unwrap();
        let expected = JobData {
            step_type: Some("approval".into()),
            organization_id: "o".into(),
            job_id: "7".into(),
            step_id: "s".into(),
            ..JobData::default()
        };
        assert!(head == expected, "{head:?}");
        for other in [
            "7",
            "{",
            r#"{"stepId":1}"#,
            r#"{"stepId":"a","stepId":"b"}"#,
        ] {
            assert!(JobData::head(other.as_bytes()).is_err(), "{other}");
        }
    }

    #[test]
    fn policies_are_seen_whatever_they_look_like() {
        for list in ["null", "[]", "{}", "\"\""] {
            let document = format!(r#"{{"policyList":{list},"policyExemptionList":[{{"a":1}}]}}"#);
            assert!(!parse(&document).has_policies(), "{document}");
        }
        for list in [r#"[{"id":1}]"#, "[null]", r#"{"a":[]}"#, "\"a\"", "1"] {
            let document = format!(r#"{{"policyList":{list}}}"#);
            assert!(parse(&document).has_policies(), "{document}");
        }
        assert!(!parse("{}").has_policies());
    }

    #[test]
    fn a_saved_plan_is_required_only_if_the_document_says_so() {
        for document in ["{}", r#"{"requireSavedPlan":null}"#] {
            assert!(!parse(document).require_saved_plan, "{document}");
        }
        let job = parse(r#"{"requireSavedPlan":true}"#);
        let text = serde_json::to_string(&job).unwrap();
        assert!(parse(&text).require_saved_plan, "{text}");
    }

    #[test]
    fn unknown_properties_are_ignored() {
        assert_eq!(
            parse(r#"{"jobId":"7","artifactPatterns":["x"],"multiStepJob":true}"#).job_id,
            "7"
        );
        assert_eq!(parse(r#"{"jobId":7}"#).job_id, "7");
    }

    #[rstest]
    #[case(r"{}", JobDataError::Missing { field: "type" })]
    #[case(r#"{"type":"terraformShow"}"#, JobDataError::UnknownType { found: "terraformShow".into() })]
    #[case(r#"{"type":"approval","organizationId":"o"}"#, JobDataError::Missing { field: "workspaceId" })]
    #[case(
        r#"{"type":"approval","organizationId":"../o","workspaceId":"w","jobId":"1","stepId":"s"}"#,
        JobDataError::BadId { field: "organizationId" }
    )]
    #[case(
        r#"{"type":"approval","organizationId":"o","workspaceId":"w","jobId":"x1","stepId":"s"}"#,
        JobDataError::BadJobId { found: "x1".into() }
    )]
    fn validation_names_the_field(#[case] document: &str, #[case] expected: JobDataError) {
        assert_eq!(parse(document).validate(), Err(expected));
    }

    #[test]
    fn a_message_about_a_hostile_document_is_short_and_one_line() {
        let hostile = format!("x\\n2026-01-01 forged line\\u001b[2J{}", "y".repeat(9000));
        for document in [
            format!(r#"{{"type":"{hostile}"}}"#),
            format!(
                r#"{{"type":"approval","organizationId":"o","workspaceId":"w","jobId":"{}","stepId":"s"}}"#,
                "7".repeat(128)
            ),
        ] {
            let message = parse(&document).validate().unwrap_err().to_string();
            assert!(
                message.len() < 300 && !message.contains(char::is_control),
                "{message}"
            );
        }
    }

    #[test]
    fn debug_output_holds_no_secret() {
        let job = parse(
            r#"{"accessToken":"hunter2","moduleSshKey":"hunter3","variables":{"p":"hunter4"}}"#,
        );
        assert!(!format!("{job:?} {:?}", job.variables).contains("hunter"));
    }

    #[test]
    fn folder_is_the_first_comma_element() {
        assert_eq!(parse(r#"{"folder":"/a,/b"}"#).folder(), "/a");
        assert_eq!(parse("{}").folder(), "/");
    }
}
