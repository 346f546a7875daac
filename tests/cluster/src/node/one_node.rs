//! A cluster of one node that a command runs beside, and ends with it.

use std::ffi::OsString;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use test_peers::wait;

use super::power::Power;
use super::{Folder, NODE, images, network, runtime};
use crate::control_plane::{ControlPlane, Programs};

const START: Duration = Duration::from_mins(5);
/// Folders of the machine to which programs write that have no option for another one. An empty one may remain.
const PRIVATE: [&str; 5] = [
    "/run",
    "/var/log",
    "/var/lib/cni",
    "/var/lib/kubelet",
    "/opt/containerd",
];
/// Settings of the kernel that a kubelet changes, and that no namespace has for itself.
const KERNEL_SETTINGS: [&str; 6] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
];

/// What the program is called with.
const USAGE: &str = "usage: real_node FOLDER IMAGES ETCD API_SERVER CONTROLLER_MANAGER SCHEDULER KUBELET PROXY COMMAND...";

/// Starts the cluster, runs the command and returns with its outcome. What still runs then ends with the namespaces of the
/// process, which `cargo xtask test node` makes.
///
/// # Errors
/// Fails with what did not start.
pub async fn run(arguments: impl IntoIterator<Item = OsString>) -> Result<ExitCode> {
    let mut arguments = arguments.into_iter().skip(1).map(PathBuf::from);
    let mut next = || arguments.next().context(USAGE);
    let (folder, kept) = (Folder::new(&next()?), next()?);
    let programs = Programs {
        etcd: next()?,
        api_server: next()?,
        controllers: Some([next()?, next()?]),
    };
    let (kubelet, proxy, program) = (next()?, next()?, next()?);
    ensure!(
        std::process::id() < 10,
        "this is to be started in namespaces of its own, by `cargo xtask test node`"
    );
    // The client of this process; there is no other.
    drop(rustls::crypto::ring::default_provider().install_default());
    for private in PRIVATE {
        fs::create_dir_all(private)?;
        network::run(Command::new("mount").args(["-t", "tmpfs", "tmpfs", private]))?;
    }
    keep_kernel_settings(&folder)?;
    network::set_up(&folder)?;

    let mut power = Power::new(&folder, &kubelet);
    power.containerd()?;
    let own = std::env::current_exe()?;
    let built = own.parent().context("a program is in a folder")?.to_owned();
    let for_images = folder.clone();
    let imported = tokio::task::spawn_blocking(move || -> Result<()> {
        for layout in images::archives(&built, &kept)? {
            images::import(&layout, &for_images)?;
        }
        Ok(())
    });
    let address: IpAddr = network::NODE_ADDRESS.parse()?;
    let mut plane = ControlPlane::start_at(&programs, address).await?;
    fs::copy(plane.kubeconfig_file("default")?, folder.kubeconfig())?;
    imported.await??;
    power.kubelet()?;
    runtime::start("proxy", &mut runtime::proxy(&proxy, &folder), &folder)?;
    runtime::start("dns", &mut network::name_server(&folder), &folder)?;
    until_ready(&folder).await?;
    power.serve()?;

    let mut tests = tokio::process::Command::new(program);
    tests.args(arguments).env(NODE, folder.path(""));
    let status = tokio::select! {
        status = tests.status() => status?,
        // The tests end with the namespaces of this process.
        failure = plane.ended() => return Err(failure.into()),
    };
    Ok(ExitCode::from(u8::from(!status.success())))
}

/// Puts files over the settings, so that the kubelet changes these.
fn keep_kernel_settings(folder: &Folder) -> Result<()> {
    for name in KERNEL_SETTINGS {
        let setting = Path::new("/proc/sys").join(name);
        let copy = folder.path(&name.replace('/', "-"));
        fs::write(&copy, fs::read_to_string(&setting)?)?;
        network::run(Command::new("mount").arg("--bind").args([&copy, &setting]))?;
    }
    Ok(())
}

async fn until_ready(folder: &Folder) -> Result<()> {
    let file = Kubeconfig::read_from(folder.kubeconfig())?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    let nodes = Api::<Node>::all(Client::try_from(config)?);
    let is_ready = || async {
        let conditions = nodes
            .get(runtime::NODE_NAME)
            .await?
            .status
            .and_then(|status| status.conditions);
        let ready = conditions
            .iter()
            .flatten()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True");
        ensure!(ready, "{conditions:?}");
        Ok(())
    };
    wait::within(START, "the node is ready", is_ready)
        .await
        .with_context(|| {
            let log = fs::read_to_string(folder.path("kubelet.log")).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            let end = lines[lines.len().saturating_sub(20)..].join("\n");
            format!("the kubelet's log ends: {end}")
        })
}
