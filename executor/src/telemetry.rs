//! The executor's diagnostics: how they are set up, and the phases it announces among them.

use job_contract::progress::{self, Phase, Progress};
use runtime::telemetry::{LogFormat, subscribe};
use tracing::info;
use tracing_subscriber::EnvFilter;

use crate::config::TelemetryConfig;

/// Sets the executor's diagnostics up.
pub(crate) fn install(
    config: &TelemetryConfig,
) -> Result<(), tracing_subscriber::filter::ParseError> {
    let filter = EnvFilter::try_new(&config.log_filter)?;
    subscribe(config.log_format.unwrap_or_else(LogFormat::detect), filter);
    Ok(())
}

/// Announces that a phase begins.
pub(crate) fn phase_started(phase: Phase) {
    info!(
        target: progress::TARGET,
        event = Progress::PhaseStarted.name(),
        phase = phase.name(),
        "{phase} started"
    );
}

/// Announces that a phase has ended.
pub(crate) fn phase_finished(phase: Phase, duration_ms: u64, ok: bool) {
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
