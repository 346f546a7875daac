//! The registries of providers without a lock entry, on loopback. The tool asks here, so it chooses the version that it would
//! choose without this server, and checks what it gets by the digests that the registry has signed. Only archives come from the
//! store; the registry answers everything else itself.
//!
//! Whatever goes wrong here, the tool is redirected to the registry. So it sees the registry's own errors.

use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream;
use hyper::body::Incoming;
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, LOCATION};
use hyper::{Method, Request, Response, StatusCode};
use job_contract::chain;
use job_contract::encoding::hex;
use provider_store::{LARGEST_ARCHIVE, Package};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;
use tokio::fs::File;
use tokio::io::AsyncReadExt as _;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};
use url::Url;

use super::registry::{self, LARGEST_DOCUMENT, Services};
use super::shared_store::SharedStore;
use crate::child_env::ChildEnv;
use crate::loopback::{self, Body, BodyError, Loopback, status, streamed, whole};
use crate::terraform::credentials::ForcedHost;
use crate::tool::Fetcher;

/// How long the tool waits for a document of a registry, and the variable that says otherwise, in seconds.
const TOOLS_TIMEOUT: Duration = Duration::from_secs(10);
const TOOLS_TIMEOUT_VARIABLE: &str = "TF_REGISTRY_CLIENT_TIMEOUT";
/// More packages than a module has.
const MOST_ARCHIVES: usize = 1000;
/// Chunks of an archive that wait for the tool.
const WAITING_CHUNKS: usize = 8;
const CHUNK_BYTES: usize = 256 * 1024;

/// A registry of providers.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) services: Services,
}

/// How long registries are waited for. Whoever is slower is asked by the tool alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// For what a host has.
    pub(crate) services: Duration,
    /// For a document. The tool waits meanwhile, and needs time for a question of its own.
    document: Duration,
    /// For the begin of an archive.
    archive: Duration,
}

impl Patience {
    /// What the time limit of the tool leaves.
    pub(crate) fn of_tool(env: &ChildEnv) -> Self {
        let set = env.get(TOOLS_TIMEOUT_VARIABLE).and_then(OsStr::to_str);
        let set = set
            .and_then(|text| text.parse().ok())
            .filter(|set| *set > 0);
        let tools = set.map_or(TOOLS_TIMEOUT, |set: u32| Duration::from_secs(set.into()));
        Self {
            services: tools / 2,
            document: tools * 2 / 5,
            archive: tools * 2,
        }
    }
}

/// What the server needs.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) hosts: Vec<Host>,
    pub(crate) patience: Patience,
    /// `linux_amd64`, say. Packages of other platforms are the registry's business.
    pub(crate) platform: String,
    pub(crate) store: SharedStore,
    /// It must not limit the silence of a server: the tool does not either.
    pub(crate) fetcher: Fetcher,
    /// A folder of the run for archives.
    pub(crate) scratch: PathBuf,
}

/// What the tool got here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Served {
    pub(crate) stored: usize,
    pub(crate) fetched: usize,
    /// Why archives were left to the tool, whose own errors do not name their servers.
    pub(crate) failures: Vec<String>,
}

/// A running server. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct RegistryServer {
    loopback: Loopback,
    serving: Arc<Serving>,
}

impl RegistryServer {
    /// Starts the server on a free port.
    pub(crate) fn start(setup: Setup) -> io::Result<Self> {
        let slow = setup.hosts.iter().map(|_| AtomicBool::new(false));
        let serving = Arc::new(Serving {
            slow: slow.collect(),
            setup,
            password: loopback::new_password(),
            archives: Mutex::default(),
            transfers: TaskTracker::new(),
            served: Mutex::default(),
            address: OnceLock::new(),
        });
        let answering = Arc::clone(&serving);
        let loopback = Loopback::start(move |request| {
            let serving = Arc::clone(&answering);
            async move { serving.answer(&request).await }
        })?;
        let address = format!(
            "http://{}/{}",
            loopback.address(),
            serving.password.expose_secret()
        );
        serving.address.get_or_init(|| address);
        Ok(Self { loopback, serving })
    }

