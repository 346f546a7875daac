//! A small HTTP/1.1 server: one thread a connection, one request a connection, an answer computed by a closure.
//! Optionally behind TLS with a certificate of its own. Knows nothing of what is served.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// No test waits longer for a peer that has gone silent. An S3 with the objects of 1,000 runs needs more than 20 s for some
/// requests on a busy machine.
const SILENCE: Duration = Duration::from_mins(1);
/// Small enough for a steady rate.
const FILE_CHUNK: usize = 64 * 1024;

/// One request, read to its end.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// `GET`
    pub method: String,
    /// The path, without the query.
    pub path: String,
    /// What follows `?`, or nothing.
    pub query: String,
    /// Names in lower case, in the order they came.
    pub headers: Vec<(String, String)>,
    /// Without transfer encoding.
    pub body: Vec<u8>,
}

impl Request {
    /// Path and query, as they were sent.
    pub fn target(&self) -> String {
        match &*self.query {
            "" => self.path.clone(),
            query => format!("{}?{query}", self.path),
        }
    }

    /// The first value of a header, by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// `user:password` of basic authentication.
    pub fn basic_auth(&self) -> Option<String> {
        let encoded = self.header("authorization")?.strip_prefix("Basic ")?;
        String::from_utf8(STANDARD.decode(encoded).ok()?).ok()
    }
}

/// What is answered.
#[derive(Clone, Debug)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// Headers besides `Content-Length` and `Connection`.
    pub headers: Vec<(String, String)>,
    /// Sent whole.
    pub body: Vec<u8>,
    /// Sent after the body.
    pub file: Option<PathBuf>,
    /// How fast the file is sent, if not at once.
    pub bytes_per_second: Option<u64>,
    /// Announces more bytes than there are, and closes: a transfer that breaks off.
    pub cut_short: bool,
}

impl Response {
    /// An answer without headers.
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.into(),
            file: None,
            bytes_per_second: None,
            cut_short: false,
        }
    }

    /// An answer with the content of a file.
    pub fn of_file(path: PathBuf, bytes_per_second: Option<u64>) -> Self {
        Self {
            file: Some(path),
            bytes_per_second,
            ..Self::new(200, Vec::new())
        }
    }

    /// Adds a header.
    #[must_use]
    pub fn with_header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }
}

type Handler = dyn Fn(&Request) -> Response + Send + Sync;

/// A running server and what it has been asked so far.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    certificate: Option<String>,
    requests: Arc<Mutex<Vec<Request>>>,
    stopping: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a server without TLS.
    pub fn start(
        handler: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) -> io::Result<Self> {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], 0)), handler)
    }

    /// Starts a server without TLS at this address.
    pub fn start_at(
        address: SocketAddr,
        handler: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) -> io::Result<Self> {
        Self::listen(address, None, None, Arc::new(handler))
    }

    /// Starts a server with a self-signed certificate for `127.0.0.1` and `localhost`.
    pub fn start_tls(
        handler: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) -> io::Result<Self> {
        Self::listen_tls((4096, 1, 1), handler)
    }

    /// The same with a certificate that has expired.
    pub fn start_tls_expired(
        handler: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) -> io::Result<Self> {
        Self::listen_tls((2024, 1, 1), handler)
    }

    fn listen_tls(
        (year, month, day): (i32, u8, u8),
        handler: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let mut params = CertificateParams::new(names).map_err(io::Error::other)?;
        params.not_after = rcgen::date_time_ymd(year, month, day);
        let signing_key = KeyPair::generate().map_err(io::Error::other)?;
        let cert = params.self_signed(&signing_key).map_err(io::Error::other)?;
        let key = PrivatePkcs8KeyDer::from(signing_key.serialize_der());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], PrivateKeyDer::Pkcs8(key))
            .map_err(io::Error::other)?;
        Self::listen(
            SocketAddr::from(([127, 0, 0, 1], 0)),
            Some(Arc::new(config)),
            Some(cert.pem()),
            Arc::new(handler),
        )
    }

    fn listen(
        address: SocketAddr,
        tls: Option<Arc<ServerConfig>>,
        certificate: Option<String>,
        handler: Arc<Handler>,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let requests = Arc::<Mutex<Vec<Request>>>::default();
        let stopping = Arc::<AtomicBool>::default();
        let (seen, stop) = (Arc::clone(&requests), Arc::clone(&stopping));
        let acceptor = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let (handler, seen, tls) = (Arc::clone(&handler), Arc::clone(&seen), tls.clone());
                // A peer that goes away in the middle is the peer's business.
                std::thread::spawn(move || drop(serve(stream, tls, &*handler, &seen)));
            }
        });
        Ok(Self {
            address,
            certificate,
            requests,
            stopping,
            acceptor: Some(acceptor),
        })
    }

    /// `127.0.0.1:port`
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Scheme, host and port, without a slash at the end.
    pub fn url(&self) -> String {
        let scheme = if self.certificate.is_some() {
            "https"
        } else {
            "http"
        };
        format!("{scheme}://{}", self.address)
    }

    /// The certificate to trust, in PEM, if the server speaks TLS.
    pub fn certificate(&self) -> Option<&str> {
        self.certificate.as_deref()
    }

    /// Every request so far.
    pub fn requests(&self) -> Vec<Request> {
        self.requests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Wakes the acceptor up.
        drop(TcpStream::connect(self.address));
        if let Some(acceptor) = self.acceptor.take() {
            drop(acceptor.join());
        }
    }
}

