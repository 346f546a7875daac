//! Provides the programs of Kubernetes: from `KUBEBUILDER_ASSETS`, else from the user's cache. The cache is filled by a download,
//! or else by a build from Go modules. Knows nothing of how the programs are started.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use sha2::Sha512;

use super::program::{GoBuild, Source, architecture, cache, check, fetch, keep, version_in};
use super::servers;

/// The variable with a folder of some of the programs, as `setup-envtest` creates it.
const ASSETS: &str = "KUBEBUILDER_ASSETS";
/// The address of the releases and their digests.
const RELEASES: &str = "https://dl.k8s.io";
/// All modules of a build of Kubernetes.
const MODULES: &str = include_str!("../../../tests/cluster/kubernetes/go.mod");
const MODULES_FOLDER: &str = "tests/cluster/kubernetes";
const ETCD: &str = "etcd";
/// The programs of a control plane.
const KUBERNETES: [&str; 3] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
];
/// The programs of a node, from the same release.
const NODE: [&str; 2] = ["kubelet", "kube-proxy"];

/// Provides the programs of a control plane, in the order of `control-plane`'s arguments: etcd, API server, controller manager,
/// scheduler.
pub(crate) fn programs() -> Result<Vec<PathBuf>> {
    etcd_and(&KUBERNETES)
}

/// Provides etcd and the API server.
pub(crate) fn api_server() -> Result<Vec<PathBuf>> {
    etcd_and(&KUBERNETES[..1])
}

fn etcd_and(names: &[&str]) -> Result<Vec<PathBuf>> {
    let cache = cache(&format!("k8s-{}", version()))?;
    let mut programs = vec![etcd(&cache)?];
    for name in names {
        programs.push(of_release(name, &cache)?);
    }
    Ok(programs)
}

/// Provides the programs of a node: kubelet and kube-proxy.
pub(crate) fn programs_of_nodes() -> Result<Vec<PathBuf>> {
    let cache = cache(&format!("k8s-{}", version()))?;
    NODE.iter().map(|name| of_release(name, &cache)).collect()
}

fn of_release(name: &str, cache: &Path) -> Result<PathBuf> {
    present(name, cache).map_or_else(|| part(name, cache), Ok)
}

/// The release that is built and downloaded.
fn version() -> &'static str {
    version_in(MODULES, "k8s.io/kubernetes")
}

fn present(name: &str, cache: &Path) -> Option<PathBuf> {
    let assets = env::var_os(ASSETS).filter(|value| !value.is_empty());
    let folders = assets.map(PathBuf::from).into_iter();
    let mut programs = folders
        .chain([cache.to_owned()])
        .map(|folder| folder.join(name));
    programs.find(|program| program.is_file())
}

fn etcd(cache: &Path) -> Result<PathBuf> {
    if let Some(program) = present(ETCD, cache).or_else(|| which::which(ETCD).ok()) {
        return Ok(program);
    }
    let kept = cache.join(ETCD);
    keep(&kept, |program| {
        let folder = program.parent().context("it is in a folder")?;
        let unpacked = servers::from_debian("etcd-server", "usr/bin/etcd", folder).context(
            "the tests need etcd: put it on PATH (Debian: etcd-server), or set `KUBEBUILDER_ASSETS`",
        )?;
        Ok(fs::rename(unpacked, program)?)
    })?;
    Ok(kept)
}

fn part(name: &str, cache: &Path) -> Result<PathBuf> {
    Source {
        name,
        download: Some(&|program: &Path| download(name, program)),
        build: build(name),
        elsewhere: "set `KUBEBUILDER_ASSETS` to a folder that has it, or ",
    }
    .ensure(cache)
}

fn download(name: &str, program: &Path) -> Result<()> {
    let version = version();
    let address = format!("{RELEASES}/v{version}/bin/linux/{}/{name}", architecture()?);
    let published = program.with_extension("sha512");
    // The digest comes first, because the large download is useless without it.
    fetch(&format!("{address}.sha512"), &published)?;
    fetch(&address, program)?;
    check::<Sha512>(program, &fs::read_to_string(published)?)
}

fn build(name: &str) -> GoBuild<'static> {
    let version = version();
    let mut numbers = version.split('.');
    let (major, minor) = (numbers.next(), numbers.next());
    let stamp = |field: &str, value: &str| {
        let field = format!("k8s.io/component-base/version.{field}");
        (field, value.to_owned())
    };
    GoBuild {
        modules: MODULES_FOLDER,
        package: format!("k8s.io/kubernetes/cmd/{name}"),
        stamps: vec![
            stamp("gitVersion", &format!("v{version}")),
            stamp("gitMajor", major.unwrap_or_default()),
            stamp("gitMinor", minor.unwrap_or_default()),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::command_line;

    #[test]
    fn built_programs_contain_their_version() {
        let line = command_line(&build("kube-scheduler").command(Path::new("/new")));
        let stamp = format!("gitVersion=v{} ", version());
        assert!(line.contains(&stamp), "{line}");
        assert!(line.contains("gitMajor=1 "), "{line}");
        assert!(line.ends_with("-o /new k8s.io/kubernetes/cmd/kube-scheduler"));
    }

    /// Kubernetes' own modules have no versions in its `go.mod`.
    #[test]
    fn all_modules_of_kubernetes_are_of_one_release() {
        let own = MODULES
            .lines()
            .filter_map(|line| line.split_once("=> k8s.io/"));
        let mut seen = 0;
        for (_, module) in own {
            let version = version().strip_prefix('1').unwrap_or_default();
            assert!(module.ends_with(&format!(" v0{version}")), "{module}");
            seen += 1;
        }
        assert!(seen > 30, "{seen}");
    }
}
