//! What the commands need to write for people: the terminal, its colours, tables and texts.

pub mod options;
pub(crate) mod paint;
pub(crate) mod sink;
#[cfg(feature = "kubernetes")]
pub(crate) mod table;
pub(crate) mod text;

use std::io::{self, IsTerminal as _};

use self::options::{Format, When};

/// Whether a person can be asked, and how output is shown.
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
    pub(crate) fn detect(format: Format, color: When) -> Self {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let stdout = io::stdout().is_terminal();
        let capable = stdout && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let color = match color {
            _ if format == Format::Json => false,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_no_question_without_a_terminal_or_in_json() {
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
