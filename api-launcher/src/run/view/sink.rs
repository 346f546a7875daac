//! Standard output, whose reader may leave before the run ends.

use std::io::{self, Write};

/// Writes until the reader is gone, then no more: `| head` must neither fail a run nor interrupt an apply.
pub(super) struct Sink {
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
    pub(super) fn stdout() -> Self {
        Self::new(Box::new(io::stdout()))
    }

    pub(super) fn stderr() -> Self {
        Self::new(Box::new(io::stderr()))
    }

    fn new(out: Box<dyn Write>) -> Self {
        Self { out, open: true }
    }

    pub(super) fn write(&mut self, text: &str) {
        if !self.open || text.is_empty() {
            return;
        }
        let written = self
            .out
            .write_all(text.as_bytes())
            .and_then(|()| self.out.flush());
        if let Err(error) = written {
            self.open = false;
            if error.kind() != io::ErrorKind::BrokenPipe {
                // The one stream left to say it on; if that is gone too, the exit code still tells.
                let _ = writeln!(io::stderr(), "warning: could not write output: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    #[test]
    fn nothing_is_written_after_the_reader_has_left() {
        struct Gone(Rc<Cell<u32>>);
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                self.0.set(self.0.get() + 1);
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let attempts = Rc::new(Cell::new(0));
        let mut sink = Sink::new(Box::new(Gone(Rc::clone(&attempts))));
        sink.write("a\n");
        sink.write("b\n");
        assert_eq!(attempts.get(), 1);
    }
}
