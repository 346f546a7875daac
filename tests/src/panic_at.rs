//! A panic of the executor under test, at the first of its diagnostics with a certain message. What listens to them takes the place
//! of the executor's own subscriber, so the executor has no code for it.

use std::fmt::Debug;
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The variable with the message.
pub const PANIC_AT: &str = "TEST_PANIC_AT";

/// Listens to the diagnostics of this process, if a test wants a panic.
pub fn listen() {
    if let Ok(message) = std::env::var(PANIC_AT) {
        let listener = Listener {
            message,
            has_panicked: AtomicBool::new(false),
        };
        tracing::subscriber::set_global_default(listener).unwrap();
    }
}

#[derive(Debug)]
struct Listener {
    message: String,
    has_panicked: AtomicBool,
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::INFO
    }

    fn event(&self, event: &Event<'_>) {
        let mut said = Said::default();
        event.record(&mut said);
        // A test that fails shows it.
        let _ = writeln!(io::stderr(), "{}{}", said.message, said.fields);
        let is_wanted = said.message == self.message;
        assert!(
            !is_wanted || self.has_panicked.swap(true, Ordering::SeqCst),
            "a test wants it"
        );
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// One of the diagnostics.
#[derive(Debug, Default)]
struct Said {
    message: String,
    fields: String,
}

impl Visit for Said {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.message = text;
        } else {
            self.fields.extend([" ", field.name(), "=", text.as_str()]);
        }
    }
}
