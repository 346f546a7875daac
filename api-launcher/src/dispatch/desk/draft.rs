//! The output of a step that its executor did not finish: what is stored, what the latest attempt said, and the verdict.
//! In files alone, whatever their size.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

/// By so much of its beginning a log is found again.
const BEGINNING: u64 = 512;

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

/// Puts the log `whole` in the place of what `output` has of it, if that is less. What stands before it stays.
pub(super) fn restore(output: &Path, whole: &Path) -> io::Result<()> {
    let mut output = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(output)?;
    let mut whole = File::open(whole)?;
    let mut beginning = Vec::new();
    (&whole).take(BEGINNING).read_to_end(&mut beginning)?;
    let kept = place_of(&mut output, &beginning)?;
    let stored = output.metadata()?.len() - kept;
    if whole.metadata()?.len() <= stored {
        return Ok(());
    }
    output.set_len(kept)?;
    end_line(&mut output)?;
    output.seek(SeekFrom::End(0))?;
    whole.seek(SeekFrom::Start(0))?;
    io::copy(&mut whole, &mut output).map(drop)
}

/// Where in `output` a log with this beginning begins: the last time it is there whole, or else the first time
/// `output` ends in the midst of it; the end if it is not there.
fn place_of(output: &mut File, beginning: &[u8]) -> io::Result<u64> {
    let first = beginning.split_inclusive(|byte| *byte == b'\n').next();
    let first = first.unwrap_or_default();
    let mut starts = Vec::new();
    let (mut at, mut line) = (0, Vec::new());
    output.seek(SeekFrom::Start(0))?;
    let mut reader = BufReader::new(&*output);
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line)?;
        if read == 0 {
            break;
        }
        if line.starts_with(first) || first.starts_with(&line) {
            starts.push(at);
        }
        at += read as u64;
    }
    let mut cut = None;
    let mut found = None;
    for start in starts {
        let mut there = Vec::new();
        output.seek(SeekFrom::Start(start))?;
        (&*output)
            .take(beginning.len() as u64)
            .read_to_end(&mut there)?;
        if there == beginning {
            found = Some(start);
        } else if beginning.starts_with(&there) {
            cut = cut.or(Some(start));
        }
    }
    Ok(found.or(cut).unwrap_or(at))
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

    #[rstest]
    #[case::nothing_is_stored(None, "a\nb\n", "a\nb\n")]
    #[case::reasons_for_waiting_stay(Some("it waits\n"), "a\nb\n", "it waits\na\nb\n")]
    #[case::the_end_is_missing(Some("it waits\na\n"), "a\nb\n", "it waits\na\nb\n")]
    #[case::a_line_is_cut(
        Some("it waits\na lon"),
        "a long line\nb\n",
        "it waits\na long line\nb\n"
    )]
    #[case::all_of_it_is_there(Some("it waits\na\nb\nlost\n"), "a\nb\n", "it waits\na\nb\nlost\n")]
    #[case::lines_that_come_again(Some("--\na\n--\n"), "--\na\n--\nb\n", "--\na\n--\nb\n")]
    #[case::the_container_has_only_the_end(Some("a\nb\nc\n"), "b\nc\nd\n", "a\nb\nc\nd\n")]
    fn what_a_container_still_has_takes_the_place_of_what_arrived(
        #[case] stored: Option<&str>,
        #[case] container: &str,
        #[case] expected: &str,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (output, log) = (folder.path().join("output"), folder.path().join("log"));
        fs::write(&log, container).unwrap();
        if let Some(text) = stored {
            fs::write(&output, text).unwrap();
        }
        for _ in 0..2 {
            restore(&output, &log).unwrap();
            assert_eq!(fs::read_to_string(&output).unwrap(), expected);
        }
    }

    /// As when lines in the midst were lost for want of room on a disk.
    #[test]
    fn a_log_with_a_gap_is_replaced_and_an_earlier_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (output, log) = (folder.path().join("output"), folder.path().join("log"));
        let lines = |range: std::ops::Range<u32>| {
            let lines = range.map(|number| format!("line {number} of many\n"));
            lines.collect::<Vec<_>>().concat()
        };
        let earlier = lines(0..200);
        fs::write(
            &output,
            format!("{earlier}{}{}", lines(0..100), lines(150..200)),
        )
        .unwrap();
        fs::write(&log, lines(0..200)).unwrap();
        restore(&output, &log).unwrap();
        let expected = format!("{earlier}{}", lines(0..200));
        assert_eq!(fs::read_to_string(&output).unwrap(), expected);
    }
}
