//! The tool's command line, typed: one method for each command that a step needs.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use job_contract::keys::PLAN_FILE;
use job_contract::report::StateLock;
use run_log::LogWriter;
use runtime::regular_file;
use secrecy::ExposeSecret as _;

use crate::child_env::ChildEnv;
use crate::error::StepError;
use crate::process::{self, Capture, Completion, Consumer, Interrupt, Invocation, Limit};
use crate::stop::{Budget, Stop};
use crate::terraform::args::{Options, PlanOutput, VariableFiles, words};
use crate::terraform::event_state::EventState;
use crate::terraform::events::EventStream;
use crate::terraform::lock_error::find_lock;
use crate::terraform::raw_state::MAX_DOCUMENT_BYTES;
use crate::terraform::state_summary::{StateSummary, with_serial};
use crate::terraform::structured::Structured;
use crate::terraform::variables::Definitions;
use crate::tool::ResolvedTool;

pub mod args;
pub mod backend;
pub mod credentials;
mod ephemeral_scan;
pub mod event_state;
pub mod events;
mod hcl;
pub mod lock_error;
pub mod progress;
pub mod raw_state;
pub(crate) mod requirements;
pub(crate) mod resolved_modules;
pub(crate) mod state_summary;
pub mod structured;
pub mod variables;

/// Larger than the output of any small command.
const MAX_TEXT_BYTES: usize = 1024 * 1024;

/// The tool in one working directory.
#[derive(Debug)]
pub struct Terraform<'r> {
    pub tool: &'r ResolvedTool,
    pub working_dir: &'r Path,
    pub stop: &'r Stop,
    pub budget: Budget,
    /// Whether the tool's own rendering is coloured.
    pub color: bool,
    /// Whether a plan writes events, not the tool's own rendering, and whether plan and state are also rendered as JSON.
    pub structured_output: bool,
    pub variables: Definitions,
    pub refresh: bool,
    pub refresh_only: bool,
    /// The state of the operation from its events so far.
    pub events: EventState,
}

/// A state the tool could not store itself.
#[derive(Clone, Debug)]
pub enum ErroredState {
    File(PathBuf),
    /// No disk accepted the state, so the tool printed it.
    Printed(Bytes),
}

impl ErroredState {
    /// What it has; `None` if it is not a whole state.
    pub(crate) fn summary(&self) -> Option<StateSummary> {
        match self {
            Self::File(file) => StateSummary::read(regular_file::open(file).ok()?),
            Self::Printed(state) => StateSummary::read(&state[..]),
        }
    }

    /// Its content.
    pub(crate) fn content(&self) -> io::Result<Bytes> {
        match self {
            Self::File(file) => {
                regular_file::read(file, MAX_DOCUMENT_BYTES as u64).map(Bytes::from)
            }
            Self::Printed(state) => Ok(state.clone()),
        }
    }

    /// The same state with another serial; `None` if it has none.
    pub(crate) fn with_serial(&self, serial: u64) -> io::Result<Option<Self>> {
        let next = with_serial(&self.content()?, serial);
        Ok(next.map(|state| Self::Printed(state.into())))
    }
}

/// The result of a small command.
#[derive(Debug)]
pub struct CommandOutput {
    pub ok: bool,
    pub text: Vec<u8>,
}

impl CommandOutput {
    /// The lock that blocked the command.
    pub fn lock(&self) -> Option<StateLock> {
        if self.ok { None } else { find_lock(&self.text) }
    }
}

