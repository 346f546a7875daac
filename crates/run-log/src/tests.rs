//! Tests the whole log path with real files, pipes and full disks.

mod shapes;

use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::{BufRead as _, BufReader, PipeReader, PipeWriter, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command as Process, Stdio};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};
use nix::sys::time::TimeValLike as _;
use tempfile::TempDir;
use test_peers::wait::{self, DEADLINE};

use super::*;

/// Longer than any of these tests takes, so that a hang fails.
const LONG: Duration = DEADLINE;
/// Longer than the runner lets any test take.
const NEVER: Duration = Duration::from_hours(1);
/// More than a pipe and all queues can hold.
const MANY_LINES: u64 = 60_000;

fn start(folder: &TempDir, max_spool_bytes: u64, sinks: Vec<Box<dyn Sink>>) -> RunLog {
    let spool = Spool::create(folder.path(), max_spool_bytes).unwrap();
    RunLog::start_over(spool, 1024 * 1024, Redactor::new(["hunter22"]), sinks).unwrap()
}

fn file_sink(folder: &TempDir, name: &str) -> Box<dyn Sink> {
    Box::new(FileSink::new(folder.path().join(name)))
}

fn pipe_sink() -> (PipeReader, Box<dyn Sink>) {
    let (reader, writer) = io::pipe().unwrap();
    (reader, sink_over(writer))
}

fn sink_over(writer: PipeWriter) -> Box<dyn Sink> {
    Box::new(StdoutSink::over(writer.into()))
}

/// Reads a pipe to its end, in the background.
fn drain(mut reader: PipeReader) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        text
    })
}

fn numbered_lines(count: u64) -> String {
    let mut text = String::new();
    for number in 0..count {
        let _ = writeln!(
            text,
            "line {number} with a secret, hunter22, and then more text"
        );
    }
    text
}

fn redacted(text: &str) -> String {
    text.replace("hunter22", MASK)
}

async fn write(log: &RunLog, text: &str) {
    let writing = async {
        let mut writer = log.writer();
        for chunk in text.as_bytes().chunks(10_007) {
            writer.write(chunk).await;
        }
        writer.close().await;
    };
    tokio::time::timeout(LONG, writing)
        .await
        .expect("writers never wait for sinks");
}

/// Waits until the condition holds for the delivered lines and the last error of a sink.
async fn until(log: &RunLog, sink: usize, holds: impl Fn(u64, Option<String>) -> bool) {
    let feed = Arc::clone(&log.sinks.lock().unwrap()[sink].feed);
    wait::until("the sink does its work", async || {
        let (delivered, last_error) = feed.outcome();
        holds(delivered, last_error)
    })
    .await;
}

#[tokio::test]
async fn everything_written_is_in_the_spool_and_at_every_sink_without_secrets() {
    let folder = TempDir::new().unwrap();
    let (reader, pipe) = pipe_sink();
    let piped = drain(reader);
    let log = start(
        &folder,
        u64::MAX,
        vec![pipe, file_sink(&folder, "sink.log")],
    );
    let text = numbered_lines(MANY_LINES);
    write(&log, &text).await;
    let spool = log.spool().to_owned();

    let summary = log.finish(LONG).await;

    assert!(summary.is_complete(), "{summary:?}");
    assert_eq!(summary.lines, MANY_LINES);
    assert_eq!(summary.sinks[0].delivered, MANY_LINES);
    assert_eq!(summary.sinks[0].last_error, None);
    let expected = redacted(&text);
    assert_eq!(summary.spool.bytes, expected.len() as u64);
    assert!(piped.join().unwrap() == expected);
    for file in [spool, folder.path().join("sink.log")] {
        assert!(fs::read_to_string(&file).unwrap() == expected);
        let mode = fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", file.display());
    }
}

