//! The one question a run asks.

use std::io;

use nix::sys::signal::Signal;
use tokio::sync::oneshot;

use super::signals::Signals;
use super::view::View;

/// The answer to a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Yes,
    No,
    /// The question was interrupted.
    Signal(Signal),
}

/// Asks, and waits for a line or a signal.
pub(crate) async fn ask(view: &mut View, signals: &mut Signals, question: &str) -> Answer {
    view.ask(question);
    let (send, line) = oneshot::channel();
    // A thread of its own, never waited for: a read from a terminal cannot be called off, and must not keep
    // the process alive.
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = io::stdin().read_line(&mut line);
        let _ = send.send(read.map(|_| line));
    });
    tokio::select! {
        line = line => match line {
            Ok(Ok(line)) if is_yes(&line) => Answer::Yes,
            _ => Answer::No,
        },
        signal = signals.next() => Answer::Signal(signal),
    }
}

/// Only a clear yes applies anything.
fn is_yes(line: &str) -> bool {
    matches!(line.trim().to_ascii_lowercase().as_str(), "y" | "yes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clear_yes_counts() {
        for yes in ["y\n", "yes", " Yes \r\n"] {
            assert!(is_yes(yes), "{yes:?}");
        }
        for no in ["", "\n", "n", "no", "yep", "y e s", "true"] {
            assert!(!is_yes(no), "{no:?}");
        }
    }
}
