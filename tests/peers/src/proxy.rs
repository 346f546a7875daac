//! The proxy that tests put before servers on loopback. Connections go to the servers in turn. They are refused, delayed, cut and
//! counted by order. A proxy of calls also reads HTTP: rules hold, drop, delay, repeat or answer single calls.
//!
//! All proxies of a process share two threads, so a test that blocks its own threads delays no connection.

mod calls;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

pub use self::calls::{Call, Fate, Held, Moment};
use self::calls::{Calls, converse};

/// How much is kept of what a client has sent on a connection.
const KEPT: usize = 1024;
/// How long a connection that is refused may take until its client has sent something.
const FIRST: Duration = Duration::from_mins(1);

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    runtime.expect("two threads start")
});

/// The first bytes that a client has sent on a connection.
type Sent = Arc<Mutex<Vec<u8>>>;

/// How a connection goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It ends before anything was passed on.
    Refuse,
    /// Nothing is passed on for this time.
    Stall(Duration),
    /// It ends after so many bytes of the answer.
    CutAnswer(usize),
    /// It ends after so many bytes of the request.
    CutRequest(usize),
    /// It ends after this time. One that has ended before has not gone wrong.
    CutAfter(Duration),
}

/// Only a proxy of calls has `calls`.
#[derive(Debug, Default)]
struct Shared {
    servers: Mutex<Vec<SocketAddr>>,
    turn: AtomicUsize,
    passed_over: AtomicUsize,
    connections: Mutex<Connections>,
    calls: Option<Mutex<Calls>>,
}

#[derive(Debug, Default)]
struct Connections {
    accepted: u64,
    orders: VecDeque<Trouble>,
    open: BTreeMap<u64, (AbortHandle, Sent)>,
    troubled: usize,
    broken: BTreeMap<u64, Sent>,
    are_cut: bool,
}

impl Connections {
    /// A connection goes wrong by order.
    fn spoil(&mut self, number: u64, sent: &Sent) {
        self.troubled += 1;
        self.broken.insert(number, Arc::clone(sent));
    }
}

/// A listening proxy; its connections end with it.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: AbortHandle,
}

impl Proxy {
    /// Listens on a free port, and passes connections on to these servers. A half-closed connection stays half-closed.
    pub fn start(servers: &[SocketAddr]) -> io::Result<Self> {
        Self::listen(servers, None)
    }

