//! References to secrets in the values of a run: where they may be, and how secrets take their place.
//!
//! This module knows the job document. `secret_stores` knows references and stores.

mod stored_plan;

use std::collections::{BTreeMap, BTreeSet};

use job_contract::{Exit, JobData, env};
use run_log::secrets_in;
use runtime::handover;
use secrecy::{ExposeSecret, SecretString};
use secret_stores::{
    Found, Purpose, ReadError, Reference, RunIds, SecretId, SecretReader, Settings, StoreKind,
    Template,
};

pub(crate) use self::stored_plan::{has_secret_inputs, secrets_of_plan};
use crate::child_env;
use crate::error::StepError;

/// How many references a run may have, and how many secrets they may name together.
const MAX_REFERENCES: usize = 200;
const MAX_SECRETS: usize = 100;
/// How many problems one message lists.
const MAX_LISTED: usize = 20;
/// Values of the platform's own, which cannot be references.
const OF_PLATFORM: [&str; 5] = [
    "ARM_OIDC_TOKEN",
    "VAULT_TOKEN",
    "TERRAKUBE_AWS_CREDENTIALS_FILE",
    "TERRAKUBE_GCP_CREDENTIALS_FILE",
    "TERRAKUBE_GCP_CREDENTIALS_CONFIG_FILE",
];
/// What the executor itself uses to prepare the workspace.
const OF_SOURCE: &str = "TERRAKUBE_";
/// Variables that shape the run's pod. The launcher passes their text through.
const OF_LAUNCHER: &str = "EPHEMERAL_";
const BLANK_ERROR: &str = "secret references cannot be used";

/// Where a value of the run is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Variable(String),
    Input(String),
    AccessToken,
    ModuleKey,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Variable(name) => write!(f, "variable {}", name.escape_debug()),
            Self::Input(name) => write!(f, "input {}", name.escape_debug()),
            Self::AccessToken => f.write_str("the access token of the source"),
            Self::ModuleKey => f.write_str("the SSH key of modules"),
        }
    }
}

impl Place {
    /// Whether the executor needs the value before there is a workspace.
    fn is_of_source(&self) -> bool {
        match self {
            Self::Variable(name) => name.starts_with(OF_SOURCE),
            Self::Input(_) => false,
            Self::AccessToken | Self::ModuleKey => true,
        }
    }
}

/// Which references of the run are resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent<'e> {
    /// Those that the workspace needs.
    Source,
    /// All but inputs of the tool that are in the stored plan. Ephemeral inputs are not: these.
    NotPlanned(&'e BTreeSet<String>),
    All,
}

/// References that are resolved for one run.
#[derive(Debug)]
pub(crate) struct References {
    reader: SecretReader,
    settings: RunSettings,
}

/// The settings that do not belong to a store.
#[derive(Debug)]
struct RunSettings {
    allow: secret_stores::AllowList,
    only_references: bool,
}

/// The job with secrets in the place of references.
pub(crate) struct FilledJob {
    pub(crate) job: JobData,
    /// Texts of inputs where the tool reads them as expressions, if they differ.
    pub(crate) expressions: BTreeMap<String, String>,
    /// What the log must not show.
    pub(crate) secrets: Vec<SecretString>,
    /// Where secrets are that are too short to be masked.
    pub(crate) too_short: Vec<String>,
}

/// Shorter values are parts of ordinary text.
const MIN_MASKED_BYTES: usize = 6;
/// Shorter texts in a document are words of it.
const MIN_MEMBER_BYTES: usize = 8;

impl References {
    /// The references of a run, or `None` if they are off.
    pub(crate) fn open(job: &JobData) -> Result<Option<Self>, StepError> {
        let session = format!("mayfly-{}-{}", job.job_id, job.step_id);
        let session = &session[..session.floor_char_boundary(64)];
        let purpose = Purpose {
            run: ids(job),
            session_name: session,
        };
        let settings = Settings::read(&|name| handover::var(name), purpose);
        let settings = settings.map_err(|errors| unusable(&errors.join("; ")))?;
        let Some(mut settings) = settings else {
            return Ok(None);
        };
        let own = RunSettings {
            allow: std::mem::take(&mut settings.allow),
            only_references: settings.only_references,
        };
        let reader = SecretReader::open(settings).map_err(|error| unusable(&error))?;
        Ok(Some(Self {
            reader,
            settings: own,
        }))
    }

