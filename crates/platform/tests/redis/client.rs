//! Tests the client with every command, every kind of installation and every kind of failure.

use std::time::Duration;

use job_contract::chain;
use platform::redis::{Redis, RedisArgs, RedisError, Retention, StreamEntry, Taken};
use test_peers::redis::{Options, RedisCluster, RedisServer, Sentinel};
use test_peers::wait::until;
use tokio::time::Instant;

use crate::support::{args, redis, redis_at, until_it_answers};

const MINUTE: Duration = Duration::from_mins(1);

fn entry(text: &str) -> StreamEntry {
    vec![
        (b"name".to_vec(), b"value".to_vec()),
        (b"output".to_vec(), text.as_bytes().to_vec()),
    ]
}

/// Uses every command once.
async fn exercise(redis: &Redis) {
    redis.ping().await.unwrap();
    redis.set(b"key", b"one", MINUTE).await.unwrap();
    assert_eq!(redis.get(b"key").await.unwrap().unwrap(), b"one");
    redis.delete(b"key").await.unwrap();
    redis.delete(b"key").await.unwrap();
    assert_eq!(redis.get(b"key").await.unwrap(), None);
    redis.publish("channel", b"message").await.unwrap();

    assert_eq!(redis.last_id(b"stream").await.unwrap(), None);
    redis.create_group(b"stream", "CLI").await.unwrap();
    redis.create_group(b"stream", "CLI").await.unwrap();
    let entries: Vec<_> = (0..100).map(|n| entry(&n.to_string())).collect();
    let ids = redis
        .append(b"stream", &entries, Retention::default())
        .await
        .unwrap();
    assert_eq!(ids.len(), 100);
    assert_eq!(redis.last_id(b"stream").await.unwrap().as_ref(), ids.last());
    let all = redis.entries_after(b"stream", None, 1000).await.unwrap();
    assert!(all.iter().map(|stored| &stored.id).eq(&ids));
    assert!(all.iter().map(|stored| &stored.entry).eq(&entries));
    let next = redis
        .entries_after(b"stream", Some(&ids[41]), 2)
        .await
        .unwrap();
    assert_eq!([&next[0].id, &next[1].id], [&ids[42], &ids[43]]);
}

#[tokio::test]
async fn every_command_has_its_effect() {
    let server = RedisServer::start().unwrap();
    exercise(&redis_at(&server)).await;
}

#[tokio::test]
async fn keys_expire() {
    let server = RedisServer::start().unwrap();
    let redis = redis_at(&server);
    redis.set(b"key", b"value", MINUTE).await.unwrap();
    let retention = Retention {
        entries: Some(1),
        expiry: Some(MINUTE),
    };
    for _ in 0..3 {
        let many: Vec<_> = (0..200).map(|n| entry(&n.to_string())).collect();
        redis.append(b"stream", &many, retention).await.unwrap();
    }
    let mut client = server.connect().unwrap();
    for key in ["key", "stream"] {
        let left: i64 = redis::cmd("TTL").arg(key).query(&mut client).unwrap();
        assert!((50..=60).contains(&left), "{key}: {left}");
    }
    let length: u64 = redis::cmd("XLEN").arg("stream").query(&mut client).unwrap();
    assert!(length <= 200, "{length} entries are kept");
}

#[tokio::test]
async fn one_of_many_clients_gets_a_key_and_the_others_its_value() {
    let server = RedisServer::start().unwrap();
    let tasks: Vec<_> = (0..20)
        .map(|number| {
            let redis = redis_at(&server);
            tokio::spawn(async move {
                let value = format!("holder {number}");
                let taken = redis.take(b"claim", value.as_bytes(), MINUTE).await;
                (value, taken.unwrap())
            })
        })
        .collect();
    let mut answers = Vec::new();
    for task in tasks {
        answers.push(task.await.unwrap());
    }
    let (winners, losers): (Vec<_>, Vec<_>) = answers
        .into_iter()
        .partition(|(_, taken)| *taken == Taken::Ours);
    let [(winner, _)] = &winners[..] else {
        panic!("{winners:?}");
    };
    let held = Taken::ByOther(winner.clone().into_bytes());
    assert!(losers.iter().all(|(_, taken)| *taken == held));
    // A caller that lost the answer repeats the call.
    let redis = redis_at(&server);
    let again = redis.take(b"claim", winner.as_bytes(), MINUTE).await;
    assert_eq!(again.unwrap(), Taken::Ours);
}