    fn listen(servers: &[SocketAddr], calls: Option<Mutex<Calls>>) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let _runtime = RUNTIME.enter();
        let listener = TcpListener::from_std(listener)?;
        let shared = Arc::new(Shared {
            servers: Mutex::new(servers.to_vec()),
            calls,
            ..Shared::default()
        });
        let acceptor = tokio::spawn(accept(listener, Arc::clone(&shared))).abort_handle();
        Ok(Self {
            address,
            shared,
            acceptor,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same, for clients of HTTP.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The servers, in turn. One that does not accept a connection is passed over.
    pub fn servers(&self) -> MutexGuard<'_, Vec<SocketAddr>> {
        lock(&self.shared.servers)
    }

    /// How often a server was passed over so far.
    pub fn passed_over(&self) -> usize {
        self.shared.passed_over.load(Ordering::SeqCst)
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        lock(&self.shared.connections)
    }

    /// The next `count` connections go wrong.
    ///
    /// # Panics
    /// A proxy of calls counts no bytes, so it cannot cut a connection after some.
    pub fn next(&self, count: usize, trouble: Trouble) {
        let counts_bytes = matches!(trouble, Trouble::CutAnswer(_) | Trouble::CutRequest(_));
        assert!(
            !(counts_bytes && self.shared.calls.is_some()),
            "{trouble:?}"
        );
        let orders = std::iter::repeat_n(trouble, count);
        self.connections().orders.extend(orders);
    }

    /// No connection goes wrong any more by order.
    pub fn clear(&self) {
        self.connections().orders.clear();
    }

    /// How many connections there were so far.
    pub fn accepted(&self) -> u64 {
        self.connections().accepted
    }

    /// How many connections went wrong by order so far.
    pub fn troubled(&self) -> usize {
        self.connections().troubled
    }

    /// Ends every connection there is.
    pub fn cut_open(&self) {
        let connections = &mut *self.connections();
        for (number, (task, sent)) in std::mem::take(&mut connections.open) {
            connections.broken.insert(number, sent);
            task.abort();
        }
    }

    /// Ends every connection there is, and each new one at once.
    pub fn cut(&self) {
        self.connections().are_cut = true;
        self.cut_open();
    }

    /// New connections are passed on again.
    pub fn heal(&self) {
        self.connections().are_cut = false;
    }

    /// What the clients had sent first on the connections that went wrong by order or were cut, so far. It says whose they
    /// were.
    pub fn broken(&self) -> Vec<String> {
        let text = |sent: &Sent| String::from_utf8_lossy(&lock(sent)).into_owned();
        self.connections().broken.values().map(text).collect()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.acceptor.abort();
        self.cut();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let Ok((client, _)) = listener.accept().await else {
            continue;
        };
        let mut connections = lock(&shared.connections);
        if connections.are_cut {
            continue;
        }
        connections.accepted += 1;
        let (number, sent) = (connections.accepted, Sent::default());
        let trouble = connections.orders.pop_front();
        if !matches!(trouble, None | Some(Trouble::CutAfter(_))) {
            connections.spoil(number, &sent);
        }
        let (inner, kept) = (Arc::clone(&shared), Arc::clone(&sent));
        let task = tokio::spawn(async move {
            // A connection that cannot be served ends, which is all there is to say about it.
            let _ = serve(client, number, trouble, &kept, &inner).await;
            lock(&inner.connections).open.remove(&number);
        });
        let open = (task.abort_handle(), sent);
        connections.open.insert(number, open);
    }
}

async fn serve(
    mut client: TcpStream,
    number: u64,
    trouble: Option<Trouble>,
    sent: &Sent,
    shared: &Arc<Shared>,
) -> io::Result<()> {
    let (mut up, mut down, mut time) = (usize::MAX, usize::MAX, Duration::MAX);
    match trouble {
        Some(Trouble::Refuse) => {
            let mut first = [0; KEPT];
            let count = timeout(FIRST, client.read(&mut first)).await??;
            lock(sent).extend(&first[..count]);
            return Ok(());
        }
        Some(Trouble::Stall(time)) => sleep(time).await,
        Some(Trouble::CutAnswer(bytes)) => down = bytes,
        Some(Trouble::CutRequest(bytes)) => up = bytes,
        Some(Trouble::CutAfter(after)) => time = after,
        None => {}
    }
    // It is noted first that the connection goes wrong, and then it ends.
    let passing = pin!(async {
        if shared.calls.is_some() {
            return converse(client, shared).await;
        }
        let mut server = shared.connect().await?;
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        tokio::try_join!(
            pump(from_client, to_server, up, Some(sent)),
            pump(from_server, to_client, down, None)
        )?;
        Ok(())
    });
    if timeout(time, passing).await.is_err() {
        lock(&shared.connections).spoil(number, sent);
    }
    Ok(())
}

impl Shared {
    /// A connection to the first server that accepts it, beginning with another one each time.
    async fn connect(&self) -> io::Result<TcpStream> {
        let servers = lock(&self.servers).clone();
        let first = self.turn.fetch_add(1, Ordering::SeqCst);
        let mut last = io::Error::from(io::ErrorKind::NotConnected);
        for at in 0..servers.len() {
            match TcpStream::connect(servers[(first + at) % servers.len()]).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
            self.passed_over.fetch_add(1, Ordering::SeqCst);
        }
        Err(last)
    }
}

/// Passes bytes on until one side ends, and keeps the first ones. Fails when `limit` is reached.
async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut limit: usize,
    kept: Option<&Sent>,
) -> io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return to.shutdown().await;
        }
        if let Some(kept) = kept {
            let mut kept = lock(kept);
            let more = count.min(KEPT - kept.len());
            kept.extend(&buffer[..more]);
        }
        let count = count.min(limit);
        to.write_all(&buffer[..count]).await?;
        limit -= count;
        if limit == 0 {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Shutdown, TcpListener, TcpStream};

    use super::*;
    use crate::http::{Response, Server, ask};
    use crate::port::Port;
    use crate::port::tests::until_refused;

    fn server(text: &'static str) -> Server {
        Server::start(move |_| Response::new(200, text)).unwrap()
    }

    fn get(proxy: &Proxy) -> io::Result<(u16, String)> {
        ask(proxy.address(), "GET", "/", &[], b"")
    }

    #[test]
    fn connections_go_to_available_servers_in_turn() {
        // No other test gets the port of the server that goes away.
        let held = Port::take().unwrap();
        let one = Server::start_at(held.address(), |_| Response::new(200, "one")).unwrap();
        let other = server("other");
        let proxy = Proxy::start(&[one.address(), other.address()]).unwrap();
        let mut answers = vec![get(&proxy).unwrap().1, get(&proxy).unwrap().1];
        answers.sort();
        assert_eq!(answers, ["one", "other"]);
        drop(one);
        until_refused(held.address());
        for _ in 0..2 {
            assert_eq!(get(&proxy).unwrap().1, "other");
        }
        let third = server("third");
        assert_eq!(proxy.passed_over(), 1);
        *proxy.servers() = vec![third.address()];
        assert_eq!(get(&proxy).unwrap().1, "third");
    }

    #[test]
    fn as_many_connections_go_wrong_as_are_ordered() {
        let server = server("a long answer");
        let proxy = Proxy::start(&[server.address()]).unwrap();
        proxy.next(1, Trouble::Refuse);
        proxy.next(1, Trouble::CutRequest(3));
        proxy.next(1, Trouble::CutAnswer(12));
        proxy.next(1, Trouble::Stall(Duration::from_millis(20)));
        let empty = |answer: io::Result<(u16, String)>| answer.is_ok_and(|(code, _)| code == 200);
        assert!(!empty(get(&proxy)), "refused");
        assert!(!empty(get(&proxy)), "the request was cut");
        // `HTTP/1.1 200` is 12 bytes.
        assert!(!get(&proxy).is_ok_and(|(_, body)| body.ends_with("answer")));
        assert_eq!(get(&proxy).unwrap().1, "a long answer");
        assert_eq!(proxy.troubled(), 4);
        let broken = proxy.broken();
        assert_eq!(broken.len(), 4);
        // Also what was not passed on.
        assert!(
            broken.iter().all(|sent| sent.starts_with("GET / ")),
            "{broken:?}"
        );
        assert_eq!(server.requests().len(), 2);
    }

    #[test]
    fn connections_that_are_open_can_be_cut() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy::start(&[listener.local_addr().unwrap()]).unwrap();
        let connect = || {
            let mut client = TcpStream::connect(proxy.address()).unwrap();
            let (mut server, _) = listener.accept().unwrap();
            client.write_all(b"x").unwrap();
            server.read_exact(&mut [0]).unwrap();
            (client, server)
        };
        let ends = |mut stream: &TcpStream| stream.read(&mut [0]).unwrap_or(0) == 0;
        let (client, server) = connect();
        assert!(proxy.broken().is_empty());
        proxy.cut_open();
        assert_eq!(proxy.broken(), ["x"]);
        assert!(ends(&server) && ends(&client));
        let (client, server) = connect();
        proxy.cut();
        assert!(ends(&server) && ends(&client));
        assert!(ends(&TcpStream::connect(proxy.address()).unwrap()));
        proxy.heal();
        let (client, server) = connect();
        drop(proxy);
        assert!(ends(&server) && ends(&client));
    }

    #[test]
    fn a_half_closed_connection_stays_half_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy::start(&[listener.local_addr().unwrap()]).unwrap();
        let mut client = TcpStream::connect(proxy.address()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(server.read(&mut [0]).unwrap(), 0);
        server.write_all(b"answer").unwrap();
        drop(server);
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        assert_eq!(text, "answer");
    }

    #[test]
    fn a_connection_that_is_cut_by_time_has_gone_wrong_then() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy::start(&[listener.local_addr().unwrap()]).unwrap();
        proxy.next(1, Trouble::CutAfter(Duration::from_millis(20)));
        let mut client = TcpStream::connect(proxy.address()).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap_or(0), 0);
        assert_eq!(proxy.troubled(), 1);
    }
}
