//! The control plane of Kubernetes on free ports of loopback: etcd, the API server and, where they are wanted, the controller
//! manager and the scheduler. It has no nodes: those are the tests' own. For real nodes the API server has another address.
//!
//! All processes end with the value. They stay in the process group of their parent, so that a signal to the group ends them
//! too.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kube::{Client, Config};
use rcgen::KeyPair;
use serde_json::json;
use tempfile::TempDir;
use test_peers::wait;

use crate::processes::{EndedProgram, Processes};

/// How long etcd and the API server may take to be ready, on a busy machine.
const START: Duration = Duration::from_mins(5);
/// How often another process may take a port before the server has it.
const TRIES: usize = 10;
/// Requests per second of the controllers, which wait for their turn otherwise when many tests begin at once.
const RATE: &str = "1000";
/// Addresses of Services, and the first of them, which is the API server's.
const SERVICES: &str = "10.0.0.0/24";
const KUBERNETES: &str = "10.0.0.1";

/// Why a control plane did not start.
#[derive(Debug, thiserror::Error)]
pub enum ControlPlaneError {
    /// A program, folder or port is not available.
    #[error("a folder, port or file of the control plane is not to be had")]
    System(#[from] io::Error),
    /// A program could not be started.
    #[error("could not start `{}`", program.display())]
    Program {
        /// Which one.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Its certificate, or the key of service accounts, could not be made.
    #[error("no certificate or key for the API server")]
    Key(#[from] rcgen::Error),
    /// A client could not be made.
    #[error("no client for the API server")]
    Client(#[from] kube::Error),
    /// It never said that it is ready.
    #[error("the API server was not ready in time, the logs end: {log}")]
    NotReady {
        /// The last lines of all programs.
        log: String,
    },
    /// A program ended.
    #[error(transparent)]
    Ended(#[from] EndedProgram),
}

/// The programs of a control plane.
#[derive(Debug, Clone)]
pub struct Programs {
    /// `etcd`.
    pub etcd: PathBuf,
    /// `kube-apiserver`.
    pub api_server: PathBuf,
    /// `kube-controller-manager` and `kube-scheduler`. Without them nothing happens to objects but what clients do.
    pub controllers: Option<[PathBuf; 2]>,
}

/// A running control plane.
#[derive(Debug)]
pub struct ControlPlane {
    processes: Processes,
    address: IpAddr,
    url: String,
    token: String,
    /// Signed by itself, for this run.
    certificate: rcgen::Certificate,
    dir: TempDir,
}

impl ControlPlane {
    /// Starts it, and returns when it takes requests.
    pub async fn start(programs: &Programs) -> Result<Self, ControlPlaneError> {
        Self::start_at(programs, Ipv4Addr::LOCALHOST.into()).await
    }

    /// Starts it with its API server at an address of this machine, where nodes and pods can reach it.
    pub async fn start_at(programs: &Programs, address: IpAddr) -> Result<Self, ControlPlaneError> {
        let mut tries = 1;
        loop {
            match Self::start_once(programs, address).await {
                Err(ControlPlaneError::Ended(program))
                    if program.log.contains("address already in use") && tries < TRIES =>
                {
                    tries += 1;
                }
                other => return other,
            }
        }
    }

    async fn start_once(programs: &Programs, address: IpAddr) -> Result<Self, ControlPlaneError> {
        let names = [&address.to_string(), "localhost", KUBERNETES].map(str::to_owned);
        let signed = rcgen::generate_simple_self_signed(names)?;
        let [etcd, peer, port] = free_ports()?;
        let dir = tempfile::tempdir()?;
        let mut plane = Self {
            processes: Processes::new(dir.path().to_owned()),
            address,
            url: format!("https://{address}:{port}"),
            token: uuid::Uuid::new_v4().simple().to_string(),
            certificate: signed.cert,
            dir,
        };
        let (client_url, peer_url) = (
            format!("http://127.0.0.1:{etcd}"),
            format!("http://127.0.0.1:{peer}"),
        );
        let data = plane.file("etcd");
        plane.spawn(
            &programs.etcd,
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
        let flags = plane.api_server_flags(&client_url, port, &signed.signing_key)?;
        plane.spawn(&programs.api_server, &flags)?;
        plane.ready().await?;
        if let Some([manager, scheduler]) = &programs.controllers {
            let flags = plane.controller_flags()?;
            plane.spawn(scheduler, &flags)?;
            let account = |name: &str| plane.file(name).display().to_string();
            let (key, authority) = (account("account.key"), account("tls.crt"));
            let own = [
                ("service-account-private-key-file", key),
                ("root-ca-file", authority),
            ];
            plane.spawn(manager, &[&flags[..], &own].concat())?;
        }
        Ok(plane)
    }

    /// What controller manager and scheduler have in common.
    fn controller_flags(&self) -> io::Result<Vec<(&'static str, String)>> {
        let kubeconfig = self.kubeconfig_file("default")?;
        Ok(vec![
            ("kubeconfig", kubeconfig.display().to_string()),
            ("leader-elect", "false".to_owned()),
            ("kube-api-qps", RATE.to_owned()),
            ("kube-api-burst", RATE.to_owned()),
            // No test sends them a request.
            ("secure-port", "0".to_owned()),
        ])
    }

    fn api_server_flags(
        &self,
        etcd: &str,
        port: u16,
        key: &KeyPair,
    ) -> Result<Vec<(&'static str, String)>, ControlPlaneError> {
        let write = |name: &str, text: &str| -> io::Result<String> {
            let path = self.file(name);
            fs::write(&path, text)?;
            Ok(path.display().to_string())
        };
        let account = KeyPair::generate()?;
        let account_public = write("account.pub", &account.public_key_pem())?;
        let account = write("account.key", &account.serialize_pem())?;
        let user = format!("{},admin,admin,system:masters\n", self.token);
        let mut flags = vec![
            ("etcd-servers", etcd.to_owned()),
            ("bind-address", self.address.to_string()),
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
            ("service-cluster-ip-range", SERVICES.to_owned()),
            // Each test has nodes of its own, and only its namespaces are led there.
            ("enable-admission-plugins", "PodNodeSelector".to_owned()),
        ];
        if !self.address.is_loopback() {
            flags.push(("advertise-address", self.address.to_string()));
            // The names of nodes are not resolved.
            let by_address = "InternalIP".to_owned();
            flags.push(("kubelet-preferred-address-types", by_address));
        }
        Ok(flags)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn spawn(&mut self, program: &Path, flags: &[(&str, String)]) -> Result<(), ControlPlaneError> {
        self.processes
            .start(program, flags)
            .map_err(|source| ControlPlaneError::Program {
                program: program.to_owned(),
                source,
            })
    }

    /// Waits until one of its programs ends, which none does by itself.
    pub async fn ended(&mut self) -> ControlPlaneError {
        match self.processes.until_ended().await {
            Ok(program) => program.into(),
            Err(error) => error.into(),
        }
    }

    /// How the one who may do everything gets in.
    fn config(&self) -> Result<Config, kube::Error> {
        let url = self.url.parse();
        let mut config =
            Config::new(url.map_err(|error| kube::Error::Service(Box::new(error) as _))?);
        config.root_cert = Some(vec![self.certificate.der().to_vec()]);
        config.auth_info.token = Some(self.token.clone().into());
        Ok(config)
    }

    /// A client that may do everything.
    fn client(&self) -> Result<Client, kube::Error> {
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

    async fn ready(&mut self) -> Result<(), ControlPlaneError> {
        let client = self.client()?;
        let is_ready = || async {
            let asked = axum::http::Request::get("/readyz").body(Vec::new());
            client
                .request_text(asked.map_err(kube::Error::HttpError)?)
                .await
        };
        tokio::select! {
            ready = wait::within(START, "the API server is ready", is_ready) => match ready {
                Ok(_) => Ok(()),
                Err(_) => Err(ControlPlaneError::NotReady { log: self.processes.logs() }),
            },
            ended = self.processes.until_ended() => Err(ended?.into()),
        }
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
