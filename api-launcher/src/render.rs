//! `api-launcher render`: the objects a job document would become, with no cluster at hand.

use std::error::Error as _;
use std::io::{self, Write as _};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use job_contract::Exit;
use serde_json::Value;

use crate::config::DeploymentArgs;
use crate::manifest;
use crate::run::document::{self, DocumentError};

/// What is rendered, and how.
#[derive(Args, Debug)]
pub struct RenderArgs {
    /// Job document to render, JSON or encoded; `-` reads standard input
    #[arg(short, long, value_name = "JOB")]
    pub file: PathBuf,
    /// Format of the list
    #[arg(short, long, value_enum, default_value_t = Format::Yaml)]
    pub output: Format,
    #[command(flatten)]
    pub deployment: DeploymentArgs,
}

/// Format of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Yaml,
    Json,
}

/// Prints the list, or on standard error everything that is wrong, and returns the exit code.
pub fn run(args: &RenderArgs) -> Exit {
    match render(args) {
        Ok(text) => match io::stdout().lock().write_all(text.as_bytes()) {
            Ok(()) => Exit::Done,
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Done,
            Err(_) => Exit::Infrastructure,
        },
        Err((exit, lines)) => {
            let mut stderr = io::stderr().lock();
            for line in lines {
                // Where the terminal is gone, the exit code still tells.
                let _ = writeln!(stderr, "error: {line}");
            }
            exit
        }
    }
}

fn render(args: &RenderArgs) -> Result<String, (Exit, Vec<String>)> {
    let deployment = args.deployment.resolve().map_err(|problems| {
        let lines = problems.iter().map(ToString::to_string).collect();
        (Exit::BadConfiguration, lines)
    })?;
    let job = document::read(&args.file).map_err(|error| (error.exit(), vec![chain(&error)]))?;
    let manifest = manifest::build(&job, &deployment).map_err(|errors| {
        let lines = errors.problems().iter().map(ToString::to_string);
        (errors.exit(), lines.collect())
    })?;
    to_text(&manifest.to_list(), args.output).map_err(|error| {
        (
            Exit::Defect,
            vec![format!("could not write the list: {error}")],
        )
    })
}

fn chain(error: &DocumentError) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// The list as text, ending with one line break.
fn to_text(list: &Value, format: Format) -> Result<String, String> {
    let mut text = match format {
        Format::Json => serde_json::to_string_pretty(list).map_err(|e| e.to_string())?,
        Format::Yaml => {
            // Job data is one long line, which must stay one.
            let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
            serde_saphyr::to_string_with_options(list, options).map_err(|e| e.to_string())?
        }
    };
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}