    /// How the tool reaches its hosts. All services but the one of providers are where they are.
    pub(crate) fn hosts(&self) -> Vec<ForcedHost> {
        let address = self.serving.address.get().map_or("", String::as_str);
        let hosts = self.serving.setup.hosts.iter().enumerate();
        hosts
            .map(|(number, host)| {
                let others = &host.services.others;
                let mut services: Vec<_> = others
                    .iter()
                    .map(|(name, url)| (name.clone(), url.to_string()))
                    .collect();
                services.push((
                    registry::SERVICE.to_owned(),
                    format!("{address}/registry/{number}/"),
                ));
                ForcedHost {
                    name: host.name.clone(),
                    services,
                }
            })
            .collect()
    }

    /// The password, which must never appear in a log.
    pub(crate) fn secret(&self) -> &SecretString {
        &self.serving.password
    }

    /// Ends the server after `init`. Waits until what was downloaded is in the store.
    pub(crate) async fn finish(self) -> Served {
        let Self { loopback, serving } = self;
        // With its connections, transfers end that nobody waits for.
        drop(loopback);
        serving.transfers.close();
        serving.transfers.wait().await;
        std::mem::take(&mut *runtime::lock(&serving.served))
    }
}

/// An archive that the tool may ask for.
#[derive(Clone, Debug)]
struct Archive {
    package: Package,
    /// The registry has signed it.
    sha256: String,
    url: Url,
}

#[derive(Debug)]
struct Serving {
    setup: Setup,
    /// Hosts that have once answered too slowly.
    slow: Vec<AtomicBool>,
    password: SecretString,
    /// Its own address, with the password.
    address: OnceLock<String>,
    archives: Mutex<Vec<Archive>>,
    transfers: TaskTracker,
    served: Mutex<Served>,
}

impl Serving {
    async fn answer(self: &Arc<Self>, request: &Request<Incoming>) -> Response<Body> {
        if request.method() != Method::GET {
            return status(StatusCode::METHOD_NOT_ALLOWED);
        }
        let parts: Vec<_> = request.uri().path().split('/').skip(1).collect();
        let [given, kind, number, rest @ ..] = &parts[..] else {
            return status(StatusCode::NOT_FOUND);
        };
        // Only the tool knows the password. Nobody else needs to learn what is here.
        let Some(number) = number
            .parse()
            .ok()
            .filter(|_| loopback::is_same(given.as_bytes(), &self.password))
        else {
            return status(StatusCode::NOT_FOUND);
        };
        match (*kind, rest) {
            ("registry", rest) if rest.iter().all(|part| is_plain(part)) => {
                self.ask_registry(number, rest, request.uri().query()).await
            }
            ("archive", []) => self.archive(number).await,
            _ => status(StatusCode::NOT_FOUND),
        }
    }

    async fn ask_registry(
        &self,
        number: usize,
        rest: &[&str],
        query: Option<&str>,
    ) -> Response<Body> {
        let Some(host) = self.setup.hosts.get(number) else {
            return status(StatusCode::NOT_FOUND);
        };
        let Ok(mut url) = host.services.providers.join(&rest.join("/")) else {
            return status(StatusCode::NOT_FOUND);
        };
        url.set_query(query);
        let slow = &self.slow[number];
        if let [namespace, name, version, "download", system, architecture] = rest
            && format!("{system}_{architecture}") == self.setup.platform
            && !slow.load(Ordering::Relaxed)
        {
            let address = format!("{}/{namespace}/{name}", host.name);
            if let Some(package) = Package::new(&address, version, &self.setup.platform)
                && let Some(document) = self.document(package, &url, slow).await
            {
                let mut response = status(StatusCode::OK);
                let json = HeaderValue::from_static("application/json");
                response.headers_mut().insert(CONTENT_TYPE, json);
                *response.body_mut() = whole(document.into());
                return response;
            }
        }
        redirect(&url)
    }

