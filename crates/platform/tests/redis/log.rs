//! The live log in Redis and through the platform's API.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use platform::java;
use platform::lease::JobToken;
use platform::redis::{Redis, RedisArgs};
use platform::sinks::{ApiLog, ApiSink, JobStream, RedisLog, RedisSink, Repeated};
use platform::terrakube::TokenSource;
use run_log::{Batch, LimitedSink, LogConfig, LogWriter, Redactor, RunLog, Sink, SinkError};
use serde_json::{Value, json};
use tempfile::TempDir;
use test_peers::http::{Request, Response, Server};
use test_peers::proxy::Proxy;
use test_peers::redis::{Options, RedisServer};
use test_peers::wait::until;
use tokio_util::sync::CancellationToken;

use crate::support::{LONG, args, redis, redis_at, stream};

const STEP: &str = "5a5e1f0b-9c3f-4a55-9f0e-3d0f3b8f0101";

fn redis_sink(redis: Redis) -> Box<dyn Sink> {
    stoppable_sink(redis, CancellationToken::new())
}

fn stoppable_sink(redis: Redis, stop: CancellationToken) -> Box<dyn Sink> {
    Box::new(RedisSink::new(&RedisLog {
        redis,
        job_id: "412".to_owned(),
        step_id: STEP.to_owned(),
        stop,
    }))
}

/// A sink that counts its failed deliveries.
#[derive(Debug)]
struct Counted(Box<dyn Sink>, Arc<AtomicU32>);

impl Sink for Counted {
    fn name(&self) -> String {
        self.0.name()
    }

    fn deliver(&mut self, batch: Batch<'_>) -> Result<usize, SinkError> {
        let delivered = self.0.deliver(batch);
        if matches!(delivered, Err(SinkError::Unavailable(_))) {
            self.1.fetch_add(1, Ordering::SeqCst);
        }
        delivered
    }
}

async fn failed(failures: &AtomicU32, number: u32) {
    until("a delivery fails", async || {
        failures.load(Ordering::SeqCst) >= number
    })
    .await;
}

fn start(folder: &TempDir, sink: Box<dyn Sink>) -> RunLog {
    let redactor = Redactor::new(["hunter22"]);
    RunLog::start(LogConfig::new(folder.path()), redactor, vec![sink]).unwrap()
}

async fn write_numbers(writer: &mut LogWriter, numbers: std::ops::Range<u32>) {
    for number in numbers {
        writer.write(format!("line {number}\n").as_bytes()).await;
    }
}

/// Checks that the stream has every line once, in order, with its number.
fn assert_whole(server: &RedisServer, lines: u32) {
    let entries = stream(&mut server.connect().unwrap(), "412");
    let seen: Vec<_> = entries
        .iter()
        .map(|entry| (entry.field("lineNumber"), entry.field("output")))
        .collect();
    let numbers: Vec<_> = (0..lines)
        .map(|number| ((number + 1).to_string(), format!("line {number}")))
        .collect();
    for (seen, expected) in seen.iter().zip(&numbers) {
        assert_eq!(*seen, (expected.0.as_str(), expected.1.as_str()));
    }
    assert_eq!(seen.len(), numbers.len());
}

