//! A way through TCP to one of several servers, on which connections go wrong by order: the object store that is away
//! for a while, and the address that several replicas of a program share. Knows nothing of what is said on it.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How much is kept of what a client has sent on a connection.
const KEPT: usize = 1024;
/// How long a connection that is refused may take until its client has sent something.
const FIRST: Duration = Duration::from_secs(1);

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
}

#[derive(Debug, Default)]
struct Shared {
    servers: Mutex<Vec<SocketAddr>>,
    orders: Mutex<VecDeque<Trouble>>,
    open: Mutex<BTreeMap<u64, ([TcpStream; 2], Sent)>>,
    broken: Mutex<BTreeMap<u64, Sent>>,
    accepted: AtomicU64,
    troubled: AtomicU64,
    stopping: AtomicBool,
}

/// A listening proxy; its connections end with it.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Listens on a free port and passes on to these servers, in turn. One that does not answer is passed over.
    pub fn start(servers: &[SocketAddr]) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            servers: Mutex::new(servers.to_vec()),
            ..Shared::default()
        });
        let inner = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || accept(&listener, &inner));
        Ok(Self {
            address,
            shared,
            acceptor: Some(acceptor),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on new connections go there.
    pub fn pass_on_to(&self, servers: &[SocketAddr]) {
        *lock(&self.shared.servers) = servers.to_vec();
    }

    /// The next `count` connections go wrong.
    pub fn next(&self, count: usize, trouble: Trouble) {
        lock(&self.shared.orders).extend(std::iter::repeat_n(trouble, count));
    }

    /// Ends every connection there is.
    pub fn cut(&self) {
        for (number, (pair, sent)) in std::mem::take(&mut *lock(&self.shared.open)) {
            lock(&self.shared.broken).insert(number, sent);
            shut(&pair);
        }
    }

    /// What the clients had sent first on the connections that went wrong by order or were cut, so far. It says whose they
    /// were.
    pub fn broken(&self) -> Vec<String> {
        let broken = lock(&self.shared.broken);
        let text = |sent: &Sent| String::from_utf8_lossy(&lock(sent)).into_owned();
        broken.values().map(text).collect()
    }

    /// No connection goes wrong any more by order.
    pub fn clear(&self) {
        lock(&self.shared.orders).clear();
    }

    /// How many connections there were so far.
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// How many connections went wrong by order so far.
    pub fn troubled(&self) -> u64 {
        self.shared.troubled.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.cut();
        // Wakes the acceptor up.
        drop(TcpStream::connect(self.address));
        if let Some(acceptor) = self.acceptor.take() {
            drop(acceptor.join());
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn shut(pair: &[TcpStream; 2]) {
    for stream in pair {
        // What has ended already needs no end.
        drop(stream.shutdown(Shutdown::Both));
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for stream in listener.incoming() {
        if shared.stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok(client) = stream else { continue };
        let number = shared.accepted.fetch_add(1, Ordering::SeqCst);
        let trouble = lock(&shared.orders).pop_front();
        let shared = Arc::clone(shared);
        // A connection that cannot be served ends, which is all there is to say about it.
        std::thread::spawn(move || drop(serve(&client, number, trouble, &shared)));
    }
}

fn serve(
    client: &TcpStream,
    number: u64,
    trouble: Option<Trouble>,
    shared: &Shared,
) -> io::Result<()> {
    let sent = Sent::default();
    if trouble.is_some() {
        shared.troubled.fetch_add(1, Ordering::SeqCst);
        lock(&shared.broken).insert(number, Arc::clone(&sent));
    }
    let (mut up, mut down) = (usize::MAX, usize::MAX);
    match trouble {
        Some(Trouble::Refuse) => {
            client.set_read_timeout(Some(FIRST))?;
            let mut first = [0; KEPT];
            let count = (&mut &*client).read(&mut first)?;
            lock(&sent).extend(&first[..count]);
            return Ok(());
        }
        Some(Trouble::Stall(time)) => std::thread::sleep(time),
        Some(Trouble::CutAnswer(bytes)) => down = bytes,
        Some(Trouble::CutRequest(bytes)) => up = bytes,
        None => {}
    }
    let server = connect(number, &lock(&shared.servers).clone())?;
    let pair = || Ok::<_, io::Error>([client.try_clone()?, server.try_clone()?]);
    lock(&shared.open).insert(number, (pair()?, Arc::clone(&sent)));
    let [client_reader, server_writer] = pair()?;
    let both = pair()?;
    let upward = std::thread::spawn(move || {
        if pump(client_reader, &server_writer, up, Some(&sent)) {
            shut(&both);
        } else {
            drop(server_writer.shutdown(Shutdown::Write));
        }
    });
    let [client_writer, server_reader] = pair()?;
    pump(server_reader, &client_writer, down, None);
    shut(&pair()?);
    drop(upward.join());
    lock(&shared.open).remove(&number);
    Ok(())
}

/// The first that answers, beginning with another one each time.
fn connect(number: u64, servers: &[SocketAddr]) -> io::Result<TcpStream> {
    let count = servers.len().max(1);
    let first = usize::try_from(number).unwrap_or_default() % count;
    let mut last = io::Error::from(io::ErrorKind::NotConnected);
    for server in servers.iter().cycle().skip(first).take(servers.len()) {
        match TcpStream::connect(server) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Passes bytes on until either side ends or `limit` is reached; says whether it was. Keeps the first ones.
fn pump(mut from: TcpStream, mut to: &TcpStream, mut limit: usize, kept: Option<&Sent>) -> bool {
    let mut buffer = [0; 16 * 1024];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(count) if count > 0 => count,
            _ => return false,
        };
        if let Some(kept) = kept {
            let mut kept = lock(kept);
            let more = count.min(KEPT - kept.len());
            kept.extend(&buffer[..more]);
        }
        let count = count.min(limit);
        if to.write_all(&buffer[..count]).is_err() {
            return false;
        }
        limit -= count;
        if limit == 0 {
            return true;
        }
    }
}

#[cfg(test)]
mod tests {
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
        proxy.pass_on_to(&[third.address()]);
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
        let mut client = TcpStream::connect(proxy.address()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.write_all(b"x").unwrap();
        let mut byte = [0];
        server.read_exact(&mut byte).unwrap();
        assert!(proxy.broken().is_empty());
        proxy.cut();
        assert_eq!(proxy.broken(), ["x"]);
        assert_eq!(server.read(&mut byte).unwrap_or(0), 0);
        assert_eq!(client.read(&mut byte).unwrap_or(0), 0);
    }
}
