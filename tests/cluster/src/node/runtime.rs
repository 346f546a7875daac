//! What runs pods on the node: containerd, kubelet and kube-proxy, with all they write in the node's folder.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::Folder;
use super::images::PAUSE;
use super::network::{NODE_ADDRESS, PLUGINS, PODS};

/// The only node of the cluster.
pub(super) const NODE_NAME: &str = "node-1";

/// containerd with the plugin for Kubernetes. Root of a machine that is itself contained may not have the right to protect
/// processes from being killed for memory, so containers are protected no better than containerd is.
///
/// # Errors
/// Fails when its configuration cannot be written.
pub(super) fn containerd(folder: &Folder) -> Result<Command> {
    let config = format!(
        "version = 2\n\
         root = '{}'\n\
         state = '{}'\n\
         [grpc]\n\
         address = '{}'\n\
         [plugins.\"io.containerd.grpc.v1.cri\"]\n\
         sandbox_image = {PAUSE:?}\n\
         restrict_oom_score_adj = true\n\
         [plugins.\"io.containerd.grpc.v1.cri\".cni]\n\
         bin_dir = {PLUGINS:?}\n\
         conf_dir = '{}'\n",
        folder.path("containerd").display(),
        folder.path("containerd-state").display(),
        folder.path("containerd.sock").display(),
        folder.path("network").display(),
    );
    let file = folder.path("containerd.toml");
    fs::write(&file, config).with_context(|| format!("could not write `{}`", file.display()))?;
    let mut command = Command::new("containerd");
    command.arg("--config").arg(file);
    Ok(command)
}

/// The kubelet.
///
/// # Errors
/// Fails when its configuration cannot be written.
pub(super) fn kubelet(program: &Path, folder: &Folder) -> Result<Command> {
    let config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_ADDRESS,
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{}", folder.control_group()),
        "clusterDNS": [NODE_ADDRESS],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": format!("unix://{}", folder.path("containerd.sock").display()),
        // The machine's disk may be full of other things.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        // Some machines have no other.
        "failCgroupV1": false,
        "failSwapOn": false,
        "podLogsDir": folder.path("logs-of-pods"),
        "resolvConf": "",
        "serializeImagePulls": false,
        // As it is where control groups are of version 1: not all of a container is killed for the memory of one process.
        "singleProcessOOMKill": true,
        "volumePluginDir": folder.path("volume-plugins"),
    });
    let file = folder.path("kubelet.json");
    fs::write(&file, config.to_string())
        .with_context(|| format!("could not write `{}`", file.display()))?;
    let mut command = Command::new(program);
    command
        .arg(format!("--config={}", file.display()))
        .arg(format!("--kubeconfig={}", folder.kubeconfig().display()))
        .arg(format!("--root-dir={}", folder.path("kubelet").display()))
        .arg(format!("--hostname-override={NODE_NAME}"))
        .arg(format!("--node-ip={NODE_ADDRESS}"));
    Ok(command)
}

/// Leads what is sent to Services to their pods.
pub(super) fn proxy(program: &Path, folder: &Folder) -> Command {
    let mut command = Command::new(program);
    command
        .arg(format!("--kubeconfig={}", folder.kubeconfig().display()))
        .arg(format!("--hostname-override={NODE_NAME}"))
        .arg(format!("--cluster-cidr={PODS}"))
        .args(["--proxy-mode=iptables", "--iptables-min-sync-period=0s"])
        // Those limits are the machine's, not this network's.
        .args(["--conntrack-max-per-core=0", "--conntrack-min=0"])
        .args([
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
        ]);
    command
}

/// Writes all that a program says into a file of the folder.
///
/// # Errors
/// Fails if the program or the file is missing.
pub(super) fn start(
    name: &str,
    command: &mut Command,
    folder: &Folder,
) -> Result<std::process::Child> {
    let log = fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(folder.path(&format!("{name}.log")))?;
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("{name} does not start: `cargo xtask setup` installs it"))
}
