//! A real API server with its etcd, from the folder `KUBEBUILDER_ASSETS` names, on free ports of loopback.
//!
//! Started for checks of what the in-process server claims; both processes end with the value.

use std::env;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kube::{Client, Config};
use serde_json::json;
use tempfile::TempDir;

const START: Duration = Duration::from_mins(1);
const TOKEN: &str = "admin-token";

/// Why a real API server did not start.
#[derive(Debug, thiserror::Error)]
pub enum RealServerError {
    /// A program, folder or port is not to be had.
    #[error("`etcd` or `kube-apiserver` of `KUBEBUILDER_ASSETS` did not start")]
    System(#[from] io::Error),
    /// The key of service accounts could not be made.
    #[error("no key for service accounts")]
    Key(#[from] rcgen::Error),
    /// A client could not be made.
    #[error("no client for the API server")]
    Client(#[from] kube::Error),
    /// It never said that it is ready.
    #[error("the API server was not ready in time, its log ends: {log}")]
    NotReady {
        /// The last of what it wrote.
        log: String,
    },
}

/// A running API server.
#[derive(Debug)]
pub struct RealServer {
    children: Vec<Child>,
    port: u16,
    dir: TempDir,
}

impl RealServer {
    /// Starts the programs in the folder `KUBEBUILDER_ASSETS` names; nothing when it names none.
    pub async fn from_environment() -> Result<Option<Self>, RealServerError> {
        match env::var_os("KUBEBUILDER_ASSETS") {
            Some(assets) => Self::start(Path::new(&assets)).await.map(Some),
            None => Ok(None),
        }
    }

    async fn start(assets: &Path) -> Result<Self, RealServerError> {
        let dir = tempfile::tempdir()?;
        let (etcd, peer, port) = (free_port()?, free_port()?, free_port()?);
        let mut server = Self {
            children: Vec::new(),
            port,
            dir,
        };
        let (client_url, peer_url) = (
            format!("http://127.0.0.1:{etcd}"),
            format!("http://127.0.0.1:{peer}"),
        );
        let data = server.file("etcd");
        server.spawn(
            &assets.join("etcd"),
            &[
                ("data-dir", data.display().to_string()),
                ("listen-client-urls", client_url.clone()),
                ("advertise-client-urls", client_url.clone()),
                ("listen-peer-urls", peer_url.clone()),
                ("initial-advertise-peer-urls", peer_url.clone()),
                ("initial-cluster", format!("default={peer_url}")),
                ("unsafe-no-fsync", "true".to_owned()),
            ],
        )?;
        let key = server.file("account.key");
        fs::write(&key, rcgen::KeyPair::generate()?.serialize_pem())?;
        let tokens = server.file("tokens.csv");
        fs::write(&tokens, format!("{TOKEN},admin,admin,system:masters\n"))?;
        let key = key.display().to_string();
        let certificates = server.file("certificates").display().to_string();
        server.spawn(
            &assets.join("kube-apiserver"),
            &[
                ("etcd-servers", client_url),
                ("bind-address", "127.0.0.1".to_owned()),
                ("secure-port", port.to_string()),
                ("cert-dir", certificates),
                ("token-auth-file", tokens.display().to_string()),
                ("authorization-mode", "RBAC".to_owned()),
                ("service-account-issuer", "https://127.0.0.1/".to_owned()),
                ("service-account-key-file", key.clone()),
                ("service-account-signing-key-file", key),
                ("service-cluster-ip-range", "10.0.0.0/24".to_owned()),
                // Nobody is there to make the accounts it asks for.
                ("disable-admission-plugins", "ServiceAccount".to_owned()),
            ],
        )?;
        server.ready().await?;
        Ok(server)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn spawn(&mut self, program: &Path, flags: &[(&str, String)]) -> io::Result<()> {
        let name = program
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let log = fs::File::create(self.file(&format!("{name}.log")))?;
        let child = Command::new(program)
            .args(
                flags
                    .iter()
                    .map(|(flag, value)| format!("--{flag}={value}")),
            )
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()?;
        self.children.push(child);
        Ok(())
    }

    /// A client that may do everything.
    pub fn client(&self) -> Result<Client, kube::Error> {
        let url = format!("https://127.0.0.1:{}", self.port);
        let mut config = Config::new(
            url.parse()
                .map_err(|error| kube::Error::Service(Box::new(error) as _))?,
        );
        // The server signs its certificate itself, for this run.
        config.accept_invalid_certs = true;
        config.auth_info.token = Some(TOKEN.to_owned().into());
        Client::try_from(config)
    }

    /// A kubeconfig of the one who may do everything, for programs; `namespace` is the one of its context.
    pub fn kubeconfig_file(&self, namespace: &str) -> io::Result<PathBuf> {
        let path = self.file(&format!("kubeconfig-{namespace}"));
        let server = format!("https://127.0.0.1:{}", self.port);
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server, "insecure-skip-tls-verify": true}}],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin", "namespace": namespace}}],
        });
        fs::write(&path, config.to_string())?;
        Ok(path)
    }

    async fn ready(&self) -> Result<(), RealServerError> {
        let client = self.client()?;
        let until = Instant::now() + START;
        loop {
            let asked = axum::http::Request::get("/readyz").body(Vec::new());
            if let Ok(request) = asked
                && client.request_text(request).await.is_ok()
            {
                return Ok(());
            }
            if Instant::now() > until {
                let log = fs::read_to_string(self.file("kube-apiserver.log")).unwrap_or_default();
                let lines: Vec<&str> = log.lines().rev().take(5).collect();
                return Err(RealServerError::NotReady {
                    log: lines.join(" | "),
                });
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

impl Drop for RealServer {
    fn drop(&mut self) {
        for child in self.children.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn free_port() -> io::Result<u16> {
    TcpListener::bind("127.0.0.1:0")?
        .local_addr()
        .map(|address| address.port())
}
