//! A base image made of Debian packages, and a repository of what the images install over it. Both are made once, from
//! Debian's archive; after that images are built without a network, and always of the same packages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{output_of, workspace_root};

/// The release the default base is of.
const SUITE: &str = "trixie";
/// What the images install; a build over the repository fails when one is missing here.
const PACKAGES: &str = "bash ca-certificates git jq openssh-client";
/// What Debian's own slim images leave out.
const LEFT_OUT: [&str; 6] = [
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
];

/// Where the repository appears during a build.
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

    /// The one `cargo xtask setup` makes, below the target directory.
    pub fn installed() -> Self {
        let target = std::env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| workspace_root().join("target"), PathBuf::from);
        Self::in_folder(target.join("peers/images"))
    }

    /// Where it lies.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What a folder made now would hold: changes when this file does.
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

    /// Puts in place of the base's own sources that repository, and nothing else.
    pub fn sources(&self) -> PathBuf {
        self.folder.join("sources.list")
    }

    /// Makes both from Debian's archive. Needs root and the network.
    ///
    /// # Errors
    /// Fails with everything the program said that failed.
    pub fn make(&self) -> Result<()> {
        fs::create_dir_all(self.repository())
            .with_context(|| format!("could not make `{}`", self.repository().display()))?;
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
            // The machine's own, which the bootstrap brings along.
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
        .with_context(|| format!("could not write into `{}`", repository.display()))
}
