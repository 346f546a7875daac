//! What hostile executors and agents may take of a hub: turns, bytes, and time.

use std::fs;
use std::time::Duration;

use axum::body::Bytes;
use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
use pool_protocol::path::{self, LeaseCall};
use pool_protocol::problem::Code;
use pool_protocol::task::LeasedTask;
use pool_protocol::token::PoolToken;
use pool_protocol::version;
use reqwest::{Method, StatusCode};
use serde_json::json;
use test_peers::s3::S3;
use test_peers::wait::{DEADLINE, until};
use test_platform::{Flow, NewJob, Status, Workspace};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

use super::artifacts;
use super::client::{Client, executor_of};
use super::fixture::{Fixture, Hub};

/// Enough tasks for all turns of the relay: each has eight.
const TASKS: usize = 32;
const REQUESTS: usize = 8;
/// Requests of a pool that the relay answers at a time.
const AT_ONCE: usize = 64;
/// More than the buffers of a connection take.
const LARGE: usize = 2 << 20;
/// Enough for the relay to answer others meanwhile, if it would.
const READS: usize = 20;
/// How an answer begins whose request has had its turn.
const GRANTED: &[u8; 12] = b"HTTP/1.1 200";
/// For all uploads of a test.
const LONG: Duration = Duration::from_mins(5);

/// A hub with pools `eu` and `us` for all organizations, and an agent of each.
fn two_pools(fixture: &Fixture) -> (Hub, Client, Client) {
    let us = PoolToken::new("us".parse().unwrap());
    let pool = |name: &str, token: &PoolToken| {
        let digest = token.digest();
        format!("  {name}: {{organizations: ['*'], tokens: [{{id: t, sha256: {digest}}}]}}\n")
    };
    let pools = [pool("eu", &fixture.token), pool("us", &us)].concat();
    fixture.replace_pools(&format!("pools:\n{pools}"));
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let other = agent.with_token(us.reveal());
    (hub, agent, other)
}

/// Dispatches plans to a pool and leases and accepts them. Returns their executors.
async fn running(
    fixture: &Fixture,
    (hub, pool): (&Hub, &str),
    agent: &Client,
    count: usize,
) -> Vec<(Client, LeasedTask)> {
    fixture.dispatch_to(hub, pool);
    for _ in 0..count {
        fixture.start_plan();
    }
    let instance = agent.register().await;
    let mut leases = Vec::new();
    for _ in 0..count {
        let lease = agent.take(instance, &leases).await;
        executor_of(agent, &lease).accept(&lease, "pod").await.ok();
        leases.push(lease);
    }
    let executor = |lease: LeasedTask| (executor_of(agent, &lease), lease);
    leases.into_iter().map(executor).collect()
}

