//! What hostile, defective and overloaded servers do to a read: each answer ends it soon, with its class, and none is shown.

use std::net::TcpListener as Listener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use job_contract::env;
use rstest::rstest;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::allow::RunIds;
use crate::settings::Purpose;

/// What no error shows.
const CANARY: &str = "canary-of-the-store";
/// The first attempt, and all others.
const ALL_ATTEMPTS: usize = 5;

/// What a server does when it is asked for a secret.
#[derive(Clone, Copy)]
enum Does {
    Answer(&'static str),
    /// Leads to another host.
    Redirect(u16),
    /// A body in chunks, without an end.
    Stream,
}

async fn answer(mut stream: TcpStream, does: Does, other: &str, reads: &AtomicUsize) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let text = if head.starts_with(b"GET /v1/sys/internal/") {
        "HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n".to_owned()
    } else {
        reads.fetch_add(1, Ordering::SeqCst);
        match does {
            Does::Answer(text) => text.replace("CANARY", CANARY),
            Does::Redirect(status) => {
                format!(
                    "HTTP/1.1 {status} There\r\nLocation: http://{other}/{CANARY}\r\nContent-Length: 0\r\n\r\n"
                )
            }
            Does::Stream => "HTTP/1.1 200 Yes\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned(),
        }
    };
    // A client that goes away in the middle has its reasons.
    let mut written = stream.write_all(text.as_bytes()).await;
    let chunk = format!("1000\r\n{}\r\n", "x".repeat(0x1000));
    while text.contains("chunked") && written.is_ok() {
        written = stream.write_all(chunk.as_bytes()).await;
    }
}

#[rstest]
#[case::moved(
    Does::Redirect(301),
    ErrorClass::NotConfigured,
    "a redirect, which is not followed",
    1
)]
#[case::standby(
    Does::Redirect(307),
    ErrorClass::NotConfigured,
    "a redirect, which is not followed",
    1
)]
#[case::endless(Does::Stream, ErrorClass::Unusable, "larger than 1 MiB", 1)]
#[case::cut_short(
    Does::Answer("HTTP/1.1 200 Yes\r\nContent-Length: 21\r\n\r\n<html>"),
    ErrorClass::Unreachable,
    "the connection broke",
    ALL_ATTEMPTS
)]
#[case::page(
    Does::Answer("HTTP/1.1 200 Yes\r\nConnection: close\r\n\r\n<html>CANARY</html>"),
    ErrorClass::Unusable,
    "with a body that is not of this store",
    1
)]
#[case::other_document(
    Does::Answer("HTTP/1.1 200 Yes\r\nConnection: close\r\n\r\n{\"data\":[\"CANARY\"]}"),
    ErrorClass::Unusable,
    "with a body that is not of this store",
    1
)]
#[case::message(
    Does::Answer("HTTP/1.1 400 No\r\nConnection: close\r\n\r\n{\"errors\":[\"CANARY\"]}"),
    ErrorClass::Unusable,
    "status 400",
    1
)]
#[case::denied(
    Does::Answer("HTTP/1.1 403 CANARY\r\nConnection: close\r\n\r\n{\"errors\":[\"CANARY\"]}"),
    ErrorClass::Denied,
    "status 403",
    1
)]
#[case::busy(
    Does::Answer("HTTP/1.1 429 CANARY\r\nConnection: close\r\n\r\nCANARY"),
    ErrorClass::Unavailable,
    "status 429",
    ALL_ATTEMPTS
)]
#[case::busy_for_a_minute(
    Does::Answer("HTTP/1.1 429 No\r\nRetry-After: 60\r\nConnection: close\r\n\r\nCANARY"),
    ErrorClass::Unavailable,
    "status 429",
    1
)]
#[case::sealed(
    Does::Answer("HTTP/1.1 503 No\r\nRetry-After: 60\r\nConnection: close\r\n\r\nCANARY"),
    ErrorClass::Unavailable,
    "sealed, status 503",
    1
)]
#[case::no_http(
    Does::Answer("CANARY\r\n\r\n"),
    ErrorClass::Unreachable,
    "the connection broke",
    ALL_ATTEMPTS
)]
#[tokio::test]
async fn each_answer_ends_a_read_with_its_class(
    #[case] does: Does,
    #[case] class: ErrorClass,
    #[case] detail: &str,
    #[case] expected_reads: usize,
) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let other = Listener::bind("127.0.0.1:0").unwrap();
    other.set_nonblocking(true).unwrap();
    let other_host = other.local_addr().unwrap().to_string();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let reads = Arc::<AtomicUsize>::default();
    let seen = Arc::clone(&reads);
    let server = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            answer(stream, does, &other_host, &seen).await;
        }
    });
    let own = |name: &str| match name {
        env::CUSTOMER_VAULT_ADDRESS => Some(url.clone()),
        env::CUSTOMER_VAULT_TOKEN => Some("token".to_owned()),
        _ => None,
    };
    let purpose = Purpose {
        run: RunIds {
            organization: "org",
            workspace: "ws",
        },
        session_name: "mayfly-1",
    };
    let settings = Settings::read(&own, purpose).unwrap().unwrap();
    let reader = SecretReader::open(settings).unwrap();
    let id = SecretId::Vault {
        path: "kv/app".to_owned(),
        namespace: None,
        version: None,
    };
    let found = reader.read(BTreeSet::from([id.clone()])).await;
    let error = found[&id].as_ref().unwrap_err();
    assert_eq!(error.class, class, "{error}");
    assert!(error.to_string().contains(detail), "{error}");
    assert!(!format!("{error} {error:?}").contains(CANARY), "{error:?}");
    assert_eq!(reads.load(Ordering::SeqCst), expected_reads);
    // Nobody was led elsewhere.
    assert!(other.accept().is_err());
    server.abort();
}