    /// What the logins of the stores consist of.
    pub(crate) fn login_secrets(&self) -> &[SecretString] {
        self.reader.login_secrets()
    }

    /// Gives back what the stores have lent.
    pub(crate) async fn finish(&self) {
        self.reader.finish().await;
    }

    /// Refuses values that cannot or may not be resolved. It sends no request.
    pub(crate) fn check(&self, job: &JobData) -> Result<(), StepError> {
        let mut problems = Problems::default();
        let (mut count, mut ids_of_secrets) = (0, BTreeSet::new());
        for (place, text) in values(job) {
            let template = match Template::scan(text) {
                Ok(template) => template,
                Err(error) => {
                    problems.add(&place, &error);
                    continue;
                }
            };
            for reference in template.references() {
                count += 1;
                // More are refused in any case, and rules take their time.
                if count > MAX_REFERENCES {
                    continue;
                }
                if !self.settings.allow.allows(&reference.id, ids(job)) {
                    let rules = env::SECRET_REFERENCES_ALLOW;
                    problems.add(
                        &place,
                        &format!("{reference}: no rule of `{rules}` allows it"),
                    );
                }
                ids_of_secrets.insert(reference.id.clone());
            }
            if let (Place::Input(_), Err(error)) = (&place, template.render_input(|_| "")) {
                problems.add(&place, &error);
            }
            if self.settings.only_references && is_literal_secret(job, &place, text, &template) {
                problems.add(&place, &"it is sensitive, and no reference to a secret");
            }
        }
        if self.settings.only_references {
            for (name, value) in child_env::extra_variables(job) {
                if !secrets_in(&name, &value).is_empty() {
                    let place = format!("`{}` in {}", name.escape_debug(), env::EPHEMERAL_ENV);
                    problems.add(&place, &"it is sensitive, and no reference to a secret");
                }
            }
        }
        let source = job.source.as_deref().unwrap_or_default();
        if Template::scan(source).is_ok_and(|source| source.has_references()) {
            problems.add(
                &"the source",
                &"an address may not have a secret, because addresses are shown",
            );
        }
        if count > MAX_REFERENCES || ids_of_secrets.len() > MAX_SECRETS {
            let text = format!(
                "a run may have {MAX_REFERENCES} references to {MAX_SECRETS} secrets, and this one has {count} to {}",
                ids_of_secrets.len()
            );
            problems.0.push(text);
        }
        problems.into_result(Exit::StepFailed, BLANK_ERROR)
    }

    /// How many references to which store are resolved, for the log. `None` if there are none.
    pub(crate) fn summary(job: &JobData, extent: Extent<'_>) -> Option<String> {
        let mut counts = BTreeMap::<StoreKind, usize>::new();
        for (_, template) in templates(job, extent) {
            for reference in template.references() {
                *counts.entry(reference.id.store()).or_default() += 1;
            }
        }
        let total: usize = counts.values().sum();
        let counts: Vec<_> = counts
            .iter()
            .map(|(store, count)| format!("{} {count}", store.prefix()))
            .collect();
        let noun = if total == 1 {
            "reference"
        } else {
            "references"
        };
        (total > 0).then(|| format!("Resolving {total} secret {noun} ({}).", counts.join(", ")))
    }

    /// Reads the secrets, and puts them in their places. All failures are reported at once.
    pub(crate) async fn resolve(
        &self,
        job: &JobData,
        extent: Extent<'_>,
    ) -> Result<FilledJob, StepError> {
        let templates = templates(job, extent);
        let ids: BTreeSet<SecretId> = templates
            .iter()
            .flat_map(|(_, template)| template.references())
            .map(|reference| reference.id.clone())
            .collect();
        let found = self.reader.read(ids).await;
        let mut filled = FilledJob {
            job: job.clone(),
            expressions: BTreeMap::new(),
            secrets: Vec::new(),
            too_short: Vec::new(),
        };
        let (mut problems, mut all_transient) = (Problems::default(), true);
        for (place, template) in &templates {
            match texts(template, &found) {
                Ok(texts) => filled.fill(place, template, &texts),
                Err(errors) => {
                    for (reference, error) in errors {
                        all_transient &= error.class.is_transient();
                        let text = format!("{reference}: {error}: {}", error.hint());
                        problems.add(place, &text);
                    }
                }
            }
        }
        if let Extent::NotPlanned(ephemeral) = extent {
            let inputs = &mut filled.job.variables;
            inputs.retain(|name, input| ephemeral.contains(name) || !has_references(&input.value));
        }
        let exit = if all_transient {
            Exit::Infrastructure
        } else {
            Exit::StepFailed
        };
        let what = match problems.0.len() {
            1 => "a secret reference could not be resolved".to_owned(),
            count => format!("{count} secret references could not be resolved"),
        };
        problems.into_result(exit, &what)?;
        Ok(filled)
    }
}

