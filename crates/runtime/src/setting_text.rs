//! The text of a setting: whether it counts as set, and what is wrong with it. Knows neither clap nor where texts come from.

use std::ffi::OsStr;
use std::fmt;

/// The problem of one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingError {
    /// The variable of the setting, or the flag that set it.
    pub variable: String,
    /// The end of a sentence that begins with the variable. Never quotes a secret.
    pub text: String,
}

impl SettingError {
    /// An error of the setting with this name.
    pub fn new(variable: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            variable: variable.into(),
            text: text.into(),
        }
    }
}

impl fmt::Display for SettingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.variable, self.text)
    }
}

/// The text of a variable, unless it counts as not set.
pub(crate) fn meant<'t>(variable: &OsStr, text: &'t str) -> Option<&'t str> {
    let text = text.trim();
    let placeholder = text
        .strip_prefix("${")
        .and_then(|rest| rest.strip_suffix('}'));
    let is_unset = text.is_empty() || placeholder.is_some_and(|inner| *inner == *variable);
    (!is_unset).then_some(text)
}