/// Asks a server on loopback something, and returns status and body of its answer.
pub(crate) fn ask(
    server: SocketAddr,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(server)?;
    stream.set_read_timeout(Some(SILENCE))?;
    let mut head = format!(
        "{method} {target} HTTP/1.0\r\nHost: {server}\r\nContent-Length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        head.extend([name, ": ", value, "\r\n"]);
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
    Ok((status.unwrap_or_default(), body.to_owned()))
}

/// Asks another server the same, under the name of a host, and returns its answer.
pub fn pass_on(request: &Request, server: SocketAddr, host: &str) -> io::Result<Response> {
    let mut stream = TcpStream::connect(server)?;
    stream.set_read_timeout(Some(SILENCE))?;
    let mut head = format!(
        "{} {} HTTP/1.0\r\nHost: {host}\r\nContent-Length: {}\r\n",
        request.method,
        request.target(),
        request.body.len()
    );
    for (name, value) in &request.headers {
        let is_ours = [
            "host",
            "content-length",
            "transfer-encoding",
            "expect",
            "connection",
        ];
        if !is_ours.contains(&name.as_str()) {
            head.extend([name, ": ", value, "\r\n"]);
        }
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(&request.body)?;
    let mut stream = BufReader::new(stream);
    let first = read_line(&mut stream)?;
    let status = first.split(' ').nth(1).and_then(|word| word.parse().ok());
    let mut response = Response::new(status.unwrap_or(502), Vec::new());
    loop {
        let line = read_line(&mut stream)?;
        let Some((name, value)) = line.split_once(':') else {
            break;
        };
        if !["content-length", "connection"].contains(&&*name.to_ascii_lowercase()) {
            response = response.with_header(name, value.trim());
        }
    }
    stream.read_to_end(&mut response.body)?;
    Ok(response)
}

fn serve(
    stream: TcpStream,
    tls: Option<Arc<ServerConfig>>,
    handler: &Handler,
    seen: &Mutex<Vec<Request>>,
) -> io::Result<()> {
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))?;
    match tls {
        None => converse(stream, handler, seen),
        Some(config) => {
            let connection = ServerConnection::new(config).map_err(io::Error::other)?;
            let mut stream = StreamOwned::new(connection, stream);
            converse(&mut stream, handler, seen)?;
            stream.conn.send_close_notify();
            stream.flush()
        }
    }
}

fn converse(
    stream: impl Read + Write,
    handler: &Handler,
    seen: &Mutex<Vec<Request>>,
) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    let request = read_request(&mut stream)?;
    seen.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(request.clone());
    let response = handler(&request);
    let file = response.file.as_ref().map(File::open).transpose()?;
    let length = file
        .as_ref()
        .map_or(Ok(0), |file| file.metadata().map(|found| found.len()))?;
    let announced = response.body.len() as u64 + length + u64::from(response.cut_short);
    let mut head = format!(
        "HTTP/1.1 {} Status\r\nContent-Length: {announced}\r\nConnection: close\r\n",
        response.status
    );
    for (name, value) in &response.headers {
        head.extend([name, ": ", value, "\r\n"]);
    }
    head.push_str("\r\n");
    let stream = stream.get_mut();
    stream.write_all(head.as_bytes())?;
    if request.method != "HEAD" {
        stream.write_all(&response.body)?;
        if let Some(file) = file {
            send(file, stream, response.bytes_per_second)?;
        }
    }
    stream.flush()
}

/// Sends a file, as fast as a line with this rate would.
fn send(mut file: File, stream: &mut impl Write, rate: Option<u64>) -> io::Result<()> {
    let (began, mut sent) = (Instant::now(), 0);
    let mut buffer = vec![0; FILE_CHUNK];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(());
        }
        stream.write_all(&buffer[..read])?;
        sent += read as u64;
        if let Some(rate) = rate {
            let due = Duration::from_micros(sent * 1_000_000 / rate);
            std::thread::sleep(due.saturating_sub(began.elapsed()));
        }
    }
}

fn read_request(stream: &mut BufReader<impl Read + Write>) -> io::Result<Request> {
    let first = read_line(stream)?;
    let mut words = first.split(' ');
    let method = words.next().unwrap_or_default().to_owned();
    let target = words.next().unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut request = Request {
        method,
        path: path.to_owned(),
        query: query.to_owned(),
        ..Request::default()
    };
    loop {
        let line = read_line(stream)?;
        let Some((name, value)) = line.split_once(':') else {
            break;
        };
        request
            .headers
            .push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    if request.header("expect").is_some() {
        stream
            .get_mut()
            .write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        stream.get_mut().flush()?;
    }
    request.body = read_body(stream, &request)?;
    Ok(request)
}

fn read_body(stream: &mut impl BufRead, request: &Request) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    if request.header("transfer-encoding") == Some("chunked") {
        loop {
            let size = read_line(stream)?;
            let size = u64::from_str_radix(size.trim(), 16).map_err(io::Error::other)?;
            stream.take(size).read_to_end(&mut body)?;
            read_line(stream)?;
            if size == 0 {
                return Ok(body);
            }
        }
    }
    let length = request
        .header("content-length")
        .map_or(Ok(0), str::parse)
        .map_err(io::Error::other)?;
    stream.take(length).read_to_end(&mut body)?;
    Ok(body)
}

fn read_line(stream: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    if stream.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end().to_owned())
}