impl FilledJob {
    fn fill(
        &mut self,
        place: &Place,
        template: &Template,
        texts: &BTreeMap<&Reference, SecretString>,
    ) {
        let text_of = |reference: &Reference| {
            let text = texts.get(reference).map(ExposeSecret::expose_secret);
            text.unwrap_or_default()
        };
        for text in texts.values() {
            if text.expose_secret().len() < MIN_MASKED_BYTES {
                self.too_short.push(place.to_string());
            } else {
                self.secrets.push(text.clone());
            }
            let document = serde_json::from_str(text.expose_secret()).unwrap_or_default();
            members(&document, &mut self.secrets);
        }
        let rendered = template.render(text_of);
        match place {
            Place::Variable(name) => {
                self.mask(name, &rendered);
                self.job
                    .environment_variables
                    .insert(name.clone(), rendered);
            }
            Place::Input(name) => {
                self.mask(name, &rendered);
                let Some(input) = self.job.variables.get_mut(name) else {
                    return;
                };
                // The check has found every input that cannot be rendered.
                if let Ok(text) = template.render_input(text_of) {
                    input.value = text.literal;
                    let expression = text.expression.map(|text| (name.clone(), text));
                    self.expressions.extend(expression);
                }
            }
            Place::AccessToken => self.job.access_token = Some(with_last_newline(rendered)),
            Place::ModuleKey => self.job.module_ssh_key = Some(with_last_newline(rendered)),
        }
    }

    fn mask(&mut self, name: &str, value: &str) {
        let secrets = secrets_in(name, value).into_iter();
        self.secrets.extend(secrets.map(SecretString::from));
    }
}

/// The values in which references are resolved, in the order of messages.
fn values(job: &JobData) -> impl Iterator<Item = (Place, &str)> {
    let variables = job.environment_variables.iter();
    let variables = variables
        .filter(|(name, _)| !name.starts_with(OF_LAUNCHER))
        .map(|(name, value)| (Place::Variable(name.clone()), value.as_str()));
    let inputs = job.variables.iter();
    let inputs = inputs.map(|(name, input)| (Place::Input(name.clone()), input.value.as_str()));
    let token = job.access_token.iter();
    let key = job.module_ssh_key.iter();
    variables
        .chain(inputs)
        .chain(token.map(|value| (Place::AccessToken, value.as_str())))
        .chain(key.map(|value| (Place::ModuleKey, value.as_str())))
}

/// The values in which something is replaced. Those that cannot be scanned were refused before.
fn templates(job: &JobData, extent: Extent<'_>) -> Vec<(Place, Template)> {
    let is_wanted = |place: &Place| match (extent, place) {
        (Extent::Source, place) => place.is_of_source(),
        (Extent::NotPlanned(ephemeral), Place::Input(name)) => ephemeral.contains(name),
        (Extent::NotPlanned(_) | Extent::All, _) => true,
    };
    let wanted = values(job).filter(|(place, _)| is_wanted(place));
    let scanned = wanted.filter_map(|(place, text)| Some((place, Template::scan(text).ok()?)));
    scanned.filter(|(_, template)| template.changes()).collect()
}

fn has_references(text: &str) -> bool {
    Template::scan(text).is_ok_and(|template| template.has_references())
}

/// The job without values that have references, in which nothing is secret yet.
pub(crate) fn without_references(job: &JobData) -> JobData {
    let mut job = job.clone();
    job.environment_variables
        .retain(|_, value| !has_references(value));
    job.variables
        .retain(|_, input| !has_references(&input.value));
    for secret in [&mut job.access_token, &mut job.module_ssh_key] {
        secret.take_if(|text| has_references(text));
    }
    job
}

/// Whether the value is sensitive and not entirely a reference. Job data do not say what is sensitive, so names and forms decide.
fn is_literal_secret(job: &JobData, place: &Place, text: &str, template: &Template) -> bool {
    if template.is_only_references() || text.trim().is_empty() {
        return false;
    }
    match place {
        Place::Variable(name) if OF_PLATFORM.contains(&name.as_str()) => false,
        Place::Variable(name) | Place::Input(name) => {
            let literal = template.render(|_| "");
            !secrets_in(name, &literal).is_empty()
        }
        // Other tokens of sources come from the platform.
        Place::AccessToken => job
            .vcs_type
            .as_deref()
            .unwrap_or_default()
            .starts_with("SSH"),
        Place::ModuleKey => true,
    }
}

