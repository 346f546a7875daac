//! The API server, in a process of its own.

use std::env;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use test_cluster::{ControlPlane, Programs};

/// Namespace of the runs the launcher knows.
pub(crate) const RUNS: &str = "runs";
/// Namespace of objects made without the launcher.
pub(crate) const BARE: &str = "bare";

/// Serves until standard input ends.
pub(crate) async fn serve(etcd: &str, api_server: &str) -> Result<()> {
    let programs = Programs {
        etcd: etcd.into(),
        api_server: api_server.into(),
        controllers: None,
    };
    let plane = ControlPlane::start(&programs).await?;
    println!("{}", plane.kubeconfig_file(RUNS)?.display());
    let ended = tokio::task::spawn_blocking(|| std::io::stdin().lines().count());
    ended.await?;
    Ok(())
}

/// A running API server; it ends with this value.
pub(crate) struct ApiServer {
    process: Child,
    /// Its end is the server's.
    input: Option<ChildStdin>,
    pub(crate) name: String,
    pub(crate) kubeconfig: String,
}

impl ApiServer {
    /// Starts etcd and the API server, which are these programs.
    pub(crate) async fn start(programs: [&str; 2]) -> Result<Self> {
        let mut process = Command::new(env::current_exe()?)
            .arg("serve-api")
            .args(programs)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = process.stdin.take();
        let mut line = String::new();
        let output = process.stdout.take().context("it was asked for")?;
        BufReader::new(output).read_line(&mut line)?;
        let mut server = Self {
            process,
            input,
            name: String::new(),
            kubeconfig: line.trim_end().to_owned(),
        };
        ensure!(
            !server.kubeconfig.is_empty(),
            "the API server did not start"
        );
        let client = server.client().await?;
        let version = client.apiserver_version().await?;
        server.name = format!("kube-apiserver {}", version.git_version);
        for name in [RUNS, BARE] {
            let mut namespace = Namespace::default();
            namespace.metadata.name = Some(name.to_owned());
            let api = Api::<Namespace>::all(client.clone());
            api.create(&PostParams::default(), &namespace).await?;
            // No controller makes it here, and a real server admits no pod without it.
            let mut account = ServiceAccount::default();
            account.metadata.name = Some("default".to_owned());
            let api = Api::<ServiceAccount>::namespaced(client.clone(), name);
            api.create(&PostParams::default(), &account).await?;
        }
        Ok(server)
    }

    /// A client made as the launcher makes its own.
    pub(crate) async fn client(&self) -> Result<Client> {
        let kubeconfig = Kubeconfig::read_from(&self.kubeconfig)?;
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
        Ok(Client::try_from(config)?)
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.process.wait();
    }
}
