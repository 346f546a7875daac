//! Heartbeats begin at once, last as long as the run, and survive failures of Redis.

use std::time::Duration;

use platform::heartbeat::{Heartbeat, HeartbeatState, Heartbeats, heartbeat_state, key};
use platform::java;
use platform::redis::RedisArgs;
use test_peers::redis::RedisServer;
use test_peers::wait::{until, until_blocking};
use tokio::time::Instant;

use crate::support::{args, redis, redis_at};

fn ttl(client: &mut redis::Connection, job: &str) -> i64 {
    redis::cmd("TTL").arg(key(job)).query(client).unwrap()
}

fn is_alive(client: &mut redis::Connection, job: &str) -> Option<()> {
    (ttl(client, job) > 0).then_some(())
}

#[test]
fn the_key_is_the_one_the_platform_looks_for() {
    assert_eq!(
        key("42"),
        b"\xac\xed\x00\x05\x74\x00\x19executor-job-heartbeat:42"
    );
}

#[tokio::test]
async fn a_heartbeat_exists_from_the_start_to_the_end() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    let heartbeat = Heartbeat::start(&redis_at(&server), "42").unwrap();
    until("it beats", async || is_alive(&mut client, "42")).await;
    // It is counted down until it is written again.
    until("it lives for 45 seconds", async || {
        let left = ttl(&mut client, "42");
        assert!(left <= 45, "{left}");
        left >= 44
    })
    .await;
    let value: Vec<u8> = redis::cmd("GET").arg(key("42")).query(&mut client).unwrap();
    assert_eq!(value, b"\xac\xed\x00\x05\x74\x00\x011");
    heartbeat.stop().await;
    assert_eq!(ttl(&mut client, "42"), -2, "the key is gone");
}

#[tokio::test]
async fn a_dropped_heartbeat_is_removed() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    let heartbeat = Heartbeat::start(&redis_at(&server), "42").unwrap();
    until("it beats", async || is_alive(&mut client, "42")).await;
    drop(heartbeat);
    assert_eq!(ttl(&mut client, "42"), -2);
}

#[tokio::test]
async fn a_key_that_is_lost_is_written_again() {
    let mut server = RedisServer::start().unwrap();
    let heartbeat = Heartbeat::start(&redis_at(&server), "42").unwrap();
    let mut client = server.connect().unwrap();
    until("it beats", async || is_alive(&mut client, "42")).await;
    // The restarted server has lost all keys.
    server.restart().unwrap();
    let mut client = server.connect().unwrap();
    until("it beats again", async || is_alive(&mut client, "42")).await;
    heartbeat.stop().await;
}

#[tokio::test]
async fn a_heartbeat_is_written_once_redis_is_available() {
    let mut server = RedisServer::start().unwrap();
    server.kill();
    let heartbeat = Heartbeat::start(&redis_at(&server), "42").unwrap();
    server.restart().unwrap();
    let mut client = server.connect().unwrap();
    until("it beats", async || is_alive(&mut client, "42")).await;
    heartbeat.stop().await;
}

#[tokio::test]
async fn a_redis_that_does_not_respond_delays_the_end_by_two_seconds() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    let heartbeat = Heartbeat::start(&redis_at(&server), "42").unwrap();
    until("it beats", async || is_alive(&mut client, "42")).await;
    server.freeze().unwrap();
    tokio::time::pause();
    let started = Instant::now();
    heartbeat.stop().await;
    assert_eq!(started.elapsed().as_secs(), 2);
    server.thaw().unwrap();
}

#[tokio::test]
async fn a_run_that_leaves_its_runtime_no_time_has_a_heartbeat_still() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    // This test's runtime has one thread, and the loop below blocks it.
    let heartbeat = Heartbeat::start(&redis_at(&server), "42").unwrap();
    until_blocking("it beats", || ttl(&mut client, "42") >= 0);
    heartbeat.stop().await;
}

#[tokio::test]
async fn heartbeats_of_many_jobs_share_one_thread() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    let heartbeats = Heartbeats::start(&redis_at(&server)).unwrap();
    let mut beats: Vec<_> = (0..200)
        .map(|job| heartbeats.beat(&job.to_string()))
        .collect();
    for job in 0..200 {
        until("each beats", async || {
            is_alive(&mut client, &job.to_string())
        })
        .await;
    }
    // A second reason keeps the heartbeat of this job.
    beats.push(heartbeats.beat("8"));
    drop(beats.drain(7..=8));
    beats.push(heartbeats.beat("200"));
    until("a new one beats", async || is_alive(&mut client, "200")).await;
    // The key expires by itself, because another process may send heartbeats for the job.
    assert!(ttl(&mut client, "7") > 0);
    for job in ["7", "8"] {
        let deleted: u64 = redis::cmd("DEL").arg(key(job)).query(&mut client).unwrap();
        assert_eq!(deleted, 1);
    }
    until("the other ones go on", async || is_alive(&mut client, "8")).await;
    assert_eq!(ttl(&mut client, "7"), -2, "a forgotten one does not");
}

