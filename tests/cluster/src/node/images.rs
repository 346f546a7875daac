//! The images of the node: both of Mayfly, built of the programs of the tests, the executor's with a tool in it, and one
//! for the containers that hold a pod together.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::UNIX_EPOCH;

use ::images::Program;
use ::images::base::Base;
use ::images::builder::{Build, Builder};
use anyhow::{Context as _, Result, ensure};

use super::{Folder, REGISTRY, TAG};

/// Name of the image of pods themselves.
pub const PAUSE: &str = "registry.example.test/pause:1";
const BASE: &str = "localhost/base";
/// The executor's image as a release has it.
const BARE: &str = "localhost/mayfly-executor";
const TOOL: &str = "terraform";

/// Name of a program's image.
pub fn name_of(program: Program) -> String {
    format!("{REGISTRY}/{}:{TAG}", program.image())
}

/// Archives of the images, in a folder that keeps them for the next node.
///
/// # Errors
/// Fails with what the builder said.
pub fn archives(programs: &Path, kept: &Path) -> Result<Vec<PathBuf>> {
    let tool = which::which(TOOL)
        .context("no terraform on PATH: `cargo xtask setup` says where to get it")?;
    let binary = |program| {
        programs.join(match program {
            Program::Launcher => "launcher_under_test",
            Program::Executor => "executor_under_test",
        })
    };
    let recipes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../images");
    let mut of = String::new();
    for file in [
        &binary(Program::Launcher),
        &binary(Program::Executor),
        &tool,
        &Base::installed().archive(),
        &recipes.join("Dockerfile"),
        &recipes.join("packages.sh"),
        // Adds the tool, and makes the image of the pause.
        &std::env::current_exe()?,
    ] {
        let found = file
            .metadata()
            .with_context(|| format!("there is no `{}`", file.display()))?;
        let changed = found.modified()?.duration_since(UNIX_EPOCH)?.as_nanos();
        writeln!(of, "{} {} {changed}", file.display(), found.len())?;
    }
    let layouts: Vec<_> = ["mayfly-launcher", "mayfly-executor", "pause"]
        .map(|name| kept.join(name))
        .into();
    let stamp = kept.join("made-of.txt");
    if fs::read_to_string(&stamp).is_ok_and(|known| known == of) {
        return Ok(layouts);
    }
    if kept.exists() {
        fs::remove_dir_all(kept)?;
    }
    fs::create_dir_all(kept)?;
    let storage = kept.join("storage");
    let builder = Builder::in_folder(&storage);
    builder.import(&Base::installed(), BASE)?;
    for program in Program::ALL {
        let root = kept.join("programs").join(program.name());
        ::images::lay_out(&binary(program), program, &root)?;
        builder.build(&Build {
            program,
            name: match program {
                Program::Launcher => name_of(program),
                Program::Executor => BARE.to_owned(),
            },
            programs: Some(kept.join("programs")),
            offline: Some(Base::installed()),
            arguments: vec![("DEBIAN_IMAGE".to_owned(), BASE.to_owned())],
            epoch: 0,
        })?;
    }
    let with_tool = format!("FROM {BARE}\nCOPY {TOOL} /usr/local/bin/\n");
    let folder = tool.canonicalize()?;
    let folder = folder.parent().context("a program is in a folder")?;
    builder.follow(&with_tool, folder, &name_of(Program::Executor))?;
    let pause = format!("FROM {BARE}\nENTRYPOINT [\"/bin/sleep\", \"infinity\"]\n");
    builder.follow(&pause, kept, PAUSE)?;
    let names = [
        name_of(Program::Launcher),
        name_of(Program::Executor),
        PAUSE.to_owned(),
    ];
    for (name, layout) in names.iter().zip(&layouts) {
        builder.export(name, layout)?;
    }
    drop(builder);
    // Only the archives are needed from now on.
    fs::remove_dir_all(storage)?;
    fs::write(stamp, of)?;
    Ok(layouts)
}

/// Gives containerd an image.
///
/// # Errors
/// Fails with what its client said.
pub fn import(layout: &Path, folder: &Folder) -> Result<()> {
    let mut tar = Command::new("tar")
        .args(["--create", "--directory"])
        .arg(layout)
        .arg(".")
        .stdout(Stdio::piped())
        .spawn()?;
    let archive = tar.stdout.take().context("its output was asked for")?;
    let output = Command::new("ctr")
        .args(["--namespace", "k8s.io", "images", "import", "-"])
        .env("CONTAINERD_ADDRESS", folder.path("containerd.sock"))
        .stdin(archive)
        .output()
        .context("ctr does not start: it comes with containerd")?;
    let packed = tar.wait()?;
    ensure!(
        output.status.success() && packed.success(),
        "`{}` could not be imported: {}",
        layout.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
