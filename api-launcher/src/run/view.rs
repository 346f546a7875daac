//! How a run is shown: every event goes through here, to a terminal, to plain text, or to lines of JSON.

mod status_line;
mod summary;
mod text;

use std::time::SystemTime;

use self::text::Text;
use super::args::OutputArgs;
use super::event::{Event, Line};
use crate::terminal::Terminal;
use crate::terminal::options::Format;
use crate::terminal::sink::Sink;
use crate::terminal::text::plain;

/// Shows events.
#[derive(Debug)]
pub(crate) struct View {
    kind: Kind,
    verbose: bool,
    job_id: Option<String>,
    step_id: Option<String>,
}

#[derive(Debug)]
enum Kind {
    Json(Sink),
    Text(Box<Text>),
}

impl View {
    /// The view the options ask for.
    pub(crate) fn new(output: &OutputArgs, terminal: Terminal) -> Self {
        let kind = match output.format {
            Format::Json => Kind::Json(Sink::stdout()),
            Format::Text => Kind::Text(Box::new(Text::new(terminal, output.verbose))),
        };
        Self {
            kind,
            verbose: output.verbose,
            job_id: None,
            step_id: None,
        }
    }

    /// Events from now on are of this job.
    pub(crate) fn enter_job(&mut self, job_id: &str) {
        self.job_id = Some(job_id.to_owned());
    }

    /// Events from now on are of this step, or of none.
    pub(crate) fn enter_step(&mut self, step_id: Option<&str>) {
        self.step_id = step_id.map(str::to_owned);
    }

    /// Shows one event.
    pub(crate) fn show(&mut self, event: Event) {
        self.show_all(vec![event]);
    }

    /// Shows events in one go, which costs one redraw and one write.
    pub(crate) fn show_all(&mut self, events: Vec<Event>) {
        let events = events
            .into_iter()
            .filter(|event| self.verbose || !is_chatter(event));
        match &mut self.kind {
            Kind::Json(sink) => {
                let mut lines = String::new();
                for event in events {
                    let event = without_escapes(event);
                    let (job, step) = (self.job_id.as_deref(), self.step_id.as_deref());
                    lines += &Line::new(&event, SystemTime::now(), job, step).to_json();
                    lines.push('\n');
                }
                sink.show(&lines);
            }
            Kind::Text(text) => text.show(events),
        }
    }

    /// Puts a question where it is seen, with the cursor behind it.
    pub(crate) fn ask(&mut self, question: &str) {
        if let Kind::Text(text) = &mut self.kind {
            text.ask(question);
        }
    }
}

const fn is_chatter(event: &Event) -> bool {
    use super::event::Level;
    matches!(
        event,
        Event::Diagnostic {
            level: Level::Info | Level::Debug,
            ..
        }
    )
}

fn without_escapes(event: Event) -> Event {
    match event {
        Event::Log { line } => Event::Log { line: plain(&line) },
        other => other,
    }
}
