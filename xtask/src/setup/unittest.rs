//! Provides helm-unittest, which runs the suites of the chart, from the user's cache. The cache is filled by a download, or else
//! by a build from its Go module. It renders with Helm's library and needs no Helm.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use sha2::Sha256;

use super::program::{GoBuild, Source, architecture, cache, check, fetch, version_in};
use crate::terminal::run_stage;

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
        download: Some(&|program: &Path| download(RELEASES, version, program)),
        build: GoBuild {
            modules: "tests/chart/unittest",
            package: format!("{MODULE}/cmd/{NAME}"),
            stamps: Vec::new(),
        },
        elsewhere: "",
    }
    .ensure(&cache(&format!("{NAME}-{version}"))?)
}

fn download(releases: &str, version: &str, program: &Path) -> Result<()> {
    let folder = program.parent().context("it is in a folder")?;
    let architecture = architecture()?;
    let archive = format!("{NAME}-linux-{architecture}-{version}.tgz");
    let sums = format!("{NAME}-checksum.sha");
    let (file, published) = (folder.join(&archive), folder.join(&sums));
    fetch(&format!("{releases}/v{version}/{sums}"), &published)?;
    fetch(&format!("{releases}/v{version}/{archive}"), &file)?;
    let published = fs::read_to_string(published)?;
    let mut lines = published.lines();
    let line = lines.find(|line| line.ends_with(&archive));
    check::<Sha256>(&file, line.unwrap_or_default())?;
    let member = format!("untt-linux-{architecture}");
    run_stage(
        "unpacking",
        Command::new("tar")
            .arg("-xzf")
            .arg(&file)
            .arg("-C")
            .arg(folder)
            .arg(&member),
    )?;
    Ok(fs::rename(folder.join(member), program)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_taken_from_its_archive_only_with_its_digest() {
        let releases = tempfile::tempdir().unwrap();
        let release = releases.path().join("v1.0.0");
        fs::create_dir(&release).unwrap();
        let bash = |script: &str| {
            let mut command = Command::new("bash");
            let status = command.args(["-ec", script]).current_dir(&release).status();
            assert!(status.unwrap().success());
        };
        let architecture = architecture().unwrap();
        let archive = format!("helm-unittest-linux-{architecture}-1.0.0.tgz");
        bash(&format!(
            "echo program > untt-linux-{architecture}; tar -czf {archive} untt-linux-{architecture}
            mkdir _dist; cp {archive} _dist; sha256sum -b _dist/* > helm-unittest-checksum.sha"
        ));
        let address = format!("file://{}", releases.path().display());
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(NAME);
        download(&address, "1.0.0", &program).unwrap();
        assert_eq!(fs::read_to_string(&program).unwrap(), "program\n");
        bash(&format!("echo more >> {archive}"));
        let error = download(&address, "1.0.0", &program).unwrap_err();
        assert!(
            error.to_string().contains("the published one is"),
            "{error}"
        );
    }
}
