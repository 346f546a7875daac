//! Errors in a run's own settings or in the deployment's. Each names the setting and the rule it breaks.

use std::fmt;

use job_contract::Exit;

/// Who can correct it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The owner of the workspace: a variable or the job itself asks for something impossible.
    Run,
    /// The operator of the launcher.
    Deployment,
}

/// One setting of a run or of the deployment that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{subject}` {rule}")]
pub struct Problem {
    /// The variable, or the property of the job data.
    pub subject: String,
    /// The rule it breaks, as a phrase that follows the subject. Never holds a value that could be secret.
    pub rule: String,
    /// Who can correct it.
    pub fault: Fault,
}

/// Every problem of one run, at least one, in the order they were found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ManifestErrors {
    problems: Vec<Problem>,
}

impl ManifestErrors {
    /// The problems, of which there must be at least one.
    pub(super) const fn new(problems: Vec<Problem>) -> Self {
        Self { problems }
    }

    /// `Ok` when there is nothing to complain about.
    pub(super) fn check(problems: Vec<Problem>) -> Result<(), Self> {
        if problems.is_empty() {
            Ok(())
        } else {
            Err(Self { problems })
        }
    }

    /// The problems, at least one.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// The exit code of a command that failed for these reasons: configuration comes first, because until it
    /// is right no run can be.
    pub fn exit(&self) -> Exit {
        if self.problems.iter().any(|p| p.fault == Fault::Deployment) {
            Exit::BadConfiguration
        } else {
            Exit::BadJobData
        }
    }
}

/// One sentence a problem, fit for the user's log.
impl fmt::Display for ManifestErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

/// Collects problems with the same [`Fault`].
#[derive(Debug)]
pub(crate) struct Problems {
    fault: Fault,
    found: Vec<Problem>,
}

impl Problems {
    pub(crate) const fn new(fault: Fault) -> Self {
        Self {
            fault,
            found: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, subject: &str, rule: impl Into<String>) {
        self.found.push(Problem {
            subject: subject.to_owned(),
            rule: rule.into(),
            fault: self.fault,
        });
    }

    /// The value, or `None` after noting why there is none.
    pub(crate) fn keep<T>(
        &mut self,
        subject: &str,
        result: Result<T, impl fmt::Display>,
    ) -> Option<T> {
        result
            .map_err(|rule| self.add(subject, rule.to_string()))
            .ok()
    }

    pub(crate) fn into_vec(self) -> Vec<Problem> {
        self.found
    }
}

/// A piece of the user's own text inside a message: short, on one line.
pub(crate) fn quote(text: &str) -> String {
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
