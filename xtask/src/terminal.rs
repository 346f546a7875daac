//! Prints the commands that run, and how long they take.

use std::io;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

#[expect(
    clippy::print_stdout,
    reason = "the only function that writes to stdout"
)]
pub(crate) fn say(text: &str) {
    println!("{text}");
}

#[expect(
    clippy::print_stderr,
    reason = "the only function that writes to stderr"
)]
pub(crate) fn complain(text: &str) {
    eprintln!("{text}");
}

/// Runs a command and shows its output. The error has the command line.
pub(crate) fn run_stage(name: &str, command: &mut Command) -> Result<()> {
    let line = command_line(command);
    say(&format!("\n==> {name}: {line}"));
    let started = Instant::now();
    let status = command
        .status()
        .with_context(|| format!("could not start `{line}`"))?;
    let seconds = started.elapsed().as_secs_f64();
    if !status.success() {
        bail!("`{line}` failed ({status}) after {seconds:.1} s");
    }
    complain(&format!("==> {name}: {seconds:.1} s"));
    Ok(())
}

/// The pauses before a failed download is repeated.
pub(crate) const PAUSES: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(30)];

/// Repeats an attempt that needs a server, because a failed server may answer a little later. A missing program or file is
/// not retried.
pub(crate) fn with_retries(pauses: &[Duration], attempt: impl Fn() -> Result<()>) -> Result<()> {
    for pause in pauses {
        let Err(error) = attempt() else { return Ok(()) };
        if is_absence(&error) {
            return Err(error);
        }
        complain(&format!("{error:#}; retrying in {} s", pause.as_secs()));
        thread::sleep(*pause);
    }
    attempt()
}

fn is_absence(error: &anyhow::Error) -> bool {
    let mut causes = error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| cause.kind() == io::ErrorKind::NotFound)
}

/// The command as a line for a shell.
pub(crate) fn command_line(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|part| {
            let part = part.to_string_lossy();
            if part.contains([' ', '"', '\'', '$', '&', '(', ')', '*']) {
                format!("'{}'", part.replace('\'', r"'\''"))
            } else {
                part.into_owned()
            }
        })
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use anyhow::ensure;

    use super::*;

    #[test]
    fn a_command_line_can_be_pasted() {
        let mut command = Command::new("cargo");
        command.args(["test", "--", "it's one"]);
        assert_eq!(command_line(&command), r"cargo test -- 'it'\''s one'");
    }

    #[test]
    fn what_fails_is_tried_again_and_in_the_end_fails() {
        let pauses = [Duration::ZERO; 2];
        for (failures, works) in [(0, true), (2, true), (3, false)] {
            let tried = Cell::new(0);
            let attempt = || {
                tried.set(tried.get() + 1);
                ensure!(tried.get() > failures, "no answer");
                Ok(())
            };
            assert_eq!(with_retries(&pauses, attempt).is_ok(), works, "{failures}");
            assert_eq!(tried.get(), 3.min(failures + 1));
        }
    }

    #[test]
    fn a_program_that_is_not_there_is_not_waited_for() {
        let tried = Cell::new(0);
        let attempt = || {
            tried.set(tried.get() + 1);
            run_stage("no", &mut Command::new("/nonexistent/program"))
        };
        let error = with_retries(&[Duration::from_hours(1)], attempt).unwrap_err();
        assert_eq!(tried.get(), 1);
        assert!(
            error.to_string().contains("/nonexistent/program"),
            "{error}"
        );
    }

    #[test]
    fn a_failing_stage_names_its_command() {
        let error = run_stage("no", Command::new("bash").args(["-c", "exit 3"])).unwrap_err();
        assert!(
            error.to_string().contains("`bash -c 'exit 3'` failed"),
            "{error}"
        );
    }
}