#[tokio::test]
async fn a_user_with_minimal_rights_connects_over_tls() {
    let options = Options::default()
        .tls()
        .user("mayfly", "hunter22", "~* &* +@all -client");
    let server = RedisServer::with(options).unwrap();
    let settings = RedisArgs {
        redis_username: Some("mayfly".into()),
        redis_password: Some("hunter22".into()),
        redis_ssl: Some("true".into()),
        redis_ca_file: Some(server.ca_file().to_str().unwrap().into()),
        ..args(&server)
    };
    exercise(&redis(&settings)).await;

    let unknown = RedisArgs {
        redis_ca_file: None,
        ..settings.clone()
    };
    let error = redis(&unknown).ping().await.unwrap_err();
    assert!(matches!(error, RedisError::Connect { .. }), "{error:?}");
    assert!(chain(&error).contains("certificate"), "{}", chain(&error));

    let wrong = RedisArgs {
        redis_password: Some("wrong-hunter22".into()),
        ..settings
    };
    let redis = redis(&wrong);
    let error = redis.ping().await.unwrap_err();
    assert!(
        chain(&error).to_lowercase().contains("auth"),
        "{}",
        chain(&error)
    );
    assert!(!format!("{error:?} {} {redis:?}", chain(&error)).contains("hunter22"));
}

#[tokio::test]
async fn a_password_alone_is_enough() {
    let server = RedisServer::with(Options::default().password("hunter22")).unwrap();
    let settings = RedisArgs {
        redis_password: Some("hunter22".into()),
        ..args(&server)
    };
    exercise(&redis(&settings)).await;
}

#[tokio::test]
async fn redirects_of_a_cluster_are_followed() {
    let cluster = RedisCluster::start().unwrap();
    let settings = RedisArgs {
        redis_cluster_nodes: Some(cluster.nodes()[0].address().into()),
        ..RedisArgs::default()
    };
    let redis = redis(&settings);
    exercise(&redis).await;
    for number in 0..100 {
        let key = format!("key {number}").into_bytes();
        redis.set(&key, &key, MINUTE).await.unwrap();
        let entries = [entry("a"), entry("b")];
        let stream = format!("stream {number}").into_bytes();
        let ids = redis.append(&stream, &entries, Retention::default()).await;
        assert_eq!(ids.unwrap().len(), 2);
    }
    for node in cluster.nodes() {
        let keys: u64 = redis::cmd("DBSIZE")
            .query(&mut node.connect().unwrap())
            .unwrap();
        assert!(keys > 20, "the keys are spread over the nodes: {keys}");
    }
}

#[tokio::test]
async fn a_slot_that_is_moving_is_asked_for_at_its_new_node() {
    let cluster = RedisCluster::start().unwrap();
    let settings = RedisArgs {
        redis_cluster_nodes: Some(cluster.addresses().into()),
        ..RedisArgs::default()
    };
    let redis = redis(&settings);
    // Slot 12182 belongs to the last node.
    let (from, to) = (&cluster.nodes()[2], &cluster.nodes()[0]);
    let id = |server: &RedisServer| -> String {
        redis::cmd("CLUSTER")
            .arg("MYID")
            .query(&mut server.connect().unwrap())
            .unwrap()
    };
    for (server, state, other) in [(to, "IMPORTING", id(from)), (from, "MIGRATING", id(to))] {
        redis::cmd("CLUSTER")
            .arg("SETSLOT")
            .arg(12_182)
            .arg(state)
            .arg(other)
            .exec(&mut server.connect().unwrap())
            .unwrap();
    }
    redis.set(b"foo", b"bar", MINUTE).await.unwrap();
    assert_eq!(redis.get(b"foo").await.unwrap().unwrap(), b"bar");
    let keys: u64 = redis::cmd("DBSIZE")
        .query(&mut to.connect().unwrap())
        .unwrap();
    assert_eq!(keys, 1);
}

