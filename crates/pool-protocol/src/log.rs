//! Lines of the run log. Each line has a number, so a repeated line is not added twice.

use serde::{Deserialize, Serialize};

/// The body of `logs`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct LogBatch {
    pub stream_id: String,
    /// The number of the first entry.
    pub first_sequence: u64,
    pub entries: Vec<LogEntry>,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct LogEntry {
    pub sequence: u64,
    /// Time of the line (RFC 3339).
    pub timestamp: String,
    pub text: String,
}

/// The response to `logs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct LogReceipt {
    /// The number of the next entry that the hub expects.
    pub next_sequence: u64,
}

impl LogBatch {
    /// Returns whether the numbers of the entries have no gap.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        let numbers = self.first_sequence..;
        let mut pairs = self.entries.iter().zip(numbers);
        pairs.all(|(entry, number)| entry.sequence == number)
    }
}
