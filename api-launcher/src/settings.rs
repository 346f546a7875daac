//! Reads settings whose values are still text. Every problem is found before any is reported.

use std::fmt;
use std::str::FromStr;

use runtime::setting::{SettingProblem, present};

/// A setting whose value cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InvalidSetting {
    pub(crate) variable: String,
    /// The end of a sentence that begins with the variable.
    pub(crate) reason: String,
}

impl fmt::Display for InvalidSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.variable, self.reason)
    }
}

impl From<&SettingProblem> for InvalidSetting {
    fn from(problem: &SettingProblem) -> Self {
        Self {
            variable: problem.variable.clone(),
            reason: problem.text.clone(),
        }
    }
}

/// Parses settings and collects those that are invalid.
#[derive(Debug, Default)]
pub(crate) struct SettingsReader {
    pub(crate) invalid: Vec<InvalidSetting>,
}

impl SettingsReader {
    /// Records an invalid setting.
    pub(crate) fn reject(&mut self, variable: &str, reason: impl Into<String>) {
        self.invalid.push(InvalidSetting {
            variable: variable.to_owned(),
            reason: reason.into(),
        });
    }

    /// Returns the choice that the text names. The first choice is the default of a blank or unknown text.
    pub(crate) fn choose<T: Copy>(
        &mut self,
        variable: &str,
        text: Option<&str>,
        choices: &[(&str, T)],
    ) -> T {
        let (_, default) = choices[0];
        let Some(text) = present(text) else {
            return default;
        };
        let found = choices
            .iter()
            .find(|(name, _)| text.eq_ignore_ascii_case(name));
        if let Some((_, choice)) = found {
            return *choice;
        }
        let names: Vec<String> = choices
            .iter()
            .map(|(name, _)| format!("`{name}`"))
            .collect();
        self.reject(
            variable,
            format!("is `{text}`, expected {}", names.join(" or ")),
        );
        default
    }

    /// Parses the text. Returns `None` if it is blank or invalid.
    pub(crate) fn parse<T: FromStr>(
        &mut self,
        variable: &str,
        text: Option<&str>,
        expected: &str,
    ) -> Option<T> {
        let text = present(text)?;
        let value = text.parse().ok();
        if value.is_none() {
            self.reject(variable, format!("is `{text}`, expected {expected}"));
        }
        value
    }
}
