//! `api-launcher run`: one job on this machine, without a platform. `content` packs the folder, `job` makes the job
//! documents, `session` runs their steps, and `follow` follows each executor. `event` and `view` show the run.

pub mod args;
pub(crate) mod artifacts;
mod content;
mod event;
mod folder;
mod follow;
mod job;
mod prompt;
mod session;
mod signals;
pub(crate) mod view;

use std::io;
use std::path::Path;
use std::time::Instant;

use job_contract::{Exit, JobData, chain};
use nix::sys::signal::Signal;
use processes::executor::{self, Program};
use runtime::reaper;

use self::args::RunArgs;
use self::event::{Event, RunStatus, RunSummary};
use self::session::{JobIds, Session, StepOutcome};
use self::signals::Signals;
use self::view::View;
use crate::document;
use crate::failure::Failure;
use crate::terminal::Terminal;

/// How a run came out.
#[derive(Debug)]
struct Conclusion {
    status: RunStatus,
    exit: Exit,
    error: Option<String>,
    hint: Option<String>,
}

impl Conclusion {
    const fn success(status: RunStatus) -> Self {
        Self {
            status,
            exit: Exit::Done,
            error: None,
            hint: None,
        }
    }

    fn stopped(signal: Signal, error: &str) -> Self {
        Self {
            status: RunStatus::Interrupted,
            exit: executor::stop_exit(signal),
            error: Some(error.to_owned()),
            hint: None,
        }
    }

    fn of_failure(outcome: StepOutcome) -> Self {
        Self {
            status: match outcome.stopped_by {
                Some(_) => RunStatus::Interrupted,
                None => RunStatus::Failed,
            },
            exit: outcome.exit,
            error: outcome.error,
            hint: outcome.hint,
        }
    }
}

impl From<Failure> for Conclusion {
    fn from(failure: Failure) -> Self {
        Self {
            status: match failure.exit {
                Exit::Signal(_) => RunStatus::Interrupted,
                _ => RunStatus::Failed,
            },
            exit: failure.exit,
            error: Some(chain(&failure)),
            hint: failure.hint.map(str::to_owned),
        }
    }
}

fn no_signals(error: io::Error) -> Failure {
    Failure::new(Exit::Infrastructure, "could not listen for signals").because(error)
}

/// Carries the run out, shows it, and returns the exit code.
pub fn run(args: &RunArgs) -> u8 {
    let started = Instant::now();
    reaper::adopt_orphans();
    let terminal = Terminal::detect(args.output.format, args.output.color);
    let mut view = View::new(&args.output, terminal);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(no_signals);
    let conclusion = runtime.and_then(|runtime| {
        let result = runtime.block_on(run_in(args, terminal, &mut view));
        // A folder still being packed when the run was stopped is not waited for.
        runtime.shutdown_background();
        result
    });
    let conclusion = conclusion.unwrap_or_else(Conclusion::from);
    view.show(Event::RunFinished(RunSummary {
        status: conclusion.status,
        exit_code: conclusion.exit.code(),
        duration_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        error: conclusion.error,
        hint: conclusion.hint,
    }));
    conclusion.exit.code()
}

async fn run_in(
    args: &RunArgs,
    terminal: Terminal,
    view: &mut View,
) -> Result<Conclusion, Failure> {
    let mut signals = Signals::listen().map_err(no_signals)?;
    match &args.file {
        Some(path) => run_document(args, path, terminal, view, &mut signals).await,
        None => folder::run(args, terminal, view, &mut signals).await,
    }
}

/// One document, one step, with the ids it brings. A record of its job is honoured: a plan's document and then
/// an apply's work as they would on the platform.
async fn run_document(
    args: &RunArgs,
    path: &Path,
    terminal: Terminal,
    view: &mut View,
    signals: &mut Signals,
) -> Result<Conclusion, Failure> {
    let document = document::read(path)?;
    let document = job::with_inputs(document, &args.inputs, |name| std::env::var(name))?;
    let job: &JobData = &document;
    let program = Program::choose(args.local.executor.as_deref())?;
    let data = args.local.data.locate()?.create()?;
    let ids = JobIds {
        organization: &job.organization_id,
        workspace: &job.workspace_id,
        job: &job.job_id,
    };
    let mut session = Session::open(view, signals, program, data, ids, terminal.color)?;
    announce_document(&mut session, path, job);
    session.queue(job)?;
    let outcome = session.run_step(&document).await?;
    Ok(if outcome.exit == Exit::Done {
        Conclusion::success(RunStatus::Completed)
    } else {
        Conclusion::of_failure(outcome)
    })
}

fn announce_document(session: &mut Session<'_>, path: &Path, job: &JobData) {
    let event = Event::RunStarted {
        source: path.display().to_string(),
        organization_id: job.organization_id.clone(),
        workspace_id: job.workspace_id.clone(),
        tool: job.tool().binary(),
        tool_version: job.terraform_version.clone(),
        data_dir: session.data.path().to_owned(),
    };
    session.view.show(event);
}