#[tokio::test]
async fn the_public_constructor_starts_a_log_with_the_configured_sinks() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("copy.log");
    let log = RunLog::start(
        LogConfig::new(folder.path()),
        Redactor::default(),
        vec![Box::new(FileSink::new(path.clone()))],
    )
    .unwrap();
    log.writer().line("one\ntwo").await;
    log.writer().line("").await;
    log.add_secrets(["hunter23"]);
    log.writer().line("now hunter23 is secret").await;
    assert_eq!(log.redactor().redact("hunter23"), MASK);
    assert_eq!(log.finish(LONG).await.lines, 4);
    assert_eq!(
        fs::read_to_string(path).unwrap(),
        "one\ntwo\n\nnow *** is secret\n"
    );
}

#[test]
fn a_folder_that_takes_no_file_is_the_machines_fault_and_named() {
    let config = LogConfig::new("/nonexistent/mayfly");
    let error = RunLog::start(config, Redactor::default(), vec![]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "could not create the run's log in `/nonexistent/mayfly`"
    );
}

#[tokio::test]
async fn a_slow_reader_delays_neither_writers_nor_other_sinks_and_loses_nothing() {
    let folder = TempDir::new().unwrap();
    let (reader, pipe) = pipe_sink();
    let log = start(
        &folder,
        u64::MAX,
        vec![pipe, file_sink(&folder, "sink.log")],
    );
    let text = numbered_lines(MANY_LINES);
    write(&log, &text).await;
    // Nothing has been read from the pipe so far.
    let piped = drain(reader);
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    assert!(piped.join().unwrap() == redacted(&text));
}

#[tokio::test]
async fn what_a_reader_did_not_take_by_the_deadline_is_counted_to_the_line() {
    let folder = TempDir::new().unwrap();
    let (mut reader, pipe) = pipe_sink();
    let log = start(
        &folder,
        u64::MAX,
        vec![pipe, file_sink(&folder, "sink.log")],
    );
    write(&log, &numbered_lines(MANY_LINES)).await;
    until(&log, 0, |delivered, _| delivered > 0).await;
    until(&log, 1, |delivered, _| delivered == MANY_LINES).await;
    let summary = log.finish(Duration::from_millis(200)).await;

    let mut read = Vec::new();
    reader.read_to_end(&mut read).unwrap();
    assert_eq!(summary.sinks[0].delivered, count_lines(&read));
    assert_eq!(summary.sinks[0].lost, MANY_LINES - count_lines(&read));
    assert!(summary.sinks[0].lost > 0 && summary.sinks[0].delivered > 0);
    assert!(summary.sinks[0].last_error.is_some());
    assert_eq!(summary.sinks[1].lost, 0);
}

#[tokio::test]
async fn a_reader_that_closes_loses_only_its_own_lines() {
    let folder = TempDir::new().unwrap();
    let (reader, pipe) = pipe_sink();
    let log = start(
        &folder,
        u64::MAX,
        vec![pipe, file_sink(&folder, "sink.log")],
    );
    let text = numbered_lines(MANY_LINES);
    let half = text.len() / 2;
    write(&log, &text[..half]).await;
    let mut first = String::new();
    BufReader::with_capacity(1, reader)
        .read_line(&mut first)
        .unwrap();
    write(&log, &text[half..]).await;
    let summary = log.finish(LONG).await;

    assert!(first.starts_with("line 0 "));
    let pipe = &summary.sinks[0];
    assert_eq!(pipe.delivered + pipe.lost, summary.lines);
    assert!(pipe.lost > 0, "{pipe:?}");
    assert!(pipe.last_error.as_ref().unwrap().contains("Broken pipe"));
    assert_eq!(summary.sinks[1].lost, 0);
    assert_eq!(summary.spool.missing, 0);
}

#[tokio::test]
async fn a_non_blocking_descriptor_gets_everything() {
    let folder = TempDir::new().unwrap();
    let (reader, writer) = io::pipe().unwrap();
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    let log = start(&folder, u64::MAX, vec![sink_over(writer)]);
    let text = numbered_lines(MANY_LINES);
    write(&log, &text).await;
    let piped = drain(reader);
    assert!(log.finish(LONG).await.is_complete());
    assert!(piped.join().unwrap() == redacted(&text));
}