impl Terraform<'_> {
    /// `init`, with its output to `consumer`. git uses `ssh_command` for modules over ssh.
    pub async fn init(
        &self,
        env: &ChildEnv,
        ssh_command: Option<&str>,
        consumer: &mut impl Consumer,
    ) -> Result<Completion, StepError> {
        let (tool, version) = (self.tool.tool, &self.tool.version);
        let args = args::init(tool, version, self.color, self.variable_files());
        let mut invocation = self.invocation(env, args);
        if args::init_reads_variables(tool, version) {
            invocation.input = self.ephemeral_variables();
        }
        // Init runs no provider, so a less frequent garbage collection costs little memory. Start-up is most of its
        // work. Operations keep the default, because providers inherit it, and their heaps are large.
        if env.get("GOGC").is_none() {
            invocation.env.push(("GOGC".into(), "400".into()));
        }
        if let Some(command) = ssh_command {
            invocation
                .env
                .push(("GIT_SSH_COMMAND".into(), command.into()));
        }
        process::run(&invocation, &self.interrupted(), consumer).await
    }

    /// `plan`, its output to the log, and its events to the structured output.
    pub async fn plan(
        &self,
        env: &ChildEnv,
        destroy: bool,
        log: LogWriter,
    ) -> Result<(Completion, Structured), StepError> {
        let output = if self.structured_output {
            PlanOutput::Events
        } else {
            PlanOutput::Text { color: self.color }
        };
        self.run_with_events(
            env,
            args::plan(self.options(), destroy, output),
            log,
            Structured::default(),
        )
        .await
    }

    /// `apply` of the plan in the working directory.
    pub async fn apply_plan(
        &self,
        env: &ChildEnv,
        log: LogWriter,
        planned: Structured,
    ) -> Result<(Completion, Structured), StepError> {
        let ephemeral = self.variables.ephemeral.is_some();
        let args = args::apply_plan(&self.tool.version, ephemeral);
        self.run_with_events(env, args, log, planned).await
    }

    /// `apply` without a plan.
    pub async fn apply_direct(
        &self,
        env: &ChildEnv,
        log: LogWriter,
    ) -> Result<(Completion, Structured), StepError> {
        self.run_with_events(
            env,
            args::apply_direct(self.options(), self.color),
            log,
            Structured::default(),
        )
        .await
    }

    /// `destroy`.
    pub async fn destroy(
        &self,
        env: &ChildEnv,
        log: LogWriter,
    ) -> Result<(Completion, Structured), StepError> {
        self.run_with_events(
            env,
            args::destroy(self.options()),
            log,
            Structured::default(),
        )
        .await
    }

    /// The plan for people; `None` when the tool could not render it.
    pub async fn show_plan(&self, env: &ChildEnv) -> Result<Option<Vec<u8>>, StepError> {
        self.document(env, args::show_plan(self.color)).await
    }

    /// The plan for machines.
    pub async fn show_plan_json(&self, env: &ChildEnv) -> Result<Option<Vec<u8>>, StepError> {
        let args = words(["show", "-no-color", "-json", PLAN_FILE]);
        self.document(env, args).await
    }

    /// Any plan for machines.
    pub async fn show_plan_file_json(
        &self,
        env: &ChildEnv,
        plan: &Path,
    ) -> Result<Option<Vec<u8>>, StepError> {
        let mut args = words(["show", "-no-color", "-json"]);
        args.push(plan.into());
        self.document(env, args).await
    }

    /// The state for machines.
    pub async fn show_state_json(&self, env: &ChildEnv) -> Result<Option<Vec<u8>>, StepError> {
        self.document(env, words(["show", "-no-color", "-json"]))
            .await
    }

    /// The raw state.
    pub async fn state_pull(&self, env: &ChildEnv) -> Result<Option<Vec<u8>>, StepError> {
        self.document(env, words(["state", "pull"])).await
    }

    /// Stores a state that the tool could not store itself.
    pub async fn state_push(
        &self,
        env: &ChildEnv,
        state: &ErroredState,
    ) -> Result<CommandOutput, StepError> {
        let (file, input) = match state {
            ErroredState::File(file) => (file.as_os_str(), None),
            ErroredState::Printed(state) => (OsStr::new("-"), Some(state.clone())),
        };
        let args = vec!["state".into(), "push".into(), file.into()];
        let invocation = Invocation {
            input,
            ..self.invocation(env, args)
        };
        self.run_small(invocation).await
    }

    /// Takes the lock on the state and releases it at once. It changes nothing. It fails while another process holds
    /// the lock.
    pub async fn probe_lock(&self, env: &ChildEnv) -> Result<CommandOutput, StepError> {
        // No resource has this address.
        let address = "terraform_data.mayfly_asks_for_the_lock";
        let args = words(["untaint", "-no-color", "-allow-missing", address]);
        self.run_small(self.invocation(env, args)).await
    }

    /// Releases a lock of any holder.
    pub async fn force_unlock(&self, env: &ChildEnv, id: &str) -> Result<CommandOutput, StepError> {
        // `--` ends the flags, because the id is text from the backend.
        let args = words(["force-unlock", "-force", "--", id]);
        self.run_small(self.invocation(env, args)).await
    }

    async fn run_small(&self, invocation: Invocation) -> Result<CommandOutput, StepError> {
        let mut capture = Capture::up_to(MAX_TEXT_BYTES);
        let done = process::run(&invocation, &self.saving(), &mut capture).await?;
        Ok(CommandOutput {
            ok: done.ended.is_success(),
            text: capture.bytes,
        })
    }

    /// Runs a command that reads input variables.
    async fn run_with_events(
        &self,
        env: &ChildEnv,
        args: Vec<OsString>,
        log: LogWriter,
        structured: Structured,
    ) -> Result<(Completion, Structured), StepError> {
        self.events.begin(structured);
        let mut stream = EventStream::new(log, self.events.clone());
        let invocation = Invocation {
            input: self.ephemeral_variables(),
            ..self.invocation(env, args)
        };
        let done = process::run(&invocation, &self.interrupted(), &mut stream).await;
        // The tool has ended, and its events so far count.
        stream.finish().await;
        Ok((done?, self.events.take()))
    }

    async fn document(
        &self,
        env: &ChildEnv,
        args: Vec<OsString>,
    ) -> Result<Option<Vec<u8>>, StepError> {
        let mut capture = Capture::up_to(MAX_DOCUMENT_BYTES);
        // This drops stderr, which contains only warnings and the output of `TF_LOG`.
        let invocation = Invocation {
            prints_document: true,
            ..self.invocation(env, args)
        };
        let done = process::run(&invocation, &self.saving(), &mut capture).await?;
        Ok((done.ended.is_success() && !capture.truncated).then_some(capture.bytes))
    }

    fn options(&self) -> Options<'_> {
        Options {
            version: &self.tool.version,
            refresh: self.refresh,
            refresh_only: self.refresh_only,
            variables: self.variable_files(),
        }
    }

    fn variable_files(&self) -> VariableFiles<'_> {
        VariableFiles {
            file: self.variables.file.as_deref(),
            ephemeral: self.variables.ephemeral.is_some(),
        }
    }

    /// The input of commands that read variables. The plan does not have these.
    fn ephemeral_variables(&self) -> Option<Bytes> {
        let text = self.variables.ephemeral.as_ref()?;
        Some(Bytes::from(text.expose_secret().to_owned()))
    }

    fn invocation(&self, env: &ChildEnv, args: Vec<OsString>) -> Invocation {
        Invocation {
            program: self.tool.path.clone(),
            args,
            dir: self.working_dir.to_owned(),
            env: process::environment(env.iter()),
            input: None,
            prints_document: false,
        }
    }

    /// The limit of commands that a stop order interrupts. The tool passes an interrupt on to its providers itself.
    fn interrupted(&self) -> Limit {
        Limit {
            stop: self.stop.clone(),
            interrupt: Some(Interrupt::Process),
            grace: self.budget.tool,
        }
    }

    /// The limit of commands that save results. They continue after a stop order until the time for saving ends.
    fn saving(&self) -> Limit {
        Limit {
            stop: self.stop.clone(),
            interrupt: None,
            grace: self.budget.saving,
        }
    }
}