#[tokio::test]
async fn lines_stand_in_the_stream_as_the_platform_reads_them() {
    let server = RedisServer::start().unwrap();
    let folder = TempDir::new().unwrap();
    let log = start(&folder, redis_sink(redis_at(&server)));
    let emoji = "😀".repeat(20_000);
    log.writer()
        .line(&format!(
            "Running Terraform PLAN\n\n\u{1b}[32;40;1mgrün\u{1b}[0m hunter22\n{emoji}"
        ))
        .await;
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    assert_eq!(summary.sinks[0].name, format!("redis {}", server.address()));

    let mut client = server.connect().unwrap();
    let entries = stream(&mut client, "412");
    let names = ["jobId", "stepId", "lineNumber", "output"];
    for (entry, number) in entries.iter().zip(["1", "2", "3", "4"]) {
        let found: Vec<_> = entry.fields.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(found, names);
        assert_eq!(entry.field("jobId"), "412");
        assert_eq!(entry.field("stepId"), STEP);
        assert_eq!(entry.field("lineNumber"), number);
    }
    let outputs: Vec<_> = entries.iter().map(|entry| entry.field("output")).collect();
    assert_eq!(
        outputs,
        [
            "Running Terraform PLAN",
            "",
            "\u{1b}[32;40;1mgrün\u{1b}[0m ***",
            &emoji
        ]
    );

    let groups: Vec<Vec<(String, redis::Value)>> = redis::cmd("XINFO")
        .arg("GROUPS")
        .arg(java::encode("412"))
        .query(&mut client)
        .unwrap();
    let names: Vec<_> = groups.iter().map(|group| group[0].1.clone()).collect();
    assert_eq!(
        names,
        ["CLI", "UI"].map(|name| redis::Value::BulkString(name.into()))
    );
}

#[tokio::test]
async fn a_second_step_goes_on_where_the_first_one_ended() {
    let server = RedisServer::start().unwrap();
    for number in 0..2 {
        let folder = TempDir::new().unwrap();
        let log = start(&folder, redis_sink(redis_at(&server)));
        log.writer().line(&format!("step {number}")).await;
        assert!(log.finish(LONG).await.is_complete());
    }
    let entries = stream(&mut server.connect().unwrap(), "412");
    let seen: Vec<_> = entries
        .iter()
        .map(|entry| (entry.field("lineNumber"), entry.field("output")))
        .collect();
    assert_eq!(seen, [("1", "step 0"), ("1", "step 1")]);
}

/// A short line takes much more memory on its way than its text.
#[test]
fn a_batch_of_short_lines_is_sent_in_parts() {
    let server = RedisServer::start().unwrap();
    let mut sink = redis_sink(redis_at(&server));
    let text = [b'\n'; 2500];
    let mut left = &text[..];
    let mut taken = Vec::new();
    while !left.is_empty() {
        let batch = Batch {
            text: left,
            first_line: 2501 - left.len() as u64,
            is_over: true,
        };
        let length = sink.deliver(batch).unwrap();
        left = &left[length..];
        taken.push(length);
    }
    assert_eq!(taken, [1000, 1000, 500]);
    let entries = stream(&mut server.connect().unwrap(), "412");
    let numbers = entries.iter().map(|entry| entry.field("lineNumber"));
    assert!(numbers.eq((1..=2500).map(|number: u32| number.to_string())));
}

#[tokio::test]
async fn first_lines_that_the_platform_deletes_late_are_written_again() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    let key = java::encode("412");
    let folder = TempDir::new().unwrap();
    let log = start(&folder, redis_sink(redis_at(&server)));
    let mut writer = log.writer();
    write_numbers(&mut writer, 0..3).await;
    // The run is silent meanwhile.
    for _ in 0..2 {
        until("the first lines are there", async || {
            (stream(&mut client, "412").len() == 3).then_some(())
        })
        .await;
        let deleted: u32 = redis::cmd("DEL").arg(&key).query(&mut client).unwrap();
        assert_eq!(deleted, 1);
    }
    // The next lines come together with another deletion.
    write_numbers(&mut writer, 3..6).await;
    writer.close().await;
    assert!(log.finish(LONG).await.is_complete());
    assert_whole(&server, 6);
    let groups: Vec<redis::Value> = redis::cmd("XINFO")
        .arg("GROUPS")
        .arg(&key)
        .query(&mut client)
        .unwrap();
    assert_eq!(groups.len(), 2);
}

