//! A way between programs over HTTP/1.1. It notes each call. It can hold one before it is passed on, or after its response, and
//! answer some with the page of a proxy.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// Where a call is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// It was sent, and the other side does not have it.
    Sent,
    /// The other side has done it, and the caller does not know.
    Answered,
}

/// A call as it was made.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// Its method and path, without ids.
    pub(crate) class: String,
    message: Vec<u8>,
    /// Zero if there was no response.
    pub(crate) status: u16,
}

impl Call {
    /// The body of the request.
    pub(crate) fn body(&self) -> String {
        let text = String::from_utf8_lossy(&self.message);
        let body = text.split_once("\r\n\r\n").map(|(_, body)| body);
        body.unwrap_or_default().to_owned()
    }

    /// Whether this id is in it.
    pub(crate) fn is_about(&self, id: &str) -> bool {
        String::from_utf8_lossy(&self.message).contains(id)
    }
}

/// A call that is held. If this is dropped, both connections end.
#[derive(Debug)]
pub(crate) struct Held(oneshot::Sender<()>);

impl Held {
    /// The call goes on.
    pub(crate) fn release(self) {
        // The caller may have gone.
        let _ = self.0.send(());
    }
}

#[derive(Debug)]
struct Trap {
    class: String,
    number: usize,
    moment: Moment,
    caught: oneshot::Sender<Held>,
}

#[derive(Debug, Default)]
struct Inner {
    target: Option<SocketAddr>,
    calls: Vec<Call>,
    counts: HashMap<String, usize>,
    trap: Option<Trap>,
    /// The number of pages to send instead of responses, by the class of the call.
    pages: HashMap<String, usize>,
}

/// A tap. Its connections end with it.
#[derive(Debug)]
pub(crate) struct Tap {
    address: SocketAddr,
    inner: Arc<Mutex<Inner>>,
    /// While this is true, all connections end.
    is_cut: Arc<watch::Sender<bool>>,
    accepts: JoinHandle<()>,
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.accepts.abort();
    }
}

impl Tap {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let inner = Arc::<Mutex<Inner>>::default();
        let is_cut = Arc::new(watch::Sender::new(false));
        let (shared, cut) = (Arc::clone(&inner), Arc::clone(&is_cut));
        let accepts = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (shared, mut cut) = (Arc::clone(&shared), cut.subscribe());
                tokio::spawn(async move {
                    tokio::select! {
                        // Ends of connections are what the tests are about.
                        _ = converse(client, &shared) => {}
                        _ = cut.wait_for(|cut| *cut) => {}
                    }
                });
            }
        });
        Self {
            address,
            inner,
            is_cut,
            accepts,
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// New connections lead there.
    pub(crate) fn lead_to(&self, target: &str) {
        let target = target.trim_start_matches("http://").parse().unwrap();
        lock(&self.inner).target = Some(target);
    }

    /// Ends all connections, and each new one at once.
    pub(crate) fn cut(&self) {
        self.is_cut.send_replace(true);
    }

    /// Connections are passed on again.
    pub(crate) fn heal(&self) {
        self.is_cut.send_replace(false);
    }

    /// Holds the call of this class and number, once.
    pub(crate) fn hold(
        &self,
        class: &str,
        number: usize,
        moment: Moment,
    ) -> oneshot::Receiver<Held> {
        let (caught, held) = oneshot::channel();
        lock(&self.inner).trap = Some(Trap {
            class: class.to_owned(),
            number,
            moment,
            caught,
        });
        held
    }

    /// Answers the next calls of a class with the page of a proxy, with status 200. They are not passed on.
    pub(crate) fn answer_with_pages(&self, class: &str, count: usize) {
        lock(&self.inner).pages.insert(class.to_owned(), count);
    }

    /// Returns how many pages are left to send.
    pub(crate) fn pages_left(&self) -> usize {
        lock(&self.inner).pages.values().sum()
    }

    /// All calls so far.
    pub(crate) fn calls(&self) -> Vec<Call> {
        lock(&self.inner).calls.clone()
    }

    /// Makes a call again, and returns status and body of the response.
    pub(crate) async fn repeat(&self, call: &Call) -> (u16, String) {
        let target = lock(&self.inner).target.unwrap();
        let mut server = BufReader::new(TcpStream::connect(target).await.unwrap());
        server.write_all(&call.message).await.unwrap();
        let answer = read_message(&mut server, true).await.unwrap();
        let text = String::from_utf8_lossy(&answer.bytes).into_owned();
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        (answer.status(), body.to_owned())
    }
}

