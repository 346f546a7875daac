//! A release server on loopback that can also send faults, and its releases.

use std::{
    collections::HashMap,
    fmt::Write as _,
    io::{Cursor, Write as _},
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use pgp::{
    composed::{
        ArmorOptions, DetachedSignature, EncryptionCaps, KeyType, SecretKeyParamsBuilder,
        SignedPublicKey, SignedSecretKey,
    },
    crypto::hash::HashAlgorithm,
    ser::Serialize as _,
    types::Password,
};
use sha2::{Digest, Sha256};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::JoinHandle,
};
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

use super::super::index::OsArch;
use job_contract::encoding::hex;

/// The answer of a path.
#[derive(Clone)]
pub(super) enum Reply {
    Body(Arc<Vec<u8>>),
    /// The body, with a `Link` to the next page.
    Page(Arc<Vec<u8>>, String),
    Status(u16),
    Redirect(String),
    /// Announces the whole body, sends half, and closes the connection.
    Truncated(Arc<Vec<u8>>),
    /// Sends half, and then nothing more.
    Stalled(Arc<Vec<u8>>),
}

impl Reply {
    pub(super) fn body(bytes: impl Into<Vec<u8>>) -> Self {
        Self::Body(Arc::new(bytes.into()))
    }
}

#[derive(Default)]
struct Routes {
    /// The last reply of a path is repeated.
    replies: HashMap<String, Vec<Reply>>,
    requests: Vec<String>,
}

pub(super) struct Server {
    pub(super) address: SocketAddr,
    routes: Arc<Mutex<Routes>>,
    /// Notified when a stalled reply has begun.
    pub(super) stalled: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Arc::<Mutex<Routes>>::default();
        let stalled = Arc::<Notify>::default();
        let (shared, begun) = (Arc::clone(&routes), Arc::clone(&stalled));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, Arc::clone(&shared), Arc::clone(&begun)));
            }
        });
        Self {
            address,
            routes,
            stalled,
            task,
        }
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(super) fn set(&self, path: &str, reply: Reply) {
        self.set_sequence(path, vec![reply]);
    }

    pub(super) fn set_sequence(&self, path: &str, replies: Vec<Reply>) {
        let mut routes = self.routes.lock().unwrap();
        routes.replies.insert(path.to_owned(), replies);
    }

    /// The number of requests for paths that end in `suffix`.
    pub(super) fn requests(&self, suffix: &str) -> usize {
        let routes = self.routes.lock().unwrap();
        routes
            .requests
            .iter()
            .filter(|path| path.ends_with(suffix))
            .count()
    }
}

async fn answer(stream: TcpStream, routes: Arc<Mutex<Routes>>, stalled: Arc<Notify>) {
    let mut stream = BufReader::new(stream);
    let mut request = String::new();
    while stream.read_line(&mut request).await.is_ok_and(|n| n > 2) {}
    let Some(path) = request.split_whitespace().nth(1).map(str::to_owned) else {
        return;
    };
    let reply = {
        let mut routes = routes.lock().unwrap();
        routes.requests.push(path.clone());
        match routes.replies.get_mut(&path) {
            Some(replies) if replies.len() > 1 => replies.remove(0),
            Some(replies) => replies[0].clone(),
            None => Reply::Status(404),
        }
    };
    let stream = stream.get_mut();
    // An error is fine here: a client may close the connection when it has enough.
    let _ = match reply {
        Reply::Body(body) => send(stream, 200, "", &body, body.len()).await,
        Reply::Page(body, next) => {
            let link = format!("Link: <{next}>; rel=\"next\"\r\n");
            send(stream, 200, &link, &body, body.len()).await
        }
        Reply::Status(status) => send(stream, status, "", b"no", 2).await,
        Reply::Redirect(to) => send(stream, 302, &format!("Location: {to}\r\n"), b"", 0).await,
        Reply::Truncated(body) => send(stream, 200, "", &body[..body.len() / 2], body.len()).await,
        Reply::Stalled(body) => {
            let _ = send(stream, 200, "", &body[..body.len() / 2], body.len()).await;
            stalled.notify_one();
            std::future::pending().await
        }
    };
}

async fn send(
    stream: &mut TcpStream,
    status: u16,
    headers: &str,
    body: &[u8],
    length: usize,
) -> std::io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status} Answer\r\nContent-Length: {length}\r\n{headers}Connection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body).await?;
    stream.shutdown().await
}

/// A publisher's signing key.
pub(super) struct Signer(SignedSecretKey);