type Texts<'t> = BTreeMap<&'t Reference, SecretString>;

/// The text of each reference of a template, or all errors.
fn texts<'t>(
    template: &'t Template,
    found: &Found,
) -> Result<Texts<'t>, Vec<(&'t Reference, ReadError)>> {
    let (mut texts, mut errors) = (BTreeMap::new(), Vec::new());
    for reference in template.references() {
        let store = reference.id.store();
        let selected = match found.get(&reference.id) {
            Some(Ok(value)) => value.select(store, reference.key.as_deref()),
            Some(Err(error)) => Err(error.clone()),
            None => continue,
        };
        match selected {
            Ok(text) => {
                texts.insert(reference, text);
            }
            Err(error) => errors.push((reference, error)),
        }
    }
    if errors.is_empty() {
        Ok(texts)
    } else {
        Err(errors)
    }
}

/// What the log must not show of a value that is secret as a whole.
pub(crate) fn texts_of_secret(value: &str) -> Vec<SecretString> {
    let mut found = Vec::new();
    if value.len() >= MIN_MASKED_BYTES {
        found.push(value.into());
    }
    if let Ok(document) = serde_json::from_str::<serde_json::Value>(value) {
        members(&document, &mut found);
    } else {
        // An expression has texts in quotes.
        let quoted = value.split('"').skip(1).step_by(2);
        let texts = quoted.filter(|text| text.len() >= MIN_MEMBER_BYTES);
        found.extend(texts.map(SecretString::from));
    }
    found
}

/// The texts in a document that are long enough to be secrets.
fn members(value: &serde_json::Value, found: &mut Vec<SecretString>) {
    match value {
        serde_json::Value::String(text) if text.len() >= MIN_MEMBER_BYTES => {
            found.push(text.as_str().into());
        }
        serde_json::Value::Array(items) => items.iter().for_each(|item| members(item, found)),
        serde_json::Value::Object(entries) => {
            entries.values().for_each(|item| members(item, found));
        }
        _ => {}
    }
}

/// Keys in PEM end with a newline, which some stores take away.
fn with_last_newline(mut text: String) -> String {
    if text.starts_with("-----BEGIN ") && !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

fn ids(job: &JobData) -> RunIds<'_> {
    RunIds {
        organization: &job.organization_id,
        workspace: &job.workspace_id,
    }
}

fn unusable(text: &str) -> StepError {
    let error = format!("the settings of the stores of secrets cannot be used: {text}");
    StepError::new(Exit::BadConfiguration, error)
        .with_hint("docs/secrets.md lists the settings of each store")
}

/// Problems that are reported together.
#[derive(Default)]
struct Problems(Vec<String>);

impl Problems {
    fn add(&mut self, place: &impl std::fmt::Display, problem: &impl std::fmt::Display) {
        self.0.push(format!("{place}: {problem}"));
    }

    fn into_result(self, exit: Exit, what: &str) -> Result<(), StepError> {
        if self.0.is_empty() {
            return Ok(());
        }
        let more = self.0.len().saturating_sub(MAX_LISTED);
        let mut text = self
            .0
            .into_iter()
            .take(MAX_LISTED)
            .collect::<Vec<_>>()
            .join("; ");
        if more > 0 {
            text = format!("{text}; and {more} more");
        }
        Err(StepError::new(exit, format!("{what}: {text}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references(rules: &str, only_references: bool) -> References {
        let settings = Settings::default();
        References {
            reader: SecretReader::open(settings).unwrap(),
            settings: RunSettings {
                allow: secret_stores::AllowList::parse(rules).unwrap(),
                only_references,
            },
        }
    }

    fn job(variables: &[(&str, &str)]) -> JobData {
        let pairs = variables.iter();
        JobData {
            organization_id: "org".into(),
            workspace_id: "ws".into(),
            environment_variables: pairs
                .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()))
                .collect(),
            ..JobData::default()
        }
    }

    fn problem(references: &References, job: &JobData) -> String {
        references.check(job).unwrap_err().to_string()
    }

    #[test]
    fn everything_wrong_is_said_at_once_and_nothing_pasted_is_shown() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut job = job(&[
            ("A", "${ssm:hunter2 pasted}"),
            ("B", "${ssm:other/x}"),
            ("C", "${ssm:org/x} and ${HOME}"),
            ("EPHEMERAL_CPU_REQUEST", "${ssm:"),
        ]);
        job.variables
            .insert("d".into(), "{ x = \"${ssm:org/x}\" }".into());
        job.source = Some("https://${ssm:org/x}@git.example.test/r".into());
        let text = problem(&references("ssm:{organizationId}/*", false), &job);
        assert!(!text.contains("hunter2"), "{text}");
        for expected in [
            "variable A: the reference `${ssm:…}` at byte 0 cannot be used",
            "variable B: ${ssm:other/x}: no rule of `MAYFLY_SECRET_REFERENCES_ALLOW` allows it",
            "input d: a secret cannot be inserted safely",
            "the source: an address may not have a secret",
        ] {
            assert!(text.contains(expected), "{expected}\n{text}");
        }
        assert!(!text.contains("variable C"), "{text}");
    }

