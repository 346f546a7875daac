//! Standard output and standard error, whose reader may leave before the end.

use std::io::{self, Write};

use job_contract::Exit;

/// Writes until the reader is gone, then no more: `| head` must neither fail a run nor interrupt an apply.
pub(crate) struct Sink {
    out: Box<dyn Write>,
    open: bool,
}

impl std::fmt::Debug for Sink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sink")
            .field("open", &self.open)
            .finish_non_exhaustive()
    }
}

impl Sink {
    pub(crate) fn stdout() -> Self {
        Self::new(Box::new(io::stdout()))
    }

    pub(crate) fn stderr() -> Self {
        Self::new(Box::new(io::stderr()))
    }

    pub(crate) fn new(out: Box<dyn Write>) -> Self {
        Self { out, open: true }
    }

    /// Whether there still is a reader.
    #[cfg(feature = "kubernetes")]
    pub(crate) const fn is_open(&self) -> bool {
        self.open
    }

    /// Writes a text, or nothing if an earlier one could not be written. A reader that stopped early is no error.
    pub(crate) fn write(&mut self, text: &[u8]) -> io::Result<()> {
        if !self.open || text.is_empty() {
            return Ok(());
        }
        let written = self.out.write_all(text).and_then(|()| self.out.flush());
        self.open = written.is_ok();
        written.or_else(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Ok(()),
            _ => Err(error),
        })
    }

    /// Writes a text, and says on standard error if it could not.
    pub(crate) fn show(&mut self, text: &str) {
        if let Err(error) = self.write(text.as_bytes()) {
            // If that stream is gone too, the exit code still tells.
            let _ = writeln!(io::stderr(), "warning: could not write output: {error}");
        }
    }
}

/// Prints a whole text to standard output.
pub(crate) fn print(text: &[u8]) -> Exit {
    match Sink::stdout().write(text) {
        Ok(()) => Exit::Done,
        Err(error) => {
            // Where the terminal is gone, the exit code still tells.
            let _ = writeln!(
                io::stderr(),
                "error: could not write to standard output: {error}"
            );
            Exit::Infrastructure
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    /// Ends like this, and counts the attempts.
    struct Ends(io::ErrorKind, Rc<Cell<u32>>);

    impl Write for Ends {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            self.1.set(self.1.get() + 1);
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn nothing_is_written_after_the_first_failure_and_a_reader_may_leave() {
        for (kind, is_lost) in [
            (io::ErrorKind::BrokenPipe, false),
            (io::ErrorKind::StorageFull, true),
        ] {
            let attempts = Rc::new(Cell::new(0));
            let mut sink = Sink::new(Box::new(Ends(kind, Rc::clone(&attempts))));
            assert_eq!(sink.write(b"a\n").is_err(), is_lost, "{kind}");
            sink.write(b"b\n").unwrap();
            assert_eq!(attempts.get(), 1);
        }
    }
}
