//! The API server, in a process of its own.

use std::env;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde_json::{Value, json};
use test_cluster::{ADMIN, Cluster, ControlPlane, Programs};

/// Namespace of the runs the launcher knows.
pub(crate) const RUNS: &str = "runs";
/// Namespace of objects made without the launcher.
pub(crate) const BARE: &str = "bare";

/// Serves until standard input ends.
pub(crate) async fn serve() -> Result<()> {
    // Whichever it is, it lives to the end of this function.
    let real = match env::var_os("KUBEBUILDER_ASSETS") {
        Some(folder) if !folder.is_empty() => {
            let programs = Programs::api_server_of(Path::new(&folder));
            Some(ControlPlane::start(&programs).await?)
        }
        _ => None,
    };
    let (mut in_process, name) = (None, "kube-apiserver of KUBEBUILDER_ASSETS");
    let (kubeconfig, name) = if let Some(real) = &real {
        (real.kubeconfig_file(RUNS)?, name)
    } else {
        let cluster = Cluster::builder().api_server_only().start().await?;
        let cluster = in_process.insert(cluster);
        (
            cluster.kubeconfig_file(ADMIN, RUNS)?,
            "API server of the test cluster",
        )
    };
    println!("{}", json!({"name": name, "kubeconfig": kubeconfig}));
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
    pub(crate) async fn start() -> Result<Self> {
        let mut process = Command::new(env::current_exe()?)
            .arg("serve-api")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = process.stdin.take();
        let mut line = String::new();
        let output = process.stdout.take().context("it was asked for")?;
        BufReader::new(output).read_line(&mut line)?;
        let told: Value = serde_json::from_str(&line).context("the API server did not start")?;
        let text = |field: &str| told[field].as_str().unwrap_or_default().to_owned();
        let server = Self {
            process,
            input,
            name: text("name"),
            kubeconfig: text("kubeconfig"),
        };
        let client = server.client().await?;
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
