//! Events as text for people: lines as they come, a live line on a terminal, and the closing summary.

use job_contract::progress::Phase;

use super::super::event::{Event, Level};
use super::status_line::StatusLine;
use super::summary::{self, Summary};
use crate::document::STDIN;
use crate::terminal::Terminal;
use crate::terminal::paint::Paint;
use crate::terminal::sink::Sink;
use crate::terminal::text::{duration, shown};

/// Phases that succeed within this time are not worth a line of their own.
const NOTEWORTHY_MS: u64 = 50;

#[derive(Debug)]
pub(super) struct Text {
    terminal: Terminal,
    verbose: bool,
    out: Sink,
    err: Sink,
    status: StatusLine,
    step: &'static str,
    summary: Summary,
    paint: Paint,
}

/// Text for the two streams, in the order it arose.
#[derive(Default)]
struct Pending(Vec<(bool, String)>);

impl Pending {
    fn push(&mut self, to_stderr: bool, line: &str) {
        match self.0.last_mut() {
            Some((stream, text)) if *stream == to_stderr => {
                text.push_str(line);
                text.push('\n');
            }
            _ => self.0.push((to_stderr, format!("{line}\n"))),
        }
    }
}

impl Text {
    pub(super) fn new(terminal: Terminal, verbose: bool) -> Self {
        // The live line is the one thing whose styles are chosen by the library; follow what was decided.
        console::set_colors_enabled(terminal.color);
        Self {
            terminal,
            verbose,
            out: Sink::stdout(),
            err: Sink::stderr(),
            status: StatusLine::new(terminal.color),
            step: "",
            summary: Summary::default(),
            paint: Paint { on: terminal.color },
        }
    }

    pub(super) fn show(&mut self, events: impl Iterator<Item = Event>) {
        let mut pending = Pending::default();
        for event in events {
            self.summary.note(&event);
            if matches!(event, Event::RunFinished(_)) {
                self.flush(std::mem::take(&mut pending));
                self.status.clear();
            }
            self.render(&event, &mut pending);
        }
        self.flush(pending);
    }

    fn flush(&mut self, pending: Pending) {
        if pending.0.is_empty() {
            return;
        }
        let (out, err) = (&mut self.out, &mut self.err);
        self.status.around(|| {
            for (to_stderr, text) in pending.0 {
                if to_stderr {
                    err.show(&text);
                } else {
                    out.show(&text);
                }
            }
        });
    }

    fn render(&mut self, event: &Event, pending: &mut Pending) {
        let paint = self.paint;
        match event {
            Event::RunStarted {
                source,
                tool,
                tool_version,
                ..
            } => {
                let tool = match tool_version.as_str() {
                    "" | "*" => (*tool).to_owned(),
                    range => format!("{tool} {range}"),
                };
                let source = match source.as_str() {
                    STDIN => "a job document from standard input",
                    source => source,
                };
                pending.push(false, &paint.bold(&format!("Running {source} with {tool}")));
            }
            Event::StepStarted { step_type } => {
                self.step = summary::step_word(step_type);
                self.wait_for(format!("{}: starting the executor", self.step));
            }
            Event::PhaseStarted { phase } => self.wait_for(self.phase_title(*phase)),
            Event::PhaseFinished {
                phase,
                duration_ms,
                ok,
            } => {
                if self.verbose || !ok || *duration_ms >= NOTEWORTHY_MS {
                    pending.push(false, &self.finished_phase(*phase, *duration_ms, *ok));
                }
                self.wait_for(self.step.to_owned());
            }
            Event::Log { line } => pending.push(false, &shown(line, paint)),
            Event::Diagnostic { level, message } => {
                pending.push(true, &diagnostic_line(paint, *level, message));
            }
            Event::StepFinished(_) => self.status.clear(),
            Event::Outputs { .. } => {}
            Event::RunFinished(_) => {
                let failed = self.summary.failed();
                for line in summary::render(&self.summary, paint).lines() {
                    // With the standard output redirected, stderr still shows why it failed.
                    pending.push(failed, line);
                }
            }
        }
    }

    fn wait_for(&mut self, what: String) {
        if self.terminal.capable {
            self.status.start(what);
        }
    }

    fn phase_title(&self, phase: Phase) -> String {
        if self.step == phase.label() {
            self.step.to_owned()
        } else {
            format!("{}: {phase}", self.step)
        }
    }

    fn finished_phase(&self, phase: Phase, duration_ms: u64, ok: bool) -> String {
        let (mark, word) = if ok {
            (self.paint.green("\u{2713}"), "")
        } else {
            (self.paint.red("\u{2717}"), " failed after")
        };
        let time = duration(duration_ms);
        format!(
            "{mark} {}{word} {}",
            self.phase_title(phase),
            self.paint.dim(&time)
        )
    }

    pub(super) fn ask(&mut self, question: &str) {
        self.status.clear();
        let question = format!("\n{} ", self.paint.bold(question));
        if self.terminal.stdout {
            self.out.show(&question);
        } else {
            self.err.show(&question);
        }
    }
}

fn diagnostic_line(paint: Paint, level: Level, message: &str) -> String {
    match level {
        Level::Error => format!("{} {message}", paint.red("error:")),
        Level::Warn => format!("{} {message}", paint.yellow("warning:")),
        Level::Info => paint.dim(message),
        Level::Debug => paint.dim(&format!("debug: {message}")),
        Level::Output => message.to_owned(),
    }
}
