//! The options of `api-launcher run`. Parsing only: nothing here looks at the file system or the environment
//! beyond what clap does for an option's own variable.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use data_dir::DataDirArgs;
use job_contract::{Tool, env};

use crate::terminal::options::{COLOR_HELP, Format, When};

/// Plan a folder and, once you agree, apply that plan.
///
/// The folder is packed and handed to an executor process, the way a pod would get it: once for the plan, and
/// once more for the apply of exactly that plan. State, plans, outputs and logs are kept in the data directory,
/// so a second run of the same folder continues where the first ended.
///
/// With -f, exactly one step is run as the job document says.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct RunArgs {
    /// Folder of the root module [default: the current directory]
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,

    /// Run the one step of this job document, JSON or encoded; `-` reads it from standard input
    #[arg(short = 'f', long = "file", value_name = "FILE", value_hint = ValueHint::FilePath)]
    #[arg(conflicts_with_all = FOLDER_OPTIONS)]
    pub file: Option<PathBuf>,

    #[command(flatten)]
    pub plan: PlanArgs,

    #[command(flatten)]
    pub inputs: InputArgs,

    #[command(flatten)]
    pub local: LocalArgs,

    #[command(flatten)]
    pub output: OutputArgs,
}

/// What a document decides for itself.
const FOLDER_OPTIONS: [&str; 8] = [
    "dir",
    "destroy",
    "plan_only",
    "auto_approve",
    "refresh_only",
    "no_refresh",
    "root",
    "var_files",
];

/// What to plan, and what may happen without asking.
#[derive(Args, Debug)]
pub struct PlanArgs {
    /// Plan the removal of everything the folder's state holds
    #[arg(long)]
    pub destroy: bool,

    /// Plan, and stop there
    #[arg(long, conflicts_with = "auto_approve")]
    pub plan_only: bool,

    /// Apply the plan without asking
    #[arg(long)]
    pub auto_approve: bool,

    /// Only update the state to match what exists
    #[arg(long, conflicts_with_all = ["destroy", "no_refresh"])]
    pub refresh_only: bool,

    /// Plan from the state as it is, without asking the providers what exists
    #[arg(long)]
    pub no_refresh: bool,
}

/// What the run is given.
#[derive(Args, Debug)]
#[command(next_help_heading = "Inputs")]
pub struct InputArgs {
    /// Set an input variable; wins over every file (repeatable)
    #[arg(long = "var", value_name = "NAME=VALUE", value_parser = assignment)]
    pub vars: Vec<Assignment>,

    /// Take input variables from a .tfvars or .tfvars.json file; later files win (repeatable)
    #[arg(long = "var-file", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub var_files: Vec<PathBuf>,

    /// Set a variable in the environment of the tool, or pass one of yours on; nothing else of your
    /// environment reaches the tool (repeatable)
    #[arg(long = "env", value_name = "NAME[=VALUE]", value_parser = env_variable)]
    pub envs: Vec<EnvVariable>,

    /// Which tool [default: OpenTofu for folders with .tofu files or when it alone is on PATH, else Terraform]
    #[arg(long, value_enum)]
    pub tool: Option<ToolArg>,

    /// Version of the tool: exact, or a range such as "~> 1.9"; an installed one that fits is preferred
    /// [default: any]
    #[arg(long, value_name = "RANGE")]
    pub tool_version: Option<String>,

    /// Pack everything below this folder, which must hold DIR [default: DIR, and what its local modules and
    /// links refer to]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// Where things lie on this machine.
#[derive(Args, Debug)]
#[command(next_help_heading = "This machine")]
pub struct LocalArgs {
    #[command(flatten)]
    pub data: DataDirArgs,

