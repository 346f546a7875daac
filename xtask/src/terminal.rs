//! Talking to the person who called: what is run, how long it took.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

#[expect(clippy::print_stdout, reason = "the one place that writes to stdout")]
pub(crate) fn say(text: &str) {
    println!("{text}");
}

#[expect(clippy::print_stderr, reason = "the one place that writes to stderr")]
pub(crate) fn complain(text: &str) {
    eprintln!("{text}");
}

/// Runs a command with its output in view, and fails with its text when it does.
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

/// The command as someone could type it.
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
    use super::*;

    #[test]
    fn a_command_line_can_be_pasted() {
        let mut command = Command::new("cargo");
        command.args(["test", "--", "it's one"]);
        assert_eq!(command_line(&command), r"cargo test -- 'it'\''s one'");
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