    /// The registry's document about a package, with an archive of this server. `None`: the tool asks the registry itself.
    async fn document(&self, package: Package, url: &Url, slow: &AtomicBool) -> Option<Vec<u8>> {
        let fetched = self.setup.fetcher.located(url, LARGEST_DOCUMENT);
        let (text, url) = match timeout(self.setup.patience.document, fetched).await {
            Ok(Ok(fetched)) => fetched,
            Ok(Err(error)) => {
                info!(%package, error = chain(&error), "the tool asks the registry itself");
                return None;
            }
            Err(_) => {
                info!(%package, "the registry is slow: the tool asks it itself");
                slow.store(true, Ordering::Relaxed);
                return None;
            }
        };
        let mut document: Map<String, Value> = serde_json::from_slice(&text).ok()?;
        let archive = archive_of(package, &document, &url)?;
        for name in ["shasums_url", "shasums_signature_url"] {
            if let Some(Value::String(address)) = document.get_mut(name) {
                // They are relative to the address of the document.
                *address = url.join(address).ok()?.into();
            }
        }
        let number = {
            let mut archives = runtime::lock(&self.archives);
            if archives.len() >= MOST_ARCHIVES {
                return None;
            }
            archives.push(archive);
            archives.len() - 1
        };
        let address = format!("{}/archive/{number}", self.address.get()?);
        document.insert("download_url".to_owned(), address.into());
        serde_json::to_vec(&document).ok()
    }

    async fn archive(self: &Arc<Self>, number: usize) -> Response<Body> {
        let archive = runtime::lock(&self.archives).get(number).cloned();
        let Some(archive) = archive else {
            return status(StatusCode::NOT_FOUND);
        };
        if let Some(stored) = self.stored(number, &archive).await {
            runtime::lock(&self.served).stored += 1;
            return stored;
        }
        let answered = self.setup.fetcher.answer(&archive.url, LARGEST_ARCHIVE);
        let answer = match timeout(self.setup.patience.archive, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return self.leave_to_tool(&archive, &chain(&error)),
            Err(_) => return self.leave_to_tool(&archive, "its server is slow"),
        };
        let length = answer.content_length();
        let (sender, receiver) = mpsc::channel(WAITING_CHUNKS);
        let serving = Arc::clone(self);
        self.transfers
            .spawn(async move { serving.transfer(answer, archive, sender).await });
        let chunks = stream::unfold(receiver, async |mut receiver| {
            let chunk = receiver.recv().await?;
            Some((chunk, receiver))
        });
        body(length, streamed(chunks))
    }

    fn leave_to_tool(&self, archive: &Archive, why: &str) -> Response<Body> {
        let text = format!("{}: {why}", archive.package);
        let failures = &mut runtime::lock(&self.served).failures;
        // A tool tries again.
        if failures.len() < MOST_ARCHIVES && !failures.contains(&text) {
            failures.push(text);
        }
        redirect(&archive.url)
    }

    /// The archive of the store. `None` if it has none.
    async fn stored(&self, number: usize, archive: &Archive) -> Option<Response<Body>> {
        let Archive {
            package, sha256, ..
        } = archive;
        // The tool may ask for it again.
        let name = format!("{number}-{}.zip", uuid::Uuid::new_v4().simple());
        let copy = self.setup.scratch.join(name);
        let opened = async {
            if !self.setup.store.copy(package, sha256, &copy).await? {
                return Ok(None);
            }
            let file = File::open(&copy).await?;
            tokio::fs::remove_file(&copy).await?;
            let length = file.metadata().await?.len();
            io::Result::Ok(Some((file, length)))
        };
        let (file, length) = opened.await.unwrap_or_else(|error| {
            warn!(%error, %package, "the package in the provider store cannot be used");
            None
        })?;
        let chunks = stream::try_unfold(file, async |mut file| {
            let mut chunk = BytesMut::with_capacity(CHUNK_BYTES);
            let read = file.read_buf(&mut chunk).await.map_err(BodyError::from)?;
            Ok((read > 0).then(|| (chunk.freeze(), file)))
        });
        Some(body(Some(length), streamed(chunks)))
    }

