//! Builds the container images: the lists of software in them ([`sbom`]), a base image of Debian packages for machines that
//! cannot pull one ([`base`]), and the build without a daemon ([`builder`]). The `Dockerfile` in this folder describes the
//! images. This crate does not know how the programs work.

pub mod base;
pub mod builder;
pub mod sbom;

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

/// The two programs. Each has an image and a target in the `Dockerfile`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    Launcher,
    Executor,
}

impl Program {
    pub const ALL: [Self; 2] = [Self::Launcher, Self::Executor];

    /// Name of the binary and of its package.
    pub fn name(self) -> &'static str {
        match self {
            Self::Launcher => "api-launcher",
            Self::Executor => "executor",
        }
    }

    /// Target of the `Dockerfile`.
    pub fn target(self) -> &'static str {
        match self {
            Self::Launcher => "launcher",
            Self::Executor => "executor",
        }
    }

    /// Name of the image, without registry and tag.
    pub fn image(self) -> &'static str {
        match self {
            Self::Launcher => "mayfly-launcher",
            Self::Executor => "mayfly-executor",
        }
    }
}

/// Root of the workspace: the build context of the images.
pub fn workspace_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("this crate is in the workspace root")
}

/// Writes the files of a program for an image: the stripped binary and the lists of software.
///
/// # Errors
/// Fails if the binary does not exist, or if cargo cannot list its crates.
pub fn lay_out(binary: &Path, program: Program, root: &Path) -> Result<()> {
    output_of(
        Command::new("install")
            .args(["-D", "--strip"])
            .arg(binary)
            .arg(root.join("usr/local/bin").join(program.name())),
    )?;
    sbom::Sbom::of(program)?.write(root)
}

/// Whether a program loads a loader or libraries from its file system. Files there could then replace its code.
///
/// # Errors
/// Fails if the file does not exist or is no program.
pub fn takes_libraries(binary: &Path) -> Result<bool> {
    let headers = output_of(
        Command::new("readelf")
            .args(["--wide", "--program-headers", "--dynamic"])
            .arg(binary),
    )?;
    Ok(headers.contains("INTERP") || headers.contains("(NEEDED)"))
}

/// Runs a command and returns its output. The error has all output of a failed command.
fn output_of(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{program} does not start: `cargo xtask setup` installs it"))?;
    if !output.status.success() {
        bail!(
            "{command:?} failed ({}):\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_programs_differ_from_static_ones() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("main.rs");
        std::fs::write(&source, "fn main() {}").unwrap();
        for (feature, takes) in [("-crt-static", true), ("+crt-static", false)] {
            let program = folder.path().join(feature);
            let mut rustc = Command::new(option_env!("RUSTC").unwrap_or("rustc"));
            rustc.args(["-C", &format!("target-feature={feature}"), "-o"]);
            output_of(rustc.arg(&program).arg(&source)).unwrap();
            assert_eq!(takes_libraries(&program).unwrap(), takes, "{feature}");
        }
        assert!(takes_libraries(&source).is_err());
    }
}
