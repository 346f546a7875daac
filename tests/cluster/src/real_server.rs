//! A real API server with its etcd, from the folder `KUBEBUILDER_ASSETS` names, on free ports of loopback.
//!
//! Nothing else of a control plane runs: no controller manager and no scheduler. Both processes end with the value;
//! they stay in the process group of the test, so that whoever ends that by force ends them too.

use std::env;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kube::{Client, Config};
use rcgen::KeyPair;
use serde_json::json;
use tempfile::TempDir;

/// How long both may take to be ready, on a busy machine.
const START: Duration = Duration::from_mins(2);
const POLL: Duration = Duration::from_millis(100);
/// How often a port may be taken by somebody else before the server has it.
const TRIES: usize = 3;

/// Why a real API server did not start.
#[derive(Debug, thiserror::Error)]
pub enum RealServerError {
    /// A program, folder or port is not to be had.
    #[error("`etcd` or `kube-apiserver` of `KUBEBUILDER_ASSETS` did not start")]
    System(#[from] io::Error),
    /// Its certificate, or the key of service accounts, could not be made.
    #[error("no certificate or key for the API server")]
    Key(#[from] rcgen::Error),
    /// A client could not be made.
    #[error("no client for the API server")]
    Client(#[from] kube::Error),
    /// It ended, or never said that it is ready.
    #[error("the API server was not ready in time, its log ends: {log}")]
    NotReady {
        /// The last of what it wrote.
        log: String,
    },
}

/// A running API server.
#[derive(Debug)]
pub struct RealServer {
    etcd: Option<Child>,
    api_server: Option<Child>,
    /// Program and flags, to start it once more.
    api_server_command: (PathBuf, Vec<(&'static str, String)>),
    url: String,
    token: String,
    /// Signed by itself, for this run.
    certificate: rcgen::Certificate,
    dir: TempDir,
}

impl RealServer {
    /// Starts the programs in the folder `KUBEBUILDER_ASSETS` names; nothing when it names none.
    pub async fn from_environment() -> Result<Option<Self>, RealServerError> {
        match env::var_os("KUBEBUILDER_ASSETS") {
            Some(assets) if !assets.is_empty() => Self::start(Path::new(&assets)).await.map(Some),
            _ => Ok(None),
        }
    }

    pub(crate) async fn start(assets: &Path) -> Result<Self, RealServerError> {
        let mut tries = 1;
        loop {
            match Self::start_once(assets).await {
                Err(RealServerError::NotReady { log })
                    if log.contains("address already in use") && tries < TRIES =>
                {
                    tries += 1;
                }
                other => return other,
            }
        }
    }

    async fn start_once(assets: &Path) -> Result<Self, RealServerError> {
        let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let signed = rcgen::generate_simple_self_signed(names)?;
        let [etcd, peer, port] = free_ports()?;
        let mut server = Self {
            etcd: None,
            api_server: None,
            api_server_command: (assets.join("kube-apiserver"), Vec::new()),
            url: format!("https://127.0.0.1:{port}"),
            token: uuid::Uuid::new_v4().simple().to_string(),
            certificate: signed.cert,
            dir: tempfile::tempdir()?,
        };
        let (client_url, peer_url) = (
            format!("http://127.0.0.1:{etcd}"),
            format!("http://127.0.0.1:{peer}"),
        );
        let data = server.file("etcd");
        let etcd = server.spawn(
            &assets.join("etcd"),
            &[
                ("data-dir", data.display().to_string()),
                ("listen-client-urls", client_url.clone()),
                ("advertise-client-urls", client_url.clone()),
                ("listen-peer-urls", peer_url.clone()),
                ("initial-advertise-peer-urls", peer_url.clone()),
                ("initial-cluster", format!("default={peer_url}")),
                // It does not outlive a crash of the machine either.
                ("unsafe-no-fsync", "true".to_owned()),
            ],
        )?;
        server.etcd = Some(etcd);
        server.api_server_command.1 =
            server.api_server_flags(&client_url, port, &signed.signing_key)?;
        server.start_api_server().await?;
        Ok(server)
    }

    async fn start_api_server(&mut self) -> Result<(), RealServerError> {
        let (program, flags) = &self.api_server_command;
        self.api_server = Some(self.spawn(program, flags)?);
        self.ready().await
    }

    /// Ends the API server and starts it once more, on the same port and with what is stored. It then knows no version
    /// from before.
    pub(crate) async fn restart(&mut self) -> Result<(), RealServerError> {
        end(&mut self.api_server);
        self.start_api_server().await
    }

    fn api_server_flags(
        &self,
        etcd: &str,
        port: u16,
        key: &KeyPair,
    ) -> Result<Vec<(&'static str, String)>, RealServerError> {
        let write = |name: &str, text: &str| -> io::Result<String> {
            let path = self.file(name);
            fs::write(&path, text)?;
            Ok(path.display().to_string())
        };
        let account = KeyPair::generate()?;
        let account_public = write("account.pub", &account.public_key_pem())?;
        let account = write("account.key", &account.serialize_pem())?;
        let user = format!("{},admin,admin,system:masters\n", self.token);
        Ok(vec![
            ("etcd-servers", etcd.to_owned()),
            ("bind-address", "127.0.0.1".to_owned()),
            ("secure-port", port.to_string()),
            ("cert-dir", self.file("certificates").display().to_string()),
            ("tls-cert-file", write("tls.crt", &self.certificate.pem())?),
            (
                "tls-private-key-file",
                write("tls.key", &key.serialize_pem())?,
            ),
            ("token-auth-file", write("tokens.csv", &user)?),
            ("authorization-mode", "RBAC".to_owned()),
            ("service-account-issuer", "https://127.0.0.1/".to_owned()),
            ("service-account-key-file", account_public),
            ("service-account-signing-key-file", account),
            ("service-cluster-ip-range", "10.0.0.0/24".to_owned()),
        ])
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn spawn(&self, program: &Path, flags: &[(&str, String)]) -> io::Result<Child> {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let log = fs::File::create(self.file(&format!("{name}.log")))?;
        Command::new(program)
            .args(
                flags
                    .iter()
                    .map(|(flag, value)| format!("--{flag}={value}")),
            )
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
    }

    /// How the one who may do everything gets in.
    pub(crate) fn config(&self) -> Result<Config, kube::Error> {
        let url = self.url.parse();
        let mut config =
            Config::new(url.map_err(|error| kube::Error::Service(Box::new(error) as _))?);
        config.root_cert = Some(vec![self.certificate.der().to_vec()]);
        config.auth_info.token = Some(self.token.clone().into());
        Ok(config)
    }

    /// A client that may do everything.
    pub fn client(&self) -> Result<Client, kube::Error> {
        Client::try_from(self.config()?)
    }

    /// A kubeconfig of the one who may do everything, for programs; `namespace` is the one of its context.
    pub fn kubeconfig_file(&self, namespace: &str) -> io::Result<PathBuf> {
        let path = self.file(&format!("kubeconfig-{namespace}"));
        let authority = BASE64_STANDARD.encode(self.certificate.pem());
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority-data": authority}}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin", "namespace": namespace}}],
        });
        fs::write(&path, config.to_string())?;
        Ok(path)
    }

    async fn ready(&mut self) -> Result<(), RealServerError> {
        let client = self.client()?;
        let until = Instant::now() + START;
        loop {
            let asked = axum::http::Request::get("/readyz").body(Vec::new());
            if let Ok(request) = asked
                && client.request_text(request).await.is_ok()
            {
                return Ok(());
            }
            let mut ended = false;
            for child in [&mut self.etcd, &mut self.api_server].into_iter().flatten() {
                ended |= child.try_wait()?.is_some();
            }
            if ended || Instant::now() > until {
                return Err(RealServerError::NotReady { log: self.log() });
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The last that each program wrote.
    fn log(&self) -> String {
        let ends = ["etcd.log", "kube-apiserver.log"].map(|name| {
            let log = fs::read_to_string(self.file(name)).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            lines[lines.len().saturating_sub(8)..].join("\n")
        });
        ends.join("\n")
    }
}

impl Drop for RealServer {
    fn drop(&mut self) {
        end(&mut self.api_server);
        end(&mut self.etcd);
    }
}

fn end(child: &mut Option<Child>) {
    if let Some(mut child) = child.take() {
        // One that has ended already needs no end.
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Three at once, so that they differ.
fn free_ports() -> io::Result<[u16; 3]> {
    let listeners = [
        TcpListener::bind("127.0.0.1:0")?,
        TcpListener::bind("127.0.0.1:0")?,
        TcpListener::bind("127.0.0.1:0")?,
    ];
    let mut ports = [0; 3];
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}
