//! Provides the programs of Kubernetes: from `KUBEBUILDER_ASSETS`, else from the user's cache. The cache is filled by a download,
//! or else by a build from Go modules. Knows nothing of how the programs are started.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use sha2::Sha512;

use super::program::{GoBuild, Source, architecture, cache, check, fetch, keep, version_in};
use super::servers;
use crate::terminal::complain;

/// The variable with a folder of some of the programs, as `setup-envtest` creates it.
const ASSETS: &str = "KUBEBUILDER_ASSETS";
/// The address of the releases and their digests.
const RELEASES: &str = "https://dl.k8s.io";
const ETCD: &str = "etcd";
/// The programs of a control plane.
const KUBERNETES: [&str; 3] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
];
/// The programs of a node, from the same release.
const NODE: [&str; 2] = ["kubelet", "kube-proxy"];

/// A release of Kubernetes on which tests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Release {
    /// All modules of a build.
    modules: &'static str,
    /// The folder of that `go.mod`, below the workspace root.
    folder: &'static str,
}

impl Release {
    /// The oldest minor that the chart supports.
    pub(crate) const OLDEST: Self = Self {
        modules: include_str!("../../../tests/cluster/kubernetes/oldest/go.mod"),
        folder: "tests/cluster/kubernetes/oldest",
    };
    /// The newest minor on which tests run. The default.
    pub(crate) const NEWEST: Self = Self {
        modules: include_str!("../../../tests/cluster/kubernetes/newest/go.mod"),
        folder: "tests/cluster/kubernetes/newest",
    };
    const ALL: [Self; 2] = [Self::OLDEST, Self::NEWEST];

    /// The release with this minor, such as `1.36`.
    pub(crate) fn of(minor: &str) -> Result<Self, String> {
        let found = Self::ALL
            .into_iter()
            .find(|release| release.minor() == minor);
        found.ok_or_else(|| {
            let minors = Self::ALL.map(Self::minor).join(" and ");
            format!("tests run on Kubernetes {minors}")
        })
    }

    /// The version that is built and downloaded, such as `1.36.2`.
    fn version(self) -> &'static str {
        version_in(self.modules, "k8s.io/kubernetes")
    }

    pub(crate) fn minor(self) -> &'static str {
        let version = self.version();
        version.rsplit_once('.').map_or(version, |(minor, _)| minor)
    }

    /// Provides the programs of a control plane. In the order of `control-plane`'s arguments: etcd, API server, controller
    /// manager, scheduler.
    pub(crate) fn programs(self) -> Result<Vec<PathBuf>> {
        self.etcd_and(&KUBERNETES)
    }

    /// Provides etcd and the API server.
    pub(crate) fn api_server(self) -> Result<Vec<PathBuf>> {
        self.etcd_and(&KUBERNETES[..1])
    }

    /// Provides the programs of a node: kubelet and kube-proxy.
    pub(crate) fn programs_of_nodes(self) -> Result<Vec<PathBuf>> {
        NODE.iter().map(|name| self.program(name)).collect()
    }

    fn etcd_and(self, names: &[&str]) -> Result<Vec<PathBuf>> {
        let mut programs = vec![etcd(&self.cache()?)?];
        for name in names {
            programs.push(self.program(name)?);
        }
        Ok(programs)
    }

    fn cache(self) -> Result<PathBuf> {
        cache(&format!("k8s-{}", self.version()))
    }

    /// Provides a program: from the assets if it is of this minor there, else from the cache.
    fn program(self, name: &str) -> Result<PathBuf> {
        if let Some(program) = asset(name) {
            if self.is_of(&program) {
                return Ok(program);
            }
            let (program, minor) = (program.display(), self.minor());
            complain(&format!(
                "`{program}` is not of Kubernetes {minor}, and is not taken"
            ));
        }
        Source {
            name,
            download: Some(&|program: &Path| self.download(name, program)),
            build: self.build(name),
            elsewhere: "set `KUBEBUILDER_ASSETS` to a folder that has it, or ",
        }
        .ensure(&self.cache()?)
    }

    /// Whether the program reports this minor, as in `Kubernetes v1.36.2`.
    fn is_of(self, program: &Path) -> bool {
        let output = Command::new(program).arg("--version").output();
        output.is_ok_and(|output| {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let rest = text
                .strip_prefix("Kubernetes v")
                .and_then(|rest| rest.strip_prefix(self.minor()));
            rest.is_some_and(|rest| rest.starts_with('.'))
        })
    }

    fn download(self, name: &str, program: &Path) -> Result<()> {
        let version = self.version();
        let address = format!("{RELEASES}/v{version}/bin/linux/{}/{name}", architecture()?);
        let published = program.with_extension("sha512");
        // The digest first: without it, the large download would be useless.
        fetch(&format!("{address}.sha512"), &published)?;
        fetch(&address, program)?;
        check::<Sha512>(program, &fs::read_to_string(published)?)
    }

    fn build(self, name: &str) -> GoBuild<'static> {
        let mut numbers = self.version().split('.');
        let (major, minor) = (numbers.next(), numbers.next());
        let stamp = |field: &str, value: &str| {
            let field = format!("k8s.io/component-base/version.{field}");
            (field, value.to_owned())
        };
        GoBuild {
            modules: self.folder,
            package: format!("k8s.io/kubernetes/cmd/{name}"),
            stamps: vec![
                stamp("gitVersion", &format!("v{}", self.version())),
                stamp("gitMajor", major.unwrap_or_default()),
                stamp("gitMinor", minor.unwrap_or_default()),
            ],
        }
    }
}

