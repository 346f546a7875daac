//! Addresses and names of the node, in a network namespace that has no other: those of the node itself, of its pods, and of
//! what listens on loopback for tests.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::Folder;

/// The node, its kubelet and the API server.
pub const NODE_ADDRESS: &str = "10.20.0.1";
/// Pods that connect to it reach the same port of loopback, where the servers of tests listen.
pub const LOOPBACK_ADDRESS: &str = "10.20.0.2";
/// Addresses of pods.
pub const PODS: &str = "10.244.0.0/16";
/// Addresses of Services, as the control plane gives them.
const SERVICES: &str = "10.0.0.0/24";
/// Where Debian keeps the plugins.
pub const PLUGINS: &str = "/usr/lib/cni";

/// Makes addresses and routes, and writes what containerd makes networks of pods by.
///
/// # Errors
/// Fails with what a program said.
pub fn set_up(folder: &Folder) -> Result<()> {
    ip(&["link", "set", "lo", "up"])?;
    for address in [NODE_ADDRESS, LOOPBACK_ADDRESS] {
        ip(&["address", "add", &format!("{address}/32"), "dev", "lo"])?;
    }
    // kube-proxy sends it elsewhere, but only what has a route gets as far.
    ip(&["route", "add", SERVICES, "dev", "lo", "src", NODE_ADDRESS])?;
    for setting in ["conf/all/route_localnet", "ip_forward"] {
        let path = format!("/proc/sys/net/ipv4/{setting}");
        fs::write(&path, "1").with_context(|| format!("could not write `{path}`"))?;
    }
    let rule = "-t nat -A PREROUTING -p tcp -j DNAT --to-destination 127.0.0.1 -d";
    run(Command::new("iptables")
        .args(rule.split(' '))
        .arg(LOOPBACK_ADDRESS))?;
    let plugins = json!({
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge", "bridge": "pods0", "isGateway": true, "hairpinMode": true,
                "ipam": {
                    "type": "host-local", "ranges": [[{"subnet": PODS}]], "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": folder.path("addresses"),
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    });
    let network = folder.path("network");
    fs::create_dir_all(&network)?;
    fs::write(network.join("pods.conflist"), plugins.to_string())?;
    fs::create_dir_all(folder.hosts())?;
    Ok(())
}

/// Tells pods the addresses of names. No other name exists.
pub fn name_server(folder: &Folder) -> Command {
    let mut command = Command::new("dnsmasq");
    command
        .args(["--keep-in-foreground", "--no-resolv", "--no-hosts"])
        .args(["--local=/#/", "--bind-interfaces", "--user=root"])
        .arg("--conf-file=/dev/null")
        .arg(format!("--pid-file={}", folder.path("dns.pid").display()))
        .arg(format!("--hostsdir={}", folder.hosts().display()))
        .arg(format!("--listen-address={NODE_ADDRESS}"));
    command
}

fn ip(arguments: &[&str]) -> Result<()> {
    run(Command::new("ip").args(arguments))
}

pub(crate) fn run(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("{command:?} does not start: `cargo xtask setup` installs it"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed ({}): {}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
