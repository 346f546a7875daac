//! Where the commands write: tables or JSON on standard output, notes and errors on standard error.

use std::fmt;
use std::io::{self, IsTerminal as _, Write};

use clap::Args;
use job_contract::{Exit, chain};
use serde::Serialize;

use crate::failure::Failure;
use crate::terminal::Terminal;
use crate::terminal::options::{COLOR_HELP, Format, When};
use crate::terminal::paint::Paint;
use crate::terminal::sink::Sink;

/// How answers are shown.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Display")]
pub struct ShowArgs {
    /// Tables for people, or JSON for programs (docs/commands.md)
    #[arg(
        short = 'o',
        long = "output",
        value_enum,
        value_name = "FORMAT",
        default_value_t
    )]
    pub format: Format,
    /// When to use colours
    #[arg(long, value_enum, value_name = "WHEN", default_value_t, help = COLOR_HELP)]
    pub color: When,
}

/// The two streams.
pub(super) struct Output {
    out: Sink,
    err: Box<dyn Write>,
    /// Why standard output could not be written. A reader that closed it is no error.
    lost: Option<io::Error>,
    pub(super) json: bool,
    pub(super) paint: Paint,
    /// Columns of the terminal. `None`: there is no terminal.
    pub(super) width: Option<usize>,
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Output")
            .field("json", &self.json)
            .finish_non_exhaustive()
    }
}

impl Output {
    pub(super) fn new(show: &ShowArgs) -> Self {
        let terminal = Terminal::detect(show.format, show.color);
        Self {
            out: Sink::stdout(),
            err: Box::new(io::stderr()),
            lost: None,
            json: show.format == Format::Json,
            paint: Paint { on: terminal.color },
            width: io::stdout()
                .is_terminal()
                .then(|| usize::from(console::Term::stdout().size().1)),
        }
    }

    /// Returns whether standard output still has a reader.
    pub(super) const fn is_open(&self) -> bool {
        self.out.is_open()
    }

    pub(super) fn print(&mut self, text: &str) {
        if let Err(error) = self.out.write(text.as_bytes()) {
            self.lost = Some(error);
        }
    }

    /// Returns an error if a part of the output could not be written.
    pub(super) fn written(&mut self) -> Result<(), Failure> {
        let text = "could not write to standard output";
        let lost = self.lost.take();
        lost.map_or(Ok(()), |error| {
            Err(Failure::new(Exit::Infrastructure, text).because(error))
        })
    }

    /// Prints the whole answer of a command as JSON.
    pub(super) fn print_json<T: Serialize>(&mut self, value: &T) -> Result<(), Failure> {
        self.print_text(serde_json::to_string_pretty(value))
    }

    /// Prints one of several answers as a JSON line.
    pub(super) fn print_json_line<T: Serialize>(&mut self, value: &T) -> Result<(), Failure> {
        self.print_text(serde_json::to_string(value))
    }

    /// Prints what a serialiser has made.
    pub(super) fn print_text<E>(&mut self, text: Result<String, E>) -> Result<(), Failure>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let text = text.map_err(|error| {
            Failure::new(Exit::Defect, "could not write the answer").because(error)
        })?;
        self.print(&(text.trim_end_matches('\n').to_owned() + "\n"));
        Ok(())
    }

    /// Prints a note for people on standard error, so that a pipe does not get it.
    pub(super) fn note(&mut self, text: &str) {
        // If standard error is closed too, the exit code still shows the failure.
        let _ = writeln!(self.err, "{text}");
    }

    pub(super) fn warn(&mut self, text: &str) {
        self.note(&format!("warning: {text}"));
    }

    pub(super) fn fail(&mut self, failure: &Failure) {
        let paint = Paint {
            on: self.paint.on && io::stderr().is_terminal(),
        };
        for fact in facts(failure) {
            self.note(&format!("{} {fact}", paint.red("error:")));
        }
        if let Some(hint) = failure.hint {
            self.note(&format!("{} {hint}", paint.dim("hint:")));
        }
    }
}

/// The lines of a failure, or one text with all causes.
fn facts(failure: &Failure) -> Vec<String> {
    match std::error::Error::source(failure) {
        Some(_) => vec![chain(failure)],
        None => failure.to_string().lines().map(str::to_owned).collect(),
    }
}

#[cfg(test)]
pub(super) mod captured {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// What was written, for tests.
    #[derive(Clone, Debug, Default)]
    pub(in crate::kubernetes::commands) struct Captured(Arc<Mutex<Vec<u8>>>);

    impl Captured {
        pub(in crate::kubernetes::commands) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// An output, and what is written to its two streams.
    pub(in crate::kubernetes::commands) fn output(json: bool) -> (Output, Captured, Captured) {
        let (out, err) = (Captured::default(), Captured::default());
        let output = Output {
            out: Sink::new(Box::new(out.clone())),
            err: Box::new(err.clone()),
            lost: None,
            json,
            paint: Paint { on: false },
            width: None,
        };
        (output, out, err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Standard output that ends like this.
    #[derive(Debug)]
    struct Ends(io::ErrorKind);

    impl Write for Ends {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_answer_is_lost_on_a_full_disk_and_not_on_a_reader_who_has_had_enough() {
        let (mut output, ..) = captured::output(false);
        output.out = Sink::new(Box::new(Ends(io::ErrorKind::StorageFull)));
        output.print("a");
        assert!(!output.is_open());
        assert!(output.written().is_err());

        let (mut output, ..) = captured::output(false);
        output.out = Sink::new(Box::new(Ends(io::ErrorKind::BrokenPipe)));
        output.print("a");
        assert!(!output.is_open() && output.written().is_ok());
    }
}