/// Provides the programs of all stages, in the order in which the stages need them. Without etcd, which is not built.
pub(super) fn ensure() -> Result<()> {
    for name in KUBERNETES.iter().chain(&NODE) {
        Release::NEWEST.program(name)?;
    }
    for name in KUBERNETES {
        Release::OLDEST.program(name)?;
    }
    Ok(())
}

fn asset(name: &str) -> Option<PathBuf> {
    let assets = env::var_os(ASSETS).filter(|value| !value.is_empty())?;
    let program = PathBuf::from(assets).join(name);
    program.is_file().then_some(program)
}

fn etcd(cache: &Path) -> Result<PathBuf> {
    let kept = cache.join(ETCD);
    let here = || kept.is_file().then(|| kept.clone());
    if let Some(program) = asset(ETCD)
        .or_else(here)
        .or_else(|| which::which(ETCD).ok())
    {
        return Ok(program);
    }
    keep(&kept, |program| {
        let folder = program.parent().context("it is in a folder")?;
        let unpacked = servers::from_debian("etcd-server", "usr/bin/etcd", folder).context(
            "the tests need etcd: put it on PATH (Debian: etcd-server), or set `KUBEBUILDER_ASSETS`",
        )?;
        Ok(fs::rename(unpacked, program)?)
    })?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::terminal::command_line;
    use crate::workspace_root;

    #[test]
    fn built_programs_contain_their_version() {
        for release in Release::ALL {
            let line = command_line(&release.build("kube-scheduler").command(Path::new("/new")));
            let stamp = format!("gitVersion=v{} ", release.version());
            assert!(line.contains(&stamp), "{line}");
            assert!(line.contains("gitMajor=1 "), "{line}");
            assert!(line.ends_with("-o /new k8s.io/kubernetes/cmd/kube-scheduler"));
        }
    }

    /// Kubernetes' own modules have no versions in its `go.mod`.
    #[test]
    fn all_modules_of_kubernetes_are_of_one_release() {
        for release in Release::ALL {
            let own = release
                .modules
                .lines()
                .filter_map(|line| line.split_once("=> k8s.io/"));
            let mut seen = 0;
            for (_, module) in own {
                let version = release.version().strip_prefix('1').unwrap_or_default();
                assert!(module.ends_with(&format!(" v0{version}")), "{module}");
                seen += 1;
            }
            assert!(seen > 25, "{seen}");
        }
    }

    #[test]
    fn a_program_of_another_minor_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("kube-scheduler");
        let says = |version: &str| {
            fs::write(&program, format!("#!/bin/sh\necho Kubernetes v{version}\n")).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            Release::OLDEST.is_of(&program)
        };
        let minor = Release::OLDEST.minor();
        assert!(says(&format!("{minor}.0")));
        assert!(!says(&format!("{minor}0.0")));
        assert!(!says(Release::NEWEST.version()));
        assert!(!Release::OLDEST.is_of(&folder.path().join("none")));
    }

    #[test]
    fn a_release_is_known_by_its_minor() {
        for release in Release::ALL {
            assert_eq!(Release::of(release.minor()), Ok(release));
        }
        let error = Release::of("1.2").unwrap_err();
        assert!(error.contains(Release::OLDEST.minor()), "{error}");
    }

    #[test]
    fn chart_and_documents_name_the_releases() {
        let [oldest, newest] = Release::ALL;
        let or_later = format!("Kubernetes {} or later", oldest.minor());
        let both = format!("Kubernetes {} and {}", oldest.version(), newest.version());
        for (file, words) in [
            (
                "helm/mayfly/Chart.yaml",
                format!("\nkubeVersion: \">={}.0-0\"\n", oldest.minor()),
            ),
            ("helm/mayfly/README.md", or_later.clone()),
            ("docs/install.md", or_later),
            ("README.md", both.clone()),
            ("docs/peers.md", both),
        ] {
            let text = fs::read_to_string(workspace_root().join(file)).unwrap();
            assert!(text.contains(&words), "{file} does not say {words:?}");
        }
    }
}
