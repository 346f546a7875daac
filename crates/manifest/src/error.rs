//! Errors in a run's own settings or in the deployment's. Each names the setting and the rule it breaks.

use std::fmt;

use job_contract::Exit;

/// Where a wrong setting comes from. This shows who can correct it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The owner of the workspace: a variable or the job itself asks for something impossible.
    Run,
    /// The operator of the launcher.
    Deployment,
}

/// One setting of a run or of the deployment that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{subject}` {rule}")]
pub struct ManifestError {
    /// The variable, or the property of the job data.
    pub subject: String,
    /// The rule it breaks, as a phrase that follows the subject. Never holds a value that could be secret.
    pub rule: String,
    pub origin: Origin,
}

/// Every error of one run, at least one, in the order they were found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ManifestErrors {
    errors: Vec<ManifestError>,
}

impl ManifestErrors {
    /// The errors, of which there must be at least one.
    pub(super) const fn new(errors: Vec<ManifestError>) -> Self {
        Self { errors }
    }

    /// `Ok` if there are no errors.
    pub(super) fn check(errors: Vec<ManifestError>) -> Result<(), Self> {
        if errors.is_empty() {
            Ok(())
        } else {
            Err(Self { errors })
        }
    }

    /// The errors, at least one.
    pub fn errors(&self) -> &[ManifestError] {
        &self.errors
    }

    /// The exit code of a command that failed for these reasons. Errors of the configuration come first, because they
    /// affect every run.
    pub fn exit(&self) -> Exit {
        if self
            .errors
            .iter()
            .any(|error| error.origin == Origin::Deployment)
        {
            Exit::BadConfiguration
        } else {
            Exit::BadJobData
        }
    }
}

/// One sentence for each error, for the log of the run.
impl fmt::Display for ManifestErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.errors.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{error}")?;
        }
        Ok(())
    }
}

/// Collects errors with the same [`Origin`].
#[derive(Debug)]
pub struct ErrorList {
    origin: Origin,
    found: Vec<ManifestError>,
}

impl ErrorList {
    /// Returns a list without errors.
    pub const fn new(origin: Origin) -> Self {
        Self {
            origin,
            found: Vec::new(),
        }
    }

    /// Adds an error: this setting breaks this rule.
    pub fn add(&mut self, subject: &str, rule: impl Into<String>) {
        self.found.push(ManifestError {
            subject: subject.to_owned(),
            rule: rule.into(),
            origin: self.origin,
        });
    }

    /// Returns the value, or `None` after it recorded the error.
    pub fn keep<T>(&mut self, subject: &str, result: Result<T, impl fmt::Display>) -> Option<T> {
        result
            .map_err(|rule| self.add(subject, rule.to_string()))
            .ok()
    }

    /// Returns the errors in the order they were added.
    pub fn into_vec(self) -> Vec<ManifestError> {
        self.found
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