#[tokio::test]
async fn lines_that_are_deleted_after_an_order_to_stop_stay_deleted() {
    for later in [0, 3] {
        let server = RedisServer::start().unwrap();
        let mut client = server.connect().unwrap();
        let folder = TempDir::new().unwrap();
        let stop = CancellationToken::new();
        let log = start(&folder, stoppable_sink(redis_at(&server), stop.clone()));
        let mut writer = log.writer();
        write_numbers(&mut writer, 0..3).await;
        until("the first lines are there", async || {
            (stream(&mut client, "412").len() == 3).then_some(())
        })
        .await;
        stop.cancel();
        let key = java::encode("412");
        redis::cmd("DEL").arg(&key).exec(&mut client).unwrap();
        write_numbers(&mut writer, 3..3 + later).await;
        writer.close().await;
        assert!(log.finish(LONG).await.is_complete());
        let entries = stream(&mut client, "412");
        let seen: Vec<_> = entries.iter().map(|entry| entry.field("output")).collect();
        let written = (3..3 + later).map(|number| format!("line {number}"));
        assert_eq!(seen, written.collect::<Vec<_>>());
        let is_there: bool = redis::cmd("EXISTS").arg(&key).query(&mut client).unwrap();
        assert_eq!(is_there, later > 0);
    }
}

#[tokio::test]
async fn a_redis_killed_and_started_again_in_the_middle_loses_nothing_and_doubles_nothing() {
    let mut server = RedisServer::with(Options::default().keeps()).unwrap();
    let folder = TempDir::new().unwrap();
    let log = start(&folder, redis_sink(redis_at(&server)));
    let mut writer = log.writer();
    for round in 0..4 {
        write_numbers(&mut writer, round * 5000..(round + 1) * 5000).await;
        // The failure happens during a delivery, not before or after it.
        let mut client = server.connect().unwrap();
        until("some lines arrive", async || {
            let entries: u32 = redis::cmd("XLEN")
                .arg(java::encode("412"))
                .query(&mut client)
                .unwrap();
            (entries > round * 5000).then_some(())
        })
        .await;
        server.restart().unwrap();
    }
    writer.close().await;
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    assert_whole(&server, 20_000);
}

/// Waits until the sink has given up the old connections and has opened a new one to check what was written.
async fn given_up(way: &Proxy, before: u64) {
    until("the answer is given up", async || {
        (way.accepted() > before).then_some(())
    })
    .await;
}

#[tokio::test]
async fn lines_whose_answer_was_lost_are_not_sent_again() {
    let server = RedisServer::start().unwrap();
    let way = Proxy::start(&[server.socket()]).unwrap();
    let settings = RedisArgs {
        redis_port: Some(way.address().port().to_string().into()),
        redis_timeout: Some("300".into()),
        ..args(&server)
    };
    let folder = TempDir::new().unwrap();
    // It never checks, so each connection is one of a delivery.
    let sink = Counted(redis_sink(redis(&settings)), Arc::default());
    let log = start(&folder, Box::new(sink));
    let mut writer = log.writer();
    write_numbers(&mut writer, 0..1).await;
    let mut client = server.connect().unwrap();
    until("the first line arrives", async || {
        (!stream(&mut client, "412").is_empty()).then_some(())
    })
    .await;
    // Redis executes what is sent now only after the client's timeout.
    server.freeze().unwrap();
    let before = way.accepted();
    write_numbers(&mut writer, 1..50).await;
    writer.close().await;
    let finish = tokio::spawn(log.finish(LONG));
    given_up(&way, before).await;
    server.thaw().unwrap();
    let summary = finish.await.unwrap();
    assert!(summary.is_complete(), "{summary:?}");
    assert!(summary.sinks[0].last_error.is_some(), "an answer was lost");
    assert_whole(&server, 50);
}

