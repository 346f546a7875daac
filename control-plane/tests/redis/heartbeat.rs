//! Signs of life: there at once, as long as the run, and whatever Redis does.

use std::time::{Duration, Instant};

use control_plane::heartbeat::{Heartbeat, Heartbeats, key};
use control_plane::redis::RedisArgs;
use test_peers::redis::RedisServer;

use crate::support::{args, eventually, redis, redis_at};

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
async fn a_heartbeat_is_there_at_once_and_gone_at_the_end() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    let heartbeat = Heartbeat::start(&redis_at(&server), "42").unwrap();
    eventually("it beats", || is_alive(&mut client, "42")).await;
    let left = ttl(&mut client, "42");
    assert!((40..=45).contains(&left), "{left}");
    let value: Vec<u8> = redis::cmd("GET").arg(key("42")).query(&mut client).unwrap();
    assert_eq!(value, b"\xac\xed\x00\x05\x74\x00\x011");
    heartbeat.stop().await;
    assert_eq!(ttl(&mut client, "42"), -2, "the key is gone");
}

#[tokio::test]
async fn a_heartbeat_that_is_dropped_is_gone_too() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    let heartbeat = Heartbeat::start(&redis_at(&server), "42").unwrap();
    eventually("it beats", || is_alive(&mut client, "42")).await;
    drop(heartbeat);
    assert_eq!(ttl(&mut client, "42"), -2);
}

#[tokio::test]
async fn a_key_that_is_lost_is_written_again() {
    let mut server = RedisServer::start().unwrap();
    let heartbeat = Heartbeat::start(&redis_at(&server), "42").unwrap();
    let mut client = server.connect().unwrap();
    eventually("it beats", || is_alive(&mut client, "42")).await;
    // A server that forgets everything.
    server.restart().unwrap();
    let mut client = server.connect().unwrap();
    eventually("it beats again", || is_alive(&mut client, "42")).await;
    heartbeat.stop().await;
}

#[tokio::test]
async fn redis_may_come_later() {
    let mut server = RedisServer::start().unwrap();
    server.kill();
    let heartbeat = Heartbeat::start(&redis_at(&server), "42").unwrap();
    server.restart().unwrap();
    let mut client = server.connect().unwrap();
    eventually("it beats", || is_alive(&mut client, "42")).await;
    heartbeat.stop().await;
}

#[tokio::test]
async fn a_redis_that_says_nothing_delays_the_end_by_two_seconds_at_most() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    let heartbeat = Heartbeat::start(&redis_at(&server), "42").unwrap();
    eventually("it beats", || is_alive(&mut client, "42")).await;
    server.freeze().unwrap();
    let started = Instant::now();
    heartbeat.stop().await;
    assert!(started.elapsed() < Duration::from_secs(4));
    server.thaw().unwrap();
}

#[tokio::test]
async fn a_run_that_leaves_its_runtime_no_time_has_a_heartbeat_still() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    // This test's runtime has one thread, and the loop below never gives it back.
    let heartbeat = Heartbeat::start(&redis_at(&server), "42").unwrap();
    let started = Instant::now();
    while ttl(&mut client, "42") < 0 {
        assert!(started.elapsed() < Duration::from_secs(30));
        std::hint::spin_loop();
    }
    heartbeat.stop().await;
}

#[tokio::test]
async fn many_jobs_have_one_thread_and_come_and_go() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    let heartbeats = Heartbeats::start(&redis_at(&server)).unwrap();
    let mut beats: Vec<_> = (0..200)
        .map(|job| heartbeats.beat(&job.to_string()))
        .collect();
    for job in 0..200 {
        eventually("each beats", || is_alive(&mut client, &job.to_string())).await;
    }
    // A second reason for one of them, which keeps it.
    beats.push(heartbeats.beat("8"));
    drop(beats.drain(7..=8));
    beats.push(heartbeats.beat("200"));
    eventually("a new one beats", || is_alive(&mut client, "200")).await;
    // Somebody else may beat for a job that is forgotten here.
    assert!(ttl(&mut client, "7") > 0);
    for job in ["7", "8"] {
        let deleted: u64 = redis::cmd("DEL").arg(key(job)).query(&mut client).unwrap();
        assert_eq!(deleted, 1);
    }
    eventually("the other ones go on", || is_alive(&mut client, "8")).await;
    assert_eq!(ttl(&mut client, "7"), -2, "a forgotten one does not");
}

#[tokio::test]
async fn orders_do_not_wait_for_a_redis_that_is_away() {
    let mut server = RedisServer::start().unwrap();
    let settings = RedisArgs {
        redis_timeout: Some("500".to_owned()),
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
    eventually("the one that is left beats", || {
        is_alive(&mut client, "499")
    })
    .await;
    server.kill();
}