    /// Another executor binary than the built-in one
    #[arg(long, value_name = "PATH", env = env::EXECUTOR, value_hint = ValueHint::ExecutablePath)]
    pub executor: Option<PathBuf>,
}

/// How the run is shown.
#[derive(Args, Debug)]
#[command(next_help_heading = "Display")]
pub struct OutputArgs {
    /// `json` prints one event a line and nothing else (docs/run-events.md)
    #[arg(long = "output", value_enum, value_name = "FORMAT", default_value_t)]
    pub format: Format,

    /// When to use colours
    #[arg(long, value_enum, value_name = "WHEN", default_value_t, help = COLOR_HELP)]
    pub color: When,

    /// Show the executor's own informational messages and the shortest phases too
    #[arg(short, long)]
    pub verbose: bool,
}

const EXAMPLES: &str = "\
Examples:
  api-launcher run examples/hello                   plan, show, ask, apply
  api-launcher run examples/hello --auto-approve    the same without asking, as in CI
  api-launcher run examples/hello --destroy         remove it again
  api-launcher run --plan-only --var region=eu-west-1 --var-file prod.tfvars
  api-launcher run --env AWS_PROFILE --env AWS_REGION=eu-west-1
  api-launcher run --tool tofu --tool-version '~> 1.9'
  api-launcher run -f job.json                      one step, exactly as the document says

Without a terminal and without --auto-approve the run plans, says how to apply, and exits 0.
Ctrl-C stops gracefully: the tool is interrupted and state is stored. Ctrl-C again kills.

Not packed: .git, .terraform, terraform.tfstate*, crash logs, and what .terraformignore names.
Exit codes: see `api-launcher --help`.";

/// `NAME=VALUE`.
#[derive(Clone, PartialEq, Eq)]
pub struct Assignment {
    pub name: String,
    /// May be secret.
    pub value: String,
}

impl std::fmt::Debug for Assignment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Assignment").field(&self.name).finish()
    }
}

/// `NAME=VALUE`, or the caller's own `NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnvVariable {
    Set(Assignment),
    Forward(String),
}

fn assignment(text: &str) -> Result<Assignment, &'static str> {
    let Some((name, value)) = text.split_once('=') else {
        return Err("expected NAME=VALUE");
    };
    let name = name.trim();
    let begins = name.starts_with(|first: char| first.is_alphabetic() || first == '_');
    if !begins
        || !name
            .chars()
            .all(|c| c.is_alphanumeric() || matches!(c, '_' | '-'))
    {
        return Err(
            "expected NAME=VALUE, and a NAME of letters, digits, `_` and `-` that begins with a letter or `_`",
        );
    }
    Ok(Assignment {
        name: name.to_owned(),
        value: value.to_owned(),
    })
}

fn env_variable(text: &str) -> Result<EnvVariable, &'static str> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok(EnvVariable::Set(Assignment {
            name: name.to_owned(),
            value: value.to_owned(),
        })),
        None if !text.is_empty() => Ok(EnvVariable::Forward(text.to_owned())),
        _ => Err("expected NAME=VALUE or NAME"),
    }
}

/// Terraform or OpenTofu, by the name of the binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ToolArg {
    Terraform,
    Tofu,
}

impl From<ToolArg> for Tool {
    fn from(tool: ToolArg) -> Self {
        match tool {
            ToolArg::Terraform => Self::Terraform,
            ToolArg::Tofu => Self::OpenTofu,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_may_hold_equal_signs_and_a_name_may_not_be_empty() {
        let parsed = assignment("a=b=c").unwrap();
        assert_eq!((parsed.name.as_str(), parsed.value.as_str()), ("a", "b=c"));
        for no_name in ["=x", "1st=x", "a b=x", "a.b=x"] {
            assert!(assignment(no_name).is_err(), "{no_name}");
        }
        assert_eq!(
            env_variable("HOME"),
            Ok(EnvVariable::Forward("HOME".into()))
        );
    }

    #[test]
    fn values_do_not_show_in_debug_output() {
        let args = format!("{:?}", env_variable("TOKEN=hunter2"));
        assert!(args.contains("TOKEN") && !args.contains("hunter2"));
    }
}
