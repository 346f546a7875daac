//! Looks settings up: those of the executor, and before them those of a login that the operator has given to some organizations or
//! workspaces.

use std::collections::BTreeMap;
use std::path::Path;

use job_contract::env;
use runtime::regular_file;
use serde::Deserialize;

use crate::allow::RunIds;

/// Longer files are no credentials.
pub(crate) const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// A login for some organizations or workspaces, in the document of [`env::SECRET_LOGINS`].
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LoginRule {
    organizations: Vec<String>,
    workspaces: Vec<String>,
    /// Values of settings. An empty one takes the setting away.
    settings: BTreeMap<String, String>,
    /// Which variable of the executor holds a setting.
    variables: BTreeMap<String, String>,
}

impl LoginRule {
    fn sets(&self, name: &str) -> bool {
        self.settings.contains_key(name) || self.variables.contains_key(name)
    }
}

/// Looks settings up, with those of the run's own login first.
pub struct Lookup<'l> {
    own: &'l dyn Fn(&str) -> Option<String>,
    rule: Option<LoginRule>,
}

impl std::fmt::Debug for Lookup<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lookup").finish_non_exhaustive()
    }
}

impl<'l> Lookup<'l> {
    pub fn new(own: &'l dyn Fn(&str) -> Option<String>) -> Self {
        Self { own, rule: None }
    }

    /// The same for a run, which may have a login of its own.
    pub(crate) fn of_run(self, run: RunIds<'_>) -> Result<Self, String> {
        let mut rules = self.login_rules()?;
        let has = |ids: &[String], id: &str| ids.iter().any(|known| known == id);
        // A workspace is more exact than its organization.
        let at = rules
            .iter()
            .position(|rule| has(&rule.workspaces, run.workspace))
            .or_else(|| {
                rules
                    .iter()
                    .position(|rule| has(&rule.organizations, run.organization))
            });
        let rule = at.map(|at| rules.swap_remove(at));
        let lookup = Self { rule, ..self };
        let variables = lookup.rule.iter().flat_map(|rule| &rule.variables);
        for (setting, variable) in variables {
            // Its login would be another one.
            if lookup.text(setting).is_none() {
                let name = env::SECRET_LOGINS;
                return Err(format!(
                    "`{name}` takes `{setting}` from `{variable}`, which is not set"
                ));
            }
        }
        Ok(lookup)
    }

    /// The ids of those that have logins of their own, and how messages name them.
    ///
    /// # Errors
    /// Says what is wrong with the list of logins.
    pub fn owners(&self) -> Result<Vec<(String, String, String)>, String> {
        let owners = self.login_rules()?.into_iter().flat_map(|rule| {
            let organizations = rule.organizations.into_iter();
            let organizations =
                organizations.map(|id| (id.clone(), String::new(), format!("organization {id}")));
            let workspaces = rule.workspaces.into_iter();
            let workspaces =
                workspaces.map(|id| (String::new(), id.clone(), format!("workspace {id}")));
            organizations.chain(workspaces).collect::<Vec<_>>()
        });
        Ok(owners.collect())
    }

    /// The text of a setting. Blanks count as not set, because charts write them for unset values.
    pub fn text(&self, name: &str) -> Option<String> {
        let found = match &self.rule {
            Some(rule) if rule.settings.contains_key(name) => rule.settings.get(name).cloned(),
            Some(rule) => {
                let variable = rule.variables.get(name).map_or(name, String::as_str);
                (self.own)(variable)
            }
            None => (self.own)(name),
        };
        found
            .map(|text| text.trim().to_owned())
            .filter(|text| !text.is_empty())
    }

    /// The text of a setting, or of the file that the setting with the suffix `_FILE` names.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn text_or_file(&self, name: &str) -> Result<Option<String>, String> {
        if let Some(text) = self.text(name) {
            return Ok(Some(text));
        }
        // The file is of the login that all others have.
        if self.rule.as_ref().is_some_and(|rule| rule.sets(name)) {
            return Ok(None);
        }
        let variable = format!("{name}{}", env::FILE_SUFFIX);
        let Some(path) = self.text(&variable) else {
            return Ok(None);
        };
        let text = regular_file::read_text(Path::new(&path), MAX_FILE_BYTES).map_err(|error| {
            format!("`{variable}` names `{path}`, which cannot be read: {error}")
        })?;
        Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty()))
    }

    pub(crate) fn flag(&self, name: &str) -> Result<bool, String> {
        match self.text_or_file(name)?.as_deref() {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(format!("`{name}` is neither `true` nor `false`")),
        }
    }

    fn login_rules(&self) -> Result<Vec<LoginRule>, String> {
        let name = env::SECRET_LOGINS;
        let Some(text) = self.text_or_file(name)? else {
            return Ok(Vec::new());
        };
        let rules: Vec<LoginRule> = serde_json::from_str(&text)
            .map_err(|error| format!("`{name}` is no list of logins: {error}"))?;
        for rule in &rules {
            if rule.organizations.is_empty() && rule.workspaces.is_empty() {
                return Err(format!(
                    "`{name}` has a login for no organization and no workspace"
                ));
            }
            if let Some(secret) = rule.settings.keys().find(|setting| env::is_secret(setting)) {
                return Err(format!(
                    "`{name}` has the value of `{secret}`, which is a secret: name the variable that holds it in `variables`"
                ));
            }
            let mut names = rule.settings.keys().chain(rule.variables.keys());
            if let Some(unknown) = names.find(|setting| !is_of_login(setting)) {
                return Err(format!(
                    "`{name}` sets `{unknown}`, which is no setting of a login"
                ));
            }
        }
        Ok(rules)
    }
}

/// Whether a login for some runs may set it. All other settings are the same for all runs, or those of files, which code of
/// other runs could read.
fn is_of_login(name: &str) -> bool {
    env::SECRET_STORE_SETTINGS.contains(&name)
        && ![
            env::SECRET_REFERENCES,
            env::SECRET_LOGINS,
            env::ONLY_SECRET_REFERENCES,
        ]
        .contains(&name)
}
