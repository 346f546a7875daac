//! A base image of Debian packages, and a repository of the packages that the images install. Both are created once, from
//! Debian's archive. After that, images are built without a network and always from the same packages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{output_of, workspace_root};

/// The Debian release of the default base.
const SUITE: &str = "trixie";
/// The packages that the images install. A build with the repository fails if one is missing here.
const PACKAGES: &str = "bash ca-certificates git jq openssh-client";
/// The rules for files that Debian's slim images leave out.
const LEFT_OUT: [&str; 6] = [
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
];

/// The mount path of the repository during a build.
pub const REPOSITORY_MOUNT: &str = "/srv/packages";

/// A base and its repository in a folder.
#[derive(Clone, Debug)]
pub struct Base {
    folder: PathBuf,
}

impl Base {
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
        }
    }

    /// The base that `cargo xtask setup` creates below the target directory.
    pub fn installed() -> Self {
        let target = std::env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| workspace_root().join("target"), PathBuf::from);
        Self::in_folder(target.join("peers/images"))
    }

    /// The folder of the base.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The content of a folder that is created now. It changes with the constants of this file.
    pub fn wanted() -> String {
        format!("{SUITE}: {PACKAGES}; without {}\n", LEFT_OUT.join(" "))
    }

    /// The file system of the base.
    pub fn archive(&self) -> PathBuf {
        self.folder.join("base.tar")
    }

    /// The packages and their index.
    pub fn repository(&self) -> PathBuf {
        self.folder.join("packages")
    }

    /// The list of package sources that replaces the base's own. It has only this repository.
    pub fn sources(&self) -> PathBuf {
        self.folder.join("sources.list")
    }

    /// Creates the base and its repository from Debian's archive. Needs root and the network.
    ///
    /// # Errors
    /// Has the whole output of the program that failed.
    pub fn make(&self) -> Result<()> {
        fs::create_dir_all(self.repository())
            .with_context(|| format!("could not create `{}`", self.repository().display()))?;
        let mut bootstrap = Command::new("mmdebstrap");
        bootstrap.args(["--variant=apt", "--quiet"]);
        for rule in LEFT_OUT {
            bootstrap.arg(format!("--dpkgopt={rule}"));
        }
        let fetch = format!(
            "chroot \"$1\" apt-get -q --yes --no-install-recommends --download-only install {PACKAGES} >&2"
        );
        bootstrap
            .arg(format!("--customize-hook={fetch}"))
            .arg(format!(
                "--customize-hook=cp \"$1\"/var/cache/apt/archives/*.deb '{}'",
                self.repository().display()
            ))
            // The bootstrap copies these files from the machine.
            .arg("--customize-hook=rm -f \"$1\"/etc/hostname \"$1\"/etc/resolv.conf")
            .arg(SUITE)
            .arg(self.archive())
            .env("SOURCE_DATE_EPOCH", "0");
        output_of(&mut bootstrap)?;
        index(&self.repository())?;
        let line = format!("deb [trusted=yes] file:{REPOSITORY_MOUNT} ./\n");
        fs::write(self.sources(), line)
            .with_context(|| format!("could not write `{}`", self.sources().display()))
    }
}

fn index(repository: &Path) -> Result<()> {
    let text = output_of(
        Command::new("dpkg-scanpackages")
            .arg(".")
            .current_dir(repository),
    )?;
    fs::write(repository.join("Packages"), text)
        .with_context(|| format!("could not write in `{}`", repository.display()))
}
