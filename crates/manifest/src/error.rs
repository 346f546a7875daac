//! Errors in a run's own settings or in the deployment's. Each names the setting and the rule it breaks.

use std::fmt;

use job_contract::Exit;
use runtime::setting::SettingError;

/// Where wrong settings come from. This shows who can correct them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The owner of the workspace: a variable or the job itself asks for something impossible.
    Run,
    /// The operator of the launcher.
    Deployment,
}

/// Every error of one run, in the order they were found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ManifestErrors {
    pub origin: Origin,
    /// At least one. Instead of a variable, an error may name a property of the job data or a label.
    pub errors: Vec<SettingError>,
}

impl ManifestErrors {
    /// `Ok` if there are no errors.
    pub(super) fn check(origin: Origin, errors: Vec<SettingError>) -> Result<(), Self> {
        if errors.is_empty() {
            Ok(())
        } else {
            Err(Self { origin, errors })
        }
    }

    /// The exit code of a command that failed for these reasons.
    pub const fn exit(&self) -> Exit {
        match self.origin {
            Origin::Run => Exit::BadJobData,
            Origin::Deployment => Exit::BadConfiguration,
        }
    }
}

/// One sentence for each error, for the log of the run.
impl fmt::Display for ManifestErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sentences: Vec<String> = self.errors.iter().map(ToString::to_string).collect();
        f.write_str(&sentences.join("; "))
    }
}

/// Collects errors of settings.
pub trait CollectErrors {
    /// Adds an error: this setting breaks this rule.
    fn add(&mut self, setting: &str, rule: impl Into<String>);

    /// Returns the value, or `None` after it recorded the error.
    fn keep<T>(&mut self, setting: &str, result: Result<T, impl fmt::Display>) -> Option<T> {
        result
            .map_err(|rule| self.add(setting, rule.to_string()))
            .ok()
    }
}

impl CollectErrors for Vec<SettingError> {
    fn add(&mut self, setting: &str, rule: impl Into<String>) {
        self.push(SettingError::new(setting, rule));
    }
}

/// Shortens a piece of a user's text for a message, and puts it on one line.
pub fn quote(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut quoted: String = text
        .chars()
        .take(LONGEST)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if text.chars().count() > LONGEST {
        quoted.push('…');
    }
    format!("`{quoted}`")
}
