//! Provides helm-unittest, which runs the suites of the chart, from the user's cache. The cache is filled by a download, or else
//! by a build from its Go module. It renders with Helm's library and needs no Helm.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::program::{GoBuild, ReleaseArchive, Source, architecture, cache, version_in};

/// The address of its releases and their digests.
const RELEASES: &str = "https://github.com/helm-unittest/helm-unittest/releases/download";
const NAME: &str = "helm-unittest";
const MODULE: &str = "github.com/helm-unittest/helm-unittest";
/// All modules of its build.
const MODULES: &str = include_str!("../../../tests/chart/unittest/go.mod");

/// Provides helm-unittest.
pub(crate) fn program() -> Result<PathBuf> {
    let version = version_in(MODULES, MODULE);
    Source {
        name: NAME,
        download: Some(&|program: &Path| download(version, program)),
        build: GoBuild {
            modules: "tests/chart/unittest",
            package: format!("{MODULE}/cmd/{NAME}"),
            stamps: Vec::new(),
        },
        elsewhere: "",
    }
    .ensure(&cache(&format!("{NAME}-{version}"))?)
}

fn download(version: &str, program: &Path) -> Result<()> {
    let architecture = architecture()?;
    ReleaseArchive {
        address: &format!("{RELEASES}/v{version}"),
        archive: &format!("{NAME}-linux-{architecture}-{version}.tgz"),
        digests: &format!("{NAME}-checksum.sha"),
        member: &format!("untt-linux-{architecture}"),
    }
    .download(program)
}