#[tokio::test]
async fn remarks_of_others_are_not_taken_for_lines_whose_answer_was_lost() {
    let server = RedisServer::start().unwrap();
    let way = Proxy::start(&[server.socket()]).unwrap();
    let settings = RedisArgs {
        redis_port: Some(way.address().port().to_string().into()),
        redis_timeout: Some("300".into()),
        ..args(&server)
    };
    let remarks = JobStream::new(&redis_at(&server), "412", STEP);
    remarks.remark("no node yet\nstill none").await.unwrap();
    let folder = TempDir::new().unwrap();
    // It never checks, so each connection is one of a delivery.
    let sink = Counted(redis_sink(redis(&settings)), Arc::default());
    let log = start(&folder, Box::new(sink));
    let mut writer = log.writer();
    write_numbers(&mut writer, 0..1).await;
    let mut client = server.connect().unwrap();
    until("the first line arrives", async || {
        (stream(&mut client, "412").len() == 3).then_some(())
    })
    .await;
    server.freeze().unwrap();
    let before = way.accepted();
    write_numbers(&mut writer, 1..20).await;
    writer.close().await;
    let finish = tokio::spawn(log.finish(LONG));
    given_up(&way, before).await;
    server.thaw().unwrap();
    remarks.remark("the node is going away").await.unwrap();
    assert!(finish.await.unwrap().is_complete());

    let entries = stream(&mut client, "412");
    let numbered: Vec<_> = entries
        .iter()
        .filter(|entry| entry.field("lineNumber") != "0")
        .map(|entry| entry.field("output").to_owned())
        .collect();
    let lines: Vec<_> = (0..20).map(|number| format!("line {number}")).collect();
    assert_eq!(numbered, lines);
    // The reporter of a lost run finds the complete log.
    let text = copied(&remarks, 1024 * 1024, Repeated::Keep).await;
    assert!(
        text.starts_with("no node yet\nstill none\nline 0\n"),
        "{text}"
    );
    assert_eq!(text.lines().count(), 23);
}

#[tokio::test]
async fn lines_that_the_api_got_twice_are_read_once() {
    let server = RedisServer::start().unwrap();
    let folder = TempDir::new().unwrap();
    let lines = ["same", "same", "three"];
    // The answer to the first two lines was lost, so that they came again, with a third one.
    for count in [2, 3] {
        let log = start(
            &TempDir::new_in(&folder).unwrap(),
            redis_sink(redis_at(&server)),
        );
        let writer = log.writer();
        for line in &lines[..count] {
            writer.line(line).await;
        }
        writer.close().await;
        assert!(log.finish(LONG).await.is_complete());
    }
    let stream = JobStream::new(&redis_at(&server), "412", STEP);
    stream.remark("lost\nlost").await.unwrap();
    let limit = 1024 * 1024;
    let once = copied(&stream, limit, Repeated::Skip).await;
    assert_eq!(once, "same\nsame\nthree\nlost\nlost\n");
    let all = copied(&stream, limit, Repeated::Keep).await;
    assert_eq!(all, "same\nsame\nsame\nsame\nthree\nlost\nlost\n");
    // A line counts its text and 128 bytes.
    let two = copied(&stream, 2 * (128 + 4), Repeated::Skip).await;
    assert_eq!(two, "same\nsame\n");
    // One that is left out counts too.
    let four = copied(&stream, 4 * (128 + 4), Repeated::Skip).await;
    assert_eq!(four, "same\nsame\n");
}

async fn copied(stream: &JobStream, limit: u64, repeated: Repeated) -> String {
    let mut text = Vec::new();
    stream.copy(&mut text, limit, repeated).await.unwrap();
    String::from_utf8(text).unwrap()
}

/// Asks the server how much it has sent when the first line arrives.
struct FirstLine {
    server: redis::Connection,
    sent_before: Option<u64>,
}

