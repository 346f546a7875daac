//! Builds images with buildah, which needs no daemon, in a storage folder of its own.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::base::{Base, REPOSITORY_MOUNT};
use crate::{Program, output_of, workspace_root};

/// The variable with the storage driver. `vfs` copies file systems: it is slow, but works on every machine.
const STORAGE_DRIVER: &str = "STORAGE_DRIVER";

/// Images and containers in a folder.
#[derive(Clone, Debug)]
pub struct Builder {
    storage: PathBuf,
}

/// The input of a build.
#[derive(Clone, Debug)]
pub struct Build {
    pub program: Program,
    /// Name of the image in the storage.
    pub name: String,
    /// Folder of programs that were built before, in the layout of the images.
    pub programs: Option<PathBuf>,
    /// The only source of packages.
    pub offline: Option<Base>,
    /// Arguments of the `Dockerfile`.
    pub arguments: Vec<(String, String)>,
    /// The value of all times in the image.
    pub epoch: u64,
}

/// A built image, exported as an OCI layout.
#[derive(Clone, Debug)]
pub struct Image {
    /// Digest of its manifest.
    pub digest: String,
    /// User, environment, entry point, labels.
    pub config: Value,
    /// Compressed size, which a node pulls.
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

    /// A buildah command. It runs the programs of a build with chroot, which needs the fewest features of the machine.
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

    /// Creates an image from a base.
    ///
    /// # Errors
    /// Fails if the base does not exist, or with the output of the builder.
    pub fn import(&self, base: &Base, name: &str) -> Result<()> {
        let archive = base.archive();
        if !archive.exists() {
            bail!(
                "there is no `{}`: `cargo xtask setup` creates it, as root and with mmdebstrap",
                archive.display()
            );
        }
        self.follow("FROM scratch\nADD base.tar /\n", base.folder(), name)
    }

    /// Creates an image from the text of a `Dockerfile`, a folder and the images in the storage.
    ///
    /// # Errors
    /// Fails with the output of the builder.
    pub fn follow(&self, text: &str, folder: &Path, name: &str) -> Result<()> {
        fs::create_dir_all(&self.storage)
            .with_context(|| format!("could not create `{}`", self.storage.display()))?;
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

    /// Builds an image.
    ///
    /// # Errors
    /// Fails with the output of the builder.
    pub fn build(&self, build: &Build) -> Result<()> {
        output_of(&mut self.build_command(build)).map(drop)
    }

    /// The command that builds an image, for callers that show its output.
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

    /// Exports an image as an OCI layout with its name, and reads its manifest. An existing folder is replaced.
    ///
    /// # Errors
    /// Fails if the layout cannot be written or is invalid.
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

    /// Creates a container of an image, and returns its name and the folder of its file system.
    ///
    /// # Errors
    /// Fails with the output of the builder.
    pub fn mount(&self, image: &str) -> Result<(String, PathBuf)> {
        let container = output_of(self.buildah("from").args(["--pull-never", image]))?;
        let container = container.trim().to_owned();
        let folder = output_of(self.buildah("mount").arg(&container))?;
        Ok((container, PathBuf::from(folder.trim())))
    }

    /// Removes a container.
    ///
    /// # Errors
    /// Fails with the output of the builder.
    pub fn remove_container(&self, container: &str) -> Result<()> {
        output_of(self.buildah("rm").arg(container)).map(drop)
    }

    /// Removes an image.
    ///
    /// # Errors
    /// Fails with the output of the builder.
    pub fn remove_image(&self, name: &str) -> Result<()> {
        output_of(self.buildah("rmi").arg(name)).map(drop)
    }
}

/// Adds the name of an image to its layout, for the import. Containerd reads the first annotation and ignores images without
/// it. Other programs read the second one, which is a tag. The digest of the image does not change.
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
