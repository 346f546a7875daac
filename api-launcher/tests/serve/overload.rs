//! Clients that hold connections and do nothing with them.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;

use reqwest::StatusCode;
use test_peers::wait::DEADLINE;

use crate::harness::Fixture;

/// More than the launcher has for all its clients.
const IDLE: usize = 600;
const UNREAD: usize = 50;
const SLOW: usize = 50;

fn connect(address: &str, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

/// Pipelines requests until neither side takes more, and reads no response.
fn never_read(address: &str) -> TcpStream {
    let mut stream = connect(address, b"");
    // A large buffer would take thousands of responses.
    let socket = socket2::SockRef::from(&stream);
    socket.set_recv_buffer_size(16 * 1024).unwrap();
    stream.set_nonblocking(true).unwrap();
    let heads = "GET /actuator/health HTTP/1.1\r\nHost: a\r\n\r\n".repeat(1000);
    while stream.write(heads.as_bytes()).is_ok() {}
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_that_is_flooded_by_one_client_answers_probes_and_accepts_runs() {
    let files = runtime::open_files::allow_open_files(4096);
    assert!(files >= 2048, "the system allows only {files} open files");
    let fixture = Fixture::new();
    // So few open files leave it 512 connections.
    let mut command = Command::new("bash");
    let program = env!("CARGO_BIN_EXE_api-launcher");
    command.args(["-c", "ulimit -n 1536 && exec \"$0\" \"$@\"", program]);
    fixture.configure(&mut command);
    command.env("MAYFLY_HEALTH_LISTEN", "127.0.0.1:0");
    let launcher = fixture.start(&mut command);
    let health = launcher.wait_for("answers health checks and serves metrics", |_| true);
    let health = health["address"].as_str().unwrap().to_owned();
    let address = launcher.url("").trim_start_matches("http://").to_owned();

    let mut held: Vec<_> = (0..IDLE).map(|_| connect(&address, b"")).collect();
    held.extend((0..UNREAD).map(|_| never_read(&address)));
    held.extend((0..SLOW).map(|_| connect(&address, b"POST /api/v1/terraform-rs HTTP/1.1\r\n")));
    held.extend((0..SLOW).map(|_| connect(&health, b"GET")));

    let get = async |address: &str, path: &str| {
        let url = format!("http://{address}{path}");
        // A new connection, as those of the kubelet.
        let client = reqwest::Client::builder().no_proxy().timeout(DEADLINE);
        client.build().unwrap().get(url).send().await
    };
    for _ in 0..5 {
        for path in [
            "/metrics",
            "/actuator/health/liveness",
            "/actuator/health/readiness",
        ] {
            let answer = get(&health, path).await.unwrap();
            assert_eq!(answer.status(), StatusCode::OK, "{path}");
        }
        let answer = get(&address, "/actuator/health").await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
    }
    let metrics = get(&address, "/metrics").await.unwrap();
    assert_eq!(metrics.status(), StatusCode::NOT_FOUND);
    let page = get(&health, "/api/v1/terraform-rs").await.unwrap();
    assert_eq!(page.status(), StatusCode::NOT_FOUND);
    let accepted = launcher.request(&fixture.script(1, "")).timeout(DEADLINE);
    assert_eq!(
        accepted.send().await.unwrap().status(),
        StatusCode::ACCEPTED
    );
    launcher.wait_for_end(1, "step");
    drop(held);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_can_get_no_token_is_answered_before_the_body_of_an_exchange() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[]);
    let address = launcher.url("").trim_start_matches("http://").to_owned();
    let head = "POST /api/v1/executor/token HTTP/1.1\r\nHost: a\r\nContent-Length: 2000\r\n\r\ngrant_type=";
    let mut stream = connect(&address, head.as_bytes());
    // A launcher that waits for the body answers that it has not come.
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(answer.contains("trusts an OpenID provider"), "{answer}");
}
