//! Building by buildah, which needs no daemon, into a storage folder of its own.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::base::{Base, REPOSITORY_MOUNT};
use crate::{Program, output_of, workspace_root};

/// How file systems are laid over each other; `vfs` copies them, which works everywhere and is slow.
const STORAGE_DRIVER: &str = "STORAGE_DRIVER";

/// Images and containers in a folder.
#[derive(Clone, Debug)]
pub struct Builder {
    storage: PathBuf,
}

/// What is built, and of what.
#[derive(Clone, Debug)]
pub struct Build {
    pub program: Program,
    /// Name the image gets in the storage.
    pub name: String,
    /// Programs built elsewhere, laid out as the images take them.
    pub programs: Option<PathBuf>,
    /// Packages come from here and from nowhere else.
    pub offline: Option<Base>,
    /// Arguments of the `Dockerfile`.
    pub arguments: Vec<(String, String)>,
    /// Every time in the image.
    pub epoch: u64,
}

/// A built image, written down as an OCI layout.
#[derive(Clone, Debug)]
pub struct Image {
    /// Digest of its manifest.
    pub digest: String,
    /// User, environment, entry point, labels.
    pub config: Value,
    /// Bytes a node pulls.
    pub compressed: u64,
}

impl std::fmt::Display for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tenths = self.compressed / 100_000;
        write!(
            f,
            "{}.{} MB to pull, {}",
            tenths / 10,
            tenths % 10,
            self.digest
        )
    }
}

impl Builder {
    pub fn in_folder(storage: impl Into<PathBuf>) -> Self {
        Self {
            storage: storage.into(),
        }
    }

    /// Programs run in the build by chroot: of all ways this one asks the least of the machine.
    fn buildah(&self, command: &str) -> Command {
        let mut buildah = Command::new("buildah");
        buildah
            .arg("--root")
            .arg(self.storage.join("root"))
            .arg("--runroot")
            .arg(self.storage.join("run"))
            .arg(command)
            .env("BUILDAH_ISOLATION", "chroot");
        if std::env::var_os(STORAGE_DRIVER).is_none() {
            buildah.env(STORAGE_DRIVER, "overlay");
        }
        buildah
    }

    /// Makes an image of a base.
    ///
    /// # Errors
    /// Fails when the base was never made, or with what the builder said.
    pub fn import(&self, base: &Base, name: &str) -> Result<()> {
        let archive = base.archive();
        if !archive.exists() {
            bail!(
                "there is no `{}`: `cargo xtask setup` makes it, as root and with mmdebstrap",
                archive.display()
            );
        }
        self.follow("FROM scratch\nADD base.tar /\n", base.folder(), name)
    }

    /// Makes an image by the text of a `Dockerfile`, from a folder and the images that are here.
    ///
    /// # Errors
    /// Fails with what the builder said.
    pub fn follow(&self, text: &str, folder: &Path, name: &str) -> Result<()> {
        fs::create_dir_all(&self.storage)
            .with_context(|| format!("could not make `{}`", self.storage.display()))?;
        let mut recipe = tempfile::NamedTempFile::new_in(&self.storage)?;
        recipe.write_all(text.as_bytes())?;
        let mut build = self.buildah("build");
        build
            .args(["--quiet", "--timestamp", "0", "--pull-never"])
            .args(["--tag", name, "--file"])
            .arg(recipe.path())
            .args(["--ignorefile", "/dev/null"])
            .arg(folder);
        output_of(&mut build).map(drop)
    }

    /// Builds an image; what the steps said is in the error when one fails.
    ///
    /// # Errors
    /// Fails with what the builder said.
    pub fn build(&self, build: &Build) -> Result<()> {
        output_of(&mut self.build_command(build)).map(drop)
    }

    /// The command that builds, for those who want to watch it.
    pub fn build_command(&self, build: &Build) -> Command {
        let root = workspace_root();
        let mut command = self.buildah("build");
        command
            .args(["--layers=false", "--tag", &build.name])
            .args(["--target", build.program.target()])
            .args(["--timestamp", &build.epoch.to_string()])
            .arg("--file")
            .arg(root.join("images/Dockerfile"));
        for (name, value) in &build.arguments {
            command.arg("--build-arg").arg(format!("{name}={value}"));
        }
        if let Some(programs) = &build.programs {
            command
                .arg("--build-context")
                .arg(format!("programs={}", programs.display()));
        }
        if let Some(base) = &build.offline {
            for (from, to) in [
                (base.repository(), REPOSITORY_MOUNT),
                (base.sources(), "/etc/apt/sources.list"),
            ] {
                command
                    .arg("--volume")
                    .arg(format!("{}:{to}:ro", from.display()));
            }
            command.arg("--pull-never");
        }
        command.arg(root);
        command
    }

