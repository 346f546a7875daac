//! The facts a verdict rests on.

use serde::{Deserialize, Serialize};

/// One fact a verdict rests on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evidence {
    /// Where it was read: `container executor`, `node`, `event FailedScheduling`…
    pub source: String,
    /// What it says.
    pub text: String,
}

impl Evidence {
    /// Returns the fact that this source says this text.
    pub fn new(source: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            source: source.into(),
            text: text.into(),
        }
    }
}
