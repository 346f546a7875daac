//! The output of a step that its executor did not finish: what is stored, what the latest attempt said, and the verdict.
//! In files alone, whatever their size.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

/// Adds to `output` what it lacks of the log `latest`, and a line. One that ends with the line is complete: whoever tells
/// of a verdict tries again when the platform does not answer.
pub(super) fn complete(output: &Path, latest: &Path, line: &str) -> io::Result<()> {
    let mut output = File::options()
        .read(true)
        .append(true)
        .create(true)
        .open(output)?;
    if ends_with(&mut output, line)? {
        return Ok(());
    }
    match File::open(latest) {
        Ok(mut latest) => {
            let known = overlap(&mut output, &mut latest)?;
            let added = latest.metadata()?.len() > known;
            if added {
                end_line(&mut output)?;
                latest.seek(SeekFrom::Start(known))?;
                io::copy(&mut latest, &mut output)?;
            }
        }
        // What cannot be read any more is missing, and the reason says why it may be.
        Err(error) => tracing::warn!(%error, "the log of a lost run could not be read"),
    }
    end_line(&mut output)?;
    writeln!(output, "{line}")
}

fn ends_with(file: &mut File, line: &str) -> io::Result<bool> {
    let wanted = format!("{line}\n");
    let length = file.metadata()?.len();
    let Some(start) = length.checked_sub(wanted.len() as u64) else {
        return Ok(false);
    };
    file.seek(SeekFrom::Start(start))?;
    let mut end = vec![0; wanted.len()];
    file.read_exact(&mut end)?;
    if end != wanted.as_bytes() {
        return Ok(false);
    }
    // The whole line, and not the end of another.
    if start == 0 {
        return Ok(true);
    }
    file.seek(SeekFrom::Start(start - 1))?;
    let mut before = [0];
    file.read_exact(&mut before)?;
    Ok(before == *b"\n")
}

/// How much of the beginning of `latest` is the end of `output`: all of it when its executor stored it and died after
/// that, and all that is stored when an earlier attempt wrote to the same live log.
fn overlap(output: &mut File, latest: &mut File) -> io::Result<u64> {
    let stored = output.metadata()?.len();
    let length = stored.min(latest.metadata()?.len());
    output.seek(SeekFrom::Start(stored - length))?;
    let same = same(
        BufReader::new(output.take(length)),
        BufReader::new(latest.take(length)),
    )?;
    Ok(if same { length } else { 0 })
}

fn same(one: impl BufRead, other: impl BufRead) -> io::Result<bool> {
    for (one, other) in one.bytes().zip(other.bytes()) {
        if one? != other? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn end_line(file: &mut File) -> io::Result<()> {
    let mut last = [b'\n'];
    if file.metadata()?.len() > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    if last != *b"\n" {
        file.write_all(b"\n")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::fs;

    #[rstest]
    #[case::nothing_is_stored(None, Some("a\nb\n"), "a\nb\nlost\n")]
    #[case::an_earlier_attempt_stored_its_log(Some("one"), Some("two\n"), "one\ntwo\nlost\n")]
    #[case::this_attempt_stored_its_log(Some("waits\ntwo\n"), Some("two\n"), "waits\ntwo\nlost\n")]
    #[case::both_wrote_one_live_log(Some("one\n"), Some("one\ntwo\n"), "one\ntwo\nlost\n")]
    #[case::the_verdict_is_there(Some("one\nlost\n"), Some("one\ntwo\n"), "one\nlost\n")]
    #[case::another_line_ends_alike(Some("not lost\n"), None, "not lost\nlost\n")]
    fn an_output_has_every_attempt_and_the_verdict_once(
        #[case] stored: Option<&str>,
        #[case] latest: Option<&str>,
        #[case] expected: &str,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (output, log) = (folder.path().join("output"), folder.path().join("log"));
        for (path, text) in [(&output, stored), (&log, latest)] {
            if let Some(text) = text {
                fs::write(path, text).unwrap();
            }
        }
        complete(&output, &log, "lost").unwrap();
        assert_eq!(fs::read_to_string(&output).unwrap(), expected);
        complete(&output, &log, "lost").unwrap();
        assert_eq!(fs::read_to_string(&output).unwrap(), expected);
    }
}
