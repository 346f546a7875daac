//! The programs of Kubernetes: from `KUBEBUILDER_ASSETS`, else from the user's cache, else downloaded into it, else built
//! there from Go modules. Knows how to get them; knows nothing of how they are started.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use sha2::{Digest as _, Sha512};

use super::servers;
use crate::terminal::{complain, run_stage, say};
use crate::workspace_root;

/// Names a folder with some of the programs, as `setup-envtest` makes it.
const ASSETS: &str = "KUBEBUILDER_ASSETS";
/// Where releases are published, each beside its digest.
const RELEASES: &str = "https://dl.k8s.io";
/// What Kubernetes is built from, to the last module.
const MODULES: &str = include_str!("../../../tests/cluster/kubernetes/go.mod");
const MODULES_FOLDER: &str = "tests/cluster/kubernetes";
const ETCD: &str = "etcd";
/// Of one release.
const KUBERNETES: [&str; 3] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
];
/// Of the same release, for a node.
const NODE: [&str; 2] = ["kubelet", "kube-proxy"];
/// What a connection may take, and the slowest that is worth waiting for.
const CURL: [&str; 11] = [
    "--fail",
    "--silent",
    "--show-error",
    "--location",
    "--connect-timeout",
    "10",
    "--speed-limit",
    "10000",
    "--speed-time",
    "30",
    "--output",
];

/// Makes sure of the programs of a control plane. In the order of `control-plane`'s arguments: etcd, API server, controller manager, scheduler.
pub(crate) fn programs() -> Result<Vec<PathBuf>> {
    let cache = cache()?;
    let mut programs = vec![etcd(&cache)?];
    for name in KUBERNETES {
        programs.push(of_release(name, &cache)?);
    }
    Ok(programs)
}

/// Makes sure of the programs of a node: kubelet and kube-proxy.
pub(crate) fn programs_of_nodes() -> Result<Vec<PathBuf>> {
    let cache = cache()?;
    NODE.iter().map(|name| of_release(name, &cache)).collect()
}

fn of_release(name: &str, cache: &Path) -> Result<PathBuf> {
    present(name, cache).map_or_else(|| make(name, cache), Ok)
}

/// The release that is built and downloaded.
fn version() -> &'static str {
    let lines = MODULES.lines().map(str::trim);
    let mut versions = lines.filter_map(|line| line.strip_prefix("k8s.io/kubernetes v"));
    let version = versions.next().and_then(|rest| rest.split(' ').next());
    version.expect("go.mod names the version of Kubernetes")
}

fn cache() -> Result<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty());
    let caches = set("XDG_CACHE_HOME").map(PathBuf::from);
    let caches = caches.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")));
    let caches = caches.context("no cache folder: set `XDG_CACHE_HOME` or `HOME`")?;
    Ok(caches.join("mayfly").join(format!("k8s-{}", version())))
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
    fs::create_dir_all(cache).with_context(|| format!("could not make `{}`", cache.display()))?;
    let unpacking = tempfile::tempdir_in(cache)?;
    let program = servers::from_debian("etcd-server", "usr/bin/etcd", unpacking.path()).context(
        "the tests need etcd: put it on PATH (Debian: etcd-server), or set `KUBEBUILDER_ASSETS`",
    )?;
    let kept = cache.join(ETCD);
    fs::rename(program, &kept).with_context(|| format!("could not write `{}`", kept.display()))?;
    Ok(kept)
}

fn make(name: &str, cache: &Path) -> Result<PathBuf> {
    fs::create_dir_all(cache).with_context(|| format!("could not make `{}`", cache.display()))?;
    // Its name comes last, so that half a program is not taken for one.
    let new = tempfile::tempdir_in(cache)?;
    let program = new.path().join(name);
    if let Err(error) = download(name, &program) {
        complain(&format!(
            "{name} is built, for it could not be downloaded: {error:#}"
        ));
        build(name, &program)?;
    }
    let kept = cache.join(name);
    fs::rename(program, &kept).with_context(|| format!("could not write `{}`", kept.display()))?;
    Ok(kept)
}

fn download(name: &str, program: &Path) -> Result<()> {
    let architecture = match env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => bail!("there is no release for {other}"),
    };
    ensure!(
        cfg!(target_os = "linux"),
        "there are releases for Linux alone"
    );
    let address = format!("{RELEASES}/v{}/bin/linux/{architecture}/{name}", version());
    let published = program.with_extension("sha512");
    // The digest first: where it is not to be had, nothing large is fetched for nothing.
    fetch(&format!("{address}.sha512"), &published)?;
    fetch(&address, program)?;
    let (published, content) = (fs::read_to_string(published)?, fs::read(program)?);
    check(&content, &published).with_context(|| format!("`{address}`"))?;
    fs::set_permissions(program, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

fn fetch(address: &str, file: &Path) -> Result<()> {
    run_stage(
        "download",
        Command::new("curl").args(CURL).arg(file).arg(address),
    )
}

fn check(content: &[u8], published: &str) -> Result<()> {
    let mut digest = String::new();
    for byte in Sha512::digest(content) {
        write!(digest, "{byte:02x}")?;
    }
    let published = published.split_whitespace().next().unwrap_or_default();
    ensure!(
        digest == published,
        "the SHA-512 is {digest}, and {published:?} was published"
    );
    Ok(())
}

fn build(name: &str, program: &Path) -> Result<()> {
    ensure!(
        which::which("go").is_ok(),
        "the tests need {name} {}: set `KUBEBUILDER_ASSETS` to a folder that has it, or put `go` on PATH to have it built",
        version()
    );
    say(&format!(
        "\n==> {name}: built once, which takes minutes and 2 GB of memory"
    ));
    run_stage(name, &mut build_command(name, program))
}

fn build_command(name: &str, program: &Path) -> Command {
    let version = version();
    let mut numbers = version.split('.');
    let (major, minor) = (numbers.next(), numbers.next());
    let stamp =
        |field: &str, value: &str| format!("-X k8s.io/component-base/version.{field}={value}");
    let flags = [
        "-s -w".to_owned(),
        stamp("gitVersion", &format!("v{version}")),
        stamp("gitMajor", major.unwrap_or_default()),
        stamp("gitMinor", minor.unwrap_or_default()),
    ];
    let mut command = Command::new("go");
    command
        .args(["build", "-mod=readonly", "-trimpath", "-ldflags"])
        .arg(flags.join(" "))
        .arg("-o")
        .arg(program)
        .arg(format!("k8s.io/kubernetes/cmd/{name}"))
        .current_dir(workspace_root().join(MODULES_FOLDER))
        .env("CGO_ENABLED", "0")
        .env("GOWORK", "off");
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::command_line;

    #[test]
    fn what_is_built_says_which_version_it_is() {
        let line = command_line(&build_command("kube-scheduler", Path::new("/new")));
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

    #[test]
    fn what_is_not_what_was_published_is_refused() {
        let digest = "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f";
        check(b"abc", &format!("{digest}\n")).unwrap();
        let error = check(b"abd", digest).unwrap_err().to_string();
        assert!(error.contains(digest), "{error}");
        assert!(check(b"abc", "<html>").is_err());
    }
}