fn lock(inner: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Passes on the calls of one connection.
async fn converse(client: TcpStream, inner: &Mutex<Inner>) -> io::Result<()> {
    let mut client = BufReader::new(client);
    let mut server = None;
    loop {
        let request = read_message(&mut client, false).await?;
        let class = class(&request.first);
        let (at, number) = {
            let mut inner = lock(inner);
            let count = inner.counts.entry(class.clone()).or_default();
            *count += 1;
            let number = *count;
            inner.calls.push(Call {
                class: class.clone(),
                message: request.bytes.clone(),
                status: 0,
            });
            (inner.calls.len() - 1, number)
        };
        let is_page = lock(inner).pages.get_mut(&class).is_some_and(|left| {
            let some = *left > 0;
            *left -= usize::from(some);
            some
        });
        if is_page {
            client.write_all(page().as_bytes()).await?;
            continue;
        }
        pass(inner, &class, number, Moment::Sent).await?;
        let server = match &mut server {
            Some(server) => server,
            none => {
                let target = lock(inner).target.ok_or(io::ErrorKind::NotConnected)?;
                none.insert(BufReader::new(TcpStream::connect(target).await?))
            }
        };
        server.write_all(&request.bytes).await?;
        let answer = tokio::select! {
            answer = read_message(server, true) => answer?,
            // The server must notice that its client has gone.
            () = gone(&mut client) => return Ok(()),
        };
        lock(inner).calls[at].status = answer.status();
        pass(inner, &class, number, Moment::Answered).await?;
        client.write_all(&answer.bytes).await?;
        if answer.ends_connection {
            return Ok(());
        }
    }
}

/// As a gateway that wants a password sends it.
fn page() -> String {
    let page = "<!doctype html><title>Please sign in</title>";
    let length = page.len();
    format!("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}\r\n\r\n{page}")
}

/// Waits while the call is held. Fails if it is not released.
async fn pass(inner: &Mutex<Inner>, class: &str, number: usize, moment: Moment) -> io::Result<()> {
    let hit =
        |trap: &mut Trap| trap.class == class && trap.number == number && trap.moment == moment;
    let Some(trap) = lock(inner).trap.take_if(hit) else {
        return Ok(());
    };
    let (release, released) = oneshot::channel();
    // Without a receiver the test does not wait any more.
    let _ = trap.caught.send(Held(release));
    released
        .await
        .map_err(|_| io::ErrorKind::ConnectionReset.into())
}

async fn gone(client: &mut BufReader<TcpStream>) {
    if !matches!(client.fill_buf().await, Ok([]) | Err(_)) {
        std::future::pending::<()>().await;
    }
}

/// A request or a response.
#[derive(Debug)]
struct Message {
    first: String,
    bytes: Vec<u8>,
    ends_connection: bool,
}

impl Message {
    fn status(&self) -> u16 {
        let status = self.first.split(' ').nth(1);
        status.and_then(|status| status.parse().ok()).unwrap_or(0)
    }
}

async fn read_message(from: &mut BufReader<TcpStream>, is_answer: bool) -> io::Result<Message> {
    let mut bytes = Vec::new();
    let mut head = Vec::new();
    loop {
        let line = read_line(from, &mut bytes).await?;
        if line.is_empty() {
            break;
        }
        head.push(line);
    }
    let value = |name: &str| {
        let mut lines = head.iter().filter_map(|line| line.split_once(':'));
        lines
            .find(|(found, _)| found.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim().to_ascii_lowercase())
    };
    let mut message = Message {
        first: head.first().cloned().unwrap_or_default(),
        bytes,
        ends_connection: value("connection").as_deref() == Some("close"),
    };
    let has_no_body = is_answer && matches!(message.status(), 204 | 304);
    if value("transfer-encoding").as_deref() == Some("chunked") {
        loop {
            let size = read_line(from, &mut message.bytes).await?;
            let size = usize::from_str_radix(&size, 16).map_err(io::Error::other)?;
            // With the end of the line.
            read_some(from, &mut message.bytes, size + 2).await?;
            if size == 0 {
                break;
            }
        }
    } else if let Some(length) = value("content-length") {
        let length = length.parse().map_err(io::Error::other)?;
        read_some(from, &mut message.bytes, length).await?;
    } else if is_answer && !has_no_body {
        from.read_to_end(&mut message.bytes).await?;
        message.ends_connection = true;
    }
    Ok(message)
}

async fn read_line(from: &mut BufReader<TcpStream>, bytes: &mut Vec<u8>) -> io::Result<String> {
    let start = bytes.len();
    if from.read_until(b'\n', bytes).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(String::from_utf8_lossy(&bytes[start..])
        .trim_end()
        .to_owned())
}

async fn read_some(
    from: &mut BufReader<TcpStream>,
    bytes: &mut Vec<u8>,
    length: usize,
) -> io::Result<()> {
    let start = bytes.len();
    bytes.resize(start + length, 0);
    from.read_exact(&mut bytes[start..]).await.map(drop)
}

/// `POST …/tasks/{}/leases/{}/accept`, say.
fn class(first: &str) -> String {
    let mut words = first.split(' ');
    let method = words.next().unwrap_or_default();
    let path = words.next().unwrap_or_default();
    let path = path.split('?').next().unwrap_or_default();
    let is_id = |part: &str| {
        part.bytes().all(|byte| byte.is_ascii_digit()) || part.len() >= 20 && part.contains('-')
    };
    let parts = path.split('/').skip(1);
    let parts: Vec<&str> = parts
        .map(|part| if is_id(part) { "{}" } else { part })
        .collect();
    format!("{method} /{}", parts.join("/"))
}