#[tokio::test]
async fn a_sink_that_works_again_gets_everything_once_and_in_order() {
    let folder = TempDir::new().unwrap();
    let log = start(&folder, u64::MAX, vec![file_sink(&folder, "away/sink.log")]);
    let text = numbered_lines(MANY_LINES);
    write(&log, &text).await;
    fs::create_dir(folder.path().join("away")).unwrap();
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    assert!(fs::read_to_string(folder.path().join("away/sink.log")).unwrap() == redacted(&text));
}

#[tokio::test]
async fn a_sink_that_never_works_loses_everything_by_the_deadline_and_reports_the_reason() {
    let folder = TempDir::new().unwrap();
    let full = Box::new(FileSink::new("/dev/full".into()));
    let log = start(
        &folder,
        u64::MAX,
        vec![full, file_sink(&folder, "sink.log")],
    );
    write(&log, &numbered_lines(100)).await;
    until(&log, 0, |_, error| error.is_some()).await;
    until(&log, 1, |delivered, _| delivered == 100).await;
    let summary = log.finish(Duration::from_millis(300)).await;
    assert_eq!(
        (summary.sinks[0].delivered, summary.sinks[0].lost),
        (0, 100)
    );
    let error = summary.sinks[0].last_error.as_ref().unwrap();
    assert!(error.contains("No space left"), "{error}");
    assert_eq!(summary.sinks[1].lost, 0);
}

#[tokio::test]
async fn a_sink_that_has_failed_from_the_beginning_is_not_waited_for_long() {
    let folder = TempDir::new().unwrap();
    let sink = file_sink(&folder, "away/sink.log");
    let mut log = start(&folder, u64::MAX, vec![sink]);
    log.first_delivery = Duration::from_millis(100);
    write(&log, &numbered_lines(100)).await;
    let finished = tokio::time::timeout(DEADLINE, log.finish(NEVER)).await;
    let summary = finished.expect("it was waited for to the end");
    assert_eq!(summary.sinks[0].lost, 100);
}

