//! The container images: what goes into them beside the programs ([`bill`]), a base made of Debian packages where none
//! can be pulled ([`base`]), and building without a daemon ([`builder`]). Knows nothing of how the programs work; the
//! images themselves are described by the `Dockerfile` beside.

pub mod base;
pub mod bill;
pub mod builder;

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

/// The two programs, and the target of the `Dockerfile` each has its image from.
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

/// Root of the workspace, which images are built from.
pub fn workspace_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("this crate lies in the workspace root")
}

/// Lays a program out as the images take it: the binary, stripped, and the lists of what is in it.
///
/// # Errors
/// Fails when the binary is not there, or when cargo cannot tell what it is made of.
pub fn lay_out(binary: &Path, program: Program, root: &Path) -> Result<()> {
    output_of(
        Command::new("install")
            .args(["-D", "--strip"])
            .arg(binary)
            .arg(root.join("usr/local/bin").join(program.name())),
    )?;
    bill::Bill::of(program)?.write(root)
}

/// Whether a program takes a loader or libraries from the file system it runs in: what lies there could then stand in for
/// its own code.
///
/// # Errors
/// Fails when the file is not there or is no program.
pub fn takes_libraries(binary: &Path) -> Result<bool> {
    let headers = output_of(
        Command::new("readelf")
            .args(["--wide", "--program-headers", "--dynamic"])
            .arg(binary),
    )?;
    Ok(headers.contains("INTERP") || headers.contains("(NEEDED)"))
}

/// Runs a command to its end and returns what it wrote; fails with all it said.
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
