//! The options of diagnostics on stderr, and the message of a service whose settings are wrong.

use std::io::{self, Write as _};

use clap::Args;
use job_contract::{Exit, env};
use runtime::setting::{ReadSetting as _, Setting, SettingError};
use runtime::telemetry::LogFormat;
use tracing_subscriber::EnvFilter;

/// The options of diagnostics.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Diagnostics")]
pub struct TelemetryArgs {
    /// `json` or `text` [default: text on a terminal, else json]
    #[arg(long, value_name = "FORMAT", env = env::LOG_FORMAT)]
    pub log_format: Option<Setting<LogFormat>>,

    /// Filter of the log, as `tracing` directives [default: info]
    #[arg(long, value_name = "FILTER", env = env::LOG_FILTER)]
    pub log_filter: Option<Setting<String>>,
}

/// The library warns of each refused attempt to watch. The watcher itself logs refusals once.
const REFUSED_WATCHES: &str = "kube_runtime::watcher=error";

impl TelemetryArgs {
    /// Format and filter, with what is wrong about them.
    pub fn resolve(&self) -> Result<(LogFormat, EnvFilter), Vec<SettingError>> {
        let mut errors = Vec::new();
        let format = self.log_format.read(&mut errors);
        let directives = self.log_filter.read(&mut errors);
        let directives = directives.as_deref().unwrap_or("info");
        let filter = EnvFilter::try_new(format!("{REFUSED_WATCHES},{directives}"));
        if filter.is_err() {
            let text = "holds no `tracing` directives";
            errors.push(SettingError::new(env::LOG_FILTER, text));
        }
        match filter {
            Ok(filter) if errors.is_empty() => {
                Ok((format.unwrap_or_else(LogFormat::detect), filter))
            }
            _ => Err(errors),
        }
    }
}

/// Prints the wrong settings, and returns the exit code.
pub fn refuse(errors: &[SettingError]) -> u8 {
    let mut text = String::from("error: the configuration cannot be used\n");
    for error in errors {
        text = format!("{text}  {} {}\n", error.variable, error.text);
    }
    let _ = io::stderr().write_all(text.as_bytes());
    Exit::BadConfiguration.code()
}
