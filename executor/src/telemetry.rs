//! The executor's own diagnostics, on stderr. The run's log is another stream and never mixed with it.

use std::io::{self, IsTerminal as _};
use std::panic;

use job_contract::progress::{self, Phase, Progress};
use tracing::{error, info};
use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, TelemetryConfig};

/// Installs the subscriber and a panic hook that names the place and keeps the message to itself: a panic
/// message can quote data.
pub fn install(config: &TelemetryConfig) -> Result<(), tracing_subscriber::filter::ParseError> {
    let filter = EnvFilter::try_new(&config.log_filter)?;
    let format = config.log_format.unwrap_or_else(|| {
        if io::stderr().is_terminal() {
            LogFormat::Text
        } else {
            LogFormat::Json
        }
    });
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr);
    // A second installation, as in a test, leaves the first in force.
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
    panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string);
        error!(
            place = place.as_deref(),
            "a defect of the executor: please report it with this place"
        );
    }));
    Ok(())
}

/// Announces that a phase begins.
pub fn phase_started(phase: Phase) {
    info!(
        target: progress::TARGET,
        event = Progress::PhaseStarted.name(),
        phase = phase.name(),
        "{phase} started"
    );
}

/// Announces that a phase has ended.
pub fn phase_finished(phase: Phase, duration_ms: u64, ok: bool) {
    info!(
        target: progress::TARGET,
        event = Progress::PhaseFinished.name(),
        phase = phase.name(),
        duration_ms,
        ok,
        "{phase} {}",
        if ok { "finished" } else { "failed" }
    );
}
