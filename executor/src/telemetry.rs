//! Sets up the executor's diagnostics.

use runtime::telemetry::{LogFormat, subscribe};
use tracing_subscriber::EnvFilter;

use crate::config::TelemetryConfig;

/// Sets up the executor's diagnostics.
pub(crate) fn install(
    config: &TelemetryConfig,
) -> Result<(), tracing_subscriber::filter::ParseError> {
    let filter = EnvFilter::try_new(&config.log_filter)?;
    subscribe(config.log_format.unwrap_or_else(LogFormat::detect), filter);
    Ok(())
}