#[tokio::test]
async fn sentinels_lead_to_the_server_and_after_a_failover_to_the_next() {
    let mut first = RedisServer::start().unwrap();
    let second = RedisServer::with(
        Options::default().set("replicaof", &format!("127.0.0.1 {}", first.port())),
    )
    .unwrap();
    let sentinel = Sentinel::watch(&first, "").unwrap();
    let settings = RedisArgs {
        redis_sentinel_master: Some("mymaster".into()),
        redis_sentinel_nodes: Some(format!("127.0.0.1:1,{}", sentinel.address()).into()),
        // Some operators set these credentials for Redis. A sentinel without a password refuses them.
        redis_sentinel_password: None,
        ..RedisArgs::default()
    };
    let redis = redis(&settings);
    exercise(&redis).await;

    // The sentinel discovers the second server through the first.
    let mut watcher = redis::Client::open(format!("redis://{}/", sentinel.address()))
        .unwrap()
        .get_connection()
        .unwrap();
    until("the replica is known", async || {
        let known: Vec<redis::Value> = redis::cmd("SENTINEL")
            .arg("replicas")
            .arg("mymaster")
            .query(&mut watcher)
            .unwrap();
        (!known.is_empty()).then_some(())
    })
    .await;
    sentinel.lose_patience().unwrap();
    first.kill();
    until("the failover", async || {
        let set = redis.set(b"after", b"failover", MINUTE).await;
        set.map_err(|error| chain(&error))
    })
    .await;
    let there: String = redis::cmd("GET")
        .arg("after")
        .query(&mut second.connect().unwrap())
        .unwrap();
    assert_eq!(there, "failover");
}

#[tokio::test]
async fn credentials_that_a_sentinel_rejects_are_still_sent_to_redis() {
    let server = RedisServer::with(Options::default().password("hunter22")).unwrap();
    let sentinel = Sentinel::watch(&server, "sentinel auth-pass mymaster hunter22").unwrap();
    let settings = RedisArgs {
        redis_sentinel_master: Some("mymaster".into()),
        redis_sentinel_nodes: Some(sentinel.address().into()),
        redis_sentinel_password: Some("hunter22".into()),
        ..RedisArgs::default()
    };
    exercise(&redis(&settings)).await;
}

#[tokio::test]
async fn a_master_name_unknown_to_the_sentinels_is_an_error() {
    let server = RedisServer::start().unwrap();
    let sentinel = Sentinel::watch(&server, "").unwrap();
    let settings = RedisArgs {
        redis_sentinel_master: Some("other".into()),
        redis_sentinel_nodes: Some(sentinel.address().into()),
        ..RedisArgs::default()
    };
    let error = redis(&settings).ping().await.unwrap_err();
    assert_eq!(error.to_string(), "no sentinel names the server of `other`");
}

#[tokio::test]
async fn a_restarted_server_is_reconnected_without_an_error() {
    let mut server = RedisServer::start().unwrap();
    let redis = redis_at(&server);
    redis.ping().await.unwrap();
    server.restart().unwrap();
    redis.set(b"key", b"value", MINUTE).await.unwrap();
    server.kill();
    let error = redis.get(b"key").await.unwrap_err();
    assert!(error.to_string().contains("Redis"), "{}", chain(&error));
    server.restart().unwrap();
    assert_eq!(redis.get(b"key").await.unwrap(), None);
}

#[tokio::test]
async fn a_server_that_does_not_respond_costs_one_timeout() {
    let server = RedisServer::start().unwrap();
    let redis = redis(&RedisArgs {
        redis_timeout: Some("15000".into()),
        ..args(&server)
    });
    until_it_answers(&redis).await;
    server.freeze().unwrap();
    // The server never answers, so only a timeout moves the clock.
    tokio::time::pause();
    for _ in 0..2 {
        let started = Instant::now();
        let error = redis.ping().await.unwrap_err();
        assert!(
            chain(&error).contains("15000 ms") || chain(&error).contains("timed out"),
            "{}",
            chain(&error)
        );
        assert_eq!(started.elapsed().as_secs(), 15);
    }
    tokio::time::resume();
    server.thaw().unwrap();
    until_it_answers(&redis).await;
}