    /// Writes an image down as an OCI layout with its name, in place of what was there, and reads in it what it is.
    ///
    /// # Errors
    /// Fails when the layout cannot be written or is not one.
    pub fn export(&self, name: &str, layout: &Path) -> Result<Image> {
        if layout.exists() {
            fs::remove_dir_all(layout)
                .with_context(|| format!("could not remove `{}`", layout.display()))?;
        }
        let destination = format!("oci:{}", layout.display());
        output_of(self.buildah("push").args(["--quiet", name, &destination]))?;
        let path = layout.join("index.json");
        let mut index = read_json(&path)?;
        name_in(&mut index, name);
        fs::write(&path, index.to_string())
            .with_context(|| format!("could not write `{}`", path.display()))?;
        let digest = text(&index["manifests"][0]["digest"])?;
        let manifest = read_json(&blob(layout, &digest))?;
        let config = read_json(&blob(layout, &text(&manifest["config"]["digest"])?))?;
        let layers = manifest["layers"].as_array().context("no layers")?;
        let compressed = layers.iter().filter_map(|layer| layer["size"].as_u64());
        Ok(Image {
            digest,
            config: config["config"].clone(),
            compressed: compressed.sum(),
        })
    }

    /// Makes a container of an image and returns its name and the folder its file system is at.
    ///
    /// # Errors
    /// Fails with what the builder said.
    pub fn mount(&self, image: &str) -> Result<(String, PathBuf)> {
        let container = output_of(self.buildah("from").args(["--pull-never", image]))?;
        let container = container.trim().to_owned();
        let folder = output_of(self.buildah("mount").arg(&container))?;
        Ok((container, PathBuf::from(folder.trim())))
    }

    /// Removes a container.
    ///
    /// # Errors
    /// Fails with what the builder said.
    pub fn remove_container(&self, container: &str) -> Result<()> {
        output_of(self.buildah("rm").arg(container)).map(drop)
    }

    /// Removes an image.
    ///
    /// # Errors
    /// Fails with what the builder said.
    pub fn remove_image(&self, name: &str) -> Result<()> {
        output_of(self.buildah("rmi").arg(name)).map(drop)
    }
}

/// Names the image of a layout for its import: containerd reads the first annotation and ignores what has no
/// name, other programs go by the second, which is a tag. The digest of the image does not depend on it.
fn name_in(index: &mut Value, name: &str) {
    let tag = name
        .rsplit_once(':')
        .map_or("latest", |(_, tag)| tag)
        .to_owned();
    let annotations = &mut index["manifests"][0]["annotations"];
    annotations["io.containerd.image.name"] = name.into();
    annotations["org.opencontainers.image.ref.name"] = tag.into();
}

fn blob(layout: &Path, digest: &str) -> PathBuf {
    layout.join("blobs").join(digest.replace(':', "/"))
}

fn read_json(path: &Path) -> Result<Value> {
    let content = fs::read(path).with_context(|| format!("could not read `{}`", path.display()))?;
    serde_json::from_slice(&content).with_context(|| format!("`{}` is not JSON", path.display()))
}

fn text(value: &Value) -> Result<String> {
    Ok(value
        .as_str()
        .context("no digest in the layout")?
        .to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_layout_has_the_name_of_its_image() {
        let mut index = json!({"schemaVersion": 2, "manifests": [{"digest": "sha256:1"}]});
        name_in(
            &mut index,
            "registry.example.test:5000/team/mayfly-executor:1.2.3",
        );
        assert_eq!(
            index["manifests"][0],
            json!({
                "digest": "sha256:1",
                "annotations": {
                    "io.containerd.image.name": "registry.example.test:5000/team/mayfly-executor:1.2.3",
                    "org.opencontainers.image.ref.name": "1.2.3",
                },
            })
        );
    }
}
