//! `cargo xtask image`: the images, built without a daemon; and `cargo xtask bill`: the lists of software in them.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use images::Program;
use images::base::Base;
use images::bill::Bill;
use images::builder::{Build, Builder};

use crate::setup;
use crate::terminal::{run_stage, say};

/// Name of the imported base in the storage.
const BASE: &str = "localhost/mayfly-base";

#[derive(Debug, clap::Args)]
pub(crate) struct BillArgs {
    /// Folder to lay the lists out in, as the images take them
    #[arg(long, default_value = "target/images/programs")]
    output: PathBuf,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Target {
    Launcher,
    Executor,
    All,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which image to build
    #[arg(long, value_enum, default_value = "all")]
    target: Target,
    /// Folder of programs built already; otherwise they are built in the image's own build stage
    #[arg(long, value_name = "FOLDER")]
    binaries: Option<PathBuf>,
    /// Base image in place of Debian's own; `packages` is one made here of Debian packages
    #[arg(long, value_name = "IMAGE")]
    base: Option<String>,
    /// What the executor's image carries beside: `groovy`, `aws-cli`, `azure-cli`, joined by commas
    #[arg(long, default_value = "", hide_default_value = true)]
    extras: String,
    /// Registry and path the images are named for: `registry.example.com/team`
    #[arg(long, value_name = "REGISTRY", default_value = "localhost")]
    registry: String,
    /// Every time in the images, in seconds since 1970
    #[arg(long, env = "SOURCE_DATE_EPOCH", default_value_t = 0)]
    epoch: u64,
    /// Folder of the OCI layouts, and of the builder's storage
    #[arg(long, default_value = "target/images")]
    output: PathBuf,
}

/// Writes the lists of both programs.
pub(crate) fn bill(args: &BillArgs) -> Result<ExitCode> {
    for program in Program::ALL {
        Bill::of(program)?.write(&args.output.join(program.name()))?;
    }
    say(&format!("lists of software: {}", args.output.display()));
    Ok(ExitCode::SUCCESS)
}

/// Builds the images and says how large they are.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    fs::create_dir_all(&args.output)
        .with_context(|| format!("could not make `{}`", args.output.display()))?;
    let output = fs::canonicalize(&args.output)
        .with_context(|| format!("could not find `{}`", args.output.display()))?;
    let builder = Builder::in_folder(output.join("storage"));
    let mut arguments = vec![
        ("EXTRAS".to_owned(), args.extras.clone()),
        ("VERSION".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
    ];
    match args.base.as_deref() {
        Some("packages") => {
            setup::ensure_base()?;
            builder.import(&Base::installed(), BASE)?;
            arguments.push(("DEBIAN_IMAGE".to_owned(), BASE.to_owned()));
        }
        Some(base) => arguments.push(("DEBIAN_IMAGE".to_owned(), base.to_owned())),
        None => {}
    }
    let programs = match &args.binaries {
        Some(folder) => {
            let laid_out = output.join("programs");
            for program in Program::ALL {
                let root = laid_out.join(program.name());
                let binary = folder.join(program.name());
                if images::takes_libraries(&binary)? {
                    bail!(
                        "`{0}` takes libraries from the image; link it statically: cargo rustc --profile dist -p {1} --bin {1} \
                         -- -C target-feature=+crt-static",
                        binary.display(),
                        program.name()
                    );
                }
                images::lay_out(&binary, program, &root)?;
            }
            Some(laid_out)
        }
        None => None,
    };
    for program in Program::ALL {
        if wanted(args.target, program) {
            let build = Build {
                program,
                name: format!(
                    "{}/{}:{}",
                    args.registry.trim_end_matches('/'),
                    program.image(),
                    env!("CARGO_PKG_VERSION")
                ),
                programs: programs.clone(),
                offline: None,
                arguments: arguments.clone(),
                epoch: args.epoch,
            };
            run_stage(program.image(), &mut builder.build_command(&build))?;
            let layout = output.join(program.image());
            let image = builder.export(&build.name, &layout)?;
            say(&format!(
                "{}: oci:{}, {image}",
                build.name,
                layout.display()
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn wanted(target: Target, program: Program) -> bool {
    match target {
        Target::All => true,
        Target::Launcher => program == Program::Launcher,
        Target::Executor => program == Program::Executor,
    }
}