impl Signer {
    pub(super) fn new() -> Self {
        let key = SecretKeyParamsBuilder::default()
            .key_type(KeyType::Ed25519Legacy)
            .can_certify(true)
            .can_sign(true)
            .can_encrypt(EncryptionCaps::None)
            .primary_user_id("Release Test <release@example.com>".into())
            .build()
            .unwrap()
            .generate(rand::thread_rng())
            .unwrap();
        Self(key)
    }

    pub(super) fn public_key(&self) -> String {
        SignedPublicKey::from(self.0.clone())
            .to_armored_string(ArmorOptions::default())
            .unwrap()
    }

    pub(super) fn sign(&self, document: &[u8]) -> Vec<u8> {
        DetachedSignature::sign_binary_data(
            rand::thread_rng(),
            &self.0.primary_key,
            &Password::empty(),
            HashAlgorithm::Sha256,
            document,
        )
        .unwrap()
        .to_bytes()
        .unwrap()
    }
}

pub(super) fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    // No compression, because a real binary is large, and an unoptimised compressor is slow.
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for (name, bytes) in entries {
        zip.start_file(*name, options).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

/// One release as its publisher made it. Tests may change fields before it is served.
pub(super) struct Publication {
    pub(super) tool: &'static str,
    pub(super) version: String,
    pub(super) archive: Vec<u8>,
    pub(super) sums: Vec<u8>,
    pub(super) signature: Option<Vec<u8>>,
}

impl Publication {
    pub(super) fn new(
        tool: &'static str,
        version: &str,
        archive: Vec<u8>,
        signer: Option<&Signer>,
    ) -> Self {
        let mut sums = String::new();
        let name = format!("{tool}_{version}_{}.zip", OsArch::current());
        writeln!(sums, "{}  {tool}_{version}_plan9_mips.zip", "0".repeat(64)).unwrap();
        writeln!(sums, "{}  {name}", hex(&Sha256::digest(&archive))).unwrap();
        let sums = sums.into_bytes();
        Self {
            tool,
            version: version.to_owned(),
            signature: signer.map(|signer| signer.sign(&sums)),
            sums,
            archive,
        }
    }

    fn sums_name(&self) -> String {
        format!("{}_{}_SHA256SUMS", self.tool, self.version)
    }

    pub(super) fn archive_name(&self) -> String {
        format!("{}_{}_{}.zip", self.tool, self.version, OsArch::current())
    }

    /// The address of `name` in this release.
    pub(super) fn path(&self, name: &str) -> String {
        format!("/{}/{}/{name}", self.tool, self.version)
    }

    pub(super) fn archive_path(&self) -> String {
        self.path(&self.archive_name())
    }

    pub(super) fn serve(self, server: &Server) -> Self {
        let sums = self.sums_name();
        server.set(&self.archive_path(), Reply::body(self.archive.clone()));
        server.set(&self.path(&sums), Reply::body(self.sums.clone()));
        if let Some(signature) = &self.signature {
            let suffix = if self.tool == "tofu" { "gpgsig" } else { "sig" };
            server.set(
                &self.path(&format!("{sums}.{suffix}")),
                Reply::body(signature.clone()),
            );
        }
        self
    }

    /// This release's entry in the index of Terraform, with addresses at `origin`.
    pub(super) fn terraform_entry(&self, origin: &str) -> serde_json::Value {
        let platform = OsArch::current().to_string();
        let (os, arch) = platform.split_once('_').unwrap();
        let sums = self.sums_name();
        serde_json::json!({
            "name": "terraform", "version": self.version,
            "shasums": sums,
            "shasums_signature": format!("{sums}.sig"),
            "shasums_signatures": [format!("{sums}.72D7468F.sig"), format!("{sums}.sig")],
            "builds": [
                {"name": "terraform", "version": self.version, "os": "plan9", "arch": "mips",
                 "filename": "other.zip", "url": format!("{origin}/other.zip")},
                {"name": "terraform", "version": self.version, "os": os, "arch": arch,
                 "filename": self.archive_name(), "url": format!("{origin}{}", self.archive_path())},
            ],
        })
    }

    /// This release's entry in the index of OpenTofu.
    pub(super) fn tofu_entry(&self, origin: &str) -> serde_json::Value {
        let sums = self.sums_name();
        let assets: Vec<_> = [
            self.archive_name().replace(".zip", ".tar.gz"),
            self.archive_name(),
            sums.clone(),
            format!("{sums}.sig"),
            format!("{sums}.gpgsig"),
        ]
        .into_iter()
        .map(|name| {
            let url = format!("{origin}{}", self.path(&name));
            serde_json::json!({"name": name, "browser_download_url": url})
        })
        .collect();
        serde_json::json!({"name": format!("v{}", self.version), "assets": assets})
    }
}