    /// Passes an archive on to the tool, and keeps it if it is the one that the registry has signed.
    async fn transfer(
        &self,
        mut answer: reqwest::Response,
        archive: Archive,
        sender: mpsc::Sender<Result<Bytes, BodyError>>,
    ) {
        let length = answer.content_length();
        let mut received = 0;
        let mut kept = Kept::new(&self.setup.scratch);
        // The tool closes its connection when it has all bytes.
        while length != Some(received) {
            let chunk = tokio::select! {
                biased;
                chunk = answer.chunk() => chunk,
                () = sender.closed() => return,
            };
            let chunk = match chunk {
                Ok(Some(chunk)) => chunk,
                Ok(None) => break,
                Err(error) => {
                    // The tool sees that its archive has broken off.
                    let _ = sender.send(Err(error.without_url().into())).await;
                    return;
                }
            };
            received += chunk.len() as u64;
            kept.add(&chunk, received);
            if sender.send(Ok(chunk)).await.is_err() && length != Some(received) {
                return;
            }
        }
        drop(sender);
        runtime::lock(&self.served).fetched += 1;
        let Archive {
            package, sha256, ..
        } = archive;
        let keeping = async {
            let file = kept.finished(&sha256)?;
            self.setup.store.keep(&package, file.path(), &sha256).await
        };
        if let Err(error) = keeping.await {
            warn!(%package, %error, "it is not in the provider store");
        }
    }
}

/// What the document says of the archive of a package. `None` if it says nothing that could be kept.
fn archive_of(package: Package, document: &Map<String, Value>, at: &Url) -> Option<Archive> {
    let text = |name| document.get(name).and_then(Value::as_str);
    let url = at.join(text("download_url")?).ok()?;
    (url.scheme() == "https").then_some(Archive {
        package,
        sha256: text("shasum")?.to_ascii_lowercase(),
        url,
    })
}

/// A copy of an archive that passes.
struct Kept {
    file: io::Result<NamedTempFile>,
    hasher: Sha256,
}

impl Kept {
    fn new(folder: &Path) -> Self {
        Self {
            file: NamedTempFile::new_in(folder),
            hasher: Sha256::new(),
        }
    }

    /// If the disk is full, the tool gets its archive all the same.
    fn add(&mut self, chunk: &[u8], received: u64) {
        let Ok(file) = &mut self.file else { return };
        self.hasher.update(chunk);
        let written = if received > LARGEST_ARCHIVE {
            Err(io::Error::from(io::ErrorKind::FileTooLarge))
        } else {
            // A chunk is the content of a socket's buffer, as for every download.
            file.write_all(chunk)
        };
        if let Err(error) = written {
            self.file = Err(error);
        }
    }

    fn finished(self, sha256: &str) -> io::Result<NamedTempFile> {
        let file = self.file?;
        if hex(&self.hasher.finalize()) == sha256 {
            Ok(file)
        } else {
            Err(io::Error::other(
                "it is not the one that its registry names",
            ))
        }
    }
}

fn redirect(url: &Url) -> Response<Body> {
    let Ok(address) = HeaderValue::from_str(url.as_str()) else {
        return status(StatusCode::BAD_GATEWAY);
    };
    let mut response = status(StatusCode::TEMPORARY_REDIRECT);
    response.headers_mut().insert(LOCATION, address);
    response
}

/// An answer of this length, if it is known. Then the tool notices what is missing.
fn body(length: Option<u64>, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    if let Some(length) = length {
        response
            .headers_mut()
            .insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    response
}

/// Names and versions need no other characters.
fn is_plain(part: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.+~".contains(&byte);
    part.bytes().all(known) && !part.bytes().all(|byte| byte == b'.')
}
