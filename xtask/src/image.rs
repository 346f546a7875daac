//! `cargo xtask image` builds the images without a daemon. `cargo xtask sbom` writes the lists of software in them.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use images::Program;
use images::base::Base;
use images::builder::{Build, Builder};
use images::sbom::Sbom;

use crate::setup;
use crate::terminal::{run_stage, say};

/// Name of the imported base in the storage.
const BASE: &str = "localhost/mayfly-base";

#[derive(Debug, clap::Args)]
pub(crate) struct SbomArgs {
    /// Folder for the lists, in the layout of the images
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
    /// Folder of programs that were built before; without it, the image's build stage builds them
    #[arg(long, value_name = "FOLDER")]
    binaries: Option<PathBuf>,
    /// Base image instead of Debian's own; `packages` creates one from Debian packages
    #[arg(long, value_name = "IMAGE")]
    base: Option<String>,
    /// Additional software in the executor's image: comma list of `groovy`, `aws-cli`, `azure-cli`
    #[arg(long, default_value = "", hide_default_value = true)]
    extras: String,
    /// Registry and path in the names of the images: `registry.example.com/team`
    #[arg(long, value_name = "REGISTRY", default_value = "localhost")]
    registry: String,
    /// The value of all times in the images, in seconds since 1970
    #[arg(long, env = "SOURCE_DATE_EPOCH", default_value_t = 0)]
    epoch: u64,
    /// Folder for the OCI layouts and for the builder's storage
    #[arg(long, default_value = "target/images")]
    output: PathBuf,
}

/// Writes the SBOM and the licences of both programs.
pub(crate) fn sbom(args: &SbomArgs) -> Result<ExitCode> {
    for program in Program::ALL {
        Sbom::of(program)?.write(&args.output.join(program.name()))?;
    }
    say(&format!("lists of software: {}", args.output.display()));
    Ok(ExitCode::SUCCESS)
}

/// Builds the images and prints their sizes.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    fs::create_dir_all(&args.output)
        .with_context(|| format!("could not create `{}`", args.output.display()))?;
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
                        "`{0}` needs libraries in the image; link it statically: cargo rustc --profile dist -p {1} --bin {1} \
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