#[tokio::test]
async fn an_order_that_comes_while_the_rest_is_delivered_ends_the_wait() {
    let folder = TempDir::new().unwrap();
    let full = Box::new(FileSink::new("/dev/full".into()));
    let mut log = start(&folder, u64::MAX, vec![full]);
    log.first_delivery = NEVER;
    write(&log, &numbered_lines(100)).await;
    let order = CancellationToken::new();
    let deadline = Deadline::after(NEVER).hurried_by(order.clone(), Duration::from_millis(50));
    // The wait has begun when its first poll returns.
    let give = async { order.cancel() };
    let finished = async { tokio::join!(biased; log.finish_within(&deadline), give) };
    let finished = tokio::time::timeout(DEADLINE, finished).await;
    let (summary, ()) = finished.expect("the order was not heard");
    assert_eq!(summary.sinks[0].lost, 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_of_concurrent_writers_stay_whole_and_in_each_writers_order() {
    const WRITERS: usize = 8;
    const LINES: usize = 3000;
    let folder = TempDir::new().unwrap();
    let log = start(&folder, u64::MAX, vec![file_sink(&folder, "sink.log")]);
    let tasks: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let mut log = log.writer();
            tokio::spawn(async move {
                let lines: Vec<String> = (0..LINES)
                    .map(|line| format!("{writer} {line} {}", "x".repeat(line % 97)))
                    .collect();
                let text = lines.join("\n");
                for chunk in text.as_bytes().chunks(101 + writer) {
                    log.write(chunk).await;
                }
                // Half of the writers are dropped with an unfinished last line.
                if writer % 2 == 0 {
                    log.close().await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    assert_eq!(summary.lines, (WRITERS * LINES) as u64);
    let mut next = [0; WRITERS];
    for line in fs::read_to_string(folder.path().join("sink.log"))
        .unwrap()
        .lines()
    {
        let mut words = line.split(' ');
        let writer: usize = words.next().unwrap().parse().unwrap();
        let number = next[writer];
        assert_eq!(
            line,
            format!("{writer} {number} {}", "x".repeat(number % 97))
        );
        next[writer] += 1;
    }
    assert_eq!(next, [LINES; WRITERS]);
}

#[tokio::test]
async fn lines_of_megabytes_arrive_in_pieces() {
    let folder = TempDir::new().unwrap();
    let log = start(&folder, u64::MAX, vec![file_sink(&folder, "sink.log")]);
    let line = "\u{20ac}".repeat(1024 * 1024);
    write(&log, &line).await;
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    assert_eq!(summary.lines, 4, "3 MiB and what cut characters push on");
    let text = fs::read_to_string(folder.path().join("sink.log")).unwrap();
    assert!(text.replace('\n', "") == line);
}

#[tokio::test]
async fn beyond_its_limit_the_spool_ends_with_what_it_lacks_and_sinks_get_everything() {
    let folder = TempDir::new().unwrap();
    let (reader, pipe) = pipe_sink();
    let piped = drain(reader);
    let limit = 300_000;
    let log = start(&folder, limit, vec![pipe, file_sink(&folder, "sink.log")]);
    let text = numbered_lines(MANY_LINES);
    write(&log, &text).await;
    let summary = log.finish(LONG).await;

    let expected = redacted(&text);
    assert!(piped.join().unwrap() == expected);
    assert!(fs::read_to_string(folder.path().join("sink.log")).unwrap() == expected);
    assert_eq!(summary.sinks[0].lost, 0);
    assert_eq!(summary.spool.lines + summary.spool.missing, MANY_LINES);
    let spooled = fs::read_to_string(&summary.spool.path).unwrap();
    assert!(spooled.len() as u64 <= limit && spooled.len() > 290_000);
    let (kept, notice) = spooled.trim_end().rsplit_once('\n').unwrap();
    assert!(expected.starts_with(&format!("{kept}\n")));
    assert_eq!(
        notice,
        format!(
            "[mayfly] log lines missing here: {} (it may not exceed 300000 bytes)",
            MANY_LINES - count_lines(format!("{kept}\n").as_bytes())
        )
    );
}

#[tokio::test]
async fn a_full_disk_does_not_silence_standard_output() {
    let (reader, pipe) = pipe_sink();
    let piped = drain(reader);
    let full = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/full")
        .unwrap();
    let spool = Spool::over("/dev/full".into(), full, u64::MAX);
    let log = RunLog::start_over(spool, 1024, Redactor::default(), vec![pipe]).unwrap();
    let text = numbered_lines(MANY_LINES);
    write(&log, &text).await;
    let summary = log.finish(LONG).await;
    assert!(piped.join().unwrap() == text);
    assert_eq!(
        (summary.sinks[0].delivered, summary.sinks[0].lost),
        (MANY_LINES, 0)
    );
    assert_eq!(
        (summary.spool.lines, summary.spool.missing),
        (0, MANY_LINES)
    );
    assert!(summary.spool.last_error.unwrap().contains("No space left"));
}

#[tokio::test]
async fn with_a_full_disk_a_reader_too_slow_learns_how_much_it_missed() {
    let folder = TempDir::new().unwrap();
    let (reader, pipe) = pipe_sink();
    let log = start(&folder, 1, vec![pipe]);
    // Waits once, for a second, for the reader, then continues without it.
    write(&log, &numbered_lines(MANY_LINES)).await;
    let piped = drain(reader);
    let summary = log.finish(LONG).await;
    let piped = piped.join().unwrap();
    let (notices, lines): (Vec<_>, Vec<_>) =
        piped.lines().partition(|line| line.starts_with("[mayfly]"));
    let missing = notices.iter().map(|notice| {
        let notice = notice
            .strip_prefix("[mayfly] log lines missing here: ")
            .unwrap();
        let count = notice.strip_suffix(" (the disk is full and this sink is too slow)");
        count.unwrap().parse::<u64>().unwrap()
    });
    assert!(!notices.is_empty());
    assert_eq!(missing.sum::<u64>(), summary.sinks[0].lost);
    assert_eq!(lines.len() as u64, summary.sinks[0].delivered);
    assert_eq!(
        summary.sinks[0].delivered + summary.sinks[0].lost,
        MANY_LINES
    );
}

/// Runs the test of this name again, alone in a process of its own, behind `shell`.
fn in_own_process(test: &str, shell: &str) {
    let output = Process::new("sh")
        .args(["-c", &format!(r#"{shell} exec "$@""#), "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", &format!("tests::{test}")])
        .env("MAYFLY_TEST_IN_OWN_PROCESS", test)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "{stdout}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn is_own_process(test: &str) -> bool {
    std::env::var("MAYFLY_TEST_IN_OWN_PROCESS").is_ok_and(|name| name == test)
}

/// With the limit on file sizes the kernel behaves as with a full disk: one write is cut short, and the next one fails.
#[tokio::test]
async fn a_disk_that_fills_up_keeps_whole_lines_and_the_rest_goes_to_the_sinks() {
    const TEST: &str = "a_disk_that_fills_up_keeps_whole_lines_and_the_rest_goes_to_the_sinks";
    if !is_own_process(TEST) {
        in_own_process(TEST, "trap '' XFSZ; ulimit -f 400;");
        return;
    }
    let folder = TempDir::new().unwrap();
    let (reader, pipe) = pipe_sink();
    let piped = drain(reader);
    let log = start(&folder, u64::MAX, vec![pipe]);
    let text = numbered_lines(MANY_LINES);
    write(&log, &text).await;
    let summary = log.finish(LONG).await;

    let expected = redacted(&text);
    assert!(piped.join().unwrap() == expected);
    assert_eq!(summary.sinks[0].lost, 0);
    let spooled = fs::read_to_string(&summary.spool.path).unwrap();
    let (kept, notice) = spooled.trim_end().rsplit_once('\n').unwrap();
    assert!(kept.len() > 200_000 && expected.starts_with(&format!("{kept}\n")));
    let told = format!(
        "[mayfly] log lines missing here: {} (",
        summary.spool.missing
    );
    assert!(notice.starts_with(&told), "{notice}");
    assert_eq!(summary.spool.lines, count_lines(kept.as_bytes()) + 1);
    assert_eq!(summary.spool.missing, MANY_LINES - summary.spool.lines);
    assert!(summary.spool.missing > 0);
}

#[test]
fn wherever_a_disk_is_full_the_log_on_it_ends_with_what_it_lacks() {
    const TEST: &str = "wherever_a_disk_is_full_the_log_on_it_ends_with_what_it_lacks";
    const ROOM: usize = 200_000;
    const LINE: &str = "a line of the log\n";
    if !is_own_process(TEST) {
        in_own_process(TEST, "trap '' XFSZ;");
        return;
    }
    let (_, most) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
    setrlimit(Resource::RLIMIT_FSIZE, ROOM as u64, most).unwrap();
    // Neither the reserved space nor a line is a multiple of this.
    for left in (0..10_000).step_by(23) {
        let folder = TempDir::new().unwrap();
        let fills =
            "x".repeat((ROOM - left) % LINE.len()) + &LINE.repeat((ROOM - left) / LINE.len());
        let (commands, receiver) = mpsc::unbounded_channel();
        // The first is too long to be written together with the second.
        for text in [fills.clone(), LINE.repeat(1000)] {
            let (text, reserved) = (text.into_bytes(), 0);
            commands.send(Command::Append { text, reserved }).unwrap();
        }
        commands.send(Command::Finish).unwrap();
        let spool = Spool::create(folder.path(), u64::MAX).unwrap();
        let (path, summary) = (spool.path().to_owned(), spool.summary());
        spool.run(receiver, &Semaphore::new(0));

        let spooled = fs::read_to_string(path).unwrap();
        let (kept, notice) = spooled.trim_end().rsplit_once('\n').unwrap();
        assert!((fills + &LINE.repeat(1000)).starts_with(&format!("{kept}\n")));
        let summary = summary.lock().unwrap();
        let told = format!("[mayfly] log lines missing here: {} (", summary.missing);
        assert!(notice.starts_with(&told), "{left}: {notice}");
        assert_eq!(summary.lines, count_lines(kept.as_bytes()) + 1, "{left}");
        assert_eq!(summary.bytes, spooled.len() as u64, "{left}");
    }
}

#[tokio::test]
async fn a_disk_with_room_again_goes_on_behind_a_line_about_what_is_missing() {
    const TEST: &str = "a_disk_with_room_again_goes_on_behind_a_line_about_what_is_missing";
    if !is_own_process(TEST) {
        in_own_process(TEST, "trap '' XFSZ;");
        return;
    }
    let folder = TempDir::new().unwrap();
    let (reader, pipe) = pipe_sink();
    let piped = drain(reader);
    let log = start(&folder, u64::MAX, vec![pipe]);
    let (_, most) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
    setrlimit(Resource::RLIMIT_FSIZE, 100_000, most).unwrap();
    // More than the queue can hold, so the spool has found the disk full when this is done.
    write(&log, &numbered_lines(MANY_LINES)).await;
    setrlimit(Resource::RLIMIT_FSIZE, most, most).unwrap();
    let started = Instant::now();
    while fs::metadata(log.spool()).unwrap().len() <= 100_000 {
        assert!(started.elapsed() < LONG);
        log.writer().line("more").await;
    }
    log.writer().line("the end").await;
    let summary = log.finish(LONG).await;

    let piped = piped.join().unwrap();
    assert_eq!(summary.sinks[0].lost, 0);
    assert!(!piped.contains("[mayfly]"));
    let spooled = fs::read_to_string(&summary.spool.path).unwrap();
    let (before, after) = spooled
        .split_once("[mayfly] log lines missing here: ")
        .unwrap();
    let (notice, after) = after.split_once('\n').unwrap();
    assert_eq!(
        notice,
        format!("{} (File too large (os error 27))", summary.spool.missing)
    );
    assert!(piped.starts_with(before) && piped.ends_with(after));
    assert!(after.ends_with("the end\n"));
    assert_eq!(
        summary.spool.lines,
        count_lines(before.as_bytes()) + count_lines(after.as_bytes())
    );
}

#[tokio::test]
async fn a_hundred_megabytes_pass_unchanged_in_little_memory() {
    const TEST: &str = "a_hundred_megabytes_pass_unchanged_in_little_memory";
    const PASSES: u64 = 36;
    if !is_own_process(TEST) {
        in_own_process(TEST, "");
        return;
    }
    let folder = TempDir::new().unwrap();
    let text = numbered_lines(MANY_LINES);
    let expected = redacted(&text);
    let (reader, pipe) = pipe_sink();
    let log = start(
        &folder,
        u64::MAX,
        vec![pipe, file_sink(&folder, "sink.log")],
    );
    let before = peak_memory_kib();
    for _ in 0..PASSES {
        write(&log, &text).await;
    }
    // The reader of the pipe is a hundred megabytes behind.
    let (piped, sunk) = (compare(reader, &expected), folder.path().join("sink.log"));
    let summary = log.finish(LONG).await;
    let growth = peak_memory_kib() - before;

    assert!(summary.is_complete(), "{summary:?}");
    assert!(summary.spool.bytes > 100_000_000);
    assert_eq!(piped.join().unwrap(), PASSES);
    let sunk = fs::File::open(sunk).unwrap();
    assert_eq!(compare(sunk, &expected).join().unwrap(), PASSES);
    assert!(growth < 10_000, "{growth} KiB");
}

/// Ten times the values cost ten times as much, and not a hundred times.
#[test]
fn a_megabyte_of_secrets_takes_little_memory_and_time() {
    const TEST: &str = "a_megabyte_of_secrets_takes_little_memory_and_time";
    if !is_own_process(TEST) {
        in_own_process(TEST, "");
        return;
    }
    // Half of the values are tokens, the other half are keys of many lines.
    let line =
        |number: u64| format!("{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).repeat(4);
    let values = |bytes: u64| -> Vec<String> {
        let tokens = (0..bytes / 128).map(line);
        let keys = (0..bytes / 2560).map(|key| {
            let lines = (0..20).map(|at| line(1_000_000 + key * 20 + at) + "\n");
            lines.collect()
        });
        tokens.chain(keys).collect()
    };
    let (small, large) = (values(100_000), values(1_000_000));
    assert!((900_000..1_100_000).contains(&large.iter().map(String::len).sum::<usize>()));
    let time = |values: &[String]| {
        let before = processor_time();
        let redactor = Redactor::new(values);
        (processor_time().saturating_sub(before), redactor)
    };
    let (time_of_small, _) = time(&small);
    let memory_before = peak_memory_kib();
    let (time_of_large, redactor) = time(&large);
    let growth = peak_memory_kib() - memory_before;
    assert!(growth < 50_000, "{growth} KiB");
    assert!(
        time_of_large < 25 * time_of_small,
        "{time_of_small:?}, ten times as much: {time_of_large:?}"
    );
    let last = large.last().unwrap();
    assert_eq!(redactor.redact(last.lines().next().unwrap()), MASK);
}

fn processor_time() -> Duration {
    let time = getrusage(UsageWho::RUSAGE_SELF).unwrap().user_time();
    Duration::from_micros(u64::try_from(time.num_microseconds()).unwrap())
}

/// Checks that the output is the expected text and returns how often it came.
fn compare(mut reader: impl io::Read + Send + 'static, expected: &str) -> thread::JoinHandle<u64> {
    let expected = expected.as_bytes().to_vec();
    thread::spawn(move || {
        let mut buffer = vec![0; 32 * 1024];
        let (mut passes, mut at) = (0, 0);
        loop {
            let wanted = buffer.len().min(expected.len() - at);
            let length = reader.read(&mut buffer[..wanted]).unwrap();
            if length == 0 {
                assert_eq!(at, 0, "cut off");
                return passes;
            }
            assert!(buffer[..length] == expected[at..at + length]);
            at += length;
            if at == expected.len() {
                (passes, at) = (passes + 1, 0);
            }
        }
    })
}

fn peak_memory_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    peak.unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

#[tokio::test]
async fn a_sink_that_joins_later_gets_the_log_from_its_beginning() {
    let folder = tempfile::tempdir().unwrap();
    let log = start(&folder, u64::MAX, vec![file_sink(&folder, "first")]);
    let (before, after) = (numbered_lines(500), numbered_lines(20));
    write(&log, &before).await;
    log.attach(Box::new(FileSink::new(folder.path().join("second"))))
        .unwrap();
    write(&log, &after).await;
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    for name in ["first", "second"] {
        let text = fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(text, redacted(&format!("{before}{after}")), "{name}");
    }
}

/// Takes its text at the end of the log alone.
#[derive(Debug)]
struct LateSink(Box<dyn Sink>, std::sync::mpsc::Sender<()>);

impl Sink for LateSink {
    fn name(&self) -> String {
        self.0.name()
    }

    fn deliver(&mut self, batch: Batch<'_>) -> Result<usize, SinkError> {
        if batch.is_over {
            self.0.deliver(batch)
        } else {
            self.1.send(()).unwrap();
            Err(SinkError::Early(NEVER))
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sink_that_waits_for_more_gets_the_rest_at_once_when_the_log_ends() {
    let folder = tempfile::tempdir().unwrap();
    let (sender, early) = std::sync::mpsc::channel();
    let sink = LateSink(file_sink(&folder, "late"), sender);
    let log = start(&folder, u64::MAX, vec![Box::new(sink)]);
    log.writer().line("the last one").await;
    early.recv_timeout(LONG).unwrap();
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    let written = fs::read_to_string(folder.path().join("late")).unwrap();
    assert_eq!(written, "the last one\n");
}
