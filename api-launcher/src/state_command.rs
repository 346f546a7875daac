//! `api-launcher state`: shows, stores or drops the states that the runs of a workspace could not store. `executor` does it.

use std::io::{self, Write as _};

use artifact_store::StoreArgs;
use clap::{Args, Subcommand};
use data_dir::{DataDirArgs, DataError};
use executor::error::StepError;
use executor::kept_states::command::{self, Action, Workspace};
use job_contract::{Exit, chain};

use crate::terminal::sink;

/// Show, store or drop a state that a run could not store
#[derive(Args, Clone, Debug)]
pub struct StateArgs {
    #[command(subcommand)]
    command: StateCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum StateCommand {
    /// List the states of a workspace that are kept and not stored
    List(WorkspaceArgs),
    /// Store a kept state as the state of its workspace; its runs plan and apply again then
    #[command(after_help = NOTES)]
    Store {
        #[command(flatten)]
        kept: KeptArgs,
        /// Also store it in the place of a state that its run has not read, or that has resources which it lacks
        #[arg(long)]
        force: bool,
    },
    /// Forget a kept state; runs of its workspace plan and apply again, and create what only that state has a second time
    Drop(KeptArgs),
}

const NOTES: &str = "\
Log, report and `explain` of the run have the command with its workspace. It needs the settings of the store, as runs have them.
A stored state that is replaced with --force is kept beside it, as `replaced-by-NAME-DIGEST`.

Example:
  api-launcher state store 2f7b1d7e-6c0f-4c55-8d6b-1b7a4b0f9a01/91c3a5be-0a61-4f0d-9e35-7f6f2f1f3c02";

#[derive(Args, Clone, Debug)]
struct KeptArgs {
    #[command(flatten)]
    workspace: WorkspaceArgs,
    /// Name of the kept state, if there are several
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

#[derive(Args, Clone, Debug)]
struct WorkspaceArgs {
    /// The ids of organization and workspace
    #[arg(value_name = "ORGANIZATION/WORKSPACE", value_parser = ids)]
    ids: (String, String),
    #[command(flatten)]
    data: DataDirArgs,
    #[command(flatten)]
    store: StoreArgs,
}

fn ids(text: &str) -> Result<(String, String), &'static str> {
    let is_plain = |id: &str| !matches!(id, "" | "." | "..") && !id.contains('/');
    let ids = text.split_once('/');
    let ids = ids.filter(|(organization, workspace)| is_plain(organization) && is_plain(workspace));
    let (organization, workspace) = ids.ok_or("expected the two ids with a slash between them")?;
    Ok((organization.to_owned(), workspace.to_owned()))
}

impl StateArgs {
    pub(crate) fn run(&self) -> Exit {
        let (workspace, name, action) = match &self.command {
            StateCommand::List(workspace) => (workspace, None, Action::List),
            StateCommand::Store { kept, force } => {
                let action = Action::Store { force: *force };
                (&kept.workspace, kept.name.as_deref(), action)
            }
            StateCommand::Drop(kept) => (&kept.workspace, kept.name.as_deref(), Action::Drop),
        };
        match workspace.run(name, action) {
            Ok(text) => sink::print(text.as_bytes()),
            Err(error) => {
                // If that stream is gone, the exit code still tells.
                let _ = writeln!(io::stderr(), "error: {error}");
                if let Some(hint) = error.hint() {
                    let _ = writeln!(io::stderr(), "hint: {hint}");
                }
                error.exit()
            }
        }
    }
}

impl WorkspaceArgs {
    fn run(&self, name: Option<&str>, action: Action) -> Result<String, StepError> {
        let data = self.data.locate().map_err(|error| refused(&error))?;
        let settings = self.store.resolve(data.path()).map_err(|error| {
            StepError::new(Exit::BadConfiguration, error.to_string()).with_hint(error.hint())
        })?;
        let (organization, workspace) = &self.ids;
        // A run on this machine has the same lock.
        let _lock = if self.store.is_local() && action != Action::List {
            let lock = data.lock_workspace(organization, workspace);
            Some(lock.map_err(|error| refused(&error))?)
        } else {
            None
        };
        let of = Workspace {
            organization,
            workspace,
            data_dir: data.path(),
            store: &settings,
        };
        command::run(of, name, action)
    }
}

fn refused(error: &DataError) -> StepError {
    let refused = StepError::new(error.exit(), chain(error));
    match error.hint() {
        Some(hint) => refused.with_hint(hint),
        None => refused,
    }
}