    #[test]
    fn too_many_references_are_refused() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let many = "${ssm:x}".repeat(10_000);
        let text = problem(&references("", false), &job(&[("A", &many)]));
        assert!(text.contains("this one has 10000 to 1"), "{text}");
    }

    #[test]
    fn a_sensitive_value_that_is_no_reference_is_refused_if_the_operator_wants_that() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let strict = references("", true);
        let passes = job(&[
            ("DB_PASSWORD", "${ssm:db}"),
            ("VAULT_TOKEN", "hvs.of-the-platform"),
            ("REGION", "eu-west-1"),
        ]);
        strict.check(&passes).unwrap();
        let mut fails = job(&[
            ("DB_PASSWORD", "hunter2-hunter2"),
            ("URL", "postgres://u:hunter2-hunter2@${ssm:host}"),
            ("EPHEMERAL_JOB_ENV_VARS", "API_TOKEN=hunter2-hunter2"),
        ]);
        fails.vcs_type = Some("SSH~RSA".into());
        fails.access_token = Some("-----BEGIN KEY".into());
        fails.module_ssh_key = Some("-----BEGIN KEY".into());
        let text = problem(&strict, &fails);
        assert!(!text.contains("hunter2"), "{text}");
        for place in [
            "variable DB_PASSWORD",
            "variable URL",
            "`API_TOKEN` in",
            "access token",
            "SSH key",
        ] {
            assert!(text.contains(place), "{place}\n{text}");
        }
        references("", false).check(&fails).unwrap();
    }

    #[test]
    fn an_apply_resolves_inputs_that_its_plan_does_not_have() {
        let mut job = job(&[("A", "${ssm:a}")]);
        for (name, text) in [("kept", "${ssm:b}"), ("token", "${ssm:c}"), ("plain", "x")] {
            job.variables.insert(name.into(), text.into());
        }
        let ephemeral = BTreeSet::from(["token".to_owned(), "plain".to_owned()]);
        let places = |extent| {
            let found = templates(&job, extent).into_iter();
            found
                .map(|(place, _)| place.to_string())
                .collect::<Vec<_>>()
        };
        let none = BTreeSet::new();
        assert_eq!(places(Extent::NotPlanned(&none)), ["variable A"]);
        let expected = ["variable A", "input token"];
        assert_eq!(places(Extent::NotPlanned(&ephemeral)), expected);
        assert_eq!(places(Extent::All).len(), 3);
    }

    #[test]
    fn a_secret_value_is_masked_as_a_whole_and_in_its_texts() {
        let texts = |value| {
            let found = texts_of_secret(value).into_iter();
            found
                .map(|text| text.expose_secret().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(texts("hunter2"), ["hunter2"]);
        assert!(texts("true").is_empty());
        let json = r#"{"password": "hunter2-hunter2"}"#;
        assert_eq!(texts(json), [json, "hunter2-hunter2"]);
        let expression = r#"{ password = "hunter2-hunter2" }"#;
        assert_eq!(texts(expression), [expression, "hunter2-hunter2"]);
    }

    #[test]
    fn a_reference_is_no_secret_and_a_typo_may_be_one() {
        let job = job(&[
            ("A_TOKEN", "${ssm:db}"),
            ("B_TOKEN", "${ssm:db"),
            ("C", "x"),
        ]);
        let kept = without_references(&job).environment_variables;
        assert_eq!(kept.keys().collect::<Vec<_>>(), ["B_TOKEN", "C"]);
    }
}
