//! The output of a step that its executor did not finish: what is stored, what the latest attempt said, and the verdict.
//! In files alone, whatever their size.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use runtime::regular_file;

/// By so much of its beginning a log is found again.
const BEGINNING: usize = 512;
/// How many bytes are read ahead.
const AHEAD: usize = 64 * 1024;

/// Adds to `output` what it lacks of the log `latest`, and a line. One that ends with the line is complete: whoever tells
/// of a verdict tries again when the platform does not answer, perhaps in other words, as may another launcher at the
/// same time.
pub(super) fn complete(output: &Path, latest: &Path, line: &str) -> io::Result<()> {
    let Some(mut output) = unless_ended(output, line)? else {
        return Ok(());
    };
    match regular_file::open_unlinked(latest) {
        Ok(mut latest) => {
            let length = latest.metadata()?.len();
            let known = if is_within(&mut latest, &mut output)? {
                length
            } else {
                overlap(&mut output, &mut latest)?
            };
            let added = length > known;
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

/// Adds a line to `output`, unless it ends with it.
pub(super) fn add_line(output: &Path, line: &str) -> io::Result<()> {
    let Some(mut output) = unless_ended(output, line)? else {
        return Ok(());
    };
    end_line(&mut output)?;
    writeln!(output, "{line}")
}

/// Opens an output for additions, unless it ends with the line.
fn unless_ended(output: &Path, line: &str) -> io::Result<Option<File>> {
    let mut options = File::options();
    let mut output = options.read(true).append(true).create(true).open(output)?;
    Ok((!ends_with(&mut output, line)?).then_some(output))
}

/// Puts the log `whole` in the place of what `output` has of it, if that is less; that may be a later part alone, since a
/// Redis that forgot a live log goes on with it in the midst of a run. What stands before it stays. `line` is the
/// verdict: where `output` ends with it, or ended with another one, it stands behind the log, once.
pub(super) fn restore(output: &Path, whole: &Path, line: Option<&str>) -> io::Result<()> {
    let mut output = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(output)?;
    let told = match line {
        Some(line) => cut_line(&mut output, line)?,
        None => false,
    };
    let mut whole = regular_file::open_unlinked(whole)?;
    let beginning = beginning_of(&mut whole)?;
    let kept = if is_within(&mut output, &mut whole)? {
        0
    } else {
        place_of(&mut output, &beginning)?
    };
    let stored = output.metadata()?.len() - kept;
    let lacks = whole.metadata()?.len() > stored;
    if lacks {
        output.set_len(kept)?;
        end_line(&mut output)?;
        output.seek(SeekFrom::End(0))?;
        whole.seek(SeekFrom::Start(0))?;
        io::copy(&mut whole, &mut output)?;
    }
    match line {
        // What was cut off may have contained a verdict in other words.
        Some(line) if told || lacks => {
            end_line(&mut output)?;
            output.seek(SeekFrom::End(0))?;
            writeln!(output, "{line}")
        }
        _ => Ok(()),
    }
}

/// Takes the line from the end, if it is there.
fn cut_line(file: &mut File, line: &str) -> io::Result<bool> {
    let there = ends_with(file, line)?;
    if there {
        let length = file.metadata()?.len();
        file.set_len(length - line.len() as u64 - 1)?;
    }
    Ok(there)
}

fn beginning_of(file: &mut File) -> io::Result<Vec<u8>> {
    let mut beginning = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.take(BEGINNING as u64).read_to_end(&mut beginning)?;
    Ok(beginning)
}

/// Whether `whole` contains all of `part`, from the beginning of a line on.
fn is_within(part: &mut File, whole: &mut File) -> io::Result<bool> {
    let beginning = beginning_of(part)?;
    let at = place_of(whole, &beginning)?;
    let length = part.metadata()?.len();
    if at + length > whole.metadata()?.len() {
        return Ok(false);
    }
    part.seek(SeekFrom::Start(0))?;
    whole.seek(SeekFrom::Start(at))?;
    same(BufReader::new(part), BufReader::new(whole.take(length)))
}

/// Where in `output` a log with this beginning begins: the last time it is there whole, or else the first time
/// `output` ends in the midst of it; the end if it is not there.
fn place_of(output: &mut File, beginning: &[u8]) -> io::Result<u64> {
    let first = beginning.split_inclusive(|byte| *byte == b'\n').next();
    let first = first.unwrap_or_default();
    let mut there = vec![0; beginning.len()];
    let (mut cut, mut found) = (None, None);
    let (mut at, mut head) = (0, Vec::new());
    output.seek(SeekFrom::Start(0))?;
    let mut reader = BufReader::with_capacity(AHEAD, &*output);
    loop {
        let read = next_line(&mut reader, &mut head)?;
        if read == 0 {
            break;
        }
        let rest = beginning.strip_prefix(&head[..]);
        let rest =
            rest.filter(|rest| head.len() as u64 == read && rest.len() <= reader.buffer().len());
        if let Some(rest) = rest {
            // Each of millions of lines may begin like the log, so what is in memory is not read again.
            if reader.buffer().starts_with(rest) {
                found = Some(at);
            }
        } else if head.starts_with(first) || first.starts_with(&head) {
            let length = read_at(output, &mut there, at)?;
            let there = &there[..length];
            if there == beginning {
                found = Some(at);
            } else if beginning.starts_with(there) {
                cut = cut.or(Some(at));
            }
        }
        at += read;
    }
    Ok(found.or(cut).unwrap_or(at))
}

/// Reads past a line and returns its length; of its text only as much is kept as a beginning has.
fn next_line(reader: &mut impl BufRead, head: &mut Vec<u8>) -> io::Result<u64> {
    head.clear();
    let mut length = 0;
    loop {
        let ahead = reader.fill_buf()?;
        if ahead.is_empty() {
            return Ok(length);
        }
        let end = ahead.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(ahead.len(), |end| end + 1);
        let kept = taken.min(BEGINNING - head.len());
        head.extend_from_slice(&ahead[..kept]);
        reader.consume(taken);
        length += taken as u64;
        if end.is_some() {
            return Ok(length);
        }
    }
}

/// As many bytes from there as there are and fit. The file's own position stays.
fn read_at(file: &File, into: &mut [u8], at: u64) -> io::Result<usize> {
    let mut read = 0;
    while read < into.len() {
        match file.read_at(&mut into[read..], at + read as u64)? {
            0 => break,
            more => read += more,
        }
    }
    Ok(read)
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

/// How much of the beginning of `latest` is stored in `output` already. Two cases are told apart from nothing:
/// - `output` ends with the whole of `latest`: the executor stored it and died after that.
/// - `latest` begins with the whole of `output`: an earlier attempt wrote to the same live log.
fn overlap(output: &mut File, latest: &mut File) -> io::Result<u64> {
    let stored = output.metadata()?.len();
    let length = stored.min(latest.metadata()?.len());
    output.seek(SeekFrom::Start(stored - length))?;
    // The look at whole logs before this has moved it.
    latest.seek(SeekFrom::Start(0))?;
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

    /// Lines before it begin as the log does.
    #[rstest]
    #[case("a\nb\na\nc\na\nb\n", "a\nc\n", 4)]
    #[case("a\nb\na\nc\na\nb\n", "a\nb\n", 8)]
    #[case("a\nb\na\n", "a\nc\n", 4)]
    #[case("a\nb\na\n", "c\n", 6)]
    #[case(&("a\n".repeat(AHEAD) + "a\nc\n"), "a\na\nc\n", 2 * AHEAD as u64 - 2)]
    #[case(&("\n".repeat(2 * AHEAD - 1) + "c\n"), "\n\nc\n", 2 * AHEAD as u64 - 3)]
    fn a_log_is_where_all_of_its_beginning_is(
        #[case] output: &str,
        #[case] beginning: &str,
        #[case] place: u64,
    ) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(output.as_bytes()).unwrap();
        assert_eq!(place_of(&mut file, beginning.as_bytes()).unwrap(), place);
    }

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
        for _ in 0..2 {
            complete(&output, &log, "lost").unwrap();
            assert_eq!(fs::read_to_string(&output).unwrap(), expected);
        }
    }

    #[rstest]
    #[case::alone("one\ntwo\n")]
    #[case::behind_reasons_for_waiting("waits\none\ntwo\n")]
    #[case::cut_in_a_line("one\ntw")]
    fn a_stored_log_is_not_stored_again_with_another_text_of_the_verdict(#[case] printed: &str) {
        let folder = tempfile::tempdir().unwrap();
        let (output, log) = (folder.path().join("output"), folder.path().join("log"));
        fs::write(&log, printed.trim_start_matches("waits\n")).unwrap();
        fs::write(&output, printed).unwrap();
        for line in ["lost", "lost with its node"] {
            complete(&output, &log, line).unwrap();
        }
        let expected = format!("{}\nlost\nlost with its node\n", printed.trim_end());
        assert_eq!(fs::read_to_string(&output).unwrap(), expected);
    }

    /// Code of the run can put one in the place of its log.
    #[test]
    fn a_log_that_is_a_pipe_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let (output, log) = (folder.path().join("output"), folder.path().join("log"));
        nix::unistd::mkfifo(&log, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let (said, hear) = std::sync::mpsc::channel();
        let place = output.clone();
        std::thread::spawn(move || {
            let completed = complete(&place, &log, "lost").is_ok();
            said.send((completed, restore(&place, &log, None).is_err()))
        });
        let said = hear.recv_timeout(test_peers::wait::DEADLINE);
        assert_eq!(said, Ok((true, true)));
        assert_eq!(fs::read_to_string(&output).unwrap(), "lost\n");
    }

    /// Otherwise code of a run reads the secrets of another run, which the launcher has open in memory.
    #[test]
    fn a_log_that_is_a_link_to_an_open_file_is_not_copied() {
        let folder = tempfile::tempdir().unwrap();
        let (output, log) = (folder.path().join("output"), folder.path().join("log"));
        let mut secrets = runtime::memory_file::data("secrets").unwrap();
        secrets.write_all(b"secret").unwrap();
        let link = format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&secrets)
        );
        std::os::unix::fs::symlink(link, &log).unwrap();
        assert_eq!(fs::read(&log).unwrap(), b"secret");
        complete(&output, &log, "lost").unwrap();
        assert!(restore(&output, &log, None).is_err());
        assert_eq!(fs::read_to_string(&output).unwrap(), "lost\n");
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
    #[case::only_the_end_arrived(Some("c\nd\n"), "a\nb\nc\nd\n", "a\nb\nc\nd\n")]
    #[case::only_the_midst_arrived(Some("b\nc"), "a\nb\nc long\nd\n", "a\nb\nc long\nd\n")]
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
            restore(&output, &log, None).unwrap();
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
        restore(&output, &log, None).unwrap();
        let expected = format!("{earlier}{}", lines(0..200));
        assert_eq!(fs::read_to_string(&output).unwrap(), expected);
    }

    #[rstest]
    #[case::the_log_is_longer("a\nlost\n", "a\nb\nc\n", "a\nb\nc\nlost\n")]
    #[case::the_verdict_is_longer("a\nlost\n", "a\nb\n", "a\nb\nlost\n")]
    #[case::nothing_of_the_log_is_there("waits\nlost\n", "a\nb\n", "waits\na\nb\nlost\n")]
    #[case::a_line_is_cut("a\nb", "a\nb and c", "a\nb and c\nlost\n")]
    #[case::the_log_is_whole("a\nb\nlost\n", "a\nb\n", "a\nb\nlost\n")]
    #[case::the_log_is_whole_and_nobody_gave_a_verdict("a\nb\n", "a\nb\n", "a\nb\n")]
    fn the_verdict_stands_behind_a_log_that_was_put_in_place_later(
        #[case] stored: &str,
        #[case] container: &str,
        #[case] expected: &str,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (output, log) = (folder.path().join("output"), folder.path().join("log"));
        fs::write(&log, container).unwrap();
        fs::write(&output, stored).unwrap();
        for _ in 0..2 {
            restore(&output, &log, Some("lost")).unwrap();
            assert_eq!(fs::read_to_string(&output).unwrap(), expected);
        }
    }

    #[test]
    fn of_a_line_without_an_end_only_the_beginning_is_held() {
        let endless = "x".repeat(3 * BEGINNING);
        let mut reader = BufReader::with_capacity(100, endless.as_bytes());
        let mut held = Vec::new();
        let length = next_line(&mut reader, &mut held).unwrap();
        assert_eq!(
            (usize::try_from(length).unwrap(), held.len()),
            (endless.len(), BEGINNING)
        );
        // And such a line is found again.
        let folder = tempfile::tempdir().unwrap();
        let (output, log) = (folder.path().join("output"), folder.path().join("log"));
        fs::write(&output, format!("waits\n{endless}")).unwrap();
        fs::write(&log, format!("{endless}\nend\n")).unwrap();
        restore(&output, &log, None).unwrap();
        let expected = format!("waits\n{endless}\nend\n");
        assert_eq!(fs::read_to_string(&output).unwrap(), expected);
    }
}
