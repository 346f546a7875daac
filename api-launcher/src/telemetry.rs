//! The launcher's own diagnostics as a service, on stderr. What runs print is another stream and never passes
//! here.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

/// Format of the diagnostics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// One JSON object a line, for what collects logs.
    Json,
    /// Lines for people.
    Text,
}

impl LogFormat {
    /// What suits where stderr goes.
    pub(crate) fn detect() -> Self {
        if io::stderr().is_terminal() {
            Self::Text
        } else {
            Self::Json
        }
    }
}

/// Installs the subscriber. A second installation, as in a test, leaves the first in force.
pub(crate) fn install(format: LogFormat, filter: EnvFilter) {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr);
    let _ = match format {
        LogFormat::Json => builder
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .try_init(),
        LogFormat::Text => builder
            .compact()
            .with_ansi(io::stderr().is_terminal())
            .try_init(),
    };
}