impl std::io::Write for FirstLine {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        if self.sent_before.is_none() {
            let stats: redis::InfoDict = redis::cmd("INFO")
                .arg("stats")
                .query(&mut self.server)
                .unwrap();
            self.sent_before = stats.get("total_net_output_bytes");
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_live_log_of_long_lines_is_never_in_memory_as_a_whole() {
    let server = RedisServer::start().unwrap();
    let stream = JobStream::new(&redis_at(&server), "412", STEP);
    for _ in 0..48 {
        stream.remark(&"x".repeat(1024 * 1024)).await.unwrap();
    }
    let mut first = FirstLine {
        server: server.connect().unwrap(),
        sent_before: None,
    };
    stream
        .copy(&mut first, u64::MAX, Repeated::Skip)
        .await
        .unwrap();
    let sent = first.sent_before.unwrap();
    assert!((1..36 << 20).contains(&sent), "{sent} bytes");
}

/// Adds an entry to the stream for each line that arrives.
struct Growing {
    server: redis::Connection,
    lines: usize,
}

impl std::io::Write for Growing {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.lines += usize::from(text.ends_with(b"\n"));
        let mut add = redis::cmd("XADD");
        add.arg(java::encode("412")).arg("*");
        let fields = [("jobId", "412"), ("stepId", STEP), ("output", "more")];
        for (name, value) in fields {
            add.arg(java::encode(name)).arg(java::encode(value));
        }
        add.exec(&mut self.server).unwrap();
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn lines_that_are_added_meanwhile_do_not_prolong_a_copy() {
    let server = RedisServer::start().unwrap();
    let stream = JobStream::new(&redis_at(&server), "412", STEP);
    stream.remark("one\ntwo\nthree").await.unwrap();
    let mut growing = Growing {
        server: server.connect().unwrap(),
        lines: 0,
    };
    let limit = 1024 * 1024;
    stream
        .copy(&mut growing, limit, Repeated::Skip)
        .await
        .unwrap();
    assert_eq!(growing.lines, 3);
}

#[tokio::test]
async fn a_redis_that_stays_unavailable_costs_the_deadline_and_no_line_on_disk() {
    let mut server = RedisServer::start().unwrap();
    server.kill();
    let folder = TempDir::new().unwrap();
    let failures = Arc::<AtomicU32>::default();
    let sink = Counted(redis_sink(redis_at(&server)), Arc::clone(&failures));
    let log = start(&folder, Box::new(sink));
    log.writer().line("one").await;
    failed(&failures, 1).await;
    let summary = log.finish(Duration::from_millis(1)).await;
    assert_eq!(summary.sinks[0].lost, 1);
    assert!(
        summary.sinks[0]
            .last_error
            .as_ref()
            .unwrap()
            .contains("could not connect")
    );
    assert_eq!(summary.spool.lines, 1);
}

#[tokio::test]
async fn a_stream_the_platform_deletes_meanwhile_is_made_again() {
    let server = RedisServer::start().unwrap();
    let folder = TempDir::new().unwrap();
    let log = start(&folder, redis_sink(redis_at(&server)));
    let mut client = server.connect().unwrap();
    log.writer().line("before").await;
    until("it arrives", async || {
        (!stream(&mut client, "412").is_empty()).then_some(())
    })
    .await;
    redis::cmd("DEL")
        .arg(java::encode("412"))
        .exec(&mut client)
        .unwrap();
    log.writer().line("after").await;
    assert!(log.finish(LONG).await.is_complete());
    let entries = stream(&mut client, "412");
    let seen: Vec<_> = entries
        .iter()
        .map(|entry| (entry.field("lineNumber"), entry.field("output")))
        .collect();
    assert_eq!(seen, [("1", "before"), ("2", "after")]);
}

#[tokio::test]
async fn beyond_its_limit_the_stream_ends_with_where_the_rest_is_and_the_log_is_complete() {
    let server = RedisServer::start().unwrap();
    let folder = TempDir::new().unwrap();
    let sink = LimitedSink::new(redis_sink(redis_at(&server)), 100_000);
    let log = start(&folder, Box::new(sink));
    let mut writer = log.writer();
    write_numbers(&mut writer, 0..5000).await;
    writer.close().await;
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete());
    assert_eq!(summary.spool.lines, 5000);
    let entries = stream(&mut server.connect().unwrap(), "412");
    assert!((600..800).contains(&entries.len()), "{}", entries.len());
    let (notice, lines) = entries.split_last().unwrap();
    for (number, entry) in lines.iter().enumerate() {
        assert_eq!(entry.field("output"), format!("line {number}"));
    }
    let notice = notice.field("output");
    assert!(
        notice.contains("stored as the output of this step"),
        "{notice}"
    );
}

fn api_sink(server: &Server) -> Box<dyn Sink> {
    // Each program installs a provider first. An earlier test may have done it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Box::new(ApiSink::new(ApiLog {
        base: format!("{}/base/", server.url()).parse().unwrap(),
        job_id: 412,
        step_id: STEP.to_owned(),
        tokens: TokenSource::of_lease(JobToken::new("minted".to_owned().into())),
    }))
}