#[tokio::test]
async fn orders_do_not_wait_for_an_unavailable_redis() {
    let mut server = RedisServer::start().unwrap();
    let settings = RedisArgs {
        redis_timeout: Some("500".into()),
        ..args(&server)
    };
    server.freeze().unwrap();
    let heartbeats = Heartbeats::start(&redis(&settings)).unwrap();
    let mut beats: Vec<_> = (0..500)
        .map(|job| heartbeats.beat(&job.to_string()))
        .collect();
    drop(beats.drain(..499));
    server.thaw().unwrap();
    let mut client = server.connect().unwrap();
    until("the one that is left beats", async || {
        is_alive(&mut client, "499")
    })
    .await;
    server.kill();
}

fn write(client: &mut redis::Connection, value: &str) {
    let mut set = redis::cmd("SET");
    set.arg(key("42"))
        .arg(java::encode(value))
        .arg("EX")
        .arg(45);
    set.exec(client).unwrap();
}

fn written(client: &mut redis::Connection) -> Option<String> {
    let value: Option<Vec<u8>> = redis::cmd("GET").arg(key("42")).query(client).unwrap();
    value.map(|value| java::decode(&value).unwrap())
}

const MINUTE: Duration = Duration::from_mins(1);

#[tokio::test]
async fn a_launcher_sends_heartbeats_only_until_the_executor_does() {
    let server = RedisServer::start().unwrap();
    let (mut client, redis) = (server.connect().unwrap(), redis_at(&server));
    let launchers = Heartbeats::start(&redis).unwrap();
    let waiting = launchers.beat("42");
    until("it beats", async || is_alive(&mut client, "42")).await;
    assert_eq!(
        heartbeat_state(&redis, "42").await.unwrap(),
        HeartbeatState::FromLauncher
    );

    // The executor starts. Its value is not overwritten.
    let starting = launchers.beat_until_taken_over("42", MINUTE);
    drop(waiting);
    write(&mut client, "1");
    let another = launchers.beat("43");
    until("a round of beats has begun", async || {
        (ttl(&mut client, "43") > 0).then_some(())
    })
    .await;
    let mut expire = redis::cmd("EXPIRE");
    expire.arg(key("43")).arg(30).exec(&mut client).unwrap();
    until("a whole round is over", async || {
        (ttl(&mut client, "43") > 40).then_some(())
    })
    .await;
    assert_eq!(
        heartbeat_state(&redis, "42").await.unwrap(),
        HeartbeatState::FromExecutor
    );
    assert!(ttl(&mut client, "42") < 45);

    // The executor dies. The launcher sends no heartbeats for it.
    redis::cmd("DEL").arg(key("42")).exec(&mut client).unwrap();
    expire.exec(&mut client).unwrap();
    until("another round is over", async || {
        (ttl(&mut client, "43") > 40).then_some(())
    })
    .await;
    assert_eq!(
        heartbeat_state(&redis, "42").await.unwrap(),
        HeartbeatState::Missing
    );

    // Kubernetes creates another pod, which must start first.
    let waiting = launchers.beat("42");
    until("it beats again", async || is_alive(&mut client, "42")).await;
    assert_eq!(written(&mut client).as_deref(), Some("launcher"));
    drop((starting, waiting, another));
}

#[tokio::test]
async fn a_launcher_sends_heartbeats_for_an_executor_that_may_still_start() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    let launchers = Heartbeats::start(&redis_at(&server)).unwrap();
    let soon = launchers.beat_until_taken_over("42", MINUTE);
    until("it beats", async || is_alive(&mut client, "42")).await;
    drop(soon);
    redis::cmd("DEL").arg(key("42")).exec(&mut client).unwrap();
    // The executor started long ago, as after a restart of the launcher.
    let late = launchers.beat_until_taken_over("42", Duration::ZERO);
    let other = launchers.beat("43");
    until("the other one beats", async || is_alive(&mut client, "43")).await;
    assert_eq!(written(&mut client), None);
    drop((late, other));
}
