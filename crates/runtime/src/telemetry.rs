//! Diagnostics on stderr. The log of a run is a separate stream.

use std::io::{self, IsTerminal as _, Write as _};
use std::panic;

use crate::setting::{SettingValue, choice};
use clap::ValueEnum;
use tracing::{dispatcher, error};
use tracing_subscriber::EnvFilter;

/// Format of the executor's own diagnostics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// Compact text.
    Text,
}

impl LogFormat {
    /// The format that fits stderr: text for a terminal, else JSON.
    pub fn detect() -> Self {
        if io::stderr().is_terminal() {
            Self::Text
        } else {
            Self::Json
        }
    }
}

impl SettingValue for LogFormat {
    fn parse(text: &str) -> Result<Self, String> {
        let words = [
            ("auto", Self::detect()),
            ("json", Self::Json),
            ("text", Self::Text),
        ];
        choice(text, &words)
    }
}

/// Installs the subscriber. A second installation, as in tests, has no effect.
pub fn subscribe(format: LogFormat, filter: EnvFilter) {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // If stderr fails, the subscriber would print that to stderr, and panic.
        .log_internal_errors(false)
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

/// Installs a panic hook that logs the place of a panic without its message, which can quote data.
pub fn name_panics(program: &'static str) {
    panic::set_hook(Box::new(move |panic| {
        let place = panic.location().map(ToString::to_string);
        let place = place.as_deref().unwrap_or("an unknown place");
        if dispatcher::has_been_set() {
            error!(
                place,
                "a defect of {program}: please report it with this place"
            );
        } else {
            // If stderr fails, the panic cannot be reported.
            let _ = writeln!(
                io::stderr(),
                "error: a defect of {program} at {place}: please report it with this place"
            );
        }
    }));
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_panic_is_logged_with_its_location_and_without_its_message() {
        let written = Written::default();
        let sink = written.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || sink.clone())
            .finish();
        let usual = panic::take_hook();
        tracing::subscriber::with_default(subscriber, || {
            name_panics("the program");
            let caught = panic::catch_unwind(|| panic!("the token is hunter2"));
            assert!(caught.is_err());
        });
        panic::set_hook(usual);
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        assert!(text.contains("a defect of the program"), "{text}");
        assert!(
            text.contains("telemetry.rs:") && !text.contains("hunter2"),
            "{text}"
        );
    }
}