/// The lines of all accepted requests.
fn posted(requests: &[Request]) -> Vec<(u64, String)> {
    requests
        .iter()
        .filter(|request| request.path == "/base/logs")
        .flat_map(|request| {
            let body: Value = serde_json::from_slice(&request.body).unwrap();
            body["data"].as_array().unwrap().clone()
        })
        .map(|line| {
            let output = line["output"].as_str().unwrap().to_owned();
            (line["lineNumber"].as_u64().unwrap(), output)
        })
        .collect()
}

#[tokio::test]
async fn the_api_gets_batches_with_its_media_type_and_a_token() {
    let server = Server::start(|_| Response::new(200, "")).unwrap();
    let folder = TempDir::new().unwrap();
    let log = start(&folder, api_sink(&server));
    log.writer().line("one hunter22\n\nthree").await;
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    assert_eq!(summary.sinks[0].name, format!("api {}", server.url()));

    let requests = server.requests();
    assert_eq!(requests[0].path, "/base/logs/412/setup-consumer-groups");
    assert!(requests[0].body.is_empty());
    for request in &requests {
        assert_eq!(request.method, "POST");
        assert_eq!(
            request.header("content-type"),
            Some("application/vnd.api+json")
        );
        assert_eq!(request.header("authorization"), Some("Bearer minted"));
    }
    let first: Value = serde_json::from_slice(&requests[1].body).unwrap();
    assert_eq!(
        first["data"][0],
        json!({"jobId": 412, "stepId": STEP, "lineNumber": 1, "output": "one ***"})
    );
    let lines: Vec<_> = posted(&requests);
    assert_eq!(
        lines,
        [
            (1, "one ***".to_owned()),
            (2, String::new()),
            (3, "three".to_owned())
        ]
    );
}

#[tokio::test]
async fn an_api_that_is_away_gets_everything_later_and_in_order() {
    let away = Arc::new(AtomicU32::new(5));
    let accepted = Arc::<Mutex<Vec<Request>>>::default();
    let (answers, seen) = (Arc::clone(&away), Arc::clone(&accepted));
    let server = Server::start(move |request| {
        let left = answers.load(Ordering::SeqCst);
        if left > 0 {
            answers.store(left - 1, Ordering::SeqCst);
            return Response::new(503, "");
        }
        seen.lock().unwrap().push(request.clone());
        Response::new(200, "")
    })
    .unwrap();
    let folder = TempDir::new().unwrap();
    let log = start(&folder, api_sink(&server));
    let mut writer = log.writer();
    write_numbers(&mut writer, 0..5000).await;
    writer.close().await;
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    let error = summary.sinks[0].last_error.as_ref().unwrap();
    assert_eq!(error, "the API answers 503 Service Unavailable");
    let lines = posted(&accepted.lock().unwrap());
    assert_eq!(lines.len(), 5000);
    for (index, (number, line)) in lines.iter().enumerate() {
        assert_eq!(*number, index as u64 + 1);
        assert_eq!(*line, format!("line {index}"));
    }
}