/// Sends the head of a request of an executor, on a connection with small buffers.
async fn send_head(hub: &Hub, lease: &LeasedTask, request: &str, more: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(hub.address()).await.unwrap();
    let (method, below) = request.split_once(' ').unwrap();
    let head = format!(
        "{method} {}{below} HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {}\r\n{more}\r\n",
        path::relay(lease.task_id, lease.lease_id),
        lease.job_token
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

/// Begins a request with a body. The hub has checked the head and waits for the body.
async fn begin(hub: &Hub, lease: &LeasedTask, request: &str, length: usize) -> TcpStream {
    let more = format!("Content-Length: {length}\r\nExpect: 100-continue\r\n");
    let mut stream = send_head(hub, lease, request, &more).await;
    let expected = b"HTTP/1.1 100 Continue\r\n\r\n";
    let mut found = vec![0; expected.len()];
    stream.read_exact(&mut found).await.unwrap();
    assert_eq!(found, expected, "{}", String::from_utf8_lossy(&found));
    stream
}

async fn reads_its_job(fixture: &Fixture, (executor, lease): &(Client, LeasedTask)) {
    let job = &lease.task.job_id;
    let path = format!(
        "/api/v1/organization/{}/job/{job}?include=step",
        fixture.platform.organization()
    );
    let read = executor.relay(lease, Method::GET, &path, None);
    let answer = tokio::time::timeout(DEADLINE, read).await;
    answer.expect("the other pool waits").ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_never_come_delay_no_other_pool() {
    let fixture = Fixture::new().await;
    let (hub, agent, other) = two_pools(&fixture);
    let hostile = running(&fixture, (&hub, "eu"), &agent, TASKS).await;
    let good = running(&fixture, (&hub, "us"), &other, 1).await;
    let all = hostile.iter().flat_map(|one| [one; REQUESTS]);
    let open = all.map(|(_, lease)| begin(&hub, lease, "POST /logs", 1000));
    // Some at a time: the store is not what is tested.
    let open: Vec<_> = stream::iter(open)
        .buffer_unordered(REQUESTS)
        .collect()
        .await;
    reads_its_job(&fixture, &good[0]).await;
    drop(open);
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_are_never_read_delay_no_other_pool() {
    let fixture = Fixture::new().await;
    let (hub, agent, other) = two_pools(&fixture);
    let hostile = running(&fixture, (&hub, "eu"), &agent, TASKS).await;
    let good = running(&fixture, (&hub, "us"), &other, 1).await;
    let large = json!({"k": "x".repeat(LARGE)});
    fixture.platform.edit(|records| {
        for (_, lease) in &hostile {
            let context = large.as_object().unwrap().clone();
            records
                .contexts
                .insert(lease.task.job_id.parse().unwrap(), context);
        }
    });
    let mut answered = JoinSet::new();
    for (_, lease) in &hostile {
        let request = format!("GET /context/v1/{}", lease.task.job_id);
        for _ in 0..REQUESTS {
            let mut stream = send_head(&hub, lease, &request, "Connection: close\r\n").await;
            answered.spawn(async move {
                let mut start = [0; GRANTED.len()];
                let read = stream.read_exact(&mut start).await;
                (stream, read.is_ok() && start == *GRANTED)
            });
        }
    }
    // All that the relay answers at a time: 64 of the pool, and no more while these are not read.
    let mut open = Vec::new();
    while open.len() < AT_ONCE {
        let next = tokio::time::timeout(DEADLINE, answered.join_next()).await;
        let next = next.unwrap_or_else(|_| panic!("only {} were answered", open.len()));
        let (stream, is_granted) = next.unwrap().unwrap();
        if is_granted {
            open.push(stream);
        }
    }
    for _ in 0..READS {
        reads_its_job(&fixture, &good[0]).await;
    }
    while let Some(next) = answered.try_join_next() {
        let (stream, is_granted) = next.unwrap();
        if is_granted {
            open.push(stream);
        }
    }
    drop(answered);
    let granted = open.len();
    let ends = join_all(open.into_iter().map(|mut stream| async move {
        let read = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
        read.is_ok_and(|length| length > LARGE as u64)
    }));
    let ends = tokio::time::timeout(DEADLINE, ends).await.unwrap();
    // On a slow machine, the hub has given some up meanwhile. Their turns were free again.
    let given_up = ends.iter().filter(|is_whole| !**is_whole).count();
    assert!(granted - given_up <= AT_ONCE, "{granted}, {given_up}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_ends_while_its_body_arrives_reports_nothing_more() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let tasks = running(&fixture, (&hub, "eu"), &agent, 1).await;
    let (executor, lease) = &tasks[0];
    let task = &lease.task;
    let report =
        json!({"data": {"type": "step", "id": task.step_id, "attributes": {"status": "failed"}}});
    let report = report.to_string();
    let request = format!(
        "PATCH /api/v1/organization/{}/job/{}/step/{}",
        task.organization_id, task.job_id, task.step_id
    );
    let mut stream = begin(&hub, lease, &request, report.len()).await;
    let (first, rest) = report.split_at(10);
    stream.write_all(first.as_bytes()).await.unwrap();

    let end = json!({"exitCode": 0, "reported": true});
    executor.lease(lease, LeaseCall::Complete, end).await.ok();
    stream.write_all(rest.as_bytes()).await.unwrap();
    let mut answer = vec![0; 1024];
    let length = stream.read(&mut answer).await.unwrap();
    let answer = String::from_utf8_lossy(&answer[..length]);
    assert!(answer.starts_with("HTTP/1.1 409 "), "{answer}");
    let job = task.job_id.parse().unwrap();
    assert_eq!(fixture.reports(job, Status::Failed), 0);
}

/// More bodies than the share of a pool has room for, if each is as long as it may be.
const BODIES: usize = 17;

/// Sends the end of a task without its last byte.
async fn send_end(hub: &Hub, lease: &LeasedTask) -> TcpStream {
    let length = 64 * 1024;
    let head = format!(
        "POST {} HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {}\r\n{}: {}\r\nContent-Length: {length}\r\n\r\n",
        path::lease(lease.task_id, lease.lease_id, LeaseCall::Fail),
        lease.job_token,
        version::HEADER,
        version::VERSION
    );
    let mut stream = TcpStream::connect(hub.address()).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&vec![b' '; length - 1]).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn the_token_of_a_run_silences_neither_its_agent_nor_another_run() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let tasks = running(&fixture, (&hub, "eu"), &agent, 3).await;
    let [(ended, over), (executor, hostile), (good, lease)] = &tasks[..] else {
        panic!("three tasks");
    };
    let end = json!({"exitCode": 0, "reported": true});
    ended.lease(over, LeaseCall::Complete, end).await.ok();
    let mut answer = vec![0; 1024];
    let mut stream = send_end(&hub, over).await;
    let read = tokio::time::timeout(DEADLINE, stream.read(&mut answer)).await;
    let length = read.expect("the hub waits for the body").unwrap();
    let answer = String::from_utf8_lossy(&answer[..length]);
    assert!(answer.starts_with("HTTP/1.1 409 "), "{answer}");

    let open = join_all((0..BODIES).map(|_| send_end(&hub, hostile))).await;
    // The hub has read what has its share: a whole body gets no room. It ends nothing, because it is wrong.
    let wrong = json!({"diagnostic": 1, "more": "x".repeat(60_000)});
    let is_full = async || {
        let answer = executor.lease(hostile, LeaseCall::Fail, wrong.clone());
        answer.await.refused() == Code::RateLimited
    };
    until("bodies get no room", is_full).await;
    let instance = agent.register().await;
    agent.heartbeat(instance).await.ok();
    agent.try_request(instance, 0, &[lease.lease_id]).await.ok();
    good.lease_heartbeat(lease, "pod").await.ok();
    executor.lease_heartbeat(hostile, "pod").await.ok();
    drop(open);
}

/// Half of the limit of the chart, which also holds connections, the ends of logs and answers of the relay.
const MEMORY: u64 = 256 << 20;

/// The most memory that a hub ever had, in bytes, without pages of files: those of its program, which is not optimised here, the kernel takes
/// back when memory is short.
fn peak(hub: &Hub) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", hub.0.running.pid())).unwrap();
    let kilobytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line.unwrap().trim().trim_end_matches(" kB");
        number.parse::<u64>().unwrap()
    };
    (kilobytes("VmHWM:") - kilobytes("RssFile:")) * 1024
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_agents_stay_below_the_memory_of_the_hub() {
    let fixture = Fixture::new().await;
    let (hub, _, other) = two_pools(&fixture);
    let length = 512 * 1024;
    let head = format!(
        "POST {} HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {}\r\n{}: {}\r\nContent-Length: {length}\r\n\r\n",
        path::REGISTER,
        fixture.token.reveal(),
        version::HEADER,
        version::VERSION
    );
    let body = vec![b' '; length - 1];
    let open = (0..600).map(async |_| {
        let mut stream = TcpStream::connect(hub.address()).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        // The last byte never comes. Until then, the hub reads the body, whether it keeps it or not.
        stream.write_all(&body).await.unwrap();
        stream
    });
    let open = join_all(open).await;
    // Agents of the other pool are served.
    other.register().await;
    let peak = peak(&hub);
    assert!(peak < MEMORY, "{} MiB", peak >> 20);
    drop(open);
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_large_plans_at_a_time_are_stored_in_128_megabytes() {
    const UPLOADS: usize = 50;
    // Three parts of an object. Together they are five times the memory.
    const PLAN: usize = 12 << 20;
    let store = S3::start_open().unwrap();
    let fixture = Fixture::with_store(&store).await;
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let all = running(&fixture, (&hub, "eu"), &agent, UPLOADS).await;
    let plan = Bytes::from(vec![b'x'; PLAN]);
    let digest = artifacts::digest(&plan);
    let upload = async |(executor, lease): &(Client, LeasedTask)| {
        let path = path::relay(lease.task_id, lease.lease_id);
        let path = path.replace("/platform", "/artifacts/plan");
        // As executors do.
        let is_stored = async || {
            let request = executor
                .plain(Method::PUT, &path)
                .bearer_auth(&lease.job_token);
            let request = request.header("content-digest", &digest).body(plan.clone());
            let answer = request.timeout(LONG).send().await;
            match answer.map(|answer| answer.status()) {
                Ok(StatusCode::NO_CONTENT) => Some(()),
                Ok(StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) | Err(_) => {
                    None
                }
                Ok(status) => panic!("{status}"),
            }
        };
        while is_stored().await.is_none() {}
    };
    join_all(all.iter().map(upload)).await;
    let peak = peak(&hub);
    assert!(peak < 128 << 20, "{} MiB", peak >> 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn documents_of_many_variables_pass_unchanged_and_stay_below_the_memory_of_the_hub() {
    const DOCUMENTS: usize = 32;
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let variables: Vec<String> = (0..262_000).map(|n| format!(r#""v{n:06}": "" "#)).collect();
    let variables = variables.join(",");
    let documents: Vec<String> = (0..DOCUMENTS)
        .map(|_| {
            let workspace = Workspace::new("https://git.example.test/a.git");
            let workspace = fixture.platform.workspace(workspace);
            let flow = Flow::only("terraformPlan");
            let queue = |job: &mut test_platform::Job| job.status = Status::Queue;
            let job = fixture.platform.store_job(NewJob::new(&workspace, flow), queue);
            let job = fixture.platform.job(job);
            format!(
                r#"{{"type":"terraformPlan", "organizationId":"{}","workspaceId":"{workspace}","jobId":"{}","stepId":"{}","variables":{{{variables}}}}}"#,
                fixture.platform.organization(),
                job.id,
                job.steps[0].id
            )
        })
        .collect();
    assert!(documents[0].len() < 4 << 20);
    // Dispatches wait for their memory, as long as the platform does.
    let http = reqwest::Client::builder()
        .no_proxy()
        .tcp_user_timeout(None::<Duration>)
        .timeout(2 * DEADLINE)
        .build()
        .unwrap();
    let url = format!("{}/pools/eu/api/v1/terraform-rs", hub.url());
    let token = fixture.platform.dispatch_token();
    let dispatch = async |document: &String| {
        let request = http.post(&url).bearer_auth(&token).body(document.clone());
        request.send().await.unwrap().status()
    };
    let answers = join_all(documents.iter().map(dispatch)).await;
    assert!(
        answers.iter().all(|status| *status == StatusCode::ACCEPTED),
        "{answers:?}"
    );

    let agent = fixture.client(&hub);
    let mut leased = Vec::new();
    for number in 0..DOCUMENTS {
        let registered = agent
            .try_register(&format!("eu-{number}"), "one")
            .await
            .ok();
        let body = json!({"instanceId": registered["instanceId"], "availableCapacity": 1, "waitSeconds": 50});
        let request = agent
            .plain(Method::POST, path::REQUEST_TASK)
            .header(version::HEADER, version::VERSION)
            .bearer_auth(fixture.token.reveal())
            .json(&body);
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        let text = answer.text().await.unwrap();
        leased.push(serde_json::from_str::<LeasedTask>(&text).unwrap());
    }
    for lease in &leased {
        let payload = lease.task.payload.get();
        assert!(documents.iter().any(|document| document == payload));
    }
    let peak = peak(&hub);
    assert!(peak < MEMORY, "{} MiB", peak >> 20);
}
