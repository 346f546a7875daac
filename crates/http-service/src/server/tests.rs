//! The limits, with real sockets. Times pass on the paused clock. It moves by itself while a test waits, and no test has a timer
//! that this could end too early.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::get;
use futures_util::stream;
use test_peers::clock::hold_clock;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::yield_now;
use tokio::time::{Instant, advance, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{Limits, serve};

/// What takes so long never comes.
const PATIENCE: Duration = Duration::from_secs(90);
const NEVER: Duration = Duration::from_hours(1);
const LIMITS: Limits = Limits {
    connections: 64,
    of_client: 32,
    first_head: NEVER,
    idle: NEVER,
    unread: NEVER,
};
const SHORT: Duration = Duration::from_secs(3);
/// More than a peer has to read until the service notices it.
const SMALL: usize = 512 * 1024;
const CHUNK: &[u8] = &[b'x'; 16 * 1024];
const CLIENT: Ipv4Addr = Ipv4Addr::LOCALHOST;
const OTHER_CLIENT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// A service, and what its handlers say.
struct Service {
    address: SocketAddr,
    /// Gets a message when a request of `/wait` has come.
    waiting: mpsc::UnboundedReceiver<()>,
    /// Lets `/wait` respond.
    respond: watch::Sender<bool>,
    /// Gets a message when a body of `/endless` is dropped.
    dropped: mpsc::UnboundedReceiver<()>,
    /// How many chunks `/endless` has made. It makes the next one only after something was written.
    made: Arc<AtomicUsize>,
}

struct OnDrop(mpsc::UnboundedSender<()>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

impl Service {
    async fn start(limits: Limits) -> Self {
        let listener = TcpListener::bind((CLIENT, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (came, waiting) = mpsc::unbounded_channel();
        let (ended, dropped) = mpsc::unbounded_channel();
        let made = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&made);
        let respond = watch::Sender::new(false);
        let released = respond.subscribe();
        let wait = async move || {
            came.send(()).unwrap();
            released.clone().wait_for(|is| *is).await.unwrap();
            "done"
        };
        let endless = async move || {
            let chunks = stream::repeat_with({
                let (guard, made) = (OnDrop(ended.clone()), Arc::clone(&counter));
                move || {
                    let _ = &guard;
                    made.fetch_add(1, Ordering::SeqCst);
                    Ok::<_, std::io::Error>(Bytes::from_static(CHUNK))
                }
            });
            Body::from_stream(chunks)
        };
        let router = Router::new()
            .route("/", get(async || "ok"))
            .route("/large", get(async || vec![b'x'; 1 << 20]))
            .route("/wait", get(wait))
            .route("/endless", get(endless));
        tokio::spawn(serve(listener, router, limits, CancellationToken::new()));
        Self {
            address,
            waiting,
            respond,
            dropped,
            made,
        }
    }

    async fn connect(&self, from: Ipv4Addr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::new(IpAddr::V4(from), 0)).unwrap();
        // A peer that reads slowly must not hide behind a large buffer.
        socket.set_recv_buffer_size(32 * 1024).unwrap();
        socket.connect(self.address).await.unwrap()
    }

    async fn send(&self, from: Ipv4Addr, path: &str) -> TcpStream {
        let mut stream = self.connect(from).await;
        write(&mut stream, path).await;
        stream
    }

    /// Requests `/` on a new connection.
    async fn is_answered(&self, from: Ipv4Addr) {
        let mut stream = self.send(from, "/").await;
        let head = timeout(PATIENCE, read_some(&mut stream)).await;
        assert!(head.expect("no response").starts_with("HTTP/1.1 200 OK"));
    }
}

async fn write(stream: &mut TcpStream, path: &str) {
    let head = format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
}

async fn read_some(stream: &mut TcpStream) -> String {
    let mut buffer = [0; 1024];
    let length = stream.read(&mut buffer).await.unwrap_or(0);
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}

/// Waits until the service has closed a connection on which it sends nothing.
async fn closed(mut stream: TcpStream) {
    assert_eq!(read_some(&mut stream).await, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_keep_neither_their_client_nor_others_out() {
    let service = Service::start(LIMITS).await;
    let mut idle = Vec::new();
    for _ in 0..3 * LIMITS.connections {
        idle.push(service.connect(CLIENT).await);
    }
    service.is_answered(CLIENT).await;
    service.is_answered(OTHER_CLIENT).await;
    // The oldest made way for the newer ones.
    let oldest = timeout(PATIENCE, closed(idle.remove(0))).await;
    oldest.expect("the connection stays open");
    let mut newest = idle.pop().unwrap();
    write(&mut newest, "/").await;
    assert!(read_some(&mut newest).await.contains("200 OK"));
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_connections_of_one_client_leave_half_of_the_places_to_others() {
    let mut service = Service::start(LIMITS).await;
    let mut busy = Vec::new();
    for _ in 1..LIMITS.of_client {
        busy.push(service.send(CLIENT, "/wait").await);
        service.waiting.recv().await.unwrap();
    }
    let mut download = service.send(CLIENT, "/endless").await;
    assert!(read_some(&mut download).await.contains("200 OK"));
    // Closed at once: the listener does not wait for a place.
    let another = closed(service.connect(CLIENT).await);
    let another = timeout(PATIENCE, another).await;
    another.expect("the connection stays open");
    service.is_answered(OTHER_CLIENT).await;
    assert!(!read_some(&mut download).await.is_empty());
    service.respond.send_replace(true);
    for mut stream in busy {
        assert!(read_some(&mut stream).await.contains("200 OK"));
    }
    service.is_answered(CLIENT).await;
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_reads_nothing_is_disconnected() {
    let limits = Limits {
        unread: SHORT,
        ..LIMITS
    };
    let mut service = Service::start(limits).await;
    let started = Instant::now();
    let _unread = service.send(CLIENT, "/endless").await;
    service.dropped.recv().await.unwrap();
    assert!(started.elapsed() >= SHORT);

    // The responses of pipelined requests are small and complete. No handler waits for the peer.
    let mut pipelined = service.connect(CLIENT).await;
    let heads = "GET /large HTTP/1.1\r\nHost: a\r\n\r\n".repeat(1000);
    while pipelined.write_all(heads.as_bytes()).await.is_ok() {}
}

#[tokio::test(start_paused = true)]
async fn a_slow_peer_gets_its_response_and_a_waiting_one_too() {
    let held = hold_clock();
    let limits = Limits {
        idle: SHORT,
        unread: SHORT,
        ..LIMITS
    };
    let mut service = Service::start(limits).await;
    let mut waiting = service.send(CLIENT, "/wait").await;
    service.waiting.recv().await.unwrap();

    let mut slow = service.send(CLIENT, "/endless").await;
    let mut buffer = [0; 8 * 1024];
    for _ in 0..10 {
        // A peer that reads a little counts, long before the kernel's buffer is empty.
        let (made, mut length) = (service.made.load(Ordering::SeqCst), 0);
        while service.made.load(Ordering::SeqCst) == made {
            let read = slow.read(&mut buffer).await.unwrap();
            assert_ne!(read, 0, "closed");
            length += read;
            yield_now().await;
        }
        assert!(length <= SMALL, "{length} bytes were no progress");
        advance(SHORT / 2).await;
    }
    assert!(
        service.dropped.try_recv().is_err(),
        "the response was given up"
    );
    service.respond.send_replace(true);
    assert!(read_some(&mut waiting).await.contains("200 OK"));
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn the_first_head_has_a_limit() {
    let service = Service::start(Limits {
        first_head: SHORT,
        ..LIMITS
    })
    .await;
    let started = Instant::now();
    closed(service.connect(CLIENT).await).await;
    assert!(started.elapsed() >= SHORT);

    let mut stream = service.connect(CLIENT).await;
    let started = Instant::now();
    // Each byte is progress, and the head still has to be complete in time.
    while stream.write_all(b"G").await.is_ok() {
        assert!(started.elapsed() < NEVER, "a slow head has no limit");
        sleep(SHORT / 10).await;
    }
    assert!(started.elapsed() >= SHORT);
}

#[tokio::test(start_paused = true)]
async fn a_pause_between_two_requests_has_a_limit() {
    let service = Service::start(Limits {
        idle: SHORT,
        ..LIMITS
    })
    .await;
    let held = hold_clock();
    let mut stream = service.send(CLIENT, "/").await;
    assert!(read_some(&mut stream).await.contains("200 OK"));
    drop(held);
    let started = Instant::now();
    closed(stream).await;
    assert!(started.elapsed() >= SHORT);
}