#[tokio::test]
async fn requests_shrink_until_the_api_takes_them() {
    const MOST: usize = 10_000;
    let accepted = Arc::<Mutex<Vec<Request>>>::default();
    let seen = Arc::clone(&accepted);
    let server = Server::start(move |request| {
        if request.body.len() > MOST {
            return Response::new(413, "");
        }
        seen.lock().unwrap().push(request.clone());
        Response::new(200, "")
    })
    .unwrap();
    let folder = TempDir::new().unwrap();
    let log = start(&folder, api_sink(&server));
    let mut writer = log.writer();
    write_numbers(&mut writer, 0..1000).await;
    writer.close().await;
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    assert_eq!(posted(&accepted.lock().unwrap()).len(), 1000);
}

#[tokio::test]
async fn a_line_too_long_for_the_api_arrives_in_pieces_and_those_behind_it_after_it() {
    const MOST: usize = 20_000;
    let taken: Arc<Mutex<Vec<Request>>> = Arc::default();
    let seen = Arc::clone(&taken);
    let server = Server::start(move |request| {
        if request.body.len() > MOST {
            return Response::new(413, "");
        }
        let mut seen = seen.lock().unwrap();
        seen.push(request.clone());
        // The API refuses some pieces for other reasons. The sink sends them again.
        if seen.len() % 7 == 3 {
            seen.pop();
            seen.push(Request::default());
            return Response::new(503, "");
        }
        Response::new(200, "")
    })
    .unwrap();
    let folder = TempDir::new().unwrap();
    let log = start(&folder, api_sink(&server));
    let endless = "1234\u{20ac}".repeat(30_000);
    log.writer()
        .line(&format!("before\n{endless}\nafter"))
        .await;
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    let taken: Vec<_> = taken
        .lock()
        .unwrap()
        .iter()
        .filter(|request| !request.body.is_empty())
        .cloned()
        .collect();
    let mut lines = vec![String::new(); 3];
    let mut last = 1;
    for (number, output) in posted(&taken) {
        assert!(number >= last, "{number} after {last}");
        last = number;
        lines[usize::try_from(number).unwrap() - 1].push_str(&output);
    }
    assert_eq!(lines[0], "before");
    assert!(
        lines[1] == endless,
        "{} of {}",
        lines[1].len(),
        endless.len()
    );
    assert_eq!(lines[2], "after");
}

/// The outage lasts until the pauses between two attempts have become as long as they get.
#[tokio::test]
async fn a_redis_that_is_away_for_long_gets_what_was_written_meanwhile_once_and_in_order() {
    // The pauses begin with 50 ms and double. After the eighth failure, the sink pauses for 5 s for the first time.
    const FAILURES: u32 = 9;
    const LINES: u32 = 1200;
    let mut server = RedisServer::with(Options::default().keeps()).unwrap();
    let folder = TempDir::new().unwrap();
    let failures = Arc::<AtomicU32>::default();
    let sink = Counted(redis_sink(redis_at(&server)), Arc::clone(&failures));
    let log = start(&folder, Box::new(sink));
    let mut writer = log.writer();
    write_numbers(&mut writer, 0..LINES).await;
    let mut client = server.connect().unwrap();
    until("some lines arrive", async || {
        let entries: u32 = redis::cmd("XLEN")
            .arg(java::encode("412"))
            .query(&mut client)
            .unwrap();
        (entries > 0).then_some(())
    })
    .await;
    server.kill();
    for number in 1..=FAILURES {
        write_numbers(&mut writer, number * LINES..(number + 1) * LINES).await;
        failed(&failures, number).await;
    }
    server.restart().unwrap();
    writer.close().await;
    let summary = log.finish(LONG).await;
    assert!(summary.is_complete(), "{summary:?}");
    assert_whole(&server, (FAILURES + 1) * LINES);
}
