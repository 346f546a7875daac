//! How a run is shown: every event goes through here, to a terminal, to plain text, or to lines of JSON.

mod sink;
mod status_line;
mod summary;
mod text;

use std::io::{self, IsTerminal as _};
use std::time::SystemTime;

use self::sink::Sink;
pub(crate) use self::summary::duration;
pub(crate) use self::text::Paint;
use self::text::Text;
use super::args::{Format, OutputArgs, When};
use super::event::{Event, Line};

/// Whether somebody can be asked, and how things are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terminal {
    /// Standard input is a terminal.
    pub(crate) stdin: bool,
    /// Standard output is a terminal.
    pub(crate) stdout: bool,
    /// Standard error is a terminal.
    pub(crate) stderr: bool,
    /// Colours and cursor movement are understood and wanted.
    pub(crate) capable: bool,
    /// Colours are wanted, `capable` or not.
    pub(crate) color: bool,
}

impl Terminal {
    /// Looks at the three standard streams and the conventions about colours.
    pub(crate) fn detect(output: &OutputArgs) -> Self {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let stdout = io::stdout().is_terminal();
        let capable = stdout && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let color = match output.color {
            _ if output.format == Format::Json => false,
            When::Always => true,
            When::Never => false,
            When::Auto if set("NO_COLOR") => false,
            When::Auto if std::env::var("CLICOLOR_FORCE").is_ok_and(|value| value != "0") => true,
            When::Auto => capable && std::env::var("CLICOLOR").as_deref() != Ok("0"),
        };
        Self {
            stdin: io::stdin().is_terminal(),
            stdout,
            stderr: io::stderr().is_terminal(),
            capable,
            color,
        }
    }

    /// Whether a question would be seen and could be answered.
    pub(crate) const fn can_ask(self, format: Format) -> bool {
        matches!(format, Format::Text) && self.stdin && (self.stdout || self.stderr)
    }
}

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
                sink.write(&lines);
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

/// A line without colours, cursor movement and carriage returns.
pub(crate) fn plain(line: &str) -> String {
    if line.bytes().any(|byte| byte < b' ' && byte != b'\t') {
        console::strip_ansi_codes(line)
            .chars()
            .filter(|c| *c == '\t' || !c.is_control())
            .collect()
    } else {
        line.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_lines_hold_no_control_characters() {
        assert_eq!(plain("\u{1b}[32;40;1mok\u{1b}[0m\r"), "ok");
        assert_eq!(plain("a\tb \u{e9}"), "a\tb \u{e9}");
        assert_eq!(plain("\u{1b}]0;title\u{7}x\u{8}"), "x");
    }

    #[test]
    fn nobody_is_asked_without_a_terminal_or_in_json() {
        let terminal = Terminal {
            stdin: true,
            stdout: false,
            stderr: true,
            capable: false,
            color: false,
        };
        assert!(terminal.can_ask(Format::Text));
        assert!(!terminal.can_ask(Format::Json));
        assert!(
            !Terminal {
                stdin: false,
                ..terminal
            }
            .can_ask(Format::Text)
        );
        assert!(
            !Terminal {
                stderr: false,
                ..terminal
            }
            .can_ask(Format::Text)
        );
    }
}
